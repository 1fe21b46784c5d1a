//! What the study `queue-depth` prints: the verdict, the findings beside the paper's Table 5, each
//! stage beside the paper's own figures, and reasons for doubt.

use super::{
    Finding, QueueDepthResult, Stage, StageRecord,
    findings::{self, Beside, Papers, beside, load_name},
    paper,
};
use crate::{
    figures::Figures,
    record::{End, Run},
    sweep::{self, ArrayFigures, SweepCell},
    table::{Align, Cell, Table, Tone, bytes, duration, figure, grouped, paint},
};
use std::fmt::Write as _;

/// The whole report as text. `colour` only for a terminal.
pub fn render(result: &QueueDepthResult, colour: bool) -> String {
    let mut text = format!("{}\n\n{}", result.verdict, conditions(result));
    if !result.findings.is_empty() {
        let _ = write!(text, "\nFindings, as in the paper's Table 5\n\n{}", findings_table(result, colour));
        if result.findings.iter().any(|finding| finding.found.is_some()) {
            let _ = write!(text, "\nThe same for each device below\n\n{}", devices_table(result, colour));
        }
        text.push_str(&findings_legend(result));
    }
    if let Some(run) = &result.pre_test {
        let _ = write!(text, "\nPre-test 1: {}\n\n{}", pre_test_load(run), pre_test(run));
    }
    for record in &result.stages {
        let _ = write!(text, "\n{}\n\n{}", record.stage.title(), stage_table(record, colour));
        for row in &record.sweep.knees {
            text.push_str(&sweep::told_points(row));
        }
        if record.sweep.best.is_some() {
            let _ = writeln!(text, "\n  {}", record.sweep.verdict);
        }
    }
    if !result.stages.is_empty() {
        text.push_str(&legend(result));
    }
    if !result.warnings.is_empty() {
        text.push_str("\nBefore you believe this\n\n");
        for warning in &result.warnings {
            let _ = writeln!(text, "  {} {warning}", paint("!", Tone::Bad, colour));
        }
    }
    match &result.end {
        End::Complete => {}
        End::Stopped => text.push_str(
            "\nstopped before it was done; the same command with --output and the file below goes on with it\n",
        ),
        End::Failed { .. } => text.push_str("\nended because requests failed; what was measured before is kept\n"),
    }
    text
}

/// What was measured on what, in two or three lines.
fn conditions(result: &QueueDepthResult) -> String {
    let settings = &result.settings;
    let mut text = format!("  {}", result.machine);
    if let Some(place) = &result.place {
        let _ = write!(text, "; {place}");
    }
    text.push('\n');
    let targets: Vec<String> = result
        .targets
        .iter()
        .map(|target| format!("{} ({}, {})", target.name, target.kind, bytes(target.size_bytes)))
        .collect();
    let _ = writeln!(text, "  {}; {}", targets.join(", "), how(result));
    if settings.quick {
        text.push_str(
            "  quick: 12 of 24 depths, 6 of 24 numbers of threads, 10 of 36 and of 32 sequential depths; cells as long as two minutes allow\n",
        );
    }
    text
}

/// Cache mode, rounds and cells.
pub(crate) fn how(result: &QueueDepthResult) -> String {
    let settings = &result.settings;
    let cache = match settings.cache {
        crate::job::Caching::Cached => "through the page cache",
        crate::job::Caching::WriteThrough => "through the page cache, writes durable",
        crate::job::Caching::Direct => "O_DIRECT",
        crate::job::Caching::DirectWriteThrough => "O_DIRECT, writes durable (the paper's -h)",
    };
    let cells: Vec<u64> = result
        .stages
        .iter()
        .filter_map(|record| Some(record.sweep.options.job.phases.first()?.duration.as_nanos()))
        .collect();
    let windows = match (cells.iter().min(), cells.iter().max()) {
        (Some(least), Some(most)) if least == most => format!(", windows of {}", duration(*least as f64)),
        (Some(least), Some(most)) => format!(", windows of {} to {}", duration(*least as f64), duration(*most as f64)),
        _ => String::new(),
    };
    format!("{cache}; {} threads; {} rounds{windows}", settings.threads, settings.rounds)
}

const FINDING_HEADS: [(&str, Align); 9] = [
    ("load", Align::Left),
    ("", Align::Left),
    ("by", Align::Left),
    ("in flight", Align::Right),
    ("between", Align::Left),
    ("threads x depth", Align::Left),
    ("IOPS", Align::Right),
    ("MB/s", Align::Right),
    ("mean", Align::Right),
];

const DEVICE_HEADS: [(&str, Align); 6] = [
    ("load", Align::Left),
    ("", Align::Left),
    ("amplif.", Align::Right),
    ("devices", Align::Right),
    ("MB/s/device", Align::Right),
    ("depth/device", Align::Right),
];

fn findings_table(result: &QueueDepthResult, colour: bool) -> String {
    let mut table = Table::new(&FINDING_HEADS);
    for finding in &result.findings {
        let papers = findings::papers(finding.stage);
        table.row(ours(finding));
        table.row(theirs(papers));
        if let (Some(found), Some(papers)) = (&finding.found, papers) {
            let settled = papers.settled;
            table.row(against(vec![
                Cell::new(""),
                ratio(found.in_flight as f64, settled.in_flight as f64),
                Cell::new(""),
                Cell::new(""),
                ratio(found.iops, settled.point.iops),
                ratio(found.mb_per_s, papers.mb_per_s),
                ratio(found.mean_ns, settled.point.mean_ms * 1e6),
            ]));
        }
    }
    table.render(colour)
}

fn devices_table(result: &QueueDepthResult, colour: bool) -> String {
    let mut table = Table::new(&DEVICE_HEADS);
    let ours = result.settings.array.map_or(1, |array| array.devices);
    let row = |array: ArrayFigures, devices: u32| {
        [
            format!("{:.2}", array.amplification),
            devices.to_string(),
            figure(array.mb_per_s_per_device),
            figure(array.depth_per_device),
        ]
    };
    for finding in &result.findings {
        let Some(found) = &finding.found else { continue };
        let mut cells = vec![Cell::new(load_name(finding.stage)), Cell::new("ours")];
        cells.extend(row(found.array, ours).map(Cell::new));
        table.row(cells);
        let Some(papers) = findings::papers(finding.stage) else { continue };
        let mut cells = vec![Cell::new(""), Cell::toned("the paper's", Tone::Faint)];
        cells.extend(row(papers.array, paper::ARRAY.devices).map(|text| Cell::toned(text, Tone::Faint)));
        table.row(cells);
        table.row(against(vec![
            Cell::new(""),
            Cell::new(""),
            ratio(found.array.mb_per_s_per_device, papers.array.mb_per_s_per_device),
            ratio(found.array.depth_per_device, papers.array.depth_per_device),
        ]));
    }
    table.render(colour)
}

/// A row of ratios.
fn against(ratios: Vec<Cell>) -> Vec<Cell> {
    [Cell::new(""), Cell::toned("ours : paper's", Tone::Faint)].into_iter().chain(ratios).collect()
}

fn ratio(ours: f64, papers: f64) -> Cell {
    Cell::toned(digits(ours / papers), Tone::Faint)
}

/// A ratio with the digits that matter.
fn digits(ratio: f64) -> String {
    if ratio < 0.1 { format!("{ratio:.3}") } else { format!("{ratio:.2}") }
}

fn ours(finding: &Finding) -> Vec<Cell> {
    let mut row = vec![Cell::new(load_name(finding.stage)), Cell::new("ours")];
    let Some(found) = &finding.found else {
        let why = finding.why.as_ref().map_or_else(|| "not measured".into(), ToString::to_string);
        row.push(Cell::toned("none", Tone::Bad));
        row.extend([Cell::new(""), Cell::toned(why, Tone::Faint)]);
        return row;
    };
    let between = found.interval.map_or_else(String::new, |ends| format!("{}..{}", ends.low, ends.high));
    row.extend([
        Cell::new(found.rule.name()),
        Cell::toned(found.in_flight.to_string(), Tone::Good),
        Cell::toned(between, Tone::Faint),
        Cell::new(format!("{} x {}", found.threads * found.files, found.queue_depth)),
        Cell::new(grouped(found.iops)),
        Cell::new(figure(found.mb_per_s)),
        Cell::new(duration(found.mean_ns)),
    ]);
    row
}

fn theirs(papers: Option<Papers>) -> Vec<Cell> {
    let mut row = vec![Cell::new(""), Cell::toned("the paper's", Tone::Faint)];
    if let Some(Papers { settled, mb_per_s, .. }) = papers {
        let depth = settled.in_flight / settled.threads;
        let cells = [
            String::new(),
            settled.in_flight.to_string(),
            String::new(),
            format!("{} x {depth}", settled.threads),
            grouped(settled.point.iops),
            figure(mb_per_s),
            duration(settled.point.mean_ms * 1e6),
        ];
        row.extend(cells.into_iter().map(|text| Cell::toned(text, Tone::Faint)));
    }
    row
}

fn findings_legend(result: &QueueDepthResult) -> String {
    let mut text = String::from(
        "\n  between: 95 % interval of the load that the rule chose; random I/O is then split over threads at a total near it that they can share.\n  \
         amplif.: transfers for each request, reads + writes x copies; depth/device: in flight x amplif. / devices; MB/s of the paper in 10^6.\n  \
         The paper names 15.6 for each SSD and random I/O, reckoned from 96 in flight; its 120 are 19.5.\n",
    );
    if result.settings.array.is_none() {
        text.push_str(
            "  Nothing was said of the devices below: one device without copies is taken (--copies, --devices).\n",
        );
    }
    text
}

fn pre_test_load(run: &Run) -> String {
    let load = run.job.phases.first().and_then(|phase| phase.loads.first());
    load.map_or_else(String::new, |load| {
        format!("random 8K (70 % read), {} threads x {}", load.threads, load.queue_depth)
    })
}

fn pre_test(run: &Run) -> String {
    let Some(phase) = run.phases.first() else { return "  not measured\n".into() };
    let figures = Figures::of(phase);
    let mut text = format!(
        "  {} IOPS at {} (the paper: {} at {}; ours : paper's {:.2} and {:.2}); p99 {}; {} of {} in flight on average\n",
        grouped(figures.iops),
        duration(figures.mean_ns),
        grouped(paper::PRE_TEST.iops),
        duration(paper::PRE_TEST.mean_ms * 1e6),
        figures.iops / paper::PRE_TEST.iops,
        figures.mean_ns / (paper::PRE_TEST.mean_ms * 1e6),
        duration(figures.p99_ns),
        figure(figures.depth_reached),
        figures.queue_depth,
    );
    text.push_str(&match &phase.steady {
        Some(steady) if steady.left_ns.is_none() && steady.reached_ns.is_some() => {
            format!("  steady state reached after {}\n", duration(steady.reached_ns.unwrap_or(0) as f64))
        }
        Some(steady) => format!(
            "  steady state {} (range {:.0} %, slope {:.0} % of the mean)\n",
            if steady.reached_ns.is_some() { "reached and left again" } else { "not reached" },
            steady.range * 100.0,
            steady.slope * 100.0
        ),
        None => String::new(),
    });
    text
}

fn stage_table(record: &StageRecord, colour: bool) -> String {
    let (stage, sweep) = (record.stage, &record.sweep);
    let compared = beside(record);
    let with_paper = compared.iter().flatten().any(|pair| pair.papers.is_some());
    let array = sweep.options.array.is_some();
    let mut heads: Vec<(&str, Align)> = match stage {
        Stage::Files => vec![("files", Align::Right), ("threads x depth", Align::Left)],
        Stage::Combinations => vec![("threads x depth", Align::Left)],
        _ => vec![("depth", Align::Right)],
    };
    heads.push(("in flight", Align::Right));
    if array {
        heads.extend([("per device", Align::Right), ("IOPS/device", Align::Right)]);
    }
    heads.extend([
        ("IOPS", Align::Right),
        ("rounds", Align::Left),
        ("MB/s", Align::Right),
        ("mean", Align::Right),
        ("p99", Align::Right),
        ("CPU/IO", Align::Right),
    ]);
    if with_paper {
        heads.extend([("grown", Align::Right), ("paper's", Align::Right), ("ours : paper's", Align::Right)]);
    }
    heads.push(("", Align::Left));
    let mut table = Table::new(&heads);
    for (index, (cell, pair)) in sweep.cells.iter().zip(&compared).enumerate() {
        let mut row = place(stage, cell);
        row.push(Cell::new(cell.total_depth.to_string()));
        if array {
            let show = |value: Option<f64>| Cell::new(value.map_or_else(String::new, figure));
            row.push(show(cell.array.map(|array| array.depth_per_device)));
            row.push(show(cell.array.map(|array| array.iops_per_device)));
        }
        if cell.rounds.is_empty() {
            row.push(Cell::toned("not measured", Tone::Faint));
            table.row(row);
            continue;
        }
        row.extend(figures(cell));
        if with_paper {
            row.extend(beside_cells(*pair));
        }
        let knee = sweep.knees.first();
        let at = knee.and_then(|row| row.cells.iter().position(|cell| *cell == index)).unwrap_or(index);
        row.push(Cell::toned(sweep::marks(sweep, index, at, knee), Tone::Good));
        table.row(row);
    }
    table.render(colour)
}

fn place(stage: Stage, cell: &SweepCell) -> Vec<Cell> {
    let split = || Cell::new(format!("{} x {}", cell.threads, cell.queue_depth));
    match stage {
        Stage::Files => vec![Cell::new(cell.files.to_string()), split()],
        Stage::Combinations => vec![split()],
        _ => vec![Cell::new(cell.queue_depth.to_string())],
    }
}

fn figures(cell: &SweepCell) -> Vec<Cell> {
    let median = |figure: fn(&Figures) -> f64| cell.median(figure).unwrap_or(0.0);
    let ends = |pick: fn(f64, f64) -> f64, from: f64| cell.rounds.iter().map(|round| round.iops).fold(from, pick);
    let spread = match cell.rounds.len() {
        1 => String::new(),
        _ => format!("{}..{}", grouped(ends(f64::min, f64::INFINITY)), grouped(ends(f64::max, 0.0))),
    };
    vec![
        Cell::new(grouped(median(|round| round.iops))),
        Cell::toned(spread, Tone::Faint),
        Cell::new(figure(median(|round| round.mb_per_s))),
        Cell::new(duration(median(|round| round.mean_ns))),
        Cell::new(duration(median(|round| round.p99_ns))),
        Cell::new(duration(median(|round| round.cpu_ns_per_io))),
    ]
}

fn beside_cells(pair: Option<Beside>) -> Vec<Cell> {
    let times = |value: Option<f64>| value.map_or_else(|| "-".into(), |value| format!("x {value:.2}"));
    let Some(pair) = pair else { return vec![Cell::new(""), Cell::new(""), Cell::new("")] };
    vec![
        Cell::new(times(Some(pair.ours))),
        Cell::toned(times(pair.papers), Tone::Faint),
        Cell::toned(pair.ratio.map_or_else(|| "-".into(), |ratio| format!("{ratio:.2}")), Tone::Faint),
    ]
}

fn legend(result: &QueueDepthResult) -> String {
    let mut text = String::from(
        "\n  figures are medians of the rounds; grown: IOPS to those of the first place that both have, ours and the paper's; ours : paper's: IOPS.\n  \
         efficient: largest power (IOPS / mean latency); saturation: first at 95 % of the peak; paper: where latency begins to outpace throughput\n",
    );
    if let Some(array) = result.settings.array {
        let _ = writeln!(text, "  {} copies on {} devices below", array.copies, array.devices);
    }
    text
}
