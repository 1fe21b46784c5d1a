//! The state that the mutation lock of a disk guards: the chain, runs of units with several owners,
//! claimed blocks, and the current grace period.
//!
//! Invariant: mappings are changed only by [`Mutation::commit`], so the map and `mixed` see every
//! change.

use crate::engine::{
    block_set::BlockSet,
    chain::{Chain, Member},
    claims::Claims,
    epoch::GracePeriod,
    map::{LayerId, RunCache},
};
use diskwright_image::{BlockState, Commit};
use std::{collections::HashMap, io, ops::Range, sync::Arc};

/// The state that the mutation lock guards.
#[derive(Debug)]
pub(crate) struct Mutation {
    pub(crate) chain: Arc<Chain>,
    pub(crate) mixed: RunCache,
    pub(crate) claims: Claims,
    /// The current grace period. Only one runs at a time: see
    /// [`Epochs::begin_grace`](crate::engine::epoch::Epochs::begin_grace).
    pub(crate) grace: Option<Period>,
    /// The generation up to which freed space of each image was recycled.
    pub(crate) recycled: HashMap<LayerId, u64>,
    /// The blocks that the top has, and the top's id, while its parent absorbs it.
    pub(crate) left: Option<(LayerId, BlockSet)>,
}

/// A grace period and the action after it.
#[derive(Debug)]
pub(crate) struct Period {
    pub(crate) grace: GracePeriod,
    /// The images and the generations to recycle at the end. Empty if a thread waits for the end
    /// itself.
    pub(crate) recycles: Vec<(Member, u64)>,
}

impl Mutation {
    pub(crate) fn new(chain: Arc<Chain>) -> Self {
        let runs_bytes = chain.memory_shares().runs;
        Self {
            chain,
            mixed: RunCache::within(runs_bytes),
            claims: Claims::default(),
            grace: None,
            recycled: HashMap::new(),
            left: None,
        }
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
        let writer = member.writer()?;
        let Some(state) = writer.commit(block, change)? else { return Ok(None) };
        if let Some((_, left)) = self.left.as_mut().filter(|(top, _)| *top == member.id) {
            left.set(block, state != BlockState::Absent);
        }
        let chain = Arc::clone(&self.chain);
        self.mixed.changed(&chain, member, block, change, state);
        if change == Commit::Moved {
            let others = writer.moves_with(block).filter(|&other| other != block);
            others.for_each(|other| self.mixed.moved_along(&chain, member, other));
        }
        Ok(Some(state))
    }
}
