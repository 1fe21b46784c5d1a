//! Requests in flight: which requests the disks work on, and for which client.
//!
//! A client's request usually becomes one request of a block queue, a *flight*; the flight's number
//! is the tag. Long or several ranges are cleared in steps, one flight after the other. Such a
//! request is a *group*. A group ends when nothing is left to clear and its last flight has ended.
//!
//! `A` is what the protocol needs for the reply ([`Protocol::Asked`](super::protocol::Protocol)).

use crate::metrics::Kind;
use diskwright_store::{IoBuf, Operation, SegmentMemory, Segments};
use std::{io, ops::Range};

/// A request of a client, from when it is taken until its reply is in the outbox.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ClientRequest<A> {
    /// The connection's number in its worker.
    pub(crate) connection: u32,
    pub(crate) export: u32,
    pub(crate) kind: Kind,
    pub(crate) offset_bytes: u64,
    pub(crate) len_bytes: u64,
    /// Bytes of payload held in memory until the reply has been sent.
    pub(crate) held_bytes: usize,
    /// When the request was taken, by the worker's clock.
    pub(crate) taken_ns: u64,
    pub(crate) own: A,
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
pub(crate) struct Completed<A> {
    pub(crate) asked: ClientRequest<A>,
    pub(crate) result: io::Result<()>,
    /// After a successful read, the data that was read. Otherwise buffers to give back to the pool.
    pub(crate) contents: Contents,
}

/// One request in flight on a block queue.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Flight<A> {
    pub(crate) asked: ClientRequest<A>,
    /// The group, if this is one of several steps.
    pub(crate) group: Option<u32>,
}

/// The rest of the ranges that are cleared in steps.
#[derive(Debug)]
pub(crate) struct Steps {
    pub(crate) operation: Operation,
    /// In bytes, and none is empty. The next one to clear is the last of the list.
    pub(crate) ranges: Vec<Range<u64>>,
    pub(crate) fua: bool,
}

/// A client's request that is carried out in steps.
#[derive(Debug)]
pub(crate) struct Group<A> {
    pub(crate) asked: ClientRequest<A>,
    /// Steps in flight, plus one while the first step is being started.
    pub(crate) pending: u32,
    /// The first error of any step.
    pub(crate) error: Option<io::Error>,
    pub(crate) steps: Steps,
}
