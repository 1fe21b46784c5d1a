//! What the processors did: the generator's process, and each core of the machine.
//!
//! The process is asked when the window opens and closes, by the first measuring thread that gets
//! there (a system call of a microsecond, once), so that nothing of the warm-up is in it. The cores
//! are read from `/proc/stat` by the conductor, and only as fine as the kernel counts there:
//! hundredths of a second. CPU time is turned into cycles by the rate of the time-stamp counter,
//! which is measured over the run against the monotonic clock.

use crate::{
    clock::CpuTime,
    record::{CoreRecord, CpuRecord},
};
use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

/// `/proc/stat` counts in hundredths of a second, whatever the kernel's own tick (USER_HZ).
const TICK_NS: u64 = 10_000_000;

/// A reading of the process's CPU time that the first comer takes.
#[derive(Debug, Default)]
pub(crate) struct Reading {
    is_taken: AtomicBool,
    time: Mutex<Option<CpuTime>>,
}

impl Reading {
    /// Takes it, unless somebody has.
    pub(crate) fn take(&self) {
        if !self.is_taken.swap(true, Ordering::Relaxed) {
            self.take_again();
        }
    }

    /// Takes it, in the place of an earlier one.
    pub(crate) fn take_again(&self) {
        let now = CpuTime::of_process();
        *self.time.lock().unwrap_or_else(PoisonError::into_inner) = Some(now);
    }

    /// What was read.
    pub(crate) fn get(&self) -> Option<CpuTime> {
        *self.time.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The cores' times since the machine was started.
#[derive(Debug, Clone, Default)]
pub(crate) struct Cores(Vec<CoreRecord>);

impl Cores {
    /// Now; none where the system does not tell.
    pub(crate) fn now() -> Self {
        Self::parse(&std::fs::read_to_string("/proc/stat").unwrap_or_default())
    }

    fn parse(stat: &str) -> Self {
        let is_core = |line: &&str| line.starts_with("cpu") && !line.starts_with("cpu ");
        Self(stat.lines().filter(is_core).map(core).collect())
    }

    /// From `earlier` to now.
    pub(crate) fn since(&self, earlier: &Self) -> Vec<CoreRecord> {
        let difference = |(now, then): (&CoreRecord, &CoreRecord)| CoreRecord {
            user_ns: now.user_ns.saturating_sub(then.user_ns),
            system_ns: now.system_ns.saturating_sub(then.system_ns),
            irq_ns: now.irq_ns.saturating_sub(then.irq_ns),
            iowait_ns: now.iowait_ns.saturating_sub(then.iowait_ns),
            idle_ns: now.idle_ns.saturating_sub(then.idle_ns),
            stolen_ns: now.stolen_ns.saturating_sub(then.stolen_ns),
        };
        self.0.iter().zip(&earlier.0).map(difference).collect()
    }
}

/// `cpu0 user nice system idle iowait irq softirq steal guest guest_nice`; guest time is in user
/// time already.
fn core(line: &str) -> CoreRecord {
    let ticks: Vec<u64> = line.split_whitespace().skip(1).map(|field| field.parse().unwrap_or(0)).collect();
    let ns = |index: usize| ticks.get(index).copied().unwrap_or(0).saturating_mul(TICK_NS);
    CoreRecord {
        user_ns: ns(0) + ns(1),
        system_ns: ns(2),
        irq_ns: ns(5) + ns(6),
        iowait_ns: ns(4),
        idle_ns: ns(3),
        stolen_ns: ns(7),
    }
}

/// The time-stamp counter against the monotonic clock.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CounterRate {
    begun: Instant,
    counter: Option<u64>,
}

impl CounterRate {
    /// Begins to measure.
    pub(crate) fn begin() -> Self {
        Self { begun: Instant::now(), counter: diskwright_store::cycle_counter() }
    }

    /// Counts a second; 0 where there is no counter.
    pub(crate) fn hz(&self) -> f64 {
        let (Some(then), Some(now)) = (self.counter, diskwright_store::cycle_counter()) else { return 0.0 };
        now.wrapping_sub(then) as f64 / self.begun.elapsed().as_secs_f64().max(1e-9)
    }
}

/// The record of a window.
pub(crate) fn record(start: &Reading, end: &Reading, cores: Vec<CoreRecord>, tsc_hz: f64) -> CpuRecord {
    let used = match (start.get(), end.get()) {
        (Some(start), Some(end)) => end - start,
        _ => CpuTime::default(),
    };
    CpuRecord { process_user_ns: used.user_ns, process_system_ns: used.system_ns, cores, tsc_hz, hardware_cycles: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_are_read_and_subtracted() {
        let stat = |user: u64, idle: u64| {
            format!("cpu  9 9 9 9\ncpu0 {user} 1 2 {idle} 3 4 5 6 7 8\ncpu1 0 0 0 {idle}\nintr 5\n")
        };
        let (then, now) = (Cores::parse(&stat(10, 100)), Cores::parse(&stat(25, 250)));
        let spent = now.since(&then);
        assert_eq!(spent.len(), 2);
        assert_eq!((spent[0].user_ns, spent[0].idle_ns), (150_000_000, 1_500_000_000));
        assert_eq!(spent[1], CoreRecord { idle_ns: 1_500_000_000, ..CoreRecord::default() });
        assert_eq!(Cores::parse(&stat(10, 100)).0[0].irq_ns, 90_000_000);
        assert!(!Cores::now().0.is_empty(), "this system has a /proc/stat");
    }

    #[test]
    fn the_first_reading_stays_until_it_is_taken_again() {
        let reading = Reading::default();
        assert_eq!(reading.get(), None);
        reading.take();
        let first = reading.get().unwrap();
        let busy = Instant::now();
        while busy.elapsed().as_millis() < 3 {}
        reading.take();
        assert_eq!(reading.get(), Some(first));
        reading.take_again();
        assert!(reading.get().unwrap().total_ns() > first.total_ns());
    }
}
