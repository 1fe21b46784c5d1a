//! The directory and the grain tables of a sparse extent, in the three ways in which they are
//! coded.
//!
//! ```text
//!               directory entry            table        grain entry
//!   hosted      sector of the table        512 x u32    sector of the grain; 0 none; 1 zeros
//!   COWD        the same                   4096 x u32   the same, without zeros
//!   SESPARSE    tag, number of the table   4096 x u64   tag, number of the grain (rotated)
//! ```
//!
//! The directory is held in memory: 4 bytes for each table. Its length is bounded by the file's and
//! by [`TABLES_MAX`]. Tables are read when they are asked for. An entry that points outside of the
//! file, or into headers, directories and tables, is invalid. Then the entry of the redundant table
//! counts, if that is valid; else only this grain is damaged.
//!
//! Invariant: [`Entry::At`] is a range inside the file and outside of headers, directories and the
//! tables that existed when the image was opened. New tables lie in space that no grain has.

mod open;

use super::{corrupt, text};
use crate::{ImageError, Result};
use diskwright_format::vmdk::{
    COWD_UNCLEAN_AT, GRAIN_ABSENT, GRAIN_ZERO, SECTOR_BYTES, SPARSE_UNCLEAN_AT, SeSparseGrain, SparseHeader,
    sesparse_table_of,
};
use diskwright_store::{
    Store,
    sync::atomic::{AtomicU64, Ordering},
};
use std::{ops::Range, sync::Arc};

/// The most tables of an extent: 128 TiB in grains of 64 KiB.
pub(super) const TABLES_MAX: u64 = 1 << 22;
/// A directory entry whose table cannot be found.
pub(super) const LOST: u32 = u32::MAX;
/// Bytes of a directory that are read by one call.
const CHUNK_BYTES: usize = 64 << 10;

/// Where a grain is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Entry {
    /// No data in this extent.
    Absent,
    /// The grain reads as zeros.
    Zero,
    /// At this offset of the file, in bytes. For a compressed grain: of its marker.
    At(u64),
    /// An invalid entry, as it is in the file.
    Bad(u64),
}

/// How entries are coded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EntryCoding {
    Hosted {
        /// An entry of 1 is a grain of zeros.
        has_zeros: bool,
        is_compressed: bool,
    },
    Cowd,
    SeSparse {
        tables_bytes: u64,
        grains_bytes: u64,
    },
}

/// Header, directories and tables of a sparse extent.
#[derive(Debug)]
pub(super) struct Tables {
    pub coding: EntryCoding,
    pub grain_bytes: u64,
    /// Length of the disk's part, in bytes.
    pub capacity_bytes: Growing,
    pub table_entries: u64,
    /// Places of the directories: the first one, and the redundant one.
    pub directories: Vec<u64>,
    /// Entries of each directory.
    pub entries: Vec<Vec<u32>>,
    /// Numbers of the tables that only the redundant directory names.
    pub only_second: Vec<u64>,
    /// Headers, descriptor and directories.
    pub fixed: Vec<Range<u64>>,
    /// These and all grain tables, on which no grain may lie: sorted, and none touches another.
    taken: Vec<Range<u64>>,
    /// The header; `None` for COWD and SESPARSE.
    pub header: Option<SparseHeader>,
    /// Whether the last program that wrote to the extent did not close it.
    pub is_unclean: bool,
    /// Where the next grain of a COWD extent goes, by its header.
    pub free_sector: Option<u32>,
    /// Peculiarities, a sentence each.
    pub remarks: Vec<String>,
    len_bytes: KnownLength,
}

/// A number that only grows while the image is in use (`grow.rs`). It becomes smaller only while
/// no other thread uses the image (`shrink.rs`).
#[derive(Debug)]
pub(super) struct Growing(AtomicU64);

impl Growing {
    pub fn new(value: u64) -> Self {
        Self(AtomicU64::new(value))
    }

    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    pub fn raise(&self, value: u64) {
        self.0.fetch_max(value, Ordering::AcqRel);
    }

    pub fn lower(&self, value: u64) {
        self.0.fetch_min(value, Ordering::AcqRel);
    }
}

/// The last known length of the file, which only grows while the image is open.
#[derive(Debug)]
struct KnownLength(AtomicU64);

fn u32_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 4).map_or(0, |found| u64::from(u32::from_le_bytes([found[0], found[1], found[2], found[3]])))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u32_at(bytes, at) | u32_at(bytes, at + 4) << 32
}

impl Tables {
    /// The ranges of headers, descriptor, directories and tables, sorted by their start.
    pub fn structures(&self) -> Vec<Range<u64>> {
        let mut ranges = self.fixed.clone();
        for &entry in self.entries.iter().flatten().filter(|&&entry| entry != GRAIN_ABSENT && entry != LOST) {
            let place = self.table_place(entry);
            ranges.push(place..place.saturating_add(self.table_bytes()));
        }
        ranges.retain(|range| range.start < range.end);
        ranges.sort_unstable_by_key(|range| (range.start, range.end));
        ranges
    }

    pub fn directory_entry_bytes(&self) -> u64 {
        if matches!(self.coding, EntryCoding::SeSparse { .. }) { 8 } else { 4 }
    }

    /// The entry as it is kept: 0 for no table, else a number of [`Tables::table_place`].
    fn directory_entry(&self, bytes: &[u8], len_bytes: u64) -> u32 {
        let entry = match self.coding {
            EntryCoding::SeSparse { .. } => match sesparse_table_of(u64_at(bytes, 0)) {
                Some(None) => 0,
                // The number is kept plus 1, as table 0 exists.
                Some(Some(table)) => table.saturating_add(1),
                None => LOST,
            },
            _ => u32_at(bytes, 0) as u32,
        };
        let fits = |place: u64| {
            place.checked_add(self.table_bytes()).is_some_and(|end| {
                end <= len_bytes && !self.fixed.iter().any(|range| range.start < end && place < range.end)
            })
        };
        if entry == 0 || entry != LOST && fits(self.table_place(entry)) { entry } else { LOST }
    }

    /// The offset of the table of a directory entry that is neither 0 nor [`LOST`].
    pub fn table_place(&self, entry: u32) -> u64 {
        match self.coding {
            EntryCoding::SeSparse { tables_bytes, .. } => {
                tables_bytes.saturating_add((u64::from(entry) - 1) * self.table_bytes())
            }
            _ => u64::from(entry) * SECTOR_BYTES,
        }
    }

    /// The first byte after headers, directories and tables.
    pub fn taken_end_bytes(&self) -> u64 {
        self.taken.last().map_or(0, |range| range.end)
    }

    /// Number of grains of the extent.
    pub fn grains(&self) -> u64 {
        self.capacity_bytes.get().div_ceil(self.grain_bytes)
    }

    /// Number of grain tables.
    pub fn tables(&self) -> u64 {
        self.grains().div_ceil(self.table_entries)
    }

    /// Bytes of a grain entry.
    pub fn entry_bytes(&self) -> u64 {
        self.directory_entry_bytes()
    }

    /// Bytes of a grain table.
    pub fn table_bytes(&self) -> u64 {
        (self.table_entries * self.entry_bytes()).next_multiple_of(SECTOR_BYTES)
    }

    /// Whether the grains are compressed.
    pub fn is_compressed(&self) -> bool {
        matches!(self.coding, EntryCoding::Hosted { is_compressed: true, .. })
    }

    /// Whether an entry can say that a grain is zeros.
    pub fn has_zeros(&self) -> bool {
        matches!(self.coding, EntryCoding::Hosted { has_zeros: true, .. } | EntryCoding::SeSparse { .. })
    }

    /// Offset of the byte that says that the extent was not closed; `None` without such a byte.
    pub fn unclean_at(&self) -> Option<u64> {
        match self.coding {
            EntryCoding::Hosted { .. } => Some(SPARSE_UNCLEAN_AT),
            EntryCoding::Cowd => Some(COWD_UNCLEAN_AT),
            EntryCoding::SeSparse { .. } => None,
        }
    }

    /// Bytes of a grain that belong to the disk's part.
    pub fn valid_bytes(&self, grain: u64) -> u64 {
        self.capacity_bytes.get().saturating_sub(grain * self.grain_bytes).min(self.grain_bytes)
    }

    /// The largest known length of the file, which covers `end` if it can.
    pub fn len_covering(&self, store: &dyn Store, end: u64) -> Result<u64> {
        // Relaxed: the number is only a hint. A stale value costs a system call.
        let known = self.len_bytes.0.load(Ordering::Relaxed);
        if end <= known {
            return Ok(known);
        }
        let found = text::len_of(store)?;
        self.len_bytes.0.store(found, Ordering::Relaxed);
        Ok(found)
    }

    /// Records that the file has become longer.
    pub fn note_len(&self, len_bytes: u64) {
        self.len_bytes.0.fetch_max(len_bytes, Ordering::Relaxed);
    }

    /// Decodes a raw entry of a grain.
    pub fn decode(&self, store: &dyn Store, grain: u64, raw: u64) -> Result<Entry> {
        let at = match self.coding {
            EntryCoding::SeSparse { grains_bytes, .. } => match SeSparseGrain::decode(raw) {
                Some(SeSparseGrain::Absent) => return Ok(Entry::Absent),
                Some(SeSparseGrain::Zero) => return Ok(Entry::Zero),
                Some(SeSparseGrain::Number(number)) => {
                    number.checked_mul(self.grain_bytes).and_then(|at| at.checked_add(grains_bytes))
                }
                None => None,
            },
            _ if raw == u64::from(GRAIN_ABSENT) => return Ok(Entry::Absent),
            _ if raw == u64::from(GRAIN_ZERO) && self.has_zeros() => return Ok(Entry::Zero),
            _ => raw.checked_mul(SECTOR_BYTES),
        };
        let needed = if self.is_compressed() { SECTOR_BYTES } else { self.valid_bytes(grain) };
        let Some((at, end)) = at.and_then(|at| Some((at, at.checked_add(needed)?))) else { return Ok(Entry::Bad(raw)) };
        let is_inside = end <= self.len_covering(store, end)?;
        let next = self.taken.partition_point(|taken| taken.end <= at);
        let is_clear = self.taken.get(next).is_none_or(|taken| end <= taken.start);
        Ok(if is_inside && is_clear { Entry::At(at) } else { Entry::Bad(raw) })
    }

    /// Reads the raw entries of the grains from `first`, which lie in one table at `place`.
    pub fn read_raw(&self, store: &dyn Store, place: u64, first: u64, out: &mut [u64]) -> Result<()> {
        let width = self.entry_bytes();
        let offset = place + first % self.table_entries * width;
        let mut bytes = vec![0; out.len() * width as usize];
        store
            .read_at(&mut bytes, offset)
            .map_err(|error| ImageError::io("read a grain table", store, offset, error))?;
        for (entry, bytes) in out.iter_mut().zip(bytes.chunks_exact(width as usize)) {
            *entry = if width == 8 { u64_at(bytes, 0) } else { u32_at(bytes, 0) };
        }
        Ok(())
    }

    /// The entries of grains that lie in one table, from the file.
    pub fn read_entries(&self, store: &dyn Store, first: u64, out: &mut [Entry]) -> Result<()> {
        let table = (first / self.table_entries) as usize;
        match self.entries[0].get(table).copied().unwrap_or(LOST) {
            GRAIN_ABSENT => out.fill(Entry::Absent),
            LOST => out.fill(Entry::Bad(u64::from(LOST))),
            entry => {
                let mut raw = vec![0; out.len()];
                self.read_raw(store, self.table_place(entry), first, &mut raw)?;
                self.decode_all(store, first, &raw, out)?;
            }
        }
        Ok(())
    }

    /// Decodes raw entries of one table. Invalid ones are replaced by those of the redundant table.
    pub fn decode_all(&self, store: &dyn Store, first: u64, raw: &[u64], out: &mut [Entry]) -> Result<()> {
        let mut has_bad = false;
        for ((grain, &raw), entry) in (first..).zip(raw).zip(out.iter_mut()) {
            *entry = self.decode(store, grain, raw)?;
            has_bad |= matches!(entry, Entry::Bad(_));
        }
        let table = (first / self.table_entries) as usize;
        let second = self.entries.get(1).and_then(|entries| entries.get(table)).copied();
        let Some(second) = second.filter(|&second| has_bad && second != LOST && second != GRAIN_ABSENT) else {
            return Ok(());
        };
        let mut raw = vec![0; out.len()];
        self.read_raw(store, self.table_place(second), first, &mut raw)?;
        for ((grain, &raw), entry) in (first..).zip(&raw).zip(out) {
            if matches!(entry, Entry::Bad(_)) {
                let other = self.decode(store, grain, raw)?;
                // A grain that the second table does not know may have been written since.
                if matches!(other, Entry::At(_)) {
                    *entry = other;
                }
            }
        }
        Ok(())
    }

    /// Offset of a grain's entry in the file, for messages; that of the directory without a table.
    pub fn entry_offset(&self, grain: u64) -> u64 {
        let table = grain / self.table_entries;
        match self.entries[0].get(table as usize).copied() {
            Some(entry) if entry != GRAIN_ABSENT && entry != LOST => {
                self.table_place(entry) + grain % self.table_entries * self.entry_bytes()
            }
            _ => self.directory_entry_offset(self.directories[0], table),
        }
    }

    /// Offset of the entry of a table in the directory at `directory`. That may be any number: the
    /// place of a redundant directory is not validated.
    pub fn directory_entry_offset(&self, directory: u64, table: u64) -> u64 {
        directory.saturating_add(table.saturating_mul(self.directory_entry_bytes()))
    }

    /// The error for an invalid entry.
    pub fn damage(&self, store: &Arc<dyn Store>, grain: u64, raw: u64) -> ImageError {
        let found =
            if raw == u64::from(LOST) { "a table outside of the file".into() } else { format!("entry {raw:#x}") };
        let expected = "a grain inside the file that does not overlap its header and directories";
        corrupt(&**store, "grain table", self.entry_offset(grain), found, expected)
    }

    /// Reads and decompresses the grain whose marker is at `at`. Returns its bytes, as many as
    /// belong to the disk.
    ///
    /// # Errors
    /// `Io`; `Corrupt` for a marker that cannot be right, and for data that do not decompress to
    /// the grain's length.
    pub fn decompress(&self, store: &dyn Store, grain: u64, at: u64) -> Result<Vec<u8>> {
        use diskwright_format::vmdk::{GRAIN_MARKER_BYTES, Marker};
        let fail = |found: String, expected: &str| Err(corrupt(store, "compressed grain", at, found, expected));
        let head = text::read_some(store, at, 16, "read the marker of a grain")?;
        let Some(Marker::Grain(marker)) = Marker::parse(&head) else {
            return fail("no marker of a grain".into(), "a marker");
        };
        // Deflate stores what it cannot compress, with 5 bytes for each 64 KiB.
        if u64::from(marker.data_bytes) > self.grain_bytes + self.grain_bytes / 8 + 512 {
            return fail(format!("{} bytes of compressed data", marker.data_bytes), "at most a grain");
        }
        let data = text::read_some(store, at + GRAIN_MARKER_BYTES, marker.data_bytes as usize, "read a grain")?;
        let mut bytes = vec![0; self.grain_bytes as usize];
        let valid = self.valid_bytes(grain);
        match libdeflater::Decompressor::new().zlib_decompress(&data, &mut bytes) {
            Ok(len) if len as u64 >= valid => {
                bytes.truncate(valid as usize);
                Ok(bytes)
            }
            Ok(len) => fail(format!("{len} bytes after decompression"), &format!("{valid} bytes")),
            Err(error) => fail(format!("data that do not decompress ({error})"), "a grain compressed by zlib"),
        }
    }
}

/// Sorted ranges, in which those that touch are one.
fn joined(ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    let mut joined: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match joined.last_mut().filter(|last| range.start <= last.end) {
            Some(last) => last.end = last.end.max(range.end),
            None => joined.push(range),
        }
    }
    joined
}

/// The error of parsing, for an extent that is named in a descriptor.
pub(super) fn check_kind(store: &dyn Store, tables: &Tables, expected: &'static str) -> Result<()> {
    let found = match tables.coding {
        EntryCoding::Hosted { .. } => "SPARSE",
        EntryCoding::Cowd => "VMFSSPARSE",
        EntryCoding::SeSparse { .. } => "SESPARSE",
    };
    if found == expected {
        return Ok(());
    }
    Err(corrupt(
        store,
        "extent",
        0,
        format!("an extent of the kind {found}"),
        format!("{expected}, as the descriptor says"),
    ))
}
