//! Every reference to a cluster of the file, by all structures of an image.
//!
//! ```text
//!   header, refcount table ─▶ refcount blocks
//!   L1 tables (disk, snapshots) ─▶ L2 tables ─▶ data
//!   snapshot table, bitmap directory ─▶ bitmap tables ─▶ bits
//! ```
//!
//! An L2 table that several L1 tables name is read once, and its references count as often. Tables
//! that overlap without being the same are read once only, and holes of the file are not read. So
//! the time is linear in what the file stores, whatever its tables claim.

use super::{check_counts::ClusterUse, corrupt, header::HeaderCluster};
use crate::{
    error::{ImageError, Result},
    findings::{Change, Finding, Findings, corruption},
};
use diskwright_format::qcow2::{BitmapEntry, Geometry, Invalid, L1Entry, L2Entry, Place, bitmap::BitmapTableEntry};
use diskwright_store::Store;
use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
};

const COPIED: u64 = 1 << 63;

/// Most repairs without loss that are collected.
const LOSSLESS_MAX: usize = 1 << 16;

/// Bytes of a table that are read at once.
pub(super) const PIECE_BYTES: u64 = 64 << 10;

/// The name of a reference to an L2 table by an L1 table.
pub(super) const L2_TABLE: &str = "L2 table";
/// The name of the reference to the refcount table.
pub(super) const REFCOUNT_TABLE: &str = "refcount table";
/// The name of a reference to a refcount block.
pub(super) const REFCOUNT_BLOCK: &str = "refcount block";

/// A reference to a range of the file.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reference {
    pub offset_bytes: u64,
    pub len_bytes: u64,
    /// How often it counts.
    pub weight: u32,
    pub of: ClusterUse,
    /// The COPIED flag, in an entry that should have it if the refcount is 1.
    pub copied: Option<bool>,
    /// Offset of the entry in the file.
    pub entry_at: u64,
    /// The entry as it is in the file.
    pub word: u64,
    /// The name of the entry.
    pub structure: &'static str,
    /// Which entry it is.
    pub place: EntryPlace,
}

/// An entry that maps clusters of the disk or of a snapshot.
#[derive(Debug, Clone, Copy)]
pub(super) enum EntryPlace {
    /// The entry maps no clusters.
    None,
    /// An entry of an L1 table; its index, if the table is the disk's.
    L1 { index: Option<u64> },
    /// The entry with the index `within` of an L2 table.
    L2 { table: L2Table, within: u64 },
}

/// An L1 table, and how many views have it.
#[derive(Debug, Clone, Copy)]
pub(super) struct L1Table {
    pub place: Place,
    pub weight: u32,
    /// Whether it is the disk's, so that its COPIED flags mean something.
    pub is_active: bool,
}

/// What names an L2 table.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct L2Table {
    /// How often any L1 table names it.
    pub weight: u32,
    /// How often the disk's does.
    pub active: u32,
    /// The first index at which that one does.
    pub first: u64,
}

/// The structures of an image whose places are known.
#[derive(Debug)]
pub(super) struct Walk<'a> {
    pub store: &'a dyn Store,
    pub front: &'a HeaderCluster,
    pub geometry: Geometry,
    pub l1_tables: Vec<L1Table>,
    /// The L2 tables, by their offset in the file.
    pub l2_tables: BTreeMap<u64, L2Table>,
    pub bitmap_tables: Vec<Place>,
    /// Contiguous structures besides tables with entries.
    pub plain: Vec<(Place, &'static str)>,
    /// Whether an entry with compressed data was met.
    pub has_packed: Cell<bool>,
    /// Offsets of the refcount blocks by index of the refcount table; 0 if there is none.
    pub refcount_blocks: Vec<u64>,
    /// Repairs without loss. They hold only if no two structures overlap: a table that lies where
    /// data are must not be changed.
    pub lossless: RefCell<Vec<LosslessRepair>>,
}

/// Length of the longest entry of a table.
const ENTRY_BYTES_MAX: u64 = 16;

/// A finding, what its repair does, and its changes.
pub(super) type LosslessRepair = (Finding, String, Vec<Change>);

/// Calls `each` for the words of a table that are not 0, with their index. Holes are not read.
pub(super) fn each_word(
    store: &dyn Store,
    doing: &'static str,
    place: Place,
    file_bytes: u64,
    each: &mut dyn FnMut(u64, u64) -> Result<()>,
) -> Result<()> {
    let end = place.offset_bytes.saturating_add(place.len_bytes).min(file_bytes);
    each_piece(store, doing, place.offset_bytes, end, &mut |at, bytes| {
        let first = (at - place.offset_bytes) / 8;
        for (index, word) in (first..).zip(bytes.as_chunks().0) {
            let word = u64::from_be_bytes(*word);
            if word != 0 {
                each(index, word)?;
            }
        }
        Ok(())
    })
}

/// Calls `each` for the pieces of a range that have data. Pieces begin at multiples of 8 bytes from
/// `start`. An entry of which the file has only a part is completed with zeros, as it is read.
pub(super) fn each_piece(
    store: &dyn Store,
    doing: &'static str,
    start: u64,
    end: u64,
    each: &mut dyn FnMut(u64, &[u8]) -> Result<()>,
) -> Result<()> {
    let mut at = start;
    let mut buffer = Vec::new();
    while at < end {
        let io = |error| ImageError::io(doing, store, at, error);
        match store.next_data(at).map_err(io)? {
            None => return Ok(()),
            Some(data) if data.offset_bytes >= end => return Ok(()),
            Some(data) if data.offset_bytes > at => at += (data.offset_bytes - at) / 8 * 8,
            Some(_) => {}
        }
        buffer.clear();
        buffer.resize((end - at).min(PIECE_BYTES) as usize, 0);
        store.read_at(&mut buffer, at).map_err(|error| ImageError::io(doing, store, at, error))?;
        let end_bytes = at - start + buffer.len() as u64;
        buffer.resize(buffer.len() + (end_bytes.next_multiple_of(ENTRY_BYTES_MAX) - end_bytes) as usize, 0);
        each(at, &buffer)?;
        at += buffer.len() as u64;
    }
    Ok(())
}

impl<'a> Walk<'a> {
    /// Reads the L1 tables and the refcount table. `snapshots` are the L1 tables of the snapshots.
    /// Tells what is wrong with them.
    ///
    /// # Errors
    /// `Io`.
    pub fn new(
        store: &'a dyn Store,
        front: &'a HeaderCluster,
        snapshots: &[Place],
        snapshot_table_bytes: u64,
        bitmaps: &[BitmapEntry],
        findings: &mut Findings,
    ) -> Result<Self> {
        let header = &front.header;
        let mut walk = Self {
            store,
            front,
            geometry: header.geometry(),
            l1_tables: Vec::new(),
            l2_tables: BTreeMap::new(),
            bitmap_tables: Vec::new(),
            plain: vec![(Place { offset_bytes: 0, len_bytes: header.cluster_bytes() }, "header")],
            refcount_blocks: Vec::new(),
            has_packed: Cell::new(false),
            lossless: RefCell::default(),
        };
        if snapshot_table_bytes > 0 {
            let place = Place { offset_bytes: header.snapshots_offset_bytes, len_bytes: snapshot_table_bytes };
            walk.plain.push((place, "snapshot table"));
        }
        if let (Some(extension), false) = (&front.extensions.bitmaps, bitmaps.is_empty()) {
            walk.plain.push((extension.directory, "bitmap directory"));
        }
        walk.find_l1_tables(snapshots, findings)?;
        walk.find_bitmap_tables(bitmaps, findings)?;
        walk.find_refcount_blocks(findings)?;
        walk.find_l2_tables(findings)?;
        Ok(walk)
    }

    pub(super) fn is_in_file(&self, offset_bytes: u64) -> bool {
        offset_bytes < self.front.file_bytes
    }

    pub(super) fn finding(&self, at: u64, invalid: Invalid) -> Result<Finding> {
        corruption(corrupt(self.store, at, invalid))
    }

    /// Adds a repair without loss, which is dropped if structures overlap.
    pub(super) fn repair_if_apart(&self, finding: Finding, what: impl Into<String>, changes: Vec<Change>) {
        let mut repairs = self.lossless.borrow_mut();
        // A later round repairs the others.
        if repairs.len() < LOSSLESS_MAX {
            repairs.push((finding, what.into(), changes));
        }
    }

    pub(super) fn fault(&self, at: u64, invalid: Invalid, findings: &mut Findings) -> Result<()> {
        findings.add(self.finding(at, invalid)?);
        Ok(())
    }

    pub(super) fn outside(&self, structure: &'static str, offset_bytes: u64) -> Invalid {
        let expected = format!("an offset in the file of {} bytes", self.front.file_bytes);
        Invalid::new(structure, 0, format!("offset {offset_bytes}"), expected)
    }

    /// Calls `each` for every reference. `findings`, if given, gets what is wrong with entries.
    /// Returns the number of blocks of the disk that have data.
    ///
    /// # Errors
    /// `Io`; errors of `each`.
    pub fn references(
        &self,
        mut findings: Option<&mut Findings>,
        each: &mut dyn FnMut(Reference) -> Result<()>,
    ) -> Result<u64> {
        let cluster_bytes = self.geometry.cluster_bytes();
        let metadata = |place: Place, structure: &'static str| Reference {
            offset_bytes: place.offset_bytes,
            len_bytes: place.len_bytes,
            weight: 1,
            of: ClusterUse::Metadata,
            copied: None,
            entry_at: 0,
            word: 0,
            structure,
            place: EntryPlace::None,
        };
        for (place, structure) in &self.plain {
            each(metadata(*place, structure))?;
        }
        for table in &self.l1_tables {
            each(Reference { weight: table.weight, ..metadata(table.place, "L1 table") })?;
        }
        let table_at = self.front.header.refcount_table.offset_bytes;
        if self.is_in_file(table_at) {
            each(metadata(self.front.header.refcount_table, REFCOUNT_TABLE))?;
        }
        for (index, &offset_bytes) in (0..).zip(&self.refcount_blocks).filter(|&(_, &offset_bytes)| offset_bytes != 0) {
            let place = Place { offset_bytes, len_bytes: cluster_bytes };
            each(Reference { entry_at: table_at + index * 8, ..metadata(place, REFCOUNT_BLOCK) })?;
        }
        // These do not count: the tables do. An entry of the active table says whether its L2 table
        // is shared.
        for table in &self.l1_tables {
            each_word(self.store, "read an L1 table", table.place, self.front.file_bytes, &mut |index, word| {
                let entry = L1Entry(word);
                let Ok(Some(offset_bytes)) = entry.l2_offset(&self.geometry) else { return Ok(()) };
                each(Reference {
                    copied: table.is_active.then_some(entry.is_copied()),
                    entry_at: table.place.offset_bytes + index * 8,
                    word,
                    weight: 0,
                    place: EntryPlace::L1 { index: table.is_active.then_some(index) },
                    ..metadata(Place { offset_bytes, len_bytes: cluster_bytes }, "L1 entry")
                })
            })?;
        }
        let mut allocated_blocks = 0;
        for (&offset_bytes, table) in &self.l2_tables {
            let place = Place { offset_bytes, len_bytes: cluster_bytes };
            each(Reference { weight: table.weight, ..metadata(place, L2_TABLE) })?;
            allocated_blocks += self.references_of_l2(place, *table, &mut findings, each)?;
        }
        for place in &self.bitmap_tables {
            each(metadata(*place, "bitmap table"))?;
            each_word(self.store, "read a bitmap table", *place, self.front.file_bytes, &mut |index, word| {
                let entry = BitmapTableEntry(word);
                let at = place.offset_bytes + index * 8;
                let invalid = match entry.offset_bytes() {
                    _ if entry.reserved() != 0 => {
                        Invalid::new("bitmap table entry", 0, format!("{word:#018x}"), "its reserved bits clear")
                    }
                    None => return Ok(()),
                    Some(offset_bytes) if !offset_bytes.is_multiple_of(cluster_bytes) => {
                        let expected = format!("a multiple of the cluster size ({cluster_bytes})");
                        Invalid::new("bitmap table entry", 0, format!("offset {offset_bytes}"), expected)
                    }
                    Some(offset_bytes) if !self.is_in_file(offset_bytes) => {
                        self.outside("bitmap table entry", offset_bytes)
                    }
                    Some(offset_bytes) => {
                        return each(metadata(Place { offset_bytes, len_bytes: cluster_bytes }, "bits of a bitmap"));
                    }
                };
                findings.as_deref_mut().map_or(Ok(()), |findings| self.fault(at, invalid, findings))
            })?;
        }
        Ok(allocated_blocks)
    }

    /// The references of an L2 table. Returns its blocks that have data, if it is the disk's.
    fn references_of_l2(
        &self,
        place: Place,
        table: L2Table,
        findings: &mut Option<&mut Findings>,
        each: &mut dyn FnMut(Reference) -> Result<()>,
    ) -> Result<u64> {
        let geometry = &self.geometry;
        let entry_bytes = geometry.l2_entry_bytes();
        let mut blocks = 0;
        let end = place.offset_bytes.saturating_add(place.len_bytes).min(self.front.file_bytes);
        each_piece(self.store, "read an L2 table", place.offset_bytes, end, &mut |at, bytes| {
            // A piece may begin in the middle of an extended entry, if a hole ends there.
            let skipped = (at - place.offset_bytes) % entry_bytes;
            let (at, bytes) = match skipped {
                0 => (at, bytes),
                _ => (at + entry_bytes - skipped, &bytes[bytes.len().min((entry_bytes - skipped) as usize)..]),
            };
            for (entry_at, raw) in (at..).step_by(entry_bytes as usize).zip(bytes.chunks_exact(entry_bytes as usize)) {
                let words = raw.as_chunks().0;
                let word = words.first().map_or(0, |word| u64::from_be_bytes(*word));
                let parts = words.get(1).map_or(0, |word| u64::from_be_bytes(*word));
                if word == 0 && parts == 0 {
                    continue;
                }
                let within = (entry_at - place.offset_bytes) / entry_bytes;
                let entry_place = EntryPlace::L2 { table, within };
                let tells = findings.is_some();
                let mut fault = |invalid| match findings.as_deref_mut() {
                    Some(findings) => {
                        let finding = self.finding(entry_at, invalid)?;
                        self.give_up(entry_place, entry_at, finding, findings)
                    }
                    None => Ok(()),
                };
                let of_entry = |offset_bytes, len_bytes, of, copied| Reference {
                    offset_bytes,
                    len_bytes,
                    weight: table.weight,
                    of,
                    copied,
                    entry_at,
                    word,
                    structure: "L2 entry",
                    place: entry_place,
                };
                match L2Entry::parse(word, parts, geometry) {
                    Err(invalid) => fault(invalid)?,
                    Ok(L2Entry::Unallocated) => {}
                    Ok(L2Entry::Compressed { offset_bytes, len_bytes, is_copied }) => {
                        blocks += geometry.subclusters();
                        self.has_packed.set(true);
                        if is_copied && tells {
                            let expected = "no COPIED flag, as the cluster is compressed";
                            let invalid = Invalid::new("L2 entry", 0, format!("{word:#018x}"), expected);
                            let change = Change::Write(entry_at, (word & !COPIED).to_be_bytes().to_vec());
                            let finding = self.finding(entry_at, invalid)?;
                            self.repair_if_apart(finding, "the flag is cleared", vec![change]);
                        }
                        if !self.is_in_file(offset_bytes) {
                            fault(self.outside("L2 entry", offset_bytes))?;
                        } else {
                            each(of_entry(offset_bytes, len_bytes, ClusterUse::Packed, None))?;
                        }
                    }
                    Ok(L2Entry::Standard { offset_bytes, parts, is_copied }) => {
                        blocks += match geometry.is_extended {
                            true => u64::from(parts.allocated.count_ones()),
                            false => u64::from(parts.allocated != 0),
                        };
                        match offset_bytes {
                            // Clusters of a data file have no refcounts.
                            None => {}
                            Some(_) if geometry.has_data_file => {}
                            // Zeros without space in the file are never read, but a write goes
                            // there.
                            Some(offset_bytes) if tells && parts.allocated == 0 && !self.is_in_file(offset_bytes) => {
                                let finding = self.finding(entry_at, self.outside("L2 entry", offset_bytes))?;
                                let (word, _) = L2Entry::Standard { offset_bytes: None, parts, is_copied: false }
                                    .to_words(geometry);
                                let change = Change::Write(entry_at, word.to_be_bytes().to_vec());
                                self.repair_if_apart(finding, "the entry loses its place", vec![change]);
                            }
                            Some(offset_bytes) if !self.is_in_file(offset_bytes) => {
                                fault(self.outside("L2 entry", offset_bytes))?;
                            }
                            Some(offset_bytes) => {
                                let copied = (table.active > 0).then_some(is_copied);
                                each(of_entry(offset_bytes, geometry.cluster_bytes(), ClusterUse::Data, copied))?;
                            }
                        }
                    }
                }
            }
            Ok(())
        })?;
        Ok(if table.active > 0 { blocks } else { 0 })
    }
}
