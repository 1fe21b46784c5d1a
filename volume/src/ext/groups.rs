//! The groups: descriptors, bitmaps and what is free in them.

use super::superblock::{Checksums, Superblock};
use crate::{
    bytes::{crc32c_raw, le16, le32, zero_runs},
    read::Window,
    reason::{LeftAlone, Stop},
    sink::Sink,
};
use std::ops::Range;

const BLOCK_UNINIT: u16 = 0x2;

/// A descriptor whose checksum is right.
pub(super) struct Descriptor {
    pub(super) block_bitmap: u64,
    pub(super) inode_bitmap: u64,
    pub(super) inode_table: u64,
    free_clusters: u64,
    pub(super) flags: u16,
    pub(super) bitmap_checksum: u32,
}

/// Sends the free clusters of all groups to `sink`.
pub(super) fn scan(window: &Window<'_>, fs: &Superblock, sink: &mut Sink<'_>) -> Result<(), Stop> {
    let per_block = fs.block_bytes / fs.descriptor_bytes as u64;
    let mut table = vec![0; fs.block_bytes as usize];
    let mut bitmap = vec![0; fs.block_bytes as usize];
    for group in 0..fs.groups {
        if group.is_multiple_of(per_block) {
            let block = descriptor_block(fs, group / per_block, per_block);
            window.read(checked_bytes(fs, block, "group descriptors")?, &mut table)?;
        }
        let at = (group % per_block) as usize * fs.descriptor_bytes;
        let descriptor = Descriptor::parse(fs, group, &table[at..at + fs.descriptor_bytes])?;
        let blocks = group_blocks(fs, group);
        let own = own_structures(fs, group, per_block, &descriptor)?;
        if descriptor.flags & BLOCK_UNINIT != 0 && fs.checksums != Checksums::None {
            bitmap.fill(0);
            own.iter().for_each(|range| mark(fs, &blocks, range, &mut bitmap));
        } else {
            window.read(checked_bytes(fs, descriptor.block_bitmap, "a block bitmap")?, &mut bitmap)?;
            check_bitmap(fs, group, &descriptor, &bitmap)?;
            if let Some(range) = own.iter().find(|range| !is_marked(fs, &blocks, range, &bitmap)) {
                return Err(wrong(group, &format!("blocks {range:?} hold its structures and are marked free")).into());
            }
        }
        let clusters = (blocks.end - blocks.start).div_ceil(fs.cluster_blocks);
        let counted: u64 = zero_runs(&bitmap, clusters).map(|run| run.end - run.start).sum();
        if counted != descriptor.free_clusters {
            let claimed = descriptor.free_clusters;
            return Err(wrong(group, &format!("{counted} clusters are free, and its descriptor says {claimed}")).into());
        }
        for run in zero_runs(&bitmap, clusters) {
            let block = |cluster: u64| (blocks.start + cluster * fs.cluster_blocks).min(blocks.end);
            sink.free(block(run.start) * fs.block_bytes..block(run.end) * fs.block_bytes)?;
        }
    }
    Ok(())
}

impl Descriptor {
    pub(super) fn parse(fs: &Superblock, group: u64, raw: &[u8]) -> Result<Self, LeftAlone> {
        let checksum = le16(raw, 0x1e);
        let number = (group as u32).to_le_bytes();
        let sum = match fs.checksums {
            Checksums::None => checksum,
            Checksums::Crc16 { uuid } => {
                let sum = crc16(crc16(crc16(!0, &uuid), &number), &raw[..0x1e]);
                crc16(sum, &raw[0x20..])
            }
            Checksums::Crc32c { seed } => {
                let sum = crc32c_raw(crc32c_raw(crc32c_raw(seed, &number), &raw[..0x1e]), &[0, 0]);
                (crc32c_raw(sum, &raw[0x20..]) & 0xffff) as u16
            }
        };
        if sum != checksum {
            return Err(wrong(group, "the checksum of its descriptor does not match"));
        }
        // Fields from 0x20 on exist in long descriptors only; else they read as zeros.
        let wide = |low: usize, high: usize| u64::from(le32(raw, low)) | u64::from(le32(raw, high)) << 32;
        Ok(Self {
            block_bitmap: wide(0x00, 0x20),
            inode_bitmap: wide(0x04, 0x24),
            inode_table: wide(0x08, 0x28),
            free_clusters: u64::from(le16(raw, 0x0c)) | u64::from(le16(raw, 0x2c)) << 16,
            flags: le16(raw, 0x12),
            bitmap_checksum: u32::from(le16(raw, 0x18)) | u32::from(le16(raw, 0x38)) << 16,
        })
    }
}

/// Verifies the checksum of a bitmap, where it has one.
fn check_bitmap(fs: &Superblock, group: u64, descriptor: &Descriptor, bitmap: &[u8]) -> Result<(), LeftAlone> {
    let Checksums::Crc32c { seed } = fs.checksums else { return Ok(()) };
    let sum = crc32c_raw(seed, &bitmap[..(fs.clusters_per_group / 8) as usize]);
    // A short descriptor has room for the lower half only.
    let mask = if fs.descriptor_bytes >= 64 { u32::MAX } else { 0xffff };
    if sum & mask != descriptor.bitmap_checksum & mask {
        return Err(wrong(group, "the checksum of its block bitmap does not match"));
    }
    Ok(())
}

fn wrong(group: u64, what: &str) -> LeftAlone {
    LeftAlone::damaged(format!("group {group}: {what}"))
}

/// Offset of a block in bytes. A block outside of the file system is refused.
fn checked_bytes(fs: &Superblock, block: u64, what: &str) -> Result<u64, LeftAlone> {
    if block < fs.first_data_block || block >= fs.blocks {
        return Err(LeftAlone::damaged(format!("{what} in block {block} of {}", fs.blocks)));
    }
    Ok(block * fs.block_bytes)
}

/// The blocks of a group; the last one may be shorter.
pub(super) fn group_blocks(fs: &Superblock, group: u64) -> Range<u64> {
    let start = fs.first_data_block + group * fs.blocks_per_group;
    start..(start + fs.blocks_per_group).min(fs.blocks)
}

/// Block with the `index`-th part of the descriptor table.
pub(super) fn descriptor_block(fs: &Superblock, index: u64, per_block: u64) -> u64 {
    let superblock = 1024 / fs.block_bytes;
    match fs.first_meta_bg {
        Some(first) if index >= first => {
            // In 1 KiB blocks without a first data block (bigalloc), block 0 lies before the copy.
            let before = u64::from(fs.block_bytes == 1024 && index == 0 && fs.first_data_block == 0);
            let group = index * per_block;
            fs.first_data_block + group * fs.blocks_per_group + u64::from(fs.has_superblock(group)) + before
        }
        _ => superblock + 1 + index,
    }
}

/// The blocks with structures of the group itself: copies of superblock and descriptors, both
/// bitmaps, the inode table. With flex_bg the last three may lie in another group.
fn own_structures(
    fs: &Superblock,
    group: u64,
    per_block: u64,
    descriptor: &Descriptor,
) -> Result<[Range<u64>; 4], LeftAlone> {
    let has_superblock = fs.has_superblock(group);
    let meta_index = group / per_block;
    let descriptor_blocks = match fs.first_meta_bg {
        Some(first) if meta_index >= first => {
            u64::from(matches!(group % per_block, 0 | 1) || group % per_block == per_block - 1)
        }
        Some(first) if has_superblock => first + fs.reserved_gdt_blocks,
        None if has_superblock => fs.groups.div_ceil(per_block) + fs.reserved_gdt_blocks,
        _ => 0,
    };
    let start = group_blocks(fs, group).start;
    let inode_table = descriptor.inode_table;
    for (block, what) in [
        (descriptor.block_bitmap, "block bitmap"),
        (descriptor.inode_bitmap, "inode bitmap"),
        (inode_table, "inode table"),
    ] {
        if block <= fs.first_data_block || block >= fs.blocks {
            return Err(wrong(group, &format!("its {what} is in block {block} of {}", fs.blocks)));
        }
    }
    if fs.inode_table_blocks > fs.blocks - inode_table {
        return Err(wrong(group, "its inode table ends beyond the file system"));
    }
    Ok([
        start..start.saturating_add(u64::from(has_superblock) + descriptor_blocks),
        descriptor.block_bitmap..descriptor.block_bitmap + 1,
        descriptor.inode_bitmap..descriptor.inode_bitmap + 1,
        inode_table..inode_table + fs.inode_table_blocks,
    ])
}

/// The clusters of the group that `range` touches.
fn clusters_of(fs: &Superblock, blocks: &Range<u64>, range: &Range<u64>) -> Range<u64> {
    let (start, end) = (range.start.max(blocks.start), range.end.min(blocks.end));
    if start >= end {
        return 0..0;
    }
    (start - blocks.start) / fs.cluster_blocks..(end - blocks.start).div_ceil(fs.cluster_blocks)
}

fn mark(fs: &Superblock, blocks: &Range<u64>, range: &Range<u64>, bitmap: &mut [u8]) {
    for cluster in clusters_of(fs, blocks, range) {
        bitmap[(cluster / 8) as usize] |= 1 << (cluster % 8);
    }
}

fn is_marked(fs: &Superblock, blocks: &Range<u64>, range: &Range<u64>, bitmap: &[u8]) -> bool {
    clusters_of(fs, blocks, range).all(|cluster| bitmap[(cluster / 8) as usize] >> (cluster % 8) & 1 == 1)
}

/// CRC-16 with the reflected polynomial 0xa001, from `crc` on.
fn crc16(crc: u16, bytes: &[u8]) -> u16 {
    bytes.iter().fold(crc, |crc, byte| {
        (0..8).fold(crc ^ u16::from(*byte), |crc, _| if crc & 1 == 1 { crc >> 1 ^ 0xa001 } else { crc >> 1 })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crc16_of_the_usual_check() {
        // CRC-16/ARC begins at 0 and gives this for the nine digits.
        assert_eq!(crc16(0, b"123456789"), 0xbb3d);
    }
}
