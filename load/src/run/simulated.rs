//! A simulated device for tests, in real time or without delay. It records every request.
//!
//! Each request waits for a free server of `servers` and takes `service` on it: a queueing system
//! with a known knee. A request may also be slow, or fail, by its number.

use diskwright_store::{BlockDevice, BlockQueue, Completion, Geometry, Operation, PushError, QueueOptions, Request};
use std::{
    io,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

/// A recorded request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RecordedRequest {
    pub(crate) operation: Operation,
    pub(crate) offset_bytes: u64,
    pub(crate) len_bytes: u64,
    pub(crate) fua: bool,
    /// Requests in flight on the queue, this one included.
    pub(crate) depth: usize,
}

/// Decides whether a request fails.
pub(crate) type FailRule = fn(&RecordedRequest) -> bool;

/// A simulated device.
#[derive(Debug, Clone)]
pub(crate) struct Simulated {
    pub(crate) geometry: Geometry,
    /// Service time of each request; zero: all requests complete at the next reap.
    pub(crate) service: Duration,
    pub(crate) servers: usize,
    /// Number of a slow request, counted over all queues from 0, and its service time.
    pub(crate) slow: Option<(usize, Duration)>,
    /// From this request on, a request for which the function is true fails.
    pub(crate) fails: Option<(usize, FailRule)>,
    /// From this request on, the queue fails.
    pub(crate) breaks: Option<usize>,
    pub(crate) noted: Arc<Mutex<Vec<RecordedRequest>>>,
}

impl Simulated {
    pub(crate) fn new(size_bytes: u64) -> Self {
        Self {
            geometry: Geometry { size_bytes, logical_sector_bytes: 512, physical_sector_bytes: 4096, read_only: false },
            service: Duration::ZERO,
            servers: 1,
            slow: None,
            fails: None,
            breaks: None,
            noted: Arc::default(),
        }
    }

    pub(crate) fn noted(&self) -> Vec<RecordedRequest> {
        self.noted.lock().unwrap().clone()
    }
}

impl BlockDevice for Simulated {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn open_queue(&self, options: &QueueOptions<'_>) -> io::Result<Box<dyn BlockQueue>> {
        assert!(options.slab.is_some() || options.depth == 1, "the buffers of a load must be registered");
        if self.servers == 0 {
            return Err(io::Error::other("it has no servers"));
        }
        Ok(Box::new(SimulatedQueue {
            device: self.clone(),
            most: options.depth,
            free_at: vec![Instant::now(); self.servers],
            pending: Vec::new(),
        }))
    }
}

#[derive(Debug)]
struct SimulatedQueue {
    device: Simulated,
    most: usize,
    /// Time at which each server is free.
    free_at: Vec<Instant>,
    pending: Vec<(Instant, Completion)>,
}

impl BlockQueue for SimulatedQueue {
    fn depth(&self) -> usize {
        self.most
    }

    fn in_flight(&self) -> usize {
        self.pending.len()
    }

    fn push(&mut self, request: Request) -> Result<(), Box<PushError>> {
        assert!(self.pending.len() < self.most, "more requests in flight than the queue depth");
        diskwright_store::queue::validate(&request, &self.device.geometry).unwrap();
        let noted = RecordedRequest {
            operation: request.operation,
            offset_bytes: request.offset_bytes,
            len_bytes: request.len_bytes,
            fua: request.fua,
            depth: self.pending.len() + 1,
        };
        let number = {
            let mut all = self.device.noted.lock().unwrap();
            all.push(noted);
            all.len() - 1
        };
        let fails = self.device.fails.is_some_and(|(from, which)| number >= from && which(&noted));
        let result = if fails { Err(io::Error::other("broken sector")) } else { Ok(()) };
        let service = match self.device.slow {
            Some((slow, service)) if slow == number => service,
            _ => self.device.service,
        };
        let now = Instant::now();
        let server = self.free_at.iter_mut().min().unwrap();
        let ends = now.max(*server) + service;
        *server = ends;
        let Request { tag, buf, segments, .. } = request;
        self.pending.push((ends, Completion { tag, buf, segments, result }));
        Ok(())
    }

    fn reap(&mut self, at_least: usize, out: &mut Vec<Completion>) -> io::Result<()> {
        let seen = self.device.noted.lock().unwrap().len();
        if self.device.breaks.is_some_and(|from| seen > from) {
            self.pending.clear();
            return Err(io::Error::other("the device is gone"));
        }
        self.pending.sort_by_key(|(ends, _)| *ends);
        let wanted = at_least.min(self.pending.len());
        if let Some((ends, _)) = wanted.checked_sub(1).map(|last| &self.pending[last]) {
            std::thread::sleep(ends.saturating_duration_since(Instant::now()));
        }
        let now = Instant::now();
        let ended = self.pending.iter().take_while(|(ends, _)| *ends <= now).count().max(wanted);
        out.extend(self.pending.drain(..ended).map(|(_, completion)| completion));
        Ok(())
    }
}
