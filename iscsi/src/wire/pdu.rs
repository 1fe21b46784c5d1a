//! What all PDUs have: the basic header and the numbers of a session (RFC 7143, 11.2).

use super::HEADER_BYTES;
use crate::{put, u32_at, u64_at};

/// The kinds of PDUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
#[expect(missing_docs, reason = "the names of the RFC")]
pub enum Opcode {
    NopOut = 0x00,
    ScsiCommand = 0x01,
    TaskManagement = 0x02,
    Login = 0x03,
    Text = 0x04,
    DataOut = 0x05,
    Logout = 0x06,
    Snack = 0x10,
    NopIn = 0x20,
    ScsiResponse = 0x21,
    TaskManagementResponse = 0x22,
    LoginResponse = 0x23,
    TextResponse = 0x24,
    DataIn = 0x25,
    LogoutResponse = 0x26,
    ReadyToTransfer = 0x31,
    Async = 0x32,
    Reject = 0x3f,
}

impl Opcode {
    /// What a target sends.
    fn of_target(bits: u8) -> Option<Self> {
        [
            Self::NopIn,
            Self::ScsiResponse,
            Self::TaskManagementResponse,
            Self::LoginResponse,
            Self::TextResponse,
            Self::DataIn,
            Self::LogoutResponse,
            Self::ReadyToTransfer,
            Self::Async,
            Self::Reject,
        ]
        .into_iter()
        .find(|&opcode| opcode as u8 == bits & 0x3f)
    }

    /// What an initiator sends.
    fn of_initiator(bits: u8) -> Option<Self> {
        [
            Self::NopOut,
            Self::ScsiCommand,
            Self::TaskManagement,
            Self::Login,
            Self::Text,
            Self::DataOut,
            Self::Logout,
            Self::Snack,
        ]
        .into_iter()
        .find(|&opcode| opcode as u8 == bits & 0x3f)
    }
}

/// Why a PDU is wrong. The connection cannot go on after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PduError {
    /// The data are longer than what was agreed on.
    #[error("a PDU has {found} bytes of data; at most {max} were agreed on")]
    DataTooLong {
        /// Their length.
        found: usize,
        /// The limit.
        max: usize,
    },
    /// The digest of the headers is wrong.
    #[error("the digest of a PDU's header is {found:#010x}, and {expected:#010x} was expected")]
    HeaderDigest {
        /// What the PDU has.
        found: u32,
        /// What its bytes have.
        expected: u32,
    },
    /// A PDU of this kind is not allowed now.
    #[error("a PDU with the opcode {found:#04x} is not allowed here")]
    Opcode {
        /// The opcode.
        found: u8,
    },
}

/// Why a PDU was not carried out (RFC 7143, 11.17.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum RejectReason {
    /// The digest of the data is wrong.
    DataDigest = 0x02,
    /// The PDU breaks the protocol.
    Protocol = 0x04,
    /// The target does not support it.
    NotSupported = 0x05,
    /// Too many immediate commands.
    TooManyImmediate = 0x06,
    /// A field is invalid.
    InvalidField = 0x09,
}

/// What all headers have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// The kind; `None` if the peer does not send it.
    pub opcode: Option<Opcode>,
    /// Whether the command is outside of the order.
    pub is_immediate: bool,
    /// Length of the further headers, in bytes.
    pub more_header_bytes: usize,
    /// Length of the data, in bytes, without padding.
    pub data_bytes: usize,
    /// The logical unit, or fields of the kind.
    pub lun: u64,
    /// The initiator's tag of the task.
    pub tag: u32,
}

impl Header {
    /// Decodes what all headers of an initiator have.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Self {
        Self::of(bytes, Opcode::of_initiator(bytes[0]))
    }

    /// Decodes what all headers of a target have.
    pub fn decode_reply(bytes: &[u8; HEADER_BYTES]) -> Self {
        Self::of(bytes, Opcode::of_target(bytes[0]))
    }

    fn of(bytes: &[u8; HEADER_BYTES], opcode: Option<Opcode>) -> Self {
        Self {
            opcode,
            is_immediate: bytes[0] & 0x40 != 0,
            more_header_bytes: usize::from(bytes[4]) * 4,
            data_bytes: (u32_at(bytes, 4) & 0xff_ffff) as usize,
            lun: u64_at(bytes, 8),
            tag: u32_at(bytes, 16),
        }
    }

    /// The beginning of a header with so many bytes of data. The final bit is set.
    pub(super) fn start(opcode: Opcode, tag: u32, data_bytes: usize) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        out[0] = opcode as u8;
        out[1] = FINAL;
        put(&mut out, 4, &(data_bytes as u32 & 0xff_ffff).to_be_bytes());
        put(&mut out, 16, &tag.to_be_bytes());
        out
    }
}

/// The last PDU of a sequence.
pub(super) const FINAL: u8 = 0x80;

/// The numbers that every PDU of a target has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counters {
    /// The number of this response, or of the next one.
    pub stat_sn: u32,
    /// The next command that the target expects.
    pub expected_cmd_sn: u32,
    /// The last command that it takes.
    pub max_cmd_sn: u32,
}

impl Counters {
    /// Decodes the numbers.
    pub fn decode(header: &[u8; HEADER_BYTES]) -> Self {
        Self { stat_sn: u32_at(header, 24), expected_cmd_sn: u32_at(header, 28), max_cmd_sn: u32_at(header, 32) }
    }

    pub(super) fn put(&self, out: &mut [u8; HEADER_BYTES]) {
        put(out, 24, &self.stat_sn.to_be_bytes());
        put(out, 28, &self.expected_cmd_sn.to_be_bytes());
        put(out, 32, &self.max_cmd_sn.to_be_bytes());
    }
}

/// The difference between the data that the initiator expects and those that the command has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Residual {
    /// None.
    #[default]
    None,
    /// The command has more, by these bytes, which were not transferred.
    Overflow(u32),
    /// The command has less, by these bytes.
    Underflow(u32),
}

impl Residual {
    /// The difference, where the command has `has_bytes` and the initiator expects
    /// `expected_bytes`.
    pub fn of(has_bytes: u64, expected_bytes: u32) -> Self {
        let expected_bytes = u64::from(expected_bytes);
        match has_bytes.cmp(&expected_bytes) {
            std::cmp::Ordering::Equal => Self::None,
            std::cmp::Ordering::Greater => {
                Self::Overflow(u32::try_from(has_bytes - expected_bytes).unwrap_or(u32::MAX))
            }
            std::cmp::Ordering::Less => Self::Underflow((expected_bytes - has_bytes) as u32),
        }
    }

    pub(super) fn decode(header: &[u8; HEADER_BYTES]) -> Self {
        let bytes = u32_at(header, 44);
        match header[1] & 0x06 {
            0x04 => Self::Overflow(bytes),
            0x02 => Self::Underflow(bytes),
            _ => Self::None,
        }
    }

    pub(super) fn put(self, out: &mut [u8; HEADER_BYTES]) {
        let (flag, bytes) = match self {
            Self::None => return,
            Self::Overflow(bytes) => (0x04, bytes),
            Self::Underflow(bytes) => (0x02, bytes),
        };
        out[1] |= flag;
        put(out, 44, &bytes.to_be_bytes());
    }
}

/// The numbers that every PDU of an initiator has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sent {
    /// The number of this command, or of the next one.
    pub cmd_sn: u32,
    /// The next response that the initiator expects.
    pub expected_stat_sn: u32,
}

impl Sent {
    pub(super) fn put(&self, out: &mut [u8; HEADER_BYTES]) {
        put(out, 24, &self.cmd_sn.to_be_bytes());
        put(out, 28, &self.expected_stat_sn.to_be_bytes());
    }
}
