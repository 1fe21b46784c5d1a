//! The conclusion of the study `access-paths`, in one sentence.

use super::{CellRecord, LoadRecord, PAPER_WITHIN, Way, WayRecord};
use crate::measure::Ratio;

/// On the paper's scale.
pub(crate) fn relative(ratio: f64) -> String {
    format!("{:.0}", 100.0 * ratio)
}

/// The cell of a way, if it was measured.
pub(crate) fn cell_of(load: &LoadRecord, way: Way) -> Option<&CellRecord> {
    load.cells.iter().find(|cell| cell.way == way)
}

/// The conclusion. `partial` is how many rounds there are, and of how many.
pub(super) fn verdict(loads: &[LoadRecord], ways: &[WayRecord], partial: Option<(usize, usize)>) -> String {
    let partial = partial.map_or_else(String::new, |(whole, asked)| format!("Partial, {whole} of {asked} rounds: "));
    let outside: Vec<Way> = [Way::Nbd, Way::Attach]
        .into_iter()
        .filter(|way| ways.iter().any(|record| record.way == *way && record.skipped.is_none()))
        .collect();
    let (Some(light), Some(heavy), false) = (loads.first(), loads.last(), outside.is_empty()) else {
        return format!("{partial}no way from outside could be measured; what follows is the disk in process.");
    };
    let at = |load: &LoadRecord, way: Way, of: fn(&CellRecord) -> Option<&Ratio>| {
        cell_of(load, way).and_then(of).map_or(f64::NAN, Ratio::median)
    };
    let said: Vec<String> = outside
        .iter()
        .map(|way| {
            format!(
                "{} gives {} at {} load and {} at {}, with {:.1} times the CPU for each request",
                way.name(),
                relative(at(light, *way, |cell| cell.iops_ratio.as_ref())),
                light.name,
                relative(at(heavy, *way, |cell| cell.iops_ratio.as_ref())),
                heavy.name,
                at(heavy, *way, |cell| cell.cpu_ratio.as_ref())
            )
        })
        .collect();
    format!(
        "{partial}Where the disk in process gives 100 requests, {}; the paper's three protocols lie within {:.0} % of each other.",
        said.join("; "),
        100.0 * PAPER_WITHIN.0
    )
}

#[cfg(test)]
mod tests {
    use super::super::{
        LOADS,
        example::cells,
        measure::{Cells, loads},
    };
    use super::*;

    #[test]
    fn ratios_are_of_the_same_round_and_on_the_papers_scale() {
        let (ways, cells) = cells();
        let found = loads(&ways, &cells).unwrap();
        assert_eq!(found.iter().map(|load| load.outstanding).collect::<Vec<_>>(), [2, 4, 6]);
        let nbd = cell_of(&found[0], Way::Nbd).unwrap();
        let ratio = nbd.iops_ratio.as_ref().unwrap();
        // The slow round is none in the ratio, though it is one in the figure.
        assert_eq!((ratio.summary.min, ratio.summary.max, nbd.iops.min), (0.75, 0.75, 15_000.0));
        assert!((nbd.cpu_ratio.as_ref().unwrap().median() - 2.0).abs() < 1e-9, "client and server together");
        assert!(cell_of(&found[0], Way::InProcess).unwrap().iops_ratio.is_none());
        let none = Cells { rounds: vec![vec![Vec::new(); 3]; LOADS.len()], ..Cells::default() };
        assert!(loads(&ways, &none).is_err());
    }

    #[test]
    fn the_verdict_is_one_sentence_and_says_what_is_missing() {
        let (ways, cells) = cells();
        let loads = loads(&ways, &cells).unwrap();
        let record = |way, skipped: Option<&str>| WayRecord { way, skipped: skipped.map(str::to_owned) };
        let all = [record(Way::InProcess, None), record(Way::Nbd, None), record(Way::Attach, None)];
        assert_eq!(
            verdict(&loads, &all, None),
            "Where the disk in process gives 100 requests, NBD gives 75 at light load and 75 at heavy, with 2.0 times the CPU for each request; \
             attach gives 50 at light load and 50 at heavy, with 2.5 times the CPU for each request; the paper's three protocols lie within 9 % of \
             each other."
        );
        let partial = verdict(&loads, &[record(Way::Nbd, None), record(Way::Attach, Some("not root"))], Some((2, 3)));
        assert!(partial.starts_with("Partial, 2 of 3 rounds: Where") && !partial.contains("attach"), "{partial}");
        assert!(verdict(&loads, &[record(Way::Nbd, Some("x"))], None).starts_with("no way from outside"));
    }
}
