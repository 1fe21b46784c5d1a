//! Structures that state where on the disk they lie: for finding the place of a block whose table
//! entry is lost.
//!
//! ```text
//!   disk, as far as it can be read ─▶ Witness::learn   the file systems, and what their own
//!        │                                             structures predict (groups, directories)
//!   bytes of an unknown place ─────▶ Witness::look ─▶ Seen::At     "these bytes are byte N of the
//!                                                                  disk", with a weight
//!                                                  ─▶ Seen::Copies  a journal: copies of others
//! ```
//!
//! What counts as evidence, by file system:
//!
//! - A first superblock of ext4 or XFS with a checksum, if exactly one partition (or the whole
//!   disk) has its size and no known file system.
//! - ext4 with metadata_csum: copies of the superblock (their group number), blocks of inode tables
//!   (each inode's checksum gives its number), blocks of directories and of extent trees (the
//!   checksum gives the inode, and the inode or its tree the place), bitmaps whose checksum only
//!   one descriptor has. Without metadata_csum: only copies of the superblock.
//! - XFS version 5: every block of metadata and every inode has its own address and a CRC.
//! - NTFS: records of the MFT have their number and fixups; the runs of the MFT give the place.
//! - GPT: a header names its own sector.
//!
//! What must hold: a weight of [`PROOF`](crate::PROOF) is reached only by at least 64 bits that
//! would have to agree by chance (checksum, identity, number, and place in the block). Whoever
//! places a block must also see that nothing else in it contradicts ([`Witness::holds_copies`] says
//! where copies are normal). No structure can tell a file system's own block from a copy of all of
//! it inside a file.
//!
//! Everything read is hostile: maps are limited ([`REMEMBERED_MAX`]), and loops end by the size of
//! the disk.

mod gpt;

use crate::{
    ext, ntfs,
    read::{ReadAt, Window, one_extent},
    seen::{Anchor, PROOF, Seen},
    table, xfs,
};
use std::ops::Range;

/// Most file systems that are looked for.
const SYSTEMS_MAX: usize = 64;

/// What is known of the file systems of a disk.
#[derive(Debug)]
pub struct Witness {
    size_bytes: u64,
    sector_bytes: u32,
    ext: Vec<ext::Evidence>,
    xfs: Vec<xfs::Evidence>,
    ntfs: Vec<ntfs::Evidence>,
    /// Partitions without a file system that is known, or the whole disk.
    unknown: Vec<Range<u64>>,
}

impl Witness {
    /// Learns the file systems of a disk, of which parts may not be readable. `anchors` are places
    /// where one begins, besides those in the partition table.
    pub fn learn(disk: &dyn ReadAt, anchors: &[Anchor]) -> Self {
        let size_bytes = disk.size_bytes();
        // Where a partition or an anchor begins, and a superblock besides the first one.
        let partitions = table::find(disk).partitions.into_iter().map(|partition| (partition.range_bytes, None));
        let found = anchors.iter().map(|anchor| (anchor.start_bytes..size_bytes, Some(anchor.superblock_bytes)));
        let mut witness = Self {
            size_bytes,
            sector_bytes: disk.sector_bytes(),
            ext: Vec::new(),
            xfs: Vec::new(),
            ntfs: Vec::new(),
            unknown: Vec::new(),
        };
        for (range, copy) in partitions.chain(found).filter(|(range, _)| range.start < range.end) {
            let (start, whole) = (range.start, range.clone());
            if witness.systems() >= SYSTEMS_MAX || witness.knows(start) {
                continue;
            }
            let extents = one_extent(range);
            let window = Window::new(disk, &extents);
            witness.ext.extend(ext::Evidence::learn(&window, start, copy));
            witness.xfs.extend(xfs::Evidence::learn(&window, start, copy));
            witness.ntfs.extend(ntfs::Evidence::learn(&window, start));
            if copy.is_none() && !witness.knows(start) {
                witness.unknown.push(whole);
            }
        }
        witness
    }

    /// Whether a file system that begins here is known.
    fn knows(&self, start: u64) -> bool {
        self.ext.iter().any(|system| system.start_bytes() == start)
            || self.xfs.iter().any(|system| system.start_bytes() == start)
            || self.ntfs.iter().any(|system| system.start_bytes() == start)
    }

    /// Number of file systems whose structures are known.
    pub fn systems(&self) -> usize {
        self.ext.len() + self.xfs.len() + self.ntfs.len()
    }

    /// Looks at bytes whose first one lies at a multiple of 4096 of the disk. Blocks of all zeros
    /// say nothing.
    pub fn look(&self, bytes: &[u8], give: &mut dyn FnMut(Seen)) {
        gpt::look(bytes, self.size_bytes, self.sector_bytes, give);
        self.look_for_first(bytes, give);
        self.ext.iter().for_each(|system| system.look(bytes, give));
        self.xfs.iter().for_each(|system| system.look(bytes, give));
        self.ntfs.iter().for_each(|system| system.look(bytes, give));
    }

    /// First superblocks of file systems that are exactly as large as one partition without a known
    /// one.
    fn look_for_first(&self, bytes: &[u8], give: &mut dyn FnMut(Seen)) {
        if self.unknown.is_empty() {
            return;
        }
        for at in (0..bytes.len()).step_by(512) {
            let Some((place, blocks, block_bytes)) =
                ext::first_superblock(&bytes[at..]).or_else(|| xfs::first_superblock(&bytes[at..]))
            else {
                continue;
            };
            let fits = |range: &&Range<u64>| {
                (range.end - range.start) / block_bytes == blocks && (range.start + place) % 4096 == at as u64 % 4096
            };
            let mut volumes = self.unknown.iter().filter(fits);
            if let (Some(volume), None) = (volumes.next(), volumes.next()) {
                give(Seen::At {
                    within_bytes: at,
                    disk_offset_bytes: volume.start + place,
                    weight: PROOF,
                    what: "first superblock",
                });
            }
        }
    }

    /// Whether copies of structures are normal at this byte of the disk: it belongs to a journal.
    pub fn holds_copies(&self, disk_offset_bytes: u64) -> bool {
        self.ext.iter().any(|system| system.holds_copies(disk_offset_bytes))
            || self.xfs.iter().any(|system| system.holds_copies(disk_offset_bytes))
    }
}

/// Superblocks in `bytes`, which are those of the disk from `disk_offset_bytes` on (a multiple of
/// 512). Finds file systems whose partition table is lost.
pub fn anchors_in(bytes: &[u8], disk_offset_bytes: u64, give: &mut dyn FnMut(Anchor)) {
    for (index, sector) in bytes.chunks_exact(512).enumerate() {
        let at = index * 512;
        let before = ext::start_by_superblock(&bytes[at..])
            .or_else(|| xfs::start_by_group(&bytes[at..]))
            .or_else(|| ntfs::start_by_boot(sector));
        let Some(superblock_bytes) = before else { continue };
        if let Some(start_bytes) = (disk_offset_bytes + at as u64).checked_sub(superblock_bytes) {
            give(Anchor { start_bytes, superblock_bytes });
        }
    }
}
