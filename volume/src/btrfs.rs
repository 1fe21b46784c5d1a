//! btrfs on a single device: the chunks of the device, and in each of them what the extent tree
//! does not list.
//!
//! ```text
//!   superblock.rs   features, log, checksum; the chunks that hold the chunk tree
//!      │
//!   chunks.rs       chunk tree ─▶ logical addresses to places on the device
//!      │
//!   tree.rs         a walk through a range of a tree; every block is verified
//!      │
//!      ▼ for each piece of a chunk, in the order of the device
//!   extents of the chunk (extent tree) ─▶ gaps ─▶ sink
//! ```
//!
//! btrfs writes no block in place, so the trees that the superblock points to are consistent after
//! a crash too; only a log tree (of fsync) must not be there. The free-space tree says the same as
//! the extent tree and is not read: the extent tree is always valid. It is trusted only if the sum
//! of the extents of each block group equals the group's own count, and the sum over all groups
//! equals the count in the superblock.

mod chunk_tree;
mod chunks;
mod key;
mod superblock;
mod tree;

use crate::{
    bytes::le64,
    identity::Identity,
    read::Window,
    reason::{LeftAlone, Stop},
    sink::Sink,
};
use chunks::Chunk;
use key::{Key, Tree};
use std::ops::Range;
use superblock::Superblock;
use tree::Reader;

const EXTENT_TREE: u64 = 2;
const BLOCK_GROUP_TREE: u64 = 11;
const ROOT_ITEM: u8 = 132;
const EXTENT_ITEM: u8 = 168;
const METADATA_ITEM: u8 = 169;
const BLOCK_GROUP_ITEM: u8 = 192;

/// No chunk lies before this place.
const FIRST_BYTES: u64 = 1 << 20;
/// Places of the superblock's copies, for each of which 64 KiB are kept free of data.
const COPIES: [u64; 3] = [64 << 10, 64 << 20, 256 << 30];
const COPY_BYTES: u64 = 64 << 10;

/// Label and UUID, as far as the superblock can be read.
pub(crate) fn identify(window: &Window<'_>) -> Option<Identity> {
    superblock::identify(window)
}

/// First byte after the device, as btrfs sees it.
pub(crate) fn end_bytes(window: &Window<'_>) -> Result<u64, LeftAlone> {
    Ok(Superblock::read(window)?.device_bytes)
}

/// Sends what is free on the device to `sink`.
pub(crate) fn scan(window: &Window<'_>, sink: &mut Sink<'_>) -> Result<(), Stop> {
    let superblock = Superblock::read(window)?;
    let chunks = chunk_tree::read(window, &superblock)?;
    let reader = Reader { window, superblock: &superblock, chunks: &chunks };
    let extents = find_tree(&reader, EXTENT_TREE)?;
    let groups = if superblock.has_block_group_tree { find_tree(&reader, BLOCK_GROUP_TREE)? } else { extents };
    check_sums(&reader, &extents, &groups)?;
    let mut at = FIRST_BYTES;
    for piece in chunks.pieces() {
        free_beside_superblocks(at..piece.place_bytes, sink)?;
        let chunk = piece.chunk;
        let moved = |logical: u64| logical - chunk.logical_bytes + piece.place_bytes;
        let mut end = chunk.logical_bytes;
        let mut stop = Ok(());
        each_extent(&reader, &extents, chunk, &mut |extent| {
            if stop.is_ok() {
                stop = free_beside_superblocks(moved(end)..moved(extent.start), sink);
            }
            end = extent.end;
        })?;
        stop?;
        free_beside_superblocks(moved(end)..moved(chunk.end_bytes()), sink)?;
        at = moved(chunk.end_bytes());
    }
    free_beside_superblocks(at..superblock.device_bytes, sink)
}

/// The root of a tree, as the tree of roots has it.
fn find_tree(reader: &Reader<'_>, number: u64) -> Result<Tree, LeftAlone> {
    let mut found = None;
    let root = reader.superblock.root;
    reader.walk(&root, number..number + 1, &mut |key, item| {
        if key.kind == ROOT_ITEM && item.len() >= 239 {
            let (generation, block, level) = (le64(item, 160), le64(item, 176), item[238]);
            found = Some(Tree { owner: number, block, level, generation });
        }
        Ok(())
    })?;
    found.ok_or_else(|| LeftAlone::damaged(format!("btrfs has no tree {number}")))
}

/// Compares the extents of each block group with the group's count.
fn check_sums(reader: &Reader<'_>, extents: &Tree, groups: &Tree) -> Result<(), LeftAlone> {
    let mut total = 0_u64;
    for chunk in reader.chunks.all() {
        let mut claimed = None;
        reader.walk(groups, chunk.logical_bytes..chunk.logical_bytes + 1, &mut |key, item| {
            if key.kind == BLOCK_GROUP_ITEM && key.offset == chunk.len_bytes {
                claimed = Some(le64(item, 0));
            }
            Ok(())
        })?;
        let mut counted = 0_u64;
        each_extent(reader, extents, chunk, &mut |extent| counted += extent.end - extent.start)?;
        if claimed != Some(counted) {
            let start = chunk.logical_bytes;
            return Err(LeftAlone::damaged(format!(
                "block group {start} of btrfs: {counted} bytes are in use, and it says {claimed:?}"
            )));
        }
        total += counted;
    }
    let claimed = reader.superblock.used_bytes;
    if total != claimed {
        return Err(LeftAlone::damaged(format!("btrfs: {total} bytes are in use, and the superblock says {claimed}")));
    }
    Ok(())
}

/// The extents in a chunk, in the order of their logical addresses; they must not overlap.
fn each_extent(
    reader: &Reader<'_>,
    extents: &Tree,
    chunk: &Chunk,
    each: &mut dyn FnMut(Range<u64>),
) -> Result<(), LeftAlone> {
    let mut end = chunk.logical_bytes;
    reader.walk(extents, chunk.logical_bytes..chunk.end_bytes(), &mut |key: Key, _| {
        let len_bytes = match key.kind {
            EXTENT_ITEM => key.offset,
            METADATA_ITEM => reader.superblock.node_bytes as u64,
            _ => return Ok(()),
        };
        let after = key.object.checked_add(len_bytes).filter(|after| *after <= chunk.end_bytes());
        let Some(after) = after.filter(|_| key.object >= end && len_bytes > 0) else {
            return Err(LeftAlone::damaged(format!("the extent {} of btrfs overlaps another one", key.object)));
        };
        end = after;
        each(key.object..after);
        Ok(())
    })
}

/// Sends a range without the places of the superblock's copies.
fn free_beside_superblocks(range: Range<u64>, sink: &mut Sink<'_>) -> Result<(), Stop> {
    let mut at = range.start.max(FIRST_BYTES);
    for copy in COPIES {
        if copy < range.end && copy + COPY_BYTES > at {
            if at < copy {
                sink.free(at..copy)?;
            }
            at = copy + COPY_BYTES;
        }
    }
    if at < range.end { sink.free(at..range.end) } else { Ok(()) }
}
