//! NBD on the servers' loop: decodes requests, checks them, and passes them to the core.
//!
//! ```text
//!   window ─▶ handshake ─▶ take_requests ─┬─ invalid ────────────────────────▶ error reply
//!                                         ├─ READ, FLUSH, TRIM, ... ─▶ Core ─▶ queue ─▶ reply
//!                                         └─ WRITE ─▶ payload, announced whole ─▶ Core ─▶ ...
//! ```
//!
//! Every request is checked here: its range against the disk, its flags against the command, its
//! length against the protocol's limits. An invalid request is answered with an error. The session
//! ends only if the position of the next header is unknown, or if a payload is longer than
//! [`SKIP_BYTES_MAX`].

use super::{
    handshake::{Handshake, HandshakeError, HandshakeStep, Session},
    status::{self, StatusRequest},
};
use crate::{
    metrics::Kind,
    net::{
        connection::{Connection, Incoming, Input, State},
        core::{Core, Protocol},
        flights::{ClientRequest, Contents},
        outbox::Share,
        protocol::{ProtocolTypes, SessionEnd, Stage},
        settings::TlsNeed,
    },
    panic_guard::catch_panic,
};
use diskwright_nbd::wire::{
    Answering, Command, CommandFlags, Decoded, Framing, PAYLOAD_BYTES_DEFAULT, RequestHeader, WireError,
};
use diskwright_store::{Operation, Request};
use std::{
    io,
    sync::Arc,
    time::{Duration, Instant},
};

/// A payload that is longer than the protocol allows is skipped up to this length. A longer one
/// ends the session.
const SKIP_BYTES_MAX: u64 = 2 * PAYLOAD_BYTES_DEFAULT as u64;

/// The worker computes block status itself. A client whose reply took longer than this waits for
/// the other clients before its next request.
const STATUS_TURN: Duration = Duration::from_micros(200);

/// The protocol NBD.
#[derive(Debug)]
pub(crate) enum Nbd {}

/// The state of one client.
#[derive(Debug)]
pub(crate) enum Phase {
    Handshake(Handshake),
    Transmission(Session),
}

/// What a reply needs to know of its request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked {
    pub(crate) framing: Framing,
    pub(crate) command: Command,
    pub(crate) cookie: u64,
}

impl ClientRequest<Asked> {
    /// What replies in chunks need to know of the request.
    pub(crate) fn answering(&self) -> Answering {
        let Asked { framing, cookie, .. } = self.own;
        Answering { framing, cookie, offset_bytes: self.offset_bytes }
    }
}

impl From<WireError> for SessionEnd {
    fn from(error: WireError) -> Self {
        Self::Broken(error.to_string())
    }
}

impl From<HandshakeError> for SessionEnd {
    fn from(error: HandshakeError) -> Self {
        Self::Broken(error.to_string())
    }
}

impl ProtocolTypes for Nbd {
    type Shared = ();
    type Session = Phase;
    type Asked = Asked;
}

impl Protocol for Nbd {
    const NAME: &'static str = "nbd";
    const ANSWERS: usize = 8;
    const AUTHENTICATES: bool = false;
    const RESERVES: bool = false;
    const HOW_TO_ALLOW_WRITES: &'static str =
        "listen on a unix socket, use TLS (`ServerOptions::tls`), or allow it with `ServerOptions::insecure_writes`";

    fn session(core: &Core<Self>, tls: TlsNeed) -> Phase {
        Phase::Handshake(Handshake::new(Arc::clone(&core.exports), tls))
    }

    fn greet(core: &mut Core<Self>, conn: &mut Connection<Self>) {
        conn.outbox.put(&Handshake::greeting(), &mut core.pool);
    }

    fn stage(session: &Phase) -> Stage {
        match session {
            Phase::Handshake(_) => Stage::Handshake,
            Phase::Transmission(_) => Stage::Serving,
        }
    }

    fn is_of_export(session: &Phase, export: usize) -> bool {
        matches!(session, Phase::Transmission(session) if session.export == export)
    }

    fn take_input(core: &mut Core<Self>, conn: &mut Connection<Self>, number: u32) -> Result<(), SessionEnd> {
        while conn.state == State::Open && !conn.starts_tls {
            let handshake = match &mut conn.session {
                Phase::Handshake(handshake) => handshake,
                Phase::Transmission(Session { export, framing, .. }) => {
                    let (export, framing) = (*export, *framing);
                    return core.take_requests(conn, number, export, framing);
                }
            };
            let mut answers = Vec::new();
            let (used, next) = handshake.step(conn.window.bytes(), &mut answers)?;
            conn.window.consume(used);
            conn.outbox.put(&answers, &mut core.pool);
            match next {
                HandshakeStep::More => return Ok(()),
                HandshakeStep::StartTls => conn.starts_tls = true,
                HandshakeStep::Bye => return Err(SessionEnd::Disconnected),
                HandshakeStep::Transmit(session) => {
                    conn.outbox.seal();
                    core.open_queue(session.export)?;
                    let export = core.exports.get(session.export);
                    let tls = conn.secure.is_some();
                    tracing::info!(peer = %conn.peer, export = %export.name, tls, framing = ?session.framing, "serving");
                    if session.may_be_unaligned {
                        export.warn_of_unaligned(&conn.peer);
                    }
                    conn.session = Phase::Transmission(session);
                }
            }
        }
        Ok(())
    }

    fn payload_ended(core: &mut Core<Self>, conn: &mut Connection<Self>, incoming: Incoming<Asked>) {
        core.write(conn, incoming);
    }

    fn reply(
        core: &mut Core<Self>,
        conn: &mut Connection<Self>,
        asked: &ClientRequest<Asked>,
        result: io::Result<()>,
        contents: Contents,
    ) {
        core.put_reply(conn, asked, result, contents);
    }

    fn exports_changed(core: &mut Core<Self>, conn: &mut Connection<Self>) {
        if let Phase::Handshake(handshake) = &mut conn.session {
            handshake.set_exports(Arc::clone(&core.exports));
        }
    }

    fn ticks(_: &Phase) -> bool {
        false
    }

    fn tick(_: &mut Core<Self>, _: &mut Connection<Self>) -> Result<(), SessionEnd> {
        Ok(())
    }

    fn abandon(_: &mut Core<Self>, _: &mut Connection<Self>) {}

    fn closed(_: &mut Core<Self>, _: &mut Connection<Self>) {}
}

fn refusal(kind: io::ErrorKind, what: &str) -> io::Error {
    io::Error::new(kind, what.to_owned())
}

impl Core<Nbd> {
    /// Handles the requests in the connection's window, until the bytes, the client's share or its
    /// turn are used up.
    fn take_requests(
        &mut self,
        conn: &mut Connection<Nbd>,
        number: u32,
        export: usize,
        framing: Framing,
    ) -> Result<(), SessionEnd> {
        while conn.state == State::Open && self.take_payload(conn) {
            if conn.window.bytes().is_empty() {
                return Ok(());
            }
            if !self.has_room_for(conn, export) {
                conn.stalled = true;
                return Ok(());
            }
            if conn.is_over_limit(self.now_ns) {
                return Ok(());
            }
            let Decoded::Value(header, used) = RequestHeader::decode(conn.window.bytes(), framing)? else {
                return Ok(());
            };
            conn.window.consume(used);
            if header.command == Command::DISCONNECT {
                return Err(SessionEnd::Disconnected);
            }
            let RequestHeader { command, cookie, offset_bytes, len_bytes, .. } = header;
            let asked = ClientRequest {
                connection: number,
                export: export as u32,
                kind: kind_of(command),
                offset_bytes,
                len_bytes,
                held_bytes: held_bytes(command, len_bytes),
                taken_ns: self.now_ns,
                own: Asked { framing, command, cookie },
            };
            self.take(conn, &asked, &header)?;
            if conn.turn_is_over {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Handles one request whose header was decoded.
    fn take(
        &mut self,
        conn: &mut Connection<Nbd>,
        asked: &ClientRequest<Asked>,
        header: &RequestHeader,
    ) -> Result<(), SessionEnd> {
        let RequestHeader { flags, command, len_bytes, .. } = *header;
        conn.requests += 1;
        let payload_bytes = header.payload_bytes(asked.own.framing);
        if payload_bytes > SKIP_BYTES_MAX {
            let what = "the payload of a request";
            return Err(WireError::TooLong { what, found: payload_bytes, limit: PAYLOAD_BYTES_DEFAULT.into() }.into());
        }
        conn.share.add(Share::of(asked.held_bytes));
        if let Err(error) = self.check(asked, flags) {
            if payload_bytes > 0 {
                conn.input = Input::Skip(payload_bytes);
            }
            self.answer(conn, asked, Err(error), Contents::default());
            return Ok(());
        }
        if let Some(limiter) = &conn.limiter {
            let counted = match command {
                Command::READ | Command::CACHE => Operation::Read,
                Command::WRITE => Operation::Write,
                Command::FLUSH => Operation::Flush,
                _ => Operation::Discard,
            };
            limiter.reserve(self.now_ns, counted, len_bytes);
            conn.not_before_ns = limiter.next_start_ns();
        }
        let fua = flags.contains(CommandFlags::FUA);
        match command {
            Command::READ => self.read(conn, asked),
            Command::WRITE => {
                let mut incoming = Incoming::new(*asked, len_bytes as usize, fua);
                incoming.announced_bytes = len_bytes as usize;
                self.continue_payload(conn, incoming);
            }
            Command::FLUSH => self.launch_single(conn, asked, Request::flush(0)),
            Command::TRIM => self.clear(conn, asked, Operation::Discard, fua),
            Command::WRITE_ZEROES if flags.contains(CommandFlags::NO_HOLE) => {
                self.clear(conn, asked, Operation::WriteZeroes, fua);
            }
            // A discard also makes the range read as zeros, and it frees the space. Without NO_HOLE
            // the client allows that.
            Command::WRITE_ZEROES => self.clear(conn, asked, Operation::Discard, fua),
            Command::CACHE if len_bytes > u64::from(PAYLOAD_BYTES_DEFAULT) => {
                // Only a hint, and too long to be worth reading ahead.
                self.answer(conn, asked, Ok(()), Contents::default());
            }
            Command::CACHE => self.read(conn, asked),
            _ => self.answer_status(conn, asked, flags.contains(CommandFlags::REQ_ONE)),
        }
        Ok(())
    }

    /// Checks a request against the command, the negotiated framing and the disk.
    fn check(&mut self, asked: &ClientRequest<Asked>, flags: CommandFlags) -> io::Result<()> {
        use io::ErrorKind::{InvalidInput, PermissionDenied, ReadOnlyFilesystem, StorageFull};
        let Asked { command, framing, .. } = asked.own;
        let chunks = framing != Framing::Simple;
        let mut known = CommandFlags::FUA;
        match command {
            Command::READ if chunks => known |= CommandFlags::DF,
            Command::WRITE if framing == Framing::Extended => {
                known |= CommandFlags::PAYLOAD_LEN;
                if !flags.contains(CommandFlags::PAYLOAD_LEN) {
                    return Err(refusal(InvalidInput, "a write with extended headers must have the flag PAYLOAD_LEN"));
                }
            }
            Command::WRITE_ZEROES => known |= CommandFlags::NO_HOLE | CommandFlags::FAST_ZERO,
            Command::BLOCK_STATUS if chunks => known |= CommandFlags::REQ_ONE,
            Command::BLOCK_STATUS => {
                return Err(refusal(
                    InvalidInput,
                    "block status needs structured replies or extended headers, and neither was negotiated",
                ));
            }
            Command::READ | Command::WRITE | Command::TRIM | Command::CACHE => {}
            Command::FLUSH => {
                return if known.contains(flags) {
                    Ok(())
                } else {
                    Err(refusal(InvalidInput, "the request has a flag that its command does not allow"))
                };
            }
            other => return Err(refusal(InvalidInput, &format!("this server does not support the command {other}"))),
        }
        if !known.contains(flags) {
            return Err(refusal(InvalidInput, "the request has a flag that its command does not allow"));
        }
        let geometry = self.exports.get(asked.export as usize).device.geometry();
        let writes = matches!(command, Command::WRITE | Command::TRIM | Command::WRITE_ZEROES);
        if writes && geometry.read_only {
            return Err(refusal(ReadOnlyFilesystem, "the export is read-only"));
        }
        if !self.may(asked.export as usize, writes) {
            return Err(refusal(PermissionDenied, "an iSCSI initiator has reserved the disk"));
        }
        if asked.len_bytes == 0 {
            return Err(refusal(InvalidInput, "the length is 0; it must be at least one sector"));
        }
        let end_bytes = asked.offset_bytes.checked_add(asked.len_bytes);
        if end_bytes.is_none_or(|end_bytes| end_bytes > geometry.size_bytes) {
            let kind = if writes { StorageFull } else { InvalidInput };
            let (offset, len, size) = (asked.offset_bytes, asked.len_bytes, geometry.size_bytes);
            return Err(refusal(
                kind,
                &format!("the range at offset {offset} of {len} bytes ends beyond the export's {size} bytes"),
            ));
        }
        if (asked.offset_bytes | asked.len_bytes) & (u64::from(geometry.logical_sector_bytes) - 1) != 0 {
            let what = format!("offset and length must be multiples of {} bytes", geometry.logical_sector_bytes);
            return Err(refusal(InvalidInput, &what));
        }
        if matches!(command, Command::READ | Command::WRITE) && asked.len_bytes > u64::from(PAYLOAD_BYTES_DEFAULT) {
            let what = format!("the length is {} bytes; the maximum is {PAYLOAD_BYTES_DEFAULT}", asked.len_bytes);
            return Err(refusal(InvalidInput, &what));
        }
        Ok(())
    }

    fn answer_status(&mut self, conn: &mut Connection<Nbd>, asked: &ClientRequest<Asked>, only_one: bool) {
        let Phase::Transmission(Session { contexts, .. }) = &conn.session else { return };
        if contexts.is_empty() {
            let error = refusal(io::ErrorKind::InvalidInput, "no metadata context was negotiated for this export");
            return self.answer(conn, asked, Err(error), Contents::default());
        }
        let ClientRequest { offset_bytes, len_bytes, .. } = *asked;
        let request = StatusRequest { answering: asked.answering(), offset_bytes, len_bytes, only_one };
        let mut answer = std::mem::take(&mut self.scratch);
        answer.clear();
        let device = &self.exports.get(asked.export as usize).device;
        let began = Instant::now();
        let found = catch_panic(|| status::answer(device.as_ref(), contexts, &request, status::PATIENCE, &mut answer));
        // Errors count too: a slow failure delays the other clients just as much.
        conn.turn_is_over |= began.elapsed() > STATUS_TURN;
        match found {
            Ok(()) => {
                conn.outbox.put(&answer, &mut self.pool);
                self.count(conn, asked, false);
            }
            Err(error) => self.answer(conn, asked, Err(error), Contents::default()),
        }
        self.scratch = answer;
    }
}

fn kind_of(command: Command) -> Kind {
    match command {
        Command::READ => Kind::Read,
        Command::WRITE => Kind::Write,
        Command::FLUSH => Kind::Flush,
        Command::TRIM => Kind::Trim,
        Command::CACHE => Kind::Cache,
        Command::WRITE_ZEROES => Kind::WriteZeroes,
        Command::BLOCK_STATUS => Kind::BlockStatus,
        _ => Kind::Other,
    }
}

/// Bytes of payload held in memory until the reply has been sent.
fn held_bytes(command: Command, len_bytes: u64) -> usize {
    match command {
        Command::READ | Command::WRITE | Command::CACHE => len_bytes.min(PAYLOAD_BYTES_DEFAULT.into()) as usize,
        _ => 0,
    }
}
