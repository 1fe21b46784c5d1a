//! The chunk tree, which the chunks in the superblock lead to.

use super::{
    chunks::{Chunks, parse_chunk},
    superblock::Superblock,
    tree::Reader,
};
use crate::{read::Window, reason::LeftAlone};

const CHUNK_ITEM: u8 = 228;
/// Object that all chunk items belong to.
const CHUNK_OBJECT: u64 = 256;

/// Reads the chunk tree through the system chunks of the superblock.
pub(super) fn read(window: &Window<'_>, superblock: &Superblock) -> Result<Chunks, LeftAlone> {
    let system = Chunks::system(superblock)?;
    let reader = Reader { window, superblock, chunks: &system };
    let mut chunks = Vec::new();
    reader.walk(&superblock.chunk_root, CHUNK_OBJECT..CHUNK_OBJECT + 1, &mut |key, item| {
        if key.kind == CHUNK_ITEM {
            chunks.push(parse_chunk(key.offset, item, superblock)?);
        }
        Ok(())
    })?;
    let chunks = Chunks::ordered(chunks)?;
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
