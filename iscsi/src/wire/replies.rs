//! What a target sends (RFC 7143, chapter 11), without the login.

use super::{
    Counters, HEADER_BYTES, Opcode, RejectReason,
    pdu::{FINAL, Header, Residual},
};
use crate::{put, u32_at, u64_at};

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

/// The end of a SCSI command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScsiReply {
    /// The tag of the command.
    pub tag: u32,
    /// Whether the target has carried it out, and the status is valid.
    pub is_carried_out: bool,
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
        (out[2], out[3]) = (u8::from(!self.is_carried_out), self.status);
        counters.put(&mut out);
        put(&mut out, 36, &self.expected_data_sn.to_be_bytes());
        self.residual.put(&mut out);
        out
    }

    /// Decodes the header.
    pub fn decode(header: &[u8; HEADER_BYTES]) -> Self {
        Self {
            tag: u32_at(header, 16),
            is_carried_out: header[2] == 0,
            status: header[3],
            residual: Residual::decode(header),
            expected_data_sn: u32_at(header, 36),
        }
    }
}

/// Data of a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DataIn {
    /// The tag of the command.
    pub tag: u32,
    /// Whether it ends a sequence.
    pub is_final: bool,
    /// The status with its difference in length, if the command ends with this PDU. A target sends
    /// GOOD only.
    pub ends: Option<(u8, Residual)>,
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
            Some((status, residual)) => {
                out[1] |= 0x01;
                out[3] = status;
                residual.put(&mut out);
            }
            None => out[24..28].fill(0),
        }
        put(&mut out, 36, &self.data_sn.to_be_bytes());
        put(&mut out, 40, &self.offset_bytes.to_be_bytes());
        out
    }

    /// Decodes the header.
    pub fn decode(header: &[u8; HEADER_BYTES]) -> Self {
        Self {
            tag: u32_at(header, 16),
            is_final: header[1] & FINAL != 0,
            ends: (header[1] & 0x01 != 0).then(|| (header[3], Residual::decode(header))),
            data_sn: u32_at(header, 36),
            offset_bytes: u32_at(header, 40),
        }
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

    /// Decodes the PDU.
    pub fn decode(header: &[u8; HEADER_BYTES]) -> Self {
        Self {
            tag: u32_at(header, 16),
            lun: u64_at(header, 8),
            transfer_tag: u32_at(header, 20),
            r2t_sn: u32_at(header, 36),
            offset_bytes: u32_at(header, 40),
            len_bytes: u32_at(header, 44),
        }
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

/// The tag of a target's question, which wants an answer; `None` for an answer of the target. Also
/// the tag of a text response that goes on.
pub fn transfer_tag_of(header: &[u8; HEADER_BYTES]) -> Option<u32> {
    Some(u32_at(header, 20)).filter(|&tag| tag != super::NO_TAG)
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

/// Why a PDU was not carried out: the code of a Reject.
pub fn reject_code_of(header: &[u8; HEADER_BYTES]) -> u8 {
    header[2]
}

/// What a target tells by an Async message (RFC 7143, 11.9.1): 0 for SCSI, 1 to 3 for the end of
/// the session.
pub fn async_event_of(header: &[u8; HEADER_BYTES]) -> u8 {
    header[36]
}

/// A PDU was not carried out; its header is the data.
pub fn reject(reason: RejectReason, counters: Counters) -> [u8; HEADER_BYTES] {
    let mut out = Header::start(Opcode::Reject, super::NO_TAG, HEADER_BYTES);
    out[2] = reason as u8;
    counters.put(&mut out);
    out
}
