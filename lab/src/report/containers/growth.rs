//! The blocks of the experiments `expanding` and block size.

use super::marked::marked;
use crate::{
    cells::Cell as Measured,
    paper,
    study::{
        containers::{BlockSizeRecord, expanding::Pair},
        flushed::FLUSH_NS,
    },
    targets::Container,
};
use diskwright_load::figures::Figures;
use diskwright_outline::{
    Block, Cell, Table, Tone,
    plot::{Bar, BarChart, Part},
};
use diskwright_stats::{
    numbers::{bytes, duration as time, figure as rate, ratio, short},
    summary::median,
};
use maud::Markup;

/// The blocks of the expanding experiment; empty if it was not measured.
pub(super) fn expanding(cells: &[Measured], id: &str) -> Vec<Block> {
    let pairs = Pair::all(cells);
    if pairs.is_empty() {
        return Vec::new();
    }
    vec![
        Block::Heading("Writing into empty disks".into()),
        Block::Plots(vec![expanding_bars(&pairs, &format!("{id}-expanding"))]),
        Block::Table(expanding_table(&pairs)),
        Block::Text(
            "The paper has no figures for this, only a warning: “that gap may be widened if the VHD has to expand itself first before taking any user data”."
                .into(),
        ),
    ]
}

/// Speed of writes into empty disks relative to full ones, flush included.
fn expanding_bars(pairs: &[Pair<'_>], id: &str) -> Markup {
    let bars: Vec<Bar> = pairs
        .iter()
        .filter_map(|pair| {
            let found = pair.ratio_with_flush()?;
            let (summary, range) = (found.summary, found.range());
            let name = format!("{}, {}", pair.target(), pair.full.load);
            Some(Bar {
                parts: vec![Part { value: summary.median, style: 0 }],
                range,
                figure: ratio(summary.median),
                tooltip: format!(
                    "{name}: {} times the full disk, range {} to {}",
                    ratio(summary.median),
                    ratio(summary.min),
                    ratio(summary.max)
                ),
                name,
            })
        })
        .collect();
    BarChart {
        id: id.into(),
        title: "Speed of writes into empty disks, as a ratio to full ones".into(),
        description: bars.iter().map(|bar| bar.tooltip.clone()).collect::<Vec<_>>().join("; "),
        axis: "ratio to the full disk, flush included (whiskers: range of the rounds)",
        write: &short,
        parts: vec![],
        bars,
        reference: Some((1.0, "full disk".into())),
    }
    .render()
}

fn expanding_table(pairs: &[Pair<'_>]) -> Table {
    let heads = [
        "disk",
        "workload",
        "writes",
        "full IOPS",
        "empty IOPS",
        "ratio",
        "CPU ratio",
        "flush, full",
        "flush, empty",
        "ratio with flush",
    ];
    let mut table =
        Table::new("The same writes into a full and an empty disk, in interleaved rounds (medians)", &heads);
    for pair in pairs {
        let Pair { full, empty } = pair;
        let median_of = |cell: &Measured| median(&cell.more(FLUSH_NS)?);
        let of_pair = |figure: fn(&Figures) -> f64| empty.ratio(full, figure).map(|ratio| ratio.median());
        table.row(vec![
            Cell::text(pair.target()),
            Cell::text(&full.load),
            Cell::maybe(full.rounds.first().map(|round| round.writes as f64), rate),
            Cell::maybe(full.median(|round| round.iops), rate),
            Cell::maybe(empty.median(|round| round.iops), rate),
            marked(of_pair(|round| round.iops)),
            Cell::maybe(of_pair(|round| round.cpu_ns_per_io), ratio),
            Cell::maybe(median_of(full), time),
            Cell::maybe(median_of(empty), time),
            marked(pair.ratio_with_flush().map(|ratio| ratio.median())),
        ]);
    }
    table
}

/// The blocks of one container with several block sizes.
pub(super) fn block_sizes(record: &BlockSizeRecord, cells: &[Measured]) -> Vec<Block> {
    let workloads = record.compared(cells);
    let Some(first) = workloads.first() else { return Vec::new() };
    let sizes: Vec<String> = record.block_bytes.iter().map(|size| bytes(*size)).collect();
    let usual = sizes.first().cloned().unwrap_or_default();
    // The paper compares block sizes only for dynamic VHDs.
    let papers = |load: &str| {
        let of_paper = record.container == Container::VhdDynamic;
        of_paper.then(|| paper::block_size_ratio(&paper::workload(load)?)).flatten()
    };
    let has_paper = workloads.iter().any(|workload| papers(workload.load).is_some());
    let caption = format!(
        "Full disks at queue depth {}: IOPS with blocks of {usual}, and others as a ratio to that{}",
        first.in_flight,
        if has_paper {
            ". Paper: peak IOPS of 512 KiB on Windows Server 2008 against 2 MiB on R2, block size and software together"
        } else {
            ""
        }
    );
    let mut table = Table::new(caption, &["workload"]);
    table.heads.push(format!("{usual} IOPS"));
    table.heads.extend(sizes.iter().skip(1).cloned());
    if has_paper {
        table.heads.push("paper’s ratio".into());
    }
    for workload in &workloads {
        let mut row = vec![Cell::text(workload.load)];
        row.extend(workload.cells.first().map(|cell| Cell::maybe(cell.median(|round| round.iops), rate)));
        row.extend(workload.median_ratios(|round| round.iops).into_iter().skip(1).map(marked));
        if has_paper {
            row.push(Cell::maybe(papers(workload.load), ratio).toned(Tone::Faint));
        }
        table.row(row);
    }
    let files: Vec<String> = sizes
        .iter()
        .zip(&record.file_allocated_bytes)
        .map(|(size, taken)| format!("{} with blocks of {size}", bytes(*taken)))
        .collect();
    vec![
        Block::Heading(format!("Block size, {}", record.container.name())),
        Block::Table(table),
        Block::Text(format!("The files take {}.", files.join(", "))),
    ]
}
