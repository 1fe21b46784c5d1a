//! Inspects a target before it is measured: its users and its contents. This prevents that data are
//! overwritten by mistake, and that figures are not of storage.
//!
//! ```text
//!   contents.rs   how much of the working set is allocated; how much of a sample is zeros, copies
//!   warnings.rs   warnings from contents and job
//!   usage.rs      who uses a device or a file: mounts, swap, holders, loop devices
//!   magic.rs      what a disk holds, by signatures
//!   guard.rs      whether a target may be written
//! ```
//!
//! This module only reads. The one exception is the extended attribute on a file that the lab
//! created.

pub mod contents;
pub mod guard;
pub mod magic;
pub mod usage;
pub mod warnings;

pub use contents::contents_of;
pub use guard::{Writing, allow};
