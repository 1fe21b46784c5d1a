//! A store in memory that does not grow for ever.
//!
//! A file takes any length at no cost, as what was never written is a hole; a vector takes memory.
//! So an image that asks for a length beyond the bound meets what a full disk would answer.

use diskwright_store::{
    MemoryStore, Store,
    store::{DataFile, FileRange, Zeroing},
};
use std::{io, path::Path, sync::Arc};

/// Longest store.
const BOUND_BYTES: u64 = 24 << 20;

/// See the module.
#[derive(Debug)]
pub struct BoundedStore(MemoryStore);

impl BoundedStore {
    /// A store that holds `bytes`.
    pub fn holding(name: &str, bytes: Vec<u8>) -> Arc<dyn Store> {
        Arc::new(Self(MemoryStore::with_bytes(name, bytes)))
    }
}

fn bounded(end_bytes: Option<u64>) -> io::Result<()> {
    if end_bytes.is_some_and(|end| end <= BOUND_BYTES) { Ok(()) } else { Err(io::ErrorKind::StorageFull.into()) }
}

impl Store for BoundedStore {
    fn name(&self) -> &Path {
        self.0.name()
    }

    fn len_bytes(&self) -> io::Result<u64> {
        self.0.len_bytes()
    }

    fn read_at(&self, buf: &mut [u8], offset_bytes: u64) -> io::Result<()> {
        self.0.read_at(buf, offset_bytes)
    }

    fn write_at(&self, buf: &[u8], offset_bytes: u64) -> io::Result<()> {
        bounded(offset_bytes.checked_add(buf.len() as u64))?;
        self.0.write_at(buf, offset_bytes)
    }

    fn set_len(&self, len_bytes: u64) -> io::Result<()> {
        bounded(Some(len_bytes))?;
        self.0.set_len(len_bytes)
    }

    fn allocate(&self, range: FileRange) -> io::Result<()> {
        bounded(range.offset_bytes.checked_add(range.len_bytes))?;
        self.0.allocate(range)
    }

    fn zero_range(&self, range: FileRange, how: Zeroing) -> io::Result<()> {
        self.0.zero_range(range, how)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.0.sync_data()
    }

    fn data_file(&self) -> Option<DataFile<'_>> {
        self.0.data_file()
    }

    fn never_blocks(&self) -> bool {
        self.0.never_blocks()
    }
}
