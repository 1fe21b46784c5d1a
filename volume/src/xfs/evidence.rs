//! Structures of XFS version 5 that state their place (see [`crate::evidence`]).
//!
//! Every block of metadata holds its own address (`blkno`, in units of 512 bytes), the UUID of the
//! file system and a CRC; an inode holds its number, from which its address follows. Headers of
//! allocation groups hold the number of the group. Blocks that were freed keep all that, and still
//! lie where they say.

use super::superblock::{Superblock, crc_matches};
use crate::{
    bytes::{be16, be32, be64, get},
    read::Window,
    sighting::{EachSighting, PROOF, Sighting},
};

/// Layout of a block with a header: offsets of the CRC, of the address and of the UUID.
struct Shape {
    crc_at: usize,
    address_at: usize,
    uuid_at: usize,
    what: &'static str,
}

/// Trees of a group: free space, inodes, reverse mappings, reference counts.
const SHORT_TREE: Shape = Shape { crc_at: 52, address_at: 16, uuid_at: 32, what: "XFS group tree" };
/// Trees of extents.
const LONG_TREE: Shape = Shape { crc_at: 64, address_at: 24, uuid_at: 40, what: "XFS extent tree" };
const DIRECTORY: Shape = Shape { crc_at: 4, address_at: 8, uuid_at: 24, what: "XFS directory" };
const INDEX: Shape = Shape { crc_at: 12, address_at: 16, uuid_at: 32, what: "XFS directory index" };

const AGF_CRC_AT: usize = 216;
const INODE_CRC_AT: usize = 100;

/// What is known of one file system.
#[derive(Debug)]
pub(crate) struct Evidence {
    start_bytes: u64,
    fs: Superblock,
    inode_bytes: usize,
    /// Bits of an inode's number below the block in its group, and below the group.
    inode_bits: (u32, u32),
}

/// Distance of this header of a group from the beginning of the file system. `bytes` begin with the
/// superblock of the group; its second sector has the number of the group.
pub(crate) fn start_by_group(bytes: &[u8]) -> Option<u64> {
    if bytes.get(..4)? != b"XFSB" || be16(bytes, 100) & 0xf != 5 {
        return None;
    }
    let sector = usize::from(be16(bytes, 102));
    if !sector.is_power_of_two() || !(512..=32 << 10).contains(&sector) {
        return None;
    }
    let (first, second) = (bytes.get(..sector)?, bytes.get(sector..2 * sector)?);
    if !crc_matches(first, 224) || second[..4] != *b"XAGF" || !crc_matches(second, AGF_CRC_AT) {
        return None;
    }
    u64::from(be32(second, 8)).checked_mul(u64::from(be32(first, 84)))?.checked_mul(u64::from(be32(first, 4)))
}

/// A first superblock: its offset in the file system, the number of blocks, and their size in
/// bytes.
pub(crate) fn first_superblock(bytes: &[u8]) -> Option<(u64, u64, u64)> {
    let place = start_by_group(bytes).filter(|&place| place == 0)?;
    let block_bytes = u64::from(be32(bytes, 4)).max(512);
    Some((place, be64(bytes, 8), block_bytes))
}

impl Evidence {
    /// Learns the file system in this window by its first superblock, or by the copy at this place.
    pub(crate) fn learn(window: &Window<'_>, start_bytes: u64, copy: Option<u64>) -> Option<Self> {
        let first = Superblock::read(window).ok().map(|fs| (fs, 0));
        let (fs, at) = first.or_else(|| Some((Superblock::read_copy(window, copy?).ok()?, copy?)))?;
        if !fs.has_crc {
            return None;
        }
        let raw = window.bytes(at, 512).ok()?;
        let inode_bytes = usize::from(be16(&raw, 104));
        if !inode_bytes.is_power_of_two() || !(256..=2048).contains(&inode_bytes) {
            return None;
        }
        let (per_block, group) = (u32::from(raw[123]), u32::from(raw[124]));
        (per_block <= 8 && group <= 31).then_some(Self {
            start_bytes,
            fs,
            inode_bytes,
            inode_bits: (per_block, per_block + group),
        })
    }

    /// First byte of the file system on the disk.
    pub(crate) fn start_bytes(&self) -> u64 {
        self.start_bytes
    }

    /// Whether this byte of the disk lies in the log.
    pub(crate) fn holds_copies(&self, disk_offset_bytes: u64) -> bool {
        let log = self.start_bytes + self.fs.log_start_bytes;
        (log..log + self.fs.log_bytes).contains(&disk_offset_bytes)
    }

    /// What these bytes say. See [`crate::evidence::DiskEvidence::look`].
    pub(crate) fn look(&self, bytes: &[u8], give: &mut EachSighting<'_>) {
        let block_bytes = self.fs.block_bytes as usize;
        let mut at = (self.start_bytes % self.fs.block_bytes) as usize;
        while let Some(block) = bytes.get(at..at + block_bytes) {
            if block.iter().any(|byte| *byte != 0) {
                self.look_at(block, at, give);
            }
            at += block_bytes;
        }
    }

    fn look_at(&self, block: &[u8], at: usize, give: &mut EachSighting<'_>) {
        let mut seen = |within_bytes: usize, place: Option<u64>, what: &'static str| {
            let inside = place.filter(|&place| place < self.fs.blocks * self.fs.block_bytes);
            if let Some(disk_offset_bytes) = inside.map(|place| self.start_bytes + place) {
                give(Sighting::At { within_bytes, disk_offset_bytes, weight: PROOF, what });
            }
        };
        let sector = self.fs.sector_bytes as usize;
        if block[..4] == *b"XFSB"
            && let Some(header) = block.get(sector..2 * sector)
            && header[..4] == *b"XAGF"
            && get::<16>(header, 64) == self.fs.uuid
            && crc_matches(header, AGF_CRC_AT)
        {
            let group = u64::from(be32(header, 8));
            let place = group.checked_mul(self.fs.group_blocks * self.fs.block_bytes);
            seen(at, place, "XFS group header");
            return;
        }
        if let Some(shape) = shape_of(block) {
            let is_ours = get::<16>(block, shape.uuid_at) == self.fs.uuid;
            if is_ours && crc_matches(block, shape.crc_at) {
                seen(at, be64(block, shape.address_at).checked_mul(512), shape.what);
            }
            return;
        }
        for (slot, inode) in block.chunks_exact(self.inode_bytes).enumerate() {
            if inode[..2] == *b"IN"
                && inode[4] == 3
                && get::<16>(inode, 160) == self.fs.uuid
                && crc_matches(inode, INODE_CRC_AT)
            {
                seen(at + slot * self.inode_bytes, self.place_of_inode(be64(inode, 152)), "XFS inode");
            }
        }
    }

    fn place_of_inode(&self, number: u64) -> Option<u64> {
        let (per_block, of_group) = self.inode_bits;
        let group = number >> of_group;
        let block = (number >> per_block) & ((1 << (of_group - per_block)) - 1);
        let slot = number & ((1 << per_block) - 1);
        if group >= self.fs.groups || block >= self.fs.blocks_of(group) {
            return None;
        }
        let block = group * self.fs.group_blocks + block;
        Some(block * self.fs.block_bytes + slot * self.inode_bytes as u64)
    }
}

/// The shape of a block by its signature.
fn shape_of(block: &[u8]) -> Option<Shape> {
    match &block[..4] {
        b"AB3B" | b"AB3C" | b"IAB3" | b"FIB3" | b"RMB3" | b"R3FC" => Some(SHORT_TREE),
        b"BMA3" => Some(LONG_TREE),
        b"XDB3" | b"XDD3" | b"XDF3" => Some(DIRECTORY),
        _ => matches!(be16(block, 8), 0x3ebe | 0x3df1 | 0x3dff | 0x3bee).then_some(INDEX),
    }
}
