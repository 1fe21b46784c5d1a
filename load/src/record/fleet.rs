//! What the record of a run says about the machines that measured it together.
//!
//! The phases of such a run have the threads of all agents. A thread belongs to the agent that has
//! its target, so the figures of an agent are those of its targets.
//!
//! All times are those of the controller's monotonic clock, from the start of the phase. A time
//! that an agent saw is converted by its [`ClockRecord`] and is uncertain by its error.

use super::{
    end::End,
    phase::{CpuRecord, PhaseRecord, SeriesPoint, ThreadRecord, Total},
};
use crate::{
    machine::{Machine, Versions},
    warning::Warning,
};
use serde::{Deserialize, Serialize};

/// The machines that measured a run together. The machine of the head is the controller's.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct FleetRecord {
    /// Identifier of the run, by which agents know its records.
    pub run: String,
    /// The agents, in the order of the plan.
    pub agents: Vec<AgentRecord>,
    /// One record for each phase of the run.
    pub phases: Vec<FleetPhaseRecord>,
    /// The agents that were lost, in the order of their loss.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lost: Vec<Loss>,
}

/// An agent: one process that makes load, on one machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct AgentRecord {
    /// Name in the plan.
    pub name: String,
    /// The group of the plan to which it belongs.
    pub group: String,
    /// SHA-256 of its certificate, as lower-case hexadecimal digits.
    pub fingerprint: String,
    /// The agent's machine.
    pub machine: Machine,
    /// Boot identifier of the machine: agents with the same one share a machine.
    pub boot_id: String,
    /// Version of the agent's program.
    pub versions: Versions,
    /// Numbers of the agent's targets in the run.
    pub targets: Vec<u32>,
    /// The agent's clock compared with that of the controller.
    pub clock: ClockRecord,
    /// How the agent's part ended.
    pub end: End,
    /// Reasons to doubt the agent's figures.
    pub warnings: Vec<Warning>,
}

/// The clock of an agent compared with that of the controller.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct ClockRecord {
    /// The agent's clock minus the controller's before the first phase, nanoseconds.
    pub offset_ns: i64,
    /// Bound of the error of a converted time, nanoseconds: half the shortest round trip.
    pub error_ns: u64,
    /// How much faster the agent's clock ran, in millionths. 0 if it was compared only once.
    pub drift_ppm: f64,
    /// Bound of the error of the drift, in millionths. `None` if the clock was compared only once,
    /// and in results of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drift_error_ppm: Option<f64>,
}

/// A phase of a fleet.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct FleetPhaseRecord {
    /// Start of the time in which all agents were active and measured, nanoseconds.
    pub from_ns: i64,
    /// End of this time, nanoseconds.
    pub until_ns: i64,
    /// Largest difference between the starts of two agents' windows, nanoseconds.
    pub skew_ns: u64,
    /// Bound of the error of these times, nanoseconds.
    pub error_ns: u64,
    /// The agents, in the order of [`FleetRecord::agents`].
    pub agents: Vec<AgentPhaseRecord>,
}

/// An agent in a phase.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct AgentPhaseRecord {
    /// Start of the agent's window, nanoseconds.
    pub window_start_ns: i64,
    /// Length of the agent's window, nanoseconds; 0 if its record is lost.
    pub window_ns: u64,
    /// CPU time of the agent's process and machine in its window.
    pub cpu: CpuRecord,
    /// Start of the phase on the agent, nanoseconds. If the agent was lost, this is the start that
    /// it was given. `None` if there is no series, and in results of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_ns: Option<i64>,
    /// The intervals of the phase, up to the last one that the controller received. Times count
    /// from the agent's own start of the phase.
    pub series: Vec<SeriesPoint>,
}

/// A lost agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Loss {
    /// Number of the agent.
    pub agent: u32,
    /// Name of the phase; empty before the first one.
    pub phase: String,
    /// Time up to which its figures are there, from the start of the phase, nanoseconds.
    pub since_ns: u64,
    /// What happened.
    pub why: String,
}

impl AgentPhaseRecord {
    /// Start of the series, nanoseconds from the start of the phase. Results of earlier versions
    /// have only the start of the window, which all agents opened at the same time of their phase:
    /// `window_start_ns`, as in [`PhaseRecord::window_start_ns`].
    pub fn series_start_ns(&self, window_start_ns: u64) -> i64 {
        self.start_ns.unwrap_or_else(|| self.window_start_ns.saturating_sub_unsigned(window_start_ns))
    }
}

impl FleetRecord {
    /// The threads of an agent.
    pub fn threads_of<'a>(&self, agent: usize, phase: &'a PhaseRecord) -> impl Iterator<Item = &'a ThreadRecord> {
        let targets = self.agents.get(agent).map(|agent| agent.targets.clone()).unwrap_or_default();
        phase.threads.iter().filter(move |thread| targets.contains(&thread.target))
    }

    /// The sum over the threads of an agent.
    pub fn total_of(&self, agent: usize, phase: &PhaseRecord) -> Total {
        Total::of(self.threads_of(agent, phase))
    }
}
