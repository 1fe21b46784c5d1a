//! A store with some pages replaced in memory: how a VHDX log is replayed without writing.
//!
//! A dirty VHDX that is opened read-only must show the state after log replay, and the file must
//! not change. The pages from the log are laid over the file here. The store is not plain:
//! [`OverlayStore::front`] sends every read that touches a replaced page, or lies beyond the end of
//! the file, to [`OverlayStore::read_at`], and all others directly to the file. A hostile log that
//! covers payload is therefore shown as replay would leave it. Writes never reach the file.

use crate::{
    lane::Lane,
    store::{Access, DataFile, FileRange, Front, Store, Zeroing},
};
use std::{collections::BTreeMap, io, path::Path, sync::Arc};

/// Size of a replaced page in bytes.
pub const PAGE_BYTES: u64 = 4096;

/// A read-only view of a store with some 4 KiB pages replaced and a length of its own.
#[derive(Debug)]
pub struct OverlayStore {
    inner: Arc<dyn Store>,
    pages: BTreeMap<u64, Box<[u8]>>,
    len_bytes: u64,
    /// Length of `inner` when the overlay was created. If the file grows later, ranges beyond this
    /// are still read through `read_at`.
    inner_bytes: u64,
}

impl OverlayStore {
    /// Lays `pages` over `inner`. A page's key is its byte offset, a multiple of 4096; each page
    /// has 4096 bytes. The store shows at least `len_bytes`; bytes beyond `inner` read as zeros.
    ///
    /// # Errors
    /// `InvalidInput` for a page of another size or alignment.
    pub fn new(inner: Arc<dyn Store>, pages: BTreeMap<u64, Box<[u8]>>, len_bytes: u64) -> io::Result<Self> {
        let fits = pages.iter().all(|(offset, page)| offset % PAGE_BYTES == 0 && page.len() as u64 == PAGE_BYTES);
        if !fits {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "overlay pages are 4096 bytes at multiples of 4096",
            ));
        }
        let inner_bytes = inner.len_bytes()?;
        Ok(Self { inner, pages, len_bytes: len_bytes.max(inner_bytes), inner_bytes })
    }
}

fn refused<T>() -> io::Result<T> {
    Err(io::Error::new(
        io::ErrorKind::ReadOnlyFilesystem,
        "the image is open read-only, with its log replayed in memory",
    ))
}

impl Store for OverlayStore {
    fn name(&self) -> &Path {
        self.inner.name()
    }

    fn beneath(&self) -> Option<&dyn Store> {
        Some(&*self.inner)
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.len_bytes)
    }

    fn read_at(&self, buf: &mut [u8], offset_bytes: u64) -> io::Result<()> {
        let end_bytes = offset_bytes.checked_add(buf.len() as u64).ok_or(io::ErrorKind::InvalidInput)?;
        if end_bytes > self.len_bytes {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let inner_bytes = self.inner.len_bytes()?.saturating_sub(offset_bytes).min(buf.len() as u64) as usize;
        if inner_bytes > 0 {
            self.inner.read_at(&mut buf[..inner_bytes], offset_bytes)?;
        }
        buf[inner_bytes..].fill(0);
        let first_page = offset_bytes - offset_bytes % PAGE_BYTES;
        for (&page_offset, page) in self.pages.range(first_page..end_bytes) {
            let from = page_offset.max(offset_bytes);
            let to = (page_offset + PAGE_BYTES).min(end_bytes);
            let source = &page[(from - page_offset) as usize..(to - page_offset) as usize];
            buf[(from - offset_bytes) as usize..(to - offset_bytes) as usize].copy_from_slice(source);
        }
        Ok(())
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

    /// Holes of the file stay holes, and so is what lies beyond it: a log can claim any length.
    fn next_data(&self, offset_bytes: u64) -> io::Result<Option<FileRange>> {
        let first_page = offset_bytes - offset_bytes % PAGE_BYTES;
        let page = self.pages.range(first_page..).next().map(|(&page_offset, _)| page_offset.max(offset_bytes));
        let page = page.map(|start| start..start - start % PAGE_BYTES + PAGE_BYTES);
        let inner = self.inner.next_data(offset_bytes)?;
        let inner = inner.map(|data| data.offset_bytes..data.offset_bytes.saturating_add(data.len_bytes));
        let next = page.into_iter().chain(inner).min_by_key(|range| range.start);
        Ok(next.filter(|range| range.start < self.len_bytes).map(|range| FileRange {
            offset_bytes: range.start,
            len_bytes: range.end.min(self.len_bytes) - range.start,
        }))
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
        let FileRange { offset_bytes, len_bytes } = range;
        if access == Access::Write {
            return Front { is_direct: false, len_bytes };
        }
        let first_page = offset_bytes - offset_bytes % PAGE_BYTES;
        let next_page = self.pages.range(first_page..).next().map_or(u64::MAX, |(&page_offset, _)| page_offset);
        let direct_end = next_page.min(self.inner_bytes);
        if offset_bytes < direct_end {
            let len_bytes = len_bytes.min(direct_end - offset_bytes);
            return self.inner.front(FileRange { offset_bytes, len_bytes }, access);
        }
        if offset_bytes >= self.inner_bytes {
            return Front { is_direct: false, len_bytes };
        }
        // Consecutive replaced pages are read by one part.
        let mut end = first_page;
        while self.pages.contains_key(&end) && end - offset_bytes.min(end) < len_bytes {
            end += PAGE_BYTES;
        }
        Front { is_direct: false, len_bytes: len_bytes.min(end - offset_bytes) }
    }

    fn never_blocks(&self) -> bool {
        self.inner.never_blocks()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryStore;

    #[test]
    fn a_length_that_a_log_claims_is_a_hole() {
        let inner: Arc<dyn Store> = Arc::new(MemoryStore::with_bytes("test", vec![1; 8192]));
        let page = |at: u64| (at, vec![2; PAGE_BYTES as usize].into_boxed_slice());
        let pages = BTreeMap::from([page(4096), page(1 << 30)]);
        let overlay = OverlayStore::new(inner, pages, 1 << 60).unwrap();
        let mut found = Vec::new();
        let mut at = 0;
        while let Some(data) = overlay.next_data(at).unwrap() {
            assert!(data.offset_bytes >= at && data.len_bytes > 0);
            at = data.offset_bytes + data.len_bytes;
            found.push(data.offset_bytes..at);
            assert!(found.len() < 10, "{found:?}");
        }
        let covers = |byte: u64| found.iter().any(|range| range.contains(&byte));
        assert!(covers(0) && covers(8191) && covers(1 << 30) && covers((1 << 30) + 4095));
        assert!(!covers(8192) && !covers((1 << 30) + 4096) && !covers(1 << 59));
        assert_eq!(overlay.next_data((1 << 30) + 4096).unwrap(), None);
    }
}
