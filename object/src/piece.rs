//! A block that has come, and the reads that wait for blocks.

use crate::{BLOCK_BYTES, cache::Held, error::ObjectError, units::Units};
use diskwright_store::Loan;
use std::{
    io,
    ops::{Deref, Range},
    sync::{Arc, Mutex, PoisonError, mpsc::SyncSender},
};

/// A block that was never written, of a pushed disk.
static ZEROS: [u8; BLOCK_BYTES as usize] = [0; BLOCK_BYTES as usize];

/// The memory of a read, and who waits for it.
#[derive(Debug)]
pub(crate) enum Memory {
    /// A part of a request of an engine.
    Loan(Loan),
    /// A thread that waits.
    Caller(Box<[u8]>, SyncSender<Result<Box<[u8]>, ObjectError>>),
}

impl Memory {
    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Loan(loan) => loan.bytes_mut(),
            Self::Caller(bytes, _) => bytes,
        }
    }

    fn complete(self, result: Result<(), ObjectError>) {
        match self {
            Self::Loan(loan) => loan.complete(result.map_err(io::Error::from)),
            // A caller that has gone needs no answer.
            Self::Caller(bytes, sender) => drop(sender.send(result.map(|()| bytes))),
        }
    }
}

/// A read that waits for blocks.
#[derive(Debug)]
pub(crate) struct Waiter {
    range: Range<u64>,
    /// The memory, and the number of blocks that have not come.
    state: Mutex<(Option<Memory>, usize)>,
}

impl Waiter {
    /// A read of a range of the object that is not empty.
    pub(crate) fn new(range: Range<u64>, memory: Memory) -> Self {
        let blocks = range.end.div_ceil(BLOCK_BYTES) - range.start / BLOCK_BYTES;
        Self { range, state: Mutex::new((Some(memory), blocks as usize)) }
    }

    /// The units of a block that it needs.
    pub(crate) fn units_of(&self, block: u64) -> Units {
        units_of(&self.range, block)
    }

    /// A block has come that has all units that the read needs, or it will not come.
    pub(crate) fn take(&self, block: u64, result: Result<&[u8], &ObjectError>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (memory, left) = &mut *state;
        let Some(waiting) = memory else { return };
        let done = match result {
            Ok(bytes) => {
                let block_at = block * BLOCK_BYTES;
                let from = self.range.start.max(block_at);
                let until = self.range.end.min(block_at + bytes.len() as u64);
                if from < until {
                    let to = (from - self.range.start) as usize..(until - self.range.start) as usize;
                    waiting.bytes_mut()[to]
                        .copy_from_slice(&bytes[(from - block_at) as usize..(until - block_at) as usize]);
                }
                *left -= 1;
                (*left == 0).then_some(Ok(()))
            }
            Err(error) => Some(Err(error.clone())),
        };
        if let Some(result) = done
            && let Some(memory) = memory.take()
        {
            drop(state);
            memory.complete(result);
        }
    }

    /// A block has come that reads as zeros.
    pub(crate) fn take_zeros(&self, block: u64, len_bytes: usize) {
        self.take(block, Ok(&ZEROS[..len_bytes]));
    }
}

/// The units of a block in which a range of the object lies.
pub(crate) fn units_of(range: &Range<u64>, block: u64) -> Units {
    let within = |at: u64| at.saturating_sub(block * BLOCK_BYTES);
    Units::of(within(range.start)..within(range.end))
}

/// A block that has come: a part of what one GET has brought. As bytes it is as long as the block.
#[derive(Debug, Clone)]
pub(crate) struct Piece {
    run: Arc<Vec<u8>>,
    range: Range<usize>,
    /// The units that have come.
    pub(crate) units: Units,
}

impl Deref for Piece {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.run.get(self.range.clone()).unwrap_or_default()
    }
}

impl Piece {
    /// The blocks of a run.
    pub(crate) fn of_run(run: Vec<u8>) -> Vec<Self> {
        let run = Arc::new(run);
        let piece = |start| {
            let range = start..run.len().min(start + BLOCK_BYTES as usize);
            Self { run: Arc::clone(&run), units: Units::all_of(range.len()), range }
        };
        (0..run.len()).step_by(BLOCK_BYTES as usize).map(piece).collect()
    }

    /// What is there of a block.
    pub(crate) fn of_held(held: Held) -> Self {
        Self { range: 0..held.bytes.len(), run: Arc::new(held.bytes), units: held.units }
    }

    /// Its memory, if nobody else has it.
    pub(crate) fn into_buffer(self) -> Option<Vec<u8>> {
        Arc::try_unwrap(self.run).ok()
    }
}
