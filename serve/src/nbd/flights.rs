//! Requests in flight: which requests the disks work on, and for which client.
//!
//! A client's request usually becomes one request of a block queue, a *flight*; the flight's number
//! is the tag. A long range is cleared in steps, one flight after the other. Such a request is a
//! *group*. A group ends when nothing is left to clear and its last flight has ended.

use super::handshake::Session;
use diskwright_nbd::wire::{Answering, Command, Framing, PAYLOAD_BYTES_DEFAULT};
use diskwright_store::{IoBuf, Operation, SegmentMemory, Segments};
use std::io;

#[derive(Debug, Clone, Copy)]
pub(crate) struct ClientRequest {
    /// The connection's number in its worker.
    pub(crate) connection: u32,
    pub(crate) export: u32,
    pub(crate) framing: Framing,
    pub(crate) command: Command,
    pub(crate) cookie: u64,
    pub(crate) offset_bytes: u64,
    pub(crate) len_bytes: u64,
    /// When the request was taken, by the worker's clock.
    pub(crate) taken_ns: u64,
}

impl ClientRequest {
    pub(crate) fn of(session: &Session, connection: u32, taken_ns: u64) -> Self {
        Self {
            connection,
            export: session.export as u32,
            framing: session.framing,
            command: Command::READ,
            cookie: 0,
            offset_bytes: 0,
            len_bytes: 0,
            taken_ns,
        }
    }

    /// What replies in chunks need to know of the request.
    pub(crate) fn answering(&self) -> Answering {
        Answering { framing: self.framing, cookie: self.cookie, offset_bytes: self.offset_bytes }
    }

    /// Bytes of payload held in memory until the reply has been sent.
    pub(crate) fn held_bytes(&self) -> usize {
        match self.command {
            Command::READ | Command::WRITE | Command::CACHE => {
                self.len_bytes.min(PAYLOAD_BYTES_DEFAULT.into()) as usize
            }
            _ => 0,
        }
    }
}

/// The buffers of a request. The first is kept apart, so that a single buffer needs no list.
#[derive(Debug, Default)]
pub(crate) struct Contents {
    pub(crate) first: Option<IoBuf>,
    pub(crate) more: Vec<IoBuf>,
}

impl Contents {
    /// The buffers of a request: `buf`, or those of its segments, which are left empty.
    pub(crate) fn of(buf: Option<IoBuf>, segments: Option<&mut Segments>) -> Self {
        let own = |memory| match memory {
            SegmentMemory::Own(buf) => Some(buf),
            SegmentMemory::Shared(_) | SegmentMemory::Mapped(_) => None,
        };
        let Some(segments) = segments else { return Self { first: buf, more: Vec::new() } };
        let mut bufs = segments.clear().filter_map(|segment| own(segment.memory));
        let first = buf.or_else(|| bufs.next());
        Self { first, more: bufs.collect() }
    }

    pub(crate) fn into_bufs(self) -> impl Iterator<Item = IoBuf> {
        self.first.into_iter().chain(self.more)
    }
}

/// A client's request that has ended.
#[derive(Debug)]
pub(crate) struct Completed {
    pub(crate) asked: ClientRequest,
    pub(crate) result: io::Result<()>,
    /// After a successful read, the data that was read. Otherwise buffers to give back to the pool.
    pub(crate) contents: Contents,
}

/// One request in flight on a block queue.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Flight {
    pub(crate) asked: ClientRequest,
    /// The group, if this is one of several steps.
    pub(crate) group: Option<u32>,
}

/// The rest of a range that is cleared in steps.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Steps {
    pub(crate) operation: Operation,
    pub(crate) next_bytes: u64,
    pub(crate) end_bytes: u64,
    pub(crate) fua: bool,
}

/// A client's request that is carried out in steps.
#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) asked: ClientRequest,
    /// Steps in flight, plus one while the first step is being started.
    pub(crate) pending: u32,
    /// The first error of any step.
    pub(crate) error: Option<io::Error>,
    pub(crate) steps: Steps,
}
