//! From rounds to a line, and to the lines that might as well have been measured.
//!
//! All values are logarithms, for noise multiplies. First what a round did to all loads alike is
//! taken off (a slow minute of the machine is no property of a queue depth). What is left of each
//! round against the mean of its load is chance. A line that might have been measured is the
//! medians of as many draws of chance at each load, from the chance of that load and of its two
//! neighbours on either side: three to five rounds of one load alone are too few to know how it
//! scatters.

use super::{Doubt, LoadRounds};
use crate::{inference::middle, summary::median};
use rand_xoshiro::{
    Xoshiro256PlusPlus,
    rand_core::{Rng, SeedableRng},
};

/// How many lines are drawn.
const LINES: usize = 2000;
/// Neighbours on each side whose chance counts as a load's own.
const NEIGHBOURS: usize = 2;

/// Logarithms of IOPS, mean latency and 99th percentile.
type Values = [f64; 3];

/// A value of each kind for each load.
#[derive(Debug, Clone)]
pub struct Line {
    values: Vec<Values>,
    /// Deviation by chance of the IOPS of one load of this line.
    deviation: f64,
}

impl Line {
    pub fn len(&self) -> usize {
        self.values.len()
    }

    pub fn iops(&self, cell: usize) -> f64 {
        self.values[cell][0]
    }

    pub fn mean(&self, cell: usize) -> f64 {
        self.values[cell][1]
    }

    pub fn p99(&self, cell: usize) -> f64 {
        self.values[cell][2]
    }

    pub fn power(&self, cell: usize) -> f64 {
        self.iops(cell) - self.mean(cell)
    }

    pub fn deviation(&self) -> f64 {
        self.deviation
    }
}

/// The line that was measured, and those that might have been.
#[derive(Debug)]
pub struct Lines {
    pub seen: Line,
    /// Empty when every load was measured only once.
    pub drawn: Vec<Line>,
    /// Deviation of one round's IOPS by chance, as a share.
    pub scatter: f64,
}

/// Reads the rounds.
pub fn lines(cells: &[LoadRounds]) -> Result<Lines, Doubt> {
    if cells.is_empty() {
        return Err(Doubt::FewLoads { loads: 0, fewest: 1 });
    }
    let mut rounds: Vec<Vec<Values>> = Vec::with_capacity(cells.len());
    for cell in cells {
        let values: Vec<Values> =
            cell.rounds.iter().map(|round| [round.iops, round.mean_ns, round.p99_ns].map(f64::ln)).collect();
        // The logarithm of 0, or of nothing at all.
        if values.is_empty() || values.iter().flatten().any(|value| !value.is_finite()) {
            return Err(Doubt::NothingDone { load: cell.load });
        }
        rounds.push(values);
    }
    take_off_rounds(&mut rounds);
    let chance: Vec<Vec<Values>> = rounds.iter().map(|values| residuals(values)).collect();
    // Of a normal distribution the median distance is 0.6745 deviations; unlike the deviation it
    // does not feel a spoilt round.
    let distances: Vec<f64> = chance.iter().flatten().map(|values| values[0].abs()).collect();
    let scatter = median(&distances).unwrap_or(0.0) / 0.6745;
    let fewest = cells.iter().map(|cell| cell.rounds.len()).min().unwrap_or(1) as f64;
    // A median of n scatters by sqrt(pi / 2n) deviations.
    let deviation = scatter * (std::f64::consts::FRAC_PI_2 / fewest).sqrt();
    let seen = Line { values: rounds.iter().map(|values| centre(values)).collect(), deviation };
    Ok(Lines { drawn: draw(&seen, &rounds, &chance), seen, scatter })
}

fn centre(values: &[Values]) -> Values {
    [0, 1, 2].map(|kind| median(&values.iter().map(|value| value[kind]).collect::<Vec<_>>()).unwrap_or(f64::NAN))
}

/// Takes off what each round did to all loads: the median, over the loads, of its distance from the
/// load's own median.
fn take_off_rounds(cells: &mut [Vec<Values>]) {
    let most = cells.iter().map(Vec::len).max().unwrap_or(0);
    if most < 2 {
        return;
    }
    let centres: Vec<Values> = cells.iter().map(|values| centre(values)).collect();
    for round in 0..most {
        let off: Vec<Values> = cells
            .iter()
            .zip(&centres)
            .filter_map(|(values, centre)| values.get(round).map(|value| [0, 1, 2].map(|k| value[k] - centre[k])))
            .collect();
        let effect = centre(&off);
        for value in cells.iter_mut().filter_map(|values| values.get_mut(round)) {
            for kind in 0..3 {
                value[kind] -= effect[kind];
            }
        }
    }
}

/// Distances from the middle (Hodges and Lehmann's, which a spoilt round hardly moves, and which is
/// none of the rounds itself), widened by what the middle has taken from them; none of a single
/// round.
fn residuals(values: &[Values]) -> Vec<Values> {
    let n = values.len() as f64;
    if values.len() < 2 {
        return Vec::new();
    }
    let middle =
        [0, 1, 2].map(|kind| middle(&values.iter().map(|value| value[kind]).collect::<Vec<_>>()).unwrap_or(0.0));
    let widen = (n / (n - 1.0)).sqrt();
    values.iter().map(|value| [0, 1, 2].map(|kind| (value[kind] - middle[kind]) * widen)).collect()
}

fn draw(seen: &Line, rounds: &[Vec<Values>], chance: &[Vec<Values>]) -> Vec<Line> {
    let pools: Vec<Vec<Values>> = (0..chance.len())
        .map(|cell| {
            let (from, to) = (cell.saturating_sub(NEIGHBOURS), (cell + NEIGHBOURS).min(chance.len() - 1));
            chance[from..=to].concat()
        })
        .collect();
    if pools.iter().any(Vec::is_empty) {
        return Vec::new();
    }
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(1);
    let line = |_| {
        let values = seen.values.iter().zip(&pools).zip(rounds).map(|((seen, pool), rounds)| {
            let drawn: Vec<Values> =
                rounds.iter().map(|_| pool[(rng.next_u64() % pool.len() as u64) as usize]).collect();
            let off = centre(&drawn);
            [0, 1, 2].map(|kind| seen[kind] + off[kind])
        });
        // Chance has struck twice: when the line was measured, and now.
        Line { values: values.collect(), deviation: seen.deviation * std::f64::consts::SQRT_2 }
    };
    (0..LINES).map(line).collect()
}
