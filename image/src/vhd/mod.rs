//! VHD images: fixed, dynamic, differencing; to open, create, write and check.
//!
//! ```text
//!   footers.rs   the footer at the tail, its copy at 0, and which of them to believe
//!   layout.rs    footer + header + locators, checked against the file: where everything is
//!   table.rs     the BAT, read by the entry or cached by the page
//!   order.rs     the blocks in the order of their places, in bounded memory
//!   batmap.rs    XenServer's map of full blocks, which is kept clear of
//!   bitmap.rs    sector bitmaps: most significant bit first in the file, least significant first in memory
//!   image.rs     the trait Image: block states and bitmaps
//!   write.rs     the trait ImageWriter: reserve, commit, discard, in memory
//!   prepare.rs   what reserve and commit had to wait for
//!   reads.rs     what a writable image says of its blocks
//!   flush.rs     the two ordered passes that make it all durable
//!   grow.rs      a larger disk, while it is open
//!   growth.rs    the file's end: pieces for new blocks, and the footer that moves with it
//!   create.rs    new files
//!   check.rs     what is wrong with a file, its batmap (check_batmap.rs) included (findings.rs)
//! ```
//!
//! VHD has no log, so the order of writes is all there is against a power cut. These hold at every
//! instant:
//!
//! - The copy of the footer at offset 0 is right. The one at the tail is moved when the file grows
//!   and may be missing after a cut; then the copy serves, and the next write puts the tail right
//!   first.
//! - A BAT entry reaches the file only after the block's payload and its bitmap are durable. The
//!   same holds for a bit in a bitmap that is already visible, and the payload of that sector.
//! - Space that a block gave up is not used again before the removal of its BAT entry is durable
//!   ([`ImageWriter::recycle`](crate::ImageWriter::recycle)).
//!
//! A writable image has a mutex over its table pages, bitmaps and space, under which nothing waits
//! for the file ([`write`]); one for whoever lets the file grow (`prepare.rs`); and the
//! [`Barrier`](diskwright_store::Barrier) that lets concurrent flushes share a pass. Reads of a
//! read-only image take no lock.

mod batmap;
mod bitmap;
mod check;
mod check_batmap;
mod create;
mod findings;
mod flush;
mod footers;
mod grow;
mod growth;
mod image;
mod layout;
mod order;
mod prepare;
mod reads;
mod table;
mod write;

#[cfg(test)]
mod tests;

pub use check::check;
pub use create::{MAX_FIXED_BYTES, create};
pub use image::{VhdImage, open, parent_link};

use crate::ImageError;
use diskwright_format::vhd::VhdError;
use diskwright_store::Store;
use std::ops::Range;

/// Payload of new blocks lies at multiples of this, as Windows 7 and later place it; and so does
/// the BAT of new files.
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
