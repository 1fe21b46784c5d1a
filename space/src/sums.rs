//! Checksums of sealed slabs, in memory: a cache within a bound, and the comparison.
//!
//! ```text
//!   read of a sealed slab ─▶ cached ─▶ transfer ─▶ compare ─ wrong ─▶ slow.rs: another copy
//!                         └─ not cached ─▶ slow.rs: the record of a copy ─▶ cache
//! ```
//!
//! Who reads from a sealed slab holds it. A slab that is held may become dirty, but then it does
//! not become clean again before it is released. So if it is sealed after the comparison, it was
//! sealed all the time, with the same checksums. What a slab has in the cache from an earlier seal
//! is replaced before it is sealed again.

use diskwright_format::space::{SUM_BYTES, sums::sums_of, sums_of_slab};
use quick_cache::sync::Cache;
use std::{fmt, ops::Range, sync::Arc};

/// Memory for checksums: they cover 1024 times as much.
const CACHE_BYTES: usize = 48 << 20;

/// The checksums of a slab.
pub(crate) type SlabSums = Arc<[u32]>;

/// The cache; its keys are files and indices.
pub(crate) struct SumsCache(Cache<(u32, u32), SlabSums>);

impl fmt::Debug for SumsCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SumsCache").field(&self.0.len()).finish()
    }
}

impl SumsCache {
    pub(crate) fn new(slab_shift: u8) -> Self {
        Self(Cache::new(CACHE_BYTES / (4 * sums_of_slab(slab_shift) + 64)))
    }

    #[inline]
    pub(crate) fn get(&self, file: u32, index: u32) -> Option<SlabSums> {
        self.0.get(&(file, index))
    }

    pub(crate) fn put(&self, file: u32, index: u32, sums: &SlabSums) {
        self.0.insert((file, index), Arc::clone(sums));
    }
}

/// Where the next round of sealing goes on.
#[derive(Debug, Default)]
pub(crate) struct SealCursor {
    pub(crate) file: u32,
    pub(crate) index: u64,
    /// A clean slab was passed since the first file.
    pub(crate) has_clean: bool,
}

/// Whether a range of a slab consists of whole blocks that have checksums.
#[inline]
pub(crate) fn is_whole(within_bytes: u64, len_bytes: u64) -> bool {
    (within_bytes | len_bytes).is_multiple_of(SUM_BYTES)
}

/// The smallest range of whole blocks around a range.
pub(crate) fn whole_blocks(range: Range<u64>) -> Range<u64> {
    range.start / SUM_BYTES * SUM_BYTES..range.end.next_multiple_of(SUM_BYTES)
}

/// The blocks of `bytes`, at `within_bytes` of a slab, that do not have their checksums: offsets in
/// the slab.
pub(crate) fn wrong_blocks(sums: &[u32], within_bytes: u64, bytes: &[u8]) -> impl Iterator<Item = u64> {
    let first = within_bytes / SUM_BYTES;
    (first..)
        .zip(sums_of(bytes))
        .filter(|(block, found)| sums.get(*block as usize) != Some(found))
        .map(|(block, _)| block * SUM_BYTES)
}

/// Whether `bytes`, at `within_bytes` of a slab, have their checksums.
#[inline]
pub(crate) fn have_sums(sums: &[u32], within_bytes: u64, bytes: &[u8]) -> bool {
    let first = (within_bytes / SUM_BYTES) as usize;
    sums.get(first..)
        .is_some_and(|sums| sums_of(bytes).eq(sums.iter().copied().take(bytes.len().div_ceil(SUM_BYTES as usize))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_compared_at_their_places() {
        let bytes: Vec<u8> = (0..4 * SUM_BYTES).map(|at| (at / 77) as u8).collect();
        let sums: Vec<u32> = sums_of(&bytes).collect();
        assert!(have_sums(&sums, 0, &bytes) && have_sums(&sums, SUM_BYTES, &bytes[4096..12288]));
        assert!(!have_sums(&sums, 0, &bytes[4096..]) && !have_sums(&sums, 4 * SUM_BYTES, &bytes[..4096]));
        let mut wrong = bytes.clone();
        (wrong[5000], wrong[4 * 4096 - 1]) = (!wrong[5000], !wrong[4 * 4096 - 1]);
        assert_eq!(wrong_blocks(&sums, 0, &wrong).collect::<Vec<_>>(), [4096, 3 * 4096]);
        assert_eq!(wrong_blocks(&sums, 8192, &wrong[8192..]).collect::<Vec<_>>(), [3 * 4096]);
        assert_eq!((whole_blocks(4095..4097), whole_blocks(0..4096)), (0..8192, 0..4096));
        assert!(is_whole(4096, 8192) && !is_whole(512, 4096) && !is_whole(0, 100));
    }
}
