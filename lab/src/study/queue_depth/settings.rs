//! Settings of the study: the options, with defaults filled in.

use super::{Stage, paper};
use crate::{LabError, Result, fleet::Agents, prepare::PrepareOptions, study::StudyOptions, sweep::ArrayOptions};
use diskwright_fleet::controller::{Wanted, Way};
use diskwright_load::job::{Caching, IoEngine, Span, THREADS_MAX};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Size of the paper's file.
const FULL_BYTES: u64 = 64 << 30;
pub(super) const QUICK_BYTES: u64 = 2 << 30;
/// Five rounds of three minutes take as long as the paper's fifteen minutes.
const FULL_CELL: Duration = Duration::from_secs(180);
const FULL_ROUNDS: usize = 5;
const QUICK_ROUNDS: usize = 3;
/// Sizes of files are multiples of this, so that a quarter of the size is a multiple of 1 MiB.
const SIZE_STEP_BYTES: u64 = 4 << 20;

/// Options of the study. The default is the full study on files that it makes.
#[derive(Debug, Clone, Default)]
pub struct QueueDepthOptions {
    /// Options of every study. If `output` is the file of an unfinished study, that study
    /// continues.
    pub study: StudyOptions,
    /// Bytes under test, with agents on each of them. Default: 64 GiB as in the paper, 2 GiB if
    /// quick. With given targets or agents: the size of the smallest.
    pub size_bytes: Option<u64>,
    /// Threads for random I/O, with agents on each of them. Default: 8 as in the paper.
    pub threads: Option<u32>,
    /// Total requests in flight for the thread combinations, over all agents. Default: the result
    /// of test 1.
    pub target_depth: Option<u32>,
    /// Copies and devices below the target, for figures per device.
    pub array: Option<ArrayOptions>,
    /// The largest acceptable 99th percentile latency.
    pub max_p99: Option<Span>,
    /// Cache mode. Default: direct I/O with durable writes, as in the paper.
    pub cache: Option<Caching>,
    /// Targets to measure. If empty, the study makes its own files. With agents: the name of the
    /// target that each of them measures; not needed if each allows only one.
    pub targets: Vec<String>,
    /// How the given targets of this machine are prepared.
    pub prepare: PrepareOptions,
    /// Agents that measure at the same time, instead of this machine. Their targets are those of
    /// `targets`.
    pub agents: Option<Agents>,
}

/// The options in force. A study resumes only with equal settings; the last two may change.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Settings {
    /// Whether this is the quick study.
    pub quick: bool,
    /// Bytes under test; `None`: the size of the smallest given target.
    pub size_bytes: Option<u64>,
    /// Threads for random I/O, over all files, or on each agent.
    pub threads: u32,
    /// Rounds of each cell.
    pub rounds: u32,
    /// Length of a cell, its warm-up (a third) included; `None`: computed from the time budget.
    pub cell: Option<Span>,
    /// Cache mode.
    pub cache: Caching,
    /// How I/O is submitted.
    pub engine: IoEngine,
    /// Total requests in flight for the combinations, over all agents; `None`: the result of
    /// test 1.
    pub target_depth: Option<u32>,
    /// Given targets; empty: files that the study made, or the only target of each agent.
    pub targets: Vec<String>,
    /// Agents that measure at the same time; empty: this machine measures.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub agents: Vec<StudiedAgent>,
    /// The largest acceptable 99th percentile latency.
    pub max_p99: Option<Span>,
    /// Copies and devices below the target.
    pub array: Option<ArrayOptions>,
}

/// An agent that measures, as the saved study knows it again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct StudiedAgent {
    /// Name of the agent.
    pub name: String,
    /// SHA-256 of the agent's certificate; `None` of an agent that connects to the controller.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<String>,
}

impl StudiedAgent {
    fn new(wanted: &Wanted) -> Self {
        let fingerprint = match &wanted.way {
            Way::Dial(address) => Some(address.fingerprint.to_string()),
            Way::Await => None,
        };
        Self { name: wanted.name.clone(), fingerprint }
    }
}

impl Settings {
    /// Whether agents measure.
    pub fn is_fleet(&self) -> bool {
        !self.agents.is_empty()
    }

    /// Number of agents; 1 if this machine measures.
    pub(crate) fn clients(&self) -> u32 {
        u32::try_from(self.agents.len()).unwrap_or(u32::MAX).max(1)
    }

    /// The stages, in order.
    pub(super) fn stages(&self) -> [Stage; 5] {
        if self.is_fleet() { Stage::FLEET } else { Stage::LOCAL }
    }

    /// Fills in the defaults and checks the options.
    ///
    /// # Errors
    /// [`LabError::BadOptions`].
    pub(super) fn new(options: &QueueDepthOptions) -> Result<Self> {
        let study = &options.study;
        let bad = |what: &str, hint: &str| Err(LabError::BadOptions { what: what.into(), hint: hint.into() });
        let pick = |quick, full| if study.quick { quick } else { full };
        let rounds = study.rounds_or(pick(QUICK_ROUNDS, FULL_ROUNDS))?;
        let threads = options.threads.unwrap_or(paper::THREADS);
        if !(1..=THREADS_MAX).contains(&threads) {
            return bad(
                "the number of threads is not between 1 and 1024",
                "the paper uses 8 (`QueueDepthOptions::threads`)",
            );
        }
        if options.target_depth == Some(0) {
            return bad(
                "a target depth of 0 makes no requests",
                "use at least 1 (`QueueDepthOptions::target_depth`), or leave it out",
            );
        }
        if options.array.is_some_and(|array| array.copies == 0 || array.devices == 0) {
            return bad("an array with 0 copies or 0 devices", "give both as 1 or more (`QueueDepthOptions::array`)");
        }
        if study.cell.is_some_and(|cell| cell.is_zero()) {
            return bad("a cell of 0 s measures nothing", "use at least a few milliseconds (`StudyOptions::cell`)");
        }
        let agents: Vec<StudiedAgent> = match &options.agents {
            Some(agents) => agents.wanted.iter().map(StudiedAgent::new).collect(),
            None => Vec::new(),
        };
        if !agents.is_empty() && options.targets.len() > 1 {
            return bad(
                "several targets are named, and the study measures one on each agent",
                "name one that all agents have (`QueueDepthOptions::targets`)",
            );
        }
        let clients = agents.len().max(1);
        if let Some(depth) = options.target_depth.filter(|depth| !(*depth as usize).is_multiple_of(clients)) {
            return bad(
                &format!("a target depth of {depth} cannot be shared by {clients} agents"),
                "give a multiple of the number of agents (`QueueDepthOptions::target_depth`), or leave it out",
            );
        }
        let own = options.targets.is_empty() && agents.is_empty();
        let size_bytes = match options.size_bytes {
            None if own => Some(if study.quick { QUICK_BYTES } else { FULL_BYTES }),
            size => size.map(|size| if own { size.max(1).next_multiple_of(SIZE_STEP_BYTES) } else { size }),
        };
        Ok(Self {
            quick: study.quick,
            size_bytes,
            threads,
            rounds: u32::try_from(rounds).unwrap_or(u32::MAX),
            cell: match study.cell {
                None if !study.quick => Some(FULL_CELL.into()),
                cell => cell.map(Span::from),
            },
            cache: options.cache.unwrap_or(Caching::DirectWriteThrough),
            engine: study.engine.into(),
            target_depth: options.target_depth,
            targets: options.targets.clone(),
            agents,
            max_p99: options.max_p99,
            array: options.array,
        })
    }

    #[cfg(test)]
    pub(super) fn example() -> Self {
        Self::new(&QueueDepthOptions::default()).expect("the defaults")
    }
}
