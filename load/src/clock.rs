//! CPU time, timestamps, steps of the wall clock, and the kernel's clock source.

use nix::sys::{
    resource::{UsageWho, getrusage},
    time::TimeVal,
};
use std::{
    ops::Sub,
    time::{Instant, SystemTime, UNIX_EPOCH},
};

/// CPU time in nanoseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CpuTime {
    /// CPU time in user mode.
    pub user_ns: u64,
    /// CPU time in the kernel.
    pub system_ns: u64,
}

impl CpuTime {
    /// CPU time of this process: all its threads and its io_uring workers.
    ///
    /// Interrupts and kernel threads (writeback, completion work queues) are not part of any
    /// process, so no tool can attribute them. The kernel reports microseconds.
    pub fn of_process() -> Self {
        Self::of(UsageWho::RUSAGE_SELF)
    }

    /// CPU time of the child processes that ended and were waited for.
    pub fn of_children() -> Self {
        Self::of(UsageWho::RUSAGE_CHILDREN)
    }

    fn of(who: UsageWho) -> Self {
        // getrusage fails only for a bad address or a bad `who`. Both are valid here.
        getrusage(who).map_or_else(
            |_| Self::default(),
            |usage| Self { user_ns: nanoseconds(usage.user_time()), system_ns: nanoseconds(usage.system_time()) },
        )
    }

    /// User and kernel time together.
    pub fn total_ns(self) -> u64 {
        self.user_ns + self.system_ns
    }
}

impl Sub for CpuTime {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        Self {
            user_ns: self.user_ns.saturating_sub(earlier.user_ns),
            system_ns: self.system_ns.saturating_sub(earlier.system_ns),
        }
    }
}

fn nanoseconds(time: TimeVal) -> u64 {
    time.tv_sec().unsigned_abs() * 1_000_000_000 + time.tv_usec().unsigned_abs() * 1000
}

/// Runs `work`. Returns its value, its wall time in nanoseconds, and the CPU time of the process.
pub fn timed<T>(work: impl FnOnce() -> T) -> (T, u64, CpuTime) {
    let (cpu, start) = (CpuTime::of_process(), Instant::now());
    let value = work();
    let wall_ns = start.elapsed().as_nanos() as u64;
    (value, wall_ns, CpuTime::of_process() - cpu)
}

/// The current time as `20261120T221749Z`, which sorts by time and is usable in a file name.
pub fn compact_utc_now() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    compact_utc(seconds)
}

fn compact_utc(unix_seconds: u64) -> String {
    let (days, second) = (unix_seconds / 86_400, unix_seconds % 86_400);
    let (year, month, day) = civil_from_days(days);
    format!("{year:04}{month:02}{day:02}T{:02}{:02}{:02}Z", second / 3600, second / 60 % 60, second % 60)
}

/// Converts days since 1970-01-01 into a Gregorian date, by Howard Hinnant's `civil_from_days`.
/// Years begin in March, so that the leap day is the last day of its year.
fn civil_from_days(days: u64) -> (u64, u64, u64) {
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    (year_of_era + era * 400 + u64::from(month <= 2), month, day)
}

/// A point in time on the wall clock, which can be set, and on the monotonic clock, which cannot.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TimePoint {
    wall: SystemTime,
    steady: Instant,
}

impl TimePoint {
    /// The current time of both clocks.
    pub(crate) fn now() -> Self {
        Self { wall: SystemTime::now(), steady: Instant::now() }
    }

    /// Nanoseconds since then on the monotonic clock.
    pub(crate) fn elapsed_ns(&self) -> u64 {
        self.steady.elapsed().as_nanos() as u64
    }

    /// Seconds by which the wall clock was set since then, negative when it was set back; `None`
    /// when it was not set.
    pub(crate) fn stepped_s(&self) -> Option<f64> {
        let passed_s = self.steady.elapsed().as_secs_f64();
        let shown_s = match SystemTime::now().duration_since(self.wall) {
            Ok(forward) => forward.as_secs_f64(),
            Err(back) => -back.duration().as_secs_f64(),
        };
        step_s(shown_s, passed_s)
    }
}

/// The step of the wall clock; `None` for a difference that NTP's slewing explains (up to 500 ppm).
fn step_s(shown_s: f64, passed_s: f64) -> Option<f64> {
    let by_s = shown_s - passed_s;
    (by_s.abs() > 0.5 + passed_s / 1000.0).then_some(by_s)
}

/// Clock sources of the kernel that are read without a system call and without an exit to the
/// hypervisor, in tens of nanoseconds.
const FAST_SOURCES: [&str; 4] = ["tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter"];

/// Whether this clock source of the kernel is fast to read. Reading a slow one (`hpet`, `acpi_pm`,
/// `hyperv_clocksource_msr`) takes a system call or an exit to the hypervisor, about a microsecond.
pub fn is_fast(source: &str) -> bool {
    FAST_SOURCES.contains(&source)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tsc_page_of_hyper_v_is_a_fast_clock_and_its_register_is_not() {
        for source in ["tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter"] {
            assert!(is_fast(source), "{source}");
        }
        for source in ["hyperv_clocksource_msr", "hpet", "acpi_pm", "jiffies", ""] {
            assert!(!is_fast(source), "{source}");
        }
    }

    #[test]
    fn dates_are_calendar_dates() {
        // From `date -u -d @N +%Y%m%dT%H%M%SZ`, with leap days and a century.
        for (seconds, text) in [
            (0, "19700101T000000Z"),
            (951_782_399, "20000228T235959Z"),
            (951_782_400, "20000229T000000Z"),
            (1_709_251_199, "20240229T235959Z"),
            (4_107_542_400, "21000301T000000Z"),
            (1_795_213_069, "20261120T221749Z"),
        ] {
            assert_eq!(compact_utc(seconds), text);
        }
    }

    #[test]
    fn cpu_time_never_runs_backwards() {
        let earlier = CpuTime { user_ns: 5, system_ns: 9 };
        let later = CpuTime { user_ns: 7, system_ns: 8 };
        assert_eq!(later - earlier, CpuTime { user_ns: 2, system_ns: 0 });
    }

    #[test]
    fn a_step_of_the_clock_is_told_from_slewing() {
        let day_s = 86_400.0;
        assert_eq!(step_s(10.0, 10.0), None);
        assert_eq!(step_s(day_s + 43.0, day_s), None, "500 ppm");
        assert_eq!(step_s(3610.0, 10.0), Some(3600.0));
        assert_eq!(step_s(-3590.0, 10.0), Some(-3600.0));
        assert_eq!(TimePoint::now().stepped_s(), None);
        let set_back = TimePoint { wall: SystemTime::now() + std::time::Duration::from_secs(60), ..TimePoint::now() };
        let by_s = set_back.stepped_s().unwrap();
        assert!((-60.5..=-59.5).contains(&by_s), "{by_s}");
    }
}
