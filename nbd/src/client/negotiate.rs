//! From a URI to a connection in the transmission phase.
//!
//! ```text
//!   greeting ─▶ flags ─▶ [STARTTLS] ─▶ EXTENDED_HEADERS, else STRUCTURED_REPLY ─▶ SET_META_CONTEXT ─▶ GO, else EXPORT_NAME
//! ```
//!
//! Servers of every age are taken: what one does not know is left out, and an oldstyle server is
//! used as it is. Only TLS is not negotiable: it is used if and only if the URI asks for it. All of
//! it must be done within one limit of time, and exactly the bytes of the handshake are taken from
//! the connection.

use super::{ClientError, Result, transport::Transport};
use crate::{
    tls,
    uri::NbdUri,
    wire::{
        BlockSizes, CONTEXT_ALLOCATION, CONTEXT_DEPTH, ClientFlags, Decoded, ExportSummary, Framing, Greeting,
        HandshakeFlags, INFO_BLOCK_SIZE, INFO_DESCRIPTION, INFO_EXPORT, INFO_NAME, Info, OPTION_REPLY_BYTES_MAX,
        OptionCode, OptionReply, OptionReplyHeader, ReplyCode, TransmissionFlags, WireError, option,
    },
};
use std::{
    io::{self, IoSlice, IoSliceMut},
    sync::Arc,
    time::{Duration, Instant},
};

/// The whole handshake, connecting included, takes at most so long, unless the URI's timeout is
/// shorter.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(30);

/// Replies to one option. A list of exports may be long; a server that never ends it is not to be
/// followed.
const REPLIES_MAX: usize = 10_000;

/// Names of exports that an error message tells.
const NAMES_TOLD: usize = 20;

/// An export, as the server told of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportInfo {
    /// The name that was asked for.
    pub name: String,
    /// The server's own name for it, if it told another one.
    pub canonical_name: Option<String>,
    /// A sentence for people.
    pub description: Option<String>,
    /// Size in bytes.
    pub size_bytes: u64,
    /// What it can do.
    pub flags: TransmissionFlags,
    /// Sizes of requests that it takes.
    pub block_sizes: BlockSizes,
    /// Whether the server told its block sizes.
    pub told_block_sizes: bool,
    /// How messages are framed.
    pub framing: Framing,
    /// The number of the context [`CONTEXT_ALLOCATION`], if the server has it.
    pub allocation_context: Option<u32>,
    /// The number of the context [`CONTEXT_DEPTH`], if the server has it.
    pub depth_context: Option<u32>,
    /// Version and cipher, if the connection is in TLS.
    pub tls: Option<String>,
}

/// Connects and negotiates.
pub(super) fn connect(uri: &NbdUri) -> Result<(Transport, ExportInfo)> {
    let peer = uri.endpoint.to_string();
    let timeout = uri.timeout.unwrap_or(NbdUri::TIMEOUT_DEFAULT);
    let limit = if timeout.is_zero() { HANDSHAKE_LIMIT } else { HANDSHAKE_LIMIT.min(timeout) };
    // Before the connection, so that a wrong folder is told as such.
    let tls = uri
        .tls
        .as_ref()
        .map(|parameters| tls::client(uri, parameters))
        .transpose()
        .map_err(|source| ClientError::Certificates { peer: peer.clone(), source: Arc::new(source) })?;
    let started = Instant::now();
    let transport = Transport::connect(&uri.endpoint, limit)
        .map_err(|source| ClientError::Connect { peer: peer.clone(), source: Arc::new(source) })?;
    let mut talk = Talk {
        transport,
        peer,
        started,
        limit,
        doing: "waiting for its greeting (one that takes one client at a time may have one)",
    };
    let greeting = talk.decode(Greeting::decode)?;
    let mut export = ExportInfo {
        name: uri.export.clone(),
        canonical_name: None,
        description: None,
        size_bytes: 0,
        flags: TransmissionFlags::empty(),
        block_sizes: BlockSizes::DEFAULT,
        told_block_sizes: false,
        framing: Framing::Simple,
        allocation_context: None,
        depth_context: None,
        tls: None,
    };
    let offered = match greeting {
        Greeting::Newstyle(flags) => flags,
        Greeting::Oldstyle(summary) => {
            if tls.is_some() {
                return Err(talk.tls_mismatch("the server is too old for TLS; use nbd:// on a network that you trust"));
            }
            if !uri.export.is_empty() {
                let (peer, name) = (talk.peer, uri.export.clone());
                return Err(ClientError::UnknownExport { peer, name, exports: vec![String::new()] });
            }
            (export.size_bytes, export.flags) = (summary.size_bytes, summary.flags);
            return Ok((talk.transport, export));
        }
    };
    talk.doing = "negotiating";
    let mut flags = ClientFlags::empty();
    flags.set(ClientFlags::FIXED_NEWSTYLE, offered.contains(HandshakeFlags::FIXED_NEWSTYLE));
    flags.set(ClientFlags::NO_ZEROES, offered.contains(HandshakeFlags::NO_ZEROES));
    talk.send(&flags.encode())?;
    let no_zeroes = flags.contains(ClientFlags::NO_ZEROES);
    if !flags.contains(ClientFlags::FIXED_NEWSTYLE) {
        if tls.is_some() {
            return Err(talk.tls_mismatch("the server is too old for TLS; use nbd:// on a network that you trust"));
        }
        talk.export_name(&mut export, no_zeroes)?;
        return Ok((talk.transport, export));
    }
    if let Some((config, name)) = tls {
        talk.start_tls(config, name)?;
    }
    talk.framing(&mut export)?;
    talk.go(&mut export, no_zeroes)?;
    export.tls = talk.transport.tls_name();
    Ok((talk.transport, export))
}

/// The handshake under way.
struct Talk {
    transport: Transport,
    peer: String,
    started: Instant,
    limit: Duration,
    doing: &'static str,
}

/// How an option ended.
enum Ended {
    Accepted,
    Refused(ReplyCode, String),
}

impl Talk {
    fn start_tls(
        &mut self,
        config: Arc<rustls::ClientConfig>,
        name: rustls::pki_types::ServerName<'static>,
    ) -> Result<()> {
        match self.ask(OptionCode::STARTTLS, &[], |_| Ok(()))? {
            Ended::Accepted => {}
            Ended::Refused(..) => {
                return Err(self.tls_mismatch(
                    "the server does not offer TLS, and the URI demands it; start it with certificates, or use nbd:// on a network that you trust",
                ));
            }
        }
        self.doing = "negotiating in TLS";
        let peer = self.peer.clone();
        self.transport.start_tls(config, name).map_err(|source| ClientError::Tls { peer, source })
    }

    /// Extended headers if there are, else structured replies if there are; and the contexts that
    /// come with them.
    fn framing(&mut self, export: &mut ExportInfo) -> Result<()> {
        for (option, framing) in
            [(OptionCode::EXTENDED_HEADERS, Framing::Extended), (OptionCode::STRUCTURED_REPLY, Framing::Structured)]
        {
            match self.ask(option, &[], |_| Ok(()))? {
                Ended::Accepted => {
                    export.framing = framing;
                    break;
                }
                Ended::Refused(ReplyCode::ERR_TLS_REQD, _) => {
                    return Err(self.tls_mismatch("the server demands TLS; use nbds:// (or nbds+unix://)"));
                }
                Ended::Refused(..) => {}
            }
        }
        if export.framing == Framing::Simple {
            return Ok(());
        }
        let mut message = Vec::new();
        let wanted = [CONTEXT_ALLOCATION, CONTEXT_DEPTH];
        option::encode_contexts(OptionCode::SET_META_CONTEXT, &export.name, &wanted, &mut message);
        let (mut allocation, mut depth) = (None, None);
        let ended = self.ask_encoded(OptionCode::SET_META_CONTEXT, &message, |reply| {
            match reply {
                OptionReply::Context { id, name: CONTEXT_ALLOCATION } => allocation = Some(id),
                OptionReply::Context { id, name: CONTEXT_DEPTH } => depth = Some(id),
                // One that was not asked for would come with every status; there is no harm in it.
                OptionReply::Context { .. } => {}
                _ => return Err("another reply than contexts"),
            }
            Ok(())
        })?;
        if matches!(ended, Ended::Accepted) {
            (export.allocation_context, export.depth_context) = (allocation, depth);
        }
        Ok(())
    }

    fn go(&mut self, export: &mut ExportInfo, no_zeroes: bool) -> Result<()> {
        let mut message = Vec::new();
        let wanted = [INFO_EXPORT, INFO_BLOCK_SIZE, INFO_NAME, INFO_DESCRIPTION];
        option::encode_export(OptionCode::GO, &export.name, &wanted, &mut message);
        let mut told_size = false;
        let found = &mut *export;
        let ended = self.ask_encoded(OptionCode::GO, &message, |reply| {
            let OptionReply::Info(info) = reply else { return Err("another reply than information") };
            match info {
                Info::Export { size_bytes, flags } => {
                    (found.size_bytes, found.flags) = (size_bytes, flags);
                    told_size = true;
                }
                Info::Name(name) if name != found.name => found.canonical_name = Some(name.to_owned()),
                Info::Description(text) if !text.is_empty() => found.description = Some(text.to_owned()),
                Info::BlockSize(sizes) => {
                    (found.block_sizes, found.told_block_sizes) = (sizes, true);
                }
                Info::Name(_) | Info::Description(_) | Info::Unknown(_) => {}
            }
            Ok(())
        })?;
        match ended {
            Ended::Accepted if !told_size => {
                Err(self.protocol("it entered the transmission phase and did not tell the size of the export"))
            }
            Ended::Accepted => Ok(()),
            // An old server. With extended headers there is no such way.
            Ended::Refused(ReplyCode::ERR_UNSUP, _) if export.framing != Framing::Extended => {
                self.export_name(export, no_zeroes)
            }
            Ended::Refused(ReplyCode::ERR_UNKNOWN, _) => {
                let exports = self.names();
                Err(ClientError::UnknownExport { peer: self.peer.clone(), name: export.name.clone(), exports })
            }
            Ended::Refused(ReplyCode::ERR_TLS_REQD, _) => {
                Err(self.tls_mismatch("the server demands TLS for this export; use nbds:// (or nbds+unix://)"))
            }
            Ended::Refused(code, message) => {
                Err(ClientError::Refused { peer: self.peer.clone(), option: OptionCode::GO, code, message })
            }
        }
    }

    /// The old way in: a server that does not have the export just hangs up.
    fn export_name(&mut self, export: &mut ExportInfo, no_zeroes: bool) -> Result<()> {
        let mut message = Vec::new();
        option::encode_plain(OptionCode::EXPORT_NAME, export.name.as_bytes(), &mut message);
        self.send(&message)?;
        let summary =
            self.decode(|bytes| Ok(ExportSummary::decode(bytes, no_zeroes))).map_err(|error| match error {
                ClientError::Lost { peer, .. } => {
                    ClientError::UnknownExport { peer, name: export.name.clone(), exports: Vec::new() }
                }
                other => other,
            })?;
        (export.size_bytes, export.flags) = (summary.size_bytes, summary.flags);
        Ok(())
    }

    /// Names of exports, for a message; as far as the server tells.
    fn names(&mut self) -> Vec<String> {
        let mut names = Vec::new();
        let listed = self.ask(OptionCode::LIST, &[], |reply| {
            if let OptionReply::Server { name, .. } = reply
                && names.len() < NAMES_TOLD
            {
                names.push(name.to_owned());
            }
            Ok(())
        });
        if matches!(listed, Ok(Ended::Accepted)) { names } else { Vec::new() }
    }

    fn ask(
        &mut self,
        option: OptionCode,
        data: &[u8],
        each: impl FnMut(OptionReply<'_>) -> Result<(), &'static str>,
    ) -> Result<Ended> {
        let mut message = Vec::new();
        option::encode_plain(option, data, &mut message);
        self.ask_encoded(option, &message, each)
    }

    /// Sends an option and takes its replies until the last.
    fn ask_encoded(
        &mut self,
        option: OptionCode,
        message: &[u8],
        mut each: impl FnMut(OptionReply<'_>) -> Result<(), &'static str>,
    ) -> Result<Ended> {
        self.send(message)?;
        for _ in 0..REPLIES_MAX {
            let header = self.decode(OptionReplyHeader::decode)?;
            if header.option != option {
                return Err(self.protocol(&format!("it answered {} to {option}", header.option)));
            }
            if header.data_bytes > OPTION_REPLY_BYTES_MAX {
                let (found, limit) = (header.data_bytes.into(), OPTION_REPLY_BYTES_MAX.into());
                return Err(self.wire(WireError::TooLong { what: "the reply to an option", found, limit }));
            }
            let mut data = vec![0; header.data_bytes as usize];
            self.recv(&mut data)?;
            match OptionReply::parse(header.code, &data).map_err(|error| self.wire(error))? {
                OptionReply::Ack => return Ok(Ended::Accepted),
                OptionReply::Refused { code, message } => return Ok(Ended::Refused(code, message.to_owned())),
                reply => each(reply).map_err(|what| self.protocol(&format!("it gave {what} to {option}")))?,
            }
        }
        Err(self.protocol(&format!("it gave more than {REPLIES_MAX} replies to {option}")))
    }

    fn send(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() || self.transport.has_unsent() {
            let sent = match bytes {
                [] => self.transport.flush().map(|()| 0),
                _ => self.transport.send(&[IoSlice::new(bytes)]),
            };
            match sent {
                Ok(sent) => bytes = &bytes[sent..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.wait(true)?,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.lost(error)),
            }
        }
        Ok(())
    }

    fn recv(&mut self, mut into: &mut [u8]) -> Result<()> {
        while !into.is_empty() {
            match self.transport.recv(&mut [IoSliceMut::new(into)]) {
                Ok(0) => return Err(self.lost(io::Error::new(io::ErrorKind::UnexpectedEof, "the server hung up"))),
                Ok(received) => into = &mut into[received..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.wait(self.transport.has_unsent())?,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.lost(error)),
            }
        }
        Ok(())
    }

    /// Takes exactly the bytes that `decode` needs.
    fn decode<T>(&mut self, decode: impl Fn(&[u8]) -> Result<Decoded<T>, WireError>) -> Result<T> {
        let mut bytes = Vec::new();
        loop {
            match decode(&bytes).map_err(|error| self.wire(error))? {
                Decoded::Value(value, _) => return Ok(value),
                Decoded::Need(more) => {
                    let there = bytes.len();
                    bytes.resize(there + more, 0);
                    self.recv(&mut bytes[there..])?;
                }
            }
        }
    }

    fn wait(&self, for_sending: bool) -> Result<()> {
        let left = self.limit.saturating_sub(self.started.elapsed());
        let waited = self.transport.socket().wait(None, for_sending, Some(left));
        let came = waited.map_err(|error| self.lost(error))?;
        if came {
            return Ok(());
        }
        Err(ClientError::Stalled {
            peer: self.peer.clone(),
            doing: self.doing.to_owned(),
            seconds: self.limit.as_secs_f64(),
        })
    }

    fn lost(&self, source: io::Error) -> ClientError {
        lost(&self.peer, self.doing, source)
    }

    fn wire(&self, source: WireError) -> ClientError {
        ClientError::Wire { peer: self.peer.clone(), doing: self.doing.to_owned(), source }
    }

    fn protocol(&self, what: &str) -> ClientError {
        ClientError::Protocol { peer: self.peer.clone(), what: what.to_owned() }
    }

    fn tls_mismatch(&self, what: &'static str) -> ClientError {
        ClientError::TlsMismatch { peer: self.peer.clone(), what }
    }
}

/// A broken connection; or, if that is what it is, a failure of TLS.
pub(super) fn lost(peer: &str, doing: &str, source: io::Error) -> ClientError {
    let peer = peer.to_owned();
    match source.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
        Some(error) => ClientError::Tls { peer, source: error.clone() },
        None => ClientError::Lost { peer, doing: doing.to_owned(), source: Arc::new(source) },
    }
}
