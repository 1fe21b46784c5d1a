//! Progress of a study: a bar on a terminal, a line every few seconds elsewhere (none for a phase
//! of less than two seconds), nothing with `--quiet`.
//!
//! The lab calls between measurements, and during a long one at most four times a second from the
//! thread that conducts it. The display has no thread of its own, so it disturbs no measurement.
//! After a signal the answer is `false`.

use crate::{describe::printable, live, progress::Pace, signals::Patience};
use diskwright_lab::progress::{Progress, Step};
use diskwright_load::run::{Snapshot, Watch};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::{
    io::{self, IsTerminal, Write},
    sync::{Mutex, PoisonError},
    time::Instant,
};

/// The display of one run. Dropped, it wipes its bar.
#[derive(Debug)]
pub struct StepDisplay {
    cells: CellDisplay,
}

/// Shows the current measurement: the part of a [`StepDisplay`] that can be used while the lab has
/// the rest borrowed.
#[derive(Debug)]
struct CellDisplay {
    bar: Option<ProgressBar>,
    lines: bool,
    patience: Patience,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    phase: String,
    message: String,
    pace: Pace,
}

impl StepDisplay {
    /// A display on standard error.
    pub fn new(quiet: bool, patience: Patience) -> Self {
        let terminal = io::stderr().is_terminal();
        let bar = (!quiet && terminal).then(new_bar);
        let state = State { phase: String::new(), message: String::new(), pace: Pace::of_steps(Instant::now()) };
        let cells = CellDisplay { bar, lines: !quiet && !terminal, patience, state: Mutex::new(state) };
        Self { cells }
    }
}

impl Progress for StepDisplay {
    fn step(&mut self, step: Step<'_>) -> bool {
        // Both hold names of files and profiles, which may have control characters.
        let (phase, message) = (printable(step.phase), printable(step.message));
        let step = Step { phase: &phase, message: &message, ..step };
        let cells = &self.cells;
        let mut state = cells.state.lock().unwrap_or_else(PoisonError::into_inner);
        let new_phase = state.phase != step.phase;
        if new_phase {
            state.pace.next_step(Instant::now());
            step.phase.clone_into(&mut state.phase);
        }
        step.message.clone_into(&mut state.message);
        if let Some(bar) = &cells.bar {
            bar.set_length(step.total.max(1));
            bar.set_position(step.done);
            bar.set_prefix(state.phase.clone());
            bar.set_message(step.message.to_owned());
        } else if cells.lines && state.pace.is_due(Instant::now()) {
            let _ = writeln!(io::stderr(), "diskwright: {}", line(&step));
        }
        !cells.patience.should_stop()
    }

    fn watch(&self) -> &dyn Watch {
        &self.cells
    }
}

impl Watch for CellDisplay {
    fn update(&self, snapshot: &Snapshot<'_>) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(bar) = &self.bar {
            bar.set_message(format!("{}  {}", state.message, live::figures(snapshot)));
        } else if self.lines && state.pace.is_due(Instant::now()) {
            let _ = writeln!(io::stderr(), "diskwright: {}: {}", state.message, live::figures(snapshot));
        }
        !self.patience.should_stop()
    }
}

impl Drop for StepDisplay {
    fn drop(&mut self) {
        if let Some(bar) = &self.cells.bar {
            bar.finish_and_clear();
        }
    }
}

fn new_bar() -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(1), ProgressDrawTarget::stderr());
    if let Ok(style) = ProgressStyle::with_template("{prefix:8} {bar:30} {percent:>3} %  {wide_msg}") {
        bar.set_style(style.progress_chars("█▉▊▋▌▍▎▏ "));
    }
    bar
}

fn line(step: &Step<'_>) -> String {
    let percent = (u128::from(step.done) * 100).checked_div(u128::from(step.total));
    let share = percent.map_or_else(String::new, |percent| format!(" {} %", percent.min(100)));
    let message = if step.message.is_empty() { String::new() } else { format!(": {}", step.message) };
    format!("{}{share}{message}", step.phase)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::signals::Signals;
    use diskwright_load::run::Stage;

    #[test]
    fn a_line_tells_phase_share_and_what() {
        let step = Step { phase: "measure", done: 3, total: 12, message: "4K random read, raw file" };
        assert_eq!(line(&step), "measure 25 %: 4K random read, raw file");
        assert_eq!(line(&Step { total: 0, message: "", ..step }), "measure");
    }

    #[test]
    fn it_goes_on_until_a_signal_comes() {
        let mut display = StepDisplay::new(true, Signals::default().patient());
        assert!(display.step(Step { phase: "measure", done: 1, total: 2, message: "x" }));
        assert!(display.watch().update(&Snapshot {
            phase: "main",
            phase_index: 0,
            phases: 1,
            stage: Stage::Measuring,
            elapsed_ns: 1,
            remaining_ns: None,
            done: None,
            iops: 1.0,
            mb_per_s: 1.0,
            p50_ns: 1,
            p99_ns: 1,
            cpus: 1.0,
            errors: 0,
            steady: None,
        }));
    }
}
