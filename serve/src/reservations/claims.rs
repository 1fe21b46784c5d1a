//! Bytes that one command reads and then writes, with no other write of them in between.
//!
//! ```text
//!   COMPARE AND WRITE, ORWRITE ─▶ Claims::claim ─┬─ None: a write of the bytes is in flight
//!                                                └─ Claim ─▶ read ─▶ compare ─▶ push_claimed
//!   any other write, by any door ─▶ push ─┬─ noted ─▶ the disk's queue ─▶ reap: no longer noted
//!                                         └─ claimed bytes: held until the claim ends
//! ```
//!
//! A *watch* is told of writes to its ranges, before these begin (`Claims::watch`). A copy by a
//! token ends when the data have changed that the token stands for.
//!
//! All doors of a disk have the same [`Claims`], and each of their queues is a [`ClaimedQueue`].
//! Which writes are noted depends on the doors ([`Noted`]). A write that is not noted costs one
//! atomic load.
//!
//! Why nothing slips through: a write is noted before it looks for claims, and a claim is listed
//! before it looks for writes. So at least one of the two sees the other. If both do, the claim is
//! refused, and the write is pushed a moment later.
//!
//! Locks: one for the claims and the list of queues, one for the notes of each queue. A claim takes
//! the second while it has the first. A write has one of them at a time.

use diskwright_store::{Alarm, BlockQueue, Completion, Operation, PushError, Request, SharedRing};
use std::{
    collections::HashMap,
    io,
    ops::Range,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering::SeqCst},
    },
    thread,
    time::Duration,
};

/// How long a write waits before it looks again whether its bytes are free. A claim lasts as long
/// as a read and a write.
const AGAIN_AFTER: Duration = Duration::from_micros(100);

/// Which writes are noted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Noted {
    #[default]
    None,
    /// A door is open by which disks are reserved: those of clients that take no part in it, for
    /// which a preemption waits.
    Outsiders,
    /// A door is open that claims bytes: all.
    All,
}

/// The claimed bytes of a disk, and its writes in flight.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    /// A value of [`Noted`].
    noted: AtomicU8,
    /// Number of claims and watches.
    count: AtomicUsize,
    inside: Mutex<Inside>,
}

#[derive(Debug, Default)]
struct Inside {
    claimed: Vec<Range<u64>>,
    watches: Vec<Weak<Watch>>,
    queues: Vec<Weak<Notes>>,
}

/// The writes in flight of a queue, by their tags.
#[derive(Debug)]
struct Notes {
    /// Whether the clients of the queue take no part in reservations.
    is_outsiders: bool,
    writes: Mutex<HashMap<u64, Range<u64>>>,
}

impl Notes {
    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Range<u64>>> {
        self.writes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn overlap(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}

impl Claims {
    /// From now on at least these writes are noted. Those that are in flight now are not.
    pub(crate) fn note(&self, noted: Noted) {
        self.noted.fetch_max(noted as u8, SeqCst);
    }

    /// Claims bytes. `None` if another command has claimed some of them, or writes them now.
    pub(crate) fn claim(self: &Arc<Self>, range: Range<u64>) -> Option<Arc<Claim>> {
        let mut inside = self.lock();
        if inside.claimed.iter().any(|there| overlap(there, &range)) {
            return None;
        }
        inside.claimed.push(range.clone());
        self.count.fetch_add(1, SeqCst);
        let claim = Claim { claims: Arc::clone(self), range };
        let is_written = inside.notes().any(|notes| notes.lock().values().any(|write| overlap(write, &claim.range)));
        // Before the claim is dropped, which takes the lock.
        drop(inside);
        (!is_written).then(|| Arc::new(claim))
    }

    /// Watches ranges. `None` if some of them are being written.
    pub(crate) fn watch(self: &Arc<Self>, ranges: Vec<Range<u64>>) -> Option<Arc<Watch>> {
        let watch = Arc::new(Watch { claims: Arc::clone(self), ranges, has_changed: AtomicBool::new(false) });
        let mut inside = self.lock();
        inside.watches.push(Arc::downgrade(&watch));
        self.count.fetch_add(1, SeqCst);
        let is_written = inside.claimed.iter().any(|range| watch.covers(range))
            || inside.notes().any(|notes| notes.lock().values().any(|range| watch.covers(range)));
        // Before the watch is dropped, which takes the lock.
        drop(inside);
        (!is_written).then_some(watch)
    }

    /// Whether a write is in flight of a client that takes no part in reservations.
    pub(super) fn have_outsiders_writes(&self) -> bool {
        let mut inside = self.lock();
        inside.notes().any(|notes| notes.is_outsiders && !notes.lock().is_empty())
    }

    /// Tells watches of a write that is about to begin. Returns whether its bytes are claimed.
    fn is_claimed(&self, range: &Range<u64>) -> bool {
        if self.count.load(SeqCst) == 0 {
            return false;
        }
        let inside = self.lock();
        let watches: Vec<Arc<Watch>> = inside.watches.iter().filter_map(Weak::upgrade).collect();
        let is_claimed = inside.claimed.iter().any(|there| overlap(there, range));
        // This may be the last one to have a watch, whose drop takes the lock.
        drop(inside);
        for watch in watches.iter().filter(|watch| watch.covers(range)) {
            watch.has_changed.store(true, SeqCst);
        }
        is_claimed
    }

    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inside {
    /// The notes of the queues that are open.
    fn notes(&mut self) -> impl Iterator<Item = Arc<Notes>> {
        self.queues.retain(|notes| notes.strong_count() > 0);
        self.queues.iter().filter_map(Weak::upgrade)
    }
}

/// Bytes that a command has for itself until this is dropped.
#[derive(Debug)]
pub(crate) struct Claim {
    claims: Arc<Claims>,
    range: Range<u64>,
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut inside = self.claims.lock();
        if let Some(at) = inside.claimed.iter().position(|range| *range == self.range) {
            inside.claimed.swap_remove(at);
            self.claims.count.fetch_sub(1, SeqCst);
        }
    }
}

/// Ranges whose changes are noticed.
#[derive(Debug)]
pub(crate) struct Watch {
    claims: Arc<Claims>,
    ranges: Vec<Range<u64>>,
    has_changed: AtomicBool,
}

impl Watch {
    fn covers(&self, write: &Range<u64>) -> bool {
        self.ranges.iter().any(|range| overlap(range, write))
    }

    /// Whether a write of the ranges has begun.
    pub(crate) fn has_changed(&self) -> bool {
        self.has_changed.load(SeqCst)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.claims.lock().watches.retain(|watch| watch.strong_count() > 0);
        self.claims.count.fetch_sub(1, SeqCst);
    }
}

/// A queue whose writes keep out of claimed bytes. See the module. The tags of its requests in
/// flight differ.
#[derive(Debug)]
pub(crate) struct ClaimedQueue {
    /// Dropped first: a write is noted until it has ended.
    inner: Box<dyn BlockQueue>,
    notes: Arc<Notes>,
    claims: Arc<Claims>,
    /// Number of writes in `notes`.
    noted: usize,
    /// Claims whose writes are in flight, with the tags of these.
    claimed: Vec<(u64, Arc<Claim>)>,
    /// Writes of claimed bytes.
    held: Vec<Request>,
    alarm: Option<Alarm>,
}

impl ClaimedQueue {
    /// `inner` is a queue of the disk with these claims, on `ring`.
    pub(crate) fn over(
        inner: Box<dyn BlockQueue>,
        claims: Arc<Claims>,
        ring: Option<&SharedRing>,
        is_outsiders: bool,
    ) -> Self {
        let notes = Arc::new(Notes { is_outsiders, writes: Mutex::default() });
        claims.lock().queues.push(Arc::downgrade(&notes));
        Self { inner, notes, claims, noted: 0, claimed: Vec::new(), held: Vec::new(), alarm: ring.map(Alarm::new) }
    }

    /// Pushes the write of a command that has claimed the bytes. The claim lasts until the write
    /// has ended, even if the command is given up before.
    pub(crate) fn push_claimed(&mut self, request: Request, claim: Arc<Claim>) -> Result<(), Box<PushError>> {
        let tag = request.tag;
        // Its own claim does not hold it back.
        self.claims.is_claimed(&claim.range);
        self.inner.push(request)?;
        self.claimed.push((tag, claim));
        Ok(())
    }

    /// Pushes the held writes whose bytes are free now. One that the disk refuses is completed with
    /// the error.
    fn release(&mut self, out: &mut Vec<Completion>) {
        for request in std::mem::take(&mut self.held) {
            if let Err(refused) = self.push(request) {
                let Request { tag, buf, segments, .. } = refused.request;
                out.push(Completion { tag, buf, segments, result: Err(refused.reason) });
            }
        }
    }

    fn note(&mut self, tag: u64, range: Range<u64>) {
        self.notes.lock().insert(tag, range);
        self.noted += 1;
    }

    /// A request has ended, or was not pushed.
    fn forget(&mut self, tag: u64) {
        if self.noted > 0 {
            self.noted -= usize::from(self.notes.lock().remove(&tag).is_some());
        }
        self.claimed.retain(|(of, _)| *of != tag);
    }

    fn reap_inner(&mut self, at_least: usize, out: &mut Vec<Completion>) -> io::Result<()> {
        let before = out.len();
        let reaped = self.inner.reap(at_least, out);
        for ended in &out[before..] {
            self.forget(ended.tag);
        }
        reaped
    }
}

fn writes(operation: Operation) -> bool {
    matches!(operation, Operation::Write | Operation::WriteZeroes | Operation::Discard)
}

impl BlockQueue for ClaimedQueue {
    fn depth(&self) -> usize {
        self.inner.depth()
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight() + self.held.len()
    }

    fn memory_alignment_bytes(&self) -> usize {
        self.inner.memory_alignment_bytes()
    }

    fn push(&mut self, request: Request) -> Result<(), Box<PushError>> {
        let from = if self.notes.is_outsiders { Noted::Outsiders } else { Noted::All };
        if !writes(request.operation) || self.claims.noted.load(SeqCst) < from as u8 {
            return self.inner.push(request);
        }
        if !self.held.is_empty() && self.in_flight() >= self.depth() {
            return Err(Box::new(PushError { request, reason: io::ErrorKind::WouldBlock.into() }));
        }
        let tag = request.tag;
        let range = request.offset_bytes..request.offset_bytes.saturating_add(request.len_bytes);
        self.note(tag, range.clone());
        if self.claims.is_claimed(&range) {
            self.forget(tag);
            self.held.push(request);
            if let Some(alarm) = &mut self.alarm {
                alarm.set(AGAIN_AFTER);
            }
            return Ok(());
        }
        self.inner.push(request).inspect_err(|_| self.forget(tag))
    }

    fn reap(&mut self, at_least: usize, out: &mut Vec<Completion>) -> io::Result<()> {
        let has_alarm = self.alarm.as_ref().is_some_and(Alarm::is_set);
        if self.held.is_empty() && !has_alarm {
            return self.reap_inner(at_least, out);
        }
        let wanted = out.len() + at_least.min(self.in_flight());
        loop {
            if let Some(alarm) = &mut self.alarm {
                alarm.take();
            }
            self.release(out);
            self.reap_inner(0, out)?;
            if out.len() >= wanted {
                return Ok(());
            }
            if self.held.is_empty() {
                let at_least = wanted - out.len();
                return self.reap_inner(at_least, out);
            }
            if self.inner.in_flight() > 0 {
                self.reap_inner(1, out)?;
            } else {
                thread::sleep(AGAIN_AFTER);
            }
        }
    }
}

#[cfg(test)]
mod tests;
