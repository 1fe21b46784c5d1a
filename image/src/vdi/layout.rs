//! Header and places of a VDI, validated. A [`Layout`] is as of the open: while the image is open
//! for writing, the disk may become larger and the file longer (`write.rs`). Only the places of map
//! and data follow (`longer_map.rs`).

use super::corrupt;
use crate::{
    Format, ParentLink,
    error::{ImageError, Result},
    identity::LinkageId,
};
use diskwright_format::{
    vdi::{HEADER_BYTES, VdiEntry, VdiHeader, VdiKind},
    vhdx::Invalid,
};
use diskwright_store::{
    Store,
    sync::atomic::{AtomicU64, Ordering},
};

/// The guest's sector in bytes.
pub(super) const SECTOR_BYTES: u64 = 512;

/// A VDI whose header was read.
#[derive(Debug, Clone)]
pub(super) struct Layout {
    pub header: VdiHeader,
    /// Size of the disk in bytes, rounded up to a sector.
    pub size_bytes: u64,
    /// Length of the file in bytes.
    pub file_bytes: u64,
    places: Places,
}

/// Offsets of the block map and of the data. They change under the state mutex.
#[derive(Debug)]
struct Places {
    map_bytes: AtomicU64,
    data_bytes: AtomicU64,
}

impl Clone for Places {
    fn clone(&self) -> Self {
        let copy = |value: &AtomicU64| AtomicU64::new(value.load(Ordering::Acquire));
        Self { map_bytes: copy(&self.map_bytes), data_bytes: copy(&self.data_bytes) }
    }
}

impl Layout {
    /// Reads the header.
    ///
    /// # Errors
    /// `NotAnImage` without the signature; `Unsupported` for an undo image; `Corrupt`; `Io`.
    pub fn read(store: &dyn Store) -> Result<Self> {
        let io = |doing: &'static str| move |error| ImageError::io(doing, store, 0, error);
        let file_bytes = store.len_bytes().map_err(io("get the length of the file"))?;
        let mut bytes = vec![0; file_bytes.min(HEADER_BYTES as u64) as usize];
        store.read_at(&mut bytes, 0).map_err(io("read the VDI header"))?;
        if !VdiHeader::has_signature(&bytes) {
            return Err(ImageError::NotAnImage {
                path: store.name().to_owned(),
                found: "the file has no VDI signature at offset 64".into(),
                expected: "0xbeda107f".into(),
            });
        }
        let header = VdiHeader::parse(&bytes).map_err(|invalid| corrupt(store, 0, invalid))?;
        if header.kind == VdiKind::Undo {
            return Err(ImageError::Unsupported {
                path: store.name().to_owned(),
                what: "a VDI undo image".into(),
                hint: "merge it with VirtualBox".into(),
            });
        }
        let fail = |at, found: String, expected: String| {
            Err(corrupt(store, 0, Invalid::new("VDI header", at, found, expected)))
        };
        let map_end = u64::from(header.map_offset_bytes) + header.map_bytes();
        if map_end > file_bytes || map_end > u64::from(header.data_offset_bytes) {
            let found = format!("a block map from {} to {map_end}", header.map_offset_bytes);
            let data = header.data_offset_bytes;
            return fail(0x154, found, format!("one in the file of {file_bytes} bytes, before the data at {data}"));
        }
        let Some(size_bytes) = header.size_bytes.checked_next_multiple_of(SECTOR_BYTES) else {
            return fail(0x170, format!("a disk of {} bytes", header.size_bytes), "at most 2^64 - 512".into());
        };
        let places = Places {
            map_bytes: AtomicU64::new(header.map_offset_bytes.into()),
            data_bytes: AtomicU64::new(header.data_offset_bytes.into()),
        };
        Ok(Self { header, size_bytes, file_bytes, places })
    }

    /// Offset of the block map.
    pub fn map_bytes(&self) -> u64 {
        self.places.map_bytes.load(Ordering::Acquire)
    }

    /// Offset of the data: of space 0.
    pub fn data_bytes(&self) -> u64 {
        self.places.data_bytes.load(Ordering::Acquire)
    }

    /// Continues with a map and data at other places. The caller holds the state mutex.
    pub fn move_to(&self, map_bytes: u64, data_bytes: u64) {
        self.places.map_bytes.store(map_bytes, Ordering::Release);
        self.places.data_bytes.store(data_bytes, Ordering::Release);
    }

    /// Offset of the payload of a space in the file.
    pub fn payload_bytes(&self, space: u32) -> u64 {
        self.data_bytes() + u64::from(space) * self.header.space_bytes() + u64::from(self.header.extra_bytes)
    }

    /// Why the image cannot be written; `None` if it can.
    pub fn refusal(&self, store: &dyn Store) -> Option<ImageError> {
        (self.header.extra_bytes > 0).then(|| ImageError::Unsupported {
            path: store.name().to_owned(),
            what: format!("writing to a VDI with {} extra bytes before each block", self.header.extra_bytes),
            hint: "open it read-only, or convert it".into(),
        })
    }

    /// Bytes by which the end of the file cuts the last space.
    pub fn missing_bytes(&self) -> u64 {
        let data_bytes = self.file_bytes.saturating_sub(self.header.data_offset_bytes.into());
        data_bytes.checked_next_multiple_of(self.header.space_bytes()).map_or(0, |end| end - data_bytes)
    }

    /// Lengthens a file whose last space is cut to the end of that space.
    ///
    /// # Errors
    /// `Io`.
    pub fn fill_last_space(&mut self, store: &dyn Store) -> Result<()> {
        let missing_bytes = self.missing_bytes();
        if missing_bytes > 0 {
            let end = self.file_bytes + missing_bytes;
            let filled = store.set_len(end);
            filled.map_err(|error| ImageError::io("lengthen the file to its last block", store, end, error))?;
            self.file_bytes = end;
        }
        Ok(())
    }

    /// Blocks of the disk. The map may have more entries.
    pub fn blocks(&self) -> u64 {
        self.size_bytes.div_ceil(self.header.block_bytes.into())
    }

    /// Offset of an entry in the file.
    pub fn entry_at(&self, block: u64) -> u64 {
        self.map_bytes() + block * 4
    }

    /// Offset of a block's payload by the number of its space. The last space of a file may be cut.
    pub fn payload(&self, space: u32) -> Result<u64, Invalid> {
        let offset_bytes = self.payload_bytes(space);
        if offset_bytes < self.file_bytes {
            return Ok(offset_bytes);
        }
        Err(self.outside(space, self.file_bytes))
    }

    /// What is wrong with an entry that leads out of a file of this length.
    pub fn outside(&self, space: u32, file_bytes: u64) -> Invalid {
        let offset_bytes = self.payload_bytes(space);
        let expected = format!("an offset in the file of {file_bytes} bytes");
        Invalid::new("block map entry", 0, format!("space {space} at offset {offset_bytes}"), expected)
    }

    /// Reads entries of the map.
    ///
    /// # Errors
    /// `Io`.
    pub fn read_words(&self, store: &dyn Store, first: u64, count: usize) -> Result<Vec<u32>> {
        let (place, mut bytes) = (self.entry_at(first), vec![0; count * 4]);
        store.read_at(&mut bytes, place).map_err(|error| ImageError::io("read the block map", store, place, error))?;
        Ok(bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect())
    }

    /// Calls `each` for the entries `first .. end` that are not free. Holes of the file are read.
    ///
    /// # Errors
    /// `Io`; errors of `each`.
    pub fn each_entry(
        &self,
        store: &dyn Store,
        first: u64,
        end: u64,
        each: &mut dyn FnMut(u64, VdiEntry) -> Result<bool>,
    ) -> Result<()> {
        const PIECE_ENTRIES: u64 = 4096;
        let mut at = first;
        while at < end {
            let count = (end - at).min(PIECE_ENTRIES);
            for (block, word) in (at..).zip(self.read_words(store, at, count as usize)?) {
                let entry = VdiEntry::parse(word);
                if entry != VdiEntry::Free && !each(block, entry)? {
                    return Ok(());
                }
            }
            at += count;
        }
        Ok(())
    }
}

/// The parent that the VDI in `store` names.
///
/// # Errors
/// As [`super::open`].
pub fn parent_link(store: &dyn Store) -> Result<Option<ParentLink>> {
    let header = Layout::read(store)?.header;
    Ok(link_of(&header))
}

/// Doubt about an image that is not a child but names a parent; `None` for a sound one.
pub(super) fn stray_parent(header: &VdiHeader) -> Option<String> {
    (header.kind != VdiKind::Differencing && !header.parent_id.is_nil()).then(|| {
        format!(
            "The header says that this disk is not differencing, but it names the parent {}. Blocks that this file does not have read as zeros.",
            header.parent_id
        )
    })
}

/// The link to the parent: its ids, and no path.
pub(super) fn link_of(header: &VdiHeader) -> Option<ParentLink> {
    (header.kind == VdiKind::Differencing).then(|| ParentLink {
        file_id: Some(header.parent_id),
        linkage: Some(LinkageId::Guid(header.parent_modify_id)),
        linkage2: header.second_parent_modify_id.map(LinkageId::Guid),
        format: Some(Format::Vdi),
        ..ParentLink::default()
    })
}
