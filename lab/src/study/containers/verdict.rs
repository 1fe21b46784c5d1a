//! From figures to a sentence, and to warnings.

use crate::{
    measure::Ratio,
    result::{ComparedWorkload, ExpandingRecord},
    targets::Container,
};
use diskwright_image::DiskType;
use diskwright_load::{figures::Figures, warning::Warning};
use diskwright_stats::summary::median;

/// A target that reaches this share of the raw file's IOPS costs nothing that matters.
const GOOD_RATIO: f64 = 0.95;
/// Rounds that lie further apart than this are told of.
const SPREAD_WARNING: f64 = 0.10;
/// With fewer requests in a round, its 99th percentile rests on less than one of them.
const FEW_REQUESTS: u64 = 100;
/// A window shorter than this is told of.
const SHORT_WINDOW_NS: u64 = 50_000_000;

/// A ratio and what it is of.
struct Found<'a> {
    target: &'a str,
    workload: String,
    ratio: &'a Ratio,
}

fn iops_ratios(workloads: &[ComparedWorkload]) -> impl Iterator<Item = Found<'_>> {
    workloads.iter().flat_map(|compared| {
        let workload = &compared.result.workload;
        compared.result.cells.iter().filter_map(move |cell| {
            let ratio = cell.iops_ratio.as_ref()?;
            Some(Found {
                target: &cell.target,
                workload: format!("{} at QD {}", workload.name, workload.queue_depth),
                ratio,
            })
        })
    })
}

/// All there is to say, first of all that it is not all.
pub(crate) fn whole(stopped: bool, workloads: &[ComparedWorkload], expanding: &[ExpandingRecord]) -> String {
    let mut text = String::new();
    if stopped {
        text.push_str("Stopped: this is what was measured until then. ");
    }
    text.push_str(&sentence(workloads));
    text.push_str(&growth(expanding));
    text
}

/// How writes into empty disks fare; nothing where there were none.
fn growth(expanding: &[ExpandingRecord]) -> String {
    let by_speed = |a: &&ExpandingRecord, b: &&ExpandingRecord| {
        a.ratio_with_flush.median().total_cmp(&b.ratio_with_flush.median())
    };
    let (slowest, fastest) = (expanding.iter().min_by(by_speed), expanding.iter().max_by(by_speed));
    let (Some(slowest), Some(fastest)) = (slowest, fastest) else { return String::new() };
    format!(
        " Empty disks, which must find space first, take writes at {:.2} ({}, {}) to {:.2} times the speed of full ones, the flush included.",
        slowest.ratio_with_flush.median(),
        slowest.target,
        slowest.result.workload.name,
        fastest.ratio_with_flush.median()
    )
}

/// The conclusion: how the populated dynamic and differencing disks, and the fixed ones, stand
/// against the raw file.
pub(crate) fn sentence(workloads: &[ComparedWorkload]) -> String {
    let is_growing = |name: &str| {
        Container::ALL.iter().any(|container| container.name() == name && container.disk_type() != DiskType::Fixed)
    };
    let (growing, fixed): (Vec<_>, Vec<_>) = iops_ratios(workloads).partition(|found| is_growing(found.target));
    let (Some(growing_text), Some(fixed_text)) = (standing(&growing), standing(&fixed)) else {
        return "Nothing was compared.".into();
    };
    let cpu: Vec<f64> = workloads
        .iter()
        .flat_map(|compared| &compared.result.cells)
        .filter(|cell| is_growing(&cell.target))
        .filter_map(|cell| cell.cpu_ratio.as_ref().map(Ratio::median))
        .collect();
    let cpu = median(&cpu).map_or_else(String::new, |ratio| {
        format!(" In the median they take {ratio:.2} times the raw file's CPU time for each I/O.")
    });
    format!("Populated dynamic and differencing disks {growing_text}.{cpu} Fixed disks {fixed_text}.")
}

/// How a group of ratios stands: how many are good, the median, and the worst with how sure that
/// is.
fn standing(found: &[Found<'_>]) -> Option<String> {
    let worst = found.iter().min_by(|a, b| a.ratio.median().total_cmp(&b.ratio.median()))?;
    let medians: Vec<f64> = found.iter().map(|found| found.ratio.median()).collect();
    let middle = median(&medians)?;
    let good = medians.iter().filter(|ratio| **ratio >= GOOD_RATIO).count();
    let summary = &worst.ratio.summary;
    let doubt =
        if summary.max >= GOOD_RATIO && worst.ratio.median() < GOOD_RATIO { ", so chance may explain it" } else { "" };
    let place = format!(
        "{} with {}, {:.2} (rounds {:.2} to {:.2}{doubt})",
        worst.target,
        worst.workload,
        worst.ratio.median(),
        summary.min,
        summary.max
    );
    let of = medians.len();
    Some(if good == of {
        format!(
            "reach at least {GOOD_RATIO} of the raw file's IOPS in all {of} comparisons; median {middle:.2}, lowest {place}"
        )
    } else {
        format!(
            "reach {GOOD_RATIO} of the raw file's IOPS in {good} of {of} comparisons; median {middle:.2}, lowest {place}"
        )
    })
}

/// Doubts that the figures themselves raise.
pub(crate) fn warnings(workloads: &[ComparedWorkload]) -> Vec<Warning> {
    let mut warnings = Vec::new();
    let all: Vec<Found<'_>> = iops_ratios(workloads).collect();
    let wide = all.iter().filter(|found| found.ratio.summary.spread() > SPREAD_WARNING).count();
    let widest = all.iter().max_by(|a, b| a.ratio.summary.spread().total_cmp(&b.ratio.summary.spread()));
    if let (Some(widest), true) = (widest, wide > 0) {
        warnings.push(Warning::Spread {
            cells: wide,
            of: all.len(),
            threshold: SPREAD_WARNING,
            worst: format!("{}, {}", widest.target, widest.workload),
            worst_spread: widest.ratio.summary.spread(),
        });
    }
    let window_ns = workloads.iter().map(|compared| compared.result.window_ns).min().unwrap_or(u64::MAX);
    if window_ns < SHORT_WINDOW_NS {
        warnings.push(Warning::ShortCells { window_ns });
    }
    let fewest: Vec<u64> = workloads
        .iter()
        .flat_map(|compared| &compared.result.cells)
        .filter_map(|cell| cell.rounds.iter().map(Figures::ios).min())
        .filter(|ios| *ios < FEW_REQUESTS)
        .collect();
    if let Some(least) = fewest.iter().min() {
        warnings.push(Warning::FewRequests { cells: fewest.len(), fewest: *least });
    }
    warnings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::{CellResult, WorkloadResult};
    use diskwright_load::workload::{Direction, Pattern, Workload};

    fn compared(ios: &[(Container, [u64; 3])], window_ns: u64) -> ComparedWorkload {
        let rounds = |ios: &[u64; 3]| -> Vec<Figures> {
            let round =
                |ios: &u64| Figures { reads: *ios, iops: *ios as f64, cpu_ns_per_io: 2000.0, ..Figures::default() };
            ios.iter().map(round).collect()
        };
        let base = rounds(&ios[0].1);
        let cells = ios
            .iter()
            .enumerate()
            .map(|(index, (container, ios))| {
                CellResult::new(container.name(), rounds(ios), (index > 0).then_some(&base[..])).unwrap()
            })
            .collect();
        let workload = Workload::new(Pattern::Random, Direction::Write, 4096, 32);
        let result = WorkloadResult { workload, window_ns, cells };
        ComparedWorkload { paper_ratios: vec![None; ios.len()], result }
    }

    #[test]
    fn the_verdict_names_the_worst_and_says_how_sure_it_is() {
        let measured = [compared(
            &[
                (Container::Raw, [1000, 1000, 1000]),
                (Container::VhdFixed, [990, 1000, 1010]),
                (Container::VhdDynamic, [900, 910, 920]),
                (Container::VhdxDifferencing, [970, 980, 990]),
            ],
            200_000_000,
        )];
        let text = sentence(&measured);
        assert!(
            text.starts_with(
                "Populated dynamic and differencing disks reach 0.95 of the raw file's IOPS in 1 of 2 comparisons"
            ),
            "{text}"
        );
        assert!(
            text.contains("lowest VHD dynamic with 4K random write at QD 32, 0.91 (rounds 0.90 to 0.92)"),
            "{text}"
        );
        assert!(text.contains("1.00 times the raw file's CPU time"), "{text}");
        assert!(text.contains("Fixed disks reach at least 0.95 of the raw file's IOPS in all 1 comparisons"), "{text}");
        assert!(warnings(&measured).is_empty());
    }

    #[test]
    fn a_low_median_whose_rounds_reach_the_mark_is_told_as_doubtful() {
        let measured = [compared(
            &[(Container::Raw, [1000; 3]), (Container::VhdFixed, [1000; 3]), (Container::VhdDynamic, [700, 900, 1100])],
            200_000_000,
        )];
        assert!(sentence(&measured).contains("so chance may explain it"), "{}", sentence(&measured));
        let [Warning::Spread { cells: 1, of: 2, worst, .. }] = &warnings(&measured)[..] else { panic!() };
        assert_eq!(worst, "VHD dynamic, 4K random write at QD 32");
    }

    #[test]
    fn what_stopped_a_study_comes_first_and_growth_last() {
        let round = |ns| Figures { writes: 100, iops: 1e11 / ns, window_ns: ns as u64, ..Figures::default() };
        let record = |target: &str, ratio: f64| {
            let cells = vec![
                CellResult::new("full", vec![round(1e6)], None).unwrap(),
                CellResult::new("empty", vec![round(1e6 / ratio)], Some(&[round(1e6)])).unwrap(),
            ];
            let flush = diskwright_stats::summary::Summary::of(&[0.0]).unwrap();
            ExpandingRecord {
                container: Container::VhdDynamic,
                target: target.into(),
                block_bytes: 2 << 20,
                writes: 100,
                result: WorkloadResult {
                    workload: Workload::new(Pattern::Random, Direction::Write, 4096, 32),
                    window_ns: 1_000_000,
                    cells,
                },
                flush_full_ns: flush,
                flush_empty_ns: flush,
                ratio_with_flush: Ratio::of(&[ratio], &[1.0]).unwrap(),
            }
        };
        let text = whole(true, &[], &[record("VHD dynamic", 0.75), record("VHDX dynamic", 0.5)]);
        assert_eq!(
            text,
            "Stopped: this is what was measured until then. Nothing was compared. Empty disks, which must find space first, take writes at 0.50 (VHDX dynamic, 4K random write) to 0.75 times the speed of full ones, the flush included."
        );
        assert_eq!(whole(false, &[], &[]), "Nothing was compared.");
    }

    #[test]
    fn short_windows_and_few_requests_are_told() {
        let measured = [compared(&[(Container::Raw, [50; 3]), (Container::VhdFixed, [50; 3])], 20_000_000)];
        let found = warnings(&measured);
        assert!(found.contains(&Warning::ShortCells { window_ns: 20_000_000 }), "{found:?}");
        assert!(found.contains(&Warning::FewRequests { cells: 2, fewest: 50 }), "{found:?}");
        assert_eq!(sentence(&[]), "Nothing was compared.");
    }
}
