//! The chunks: where logical addresses lie on the device.

use super::{
    key::{KEY_BYTES, Key},
    superblock::Superblock,
};
use crate::{
    bytes::{le16, le32, le64},
    reason::LeftAlone,
};

/// A range of logical addresses, once or twice on the device.
#[derive(Debug, Clone)]
pub(super) struct Chunk {
    pub(super) logical_bytes: u64,
    pub(super) len_bytes: u64,
    pub(super) places: Vec<u64>,
}

impl Chunk {
    pub(super) fn end_bytes(&self) -> u64 {
        self.logical_bytes + self.len_bytes
    }
}

/// One copy of a chunk on the device.
#[derive(Debug)]
pub(super) struct Piece<'a> {
    pub(super) place_bytes: u64,
    pub(super) chunk: &'a Chunk,
}

/// All chunks, by logical address.
#[derive(Debug)]
pub(super) struct Chunks(Vec<Chunk>);

impl Chunks {
    /// The chunks in the superblock itself.
    pub(super) fn system(superblock: &Superblock) -> Result<Self, LeftAlone> {
        let mut rest = superblock.system_chunks.as_slice();
        let mut chunks = Vec::new();
        while !rest.is_empty() {
            let wrong = || LeftAlone::damaged("the superblock of btrfs has a system chunk of unknown shape");
            let (key, item) = rest.split_at_checked(KEY_BYTES).ok_or_else(wrong)?;
            let len = chunk_item_bytes(le16(item, 44).into());
            let item = item.get(..len).ok_or_else(wrong)?;
            chunks.push(parse_chunk(Key::parse(key).offset, item, superblock)?);
            rest = &rest[KEY_BYTES + len..];
        }
        Self::ordered(chunks)
    }

    pub(super) fn ordered(mut chunks: Vec<Chunk>) -> Result<Self, LeftAlone> {
        chunks.sort_by_key(|chunk| chunk.logical_bytes);
        if chunks.windows(2).any(|pair| pair[0].end_bytes() > pair[1].logical_bytes) {
            return Err(LeftAlone::damaged("two chunks of btrfs have the same addresses"));
        }
        Ok(Self(chunks))
    }

    /// All chunks by logical address.
    pub(super) fn all(&self) -> &[Chunk] {
        &self.0
    }

    /// All copies of all chunks, in the order of the device.
    pub(super) fn pieces(&self) -> Vec<Piece<'_>> {
        let mut all = Vec::new();
        for chunk in &self.0 {
            all.extend(chunk.places.iter().map(|place| Piece { place_bytes: *place, chunk }));
        }
        all.sort_by_key(|piece| piece.place_bytes);
        all
    }

    /// Place on the device of `len` bytes at a logical address, in the first copy.
    pub(super) fn place(&self, logical_bytes: u64, len: u64) -> Result<u64, LeftAlone> {
        let index = self.0.partition_point(|chunk| chunk.logical_bytes <= logical_bytes);
        let chunk = index.checked_sub(1).map(|index| &self.0[index]);
        chunk
            .filter(|chunk| logical_bytes.checked_add(len).is_some_and(|end| end <= chunk.end_bytes()))
            .and_then(|chunk| Some(chunk.places.first()? + (logical_bytes - chunk.logical_bytes)))
            .ok_or_else(|| LeftAlone::damaged(format!("no chunk of btrfs has the address {logical_bytes}")))
    }
}

/// Length of a chunk's description with so many stripes.
const fn chunk_item_bytes(stripes: usize) -> usize {
    48 + 32 * stripes
}

/// Reads a chunk from its description.
pub(super) fn parse_chunk(logical_bytes: u64, item: &[u8], superblock: &Superblock) -> Result<Chunk, LeftAlone> {
    let wrong = |what: &str| LeftAlone::damaged(format!("chunk {logical_bytes} of btrfs {what}"));
    let stripes = usize::from(le16(item, 44));
    let (len_bytes, flags) = (le64(item, 0), le64(item, 24));
    // RAID0, RAID1, RAID10, RAID5, RAID6, RAID1C3, RAID1C4 and what is not known yet.
    if flags & !0x27 != 0 || stripes != if flags & 0x20 != 0 { 2 } else { 1 } {
        return Err(LeftAlone::unsupported(format!("a chunk of btrfs with profile {flags:#x} in {stripes} stripes")));
    }
    if item.len() < chunk_item_bytes(stripes) || len_bytes == 0 || logical_bytes.checked_add(len_bytes).is_none() {
        return Err(wrong("has an impossible length"));
    }
    let mut places = Vec::new();
    for stripe in 0..stripes {
        let at = chunk_item_bytes(stripe);
        let (device, place_bytes) = (le64(item, at), le64(item, at + 8));
        if device != superblock.device || le32(item, at + 16) != superblock.device_uuid_head {
            return Err(wrong("lies on another device"));
        }
        if place_bytes.checked_add(len_bytes).is_none_or(|end| end > superblock.device_bytes) {
            return Err(wrong("reaches beyond the device"));
        }
        places.push(place_bytes);
    }
    Ok(Chunk { logical_bytes, len_bytes, places })
}
