//! Placement: where the bytes of a store lie in the files of other stores, in one copy or several.
//!
//! ```text
//!   part of a request ─▶ Placement::place ─┬─▶ a part for each copy, in the member's file
//!                                          └─▶ no copy: the store's lane (a read, if it has one),
//!                                              or its own methods, in the pool
//!   start of a write   ─▶ Placement::note, if it was asked for
//!   end of a read      ─▶ Placement::is_intact, if it was asked for
//!   end of such a part ─▶ Placement::release ─ failed ─▶ the store's own methods repeat it
//!   sync               ─▶ Placement::unsynced ─▶ a sync of each of these members
//! ```
//!
//! A store with a placement (a file of a space, a cached object) has no data file. The engine asks
//! it for every transfer, and moves the bytes between the caller's memory and the members' files
//! directly. Everything that is rare is left to the store's blocking methods: the first write to a
//! range, zeroing, and whatever failed. A store therefore has one place where failures of members
//! are handled. A store whose bytes may be far away has a lane too, which carries out the reads
//! that have no copy or have failed.
//!
//! Invariant: between [`Placement::place`] and [`Placement::release`] the bytes stay where they
//! are, so no part reads or writes a range that belongs to something else by then. The hold of a
//! part that is never answered is never released.

use crate::range::{Access, FileRange};
use std::{fmt, io};

/// Maximum number of copies of a range.
pub const COPIES_MAX: usize = 3;

/// One copy of a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CopyAt {
    /// Number of the member in whose store the copy lies; see [`Store::member`](crate::Store).
    pub member: u8,
    /// Offset of its first byte in that store.
    pub offset_bytes: u64,
}

/// Where the first bytes of a range lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Placed {
    /// Number of bytes for which this holds: at least 1, at most the length of the range.
    pub len_bytes: u64,
    /// The copies; only the first `count` are meant.
    pub copies: [CopyAt; COPIES_MAX],
    /// How many copies a transfer goes to: 1 for a read, all for a write. 0 means that only the
    /// store's own methods reach the range, unless it is a read and the range `is_zero`.
    pub count: u8,
    /// Whether the range has no copy and reads as zeros.
    pub is_zero: bool,
    /// Whether a read must be compared by [`Placement::is_intact`] when it has ended.
    pub is_checked: bool,
    /// Whether [`Placement::note`] must see the bytes of a write before it starts.
    pub is_noted: bool,
    /// Passed to [`Placement::release`] once for each copy.
    pub hold: u64,
}

/// The placement of a store; see the module documentation. No method waits for I/O.
pub trait Placement: Send + Sync + fmt::Debug {
    /// Where the first bytes of `range`, which is not empty, lie; and holds them there. `may_note`:
    /// a write may have [`Placed::is_noted`]. Its bytes do not change until it has ended, and it
    /// need not be durable by itself.
    fn place(&self, range: FileRange, access: Access, may_note: bool) -> Placed;
    /// The bytes of a write for which [`Placed::is_noted`] was set. Called before the first
    /// transfer to a copy starts.
    fn note(&self, hold: u64, bytes: &[u8]);

    /// The transfer to or from one copy has ended. After a failure the engine repeats it by the
    /// store's own methods.
    fn release(&self, member: u8, hold: u64, access: Access, ok: bool);

    /// Whether bytes that were read at `offset_bytes` of this store are what was written there.
    /// They are a piece of one range for which [`Placed::is_checked`] was set, a whole number of
    /// blocks of 4 KiB if the range was. If they are not, the engine repeats the read by the
    /// store's own methods. Called before [`Placement::release`].
    fn is_intact(&self, hold: u64, offset_bytes: u64, bytes: &[u8]) -> bool;

    /// A write of a copy that was to be durable has failed, perhaps its sync: earlier writes of the
    /// member may be lost. Called before [`Placement::release`].
    fn sync_failed(&self, member: u8, error: &io::Error);

    /// The members whose files a sync of this store must sync, one bit for each number. All writes
    /// that completed before the call are covered. `None` if only the store's own sync will do.
    fn unsynced(&self) -> Option<u64>;

    /// The sync of a member that [`Placement::unsynced`] named has ended. After a failure the
    /// engine calls the store's own sync.
    fn synced(&self, member: u8, result: &io::Result<()>);
}
