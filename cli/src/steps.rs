//! How far a run of the lab is: a bar on a terminal, a line when a phase begins and every few seconds elsewhere, nothing with
//! `--quiet`.
//!
//! The lab calls between measurements and never during one, and nothing here has a thread of its own, so the display costs no
//! measurement anything. The answer is `false` once a signal has come.

use crate::signals::Patience;
use diskwright_lab::progress::{Progress, Step};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::{
    io::{self, IsTerminal, Write},
    time::{Duration, Instant},
};

const LINE_EVERY: Duration = Duration::from_secs(5);

/// Shows one run. Dropped, it wipes its bar.
#[derive(Debug)]
pub struct StepDisplay {
    bar: Option<ProgressBar>,
    lines: bool,
    patience: Patience,
    phase: String,
    next: Instant,
}

impl StepDisplay {
    /// For standard error as it is.
    pub fn new(quiet: bool, patience: Patience) -> Self {
        let terminal = io::stderr().is_terminal();
        let bar = (!quiet && terminal).then(new_bar);
        Self { bar, lines: !quiet && !terminal, patience, phase: String::new(), next: Instant::now() }
    }
}

impl Progress for StepDisplay {
    fn step(&mut self, step: Step<'_>) -> bool {
        let new_phase = self.phase != step.phase;
        if new_phase {
            step.phase.clone_into(&mut self.phase);
        }
        if let Some(bar) = &self.bar {
            bar.set_length(step.total.max(1));
            bar.set_position(step.done);
            bar.set_prefix(self.phase.clone());
            bar.set_message(step.message.to_owned());
        } else if self.lines && (new_phase || Instant::now() >= self.next) {
            self.next = Instant::now() + LINE_EVERY;
            let _ = writeln!(io::stderr(), "diskwright: {}", line(&step));
        }
        !self.patience.should_stop()
    }
}

impl Drop for StepDisplay {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
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

    #[test]
    fn a_line_tells_phase_share_and_what() {
        let step = Step { phase: "measure", done: 3, total: 12, message: "4K random read, raw file" };
        assert_eq!(line(&step), "measure 25 %: 4K random read, raw file");
        assert_eq!(line(&Step { total: 0, message: "", ..step }), "measure");
    }
}
