//! From a URI to a connection in the transmission phase.
//!
//! ```text
//!   greeting ─▶ flags ─▶ [STARTTLS] ─▶ EXTENDED_HEADERS, else STRUCTURED_REPLY
//!            ─▶ SET_META_CONTEXT ─▶ LIST_META_CONTEXT (the server's id) ─▶ GO, else EXPORT_NAME
//! ```
//!
//! Servers of every version are supported: features that a server does not know are left out, and
//! an oldstyle server is used as it is. TLS is not negotiable: it is used if and only if the URI
//! asks for it. The whole handshake must end within one time limit, and reads exactly its own bytes
//! from the connection.

use super::{ClientError, Result, transport::Transport};
use crate::{
    tls,
    uri::NbdUri,
    wire::{
        BlockSizes, CONTEXT_ALLOCATION, CONTEXT_DEPTH, CONTEXT_SERVER, ClientFlags, Decoded, ExportSummary, Framing,
        Greeting, HandshakeFlags, INFO_BLOCK_SIZE, INFO_DESCRIPTION, INFO_EXPORT, INFO_NAME, Info,
        OPTION_REPLY_BYTES_MAX, OptionCode, OptionReply, OptionReplyHeader, ReplyCode, TransmissionFlags, WireError,
        option,
    },
};
use std::{
    io::{self, IoSlice, IoSliceMut},
    sync::Arc,
    time::{Duration, Instant},
};

/// Time limit of the whole handshake, including the connection, unless the URI's timeout is
/// shorter.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(30);

/// Maximum number of replies to one option. A list of exports may be long, but it must end.
const REPLIES_MAX: usize = 10_000;

/// Maximum number of export names in an error message.
const NAMES_SHOWN: usize = 20;

/// Information from the server about an export.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportInfo {
    /// The name that was requested.
    pub name: String,
    /// The server's own name for the export, if it reported a different one.
    pub canonical_name: Option<String>,
    /// The server's description, in plain text.
    pub description: Option<String>,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Properties and supported commands.
    pub flags: TransmissionFlags,
    /// Constraints on offsets and lengths of requests.
    pub block_sizes: BlockSizes,
    /// Whether the server reported its block sizes.
    pub told_block_sizes: bool,
    /// How messages are framed.
    pub framing: Framing,
    /// The id of the context [`CONTEXT_ALLOCATION`], if the server offers it.
    pub allocation_context: Option<u32>,
    /// The id of the context [`CONTEXT_DEPTH`], if the server offers it.
    pub depth_context: Option<u32>,
    /// TLS version and cipher, if the connection uses TLS.
    pub tls: Option<String>,
    /// The id of the running server, if it tells one ([`CONTEXT_SERVER`]).
    pub server_id: Option<String>,
}

/// Connects and negotiates.
pub(super) fn connect(uri: &NbdUri) -> Result<(Transport, ExportInfo)> {
    let peer = uri.endpoint.to_string();
    let timeout = uri.timeout.unwrap_or(NbdUri::TIMEOUT_DEFAULT);
    let limit = if timeout.is_zero() { HANDSHAKE_LIMIT } else { HANDSHAKE_LIMIT.min(timeout) };
    // Before connecting, so that a wrong folder of certificates is reported as such.
    let tls = uri
        .tls
        .as_ref()
        .map(|parameters| tls::client(uri, parameters))
        .transpose()
        .map_err(|source| ClientError::Certificates { peer: peer.clone(), source: Arc::new(source) })?;
    let started = Instant::now();
    let transport = Transport::connect(&uri.endpoint, limit)
        .map_err(|source| ClientError::Connect { peer: peer.clone(), source: Arc::new(source) })?;
    let mut handshake = Handshake {
        transport,
        peer,
        started,
        limit,
        doing: "waiting for its greeting (a server for one client at a time may be busy)",
    };
    let greeting = handshake.decode(Greeting::decode)?;
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
        server_id: None,
    };
    let offered = match greeting {
        Greeting::Newstyle(flags) => flags,
        Greeting::Oldstyle(summary) => {
            if tls.is_some() {
                return Err(handshake
                    .tls_mismatch("the server is too old for TLS; use nbd:// only on a network that you trust"));
            }
            if !uri.export.is_empty() {
                let (peer, name) = (handshake.peer, uri.export.clone());
                return Err(ClientError::UnknownExport { peer, name, exports: vec![String::new()] });
            }
            (export.size_bytes, export.flags) = (summary.size_bytes, summary.flags);
            return Ok((handshake.transport, export));
        }
    };
    handshake.doing = "negotiating";
    let mut flags = ClientFlags::empty();
    flags.set(ClientFlags::FIXED_NEWSTYLE, offered.contains(HandshakeFlags::FIXED_NEWSTYLE));
    flags.set(ClientFlags::NO_ZEROES, offered.contains(HandshakeFlags::NO_ZEROES));
    handshake.send(&flags.encode())?;
    let no_zeroes = flags.contains(ClientFlags::NO_ZEROES);
    if !flags.contains(ClientFlags::FIXED_NEWSTYLE) {
        if tls.is_some() {
            return Err(
                handshake.tls_mismatch("the server is too old for TLS; use nbd:// only on a network that you trust")
            );
        }
        handshake.export_name(&mut export, no_zeroes)?;
        return Ok((handshake.transport, export));
    }
    if let Some((config, name)) = tls {
        handshake.start_tls(config, name)?;
    }
    handshake.framing(&mut export)?;
    handshake.go(&mut export, no_zeroes)?;
    export.tls = handshake.transport.tls_name();
    Ok((handshake.transport, export))
}

/// A handshake in progress.
struct Handshake {
    transport: Transport,
    peer: String,
    started: Instant,
    limit: Duration,
    doing: &'static str,
}

/// The server's final answer to an option.
enum OptionOutcome {
    Accepted,
    Refused(ReplyCode, String),
}

impl Handshake {
    fn start_tls(
        &mut self,
        config: Arc<rustls::ClientConfig>,
        name: rustls::pki_types::ServerName<'static>,
    ) -> Result<()> {
        match self.ask(OptionCode::STARTTLS, &[], |_| Ok(()))? {
            OptionOutcome::Accepted => {}
            OptionOutcome::Refused(..) => {
                return Err(self.tls_mismatch(
                    "the server does not offer TLS, but the URI requires it; start the server with certificates, or use nbd:// on a network that you trust",
                ));
            }
        }
        self.doing = "negotiating in TLS";
        let peer = self.peer.clone();
        self.transport.start_tls(config, name).map_err(|source| ClientError::Tls { peer, source })
    }

    /// Negotiates extended headers, else structured replies, and their metadata contexts.
    fn framing(&mut self, export: &mut ExportInfo) -> Result<()> {
        for (option, framing) in
            [(OptionCode::EXTENDED_HEADERS, Framing::Extended), (OptionCode::STRUCTURED_REPLY, Framing::Structured)]
        {
            match self.ask(option, &[], |_| Ok(()))? {
                OptionOutcome::Accepted => {
                    export.framing = framing;
                    break;
                }
                OptionOutcome::Refused(ReplyCode::ERR_TLS_REQD, _) => {
                    return Err(self.tls_mismatch("the server requires TLS; use nbds:// (or nbds+unix://)"));
                }
                OptionOutcome::Refused(..) => {}
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
                // A context that was not requested is reported with every status and ignored there.
                OptionReply::Context { .. } => {}
                _ => return Err("a reply other than contexts"),
            }
            Ok(())
        })?;
        if matches!(ended, OptionOutcome::Accepted) {
            (export.allocation_context, export.depth_context) = (allocation, depth);
        }
        self.server_id(export)
    }

    /// Asks for the id of the running server, which servers of other programs do not tell.
    fn server_id(&mut self, export: &mut ExportInfo) -> Result<()> {
        let mut message = Vec::new();
        option::encode_contexts(OptionCode::LIST_META_CONTEXT, &export.name, &[CONTEXT_SERVER], &mut message);
        let mut id = None;
        let ended = self.ask_encoded(OptionCode::LIST_META_CONTEXT, &message, |reply| {
            let OptionReply::Context { name, .. } = reply else { return Err("a reply other than contexts") };
            id = id.take().or_else(|| name.strip_prefix(CONTEXT_SERVER).map(str::to_owned));
            Ok(())
        })?;
        export.server_id = id.filter(|_| matches!(ended, OptionOutcome::Accepted));
        Ok(())
    }

    fn go(&mut self, export: &mut ExportInfo, no_zeroes: bool) -> Result<()> {
        let mut message = Vec::new();
        let wanted = [INFO_EXPORT, INFO_BLOCK_SIZE, INFO_NAME, INFO_DESCRIPTION];
        option::encode_export(OptionCode::GO, &export.name, &wanted, &mut message);
        let mut has_size = false;
        let found = &mut *export;
        let ended = self.ask_encoded(OptionCode::GO, &message, |reply| {
            let OptionReply::Info(info) = reply else { return Err("a reply other than information") };
            match info {
                Info::Export { size_bytes, flags } => {
                    (found.size_bytes, found.flags) = (size_bytes, flags);
                    has_size = true;
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
            OptionOutcome::Accepted if !has_size => {
                Err(self.protocol("it entered the transmission phase without sending the size of the export"))
            }
            OptionOutcome::Accepted => Ok(()),
            // An old server. EXPORT_NAME is not possible with extended headers.
            OptionOutcome::Refused(ReplyCode::ERR_UNSUP, _) if export.framing != Framing::Extended => {
                self.export_name(export, no_zeroes)
            }
            OptionOutcome::Refused(ReplyCode::ERR_UNKNOWN, _) => {
                let exports = self.names();
                Err(ClientError::UnknownExport { peer: self.peer.clone(), name: export.name.clone(), exports })
            }
            OptionOutcome::Refused(ReplyCode::ERR_TLS_REQD, _) => {
                Err(self.tls_mismatch("the server requires TLS for this export; use nbds:// (or nbds+unix://)"))
            }
            OptionOutcome::Refused(code, message) => {
                Err(ClientError::Refused { peer: self.peer.clone(), option: OptionCode::GO, code, message })
            }
        }
    }

    /// The old way to select an export. A server without that export closes the connection.
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

    /// Names of exports for an error message, if the server lists them.
    fn names(&mut self) -> Vec<String> {
        let mut names = Vec::new();
        let listed = self.ask(OptionCode::LIST, &[], |reply| {
            if let OptionReply::Server { name, .. } = reply
                && names.len() < NAMES_SHOWN
            {
                names.push(name.to_owned());
            }
            Ok(())
        });
        if matches!(listed, Ok(OptionOutcome::Accepted)) { names } else { Vec::new() }
    }

    fn ask(
        &mut self,
        option: OptionCode,
        data: &[u8],
        each: impl FnMut(OptionReply<'_>) -> Result<(), &'static str>,
    ) -> Result<OptionOutcome> {
        let mut message = Vec::new();
        option::encode_plain(option, data, &mut message);
        self.ask_encoded(option, &message, each)
    }

    /// Sends an option and receives its replies up to the last.
    fn ask_encoded(
        &mut self,
        option: OptionCode,
        message: &[u8],
        mut each: impl FnMut(OptionReply<'_>) -> Result<(), &'static str>,
    ) -> Result<OptionOutcome> {
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
                OptionReply::Ack => return Ok(OptionOutcome::Accepted),
                OptionReply::Refused { code, message } => return Ok(OptionOutcome::Refused(code, message.to_owned())),
                reply => each(reply).map_err(|what| self.protocol(&format!("it sent {what} for {option}")))?,
            }
        }
        Err(self.protocol(&format!("it sent more than {REPLIES_MAX} replies to {option}")))
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
                Ok(0) => {
                    return Err(
                        self.lost(io::Error::new(io::ErrorKind::UnexpectedEof, "the server closed the connection"))
                    );
                }
                Ok(received) => into = &mut into[received..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.wait(self.transport.has_unsent())?,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.lost(error)),
            }
        }
        Ok(())
    }

    /// Receives exactly the bytes that `decode` needs.
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

/// The error of a broken connection, or of TLS if that caused it.
pub(super) fn lost(peer: &str, doing: &str, source: io::Error) -> ClientError {
    let peer = peer.to_owned();
    match source.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
        Some(error) => ClientError::Tls { peer, source: error.clone() },
        None => ClientError::Lost { peer, doing: doing.to_owned(), source: Arc::new(source) },
    }
}
