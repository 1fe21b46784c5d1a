//! Progress of a run: one line that is updated on a terminal, a line every few seconds elsewhere
//! (none for a stage of less than two seconds), nothing with `--quiet`.
//!
//! The lab calls at most four times a second, from the thread that conducts the run; measuring
//! threads never wait for the terminal. After a signal the answer is `false`: the run ends and
//! keeps what it has measured.

use crate::{describe::printable, progress::Pace, signals::Patience, style::DEFAULT_COLUMNS};
use diskwright_fleet::controller::{AgentLook, FleetLook, FleetWatch};
use diskwright_load::{
    run::{Snapshot, Stage, Watch},
    steady::{RANGE_MAX, ROUNDS, SLOPE_MAX},
};
use diskwright_stats::numbers::{duration, figure};
use std::{
    io::{self, IsTerminal, Write},
    os::fd::AsFd,
    sync::{Mutex, PoisonError},
    time::Instant,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Show {
    Nothing,
    /// A line that is updated.
    Line,
    Lines,
}

/// Shows one run. Dropped, it wipes its line.
#[derive(Debug)]
pub struct LiveDisplay {
    show: Show,
    patience: Patience,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    pace: Pace,
    /// Phase and stage that were shown last.
    shown: Option<(usize, Stage)>,
    drawn: bool,
}

impl LiveDisplay {
    /// A display on standard error.
    pub fn new(quiet: bool, patience: Patience) -> Self {
        let show = match (quiet, io::stderr().is_terminal()) {
            (true, _) => Show::Nothing,
            (false, true) => Show::Line,
            (false, false) => Show::Lines,
        };
        Self {
            show,
            patience,
            state: Mutex::new(State { pace: Pace::of_steps(Instant::now()), shown: None, drawn: false }),
        }
    }
}

impl Watch for LiveDisplay {
    fn update(&self, snapshot: &Snapshot<'_>) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match self.show {
            Show::Nothing => {}
            Show::Line => {
                state.drawn = true;
                let size = rustix::termios::tcgetwinsize(io::stderr().as_fd());
                // Some terminals report a width of 0.
                let columns = size.ok().map(|size| usize::from(size.ws_col)).filter(|columns| *columns > 0);
                let text: String = line(snapshot).chars().take(columns.unwrap_or(DEFAULT_COLUMNS) - 1).collect();
                let _ = write!(io::stderr(), "\r\x1b[K{text}");
            }
            Show::Lines => {
                let stage = (snapshot.phase_index, snapshot.stage);
                let now = Instant::now();
                if state.shown != Some(stage) {
                    state.shown = Some(stage);
                    state.pace.next_step(now);
                }
                if state.pace.is_due(now) {
                    let _ = writeln!(io::stderr(), "diskwright: {}", line(snapshot));
                }
            }
        }
        !self.patience.should_stop()
    }
}

impl Drop for LiveDisplay {
    fn drop(&mut self) {
        if self.state.get_mut().unwrap_or_else(PoisonError::into_inner).drawn {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}

/// Shows a fleet: on a terminal the sum and a line for each agent, elsewhere the sum. Dropped, it
/// wipes its lines.
#[derive(Debug)]
pub struct FleetDisplay {
    sum: LiveDisplay,
    /// Lines below the sum that are drawn.
    drawn: Mutex<usize>,
}

/// Lines of agents at most. Of more agents the slowest ones are shown.
const AGENT_LINES_MAX: usize = 32;

impl FleetDisplay {
    /// A display on standard error.
    pub fn new(quiet: bool, patience: Patience) -> Self {
        Self { sum: LiveDisplay::new(quiet, patience), drawn: Mutex::new(0) }
    }
}

impl FleetWatch for FleetDisplay {
    fn update(&self, look: &FleetLook<'_>) -> bool {
        let mut drawn = self.drawn.lock().unwrap_or_else(PoisonError::into_inner);
        let is_line = self.sum.show == Show::Line;
        if is_line && *drawn > 0 {
            let _ = write!(io::stderr(), "\r\x1b[{}A", *drawn);
        }
        let goes_on = self.sum.update(&look.sum);
        if is_line {
            let size = rustix::termios::tcgetwinsize(io::stderr().as_fd()).ok();
            let columns = size.map(|size| usize::from(size.ws_col)).filter(|columns| *columns > 0);
            let rows = size.map_or(24, |size| usize::from(size.ws_row));
            let lines = agent_lines(look, rows.saturating_sub(2).min(AGENT_LINES_MAX));
            let mut text = String::new();
            for line in &lines {
                let line: String = line.chars().take(columns.unwrap_or(DEFAULT_COLUMNS) - 1).collect();
                text.push_str(&format!("\r\n\x1b[K{line}"));
            }
            *drawn = lines.len();
            let _ = io::stderr().write_all(text.as_bytes());
        }
        goes_on
    }
}

impl Drop for FleetDisplay {
    fn drop(&mut self) {
        let drawn = *self.drawn.get_mut().unwrap_or_else(PoisonError::into_inner);
        if drawn > 0 {
            // The sum is wiped by its own display.
            let _ = write!(io::stderr(), "\r\x1b[{drawn}A\x1b[J");
        }
    }
}

/// A line for each agent; if there is no room for all, for the slowest ones.
fn agent_lines(look: &FleetLook<'_>, most: usize) -> Vec<String> {
    let iops = |agent: &AgentLook| agent.snapshot.map_or(0.0, |snapshot| snapshot.as_snapshot("").iops);
    let mut agents: Vec<&AgentLook> = look.agents.iter().collect();
    let left_out = agents.len().saturating_sub(most);
    if left_out > 0 {
        agents.sort_by(|one, other| iops(one).total_cmp(&iops(other)));
        agents.truncate(most.saturating_sub(1));
    }
    let width = agents.iter().map(|agent| agent.name.chars().count()).max().unwrap_or(0);
    let mut lines: Vec<String> = agents
        .iter()
        .map(|agent| {
            let state = match (&agent.lost, &agent.snapshot) {
                (Some(why), _) => format!("LOST: {why}"),
                (None, Some(snapshot)) => figures(&snapshot.as_snapshot("")),
                (None, None) => "waits for the start".into(),
            };
            format!("  {:<width$}  {}", printable(&agent.name), printable(&state))
        })
        .collect();
    if left_out > 0 {
        lines.push(format!("  {} faster agents are not shown", look.agents.len() - agents.len()));
    }
    lines
}

/// Phase, stage, time left, rates, latencies, CPU, and the state of the steady-state test.
fn line(now: &Snapshot<'_>) -> String {
    let phase = if now.phases > 1 {
        format!("{} ({} of {})", now.phase, now.phase_index + 1, now.phases)
    } else {
        now.phase.to_owned()
    };
    // The name of a phase comes from a profile, and may hold control characters.
    let phase = printable(&phase);
    let stage = match now.stage {
        Stage::WarmUp => "warming up",
        Stage::Settling => "settling",
        Stage::Measuring => "measuring",
        Stage::CoolDown => "cooling down",
    };
    let left = now
        .remaining_ns
        .map_or_else(|| format!("{} so far", clock(now.elapsed_ns)), |left_ns| format!("{} left", clock(left_ns)));
    let mut text = format!("{phase}: {stage}, {left}  {}", figures(now));
    if let Some(steady) = &now.steady {
        text.push_str(&if steady.rounds < ROUNDS {
            format!("  steady: {} of {ROUNDS} rounds", steady.rounds)
        } else {
            format!(
                "  steady: range {:.0} of {:.0} %, slope {:.0} of {:.0} %",
                steady.range * 100.0,
                RANGE_MAX * 100.0,
                steady.slope.abs() * 100.0,
                SLOPE_MAX * 100.0
            )
        });
    }
    if now.errors > 0 {
        text.push_str(&format!("  {} FAILED", now.errors));
    }
    text
}

/// Rates, latencies, CPU.
pub fn figures(now: &Snapshot<'_>) -> String {
    format!(
        "{} IOPS  {} MB/s  p50 {}  p99 {}  CPU {:.2}",
        figure(now.iops),
        figure(now.mb_per_s),
        duration(now.p50_ns as f64),
        duration(now.p99_ns as f64),
        now.cpus
    )
}

/// `7 s`, `1:05`, `2:01:00`: short, and of nearly constant width in a line that is updated.
fn clock(ns: u64) -> String {
    let seconds = ns.div_ceil(1_000_000_000);
    match (seconds / 3600, seconds / 60 % 60, seconds % 60) {
        (0, 0, s) => format!("{s} s"),
        (0, m, s) => format!("{m}:{s:02}"),
        (h, m, s) => format!("{h}:{m:02}:{s:02}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::signals::Signals;
    use diskwright_load::run::SteadyProgress;

    fn snapshot() -> Snapshot<'static> {
        Snapshot {
            phase: "main",
            phase_index: 0,
            phases: 1,
            stage: Stage::Measuring,
            elapsed_ns: 3_000_000_000,
            remaining_ns: Some(65_000_000_000),
            done: Some(0.1),
            iops: 38_612.0,
            mb_per_s: 316.3,
            p50_ns: 1_230_000,
            p99_ns: 2_180_000,
            cpus: 1.296,
            errors: 0,
            steady: None,
        }
    }

    #[test]
    fn a_line_tells_everything_in_short() {
        assert_eq!(
            line(&snapshot()),
            "main: measuring, 1:05 left  38,612 IOPS  316 MB/s  p50 1.23 ms  p99 2.18 ms  CPU 1.30"
        );
        let waiting = Snapshot {
            stage: Stage::Settling,
            phases: 3,
            remaining_ns: None,
            steady: Some(SteadyProgress { rounds: 5, range: 0.34, slope: -0.12 }),
            errors: 2,
            ..snapshot()
        };
        assert_eq!(
            line(&waiting),
            "main (1 of 3): settling, 3 s so far  38,612 IOPS  316 MB/s  p50 1.23 ms  p99 2.18 ms  CPU 1.30  steady: range 34 of 20 %, slope 12 of 10 %  2 FAILED"
        );
        let early = Snapshot { steady: Some(SteadyProgress { rounds: 2, range: 0.0, slope: 0.0 }), ..snapshot() };
        assert!(line(&early).ends_with("steady: 2 of 5 rounds"));
    }

    #[test]
    fn a_phase_cannot_drive_the_terminal() {
        let hostile = Snapshot { phase: "a\x1b[2Jb\rc", ..snapshot() };
        assert!(line(&hostile).starts_with("a\\u{1b}[2Jb\\rc: measuring"), "{}", line(&hostile));
        assert!(!line(&Snapshot { phases: 2, ..hostile }).contains(char::is_control));
    }

    #[test]
    fn times_are_short() {
        assert_eq!([0, 6_200_000_000, 65_000_000_000, 7_260_000_000_000].map(clock).join(" "), "0 s 7 s 1:05 2:01:00");
    }

    #[test]
    fn it_goes_on_until_a_signal_comes() {
        let display = LiveDisplay::new(true, Signals::default().patient());
        assert!(display.update(&snapshot()));
    }
}
