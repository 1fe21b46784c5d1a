//! One image file as a mapping from ranges of a virtual disk to ranges of a store.
//!
//! An image never moves guest payload. An image reports where the bytes of a block lie
//! ([`BlockState`]), reserves space for blocks that have none, and keeps its tables consistent and
//! durable. Modules:
//!
//! ```text
//!   image.rs   traits Image and ImageWriter, which every format implements
//!   info.rs    the description of an open image: format, type, sizes, identities, link
//!   block.rs   the state of one block, and the changes of its mapping
//!   create_options.rs  what a new image is to be
//!   driver.rs  one record for each format: its capabilities, and how its images are opened
//!   probe/     detects the format of a file (by a table of known signatures) and opens it
//!   raw.rs     a raw file or device as an image (flat.rs: as a fixed VHD; padded.rs: its end)
//!   split.rs   a raw disk in several files (disk.001, disk.002, ...)
//!   vhd/       fixed, dynamic, differencing VHD: open, create, write, check
//!   vhdx/      the same for VHDX, and its log
//!   qcow2/     qcow2: open, create, write, check
//!   vdi/       fixed, dynamic, differencing VDI: open, create, write, check
//!   vmdk/      VMDK in one file or several: reads all extents, creates and writes sparse and flat
//!   references.rs  the further files that an image names
//!   inner.rs   internal snapshots and bitmaps of an image
//!   identity.rs  the identity by which children name their parent
//!   space.rs   allocator of payload blocks in a growing file
//!   salvage.rs what can still be known of an image whose tables are damaged
//!   needs.rs   what a block still needs before it can be reserved or committed
//!   findings.rs  what a check finds, and the changes that repair it
//!   repair.rs    applies these changes until nothing is left to repair
//!   error.rs   errors, each a sentence for the user
//! ```

#![forbid(unsafe_code)]

mod block;
mod create_options;
mod devices;
mod driver;
mod error;
mod findings;
mod flat;
mod identity;
mod image;
mod info;
mod inner;
mod needs;
mod number_set;
mod padded;
#[cfg(test)]
mod parent_links;
pub mod probe;
pub mod qcow2;
mod raw;
mod references;
mod repair;
pub mod salvage;
mod signature;
mod space;
pub mod split;
mod vdi;
pub mod vhd;
pub mod vhdx;
pub mod vmdk;
#[cfg(test)]
mod waiting;

pub use block::{BlockState, Commit, MovePlace, MoveTo, Reservation, SectorBitmap};
pub use create_options::{CreateOptions, FormatOptions};
pub use devices::{DeviceOptions, DevicePart, PartSource};
pub use driver::{Driver, Identities};
pub use error::{ImageError, Result};
pub use findings::{CheckReport, Finding, Repair, Severity};
pub use identity::LinkageId;
pub use image::{Image, ImageWriter};
pub use info::{DiskType, Format, ImageInfo, LogState, ParentLink};
pub use inner::{InternalBitmap, InternalSnapshot};
pub use references::{Reference, ReferenceKind};
pub use repair::{RepairStep, repair_image};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
