//! What the study `raw-and-file` prints: the verdict, all workloads together, each workload,
//! reasons for doubt.

use super::{
    FileSystem, Halves, RawAndFileResult, SideRecord, WorkloadRecord,
    conclude::{self, Figure, Overall},
    paper,
};
use crate::{
    measure::Ratio,
    record::End,
    table::{Align, Cell, Table, Tone, bytes, duration, figure, grouped, paint},
};
use std::fmt::Write as _;

/// The whole report as text. `colour` only for a terminal.
pub fn render(result: &RawAndFileResult, colour: bool) -> String {
    let mut text = format!("{}\n\n{}", result.verdict, conditions(result));
    if !result.overall.is_empty() {
        let _ = write!(text, "\nAll workloads together, as ratios to the block device\n\n{}", overall(result, colour));
        text.push_str(
            "\n  ratio: Hodges and Lehmann's middle of the workloads' ratios, its 95 % interval, lowest and highest workload. Beyond chance: Wilcoxon's\n  \
             signed ranks over the workloads, corrected by Holm. The paper's: VMFS to RDM (P), its CPU cost by its own averages.\n",
        );
    }
    if !result.workloads.is_empty() {
        let _ = write!(text, "\nEach workload, 64 in flight\n\n{}", workloads(result, colour));
        text.push_str(
            "\n  medians of the rounds; ratios are to the block device in the same round. CPU/IO: CPU time for each request, of the whole machine as the\n  \
             paper has it, and of the generator alone. MHz/IOPS: of the whole machine, by the paper's formula, with the\n  \
             clock of the time-stamp counter.\n",
        );
    }
    if !result.warnings.is_empty() {
        text.push_str("\nBefore you believe this\n\n");
        for warning in &result.warnings {
            let _ = writeln!(text, "  {} {warning}", paint("!", Tone::Bad, colour));
        }
    }
    if result.end == End::Stopped {
        text.push_str("\nstopped before it was done; what is above are the workloads that had whole rounds\n");
    }
    text
}

fn conditions(result: &RawAndFileResult) -> String {
    let mut text = format!("  {}\n  {}\n", result.machine, ground(result));
    let windows: Vec<u64> = result.workloads.iter().map(|workload| workload.window_ns).collect();
    let window =
        windows.iter().min().map_or_else(String::new, |least| format!(", windows of {}", duration(*least as f64)));
    let _ = writeln!(
        text,
        "  disks of {}, full of data, the same range of each; O_DIRECT; {} workloads, {} rounds{window}",
        bytes(result.size_bytes),
        result.workloads.len(),
        result.rounds
    );
    if result.quick {
        text.push_str("  quick: 4K and 64K by five patterns; 8K, 16K and 32K are left out\n");
    }
    text
}

/// What the device was.
pub(crate) fn ground(result: &RawAndFileResult) -> String {
    let ground = &result.ground;
    let halves = match ground.halves {
        Halves::LoopsOverFile => format!(
            "loop devices over the halves of {} ({} on {})",
            ground.of, result.place.file_system, result.place.device
        ),
        Halves::Partitions => format!("partitions of {}", ground.of),
        Halves::LoopsOverDevice => format!("loop devices over the halves of {}, which takes no partitions", ground.of),
    };
    format!(
        "{halves}: {} bare, {} with {}",
        bytes(ground.bare_bytes),
        bytes(ground.file_system_bytes),
        ground.file_system
    )
}

fn overall(result: &RawAndFileResult, colour: bool) -> String {
    let mut table = Table::new(&[
        ("", Align::Left),
        ("workloads", Align::Left),
        ("figure", Align::Left),
        ("ratio", Align::Right),
        ("interval", Align::Left),
        ("workloads'", Align::Left),
        ("beyond chance", Align::Left),
        ("paper's", Align::Right),
    ]);
    let mut before = None;
    for one in &result.overall {
        let lead = (one.subject, one.part);
        let is_new = before.is_none_or(|(subject, _)| subject != one.subject);
        let is_new_part = before != Some(lead);
        before = Some(lead);
        let name = result.subjects.get(one.subject).map_or("", |subject| subject.name.as_str());
        let part = format!("{} ({})", one.part.name(), one.workloads);
        let papers = conclude::papers(&result.workloads, one.part, one.figure)
            .filter(|_| is_file(name, result.ground.file_system));
        table.row(vec![
            Cell::new(if is_new { name } else { "" }),
            Cell::new(if is_new_part { part } else { String::new() }),
            Cell::new(one.figure.name()),
            Cell::toned(format!("{:.2}", one.ratio), tone(result, one)),
            Cell::toned(format!("{:.2}..{:.2}", one.interval.low, one.interval.high), Tone::Faint),
            Cell::toned(format!("{:.2}..{:.2}", one.least, one.most), Tone::Faint),
            Cell::new(said(result, one)),
            Cell::toned(papers.map_or_else(String::new, |ratio| format!("{ratio:.2}")), Tone::Faint),
        ]);
    }
    table.render(colour)
}

/// The paper has a file of a file system, and no virtual disks on it.
pub(crate) fn is_file(name: &str, file_system: FileSystem) -> bool {
    name.strip_prefix(file_system.name()).is_some_and(|rest| rest == " file")
}

/// Whether a ratio is chance, in a word; nothing where nobody asked.
pub(crate) fn said(result: &RawAndFileResult, one: &Overall) -> &'static str {
    let worse = (one.figure == Figure::Throughput) == (one.ratio < 1.0);
    match (one.p_corrected, one.differs(), worse) {
        (None, ..) => "",
        (_, true, true) => "yes, worse",
        (_, true, false) => "yes, better",
        (_, false, _) if !conclude::can_show(result, one) => "too few to tell",
        (_, false, _) => "no",
    }
}

fn tone(result: &RawAndFileResult, one: &Overall) -> Tone {
    match said(result, one) {
        "yes, worse" => Tone::Bad,
        "yes, better" => Tone::Good,
        _ => Tone::Plain,
    }
}

fn workloads(result: &RawAndFileResult, colour: bool) -> String {
    let mut table = Table::new(&[
        ("workload", Align::Left),
        ("on", Align::Left),
        ("IOPS", Align::Right),
        ("MB/s", Align::Right),
        ("ratio", Align::Right),
        ("rounds", Align::Left),
        ("paper's", Align::Right),
        ("mean", Align::Right),
        ("p99", Align::Right),
        ("CPU/IO", Align::Right),
        ("ratio", Align::Right),
        ("paper's", Align::Right),
        ("generator's", Align::Right),
        ("ratio", Align::Right),
        ("MHz/IOPS", Align::Right),
    ]);
    for workload in &result.workloads {
        for (index, side) in workload.sides.iter().enumerate() {
            table.row(side_row(result, workload, index, side));
        }
    }
    table.render(colour)
}

fn side_row(result: &RawAndFileResult, workload: &WorkloadRecord, index: usize, side: &SideRecord) -> Vec<Cell> {
    let name = result.subjects.get(index).map_or("", |subject| subject.name.as_str());
    let in_paper = is_file(name, result.ground.file_system);
    // The device is the base, and 1.00 is what it has.
    let ratio = |ratio: Option<&Ratio>| match (index, ratio) {
        (0, _) => Cell::toned("1.00", Tone::Faint),
        (_, Some(ratio)) => Cell::new(format!("{:.2}", ratio.median())),
        (_, None) => Cell::new("-"),
    };
    let papers = |value: Option<f64>| {
        let text = value.filter(|_| in_paper).map_or_else(String::new, |value| format!("{value:.2}"));
        Cell::toned(text, Tone::Faint)
    };
    let spread = side
        .throughput_ratio
        .as_ref()
        .map_or_else(String::new, |ratio| format!("{:.2}..{:.2}", ratio.summary.min, ratio.summary.max));
    let machine_ns = side.machine_cpu_ns_per_io.median;
    vec![
        Cell::new(if index == 0 { workload.name() } else { String::new() }),
        Cell::new(name),
        Cell::new(grouped(side.iops.median)),
        Cell::new(figure(side.mb_per_s.median)),
        ratio(side.throughput_ratio.as_ref()),
        Cell::toned(spread, Tone::Faint),
        papers(paper::throughput_ratio(workload.pattern, workload.block_bytes)),
        Cell::new(duration(side.latency_mean_ns.median)),
        Cell::new(duration(side.latency_p99_ns.median)),
        Cell::new(duration(machine_ns)),
        ratio(side.machine_cpu_ratio.as_ref()),
        papers(Some(paper::cpu_ratio(workload.pattern))),
        Cell::new(duration(side.cpu_ns_per_io.median)),
        ratio(side.cpu_ratio.as_ref()),
        Cell::new(mhz_per_iops(machine_ns, result.tsc_hz).map_or_else(|| "-".into(), |mhz| format!("{mhz:.4}"))),
    ]
}

/// "Average CPU utilization x CPU rating in MHz x number of cores / number of I/O operations per
/// second": the machine's CPU seconds for each request, times its clock. `None` without a
/// time-stamp counter.
pub fn mhz_per_iops(machine_cpu_ns_per_io: f64, tsc_hz: f64) -> Option<f64> {
    (tsc_hz > 0.0).then_some(machine_cpu_ns_per_io / 1e9 * tsc_hz / 1e6)
}
