//! What a client of the network has to send: headers, and payloads that are not copied.
//!
//! Everything queued is sent in as few system calls as the socket permits. Headers are contiguous
//! in one buffer, the payload of a write is sent from its own buffer, and zeros from a static page.

use std::{
    collections::VecDeque,
    io::{self, IoSlice},
    ops::Range,
};

/// Maximum number of slices in one system call (the kernel allows 1,024).
const SLICES: usize = 64;

/// Zeros to send.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

#[derive(Debug, Clone, Copy)]
enum Piece {
    /// The next bytes of `headers`.
    Headers(usize),
    /// This range of the memory of a call.
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
pub struct Outbound {
    headers: Vec<u8>,
    headers_sent: usize,
    pieces: VecDeque<Piece>,
    /// A call for each of its payloads that was passed to the socket.
    pub sent: Vec<u32>,
}

impl Outbound {
    /// Queues a header, which `encode` appends.
    pub fn header(&mut self, encode: impl FnOnce(&mut Vec<u8>)) {
        let before = self.headers.len();
        encode(&mut self.headers);
        let len = self.headers.len() - before;
        match self.pieces.back_mut() {
            Some(Piece::Headers(last)) => *last += len,
            _ => self.pieces.push_back(Piece::Headers(len)),
        }
    }

    /// Queues the payload of a call: a range of its memory, not empty.
    pub fn payload(&mut self, call: u32, start: usize, end: usize) {
        self.pieces.push_back(Piece::Payload { call, start, end });
    }

    /// Queues `len` zeros.
    pub fn zeros(&mut self, len: usize) {
        self.pieces.push_back(Piece::Zeros(len));
    }

    /// Whether everything was passed to the socket.
    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Resets the state for a new connection.
    pub fn clear(&mut self) {
        self.headers.clear();
        self.headers_sent = 0;
        self.pieces.clear();
        self.sent.clear();
    }

    /// Sends until the queue is empty or the socket accepts no more. `write` passes slices to the
    /// socket, and `payload` finds a range of the memory of a call. Returns whether anything was
    /// sent.
    ///
    /// # Errors
    /// That of `write`.
    pub fn send<'m>(
        &mut self,
        mut write: impl FnMut(&[IoSlice<'_>]) -> io::Result<usize>,
        payload: impl Fn(u32, Range<usize>) -> Option<&'m [u8]>,
    ) -> io::Result<bool> {
        let mut moved = false;
        while !self.pieces.is_empty() {
            let sent = {
                let mut slices = [IoSlice::new(&[]); SLICES];
                let count = self.gather(&payload, &mut slices);
                write(&slices[..count])
            };
            match sent {
                Ok(sent) => self.advance(sent),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(moved),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            }
            moved = true;
        }
        Ok(moved)
    }

    fn gather<'a, 'm: 'a>(
        &'a self,
        payload: &impl Fn(u32, Range<usize>) -> Option<&'m [u8]>,
        slices: &mut [IoSlice<'a>; SLICES],
    ) -> usize {
        let mut header_at = self.headers_sent;
        let mut count = 0;
        for piece in &self.pieces {
            let Some(slice) = slices.get_mut(count) else { break };
            let bytes = match *piece {
                Piece::Headers(len) => {
                    header_at += len;
                    &self.headers[header_at - len..header_at]
                }
                // A call with unsent payload has not ended, so the memory exists.
                Piece::Payload { call, start, end } => payload(call, start..end).unwrap_or(&[]),
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
