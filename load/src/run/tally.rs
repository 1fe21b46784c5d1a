//! What a measuring thread counts, and what the counts are added up to.
//!
//! ```text
//!   thread:     Tally (32-bit histograms) ──cut──▶ channel ──▶ conductor: Totals (64-bit histograms) ──▶ records
//!                  ▲                                              │
//!                  └───────────── emptied, used again ────────────┘
//! ```
//!
//! A thread owns what it counts into, so counting takes no lock and shares no cache line. Several
//! times a second it gives that away whole and goes on with an empty one; that is the only time
//! when it speaks to anyone.
//!
//! **Under a rate** requests and bytes are counted in the bin in which they ended, as always, but a
//! response time belongs to the bin in which its request was due. Most requests end in the bin in
//! which they were due; those that end later are in a list, [`Late`].

use crate::{
    record::DirectionRecord,
    run::histogram::{Latencies, Sum},
};

/// Reads, writes or flushes of one target, between two cuts.
#[derive(Debug, Clone, Default)]
pub(crate) struct DirectionTally {
    pub(crate) ios: u64,
    pub(crate) bytes: u64,
    pub(crate) errors: u64,
    pub(crate) service: Latencies,
    /// Response times of requests that were due in this bin and ended in it; none without a
    /// schedule.
    pub(crate) response: Option<Latencies>,
}

impl DirectionTally {
    fn new(has_schedule: bool) -> Self {
        Self { response: has_schedule.then(Latencies::default), ..Self::default() }
    }

    /// What its user felt.
    pub(crate) fn latency(&self) -> &Latencies {
        self.response.as_ref().unwrap_or(&self.service)
    }

    fn clear(&mut self) {
        (self.ios, self.bytes, self.errors) = (0, 0, 0);
        self.service.clear();
        if let Some(response) = &mut self.response {
            response.clear();
        }
    }
}

/// The response time of a request that was due in an earlier bin than the one in which it ended, or
/// that ended after the load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Late {
    /// Intended start, from the beginning of the phase.
    pub(crate) intended_ns: u64,
    pub(crate) response_ns: u64,
    pub(crate) is_read: bool,
}

/// One target, between two cuts.
#[derive(Debug, Clone)]
pub(crate) struct Tally {
    pub(crate) reads: DirectionTally,
    pub(crate) writes: DirectionTally,
    /// They have no schedule: what one delays shows in the requests behind it.
    pub(crate) flushes: DirectionTally,
    pub(crate) late: Vec<Late>,
}

impl Tally {
    pub(crate) fn new(has_schedule: bool) -> Self {
        Self {
            reads: DirectionTally::new(has_schedule),
            writes: DirectionTally::new(has_schedule),
            flushes: DirectionTally::new(false),
            late: Vec::new(),
        }
    }

    pub(crate) fn clear(&mut self) {
        self.reads.clear();
        self.writes.clear();
        self.flushes.clear();
        self.late.clear();
    }
}

/// Reads, writes or flushes of one target, in the window.
#[derive(Debug, Clone, Default)]
pub(crate) struct DirectionTotals {
    ios: u64,
    bytes: u64,
    errors: u64,
    service: Sum,
    response: Option<Sum>,
}

impl DirectionTotals {
    fn add(&mut self, tally: &DirectionTally) {
        self.ios += tally.ios;
        self.bytes += tally.bytes;
        self.errors += tally.errors;
        self.service.add(&tally.service);
        if let Some(response) = &tally.response {
            self.response.get_or_insert_default().add(response);
        }
    }

    fn record(&self) -> DirectionRecord {
        DirectionRecord {
            ios: self.ios,
            bytes: self.bytes,
            errors: self.errors,
            service: self.service.record(),
            response: self.response.as_ref().map(Sum::record),
        }
    }
}

/// One target of one thread, in the window.
#[derive(Debug, Clone, Default)]
pub(crate) struct Totals {
    reads: DirectionTotals,
    writes: DirectionTotals,
    flushes: DirectionTotals,
    /// Requests that were due and were not made, or did not end.
    pub(crate) overdue: u64,
}

impl Totals {
    pub(crate) fn add(&mut self, tally: &Tally) {
        self.reads.add(&tally.reads);
        self.writes.add(&tally.writes);
        self.flushes.add(&tally.flushes);
    }

    /// Adds a response time of `count` (above 0) requests that were due in the window.
    pub(crate) fn add_responses(&mut self, response_ns: u64, count: u64, is_read: bool) {
        let direction = if is_read { &mut self.reads } else { &mut self.writes };
        direction.response.get_or_insert_default().add_many(response_ns, count);
    }

    /// Reads, writes, flushes.
    pub(crate) fn record(&self) -> (DirectionRecord, DirectionRecord, DirectionRecord) {
        (self.reads.record(), self.writes.record(), self.flushes.record())
    }
}
