//! The write-back cache: small writes to slow slabs go to a log on the fast members first.
//!
//! ```text
//!   small write ─▶ a place in the log ─▶ the engine's transfers ─▶ live          `Ring`
//!   flush       ─▶ headers that name what is new ─▶ one sync for each member     this file
//!   read        ─▶ live? from the log, compared with its checksum : from the slab
//!   destage     ─▶ the oldest blocks, in the order of addresses ─▶ their slabs   `destage`
//!               ─▶ sync ─▶ anchor, durable ─▶ their places are free
//!   open        ─▶ anchor ─▶ headers ─▶ what is live                             `replay`
//! ```
//!
//! The log is a file of the pool, on the fast tier, with as many copies as the pool keeps. So its
//! slabs are mirrored, made equal after a power cut, rebuilt and moved like all others, and a
//! member that dies is a lost copy of them.
//!
//! Blocks are named by file, slab and block, not by where the slab lies: a slab may move while
//! blocks of it are in the log. What enters: whole blocks of 4 KiB, at most [`ENTRY_BYTES_MAX`], to
//! a mapped slab with a copy on a slow member. Streams pass by, unless the log names the slab.
//!
//! What must hold at any moment of a power cut:
//! - A block is live for a replay if a header names it, unless a newer row does, or one that
//!   forgets its slab. So a write may go past the log only to a slab that the log does not name:
//!   before, its live blocks are destaged, durably, and then it is forgotten, durably.
//! - A header is written after the transfers of its blocks have ended, and before the sync of the
//!   flush. Both are durable then, or the flush was not answered.
//! - The anchor moves after what it passes is durable in its slabs, and a place is used again after
//!   the anchor is durable.
//!
//! Locks: `destaging` (one round at a time), then `flushing` (headers are written in order), then
//! those of the pool. `inner` is taken last, and never held for I/O. A thread that has a slab for
//! itself does not wait for room in the log, since the thread that makes room waits
//! for slabs.

mod destage;
mod flush;
#[cfg(test)]
mod model_tests;
mod replay;
mod ring;
mod state;

pub(crate) use destage::start_worker;
pub use replay::{CACHE_BYTES_DEFAULT, Emptied};
pub(crate) use ring::{Ended, Found};
pub use state::CacheStatus;
pub(crate) use state::{Cache, sums_of_blocks};
