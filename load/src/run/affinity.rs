//! CPU affinity of the threads of a phase (`Load::cpus`).
//!
//! The threads of a phase are numbered through all its loads. Thread `n` of a load with a list of
//! processors is bound to entry `n` modulo the length of the list. An empty list stands for all
//! processors that the process may use, in ascending order. This is DiskSpd's round robin.
//!
//! A thread binds itself after its queues are open and before its first request. Threads that it
//! starts later (the engine's pool for blocking calls) inherit the affinity. The affinity of
//! io_uring's workers is not changed.
//!
//! Invariant: the list is checked against the processors of the process before the job runs, so a
//! job that names a missing processor makes no request.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::io;

/// Processors that this process may use, ascending.
///
/// # Errors
/// The error of the system call.
pub(crate) fn available() -> io::Result<Vec<u32>> {
    let set = sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).map(|cpu| cpu as u32).collect())
}

/// The processors to which the threads of a load are bound, round-robin; `None`: threads are not
/// bound.
///
/// # Errors
/// A sentence, when the process may not use one of `asked`.
pub(crate) fn list(asked: Option<&[u32]>) -> Result<Option<Vec<u32>>, String> {
    let Some(asked) = asked else { return Ok(None) };
    let available = available().map_err(|error| format!("the processors of this process are unknown: {error}"))?;
    match asked.iter().find(|cpu| !available.contains(cpu)) {
        Some(missing) => {
            Err(format!("processor {missing} is not available; this process may use {}", ranges(&available)))
        }
        None if asked.is_empty() => Ok(Some(available)),
        None => Ok(Some(asked.to_vec())),
    }
}

/// The processor of thread number `thread` of the phase; `None`: the thread is not bound.
pub(crate) fn of_thread(list: Option<&[u32]>, thread: usize) -> Option<u32> {
    let list = list.filter(|list| !list.is_empty())?;
    Some(list[thread % list.len()])
}

/// Binds the calling thread to processor `cpu`.
///
/// # Errors
/// The error of the system call.
pub(crate) fn bind(cpu: u32) -> io::Result<()> {
    let mut set = CpuSet::new();
    if cpu as usize >= CpuSet::MAX_CPU {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    set.set(cpu as usize);
    Ok(sched_setaffinity(None, &set)?)
}

/// A list of processors as ranges: `0-3, 6`.
fn ranges(cpus: &[u32]) -> String {
    let mut parts: Vec<(u32, u32)> = Vec::new();
    for cpu in cpus {
        match parts.last_mut() {
            Some((_, last)) if *last + 1 == *cpu => *last = *cpu,
            _ => parts.push((*cpu, *cpu)),
        }
    }
    let text = |(first, last): &(u32, u32)| if first == last { first.to_string() } else { format!("{first}-{last}") };
    parts.iter().map(text).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_binds_only_itself() {
        let before = available().unwrap();
        let last = *before.last().unwrap();
        let bound = std::thread::spawn(move || {
            bind(last).unwrap();
            available().unwrap()
        });
        assert_eq!(bound.join().unwrap(), [last]);
        assert_eq!(available().unwrap(), before);
        bind(u32::MAX).unwrap_err();
    }

    #[test]
    fn threads_are_bound_to_the_listed_processors_round_robin() {
        let available = available().unwrap();
        assert_eq!(list(None), Ok(None));
        assert_eq!(list(Some(&[])), Ok(Some(available.clone())));
        let first = available[0];
        assert_eq!(list(Some(&[first, first])), Ok(Some(vec![first, first])));
        assert!(list(Some(&[60_000])).unwrap_err().contains("processor 60000 is not available"));
        let taken: Vec<_> = (0..5).map(|thread| of_thread(Some(&[4, 7]), thread)).collect();
        assert_eq!(taken, [4, 7, 4, 7, 4].map(Some));
        assert_eq!((of_thread(None, 3), of_thread(Some(&[]), 3)), (None, None));
        assert_eq!(ranges(&[0, 1, 2, 5, 7, 8]), "0-2, 5, 7-8");
    }
}
