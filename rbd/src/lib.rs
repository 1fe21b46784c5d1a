//! RBD images of a Ceph cluster as stores: raw disks, or the files of images.
//!
//! ```text
//!   uri.rs       rbd://POOL/IMAGE@SNAPSHOT?id=USER&conf=FILE
//!   functions.rs librados and librbd: their functions, loaded at run time
//!   cluster.rs   a connection to a cluster, shared by the images of the process
//!   image.rs     an open image: the calls that are safe to make
//!   lane.rs      requests under way: completions by an eventfd
//!   store.rs     an open image as a `Store`
//!   files.rs     names as paths: a `FileSystem`
//!   error.rs     what can go wrong, as sentences
//! ```
//!
//! The data flow:
//!
//! ```text
//!   engine ─ Lane::start ─▶ rbd_aio_read into the request's memory ─▶ librbd's own threads
//!                                                                        │ eventfd
//!   engine's ring polls it ─▶ Lane::drive ─▶ rbd_poll_io_events ◀────────┘ ─▶ the loan completes
//! ```
//!
//! No thread of ours waits for a request, and no thread of librbd runs our code. All `unsafe` code
//! is in `functions.rs`, `cluster.rs`, `image.rs` and `lane.rs`.

mod cluster;
mod error;
mod files;
mod functions;
mod image;
mod lane;
mod store;
#[cfg(feature = "testing")]
pub mod testing;
mod uri;

pub use error::{RbdError, Result};
pub use files::{RbdFiles, SCHEME};
pub use store::RbdStore;
pub use uri::RbdUri;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
