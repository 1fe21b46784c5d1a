//! The descriptor of an image that is open for writing: the CID changes before the first write, and
//! the link to the parent can be replaced.
//!
//! ```text
//!   begin_writing   ─▶ new CID, last digits of longContentID, changeTrackPath as a comment
//!                   ─▶ one write of the sectors that differ ─▶ sync
//!   set_parent_link ─▶ lines that make room, at the end of the text ─▶ sync     (often none)
//!                   ─▶ one write of the first sector ─▶ sync                    the atomic change
//! ```
//!
//! A CID keeps its number of digits, so the text keeps its length, and only the sectors with the
//! changed bytes are written. All programs put the CID into the first sector. A chosen CID may need
//! more digits than the text has (qemu-img writes a CID without leading zeros): then it is written
//! as a link is.
//!
//! VMware's record of changed blocks is valid only for disks that no other program writes. So the
//! first write drops it: the line that names it becomes a comment.
//!
//! Invariants: the CID in the file is new and durable before the first write of a session is
//! visible. Lines behind the end of the text are durable before the sector that relies on them. The
//! mutex guards the text and is held during I/O, so no caller may hold a lock.

use super::{layout::Layout, link::Link, text};
use crate::{ImageError, LinkageId, ParentLink, Result};
use diskwright_format::vmdk::{DESCRIPTOR_MAX_BYTES, SECTOR_BYTES, edit, one_sector};
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
/// Heads of an IDE disk, and its most cylinders.
const IDE_HEADS: u64 = 16;
const IDE_CYLINDERS_MAX: u64 = 16383;

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
            let bytes = |sectors: u64| sectors.saturating_mul(SECTOR_BYTES);
            (bytes(header.descriptor_sector), Some(bytes(header.descriptor_sectors)))
        } else {
            (0, None)
        };
        let most = space_bytes.unwrap_or(u64::MAX).min(DESCRIPTOR_MAX_BYTES);
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

    /// The link to the parent now.
    pub fn parent_link(&self) -> Option<ParentLink> {
        Link::read(&self.text.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Replaces the link to the parent, by the steps of this module.
    ///
    /// # Errors
    /// `BadParentLink` if the image has no parent, or its text no room for the link: then nothing
    /// was changed. `Io`, after which the file has the old link or the new one.
    pub fn relink(&self, barrier: &Barrier, link: &ParentLink) -> Result<()> {
        barrier.check()?;
        let mut text = self.text.lock().unwrap_or_else(PoisonError::into_inner);
        let refused = |(what, hint): (String, &str)| {
            let path = barrier.store().name().to_owned();
            ImageError::BadParentLink { path, what, hint: hint.into() }
        };
        if Link::read(&text).is_none() {
            return Err(refused(("the disk has no parent".into(), "only a differencing disk has one")));
        }
        let link = Link::of(link, edit::value(&text, "parentFileNameHint")).map_err(refused)?;
        let change = link.change(&text).map_err(refused)?;
        if !self.has_room(&text, &change) {
            let what = "the new link does not fit into the space of the descriptor".into();
            return Err(refused((what, "move the parent to a shorter path, or convert the disk to a new one")));
        }
        self.carry_out(&mut text, &change, barrier)
    }

    /// Whether the disk is of a kind in files of 2 GB.
    pub fn is_split(&self) -> bool {
        let text = self.text.lock().unwrap_or_else(PoisonError::into_inner);
        edit::value(&text, "createType").is_some_and(|kind| kind.to_ascii_lowercase().starts_with("twogb"))
    }

    /// Whether [`Document::set_length`] can record this length of the last extent.
    pub fn has_room_for_length(&self, sectors: u64) -> bool {
        let text = self.text.lock().unwrap_or_else(PoisonError::into_inner);
        match length_change(&text, sectors) {
            Ok(change) => change.is_none_or(|change| self.has_room(&text, &change)),
            Err(NoRoom) => false,
        }
    }

    /// Records the length of the last extent, durably, and then the geometry of the disk where the
    /// text has room for it.
    ///
    /// # Errors
    /// `Unsupported` as [`Document::has_room_for_length`]; `Io`, after which the file has the old
    /// length or the new one.
    pub fn set_length(&self, barrier: &Barrier, sectors: u64, disk_sectors: u64) -> Result<()> {
        barrier.check()?;
        let mut text = self.text.lock().unwrap_or_else(PoisonError::into_inner);
        let change = length_change(&text, sectors);
        let change = change.map_err(|NoRoom| self.refused(barrier, "a longer extent in this descriptor"))?;
        let Some(change) = change else { return Ok(()) };
        self.carry_out(&mut text, &change, barrier)?;
        match cylinders_change(&text, disk_sectors).filter(|change| self.has_room(&text, change)) {
            Some(change) => self.carry_out(&mut text, &change, barrier),
            None => Ok(()),
        }
    }

    fn has_room(&self, text: &[u8], change: &one_sector::Change) -> bool {
        let len = one_sector::len_of(text) + change.tail.len();
        len as u64 <= self.space_bytes.unwrap_or(u64::MAX).min(DESCRIPTOR_MAX_BYTES)
    }

    /// Writes the tail of a change, and then its sector, each durably.
    fn carry_out(&self, text: &mut Vec<u8>, change: &one_sector::Change, barrier: &Barrier) -> Result<()> {
        let store = &**barrier.store();
        let write = |bytes: &[u8], place: usize| {
            let at = self.offset_bytes + place as u64;
            store.write_at(bytes, at).map_err(|error| ImageError::io("write the descriptor", store, at, error))
        };
        if !change.tail.is_empty() {
            let (len, end) = (one_sector::len_of(text), one_sector::len_of(text) + change.tail.len());
            // A tail that reached the file in part must end at a byte 0, as the text did.
            let stale = len..text.len().min(end + 1);
            if text[stale.clone()].iter().any(|&byte| byte != 0) {
                text[stale.clone()].fill(0);
                write(&text[stale], len)?;
                barrier.sync("clear the space behind the descriptor")?;
            }
            write(&change.tail, len)?;
            text.resize(text.len().max(end), 0);
            text[len..end].copy_from_slice(&change.tail);
            barrier.sync("make the end of the descriptor durable")?;
        }
        write(&change.sector, change.start)?;
        barrier.sync("make the descriptor durable")?;
        text[change.start..][..change.sector.len()].copy_from_slice(&change.sector);
        Ok(())
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
        let value = format!("{cid:0digits$x}");
        if edit::value(text, CID).is_some_and(|old| old.len() != value.len()) {
            let change = one_sector::plan(text, 0, |lines| {
                let is_here = edit::line_start(&lines.concat(), CID).is_some();
                edit::set_line(lines, CID, Some(&value), "version");
                is_here
            });
            let change = change.filter(|change| self.has_room(text, change));
            let change = change.ok_or_else(|| self.refused(barrier, "a CID of 8 digits in this descriptor"))?;
            self.carry_out(text, &change, barrier)?;
        }
        let mut new = text.clone();
        edit::replace_value(&mut new, CID, &value);
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

/// A text whose sector has no room for a longer line.
struct NoRoom;

/// The change of the last extent's length; `None` if it has this length.
fn length_change(text: &[u8], sectors: u64) -> std::result::Result<Option<one_sector::Change>, NoRoom> {
    let range = edit::last_length(text).ok_or(NoRoom)?;
    let digits = sectors.to_string();
    if text[range.clone()] == *digits.as_bytes() {
        return Ok(None);
    }
    one_sector::replace(text, range, digits.as_bytes()).map(Some).ok_or(NoRoom)
}

/// The change of the cylinders that follows the size of the disk.
fn cylinders_change(text: &[u8], disk_sectors: u64) -> Option<one_sector::Change> {
    let number = |key: &str| edit::value(text, key)?.parse::<u64>().ok().filter(|&number| number > 0);
    let heads = number("ddb.geometry.heads")?;
    let most = if heads == IDE_HEADS { IDE_CYLINDERS_MAX } else { u16::MAX.into() };
    let digits = (disk_sectors / heads.checked_mul(number("ddb.geometry.sectors")?)?).clamp(1, most).to_string();
    one_sector::replace(text, edit::value_range(text, "ddb.geometry.cylinders")?, digits.as_bytes())
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
