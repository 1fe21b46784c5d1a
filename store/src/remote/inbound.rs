//! Receiving: headers, and the data of reads into their buffers.
//!
//! ```text
//!   socket ─▶ stage ─▶ header ─┬─ no data ─▶ the next header
//!                              └─ data ─▶ the slot's buffer: first from the stage,
//!                                         then directly from the socket ─▶ tail
//! ```
//!
//! The protocol checks each header against the command that it answers.

use super::{Broken, Calls, Data, Heard, Protocol, connection::closed};
use crate::Outbound;
use std::io::{self, IoSliceMut};

/// Size of the stage: many answers are received at once.
const STAGE_BYTES: usize = 128 << 10;

/// Part of the stage used while large reads are in flight, so that their data are received directly
/// into the buffers.
const STAGE_SMALL_BYTES: usize = 4 << 10;

/// Why nothing more can be received on a connection.
#[derive(Debug)]
pub(super) enum Fault {
    Io(io::Error),
    Broken(Broken),
}

#[derive(Debug, Clone, Copy)]
enum State {
    Header,
    /// Receiving data of a read, from offset `at` on.
    Data {
        data: Data,
        at: usize,
    },
    /// Receiving what follows the data.
    Tail(Data),
}

/// The receiving side of one connection.
#[derive(Debug)]
pub(super) struct Inbound {
    stage: Box<[u8]>,
    taken: usize,
    filled: usize,
    state: State,
}

impl Inbound {
    pub(super) fn new() -> Self {
        Self { stage: vec![0; STAGE_BYTES].into_boxed_slice(), taken: 0, filled: 0, state: State::Header }
    }

    /// Forgets what was received of an earlier connection.
    pub(super) fn clear(&mut self) {
        (self.taken, self.filled, self.state) = (0, 0, State::Header);
    }

    /// Receives until the socket has no more data. Returns whether any data arrived.
    pub(super) fn receive(
        &mut self,
        mut read: impl FnMut(&mut [IoSliceMut<'_>]) -> io::Result<usize>,
        protocol: &mut impl Protocol,
        calls: &mut Calls,
        outbound: &mut Outbound,
    ) -> Result<bool, Fault> {
        let mut came = false;
        loop {
            let (received, room) = match self.fill(&mut read, calls) {
                Ok(pair) => pair,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(came),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(Fault::Io(error)),
            };
            if received == 0 {
                return Err(Fault::Io(closed()));
            }
            came = true;
            while self.step(protocol, calls, outbound).map_err(Fault::Broken)? {}
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
        calls: &mut Calls,
    ) -> io::Result<(usize, usize)> {
        if self.taken > 0 {
            self.stage.copy_within(self.taken..self.filled, 0);
            self.filled -= self.taken;
            self.taken = 0;
        }
        let limit = if calls.large_reads > 0 { STAGE_SMALL_BYTES } else { STAGE_BYTES };
        let stage = &mut self.stage[self.filled..limit.max(self.filled + 1)];
        if let State::Data { data, at } = &mut self.state
            && let Some(memory) = calls.memory_mut(data.call, *at..data.end)
        {
            let room = memory.len() + stage.len();
            let received = read(&mut [IoSliceMut::new(memory), IoSliceMut::new(stage)])?;
            let direct = received.min(data.end - *at);
            *at += direct;
            self.filled += received - direct;
            return Ok((received, room));
        }
        let room = stage.len();
        let received = read(&mut [IoSliceMut::new(stage)])?;
        self.filled += received;
        Ok((received, room))
    }

    /// Handles what comes next on the stage. Returns `false` if more bytes are needed.
    fn step(
        &mut self,
        protocol: &mut impl Protocol,
        calls: &mut Calls,
        outbound: &mut Outbound,
    ) -> Result<bool, Broken> {
        let staged = &self.stage[self.taken..self.filled];
        match self.state {
            State::Header => {
                let Some(Heard { taken_bytes, data }) = protocol.header(staged, calls, outbound)? else {
                    return Ok(false);
                };
                self.taken += taken_bytes;
                self.state = data.map_or(State::Header, |data| State::Data { data, at: data.start });
            }
            State::Data { data, at } => {
                let count = staged.len().min(data.end - at);
                if let Some(memory) = calls.memory_mut(data.call, at..at + count) {
                    memory.copy_from_slice(&staged[..count]);
                }
                self.taken += count;
                if at + count < data.end {
                    self.state = State::Data { data, at: at + count };
                    return Ok(false);
                }
                self.state = State::Tail(data);
            }
            State::Tail(data) => {
                let Some(tail) = staged.get(..data.tail_bytes) else { return Ok(false) };
                protocol.data_received(&data, tail, calls, outbound)?;
                self.taken += data.tail_bytes;
                self.state = State::Header;
            }
        }
        Ok(true)
    }
}
