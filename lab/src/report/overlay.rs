//! The chapter with several runs side by side.

use super::run_plots;
use diskwright_load::{
    job::Job,
    record::{PhaseRecord, Run},
};
use diskwright_outline::{Block, Cell, Chapter, Table, Tone};
use diskwright_stats::numbers::{duration as time, figure as rate, grouped as count, list, ratio};

/// Largest number of lines in a plot.
const LINES_MAX: usize = 16;

/// The chapter of `runs`, each with the name of its file.
pub fn chapter(runs: &[(&str, &Run)], id: &str) -> Chapter {
    let phases: Vec<(String, &PhaseRecord)> = runs
        .iter()
        .flat_map(|(name, run)| {
            run.phases.iter().map(move |phase| {
                let label = if run.phases.len() == 1 { (*name).to_owned() } else { format!("{name}: {}", phase.name) };
                (label, phase)
            })
        })
        .collect();
    let shown = &phases[..phases.len().min(LINES_MAX)];
    let mut blocks = vec![Block::Table(table(&phases))];
    if phases.len() > LINES_MAX {
        blocks.push(Block::Text(format!("The plots show the first {LINES_MAX} of {} phases.", phases.len())));
    }
    blocks.push(Block::Plots(vec![
        run_plots::scatter(shown, &format!("{id}-tl")),
        run_plots::percentiles(shown, &format!("{id}-latency")),
        run_plots::cpu_cost(runs, &format!("{id}-cpu")),
    ]));
    Chapter {
        id: id.to_owned(),
        title: format!("{} runs side by side", runs.len()),
        source: String::new(),
        subtitle: list(&runs.iter().map(|(name, _)| (*name).to_owned()).collect::<Vec<_>>()),
        verdict: verdict(&phases),
        badges: badges(runs),
        warnings: vec![],
        blocks,
    }
}

/// Each run has only one round, so no difference can be tested; the verdict says this.
fn verdict(phases: &[(String, &PhaseRecord)]) -> String {
    let by_iops = |a: &&(String, &PhaseRecord), b: &&(String, &PhaseRecord)| a.1.iops().total_cmp(&b.1.iops());
    match (phases.iter().max_by(by_iops), phases.iter().min_by(by_iops)) {
        (Some(most), Some(fewest)) if most.0 != fewest.0 && fewest.1.iops() > 0.0 => format!(
            "{} has the most IOPS ({}), {} times those of {} ({}). One run of each cannot show a small difference; use “diskwright lab compare”.",
            most.0,
            rate(most.1.iops()),
            ratio(most.1.iops() / fewest.1.iops()),
            fewest.0,
            rate(fewest.1.iops())
        ),
        _ => "No two runs can be compared.".into(),
    }
}

fn badges(runs: &[(&str, &Run)]) -> Vec<(Tone, String)> {
    // Names and descriptions do not change what is run.
    let plain = |job: &Job| Job { name: String::new(), description: String::new(), ..job.clone() };
    let first = runs.first().map(|(_, run)| run);
    let alike =
        |same: &dyn Fn(&Run, &Run) -> bool| first.is_none_or(|first| runs.iter().all(|(_, run)| same(first, run)));
    let mut badges = Vec::new();
    let mut tell = |same: bool, yes: &str, no: &str| {
        badges.push(if same { (Tone::Good, yes.to_owned()) } else { (Tone::Warning, no.to_owned()) });
    };
    tell(alike(&|a, b| plain(&a.job) == plain(&b.job)), "same job", "different jobs");
    tell(
        alike(&|a, b| {
            a.head.machine.cpu_model == b.head.machine.cpu_model && a.head.machine.kernel == b.head.machine.kernel
        }),
        "same machine and kernel",
        "different machines or kernels",
    );
    badges
}

fn table(phases: &[(String, &PhaseRecord)]) -> Table {
    let heads = ["run", "IOPS", "ratio", "MB/s", "mean", "p50", "p99", "max", "CPU/IO", "depth", "errors"];
    let mut table = Table::new("All runs; ratio: IOPS relative to the first", &heads);
    let base = phases.first().map_or(0.0, |(_, phase)| phase.iops());
    for (name, phase) in phases {
        let total = phase.total();
        let latency = total.both.latency();
        let quantile = |share: f64, needed: u64| {
            Cell::maybe(latency.quantile_ns(share).filter(|_| latency.count >= needed).map(|ns| ns as f64), time)
        };
        table.row(vec![
            Cell::text(name),
            Cell::figure(phase.iops(), rate),
            Cell::maybe((base > 0.0).then(|| phase.iops() / base), ratio),
            Cell::figure(phase.mb_per_s(), rate),
            Cell::figure(latency.mean_ns(), time),
            quantile(0.5, 20),
            quantile(0.99, 1000),
            Cell::figure(latency.max_ns as f64, time),
            Cell::figure(phase.cpu_ns_per_io(), time),
            Cell::figure(phase.depth_reached(), rate),
            Cell::figure(total.both.errors as f64, count),
        ]);
    }
    table
}
