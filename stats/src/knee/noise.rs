//! Turns rounds into a line of medians, and into 2,000 bootstrap lines.
//!
//! ```text
//!   logarithms ──▶ round effects removed ──▶ medians ──────────────┬──▶ measured line
//!                                        └─▶ residuals, pooled ────┴──▶ bootstrap lines
//! ```
//!
//! All values are logarithms, because noise is multiplicative. First the round effect is removed:
//! what a round did to all loads alike, such as a minute in which the machine was slow. The
//! residuals are the distances of the rounds from the centre of their load. A bootstrap line adds
//! to each median the median of as many residuals as the load has rounds. Residuals are drawn from
//! the load and its two neighbours on either side, because three to five rounds of one load are too
//! few to estimate its scatter.

use super::{LoadRounds, Reason};
use crate::{inference::hodges_lehmann, summary::median};
use rand_xoshiro::{
    Xoshiro256PlusPlus,
    rand_core::{Rng, SeedableRng},
};

/// Number of bootstrap lines.
const LINES: usize = 2000;
/// Neighbours on each side whose residuals are pooled with those of a load.
const NEIGHBOURS: usize = 2;

/// Logarithms of IOPS, mean latency and 99th percentile.
type Values = [f64; 3];

/// IOPS, mean latency and 99th percentile of each load, as logarithms.
#[derive(Debug, Clone)]
pub struct Line {
    values: Vec<Values>,
    /// Standard deviation of the IOPS of one load of this line.
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

/// The measured line and its bootstrap lines.
#[derive(Debug)]
pub struct Lines {
    pub measured: Line,
    /// Bootstrap lines. Empty when a load and its neighbours were measured only once.
    pub resampled: Vec<Line>,
    /// Standard deviation of the IOPS of one round, as a share.
    pub scatter: f64,
}

/// Computes the lines of `cells`.
pub fn lines(cells: &[LoadRounds]) -> Result<Lines, Reason> {
    if cells.is_empty() {
        return Err(Reason::FewLoads { loads: 0, fewest: 1 });
    }
    let mut rounds: Vec<Vec<Values>> = Vec::with_capacity(cells.len());
    for cell in cells {
        let values: Vec<Values> =
            cell.rounds.iter().map(|round| [round.iops, round.mean_ns, round.p99_ns].map(f64::ln)).collect();
        // A figure was 0 or NaN, or the load has no round.
        if values.is_empty() || values.iter().flatten().any(|value| !value.is_finite()) {
            return Err(Reason::NothingDone { load: cell.load });
        }
        rounds.push(values);
    }
    remove_round_effects(&mut rounds);
    let residuals: Vec<Vec<Values>> = rounds.iter().map(|values| residuals(values)).collect();
    // In a normal distribution the median distance is 0.6745 standard deviations. Unlike the
    // standard deviation it is robust against outliers.
    let distances: Vec<f64> = residuals.iter().flatten().map(|values| values[0].abs()).collect();
    let scatter = median(&distances).unwrap_or(0.0) / 0.6745;
    let fewest = cells.iter().map(|cell| cell.rounds.len()).min().unwrap_or(1) as f64;
    // The standard deviation of a median of n values is sqrt(pi / 2n) of theirs.
    let deviation = scatter * (std::f64::consts::FRAC_PI_2 / fewest).sqrt();
    let measured = Line { values: rounds.iter().map(|values| medians(values)).collect(), deviation };
    Ok(Lines { resampled: bootstrap(&measured, &rounds, &residuals), measured, scatter })
}

fn medians(values: &[Values]) -> Values {
    [0, 1, 2].map(|kind| median(&values.iter().map(|value| value[kind]).collect::<Vec<_>>()).unwrap_or(f64::NAN))
}

/// Removes the effect of each round on all loads: the median, over the loads, of the distance of
/// the round from the median of its load.
fn remove_round_effects(cells: &mut [Vec<Values>]) {
    let most = cells.iter().map(Vec::len).max().unwrap_or(0);
    if most < 2 {
        return;
    }
    let centres: Vec<Values> = cells.iter().map(|values| medians(values)).collect();
    for round in 0..most {
        let off: Vec<Values> = cells
            .iter()
            .zip(&centres)
            .filter_map(|(values, centre)| values.get(round).map(|value| [0, 1, 2].map(|k| value[k] - centre[k])))
            .collect();
        let effect = medians(&off);
        for value in cells.iter_mut().filter_map(|values| values.get_mut(round)) {
            for kind in 0..3 {
                value[kind] -= effect[kind];
            }
        }
    }
}

/// Distances of the rounds of one load from their Hodges-Lehmann centre, scaled by sqrt(n / (n -
/// 1)) because the centre is estimated from the same rounds. The estimate is robust against an
/// outlier and, unlike the median, equals none of the rounds. Empty for a single round.
fn residuals(values: &[Values]) -> Vec<Values> {
    let n = values.len() as f64;
    if values.len() < 2 {
        return Vec::new();
    }
    let of_kind = |kind: usize| values.iter().map(|value| value[kind]).collect::<Vec<_>>();
    let centre = [0, 1, 2].map(|kind| hodges_lehmann(&of_kind(kind)).unwrap_or(0.0));
    let widen = (n / (n - 1.0)).sqrt();
    values.iter().map(|value| [0, 1, 2].map(|kind| (value[kind] - centre[kind]) * widen)).collect()
}

fn bootstrap(measured: &Line, rounds: &[Vec<Values>], residuals: &[Vec<Values>]) -> Vec<Line> {
    let pools: Vec<Vec<Values>> = (0..residuals.len())
        .map(|cell| {
            let (from, to) = (cell.saturating_sub(NEIGHBOURS), (cell + NEIGHBOURS).min(residuals.len() - 1));
            residuals[from..=to].concat()
        })
        .collect();
    if pools.iter().any(Vec::is_empty) {
        return Vec::new();
    }
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(1);
    let line = |_| {
        let values = measured.values.iter().zip(&pools).zip(rounds).map(|((measured, pool), rounds)| {
            let drawn: Vec<Values> =
                rounds.iter().map(|_| pool[(rng.next_u64() % pool.len() as u64) as usize]).collect();
            let off = medians(&drawn);
            [0, 1, 2].map(|kind| measured[kind] + off[kind])
        });
        // The variance is twice that of the measured line: the noise of the measurement and the
        // noise of the resampling add up.
        Line { values: values.collect(), deviation: measured.deviation * std::f64::consts::SQRT_2 }
    };
    (0..LINES).map(line).collect()
}
