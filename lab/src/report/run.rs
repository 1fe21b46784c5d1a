//! The chapter of one run: verdict, figures, plots, threads, targets, machine, and the profile that repeats it.

use super::{
    machine,
    outline::{Block, Cell, Chapter, Doubt, Table, Tile, Tone},
    run_plots,
    write::{count, list, moment, percent, rate, ratio, time},
};
use crate::{
    job::{Caching, Contents, Mover},
    record::{End, LatencyRecord, PhaseRecord, Run, TargetRecord, Total},
    table::bytes,
};

/// Tables of more threads than this are folded away.
const THREADS_SHOWN: usize = 16;

/// The conclusion of a run, in a sentence or two. What went wrong comes first.
pub fn verdict(run: &Run) -> String {
    let mut text = match &run.end {
        End::Complete => String::new(),
        End::Stopped => "Partial, stopped before its time: ".into(),
        End::Failed { errors: 1, first } => format!("Failed, one request was not carried out ({first}): "),
        End::Failed { errors, first } => {
            format!("Failed, {} requests were not carried out (the first: {first}): ", count(*errors as f64))
        }
    };
    let Some(phase) = run.phases.first() else {
        return text + "nothing was measured.";
    };
    let total = phase.total();
    let titles: Vec<String> = load_titles(run, phase);
    let targets: Vec<String> = used_targets(run, phase).into_iter().map(|target| target.name.clone()).collect();
    let latency = total.both.latency();
    text.push_str(&format!(
        "{} on {}: {} IOPS and {} MB/s at {} on average",
        list(&titles),
        if targets.len() > 3 { format!("{} targets", targets.len()) } else { list(&targets) },
        rate(phase.iops()),
        rate(phase.mb_per_s()),
        time(latency.mean_ns()),
    ));
    if latency.nines() >= 2 || latency.count >= 1000 {
        text.push_str(&format!(", 99 % within {}", time(latency.quantile_ns(0.99).unwrap_or(0) as f64)));
    }
    text.push_str(&format!("; each request took {} of the generator's CPU.", time(phase.cpu_ns_per_io())));
    if run.phases.len() > 1 {
        text.push_str(
            &format!(" {} more phases are below.", run.phases.len() - 1)
                .replace(" 1 more phases are", " One more phase is"),
        );
    }
    text
}

/// Titles of the loads of a phase; the job is found by the phase's name.
fn load_titles(run: &Run, phase: &PhaseRecord) -> Vec<String> {
    let planned = run.job.phases.iter().find(|planned| planned.name == phase.name);
    match planned.map(|planned| planned.loads.as_slice()) {
        Some([one]) => vec![one.title()],
        Some(loads) if loads.len() <= 3 => loads.iter().map(crate::job::Load::title).collect(),
        Some(loads) => vec![format!("{} loads", loads.len())],
        None => vec![phase.name.clone()],
    }
}

fn used_targets<'a>(run: &'a Run, phase: &PhaseRecord) -> Vec<&'a TargetRecord> {
    let used = |index: usize| phase.threads.iter().any(|thread| thread.target as usize == index);
    run.targets.iter().enumerate().filter(|(index, _)| used(*index)).map(|(_, target)| target).collect()
}

/// The chapter. `id` is unique in the report; `name` is that of the file.
pub fn chapter(run: &Run, id: &str, name: &str) -> Chapter {
    let mut blocks = Vec::new();
    if let Some(phase) = run.phases.first() {
        blocks.push(tiles(phase));
    }
    for (index, phase) in run.phases.iter().enumerate() {
        blocks.extend(phase_blocks(run, phase, run.phases.len() > 1, &format!("{id}-p{index}")));
    }
    blocks.push(Block::Heading("CPU cost".into()));
    blocks.push(Block::Plots(vec![run_plots::cpu_cost(&[(name, run)], &format!("{id}-cpu"))]));
    blocks.push(Block::Table(cpu_table(run)));
    blocks.push(Block::Heading("Targets".into()));
    blocks.push(Block::Table(target_table(run)));
    blocks.push(Block::Heading("Machine and options".into()));
    blocks.push(Block::Facts(facts(run)));
    blocks.push(Block::Heading("The profile that repeats it".into()));
    blocks.push(Block::Code {
        name: format!(
            "Save this as {}.toml and run `diskwright lab run TARGET... --profile {0}.toml`.",
            file_word(&run.job.name)
        ),
        text: run.job.to_toml(),
        language: "toml",
    });
    Chapter {
        id: id.to_owned(),
        title: name.to_owned(),
        subtitle: format!(
            "Run of “{}”, {}, {} in all",
            run.job.name,
            moment(&run.started_utc),
            time(run.took_ns as f64)
        ),
        verdict: verdict(run),
        badges: badges(run),
        doubts: doubts(run),
        blocks,
    }
}

fn file_word(name: &str) -> String {
    let word: String =
        name.chars().map(|c| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' }).collect();
    if word.is_empty() { "profile".into() } else { word }
}

fn badges(run: &Run) -> Vec<(Tone, String)> {
    let mut badges = vec![match &run.end {
        End::Complete => (Tone::Good, "complete".to_owned()),
        End::Stopped => (Tone::Doubt, "partial".to_owned()),
        End::Failed { .. } => (Tone::Bad, "failed".to_owned()),
    }];
    let steady: Vec<_> = run.phases.iter().filter_map(|phase| phase.steady.as_ref()).collect();
    if steady.iter().any(|steady| steady.reached_ns.is_none()) {
        badges.push((Tone::Doubt, "steady state not reached".into()));
    } else if steady.iter().any(|steady| steady.left_ns.is_some()) {
        badges.push((Tone::Doubt, "steady state left".into()));
    } else if !steady.is_empty() {
        badges.push((Tone::Good, "steady state".into()));
    }
    match run.warnings.len() {
        0 => {}
        1 => badges.push((Tone::Doubt, "1 reason for doubt".into())),
        several => badges.push((Tone::Doubt, format!("{several} reasons for doubt"))),
    }
    badges
}

fn doubts(run: &Run) -> Vec<Doubt> {
    let failed = match &run.end {
        End::Failed { errors, first } => Some(Doubt {
            tone: Tone::Bad,
            sentence: format!(
                "{} failed; the first: {first}. The figures are those of the requests that succeeded and say little about the device.",
                if *errors == 1 { "1 request".into() } else { format!("{} requests", count(*errors as f64)) }
            ),
        }),
        _ => None,
    };
    let warned = run.warnings.iter().map(|warning| Doubt { tone: Tone::Doubt, sentence: warning.to_string() });
    failed.into_iter().chain(warned).collect()
}

fn tiles(phase: &PhaseRecord) -> Block {
    let total = phase.total();
    let latency = total.both.latency();
    let tile = |name: &str, cell: Cell, unit: &str| Tile { name: name.into(), cell, unit: unit.into() };
    let mut tiles = vec![
        tile("requests a second", Cell::figure(phase.iops(), rate), "IOPS"),
        tile("throughput", Cell::figure(phase.mb_per_s(), rate), "MB/s"),
        tile("mean latency", Cell::figure(latency.mean_ns(), time), ""),
    ];
    if latency.count >= 1000 {
        tiles.push(tile("99 % within", Cell::maybe(latency.quantile_ns(0.99).map(|ns| ns as f64), time), ""));
    }
    tiles.push(tile("CPU for each request", Cell::figure(phase.cpu_ns_per_io(), time), ""));
    tiles.push(tile(
        "requests in flight, on average",
        Cell::figure(phase.depth_reached(), rate),
        &format!("of {}", count(total.queue_depth as f64)),
    ));
    Block::Tiles(tiles)
}

fn phase_blocks(run: &Run, phase: &PhaseRecord, several: bool, id: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    if several {
        blocks.push(Block::Heading(format!("Phase “{}”: {}", phase.name, list(&load_titles(run, phase)))));
    }
    blocks.push(Block::Text(window_sentence(phase)));
    blocks.push(Block::Table(direction_table(phase)));
    let mut plots = vec![run_plots::percentiles(&[(String::new(), phase)], &format!("{id}-latency"))];
    if phase.series.len() > 1 {
        plots.extend(run_plots::series(phase, id));
    }
    if !phase.cpu.cores.is_empty() {
        plots.push(run_plots::cores(phase, &format!("{id}-cores")));
    }
    blocks.push(Block::Plots(plots));
    blocks.push(Block::Table(percentile_table(phase)));
    let targets = used_targets(run, phase).len();
    if targets > 1 {
        blocks.push(Block::Table(by_target(run, phase)));
    }
    if phase.threads.len() > 1 {
        let table = Block::Table(thread_table(run, phase));
        blocks.push(if phase.threads.len() > THREADS_SHOWN {
            Block::Folded { name: format!("Each of the {} threads", phase.threads.len()), blocks: vec![table] }
        } else {
            table
        });
    }
    blocks
}

fn window_sentence(phase: &PhaseRecord) -> String {
    let mut text = format!(
        "Measured for {}, beginning {} into the phase.",
        time(phase.window_ns as f64),
        time(phase.window_start_ns as f64)
    );
    if let Some(steady) = &phase.steady {
        let judged = format!(
            "range {} and slope {} of the mean over the deciding rounds",
            percent(steady.range),
            percent(steady.slope)
        );
        text.push_str(&match (steady.reached_ns, steady.left_ns) {
            (None, _) => format!(" The steady state was not reached ({judged}; the rule allows 20 % and 10 %)."),
            (Some(at), None) => format!(" The steady state was reached after {} ({judged}).", time(at as f64)),
            (Some(at), Some(left)) => format!(
                " The steady state was reached after {} ({judged}), and left again after {}: the mean is of two states.",
                time(at as f64),
                time(left as f64)
            ),
        });
    }
    if phase.threads.iter().any(|thread| thread.reads.response.is_some() || thread.writes.response.is_some()) {
        text.push_str(
            " Requests had a schedule: latency is the response time, from the moment at which a request should have begun.",
        );
    }
    text
}

/// Latencies of a sample, as cells: mean, deviation, median, 99th and 99.9th percentile, longest.
fn latency_cells(latency: &LatencyRecord) -> Vec<Cell> {
    let any = latency.count > 0;
    let quantile = |share: f64, needed: u64| {
        let value = latency.quantile_ns(share).filter(|_| latency.count >= needed);
        Cell::maybe(value.map(|ns| ns as f64), time)
    };
    vec![
        Cell::maybe(any.then(|| latency.mean_ns()), time),
        Cell::maybe(any.then(|| latency.deviation_ns()), time),
        quantile(0.5, 20),
        quantile(0.99, 1000),
        quantile(0.999, 10_000),
        Cell::maybe(any.then_some(latency.max_ns as f64), time),
    ]
}

const LATENCY_HEADS: [&str; 6] = ["mean", "deviation", "p50", "p99", "p99.9", "longest"];

fn direction_table(phase: &PhaseRecord) -> Table {
    let total = phase.total();
    let mut heads = vec!["", "IOPS", "MB/s", "requests"];
    heads.extend(LATENCY_HEADS);
    heads.push("errors");
    let mut table =
        Table::new("Reads, writes and both; a percentile stands where ten requests or more lie beyond it", &heads);
    let seconds = phase.window_s().max(1e-9);
    for (name, direction) in [("reads", &total.reads), ("writes", &total.writes), ("both", &total.both)] {
        if direction.ios == 0 && direction.errors == 0 && name != "both" {
            continue;
        }
        let mut cells = vec![
            Cell::text(name),
            Cell::figure(direction.ios as f64 / seconds, rate),
            Cell::figure(direction.bytes as f64 / 1e6 / seconds, rate),
            Cell::figure(direction.ios as f64, count),
        ];
        cells.extend(latency_cells(direction.latency()));
        let tone = if direction.errors > 0 { Tone::Bad } else { Tone::Faint };
        cells.push(Cell::figure(direction.errors as f64, count).toned(tone));
        if name == "both" { table.total(cells) } else { table.row(cells) }
    }
    if total.flushes > 0 {
        table.row(vec![
            Cell::text("flushes"),
            Cell::figure(total.flushes as f64 / seconds, rate),
            Cell::default(),
            Cell::figure(total.flushes as f64, count),
        ]);
    }
    table
}

/// Percentiles of a phase down to the nines that the samples support: names and shares.
pub(crate) fn shares(nines: u32) -> Vec<(String, f64)> {
    let mut shares: Vec<(String, f64)> =
        [25.0, 50.0, 75.0, 90.0, 95.0].map(|p: f64| (format!("p{p}"), p / 100.0)).into();
    shares.extend((2..=nines).map(|nine| {
        let share = 1.0 - 10_f64.powi(-(nine as i32));
        (format!("p{}", super::write::percentile(share)), share)
    }));
    shares
}

fn percentile_table(phase: &PhaseRecord) -> Table {
    let total = phase.total();
    let scheduled = total.both.response.is_some();
    let columns: Vec<(&str, &LatencyRecord)> = [
        ("reads", total.reads.latency()),
        ("writes", total.writes.latency()),
        ("both", total.both.latency()),
        ("both, service time", &total.both.service),
    ]
    .into_iter()
    .filter(|(name, latency)| latency.count > 0 && (scheduled || *name != "both, service time"))
    .collect();
    let heads: Vec<&str> = std::iter::once("percentile").chain(columns.iter().map(|(name, _)| *name)).collect();
    let mut table = Table::new("Latency by percentile, as far as the sample supports", &heads);
    let nines = columns.iter().map(|(_, latency)| latency.nines()).max().unwrap_or(0);
    let row = |name: &str, value: &dyn Fn(&LatencyRecord) -> Option<f64>| {
        let cells = columns.iter().map(|(_, latency)| Cell::maybe(value(latency), time));
        std::iter::once(Cell::text(name)).chain(cells).collect()
    };
    table.row(row("shortest", &|latency| Some(latency.min_ns as f64)));
    for (name, share) in shares(nines) {
        table.row(row(&name, &|latency| {
            let beyond = latency.count as f64 * (1.0 - share);
            latency.quantile_ns(share).filter(|_| beyond >= 9.999).map(|ns| ns as f64)
        }));
    }
    table.row(row("longest", &|latency| Some(latency.max_ns as f64)));
    table
}

fn total_cells(total: &Total, seconds: f64) -> Vec<Cell> {
    let seconds = seconds.max(1e-9);
    let mut cells = vec![
        Cell::figure(total.queue_depth as f64, count),
        Cell::figure(total.reads.ios as f64 / seconds, rate),
        Cell::figure(total.writes.ios as f64 / seconds, rate),
        Cell::figure(total.both.ios as f64 / seconds, rate),
        Cell::figure(total.both.bytes as f64 / 1e6 / seconds, rate),
    ];
    cells.extend(latency_cells(total.both.latency()));
    cells
}

const TOTAL_HEADS: [&str; 5] = ["depth", "read IOPS", "write IOPS", "IOPS", "MB/s"];

fn by_target(run: &Run, phase: &PhaseRecord) -> Table {
    let heads: Vec<&str> = ["target"].into_iter().chain(TOTAL_HEADS).chain(LATENCY_HEADS).collect();
    let mut table = Table::new("Each target", &heads);
    for (index, target) in run.targets.iter().enumerate() {
        let total = phase.total_where(|thread| thread.target as usize == index);
        if total.queue_depth > 0 {
            let cells = std::iter::once(Cell::text(&target.name)).chain(total_cells(&total, phase.window_s()));
            table.row(cells.collect());
        }
    }
    table
}

fn thread_table(run: &Run, phase: &PhaseRecord) -> Table {
    let heads: Vec<&str> = ["thread", "target"].into_iter().chain(TOTAL_HEADS).chain(LATENCY_HEADS).collect();
    let mut table = Table::new("Each thread on each of its targets", &heads);
    for thread in &phase.threads {
        let total = Total::of([thread]);
        let target = run.targets.get(thread.target as usize).map_or("", |target| &target.name);
        let cells = [Cell::text(thread.thread.to_string()), Cell::text(target)];
        table.row(cells.into_iter().chain(total_cells(&total, phase.window_s())).collect());
    }
    let mut cells = vec![Cell::text("all"), Cell::text("")];
    cells.extend(total_cells(&phase.total(), phase.window_s()));
    table.total(cells);
    table
}

fn cpu_table(run: &Run) -> Table {
    let mut table = Table::new(
        "CPU time for each request; cycles are CPU time times the rate of the time-stamp counter",
        &["phase", "generator", "user", "system", "whole machine", "cycles", "MHz per IOPS"],
    );
    for phase in &run.phases {
        let ios = phase.total().both.ios.max(1) as f64;
        let per_io = |ns: u64| Cell::figure(ns as f64 / ios, time);
        let hz = phase.cpu.tsc_hz;
        let known = hz > 0.0;
        let cycles = phase.cpu_ns_per_io() * hz / 1e9;
        let machine = (!phase.cpu.cores.is_empty()).then(|| phase.machine_cpu_ns_per_io());
        table.row(vec![
            Cell::text(&phase.name),
            Cell::figure(phase.cpu_ns_per_io(), time),
            per_io(phase.cpu.process_user_ns),
            per_io(phase.cpu.process_system_ns),
            Cell::maybe(machine, time),
            Cell::maybe(known.then_some(cycles), count),
            // Cycles a second for each request a second are cycles for each request.
            Cell::maybe(known.then_some(cycles / 1e6), |mhz| format!("{mhz:.5}")),
        ]);
    }
    table
}

fn target_table(run: &Run) -> Table {
    let heads =
        ["target", "kind", "size", "cache", "allocated", "zeros", "repeated", "filled before", "file system", "device"];
    let mut table = Table::new("What was measured, and what a look at its contents found", &heads);
    for target in &run.targets {
        let share = |value: Option<f64>| Cell::maybe(value, percent);
        let contents = target.contents;
        table.row(vec![
            Cell::text(&target.name),
            Cell::text(&target.kind),
            Cell::figure(target.size_bytes as f64, |size| bytes(size as u64)),
            Cell::text(if target.is_export() { "the server’s" } else { caching(target.cache) }),
            share(contents.map(|contents| contents.allocated)),
            share(contents.map(|contents| contents.zero)),
            share(contents.map(|contents| contents.repeated)),
            Cell::maybe(contents.map(|contents| contents.filled_bytes as f64), |size| bytes(size as u64)),
            Cell::text(target.place.as_ref().map_or("–", |place| &place.file_system)),
            Cell::text(match (&target.behind, &target.place) {
                (Some(behind), Some(place)) => format!("{}: {behind}", place.device),
                (Some(behind), None) => behind.to_string(),
                (None, Some(place)) => place.device.clone(),
                (None, None) => "–".into(),
            }),
        ]);
    }
    table
}

/// A cache mode in words.
pub(crate) fn caching(cache: Caching) -> &'static str {
    match cache {
        Caching::Cached => "page cache",
        Caching::Direct => "O_DIRECT",
        Caching::WriteThrough => "page cache, write-through",
        Caching::DirectWriteThrough => "O_DIRECT, write-through",
    }
}

fn facts(run: &Run) -> Vec<(String, String)> {
    let engine = match run.job.engine {
        Mover::Auto => "io_uring where the kernel has it",
        Mover::IoUring => "io_uring",
        Mover::Pread => "pread and pwrite",
    };
    let contents = match run.job.contents {
        Contents::Incompressible => "incompressible".to_owned(),
        Contents::Zero => "zeros".into(),
        Contents::Verified => "verified: each block carries its offset and a checksum".into(),
        Contents::Mixed { compressible_percent, duplicate_percent } => format!(
            "{} compressible, {} duplicate",
            percent(compressible_percent / 100.0),
            percent(duplicate_percent / 100.0)
        ),
    };
    let mut facts = machine::facts(&run.machine, &run.versions);
    let mut add = |name: &str, value: String| facts.push((name.to_owned(), value));
    add("Engine", engine.into());
    add("Cache asked for", caching(run.job.cache).into());
    add("Data written", contents);
    add("Seed", run.job.seed.to_string());
    if !run.job.description.is_empty() {
        add("Profile", run.job.description.clone());
    }
    for (name, value) in &run.labels {
        add(&format!("Label {name}"), value.clone());
    }
    let asked: u64 = run.phases.iter().map(|phase| phase.total().queue_depth).max().unwrap_or(0);
    if let Some(reached) = run.phases.first().map(PhaseRecord::depth_reached).filter(|_| asked > 0) {
        let share = reached / run.phases[0].total().queue_depth.max(1) as f64;
        add("Depth reached", format!("{} ({} of what was asked, by Little's law)", rate(reached), ratio(share)));
    }
    facts
}
