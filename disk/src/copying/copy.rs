//! Copies the data of one disk into another, for `convert` and `merge`.
//!
//! ```text
//!   next_window() ─┬─ a hole of any length (no layer has a block in it) ─▶ counted as zeros
//!                  └─ 64 MiB ─▶ extents ─▶ data: shared by reflink, else copied
//!                                          zeros: skipped or wiped   damaged: an error, or listed
//! ```
//!
//! Two workers take windows in turn. Each has a queue to both disks and several requests in
//! flight, so that reads, writes and checks for zeros overlap. A copy beside clients
//! ([`Job::beside`]) has one worker, which pauses for them (`throttle.rs`). [`Dest`] says what
//! becomes of the source's zeros. A copy that goes on with an interrupted one
//! ([`Job::onto_leftover`]) reads what the destination holds before it writes, and leaves alone
//! what is the same. A mutex guards only the start of the next window.

mod failure;
mod lost;

use crate::{
    Disk, Opened, Progress,
    engine::{epoch::Epochs, holes::next_stored, throttle::Throttle},
    error::to_io,
};
use diskwright_store::{
    BlockDevice, BlockQueue, Blocking, Completion, EngineKind, Extent, ExtentKind, IoBuf, QueueOptions, Request, Slab,
    all_zero,
};
use std::{
    io,
    ops::Range,
    path::{Path, PathBuf},
    sync::{
        Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

pub(crate) use failure::Failure;
pub use lost::{LostRange, LostRanges};
pub(crate) use lost::{LostRangeCollector, damage_in, damage_of, damaged_source};

/// Length of a window, for which the extents are read at once.
const WINDOW_BYTES: u64 = 64 << 20;
/// Maximum length of one read or write.
const CHUNK_BYTES: u64 = 1 << 20;
/// Number of buffers of each worker.
const BUFFERS: usize = 8;
/// Number of workers: one reads while the other writes.
const WORKERS: usize = 2;
/// Time for which a copy beside clients works between two pauses.
const SLICE: Duration = Duration::from_millis(5);
/// How often `progress` is called.
const TELL_EVERY: Duration = Duration::from_millis(100);

/// What the destination holds before the copy. Decides what becomes of the source's zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dest {
    /// Zeros, as a new image does: zeros of the source are skipped.
    Empty,
    /// Old data, as an export does: all of it is replaced, also beyond the end of the source.
    OldData,
    /// The data of the source's parent: zeros of the source replace it, and ranges that the source
    /// does not have keep it.
    ParentData,
}

/// State shared by the workers.
pub(crate) struct Job<'a> {
    source: &'a Opened,
    dest: &'a Opened,
    engine: EngineKind,
    /// Bytes of the source that are copied, from its begin.
    size_bytes: u64,
    holds: Dest,
    /// What progress counts to: the source's size, or for [`Dest::ParentData`] its data.
    total_bytes: u64,
    /// Start of the next window: a multiple of [`WINDOW_BYTES`].
    next_bytes: Mutex<u64>,
    skip_damaged: bool,
    lost: Mutex<LostRangeCollector>,
    reflink: AtomicBool,
    can_reflink: OnceLock<bool>,
    stop: AtomicBool,
    /// The destination may hold a part of the copy.
    compares: bool,
    /// The requests of clients of another disk on the same device.
    clients: Option<&'a Epochs>,
    pub(crate) copied_bytes: AtomicU64,
    pub(crate) cloned_bytes: AtomicU64,
    pub(crate) zero_bytes: AtomicU64,
    pub(crate) held_bytes: AtomicU64,
    lost_bytes: AtomicU64,
    failure: Mutex<Option<Failure>>,
}

/// How the copy ended.
pub(crate) enum Outcome {
    Done,
    /// `progress` returned false.
    Stopped,
    /// Reading or writing failed.
    Failed(Failure),
}

impl<'a> Job<'a> {
    /// A copy of `source` into `dest`, which must be at least as large.
    pub(crate) fn new(
        source: &'a Opened,
        (dest, holds): (&'a Opened, Dest),
        engine: EngineKind,
        reflink: bool,
        skip_damaged: bool,
    ) -> Self {
        let size_bytes = source.device().geometry().size_bytes;
        Self {
            source,
            dest,
            engine,
            size_bytes,
            holds,
            total_bytes: size_bytes,
            next_bytes: Mutex::new(0),
            skip_damaged,
            lost: Mutex::default(),
            reflink: AtomicBool::new(reflink && source.disk().is_some() && dest.disk().is_some()),
            can_reflink: OnceLock::new(),
            stop: AtomicBool::new(false),
            compares: false,
            clients: None,
            copied_bytes: AtomicU64::new(0),
            cloned_bytes: AtomicU64::new(0),
            zero_bytes: AtomicU64::new(0),
            held_bytes: AtomicU64::new(0),
            lost_bytes: AtomicU64::new(0),
            failure: Mutex::new(None),
        }
    }

    /// Runs the workers and reports to `progress`.
    pub(crate) fn run(&self, progress: &mut Progress<'_>) -> Outcome {
        let mut stopped = false;
        thread::scope(|scope| {
            let (done, all_done) = mpsc::channel::<()>();
            for _ in 0..if self.clients.is_some() { 1 } else { WORKERS } {
                let done = done.clone();
                scope.spawn(move || {
                    let _done = done;
                    if let Err(error) = work(self) {
                        self.stop.store(true, Ordering::Relaxed);
                        let mut known = lock(&self.failure);
                        // Of several failures the one with the lowest offset is reported.
                        if known.as_ref().is_none_or(|known| error.start_bytes() < known.start_bytes()) {
                            *known = Some(error);
                        }
                    }
                });
            }
            drop(done);
            // Nothing is sent on the channel. It closes when the last worker is done.
            while all_done.recv_timeout(TELL_EVERY) == Err(mpsc::RecvTimeoutError::Timeout) {
                if !progress(self.done_bytes(), self.total_bytes) {
                    stopped = true;
                    self.stop.store(true, Ordering::Relaxed);
                }
            }
        });
        if stopped {
            return Outcome::Stopped;
        }
        match lock(&self.failure).take() {
            Some(error) => Outcome::Failed(error),
            None => Outcome::Done,
        }
    }

    /// Copies no more than the first `bytes` of the source.
    pub(crate) fn of_first(self, bytes: u64) -> Self {
        let size_bytes = self.size_bytes.min(bytes);
        Self { size_bytes, total_bytes: size_bytes, ..self }
    }

    /// Progress counts only the source's data, of which there are `data_bytes`.
    pub(crate) fn counting_data(self, data_bytes: u64) -> Self {
        Self { total_bytes: data_bytes, ..self }
    }

    /// The copy pauses for clients of the disk with these epochs.
    pub(crate) fn beside(self, clients: Option<&'a Epochs>) -> Self {
        Self { clients, ..self }
    }

    /// The destination, of [`Dest::OldData`], may hold a part of the copy already.
    pub(crate) fn onto_leftover(self, compares: bool) -> Self {
        Self { compares, ..self }
    }

    fn done_bytes(&self) -> u64 {
        let counted = [&self.copied_bytes, &self.cloned_bytes, &self.zero_bytes, &self.held_bytes, &self.lost_bytes];
        counted.iter().map(|bytes| bytes.load(Ordering::Relaxed)).sum()
    }

    /// Whether the destination's data must be replaced where the source reads as zeros.
    fn wipes(&self) -> bool {
        self.holds != Dest::Empty
    }

    /// The lost ranges. Must be called after all workers are done.
    pub(crate) fn lost(&self) -> LostRanges {
        std::mem::take(&mut *lock(&self.lost)).finish()
    }

    /// The next range for a worker, and whether it is a hole, in which no layer of the source has
    /// data. For an export all ranges are windows, because their zeros must be written.
    fn next_window(&self) -> Result<Option<(Range<u64>, bool)>, Failure> {
        let mut next = lock(&self.next_bytes);
        let start = *next;
        let all = self.holds == Dest::OldData;
        let end_bytes = if all { self.dest.device().geometry().size_bytes } else { self.size_bytes };
        if start >= end_bytes || self.stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let known = match self.source.disk() {
            Some(disk) if !all => next_stored(&disk.layers(), start, self.size_bytes)
                .map_err(|error| Failure::Source(start..self.size_bytes, to_io(error)))?,
            _ => start,
        };
        let hole_end = known - known % WINDOW_BYTES;
        let is_hole = hole_end > start;
        *next = if is_hole { hole_end } else { start + WINDOW_BYTES };
        Ok(Some((start..(*next).min(end_bytes), is_hole)))
    }

    /// Lists a damaged extent, or returns the error that ends the conversion.
    fn lose(&self, extent: &Extent) -> Result<(), Failure> {
        if self.skip_damaged {
            let reason = || damage_in(self.source, extent).to_string();
            lock(&self.lost).add(extent.offset_bytes, extent.len_bytes, reason);
            Self::count(&self.lost_bytes, extent.len_bytes);
            return Ok(());
        }
        Err(damaged_source(self.source, extent))
    }

    /// Bytes of the source that hold data; `None` if its extents cannot be read.
    pub(crate) fn data_bytes(&self) -> Option<u64> {
        super::room::data_bytes(self.source, self.size_bytes).ok()
    }

    /// Counts a range that the source has as zeros, or not at all. Where progress counts data, it
    /// does not count.
    fn count_zeros(&self, bytes: u64) {
        if self.holds != Dest::ParentData {
            Self::count(&self.zero_bytes, bytes);
        }
    }

    fn count(counter: &AtomicU64, bytes: u64) {
        counter.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// The file of the chain that holds a range; the source's own path if several files do, or if that
/// is unknown.
pub(crate) fn file_of(source: &Opened, source_path: &Path, range: Range<u64>) -> PathBuf {
    let Some(disk) = source.disk() else { return source_path.to_owned() };
    let mut extents = Vec::new();
    // Errors are ignored: the extents only improve the path in another error.
    let _ = disk.extents(range.start, range.end - range.start, &mut extents);
    let mut places = extents
        .iter()
        .filter(|extent| extent.kind == ExtentKind::Data)
        .map(|extent| (extent.depth as usize, extent.file));
    match places.next().filter(|&first| places.all(|place| place == first)) {
        Some((depth, file)) if (depth, file) != (0, 0) => disk.layers()[depth].file_path(file).to_owned(),
        _ => source_path.to_owned(),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One worker: takes windows until there are none.
fn work(job: &Job<'_>) -> Result<(), Failure> {
    let slab = Slab::new(BUFFERS, CHUNK_BYTES as usize);
    let queue_options = QueueOptions { depth: BUFFERS, engine: job.engine, slab: Some(&slab), ring: None };
    let mut pipe = Pipe {
        source: job.source.device().open_queue(&queue_options).map_err(|error| Failure::Source(0..0, error))?,
        dest: job.dest.device().open_queue(&queue_options).map_err(Failure::Dest)?,
        free: slab.take_all(),
        done: Vec::new(),
        held: match job.compares {
            true => Some(Held::open(job.dest.device(), job.engine).map_err(Failure::Dest)?),
            false => None,
        },
        throttle: job.clients.map(Throttle::new),
    };
    let mut extents: Vec<Extent> = Vec::new();
    // The destination's sectors may be larger than the granularity of the source's extents. Windows
    // are multiples of both.
    let sector_bytes = u64::from(job.dest.device().geometry().logical_sector_bytes);
    let mut copied_to = 0;
    loop {
        let Some((Range { start, end: window_end }, is_hole)) = job.next_window()? else { return pipe.drain(job) };
        if is_hole {
            job.count_zeros(window_end - start);
            continue;
        }
        let len = WINDOW_BYTES.min(job.size_bytes.saturating_sub(start));
        extents.clear();
        if len > 0 {
            let found = job.source.device().extents(start, len, &mut extents);
            found.map_err(|error| Failure::Source(start..start + len, error))?;
        }
        for extent in &extents {
            pipe.give_way(job)?;
            if extent.kind == ExtentKind::Data {
                let mut rest = share(job, extent).map_err(Failure::Dest)?;
                for (start, stop) in &mut rest {
                    *start = (*start - *start % sector_bytes).max(copied_to);
                    *stop = stop.next_multiple_of(sector_bytes).min(job.size_bytes).max(*start);
                    copied_to = *stop;
                }
                pipe.copy(job, &rest)?;
            } else {
                if extent.kind == ExtentKind::Damaged {
                    job.lose(extent)?;
                } else {
                    job.count_zeros(extent.len_bytes);
                }
                let stop = extent.offset_bytes + extent.len_bytes;
                let is_parents = job.holds == Dest::ParentData && extent.kind == ExtentKind::Unallocated;
                if job.wipes() && !is_parents {
                    pipe.wipe(job, extent.offset_bytes.next_multiple_of(sector_bytes).max(copied_to), stop)?;
                }
            }
        }
        // The range of the destination beyond the end of the source must be zero.
        let behind = job.size_bytes.next_multiple_of(sector_bytes).max(start);
        if job.holds == Dest::OldData && behind < window_end {
            pipe.wipe(job, behind, window_end)?;
        }
    }
}

/// Shares as much of an extent as possible by reflink, and returns the ranges left to copy. One
/// block is tried first. A later failure, for example of a layer on another file system, also ends
/// all further attempts.
fn share(job: &Job<'_>, extent: &Extent) -> io::Result<Vec<(u64, u64)>> {
    let end = extent.offset_bytes + extent.len_bytes;
    let everything = vec![(extent.offset_bytes, end)];
    let Some(file_offset_bytes) = extent.file_offset_bytes.filter(|_| job.reflink.load(Ordering::Relaxed)) else {
        return Ok(everything);
    };
    let (Some(source), Some(dest)) = (job.source.disk(), job.dest.disk()) else { return Ok(everything) };
    let layers = source.layers();
    let image = &layers[extent.depth as usize].image;
    let Some(store) = image.stores().get(usize::from(extent.file)) else { return Ok(everything) };
    let clone = |len_bytes| Disk::clone_from(dest, store.as_ref(), file_offset_bytes, extent.offset_bytes, len_bytes);
    let block_bytes = dest.layers()[0].image.info().block_bytes;
    let first_block_end = (extent.offset_bytes.next_multiple_of(block_bytes) + block_bytes).min(end);
    let can = *job.can_reflink.get_or_init(|| clone(first_block_end - extent.offset_bytes).is_ok());
    if !can {
        job.reflink.store(false, Ordering::Relaxed);
        return Ok(everything);
    }
    match clone(extent.len_bytes) {
        Ok((from, to)) if from < to => {
            Job::count(&job.cloned_bytes, to - from);
            let rest = [(extent.offset_bytes, from), (to, end)];
            Ok(rest.into_iter().filter(|(start, end)| start < end).collect())
        }
        Ok(_) => Ok(everything),
        Err(error) if diskwright_store::is_full(&error) => Err(error),
        Err(_) => {
            job.reflink.store(false, Ordering::Relaxed);
            Ok(everything)
        }
    }
}

/// What the destination holds.
struct Held {
    reader: Blocking,
    bytes: Vec<u8>,
    extents: Vec<Extent>,
}

impl Held {
    fn open(dest: &dyn BlockDevice, engine: EngineKind) -> io::Result<Self> {
        Ok(Self { reader: Blocking::open(dest, engine)?, bytes: vec![0; CHUNK_BYTES as usize], extents: Vec::new() })
    }

    /// Whether the destination holds these bytes. What it has as zeros is not read.
    fn holds(&mut self, dest: &dyn BlockDevice, offset_bytes: u64, bytes: &[u8]) -> io::Result<bool> {
        self.extents.clear();
        dest.extents(offset_bytes, bytes.len() as u64, &mut self.extents)?;
        if self.extents.iter().all(|extent| extent.kind.reads_as_zeros()) {
            return Ok(false);
        }
        let held = &mut self.bytes[..bytes.len()];
        self.reader.read(offset_bytes, held)?;
        Ok(held == bytes)
    }
}

/// A source queue and a destination queue that exchange buffers.
struct Pipe<'a> {
    source: Box<dyn BlockQueue>,
    dest: Box<dyn BlockQueue>,
    free: Vec<IoBuf>,
    done: Vec<Completion>,
    /// For a destination that may hold a part of the copy.
    held: Option<Held>,
    /// For a copy beside clients.
    throttle: Option<Throttle<'a>>,
}

impl Pipe<'_> {
    fn copy(&mut self, job: &Job<'_>, ranges: &[(u64, u64)]) -> Result<(), Failure> {
        for &(start, end) in ranges {
            let mut at = start;
            loop {
                while at < end
                    && !job.stop.load(Ordering::Relaxed)
                    && let Some(buf) = self.free.pop()
                {
                    // Chunks end at multiples of their size, so that payload blocks are not split
                    // more than needed.
                    let stop = ((at / CHUNK_BYTES + 1) * CHUNK_BYTES).min(end);
                    let len = stop - at;
                    let request = Request::read(at, len as usize, buf, read_tag(at, len));
                    self.source.push(request).map_err(|error| Failure::Source(at..stop, error.reason))?;
                    at = stop;
                }
                if self.free.len() == BUFFERS {
                    break;
                }
                self.turn(job)?;
                self.give_way(job)?;
            }
        }
        Ok(())
    }

    /// Pauses at the end of a slice, if there are clients. Nothing is in flight during the pause.
    fn give_way(&mut self, job: &Job<'_>) -> Result<(), Failure> {
        let Some(throttle) = self.throttle.as_ref().filter(|throttle| throttle.worked() >= SLICE) else {
            return Ok(());
        };
        if throttle.clients_wait() {
            self.drain(job)?;
        }
        if let Some(throttle) = &mut self.throttle {
            throttle.pause(|pause| {
                let end = Instant::now() + pause;
                while !job.stop.load(Ordering::Relaxed)
                    && let Some(left) = end.checked_duration_since(Instant::now())
                {
                    thread::sleep(left.min(TELL_EVERY));
                }
            });
        }
        Ok(())
    }

    /// Waits for all requests in flight.
    fn drain(&mut self, job: &Job<'_>) -> Result<(), Failure> {
        while self.free.len() < BUFFERS {
            self.turn(job)?;
        }
        Ok(())
    }

    /// Zeroes a range of the destination, except where it reports zeros already. If the range ends
    /// within a sector, the data after it covers that sector; at the end of the disk the range is
    /// rounded up to the sector.
    fn wipe(&mut self, job: &Job<'_>, start: u64, stop: u64) -> Result<(), Failure> {
        let geometry = job.dest.device().geometry();
        let sector_bytes = u64::from(geometry.logical_sector_bytes);
        let stop =
            if stop == job.size_bytes { stop.next_multiple_of(sector_bytes) } else { stop - stop % sector_bytes };
        if start >= stop {
            return Ok(());
        }
        let mut there = Vec::new();
        job.dest.device().extents(start, stop - start, &mut there).map_err(Failure::Dest)?;
        for extent in there.iter().filter(|extent| !extent.kind.reads_as_zeros()) {
            while self.free.is_empty() {
                self.turn(job)?;
            }
            let Some(buf) = self.free.pop() else { continue };
            self.push_wipe(extent.offset_bytes, extent.len_bytes, buf)?;
        }
        Ok(())
    }

    /// A discard needs no buffer, but each request takes one, so that the number of requests never
    /// exceeds the queue's depth.
    fn push_wipe(&mut self, offset_bytes: u64, len_bytes: u64, buf: IoBuf) -> Result<(), Failure> {
        let request = Request { buf: Some(buf), ..Request::discard(offset_bytes, len_bytes, 0) };
        self.dest.push(request).map_err(|error| Failure::Dest(error.reason))
    }

    /// Processes completions of reads and writes. Waits for at least one.
    fn turn(&mut self, job: &Job<'_>) -> Result<(), Failure> {
        let (reading, writing) = (self.source.in_flight(), self.dest.in_flight());
        if writing > 0 {
            // While reads are in flight, do not wait for a write: otherwise the writer would be
            // idle afterwards.
            let wait = usize::from(reading == 0);
            self.dest.reap(wait, &mut self.done).map_err(Failure::Dest)?;
            for completion in self.done.drain(..) {
                completion.result.map_err(Failure::Dest)?;
                Job::count(&job.copied_bytes, completion.tag);
                self.free.extend(completion.buf);
            }
        }
        if reading > 0 {
            self.source.reap(1, &mut self.done).map_err(|error| Failure::Source(0..0, error))?;
            for completion in std::mem::take(&mut self.done) {
                let (offset_bytes, len) = range_of(completion.tag);
                completion.result.map_err(|error| Failure::Source(offset_bytes..offset_bytes + len, error))?;
                let Some(mut buf) = completion.buf else { continue };
                // If the source ends within a sector of the destination, the rest of the sector is
                // zero.
                let sector_bytes = u64::from(job.dest.device().geometry().logical_sector_bytes);
                let padded = len.next_multiple_of(sector_bytes) as usize;
                if all_zero(&buf[..len as usize]) {
                    Job::count(&job.zero_bytes, len);
                    if job.wipes() {
                        self.push_wipe(offset_bytes, padded as u64, buf)?;
                    } else {
                        self.free.push(buf);
                    }
                } else {
                    buf[len as usize..padded].fill(0);
                    if let Some(held) = &mut self.held
                        && held.holds(job.dest.device(), offset_bytes, &buf[..padded]).map_err(Failure::Dest)?
                    {
                        Job::count(&job.held_bytes, len);
                        self.free.push(buf);
                        continue;
                    }
                    let request = Request::write(offset_bytes, padded, buf, len);
                    self.dest.push(request).map_err(|error| Failure::Dest(error.reason))?;
                }
            }
        }
        Ok(())
    }
}

/// The tag of a read: its offset and length in 512-byte sectors. A length is at most 2,048 sectors,
/// so 12 bits hold it.
fn read_tag(offset_bytes: u64, len_bytes: u64) -> u64 {
    ((offset_bytes / 512) << 12) | (len_bytes / 512)
}

fn range_of(tag: u64) -> (u64, u64) {
    ((tag >> 12) * 512, (tag & 0xfff) * 512)
}
