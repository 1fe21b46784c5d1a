//! The superblock. What is not known to be safe is refused here.

use super::key::Tree;
use crate::{
    bytes::{get, le16, le32, le64, text, uuid_text},
    identity::{BTRFS, Identity},
    read::Window,
    reason::{LeftAlone, ReasonKind},
};

const OFFSET_BYTES: u64 = 64 << 10;
const LEN_BYTES: usize = 4096;
const ROOT_TREE: u64 = 1;
const CHUNK_TREE: u64 = 3;
/// Flags of the superblock: written, relocated.
const FLAGS_KNOWN: u64 = 0x3;
const INCOMPAT_METADATA_UUID: u64 = 0x400;
/// MIXED_BACKREF, DEFAULT_SUBVOL, MIXED_GROUPS, COMPRESS_LZO, COMPRESS_ZSTD, BIG_METADATA,
/// EXTENDED_IREF, RAID56, SKINNY_METADATA, NO_HOLES, METADATA_UUID, RAID1C34.
const INCOMPAT_KNOWN: u64 = 0xfff;
const COMPAT_RO_BLOCK_GROUP_TREE: u64 = 0x8;
/// FREE_SPACE_TREE, FREE_SPACE_TREE_VALID, VERITY, BLOCK_GROUP_TREE.
const COMPAT_RO_KNOWN: u64 = 0xf;
const SYSTEM_CHUNKS_AT: usize = 0x32b;
const SYSTEM_CHUNKS_BYTES_MAX: usize = 2048;

/// A superblock of a file system on one device that fits the volume.
#[derive(Debug)]
pub(super) struct Superblock {
    /// UUID that blocks of trees carry.
    pub(super) uuid: [u8; 16],
    pub(super) node_bytes: usize,
    pub(super) root: Tree,
    pub(super) chunk_root: Tree,
    pub(super) used_bytes: u64,
    pub(super) device: u64,
    pub(super) device_bytes: u64,
    /// Bytes of the device that chunks take.
    pub(super) device_used_bytes: u64,
    /// First four bytes of the device's UUID.
    pub(super) device_uuid_head: u32,
    pub(super) has_block_group_tree: bool,
    /// Descriptions of the chunks that hold the chunk tree.
    pub(super) system_chunks: Vec<u8>,
}

pub(super) fn identify(window: &Window<'_>) -> Option<Identity> {
    let raw = window.bytes(OFFSET_BYTES, LEN_BYTES).ok()?;
    Some(Identity { name: BTRFS, label: text(&raw[0x12b..0x22b]), uuid: uuid_text(&raw, 0x20) })
}

impl Superblock {
    pub(super) fn read(window: &Window<'_>) -> Result<Self, LeftAlone> {
        let raw = window.bytes(OFFSET_BYTES, LEN_BYTES)?;
        let wrong = |what: String| LeftAlone::damaged(format!("superblock of btrfs: {what}"));
        if le16(&raw, 0xc4) != 0 {
            return Err(LeftAlone::unsupported("btrfs with another checksum than CRC-32C"));
        }
        if crc32c::crc32c(&raw[0x20..]) != le32(&raw, 0) {
            return Err(wrong("the checksum does not match".into()));
        }
        let (flags, compat_ro, incompat) = (le64(&raw, 0x38), le64(&raw, 0xb4), le64(&raw, 0xbc));
        if flags & !FLAGS_KNOWN != 0 || compat_ro & !COMPAT_RO_KNOWN != 0 || incompat & !INCOMPAT_KNOWN != 0 {
            return Err(LeftAlone::unsupported(format!(
                "a feature of btrfs (flags {flags:#x}, read-only {compat_ro:#x}, incompatible {incompat:#x})"
            )));
        }
        if le64(&raw, 0x88) != 1 {
            return Err(LeftAlone::unsupported(format!("btrfs on {} devices", le64(&raw, 0x88))));
        }
        if le64(&raw, 0x60) != 0 {
            return Err(LeftAlone::new(ReasonKind::Dirty, "the log of btrfs is not empty: mount the file system once"));
        }
        let (sector_bytes, node_bytes) = (le32(&raw, 0x90), le32(&raw, 0x94));
        if !sector_bytes.is_power_of_two()
            || !node_bytes.is_power_of_two()
            || !(4096..=65_536).contains(&sector_bytes)
            || !(sector_bytes..=65_536).contains(&node_bytes)
        {
            return Err(wrong(format!("sectors of {sector_bytes} bytes, nodes of {node_bytes} bytes")));
        }
        // The item of the device: number, size, bytes in use, and its UUID at 66.
        let item = &raw[0xc9..0x12b];
        let (device, device_bytes, device_used_bytes) = (le64(item, 0), le64(item, 8), le64(item, 16));
        if le64(&raw, 0x30) != OFFSET_BYTES || device_bytes > window.size_bytes() {
            return Err(wrong(format!("a device of {device_bytes} bytes in {} bytes", window.size_bytes())));
        }
        let system_len = le32(&raw, 0xa0) as usize;
        if system_len > SYSTEM_CHUNKS_BYTES_MAX {
            return Err(wrong(format!("{system_len} bytes of system chunks")));
        }
        let tree = |owner, block_at, level_at: usize, generation_at| Tree {
            owner,
            block: le64(&raw, block_at),
            level: raw[level_at],
            generation: le64(&raw, generation_at),
        };
        Ok(Self {
            uuid: get(&raw, if incompat & INCOMPAT_METADATA_UUID != 0 { 0x23b } else { 0x20 }),
            node_bytes: node_bytes as usize,
            root: tree(ROOT_TREE, 0x50, 0xc6, 0x48),
            chunk_root: tree(CHUNK_TREE, 0x58, 0xc7, 0xa4),
            used_bytes: le64(&raw, 0x78),
            device,
            device_bytes,
            device_used_bytes,
            device_uuid_head: le32(item, 66),
            has_block_group_tree: compat_ro & COMPAT_RO_BLOCK_GROUP_TREE != 0,
            system_chunks: raw[SYSTEM_CHUNKS_AT..SYSTEM_CHUNKS_AT + system_len].to_vec(),
        })
    }
}
