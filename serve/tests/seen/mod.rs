//! A disk that records the memory of its requests and can be stopped: in a push, or by holding back
//! all completions.

#![allow(dead_code, reason = "each test file uses only some of these")]

use diskwright_store::{
    BlockDevice, BlockQueue, Completion, Geometry, Operation, PushError, QueueOptions, Request, SegmentMemory,
};
use std::{
    io,
    sync::{Arc, Condvar, Mutex},
};

/// A request that was pushed, and the kind of memory that it came with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    pub operation: Operation,
    pub len_bytes: u64,
    /// 0 for a request with one buffer.
    pub segments: usize,
    /// Address and length of each shared buffer that the request uses.
    pub shared: Vec<(usize, usize)>,
    /// Whether the payload begins on a page.
    pub is_aligned: bool,
}

impl Seen {
    fn of(request: &Request) -> Self {
        let mut shared = Vec::new();
        let mut is_aligned = request
            .buf
            .as_ref()
            .is_none_or(|buf| (buf.as_ptr() as usize + request.buf_offset_bytes).is_multiple_of(4096));
        let segments = request.segments.as_ref().map_or(0, |segments| {
            for segment in segments.iter() {
                let start = match &segment.memory {
                    SegmentMemory::Own(buf) => buf.as_ptr() as usize,
                    SegmentMemory::Shared(buf) => {
                        shared.push((buf.as_ptr() as usize, buf.len()));
                        buf.as_ptr() as usize
                    }
                    SegmentMemory::Mapped(_) => 1,
                };
                is_aligned &= (start + segment.range().start).is_multiple_of(4096);
            }
            segments.count()
        });
        Self { operation: request.operation, len_bytes: request.len_bytes, segments, shared, is_aligned }
    }
}

#[derive(Debug, Default)]
struct State {
    seen: Vec<Seen>,
    /// While true, every push blocks.
    stopped: bool,
    /// Threads that are blocked in a push.
    waiting: usize,
    /// While true, pushed requests are held back.
    holds: bool,
}

/// The disk. Clones share their state.
#[derive(Debug, Clone)]
pub struct Watched {
    inner: Arc<dyn BlockDevice>,
    state: Arc<(Mutex<State>, Condvar)>,
    /// The memory alignment that the queues claim; `None` for the true one.
    alignment_bytes: Option<usize>,
}

impl Watched {
    pub fn new(inner: Arc<dyn BlockDevice>, alignment_bytes: Option<usize>) -> Self {
        Self { inner, state: Arc::default(), alignment_bytes }
    }

    /// Blocks all pushes, or lets them continue.
    pub fn stop(&self, stopped: bool) {
        self.state.0.lock().unwrap().stopped = stopped;
        self.state.1.notify_all();
    }

    /// Waits until a push is blocked.
    pub fn wait_for_push(&self) {
        drop(self.state.1.wait_while(self.state.0.lock().unwrap(), |state| state.waiting == 0).unwrap());
    }

    /// Holds back all requests, or lets them complete.
    pub fn hold(&self, holds: bool) {
        self.state.0.lock().unwrap().holds = holds;
    }

    /// The requests pushed since the last call.
    pub fn take(&self) -> Vec<Seen> {
        std::mem::take(&mut self.state.0.lock().unwrap().seen)
    }
}

impl BlockDevice for Watched {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn open_queue(&self, options: &QueueOptions<'_>) -> io::Result<Box<dyn BlockQueue>> {
        Ok(Box::new(WatchedQueue { inner: self.inner.open_queue(options)?, of: self.clone(), held: Vec::new() }))
    }
}

#[derive(Debug)]
struct WatchedQueue {
    inner: Box<dyn BlockQueue>,
    of: Watched,
    held: Vec<Request>,
}

impl BlockQueue for WatchedQueue {
    fn depth(&self) -> usize {
        self.inner.depth()
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight() + self.held.len()
    }

    fn memory_alignment_bytes(&self) -> usize {
        self.of.alignment_bytes.unwrap_or_else(|| self.inner.memory_alignment_bytes())
    }

    fn push(&mut self, request: Request) -> Result<(), Box<PushError>> {
        let (state, changed) = &*self.of.state;
        let mut state = state.lock().unwrap();
        state.seen.push(Seen::of(&request));
        state.waiting += 1;
        changed.notify_all();
        state = changed.wait_while(state, |state| state.stopped).unwrap();
        state.waiting -= 1;
        if state.holds {
            self.held.push(request);
            return Ok(());
        }
        self.inner.push(request)
    }

    fn reap(&mut self, at_least: usize, out: &mut Vec<Completion>) -> io::Result<()> {
        if !self.of.state.0.lock().unwrap().holds {
            for request in self.held.drain(..) {
                self.inner.push(request).map_err(|refused| refused.reason)?;
            }
        }
        self.inner.reap(at_least.min(self.inner.in_flight()), out)
    }
}
