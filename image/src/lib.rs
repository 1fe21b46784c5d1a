//! One image file as a mapping: from ranges of a virtual disk to ranges of a store.
//!
//! An image never moves guest payload. It says where a block's bytes lie ([`BlockState`]), reserves
//! space for blocks that have none, and keeps its tables true and durable. The rooms:
//!
//! ```text
//!   image.rs   the traits Image and ImageWriter: what every format offers
//!   driver.rs  what a format can do, and how its images are opened: one record for each
//!   probe/     which format a file has (a table of those that are recognised), and opening it
//!   raw.rs     a raw file or device as an image
//!   split.rs   a raw disk that continues in further files
//!   vhd/       fixed, dynamic, differencing VHD: open, create, write, check
//!   vhdx/      the same for VHDX, and its log
//!   space.rs   where the next payload block goes in a growing file
//!   lacks.rs   what reservations had to wait for, so that it can be prepared
//!   error.rs   what can go wrong, in sentences
//! ```

#![forbid(unsafe_code)]

pub mod driver;
pub mod error;
pub mod image;
mod lacks;
pub mod probe;
pub mod raw;
pub mod space;
pub mod split;
pub mod vhd;
pub mod vhdx;
#[cfg(test)]
mod waiting;

pub use driver::Driver;
pub use error::{ImageError, Result};
pub use image::{
    BlockState, CheckReport, Commit, CreateOptions, DiskType, Finding, Format, Image, ImageInfo, ImageWriter, LogState,
    ParentLink, Reservation, SectorBitmap, Severity,
};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
