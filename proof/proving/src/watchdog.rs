//! Ends a test that hangs, with a message that names it. Without it, a request that is never woken
//! would stop a test without any output.
//!
//! A guard is held while something runs. If the guard is not dropped within the time limit, the
//! alarm prints what was running and aborts the process, because single threads cannot be ended.
//! Tests under shuttle do not need it: the scheduler reports when all threads wait.

use std::{
    sync::mpsc::{RecvTimeoutError, Sender, channel},
    thread,
    time::Duration,
};

/// Time limit for anything that normally takes less than a second.
pub const LIMIT: Duration = Duration::from_secs(180);

/// The guard.
#[derive(Debug)]
#[must_use = "the watchdog ends when it is dropped"]
pub struct Watchdog {
    /// The thread ends when this sender is dropped.
    _alive: Sender<()>,
}

impl Watchdog {
    /// Watches with the limit [`LIMIT`] until the guard is dropped.
    pub fn over(what: impl Into<String>) -> Self {
        Self::with_alarm(what, LIMIT, |what| {
            eprintln!(
                "HANG: {what} has not ended within {} s: a waiting request was not woken, or a block was not released",
                LIMIT.as_secs()
            );
            std::process::abort();
        })
    }

    /// As [`Watchdog::over`], with another limit and another alarm. The alarm gets the name of what
    /// was running.
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
    fn only_a_guard_that_exceeds_its_limit_raises_the_alarm() {
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
