//! The time budget of a quick study.
//!
//! Before each workload the length of a cell is computed from the time left and the number of cells
//! left. So slow preparation or a slow disk makes cells shorter; no workload is left out.

use std::time::{Duration, Instant};

/// Time that a cell needs besides its window: opening and draining its queue, work of the kernel.
const CELL_OVERHEAD: Duration = Duration::from_millis(12);

/// A deadline, and limits for the length of a cell.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Budget {
    /// End of the study; `None` without a deadline.
    deadline: Option<Instant>,
    /// Shortest length of a cell.
    shortest: Duration,
    /// Longest length of a cell.
    longest: Duration,
    /// Time that a cell needs besides its length.
    overhead: Duration,
}

impl Budget {
    /// Cells of this length, without a deadline.
    pub(crate) fn fixed(cell: Duration) -> Self {
        Self { deadline: None, shortest: cell, longest: cell, overhead: CELL_OVERHEAD }
    }

    /// Cells between `shortest` and `longest`, so that the study ends `total` after `start` if
    /// possible.
    pub(crate) fn until(start: Instant, total: Duration, shortest: Duration, longest: Duration) -> Self {
        Self { deadline: Some(start + total), shortest, longest, overhead: CELL_OVERHEAD }
    }

    /// Length of the next cell. `cells_left` includes it.
    pub(crate) fn cell(&self, now: Instant, cells_left: usize) -> Duration {
        let Some(deadline) = self.deadline else { return self.longest };
        let left = deadline.saturating_duration_since(now);
        let each = left / u32::try_from(cells_left.max(1)).unwrap_or(u32::MAX);
        each.saturating_sub(self.overhead).clamp(self.shortest, self.longest)
    }

    /// The budget with cells that need this time besides their length.
    pub(crate) fn with_overhead(self, overhead: Duration) -> Self {
        Self { overhead, ..self }
    }

    /// The budget with no cell longer than `longest`; a budget without a deadline is unchanged.
    pub(crate) fn at_most(self, longest: Duration) -> Self {
        if self.deadline.is_none() {
            return self;
        }
        Self { longest: self.longest.min(longest).max(self.shortest), ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    #[test]
    fn the_time_left_is_shared_among_the_cells_left() {
        let start = Instant::now();
        let budget = Budget::until(start, MS(100_000), MS(30), MS(400));
        assert_eq!(budget.cell(start, 500), MS(188));
        // Half the time is over and no cell is measured: cells are about half as long.
        assert_eq!(budget.cell(start + MS(50_000), 500), MS(88));
        assert_eq!(budget.with_overhead(MS(100)).cell(start, 500), MS(100));
        assert_eq!(budget.cell(start, 10), MS(400), "never longer than the longest");
        assert_eq!(budget.cell(start + MS(200_000), 500), MS(30), "never shorter than the shortest, even too late");
    }

    #[test]
    fn without_a_deadline_cells_have_the_given_length() {
        let budget = Budget::fixed(MS(1500));
        assert_eq!(budget.cell(Instant::now(), 1_000_000), MS(1500));
        assert_eq!(budget.at_most(MS(10)).cell(Instant::now(), 1), MS(1500));
    }
}
