//! VHD images (fixed, dynamic, differencing): open, create, write, check.
//!
//! ```text
//!   footers.rs   the footer at the end, its copy at offset 0, and which of them is used
//!   left_behind.rs  the footer of a fixed disk whose growth was cut short
//!   layout.rs    footer + header + locators, validated: the offsets of everything in the file
//!   table.rs     the BAT, read by the entry or cached by the page
//!   order.rs     the blocks sorted by offset, in bounded memory
//!   batmap.rs    XenServer's map of full blocks, which no write may overlap
//!   bitmap.rs    sector bitmaps: bit order of the file <-> bit order in memory
//!   image.rs     the trait Image: block states and bitmaps
//!   write.rs     the trait ImageWriter: reserve, commit, discard, in memory
//!   prepare.rs   the I/O that reserve and commit need first
//!   reads.rs     block states and bitmaps of a writable image
//!   flush.rs     the two ordered passes that make changes durable
//!   grow.rs      enlarges an open disk
//!   compact.rs   moves blocks to lower places, so that the file can be cut
//!   shrink.rs    makes a disk smaller
//!   sizes.rs     which sizes a disk can get
//!   link.rs      a link to a parent -> parent locators; the time stamp of a parent
//!   relink.rs    replaces the link of an open disk to its parent
//!   growth.rs    the end of the file: space for new blocks, and the footer that moves with it
//!   survey.rs    the walk over all blocks before the first change
//!   space_preparation.rs  the I/O for space at the end of the file
//!   create.rs    new files
//!   check.rs     reports damage in a file and how it is repaired; its batmap: check_batmap.rs
//!   check_space.rs  misplaced blocks, overlaps, leaked space, and how they are repaired
//!   rebuild.rs   footers and headers that follow from the rest of the file
//!   salvage.rs   what can still be known of a damaged file
//! ```
//!
//! VHD has no log, so only the order of writes protects against a power cut. Invariants at every
//! instant:
//!
//! - The footer copy at offset 0 is valid. The footer at the end moves when the file grows and may
//!   be missing after a power cut. Then the copy is used, and the next write restores the footer
//!   first.
//! - A BAT entry reaches the file only after the block's payload and bitmap are durable. In a block
//!   that has a BAT entry, a bit of the bitmap reaches the file only after that sector's payload is
//!   durable.
//! - The space of a freed block is reused only after the removal of its BAT entry is durable
//!   ([`ImageWriter::recycle`](crate::ImageWriter::recycle)).
//!
//! Locks of a writable image: a mutex over table pages, bitmaps and space, under which no I/O
//! happens ([`write`]); a mutex for growth of the file (`prepare.rs`); and the
//! [`Barrier`](diskwright_store::Barrier), by which concurrent flushes share a pass. Reads of a
//! read-only image take no lock.

mod batmap;
mod bitmap;
mod check;
mod check_batmap;
mod check_space;
mod compact;
mod create;
mod flush;
mod footers;
mod grow;
mod growth;
mod image;
mod layout;
mod left_behind;
mod link;
mod order;
mod prepare;
mod reads;
mod rebuild;
mod relink;
mod salvage;
mod shrink;
mod sizes;
mod space_preparation;
mod survey;
mod table;
mod write;

#[cfg(test)]
mod tests;

pub(crate) use check::examine;
pub use create::create;
pub(crate) use image::{open, parent_link};
pub use link::set_modified_seconds;
pub(crate) use salvage::salvage;

/// Whether a file without a footer at its end or its beginning is a fixed disk whose growth was cut
/// short.
///
/// # Errors
/// `Io`.
pub(crate) fn has_left_footer(store: &dyn Store) -> crate::Result<bool> {
    let len_bytes = store.len_bytes().map_err(|e| ImageError::io("get the length of the file", store, 0, e))?;
    Ok(left_behind::find(store, len_bytes)?.is_some())
}

use crate::ImageError;
use diskwright_format::vhd::VhdError;
use diskwright_store::Store;
use std::ops::Range;

/// Alignment of the payload of new blocks, as in Windows 7 and later, and of the BAT of new files.
const PAGE_BYTES: u64 = 4096;

/// Whether two ranges have a byte in common.
fn overlaps(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}

fn corrupt(
    store: &dyn Store,
    structure: &'static str,
    offset_bytes: u64,
    found: impl Into<String>,
    expected: impl Into<String>,
) -> ImageError {
    ImageError::Corrupt {
        path: store.name().to_owned(),
        structure,
        offset_bytes,
        found: found.into(),
        expected: expected.into(),
    }
}

fn damaged(store: &dyn Store, error: &VhdError) -> ImageError {
    corrupt(store, error.structure, error.offset_bytes, error.fault.to_string(), error.fault.expected())
}

/// Checks an image as [`Driver::check`](crate::Driver::check) does.
#[cfg(test)]
pub(crate) fn check(store: std::sync::Arc<dyn Store>) -> crate::Result<crate::CheckReport> {
    Ok(examine(store, false)?.report)
}
