//! A disk's queue whose panics are errors of its own requests.
//!
//! ```text
//!   worker ─▶ Contained ─▶ the disk's queue
//!                 └─ a panic: the queue is dropped, what was in flight fails, and so does all that is pushed later
//! ```
//!
//! A worker of a server has many disks on one thread and one ring. A panic on the way through one
//! of them must not end the thread. The disk's own queue contains what it can
//! (`disk/src/guard.rs`); this is for the rest, and for other devices. A queue that has panicked is
//! dropped, since a queue that nobody looks at would keep a shared ring from sleeping.
//!
//! Tags of requests are small numbers, none of them in flight twice, so one bit for each says what
//! is in flight.

use diskwright_store::{BlockQueue, Completion, PushError, Request};
use std::{
    io,
    panic::{AssertUnwindSafe, catch_unwind},
};

/// Runs what belongs to a disk. A panic becomes an error.
///
/// # Errors
/// Those of `run`; `Other` when it panicked.
pub(crate) fn contained<T>(run: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| Err(panicked()))
}

#[cold]
fn panicked() -> io::Error {
    io::Error::other(
        "internal error: the disk's queue was given up; stop the server, run `diskwright check`, and report what stands on standard error",
    )
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Contained {
    /// `None` when it has panicked.
    inner: Option<Box<dyn BlockQueue>>,
    depth: usize,
    /// A bit for each tag.
    in_flight: Vec<u64>,
    /// Of requests that failed with the queue, and were not handed out.
    failed: Vec<u64>,
}

impl Contained {
    /// Over a queue that is given tags below a few million.
    pub(crate) fn over(inner: Box<dyn BlockQueue>) -> Self {
        let depth = inner.depth();
        Self { inner: Some(inner), depth, in_flight: Vec::new(), failed: Vec::new() }
    }

    #[inline]
    fn mark(&mut self, tag: u64, in_flight: bool) {
        let (word, bit) = ((tag / 64) as usize, 1 << (tag % 64));
        if word >= self.in_flight.len() {
            self.in_flight.resize(word + 1, 0);
        }
        if in_flight {
            self.in_flight[word] |= bit;
        } else {
            self.in_flight[word] &= !bit;
        }
    }

    /// The queue has panicked.
    #[cold]
    fn give_up(&mut self) {
        tracing::error!("a disk's queue panicked: its requests fail");
        let inner = self.inner.take();
        // Waits for what is in flight. Should that panic too, what is left of the queue is leaked.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(inner)));
        for (word, bits) in (0..).zip(&mut self.in_flight) {
            let bits = std::mem::take(bits);
            self.failed.extend((0..64).filter(|bit| bits >> bit & 1 == 1).map(|bit| word * 64 + bit));
        }
    }
}

impl BlockQueue for Contained {
    fn depth(&self) -> usize {
        self.depth
    }

    fn in_flight(&self) -> usize {
        self.inner.as_ref().map_or(self.failed.len(), |inner| inner.in_flight())
    }

    fn memory_alignment_bytes(&self) -> usize {
        self.inner.as_ref().map_or(1, |inner| inner.memory_alignment_bytes())
    }

    fn push(&mut self, request: Request) -> Result<(), Box<PushError>> {
        let Some(inner) = &mut self.inner else {
            return Err(Box::new(PushError { request, reason: panicked() }));
        };
        let tag = request.tag;
        match catch_unwind(AssertUnwindSafe(|| inner.push(request))) {
            Ok(Ok(())) => self.mark(tag, true),
            Ok(Err(refused)) => return Err(refused),
            Err(_) => {
                // The request is gone with the panic, so it ends in the next reap.
                self.mark(tag, true);
                self.give_up();
            }
        }
        Ok(())
    }

    fn reap(&mut self, at_least: usize, out: &mut Vec<Completion>) -> io::Result<()> {
        let before = out.len();
        let reaped = match &mut self.inner {
            None => Some(Ok(())),
            Some(inner) => catch_unwind(AssertUnwindSafe(|| inner.reap(at_least, out))).ok(),
        };
        for completion in &out[before..] {
            self.mark(completion.tag, false);
        }
        let reaped = reaped.unwrap_or_else(|| {
            self.give_up();
            Ok(())
        });
        let failed = |tag| Completion { tag, buf: None, segments: None, result: Err(panicked()) };
        out.extend(self.failed.drain(..).map(failed));
        reaped
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ends a request at each reap, and panics where it is told to.
    #[derive(Debug, Default)]
    struct Fragile {
        waiting: Vec<Request>,
        panics_at_push_of: Option<u64>,
        panics_at_reap: bool,
    }

    impl BlockQueue for Fragile {
        fn depth(&self) -> usize {
            8
        }
        fn in_flight(&self) -> usize {
            self.waiting.len()
        }
        fn push(&mut self, request: Request) -> Result<(), Box<PushError>> {
            assert!(self.panics_at_push_of != Some(request.tag), "a test has push panic");
            self.waiting.push(request);
            Ok(())
        }
        fn reap(&mut self, _at_least: usize, out: &mut Vec<Completion>) -> io::Result<()> {
            let Some(Request { tag, buf, .. }) = self.waiting.pop() else { return Ok(()) };
            out.push(Completion { tag, buf, segments: None, result: Ok(()) });
            assert!(!self.panics_at_reap, "a test has reap panic");
            Ok(())
        }
    }

    fn ends(queue: &mut Contained) -> Vec<(u64, bool)> {
        let mut done = Vec::new();
        queue.reap(0, &mut done).unwrap();
        let mut ends: Vec<_> = done.iter().map(|completion| (completion.tag, completion.result.is_ok())).collect();
        ends.sort_unstable();
        ends
    }

    #[test]
    fn a_push_that_panics_fails_what_is_in_flight_and_what_comes_later() {
        let fragile = Fragile { panics_at_push_of: Some(70), ..Fragile::default() };
        let mut queue = Contained::over(Box::new(fragile));
        for tag in [3, 64, 5] {
            queue.push(Request::flush(tag)).unwrap();
        }
        assert_eq!(ends(&mut queue), [(5, true)]);
        queue.push(Request::flush(70)).unwrap();
        assert_eq!(queue.in_flight(), 3);
        assert_eq!(ends(&mut queue), [(3, false), (64, false), (70, false)]);
        assert_eq!((queue.in_flight(), ends(&mut queue)), (0, vec![]));
        let refused = queue.push(Request::flush(4)).unwrap_err();
        assert!(refused.request.tag == 4 && refused.reason.to_string().contains("internal error"));
    }

    #[test]
    fn a_reap_that_panics_keeps_what_it_has_handed_out() {
        let mut queue = Contained::over(Box::new(Fragile { panics_at_reap: true, ..Fragile::default() }));
        queue.push(Request::flush(1)).unwrap();
        queue.push(Request::flush(2)).unwrap();
        assert_eq!(ends(&mut queue), [(1, false), (2, true)]);
        assert_eq!(ends(&mut queue), []);
    }
}
