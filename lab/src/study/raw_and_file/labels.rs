//! Texts and figures that the study's report uses in several places.

use super::{
    Figure, Halves, RawAndFileResult,
    conclude::{self, Overall},
};
use diskwright_stats::numbers::bytes;

/// Describes the device and its halves.
pub(crate) fn test_bed(result: &RawAndFileResult) -> String {
    let test_bed = &result.test_bed;
    let place = result.head.place.clone().unwrap_or_default();
    let halves = match test_bed.halves {
        Halves::LoopsOverFile => {
            format!("loop devices over two halves of {} ({} on {})", test_bed.of, place.file_system, place.device)
        }
        Halves::Partitions => format!("partitions of {}", test_bed.of),
        Halves::LoopsOverDevice => {
            format!("loop devices over two halves of {}, which does not support partitions", test_bed.of)
        }
    };
    format!(
        "{halves}: {} bare, {} with {}",
        bytes(test_bed.bare_bytes),
        bytes(test_bed.file_system_bytes),
        test_bed.file_system
    )
}

/// Whether a ratio differs significantly from 1, as a table entry. Empty without a test. `all` are
/// all results of [`conclude::overall`].
pub(crate) fn significance(all: &[Overall], one: &Overall) -> &'static str {
    let worse = (one.figure == Figure::Throughput) == (one.ratio < 1.0);
    match (one.p_corrected, one.differs(), worse) {
        (None, ..) => "",
        (_, true, true) => "yes, worse",
        (_, true, false) => "yes, better",
        (_, false, _) if !conclude::can_show(all, one) => "too few workloads",
        (_, false, _) => "no",
    }
}

/// The paper's "average CPU utilization x CPU rating in MHz x number of cores / number of I/O
/// operations per second": the machine's CPU seconds per request, times its clock. `None` without a
/// time-stamp counter.
pub fn mhz_per_iops(machine_cpu_ns_per_io: f64, tsc_hz: f64) -> Option<f64> {
    (tsc_hz > 0.0).then_some(machine_cpu_ns_per_io / 1e9 * tsc_hz / 1e6)
}
