//! The `null:` target: a block device that completes every request at once and moves no data.
//!
//! The IOPS of `null:` are the upper limit of the generator: the cost of making requests, reading
//! the clock and recording latencies, through the same traits as every other target.

use diskwright_store::{
    BlockDevice, BlockQueue, Completion, Geometry, PushError, QueueOptions, Request, queue::validate,
};
use std::io;

/// A device that completes every request at the next reap. Reads leave their buffer unchanged.
#[derive(Debug, Clone, Copy)]
pub struct NullDevice {
    size_bytes: u64,
}

impl NullDevice {
    /// A device of `size_bytes`, rounded down to a multiple of 4096.
    pub fn new(size_bytes: u64) -> Self {
        Self { size_bytes: size_bytes & !4095 }
    }
}

impl BlockDevice for NullDevice {
    fn geometry(&self) -> Geometry {
        Geometry {
            size_bytes: self.size_bytes,
            logical_sector_bytes: 512,
            physical_sector_bytes: 4096,
            read_only: false,
        }
    }

    fn open_queue(&self, options: &QueueOptions<'_>) -> io::Result<Box<dyn BlockQueue>> {
        let depth = options.depth.max(1);
        Ok(Box::new(NullQueue { geometry: self.geometry(), depth, done: Vec::with_capacity(depth) }))
    }
}

#[derive(Debug)]
struct NullQueue {
    geometry: Geometry,
    depth: usize,
    done: Vec<Completion>,
}

impl BlockQueue for NullQueue {
    fn depth(&self) -> usize {
        self.depth
    }

    fn in_flight(&self) -> usize {
        self.done.len()
    }

    fn push(&mut self, request: Request) -> Result<(), Box<PushError>> {
        if self.done.len() == self.depth {
            return Err(Box::new(PushError { request, reason: io::ErrorKind::WouldBlock.into() }));
        }
        if let Err(reason) = validate(&request, &self.geometry) {
            return Err(Box::new(PushError { request, reason }));
        }
        self.done.push(Completion { tag: request.tag, buf: request.buf, segments: request.segments, result: Ok(()) });
        Ok(())
    }

    fn reap(&mut self, _at_least: usize, out: &mut Vec<Completion>) -> io::Result<()> {
        out.append(&mut self.done);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_complete_at_the_next_reap_and_the_queue_keeps_its_depth() {
        let device = NullDevice::new(1 << 20);
        let mut queue = device.open_queue(&QueueOptions { depth: 2, ..Default::default() }).unwrap();
        queue.push(Request::flush(1)).unwrap();
        queue.push(Request::discard(0, 4096, 2)).unwrap();
        assert_eq!(queue.push(Request::flush(3)).unwrap_err().reason.kind(), io::ErrorKind::WouldBlock);
        let mut done = Vec::new();
        queue.reap(1, &mut done).unwrap();
        assert_eq!(done.iter().map(|completion| completion.tag).collect::<Vec<_>>(), [1, 2]);
        assert_eq!(queue.in_flight(), 0);
        let beyond = queue.push(Request::discard(1 << 20, 4096, 4)).unwrap_err();
        assert_eq!(beyond.reason.kind(), io::ErrorKind::InvalidInput);
    }
}
