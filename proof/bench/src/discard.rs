//! A discard of 1 TiB of allocated blocks, and the latency of reads at the same time.
//!
//! ```text
//!   1 TiB of blocks, allocated ──────────────────┐ 1 GiB of data
//!   └─ one discard, pushed to a queue of its own  └─ 4K random reads at QD 8 on another queue
//! ```
//!
//! Blocks are allocated by writing 4 KiB to each. Their space would not fit the machines on which
//! this runs, so it is given back to the file system while the disk is closed; in the disk's tables
//! they stay allocated. So the row measures the disk, and not how fast the file system frees
//! extents; its note says so.
//!
//! The reads without a discard follow it, and last as long, at least a second. The bar is on the
//! ratio of the two 99th percentiles.

use diskwright_lab::{
    LabError, Result,
    acceptance::{Bar, Check, Context, RowOutcome},
    progress::{Progress, report},
    scratch,
    targets::{Container, Target, create_with_blocks},
};
use diskwright_stats::numbers::{bytes, duration, grouped};
use diskwright_store::{
    BlockDevice, BlockQueue, Blocking, CacheMode, EngineKind, ExtentKind, FileRange, FileStore, IoBuf, LockMode,
    OpenOptions, QueueOptions, Request, Store, Zeroing,
};
use rand_xoshiro::{
    Xoshiro256PlusPlus,
    rand_core::{Rng, SeedableRng},
};
use std::{
    io,
    ops::Range,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

const BLOCK_BYTES: u64 = 2 << 20;
const READ_BYTES: u64 = 4096;
const QUEUE_DEPTH: usize = 8;
const DATA_BYTES: u64 = 1 << 30;
/// The disk is made in steps of this many bytes, whose blocks have their space at the same time.
const STEP_BYTES: u64 = 8 << 30;
const BASELINE_LEAST: Duration = Duration::from_secs(1);
const BAR: Bar = Bar::AtMost(2.0);

pub(crate) fn beside_reads(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    let discarded_bytes: u64 = context.pick(64 << 30, 1 << 40);
    context.scratch.need("this disk while it is made", STEP_BYTES + DATA_BYTES + (2 << 30))?;
    let engine = context.options.engine;
    let rounds = context.rounds(context.pick(2, 3));
    let (mut with, mut without, mut times) = (Vec::new(), Vec::new(), Vec::new());
    let mut reads = 0;
    for round in 0..rounds {
        let dir = context.scratch.folder("discard")?;
        let path = prepare(context, &dir, discarded_bytes, (round, rounds), progress)?;
        let target = Target::open(Container::VhdxDynamic, path.clone(), CacheMode::Direct, engine)?;
        report(progress, "measure", round as u64, rounds as u64, "reads beside the discard")?;
        let span = discarded_bytes..discarded_bytes + DATA_BYTES;
        let failed = || LabError::file("read or discard", &path);
        let device = target.device();
        let is_over = AtomicBool::new(false);
        let (took, beside) = thread::scope(|scope| {
            let discard = scope.spawn(|| {
                // The reads have begun by then.
                thread::sleep(Duration::from_millis(20));
                let took = discard(device, engine, discarded_bytes);
                is_over.store(true, Ordering::Release);
                took
            });
            let beside = read_until(device, engine, span.clone(), 1, &mut || is_over.load(Ordering::Acquire));
            (discard.join().expect("a discard does not panic"), beside)
        });
        let (took, mut beside) = (took.map_err(failed())?, beside.map_err(failed())?);
        let end = Instant::now() + took.max(BASELINE_LEAST);
        let mut alone = read_until(device, engine, span, 2, &mut || Instant::now() >= end).map_err(failed())?;
        check_all_is_given_back(device, discarded_bytes).map_err(failed())?;
        target.close()?;
        reads += beside.len();
        with.push(percentile_99_ns(&mut beside));
        without.push(percentile_99_ns(&mut alone));
        times.push(duration(took.as_nanos() as f64));
        std::fs::remove_dir_all(&dir).map_err(LabError::file("remove", &dir))?;
        context.scratch.settle()?;
    }
    let name = format!("p99 of 4K random reads at QD 8 beside a discard of {}", bytes(discarded_bytes));
    let check = Check::ratio(name, "ns", &with, &without, BAR);
    let notes = vec![
        format!(
            "VHDX dynamic, {} blocks of 2 MiB; the discard took {}; {} reads beside it",
            grouped((discarded_bytes / BLOCK_BYTES) as f64),
            times.join(", "),
            grouped(reads as f64)
        ),
        "the space of the blocks had been given back to the file system before: its own work on 1 TiB is not in this"
            .into(),
    ];
    Ok(RowOutcome { checks: vec![check], notes, ..RowOutcome::default() })
}

/// Makes a disk whose blocks are allocated up to `allocated_bytes`, with data behind them.
fn prepare(
    context: &Context<'_>,
    dir: &Path,
    allocated_bytes: u64,
    (round, rounds): (usize, usize),
    progress: &mut dyn Progress,
) -> Result<std::path::PathBuf> {
    let engine = context.options.engine;
    let size_bytes = allocated_bytes + DATA_BYTES;
    let path = create_with_blocks(Container::VhdxDynamic, dir, size_bytes, Some(BLOCK_BYTES as u32))?;
    for from_bytes in (0..allocated_bytes).step_by(STEP_BYTES as usize) {
        let done = (round as u64 * allocated_bytes + from_bytes) >> 20;
        report(progress, "prepare", done, (rounds as u64 * allocated_bytes) >> 20, "allocating blocks")?;
        let end_bytes = (from_bytes + STEP_BYTES).min(allocated_bytes);
        let target = Target::open(Container::VhdxDynamic, path.clone(), CacheMode::Direct, engine)?;
        let mut extents = Vec::new();
        touch_blocks(target.device(), engine, from_bytes..end_bytes)
            .and_then(|()| target.device().extents(from_bytes, end_bytes - from_bytes, &mut extents))
            .map_err(LabError::file("write to", &path))?;
        target.close()?;
        let spaces = extents.iter().filter_map(|extent| {
            Some(FileRange { offset_bytes: extent.file_offset_bytes?, len_bytes: extent.len_bytes })
        });
        give_space_back(&path, spaces).map_err(LabError::file("give space back of", &path))?;
    }
    let target = Target::open(Container::VhdxDynamic, path.clone(), CacheMode::Direct, engine)?;
    let mut device = Blocking::open(target.device(), engine).map_err(LabError::file("open", &path))?;
    let mut data = vec![0; BLOCK_BYTES as usize];
    for offset_bytes in (allocated_bytes..size_bytes).step_by(BLOCK_BYTES as usize) {
        diskwright_load::data::fill(1, offset_bytes, &mut data);
        device.write(offset_bytes, &data, false).map_err(LabError::file("write to", &path))?;
    }
    drop(device);
    target.close()?;
    scratch::settle(dir)?;
    Ok(path)
}

/// Writes 4 KiB into every block of a range.
fn touch_blocks(device: &dyn BlockDevice, engine: EngineKind, range: Range<u64>) -> io::Result<()> {
    let mut next_bytes = range.start;
    drive(device, engine, 32, &mut |buf, tag| {
        (next_bytes < range.end).then(|| {
            let offset_bytes = next_bytes;
            next_bytes += BLOCK_BYTES;
            Request::write(offset_bytes, READ_BYTES as usize, buf, tag)
        })
    })
    .map(drop)
}

/// Reads at random until `is_over`. Returns every latency, nanoseconds.
fn read_until(
    device: &dyn BlockDevice,
    engine: EngineKind,
    span: Range<u64>,
    seed: u64,
    is_over: &mut dyn FnMut() -> bool,
) -> io::Result<Vec<u64>> {
    let mut dice = Xoshiro256PlusPlus::seed_from_u64(seed);
    let places = (span.end - span.start) / READ_BYTES;
    drive(device, engine, QUEUE_DEPTH, &mut |buf, tag| {
        (!is_over()).then(|| {
            let offset_bytes = span.start + dice.next_u64() % places * READ_BYTES;
            Request::read(offset_bytes, READ_BYTES as usize, buf, tag)
        })
    })
}

/// Keeps `depth` requests of `next` in flight on a queue of its own until it gives none any more.
/// Returns every latency.
pub(crate) fn drive(
    device: &dyn BlockDevice,
    engine: EngineKind,
    depth: usize,
    next: &mut dyn FnMut(IoBuf, u64) -> Option<Request>,
) -> io::Result<Vec<u64>> {
    let mut queue: Box<dyn BlockQueue> =
        device.open_queue(&QueueOptions { depth, engine, ..QueueOptions::default() })?;
    let mut free: Vec<(u64, IoBuf)> = (0..depth as u64).map(|tag| (tag, IoBuf::new(READ_BYTES as usize))).collect();
    let mut began = vec![Instant::now(); depth];
    let (mut latencies_ns, mut ended) = (Vec::new(), Vec::new());
    loop {
        while let Some((tag, buf)) = free.pop() {
            let Some(request) = next(buf, tag) else { break };
            began[tag as usize] = Instant::now();
            queue.push(request).map_err(|refused| refused.reason)?;
        }
        if queue.in_flight() == 0 {
            return Ok(latencies_ns);
        }
        queue.reap(1, &mut ended)?;
        let now = Instant::now();
        for completion in ended.drain(..) {
            completion.result?;
            latencies_ns.push((now - began[completion.tag as usize]).as_nanos() as u64);
            free.extend(completion.buf.map(|buf| (completion.tag, buf)));
        }
    }
}

/// Discards the first `len_bytes` of a disk by one request. Returns the time of the request.
fn discard(device: &dyn BlockDevice, engine: EngineKind, len_bytes: u64) -> io::Result<Duration> {
    let mut queue = device.open_queue(&QueueOptions { depth: 1, engine, ..QueueOptions::default() })?;
    let start = Instant::now();
    queue.push(Request::discard(0, len_bytes, 0)).map_err(|refused| refused.reason)?;
    let mut ended = Vec::new();
    queue.reap(1, &mut ended)?;
    ended.into_iter().try_for_each(|completion| completion.result)?;
    Ok(start.elapsed())
}

fn check_all_is_given_back(device: &dyn BlockDevice, len_bytes: u64) -> io::Result<()> {
    let mut extents = Vec::new();
    device.extents(0, len_bytes, &mut extents)?;
    match extents.iter().find(|extent| extent.kind == ExtentKind::Data) {
        None => Ok(()),
        Some(left) => {
            Err(io::Error::other(format!("the discard has left the block at {} allocated", left.offset_bytes)))
        }
    }
}

fn give_space_back(path: &Path, spaces: impl Iterator<Item = FileRange>) -> io::Result<()> {
    let options = OpenOptions { writable: true, lock: LockMode::Exclusive, ..OpenOptions::default() };
    let store = FileStore::open(path, &options).map_err(io::Error::other)?;
    for space in spaces {
        store.zero_range(space, Zeroing::Deallocate)?;
    }
    Ok(())
}

fn percentile_99_ns(latencies_ns: &mut [u64]) -> f64 {
    latencies_ns.sort_unstable();
    let place = latencies_ns.len().saturating_sub(1) * 99 / 100;
    latencies_ns.get(place).map_or(0.0, |ns| *ns as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_taken_from_the_sorted_latencies() {
        let mut latencies: Vec<u64> = (1..=1000).rev().collect();
        assert_eq!(percentile_99_ns(&mut latencies), 990.0);
        assert_eq!(percentile_99_ns(&mut []), 0.0);
    }

    #[test]
    fn blocks_are_allocated_without_space_and_given_back() {
        let dir = tempfile::tempdir().unwrap();
        let engine = EngineKind::Auto;
        let path = create_with_blocks(Container::VhdxDynamic, dir.path(), 64 << 20, Some(BLOCK_BYTES as u32)).unwrap();
        let target = Target::open(Container::VhdxDynamic, path, CacheMode::PageCache, engine).unwrap();
        touch_blocks(target.device(), engine, 0..32 << 20).unwrap();
        assert!(check_all_is_given_back(target.device(), 32 << 20).is_err(), "they are allocated");
        let mut left = 100;
        let latencies = read_until(target.device(), engine, 32 << 20..64 << 20, 1, &mut || {
            left -= 1;
            left < 0
        });
        assert_eq!(latencies.unwrap().len(), 100);
        discard(target.device(), engine, 32 << 20).unwrap();
        check_all_is_given_back(target.device(), 32 << 20).unwrap();
        target.close().unwrap();
    }
}
