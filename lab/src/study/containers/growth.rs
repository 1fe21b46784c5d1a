//! What the study prints of expanding disks and of the size of blocks.

use super::report::ratio_cell;
use crate::{
    measure::Ratio,
    result::{BlockSizeRecord, ExpandingRecord},
    table::{Align, Cell, Table, Tone, bytes, duration, grouped},
};
use std::fmt::Write as _;

/// Writes into empty disks; nothing where none were measured.
pub(super) fn expanding(records: &[ExpandingRecord], colour: bool) -> String {
    if records.is_empty() {
        return String::new();
    }
    let mut table = Table::new(&[
        ("disk", Align::Left),
        ("writes", Align::Left),
        ("full IOPS", Align::Right),
        ("empty IOPS", Align::Right),
        ("ratio", Align::Right),
        ("rounds", Align::Left),
        ("CPU ratio", Align::Right),
        ("flush, full", Align::Right),
        ("flush, empty", Align::Right),
        ("with flush", Align::Right),
    ]);
    for record in records {
        let [full, empty] = &record.result.cells[..] else { continue };
        let middle = |ratio: &Option<Ratio>| ratio.as_ref().map(Ratio::median);
        table.row(vec![
            Cell::new(record.target.clone()),
            Cell::new(format!("{} x {}", grouped(record.writes as f64), record.result.workload.name)),
            Cell::new(grouped(full.iops.median)),
            Cell::new(grouped(empty.iops.median)),
            ratio_cell(middle(&empty.iops_ratio)),
            Cell::toned(extremes(empty.iops_ratio.as_ref()), Tone::Faint),
            Cell::new(middle(&empty.cpu_ratio).map(|ratio| format!("{ratio:.2}")).unwrap_or_default()),
            Cell::new(duration(record.flush_full_ns.median)),
            Cell::new(duration(record.flush_empty_ns.median)),
            ratio_cell(Some(record.ratio_with_flush.median())),
        ]);
    }
    let depth = records[0].result.workload.queue_depth;
    let mut text = format!("\nWriting into an empty disk against a full one, queue depth {depth}\n\n");
    text.push_str(&table.render(colour));
    text.push_str("\n  ratio: of the empty disk to the full one in the same round; with flush: the same with the flush behind the writes in the time.\n");
    text.push_str("  paper: no figures; \"that gap may be widened if the VHD has to expand itself first\".\n");
    text
}

/// Full disks with other blocks.
pub(super) fn block_sizes(record: &BlockSizeRecord, colour: bool) -> String {
    let Some(first) = record.workloads.first() else { return String::new() };
    let has_paper = record.paper_ratios.iter().any(Option::is_some);
    let sizes: Vec<String> = record.block_bytes.iter().map(|size| bytes(*size)).collect();
    let usual = sizes.first().map_or("", String::as_str);
    let ratio_heads: Vec<[String; 2]> =
        sizes.iter().skip(1).map(|size| [format!("{size}, ratio"), "rounds".to_owned()]).collect();
    let base_head = format!("{usual} IOPS");
    let mut heads = vec![("workload", Align::Left), (base_head.as_str(), Align::Right)];
    for [ratio, rounds] in &ratio_heads {
        heads.extend([(ratio.as_str(), Align::Right), (rounds.as_str(), Align::Left)]);
    }
    if has_paper {
        heads.push(("paper", Align::Right));
    }
    let mut table = Table::new(&heads);
    for (result, paper) in record.workloads.iter().zip(&record.paper_ratios) {
        let mut row = vec![Cell::new(result.workload.name.clone())];
        row.extend(result.cells.first().map(|cell| Cell::new(grouped(cell.iops.median))));
        for cell in result.cells.iter().skip(1) {
            row.push(ratio_cell(cell.iops_ratio.as_ref().map(Ratio::median)));
            row.push(Cell::toned(extremes(cell.iops_ratio.as_ref()), Tone::Faint));
        }
        if has_paper {
            let text = paper.map_or_else(|| "-".into(), |ratio| format!("{ratio:.2}"));
            row.push(Cell::toned(text, Tone::Faint));
        }
        table.row(row);
    }
    let mut text = format!(
        "\n{}, full: size of blocks, against {usual}, queue depth {}\n\n{}\n",
        record.container.name(),
        first.workload.queue_depth,
        table.render(colour)
    );
    let files: Vec<String> = sizes
        .iter()
        .zip(&record.file_allocated_bytes)
        .map(|(size, taken)| format!("{size}: {}", bytes(*taken)))
        .collect();
    let _ = writeln!(text, "  the files take {}.", files.join("; "));
    if has_paper {
        text.push_str(
            "  paper: peak IOPS of 512 KiB on Windows Server 2008 against 2 MiB on R2; it changes block size and software together.\n",
        );
    }
    text
}

fn extremes(ratio: Option<&Ratio>) -> String {
    ratio.map(|ratio| format!("{:.2}..{:.2}", ratio.summary.min, ratio.summary.max)).unwrap_or_default()
}
