//! Builds the sweep of each stage from the settings and the results of earlier stages.
//!
//! | stage | in the paper | varies | fixed |
//! |---|---|---|---|
//! | files | pre-test 2 | files 1, 2, 4 | 96 in flight, the volume of data |
//! | agents | | agents 1, 2, 3, 4, 6 ... | on each agent: 8 threads x 12, the volume of data |
//! | depths | random small I/O, test 1 | 1 to 24 outstanding per thread | 8 threads |
//! | combinations | random small I/O, test 2 | threads x outstanding | in flight, from test 1 |
//! | reads, writes | sequential large I/O | 1 to 36 and 1 to 32 outstanding | one thread |
//!
//! The loads are those of the profile `storage-spaces`. Sequential tests begin at 1 outstanding.
//! The paper begins at 8 and 4, and would miss the knee of a device that needs fewer.
//!
//! Files share threads and data: with more files each has less of both. Each agent has threads and
//! data of its own, and in the sequential tests each agent has one thread.

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

/// What a stage takes from the bed and from earlier stages.
#[derive(Debug, Clone, Copy)]
pub(super) struct StageInput {
    /// Files or agents that the stage may use. The stages `Files` and `Agents` vary their number up
    /// to this.
    pub members: u32,
    /// Bytes under test, summed over the files, or on each agent.
    pub volume_bytes: u64,
    /// Total requests in flight for the stage `Combinations`.
    pub depth: u32,
}

/// The sweep of a stage. A cell takes `cell`, warm-up included; `names` are those of the files or
/// agents.
///
/// # Errors
/// None for the built-in profile.
pub(super) fn sweep(
    stage: Stage,
    settings: &Settings,
    input: StageInput,
    cell: Duration,
    names: &[String],
) -> Result<SweepOptions> {
    let mut job = job(stage, settings, cell)?;
    let is_fleet = settings.is_fleet();
    // Sequential tests have one thread on one file, or on each agent.
    let members = if matches!(stage, Stage::Reads | Stage::Writes) && !is_fleet { 1 } else { input.members };
    let load = &mut job.phases[0].loads[0];
    let sharing = if stage == Stage::Files || is_fleet { 1 } else { members };
    load.working_set = Bytes(((input.volume_bytes / u64::from(sharing)) & !4095).max(4096));
    if !matches!(stage, Stage::Reads | Stage::Writes) {
        load.threads = (settings.threads / sharing).max(1);
        load.queue_depth = paper::PRE_TEST_DEPTH;
    }
    let (knob, total_depth) = match stage {
        Stage::Files => (Knob::Files, Some(settings.threads * paper::PRE_TEST_DEPTH)),
        Stage::Agents => (Knob::Agents, None),
        Stage::Depths | Stage::Reads | Stage::Writes => (Knob::QueueDepth, None),
        Stage::Combinations => (Knob::Threads, Some(input.depth)),
    };
    let mut values = values(stage, settings);
    values.retain(|value| stage != Stage::Files || *value <= u64::from(members));
    Ok(SweepOptions {
        job,
        targets: names.iter().take(members as usize).cloned().collect(),
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
        Stage::Files | Stage::Agents | Stage::Depths | Stage::Combinations => "oltp",
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

/// Pre-test 1: 8 threads with 12 outstanding each, on one file or on each agent. The measured
/// window begins at the steady state.
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
pub(super) fn values(stage: Stage, settings: &Settings) -> Vec<u64> {
    match (stage, settings.quick) {
        (Stage::Files, _) => vec![1, 2, 4],
        (Stage::Agents, _) => numbers_of_agents(settings.agents.len() as u64),
        (Stage::Depths | Stage::Combinations, false) => (1..=24).collect(),
        (Stage::Depths, true) => vec![1, 2, 3, 4, 6, 8, 10, 12, 14, 17, 20, 24],
        (Stage::Combinations, true) => vec![1, 2, 4, 8, 12, 24],
        (Stage::Reads, false) => (1..=36).collect(),
        (Stage::Reads, true) => vec![1, 2, 3, 4, 6, 8, 12, 16, 24, 31],
        (Stage::Writes, false) => (1..=32).collect(),
        (Stage::Writes, true) => vec![1, 2, 3, 4, 6, 8, 11, 15, 24, 32],
    }
}

/// Numbers of agents up to `all`: 1, 2, 3, 4, 6, 8, 12, 16 and so on, and all of them.
fn numbers_of_agents(all: u64) -> Vec<u64> {
    let powers = (0..u64::BITS).map(|exponent| 1_u64 << exponent);
    let mut numbers: Vec<u64> = powers.flat_map(|power| [power, power + power / 2]).collect();
    numbers.retain(|number| *number < all);
    numbers.push(all);
    numbers.dedup();
    numbers
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

    fn cells(stage: Stage, input: StageInput, settings: &Settings) -> Vec<(u32, u32, u32, u64)> {
        let options = sweep(stage, settings, input, Duration::from_secs(3), &names()).unwrap();
        sweep::plan::cells(&options)
            .unwrap()
            .iter()
            .map(|cell| (cell.files, cell.threads, cell.queue_depth, cell.measured.in_flight))
            .collect()
    }

    #[test]
    fn the_cells_are_those_of_the_papers_tables() {
        let settings = Settings::example();
        let input = |members| StageInput { members, volume_bytes: 64 << 30, depth: 120 };
        assert_eq!(cells(Stage::Files, input(4), &settings), [(1, 8, 12, 96), (2, 4, 12, 96), (4, 2, 12, 96)]);
        let depths: Vec<_> = (1..=24).map(|depth| (1, 8, depth, u64::from(depth) * 8)).collect();
        assert_eq!(cells(Stage::Depths, input(1), &settings), depths);
        let combinations: Vec<_> = paper::table(Stage::Combinations)
            .iter()
            .map(|point| (1, point.at as u32, 120 / point.at as u32, 120))
            .collect();
        assert_eq!(cells(Stage::Combinations, input(1), &settings), combinations);
        assert_eq!(cells(Stage::Reads, input(2), &settings).len(), 36);
        assert_eq!(cells(Stage::Writes, input(2), &settings).last(), Some(&(1, 1, 32, 32)));
    }

    #[test]
    fn the_number_of_agents_grows_to_all_of_them() {
        assert_eq!([1, 2, 4].map(numbers_of_agents), [vec![1], vec![1, 2], vec![1, 2, 3, 4]]);
        assert_eq!(numbers_of_agents(20), [1, 2, 3, 4, 6, 8, 12, 16, 20]);
        assert_eq!(numbers_of_agents(256).len(), 16);
    }

    #[test]
    fn more_files_share_threads_and_data() {
        let settings = Settings::example();
        let input = StageInput { members: 2, volume_bytes: 64 << 30, depth: 120 };
        let options = sweep(Stage::Depths, &settings, input, Duration::from_secs(3), &names()).unwrap();
        let load = &options.job.phases[0].loads[0];
        assert_eq!((load.threads, load.working_set.0 >> 30, options.targets.len()), (4, 32, 2));
        assert_eq!(cells(Stage::Depths, input, &settings)[2], (2, 4, 3, 24));
        // A third of a cell is warm-up, and the loads are the paper's.
        let phase = &options.job.phases[0];
        assert_eq!((phase.warm_up, phase.duration), (Span::from_secs(1), Span::from_secs(2)));
        assert_eq!((load.block.largest_bytes(), load.read_percent, load.random_percent), (8192, 70.0, 100.0));
    }

    #[test]
    fn a_quick_form_has_the_papers_marks_among_its_values() {
        let full = Settings::example();
        let quick = Settings { quick: true, ..full.clone() };
        for stage in [Stage::Depths, Stage::Combinations, Stage::Reads, Stage::Writes] {
            let (quick, full) = (values(stage, &quick), values(stage, &full));
            assert!(quick.iter().all(|value| full.contains(value)), "{stage:?}");
            assert!(paper::table(stage).iter().filter(|point| quick.contains(&point.at)).count() >= 4, "{stage:?}");
        }
        assert!(values(Stage::Reads, &quick).contains(&31) && values(Stage::Writes, &quick).contains(&15));
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
