//! Writes that must find space first, against the same writes where all space is found.
//!
//! ```text
//!   each round, in changing order:   full disk    writes, flush
//!                                    empty disk   make it, writes, flush, remove it, let the file system finish
//! ```
//!
//! Two ways of growing: streaming writes, which fill block after block, and small writes all over
//! the disk, each of which may be the first in its block. The number of writes is such that most
//! blocks are new; after that the empty disk is a full one and there is nothing to compare. Writes
//! and the flush behind them are told apart, for an engine may gather metadata until the flush, or
//! write it at once.
//!
//! The paper has no figures for this, only a warning: "that gap may be widened if the VHD has to
//! expand itself first".

use crate::{
    LabError, Result,
    measure::{self, CellResult, Ratio, Steps, WorkloadResult},
    progress::report,
    result::ExpandingRecord,
    scratch::Scratch,
    targets::{self, Preparation, Target},
};
use diskwright_load::{
    LoadError, OpenTarget,
    figures::Figures,
    job::{Job, Span},
    run::{RunOptions, Watch},
    seeds,
    workload::{Direction, Pattern, Workload},
};
use diskwright_stats::summary::{Summary, round_order};
use diskwright_store::Blocking;
use std::time::Instant;

/// Small writes for each block: all but a few of the blocks then get one.
const WRITES_PER_BLOCK: u64 = 4;

/// A full disk, and what its empty twin is made with.
pub(crate) struct Subject<'a> {
    pub(crate) full: &'a Target,
    pub(crate) block_bytes: u32,
}

/// What the experiment needs to know.
pub(crate) struct Expanding<'a> {
    pub(crate) scratch: &'a Scratch,
    pub(crate) how: Preparation,
    pub(crate) rounds: usize,
    pub(crate) queue_depth: u32,
    /// Streaming writes end after so many bytes.
    pub(crate) streamed_bytes: u64,
}

/// What one disk did in one round.
struct Round {
    figures: Figures,
    flush_ns: f64,
}

impl Round {
    /// Writes a second, the flush included.
    fn rate_with_flush(&self) -> f64 {
        self.figures.ios() as f64 * 1e9 / (self.figures.window_ns as f64 + self.flush_ns).max(1.0)
    }
}

impl Expanding<'_> {
    /// The workloads, and how many writes of each go to a disk with these blocks.
    fn workloads(&self, block_bytes: u32) -> [(Workload, u64); 2] {
        let writes = |pattern, len_bytes| Workload::new(pattern, Direction::Write, len_bytes, self.queue_depth);
        let blocks = self.how.size_bytes.div_ceil(u64::from(block_bytes));
        let streamed = self.streamed_bytes.min(self.how.size_bytes) / (64 << 10);
        [
            (writes(Pattern::Sequential, 64 << 10), streamed.max(1)),
            (writes(Pattern::Random, 4 << 10), (blocks * WRITES_PER_BLOCK).max(1)),
        ]
    }

    /// How many cells `subjects` take.
    pub(crate) fn cells(&self, subjects: usize) -> u64 {
        (subjects * 2 * 2 * self.rounds) as u64
    }

    /// Measures both workloads on `subject`.
    pub(crate) fn measure(
        &self,
        subject: &Subject<'_>,
        results: &mut Vec<ExpandingRecord>,
        steps: &mut Steps<'_>,
    ) -> Result<()> {
        let full = subject.full.to_measure();
        for (workload, writes) in self.workloads(subject.block_bytes) {
            let mut rounds = [Vec::new(), Vec::new()];
            for round in 0..self.rounds {
                for who in round_order(2, round, self.how.seed) {
                    let state = if who == 0 { "full" } else { "empty" };
                    let message = format!("{}, {} {state}", workload.name, full.name);
                    report(steps.progress, steps.phase, steps.done, steps.total, &message)?;
                    let mut job = Job::simple(&workload.name, workload.load(), Span::default(), Span::from_secs(1));
                    job.phases[0].count = Some(writes);
                    job.seed = seeds::of_window(self.how.seed, &workload.name, round);
                    (job.engine, job.cache) = (self.how.engine.into(), full.cache);
                    let watch = steps.progress.watch();
                    rounds[who].push(match who {
                        0 => self.write(&job, &full, watch)?,
                        _ => self.write_into_new(&job, subject, watch)?,
                    });
                    steps.done += 1;
                }
            }
            results.push(record(subject, workload, writes, rounds)?);
        }
        Ok(())
    }

    fn write(&self, job: &Job, target: &OpenTarget, watch: &dyn Watch) -> Result<Round> {
        let phase = measure::window(job, target, &RunOptions::default(), watch)?;
        let start = Instant::now();
        let flushed = Blocking::open(&*target.device, self.how.engine).and_then(|mut device| device.flush());
        flushed.map_err(|source| LoadError::Queue { target: target.name.clone(), doing: "flush".into(), source })?;
        Ok(Round { figures: Figures::of(&phase), flush_ns: start.elapsed().as_nanos() as f64 })
    }

    fn write_into_new(&self, job: &Job, subject: &Subject<'_>, watch: &dyn Watch) -> Result<Round> {
        let container = subject.full.container;
        let dir = self.scratch.folder("expanding")?;
        let path = targets::create_with_blocks(container, &dir, self.how.size_bytes, Some(subject.block_bytes))?;
        let target = Target::open(container, path, self.how.cache, self.how.engine)?;
        let round = self.write(job, &target.to_measure(), watch)?;
        target.close()?;
        std::fs::remove_dir_all(&dir).map_err(LabError::file("remove", &dir))?;
        // Else giving the file back falls into the next round.
        self.scratch.settle()?;
        Ok(round)
    }
}

fn record(
    subject: &Subject<'_>,
    workload: Workload,
    writes: u64,
    [full, empty]: [Vec<Round>; 2],
) -> Result<ExpandingRecord> {
    let name = subject.full.name();
    let of = |rounds: &[Round], figure: fn(&Round) -> f64| rounds.iter().map(figure).collect::<Vec<f64>>();
    let nothing =
        || LabError::BadOptions { what: format!("{name}: nothing was written"), hint: "use more rounds".into() };
    let flush = |rounds: &[Round]| Summary::of(&of(rounds, |round| round.flush_ns)).ok_or_else(nothing);
    let (flush_full_ns, flush_empty_ns) = (flush(&full)?, flush(&empty)?);
    let ratio_with_flush =
        Ratio::of(&of(&empty, Round::rate_with_flush), &of(&full, Round::rate_with_flush)).ok_or_else(nothing)?;
    let [full, empty] = [full, empty].map(|rounds| rounds.into_iter().map(|round| round.figures).collect::<Vec<_>>());
    let window_ns = full.iter().chain(&empty).map(|round| round.window_ns).min().unwrap_or(0);
    let cells = vec![
        CellResult::new(&format!("{name}, full"), full.clone(), None)?,
        CellResult::new(&format!("{name}, empty"), empty, Some(&full))?,
    ];
    Ok(ExpandingRecord {
        container: subject.full.container,
        target: name.to_owned(),
        block_bytes: subject.block_bytes.into(),
        writes,
        result: WorkloadResult { workload, window_ns, cells },
        flush_full_ns,
        flush_empty_ns,
        ratio_with_flush,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{progress::Silent, targets::Container};
    use diskwright_store::{CacheMode, EngineKind};

    #[test]
    fn a_full_disk_and_an_empty_one_get_the_same_writes_and_the_empty_one_goes() {
        let home = tempfile::tempdir().unwrap();
        let scratch = Scratch::new(Some(home.path()), false).unwrap();
        let how = Preparation { size_bytes: 32 << 20, seed: 3, cache: CacheMode::PageCache, engine: EngineKind::Auto };
        let path = targets::make_filled(Container::VhdDynamic, scratch.path(), &how, &mut |_| Ok(())).unwrap();
        let full = targets::open_verified(Container::VhdDynamic, path, &how, &mut |_| Ok(())).unwrap();
        let experiment = Expanding { scratch: &scratch, how, rounds: 2, queue_depth: 4, streamed_bytes: 8 << 20 };
        let mut results = Vec::new();
        let total = experiment.cells(1);
        let mut steps = Steps { progress: &mut Silent, phase: "expanding", done: 0, total };
        let subject = Subject { full: &full, block_bytes: 512 << 10 };
        experiment.measure(&subject, &mut results, &mut steps).unwrap();
        assert_eq!((steps.done, results.len()), (total, 2));
        assert_eq!(results.iter().map(|record| record.writes).collect::<Vec<_>>(), [128, 256]);
        for record in &results {
            assert_eq!((record.container, record.block_bytes), (Container::VhdDynamic, 512 << 10));
            let names: Vec<&str> = record.result.cells.iter().map(|cell| cell.target.as_str()).collect();
            assert_eq!(names, ["VHD dynamic, full", "VHD dynamic, empty"]);
            let rounds = record.result.cells.iter().flat_map(|cell| &cell.rounds);
            assert!(rounds.into_iter().all(|round| round.writes == record.writes && round.reads == 0));
            // With the flush in it, a disk is slower than without.
            assert!(record.ratio_with_flush.each.len() == 2 && record.flush_empty_ns.min > 0.0);
        }
        full.close().unwrap();
        assert!(!scratch.path().join("expanding").exists());
    }
}
