//! Ratios that are marked where they are low.

use diskwright_outline::{Cell, Tone};
use diskwright_stats::numbers::ratio;

/// A ratio of IOPS below this is marked.
pub(super) const LOW: f64 = 0.95;

/// A ratio of IOPS, marked where it is below [`LOW`].
pub(super) fn marked(value: Option<f64>) -> Cell {
    let tone = value.map_or(Tone::Faint, |ratio| if ratio < LOW { Tone::Bad } else { Tone::Plain });
    Cell::maybe(value, ratio).toned(tone)
}
