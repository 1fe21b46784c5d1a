//! Commands and completions: the entries of a queue. Base, "Submission Queue Entry" and "Completion
//! Queue Entry"; in fabrics they are carried by capsules.

use super::{Status, array, put, u16_at, u32_at, u64_at};

/// Opcodes of admin commands. Base, "Admin Command Set".
pub mod admin {
    #![allow(missing_docs, reason = "the names are those of the specification")]
    pub const GET_LOG_PAGE: u8 = 0x02;
    pub const IDENTIFY: u8 = 0x06;
    pub const ABORT: u8 = 0x08;
    pub const SET_FEATURES: u8 = 0x09;
    pub const GET_FEATURES: u8 = 0x0a;
    pub const ASYNC_EVENT: u8 = 0x0c;
    pub const KEEP_ALIVE: u8 = 0x18;
}

/// Opcodes of the NVM command set. NVM, "I/O Command Opcodes".
pub mod nvm {
    #![allow(missing_docs, reason = "the names are those of the specification")]
    pub const FLUSH: u8 = 0x00;
    pub const WRITE: u8 = 0x01;
    pub const READ: u8 = 0x02;
    pub const COMPARE: u8 = 0x05;
    pub const WRITE_ZEROES: u8 = 0x08;
    pub const DATASET_MANAGEMENT: u8 = 0x09;
    pub const VERIFY: u8 = 0x0c;
}

/// Features. Base, "Feature Identifiers".
pub mod feature {
    #![allow(missing_docs, reason = "the names are those of the specification")]
    pub const ARBITRATION: u8 = 0x01;
    pub const POWER_MANAGEMENT: u8 = 0x02;
    pub const ERROR_RECOVERY: u8 = 0x05;
    pub const WRITE_CACHE: u8 = 0x06;
    pub const QUEUES: u8 = 0x07;
    pub const ASYNC_EVENTS: u8 = 0x0b;
    pub const KEEP_ALIVE: u8 = 0x0f;
    pub const HOST_ID: u8 = 0x81;
    pub const RESERVATION_NOTICES: u8 = 0x82;
    pub const RESERVATION_PERSISTENCE: u8 = 0x83;
}

/// Force unit access: bit of dword 12 of a read or write.
pub const FUA: u32 = 1 << 30;

/// Deallocate: bit of dword 12 of a write of zeros.
pub const DEALLOCATE: u32 = 1 << 25;

/// Attribute "deallocate" of dataset management, in dword 11.
pub const DSM_DEALLOCATE: u32 = 1 << 2;

/// Where the data of a command are. Base, "Scatter Gather List (SGL)"; TCP, "SGL".
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sgl {
    /// Address, or the offset in the capsule.
    pub address: u64,
    /// Length in bytes.
    pub len_bytes: u32,
    /// Type and subtype.
    pub kind: u8,
}

impl Sgl {
    /// Data Block with an offset: the data are in the capsule.
    pub const IN_CAPSULE: u8 = 0x01;
    /// Transport Data Block: the data come in PDUs of their own.
    pub const TRANSPORT: u8 = 0x5a;
}

/// A command.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Command {
    /// What is to be done.
    pub opcode: u8,
    /// Fused operation and data transfer, as bits 15:8 of dword 0.
    pub flags: u8,
    /// Chosen by the host, and returned in the completion.
    pub cid: u16,
    /// The namespace. In fabrics commands, the low byte is their type.
    pub nsid: u32,
    /// Where the data are.
    pub sgl: Sgl,
    /// Dwords 10 to 15.
    pub cdw: [u32; 6],
}

impl Command {
    /// Size of a command.
    pub const BYTES: usize = 64;
    /// [`Self::flags`] of a command whose data are described by an SGL, as fabrics demand.
    pub const SGL_FLAGS: u8 = 0x40;

    /// Dwords 10 and 11: the first logical block of a read or write.
    pub fn first_block(&self) -> u64 {
        u64::from(self.cdw[0]) | u64::from(self.cdw[1]) << 32
    }

    /// Bits 15:0 of dword 12, plus 1: the number of blocks of a read or write.
    pub fn blocks(&self) -> u64 {
        u64::from(self.cdw[2] as u16) + 1
    }

    /// The command's bytes.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        (out[0], out[1]) = (self.opcode, self.flags);
        put(&mut out, 2, &self.cid.to_le_bytes());
        put(&mut out, 4, &self.nsid.to_le_bytes());
        put(&mut out, 24, &self.sgl.address.to_le_bytes());
        put(&mut out, 32, &self.sgl.len_bytes.to_le_bytes());
        out[39] = self.sgl.kind;
        for (index, dword) in self.cdw.iter().enumerate() {
            put(&mut out, 40 + 4 * index, &dword.to_le_bytes());
        }
        out
    }

    /// Decodes the command's bytes. Reserved fields and metadata pointers are ignored.
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Self {
        Self {
            opcode: bytes[0],
            flags: bytes[1],
            cid: u16_at(bytes, 2),
            nsid: u32_at(bytes, 4),
            sgl: Sgl { address: u64_at(bytes, 24), len_bytes: u32_at(bytes, 32), kind: bytes[39] },
            cdw: std::array::from_fn(|index| u32_at(bytes, 40 + 4 * index)),
        }
    }
}

/// A completion.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Completion {
    /// Dwords 0 and 1: what the command returns.
    pub result: u64,
    /// The head of the submission queue, for flow control. 0xffff if it is not used.
    pub sq_head: u16,
    /// The command.
    pub cid: u16,
    /// How it ended.
    pub status: Status,
}

impl Completion {
    /// Size of a completion.
    pub const BYTES: usize = 16;

    /// The completion's bytes.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        put(&mut out, 0, &self.result.to_le_bytes());
        put(&mut out, 8, &self.sq_head.to_le_bytes());
        put(&mut out, 12, &self.cid.to_le_bytes());
        // Bit 0 is the phase tag, which fabrics do not use.
        put(&mut out, 14, &(self.status.0 << 1).to_le_bytes());
        out
    }

    /// Decodes the completion's bytes.
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Self {
        Self {
            result: u64_at(bytes, 0),
            sq_head: u16_at(bytes, 8),
            cid: u16_at(bytes, 12),
            status: Status(u16_at(bytes, 14) >> 1),
        }
    }
}

/// A range of dataset management. NVM, "Dataset Management".
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DsmRange {
    /// Number of blocks.
    pub blocks: u32,
    /// The first block.
    pub first_block: u64,
}

impl DsmRange {
    /// Size of a range.
    pub const BYTES: usize = 16;
    /// Maximum number of ranges of a command.
    pub const MAX: usize = 256;

    /// The range's bytes.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        put(&mut out, 4, &self.blocks.to_le_bytes());
        put(&mut out, 8, &self.first_block.to_le_bytes());
        out
    }

    /// Decodes a range.
    pub fn decode(bytes: &[u8]) -> Self {
        Self { blocks: u32_at(bytes, 4), first_block: u64::from_le_bytes(array(bytes, 8)) }
    }
}
