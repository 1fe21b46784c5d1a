//! Finds the knee of a load curve: the efficient load, the saturation load and the fastest load
//! under a latency limit, each with a confidence interval, or with the reason why it is
//! undetermined.
//!
//! ```text
//!   rounds of each load ──▶ noise.rs ──▶ line: medians of each load   ──▶ picks.rs ──▶ Knee
//!                                        2,000 bootstrap lines             one rule
//!                                                                          for each point
//! ```
//!
//! A load is a number of requests in flight. A line has IOPS, mean latency and 99th percentile for
//! each load.
//!
//! - *efficient*: the load with the largest power, which is IOPS divided by mean latency (Kleinrock
//!   1979). Above it, one percent more throughput costs more than one percent of latency. For a
//!   device that serves c requests at once, each in the same time, the point is c, which is
//!   Little's N* = R / D.
//! - *saturation*: the first load that reaches 95 % of the peak IOPS.
//! - *limit*: the load with the most IOPS whose 99th percentile is within the user's limit.
//! - *paper*: the rule of the Storage Spaces paper, "at or before the point at which latency
//!   increases equal, and then begin to outpace, throughput gains". The paper reads the point off a
//!   graph in which IOPS and latency have axes of their own. Both curves are therefore scaled to
//!   their rise over the sweep, and the point is where they are farthest apart. For the paper's
//!   sequential writes the result is the paper's own, 15. The result depends on the last load of
//!   the sweep. (With increases in percent of the values, the rule would equal the efficient point,
//!   because IOPS times latency is the load.)
//!
//! The intervals are bootstrap intervals, and their ends are loads that were measured. Residuals of
//! five neighbouring loads are pooled, so that three rounds of each load give fifteen values. Tests
//! check the coverage for three and for five rounds. Two assumptions are made: apart from noise a
//! round affects all loads alike, which interleaved rounds ensure, and neighbouring loads have the
//! same scatter. No point is returned where noise hides it, where there are two peaks, and where
//! the line still rises at its end: an interval as wide as the sweep is not an answer.

mod noise;
mod picks;
mod points;
mod reason;
#[cfg(test)]
mod simulated;
#[cfg(test)]
mod tests;

pub use points::{Knee, LoadInterval, LoadRounds, Mark, MarkedPoint, Sample};
pub use reason::Reason;

use noise::{Line, Lines};
use points::SATURATION;

/// Confidence of the intervals.
const CONFIDENCE: f64 = 0.95;
/// Share of the bootstrap lines that must show a dip or a valley. It is above 0.975, because a dip
/// is searched for among many loads.
const SHARE_OF_SEARCHED: f64 = 0.995;
/// A point is undetermined when its interval covers a larger share of the loads than this.
const TOO_WIDE: f64 = 0.7;
/// Fewest loads of a line.
const FEWEST_LOADS: usize = 4;
/// IOPS that grow by more than this share over the last third of the load are still rising.
const STILL_RISING: f64 = 0.05;

/// Returns the cell with the highest median, and the cells that are not significantly below it.
/// `cells` has one list of rounds for each cell. The second value is `None` when every cell was
/// measured only once. The result is `None` without cells, or when a value is not above 0.
pub fn best(cells: &[Vec<f64>]) -> Option<(usize, Option<Vec<usize>>)> {
    // The noise is estimated from the IOPS alone, so the latencies are placeholders.
    let sample = |value: &f64| Sample { iops: *value, mean_ns: 1.0, p99_ns: 1.0 };
    let line: Vec<LoadRounds> =
        cells.iter().map(|rounds| LoadRounds { load: 1.0, rounds: rounds.iter().map(sample).collect() }).collect();
    let lines = noise::lines(&line).ok()?;
    let best = picks::peak(&lines.measured);
    let mut wins = vec![0_usize; line.len()];
    lines.resampled.iter().for_each(|line| wins[picks::peak(line)] += 1);
    let fewest = (1.0 - CONFIDENCE) / 2.0 * lines.resampled.len() as f64;
    let rival =
        |cell: usize| wins[cell] as f64 >= fewest.max(1.0) || lines.measured.iops(cell) == lines.measured.iops(best);
    let rivals = (0..wins.len()).filter(|cell| *cell != best && rival(*cell)).collect();
    Some((best, (!lines.resampled.is_empty()).then_some(rivals)))
}

/// Finds the points of `line`, which is sorted by ascending load. `max_p99_ns` is the user's limit
/// of the 99th percentile, in nanoseconds.
pub fn knee(line: &[LoadRounds], max_p99_ns: Option<f64>) -> Knee {
    if line.len() < FEWEST_LOADS {
        return Knee::undetermined(Reason::FewLoads { loads: line.len(), fewest: FEWEST_LOADS }, max_p99_ns.is_some());
    }
    let lines = match noise::lines(line) {
        Ok(lines) => lines,
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
        lines,
    };
    Knee {
        efficient: finder.efficient(),
        saturation: finder.saturation(),
        limit: max_p99_ns.map(|limit_ns| finder.limit(limit_ns)),
        paper: finder.paper(),
        falls: finder.falls(),
    }
}

struct Finder {
    loads: Vec<f64>,
    /// Medians of IOPS, mean latency and 99th percentile of each load. Unlike `lines`, they contain
    /// the round effects.
    medians: Vec<[f64; 3]>,
    lines: Lines,
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
            return Mark::Undetermined { why: Reason::StillRising { gain, last: self.last() } };
        }
        if let Some(why) = self.dips() {
            return Mark::Undetermined { why };
        }
        match self.mark(|line| Some(picks::saturation(line)), true) {
            // When only the last load reaches 95 % of the peak, the peak may be above it.
            Mark::Found(point) if point.cell + 1 == self.loads.len() => {
                Mark::Undetermined { why: Reason::Beyond { last: point.load } }
            }
            mark => mark,
        }
    }

    fn limit(&self, limit_ns: f64) -> Mark {
        if picks::limit(&self.lines.measured, limit_ns).is_none() {
            let least = |line: &Line| (0..line.len()).min_by(|a, b| line.p99(*a).total_cmp(&line.p99(*b)));
            let at = least(&self.lines.measured).unwrap_or(0);
            let (min_p99_ns, load) = (self.lines.measured.p99(at).exp(), self.loads[at]);
            return Mark::Undetermined { why: Reason::NothingUnder { limit_ns, min_p99_ns, load } };
        }
        // A wide interval is accepted here: all loads of a plateau are equally good.
        self.mark(|line| picks::limit(line, limit_ns), false)
    }

    /// How far the IOPS of the last load are below the peak, as a share. `None` unless 97.5 % of
    /// the bootstrap lines fall and the share is above 5 %.
    fn falls(&self) -> Option<f64> {
        let last = self.loads.len() - 1;
        let peak = picks::peak(&self.lines.measured);
        let fall = |line: &Line| line.iops(last) - line.iops(peak);
        let surely = self.share(|line| fall(line) < 0.0) >= 0.975;
        let share = 1.0 - fall(&self.lines.measured).exp();
        (surely && share > 1.0 - SATURATION).then_some(share)
    }

    /// Growth of IOPS over the last third of the load, where it is above [`STILL_RISING`] and
    /// significant.
    fn still_rising(&self) -> Option<f64> {
        let last = self.loads.len() - 1;
        let before = (0..last).rev().find(|cell| self.loads[*cell] <= self.loads[last] * 2.0 / 3.0)?;
        let gain = |line: &Line| line.iops(last) - line.iops(before);
        let large = (1.0 + STILL_RISING).ln();
        let seen = gain(&self.lines.measured);
        (seen > large && self.share(|line| gain(line) > 0.0) >= 0.975).then(|| seen.exp() - 1.0)
    }

    /// Whether IOPS reach the plateau, fall below it and reach it again in nearly all bootstrap
    /// lines.
    fn dips(&self) -> Option<Reason> {
        let seen = &self.lines.measured;
        let near: Vec<usize> = picks::near_the_plateau(seen).collect();
        let (first, last) = (*near.first()?, *near.last()?);
        let at = (first + 1..last).min_by(|a, b| seen.iops(*a).total_cmp(&seen.iops(*b)))?;
        let deep = |line: &Line| line.iops(at) - line.iops(first).min(line.iops(last)) < SATURATION.ln();
        (deep(seen) && self.share(deep) >= SHARE_OF_SEARCHED).then(|| Reason::TwoPeaks {
            first: self.loads[first],
            between: self.loads[at],
            second: self.loads[last],
        })
    }

    /// Whether power has two peaks with a significant valley between them, and neither peak is
    /// significantly higher.
    fn two_peaks(&self) -> Option<Reason> {
        let seen = &self.lines.measured;
        let best = picks::efficient(seen);
        let highest =
            |line: &Line, cells: std::ops::Range<usize>| cells.max_by(|a, b| line.power(*a).total_cmp(&line.power(*b)));
        // The deepest valley: the load whose power is farthest below the highest power beyond it.
        let valleys = (0..seen.len()).filter_map(|at| {
            let other = if at < best { highest(seen, 0..at)? } else { highest(seen, at + 1..seen.len())? };
            (at != best).then(|| (at, other, seen.power(other) - seen.power(at)))
        });
        let (at, other, _) = valleys.max_by(|a, b| a.2.total_cmp(&b.2))?;
        let valley = |line: &Line| line.power(at) < line.power(other) && line.power(at) < line.power(best);
        let rivals = self.share(|line| line.power(other) > line.power(best));
        (rivals >= 0.025 && self.share(valley) >= SHARE_OF_SEARCHED).then(|| Reason::TwoPeaks {
            first: self.loads[best.min(other)],
            between: self.loads[at],
            second: self.loads[best.max(other)],
        })
    }

    /// Share of the bootstrap lines for which `holds` is true.
    fn share(&self, holds: impl Fn(&Line) -> bool) -> f64 {
        let lines = &self.lines.resampled;
        if lines.is_empty() {
            return f64::from(u8::from(holds(&self.lines.measured)));
        }
        lines.iter().filter(|line| holds(line)).count() as f64 / lines.len() as f64
    }

    fn last(&self) -> f64 {
        self.loads.last().copied().unwrap_or(0.0)
    }

    fn mark(&self, pick: impl Fn(&Line) -> Option<usize>, must_be_narrow: bool) -> Mark {
        let seen = &self.lines.measured;
        let Some(cell) = pick(seen) else { return Mark::Undetermined { why: Reason::Flat } };
        let mut picked: Vec<usize> = self.lines.resampled.iter().filter_map(&pick).collect();
        picked.sort_unstable();
        let at = |share: f64| picked[((picked.len() - 1) as f64 * share).round() as usize];
        let tail = (1.0 - CONFIDENCE) / 2.0;
        let ends = (!picked.is_empty()).then(|| (at(tail).min(cell), at(1.0 - tail).max(cell)));
        if let Some((low, high)) = ends
            && must_be_narrow
            && (high - low + 1) as f64 > TOO_WIDE * self.loads.len() as f64
        {
            let why = Reason::Noise { low: self.loads[low], high: self.loads[high], scatter: self.lines.scatter };
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

    /// A point at the first or last load is undetermined, because the best load may be outside the
    /// sweep. A first load of 1 is a valid point: no load is below it.
    fn unless_at_an_end(&self, mark: Mark) -> Mark {
        match &mark {
            Mark::Found(point) if point.cell + 1 == self.loads.len() => {
                Mark::Undetermined { why: Reason::Beyond { last: point.load } }
            }
            Mark::Found(point) if point.cell == 0 && point.load > 1.0 => {
                Mark::Undetermined { why: Reason::Before { first: point.load } }
            }
            _ => mark,
        }
    }
}
