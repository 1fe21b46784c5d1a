//! One step for all agents at the same time: a short-lived thread for each.

use super::remote::Remote;
use crate::error::{FleetError, Result};
use diskwright_load::{Job, seeds};
use std::{
    thread,
    time::{Duration, Instant},
};

/// Stack of a thread that talks to one agent.
const STACK_BYTES: usize = 512 << 10;
/// How often an agent is told that its controller is there, while it has nothing to do.
const STAY: Duration = Duration::from_secs(5);
/// How often it is looked whether it has something to do.
const STAY_LOOK: Duration = Duration::from_millis(20);

/// Does something with each agent, in a thread for each. The results are in the order of agents.
pub(super) fn each<'a, T: Send, R: Send>(all: &'a mut [R], work: impl Fn(usize, &'a mut R) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = all
            .iter_mut()
            .enumerate()
            .map(|(number, one)| {
                let builder = thread::Builder::new().stack_size(STACK_BYTES);
                builder.spawn_scoped(scope, move || work(number, one))
            })
            .collect();
        let joined = threads.into_iter().map(|thread| match thread.map(|thread| thread.join()) {
            Ok(Ok(value)) => value,
            Ok(Err(panic)) => std::panic::resume_unwind(panic),
            Err(error) => panic!("a thread for an agent cannot be started: {error}"),
        });
        joined.collect()
    })
}

/// Keeps an agent's connection in use until something is over.
pub(super) fn stay_until(remote: &mut Remote, is_over: &dyn Fn() -> bool) {
    let mut last = Instant::now();
    while !is_over() {
        thread::sleep(STAY_LOOK);
        if last.elapsed() >= STAY {
            remote.stay();
            last = Instant::now();
        }
    }
}

/// The job of an agent: with a seed of its own, so that agents that share a disk do not read the
/// same blocks at the same time.
pub(super) fn seeded(job: Job, number: usize) -> Job {
    Job { seed: seeds::of_window(job.seed, "agent", number), ..job }
}

/// Every agent that failed, as one error. Agents that were stopped because another one failed are
/// not named.
pub(super) fn all_or_failed<T>(results: Vec<Result<T>>) -> Result<Vec<T>> {
    let (mut all, mut failed, mut is_stopped) = (Vec::new(), Vec::new(), false);
    for result in results {
        match result {
            Ok(value) => all.push(value),
            Err(FleetError::Stopped) => is_stopped = true,
            Err(error) => failed.push(error),
        }
    }
    match (failed.pop(), failed.len()) {
        (None, _) if is_stopped => Err(FleetError::Stopped),
        (None, _) => Ok(all),
        (Some(error), 0) => Err(error),
        (Some(last), others) => {
            failed.push(last);
            let named: Vec<String> = failed.iter().map(ToString::to_string).collect();
            Err(FleetError::Plan {
                what: format!("{} agents failed:\n  {}", others + 1, named.join("\n  ")),
                hint: "nothing was measured; see each of them".into(),
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(agent: &str) -> Result<u8> {
        Err(FleetError::Refused { name: agent.into(), why: "it is full".into() })
    }

    #[test]
    fn all_agents_that_failed_are_named_and_those_that_were_stopped_are_not() {
        assert_eq!(all_or_failed(vec![Ok(1), Ok(2)]).unwrap(), [1, 2]);
        let stopped = || Err(FleetError::Stopped);
        assert!(matches!(all_or_failed::<u8>(vec![stopped(), Ok(1), stopped()]), Err(FleetError::Stopped)));
        let one = all_or_failed(vec![stopped(), failed("a"), Ok(1)]).unwrap_err();
        assert_eq!(one.to_string(), "a: it is full");
        let two = all_or_failed(vec![failed("a"), stopped(), failed("b")]).unwrap_err().to_string();
        assert!(two.starts_with("2 agents failed:\n  a: it is full\n  b: it is full;"), "{two}");
    }
}
