//! Flag fields. Unknown bits are kept (`from_bits_retain`): some must be ignored, others refused,
//! which the reader decides.

use bitflags::bitflags;

bitflags! {
    /// Sent by the server in its greeting. Section "Handshake flags".
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct HandshakeFlags: u16 {
        /// The server answers options.
        const FIXED_NEWSTYLE = 1 << 0;
        /// The 124 zeros after an export's summary can be omitted.
        const NO_ZEROES = 1 << 1;
    }

    /// Sent by the client after the greeting. Section "Client flags".
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct ClientFlags: u32 {
        /// The client understands answers to options.
        const FIXED_NEWSTYLE = 1 << 0;
        /// Omit the 124 zeros.
        const NO_ZEROES = 1 << 1;
    }

    /// Properties and supported commands of an export. Section "Transmission flags".
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct TransmissionFlags: u16 {
        /// Always set.
        const HAS_FLAGS = 1 << 0;
        /// Writes are refused.
        const READ_ONLY = 1 << 1;
        /// `FLUSH` is supported.
        const SEND_FLUSH = 1 << 2;
        /// The FUA flag is supported.
        const SEND_FUA = 1 << 3;
        /// The export is on a rotational disk.
        const ROTATIONAL = 1 << 4;
        /// `TRIM` is supported.
        const SEND_TRIM = 1 << 5;
        /// `WRITE_ZEROES` and its `NO_HOLE` flag are supported.
        const SEND_WRITE_ZEROES = 1 << 6;
        /// The DF flag of `READ` is supported.
        const SEND_DF = 1 << 7;
        /// A flush on one connection covers completed writes of all connections.
        const CAN_MULTI_CONN = 1 << 8;
        /// `RESIZE` is supported (experimental).
        const SEND_RESIZE = 1 << 9;
        /// `CACHE` is supported.
        const SEND_CACHE = 1 << 10;
        /// The FAST_ZERO flag of `WRITE_ZEROES` is supported.
        const SEND_FAST_ZERO = 1 << 11;
        /// `BLOCK_STATUS` may carry a list of contexts (extended headers only).
        const BLOCK_STATUS_PAYLOAD = 1 << 12;
    }

    /// Sent by the client with each request. Section "Command flags".
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct CommandFlags: u16 {
        /// Force unit access: answer only when durable.
        const FUA = 1 << 0;
        /// For `WRITE_ZEROES`: keep the space allocated.
        const NO_HOLE = 1 << 1;
        /// For `READ`: answer with a single data chunk.
        const DF = 1 << 2;
        /// For `BLOCK_STATUS`: answer with a single descriptor.
        const REQ_ONE = 1 << 3;
        /// For `WRITE_ZEROES`: fail unless it is faster than writing zeros.
        const FAST_ZERO = 1 << 4;
        /// The length is that of the following payload (extended headers only).
        const PAYLOAD_LEN = 1 << 5;
    }

    /// Sent by the server with each chunk. Section "Structured reply flags".
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct ChunkFlags: u16 {
        /// The last chunk of its reply.
        const DONE = 1 << 0;
    }

    /// The status of a range in the context `base:allocation`. Section "Metadata querying".
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct AllocationFlags: u32 {
        /// The range is not allocated.
        const HOLE = 1 << 0;
        /// The range reads as zeros.
        const ZERO = 1 << 1;
    }
}

/// Information type: size and flags of the export.
pub const INFO_EXPORT: u16 = 0;
/// Information type: the export's canonical name.
pub const INFO_NAME: u16 = 1;
/// Information type: a description in plain text.
pub const INFO_DESCRIPTION: u16 = 2;
/// Information type: the export's block sizes.
pub const INFO_BLOCK_SIZE: u16 = 3;
