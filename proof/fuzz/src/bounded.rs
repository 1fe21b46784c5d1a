//! A store in memory with a maximum length.
//!
//! A real file may have any length, because holes take no space. A vector takes memory. So a length
//! above the maximum fails as on a full disk.

use diskwright_store::{
    MemoryStore, Store,
    store::{DataFile, FileRange, Zeroing},
};
use std::{io, path::Path, sync::Arc};

/// The maximum length of the store.
const BOUND_BYTES: u64 = 24 << 20;

/// The store.
#[derive(Debug)]
pub struct BoundedStore(MemoryStore);

impl BoundedStore {
    /// A store with these contents.
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
