//! Receiving: decodes what the server sends, and completes calls.
//!
//! ```text
//!   socket ─▶ stage ─▶ header ─┬─ data ─▶ into the slot's buffer: first from the stage,
//!                              │          then directly from the socket
//!                              ├─ error, hole, status ─▶ gathered ─▶ parsed
//!                              └─ done ─▶ the call has ended
//! ```
//!
//! Everything the server sends is checked against the call that it answers. The connection is ended
//! by an unknown cookie, by data outside the call's range or sent twice, and by a success with
//! bytes missing. Gathered payloads are limited to what such a message may contain, and their
//! memory grows as the bytes arrive.

use super::{
    ClientError,
    tables::{Call, Tables},
    transport::Transport,
};
use crate::wire::{
    Chunk, ChunkFlags, ChunkKind, Command, Decoded, Descriptor, ErrorCode, Framing, ReplyHeader, STRING_BYTES_MAX,
    WireError,
    chunk::{DATA_OFFSET_BYTES, GATHERED_BYTES_MAX, data_offset},
};
use std::io::{self, IoSliceMut};

/// Size of the stage: many small answers are received at once.
const STAGE_BYTES: usize = 128 << 10;

/// Part of the stage used while large reads are in flight: little more than headers, so that their
/// data is received directly into the buffers.
const STAGE_SMALL_BYTES: usize = 4 << 10;

/// Maximum size of an error payload: its message, and fields that later versions may add.
const ERROR_BYTES_MAX: u64 = STRING_BYTES_MAX as u64 + 64;

/// Why nothing more can be received on a connection.
#[derive(Debug)]
pub(super) enum Fault {
    /// The socket failed.
    Io(io::Error),
    /// A malformed message.
    Wire(WireError),
    /// A well-formed message that violates the protocol.
    Protocol(String),
}

impl From<WireError> for Fault {
    fn from(error: WireError) -> Self {
        Self::Wire(error)
    }
}

/// What client and server agreed on, as far as answers depend on it.
#[derive(Debug, Clone, Copy)]
pub(super) struct ReplyContext {
    pub(super) framing: Framing,
    pub(super) allocation_context: Option<u32>,
    pub(super) depth_context: Option<u32>,
}

#[derive(Debug, Default)]
enum State {
    /// Expecting a header.
    #[default]
    Header,
    /// Expecting the offset of a data chunk.
    Offset { call: u32, flags: ChunkFlags, data_bytes: u64 },
    /// Receiving data.
    Data { call: u32, at_bytes: u64, left_bytes: u64, last: bool },
    /// Gathering a payload that is parsed as a whole.
    Gather { call: u32, flags: ChunkFlags, kind: ChunkKind, payload: Vec<u8>, left_bytes: usize },
}

/// The receiving side of one connection; see the module documentation.
#[derive(Debug)]
pub(super) struct Inbound {
    stage: Box<[u8]>,
    taken: usize,
    filled: usize,
    state: State,
    /// Calls that were answered completely.
    pub(super) answered: Vec<u32>,
}

impl Inbound {
    pub(super) fn new() -> Self {
        let stage = vec![0; STAGE_BYTES].into_boxed_slice();
        Self { stage, taken: 0, filled: 0, state: State::Header, answered: Vec::new() }
    }

    /// Resets the state for a new connection.
    pub(super) fn clear(&mut self) {
        (self.taken, self.filled, self.state) = (0, 0, State::Header);
        self.answered.clear();
    }

    /// Receives until the socket has no more data. Returns whether any data arrived.
    pub(super) fn receive(
        &mut self,
        transport: &mut Transport,
        tables: &mut Tables,
        agreed: ReplyContext,
        peer: &str,
    ) -> Result<bool, Fault> {
        let mut came = false;
        loop {
            let (received, room) = match self.fill(transport, tables) {
                Ok(pair) => pair,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(came),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(Fault::Io(error)),
            };
            if received == 0 {
                let gone = io::Error::new(io::ErrorKind::UnexpectedEof, "the server closed the connection");
                return Err(Fault::Io(gone));
            }
            came = true;
            while self.step(tables, agreed, peer)? {}
            // If the socket returned less than requested, it has no more data. (TLS returns one
            // record at a time.)
            if received < room && !transport.is_tls() {
                return Ok(true);
            }
        }
    }

    /// Receives once: into the buffer for the current data, and the rest into the stage. Returns
    /// the number of bytes received and the number requested.
    fn fill(&mut self, transport: &mut Transport, tables: &mut Tables) -> io::Result<(usize, usize)> {
        if self.taken > 0 {
            self.stage.copy_within(self.taken..self.filled, 0);
            self.filled -= self.taken;
            self.taken = 0;
        }
        let limit = if tables.large_reads > 0 { STAGE_SMALL_BYTES } else { STAGE_BYTES };
        let stage = &mut self.stage[self.filled..limit.max(self.filled + 1)];
        if let State::Data { call, at_bytes, left_bytes, .. } = &mut self.state
            && let Some(place) = place(tables, *call, *at_bytes, *left_bytes)
        {
            let room = place.len() + stage.len();
            let received = transport.recv(&mut [IoSliceMut::new(place), IoSliceMut::new(stage)])?;
            let direct = (received as u64).min(*left_bytes);
            *at_bytes += direct;
            *left_bytes -= direct;
            self.filled += received - direct as usize;
            return Ok((received, room));
        }
        let room = stage.len();
        let received = transport.recv(&mut [IoSliceMut::new(stage)])?;
        self.filled += received;
        Ok((received, room))
    }

    /// Decodes the next message from the stage. Returns `false` if more bytes are needed.
    fn step(&mut self, tables: &mut Tables, agreed: ReplyContext, peer: &str) -> Result<bool, Fault> {
        let staged = &self.stage[self.taken..self.filled];
        match &mut self.state {
            State::Header => match ReplyHeader::decode(staged, agreed.framing)? {
                Decoded::Need(_) => Ok(false),
                Decoded::Value(header, taken) => {
                    self.taken += taken;
                    self.header(&header, tables, agreed.framing, peer)?;
                    Ok(true)
                }
            },
            State::Offset { call, flags, data_bytes } => {
                let Some(offset) = staged.first_chunk::<DATA_OFFSET_BYTES>() else { return Ok(false) };
                self.taken += DATA_OFFSET_BYTES;
                let (index, at_bytes, left_bytes) = (*call, data_offset(*offset), *data_bytes);
                let last = flags.contains(ChunkFlags::DONE);
                let call = tables.calls.get_mut(index).ok_or_else(unknown)?;
                cover(call, at_bytes, left_bytes)?;
                self.state = State::Data { call: index, at_bytes, left_bytes, last };
                Ok(true)
            }
            State::Data { call, at_bytes, left_bytes, last } => {
                let count = staged.len().min(usize::try_from(*left_bytes).unwrap_or(usize::MAX));
                if let Some(place) = place(tables, *call, *at_bytes, count as u64) {
                    place.copy_from_slice(&staged[..count]);
                }
                self.taken += count;
                *at_bytes += count as u64;
                *left_bytes -= count as u64;
                if *left_bytes > 0 {
                    return Ok(false);
                }
                let (call, last) = (*call, *last);
                self.state = State::Header;
                if last {
                    self.end(call, tables)?;
                }
                Ok(true)
            }
            State::Gather { call, flags, kind, payload, left_bytes } => {
                let count = staged.len().min(*left_bytes);
                payload.extend_from_slice(&staged[..count]);
                self.taken += count;
                *left_bytes -= count;
                if *left_bytes > 0 {
                    return Ok(false);
                }
                let (call, flags, kind, payload) = (*call, *flags, *kind, std::mem::take(payload));
                self.state = State::Header;
                self.chunk(call, flags, kind, &payload, tables, agreed, peer)?;
                Ok(true)
            }
        }
    }

    fn header(&mut self, header: &ReplyHeader, tables: &mut Tables, framing: Framing, peer: &str) -> Result<(), Fault> {
        let index = tables.find(header.cookie()).ok_or_else(|| {
            let cookie = header.cookie();
            Fault::Protocol(format!("it answered a request with the cookie {cookie:#x}, which is not in flight"))
        })?;
        let call = tables.calls.get_mut(index).ok_or_else(unknown)?;
        match *header {
            ReplyHeader::Simple { error, .. } => {
                if framing != Framing::Simple && call.command == Command::READ {
                    return Err(Fault::Protocol(
                        "it sent a simple reply to a READ although structured replies were negotiated".into(),
                    ));
                }
                if error != ErrorCode::NONE {
                    call.error = Some(refusal(call, error, "", peer));
                } else if call.command == Command::BLOCK_STATUS {
                    return Err(Fault::Protocol("it answered BLOCK_STATUS without a status".into()));
                } else if call.command == Command::READ {
                    let (at_bytes, left_bytes) = (call.offset_bytes, call.len_bytes);
                    cover(call, at_bytes, left_bytes)?;
                    self.state = State::Data { call: index, at_bytes, left_bytes, last: true };
                    return Ok(());
                }
                self.end(index, tables)
            }
            ReplyHeader::Chunk { flags, kind: ChunkKind::OFFSET_DATA, payload_bytes, .. } => {
                let data_bytes = payload_bytes.checked_sub(DATA_OFFSET_BYTES as u64).filter(|&bytes| bytes > 0);
                match data_bytes {
                    Some(data_bytes) if call.command == Command::READ && data_bytes <= call.len_bytes => {
                        self.state = State::Offset { call: index, flags, data_bytes };
                        Ok(())
                    }
                    _ => Err(Fault::Protocol(format!(
                        "it sent a data chunk of {payload_bytes} bytes in answer to {} of {} bytes",
                        call.command, call.len_bytes
                    ))),
                }
            }
            ReplyHeader::Chunk { flags, kind, payload_bytes, .. } => {
                let limit = if kind.is_error() {
                    ERROR_BYTES_MAX
                } else if call.command == Command::BLOCK_STATUS {
                    GATHERED_BYTES_MAX
                } else {
                    // The payload of a hole chunk.
                    12
                };
                if payload_bytes > limit {
                    return Err(
                        WireError::TooLong { what: "the payload of a chunk", found: payload_bytes, limit }.into()
                    );
                }
                let left_bytes = payload_bytes as usize;
                self.state = State::Gather { call: index, flags, kind, payload: Vec::new(), left_bytes };
                Ok(())
            }
        }
    }

    /// Handles a chunk whose payload is complete.
    #[expect(clippy::too_many_arguments, reason = "a chunk, and the state that it is checked against")]
    fn chunk(
        &mut self,
        index: u32,
        flags: ChunkFlags,
        kind: ChunkKind,
        payload: &[u8],
        tables: &mut Tables,
        agreed: ReplyContext,
        peer: &str,
    ) -> Result<(), Fault> {
        let call = tables.calls.get_mut(index).ok_or_else(unknown)?;
        let last = flags.contains(ChunkFlags::DONE);
        match Chunk::parse(kind, payload)? {
            Chunk::None if !last => return Err(Fault::Protocol("it sent an empty chunk that is not the last".into())),
            Chunk::None => {}
            Chunk::Error { code, message, offset_bytes } => {
                let mut refused = refusal(call, code, message, peer);
                if let (ClientError::Request { offset_bytes: at_bytes, .. }, Some(offset_bytes)) =
                    (&mut refused, offset_bytes)
                {
                    *at_bytes = offset_bytes;
                }
                call.error.get_or_insert(refused);
            }
            Chunk::Hole { offset_bytes, len_bytes } if call.command == Command::READ => {
                cover(call, offset_bytes, len_bytes.into())?;
                if let Some(place) = place(tables, index, offset_bytes, len_bytes.into()) {
                    place.fill(0);
                }
            }
            Chunk::BlockStatus(status) if call.command == Command::BLOCK_STATUS => {
                let (slot_index, len_bytes) = (call.slot, call.len_bytes);
                let Some(slot) = tables.slots.get_mut(slot_index) else { return Err(unknown()) };
                let found = if Some(status.context_id) == agreed.allocation_context {
                    &mut slot.status.allocation
                } else if Some(status.context_id) == agreed.depth_context {
                    &mut slot.status.depth
                } else {
                    return Err(Fault::Protocol(format!(
                        "it sent the status in context {}, which was not negotiated",
                        status.context_id
                    )));
                };
                if !found.is_empty() {
                    return Err(Fault::Protocol("it sent the status in one context twice".into()));
                }
                let mut total_bytes = 0u64;
                for Descriptor { len_bytes: run_bytes, status } in status.descriptors {
                    if run_bytes == 0 || total_bytes >= len_bytes {
                        return Err(Fault::Protocol(
                            "it sent the status of ranges that are empty or beyond the requested range".into(),
                        ));
                    }
                    // The last run may extend beyond the requested range.
                    let run_bytes = run_bytes.min(len_bytes - total_bytes);
                    total_bytes += run_bytes;
                    found.push(Descriptor { len_bytes: run_bytes, status });
                }
            }
            Chunk::Hole { .. } | Chunk::BlockStatus(_) => {
                return Err(Fault::Protocol(format!("it answered {} with a chunk for another command", call.command)));
            }
        }
        if last { self.end(index, tables) } else { Ok(()) }
    }

    /// Handles the end of an answer.
    fn end(&mut self, index: u32, tables: &mut Tables) -> Result<(), Fault> {
        let call = tables.calls.get_mut(index).ok_or_else(unknown)?;
        if call.error.is_none() {
            let (start, end) = (call.offset_bytes, call.offset_bytes + call.len_bytes);
            if call.command == Command::READ && !call.coverage.is_exactly(start, end) {
                let gap = call.coverage.first_gap(start);
                return Err(Fault::Protocol(format!(
                    "it answered READ of {} bytes at {start} with success, but the bytes from {gap} on are missing",
                    call.len_bytes
                )));
            }
            if call.command == Command::WRITE && call.unsent {
                return Err(Fault::Protocol(
                    "it answered WRITE with success before it had received the whole payload".into(),
                ));
            }
            if call.command == Command::BLOCK_STATUS
                && tables.slots.get(call.slot).is_none_or(|slot| slot.status.allocation.is_empty())
            {
                return Err(Fault::Protocol("it answered BLOCK_STATUS without a status".into()));
            }
        }
        // A second answer must not find the call.
        call.generation = 0;
        self.answered.push(index);
        Ok(())
    }
}

/// Records the range of received data of a call.
fn cover(call: &mut Call, at_bytes: u64, len_bytes: u64) -> Result<(), Fault> {
    let end_bytes = call.offset_bytes + call.len_bytes;
    match at_bytes.checked_add(len_bytes) {
        Some(stop) if at_bytes >= call.offset_bytes && stop <= end_bytes => {
            call.coverage.add(at_bytes, stop).map_err(|what| Fault::Protocol(what.into()))
        }
        _ => Err(Fault::Protocol(format!(
            "it sent {len_bytes} bytes at offset {at_bytes} in answer to a READ from {} to {end_bytes}",
            call.offset_bytes
        ))),
    }
}

/// The memory in the slot's buffer for a range of the export.
fn place(tables: &mut Tables, call: u32, at_bytes: u64, len_bytes: u64) -> Option<&mut [u8]> {
    let slot = tables.calls.get(call)?.slot;
    let slot = tables.slots.get_mut(slot)?;
    let start = slot.place(at_bytes);
    slot.memory.get_mut(start..start.checked_add(usize::try_from(len_bytes).ok()?)?)
}

fn refusal(call: &Call, code: ErrorCode, message: &str, peer: &str) -> ClientError {
    ClientError::Request {
        peer: peer.to_owned(),
        command: call.command,
        offset_bytes: call.offset_bytes,
        len_bytes: call.len_bytes,
        code,
        message: message.to_owned(),
    }
}

fn unknown() -> Fault {
    Fault::Protocol("it continued to answer a request that has ended".into())
}
