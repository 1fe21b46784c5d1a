//! The server's side of the handshake: options in, replies out. No I/O.
//!
//! ```text
//!   greeting ─▶ client flags ─▶ option, option, ... ─┬─ STARTTLS ─▶ (TLS) ─▶ options from the start
//!                                                    ├─ EXPORT_NAME, GO ─▶ Session
//!                                                    └─ ABORT ─▶ the end
//! ```
//!
//! Where TLS is required, nothing but STARTTLS and ABORT is answered before it, and what was agreed
//! on before it is forgotten. Bytes that a client sends behind STARTTLS without waiting for the
//! answer could come from somebody in between, so they end the session.
//!
//! A client that does not ask for the block sizes gets a disk of large sectors all the same, though
//! ERR_BLOCK_SIZE_REQD would be allowed: it may know them from elsewhere. nbd-client never asks
//! (3.24), and works with `-b 4096`. Requests for parts of sectors are refused one by one (`desk`),
//! and the log says from the start why.

use super::export::{Export, Exports};
use diskwright_nbd::wire::{
    CONTEXT_ALLOCATION, CONTEXT_DEPTH, ClientFlags, ClientOption, ContextQuery, Decoded, ExportQuery, ExportSummary,
    Framing, Greeting, HandshakeFlags, INFO_BLOCK_SIZE, INFO_DESCRIPTION, INFO_NAME, Info, OPTION_BYTES_MAX,
    OptionCode, OptionHeader, ReplyCode, WireError, option_reply,
};
use std::sync::Arc;

/// The number of `base:allocation` in replies.
pub(crate) const ALLOCATION_ID: u32 = 1;
/// The number of `qemu:allocation-depth` in replies.
pub(crate) const DEPTH_ID: u32 = 2;

/// Bytes of the blocks that a client keeps to which was told nothing and wants to get along with
/// everybody. Section "Block size constraints".
const USUAL_BLOCK_BYTES: u32 = 512;

/// Contexts, each or not.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Contexts {
    pub(crate) allocation: bool,
    pub(crate) depth: bool,
}

/// What the handshake led to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Session {
    /// Its number among the exports.
    pub(crate) export: usize,
    pub(crate) framing: Framing,
    pub(crate) contexts: Contexts,
    /// Its client has not asked for the block sizes, and those are larger than what every client
    /// keeps to.
    pub(crate) may_stray: bool,
}

/// Whether connections are encrypted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TlsNeed {
    /// There are no certificates.
    No,
    /// Who wants may.
    May,
    /// Who does not gets nothing.
    Must,
}

/// What follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// More bytes are needed.
    More,
    /// The answers are to be sent, and TLS begins.
    StartTls,
    /// The transmission phase begins.
    Transmit(Session),
    /// The client has said goodbye.
    Bye,
}

/// Why a handshake ends the session.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HandshakeError {
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error("the client flags are {0:#x}, expected bits 0 and 1 only, and bit 0 set (fixed newstyle)")]
    ClientFlags(u32),
    #[error("there is no export {name:?}, and the client asked by EXPORT_NAME, which has no answer for that")]
    UnknownExport { name: String },
    #[error("the client asked for an export by EXPORT_NAME without TLS, which is required here")]
    TlsRequired,
    #[error("{0} bytes came behind STARTTLS before it was answered")]
    Injected(usize),
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Handshake {
    exports: Arc<Exports>,
    tls: TlsNeed,
    encrypted: bool,
    /// `None` until the client flags have come.
    no_zeroes: Option<bool>,
    framing: Framing,
    /// Contexts that were set, and for which export.
    contexts: Option<(usize, Contexts)>,
    /// The export whose block sizes were asked for last.
    sizes_asked: Option<usize>,
}

impl Handshake {
    pub(crate) fn new(exports: Arc<Exports>, tls: TlsNeed) -> Self {
        Self {
            exports,
            tls,
            encrypted: false,
            no_zeroes: None,
            framing: Framing::Simple,
            contexts: None,
            sizes_asked: None,
        }
    }

    /// The server's first words.
    pub(crate) fn greeting() -> [u8; Greeting::NEWSTYLE_BYTES] {
        Greeting::encode_newstyle(HandshakeFlags::FIXED_NEWSTYLE | HandshakeFlags::NO_ZEROES)
    }

    /// Works off `bytes`, appends answers to `out`, and says how many bytes it took and what
    /// follows.
    pub(crate) fn step(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<(usize, Next), HandshakeError> {
        let mut taken = 0;
        loop {
            let rest = &bytes[taken..];
            if self.no_zeroes.is_none() {
                let Decoded::Value(flags, used) = ClientFlags::decode(rest) else { return Ok((taken, Next::More)) };
                if !flags.contains(ClientFlags::FIXED_NEWSTYLE) || !ClientFlags::all().contains(flags) {
                    return Err(HandshakeError::ClientFlags(flags.bits()));
                }
                self.no_zeroes = Some(flags.contains(ClientFlags::NO_ZEROES));
                taken += used;
                continue;
            }
            let Decoded::Value(header, used) = OptionHeader::decode(rest)? else { return Ok((taken, Next::More)) };
            if header.data_bytes > OPTION_BYTES_MAX {
                let (found, limit) = (header.data_bytes.into(), OPTION_BYTES_MAX.into());
                return Err(WireError::TooLong { what: "the data of an option", found, limit }.into());
            }
            let Some(data) = rest.get(used..used + header.data_bytes as usize) else { return Ok((taken, Next::More)) };
            taken += used + data.len();
            let next = self.answer(header.option, data, out)?;
            match next {
                Next::More => {}
                Next::StartTls if taken < bytes.len() => return Err(HandshakeError::Injected(bytes.len() - taken)),
                Next::StartTls => {
                    let encrypted = Self { encrypted: true, no_zeroes: self.no_zeroes, ..self.renewed() };
                    *self = encrypted;
                    return Ok((taken, next));
                }
                Next::Transmit(_) | Next::Bye => return Ok((taken, next)),
            }
        }
    }

    fn renewed(&self) -> Self {
        Self::new(Arc::clone(&self.exports), self.tls)
    }

    fn answer(&mut self, option: OptionCode, data: &[u8], out: &mut Vec<u8>) -> Result<Next, HandshakeError> {
        let mut refuse = |code, message: &str| option_reply::encode_refusal(option, code, message, out);
        let locked = self.tls == TlsNeed::Must && !self.encrypted;
        let parsed = match ClientOption::parse(option, data) {
            _ if locked && option == OptionCode::EXPORT_NAME => return Err(HandshakeError::TlsRequired),
            _ if locked && option != OptionCode::STARTTLS && option != OptionCode::ABORT => {
                refuse(ReplyCode::ERR_TLS_REQD, "this server speaks with nobody but in TLS");
                return Ok(Next::More);
            }
            Ok(parsed) => parsed,
            // It has no answer.
            Err(error) if option == OptionCode::EXPORT_NAME => return Err(error.into()),
            Err(error) => {
                refuse(ReplyCode::ERR_INVALID, &error.to_string());
                return Ok(Next::More);
            }
        };
        match parsed {
            ClientOption::ExportName(name) => return self.export_name(name, out),
            ClientOption::Abort => {
                option_reply::encode_ack(option, out);
                return Ok(Next::Bye);
            }
            ClientOption::List => {
                for export in self.exports.iter() {
                    option_reply::encode_server(&export.name, &export.description, out);
                }
                option_reply::encode_ack(option, out);
            }
            ClientOption::StartTls if self.encrypted => refuse(ReplyCode::ERR_INVALID, "TLS was started already"),
            ClientOption::StartTls if self.tls == TlsNeed::No => {
                refuse(ReplyCode::ERR_POLICY, "this server has no certificates");
            }
            ClientOption::StartTls => {
                option_reply::encode_ack(option, out);
                return Ok(Next::StartTls);
            }
            ClientOption::Info(query) => {
                self.describe(option, &query, out);
            }
            ClientOption::Go(query) => {
                if let Some(export) = self.describe(option, &query, out) {
                    return Ok(Next::Transmit(self.session(export)));
                }
            }
            ClientOption::StructuredReply => {
                if self.framing == Framing::Extended {
                    refuse(ReplyCode::ERR_INVALID, "extended headers were agreed on, which go further");
                } else {
                    self.framing = Framing::Structured;
                    option_reply::encode_ack(option, out);
                }
            }
            ClientOption::ExtendedHeaders => {
                self.framing = Framing::Extended;
                option_reply::encode_ack(option, out);
            }
            ClientOption::ListContexts(query) => self.contexts(option, &query, out),
            ClientOption::SetContexts(query) => self.contexts(option, &query, out),
            ClientOption::Unknown(_) => refuse(ReplyCode::ERR_UNSUP, "this server does not know the option"),
        }
        Ok(Next::More)
    }

    fn export_name(&self, name: &str, out: &mut Vec<u8>) -> Result<Next, HandshakeError> {
        let index = self.exports.find(name).ok_or_else(|| HandshakeError::UnknownExport { name: name.to_owned() })?;
        let export = self.exports.get(index);
        let summary = ExportSummary { size_bytes: export.device.geometry().size_bytes, flags: self.flags(export) };
        summary.encode(self.no_zeroes == Some(true), out);
        Ok(Next::Transmit(self.session(index)))
    }

    fn session(&self, export: usize) -> Session {
        let contexts = self.contexts.filter(|&(of, _)| of == export).map_or(Contexts::default(), |(_, set)| set);
        let may_stray =
            self.sizes_asked != Some(export) && self.exports.get(export).block_sizes().minimum > USUAL_BLOCK_BYTES;
        Session { export, framing: self.framing, contexts, may_stray }
    }

    fn flags(&self, export: &Export) -> diskwright_nbd::wire::TransmissionFlags {
        export.flags(self.framing != Framing::Simple)
    }

    /// Answers INFO or GO, and gives the export if there is one.
    fn describe(&mut self, option: OptionCode, query: &ExportQuery<'_>, out: &mut Vec<u8>) -> Option<usize> {
        let index = self.find(option, query.name, out)?;
        if query.infos().any(|info| info == INFO_BLOCK_SIZE) {
            self.sizes_asked = Some(index);
        }
        let export = self.exports.get(index);
        let size_bytes = export.device.geometry().size_bytes;
        option_reply::encode_info(option, &Info::Export { size_bytes, flags: self.flags(export) }, out);
        for info in query.infos() {
            match info {
                INFO_NAME => option_reply::encode_info(option, &Info::Name(&export.name), out),
                INFO_DESCRIPTION => option_reply::encode_info(option, &Info::Description(&export.description), out),
                _ => {}
            }
        }
        option_reply::encode_info(option, &Info::BlockSize(export.block_sizes()), out);
        option_reply::encode_ack(option, out);
        Some(index)
    }

    fn find(&self, option: OptionCode, name: &str, out: &mut Vec<u8>) -> Option<usize> {
        let found = self.exports.find(name);
        if found.is_none() {
            let message = if name.is_empty() {
                "there is no default export; ask for one by its name".to_owned()
            } else {
                format!("there is no export {:?}", name.chars().take(200).collect::<String>())
            };
            option_reply::encode_refusal(option, ReplyCode::ERR_UNKNOWN, &message, out);
        }
        found
    }

    /// Answers LIST_META_CONTEXT and SET_META_CONTEXT.
    fn contexts(&mut self, option: OptionCode, query: &ContextQuery<'_>, out: &mut Vec<u8>) {
        let sets = option == OptionCode::SET_META_CONTEXT;
        if sets {
            // Also a set that fails takes back the last one.
            self.contexts = None;
        }
        if self.framing == Framing::Simple {
            let message = "contexts need structured replies or extended headers first";
            return option_reply::encode_refusal(option, ReplyCode::ERR_INVALID, message, out);
        }
        let Some(export) = self.find(option, query.name, out) else { return };
        let mut found = Contexts::default();
        let mut queries = query.queries().peekable();
        if !sets && queries.peek().is_none() {
            found = Contexts { allocation: true, depth: true };
        }
        for wanted in queries {
            // To list, a namespace alone asks for all that is in it.
            found.allocation |= wanted == CONTEXT_ALLOCATION || !sets && wanted == "base:";
            found.depth |= wanted == CONTEXT_DEPTH || !sets && wanted == "qemu:";
        }
        for (there, id, name) in
            [(found.allocation, ALLOCATION_ID, CONTEXT_ALLOCATION), (found.depth, DEPTH_ID, CONTEXT_DEPTH)]
        {
            if there {
                option_reply::encode_context(option, if sets { id } else { 0 }, name, out);
            }
        }
        option_reply::encode_ack(option, out);
        if sets {
            self.contexts = Some((export, found));
        }
    }
}

#[cfg(test)]
mod tests;
