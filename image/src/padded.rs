//! A store whose last sector is padded with zeros that the file does not have.

use diskwright_store::{
    Access, DataFile, FileRange, Front, Lane, Store, Zeroing,
    sync::atomic::{AtomicU64, Ordering},
};
use std::{io, path::Path, sync::Arc};

/// `store`, whose length is `len_bytes`, as a store that reads as zeros from there to
/// `padded_bytes`.
pub(crate) fn padded(store: Arc<dyn Store>, len_bytes: u64, padded_bytes: u64) -> Arc<dyn Store> {
    if padded_bytes <= len_bytes {
        return store;
    }
    Arc::new(PaddedStore {
        inner: store,
        padded_len_bytes: AtomicU64::new(padded_bytes),
        held_bytes: AtomicU64::new(len_bytes),
    })
}

/// A store that reads as zeros from the end of its file to the end of the last sector. Ranges
/// within the file go straight to the file. Writes never reach the padding, as the file is extended
/// before the first write.
#[derive(Debug)]
struct PaddedStore {
    inner: Arc<dyn Store>,
    padded_len_bytes: AtomicU64,
    /// Length of the file when last measured, in bytes.
    held_bytes: AtomicU64,
}

impl PaddedStore {
    fn measure(&self) -> io::Result<()> {
        self.held_bytes.store(self.inner.len_bytes()?, Ordering::Release);
        Ok(())
    }
}

impl Store for PaddedStore {
    fn name(&self) -> &Path {
        self.inner.name()
    }

    fn beneath(&self) -> Option<&dyn Store> {
        Some(&*self.inner)
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.inner.len_bytes()?.max(self.padded_len_bytes.load(Ordering::Acquire)))
    }

    fn read_at(&self, buf: &mut [u8], offset_bytes: u64) -> io::Result<()> {
        let held_end = self.inner.len_bytes()?;
        let end = offset_bytes.checked_add(buf.len() as u64).ok_or(io::ErrorKind::InvalidInput)?;
        if end <= held_end {
            return self.inner.read_at(buf, offset_bytes);
        }
        if end > self.padded_len_bytes.load(Ordering::Acquire) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let held_bytes = held_end.saturating_sub(offset_bytes) as usize;
        let (held, padding) = buf.split_at_mut(held_bytes);
        padding.fill(0);
        if held.is_empty() { Ok(()) } else { self.inner.read_at(held, offset_bytes) }
    }

    fn write_at(&self, buf: &[u8], offset_bytes: u64) -> io::Result<()> {
        self.inner.write_at(buf, offset_bytes)
    }

    fn set_len(&self, len_bytes: u64) -> io::Result<()> {
        self.inner.set_len(len_bytes)?;
        // A whole file has no padding any more.
        self.padded_len_bytes.store(len_bytes, Ordering::Release);
        self.measure()
    }

    fn allocate(&self, range: FileRange) -> io::Result<()> {
        self.inner.allocate(range)?;
        self.measure()
    }

    fn zero_range(&self, range: FileRange, how: Zeroing) -> io::Result<()> {
        self.inner.zero_range(range, how)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.inner.sync_data()
    }

    fn data_file(&self) -> Option<DataFile<'_>> {
        self.inner.data_file()
    }

    fn lane(&self) -> Option<Arc<dyn Lane>> {
        self.inner.lane()
    }

    fn is_plain(&self) -> bool {
        false
    }

    fn front(&self, range: FileRange, access: Access) -> Front {
        let held_bytes = self.held_bytes.load(Ordering::Acquire);
        let FileRange { offset_bytes, len_bytes } = range;
        if offset_bytes >= held_bytes {
            return Front { is_direct: false, len_bytes };
        }
        self.inner.front(FileRange { offset_bytes, len_bytes: len_bytes.min(held_bytes - offset_bytes) }, access)
    }

    fn never_blocks(&self) -> bool {
        self.inner.never_blocks()
    }

    fn next_data(&self, offset_bytes: u64) -> io::Result<Option<FileRange>> {
        self.inner.next_data(offset_bytes)
    }

    fn check_len(&self, len_bytes: u64) -> io::Result<()> {
        self.inner.check_len(len_bytes)
    }

    fn write_durable_at(&self, buf: &[u8], offset_bytes: u64) -> io::Result<()> {
        self.inner.write_durable_at(buf, offset_bytes)
    }

    fn clone_range(&self, source: &dyn Store, range: FileRange, offset_bytes: u64) -> io::Result<()> {
        self.inner.clone_range(source, range, offset_bytes)
    }

    fn sync_all(&self) -> io::Result<()> {
        self.inner.sync_all()
    }
}
