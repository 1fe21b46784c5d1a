//! The NBD protocol as structures and bytes, for client and server. Pure.
//!
//! ```text
//! HANDSHAKE     S: Greeting                         C: ClientFlags
//! handshake.rs  C: OptionHeader + option data       option.rs: ClientOption
//!               S: OptionReplyHeader + reply data   option_reply.rs: OptionReply
//!
//! TRANSMISSION  C: RequestHeader (+ payload)        request.rs: 28 bytes, extended 32
//!               S: ReplyHeader (+ payload)          reply.rs: 16, structured 20, extended 32
//!                                                   chunk.rs: the payload of a chunk
//! errors        code.rs: ErrorCode <-> io::Error
//! ```
//!
//! Every message is a header of fixed size that contains the length of what follows. A header's
//! decoder gets the bytes received so far and returns [`Decoded::Need`] or [`Decoded::Value`]. The
//! caller gathers what follows, up to a limit that the caller chooses (see the constants here), and
//! parses it when it is complete. No code here allocates by a length that a peer sent, and no bytes
//! cause a panic. A malformed message is a [`WireError`] that says what was found and what was
//! expected.
//!
//! All numbers are big-endian. Section names in the comments are those of the specification,
//! <https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md>.

mod bytes;
pub mod chunk;
pub mod code;
mod error;
mod flags;
pub mod handshake;
pub mod option;
pub mod option_reply;
pub mod reply;
pub mod request;

pub use chunk::{BlockStatus, Chunk, Descriptor, Descriptors};
pub use code::ErrorCode;
pub use error::WireError;
pub use flags::{
    AllocationFlags, ChunkFlags, ClientFlags, CommandFlags, HandshakeFlags, INFO_BLOCK_SIZE, INFO_DESCRIPTION,
    INFO_EXPORT, INFO_NAME, TransmissionFlags,
};
pub use handshake::{ExportSummary, Greeting};
pub use option::{ClientOption, ContextQuery, ExportQuery, OptionCode, OptionHeader};
pub use option_reply::{BlockSizes, Info, OptionReply, OptionReplyHeader, ReplyCode};
pub use reply::{Answering, ChunkKind, EncodedHeader, ReplyHeader};
pub use request::{Command, RequestHeader};

/// The port that IANA assigned to NBD.
pub const DEFAULT_PORT: u16 = 10809;

/// Maximum length of a string (export name, context name, message) in the protocol, in bytes.
pub const STRING_BYTES_MAX: usize = 4096;

/// How much data of one option a server should accept, in bytes: enough for a name and a hundred
/// queries.
pub const OPTION_BYTES_MAX: u32 = 64 << 10;

/// How much data of one reply to an option a client should accept, in bytes.
pub(crate) const OPTION_REPLY_BYTES_MAX: u32 = 64 << 10;

/// Maximum payload if the server reported no other limit, in bytes. Section "Block size
/// constraints".
pub const PAYLOAD_BYTES_DEFAULT: u32 = 32 << 20;

/// Maximum number of descriptors that a server should send, and a client accept, in one block
/// status chunk. Section "Request types", `NBD_CMD_BLOCK_STATUS`.
pub const DESCRIPTORS_MAX: usize = 1 << 20;

/// The metadata context that reports holes and zeros.
pub const CONTEXT_ALLOCATION: &str = "base:allocation";

/// The metadata context that reports which layer of a chain owns a range: 0 none, 1 the top, 2 its
/// parent, and so on.
pub const CONTEXT_DEPTH: &str = "qemu:allocation-depth";

/// What precedes the name of a point in a context that tells which ranges have changed since.
/// Status 1 means changed, 0 unchanged.
pub const CONTEXT_TRACK: &str = "diskwright:track:";

/// The same by QEMU's name, with the same status.
pub const CONTEXT_DIRTY_BITMAP: &str = "qemu:dirty-bitmap:";

/// What precedes the id of the running server in a context that is listed, if a client asks for
/// this name, and that cannot be selected. Two connections with the same id lead to one process.
pub const CONTEXT_SERVER: &str = "diskwright:server:";

/// The framing of messages in the transmission phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Framing {
    /// Compact requests, simple replies.
    Simple,
    /// Compact requests; structured replies where the answer has a payload.
    Structured,
    /// Extended requests and replies, with 64-bit lengths.
    Extended,
}

/// The result of decoding the bytes received so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decoded<T> {
    /// At least this many more bytes are needed; call again with all bytes.
    Need(usize),
    /// The value, and the number of bytes that it took.
    Value(T, usize),
}

impl<T> Decoded<T> {
    /// Converts the value.
    pub fn map<U>(self, with: impl FnOnce(T) -> U) -> Decoded<U> {
        match self {
            Self::Need(more) => Decoded::Need(more),
            Self::Value(value, taken) => Decoded::Value(with(value), taken),
        }
    }
}

#[cfg(test)]
mod tests;
