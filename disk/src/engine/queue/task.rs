//! What a queue keeps of a request while the engine has it: the cookie that the engine returns, and
//! the state behind that cookie.

use crate::engine::{
    chain::Chain,
    epoch::Parity,
    plan::{Draft, Pending},
    track::tracker::View,
};
use diskwright_store::{IoBuf, Operation, Request, Segments};
use std::sync::Arc;

/// Marks a write that was sent with RWF_DSYNC: it needs no flush and has no `RequestState` entry.
pub(super) const DURABLE: u64 = u64::MAX >> 2;

/// The engine's cookie of a request: the parity under which it was counted, and the key of its
/// [`RequestState`].
#[derive(Debug, Clone, Copy)]
pub(super) struct Cookie(pub(super) u64);

impl Cookie {
    pub(super) fn new(parity: Option<Parity>, kept: u64) -> Self {
        let counted = match parity {
            None => 0,
            Some(Parity(false)) => 1,
            Some(Parity(true)) => 3,
        };
        Self(kept << 2 | counted)
    }

    pub(super) fn parity(self) -> Option<Parity> {
        (self.0 & 1 == 1).then_some(Parity(self.0 & 2 != 0))
    }

    pub(super) fn kept(self) -> Option<u64> {
        (self.0 >> 2 != 0).then_some(self.0 >> 2)
    }
}

/// A request's memory: one buffer, or several pieces.
pub(super) type Payload = (Option<IoBuf>, Option<Box<Segments>>);

/// A request in progress, with its plan.
#[derive(Debug)]
pub(super) struct Task {
    pub(super) request: Request,
    pub(super) draft: Draft,
    /// Writes and zeroing: the offset at which the next stage begins.
    pub(super) at: u64,
    /// Whether an earlier stage was carried out.
    pub(super) is_continued: bool,
    /// The payload is all zeros, so the write becomes zeroing. Checked once, because a guest may
    /// change its memory later.
    pub(super) is_zeros: bool,
    /// Where the whole range is marked as changed, durably.
    pub(super) marked: Option<Arc<View>>,
}

impl Task {
    /// Whether the request may be planned some blocks at a time: zeroing always, a write if it goes
    /// to two images.
    pub(super) fn goes_in_stages(&self) -> bool {
        match self.request.operation {
            Operation::WriteZeroes | Operation::Discard | Operation::Write => true,
            Operation::Read | Operation::Flush => false,
        }
    }

    /// Where the range must be marked before the request may change anything.
    pub(super) fn unmarked(&self, chain: &Chain) -> Option<Arc<View>> {
        let view = chain.track.as_ref()?;
        let changes = !matches!(self.request.operation, Operation::Read | Operation::Flush);
        let is_marked = self.marked.as_ref().is_some_and(|marked| Arc::ptr_eq(marked, view));
        (changes && !is_marked).then(|| Arc::clone(view))
    }
}

/// State of a request while the engine has it.
#[derive(Debug)]
pub(super) enum RequestState {
    /// Parts are in flight. The request continues with the task afterwards, if there is one.
    Parts(Pending, Option<Box<Task>>),
    /// The request waits for a block or for work of the loader; its ticket wakes it.
    Resting(Box<Task>),
}
