//! Each rule on one line, without noise: which load it picks.

use super::{SATURATION, noise::Line};
use crate::summary::median;

/// Loads within so many deviations of the peak may be as good as it.
const INDISTINGUISHABLE: f64 = 3.0;

fn highest(line: &Line, value: impl Fn(usize) -> f64) -> usize {
    // The first of equals, so that a plateau is entered and not crossed.
    (0..line.len()).fold(0, |best, cell| if value(cell) > value(best) { cell } else { best })
}

/// Largest power.
pub fn efficient(line: &Line) -> usize {
    highest(line, |cell| line.power(cell))
}

/// Most IOPS.
pub fn peak(line: &Line) -> usize {
    highest(line, |cell| line.iops(cell))
}

/// The height of the plateau: the middle of all loads that chance cannot tell from the peak. The
/// peak itself is the luckiest of them, and the longer the plateau the luckier.
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

/// First at 95 % of the plateau, on the rising line that fits best up to there: the first of many
/// noisy loads that happens to reach a height comes too early.
pub fn saturation(line: &Line) -> usize {
    let enough = plateau(line) + SATURATION.ln();
    let peak = peak(line);
    let rising = rising_fit((0..=peak).map(|cell| line.iops(cell)));
    rising.iter().position(|iops| *iops >= enough).unwrap_or(peak)
}

/// The non-decreasing values nearest to these (pool adjacent violators).
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

/// Most IOPS with the 99th percentile under `limit_ns`; `None` when it is over it everywhere.
pub fn limit(line: &Line, limit_ns: f64) -> Option<usize> {
    let under = (0..line.len()).filter(|cell| line.p99(*cell) <= limit_ns.ln());
    under.fold(None, |best, cell| match best {
        Some(best) if line.iops(best) >= line.iops(cell) => Some(best),
        _ => Some(cell),
    })
}

/// Where IOPS and latency lie farthest apart when each is drawn to its own axis; `None` when one of
/// them does not rise.
pub fn paper(line: &Line) -> Option<usize> {
    let scale = |value: &dyn Fn(usize) -> f64| {
        let values: Vec<f64> = (0..line.len()).map(|cell| value(cell).exp()).collect();
        let (least, most) = values.iter().fold((f64::MAX, f64::MIN), |(least, most), v| (least.min(*v), most.max(*v)));
        (most > least).then(|| values.into_iter().map(|value| (value - least) / (most - least)).collect::<Vec<_>>())
    };
    let (iops, latency) = (scale(&|cell| line.iops(cell))?, scale(&|cell| line.mean(cell))?);
    Some(highest(line, |cell| iops[cell] - latency[cell]))
}
