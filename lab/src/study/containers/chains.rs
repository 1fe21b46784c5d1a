//! The chain-length experiment: reads and opening times for growing chains of differencing disks.
//!
//! As in the paper, reads go to the top of the chain. All lengths are measured in every round, and
//! the ratio to a chain of one is taken within the round. The paper ends at 64 differencing disks;
//! this experiment ends at the longest chain that Windows allows.

use super::record::{CHAIN, ChainLength, ChainRecord, chain_name};
use crate::{
    LabError, Result,
    cells::Cell,
    chain::{CHILDREN_MAX, Chain, ChainPlan},
    child::{self, ChildLauncher},
    fill,
    measure::{self, Plan, Steps},
    progress::{Progress, report},
    scratch::Scratch,
    study::budget::Budget,
    targets::{Preparation, open_target},
};
use diskwright_disk::Disk;
use diskwright_load::{
    OpenTarget,
    warning::Warning,
    workload::{Direction, Pattern, Workload},
};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

/// The paper's lengths, 256, and the longest chain that Windows allows.
pub(crate) const LENGTHS: [u32; 9] = [1, 2, 4, 8, 16, 32, 64, 256, CHILDREN_MAX];

/// Longest cell if the study has a time budget: there are many cells, and short ones suffice.
const QUICK_CELL: Duration = Duration::from_millis(120);

/// The two workloads of the paper's chain charts.
pub(crate) fn workloads(queue_depth: u32) -> [Workload; 2] {
    [
        Workload::new(Pattern::Random, Direction::Read, 4 << 10, queue_depth),
        Workload::new(Pattern::Sequential, Direction::Read, 64 << 10, queue_depth),
    ]
}

/// Inputs of the experiment.
pub(crate) struct ChainExperiment<'a> {
    pub(crate) scratch: &'a Scratch,
    pub(crate) how: Preparation,
    pub(crate) queue_depth: u32,
    pub(crate) plan: Plan,
    pub(crate) budget: Budget,
    pub(crate) launcher: Option<&'a ChildLauncher>,
    /// Ascending; the ratios are to the first.
    pub(crate) lengths: &'a [u32],
}

impl ChainExperiment<'_> {
    /// Makes the chain, verifies the longest length, and measures every length. `found` is set
    /// before the first read is measured; the cells are added to `cells`.
    pub(crate) fn run(
        &self,
        (found, cells): (&mut Option<ChainRecord>, &mut Vec<Cell>),
        warnings: &mut Vec<Warning>,
        progress: &mut dyn Progress,
    ) -> Result<()> {
        let dir = self.scratch.folder("chain")?;
        let children = self.lengths.iter().copied().max().unwrap_or(0);
        let plan = ChainPlan { how: self.how, filled_bytes: self.how.size_bytes, children, with_own_data: 0 };
        let start = Instant::now();
        let chain = Chain::make(&dir, &plan, &mut |done| {
            report(progress, "make a chain", done, u64::from(children), "differencing disks")
        })?;
        let made_in_ns = start.elapsed().as_nanos() as u64;

        let mut lengths = Vec::new();
        let mut disks: Vec<(String, Arc<Disk>)> = Vec::new();
        for &children in self.lengths {
            report(
                progress,
                "open chains",
                disks.len() as u64,
                self.lengths.len() as u64,
                &format!("{children} children"),
            )?;
            match self.open(&chain, children) {
                Ok((length, disk)) => {
                    lengths.push(length);
                    disks.push((chain_name(children), disk));
                }
                Err(error) => {
                    // Ctrl-C also kills the child process. Then `report` ends the study, and no
                    // warning is needed.
                    report(progress, "open chains", disks.len() as u64, self.lengths.len() as u64, "")?;
                    // Most likely the limit of open files. The shorter lengths are still measured.
                    let what = format!("chains of {children} and longer");
                    warnings.push(Warning::LeftOut { what, why: error.to_string() });
                    break;
                }
            }
        }
        let verified_bytes = match disks.last() {
            Some((name, longest)) => {
                fill::verify(name, &**longest, self.how.seed, self.how.engine, &mut |done| {
                    report(progress, "verify", done, self.how.size_bytes, name)
                })?;
                fill::check_populated(name, &**longest, true)?;
                self.how.size_bytes
            }
            None => 0,
        };
        *found = Some(ChainRecord { size_bytes: self.how.size_bytes, verified_bytes, made_in_ns, lengths });
        self.reads(&disks, cells, progress)?;
        drop(disks);
        std::fs::remove_dir_all(&dir).map_err(LabError::file("remove", &dir))
    }

    fn open(&self, chain: &Chain, children: u32) -> Result<(ChainLength, Arc<Disk>)> {
        let (path, cache) = (chain.top(children), self.how.cache);
        let open = match self.launcher {
            Some(launcher) => launcher.open(path, 0, 4096, cache)?,
            None => child::open_cost(path, 0, 4096, cache)?,
        };
        let disk = chain.open(children, cache, self.how.engine)?;
        Ok((ChainLength { children, open, in_child_process: self.launcher.is_some() }, disk))
    }

    fn reads(&self, disks: &[(String, Arc<Disk>)], cells: &mut Vec<Cell>, progress: &mut dyn Progress) -> Result<()> {
        let targets: Vec<OpenTarget> =
            disks.iter().map(|(name, disk)| open_target(name, "vhdx chain", disk.clone(), self.how.cache)).collect();
        let budget = self.budget.at_most(QUICK_CELL);
        let workloads = workloads(self.queue_depth);
        let total = targets.len() * workloads.len() * self.plan.rounds;
        let mut steps = Steps::new(progress, "chain length", total);
        for workload in &workloads {
            let plan = self.plan.with_cell(budget.cell(Instant::now(), total));
            measure::compare(CHAIN, &targets, workload, &plan, &mut steps, cells)?;
        }
        Ok(())
    }
}
