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
    findings::{Findings, corruption},
};
use diskwright_format::qcow2::{
    BitmapEntry, Geometry, Invalid, L1Entry, L2Entry, Place, bitmap::BitmapTableEntry, refcount::RefcountTableEntry,
};
use diskwright_store::Store;
use std::{
    cell::Cell,
    collections::{BTreeMap, HashMap, HashSet},
};

/// Bytes of a table that are read at once.
pub(super) const PIECE_BYTES: u64 = 64 << 10;

/// The name of a reference to an L2 table by an L1 table.
pub(super) const L2_TABLE: &str = "L2 table";

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
}

/// An L1 table, and how many views have it.
#[derive(Debug, Clone, Copy)]
struct L1Table {
    place: Place,
    weight: u32,
    /// Whether it is the disk's, so that its COPIED flags mean something.
    is_active: bool,
}

/// What names an L2 table.
#[derive(Debug, Clone, Copy, Default)]
struct L2Table {
    weight: u32,
    /// Whether an entry of the active L1 table names it.
    is_active: bool,
}

/// The structures of an image whose places are known.
#[derive(Debug)]
pub(super) struct Walk<'a> {
    pub store: &'a dyn Store,
    pub front: &'a HeaderCluster,
    pub geometry: Geometry,
    l1_tables: Vec<L1Table>,
    /// The L2 tables, by their offset in the file.
    l2_tables: BTreeMap<u64, L2Table>,
    bitmap_tables: Vec<Place>,
    /// Contiguous structures besides tables with entries.
    plain: Vec<(Place, &'static str)>,
    /// Whether an entry with compressed data was met.
    pub has_packed: Cell<bool>,
    /// Offsets of the refcount blocks by index of the refcount table; 0 if there is none.
    pub refcount_blocks: Vec<u64>,
}

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
/// `start`.
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
        walk.find_l2_tables(findings)?;
        walk.find_refcount_blocks(findings)?;
        Ok(walk)
    }

    fn is_in_file(&self, offset_bytes: u64) -> bool {
        offset_bytes < self.front.file_bytes
    }

    fn fault(&self, at: u64, invalid: Invalid, findings: &mut Findings) -> Result<()> {
        findings.add(corruption(corrupt(self.store, at, invalid))?);
        Ok(())
    }

    fn outside(&self, structure: &'static str, offset_bytes: u64) -> Invalid {
        let expected = format!("an offset in the file of {} bytes", self.front.file_bytes);
        Invalid::new(structure, 0, format!("offset {offset_bytes}"), expected)
    }

    /// The places without those that overlap an earlier one. `may_be_same`: two of them may be the
    /// same place.
    fn apart(
        &self,
        mut places: Vec<Place>,
        structure: &'static str,
        findings: &mut Findings,
        may_be_same: bool,
    ) -> Result<Vec<Place>> {
        places.sort_by_key(|place| (place.offset_bytes, place.len_bytes));
        let mut kept: Vec<Place> = Vec::new();
        for place in places.into_iter().filter(|place| place.len_bytes > 0) {
            let last = kept.last().copied();
            if may_be_same && last == Some(place) {
                continue;
            }
            match last.filter(|last| last.offset_bytes.saturating_add(last.len_bytes) > place.offset_bytes) {
                Some(last) => {
                    let found = format!("{} bytes at offset {}", place.len_bytes, place.offset_bytes);
                    let expected =
                        format!("space of its own: another one has {} bytes at {}", last.len_bytes, last.offset_bytes);
                    self.fault(place.offset_bytes, Invalid::new(structure, 0, found, expected), findings)?;
                }
                None => kept.push(place),
            }
        }
        Ok(kept)
    }

    fn find_l1_tables(&mut self, snapshots: &[Place], findings: &mut Findings) -> Result<()> {
        let active = self.front.header.l1;
        let all: Vec<Place> = snapshots.iter().copied().chain([active]).collect();
        let mut weights: HashMap<(u64, u64), u32> = HashMap::new();
        for place in &all {
            *weights.entry((place.offset_bytes, place.len_bytes)).or_default() += 1;
        }
        let kept = self.apart(all, "L1 table", findings, true)?;
        let tables = kept.into_iter().map(|place| L1Table {
            place,
            weight: weights.get(&(place.offset_bytes, place.len_bytes)).copied().unwrap_or(1),
            is_active: place == active,
        });
        self.l1_tables = tables.collect();
        Ok(())
    }

    fn find_bitmap_tables(&mut self, bitmaps: &[BitmapEntry], findings: &mut Findings) -> Result<()> {
        let cluster_bytes = self.geometry.cluster_bytes();
        let mut places = Vec::new();
        for bitmap in bitmaps {
            let place = bitmap.table;
            let end = place.offset_bytes.checked_add(place.len_bytes).filter(|&end| end <= self.front.file_bytes);
            if end.is_none() || !place.offset_bytes.is_multiple_of(cluster_bytes) {
                let found = format!("{} bytes at offset {}", place.len_bytes, place.offset_bytes);
                let expected =
                    format!("a place in the file of {} bytes, at a multiple of {cluster_bytes}", self.front.file_bytes);
                let at = self.front.extensions.bitmaps.map_or(0, |extension| extension.directory.offset_bytes);
                self.fault(at, Invalid::new("bitmap table", 0, found, expected), findings)?;
            } else {
                places.push(place);
            }
        }
        self.bitmap_tables = self.apart(places, "bitmap table", findings, false)?;
        Ok(())
    }

    fn find_l2_tables(&mut self, findings: &mut Findings) -> Result<()> {
        let mut found: BTreeMap<u64, L2Table> = BTreeMap::new();
        for table in &self.l1_tables {
            each_word(self.store, "read an L1 table", table.place, self.front.file_bytes, &mut |index, word| {
                let at = table.place.offset_bytes + index * 8;
                match L1Entry(word).l2_offset(&self.geometry) {
                    Ok(Some(offset_bytes)) if !self.is_in_file(offset_bytes) => {
                        self.fault(at, self.outside("L1 entry", offset_bytes), findings)
                    }
                    Ok(Some(offset_bytes)) => {
                        let named = found.entry(offset_bytes).or_default();
                        named.weight = named.weight.saturating_add(table.weight);
                        named.is_active |= table.is_active;
                        Ok(())
                    }
                    Ok(None) => Ok(()),
                    Err(invalid) => self.fault(at, invalid, findings),
                }
            })?;
        }
        self.l2_tables = found;
        Ok(())
    }

    fn find_refcount_blocks(&mut self, findings: &mut Findings) -> Result<()> {
        let place = self.front.header.refcount_table;
        if place.offset_bytes == 0 || place.len_bytes == 0 || !self.is_in_file(place.offset_bytes) {
            let invalid = Invalid::new(
                "qcow2 header",
                48,
                format!("a refcount table of {} bytes at offset {}", place.len_bytes, place.offset_bytes),
                format!("a place in the file of {} bytes", self.front.file_bytes),
            );
            return self.fault(0, invalid, findings);
        }
        let mut blocks = Vec::new();
        let mut seen = HashSet::new();
        each_word(self.store, "read the refcount table", place, self.front.file_bytes, &mut |index, word| {
            let at = place.offset_bytes + index * 8;
            let entry = RefcountTableEntry(word);
            let offset_bytes = entry.offset_bytes();
            let fail = |expected: String| Invalid::new("refcount table entry", 0, format!("{word:#018x}"), expected);
            let invalid = if entry.reserved() != 0 {
                fail("bits 0 to 8 clear".into())
            } else if !offset_bytes.is_multiple_of(self.geometry.cluster_bytes()) {
                fail(format!("an offset that is a multiple of the cluster size ({})", self.geometry.cluster_bytes()))
            } else if !self.is_in_file(offset_bytes) {
                self.outside("refcount table entry", offset_bytes)
            } else if !seen.insert(offset_bytes) {
                fail("a refcount block that no other entry names".into())
            } else {
                blocks.resize(index as usize, 0);
                blocks.push(offset_bytes);
                return Ok(());
            };
            self.fault(at, invalid, findings)
        })?;
        self.refcount_blocks = blocks;
        Ok(())
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
        };
        for (place, structure) in &self.plain {
            each(metadata(*place, structure))?;
        }
        if self.is_in_file(self.front.header.refcount_table.offset_bytes) {
            each(metadata(self.front.header.refcount_table, "refcount table"))?;
        }
        for &offset_bytes in self.refcount_blocks.iter().filter(|&&offset_bytes| offset_bytes != 0) {
            each(metadata(Place { offset_bytes, len_bytes: cluster_bytes }, "refcount block"))?;
        }
        for table in &self.l1_tables {
            each(Reference { weight: table.weight, ..metadata(table.place, "L1 table") })?;
            // An entry of the active table says whether its L2 table is shared.
            if table.is_active {
                each_word(self.store, "read an L1 table", table.place, self.front.file_bytes, &mut |index, word| {
                    let entry = L1Entry(word);
                    let Ok(Some(offset_bytes)) = entry.l2_offset(&self.geometry) else { return Ok(()) };
                    each(Reference {
                        copied: Some(entry.is_copied()),
                        entry_at: table.place.offset_bytes + index * 8,
                        word,
                        weight: 0,
                        ..metadata(Place { offset_bytes, len_bytes: cluster_bytes }, "L1 entry")
                    })
                })?;
            }
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
                let mut fault = |invalid| match findings.as_deref_mut() {
                    Some(findings) => self.fault(entry_at, invalid, findings),
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
                };
                match L2Entry::parse(word, parts, geometry) {
                    Err(invalid) => fault(invalid)?,
                    Ok(L2Entry::Unallocated) => {}
                    Ok(L2Entry::Compressed { offset_bytes, len_bytes, is_copied }) => {
                        blocks += geometry.subclusters();
                        self.has_packed.set(true);
                        if is_copied {
                            let expected = "no COPIED flag, as the cluster is compressed";
                            fault(Invalid::new("L2 entry", 0, format!("{word:#018x}"), expected))?;
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
                            Some(offset_bytes) if !self.is_in_file(offset_bytes) => {
                                // Zeros without space in the file are never read, but a write
                                // goes there.
                                fault(self.outside("L2 entry", offset_bytes))?;
                            }
                            Some(offset_bytes) => {
                                let copied = table.is_active.then_some(is_copied);
                                each(of_entry(offset_bytes, geometry.cluster_bytes(), ClusterUse::Data, copied))?;
                            }
                        }
                    }
                }
            }
            Ok(())
        })?;
        Ok(if table.is_active { blocks } else { 0 })
    }
}
