//! Compresses a disk block by block on all processors, and hands the blocks in order to a sink.
//!
//! ```text
//!   windows.rs     next chunk of 1 MiB that may hold data (holes and zero extents are left out)
//!       │ a number for each chunk, in order
//!       ▼
//!   worker.rs      one thread a processor: reads the next chunk while it compresses this one;
//!       │          blocks of zeros are left out
//!       ▼ any order, at most `AHEAD` chunks a worker before the sink's
//!   run(), here    puts the chunks in order ─▶ Sink: where a format records and writes its blocks
//! ```
//!
//! A format brings a [`Packer`](chunk::Packer) (how one block is compressed) and a [`Sink`] (what
//! becomes of it).
//! So this module serves every format that is written with compressed blocks in one pass.
//!
//! What must hold: a worker that has taken a chunk never waits for another one before it has handed
//! the chunk on, and it takes chunks in order. So the chunk that the sink waits for always comes.
//! A worker waits only before it takes a chunk. Memory is bounded by the chunks that were taken and
//! not handed to the sink. `Shared::state` (`shared.rs`) guards the number of these, and the walk
//! over the source.

mod chunk;
mod deflate;
mod output;
mod shared;
mod windows;
mod worker;
mod zlib;

pub(crate) use deflate::Deflate;
pub(crate) use output::Output;
pub(crate) use shared::Packing;
pub(crate) use zlib::Zlib;

use crate::{
    LostRanges, Progress,
    copying::copy::{Failure, Outcome},
};
use chunk::Ready;
use shared::{Shared, State};
use std::{
    collections::BTreeMap,
    io,
    sync::{Condvar, Mutex, mpsc},
    thread,
    time::{Duration, Instant},
};
use windows::Windows;

/// Chunks for each worker that are taken and not yet handed to the sink.
const AHEAD: usize = 8;
/// How often `progress` is called.
const TELL_EVERY: Duration = Duration::from_millis(100);

/// Takes the compressed blocks, in ascending order.
pub(crate) trait Sink {
    /// A block of the disk. Blocks of zeros are left out.
    fn block(&mut self, number: u64, packed: &[u8]) -> io::Result<()>;
}

/// Totals of a packing, in bytes of the disk.
#[derive(Debug, Default)]
pub(crate) struct Packed {
    /// Bytes of the disk in blocks that were handed to the sink.
    pub(crate) data_bytes: u64,
    /// Bytes of the disk in blocks of zeros.
    pub(crate) zero_bytes: u64,
    pub(crate) lost: LostRanges,
}

impl Packing<'_> {
    /// Packs the whole source.
    ///
    /// # Errors
    /// What failed, with the lowest offset; `None` if `progress` stopped it.
    pub(crate) fn run(&self, sink: &mut dyn Sink, progress: &mut Progress<'_>) -> Result<Packed, Option<Failure>> {
        let size_bytes = self.source.device().geometry().size_bytes;
        let workers = thread::available_parallelism().map_or(1, usize::from).min(64);
        let shared = Shared {
            packing: self,
            size_bytes,
            under_way_max: workers * AHEAD,
            state: Mutex::new(State {
                windows: Windows::new(self.source, size_bytes, self.skip_damaged),
                under_way: 0,
                stop: false,
                failure: None,
            }),
            changed: Condvar::new(),
        };
        let mut packed = Packed::default();
        let mut stopped = false;
        thread::scope(|scope| {
            let (ready, chunks) = mpsc::channel();
            for _ in 0..workers {
                let (ready, shared) = (ready.clone(), &shared);
                scope.spawn(move || {
                    let _stop = StopOnPanic(shared);
                    if let Err(failure) = worker::work(shared, &ready) {
                        shared.fail(failure);
                    }
                });
            }
            drop(ready);
            stopped = hand_on(&shared, &chunks, sink, &mut packed, progress);
        });
        let mut state = shared.lock();
        let failure = state.failure.take();
        (packed.zero_bytes, packed.lost) = (packed.zero_bytes + state.windows.zero_bytes, state.windows.lost());
        drop(state);
        match failure {
            _ if stopped => Err(None),
            Some(failure) => Err(Some(failure)),
            None => Ok(packed),
        }
    }
}

/// Hands the chunks in order to the sink, until there are no more or something failed. Returns
/// whether `progress` stopped it.
fn hand_on(
    shared: &Shared<'_>,
    chunks: &mpsc::Receiver<Ready>,
    sink: &mut dyn Sink,
    packed: &mut Packed,
    progress: &mut Progress<'_>,
) -> bool {
    let (mut waiting, mut next, mut done_bytes) = (BTreeMap::new(), 0, 0);
    let mut told = Instant::now();
    loop {
        match chunks.recv_timeout(TELL_EVERY) {
            Ok(chunk) => drop(waiting.insert(chunk.number, chunk)),
            Err(mpsc::RecvTimeoutError::Timeout) => {}
            // All workers have ended.
            Err(mpsc::RecvTimeoutError::Disconnected) => return false,
        }
        while let Some(Ready { blocks, bytes, disk_bytes, zero_bytes, .. }) = waiting.remove(&next) {
            let mut taken = blocks.iter().map(|(number, range)| sink.block(*number, &bytes[range.clone()]));
            if let Err(error) = taken.try_for_each(|taken| taken) {
                shared.fail(Failure::Dest(error));
                return false;
            }
            done_bytes += disk_bytes;
            packed.data_bytes += disk_bytes - zero_bytes;
            packed.zero_bytes += zero_bytes;
            next += 1;
            shared.lock().under_way -= 1;
            shared.changed.notify_all();
        }
        if told.elapsed() >= TELL_EVERY {
            told = Instant::now();
            let skipped_bytes = shared.lock().windows.zero_bytes;
            if !progress(done_bytes + skipped_bytes, shared.size_bytes) {
                shared.stop();
                return true;
            }
        }
    }
}

/// A worker that panics leaves a chunk that never comes, for which the others would wait.
struct StopOnPanic<'a, 'b>(&'a Shared<'b>);

impl Drop for StopOnPanic<'_, '_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.stop();
        }
    }
}

/// How a failed packing ended, as a copy says it.
impl From<Option<Failure>> for Outcome {
    fn from(failure: Option<Failure>) -> Self {
        failure.map_or(Self::Stopped, Self::Failed)
    }
}

#[cfg(test)]
mod tests;
