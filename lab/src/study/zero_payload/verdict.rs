//! The verdict of the study `zero-payload`.

use super::{Payload, Test, not_stored};
use crate::cells::Cell;

/// A dynamic disk that is this much faster than the fixed one did not store the data.
const TOO_GOOD: f64 = 1.5;

/// The verdict. Says first whether the study was stopped.
pub(super) fn verdict(cells: &[Cell], stopped: bool) -> String {
    let text = conclusion(cells);
    if stopped { format!("Partial: the study was stopped. {text}") } else { text }
}

fn conclusion(cells: &[Cell]) -> String {
    let ends = |payload, figure: fn(&Test<'_>) -> Option<f64>| {
        let tests = Test::all(cells, payload);
        let figures = tests.iter().filter_map(figure);
        figures.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)))
    };
    let ratio = |test: &Test<'_>| test.ratio().map(|ratio| ratio.median());
    let ((low, high), (real_low, real_high)) = (ends(Payload::Zeros, ratio), ends(Payload::Data, ratio));
    let (min, max) = ends(Payload::Zeros, |test| not_stored(test.dynamic).map(|share| 100.0 * share));
    let share = if min.round() == max.round() { format!("{max:.0} %") } else { format!("{min:.0} to {max:.0} %") };
    let spread = |low: f64, high: f64| format!("{} to {}", times(low), times(high));
    if high < TOO_GOOD {
        return format!(
            "With zeros the dynamic disk reaches {} of the fixed disk's IOPS, with real data {}; {share} of its bytes of zeros never reached storage.",
            spread(low, high),
            spread(real_low, real_high)
        );
    }
    format!(
        "With zeros the dynamic disk seems {} times as fast as the fixed disk, but {share} of its bytes never reached storage; with real data it is {} times as fast. The figures with zeros measure table look-ups, not storage: do not use them.",
        spread(low, high),
        spread(real_low, real_high)
    )
}

fn times(ratio: f64) -> String {
    if ratio < 10.0 { format!("{ratio:.2}") } else { format!("{ratio:.0}") }
}
