//! A disk that completes its requests in batches of fixed sizes, independent of time.
//!
//! A batch completes when as many requests wait as the batch has. The first batch has [`DEPTH`]
//! requests. After it, batches of `DEPTH - HELD` and of [`HELD`] alternate. So what a server does
//! with batches can be counted, and the counts are the same in each run.

#![allow(dead_code, reason = "each test file uses only some of these")]

use diskwright_store::{BlockDevice, BlockQueue, Completion, Geometry, PushError, QueueOptions, Request};
use std::io;

/// Requests that a client has in flight.
pub const DEPTH: u64 = 32;

/// Reads that a server holds back from a batch of 32.
pub const HELD: u64 = 8;

/// The first batch is a client's first round of requests. Of each later round, the requests that
/// are not held back complete first, then the held ones.
#[derive(Debug)]
pub struct Steps;

impl BlockDevice for Steps {
    fn geometry(&self) -> Geometry {
        Geometry { size_bytes: 1 << 20, logical_sector_bytes: 512, physical_sector_bytes: 4096, read_only: true }
    }

    fn open_queue(&self, _: &QueueOptions<'_>) -> io::Result<Box<dyn BlockQueue>> {
        Ok(Box::new(StepQueue { waiting: Vec::new(), batch: DEPTH as usize }))
    }
}

#[derive(Debug)]
struct StepQueue {
    waiting: Vec<Request>,
    /// Number of requests that must wait before the next batch completes.
    batch: usize,
}

impl BlockQueue for StepQueue {
    fn depth(&self) -> usize {
        1024
    }

    fn in_flight(&self) -> usize {
        self.waiting.len()
    }

    fn push(&mut self, request: Request) -> Result<(), Box<PushError>> {
        self.waiting.push(request);
        Ok(())
    }

    fn reap(&mut self, _: usize, out: &mut Vec<Completion>) -> io::Result<()> {
        if self.waiting.len() < self.batch {
            return Ok(());
        }
        let (first, rest) = ((DEPTH - HELD) as usize, HELD as usize);
        let ended = self.waiting.drain(..self.batch);
        out.extend(ended.map(|request| Completion {
            tag: request.tag,
            buf: request.buf,
            segments: request.segments,
            result: Ok(()),
        }));
        self.batch = if self.batch == first { rest } else { first };
        Ok(())
    }
}
