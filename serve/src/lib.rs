//! A disk to the outside: programs and the kernel reach it as if it were theirs.
//!
//! ```text
//!   nbd/           the NBD server: exports, connections, workers
//!   ephemeral.rs   a disk whose writes are dropped at the end
//!   metrics.rs     what a server counts        scrape.rs   telling it to Prometheus
//!   ublk/          the disk as a block device, by the kernel's ublk driver
//!   fuse/          the disk as a file, by the FUSE protocol on the block queue
//!   turn.rs        how much a worker answers at once
//!   reserve.rs     a few requests held back from a disk that ends them in batches
//!   contained.rs   a panic of one disk fails that disk's requests
//!   walk.rs        how much of a disk is looked at to find its extents
//!   attach/        the disk as a block device of this machine by one of these, mounted if wanted
//! ```
//!
//! Every server is a translation of requests on a wire to requests on the block queue. A worker is
//! one thread with one ring, on which both the wire and the disk are.

#![forbid(unsafe_code)]

pub mod attach;
mod contained;
pub mod ephemeral;
pub mod fuse;
pub mod metrics;
pub mod nbd;
mod reserve;
pub mod scrape;
mod turn;
pub mod ublk;
mod walk;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
