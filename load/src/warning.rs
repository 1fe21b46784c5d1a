//! Warnings about a result, as data. Each is displayed as a sentence that says what to do.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Maximum number of cells that a sentence names.
const CELLS_SHOWN: usize = 3;

/// A reason why the figures of a result may mislead.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Warning {
    /// The program was built without optimisation.
    DebugBuild,
    /// The rounds of some ratios have a large spread.
    Spread {
        /// Number of ratios with a large spread.
        cells: usize,
        /// Number of all ratios.
        of: usize,
        /// Spread above which a ratio counts, as a share of the median.
        threshold: f64,
        /// Name of the ratio with the largest spread.
        worst: String,
        /// Largest spread, as a share of the median.
        worst_spread: f64,
    },
    /// Other programs, or kernel threads, were busy.
    OtherLoad {
        /// Mean number of busy processors.
        cpus: f64,
    },
    /// The hypervisor gave processors to other guests (steal time).
    StolenTime {
        /// Mean number of processors.
        cpus: f64,
    },
    /// A guest's NVMe/TCP host is of a kernel that stalls with many threads.
    StallingHost {
        /// The guest's kernel.
        kernel: String,
    },
    /// O_DIRECT was asked for, and the file system does not support it.
    DirectNotHonoured {
        /// Targets that went through the page cache.
        targets: Vec<String>,
    },
    /// O_DIRECT was asked for, and the target is an export, whose server may use a cache.
    CacheOfServer {
        /// Names of the exports.
        targets: Vec<String>,
    },
    /// Threads that drive exports polled without sleeping.
    Polls {
        /// The load, with its phase.
        load: String,
    },
    /// Measured windows were so short that noise dominates.
    ShortCells {
        /// The shortest measured window, nanoseconds.
        window_ns: u64,
    },
    /// Too few requests completed in a window for its percentiles.
    FewRequests {
        /// Number of cells with too few requests.
        cells: usize,
        /// Fewest requests of a cell.
        fewest: u64,
    },
    /// Disks were made smaller than usual, so that the run ends in time.
    SmallerDisks {
        /// Size used.
        size_bytes: u64,
        /// Usual size.
        usual_bytes: u64,
    },
    /// A part of a study was not measured.
    LeftOut {
        /// The part.
        what: String,
        /// The reason.
        why: String,
    },
    /// Part of the working set is not allocated, and reads of it are answered from metadata.
    Unallocated {
        /// Name of the target.
        target: String,
        /// Share of the working set that is allocated, from 0 to 1.
        allocated: f64,
    },
    /// Part of the working set is allocated and reads as zeros.
    Zeros {
        /// Name of the target.
        target: String,
        /// Share of the sampled blocks that are zeros, from 0 to 1.
        zero: f64,
    },
    /// Part of the working set are duplicate blocks.
    Repeated {
        /// Name of the target.
        target: String,
        /// Share of the sampled blocks that are duplicates, from 0 to 1.
        repeated: f64,
    },
    /// The payload of writes is zeros.
    ZeroPayload,
    /// Requests go through the page cache, and the working set fits into memory.
    Memory {
        /// Size of the working set.
        working_set_bytes: u64,
        /// Memory of the machine.
        memory_bytes: u64,
    },
    /// Another program uses a target that the run only reads.
    Shared {
        /// Name of the target.
        target: String,
        /// The other users: mounts, processes, devices.
        users: String,
    },
    /// Fewer requests were in flight than the queue depth.
    DepthNotReached {
        /// The load, with its phase.
        load: String,
        /// Mean number of requests in flight, by Little's law.
        reached: f64,
        /// Configured queue depth, over all threads.
        asked: f64,
    },
    /// The steady state was not reached in the time for it, or was left during the measured window.
    NotSteady {
        /// Name of the phase.
        phase: String,
        /// Whether the steady state was reached first.
        was_reached: bool,
        /// Range of the last five rounds before the window, as a share of their mean.
        range: f64,
        /// Slope over the same rounds, as a share of their mean.
        slope: f64,
    },
    /// Fewer requests completed than the schedule has.
    RateNotKept {
        /// The load, with its phase.
        load: String,
        /// Share of the rate that was reached.
        share: f64,
        /// Requests that were due in the window and were not made or did not complete.
        overdue: u64,
    },
    /// The clock is slow to read, so latencies and CPU time are too high.
    SlowClock {
        /// The kernel's clock source.
        source: String,
    },
    /// The wall clock was set during the run, or the machine was suspended.
    ClockStepped {
        /// Seconds by which the clock was set, negative when it was set back.
        by_s: f64,
    },
    /// Two compared results differ in a condition of the measurement.
    NotAlike {
        /// The condition: "machine", "workload", "cache mode".
        what: String,
        /// Value of the first result.
        first: String,
        /// Value of the second result.
        second: String,
    },
    /// Each side of a comparison has only one run, whose intervals are compared.
    WithinRun,
    /// A compared result was interrupted.
    Partial {
        /// Name of the result.
        what: String,
    },
    /// A warning of one of the compared results.
    OfSide {
        /// Name of the result.
        side: String,
        /// The warning, displayed.
        warning: String,
    },
    /// Too few rounds for confidence intervals.
    FewRounds {
        /// Number of rounds.
        rounds: u32,
    },
    /// A warning that holds for some cells of a sweep.
    InCells {
        /// Names of the cells.
        cells: Vec<String>,
        /// The warning that holds for them.
        warning: Box<Warning>,
        /// Further cells with a warning of this kind. Only their number is displayed.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        alike: Vec<String>,
    },
    /// A warning of some agents of a fleet.
    OfAgents {
        /// Names of the agents.
        agents: Vec<String>,
        /// The warning that they have.
        warning: Box<Warning>,
    },
    /// An agent of a fleet was lost, and the figures are those of the time before.
    AgentLost {
        /// Name of the agent.
        agent: String,
        /// Name of the phase.
        phase: String,
        /// Time of the phase up to which the figures of all agents are there, nanoseconds.
        since_ns: u64,
        /// What happened.
        why: String,
    },
    /// The agents of a fleet did not measure at the same time.
    Skew {
        /// Name of the phase.
        phase: String,
        /// Largest difference between the starts of two windows, nanoseconds.
        skew_ns: u64,
        /// Length of a window, nanoseconds.
        window_ns: u64,
    },
    /// An agent of a fleet made far fewer requests than the others with the same load.
    Straggler {
        /// Name of the agent.
        agent: String,
        /// Its requests per second as a share of the median of its group.
        share: f64,
    },
}

impl Warning {
    /// Whether the warning says that memory or metadata was measured instead of storage. Reports
    /// show such a warning in their first line.
    pub fn voids(&self) -> bool {
        if let Self::InCells { warning, .. } | Self::OfAgents { warning, .. } = self {
            return warning.voids();
        }
        matches!(
            self,
            Self::Unallocated { .. }
                | Self::Zeros { .. }
                | Self::ZeroPayload
                | Self::Memory { .. }
                | Self::DirectNotHonoured { .. }
        )
    }

    /// Prefixes the names of the cells with `sweep`, for a list of the warnings of several sweeps.
    pub fn in_cells_of(mut self, sweep: &str) -> Self {
        if let Self::InCells { cells, alike, .. } = &mut self {
            cells.iter_mut().chain(alike).for_each(|cell| *cell = format!("{sweep}, {cell}"));
        }
        self
    }

    /// Moves the warnings that void a result to the front; the order is otherwise kept.
    pub fn sort(warnings: &mut [Self]) {
        warnings.sort_by_key(|warning| !warning.voids());
    }
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = |share: f64| format!("{:.0} %", share * 100.0);
        match self {
            Self::DebugBuild => f.write_str("this is a debug build; its figures say nothing: build with --release"),
            Self::Spread { cells, of, threshold, worst, worst_spread } => write!(
                f,
                "in {cells} of {of} ratios the rounds lie more than {} apart (most: {worst}, {}); use more rounds or longer cells to see small differences",
                percent(*threshold),
                percent(*worst_spread)
            ),
            Self::OtherLoad { cpus } => write!(
                f,
                "other programs and the kernel's own threads kept {cpus:.2} processors busy; stop what can be stopped and run again"
            ),
            Self::StolenTime { cpus } => {
                write!(f, "the hypervisor gave {cpus:.2} processors to other guests; run again on a quieter host")
            }
            Self::StallingHost { kernel } => write!(
                f,
                "the guest's kernel is {kernel}: the NVMe/TCP host of Linux 6.12 stalls when many threads use it, that of 7.3 does not; name a newer kernel"
            ),
            Self::DirectNotHonoured { targets } => write!(
                f,
                "the file system has no O_DIRECT: {} went through the page cache, so memory was measured, not the disk; use a folder on another file system",
                targets.join(", ")
            ),
            Self::CacheOfServer { targets } => write!(
                f,
                "O_DIRECT cannot be enforced on a server, so the cache of {} may be in the figures; start the server without a cache",
                targets.join(", ")
            ),
            Self::Polls { load } => write!(
                f,
                "{load}: its threads poll, because they drive an export together with other targets or at a rate, and their CPU time is that of polling; give each target its own threads to measure CPU time per request"
            ),
            Self::ShortCells { window_ns } => write!(
                f,
                "the shortest measured window was {} ms, which is too short for stable figures; give the run more time or fewer targets",
                window_ns / 1_000_000
            ),
            Self::FewRequests { cells, fewest } => write!(
                f,
                "{cells} cells completed fewer than 100 requests in a round (fewest: {fewest}), too few for a 99th percentile; use longer cells"
            ),
            Self::SmallerDisks { size_bytes, usual_bytes } => write!(
                f,
                "the disks are {} instead of {}, because this disk is slow to fill; a cache of the host or device may hold a larger share of them",
                diskwright_stats::numbers::bytes(*size_bytes),
                diskwright_stats::numbers::bytes(*usual_bytes)
            ),
            Self::LeftOut { what, why } => write!(f, "left out: {what}, because {why}"),
            Self::Unallocated { target, allocated } => write!(
                f,
                "{target}: only {} of the working set is allocated, and reads of the rest are answered from metadata, not from storage; fill it first",
                percent(*allocated)
            ),
            Self::Zeros { target, zero } => write!(
                f,
                "{target}: {} of the working set reads as zeros (trimmed, or never written), which a device may answer without its media; fill it first",
                percent(*zero)
            ),
            Self::Repeated { target, repeated } => write!(
                f,
                "{target}: {} of the sampled blocks are duplicates, which a layer that deduplicates reads only once; fill it first",
                percent(*repeated)
            ),
            Self::ZeroPayload => f.write_str(
                "zeros are written, which a lower layer need not store; use other contents to measure storage, such as incompressible ones"
            ),
            Self::Memory { working_set_bytes, memory_bytes } => write!(
                f,
                "requests go through the page cache, and the working set of {} fits into the {} of memory, so memory is measured; go past it with O_DIRECT, or use a larger working set",
                diskwright_stats::numbers::bytes(*working_set_bytes),
                diskwright_stats::numbers::bytes(*memory_bytes)
            ),
            Self::Shared { target, users } => write!(
                f,
                "{target} is in use while it is measured ({users}), and the I/O of its other users affects the figures"
            ),
            Self::DepthNotReached { load, reached, asked } => write!(
                f,
                "{load}: only {reached:.1} of {asked:.0} requests were in flight on average, because the threads could not keep up; use more threads with less depth each"
            ),
            Self::NotSteady { phase, was_reached: false, range, slope } => write!(
                f,
                "phase \"{phase}\": the steady state was not reached (range {}, slope {} of the mean; allowed are 20 % and 10 %); give it more time to settle",
                percent(*range),
                percent(*slope)
            ),
            Self::NotSteady { phase, .. } => write!(
                f,
                "phase \"{phase}\": the steady state was reached, and left again during the measurement; look at the time series, and measure longer"
            ),
            Self::RateNotKept { load, share, overdue } => write!(
                f,
                "{load}: {:.1} % of the rate was reached, and {} request{} due in the measured time {} not made or not finished at its end, so that the latencies are too low; use a lower rate or more depth",
                share * 100.0,
                diskwright_stats::numbers::grouped(*overdue as f64),
                if *overdue == 1 { "" } else { "s" },
                if *overdue == 1 { "was" } else { "were" }
            ),
            Self::ClockStepped { by_s } => write!(
                f,
                "the wall clock was set {} by {} during the run, or the machine was suspended; the figures are not affected (they use the monotonic clock), but times in logs may not agree",
                if *by_s < 0.0 { "back" } else { "forward" },
                diskwright_stats::numbers::duration(by_s.abs() * 1e9)
            ),
            Self::NotAlike { what, first, second } => write!(
                f,
                "the {what} is not the same ({first}; {second}) and may be the cause of a difference"
            ),
            Self::WithinRun => f.write_str(
                "there is one run of each, so the scatter between runs is not known; give several of each joined by commas, or compare the targets live",
            ),
            Self::Partial { what } => write!(f, "{what} was interrupted, and only its complete part is compared"),
            Self::OfSide { side, warning } => write!(f, "{side}: {warning}"),
            Self::FewRounds { rounds } => {
                write!(f, "{rounds} rounds are too few for confidence intervals; use five or more")
            }
            Self::InCells { cells, warning, alike } => {
                let shown = cells.iter().take(CELLS_SHOWN).map(String::as_str).collect::<Vec<_>>().join("; ");
                let more = cells.len().saturating_sub(CELLS_SHOWN);
                let more = if more > 0 { format!(" and {more} more cells") } else { String::new() };
                write!(f, "at {shown}{more}: {warning}")?;
                match alike.len() {
                    0 => Ok(()),
                    others => write!(f, " ({others} more cells have a warning of this kind)"),
                }
            }
            Self::OfAgents { agents, warning } => {
                let shown = agents.iter().take(CELLS_SHOWN).map(String::as_str).collect::<Vec<_>>().join(", ");
                match agents.len().saturating_sub(CELLS_SHOWN) {
                    0 => write!(f, "{shown}: {warning}"),
                    more => write!(f, "{shown} and {more} more agents: {warning}"),
                }
            }
            Self::AgentLost { agent, phase, since_ns, why } => {
                let when = match phase.as_str() {
                    "" => "before the first phase".to_owned(),
                    phase => format!("{:.1} s after the start of phase \"{phase}\"", *since_ns as f64 / 1e9),
                };
                write!(
                    f,
                    "the result is incomplete since {when}: agent {agent} was lost ({why}); the figures are those of the time before, in which all agents were active, and those of later phases are of the other agents"
                )
            }
            Self::Skew { phase, skew_ns, window_ns } => write!(
                f,
                "phase \"{phase}\": the agents measured up to {} apart, in windows of {}, so that for some of the time not all were active; use a longer time",
                diskwright_stats::numbers::duration(*skew_ns as f64),
                diskwright_stats::numbers::duration(*window_ns as f64)
            ),
            Self::Straggler { agent, share } => write!(
                f,
                "agent {agent} made {} of the requests of the median agent of its group, which the sum does not show; look at this machine and its path to the storage",
                percent(*share)
            ),
            Self::SlowClock { source } => {
                write!(
                    f,
                    "the kernel's clock source is {source}, which is slow to read; latencies and CPU time are about a microsecond too high"
                )
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warnings_that_void_a_result_come_first() {
        let unallocated = Warning::Unallocated { target: "disk.raw".into(), allocated: 0.031 };
        let mut all =
            [Warning::DebugBuild, unallocated.clone(), Warning::OtherLoad { cpus: 1.0 }, Warning::ZeroPayload];
        Warning::sort(&mut all);
        assert_eq!(all, [unallocated, Warning::ZeroPayload, Warning::DebugBuild, Warning::OtherLoad { cpus: 1.0 }]);
        assert!(all[0].to_string().starts_with("disk.raw: only 3 % of the working set is allocated"), "{}", all[0]);
    }

    #[test]
    fn warnings_are_sentences_and_are_read_back_from_their_json() {
        let warning = Warning::Spread {
            cells: 3,
            of: 96,
            threshold: 0.1,
            worst: "VHD fixed, 4K random write".into(),
            worst_spread: 0.234,
        };
        assert!(warning.to_string().starts_with(
            "in 3 of 96 ratios the rounds lie more than 10 % apart (most: VHD fixed, 4K random write, 23 %)"
        ));
        let json = serde_json::to_string(&warning).unwrap();
        assert!(json.contains("\"kind\":\"spread\""), "{json}");
        assert_eq!(serde_json::from_str::<Warning>(&json).unwrap(), warning);
    }
}
