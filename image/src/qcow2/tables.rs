//! Entries of the L1 and the L2 tables, read on demand by the piece.
//!
//! ```text
//!   block ─▶ L1 entry (8 bytes) ─▶ L2 table ─▶ entries of the blocks that are asked for
//! ```
//!
//! Nothing is cached here: the map of the disk above caches the states of blocks.

use super::{corrupt, layout::Layout};
use crate::error::{ImageError, Result};
use diskwright_format::qcow2::{Invalid, L1Entry, L2Entry};
use diskwright_store::Store;

/// Bytes of a table that are read at once.
const PIECE_BYTES: u64 = 16 << 10;

const READ_L1: &str = "read the L1 table";
const READ_L2: &str = "read an L2 table";

/// What an entry of a cluster says: its state, or what is wrong with it and where.
pub(super) type L2Lookup = std::result::Result<L2Entry, Fault>;

/// An invalid entry: where it is, what was found, what was expected.
#[derive(Debug, Clone)]
pub(super) struct Fault {
    pub offset_bytes: u64,
    pub invalid: Invalid,
}

impl Fault {
    pub fn into_error(self, store: &dyn Store) -> ImageError {
        corrupt(store, self.offset_bytes, self.invalid)
    }
}

/// The tables of a view.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tables<'a> {
    pub store: &'a dyn Store,
    pub layout: &'a Layout,
}

impl Tables<'_> {
    fn read(&self, doing: &'static str, bytes: &mut [u8], offset_bytes: u64) -> Result<()> {
        // The last cluster of a file may be cut. What is missing reads as zeros.
        let there = self.layout.front.file_bytes.saturating_sub(offset_bytes).min(bytes.len() as u64) as usize;
        let (held, missing) = bytes.split_at_mut(there);
        missing.fill(0);
        let io = |error| ImageError::io(doing, self.store, offset_bytes, error);
        if held.is_empty() { Ok(()) } else { self.store.read_at(held, offset_bytes).map_err(io) }
    }

    /// Words of a table from `offset_bytes` on.
    fn words(&self, doing: &'static str, offset_bytes: u64, count: u64) -> Result<Vec<u64>> {
        let mut bytes = vec![0; count as usize * 8];
        self.read(doing, &mut bytes, offset_bytes)?;
        Ok(bytes.as_chunks().0.iter().map(|word| u64::from_be_bytes(*word)).collect())
    }

    /// The place of the L2 table of an L1 entry; `None` if it has none.
    fn table(&self, index: u64, entry: L1Entry) -> std::result::Result<Option<u64>, Fault> {
        let checked = self.layout.l2_table(entry);
        checked.map_err(|invalid| Fault { offset_bytes: self.layout.l1.offset_bytes + index * 8, invalid })
    }

    /// The L1 entries `first .. end`, with the calls of `each` for those that name a table. Stops
    /// when `each` returns false.
    fn each_table(
        &self,
        first: u64,
        end: u64,
        each: &mut dyn FnMut(u64, std::result::Result<u64, Fault>) -> Result<bool>,
    ) -> Result<()> {
        let end = end.min(self.layout.l1.len_bytes / 8);
        let mut at = first;
        while at < end {
            let count = (end - at).min(PIECE_BYTES / 8);
            let words = self.words(READ_L1, self.layout.l1.offset_bytes + at * 8, count)?;
            for (index, word) in (at..).zip(words) {
                let Some(table) = self.table(index, L1Entry(word)).transpose() else { continue };
                if !each(index, table)? {
                    return Ok(());
                }
            }
            at += count;
        }
        Ok(())
    }

    /// Calls `each` for the clusters `first .. end` (within the disk) whose entry is not 0, with
    /// the cluster and its entry. All clusters of an L2 table that cannot be found have its fault.
    /// Stops when `each` returns false.
    ///
    /// # Errors
    /// `Io`; errors of `each`.
    pub fn each_entry(&self, first: u64, end: u64, each: &mut dyn FnMut(u64, L2Lookup) -> Result<bool>) -> Result<()> {
        let per_table = self.layout.geometry.l2_entries();
        let end = end.min(self.layout.clusters());
        if first >= end {
            return Ok(());
        }
        self.each_table(first / per_table, (end - 1) / per_table + 1, &mut |index, table| {
            let start = index * per_table;
            let clusters = first.max(start)..end.min(start + per_table);
            match table {
                Err(fault) => {
                    for cluster in clusters {
                        if !each(cluster, Err(fault.clone()))? {
                            return Ok(false);
                        }
                    }
                    Ok(true)
                }
                Ok(offset_bytes) => self.each_of_table(offset_bytes, clusters, each),
            }
        })
    }

    /// The same for clusters of the L2 table at `offset_bytes`. Returns whether to go on.
    fn each_of_table(
        &self,
        offset_bytes: u64,
        clusters: std::ops::Range<u64>,
        each: &mut dyn FnMut(u64, L2Lookup) -> Result<bool>,
    ) -> Result<bool> {
        let geometry = &self.layout.geometry;
        let (entry_bytes, per_table) = (geometry.l2_entry_bytes(), geometry.l2_entries());
        let mut at = clusters.start;
        while at < clusters.end {
            let count = (clusters.end - at).min(PIECE_BYTES / entry_bytes);
            let place = offset_bytes + at % per_table * entry_bytes;
            let words = self.words(READ_L2, place, count * entry_bytes / 8)?;
            for (index, entry) in (0..).zip(words.chunks_exact(entry_bytes as usize / 8)) {
                if entry.iter().all(|&word| word == 0) {
                    continue;
                }
                let parsed = L2Entry::parse(entry[0], entry.get(1).copied().unwrap_or(0), geometry);
                let fault = |invalid| Fault { offset_bytes: place + index * entry_bytes, invalid };
                if !each(at + index, parsed.map_err(fault))? {
                    return Ok(false);
                }
            }
            at += count;
        }
        Ok(true)
    }

    /// The entry of one cluster, and its offset in the file (0 without an L2 table).
    ///
    /// # Errors
    /// `Io`.
    pub fn entry(&self, cluster: u64) -> Result<(L2Lookup, u64)> {
        let (mut found, mut offset_bytes) = (Ok(L2Entry::Unallocated), 0);
        let (per_table, entry_bytes) = (self.layout.geometry.l2_entries(), self.layout.geometry.l2_entry_bytes());
        let index = cluster / per_table;
        self.each_table(index, index + 1, &mut |_, table| {
            match table {
                Ok(table) => {
                    offset_bytes = table + cluster % per_table * entry_bytes;
                    self.each_of_table(table, cluster..cluster + 1, &mut |_, entry| {
                        found = entry;
                        Ok(false)
                    })?;
                }
                Err(fault) => found = Err(fault),
            }
            Ok(false)
        })?;
        Ok((found, offset_bytes))
    }
}
