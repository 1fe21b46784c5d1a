//! What can still be known of a damaged qcow2 image.
//!
//! ```text
//!   header ─▶ geometry, L1 table              damaged: the L1 table by its contents, if only one
//!   extensions, names ─▶ parent               place fits (salvage_header.rs)
//!   L1 entries ─▶ L2 tables, each at a place of its own ─▶ entries ─▶ clusters
//!   snapshots, bitmaps, refcounts ─▶ what else of the file is not payload (salvage_space.rs)
//! ```
//!
//! Refcounts are not needed to read, and no refcount makes an entry wrong. They only say which
//! clusters without an entry are free: such a cluster holds no lost data.
//!
//! What must hold: a table or a cluster that shares space with another one is lost, and so is the
//! other one. A table most of whose entries cannot be right is not an L2 table: all its blocks are
//! lost. An entry cannot be right if it is malformed, leads into a structure or far beyond any file
//! of this disk, or lacks the COPIED flag that the table's own entry has, in an image without
//! snapshots.

use super::{
    compressed,
    header::HeaderCluster,
    link,
    salvage_header::{Known, header_of},
    salvage_space::OtherStructures,
};
use crate::{
    Format, ImageError, ImageInfo, Result,
    salvage::{
        Bitmaps, BlockTable, Fault, ParentRecord, SalvageHints, Salvaged, SalvagedBlock, Unpack, each_entry,
        file_length, joined, overlapping, overlaps_one,
    },
};
use diskwright_format::qcow2::{Compression, Geometry, Header, L1Entry, L2Entry, Subclusters, features};
use diskwright_store::Store;
use std::{collections::HashSet, ops::Range, sync::Arc};

/// Most blocks of a disk whose tables are read.
const BLOCKS_MAX: u64 = 1 << 32;
/// The bytes of the file that compressed data may share with those behind them.
const SHARED_BYTES: u64 = 511;

/// Salvages a qcow2 image.
pub(crate) fn salvage(store: Arc<dyn Store>, hints: &SalvageHints) -> Result<Salvaged> {
    let file_bytes = file_length(&*store)?;
    let mut remarks = Vec::new();
    let Known { front, parent_record, has_l1 } = header_of(&*store, file_bytes, hints, &mut remarks)?;
    refuse(&*store, &front)?;
    let header = &front.header;
    let geometry = header.geometry();
    let size_bytes = header.size_bytes.checked_next_multiple_of(512).unwrap_or(u64::MAX - 511);
    let count = size_bytes.div_ceil(geometry.unit_bytes());
    if count > BLOCKS_MAX {
        return Err(ImageError::Unsupported {
            path: store.name().to_owned(),
            what: format!("rescuing a disk of {count} clusters"),
            hint: format!("at most {BLOCKS_MAX} are; if its tables are sound, convert it"),
        });
    }
    let parent = match parent_record {
        ParentRecord::Child => link::link_of(&*store, &front).unwrap_or_else(|error| {
            remarks.push(format!("The record of the parent cannot be used: {error}."));
            None
        }),
        _ => None,
    };
    let mut doubts = Vec::new();
    let mut table = BlockTable::new(count, geometry.unit_bytes());
    let l1 = header.l1.offset_bytes..header.l1.offset_bytes.saturating_add(header.l1.len_bytes);
    let others = OtherStructures::read(&*store, &front, &mut remarks);
    let mut fixed = others.structures.clone();
    fixed.push(0..geometry.cluster_bytes());
    if has_l1 {
        fixed.push(l1);
        let reader = Reader { store: &*store, geometry, file_bytes, fixed: joined(fixed.clone()) };
        fixed = reader.read(header, &mut table)?;
    } else {
        remarks.push("The L1 table was not found.".into());
        doubts.push("the L1 table was not found".to_owned());
        table.lose(&*store, 0, count, Fault::NoTable)?;
    }
    let tables = others.not_payload(&*store, &front, &fixed, &table);
    let unpack = Cluster { compression: header.compression, geometry };
    let info = ImageInfo {
        parent,
        payload_alignment_bytes: geometry.unit_bytes().min(1 << 20) as u32,
        remarks,
        ..ImageInfo::new(Format::Qcow2, parent_record.disk_type(), size_bytes, geometry.unit_bytes())
    };
    Ok(Salvaged {
        info,
        store,
        file_bytes,
        parent_record,
        table,
        bitmaps: Bitmaps::None,
        unpack: Some(Arc::new(unpack)),
        tables,
        payload_alignment_bytes: geometry.unit_bytes(),
        doubts,
        doubts_bitmaps: false,
    })
}

/// What no reader of this program understands, or what lies in another file.
fn refuse(store: &dyn Store, front: &HeaderCluster) -> Result<()> {
    front.refuse_unsupported(store)?;
    if !front.header.features.has(features::EXTERNAL_DATA) {
        return Ok(());
    }
    Err(ImageError::Unsupported {
        path: store.name().to_owned(),
        what: "the rescue of a qcow2 image with an external data file".into(),
        hint: "each cluster lies in the data file at its offset on the disk: use the data file as a raw disk".into(),
    })
}

/// Decompresses the clusters of a salvaged image.
#[derive(Debug)]
struct Cluster {
    compression: Compression,
    geometry: Geometry,
}

impl Unpack for Cluster {
    fn unpack(&self, block: u64, packed: &[u8]) -> std::result::Result<Vec<u8>, String> {
        let mut out = vec![0; self.geometry.cluster_bytes() as usize];
        compressed::decompress(self.compression, packed, &mut out)?;
        let within = block % self.geometry.subclusters() * self.geometry.unit_bytes();
        Ok(out.split_off(within as usize))
    }
}

/// Reads the tables of the disk.
struct Reader<'a> {
    store: &'a dyn Store,
    geometry: Geometry,
    file_bytes: u64,
    /// Header, L1 table and structures: sorted, and none touches another.
    fixed: Vec<Range<u64>>,
}

impl Reader<'_> {
    /// Reads all tables. Returns the ranges of header and tables.
    fn read(&self, header: &Header, table: &mut BlockTable) -> Result<Vec<Range<u64>>> {
        let cluster_bytes = self.geometry.cluster_bytes();
        let count = self.geometry.l1_entries(header.size_bytes);
        let mut places = Vec::new();
        let mut copied = HashSet::new();
        let there = each_entry(self.store, header.l1.offset_bytes, (count, 8), &mut |index, raw| {
            let entry = raw.map(|raw| L1Entry(u64::from_be_bytes(raw.try_into().unwrap_or_default())));
            if entry.is_some_and(L1Entry::is_copied) && header.snapshots == 0 {
                copied.insert(index);
            }
            let found = entry.map_or(Err(Fault::Unreadable), |entry| self.l2_place(entry));
            match found {
                Ok(None) => Ok(()),
                Ok(Some(at)) => {
                    places.push((index, at, at + cluster_bytes));
                    Ok(())
                }
                Err(fault) => self.lose_table(table, index, index + 1, fault),
            }
        })?;
        self.lose_table(table, there, count, Fault::Unreadable)?;
        let shared: HashSet<u64> = overlapping(&mut places).into_iter().collect();
        for &index in &shared {
            self.lose_table(table, index, index + 1, Fault::Claimed)?;
        }
        places.sort_unstable_by_key(|&(index, ..)| index);
        let is_own = |(index, ..): &&(u64, u64, u64)| !shared.contains(index);
        let all: Vec<Range<u64>> = places.iter().map(|&(_, start, end)| start..end).collect();
        let structures = joined(self.fixed.iter().cloned().chain(all.iter().cloned()).collect());
        let mut pieces = Vec::new();
        let mut believed = Vec::new();
        for &(index, at, end) in places.iter().filter(is_own) {
            let named = Named { index, at, is_copied: copied.contains(&index) };
            if self.read_table(&named, &structures, table, &mut pieces)? {
                believed.push(at..end);
            }
        }
        for cluster in overlapping(&mut pieces) {
            self.lose_cluster(table, cluster, Fault::Claimed)?;
        }
        Ok(self.fixed.iter().cloned().chain(believed).collect())
    }

    fn l2_place(&self, entry: L1Entry) -> std::result::Result<Option<u64>, Fault> {
        let Some(at) = entry.l2_offset(&self.geometry).map_err(|_| Fault::Undefined)? else { return Ok(None) };
        if at >= self.file_bytes {
            return Err(Fault::BeyondEnd);
        }
        match overlaps_one(&self.fixed, &(at..at + self.geometry.cluster_bytes())) {
            true => Err(Fault::InTables),
            false => Ok(Some(at)),
        }
    }

    fn blocks_of(&self, first: u64, end: u64) -> (u64, u64) {
        let blocks = self.geometry.l2_entries() * self.geometry.subclusters();
        (first.saturating_mul(blocks), end.saturating_mul(blocks))
    }

    fn lose_table(&self, table: &mut BlockTable, first: u64, end: u64, fault: Fault) -> Result<()> {
        let (first, end) = self.blocks_of(first, end);
        table.lose(self.store, first, end, fault)
    }

    fn lose_cluster(&self, table: &mut BlockTable, cluster: u64, fault: Fault) -> Result<()> {
        let subclusters = self.geometry.subclusters();
        for block in cluster * subclusters..((cluster + 1) * subclusters).min(table.count()) {
            if table.get(block) != Ok(None) {
                table.lose_held(self.store, block, fault)?;
            }
        }
        Ok(())
    }

    /// Reads an L2 table. `pieces` gets the space of its clusters. Returns whether it is one.
    fn read_table(
        &self,
        &Named { index, at, is_copied }: &Named,
        structures: &[Range<u64>],
        table: &mut BlockTable,
        pieces: &mut Vec<(u64, u64, u64)>,
    ) -> Result<bool> {
        let (entry_bytes, per_table) = (self.geometry.l2_entry_bytes(), self.geometry.l2_entries());
        let subclusters = self.geometry.subclusters();
        let mut read: Vec<(u64, std::result::Result<L2Entry, Fault>)> = Vec::new();
        let (mut used, mut wrong) = (0, 0);
        let far_bytes = self.far_bytes(table);
        let lacks_flag = |entry: &L2Entry| {
            matches!(entry, L2Entry::Standard { offset_bytes: Some(_), is_copied: false, .. }) && is_copied
        };
        let entries = (per_table, entry_bytes as usize);
        let there = each_entry(self.store, at, entries, &mut |slot, raw| {
            let cluster = index * per_table + slot;
            let Some(raw) = raw else {
                read.push((cluster, Err(Fault::Unreadable)));
                return Ok(());
            };
            let words = raw.as_chunks().0;
            let word = |index: usize| words.get(index).map_or(0, |word| u64::from_be_bytes(*word));
            let entry = L2Entry::parse(word(0), word(1), &self.geometry).map_err(|_| Fault::Undefined);
            used += u64::from(word(0) != 0 || word(1) != 0);
            let cannot_be = match &entry {
                Err(_) => true,
                Ok(entry) => match self.held(*entry, structures) {
                    Err(Fault::BeyondEnd) => {
                        lacks_flag(entry)
                            || matches!(entry, L2Entry::Standard { offset_bytes: Some(at), .. } | L2Entry::Compressed { offset_bytes: at, .. } if *at > far_bytes)
                    }
                    Err(_) => true,
                    Ok(_) => lacks_flag(entry),
                },
            };
            wrong += u64::from(cannot_be);
            read.push((cluster, entry));
            Ok(())
        })?;
        let first = index * per_table;
        if wrong * 2 > used {
            self.lose_table(table, index, index + 1, Fault::Undefined)?;
            return Ok(false);
        }
        let count = table.count();
        for (cluster, entry) in read.into_iter().filter(|(cluster, _)| cluster * subclusters < count) {
            let held = entry.and_then(|entry| self.held(entry, structures));
            match held {
                Ok(ClusterContents::None) => {}
                Ok(ClusterContents::Parts { offset_bytes, parts }) => {
                    if let Some(start) = offset_bytes {
                        pieces.push((cluster, start, start + self.geometry.cluster_bytes()));
                    }
                    for sub in 0..subclusters {
                        let block = cluster * subclusters + sub;
                        let held = match offset_bytes {
                            _ if parts.zero >> sub & 1 == 1 => SalvagedBlock::Zero,
                            Some(start) if parts.allocated >> sub & 1 == 1 => {
                                SalvagedBlock::Data(start + sub * self.geometry.unit_bytes())
                            }
                            _ => continue,
                        };
                        if block < count {
                            table.hold(self.store, block, held)?;
                        }
                    }
                }
                Ok(ClusterContents::Packed { offset_bytes, len_bytes }) => {
                    let end = (offset_bytes + len_bytes).saturating_sub(SHARED_BYTES).max(offset_bytes + 1);
                    pieces.push((cluster, offset_bytes, end));
                    for block in cluster * subclusters..((cluster + 1) * subclusters).min(count) {
                        table.hold(self.store, block, SalvagedBlock::Packed { offset_bytes, len_bytes })?;
                    }
                }
                Err(fault) => table.lose(self.store, cluster * subclusters, (cluster + 1) * subclusters, fault)?,
            }
        }
        let (start, end) = ((first + there) * subclusters, (first + per_table) * subclusters);
        table.lose(self.store, start, end, Fault::Unreadable)?;
        Ok(true)
    }

    /// An offset that no file of this disk reaches.
    fn far_bytes(&self, table: &BlockTable) -> u64 {
        let size_bytes = table.count().saturating_mul(self.geometry.unit_bytes());
        size_bytes.saturating_mul(4).saturating_add(1 << 30).max(self.file_bytes)
    }

    fn held(&self, entry: L2Entry, structures: &[Range<u64>]) -> std::result::Result<ClusterContents, Fault> {
        let check = |offset_bytes: u64, len_bytes: u64| {
            if offset_bytes >= self.file_bytes {
                return Err(Fault::BeyondEnd);
            }
            match overlaps_one(structures, &(offset_bytes..offset_bytes.saturating_add(len_bytes))) {
                true => Err(Fault::InTables),
                false => Ok(()),
            }
        };
        match entry {
            L2Entry::Unallocated => Ok(ClusterContents::None),
            L2Entry::Standard { offset_bytes, parts, .. } => {
                if let Some(offset_bytes) = offset_bytes.filter(|_| parts.allocated != 0) {
                    check(offset_bytes, self.geometry.cluster_bytes())?;
                }
                let offset_bytes = offset_bytes.filter(|&at| at < self.file_bytes);
                Ok(ClusterContents::Parts { offset_bytes, parts })
            }
            L2Entry::Compressed { offset_bytes, len_bytes, .. } => {
                check(offset_bytes, len_bytes.saturating_sub(SHARED_BYTES).max(1))?;
                Ok(ClusterContents::Packed { offset_bytes, len_bytes })
            }
        }
    }
}

/// An L2 table, by the entry that names it.
struct Named {
    index: u64,
    at: u64,
    /// Whether that entry has the COPIED flag, in an image without snapshots.
    is_copied: bool,
}

/// What an entry says of a cluster.
enum ClusterContents {
    None,
    Parts { offset_bytes: Option<u64>, parts: Subclusters },
    Packed { offset_bytes: u64, len_bytes: u64 },
}
