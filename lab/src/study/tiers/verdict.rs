//! The verdict of the study `tiers`.

use super::{AFTER, BEFORE, TiersResult};
use crate::cells::Cell;
use diskwright_stats::numbers::{bytes, duration, grouped, percent, ratio};

/// A prediction that is off by more than this is named.
const OFF: f64 = 0.03;

/// The verdict. Says first whether the study was stopped.
pub(crate) fn verdict(result: &TiersResult, stopped: bool) -> String {
    let text = conclusion(result).unwrap_or_else(|| "No round was measured.".into());
    if stopped { format!("Partial: the study was stopped. {text}") } else { text }
}

fn conclusion(result: &TiersResult) -> Option<String> {
    let (before, after) = (result.cell(BEFORE)?, result.cell(AFTER)?);
    let [predicted, measured, best] = [
        result.median_of(|round| round.predicted)?,
        result.median_of(|round| round.measured)?,
        result.median_of(|round| round.best)?,
    ];
    let iops = |cell: &Cell| cell.median(|round| round.iops);
    let gain = after.ratio(before, |round| round.iops)?.median();
    let mut text = format!(
        "Fast members that hold {} of a disk of {} serve {} of the requests after an optimisation: {} IOPS at {} instead of {} at {}, {} times as many.",
        bytes(result.fast_bytes),
        bytes(result.size_bytes),
        percent(measured),
        grouped(iops(after)?),
        duration(after.median(|round| round.mean_ns)?),
        grouped(iops(before)?),
        duration(before.median(|round| round.mean_ns)?),
        ratio(gain)
    );
    text.push_str(&format!(" Predicted were {}, and the best placement has {}", percent(predicted), percent(best)));
    text.push_str(if (predicted - measured).abs() > OFF {
        ": the load has changed, or too few requests were counted."
    } else {
        "."
    });
    let mut needed = result.optimizations.last()?.needed.iter();
    if let Some((share, fast_bytes)) = needed.find(|(share, _)| (share - 0.95).abs() < 1e-9) {
        let each = fast_bytes / u64::from(result.copies.max(1));
        text.push_str(&format!(" To serve {}, they would have to hold {}.", percent(*share), bytes(each)));
    }
    Some(text)
}
