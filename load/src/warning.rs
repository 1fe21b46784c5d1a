//! What a reader of a result must know before believing it: as data, each with a hint that can be
//! acted on.

use serde::{Deserialize, Serialize};
use std::fmt;

/// More cells than this are not named in a sentence.
const CELLS_SHOWN: usize = 3;

/// One reason for doubt.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Warning {
    /// The program was built without optimisation.
    DebugBuild,
    /// The rounds of some ratios lie far apart.
    Spread {
        /// How many ratios do.
        cells: usize,
        /// Of how many.
        of: usize,
        /// Above which spread, as a share of the median.
        threshold: f64,
        /// The one with the largest.
        worst: String,
        /// Its spread.
        worst_spread: f64,
    },
    /// Other programs, or the kernel's own threads, were busy.
    OtherLoad {
        /// Processors they kept busy.
        cpus: f64,
    },
    /// The hypervisor gave processors to other guests.
    StolenTime {
        /// Processors' worth.
        cpus: f64,
    },
    /// O_DIRECT was asked for and not given.
    DirectNotHonoured {
        /// Which targets went through the page cache.
        targets: Vec<String>,
    },
    /// O_DIRECT was asked for of exports, whose servers cache as they like.
    CacheOfServer {
        /// Which exports.
        targets: Vec<String>,
    },
    /// Threads that drive exports could not sleep.
    Polls {
        /// The load, with its phase.
        load: String,
    },
    /// Cells were so short that chance rules them.
    ShortCells {
        /// The shortest measured window, nanoseconds.
        window_ns: u64,
    },
    /// Too few requests completed in a window for its percentiles.
    FewRequests {
        /// How many cells.
        cells: usize,
        /// Fewest requests in one.
        fewest: u64,
    },
    /// Disks were made smaller than usual, so that the run ends in time.
    SmallerDisks {
        /// Size used.
        size_bytes: u64,
        /// Usual size.
        usual_bytes: u64,
    },
    /// Something was left out.
    LeftOut {
        /// What.
        what: String,
        /// Why.
        why: String,
    },
    /// Much of what is under test has no space: reads of it are answered from tables.
    Unallocated {
        /// The target.
        target: String,
        /// Share that has space.
        allocated: f64,
    },
    /// Much of what is read is zeros, though it has space.
    Zeros {
        /// The target.
        target: String,
        /// Share of the sampled blocks.
        zero: f64,
    },
    /// Much of what is read is the same.
    Repeated {
        /// The target.
        target: String,
        /// Share of the sampled blocks.
        repeated: f64,
    },
    /// What is written is zeros.
    ZeroPayload,
    /// Requests go through the page cache, and memory can hold all that is under test.
    Memory {
        /// Bytes under test.
        working_set_bytes: u64,
        /// Memory of the machine.
        memory_bytes: u64,
    },
    /// Somebody else uses a target that is only read.
    Shared {
        /// The target.
        target: String,
        /// By whom.
        users: String,
    },
    /// Fewer requests were in flight than asked for.
    DepthNotReached {
        /// The load, with its phase.
        load: String,
        /// In flight on average, by Little's law.
        reached: f64,
        /// Asked for.
        asked: f64,
    },
    /// The steady state was waited for and did not come in its time, or was left again.
    NotSteady {
        /// The phase.
        phase: String,
        /// Whether it had been reached.
        was_reached: bool,
        /// Range of the deciding rounds as a share of their mean.
        range: f64,
        /// Slope over the deciding rounds as a share of their mean.
        slope: f64,
    },
    /// Fewer requests were completed than the schedule has.
    RateNotKept {
        /// The load, with its phase.
        load: String,
        /// Share of the rate that was reached.
        share: f64,
        /// Requests that were due in the window and were not made, or did not end.
        overdue: u64,
    },
    /// The clock is slow to read, so latencies and CPU time are too high.
    SlowClock {
        /// The kernel's clock source.
        source: String,
    },
    /// The clock on the wall was set while a run went on, or the machine slept.
    ClockStepped {
        /// How much later it says than it should, seconds; below 0 when it was set back.
        by_s: f64,
    },
    /// Things that are set side by side were not made alike.
    NotAlike {
        /// What differs: "machine", "workload", "cache mode".
        what: String,
        /// That of the one.
        first: String,
        /// That of the other.
        second: String,
    },
    /// What is compared are stretches of one run each.
    WithinRun,
    /// A result was broken off before its end.
    Partial {
        /// Which.
        what: String,
    },
    /// Something that one of the compared results says of itself.
    OfSide {
        /// Which.
        side: String,
        /// What it says.
        warning: String,
    },
    /// Too few rounds for intervals that mean something.
    FewRounds {
        /// How many.
        rounds: u32,
    },
    /// Something that is true of some cells of a sweep, not of all.
    InCells {
        /// Which.
        cells: Vec<String>,
        /// What is true of them.
        warning: Box<Warning>,
        /// Further cells with a warning of this kind, of which only the number is kept because
        /// there are many.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        alike: Vec<String>,
    },
}

impl Warning {
    /// Whether it says that something else was measured than storage: then it belongs into the
    /// first line of whatever is shown.
    pub fn voids(&self) -> bool {
        if let Self::InCells { warning, .. } = self {
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

    /// The same, with `sweep` before the names of its cells: where the warnings of several sweeps
    /// stand together.
    pub fn in_cells_of(mut self, sweep: &str) -> Self {
        if let Self::InCells { cells, alike, .. } = &mut self {
            cells.iter_mut().chain(alike).for_each(|cell| *cell = format!("{sweep}, {cell}"));
        }
        self
    }

    /// Sorts the gravest first: what voids a result, then the rest in the order in which it was
    /// found.
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
                "in {cells} of {of} ratios the rounds lie more than {} apart (most: {worst}, {}); use more rounds or longer cells before telling small differences",
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
            Self::DirectNotHonoured { targets } => write!(
                f,
                "the file system has no O_DIRECT: {} went through the page cache, and memory was measured, not the disk; use a folder on another file system",
                targets.join(", ")
            ),
            Self::CacheOfServer { targets } => write!(
                f,
                "requests past the page cache were asked for, which is for a server to do and cannot be enforced from here: what {} keeps in memory is in the figures; start the server so that it uses O_DIRECT",
                targets.join(", ")
            ),
            Self::Polls { load } => write!(
                f,
                "{load}: its threads drive an export together with other targets or by the clock, and look for answers without ever sleeping; their CPU time is of the looking: give each target its own threads to know what requests cost"
            ),
            Self::ShortCells { window_ns } => write!(
                f,
                "the shortest measured window was {} ms; chance rules so short a time: give the run more time or fewer targets",
                window_ns / 1_000_000
            ),
            Self::FewRequests { cells, fewest } => write!(
                f,
                "{cells} cells completed fewer than 100 requests in a round (fewest: {fewest}); their 99th percentiles mean little: use longer cells"
            ),
            Self::SmallerDisks { size_bytes, usual_bytes } => write!(
                f,
                "the disks are {} instead of {}, because this disk is slow to fill; caches below may hold more of them",
                diskwright_stats::numbers::bytes(*size_bytes),
                diskwright_stats::numbers::bytes(*usual_bytes)
            ),
            Self::LeftOut { what, why } => write!(f, "left out: {what}, because {why}"),
            Self::Unallocated { target, allocated } => write!(
                f,
                "{target}: only {} of what is under test has space; the rest is answered from metadata, not from storage: fill it first",
                percent(*allocated)
            ),
            Self::Zeros { target, zero } => write!(
                f,
                "{target}: {} of what is under test reads as zeros (trimmed, or never written), which a device may answer without its media: fill it first",
                percent(*zero)
            ),
            Self::Repeated { target, repeated } => write!(
                f,
                "{target}: {} of the sampled blocks are copies of each other, which a layer that deduplicates reads only once: fill it first",
                percent(*repeated)
            ),
            Self::ZeroPayload => f.write_str(
                "zeros are written, which a layer below need not store; use other contents to measure storage, such as incompressible ones"
            ),
            Self::Memory { working_set_bytes, memory_bytes } => write!(
                f,
                "the {} under test fit into this machine's {} of memory, and requests go through the page cache: that measures memory; go past it with O_DIRECT, or use more",
                diskwright_stats::numbers::bytes(*working_set_bytes),
                diskwright_stats::numbers::bytes(*memory_bytes)
            ),
            Self::Shared { target, users } => write!(
                f,
                "{target} is in use while it is measured: {users}; what others do with it is in the figures"
            ),
            Self::DepthNotReached { load, reached, asked } => write!(
                f,
                "{load}: only {reached:.1} of {asked:.0} requests were in flight on average; the threads could not keep up: use more threads with less depth each"
            ),
            Self::NotSteady { phase, was_reached: false, range, slope } => write!(
                f,
                "phase \"{phase}\": the steady state was not reached (range {}, slope {} of the mean; allowed are 20 % and 10 %), and what was measured still changes: give it more time to settle",
                percent(*range),
                percent(*slope)
            ),
            Self::NotSteady { phase, .. } => write!(
                f,
                "phase \"{phase}\": the steady state was reached, and left again while it was measured; look at the time series, and measure longer"
            ),
            Self::RateNotKept { load, share, overdue } => write!(
                f,
                "{load}: {:.1} % of the rate was reached, and {} request{} due in the measured time {} not made or not finished at its end; latencies count only the time that they had waited by then. The target, or the machine, cannot hold this rate: use a lower one, or more depth",
                share * 100.0,
                diskwright_stats::numbers::grouped(*overdue as f64),
                if *overdue == 1 { "" } else { "s" },
                if *overdue == 1 { "was" } else { "were" }
            ),
            Self::ClockStepped { by_s } => write!(
                f,
                "the machine's clock was set {} by {} during the run, or the machine slept; the figures stand, for they are of a clock that nobody sets; dates here and in other logs may not agree",
                if *by_s < 0.0 { "back" } else { "forward" },
                diskwright_stats::numbers::duration(by_s.abs() * 1e9)
            ),
            Self::NotAlike { what, first, second } => write!(
                f,
                "the {what} is not the same ({first}; {second}); what differs may come from there and not from what you compare"
            ),
            Self::WithinRun => f.write_str(
                "there is one run of each: how it scatters within itself is known, how the next one would have been is not; give several of each joined by commas, or compare the targets live",
            ),
            Self::Partial { what } => write!(f, "{what} was broken off; only what it has is compared"),
            Self::OfSide { side, warning } => write!(f, "{side}: {warning}"),
            Self::FewRounds { rounds } => {
                write!(f, "{rounds} rounds cannot tell chance from truth; use five or more")
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
            Self::SlowClock { source } => {
                write!(
                    f,
                    "the kernel's clock source is {source}, which is slow to read; latencies and CPU time are too high by about a microsecond"
                )
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_voids_a_result_comes_first() {
        let unallocated = Warning::Unallocated { target: "disk.raw".into(), allocated: 0.031 };
        let mut all =
            [Warning::DebugBuild, unallocated.clone(), Warning::OtherLoad { cpus: 1.0 }, Warning::ZeroPayload];
        Warning::sort(&mut all);
        assert_eq!(all, [unallocated, Warning::ZeroPayload, Warning::DebugBuild, Warning::OtherLoad { cpus: 1.0 }]);
        assert!(all[0].to_string().starts_with("disk.raw: only 3 % of what is under test has space"), "{}", all[0]);
    }

    #[test]
    fn warnings_are_sentences_and_survive_json() {
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
