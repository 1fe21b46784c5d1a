//! Compares sides: rounds to changes with their significance. Pure computation.
//!
//! The statistics use the logarithm of a figure, so a shift is a ratio. Interleaved rounds are
//! compared in pairs by Wilcoxon's signed-rank test, others by the Mann-Whitney test. A single run
//! on each side is cut into stretches. These show the scatter within a run but not from run to run,
//! so a warning is added.
//!
//! MB/s is left out if all requests have one size: it repeats the IOPS, and Holm's correction grows
//! with the number of tests.

use super::{ComparisonRecord, Conclusion, FailIf, FigureChange, Group, Side, fail::UnjudgedCondition, verdict};
use diskwright_load::{
    figures::{Figures, Metric},
    record::{End, Head},
    warning::Warning,
};
use diskwright_stats::{
    inference::{self, Design, RankTest, SIGNIFICANT, Shift},
    summary::{Interval, median},
};

/// Options of a comparison.
#[derive(Debug, Clone)]
pub struct JudgeOptions {
    /// The figures to compare; empty for all.
    pub metrics: Vec<Metric>,
    /// Confidence level of the intervals, for example 0.95.
    pub confidence: f64,
    /// Whether round n of each side was interleaved with round n of the others.
    pub paired: bool,
    /// Conditions under which the comparison fails.
    pub fail_if: Vec<FailIf>,
}

impl Default for JudgeOptions {
    fn default() -> Self {
        Self { metrics: Vec::new(), confidence: 0.95, paired: false, fail_if: Vec::new() }
    }
}

/// Compares each side with the first. `head` is the comparison's head without its verdict.
pub fn judge(head: Head, sides: Vec<Side>, options: &JudgeOptions) -> ComparisonRecord {
    let mut record = ComparisonRecord {
        head: Head { end: End::Complete, ..head },
        paired: options.paired,
        overall: Vec::new(),
        comparisons: Vec::new(),
        failed: Vec::new(),
        unjudged: Vec::new(),
        undecided: false,
        sides,
    };
    let mut within = false;
    if let Some((base, others)) = record.sides.split_first() {
        for (index, side) in others.iter().enumerate() {
            let matched = matched(base, side, &mut record.head.warnings);
            for metric in metrics(options, &matched) {
                let mut found = Vec::new();
                for (base_group, group) in &matched {
                    let (base_rounds, rounds, stretched) = rounds_of(base_group, group, options.paired);
                    within |= stretched;
                    let values = (values(base_rounds, metric), values(rounds, metric));
                    let (Some(base), Some(ours)) = values else { continue };
                    if let Some((test, change)) = test(&base, &ours, options) {
                        found.push(comparison(index + 1, group.name(), metric, (&base, &ours), test, change, options));
                    }
                }
                record.comparisons.extend(found);
            }
            circumstances(base, side, &mut record.head.warnings);
        }
    }
    if within {
        record.head.warnings.push(Warning::WithinRun);
    }
    record.overall = overall(&record.comparisons, options);
    // Overall, each group gives a pair of medians, even if its rounds are not paired.
    correct(&mut record.overall, Design::Paired);
    let design = record.design();
    correct(&mut record.comparisons, design);
    record.failed = options.fail_if.iter().flat_map(|condition| condition.holding(&record)).collect();
    let unjudged: Vec<UnjudgedCondition> =
        options.fail_if.iter().filter_map(|condition| condition.unjudged(&record)).collect();
    record.undecided = unjudged.iter().any(|condition| condition.undecided);
    record.unjudged = unjudged.into_iter().map(|condition| condition.why).collect();
    record.head.verdict = verdict::verdict(&record);
    record
}

/// Pairs of groups with the same name. Two single groups are paired whatever their names.
fn matched<'a>(base: &'a Side, side: &'a Side, warnings: &mut Vec<Warning>) -> Vec<(&'a Group, &'a Group)> {
    let pairs: Vec<(&Group, &Group)> = match (&base.groups[..], &side.groups[..]) {
        ([one], [other]) => vec![(one, other)],
        (groups, others) => groups
            .iter()
            .filter_map(|group| Some((group, others.iter().find(|other| other.name() == group.name())?)))
            .collect(),
    };
    for (of, there, absent) in [(base, side, false), (side, base, true)] {
        let taken =
            |group: &Group| pairs.iter().any(|(base, ours)| std::ptr::eq(if absent { *ours } else { *base }, group));
        let alone: Vec<&str> = of.groups.iter().filter(|group| !taken(group)).map(|group| group.name()).collect();
        if let Some(first) = alone.first() {
            let more = if alone.len() > 1 { format!(" and {} more", alone.len() - 1) } else { String::new() };
            warnings.push(Warning::LeftOut {
                what: format!("{first}{more} of {}", of.name),
                why: format!("{} has no measurement of this name", there.name),
            });
        }
    }
    if let Some((one, other)) = pairs.iter().find(|(one, other)| one.cell.load != other.cell.load) {
        warnings.push(Warning::NotAlike {
            what: "workload".into(),
            first: format!("{}: {}", base.name, one.cell.load),
            second: format!("{}: {}", side.name, other.cell.load),
        });
    }
    pairs
}

fn circumstances(base: &Side, side: &Side, warnings: &mut Vec<Warning>) {
    let (ours, theirs) = (&base.circumstances, &side.circumstances);
    for (what, first, second) in [
        ("machine", &ours.machine, &theirs.machine),
        ("cache mode", &ours.cache, &theirs.cache),
        ("version of Diskwright", &ours.version, &theirs.version),
    ] {
        if first != second {
            warnings.push(Warning::NotAlike {
                what: what.into(),
                first: format!("{}: {first}", base.name),
                second: format!("{}: {second}", side.name),
            });
        }
    }
    for side in [base, side] {
        if side.circumstances.partial {
            warnings.push(Warning::Partial { what: side.name.clone() });
        }
        let grave =
            side.circumstances.warnings.iter().filter(|warning| warning.voids() || **warning == Warning::DebugBuild);
        for warning in grave {
            let reported = Warning::OfSide { side: side.name.clone(), warning: warning.to_string() };
            if !warnings.contains(&reported) {
                warnings.push(reported);
            }
        }
    }
}

/// The figures to compare; without MB/s if it only repeats the IOPS.
fn metrics(options: &JudgeOptions, groups: &[(&Group, &Group)]) -> Vec<Metric> {
    if !options.metrics.is_empty() {
        return options.metrics.clone();
    }
    let sizes = |groups: &(&Group, &Group)| {
        let of = |group: &Group| -> Vec<f64> {
            group.cell.rounds.iter().filter(|round| round.iops > 0.0).map(|round| round.mb_per_s / round.iops).collect()
        };
        [of(groups.0), of(groups.1)].concat()
    };
    let alike = groups.iter().all(|group| {
        let sizes = sizes(group);
        sizes.iter().all(|size| (size - sizes[0]).abs() <= sizes[0] * 1e-3)
    });
    // A figure of a condition is always compared.
    let is_asked = |metric: Metric| options.fail_if.iter().any(|condition| condition.metric == metric);
    Metric::ALL.into_iter().filter(|&metric| !(alike && metric == Metric::MbPerS) || is_asked(metric)).collect()
}

/// The rounds to compare, and whether they are stretches of single runs.
fn rounds_of<'a>(base: &'a Group, ours: &'a Group, paired: bool) -> (&'a [Figures], &'a [Figures], bool) {
    let single = base.cell.rounds.len() == 1 && ours.cell.rounds.len() == 1;
    if single && !paired && base.stretches.len() > 1 && ours.stretches.len() > 1 {
        return (&base.stretches, &ours.stretches, true);
    }
    (&base.cell.rounds, &ours.cell.rounds, false)
}

/// Logarithms of a figure; `None` if it was not measured, or is 0 in some round.
fn values(rounds: &[Figures], metric: Metric) -> Option<Vec<f64>> {
    let values: Vec<f64> = rounds.iter().map(|round| metric.of(round)).collect();
    let sound = !values.is_empty() && values.iter().all(|value| *value > 0.0 && value.is_finite());
    sound.then(|| values.into_iter().map(f64::ln).collect())
}

fn test(base: &[f64], ours: &[f64], options: &JudgeOptions) -> Option<(RankTest, Shift)> {
    let logarithm = if options.paired {
        let differences: Vec<f64> = ours.iter().zip(base).map(|(ours, base)| ours - base).collect();
        (inference::wilcoxon_signed_rank(&differences)?, inference::paired_shift(&differences, options.confidence)?)
    } else {
        (inference::mann_whitney(ours, base)?, inference::unpaired_shift(ours, base, options.confidence)?)
    };
    let (test, shift) = logarithm;
    let share = |logarithm: f64| logarithm.exp() - 1.0;
    let interval = Interval { low: share(shift.interval.low), high: share(shift.interval.high) };
    Some((test, Shift { estimate: share(shift.estimate), interval, confidence: shift.confidence }))
}

fn comparison(
    side: usize,
    group: &str,
    metric: Metric,
    (base, ours): (&[f64], &[f64]),
    test: RankTest,
    change: Shift,
    options: &JudgeOptions,
) -> FigureChange {
    let middle = |values: &[f64]| median(values).map_or(0.0, f64::exp);
    let pairs = base.len().min(ours.len());
    FigureChange {
        side,
        group: group.to_owned(),
        metric,
        base: middle(base),
        ours: middle(ours),
        change,
        p: test.p,
        p_corrected: test.p,
        conclusion: Conclusion::NoDifference,
        rounds: if options.paired { (pairs, pairs) } else { (base.len(), ours.len()) },
    }
}

/// Tests over all groups together, for each side and figure. Each group is one value, so a group
/// that scatters counts no more than another. Sides and figures with too few groups for a
/// significant result are left out.
fn overall(comparisons: &[FigureChange], options: &JudgeOptions) -> Vec<FigureChange> {
    let mut families: Vec<(usize, Metric, Vec<&FigureChange>)> = Vec::new();
    for one in comparisons {
        match families.iter_mut().find(|(side, metric, _)| (*side, *metric) == (one.side, one.metric)) {
            Some((_, _, groups)) => groups.push(one),
            None => families.push((one.side, one.metric, vec![one])),
        }
    }
    let fewest = Design::Paired.fewest(families.len());
    families.retain(|(_, _, groups)| groups.len() >= fewest);
    families.iter().filter_map(|(side, metric, groups)| together(*side, *metric, groups, options)).collect()
}

fn together(side: usize, metric: Metric, groups: &[&FigureChange], options: &JudgeOptions) -> Option<FigureChange> {
    let options = JudgeOptions { paired: true, ..options.clone() };
    let ours: Vec<f64> = groups.iter().map(|comparison| (1.0 + comparison.change.estimate).ln()).collect();
    let base = vec![0.0; ours.len()];
    let (test, change) = test(&base, &ours, &options)?;
    let mut comparison = comparison(side, "", metric, (&base, &ours), test, change, &options);
    // Cells have no common IOPS, so only the ratio is given.
    (comparison.base, comparison.ours) = (1.0, 1.0 + change.estimate);
    Some(comparison)
}

fn correct(comparisons: &mut [FigureChange], design: Design) {
    let family = comparisons.len();
    let corrected = inference::holm(&comparisons.iter().map(|comparison| comparison.p).collect::<Vec<_>>());
    for (comparison, p) in comparisons.iter_mut().zip(corrected) {
        comparison.p_corrected = p;
        let more = comparison.change.estimate > 0.0;
        comparison.conclusion = if p < SIGNIFICANT {
            if more == comparison.metric.more_is_better() { Conclusion::Better } else { Conclusion::Worse }
        } else if design.can_show(comparison.rounds.0, comparison.rounds.1, family) {
            Conclusion::NoDifference
        } else {
            // Even rounds without any overlap would not be significant.
            Conclusion::TooFewRounds
        };
    }
}
