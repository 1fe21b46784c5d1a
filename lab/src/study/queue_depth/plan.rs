//! Builds the sweep of each stage from the settings and the results of earlier stages.
//!
//! | stage | in the paper | varies | fixed |
//! |---|---|---|---|
//! | files | pre-test 2 | files 1, 2, 4 | 96 in flight, the volume of data |
//! | depths | random small I/O, test 1 | 1 to 24 outstanding per thread | 8 threads |
//! | combinations | random small I/O, test 2 | threads x outstanding | in flight, from test 1 |
//! | reads, writes | sequential large I/O | 1 to 36 and 1 to 32 outstanding | one thread |
//!
//! The loads are those of the profile `storage-spaces`. Sequential tests begin at 1 outstanding.
//! The paper begins at 8 and 4, and would miss the knee of a device that needs fewer.

use super::{Settings, Stage, paper};
use crate::{
    Result,
    sweep::{Axis, Knob, SweepOptions},
};
use diskwright_load::{
    job::{Bytes, Job, Span},
    profiles,
};
use std::time::Duration;

/// Total depths that can be split over many numbers of threads. The paper rounded 124.8 to 120 for
/// the same reason.
const DIVISIBLE: [u32; 20] = [1, 2, 4, 6, 8, 12, 16, 24, 36, 48, 60, 72, 96, 120, 144, 168, 180, 192, 240, 360];

/// A cell is this many times as long as its warm-up: 15 minutes to 5 in the paper.
const WARM_UP_OF_CELL: u32 = 3;

/// What a stage takes from earlier stages.
#[derive(Debug, Clone, Copy)]
pub(super) struct TestBed {
    /// Files that the stage may use. The stage `Files` varies their number up to this.
    pub files: u32,
    /// Bytes under test, summed over the files.
    pub volume_bytes: u64,
    /// Total requests in flight for the stage `Combinations`.
    pub depth: u32,
}

/// The sweep of a stage. A cell takes `cell`, warm-up included; `targets` are the names of the
/// targets.
///
/// # Errors
/// None for the built-in profile.
pub(super) fn sweep(
    stage: Stage,
    settings: &Settings,
    test_bed: TestBed,
    cell: Duration,
    targets: &[String],
) -> Result<SweepOptions> {
    let mut job = job(stage, settings, cell)?;
    // Sequential tests have one thread on one file.
    let files = if matches!(stage, Stage::Reads | Stage::Writes) { 1 } else { test_bed.files };
    let load = &mut job.phases[0].loads[0];
    let sharing = if stage == Stage::Files { 1 } else { files };
    load.working_set = Bytes(((test_bed.volume_bytes / u64::from(sharing)) & !4095).max(4096));
    if matches!(stage, Stage::Files | Stage::Depths | Stage::Combinations) {
        load.threads = (settings.threads / sharing).max(1);
        load.queue_depth = paper::PRE_TEST_DEPTH;
    }
    let (knob, total_depth) = match stage {
        Stage::Files => (Knob::Files, Some(settings.threads * paper::PRE_TEST_DEPTH)),
        Stage::Depths | Stage::Reads | Stage::Writes => (Knob::QueueDepth, None),
        Stage::Combinations => (Knob::Threads, Some(test_bed.depth)),
    };
    let mut values = values(stage, settings.quick);
    values.retain(|value| stage != Stage::Files || *value <= u64::from(files));
    Ok(SweepOptions {
        job,
        targets: targets.iter().take(files as usize).cloned().collect(),
        axes: vec![Axis { knob, values }],
        rounds: settings.rounds,
        total_depth,
        max_p99: settings.max_p99,
        array: settings.array,
    })
}

/// The job of a stage. A third of `cell` is warm-up, the rest is measured.
///
/// # Errors
/// None for the built-in profile.
pub(super) fn job(stage: Stage, settings: &Settings, cell: Duration) -> Result<Job> {
    let phase = match stage {
        Stage::Files | Stage::Depths | Stage::Combinations => "oltp",
        Stage::Reads => "sequential-read",
        Stage::Writes => "sequential-write",
    };
    let mut job = profiles::load(&format!("storage-spaces/{phase}"))?;
    let warm_up = cell / WARM_UP_OF_CELL;
    job.phases[0].warm_up = warm_up.into();
    job.phases[0].duration = cell.saturating_sub(warm_up).max(Duration::from_millis(1)).into();
    (job.cache, job.engine) = (settings.cache, settings.engine);
    Ok(job)
}

/// Pre-test 1: 8 threads with 12 outstanding each. The measured window begins at the steady state.
///
/// # Errors
/// None for the built-in profile.
pub(super) fn pre_test(settings: &Settings, volume_bytes: u64) -> Result<Job> {
    let mut job = job(Stage::Depths, settings, Duration::from_secs(1))?;
    // 5 minutes to reach the steady state and 10 minutes of measuring, as in the paper; less if
    // cells are short.
    let (within, measured) = match settings.cell.map(Duration::from) {
        Some(cell) => ((cell * 10).min(Duration::from_secs(300)), (cell * 5).min(Duration::from_secs(600))),
        None => (Duration::from_secs(5), Duration::from_secs(3)),
    };
    let phase = &mut job.phases[0];
    (phase.warm_up, phase.duration, phase.steady_within) = (Span::default(), measured.into(), Some(within.into()));
    let load = &mut phase.loads[0];
    (load.threads, load.queue_depth) = (settings.threads, paper::PRE_TEST_DEPTH);
    load.working_set = Bytes(volume_bytes);
    job.interval = (within / 40).clamp(Duration::from_millis(10), Duration::from_secs(1)).into();
    job.name = "pre-test".into();
    Ok(job)
}

/// The values on a stage's axis. With `quick` there are fewer, but the paper's own ends and
/// findings are among them.
pub(super) fn values(stage: Stage, quick: bool) -> Vec<u64> {
    match (stage, quick) {
        (Stage::Files, _) => vec![1, 2, 4],
        (Stage::Depths | Stage::Combinations, false) => (1..=24).collect(),
        (Stage::Depths, true) => vec![1, 2, 3, 4, 6, 8, 10, 12, 14, 17, 20, 24],
        (Stage::Combinations, true) => vec![1, 2, 4, 8, 12, 24],
        (Stage::Reads, false) => (1..=36).collect(),
        (Stage::Reads, true) => vec![1, 2, 3, 4, 6, 8, 12, 16, 24, 31],
        (Stage::Writes, false) => (1..=32).collect(),
        (Stage::Writes, true) => vec![1, 2, 3, 4, 6, 8, 11, 15, 24, 32],
    }
}

/// The total of [`DIVISIBLE`] nearest to `load`, by ratio.
pub(super) fn divisible(load: f64) -> u32 {
    let far = |total: &u32| (f64::from(*total) / load.max(1.0)).ln().abs();
    DIVISIBLE.into_iter().min_by(|a, b| far(a).total_cmp(&far(b))).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sweep;

    fn names() -> Vec<String> {
        (1..=4).map(|number| format!("test{number}.dat")).collect()
    }

    fn cells(stage: Stage, test_bed: TestBed, settings: &Settings) -> Vec<(u32, u32, u32, u64)> {
        let options = sweep(stage, settings, test_bed, Duration::from_secs(3), &names()).unwrap();
        sweep::plan::cells(&options)
            .unwrap()
            .iter()
            .map(|cell| (cell.files, cell.threads, cell.queue_depth, cell.measured.in_flight))
            .collect()
    }

    #[test]
    fn the_cells_are_those_of_the_papers_tables() {
        let settings = Settings::example();
        let test_bed = |files| TestBed { files, volume_bytes: 64 << 30, depth: 120 };
        assert_eq!(cells(Stage::Files, test_bed(4), &settings), [(1, 8, 12, 96), (2, 4, 12, 96), (4, 2, 12, 96)]);
        let depths: Vec<_> = (1..=24).map(|depth| (1, 8, depth, u64::from(depth) * 8)).collect();
        assert_eq!(cells(Stage::Depths, test_bed(1), &settings), depths);
        let combinations: Vec<_> = paper::table(Stage::Combinations)
            .iter()
            .map(|point| (1, point.at as u32, 120 / point.at as u32, 120))
            .collect();
        assert_eq!(cells(Stage::Combinations, test_bed(1), &settings), combinations);
        assert_eq!(cells(Stage::Reads, test_bed(2), &settings).len(), 36);
        assert_eq!(cells(Stage::Writes, test_bed(2), &settings).last(), Some(&(1, 1, 32, 32)));
    }

    #[test]
    fn more_files_share_threads_and_data() {
        let settings = Settings::example();
        let test_bed = TestBed { files: 2, volume_bytes: 64 << 30, depth: 120 };
        let options = sweep(Stage::Depths, &settings, test_bed, Duration::from_secs(3), &names()).unwrap();
        let load = &options.job.phases[0].loads[0];
        assert_eq!((load.threads, load.working_set.0 >> 30, options.targets.len()), (4, 32, 2));
        assert_eq!(cells(Stage::Depths, test_bed, &settings)[2], (2, 4, 3, 24));
        // A third of a cell is warm-up, and the loads are the paper's.
        let phase = &options.job.phases[0];
        assert_eq!((phase.warm_up, phase.duration), (Span::from_secs(1), Span::from_secs(2)));
        assert_eq!((load.block.largest_bytes(), load.read_percent, load.random_percent), (8192, 70.0, 100.0));
    }

    #[test]
    fn a_quick_form_has_the_papers_marks_among_its_values() {
        for stage in [Stage::Depths, Stage::Combinations, Stage::Reads, Stage::Writes] {
            let (quick, full) = (values(stage, true), values(stage, false));
            assert!(quick.iter().all(|value| full.contains(value)), "{stage:?}");
            assert!(paper::table(stage).iter().filter(|point| quick.contains(&point.at)).count() >= 4, "{stage:?}");
        }
        assert!(values(Stage::Reads, true).contains(&31) && values(Stage::Writes, true).contains(&15));
    }

    #[test]
    fn totals_are_rounded_so_that_threads_can_share_them() {
        assert_eq!([124.8, 128.0, 8.0, 40.0, 1.0, 0.2, 300.0].map(divisible), [120, 120, 8, 36, 1, 1, 360]);
        assert_eq!(divisible(280.0), 240);
    }

    #[test]
    fn the_pre_test_waits_for_the_steady_state() {
        let full = pre_test(&Settings::example(), 64 << 30).unwrap();
        let phase = &full.phases[0];
        assert_eq!((phase.steady_within, phase.duration), (Some(Span::from_secs(300)), Span::from_secs(600)));
        assert_eq!(full.interval, Span::from_secs(1));
        let tiny = Settings { cell: Some(Span::from_millis(30)), quick: true, ..Settings::example() };
        pre_test(&tiny, 8 << 20).unwrap().validate().unwrap();
    }
}
