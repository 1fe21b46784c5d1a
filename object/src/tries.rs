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
/// How long an opening tries to reach a server at all: its name may be wrong.
const REACH: Duration = Duration::from_secs(5);

/// The tries of one request.
#[derive(Debug)]
pub(crate) struct Tries {
    begun: Instant,
    timeout: Duration,
    /// How long no connection may be made.
    reach: Duration,
    pause: Duration,
}

impl Tries {
    /// The first try begins now.
    pub(crate) fn new(timeout: Duration) -> Self {
        Self { begun: Instant::now(), timeout, reach: timeout, pause: PAUSE_MIN }
    }

    /// The tries of the request that opens an object.
    pub(crate) fn of_opening(timeout: Duration) -> Self {
        Self { reach: REACH.min(timeout), ..Self::new(timeout) }
    }

    /// Gives a try its time. The client ends a try in which the server is silent for the timeout;
    /// one that sends a little from time to time has [`SLOW`] times as long.
    pub(crate) async fn limited<T>(&self, ask: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
        timeout(self.timeout * SLOW, ask).await.unwrap_or_else(|_| Err(Failure::passing("it sends too slowly")))
    }

    /// The final result, or `None` after a pause: then it is to be tried again.
    pub(crate) async fn judge<T>(&mut self, name: &str, result: Result<T, Failure>) -> Option<Result<T>> {
        let (last, wanted, limit) = match result {
            Ok(found) => return Some(Ok(found)),
            Err(Failure::Final(error)) => return Some(Err(error)),
            Err(Failure::Passing { said, pause, is_connected }) => {
                (said, pause, if is_connected { self.timeout } else { self.reach })
            }
        };
        let pause = wanted.unwrap_or(self.pause);
        if self.begun.elapsed() + pause >= limit {
            let seconds = limit.as_secs();
            return Some(Err(ObjectError::Unreachable { name: name.into(), seconds, last }));
        }
        sleep(pause).await;
        self.pause = (self.pause * 3).min(PAUSE_MAX);
        None
    }
}
