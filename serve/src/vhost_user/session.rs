//! One ring that is served: chains of the guest become requests of the disk's queue, and their
//! completions become used entries. No I/O with the front-end.
//!
//! ```text
//!   ring: next head ─▶ request ─▶ payload aligned? ─ yes ─▶ segments in the guest's memory ─┐
//!                                                  └ no ──▶ bounce buffer ──────────────────┤
//!                                                                                 BlockQueue ◀┘
//!   ring: used entry ◀─ status byte ◀─ (a bounced read is copied) ◀─ completion ◀─┘
//! ```
//!
//! Invariants: each head that was taken gets one used entry, and its status byte is written before.
//! A head is in flight once, so it is also the tag of the disk's request. A ring that is broken
//! takes no more requests, and writes nothing to the guest's memory.

use super::{
    config::WriteCache,
    inflight::QueueInflight,
    memory::{GuestMemory, Place},
    request::{Asked, Status, parse},
    risk::Risk,
    vring::{Chain, RingError, Vring},
};
use crate::{
    metrics::{Kind, WorkerMetrics},
    reservations::{Reservations, Seat},
};
use diskwright_store::{BlockQueue, Completion, IoBuf, Operation, Request, Segments};
use std::{collections::VecDeque, io, sync::Arc};
use virtio_bindings::virtio_blk::VIRTIO_BLK_ID_BYTES;

/// Bytes of a serial number.
pub(crate) const IDENTITY_BYTES: usize = VIRTIO_BLK_ID_BYTES as usize;

/// Length of a bounce buffer that is kept for the next request.
const BOUNCE_BYTES: usize = 64 << 10;
/// Maximum number of bounce buffers that are kept.
const BOUNCES_MAX: usize = 32;
/// With so many bytes in bounce buffers no further request is taken. A guest may name the same
/// memory again and again, so its memory is no limit.
const BOUNCED_BYTES_MAX: usize = 8 << 20;

/// What a session needs from its device.
#[derive(Debug, Clone)]
pub(crate) struct DeviceFacts {
    /// For the log.
    pub(crate) name: Arc<str>,
    pub(crate) identity: [u8; IDENTITY_BYTES],
    pub(crate) cache: Arc<WriteCache>,
    pub(crate) risk: Arc<Risk>,
    pub(crate) reservations: Arc<Reservations>,
}

/// A request that the disk carries out.
#[derive(Debug)]
struct Flight {
    status: Place,
    kind: Kind,
    len_bytes: u64,
    /// Bytes that a success writes into the guest's memory before the status.
    written_bytes: u32,
    /// Where a bounced read goes.
    bounced: Option<Box<Segments>>,
    /// Length of the bounce buffer.
    bounced_bytes: usize,
    taken_ns: u64,
}

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Session {
    /// Dropped first: it waits for what is in flight.
    queue: Box<dyn BlockQueue>,
    ring: Vring,
    memory: Arc<GuestMemory>,
    device: DeviceFacts,
    outsider: Seat,
    inflight: Option<QueueInflight>,
    /// Heads that a former server has left in flight.
    recovered: VecDeque<u16>,
    /// Indexed by head.
    flights: Vec<Option<Flight>>,
    in_flight: usize,
    completions: Vec<Completion>,
    unanswered: VecDeque<Completion>,
    /// Heads whose used entries are not published yet.
    batch: Vec<u16>,
    /// Whether the batch has requests that changed the disk, and a flush.
    changed: bool,
    flushed: bool,
    chain: Chain,
    #[expect(clippy::vec_box, reason = "a request takes the box")]
    spare_lists: Vec<Box<Segments>>,
    spare_bounces: Vec<IoBuf>,
    /// Bytes of the bounce buffers in flight.
    bounced_bytes: usize,
    metrics: Arc<WorkerMetrics>,
    /// No further request is taken.
    stopping: bool,
    broken: bool,
}

impl Session {
    /// `queue` must have room for as many requests as the ring has entries.
    ///
    /// # Errors
    /// The memory that records requests in flight could not be accessed.
    pub(crate) fn new(
        queue: Box<dyn BlockQueue>,
        mut ring: Vring,
        memory: Arc<GuestMemory>,
        device: DeviceFacts,
        mut inflight: Option<QueueInflight>,
        metrics: Arc<WorkerMetrics>,
    ) -> Result<Self, RingError> {
        let mut recovered = VecDeque::new();
        if let Some(inflight) = &mut inflight {
            recovered.extend(inflight.recover(ring.next_used())?);
        }
        if !recovered.is_empty() {
            tracing::info!(disk = %device.name, requests = recovered.len(), "requests that were in flight are carried out again");
            // Requests are taken in order: those completed and those in flight are all before it.
            ring.set_next_available(ring.next_used().wrapping_add(recovered.len() as u16));
        }
        let flights = (0..ring.size()).map(|_| None).collect();
        Ok(Self {
            queue,
            ring,
            memory,
            outsider: Seat::of_outsider(Arc::clone(&device.reservations)),
            device,
            inflight,
            recovered,
            flights,
            in_flight: 0,
            completions: Vec::new(),
            unanswered: VecDeque::new(),
            batch: Vec::new(),
            changed: false,
            flushed: false,
            chain: Chain::default(),
            spare_lists: Vec::new(),
            spare_bounces: Vec::new(),
            bounced_bytes: 0,
            metrics,
            stopping: false,
            broken: false,
        })
    }

    /// Whether the disk has completed requests that are not answered yet.
    pub(crate) fn has_answers(&self) -> bool {
        !self.unanswered.is_empty()
    }

    /// Requests that the disk carries out, or must carry out again.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight + self.recovered.len()
    }

    /// Whether [`Session::break_off`] was called.
    pub(crate) fn is_broken(&self) -> bool {
        self.broken
    }

    /// Where the ring goes on after the requests that were taken.
    pub(crate) fn next_available(&self) -> u16 {
        self.ring.next_available()
    }

    /// Takes no further requests.
    pub(crate) fn stop(&mut self) {
        self.stopping = true;
    }

    /// Takes no further requests, and writes nothing more to the guest's memory.
    pub(crate) fn break_off(&mut self) {
        (self.stopping, self.broken) = (true, true);
        self.inflight = None;
        self.recovered.clear();
        self.batch.clear();
    }

    /// Asks for a kick before the thread sleeps. Returns whether a request can be taken without
    /// one.
    ///
    /// # Errors
    /// The ring is damaged.
    pub(crate) fn ask_for_kicks(&mut self) -> Result<bool, RingError> {
        match () {
            // The end of a request wakes the thread.
            () if self.is_full() => Ok(false),
            () if !self.recovered.is_empty() => Ok(true),
            () if self.stopping => Ok(false),
            () => self.ring.ask_for_kicks(),
        }
    }

    /// Takes the requests that are available, and answers at most `answers` of those that have
    /// completed. Returns whether the guest wants to be signalled.
    ///
    /// # Errors
    /// The ring is damaged, or the disk's queue failed.
    pub(crate) fn turn(&mut self, answers: usize, now_ns: u64) -> Result<bool, RingError> {
        let mut left = answers;
        loop {
            let pushed = self.take(now_ns)?;
            let mut completions = std::mem::take(&mut self.completions);
            let reaped = self.queue.reap(0, &mut completions);
            self.unanswered.extend(completions.drain(..));
            self.completions = completions;
            reaped.map_err(RingError::Queue)?;
            while left > 0
                && let Some(completion) = self.unanswered.pop_front()
            {
                left -= 1;
                self.completed(completion, now_ns)?;
            }
            if !pushed {
                break;
            }
        }
        self.metrics.in_flight.store(self.in_flight as i64, std::sync::atomic::Ordering::Relaxed);
        if self.batch.is_empty() {
            return Ok(false);
        }
        self.publish()
    }

    fn is_full(&self) -> bool {
        self.bounced_bytes >= BOUNCED_BYTES_MAX || self.queue.in_flight() >= self.queue.depth()
    }

    fn publish(&mut self) -> Result<bool, RingError> {
        if let Some(inflight) = &self.inflight {
            if self.changed {
                inflight.note(&self.device.risk, self.flushed)?;
            }
            inflight.link(&self.batch)?;
        }
        (self.changed, self.flushed) = (false, false);
        self.ring.publish()?;
        if let Some(inflight) = &self.inflight {
            inflight.end(&self.batch, self.ring.next_used())?;
        }
        self.batch.clear();
        self.ring.wants_signal()
    }

    /// Starts the requests that are available. Returns whether there were any.
    fn take(&mut self, now_ns: u64) -> Result<bool, RingError> {
        let mut taken = false;
        // The guest may make requests available as fast as they are refused; a turn has an end.
        for _ in 0..self.ring.size() {
            if self.is_full() {
                break;
            }
            let head = match self.recovered.pop_front() {
                Some(head) => head,
                None if self.stopping => break,
                None => match self.ring.next_head()? {
                    Some(head) => {
                        if let Some(inflight) = &mut self.inflight {
                            inflight.begin(head)?;
                        }
                        head
                    }
                    None => break,
                },
            };
            if !taken {
                self.ring.need_no_kicks()?;
            }
            taken = true;
            self.begin(head, now_ns)?;
        }
        Ok(taken)
    }

    fn begin(&mut self, head: u16, now_ns: u64) -> Result<(), RingError> {
        if self.flights[usize::from(head)].is_some() || self.batch.contains(&head) {
            return Err(RingError::InFlight { head });
        }
        self.ring.walk(&self.memory, head, &mut self.chain)?;
        let mut payload = self.spare_lists.pop().unwrap_or_default();
        let found = parse(&self.memory, head, &mut self.chain, &mut payload)?;
        let len_bytes = payload.len() as u64;
        let mut flight = Flight {
            status: found.status,
            kind: Kind::Read,
            len_bytes,
            written_bytes: 0,
            bounced: None,
            bounced_bytes: 0,
            taken_ns: now_ns,
        };
        let fua = self.device.cache.needs_durable_writes();
        let tag = u64::from(head);
        let request = match found.asked {
            Asked::Read { .. } | Asked::Write { .. } | Asked::Zero { .. } | Asked::Flush
                if self.device.risk.has_failed() =>
            {
                self.keep_list(payload);
                return self.answer(head, &flight.status, Status::Failed, 0);
            }
            Asked::Read { .. } if !self.outsider.may(false) => {
                self.keep_list(payload);
                return self.answer(head, &flight.status, Status::Failed, 0);
            }
            Asked::Write { .. } | Asked::Zero { .. } if !self.outsider.may(true) => {
                self.keep_list(payload);
                return self.answer(head, &flight.status, Status::Failed, 0);
            }
            Asked::Refused { status, why } => {
                tracing::debug!(disk = %self.device.name, head, why, "a request was refused");
                self.keep_list(payload);
                return self.answer(head, &flight.status, status, 0);
            }
            Asked::Identity => {
                let len = payload.len().min(IDENTITY_BYTES);
                payload.copy_in(0, &self.device.identity[..len])?;
                self.keep_list(payload);
                return self.answer(head, &flight.status, Status::Ok, len as u32);
            }
            Asked::Read { .. } | Asked::Write { .. } if len_bytes == 0 => {
                self.keep_list(payload);
                return self.answer(head, &flight.status, Status::Ok, 0);
            }
            Asked::Read { offset_bytes } => {
                // A payload has at most 32 MiB.
                flight.written_bytes = len_bytes as u32;
                if self.can_be_used_in_place(&payload) {
                    Request::read_segments(offset_bytes, payload, tag)
                } else {
                    let buf = self.bounce(payload.len());
                    (flight.bounced, flight.bounced_bytes) = (Some(payload), buf.len());
                    Request::read(offset_bytes, len_bytes as usize, buf, tag)
                }
            }
            Asked::Write { offset_bytes } => {
                flight.kind = Kind::Write;
                let request = if self.can_be_used_in_place(&payload) {
                    Request::write_segments(offset_bytes, payload, tag)
                } else {
                    let mut buf = self.bounce(payload.len());
                    flight.bounced_bytes = buf.len();
                    payload.copy_out(0, &mut buf[..len_bytes as usize])?;
                    self.keep_list(payload);
                    Request::write(offset_bytes, len_bytes as usize, buf, tag)
                };
                Request { fua, ..request }
            }
            Asked::Flush => {
                flight.kind = Kind::Flush;
                self.keep_list(payload);
                Request::flush(tag)
            }
            Asked::Zero { operation, offset_bytes, len_bytes } => {
                flight.kind = if operation == Operation::Discard { Kind::Trim } else { Kind::WriteZeroes };
                flight.len_bytes = len_bytes;
                self.keep_list(payload);
                Request { operation, fua, ..Request::discard(offset_bytes, len_bytes, tag) }
            }
        };
        self.flights[usize::from(head)] = Some(flight);
        self.in_flight += 1;
        if let Err(refused) = self.queue.push(request) {
            let Request { tag, buf, segments, .. } = refused.request;
            self.unanswered.push_back(Completion { tag, buf, segments, result: Err(refused.reason) });
        }
        Ok(())
    }

    /// Whether the disk can use the payload's own memory without copying it on its way.
    fn can_be_used_in_place(&self, payload: &Segments) -> bool {
        let alignment = self.queue.memory_alignment_bytes().max(1);
        let is_aligned = |range: std::ops::Range<usize>| {
            range.start.is_multiple_of(alignment) && range.len().is_multiple_of(alignment)
        };
        // A mapping begins on a page.
        payload.iter().all(|segment| is_aligned(segment.range()))
    }

    fn bounce(&mut self, len: usize) -> IoBuf {
        self.metrics.copied_bytes.add(len as u64);
        let buf = match self.spare_bounces.pop() {
            Some(buf) if buf.len() >= len => buf,
            spare => {
                self.spare_bounces.extend(spare);
                IoBuf::new(len.max(BOUNCE_BYTES))
            }
        };
        self.bounced_bytes += buf.len();
        buf
    }

    fn keep_list(&mut self, mut list: Box<Segments>) {
        drop(list.clear());
        self.spare_lists.push(list);
    }

    fn completed(&mut self, completion: Completion, now_ns: u64) -> Result<(), RingError> {
        let Completion { tag, buf, segments, result } = completion;
        let head = tag as u16;
        let flight = self.flights[usize::from(head)].take();
        let Flight { status, kind, len_bytes, written_bytes, bounced, bounced_bytes, taken_ns } =
            flight.expect("the queue completes a request once");
        self.in_flight -= 1;
        self.metrics.answered(kind, len_bytes, now_ns.saturating_sub(taken_ns), result.is_err());
        if result.is_ok() && kind != Kind::Read {
            self.changed = true;
            self.flushed |= kind == Kind::Flush;
        }
        let outcome = match (result, bounced, &buf) {
            (Ok(()), Some(mut into), Some(buf)) => {
                if !self.broken {
                    into.copy_in(0, &buf[..len_bytes as usize])?;
                }
                self.keep_list(into);
                Status::Ok
            }
            (Ok(()), _, _) => Status::Ok,
            (Err(error), _, _) => {
                let is_wrong = matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::ReadOnlyFilesystem);
                if is_wrong {
                    tracing::debug!(disk = %self.device.name, ?kind, %error, "a request was refused");
                } else {
                    tracing::warn!(disk = %self.device.name, ?kind, %error, "a request failed");
                }
                Status::Failed
            }
        };
        if let Some(list) = segments {
            self.keep_list(list);
        }
        self.bounced_bytes -= bounced_bytes;
        if let Some(buf) = buf
            && buf.len() == BOUNCE_BYTES
            && self.spare_bounces.len() < BOUNCES_MAX
        {
            self.spare_bounces.push(buf);
        }
        let written_bytes = if outcome == Status::Ok { written_bytes } else { 0 };
        self.answer(head, &status, outcome, written_bytes)
    }

    /// Writes the status byte and the used entry.
    fn answer(&mut self, head: u16, place: &Place, status: Status, written_bytes: u32) -> Result<(), RingError> {
        if self.broken {
            return Ok(());
        }
        place.memory.copy_in(place.at, &[status as u8])?;
        self.ring.put_used(head, written_bytes.saturating_add(1))?;
        self.batch.push(head);
        Ok(())
    }
}
