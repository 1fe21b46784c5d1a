//! The owner of each unit of the disk: one word for each unit, read without a lock.
//!
//! A *unit* is the smallest payload block in the chain. A word names the layer that has the unit's
//! data, or says that the unit reads as zeros. A *page* holds 1,024 words (more only for huge
//! disks). A page is folded over the chain when it is first needed (`fold.rs`). From then on a
//! look-up is one atomic load, however long the chain is. So memory and time depend on the range in
//! use, never on the disk's size, and [`Pages`] drops pages above a limit.
//!
//! ```text
//!   offset ─▶ page (folded on first use) ─▶ word ─┬─ DATA     source (a store of a layer), offset
//!                                                ├─ ZERO     a layer says zeros
//!                                                ├─ ABSENT   no layer has the unit: zeros
//!                                                ├─ LAZY     bitmaps decide, from this layer down
//!                                                ├─ PACKED   the layer must decompress the block
//!                                                └─ DAMAGED  the layer's table entry is invalid
//! ```
//!
//! Words name layers and stores by ids that never change their meaning while the disk is open
//! (`chain.rs`), not by their position in the chain. So all words stay true when a layer joins on
//! top.
//!
//! Locks: words are read without a lock. Words and pages are written only under the disk's mutation
//! lock.

pub(crate) mod fold;
mod pages;
mod run_cache;

pub(crate) use run_cache::RunCache;

use pages::Pages;

/// log2 of the words in a page. Larger for disks that would need more pages than
/// [`PAGES_MAX_SHIFT`] allows.
const PAGE_SHIFT: u32 = 10;
/// log2 of the maximum number of pages, so that the index of a disk which only claims to be huge
/// costs 8 MiB.
const PAGES_MAX_SHIFT: u32 = 20;
/// Unit in which payload offsets are stored, in bytes.
const SECTOR_BYTES: u64 = 512;

const TAG_BITS: u32 = 3;
const ID_BITS: u32 = 16;
const TAG_ABSENT: u64 = 1;
const TAG_ZERO: u64 = 2;
const TAG_DATA: u64 = 3;
const TAG_LAZY: u64 = 4;
const TAG_COMPRESSED: u64 = 5;
const TAG_DAMAGED: u64 = 6;

/// Id of a layer of the chain. An id is never reused while the disk is open.
pub(crate) type LayerId = u16;
/// Id of a store of a layer. An id is never reused while the disk is open.
pub(crate) type SourceId = u16;

/// Smallest offset in a store that a word cannot hold: 16 PiB.
pub(crate) const OFFSET_LIMIT_BYTES: u64 = SECTOR_BYTES << (u64::BITS - TAG_BITS - ID_BITS);

/// The owner of a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Owner {
    /// No layer has the range. It reads as zeros.
    Absent,
    /// A layer says that the range reads as zeros.
    Zero { layer: LayerId },
    /// The range's data begins at this offset of the store.
    Data { source: SourceId, offset_bytes: u64 },
    /// Not decided: the sector bitmaps from this layer down must be read.
    Lazy { layer: LayerId },
    /// The layer has the data compressed.
    Compressed { layer: LayerId },
    /// The layer's table entry is invalid, so the data cannot be found.
    Damaged { layer: LayerId },
}

impl Owner {
    fn encode(self) -> u64 {
        let of = |tag: u64, id: u16| tag | u64::from(id) << TAG_BITS;
        match self {
            Self::Absent => TAG_ABSENT,
            Self::Zero { layer } => of(TAG_ZERO, layer),
            Self::Lazy { layer } => of(TAG_LAZY, layer),
            Self::Compressed { layer } => of(TAG_COMPRESSED, layer),
            Self::Damaged { layer } => of(TAG_DAMAGED, layer),
            Self::Data { source, offset_bytes } => {
                of(TAG_DATA, source) | (offset_bytes / SECTOR_BYTES) << (TAG_BITS + ID_BITS)
            }
        }
    }

    #[inline]
    fn decode(word: u64) -> Self {
        let id = (word >> TAG_BITS) as u16;
        match word & ((1 << TAG_BITS) - 1) {
            TAG_ABSENT => Self::Absent,
            TAG_ZERO => Self::Zero { layer: id },
            TAG_DATA => Self::Data { source: id, offset_bytes: (word >> (TAG_BITS + ID_BITS)) * SECTOR_BYTES },
            TAG_COMPRESSED => Self::Compressed { layer: id },
            TAG_DAMAGED => Self::Damaged { layer: id },
            _ => Self::Lazy { layer: id },
        }
    }

    /// The owner of the rest of the range, `by_bytes` after its start.
    pub(crate) fn advanced(self, by_bytes: u64) -> Self {
        match self {
            Self::Data { source, offset_bytes } => Self::Data { source, offset_bytes: offset_bytes + by_bytes },
            other => other,
        }
    }

    /// Whether a range of `next` directly after `len_bytes` of this owner continues its range.
    fn continues(self, len_bytes: u64, next: Self) -> bool {
        // Each compressed block is decompressed by itself.
        !matches!(self, Self::Compressed { .. }) && self.advanced(len_bytes) == next
    }

    /// Whether the range reads as zeros.
    pub(crate) fn reads_as_zeros(self) -> bool {
        matches!(self, Self::Absent | Self::Zero { .. })
    }
}

/// A contiguous range of the disk with one owner (never `Lazy`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    /// Offset on the disk.
    pub(crate) start_bytes: u64,
    pub(crate) len_bytes: u64,
    pub(crate) owner: Owner,
}

impl Run {
    /// First byte after the run.
    pub(crate) fn end_bytes(&self) -> u64 {
        self.start_bytes + self.len_bytes
    }

    /// The part of this run that lies in `start..end`; `None` if there is none.
    fn clip(self, start: u64, end: u64) -> Option<Self> {
        let from = self.start_bytes.max(start);
        let to = self.end_bytes().min(end);
        (from < to).then(|| Self {
            start_bytes: from,
            len_bytes: to - from,
            owner: self.owner.advanced(from - self.start_bytes),
        })
    }
}

/// Appends a run, merged with the last one if both are contiguous on the disk and in the file.
pub(crate) fn push_joined(runs: &mut Vec<Run>, run: Run) {
    if let Some(last) = runs.last_mut()
        && last.end_bytes() == run.start_bytes
        && last.owner.continues(last.len_bytes, run.owner)
    {
        last.len_bytes += run.len_bytes;
        return;
    }
    runs.push(run);
}

/// The words of all units.
#[derive(Debug)]
pub(crate) struct Map {
    size_bytes: u64,
    unit_shift: u32,
    page_shift: u32,
    pages: Pages,
}

impl Map {
    /// An empty map for a disk of `size_bytes` whose smallest block is `unit_bytes` (a power of
    /// two). Its pages take at most about `limit_bytes`, but at least a few pages.
    pub(crate) fn new(size_bytes: u64, unit_bytes: u64, limit_bytes: u64) -> Self {
        let unit_shift = unit_bytes.trailing_zeros();
        let units = size_bytes.div_ceil(unit_bytes);
        let page_shift = (u64::BITS - units.leading_zeros()).saturating_sub(PAGES_MAX_SHIFT).max(PAGE_SHIFT);
        let pages = Pages::new(units.div_ceil(1 << page_shift) as usize, 1 << page_shift, limit_bytes);
        Self { size_bytes, unit_shift, page_shift, pages }
    }

    /// The page of a unit, and the index of its word in the page.
    #[inline]
    fn place(&self, unit: u64) -> (u64, usize) {
        (unit >> self.page_shift, (unit & (self.units_per_page() - 1)) as usize)
    }

    #[inline]
    fn units_per_page(&self) -> u64 {
        1 << self.page_shift
    }

    #[inline]
    pub(crate) fn unit_bytes(&self) -> u64 {
        1 << self.unit_shift
    }

    /// The owner of `len_bytes` (above 0) at `offset_bytes`. `None` if the range spans two units,
    /// or if the unit is not folded or not decided. Takes no lock.
    #[inline]
    pub(crate) fn lookup(&self, offset_bytes: u64, len_bytes: u64) -> Option<Owner> {
        let unit = offset_bytes >> self.unit_shift;
        if (offset_bytes + len_bytes - 1) >> self.unit_shift != unit {
            return None;
        }
        match self.word(unit)? {
            Owner::Lazy { .. } => None,
            owner => Some(owner.advanced(offset_bytes & (self.unit_bytes() - 1))),
        }
    }

    /// The owner in a unit's word; `None` if its page is not in memory.
    #[inline]
    pub(crate) fn word(&self, unit: u64) -> Option<Owner> {
        let (page, word) = self.place(unit);
        self.pages.load(page as usize, word).map(Owner::decode)
    }

    /// The unit of a byte of the disk.
    #[inline]
    pub(crate) fn unit_of(&self, offset_bytes: u64) -> u64 {
        offset_bytes >> self.unit_shift
    }

    /// The page of a byte of the disk.
    #[inline]
    pub(crate) fn page_of(&self, offset_bytes: u64) -> u64 {
        self.unit_of(offset_bytes) >> self.page_shift
    }

    /// First byte of a unit, and the first byte after it.
    pub(crate) fn unit_range(&self, unit: u64) -> (u64, u64) {
        let start = unit << self.unit_shift;
        (start, start.saturating_add(self.unit_bytes()).min(self.size_bytes))
    }

    /// The units of a page: the first, and how many of them the disk has.
    pub(crate) fn units_of_page(&self, page: u64) -> (u64, u64) {
        let first = page << self.page_shift;
        (first, self.size_bytes.div_ceil(self.unit_bytes()).saturating_sub(first).min(self.units_per_page()))
    }

    /// First byte after a page.
    pub(crate) fn page_end_bytes(&self, page: u64) -> u64 {
        let (first, units) = self.units_of_page(page);
        self.unit_range(first + units.max(1) - 1).1
    }

    /// Whether a page is in memory.
    pub(crate) fn is_resident(&self, page: u64) -> bool {
        self.pages.is_resident(page as usize)
    }

    /// Installs a folded page, dropping another one at the memory limit. Requires the mutation
    /// lock.
    pub(crate) fn install(&self, page: u64, owners: &[Owner]) {
        self.pages.install(page as usize, owners.iter().map(|owner| owner.encode()));
    }

    /// Drops all pages, so that no lock-free look-up succeeds. Requires the mutation lock.
    pub(crate) fn clear(&self) {
        self.pages.clear();
    }

    /// Changes a word if its page is in memory. A page that is not will be folded from the tables.
    /// Requires the mutation lock.
    pub(crate) fn set(&self, unit: u64, owner: Owner) {
        let (page, word) = self.place(unit);
        self.pages.store(page as usize, word, owner.encode());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_encode_every_owner() {
        for owner in [
            Owner::Absent,
            Owner::Zero { layer: 1023 },
            Owner::Lazy { layer: 7 },
            Owner::Compressed { layer: 3 },
            Owner::Damaged { layer: u16::MAX },
            Owner::Data { source: u16::MAX, offset_bytes: OFFSET_LIMIT_BYTES - SECTOR_BYTES },
            Owner::Data { source: 0, offset_bytes: 512 },
        ] {
            assert_eq!(Owner::decode(owner.encode()), owner);
        }
    }

    #[test]
    fn runs_join_only_if_contiguous_in_the_file() {
        let data = |start_bytes, offset_bytes| Run {
            start_bytes,
            len_bytes: 4096,
            owner: Owner::Data { source: 0, offset_bytes },
        };
        let mut runs = Vec::new();
        push_joined(&mut runs, data(0, 8192));
        push_joined(&mut runs, data(4096, 12288));
        push_joined(&mut runs, data(8192, 65536));
        assert_eq!(runs.len(), 2);
        assert_eq!(runs[0].len_bytes, 8192);
    }

    #[test]
    fn a_huge_disk_costs_little_memory() {
        for (size_bytes, unit_bytes) in
            [(1 << 63, 64 << 20), (2040 << 30, 512), (64 << 40, 1 << 20), (u64::MAX, 1 << 20)]
        {
            let map = Map::new(size_bytes, unit_bytes, 64 << 20);
            let last = map.page_of(size_bytes - 1);
            assert!(last < 1 << PAGES_MAX_SHIFT, "{size_bytes}");
            assert!(!map.is_resident(last) && map.page_end_bytes(last) == size_bytes);
        }
        assert_eq!(Map::new(2 << 40, 2 << 20, 0).page_shift, PAGE_SHIFT);
    }

    #[test]
    fn no_word_is_found_before_its_page_is_folded() {
        let map = Map::new(10 << 20, 1 << 20, 64 << 20);
        assert_eq!(map.lookup(0, 512), None);
        assert_eq!(map.lookup(1 << 19, 1 << 20), None);
        map.set(1, Owner::Absent);
        assert_eq!(map.word(1), None, "a word of a missing page cannot be set");
        map.install(0, &[Owner::Zero { layer: 0 }; 10]);
        map.set(1, Owner::Absent);
        assert_eq!(map.lookup(1 << 20, 512), Some(Owner::Absent));
        assert_eq!(map.lookup(0, 512), Some(Owner::Zero { layer: 0 }));
    }
}
