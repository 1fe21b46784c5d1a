//! From workloads to a conclusion: how a file and the disks on it fare against the device over all
//! workloads together.
//!
//! Each workload counts once, by the median of its rounds' ratios, so a workload that scatters
//! counts no more than another. What is compared is the logarithm, so that twice and half lie
//! equally far from 1. Whether a ratio is chance is asked of Wilcoxon's signed ranks over the
//! workloads, corrected by Holm for the number of questions; with too few workloads for that number
//! no answer is possible ([`Design::fewest`]).

use super::{Figure, FileSystem, Measured, Pattern, RawAndFileResult, paper};
use diskwright_load::{record::End, warning::Warning};
use diskwright_stats::{
    inference::{self, Design, SIGNIFICANT},
    summary::Interval,
};

/// A throughput that is nearer to 1 than this is called the same, sure or not.
const ALIKE: f64 = 0.02;

/// Workloads that are concluded about together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// All of them.
    All,
    /// Random ones.
    Random,
    /// Sequential ones.
    Sequential,
}

impl Part {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::All, Self::Random, Self::Sequential];

    /// As shown to people.
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

/// One figure of one subject over several workloads, as a ratio to the device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Overall {
    /// Number of the subject; the device is 0 and has none.
    pub subject: usize,
    /// The workloads.
    pub part: Part,
    /// The figure.
    pub figure: Figure,
    /// Hodges and Lehmann's middle of the workloads' ratios.
    pub ratio: f64,
    /// 95 % interval, or of as much confidence as so few workloads allow.
    pub interval: Interval,
    /// Lowest of the workloads' ratios.
    pub min: f64,
    /// Highest.
    pub max: f64,
    /// How many workloads.
    pub workloads: usize,
    /// Of the rank test, corrected; only of all workloads, for random and sequential ones alone are
    /// too few in a quick study.
    pub p_corrected: Option<f64>,
}

impl Overall {
    /// Whether it differs from 1 beyond chance.
    pub fn differs(&self) -> bool {
        self.p_corrected.is_some_and(|p| p < SIGNIFICANT)
    }
}

/// Whether so many workloads can show a difference at all: the tests over all workloads are
/// corrected together. `all` is what [`overall`] found.
pub(crate) fn can_show(all: &[Overall], one: &Overall) -> bool {
    let tests = all.iter().filter(|overall| overall.p_corrected.is_some()).count();
    Design::Paired.can_show(one.workloads, one.workloads, tests)
}

/// Every subject, part and figure.
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
    // Each question that is asked makes every answer dearer, so only those about all workloads are.
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

/// The paper's ratio of its file to its device, over the workloads that were measured; none for
/// what it did not have.
pub fn papers(workloads: &[Measured<'_>], part: Part, figure: Figure) -> Option<f64> {
    let of_part = workloads.iter().map(|measured| measured.workload).filter(|workload| part.has(workload.pattern));
    let logarithms: Vec<f64> = of_part
        .filter_map(|workload| match figure {
            Figure::Throughput => paper::throughput_ratio(workload.pattern, workload.block_bytes),
            Figure::MachineCpu => Some(paper::cpu_ratio(workload.pattern)),
            Figure::Cpu => None,
        })
        .map(f64::ln)
        .collect();
    inference::hodges_lehmann(&logarithms).map(f64::exp)
}

/// Finds one of [`overall`].
pub fn find(all: &[Overall], subject: usize, part: Part, figure: Figure) -> Option<&Overall> {
    let is_it = |one: &&Overall| one.subject == subject && one.part == part && one.figure == figure;
    all.iter().find(is_it)
}

/// The conclusion in a sentence, after how it ended.
pub(super) fn verdict(result: &RawAndFileResult) -> String {
    let workloads = Measured::all(&result.cells);
    let all = overall(&workloads);
    let mut text = match &result.head.end {
        End::Complete => String::new(),
        End::Stopped => "Partial: it was stopped before all was measured. ".into(),
        End::Failed { first, errors } => format!("Requests failed ({errors}): {first}. "),
    };
    // Where others keep the machine busy, its CPU time is theirs as well.
    let is_busy = result.head.warnings.iter().any(|warning| matches!(warning, Warning::OtherLoad { .. }));
    let cpu = if is_busy { Figure::Cpu } else { Figure::MachineCpu };
    let whose = if is_busy { "the generator's CPU time" } else { "the CPU time" };
    let parts: Vec<String> = (1..result.subjects.len())
        .filter_map(|subject| {
            let throughput = find(&all, subject, Part::All, Figure::Throughput)?;
            let cost = find(&all, subject, Part::All, cpu)?;
            let name = the(&result.subjects[subject].name, result.test_bed.file_system);
            let verb = if subject == 1 { " gives" } else { "" };
            Some(format!("{name}{verb} {:.2} at {:.2}", throughput.ratio, cost.ratio))
        })
        .collect();
    if parts.is_empty() {
        text.push_str("Nothing can be concluded yet.");
        return text;
    }
    text.push_str(&format!(
        "Of the bare device's throughput (1.00) {} times {whose} for each request; {}; the paper's VMFS had {} at {}.",
        parts.join(", "),
        surely(result, &all),
        papers(&workloads, Part::All, Figure::Throughput).map_or_else(|| "-".into(), |ratio| format!("{ratio:.2}")),
        cpu_of_paper(&workloads),
    ));
    text
}

/// Which differences of throughput are none of chance.
fn surely(result: &RawAndFileResult, all: &[Overall]) -> String {
    let throughputs: Vec<&Overall> =
        (1..result.subjects.len()).filter_map(|subject| find(all, subject, Part::All, Figure::Throughput)).collect();
    if throughputs.iter().all(|one| !one.differs()) {
        return "no difference of throughput is seen beyond chance".into();
    }
    let slow: Vec<String> = throughputs
        .iter()
        .filter(|one| one.differs() && (one.ratio - 1.0).abs() >= ALIKE)
        .filter_map(|one| {
            let word = if one.ratio < 1.0 { "slower" } else { "faster" };
            Some(format!("{} is {word}", the(&result.subjects.get(one.subject)?.name, result.test_bed.file_system)))
        })
        .collect();
    if slow.is_empty() {
        return "differences of throughput beyond chance are below 2 %".into();
    }
    format!("beyond chance {}", slow.join(", "))
}

/// "the ext4 file", but "VHDX fixed".
fn the(name: &str, file_system: FileSystem) -> String {
    if is_file(name, file_system) { format!("the {name}") } else { name.to_owned() }
}

fn cpu_of_paper(workloads: &[Measured<'_>]) -> String {
    let of = |part| papers(workloads, part, Figure::MachineCpu).map(|ratio| format!("{ratio:.2}"));
    match (of(Part::Random), of(Part::Sequential)) {
        (Some(random), Some(sequential)) => format!("{random} (random) and {sequential} (sequential)"),
        (Some(only), None) | (None, Some(only)) => only,
        (None, None) => "-".into(),
    }
}

/// Whether a subject is the file of the file system, which the paper has, and no virtual disk on
/// it.
pub(crate) fn is_file(name: &str, file_system: FileSystem) -> bool {
    name.strip_prefix(file_system.name()).is_some_and(|rest| rest == " file")
}
