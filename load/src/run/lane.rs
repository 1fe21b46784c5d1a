//! A lane: one thread on one target. It has a queue with slots, buffers and counters.
//!
//! ```text
//!   free slot ─▶ pacer ─▶ next request, payload ─▶ push ─▶ in flight ─▶ reap ─▶ count ─▶ free slot
//!                                  ▲                                              │
//!                                  └─────────────── without a pacer: at once ─────┘
//! ```
//!
//! A latency is the difference of two clock readings: the one before its request was made, and the
//! one after the reap that returned its completion. The clock is read once for all completions of a
//! reap. A latency therefore includes time of the generator; `null:` shows how much.
//!
//! **Requests are submitted in small groups.** If a device completes ten requests at once and all
//! ten are submitted together, the device is idle until all ten are made. With O_DIRECT a few
//! requests are therefore submitted while the other completions are still being counted. Random 4K
//! reads at depth 32 went from 52,000 to 65,000 per second, with no more CPU time per request. From
//! the page cache a request completes during submission, so all are submitted together.
//!
//! Invariant: every slot is in flight, resting with the pacer, or in `free`; there are
//! `queue_depth` slots. Every buffer is in flight or in the pool of its direction.

use crate::run::{
    contents::Contents,
    pace::{Overdue, Pacer},
    plan::{LanePlan, LaneRules},
    requests::{IoRequest, Requests},
    shared::{Failure, NEVER, Shared},
    tally::{DirectionTally, Late, Tally},
    verify::Generations,
};
use diskwright_store::{BlockQueue, Completion, IoBuf, Operation, Request};
use std::{io, ops::Range, sync::Arc};

/// How often a verified write is drawn again when its range is being written.
const DRAWS_MAX: u32 = 16;

/// Name of a target whose queue failed, and the error.
pub(crate) type QueueFailure = (String, io::Error);

/// The request of a slot.
#[derive(Debug, Clone, Copy)]
struct Flight {
    made_ns: u64,
    /// Intended start; [`NEVER`] after the completion.
    intended_ns: u64,
    io_request: IoRequest,
    is_flush: bool,
}

impl Flight {
    /// Whether the request is in flight and was due in `window`.
    fn was_due_in(&self, window: &Range<u64>) -> bool {
        !self.is_flush && window.contains(&self.intended_ns)
    }

    /// The response time at `now_ns`, for the bin in which the request was due.
    fn late(&self, now_ns: u64) -> Late {
        let &Self { intended_ns, io_request: IoRequest { is_read, .. }, .. } = self;
        Late { intended_ns, response_ns: now_ns.saturating_sub(intended_ns), is_read }
    }

    /// A flush, which has no offset and no schedule.
    const fn flush(made_ns: u64) -> Self {
        let io_request = IoRequest { offset_bytes: 0, len_bytes: 0, is_read: false };
        Self { made_ns, intended_ns: made_ns, io_request, is_flush: true }
    }

    /// The counters of the request's direction.
    #[inline]
    fn counted_in(self, tally: &mut Tally) -> &mut DirectionTally {
        match self {
            Self { io_request: IoRequest { is_read: true, .. }, .. } => &mut tally.reads,
            Self { is_flush: false, .. } => &mut tally.writes,
            _ => &mut tally.flushes,
        }
    }
}

/// Requests that a lane has not made or completed at the end of the load.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Undone {
    /// Requests that were due in the window and were not made.
    pub(crate) overdue: Overdue,
    /// Requests that were due in the window, were made, and will not complete.
    pub(crate) unfinished: u64,
    /// Share of reads among `overdue`, from 0 to 1.
    pub(crate) read_share: f64,
    /// Time at which the requests were given up; `None` when latencies are not recorded.
    pub(crate) waited_until_ns: Option<u64>,
}

/// One thread on one target.
#[derive(Debug)]
pub(crate) struct Lane<'a> {
    target: &'a str,
    queue: Box<dyn BlockQueue>,
    rules: LaneRules,
    requests: Requests,
    contents: Contents,
    pacer: Option<Pacer>,
    flights: Vec<Flight>,
    free: Vec<u32>,
    for_reads: Vec<IoBuf>,
    for_writes: Vec<IoBuf>,
    writes_since_flush: u64,
    /// The generation table of the target; `None` unless contents are verified.
    generations: Option<Arc<Generations>>,
    /// For each slot, the states of the units of its read when it was made.
    before: Vec<Vec<u64>>,
    tally: Tally,
    /// Start of the current bin.
    bin_start_ns: u64,
    done: Vec<Completion>,
    /// Completions that are being counted.
    settling: Vec<Completion>,
}

impl<'a> Lane<'a> {
    /// A lane. `buffers` has as many buffers as [`LaneRules::buffers`] returns.
    pub(crate) fn new(
        target: &'a str,
        queue: Box<dyn BlockQueue>,
        buffers: Vec<IoBuf>,
        plan: LanePlan,
        contents: Contents,
    ) -> Self {
        let LanePlan { rules, mut requests, pacer, generations, .. } = plan;
        let mut for_reads = buffers;
        let reads = if rules.reads { rules.queue_depth as usize } else { 0 };
        let mut for_writes = for_reads.split_off(reads.min(for_reads.len()));
        for buf in &mut for_writes {
            contents.fill(buf, requests.rng());
        }
        let tally = Tally::new(pacer.as_ref().is_some_and(Pacer::has_schedule));
        Self {
            target,
            queue,
            rules,
            requests,
            contents,
            pacer,
            flights: vec![Flight::flush(NEVER); rules.queue_depth as usize],
            free: (0..rules.queue_depth).rev().collect(),
            for_reads,
            for_writes,
            writes_since_flush: 0,
            before: vec![Vec::new(); if generations.is_some() { rules.queue_depth as usize } else { 0 }],
            generations,
            tally,
            bin_start_ns: 0,
            done: Vec::with_capacity(rules.queue_depth as usize),
            settling: Vec::with_capacity(rules.queue_depth as usize),
        }
    }

    /// Drops the queue, and returns the buffers that it does not hold.
    pub(crate) fn into_buffers(self) -> Vec<IoBuf> {
        let Self { queue, mut for_reads, mut for_writes, .. } = self;
        drop(queue);
        for_reads.append(&mut for_writes);
        for_reads
    }

    /// Requests that are in flight, or completed and not counted.
    pub(crate) fn in_flight(&self) -> usize {
        self.queue.in_flight() + self.done.len()
    }

    /// An empty tally for this lane.
    pub(crate) fn empty_tally(&self) -> Tally {
        Tally::new(self.pacer.as_ref().is_some_and(Pacer::has_schedule))
    }

    /// Starts the bin at `bin_start_ns` with an empty tally, and returns the tally of the last bin.
    pub(crate) fn exchange(&mut self, empty: Tally, bin_start_ns: u64) -> Tally {
        self.bin_start_ns = bin_start_ns;
        std::mem::replace(&mut self.tally, empty)
    }

    /// All requests that were due before this time have completed; [`NEVER`] without a schedule.
    pub(crate) fn settled_ns(&self) -> u64 {
        match &self.pacer {
            Some(pacer) if pacer.has_schedule() => {
                self.flights.iter().map(|flight| flight.intended_ns).fold(pacer.next_intended_ns(), u64::min)
            }
            _ => NEVER,
        }
    }

    /// Time of the next request that does not wait for a completion; [`NEVER`] when all slots are
    /// in flight.
    pub(crate) fn wake_ns(&self) -> u64 {
        match &self.pacer {
            Some(pacer) => pacer.wake_ns(!self.free.is_empty()),
            None if self.free.is_empty() => NEVER,
            None => 0,
        }
    }

    /// Gives up the requests that were due in `window` and were not made, or did not complete
    /// because the queue failed. Each counts with the time that it has waited until `now_ns`.
    pub(crate) fn give_up(&mut self, window: &Range<u64>, now_ns: u64, shared: &Shared) -> Undone {
        let (rules, waited_until_ns) = (&self.rules, shared.record_latency.then_some(now_ns));
        let mut undone = Undone { read_share: rules.read_share, waited_until_ns, ..Undone::default() };
        let Some(pacer) = self.pacer.as_ref().filter(|pacer| pacer.has_schedule()) else { return undone };
        undone.overdue = pacer.overdue(window);
        for flight in self.flights.iter().filter(|flight| flight.was_due_in(window)) {
            undone.unfinished += 1;
            if shared.record_latency {
                self.tally.late.push(flight.late(now_ns));
            }
        }
        undone
    }

    /// Submits pushed requests and takes completions. With `wait`, it waits for the batch of the
    /// load.
    #[inline]
    pub(crate) fn reap(&mut self, wait: bool) -> Result<(), QueueFailure> {
        let at_least = if wait { self.rules.batch as usize } else { 0 };
        self.queue.reap(at_least, &mut self.done).map_err(|error| (self.target.to_owned(), error))
    }

    /// Whether there are completions to count.
    pub(crate) fn has_completions(&self) -> bool {
        !self.done.is_empty()
    }

    /// Counts completions, and makes new requests while `to_make` is above 0. Requests that
    /// complete meanwhile are counted in the next turn.
    #[inline]
    pub(crate) fn settle(&mut self, now_ns: u64, to_make: &mut u64, shared: &Shared) -> Result<(), QueueFailure> {
        let mut settling = std::mem::replace(&mut self.done, std::mem::take(&mut self.settling));
        let mut outcome = Ok(());
        let mut unsubmitted = 0;
        for completion in settling.drain(..) {
            if unsubmitted == self.rules.submit_every {
                unsubmitted = 0;
                outcome = outcome.and(self.reap(false));
            }
            unsubmitted += 1;
            let slot = completion.tag as u32;
            self.count(completion, now_ns, shared);
            match &mut self.pacer {
                None if *to_make > 0 => self.make(slot, now_ns, now_ns, to_make, shared),
                None => self.free.push(slot),
                Some(pacer) => {
                    if !pacer.rests(slot, now_ns) {
                        self.free.push(slot);
                    }
                }
            }
        }
        self.settling = settling;
        if !self.free.is_empty() || self.pacer.is_some() {
            self.make_more(now_ns, now_ns, to_make, shared);
        }
        outcome
    }

    /// At the end of the load: makes the requests that were due before the end and for which slots
    /// are free. The thread was late for them, not the target.
    pub(crate) fn make_due(&mut self, now_ns: u64, to_make: &mut u64, shared: &Shared) {
        if self.pacer.as_ref().is_some_and(Pacer::has_schedule) && shared.errors() == 0 {
            self.make_more(now_ns, shared.stop_ns().min(now_ns).saturating_sub(1), to_make, shared);
        }
    }

    /// Makes requests in all free slots; with a pacer, only those that were due by `due_ns`.
    fn make_more(&mut self, now_ns: u64, due_ns: u64, to_make: &mut u64, shared: &Shared) {
        while *to_make > 0 {
            let mut intended_ns = now_ns;
            if let Some(pacer) = &mut self.pacer {
                self.free.extend(pacer.rested(now_ns));
                match pacer.intended_ns(due_ns) {
                    Some(start_ns) => intended_ns = start_ns,
                    None => return,
                }
            }
            let Some(slot) = self.free.pop() else { return };
            self.make(slot, now_ns, intended_ns, to_make, shared);
            if self.free.last() == Some(&slot) {
                // The request could not be made. The next turn tries again.
                return;
            }
        }
    }

    /// Makes the next request in `slot`.
    #[inline]
    fn make(&mut self, slot: u32, now_ns: u64, intended_ns: u64, to_make: &mut u64, shared: &Shared) {
        if self.rules.flush_every > 0 && self.writes_since_flush >= self.rules.flush_every {
            self.writes_since_flush = 0;
            self.flights[slot as usize] = Flight::flush(now_ns);
            return self.push(Request::flush(u64::from(slot)), now_ns, shared);
        }
        let Some(io_request) = self.next_io_request(slot) else { return self.free.push(slot) };
        let pool = if io_request.is_read { &mut self.for_reads } else { &mut self.for_writes };
        let Some(mut buf) = pool.pop() else { return self.free.push(slot) };
        let (operation, fua) = if io_request.is_read {
            (Operation::Read, false)
        } else {
            self.writes_since_flush += 1;
            let payload = &mut buf[..io_request.len_bytes as usize];
            self.contents.prepare(payload, self.requests.rng());
            if let Some(generations) = &self.generations {
                generations.seal(io_request.offset_bytes, payload);
            }
            (Operation::Write, self.rules.durable)
        };
        *to_make -= 1;
        if let Some(pacer) = &mut self.pacer {
            pacer.made(io_request.len_bytes, now_ns);
        }
        self.flights[slot as usize] = Flight { made_ns: now_ns, intended_ns, io_request, is_flush: false };
        let request = Request {
            operation,
            offset_bytes: io_request.offset_bytes,
            len_bytes: u64::from(io_request.len_bytes),
            buf: Some(buf),
            segments: None,
            buf_offset_bytes: 0,
            tag: u64::from(slot),
            fua,
        };
        self.push(request, now_ns, shared);
    }

    /// The next request; `None` when contents are verified and all ranges that were drawn are being
    /// written.
    #[inline]
    fn next_io_request(&mut self, slot: u32) -> Option<IoRequest> {
        let io_request = self.requests.draw_for(slot);
        if self.generations.is_none() { Some(io_request) } else { self.next_verified(slot, io_request) }
    }

    fn next_verified(&mut self, slot: u32, mut io_request: IoRequest) -> Option<IoRequest> {
        let generations = self.generations.as_ref()?;
        for _ in 0..DRAWS_MAX {
            let len = io_request.len_bytes as usize;
            if io_request.is_read {
                generations.begin_read(io_request.offset_bytes, len, &mut self.before[slot as usize]);
                return Some(io_request);
            }
            if generations.begin_write(io_request.offset_bytes, len) {
                return Some(io_request);
            }
            io_request = self.requests.draw_for(slot);
        }
        None
    }

    /// Checks the data of a read, or records the end of a write, where contents are verified.
    fn verified(&self, completion: &mut Completion, flight: &Flight) {
        let Some(generations) = &self.generations else { return };
        let IoRequest { offset_bytes, len_bytes, is_read } = flight.io_request;
        let len = len_bytes as usize;
        match (&completion.buf, &completion.result) {
            _ if flight.is_flush => {}
            (_, result) if !is_read => generations.end_write(offset_bytes, len, result.is_ok()),
            (Some(buf), Ok(())) => {
                completion.result = generations.check(offset_bytes, &buf[..len], &self.before[completion.tag as usize]);
            }
            _ => {}
        }
    }

    #[inline]
    fn push(&mut self, request: Request, now_ns: u64, shared: &Shared) {
        if let Err(refused) = self.queue.push(request) {
            let completion = Completion {
                tag: refused.request.tag,
                buf: refused.request.buf,
                segments: None,
                result: Err(refused.reason),
            };
            let slot = completion.tag as u32;
            self.count(completion, now_ns, shared);
            self.free.push(slot);
        }
    }

    #[inline]
    fn count(&mut self, mut completion: Completion, now_ns: u64, shared: &Shared) {
        let flight = self.land(&mut completion);
        match completion.result {
            Ok(()) => {
                let direction = flight.counted_in(&mut self.tally);
                direction.ios += 1;
                direction.bytes += u64::from(flight.io_request.len_bytes);
                if shared.record_latency {
                    direction.service.record(now_ns - flight.made_ns);
                    match &mut direction.response {
                        Some(response) if flight.intended_ns >= self.bin_start_ns => {
                            response.record(now_ns - flight.intended_ns);
                        }
                        Some(_) => self.tally.late.push(flight.late(now_ns)),
                        None => {}
                    }
                }
            }
            Err(why) => {
                flight.counted_in(&mut self.tally).errors += 1;
                self.failed(&flight, &why, now_ns, shared);
            }
        }
    }

    /// Takes the buffer of a completion, and returns its request.
    #[inline]
    fn land(&mut self, completion: &mut Completion) -> Flight {
        let flight = self.flights[completion.tag as usize];
        self.flights[completion.tag as usize].intended_ns = NEVER;
        if self.generations.is_some() {
            self.verified(completion, &flight);
        }
        if let Some(buf) = completion.buf.take() {
            if flight.io_request.is_read { self.for_reads.push(buf) } else { self.for_writes.push(buf) }
        }
        flight
    }

    #[cold]
    fn failed(&self, flight: &Flight, why: &io::Error, now_ns: u64, shared: &Shared) {
        let operation = match flight {
            Flight { is_flush: true, .. } => Operation::Flush,
            Flight { io_request: IoRequest { is_read: true, .. }, .. } => Operation::Read,
            _ => Operation::Write,
        };
        let (offset_bytes, len_bytes) = (flight.io_request.offset_bytes, u64::from(flight.io_request.len_bytes));
        shared.fail(&Failure { target: self.target, operation, offset_bytes, len_bytes, why }, now_ns);
    }

    /// Submits pushed requests and takes completions; waits for one if `wait`.
    pub(crate) fn reap_last(&mut self, wait: bool) -> Result<(), QueueFailure> {
        self.queue.reap(usize::from(wait), &mut self.done).map_err(|error| (self.target.to_owned(), error))
    }

    /// Handles completions after the end of the load. Only failures count, and the response times
    /// of requests with a schedule, because they were due during the load.
    pub(crate) fn settle_last(&mut self, now_ns: u64, shared: &Shared) {
        for mut completion in std::mem::take(&mut self.done) {
            let flight = self.land(&mut completion);
            match completion.result {
                Err(why) => {
                    flight.counted_in(&mut self.tally).errors += 1;
                    self.failed(&flight, &why, now_ns, shared);
                }
                Ok(()) if shared.record_latency && flight.counted_in(&mut self.tally).response.is_some() => {
                    self.tally.late.push(flight.late(now_ns));
                }
                Ok(()) => {}
            }
        }
    }
}
