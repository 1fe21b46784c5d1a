//! Changes of a qcow2's header, each in one write of its first sector, so that a power cut leaves
//! the old header or the new one.
//!
//! ```text
//!   settle_front       autoclear bits of what is not kept (bitmaps) are cleared, before any write;
//!                      that of a raw data file stays (data_file.rs)
//!   change_front       fields that name tables, or the size
//!   name_backing_file  the new name in a free part of the first cluster ─▶ sync
//!                      ─▶ sector 0: its place, and the name of its format ─▶ sync
//! ```
//!
//! Only the bytes of the fields change. The rest of the header may have what this program does not
//! know. The mutex `front` guards the header.

use super::{header::HeaderCluster, link, pages::SECTOR_BYTES, write::Writing};
use crate::{Format, ImageError, ParentLink, Result};
use diskwright_format::qcow2::{extensions::BACKING_FORMAT, features, header::BACKING_NAME_MAX_BYTES};
use std::sync::PoisonError;

/// Offset of the autoclear features in a header of version 3.
const AUTOCLEAR_AT: usize = 88;
/// Offset of the place of the backing file's name.
const BACKING_AT: usize = 8;
/// Offset of the length of that name.
const BACKING_LEN_AT: usize = 16;

impl Writing {
    /// Clears the autoclear bits of features that are not kept, durably. Bitmaps count as
    /// inconsistent from here on.
    pub(super) fn settle_front(&self) -> Result<()> {
        let mut front = self.front.lock().unwrap_or_else(PoisonError::into_inner);
        let header = &self.layout.front.header;
        let kept = header.features.autoclear & features::RAW_EXTERNAL_DATA;
        if !front.is_settled && header.version >= 3 && header.features.autoclear != kept {
            self.write_front(&[(AUTOCLEAR_AT, &kept.to_be_bytes())])?;
        }
        front.is_settled = true;
        Ok(())
    }

    /// Changes fields of the header, given by their offsets in its first sector. Durable on return.
    pub(super) fn change_front(&self, fields: &[(usize, &[u8])]) -> Result<()> {
        let _turn = self.front.lock().unwrap_or_else(PoisonError::into_inner);
        self.write_front(fields)
    }

    /// The same for a caller that holds `front`.
    fn write_front(&self, fields: &[(usize, &[u8])]) -> Result<()> {
        let mut sector = [0; SECTOR_BYTES as usize];
        self.store().read_at(&mut sector, 0).map_err(|error| self.io("read the qcow2 header", 0, error))?;
        for (at, field) in fields {
            sector[*at..at + field.len()].copy_from_slice(field);
        }
        self.store().write_at(&sector, 0).map_err(|error| self.io("write the qcow2 header", 0, error))?;
        Ok(self.barrier.sync("make the header durable")?)
    }

    /// The link to the backing file, if it was changed in this session.
    pub(super) fn changed_parent(&self) -> Option<ParentLink> {
        self.front.lock().unwrap_or_else(PoisonError::into_inner).parent.clone()
    }

    /// Names another backing file. A power cut leaves the old name or the new one.
    pub(super) fn name_backing_file(&self, link: &ParentLink) -> Result<()> {
        let bad = |what: String, hint: &str| ImageError::BadParentLink {
            path: self.store().name().to_owned(),
            what,
            hint: hint.into(),
        };
        let mut held = self.front.lock().unwrap_or_else(PoisonError::into_inner);
        let front = HeaderCluster::read(self.store())?;
        let Some(old) = front.header.backing_name else {
            return Err(bad("the image has no backing file".into(), "only a differencing image has one"));
        };
        let name = link::name_of(link).map_err(|what| bad(what, "use another path"))?;
        let format = link::format_name(link.format.unwrap_or(Format::Qcow2));
        let cluster_bytes = front.header.cluster_bytes();
        let extensions_end = u64::from(front.header.header_bytes) + front.extensions.len_bytes;
        let old_end = old.offset_bytes + old.len_bytes;
        let len_bytes = name.len() as u64;
        if len_bytes > u64::from(BACKING_NAME_MAX_BYTES) {
            return Err(bad(format!("a path of {len_bytes} bytes"), "use a path of at most 1023 bytes"));
        }
        // Not in sector 0, which is written once, and not where the old name is.
        let places = [extensions_end.max(SECTOR_BYTES), old_end.max(extensions_end).max(SECTOR_BYTES)];
        let is_free =
            |at: u64| at + len_bytes <= cluster_bytes && (at >= old_end || at + len_bytes <= old.offset_bytes);
        let Some(at) = places.into_iter().find(|&at| is_free(at)) else {
            let what = format!("its first cluster has no room for a path of {len_bytes} bytes");
            return Err(bad(what, "convert the disk to an image with larger clusters"));
        };
        let Some(field) = self.format_field(&front, format)? else {
            let what = "the image does not record the format of its backing file in its first sector";
            return Err(bad(what.into(), "record it with `qemu-img rebase -u` first"));
        };
        let written = self.store().write_at(name.as_bytes(), at);
        written.map_err(|error| self.io("write the name of the backing file", at, error))?;
        self.barrier.sync("make the name of the backing file durable")?;
        self.write_front(&[
            (BACKING_AT, &at.to_be_bytes()),
            (BACKING_LEN_AT, &(len_bytes as u32).to_be_bytes()),
            (field.0, &field.1),
        ])?;
        held.parent = link::link_of(self.store(), &HeaderCluster::read(self.store())?)?;
        Ok(())
    }

    /// The change of the extension that records the format of the backing file: its length and its
    /// padded data, which lie in the first sector. `None` if it has no room there.
    fn format_field(&self, front: &HeaderCluster, format: &str) -> Result<Option<(usize, Vec<u8>)>> {
        let mut sector = [0; SECTOR_BYTES as usize];
        self.store().read_at(&mut sector, 0).map_err(|error| self.io("read the qcow2 header", 0, error))?;
        let word =
            |at: usize| sector.get(at..at + 4).map(|word| u32::from_be_bytes([word[0], word[1], word[2], word[3]]));
        let mut at = front.header.header_bytes as usize;
        while let (Some(kind), Some(len)) = (word(at), word(at + 4)) {
            let room = (len as usize).next_multiple_of(8);
            if kind == BACKING_FORMAT {
                let fits = format.len() <= room && at + 8 + room <= sector.len();
                return Ok(fits.then(|| {
                    let mut field = (format.len() as u32).to_be_bytes().to_vec();
                    field.extend(format.as_bytes());
                    field.resize(4 + room, 0);
                    (at + 4, field)
                }));
            }
            match at.checked_add(8 + room) {
                Some(next) if kind != 0 && next < sector.len() => at = next,
                _ => break,
            }
        }
        Ok(None)
    }
}
