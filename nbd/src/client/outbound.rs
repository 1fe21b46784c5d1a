//! Sending: headers, and payloads that are not copied.
//!
//! Everything queued is sent in as few system calls as the socket permits. Headers are contiguous
//! in one buffer, the payload of a write is sent from its own buffer, and zeros from a static page.

use super::{tables::Tables, transport::Transport};
use crate::wire::{Framing, RequestHeader};
use std::{
    collections::VecDeque,
    io::{self, IoSlice},
};

/// Maximum number of slices in one system call (the kernel allows 1,024).
const SLICES: usize = 64;

/// Zeros to send.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

#[derive(Debug, Clone, Copy)]
enum Piece {
    /// The next bytes of `headers`.
    Headers(usize),
    /// This range of the buffer of a call's slot.
    Payload { call: u32, start: usize, end: usize },
    /// This many zeros.
    Zeros(usize),
}

impl Piece {
    fn len(self) -> usize {
        match self {
            Self::Headers(len) | Self::Zeros(len) => len,
            Self::Payload { start, end, .. } => end - start,
        }
    }
}

/// The sending side of one connection; see the module documentation.
#[derive(Debug, Default)]
pub(super) struct Outbound {
    headers: Vec<u8>,
    headers_sent: usize,
    pieces: VecDeque<Piece>,
    /// Calls whose whole payload was passed to the transport.
    pub(super) sent: Vec<u32>,
}

impl Outbound {
    /// Queues a header.
    pub(super) fn header(&mut self, request: &RequestHeader, framing: Framing) {
        let before = self.headers.len();
        request.encode(framing, &mut self.headers);
        let len = self.headers.len() - before;
        match self.pieces.back_mut() {
            Some(Piece::Headers(last)) => *last += len,
            _ => self.pieces.push_back(Piece::Headers(len)),
        }
    }

    /// Queues the payload of a call: a range of its slot's buffer, not empty.
    pub(super) fn payload(&mut self, call: u32, start: usize, end: usize) {
        self.pieces.push_back(Piece::Payload { call, start, end });
    }

    /// Queues `len` zeros.
    pub(super) fn zeros(&mut self, len: usize) {
        self.pieces.push_back(Piece::Zeros(len));
    }

    /// Whether everything was passed to the transport.
    pub(super) fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Resets the state for a new connection.
    pub(super) fn clear(&mut self) {
        self.headers.clear();
        self.headers_sent = 0;
        self.pieces.clear();
        self.sent.clear();
    }

    /// Sends until the queue is empty or the socket accepts no more. Returns whether anything was
    /// sent.
    pub(super) fn send(&mut self, transport: &mut Transport, tables: &Tables) -> io::Result<bool> {
        let mut moved = false;
        while !self.pieces.is_empty() {
            let sent = {
                let mut slices = [IoSlice::new(&[]); SLICES];
                let count = self.gather(tables, &mut slices);
                transport.send(&slices[..count])
            };
            match sent {
                Ok(sent) => self.advance(sent),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(moved),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            }
            moved = true;
        }
        match transport.flush() {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
            _ => Ok(moved),
        }
    }

    fn gather<'a>(&'a self, tables: &'a Tables, slices: &mut [IoSlice<'a>; SLICES]) -> usize {
        let mut header_at = self.headers_sent;
        let mut count = 0;
        for piece in &self.pieces {
            let Some(slice) = slices.get_mut(count) else { break };
            let bytes = match *piece {
                Piece::Headers(len) => {
                    header_at += len;
                    &self.headers[header_at - len..header_at]
                }
                // A call with unsent payload has not ended, so the buffer exists.
                Piece::Payload { call, start, end } => {
                    let slot = tables.calls.get(call).and_then(|call| tables.slots.get(call.slot));
                    slot.and_then(|slot| slot.memory.get(start..end)).unwrap_or(&[])
                }
                Piece::Zeros(len) => &ZEROS[..len.min(ZEROS.len())],
            };
            *slice = IoSlice::new(bytes);
            count += 1;
            // The slices must be consecutive in the stream, so a partial piece is the last.
            if bytes.len() < piece.len() {
                break;
            }
        }
        count
    }

    fn advance(&mut self, mut sent: usize) {
        while let Some(piece) = self.pieces.front_mut()
            && sent > 0
        {
            let moved = sent.min(piece.len());
            sent -= moved;
            match piece {
                Piece::Headers(len) => {
                    *len -= moved;
                    self.headers_sent += moved;
                }
                Piece::Payload { start, .. } => *start += moved,
                Piece::Zeros(len) => *len -= moved,
            }
            if piece.len() == 0 {
                if let Piece::Payload { call, .. } = *piece {
                    self.sent.push(call);
                }
                self.pieces.pop_front();
            }
        }
        if self.headers_sent == self.headers.len() {
            self.headers.clear();
            self.headers_sent = 0;
        }
    }
}
