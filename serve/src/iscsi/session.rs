//! The session of one connection: PDUs in, their order, and the order in which payload, waiting
//! commands and new commands are handled.
//!
//! ```text
//!   window ─▶ payload of a write ─▶ what follows it: padding, digest ─▶ transfers.rs
//!          ─▶ waiting commands, when there is room
//!          ─▶ next PDU ─┬─ login ─▶ login.rs
//!                       ├─ SCSI command ─▶ tasks.rs, or the list of waiting tasks
//!                       ├─ Data-Out ─▶ the payload it belongs to
//!                       └─ others ─▶ requests.rs
//! ```
//!
//! Commands have numbers. One connection keeps their order, so a number within the window is the
//! expected one; a PDU with a number outside of the window is ignored, as the protocol demands.
//! Data of PDUs other than commands and writes are short, and such a PDU is taken when all of it is
//! in the window.

use super::{
    replies::Outcome,
    state::{Agreed, Asked, Iscsi, Login, Pdu, Phase, SEGMENT_BYTES, Session, TEXT_BYTES_MAX, Trailing, WINDOW},
    units::Units,
};
use crate::net::{
    connection::{Connection, Incoming, Input, State},
    core::{Core, Protocol},
    flights::{ClientRequest, Contents},
    outbox::Share,
    protocol::{SessionEnd, Stage},
    settings::TlsNeed,
};
use diskwright_iscsi::{
    scsi::Sense,
    wire::{
        Counters, DIGEST_BYTES, DataOut, HEADER_BYTES, Header, NO_TAG, Opcode, PduError, RejectReason, ScsiCommand,
        padding_of, requests,
    },
};
use diskwright_store::SlotMap;
use std::{collections::VecDeque, io};

/// Responses that the initiator has not read, at which no more commands are taken.
const UNREAD_MAX: u32 = 1024;

/// Immediate commands that may be open. Further ones are rejected.
const IMMEDIATE_MAX: usize = 64;

impl Protocol for Iscsi {
    const NAME: &'static str = "iscsi";
    const ANSWERS: usize = 8;
    const AUTHENTICATES: bool = true;
    const RESERVES: bool = true;
    const HOW_TO_ALLOW_WRITES: &'static str =
        "ask for authentication (`ServerOptions::secrets`), or allow it with `ServerOptions::insecure_writes`";

    fn session(_: &Core<Self>, _: TlsNeed) -> Session {
        Session {
            phase: Phase::Login(Box::new(Login::new())),
            agreed: Agreed::default(),
            counters: Counters { stat_sn: 0, expected_cmd_sn: 0, max_cmd_sn: 0 },
            tasks: SlotMap::default(),
            waiting: VecDeque::new(),
            trailing: None,
            managing: Vec::new(),
            units: Units::default(),
            draining: Vec::new(),
            copies: VecDeque::new(),
            token_results: VecDeque::new(),
        }
    }

    fn greet(_: &mut Core<Self>, _: &mut Connection<Self>) {}

    fn stage(session: &Session) -> Stage {
        if session.nexus().is_some() { Stage::Serving } else { Stage::Handshake }
    }

    fn is_of_export(_: &Session, _: usize) -> bool {
        false
    }

    fn take_input(core: &mut Core<Self>, conn: &mut Connection<Self>, number: u32) -> Result<(), SessionEnd> {
        if conn.session.nexus().is_some_and(|nexus| nexus.has_ended()) {
            return Err(SessionEnd::Disconnected);
        }
        while conn.state == State::Open {
            if conn.session.trailing.is_some() {
                if !core.take_trailing(conn) {
                    return Ok(());
                }
                continue;
            }
            if !core.take_payload(conn) {
                return Ok(());
            }
            if conn.session.trailing.is_some() {
                continue;
            }
            core.start_waiting(conn, number);
            if conn.is_over_limit(core.now_ns) {
                return Ok(());
            }
            if !core.take_pdu(conn, number)? {
                return Ok(());
            }
        }
        Ok(())
    }

    fn payload_ended(core: &mut Core<Self>, conn: &mut Connection<Self>, incoming: Incoming<Asked>) {
        if let Some(trailing) = &mut conn.session.trailing {
            trailing.incoming = Some(incoming);
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
        core.step_ended_of(conn, asked, result, contents);
    }

    fn exports_changed(core: &mut Core<Self>, conn: &mut Connection<Self>) {
        core.forget_leaving(conn);
        conn.session.units.look(&core.exports, &core.shared.reservations);
    }

    fn ticks(session: &Session) -> bool {
        session.nexus().is_some()
    }

    fn tick(core: &mut Core<Self>, conn: &mut Connection<Self>) -> Result<(), SessionEnd> {
        if conn.session.nexus().is_some_and(|nexus| nexus.has_ended()) {
            return Err(SessionEnd::Disconnected);
        }
        conn.session.units.look(&core.exports, &core.shared.reservations);
        core.look_for_drained(conn);
        Ok(())
    }

    fn abandon(core: &mut Core<Self>, conn: &mut Connection<Self>) {
        let session = &mut conn.session;
        let slots: Vec<u32> = session.tasks.indices().collect();
        let parked: Vec<_> =
            slots.iter().filter_map(|&slot| session.tasks.get_mut(slot).and_then(|task| task.parked.take())).collect();
        let trailing = session.trailing.take().and_then(|trailing| trailing.incoming);
        session.waiting.clear();
        session.managing.clear();
        let draining = std::mem::take(&mut session.draining);
        draining.iter().for_each(|(asked, _)| conn.share.sub(Share::of(asked.held_bytes)));
        for incoming in parked.into_iter().chain(trailing) {
            conn.forget(incoming, &mut core.pool);
        }
    }

    fn closed(core: &mut Core<Self>, conn: &mut Connection<Self>) {
        if let Some(nexus) = conn.session.nexus() {
            core.shared.close(nexus);
            // The next session of the same port has done it.
            if !nexus.has_ended() {
                conn.session.units.end_simple_reservations();
            }
        }
    }
}

fn broken(error: PduError) -> SessionEnd {
    SessionEnd::Broken(error.to_string())
}

impl Core<Iscsi> {
    /// Takes the next PDU from the window. Returns whether there was one.
    fn take_pdu(&mut self, conn: &mut Connection<Iscsi>, number: u32) -> Result<bool, SessionEnd> {
        let window = conn.window.bytes();
        let Some(bytes) = window.first_chunk::<HEADER_BYTES>().copied() else { return Ok(false) };
        let header = Header::decode(&bytes);
        let Some(opcode) = header.opcode else { return Err(broken(PduError::Opcode { found: bytes[0] })) };
        let is_login = matches!(conn.session.phase, Phase::Login(_));
        if is_login != (opcode == Opcode::Login) {
            return Err(broken(PduError::Opcode { found: bytes[0] }));
        }
        // What is agreed on is valid after the login.
        let agreed = if is_login { Agreed::default() } else { conn.session.agreed };
        let headers_bytes = HEADER_BYTES + header.more_header_bytes;
        let head_bytes = headers_bytes + if agreed.header_digest { DIGEST_BYTES } else { 0 };
        let Some(head) = window.get(..head_bytes) else { return Ok(false) };
        if agreed.header_digest {
            let expected = crc32c::crc32c(&head[..headers_bytes]);
            let found = head.last_chunk().map_or(0, |digest| u32::from_le_bytes(*digest));
            if found != expected {
                return Err(broken(PduError::HeaderDigest { found, expected }));
            }
        }
        if header.data_bytes > SEGMENT_BYTES {
            return Err(broken(PduError::DataTooLong { found: header.data_bytes, max: SEGMENT_BYTES }));
        }
        let tail_bytes = match header.data_bytes {
            0 => 0,
            data_bytes => data_bytes + padding_of(data_bytes) + if agreed.data_digest { DIGEST_BYTES } else { 0 },
        };
        let pdu = Pdu { header, bytes, head_bytes, tail_bytes };
        match opcode {
            Opcode::ScsiCommand => return self.take_command(conn, number, &pdu),
            Opcode::DataOut => {
                self.take_data(conn, &pdu)?;
                return Ok(true);
            }
            _ => {}
        }
        // Responses that the initiator does not read count too.
        if !self.has_share_for(conn) {
            conn.stalled = true;
            return Ok(false);
        }
        if opcode != Opcode::Login && header.data_bytes > TEXT_BYTES_MAX {
            if !self.is_in_order(conn, &pdu) {
                return Ok(true);
            }
            conn.window.consume(head_bytes);
            conn.input = Input::Skip(tail_bytes as u64);
            self.reject(conn, RejectReason::InvalidField, &bytes);
            return Ok(true);
        }
        let Some(whole) = conn.window.bytes().get(..head_bytes + tail_bytes) else { return Ok(false) };
        let data = whole[head_bytes..][..header.data_bytes].to_vec();
        let padded_bytes = header.data_bytes + padding_of(header.data_bytes);
        let expected = crc32c::crc32c(&whole[head_bytes..][..padded_bytes]);
        let found = whole.last_chunk().map_or(0, |digest| u32::from_le_bytes(*digest));
        let is_damaged = agreed.data_digest && tail_bytes > 0 && found != expected;
        if opcode == Opcode::Login {
            conn.window.consume(head_bytes + tail_bytes);
            self.take_login(conn, &pdu, &data)?;
            return Ok(true);
        }
        if !self.is_in_order(conn, &pdu) {
            return Ok(true);
        }
        conn.window.consume(head_bytes + tail_bytes);
        if is_damaged {
            self.reject(conn, RejectReason::DataDigest, &bytes);
        } else {
            self.take_request(conn, opcode, &pdu, data)?;
        }
        Ok(true)
    }

    /// Checks the number of a PDU that has one, and counts it. A PDU outside of the window is
    /// skipped.
    fn is_in_order(&mut self, conn: &mut Connection<Iscsi>, pdu: &Pdu) -> bool {
        if pdu.header.is_immediate || pdu.header.opcode == Some(Opcode::Snack) {
            return true;
        }
        let counters = &mut conn.session.counters;
        let cmd_sn = requests::cmd_sn_of(&pdu.bytes);
        // The window is the one that the last response tells, whether it was read or not.
        if cmd_sn == counters.expected_cmd_sn && (counters.max_cmd_sn.wrapping_sub(cmd_sn) as i32) >= 0 {
            counters.expected_cmd_sn = cmd_sn.wrapping_add(1);
            return true;
        }
        tracing::debug!(peer = %conn.peer, cmd_sn, ?counters, "a PDU was ignored: its number is not in the window");
        conn.window.consume(pdu.head_bytes);
        if pdu.tail_bytes > 0 {
            conn.input = Input::Skip(pdu.tail_bytes as u64);
        }
        false
    }

    fn take_command(&mut self, conn: &mut Connection<Iscsi>, number: u32, pdu: &Pdu) -> Result<bool, SessionEnd> {
        if conn.outbox.unsent().requests >= UNREAD_MAX {
            conn.stalled = true;
            return Ok(false);
        }
        let command = ScsiCommand::decode(&pdu.bytes);
        let Phase::Full { is_discovery: false, .. } = conn.session.phase else {
            return Err(SessionEnd::Broken("a discovery session has no SCSI commands".to_owned()));
        };
        if !self.is_in_order(conn, pdu) {
            return Ok(true);
        }
        conn.window.consume(pdu.head_bytes);
        conn.requests += 1;
        let is_known = |slot: u32| conn.session.tasks.get(slot).is_some_and(|task| task.tag == pdu.header.tag);
        if conn.session.tasks.indices().any(is_known) || pdu.header.tag == NO_TAG {
            return Err(SessionEnd::Broken(format!("the initiator uses the task tag {:#x} twice", pdu.header.tag)));
        }
        // The window bounds the others.
        if pdu.header.is_immediate && conn.session.tasks.len() >= WINDOW as usize + IMMEDIATE_MAX {
            conn.input = if pdu.tail_bytes > 0 { Input::Skip(pdu.tail_bytes as u64) } else { Input::Header };
            self.reject(conn, RejectReason::TooManyImmediate, &pdu.bytes);
            return Ok(true);
        }
        let slot = self.open_task(conn, &pdu.header, &command);
        if pdu.tail_bytes > 0 || conn.session.waiting.is_empty() && self.has_room(conn, slot) {
            self.start_task(conn, number, slot, Some(pdu).filter(|pdu| pdu.tail_bytes > 0));
        } else {
            conn.session.waiting.push_back(slot);
        }
        Ok(true)
    }

    /// Starts waiting tasks while there is room for them.
    fn start_waiting(&mut self, conn: &mut Connection<Iscsi>, number: u32) {
        while let Some(slot) = conn.session.waiting.front().copied()
            && !conn.is_over_limit(self.now_ns)
        {
            if !self.has_room(conn, slot) {
                conn.retries = true;
                return;
            }
            conn.session.waiting.pop_front();
            self.start_task(conn, number, slot, None);
        }
    }

    /// Announces the data of a PDU as the next part of a payload.
    pub(super) fn announce(&mut self, conn: &mut Connection<Iscsi>, mut incoming: Incoming<Asked>, pdu: &Pdu) {
        let wanted_bytes = pdu.header.data_bytes.min(incoming.missing_bytes());
        let left_bytes = pdu.tail_bytes - wanted_bytes;
        incoming.announced_bytes = wanted_bytes;
        incoming.digest = conn.session.agreed.data_digest.then_some(0);
        if left_bytes > 0 {
            conn.session.trailing = Some(Trailing { incoming: None, left_bytes });
        }
        self.continue_payload(conn, incoming);
    }

    /// Data that were asked for by an R2T.
    fn take_data(&mut self, conn: &mut Connection<Iscsi>, pdu: &Pdu) -> Result<(), SessionEnd> {
        let data = DataOut::decode(&pdu.bytes);
        conn.window.consume(pdu.head_bytes);
        let task = conn.session.tasks.get_mut(data.transfer_tag);
        let parked = task
            .filter(|task| task.tag == pdu.header.tag)
            .and_then(|task| Some((task.solicited?, task.parked.take()?)));
        let Some(((data_sn, end_bytes), incoming)) = parked else {
            // Data of a task that was aborted, or refused in its beginning.
            conn.input = if pdu.tail_bytes > 0 { Input::Skip(pdu.tail_bytes as u64) } else { Input::Header };
            return Ok(());
        };
        let done_bytes = incoming.payload_bytes - incoming.missing_bytes();
        let after_bytes = done_bytes + pdu.header.data_bytes;
        let is_next = data.data_sn == data_sn
            && data.offset_bytes as usize == done_bytes
            && after_bytes <= end_bytes
            && data.is_final == (after_bytes == end_bytes)
            && pdu.header.data_bytes > 0;
        if !is_next {
            tracing::warn!(peer = %conn.peer, ?data, data_sn, done_bytes, end_bytes, "a command failed: its data are not in order");
            conn.input = if pdu.tail_bytes > 0 { Input::Skip(pdu.tail_bytes as u64) } else { Input::Header };
            let asked = incoming.asked;
            incoming.into_bufs().for_each(|buf| self.pool.give(buf));
            self.finish(conn, &asked, Outcome::Failed(Sense::WRONG_DATA));
            return Ok(());
        }
        if let Some(task) = conn.session.tasks.get_mut(data.transfer_tag) {
            task.solicited = Some((data_sn + 1, end_bytes));
        }
        self.announce(conn, incoming, pdu);
        Ok(())
    }

    /// Takes what follows the data of a payload. Returns whether all of it was there.
    fn take_trailing(&mut self, conn: &mut Connection<Iscsi>) -> bool {
        let digest_bytes = if conn.session.agreed.data_digest { DIGEST_BYTES } else { 0 };
        // The data come first.
        if matches!(conn.input, Input::Payload(_)) {
            return self.take_payload(conn);
        }
        let Some(trailing) = &mut conn.session.trailing else { return true };
        let there = conn.window.bytes();
        let now = there.len().min(trailing.left_bytes - digest_bytes);
        if let Some(digest) = trailing.incoming.as_mut().and_then(|incoming| incoming.digest.as_mut()) {
            *digest = crc32c::crc32c_append(*digest, &there[..now]);
        }
        conn.window.consume(now);
        trailing.left_bytes -= now;
        if trailing.left_bytes > digest_bytes {
            return false;
        }
        let found = conn.window.bytes().first_chunk::<DIGEST_BYTES>().map(|digest| u32::from_le_bytes(*digest));
        if digest_bytes > 0 && found.is_none() {
            return false;
        }
        conn.window.consume(digest_bytes);
        if let Some(incoming) = conn.session.trailing.take().and_then(|trailing| trailing.incoming) {
            if digest_bytes > 0 && incoming.digest != found {
                self.payload_damaged(conn, incoming);
            } else {
                self.part_received(conn, incoming);
            }
        }
        true
    }
}
