//! Computes the findings from the measured stages: the queue depth that each kind of load needs,
//! and the load on each device below.
//!
//! ```text
//!   depths ─▶ knee ─▶ load, by the first rule that gives one ─▶ target depth
//!                                                        └─▶ combinations ─▶ best ─▶ finding
//!   reads, writes ─▶ knee ─▶ point ─▶ finding
//! ```
//!
//! For small random I/O the paper takes the load where latency begins to grow faster than
//! throughput. The rule *efficient* (largest power) computes that load; the paper reads it off a
//! graph. For sequential I/O the paper calls latency "arguably less important", and takes the load
//! where more requests add no throughput: the rule *saturation*. This rule also gives the number of
//! agents. If a rule gives no load, the other rules are tried in turn. The finding names the rule.

use super::{Finding, OperatingPoint, Peak, QueueDepthResult, Rule, Settings, Stage, StageRecord, paper, plan};
use crate::sweep::{AMPLIFICATION, ArrayFigures, ArrayOptions, SweepCell, SweepRecord};
use diskwright_load::{figures::Figures, record::End};
use diskwright_stats::{
    knee::{Knee, Mark, MarkedPoint, Reason},
    numbers::{duration, figure, grouped},
    summary::median,
};

/// If the range of the rounds is above this share of their median, the verdict calls the depth
/// uncertain.
const FAR_APART: f64 = 0.2;
/// A throughput within this share of the largest counts as equal to it. Saturation is at 95 %.
const NEAR_THE_PEAK: f64 = 0.05;

/// The paper's finding for a kind of load, with figures computed like ours.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PaperFinding {
    /// The depth, the threads and the line of the paper's table.
    pub settled: paper::PaperPoint,
    /// Throughput in MB/s (10^6 bytes).
    pub mb_per_s: f64,
    /// The load on each of the paper's eight devices.
    pub array: ArrayFigures,
}

/// The paper's finding for a stage; `None` for the stages `Files` and `Agents`.
pub fn papers(stage: Stage) -> Option<PaperFinding> {
    let settled = paper::settled(stage)?;
    let (block_bytes, read_share) = match stage {
        Stage::Reads => (512 << 10, 1.0),
        Stage::Writes => (512 << 10, 0.0),
        _ => (8 << 10, 0.7),
    };
    let mb_per_s = settled.point.iops * f64::from(block_bytes) / 1e6;
    let array = paper::ARRAY.figures(read_share, settled.in_flight, settled.point.iops, mb_per_s);
    Some(PaperFinding { settled, mb_per_s, array })
}

/// The load of a knee that counts for a stage, and the rule that gave it, or why no rule gives one.
pub(super) fn chosen(stage: Stage, knee: &Knee) -> Result<(Rule, MarkedPoint), Reason> {
    let marks = if matches!(stage, Stage::Agents | Stage::Reads | Stage::Writes) {
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

/// The knee of a sweep with one axis; `None` before it is computed.
pub(super) fn knee_of(sweep: &SweepRecord) -> Option<&Knee> {
    sweep.knees.first().map(|row| &row.knee)
}

/// Total requests in flight for the combinations, from test 1: a total that all agents can share.
/// If test 1 has no result, the depth of the pre-test.
pub(super) fn target_depth(depths: &SweepRecord, settings: &Settings) -> u32 {
    let clients = settings.clients();
    let known = knee_of(depths).and_then(|knee| chosen(Stage::Depths, knee).ok());
    let each =
        known.map_or(f64::from(settings.threads * paper::PRE_TEST_DEPTH), |(_, point)| point.load / f64::from(clients));
    plan::divisible(each).saturating_mul(clients)
}

/// Number of files for the later stages. More than one only if one file is significantly slower.
pub(super) fn files(stage: &SweepRecord) -> u32 {
    let Some(best) = &stage.best else { return 1 };
    let one = stage.cells.iter().position(|cell| cell.files == 1);
    let significant = match (&best.rivals, one) {
        (Some(rivals), Some(one)) => !rivals.contains(&one),
        _ => false,
    };
    if significant { stage.cells[best.cell].files } else { 1 }
}

/// The findings of the stages, in their order.
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
) -> Option<OperatingPoint> {
    let Figures { iops, mb_per_s, mean_ns, p99_ns, cpu_ns_per_io, .. } = cell.measured.medians()?;
    let read_share = cell.measured.median(Figures::read_share)?;
    Some(OperatingPoint {
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
        measured_amplification: cell.measured.more(AMPLIFICATION).and_then(|rounds| median(&rounds)),
    })
}

/// The name of a stage's kind of load.
pub fn load_name(stage: Stage) -> &'static str {
    match stage {
        Stage::Reads => "512K sequential reads",
        Stage::Writes => "512K sequential writes",
        Stage::Files | Stage::Agents | Stage::Depths | Stage::Combinations => "random 8K (70 % read)",
    }
}

/// The verdict. Begins with how the measurement ended, if it is not complete.
pub(super) fn verdict(result: &QueueDepthResult) -> String {
    let mut text = match &result.head.end {
        End::Complete => String::new(),
        End::Stopped => "Partial: stopped before all cells were measured. ".into(),
        End::Failed { first, .. } if result.settings.is_fleet() => format!("Partial: {first}. "),
        End::Failed { first, errors } => format!("Requests failed ({errors}): {first}. "),
    };
    if result.findings.is_empty() {
        text.push_str("No queue depth can be given yet.");
        return text;
    }
    let mut parts: Vec<String> =
        result.findings.iter().map(|finding| clause(finding, result.settings.is_fleet())).collect();
    parts.extend(result.stage(Stage::Agents).and_then(|record| enough_agents(&record.sweep)));
    let papers: Vec<String> = result
        .findings
        .iter()
        .filter_map(|finding| Some(papers(finding.stage)?.settled.in_flight.to_string()))
        .collect();
    let found = format!("{}; the paper's eight SSDs needed {}.", parts.join("; "), and(&papers));
    let mut letters = found.chars();
    text.extend(letters.next().into_iter().flat_map(char::to_uppercase).chain(letters));
    text
}

/// How many agents are enough, each with the load of the pre-test; `None` if no rule gives a
/// number.
pub fn enough_agents(sweep: &SweepRecord) -> Option<String> {
    let row = sweep.knees.first()?;
    let (rule, point) = chosen(Stage::Agents, &row.knee).ok()?;
    let cell = sweep.cells.get(*row.cells.get(point.cell)?)?;
    let all = sweep.cells.iter().map(|cell| cell.files).max()?;
    let are = match rule {
        Rule::Saturation => "saturate the storage",
        Rule::Efficient => "are most efficient",
        Rule::Paper => "are enough by the paper's rule",
    };
    Some(format!("{} of {all} agents {are}, with {} x {} on each", cell.files, cell.threads, cell.queue_depth))
}

fn clause(finding: &Finding, is_fleet: bool) -> String {
    let load = load_name(finding.stage);
    let Some(found) = &finding.found else {
        let why = finding.why.as_ref().map_or_else(|| "not measured".into(), ToString::to_string);
        return format!("{load}: no queue depth can be given ({why})");
    };
    if finding.stage != Stage::Depths {
        let needs = match found.rule {
            Rule::Efficient => "are most efficient with",
            Rule::Saturation => "are saturated from",
            Rule::Paper => "need, by the paper's rule,",
        };
        let peak = found.peak.map_or_else(String::new, |peak| {
            format!("; the largest is {} MB/s with {}", figure(peak.mb_per_s), peak.in_flight)
        });
        let split =
            if is_fleet { format!(", {} on each of {} agents", found.queue_depth, found.files) } else { "".into() };
        return format!(
            "{load} {needs} {} in flight{split} ({} MB/s{peak}){}",
            found.in_flight,
            figure(found.mb_per_s),
            hedge(found)
        );
    }
    let files = match (is_fleet, found.files) {
        (true, agents) => format!("{agents} agents x "),
        (false, 1) => String::new(),
        (false, files) => format!("{files} files x "),
    };
    let as_good = match found.as_good {
        Some(0) | None => String::new(),
        Some(1) => ", one other split is as good".into(),
        Some(others) => format!(", {others} other splits are as good"),
    };
    format!(
        "{load} {} {} in flight, as {files}{} threads x {}{as_good}: {} IOPS at {}{}",
        match found.rule {
            Rule::Efficient => "is most efficient with",
            Rule::Saturation => "is saturated from",
            Rule::Paper => "needs, by the paper's rule,",
        },
        found.in_flight,
        found.threads,
        found.queue_depth,
        grouped(found.iops),
        duration(found.mean_ns),
        hedge(found)
    )
}

/// Says why the depth is uncertain: rounds that scatter, and a confidence interval of several
/// loads.
fn hedge(found: &OperatingPoint) -> String {
    let scatter =
        (found.scatter > FAR_APART).then(|| format!("its rounds differ by {} %", figure(found.scatter * 100.0)));
    let ends = found.interval.filter(|ends| scatter.is_some() && ends.low < ends.high);
    let interval = ends.map(|ends| format!("95 % confidence interval: {} to {} in flight", ends.low, ends.high));
    let why: Vec<String> = scatter.into_iter().chain(interval).collect();
    if why.is_empty() { String::new() } else { format!(", uncertain: {}", why.join(", ")) }
}

fn and(words: &[String]) -> String {
    match words {
        [] => String::new(),
        [one] => one.clone(),
        [rest @ .., last] => format!("{} and {last}", rest.join(", ")),
    }
}

/// A cell beside the paper's cell of the same load.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BesidePaper {
    /// Our IOPS relative to our first cell that the paper has too.
    pub ours: f64,
    /// The paper's IOPS relative to its first cell that we have too; `None` if the paper has no
    /// figure for this load.
    pub papers: Option<f64>,
    /// Our IOPS as a ratio to the paper's; `None` if the paper has no figure for this load.
    pub ratio: Option<f64>,
}

/// All cells of a stage beside the paper's. `None` for a cell without figures, and for all cells if
/// no load is in both.
pub fn beside(record: &StageRecord) -> Vec<Option<BesidePaper>> {
    let place = |cell: &SweepCell| -> Option<u64> {
        match record.stage {
            Stage::Files | Stage::Agents => None,
            // The paper's axis counts outstanding requests for each of eight threads.
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
            Some(BesidePaper {
                ours: ours / our_first,
                papers: papers.map(|papers| papers / papers_first),
                ratio: papers.map(|papers| ours / papers),
            })
        })
        .collect()
}
