//! A window into a store: a member of an archive as a store of its own, for reading.
//!
//! The window begins at any offset, so a file's own alignment does not hold in it: it has no data
//! file, and an engine reads it by blocking calls of the pool.

use crate::{
    open::SectorSizes,
    store::{FileRange, Store, Zeroing},
};
use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

/// A range of a store, read-only.
#[derive(Debug)]
pub struct WindowStore {
    inner: Arc<dyn Store>,
    name: PathBuf,
    range: FileRange,
}

impl WindowStore {
    /// The bytes `range` of `inner`, with a name of their own for messages.
    ///
    /// # Errors
    /// `UnexpectedEof` if `inner` ends before the range; the store's error.
    pub fn new(inner: Arc<dyn Store>, name: PathBuf, range: FileRange) -> io::Result<Self> {
        let end_bytes = range.offset_bytes.checked_add(range.len_bytes);
        if end_bytes.is_none_or(|end| inner.len_bytes().is_ok_and(|len| len < end)) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(Self { inner, name, range })
    }
}

fn refused<T>() -> io::Result<T> {
    Err(io::Error::new(io::ErrorKind::ReadOnlyFilesystem, "a part of another file is only read"))
}

impl Store for WindowStore {
    fn name(&self) -> &Path {
        &self.name
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.range.len_bytes)
    }

    fn read_at(&self, buf: &mut [u8], offset_bytes: u64) -> io::Result<()> {
        let end_bytes = offset_bytes.checked_add(buf.len() as u64).ok_or(io::ErrorKind::InvalidInput)?;
        if end_bytes > self.range.len_bytes {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.inner.read_at(buf, self.range.offset_bytes + offset_bytes)
    }

    fn write_at(&self, _buf: &[u8], _offset_bytes: u64) -> io::Result<()> {
        refused()
    }

    fn set_len(&self, _len_bytes: u64) -> io::Result<()> {
        refused()
    }

    fn allocate(&self, _range: FileRange) -> io::Result<()> {
        refused()
    }

    fn zero_range(&self, _range: FileRange, _how: Zeroing) -> io::Result<()> {
        refused()
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }

    fn data_file(&self) -> Option<crate::DataFile<'_>> {
        None
    }

    fn never_blocks(&self) -> bool {
        self.inner.never_blocks()
    }

    fn next_data(&self, offset_bytes: u64) -> io::Result<Option<FileRange>> {
        if offset_bytes >= self.range.len_bytes {
            return Ok(None);
        }
        let end_bytes = self.range.offset_bytes + self.range.len_bytes;
        let found = self.inner.next_data(self.range.offset_bytes + offset_bytes)?;
        Ok(found.filter(|data| data.offset_bytes < end_bytes).map(|data| FileRange {
            offset_bytes: data.offset_bytes - self.range.offset_bytes,
            len_bytes: data.len_bytes.min(end_bytes - data.offset_bytes),
        }))
    }

    fn sector_bytes(&self) -> SectorSizes {
        self.inner.sector_bytes()
    }

    fn is_locked(&self) -> bool {
        self.inner.is_locked()
    }

    fn cached_share(&self) -> f64 {
        self.inner.cached_share()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryStore;

    #[test]
    fn a_window_shows_its_range_alone() {
        let inner = Arc::new(MemoryStore::with_bytes("x.ova", (0..200).collect()));
        let range = |offset_bytes, len_bytes| FileRange { offset_bytes, len_bytes };
        let window = WindowStore::new(inner.clone(), "x.ova/disk".into(), range(50, 100)).unwrap();
        assert_eq!((window.len_bytes().unwrap(), window.name()), (100, Path::new("x.ova/disk")));
        let mut buf = [0; 4];
        window.read_at(&mut buf, 96).unwrap();
        assert_eq!(buf, [146, 147, 148, 149]);
        assert_eq!(window.read_at(&mut buf, 97).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        assert!(window.read_at(&mut buf, u64::MAX - 1).is_err());
        assert_eq!(window.next_data(10).unwrap(), Some(range(10, 90)));
        assert_eq!(window.next_data(100).unwrap(), None);
        assert!(window.write_at(&buf, 0).is_err() && window.set_len(1).is_err());
        for (offset_bytes, len_bytes) in [(150, 51), (201, 0), (1, u64::MAX)] {
            let outside = WindowStore::new(inner.clone(), "y".into(), range(offset_bytes, len_bytes));
            assert_eq!(outside.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        }
        assert_eq!(inner.to_vec()[0..3], [0, 1, 2]);
    }
}
