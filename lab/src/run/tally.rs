//! What a measuring thread counts, and what the counts are added up to.
//!
//! ```text
//!   thread:     Tally (32-bit histograms) ──cut──▶ channel ──▶ conductor: Totals (64-bit histograms) ──▶ records
//!                  ▲                                              │
//!                  └───────────── emptied, used again ────────────┘
//! ```
//!
//! A thread owns what it counts into, so counting takes no lock and shares no cache line. Several times a second it gives that away
//! whole and goes on with an empty one; that is the only time when it speaks to anyone.

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
    /// Where there is a schedule.
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

/// One target, between two cuts.
#[derive(Debug, Clone)]
pub(crate) struct Tally {
    pub(crate) reads: DirectionTally,
    pub(crate) writes: DirectionTally,
    /// They have no schedule: what one delays shows in the requests behind it.
    pub(crate) flushes: DirectionTally,
}

impl Tally {
    pub(crate) fn new(has_schedule: bool) -> Self {
        Self {
            reads: DirectionTally::new(has_schedule),
            writes: DirectionTally::new(has_schedule),
            flushes: DirectionTally::new(false),
        }
    }

    pub(crate) fn clear(&mut self) {
        self.reads.clear();
        self.writes.clear();
        self.flushes.clear();
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
}

impl Totals {
    pub(crate) fn add(&mut self, tally: &Tally) {
        self.reads.add(&tally.reads);
        self.writes.add(&tally.writes);
        self.flushes.add(&tally.flushes);
    }

    /// Reads, writes, flushes.
    pub(crate) fn record(&self) -> (DirectionRecord, DirectionRecord, DirectionRecord) {
        (self.reads.record(), self.writes.record(), self.flushes.record())
    }
}
