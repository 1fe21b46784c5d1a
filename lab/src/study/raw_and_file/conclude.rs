//! Statistics over all workloads: mappings and files compared to the block device.
//!
//! Each workload counts once, by the median of its rounds' ratios, so a workload that scatters
//! counts no more than another. The statistics use the logarithm of the ratio, so that 2 and 0.5
//! are equally far from 1. Wilcoxon's signed-rank test over the workloads tests each ratio, with
//! Holm's correction for the number of tests. Too few workloads cannot show a difference
//! ([`Design::fewest`]).

use super::{
    Figure, Measured, Pattern, RawAndFileResult, Storage,
    paper::{self, PaperStorage},
};
use diskwright_load::{record::End, warning::Warning};
use diskwright_stats::{
    inference::{self, Design, SIGNIFICANT},
    summary::{Interval, median},
};

/// A throughput ratio this near to 1 is reported as equal, even if the difference is significant.
const ALIKE: f64 = 0.02;

/// A group of workloads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// All workloads.
    All,
    /// Random workloads.
    Random,
    /// Sequential workloads.
    Sequential,
}

impl Part {
    /// All parts, the whole first.
    pub const ALL: [Self; 3] = [Self::All, Self::Random, Self::Sequential];

    /// Name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::All => "all",
            Self::Random => "random",
            Self::Sequential => "sequential",
        }
    }

    fn has(self, pattern: Pattern) -> bool {
        match self {
            Self::All => true,
            Self::Random => pattern.is_random(),
            Self::Sequential => !pattern.is_random(),
        }
    }
}

/// One figure of one subject over a group of workloads, as a ratio to the block device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Overall {
    /// Index of the subject, from 1; the block device is 0.
    pub subject: usize,
    /// The group of workloads.
    pub part: Part,
    /// The compared figure.
    pub figure: Figure,
    /// Hodges-Lehmann estimate over the workloads' ratios.
    pub ratio: f64,
    /// 95 % confidence interval; less confidence if the workloads are too few for 95 %.
    pub interval: Interval,
    /// Smallest of the workloads' ratios.
    pub min: f64,
    /// Largest of the workloads' ratios.
    pub max: f64,
    /// Number of workloads.
    pub workloads: usize,
    /// p value of the signed-rank test with Holm's correction. Only for [`Part::All`], because the
    /// parts alone have too few workloads in a quick study.
    pub p_corrected: Option<f64>,
}

impl Overall {
    /// Whether the ratio differs significantly from 1.
    pub fn differs(&self) -> bool {
        self.p_corrected.is_some_and(|p| p < SIGNIFICANT)
    }
}

/// Whether this many workloads can show a difference. All tests in `all` are corrected together.
pub(crate) fn can_show(all: &[Overall], one: &Overall) -> bool {
    let tests = all.iter().filter(|overall| overall.p_corrected.is_some()).count();
    Design::Paired.can_show(one.workloads, one.workloads, tests)
}

/// The statistics of every subject, part and figure.
pub fn overall(workloads: &[Measured<'_>]) -> Vec<Overall> {
    let subjects = workloads.iter().map(|workload| workload.loads.cells.len()).min().unwrap_or(0);
    let mut found = Vec::new();
    for subject in 1..subjects {
        for part in Part::ALL {
            for figure in Figure::ALL {
                found.extend(one(workloads, subject, part, figure));
            }
        }
    }
    // Holm's correction grows with the number of tests, so only the ratios over all workloads are
    // tested.
    let asked: Vec<f64> = found.iter().filter_map(|overall| overall.p_corrected).collect();
    let answers = inference::holm(&asked);
    found
        .iter_mut()
        .filter_map(|overall| overall.p_corrected.as_mut())
        .zip(answers)
        .for_each(|(p, answer)| *p = answer);
    found
}

fn one(workloads: &[Measured<'_>], subject: usize, part: Part, figure: Figure) -> Option<Overall> {
    let of_part = workloads.iter().filter(|measured| part.has(measured.workload.pattern));
    let ratios = of_part.filter_map(|measured| Some(measured.ratio(subject, figure)?.median()));
    let logarithms: Vec<f64> = ratios.filter(|ratio| *ratio > 0.0 && ratio.is_finite()).map(f64::ln).collect();
    let shift = inference::paired_shift(&logarithms, 0.95)?;
    Some(Overall {
        subject,
        part,
        figure,
        ratio: shift.estimate.exp(),
        interval: Interval { low: shift.interval.low.exp(), high: shift.interval.high.exp() },
        min: logarithms.iter().copied().fold(f64::INFINITY, f64::min).exp(),
        max: logarithms.iter().copied().fold(f64::NEG_INFINITY, f64::max).exp(),
        workloads: logarithms.len(),
        p_corrected: (part == Part::All)
            .then(|| inference::wilcoxon_signed_rank(&logarithms))
            .flatten()
            .map(|test| test.p),
    })
}

/// The paper's ratio of this storage to RDM (P), over the measured workloads; `None` if the paper
/// has no figure for any of them.
pub fn papers(storage: PaperStorage, workloads: &[Measured<'_>], part: Part, figure: Figure) -> Option<f64> {
    let of_part = workloads.iter().map(|measured| measured.workload).filter(|workload| part.has(workload.pattern));
    let logarithms: Vec<f64> = of_part
        .filter_map(|workload| match figure {
            Figure::Throughput => paper::throughput_ratio(storage, workload.pattern, workload.block_bytes),
            Figure::MachineCpu => paper::cpu_ratio(storage, workload.pattern),
            Figure::Cpu => None,
        })
        .map(f64::ln)
        .collect();
    inference::hodges_lehmann(&logarithms).map(f64::exp)
}

/// Throughput of first writes as a ratio to the device's: the median over the workloads' medians.
/// `None` if none was measured.
pub fn first_writes(first: &[Measured<'_>], subject: usize) -> Option<f64> {
    let ratios: Vec<f64> = first.iter().filter_map(|measured| Some(measured.first_ratio(subject)?.median())).collect();
    median(&ratios)
}

/// The entry of [`overall`] for these three.
pub fn find(all: &[Overall], subject: usize, part: Part, figure: Figure) -> Option<&Overall> {
    let is_it = |one: &&Overall| one.subject == subject && one.part == part && one.figure == figure;
    all.iter().find(is_it)
}

/// The verdict. Begins with how the measurement ended, if it is not complete.
pub(super) fn verdict(result: &RawAndFileResult) -> String {
    let workloads = Measured::all(&result.cells);
    let all = overall(&workloads);
    let mut text = match &result.head.end {
        End::Complete => String::new(),
        End::Stopped => "Partial: stopped before all cells were measured. ".into(),
        End::Failed { first, errors } => format!("Requests failed ({errors}): {first}. "),
    };
    // The machine's CPU time includes other programs. If they keep it busy, the generator's is
    // used.
    let is_busy = result.head.warnings.iter().any(|warning| matches!(warning, Warning::OtherLoad { .. }));
    let cpu = if is_busy { Figure::Cpu } else { Figure::MachineCpu };
    let whose = if is_busy { "the load generator's CPU time" } else { "the CPU time" };
    let parts: Vec<String> = (1..result.subjects.len())
        .filter_map(|subject| {
            let throughput = find(&all, subject, Part::All, Figure::Throughput)?;
            let cost = find(&all, subject, Part::All, cpu)?;
            let name = &result.subjects[subject].name;
            let verb = if subject == 1 { " reaches" } else { "" };
            Some(format!("{name}{verb} {:.2} with {:.2}", throughput.ratio, cost.ratio))
        })
        .collect();
    if parts.is_empty() {
        text.push_str("No workload has been measured yet.");
        return text;
    }
    text.push_str(&format!(
        "Relative to the bare device (1.00), throughput with CPU time: {} times {whose} per request; {}; the paper's VMFS had {} with {}.",
        parts.join("; "),
        significant(result, &all),
        papers(PaperStorage::Vmfs, &workloads, Part::All, Figure::Throughput)
            .map_or_else(|| "-".into(), |ratio| format!("{ratio:.2}")),
        cpu_of_paper(&workloads),
    ));
    let first = Measured::first(&result.cells);
    let files: Vec<String> = (1..result.subjects.len())
        .filter(|&subject| Storage::from_name(&result.subjects[subject].name).is_some_and(Storage::is_file))
        .filter_map(|subject| Some(format!("{} {:.2}", result.subjects[subject].name, first_writes(&first, subject)?)))
        .collect();
    if !files.is_empty() {
        text.push_str(&format!(" First writes, with the flush: {} times the device.", files.join("; ")));
    }
    text
}

/// Names the significant differences in throughput.
fn significant(result: &RawAndFileResult, all: &[Overall]) -> String {
    let throughputs: Vec<&Overall> =
        (1..result.subjects.len()).filter_map(|subject| find(all, subject, Part::All, Figure::Throughput)).collect();
    if throughputs.iter().all(|one| !one.differs()) {
        return "no difference in throughput is significant".into();
    }
    let slow: Vec<String> = throughputs
        .iter()
        .filter(|one| one.differs() && (one.ratio - 1.0).abs() >= ALIKE)
        .filter_map(|one| {
            let word = if one.ratio < 1.0 { "slower" } else { "faster" };
            Some(format!("{} is {word}", result.subjects.get(one.subject)?.name))
        })
        .collect();
    if slow.is_empty() {
        return "the significant differences in throughput are below 2 %".into();
    }
    format!("significantly, {}", slow.join("; "))
}

fn cpu_of_paper(workloads: &[Measured<'_>]) -> String {
    let of = |part| papers(PaperStorage::Vmfs, workloads, part, Figure::MachineCpu).map(|ratio| format!("{ratio:.2}"));
    match (of(Part::Random), of(Part::Sequential)) {
        (Some(random), Some(sequential)) => format!("{random} (random) and {sequential} (sequential)"),
        (Some(only), None) | (None, Some(only)) => only,
        (None, None) => "-".into(),
    }
}
