//! Holds back a few reads, so that a disk that completes requests in batches has work while the
//! server answers a batch.
//!
//! ```text
//!              without                                      with
//!   disk     |################|        |#######     |############|====|============|====
//!   server                    |aaa|                              |r aaa
//!   client                        |ask|                                |ask|
//! ```
//!
//! Some disks take all queued requests as one batch and signal their completion once. Virtual
//! disks do this: a virtio disk here raised one interrupt for 32 requests. Such a disk is idle from
//! the end of a batch until the first answers have been sent, the client has woken up, and its new
//! requests have arrived: a fifth of the time here.
//!
//! While completions come in batches, up to eight requests that could already be at the disk are
//! held back in this queue. When a batch ends, the held requests are submitted first (`r`, an
//! `io_uring_enter` of its own), and only then is the batch answered. For 4 KiB reads at depth 32
//! this gave 1.04 to 1.09 times the reads by NBD, for 1.1 times the worker's CPU time, and 1.08 to
//! 1.12 times the reads of an attached disk. Holding back half of the requests (16) gave no more.
//!
//! Only small reads are held back. Large reads keep the disk busy long enough, and sequential large
//! reads are slower with gaps between them: nbdcopy reached 0.66 of the disk's speed instead of
//! 0.78 to 0.86. A disk that completes requests one by one soon has a small batch size, and then
//! nothing is held back.
//!
//! Invariant: while a request is held, another is at the disk. The completion of that one releases
//! the held ones.

use crate::metrics::Counter;
use diskwright_store::{BlockQueue, Completion, Operation, PushError, Request, SharedRing};
use std::{io, sync::Arc};

/// Smaller sets of completions are not a batch.
const BATCH_MIN: usize = 8;

/// Maximum number of requests that are held at once.
const HELD_MAX: usize = 8;

/// One request of this many in a batch is held.
const SHARE: usize = 3;

/// The longest read that is held.
const SMALL_BYTES: u64 = 32 << 10;

/// After this many smaller batches the recorded batch size is halved.
const FORGET: usize = 32;

/// A queue on a shared ring that holds back small reads. See the module.
#[derive(Debug)]
pub(crate) struct Reserve {
    inner: Box<dyn BlockQueue>,
    ring: SharedRing,
    held: Vec<Request>,
    /// The largest number of completions that one reap has returned lately.
    batch: usize,
    /// Smaller batches since `batch` was last changed.
    smaller: usize,
    held_total: Arc<Counter>,
}

impl Reserve {
    /// `ring` must be the ring of `inner`. Each read that is held back is counted in `held_total`.
    pub(crate) fn over(inner: Box<dyn BlockQueue>, ring: &SharedRing, held_total: Arc<Counter>) -> Self {
        Self { inner, ring: ring.clone(), held: Vec::new(), batch: 0, smaller: 0, held_total }
    }

    /// How many requests to hold, given the recorded batch size.
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

    /// Submits all held requests. A request that the disk refuses is completed with the error.
    fn submit_held(&mut self, out: &mut Vec<Completion>) {
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
            self.submit_held(out);
        }
        let before = out.len();
        let reaped = self.inner.reap(at_least, out);
        let batch = out.len() - before;
        if batch > 0 {
            self.learn(batch);
            if !self.held.is_empty() {
                self.submit_held(out);
                self.ring.go_on()?;
                // A disk that is not on the ring (one behind a lane) starts new requests only when
                // it is reaped, and nothing else would wake the worker for them.
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

    /// A disk that completes `batch` requests in one reap, once it has three quarters as many or
    /// must.
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

    /// A `Reserve` over a disk with this batch size, and the requests that the disk has.
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
    fn held_reads_are_submitted_as_soon_as_a_batch_has_ended() {
        let Some((mut queue, waiting)) = reserve(32) else { return };
        fill(&mut queue, 0..32);
        assert_eq!((waiting.borrow().len(), queue.in_flight()), (32, 32), "the batch size is not known yet");
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
        assert_eq!(tags, (32..64).collect::<Vec<_>>(), "each request completes once");
    }

    #[test]
    fn low_depth_writes_large_reads_and_single_completions_are_not_held() {
        let Some((mut queue, waiting)) = reserve(32) else { return };
        let mut out = Vec::new();
        fill(&mut queue, 0..32);
        queue.reap(0, &mut out).unwrap();
        fill(&mut queue, 0..16);
        assert_eq!(waiting.borrow().len(), 16, "twice the number of held requests must be at the disk first");
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
    fn a_large_batch_is_forgotten() {
        let Some((mut queue, _)) = reserve(32) else { return };
        queue.learn(32);
        assert_eq!(queue.wanted(), 8);
        (0..3 * FORGET).for_each(|_| queue.learn(1));
        assert_eq!(queue.wanted(), 0);
    }

    #[test]
    fn reap_of_all_submits_held_requests_and_completes_refused_ones() {
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
