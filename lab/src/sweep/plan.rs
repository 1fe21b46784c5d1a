//! Plans a sweep: options to cells, and a cell to the job that measures it.

use super::{Axis, Coordinate, Knob, SweepCell, SweepOptions};
use crate::{LabError, Result, cells::Cell};
use diskwright_load::{
    job::{Bytes, Job},
    record::LatencyRecord,
};
use std::collections::HashSet;

/// Largest number of cells of a sweep.
pub const CELLS_MAX: usize = 1000;

/// Every combination of the axes that is possible, without rounds. The last axis varies fastest.
///
/// # Errors
/// [`LabError::BadOptions`] for options that no sweep can have.
pub fn cells(options: &SweepOptions) -> Result<Vec<SweepCell>> {
    check(options)?;
    let mut points: Vec<Vec<Coordinate>> = vec![Vec::new()];
    for Axis { knob, values } in &options.axes {
        points = points
            .iter()
            .flat_map(|point| {
                values.iter().map(|value| {
                    let mut longer = point.clone();
                    longer.push(Coordinate { knob: *knob, value: *value });
                    longer
                })
            })
            .collect();
    }
    if points.len() > CELLS_MAX {
        return bad(format!("{} combinations", points.len()), format!("sweep at most {CELLS_MAX} at a time"));
    }
    let mut cells = Vec::with_capacity(points.len());
    for point in points {
        if let Some(cell) = cell(options, point)? {
            cells.push(cell);
        }
    }
    match (cells.is_empty(), options.total_depth) {
        (true, Some(depth)) => bad(
            format!("no combination gives exactly {depth} requests in flight"),
            "choose threads, depths and files that divide the total",
        ),
        (true, None) => {
            bad("the axes have no values", "name at least one value: `SweepOptions::axes` = queue-depth=1..24")
        }
        (false, _) => Ok(cells),
    }
}

fn bad<T>(what: impl Into<String>, hint: impl Into<String>) -> Result<T> {
    Err(LabError::BadOptions { what: what.into(), hint: hint.into() })
}

fn check(options: &SweepOptions) -> Result<()> {
    if !(1..=2).contains(&options.axes.len()) {
        return bad(
            format!("a sweep has one or two axes, not {}", options.axes.len()),
            "give one or two axes, as in `SweepOptions::axes` = queue-depth=1..24",
        );
    }
    let mut seen = HashSet::new();
    if let Some(axis) = options.axes.iter().find(|axis| !seen.insert(axis.knob)) {
        return bad(format!("two axes vary {}", axis.knob), "put all its values into one axis");
    }
    if options.rounds == 0 {
        return bad("a sweep of 0 rounds measures nothing", "use at least 1 round; 5 give confidence intervals");
    }
    let [phase] = &options.job.phases[..] else {
        return bad(
            format!("a sweep repeats one phase, but the profile {} has {}", options.job.name, options.job.phases.len()),
            "choose one phase, as NAME/PHASE",
        );
    };
    let varies = |knob: Knob| options.axes.iter().any(|axis| axis.knob == knob);
    if varies(Knob::Files) && phase.loads.iter().any(|load| !load.targets.is_empty()) {
        return bad("the profile fixes the targets of its loads", "vary something else than files");
    }
    for Axis { knob, values } in options.axes.iter().filter(|axis| matches!(axis.knob, Knob::Files | Knob::Agents)) {
        let most = values.iter().copied().max().unwrap_or(0);
        if most > options.targets.len() as u64 {
            return bad(
                format!("{most} {knob} are needed, but {} were named", options.targets.len()),
                "name as many as the largest value",
            );
        }
    }
    if options.total_depth.is_some() {
        if phase.loads.len() != 1 {
            return bad("the profile has several loads at the same time", "leave out `SweepOptions::total_depth`");
        }
        if !varies(Knob::QueueDepth) && !varies(Knob::Threads) && !varies(Knob::Files) {
            return bad(
                "`SweepOptions::total_depth` needs an axis that changes the number of requests in flight",
                "vary threads, queue-depth or files",
            );
        }
    }
    if options.array.is_some_and(|array| array.copies == 0 || array.devices == 0) {
        return bad("an array with 0 copies or 0 devices", "give both as 1 or more");
    }
    Ok(())
}

/// The cell at `point`; `None` if it cannot have the total depth.
fn cell(options: &SweepOptions, point: Vec<Coordinate>) -> Result<Option<SweepCell>> {
    let value = |knob: Knob| point.iter().find(|at| at.knob == knob).map(|at| at.value);
    let files = value(Knob::Files).or(value(Knob::Agents)).unwrap_or(options.targets.len() as u64);
    let first = &options.job.phases[0].loads[0];
    let (mut threads, mut queue_depth) = (
        value(Knob::Threads).unwrap_or(u64::from(first.threads)),
        value(Knob::QueueDepth).unwrap_or(u64::from(first.queue_depth)),
    );
    if let Some(total) = options.total_depth.map(u64::from) {
        // A setting that is not varied is computed: the depth from the threads, or the threads from
        // depth and files.
        if value(Knob::QueueDepth).is_none() && value(Knob::Threads).is_some() {
            queue_depth = total / files.saturating_mul(threads).max(1);
        } else if value(Knob::Threads).is_none() {
            threads = total / files.saturating_mul(queue_depth).max(1);
        }
        let product = files.checked_mul(threads).and_then(|product| product.checked_mul(queue_depth));
        if product != Some(total) {
            return Ok(None);
        }
    }
    let (Ok(threads), Ok(queue_depth), Ok(files)) = (threads.try_into(), queue_depth.try_into(), files.try_into())
    else {
        return bad("a value does not fit into 32 bits", "use smaller values");
    };
    let mut cell =
        SweepCell { point, threads, queue_depth, files, measured: Cell::default(), latency: LatencyRecord::default() };
    let job = job(options, &cell);
    job.validate().map_err(|error| LabError::BadOptions { what: title(&cell.point), hint: error.to_string() })?;
    let in_flight = job.phases[0]
        .loads
        .iter()
        .map(|load| {
            let on = if load.targets.is_empty() { files.into() } else { load.targets.len() as u64 };
            on * u64::from(load.threads) * u64::from(load.queue_depth)
        })
        .sum();
    let targets: Vec<&str> = options.targets.iter().map(String::as_str).take(files as usize).collect();
    cell.measured = Cell::new("", &title(&cell.point), &targets.join(", "), in_flight);
    Ok(Some(cell))
}

/// A job that covers the ranges and writes of all cells, for preparing the targets.
///
/// # Errors
/// As [`cells`].
pub fn widest_job(options: &SweepOptions) -> Result<Job> {
    cells(options)?;
    let mut job = options.job.clone();
    for Axis { knob, values } in &options.axes {
        let extreme = match knob {
            Knob::ReadPercent => values.iter().min(),
            Knob::WorkingSet => values.iter().max(),
            _ => None,
        };
        for load in job.phases.iter_mut().flat_map(|phase| &mut phase.loads) {
            extreme.into_iter().for_each(|value| knob.set(load, *value));
        }
    }
    Ok(job)
}

/// The coordinates as text: `queue-depth 4, block-size 8K`.
pub fn title(point: &[Coordinate]) -> String {
    point.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// The job that measures `cell`, with the seed of the sweep. [`crate::rounds::job_of`] derives the
/// job of a round.
pub fn job(options: &SweepOptions, cell: &SweepCell) -> Job {
    let mut job = options.job.clone();
    job.name = format!("{}: {}", options.job.name, title(&cell.point));
    for load in job.phases.iter_mut().flat_map(|phase| &mut phase.loads) {
        for Coordinate { knob, value } in &cell.point {
            knob.set(load, *value);
        }
        if options.total_depth.is_some() {
            (load.threads, load.queue_depth) = (cell.threads, cell.queue_depth);
        }
        // The load's name in the profile would no longer be true.
        load.name.clear();
        // The data is divided among the files, so that its total size is the same for any number of
        // files.
        if options.total_depth.is_some() && cell.point.iter().any(|at| at.knob == Knob::Files) && load.working_set.0 > 0
        {
            let share = load.working_set.0 / u64::from(cell.files.max(1));
            load.working_set = Bytes((share & !4095).max(4096));
        }
    }
    job
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::rounds::job_of;
    use diskwright_load::job::{Load, Span};

    pub fn options(axes: &[&str]) -> SweepOptions {
        let load = Load { threads: 8, queue_depth: 12, ..Load::default() };
        SweepOptions {
            job: Job::simple("oltp", load, Span::default(), Span::from_secs(1)),
            targets: vec!["null:".into()],
            axes: axes.iter().map(|axis| axis.parse().unwrap()).collect(),
            rounds: 3,
            total_depth: None,
            max_p99: None,
            array: None,
        }
    }

    fn made(options: &SweepOptions) -> Vec<(u32, u32, u32, u64)> {
        let cells = cells(options).unwrap();
        cells.iter().map(|cell| (cell.files, cell.threads, cell.queue_depth, cell.measured.in_flight)).collect()
    }

    #[test]
    fn axes_multiply_and_the_last_runs_fastest() {
        let options = options(&["threads=1,2", "queue-depth=4,8"]);
        assert_eq!(made(&options), [(1, 1, 4, 4), (1, 1, 8, 8), (1, 2, 4, 8), (1, 2, 8, 16)]);
        let cells = cells(&options).unwrap();
        let job = job(&options, &cells[3]);
        let load = &job.phases[0].loads[0];
        assert_eq!((load.threads, load.queue_depth), (2, 8));
        // All seeds differ: no cell or round repeats the requests of another one, which a cache
        // might answer.
        let seeds: HashSet<u64> = cells
            .iter()
            .flat_map(|cell| {
                let of = |round| job_of(&super::job(&options, cell), &cell.measured.load, round, None).seed;
                (0..3).map(of).collect::<Vec<_>>()
            })
            .collect();
        assert_eq!(seeds.len(), 12);
        assert_eq!(job.name, "oltp: threads 2, queue-depth 8");
    }

    /// The paper's Table 3 (and Table 4, which has 5 x 24 as well).
    #[test]
    fn the_papers_combinations_for_a_total_depth() {
        let mut options = options(&["threads=1..24"]);
        options.total_depth = Some(120);
        let papers = [1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 24].map(|threads| (1, threads, 120 / threads, 120));
        assert_eq!(made(&options), papers);
        assert_eq!(job(&options, &cells(&options).unwrap()[1]).phases[0].loads[0].queue_depth, 60);
    }

    /// The paper's Pre-Test 2: 1, 2, 4 files; 8, 4, 2 threads each; 64, 32, 16 GB each.
    #[test]
    fn the_papers_files_at_the_same_depth_and_volume() {
        let mut options = options(&["files=1,2,4"]);
        options.targets = ["a", "b", "c", "d"].map(String::from).to_vec();
        options.total_depth = Some(96);
        options.job.phases[0].loads[0].working_set = Bytes(64 << 30);
        assert_eq!(made(&options), [(1, 8, 12, 96), (2, 4, 12, 96), (4, 2, 12, 96)]);
        let sets = cells(&options).unwrap();
        let sets = sets.iter().map(|cell| job(&options, cell).phases[0].loads[0].working_set.0 >> 30);
        assert_eq!(sets.collect::<Vec<_>>(), [64, 32, 16]);
    }

    #[test]
    fn targets_are_prepared_for_the_widest_cell() {
        let widest = widest_job(&options(&["read-percent=0..100+50", "working-set=1M..64M*8"])).unwrap();
        let load = &widest.phases[0].loads[0];
        assert_eq!((load.read_percent, load.working_set), (0.0, Bytes(64 << 20)));
        assert!(widest.writes() && !widest_job(&options(&["queue-depth=1,2"])).unwrap().writes());
    }

    #[test]
    fn options_that_cannot_be_swept_are_refused() {
        let two = |a: &str, b: &str| options(&[a, b]);
        let mut phases = options(&["threads=1"]);
        phases.job.phases.push(phases.job.phases[0].clone());
        let mut idle = options(&["block-size=4K"]);
        idle.total_depth = Some(8);
        let mut odd = options(&["threads=2,4"]);
        odd.total_depth = Some(7);
        let mut none = options(&["threads=1"]);
        none.rounds = 0;
        for (options, word) in [
            (options(&[]), "one or two axes"),
            (two("threads=1", "threads=2"), "two axes vary threads"),
            (options(&["files=1,2"]), "2 files are needed, but 1"),
            (options(&["threads=2000"]), "threads"),
            (two("threads=1..50", "queue-depth=1..50"), "2500 combinations"),
            (phases, "one phase, but the profile oltp has 2"),
            (idle, "`SweepOptions::total_depth`"),
            (odd, "exactly 7 requests in flight"),
            (none, "0 rounds"),
        ] {
            let error = cells(&options).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }
}
