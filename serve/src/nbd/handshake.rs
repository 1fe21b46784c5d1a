//! The server's side of the handshake: options in, replies out. No I/O.
//!
//! ```text
//!   greeting ─▶ client flags ─▶ option, option, ... ─┬─ STARTTLS ─▶ (TLS) ─▶ options start again
//!                                                    ├─ EXPORT_NAME, GO ─▶ Session
//!                                                    └─ ABORT ─▶ the end
//! ```
//!
//! If TLS is required, only STARTTLS and ABORT are accepted before it. Everything that was
//! negotiated before TLS is forgotten. If a client sends bytes after STARTTLS without waiting for
//! the reply, the session ends: a man in the middle could have injected those bytes.
//!
//! A client that does not ask for the block sizes is served even if the disk has large sectors. The
//! protocol would allow ERR_BLOCK_SIZE_REQD, but the client may know the size from elsewhere:
//! nbd-client (3.24) never asks, and works with `-b 4096`. Unaligned requests are refused one by
//! one (`requests`), and a warning in the log explains why.

use crate::net::{Export, exports::Exports, settings::TlsNeed};
use diskwright_nbd::wire::{
    CONTEXT_ALLOCATION, CONTEXT_DEPTH, CONTEXT_DIRTY_BITMAP, CONTEXT_SERVER, CONTEXT_TRACK, ClientFlags, ClientOption,
    ContextQuery, Decoded, ExportQuery, ExportSummary, Framing, Greeting, HandshakeFlags, INFO_BLOCK_SIZE,
    INFO_DESCRIPTION, INFO_NAME, Info, OPTION_BYTES_MAX, OptionCode, OptionHeader, ReplyCode, WireError, option_reply,
};
use diskwright_store::TrackedPoint;
use std::sync::Arc;

/// The context id of `base:allocation` in replies.
pub(crate) const ALLOCATION_ID: u32 = 1;
/// The context id of `qemu:allocation-depth` in replies.
pub(crate) const DEPTH_ID: u32 = 2;

/// The context id of the first point in replies. Each point has two, by either name.
const POINT_ID: u32 = 3;

/// The block size that a client assumes if it did not ask ("Block size constraints" in the
/// protocol).
const USUAL_BLOCK_BYTES: u32 = 512;

/// Which metadata contexts are selected.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Contexts {
    pub(crate) allocation: bool,
    pub(crate) depth: bool,
    /// Points of change tracking. Shared, as the session is cloned for each input of the client.
    pub(crate) points: Arc<[PointContext]>,
}

impl Contexts {
    pub(crate) fn is_empty(&self) -> bool {
        !self.allocation && !self.depth && self.points.is_empty()
    }
}

/// A context that tells what has changed since a point.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PointContext {
    pub(crate) id: u32,
    pub(crate) point: TrackedPoint,
}

/// The result of a handshake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Session {
    /// Index of the export.
    pub(crate) export: usize,
    pub(crate) framing: Framing,
    pub(crate) contexts: Contexts,
    /// Whether the client may send unaligned requests: it did not ask for the block sizes, and the
    /// disk's minimum is larger than what clients assume.
    pub(crate) may_be_unaligned: bool,
}

/// What follows after [`Handshake::step`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum HandshakeStep {
    /// More bytes are needed.
    More,
    /// The replies must be sent first, then TLS begins.
    StartTls,
    /// The transmission phase begins.
    Transmit(Session),
    /// The client has sent ABORT.
    Bye,
}

/// Errors that end the session.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HandshakeError {
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error("the client flags are {0:#x}; expected bit 0 (fixed newstyle) set and no bits but 0 and 1")]
    ClientFlags(u32),
    #[error("there is no export {name:?}, and EXPORT_NAME has no error reply")]
    UnknownExport { name: String },
    #[error("the client sent EXPORT_NAME without TLS, which this server requires")]
    TlsRequired,
    #[error("the client sent {0} bytes after STARTTLS without waiting for the reply")]
    Injected(usize),
}

#[derive(Debug)]
pub(crate) struct Handshake {
    exports: Arc<Exports>,
    tls: TlsNeed,
    encrypted: bool,
    /// Whether the client has asked for no padding; `None` until its flags have been received.
    no_zeroes: Option<bool>,
    framing: Framing,
    /// The selected contexts, and the index of the export they were selected for.
    contexts: Option<(usize, Contexts)>,
    /// Index of the export whose block sizes were asked for last.
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

    /// Other exports are served from now on. Those that stay keep their indexes.
    pub(crate) fn set_exports(&mut self, exports: Arc<Exports>) {
        // A free index may pass to another export.
        self.contexts.take_if(|(index, _)| exports.is_leaving(*index));
        self.sizes_asked.take_if(|index| exports.is_leaving(*index));
        self.exports = exports;
    }

    pub(crate) fn greeting() -> [u8; Greeting::NEWSTYLE_BYTES] {
        Greeting::encode_newstyle(HandshakeFlags::FIXED_NEWSTYLE | HandshakeFlags::NO_ZEROES)
    }

    /// Decodes options from `bytes` and appends the replies to `out`. Returns how many bytes were
    /// used and what follows.
    pub(crate) fn step(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<(usize, HandshakeStep), HandshakeError> {
        let mut taken = 0;
        loop {
            let rest = &bytes[taken..];
            if self.no_zeroes.is_none() {
                let Decoded::Value(flags, used) = ClientFlags::decode(rest) else {
                    return Ok((taken, HandshakeStep::More));
                };
                if !flags.contains(ClientFlags::FIXED_NEWSTYLE) || !ClientFlags::all().contains(flags) {
                    return Err(HandshakeError::ClientFlags(flags.bits()));
                }
                self.no_zeroes = Some(flags.contains(ClientFlags::NO_ZEROES));
                taken += used;
                continue;
            }
            let Decoded::Value(header, used) = OptionHeader::decode(rest)? else {
                return Ok((taken, HandshakeStep::More));
            };
            if header.data_bytes > OPTION_BYTES_MAX {
                let (found, limit) = (header.data_bytes.into(), OPTION_BYTES_MAX.into());
                return Err(WireError::TooLong { what: "the data of an option", found, limit }.into());
            }
            let Some(data) = rest.get(used..used + header.data_bytes as usize) else {
                return Ok((taken, HandshakeStep::More));
            };
            taken += used + data.len();
            let next = self.answer(header.option, data, out)?;
            match next {
                HandshakeStep::More => {}
                HandshakeStep::StartTls if taken < bytes.len() => {
                    return Err(HandshakeError::Injected(bytes.len() - taken));
                }
                HandshakeStep::StartTls => {
                    let encrypted = Self { encrypted: true, no_zeroes: self.no_zeroes, ..self.renewed() };
                    *self = encrypted;
                    return Ok((taken, next));
                }
                HandshakeStep::Transmit(_) | HandshakeStep::Bye => return Ok((taken, next)),
            }
        }
    }

    fn renewed(&self) -> Self {
        Self::new(Arc::clone(&self.exports), self.tls)
    }

    fn answer(&mut self, option: OptionCode, data: &[u8], out: &mut Vec<u8>) -> Result<HandshakeStep, HandshakeError> {
        let mut refuse = |code, message: &str| option_reply::encode_refusal(option, code, message, out);
        let locked = self.tls == TlsNeed::Must && !self.encrypted;
        let parsed = match ClientOption::parse(option, data) {
            _ if locked && option == OptionCode::EXPORT_NAME => return Err(HandshakeError::TlsRequired),
            _ if locked && option != OptionCode::STARTTLS && option != OptionCode::ABORT => {
                refuse(ReplyCode::ERR_TLS_REQD, "this server requires TLS; send STARTTLS first");
                return Ok(HandshakeStep::More);
            }
            Ok(parsed) => parsed,
            // EXPORT_NAME has no error reply.
            Err(error) if option == OptionCode::EXPORT_NAME => return Err(error.into()),
            Err(error) => {
                refuse(ReplyCode::ERR_INVALID, &error.to_string());
                return Ok(HandshakeStep::More);
            }
        };
        match parsed {
            ClientOption::ExportName(name) => return self.export_name(name, out),
            ClientOption::Abort => {
                option_reply::encode_ack(option, out);
                return Ok(HandshakeStep::Bye);
            }
            ClientOption::List => {
                for export in self.exports.iter() {
                    option_reply::encode_server(&export.name, &export.description, out);
                }
                option_reply::encode_ack(option, out);
            }
            ClientOption::StartTls if self.encrypted => refuse(ReplyCode::ERR_INVALID, "TLS has already been started"),
            ClientOption::StartTls if self.tls == TlsNeed::No => {
                refuse(ReplyCode::ERR_POLICY, "this server has no certificates, so it does not support TLS");
            }
            ClientOption::StartTls => {
                option_reply::encode_ack(option, out);
                return Ok(HandshakeStep::StartTls);
            }
            ClientOption::Info(query) => {
                self.describe(option, &query, out);
            }
            ClientOption::Go(query) => {
                if let Some(export) = self.describe(option, &query, out) {
                    return Ok(HandshakeStep::Transmit(self.session(export)));
                }
            }
            ClientOption::StructuredReply => {
                if self.framing == Framing::Extended {
                    refuse(
                        ReplyCode::ERR_INVALID,
                        "extended headers were negotiated already; they replace structured replies",
                    );
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
            ClientOption::Unknown(_) => refuse(ReplyCode::ERR_UNSUP, "this server does not know this option"),
        }
        Ok(HandshakeStep::More)
    }

    fn export_name(&self, name: &str, out: &mut Vec<u8>) -> Result<HandshakeStep, HandshakeError> {
        let index = self.exports.find(name).ok_or_else(|| HandshakeError::UnknownExport { name: name.to_owned() })?;
        let export = self.exports.get(index);
        let summary = ExportSummary { size_bytes: export.device.geometry().size_bytes, flags: self.flags(export) };
        summary.encode(self.no_zeroes == Some(true), out);
        Ok(HandshakeStep::Transmit(self.session(index)))
    }

    fn session(&self, export: usize) -> Session {
        let set = self.contexts.as_ref().filter(|(of, _)| *of == export);
        let contexts = set.map_or_else(Contexts::default, |(_, set)| set.clone());
        let may_be_unaligned =
            self.sizes_asked != Some(export) && self.exports.get(export).block_sizes().minimum > USUAL_BLOCK_BYTES;
        Session { export, framing: self.framing, contexts, may_be_unaligned }
    }

    fn flags(&self, export: &Export) -> diskwright_nbd::wire::TransmissionFlags {
        export.flags(self.framing != Framing::Simple)
    }

    /// Replies to INFO or GO. Returns the index of the export, if it exists.
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
                "there is no default export; ask for an export by name".to_owned()
            } else {
                format!("there is no export {:?}", name.chars().take(200).collect::<String>())
            };
            option_reply::encode_refusal(option, ReplyCode::ERR_UNKNOWN, &message, out);
        }
        found
    }

    /// Replies to LIST_META_CONTEXT and SET_META_CONTEXT.
    fn contexts(&mut self, option: OptionCode, query: &ContextQuery<'_>, out: &mut Vec<u8>) {
        let sets = option == OptionCode::SET_META_CONTEXT;
        if sets {
            // A SET that fails also cancels the last selection.
            self.contexts = None;
        }
        if self.framing == Framing::Simple {
            let message = "contexts need structured replies or extended headers; negotiate one of them first";
            return option_reply::encode_refusal(option, ReplyCode::ERR_INVALID, message, out);
        }
        let Some(export) = self.find(option, query.name, out) else { return };
        let mut found = Contexts::default();
        let points = self.exports.get(export).device.tracked_points();
        let mut of_points: Vec<(PointContext, String)> = Vec::new();
        for (number, point) in (0..).zip(points) {
            for (name, id) in
                [(CONTEXT_TRACK, POINT_ID + 2 * number), (CONTEXT_DIRTY_BITMAP, POINT_ID + 2 * number + 1)]
            {
                of_points.push((PointContext { id, point: point.clone() }, format!("{name}{}", point.name)));
            }
        }
        let mut selected = vec![false; of_points.len()];
        let mut queries = query.queries().peekable();
        if !sets && queries.peek().is_none() {
            (found.allocation, found.depth) = (true, true);
            selected.fill(true);
        }
        let mut tells_server = false;
        for wanted in queries {
            tells_server |= !sets && wanted == CONTEXT_SERVER;
            // In a LIST, a namespace alone selects all contexts of the namespace.
            found.allocation |= wanted == CONTEXT_ALLOCATION || !sets && wanted == "base:";
            found.depth |= wanted == CONTEXT_DEPTH || !sets && wanted == "qemu:";
            let is_namespace = !sets && ["diskwright:", CONTEXT_TRACK, "qemu:", CONTEXT_DIRTY_BITMAP].contains(&wanted);
            for (selected, (_, name)) in selected.iter_mut().zip(&of_points) {
                *selected |= wanted == name || is_namespace && name.starts_with(wanted);
            }
        }
        for (there, id, name) in
            [(found.allocation, ALLOCATION_ID, CONTEXT_ALLOCATION), (found.depth, DEPTH_ID, CONTEXT_DEPTH)]
        {
            if there {
                option_reply::encode_context(option, if sets { id } else { 0 }, name, out);
            }
        }
        if tells_server {
            let name = format!("{CONTEXT_SERVER}{}", self.exports.server());
            option_reply::encode_context(option, 0, &name, out);
        }
        let mut points = Vec::new();
        for ((context, name), _) in of_points.into_iter().zip(selected).filter(|(_, selected)| *selected) {
            option_reply::encode_context(option, if sets { context.id } else { 0 }, &name, out);
            points.push(context);
        }
        found.points = points.into();
        option_reply::encode_ack(option, out);
        if sets {
            self.contexts = Some((export, found));
        }
    }
}

#[cfg(test)]
mod tests;
