//! How much load is enough: three points on the line from too little to too much, each with an
//! interval or with the reason why it cannot be told.
//!
//! ```text
//!   rounds of each load ──▶ noise.rs ──▶ line: medians, and what chance may do to them ──▶ mod.rs ──▶ Knee
//!                                        └─ 2,000 lines that might as well have been measured
//! ```
//!
//! - *efficient*: the largest power, IOPS divided by mean latency (Kleinrock 1979). Past it a
//!   percent more throughput costs more than a percent of latency. On a device that serves up to c
//!   requests at once, each in the same time, it is c: Little's N* = R / D.
//! - *saturation*: the first load that reaches 95 % of the peak IOPS.
//! - *limit*: the most IOPS among the loads whose 99th percentile stays under what the user can
//!   bear.
//! - *paper*: the rule of the Storage Spaces paper, "at or before the point at which latency
//!   increases equal, and then begin to outpace, throughput gains". The paper reads it off a graph
//!   on which IOPS and latency are drawn to their own axes, so the increases that are compared are
//!   shares of each curve's whole rise over the sweep; the point is where the curves lie farthest
//!   apart. On the paper's sequential writes this gives its own answer, 15. (Taken as percent of
//!   the values themselves the rule says the same as power, because IOPS times latency is the
//!   load.) It depends on how far the sweep goes, which is the weakness of reading graphs.
//!
//! The intervals are bootstrap intervals of *the loads that were measured*: a knee between two of
//! them is told as one of them. Chance is drawn from five neighbouring loads together, so three
//! rounds of each are fifteen values; the tests hold the coverage of three rounds and of five. They
//! rest on two assumptions, that a round hits all loads alike but for chance (rounds are
//! interleaved so that it does), and that neighbouring loads scatter alike. Where the noise hides
//! the answer, where there are two peaks, where the line still rises at its end, no point is told,
//! for a point with an interval as wide as the sweep would be taken for an answer.

mod doubt;
mod noise;
mod picks;
#[cfg(test)]
mod simulated;
#[cfg(test)]
mod tests;

pub use doubt::Doubt;

use noise::{Line, Lines};
use serde::{Deserialize, Serialize};

/// Share of the peak that counts as saturation.
pub const SATURATION: f64 = 0.95;
/// Confidence of the intervals.
pub const CONFIDENCE: f64 = 0.95;
/// What was looked for among many loads has to be surer than what was named beforehand.
const SURE_THOUGH_LOOKED_FOR: f64 = 0.995;
/// An interval over a larger share of the loads than this tells nothing.
const TOO_WIDE: f64 = 0.7;
/// Fewer loads have no shape.
const FEWEST_LOADS: usize = 4;
/// IOPS that grow by more than this over the last third of the load are still rising.
const STILL_RISING: f64 = 0.05;

/// The marked points of one line.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Knee {
    /// Largest power.
    pub efficient: Mark,
    /// First at 95 % of the peak.
    pub saturation: Mark,
    /// Most IOPS with the 99th percentile under the user's limit; none where the user gave none.
    pub limit: Option<Mark>,
    /// The paper's rule.
    pub paper: Mark,
    /// How far IOPS fall from their peak to the last load, as a share of the peak, where they fall
    /// beyond chance.
    pub falls: Option<f64>,
}

/// A point, or why there is none.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Mark {
    /// There.
    Found(MarkedPoint),
    /// Cannot be told.
    Undetermined {
        /// The reason.
        why: Doubt,
    },
}

impl Mark {
    /// The point, where it could be told.
    pub fn found(&self) -> Option<&MarkedPoint> {
        match self {
            Self::Found(point) => Some(point),
            Self::Undetermined { .. } => None,
        }
    }
}

/// A load that was measured, and what it gave (medians over the rounds).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct MarkedPoint {
    /// Which, in the order of the line.
    pub cell: usize,
    /// Requests in flight.
    pub load: f64,
    /// Requests a second.
    pub iops: f64,
    /// Mean latency.
    pub mean_ns: f64,
    /// 99th percentile.
    pub p99_ns: f64,
    /// Where the point lies, by bootstrap; none when every load was measured only once.
    pub interval: Option<LoadInterval>,
    /// Whether it may lie beyond the last load.
    pub open_above: bool,
}

/// Loads between which a point lies, both ends among those that were measured.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LoadInterval {
    /// The least.
    pub low: f64,
    /// The most.
    pub high: f64,
}

/// What one round of one load gave.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Sample {
    /// Requests a second.
    pub iops: f64,
    /// Mean latency.
    pub mean_ns: f64,
    /// 99th percentile of the latency.
    pub p99_ns: f64,
}

/// One load and its rounds.
#[derive(Debug, Clone, PartialEq)]
pub struct LoadRounds {
    /// Requests in flight.
    pub load: f64,
    /// Round 0 of one load was measured in turn with round 0 of the others, and so on.
    pub rounds: Vec<Sample>,
}

/// The cell with the highest median, and the others that chance cannot tell from it (none known
/// when all were measured only once). One list of rounds for each cell. `None` for no cells, or
/// when a value is not above 0.
pub fn best(cells: &[Vec<f64>]) -> Option<(usize, Option<Vec<usize>>)> {
    // The noise is estimated from the first of a line's values; the others do not matter here.
    let sample = |value: &f64| Sample { iops: *value, mean_ns: 1.0, p99_ns: 1.0 };
    let line: Vec<LoadRounds> =
        cells.iter().map(|rounds| LoadRounds { load: 1.0, rounds: rounds.iter().map(sample).collect() }).collect();
    let lines = noise::lines(&line).ok()?;
    let best = picks::peak(&lines.seen);
    let mut wins = vec![0_usize; line.len()];
    lines.drawn.iter().for_each(|line| wins[picks::peak(line)] += 1);
    let fewest = (1.0 - CONFIDENCE) / 2.0 * lines.drawn.len() as f64;
    let rival = |cell: usize| wins[cell] as f64 >= fewest.max(1.0) || lines.seen.iops(cell) == lines.seen.iops(best);
    let rivals = (0..wins.len()).filter(|cell| *cell != best && rival(*cell)).collect();
    Some((best, (!lines.drawn.is_empty()).then_some(rivals)))
}

/// Finds the points. `line` is in ascending load; `max_p99_ns` is the user's limit.
pub fn knee(line: &[LoadRounds], max_p99_ns: Option<f64>) -> Knee {
    if line.len() < FEWEST_LOADS {
        return Knee::undetermined(Doubt::FewLoads { loads: line.len(), fewest: FEWEST_LOADS }, max_p99_ns.is_some());
    }
    let measured = match noise::lines(line) {
        Ok(measured) => measured,
        Err(why) => return Knee::undetermined(why, max_p99_ns.is_some()),
    };
    let median = |cell: &LoadRounds, figure: fn(&Sample) -> f64| {
        crate::summary::median(&cell.rounds.iter().map(figure).collect::<Vec<_>>()).unwrap_or(0.0)
    };
    let finder = Finder {
        loads: line.iter().map(|cell| cell.load).collect(),
        medians: line
            .iter()
            .map(|cell| [median(cell, |f| f.iops), median(cell, |f| f.mean_ns), median(cell, |f| f.p99_ns)])
            .collect(),
        measured,
    };
    Knee {
        efficient: finder.efficient(),
        saturation: finder.saturation(),
        limit: max_p99_ns.map(|limit_ns| finder.limit(limit_ns)),
        paper: finder.paper(),
        falls: finder.falls(),
    }
}

impl Knee {
    fn undetermined(why: Doubt, limited: bool) -> Self {
        let mark = || Mark::Undetermined { why: why.clone() };
        Self { efficient: mark(), saturation: mark(), limit: limited.then(mark), paper: mark(), falls: None }
    }
}

struct Finder {
    loads: Vec<f64>,
    /// IOPS, mean latency and 99th percentile as they were measured; the lines have the rounds' own
    /// ups and downs taken off.
    medians: Vec<[f64; 3]>,
    measured: Lines,
}

impl Finder {
    fn efficient(&self) -> Mark {
        if let Some(why) = self.two_peaks() {
            return Mark::Undetermined { why };
        }
        self.unless_at_an_end(self.mark(|line| Some(picks::efficient(line)), true))
    }

    fn paper(&self) -> Mark {
        self.unless_at_an_end(self.mark(picks::paper, true))
    }

    fn saturation(&self) -> Mark {
        if let Some(gain) = self.still_rising() {
            return Mark::Undetermined { why: Doubt::StillRising { gain, last: self.last() } };
        }
        if let Some(why) = self.dips() {
            return Mark::Undetermined { why };
        }
        match self.mark(|line| Some(picks::saturation(line)), true) {
            // What is reached at the last load only may not be the peak.
            Mark::Found(point) if point.cell + 1 == self.loads.len() => {
                Mark::Undetermined { why: Doubt::Beyond { last: point.load } }
            }
            mark => mark,
        }
    }

    fn limit(&self, limit_ns: f64) -> Mark {
        if picks::limit(&self.measured.seen, limit_ns).is_none() {
            let least = |line: &Line| (0..line.len()).min_by(|a, b| line.p99(*a).total_cmp(&line.p99(*b)));
            let at = least(&self.measured.seen).unwrap_or(0);
            let (least_p99_ns, load) = (self.measured.seen.p99(at).exp(), self.loads[at]);
            return Mark::Undetermined { why: Doubt::NothingUnder { limit_ns, least_p99_ns, load } };
        }
        // A wide interval is an answer here: on a plateau it does not matter which of its loads one
        // takes.
        self.mark(|line| picks::limit(line, limit_ns), false)
    }

    /// How far the last load lies under the peak, where at most one in forty lines says otherwise.
    fn falls(&self) -> Option<f64> {
        let last = self.loads.len() - 1;
        let peak = picks::peak(&self.measured.seen);
        let fall = |line: &Line| line.iops(last) - line.iops(peak);
        let surely = self.share(|line| fall(line) < 0.0) >= 0.975;
        let share = 1.0 - fall(&self.measured.seen).exp();
        (surely && share > 1.0 - SATURATION).then_some(share)
    }

    /// The growth of IOPS over the last third of the load, where it is large and beyond chance.
    fn still_rising(&self) -> Option<f64> {
        let last = self.loads.len() - 1;
        let before = (0..last).rev().find(|cell| self.loads[*cell] <= self.loads[last] * 2.0 / 3.0)?;
        let gain = |line: &Line| line.iops(last) - line.iops(before);
        let large = (1.0 + STILL_RISING).ln();
        let seen = gain(&self.measured.seen);
        (seen > large && self.share(|line| gain(line) > 0.0) >= 0.975).then(|| seen.exp() - 1.0)
    }

    /// Whether IOPS, having come near the peak, surely fall away from it and come back.
    fn dips(&self) -> Option<Doubt> {
        let seen = &self.measured.seen;
        let near: Vec<usize> = picks::near_the_plateau(seen).collect();
        let (first, last) = (*near.first()?, *near.last()?);
        let at = (first + 1..last).min_by(|a, b| seen.iops(*a).total_cmp(&seen.iops(*b)))?;
        let deep = |line: &Line| line.iops(at) - line.iops(first).min(line.iops(last)) < SATURATION.ln();
        (deep(seen) && self.share(deep) >= SURE_THOUGH_LOOKED_FOR).then(|| Doubt::TwoPeaks {
            first: self.loads[first],
            between: self.loads[at],
            second: self.loads[last],
        })
    }

    /// Whether power has two peaks of which neither is surely the higher, with a sure valley
    /// between them.
    fn two_peaks(&self) -> Option<Doubt> {
        let seen = &self.measured.seen;
        let best = picks::efficient(seen);
        let highest =
            |line: &Line, cells: std::ops::Range<usize>| cells.max_by(|a, b| line.power(*a).total_cmp(&line.power(*b)));
        // The valley towards each side: the deepest place before the power comes back nearest to
        // the best.
        let valleys = (0..seen.len()).filter_map(|at| {
            let other = if at < best { highest(seen, 0..at)? } else { highest(seen, at + 1..seen.len())? };
            (at != best).then(|| (at, other, seen.power(other) - seen.power(at)))
        });
        let (at, other, _) = valleys.max_by(|a, b| a.2.total_cmp(&b.2))?;
        let valley = |line: &Line| line.power(at) < line.power(other) && line.power(at) < line.power(best);
        let rivals = self.share(|line| line.power(other) > line.power(best));
        (rivals >= 0.025 && self.share(valley) >= SURE_THOUGH_LOOKED_FOR).then(|| Doubt::TwoPeaks {
            first: self.loads[best.min(other)],
            between: self.loads[at],
            second: self.loads[best.max(other)],
        })
    }

    /// The share of the lines that might have been measured of which `holds` is true.
    fn share(&self, holds: impl Fn(&Line) -> bool) -> f64 {
        let lines = &self.measured.drawn;
        if lines.is_empty() {
            return f64::from(u8::from(holds(&self.measured.seen)));
        }
        lines.iter().filter(|line| holds(line)).count() as f64 / lines.len() as f64
    }

    fn last(&self) -> f64 {
        self.loads.last().copied().unwrap_or(0.0)
    }

    fn mark(&self, pick: impl Fn(&Line) -> Option<usize>, must_be_narrow: bool) -> Mark {
        let seen = &self.measured.seen;
        let Some(cell) = pick(seen) else { return Mark::Undetermined { why: Doubt::Flat } };
        let mut picked: Vec<usize> = self.measured.drawn.iter().filter_map(&pick).collect();
        picked.sort_unstable();
        let at = |share: f64| picked[((picked.len() - 1) as f64 * share).round() as usize];
        let tail = (1.0 - CONFIDENCE) / 2.0;
        let ends = (!picked.is_empty()).then(|| (at(tail).min(cell), at(1.0 - tail).max(cell)));
        if let Some((low, high)) = ends
            && must_be_narrow
            && (high - low + 1) as f64 > TOO_WIDE * self.loads.len() as f64
        {
            let why = Doubt::Noise { low: self.loads[low], high: self.loads[high], scatter: self.measured.scatter };
            return Mark::Undetermined { why };
        }
        Mark::Found(MarkedPoint {
            cell,
            load: self.loads[cell],
            iops: self.medians[cell][0],
            mean_ns: self.medians[cell][1],
            p99_ns: self.medians[cell][2],
            interval: ends.map(|(low, high)| LoadInterval { low: self.loads[low], high: self.loads[high] }),
            open_above: ends.map_or(cell, |(_, high)| high) + 1 == self.loads.len(),
        })
    }

    /// A best point at the edge of what was measured is no best point; but below one request in
    /// flight there is nothing.
    fn unless_at_an_end(&self, mark: Mark) -> Mark {
        match &mark {
            Mark::Found(point) if point.cell + 1 == self.loads.len() => {
                Mark::Undetermined { why: Doubt::Beyond { last: point.load } }
            }
            Mark::Found(point) if point.cell == 0 && point.load > 1.0 => {
                Mark::Undetermined { why: Doubt::Before { first: point.load } }
            }
            _ => mark,
        }
    }
}
