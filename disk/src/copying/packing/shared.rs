//! What the workers and the thread of the sink share: the walk over the source, the number of
//! chunks under way, and the first failure.

use super::{
    chunk::{Chunk, Packer},
    windows::Windows,
};
use crate::{Opened, copying::copy::Failure};
use diskwright_store::EngineKind;
use std::{
    io,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
};

/// What is packed, and how.
pub(crate) struct Packing<'a> {
    pub(crate) source: &'a Opened,
    pub(crate) engine: EngineKind,
    /// Length of a block: a power of two, at most 1 MiB. The last block of the disk is filled up
    /// with zeros.
    pub(crate) block_bytes: usize,
    /// Damaged ranges of the source become zeros, and are listed.
    pub(crate) skip_damaged: bool,
    /// Makes the packer of a worker.
    pub(crate) packer: &'a (dyn Fn() -> io::Result<Box<dyn Packer>> + Sync),
}

pub(super) struct State<'a> {
    pub(super) windows: Windows<'a>,
    /// Chunks that were taken and not yet handed to the sink.
    pub(super) under_way: usize,
    pub(super) stop: bool,
    pub(super) failure: Option<Failure>,
}

/// What the workers and the thread of the sink share.
pub(super) struct Shared<'a> {
    pub(super) packing: &'a Packing<'a>,
    pub(super) size_bytes: u64,
    pub(super) under_way_max: usize,
    pub(super) state: Mutex<State<'a>>,
    /// Fewer chunks are under way, or `stop` is set.
    pub(super) changed: Condvar,
}

impl<'a> Shared<'a> {
    pub(super) fn lock(&self) -> MutexGuard<'_, State<'a>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next chunk; `None` if there is none, or if the work was stopped. Waits while too many
    /// are under way, unless `may_wait` is false.
    pub(super) fn next(&self, may_wait: bool) -> Result<Option<Chunk>, Failure> {
        let mut state = self.lock();
        while may_wait && !state.stop && state.under_way >= self.under_way_max {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.stop || state.under_way >= self.under_way_max {
            return Ok(None);
        }
        let chunk = state.windows.next()?;
        state.under_way += usize::from(chunk.is_some());
        Ok(chunk)
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.lock().stop
    }

    pub(super) fn stop(&self) {
        self.lock().stop = true;
        self.changed.notify_all();
    }

    /// Ends the work. Of several failures the one with the lowest offset is reported.
    pub(super) fn fail(&self, failure: Failure) {
        let mut state = self.lock();
        state.stop = true;
        if state.failure.as_ref().is_none_or(|known| failure.start_bytes() < known.start_bytes()) {
            state.failure = Some(failure);
        }
        drop(state);
        self.changed.notify_all();
    }
}
