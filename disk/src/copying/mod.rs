//! New images, and copies of disks.
//!
//! ```text
//!   compare.rs        compares the contents of two disks
//!   convert.rs        copies one disk into another
//!   copy.rs           the copying itself: two workers, many requests in flight
//!   create.rs         creates images
//!   mapped.rs         the block device that a new image maps
//!   new_size.rs       which size a disk gets, and what its partition table becomes
//!   packing/          compresses a disk on all processors, for formats with compressed blocks
//!   room.rs           how much space a new image will need
//!   partial.rs        a new file under its temporary name until it is complete
//! ```
//!
//! A copy has a temporary name until it is complete and durable.

pub(crate) mod compare;
pub(crate) mod convert;
pub(crate) mod copy;
pub(crate) mod create;
mod mapped;
pub(crate) mod new_size;
pub(crate) mod packing;
pub(crate) mod partial;
pub(crate) mod room;
