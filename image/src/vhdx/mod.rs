//! VHDX: open, create, write, check.
//!
//! ```text
//!   open.rs     file -> headers -> log replay (log.rs) -> regions -> metadata -> Layout, ImageInfo
//!   layout.rs   where the tables are; BAT entries <-> block states, validated
//!   image.rs    VhdxImage: its parts, its locks, and its reads
//!   writer.rs   the trait ImageWriter: each call is passed on to the file that implements it
//!   state.rs    memory of a writable image: table pages (pages.rs), space, reservations
//!   tables.rs   the current tables: the file's bytes with the cached pages laid over them
//!   blocks.rs   life cycle of a block: reserve and commit, in memory
//!   prepare.rs  the I/O that reserve and commit need first: pages, the survey, space
//!   survey.rs   which parts of the file are in use (marks.rs); once per session
//!   flush.rs    makes table pages durable through the log (log_writer.rs); close
//!   grow.rs     enlarges an open disk
//!   compact.rs  moves blocks to lower places, so that the file can be cut
//!   shrink.rs   makes a disk smaller
//!   link.rs     a link to a parent <-> the parent locator
//!   relink.rs   replaces the link of an open disk to its parent
//!   header.rs   header updates; writes and syncs of metadata
//!   create.rs   new files
//!   salvage.rs  what can still be known of a damaged file
//!   check.rs    reports all damage in a file, and how it is repaired
//!   check_metadata.rs  contradictions in the metadata
//!   check_space.rs  overlaps and leaked space
//!   give_up.rs  changes of single entries that a repair makes
//!   repair.rs   identities, log and proofs that a repair needs
//! ```
//!
//! Open writes nothing (unless the log must be replayed), and a session that changes nothing leaves
//! the file unchanged byte for byte. `flush.rs` explains the order of writes.

mod blocks;
mod check;
mod check_metadata;
mod check_space;
mod compact;
mod create;
mod flush;
mod give_up;
mod grow;
mod header;
mod image;
mod layout;
mod link;
mod log;
mod log_writer;
mod marks;
mod open;
mod pages;
mod prepare;
mod relink;
mod repair;
mod salvage;
mod shrink;
mod state;
mod survey;
mod tables;
#[cfg(test)]
mod tests;
mod writer;

pub(crate) use check::examine;
pub use create::create;
pub(crate) use image::open;
pub(crate) use open::parent_link;
pub(crate) use repair::{begin_repair, settle_log};
pub(crate) use salvage::salvage;

use crate::error::ImageError;
use diskwright_format::vhdx::Invalid;
use diskwright_store::Store;
use diskwright_store::sync::{Mutex, MutexGuard};

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

/// Locks the mutex, even after a panic of another thread. Every change of the tables happens after
/// all steps that can fail, so a panic leaves the tables consistent.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Checks an image as [`Driver::check`](crate::Driver::check) does.
#[cfg(test)]
pub(crate) fn check(store: std::sync::Arc<dyn Store>) -> crate::Result<crate::CheckReport> {
    Ok(examine(store, false)?.report)
}
