//! PDUs: the basic header, and what each kind has in it (RFC 7143, chapter 11).

use super::HEADER_BYTES;
use crate::{array, put, u32_at, u64_at};

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
    #[error("a PDU has {found} bytes of data; the target takes at most {max}")]
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
    /// The kind; `None` if an initiator does not send it.
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
    /// Decodes what all headers have.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Self {
        Self {
            opcode: Opcode::of_initiator(bytes[0]),
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

const FINAL: u8 = 0x80;

/// The number of the next command that an initiator sends, if the command is not immediate.
pub fn cmd_sn_of(header: &[u8; HEADER_BYTES]) -> u32 {
    u32_at(header, 24)
}

/// A SCSI command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScsiCommand {
    /// Whether no unsolicited Data-Out follows.
    pub is_final: bool,
    /// The initiator expects data.
    pub reads: bool,
    /// The initiator has data.
    pub writes: bool,
    /// Bytes of data that the initiator expects or has.
    pub expected_bytes: u32,
    /// The command descriptor block, without bytes beyond 16.
    pub cdb: [u8; 16],
}

impl ScsiCommand {
    /// Decodes the header.
    pub fn decode(header: &[u8; HEADER_BYTES]) -> Self {
        Self {
            is_final: header[1] & FINAL != 0,
            reads: header[1] & 0x40 != 0,
            writes: header[1] & 0x20 != 0,
            expected_bytes: u32_at(header, 20),
            cdb: array(header, 32),
        }
    }
}

/// Data of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DataOut {
    /// Whether it is the last one of its R2T.
    pub is_final: bool,
    /// The tag of the R2T.
    pub transfer_tag: u32,
    /// Its number among those of the R2T.
    pub data_sn: u32,
    /// Where the data belong.
    pub offset_bytes: u32,
}

impl DataOut {
    /// Decodes the header.
    pub fn decode(header: &[u8; HEADER_BYTES]) -> Self {
        Self {
            is_final: header[1] & FINAL != 0,
            transfer_tag: u32_at(header, 20),
            data_sn: u32_at(header, 36),
            offset_bytes: u32_at(header, 40),
        }
    }
}

/// What a task management request asks for (RFC 7143, 11.5.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names of the RFC")]
pub enum TaskFunction {
    AbortTask,
    AbortTaskSet,
    ClearAca,
    ClearTaskSet,
    LogicalUnitReset,
    TargetWarmReset,
    TargetColdReset,
    TaskReassign,
    Other(u8),
}

impl TaskFunction {
    /// Decodes the function and the tag of the task it refers to.
    pub fn decode(header: &[u8; HEADER_BYTES]) -> (Self, u32) {
        let function = match header[1] & 0x7f {
            1 => Self::AbortTask,
            2 => Self::AbortTaskSet,
            3 => Self::ClearAca,
            4 => Self::ClearTaskSet,
            5 => Self::LogicalUnitReset,
            6 => Self::TargetWarmReset,
            7 => Self::TargetColdReset,
            8 => Self::TaskReassign,
            other => Self::Other(other),
        };
        (function, u32_at(header, 20))
    }
}

/// The outcome of a task management request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
#[expect(missing_docs, reason = "the names of the RFC")]
pub enum TaskReply {
    Complete = 0,
    NoTask = 1,
    NoLun = 2,
    NoReassign = 4,
    NotSupported = 5,
}

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

    fn put(self, out: &mut [u8; HEADER_BYTES]) {
        let (flag, bytes) = match self {
            Self::None => return,
            Self::Overflow(bytes) => (0x04, bytes),
            Self::Underflow(bytes) => (0x02, bytes),
        };
        out[1] |= flag;
        put(out, 44, &bytes.to_be_bytes());
    }
}

/// The end of a SCSI command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScsiReply {
    /// The tag of the command.
    pub tag: u32,
    /// The SCSI status.
    pub status: u8,
    /// The difference in the length of the data.
    pub residual: Residual,
    /// Data-In PDUs and R2Ts that the command had.
    pub expected_data_sn: u32,
}

impl ScsiReply {
    /// Encodes the header, for `data_bytes` of sense data.
    pub fn encode(&self, counters: Counters, data_bytes: usize) -> [u8; HEADER_BYTES] {
        let mut out = Header::start(Opcode::ScsiResponse, self.tag, data_bytes);
        out[3] = self.status;
        counters.put(&mut out);
        put(&mut out, 36, &self.expected_data_sn.to_be_bytes());
        self.residual.put(&mut out);
        out
    }
}

/// Data of a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DataIn {
    /// The tag of the command.
    pub tag: u32,
    /// Whether it ends a sequence.
    pub is_final: bool,
    /// The status GOOD with its difference in length, if the command ends with this PDU.
    pub ends: Option<Residual>,
    /// Its number among those of the command.
    pub data_sn: u32,
    /// Where the data belong.
    pub offset_bytes: u32,
}

impl DataIn {
    /// Encodes the header, for `data_bytes` of data.
    pub fn encode(&self, counters: Counters, data_bytes: usize) -> [u8; HEADER_BYTES] {
        let mut out = Header::start(Opcode::DataIn, self.tag, data_bytes);
        out[1] = if self.is_final { FINAL } else { 0 };
        put(&mut out, 20, &super::NO_TAG.to_be_bytes());
        counters.put(&mut out);
        match self.ends {
            Some(residual) => {
                out[1] |= 0x01;
                residual.put(&mut out);
            }
            None => out[24..28].fill(0),
        }
        put(&mut out, 36, &self.data_sn.to_be_bytes());
        put(&mut out, 40, &self.offset_bytes.to_be_bytes());
        out
    }
}

/// The target asks for data of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadyToTransfer {
    /// The tag of the command.
    pub tag: u32,
    /// The logical unit.
    pub lun: u64,
    /// The tag that the data have.
    pub transfer_tag: u32,
    /// Its number among those of the command.
    pub r2t_sn: u32,
    /// Where the data belong.
    pub offset_bytes: u32,
    /// How many are wanted.
    pub len_bytes: u32,
}

impl ReadyToTransfer {
    /// Encodes the PDU.
    pub fn encode(&self, counters: Counters) -> [u8; HEADER_BYTES] {
        let mut out = Header::start(Opcode::ReadyToTransfer, self.tag, 0);
        put(&mut out, 8, &self.lun.to_be_bytes());
        put(&mut out, 20, &self.transfer_tag.to_be_bytes());
        counters.put(&mut out);
        put(&mut out, 36, &self.r2t_sn.to_be_bytes());
        put(&mut out, 40, &self.offset_bytes.to_be_bytes());
        put(&mut out, 44, &self.len_bytes.to_be_bytes());
        out
    }
}

/// A response that has nothing but its outcome: of task management and of a logout.
pub fn outcome(opcode: Opcode, tag: u32, outcome: u8, counters: Counters) -> [u8; HEADER_BYTES] {
    let mut out = Header::start(opcode, tag, 0);
    out[2] = outcome;
    counters.put(&mut out);
    out
}

/// NOP-In: the answer to a NOP-Out, or a question of the target (with a transfer tag).
pub fn nop_in(tag: u32, lun: u64, transfer_tag: u32, counters: Counters, data_bytes: usize) -> [u8; HEADER_BYTES] {
    let mut out = Header::start(Opcode::NopIn, tag, data_bytes);
    put(&mut out, 8, &lun.to_be_bytes());
    put(&mut out, 20, &transfer_tag.to_be_bytes());
    counters.put(&mut out);
    out
}

/// A text response. `more` is a transfer tag if the text goes on in the next one.
pub fn text_reply(tag: u32, more: Option<u32>, counters: Counters, data_bytes: usize) -> [u8; HEADER_BYTES] {
    let mut out = Header::start(Opcode::TextResponse, tag, data_bytes);
    if more.is_some() {
        out[1] = 0x40;
    }
    put(&mut out, 20, &more.unwrap_or(super::NO_TAG).to_be_bytes());
    counters.put(&mut out);
    out
}

/// A PDU was not carried out; its header is the data.
pub fn reject(reason: RejectReason, counters: Counters) -> [u8; HEADER_BYTES] {
    let mut out = Header::start(Opcode::Reject, super::NO_TAG, HEADER_BYTES);
    out[2] = reason as u8;
    counters.put(&mut out);
    out
}
