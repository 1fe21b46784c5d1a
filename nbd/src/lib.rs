//! NBD: the wire protocol, and a server's export as a block device.
//!
//! ```text
//!   wire/        structures <-> bytes, for client and server; no I/O
//!   uri.rs       nbd://HOST/EXPORT and other NBD URIs <-> values
//!   tls.rs       a folder of certificates -> a rustls configuration, for client and server
//!   client/      connects, negotiates, and accesses an export through the block queue
//! ```
//!
//! The server is in the crate `serve/`, which uses `wire` and `tls`.

#![forbid(unsafe_code)]

mod client;
pub mod tls;
pub mod uri;
pub mod wire;

pub use client::{ClientError, ExportInfo, NbdDevice, NbdStore};
pub use uri::{Endpoint, NbdUri};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
