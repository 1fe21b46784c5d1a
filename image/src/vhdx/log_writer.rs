//! Writes the log: one entry at a time, each a complete sequence.
//!
//! The tail of every entry is the entry itself, because the flush has made everything earlier
//! durable in place. An entry takes at most half of the log, so the previous entry is intact until
//! the new one is durable. As long as the header names the log, there is a sequence to replay.

use super::{
    header::{Headers, sync, write},
    lock,
    pages::Page,
};
use crate::error::Result;
use diskwright_format::vhdx::log::{LOG_SECTOR_BYTES, LogEntryHeader, data_entry, data_entry_bytes};
use diskwright_store::sync::Mutex;
use diskwright_store::{Barrier, FileRange};
use uuid::Uuid;

/// Largest entry in bytes, whatever the log's length: an entry is built in memory.
const MAX_ENTRY_BYTES: u64 = 8 << 20;

/// The log of a writable image. Used by one flush at a time.
#[derive(Debug)]
pub(super) struct LogWriter {
    place: FileRange,
    /// GUID of the entries. The header names it once the first entry is durable.
    guid: Uuid,
    next_position: u64,
    next_number: u64,
}

impl LogWriter {
    /// A writer for an empty log at `place`, whose length is a multiple of 1 MiB.
    pub(super) fn new(place: FileRange) -> Self {
        Self { place, guid: Uuid::new_v4(), next_position: 0, next_number: 1 }
    }

    /// Maximum number of pages in one entry.
    pub(super) fn max_pages(&self) -> usize {
        let half_bytes = (self.place.len_bytes / 2).min(MAX_ENTRY_BYTES);
        let sectors = half_bytes / LOG_SECTOR_BYTES as u64;
        let fits = |pages: u64| u32::try_from(pages).is_ok_and(|pages| data_entry_bytes(pages) <= half_bytes);
        // Each 126 or 128 pages need one sector of descriptors.
        let mut pages = sectors.saturating_sub(sectors / 127);
        while pages > 1 && !fits(pages) {
            pages -= 1;
        }
        pages as usize
    }

    /// Writes an entry with `pages`, makes it durable, and makes the header name the log.
    /// `file_bytes` is the file's length, already durable. The space of an entry that did not
    /// become durable is reused.
    pub(super) fn append(
        &mut self,
        barrier: &Barrier,
        headers: &Mutex<Headers>,
        pages: &[Page],
        file_bytes: u64,
    ) -> Result<()> {
        let header = LogEntryHeader {
            checksum: 0,
            entry_len_bytes: 0,
            tail_bytes: self.next_position as u32,
            sequence_number: self.next_number,
            descriptors: 0,
            log_guid: self.guid,
            flushed_file_bytes: file_bytes,
            last_file_bytes: file_bytes,
        };
        let entry = data_entry(header, pages.iter().map(|(offset_bytes, page)| (*offset_bytes, &page[..])));
        let until_end = (self.place.len_bytes - self.next_position).min(entry.len() as u64) as usize;
        write(barrier, "write the log", &entry[..until_end], self.place.offset_bytes + self.next_position)?;
        if until_end < entry.len() {
            write(barrier, "write the log", &entry[until_end..], self.place.offset_bytes)?;
        }
        sync(barrier)?;
        // The entry is durable, and the header may name it even if the header update fails
        // half-way. The next entry must not overwrite it.
        self.next_position = (self.next_position + entry.len() as u64) % self.place.len_bytes;
        self.next_number += 1;
        let mut headers = lock(headers);
        if headers.current().log_guid != self.guid {
            headers.set_log_guid(barrier, self.guid)?;
        }
        Ok(())
    }

    /// Empties the log: the header names none. All pages must be durable in place. Later entries
    /// get a new GUID.
    pub(super) fn clear(&mut self, barrier: &Barrier, headers: &Mutex<Headers>) -> Result<()> {
        let mut headers = lock(headers);
        if !headers.current().log_guid.is_nil() {
            headers.set_log_guid(barrier, Uuid::nil())?;
            *self = Self::new(self.place);
        }
        Ok(())
    }
}
