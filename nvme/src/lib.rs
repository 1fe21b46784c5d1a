//! NVMe/TCP: the wire protocol.
//!
//! ```text
//!   wire/   messages <-> bytes, for target and host; no I/O
//! ```
//!
//! The target is in the crate `serve/`.

#![forbid(unsafe_code)]

pub mod wire;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
