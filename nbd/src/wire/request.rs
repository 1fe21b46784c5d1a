//! Requests of the transmission phase: 28 bytes, or 32 with extended headers. A payload may follow.

use super::{CommandFlags, Decoded, Framing, WireError, bytes::Fields};
use std::fmt;

/// The first word of a compact request.
const REQUEST_MAGIC: u32 = 0x2560_9513;
/// The first word of an extended request.
const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;

/// The command of a request. Section "Request types".
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Command(pub u16);

impl Command {
    /// Read a range.
    pub const READ: Self = Self(0);
    /// Write the payload.
    pub const WRITE: Self = Self(1);
    /// End the session; not answered.
    pub const DISCONNECT: Self = Self(2);
    /// Make durable all writes that were answered.
    pub const FLUSH: Self = Self(3);
    /// Discard a range, which may then read as anything.
    pub const TRIM: Self = Self(4);
    /// Prefetch a range.
    pub const CACHE: Self = Self(5);
    /// Make a range read as zeros.
    pub const WRITE_ZEROES: Self = Self(6);
    /// Report the status of a range.
    pub const BLOCK_STATUS: Self = Self(7);
}

impl fmt::Debug for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match *self {
            Self::READ => "READ",
            Self::WRITE => "WRITE",
            Self::DISCONNECT => "DISCONNECT",
            Self::FLUSH => "FLUSH",
            Self::TRIM => "TRIM",
            Self::CACHE => "CACHE",
            Self::WRITE_ZEROES => "WRITE_ZEROES",
            Self::BLOCK_STATUS => "BLOCK_STATUS",
            Self(other) => return write!(f, "command {other}"),
        })
    }
}

/// The header of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestHeader {
    /// Flags of the command.
    pub flags: CommandFlags,
    /// The command.
    pub command: Command,
    /// Chosen by the client and returned in the reply.
    pub cookie: u64,
    /// First byte of the range.
    pub offset_bytes: u64,
    /// Length of the range; or, with [`CommandFlags::PAYLOAD_LEN`], of the payload.
    pub len_bytes: u64,
}

impl RequestHeader {
    /// Size of a compact request.
    pub const COMPACT_BYTES: usize = 28;
    /// Size of an extended request.
    pub const EXTENDED_BYTES: usize = 32;

    /// Size of a request header in `framing`.
    pub const fn wire_bytes(framing: Framing) -> usize {
        match framing {
            Framing::Simple | Framing::Structured => Self::COMPACT_BYTES,
            Framing::Extended => Self::EXTENDED_BYTES,
        }
    }

    /// Appends the request. In compact framing the length must fit into 32 bits. Sets
    /// [`CommandFlags::PAYLOAD_LEN`] for a write in extended framing.
    pub fn encode(&self, framing: Framing, out: &mut Vec<u8>) {
        let extended = framing == Framing::Extended;
        let mut flags = self.flags;
        flags.set(CommandFlags::PAYLOAD_LEN, extended && (self.command == Command::WRITE || self.carries_payload()));
        out.extend_from_slice(&if extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC }.to_be_bytes());
        out.extend_from_slice(&flags.bits().to_be_bytes());
        out.extend_from_slice(&self.command.0.to_be_bytes());
        out.extend_from_slice(&self.cookie.to_be_bytes());
        out.extend_from_slice(&self.offset_bytes.to_be_bytes());
        if extended {
            out.extend_from_slice(&self.len_bytes.to_be_bytes());
        } else {
            debug_assert!(u32::try_from(self.len_bytes).is_ok(), "a length that needs extended headers");
            out.extend_from_slice(&(self.len_bytes as u32).to_be_bytes());
        }
    }

    /// Decodes a request.
    ///
    /// # Errors
    /// [`WireError::Magic`] if this is not a request. The server must answer other errors (an
    /// unknown command, an invalid range).
    pub fn decode(bytes: &[u8], framing: Framing) -> Result<Decoded<Self>, WireError> {
        let extended = framing == Framing::Extended;
        let wire_bytes = Self::wire_bytes(framing);
        let mut fields = Fields(bytes);
        if let Some(found) = fields.u32() {
            let (magic, expected) =
                if extended { (EXTENDED_REQUEST_MAGIC, "0x21e41c71") } else { (REQUEST_MAGIC, "0x25609513") };
            if found != magic {
                return Err(WireError::Magic { what: "a request", found: found.into(), expected });
            }
        }
        let (Some(flags), Some(command), Some(cookie), Some(offset_bytes)) =
            (fields.u16(), fields.u16(), fields.u64(), fields.u64())
        else {
            return Ok(Decoded::Need(wire_bytes - bytes.len()));
        };
        let len_bytes = if extended { fields.u64() } else { fields.u32().map(u64::from) };
        let Some(len_bytes) = len_bytes else { return Ok(Decoded::Need(wire_bytes - bytes.len())) };
        let flags = CommandFlags::from_bits_retain(flags);
        let request = Self { flags, command: Command(command), cookie, offset_bytes, len_bytes };
        Ok(Decoded::Value(request, wire_bytes))
    }

    fn carries_payload(&self) -> bool {
        self.flags.contains(CommandFlags::PAYLOAD_LEN)
    }

    /// Length of the payload that follows the header, whatever the command. It must be received or
    /// skipped before the next request. The number comes from the peer: a server ends the session
    /// if it exceeds its limit.
    pub fn payload_bytes(&self, framing: Framing) -> u64 {
        let follows = match framing {
            Framing::Simple | Framing::Structured => self.command == Command::WRITE,
            Framing::Extended => self.carries_payload(),
        };
        if follows { self.len_bytes } else { 0 }
    }
}
