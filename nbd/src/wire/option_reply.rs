//! Replies to options.

use super::{
    Decoded, INFO_BLOCK_SIZE, INFO_DESCRIPTION, INFO_EXPORT, INFO_NAME, OptionCode, TransmissionFlags, WireError,
    bytes::{Fields, put_string, text},
};
use std::fmt;

/// The first word of each reply to an option.
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;

/// The code of a reply to an option. Section "Option reply types".
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ReplyCode(pub u32);

impl ReplyCode {
    /// Accepted; the last reply.
    pub const ACK: Self = Self(1);
    /// One export of a list.
    pub const SERVER: Self = Self(2);
    /// Information about an export.
    pub const INFO: Self = Self(3);
    /// A metadata context.
    pub const META_CONTEXT: Self = Self(4);
    /// The option is unknown.
    pub const ERR_UNSUP: Self = Self(0x8000_0001);
    /// The option is known, but not allowed.
    pub const ERR_POLICY: Self = Self(0x8000_0002);
    /// The option's data is invalid.
    pub const ERR_INVALID: Self = Self(0x8000_0003);
    /// Not supported on the server's platform.
    pub const ERR_PLATFORM: Self = Self(0x8000_0004);
    /// TLS is required first.
    pub const ERR_TLS_REQD: Self = Self(0x8000_0005);
    /// The export does not exist.
    pub const ERR_UNKNOWN: Self = Self(0x8000_0006);
    /// The server is shutting down.
    pub const ERR_SHUTDOWN: Self = Self(0x8000_0007);
    /// The client must request the block sizes first.
    pub const ERR_BLOCK_SIZE_REQD: Self = Self(0x8000_0008);
    /// The request is too large.
    pub const ERR_TOO_BIG: Self = Self(0x8000_0009);
    /// Extended headers are required.
    pub const ERR_EXT_HEADER_REQD: Self = Self(0x8000_000a);

    /// Whether the code is an error, which refuses the option.
    pub fn is_error(self) -> bool {
        self.0 & 0x8000_0000 != 0
    }
}

impl fmt::Debug for ReplyCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A description for messages.
impl fmt::Display for ReplyCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match *self {
            Self::ACK => "accepted",
            Self::SERVER => "an export",
            Self::INFO => "information",
            Self::META_CONTEXT => "a context",
            Self::ERR_UNSUP => "the server does not support this option",
            Self::ERR_POLICY => "the server's policy forbids it",
            Self::ERR_INVALID => "the server considers the request invalid",
            Self::ERR_PLATFORM => "not supported on the server's platform",
            Self::ERR_TLS_REQD => "the server requires TLS first",
            Self::ERR_UNKNOWN => "the export does not exist",
            Self::ERR_SHUTDOWN => "the server is shutting down",
            Self::ERR_BLOCK_SIZE_REQD => "the server requires its block sizes to be respected",
            Self::ERR_TOO_BIG => "too large for the server",
            Self::ERR_EXT_HEADER_REQD => "the server requires extended headers",
            Self(other) => return write!(f, "reply {other:#x}"),
        })
    }
}

/// The header before the data of a reply to an option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OptionReplyHeader {
    /// The option that is answered.
    pub option: OptionCode,
    /// The kind of reply.
    pub code: ReplyCode,
    /// Length of the data that follows. Check this number of the peer against
    /// [`OPTION_REPLY_BYTES_MAX`](super::OPTION_REPLY_BYTES_MAX) before gathering the data.
    pub data_bytes: u32,
}

impl OptionReplyHeader {
    /// Size on the wire.
    pub const WIRE_BYTES: usize = 20;

    /// Encodes the header.
    pub fn encode(self) -> [u8; Self::WIRE_BYTES] {
        let mut out = [0; Self::WIRE_BYTES];
        out[..8].copy_from_slice(&OPTION_REPLY_MAGIC.to_be_bytes());
        out[8..12].copy_from_slice(&self.option.0.to_be_bytes());
        out[12..16].copy_from_slice(&self.code.0.to_be_bytes());
        out[16..].copy_from_slice(&self.data_bytes.to_be_bytes());
        out
    }

    /// Decodes a header.
    ///
    /// # Errors
    /// [`WireError::Magic`] if this is not a reply to an option.
    pub fn decode(bytes: &[u8]) -> Result<Decoded<Self>, WireError> {
        let mut fields = Fields(bytes);
        if let Some(found) = fields.u64()
            && found != OPTION_REPLY_MAGIC
        {
            return Err(WireError::Magic { what: "the reply to an option", found, expected: "0x3e889045565a9" });
        }
        let (Some(option), Some(code), Some(data_bytes)) = (fields.u32(), fields.u32(), fields.u32()) else {
            return Ok(Decoded::Need(Self::WIRE_BYTES - bytes.len()));
        };
        let (option, code) = (OptionCode(option), ReplyCode(code));
        Ok(Decoded::Value(Self { option, code, data_bytes }, Self::WIRE_BYTES))
    }
}

/// The block sizes of an export, in bytes. Section "Block size constraints".
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockSizes {
    /// Alignment of offsets and lengths: a power of two, at most 64 KiB.
    pub minimum: u32,
    /// Preferred alignment: a power of two, at least 512 and the minimum.
    pub preferred: u32,
    /// Maximum payload; 2^32-1 means no limit.
    pub maximum: u32,
}

impl BlockSizes {
    /// The block sizes to use if the server reports none.
    pub const DEFAULT: Self = Self { minimum: 1, preferred: 4096, maximum: super::PAYLOAD_BYTES_DEFAULT };

    /// Checks the requirements of the specification.
    ///
    /// # Errors
    /// [`WireError::Value`] for a size that violates them.
    pub fn check(self) -> Result<Self, WireError> {
        let wrong = |what, found: u32, expected| Err(WireError::Value { what, found: found.into(), expected });
        if !self.minimum.is_power_of_two() || self.minimum > 64 << 10 {
            return wrong("the minimum block size", self.minimum, "a power of two of at most 65536");
        }
        if !self.preferred.is_power_of_two() || self.preferred < self.minimum.max(512) {
            return wrong("the preferred block size", self.preferred, "a power of two, at least 512 and the minimum");
        }
        if self.maximum < self.preferred || self.maximum != u32::MAX && !self.maximum.is_multiple_of(self.minimum) {
            return wrong(
                "the maximum block size",
                self.maximum,
                "a multiple of the minimum, not below the preferred, or 4294967295 for none",
            );
        }
        Ok(self)
    }
}

/// Information about an export.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Info<'a> {
    /// Size and flags.
    Export {
        /// Size in bytes.
        size_bytes: u64,
        /// Properties and supported commands.
        flags: TransmissionFlags,
    },
    /// The canonical name.
    Name(&'a str),
    /// A description in plain text.
    Description(&'a str),
    /// The block sizes, not checked.
    BlockSize(BlockSizes),
    /// An unknown information type, which must be ignored.
    Unknown(u16),
}

impl<'a> Info<'a> {
    fn parse(data: &'a [u8]) -> Result<Self, WireError> {
        let length = |what, expected| WireError::Length { what, found: data.len() as u64, expected };
        let mut fields = Fields(data);
        let kind = fields.u16().ok_or(length("a piece of information", "at least 2"))?;
        Ok(match kind {
            INFO_EXPORT => match (fields.u64(), fields.u16(), fields.0) {
                (Some(size_bytes), Some(flags), []) => {
                    Self::Export { size_bytes, flags: TransmissionFlags::from_bits_retain(flags) }
                }
                _ => return Err(length("the size and flags of an export", "12")),
            },
            INFO_NAME => Self::Name(text(fields.0, "the canonical name of the export")?),
            INFO_DESCRIPTION => Self::Description(text(fields.0, "the description of the export")?),
            INFO_BLOCK_SIZE => match (fields.u32(), fields.u32(), fields.u32(), fields.0) {
                (Some(minimum), Some(preferred), Some(maximum), []) => {
                    Self::BlockSize(BlockSizes { minimum, preferred, maximum })
                }
                _ => return Err(length("the block sizes of an export", "14")),
            },
            unknown => Self::Unknown(unknown),
        })
    }
}

/// A reply with its parsed data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OptionReply<'a> {
    /// Accepted; the last reply.
    Ack,
    /// One export of a list.
    Server {
        /// The name of the export.
        name: &'a str,
        /// A description in plain text; may be empty.
        description: &'a str,
    },
    /// Information about an export.
    Info(Info<'a>),
    /// A metadata context.
    Context {
        /// The id of the context in block status replies.
        id: u32,
        /// The name of the context.
        name: &'a str,
    },
    /// Refused; the last reply.
    Refused {
        /// The reason.
        code: ReplyCode,
        /// The server's message; may be empty.
        message: &'a str,
    },
}

impl<'a> OptionReply<'a> {
    /// Parses a reply from its complete data.
    ///
    /// # Errors
    /// If the data is malformed. A message that is not valid text is dropped instead, since the
    /// refusal does not depend on it.
    pub fn parse(code: ReplyCode, data: &'a [u8]) -> Result<Self, WireError> {
        let length = |what, expected| WireError::Length { what, found: data.len() as u64, expected };
        match code {
            ReplyCode::ACK if data.is_empty() => Ok(Self::Ack),
            ReplyCode::ACK => Err(length("an acknowledgement", "0")),
            ReplyCode::SERVER => {
                let mut fields = Fields(data);
                let name = fields.string("the name of an export")?;
                Ok(Self::Server { name, description: text(fields.0, "the description of an export").unwrap_or("") })
            }
            ReplyCode::INFO => Info::parse(data).map(Self::Info),
            ReplyCode::META_CONTEXT => {
                let mut fields = Fields(data);
                let id = fields.u32().ok_or(length("a context", "at least 4"))?;
                Ok(Self::Context { id, name: text(fields.0, "the name of a context")? })
            }
            code if code.is_error() => {
                Ok(Self::Refused { code, message: text(data, "the server's message").unwrap_or("") })
            }
            ReplyCode(found) => Err(WireError::Value {
                what: "the kind of a reply to an option",
                found: found.into(),
                expected: "1 to 4, or an error",
            }),
        }
    }
}

/// Appends a reply with this data.
pub fn encode_plain(option: OptionCode, code: ReplyCode, data: &[u8], out: &mut Vec<u8>) {
    out.extend_from_slice(&OptionReplyHeader { option, code, data_bytes: data.len() as u32 }.encode());
    out.extend_from_slice(data);
}

/// Appends an acknowledgement.
pub fn encode_ack(option: OptionCode, out: &mut Vec<u8>) {
    encode_plain(option, ReplyCode::ACK, &[], out);
}

/// Appends a refusal with a message.
pub fn encode_refusal(option: OptionCode, code: ReplyCode, message: &str, out: &mut Vec<u8>) {
    encode_plain(option, code, message.as_bytes(), out);
}

/// Appends one export of a list.
pub fn encode_server(name: &str, description: &str, out: &mut Vec<u8>) {
    let mut data = Vec::with_capacity(4 + name.len() + description.len());
    put_string(&mut data, name);
    data.extend_from_slice(description.as_bytes());
    encode_plain(OptionCode::LIST, ReplyCode::SERVER, &data, out);
}

/// Appends a metadata context.
pub fn encode_context(option: OptionCode, id: u32, name: &str, out: &mut Vec<u8>) {
    let mut data = Vec::with_capacity(4 + name.len());
    data.extend_from_slice(&id.to_be_bytes());
    data.extend_from_slice(name.as_bytes());
    encode_plain(option, ReplyCode::META_CONTEXT, &data, out);
}

/// Appends information about an export to the answer to `INFO` or `GO`.
pub fn encode_info(option: OptionCode, info: &Info<'_>, out: &mut Vec<u8>) {
    let mut data = Vec::new();
    match info {
        Info::Export { size_bytes, flags } => {
            data.extend_from_slice(&INFO_EXPORT.to_be_bytes());
            data.extend_from_slice(&size_bytes.to_be_bytes());
            data.extend_from_slice(&flags.bits().to_be_bytes());
        }
        Info::Name(name) => {
            data.extend_from_slice(&INFO_NAME.to_be_bytes());
            data.extend_from_slice(name.as_bytes());
        }
        Info::Description(description) => {
            data.extend_from_slice(&INFO_DESCRIPTION.to_be_bytes());
            data.extend_from_slice(description.as_bytes());
        }
        Info::BlockSize(sizes) => {
            data.extend_from_slice(&INFO_BLOCK_SIZE.to_be_bytes());
            [sizes.minimum, sizes.preferred, sizes.maximum]
                .iter()
                .for_each(|size| data.extend_from_slice(&size.to_be_bytes()));
        }
        Info::Unknown(kind) => data.extend_from_slice(&kind.to_be_bytes()),
    }
    encode_plain(option, ReplyCode::INFO, &data, out);
}
