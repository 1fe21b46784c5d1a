//! What a block still needs before it can be reserved or committed.
//!
//! `reserve` and `commit` note here what was not in memory. `prepare` then supplies exactly that.
//! The list lives inside an image's state mutex. Its size is bounded: at the limit all entries are
//! dropped, and a block whose reservation is tried again is noted again.

use crate::Result;
use diskwright_store::sync::Mutex;
use std::{collections::BTreeMap, ops::Range, sync::PoisonError};

/// Above this number of blocks the list is cleared.
const MAX_BLOCKS: usize = 4096;

/// Block number to what the block needs.
#[derive(Debug)]
pub(crate) struct Prerequisites<N>(BTreeMap<u64, N>);

impl<N> Default for Prerequisites<N> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<N: Copy> Prerequisites<N> {
    pub(crate) fn note(&mut self, block: u64, need: N) {
        if self.0.len() >= MAX_BLOCKS {
            self.0.clear();
        }
        self.0.insert(block, need);
    }

    /// The noted needs of a range of blocks.
    pub(crate) fn of(&self, blocks: Range<u64>) -> Vec<(u64, N)> {
        self.0.range(blocks).map(|(&block, &need)| (block, need)).collect()
    }

    /// Removes a block's entry, after the need was supplied or supplying it failed.
    pub(crate) fn supplied(&mut self, block: u64) {
        self.0.remove(&block);
    }
}

/// Runs its argument on a list of prerequisites, under the mutex that guards the list.
pub(crate) type WithNeeds<'a, N> = dyn Fn(&mut dyn FnMut(&mut Prerequisites<N>)) + 'a;

/// Supplies what `blocks` need, one block after the other, for an image's `prepare`. `needs` takes
/// the state mutex. `supply` does the I/O without that mutex, under `preparing`, so only one thread
/// at a time makes tables or space. A need that could not be supplied leaves the list too:
/// `reserve` notes it again.
///
/// # Errors
/// The first error of `supply`.
pub(crate) fn supply_each<N: Copy>(
    blocks: &Range<u64>,
    preparing: &Mutex<()>,
    needs: &WithNeeds<'_, N>,
    supply: &mut dyn FnMut(u64, N) -> Result<()>,
) -> Result<()> {
    let noted = || {
        let mut noted = Vec::new();
        needs(&mut |needs| noted = needs.of(blocks.clone()));
        noted
    };
    if noted().is_empty() {
        return Ok(());
    }
    let _turn = preparing.lock().unwrap_or_else(PoisonError::into_inner);
    for (block, need) in noted() {
        let supplied = supply(block, need);
        needs(&mut |needs| needs.supplied(block));
        supplied?;
    }
    Ok(())
}
