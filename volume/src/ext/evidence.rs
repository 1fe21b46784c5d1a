//! Structures of ext4 that state their place (see [`crate::evidence`]).
//!
//! ```text
//!   superblock or a copy ─▶ group descriptors or copies ─▶ inode tables ─▶ directories, trees
//!          │                        │                          │                 │
//!   group number            bitmaps by checksum          inode numbers     blocks by checksum
//! ```
//!
//! A lone inode states its number by its checksum (`reverse_crc.rs`).

use super::{
    groups::{Descriptor, descriptor_block, group_blocks},
    reverse_crc::{crc_before, number_of},
    superblock::{Checksums, Superblock},
};
use crate::{
    bytes::{crc32c_raw, le16, le32},
    evidence::Metered,
    read::Window,
    sighting::{EachSighting, PROOF, Sighting},
};
use std::{collections::HashMap, ops::Range};

const SUPERBLOCK_BYTES: usize = 1024;
/// Groups whose descriptors are read.
const GROUPS_MAX: u64 = 1 << 20;
/// Groups with copies of a superblock that are asked when the first one is lost.
const COPY_GROUPS: [u64; 7] = [1, 3, 5, 7, 9, 25, 27];
const JOURNAL_MAGIC: [u8; 4] = [0xc0, 0x3b, 0x39, 0x98];
const EXTENT_MAGIC: u16 = 0xf30a;
const FLAG_EXTENTS: u32 = 0x8_0000;
const INODE_UNINIT: u16 = 0x1;

/// What is known of one file system.
#[derive(Debug)]
pub(crate) struct Evidence {
    start_bytes: u64,
    fs: Superblock,
    raw: Vec<u8>,
    seed: Option<u32>,
    inodes: u64,
    inodes_per_group: u64,
    inode_bytes: usize,
    /// First block of the inode table, by group.
    tables: HashMap<u64, u64>,
    /// Checksum of a bitmap to its block; `None` if several have it.
    bitmaps: HashMap<(Bitmap, u32), Option<u64>>,
    /// State of the checksum after number and generation of a directory, to its first blocks.
    directories: HashMap<u32, Directory>,
    /// The same state, with depth and first logical block of a node of an extent tree, to its
    /// block.
    nodes: HashMap<(u32, u16, u32), u64>,
    journal: Vec<Range<u64>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Bitmap {
    Blocks,
    Inodes,
}

#[derive(Debug, Clone, Copy)]
struct Directory {
    first_block: u64,
    has_one_block: bool,
}

/// Offset of the first byte of this superblock from the beginning of its file system. `None` if
/// these bytes are no superblock whose checksum is right.
pub(crate) fn start_by_superblock(bytes: &[u8]) -> Option<u64> {
    let raw = bytes.get(..SUPERBLOCK_BYTES)?;
    if raw[0x38..0x3a] != [0x53, 0xef] {
        return None;
    }
    let (fs, group) = Superblock::of_copy(raw, u64::MAX).ok()?;
    // Without a checksum only the usual geometry counts.
    if fs.checksums == Checksums::None && fs.blocks_per_group != 8 * fs.block_bytes {
        return None;
    }
    place_of_copy(&fs, group)
}

/// A first superblock with a checksum: its offset in the file system, the number of blocks, and
/// their size in bytes.
pub(crate) fn first_superblock(bytes: &[u8]) -> Option<(u64, u64, u64)> {
    let raw = bytes.get(..SUPERBLOCK_BYTES).filter(|raw| raw[0x38..0x3a] == [0x53, 0xef])?;
    let (fs, group) = Superblock::of_copy(raw, u64::MAX).ok()?;
    let is_first = group == 0 && matches!(fs.checksums, Checksums::Crc32c { .. });
    is_first.then_some((1024, fs.blocks, fs.block_bytes))
}

/// Offset of the superblock of a group in the file system.
fn place_of_copy(fs: &Superblock, group: u64) -> Option<u64> {
    if group == 0 {
        return Some(1024);
    }
    (group < fs.groups && fs.has_superblock(group)).then(|| group_blocks(fs, group).start * fs.block_bytes)
}

impl Evidence {
    /// Learns what can be learned of the file system in this window. `copy` is the place of a
    /// superblock, besides the usual ones. `meter` is the disk of the window.
    pub(crate) fn learn(window: &Window<'_>, start_bytes: u64, copy: Option<u64>, meter: &Metered<'_>) -> Option<Self> {
        let raw = find_superblock(window, copy)?;
        let (fs, _) = Superblock::of_copy(&raw, window.size_bytes()).ok()?;
        let seed = match fs.checksums {
            Checksums::Crc32c { seed } => Some(seed),
            _ => None,
        };
        let inode_bytes = if le32(&raw, 0x4c) == 0 { 128 } else { usize::from(le16(&raw, 0x58)) };
        let mut found = Self {
            start_bytes,
            inodes: u64::from(le32(&raw, 0)),
            inodes_per_group: u64::from(le32(&raw, 0x28)),
            inode_bytes,
            journal: journal_of(&fs, &raw),
            fs,
            raw,
            seed,
            tables: HashMap::new(),
            bitmaps: HashMap::new(),
            directories: HashMap::new(),
            nodes: HashMap::new(),
        };
        if let Some(seed) = seed {
            found.learn_groups(window, seed, meter);
        }
        Some(found)
    }

    /// First byte of the file system on the disk.
    pub(crate) fn start_bytes(&self) -> u64 {
        self.start_bytes
    }

    /// Reads the descriptors of all groups, each from the first copy in which it is right. Bitmaps
    /// are known only by the first table, as the copies are not kept up to date.
    fn learn_groups(&mut self, window: &Window<'_>, seed: u32, meter: &Metered<'_>) {
        let fs = &self.fs;
        let per_block = fs.block_bytes / fs.descriptor_bytes as u64;
        let copies: Vec<u64> =
            (1..fs.groups.min(GROUPS_MAX)).filter(|&group| fs.has_superblock(group)).take(16).collect();
        let mut table = vec![0; fs.block_bytes as usize];
        let mut used = Vec::new();
        for index in 0..fs.groups.min(GROUPS_MAX).div_ceil(per_block) {
            let first = descriptor_block(fs, index, per_block);
            let later = copies.iter().filter(|_| fs.first_meta_bg.is_none());
            let later = later.map(|&group| group_blocks(fs, group).start + 1 + index);
            for (copy, block) in std::iter::once(first).chain(later).enumerate() {
                if meter.is_spent() {
                    return;
                }
                if block >= fs.blocks || window.read(block * fs.block_bytes, &mut table).is_err() {
                    continue;
                }
                let mut missing = false;
                for (within, raw) in table.chunks_exact(fs.descriptor_bytes).enumerate() {
                    let group = index * per_block + within as u64;
                    if group >= fs.groups || self.tables.contains_key(&group) {
                        continue;
                    }
                    let Ok(descriptor) = Descriptor::parse(fs, group, raw) else {
                        missing = true;
                        continue;
                    };
                    if descriptor.inode_table >= fs.blocks || !meter.may_remember() {
                        continue;
                    }
                    self.tables.insert(group, descriptor.inode_table);
                    if copy > 0 {
                        // A copy does not say how many inodes of the group were ever used.
                        used.push((group, descriptor.inode_table, self.inodes_per_group));
                        continue;
                    }
                    let unused = u64::from(le16(raw, 0x1c)) | u64::from(le16(raw, 0x32)) << 16;
                    let uninit = descriptor.flags & INODE_UNINIT != 0;
                    let count = if uninit { 0 } else { self.inodes_per_group.saturating_sub(unused) };
                    used.push((group, descriptor.inode_table, count));
                    if fs.descriptor_bytes >= 64 {
                        let inode_sum = u32::from(le16(raw, 0x1a)) | u32::from(le16(raw, 0x3a)) << 16;
                        let both = [
                            (Bitmap::Blocks, descriptor.bitmap_checksum, descriptor.block_bitmap),
                            (Bitmap::Inodes, inode_sum, descriptor.inode_bitmap),
                        ];
                        for (kind, sum, block) in
                            both.into_iter().filter(|(_, sum, _)| *sum != 0 && meter.may_remember())
                        {
                            self.bitmaps.entry((kind, sum)).and_modify(|at| *at = None).or_insert(Some(block));
                        }
                    }
                }
                if !missing {
                    break;
                }
            }
        }
        for (group, table, count) in used {
            self.learn_inodes(window, seed, (group, table, count), meter);
        }
    }

    /// Reads the inodes of a group for directories and extent trees.
    fn learn_inodes(
        &mut self,
        window: &Window<'_>,
        seed: u32,
        (group, table, count): (u64, u64, u64),
        meter: &Metered<'_>,
    ) {
        let block_bytes = self.fs.block_bytes as usize;
        let per_block = (block_bytes / self.inode_bytes) as u64;
        let mut bytes = vec![0; block_bytes];
        for index in 0..count.div_ceil(per_block) {
            if meter.is_spent() || table + index >= self.fs.blocks {
                return;
            }
            if window.read((table + index) * self.fs.block_bytes, &mut bytes).is_err() {
                continue;
            }
            for (slot, raw) in bytes.chunks_exact(self.inode_bytes).enumerate() {
                let number = group * self.inodes_per_group + index * per_block + slot as u64 + 1;
                let is_directory = le16(raw, 0) & 0xf000 == 0x4000;
                let has_tree = le32(raw, 0x20) & FLAG_EXTENTS != 0 && le16(raw, 0x28) == EXTENT_MAGIC;
                let depth = le16(raw, 0x2e);
                if !has_tree || (!is_directory && depth == 0) || number_of(seed, raw) != Some(number as u32) {
                    continue;
                }
                let state = crc32c_raw(crc32c_raw(seed, &(number as u32).to_le_bytes()), &raw[0x64..0x68]);
                if depth > 0 {
                    self.learn_nodes(window, state, &raw[0x28..0x64], 0, meter);
                } else if let Some(directory) = directory_of(&raw[0x28..0x64])
                    && meter.may_remember()
                {
                    self.directories.insert(state, directory);
                }
            }
        }
    }

    /// Remembers the nodes below one of an extent tree.
    fn learn_nodes(&mut self, window: &Window<'_>, state: u32, node: &[u8], level: u32, meter: &Metered<'_>) {
        let (entries, depth) = (usize::from(le16(node, 2)), le16(node, 6));
        if depth == 0 || level > 5 {
            return;
        }
        for raw in node[12..].chunks_exact(12).take(entries) {
            let block = u64::from(le32(raw, 4)) | u64::from(le16(raw, 8)) << 32;
            if block >= self.fs.blocks || meter.is_spent() || !meter.may_remember() {
                continue;
            }
            // A node that is named twice names no place.
            let known = self.nodes.insert((state, depth - 1, le32(raw, 0)), block);
            if depth > 1
                && known.is_none()
                && let Ok(below) = window.bytes(block * self.fs.block_bytes, self.fs.block_bytes as usize)
                && le16(&below, 0) == EXTENT_MAGIC
                && le16(&below, 6) == depth - 1
            {
                self.learn_nodes(window, state, &below, level + 1, meter);
            }
        }
    }

    /// Whether this byte of the disk lies in the journal.
    pub(crate) fn holds_copies(&self, disk_offset_bytes: u64) -> bool {
        let block = disk_offset_bytes.checked_sub(self.start_bytes).map(|at| at / self.fs.block_bytes);
        block.is_some_and(|block| self.journal.iter().any(|range| range.contains(&block)))
    }

    /// What these bytes say. See [`crate::evidence::DiskEvidence::look`].
    pub(crate) fn look(&self, bytes: &[u8], give: &mut EachSighting<'_>) {
        let block_bytes = self.fs.block_bytes as usize;
        let phase = (self.start_bytes % self.fs.block_bytes) as usize;
        let mut at = phase;
        while let Some(block) = bytes.get(at..at + block_bytes) {
            if block.iter().any(|byte| *byte != 0) {
                self.look_at(block, at, give);
            }
            at += block_bytes;
        }
    }

    fn look_at(&self, block: &[u8], at: usize, give: &mut EachSighting<'_>) {
        if block[..4] == JOURNAL_MAGIC && (1..=5).contains(&block[7]) {
            give(Sighting::Copies { within_bytes: at });
            return;
        }
        let mut seen = |within_bytes: usize, place: u64, weight: u32, what: &'static str| {
            let disk_offset_bytes = self.start_bytes + place;
            give(Sighting::At { within_bytes, disk_offset_bytes, weight, what });
        };
        // The first superblock lies behind the first KiB of its block; copies begin their block.
        for within in [0, 1024] {
            if let Some(raw) = block.get(within..within + SUPERBLOCK_BYTES)
                && let Some(place) = self.place_of_superblock(raw)
                && (within == 0) != (place == 1024 && self.fs.block_bytes > 1024)
            {
                seen(at + within, place, PROOF, "ext4 superblock");
                return;
            }
        }
        let Some(seed) = self.seed else { return };
        if let Some((block_number, weight)) = self.place_of_inodes(seed, block) {
            seen(at, block_number * self.fs.block_bytes, weight, "ext4 inode table");
        } else if let Some(block_number) = self.place_of_directory(block) {
            seen(at, block_number * self.fs.block_bytes, PROOF, "ext4 directory");
        } else if let Some(block_number) = self.place_of_node(block) {
            seen(at, block_number * self.fs.block_bytes, PROOF, "ext4 extent tree");
        } else if let Some(block_number) = self.place_of_bitmap(seed, block) {
            seen(at, block_number * self.fs.block_bytes, 1, "ext4 bitmap");
        }
    }

    /// Place of a superblock of this file system: same identity and geometry.
    fn place_of_superblock(&self, raw: &[u8]) -> Option<u64> {
        let same = |range: Range<usize>| raw[range.clone()] == self.raw[range];
        // Block and inode counts, geometry, features, UUID.
        if raw[0x38..0x3a] != [0x53, 0xef]
            || !(same(0x00..0x08) && same(0x14..0x2c) && same(0x4c..0x50) && same(0x58..0x5a) && same(0x68..0x78))
        {
            return None;
        }
        let (fs, group) = Superblock::of_copy(raw, u64::MAX).ok()?;
        place_of_copy(&fs, group)
    }

    /// Block of a piece of an inode table, and how many inodes agree.
    fn place_of_inodes(&self, seed: u32, block: &[u8]) -> Option<(u64, u32)> {
        let per_block = block.len() / self.inode_bytes;
        let mut first = None;
        let mut weight = 0;
        for (slot, raw) in block.chunks_exact(self.inode_bytes).enumerate() {
            if raw.iter().all(|byte| *byte == 0) {
                continue;
            }
            // An inode that was never written since the table was zeroed has no checksum.
            let Some(number) = number_of(seed, raw).map(u64::from) else { continue };
            if number == 0 || number > self.inodes || (number - 1) % per_block as u64 != slot as u64 {
                continue;
            }
            let base = number - 1 - slot as u64;
            match first {
                None => first = Some(base),
                // Inodes of two places in one block: the block is not a part of an inode table.
                Some(first) if first != base => return None,
                Some(_) => {}
            }
            weight += 1;
        }
        let base = first?;
        let table = self.tables.get(&(base / self.inodes_per_group))?;
        // An inode alone proves less than one that a neighbour confirms.
        let block = table + base % self.inodes_per_group / per_block as u64;
        (block < self.fs.blocks).then_some((block, weight.min(2 * PROOF)))
    }

    fn place_of_directory(&self, block: &[u8]) -> Option<u64> {
        let tail = block.len() - 12;
        if block[tail..tail + 8] != [0, 0, 0, 0, 12, 0, 0, 0xde] {
            return None;
        }
        let directory = self.directories.get(&crc_before(le32(block, tail + 8), &block[..tail]))?;
        // The first block begins with the entry ".".
        let is_first = block[6] == 1 && block[8] == b'.' && le16(block, 4) == 12;
        (is_first || directory.has_one_block).then_some(directory.first_block)
    }

    fn place_of_node(&self, block: &[u8]) -> Option<u64> {
        let end = 12 + 12 * usize::from(le16(block, 4));
        if le16(block, 0) != EXTENT_MAGIC || end + 4 > block.len() || le16(block, 2) == 0 {
            return None;
        }
        let state = crc_before(le32(block, end), &block[..end]);
        self.nodes.get(&(state, le16(block, 6), le32(block, 12))).copied()
    }

    /// Block of a bitmap whose checksum only one descriptor has. The bits behind those of the group
    /// are set. Bitmaps of one value only say nothing.
    fn place_of_bitmap(&self, seed: u32, block: &[u8]) -> Option<u64> {
        let of = |kind, bits: u64| {
            let (bits, rest) = block.split_at_checked((bits / 8) as usize)?;
            let is_trivial = bits.iter().all(|byte| *byte == bits[0]);
            if is_trivial || rest.iter().any(|byte| *byte != 0xff) {
                return None;
            }
            self.bitmaps.get(&(kind, crc32c_raw(seed, bits))).copied().flatten()
        };
        match (of(Bitmap::Blocks, self.fs.clusters_per_group), of(Bitmap::Inodes, self.inodes_per_group)) {
            (Some(block), None) | (None, Some(block)) => Some(block),
            _ => None,
        }
    }
}

/// The superblock, or the first copy that is right.
fn find_superblock(window: &Window<'_>, copy: Option<u64>) -> Option<Vec<u8>> {
    let at = |offset_bytes: u64| {
        let raw = window.bytes(offset_bytes, SUPERBLOCK_BYTES).ok()?;
        let (fs, group) = Superblock::of_copy(&raw, window.size_bytes()).ok()?;
        (place_of_copy(&fs, group) == Some(offset_bytes)).then_some(raw)
    };
    at(1024).or_else(|| at(copy?)).or_else(|| {
        // Where mke2fs puts them: groups of as many blocks as a bitmap block has bits.
        [4096_u64, 1024, 2048].into_iter().find_map(|block_bytes| {
            let first = u64::from(block_bytes == 1024);
            COPY_GROUPS.into_iter().find_map(|group| at((first + group * 8 * block_bytes) * block_bytes))
        })
    })
}

/// Blocks of the journal, by the copy of its inode that the superblock has.
fn journal_of(fs: &Superblock, raw: &[u8]) -> Vec<Range<u64>> {
    const BLOCKS_AT: usize = 0x10c;
    let root = &raw[BLOCKS_AT..BLOCKS_AT + 60];
    if raw[0xfd] != 1 || le16(root, 0) != EXTENT_MAGIC || le16(root, 6) != 0 {
        return Vec::new();
    }
    extents_of(root).filter(|range| range.end <= fs.blocks).collect()
}

/// Extents of a leaf, as blocks.
fn extents_of(node: &[u8]) -> impl Iterator<Item = Range<u64>> + '_ {
    node[12..].chunks_exact(12).take(usize::from(le16(node, 2))).map(|raw| {
        let start = u64::from(le32(raw, 8)) | u64::from(le16(raw, 6)) << 32;
        let len = u64::from(le16(raw, 4));
        // Longer ones are allocated and not written.
        start..start + if len > 0x8000 { len - 0x8000 } else { len }
    })
}

fn directory_of(root: &[u8]) -> Option<Directory> {
    let mut extents = extents_of(root);
    let first = extents.next().filter(|_| le32(root, 12) == 0)?;
    let has_one_block = first.end - first.start == 1 && extents.next().is_none();
    Some(Directory { first_block: first.start, has_one_block })
}
