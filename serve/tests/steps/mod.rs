//! A disk that ends its requests in batches of told sizes, whatever the time and the order in which
//! they come.
//!
//! The first batch ends when as many requests as its size wait, then the next, and so on; the last
//! size stands for all that follow in turn with the one before it. So what a server does with
//! batches can be counted, and is the same each time.

#![allow(dead_code, reason = "each test uses a part of it")]

use diskwright_store::{BlockDevice, BlockQueue, Completion, Geometry, PushError, QueueOptions, Request};
use std::io;

/// Requests that a client has in flight.
pub const DEPTH: u64 = 32;

/// Of a batch of 32 a server holds back as many reads.
pub const HELD: u64 = 8;

/// A disk whose first batch is all that a client has in flight; of each later round, what is not
/// held back, and then the rest.
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
    /// How many must wait for the next batch to end.
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
