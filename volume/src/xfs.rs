//! XFS, versions 4 and 5: the free-space trees by block (bnobt) of the allocation groups.
//!
//! ```text
//!   superblock.rs   geometry and features (CRC in version 5)
//!   log.rs          is the last record of the log an unmount record?
//!      │
//!      ▼ for each allocation group
//!   tree.rs         AGF (CRC) ─▶ bnobt from its root to its leaves (CRC, owner, order)
//!      │            ─▶ sum of the free blocks = count of the AGF? longest too?
//!      ▼
//!   sink
//! ```
//!
//! The blocks of the AGFL, which the trees take when they grow, count as used. A log that is not
//! clean is never replayed here: the trees on the disk are older than the log then.

mod evidence;
mod log;
mod superblock;
mod tree;

pub(crate) use evidence::{Evidence, first_superblock, start_by_group};

use crate::{
    identity::Identity,
    read::Window,
    reason::{LeftAlone, Stop},
    sink::Sink,
};
use superblock::Superblock;

/// Label and UUID, as far as the superblock can be read.
pub(crate) fn identify(window: &Window<'_>) -> Option<Identity> {
    superblock::identify(window)
}

/// First byte after the file system.
pub(crate) fn end_bytes(window: &Window<'_>) -> Result<u64, LeftAlone> {
    let superblock = Superblock::read(window)?;
    Ok(superblock.blocks * superblock.block_bytes)
}

/// Sends the free blocks to `sink`.
pub(crate) fn scan(window: &Window<'_>, sink: &mut Sink<'_>) -> Result<(), Stop> {
    let superblock = Superblock::read(window)?;
    log::check(window, &superblock)?;
    sink.reserve(superblock.log_start_bytes..superblock.log_start_bytes + superblock.log_bytes);
    for group in 0..superblock.groups {
        tree::scan_group(window, &superblock, group, sink)?;
    }
    Ok(())
}
