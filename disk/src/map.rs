//! Who owns each unit of the disk: one word for each, and the look-up that takes no lock.
//!
//! A *unit* is the smallest payload block in the chain. The map holds one word for each unit: which layer has its bytes
//! and where, or that it reads as zeros. A page of (nearly always) 1,024 words is folded over the chain the first time that it is touched
//! (`map/fold.rs`); from then on a look-up is one atomic load, however long the chain is. So memory and time follow what is touched,
//! never what the disk's size claims.
//!
//! ```text
//!   offset ─▶ page (folded once) ─▶ word ─┬─ DATA  layer, file offset
//!                                         ├─ ZERO  a layer says zeros
//!                                         ├─ ABSENT nobody knows it: zeros
//!                                         └─ LAZY  from this layer on, sector bitmaps decide
//! ```
//!
//! Locks: words are read without one. They are written, and pages set, only by [`Fold`], under the disk's one mutation lock.

mod fold;

pub(crate) use fold::{Fold, Mixed};

use diskwright_store::sync::atomic::{AtomicU64, Ordering};
use std::sync::OnceLock;

/// Words in a page are two to this, but for disks of more pages than [`PAGES_MAX_SHIFT`] allows.
const PAGE_SHIFT: u32 = 10;
/// Pages are at most two to this, so that a disk which only claims to be huge costs 24 MiB: their words are more then.
const PAGES_MAX_SHIFT: u32 = 20;
/// Payload offsets are kept in these.
const SECTOR_BYTES: u64 = 512;

const TAG_BITS: u32 = 3;
const LAYER_BITS: u32 = 11;
const TAG_ABSENT: u64 = 1;
const TAG_ZERO: u64 = 2;
const TAG_DATA: u64 = 3;
const TAG_LAZY: u64 = 4;
const TAG_PACKED: u64 = 5;
const TAG_DAMAGED: u64 = 6;

/// Most layers that a word can name.
pub(crate) const LAYERS_MAX: usize = 1 << LAYER_BITS;

/// Who owns a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Owner {
    /// Nobody: it reads as zeros.
    Absent,
    /// A layer says that it reads as zeros.
    Zero { layer: u32 },
    /// The bytes begin here in the layer's store.
    Data { layer: u32, offset_bytes: u64 },
    /// Undecided: the bitmaps from this layer on must be asked.
    Lazy { layer: u32 },
    /// The layer has the bytes, but they must be decoded before they are read.
    Packed { layer: u32 },
    /// The layer's table is wrong here, so nobody can know the bytes.
    Damaged { layer: u32 },
}

impl Owner {
    fn encode(self) -> u64 {
        match self {
            Self::Absent => TAG_ABSENT,
            Self::Zero { layer } => TAG_ZERO | u64::from(layer) << TAG_BITS,
            Self::Lazy { layer } => TAG_LAZY | u64::from(layer) << TAG_BITS,
            Self::Packed { layer } => TAG_PACKED | u64::from(layer) << TAG_BITS,
            Self::Damaged { layer } => TAG_DAMAGED | u64::from(layer) << TAG_BITS,
            Self::Data { layer, offset_bytes } => {
                TAG_DATA | u64::from(layer) << TAG_BITS | (offset_bytes / SECTOR_BYTES) << (TAG_BITS + LAYER_BITS)
            }
        }
    }

    #[inline]
    fn decode(word: u64) -> Self {
        let layer = (word >> TAG_BITS) as u32 & ((1 << LAYER_BITS) - 1);
        match word & ((1 << TAG_BITS) - 1) {
            TAG_ABSENT => Self::Absent,
            TAG_ZERO => Self::Zero { layer },
            TAG_DATA => Self::Data { layer, offset_bytes: (word >> (TAG_BITS + LAYER_BITS)) * SECTOR_BYTES },
            TAG_PACKED => Self::Packed { layer },
            TAG_DAMAGED => Self::Damaged { layer },
            _ => Self::Lazy { layer },
        }
    }

    /// The owner of what follows `by_bytes` after the beginning of this one's range.
    pub(crate) fn advanced(self, by_bytes: u64) -> Self {
        match self {
            Self::Data { layer, offset_bytes } => Self::Data { layer, offset_bytes: offset_bytes + by_bytes },
            other => other,
        }
    }

    /// Whether a range of `next`, following `len_bytes` of this one, continues it.
    fn continues(self, len_bytes: u64, next: Self) -> bool {
        self.advanced(len_bytes) == next
    }
}

/// A stretch of the disk with one owner (never `Lazy`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    /// First byte on the disk.
    pub(crate) start_bytes: u64,
    /// Length.
    pub(crate) len_bytes: u64,
    /// Owner.
    pub(crate) owner: Owner,
}

impl Run {
    /// The part of this run that lies in `start..end`, if any.
    fn clip(self, start: u64, end: u64) -> Option<Self> {
        let from = self.start_bytes.max(start);
        let to = (self.start_bytes + self.len_bytes).min(end);
        (from < to).then(|| Self {
            start_bytes: from,
            len_bytes: to - from,
            owner: self.owner.advanced(from - self.start_bytes),
        })
    }
}

/// Appends a run, joining it to the last one where they are one stretch.
pub(crate) fn push_joined(runs: &mut Vec<Run>, run: Run) {
    if let Some(last) = runs.last_mut()
        && last.start_bytes + last.len_bytes == run.start_bytes
        && last.owner.continues(last.len_bytes, run.owner)
    {
        last.len_bytes += run.len_bytes;
        return;
    }
    runs.push(run);
}

type Page = Box<[AtomicU64]>;

/// The words. See the module.
#[derive(Debug)]
pub(crate) struct Map {
    size_bytes: u64,
    unit_shift: u32,
    page_shift: u32,
    pages: Box<[OnceLock<Page>]>,
}

impl Map {
    /// A map of nothing folded yet, for a disk of `size_bytes` whose smallest block is `unit_bytes` (a power of two).
    pub(crate) fn new(size_bytes: u64, unit_bytes: u64) -> Self {
        let unit_shift = unit_bytes.trailing_zeros();
        let units = size_bytes.div_ceil(unit_bytes);
        let page_shift = (u64::BITS - units.leading_zeros()).saturating_sub(PAGES_MAX_SHIFT).max(PAGE_SHIFT);
        let pages = (0..units.div_ceil(1 << page_shift)).map(|_| OnceLock::new()).collect();
        Self { size_bytes, unit_shift, page_shift, pages }
    }

    /// The page of a unit, and its word in it.
    #[inline]
    fn place(&self, unit: u64) -> (u64, usize) {
        (unit >> self.page_shift, (unit & (self.units_per_page() - 1)) as usize)
    }

    #[inline]
    fn units_per_page(&self) -> u64 {
        1 << self.page_shift
    }

    /// Bytes in a unit.
    pub(crate) fn unit_bytes(&self) -> u64 {
        1 << self.unit_shift
    }

    /// The owner of `len_bytes` (above 0) at `offset_bytes`, if that is one unit which has been folded and decided. No lock.
    #[inline]
    pub(crate) fn lookup(&self, offset_bytes: u64, len_bytes: u64) -> Option<Owner> {
        let unit = offset_bytes >> self.unit_shift;
        if (offset_bytes + len_bytes - 1) >> self.unit_shift != unit {
            return None;
        }
        let (page, word) = self.place(unit);
        match Owner::decode(self.pages.get(page as usize)?.get()?[word].load(Ordering::Acquire)) {
            Owner::Lazy { .. } => None,
            owner => Some(owner.advanced(offset_bytes & (self.unit_bytes() - 1))),
        }
    }

    fn unit_range(&self, unit: u64) -> (u64, u64) {
        let start = unit << self.unit_shift;
        (start, (start + self.unit_bytes()).min(self.size_bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_keep_what_they_are_given() {
        for owner in [
            Owner::Absent,
            Owner::Zero { layer: 1023 },
            Owner::Lazy { layer: 7 },
            Owner::Packed { layer: 3 },
            Owner::Damaged { layer: 1022 },
            Owner::Data { layer: 2047, offset_bytes: ((1 << 50) - 1) * SECTOR_BYTES },
            Owner::Data { layer: 0, offset_bytes: 512 },
        ] {
            assert_eq!(Owner::decode(owner.encode()), owner);
        }
    }

    #[test]
    fn runs_join_only_where_the_file_goes_on() {
        let data = |start_bytes, offset_bytes| Run {
            start_bytes,
            len_bytes: 4096,
            owner: Owner::Data { layer: 0, offset_bytes },
        };
        let mut runs = Vec::new();
        push_joined(&mut runs, data(0, 8192));
        push_joined(&mut runs, data(4096, 12288));
        push_joined(&mut runs, data(8192, 65536));
        assert_eq!(runs.len(), 2);
        assert_eq!(runs[0].len_bytes, 8192);
    }

    #[test]
    fn what_is_only_claimed_costs_little() {
        for (size_bytes, unit_bytes) in
            [(1 << 63, 64 << 20), (2040 << 30, 512), (64 << 40, 1 << 20), (u64::MAX, 1 << 20)]
        {
            let map = Map::new(size_bytes, unit_bytes);
            assert!(map.pages.len() <= 1 << PAGES_MAX_SHIFT, "{size_bytes}");
            let (page, word) = map.place((size_bytes - 1) / unit_bytes);
            assert!(page as usize == map.pages.len() - 1 && (word as u64) < map.units_per_page());
        }
        assert_eq!(Map::new(2 << 40, 2 << 20).page_shift, PAGE_SHIFT);
    }

    #[test]
    fn nothing_is_found_before_it_is_folded() {
        let map = Map::new(10 << 20, 1 << 20);
        assert_eq!(map.lookup(0, 512), None);
        assert_eq!(map.lookup(1 << 19, 1 << 20), None);
    }
}
