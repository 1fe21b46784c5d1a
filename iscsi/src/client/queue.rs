//! A session of one thread: calls become SCSI commands, and PDUs of the target are checked against
//! the calls that they answer.
//!
//! ```text
//!   call ─▶ SCSI command, with the data of short writes
//!   Data-In ─▶ the call's memory;  R2T ─▶ Data-Out;  SCSI response ─▶ the call has ended
//! ```
//!
//! The tag of a task is the id of its call. A tag that is not in flight, data that were not asked
//! for, and a digest that does not match end the connection. A command is sent again if the unit
//! tells that something has happened, is busy, or has lost the transfer.

use super::{
    session::{Agreed, Numbers, Session, check_header, check_tail, put_header, put_tail, sense_in, tail_of},
    unit::Shared,
};
use crate::{
    scsi::{Blocks, Sense, cdb, lun_of, status},
    wire::{
        Counters, DIGEST_BYTES, DataIn, DataOut, HEADER_BYTES, Header, Opcode, ReadyToTransfer, ScsiCommand, ScsiReply,
        replies, requests,
    },
};
use diskwright_store::{
    Operation, Outbound,
    remote::{
        Broken, Call, Calls, Connection, ConnectionError, Data, Heard, Outcome, Protocol, QueueLimits, RemoteQueue,
    },
};
use std::{io, sync::Arc, time::Duration};

/// Commands in flight at most.
const CALLS_MAX: u16 = 128;

/// Blocks that one command can name.
const BLOCKS_MAX: u64 = u32::MAX as u64;

/// Data of a PDU that is no part of a read: sense data, a rejected header, an event.
const OTHER_BYTES_MAX: usize = 3 << 10;

/// iSCSI on a queue's connection.
#[derive(Debug)]
pub(super) struct UnitQueue {
    shared: Arc<Shared>,
    peer: Arc<str>,
    lun: u64,
    block_bytes: u64,
    agreed: Agreed,
    numbers: Numbers,
    /// The status, if the data that are being received end their command.
    ends: Option<u8>,
    /// Writes that are followed by a SYNCHRONIZE CACHE, which is in flight.
    synchronizing: Vec<u16>,
}

/// A queue of a session.
pub(super) fn queue(shared: &Arc<Shared>, session: Session, depth: usize) -> RemoteQueue<UnitQueue> {
    let Session { connection, agreed, numbers, .. } = session;
    let protocol = UnitQueue {
        shared: Arc::clone(shared),
        peer: Arc::clone(&connection.peer),
        lun: lun_of(shared.info.unit),
        block_bytes: shared.geometry.logical_sector_bytes.into(),
        agreed,
        numbers,
        ends: None,
        synchronizing: Vec::new(),
    };
    RemoteQueue::new(connection, protocol, shared.geometry, QueueLimits { depth, calls: CALLS_MAX })
}

/// Where the data of a PDU are.
#[derive(Debug, Clone, Copy)]
enum Source {
    /// The block of zeros of a WRITE SAME.
    Zeros { len: usize },
    /// The payload of the call.
    Payload { at: usize, len: usize },
}

impl UnitQueue {
    /// Bytes that the target takes for a call.
    fn data_out_bytes(&self, call: &Call) -> u64 {
        match call.operation {
            Operation::Write => call.len_bytes,
            Operation::WriteZeroes | Operation::Discard => self.block_bytes,
            Operation::Read | Operation::Flush => 0,
        }
    }

    /// Bytes that are transferred for a call.
    fn data_bytes(&self, call: &Call) -> u64 {
        if call.operation == Operation::Read { call.len_bytes } else { self.data_out_bytes(call) }
    }

    fn source(&self, call: &Call, at: usize, len: usize) -> Source {
        if call.operation == Operation::Write { Source::Payload { at, len } } else { Source::Zeros { len } }
    }

    /// Queues a PDU.
    fn put(&self, header: &[u8; HEADER_BYTES], id: u16, source: Source, calls: &mut Calls, outbound: &mut Outbound) {
        let agreed = self.agreed;
        outbound.header(|out| put_header(header, &agreed, out));
        match source {
            Source::Zeros { len: 0 } | Source::Payload { len: 0, .. } => {}
            Source::Zeros { len } => {
                outbound.zeros(len);
                if agreed.data_digest {
                    outbound.header(|out| put_tail(&vec![0; len], &agreed, out));
                }
            }
            Source::Payload { at, len } => {
                calls.queued(id);
                outbound.payload(id.into(), at, at + len);
                if agreed.data_digest || !len.is_multiple_of(4) {
                    let data = calls.memory(id.into(), at..at + len).unwrap_or_default();
                    outbound.header(|out| put_tail(data, &agreed, out));
                }
            }
        }
    }

    /// Sends the data that the target asks for.
    fn give(&self, wanted: &ReadyToTransfer, id: u16, calls: &mut Calls, outbound: &mut Outbound) {
        let mut at = wanted.offset_bytes as usize;
        let end = at + wanted.len_bytes as usize;
        for data_sn in 0.. {
            let len = (end - at).min(self.agreed.segment_bytes);
            let is_final = at + len == end;
            let Some(call) = calls.get(id) else { return };
            let source = self.source(call, at, len);
            let part = DataOut { is_final, transfer_tag: wanted.transfer_tag, data_sn, offset_bytes: at as u32 };
            let header = part.encode(self.lun, id.into(), self.numbers.expected_stat_sn, len);
            self.put(&header, id, source, calls, outbound);
            at += len;
            if is_final {
                return;
            }
        }
    }

    /// A command has ended.
    fn ended(
        &mut self,
        tag: u32,
        status: u8,
        sense: Sense,
        calls: &mut Calls,
        outbound: &mut Outbound,
    ) -> Result<(), String> {
        let (id, call) = open_call(tag, calls).ok_or_else(|| unknown("the end", tag))?;
        let is_synchronized = match self.synchronizing.iter().position(|&other| other == id) {
            Some(at) => {
                self.synchronizing.swap_remove(at);
                true
            }
            None => false,
        };
        let wanted_bytes = self.data_bytes(call);
        if status == status::GOOD && call.moved_bytes as u64 != wanted_bytes {
            let what = format!("success when {} of {wanted_bytes} bytes had been transferred", call.moved_bytes);
            let error = call.refused(&self.peer, io::ErrorKind::UnexpectedEof, what);
            calls.answer(id, Outcome::Done(Err(error)));
            return Ok(());
        }
        let limits = &self.shared.limits;
        let must_synchronize = call.fua && limits.has_write_cache && !self.has_fua(call.operation) && !is_synchronized;
        if status == status::GOOD && must_synchronize {
            self.synchronizing.push(id);
            self.command(id, cdb::synchronize_cache(), 0, calls, outbound);
            return Ok(());
        }
        let outcome = self.outcome(call, status, sense);
        calls.answer(id, outcome);
        Ok(())
    }

    /// Whether the command of an operation can make its data durable.
    fn has_fua(&self, operation: Operation) -> bool {
        operation == Operation::Write && self.shared.limits.has_fua
    }

    fn outcome(&self, call: &Call, status: u8, sense: Sense) -> Outcome {
        let refused = |kind, answer: &dyn std::fmt::Display| call.refused(&self.peer, kind, answer);
        // 10 ms at first, and at most 1 s.
        let later = Duration::from_millis(10 << call.tries.min(7)).min(Duration::from_secs(1));
        let busy = || refused(io::ErrorKind::ResourceBusy, &"it is busy");
        match status {
            status::GOOD => Outcome::Done(Ok(())),
            status::CHECK_CONDITION => {
                let error = refused(sense.to_error_kind(), &sense);
                match (sense.is_transient(), sense.is_attention()) {
                    (true, true) => Outcome::Again { after: Duration::ZERO, error },
                    (true, false) => Outcome::Again { after: later, error },
                    (false, _) => Outcome::Done(Err(error)),
                }
            }
            status::BUSY | status::TASK_SET_FULL => Outcome::Again { after: later, error: busy() },
            status::RESERVATION_CONFLICT => {
                let what = "a reservation conflict: another initiator has reserved the disk";
                Outcome::Done(Err(refused(io::ErrorKind::PermissionDenied, &what)))
            }
            other => Outcome::Done(Err(refused(io::ErrorKind::Other, &format!("SCSI status {other:#04x}")))),
        }
    }

    /// Queues a command with its immediate data.
    fn command(&mut self, id: u16, cdb: [u8; 16], out_bytes: u64, calls: &mut Calls, outbound: &mut Outbound) {
        let most = if self.agreed.immediate { self.agreed.first_burst_bytes.min(self.agreed.segment_bytes) } else { 0 };
        let now_bytes = (out_bytes as usize).min(most);
        let sent = self.numbers.next();
        let Some(call) = calls.get(id) else { return };
        let reads = call.operation == Operation::Read;
        let expected_bytes = if reads { call.len_bytes } else { out_bytes } as u32;
        let command = ScsiCommand { is_final: true, reads, writes: out_bytes > 0, expected_bytes, cdb };
        if out_bytes > 0 {
            call.moved_bytes = now_bytes;
        }
        let source = self.source(call, 0, now_bytes);
        self.put(&command.encode(self.lun, id.into(), sent, now_bytes), id, source, calls, outbound);
    }
}

/// The call with this tag, if it is in flight.
fn open_call(tag: u32, calls: &mut Calls) -> Option<(u16, &mut Call)> {
    let id = u16::try_from(tag).ok()?;
    calls.get(id).filter(|call| call.is_open()).map(|call| (id, call))
}

impl Protocol for UnitQueue {
    fn check(&self, operation: Operation) -> io::Result<()> {
        let clears = matches!(operation, Operation::WriteZeroes | Operation::Discard);
        if clears && !self.shared.limits.has_write_same {
            let what = "the target does not support WRITE SAME(16), so ranges cannot be cleared";
            return Err(io::Error::new(io::ErrorKind::Unsupported, what));
        }
        Ok(())
    }

    fn call_bytes_max(&self, operation: Operation) -> u64 {
        match operation {
            Operation::Read | Operation::Write => self.shared.limits.transfer_bytes,
            _ => self.shared.limits.same_blocks.min(BLOCKS_MAX) * self.block_bytes,
        }
    }

    fn may_begin(&self) -> bool {
        self.numbers.is_open()
    }

    fn begin(&mut self, id: u16, calls: &mut Calls, outbound: &mut Outbound) {
        let Some(call) = calls.get(id) else { return };
        let out_bytes = self.data_out_bytes(call);
        let blocks = Blocks { first: call.offset_bytes / self.block_bytes, count: call.len_bytes / self.block_bytes };
        let cdb = match call.operation {
            Operation::Read => cdb::read(blocks),
            Operation::Write => cdb::write(blocks, call.fua && self.shared.limits.has_fua),
            Operation::WriteZeroes => cdb::write_same(blocks, false),
            Operation::Discard => cdb::write_same(blocks, self.shared.limits.unmaps_to_zeros),
            Operation::Flush => cdb::synchronize_cache(),
        };
        self.command(id, cdb, out_bytes, calls, outbound);
    }

    fn header(&mut self, staged: &[u8], calls: &mut Calls, outbound: &mut Outbound) -> Result<Option<Heard>, Broken> {
        let Some(bytes) = staged.first_chunk::<HEADER_BYTES>() else { return Ok(None) };
        let header = Header::decode_reply(bytes);
        if header.opcode.is_none() {
            return Err(not_allowed(bytes).into());
        }
        let headers_bytes = HEADER_BYTES + header.more_header_bytes;
        let digest_bytes = if self.agreed.header_digest { DIGEST_BYTES } else { 0 };
        let mut taken_bytes = headers_bytes + digest_bytes;
        let Some(all) = staged.get(..taken_bytes) else { return Ok(None) };
        if self.agreed.header_digest {
            let (headers, digest) = all.split_at(headers_bytes);
            check_header(headers, digest)?;
        }
        let counters = Counters::decode(bytes);
        if header.opcode == Some(Opcode::DataIn) && header.data_bytes > 0 {
            let part = DataIn::decode(bytes);
            self.numbers.take(counters, part.ends.is_some());
            let data = self.data_in(&part, header.data_bytes, calls)?;
            return Ok(Some(Heard { taken_bytes, data: Some(data) }));
        }
        if header.data_bytes > OTHER_BYTES_MAX {
            return Err(
                format!("it sent a PDU with {} bytes of data that are not those of a read", header.data_bytes).into()
            );
        }
        let tail_bytes = tail_of(header.data_bytes, &self.agreed);
        let Some(data) = staged.get(taken_bytes..taken_bytes + header.data_bytes + tail_bytes) else { return Ok(None) };
        let (data, tail) = data.split_at(header.data_bytes);
        check_tail(data, tail, &self.agreed)?;
        taken_bytes += header.data_bytes + tail_bytes;
        match header.opcode {
            Some(Opcode::DataIn) => {
                let part = DataIn::decode(bytes);
                self.numbers.take(counters, part.ends.is_some());
                if let Some((status, _)) = part.ends {
                    self.ended(part.tag, status, Sense::NONE, calls, outbound)?;
                }
            }
            Some(Opcode::ScsiResponse) => {
                let reply = ScsiReply::decode(bytes);
                self.numbers.take(counters, true);
                if !reply.is_carried_out {
                    return Err("it could not carry out a command".to_owned().into());
                }
                self.ended(reply.tag, reply.status, sense_in(data), calls, outbound)?;
            }
            Some(Opcode::ReadyToTransfer) => {
                self.numbers.take(counters, false);
                self.ready(&ReadyToTransfer::decode(bytes), calls, outbound)?;
            }
            Some(Opcode::NopIn) => {
                let question = replies::transfer_tag_of(bytes);
                self.numbers.take(counters, question.is_none());
                if let Some(tag) = question {
                    let answer = requests::nop_out(header.lun, tag, self.numbers.sent());
                    let agreed = self.agreed;
                    outbound.header(|out| put_header(&answer, &agreed, out));
                }
            }
            Some(Opcode::Async) => {
                self.numbers.take(counters, true);
                let event = replies::async_event_of(bytes);
                if matches!(event, 1..=3) {
                    return Err(Broken::Ended(format!("the target ends the session (event {event})")));
                }
            }
            Some(Opcode::Reject) => {
                let code = replies::reject_code_of(bytes);
                return Err(format!("it rejects a PDU with the reason {code:#04x}").into());
            }
            _ => return Err(not_allowed(bytes).into()),
        }
        Ok(Some(Heard { taken_bytes, data: None }))
    }

    fn data_received(
        &mut self,
        data: &Data,
        tail: &[u8],
        calls: &mut Calls,
        outbound: &mut Outbound,
    ) -> Result<(), Broken> {
        if self.agreed.data_digest {
            let received = calls.memory(data.call.into(), data.start..data.end).unwrap_or_default();
            check_tail(received, tail, &self.agreed)?;
        }
        match self.ends.take() {
            Some(status) => Ok(self.ended(data.call.into(), status, Sense::NONE, calls, outbound)?),
            None => Ok(()),
        }
    }

    fn reopen(&mut self) -> Option<Result<Connection, ConnectionError>> {
        let told = |error| ConnectionError::Lost {
            peer: self.peer.to_string(),
            doing: "opening a new session in place of one that had ended",
            source: Arc::new(io::Error::from(error)),
        };
        let session = match self.shared.session() {
            Ok(session) => session,
            Err(error) => return Some(Err(told(error))),
        };
        let Session { connection, agreed, numbers, .. } = session;
        (self.agreed, self.numbers, self.ends) = (agreed, numbers, None);
        self.synchronizing.clear();
        Some(Ok(connection))
    }
}

impl UnitQueue {
    /// Checks data of a read, and says where they belong.
    fn data_in(&mut self, part: &DataIn, data_bytes: usize, calls: &mut Calls) -> Result<Data, String> {
        let (id, call) = open_call(part.tag, calls)
            .filter(|(_, call)| call.operation == Operation::Read)
            .ok_or_else(|| unknown("data", part.tag))?;
        let (start, end) = (call.moved_bytes, call.moved_bytes + data_bytes);
        if part.offset_bytes as usize != start || end as u64 > call.len_bytes {
            return Err(format!(
                "it sent {data_bytes} bytes at {} of a read of {} bytes, of which {start} had come",
                part.offset_bytes, call.len_bytes
            ));
        }
        call.moved_bytes = end;
        self.ends = part.ends.map(|(status, _)| status);
        Ok(Data { call: id, start, end, tail_bytes: tail_of(data_bytes, &self.agreed) })
    }

    /// Checks what the target asks for, and sends it.
    fn ready(&self, wanted: &ReadyToTransfer, calls: &mut Calls, outbound: &mut Outbound) -> Result<(), String> {
        let (id, call) = open_call(wanted.tag, calls).ok_or_else(|| unknown("an R2T", wanted.tag))?;
        let total_bytes = self.data_out_bytes(call);
        let end = call.moved_bytes as u64 + u64::from(wanted.len_bytes);
        if wanted.offset_bytes as usize != call.moved_bytes || wanted.len_bytes == 0 || end > total_bytes {
            return Err(format!(
                "it asks for {} bytes at {} of {total_bytes} bytes, of which it has {}",
                wanted.len_bytes, wanted.offset_bytes, call.moved_bytes
            ));
        }
        call.moved_bytes = end as usize;
        self.give(wanted, id, calls, outbound);
        Ok(())
    }
}

fn not_allowed(header: &[u8; HEADER_BYTES]) -> String {
    format!("it sent a PDU with the opcode {:#04x}, which is not allowed here", header[0] & 0x3f)
}

fn unknown(what: &str, tag: u32) -> String {
    format!("it sent {what} of the task {tag:#x}, which is not in flight or has no such data")
}
