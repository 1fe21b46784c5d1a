//! NBD: the protocol on the wire, and an export of a server as a block device.
//!
//! ```text
//!   wire/        structures <-> bytes, for both sides; no I/O
//!   uri.rs       nbd://HOST/EXPORT and its kin <-> values
//!   tls.rs       a folder of certificates -> what rustls needs, for both sides
//!   client/      connect, negotiate, and drive an export through the block queue
//! ```
//!
//! A server is a room of its own (`serve/`): it uses `wire` and `tls` from here.

#![forbid(unsafe_code)]

pub mod client;
pub mod tls;
pub mod uri;
pub mod wire;

pub use client::{ClientError, ExportInfo, NbdDevice, NbdStore};
pub use uri::{Endpoint, NbdUri};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
