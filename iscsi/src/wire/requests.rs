//! What an initiator sends (RFC 7143, chapter 11), without the login.

use super::{
    HEADER_BYTES, NO_TAG, Opcode,
    pdu::{FINAL, Header, Sent},
};
use crate::{array, put, u32_at};

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

    /// Encodes the header, for `data_bytes` of immediate data.
    pub fn encode(&self, lun: u64, tag: u32, sent: Sent, data_bytes: usize) -> [u8; HEADER_BYTES] {
        let mut out = Header::start(Opcode::ScsiCommand, tag, data_bytes);
        // The task attribute is SIMPLE.
        out[1] = 0x01;
        for (is_set, flag) in [(self.is_final, FINAL), (self.reads, 0x40), (self.writes, 0x20)] {
            out[1] |= if is_set { flag } else { 0 };
        }
        put(&mut out, 8, &lun.to_be_bytes());
        put(&mut out, 20, &self.expected_bytes.to_be_bytes());
        sent.put(&mut out);
        put(&mut out, 32, &self.cdb);
        out
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

    /// Encodes the header, for `data_bytes` of data.
    pub fn encode(&self, lun: u64, tag: u32, expected_stat_sn: u32, data_bytes: usize) -> [u8; HEADER_BYTES] {
        let mut out = Header::start(Opcode::DataOut, tag, data_bytes);
        out[1] = if self.is_final { FINAL } else { 0 };
        put(&mut out, 8, &lun.to_be_bytes());
        put(&mut out, 20, &self.transfer_tag.to_be_bytes());
        put(&mut out, 28, &expected_stat_sn.to_be_bytes());
        put(&mut out, 36, &self.data_sn.to_be_bytes());
        put(&mut out, 40, &self.offset_bytes.to_be_bytes());
        out
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

/// NOP-Out as the answer to a question of the target.
pub fn nop_out(lun: u64, transfer_tag: u32, sent: Sent) -> [u8; HEADER_BYTES] {
    let mut out = Header::start(Opcode::NopOut, NO_TAG, 0);
    out[0] |= IMMEDIATE;
    put(&mut out, 8, &lun.to_be_bytes());
    put(&mut out, 20, &transfer_tag.to_be_bytes());
    sent.put(&mut out);
    out
}

/// A text request, which is immediate. `more` is the transfer tag of a response that goes on.
pub fn text_request(tag: u32, more: Option<u32>, sent: Sent, text_bytes: usize) -> [u8; HEADER_BYTES] {
    let mut out = Header::start(Opcode::Text, tag, text_bytes);
    out[0] |= IMMEDIATE;
    put(&mut out, 20, &more.unwrap_or(NO_TAG).to_be_bytes());
    sent.put(&mut out);
    out
}

/// A logout that closes the session.
pub fn logout(tag: u32, sent: Sent) -> [u8; HEADER_BYTES] {
    let mut out = Header::start(Opcode::Logout, tag, 0);
    out[0] |= IMMEDIATE;
    sent.put(&mut out);
    out
}

/// The command is outside of the order.
pub(super) const IMMEDIATE: u8 = 0x40;
