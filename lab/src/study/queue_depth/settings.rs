//! What a study was asked, with everything that was left open filled in.

use super::paper;
use crate::{LabError, Result, prepare::PrepareOptions, study::StudyOptions, sweep::ArrayOptions};
use diskwright_load::job::{Caching, IoEngine, Span, THREADS_MAX};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// The paper's file.
const FULL_BYTES: u64 = 64 << 30;
pub(super) const QUICK_BYTES: u64 = 2 << 30;
/// Five rounds of three minutes are the paper's fifteen.
const FULL_CELL: Duration = Duration::from_secs(180);
const FULL_ROUNDS: usize = 5;
const QUICK_ROUNDS: usize = 3;
/// Files are whole multiples of this, so that a quarter is whole as well.
const SIZE_STEP_BYTES: u64 = 4 << 20;

/// Options of the study. The default is the full study on files of its own.
#[derive(Debug, Clone, Default)]
pub struct QueueDepthOptions {
    /// Options of every study. If `output` is the file of an unfinished study, that study
    /// continues.
    pub study: StudyOptions,
    /// Bytes under test: 64 GiB as in the paper, 2 GiB quick; of targets that are given, all of the
    /// smallest.
    pub size_bytes: Option<u64>,
    /// Threads for random I/O: 8 as in the paper.
    pub threads: Option<u32>,
    /// Requests in flight of the combinations; what test 1 finds unless said.
    pub target_depth: Option<u32>,
    /// What lies below the target.
    pub array: Option<ArrayOptions>,
    /// The 99th percentile that is still bearable.
    pub max_p99: Option<Span>,
    /// How requests reach the store; past the cache and durable when they complete, as in the
    /// paper, unless said.
    pub cache: Option<Caching>,
    /// Targets to measure instead of files of its own.
    pub targets: Vec<String>,
    /// How those are prepared.
    pub prepare: PrepareOptions,
}

/// What was asked, as far as a study that goes on must be asked the same; the last two may change.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Settings {
    /// The short form.
    pub quick: bool,
    /// Bytes under test; none: all of the targets.
    pub size_bytes: Option<u64>,
    /// Threads for random I/O, over all files.
    pub threads: u32,
    /// How often each cell is measured.
    pub rounds: u32,
    /// Length of a cell, its warm-up (a third) included; none: what the time allows.
    pub cell: Option<Span>,
    /// Asked for.
    pub cache: Caching,
    /// What moves the bytes.
    pub engine: IoEngine,
    /// Requests in flight of the combinations, where the user chose it.
    pub target_depth: Option<u32>,
    /// Targets that were given; none: files of its own.
    pub targets: Vec<String>,
    /// The limit for the 99th percentile.
    pub max_p99: Option<Span>,
    /// What lies below the target.
    pub array: Option<ArrayOptions>,
}

impl Settings {
    /// Fills in what is left open.
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
            return bad("the threads are not between 1 and 1024", "the paper uses 8 (`QueueDepthOptions::threads`)");
        }
        if options.target_depth == Some(0) {
            return bad(
                "a target depth of 0 moves nothing",
                "use at least 1 (`QueueDepthOptions::target_depth`), or leave it out",
            );
        }
        if options.array.is_some_and(|array| array.copies == 0 || array.devices == 0) {
            return bad("an array of no copies or no devices", "give both as 1 or more (`QueueDepthOptions::array`)");
        }
        if study.cell.is_some_and(|cell| cell.is_zero()) {
            return bad("a cell of no time measures nothing", "use at least some milliseconds (`StudyOptions::cell`)");
        }
        let own = options.targets.is_empty();
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
            max_p99: options.max_p99,
            array: options.array,
        })
    }

    /// The full study.
    #[cfg(test)]
    pub(super) fn example() -> Self {
        Self::new(&QueueDepthOptions::default()).expect("the defaults")
    }
}
