//! The chunks: where logical addresses lie on the device.

use super::{
    chunk_item_bytes, parse_chunk,
    superblock::Superblock,
    tree::{KEY_BYTES, Key, Reader},
};
use crate::{bytes::le16, read::Window, reason::LeftAlone};

const CHUNK_ITEM: u8 = 228;
/// Object that all chunk items belong to.
const CHUNK_OBJECT: u64 = 256;

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
    /// Reads the chunk tree through the system chunks of the superblock.
    pub(super) fn read(window: &Window<'_>, superblock: &Superblock) -> Result<Self, LeftAlone> {
        let system = Self::system(superblock)?;
        let reader = Reader { window, superblock, chunks: &system };
        let mut chunks = Vec::new();
        reader.walk(&superblock.chunk_root, CHUNK_OBJECT..CHUNK_OBJECT + 1, &mut |key, item| {
            if key.kind == CHUNK_ITEM {
                chunks.push(parse_chunk(key.offset, item, superblock)?);
            }
            Ok(())
        })?;
        let chunks = Self::ordered(chunks)?;
        let mut end_bytes = 0;
        let mut used_bytes = 0;
        for piece in chunks.pieces() {
            if piece.place_bytes < end_bytes {
                return Err(LeftAlone::damaged("two chunks of btrfs overlap on the device"));
            }
            end_bytes = piece.place_bytes + piece.chunk.len_bytes;
            used_bytes += piece.chunk.len_bytes;
        }
        if used_bytes != superblock.device_used_bytes {
            let claimed = superblock.device_used_bytes;
            return Err(LeftAlone::damaged(format!(
                "the chunks of btrfs take {used_bytes} bytes, and the superblock says {claimed}"
            )));
        }
        Ok(chunks)
    }

    /// The chunks in the superblock itself.
    fn system(superblock: &Superblock) -> Result<Self, LeftAlone> {
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

    fn ordered(mut chunks: Vec<Chunk>) -> Result<Self, LeftAlone> {
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
