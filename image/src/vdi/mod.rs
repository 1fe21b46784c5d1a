//! VDI images (VirtualBox): dynamic, fixed and differencing, read, created and written.
//!
//! ```text
//!   layout.rs   header and places, validated
//!   image.rs    the trait Image: states of blocks, from the block map
//!   write.rs    the trait ImageWriter
//!   map.rs      entries of the map in memory: reserve, commit, reads
//!   prepare.rs  the I/O that reserve and commit need first
//!   survey.rs   what is used in the file, surveyed before the first change of an entry
//!   flush.rs    the ordered passes that make changes durable
//!   head.rs     the header of an image in use: its ids, its sizes
//!   compact.rs  freed space: its reuse, moves of blocks, cuts of the file
//!   grow.rs     a larger size              shrink.rs  a smaller one
//!   longer_map.rs  a block map that has no room for a larger size
//!   create.rs   new files
//!   check.rs    reports damage: entries, blocks that share space, space that no entry names
//!   salvage.rs  what can still be known of a damaged image
//! ```
//!
//! A differencing image names its parent by ids only; the caller looks for the file. An
//! invalid entry of the block map makes only its own block damaged.
//!
//! VDI has no log, so only the order of writes protects against a power cut. Invariants at every
//! instant:
//!
//! - The id of the contents is new and durable before the first write of a session is visible.
//! - An entry of the map reaches the file only after the block's payload is durable, and after the
//!   header that counts its space is. (Other programs put new blocks behind the spaces counted.)
//! - The space of a freed block is reused only after its removal from the map is durable
//!   ([`ImageWriter::recycle`](crate::ImageWriter::recycle)).
//!
//! Locks of a writable image: a mutex over map and space, under which no I/O happens (`write.rs`);
//! a mutex for surveys and growth of the file (`prepare.rs`); a mutex over the header (`head.rs`).
//! Concurrent flushes share a pass by the [`Barrier`](diskwright_store::Barrier). Reads of a
//! read-only image take no lock.

mod check;
mod compact;
mod create;
mod flush;
mod grow;
mod head;
mod image;
mod layout;
mod longer_map;
mod map;
mod prepare;
mod salvage;
mod shrink;
mod survey;
#[cfg(test)]
mod tests;
mod write;

pub(crate) use check::{begin_repair, examine};
pub(crate) use create::create;
pub(crate) use image::open;
pub(crate) use layout::parent_link;
pub(crate) use salvage::salvage;

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
