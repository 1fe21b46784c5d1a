//! The findings of a check, in bounded memory.

use crate::{Finding, Severity};

/// Maximum number of listed findings of each severity.
pub(super) const MAX_FINDINGS: usize = 1000;

/// The findings of a check.
#[derive(Default)]
pub(super) struct Findings {
    list: Vec<Finding>,
    /// By severity: number of listed findings, and of those left out.
    counts: [(usize, u64); 3],
}

impl Findings {
    pub fn add(&mut self, severity: Severity, offset_bytes: u64, message: impl Into<String>) {
        let (told, left_out) = &mut self.counts[severity as usize];
        if *told < MAX_FINDINGS {
            *told += 1;
            self.list.push(Finding { severity, offset_bytes, message: message.into() });
        } else {
            *left_out += 1;
        }
    }

    /// All findings sorted by offset, and how many were left out.
    pub fn finish(mut self) -> Vec<Finding> {
        self.list.sort_by_key(|finding| finding.offset_bytes);
        let severities = [Severity::Note, Severity::Leak, Severity::Corrupt];
        for (severity, (_, left_out)) in severities.into_iter().zip(self.counts) {
            if left_out > 0 {
                let offset_bytes = self.list.last().map_or(0, |finding| finding.offset_bytes);
                let message = format!("{left_out} more findings of this kind were left out.");
                self.list.push(Finding { severity, offset_bytes, message });
            }
        }
        self.list
    }
}
