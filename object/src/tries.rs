//! How often a request is repeated: after failures that may pass, with growing pauses, for as long
//! as the timeout.

use crate::{
    answer::Failure,
    error::{ObjectError, Result},
};
use std::{
    future::Future,
    time::{Duration, Instant},
};
use tokio::time::{sleep, timeout};

/// The first and the longest pause.
const PAUSE_MIN: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// How many times the timeout a block may take that comes slowly.
const SLOW: u32 = 10;

/// The tries of one request.
#[derive(Debug)]
pub(crate) struct Tries {
    begun: Instant,
    timeout: Duration,
    pause: Duration,
}

impl Tries {
    /// The first try begins now.
    pub(crate) fn new(timeout: Duration) -> Self {
        Self { begun: Instant::now(), timeout, pause: PAUSE_MIN }
    }

    /// Gives a try its time. The client ends a try in which the server is silent for the timeout;
    /// one that sends a little from time to time has [`SLOW`] times as long.
    pub(crate) async fn limited<T>(&self, ask: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
        timeout(self.timeout * SLOW, ask).await.unwrap_or_else(|_| Err(Failure::passing("it sends too slowly")))
    }

    /// The final result, or `None` after a pause: then it is to be tried again.
    pub(crate) async fn judge<T>(&mut self, name: &str, result: Result<T, Failure>) -> Option<Result<T>> {
        let (last, wanted) = match result {
            Ok(found) => return Some(Ok(found)),
            Err(Failure::Final(error)) => return Some(Err(error)),
            Err(Failure::Passing { said, pause }) => (said, pause),
        };
        let pause = wanted.unwrap_or(self.pause);
        if self.begun.elapsed() + pause >= self.timeout {
            let seconds = self.timeout.as_secs();
            return Some(Err(ObjectError::Unreachable { name: name.into(), seconds, last }));
        }
        sleep(pause).await;
        self.pause = (self.pause * 3).min(PAUSE_MAX);
        None
    }
}
