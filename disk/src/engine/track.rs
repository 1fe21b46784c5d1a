//! Change tracking: which ranges of a disk have changed since named points.
//!
//! ```text
//!   points.rs    Disk::start_tracking, stop_tracking, points, changed_since
//!   resume.rs    looks for points when a disk is opened; keeps them when it gets another size or
//!                another image
//!   tracker.rs   marks of writes in memory, and what is durable of them; why a crash loses none
//!   sidecar.rs   the file NAME.tracks beside the image (format: `diskwright_format::tracks`)
//!   identity.rs  whether the image is the one that was tracked, or others have written to it
//!   bits.rs      one bit for each grain        changed.rs   the result: sorted ranges
//! ```
//!
//! The file lies beside the name of the disk, not inside the image: raw disks and VHDs have no
//! place for it, and a child that joins on top takes the name over. Every open for writing looks
//! for it (`resume.rs`). A disk that is opened without it (by another program, by name of a frozen
//! image) has another identity afterwards, and then everything counts as changed.
//!
//! What the operations do:
//!
//! | operation | points |
//! |---|---|
//! | write, zero, discard, shared ranges, blocks that `compact` finds free | marked |
//! | `resize` | kept; a new range counts as changed |
//! | `compact`, blocks of zeros and moved blocks | kept: the contents stay |
//! | `snapshot`, and merges of a disk in use | kept: the new image is named in the file |
//! | `merge` of a disk that is not in use | everything has changed |
//! | `reconnect` | kept if the parent has the same identity |
//! | `snapshot revert`, a copy, another program's write | everything has changed |
//! | `move` | refused |
//!
//! Rejected: marking each write in the file before it (one fdatasync for each request); a bitmap
//! that is written only at a clean close, as QEMU does (after a crash a whole new backup); the
//! DataWriteGuid alone for a VHDX that was closed (a program that writes to the file as bytes does
//! not change it).

mod bits;
pub(crate) mod changed;
pub(crate) mod identity;
pub(crate) mod points;
pub(crate) mod resume;
mod sidecar;
pub(crate) mod tracker;
