//! VMDK images: reads all kinds of extents, in one file or several.
//!
//! ```text
//!   text.rs     the descriptor, embedded or apart: CID, parent, extents, names of further files
//!   tables.rs   one sparse extent: directories, grain tables, compressed grains
//!   layout.rs   the extents as parts of the disk, and the block that divides them all
//!   image.rs    the trait Image: block states, compressed blocks
//!   check.rs    reports damage in the files
//! ```
//!
//! Kinds: monolithicSparse, monolithicFlat, twoGbMaxExtentSparse and Flat, vmfs (flat), custom
//! mixes of extents with ZERO and NOACCESS, streamOptimized, vmfsSparse (COWD), SESPARSE, and
//! children of all of these by CID and parentCID. Writing is refused by name.

mod check;
mod compact;
mod document;
mod flush;
mod grains;
mod growth;
mod image;
mod layout;
mod prepare;
mod tables;
mod text;
mod write;

#[cfg(test)]
mod tests;

pub(crate) use check::examine;
pub(crate) use image::{open, parent_link, references};

use crate::ImageError;
use diskwright_format::vmdk::VmdkError;
use diskwright_store::Store;
use std::sync::Arc;

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

/// The refusal to create an image.
pub(crate) fn refused_to_create(stores: &[Arc<dyn Store>]) -> ImageError {
    ImageError::BadOptions {
        path: stores.first().map(|store| store.name().to_owned()).unwrap_or_default(),
        what: "VMDK is only read".into(),
        hint: "use VHDX, VHD or raw".into(),
    }
}

/// The refusal to read an image with damaged tables.
pub(crate) fn refused_to_rescue(store: &dyn Store) -> ImageError {
    ImageError::Unsupported {
        path: store.name().to_owned(),
        what: "the rescue of a VMDK".into(),
        hint: "`convert` it: what its redundant tables still show is read".into(),
    }
}
