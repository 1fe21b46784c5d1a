//! The flush cycle, and closing.
//!
//! ```text
//!   1  snapshot of the dirty table pages, and the file's length          (state lock)
//!   2  sync     ─▶ durable: payload, the length, pages that the cycle before put in their places
//!   3  log entry with the pages; sync; the first of a session: header names the log, synced
//!   4  pages written to their places, not synced: the log holds them until step 2 of the next cycle
//! ```
//!
//! Why no cut can hurt. Payload is durable (2) before a table page that shows it can be (3). A page
//! is in the log, durable, before it is overwritten in its place (4), so a torn page is always
//! replayed. The entry of cycle n may be overwritten by cycle n+2 at the earliest (an entry takes
//! half of the log at most), and by then its pages are durable in their places. Space that was
//! given up is used again only after a flush that removed its mapping.
//!
//! When the pages do not fit one entry, steps 3 and 4 are repeated with a sync between. A cut in
//! the middle then leaves some pages old. Sector bitmaps therefore go first (a bit matters only to
//! a block that is partially present), then the BAT from its end to its beginning: the entry of a
//! chunk's bitmap follows those of its payload blocks, so no durable state shows a partially
//! present block without its bitmap.
//!
//! Callers share cycles by the gate of the image's [`Barrier`](diskwright_store::Barrier).

use super::{
    header::{sync, write},
    image::{VhdxImage, Writing},
    layout::Layout,
    lock,
    log_writer::LogWriter,
    pages::Page,
};
use crate::{error::Result, space::Punching};
use diskwright_format::vhdx::MIB;
use std::sync::Arc;

impl VhdxImage {
    /// Runs a cycle, or waits for one that began after this call.
    pub(super) fn flush_shared(&self, writing: &Writing) -> Result<()> {
        self.barrier.share(|| self.cycle(writing))
    }

    fn cycle(&self, writing: &Writing) -> Result<()> {
        self.barrier.check()?;
        // From the snapshot on: whoever has this lock may move the table (`grow.rs`), and no page
        // is on its way then.
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
            Some(file_bytes) => self.carry(writing, &mut log, &layout, &mut pages, file_bytes),
            // Damaged entries: the file keeps its length, which another program may have left
            // between two MiB.
            None => self
                .file_bytes()
                .and_then(|bytes| self.carry(writing, &mut log, &layout, &mut pages, bytes - bytes % MIB)),
        };
        let mut state = lock(&writing.state);
        match result {
            Ok(()) => state.pages.landed(),
            Err(_) => state.pages.failed(),
        }
        result
    }

    /// Steps 2 to 4.
    fn carry(
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

    /// Makes all durable, empties the log, cuts the slack. A session that changed nothing writes
    /// nothing.
    pub(super) fn close_file(&self, writing: &Writing) -> Result<()> {
        self.barrier.check()?;
        if !lock(&writing.headers).file_write_begun() {
            return Ok(());
        }
        self.flush_shared(writing)?;
        // The pages of the last cycle must be in their places before the log is emptied, and the
        // log must be empty before the file is cut: its entries promise the file's length.
        sync(&self.barrier)?;
        lock(&writing.log).clear(&self.barrier, &writing.headers)?;
        self.load_reserved(writing);
        let (end_bytes, file_bytes, given_up) = {
            let mut state = lock(&writing.state);
            let state = &mut *state;
            self.release_reserved(state);
            let Some(space) = &mut state.space else { return Ok(()) };
            let mut given_up = space.free_all();
            let used_bytes = space.release_tail();
            given_up.retain(|piece| piece.offset_bytes < used_bytes);
            (used_bytes.max(state.keep_end_bytes), space.file_end_bytes(), given_up)
        };
        let store = &**self.barrier.store();
        if end_bytes < file_bytes {
            store
                .set_len(end_bytes)
                .map_err(|error| self.io("cut the file behind its last block", end_bytes, error))?;
            if let Some(space) = &mut lock(&writing.state).space {
                space.set_file_end(end_bytes);
            }
        }
        Punching::of(given_up.into_iter()).punch_all(store);
        sync(&self.barrier)
    }
}
