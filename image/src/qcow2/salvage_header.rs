//! The header of a damaged image, or what else says how large the disk is and where its tables are.
//!
//! Without a header the user names the size and the clusters. The L1 table has no signature: it is
//! found only if exactly one place of the file reads as one, from its first entry to its last. Each
//! of its entries leads to a table of its own, and each entry of those to a cluster of its own in
//! the file. So an image with internal snapshots, which have L1 tables too, is not found.

use super::{corrupt, header::HeaderCluster};
use crate::{
    ImageError, Result,
    salvage::{ParentRecord, SalvageHints, each_entry, read_what_can_be},
};
use diskwright_format::qcow2::{
    CLUSTER_BITS_MAX, CLUSTER_BITS_MIN, Extensions, Geometry, Header, L1Entry, L2Entry, MAGIC, Place, header::V3_BYTES,
};
use diskwright_store::Store;
use std::collections::HashSet;

/// How often the search may read what the file stores.
const SEARCH_PASSES: u64 = 4;
/// Words of a table that are read at once.
const WORDS: u64 = 8192;

/// What is known of the header.
pub(super) struct Known {
    pub front: HeaderCluster,
    pub parent_record: ParentRecord,
    /// Whether the place of the L1 table is known.
    pub has_l1: bool,
}

/// The header, with what can be read of its extensions; or one that stands for it.
///
/// # Errors
/// `NotAnImage` if too little is known, with the option that supplies it.
pub(super) fn header_of(
    store: &dyn Store,
    file_bytes: u64,
    hints: &SalvageHints,
    remarks: &mut Vec<String>,
) -> Result<Known> {
    let mut start = vec![0; 112];
    let lost = read_what_can_be(store, 0, &mut start);
    start.truncate(lost.first().map_or(112, |range| range.start));
    let Some(header) = Header::parse(&start).ok().or_else(|| under_its_magic(store, file_bytes, &start)) else {
        remarks.push("The header is damaged.".to_owned());
        return without_header(store, file_bytes, hints, remarks);
    };
    if !start.starts_with(&MAGIC) {
        remarks.push("The magic number of the header is damaged.".to_owned());
    }
    let mut cluster = vec![0; header.cluster_bytes() as usize];
    let lost = read_what_can_be(store, 0, &mut cluster);
    let is_lost = |place: Place| {
        let range = place.offset_bytes as usize..(place.offset_bytes.saturating_add(place.len_bytes)) as usize;
        lost.iter().any(|lost| lost.start < range.end && range.start < lost.end)
    };
    let within = |place: Place| {
        let start = (place.offset_bytes as usize).min(cluster.len());
        let end = (place.offset_bytes.saturating_add(place.len_bytes) as usize).min(cluster.len());
        &cluster[start..end.max(start)]
    };
    let area = header.extensions();
    let extensions = Extensions::parse(within(area), area.offset_bytes).unwrap_or_else(|invalid| {
        remarks.push(format!("The extensions of the header are damaged: {invalid}."));
        Extensions::default()
    });
    let name = header.backing_name.filter(|&place| !is_lost(place)).map(within);
    let name = name.and_then(|name| std::str::from_utf8(name).ok()).filter(|name| !name.contains('\0'));
    let parent_record = if header.backing_name.is_some() { ParentRecord::Child } else { ParentRecord::Alone };
    if parent_record == ParentRecord::Child && name.is_none() {
        remarks.push("The name of the backing file is damaged.".into());
    }
    let backing_name = name.map(str::to_owned);
    let has_l1 = header.l1.offset_bytes != 0 && header.l1.offset_bytes < file_bytes;
    Ok(Known { front: HeaderCluster { header, extensions, backing_name, file_bytes }, parent_record, has_l1 })
}

/// A header of which only the magic number is damaged, if its L1 table is one.
fn under_its_magic(store: &dyn Store, file_bytes: u64, start: &[u8]) -> Option<Header> {
    let bytes = [&MAGIC, start.get(MAGIC.len()..)?].concat();
    let header = Header::parse(&bytes).ok()?;
    let geometry = header.geometry();
    let search = Search { store, geometry, file_bytes, entries: header.l1.len_bytes / 8 };
    let is_l1 = !geometry.is_extended && search.reads_as_l1(header.l1.offset_bytes, &mut u64::MAX.clone()).ok()?;
    is_l1.then_some(header)
}

fn without_header(
    store: &dyn Store,
    file_bytes: u64,
    hints: &SalvageHints,
    remarks: &mut Vec<String>,
) -> Result<Known> {
    let missing = |what: &str, expected: &str| ImageError::NotAnImage {
        path: store.name().to_owned(),
        found: format!("the {what} is lost with the header"),
        expected: expected.into(),
    };
    let bits = |bytes: &u32| {
        bytes.is_power_of_two() && (CLUSTER_BITS_MIN..=CLUSTER_BITS_MAX).contains(&bytes.trailing_zeros())
    };
    let cluster_bytes = hints.block_bytes.filter(bits).ok_or_else(|| {
        missing("size of its clusters", "it to be named with `RescueOptions::block_bytes` (usually 64 KiB)")
    })?;
    let size_bytes = hints.size_bytes.filter(|&size| size > 0 && size < 1 << 56);
    let size_bytes =
        size_bytes.ok_or_else(|| missing("size of the disk", "it to be named with `RescueOptions::size_bytes`"))?;
    let geometry =
        Geometry { cluster_bits: cluster_bytes.trailing_zeros(), version: 3, is_extended: false, has_data_file: false };
    let search = Search { store, geometry, file_bytes, entries: geometry.l1_entries(size_bytes) };
    let found = search.find()?;
    if let Some(at) = found {
        remarks.push(format!("The L1 table was found by its contents, at {at}."));
    }
    let header = stand_in(&geometry, size_bytes, found.unwrap_or(0));
    let header = Header::parse(&header).map_err(|invalid| corrupt(store, 0, invalid))?;
    let front = HeaderCluster { header, extensions: Extensions::default(), backing_name: None, file_bytes };
    Ok(Known { front, parent_record: ParentRecord::by_hints(hints), has_l1: found.is_some() })
}

/// A header of version 3 that says only this. (Bits that version 2 does not have are malformed
/// there, and nothing contradicts them here.)
fn stand_in(geometry: &Geometry, size_bytes: u64, l1_bytes: u64) -> Vec<u8> {
    let mut bytes = vec![0; V3_BYTES];
    let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
    put(0, &MAGIC);
    put(4, &3_u32.to_be_bytes());
    put(20, &geometry.cluster_bits.to_be_bytes());
    put(24, &size_bytes.to_be_bytes());
    put(36, &u32::try_from(geometry.l1_entries(size_bytes)).unwrap_or(u32::MAX).to_be_bytes());
    put(40, &l1_bytes.to_be_bytes());
    put(96, &4_u32.to_be_bytes());
    put(100, &(V3_BYTES as u32).to_be_bytes());
    bytes
}

/// The search for the L1 table.
struct Search<'a> {
    store: &'a dyn Store,
    geometry: Geometry,
    file_bytes: u64,
    entries: u64,
}

impl Search<'_> {
    /// The only place that reads as an L1 table.
    fn find(&self) -> Result<Option<u64>> {
        let cluster_bytes = self.geometry.cluster_bytes();
        let stored_bytes = self.store.allocated_bytes().unwrap_or(self.file_bytes).min(self.file_bytes);
        let mut budget_bytes = stored_bytes.saturating_mul(SEARCH_PASSES);
        let mut found = None;
        let mut at = cluster_bytes;
        while at < self.file_bytes {
            match self.store.next_data(at) {
                Ok(Some(data)) => at = at.max(data.offset_bytes - data.offset_bytes % cluster_bytes),
                Ok(None) => break,
                Err(_) => {}
            }
            let reads = self.reads_as_l1(at, &mut budget_bytes)?;
            if budget_bytes == 0 || reads && found.is_some() {
                return Ok(None);
            }
            found = found.or(reads.then_some(at));
            at += cluster_bytes;
        }
        Ok(found)
    }

    /// Whether all entries of a table at `at` lead to L2 tables, which have data, and nothing
    /// follows. Takes what is read from the budget.
    fn reads_as_l1(&self, at: u64, budget_bytes: &mut u64) -> Result<bool> {
        let space = (self.entries * 8).next_multiple_of(self.geometry.cluster_bytes()) / 8;
        let mut seen = HashSet::from([at]);
        let mut tables = Vec::new();
        let is_l1 = self.each_word(at, space, budget_bytes, &mut |index, word| {
            let entry = L1Entry(word);
            let Ok(Some(place)) = entry.l2_offset(&self.geometry) else { return false };
            tables.push(place);
            index < self.entries && entry.is_copied() && self.is_free(place, &mut seen)
        })?;
        let mut has_data = false;
        for table in tables.iter().filter(|_| is_l1) {
            let is_l2 = self.each_word(*table, self.geometry.l2_entries(), budget_bytes, &mut |_, word| {
                has_data = true;
                match L2Entry::parse(word, 0, &self.geometry) {
                    Ok(L2Entry::Standard { offset_bytes: Some(place), is_copied: true, .. }) => {
                        self.is_free(place, &mut seen)
                    }
                    Ok(L2Entry::Standard { offset_bytes: None, .. }) => true,
                    Ok(L2Entry::Compressed { offset_bytes, is_copied: false, .. }) => offset_bytes < self.file_bytes,
                    _ => false,
                }
            })?;
            if !is_l2 {
                return Ok(false);
            }
        }
        Ok(is_l1 && has_data)
    }

    fn is_free(&self, place: u64, seen: &mut HashSet<u64>) -> bool {
        place < self.file_bytes && seen.insert(place)
    }

    /// Whether all words that are not 0 can be read and fit.
    fn each_word(
        &self,
        at: u64,
        count: u64,
        budget_bytes: &mut u64,
        fits: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<bool> {
        let mut all_fit = true;
        let count = count.min(self.file_bytes.saturating_sub(at) / 8);
        let mut first = 0;
        while first < count && all_fit {
            let some = (count - first).min(WORDS);
            *budget_bytes = budget_bytes.saturating_sub(some * 8);
            each_entry(self.store, at + first * 8, (some, 8), &mut |index, raw| {
                let word = raw.map(|raw| u64::from_be_bytes(raw.try_into().unwrap_or_default()));
                all_fit &= word.is_some_and(|word| word == 0 || all_fit && fits(first + index, word));
                Ok(())
            })?;
            first += some;
        }
        Ok(all_fit)
    }
}
