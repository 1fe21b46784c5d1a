//! The loop that measures cells in interleaved rounds.
//!
//! ```text
//!   round 1: every cell once ──▶ round 2: every cell once, in another order ──▶ ...
//!            └─ report ─▶ measure                          stop: by the user, or by the deadline
//! ```
//!
//! Every study, sweep and comparison measures in this loop, so three rules hold for all of them:
//!
//! - **Order.** A round measures each cell once, in an order that changes from round to round
//!   ([`summary::round_order`]). So a drift of the machine's speed affects all cells alike.
//! - **Seeds.** The requests of a window depend on the seed of the experiment, the cell and the
//!   round ([`job_of`]), and never on the target.
//! - **Stop.** If the user stops it, during a window or between windows, only whole rounds count.
//!   With a deadline no round begins that would end too late, except the first.

use crate::{
    LabError, Result,
    progress::{Progress, report},
};
use diskwright_load::{Job, run::Watch, seeds};
use diskwright_stats::summary;
use std::time::Instant;

/// Number, order and deadline of the rounds.
#[derive(Debug, Clone, Copy)]
pub struct Rounds {
    /// Rounds of each cell.
    pub rounds: usize,
    /// Seed of the order of cells.
    pub seed: u64,
    /// Groups of this many neighbouring cells are measured without interruption, because their
    /// cells are compared with each other. `None`: all cells are one group.
    pub together: Option<usize>,
    /// Deadline: no round begins that would end later, if it takes as long as the round before.
    pub until: Option<Instant>,
}

impl Rounds {
    /// This many rounds without a deadline; all cells are one group.
    pub fn new(rounds: usize, seed: u64) -> Self {
        Self { rounds, seed, together: None, until: None }
    }

    /// Indices of the cells in the order of `round`.
    fn order(&self, cells: usize, round: usize) -> Vec<usize> {
        let together = self.together.unwrap_or(cells).max(1);
        let groups = (0..cells).step_by(together).enumerate();
        let of_group = |(number, first): (usize, usize)| {
            let order = summary::round_order(together.min(cells - first), round, self.seed ^ ((number as u64) << 32));
            order.into_iter().map(move |index| first + index)
        };
        groups.flat_map(of_group).collect()
    }
}

/// A cell in a round. Both count from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// Index of the cell.
    pub cell: usize,
    /// Index of the round.
    pub round: usize,
}

/// How the rounds ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Done {
    /// Rounds in which every cell was measured.
    pub whole: usize,
    /// Whether the user stopped it.
    pub stopped: bool,
}

impl Done {
    /// # Errors
    /// [`LabError::Stopped`] if the user stopped it.
    pub fn or_stopped(self) -> Result<()> {
        if self.stopped { Err(LabError::Stopped) } else { Ok(()) }
    }
}

/// Progress of the rounds as part of a longer operation.
pub struct Steps<'a> {
    /// Receives the reports.
    pub progress: &'a mut dyn Progress,
    /// Name of the part.
    pub phase: &'a str,
    /// Finished windows of the part.
    pub done: u64,
    /// All windows of the part.
    pub total: u64,
}

impl<'a> Steps<'a> {
    /// A part without finished windows.
    pub fn new(progress: &'a mut dyn Progress, phase: &'a str, total: usize) -> Self {
        Self { progress, phase, done: 0, total: total as u64 }
    }
}

/// Measures `cells` cells in interleaved rounds. Progress shows `title` during a window. A window
/// without a title is skipped: it was measured before, and the measurement is resumed. `measure`
/// stores the figures.
///
/// # Errors
/// Any error of `measure`, except [`LabError::Stopped`], which ends the rounds and sets
/// [`Done::stopped`].
pub fn interleave(
    rounds: &Rounds,
    cells: usize,
    steps: &mut Steps<'_>,
    title: &dyn Fn(Window) -> Option<String>,
    measure: &mut dyn FnMut(Window, &dyn Watch) -> Result<()>,
) -> Result<Done> {
    for round in 0..rounds.rounds {
        let begun = Instant::now();
        for cell in rounds.order(cells, round) {
            let window = Window { cell, round };
            let Some(title) = title(window) else { continue };
            let measured = report(steps.progress, steps.phase, steps.done, steps.total, &title)
                .and_then(|()| measure(window, steps.progress.watch()));
            match measured {
                Err(LabError::Stopped) => return Ok(Done { whole: round, stopped: true }),
                measured => measured?,
            }
            steps.done += 1;
        }
        if rounds.until.is_some_and(|until| Instant::now() + begun.elapsed() > until) {
            return Ok(Done { whole: round + 1, stopped: false });
        }
    }
    Ok(Done { whole: rounds.rounds, stopped: false })
}

/// The job of a window: `job`, which has the seed of the experiment, with the seed of `cell` in
/// `round`. With `size_bytes`, the size of the smallest target, sequential streams begin at another
/// offset in each round; see [`seeds`].
pub fn job_of(job: &Job, cell: &str, round: usize, size_bytes: Option<u64>) -> Job {
    let mut job = Job { seed: seeds::of_window(job.seed, cell, round), ..job.clone() };
    if let Some(size_bytes) = size_bytes {
        seeds::begin_streams(&mut job, size_bytes);
    }
    job
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::{Silent, Step};
    use std::time::Duration;

    /// The windows in measured order, and how the rounds ended. The user stops before window number
    /// `patience`.
    fn measured(rounds: &Rounds, cells: usize, patience: u64) -> (Vec<(usize, usize)>, Done) {
        let mut seen = Vec::new();
        let mut progress = |step: Step<'_>| step.done < patience;
        let mut steps = Steps::new(&mut progress, "measure", cells * rounds.rounds);
        let mut measure = |window: Window, _: &dyn Watch| {
            seen.push((window.round, window.cell));
            Ok(())
        };
        let done = interleave(rounds, cells, &mut steps, &|_| Some(String::new()), &mut measure).unwrap();
        (seen, done)
    }

    #[test]
    fn every_round_has_every_cell_and_an_odd_one_runs_backwards() {
        let (seen, done) = measured(&Rounds::new(4, 7), 5, u64::MAX);
        assert_eq!(done, Done { whole: 4, stopped: false });
        let order = |round: usize| seen[round * 5..][..5].iter().map(|(_, cell)| *cell).collect::<Vec<_>>();
        for round in 0..4 {
            let mut all = order(round);
            all.sort_unstable();
            assert_eq!(all, [0, 1, 2, 3, 4]);
        }
        assert!(order(0).iter().eq(order(1).iter().rev()) && order(0) != order(2), "{seen:?}");
    }

    #[test]
    fn cells_that_are_compared_with_each_other_stay_together() {
        let (seen, _) = measured(&Rounds { together: Some(3), ..Rounds::new(2, 7) }, 6, u64::MAX);
        let groups: Vec<Vec<usize>> =
            seen.chunks(3).map(|group| group.iter().map(|(_, cell)| cell / 3).collect()).collect();
        assert_eq!(groups, [[0; 3], [1; 3], [0; 3], [1; 3]], "{seen:?}");
        assert!((0..6).all(|cell| seen[..6].contains(&(0, cell))));
    }

    #[test]
    fn a_stop_between_windows_or_within_one_keeps_whole_rounds() {
        assert_eq!(measured(&Rounds::new(4, 7), 3, 7).1, Done { whole: 2, stopped: true });
        let mut measure =
            |window: Window, _: &dyn Watch| if window.round < 1 { Ok(()) } else { Err(LabError::Stopped) };
        let mut silent = Silent;
        let mut steps = Steps::new(&mut silent, "measure", 6);
        let title = |_| Some(String::new());
        let done = interleave(&Rounds::new(2, 7), 3, &mut steps, &title, &mut measure).unwrap();
        assert_eq!((done, steps.done), (Done { whole: 1, stopped: true }, 3));
        assert!(matches!(done.or_stopped(), Err(LabError::Stopped)));
        // All other errors are returned.
        let mut fails = |_: Window, _: &dyn Watch| Err(LabError::Void { first: String::new(), errors: 1 });
        assert!(interleave(&Rounds::new(2, 7), 3, &mut steps, &title, &mut fails).is_err());
    }

    #[test]
    fn a_round_that_would_end_too_late_is_not_begun_but_the_first_always_is() {
        let late = Rounds { until: Some(Instant::now()), ..Rounds::new(3, 7) };
        assert_eq!(measured(&late, 2, u64::MAX).1, Done { whole: 1, stopped: false });
        let in_time = Rounds { until: Some(Instant::now() + Duration::from_secs(600)), ..late };
        assert_eq!(measured(&in_time, 2, u64::MAX).1, Done { whole: 3, stopped: false });
    }

    #[test]
    fn windows_of_an_earlier_sitting_are_left_out() {
        let mut seen = Vec::new();
        let mut measure = |window: Window, _: &dyn Watch| {
            seen.push((window.round, window.cell));
            Ok(())
        };
        let mut silent = Silent;
        let mut steps = Steps { done: 3, ..Steps::new(&mut silent, "measure", 4) };
        let title = |window: Window| (window.round == 1 && window.cell == 0).then(String::new);
        interleave(&Rounds::new(2, 7), 2, &mut steps, &title, &mut measure).unwrap();
        assert_eq!((steps.done, seen), (4, vec![(1, 0)]));
    }
}
