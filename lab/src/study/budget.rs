//! How a run that must end in time spends it.
//!
//! The time of a cell is computed before each workload from what is left and how many cells
//! are to come, so a slow preparation or a slow disk shortens the cells, not the list of workloads.

use std::time::{Duration, Instant};

/// Around each measured cell: opening its queue, draining it, and what the kernel then has to do.
const CELL_OVERHEAD: Duration = Duration::from_millis(12);

/// Time left to a run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Budget {
    /// When it must be over; `None` for never.
    deadline: Option<Instant>,
    /// No cell is shorter.
    shortest: Duration,
    /// No cell is longer.
    longest: Duration,
}

impl Budget {
    /// Cells of `cell`, however long it takes.
    pub(crate) fn fixed(cell: Duration) -> Self {
        Self { deadline: None, shortest: cell, longest: cell }
    }

    /// Cells between `shortest` and `longest`, so that all is over `total` after `start`, if that
    /// can be.
    pub(crate) fn until(start: Instant, total: Duration, shortest: Duration, longest: Duration) -> Self {
        Self { deadline: Some(start + total), shortest, longest }
    }

    /// How long the next cell may last, with `cells_left` to come, it included.
    pub(crate) fn cell(&self, now: Instant, cells_left: usize) -> Duration {
        let Some(deadline) = self.deadline else { return self.longest };
        let left = deadline.saturating_duration_since(now);
        let each = left / u32::try_from(cells_left.max(1)).unwrap_or(u32::MAX);
        each.saturating_sub(CELL_OVERHEAD).clamp(self.shortest, self.longest)
    }

    /// The same budget with no cell longer than `longest`.
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
    fn what_is_left_is_shared_among_the_cells_to_come() {
        let start = Instant::now();
        let budget = Budget::until(start, MS(100_000), MS(30), MS(400));
        assert_eq!(budget.cell(start, 500), MS(188));
        // Half the time is gone and nothing was measured yet: cells are half as long.
        assert_eq!(budget.cell(start + MS(50_000), 500), MS(88));
        assert_eq!(budget.cell(start, 10), MS(400), "no longer than the longest");
        assert_eq!(budget.cell(start + MS(200_000), 500), MS(30), "late is late, but a cell is still a cell");
    }

    #[test]
    fn without_a_deadline_cells_are_as_asked() {
        let budget = Budget::fixed(MS(1500));
        assert_eq!(budget.cell(Instant::now(), 1_000_000), MS(1500));
        assert_eq!(budget.at_most(MS(10)).cell(Instant::now(), 1), MS(1500));
    }
}
