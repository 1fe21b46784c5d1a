//! Progress of a long operation: a bar on a terminal, a line every few seconds elsewhere, nothing
//! with `--quiet` or within the first two seconds.
//!
//! Everything goes to standard error. The library calls back with bytes done and bytes in all.
//! After a signal the answer is `false`, and the library removes what it has begun.

use crate::{signals::Patience, sizes::Human};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::{
    env,
    io::{self, IsTerminal, Write},
    time::{Duration, Instant},
};

/// An operation that ends sooner shows nothing.
const SILENCE: Duration = Duration::from_secs(2);
/// Interval between two lines without a terminal.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// When a line is due without a terminal: none within the first two seconds of a step, so that
/// short steps leave no line in a log, and then one every five seconds.
#[derive(Debug)]
pub(crate) struct Pace {
    step_began: Instant,
    last_line: Option<Instant>,
    /// A line is due at once, because a step has begun and each is wanted.
    at_once: bool,
    every_step: bool,
}

/// With the value "steps" every step of the lab writes a line when it begins, however short it is:
/// for programs that wait for a step.
const EVERY_STEP: &str = "DISKWRIGHT_PROGRESS";

impl Pace {
    pub(crate) fn new(now: Instant) -> Self {
        Self { step_began: now, last_line: None, at_once: false, every_step: false }
    }

    /// The same for a display that names its steps.
    pub(crate) fn of_steps(now: Instant) -> Self {
        let every_step = env::var_os(EVERY_STEP).is_some_and(|value| value == "steps");
        Self { every_step, ..Self::new(now) }
    }

    /// Begins the next step. The interval to the last line still counts.
    pub(crate) fn next_step(&mut self, now: Instant) {
        self.step_began = now;
        self.at_once = self.every_step;
    }

    /// Whether a line is due. If so, it counts as written.
    pub(crate) fn is_due(&mut self, now: Instant) -> bool {
        let is_long = now >= self.step_began + SILENCE;
        let is_due = self.at_once || is_long && self.last_line.is_none_or(|last| now >= last + LINE_EVERY);
        if is_due {
            self.at_once = false;
            self.last_line = Some(now);
        }
        is_due
    }
}
/// Minimum interval between two drawings of the bar.
const DRAW_EVERY: Duration = Duration::from_millis(100);

#[derive(Debug)]
enum Show {
    Nothing,
    Bar(Option<ProgressBar>),
    Lines,
}

/// The display of one operation. Dropped, it wipes its bar.
#[derive(Debug)]
pub struct ProgressDisplay {
    doing: &'static str,
    then: Option<&'static str>,
    /// What is counted: `None` for bytes.
    unit: Option<&'static str>,
    show: Show,
    patience: Patience,
    started: Instant,
    phase_started: Instant,
    first_phase: Option<Duration>,
    last_bytes: u64,
    /// When the bar is drawn next.
    next: Instant,
    pace: Pace,
}

impl ProgressDisplay {
    /// `doing` is one word: "converting".
    pub fn new(doing: &'static str, quiet: bool, patience: Patience) -> Self {
        let show = match (quiet, io::stderr().is_terminal()) {
            (true, _) => Show::Nothing,
            (false, true) => Show::Bar(None),
            (false, false) => Show::Lines,
        };
        let started = Instant::now();
        Self {
            doing,
            then: None,
            unit: None,
            show,
            patience,
            started,
            phase_started: started,
            first_phase: None,
            last_bytes: 0,
            next: started + SILENCE,
            pace: Pace::new(started),
        }
    }

    /// Names the second phase, which begins when the count of bytes starts again.
    pub fn then(mut self, doing: &'static str) -> Self {
        self.then = Some(doing);
        self
    }

    /// Counts things ("clones") instead of bytes.
    pub fn counting(mut self, unit: &'static str) -> Self {
        self.unit = Some(unit);
        self
    }

    /// Shows `done_bytes` of `total_bytes`, if the interval has passed. `false` stops the
    /// operation.
    pub fn update(&mut self, done_bytes: u64, total_bytes: u64) -> bool {
        let now = Instant::now();
        if done_bytes < self.last_bytes
            && let Some(next) = self.then.take()
        {
            self.first_phase = Some(now - self.phase_started);
            self.phase_started = now;
            self.doing = next;
            if let Show::Bar(bar) = &mut self.show
                && let Some(bar) = bar.take()
            {
                bar.finish_and_clear();
            }
        }
        self.last_bytes = done_bytes;
        match &mut self.show {
            Show::Bar(bar) if now >= self.next => {
                self.next = now + DRAW_EVERY;
                let bar = bar.get_or_insert_with(|| {
                    new_bar(self.doing, self.unit, total_bytes).with_elapsed(now - self.phase_started)
                });
                bar.set_length(total_bytes);
                bar.set_position(done_bytes);
            }
            Show::Lines if self.pace.is_due(now) => {
                let _ = writeln!(
                    io::stderr(),
                    "diskwright: {}",
                    line(self.doing, self.unit, done_bytes, total_bytes, now - self.started)
                );
            }
            _ => {}
        }
        !self.patience.should_stop()
    }

    /// Time since the operation began.
    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// Time of the first phase, or so far.
    pub fn first_phase(&self) -> Duration {
        self.first_phase.unwrap_or_else(|| self.elapsed())
    }
}

impl Drop for ProgressDisplay {
    fn drop(&mut self) {
        if let Show::Bar(Some(bar)) = &self.show {
            bar.finish_and_clear();
        }
    }
}

fn new_bar(doing: &'static str, unit: Option<&'static str>, total_bytes: u64) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(total_bytes), ProgressDrawTarget::stderr());
    let counts = match unit {
        None => "{binary_bytes} of {binary_total_bytes}  {binary_bytes_per_sec}".to_owned(),
        Some(unit) => format!("{{pos}} of {{len}} {unit}  {{per_sec}}"),
    };
    let template = format!("{{msg}} {{wide_bar}} {{percent:>3}} %  {counts}  {{eta}} left");
    if let Ok(style) = ProgressStyle::with_template(&template) {
        bar.set_style(style.progress_chars("█▉▊▋▌▍▎▏ "));
    }
    bar.with_message(doing)
}

fn line(doing: &str, unit: Option<&str>, done_bytes: u64, total_bytes: u64, elapsed: Duration) -> String {
    let percent =
        if total_bytes == 0 { 100 } else { (u128::from(done_bytes) * 100 / u128::from(total_bytes)).min(100) };
    let rate = rate(done_bytes, elapsed);
    let mut line = match unit {
        None => format!("{doing}: {percent} %, {} of {}, {}/s", Human(done_bytes), Human(total_bytes), Human(rate)),
        Some(unit) => format!("{doing}: {percent} %, {done_bytes} of {total_bytes} {unit}, {rate}/s"),
    };
    if let Some(seconds) = total_bytes.saturating_sub(done_bytes).checked_div(rate) {
        line.push_str(&format!(", {} left", whole_seconds(seconds)));
    }
    line
}

/// Bytes a second.
pub fn rate(bytes: u64, elapsed: Duration) -> u64 {
    (bytes as f64 / elapsed.as_secs_f64().max(1e-9)) as u64
}

/// How long a transfer took, and its rate, behind what it did: `, in 12 s (340 MiB/s)`.
pub fn took(bytes: u64, elapsed: Duration) -> String {
    format!(", in {} ({}/s)", duration(elapsed), Human(rate(bytes, elapsed)))
}

/// A duration for people: `0.42 s`, `12 s`, `3 min 20 s`, `2 h 5 min`.
pub fn duration(time: Duration) -> String {
    match time.as_secs() {
        0..10 => format!("{:.2} s", time.as_secs_f64()),
        seconds => whole_seconds(seconds),
    }
}

fn whole_seconds(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        _ => format!("{} h {} min", seconds / 3600, seconds / 60 % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::signals::Signals;

    #[test]
    fn a_line_tells_rate_and_rest() {
        let text = line("converting", None, 1 << 30, 4 << 30, Duration::from_secs(2));
        assert_eq!(text, "converting: 25 %, 1 GiB of 4 GiB, 512 MiB/s, 6 s left");
        let text = line("making", Some("clones"), 30, 90, Duration::from_secs(3));
        assert_eq!(text, "making: 33 %, 30 of 90 clones, 10/s, 6 s left");
        assert_eq!(
            line("converting", None, 0, 4 << 30, Duration::from_secs(2)),
            "converting: 0 %, 0 bytes of 4 GiB, 0 bytes/s"
        );
        assert_eq!(
            line("converting", None, 0, 0, Duration::from_secs(2)),
            "converting: 100 %, 0 bytes of 0 bytes, 0 bytes/s"
        );
    }

    #[test]
    fn short_steps_leave_no_line_and_long_ones_one_every_five_seconds() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_millis((seconds * 1000.0) as u64);
        let mut pace = Pace::new(start);
        for second in 1..20 {
            // A new step every second.
            assert!(!pace.is_due(at(f64::from(second))), "{second}");
            pace.next_step(at(f64::from(second)));
        }
        let lines: Vec<u32> = (0..200).filter(|tenth| pace.is_due(at(19.0 + f64::from(*tenth) / 10.0))).collect();
        assert_eq!(lines, [20, 70, 120, 170]);
        pace.next_step(at(37.0));
        assert!(!pace.is_due(at(40.9)) && pace.is_due(at(41.0)), "the interval counts across steps");
    }

    #[test]
    fn durations() {
        let text = |seconds| duration(Duration::from_secs_f64(seconds));
        assert_eq!([text(0.42), text(12.7), text(200.0), text(7500.0)], ["0.42 s", "12 s", "3 min 20 s", "2 h 5 min"]);
    }

    #[test]
    fn a_count_that_begins_again_is_the_next_phase() {
        let mut display = ProgressDisplay::new("converting", true, Signals::default().patient()).then("verifying");
        display.update(5, 5);
        assert_eq!((display.doing, display.first_phase), ("converting", None));
        display.update(0, 5);
        assert_eq!(display.doing, "verifying");
        assert!(display.first_phase.is_some());
    }

    #[test]
    fn goes_on_until_told() {
        let mut display = ProgressDisplay::new("testing", true, Signals::default().patient());
        assert!(display.update(1, 2));
    }
}
