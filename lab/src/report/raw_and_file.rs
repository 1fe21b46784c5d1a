//! The chapter of the study `raw-and-file`: a file, and virtual disks on it, against the bare
//! device.

use super::Told;
use super::parts::doubts;
use super::parts::measured_on;
use super::parts::{end_badge, subtitle};
use crate::study::raw_and_file::{
    Figure, Part, RawAndFileResult,
    conclude::{self, find, is_file},
    paper,
    told::{mhz_per_iops, said, test_bed},
};
use diskwright_outline::{
    Block, Cell, Chapter, Table, Tile, Tone,
    plot::{Bar, BarChart, Part as Piece},
};
use diskwright_stats::numbers::bytes;
use diskwright_stats::numbers::{duration as time, figure as rate, ratio, short};
use maud::Markup;

impl Told for RawAndFileResult {
    fn chapter(&self, id: &str, name: &str) -> Chapter {
        chapter(self, id, name)
    }
}

fn chapter(result: &RawAndFileResult, id: &str, name: &str) -> Chapter {
    let mut blocks = Vec::new();
    let tiles: Vec<Tile> = (1..result.subjects.len()).flat_map(|subject| tiles(result, subject)).collect();
    if !tiles.is_empty() {
        blocks.push(Block::Tiles(tiles));
    }
    for figure in [Figure::Throughput, Figure::MachineCpu] {
        let plots: Vec<Markup> =
            (1..result.subjects.len()).filter_map(|subject| bars(result, subject, figure, id)).collect();
        if !plots.is_empty() {
            let heading = match figure {
                Figure::Throughput => "Throughput as a ratio to the block device",
                _ => "CPU time for each request as a ratio to the block device",
            };
            blocks.push(Block::Heading(heading.into()));
            blocks.push(Block::Plots(plots));
        }
    }
    blocks.push(Block::Heading("All workloads together".into()));
    blocks.push(Block::Table(overall(result)));
    blocks.push(Block::Heading("Each workload".into()));
    blocks.push(Block::Table(workloads(result)));
    let mut facts = Vec::new();
    facts.push(("Device".into(), test_bed(result)));
    facts.push(("Each disk".into(), format!("{}, full of data, driven past the page cache", bytes(result.size_bytes))));
    facts.push(("Rounds".into(), result.rounds.to_string()));
    facts.push(("Busy while nothing was measured".into(), format!("{:.2} processors", result.idle_cpus)));
    blocks.extend(measured_on(&result.machine, &result.versions, Some(&result.place), facts));
    Chapter {
        id: id.to_owned(),
        title: "Study of device and file".into(),
        source: name.to_owned(),
        subtitle: subtitle(&result.started_utc, result.took_ns),
        verdict: result.verdict.clone(),
        badges: badges(result),
        doubts: doubts(&result.warnings),
        blocks,
    }
}

fn badges(result: &RawAndFileResult) -> Vec<(Tone, String)> {
    let mut badges = vec![end_badge(&result.end)];
    badges.push((Tone::Plain, format!("{} rounds", result.rounds)));
    if result.quick {
        badges.push((Tone::Doubt, "quick".into()));
    }
    let full = |contents: &diskwright_load::record::ContentsRecord| contents.allocated >= 1.0 && contents.zero == 0.0;
    if result.subjects.iter().all(|subject| subject.contents.as_ref().is_some_and(full)) {
        badges.push((Tone::Good, "every byte allocated and filled".into()));
    }
    badges
}

fn name_of(result: &RawAndFileResult, subject: usize) -> &str {
    result.subjects.get(subject).map_or("", |subject| subject.name.as_str())
}

fn tiles(result: &RawAndFileResult, subject: usize) -> Vec<Tile> {
    let name = name_of(result, subject);
    let of = |figure| find(result, subject, Part::All, figure);
    let tile = |figure, what: &str| {
        of(figure).map(|one| Tile {
            name: format!("{name}: {what}"),
            cell: Cell::figure(one.ratio, ratio),
            unit: "of the device".into(),
        })
    };
    [tile(Figure::Throughput, "throughput"), tile(Figure::MachineCpu, "CPU for each request")]
        .into_iter()
        .flatten()
        .collect()
}

fn bars(result: &RawAndFileResult, subject: usize, figure: Figure, id: &str) -> Option<Markup> {
    let name = name_of(result, subject);
    let in_paper = is_file(name, result.test_bed.file_system);
    let bars: Vec<Bar> = result
        .workloads
        .iter()
        .filter_map(|workload| {
            let found = figure.of(workload.sides.get(subject)?)?;
            let papers = in_paper
                .then(|| match figure {
                    Figure::Throughput => paper::throughput_ratio(workload.pattern, workload.block_bytes),
                    Figure::MachineCpu => Some(paper::cpu_ratio(workload.pattern)),
                    Figure::Cpu => None,
                })
                .flatten();
            let papers = papers.map_or_else(String::new, |papers| format!(" (paper {})", ratio(papers)));
            Some(Bar {
                name: workload.name(),
                parts: vec![Piece { value: found.median(), style: 0 }],
                range: Some((found.summary.min, found.summary.max)),
                figure: format!("{}{papers}", ratio(found.median())),
                says: format!(
                    "{} on {name}: {} in the median round, {} to {}{papers}",
                    workload.name(),
                    ratio(found.median()),
                    ratio(found.summary.min),
                    ratio(found.summary.max)
                ),
            })
        })
        .collect();
    if bars.is_empty() {
        return None;
    }
    let together = find(result, subject, Part::All, figure).map_or_else(String::new, |one| ratio(one.ratio));
    let what = if figure == Figure::Throughput { "throughput" } else { "CPU time for each request" };
    let part = Figure::ALL.iter().position(|other| *other == figure).unwrap_or(0);
    Some(
        BarChart {
            id: format!("{id}-s{subject}-f{part}"),
            title: format!("{name}: {what}"),
            description: format!("{} workloads; all together {together} of the device.", bars.len()),
            axis: "ratio to the device in the same round: median, lowest to highest",
            write: &short,
            parts: vec![],
            bars,
            reference: Some((1.0, "the device".into())),
        }
        .render(),
    )
}

fn overall(result: &RawAndFileResult) -> Table {
    let mut table = Table::new(
        "Ratios to the block device. Ratio: Hodges and Lehmann’s middle of the workloads. Beyond chance: Wilcoxon’s signed ranks, corrected by Holm. The paper’s: VMFS to RDM (P).",
        &[
            "on",
            "workloads",
            "of them",
            "figure",
            "ratio",
            "interval",
            "lowest",
            "highest",
            "p",
            "beyond chance",
            "the paper’s",
        ],
    )
    .keys(4);
    for one in &result.overall {
        let name = name_of(result, one.subject);
        let papers = conclude::papers(&result.workloads, one.part, one.figure)
            .filter(|_| is_file(name, result.test_bed.file_system));
        let word = said(result, one);
        let tone = match word {
            "yes, worse" => Tone::Bad,
            "yes, better" => Tone::Good,
            _ => Tone::Faint,
        };
        table.row(vec![
            Cell::text(name),
            Cell::text(one.part.name()),
            Cell::figure(one.workloads as f64, short),
            Cell::text(one.figure.name()),
            Cell::figure(one.ratio, ratio),
            Cell::text(format!("{}..{}", ratio(one.interval.low), ratio(one.interval.high))),
            Cell::figure(one.min, ratio),
            Cell::figure(one.max, ratio),
            Cell::maybe(one.p_corrected, |p| if p < 0.0005 { "< 0.001".into() } else { format!("{p:.3}") }),
            Cell::text(word).toned(tone),
            Cell::maybe(papers, ratio).toned(Tone::Faint),
        ]);
    }
    table
}

fn workloads(result: &RawAndFileResult) -> Table {
    let mut table = Table::new(
        "Medians of the rounds, 64 in flight; ratios are to the block device in the same round. CPU is the whole machine’s, as the paper has it, and the generator’s alone.",
        &[
            "workload",
            "on",
            "IOPS",
            "MB/s",
            "ratio",
            "the paper’s",
            "mean",
            "p99",
            "CPU for each",
            "ratio",
            "the paper’s",
            "generator’s",
            "ratio",
            "machine’s MHz per IOPS",
        ],
    )
    .keys(2);
    for workload in &result.workloads {
        for (index, side) in workload.sides.iter().enumerate() {
            let name = name_of(result, index);
            let in_paper = is_file(name, result.test_bed.file_system);
            let of = |figure: Figure| {
                let found = figure.of(side).map(crate::measure::Ratio::median);
                if index == 0 { Cell::figure(1.0, ratio).toned(Tone::Faint) } else { Cell::maybe(found, ratio) }
            };
            let papers = |value: Option<f64>| Cell::maybe(value.filter(|_| in_paper), ratio).toned(Tone::Faint);
            let machine_ns = side.machine_cpu_ns_per_io.median;
            table.row(vec![
                Cell::text(if index == 0 { workload.name() } else { String::new() }),
                Cell::text(name),
                Cell::figure(side.iops.median, rate),
                Cell::figure(side.mb_per_s.median, rate),
                of(Figure::Throughput),
                papers(paper::throughput_ratio(workload.pattern, workload.block_bytes)),
                Cell::figure(side.latency_mean_ns.median, time),
                Cell::figure(side.latency_p99_ns.median, time),
                Cell::figure(machine_ns, time),
                of(Figure::MachineCpu),
                papers(Some(paper::cpu_ratio(workload.pattern))),
                Cell::figure(side.cpu_ns_per_io.median, time),
                of(Figure::Cpu),
                Cell::maybe(mhz_per_iops(machine_ns, result.tsc_hz), |mhz| format!("{mhz:.4}")),
            ]);
        }
    }
    table
}
