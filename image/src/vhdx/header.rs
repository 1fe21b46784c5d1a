//! Header updates. All metadata writes go through [`write`] and [`sync`] on the image's
//! [`Barrier`].
//!
//! An update writes the slot that is not current and syncs, then does the same with the other slot.
//! Afterwards both slots are valid and differ only in their sequence numbers. A power cut at any
//! moment leaves one valid slot.
//!
//! The [`Barrier`] is the only way to sync. After the first failed sync every later write or flush
//! of the image is refused.

use super::corrupt;
use crate::error::{ImageError, Result};
use diskwright_format::vhdx::{Header, Invalid, Slot};
use diskwright_store::Barrier;
use uuid::Uuid;

/// Makes durable all writes that completed before the call.
pub(super) fn sync(barrier: &Barrier) -> Result<()> {
    Ok(barrier.sync("make written data durable")?)
}

/// Writes metadata. `doing` is used in the error message.
pub(super) fn write(barrier: &Barrier, doing: &'static str, bytes: &[u8], offset_bytes: u64) -> Result<()> {
    barrier.write(bytes, offset_bytes).map_err(|error| ImageError::io(doing, &**barrier.store(), offset_bytes, error))
}

/// The current header, and what this session has changed in it.
#[derive(Debug)]
pub(super) struct Headers {
    slot: Slot,
    header: Header,
    file_write_begun: bool,
    data_write_begun: bool,
}

impl Headers {
    pub(super) fn new(slot: Slot, header: Header) -> Self {
        Self { slot, header, file_write_begun: false, data_write_begun: false }
    }

    pub(super) fn current(&self) -> &Header {
        &self.header
    }

    pub(super) fn slot(&self) -> Slot {
        self.slot
    }

    /// Whether this session may have changed the file.
    pub(super) fn file_write_begun(&self) -> bool {
        self.file_write_begun
    }

    /// Writes a new FileWriteGuid, durably, once per session. Must precede the first change of the
    /// file (MS-VHDX 2.2.2.1).
    pub(super) fn begin_file_write(&mut self, barrier: &Barrier) -> Result<()> {
        if !self.file_write_begun {
            let id = Uuid::new_v4();
            self.update(barrier, |header| header.file_write_guid = id)?;
            self.file_write_begun = true;
        }
        Ok(())
    }

    /// Writes a new FileWriteGuid and DataWriteGuid, durably, once per session. Must precede the
    /// first guest-visible change.
    pub(super) fn begin_data_write(&mut self, barrier: &Barrier) -> Result<()> {
        if self.data_write_begun { Ok(()) } else { self.begin_data_write_as(barrier, Uuid::new_v4()) }
    }

    /// The same with a chosen DataWriteGuid, which replaces one that the session has written.
    pub(super) fn begin_data_write_as(&mut self, barrier: &Barrier, data_write_guid: Uuid) -> Result<()> {
        if self.data_write_begun && self.header.data_write_guid == data_write_guid {
            return Ok(());
        }
        let file_write_guid = if self.file_write_begun { self.header.file_write_guid } else { Uuid::new_v4() };
        self.update(barrier, |header| {
            header.file_write_guid = file_write_guid;
            header.data_write_guid = data_write_guid;
        })?;
        self.file_write_begun = true;
        self.data_write_begun = true;
        Ok(())
    }

    /// Sets the GUID of the valid log entries; nil for an empty log.
    pub(super) fn set_log_guid(&mut self, barrier: &Barrier, log_guid: Uuid) -> Result<()> {
        self.update(barrier, |header| {
            header.log_guid = log_guid;
            header.log_version = 0;
        })
    }

    fn update(&mut self, barrier: &Barrier, change: impl FnOnce(&mut Header)) -> Result<()> {
        let mut next = self.header.clone();
        change(&mut next);
        for _slot in 0..2 {
            let place = self.slot.other();
            next.sequence_number = self.header.sequence_number.checked_add(1).ok_or_else(|| {
                let invalid = Invalid::new(
                    "header",
                    8,
                    "the largest sequence number",
                    "a sequence number that can be incremented",
                );
                corrupt(&**barrier.store(), self.slot.offset_bytes(), invalid)
            })?;
            write(barrier, "write a header", &next.to_bytes(), place.offset_bytes())?;
            sync(barrier)?;
            self.slot = place;
            self.header = next.clone();
        }
        Ok(())
    }
}
