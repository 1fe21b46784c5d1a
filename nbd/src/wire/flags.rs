//! Flag fields. Bits that are not known are kept (`from_bits_retain`): some must be ignored, others
//! refused, and only the reader knows which.

use bitflags::bitflags;

bitflags! {
    /// From the server, with its greeting. Section "Handshake flags".
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct HandshakeFlags: u16 {
        /// Options are answered.
        const FIXED_NEWSTYLE = 1 << 0;
        /// The 124 zeros behind an export's summary can be left out.
        const NO_ZEROES = 1 << 1;
    }

    /// From the client, in answer to the greeting. Section "Client flags".
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct ClientFlags: u32 {
        /// Answers to options are understood.
        const FIXED_NEWSTYLE = 1 << 0;
        /// Leave the 124 zeros out.
        const NO_ZEROES = 1 << 1;
    }

    /// What an export can do. Section "Transmission flags".
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct TransmissionFlags: u16 {
        /// Always set.
        const HAS_FLAGS = 1 << 0;
        /// Writes are refused.
        const READ_ONLY = 1 << 1;
        /// `FLUSH` is understood.
        const SEND_FLUSH = 1 << 2;
        /// The FUA flag is understood.
        const SEND_FUA = 1 << 3;
        /// A spinning disk.
        const ROTATIONAL = 1 << 4;
        /// `TRIM` is understood.
        const SEND_TRIM = 1 << 5;
        /// `WRITE_ZEROES` is understood, and its `NO_HOLE`.
        const SEND_WRITE_ZEROES = 1 << 6;
        /// The DF flag of `READ` is understood.
        const SEND_DF = 1 << 7;
        /// Several connections see one cache: a flush on one covers the writes of all.
        const CAN_MULTI_CONN = 1 << 8;
        /// `RESIZE` (an experiment).
        const SEND_RESIZE = 1 << 9;
        /// `CACHE` is understood.
        const SEND_CACHE = 1 << 10;
        /// The FAST_ZERO flag of `WRITE_ZEROES` is understood.
        const SEND_FAST_ZERO = 1 << 11;
        /// `BLOCK_STATUS` may carry a list of contexts (extended headers only).
        const BLOCK_STATUS_PAYLOAD = 1 << 12;
    }

    /// From the client with each request. Section "Command flags".
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct CommandFlags: u16 {
        /// Answer when durable.
        const FUA = 1 << 0;
        /// `WRITE_ZEROES`: keep the space.
        const NO_HOLE = 1 << 1;
        /// `READ`: one content chunk.
        const DF = 1 << 2;
        /// `BLOCK_STATUS`: one descriptor.
        const REQ_ONE = 1 << 3;
        /// `WRITE_ZEROES`: only if faster than writing.
        const FAST_ZERO = 1 << 4;
        /// The length is that of the payload that follows (extended headers only).
        const PAYLOAD_LEN = 1 << 5;
    }

    /// From the server with each chunk. Section "Structured reply flags".
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct ChunkFlags: u16 {
        /// The last of its reply.
        const DONE = 1 << 0;
    }

    /// The status of a range in the context `base:allocation`. Section "Metadata querying".
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct AllocationFlags: u32 {
        /// No space is taken.
        const HOLE = 1 << 0;
        /// Reads as zeros.
        const ZERO = 1 << 1;
    }
}

/// Information about an export: its size and flags.
pub const INFO_EXPORT: u16 = 0;
/// Its canonical name.
pub const INFO_NAME: u16 = 1;
/// A sentence for people.
pub const INFO_DESCRIPTION: u16 = 2;
/// Its block sizes.
pub const INFO_BLOCK_SIZE: u16 = 3;
