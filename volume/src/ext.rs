//! ext2, ext3 and ext4: the block bitmaps of the groups (Linux, Documentation/filesystems/ext4).
//!
//! ```text
//!   superblock.rs   features, geometry, state; refuses what is not clean or not known
//!      │
//!      ▼ for each group, in the order of the disk
//!   groups.rs       descriptor (checksum) ─▶ bitmap (checksum, or computed if BLOCK_UNINIT)
//!      │            ─▶ free clusters counted = count of the descriptor?
//!      ▼
//!   sink
//! ```
//!
//! A group gives up its free clusters only if its descriptor's checksum is right (crc16 or
//! metadata_csum), its bitmap's checksum is right (metadata_csum), the number of zero bits is the
//! descriptor's count of free clusters, and the group's own structures are in use. Any group that
//! fails leaves the whole file system alone. A journal that needs recovery is never replayed here.

mod evidence;
mod groups;
mod reverse_crc;
mod superblock;

pub(crate) use evidence::{Evidence, first_superblock, start_by_superblock};

use crate::{
    identity::Identity,
    read::Window,
    reason::{LeftAlone, Stop},
    sink::Sink,
};
use superblock::Superblock;

/// Name, label and UUID, as far as the superblock can be read.
pub(crate) fn identify(window: &Window<'_>) -> Option<Identity> {
    superblock::identify(window)
}

/// First byte after the file system.
pub(crate) fn end_bytes(window: &Window<'_>) -> Result<u64, LeftAlone> {
    let superblock = Superblock::read(window)?;
    Ok(superblock.blocks * superblock.block_bytes)
}

/// Sends the free clusters to `sink`.
pub(crate) fn scan(window: &Window<'_>, sink: &mut Sink<'_>) -> Result<(), Stop> {
    let superblock = Superblock::read(window)?;
    groups::scan(window, &superblock, sink)
}
