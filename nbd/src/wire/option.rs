//! Options: the client's requests during the handshake.

use super::{
    Decoded, WireError,
    bytes::{Fields, put_string, text},
    handshake::OPTION_MAGIC,
};
use std::fmt;

/// The code of an option. Section "Option types".
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct OptionCode(pub u32);

impl OptionCode {
    /// Enter the transmission phase, without an answer if that fails.
    pub const EXPORT_NAME: Self = Self(1);
    /// End the session.
    pub const ABORT: Self = Self(2);
    /// List the exports.
    pub const LIST: Self = Self(3);
    /// Continue over TLS.
    pub const STARTTLS: Self = Self(5);
    /// Get information about an export.
    pub const INFO: Self = Self(6);
    /// Get information about an export and enter the transmission phase.
    pub const GO: Self = Self(7);
    /// Use structured replies.
    pub const STRUCTURED_REPLY: Self = Self(8);
    /// List the metadata contexts.
    pub const LIST_META_CONTEXT: Self = Self(9);
    /// Select metadata contexts.
    pub const SET_META_CONTEXT: Self = Self(10);
    /// Use extended headers.
    pub const EXTENDED_HEADERS: Self = Self(11);

    /// The option's name in the specification, without `NBD_OPT_`; `None` if unknown.
    pub fn name(self) -> Option<&'static str> {
        Some(match self {
            Self::EXPORT_NAME => "EXPORT_NAME",
            Self::ABORT => "ABORT",
            Self::LIST => "LIST",
            Self::STARTTLS => "STARTTLS",
            Self::INFO => "INFO",
            Self::GO => "GO",
            Self::STRUCTURED_REPLY => "STRUCTURED_REPLY",
            Self::LIST_META_CONTEXT => "LIST_META_CONTEXT",
            Self::SET_META_CONTEXT => "SET_META_CONTEXT",
            Self::EXTENDED_HEADERS => "EXTENDED_HEADERS",
            _ => return None,
        })
    }
}

impl fmt::Debug for OptionCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for OptionCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "option {}", self.0),
        }
    }
}

/// The header before the data of an option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OptionHeader {
    /// The option.
    pub option: OptionCode,
    /// Length of the data that follows. Check this number of the peer against
    /// [`OPTION_BYTES_MAX`](super::OPTION_BYTES_MAX) before gathering the data.
    pub data_bytes: u32,
}

impl OptionHeader {
    /// Size on the wire.
    pub const WIRE_BYTES: usize = 16;

    /// Encodes the header.
    pub fn encode(self) -> [u8; Self::WIRE_BYTES] {
        let mut out = [0; Self::WIRE_BYTES];
        out[..8].copy_from_slice(&OPTION_MAGIC.to_be_bytes());
        out[8..12].copy_from_slice(&self.option.0.to_be_bytes());
        out[12..].copy_from_slice(&self.data_bytes.to_be_bytes());
        out
    }

    /// Decodes a header.
    ///
    /// # Errors
    /// [`WireError::Magic`] if this is not an option.
    pub fn decode(bytes: &[u8]) -> Result<Decoded<Self>, WireError> {
        let mut fields = Fields(bytes);
        if let Some(found) = fields.u64()
            && found != OPTION_MAGIC
        {
            return Err(WireError::Magic { what: "an option", found, expected: "\"IHAVEOPT\"" });
        }
        let (Some(option), Some(data_bytes)) = (fields.u32(), fields.u32()) else {
            return Ok(Decoded::Need(Self::WIRE_BYTES - bytes.len()));
        };
        Ok(Decoded::Value(Self { option: OptionCode(option), data_bytes }, Self::WIRE_BYTES))
    }
}

/// The data of `INFO` and `GO`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExportQuery<'a> {
    /// The export; empty for the default export.
    pub name: &'a str,
    infos: &'a [u8],
}

impl<'a> ExportQuery<'a> {
    fn parse(data: &'a [u8]) -> Result<Self, WireError> {
        let mut fields = Fields(data);
        let name = fields.string("the name of the export")?;
        let count = fields.u16();
        if count.is_none_or(|count| fields.0.len() != usize::from(count) * 2) {
            return Err(WireError::Length {
                what: "the list of information requests",
                found: fields.0.len() as u64,
                expected: "2 for each announced request",
            });
        }
        Ok(Self { name, infos: fields.0 })
    }

    /// The requested information types.
    pub fn infos(&self) -> impl Iterator<Item = u16> + use<'a> {
        self.infos.chunks_exact(2).map(|pair| u16::from_be_bytes([pair[0], pair[1]]))
    }
}

/// The data of `LIST_META_CONTEXT` and `SET_META_CONTEXT`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ContextQuery<'a> {
    /// The export.
    pub name: &'a str,
    count: u32,
    queries: &'a [u8],
}

impl<'a> ContextQuery<'a> {
    fn parse(data: &'a [u8]) -> Result<Self, WireError> {
        let mut fields = Fields(data);
        let name = fields.string("the name of the export")?;
        let count = fields.u32().ok_or(WireError::Length {
            what: "the list of contexts",
            found: fields.0.len() as u64,
            expected: "at least 4",
        })?;
        let queries = fields.0;
        for _ in 0..count {
            fields.string("the query of a context")?;
        }
        if !fields.0.is_empty() {
            return Err(WireError::Length {
                what: "the list of contexts",
                found: data.len() as u64,
                expected: "the announced number of queries and no further bytes",
            });
        }
        Ok(Self { name, count, queries })
    }

    /// The queries for contexts.
    pub fn queries(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        let mut fields = Fields(self.queries);
        // Parsed before, so none of them fails now.
        (0..self.count).map_while(move |_| fields.string("the query of a context").ok())
    }
}

/// An option with its parsed data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClientOption<'a> {
    /// Enter the transmission phase with this export.
    ExportName(&'a str),
    /// End the session.
    Abort,
    /// List exports.
    List,
    /// Start TLS.
    StartTls,
    /// Get information about an export.
    Info(ExportQuery<'a>),
    /// Enter the transmission phase.
    Go(ExportQuery<'a>),
    /// Use structured replies.
    StructuredReply,
    /// List metadata contexts.
    ListContexts(ContextQuery<'a>),
    /// Select metadata contexts.
    SetContexts(ContextQuery<'a>),
    /// Use extended headers.
    ExtendedHeaders,
    /// Unknown: answer `ERR_UNSUP`.
    Unknown(OptionCode),
}

impl<'a> ClientOption<'a> {
    /// Parses an option from its complete data.
    ///
    /// # Errors
    /// If the data is malformed: answer `ERR_INVALID`. (For `EXPORT_NAME`, which has no error
    /// answer, end the session.)
    pub fn parse(option: OptionCode, data: &'a [u8]) -> Result<Self, WireError> {
        let empty = |parsed| match data.len() {
            0 => Ok(parsed),
            found => Err(WireError::Length {
                what: "the data of an option without data",
                found: found as u64,
                expected: "0",
            }),
        };
        match option {
            OptionCode::EXPORT_NAME => text(data, "the name of the export").map(Self::ExportName),
            // Data of this option must be ignored.
            OptionCode::ABORT => Ok(Self::Abort),
            OptionCode::LIST => empty(Self::List),
            OptionCode::STARTTLS => empty(Self::StartTls),
            OptionCode::INFO => ExportQuery::parse(data).map(Self::Info),
            OptionCode::GO => ExportQuery::parse(data).map(Self::Go),
            OptionCode::STRUCTURED_REPLY => empty(Self::StructuredReply),
            OptionCode::LIST_META_CONTEXT => ContextQuery::parse(data).map(Self::ListContexts),
            OptionCode::SET_META_CONTEXT => ContextQuery::parse(data).map(Self::SetContexts),
            OptionCode::EXTENDED_HEADERS => empty(Self::ExtendedHeaders),
            unknown => Ok(Self::Unknown(unknown)),
        }
    }
}

/// Appends an option with this data.
pub fn encode_plain(option: OptionCode, data: &[u8], out: &mut Vec<u8>) {
    out.extend_from_slice(&OptionHeader { option, data_bytes: data.len() as u32 }.encode());
    out.extend_from_slice(data);
}

/// Appends `INFO` or `GO`.
pub fn encode_export(option: OptionCode, name: &str, infos: &[u16], out: &mut Vec<u8>) {
    let mut data = Vec::with_capacity(6 + name.len() + infos.len() * 2);
    put_string(&mut data, name);
    data.extend_from_slice(&(infos.len() as u16).to_be_bytes());
    infos.iter().for_each(|info| data.extend_from_slice(&info.to_be_bytes()));
    encode_plain(option, &data, out);
}

/// Appends `LIST_META_CONTEXT` or `SET_META_CONTEXT`.
pub fn encode_contexts(option: OptionCode, name: &str, queries: &[&str], out: &mut Vec<u8>) {
    let mut data = Vec::new();
    put_string(&mut data, name);
    data.extend_from_slice(&(queries.len() as u32).to_be_bytes());
    queries.iter().for_each(|query| put_string(&mut data, query));
    encode_plain(option, &data, out);
}
