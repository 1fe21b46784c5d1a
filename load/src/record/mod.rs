//! The record of a run. Reports, DiskSpd's reports, comparisons, sweeps, plots and exports read
//! this form only.
//!
//! ```text
//!   Run ──┬─ head: machine, versions, warnings, how it ended
//!         ├─ job; targets (what they are, how they were found)
//!         └─ phases ──┬─ threads: reads, writes and flushes of each thread and target
//!                     ├─ series: each interval, over all threads
//!                     ├─ cpu: of the generator and of the machine
//!                     └─ members: what the files and devices of a space have done
//! ```
//!
//! Totals are computed, never stored: [`PhaseRecord::total`] adds up the threads with their
//! histograms, so a total cannot contradict its parts. Latencies are stored as sparse histograms
//! with three significant digits, from which any percentile can be computed.
//!
//! There are two latencies. *Service time* starts when a request is made. *Response time* starts
//! when the request was due. They differ only under a rate, where requests have a schedule; there
//! the response time includes the time that a request waited for a slot. Requests, bytes and
//! service times are those of requests that *completed* in the window. Response times are those of
//! all requests that were *due* in the window: requests in flight at the end of the load are waited
//! for, and a request that was never made counts with the time that it had waited by then
//! ([`ThreadRecord::overdue`]). There may therefore be more or fewer response times than requests.

mod check;
mod end;
mod fleet;
mod head;
mod latency;
mod phase;

pub use check::{SUM_MAX, check_interval, check_phase, check_run};
pub use end::End;
pub use fleet::{AgentPhaseRecord, AgentRecord, ClockRecord, FleetPhaseRecord, FleetRecord, Loss};
pub use head::Head;
pub use latency::{DirectionRecord, LatencyRecord};
pub use phase::{
    CoreRecord, CpuRecord, IntervalRecord, IopsStdDev, MemberRecord, PhaseRecord, SeriesPoint, SideRecord,
    SteadyRecord, ThreadRecord, Total,
};

use crate::{
    backing::Backing,
    job::{Caching, IoEngine, Job},
    machine::Place,
};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Schema of [`Run`]. A reader rejects a document with another schema.
pub const RUN_SCHEMA: &str = "diskwright.lab.run/2";

/// The record of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Run {
    /// When and by what it was measured, and how it ended. A run has no verdict, and each target
    /// has a place of its own.
    #[serde(flatten)]
    pub head: Head,
    /// The job that was run.
    pub job: Job,
    /// The engine that submitted the I/O. `None` if no target uses one: `null:` and exports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<IoEngine>,
    /// The targets, in the order in which loads number them.
    pub targets: Vec<TargetRecord>,
    /// The phases that were measured, in order.
    pub phases: Vec<PhaseRecord>,
    /// Labels given by the user (`--label key=value`).
    #[serde(default)]
    pub labels: Vec<(String, String)>,
    /// The machines that measured together; `None` where one measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fleet: Option<FleetRecord>,
}

/// A target of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct TargetRecord {
    /// Name as given by the user.
    pub name: String,
    /// "vhdx dynamic", "raw file", "raw files", "block device", "nbd export", "null".
    pub kind: String,
    /// Capacity.
    pub size_bytes: u64,
    /// Logical sector size.
    pub logical_sector_bytes: u32,
    /// Cache mode in force on this machine. The cache mode of an export's server is not known.
    pub cache: Caching,
    /// File or device of the target; `None` for an export and for `null:`.
    pub path: Option<PathBuf>,
    /// The image, export or file that the target shows; `None` where the target itself is measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub behind: Option<Backing>,
    /// File system and device of `path`.
    pub place: Option<Place>,
    /// Contents that were sampled before the run; `None` where none were (`null:`).
    pub contents: Option<ContentsRecord>,
}

impl TargetRecord {
    /// Whether the target is the disk of a server. The server's cache mode is not known.
    pub fn is_export(&self) -> bool {
        self.behind.as_ref().is_some_and(Backing::is_on_server)
    }
}

/// Sampled contents of a target. Shares are from 0 to 1.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct ContentsRecord {
    /// Share of the working set that is allocated (not sparse, not trimmed).
    pub allocated: f64,
    /// Share of the sampled blocks that are zeros.
    pub zero: f64,
    /// Share of the sampled blocks that are duplicates of another sampled block and not zeros.
    pub repeated: f64,
    /// Number of sampled blocks.
    pub sampled: u64,
    /// Bytes that were written to fill the target before the run.
    pub filled_bytes: u64,
}
