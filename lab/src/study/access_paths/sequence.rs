//! Access paths that are set up once for a whole test sequence: the three loads, one after another.
//!
//! ```text
//!   round 1: ┌ way A: set up ─▶ light ─▶ medium ─▶ heavy ─▶ take down
//!            └ way B: ...                         round 2: the same in another order ─▶ ...
//! ```
//!
//! Access paths in a guest and those of agents are measured so, because setting up takes long. As
//! in a test sequence of the paper, the heavier loads find what the lighter ones have written. Only
//! whole rounds count.

use super::{AccessPath, LOADS, SERVER_CPU_NS, measure::Plan, record};
use crate::{
    Result,
    cells::Cell,
    progress::Progress,
    rounds::{self, Done, Rounds, Steps, Window},
};
use diskwright_load::{figures::Figures, run::Watch};

/// The figures of an access path at each load, and the server's CPU time per request in
/// nanoseconds.
pub(super) type Sequence = Vec<(Figures, f64)>;

/// Measures one access path in one round; `None` if it is left out.
pub(super) type MeasureWay<'a> = dyn FnMut(AccessPath, usize, &dyn Watch) -> Result<Option<Sequence>> + 'a;

/// The test sequences of several access paths.
#[derive(Debug)]
pub(super) struct Sequences {
    ways: Vec<AccessPath>,
    cells: Vec<[Cell; LOADS.len()]>,
    /// How the rounds ended.
    pub(super) done: Done,
}

impl Sequences {
    /// Measures these access paths in interleaved rounds, with this number of clients. `phase` is
    /// the word for progress.
    ///
    /// # Errors
    /// Those of [`rounds::interleave`].
    pub(super) fn measure(
        ways: Vec<AccessPath>,
        clients: u32,
        plan: &Plan,
        (phase, progress): (&str, &mut dyn Progress),
        measure: &mut MeasureWay<'_>,
    ) -> Result<Self> {
        let cell = |way, (load, outstanding)| record::cell(load, (clients, outstanding), way);
        let mut cells: Vec<[Cell; LOADS.len()]> = ways.iter().map(|way| LOADS.map(|load| cell(*way, load))).collect();
        let title = |at: Window| Some(format!("{}, round {} of {}", ways[at.cell].name(), at.round + 1, plan.rounds));
        let mut steps = Steps::new(progress, phase, plan.rounds * ways.len());
        let mut window = |at: Window, watch: &dyn Watch| {
            let sequence = measure(ways[at.cell], at.round, watch)?.unwrap_or_default();
            for (cell, (figures, server_cpu_ns)) in cells[at.cell].iter_mut().zip(sequence) {
                cell.rounds.push(figures);
                cell.push_more(SERVER_CPU_NS, Some(server_cpu_ns));
            }
            Ok(())
        };
        let rounds = Rounds { until: plan.until, ..Rounds::new(plan.rounds, plan.seed) };
        let done = rounds::interleave(&rounds, ways.len(), &mut steps, &title, &mut window)?;
        Ok(Self { ways, cells, done })
    }

    /// The whole rounds of the access paths that are kept, load by load, as the cells of the host.
    pub(super) fn into_cells(self, is_kept: impl Fn(AccessPath) -> bool) -> Vec<Cell> {
        let Self { ways, mut cells, done } = self;
        let mut kept = Vec::new();
        for load in 0..LOADS.len() {
            for (way, cells) in ways.iter().zip(&mut cells) {
                if is_kept(*way) && done.whole > 0 {
                    cells[load].truncate(done.whole);
                    kept.push(cells[load].clone());
                }
            }
        }
        kept
    }
}
