//! What the study found, as it is saved.

use crate::{
    cells::{Cell, Cells},
    measure::Ratio,
};
use diskwright_load::{
    figures::Figures,
    machine::{Machine, Place, Versions},
    record::ContentsRecord,
    warning::Warning,
};
use diskwright_stats::summary::Summary;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// Schema of [`ZeroPayloadResult`].
pub const SCHEMA: &str = "diskwright.study.zero-payload/1";

/// The study, whole.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ZeroPayloadResult {
    /// [`SCHEMA`].
    pub schema: String,
    /// The conclusion.
    pub verdict: String,
    /// When it began.
    pub started_utc: String,
    /// How long it took, nanoseconds.
    pub took_ns: u64,
    /// On what.
    pub machine: Machine,
    /// Where the disks lay.
    pub place: Place,
    /// By which programs.
    pub versions: Versions,
    /// Whether it was the short form.
    pub quick: bool,
    /// Size of each disk.
    pub size_bytes: u64,
    /// Length of a cell, nanoseconds.
    pub cell_ns: u64,
    /// Rounds.
    pub rounds: usize,
    /// The disks, as they were found before measuring.
    pub disks: Vec<DiskRecord>,
    /// The eight tests, with zeros and with data.
    pub tests: Vec<TestRecord>,
    /// Reasons for doubt.
    pub warnings: Vec<Warning>,
    /// Whether it was stopped before all tests were made; those that were are there.
    #[serde(default)]
    pub partial: bool,
}

/// What is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Payload {
    /// As SQLIO did.
    Zeros,
    /// That cannot be compressed.
    Data,
}

/// A disk before it is measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DiskRecord {
    /// "dynamic, zeros".
    pub name: String,
    /// What it was filled with, from end to end.
    pub payload: Payload,
    /// Space that its file takes after that.
    pub file_allocated_bytes: u64,
    /// What a look at it found.
    pub contents: ContentsRecord,
    /// What `lab run` would say of it in its first lines.
    pub said: Vec<Warning>,
}

/// One test with one payload, on both disks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TestRecord {
    /// "64K random read".
    pub name: String,
    /// What the disks hold, and what is written.
    pub payload: Payload,
    /// On the dynamic disk.
    pub dynamic: SideRecord,
    /// On the fixed one.
    pub fixed: SideRecord,
    /// IOPS of the dynamic disk as a ratio to the fixed one's in the same round.
    pub ratio: Ratio,
}

/// A test on one disk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SideRecord {
    /// Requests a second.
    pub iops: Summary,
    /// Millions of bytes a second.
    pub mb_per_s: Summary,
    /// Mean latency, nanoseconds.
    pub latency_mean_ns: Summary,
    /// 99th percentile, nanoseconds.
    pub latency_p99_ns: Summary,
    /// Share of the bytes asked for that never reached the store, by the kernel's account, from 0
    /// to 1.
    pub never_reached: Summary,
    /// The same for each round.
    pub not_stored_each: Vec<f64>,
    /// Every round as it was measured.
    pub rounds: Vec<Figures>,
}

impl Cells for ZeroPayloadResult {
    fn cells(&self) -> Cow<'_, [Cell]> {
        let of = |test: &TestRecord| {
            let part = if test.payload == Payload::Zeros { "zeros" } else { "data" };
            [("dynamic", &test.dynamic), ("fixed", &test.fixed)].map(|(subject, side)| {
                let depth = side.rounds.first().map_or(0, |round| round.queue_depth);
                let mut cell = Cell::new(part, &test.name, subject, depth).with_rounds(side.rounds.clone());
                side.not_stored_each.iter().for_each(|share| cell.push_more("not_stored_share", Some(*share)));
                cell
            })
        };
        self.tests.iter().flat_map(of).collect()
    }
}
