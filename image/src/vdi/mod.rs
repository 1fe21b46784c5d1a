//! VDI images (VirtualBox): dynamic, fixed and differencing, read.
//!
//! ```text
//!   layout.rs   header and places, validated
//!   image.rs    the trait Image: states of blocks, from the block map, which is read on demand
//!   check.rs    reports damage: entries, blocks that share space, space that no entry names
//! ```
//!
//! A differencing image names its parent by its id only; whoever opens it looks for the file. An
//! invalid entry of the block map makes only its own block damaged.

mod check;
mod image;
mod layout;
#[cfg(test)]
mod tests;

pub(crate) use check::examine;
pub use image::{VdiImage, open};
pub(crate) use layout::parent_link;

use crate::ImageError;
use diskwright_format::vhdx::Invalid;
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
