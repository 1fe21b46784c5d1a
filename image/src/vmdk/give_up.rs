//! What a repair of a sparse extent gives up: single grains, and grain tables that cannot be found.
//!
//! ```text
//!   two grains in one place   the one that begins later in the file is given up; of two with the
//!                             same place, the one that comes later on the disk
//! ```
//!
//! The entry is changed in both tables. In a child whose tables know zeros the grain becomes zeros,
//! so that the parent's older data do not show through. Where they do not, the parent's data show.
//! Only an image in one file is repaired, so its extent is the file.

use super::{
    image::scan,
    layout::{Content, Layout},
    tables::{Entry, LOST, Tables},
};
use crate::{
    Result,
    findings::{Change, Finding, Findings, Severity},
};
use diskwright_format::vmdk::{GRAIN_ABSENT, GRAIN_ZERO, SECTOR_BYTES};
use diskwright_store::Store;
use std::{
    collections::{HashMap, hash_map::Entry as Slot},
    ops::Range,
    sync::Arc,
};

/// Grains that one round gives up because they overlap another one.
const OVERLAPS_MAX: usize = 1 << 16;

/// An extent that is checked.
pub(super) struct Checked<'a> {
    pub tables: &'a Tables,
    pub store: &'a Arc<dyn Store>,
    /// Whether the image lies in one file, so that changes of the extent are changes of that file.
    pub may_repair: bool,
    is_child: bool,
    /// The range of the disk that the extent holds, in bytes.
    on_disk: Range<u64>,
}

impl<'a> Checked<'a> {
    pub fn new(layout: &'a Layout, index: usize) -> Self {
        let extent = &layout.extents[index];
        let is_this = |content: Content| matches!(content, Content::Sparse(of) if of == index);
        let part = layout.parts.iter().find(|part| is_this(part.content));
        Self {
            tables: &extent.tables,
            store: &extent.store,
            may_repair: layout.stores.len() == 1,
            is_child: layout.is_child(),
            on_disk: part.map_or(0..0, |part| part.start_bytes..part.end_bytes.get()),
        }
    }

    /// The range of the disk that `count` grains from `first` on hold; `None` beyond its end.
    fn range_of(&self, first: u64, count: u64) -> Option<Range<u64>> {
        let at = |grain: u64| {
            let within = grain.saturating_mul(self.tables.grain_bytes);
            self.on_disk.start.saturating_add(within).min(self.on_disk.end)
        };
        let range = at(first)..at(first.saturating_add(count));
        (range.start < range.end).then_some(range)
    }

    /// The number of a word that says that a grain of this image is zeros, or absent.
    fn nothing(&self) -> (u64, &'static str) {
        match (self.is_child, self.tables.has_zeros() && self.tables.header.is_some()) {
            (false, _) => (u64::from(GRAIN_ABSENT), "it reads as zeros"),
            (true, true) => (u64::from(GRAIN_ZERO), "it becomes zeros"),
            (true, false) => (u64::from(GRAIN_ABSENT), "the parent's data show there"),
        }
    }

    /// Gives up a grain.
    pub fn give_up_grain(&self, grain: u64, finding: Finding, findings: &mut Findings) {
        if !self.may_repair {
            return findings.add(finding);
        }
        let (word, reads_as) = self.nothing();
        let width = self.tables.entry_bytes() as usize;
        let tables = self.tables.entries.iter().filter_map(|entries| {
            let entry = *entries.get((grain / self.tables.table_entries) as usize)?;
            (entry != GRAIN_ABSENT && entry != LOST).then(|| self.tables.table_place(entry))
        });
        let at = |table: u64| table + grain % self.tables.table_entries * width as u64;
        let changes = tables.map(|table| Change::Write(at(table), word.to_le_bytes()[..width].to_vec())).collect();
        let what = format!("grain {grain} is given up: {reads_as}");
        findings.give_up(finding, self.range_of(grain, 1), what, changes);
    }

    /// Gives up all grains of a table that cannot be found.
    pub fn give_up_table(&self, table: u64, finding: Finding, findings: &mut Findings) {
        if !self.may_repair {
            return findings.add(finding);
        }
        let width = self.tables.directory_entry_bytes();
        let fixed = &self.tables.fixed;
        let change = |&directory: &u64| {
            let at = self.tables.directory_entry_offset(directory, table);
            // A directory that lies outside of the file is in no range.
            let is_there = fixed.iter().any(|range| range.start <= at && at.saturating_add(width) <= range.end);
            is_there.then(|| Change::Write(at, vec![0; width as usize]))
        };
        let changes = self.tables.directories.iter().filter_map(change).collect();
        let reads_as = if self.is_child { "the parent's data show there" } else { "they read as zeros" };
        let entries = self.tables.table_entries;
        let what = format!("all grains of table {table} are given up: {reads_as}");
        findings.give_up(finding, self.range_of(table.saturating_mul(entries), entries), what, changes);
    }

    /// Finds grains that overlap, by the places of all grains in sectors, sorted.
    pub fn report_overlaps(&self, starts: &[u32], findings: &mut Findings) -> Result<()> {
        let tables = self.tables;
        let grain_sectors = if tables.is_compressed() { 1 } else { tables.grain_bytes / SECTOR_BYTES };
        // The places of grains that are given up, and whether the first grain there stays.
        let mut overlapping: HashMap<u32, bool> = HashMap::new();
        let mut last: Option<u32> = None;
        for &start in starts {
            match last {
                Some(kept) if u64::from(kept) + grain_sectors > u64::from(start) => {
                    if overlapping.len() < OVERLAPS_MAX {
                        overlapping.entry(start).or_insert(kept == start);
                    }
                }
                _ => last = Some(start),
            }
        }
        if overlapping.is_empty() {
            return Ok(());
        }
        let name = self.store.name().display();
        scan(tables, &**self.store, |grain, entry| {
            let Entry::At(at) = entry else { return Ok(true) };
            let Slot::Occupied(mut place) = overlapping.entry((at / SECTOR_BYTES) as u32) else { return Ok(true) };
            if place.insert(false) {
                return Ok(true);
            }
            let message = format!("{name}: two grains overlap at offset {at}.");
            let found = "two grains in one place";
            let finding = Finding::new(Severity::Corrupt, at, "grain table", found, "space of its own");
            self.give_up_grain(grain, finding.says(message), findings);
            Ok(true)
        })
    }
}
