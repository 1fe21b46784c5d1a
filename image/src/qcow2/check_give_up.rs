//! What a repair of a qcow2 does with an entry that cannot be right.
//!
//! ```text
//!   L1 entry, only its reserved bits wrong, and its table proves itself    the bits are cleared
//!   L1 entry   given up: the clusters of its table read as zeros, in a child as the parent's data
//!   L2 entry   given up: the cluster reads as zeros, in a child too
//!   entry of the refcount table    cleared: refcounts are counted again, and cost no data
//! ```
//!
//! Version 2 has no mark for zeros, so there a cluster of a child that is given up reads as the
//! parent's data.
//!
//! A table proves itself if its cluster has a refcount, no other entry of an L1 table names it, and
//! all of its entries are valid and lead into the file.
//!
//! An L2 table may be an internal snapshot's too, or only a snapshot's. Then the snapshot loses the
//! cluster, which the step says.

use super::check_walk::{EntryPlace, L2Table, Walk, each_piece, each_word};
use crate::{
    ImageError, Result,
    findings::{Change, Finding, Findings},
};
use diskwright_format::qcow2::{L1Entry, L2Entry};
use std::ops::Range;

/// Bits of an L1 entry that mean something.
const L1_KNOWN: u64 = 0x80ff_ffff_ffff_fe00;

impl Walk<'_> {
    fn clusters_of_disk(&self, clusters: Range<u64>) -> Option<Range<u64>> {
        let size = self.front.header.size_bytes;
        let at = |cluster: u64| cluster.saturating_mul(self.geometry.cluster_bytes()).min(size);
        let range = at(clusters.start)..at(clusters.end);
        (range.start < range.end).then_some(range)
    }

    /// The ranges of the disk that an entry maps.
    fn ranges_of(&self, place: EntryPlace, entry_at: u64) -> Result<Vec<Range<u64>>> {
        let per_table = self.geometry.l2_entries();
        Ok(match place {
            EntryPlace::None | EntryPlace::L1 { index: None } => Vec::new(),
            EntryPlace::L1 { index: Some(index) } => {
                self.clusters_of_disk(index * per_table..(index + 1) * per_table).into_iter().collect()
            }
            EntryPlace::L2 { table, within } => {
                let table_at = entry_at - within * self.geometry.l2_entry_bytes();
                let indices = self.indices_of(table, table_at)?;
                let cluster = |index: u64| index * per_table + within;
                indices
                    .into_iter()
                    .filter_map(|index| self.clusters_of_disk(cluster(index)..cluster(index) + 1))
                    .collect()
            }
        })
    }

    /// The entries of the disk's L1 table that name an L2 table.
    fn indices_of(&self, table: L2Table, table_at: u64) -> Result<Vec<u64>> {
        if table.active <= 1 {
            return Ok((table.active == 1).then_some(table.first).into_iter().collect());
        }
        let mut indices = Vec::new();
        let place = self.front.header.l1;
        each_word(self.store, "read the L1 table", place, self.front.file_bytes, &mut |index, word| {
            if L1Entry(word).l2_offset(&self.geometry) == Ok(Some(table_at)) {
                indices.push(index);
            }
            Ok(())
        })?;
        Ok(indices)
    }

    /// Gives up what an entry maps.
    pub(super) fn give_up(
        &self,
        place: EntryPlace,
        entry_at: u64,
        finding: Finding,
        findings: &mut Findings,
    ) -> Result<()> {
        if self.geometry.has_data_file {
            findings.add(finding);
            return Ok(());
        }
        let is_child = self.front.backing_name.is_some();
        let (bytes, reads_as) = match place {
            EntryPlace::None => {
                findings.add(finding);
                return Ok(());
            }
            EntryPlace::L1 { .. } => {
                (vec![0; 8], if is_child { "the parent's data show there" } else { "they read as zeros" })
            }
            EntryPlace::L2 { .. } => {
                let has_zeros = self.geometry.version >= 3;
                let entry = if is_child && has_zeros { L2Entry::zeros() } else { L2Entry::Unallocated };
                let (word, parts) = entry.to_words(&self.geometry);
                let bytes = [word.to_be_bytes(), parts.to_be_bytes()].concat();
                let reads_as =
                    if is_child && !has_zeros { "the parent's data show there" } else { "it reads as zeros" };
                (bytes[..self.geometry.l2_entry_bytes() as usize].to_vec(), reads_as)
            }
        };
        let of_snapshots = match place {
            EntryPlace::L1 { index: None } => ", in the internal snapshots that have this L1 table",
            EntryPlace::L2 { table, .. } if table.active == 0 => ", in internal snapshots",
            EntryPlace::L2 { table, .. } if table.weight > table.active => ", also in internal snapshots",
            _ => "",
        };
        let given_up = match place {
            EntryPlace::L2 { .. } => "the cluster of the entry is given up",
            _ => "all clusters of the table are given up",
        };
        let what = format!("{given_up}: {reads_as}{of_snapshots}");
        let changes = vec![Change::Write(entry_at, bytes)];
        let ranges = self.ranges_of(place, entry_at)?;
        if ranges.is_empty() && of_snapshots.is_empty() {
            self.repair_if_apart(finding, "the entry, of clusters beyond the end of the disk, is cleared", changes);
            return Ok(());
        }
        if ranges.is_empty() {
            findings.give_up(finding, None, what, changes);
            return Ok(());
        }
        for range in ranges {
            findings.give_up(finding.clone(), Some(range), what.clone(), changes.clone());
        }
        Ok(())
    }

    /// Whether a structure whose place is known has a byte of this range.
    fn is_taken(&self, range: Range<u64>) -> bool {
        let tables = self.l1_tables.iter().map(|table| table.place);
        let places = self.plain.iter().map(|(place, _)| *place).chain(tables).chain([self.front.header.refcount_table]);
        let blocks = self.refcount_blocks.iter().filter(|&&at| at != 0);
        let ends = |start: u64, len_bytes: u64| start < range.end && range.start < start.saturating_add(len_bytes);
        places.into_iter().any(|place| ends(place.offset_bytes, place.len_bytes))
            || blocks.into_iter().any(|&at| ends(at, self.geometry.cluster_bytes()))
    }

    /// The refcount of a cluster; `None` if it cannot be found.
    fn refcount_of(&self, cluster: u64) -> Result<Option<u64>> {
        let width = self.front.header.refcount_width;
        let per_block = width.per_block(self.geometry.cluster_bytes());
        let block = usize::try_from(cluster / per_block).ok().and_then(|block| self.refcount_blocks.get(block));
        let Some(&block) = block.filter(|&&at| at != 0) else { return Ok(None) };
        // Eight refcounts begin at a byte, whatever their width is.
        let index = cluster % per_block;
        let place = block + index / 8 * u64::from(width.bits());
        let mut bytes = vec![0; width.bits() as usize];
        if place.saturating_add(bytes.len() as u64) > self.front.file_bytes {
            return Ok(None);
        }
        let read = self.store.read_at(&mut bytes, place);
        read.map_err(|error| ImageError::io("read a refcount block", self.store, place, error))?;
        Ok(Some(width.get(&bytes, (index % 8) as usize)))
    }

    /// The entry without its reserved bits, if what it names then proves to be its table.
    pub(super) fn without_reserved_bits(&self, word: u64) -> Result<Option<u64>> {
        let known = word & L1_KNOWN;
        let Ok(Some(table_at)) = L1Entry(known).l2_offset(&self.geometry) else { return Ok(None) };
        let cluster_bytes = self.geometry.cluster_bytes();
        let end = table_at.saturating_add(cluster_bytes);
        if end > self.front.file_bytes || self.is_taken(table_at..end) {
            return Ok(None);
        }
        if self.refcount_of(table_at / cluster_bytes)?.is_none_or(|refcount| refcount == 0) {
            return Ok(None);
        }
        let mut is_table = true;
        each_piece(self.store, "read an L2 table", table_at, end, &mut |_, bytes| {
            for entry in bytes.chunks_exact(self.geometry.l2_entry_bytes() as usize) {
                let words = entry.as_chunks().0;
                let word = |at: usize| words.get(at).map_or(0, |word| u64::from_be_bytes(*word));
                is_table &= match L2Entry::parse(word(0), word(1), &self.geometry) {
                    Ok(
                        L2Entry::Standard { offset_bytes: Some(at), .. } | L2Entry::Compressed { offset_bytes: at, .. },
                    ) => at < self.front.file_bytes,
                    Ok(_) => true,
                    Err(_) => false,
                };
            }
            Ok(())
        })?;
        Ok(is_table.then_some(known))
    }
}
