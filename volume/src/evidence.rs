//! Structures that state where on the disk they lie: for finding the place of a block whose table
//! entry is lost.
//!
//! ```text
//!   disk, as far as it can be read ─▶ Witness::learn   the file systems, and what their own
//!        │                                             structures predict (groups, directories)
//!   bytes of an unknown place ─────▶ Witness::look ─▶ Seen::At     "these bytes are byte N of the
//!                                                                  disk", with a weight
//!                                                  ─▶ Seen::Copies  a journal: copies of structures
//! ```
//!
//! What counts as evidence, by file system:
//!
//! - ext4 with metadata_csum: copies of the superblock (their group number), blocks of inode tables
//!   (each inode's checksum gives its number), blocks of directories and of extent trees (the
//!   checksum gives the inode, and the inode or its tree the place), bitmaps whose checksum only one
//!   descriptor has. Without metadata_csum: only copies of the superblock.
//! - XFS version 5: every block of metadata and every inode has its own address and a CRC.
//! - NTFS: records of the MFT have their number and fixups; the runs of the MFT give the place.
//! - GPT: a header names its own sector.
//!
//! What must hold: a weight of [`PROOF`](crate::PROOF) is reached only by at least 64 bits that would have to agree
//! by chance (checksum, identity, number, and place in the block). Whoever places a block must also
//! see that nothing else in it contradicts ([`Witness::holds_copies`] says where copies are normal).
//! No structure can tell a file system's own block from a copy of all of it inside a file.
//!
//! Everything read is hostile: maps are limited ([`REMEMBERED_MAX`]), and loops end by the size of
//! the disk.

mod gpt;

use crate::{
    ext, ntfs,
    read::{ReadAt, Window, one_extent},
    seen::{Anchor, Seen},
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
}

impl Witness {
    /// Learns the file systems of a disk, of which parts may not be readable. `anchors` are places
    /// where one begins, besides those in the partition table.
    pub fn learn(disk: &dyn ReadAt, anchors: &[Anchor]) -> Self {
        let size_bytes = disk.size_bytes();
        let mut starts: Vec<Range<u64>> =
            table::find(disk).partitions.into_iter().map(|partition| partition.range_bytes).collect();
        let known: Vec<u64> = starts.iter().map(|range| range.start).collect();
        let further = anchors.iter().map(|anchor| anchor.start_bytes).filter(|start| !known.contains(start));
        starts.extend(further.filter(|&start| start < size_bytes).map(|start| start..size_bytes));
        let mut witness =
            Self { size_bytes, sector_bytes: disk.sector_bytes(), ext: Vec::new(), xfs: Vec::new(), ntfs: Vec::new() };
        for range in starts.into_iter().filter(|range| range.start < range.end).take(SYSTEMS_MAX) {
            let start = range.start;
            let extents = one_extent(range);
            let window = Window::new(disk, &extents);
            witness.ext.extend(ext::Evidence::learn(&window, start));
            witness.xfs.extend(xfs::Evidence::learn(&window, start));
            witness.ntfs.extend(ntfs::Evidence::learn(&window, start));
        }
        witness
    }

    /// Number of file systems whose structures are known.
    pub fn systems(&self) -> usize {
        self.ext.len() + self.xfs.len() + self.ntfs.len()
    }

    /// Looks at bytes whose first one lies at a multiple of 4096 of the disk. Blocks of all zeros
    /// say nothing.
    pub fn look(&self, bytes: &[u8], give: &mut dyn FnMut(Seen)) {
        gpt::look(bytes, self.size_bytes, self.sector_bytes, give);
        self.ext.iter().for_each(|system| system.look(bytes, give));
        self.xfs.iter().for_each(|system| system.look(bytes, give));
        self.ntfs.iter().for_each(|system| system.look(bytes, give));
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
        let start = ext::start_by_superblock(&bytes[at..])
            .or_else(|| xfs::start_by_group(&bytes[at..]))
            .or_else(|| ntfs::start_by_boot(sector));
        if let Some(start) = start.and_then(|before| (disk_offset_bytes + at as u64).checked_sub(before)) {
            give(Anchor { start_bytes: start });
        }
    }
}
