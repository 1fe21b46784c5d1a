//! The points of one open disk: marks of writes, and what is durable of them.
//!
//! ```text
//!   write ─▶ View::passes ─ exact bit set, durable bit set? ── yes ─▶ goes on  (no lock)
//!                             │ no
//!                             ▼ the request rests
//!            worker: all that have gathered, each with a run ahead ─▶ log, one fdatasync
//!                             ─▶ durable bits ─▶ the requests are planned again
//! ```
//!
//! The *exact* bits say what has changed since the last point. The *durable* bits say which grains
//! the file names: in the bitmap of the last segment, or in the log. A run ahead (16 MiB) makes
//! durable what will probably be written next. What is durable and was not written is too much
//! after a crash, so it has a budget ([`AHEAD_BYTES`]). When that is used up, only what is asked
//! for is marked, until a checkpoint writes the exact bits and begins an empty log.
//!
//! # Why a crash loses no change
//!
//! - A request goes on only when its durable bits are set, and they are set after the fdatasync.
//! - A checkpoint takes durable bits back. It first clears those that are not exact, and then reads
//!   the exact bits that it writes. A request sets its exact bits before it looks at the durable
//!   ones, in one order for all threads. So either the request sees that its durable bits are gone,
//!   or the checkpoint writes its exact bits. Until its header is durable, the former area and log
//!   count, which name all that passes meanwhile. Only then what was written becomes durable bits.
//! - Exact bits are never cleared. So what has passed once need not be looked at again.
//! - A new point has a new view with empty bits. It is published with the chain, and the checkpoint
//!   that makes it durable follows when all requests with the former view have ended. The caller
//!   holds the lock in between, so requests of the new view wait.
//!
//! If the file cannot be written, it is removed, and the points are lost: no write fails because of
//! them. If it cannot be removed either, writes that are not marked fail.
//!
//! Locks: `inner`, held during I/O to the file and while a change of the view waits for requests in
//! flight. So no thread that drives requests may take it: the worker does, and who changes points.
//! `shown` has what others read, and is held for a moment only. It changes at the end of a
//! checkpoint, when the segments are complete.

mod owner;
mod segments;

use super::{
    bits::Bits,
    changed::{Changed, ChangesQuery, TrackPoint, points_of},
    sidecar::{Contents, Segment, Sidecar},
};
use crate::engine::background::{BackgroundWorker, NewJobs};
use diskwright_format::tracks::{GRAIN_BYTES_MIN, GRAINS_MAX, GrainRun, Header, Identity};
use diskwright_image::Image;
use diskwright_store::{
    ExternalTicket, Files,
    sync::{
        Mutex, MutexGuard,
        mpsc::{Sender, channel},
    },
};
use std::{
    fmt, io,
    path::{Path, PathBuf},
    sync::{Arc, PoisonError},
};

/// Most bytes that are marked and were not written.
///
/// With what requests ask for while they wait this is less than 1 GiB.
pub(crate) const AHEAD_BYTES: u64 = 960 << 20;
/// Length of a run ahead, in bytes.
const RUN_BYTES: u64 = 16 << 20;
/// Appends between two checkpoints that take back what was not written.
const APPENDS_MIN: u64 = 256;
/// Appends between two counts of what was not written.
const COUNT_EVERY: u64 = 16;

/// How a waiting request learns that its range is marked.
enum Waiter {
    Ticket(ExternalTicket),
    Thread(Sender<io::Result<()>>),
}

/// A range to be marked.
struct Mark {
    durable: Arc<Bits>,
    run: GrainRun,
    waiter: Waiter,
}

/// The points as of the last change, for readers without the lock.
#[derive(Debug, Default)]
struct PointsSnapshot {
    segments: Vec<Segment>,
    grain_bytes: u64,
    /// Why everything counts as changed since all points.
    everything: Option<String>,
}

/// The points of a disk.
pub(crate) struct Tracker {
    inner: Mutex<Inner>,
    shown: Arc<Mutex<Arc<PointsSnapshot>>>,
    worker: BackgroundWorker<Self, Mark>,
}

impl fmt::Debug for Tracker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tracker")
    }
}

/// The bits that requests of one chain set and look at.
#[derive(Debug)]
pub(crate) struct View {
    pub(crate) tracker: Arc<Tracker>,
    grain_shift: u32,
    exact: Arc<Bits>,
    durable: Arc<Bits>,
}

/// The state of a tracker.
pub(crate) struct Inner {
    files: Files,
    /// The file of the points.
    path: PathBuf,
    /// `None` until the file is made.
    sidecar: Option<Sidecar>,
    /// The image that is written.
    image: Arc<dyn Image>,
    identity: Identity,
    /// An image that may have the disk's name soon.
    coming: Option<Identity>,
    size_bytes: u64,
    grain_bytes: u64,
    /// The oldest first, at least one.
    segments: Vec<Segment>,
    /// The durable bits of the last segment.
    durable: Arc<Bits>,
    /// Whether the file says that the image is being written.
    is_open: bool,
    /// Whether the file has all segments as they are.
    is_current: bool,
    /// Upper limit of the grains that are durable and not exact.
    ahead: u64,
    appends: u64,
    counted_at: u64,
    /// Why the file was given up.
    failed: Option<String>,
    shown: Arc<Mutex<Arc<PointsSnapshot>>>,
}

/// The smallest grain whose bitmap is not too long.
fn grain_for(size_bytes: u64) -> u64 {
    size_bytes.div_ceil(GRAINS_MAX).next_power_of_two().max(GRAIN_BYTES_MIN)
}

/// The file of a disk's points: whose it is, where it lies.
pub(crate) struct PointsFile {
    pub(crate) files: Files,
    pub(crate) path: PathBuf,
    pub(crate) image: Arc<dyn Image>,
    pub(crate) identity: Identity,
}

impl View {
    fn run_of(&self, offset_bytes: u64, len_bytes: u64) -> GrainRun {
        let first = offset_bytes >> self.grain_shift;
        let end = offset_bytes.saturating_add(len_bytes.max(1)) - 1;
        GrainRun { first, count: (end >> self.grain_shift) - first + 1 }
    }

    /// Marks a range that a request is about to change. Returns whether the marks are durable. If
    /// not, [`View::request`] makes them so, and then the answer is true.
    #[inline]
    pub(crate) fn passes(&self, offset_bytes: u64, len_bytes: u64) -> bool {
        let run = self.run_of(offset_bytes, len_bytes);
        // In this order: see the module.
        self.exact.set(run);
        self.durable.holds(run)
    }

    /// Completes the ticket when the range is marked durably.
    pub(crate) fn request(&self, offset_bytes: u64, len_bytes: u64, ticket: ExternalTicket) {
        self.mark(offset_bytes, len_bytes, Waiter::Ticket(ticket));
    }

    fn mark(&self, offset_bytes: u64, len_bytes: u64, waiter: Waiter) {
        let run = self.run_of(offset_bytes, len_bytes);
        self.tracker.worker.request(&self.tracker, Mark { durable: Arc::clone(&self.durable), run, waiter });
    }

    /// Marks a range, for callers that may block and hold no lock. Returns whether the marks are
    /// durable; if not, the caller tries again with the view that is current then.
    pub(crate) fn pass_blocking(&self, offset_bytes: u64, len_bytes: u64) -> io::Result<bool> {
        if self.passes(offset_bytes, len_bytes) {
            return Ok(true);
        }
        let (sender, marked) = channel();
        self.mark(offset_bytes, len_bytes, Waiter::Thread(sender));
        marked.recv().map_err(|_| io::Error::other("the marks of changed ranges cannot be written"))??;
        Ok(false)
    }
}

impl Tracker {
    /// A tracker of a disk without a point. [`Inner::add_point`] must follow.
    pub(crate) fn new(place: PointsFile, size_bytes: u64) -> Arc<Self> {
        Self::of(place, size_bytes, grain_for(size_bytes), Vec::new())
    }

    /// The tracker of a disk whose file was read. `distrust`: why everything counts as changed.
    pub(crate) fn with(
        place: PointsFile,
        contents: Contents,
        distrust: Option<String>,
        size_bytes: u64,
    ) -> io::Result<Arc<Self>> {
        let Contents { header, segments, has_log } = contents;
        let sidecar = Sidecar::open(&place.files, &place.path, header.clone())?;
        let tracker = Self::of(place, header.size_bytes, header.grain_bytes, segments);
        let mut inner = tracker.lock();
        inner.is_current = !has_log && !header.is_open && distrust.is_none();
        inner.sidecar = Some(sidecar);
        inner.become_as_read(size_bytes, distrust);
        inner.show();
        drop(inner);
        Ok(tracker)
    }

    fn of(place: PointsFile, size_bytes: u64, grain_bytes: u64, segments: Vec<Segment>) -> Arc<Self> {
        let PointsFile { files, path, image, identity } = place;
        let durable = Arc::new(Bits::new(size_bytes.div_ceil(grain_bytes)));
        let shown = Arc::<Mutex<Arc<PointsSnapshot>>>::default();
        let inner = Inner {
            shown: Arc::clone(&shown),
            files,
            path,
            sidecar: None,
            image,
            identity,
            coming: None,
            size_bytes,
            grain_bytes,
            segments,
            durable,
            is_open: false,
            is_current: false,
            ahead: 0,
            appends: 0,
            counted_at: 0,
            failed: None,
        };
        Arc::new(Self { inner: Mutex::new(inner), shown, worker: BackgroundWorker::new("tracker", mark_all) })
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The view of the last segment. There is a point.
    pub(crate) fn view(self: &Arc<Self>, inner: &Inner) -> Arc<View> {
        Arc::new(View {
            tracker: Arc::clone(self),
            grain_shift: inner.grain_bytes.trailing_zeros(),
            exact: inner.last_bits(),
            durable: Arc::clone(&inner.durable),
        })
    }

    fn shown(&self) -> Arc<PointsSnapshot> {
        Arc::clone(&self.shown.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The points, the oldest first.
    pub(crate) fn points(&self, size_bytes: u64) -> Vec<TrackPoint> {
        let shown = self.shown();
        points_of(&shown.segments, shown.grain_bytes, size_bytes, shown.everything.as_deref())
    }

    /// The names and ids of the points, the oldest first.
    pub(crate) fn names(&self) -> Vec<(String, u64)> {
        self.shown().segments.iter().map(|segment| (segment.name.clone(), segment.id())).collect()
    }

    /// What has changed; `None` if there is no such point. The disk has `size_bytes` now.
    pub(crate) fn changed(&self, wanted: &ChangesQuery<'_>, size_bytes: u64) -> Option<Changed> {
        let shown = self.shown();
        wanted.changed(&shown.segments, shown.grain_bytes, size_bytes, shown.everything.as_deref())
    }

    /// Waits until the worker has no job and no reference to the tracker. Must not be called by it.
    pub(crate) fn settle(&self) {
        self.worker.settle();
    }
}

/// Marks all ranges that have gathered, with one sync.
fn mark_all(tracker: &Arc<Tracker>, marks: Vec<Mark>, _since: NewJobs<'_, Mark>) {
    let mut inner = tracker.lock();
    let marked = inner.mark(&marks);
    for mark in marks {
        let told = marked.as_ref().map_err(|error| io::Error::new(error.kind(), error.to_string())).copied();
        match mark.waiter {
            Waiter::Ticket(ticket) => ticket.complete(told),
            // The waiting thread may have ended.
            Waiter::Thread(sender) => drop(sender.send(told)),
        }
    }
    if marked.is_ok() && inner.wants_checkpoint() {
        // A failure gives the file up, which the next request learns.
        let _ = inner.checkpoint();
    }
}

impl Inner {
    fn grains(&self) -> u64 {
        self.size_bytes.div_ceil(self.grain_bytes)
    }

    /// Takes over what the file says for a disk that has `size_bytes` now.
    fn become_as_read(&mut self, size_bytes: u64, distrust: Option<String>) {
        if let (Some(reason), Some(last)) = (distrust, self.segments.last_mut()) {
            last.everything.get_or_insert(reason);
        }
        if size_bytes != self.size_bytes {
            self.is_current = false;
            self.set_size(size_bytes);
        }
    }

    /// Marks ranges as changed, durably on return.
    fn mark(&mut self, marks: &[Mark]) -> io::Result<()> {
        self.open()?;
        if self.failed.is_none()
            && let Err(error) = self.try_mark(marks)
        {
            self.give_up(&error)?;
        }
        if self.failed.is_some() {
            // Requests of a former view, too.
            marks.iter().for_each(|mark| mark.durable.fill());
        }
        Ok(())
    }

    fn try_mark(&mut self, marks: &[Mark]) -> io::Result<()> {
        let mut runs: Vec<GrainRun> = Vec::new();
        let durable = Arc::clone(&self.durable);
        for mark in marks.iter().filter(|mark| Arc::ptr_eq(&mark.durable, &durable)) {
            let is_in = |run: &GrainRun| {
                run.first <= mark.run.first && mark.run.first + mark.run.count <= run.first + run.count
            };
            if !durable.holds(mark.run) && !runs.iter().any(is_in) {
                let run = self.with_run_ahead(mark.run);
                runs.push(run);
            }
        }
        if runs.is_empty() {
            return Ok(());
        }
        match &mut self.sidecar {
            Some(sidecar) if sidecar.has_room(runs.len()) => sidecar.append(&runs)?,
            // A checkpoint writes the exact bits, which requests set before they asked.
            _ => return self.checkpoint_of_marks(marks),
        }
        self.appends += 1;
        runs.iter().for_each(|run| self.durable.set(*run));
        Ok(())
    }

    /// A checkpoint instead of records, when the log is full.
    fn checkpoint_of_marks(&mut self, marks: &[Mark]) -> io::Result<()> {
        self.try_checkpoint(true)?;
        let last = self.segments.last().map(|last| Arc::clone(&last.exact));
        for mark in marks.iter().filter(|mark| Arc::ptr_eq(&mark.durable, &self.durable)) {
            debug_assert!(last.as_ref().is_some_and(|exact| exact.holds(mark.run)), "set before it was asked for");
            self.durable.set(mark.run);
        }
        Ok(())
    }

    /// The run to be marked for a range: an aligned one around it, if the budget allows that.
    fn with_run_ahead(&mut self, wanted: GrainRun) -> GrainRun {
        let grains = self.grains();
        let Some(last) = self.segments.last() else { return wanted };
        let budget = AHEAD_BYTES / self.grain_bytes;
        let align = (RUN_BYTES / self.grain_bytes).max(1);
        let end = (wanted.first + wanted.count).next_multiple_of(align).min(grains);
        let first = wanted.first / align * align;
        let wide = GrainRun { first, count: end - first };
        let more = self.durable.missing_in_both(&last.exact, wide);
        if self.ahead + more > budget && self.appends >= self.counted_at + COUNT_EVERY {
            self.counted_at = self.appends;
            self.ahead = self.durable.more_than(&last.exact);
        }
        if self.ahead + more > budget {
            return GrainRun { count: wanted.count.min(grains.saturating_sub(wanted.first)), ..wanted };
        }
        self.ahead += more;
        wide
    }

    /// Whether a checkpoint pays: the budget is used up, and there were many appends.
    fn wants_checkpoint(&self) -> bool {
        self.appends >= APPENDS_MIN && (self.ahead + RUN_BYTES / self.grain_bytes) * self.grain_bytes > AHEAD_BYTES
    }

    /// Writes the exact bits and empties the log. On failure the file is given up.
    ///
    /// # Errors
    /// The file can be neither written nor removed.
    pub(crate) fn checkpoint(&mut self) -> io::Result<()> {
        let done = match &self.failed {
            Some(_) => Ok(()),
            None => self.try_checkpoint(self.is_open).or_else(|error| self.give_up(&error)),
        };
        self.show();
        done
    }

    /// Shows the segments to others. They must be complete: no request uses a former view.
    fn show(&self) {
        let shown = PointsSnapshot {
            segments: self.segments.clone(),
            grain_bytes: self.grain_bytes,
            everything: self.failed.clone(),
        };
        *self.shown.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(shown);
    }

    fn try_checkpoint(&mut self, is_open: bool) -> io::Result<()> {
        self.is_current = false;
        self.write(is_open, self.coming)
    }

    /// Writes all segments and a header, and begins an empty log. Also where the area has not
    /// changed since it was read: a request may have set bits since, and waits for them.
    fn write(&mut self, is_open: bool, coming: Option<Identity>) -> io::Result<()> {
        let Some(last) = self.segments.last() else { return Ok(()) };
        // First the durable bits are taken back, then the exact ones are read: see the module.
        self.durable.keep_only(&last.exact);
        let written = Arc::new(last.exact.resized(last.exact.grains()));
        let mut segments = self.segments.clone();
        segments.iter_mut().rev().take(1).for_each(|last| last.exact = Arc::clone(&written));
        let (identity, size_bytes, grain_bytes) = (self.identity, self.size_bytes, self.grain_bytes);
        let change = move |header: &mut Header| {
            (header.is_open, header.identity, header.coming) = (is_open, identity, coming);
            (header.size_bytes, header.grain_bytes) = (size_bytes, grain_bytes);
        };
        match &mut self.sidecar {
            Some(sidecar) => sidecar.checkpoint(&segments, change)?,
            None => {
                let mut header = Header {
                    sequence: 0,
                    is_open,
                    size_bytes,
                    grain_bytes,
                    segments: self.segments.len() as u32,
                    area_crc: 0,
                    area_offset_bytes: diskwright_format::tracks::AREAS_OFFSET_BYTES,
                    identity,
                    coming,
                };
                change(&mut header);
                self.sidecar = Some(Sidecar::create(&self.files, &self.path, header, &segments)?);
            }
        }
        self.durable.add(&written);
        // Requests that pass from now on change the bits, but not the area.
        self.is_current = !is_open;
        (self.ahead, self.appends, self.counted_at) = (0, 0, 0);
        if last.everything.is_some() {
            self.durable.fill();
        }
        Ok(())
    }

    /// Removes the file, as it cannot be written. No request needs marks any more.
    fn give_up(&mut self, error: &io::Error) -> io::Result<()> {
        let removed = match self.files.remove(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed,
        };
        removed.and_then(|()| self.files.sync_directory_of(&self.path)).map_err(|second| {
            let text = format!(
                "{}: the changed ranges cannot be recorded ({error}), and the file cannot be removed ({second}), so nothing is written: free space on its file system, or remove the file",
                self.path.display()
            );
            io::Error::new(error.kind(), text)
        })?;
        self.failed = Some(format!(
            "{}: it could not be written ({error}), so it was removed: the points are lost when the disk is closed",
            self.path.display()
        ));
        self.durable.fill();
        let shown = PointsSnapshot { everything: self.failed.clone(), ..self.shown_now() };
        *self.shown.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(shown);
        Ok(())
    }

    fn shown_now(&self) -> PointsSnapshot {
        let shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        PointsSnapshot { segments: shown.segments.clone(), grain_bytes: shown.grain_bytes, everything: None }
    }

    /// Removes the file: there is no point any more.
    pub(crate) fn remove(&mut self) -> io::Result<()> {
        match self.files.remove(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            removed => removed?,
        }
        self.files.sync_directory_of(&self.path)
    }

    /// Why the file was given up.
    pub(crate) fn failed(&self) -> Option<&str> {
        self.failed.as_deref()
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The file system of the image.
    pub(crate) fn files(&self) -> &Files {
        &self.files
    }
}
