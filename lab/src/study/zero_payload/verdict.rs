//! The conclusion of the study `zero-payload`.

use super::{Payload, Test, not_stored};
use crate::cells::Cell;

/// A dynamic disk that is this much faster than the fixed one has not done the work.
const TOO_GOOD: f64 = 1.5;

/// The conclusion, and first of all whether it is of everything.
pub(super) fn verdict(cells: &[Cell], stopped: bool) -> String {
    let text = conclusion(cells);
    if stopped { format!("Stopped: this is what was measured until then. {text}") } else { text }
}

fn conclusion(cells: &[Cell]) -> String {
    let ends = |payload, figure: fn(&Test<'_>) -> Option<f64>| {
        let tests = Test::all(cells, payload);
        let figures = tests.iter().filter_map(figure);
        figures.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)))
    };
    let ratio = |test: &Test<'_>| test.ratio().map(|ratio| ratio.median());
    let ((low, high), (real_low, real_high)) = (ends(Payload::Zeros, ratio), ends(Payload::Data, ratio));
    let (least, most) = ends(Payload::Zeros, |test| not_stored(test.dynamic).map(|share| 100.0 * share));
    let share =
        if least.round() == most.round() { format!("{most:.0} %") } else { format!("{least:.0} to {most:.0} %") };
    let spread = |low: f64, high: f64| format!("{} to {}", times(low), times(high));
    if high < TOO_GOOD {
        return format!(
            "With zeros the dynamic disk reaches {} of the fixed one's IOPS, with real data {}; {share} of its requests for zeros never reached the store.",
            spread(low, high),
            spread(real_low, real_high)
        );
    }
    format!(
        "With zeros the dynamic disk seems {} times as fast as the fixed one, but {share} of its requests never reached the store; with real data it is {} times as fast. The first figures measure look-ups in a table, not storage: do not use them.",
        spread(low, high),
        spread(real_low, real_high)
    )
}

fn times(ratio: f64) -> String {
    if ratio < 10.0 { format!("{ratio:.2}") } else { format!("{ratio:.0}") }
}
