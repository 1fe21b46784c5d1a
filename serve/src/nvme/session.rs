//! The session of one queue: PDUs in, and the order in which payload, waiting commands and new
//! commands are handled.
//!
//! ```text
//!   window ─▶ payload of a write ─▶ its digest ─▶ io.rs
//!          ─▶ waiting commands, when there is room
//!          ─▶ next PDU ─┬─ ICReq, Connect, properties ─▶ connect.rs
//!                       ├─ admin command ─▶ admin.rs
//!                       ├─ I/O command ─▶ io.rs, or the list of waiting commands
//!                       └─ H2CData ─▶ the payload it belongs to
//! ```
//!
//! Data that lie in the capsule of a fabrics or admin command are short. The command is taken when
//! all of its PDU is in the window.

use super::{
    io::skip,
    seats::Seats,
    state::{Asked, CAPSULE_DATA_BYTES, Nvme, PduEnd, Phase, Session},
};
use crate::net::{
    connection::{Connection, Incoming, State},
    core::{Core, Protocol},
    flights::{ClientRequest, Contents},
    outbox::Share,
    protocol::{SessionEnd, Stage},
    settings::TlsNeed,
};
use diskwright_nvme::wire::{
    Command, DataPdu, Digests, PduError, PduHeader, PduKind, Status, Terminate, fabrics, pdu::DIGEST_BYTES,
};
use diskwright_store::SlotMap;
use std::{collections::VecDeque, io};

/// Completions of a queue that the host has not read, at which no more commands are taken.
const UNREAD_MAX: u32 = 1024;

impl Protocol for Nvme {
    const NAME: &'static str = "nvme";
    const ANSWERS: usize = 8;
    const AUTHENTICATES: bool = true;
    const RESERVES: bool = true;
    const HOW_TO_ALLOW_WRITES: &'static str =
        "ask for authentication (`ServerOptions::secrets`), or allow it with `ServerOptions::insecure_writes`";

    fn session(_: &Core<Self>, _: TlsNeed) -> Session {
        Session {
            phase: Phase::Initialize,
            digests: Digests::empty(),
            alignment_bytes: 1,
            commands: 0,
            parked: SlotMap::default(),
            comparing: SlotMap::default(),
            waiting: VecDeque::new(),
            seats: Seats::default(),
            counted: SlotMap::default(),
            draining: Vec::new(),
            checking: None,
        }
    }

    fn greet(_: &mut Core<Self>, _: &mut Connection<Self>) {}

    fn stage(session: &Session) -> Stage {
        if session.queue().is_some() { Stage::Serving } else { Stage::Handshake }
    }

    fn is_of_export(_: &Session, _: usize) -> bool {
        false
    }

    fn take_input(core: &mut Core<Self>, conn: &mut Connection<Self>, number: u32) -> Result<(), SessionEnd> {
        if let Some(queue) = conn.session.queue() {
            queue.controller.note_traffic();
        }
        while conn.state == State::Open {
            if conn.session.checking.is_some() {
                if !core.check_digest(conn) {
                    return Ok(());
                }
                continue;
            }
            if !core.take_payload(conn) {
                return Ok(());
            }
            if conn.session.checking.is_some() {
                continue;
            }
            core.start_waiting(conn, number);
            if conn.is_over_limit(core.now_ns) {
                return Ok(());
            }
            match core.take_pdu(conn, number) {
                Ok(true) => {}
                Ok(false) => return Ok(()),
                Err(PduEnd::Wrong(error)) => return Err(core.terminate(conn, &error)),
                Err(PduEnd::Session(end)) => return Err(end),
            }
        }
        Ok(())
    }

    fn payload_ended(core: &mut Core<Self>, conn: &mut Connection<Self>, incoming: Incoming<Asked>) {
        if incoming.digest.is_some() {
            conn.session.checking = Some(incoming);
        } else {
            core.part_received(conn, incoming);
        }
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
        core.forget_leaving(conn);
        if conn.session.queue().is_some_and(|queue| !queue.controller.is_discovery) {
            conn.session.seats.look(&core.exports, &core.reservations);
        }
        core.look_for_changes(conn);
    }

    fn ticks(session: &Session) -> bool {
        session.queue().is_some()
    }

    fn tick(core: &mut Core<Self>, conn: &mut Connection<Self>) -> Result<(), SessionEnd> {
        let Some(queue) = conn.session.queue_mut() else { return Ok(()) };
        if queue.admin.is_none() && queue.controller.has_left(queue.time) {
            return Err(SessionEnd::Disconnected);
        }
        if let Some(admin) = &mut queue.admin {
            admin.check_keep_alive(&queue.controller, core.now_ns)?;
            core.look_for_changes(conn);
            core.look_for_notices(conn);
        }
        core.look_for_drained(conn);
        Ok(())
    }

    fn abandon(core: &mut Core<Self>, conn: &mut Connection<Self>) {
        let session = &mut conn.session;
        let parked: Vec<u32> = session.parked.indices().collect();
        let parked: Vec<_> = parked.into_iter().filter_map(|slot| session.parked.remove(slot).flatten()).collect();
        let checking = session.checking.take();
        session.waiting.clear();
        let draining = std::mem::take(&mut session.draining);
        draining.iter().for_each(|(asked, _)| conn.share.sub(Share::of(asked.held_bytes)));
        for incoming in parked.into_iter().chain(checking) {
            conn.forget(incoming, &mut core.pool);
        }
    }

    fn closed(core: &mut Core<Self>, conn: &mut Connection<Self>) {
        if let Some(queue) = conn.session.queue() {
            match queue.id {
                0 => core.shared.end(&queue.controller),
                id => queue.controller.remove_queue(id),
            }
        }
    }
}

/// A PDU whose header is valid and in the window.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pdu {
    pub(super) header: PduHeader,
    /// Length of the header with its digest and padding.
    pub(super) header_bytes: usize,
    pub(super) data_bytes: usize,
}

impl Core<Nvme> {
    /// Takes the next PDU from the window. Returns whether there was one.
    fn take_pdu(&mut self, conn: &mut Connection<Nvme>, number: u32) -> Result<bool, PduEnd> {
        let bytes = conn.window.bytes();
        let Some(header) = PduHeader::decode(bytes)? else { return Ok(false) };
        let expected = match &conn.session.phase {
            Phase::Initialize => header.kind == PduKind::InitializeRequest,
            Phase::Connect => header.kind == PduKind::Command,
            Phase::Queue(_) => matches!(header.kind, PduKind::Command | PduKind::HostData),
        };
        if !expected && header.kind != PduKind::HostTerminate {
            return Err(PduError::Kind { found: header.kind as u8 }.into());
        }
        let digests = conn.session.digests;
        let (header_bytes, data_bytes) = header.check(digests)?;
        if bytes.len() < header_bytes {
            return Ok(false);
        }
        if digests.contains(Digests::HEADER) && header.kind != PduKind::HostTerminate {
            let end = usize::from(header.header_bytes);
            let expected = crc32c::crc32c(&bytes[..end]);
            let found = u32::from_le_bytes(bytes[end..end + DIGEST_BYTES].try_into().unwrap_or_default());
            if found != expected {
                return Err(PduError::HeaderDigest { found, expected }.into());
            }
        }
        let pdu = Pdu { header, header_bytes, data_bytes };
        match header.kind {
            PduKind::InitializeRequest => self.initialize(conn)?,
            PduKind::Command => return self.take_command(conn, number, &pdu),
            PduKind::HostData => self.take_data(conn, &pdu)?,
            _ => {
                let status = bytes.first_chunk().map_or(0, |bytes| Terminate::decode(bytes).status);
                let text = format!("the host ended the connection with the fatal error status {status}");
                return Err(SessionEnd::Broken(text).into());
            }
        }
        Ok(true)
    }

    fn take_command(&mut self, conn: &mut Connection<Nvme>, number: u32, pdu: &Pdu) -> Result<bool, PduEnd> {
        let bytes = conn.window.bytes();
        if pdu.data_bytes > CAPSULE_DATA_BYTES {
            let (what, found) = ("the length of the data in a capsule", pdu.data_bytes as u64);
            return Err(PduError::Field { what, found, expected: "at most 8192" }.into());
        }
        let Some(command) = bytes[PduHeader::BYTES..].first_chunk().map(Command::decode) else { return Ok(false) };
        let is_io =
            conn.session.queue().is_some_and(|queue| queue.admin.is_none()) && command.opcode != fabrics::OPCODE;
        // Completions that the host does not read count too. A host that reads is never stopped
        // here with data of an R2T behind: these completions then go out.
        let is_full = if is_io { conn.outbox.unsent().requests >= UNREAD_MAX } else { !self.has_share_for(conn) };
        if is_full {
            conn.stalled = true;
            return Ok(false);
        }
        if !is_io {
            let total_bytes = pdu.header.total_bytes as usize;
            let Some(whole) = bytes.get(..total_bytes) else { return Ok(false) };
            let data = whole[pdu.header_bytes..pdu.header_bytes + pdu.data_bytes].to_vec();
            let digest = whole.last_chunk().map_or(0, |digest| u32::from_le_bytes(*digest));
            let has_digest = conn.session.digests.contains(Digests::DATA) && !data.is_empty();
            conn.window.consume(total_bytes);
            conn.requests += 1;
            if has_digest && digest != crc32c::crc32c(&data) {
                self.complete(conn, command.cid, Status::TRANSPORT);
                return Ok(true);
            }
            self.take_admin_command(conn, &command, &data)?;
            return Ok(true);
        }
        let entries = conn.session.queue().map_or(0, |queue| u32::from(queue.entries));
        if conn.session.commands >= entries {
            let text = format!("the host has more than {entries} commands in flight, which its queue does not allow");
            return Err(SessionEnd::Broken(text).into());
        }
        conn.window.consume(pdu.header_bytes);
        conn.requests += 1;
        if conn.session.queue().is_some_and(|queue| !queue.is_known) {
            skip(conn, pdu.data_bytes);
            self.complete(conn, command.cid, Status::AUTHENTICATION);
            return Ok(true);
        }
        conn.session.commands += 1;
        if pdu.data_bytes > 0 || conn.session.waiting.is_empty() && self.has_room(conn, &command) {
            self.start_command(conn, number, &command, pdu.data_bytes);
        } else {
            conn.session.waiting.push_back(command);
        }
        Ok(true)
    }

    /// Starts waiting commands while there is room for them.
    fn start_waiting(&mut self, conn: &mut Connection<Nvme>, number: u32) {
        while let Some(command) = conn.session.waiting.front().copied()
            && !conn.is_over_limit(self.now_ns)
        {
            if !self.has_room(conn, &command) {
                conn.retries = true;
                return;
            }
            conn.session.waiting.pop_front();
            self.start_command(conn, number, &command, 0);
        }
    }

    /// H2CData: data that were asked for by an R2T.
    fn take_data(&mut self, conn: &mut Connection<Nvme>, pdu: &Pdu) -> Result<(), PduEnd> {
        let Some(data) = conn.window.bytes().first_chunk().map(DataPdu::decode) else { return Ok(()) };
        let wrong = |what, found: u64, expected| PduEnd::Wrong(PduError::Field { what, found, expected });
        let slot = u32::from(data.tag);
        let Some(mut incoming) = conn.session.parked.get_mut(slot).and_then(Option::take) else {
            return Err(wrong("the transfer tag of an H2CData PDU", data.tag.into(), "that of an R2T"));
        };
        let done_bytes = incoming.payload_bytes - incoming.missing_bytes();
        let is_right = incoming.asked.own.cid == data.cid
            && data.offset_bytes as usize == done_bytes
            && data.len_bytes as usize == pdu.data_bytes
            && pdu.data_bytes > 0
            && pdu.data_bytes <= incoming.missing_bytes();
        if !is_right {
            let end_bytes = u64::from(data.offset_bytes) + u64::from(data.len_bytes);
            conn.forget(incoming, &mut self.pool);
            return Err(wrong("the end of the data of an H2CData PDU", end_bytes, "in order, and within its R2T"));
        }
        conn.window.consume(pdu.header_bytes);
        incoming.announced_bytes = pdu.data_bytes;
        incoming.digest = conn.session.digests.contains(Digests::DATA).then_some(0);
        self.continue_payload(conn, incoming);
        Ok(())
    }

    /// Compares a payload's digest with the one in the window. Returns whether it was there.
    fn check_digest(&mut self, conn: &mut Connection<Nvme>) -> bool {
        let Some(&found) = conn.window.bytes().first_chunk::<DIGEST_BYTES>() else { return false };
        conn.window.consume(DIGEST_BYTES);
        if let Some(incoming) = conn.session.checking.take() {
            if incoming.digest == Some(u32::from_le_bytes(found)) {
                self.part_received(conn, incoming);
            } else {
                self.fail_payload_of(conn, incoming);
            }
        }
        true
    }

    /// A part of a payload was received, and its digest is right.
    fn part_received(&mut self, conn: &mut Connection<Nvme>, incoming: Incoming<Asked>) {
        let slot = incoming.asked.own.slot;
        if incoming.missing_bytes() > 0 {
            match conn.session.parked.get_mut(slot) {
                Some(parked) => *parked = Some(incoming),
                None => conn.forget(incoming, &mut self.pool),
            }
            return;
        }
        conn.session.parked.remove(slot);
        self.payload_received(conn, incoming);
    }

    /// Answers a command whose data were damaged. Data of it that come later are refused.
    fn fail_payload_of(&mut self, conn: &mut Connection<Nvme>, incoming: Incoming<Asked>) {
        conn.session.parked.remove(incoming.asked.own.slot);
        let asked = incoming.asked;
        incoming.into_bufs().for_each(|buf| self.pool.give(buf));
        tracing::warn!(peer = %conn.peer, "the data of a command were damaged on the way: its digest does not match");
        self.finish(conn, &asked, Status::TRANSPORT);
    }

    /// Tells the host why the connection ends.
    fn terminate(&mut self, conn: &mut Connection<Nvme>, error: &PduError) -> SessionEnd {
        let terminate = Terminate { status: error.fatal_status(), information: 0 };
        let wrong = conn.window.bytes();
        let wrong = &wrong[..wrong.len().min(PduHeader::BYTES)];
        let pdu = terminate.encode(PduKind::ControllerTerminate, wrong);
        conn.outbox.put(&pdu, &mut self.pool);
        SessionEnd::Told(error.to_string())
    }
}
