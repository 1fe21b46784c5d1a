//! Words and figures that the report of the study `raw-and-file` and its conclusion share.

use super::{
    Figure, Halves, RawAndFileResult,
    conclude::{self, Overall},
};
use diskwright_stats::numbers::bytes;

/// What the device was.
pub(crate) fn test_bed(result: &RawAndFileResult) -> String {
    let test_bed = &result.test_bed;
    let place = result.head.place.clone().unwrap_or_default();
    let halves = match test_bed.halves {
        Halves::LoopsOverFile => {
            format!("loop devices over the halves of {} ({} on {})", test_bed.of, place.file_system, place.device)
        }
        Halves::Partitions => format!("partitions of {}", test_bed.of),
        Halves::LoopsOverDevice => {
            format!("loop devices over the halves of {}, which takes no partitions", test_bed.of)
        }
    };
    format!(
        "{halves}: {} bare, {} with {}",
        bytes(test_bed.bare_bytes),
        bytes(test_bed.file_system_bytes),
        test_bed.file_system
    )
}

/// Whether a ratio differs from 1 beyond chance, in a word; nothing where no test was made. `all`
/// is what [`conclude::overall`] found.
pub(crate) fn said(all: &[Overall], one: &Overall) -> &'static str {
    let worse = (one.figure == Figure::Throughput) == (one.ratio < 1.0);
    match (one.p_corrected, one.differs(), worse) {
        (None, ..) => "",
        (_, true, true) => "yes, worse",
        (_, true, false) => "yes, better",
        (_, false, _) if !conclude::can_show(all, one) => "too few to tell",
        (_, false, _) => "no",
    }
}

/// "Average CPU utilization x CPU rating in MHz x number of cores / number of I/O operations per
/// second": the machine's CPU seconds for each request, times its clock. `None` without a
/// time-stamp counter.
pub fn mhz_per_iops(machine_cpu_ns_per_io: f64, tsc_hz: f64) -> Option<f64> {
    (tsc_hz > 0.0).then_some(machine_cpu_ns_per_io / 1e9 * tsc_hz / 1e6)
}
