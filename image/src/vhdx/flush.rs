//! Flush and close.
//!
//! ```text
//!   1  snapshot of the dirty table pages, and the file's length          (state lock)
//!   2  sync     ─▶ durable: payload, file length, pages that the previous flush wrote in place
//!   3  log entry with the pages; sync; first flush of a session: header names the log; sync
//!   4  pages written in place, not synced: the log holds them until step 2 of the next flush
//! ```
//!
//! Why a power cut does no harm: payload is durable (2) before a table page that refers to it can
//! be (3). A page is durable in the log before it is overwritten in place (4), so a torn page is
//! always replayed. The log entry of flush n is overwritten by flush n+2 at the earliest, as an
//! entry takes at most half of the log, and by then the pages of flush n are durable in place.
//! Freed space is reused only after a flush that removed its mapping.
//!
//! If the pages do not fit one entry, steps 2 to 4 are repeated for each part. A power cut in
//! between leaves some pages old. Sector bitmaps therefore go first (a bit matters only for a block
//! that is partially present), then the BAT from its end to its start: the bitmap entry of a chunk
//! follows the payload entries of the chunk, so no durable state has a partially present block
//! without its bitmap.
//!
//! Concurrent callers share a flush by the image's [`Barrier`](diskwright_store::Barrier).

use super::{
    header::{sync, write},
    image::{VhdxImage, Writing},
    layout::Layout,
    lock,
    log_writer::LogWriter,
    pages::Page,
};
use crate::error::Result;
use diskwright_format::vhdx::MIB;
use std::sync::Arc;

impl VhdxImage {
    /// Runs a flush, or waits for one that began after this call.
    pub(super) fn flush_shared(&self, writing: &Writing) -> Result<()> {
        self.barrier.share(|| self.cycle(writing))
    }

    fn cycle(&self, writing: &Writing) -> Result<()> {
        self.barrier.check()?;
        // Held from before the snapshot. Whoever holds the log lock may move the table (`grow.rs`),
        // and then no page is being written.
        let mut log = lock(&writing.log);
        let (mut pages, file_bytes, layout) = {
            let mut state = lock(&writing.state);
            let file_bytes = state.space.as_ref().map(|space| space.file_end_bytes());
            (state.pages.snapshot(), file_bytes, Arc::clone(&state.layout))
        };
        if pages.is_empty() {
            return sync(&self.barrier);
        }
        let result = match file_bytes {
            Some(file_bytes) => self.write_pages(writing, &mut log, &layout, &mut pages, file_bytes),
            // An entry is damaged: the file keeps its length. Another program may have left a
            // length that is not a multiple of 1 MiB.
            None => self
                .file_bytes()
                .and_then(|bytes| self.write_pages(writing, &mut log, &layout, &mut pages, bytes - bytes % MIB)),
        };
        let mut state = lock(&writing.state);
        match result {
            Ok(()) => state.pages.landed(),
            Err(_) => state.pages.failed(),
        }
        result
    }

    /// Steps 2 to 4.
    fn write_pages(
        &self,
        writing: &Writing,
        log: &mut LogWriter,
        layout: &Layout,
        pages: &mut [Page],
        file_bytes: u64,
    ) -> Result<()> {
        let bat = layout.bat_offset_bytes..layout.bat_end_bytes();
        pages.sort_unstable_by_key(|(offset_bytes, _)| (bat.contains(offset_bytes), std::cmp::Reverse(*offset_bytes)));
        #[cfg(test)]
        super::tests::crash::disorder(pages);
        for part in pages.chunks(log.max_pages()) {
            sync(&self.barrier)?;
            log.append(&self.barrier, &writing.headers, part, file_bytes)?;
            for (offset_bytes, page) in part {
                write(&self.barrier, "write a table page to its place", page, *offset_bytes)?;
            }
        }
        Ok(())
    }

    /// Makes everything durable, empties the log and cuts off the slack. Writes nothing if the
    /// session changed nothing.
    pub(super) fn close_file(&self, writing: &Writing) -> Result<()> {
        self.barrier.check()?;
        if !lock(&writing.headers).file_write_begun() {
            return Ok(());
        }
        self.flush_shared(writing)?;
        // The pages of the last flush must be durable in place before the log is emptied. The log
        // must be empty before the file is cut: replay requires the file length that its entries
        // record.
        sync(&self.barrier)?;
        lock(&writing.log).clear(&self.barrier, &writing.headers)?;
        self.load_reserved(writing);
        let (end_bytes, file_bytes, freed) = {
            let mut state = lock(&writing.state);
            let state = &mut *state;
            self.release_reserved(state);
            self.release_moving(state);
            let Some(space) = &mut state.space else { return Ok(()) };
            let (used_bytes, freed) = space.free_all();
            (used_bytes.max(state.keep_end_bytes), space.file_end_bytes(), freed)
        };
        let store = &**self.barrier.store();
        if end_bytes < file_bytes {
            store.set_len(end_bytes).map_err(|error| self.io("cut the file after its last block", end_bytes, error))?;
            if let Some(space) = &mut lock(&writing.state).space {
                space.set_file_end(end_bytes);
            }
        }
        freed.punch_all(store);
        sync(&self.barrier)
    }
}
