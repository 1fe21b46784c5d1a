//! Replies to options.

use super::{
    INFO_BLOCK_SIZE, INFO_DESCRIPTION, INFO_EXPORT, INFO_NAME, OptionCode, OptionReplyHeader, TransmissionFlags,
    WireError,
    bytes::{Fields, put_string, text},
};
use std::fmt;

/// The number of a kind of reply. Section "Option reply types".
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ReplyCode(pub u32);

impl ReplyCode {
    /// Accepted; the last reply.
    pub const ACK: Self = Self(1);
    /// An export.
    pub const SERVER: Self = Self(2);
    /// Something about an export.
    pub const INFO: Self = Self(3);
    /// A context.
    pub const META_CONTEXT: Self = Self(4);
    /// The option is not known.
    pub const ERR_UNSUP: Self = Self(0x8000_0001);
    /// Known, but not allowed here.
    pub const ERR_POLICY: Self = Self(0x8000_0002);
    /// Its data make no sense.
    pub const ERR_INVALID: Self = Self(0x8000_0003);
    /// Not on this machine.
    pub const ERR_PLATFORM: Self = Self(0x8000_0004);
    /// Not without TLS.
    pub const ERR_TLS_REQD: Self = Self(0x8000_0005);
    /// No such export.
    pub const ERR_UNKNOWN: Self = Self(0x8000_0006);
    /// The server is going away.
    pub const ERR_SHUTDOWN: Self = Self(0x8000_0007);
    /// Ask for the block sizes first.
    pub const ERR_BLOCK_SIZE_REQD: Self = Self(0x8000_0008);
    /// Too large to process.
    pub const ERR_TOO_BIG: Self = Self(0x8000_0009);
    /// Not without extended headers.
    pub const ERR_EXT_HEADER_REQD: Self = Self(0x8000_000a);

    /// Whether it refuses the option.
    pub fn is_error(self) -> bool {
        self.0 & 0x8000_0000 != 0
    }
}

impl fmt::Debug for ReplyCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// What it says, in words for people.
impl fmt::Display for ReplyCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match *self {
            Self::ACK => "accepted",
            Self::SERVER => "an export",
            Self::INFO => "information",
            Self::META_CONTEXT => "a context",
            Self::ERR_UNSUP => "the server does not know this option",
            Self::ERR_POLICY => "the server's policy forbids it",
            Self::ERR_INVALID => "the server finds the request invalid",
            Self::ERR_PLATFORM => "the server cannot do it on its platform",
            Self::ERR_TLS_REQD => "the server wants TLS first",
            Self::ERR_UNKNOWN => "there is no such export",
            Self::ERR_SHUTDOWN => "the server is shutting down",
            Self::ERR_BLOCK_SIZE_REQD => "the server wants its block sizes to be kept",
            Self::ERR_TOO_BIG => "too large for the server",
            Self::ERR_EXT_HEADER_REQD => "the server wants extended headers",
            Self(other) => return write!(f, "reply {other:#x}"),
        })
    }
}

/// The block sizes of an export, in bytes. Section "Block size constraints".
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockSizes {
    /// Offsets and lengths are multiples of it: a power of two, at most 64 KiB.
    pub minimum: u32,
    /// What the server likes: a power of two, at least 512 and the minimum.
    pub preferred: u32,
    /// Largest payload. 2^32-1 is no limit.
    pub maximum: u32,
}

impl BlockSizes {
    /// What holds where the server says nothing.
    pub const DEFAULT: Self = Self { minimum: 1, preferred: 4096, maximum: super::PAYLOAD_BYTES_DEFAULT };

    /// Checks what the specification demands.
    ///
    /// # Errors
    /// [`WireError::Value`].
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

/// Something about an export.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Info<'a> {
    /// Size and flags.
    Export {
        /// Size in bytes.
        size_bytes: u64,
        /// What it can do.
        flags: TransmissionFlags,
    },
    /// Its canonical name.
    Name(&'a str),
    /// A sentence for people.
    Description(&'a str),
    /// Its block sizes, not checked.
    BlockSize(BlockSizes),
    /// Not known here, to be ignored.
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

/// A reply with its data understood.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OptionReply<'a> {
    /// Accepted; the last reply.
    Ack,
    /// An export of the list.
    Server {
        /// Its name.
        name: &'a str,
        /// A sentence for people, or nothing.
        description: &'a str,
    },
    /// Something about an export.
    Info(Info<'a>),
    /// A context.
    Context {
        /// Its number in block status replies.
        id: u32,
        /// Its name.
        name: &'a str,
    },
    /// Refused; the last reply.
    Refused {
        /// Why.
        code: ReplyCode,
        /// The server's own words, or nothing.
        message: &'a str,
    },
}

impl<'a> OptionReply<'a> {
    /// Understands a reply. `data` is all of its data.
    ///
    /// # Errors
    /// What is wrong with it. (Words of a server that are not text are dropped, as its refusal
    /// counts without them.)
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

/// Appends a reply whose data is `data`.
pub fn encode_plain(option: OptionCode, code: ReplyCode, data: &[u8], out: &mut Vec<u8>) {
    out.extend_from_slice(&OptionReplyHeader { option, code, data_bytes: data.len() as u32 }.encode());
    out.extend_from_slice(data);
}

/// Appends an acknowledgement.
pub fn encode_ack(option: OptionCode, out: &mut Vec<u8>) {
    encode_plain(option, ReplyCode::ACK, &[], out);
}

/// Appends a refusal with a sentence for people.
pub fn encode_refusal(option: OptionCode, code: ReplyCode, message: &str, out: &mut Vec<u8>) {
    encode_plain(option, code, message.as_bytes(), out);
}

/// Appends an export of the list.
pub fn encode_server(name: &str, description: &str, out: &mut Vec<u8>) {
    let mut data = Vec::with_capacity(4 + name.len() + description.len());
    put_string(&mut data, name);
    data.extend_from_slice(description.as_bytes());
    encode_plain(OptionCode::LIST, ReplyCode::SERVER, &data, out);
}

/// Appends a context.
pub fn encode_context(option: OptionCode, id: u32, name: &str, out: &mut Vec<u8>) {
    let mut data = Vec::with_capacity(4 + name.len());
    data.extend_from_slice(&id.to_be_bytes());
    data.extend_from_slice(name.as_bytes());
    encode_plain(option, ReplyCode::META_CONTEXT, &data, out);
}

/// Appends a piece of information to the answer to `INFO` or `GO`.
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
