//! Structures that state where on the disk they lie: for finding the place of a block whose table
//! entry is lost.
//!
//! ```text
//!   disk, as far as it can be read ─▶ DiskEvidence::learn   the file systems, and what their own
//!        │                                                  structures predict (groups, folders)
//!   bytes of an unknown place ─▶ DiskEvidence::look ─▶ Sighting::At      "these bytes are byte N
//!                                                   │                    of the disk": a weight
//!                                                   └▶ Sighting::Copies  a journal: copies
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
//! - NTFS: records of the MFT have their number and fixups; the runs of the MFT give the place. A
//!   record does not name its volume. So it counts only if it was changed after the volume was
//!   formatted, and only while no other NTFS can be on the disk whose MFT is not known.
//! - GPT: a header names its own sector.
//!
//! What must hold: a weight of [`PROOF`](crate::PROOF) is reached only by at least 64 bits that
//! would have to agree by chance (checksum, identity, number, and place in the block). The caller
//! must also check that nothing else in the block contradicts ([`DiskEvidence::holds_copies`] says
//! where copies are normal). No structure can distinguish a file system's own block from a copy of
//! the whole block inside a file.
//!
//! Everything read is hostile: the bytes that are read and the entries that are kept in memory have
//! a budget (`budget.rs`), which all file systems share.

mod budget;
mod gpt;
#[cfg(test)]
mod tests;

use crate::{
    ext, ntfs,
    read::{ReadAt, Window, one_extent},
    sighting::{Anchor, PROOF, Sighting},
    table,
    table::TableKind,
    xfs,
};
pub(crate) use budget::Metered;
use std::{cell::Cell, ops::Range};

/// Maximum number of file systems that are looked for.
const SYSTEMS_MAX: usize = 64;

/// What is known of the file systems of a disk.
#[derive(Debug)]
pub struct DiskEvidence {
    size_bytes: u64,
    sector_bytes: u32,
    ext: Vec<ext::Evidence>,
    xfs: Vec<xfs::Evidence>,
    ntfs: Vec<ntfs::Evidence>,
    /// Partitions without a file system that is known, or the whole disk.
    unknown: Vec<Range<u64>>,
    /// Whether there may be an NTFS whose MFT is not known. Its records look like those of others.
    has_hidden_ntfs: Cell<bool>,
}

impl DiskEvidence {
    /// Learns the file systems of a disk, of which parts may not be readable. `anchors` are places
    /// where one begins, besides those in the partition table. Not more than `budget_bytes` are
    /// read, in pieces of 64 KiB: what is not known then proves nothing.
    pub fn learn(disk: &dyn ReadAt, anchors: &[Anchor], budget_bytes: u64) -> Self {
        let metered = Metered::new(disk, budget_bytes);
        let disk: &dyn ReadAt = &metered;
        let size_bytes = disk.size_bytes();
        let table = table::find(disk);
        let has_no_table = table.kind == TableKind::None;
        // Where a partition or an anchor begins, and a superblock besides the first one.
        let partitions = table.partitions.into_iter().map(|partition| (partition.range_bytes, None));
        let found = anchors.iter().map(|anchor| (anchor.start_bytes..size_bytes, Some(anchor.superblock_bytes)));
        let mut witness = Self {
            size_bytes,
            sector_bytes: disk.sector_bytes(),
            ext: Vec::new(),
            xfs: Vec::new(),
            ntfs: Vec::new(),
            unknown: Vec::new(),
            has_hidden_ntfs: Cell::new(false),
        };
        for (range, copy) in partitions.chain(found).filter(|(range, _)| range.start < range.end) {
            let (start, whole) = (range.start, range.clone());
            if witness.systems() >= SYSTEMS_MAX || witness.knows(start) {
                continue;
            }
            let extents = one_extent(range);
            let window = Window::new(disk, &extents);
            witness.ext.extend(ext::Evidence::learn(&window, start, copy, &metered));
            witness.xfs.extend(xfs::Evidence::learn(&window, start, copy));
            witness.ntfs.extend(ntfs::Evidence::learn(&window, start));
            if copy.is_none() && !witness.knows(start) {
                witness.unknown.push(whole);
            }
        }
        witness.look_for_hidden_ntfs(disk, anchors, has_no_table);
        witness
    }

    /// Looks for signs of an NTFS whose MFT is not known: its boot sector, or a place where a boot
    /// sector may have been and that cannot be read.
    fn look_for_hidden_ntfs(&self, disk: &dyn ReadAt, anchors: &[Anchor], has_no_table: bool) {
        let sector_at = |offset_bytes: u64| {
            let mut sector = [0; 512];
            disk.read_at(offset_bytes, &mut sector).ok().map(|()| sector)
        };
        if self.ntfs.is_empty() {
            return;
        }
        let is_unread = |range: &Range<u64>| sector_at(range.start).is_none();
        // Without a partition table the other volumes of the disk are not known.
        let lost_table = has_no_table && !self.knows(0) && sector_at(0).is_none();
        let mut hidden = lost_table || self.unknown.iter().any(is_unread);
        for anchor in anchors.iter().filter(|anchor| anchor.superblock_bytes == 0) {
            hidden |= !self.knows(anchor.start_bytes)
                && !self.ntfs.iter().any(|system| system.end_bytes() == anchor.start_bytes)
                && sector_at(anchor.start_bytes).is_none_or(|sector| ntfs::serial_of_boot(&sector).is_some());
        }
        self.has_hidden_ntfs.set(hidden);
    }

    /// Whether a sector is the boot sector, or its copy, of an NTFS that is not known.
    fn is_other_ntfs(&self, sector: &[u8]) -> bool {
        let serial = ntfs::serial_of_boot(sector);
        serial.is_some_and(|serial| self.ntfs.iter().all(|system| system.serial() != serial))
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
    pub fn look(&self, bytes: &[u8], give: &mut dyn FnMut(Sighting)) {
        gpt::look(bytes, self.size_bytes, self.sector_bytes, give);
        self.look_for_first(bytes, give);
        self.ext.iter().for_each(|system| system.look(bytes, give));
        self.xfs.iter().for_each(|system| system.look(bytes, give));
        if self.ntfs.is_empty() {
            return;
        }
        if bytes.chunks_exact(512).any(|sector| self.is_other_ntfs(sector)) {
            self.has_hidden_ntfs.set(true);
        }
        if !self.has_hidden_ntfs.get() {
            self.ntfs.iter().for_each(|system| system.look(bytes, give));
        }
    }

    /// First superblocks of file systems that are exactly as large as one partition without a known
    /// one.
    fn look_for_first(&self, bytes: &[u8], give: &mut dyn FnMut(Sighting)) {
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
                give(Sighting::At {
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
