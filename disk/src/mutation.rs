//! What the mutation lock of a disk guards: the chain, what is known of units that several layers
//! have, blocks that are taken, and the grace period under way.
//!
//! Invariant: a mapping is changed by [`Mutation::commit`] alone, so the map and `mixed` hear of
//! every change.

use crate::{
    chain::{Chain, Member},
    claims::Claims,
    epoch::Grace,
    map::Mixed,
};
use diskwright_image::{BlockState, Commit};
use std::{io, sync::Arc};

/// What the mutation lock guards.
#[derive(Debug)]
pub(crate) struct Mutation {
    pub(crate) chain: Arc<Chain>,
    pub(crate) mixed: Mixed,
    pub(crate) claims: Claims,
    /// The grace period under way. There is one at a time: see
    /// [`Epochs::begin_grace`](crate::epoch::Epochs::begin_grace).
    pub(crate) grace: Option<Period>,
    /// Of the top image: the generation of removals up to which its space has been given back.
    pub(crate) recycled_generation: u64,
}

/// A grace period, and what follows it.
#[derive(Debug)]
pub(crate) struct Period {
    pub(crate) grace: Grace,
    /// What may be recycled then. `None` where a thread waits for the end itself.
    pub(crate) recycles: Option<(Member, u64)>,
}

impl Mutation {
    pub(crate) fn new(chain: Arc<Chain>) -> Self {
        Self { chain, mixed: Mixed::default(), claims: Claims::default(), grace: None, recycled_generation: 0 }
    }

    /// Changes the mapping of a block, and what is known of it. `None` says that the image must be
    /// prepared first.
    pub(crate) fn commit(&mut self, member: &Member, block: u64, change: Commit) -> io::Result<Option<BlockState>> {
        let Some(state) = member.writer()?.commit(block, change)? else { return Ok(None) };
        let chain = Arc::clone(&self.chain);
        self.mixed.changed(&chain, member, block, change, state);
        Ok(Some(state))
    }
}
