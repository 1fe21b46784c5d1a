//! Threads that issue all kinds of requests to the same sectors at the same time, and record the
//! times.

use super::{Effect, Event, judge};
use crate::{
    contents::SECTOR_BYTES,
    dice::Dice,
    ledger::{Version, stamp},
    stage::Outcome,
    watchdog::Watchdog,
};
use diskwright_store::{
    BlockDevice, Blocking, Completion, EngineKind, IoBuf, Operation, QueueOptions, Request, SharedRing, sync::thread,
};
use std::{
    collections::HashMap,
    fmt,
    sync::atomic::{AtomicU64, Ordering},
};

/// A logical clock, shared by all threads.
#[derive(Debug, Default)]
pub struct Clock(AtomicU64);

impl Clock {
    /// The next time, from 1 on.
    pub fn tick(&self) -> u64 {
        self.0.fetch_add(1, Ordering::SeqCst) + 1
    }
}

/// What the threads do.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// Number of threads.
    pub threads: u64,
    /// Requests of each thread.
    pub steps: u64,
    /// Requests in flight of each thread.
    pub depth: usize,
    /// The I/O engine.
    pub engine: EngineKind,
    /// Sectors of a block. Some requests discard or zero whole blocks.
    pub block_sectors: u64,
    /// Maximum number of sectors of a request that is not for whole blocks.
    pub sectors_max: u64,
    /// Whether every second queue is on a shared ring. Work that must wait is then done by the
    /// disk's loader.
    pub shared_rings: bool,
    /// Whether some discards cover the whole disk.
    pub sweeps: bool,
    /// How many requests of each kind.
    pub mix: Mix,
    /// Seed of the random choices. Rounds on one disk must have consecutive seeds.
    pub seed: u64,
}

impl Plan {
    /// The version that a step writes. It is unique within a round and within consecutive rounds.
    fn version(&self, me: u64, step: u64) -> Version {
        let number = self.seed.wrapping_mul(self.threads).wrapping_add(me).wrapping_mul(self.steps).wrapping_add(step);
        (number as Version).max(1)
    }
}

/// Out of 64 requests, the number of each kind. The others are writes.
#[derive(Debug, Clone, Copy)]
pub struct Mix {
    /// Flushes.
    pub flushes: u64,
    /// Discards.
    pub discards: u64,
    /// Zeroes.
    pub zeroes: u64,
    /// Reads.
    pub reads: u64,
}

impl Mix {
    /// Mostly reads and writes.
    pub const USUAL: Self = Self { flushes: 1, discards: 5, zeroes: 4, reads: 24 };
    /// Blocks are often freed and allocated.
    pub const CHURNING: Self = Self { flushes: 12, discards: 14, zeroes: 4, reads: 12 };
}

/// What was tested.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// Completed requests.
    pub requests: u64,
    /// Sectors that were read and judged.
    pub sectors: u64,
}

impl std::ops::AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.requests += other.requests;
        self.sectors += other.sectors;
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} requests, {} sectors read and judged", self.requests, self.sectors)
    }
}

/// Runs one thread; `me` is its number, from 0. Returns its writes and reads.
///
/// # Errors
/// A request that the device has refused or failed.
pub fn drive(device: &dyn BlockDevice, plan: &Plan, me: u64, clock: &Clock) -> Outcome<Vec<Event>> {
    let text = |error: std::io::Error| error.to_string();
    let mut dice = Dice::new(plan.seed, 0x11fe + me);
    let ring = if plan.shared_rings && me % 2 == 1 { Some(SharedRing::new(64, None).map_err(text)?) } else { None };
    let options =
        QueueOptions { depth: plan.depth, engine: plan.engine, ring: ring.as_ref(), ..QueueOptions::default() };
    let mut queue = device.open_queue(&options).map_err(text)?;
    let geometry = device.geometry();
    let unit = u64::from(geometry.logical_sector_bytes) / SECTOR_BYTES;
    let all = geometry.size_bytes / SECTOR_BYTES;
    let mut flights: HashMap<u64, Event> = HashMap::new();
    let (mut events, mut done) = (Vec::new(), Vec::new());
    let mut settle = |done: &mut Vec<Completion>, flights: &mut HashMap<u64, Event>| -> Outcome {
        let end = clock.tick();
        for completion in done.drain(..) {
            completion.result.map_err(|error| format!("request {} of thread {me}: {error}", completion.tag))?;
            let Some(mut event) = flights.remove(&completion.tag) else { continue };
            event.end = end;
            if let (Effect::Read(shown), Some(buf)) = (&mut event.act, completion.buf) {
                *shown = buf[..(event.count * SECTOR_BYTES) as usize].to_vec();
            }
            events.push(event);
        }
        Ok(())
    };
    for step in 0..plan.steps {
        while queue.in_flight() == plan.depth {
            queue.reap(1, &mut done).map_err(text)?;
            settle(&mut done, &mut flights)?;
        }
        let version = plan.version(me, step);
        let (operation, first, count) = choose(&mut dice, plan, all, unit);
        let (offset_bytes, len_bytes) = (first * SECTOR_BYTES, count * SECTOR_BYTES);
        // A flush has no payload, but a buffer cannot be empty.
        let mut buf = IoBuf::new((len_bytes as usize).max(1));
        let (act, request) = match operation {
            Operation::Flush => (None, Request::flush(step)),
            Operation::Read => {
                (Some(Effect::Read(Vec::new())), Request::read(offset_bytes, len_bytes as usize, buf, step))
            }
            Operation::WriteZeroes => (Some(Effect::Write(0)), Request::write_zeroes(offset_bytes, len_bytes, step)),
            Operation::Discard => (Some(Effect::Write(0)), Request::discard(offset_bytes, len_bytes, step)),
            Operation::Write => {
                stamp(&mut buf[..len_bytes as usize], first, version);
                (Some(Effect::Write(version)), Request::write(offset_bytes, len_bytes as usize, buf, step))
            }
        };
        if let Some(act) = act {
            flights.insert(step, Event { act, first, count, begin: clock.tick(), end: 0 });
        }
        let fua = operation != Operation::Read && operation != Operation::Flush && dice.percent(2);
        queue.push(Request { fua, ..request }).map_err(|refused| refused.reason.to_string())?;
    }
    while queue.in_flight() > 0 {
        queue.reap(1, &mut done).map_err(text)?;
        settle(&mut done, &mut flights)?;
    }
    Ok(events)
}

fn choose(dice: &mut Dice, plan: &Plan, all: u64, unit: u64) -> (Operation, u64, u64) {
    let Mix { flushes, discards, zeroes, reads } = plan.mix;
    let operation = match dice.below(64) {
        number if number < flushes => return (Operation::Flush, 0, 0),
        number if number < flushes + discards => Operation::Discard,
        number if number < flushes + discards + zeroes => Operation::WriteZeroes,
        number if number < flushes + discards + zeroes + reads => Operation::Read,
        _ => Operation::Write,
    };
    let zeroes = matches!(operation, Operation::Discard | Operation::WriteZeroes);
    if plan.sweeps && operation == Operation::Discard && dice.percent(10) {
        return (operation, 0, all);
    }
    if zeroes && dice.percent(60) {
        let block = dice.below(all.div_ceil(plan.block_sectors));
        let first = block * plan.block_sectors;
        return (operation, first, plan.block_sectors.min(all - first));
    }
    let first = dice.below(all / unit) * unit;
    let most = if dice.percent(75) { plan.sectors_max.div_ceil(8) } else { plan.sectors_max };
    let count = (1 + dice.below(most.div_ceil(unit))) * unit;
    (operation, first, count.min(all - first))
}

/// Writes a part of every second block and discards the others, after all threads have ended. This
/// hangs if a block was not released.
fn sweep(device: &dyn BlockDevice, plan: &Plan, clock: &Clock, events: &mut Vec<Event>) -> Outcome {
    let text = |error: std::io::Error| error.to_string();
    let mut queue = Blocking::open(device, plan.engine).map_err(text)?;
    let geometry = device.geometry();
    let unit = u64::from(geometry.logical_sector_bytes) / SECTOR_BYTES;
    let all = geometry.size_bytes / SECTOR_BYTES;
    for (step, first) in (0..all).step_by(plan.block_sectors as usize).enumerate() {
        let (act, count) = match step % 2 {
            // Far from the versions of the threads.
            0 => (1 << 31 | (plan.seed as Version).wrapping_mul(4096).wrapping_add(step as Version) >> 1, unit),
            _ => (0, plan.block_sectors.min(all - first)),
        };
        let begin = clock.tick();
        if act == 0 {
            queue.discard(first * SECTOR_BYTES, count * SECTOR_BYTES).map_err(text)?;
        } else {
            let mut bytes = vec![0; (count * SECTOR_BYTES) as usize];
            stamp(&mut bytes, first, act);
            queue.write(first * SECTOR_BYTES, &bytes, false).map_err(text)?;
        }
        events.push(Event { act: Effect::Write(act), first, count, begin, end: clock.tick() });
    }
    Ok(())
}

/// One round: runs all threads, then reads the whole disk. The contents read become the `base` of
/// the next round.
///
/// # Errors
/// A result that a linearizable disk cannot give, or a failed request.
pub fn round(device: &dyn BlockDevice, plan: &Plan, base: &mut Vec<u8>) -> Outcome<Tally> {
    round_beside(device, plan, base, || Ok(()))
}

/// As [`round`], while `beside` does something else to the device in the calling thread. It may
/// grow the device.
///
/// # Errors
/// As [`round`], and the error of `beside`.
pub fn round_beside(
    device: &dyn BlockDevice,
    plan: &Plan,
    base: &mut Vec<u8>,
    beside: impl FnOnce() -> Outcome,
) -> Outcome<Tally> {
    let _watch = Watchdog::over(format!("a round of {} threads on a disk, seed {}", plan.threads, plan.seed));
    let clock = Clock::default();
    let outcomes: Vec<Outcome<Vec<Event>>> = thread::scope(|scope| {
        let clock = &clock;
        let threads: Vec<_> = (0..plan.threads).map(|me| scope.spawn(move || drive(device, plan, me, clock))).collect();
        let done = beside().map(|()| Vec::new());
        let ended = threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err("a thread panicked".into())));
        ended.chain([done]).collect()
    });
    let mut events = Vec::new();
    for outcome in outcomes {
        events.extend(outcome?);
    }
    sweep(device, plan, &clock, &mut events)?;
    let begin = clock.tick();
    // The added space reads as zeros.
    base.resize(device.geometry().size_bytes as usize, 0);
    let mut shown = vec![0; base.len()];
    let mut queue = Blocking::open(device, plan.engine).map_err(|error| error.to_string())?;
    queue.read(0, &mut shown).map_err(|error| error.to_string())?;
    let count = shown.len() as u64 / SECTOR_BYTES;
    events.push(Event { act: Effect::Read(shown.clone()), first: 0, count, begin, end: clock.tick() });
    let requests = events.len() as u64;
    let sectors = judge(base, events)?;
    *base = shown;
    Ok(Tally { requests, sectors })
}
