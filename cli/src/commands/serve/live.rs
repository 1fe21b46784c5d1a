//! The live line of a server: what it did since the line was last drawn.
//!
//! On a terminal the line is drawn over; elsewhere there is one every few seconds.

use crate::sizes::Human;
use diskwright_serve::metrics::{BUCKETS_US, COMMANDS, Totals};
use indicatif::ProgressBar;
use std::{
    io::{self, IsTerminal, Write},
    time::{Duration, Instant},
};

/// Interval between two lines without a terminal.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// The live line. Dropped, it is wiped.
#[derive(Debug)]
pub struct LiveLine {
    bar: Option<ProgressBar>,
    last: Totals,
    last_at: Instant,
}

impl LiveLine {
    /// Nothing is drawn before the first [`LiveLine::show`].
    pub fn new() -> Self {
        let bar = io::stderr().is_terminal().then(ProgressBar::new_spinner);
        Self { bar, last: Totals::default(), last_at: Instant::now() }
    }

    /// Draws the rates since the last drawing, if that was long enough ago.
    pub fn show(&mut self, totals: &Totals) {
        let elapsed = self.last_at.elapsed();
        if self.bar.is_none() && elapsed < LINE_EVERY {
            return;
        }
        let line = line(&self.last, totals, elapsed);
        match &self.bar {
            Some(bar) => bar.set_message(line),
            // A closed standard error does not stop the server.
            None => drop(writeln!(io::stderr(), "{line}")),
        }
        (self.last, self.last_at) = (totals.clone(), Instant::now());
    }
}

impl Drop for LiveLine {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// "3 connections, 32 in flight; read 12000/s 47 MiB/s, write 310/s 1.2 MiB/s, flush 2/s; 9 of 10
/// within 64 µs"
fn line(before: &Totals, now: &Totals, elapsed: Duration) -> String {
    let seconds = elapsed.as_secs_f64().max(1e-3);
    let mut parts = Vec::new();
    let mut buckets = [0; BUCKETS_US.len() + 1];
    let mut errors = 0;
    for (name, (before, now)) in COMMANDS.iter().zip(before.commands.iter().zip(&now.commands)) {
        let requests = now.requests - before.requests;
        errors += now.errors - before.errors;
        buckets
            .iter_mut()
            .zip(now.buckets.iter().zip(&before.buckets))
            .for_each(|(sum, (now, before))| *sum += now - before);
        if requests > 0 {
            let bytes = if *name == "flush" {
                String::new()
            } else {
                format!(" {}/s", Human(((now.bytes - before.bytes) as f64 / seconds) as u64))
            };
            parts.push(format!("{name} {:.0}/s{bytes}", requests as f64 / seconds));
        }
    }
    let mut out = format!("{} connections, {} in flight", now.connections, now.in_flight);
    if parts.is_empty() {
        out.push_str("; idle");
    } else {
        out.push_str("; ");
        out.push_str(&parts.join(", "));
        out.push_str("; ");
        out.push_str(&most_within(&buckets));
    }
    if errors > 0 {
        out.push_str(&format!("; {errors} failed"));
    }
    out
}

/// The 90th percentile.
fn most_within(buckets: &[u64]) -> String {
    let wanted = (buckets.iter().sum::<u64>() * 9).div_ceil(10);
    let mut below = 0;
    for (bound_us, count) in BUCKETS_US.iter().zip(buckets) {
        below += count;
        if below >= wanted {
            return format!("9 of 10 within {bound_us} µs");
        }
    }
    "9 of 10 within more than a second".into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_tells_what_happened() {
        let before = Totals::default();
        let mut now = Totals { connections: 3, in_flight: 32, ..Totals::default() };
        assert_eq!(line(&before, &now, Duration::from_secs(2)), "3 connections, 32 in flight; idle");
        now.commands[0].requests = 2000;
        now.commands[0].bytes = 8 << 20;
        now.commands[0].buckets[3] = 2000;
        now.commands[2].requests = 4;
        now.commands[2].errors = 1;
        now.commands[2].buckets[10] = 4;
        assert_eq!(
            line(&before, &now, Duration::from_secs(2)),
            "3 connections, 32 in flight; read 1000/s 4 MiB/s, flush 2/s; 9 of 10 within 64 µs; 1 failed"
        );
    }
}
