//! The free space of one allocation group: its header (AGF) and its tree by block.

use super::superblock::{Superblock, crc_matches};
use crate::{
    bytes::{be16, be32, get},
    read::Window,
    reason::{LeftAlone, Stop},
    sink::Sink,
};

/// The kernel allows no tree of more levels.
const LEVELS_MAX: u32 = 9;
const AGF_CRC_AT: usize = 216;
/// Headers of a group (superblock, AGF, AGI, AGFL), a sector each.
const HEADER_SECTORS: u64 = 4;

/// A walk through the leaves, from left to right.
struct Walk<'a, 'b> {
    window: &'a Window<'a>,
    fs: &'a Superblock,
    group: u64,
    sink: &'a mut Sink<'b>,
    /// First block that may be free: after the last free range.
    next: u64,
    free_blocks: u64,
    longest: u64,
}

/// Sends the free blocks of a group to `sink`.
pub(super) fn scan_group(window: &Window<'_>, fs: &Superblock, group: u64, sink: &mut Sink<'_>) -> Result<(), Stop> {
    let wrong = |what: String| LeftAlone::damaged(format!("allocation group {group}: {what}"));
    let start_bytes = group * fs.group_blocks * fs.block_bytes;
    let agf = window.bytes(start_bytes + fs.sector_bytes, fs.sector_bytes as usize)?;
    if agf[..4] != *b"XAGF" || be32(&agf, 4) != 1 || u64::from(be32(&agf, 8)) != group {
        return Err(wrong("no AGF".into()).into());
    }
    if fs.has_crc && (!crc_matches(&agf, AGF_CRC_AT) || get::<16>(&agf, 64) != fs.uuid) {
        return Err(wrong("the CRC or the UUID of the AGF does not match".into()).into());
    }
    let blocks = fs.blocks_of(group);
    if u64::from(be32(&agf, 12)) != blocks {
        return Err(wrong(format!("the AGF counts {} blocks of {blocks}", be32(&agf, 12))).into());
    }
    let (root, levels) = (be32(&agf, 16), be32(&agf, 28));
    if !(1..=LEVELS_MAX).contains(&levels) {
        return Err(wrong(format!("a tree of {levels} levels")).into());
    }
    let next = (HEADER_SECTORS * fs.sector_bytes).div_ceil(fs.block_bytes);
    let mut walk = Walk { window, fs, group, sink, next, free_blocks: 0, longest: 0 };
    walk.node(root, levels - 1, true)?;
    let (free_blocks, longest) = (u64::from(be32(&agf, 52)), u64::from(be32(&agf, 56)));
    if (walk.free_blocks, walk.longest) != (free_blocks, longest) {
        let found = format!("{} free blocks, {} at most in one piece", walk.free_blocks, walk.longest);
        return Err(wrong(format!("{found}; the AGF says {free_blocks} and {longest}")).into());
    }
    Ok(())
}

impl Walk<'_, '_> {
    /// A block of the tree and all below it. Every leaf has a free range behind those before, so
    /// the walk ends even if nodes point to one another.
    fn node(&mut self, block: u32, level: u32, is_root: bool) -> Result<(), Stop> {
        let fs = self.fs;
        let place = u64::from(block);
        if place >= fs.blocks_of(self.group) {
            return Err(self.wrong(block, "lies outside of the group"));
        }
        let offset_bytes = (self.group * fs.group_blocks + place) * fs.block_bytes;
        let raw = self.window.bytes(offset_bytes, fs.block_bytes as usize)?;
        let magic = if fs.has_crc { b"AB3B" } else { b"ABTB" };
        if raw[..4] != *magic || u32::from(be16(&raw, 4)) != level {
            return Err(self.wrong(block, "is not of this tree and level"));
        }
        // Header of version 5: number of its 512-byte sector, LSN, UUID, owner, CRC.
        let own = u64::from_be_bytes(get(&raw, 16)) == offset_bytes / 512
            && get::<16>(&raw, 32) == fs.uuid
            && u64::from(be32(&raw, 48)) == self.group;
        if fs.has_crc && (!own || !crc_matches(&raw, 52)) {
            return Err(self.wrong(block, "has a wrong CRC, UUID or place"));
        }
        let header = if fs.has_crc { 56 } else { 16 };
        let entry_bytes = if level == 0 { 8 } else { 12 };
        let most = (raw.len() - header) / entry_bytes;
        let count = usize::from(be16(&raw, 6));
        if count > most || (count == 0 && !(is_root && level == 0)) {
            return Err(self.wrong(block, "has an impossible number of records"));
        }
        for index in 0..count {
            if level == 0 {
                let (start, len) = (be32(&raw, header + 8 * index), be32(&raw, header + 8 * index + 4));
                self.record(block, start.into(), len.into())?;
            } else {
                self.node(be32(&raw, header + 8 * most + 4 * index), level - 1, false)?;
            }
        }
        Ok(())
    }

    /// A free range, which must lie behind the one before.
    fn record(&mut self, block: u32, start: u64, len: u64) -> Result<(), Stop> {
        if start < self.next || len == 0 || start + len > self.fs.blocks_of(self.group) {
            return Err(self.wrong(block, "has a free range out of order"));
        }
        self.next = start + len;
        self.free_blocks += len;
        self.longest = self.longest.max(len);
        let first = self.group * self.fs.group_blocks + start;
        self.sink.free(first * self.fs.block_bytes..(first + len) * self.fs.block_bytes)
    }

    fn wrong(&self, block: u32, what: &str) -> Stop {
        LeftAlone::damaged(format!("allocation group {}: block {block} of its free-space tree {what}", self.group))
            .into()
    }
}
