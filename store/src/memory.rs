//! A store in memory, for tests and for small images that need no disk.
//!
//! A test can inject errors: [`MemoryStore::fail_syncs`] for failing syncs, [`MemoryStore::limit`]
//! for a full file system.
//!
//! Invariants: written bytes are never lost, not even if syncs fail. Users of the store must assume
//! that a failed sync lost data, as on a disk. One lock guards bytes and capacity, so no growth can
//! pass a limit that was set.

use crate::{
    no_io::assert_io_allowed,
    store::{DataFile, FileRange, Store, Zeroing},
    sync::{
        RwLock, RwLockWriteGuard,
        atomic::{AtomicBool, Ordering},
    },
};
use std::{
    io,
    path::{Path, PathBuf},
};

/// Bytes in a vector, guarded by one lock.
#[derive(Debug)]
pub struct MemoryStore {
    name: PathBuf,
    held: RwLock<MemoryContents>,
    fails_syncs: AtomicBool,
}

#[derive(Debug)]
struct MemoryContents {
    bytes: Vec<u8>,
    /// Length beyond which the store does not grow.
    capacity_bytes: usize,
}

impl MemoryContents {
    /// Grows for a write to `start..end`, or for as much of its beginning as fits: a file system
    /// that becomes full during a call may have done part of it.
    fn grow(&mut self, start: usize, end: usize) -> io::Result<()> {
        let held_bytes = self.bytes.len();
        if end <= held_bytes {
            return Ok(());
        }
        let reached = end.min(self.capacity_bytes);
        if reached == end || reached > start.max(held_bytes) {
            self.bytes.resize(reached, 0);
        }
        if reached == end { Ok(()) } else { Err(io::ErrorKind::StorageFull.into()) }
    }
}

impl MemoryStore {
    /// An empty store with the given name.
    pub fn new(name: impl Into<PathBuf>) -> Self {
        Self::with_bytes(name, Vec::new())
    }

    /// A store that holds `bytes`.
    pub fn with_bytes(name: impl Into<PathBuf>, bytes: Vec<u8>) -> Self {
        let held = MemoryContents { bytes, capacity_bytes: usize::MAX };
        Self { name: name.into(), held: RwLock::new(held), fails_syncs: AtomicBool::new(false) }
    }

    /// A copy of all bytes.
    pub fn to_vec(&self) -> Vec<u8> {
        self.held.read().unwrap_or_else(|poisoned| poisoned.into_inner()).bytes.clone()
    }

    /// Makes syncs fail with EIO from now on, or succeed again. They then succeed as if nothing had
    /// happened, like those of a file whose failure the kernel has already reported. Reads and
    /// writes always work.
    pub fn fail_syncs(&self, fail: bool) {
        self.fails_syncs.store(fail, Ordering::Relaxed);
    }

    /// Limits the length to `capacity_bytes`; `u64::MAX` removes the limit. Bytes that are already
    /// beyond it stay and can be read and written. Further growth fails with `StorageFull`: a write
    /// or an allocation may have done its beginning, `set_len` changes nothing.
    pub fn limit(&self, capacity_bytes: u64) {
        self.write().capacity_bytes = usize::try_from(capacity_bytes).unwrap_or(usize::MAX);
    }

    fn write(&self) -> RwLockWriteGuard<'_, MemoryContents> {
        self.held.write().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

fn end_of(offset_bytes: u64, len_bytes: u64) -> io::Result<usize> {
    offset_bytes
        .checked_add(len_bytes)
        .and_then(|end| usize::try_from(end).ok())
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "the range is larger than memory"))
}

impl Store for MemoryStore {
    fn name(&self) -> &Path {
        &self.name
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.held.read().unwrap_or_else(|poisoned| poisoned.into_inner()).bytes.len() as u64)
    }

    fn read_at(&self, buf: &mut [u8], offset_bytes: u64) -> io::Result<()> {
        assert_io_allowed();
        let held = self.held.read().unwrap_or_else(|poisoned| poisoned.into_inner());
        let end = end_of(offset_bytes, buf.len() as u64)?;
        buf.copy_from_slice(held.bytes.get(end - buf.len()..end).ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn write_at(&self, buf: &[u8], offset_bytes: u64) -> io::Result<()> {
        assert_io_allowed();
        let end = end_of(offset_bytes, buf.len() as u64)?;
        let start = end - buf.len();
        let mut held = self.write();
        let grown = held.grow(start, end);
        let reached = end.min(held.bytes.len());
        if let Some(room) = held.bytes.get_mut(start..reached) {
            room.copy_from_slice(&buf[..room.len()]);
        }
        grown
    }

    fn set_len(&self, len_bytes: u64) -> io::Result<()> {
        assert_io_allowed();
        let len_bytes = end_of(len_bytes, 0)?;
        let mut held = self.write();
        if len_bytes > held.bytes.len().max(held.capacity_bytes) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        held.bytes.resize(len_bytes, 0);
        Ok(())
    }

    fn allocate(&self, range: FileRange) -> io::Result<()> {
        assert_io_allowed();
        let end = end_of(range.offset_bytes, range.len_bytes)?;
        self.write().grow(end - range.len_bytes as usize, end)
    }

    fn zero_range(&self, range: FileRange, _how: Zeroing) -> io::Result<()> {
        assert_io_allowed();
        let end = end_of(range.offset_bytes, range.len_bytes)?;
        let start = end - range.len_bytes as usize;
        self.write().bytes.get_mut(start..end).ok_or(io::ErrorKind::UnexpectedEof)?.fill(0);
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        assert_io_allowed();
        if self.fails_syncs.load(Ordering::Relaxed) { Err(io::Error::from_raw_os_error(5)) } else { Ok(()) }
    }

    fn data_file(&self) -> Option<DataFile<'_>> {
        None
    }

    fn never_blocks(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_full(result: io::Result<()>) -> bool {
        result.is_err_and(|error| error.kind() == io::ErrorKind::StorageFull)
    }

    #[test]
    fn injected_sync_failures_lose_no_data() {
        let store = MemoryStore::with_bytes("m", vec![1; 8]);
        store.sync_data().unwrap();
        store.fail_syncs(true);
        for _ in 0..2 {
            assert_eq!(store.sync_data().unwrap_err().raw_os_error(), Some(5));
        }
        store.write_at(&[2; 8], 4).unwrap();
        store.fail_syncs(false);
        store.sync_data().unwrap();
        assert_eq!(store.to_vec(), [1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2]);
    }

    #[test]
    fn a_store_grows_only_to_its_limit() {
        let store = MemoryStore::with_bytes("m", vec![1; 4]);
        store.limit(8);
        assert!(is_full(store.set_len(9)));
        assert!(is_full(store.write_at(&[2], 8)), "the whole write is beyond the limit");
        assert!(is_full(store.allocate(FileRange { offset_bytes: 9, len_bytes: 1 })));
        assert_eq!(store.to_vec(), [1; 4], "nothing was written");
        assert!(is_full(store.write_at(&[2; 4], 6)));
        assert_eq!(store.to_vec(), [1, 1, 1, 1, 0, 0, 2, 2], "the beginning was written");
        store.set_len(5).unwrap();
        assert!(is_full(store.allocate(FileRange { offset_bytes: 5, len_bytes: 4 })));
        assert_eq!(store.to_vec(), [1, 1, 1, 1, 0, 0, 0, 0], "truncated bytes come back as zeros");
        store.write_at(&[3; 4], 4).unwrap();
        store.limit(u64::MAX);
        store.allocate(FileRange { offset_bytes: 8, len_bytes: 1 }).unwrap();
        assert_eq!(store.to_vec(), [1, 1, 1, 1, 3, 3, 3, 3, 0]);
    }

    #[test]
    fn bytes_beyond_a_new_limit_stay() {
        let store = MemoryStore::with_bytes("m", vec![1; 8]);
        store.limit(4);
        store.allocate(FileRange { offset_bytes: 0, len_bytes: 8 }).unwrap();
        store.zero_range(FileRange { offset_bytes: 5, len_bytes: 1 }, Zeroing::Keep).unwrap();
        assert!(is_full(store.write_at(&[2; 3], 6)));
        assert_eq!(store.to_vec(), [1, 1, 1, 1, 1, 0, 2, 2]);
        store.set_len(6).unwrap();
        assert!(is_full(store.set_len(7)), "truncated space beyond the limit cannot be regained");
        assert_eq!(store.len_bytes().unwrap(), 6);
    }
}
