//! What a sweep prints: the verdict, a table with the marked points, what could not be told,
//! reasons for doubt.

use super::{KneeRow, SweepCell, SweepRecord, conclude::load_axis};
use crate::{
    knee::Mark,
    record::End,
    table::{Align, Cell, Table, Tone, bytes, duration, figure, grouped, paint},
};
use std::fmt::Write as _;

/// The whole report. `colour` only for a terminal.
pub fn render(record: &SweepRecord, colour: bool) -> String {
    let mut text = format!("{}\n\n{}", record.verdict, conditions(record));
    if record.knees.is_empty() {
        text.push('\n');
        text.push_str(&table(record, &(0..record.cells.len()).collect::<Vec<_>>(), None, colour));
    }
    for row in &record.knees {
        text.push('\n');
        if !row.fixed.is_empty() {
            let _ = writeln!(text, "{}\n", super::plan::title(&row.fixed));
        }
        text.push_str(&table(record, &row.cells, Some(row), colour));
        text.push_str(&untold(row));
    }
    text.push_str(&legend(record));
    if !record.warnings.is_empty() {
        text.push_str("\nBefore you believe this\n\n");
        for warning in &record.warnings {
            let _ = writeln!(text, "  {} {warning}", paint("!", Tone::Bad, colour));
        }
    }
    match &record.end {
        End::Complete => {}
        End::Stopped => text.push_str("\nstopped before it was done; the same command goes on with it\n"),
        End::Failed { .. } => text.push_str("\nended because requests failed; what was measured before is kept\n"),
    }
    text
}

fn conditions(record: &SweepRecord) -> String {
    let targets: Vec<String> = record
        .targets
        .iter()
        .map(|target| format!("{} ({}, {})", target.name, target.kind, bytes(target.size_bytes)))
        .collect();
    let mut text = format!(
        "  {}\n  {}; {} cells, {} rounds\n",
        record.machine,
        targets.join(", "),
        record.cells.len(),
        record.options.rounds,
    );
    if let Some(load) = record.options.job.phases.first().and_then(|phase| phase.loads.first()) {
        let axes: Vec<String> = record.options.axes.iter().map(ToString::to_string).collect();
        let _ = writeln!(text, "  {}, with {}", load.title(), axes.join(" and "));
    }
    text
}

fn table(record: &SweepRecord, cells: &[usize], row: Option<&KneeRow>, colour: bool) -> String {
    let mut heads: Vec<(&str, Align)> =
        record.options.axes.iter().map(|axis| (axis.knob.name(), Align::Right)).collect();
    if record.options.total_depth.is_some() {
        heads.extend([("threads", Align::Right), ("depth", Align::Right)]);
    }
    heads.push(("in flight", Align::Right));
    let array = record.options.array.is_some();
    if array {
        heads.extend([("per device", Align::Right), ("IOPS/device", Align::Right), ("MB/s/device", Align::Right)]);
    }
    heads.extend([
        ("IOPS", Align::Right),
        ("rounds", Align::Left),
        ("MB/s", Align::Right),
        ("mean", Align::Right),
        ("p50", Align::Right),
        ("p99", Align::Right),
        ("CPU/IO", Align::Right),
        ("power", Align::Right),
        ("", Align::Left),
    ]);
    let power =
        |cell: &SweepCell| cell.median(|round| if round.mean_ns > 0.0 { round.iops / round.mean_ns } else { 0.0 });
    let most = cells.iter().filter_map(|index| power(&record.cells[*index])).fold(0.0, f64::max);
    let mut table = Table::new(&heads);
    for (at, index) in cells.iter().enumerate() {
        let cell = &record.cells[*index];
        let mut line: Vec<Cell> =
            cell.point.iter().map(|coordinate| Cell::new(coordinate.knob.show(coordinate.value))).collect();
        if record.options.total_depth.is_some() {
            line.extend([Cell::new(cell.threads.to_string()), Cell::new(cell.queue_depth.to_string())]);
        }
        line.push(Cell::new(cell.total_depth.to_string()));
        if array {
            let show = |value: Option<f64>| Cell::new(value.map_or_else(String::new, figure));
            line.extend([
                show(cell.array.map(|array| array.depth_per_device)),
                show(cell.array.map(|array| array.iops_per_device)),
                show(cell.array.map(|array| array.mb_per_s_per_device)),
            ]);
        }
        if cell.rounds.is_empty() {
            line.push(Cell::toned("not measured", Tone::Faint));
            table.row(line);
            continue;
        }
        let median = |metric: fn(&crate::figures::Figures) -> f64| cell.median(metric).unwrap_or(0.0);
        let least = cell.rounds.iter().map(|round| round.iops).fold(f64::INFINITY, f64::min);
        let greatest = cell.rounds.iter().map(|round| round.iops).fold(0.0, f64::max);
        let spread =
            if cell.rounds.len() > 1 { format!("{}..{}", grouped(least), grouped(greatest)) } else { String::new() };
        line.extend([
            Cell::new(grouped(median(|round| round.iops))),
            Cell::toned(spread, Tone::Faint),
            Cell::new(figure(median(|round| round.mb_per_s))),
            Cell::new(duration(median(|round| round.mean_ns))),
            Cell::new(duration(median(|round| round.p50_ns))),
            Cell::new(duration(median(|round| round.p99_ns))),
            Cell::new(duration(median(|round| round.cpu_ns_per_io))),
            Cell::new(format!("{:.0} %", power(cell).unwrap_or(0.0) / most.max(f64::MIN_POSITIVE) * 100.0)),
            Cell::toned(marks(record, *index, at, row), Tone::Good),
        ]);
        table.row(line);
    }
    table.render(colour)
}

/// The names of the points that cell `index` is; `at` is its place in `row`.
pub(crate) fn marks(record: &SweepRecord, index: usize, at: usize, row: Option<&KneeRow>) -> String {
    let mut names = Vec::new();
    if let Some(row) = row {
        let all = [
            ("efficient", Some(&row.knee.efficient)),
            ("saturation", Some(&row.knee.saturation)),
            ("limit", row.knee.limit.as_ref()),
            ("paper", Some(&row.knee.paper)),
        ];
        names.extend(
            all.into_iter()
                .filter(|(_, mark)| mark.and_then(Mark::found).is_some_and(|point| point.cell == at))
                .map(|(name, _)| name),
        );
    }
    if let Some(best) = &record.best {
        if best.cell == index {
            names.push("best");
        } else if best.rivals.as_ref().is_some_and(|rivals| rivals.contains(&index)) {
            names.push("as good");
        }
    }
    if names.is_empty() { String::new() } else { format!("<- {}", names.join(", ")) }
}

/// Each point with its interval, or why it cannot be told.
pub(crate) fn untold(row: &KneeRow) -> String {
    let mut text = String::new();
    let marks = [
        ("efficient", Some(&row.knee.efficient)),
        ("saturation", Some(&row.knee.saturation)),
        ("limit", row.knee.limit.as_ref()),
        ("paper", Some(&row.knee.paper)),
    ];
    for (name, mark) in marks {
        match mark {
            Some(Mark::Untold { why }) => {
                let _ = writeln!(text, "  {name:<10}  cannot be told: {why}");
            }
            Some(Mark::Found(point)) => {
                let interval = super::conclude::interval(point);
                let _ = writeln!(text, "  {name:<10}  {} in flight{interval}", point.load);
            }
            None => {}
        }
    }
    if text.is_empty() { text } else { format!("\n{text}") }
}

fn legend(record: &SweepRecord) -> String {
    let mut text =
        String::from("\n  figures are medians of the rounds; power: IOPS / mean latency, as a share of the best\n");
    if load_axis(record).is_some() {
        text.push_str(
            "  efficient: largest power; saturation: first at 95 % of the peak; paper: where latency begins to outpace throughput\n",
        );
    }
    if let (Some(array), Some(cell)) = (record.options.array, record.cells.iter().find_map(|cell| cell.array)) {
        let _ = writeln!(
            text,
            "  {} copies on {} devices: amplification {}; per device: in flight x amplification / devices",
            array.copies,
            array.devices,
            figure(cell.amplification)
        );
    }
    text
}
