//! VMDK images: all kinds of extents are read; hosted sparse ones, flat ones and COWD are also
//! created and written.
//!
//! ```text
//!   text.rs      the descriptor, embedded or apart: CID, parent, extents, names of further files
//!   tables.rs    one sparse extent: directories, grain tables, compressed grains
//!   layout.rs    the extents as parts of the disk, and the block that divides them all
//!   image.rs     the trait Image: block states, compressed blocks
//!   write.rs     the trait ImageWriter
//!   grains.rs    entries of grains in memory: reserve, commit, reads
//!   prepare.rs   the I/O that reserve and commit need first
//!   grow.rs      a larger disk              new_size.rs  whether a disk can get a larger size
//!   shrink.rs    a smaller disk
//!   growth.rs    what is used in an extent's file, surveyed before the first change of an entry
//!   starts.rs    where grains begin: the memory of a survey
//!   flush.rs     the ordered passes that make changes durable
//!   document.rs  the descriptor of an image in use: its CID changes before the first write
//!   link.rs      the link of a child to its parent, as the descriptor records it
//!   compact.rs   freed space: its reuse, moves of grains, cuts of files
//!   create.rs    new files
//!   device.rs    new files that map a block device, and the mapping files of such images
//!   check.rs     reports damage in the files
//!   salvage.rs   what can still be known of a damaged file: salvage_tables.rs, salvage_stream.rs
//! ```
//!
//! Kinds: monolithicSparse, monolithicFlat, twoGbMaxExtentSparse and Flat, vmfs (flat), custom
//! mixes of extents with ZERO and NOACCESS, streamOptimized, vmfsSparse (COWD), SESPARSE, and
//! children of all of these by CID and parentCID. Writing is refused by name where grains are
//! compressed, for SESPARSE, and for extents that are not writable ([`layout::Layout::refusal`]).
//!
//! VMDK has no log, so only the order of writes protects against a power cut. Invariants at every
//! instant:
//!
//! - The CID is new and durable before the first write of a session is visible.
//! - An entry of a grain table reaches the file only after the grain's payload is durable. A
//!   directory refers to a table only after the zeros or entries of that table are durable.
//! - The space of a freed grain is reused only after its removal from both copies of the table is
//!   durable ([`ImageWriter::recycle`](crate::ImageWriter::recycle)).
//!
//! Locks of a writable image: a mutex over tables and space, under which no I/O happens
//! (`write.rs`); a mutex for surveys and growth of files (`prepare.rs`); a mutex over the text of
//! the descriptor (`document.rs`). Concurrent flushes share a pass by the
//! [`Barrier`](diskwright_store::Barrier) of the first file. Reads of a read-only image take no
//! lock.

mod check;
mod compact;
mod create;
mod device;
mod document;
mod flush;
mod give_up;
mod grains;
mod grow;
mod growth;
mod image;
mod layout;
mod link;
mod new_size;
mod prepare;
mod salvage;
mod salvage_stream;
mod salvage_tables;
mod shrink;
mod starts;
mod tables;
mod text;
mod write;

#[cfg(test)]
mod tests;

pub(crate) use check::{begin_repair, examine};
pub(crate) use create::{SUBFORMATS, create, further_files, is_esx_kind, is_flat_kind};
pub(crate) use device::DEVICE_SUBFORMATS;
pub use device::mapped_device;
pub use image::has_descriptor;
pub(crate) use image::{open, parent_link, references};
pub(crate) use salvage::salvage;

use crate::ImageError;
use diskwright_format::vmdk::VmdkError;
use diskwright_store::Store;

fn bad(what: impl Into<String>, hint: impl Into<String>) -> ImageError {
    ImageError::BadOptions { path: Default::default(), what: what.into(), hint: hint.into() }
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

fn damaged(store: &dyn Store, error: &VmdkError) -> ImageError {
    corrupt(store, error.structure, error.offset_bytes, error.found.clone(), error.expected.clone())
}
