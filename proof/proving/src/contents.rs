//! Contents of a file: pages in a map; holes take no memory. A clone shares the pages, so a hundred
//! states of a file need little more memory than one.
//!
//! Bytes beyond the end of the file are kept until [`Contents::settle`]: a power cut may keep a
//! write and lose the growth that came with it, and a later growth that was kept then exposes the
//! bytes.

use diskwright_store::FileRange;
use std::{collections::BTreeMap, sync::Arc};

/// The unit of torn writes: a disk writes a sector completely or not at all.
pub const SECTOR_BYTES: u64 = 512;

const PAGE_BYTES: u64 = 4096;
const NOTHING: [u8; PAGE_BYTES as usize] = [0; PAGE_BYTES as usize];

/// A change of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Writes bytes at an offset. The file grows if necessary.
    Write(u64, Arc<[u8]>),
    /// Truncates the file, or grows it with zeros.
    Length(u64),
    /// Zeroes a range within the file.
    Zero(FileRange),
}

/// The contents of a file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Contents {
    pages: BTreeMap<u64, Arc<[u8; PAGE_BYTES as usize]>>,
    len_bytes: u64,
}

/// Splits a range at sector boundaries into (offset, length).
fn sectors_of(range: FileRange) -> impl Iterator<Item = (u64, u64)> {
    let end = range.offset_bytes + range.len_bytes;
    let mut at = range.offset_bytes;
    std::iter::from_fn(move || {
        let start = at;
        at = ((start / SECTOR_BYTES + 1) * SECTOR_BYTES).min(end);
        (start < end).then_some((start, at - start))
    })
}

impl Contents {
    /// Length in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Fills `buf`. Holes and bytes beyond the end read as zeros.
    pub fn read(&self, buf: &mut [u8], offset_bytes: u64) {
        let mut done = 0;
        while done < buf.len() {
            let at = offset_bytes + done as u64;
            let within = (at % PAGE_BYTES) as usize;
            let len = (PAGE_BYTES as usize - within).min(buf.len() - done);
            let page = self.pages.get(&(at / PAGE_BYTES)).map_or(&NOTHING, |page| page);
            buf[done..done + len].copy_from_slice(&page[within..within + len]);
            done += len;
        }
    }

    fn put(&mut self, bytes: &[u8], offset_bytes: u64) {
        let mut done = 0;
        while done < bytes.len() {
            let at = offset_bytes + done as u64;
            let within = (at % PAGE_BYTES) as usize;
            let len = (PAGE_BYTES as usize - within).min(bytes.len() - done);
            let page = self.pages.entry(at / PAGE_BYTES).or_insert_with(|| Arc::new(NOTHING));
            Arc::make_mut(page)[within..within + len].copy_from_slice(&bytes[done..done + len]);
            done += len;
        }
    }

    fn clear(&mut self, start: u64, end: u64) {
        let touched: Vec<u64> =
            self.pages.range(start / PAGE_BYTES..end.div_ceil(PAGE_BYTES)).map(|(&at, _)| at).collect();
        for page in touched {
            let first = page * PAGE_BYTES;
            let (from, to) = (first.max(start), (first + PAGE_BYTES).min(end));
            if to - from == PAGE_BYTES {
                self.pages.remove(&page);
            } else if let Some(bytes) = self.pages.get_mut(&page) {
                Arc::make_mut(bytes)[(from - first) as usize..(to - first) as usize].fill(0);
            }
        }
    }

    /// Applies a complete change.
    pub fn apply(&mut self, change: &Change) {
        match change {
            Change::Write(offset_bytes, bytes) => {
                self.put(bytes, *offset_bytes);
                self.len_bytes = self.len_bytes.max(offset_bytes + bytes.len() as u64);
            }
            Change::Length(len_bytes) => {
                if *len_bytes < self.len_bytes {
                    self.clear(*len_bytes, u64::MAX);
                }
                self.len_bytes = *len_bytes;
            }
            Change::Zero(range) => self.clear(range.offset_bytes, range.offset_bytes + range.len_bytes),
        }
    }

    /// Applies the parts of a change for which `keep` returns true. `keep` is called once for each
    /// sector, and for a change of the length. A write that grows the file may keep its growth up
    /// to any of its sectors.
    pub fn apply_some(&mut self, change: &Change, keep: &mut dyn FnMut(Part) -> bool) {
        match change {
            Change::Write(offset_bytes, bytes) => {
                let range = FileRange { offset_bytes: *offset_bytes, len_bytes: bytes.len() as u64 };
                let mut grows = true;
                for (at, len) in sectors_of(range) {
                    let from = (at - offset_bytes) as usize;
                    if keep(Part::Bytes) {
                        self.put(&bytes[from..from + len as usize], at);
                    }
                    if at + len > self.len_bytes && grows {
                        grows = keep(Part::Length);
                        if grows {
                            self.len_bytes = at + len;
                        }
                    }
                }
            }
            Change::Length(len_bytes) => {
                if keep(Part::Length) {
                    // Bytes beyond the old end are kept: they become visible with the new end.
                    if *len_bytes < self.len_bytes {
                        self.clear(*len_bytes, u64::MAX);
                    }
                    self.len_bytes = *len_bytes;
                }
            }
            Change::Zero(range) => {
                let end = range.offset_bytes + range.len_bytes;
                let pages: Vec<u64> = self
                    .pages
                    .range(range.offset_bytes / PAGE_BYTES..end.div_ceil(PAGE_BYTES))
                    .map(|(&at, _)| at)
                    .collect();
                for page in pages {
                    let from = range.offset_bytes.max(page * PAGE_BYTES);
                    let len_bytes = end.min((page + 1) * PAGE_BYTES) - from;
                    for (at, len) in sectors_of(FileRange { offset_bytes: from, len_bytes }) {
                        if keep(Part::Bytes) {
                            self.clear(at, at + len);
                        }
                    }
                }
            }
        }
    }

    /// Drops the bytes beyond the end.
    pub fn settle(&mut self) {
        self.clear(self.len_bytes, u64::MAX);
    }

    /// The first allocated range at or after `offset_bytes`.
    pub fn next_data(&self, offset_bytes: u64) -> Option<FileRange> {
        let (&page, _) = self.pages.range(offset_bytes / PAGE_BYTES..).next()?;
        let mut end = page + 1;
        while self.pages.contains_key(&end) {
            end += 1;
        }
        let start = (page * PAGE_BYTES).max(offset_bytes);
        let end = (end * PAGE_BYTES).min(self.len_bytes);
        (start < end).then(|| FileRange { offset_bytes: start, len_bytes: end - start })
    }

    /// Allocated bytes.
    pub fn allocated_bytes(&self) -> u64 {
        self.pages.len() as u64 * PAGE_BYTES
    }

    /// The first byte that differs, not counting those in `except`. If only the lengths differ, the
    /// shorter length.
    pub fn first_difference(&self, other: &Self, except: &std::ops::Range<u64>) -> Option<u64> {
        let pages: std::collections::BTreeSet<u64> = self.pages.keys().chain(other.pages.keys()).copied().collect();
        let differs = |page: &u64| match (self.pages.get(page), other.pages.get(page)) {
            (Some(one), Some(two)) => !Arc::ptr_eq(one, two),
            _ => true,
        };
        for page in pages.into_iter().filter(differs) {
            let one = self.pages.get(&page).map_or(&NOTHING, |page| page);
            let two = other.pages.get(&page).map_or(&NOTHING, |page| page);
            for at in 0..PAGE_BYTES as usize {
                let place = page * PAGE_BYTES + at as u64;
                if one[at] != two[at] && !except.contains(&place) {
                    return Some(place);
                }
            }
        }
        (self.len_bytes != other.len_bytes).then(|| self.len_bytes.min(other.len_bytes))
    }

    /// Writes the contents to a real file, with holes.
    pub fn save(&self, path: &std::path::Path) -> std::io::Result<()> {
        use std::os::unix::fs::FileExt;
        let file = std::fs::File::create(path)?;
        file.set_len(self.len_bytes)?;
        for (&page, bytes) in self.pages.range(..self.len_bytes.div_ceil(PAGE_BYTES)) {
            let at = page * PAGE_BYTES;
            file.write_all_at(&bytes[..(self.len_bytes - at).min(PAGE_BYTES) as usize], at)?;
        }
        Ok(())
    }
}

/// A part of a change, see [`Contents::apply_some`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// The bytes of one sector.
    Bytes,
    /// A change of the length.
    Length,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(at: u64, byte: u8, len: usize) -> Change {
        Change::Write(at, vec![byte; len].into())
    }

    fn byte(contents: &Contents, at: u64) -> u8 {
        let mut byte = [0xee];
        contents.read(&mut byte, at);
        byte[0]
    }

    #[test]
    fn changes_are_applied() {
        let mut contents = Contents::default();
        contents.apply(&write(4090, 7, 20));
        assert_eq!((contents.len_bytes(), byte(&contents, 4089), byte(&contents, 4090)), (4110, 0, 7));
        contents.apply(&Change::Zero(FileRange { offset_bytes: 4095, len_bytes: 2 }));
        assert_eq!([4094, 4095, 4096, 4097].map(|at| byte(&contents, at)), [7, 0, 0, 7]);
        contents.apply(&Change::Length(4096));
        contents.apply(&Change::Length(8192));
        assert_eq!((contents.len_bytes(), byte(&contents, 4097)), (8192, 0));
        assert_eq!(contents.next_data(0), Some(FileRange { offset_bytes: 0, len_bytes: 4096 }));
        assert_eq!(contents.next_data(5000), None);
    }

    #[test]
    fn a_write_is_torn_at_sectors_and_may_lose_its_growth() {
        let mut contents = Contents::default();
        let mut turn = 0;
        contents.apply_some(&write(256, 9, 1024), &mut |part| {
            turn += u32::from(part == Part::Bytes);
            part == Part::Bytes && turn != 2
        });
        assert_eq!(contents.len_bytes(), 0);
        contents.apply(&Change::Length(2048));
        // Sector 0 (from byte 256) and sector 2 (up to byte 1280) were kept, sector 1 was lost.
        assert_eq!(
            [255, 256, 511, 512, 1023, 1024, 1279, 1280].map(|at| byte(&contents, at)),
            [0, 9, 9, 0, 0, 9, 9, 0]
        );
        let mut kept = Contents::default();
        kept.apply_some(&write(0, 9, 1024), &mut |_| true);
        let mut lengths = 0;
        let mut half = Contents::default();
        half.apply_some(&write(0, 9, 1024), &mut |part| {
            lengths += u32::from(part == Part::Length);
            part == Part::Bytes || lengths < 2
        });
        assert_eq!((kept.len_bytes(), half.len_bytes()), (1024, 512));
        half.settle();
        half.apply(&Change::Length(1024));
        assert_eq!(byte(&half, 600), 0);
    }

    #[test]
    fn differences_are_found_outside_the_exception() {
        let mut one = Contents::default();
        one.apply(&write(0, 1, 8192));
        let mut two = one.clone();
        assert_eq!(one.first_difference(&two, &(0..0)), None);
        two.apply(&write(5000, 2, 1));
        assert_eq!(one.first_difference(&two, &(0..0)), Some(5000));
        assert_eq!(one.first_difference(&two, &(4096..6000)), None);
        two.apply(&Change::Length(9000));
        assert_eq!(one.first_difference(&two, &(4096..6000)), Some(8192));
    }
}
