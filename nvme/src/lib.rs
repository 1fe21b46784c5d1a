//! NVMe/TCP: the wire protocol, and a target's namespace as a block device.
//!
//! ```text
//!   wire/     messages <-> bytes, for target and host; no I/O
//!   uri.rs    nvme://HOST/NQN <-> values
//!   key.rs    keys of DH-HMAC-CHAP
//!   client/   the host: connects, and accesses a namespace through the block queue
//! ```
//!
//! The target is in the crate `serve/`.

#![forbid(unsafe_code)]

mod client;
pub mod key;
pub mod uri;
pub mod wire;

pub use client::{ClientError, NamespaceInfo, NvmeDevice};
pub use uri::NvmeUri;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
