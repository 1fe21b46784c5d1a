//! A store in memory: for tests, and wherever a small image need not touch a disk.

use crate::{
    store::{DataFile, FileRange, Store, Zeroing},
    sync::{RwLock, RwLockWriteGuard},
};
use std::{
    io,
    path::{Path, PathBuf},
};

/// Bytes in a vector. One lock guards it all.
#[derive(Debug)]
pub struct MemoryStore {
    name: PathBuf,
    bytes: RwLock<Vec<u8>>,
}

impl MemoryStore {
    /// An empty store that calls itself `name`.
    pub fn new(name: impl Into<PathBuf>) -> Self {
        Self::with_bytes(name, Vec::new())
    }

    /// A store that holds `bytes`.
    pub fn with_bytes(name: impl Into<PathBuf>, bytes: Vec<u8>) -> Self {
        Self { name: name.into(), bytes: RwLock::new(bytes) }
    }

    /// A copy of everything it holds.
    pub fn to_vec(&self) -> Vec<u8> {
        self.bytes.read().unwrap_or_else(|poisoned| poisoned.into_inner()).clone()
    }

    fn write(&self) -> RwLockWriteGuard<'_, Vec<u8>> {
        self.bytes.write().unwrap_or_else(|poisoned| poisoned.into_inner())
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
        Ok(self.bytes.read().unwrap_or_else(|poisoned| poisoned.into_inner()).len() as u64)
    }

    fn read_at(&self, buf: &mut [u8], offset_bytes: u64) -> io::Result<()> {
        let bytes = self.bytes.read().unwrap_or_else(|poisoned| poisoned.into_inner());
        let end = end_of(offset_bytes, buf.len() as u64)?;
        let held = bytes.get(end - buf.len()..end).ok_or(io::ErrorKind::UnexpectedEof)?;
        buf.copy_from_slice(held);
        Ok(())
    }

    fn write_at(&self, buf: &[u8], offset_bytes: u64) -> io::Result<()> {
        let end = end_of(offset_bytes, buf.len() as u64)?;
        let mut bytes = self.write();
        if bytes.len() < end {
            bytes.resize(end, 0);
        }
        bytes[end - buf.len()..end].copy_from_slice(buf);
        Ok(())
    }

    fn set_len(&self, len_bytes: u64) -> io::Result<()> {
        self.write().resize(end_of(len_bytes, 0)?, 0);
        Ok(())
    }

    fn allocate(&self, range: FileRange) -> io::Result<()> {
        let end = end_of(range.offset_bytes, range.len_bytes)?;
        let mut bytes = self.write();
        if bytes.len() < end {
            bytes.resize(end, 0);
        }
        Ok(())
    }

    fn zero_range(&self, range: FileRange, _how: Zeroing) -> io::Result<()> {
        let end = end_of(range.offset_bytes, range.len_bytes)?;
        let mut bytes = self.write();
        let start = end - range.len_bytes as usize;
        bytes.get_mut(start..end).ok_or(io::ErrorKind::UnexpectedEof)?.fill(0);
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }

    fn data_file(&self) -> Option<DataFile<'_>> {
        None
    }
}
