//! From the measured stages to the findings: how much load is enough, for each kind of load, and
//! what that asks of a device.
//!
//! ```text
//!   depths ─▶ knee ─▶ point, by the first rule that gives one ─▶ target depth
//!                                                        └─▶ combinations ─▶ best ─▶ finding
//!   reads, writes ─▶ knee ─▶ point ─▶ finding
//! ```
//!
//! For small random I/O the paper looks where latency begins to outpace throughput; that is what
//! *efficient* computes, and the paper's own rule reads off a graph. For sequential I/O latency is
//! "arguably less important", and the paper looks where more stops to bring more: *saturation*.
//! Where one cannot be told the others are asked in turn, and the finding says which it was.

use super::{Finding, Found, Peak, QueueDepthResult, Rule, Stage, StageRecord, paper, plan};
use crate::sweep::{ArrayFigures, ArrayOptions, SweepCell, SweepRecord};
use diskwright_load::{figures::Figures, record::End};
use diskwright_stats::{
    knee::{Knee, Mark, MarkedPoint, Reason},
    numbers::{duration, figure, grouped},
};

/// Rounds that lie further apart than this, as a share of their median, leave a depth unsure.
const FAR_APART: f64 = 0.2;
/// A throughput within this share of the most is not told to be below it: saturation is at 95 %.
const NEAR_THE_PEAK: f64 = 0.05;

/// What the paper settled at for a kind of load, computed like our figures.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Papers {
    /// The line of its table.
    pub settled: paper::Settled,
    /// Millions of bytes a second.
    pub mb_per_s: f64,
    /// What it asked of each of its eight devices.
    pub array: ArrayFigures,
}

/// The paper's finding beside ours.
pub fn papers(stage: Stage) -> Option<Papers> {
    let settled = paper::settled(stage)?;
    let (block_bytes, read_share) = match stage {
        Stage::Reads => (512 << 10, 1.0),
        Stage::Writes => (512 << 10, 0.0),
        _ => (8 << 10, 0.7),
    };
    let mb_per_s = settled.point.iops * f64::from(block_bytes) / 1e6;
    let array = paper::ARRAY.figures(read_share, settled.in_flight, settled.point.iops, mb_per_s);
    Some(Papers { settled, mb_per_s, array })
}

/// The point of a knee that counts for a stage, or why none does.
pub(super) fn chosen(stage: Stage, knee: &Knee) -> Result<(Rule, MarkedPoint), Reason> {
    let marks = if matches!(stage, Stage::Reads | Stage::Writes) {
        [(Rule::Saturation, &knee.saturation), (Rule::Efficient, &knee.efficient), (Rule::Paper, &knee.paper)]
    } else {
        [(Rule::Efficient, &knee.efficient), (Rule::Paper, &knee.paper), (Rule::Saturation, &knee.saturation)]
    };
    let found = marks.iter().find_map(|(rule, mark)| Some((*rule, *mark.found()?)));
    found.ok_or_else(|| match marks[0].1 {
        Mark::Undetermined { why } => why.clone(),
        Mark::Found(_) => Reason::Flat,
    })
}

/// The only line of a stage in which one load varies.
pub(super) fn knee_of(sweep: &SweepRecord) -> Option<&Knee> {
    sweep.knees.first().map(|row| &row.knee)
}

/// Requests in flight that the combinations are to have: what test 1 found, or the pre-test's where
/// it found nothing.
pub(super) fn target_depth(depths: &SweepRecord, threads: u32) -> u32 {
    let told = knee_of(depths).and_then(|knee| chosen(Stage::Depths, knee).ok());
    let load = told.map_or(f64::from(threads * paper::PRE_TEST_DEPTH), |(_, point)| point.load);
    plan::divisible(load)
}

/// How many files the later stages take: more than one only where one is slower beyond chance.
pub(super) fn files(stage: &SweepRecord) -> u32 {
    let Some(best) = &stage.best else { return 1 };
    let one = stage.cells.iter().position(|cell| cell.files == 1);
    let surely = match (&best.rivals, one) {
        (Some(rivals), Some(one)) => !rivals.contains(&one),
        _ => false,
    };
    if surely { stage.cells[best.cell].files } else { 1 }
}

/// What the stages say, in their order.
pub(super) fn findings(stages: &[StageRecord], array: Option<ArrayOptions>) -> Vec<Finding> {
    let find = |wanted: Stage| stages.iter().find(|record| record.stage == wanted).map(|record| &record.sweep);
    let mut findings = Vec::new();
    for stage in [Stage::Depths, Stage::Reads, Stage::Writes] {
        let Some(sweep) = find(stage) else { continue };
        let Some(row) = sweep.knees.first() else { continue };
        let finding = match chosen(stage, &row.knee) {
            Err(why) => Finding { stage, found: None, why: Some(why) },
            Ok((rule, point)) => {
                let mut cell = row.cells.get(point.cell).and_then(|index| sweep.cells.get(*index));
                let mut as_good = None;
                if stage == Stage::Depths
                    && let Some(combinations) = find(Stage::Combinations)
                    && let Some(best) = &combinations.best
                {
                    cell = combinations.cells.get(best.cell);
                    as_good = best.rivals.as_ref().map(Vec::len);
                }
                Finding {
                    stage,
                    found: cell.and_then(|cell| found(rule, &point, cell, as_good, array, peak(&sweep.cells))),
                    why: None,
                }
            }
        };
        findings.push(finding);
    }
    findings
}

/// The cell with the most throughput.
fn peak(cells: &[SweepCell]) -> Option<Peak> {
    let measured = cells.iter().filter_map(|cell| {
        Some(Peak { in_flight: cell.measured.in_flight, mb_per_s: cell.measured.median(|round| round.mb_per_s)? })
    });
    measured.max_by(|a, b| a.mb_per_s.total_cmp(&b.mb_per_s))
}

fn found(
    rule: Rule,
    point: &MarkedPoint,
    cell: &SweepCell,
    as_good: Option<usize>,
    array: Option<ArrayOptions>,
    peak: Option<Peak>,
) -> Option<Found> {
    let Figures { iops, mb_per_s, mean_ns, p99_ns, cpu_ns_per_io, .. } = cell.measured.medians()?;
    let read_share = cell.measured.median(Figures::read_share)?;
    Some(Found {
        rule,
        chosen: point.load,
        interval: point.interval,
        in_flight: cell.measured.in_flight,
        files: cell.files,
        threads: cell.threads,
        queue_depth: cell.queue_depth,
        as_good,
        iops,
        mb_per_s,
        mean_ns,
        p99_ns,
        cpu_ns_per_io,
        scatter: cell.measured.summary_of(|round| round.mb_per_s)?.spread(),
        peak: peak.filter(|peak| peak.mb_per_s > mb_per_s * (1.0 + NEAR_THE_PEAK)),
        array: array.unwrap_or(ArrayOptions { copies: 1, devices: 1 }).figures(
            read_share,
            cell.measured.in_flight,
            iops,
            mb_per_s,
        ),
    })
}

/// A stage's kind of load in words.
pub fn load_name(stage: Stage) -> &'static str {
    match stage {
        Stage::Reads => "512K sequential reads",
        Stage::Writes => "512K sequential writes",
        Stage::Files | Stage::Depths | Stage::Combinations => "random 8K (70 % read)",
    }
}

/// The conclusion in a sentence, after how it ended.
pub(super) fn verdict(result: &QueueDepthResult) -> String {
    let mut text = match &result.head.end {
        End::Complete => String::new(),
        End::Stopped => "Partial: it was stopped before all was measured. ".into(),
        End::Failed { first, errors } => format!("Requests failed ({errors}): {first}. "),
    };
    if result.findings.is_empty() {
        text.push_str("No depth can be named yet.");
        return text;
    }
    let parts: Vec<String> = result.findings.iter().map(clause).collect();
    text.push_str(&parts.join("; "));
    let papers: Vec<String> = result
        .findings
        .iter()
        .filter_map(|finding| Some(papers(finding.stage)?.settled.in_flight.to_string()))
        .collect();
    text.push_str(&format!("; the paper's eight SSDs wanted {}.", and(&papers)));
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}

fn clause(finding: &Finding) -> String {
    let load = load_name(finding.stage);
    let Some(found) = &finding.found else {
        let why = finding.why.as_ref().map_or_else(|| "not measured".into(), ToString::to_string);
        return format!("for {load} no depth can be named ({why})");
    };
    if finding.stage != Stage::Depths {
        let said = match found.rule {
            Rule::Efficient => "are most efficient with",
            Rule::Saturation => "are saturated from",
            Rule::Paper => "by the paper's rule need",
        };
        let peak = found.peak.map_or_else(String::new, |peak| {
            format!("; the most is {} MB/s with {}", figure(peak.mb_per_s), peak.in_flight)
        });
        return format!(
            "{load} {said} {} in flight ({} MB/s{peak}){}",
            found.in_flight,
            figure(found.mb_per_s),
            hedge(found)
        );
    }
    let files = if found.files > 1 { format!("{} files x ", found.files) } else { String::new() };
    let as_good = match found.as_good {
        Some(0) | None => String::new(),
        Some(1) => ", one other split as good".into(),
        Some(others) => format!(", {others} other splits as good"),
    };
    format!(
        "{load} {} {} in flight, as {files}{} threads x {}{as_good}: {} IOPS at {}{}",
        match found.rule {
            Rule::Efficient => "is most efficient with",
            Rule::Saturation => "is saturated from",
            Rule::Paper => "by the paper's rule needs",
        },
        found.in_flight,
        found.threads,
        found.queue_depth,
        grouped(found.iops),
        duration(found.mean_ns),
        hedge(found)
    )
}

/// What makes the depth unsure: rounds that lie far apart, and an interval of more than one load.
fn hedge(found: &Found) -> String {
    let scatter =
        (found.scatter > FAR_APART).then(|| format!("its rounds lie {} % apart", figure(found.scatter * 100.0)));
    let ends = found.interval.filter(|ends| scatter.is_some() && ends.low < ends.high);
    let interval = ends.map(|ends| format!("chance allows {} to {} in flight", ends.low, ends.high));
    let why: Vec<String> = scatter.into_iter().chain(interval).collect();
    if why.is_empty() { String::new() } else { format!(", unsure: {}", why.join(", ")) }
}

fn and(words: &[String]) -> String {
    match words {
        [] => String::new(),
        [one] => one.clone(),
        [rest @ .., last] => format!("{} and {last}", rest.join(", ")),
    }
}

/// A cell beside the paper's at the same place: how much each has grown from the first place that
/// both have, and ours as a ratio to the paper's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Beside {
    /// Our IOPS to our first.
    pub ours: f64,
    /// The paper's IOPS to its first; none where the paper has no figure for this place.
    pub papers: Option<f64>,
    /// Our IOPS to the paper's.
    pub ratio: Option<f64>,
}

/// All cells of a stage beside the paper's.
pub fn beside(record: &StageRecord) -> Vec<Option<Beside>> {
    let place = |cell: &SweepCell| -> Option<u64> {
        match record.stage {
            Stage::Files => None,
            // Its axis stands for eight threads.
            Stage::Depths => {
                let threads = u64::from(paper::THREADS);
                cell.measured.in_flight.is_multiple_of(threads).then(|| cell.measured.in_flight / threads)
            }
            Stage::Combinations => Some(u64::from(cell.threads) * u64::from(cell.files)),
            Stage::Reads | Stage::Writes => Some(cell.measured.in_flight),
        }
    };
    let pairs: Vec<Option<(f64, Option<f64>)>> = record
        .sweep
        .cells
        .iter()
        .map(|cell| {
            let ours = cell.measured.median(|round| round.iops).filter(|iops| *iops > 0.0)?;
            let papers = place(cell).and_then(|place| paper::at(record.stage, place)).map(|point| point.iops);
            Some((ours, papers))
        })
        .collect();
    let first = pairs.iter().flatten().find_map(|(ours, papers)| Some((*ours, (*papers)?)));
    pairs
        .iter()
        .map(|pair| {
            let ((ours, papers), (our_first, papers_first)) = ((*pair)?, first?);
            Some(Beside {
                ours: ours / our_first,
                papers: papers.map(|papers| papers / papers_first),
                ratio: papers.map(|papers| ours / papers),
            })
        })
        .collect()
}
