//! PDUs to the initiator: the data of reads, and the end of commands.
//!
//! The header of a Data-In PDU is written directly before the data, into the room that every buffer
//! has. The last one of a read that has succeeded has the status too. Data that do not fit the
//! initiator's PDUs as they lie in their buffers are copied: pages, and reads whose length differs
//! from what the initiator expects.

use super::state::{Asked, Iscsi, Task};
use crate::net::{
    connection::Connection,
    core::Core,
    flights::{ClientRequest, Contents},
    outbox::Share,
    pool::HEADER_ROOM_BYTES,
};
use diskwright_iscsi::{
    scsi::{Sense, status},
    wire::{DIGEST_BYTES, DataIn, HEADER_BYTES, Opcode, RejectReason, Residual, ScsiReply, padding_of, replies},
};
use diskwright_store::IoBuf;

/// How a command ends.
#[derive(Debug)]
pub(super) enum Outcome {
    Good,
    /// With a status other than CHECK CONDITION.
    Status(u8),
    Failed(Sense),
    /// With data for the initiator.
    Page(Vec<u8>),
    /// With data that were read.
    Read(Contents),
}

/// A page, cut to the room that the initiator has.
pub(super) fn cut(mut page: Vec<u8>, room_bytes: u32) -> Outcome {
    page.truncate(room_bytes as usize);
    Outcome::Page(page)
}

/// The data of a task on their way to the initiator.
struct Sending {
    tag: u32,
    total_bytes: usize,
    offset_bytes: usize,
    /// Bytes left of the sequence.
    burst_bytes: usize,
    residual: Residual,
}

impl Core<Iscsi> {
    /// Puts a PDU with short data into the outbox.
    pub(super) fn put_pdu(&mut self, conn: &mut Connection<Iscsi>, header: &[u8; HEADER_BYTES], data: &[u8]) {
        let agreed = conn.session.agreed;
        conn.outbox.put(header, &mut self.pool);
        if agreed.header_digest {
            conn.outbox.put(&crc32c::crc32c(header).to_le_bytes(), &mut self.pool);
        }
        if data.is_empty() {
            return;
        }
        let padding = &[0; 3][..padding_of(data.len())];
        conn.outbox.put(data, &mut self.pool);
        conn.outbox.put(padding, &mut self.pool);
        if agreed.data_digest {
            let digest = crc32c::crc32c_append(crc32c::crc32c(data), padding);
            conn.outbox.put(&digest.to_le_bytes(), &mut self.pool);
        }
    }

    /// Puts a response that counts for the client's share until it is sent.
    pub(super) fn put_response(&mut self, conn: &mut Connection<Iscsi>, header: &[u8; HEADER_BYTES], data: &[u8]) {
        let share = Share::of(data.len());
        conn.share.add(share);
        conn.outbox.count(share);
        self.put_pdu(conn, header, data);
    }

    /// Tells the initiator that a PDU was not carried out.
    pub(super) fn reject(&mut self, conn: &mut Connection<Iscsi>, reason: RejectReason, wrong: &[u8; HEADER_BYTES]) {
        tracing::debug!(peer = %conn.peer, ?reason, opcode = wrong[0] & 0x3f, "a PDU was rejected");
        let counters = conn.session.next_counters();
        self.put_response(conn, &replies::reject(reason, counters), wrong);
    }

    /// Ends a task: answers it, counts it, and answers task management that has waited for it.
    pub(super) fn finish(&mut self, conn: &mut Connection<Iscsi>, asked: &ClientRequest<Asked>, outcome: Outcome) {
        let Some(task) = conn.session.tasks.remove(asked.own.slot) else { return };
        let failed = matches!(outcome, Outcome::Failed(sense) if !sense.is_attention());
        self.answer_task(conn, &task, outcome);
        task.kept.into_bufs().for_each(|buf| self.pool.give(buf));
        self.count(conn, asked, failed);
        self.task_ended(conn, asked.own.slot);
    }

    fn answer_task(&mut self, conn: &mut Connection<Iscsi>, task: &Task, outcome: Outcome) {
        let expected_bytes = task.expects.bytes();
        let residual = Residual::of(task.has_bytes, expected_bytes);
        let reply = |status, residual, expected_data_sn| ScsiReply {
            tag: task.tag,
            is_carried_out: true,
            status,
            residual,
            expected_data_sn,
        };
        let sending = |has_bytes: usize| Sending {
            tag: task.tag,
            total_bytes: has_bytes.min(task.expects.in_bytes as usize),
            offset_bytes: 0,
            burst_bytes: conn.session.agreed.burst_bytes as usize,
            residual: Residual::of(has_bytes as u64, expected_bytes),
        };
        match outcome {
            Outcome::Page(page) if task.expects.in_bytes > 0 && !page.is_empty() => {
                let mut sending = sending(page.len());
                self.put_copied(conn, &mut sending, &page);
            }
            Outcome::Read(contents) if task.expects.in_bytes > 0 => {
                let sending = sending(task.has_bytes as usize);
                self.put_read(conn, sending, contents, task.piece_bytes);
            }
            Outcome::Good | Outcome::Page(_) | Outcome::Read(_) => {
                let residual = match &outcome {
                    Outcome::Page(page) => Residual::of(page.len() as u64, expected_bytes),
                    _ => residual,
                };
                if let Outcome::Read(contents) = outcome {
                    contents.into_bufs().for_each(|buf| self.pool.give(buf));
                }
                let counters = conn.session.next_counters();
                self.put_pdu(conn, &reply(status::GOOD, residual, task.data_sn).encode(counters, 0), &[]);
            }
            Outcome::Status(status) => {
                let counters = conn.session.next_counters();
                let residual = Residual::of(0, expected_bytes);
                self.put_pdu(conn, &reply(status, residual, task.data_sn).encode(counters, 0), &[]);
            }
            Outcome::Failed(sense) => {
                let mut data = [0; 2 + Sense::BYTES];
                data[1] = Sense::BYTES as u8;
                data[2..].copy_from_slice(&sense.encode());
                let counters = conn.session.next_counters();
                let residual = if sense == Sense::WRONG_LENGTH { residual } else { Residual::of(0, expected_bytes) };
                let reply = reply(status::CHECK_CONDITION, residual, task.data_sn);
                self.put_pdu(conn, &reply.encode(counters, data.len()), &data);
            }
        }
    }

    /// The header of the next Data-In, with `data_bytes` of data.
    fn next_data_in(
        &mut self,
        conn: &mut Connection<Iscsi>,
        sending: &mut Sending,
        data_sn: &mut u32,
        data_bytes: usize,
        next_bytes: usize,
    ) -> [u8; HEADER_BYTES] {
        let offset_bytes = sending.offset_bytes as u32;
        sending.offset_bytes += data_bytes;
        sending.burst_bytes = sending.burst_bytes.saturating_sub(data_bytes);
        let is_last = sending.offset_bytes >= sending.total_bytes;
        let is_final = is_last || sending.burst_bytes < next_bytes;
        if is_final {
            sending.burst_bytes = conn.session.agreed.burst_bytes as usize;
        }
        let ends = is_last.then_some((status::GOOD, sending.residual));
        let counters = if is_last { conn.session.next_counters() } else { conn.session.counters() };
        let data_in = DataIn { tag: sending.tag, is_final, ends, data_sn: *data_sn, offset_bytes };
        *data_sn += 1;
        data_in.encode(counters, data_bytes)
    }

    /// Sends a copy of data.
    fn put_copied(&mut self, conn: &mut Connection<Iscsi>, sending: &mut Sending, data: &[u8]) {
        let segment_bytes = conn.session.agreed.segment_bytes.min(conn.session.agreed.burst_bytes as usize);
        let mut data_sn = 0;
        let data = &data[..data.len().min(sending.total_bytes)];
        for chunk in data.chunks(segment_bytes) {
            let header = self.next_data_in(conn, sending, &mut data_sn, chunk.len(), segment_bytes);
            self.put_pdu(conn, &header, chunk);
        }
    }

    /// Sends data that were read, from the buffers where they are.
    fn put_read(&mut self, conn: &mut Connection<Iscsi>, mut sending: Sending, contents: Contents, piece_bytes: usize) {
        let agreed = conn.session.agreed;
        let fits = piece_bytes <= agreed.segment_bytes
            && piece_bytes <= agreed.burst_bytes as usize
            && sending.total_bytes.is_multiple_of(4);
        if !fits {
            let mut all = Vec::with_capacity(sending.total_bytes);
            for buf in contents.into_bufs() {
                let now = piece_bytes.min(sending.total_bytes - all.len());
                all.extend_from_slice(&buf[HEADER_ROOM_BYTES..][..now]);
                self.pool.give(buf);
            }
            return self.put_copied(conn, &mut sending, &all);
        }
        let mut data_sn = 0;
        for buf in contents.into_bufs() {
            let now = piece_bytes.min(sending.total_bytes - sending.offset_bytes);
            if now == 0 {
                self.pool.give(buf);
                continue;
            }
            let header = self.next_data_in(conn, &mut sending, &mut data_sn, now, piece_bytes);
            self.put_piece(conn, &header, buf, now);
        }
    }

    fn put_piece(&mut self, conn: &mut Connection<Iscsi>, header: &[u8; HEADER_BYTES], buf: IoBuf, data_bytes: usize) {
        let agreed = conn.session.agreed;
        let mut head = [0; HEADER_BYTES + DIGEST_BYTES];
        head[..HEADER_BYTES].copy_from_slice(header);
        head[HEADER_BYTES..].copy_from_slice(&crc32c::crc32c(header).to_le_bytes());
        let head = &head[..if agreed.header_digest { head.len() } else { HEADER_BYTES }];
        let digest = agreed.data_digest.then(|| crc32c::crc32c(&buf[HEADER_ROOM_BYTES..][..data_bytes]));
        // Responses are sent in the order of their numbers.
        conn.outbox.seal();
        conn.outbox.put_contents(head, buf, data_bytes);
        if let Some(digest) = digest {
            conn.outbox.put(&digest.to_le_bytes(), &mut self.pool);
        }
    }

    /// A task has ended: answers task management that has waited for it only.
    pub(super) fn task_ended(&mut self, conn: &mut Connection<Iscsi>, slot: u32) {
        let session = &mut conn.session;
        session.managing.iter_mut().for_each(|managing| managing.tasks.retain(|&task| task != slot));
        while let Some(at) = conn.session.managing.iter().position(|managing| managing.tasks.is_empty()) {
            let managing = conn.session.managing.remove(at);
            let counters = conn.session.next_counters();
            let header = replies::outcome(Opcode::TaskManagementResponse, managing.tag, managing.outcome, counters);
            self.put_response(conn, &header, &[]);
        }
    }
}
