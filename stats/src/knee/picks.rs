//! The rule of each point: which load it picks on one line. Noise is handled by the caller, which
//! applies a rule to many bootstrap lines. All values of a line are logarithms.

use super::{SATURATION, noise::Line};
use crate::summary::median;

/// Loads within this many standard deviations of the peak count as the plateau.
const INDISTINGUISHABLE: f64 = 3.0;

fn highest(line: &Line, value: impl Fn(usize) -> f64) -> usize {
    // Of equal values the first wins, so that the start of a plateau is picked.
    (0..line.len()).fold(0, |best, cell| if value(cell) > value(best) { cell } else { best })
}

/// The load with the largest power.
pub fn efficient(line: &Line) -> usize {
    highest(line, |cell| line.power(cell))
}

/// The load with the most IOPS.
pub fn peak(line: &Line) -> usize {
    highest(line, |cell| line.iops(cell))
}

/// IOPS of the plateau: the median of all loads within [`INDISTINGUISHABLE`] deviations of the
/// peak. The peak itself would be biased upwards, the more so the longer the plateau.
pub fn plateau(line: &Line) -> f64 {
    let top = line.iops(peak(line));
    let alike: Vec<f64> = (0..line.len())
        .map(|cell| line.iops(cell))
        .filter(|iops| *iops >= top - INDISTINGUISHABLE * line.deviation())
        .collect();
    median(&alike).unwrap_or(top)
}

/// The loads that reach 95 % of the plateau.
pub fn near_the_plateau(line: &Line) -> impl Iterator<Item = usize> {
    let enough = plateau(line) + SATURATION.ln();
    (0..line.len()).filter(move |cell| line.iops(*cell) >= enough)
}

/// The first load that reaches 95 % of the plateau on the best non-decreasing fit up to the peak.
/// Without the fit, the first noisy load that happens to reach the height would be picked too
/// early.
pub fn saturation(line: &Line) -> usize {
    let enough = plateau(line) + SATURATION.ln();
    let peak = peak(line);
    let rising = rising_fit((0..=peak).map(|cell| line.iops(cell)));
    rising.iter().position(|iops| *iops >= enough).unwrap_or(peak)
}

/// Isotonic regression: the nearest non-decreasing values, by pooling adjacent violators.
fn rising_fit(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut pools: Vec<(f64, usize)> = Vec::new();
    for value in values {
        pools.push((value, 1));
        while let [.., (a, n), (b, m)] = pools[..]
            && a > b
        {
            pools.truncate(pools.len() - 2);
            pools.push(((a * n as f64 + b * m as f64) / (n + m) as f64, n + m));
        }
    }
    pools.into_iter().flat_map(|(mean, count)| std::iter::repeat_n(mean, count)).collect()
}

/// The load with the most IOPS whose 99th percentile is at most `limit_ns`; `None` when no load has
/// one.
pub fn limit(line: &Line, limit_ns: f64) -> Option<usize> {
    let under = (0..line.len()).filter(|cell| line.p99(*cell) <= limit_ns.ln());
    under.fold(None, |best, cell| match best {
        Some(best) if line.iops(best) >= line.iops(cell) => Some(best),
        _ => Some(cell),
    })
}

/// The load at which IOPS and latency are farthest apart when each is scaled to its own range;
/// `None` when one of them is constant.
pub fn paper(line: &Line) -> Option<usize> {
    let scale = |value: &dyn Fn(usize) -> f64| {
        let values: Vec<f64> = (0..line.len()).map(|cell| value(cell).exp()).collect();
        let (min, max) = values.iter().fold((f64::MAX, f64::MIN), |(min, max), v| (min.min(*v), max.max(*v)));
        (max > min).then(|| values.into_iter().map(|value| (value - min) / (max - min)).collect::<Vec<_>>())
    };
    let (iops, latency) = (scale(&|cell| line.iops(cell))?, scale(&|cell| line.mean(cell))?);
    Some(highest(line, |cell| iops[cell] - latency[cell]))
}
