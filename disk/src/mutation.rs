//! The state that the mutation lock of a disk guards: the chain, runs of units with several owners,
//! claimed blocks, and the current grace period.
//!
//! Invariant: mappings are changed only by [`Mutation::commit`], so the map and `mixed` see every
//! change.

use crate::{
    chain::{Chain, Member},
    claims::Claims,
    epoch::Grace,
    map::Mixed,
};
use diskwright_image::{BlockState, Commit};
use std::{io, ops::Range, sync::Arc};

/// The state that the mutation lock guards.
#[derive(Debug)]
pub(crate) struct Mutation {
    pub(crate) chain: Arc<Chain>,
    pub(crate) mixed: Mixed,
    pub(crate) claims: Claims,
    /// The current grace period. Only one runs at a time: see
    /// [`Epochs::begin_grace`](crate::epoch::Epochs::begin_grace).
    pub(crate) grace: Option<Period>,
    /// The generation up to which freed space of the top image was recycled.
    pub(crate) recycled_generation: u64,
}

/// A grace period and the action after it.
#[derive(Debug)]
pub(crate) struct Period {
    pub(crate) grace: Grace,
    /// The image and the generation to recycle at the end. `None` if a thread waits for the end
    /// itself.
    pub(crate) recycles: Option<(Member, u64)>,
}

impl Mutation {
    pub(crate) fn new(chain: Arc<Chain>) -> Self {
        Self { chain, mixed: Mixed::default(), claims: Claims::default(), grace: None, recycled_generation: 0 }
    }

    /// Keeps look-ups without a lock from finding the owners of these ranges of the disk, and of no
    /// others.
    pub(crate) fn hide(&mut self, ranges: &[Range<u64>]) {
        self.mixed.hide(&self.chain, ranges);
    }

    /// Ends [`Mutation::hide`].
    pub(crate) fn show(&mut self) {
        self.mixed.show(&self.chain);
    }

    /// Commits a change of a block's mapping, and updates the map. `None`: the image must be
    /// prepared first.
    pub(crate) fn commit(&mut self, member: &Member, block: u64, change: Commit) -> io::Result<Option<BlockState>> {
        let Some(state) = member.writer()?.commit(block, change)? else { return Ok(None) };
        let chain = Arc::clone(&self.chain);
        self.mixed.changed(&chain, member, block, change, state);
        Ok(Some(state))
    }
}
