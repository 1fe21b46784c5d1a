//! What the study `zero-payload` prints: the verdict, the table, what `lab run` would have said.

use super::{PAPER_64K_READ_IOPS, Payload, SideRecord, TestRecord, ZeroPayloadResult};
use crate::table::{Align, Cell, Table, Tone, bytes, duration, figure, grouped, paint};
use std::fmt::Write as _;

/// A dynamic disk that is this much faster than the fixed one has not done the work.
const TOO_GOOD: f64 = 1.5;

/// The conclusion, and first of all whether it is of everything.
pub(super) fn verdict(tests: &[TestRecord], stopped: bool) -> String {
    let text = conclusion(tests);
    if stopped { format!("Stopped: this is what was measured until then. {text}") } else { text }
}

fn conclusion(tests: &[TestRecord]) -> String {
    let ends = |payload, figure: fn(&TestRecord) -> f64| {
        let of = tests.iter().filter(|test| test.payload == payload).map(figure);
        of.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)))
    };
    let ratio = |test: &TestRecord| test.ratio.median();
    let ((low, high), (real_low, real_high)) = (ends(Payload::Zeros, ratio), ends(Payload::Data, ratio));
    let (least, most) = ends(Payload::Zeros, |test| 100.0 * test.dynamic.never_reached.median);
    let share =
        if least.round() == most.round() { format!("{most:.0} %") } else { format!("{least:.0} to {most:.0} %") };
    let spread = |low: f64, high: f64| format!("{} to {}", times(low), times(high));
    if high < TOO_GOOD {
        return format!(
            "With zeros the dynamic disk reaches {} of the fixed one's IOPS, with real data {}; {share} of its requests for zeros never reached the store.",
            spread(low, high),
            spread(real_low, real_high)
        );
    }
    format!(
        "With zeros the dynamic disk seems {} times as fast as the fixed one, but {share} of its requests never reached the store; with real data it is {} times as fast. The first figures measure look-ups in a table, not storage: do not use them.",
        spread(low, high),
        spread(real_low, real_high)
    )
}

fn times(ratio: f64) -> String {
    if ratio < 10.0 { format!("{ratio:.2}") } else { format!("{ratio:.0}") }
}

/// The whole report as text. `colour` only for a terminal.
pub fn render(result: &ZeroPayloadResult, colour: bool) -> String {
    let mut text = format!("{}\n\n", result.verdict);
    let _ = writeln!(text, "  {}; {}", result.machine, result.place);
    let _ = writeln!(
        text,
        "  VHDX of {}, O_DIRECT, queue depth {}, {} rounds, cells of {}; the dynamic disk looks for zeros in what is written, as Hyper-V's does",
        bytes(result.size_bytes),
        super::QUEUE_DEPTH,
        result.rounds,
        duration(result.cell_ns as f64)
    );
    for (payload, head) in [
        (Payload::Zeros, "Zeros, on disks that were written with zeros: what SQLIO measured"),
        (Payload::Data, "Data that cannot be compressed, on disks full of it: what storage does"),
    ] {
        let _ = write!(text, "\n{head}\n\n");
        text.push_str(&table(result.tests.iter().filter(|test| test.payload == payload), colour));
    }
    let (dynamic, fixed) = PAPER_64K_READ_IOPS;
    let _ = write!(
        text,
        "\n  ratio: IOPS of the dynamic disk to the fixed one's in the same round, median, then lowest and highest. not stored: share of the\n  bytes that the kernel never saw this process move. paper: {} against {} IOPS, the only figures in its text.\n",
        grouped(dynamic),
        grouped(fixed)
    );
    text.push_str("\nWhat `lab run` says of these disks before it measures\n\n");
    for disk in &result.disks {
        let said = if disk.said.is_empty() {
            paint("nothing: it is full of data", Tone::Good, colour)
        } else {
            disk.said.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
        };
        let _ = writeln!(text, "  {} ({} in its file): {said}", disk.name, bytes(disk.file_allocated_bytes));
    }
    if !result.warnings.is_empty() {
        text.push_str("\nBefore you believe this\n\n");
    }
    for warning in &result.warnings {
        let _ = writeln!(text, "  {} {warning}", paint("!", Tone::Bad, colour));
    }
    text
}

fn table<'a>(tests: impl Iterator<Item = &'a TestRecord>, colour: bool) -> String {
    let mut table = Table::new(&[
        ("test", Align::Left),
        ("disk", Align::Left),
        ("IOPS", Align::Right),
        ("MB/s", Align::Right),
        ("mean µs", Align::Right),
        ("p99 µs", Align::Right),
        ("not stored", Align::Right),
        ("ratio", Align::Right),
        ("rounds", Align::Left),
        ("paper", Align::Right),
    ]);
    for test in tests {
        let tone = if test.ratio.median() > TOO_GOOD { Tone::Bad } else { Tone::Good };
        let is_in_paper = test.payload == Payload::Zeros && test.name == "64K random read";
        let paper = if is_in_paper { times(PAPER_64K_READ_IOPS.0 / PAPER_64K_READ_IOPS.1) } else { "-".into() };
        let rounds = format!("{}..{}", times(test.ratio.summary.min), times(test.ratio.summary.max));
        let mut row = side(&test.name, "dynamic", &test.dynamic);
        row.extend([
            Cell::toned(times(test.ratio.median()), tone),
            Cell::toned(rounds, Tone::Faint),
            Cell::toned(paper, Tone::Faint),
        ]);
        table.row(row);
        let mut row = side("", "fixed", &test.fixed);
        row.extend([Cell::new(""), Cell::new(""), Cell::new("")]);
        table.row(row);
    }
    table.render(colour)
}

fn side(name: &str, disk: &str, side: &SideRecord) -> Vec<Cell> {
    let not_stored = 100.0 * side.never_reached.median;
    let tone = if not_stored >= 1.0 { Tone::Bad } else { Tone::Good };
    vec![
        Cell::new(name),
        Cell::new(disk),
        Cell::new(grouped(side.iops.median)),
        Cell::new(figure(side.mb_per_s.median)),
        Cell::new(figure(side.latency_mean_ns.median / 1e3)),
        Cell::new(figure(side.latency_p99_ns.median / 1e3)),
        Cell::toned(format!("{not_stored:.0} %"), tone),
    ]
}
