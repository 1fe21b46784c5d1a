//! A virtual disk: a chain of images, seen as one block device; and its life.
//!
//! ```text
//!   options.rs   how a disk is opened
//!   open.rs      path -> chain of images, each parent found, allowed and proved to be the right one
//!   image_file.rs one image with its files
//!   parts.rs     which files a raw disk in several parts consists of
//!   gate.rs      which parents may be opened; who names this image as its parent
//!   chain.rs     the images with their ids, the map over them, the geometry: swapped as one
//!   map.rs       who owns each unit of the disk, folded over the chain once, looked up without a lock
//!   shared.rs    what a disk and its queues share: the mutation lock, flush, grace periods, close
//!   plan.rs      what a request means, decided from memory alone
//!   mutation.rs  what the mutation lock guards
//!   work.rs      what a plan lacks: tables read, space prepared, blocks filled or decoded
//!   carry_out.rs how that is done, without the lock
//!   claims.rs    blocks that are being changed, and requests that wait for them
//!   guard.rs     a panic ends its request, and no other disk
//!   clerk.rs     threads that wait for the disk, so that queues need not
//!   device.rs    the Disk: a BlockDevice
//!   queue.rs     one thread's way through the map to the engine
//!   epoch.rs     when freed space can be used again
//!   create.rs    new images
//!   place.rs     a FILE or a URI -> a disk or an export
//!   convert.rs   from one disk to another
//!   check.rs     damage in an image, and broken links to its parents
//!   compare.rs   whether two disks hold the same bytes
//! ```

#![forbid(unsafe_code)]

mod carry_out;
mod chain;
mod check;
mod claims;
mod clerk;
pub mod compare;
pub mod convert;
pub mod create;
pub mod device;
mod epoch;
pub mod error;
mod gate;
mod guard;
mod holes;
mod image_file;
mod inside;
mod map;
mod mutation;
mod open;
mod options;
mod parts;
pub mod place;
mod plan;
mod queue;
#[cfg(all(test, feature = "shuttle"))]
mod schedules;
mod shared;
mod work;

pub use chain::Layer;
pub use check::{Checked, check};
pub use compare::{CompareOutcome, compare};
pub use convert::{ConvertOptions, ConvertOutcome, Lost, LostRange, convert, size_note};
pub use create::{CreateRequest, create};
pub use device::{Disk, MAP_MEMORY_BYTES};
pub use error::{DiskError, Result};
pub use open::{parent_time_doubt, read_without_lock};
pub use options::{OpenOptions, ParentPolicy, Reach};
pub use parts::{Named, Parts, check_parts, parts_of};
pub use place::{Opened, Place, in_a_file};

/// Told how far a long operation has come; return `false` to stop it.
pub type Progress<'a> = dyn FnMut(u64, u64) -> bool + 'a;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
