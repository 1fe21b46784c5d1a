//! iSCSI: the wire protocol, the SCSI commands of disks, and a logical unit as a block device.
//!
//! ```text
//!   wire/     PDUs and the text of a login <-> bytes; no I/O   (RFC 7143)
//!   scsi/     commands, sense data, pages <-> bytes; no I/O    (SPC-4, SBC-3)
//!   uri.rs    iscsi://HOST/TARGET/LUN <-> values
//!   client/   the initiator: logs in, and accesses a logical unit through the block queue
//! ```
//!
//! The target is in the crate `serve/`.

#![forbid(unsafe_code)]

mod client;
pub mod scsi;
pub mod uri;
pub mod wire;

pub use client::{ClientError, IscsiDevice, UnitInfo};
pub use uri::IscsiUri;

/// Copies `N` bytes from an offset. Bytes beyond the end are 0.
pub(crate) fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    let there = bytes.get(at..).unwrap_or_default();
    let len = there.len().min(N);
    out[..len].copy_from_slice(&there[..len]);
    out
}

pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(array(bytes, at))
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(array(bytes, at))
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(array(bytes, at))
}

/// Writes `bytes` at an offset that lies in `page`.
pub(crate) fn put(page: &mut [u8], at: usize, bytes: &[u8]) {
    page[at..at + bytes.len()].copy_from_slice(bytes);
}

/// Writes text into a field of `len` bytes, cut to fit and padded with `fill`.
pub(crate) fn put_text(page: &mut [u8], at: usize, len: usize, text: &str, fill: u8) {
    let field = &mut page[at..at + len];
    field.fill(fill);
    let cut = text.len().min(len);
    field[..cut].copy_from_slice(&text.as_bytes()[..cut]);
}

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
