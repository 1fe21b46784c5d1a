//! Servers: they make a disk reachable for other programs and for the kernel.
//!
//! ```text
//!   net/           the loop of the servers of the network: connections, workers, exports
//!   nbd/           NBD on that loop
//!   nvme/          NVMe/TCP on that loop
//!   iscsi/         iSCSI on that loop
//!   vhost_user/    the disk of a virtual machine: a vhost-user-blk device
//!   attach/        the disk as a block device of this machine, mounted on request
//!   ublk/          the disk as a block device, by the kernel's ublk driver
//!   fuse/          the disk as a file, by the FUSE protocol on the block queue
//!   ephemeral.rs   a disk whose writes are dropped when it is closed
//!   control/       other programs ask the process that has a disk open: statistics, drain, resize
//!   metrics.rs     counters and latency histograms   scrape.rs   the Prometheus endpoint
//!   turn.rs        how many requests a worker answers in one turn
//!   reserve.rs     holds back a few reads from a disk that completes requests in batches
//!   panic_guard.rs a panic in one disk's queue fails only that disk's requests
//!   threads.rs     a thread of a server
//!   inbox.rs       messages to a thread that sleeps in its ring
//!   walk.rs        finds extents in windows that grow
//! ```
//!
//! Every server translates requests of a wire protocol into requests of a block queue. A worker is
//! one thread with one io_uring ring. The ring carries both the protocol's sockets (or device
//! files) and the disk's I/O.
#![forbid(unsafe_code)]

pub mod attach;
pub mod control;
pub mod ephemeral;
mod fuse;
mod inbox;
pub mod iscsi;
mod keyring;
pub mod metrics;
pub mod nbd;
pub mod net;
pub mod nvme;
mod panic_guard;
pub mod reservations;
mod reserve;
pub mod scrape;
mod threads;
mod turn;
mod ublk;
pub mod vhost_user;
mod walk;

pub use diskwright_store::secrets;
pub use keyring::Keyring;
pub use threads::ThreadError;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
