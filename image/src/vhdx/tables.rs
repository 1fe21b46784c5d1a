//! Reads the current tables: the BAT and the sector bitmaps.
//!
//! ```text
//!   read-only, check, survey   the file alone
//!   a writable image           the file, without a lock ─▶ state mutex ─▶ overlay of cached pages
//! ```
//!
//! The state mutex is never held during a call of the store. A page that was changed, written and
//! dropped between the two steps would leave stale bytes in the buffer. The cache's drop counter
//! shows that, and the read is repeated. The BAT is read in pieces, never whole. Each read is
//! consistent in itself; several reads are not consistent with each other. The disk above reads
//! again if a block was changed in between.

use super::{layout::Layout, lock, pages::PAGE_BYTES, state::State};
use crate::error::{ImageError, Result};
use diskwright_format::vhdx::{BatEntry, bat::BAT_ENTRY_BYTES};
use diskwright_store::{Store, sync::Mutex};
use std::ops::{ControlFlow, Range};

/// Maximum number of BAT bytes read by one call.
const READ_BYTES: u64 = 64 << 10;

/// What failed, in errors.
pub(super) const READ_BAT: &str = "read the block allocation table";
/// The same.
pub(super) const READ_BITMAP: &str = "read a sector bitmap";

/// Access to the current tables of an image.
#[derive(Clone, Copy)]
pub(super) struct Tables<'a> {
    store: &'a dyn Store,
    state: Option<&'a Mutex<State>>,
}

impl<'a> Tables<'a> {
    /// The tables in the file, for an image without changes in memory.
    pub(super) fn of_file(store: &'a dyn Store) -> Self {
        Self { store, state: None }
    }

    /// The tables of an image; `state` is `None` for a read-only image.
    pub(super) fn now(store: &'a dyn Store, state: Option<&'a Mutex<State>>) -> Self {
        Self { store, state }
    }

    pub(super) fn store(&self) -> &'a dyn Store {
        self.store
    }

    /// Fills `buf` from file offset `offset_bytes`. `doing` is used in the error message.
    ///
    /// # Errors
    /// `Io`.
    pub(super) fn read(&self, doing: &'static str, buf: &mut [u8], offset_bytes: u64) -> Result<()> {
        loop {
            let drops = self.state.map(|state| lock(state).pages.drops());
            self.store
                .read_at(buf, offset_bytes)
                .map_err(|error| ImageError::io(doing, self.store, offset_bytes, error))?;
            let Some(state) = self.state else { return Ok(()) };
            let state = lock(state);
            if drops == Some(state.pages.drops()) {
                state.pages.overlay(buf, offset_bytes);
                return Ok(());
            }
        }
    }

    /// The file's length in bytes, at least as large as at the last read. So it can validate all
    /// offsets that were read before.
    ///
    /// # Errors
    /// `Io`.
    pub(super) fn file_bytes(&self) -> Result<u64> {
        match self.state {
            Some(state) => Ok(lock(state).file_bytes()),
            None => {
                self.store.len_bytes().map_err(|error| ImageError::io("get the file's length", self.store, 0, error))
            }
        }
    }

    /// The first range at or after `start_bytes` that may not be zero, cut to `end_bytes`: data in
    /// the file, or a page that is not in the file yet.
    ///
    /// # Errors
    /// `Io`.
    pub(super) fn next_stretch(&self, start_bytes: u64, end_bytes: u64) -> Result<Option<(u64, u64)>> {
        // The cache is asked first: a page that is written meanwhile is data when the file is
        // asked.
        let cached_bytes = self.state.and_then(|state| lock(state).pages.first_in(start_bytes, end_bytes));
        let found = self.store.next_data(start_bytes).map_err(|error| {
            ImageError::io("find the used parts of the block allocation table", self.store, start_bytes, error)
        })?;
        let data_bytes = found.as_ref().map_or(end_bytes, |range| range.offset_bytes.clamp(start_bytes, end_bytes));
        Ok(match (cached_bytes.filter(|&page_bytes| page_bytes < data_bytes), found) {
            (Some(page_bytes), _) => {
                Some((page_bytes, (page_bytes - page_bytes % PAGE_BYTES + PAGE_BYTES).min(end_bytes)))
            }
            (None, Some(range)) if data_bytes < end_bytes => {
                let stop_bytes = range.offset_bytes.saturating_add(range.len_bytes);
                Some((data_bytes, stop_bytes.clamp(data_bytes + 1, end_bytes)))
            }
            (None, _) => None,
        })
    }
}

impl Layout {
    /// Calls `visit(index, entry)` for `count` entries from `first`.
    pub(super) fn read_entries(
        &self,
        tables: &Tables<'_>,
        first: u64,
        count: u64,
        visit: &mut dyn FnMut(u64, BatEntry) -> Result<()>,
    ) -> Result<()> {
        let mut visit = |index, entry| visit(index, entry).map(ControlFlow::Continue);
        self.read_until(tables, first, count, &mut visit).map(drop)
    }

    /// The same, until `visit` returns `Break`.
    fn read_until(
        &self,
        tables: &Tables<'_>,
        first: u64,
        count: u64,
        visit: &mut dyn FnMut(u64, BatEntry) -> Result<ControlFlow<()>>,
    ) -> Result<ControlFlow<()>> {
        let mut offset_bytes = self.entry_offset_bytes(first);
        let end_bytes = self.entry_offset_bytes(first + count);
        let mut index = first;
        let mut buf = vec![0; (end_bytes - offset_bytes).min(READ_BYTES) as usize];
        while offset_bytes < end_bytes {
            let len_bytes = (end_bytes - offset_bytes).min(READ_BYTES) as usize;
            let piece = &mut buf[..len_bytes];
            tables.read(READ_BAT, piece, offset_bytes)?;
            for raw in piece.as_chunks::<8>().0 {
                if visit(index, BatEntry::from_le_bytes(*raw))?.is_break() {
                    return Ok(ControlFlow::Break(()));
                }
                index += 1;
            }
            offset_bytes += len_bytes as u64;
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Calls `visit(index, entry)` for the entries of `indices` that are not zero, until it returns
    /// `Break`. Skips holes of the file, unless the cache has a page there that is not in the file
    /// yet.
    pub(super) fn each_entry(
        &self,
        tables: &Tables<'_>,
        indices: Range<u64>,
        visit: &mut dyn FnMut(u64, BatEntry) -> Result<ControlFlow<()>>,
    ) -> Result<()> {
        let end_bytes = self.entry_offset_bytes(indices.end);
        let mut at_bytes = self.entry_offset_bytes(indices.start);
        let mut unless_zero = |index, entry: BatEntry| {
            if entry.0 == 0 { Ok(ControlFlow::Continue(())) } else { visit(index, entry) }
        };
        while at_bytes < end_bytes {
            let Some((start_bytes, stop_bytes)) = tables.next_stretch(at_bytes, end_bytes)? else { break };
            let first = (start_bytes - self.bat_offset_bytes) / BAT_ENTRY_BYTES;
            let last = (stop_bytes - self.bat_offset_bytes).div_ceil(BAT_ENTRY_BYTES);
            if self.read_until(tables, first, last - first, &mut unless_zero)?.is_break() {
                break;
            }
            at_bytes = self.entry_offset_bytes(last);
        }
        Ok(())
    }
}
