//! VHDX: open, create, write, check.
//!
//! ```text
//!   open.rs     file -> headers -> (log.rs: replay) -> region table -> metadata -> Layout, ImageInfo
//!   layout.rs   where the tables are; BAT entries <-> block states, checked
//!   image.rs    VhdxImage: what it consists of, which lock guards what, and its reads
//!   writer.rs   its writes, each handed to the file that does it
//!   state.rs    what is in memory of an image that is written: table pages (pages.rs), space, reservations
//!   tables.rs   the tables as they are now: the file's bytes under the cached pages
//!   blocks.rs   the life of a block: reserve and commit, in memory
//!   prepare.rs  what reserve and commit had to wait for: pages, the survey, space
//!   survey.rs   what of the file is in use (marks.rs), once per session, before the first change
//!   flush.rs    the cycle that makes table pages durable through the log (log_writer.rs); close
//!   grow.rs     a larger disk, while it is open
//!   header.rs   header updates, and how metadata is written and synced
//!   create.rs   new files
//!   check.rs    everything that is wrong with a file
//! ```
//!
//! Nothing is written at open (unless the log must be replayed), and a session that changes nothing
//! leaves the file as it was, byte for byte. The order of what is written is argued in `flush.rs`.

mod blocks;
mod check;
mod create;
mod flush;
mod grow;
mod header;
mod image;
mod layout;
mod log;
mod log_writer;
mod marks;
mod open;
mod pages;
mod prepare;
mod state;
mod survey;
mod tables;
#[cfg(test)]
mod tests;
mod writer;

pub use check::check;
pub use create::create;
pub use image::{VhdxImage, open};
pub use open::parent_link;

use crate::error::ImageError;
use diskwright_format::vhdx::Invalid;
use diskwright_store::Store;
use diskwright_store::sync::{Mutex, MutexGuard};

/// An [`Invalid`] of a structure that begins at `base_bytes` of the file.
fn corrupt(store: &dyn Store, base_bytes: u64, invalid: Invalid) -> ImageError {
    ImageError::Corrupt {
        path: store.name().to_owned(),
        structure: invalid.structure,
        offset_bytes: base_bytes.saturating_add(invalid.offset_bytes),
        found: invalid.found,
        expected: invalid.expected,
    }
}

/// Locks. A thread that panicked while it held the lock has left the tables as some completed step
/// made them: every change is made after all that can fail.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
