//! Parsing the payloads of chunks, and encoding those that are not data.
//!
//! The payload of a data chunk is not gathered: its first 8 bytes are the offset ([`data_offset`]),
//! and the rest is received directly into the reader's buffer.

use super::{
    Answering, ChunkFlags, ChunkKind, DESCRIPTORS_MAX, ErrorCode, Framing, STRING_BYTES_MAX, WireError,
    bytes::{Fields, text},
};

/// Bytes before the data in a data chunk.
pub const DATA_OFFSET_BYTES: usize = 8;

/// The largest 32-bit length that is a multiple of every minimum block size.
const NARROW_MAX: u64 = 0xffff_0000;

/// How much payload a client should gather for a chunk other than data: a full block status, the
/// longest one.
pub(crate) const GATHERED_BYTES_MAX: u64 = 8 + 16 * DESCRIPTORS_MAX as u64;

/// The export offset of the data in a data chunk: the first 8 bytes of its payload.
pub fn data_offset(bytes: [u8; DATA_OFFSET_BYTES]) -> u64 {
    u64::from_be_bytes(bytes)
}

/// A run of the export with the same status in a context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Descriptor {
    /// Length in bytes, greater than 0.
    pub len_bytes: u64,
    /// The status; its meaning depends on the context.
    pub status: u64,
}

/// The descriptors of a block status chunk, consecutive from the request's offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Descriptors<'a> {
    bytes: &'a [u8],
    wide: bool,
}

impl Iterator for Descriptors<'_> {
    type Item = Descriptor;

    fn next(&mut self) -> Option<Descriptor> {
        let mut fields = Fields(self.bytes);
        let found = if self.wide {
            Descriptor { len_bytes: fields.u64()?, status: fields.u64()? }
        } else {
            Descriptor { len_bytes: fields.u32()?.into(), status: fields.u32()?.into() }
        };
        self.bytes = fields.0;
        Some(found)
    }
}

/// A block status chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockStatus<'a> {
    /// The id of the context.
    pub context_id: u32,
    /// At least one descriptor.
    pub descriptors: Descriptors<'a>,
}

/// A chunk with its parsed payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Chunk<'a> {
    /// No payload.
    None,
    /// A range of zeros.
    Hole {
        /// First byte of the range on the export.
        offset_bytes: u64,
        /// Length in bytes, greater than 0.
        len_bytes: u32,
    },
    /// The status of runs of the export.
    BlockStatus(BlockStatus<'a>),
    /// The request failed.
    Error {
        /// The error code.
        code: ErrorCode,
        /// The server's message; may be empty.
        message: &'a str,
        /// Offset of the failure, if the server reports it.
        offset_bytes: Option<u64>,
    },
}

impl<'a> Chunk<'a> {
    /// Parses a chunk other than [`ChunkKind::OFFSET_DATA`] from its complete payload. An unknown
    /// kind of error is an error too.
    ///
    /// # Errors
    /// If the payload is malformed. The client must end the session.
    pub fn parse(kind: ChunkKind, payload: &'a [u8]) -> Result<Self, WireError> {
        let length = |what, expected| WireError::Length { what, found: payload.len() as u64, expected };
        let mut fields = Fields(payload);
        match kind {
            ChunkKind::NONE if payload.is_empty() => Ok(Self::None),
            ChunkKind::NONE => Err(length("the payload of an empty chunk", "0")),
            ChunkKind::OFFSET_HOLE => match (fields.u64(), fields.u32(), fields.0) {
                (Some(_), Some(0), []) => {
                    Err(WireError::Value { what: "the length of a hole", found: 0, expected: "above 0" })
                }
                (Some(offset_bytes), Some(len_bytes), []) => Ok(Self::Hole { offset_bytes, len_bytes }),
                _ => Err(length("the payload of a hole", "12")),
            },
            ChunkKind::BLOCK_STATUS => {
                let context_id = fields.u32();
                Self::status(context_id, fields.0, false)
                    .ok_or(length("a block status", "4, and 8 for each descriptor"))
            }
            ChunkKind::BLOCK_STATUS_EXT => {
                let (context_id, count) = (fields.u32(), fields.u32());
                // The count is redundant: servers may send 0 or the correct number.
                if count.is_some_and(|count| count != 0 && count as usize != fields.0.len() / 16) {
                    return Err(length("a block status", "8, and 16 for each of the announced descriptors"));
                }
                Self::status(context_id, fields.0, true)
                    .ok_or(length("a block status", "8, and 16 for each descriptor"))
            }
            kind if kind.is_error() => {
                let (Some(code), Some(message_bytes)) = (fields.u32(), fields.u16()) else {
                    return Err(length("an error", "at least 6"));
                };
                let message = fields
                    .take(message_bytes.into())
                    .ok_or(length("an error", "6, and the announced length of its message"))?;
                let offset_bytes = match (kind, fields.u64(), fields.0) {
                    (ChunkKind::ERROR_OFFSET, Some(offset_bytes), []) => Some(offset_bytes),
                    (ChunkKind::ERROR_OFFSET, _, _) => {
                        return Err(length("an error with an offset", "14, and its message"));
                    }
                    _ => None,
                };
                // An error with code 0 is still an error. A message that is not valid text is
                // dropped.
                let code = if code == 0 { ErrorCode::EINVAL } else { ErrorCode(code) };
                Ok(Self::Error { code, message: text(message, "the message of an error").unwrap_or(""), offset_bytes })
            }
            ChunkKind(found) => Err(WireError::Value {
                what: "the kind of a chunk",
                found: found.into(),
                expected: "0, 1, 2, 5, 6, or an error",
            }),
        }
    }

    fn status(context_id: Option<u32>, bytes: &'a [u8], wide: bool) -> Option<Self> {
        let each = if wide { 16 } else { 8 };
        let descriptors = Descriptors { bytes, wide };
        if bytes.is_empty() || !bytes.len().is_multiple_of(each) {
            return None;
        }
        Some(Self::BlockStatus(BlockStatus { context_id: context_id?, descriptors }))
    }
}

impl Answering {
    /// Appends a hole chunk: header and payload.
    pub fn hole(&self, flags: ChunkFlags, at_bytes: u64, len_bytes: u32, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.chunk(flags, ChunkKind::OFFSET_HOLE, 12));
        out.extend_from_slice(&at_bytes.to_be_bytes());
        out.extend_from_slice(&len_bytes.to_be_bytes());
    }

    /// Appends an error chunk, header and payload, which ends the reply. The message is truncated
    /// to the protocol's limit. `at_bytes` is the offset of the failure, if known.
    pub fn error(&self, code: ErrorCode, message: &str, at_bytes: Option<u64>, out: &mut Vec<u8>) {
        let cut = (0..=STRING_BYTES_MAX.min(message.len())).rev().find(|&at| message.is_char_boundary(at)).unwrap_or(0);
        let message = &message[..cut];
        let kind = if at_bytes.is_some() { ChunkKind::ERROR_OFFSET } else { ChunkKind::ERROR };
        let payload_bytes = 6 + message.len() as u32 + if at_bytes.is_some() { 8 } else { 0 };
        out.extend_from_slice(&self.chunk(ChunkFlags::DONE, kind, payload_bytes));
        out.extend_from_slice(&code.0.to_be_bytes());
        out.extend_from_slice(&(message.len() as u16).to_be_bytes());
        out.extend_from_slice(message.as_bytes());
        if let Some(at_bytes) = at_bytes {
            out.extend_from_slice(&at_bytes.to_be_bytes());
        }
    }

    /// Appends a block status chunk: header and payload. Structured framing limits lengths to 32
    /// bits: a longer run is truncated at a multiple of 64 KiB, and the runs after it are left out,
    /// as the protocol allows. At most [`DESCRIPTORS_MAX`] descriptors are sent.
    ///
    /// # Panics
    /// Without descriptors: the protocol has no empty block status.
    pub fn block_status(&self, flags: ChunkFlags, context_id: u32, descriptors: &[Descriptor], out: &mut Vec<u8>) {
        assert!(!descriptors.is_empty(), "a block status has at least one descriptor");
        let mut count = descriptors.len().min(DESCRIPTORS_MAX);
        if self.framing == Framing::Extended {
            out.extend_from_slice(&self.chunk(flags, ChunkKind::BLOCK_STATUS_EXT, 8 + 16 * count as u32));
            out.extend_from_slice(&context_id.to_be_bytes());
            out.extend_from_slice(&(count as u32).to_be_bytes());
            for descriptor in &descriptors[..count] {
                out.extend_from_slice(&descriptor.len_bytes.to_be_bytes());
                out.extend_from_slice(&descriptor.status.to_be_bytes());
            }
            return;
        }
        if let Some(first_cut) = descriptors.iter().position(|descriptor| descriptor.len_bytes > NARROW_MAX) {
            count = count.min(first_cut + 1);
        }
        out.extend_from_slice(&self.chunk(flags, ChunkKind::BLOCK_STATUS, 4 + 8 * count as u32));
        out.extend_from_slice(&context_id.to_be_bytes());
        for descriptor in &descriptors[..count] {
            out.extend_from_slice(&(descriptor.len_bytes.min(NARROW_MAX) as u32).to_be_bytes());
            out.extend_from_slice(&(descriptor.status as u32).to_be_bytes());
        }
    }
}
