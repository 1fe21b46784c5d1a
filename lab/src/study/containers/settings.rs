//! The options of the study, and the settings of its quick and full forms.

use super::record::ContainersRecord;
use crate::{
    LabError, Result,
    child::{ChildLauncher, cache_word, engine_word},
    measure::Plan,
    study::{StudyOptions, budget::Budget},
    targets::Preparation,
};
use diskwright_load::workload::{Workload, paper_applications, paper_monolithic};
use diskwright_store::CacheMode;
use std::time::{Duration, Instant};

/// Time budget of a quick study: two minutes less the time that a slow machine needs to clean up.
const QUICK_TOTAL: Duration = Duration::from_secs(100);
const QUICK_CELLS: (Duration, Duration) = (Duration::from_millis(30), Duration::from_millis(350));
const QUICK_BYTES: u64 = 512 << 20;
const QUICK_DEPTHS: [u32; 1] = [32];
/// Three of the applications for which the paper has a chart, chosen to differ: streaming reads, a
/// database, a mail server.
const QUICK_APPLICATIONS: [&str; 3] = ["Media streaming", "OLTP database", "Exchange server"];
const FULL_BYTES: u64 = 4 << 30;
const FULL_CELL: Duration = Duration::from_secs(2);
/// The paper's queue depths.
const FULL_DEPTHS: [u32; 9] = [1, 2, 4, 8, 16, 32, 64, 128, 256];
/// Disk sizes are multiples of this, so that they are a whole number of blocks in every format.
pub(crate) const SIZE_STEP_BYTES: u64 = 32 << 20;

/// Largest base of the chain; smaller if the study's disks are smaller.
pub(crate) const CHAIN_BYTES: u64 = 1 << 30;

/// Options of the study. [`ContainersOptions::default`] is the full study.
#[derive(Debug, Clone, Default)]
pub struct ContainersOptions {
    /// Default: 5 rounds, cells of 2 s. Quick studies compute the cells from the time budget.
    pub study: StudyOptions,
    /// Page cache or direct I/O. Default: direct I/O.
    pub cache: Option<CacheMode>,
    /// Size of each disk, rounded up to a multiple of 32 MiB. Default: 4 GiB, 512 MiB if quick.
    pub size_bytes: Option<u64>,
    /// Size of the disks whose creation is timed. Default: 40 GiB.
    pub creation_bytes: Option<u64>,
    /// Queue depths. Default: 1, 2, 4 to 256; 32 if quick.
    pub queue_depths: Option<Vec<u32>>,
    /// Chain lengths, ascending. Default: 1, 2, 4 to 64, 256 and 1,023.
    pub chain_lengths: Option<Vec<u32>>,
    /// Opens disks in a fresh process to measure the memory of opening. If `None`, this process
    /// opens them, and the memory figure is that of the whole program.
    pub launcher: Option<ChildLauncher>,
}

/// The disk size for a requested size: rounded up to a multiple of 32 MiB, a whole number of blocks
/// in every format. `None` on overflow.
pub fn disk_bytes(asked_bytes: u64) -> Option<u64> {
    asked_bytes.checked_next_multiple_of(SIZE_STEP_BYTES)
}

/// The options with defaults filled in.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub(crate) quick: bool,
    pub(crate) how: Preparation,
    pub(crate) asked_bytes: Option<u64>,
    pub(crate) rounds: usize,
    pub(crate) depths: Vec<u32>,
    pub(crate) budget: Budget,
}

impl Settings {
    pub(crate) fn new(options: &ContainersOptions, start: Instant) -> Result<Self> {
        let bad = |what: &str, hint: &str| Err(LabError::BadOptions { what: what.into(), hint: hint.into() });
        let quick = options.study.quick;
        let rounds = options.study.rounds_or(5)?;
        let depths =
            options.queue_depths.clone().unwrap_or(if quick { QUICK_DEPTHS.into() } else { FULL_DEPTHS.into() });
        if depths.is_empty() || depths.contains(&0) {
            return bad("a queue depth of 0 makes no requests", "use depths of at least 1");
        }
        let wanted_bytes = options.size_bytes.unwrap_or(if quick { QUICK_BYTES } else { FULL_BYTES });
        if wanted_bytes == 0 {
            return bad(
                "a size of 0 measures nothing",
                "use some gigabytes (`ContainersOptions::size_bytes`), or leave it out",
            );
        }
        let Some(size_bytes) = disk_bytes(wanted_bytes) else {
            return bad(
                "the size is larger than any disk format allows",
                "use a smaller one (`ContainersOptions::size_bytes`)",
            );
        };
        let how = Preparation {
            size_bytes,
            seed: 0x6469_736b_7772_6967,
            cache: options.cache.unwrap_or(CacheMode::Direct),
            engine: options.study.engine,
        };
        let budget = match options.study.cell {
            Some(cell) => Budget::fixed(cell),
            None if quick => Budget::until(start, QUICK_TOTAL, QUICK_CELLS.0, QUICK_CELLS.1),
            None => Budget::fixed(FULL_CELL),
        };
        Ok(Self { quick, how, asked_bytes: options.size_bytes, rounds, depths, budget })
    }

    /// The workloads of the main measurement, depth by depth.
    pub(crate) fn workloads(&self) -> Vec<Workload> {
        let applications = |depth| {
            let mut all = paper_applications(depth);
            all.retain(|workload| !self.quick || QUICK_APPLICATIONS.contains(&workload.name.as_str()));
            all
        };
        self.depths.iter().flat_map(|depth| paper_monolithic(*depth).into_iter().chain(applications(*depth))).collect()
    }

    /// The queue depth of the experiments that use only one.
    pub(crate) fn depth_of_side_experiments(&self) -> u32 {
        self.depths[0].max(32)
    }

    /// Rounds of the expanding experiment. Each round creates a disk, so quick studies use at most
    /// 3.
    pub(crate) fn expanding_rounds(&self) -> usize {
        if self.quick { self.rounds.min(3) } else { self.rounds }
    }

    /// Bytes that the sequential writes of the expanding experiment cover.
    pub(crate) fn streamed_bytes(&self) -> u64 {
        if self.quick { 128 << 20 } else { 2 << 30 }
    }

    /// What the full study measures and a quick one does not.
    pub(crate) fn left_out(&self) -> Vec<String> {
        if !self.quick {
            return Vec::new();
        }
        let depths: Vec<String> = self.depths.iter().map(u32::to_string).collect();
        vec![
            format!("queue depths other than {} of 1 to 256", depths.join(", ")),
            "nine of the twelve applications".into(),
            "writes into empty differencing disks".into(),
            "VHDX with blocks of 1 and 32 MiB, and twelve of the sixteen workloads with VHD blocks of 512 KiB".into(),
        ]
    }

    pub(crate) fn plan(&self) -> Plan {
        Plan {
            rounds: self.rounds,
            warm_up: Duration::ZERO,
            measured: Duration::ZERO,
            engine: self.how.engine,
            seed: self.how.seed,
        }
    }

    pub(crate) fn record(&self) -> ContainersRecord {
        ContainersRecord {
            quick: self.quick,
            size_bytes: self.how.size_bytes,
            asked_bytes: self.asked_bytes.filter(|&asked_bytes| asked_bytes != self.how.size_bytes),
            block_bytes: 2 << 20,
            rounds: self.rounds,
            queue_depths: self.depths.clone(),
            cache: cache_word(self.how.cache).into(),
            engine: engine_word(self.how.engine).into(),
            seed: self.how.seed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_that_measure_nothing_are_refused() {
        let bad = |change: fn(&mut ContainersOptions)| {
            let mut options = ContainersOptions::default();
            change(&mut options);
            assert!(matches!(Settings::new(&options, Instant::now()), Err(LabError::BadOptions { .. })));
        };
        bad(|options| options.study.rounds = Some(0));
        bad(|options| options.queue_depths = Some(vec![]));
        bad(|options| options.queue_depths = Some(vec![1, 0]));
        bad(|options| options.size_bytes = Some(u64::MAX));
    }
}
