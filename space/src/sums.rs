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

use crate::pool::{FileState, Pool, lock};
use diskwright_format::space::{
    Copy,
    sums::{SUM_BYTES, parse_record, record_at, record_bytes, sums_of, sums_of_slab, to_record},
};
use quick_cache::sync::Cache;
use std::{fmt, io, ops::Range, sync::Arc};

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

impl Pool {
    /// The checksums of a sealed slab, which the caller holds: from the cache, or else from the
    /// record of one of its copies. `None` if all records that can be read are damaged.
    ///
    /// # Errors
    /// No record can be read.
    pub(crate) fn sums_of(&self, file: &FileState, index: u32) -> io::Result<Option<SlabSums>> {
        if let Some(sums) = self.sums_cache().get(file.number, index) {
            file.table.entry(index).set_cached(true);
            return Ok(Some(sums));
        }
        let entry = file.table.entry(index);
        let (mut failure, mut damaged) = (None, false);
        for copy in entry.load().good_copies() {
            match self.read_record(copy, file.number, index) {
                Ok(Some(sums)) => {
                    self.sums_cache().put(file.number, index, &sums);
                    entry.set_cached(true);
                    return Ok(Some(sums));
                }
                Ok(None) => damaged = true,
                Err(error) => failure = Some(error),
            }
        }
        match failure {
            Some(error) if !damaged => Err(error),
            _ => Ok(None),
        }
    }

    /// The checksums in the record of a copy; `None` if it is damaged.
    pub(crate) fn read_record(&self, copy: Copy, file: u32, index: u32) -> io::Result<Option<SlabSums>> {
        let missing = || io::Error::other("no member that holds its checksums is there");
        let member = self.live_member(copy.member).ok_or_else(missing)?;
        let Some(at) = record_at(member.size_bytes, self.slab_shift(), copy.slab) else { return Ok(None) };
        let mut record = vec![0; record_bytes(self.slab_shift()) as usize];
        member.store.read_at(&mut record, at)?;
        Ok(parse_record(&record, self.id(), file, index, self.slab_shift()).ok().map(Into::into))
    }

    /// Writes the record of a copy, unless `is_ours` says that it belongs to another slab by now. It
    /// is durable with the next sync of the member.
    pub(crate) fn write_record(
        &self,
        copy: Copy,
        (file, index): (u32, u32),
        sums: &[u32],
        is_ours: impl FnOnce() -> bool,
    ) -> io::Result<()> {
        // Who takes the copy's place over writes its record after this one.
        let _records = lock(self.records_lock());
        if !is_ours() {
            return Ok(());
        }
        let missing = || io::Error::other("a member vanished meanwhile");
        let member = self.live_member(copy.member).ok_or_else(missing)?;
        let at = record_at(member.size_bytes, self.slab_shift(), copy.slab)
            .ok_or_else(|| io::Error::other("a slab beyond the end of its member"))?;
        let written = member.store.write_at(&to_record(self.id(), file, index, sums), at);
        member.written();
        written
    }

    /// Takes the contents of a sealed slab as they are, since nothing is left that they can be
    /// compared with.
    pub(crate) fn unseal(&self, file: &FileState, index: u32) -> io::Result<()> {
        use diskwright_format::space::change::{Change, SlabState};
        let entry = file.table.entry(index);
        let _busy = crate::busy::Busy::wait(self, entry);
        if !entry.load().is_sealed() || self.sums_of(file, index)?.is_some() {
            return Ok(());
        }
        self.warn(format!(
            "pool {}: the checksums of {} are damaged on every member; its contents could not be checked, and are taken as \
             they are",
            self.name(),
            self.described(file, index)
        ));
        if !self.is_writable() {
            return Ok(());
        }
        let mut state = lock(self.state());
        let unsealed = Change::State { file: file.number, first: index, count: 1, state: SlabState::Clean };
        let ticket = self.append(&mut state, &unsealed);
        drop(state);
        self.wait(ticket)
    }

    /// A slab as users know it.
    pub(crate) fn described(&self, file: &FileState, index: u32) -> String {
        let state = lock(self.state());
        let name = state.names.iter().find(|(_, number)| **number == file.number).map(|(name, _)| name.clone());
        let name = name.unwrap_or_else(|| format!("file {}", file.number));
        format!("{name} at {} MiB", (u64::from(index) << self.slab_shift()) as f64 / f64::from(1 << 20))
    }
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
