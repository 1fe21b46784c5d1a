//! A wrapper around a disk's queue: a panic in the queue becomes an error of that disk's requests.
//!
//! ```text
//!   worker ─▶ PanicGuard ─▶ the disk's queue
//!                 └─ on a panic: drop the queue, fail the requests in flight and all later ones
//! ```
//!
//! A worker serves many disks on one thread and one ring, so a panic in one disk's code must not
//! end the thread. `disk/src/engine/guard.rs` already catches the panics inside a `Disk`. This
//! wrapper catches all others, and the panics of other block devices.
//!
//! A queue that has panicked is dropped at once. If it stayed, no thread would reap its
//! completions, and unread completions keep a shared ring from sleeping.
//!
//! Tags are small numbers and unique among the requests in flight, so a bitmap records which are
//! in flight.

use diskwright_store::{BlockQueue, Completion, PushError, Request};
use std::{
    io,
    panic::{AssertUnwindSafe, catch_unwind},
};

/// Runs code of a disk and turns a panic into an error.
///
/// # Errors
/// The error of `run`; `Other` when it panicked.
pub(crate) fn catch_panic<T>(run: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| Err(panicked()))
}

#[cold]
fn panicked() -> io::Error {
    io::Error::other(
        "internal error: the disk's queue panicked and was closed; stop the server, run `diskwright check` on the image, and report the message on standard error",
    )
}

#[derive(Debug)]
pub(crate) struct PanicGuard {
    /// `None` after a panic.
    inner: Option<Box<dyn BlockQueue>>,
    depth: usize,
    /// Bitmap, indexed by tag.
    in_flight: Vec<u64>,
    /// Tags of requests that failed because the queue panicked. The next reap returns them.
    failed: Vec<u64>,
}

impl PanicGuard {
    /// Tags index a bitmap, so they must stay below a few million.
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

    /// Drops the queue after a panic and marks all requests in flight as failed.
    #[cold]
    fn give_up(&mut self) {
        tracing::error!("a disk's queue panicked: its requests fail");
        let inner = self.inner.take();
        // The drop waits for I/O in flight. If it panics too, the rest of the queue is leaked.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(inner)));
        for (word, bits) in (0..).zip(&mut self.in_flight) {
            let bits = std::mem::take(bits);
            self.failed.extend((0..64).filter(|bit| bits >> bit & 1 == 1).map(|bit| word * 64 + bit));
        }
    }
}

impl BlockQueue for PanicGuard {
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
                // The panic has lost the request, so it is completed with an error by the next
                // reap.
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

    /// Completes one request a reap. Panics at the given push, or in every reap.
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
            assert!(self.panics_at_push_of != Some(request.tag), "push panics on purpose");
            self.waiting.push(request);
            Ok(())
        }
        fn reap(&mut self, _at_least: usize, out: &mut Vec<Completion>) -> io::Result<()> {
            let Some(Request { tag, buf, .. }) = self.waiting.pop() else { return Ok(()) };
            out.push(Completion { tag, buf, segments: None, result: Ok(()) });
            assert!(!self.panics_at_reap, "reap panics on purpose");
            Ok(())
        }
    }

    fn ends(queue: &mut PanicGuard) -> Vec<(u64, bool)> {
        let mut done = Vec::new();
        queue.reap(0, &mut done).unwrap();
        let mut ends: Vec<_> = done.iter().map(|completion| (completion.tag, completion.result.is_ok())).collect();
        ends.sort_unstable();
        ends
    }

    #[test]
    fn a_push_that_panics_fails_requests_in_flight_and_later_ones() {
        let fragile = Fragile { panics_at_push_of: Some(70), ..Fragile::default() };
        let mut queue = PanicGuard::over(Box::new(fragile));
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
    fn a_reap_that_panics_keeps_the_completions_it_has_returned() {
        let mut queue = PanicGuard::over(Box::new(Fragile { panics_at_reap: true, ..Fragile::default() }));
        queue.push(Request::flush(1)).unwrap();
        queue.push(Request::flush(2)).unwrap();
        assert_eq!(ends(&mut queue), [(1, false), (2, true)]);
        assert_eq!(ends(&mut queue), []);
    }
}
