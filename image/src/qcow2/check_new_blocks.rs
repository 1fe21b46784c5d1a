//! Refcount blocks and a refcount table that a repair makes again, at the end of the file.
//!
//! ```text
//!   no table      [ a table of zeros ] ─▶ header            the next round finds no blocks
//!   no block      [ a block of zeros ] ─▶ entry of the table    the next round finds all of its
//!                                                           refcounts too low, and raises them
//! ```
//!
//! The file is lengthened, durably, before anything names the new cluster. A new block is too low
//! by its own refcount like by all others, which the next round raises too. Refcounts hold no data
//! of the disk, so none of this costs any.

use super::check_walk::Walk;
use crate::findings::{Change, Finding, Findings};
use diskwright_format::qcow2::{Place, REFCOUNT_TABLE_MAX_BYTES};
use std::collections::BTreeSet;

/// New blocks of one round.
const BLOCKS_MAX: usize = 1 << 12;
/// What a new table costs.
const NEW_TABLE: &str = "a new refcount table is made at the end of the file, and the refcounts are counted again";

impl Walk<'_> {
    /// The changes that make a new table with room for the file; `None` if it would be too long.
    fn new_table(&self) -> Option<Vec<Change>> {
        let header = &self.front.header;
        let cluster_bytes = self.geometry.cluster_bytes();
        let at = self.front.file_bytes.checked_next_multiple_of(cluster_bytes)?;
        let per_block = header.refcount_width.per_block(cluster_bytes);
        // As much again is enough for the new blocks, and for the next clusters.
        let blocks = (at / cluster_bytes).div_ceil(per_block).checked_mul(2)?.checked_add(1)?;
        let len_bytes = (blocks * 8).next_multiple_of(cluster_bytes);
        if len_bytes > REFCOUNT_TABLE_MAX_BYTES.max(cluster_bytes) {
            return None;
        }
        let table = Place { offset_bytes: at, len_bytes };
        let (field_at, field) = header.refcount_table_field(table);
        let end = at.checked_add(len_bytes)?;
        let mut words = vec![0; len_bytes as usize];
        for (word, block) in words.chunks_exact_mut(8).zip(&self.refcount_blocks) {
            word.copy_from_slice(&block.to_be_bytes());
        }
        Some(vec![Change::Extend(end), Change::Write(at, words), Change::Write(field_at as u64, field.to_vec())])
    }

    /// Makes a new table, unless structures overlap.
    pub(super) fn replace_refcount_table(&self, finding: Finding, findings: &mut Findings) {
        match self.new_table() {
            Some(changes) => self.repair_if_apart(finding, NEW_TABLE, changes),
            None => findings.add(finding),
        }
    }

    /// Makes a new table, as the present one overlaps another structure. Returns whether that is
    /// possible.
    pub(super) fn replace_refcount_table_now(&self, finding: Finding, findings: &mut Findings) -> bool {
        let is_possible = self.new_table().is_some();
        let without_blocks = self.new_table().map(|mut changes| {
            // What the table says may be the bytes of the other structure.
            if let Some(Change::Write(_, words)) = changes.get_mut(1) {
                words.fill(0);
            }
            changes
        });
        match without_blocks {
            Some(changes) => findings.add_repairable(finding, NEW_TABLE, changes),
            None => findings.add(finding),
        }
        is_possible
    }
}

/// The refcount blocks that this round makes.
#[derive(Debug, Default)]
pub(super) struct NewBlocks {
    made: BTreeSet<u64>,
}

impl NewBlocks {
    /// The changes that make the missing blocks of `blocks`, by index of the table. Empty: they are
    /// made already in this round. `None` if the table has no place for them.
    pub(super) fn make(
        &mut self,
        walk: &Walk<'_>,
        blocks: impl Iterator<Item = u64>,
        for_repair: bool,
    ) -> Option<Vec<Change>> {
        let table = walk.front.header.refcount_table;
        let cluster_bytes = walk.geometry.cluster_bytes();
        let is_in_file = table.offset_bytes > 0
            && table.offset_bytes.checked_add(table.len_bytes).is_some_and(|end| end <= walk.front.file_bytes);
        if !is_in_file {
            return None;
        }
        let mut changes = Vec::new();
        for block in blocks.take(BLOCKS_MAX) {
            if block >= table.len_bytes / 8 {
                return None;
            }
            if self.made.contains(&block) || self.made.len() >= BLOCKS_MAX || !for_repair {
                continue;
            }
            let first_new = walk.front.file_bytes.checked_next_multiple_of(cluster_bytes)?;
            let at = first_new.checked_add(self.made.len() as u64 * cluster_bytes)?;
            self.made.insert(block);
            changes.push(Change::Extend(at.checked_add(cluster_bytes)?));
            changes.push(Change::Write(table.offset_bytes + block * 8, at.to_be_bytes().to_vec()));
        }
        Some(changes)
    }
}
