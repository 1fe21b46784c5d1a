//! The superblock: geometry and features. What is not known to be safe is refused here.

use crate::{
    bytes::{be16, be32, be64, get, le32, text, uuid_text},
    identity::Identity,
    read::Window,
    reason::{LeftAlone, ReasonKind},
};

const CRC_AT: usize = 224;
const INCOMPAT_META_UUID: u32 = 0x4;
const INCOMPAT_NEEDS_REPAIR: u32 = 0x10;
/// FTYPE, SPINODES, META_UUID, BIGTIME, NEEDSREPAIR, NREXT64, EXCHRANGE, PARENT.
const INCOMPAT_KNOWN: u32 = 0xff;
/// FINOBT, RMAPBT, REFLINK, INOBTCNT.
const RO_COMPAT_KNOWN: u32 = 0xf;

/// A superblock that fits the volume.
#[derive(Debug)]
pub(super) struct Superblock {
    pub(super) block_bytes: u64,
    pub(super) sector_bytes: u64,
    pub(super) blocks: u64,
    pub(super) group_blocks: u64,
    pub(super) groups: u64,
    pub(super) log_start_bytes: u64,
    pub(super) log_bytes: u64,
    /// Whether structures have CRCs (version 5).
    pub(super) has_crc: bool,
    /// UUID that structures carry.
    pub(super) uuid: [u8; 16],
    /// UUID that records of the log carry.
    pub(super) log_uuid: [u8; 16],
}

pub(super) fn identify(window: &Window<'_>) -> Option<Identity> {
    let raw = window.bytes(0, 512).ok()?;
    Some(Identity { name: "XFS", label: text(&raw[108..120]), uuid: uuid_text(&raw, 32) })
}

impl Superblock {
    pub(super) fn read(window: &Window<'_>) -> Result<Self, LeftAlone> {
        let superblock = Self::read_copy(window, 0)?;
        // Copies keep the mark that mkfs.xfs sets while it works.
        if window.bytes(126, 1)? != [0] {
            return Err(LeftAlone::new(ReasonKind::Dirty, "mkfs.xfs did not finish"));
        }
        Ok(superblock)
    }

    /// The superblock of a group, which begins at `at_bytes`.
    pub(super) fn read_copy(window: &Window<'_>, at_bytes: u64) -> Result<Self, LeftAlone> {
        let raw = window.bytes(at_bytes, 512)?;
        let wrong = |what: String| LeftAlone::damaged(format!("superblock of XFS: {what}"));
        let has_crc = match be16(&raw, 100) & 0xf {
            4 => false,
            5 => true,
            version => return Err(LeftAlone::unsupported(format!("version {version} of XFS"))),
        };
        let sector_bytes = u64::from(be16(&raw, 102));
        let block_bytes = u64::from(be32(&raw, 4));
        if !sector_bytes.is_power_of_two() || !(512..=32 << 10).contains(&sector_bytes) {
            return Err(wrong(format!("sectors of {sector_bytes} bytes")));
        }
        if !block_bytes.is_power_of_two() || !(sector_bytes..=64 << 10).contains(&block_bytes) {
            return Err(wrong(format!("blocks of {block_bytes} bytes")));
        }
        let meta_uuid = has_crc && check_version_5(window, &raw, at_bytes, sector_bytes)?;
        if be64(&raw, 16) != 0 {
            return Err(LeftAlone::unsupported("XFS with a realtime device"));
        }
        let (blocks, group_blocks, groups) = (be64(&raw, 8), u64::from(be32(&raw, 84)), u64::from(be32(&raw, 88)));
        let size_bytes = window.size_bytes();
        if blocks.checked_mul(block_bytes).is_none_or(|bytes| bytes > size_bytes) {
            return Err(wrong(format!("{blocks} blocks of {block_bytes} bytes in a volume of {size_bytes} bytes")));
        }
        // The smallest group that mkfs.xfs makes is of 16 MiB; the kernel wants 64 blocks.
        if group_blocks < 64 || groups == 0 || blocks.div_ceil(group_blocks) != groups {
            return Err(wrong(format!("{groups} groups of {group_blocks} blocks for {blocks} blocks")));
        }
        let group_log = u32::from(raw[124]);
        if group_log > 31 || 1_u64 << group_log < group_blocks {
            return Err(wrong(format!("2^{group_log} as the next power of two of {group_blocks}")));
        }
        let (log_start, log_blocks) = (be64(&raw, 48), u64::from(be32(&raw, 96)));
        if log_start == 0 {
            return Err(LeftAlone::unsupported("XFS with an external log"));
        }
        // The upper bits of the address are the group, the others the block within it.
        let (group, block) = (log_start >> group_log, log_start & ((1 << group_log) - 1));
        let log_bytes = log_blocks * block_bytes;
        if group >= groups
            || block + log_blocks > group_blocks.min(blocks - group * group_blocks)
            || !(64 << 10..=1 << 31).contains(&log_bytes)
        {
            return Err(wrong(format!("a log of {log_blocks} blocks at {log_start:#x}")));
        }
        Ok(Self {
            block_bytes,
            sector_bytes,
            blocks,
            group_blocks,
            groups,
            log_start_bytes: (group * group_blocks + block) * block_bytes,
            log_bytes,
            has_crc,
            uuid: get(&raw, if meta_uuid { 248 } else { 32 }),
            log_uuid: get(&raw, 32),
        })
    }

    /// Number of blocks of a group; the last one may be shorter.
    pub(super) fn blocks_of(&self, group: u64) -> u64 {
        (self.blocks - group * self.group_blocks).min(self.group_blocks)
    }
}

/// Verifies the CRC and the features of version 5. Returns whether structures carry a UUID of their
/// own.
fn check_version_5(window: &Window<'_>, raw: &[u8], at_bytes: u64, sector_bytes: u64) -> Result<bool, LeftAlone> {
    let sector = window.bytes(at_bytes, sector_bytes as usize)?;
    if !crc_matches(&sector, CRC_AT) {
        return Err(LeftAlone::damaged("the CRC of the superblock of XFS does not match"));
    }
    let (ro_compat, incompat) = (be32(raw, 212), be32(raw, 216));
    if incompat & INCOMPAT_NEEDS_REPAIR != 0 {
        return Err(LeftAlone::new(ReasonKind::Dirty, "the file system needs repair: run xfs_repair"));
    }
    if incompat & !INCOMPAT_KNOWN != 0 || ro_compat & !RO_COMPAT_KNOWN != 0 {
        let (incompat, ro_compat) = (incompat & !INCOMPAT_KNOWN, ro_compat & !RO_COMPAT_KNOWN);
        return Err(LeftAlone::unsupported(format!("a feature of XFS (incompat {incompat:#x}, ro {ro_compat:#x})")));
    }
    Ok(incompat & INCOMPAT_META_UUID != 0)
}

/// Whether a structure's CRC is right. The field itself counts as zeros, and is little-endian.
pub(super) fn crc_matches(bytes: &[u8], crc_at: usize) -> bool {
    let sum = crc32c::crc32c_append(crc32c::crc32c(&bytes[..crc_at]), &[0; 4]);
    crc32c::crc32c_append(sum, &bytes[crc_at + 4..]) == le32(bytes, crc_at)
}
