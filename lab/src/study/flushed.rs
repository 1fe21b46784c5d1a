//! Counted writes with the flush after them.
//!
//! An image or a file system may record new space at once, or in the flush. So writes that allocate
//! space are counted, not timed, and both times count: that of the writes and that of the flush.

use crate::{Result, cells::Cell, measure};
use diskwright_load::{
    LoadError, OpenTarget,
    figures::Figures,
    job::Job,
    run::{RunOptions, Watch},
};
use diskwright_store::{Blocking, EngineKind};
use std::time::Instant;

/// The flush's time in [`Cell::more`], in nanoseconds.
pub const FLUSH_NS: &str = "flush_ns";

/// Writes once. Returns the window, and the time of the flush after it in nanoseconds.
///
/// # Errors
/// A request or the flush that failed; [`crate::LabError::Stopped`].
pub(crate) fn write(job: &Job, target: &OpenTarget, engine: EngineKind, watch: &dyn Watch) -> Result<(Figures, f64)> {
    let phase = measure::window(job, target, &RunOptions::default(), watch)?;
    let start = Instant::now();
    let flushed = Blocking::open(&*target.device, engine).and_then(|mut device| device.flush());
    flushed.map_err(|source| LoadError::Queue { target: target.name.clone(), doing: "flush".into(), source })?;
    Ok((Figures::of(&phase), start.elapsed().as_nanos() as f64))
}

/// Writes per second of each round; the time includes the flush. `None` for a cell without flushes.
pub(crate) fn rates_with_flush(cell: &Cell) -> Option<Vec<f64>> {
    let rate =
        |(round, flush_ns): (&Figures, f64)| round.ios() as f64 * 1e9 / (round.window_ns as f64 + flush_ns).max(1.0);
    Some(cell.rounds.iter().zip(cell.more(FLUSH_NS)?).map(rate).collect())
}
