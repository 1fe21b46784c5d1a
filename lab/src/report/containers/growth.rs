//! Writes into empty disks, and blocks of other sizes.

use super::{cpu_ratio, iops_ratio, marked};
use crate::{
    measure::Ratio,
    result::{BlockSizeRecord, ExpandingRecord},
};
use diskwright_outline::{
    Block, Cell, Table, Tone,
    plot::{Bar, BarChart, Part},
};
use diskwright_stats::numbers::bytes;
use diskwright_stats::numbers::{duration as time, figure as rate, ratio, short};
use maud::Markup;

/// The blocks of the expanding experiment; none where it was not made.
pub(super) fn expanding(records: &[ExpandingRecord], id: &str) -> Vec<Block> {
    if records.is_empty() {
        return Vec::new();
    }
    vec![
        Block::Heading("Writing into empty disks".into()),
        Block::Plots(vec![expanding_bars(records, &format!("{id}-expanding"))]),
        Block::Table(expanding_table(records)),
        Block::Text(
            "The paper has no figures for this, only a warning: “that gap may be widened if the VHD has to expand itself first before taking any user data”."
                .into(),
        ),
    ]
}

/// Speed of the empty disks, the flush included, where the full ones have 1.
fn expanding_bars(records: &[ExpandingRecord], id: &str) -> Markup {
    let bars: Vec<Bar> = records
        .iter()
        .map(|record| {
            let Ratio { summary, .. } = &record.ratio_with_flush;
            let name = format!("{}, {}", record.target, record.result.workload.name);
            Bar {
                parts: vec![Part { value: summary.median, style: 0 }],
                range: Some((summary.min, summary.max)),
                figure: ratio(summary.median),
                says: format!(
                    "{name}: {} of the full disk, from {} to {}",
                    ratio(summary.median),
                    ratio(summary.min),
                    ratio(summary.max)
                ),
                name,
            }
        })
        .collect();
    BarChart {
        id: id.into(),
        title: "Speed of writes into empty disks, as a ratio to full ones".into(),
        description: bars.iter().map(|bar| bar.says.clone()).collect::<Vec<_>>().join("; "),
        axis: "ratio to the full disk, the flush included (whiskers: range of the rounds)",
        write: &short,
        parts: vec![],
        bars,
        reference: Some((1.0, "full disk".into())),
    }
    .render()
}

fn expanding_table(records: &[ExpandingRecord]) -> Table {
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
        Table::new("The same writes into a full disk and into an empty one, in turns (medians of the rounds)", &heads);
    for record in records {
        let [full, empty] = &record.result.cells[..] else { continue };
        table.row(vec![
            Cell::text(&record.target),
            Cell::text(&record.result.workload.name),
            Cell::figure(record.writes as f64, rate),
            Cell::figure(full.iops.median, rate),
            Cell::figure(empty.iops.median, rate),
            marked(iops_ratio(empty)),
            Cell::maybe(cpu_ratio(empty), ratio),
            Cell::figure(record.flush_full_ns.median, time),
            Cell::figure(record.flush_empty_ns.median, time),
            marked(Some(record.ratio_with_flush.median())),
        ]);
    }
    table
}

/// The block of one kind of disk with several sizes of blocks.
pub(super) fn block_sizes(record: &BlockSizeRecord) -> Vec<Block> {
    let Some(first) = record.workloads.first() else { return Vec::new() };
    let sizes: Vec<String> = record.block_bytes.iter().map(|size| bytes(*size)).collect();
    let usual = sizes.first().cloned().unwrap_or_default();
    let has_paper = record.paper_ratios.iter().any(Option::is_some);
    let caption = format!(
        "Full disks at queue depth {}: IOPS with blocks of {usual}, and others as a ratio to that{}",
        first.workload.queue_depth,
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
    for (result, paper) in record.workloads.iter().zip(&record.paper_ratios) {
        let mut row = vec![Cell::text(&result.workload.name)];
        row.extend(result.cells.first().map(|cell| Cell::figure(cell.iops.median, rate)));
        row.extend(result.cells.iter().skip(1).map(|cell| marked(iops_ratio(cell))));
        if has_paper {
            row.push(Cell::maybe(*paper, ratio).toned(Tone::Faint));
        }
        table.row(row);
    }
    let files: Vec<String> = sizes
        .iter()
        .zip(&record.file_allocated_bytes)
        .map(|(size, taken)| format!("{} with blocks of {size}", bytes(*taken)))
        .collect();
    vec![
        Block::Heading(format!("Size of blocks, {}", record.container.name())),
        Block::Table(table),
        Block::Text(format!("The files take {}.", files.join(", "))),
    ]
}
