//! What hangs is told by name, and ended: a request that rests for ever would otherwise stop a test
//! without a word.
//!
//! A guard is held while something runs. When its time is over before it is dropped, the alarm says
//! what was under way and ends the process, for threads that wait cannot be ended one by one. Under
//! a scheduler of tests nothing needs it: the scheduler tells when all threads wait.

use std::{
    sync::mpsc::{RecvTimeoutError, Sender, channel},
    thread,
    time::Duration,
};

/// How long anything may take that ends within a second when nothing is wrong.
pub const LIMIT: Duration = Duration::from_secs(180);

/// See the module.
#[derive(Debug)]
#[must_use = "the watch ends when it is dropped"]
pub struct Watchdog {
    /// Dropped with the guard, which the thread hears.
    _alive: Sender<()>,
}

impl Watchdog {
    /// Watches until it is dropped, [`LIMIT`] at most.
    pub fn over(what: impl Into<String>) -> Self {
        Self::with_alarm(what, LIMIT, |what| {
            eprintln!(
                "HANG: {what} has not ended within {} s: a request rests and is not woken, or a block stays taken",
                LIMIT.as_secs()
            );
            std::process::abort();
        })
    }

    /// As [`Watchdog::over`], with another limit and another alarm, which is told what was under
    /// way.
    pub fn with_alarm(what: impl Into<String>, limit: Duration, alarm: impl FnOnce(&str) + Send + 'static) -> Self {
        let (alive, gone) = channel();
        let what = what.into();
        thread::spawn(move || {
            if gone.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                alarm(&what);
            }
        });
        Self { _alive: alive }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_takes_too_long_is_told_by_name_and_what_ends_in_time_is_not() {
        let (sender, told) = channel();
        let watch = |limit| {
            let sender = sender.clone();
            Watchdog::with_alarm("a test", limit, move |what| sender.send(what.to_owned()).unwrap())
        };
        drop(watch(Duration::from_secs(60)));
        let _late = watch(Duration::from_millis(5));
        assert_eq!(told.recv_timeout(Duration::from_secs(60)), Ok("a test".to_owned()));
        assert!(told.recv_timeout(Duration::from_millis(20)).is_err());
    }
}
