//! Reads saved results as sides of a comparison: runs, sweeps, the study `containers`.
//!
//! Several files may form one side, if they repeat the same measurement: each run is one round, and
//! a sweep adds its rounds. A schema of a newer version is refused, because its meaning is unknown.

use super::{Circumstances, Group, Side};
use crate::{
    LabError, Result,
    document::{self, Document},
    study::containers::{ContainersResult, record::CONTAINERS},
    sweep::SweepRecord,
};
use diskwright_load::{
    figures::Figures,
    job::{Caching, Job},
    machine::{Machine, Versions},
    record::{End, Head, PhaseRecord, Run, SeriesPoint, TargetRecord},
};
use diskwright_stats::summary::median;
use std::path::{Path, PathBuf};

/// A run is cut into at most this many stretches.
const STRETCHES: usize = 20;
/// A run that cannot be cut into this many stretches is not cut.
const FEWEST_STRETCHES: usize = 5;

/// Reads the files of one side. If `name` is empty, the first file's name is used.
///
/// # Errors
/// [`LabError::Read`] if a file cannot be used; [`LabError::BadOptions`] if its kind cannot be
/// compared, if it failed, or if it is not the same measurement as the first file.
pub fn read_side(name: &str, files: &[PathBuf]) -> Result<Side> {
    let mut sides = files.iter().map(|file| read(file)).collect::<Result<Vec<_>>>()?.into_iter();
    let Some(mut side) = sides.next() else {
        return Err(LabError::BadOptions {
            what: "a side of the comparison has no file".into(),
            hint: "name a saved result".into(),
        });
    };
    for other in sides {
        if other.groups.iter().map(Group::name).ne(side.groups.iter().map(Group::name)) {
            return Err(LabError::BadOptions {
                what: format!("{} is not the same measurement as {}", other.sources.join(","), side.sources.join(",")),
                hint: "join only repetitions of the same measurement with commas".into(),
            });
        }
        for (group, more) in side.groups.iter_mut().zip(other.groups) {
            if group.cell.load != more.cell.load {
                return Err(LabError::BadOptions {
                    what: format!("{} has another workload than {}", other.sources.join(","), side.sources.join(",")),
                    hint: format!(
                        "join only repetitions of the same measurement with commas ({}; {})",
                        group.cell.load, more.cell.load
                    ),
                });
            }
            group.cell.rounds.extend(more.cell.rounds);
            group.stretches.clear();
        }
        side.sources.extend(other.sources);
        side.circumstances.partial |= other.circumstances.partial;
        let known = side.circumstances.warnings.clone();
        side.circumstances.warnings.extend(other.circumstances.warnings.into_iter().filter(|w| !known.contains(w)));
    }
    Ok(if name.is_empty() { side } else { side.named(name) })
}

fn read(path: &Path) -> Result<Side> {
    let shown = path.display().to_string();
    let mut side = match document::read_one(path)? {
        Document::Run(run) => of_run(*run, &shown)?,
        Document::Sweep(sweep) => of_sweep(*sweep),
        Document::Containers(result) => of_containers(*result),
        other => {
            return Err(LabError::BadOptions {
                what: format!("{shown} is {}, which cannot be compared", other.kind()),
                hint: "give results of `lab run`, `lab sweep` or `lab study containers`".into(),
            });
        }
    };
    if side.groups.is_empty() {
        return Err(LabError::BadOptions {
            what: format!("{shown} has no measured window"),
            hint: "repeat the measurement and let it finish".into(),
        });
    }
    let name = path.file_stem().map_or_else(|| shown.clone(), |stem| stem.to_string_lossy().into_owned());
    side.sources = vec![shown];
    Ok(side.named(&name))
}

/// The machine without its memory size, which may differ slightly after a restart.
pub(super) fn machine_of(machine: &Machine) -> String {
    format!("{} x {}, {}", machine.logical_cpus, machine.cpu_model, machine.kernel)
}

pub(super) fn version_of(versions: &Versions) -> String {
    format!("{}{}", versions.diskwright, if versions.optimised { "" } else { " (debug)" })
}

pub(super) fn cache_of(targets: &[TargetRecord]) -> String {
    let mut modes: Vec<&str> = targets.iter().map(mode).collect();
    modes.dedup();
    modes.join(", ")
}

fn mode(target: &TargetRecord) -> &'static str {
    match target.cache {
        _ if target.is_export() => "the server's",
        Caching::Cached => "cached",
        Caching::Direct => "direct",
        Caching::WriteThrough => "write-through",
        Caching::DirectWriteThrough => "direct, write-through",
    }
}

fn side(circumstances: Circumstances, groups: Vec<Group>) -> Side {
    Side { name: String::new(), sources: Vec::new(), circumstances, groups }
}

/// The workload of a phase as text. It should be the same on both sides.
pub fn workload_of(job: &Job, phase: &str) -> String {
    let phase = job.phases.iter().find(|other| other.name == phase);
    let loads = phase.iter().flat_map(|phase| &phase.loads).map(|load| load.title());
    loads.collect::<Vec<_>>().join(" with ")
}

fn of_run(run: Run, path: &str) -> Result<Side> {
    if let End::Failed { first, errors } = &run.head.end {
        return Err(LabError::BadOptions {
            what: format!("{path} is a failed run ({errors} requests; the first: {first})"),
            hint: "figures of a failing device are meaningless: repair it and measure again".into(),
        });
    }
    let groups = run.phases.iter().map(|phase| Group {
        stretches: stretches(phase),
        ..Group::new(&phase.name, &workload_of(&run.job, &phase.name), vec![Figures::of(phase)])
    });
    let groups = groups.collect();
    Ok(side(circumstances(run.head, cache_of(&run.targets)), groups))
}

fn of_sweep(sweep: SweepRecord) -> Side {
    let groups = sweep.cells.iter().filter(|cell| !cell.measured.rounds.is_empty()).map(|cell| {
        let job = crate::sweep::plan::job(&sweep.options, cell);
        let workload = job.phases.first().map_or_else(String::new, |phase| workload_of(&job, &phase.name));
        Group::new(&cell.measured.load, &workload, cell.measured.rounds.clone())
    });
    let groups = groups.collect();
    side(circumstances(sweep.head, cache_of(&sweep.targets)), groups)
}

/// The circumstances in the head of a result.
fn circumstances(head: Head, cache: String) -> Circumstances {
    Circumstances {
        machine: machine_of(&head.machine),
        cache,
        version: version_of(&head.versions),
        partial: head.end != End::Complete,
        warnings: head.warnings,
    }
}

fn of_containers(result: ContainersResult) -> Side {
    let compared = result.cells.iter().filter(|cell| cell.part == CONTAINERS);
    let groups = compared
        .map(|cell| Group::new(&format!("{}, {}", cell.title(), cell.subject), &cell.title(), cell.rounds.clone()));
    let groups = groups.collect();
    side(circumstances(result.head, result.options.cache), groups)
}

/// Cuts the measured window into stretches, so long that neighbours are hardly correlated.
/// Percentiles of a stretch are medians of its intervals' percentiles. CPU time is not recorded by
/// interval.
fn stretches(phase: &PhaseRecord) -> Vec<Figures> {
    let window = phase.window_start_ns..=phase.window_start_ns.saturating_add(phase.window_ns);
    let inside: Vec<&SeriesPoint> = phase
        .series
        .iter()
        .filter(|point| {
            window.contains(&point.start_ns) && window.contains(&point.start_ns.saturating_add(phase.interval_ns))
        })
        .collect();
    let mut length = inside.len().div_ceil(STRETCHES).max(1);
    loop {
        let cut: Vec<Figures> = inside.chunks_exact(length).map(|points| stretch(points, phase.interval_ns)).collect();
        if cut.len() < FEWEST_STRETCHES {
            return Vec::new();
        }
        let iops: Vec<f64> = cut.iter().map(|figures| figures.iops).collect();
        if lag1_autocorrelation(&iops) < 2.0 / (iops.len() as f64).sqrt() || cut.len() / 2 < FEWEST_STRETCHES {
            return cut;
        }
        length *= 2;
    }
}

fn stretch(points: &[&SeriesPoint], interval_ns: u64) -> Figures {
    let sum = |of: &dyn Fn(&SeriesPoint) -> u64| points.iter().map(|point| of(point)).sum::<u64>();
    let (reads, writes) = (sum(&|point| point.read_ios), sum(&|point| point.write_ios));
    let window_ns = interval_ns.saturating_mul(points.len() as u64).max(1);
    let ios = (reads + writes) as f64;
    let weighted: f64 = points.iter().map(|point| point.mean_ns * (point.read_ios + point.write_ios) as f64).sum();
    let middle = |of: &dyn Fn(&SeriesPoint) -> u64| {
        median(&points.iter().map(|point| of(point) as f64).collect::<Vec<_>>()).unwrap_or(0.0)
    };
    Figures {
        window_ns,
        reads,
        writes,
        iops: ios * 1e9 / window_ns as f64,
        mb_per_s: sum(&|point| point.read_bytes + point.write_bytes) as f64 * 1e3 / window_ns as f64,
        mean_ns: if ios > 0.0 { weighted / ios } else { 0.0 },
        p50_ns: middle(&|point| point.p50_ns),
        p99_ns: middle(&|point| point.p99_ns),
        ..Figures::default()
    }
}

/// Correlation of each value with the next one; 0 for independent samples.
fn lag1_autocorrelation(values: &[f64]) -> f64 {
    let mean = values.iter().sum::<f64>() / values.len().max(1) as f64;
    let all: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    let neighbours: f64 = values.windows(2).map(|pair| (pair[0] - mean) * (pair[1] - mean)).sum();
    if all > 0.0 { neighbours / all } else { 0.0 }
}
