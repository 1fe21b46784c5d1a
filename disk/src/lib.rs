//! A virtual disk: a chain of images, seen as one block device; and its life.
//!
//! ```text
//!   open.rs      path -> chain of images, each parent found, allowed and proved to be the right one
//!   gate.rs      which parents may be opened; who names this image as its parent
//!   map.rs       who owns each unit of the disk, folded over the chain once, looked up without a lock
//!   device.rs    the Disk: a BlockDevice
//!   queue.rs     one thread's way through the map to the engine
//!   epoch.rs     when freed space can be used again
//!   flusher.rs   the thread that makes metadata durable, one cycle for all that wait
//!   create.rs    new images
//!   place.rs     a FILE or a URI -> a disk or an export
//!   convert.rs   from one disk to another
//!   compare.rs   whether two disks hold the same bytes
//! ```

#![forbid(unsafe_code)]

pub mod compare;
pub mod convert;
pub mod create;
pub mod device;
mod epoch;
pub mod error;
mod flusher;
mod gate;
mod inside;
mod map;
pub mod open;
pub mod place;
mod plan;
mod queue;

pub use compare::{CompareOutcome, compare};
pub use convert::{ConvertOptions, ConvertOutcome, convert};
pub use create::{CreateRequest, create};
pub use device::{Disk, Layer};
pub use error::{DiskError, Result};
pub use open::{OpenOptions, ParentPolicy, Reach, parent_time_doubt};
pub use place::{Opened, Place, in_a_file};

/// Told how far a long operation has come; return `false` to stop it.
pub type Progress<'a> = dyn FnMut(u64, u64) -> bool + 'a;
