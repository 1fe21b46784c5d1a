//! The counters of a measuring thread, and the totals of the window.
//!
//! ```text
//!   thread: Tally ──cut──▶ channel ──▶ conductor: Totals ──▶ records
//!           32-bit histograms          64-bit histograms
//!              ▲                          │
//!              └──── emptied, reused ─────┘
//! ```
//!
//! A thread owns its tally, so counting takes no lock and shares no cache line. Several times a
//! second the thread sends the tally to the conductor and continues with an empty one.
//!
//! **Under a rate** requests and bytes count in the bin in which they completed, and a response
//! time counts in the bin in which its request was due. Most requests complete in the bin in which
//! they were due. Those that complete later are in the list `late`.

use crate::{
    record::DirectionRecord,
    run::histogram::{HistogramSum, Latencies},
};

/// Reads, writes or flushes of one target, between two cuts.
#[derive(Debug, Clone, Default)]
pub(crate) struct DirectionTally {
    pub(crate) ios: u64,
    pub(crate) bytes: u64,
    pub(crate) errors: u64,
    pub(crate) service: Latencies,
    /// Response times of requests that were due in this bin and completed in it; `None` without a
    /// schedule.
    pub(crate) response: Option<Latencies>,
}

impl DirectionTally {
    fn new(has_schedule: bool) -> Self {
        Self { response: has_schedule.then(Latencies::default), ..Self::default() }
    }

    /// Response times where there is a schedule, else service times.
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

/// The response time of a request that completed in a later bin than the one in which it was due,
/// or after the end of the load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Late {
    /// Intended start, from the start of the phase.
    pub(crate) intended_ns: u64,
    pub(crate) response_ns: u64,
    pub(crate) is_read: bool,
}

/// The counters of a lane, between two cuts.
#[derive(Debug, Clone)]
pub(crate) struct Tally {
    pub(crate) reads: DirectionTally,
    pub(crate) writes: DirectionTally,
    /// Flushes have no schedule. The requests after a slow flush have longer response times.
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
    service: HistogramSum,
    response: Option<HistogramSum>,
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
            response: self.response.as_ref().map(HistogramSum::record),
        }
    }
}

/// The totals of a lane in the window.
#[derive(Debug, Clone, Default)]
pub(crate) struct Totals {
    reads: DirectionTotals,
    writes: DirectionTotals,
    flushes: DirectionTotals,
    /// Requests that were due and were not made, or did not complete.
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
