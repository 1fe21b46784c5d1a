//! The PDUs of iSCSI and the text keys of a login (RFC 7143).
//!
//! ```text
//! LOGIN      I: Login (text keys)      T: Login response         login.rs, text.rs
//! COMMANDS   I: SCSI Command (+ data)  T: SCSI Response          requests.rs, replies.rs
//!            T: R2T                    I: Data-Out
//!            T: Data-In, the last one with the status
//! OTHERS     NOP-Out / NOP-In, Text, Task Management, Logout, Reject, Async
//! ```
//!
//! I is the initiator, T the target. A PDU is a header of 48 bytes, further headers that are
//! skipped here, a digest of the headers, data padded to 4 bytes, and a digest of the data.
//! All numbers are big-endian. No bytes cause a panic.

pub mod chap;
pub mod login;
pub mod pdu;
pub mod replies;
pub mod requests;
pub mod text;

pub use login::{LoginReply, LoginRequest, LoginStatus, Stage};
pub use pdu::{Counters, Header, Opcode, PduError, RejectReason, Residual, Sent};
pub use replies::{DataIn, ReadyToTransfer, ScsiReply, TaskReply};
pub use requests::{DataOut, ScsiCommand, TaskFunction};

/// The port that IANA assigned to iSCSI.
pub const DEFAULT_PORT: u16 = 3260;

/// Length of the basic header, in bytes.
pub const HEADER_BYTES: usize = 48;

/// Length of a digest, in bytes.
pub const DIGEST_BYTES: usize = 4;

/// The tag that belongs to no task.
pub const NO_TAG: u32 = u32::MAX;

/// The maximum length of an iSCSI name, in bytes.
const NAME_BYTES_MAX: usize = 223;

/// Bytes of padding after data of this length.
pub fn padding_of(data_bytes: usize) -> usize {
    data_bytes.wrapping_neg() & 3
}

/// Checks an iSCSI name (RFC 7143, 4.2.7; RFC 3722).
///
/// # Errors
/// What is wrong, as the end of a sentence.
pub fn check_name(name: &str) -> Result<(), &'static str> {
    if name.len() > NAME_BYTES_MAX {
        return Err("it is longer than 223 bytes");
    }
    if !name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-.:".contains(&byte)) {
        return Err("it may have lower-case letters, digits, '-', '.' and ':' only");
    }
    if let Some(rest) = name.strip_prefix("iqn.") {
        let (date, authority) = rest.split_at_checked(7).unwrap_or((rest, ""));
        let is_date = date.len() == 7
            && date.bytes().enumerate().all(|(at, byte)| if at == 4 { byte == b'-' } else { byte.is_ascii_digit() });
        let is_right = is_date && authority.len() > 1 && authority.starts_with('.') && !authority[1..].starts_with(':');
        return if is_right { Ok(()) } else { Err("after 'iqn.' come a date as in 2026-11 and a reversed domain") };
    }
    let hex = |text: &str, lengths: &[usize]| {
        lengths.contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit())
    };
    match name.split_once('.') {
        Some(("eui", id)) if hex(id, &[16]) => Ok(()),
        Some(("naa", id)) if hex(id, &[16, 32]) => Ok(()),
        _ => Err("it must begin with 'iqn.', or be 'eui.' or 'naa.' with hexadecimal digits"),
    }
}

#[cfg(test)]
mod tests;
