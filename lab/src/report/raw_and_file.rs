//! The chapter of the study `raw-and-file`.

use super::{
    ToChapter,
    parts::{self, how_measured},
};
use crate::study::flushed::FLUSH_NS;
use crate::study::raw_and_file::{
    Figure, Measured, Overall, Part, Pattern, RawAndFileResult, Storage,
    conclude::{self, find},
    labels::{mhz_per_iops, significance, test_bed},
    paper,
};
use diskwright_load::record::ContentsRecord;
use diskwright_outline::{
    Block, Cell, Chapter, Table, Tile, Tone,
    plot::{Bar, BarChart, Part as Piece},
};
use diskwright_stats::{
    numbers::{bytes, duration as time, figure as rate, ratio, short},
    summary::median,
};
use maud::Markup;

impl ToChapter for RawAndFileResult {
    fn chapter(&self, id: &str, name: &str) -> Chapter {
        chapter(self, id, name)
    }
}

fn chapter(result: &RawAndFileResult, id: &str, name: &str) -> Chapter {
    let workloads = Measured::all(&result.cells);
    let all = conclude::overall(&workloads);
    let mut blocks = Vec::new();
    let tiles: Vec<Tile> = (1..result.subjects.len()).flat_map(|subject| tiles(result, &all, subject)).collect();
    if !tiles.is_empty() {
        blocks.push(Block::Tiles(tiles));
    }
    for figure in [Figure::Throughput, Figure::MachineCpu] {
        let plots: Vec<Markup> = (1..result.subjects.len())
            .filter_map(|subject| bars(result, (&workloads, &all), subject, figure, id))
            .collect();
        if !plots.is_empty() {
            let heading = match figure {
                Figure::Throughput => "Throughput as a ratio to the block device",
                _ => "CPU time per request as a ratio to the block device",
            };
            blocks.push(Block::Heading(heading.into()));
            blocks.push(Block::Plots(plots));
        }
    }
    blocks.push(Block::Heading("All workloads together".into()));
    blocks.push(Block::Table(overall(result, &workloads, &all)));
    let first = Measured::first(&result.cells);
    if !first.is_empty() {
        blocks.push(Block::Heading("First writes".into()));
        blocks.push(Block::Table(first_writes(result, &first)));
    }
    blocks.push(Block::Heading("Each workload, later".into()));
    blocks.push(Block::Table(each_workload(result, &workloads)));
    let mut facts = Vec::new();
    facts.push(("Device".into(), test_bed(result)));
    facts.push(("Each disk".into(), format!("{}, full of data, direct I/O", bytes(result.size_bytes))));
    let first_bytes = bytes(result.first_bytes);
    facts.push(("First writes".into(), format!("{first_bytes} into new files, four times as long, and the flush")));
    facts.push(("Rounds".into(), result.rounds.to_string()));
    facts.push(("Load of other programs".into(), format!("{:.2} CPUs", result.idle_cpus)));
    blocks.extend(how_measured(&result.head, facts));
    parts::chapter(&result.head, (id, name), "Study of device and file", badges(result), blocks)
}

fn badges(result: &RawAndFileResult) -> Vec<(Tone, String)> {
    let mut badges = parts::badges(&result.head, result.rounds, result.quick);
    let full = |contents: &ContentsRecord| contents.allocated >= 1.0 && contents.zero == 0.0;
    if result.subjects.iter().all(|subject| subject.contents.as_ref().is_some_and(full)) {
        badges.push((Tone::Good, "every byte allocated and filled".into()));
    }
    badges
}

fn name_of(result: &RawAndFileResult, subject: usize) -> &str {
    result.subjects.get(subject).map_or("", |subject| subject.name.as_str())
}

/// What the paper calls this subject.
fn in_paper(result: &RawAndFileResult, subject: usize) -> Option<paper::PaperStorage> {
    Storage::from_name(name_of(result, subject))?.in_paper()
}

fn tiles(result: &RawAndFileResult, all: &[Overall], subject: usize) -> Vec<Tile> {
    let name = name_of(result, subject);
    let of = |figure| find(all, subject, Part::All, figure);
    let tile = |figure, what: &str| {
        of(figure).map(|one| Tile {
            name: format!("{name}: {what}"),
            cell: Cell::figure(one.ratio, ratio),
            unit: "× device".into(),
        })
    };
    [tile(Figure::Throughput, "throughput"), tile(Figure::MachineCpu, "CPU per request")]
        .into_iter()
        .flatten()
        .collect()
}

fn bars(
    result: &RawAndFileResult,
    (workloads, all): (&[Measured<'_>], &[Overall]),
    subject: usize,
    figure: Figure,
    id: &str,
) -> Option<Markup> {
    let name = name_of(result, subject);
    let in_paper = in_paper(result, subject);
    let bars: Vec<Bar> = workloads
        .iter()
        .filter_map(|measured| {
            let (workload, load) = (measured.workload, measured.loads.load);
            let found = measured.ratio(subject, figure)?;
            let papers = in_paper.and_then(|storage| match figure {
                Figure::Throughput => paper::throughput_ratio(storage, workload.pattern, workload.block_bytes),
                Figure::MachineCpu => paper::cpu_ratio(storage, workload.pattern),
                Figure::Cpu => None,
            });
            let papers = papers.map_or_else(String::new, |papers| format!(" (paper {})", ratio(papers)));
            Some(Bar {
                name: load.to_owned(),
                parts: vec![Piece { value: found.median(), style: 0 }],
                range: Some((found.summary.min, found.summary.max)),
                figure: format!("{}{papers}", ratio(found.median())),
                tooltip: format!(
                    "{load} on {name}: median {}, range {} to {}{papers}",
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
    let together = find(all, subject, Part::All, figure).map_or_else(String::new, |one| ratio(one.ratio));
    let what = if figure == Figure::Throughput { "throughput" } else { "CPU time per request" };
    let part = Figure::ALL.iter().position(|other| *other == figure).unwrap_or(0);
    Some(
        BarChart {
            id: format!("{id}-s{subject}-f{part}"),
            title: format!("{name}: {what}"),
            description: format!("{} workloads; over all {together} times the device.", bars.len()),
            axis: "ratio to the device in the same round (median; line: range)",
            write: &short,
            parts: vec![],
            bars,
            reference: Some((1.0, "the device".into())),
        }
        .render(),
    )
}

fn overall(result: &RawAndFileResult, workloads: &[Measured<'_>], all: &[Overall]) -> Table {
    let mut table = Table::new(
        "Ratios to the block device. Ratio: Hodges-Lehmann estimate over the workloads. Significant: Wilcoxon’s signed-rank test with Holm’s correction. Paper: VMFS, RDM (V) and RDM (P) relative to RDM (P); it had no bare device.",
        &[
            "subject",
            "workloads",
            "number",
            "figure",
            "ratio",
            "interval",
            "min",
            "max",
            "p",
            "significant",
            "paper",
        ],
    )
    .keys(4);
    for one in all {
        let name = name_of(result, one.subject);
        let papers = in_paper(result, one.subject)
            .and_then(|storage| conclude::papers(storage, workloads, one.part, one.figure));
        let word = significance(all, one);
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

fn first_writes(result: &RawAndFileResult, first: &[Measured<'_>]) -> Table {
    let mut table = Table::new(
        "Counted writes into new files, and the same on the device, where nothing is new. Medians of the rounds. Ratio: writes per second with the flush, to the block device in the same round. Later: the same workload on a disk full of data.",
        &["workload", "subject", "IOPS", "flush", "ratio", "later", "CPU/IO", "machine’s MHz per IOPS"],
    )
    .keys(2);
    let later = Measured::all(&result.cells);
    for measured in first {
        let same = later.iter().find(|other| other.workload == measured.workload);
        for (index, cell) in measured.loads.cells.iter().enumerate() {
            let Some(medians) = cell.medians() else { continue };
            let against = |found: Option<f64>| match index {
                0 => Cell::figure(1.0, ratio).toned(Tone::Faint),
                _ => Cell::maybe(found, ratio),
            };
            let machine_ns = medians.machine_cpu_ns_per_io;
            table.row(vec![
                Cell::text(if index == 0 { measured.loads.load } else { "" }),
                Cell::text(name_of(result, index)),
                Cell::figure(medians.iops, rate),
                Cell::maybe(cell.more(FLUSH_NS).and_then(|flushes| median(&flushes)), time),
                against(measured.first_ratio(index).map(|found| found.median())),
                against(same.and_then(|same| Some(same.ratio(index, Figure::Throughput)?.median()))),
                Cell::figure(machine_ns, time),
                Cell::maybe(mhz_per_iops(machine_ns, result.tsc_hz), |mhz| format!("{mhz:.4}")),
            ]);
        }
    }
    table
}

fn each_workload(result: &RawAndFileResult, workloads: &[Measured<'_>]) -> Table {
    let mut table = Table::new(
        "Medians of the rounds on disks full of data, 64 in flight; ratios are to the block device in the same round. CPU/IO: of the whole machine, as in the paper; generator: of the load generator alone. Paper: VMFS, RDM (V) and RDM (P), its ratios to RDM (P).",
        &[
            "workload",
            "subject",
            "IOPS",
            "MB/s",
            "ratio",
            "paper",
            "paper MB/s",
            "mean",
            "p99",
            "CPU/IO",
            "ratio",
            "paper",
            "generator",
            "ratio",
            "machine’s MHz per IOPS",
        ],
    )
    .keys(2);
    for measured in workloads {
        let workload = measured.workload;
        for (index, cell) in measured.loads.cells.iter().enumerate() {
            let Some(medians) = cell.medians() else { continue };
            let name = name_of(result, index);
            let in_paper = in_paper(result, index);
            let of = |figure: Figure| {
                let found = measured.ratio(index, figure).map(|ratio| ratio.median());
                if index == 0 { Cell::figure(1.0, ratio).toned(Tone::Faint) } else { Cell::maybe(found, ratio) }
            };
            let papers = |value: Option<f64>| Cell::maybe(value, ratio).toned(Tone::Faint);
            let pattern = workload.pattern;
            let of_paper = |of: fn(paper::PaperStorage, Pattern, u64) -> Option<f64>| {
                in_paper.and_then(|storage| of(storage, pattern, workload.block_bytes))
            };
            let machine_ns = medians.machine_cpu_ns_per_io;
            table.row(vec![
                Cell::text(if index == 0 { measured.loads.load } else { "" }),
                Cell::text(name),
                Cell::figure(medians.iops, rate),
                Cell::figure(medians.mb_per_s, rate),
                of(Figure::Throughput),
                papers(of_paper(paper::throughput_ratio)),
                Cell::maybe(of_paper(paper::mb_per_s), rate).toned(Tone::Faint),
                Cell::figure(medians.mean_ns, time),
                Cell::figure(medians.p99_ns, time),
                Cell::figure(machine_ns, time),
                of(Figure::MachineCpu),
                papers(in_paper.and_then(|storage| paper::cpu_ratio(storage, pattern))),
                Cell::figure(medians.cpu_ns_per_io, time),
                of(Figure::Cpu),
                Cell::maybe(mhz_per_iops(machine_ns, result.tsc_hz), |mhz| format!("{mhz:.4}")),
            ]);
        }
    }
    table
}
