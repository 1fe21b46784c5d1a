//! The NBD protocol as structures and bytes: pure, for client and server alike.
//!
//! ```text
//!   HANDSHAKE     S: Greeting                         C: ClientFlags
//!   handshake.rs  C: OptionHeader + option data       option.rs: ClientOption
//!                 S: OptionReplyHeader + reply data   option_reply.rs: OptionReply
//!
//!   TRANSMISSION  C: RequestHeader (+ payload)        request.rs, 28 bytes or, extended, 32
//!                 S: ReplyHeader (+ payload)          reply.rs: simple 16, structured 20, extended 32
//!                                                     chunk.rs: what the payload of a chunk says
//!   errors        code.rs: ErrorCode <-> io::Error
//! ```
//!
//! Every message is a header of fixed size that says how many bytes follow it. So a decoder of a
//! header is given the bytes that are there and answers with [`Decoded::Need`] or
//! [`Decoded::Value`]; what follows is gathered by the caller, up to a limit that *he* chooses (see
//! the constants here), and parsed when it is complete. Nothing here allocates by a length that a
//! peer names, and nothing panics on any bytes; a message that cannot be is a [`WireError`] that
//! says what was found and what was expected.
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
pub use handshake::{ExportSummary, Greeting, OptionHeader, OptionReplyHeader};
pub use option::{ClientOption, ContextQuery, ExportQuery, OptionCode};
pub use option_reply::{BlockSizes, Info, OptionReply, ReplyCode};
pub use reply::{Answering, ChunkKind, EncodedHeader, ReplyHeader};
pub use request::{Command, RequestHeader};

/// The port that IANA gave to NBD.
pub const DEFAULT_PORT: u16 = 10809;

/// Longest string (name of an export, of a context, message) that the protocol allows, in bytes.
pub const STRING_BYTES_MAX: usize = 4096;

/// Most bytes of data that a server should take with one option. (A name, a hundred queries.)
pub const OPTION_BYTES_MAX: u32 = 64 << 10;

/// Most bytes that a client should take as one reply to an option.
pub const OPTION_REPLY_BYTES_MAX: u32 = 64 << 10;

/// Payload that may be sent where the server told no other limit, in bytes. Section "Block size
/// constraints".
pub const PAYLOAD_BYTES_DEFAULT: u32 = 32 << 20;

/// Most descriptors that a server should put into one block status chunk, and a client accept.
/// Section "Request types", `NBD_CMD_BLOCK_STATUS`.
pub const DESCRIPTORS_MAX: usize = 1 << 20;

/// The context that tells holes and zeros.
pub const CONTEXT_ALLOCATION: &str = "base:allocation";

/// The context that tells which layer of a chain owns a range: 0 none, 1 the top, 2 its parent, and
/// so on.
pub const CONTEXT_DEPTH: &str = "qemu:allocation-depth";

/// How the two sides frame the messages of the transmission phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Framing {
    /// Compact requests, simple replies.
    Simple,
    /// Compact requests; structured replies where there is a payload.
    Structured,
    /// Extended requests and replies: 64-bit lengths.
    Extended,
}

/// What became of the bytes that are there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decoded<T> {
    /// At least so many bytes more are needed; call again with all of them.
    Need(usize),
    /// The value, and how many bytes it took.
    Value(T, usize),
}

impl<T> Decoded<T> {
    /// The value, turned into something else.
    pub fn map<U>(self, with: impl FnOnce(T) -> U) -> Decoded<U> {
        match self {
            Self::Need(more) => Decoded::Need(more),
            Self::Value(value, taken) => Decoded::Value(with(value), taken),
        }
    }
}

#[cfg(test)]
mod tests;
