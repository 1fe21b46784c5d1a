//! The chapter of one run.

use super::{
    ToChapter, fleet,
    parts::{self, end_badge, how_measured},
    run_plots,
    run_tables::{by_target, cpu_table, direction_table, member_table, percentile_table, thread_table},
};
use diskwright_load::{
    job::{Caching, Contents, IoEngine},
    record::{End, PhaseRecord, Run, TargetRecord},
};
use diskwright_outline::{Block, Cell, Chapter, Tile, Tone};
use diskwright_stats::numbers::{bytes, duration as time, figure as rate, grouped as count, list, percent, ratio};

/// The verdict of a run. Failures come first.
pub fn verdict(run: &Run) -> String {
    let mut text = match &run.head.end {
        End::Complete => String::new(),
        End::Stopped => "Partial, stopped: ".into(),
        End::Failed { errors: 1, first } => format!("Failed: 1 request failed ({first}). "),
        End::Failed { errors, first } => {
            format!("Failed: {} requests failed (the first: {first}). ", count(*errors as f64))
        }
    };
    let Some(phase) = run.phases.first() else {
        return text + "no phase was measured.";
    };
    let total = phase.total();
    let titles: Vec<String> = load_titles(run, phase);
    let targets: Vec<String> = used_targets(run, phase)
        .into_iter()
        // The name is followed by a colon.
        .map(|target| target.name.trim_end_matches(':').to_owned())
        .collect();
    let latency = total.both.latency();
    text.push_str(&format!(
        "{} on {}: {} IOPS and {} MB/s, mean latency {}",
        list(&titles),
        if targets.len() > 3 { format!("{} targets", targets.len()) } else { list(&targets) },
        rate(phase.iops()),
        rate(phase.mb_per_s()),
        time(latency.mean_ns()),
    ));
    if latency.nines() >= 2 || latency.count >= 1000 {
        text.push_str(&format!(", 99 % within {}", time(latency.quantile_ns(0.99).unwrap_or(0) as f64)));
    }
    text.push_str(&format!("; {} of the load generator's CPU time per request.", time(phase.cpu_ns_per_io())));
    if run.phases.len() > 1 {
        text.push_str(
            &format!(" {} more phases are below.", run.phases.len() - 1)
                .replace(" 1 more phases are", " One more phase is"),
        );
    }
    text
}

/// Titles of the loads of a phase. The job's phase is found by its name.
fn load_titles(run: &Run, phase: &PhaseRecord) -> Vec<String> {
    let planned = run.job.phases.iter().find(|planned| planned.name == phase.name);
    match planned.map(|planned| planned.loads.as_slice()) {
        Some([one]) => vec![one.title()],
        Some(loads) if loads.len() <= 3 => loads.iter().map(diskwright_load::job::Load::title).collect(),
        Some(loads) => vec![format!("{} loads", loads.len())],
        None => vec![phase.name.clone()],
    }
}

fn used_targets<'a>(run: &'a Run, phase: &PhaseRecord) -> Vec<&'a TargetRecord> {
    let used = |index: usize| phase.threads.iter().any(|thread| thread.target as usize == index);
    run.targets.iter().enumerate().filter(|(index, _)| used(*index)).map(|(_, target)| target).collect()
}

impl ToChapter for Run {
    fn chapter(&self, id: &str, name: &str) -> Chapter {
        chapter(self, id, name)
    }
}

fn chapter(run: &Run, id: &str, name: &str) -> Chapter {
    let mut blocks = Vec::new();
    if let Some(phase) = run.phases.first() {
        blocks.push(tiles(phase));
    }
    for (index, phase) in run.phases.iter().enumerate() {
        blocks.extend(phase_blocks(run, phase, run.phases.len() > 1, &format!("{id}-p{index}")));
        if let Some(fleet) = &run.fleet {
            blocks.extend(fleet::phase_blocks(run, fleet, index, &format!("{id}-p{index}")));
        }
    }
    blocks.push(Block::Heading("CPU cost".into()));
    blocks.push(Block::Plots(vec![run_plots::cpu_cost(&[(name, run)], &format!("{id}-cpu"))]));
    blocks.push(Block::Table(cpu_table(run)));
    blocks.push(Block::Heading("Targets".into()));
    blocks.push(Block::Facts(run.targets.iter().map(target_fact).collect()));
    if let Some(fleet) = &run.fleet {
        blocks.push(Block::Heading("Agents".into()));
        blocks.push(Block::Facts(fleet::facts(fleet)));
    }
    blocks.extend(how_measured(&run.head, facts(run)));
    blocks.push(Block::Heading("Profile to repeat the run".into()));
    blocks.push(Block::Code {
        name: format!(
            "Save this as {}.toml and run `diskwright lab run TARGET... --profile {0}.toml`.",
            file_word(&run.job.name)
        ),
        text: run.job.to_toml(),
        language: "toml",
    });
    let title = format!("Run of “{}”", run.job.name);
    Chapter { verdict: verdict(run), ..parts::chapter(&run.head, (id, name), title, badges(run), blocks) }
}

fn file_word(name: &str) -> String {
    let word: String =
        name.chars().map(|c| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' }).collect();
    if word.is_empty() { "profile".into() } else { word }
}

fn badges(run: &Run) -> Vec<(Tone, String)> {
    let mut badges = vec![end_badge(&run.head.end)];
    let steady: Vec<_> = run.phases.iter().filter_map(|phase| phase.steady.as_ref()).collect();
    if steady.iter().any(|steady| steady.reached_ns.is_none()) {
        badges.push((Tone::Warning, "steady state not reached".into()));
    } else if steady.iter().any(|steady| steady.left_ns.is_some()) {
        badges.push((Tone::Warning, "steady state left".into()));
    } else if !steady.is_empty() {
        badges.push((Tone::Good, "steady state".into()));
    }
    match run.head.warnings.len() {
        0 => {}
        1 => badges.push((Tone::Warning, "1 warning".into())),
        several => badges.push((Tone::Warning, format!("{several} warnings"))),
    }
    badges
}

fn tiles(phase: &PhaseRecord) -> Block {
    let total = phase.total();
    let latency = total.both.latency();
    let tile = |name: &str, cell: Cell, unit: &str| Tile { name: name.into(), cell, unit: unit.into() };
    let mut tiles = vec![
        tile("requests per second", Cell::figure(phase.iops(), rate), "IOPS"),
        tile("throughput", Cell::figure(phase.mb_per_s(), rate), "MB/s"),
        tile("mean latency", Cell::figure(latency.mean_ns(), time), ""),
    ];
    if latency.count >= 1000 {
        tiles.push(tile("99 % within", Cell::maybe(latency.quantile_ns(0.99).map(|ns| ns as f64), time), ""));
    }
    tiles.push(tile("CPU per request", Cell::figure(phase.cpu_ns_per_io(), time), ""));
    tiles.push(tile(
        "mean requests in flight",
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
    if !phase.members.is_empty() {
        blocks.push(Block::Table(member_table(phase)));
    }
    if phase.threads.len() > 1 {
        blocks.push(Block::Folded {
            name: format!("Each of the {} threads", phase.threads.len()),
            blocks: vec![Block::Table(thread_table(run, phase))],
        });
    }
    blocks
}

fn window_sentence(phase: &PhaseRecord) -> String {
    let begun = match phase.window_start_ns {
        0 => "from the start of the phase".to_owned(),
        start_ns => format!("beginning {} into the phase", time(start_ns as f64)),
    };
    let mut text = format!("Measured for {}, {begun}.", time(phase.window_ns as f64));
    if let Some(steady) = &phase.steady {
        let judged = format!(
            "range {} and slope {} of the mean over the last rounds",
            percent(steady.range),
            percent(steady.slope)
        );
        text.push_str(&match (steady.reached_ns, steady.left_ns) {
            (None, _) => format!(" The steady state was not reached ({judged}; the rule allows 20 % and 10 %)."),
            (Some(at), None) => format!(" The steady state was reached after {} ({judged}).", time(at as f64)),
            (Some(at), Some(left)) => format!(
                " The steady state was reached after {} ({judged}), and left after {}: the mean is over two states.",
                time(at as f64),
                time(left as f64)
            ),
        });
    }
    if phase.threads.iter().any(|thread| thread.reads.response.is_some() || thread.writes.response.is_some()) {
        text.push_str(" Requests had a schedule: latency is the response time, from the scheduled start of a request.");
    }
    text
}

pub(crate) fn caching(cache: Caching) -> &'static str {
    match cache {
        Caching::Cached => "page cache",
        Caching::Direct => "O_DIRECT",
        Caching::WriteThrough => "page cache, write-through",
        Caching::DirectWriteThrough => "O_DIRECT, write-through",
    }
}

fn facts(run: &Run) -> Vec<(String, String)> {
    let engine = match run.engine.unwrap_or(run.job.engine) {
        IoEngine::Auto => "none: these targets do without one",
        IoEngine::IoUring => "io_uring",
        IoEngine::Pread => "pread and pwrite",
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
    let mut facts = Vec::new();
    let mut add = |name: &str, value: String| facts.push((name.to_owned(), value));
    add("Engine", engine.into());
    add("Requested cache mode", caching(run.job.cache).into());
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
        add("Depth reached", format!("{} ({} of the configured depth, by Little's law)", rate(reached), ratio(share)));
    }
    facts
}

/// A target: kind, size, place, and the result of inspecting its contents.
fn target_fact(target: &TargetRecord) -> (String, String) {
    let mut parts = vec![target.kind.clone(), bytes(target.size_bytes)];
    parts.extend(target.behind.as_ref().map(ToString::to_string));
    if target.kind != "null" {
        parts.push(if target.is_export() { "cache mode of its server".into() } else { caching(target.cache).into() });
    }
    if let Some(place) = &target.place {
        let scheduler = place.scheduler.as_ref().map_or_else(String::new, |name| format!(", scheduler {name}"));
        let free = if place.free_bytes == 0 { String::new() } else { format!(", {} free", bytes(place.free_bytes)) };
        parts.push(format!("{} on {}{scheduler}{free}", place.file_system, place.device));
    }
    if let Some(contents) = &target.contents {
        parts.push(format!("{} allocated", percent(contents.allocated)));
        parts.push(format!(
            "{} samples: {} zeros, {} repeated",
            contents.sampled,
            percent(contents.zero),
            percent(contents.repeated)
        ));
        if contents.filled_bytes > 0 {
            parts.push(format!("filled with {} before the run", bytes(contents.filled_bytes)));
        }
    }
    (target.name.clone(), parts.join(", "))
}
