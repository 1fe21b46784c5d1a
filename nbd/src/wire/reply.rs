//! The headers of replies in the transmission phase.
//!
//! A *simple* reply (16 bytes) answers a whole request. A *structured* reply (20 bytes and a
//! payload) or an *extended* reply (32 bytes and a payload) is a chunk. A request is answered by
//! one or more chunks; the last one has the flag [`ChunkFlags::DONE`].

use super::{ChunkFlags, Decoded, ErrorCode, Framing, RequestHeader, WireError, bytes::Fields};

/// The first word of a simple reply.
const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// The first word of a structured chunk.
const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
/// The first word of an extended chunk.
const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

/// The type of a chunk's payload. Section "Structured reply types".
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkKind(pub u16);

impl ChunkKind {
    /// No payload.
    pub const NONE: Self = Self(0);
    /// An offset and the data there.
    pub const OFFSET_DATA: Self = Self(1);
    /// An offset and the number of zeros there.
    pub const OFFSET_HOLE: Self = Self(2);
    /// Status of runs, 32-bit.
    pub const BLOCK_STATUS: Self = Self(5);
    /// Status of runs, 64-bit.
    pub const BLOCK_STATUS_EXT: Self = Self(6);
    /// The request failed.
    pub const ERROR: Self = Self(0x8001);
    /// The request failed at an offset.
    pub const ERROR_OFFSET: Self = Self(0x8002);

    /// Whether the chunk reports a failure; true for unknown kinds of error too.
    pub fn is_error(self) -> bool {
        self.0 & 0x8000 != 0
    }
}

/// The header of a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplyHeader {
    /// The whole answer. After a successful read, the data follows; otherwise nothing follows.
    Simple {
        /// The error code; 0 means success.
        error: ErrorCode,
        /// The cookie of the request.
        cookie: u64,
    },
    /// A part of the answer.
    Chunk {
        /// Whether this is the last chunk.
        flags: ChunkFlags,
        /// The type of the payload.
        kind: ChunkKind,
        /// The cookie of the request.
        cookie: u64,
        /// The offset of the request; `None` without extended headers.
        offset_bytes: Option<u64>,
        /// Length of the payload that follows, as announced by the peer.
        payload_bytes: u64,
    },
}

impl ReplyHeader {
    /// Size of a simple reply.
    pub const SIMPLE_BYTES: usize = 16;
    /// Size of the header of a structured chunk.
    pub const STRUCTURED_BYTES: usize = 20;
    /// Size of the header of an extended chunk.
    pub const EXTENDED_BYTES: usize = 32;

    /// The cookie of the request.
    pub fn cookie(&self) -> u64 {
        match *self {
            Self::Simple { cookie, .. } | Self::Chunk { cookie, .. } => cookie,
        }
    }

    /// Decodes a reply header of a server that uses `framing`.
    ///
    /// # Errors
    /// [`WireError::Magic`] for anything else than a reply in this framing.
    pub fn decode(bytes: &[u8], framing: Framing) -> Result<Decoded<Self>, WireError> {
        let mut fields = Fields(bytes);
        let Some(magic) = fields.u32() else { return Ok(Decoded::Need(4 - bytes.len())) };
        let need = |wire_bytes: usize| Ok(Decoded::Need(wire_bytes - bytes.len()));
        match (magic, framing) {
            (SIMPLE_REPLY_MAGIC, Framing::Simple | Framing::Structured) => {
                let (Some(error), Some(cookie)) = (fields.u32(), fields.u64()) else { return need(Self::SIMPLE_BYTES) };
                Ok(Decoded::Value(Self::Simple { error: ErrorCode(error), cookie }, Self::SIMPLE_BYTES))
            }
            (STRUCTURED_REPLY_MAGIC, Framing::Structured) => {
                let (Some(flags), Some(kind), Some(cookie), Some(payload_bytes)) =
                    (fields.u16(), fields.u16(), fields.u64(), fields.u32())
                else {
                    return need(Self::STRUCTURED_BYTES);
                };
                let chunk = Self::Chunk {
                    flags: ChunkFlags::from_bits_retain(flags),
                    kind: ChunkKind(kind),
                    cookie,
                    offset_bytes: None,
                    payload_bytes: payload_bytes.into(),
                };
                Ok(Decoded::Value(chunk, Self::STRUCTURED_BYTES))
            }
            (EXTENDED_REPLY_MAGIC, Framing::Extended) => {
                let (Some(flags), Some(kind), Some(cookie), Some(offset_bytes), Some(payload_bytes)) =
                    (fields.u16(), fields.u16(), fields.u64(), fields.u64(), fields.u64())
                else {
                    return need(Self::EXTENDED_BYTES);
                };
                let chunk = Self::Chunk {
                    flags: ChunkFlags::from_bits_retain(flags),
                    kind: ChunkKind(kind),
                    cookie,
                    offset_bytes: Some(offset_bytes),
                    payload_bytes,
                };
                Ok(Decoded::Value(chunk, Self::EXTENDED_BYTES))
            }
            (found, framing) => Err(WireError::Magic {
                what: "a reply",
                found: found.into(),
                expected: match framing {
                    Framing::Simple => "0x67446698 of a simple reply",
                    Framing::Structured => "0x668e33ef of a structured reply or 0x67446698 of a simple one",
                    Framing::Extended => "0x6e8a278c of an extended reply",
                },
            }),
        }
    }
}

/// Maximum size of a reply header, including the offset of a data chunk.
const REPLY_HEADER_BYTES_MAX: usize = ReplyHeader::EXTENDED_BYTES + 8;

/// An encoded reply header; it needs no allocation.
#[derive(Debug, Clone, Copy)]
pub struct EncodedHeader {
    bytes: [u8; REPLY_HEADER_BYTES_MAX],
    len: usize,
}

impl EncodedHeader {
    const EMPTY: Self = Self { bytes: [0; REPLY_HEADER_BYTES_MAX], len: 0 };

    fn put(&mut self, field: &[u8]) {
        self.bytes[self.len..self.len + field.len()].copy_from_slice(field);
        self.len += field.len();
    }
}

impl std::ops::Deref for EncodedHeader {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// Encodes a simple reply to a request: in [`Framing::Simple`], or in [`Framing::Structured`] to
/// any request except a read. After a successful read, the data must follow.
pub fn simple(cookie: u64, error: ErrorCode) -> EncodedHeader {
    let mut header = EncodedHeader::EMPTY;
    header.put(&SIMPLE_REPLY_MAGIC.to_be_bytes());
    header.put(&error.0.to_be_bytes());
    header.put(&cookie.to_be_bytes());
    header
}

/// The request that chunks answer, in [`Framing::Structured`] or [`Framing::Extended`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answering {
    /// The framing of the connection.
    pub framing: Framing,
    /// The cookie of the request.
    pub cookie: u64,
    /// The offset of the request, which extended headers contain.
    pub offset_bytes: u64,
}

impl Answering {
    /// For answering `request`.
    pub fn to(request: &RequestHeader, framing: Framing) -> Self {
        Self { framing, cookie: request.cookie, offset_bytes: request.offset_bytes }
    }

    /// Encodes the header of a chunk; its payload must follow.
    pub fn chunk(&self, flags: ChunkFlags, kind: ChunkKind, payload_bytes: u32) -> EncodedHeader {
        let extended = self.framing == Framing::Extended;
        let mut header = EncodedHeader::EMPTY;
        header.put(&if extended { EXTENDED_REPLY_MAGIC } else { STRUCTURED_REPLY_MAGIC }.to_be_bytes());
        header.put(&flags.bits().to_be_bytes());
        header.put(&kind.0.to_be_bytes());
        header.put(&self.cookie.to_be_bytes());
        if extended {
            header.put(&self.offset_bytes.to_be_bytes());
            header.put(&u64::from(payload_bytes).to_be_bytes());
        } else {
            header.put(&payload_bytes.to_be_bytes());
        }
        header
    }

    /// Encodes the only chunk of a success without data.
    pub fn done(&self) -> EncodedHeader {
        self.chunk(ChunkFlags::DONE, ChunkKind::NONE, 0)
    }

    /// Encodes the header of a data chunk with its offset; `data_bytes` of data from offset
    /// `at_bytes` of the export must follow.
    pub fn data(&self, flags: ChunkFlags, at_bytes: u64, data_bytes: u32) -> EncodedHeader {
        let mut header = self.chunk(flags, ChunkKind::OFFSET_DATA, data_bytes.saturating_add(8));
        header.put(&at_bytes.to_be_bytes());
        header
    }
}
