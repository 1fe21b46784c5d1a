//! What a target holds and who uses it, found before it is measured: no data are overwritten by
//! mistake, and no figure is taken for one of storage that is not.
//!
//! ```text
//!   contents.rs   how much of the working set has space, how much of a sample is zeros or copies
//!   doubts.rs     what of that makes the job measure something else than storage: warnings
//!   usage.rs      who uses a device or a file: mounts, swap, holders, loop devices
//!   magic.rs      what lies on a disk, by the marks at its front
//!   guard.rs      whether it may be written
//! ```
//!
//! Everything here reads; nothing here writes, but for the mark on a file that the lab has made
//! itself.

pub mod contents;
pub mod doubts;
pub mod guard;
pub mod magic;
pub mod usage;

pub use contents::look;
pub use doubts::working_sets;
pub use guard::{Writing, allow};
