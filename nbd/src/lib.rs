//! NBD: the protocol on the wire, for clients and servers.
//!
//! ```text
//!   wire/        structures <-> bytes, for both sides; no I/O
//! ```
//!
//! A server is a room of its own (`serve/`): it uses `wire` from here.

#![forbid(unsafe_code)]

pub mod wire;
