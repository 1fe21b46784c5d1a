//! SCSI commands: which logical unit they are for, whether they may be carried out, and how.
//!
//! ```text
//!   open_task ─▶ Task ─▶ start_task ─┬─ refused, or answered at once ─▶ finish, data are skipped
//!                                    ├─ has no data to come ─▶ transfers.rs
//!                                    └─ has: with the command, then by R2T ─▶ transfers.rs
//! ```

use super::{
    replies::{Outcome, cut},
    state::{Asked, COPY_BYTES, Expected, Iscsi, PARAMETERS_BYTES_MAX, Pdu, Step, TRANSFER_BYTES, Task},
};
use crate::{
    metrics::Kind,
    net::{
        connection::{Connection, Incoming, Input},
        core::Core,
        flights::{ClientRequest, Contents},
        outbox::Share,
        pool::PIECE_BYTES,
    },
    reservations::Seat,
};
use diskwright_iscsi::{
    scsi::{
        Command, Sense,
        command::{Check, Class},
        inquiry::{self, COMPARE_BLOCKS_MAX},
        persistent, status, unit_of,
    },
    wire::{Header, ReadyToTransfer, ScsiCommand},
};
use diskwright_store::Operation;
use std::sync::Arc;

/// What is left to do for a command that was checked.
struct Work {
    command: Command,
    /// Length of the data that the initiator sends.
    payload_bytes: usize,
}

impl Core<Iscsi> {
    /// Records a command.
    pub(super) fn open_task(&mut self, conn: &mut Connection<Iscsi>, header: &Header, command: &ScsiCommand) -> u32 {
        let bytes_if = |wanted: bool| if wanted { command.expected_bytes } else { 0 };
        conn.session.tasks.insert(Task {
            tag: header.tag,
            lun: header.lun,
            command: Command::decode(&command.cdb),
            expects: Expected { in_bytes: bytes_if(command.reads), out_bytes: bytes_if(command.writes) },
            has_bytes: 0,
            data_sn: 0,
            piece_bytes: PIECE_BYTES,
            solicited: None,
            parked: None,
            kept: Contents::default(),
            step: Step::Only,
            counted: None,
        })
    }

    /// The export of a logical unit, if it is served.
    pub(super) fn export_of(&self, lun: u64) -> Option<usize> {
        unit_of(lun).map(usize::from).filter(|&unit| self.exports.here(unit).is_some())
    }

    /// Whether the client and the logical unit may have the command in flight now.
    pub(super) fn has_room(&self, conn: &Connection<Iscsi>, slot: u32) -> bool {
        let lun = conn.session.tasks.get(slot).map_or(0, |task| task.lun);
        self.export_of(lun).map_or_else(|| self.has_share_for(conn), |export| self.has_room_for(conn, export))
    }

    /// Starts a command. If it came with data, they are the next in the window, and `pdu` has their
    /// length.
    pub(super) fn start_task(&mut self, conn: &mut Connection<Iscsi>, number: u32, slot: u32, pdu: Option<&Pdu>) {
        let mut asked = ClientRequest {
            connection: number,
            export: 0,
            kind: Kind::Other,
            offset_bytes: 0,
            len_bytes: 0,
            held_bytes: 0,
            taken_ns: self.now_ns,
            own: Asked { slot },
        };
        let work = match self.check(conn, pdu.map_or(0, |pdu| pdu.header.data_bytes), &mut asked) {
            Ok(work) => work,
            Err(outcome) => {
                asked.held_bytes = 0;
                conn.share.add(Share::of(0));
                skip(conn, pdu);
                return self.finish(conn, &asked, outcome);
            }
        };
        conn.share.add(Share::of(asked.held_bytes));
        if let Some(limiter) = &conn.limiter {
            let counted = match asked.kind {
                Kind::Write => Operation::Write,
                Kind::Flush => Operation::Flush,
                Kind::Trim | Kind::WriteZeroes => Operation::Discard,
                _ => Operation::Read,
            };
            limiter.reserve(self.now_ns, counted, asked.len_bytes);
            conn.not_before_ns = limiter.next_start_ns();
        }
        if work.payload_bytes == 0 {
            skip(conn, pdu);
            return match admit(conn, &asked) {
                Ok(()) => self.carry_out(conn, &asked, &work.command),
                Err(outcome) => self.finish(conn, &asked, outcome),
            };
        }
        let fua = matches!(work.command, Command::Write { fua: true, .. });
        let mut incoming = Incoming::new(asked, work.payload_bytes, fua);
        // The others are looked at, which is simpler in one buffer.
        incoming.may_share =
            matches!(work.command, Command::Write { .. }) && work.payload_bytes as u64 == asked.len_bytes;
        match pdu {
            Some(pdu) => self.announce(conn, incoming, pdu),
            None => self.solicit(conn, incoming),
        }
    }

    /// Asks for the next data of a payload.
    pub(super) fn solicit(&mut self, conn: &mut Connection<Iscsi>, incoming: Incoming<Asked>) {
        let slot = incoming.asked.own.slot;
        let done_bytes = incoming.payload_bytes - incoming.missing_bytes();
        let len_bytes = incoming.missing_bytes().min(conn.session.agreed.burst_bytes as usize);
        let counters = conn.session.counters();
        let Some(task) = conn.session.tasks.get_mut(slot) else { return conn.forget(incoming, &mut self.pool) };
        let ready = ReadyToTransfer {
            tag: task.tag,
            lun: task.lun,
            transfer_tag: slot,
            r2t_sn: task.data_sn,
            offset_bytes: done_bytes as u32,
            len_bytes: len_bytes as u32,
        };
        task.data_sn += 1;
        task.solicited = Some((0, done_bytes + len_bytes));
        task.parked = Some(incoming);
        self.put_pdu(conn, &ready.encode(counters), &[]);
    }

    /// A part of a payload was received whole.
    pub(super) fn part_received(&mut self, conn: &mut Connection<Iscsi>, incoming: Incoming<Asked>) {
        let asked = incoming.asked;
        let Some(task) = conn.session.tasks.get_mut(asked.own.slot) else {
            return conn.forget(incoming, &mut self.pool);
        };
        let burst_goes_on =
            task.solicited.is_some_and(|(_, end_bytes)| incoming.payload_bytes - incoming.missing_bytes() < end_bytes);
        if incoming.is_refused {
            incoming.into_bufs().for_each(|buf| self.pool.give(buf));
            return self.finish(conn, &asked, Outcome::Failed(Sense::NO_UNIT));
        }
        if burst_goes_on {
            task.parked = Some(incoming);
        } else if incoming.missing_bytes() > 0 {
            self.solicit(conn, incoming);
        } else {
            task.solicited = None;
            match admit(conn, &asked) {
                Ok(()) => self.payload_received(conn, incoming),
                Err(outcome) => {
                    incoming.into_bufs().for_each(|buf| self.pool.give(buf));
                    self.finish(conn, &asked, outcome);
                }
            }
        }
    }

    /// The data of a command were damaged. Data of it that come later are ignored.
    pub(super) fn payload_damaged(&mut self, conn: &mut Connection<Iscsi>, incoming: Incoming<Asked>) {
        let asked = incoming.asked;
        incoming.into_bufs().for_each(|buf| self.pool.give(buf));
        tracing::warn!(peer = %conn.peer, "the data of a command were damaged on the way: its digest does not match");
        self.finish(conn, &asked, Outcome::Failed(Sense::DAMAGED));
    }

    /// Checks a command and fills `asked`.
    ///
    /// # Errors
    /// How the command ends, if nothing is left to do.
    fn check(
        &mut self,
        conn: &mut Connection<Iscsi>,
        data_bytes: usize,
        asked: &mut ClientRequest<Asked>,
    ) -> Result<Work, Outcome> {
        let session = &mut conn.session;
        let Some(task) = session.tasks.get_mut(asked.own.slot) else { return Err(Outcome::Failed(Sense::INTERNAL)) };
        let exports = Arc::clone(&self.exports);
        let unit = unit_of(task.lun).map(usize::from);
        let Some((export, served)) = unit.and_then(|unit| Some((unit, exports.here(unit)?))) else {
            return Err(match task.command {
                Ok(Command::Inquiry { page: None, room_bytes }) => {
                    cut(inquiry::absent(env!("CARGO_PKG_VERSION")), room_bytes)
                }
                Ok(Command::RequestSense { room_bytes }) => cut(Sense::NO_UNIT.encode().to_vec(), room_bytes),
                Ok(Command::ReportLuns { select, room_bytes }) => self.report_luns(select, room_bytes),
                _ => Outcome::Failed(Sense::NO_UNIT),
            });
        };
        asked.export = export as u32;
        let goes_first = task.command.is_ok_and(|command| command.goes_before_attentions());
        // What others have done to the initiator's reservations becomes an attention first.
        let class = task.command.map_or(Class::Always, |command| command.class());
        let is_allowed = session.units.allows(export, class);
        if !goes_first && let Some(attention) = session.units.take(export) {
            return Err(Outcome::Failed(attention));
        }
        let command = task.command.map_err(Outcome::Failed)?;
        if !is_allowed {
            return Err(Outcome::Status(status::RESERVATION_CONFLICT));
        }
        asked.kind = kind_of(&command);
        let geometry = served.device.geometry();
        let block_bytes = u64::from(geometry.logical_sector_bytes);
        if command.writes() && geometry.read_only {
            return Err(Outcome::Failed(Sense::WRITE_PROTECTED));
        }
        if let Some(blocks) = command.blocks() {
            let all_blocks = geometry.size_bytes / block_bytes;
            let end = blocks.first.checked_add(blocks.count).filter(|&end| end <= all_blocks);
            end.ok_or(Outcome::Failed(Sense::OUT_OF_RANGE))?;
            asked.offset_bytes = blocks.first * block_bytes;
            // WRITE SAME of no blocks means all up to the end.
            let is_to_end = blocks.count == 0 && matches!(command, Command::WriteSame { .. });
            asked.len_bytes = if is_to_end { all_blocks - blocks.first } else { blocks.count } * block_bytes;
        }
        let moves = matches!(
            command,
            Command::Read { .. }
                | Command::Write { .. }
                | Command::WriteAndVerify { .. }
                | Command::OrWrite { .. }
                | Command::Verify { .. }
        );
        if moves && asked.len_bytes > TRANSFER_BYTES {
            return Err(Outcome::Failed(Sense::INVALID_FIELD));
        }
        let wanted_bytes = match command {
            Command::Write { .. }
            | Command::WriteAndVerify { .. }
            | Command::OrWrite { .. }
            | Command::Verify { check: Check::Equal, .. } => asked.len_bytes,
            Command::CompareAndWrite { blocks, .. } if blocks.count > COMPARE_BLOCKS_MAX.into() => {
                return Err(Outcome::Failed(Sense::INVALID_FIELD));
            }
            Command::CompareAndWrite { .. } => 2 * asked.len_bytes,
            Command::Verify { check: Check::EachEqual, blocks } if blocks.count > 0 => block_bytes,
            Command::WriteSame { no_data: false, .. } => block_bytes,
            Command::PersistentOut { list_bytes, .. } if list_bytes != persistent::LIST_BYTES => {
                return Err(Outcome::Failed(Sense::PARAMETER_LENGTH));
            }
            Command::Unmap { list_bytes }
            | Command::ModeSelect { list_bytes, .. }
            | Command::ExtendedCopy { list_bytes }
            | Command::PopulateToken { list_bytes, .. }
            | Command::WriteUsingToken { list_bytes, .. }
            | Command::PersistentOut { list_bytes, .. } => {
                if list_bytes > PARAMETERS_BYTES_MAX {
                    return Err(Outcome::Failed(Sense::PARAMETER_LENGTH));
                }
                list_bytes.into()
            }
            _ => 0,
        };
        task.has_bytes = if matches!(command, Command::Read { .. }) { asked.len_bytes } else { wanted_bytes };
        let out_bytes = u64::from(task.expects.out_bytes);
        let is_exact = matches!(command, Command::CompareAndWrite { .. } | Command::WriteSame { no_data: false, .. });
        if is_exact && wanted_bytes != out_bytes {
            return Err(Outcome::Failed(Sense::INVALID_FIELD));
        }
        let mut payload_bytes = wanted_bytes;
        if wanted_bytes > out_bytes {
            // A write takes the data that there are, up to the last byte.
            if !matches!(command, Command::Write { .. } | Command::WriteAndVerify { .. }) {
                return Err(Outcome::Failed(Sense::WRONG_LENGTH));
            }
            payload_bytes = out_bytes;
            asked.len_bytes = out_bytes.next_multiple_of(block_bytes);
        }
        let agreed = session.agreed;
        let allowed_bytes = if agreed.immediate { agreed.first_burst_bytes as usize } else { 0 };
        if data_bytes > allowed_bytes.min(out_bytes as usize) {
            return Err(Outcome::Failed(Sense::UNEXPECTED_DATA));
        }
        asked.held_bytes = match command {
            Command::Read { .. } => asked.len_bytes as usize,
            Command::Verify { .. } | Command::OrWrite { .. } | Command::WriteAndVerify { .. } => {
                wanted_bytes as usize + asked.len_bytes as usize
            }
            Command::CompareAndWrite { .. } => wanted_bytes as usize + asked.len_bytes as usize,
            Command::ExtendedCopy { .. } | Command::WriteUsingToken { .. } => (wanted_bytes + COPY_BYTES) as usize,
            _ => wanted_bytes as usize,
        };
        if let Some(outcome) = self.answer_at_once(conn, export, served, &command) {
            return Err(outcome);
        }
        self.open_queue(export).map_err(|error| {
            tracing::warn!(%error, "a command failed");
            Outcome::Failed(Sense::INTERNAL)
        })?;
        Ok(Work { command, payload_bytes: payload_bytes as usize })
    }

    /// Commands for a logical unit that is leaving are not carried out any more: neither those that
    /// wait, nor writes whose data have not all come.
    pub(super) fn forget_leaving(&mut self, conn: &mut Connection<Iscsi>) {
        let exports = Arc::clone(&self.exports);
        let refuse = |incoming: &mut Incoming<_>| {
            incoming.is_refused |= exports.is_leaving(incoming.asked.export as usize);
        };
        if let Input::Payload(incoming) = &mut conn.input {
            refuse(incoming);
        }
        let session = &mut conn.session;
        session.trailing.iter_mut().filter_map(|trailing| trailing.incoming.as_mut()).for_each(refuse);
        let mut gone = Vec::new();
        for slot in session.tasks.indices().collect::<Vec<_>>() {
            let Some(task) = session.tasks.get_mut(slot) else { continue };
            if let Some(incoming) = task.parked.take_if(|incoming| exports.is_leaving(incoming.asked.export as usize)) {
                gone.push(incoming);
            }
        }
        // A task that waits finds no logical unit when it starts.
        for incoming in gone {
            let asked = incoming.asked;
            incoming.into_bufs().for_each(|buf| self.pool.give(buf));
            self.finish(conn, &asked, Outcome::Failed(Sense::NO_UNIT));
        }
    }
}

/// Counts a command among those in flight, when the disk is about to begin with it, and looks once
/// more whether it may go on: a reservation or a new login of the same port may have come while its
/// data did. Who changes these looks at the count afterwards, so one of both sees the other.
///
/// # Errors
/// How the command ends.
fn admit(conn: &mut Connection<Iscsi>, asked: &ClientRequest<Asked>) -> Result<(), Outcome> {
    let (session, export) = (&mut conn.session, asked.export as usize);
    let Some(task) = session.tasks.get_mut(asked.own.slot) else { return Ok(()) };
    let class = task.command.map_or(Class::Always, |command| command.class());
    if !matches!(class, Class::Reads | Class::Writes) {
        return Ok(());
    }
    task.counted = session.units.seat(export).map(Seat::count);
    if !session.units.allows(export, class) {
        return Err(Outcome::Status(status::RESERVATION_CONFLICT));
    }
    match session.nexus() {
        Some(nexus) if nexus.has_ended() => Err(Outcome::Status(status::BUSY)),
        _ => Ok(()),
    }
}

/// Skips the data of a command that does not need them.
fn skip(conn: &mut Connection<Iscsi>, pdu: Option<&Pdu>) {
    if let Some(pdu) = pdu {
        conn.input = Input::Skip(pdu.tail_bytes as u64);
    }
}

fn kind_of(command: &Command) -> Kind {
    match command {
        Command::Read { .. } => Kind::Read,
        Command::Write { .. } | Command::WriteAndVerify { .. } | Command::OrWrite { .. } => Kind::Write,
        Command::Verify { .. } | Command::CompareAndWrite { .. } => Kind::Compare,
        Command::SynchronizeCache { .. } => Kind::Flush,
        Command::Unmap { .. } => Kind::Trim,
        Command::WriteSame { .. } => Kind::WriteZeroes,
        Command::LbaStatus { .. } => Kind::BlockStatus,
        Command::Prefetch { .. } => Kind::Cache,
        _ => Kind::Other,
    }
}
