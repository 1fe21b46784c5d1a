//! PDUs to the host: completions, and the data of reads.
//!
//! The header of a C2HData PDU is written directly before the data, into the room that every buffer
//! has. If flow control is disabled, the last data PDU of a read that has succeeded is also its
//! completion.

use super::state::{Asked, Nvme};
use crate::net::{
    connection::Connection,
    core::Core,
    flights::{ClientRequest, Contents},
    pool::HEADER_ROOM_BYTES,
};
use diskwright_nvme::wire::{
    Completion, DataPdu, Digests, PduFlags, PduHeader, PduKind, Status, nvm, pdu::DIGEST_BYTES,
};
use diskwright_store::IoBuf;
use std::io;

/// The longest header with its digest and padding: data begin at an offset of a byte.
const HEAD_BYTES_MAX: usize = 256;

/// What the header of a PDU to the host depends on.
#[derive(Debug, Clone, Copy)]
pub(super) struct PduRoom {
    kind: PduKind,
    flags: PduFlags,
    digests: Digests,
    alignment_bytes: usize,
}

/// The bytes of a header with its digest and padding.
struct Head {
    bytes: [u8; HEAD_BYTES_MAX],
    len: usize,
}

impl PduRoom {
    pub(super) fn of(conn: &Connection<Nvme>, kind: PduKind, flags: PduFlags) -> Self {
        let (digests, alignment_bytes) = (conn.session.digests, conn.session.alignment_bytes);
        Self { kind, flags, digests, alignment_bytes }
    }

    fn digest_bytes(&self) -> usize {
        if self.digests.contains(Digests::HEADER) { DIGEST_BYTES } else { 0 }
    }

    /// The common header of a PDU with so many bytes of data.
    pub(super) fn header(&self, data_bytes: usize) -> PduHeader {
        let header_bytes = self.kind.header_bytes();
        let mut flags = self.flags;
        flags.set(PduFlags::HEADER_DIGEST, self.digests.contains(Digests::HEADER));
        let mut total_bytes = usize::from(header_bytes) + self.digest_bytes();
        let mut data_offset_bytes = 0;
        if data_bytes > 0 {
            let has_digest = self.digests.contains(Digests::DATA);
            flags.set(PduFlags::DATA_DIGEST, has_digest);
            total_bytes = total_bytes.next_multiple_of(self.alignment_bytes);
            data_offset_bytes = total_bytes as u8;
            total_bytes += data_bytes + if has_digest { DIGEST_BYTES } else { 0 };
        }
        PduHeader { kind: self.kind, flags, header_bytes, data_offset_bytes, total_bytes: total_bytes as u32 }
    }

    fn head(&self, header: &[u8], data_bytes: usize) -> Head {
        let mut head = Head { bytes: [0; HEAD_BYTES_MAX], len: header.len() };
        head.bytes[..header.len()].copy_from_slice(header);
        if self.digests.contains(Digests::HEADER) {
            let digest = crc32c::crc32c(header).to_le_bytes();
            head.bytes[header.len()..header.len() + DIGEST_BYTES].copy_from_slice(&digest);
            head.len += DIGEST_BYTES;
        }
        if data_bytes > 0 {
            head.len = head.len.next_multiple_of(self.alignment_bytes);
        }
        head
    }
}

impl std::ops::Deref for Head {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

impl Core<Nvme> {
    /// Puts a PDU without data into the outbox. `header` is the whole PDU but its digest.
    pub(super) fn put_header(&mut self, conn: &mut Connection<Nvme>, header: &[u8]) {
        conn.outbox.put(header, &mut self.pool);
        if conn.session.digests.contains(Digests::HEADER) {
            conn.outbox.put(&crc32c::crc32c(header).to_le_bytes(), &mut self.pool);
        }
    }

    /// Puts a completion into the outbox. The head of the queue is filled in.
    pub(super) fn complete_with(&mut self, conn: &mut Connection<Nvme>, done: Completion) {
        let mut done = done;
        done.sq_head = 0xffff;
        if let Some(queue) = conn.session.queue_mut()
            && let Some(head) = &mut queue.head
        {
            *head = if *head + 1 >= queue.entries { 0 } else { *head + 1 };
            done.sq_head = *head;
        }
        let room = PduRoom::of(conn, PduKind::Response, PduFlags::empty());
        let mut pdu = [0; PduHeader::BYTES + Completion::BYTES];
        pdu[..PduHeader::BYTES].copy_from_slice(&room.header(0).encode());
        pdu[PduHeader::BYTES..].copy_from_slice(&done.encode());
        self.put_header(conn, &pdu);
    }

    /// Completes a command without a result.
    pub(super) fn complete(&mut self, conn: &mut Connection<Nvme>, cid: u16, status: Status) {
        self.complete_with(conn, Completion { cid, status, ..Completion::default() });
    }

    /// Completes an I/O command, and counts it.
    pub(super) fn finish(&mut self, conn: &mut Connection<Nvme>, asked: &ClientRequest<Asked>, status: Status) {
        self.complete(conn, asked.own.cid, status);
        conn.session.commands = conn.session.commands.saturating_sub(1);
        conn.session.counted.remove(asked.own.counted);
        self.count(conn, asked, !status.is_success());
    }

    /// Puts data for the host into the outbox, `data_bytes` in one buffer.
    fn put_data(&mut self, conn: &mut Connection<Nvme>, cid: u16, flags: PduFlags, buf: IoBuf, data_bytes: usize) {
        let room = PduRoom::of(conn, PduKind::ControllerData, flags);
        let data = DataPdu { cid, tag: 0, offset_bytes: 0, len_bytes: data_bytes as u32 };
        let head = room.head(&data.encode(&room.header(data_bytes)), data_bytes);
        if !room.digests.contains(Digests::DATA) {
            return conn.outbox.put_contents(&head, buf, data_bytes);
        }
        let digest = crc32c::crc32c(&buf[HEADER_ROOM_BYTES..][..data_bytes]);
        // The digest comes directly after its data, so what was put before goes before them.
        conn.outbox.seal();
        conn.outbox.put_contents(&head, buf, data_bytes);
        conn.outbox.put(&digest.to_le_bytes(), &mut self.pool);
        conn.outbox.seal();
    }

    /// Answers an admin command with data.
    pub(super) fn put_page(&mut self, conn: &mut Connection<Nvme>, cid: u16, page: &[u8]) {
        let mut buf = self.pool.take(page.len());
        buf[HEADER_ROOM_BYTES..][..page.len()].copy_from_slice(page);
        self.put_data(conn, cid, PduFlags::LAST, buf, page.len());
        self.complete(conn, cid, Status::SUCCESS);
    }

    /// Answers an I/O command with a page.
    pub(super) fn finish_with(&mut self, conn: &mut Connection<Nvme>, asked: &ClientRequest<Asked>, page: &[u8]) {
        let mut buf = self.pool.take(page.len());
        buf[HEADER_ROOM_BYTES..][..page.len()].copy_from_slice(page);
        self.put_data(conn, asked.own.cid, PduFlags::LAST, buf, page.len());
        self.finish(conn, asked, Status::SUCCESS);
    }

    /// Puts the result of an I/O command into the outbox.
    pub(super) fn put_reply(
        &mut self,
        conn: &mut Connection<Nvme>,
        asked: &ClientRequest<Asked>,
        result: io::Result<()>,
        contents: Contents,
    ) {
        let Asked { cid, opcode, slot, counted, .. } = asked.own;
        let compared = if opcode == nvm::COMPARE { conn.session.comparing.remove(slot) } else { None };
        let mut status = match &result {
            Ok(()) => Status::SUCCESS,
            Err(error) => self.status_of(conn, asked, error),
        };
        match (opcode, contents.first) {
            (nvm::READ, Some(buf)) if result.is_ok() => {
                let data_bytes = asked.len_bytes as usize;
                if conn.session.queue().is_some_and(|queue| queue.head.is_none()) {
                    self.put_data(conn, cid, PduFlags::LAST | PduFlags::SUCCESS, buf, data_bytes);
                    conn.session.commands = conn.session.commands.saturating_sub(1);
                    conn.session.counted.remove(counted);
                    return self.count(conn, asked, false);
                }
                self.put_data(conn, cid, PduFlags::LAST, buf, data_bytes);
            }
            (nvm::COMPARE, found) if result.is_ok() => {
                let data_of = |buf: &IoBuf| buf[HEADER_ROOM_BYTES..][..asked.len_bytes as usize].to_vec();
                let wanted = compared.as_ref().and_then(|contents| contents.first.as_ref());
                if found.as_ref().map(data_of) != wanted.map(data_of) {
                    status = Status::COMPARE_FAILED;
                }
                found.into_iter().for_each(|buf| self.pool.give(buf));
            }
            (_, buf) => buf.into_iter().for_each(|buf| self.pool.give(buf)),
        }
        let kept = compared.into_iter().flat_map(Contents::into_bufs);
        contents.more.into_iter().chain(kept).for_each(|buf| self.pool.give(buf));
        self.finish(conn, asked, status);
    }

    fn status_of(&self, conn: &Connection<Nvme>, asked: &ClientRequest<Asked>, error: &io::Error) -> Status {
        let writes = !matches!(asked.own.opcode, nvm::READ | nvm::COMPARE | nvm::VERIFY);
        let status = Status::of_error(error, writes);
        let export = self.exports.here(asked.export as usize).map_or("", |export| export.name.as_str());
        let (kind, offset_bytes, len_bytes) = (asked.kind, asked.offset_bytes, asked.len_bytes);
        if matches!(status, Status::WRITE_FAULT | Status::UNRECOVERED_READ | Status::NO_SPACE) {
            tracing::warn!(%export, peer = %conn.peer, ?kind, offset_bytes, len_bytes, %error, "a command failed");
        } else {
            tracing::debug!(%export, peer = %conn.peer, ?kind, offset_bytes, len_bytes, %error, "a command was refused");
        }
        status
    }
}
