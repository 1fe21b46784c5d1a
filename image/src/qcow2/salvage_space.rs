//! The parts of the file that are not payload of the disk: structures, what only internal snapshots
//! have, and free clusters.
//!
//! A cluster without an entry is free only if its refcount says so, and that refcount block is
//! right about all clusters that are known to be used. A cluster whose entry was wiped has its
//! refcount still. Where refcounts are damaged, every cluster without an entry may be lost data.

use super::{
    check_counts::ClusterUse,
    check_walk::{L2_TABLE, Walk},
    header::HeaderCluster,
    records,
};
use crate::{
    Result,
    findings::Findings,
    salvage::{BlockTable, joined, overlaps_one, read_what_can_be},
};
use diskwright_format::qcow2::{Header, Place};
use diskwright_store::Store;
use std::ops::Range;

/// Most ranges that are collected. Further ones are not known to be free.
const RANGES_MAX: usize = 8 << 20;

/// What lies in the file besides the disk's own tables and clusters.
#[derive(Debug, Default)]
pub(super) struct OtherStructures {
    /// Structures of which no L2 table and no cluster of the disk is a part: refcounts, snapshots,
    /// bitmaps.
    pub structures: Vec<Range<u64>>,
    /// What the L1 tables of snapshots lead to, which the disk may share.
    shared: Vec<Range<u64>>,
    refcount_blocks: Vec<u64>,
}

impl OtherStructures {
    /// Reads what can be read of refcounts, snapshots and bitmaps.
    pub fn read(store: &dyn Store, front: &HeaderCluster, remarks: &mut Vec<String>) -> Self {
        let mut others = Self::default();
        if let Err(error) = others.find(store, front, remarks) {
            remarks.push(format!("What else is in the file is not known: {error}."));
        }
        others
    }

    fn find(&mut self, store: &dyn Store, front: &HeaderCluster, remarks: &mut Vec<String>) -> Result<()> {
        let (header, file_bytes) = (&front.header, front.file_bytes);
        let (snapshots, snapshot_table_bytes) = match records::snapshots(store, header, file_bytes) {
            Ok(read) => read,
            Err(error) => {
                remarks.push(format!("The internal snapshots are lost: {error}."));
                (Vec::new(), 0)
            }
        };
        let sound = |snapshot: &&_| records::fault_of_snapshot(snapshot, header, file_bytes).is_none();
        let l1_tables: Vec<Place> = snapshots.iter().filter(sound).map(|snapshot| snapshot.l1).collect();
        let bitmaps = match &front.extensions.bitmaps {
            Some(extension) => {
                records::bitmaps(store, extension, &header.geometry(), file_bytes).unwrap_or_else(|error| {
                    remarks.push(format!("The bitmaps are lost: {error}."));
                    Vec::new()
                })
            }
            None => Vec::new(),
        };
        // The disk's own tables are read with more doubts.
        let without_disk = HeaderCluster {
            header: Header { l1: Place { len_bytes: 0, ..header.l1 }, ..header.clone() },
            ..front.clone()
        };
        let mut findings = Findings::new(false);
        let walk = Walk::new(store, &without_disk, &l1_tables, snapshot_table_bytes, &bitmaps, &mut findings)?;
        self.refcount_blocks.clone_from(&walk.refcount_blocks);
        walk.references(None, &mut |reference| {
            let is_own = matches!(reference.of, ClusterUse::Metadata) && reference.structure != L2_TABLE;
            let ranges = if is_own { &mut self.structures } else { &mut self.shared };
            if ranges.len() < RANGES_MAX {
                ranges.push(reference.offset_bytes..reference.offset_bytes.saturating_add(reference.len_bytes));
            }
            Ok(())
        })?;
        Ok(())
    }

    /// Ranges of the file that hold no payload of the disk, in whole clusters. `fixed` are those of
    /// the header and the disk's own tables.
    pub fn not_payload(
        &self,
        store: &dyn Store,
        front: &HeaderCluster,
        fixed: &[Range<u64>],
        table: &BlockTable,
    ) -> Vec<Range<u64>> {
        let cluster_bytes = front.header.cluster_bytes();
        let whole = |range: &Range<u64>| {
            range.start / cluster_bytes * cluster_bytes
                ..range.end.checked_next_multiple_of(cluster_bytes).unwrap_or(range.end)
        };
        let mut ranges: Vec<Range<u64>> = fixed.iter().chain(&self.structures).chain(&self.shared).map(whole).collect();
        let used = joined(ranges.iter().cloned().chain(table.ranges()).collect());
        for (index, &offset_bytes) in self.refcount_blocks.iter().enumerate().filter(|(_, at)| **at != 0) {
            ranges.extend(free_by(store, front, (index as u64, offset_bytes), &used));
            if ranges.len() > RANGES_MAX {
                break;
            }
        }
        joined(ranges)
    }
}

/// The clusters that a refcount block calls free, if it is right about those that are used.
fn free_by(store: &dyn Store, front: &HeaderCluster, (index, at): (u64, u64), used: &[Range<u64>]) -> Vec<Range<u64>> {
    let cluster_bytes = front.header.cluster_bytes();
    let width = front.header.refcount_width;
    let per_block = width.per_block(cluster_bytes);
    let mut block = vec![0; cluster_bytes as usize];
    if !read_what_can_be(store, at, &mut block).is_empty() {
        return Vec::new();
    }
    let mut free: Vec<Range<u64>> = Vec::new();
    let mut is_right = false;
    let clusters = front.file_bytes.div_ceil(cluster_bytes);
    let first = index.saturating_mul(per_block);
    for cluster in first..first.saturating_add(per_block).min(clusters) {
        let range = cluster * cluster_bytes..(cluster + 1) * cluster_bytes;
        let has_references = width.get(&block, (cluster - first) as usize) > 0;
        match (has_references, overlaps_one(used, &range)) {
            (false, true) => return Vec::new(),
            (true, is_used) => is_right |= is_used,
            (false, false) => match free.last_mut().filter(|last| last.end == range.start) {
                Some(last) => last.end = range.end,
                None => free.push(range),
            },
        }
    }
    if is_right { free } else { Vec::new() }
}
