//! Ratio cells that mark low values.

use diskwright_outline::{Cell, Tone};
use diskwright_stats::numbers::ratio;

/// Ratios of IOPS below this are marked.
pub(super) const LOW: f64 = 0.95;

/// A cell with a ratio of IOPS, marked if it is below [`LOW`].
pub(super) fn marked(value: Option<f64>) -> Cell {
    let tone = value.map_or(Tone::Faint, |ratio| if ratio < LOW { Tone::Bad } else { Tone::Plain });
    Cell::maybe(value, ratio).toned(tone)
}
