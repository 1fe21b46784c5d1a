//! Writes that allocate space, against the same writes on a full disk.
//!
//! ```text
//!   each round, in changing order:
//!      full disk    writes, flush
//!      empty disk   create it, writes, flush, remove it, wait for the file system
//! ```
//!
//! Two workloads: sequential writes, which allocate block after block, and small random writes,
//! most of which allocate a block. The number of writes is limited so that most of them meet a new
//! block. Writes and the flush after them are timed separately, because an image may write its
//! metadata at once or in the flush.
//!
//! The paper has no figures for this, only a warning: "that gap may be widened if the VHD has to
//! expand itself first".

use super::record::{EXPANDING, expanding_name};
use crate::{
    LabError, Result,
    cells::{Cell, Compared},
    ratio::Ratio,
    rounds::{self, Rounds, Steps, Window},
    scratch::Scratch,
    study::flushed::{self, FLUSH_NS, rates_with_flush},
    targets::{self, Preparation, Target},
};
use diskwright_load::{
    figures::Figures,
    job::{Job, Span},
    run::Watch,
    workload::{Direction, Pattern, Workload},
};

/// Small random writes per block. With 4 almost every block (98 %) gets at least one.
const WRITES_PER_BLOCK: u64 = 4;

/// A full disk, and the block size of its empty twin.
pub(crate) struct Subject<'a> {
    pub(crate) full: &'a Target,
    pub(crate) block_bytes: u32,
}

/// Inputs of the experiment.
pub(crate) struct Expanding<'a> {
    pub(crate) scratch: &'a Scratch,
    pub(crate) how: Preparation,
    pub(crate) rounds: usize,
    pub(crate) queue_depth: u32,
    /// Bytes that the sequential writes cover.
    pub(crate) streamed_bytes: u64,
}

/// The same writes into a full disk and into an empty one.
pub(crate) struct Pair<'a> {
    pub(crate) full: &'a Cell,
    pub(crate) empty: &'a Cell,
}

impl<'a> Pair<'a> {
    /// All pairs among the cells of a result.
    pub(crate) fn all(cells: &'a [Cell]) -> Vec<Self> {
        let mut pairs = Vec::new();
        for load in Compared::of_part(cells, EXPANDING) {
            pairs.extend(load.cells.chunks_exact(2).map(|pair| Self { full: pair[0], empty: pair[1] }));
        }
        pairs
    }

    /// The kind of disk.
    pub(crate) fn target(&self) -> &'a str {
        self.full.subject.rsplit_once(", ").map_or("", |(target, _)| target)
    }

    /// Speed of the empty disk as a ratio to the full disk; the time includes the flush.
    pub(crate) fn ratio_with_flush(&self) -> Option<Ratio> {
        Ratio::of(&rates_with_flush(self.empty)?, &rates_with_flush(self.full)?)
    }
}

impl Expanding<'_> {
    /// The workloads and their numbers of writes, for a disk with this block size.
    fn workloads(&self, block_bytes: u32) -> [(Workload, u64); 2] {
        let writes = |pattern, len_bytes| Workload::new(pattern, Direction::Write, len_bytes, self.queue_depth);
        let blocks = self.how.size_bytes.div_ceil(u64::from(block_bytes));
        let streamed = self.streamed_bytes.min(self.how.size_bytes) / (64 << 10);
        [
            (writes(Pattern::Sequential, 64 << 10), streamed.max(1)),
            (writes(Pattern::Random, 4 << 10), (blocks * WRITES_PER_BLOCK).max(1)),
        ]
    }

    /// Cells for this number of subjects.
    pub(crate) fn cells(&self, subjects: usize) -> u64 {
        (subjects * 2 * 2 * self.rounds) as u64
    }

    /// Measures both workloads on `subject`, and adds a pair of cells for each to `cells`.
    pub(crate) fn measure(&self, subject: &Subject<'_>, cells: &mut Vec<Cell>, steps: &mut Steps<'_>) -> Result<()> {
        let full = subject.full.to_measure();
        let states = ["full", "empty"];
        for (workload, writes) in self.workloads(subject.block_bytes) {
            let mut pair = states.map(|state| {
                Cell::new(EXPANDING, &workload.name, &expanding_name(&full.name, state), self.queue_depth.into())
            });
            let mut job = Job::simple(&workload.name, workload.load(), Span::default(), Span::from_secs(1));
            job.phases[0].count = Some(writes);
            (job.seed, job.engine, job.cache) = (self.how.seed, self.how.engine.into(), full.cache);
            let title = |at: Window| Some(format!("{}, {} {}", workload.name, full.name, states[at.cell]));
            let mut measure = |at: Window, watch: &dyn Watch| {
                // No change of the start offset: a sequential stream must begin at the first block.
                let job = rounds::job_of(&job, &workload.name, at.round, None);
                let (figures, flush_ns) = match at.cell {
                    0 => flushed::write(&job, &full, self.how.engine, watch)?,
                    _ => self.write_into_new(&job, subject, watch)?,
                };
                pair[at.cell].rounds.push(figures);
                pair[at.cell].push_more(FLUSH_NS, Some(flush_ns));
                Ok(())
            };
            let rounds = Rounds::new(self.rounds, self.how.seed);
            let done = rounds::interleave(&rounds, states.len(), steps, &title, &mut measure)?;
            pair.iter_mut().for_each(|cell| cell.truncate(done.whole));
            if done.whole > 0 {
                cells.extend(pair);
            }
            done.or_stopped()?;
        }
        Ok(())
    }

    fn write_into_new(&self, job: &Job, subject: &Subject<'_>, watch: &dyn Watch) -> Result<(Figures, f64)> {
        let container = subject.full.container;
        let dir = self.scratch.folder("expanding")?;
        let path = targets::create_with_blocks(container, &dir, self.how.size_bytes, Some(subject.block_bytes))?;
        let target = Target::open(container, path, self.how.cache, self.how.engine)?;
        let round = flushed::write(job, &target.to_measure(), self.how.engine, watch)?;
        target.close()?;
        std::fs::remove_dir_all(&dir).map_err(LabError::file("remove", &dir))?;
        // Wait until the file system has freed the file, so that this does not slow the next round.
        self.scratch.settle()?;
        Ok(round)
    }
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
        let mut cells = Vec::new();
        let total = experiment.cells(1);
        let mut steps = Steps { progress: &mut Silent, phase: "expanding", done: 0, total };
        let subject = Subject { full: &full, block_bytes: 512 << 10 };
        experiment.measure(&subject, &mut cells, &mut steps).unwrap();
        let pairs = Pair::all(&cells);
        assert_eq!((steps.done, pairs.len()), (total, 2));
        for (pair, writes) in pairs.iter().zip([128, 256]) {
            assert_eq!((pair.target(), pair.full.subject.as_str()), ("VHD dynamic", "VHD dynamic, full"));
            assert_eq!(pair.empty.subject, "VHD dynamic, empty");
            let rounds = [pair.full, pair.empty].into_iter().flat_map(|cell| &cell.rounds);
            assert!(rounds.into_iter().all(|round| round.writes == writes && round.reads == 0));
            // With the flush in it, a disk is slower than without.
            let rates = rates_with_flush(pair.empty).unwrap();
            assert!(rates.iter().zip(&pair.empty.rounds).all(|(rate, round)| *rate < round.iops), "{rates:?}");
            assert_eq!(pair.ratio_with_flush().unwrap().each.len(), 2);
        }
        full.close().unwrap();
        assert!(!scratch.path().join("expanding").exists());
    }
}
