//! Copies a disk that clients write to, while it lets them work: the copying for `live_move.rs`.
//!
//! ```text
//!   extents, or marked ranges ─▶ pieces of 256 KiB ─▶ read ─▶ zeros? ─▶ skip, discard or write
//! ```
//!
//! One thread, a queue to each of the disks, several pieces in flight. [`Pace`] decides how much of
//! the time the copy runs: it pauses for a moment in every 40 ms, compares what clients get done in
//! the pauses and beside the copy, and runs less when they lose more than a quarter.

use crate::{
    DiskError, Result,
    copying::copy,
    engine::{device::Disk, holes::next_stored},
    error::{self, to_io},
    life::move_plan::MoveWatch,
};
use diskwright_store::{
    BlockDevice, BlockQueue, Completion, EngineKind, Extent, ExtentKind, IoBuf, QueueOptions, Request, Slab, all_zero,
};
use std::{
    io,
    ops::Range,
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

/// Length of one read or write.
pub(crate) const PIECE_BYTES: u64 = 256 << 10;
/// Pieces in flight, while no client is active and while one is.
const PIECES: usize = 16;
const PIECES_BESIDE_CLIENTS: usize = 4;
/// Length of the ranges for which extents are read at once.
const WINDOW_BYTES: u64 = 64 << 20;
/// Marked ranges of at least this length are looked up for zeros, so that a large discard is not
/// copied byte by byte.
const LOOK_UP_BYTES: u64 = 1 << 20;

/// What becomes of zeros of the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Zeros {
    /// The new disk reads as zeros there already.
    Skipped,
    /// The new disk may hold older data.
    Discarded,
}

/// Copies from one disk to another.
pub(crate) struct Copier<'a> {
    source: &'a Disk,
    dest_path: PathBuf,
    reads: Box<dyn BlockQueue>,
    writes: Box<dyn BlockQueue>,
    /// Buffers that are not in use, each with its slot.
    free: Vec<(usize, IoBuf)>,
    /// By slot: the range, and what becomes of its zeros.
    slots: Vec<(Range<u64>, Zeros)>,
    limit: usize,
    done: Vec<Completion>,
    /// Bytes read, also those that were zeros.
    pub(crate) copied_bytes: u64,
}

impl<'a> Copier<'a> {
    pub(crate) fn open(source: &'a Disk, dest: &'a Disk, dest_path: PathBuf, engine: EngineKind) -> Result<Self> {
        let slab = Slab::new(PIECES, PIECE_BYTES as usize);
        let options = QueueOptions { depth: PIECES, engine, slab: Some(&slab), ring: None };
        let failed = |error| error::from_io("begin to copy into it", &dest_path, error);
        Ok(Self {
            reads: source.open_queue(&options).map_err(failed)?,
            writes: dest.open_queue(&options).map_err(failed)?,
            source,
            dest_path,
            free: slab.take_all().into_iter().enumerate().collect(),
            slots: vec![(0..0, Zeros::Skipped); PIECES],
            limit: PIECES,
            done: Vec::new(),
            copied_bytes: 0,
        })
    }

    fn source_failed(&self, error: io::Error) -> DiskError {
        let path = self.source.file().map(PathBuf::from).unwrap_or_default();
        error::from_io("read it", &path, error)
    }

    fn dest_failed(&self, error: io::Error) -> DiskError {
        let error = diskwright_store::explain_shortage(error, &self.dest_path, None, None);
        error::from_io("copy into it", &self.dest_path, error)
    }

    /// Copies a range. Requests may still be in flight on return: see [`Copier::drain`].
    pub(crate) fn copy(&mut self, range: Range<u64>, zeros: Zeros, control: &mut Control<'_>) -> Result<()> {
        if zeros == Zeros::Skipped || range.end - range.start < LOOK_UP_BYTES {
            return self.copy_data(range, zeros, control);
        }
        for extent in self.extents(&range)? {
            let (start, end) = (extent.offset_bytes, extent.offset_bytes + extent.len_bytes);
            if extent.kind.reads_as_zeros() {
                self.discard(start..end)?;
            } else {
                self.copy_data(start..end, zeros, control)?;
            }
        }
        Ok(())
    }

    fn copy_data(&mut self, range: Range<u64>, zeros: Zeros, control: &mut Control<'_>) -> Result<()> {
        let mut at = range.start;
        while at < range.end {
            control.before_piece(self)?;
            let stop = ((at / PIECE_BYTES + 1) * PIECE_BYTES).min(range.end);
            let (slot, buf) = self.buffer()?;
            self.slots[slot] = (at..stop, zeros);
            let request = Request::read(at, (stop - at) as usize, buf, slot as u64);
            let pushed = self.reads.push(request);
            pushed.map_err(|refused| self.source_failed(refused.reason))?;
            at = stop;
        }
        Ok(())
    }

    /// A buffer and its slot; waits for one.
    fn buffer(&mut self) -> Result<(usize, IoBuf)> {
        loop {
            if PIECES - self.free.len() < self.limit
                && let Some(free) = self.free.pop()
            {
                return Ok(free);
            }
            self.turn()?;
        }
    }

    fn discard(&mut self, range: Range<u64>) -> Result<()> {
        let (slot, buf) = self.buffer()?;
        let request = Request::discard(range.start, range.end - range.start, slot as u64);
        self.slots[slot] = (range, Zeros::Discarded);
        // A discard needs no buffer, but takes one along, so that the slot comes back with it.
        let pushed = self.writes.push(Request { buf: Some(buf), ..request });
        pushed.map_err(|refused| self.dest_failed(refused.reason))
    }

    /// Waits for the end of a request, and does what follows.
    fn turn(&mut self) -> Result<()> {
        let (reading, writing) = (self.reads.in_flight(), self.writes.in_flight());
        let mut done = std::mem::take(&mut self.done);
        if writing > 0 {
            let reaped = self.writes.reap(usize::from(reading == 0), &mut done);
            reaped.map_err(|error| self.dest_failed(error))?;
            for completion in done.drain(..) {
                completion.result.map_err(|error| self.dest_failed(error))?;
                self.free.extend(completion.buf.map(|buf| (completion.tag as usize, buf)));
            }
        }
        if reading > 0 {
            self.reads.reap(1, &mut done).map_err(|error| self.source_failed(error))?;
            for Completion { tag, buf, result, .. } in done.drain(..) {
                let slot = tag as usize;
                let (range, zeros) = self.slots[slot].clone();
                result.map_err(|error| self.source_failed(error))?;
                let Some(buf) = buf else { continue };
                let len = (range.end - range.start) as usize;
                self.copied_bytes += len as u64;
                let request = match (all_zero(&buf[..len]), zeros) {
                    (true, Zeros::Skipped) => {
                        self.free.push((slot, buf));
                        continue;
                    }
                    (true, Zeros::Discarded) => {
                        Request { buf: Some(buf), ..Request::discard(range.start, len as u64, tag) }
                    }
                    (false, _) => Request::write(range.start, len, buf, tag),
                };
                self.writes.push(request).map_err(|refused| self.dest_failed(refused.reason))?;
            }
        }
        self.done = done;
        Ok(())
    }

    /// Waits until everything that was begun is in the new disk.
    pub(crate) fn drain(&mut self) -> Result<()> {
        while self.free.len() < PIECES {
            self.turn()?;
        }
        Ok(())
    }

    /// Makes everything in the new disk durable. Nothing may be in flight.
    pub(crate) fn flush(&mut self) -> Result<()> {
        let mut done = Vec::new();
        self.writes.push(Request::flush(0)).map_err(|refused| self.dest_failed(refused.reason))?;
        self.writes.reap(1, &mut done).map_err(|error| self.dest_failed(error))?;
        done.into_iter()
            .try_for_each(|completion| completion.result)
            .map_err(|error| error::from_io("make the copy durable", &self.dest_path, error))
    }

    /// Copies all data of the source, as its extents are found. Durable now and then, so that the
    /// last flush is short.
    pub(crate) fn copy_all(&mut self, control: &mut Control<'_>) -> Result<()> {
        let size_bytes = self.source.geometry().size_bytes;
        let mut windows = Windows { at: 0, size_bytes };
        let mut since_flush = 0;
        while let Some(window) = windows.next_in(self.source)? {
            let before = self.copied_bytes;
            for extent in self.extents(&window)? {
                if !extent.kind.reads_as_zeros() {
                    let end = extent.offset_bytes + extent.len_bytes;
                    self.copy(extent.offset_bytes..end, Zeros::Skipped, control)?;
                }
            }
            since_flush += self.copied_bytes - before;
            if since_flush >= 4 * WINDOW_BYTES {
                since_flush = 0;
                self.drain()?;
                self.flush()?;
            }
        }
        self.drain()
    }

    fn extents(&self, range: &Range<u64>) -> Result<Vec<Extent>> {
        extents_of(self.source, range)
    }
}

/// The windows of a disk in which a layer has data.
struct Windows {
    at: u64,
    size_bytes: u64,
}

impl Windows {
    fn next_in(&mut self, disk: &Disk) -> Result<Option<Range<u64>>> {
        let known = next_stored(&disk.layers(), self.at, self.size_bytes)?;
        let start = known - known % WINDOW_BYTES;
        if known >= self.size_bytes {
            return Ok(None);
        }
        let end = (start + WINDOW_BYTES).min(self.size_bytes);
        let window = start.max(self.at)..end;
        self.at = end;
        Ok(Some(window))
    }
}

/// The extents of a range. A damaged one is an error: it cannot be copied.
fn extents_of(disk: &Disk, range: &Range<u64>) -> Result<Vec<Extent>> {
    let mut extents = Vec::new();
    let path = disk.file().map(PathBuf::from).unwrap_or_default();
    let found = disk.extents(range.start, range.end - range.start, &mut extents);
    found.map_err(|error| error::from_io("read its tables", &path, error))?;
    match extents.iter().find(|extent| extent.kind == ExtentKind::Damaged) {
        Some(damaged) => Err(error::from_io("read it", &path, to_io(copy::damage_of(disk, damaged)))),
        None => Ok(extents),
    }
}

/// Bytes of the disk that hold data.
pub(crate) fn data_bytes(disk: &Disk) -> Result<u64> {
    let mut windows = Windows { at: 0, size_bytes: disk.geometry().size_bytes };
    let mut found_bytes = 0;
    while let Some(window) = windows.next_in(disk)? {
        let extents = extents_of(disk, &window)?;
        let data = extents.iter().filter(|extent| !extent.kind.reads_as_zeros());
        found_bytes += data.map(|extent| extent.len_bytes).sum::<u64>();
    }
    Ok(found_bytes)
}

/// How often progress is reported.
const TELL_EVERY: Duration = Duration::from_millis(200);

/// Decides before each piece whether the copy goes on, and when.
pub(crate) struct Control<'a> {
    /// Gets the progress, and may stop the copy.
    pub(crate) watch: &'a mut dyn MoveWatch,
    /// Requests of clients that have ended so far.
    pub(crate) ended: &'a dyn Fn() -> u64,
    pub(crate) total_bytes: u64,
    /// `None` while clients wait for the copy.
    pub(crate) pace: Option<Pace>,
    pub(crate) told_at: Instant,
}

impl Control<'_> {
    fn before_piece(&mut self, copier: &mut Copier<'_>) -> Result<()> {
        let now = Instant::now();
        if now.duration_since(self.told_at) >= TELL_EVERY {
            self.told_at = now;
            self.tell(copier)?;
        }
        let Some(mut pace) = self.pace.take() else {
            copier.limit = PIECES;
            return Ok(());
        };
        if let Some(length) = pace.pause(now, (self.ended)()) {
            copier.drain()?;
            let began = (Instant::now(), (self.ended)());
            thread::sleep(length);
            pace.resume(began, (Instant::now(), (self.ended)()));
        }
        copier.limit = if pace.is_beside_clients { PIECES_BESIDE_CLIENTS } else { PIECES };
        self.pace = Some(pace);
        Ok(())
    }

    /// Tells progress at once.
    pub(crate) fn tell(&mut self, copier: &Copier<'_>) -> Result<()> {
        // More may be copied than was counted, as clients write meanwhile.
        let total_bytes = self.total_bytes.max(copier.copied_bytes);
        if self.watch.goes_on(copier.copied_bytes, total_bytes) { Ok(()) } else { Err(DiskError::Stopped) }
    }
}

/// Length of a run and the pause after it.
const SLICE: Duration = Duration::from_millis(40);
/// The share of the time that the copy runs beside clients.
const SHARE_MIN: f64 = 0.1;
const SHARE_MAX: f64 = 0.9;
/// The clients keep this part of what they get done in the pauses.
const KEPT: f64 = 0.75;

/// How much of the time the copy runs.
#[derive(Debug)]
pub(crate) struct Pace {
    share: f64,
    /// When the present run began, and how many requests had ended then.
    run: (Instant, u64),
    /// Requests a second beside the copy, and in the pauses; smoothed.
    beside: f64,
    alone: f64,
    pub(crate) is_beside_clients: bool,
}

impl Pace {
    pub(crate) fn new(now: Instant, ended: u64) -> Self {
        Self { share: 0.5, run: (now, ended), beside: 0.0, alone: 0.0, is_beside_clients: false }
    }

    /// The length of the pause that is due; `None` if none is.
    fn pause(&mut self, now: Instant, ended: u64) -> Option<Duration> {
        let (began, before) = self.run;
        let ran = now.duration_since(began);
        if ran < SLICE.mul_f64(if self.is_beside_clients { self.share } else { SHARE_MAX }) {
            return None;
        }
        let requests = ended.saturating_sub(before);
        if requests == 0 && self.alone < 1.0 {
            // No client is active.
            self.is_beside_clients = false;
            self.run = (now, ended);
            return None;
        }
        self.is_beside_clients = true;
        smooth(&mut self.beside, requests as f64 / ran.as_secs_f64());
        Some(SLICE.mul_f64(1.0 - self.share))
    }

    /// A pause has ended: the times, and the requests that had ended at its beginning and end.
    fn resume(&mut self, (began, before): (Instant, u64), (now, ended): (Instant, u64)) {
        let paused = now.duration_since(began).as_secs_f64().max(1e-6);
        smooth(&mut self.alone, ended.saturating_sub(before) as f64 / paused);
        self.share = adapted(self.share, self.beside, self.alone);
        self.run = (now, ended);
    }
}

fn smooth(mean: &mut f64, value: f64) {
    *mean += 0.3 * (value - *mean);
}

/// The next share of the time, from the present one and the rates of the clients.
fn adapted(share: f64, beside: f64, alone: f64) -> f64 {
    if alone <= 0.0 {
        return SHARE_MAX;
    }
    let kept = (share * beside + (1.0 - share) * alone) / alone;
    let step = match kept {
        _ if kept < KEPT => -0.1,
        _ if kept > KEPT + 0.05 => 0.05,
        _ => 0.0,
    };
    (share + step).clamp(SHARE_MIN, SHARE_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_copy_runs_less_where_clients_lose_much() {
        // Each of them is the share that is reached when the clients lose as much as said.
        for (beside, alone, least, most) in [
            (1000.0, 1000.0, SHARE_MAX, SHARE_MAX),
            (0.0, 1000.0, 0.1, 0.3),
            (500.0, 1000.0, 0.35, 0.55),
            (700.0, 1000.0, 0.7, SHARE_MAX),
            (0.0, 0.0, SHARE_MAX, SHARE_MAX),
        ] {
            let share = (0..100).fold(0.5, |share, _| adapted(share, beside, alone));
            assert!((least - 1e-9..=most + 1e-9).contains(&share), "{beside} of {alone}: {share}");
        }
    }

    #[test]
    fn a_disk_without_clients_is_copied_without_pauses() {
        let start = Instant::now();
        let mut pace = Pace::new(start, 7);
        for slice in 1..100 {
            assert_eq!(pace.pause(start + SLICE * slice, 7), None);
        }
        assert!(pace.pause(start + SLICE * 101, 8).is_some());
        assert!(pace.is_beside_clients);
    }
}
