//! Identifies a process by its pid and its start time, because the kernel reuses pids.

use serde::{Deserialize, Serialize};
use std::fs;

/// A process of this machine, which may have ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct Process {
    /// Its number.
    pub pid: u32,
    /// When it started, in clock ticks since the machine's boot.
    pub start_ticks: u64,
}

impl Process {
    /// The process that has this pid now.
    pub fn of(pid: u32) -> Option<Self> {
        Some(Self { pid, start_ticks: start_ticks(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)? })
    }

    /// This process.
    pub fn this() -> Self {
        let pid = std::process::id();
        Self::of(pid).unwrap_or(Self { pid, start_ticks: 0 })
    }

    /// Whether the process is running. A zombie is not.
    pub fn is_alive(self) -> bool {
        Self::of(self.pid) == Some(self)
    }
}

/// Field 22 of `/proc/PID/stat`; `None` for a zombie. The process name in field 2 may contain
/// spaces and `)`, so fields are counted from the last `)`.
fn start_ticks(stat: &str) -> Option<u64> {
    let mut fields = stat[stat.rfind(')')? + 1..].split_ascii_whitespace();
    if matches!(fields.next()?, "Z" | "X") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

/// The process name for messages. A process chooses its name, so control characters are replaced.
pub fn name_of(pid: u32) -> String {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    let name: String = name.trim_end().chars().map(|c| if c.is_control() { '?' } else { c }).collect();
    if name.is_empty() { "a program".into() } else { name }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn start_times_are_parsed_after_odd_names() {
        let rest = "S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20";
        assert_eq!(start_ticks(&format!("12 (a) b (c)) {rest}")), Some(4711));
        assert_eq!(start_ticks(&format!("12 (x) {}", rest.replacen('S', "Z", 1))), None);
        assert_eq!(start_ticks("12 (x"), None);
    }

    #[test]
    fn this_process_is_alive_and_another_start_time_is_not() {
        let this = Process::this();
        assert!(this.is_alive());
        assert!(!Process { start_ticks: this.start_ticks + 1, ..this }.is_alive());
    }
}
