//! Trees: a walk through a range of objects, in the order of the keys.
//!
//! Each block is verified: checksum, UUID, own address, owner, level, and the generation that its
//! parent names. Keys must ascend strictly over the whole walk, so that blocks that point to one
//! another end it.

use super::{
    chunks::Chunks,
    key::{KEY_BYTES, Key, Tree},
    superblock::Superblock,
};
use crate::{
    bytes::{get, le32, le64},
    read::Window,
    reason::LeftAlone,
};
use std::ops::Range;

const HEADER_BYTES: usize = 101;
const ITEM_BYTES: usize = KEY_BYTES + 8;
const POINTER_BYTES: usize = KEY_BYTES + 16;
const LEVEL_MAX: u8 = 7;

/// Reads trees.
pub(super) struct Reader<'a> {
    pub(super) window: &'a Window<'a>,
    pub(super) superblock: &'a Superblock,
    pub(super) chunks: &'a Chunks,
}

/// Takes a key and its item.
type EachItem<'a> = &'a mut dyn FnMut(Key, &[u8]) -> Result<(), LeftAlone>;

impl Reader<'_> {
    /// Passes the items of the objects in `objects` to `each`.
    pub(super) fn walk(&self, tree: &Tree, objects: Range<u64>, each: EachItem<'_>) -> Result<(), LeftAlone> {
        if tree.level > LEVEL_MAX {
            return Err(LeftAlone::damaged(format!("a tree of btrfs with {} levels", tree.level)));
        }
        self.block(tree, true, &objects, &mut None, each)
    }

    /// A block and all below it that the range touches.
    fn block(
        &self,
        block: &Tree,
        is_root: bool,
        objects: &Range<u64>,
        last: &mut Option<Key>,
        each: EachItem<'_>,
    ) -> Result<(), LeftAlone> {
        let wrong = |what: &str| LeftAlone::damaged(format!("block {} of a tree of btrfs {what}", block.block));
        let node_bytes = self.superblock.node_bytes;
        let raw = self.window.bytes(self.chunks.place(block.block, node_bytes as u64)?, node_bytes)?;
        let header = (get::<16>(&raw, 32), le64(&raw, 48), le64(&raw, 80), le64(&raw, 88), raw[100]);
        if crc32c::crc32c(&raw[32..]) != le32(&raw, 0) {
            return Err(wrong("has a wrong checksum"));
        }
        if header != (self.superblock.uuid, block.block, block.generation, block.owner, block.level) {
            return Err(wrong("is not the one that was looked for"));
        }
        let count = le32(&raw, 96) as usize;
        let entry_bytes = if block.level == 0 { ITEM_BYTES } else { POINTER_BYTES };
        if count > (node_bytes - HEADER_BYTES) / entry_bytes || (count == 0 && !(is_root && block.level == 0)) {
            return Err(wrong("has an impossible number of items"));
        }
        let entry = |index: usize| &raw[HEADER_BYTES + index * entry_bytes..HEADER_BYTES + (index + 1) * entry_bytes];
        if (1..count).any(|index| Key::parse(entry(index - 1)) >= Key::parse(entry(index))) {
            return Err(wrong("has keys out of order"));
        }
        for index in 0..count {
            let entry_raw = entry(index);
            let key = Key::parse(entry_raw);
            if key.object >= objects.end {
                break;
            }
            if block.level > 0 {
                // What lies below ends at the next key.
                let before = index + 1 < count
                    && Key::parse(entry(index + 1)) <= Key { object: objects.start, kind: 0, offset: 0 };
                if !before {
                    let (child, generation) = (le64(entry_raw, KEY_BYTES), le64(entry_raw, KEY_BYTES + 8));
                    let child = Tree { block: child, level: block.level - 1, generation, ..*block };
                    self.block(&child, false, objects, last, each)?;
                }
                continue;
            }
            if last.is_some_and(|last| last >= key) {
                return Err(wrong("repeats keys of the block before"));
            }
            *last = Some(key);
            if key.object < objects.start {
                continue;
            }
            let (at, len) = (le32(entry_raw, KEY_BYTES) as usize, le32(entry_raw, KEY_BYTES + 4) as usize);
            let item = raw[HEADER_BYTES..].get(at..at.saturating_add(len));
            each(key, item.ok_or_else(|| wrong("has an item outside of it"))?)?;
        }
        Ok(())
    }
}
