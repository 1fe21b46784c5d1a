//! The record of an acceptance run: rows, checks, machine.

use super::judge::{Bar, Check, Outcome};
use diskwright_load::{
    machine::{Machine, Place, Versions},
    warning::Warning,
};
use serde::{Deserialize, Serialize};

/// Schema of [`AcceptanceRecord`].
pub const SCHEMA: &str = "diskwright.lab.acceptance/1";

/// The result of one row.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct RowResult {
    /// [`Row::name`](super::Row::name).
    pub row: String,
    /// [`Row::title`](super::Row::title).
    pub title: String,
    /// The worst outcome of its checks, without those that the row may miss.
    pub outcome: Outcome,
    /// All checks.
    pub checks: Vec<Check>,
    /// Notes for the reader: sizes, rounds, what was left out.
    pub notes: Vec<String>,
    /// Time that the row took, nanoseconds.
    pub took_ns: u64,
}

/// The result of an acceptance run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct AcceptanceRecord {
    /// [`SCHEMA`].
    pub schema: String,
    /// Subject of the rows: "Self-test", "Bench".
    pub title: String,
    /// Start of the run, UTC, as in `20261120T221749Z`.
    pub started_utc: String,
    /// Time that the run took, nanoseconds.
    pub took_ns: u64,
    /// The machine.
    pub machine: Machine,
    /// The file system of the scratch folder.
    pub place: Place,
    /// Versions of this program and of qemu-img.
    pub versions: Versions,
    /// Whether disks were smaller and cells shorter than in a full run.
    pub quick: bool,
    /// I/O engine: "auto", "io_uring" or "pread".
    pub engine: String,
    /// The rows that were measured.
    pub rows: Vec<RowResult>,
    /// Warnings about the figures.
    pub warnings: Vec<Warning>,
    /// Whether the user stopped the run before all rows were measured.
    #[serde(default)]
    pub stopped: bool,
}

/// A record with its summary, as `--json` prints it.
#[derive(Debug, Serialize, schemars::JsonSchema)]
pub struct AcceptanceWithSummary<'a> {
    #[serde(flatten)]
    record: &'a AcceptanceRecord,
    /// The figure of each check. Only printed, not saved.
    summary: Vec<CheckSummary<'a>>,
}

/// The figure of one check.
#[derive(Debug, Clone, PartialEq, Serialize, schemars::JsonSchema)]
pub struct CheckSummary<'a> {
    /// [`RowResult::row`].
    pub row: &'a str,
    /// [`Check::name`].
    pub check: &'a str,
    /// Median of the judged figure over the rounds; `null` if it was not measured.
    pub figure: Option<f64>,
    /// Unit of `figure` and `bar`.
    pub unit: &'a str,
    /// The limit.
    pub bar: Option<Bar>,
    /// The outcome.
    pub outcome: Outcome,
}

impl AcceptanceRecord {
    /// The record with the figure of each check.
    pub fn with_summary(&self) -> AcceptanceWithSummary<'_> {
        let summary = self.rows.iter().flat_map(|row| row.checks.iter().map(move |check| summary_of(row, check)));
        AcceptanceWithSummary { record: self, summary: summary.collect() }
    }

    /// Whether no row failed. Skipped and unsure rows count as neither passed nor failed.
    pub fn passed(&self) -> bool {
        self.rows.iter().all(|row| row.outcome != Outcome::Fail)
    }

    /// Marks a run that a signal ended. The signal also reaches the peers, so a last row that
    /// failed is removed.
    pub fn stopped_by_signal(&mut self) {
        self.stopped = true;
        if self.rows.last().is_some_and(|row| row.outcome == Outcome::Fail) {
            self.rows.pop();
        }
    }
}

fn summary_of<'a>(row: &'a RowResult, check: &'a Check) -> CheckSummary<'a> {
    CheckSummary {
        row: &row.row,
        check: &check.name,
        figure: check.figure.map(|figure| figure.median),
        unit: &check.unit,
        bar: check.bar,
        outcome: check.outcome,
    }
}
