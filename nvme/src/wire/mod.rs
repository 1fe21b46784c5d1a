//! NVMe/TCP as structures and bytes, for target and host. Pure.
//!
//! ```text
//! CONNECTION  H: ICReq               C: ICResp                pdu.rs: Initialize
//! QUEUE       H: Connect + data      C: response              fabrics.rs
//! REQUESTS    H: CapsuleCmd (+ data) C: CapsuleResp           command.rs: Command, Completion
//!             C: R2T                 H: H2CData               pdu.rs: DataPdu
//!             C: C2HData                                      status.rs: Status <-> io::Error
//!             reservations of a namespace                     reservation.rs
//! SECRETS     messages of DH-HMAC-CHAP, if asked for          auth.rs
//! PAGES       identify.rs: controllers, namespaces            log.rs: log pages
//! the end     H or C: TermReq                                 pdu.rs: Terminate
//! ```
//!
//! H is the host, C the controller. Every PDU begins with a header of 8 bytes ([`PduHeader`]) that
//! tells the length of the rest. A header digest may follow the header, and a data digest the data.
//! [`PduHeader::check`] refuses a header whose lengths are not those of its kind, so what follows
//! is decoded from slices of known size. No bytes cause a panic.
//!
//! All numbers are little-endian. "Base" is the NVM Express Base Specification 2.0, "NVM" the NVM
//! Command Set Specification 1.0, "TCP" the NVM Express TCP Transport Specification 1.0; section
//! names in the comments are theirs.

pub mod auth;
pub mod command;
pub mod fabrics;
pub mod identify;
pub mod log;
pub mod pdu;
pub mod reservation;
pub mod status;

pub use command::{Command, Completion, Sgl, admin, nvm};
pub use fabrics::{ConnectData, DISCOVERY_NQN, check_nqn};
pub use pdu::{DataPdu, Digests, Initialize, PduError, PduFlags, PduHeader, PduKind, Terminate};
pub use status::Status;

/// The port that IANA assigned to NVMe over fabrics.
pub const DEFAULT_PORT: u16 = 4420;

/// Size of a page of identify data, in bytes.
pub const PAGE_BYTES: usize = 4096;

/// Copies `N` bytes from an offset. Bytes beyond the end are 0.
pub(crate) fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    let there = bytes.get(at..).unwrap_or_default();
    let len = there.len().min(N);
    out[..len].copy_from_slice(&there[..len]);
    out
}

pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(array(bytes, at))
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array(bytes, at))
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array(bytes, at))
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

/// The text of a field, without what pads it. Bytes that are not UTF-8 are replaced.
pub(crate) fn text_at(page: &[u8], at: usize, len: usize) -> String {
    let field = page.get(at..at + len).unwrap_or_default();
    let end = field.iter().position(|&byte| byte == 0).unwrap_or(field.len());
    String::from_utf8_lossy(&field[..end]).trim_end().to_owned()
}

#[cfg(test)]
mod tests;
