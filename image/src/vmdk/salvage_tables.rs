//! Directories and grain tables of a damaged extent. There are usually two copies of both.
//!
//! ```text
//!   copy 1: directory ─▶ table k ─┐
//!                                 ├─▶ one answer for each grain, or why it is lost
//!   copy 2: directory ─▶ table k ─┘
//! ```
//!
//! A copy of a table is *sound* if it lies at a place of its own, can be read, and has only entries
//! that can be right. Between two copies this decides:
//!
//! - They agree: that is the answer.
//! - One names a place and the other says "absent": the place, if that copy is sound. (One of them
//!   was wiped, or a cut came between their writes: then either is what a flush had promised.)
//! - One is sound and the other is not: the sound one, unless the other one names a place that may
//!   be right where the sound one says "absent". Then the grain is lost.
//! - Both are valid and name different things: the grain is lost.
//!
//! In an extent without its header the directories are found by their contents: programs give all
//! tables their space at once, one behind the other, right behind their directory. The redundant
//! directory comes first.

use super::salvage_stream;
use crate::{
    ImageError, Result,
    salvage::{
        BlockTable, Fault, SalvageHints, SalvagedBlock, each_entry, joined, overlapping, overlaps_one, read_what_can_be,
    },
};
use diskwright_format::vmdk::{
    Fragments, GRAIN_ABSENT, GRAIN_ZERO, GTES_PER_TABLE, Placing, SECTOR_BYTES, SparseFlags, SparseHeader,
};
use diskwright_store::Store;
use std::{collections::HashSet, ops::Range};

/// Most grain tables of an extent.
const TABLES_MAX: u64 = super::tables::TABLES_MAX;
/// Where directories are looked for: the first bytes of the file.
const SEARCH_BYTES: u64 = 64 << 20;

/// A sparse extent whose numbers are known.
pub(super) struct Extent<'a> {
    pub store: &'a dyn Store,
    pub file_bytes: u64,
    pub capacity_bytes: u64,
    pub grain_bytes: u64,
    pub table_entries: u64,
    pub is_compressed: bool,
    has_zeros: bool,
    /// Offsets of the directories, the first one first. None is known of a stream without its end.
    pub directories: Vec<u64>,
}

impl<'a> Extent<'a> {
    /// The extent by its header, or by what else says how large it is.
    pub fn new(
        store: &'a dyn Store,
        header: Option<SparseHeader>,
        lines: &Fragments,
        file_bytes: u64,
        hints: &SalvageHints,
        remarks: &mut Vec<String>,
    ) -> Result<Self> {
        let is_whole = header.is_some();
        let header = match header {
            Some(header) => header,
            None => guessed(store, lines, hints)?,
        };
        let sectors = [header.directory, header.redundant_directory.map_or(Placing::InFooter, Placing::Sector)];
        let known = sectors.into_iter().filter_map(|placing| match placing {
            Placing::Sector(sector) => Some(sector.saturating_mul(SECTOR_BYTES)),
            Placing::InFooter => None,
        });
        let mut extent = Self {
            store,
            file_bytes,
            capacity_bytes: header.capacity_sectors.saturating_mul(SECTOR_BYTES),
            grain_bytes: header.grain_bytes(),
            table_entries: header.table_entries.into(),
            is_compressed: header.flags.has(SparseFlags::COMPRESSED),
            has_zeros: header.flags.has(SparseFlags::ZEROED_GRAINS),
            directories: known.filter(|&at| at >= SECTOR_BYTES && at < file_bytes).collect(),
        };
        if extent.tables() > TABLES_MAX {
            return Err(ImageError::Unsupported {
                path: store.name().to_owned(),
                what: format!("a sparse extent of {} grain tables (at most {TABLES_MAX})", extent.tables()),
                hint: "is this the right file? A disk of that size would have larger grains".into(),
            });
        }
        if (!is_whole || extent.directories.is_empty()) && !extent.is_compressed {
            extent.directories = extent.search()?;
            let places: Vec<String> = extent.directories.iter().map(u64::to_string).collect();
            if !places.is_empty() {
                remarks.push(format!("Grain directories were found by their contents, at {}.", places.join(" and ")));
            }
        }
        Ok(extent)
    }

    pub fn grains(&self) -> u64 {
        self.capacity_bytes.div_ceil(self.grain_bytes)
    }

    pub fn tables(&self) -> u64 {
        self.grains().div_ceil(self.table_entries)
    }

    fn table_bytes(&self) -> u64 {
        (self.table_entries * 4).next_multiple_of(SECTOR_BYTES)
    }

    fn directory_bytes(&self) -> u64 {
        (self.tables() * 4).next_multiple_of(SECTOR_BYTES)
    }

    /// The directories of an extent that has not grown, the first one first.
    fn search(&self) -> Result<Vec<u64>> {
        let end = self.file_bytes.min(SEARCH_BYTES);
        let mut found = Vec::new();
        let mut at = SECTOR_BYTES;
        while at + self.directory_bytes() <= end {
            match self.store.next_data(at) {
                Ok(Some(data)) => at = at.max(data.offset_bytes - data.offset_bytes % SECTOR_BYTES),
                Ok(None) => break,
                Err(_) => {}
            }
            if self.reads_as_directory(at) {
                found.push(at);
                at += self.directory_bytes() + self.tables() * self.table_bytes();
            } else {
                at += SECTOR_BYTES;
            }
        }
        // The redundant one comes first. A third one means that some of them is not one.
        found.reverse();
        Ok(if found.len() > 2 { Vec::new() } else { found })
    }

    fn reads_as_directory(&self, at: u64) -> bool {
        let mut sector = [0; SECTOR_BYTES as usize];
        let entry = |index: u64| (at + self.directory_bytes() + index * self.table_bytes()) / SECTOR_BYTES;
        let mut index = 0;
        for start in (at..at + self.directory_bytes()).step_by(sector.len()) {
            if !read_what_can_be(self.store, start, &mut sector).is_empty() {
                return false;
            }
            for raw in sector.as_chunks::<4>().0 {
                let expected = if index < self.tables() { entry(index) } else { 0 };
                if u64::from(u32::from_le_bytes(*raw)) != expected {
                    return false;
                }
                index += 1;
            }
        }
        true
    }
}

/// The numbers of an extent without a header.
fn guessed(store: &dyn Store, lines: &Fragments, hints: &SalvageHints) -> Result<SparseHeader> {
    let missing = |what: &str, expected: &str| ImageError::NotAnImage {
        path: store.name().to_owned(),
        found: format!("the {what} is lost with the header"),
        expected: expected.into(),
    };
    let is_grain = |bytes: &u32| bytes.is_power_of_two() && (4096..=64 << 20).contains(bytes);
    let grain_bytes = hints.block_bytes.filter(is_grain).ok_or_else(|| {
        missing("size of its grains", "it to be named with `RescueOptions::block_bytes` (nearly always 64 KiB)")
    })?;
    let sectors = lines.sectors.or(hints.size_bytes.map(|bytes| bytes / SECTOR_BYTES));
    let sectors = sectors.filter(|&sectors| sectors > 0 && sectors < 1 << 50);
    let sectors =
        sectors.ok_or_else(|| missing("size of the disk", "it to be named with `RescueOptions::size_bytes`"))?;
    Ok(usual_header(sectors, u64::from(grain_bytes) / SECTOR_BYTES, lines.is_stream))
}

/// What stands for the numbers of a header that is lost.
fn usual_header(capacity_sectors: u64, grain_sectors: u64, is_stream: bool) -> SparseHeader {
    let packed = if is_stream { SparseFlags::COMPRESSED | SparseFlags::MARKERS } else { SparseFlags::ZEROED_GRAINS };
    SparseHeader {
        version: 1,
        flags: SparseFlags(SparseFlags::TEXT_CHECK | packed),
        capacity_sectors,
        grain_sectors,
        descriptor_sector: 0,
        descriptor_sectors: 0,
        table_entries: GTES_PER_TABLE,
        redundant_directory: None,
        directory: Placing::InFooter,
        overhead_sectors: 0,
        is_unclean: false,
        compression: u16::from(is_stream),
    }
}

/// What an entry says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TableEntry {
    Absent,
    Zero,
    At(u64),
    Wrong(Fault),
}

/// One copy of a table.
#[derive(Debug)]
struct Copy {
    entries: Vec<TableEntry>,
    is_sound: bool,
}

/// Where the tables of one directory are.
type Places = Vec<Result<Option<u64>, Fault>>;

/// Reads both copies of all tables. `fixed` are header and descriptor. Returns the ranges of
/// directories and tables.
pub(super) fn read(extent: &Extent<'_>, fixed: Vec<Range<u64>>, table: &mut BlockTable) -> Result<Vec<Range<u64>>> {
    let mut structures: Vec<Range<u64>> = Vec::new();
    structures.extend(extent.directories.iter().map(|&at| at..at + extent.directory_bytes()));
    let fixed = joined(fixed.into_iter().chain(structures.iter().cloned()).collect());
    let directories = places(extent, &fixed)?;
    let all = directories.iter().flatten().filter_map(|place| place.ok().flatten());
    structures.extend(all.map(|at| at..at + extent.table_bytes()));
    let taken = joined(fixed.into_iter().chain(structures.iter().cloned()).collect());
    let mut pieces = Vec::new();
    // What lies behind the end of both directories is lost without a look at each table.
    let there = directories.iter().map(Vec::len).max().unwrap_or(0) as u64;
    table.lose(extent.store, there.saturating_mul(extent.table_entries), extent.grains(), Fault::Unreadable)?;
    for index in 0..there {
        let first = index * extent.table_entries;
        let count = extent.table_entries.min(extent.grains() - first);
        let place = |places: &Places| places.get(index as usize).copied().unwrap_or(Err(Fault::Unreadable));
        match directories.iter().map(place).reduce(|one, other| if one.is_ok() { one } else { other }) {
            Some(Err(fault)) => {
                table.lose(extent.store, first, first + count, fault)?;
                continue;
            }
            _ if directories.iter().all(|places| place(places) == Ok(None)) => continue,
            _ => {}
        }
        let read = directories.iter().map(|places| copy(extent, place(places), first, &taken));
        let mut copies: Vec<Copy> = read.collect::<Result<_>>()?;
        forget_what_is_no_table(&mut copies);
        for slot in 0..count {
            let grain = first + slot;
            match answer(&copies, slot as usize) {
                TableEntry::Absent => {}
                TableEntry::Zero => table.hold(extent.store, grain, SalvagedBlock::Zero)?,
                TableEntry::Wrong(fault) => table.lose(extent.store, grain, grain + 1, fault)?,
                TableEntry::At(at) => match held(extent, grain, at) {
                    Ok((held, end)) => {
                        table.hold(extent.store, grain, held)?;
                        pieces.push((grain, at, end));
                    }
                    Err(fault) => table.lose(extent.store, grain, grain + 1, fault)?,
                },
            }
        }
    }
    for grain in overlapping(&mut pieces) {
        table.lose_held(extent.store, grain, Fault::Claimed)?;
    }
    Ok(structures)
}

/// The grain at a place, and the end of its space.
fn held(extent: &Extent<'_>, grain: u64, at: u64) -> Result<(SalvagedBlock, u64), Fault> {
    if !extent.is_compressed {
        let end = at + (extent.capacity_bytes - grain * extent.grain_bytes).min(extent.grain_bytes);
        return Ok((SalvagedBlock::Data(at), end));
    }
    let len_bytes = salvage_stream::marked(extent.store, at, grain, extent.grain_bytes).ok_or(Fault::Foreign)?;
    Ok((SalvagedBlock::Packed { offset_bytes: at, len_bytes }, at + len_bytes))
}

/// The places of the tables by each directory. Tables that share space are lost.
fn places(extent: &Extent<'_>, fixed: &[Range<u64>]) -> Result<Vec<Places>> {
    let count = extent.tables();
    let mut all: Vec<Places> = Vec::new();
    let mut pieces = Vec::new();
    for (copy, &directory) in extent.directories.iter().enumerate() {
        let held = count.min(extent.file_bytes.saturating_sub(directory) / 4);
        let mut places: Places = vec![Err(Fault::Unreadable); held as usize];
        each_entry(extent.store, directory, (held, 4), &mut |index, raw| {
            let Some(raw) = raw else { return Ok(()) };
            let at = u64::from(u32::from_le_bytes(raw.try_into().unwrap_or_default())) * SECTOR_BYTES;
            let range = at..at + extent.table_bytes();
            places[index as usize] = if at == 0 {
                Ok(None)
            } else if at >= extent.file_bytes {
                Err(Fault::BeyondEnd)
            } else if overlaps_one(fixed, &range) {
                Err(Fault::InTables)
            } else {
                pieces.push((copy as u64 * count + index, range.start, range.end));
                Ok(Some(at))
            };
            Ok(())
        })?;
        all.push(places);
    }
    for id in overlapping(&mut pieces) {
        all[(id / count) as usize][(id % count) as usize] = Err(Fault::Claimed);
    }
    Ok(all)
}

fn copy(extent: &Extent<'_>, place: Result<Option<u64>, Fault>, first: u64, taken: &[Range<u64>]) -> Result<Copy> {
    let count = extent.table_entries.min(extent.grains() - first);
    let at = match place {
        Err(fault) => return Ok(Copy { entries: vec![TableEntry::Wrong(fault); count as usize], is_sound: false }),
        // No table: of two copies the other one counts.
        Ok(None) => return Ok(Copy { entries: vec![TableEntry::Absent; count as usize], is_sound: false }),
        Ok(Some(at)) => at,
    };
    let mut entries = vec![TableEntry::Wrong(Fault::Unreadable); count as usize];
    let (mut seen, mut twice) = (HashSet::new(), HashSet::new());
    each_entry(extent.store, at, (count, 4), &mut |slot, raw| {
        let Some(raw) = raw else { return Ok(()) };
        let raw = u32::from_le_bytes(raw.try_into().unwrap_or_default());
        let at = u64::from(raw) * SECTOR_BYTES;
        let len_bytes = if extent.is_compressed { SECTOR_BYTES } else { extent.grain_bytes };
        entries[slot as usize] = match raw {
            GRAIN_ABSENT => TableEntry::Absent,
            GRAIN_ZERO if extent.has_zeros => TableEntry::Zero,
            _ if at >= extent.file_bytes => TableEntry::Wrong(Fault::BeyondEnd),
            _ if overlaps_one(taken, &(at..at + len_bytes)) => TableEntry::Wrong(Fault::InTables),
            _ => {
                if !seen.insert(at) {
                    twice.insert(at);
                }
                TableEntry::At(at)
            }
        };
        Ok(())
    })?;
    for entry in &mut entries {
        if matches!(entry, TableEntry::At(at) if twice.contains(at)) {
            *entry = TableEntry::Wrong(Fault::Claimed);
        }
    }
    let is_sound = !entries.iter().any(|entry| matches!(entry, TableEntry::Wrong(_)));
    Ok(Copy { entries, is_sound })
}

/// A copy most of whose entries cannot be right is not a table, unless the other copy has the same
/// entries (of a file that was cut).
fn forget_what_is_no_table(copies: &mut [Copy]) {
    if let [first, second] = copies
        && first.entries == second.entries
    {
        return;
    }
    for copy in copies {
        let used = copy.entries.iter().filter(|entry| **entry != TableEntry::Absent).count();
        let wrong = copy.entries.iter().filter(|entry| matches!(entry, TableEntry::Wrong(_))).count();
        if wrong * 2 > used {
            let fault = copy.entries.iter().find_map(|entry| match entry {
                TableEntry::Wrong(fault) => Some(*fault),
                _ => None,
            });
            copy.entries.fill(TableEntry::Wrong(fault.unwrap_or(Fault::Undefined)));
        }
    }
}

/// What the copies of a table say of a grain together: see the module.
fn answer(copies: &[Copy], slot: usize) -> TableEntry {
    let says = |copy: &Copy| copy.entries.get(slot).copied().unwrap_or(TableEntry::Wrong(Fault::Unreadable));
    let [first, second] = copies else {
        return copies.first().map_or(TableEntry::Wrong(Fault::NoTable), says);
    };
    let (one, other) = (says(first), says(second));
    match (one, other, first.is_sound, second.is_sound) {
        _ if one == other => one,
        (TableEntry::Absent, TableEntry::At(_), _, true) => other,
        (TableEntry::At(_), TableEntry::Absent, true, _) => one,
        (TableEntry::Wrong(_), TableEntry::At(_) | TableEntry::Zero, _, _) => other,
        (TableEntry::At(_) | TableEntry::Zero, TableEntry::Wrong(_), _, _) => one,
        // Nobody can say that an entry which cannot be right was no grain.
        (TableEntry::Wrong(_), TableEntry::Absent, _, true) | (TableEntry::Absent, TableEntry::Wrong(_), true, _) => {
            TableEntry::Absent
        }
        (TableEntry::Wrong(fault), ..) | (_, TableEntry::Wrong(fault), ..) => TableEntry::Wrong(fault),
        (_, TableEntry::At(_) | TableEntry::Zero, false, true) if one != TableEntry::Absent => other,
        (TableEntry::At(_) | TableEntry::Zero, _, true, false) if other != TableEntry::Absent => one,
        _ => TableEntry::Wrong(Fault::Differs),
    }
}
