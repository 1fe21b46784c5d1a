//! Finds the tables of an image, before their entries are walked, and says what is wrong with where
//! they lie.

use super::check_walk::{EntryPlace, L1Table, L2Table, Walk, each_word};
use crate::{
    Result,
    findings::{Change, Findings},
};
use diskwright_format::qcow2::{BitmapEntry, Invalid, L1Entry, Place, refcount::RefcountTableEntry};
use std::collections::{BTreeMap, HashMap, HashSet};

const COPIED: u64 = 1 << 63;

impl Walk<'_> {
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

    pub(super) fn find_l1_tables(&mut self, snapshots: &[Place], findings: &mut Findings) -> Result<()> {
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

    pub(super) fn find_bitmap_tables(&mut self, bitmaps: &[BitmapEntry], findings: &mut Findings) -> Result<()> {
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

    pub(super) fn find_l2_tables(&mut self, findings: &mut Findings) -> Result<()> {
        let mut found: BTreeMap<u64, L2Table> = BTreeMap::new();
        let mut invalids = Vec::new();
        for table in &self.l1_tables {
            each_word(self.store, "read an L1 table", table.place, self.front.file_bytes, &mut |index, word| {
                let at = table.place.offset_bytes + index * 8;
                let place = EntryPlace::L1 { index: table.is_active.then_some(index) };
                match L1Entry(word).l2_offset(&self.geometry) {
                    Ok(Some(offset_bytes)) if !self.is_in_file(offset_bytes) => {
                        let finding = self.finding(at, self.outside("L1 entry", offset_bytes))?;
                        self.give_up(place, at, finding, findings)
                    }
                    Ok(Some(offset_bytes)) => {
                        let named = found.entry(offset_bytes).or_default();
                        named.weight = named.weight.saturating_add(table.weight);
                        if table.is_active {
                            named.first = if named.active == 0 { index } else { named.first };
                            named.active = named.active.saturating_add(1);
                        }
                        Ok(())
                    }
                    Ok(None) => Ok(()),
                    Err(invalid) => {
                        invalids.push((place, at, word, invalid));
                        Ok(())
                    }
                }
            })?;
        }
        for (place, at, word, invalid) in invalids {
            let finding = self.finding(at, invalid)?;
            match self.without_reserved_bits(word)? {
                Some(known) if !found.contains_key(&(known & !COPIED)) => {
                    let changes = vec![Change::Write(at, known.to_be_bytes().to_vec())];
                    self.repair_if_apart(finding, "the reserved bits of the entry are cleared", changes);
                }
                _ => self.give_up(place, at, finding, findings)?,
            }
        }
        self.l2_tables = found;
        Ok(())
    }

    pub(super) fn find_refcount_blocks(&mut self, findings: &mut Findings) -> Result<()> {
        let place = self.front.header.refcount_table;
        if place.offset_bytes == 0 || place.len_bytes == 0 || !self.is_in_file(place.offset_bytes) {
            let invalid = Invalid::new(
                "qcow2 header",
                48,
                format!("a refcount table of {} bytes at offset {}", place.len_bytes, place.offset_bytes),
                format!("a place in the file of {} bytes", self.front.file_bytes),
            );
            self.replace_refcount_table(self.finding(0, invalid)?, findings);
            return Ok(());
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
            let what = "the entry is cleared, and the refcounts of its range are counted again";
            self.repair_if_apart(self.finding(at, invalid)?, what, vec![Change::Write(at, vec![0; 8])]);
            Ok(())
        })?;
        self.refcount_blocks = blocks;
        Ok(())
    }
}
