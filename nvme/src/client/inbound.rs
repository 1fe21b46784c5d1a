//! Receiving: PDUs of the controller, and the data of reads into their buffers.
//!
//! ```text
//!   socket ─▶ stage ─▶ header ─┬─ C2HData ─▶ the slot's buffer: first from the stage,
//!                              │             then directly from the socket ─▶ digest
//!                              ├─ R2T ─▶ asked
//!                              └─ CapsuleResp ─▶ ended
//! ```
//!
//! Everything is checked against the command that it answers: an id that is not in flight, data
//! that were not asked for, a success with bytes missing, and a digest that does not match end the
//! connection.

use super::{session::check_header_digest, tables::Tables};
use crate::wire::{
    Completion, DataPdu, Digests, PduError, PduFlags, PduHeader, PduKind, Status, Terminate, nvm, pdu::DIGEST_BYTES,
};
use std::io::{self, IoSliceMut};

/// Size of the stage: many completions are received at once.
const STAGE_BYTES: usize = 128 << 10;

/// Part of the stage used while large reads are in flight, so that their data are received directly
/// into the buffers.
const STAGE_SMALL_BYTES: usize = 4 << 10;

/// Why nothing more can be received on a connection.
#[derive(Debug)]
pub(super) enum Fault {
    Io(io::Error),
    Wire(PduError),
    Protocol(String),
}

impl From<PduError> for Fault {
    fn from(error: PduError) -> Self {
        Self::Wire(error)
    }
}

#[derive(Debug, Clone, Copy)]
enum State {
    Header,
    /// Receiving data of a read, from this offset on.
    Data {
        cid: u16,
        at: usize,
        end: usize,
        is_last: bool,
    },
    /// The digest of the data that were received from `start` on.
    Digest {
        cid: u16,
        start: usize,
        end: usize,
        is_last: bool,
    },
}

/// The receiving side of one connection.
#[derive(Debug)]
pub(super) struct Inbound {
    digests: Digests,
    stage: Box<[u8]>,
    taken: usize,
    filled: usize,
    state: State,
    /// Start of the data that are being received.
    data_start: usize,
    /// Commands whose completion has come.
    pub(super) ended: Vec<u16>,
    /// Data that the controller asks for.
    pub(super) asked: Vec<DataPdu>,
}

impl Inbound {
    pub(super) fn new(digests: Digests) -> Self {
        let stage = vec![0; STAGE_BYTES].into_boxed_slice();
        let (ended, asked) = (Vec::new(), Vec::new());
        Self { digests, stage, taken: 0, filled: 0, state: State::Header, data_start: 0, ended, asked }
    }

    /// Receives until the socket has no more data. Returns whether any data arrived.
    pub(super) fn receive(
        &mut self,
        mut read: impl FnMut(&mut [IoSliceMut<'_>]) -> io::Result<usize>,
        tables: &mut Tables,
    ) -> Result<bool, Fault> {
        let mut came = false;
        loop {
            let (received, room) = match self.fill(&mut read, tables) {
                Ok(pair) => pair,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(came),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(Fault::Io(error)),
            };
            if received == 0 {
                let gone = io::Error::new(io::ErrorKind::UnexpectedEof, "the target closed the connection");
                return Err(Fault::Io(gone));
            }
            came = true;
            while self.step(tables)? {}
            // If the socket returned less than requested, it has no more data.
            if received < room {
                return Ok(true);
            }
        }
    }

    /// Receives once: into the buffer for the current data, and the rest into the stage. Returns
    /// the number of bytes received and the number requested.
    fn fill(
        &mut self,
        read: &mut impl FnMut(&mut [IoSliceMut<'_>]) -> io::Result<usize>,
        tables: &mut Tables,
    ) -> io::Result<(usize, usize)> {
        if self.taken > 0 {
            self.stage.copy_within(self.taken..self.filled, 0);
            self.filled -= self.taken;
            self.taken = 0;
        }
        let limit = if tables.large_reads > 0 { STAGE_SMALL_BYTES } else { STAGE_BYTES };
        let stage = &mut self.stage[self.filled..limit.max(self.filled + 1)];
        if let State::Data { cid, at, end, .. } = &mut self.state
            && let Some(place) = tables.place(*cid, *at..*end)
        {
            let room = place.len() + stage.len();
            let received = read(&mut [IoSliceMut::new(place), IoSliceMut::new(stage)])?;
            let direct = received.min(*end - *at);
            *at += direct;
            self.filled += received - direct;
            return Ok((received, room));
        }
        let room = stage.len();
        let received = read(&mut [IoSliceMut::new(stage)])?;
        self.filled += received;
        Ok((received, room))
    }

    /// Decodes the next message from the stage. Returns `false` if more bytes are needed.
    fn step(&mut self, tables: &mut Tables) -> Result<bool, Fault> {
        let staged = &self.stage[self.taken..self.filled];
        match self.state {
            State::Header => self.header(tables),
            State::Data { cid, at, end, is_last } => {
                let count = staged.len().min(end - at);
                if let Some(place) = tables.place(cid, at..at + count) {
                    place.copy_from_slice(&staged[..count]);
                }
                self.taken += count;
                if at + count < end {
                    self.state = State::Data { cid, at: at + count, end, is_last };
                    return Ok(false);
                }
                if self.digests.contains(Digests::DATA) {
                    self.state = State::Digest { cid, start: self.data_start, end, is_last };
                } else {
                    self.data_ended(cid, is_last, tables)?;
                }
                Ok(true)
            }
            State::Digest { cid, start, end, is_last } => {
                let Some(&digest) = staged.first_chunk::<DIGEST_BYTES>() else { return Ok(false) };
                self.taken += DIGEST_BYTES;
                let computed = tables.place(cid, start..end).map(|data| crc32c::crc32c(data));
                if computed != Some(u32::from_le_bytes(digest)) {
                    return Err(Fault::Protocol("the digest of data of a read does not match".into()));
                }
                self.data_ended(cid, is_last, tables)?;
                Ok(true)
            }
        }
    }

    /// Data of a read have been received; with `succeeds`, this was its completion, too.
    fn data_ended(&mut self, cid: u16, succeeds: bool, tables: &mut Tables) -> Result<(), Fault> {
        self.state = State::Header;
        if succeeds { self.completed(cid, Status::SUCCESS, tables) } else { Ok(()) }
    }

    fn header(&mut self, tables: &mut Tables) -> Result<bool, Fault> {
        let staged = &self.stage[self.taken..self.filled];
        let Some(header) = PduHeader::decode(staged)? else { return Ok(false) };
        let (header_bytes, data_bytes) = header.check(self.digests)?;
        let Some(bytes) = staged.get(..header_bytes) else { return Ok(false) };
        check_header_digest(self.digests, &header, bytes)?;
        let Some(front) = bytes.first_chunk::<{ DataPdu::BYTES }>() else { return Ok(false) };
        let data = DataPdu::decode(front);
        match header.kind {
            PduKind::Response => {
                let done = bytes[PduHeader::BYTES..].first_chunk().map(Completion::decode).unwrap_or_default();
                self.taken += header_bytes;
                self.completed(done.cid, done.status, tables)?;
            }
            PduKind::ControllerData => {
                let call = tables.call(data.cid).filter(|call| call.opcode == nvm::READ && call.status.is_none());
                let Some(call) = call else { return Err(unknown("data", data.cid)) };
                let (at, end) = (call.moved_bytes, call.moved_bytes + data_bytes);
                let is_right = data.offset_bytes as usize == at && data.len_bytes as usize == data_bytes;
                if !is_right || data_bytes == 0 || end as u64 > call.len_bytes {
                    return Err(Fault::Protocol(format!(
                        "it sent {} bytes at {} of a read of {} bytes, of which {at} had come",
                        data.len_bytes, data.offset_bytes, call.len_bytes
                    )));
                }
                call.moved_bytes = end;
                self.taken += header_bytes;
                self.data_start = at;
                let is_last = header.flags.contains(PduFlags::SUCCESS);
                self.state = State::Data { cid: data.cid, at, end, is_last };
            }
            PduKind::ReadyToTransfer => {
                let call = tables.call(data.cid).filter(|call| call.opcode == nvm::WRITE && call.status.is_none());
                let Some(call) = call else { return Err(unknown("an R2T", data.cid)) };
                let end = call.moved_bytes as u64 + u64::from(data.len_bytes);
                if data.offset_bytes as usize != call.moved_bytes || data.len_bytes == 0 || end > call.len_bytes {
                    return Err(Fault::Protocol(format!(
                        "it asks for {} bytes at {} of a write of {} bytes, of which it has asked for {}",
                        data.len_bytes, data.offset_bytes, call.len_bytes, call.moved_bytes
                    )));
                }
                call.moved_bytes = end as usize;
                self.taken += header_bytes;
                self.asked.push(data);
            }
            PduKind::ControllerTerminate => {
                let status = Terminate::decode(front).status;
                return Err(Fault::Protocol(format!("it ended the connection with the fatal error status {status}")));
            }
            kind => return Err(PduError::Kind { found: kind as u8 }.into()),
        }
        Ok(true)
    }

    fn completed(&mut self, cid: u16, status: Status, tables: &mut Tables) -> Result<(), Fault> {
        let call = tables.call(cid).filter(|call| call.status.is_none());
        let Some(call) = call else { return Err(unknown("a completion", cid)) };
        let moves = matches!(call.opcode, nvm::READ | nvm::WRITE);
        if status.is_success() && moves && call.moved_bytes as u64 != call.len_bytes {
            return Err(Fault::Protocol(format!(
                "it completed a command of {} bytes with success when {} had been transferred",
                call.len_bytes, call.moved_bytes
            )));
        }
        call.status = Some(status);
        self.ended.push(cid);
        Ok(())
    }
}

fn unknown(what: &str, cid: u16) -> Fault {
    Fault::Protocol(format!("it sent {what} for the command {cid}, which is not in flight or needs none"))
}
