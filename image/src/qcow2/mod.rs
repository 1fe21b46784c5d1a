//! qcow2 images: everything that QEMU writes is read and, with some exceptions by name, written.
//!
//! ```text
//!   header.rs      header and extensions of a file; what is refused by name
//!   link.rs        the backing file and the data file that a header names
//!   records.rs     the snapshot table and the bitmap directory, read by the record
//!   layout.rs      header + tables of one view (the disk, or a snapshot), validated
//!   tables.rs      entries of the L1 and the L2 tables, read on demand
//!   compressed.rs  clusters that are decompressed, and the last ones that were
//!   image.rs       the trait Image: states of blocks
//!   check.rs       reports damage, and how it is repaired: check_find.rs, check_walk.rs,
//!                  check_counts.rs, check_refcounts.rs, check_new_blocks.rs, check_overlaps.rs,
//!                  check_give_up.rs, check_contents.rs
//!   write.rs       the trait ImageWriter, and the order of all changes: clusters.rs, prepare.rs,
//!                  growth.rs, flush.rs, front.rs, reuse.rs, compact.rs, main_tables.rs,
//!                  resize.rs; their
//!                  memory: pages.rs, counts.rs; clusters in another file: data_file.rs; parts of
//!                  clusters: subclusters.rs, partial.rs
//!   create.rs      new images
//!   salvage.rs     what can still be known of a damaged image: salvage_header.rs, salvage_space.rs
//! ```
//!
//! A *block* of the image is what can be mapped by itself: a cluster, or with extended L2 entries a
//! subcluster, which has data, reads as zeros or reads the backing file whatever its neighbours do.
//! A subcluster has one of three states, so a bitmap of one bit for each would not be enough.
//!
//! Nothing in the file is trusted. A table is read by the piece that is needed, so its length in
//! the header costs neither memory nor time. An invalid entry makes only its own blocks
//! [`BlockState::Damaged`](crate::BlockState::Damaged).
//!
//! An image that is read has no lock, except the one over decompressed clusters. write.rs says
//! which locks an image has that is written.

mod check;
mod check_contents;
mod check_counts;
mod check_find;
mod check_give_up;
mod check_new_blocks;
mod check_overlaps;
mod check_refcounts;
mod check_walk;
mod clusters;
mod compact;
mod compressed;
mod counts;
mod create;
mod data_file;
mod flush;
mod front;
mod growth;
mod header;
mod image;
mod layout;
mod link;
mod main_tables;
mod pages;
mod partial;
mod prepare;
mod records;
mod resize;
mod reuse;
mod salvage;
mod salvage_header;
mod salvage_space;
mod subclusters;
mod tables;
mod write;

#[cfg(test)]
mod tests;

pub(crate) use check::examine;
pub(crate) use create::create;
pub use image::{Qcow2Image, open};
pub(crate) use link::{parent_link, references};
pub(crate) use salvage::salvage;

use crate::ImageError;
use diskwright_format::qcow2::Invalid;
use diskwright_store::Store;

/// Converts an [`Invalid`] of a structure that begins at `base_bytes` of the file.
fn corrupt(store: &dyn Store, base_bytes: u64, invalid: Invalid) -> ImageError {
    ImageError::Corrupt {
        path: store.name().to_owned(),
        structure: invalid.structure,
        offset_bytes: base_bytes.saturating_add(invalid.offset_bytes),
        found: invalid.found,
        expected: invalid.expected,
    }
}
