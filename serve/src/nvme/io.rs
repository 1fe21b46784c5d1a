//! I/O commands: checked, and passed to the core.
//!
//! ```text
//!   start_command ─┬─ invalid ─▶ completion with an error; its data are skipped
//!                  ├─ read, verify, flush, write zeroes ─▶ core
//!                  └─ write, compare, dataset management ─▶ data in the capsule, or an R2T
//!                       payload_received ─▶ core: write; read and compare; clear ranges
//! ```

use super::{
    namespaces,
    replies::PduRoom,
    reserve::report,
    state::{Asked, NO_SLOT, Nvme, TRANSFER_BYTES},
};
use crate::{
    metrics::Kind,
    net::{
        connection::{Connection, Incoming, Input},
        core::Core,
        flights::{ClientRequest, Contents, Steps},
        outbox::Share,
        pool::HEADER_ROOM_BYTES,
    },
};
use diskwright_nvme::wire::{
    Command, DataPdu, Digests, PduFlags, PduKind, Sgl, Status,
    command::{DEALLOCATE, DSM_DEALLOCATE, DsmRange, FUA},
    nvm,
    pdu::DIGEST_BYTES,
    reservation::{self, Reserve},
};
use diskwright_store::{Operation, Request};

impl Core<Nvme> {
    /// Whether the client and the namespace may have the command in flight now.
    pub(super) fn has_room(&self, conn: &Connection<Nvme>, command: &Command) -> bool {
        let export = namespaces::export_of(&self.exports, command.nsid);
        export.map_or_else(|| self.has_share_for(conn), |(export, _)| self.has_room_for(conn, export))
    }

    /// Starts an I/O command. `data_bytes` of its data are the next in the window.
    pub(super) fn start_command(
        &mut self,
        conn: &mut Connection<Nvme>,
        number: u32,
        command: &Command,
        data_bytes: usize,
    ) {
        let mut asked = ClientRequest {
            connection: number,
            export: 0,
            kind: kind_of(command.opcode),
            offset_bytes: 0,
            len_bytes: 0,
            held_bytes: 0,
            taken_ns: self.now_ns,
            own: Asked {
                cid: command.cid,
                opcode: command.opcode,
                slot: NO_SLOT,
                counted: NO_SLOT,
                dword_10: command.cdw[0],
            },
        };
        let checked = self.check(command, data_bytes, &mut asked).and_then(|payload_bytes| {
            match writes(command.opcode) {
                None => {}
                // A command with a payload is let in when its payload is there, but refused before.
                Some(writes) if payload_bytes > 0 => {
                    let may = conn.session.seats.may(asked.export as usize, writes);
                    may.then_some(()).ok_or(Status::RESERVATION_CONFLICT)?;
                }
                Some(writes) => self.admit(conn, &mut asked, writes)?,
            }
            Ok(payload_bytes)
        });
        let payload_bytes = match checked {
            Ok(payload_bytes) => payload_bytes,
            Err(status) => {
                asked.held_bytes = 0;
                conn.share.add(Share::of(0));
                skip(conn, data_bytes);
                return self.finish(conn, &asked, status);
            }
        };
        conn.share.add(Share::of(asked.held_bytes));
        if let Some(limiter) = &conn.limiter {
            let counted = match asked.kind {
                Kind::Read | Kind::Compare => Operation::Read,
                Kind::Write => Operation::Write,
                Kind::Flush => Operation::Flush,
                _ => Operation::Discard,
            };
            limiter.reserve(self.now_ns, counted, asked.len_bytes);
            conn.not_before_ns = limiter.next_start_ns();
        }
        let fua = command.cdw[2] & FUA != 0;
        match command.opcode {
            nvm::READ | nvm::VERIFY => self.read(conn, &asked),
            nvm::FLUSH => self.launch_single(conn, &asked, Request::flush(0)),
            nvm::WRITE_ZEROES if command.cdw[2] & DEALLOCATE != 0 => {
                self.clear(conn, &asked, Operation::Discard, fua);
            }
            nvm::WRITE_ZEROES => self.clear(conn, &asked, Operation::WriteZeroes, fua),
            reservation::REPORT => self.report_reservations(conn, &asked),
            // The other attributes are hints.
            nvm::DATASET_MANAGEMENT if command.cdw[1] & DSM_DEALLOCATE == 0 => {
                skip(conn, data_bytes);
                self.finish(conn, &asked, Status::SUCCESS);
            }
            _ => self.take_payload_of(conn, asked, payload_bytes, data_bytes, fua),
        }
    }

    /// Receives the payload of a command: the data in its capsule, or those of an R2T.
    fn take_payload_of(
        &mut self,
        conn: &mut Connection<Nvme>,
        asked: ClientRequest<Asked>,
        payload_bytes: usize,
        data_bytes: usize,
        fua: bool,
    ) {
        let mut incoming = Incoming::new(asked, payload_bytes, fua);
        // The others are looked at, which is simpler in one buffer.
        incoming.may_share = asked.own.opcode == nvm::WRITE;
        if data_bytes > 0 {
            incoming.announced_bytes = data_bytes;
            incoming.digest = conn.session.digests.contains(Digests::DATA).then_some(0);
            return self.continue_payload(conn, incoming);
        }
        let slot = conn.session.parked.insert(None);
        incoming.asked.own.slot = slot;
        if let Some(parked) = conn.session.parked.get_mut(slot) {
            *parked = Some(incoming);
        }
        let data = DataPdu { cid: asked.own.cid, tag: slot as u16, offset_bytes: 0, len_bytes: payload_bytes as u32 };
        let room = PduRoom::of(conn, PduKind::ReadyToTransfer, PduFlags::empty());
        self.put_header(conn, &data.encode(&room.header(0)));
    }

    /// All data of a command have been received.
    pub(super) fn payload_received(&mut self, conn: &mut Connection<Nvme>, incoming: Incoming<Asked>) {
        let mut asked = incoming.asked;
        if incoming.is_refused {
            incoming.into_bufs().for_each(|buf| self.pool.give(buf));
            return self.finish(conn, &asked, Status::INVALID_NAMESPACE);
        }
        if let Some(writes) = writes(asked.own.opcode)
            && let Err(status) = self.admit(conn, &mut asked, writes)
        {
            incoming.into_bufs().for_each(|buf| self.pool.give(buf));
            return self.finish(conn, &asked, status);
        }
        match asked.own.opcode {
            nvm::COMPARE => {
                let mut bufs = incoming.into_bufs();
                let contents = Contents { first: bufs.next(), more: bufs.collect() };
                asked.own.slot = conn.session.comparing.insert(contents);
                self.read(conn, &asked);
            }
            nvm::DATASET_MANAGEMENT => {
                let bytes = asked.len_bytes as usize;
                let bufs: Vec<_> = incoming.into_bufs().collect();
                let ranges = bufs.first().map(|buf| self.ranges_of(&asked, &buf[HEADER_ROOM_BYTES..][..bytes]));
                bufs.into_iter().for_each(|buf| self.pool.give(buf));
                match ranges.unwrap_or(Err(Status::INTERNAL)) {
                    Ok(ranges) => {
                        asked.len_bytes = ranges.iter().map(|range| range.end - range.start).sum();
                        self.clear_ranges(conn, &asked, Steps { operation: Operation::Discard, ranges, fua: false });
                    }
                    Err(status) => self.finish(conn, &asked, status),
                }
            }
            reservation::REGISTER | reservation::ACQUIRE | reservation::RELEASE => {
                let bytes = asked.len_bytes as usize;
                let bufs: Vec<_> = incoming.into_bufs().collect();
                let data = bufs.first().map(|buf| buf[HEADER_ROOM_BYTES..][..bytes].to_vec()).unwrap_or_default();
                bufs.into_iter().for_each(|buf| self.pool.give(buf));
                self.reserve(conn, &asked, &data);
            }
            _ => self.write(conn, Incoming { asked, ..incoming }),
        }
    }

    /// Reservation Report. The host says how much of it has room.
    fn report_reservations(&mut self, conn: &mut Connection<Nvme>, asked: &ClientRequest<Asked>) {
        let report = conn.session.seats.at(asked.export as usize).map(|seat| report(seat.reservations()).encode());
        let mut page = report.unwrap_or_default();
        page.resize(asked.len_bytes as usize, 0);
        self.finish_with(conn, asked, &page);
    }

    /// The ranges of dataset management, last one first.
    fn ranges_of(&self, asked: &ClientRequest<Asked>, bytes: &[u8]) -> Result<Vec<std::ops::Range<u64>>, Status> {
        let export = self.exports.here(asked.export as usize).ok_or(Status::INVALID_NAMESPACE)?;
        let geometry = export.device.geometry();
        let block_bytes = u64::from(geometry.logical_sector_bytes);
        let mut ranges = Vec::with_capacity(bytes.len() / DsmRange::BYTES);
        for range in bytes.chunks_exact(DsmRange::BYTES).rev().map(DsmRange::decode) {
            let end = range.first_block.checked_add(range.blocks.into()).and_then(|end| end.checked_mul(block_bytes));
            let end = end.filter(|&end| end <= geometry.size_bytes).ok_or(Status::OUT_OF_RANGE)?;
            let start = range.first_block * block_bytes;
            if start < end {
                ranges.push(start..end);
            }
        }
        Ok(ranges)
    }

    /// Checks a command and fills `asked`. Returns the length of the data that the host sends.
    fn check(
        &mut self,
        command: &Command,
        data_bytes: usize,
        asked: &mut ClientRequest<Asked>,
    ) -> Result<usize, Status> {
        let opcode = command.opcode;
        if command.flags != Command::SGL_FLAGS {
            return Err(Status::INVALID_FIELD);
        }
        let (export, served) = namespaces::export_of(&self.exports, command.nsid).ok_or(Status::INVALID_NAMESPACE)?;
        let geometry = served.device.geometry();
        asked.export = export as u32;
        if writes(opcode) == Some(true) && geometry.read_only {
            return Err(Status::WRITE_PROTECTED);
        }
        let has_range = matches!(opcode, nvm::READ | nvm::WRITE | nvm::COMPARE | nvm::WRITE_ZEROES | nvm::VERIFY);
        if has_range {
            let block_bytes = u64::from(geometry.logical_sector_bytes);
            let end = command.first_block().checked_add(command.blocks()).and_then(|end| end.checked_mul(block_bytes));
            end.filter(|&end| end <= geometry.size_bytes).ok_or(Status::OUT_OF_RANGE)?;
            asked.offset_bytes = command.first_block() * block_bytes;
            asked.len_bytes = command.blocks() * block_bytes;
        }
        let payload_bytes = match opcode {
            nvm::READ | nvm::WRITE | nvm::COMPARE if asked.len_bytes > TRANSFER_BYTES => {
                return Err(Status::INVALID_FIELD);
            }
            nvm::WRITE | nvm::COMPARE => asked.len_bytes as usize,
            // Linux sends room for the largest number of ranges, whatever their number.
            nvm::DATASET_MANAGEMENT => match command.sgl.len_bytes as usize {
                sgl_bytes if (ranges_bytes(command)..=DsmRange::BYTES * DsmRange::MAX).contains(&sgl_bytes) => {
                    sgl_bytes
                }
                _ => return Err(Status::SGL_LENGTH),
            },
            // Linux sends both keys with a release, too.
            reservation::REGISTER | reservation::ACQUIRE | reservation::RELEASE => {
                match command.sgl.len_bytes as usize {
                    sgl_bytes if (Reserve::data_bytes(opcode)..=16).contains(&sgl_bytes) => sgl_bytes,
                    _ => return Err(Status::SGL_LENGTH),
                }
            }
            reservation::REPORT if command.cdw[1] & reservation::EXTENDED == 0 => return Err(Status::HOST_ID_FORMAT),
            reservation::REPORT => {
                asked.len_bytes = (u64::from(command.cdw[0]) + 1) * 4;
                if asked.len_bytes > REPORT_BYTES_MAX {
                    return Err(Status::INVALID_FIELD);
                }
                0
            }
            nvm::READ | nvm::FLUSH | nvm::WRITE_ZEROES | nvm::VERIFY => 0,
            _ => return Err(Status::INVALID_OPCODE),
        };
        if opcode == nvm::DATASET_MANAGEMENT {
            // Until the ranges are known.
            asked.len_bytes = ranges_bytes(command) as u64;
        }
        if matches!(opcode, reservation::REGISTER | reservation::ACQUIRE | reservation::RELEASE) {
            asked.len_bytes = payload_bytes as u64;
        }
        asked.held_bytes = match opcode {
            nvm::READ | nvm::VERIFY | reservation::REPORT => asked.len_bytes as usize,
            nvm::COMPARE => 2 * payload_bytes,
            _ => payload_bytes,
        };
        let is_read = matches!(opcode, nvm::READ | reservation::REPORT);
        let room_bytes = if is_read { asked.len_bytes as usize } else { payload_bytes };
        let sgl_bytes = command.sgl.len_bytes as usize;
        match command.sgl.kind {
            _ if room_bytes == 0 && data_bytes == 0 => {}
            Sgl::IN_CAPSULE if is_read => return Err(Status::SGL_TYPE),
            Sgl::IN_CAPSULE if command.sgl.address != 0 => return Err(Status::SGL_OFFSET),
            Sgl::IN_CAPSULE if sgl_bytes == payload_bytes && data_bytes == payload_bytes => {}
            Sgl::TRANSPORT if sgl_bytes == room_bytes && data_bytes == 0 => {}
            Sgl::IN_CAPSULE | Sgl::TRANSPORT => return Err(Status::SGL_LENGTH),
            _ => return Err(Status::SGL_TYPE),
        }
        self.open_queue(export).map_err(|error| {
            tracing::warn!(%error, "a command failed");
            Status::INTERNAL
        })?;
        Ok(payload_bytes)
    }
}

/// The longest report of reservations, in bytes: more than the participants of a disk take.
const REPORT_BYTES_MAX: u64 = 64 << 10;

/// Whether a command writes; `None` if it neither reads nor writes, and no reservation is asked.
fn writes(opcode: u8) -> Option<bool> {
    match opcode {
        nvm::WRITE | nvm::WRITE_ZEROES | nvm::DATASET_MANAGEMENT => Some(true),
        nvm::READ | nvm::COMPARE | nvm::VERIFY => Some(false),
        _ => None,
    }
}

/// Length of the ranges of dataset management.
fn ranges_bytes(command: &Command) -> usize {
    (usize::from(command.cdw[0] as u8) + 1) * DsmRange::BYTES
}

/// Skips the data in the capsule of a command that does not need them.
pub(super) fn skip(conn: &mut Connection<Nvme>, data_bytes: usize) {
    if data_bytes > 0 {
        let digest_bytes = if conn.session.digests.contains(Digests::DATA) { DIGEST_BYTES } else { 0 };
        conn.input = Input::Skip((data_bytes + digest_bytes) as u64);
    }
}

fn kind_of(opcode: u8) -> Kind {
    match opcode {
        nvm::READ => Kind::Read,
        nvm::WRITE => Kind::Write,
        nvm::FLUSH => Kind::Flush,
        nvm::DATASET_MANAGEMENT => Kind::Trim,
        nvm::WRITE_ZEROES => Kind::WriteZeroes,
        nvm::COMPARE | nvm::VERIFY => Kind::Compare,
        _ => Kind::Other,
    }
}
