//! Distributions of the offsets of random requests. A draw is the number of a position in the
//! working set.
//!
//! ```text
//!   Uniform    every position with the same probability
//!   Zipf       rank by rejection-inversion ────────────────────────┐
//!   Pareto     rank by a power of a uniform number, as in fio ─────┴─▶ permuted ─▶ position
//!   Spots      a range by its share of the requests, then uniform within the range
//! ```
//!
//! Zipf uses rejection-inversion (Hörmann and Derflinger 1996), which is exact for any number of
//! positions and needs no table. With Pareto the first share `h` of the ranks gets `1 - h` of the
//! requests.
//!
//! Ranks are permuted, so that popular positions are scattered over the working set as in real
//! data. The permutation is a Feistel network of four rounds with cycle walking. A hash with
//! collisions, as in fio, would skip some positions and give others two shares.
//!
//! Invariant: every number drawn is below the number of positions.

use crate::{
    job::{Distribution, Spot},
    run::random::{Random, below, random_for, unit},
};
use rand_xoshiro::rand_core::Rng;

/// A distribution over positions.
#[derive(Debug, Clone)]
pub(crate) enum OffsetDistribution {
    Uniform { positions: u64 },
    Zipf { zipf: Zipf, permutation: Permutation },
    Pareto { positions: u64, power: f64, permutation: Permutation },
    Spots { pieces: Vec<Piece> },
}

/// A range of positions with the same probability.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Cumulative probability of the pieces up to this one, scaled to 2^64: a draw goes to the
    /// first piece whose `up_to` is at least the draw.
    up_to: u64,
    first: u64,
    positions: u64,
}

/// The positions of requests of one size in a working set: multiples of `step_bytes` at which a
/// request of `len_bytes` fits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Grid {
    pub(crate) set_bytes: u64,
    pub(crate) step_bytes: u64,
    pub(crate) len_bytes: u64,
}

impl Grid {
    /// Number of positions.
    pub(crate) fn positions(&self) -> u64 {
        if self.len_bytes > self.set_bytes { 0 } else { (self.set_bytes - self.len_bytes) / self.step_bytes + 1 }
    }

    /// The positions whose requests are inside a range of the set: the first, and their number.
    fn within(&self, start_bytes: u64, end_bytes: u64) -> (u64, u64) {
        let first = start_bytes.div_ceil(self.step_bytes);
        match end_bytes.min(self.set_bytes).checked_sub(self.len_bytes) {
            Some(last_bytes) if last_bytes / self.step_bytes >= first => {
                (first, last_bytes / self.step_bytes - first + 1)
            }
            _ => (first, 0),
        }
    }
}

impl OffsetDistribution {
    /// The distribution of offsets on `grid`, which must have at least one position. Ranks are
    /// permuted by `seed`.
    ///
    /// # Errors
    /// A sentence, when a spot with requests has no position.
    pub(crate) fn new(distribution: &Distribution, grid: Grid, seed: u64) -> Result<Self, String> {
        let positions = grid.positions().max(1);
        Ok(match distribution {
            Distribution::Uniform => Self::Uniform { positions },
            Distribution::Zipf { theta } => {
                Self::Zipf { zipf: Zipf::new(positions, *theta), permutation: Permutation::new(positions, seed) }
            }
            Distribution::Pareto { h } => Self::Pareto {
                positions,
                power: h.ln() / (1.0 - h).ln(),
                permutation: Permutation::new(positions, seed),
            },
            Distribution::Spots { spots } => Self::Spots { pieces: pieces(spots, grid)? },
        })
    }

    /// Draws a position.
    #[inline]
    pub(crate) fn draw(&self, rng: &mut Random) -> u64 {
        match self {
            Self::Uniform { positions } => below(rng, *positions),
            Self::Zipf { zipf, permutation } => permutation.place(zipf.draw(rng)),
            Self::Pareto { positions, power, permutation } => {
                let rank = (*positions as f64 * unit(rng).powf(*power)) as u64;
                permutation.place(rank.min(positions - 1))
            }
            Self::Spots { pieces } => {
                let chosen = rng.next_u64();
                let piece = pieces.iter().find(|piece| chosen <= piece.up_to).unwrap_or(&pieces[pieces.len() - 1]);
                piece.first + below(rng, piece.positions)
            }
        }
    }
}

/// Divides the working set into the spots and the remaining range.
fn pieces(spots: &[Spot], grid: Grid) -> Result<Vec<Piece>, String> {
    let mut pieces = Vec::with_capacity(spots.len() + 1);
    let (mut share, mut start_bytes) = (0.0, 0_u64);
    let mut add = |io_percent: f64, start_bytes: u64, end_bytes: u64, what: &str| {
        if io_percent <= 1e-9 {
            return Ok(());
        }
        share += io_percent / 100.0;
        let (first, positions) = grid.within(start_bytes, end_bytes);
        if positions == 0 {
            return Err(format!(
                "{what} gets {io_percent} % of the requests, but has no room for a request of {} bytes",
                grid.len_bytes
            ));
        }
        pieces.push(Piece { up_to: (share * 2_f64.powi(64)) as u64, first, positions });
        Ok(())
    };
    for (number, spot) in spots.iter().enumerate() {
        let len_bytes = match spot.length {
            Some(length) => length.0,
            None => (grid.set_bytes as f64 * spot.target_percent / 100.0).round() as u64,
        };
        let end_bytes = start_bytes.saturating_add(len_bytes).min(grid.set_bytes);
        add(spot.io_percent, start_bytes, end_bytes, &format!("spot {}", number + 1))?;
        start_bytes = end_bytes;
    }
    let rest_percent = 100.0 - spots.iter().map(|spot| spot.io_percent).sum::<f64>();
    add(rest_percent, start_bytes, grid.set_bytes, "the range after the spots")?;
    Ok(pieces)
}

/// Zipf distribution over ranks from 0: the probability of rank r is proportional to (r +
/// 1)^-theta.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Zipf {
    ranks: u64,
    theta: f64,
    /// The integral of the density at half a rank before the first rank and half a rank after the
    /// last.
    area_first: f64,
    area_last: f64,
    /// A candidate closer to its rank than this is accepted without a further test.
    sure: f64,
}

impl Zipf {
    fn new(ranks: u64, theta: f64) -> Self {
        let mut zipf = Self { ranks, theta, area_first: 0.0, area_last: 0.0, sure: 0.0 };
        zipf.area_first = zipf.area(1.5) - 1.0;
        zipf.area_last = zipf.area(ranks as f64 + 0.5);
        zipf.sure = 2.0 - zipf.inverse(zipf.area(2.5) - 2_f64.powf(-theta));
        zipf
    }

    /// An antiderivative of x^-theta.
    fn area(&self, x: f64) -> f64 {
        let log = x.ln();
        growth((1.0 - self.theta) * log) * log
    }

    /// Inverse of [`Self::area`].
    fn inverse(&self, area: f64) -> f64 {
        let scaled = (area * (1.0 - self.theta)).max(-1.0);
        (logarithm(scaled) * area).exp()
    }

    fn draw(&self, rng: &mut Random) -> u64 {
        loop {
            let area = self.area_last + unit(rng) * (self.area_first - self.area_last);
            let x = self.inverse(area);
            let rank = (x.round() as u64).clamp(1, self.ranks);
            let near = rank as f64;
            if near - x <= self.sure || area >= self.area(near + 0.5) - near.powf(-self.theta) {
                return rank - 1;
            }
        }
    }
}

/// (e^x - 1) / x, precise near 0.
fn growth(x: f64) -> f64 {
    if x.abs() > 1e-8 { x.exp_m1() / x } else { 1.0 + x / 2.0 }
}

/// ln(1 + x) / x, precise near 0.
fn logarithm(x: f64) -> f64 {
    if x.abs() > 1e-8 { x.ln_1p() / x } else { 1.0 - x / 2.0 }
}

/// A permutation of the numbers below `positions`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Permutation {
    positions: u64,
    half_bits: u32,
    keys: [u64; 4],
}

impl Permutation {
    pub(crate) fn new(positions: u64, seed: u64) -> Self {
        let bits = 64 - positions.saturating_sub(1).leading_zeros();
        let mut rng = random_for(seed, &[0x7363_6174]);
        Self { positions, half_bits: bits.div_ceil(2).max(1), keys: std::array::from_fn(|_| rng.next_u64() | 1) }
    }

    /// The position of `rank`, which must be below `positions`.
    pub(crate) fn place(&self, rank: u64) -> u64 {
        let mask = (1 << self.half_bits) - 1;
        let mut at = rank;
        // The network permutes a power of two below four times `positions`. A result outside is
        // permuted again (cycle walking).
        loop {
            let (mut left, mut right) = (at >> self.half_bits, at & mask);
            for key in self.keys {
                let mixed = (right ^ key).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29).wrapping_mul(key);
                (left, right) = (right, left ^ ((mixed >> 32) & mask));
            }
            at = left << self.half_bits | right;
            if at < self.positions {
                return at;
            }
        }
    }
}

#[cfg(test)]
#[path = "distribution_tests.rs"]
mod tests;
