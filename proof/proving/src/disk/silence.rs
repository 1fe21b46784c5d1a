//! Stores that never answer: sessions in which one operation of a lane, or all from one on, gets no
//! answer.
//!
//! ```text
//!   requests, one after the other ─▶ one does not complete ─▶ the queue is dropped and gives up
//!     ─▶ other queues still read; no flush and no close succeeds
//!     ─▶ the operation is then carried out, fails, or is dropped
//!     ─▶ the files are judged, also after a power cut
//! ```
//!
//! What must hold: the queue can be dropped. Memory that the lane still uses is not reused. Nothing
//! counts as durable afterwards. Data that was durable before is still there, and the disk opens
//! again.

use super::{DiskCase, DiskTruth, session::Session};
use crate::{
    contents::SECTOR_BYTES,
    cut::{CutMode, Cutter},
    dice::Dice,
    fault::{Fault, FaultKind, Persistence},
    ledger::{Version, stamp},
    stage::{Case, Depth, Outcome, Stage},
    watchdog::Watchdog,
    world::{Afterwards, World},
};
use diskwright_disk::Disk;
use diskwright_store::{BlockDevice, BlockQueue, EngineKind, IoBuf, QueueOptions, Request, SharedRing};
use std::{sync::Arc, thread, time::Duration};

/// How often a queue is reaped, with a pause, after an operation got no answer, before the request
/// counts as stuck.
const LOOKS: u32 = 4;
const PAUSE: Duration = Duration::from_micros(300);

/// Number of buffers that are allocated after a queue has given up. They would overlap memory that
/// was freed too early.
const BUFFERS: usize = 64;

/// What was tested.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// Operations of lanes in one session.
    pub operations: u64,
    /// Runs in which an operation got no answer.
    pub runs: u64,
    /// Operations that were carried out, failed or dropped after the queue was dropped.
    pub late: u64,
}

/// One request of the session, and its change: first sector, number of sectors, version.
struct Step {
    request: Request,
    changes: Option<(u64, u64, Version)>,
}

impl DiskCase {
    fn silent_steps(&self) -> Vec<Step> {
        let window = |number: usize| self.windows[number.min(self.windows.len() - 1)];
        let (first, second) = (window(0), window(1));
        let mut steps = Vec::new();
        let mut write = |from: u64, count: u64, fua: bool| {
            let version = steps.len() as Version + 1;
            let mut buf = IoBuf::new((count * SECTOR_BYTES) as usize);
            stamp(&mut buf, from, version);
            let request = Request { fua, ..Request::write(from * SECTOR_BYTES, buf.len(), buf, 0) };
            steps.push(Step { request, changes: Some((from, count, version)) });
        };
        write(first.first + 1, 2, false);
        write(second.first, second.count, false);
        write(first.first + 4, 1, true);
        write(second.first + 3, 5, false);
        let len = (first.count * SECTOR_BYTES) as usize;
        for request in [
            Request::flush(0),
            Request::read(first.first * SECTOR_BYTES, len, IoBuf::new(len), 0),
            Request::discard(second.first * SECTOR_BYTES, second.count * SECTOR_BYTES, 0),
            Request::write_zeroes(first.first * SECTOR_BYTES, 2 * SECTOR_BYTES, 0),
            Request::flush(0),
        ] {
            let zeroes = request.buf.is_none() && request.len_bytes > 0;
            let (from, count) = (request.offset_bytes / SECTOR_BYTES, request.len_bytes / SECTOR_BYTES);
            steps.push(Step { request, changes: zeroes.then_some((from, count, 0)) });
        }
        steps
    }

    /// Runs the session until a request does not complete. Returns whether that happened.
    fn play_until_silent(
        &self,
        stage: &Stage<DiskTruth>,
        queue: &mut dyn BlockQueue,
        ring: Option<&SharedRing>,
        truth: &mut DiskTruth,
    ) -> Outcome<bool> {
        let mut done = Vec::new();
        for Step { request, changes } in self.silent_steps() {
            let mark = truth.ledger.mark();
            let announced = changes.map(|(first, count, version)| truth.ledger.announce(first, count, version));
            stage.record(truth.clone());
            let is_flush = request.buf.is_none() && request.len_bytes == 0;
            let fua = request.fua;
            queue.push(request).map_err(|refused| refused.reason.to_string())?;
            let mut looks = 0;
            while done.is_empty() {
                queue.reap(0, &mut done).map_err(|error| error.to_string())?;
                match ring.filter(|_| done.is_empty()) {
                    Some(ring) => ring.wait_for(PAUSE).map_err(|error| error.to_string())?,
                    None if done.is_empty() => thread::sleep(PAUSE),
                    None => {}
                }
                looks = if stage.world.strikes().0 > 0 { looks + 1 } else { 0 };
                if looks > LOOKS && done.is_empty() {
                    return Ok(true);
                }
            }
            let completion = done.pop().ok_or("no request ended")?;
            completion.result.map_err(|error| format!("a request failed: {error}"))?;
            if let Some(write) = announced {
                truth.ledger.acknowledge(write, fua);
            }
            if is_flush {
                truth.ledger.flushed(mark);
            }
            stage.record(truth.clone());
        }
        Ok(false)
    }

    /// One session with `fault`. Returns whether a request got stuck, the number of operations
    /// without an answer, and the number of lane operations.
    fn silent_once(&self, fault: Fault, afterwards: Afterwards, shares_ring: bool) -> Outcome<(bool, u64, u64)> {
        let _watch = Watchdog::over(format!("{}, {fault:?} ({afterwards:?})", self.name));
        let world = World::default();
        self.prepare(&world, 1)?;
        world.settle();
        let stage = Stage::new(world);
        let mut truth = self.new_truth(&stage.world)?;
        stage.record(truth.clone());
        let disk = self.open_disk(&stage.world, true)?;
        stage.world.plan(Some(fault));
        let ring = shares_ring.then(|| SharedRing::new(64, None)).transpose().map_err(|error| error.to_string())?;
        let options = QueueOptions { depth: 4, engine: EngineKind::Uring, slab: None, ring: ring.as_ref() };
        let mut queue = disk.open_queue(&options).map_err(|error| error.to_string())?;
        let silent = self.play_until_silent(&stage, &mut *queue, ring.as_ref(), &mut truth)?;
        let operations = stage.world.lane_operations();
        drop(queue);
        let late = if silent { self.after_silence(&stage, &disk, &truth, afterwards)? } else { 0 };
        let closed = disk.close();
        if closed.is_ok() == silent {
            return Err(format!("close returned {closed:?}, although {late} operations got no answer"));
        }
        drop(disk);
        stage.world.plan(None);
        self.judge_silence(&stage, fault.at)?;
        Ok((silent, late, operations))
    }

    /// Checks the disk after a queue has given up. The disk is still open.
    fn after_silence(
        &self,
        stage: &Stage<DiskTruth>,
        disk: &Arc<Disk>,
        truth: &DiskTruth,
        afterwards: Afterwards,
    ) -> Outcome<u64> {
        let world = &stage.world;
        world.plan(None);
        let lent = world.silent_memory();
        let mut buffers = Vec::new();
        for len in [SECTOR_BYTES, 4096, self.windows[0].count * SECTOR_BYTES, self.windows[1].count * SECTOR_BYTES] {
            for _ in 0..BUFFERS {
                let mut buf = IoBuf::new(len as usize);
                buf.fill(0xa5);
                buffers.push(buf);
            }
        }
        let overlaps = |buf: &IoBuf| {
            let new = buf.as_ptr_range();
            lent.iter().any(|lent| lent.start < new.end && new.start < lent.end)
        };
        if buffers.iter().any(overlaps) {
            return Err("memory that a lane still uses was allocated again".into());
        }
        // Other queues must read the acknowledged data.
        let by_calls = QueueOptions { depth: 1, engine: EngineKind::Sync, slab: None, ring: None };
        let shown = Session::of(self, Arc::clone(disk))?.read_windows()?;
        truth.ledger.judge(&shown, false).map_err(|error| format!("while an operation has no answer, {error}"))?;
        let late = world.end_silence(afterwards) as u64;
        if buffers.iter().any(|buf| buf.iter().any(|&byte| byte != 0xa5)) {
            return Err("a late operation wrote into memory of another buffer".into());
        }
        let mut queue = disk.open_queue(&by_calls).map_err(|error| error.to_string())?;
        queue.push(Request::flush(0)).map_err(|refused| refused.reason.to_string())?;
        let mut done = Vec::new();
        queue.reap(1, &mut done).map_err(|error| error.to_string())?;
        if done.pop().is_some_and(|completion| completion.result.is_ok()) {
            return Err("a flush succeeded although a request was lost".into());
        }
        Ok(late)
    }

    fn judge_silence(&self, stage: &Stage<DiskTruth>, seed: u64) -> Outcome {
        let (start, history) = stage.world.history();
        let truths = stage.truths();
        let mut cutter = Cutter::new(start, &history, seed);
        while cutter.next().is_some() {
            cutter.step();
        }
        let Some(truth) = cutter.truth.and_then(|number| truths.get(number)) else { return Ok(()) };
        let depth = Depth { resume: true, cut_again: 0 };
        let now = World::of(stage.world.snapshot());
        self.judge(&now, truth, seed, depth).map_err(|error| format!("afterwards, {error}"))?;
        let mut dice = Dice::new(seed, 0x51e);
        for mode in [CutMode::Nothing, CutMode::Whole(50), CutMode::Sectors(50)] {
            let left = cutter.state_after_cut(mode, &mut dice);
            self.judge(&World::of(left), truth, seed, depth)
                .map_err(|error| format!("after a power cut that followed ({mode:?}), {error}"))?;
        }
        Ok(())
    }

    /// Leaves each operation of the lanes without an answer, in turn: alone, and together with all
    /// later ones.
    ///
    /// # Errors
    /// The first broken promise.
    pub fn hunt_silent(&self) -> Outcome<Tally> {
        let fault = |at, persistence| Fault { kind: FaultKind::Silent, at, persistence };
        let never = fault(u64::MAX, Persistence::Once);
        let (silent, _, operations) = self.silent_once(never, Afterwards::Failed, false)?;
        if silent {
            return Err("a request did not complete although all operations were answered".into());
        }
        let mut tally = Tally { operations, ..Tally::default() };
        for at in 1..=operations {
            let all = [
                (Persistence::Once, Afterwards::CarriedOut, false),
                (Persistence::Once, Afterwards::Forgotten, true),
                (Persistence::ForEver, Afterwards::CarriedOut, true),
                (Persistence::ForEver, Afterwards::Failed, false),
            ];
            for (persistence, afterwards, shares_ring) in all {
                let fault = fault(at, persistence);
                let (silent, late, _) = self
                    .silent_once(fault, afterwards, shares_ring)
                    .map_err(|error| format!("{fault:?} of {operations}, {afterwards:?}: {error}"))?;
                tally.runs += u64::from(silent);
                tally.late += late;
            }
        }
        Ok(tally)
    }
}
