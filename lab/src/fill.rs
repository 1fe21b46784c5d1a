//! Filling a target through its block queue, and proving that it reads back the same bytes.
//!
//! ```text
//!   free buffer ─ contents of (seed, offset) ─▶ push write ─▶ reap ─▶ free buffer ...            fill, then flush
//!   free buffer ────────────────────────────▶ push read  ─▶ reap ─▶ compare with (seed, offset)  verify
//! ```
//!
//! Both keep sixteen requests of 1 MiB in flight, so verifying is itself a test of the queue: parts that went to the wrong
//! buffer or the wrong place show.

use crate::{LabError, Result, data};
use diskwright_store::{
    BlockDevice, BlockQueue, Completion, EngineKind, Extent, ExtentKind, IoBuf, Operation, QueueOptions, Request, Slab,
};
use std::io;

/// Requests in flight.
pub const DEPTH: usize = 16;
/// Bytes of each.
pub const PIECE_BYTES: usize = 1 << 20;

/// Told after each piece how many bytes are done; an error stops the work.
pub type Tick<'a> = dyn FnMut(u64) -> Result<()> + 'a;

/// Writes the contents of `seed` all over `device`, and flushes.
///
/// # Errors
/// [`LabError::Queue`] and [`LabError::Request`] when the device fails; whatever `tick` returns.
pub fn fill(name: &str, device: &dyn BlockDevice, seed: u64, engine: EngineKind, tick: &mut Tick<'_>) -> Result<()> {
    fill_front(name, device, u64::MAX, seed, engine, tick)
}

/// Writes the contents of `seed` over the first `len_bytes` of `device`, or over all of a smaller one, and flushes.
///
/// # Errors
/// As [`fill`].
pub fn fill_front(
    name: &str,
    device: &dyn BlockDevice,
    len_bytes: u64,
    seed: u64,
    engine: EngineKind,
    tick: &mut Tick<'_>,
) -> Result<()> {
    let mut pass = Pass::new(name, device, engine, Operation::Write, seed)?;
    pass.size_bytes = pass.size_bytes.min(len_bytes);
    pass.run(tick)?;
    pass.flush()
}

/// Reads all of `device` and compares it with the contents of `seed`.
///
/// # Errors
/// [`LabError::WrongData`] with the first byte found to differ; else as [`fill`].
pub fn verify(name: &str, device: &dyn BlockDevice, seed: u64, engine: EngineKind, tick: &mut Tick<'_>) -> Result<()> {
    Pass::new(name, device, engine, Operation::Read, seed)?.run(tick)
}

/// Checks that every byte of `device` is data of its top layer, or of any layer with `any_layer`.
///
/// # Errors
/// [`LabError::NotPopulated`]; [`LabError::Queue`] when the device cannot tell.
pub fn check_populated(name: &str, device: &dyn BlockDevice, any_layer: bool) -> Result<()> {
    let size_bytes = device.geometry().size_bytes;
    let mut extents: Vec<Extent> = Vec::new();
    device.extents(0, size_bytes, &mut extents).map_err(|source| LabError::Queue {
        target: name.to_owned(),
        doing: "list its extents".into(),
        source,
    })?;
    let is_data = |extent: &&Extent| extent.kind == ExtentKind::Data && (any_layer || extent.depth == 0);
    let found_bytes = extents.iter().filter(is_data).map(|extent| extent.len_bytes).sum();
    if found_bytes == size_bytes {
        return Ok(());
    }
    Err(LabError::NotPopulated { target: name.to_owned(), found_bytes, size_bytes })
}

/// One pass over a device.
struct Pass<'a> {
    name: &'a str,
    queue: Box<dyn BlockQueue>,
    operation: Operation,
    seed: u64,
    size_bytes: u64,
    free: Vec<IoBuf>,
    done: Vec<Completion>,
}

impl<'a> Pass<'a> {
    fn new(
        name: &'a str,
        device: &dyn BlockDevice,
        engine: EngineKind,
        operation: Operation,
        seed: u64,
    ) -> Result<Self> {
        let slab = Slab::new(DEPTH, PIECE_BYTES);
        let queue = device
            .open_queue(&QueueOptions { depth: DEPTH, engine, slab: Some(&slab), ring: None })
            .map_err(|source| LabError::Queue { target: name.to_owned(), doing: "open a queue".into(), source })?;
        Ok(Self {
            name,
            queue,
            operation,
            seed,
            size_bytes: device.geometry().size_bytes,
            free: slab.take_all(),
            done: Vec::with_capacity(DEPTH),
        })
    }

    /// Bytes of the piece at `offset_bytes`: the tag of a request is its offset.
    fn piece_at(&self, offset_bytes: u64) -> usize {
        (self.size_bytes - offset_bytes).min(PIECE_BYTES as u64) as usize
    }

    fn run(&mut self, tick: &mut Tick<'_>) -> Result<()> {
        let (mut next_bytes, mut done_bytes) = (0, 0);
        while done_bytes < self.size_bytes {
            while next_bytes < self.size_bytes
                && let Some(mut buf) = self.free.pop()
            {
                let len = self.piece_at(next_bytes);
                let request = if self.operation == Operation::Write {
                    data::fill(self.seed, next_bytes, &mut buf[..len]);
                    Request::write(next_bytes, len, buf, next_bytes)
                } else {
                    Request::read(next_bytes, len, buf, next_bytes)
                };
                self.queue.push(request).map_err(|error| self.request_error(next_bytes, error.reason))?;
                next_bytes += len as u64;
            }
            let mut done = std::mem::take(&mut self.done);
            self.queue.reap(1, &mut done).map_err(|source| self.queue_error("reap completions", source))?;
            for completion in done.drain(..) {
                done_bytes += self.finish(completion)?;
            }
            self.done = done;
            tick(done_bytes)?;
        }
        Ok(())
    }

    /// Takes a completed piece. Returns its length.
    fn finish(&mut self, completion: Completion) -> Result<u64> {
        let offset_bytes = completion.tag;
        completion.result.map_err(|source| self.request_error(offset_bytes, source))?;
        let Some(buf) = completion.buf else {
            return Err(self.queue_error("get a buffer back", io::Error::other("a completion came without its buffer")));
        };
        let len = self.piece_at(offset_bytes);
        if self.operation == Operation::Read
            && let Some(at) = data::first_difference(self.seed, offset_bytes, &buf[..len])
        {
            return Err(LabError::WrongData { target: self.name.to_owned(), offset_bytes: offset_bytes + at as u64 });
        }
        self.free.push(buf);
        Ok(len as u64)
    }

    fn flush(&mut self) -> Result<()> {
        self.queue.push(Request::flush(0)).map_err(|error| self.queue_error("flush", error.reason))?;
        let mut done = Vec::new();
        self.queue.reap(1, &mut done).map_err(|source| self.queue_error("flush", source))?;
        done.into_iter()
            .try_for_each(|completion| completion.result.map_err(|source| self.queue_error("flush", source)))
    }

    fn request_error(&self, offset_bytes: u64, source: io::Error) -> LabError {
        LabError::Request {
            target: self.name.to_owned(),
            operation: self.operation,
            offset_bytes,
            len_bytes: self.piece_at(offset_bytes) as u64,
            completed: offset_bytes / PIECE_BYTES as u64,
            source,
        }
    }

    fn queue_error(&self, doing: &str, source: io::Error) -> LabError {
        LabError::Queue { target: self.name.to_owned(), doing: doing.into(), source }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use diskwright_store::{Blocking, CacheMode, RawDevice};
    use std::fs::File;

    fn raw(len_bytes: u64) -> (tempfile::TempDir, RawDevice) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.raw");
        File::create(&path).unwrap().set_len(len_bytes).unwrap();
        let device = RawDevice::open(&path, true, CacheMode::PageCache).unwrap();
        (dir, device)
    }

    #[test]
    fn what_was_filled_verifies_and_one_wrong_byte_is_found() {
        // Not a whole number of pieces, so that the last one is short.
        let (_dir, device) = raw(5 * PIECE_BYTES as u64 + 12_288);
        let mut told = Vec::new();
        fill("disk", &device, 3, EngineKind::Auto, &mut |done| {
            told.push(done);
            Ok(())
        })
        .unwrap();
        assert_eq!(told.last(), Some(&device.geometry().size_bytes));
        verify("disk", &device, 3, EngineKind::Auto, &mut |_| Ok(())).unwrap();
        check_populated("disk", &device, false).unwrap();

        let error = verify("disk", &device, 4, EngineKind::Auto, &mut |_| Ok(())).unwrap_err();
        assert!(matches!(error, LabError::WrongData { .. }), "{error}");

        let mut hand = Blocking::open(&device, EngineKind::Auto).unwrap();
        let at = 3 * PIECE_BYTES as u64 + 4096;
        let mut sector = vec![0; 512];
        hand.read(at, &mut sector).unwrap();
        sector[17] ^= 0x80;
        hand.write(at, &sector, false).unwrap();
        let error = verify("disk", &device, 3, EngineKind::Auto, &mut |_| Ok(())).unwrap_err();
        assert!(matches!(error, LabError::WrongData { offset_bytes, .. } if offset_bytes == at + 17), "{error}");
    }

    #[test]
    fn a_sparse_disk_is_not_taken_for_a_full_one() {
        let (_dir, device) = raw(4 << 20);
        let error = check_populated("sparse", &device, false).unwrap_err();
        assert!(matches!(error, LabError::NotPopulated { found_bytes: 0, .. }), "{error}");
    }

    #[test]
    fn a_tick_can_stop_the_work() {
        let (_dir, device) = raw(64 << 20);
        let outcome = fill("disk", &device, 3, EngineKind::Auto, &mut |_| Err(LabError::Stopped));
        assert!(matches!(outcome, Err(LabError::Stopped)));
    }
}
