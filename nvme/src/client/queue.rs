//! An I/O queue of one thread: calls become command capsules, and PDUs of the controller are
//! checked against the calls that they answer.
//!
//! ```text
//!   call ─▶ command capsule, with the data of short writes
//!   C2HData ─▶ the call's memory;  R2T ─▶ H2CData;  CapsuleResp ─▶ the call has ended
//! ```
//!
//! An id that is not in flight, data that were not asked for, a success with bytes missing, and a
//! digest that does not match end the connection.

use super::{
    limits::{Limits, QueueId},
    session::{Session, check_header_digest, put_digest, put_pdu},
};
use crate::wire::{
    Command, Completion, DataPdu, Digests, PduError, PduFlags, PduHeader, PduKind, Sgl, Status, Terminate,
    command::{DEALLOCATE, FUA},
    nvm,
    pdu::DIGEST_BYTES,
};
use diskwright_store::{
    Geometry, Operation, Outbound,
    remote::{Broken, Calls, Data, Heard, Outcome, Protocol, QueueLimits, RemoteQueue},
};
use std::{io, sync::Arc};

/// Blocks that one command can name.
const BLOCKS_MAX: u64 = 65536;

/// NVMe/TCP on a queue's connection.
#[derive(Debug)]
pub(super) struct IoQueue {
    peer: Arc<str>,
    digests: Digests,
    /// The longest data of one H2CData PDU.
    data_bytes_max: usize,
    limits: Limits,
    nsid: u32,
    block_bytes: u64,
    /// Whether the data that are being received complete their command.
    is_last: bool,
    /// Given back when the queue is dropped, after its connection.
    _id: QueueId,
}

/// A queue on a connection that was made an I/O queue.
pub(super) fn queue(
    session: Session,
    geometry: Geometry,
    limits: Limits,
    nsid: u32,
    depth: usize,
    id: QueueId,
) -> RemoteQueue<IoQueue> {
    let Session { connection, digests, data_bytes_max, .. } = session;
    let protocol = IoQueue {
        peer: Arc::clone(&connection.peer),
        digests,
        data_bytes_max,
        limits,
        nsid,
        block_bytes: geometry.logical_sector_bytes.into(),
        is_last: false,
        _id: id,
    };
    // One entry stays free, so that a full queue is not taken for an empty one.
    let limits = QueueLimits { depth, calls: limits.entries - 1 };
    RemoteQueue::new(connection, protocol, geometry, limits)
}

impl IoQueue {
    /// Queues a PDU with a part of a call's payload.
    fn put(
        &self,
        kind: PduKind,
        rest: &[u8],
        (id, at, data_bytes): (u16, usize, usize),
        calls: &mut Calls,
        outbound: &mut Outbound,
    ) {
        let digests = self.digests;
        outbound.header(|out| put_pdu(digests, kind, rest, data_bytes, out));
        if data_bytes > 0 {
            calls.queued(id);
            outbound.payload(id.into(), at, at + data_bytes);
            if digests.contains(Digests::DATA) {
                let data = calls.memory(id.into(), at..at + data_bytes).unwrap_or_default();
                outbound.header(|out| put_digest(digests, data, out));
            }
        }
    }

    /// Sends the data that the controller asks for.
    fn give(&self, wanted: DataPdu, calls: &mut Calls, outbound: &mut Outbound) {
        let mut at = wanted.offset_bytes as usize;
        let end = at + wanted.len_bytes as usize;
        while at < end {
            let now = (end - at).min(self.data_bytes_max);
            let part = DataPdu { offset_bytes: at as u32, len_bytes: now as u32, ..wanted };
            self.put(PduKind::HostData, &part.encode_rest(), (wanted.cid, at, now), calls, outbound);
            at += now;
        }
    }

    fn completed(&self, cid: u16, status: Status, calls: &mut Calls) -> Result<(), String> {
        let Some(call) = calls.get(cid).filter(|call| call.is_open()) else {
            return Err(unknown("a completion", cid));
        };
        if status.is_success() && call.moved_bytes as u64 != call.payload_bytes() {
            return Err(format!(
                "it completed a command of {} bytes with success when {} had been transferred",
                call.len_bytes, call.moved_bytes
            ));
        }
        let result = match status.to_error() {
            None => Ok(()),
            Some(error) => Err(call.refused(&self.peer, error.kind(), status)),
        };
        calls.answer(cid, Outcome::Done(result));
        Ok(())
    }
}

impl Protocol for IoQueue {
    fn check(&self, operation: Operation) -> io::Result<()> {
        if matches!(operation, Operation::WriteZeroes | Operation::Discard) && !self.limits.has_write_zeroes {
            let what = "the target does not support write zeroes, so ranges cannot be cleared";
            return Err(io::Error::new(io::ErrorKind::Unsupported, what));
        }
        Ok(())
    }

    fn call_bytes_max(&self, operation: Operation) -> u64 {
        let most_bytes = BLOCKS_MAX * self.block_bytes;
        match operation {
            Operation::Read | Operation::Write => self.limits.transfer_bytes.min(most_bytes),
            _ => most_bytes,
        }
    }

    fn begin(&mut self, id: u16, calls: &mut Calls, outbound: &mut Outbound) {
        let Some(call) = calls.get(id) else { return };
        let (block, blocks) = (call.offset_bytes / self.block_bytes, call.len_bytes / self.block_bytes);
        let in_capsule = call.operation == Operation::Write && call.len_bytes <= self.limits.capsule_bytes;
        let data_bytes = if in_capsule { call.len_bytes as usize } else { 0 };
        call.moved_bytes = data_bytes;
        let kind = if in_capsule { Sgl::IN_CAPSULE } else { Sgl::TRANSPORT };
        let sgl = Sgl { address: 0, len_bytes: call.payload_bytes() as u32, kind };
        let mut flags = if call.fua { FUA } else { 0 };
        let opcode = match call.operation {
            Operation::Read => nvm::READ,
            Operation::Write => nvm::WRITE,
            Operation::Flush => nvm::FLUSH,
            Operation::WriteZeroes => nvm::WRITE_ZEROES,
            Operation::Discard => {
                flags |= if self.limits.zeroes_deallocate { DEALLOCATE } else { 0 };
                nvm::WRITE_ZEROES
            }
        };
        let cdw = match call.operation {
            Operation::Flush => [0; 6],
            _ => [block as u32, (block >> 32) as u32, blocks.saturating_sub(1) as u32 | flags, 0, 0, 0],
        };
        let command = Command { opcode, flags: Command::SGL_FLAGS, cid: id, nsid: self.nsid, sgl, cdw };
        self.put(PduKind::Command, &command.encode(), (id, 0, data_bytes), calls, outbound);
    }

    fn header(&mut self, staged: &[u8], calls: &mut Calls, outbound: &mut Outbound) -> Result<Option<Heard>, Broken> {
        let told = |error: PduError| error.to_string();
        let Some(header) = PduHeader::decode(staged).map_err(told)? else { return Ok(None) };
        let (header_bytes, data_bytes) = header.check(self.digests).map_err(told)?;
        let Some(bytes) = staged.get(..header_bytes) else { return Ok(None) };
        check_header_digest(self.digests, &header, bytes).map_err(told)?;
        let Some(front) = bytes.first_chunk::<{ DataPdu::BYTES }>() else { return Ok(None) };
        let asked = DataPdu::decode(front);
        let mut heard = Heard { taken_bytes: header_bytes, data: None };
        match header.kind {
            PduKind::Response => {
                let done = bytes[PduHeader::BYTES..].first_chunk().map(Completion::decode).unwrap_or_default();
                self.completed(done.cid, done.status, calls)?;
            }
            PduKind::ControllerData => {
                let call = calls.get(asked.cid).filter(|call| call.operation == Operation::Read && call.is_open());
                let Some(call) = call else { return Err(unknown("data", asked.cid).into()) };
                let (start, end) = (call.moved_bytes, call.moved_bytes + data_bytes);
                let is_right = asked.offset_bytes as usize == start && asked.len_bytes as usize == data_bytes;
                if !is_right || data_bytes == 0 || end as u64 > call.len_bytes {
                    return Err(format!(
                        "it sent {} bytes at {} of a read of {} bytes, of which {start} had come",
                        asked.len_bytes, asked.offset_bytes, call.len_bytes
                    )
                    .into());
                }
                call.moved_bytes = end;
                self.is_last = header.flags.contains(PduFlags::SUCCESS);
                let tail_bytes = if self.digests.contains(Digests::DATA) { DIGEST_BYTES } else { 0 };
                heard.data = Some(Data { call: asked.cid, start, end, tail_bytes });
            }
            PduKind::ReadyToTransfer => {
                let call = calls.get(asked.cid).filter(|call| call.operation == Operation::Write && call.is_open());
                let Some(call) = call else { return Err(unknown("an R2T", asked.cid).into()) };
                let end = call.moved_bytes as u64 + u64::from(asked.len_bytes);
                if asked.offset_bytes as usize != call.moved_bytes || asked.len_bytes == 0 || end > call.len_bytes {
                    return Err(format!(
                        "it asks for {} bytes at {} of a write of {} bytes, of which it has asked for {}",
                        asked.len_bytes, asked.offset_bytes, call.len_bytes, call.moved_bytes
                    )
                    .into());
                }
                call.moved_bytes = end as usize;
                self.give(asked, calls, outbound);
            }
            PduKind::ControllerTerminate => {
                let status = Terminate::decode(front).status;
                return Err(format!("it ended the connection with the fatal error status {status}").into());
            }
            kind => return Err(told(PduError::Kind { found: kind as u8 }).into()),
        }
        Ok(Some(heard))
    }

    fn data_received(&mut self, data: &Data, tail: &[u8], calls: &mut Calls, _: &mut Outbound) -> Result<(), Broken> {
        if let Some(&digest) = tail.first_chunk() {
            let computed = calls.memory(data.call.into(), data.start..data.end).map(crc32c::crc32c);
            if computed != Some(u32::from_le_bytes(digest)) {
                return Err("the digest of data of a read does not match".to_owned().into());
            }
        }
        if self.is_last {
            self.completed(data.call, Status::SUCCESS, calls)?;
        }
        Ok(())
    }
}

fn unknown(what: &str, cid: u16) -> String {
    format!("it sent {what} for the command {cid}, which is not in flight or needs none")
}
