//! A few requests held back, so that a disk that ends its requests in batches has something to do
//! while a batch is answered.
//!
//! ```text
//!                    without                                      with
//!   disk     |################|        |#######          |############|====|############|====
//!   server                    |aaa|                                   |r aaa
//!   client                        |ask|                                     |ask|
//! ```
//!
//! Some disks take what is there as one batch and tell of its end once; virtual ones do (a virtio
//! disk here raised one interrupt for 32 requests). Then the disk has nothing to do from there
//! until the first answers have gone out, their client has woken up and has asked again: here for a
//! fifth of the time. So while batches come, up to eight of the requests that could be with the
//! disk wait here, and go to it (`r`, by an enter of its own) before anything is answered. Of 4 KiB
//! reads at depth 32 that made 1.04 to 1.09 times as many by NBD, for 1.1 times the worker's time,
//! and 1.08 to 1.12 times as many of an attached disk. (Half of them, 16, were no more.)
//!
//! Small reads alone are held back: large ones keep the disk busy for long enough, and where they
//! come in order they are slower with gaps between (nbdcopy then had 0.66 of the disk's speed
//! instead of 0.78 to 0.86). Of a disk that ends its requests one by one the largest batch soon
//! counts as small, and nothing is held back.
//!
//! Invariant: while something is held, something is with the disk, whose end lets it go.

use crate::metrics::Counter;
use diskwright_store::{BlockQueue, Completion, Operation, PushError, Request, SharedRing};
use std::{io, sync::Arc};

/// Batches below this are no batches.
const BATCH_MIN: usize = 8;

/// Most that is held back.
const HELD_MAX: usize = 8;

/// Of a batch one in so many is held back.
const SHARE: usize = 3;

/// Longest read that is.
const SMALL_BYTES: u64 = 32 << 10;

/// After so many smaller batches the largest counts a half.
const FORGET: usize = 32;

/// A queue on a shared ring that does so.
#[derive(Debug)]
pub(crate) struct Reserve {
    inner: Box<dyn BlockQueue>,
    ring: SharedRing,
    held: Vec<Request>,
    /// The largest batch lately.
    batch: usize,
    /// Smaller ones since it was last looked at.
    smaller: usize,
    /// Reads that were held back so far.
    held_total: Arc<Counter>,
}

impl Reserve {
    /// Over a queue on `ring`. Each read that is held back is counted in `held_total`.
    pub(crate) fn over(inner: Box<dyn BlockQueue>, ring: &SharedRing, held_total: Arc<Counter>) -> Self {
        Self { inner, ring: ring.clone(), held: Vec::new(), batch: 0, smaller: 0, held_total }
    }

    /// How many are held back, with batches as they come.
    fn wanted(&self) -> usize {
        if self.batch < BATCH_MIN { 0 } else { (self.batch / SHARE).min(HELD_MAX) }
    }

    fn learn(&mut self, batch: usize) {
        if batch >= self.batch {
            (self.batch, self.smaller) = (batch, 0);
            return;
        }
        self.smaller += 1;
        if self.smaller == FORGET {
            (self.batch, self.smaller) = (self.batch / 2, 0);
        }
    }

    /// Gives everything that is held to the disk. What it refuses ends.
    fn let_go(&mut self, out: &mut Vec<Completion>) {
        for request in self.held.drain(..) {
            if let Err(refused) = self.inner.push(request) {
                let Request { tag, buf, segments, .. } = refused.request;
                out.push(Completion { tag, buf, segments, result: Err(refused.reason) });
            }
        }
    }
}

impl BlockQueue for Reserve {
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
        let wanted = self.wanted();
        if request.operation == Operation::Read
            && request.len_bytes <= SMALL_BYTES
            && self.held.len() < wanted
            && self.inner.in_flight() >= 2 * wanted
            && self.in_flight() < self.depth()
        {
            self.held.push(request);
            self.held_total.add(1);
            return Ok(());
        }
        self.inner.push(request)
    }

    fn reap(&mut self, at_least: usize, out: &mut Vec<Completion>) -> io::Result<()> {
        if at_least > self.inner.in_flight() {
            self.let_go(out);
        }
        let before = out.len();
        let reaped = self.inner.reap(at_least, out);
        let batch = out.len() - before;
        if batch > 0 {
            self.learn(batch);
            if !self.held.is_empty() {
                self.let_go(out);
                self.ring.go_on()?;
                // A disk that is not on the ring (behind a lane) starts what it was given when it
                // is looked at, and nothing else would wake the worker for that.
                return reaped.and_then(|()| self.inner.reap(0, out));
            }
        }
        reaped
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use diskwright_store::IoBuf;
    use std::{cell::RefCell, rc::Rc};

    /// A disk that ends `batch` requests at a time, once it has nearly as many or is made to.
    #[derive(Debug, Default)]
    struct Batches {
        batch: usize,
        waiting: Rc<RefCell<Vec<Request>>>,
        refuses: bool,
    }

    impl BlockQueue for Batches {
        fn depth(&self) -> usize {
            64
        }
        fn in_flight(&self) -> usize {
            self.waiting.borrow().len()
        }
        fn push(&mut self, request: Request) -> Result<(), Box<PushError>> {
            if self.refuses {
                return Err(Box::new(PushError { request, reason: io::ErrorKind::InvalidInput.into() }));
            }
            self.waiting.borrow_mut().push(request);
            Ok(())
        }
        fn reap(&mut self, at_least: usize, out: &mut Vec<Completion>) -> io::Result<()> {
            let mut waiting = self.waiting.borrow_mut();
            let is_batch = waiting.len() >= self.batch * 3 / 4 || at_least > 0;
            let count = if is_batch { waiting.len().min(self.batch.max(at_least)) } else { 0 };
            out.extend(waiting.drain(..count).map(|request| Completion {
                tag: request.tag,
                buf: request.buf,
                segments: request.segments,
                result: Ok(()),
            }));
            Ok(())
        }
    }

    fn read(tag: u64) -> Request {
        Request::read(0, 512, IoBuf::new(512), tag)
    }

    /// A reserve over a disk of such batches, and what the disk has.
    fn reserve(batch: usize) -> Option<(Reserve, Rc<RefCell<Vec<Request>>>)> {
        let Ok(ring) = SharedRing::new(8, None) else {
            println!("skipped: no io_uring here");
            return None;
        };
        let disk = Batches { batch, ..Batches::default() };
        let waiting = Rc::clone(&disk.waiting);
        Some((Reserve::over(Box::new(disk), &ring, Arc::default()), waiting))
    }

    fn fill(queue: &mut Reserve, tags: std::ops::Range<u64>) {
        tags.for_each(|tag| queue.push(read(tag)).unwrap());
    }

    #[test]
    fn some_wait_where_batches_come_and_go_as_soon_as_one_has_ended() {
        let Some((mut queue, waiting)) = reserve(32) else { return };
        fill(&mut queue, 0..32);
        assert_eq!((waiting.borrow().len(), queue.in_flight()), (32, 32), "nothing is known of it yet");
        let mut out = Vec::new();
        queue.reap(0, &mut out).unwrap();
        fill(&mut queue, 32..64);
        assert_eq!((waiting.borrow().len(), queue.in_flight()), (24, 32));
        out.clear();
        queue.reap(0, &mut out).unwrap();
        assert_eq!((out.len(), waiting.borrow().len(), queue.in_flight()), (24, 8, 8));
        queue.reap(8, &mut out).unwrap();
        let mut tags: Vec<u64> = out.iter().map(|completion| completion.tag).collect();
        tags.sort_unstable();
        assert_eq!(tags, (32..64).collect::<Vec<_>>(), "each ends once");
    }

    #[test]
    fn nothing_waits_of_few_or_of_changes_or_of_large_reads_or_where_requests_end_one_by_one() {
        let Some((mut queue, waiting)) = reserve(32) else { return };
        let mut out = Vec::new();
        fill(&mut queue, 0..32);
        queue.reap(0, &mut out).unwrap();
        fill(&mut queue, 0..16);
        assert_eq!(waiting.borrow().len(), 16, "as many as twice what would be held are with the disk first");
        for tag in 0..4 {
            queue.push(Request::write(0, 512, IoBuf::new(512), tag)).unwrap();
            queue.push(Request::read(0, 64 << 10, IoBuf::new(64 << 10), tag)).unwrap();
        }
        assert_eq!(waiting.borrow().len(), 24);
        let Some((mut queue, waiting)) = reserve(1) else { return };
        for tag in 0..1000 {
            queue.push(read(tag)).unwrap();
            if queue.in_flight() == 32 {
                assert_eq!(waiting.borrow().len(), 32);
                queue.reap(0, &mut out).unwrap();
            }
        }
    }

    #[test]
    fn what_was_a_batch_is_forgotten() {
        let Some((mut queue, _)) = reserve(32) else { return };
        queue.learn(32);
        assert_eq!(queue.wanted(), 8);
        (0..3 * FORGET).for_each(|_| queue.learn(1));
        assert_eq!(queue.wanted(), 0);
    }

    #[test]
    fn whoever_waits_for_all_gets_all_and_what_is_refused_ends() {
        let Some((mut queue, waiting)) = reserve(32) else { return };
        let mut out = Vec::new();
        queue.learn(32);
        fill(&mut queue, 0..24);
        assert!(queue.in_flight() > waiting.borrow().len());
        queue.reap(24, &mut out).unwrap();
        assert_eq!((out.len(), queue.in_flight()), (24, 0));
        let disk = Batches { batch: 32, refuses: true, ..Batches::default() };
        queue.held.push(read(7));
        queue.inner = Box::new(disk);
        out.clear();
        queue.reap(1, &mut out).unwrap();
        assert!(out.len() == 1 && out[0].tag == 7 && out[0].result.is_err() && out[0].buf.is_some());
    }
}
