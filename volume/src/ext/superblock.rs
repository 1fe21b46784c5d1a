//! The superblock: features, geometry and state. Everything that is not known to be safe is refused
//! here, so that `groups.rs` works with a geometry that fits the volume.

use crate::{
    bytes::{crc32c_raw, get, le16, le32, text, uuid_text},
    identity::Identity,
    read::Window,
    reason::{LeftAlone, ReasonKind},
};

const OFFSET_BYTES: u64 = 1024;
const LEN_BYTES: usize = 1024;

const COMPAT_HAS_JOURNAL: u32 = 0x4;
const COMPAT_SPARSE_SUPER2: u32 = 0x200;
const COMPAT_FAST_COMMIT: u32 = 0x400;

const INCOMPAT_RECOVER: u32 = 0x4;
const INCOMPAT_JOURNAL_DEVICE: u32 = 0x8;
const INCOMPAT_META_BG: u32 = 0x10;
const INCOMPAT_EXTENTS: u32 = 0x40;
const INCOMPAT_64BIT: u32 = 0x80;
const INCOMPAT_MMP: u32 = 0x100;
const INCOMPAT_CHECKSUM_SEED: u32 = 0x2000;
/// FILETYPE, RECOVER, META_BG, EXTENTS, 64BIT, MMP, FLEX_BG, EA_INODE, CSUM_SEED, LARGEDIR,
/// INLINE_DATA, ENCRYPT, CASEFOLD. None but those named above changes how free blocks are recorded.
const INCOMPAT_KNOWN: u32 = 0x2 | 0x4 | 0x10 | 0x40 | 0x80 | 0x100 | 0x200 | 0x400 | 0x2000 | 0x4000 | 0x3_8000;

const RO_COMPAT_SPARSE_SUPER: u32 = 0x1;
const RO_COMPAT_GDT_CHECKSUM: u32 = 0x10;
const RO_COMPAT_BIGALLOC: u32 = 0x200;
const RO_COMPAT_METADATA_CHECKSUM: u32 = 0x400;
/// SPARSE_SUPER, LARGE_FILE, BTREE_DIR, HUGE_FILE, GDT_CSUM, DIR_NLINK, EXTRA_ISIZE, QUOTA,
/// BIGALLOC, METADATA_CSUM, READONLY, PROJECT, VERITY, ORPHAN_PRESENT.
const RO_COMPAT_KNOWN: u32 = 0x7f | 0x100 | 0x200 | 0x400 | 0x1000 | 0x2000 | 0x8000 | 0x1_0000;
/// Features of ext4 that ext3 does not have, by which a file system gets its name.
const RO_COMPAT_EXT4: u32 = !(0x1 | 0x2 | 0x4);

const STATE_VALID: u16 = 1;
const STATE_ERRORS: u16 = 2;
const MMP_MAGIC: u32 = 0x004d_4d50;
const MMP_CLEAN: u32 = 0xff4d_4d50;

/// What protects group descriptors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Checksums {
    None,
    /// Descriptors have a crc16; bitmaps have nothing.
    Crc16 {
        uuid: [u8; 16],
    },
    /// Descriptors and bitmaps have a CRC-32C from this seed on.
    Crc32c {
        seed: u32,
    },
}

/// A superblock of a clean file system that fits the volume.
#[derive(Debug)]
pub(super) struct Superblock {
    pub(super) block_bytes: u64,
    pub(super) blocks: u64,
    pub(super) first_data_block: u64,
    pub(super) blocks_per_group: u64,
    pub(super) clusters_per_group: u64,
    /// Blocks in a cluster; 1 without bigalloc.
    pub(super) cluster_blocks: u64,
    pub(super) groups: u64,
    pub(super) descriptor_bytes: usize,
    pub(super) inode_table_blocks: u64,
    pub(super) checksums: Checksums,
    pub(super) reserved_gdt_blocks: u64,
    /// First group of descriptor blocks in the layout of meta_bg; `None` without that feature.
    pub(super) first_meta_bg: Option<u64>,
    sparse: Sparse,
}

/// Which groups have a copy of the superblock.
#[derive(Debug, Clone, Copy)]
enum Sparse {
    All,
    Powers,
    Two([u64; 2]),
}

pub(super) fn identify(window: &Window<'_>) -> Option<Identity> {
    let raw = window.bytes(OFFSET_BYTES, LEN_BYTES).ok()?;
    let (compat, incompat, ro_compat) = (le32(&raw, 0x5c), le32(&raw, 0x60), le32(&raw, 0x64));
    let ext4 = ro_compat & RO_COMPAT_EXT4 != 0 || incompat & !(0x2 | INCOMPAT_RECOVER | INCOMPAT_META_BG) != 0;
    let name = match (ext4, compat & COMPAT_HAS_JOURNAL) {
        _ if incompat & INCOMPAT_JOURNAL_DEVICE != 0 => "external journal of ext4",
        (true, _) => "ext4",
        (false, 0) => "ext2",
        (false, _) => "ext3",
    };
    Some(Identity { name, label: text(&raw[0x78..0x88]), uuid: uuid_text(&raw, 0x68) })
}

impl Superblock {
    pub(super) fn read(window: &Window<'_>) -> Result<Self, LeftAlone> {
        let raw = window.bytes(OFFSET_BYTES, LEN_BYTES)?;
        let (compat, incompat, ro_compat) = (le32(&raw, 0x5c), le32(&raw, 0x60), le32(&raw, 0x64));
        let checksums = check_sum(&raw, incompat, ro_compat)?;
        check_features(compat, incompat, ro_compat)?;
        check_state(&raw, compat, incompat)?;
        let superblock = Self::geometry(&raw, compat, incompat, ro_compat, checksums, window.size_bytes())?;
        if incompat & INCOMPAT_MMP != 0 {
            superblock.check_mmp(window, u64::from(le32(&raw, 0x168)) | u64::from(le32(&raw, 0x16c)) << 32)?;
        }
        Ok(superblock)
    }

    /// A superblock or a copy of one, whatever the state of its file system, and the group that it
    /// says it lies in. Its checksum is verified if it has one.
    pub(super) fn of_copy(raw: &[u8], size_bytes: u64) -> Result<(Self, u64), LeftAlone> {
        let (compat, incompat, ro_compat) = (le32(raw, 0x5c), le32(raw, 0x60), le32(raw, 0x64));
        if raw[0x38..0x3a] != [0x53, 0xef] || incompat & (INCOMPAT_JOURNAL_DEVICE | !INCOMPAT_KNOWN) != 0 {
            return Err(LeftAlone::unsupported("no superblock of ext4, or one with unknown features"));
        }
        let checksums = check_sum(raw, incompat, ro_compat)?;
        let superblock = Self::geometry(raw, compat, incompat, ro_compat, checksums, size_bytes)?;
        Ok((superblock, le16(raw, 0x5a).into()))
    }

    fn geometry(
        raw: &[u8],
        compat: u32,
        incompat: u32,
        ro_compat: u32,
        checksums: Checksums,
        size_bytes: u64,
    ) -> Result<Self, LeftAlone> {
        let wrong = |what: String| LeftAlone::damaged(format!("superblock: {what}"));
        let (log_block, log_cluster) = (le32(raw, 0x18), le32(raw, 0x1c));
        if log_block > 6 {
            return Err(wrong(format!("a block size of 2^{log_block} KiB")));
        }
        let block_bytes = 1024_u64 << log_block;
        let bigalloc = ro_compat & RO_COMPAT_BIGALLOC != 0;
        // Without bigalloc the field is that of the fragment size, which nothing uses.
        if bigalloc && (log_cluster < log_block || log_cluster > 29 - 10) {
            return Err(wrong(format!("a cluster size of 2^{log_cluster} KiB")));
        }
        let cluster_blocks = if bigalloc { 1 << (log_cluster - log_block) } else { 1 };
        let is_64bit = incompat & INCOMPAT_64BIT != 0;
        let high = if is_64bit { u64::from(le32(raw, 0x150)) << 32 } else { 0 };
        let blocks = u64::from(le32(raw, 0x04)) | high;
        let first_data_block = u64::from(le32(raw, 0x14));
        if first_data_block > 1 || (first_data_block == 1) != (block_bytes == 1024 && !bigalloc) {
            return Err(wrong(format!("first data block {first_data_block}")));
        }
        if blocks <= first_data_block || blocks.checked_mul(block_bytes).is_none_or(|bytes| bytes > size_bytes) {
            return Err(wrong(format!("{blocks} blocks of {block_bytes} bytes in a volume of {size_bytes} bytes")));
        }
        let blocks_per_group = u64::from(le32(raw, 0x20));
        let clusters_per_group = if bigalloc { u64::from(le32(raw, 0x24)) } else { blocks_per_group };
        if clusters_per_group > 8 * block_bytes
            || !clusters_per_group.is_multiple_of(8)
            || blocks_per_group < 256
            || clusters_per_group.checked_mul(cluster_blocks) != Some(blocks_per_group)
        {
            return Err(wrong(format!("groups of {blocks_per_group} blocks in {clusters_per_group} clusters")));
        }
        let groups = (blocks - first_data_block).div_ceil(blocks_per_group);
        let descriptor_bytes = if is_64bit { usize::from(le16(raw, 0xfe)) } else { 32 };
        if (is_64bit && !(64..=1024).contains(&descriptor_bytes)) || !descriptor_bytes.is_power_of_two() {
            return Err(wrong(format!("group descriptors of {descriptor_bytes} bytes")));
        }
        let inode_bytes = if le32(raw, 0x4c) == 0 { 128 } else { u64::from(le16(raw, 0x58)) };
        let inodes_per_group = u64::from(le32(raw, 0x28));
        if !inode_bytes.is_power_of_two() || !(128..=block_bytes).contains(&inode_bytes) || inodes_per_group == 0 {
            return Err(wrong(format!("{inodes_per_group} inodes of {inode_bytes} bytes in a group")));
        }
        let inode_table_blocks = (inodes_per_group * inode_bytes).div_ceil(block_bytes);
        if inode_table_blocks > blocks {
            return Err(wrong(format!("an inode table of {inode_table_blocks} blocks")));
        }
        let sparse = if compat & COMPAT_SPARSE_SUPER2 != 0 {
            Sparse::Two([le32(raw, 0x24c).into(), le32(raw, 0x250).into()])
        } else if ro_compat & RO_COMPAT_SPARSE_SUPER != 0 {
            Sparse::Powers
        } else {
            Sparse::All
        };
        Ok(Self {
            block_bytes,
            blocks,
            first_data_block,
            blocks_per_group,
            clusters_per_group,
            cluster_blocks,
            groups,
            descriptor_bytes,
            inode_table_blocks,
            checksums,
            reserved_gdt_blocks: le16(raw, 0xce).into(),
            first_meta_bg: (incompat & INCOMPAT_META_BG != 0).then(|| le32(raw, 0x104).into()),
            sparse,
        })
    }

    /// Whether a group begins with a copy of the superblock.
    pub(super) fn has_superblock(&self, group: u64) -> bool {
        let is_power = |base: u64| {
            let mut power = base;
            while power < group {
                power *= base;
            }
            power == group
        };
        match self.sparse {
            _ if group == 0 => true,
            Sparse::Two(groups) => groups.contains(&group),
            Sparse::All => true,
            Sparse::Powers => group == 1 || (group % 2 == 1 && (is_power(3) || is_power(5) || is_power(7))),
        }
    }

    /// A program that has the file system mounted writes a sequence number here.
    fn check_mmp(&self, window: &Window<'_>, block: u64) -> Result<(), LeftAlone> {
        if block >= self.blocks {
            return Err(LeftAlone::damaged(format!("superblock: the block of MMP is {block}")));
        }
        let raw = window.bytes(block * self.block_bytes, 16)?;
        if le32(&raw, 0) != MMP_MAGIC || le32(&raw, 4) != MMP_CLEAN {
            return Err(LeftAlone::new(
                ReasonKind::Dirty,
                "another system has the file system mounted (MMP is not clean)",
            ));
        }
        Ok(())
    }
}

/// What the group descriptors are protected by, after the superblock's own checksum was verified.
fn check_sum(raw: &[u8], incompat: u32, ro_compat: u32) -> Result<Checksums, LeftAlone> {
    if ro_compat & RO_COMPAT_METADATA_CHECKSUM != 0 {
        if raw[0x175] != 1 {
            return Err(LeftAlone::unsupported(format!("checksum type {}", raw[0x175])));
        }
        if crc32c_raw(!0, &raw[..0x3fc]) != le32(raw, 0x3fc) {
            return Err(LeftAlone::damaged("the checksum of the superblock does not match"));
        }
        let uuid: [u8; 16] = get(raw, 0x68);
        let seed = if incompat & INCOMPAT_CHECKSUM_SEED != 0 { le32(raw, 0x270) } else { crc32c_raw(!0, &uuid) };
        return Ok(Checksums::Crc32c { seed });
    }
    if incompat & INCOMPAT_CHECKSUM_SEED != 0 {
        return Err(LeftAlone::damaged("superblock: a checksum seed without metadata_csum"));
    }
    if ro_compat & RO_COMPAT_GDT_CHECKSUM != 0 {
        return Ok(Checksums::Crc16 { uuid: get(raw, 0x68) });
    }
    Ok(Checksums::None)
}

fn check_features(compat: u32, incompat: u32, ro_compat: u32) -> Result<(), LeftAlone> {
    if incompat & INCOMPAT_JOURNAL_DEVICE != 0 {
        return Err(LeftAlone::unsupported("an external journal of another file system"));
    }
    for (what, flags, known) in [("incompatible", incompat, INCOMPAT_KNOWN), ("read-only", ro_compat, RO_COMPAT_KNOWN)]
    {
        if flags & !known != 0 {
            return Err(LeftAlone::unsupported(format!("{what} feature {:#x} of ext4", flags & !known)));
        }
    }
    if compat & COMPAT_FAST_COMMIT != 0 {
        return Err(LeftAlone::unsupported("the feature fast_commit of ext4"));
    }
    if ro_compat & RO_COMPAT_BIGALLOC != 0 && incompat & INCOMPAT_EXTENTS == 0 {
        return Err(LeftAlone::damaged("superblock: bigalloc without extents"));
    }
    Ok(())
}

/// Refuses a file system that is not clean.
fn check_state(raw: &[u8], compat: u32, incompat: u32) -> Result<(), LeftAlone> {
    let dirty = |sentence: &str| Err(LeftAlone::new(ReasonKind::Dirty, sentence));
    let state = le16(raw, 0x3a);
    if incompat & INCOMPAT_RECOVER != 0 {
        return dirty("the file system was not unmounted cleanly (needs_recovery): mount it once, or run e2fsck");
    }
    if state & STATE_ERRORS != 0 || le32(raw, 0x194) != 0 {
        return dirty("the kernel has recorded errors in the file system: run e2fsck");
    }
    if state & STATE_VALID == 0 {
        return dirty("the file system was not unmounted cleanly: run e2fsck");
    }
    // s_journal_dev says where the journal is; s_journal_inum is 0 then.
    if compat & COMPAT_HAS_JOURNAL != 0 && (le32(raw, 0xe0) == 0 || le32(raw, 0xe4) != 0) {
        return Err(LeftAlone::unsupported("an external journal"));
    }
    Ok(())
}
