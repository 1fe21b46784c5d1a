//! The descriptor of an image that is open for writing: the CID changes before the first write.
//!
//! ```text
//!   begin_writing ─▶ new CID, last digits of longContentID, changeTrackPath as a comment
//!                ─▶ one write of the sectors that differ ─▶ sync
//! ```
//!
//! A CID keeps its number of digits, so the text keeps its length, and only the sectors with the
//! changed bytes are written. A chosen CID may need more digits than the text has (qemu-img writes
//! a CID without leading zeros). Then the lines after it move, and a power cut during the write may
//! leave a descriptor that is half old and half new if these lines lie in several sectors.
//!
//! VMware's record of changed blocks is valid only for disks that no other program writes. So the
//! first write drops it: the line that names it becomes a comment.
//!
//! Invariant: the CID in the file is new and durable before the first write of a session is
//! visible. The mutex guards the text and is held during I/O, so no caller may hold a lock.

use super::{layout::Layout, text};
use crate::{ImageError, LinkageId, Result};
use diskwright_format::vmdk::{Descriptor, SECTOR_BYTES, edit};
use diskwright_store::{
    Barrier,
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
};
use std::{ops::Range, sync::PoisonError};

const CID: &str = "CID";
const LONG_ID: &str = "ddb.longContentID";
const CHANGE_TRACKING: &str = "changeTrackPath";

/// The descriptor, as it is in the file.
#[derive(Debug)]
pub(super) struct Document {
    /// Where the text begins in the image's first file.
    offset_bytes: u64,
    /// The space of an embedded text; `None` for a text that has a file of its own.
    space_bytes: Option<u64>,
    text: Mutex<Vec<u8>>,
    /// Whether the CID was changed in this session. Atomic, as every write reads it.
    has_begun: AtomicBool,
}

impl Document {
    /// Reads the text again: all bytes of its space count, as those after its end are kept.
    ///
    /// # Errors
    /// `Io`; `Corrupt` for a header that contradicts what was read before.
    pub fn read(layout: &Layout) -> Result<Self> {
        let store = &*layout.stores[0];
        let (offset_bytes, space_bytes) = if layout.head.is_extent {
            let header = text::header_of(store)?;
            {
                let bytes = |sectors: u64| sectors.saturating_mul(SECTOR_BYTES);
                (bytes(header.descriptor_sector), Some(bytes(header.descriptor_sectors)))
            }
        } else {
            (0, None)
        };
        let most = space_bytes.unwrap_or(u64::MAX).min(diskwright_format::vmdk::DESCRIPTOR_MAX_BYTES);
        let text = text::read_some(store, offset_bytes, most as usize, "read the descriptor")?;
        Ok(Self { offset_bytes, space_bytes, text: Mutex::new(text), has_begun: AtomicBool::new(false) })
    }

    /// The CID now; `None` only for a text that another program has damaged meanwhile.
    pub fn cid(&self) -> Option<LinkageId> {
        let text = self.text.lock().unwrap_or_else(PoisonError::into_inner);
        edit::value(&text, CID).and_then(|digits| u32::from_str_radix(digits, 16).ok()).map(LinkageId::Cid)
    }

    /// Gives the image a new CID, once in a session.
    ///
    /// # Errors
    /// `Io`, also by a sync that failed.
    pub fn begin(&self, barrier: &Barrier) -> Result<()> {
        if self.has_begun.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut text = self.text.lock().unwrap_or_else(PoisonError::into_inner);
        if self.has_begun.load(Ordering::Acquire) {
            return Ok(());
        }
        let digits = edit::value(&text, CID).map_or(8, str::len).clamp(1, 8);
        let mask = u32::MAX >> (32 - 4 * digits as u32);
        let old = edit::value(&text, CID).and_then(|digits| u32::from_str_radix(digits, 16).ok());
        let cid = loop {
            let cid = LinkageId::random_cid().cid().unwrap_or_default() & mask;
            if cid != 0 && Some(cid) != old {
                break cid;
            }
        };
        self.write(&mut text, cid, digits, barrier)
    }

    /// Gives the image this CID.
    ///
    /// # Errors
    /// `Unsupported` if the identity is not a CID, or a longer text does not fit into its space;
    /// `Io`.
    pub fn set(&self, barrier: &Barrier, linkage_id: LinkageId) -> Result<()> {
        let mut text = self.text.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(cid) = linkage_id.cid() else {
            return Err(self.refused(barrier, "an identity other than a CID in a VMDK"));
        };
        self.write(&mut text, cid, 8, barrier)
    }

    fn refused(&self, barrier: &Barrier, what: &str) -> ImageError {
        ImageError::Unsupported {
            path: barrier.store().name().to_owned(),
            what: what.into(),
            hint: "convert the disk to a new VMDK".into(),
        }
    }

    fn write(&self, text: &mut Vec<u8>, cid: u32, digits: usize, barrier: &Barrier) -> Result<()> {
        let store = &**barrier.store();
        let mut new = text.clone();
        if !edit::replace_value(&mut new, CID, &format!("{cid:0digits$x}")) {
            let parsed = Descriptor::parse(&new, self.offset_bytes).map_err(|error| super::damaged(store, &error))?;
            let mut longer = parsed;
            longer.set_cid(cid);
            let mut bytes = longer.to_text().into_bytes();
            bytes.resize(bytes.len().max(new.len()), 0);
            if self.space_bytes.is_some_and(|space| bytes.len() as u64 > space) {
                return Err(self.refused(barrier, "a longer descriptor than the image has space for"));
            }
            new = bytes;
        }
        if let Some(long) = edit::value(&new, LONG_ID).filter(|long| long.len() == 32) {
            let long = format!("{}{cid:08x}", &long[..24]);
            edit::replace_value(&mut new, LONG_ID, &long);
        }
        edit::comment_out(&mut new, CHANGE_TRACKING);
        if let Some(range) = changed_sectors(text, &new, self.offset_bytes) {
            let at = self.offset_bytes + range.start as u64;
            store
                .write_at(&new[range], at)
                .map_err(|error| ImageError::io("write the descriptor", store, at, error))?;
        }
        barrier.sync("make the new CID durable")?;
        *text = new;
        self.has_begun.store(true, Ordering::Release);
        Ok(())
    }
}

/// The range of the new text that covers all changed bytes and begins and ends at a sector of the
/// file, or at an end of the text.
fn changed_sectors(old: &[u8], new: &[u8], offset_bytes: u64) -> Option<Range<usize>> {
    let differs = |at: &usize| old.get(*at) != new.get(*at);
    let first = (0..new.len()).find(differs)?;
    let last = (0..new.len()).rfind(differs)?;
    let sector = SECTOR_BYTES as usize;
    let shift = (offset_bytes % SECTOR_BYTES) as usize;
    let start = ((first + shift) / sector * sector).saturating_sub(shift);
    let end = (last + 1 + shift).next_multiple_of(sector) - shift;
    Some(start..end.min(new.len()))
}
