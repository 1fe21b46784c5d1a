//! Words and figures that the report of the study `raw-and-file` and its conclusion share.

use super::{
    Halves, RawAndFileResult,
    conclude::{self, Figure, Overall},
};
use diskwright_stats::numbers::bytes;

/// What the device was.
pub(crate) fn ground(result: &RawAndFileResult) -> String {
    let ground = &result.ground;
    let halves = match ground.halves {
        Halves::LoopsOverFile => format!(
            "loop devices over the halves of {} ({} on {})",
            ground.of, result.place.file_system, result.place.device
        ),
        Halves::Partitions => format!("partitions of {}", ground.of),
        Halves::LoopsOverDevice => format!("loop devices over the halves of {}, which takes no partitions", ground.of),
    };
    format!(
        "{halves}: {} bare, {} with {}",
        bytes(ground.bare_bytes),
        bytes(ground.file_system_bytes),
        ground.file_system
    )
}

/// Whether a ratio is chance, in a word; nothing where nobody asked.
pub(crate) fn said(result: &RawAndFileResult, one: &Overall) -> &'static str {
    let worse = (one.figure == Figure::Throughput) == (one.ratio < 1.0);
    match (one.p_corrected, one.differs(), worse) {
        (None, ..) => "",
        (_, true, true) => "yes, worse",
        (_, true, false) => "yes, better",
        (_, false, _) if !conclude::can_show(result, one) => "too few to tell",
        (_, false, _) => "no",
    }
}

/// "Average CPU utilization x CPU rating in MHz x number of cores / number of I/O operations per
/// second": the machine's CPU seconds for each request, times its clock. `None` without a
/// time-stamp counter.
pub fn mhz_per_iops(machine_cpu_ns_per_io: f64, tsc_hz: f64) -> Option<f64> {
    (tsc_hz > 0.0).then_some(machine_cpu_ns_per_io / 1e9 * tsc_hz / 1e6)
}
