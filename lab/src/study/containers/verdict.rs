//! Computes the verdict and the warnings from the cells.

use super::{expanding::Pair, record::CONTAINERS};
use crate::{
    cells::{Cell, Compared},
    ratio::Ratio,
    study::warnings as shared,
    targets::Container,
};
use diskwright_image::DiskType;
use diskwright_load::{figures::Figures, warning::Warning};
use diskwright_stats::summary::median;

/// A target that reaches this share of the raw file's IOPS counts as equal.
const GOOD_RATIO: f64 = 0.95;
/// Fewer requests in a round give a warning: the slowest 1 % is less than one request.
const FEW_REQUESTS: u64 = 100;
/// Shorter windows give a warning.
const SHORT_WINDOW_NS: u64 = 50_000_000;

/// IOPS of a target as a ratio to the raw file's, for one workload.
struct IopsRatio<'a> {
    target: &'a str,
    workload: String,
    ratio: Ratio,
}

fn iops_ratios(cells: &[Cell]) -> Vec<IopsRatio<'_>> {
    let loads = Compared::of_part(cells, CONTAINERS);
    let found = loads.iter().flat_map(|load| {
        load.ratios(|round| round.iops).filter_map(|(cell, ratio)| {
            Some(IopsRatio { target: &cell.subject, workload: cell.title(), ratio: ratio? })
        })
    });
    found.collect()
}

/// The verdict: one sentence, about the disks whose blocks are allocated by the format.
pub(crate) fn verdict(stopped: bool, cells: &[Cell]) -> String {
    let (growing, fixed) = groups(cells);
    let named = standing(&growing).map(|text| format!("Populated dynamic and differencing disks {text}."));
    let text = named.or_else(|| standing(&fixed).map(|text| format!("Fixed disks {text}.")));
    let text = text.unwrap_or_else(|| "No cells were compared.".into());
    if stopped { format!("Partial, stopped: {text}") } else { text }
}

/// What else the cells show, a sentence each: CPU time, fixed disks, writes into empty disks, cells
/// in which nothing was measured.
pub(crate) fn further(cells: &[Cell]) -> Vec<String> {
    let (growing, fixed) = groups(cells);
    let mut sentences = Vec::new();
    if !growing.is_empty() {
        sentences.extend(cpu(cells));
        sentences.extend(standing(&fixed).map(|text| format!("Fixed disks {text}.")));
    }
    sentences.extend(growth(cells));
    sentences.extend(unmeasured(cells));
    sentences
}

/// The IOPS ratios of dynamic and differencing disks, and of all others.
fn groups(cells: &[Cell]) -> (Vec<IopsRatio<'_>>, Vec<IopsRatio<'_>>) {
    iops_ratios(cells).into_iter().partition(|found| is_growing(found.target))
}

fn is_growing(name: &str) -> bool {
    Container::from_name(name).is_some_and(|container| container.disk_type() != DiskType::Fixed)
}

/// The sentence about the CPU time of dynamic and differencing disks.
fn cpu(cells: &[Cell]) -> Option<String> {
    let ratios: Vec<f64> = Compared::of_part(cells, CONTAINERS)
        .iter()
        .flat_map(|load| load.ratios(|round| round.cpu_ns_per_io))
        .filter_map(|(cell, ratio)| ratio.filter(|_| is_growing(&cell.subject)))
        .map(|ratio| ratio.median())
        .collect();
    median(&ratios).map(|ratio| {
        format!("The median CPU time per I/O of dynamic and differencing disks is {ratio:.2} times the raw file's.")
    })
}

/// The sentence about cells in which no request completed.
fn unmeasured(cells: &[Cell]) -> Option<String> {
    let none: Vec<&Cell> = cells.iter().filter(|cell| !cell.rounds.is_empty() && !cell.is_measured()).collect();
    let first = none.first()?;
    let which = format!("{}, {}", first.subject, first.title());
    Some(match none.len() {
        1 => format!("Not measured, because no request completed: {which}; use longer cells."),
        several => {
            format!("Not measured, because no request completed: {several} cells, the first {which}; use longer cells.")
        }
    })
}

/// The sentence about writes into empty disks.
fn growth(cells: &[Cell]) -> Option<String> {
    let pairs = Pair::all(cells);
    let mut speeds: Vec<(f64, &Pair<'_>)> =
        pairs.iter().filter_map(|pair| Some((pair.ratio_with_flush()?.median(), pair))).collect();
    speeds.sort_by(|a, b| a.0.total_cmp(&b.0));
    let ((low, slowest), (high, _)) = speeds.first().zip(speeds.last())?;
    Some(format!(
        "Writes into empty disks, which allocate space first, reach {low:.2} ({}, {}) to {high:.2} times the speed of full ones, the flush included.",
        slowest.target(),
        slowest.full.load,
    ))
}

/// Describes a group of ratios: how many are good, the median, and the lowest with its range.
fn standing(found: &[IopsRatio<'_>]) -> Option<String> {
    let worst = found.iter().min_by(|a, b| a.ratio.median().total_cmp(&b.ratio.median()))?;
    let medians: Vec<f64> = found.iter().map(|found| found.ratio.median()).collect();
    let middle = median(&medians)?;
    let good = medians.iter().filter(|ratio| **ratio >= GOOD_RATIO).count();
    let rounds = match worst.ratio.range() {
        None => "one round, whose scatter is unknown".to_owned(),
        Some((min, max)) if max >= GOOD_RATIO && worst.ratio.median() < GOOD_RATIO => {
            format!("rounds {min:.2} to {max:.2}, within the scatter of the rounds")
        }
        Some((min, max)) => format!("rounds {min:.2} to {max:.2}"),
    };
    let place = format!("{} with {}, {:.2} ({rounds})", worst.target, worst.workload, worst.ratio.median());
    let of = medians.len();
    Some(if good == of {
        format!(
            "reach at least {GOOD_RATIO} of the raw file's IOPS in all of {of} comparisons; median {middle:.2}, lowest {place}"
        )
    } else {
        format!(
            "reach {GOOD_RATIO} of the raw file's IOPS in {good} of {of} comparisons; median {middle:.2}, lowest {place}"
        )
    })
}

/// Warnings about the figures: rounds that scatter, short windows, few requests.
pub(crate) fn warnings(cells: &[Cell]) -> Vec<Warning> {
    let named = |found: IopsRatio<'_>| (format!("{}, {}", found.target, found.workload), found.ratio);
    let ratios: Vec<(String, Ratio)> = iops_ratios(cells).into_iter().map(named).collect();
    let mut warnings: Vec<Warning> = shared::spread(&ratios).into_iter().collect();
    let compared = || cells.iter().filter(|cell| cell.part == CONTAINERS);
    let shortest_ns = compared().flat_map(|cell| &cell.rounds).map(|round| round.window_ns).min();
    if let Some(window_ns) = shortest_ns.filter(|window_ns| *window_ns < SHORT_WINDOW_NS) {
        warnings.push(Warning::ShortCells { window_ns });
    }
    let fewest = compared().filter_map(|cell| cell.rounds.iter().map(Figures::ios).min());
    let fewest: Vec<u64> = fewest.filter(|ios| *ios < FEW_REQUESTS).collect();
    if let Some(least) = fewest.iter().min() {
        warnings.push(Warning::FewRequests { cells: fewest.len(), fewest: *least });
    }
    warnings
}

#[cfg(test)]
mod tests {
    use super::{super::record::EXPANDING, *};

    fn compared(ios: &[(Container, [u64; 3])], window_ns: u64) -> Vec<Cell> {
        let round =
            |ios: u64| Figures { window_ns, reads: ios, iops: ios as f64, cpu_ns_per_io: 2000.0, ..Figures::default() };
        let cell = |(container, ios): &(Container, [u64; 3])| {
            Cell::new(CONTAINERS, "4K random write", container.name(), 32).with_rounds(ios.map(round).to_vec())
        };
        ios.iter().map(cell).collect()
    }

    #[test]
    fn the_verdict_names_the_worst_and_says_how_sure_it_is() {
        let measured = compared(
            &[
                (Container::Raw, [1000, 1000, 1000]),
                (Container::VhdFixed, [990, 1000, 1010]),
                (Container::VhdDynamic, [900, 910, 920]),
                (Container::VhdxDifferencing, [970, 980, 990]),
            ],
            200_000_000,
        );
        let text = verdict(false, &measured);
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
        assert_eq!(text.matches(". ").count(), 0, "one sentence: {text}");
        let [cpu, fixed] = &further(&measured)[..] else { panic!("{:?}", further(&measured)) };
        assert!(cpu.contains("differencing disks is 1.00 times the raw file's"), "{cpu}");
        assert!(fixed.starts_with("Fixed disks reach at least 0.95 of the raw file's IOPS in all of 1"), "{fixed}");
        assert!(warnings(&measured).is_empty());
    }

    #[test]
    fn a_low_median_whose_rounds_reach_the_mark_is_reported_as_doubtful() {
        let measured = compared(
            &[(Container::Raw, [1000; 3]), (Container::VhdFixed, [1000; 3]), (Container::VhdDynamic, [700, 900, 1100])],
            200_000_000,
        );
        let text = verdict(false, &measured);
        assert!(text.contains("within the scatter of the rounds"), "{text}");
        let [Warning::Spread { cells: 1, of: 2, worst, .. }] = &warnings(&measured)[..] else { panic!() };
        assert_eq!(worst, "VHD dynamic, 4K random write at QD 32");
    }

    #[test]
    fn what_stopped_a_study_comes_first_and_growth_last() {
        let cell = |subject: &str, ns: f64| {
            let round = Figures { writes: 100, iops: 1e11 / ns, window_ns: ns as u64, ..Figures::default() };
            let mut cell = Cell::new(EXPANDING, "4K random write", subject, 32).with_rounds(vec![round]);
            cell.push_more(crate::study::flushed::FLUSH_NS, Some(1e6));
            cell
        };
        let cells = [
            cell("VHD dynamic, full", 2e6),
            cell("VHD dynamic, empty", 3e6),
            cell("VHDX dynamic, full", 2e6),
            cell("VHDX dynamic, empty", 5e6),
        ];
        assert_eq!(verdict(true, &cells), "Partial, stopped: No cells were compared.");
        assert_eq!(
            further(&cells),
            [
                "Writes into empty disks, which allocate space first, reach 0.50 (VHDX dynamic, 4K random write) to 0.75 times the speed of full ones, the flush included."
            ]
        );
        assert_eq!(verdict(false, &[]), "No cells were compared.");
    }

    #[test]
    fn a_cell_without_requests_is_not_measured_and_one_round_has_no_range() {
        let one = |container: Container, ios: u64| {
            let round = Figures { reads: ios, iops: ios as f64, ..Figures::default() };
            Cell::new(CONTAINERS, "Exchange server", container.name(), 32).with_rounds(vec![round])
        };
        let cells = [one(Container::Raw, 100), one(Container::VhdDynamic, 90), one(Container::VhdxDynamic, 0)];
        let text = verdict(false, &cells);
        assert!(text.contains("in 0 of 1 comparisons"), "{text}");
        assert!(
            text.ends_with(
                "lowest VHD dynamic with Exchange server at QD 32, 0.90 (one round, whose scatter is unknown)."
            ),
            "{text}"
        );
        let further = further(&cells);
        assert!(further.last().unwrap().contains("no request completed: VHDX dynamic, Exchange server"), "{further:?}");
        assert_eq!((cells[2].median(|round| round.iops), cells[2].summary()), (None, None));
    }

    #[test]
    fn short_windows_and_few_requests_are_reported() {
        let measured = compared(&[(Container::Raw, [50; 3]), (Container::VhdFixed, [50; 3])], 20_000_000);
        let found = warnings(&measured);
        assert!(found.contains(&Warning::ShortCells { window_ns: 20_000_000 }), "{found:?}");
        assert!(found.contains(&Warning::FewRequests { cells: 2, fewest: 50 }), "{found:?}");
    }
}
