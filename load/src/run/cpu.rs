//! CPU time of the generator's process and of each core of the machine.
//!
//! The CPU time of the process is read when the window opens and closes, by the first measuring
//! thread that reaches the boundary (one system call of a microsecond), so that it does not include
//! the warm-up. The conductor reads the cores from `/proc/stat`, which counts in hundredths of a
//! second. CPU time is converted into cycles by the frequency of the time-stamp counter, which is
//! measured against the monotonic clock during the run.

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

/// CPU time of the process at a boundary of the window, read by the first thread that reaches it.
#[derive(Debug, Default)]
pub(crate) struct Reading {
    is_taken: AtomicBool,
    time: Mutex<Option<CpuTime>>,
}

impl Reading {
    /// Reads the CPU time, unless another thread has.
    pub(crate) fn take(&self) {
        if !self.is_taken.swap(true, Ordering::Relaxed) {
            self.take_again();
        }
    }

    /// Reads the CPU time and replaces an earlier reading.
    pub(crate) fn take_again(&self) {
        let now = CpuTime::of_process();
        *self.time.lock().unwrap_or_else(PoisonError::into_inner) = Some(now);
    }

    /// The CPU time; `None` when it has not been read.
    pub(crate) fn get(&self) -> Option<CpuTime> {
        *self.time.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// CPU times of the cores since boot.
#[derive(Debug, Clone, Default)]
pub(crate) struct Cores(Vec<CoreRecord>);

impl Cores {
    /// The current CPU times; empty where `/proc/stat` cannot be read.
    pub(crate) fn now() -> Self {
        Self::parse(&std::fs::read_to_string("/proc/stat").unwrap_or_default())
    }

    fn parse(stat: &str) -> Self {
        let is_core = |line: &&str| line.starts_with("cpu") && !line.starts_with("cpu ");
        Self(stat.lines().filter(is_core).map(core).collect())
    }

    /// The differences to `earlier`.
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

/// Parses `cpu0 user nice system idle iowait irq softirq steal guest guest_nice`. Guest time is
/// part of user time.
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

/// Measures the frequency of the time-stamp counter against the monotonic clock.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CounterRate {
    begun: Instant,
    counter: Option<u64>,
}

impl CounterRate {
    /// Starts the measurement.
    pub(crate) fn begin() -> Self {
        Self { begun: Instant::now(), counter: diskwright_store::cycle_counter() }
    }

    /// Frequency in hertz; 0 where there is no counter.
    pub(crate) fn hz(&self) -> f64 {
        let (Some(then), Some(now)) = (self.counter, diskwright_store::cycle_counter()) else { return 0.0 };
        now.wrapping_sub(then) as f64 / self.begun.elapsed().as_secs_f64().max(1e-9)
    }
}

/// Makes the record of a window.
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
    fn the_first_reading_is_kept_until_it_is_replaced() {
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
