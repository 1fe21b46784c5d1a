//! Steady state: whether a device has settled, by the rule of SNIA's Solid State Storage
//! Performance Test Specification.
//!
//! ```text
//!   figure of each round ──▶ the last five ──▶ judge ──┬─ range: (largest - smallest) / mean            <= 20 %
//!   (IOPS, MB/s, latency)    "measurement window"      └─ slope: rise of the line of least squares over
//!                                                          the window, last round - first, / mean        <= 10 %
//! ```
//!
//! A fresh SSD is fast until its spare blocks are used up; a cache is fast until it is full. A
//! measurement begun then tells of something that no user will see again. So measuring begins when
//! five rounds in a row meet both halves of the rule (PTS 2.0, "Steady State": the data excursion
//! and the slope excursion), and if later rounds cease to meet it, that is told.
//!
//! **Where the rule is weak.** It looks at five rounds only. A decline slower than 2 % a round
//! passes; so does a device that will slow down after the sixth. A round must be long against the
//! device's own rhythm (garbage collection, journal commits), or its noise alone is more than 20 %;
//! the specification uses a minute, and [`round_for`] gives the longest that still leaves room for
//! twenty in the time that there is.
//!
//! Everything here is pure: figures in, judgement out. Time is told in rounds or in nanoseconds
//! that the caller gives.

use crate::record::{SeriesPoint, SteadyRecord};

/// Rounds that decide.
pub const ROUNDS: usize = 5;
/// Largest range of the deciding rounds, as a share of their mean.
pub const RANGE_MAX: f64 = 0.20;
/// Largest slope over the deciding rounds, up or down, as a share of their mean.
pub const SLOPE_MAX: f64 = 0.10;

/// A round is no longer than the specification's.
const ROUND_MAX_NS: u64 = 60_000_000_000;
/// How many rounds should find room in the time that there is to settle.
const ROUNDS_WANTED: u64 = 20;

/// What five rounds say.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Window {
    /// Mean of the rounds.
    pub mean: f64,
    /// Largest minus smallest, as a share of the mean.
    pub range: f64,
    /// Rise of the line of least squares from the first round to the last, as a share of the mean;
    /// below 0 when it falls.
    pub slope: f64,
}

impl Window {
    /// Whether the rule is met.
    pub fn is_steady(&self) -> bool {
        self.range <= RANGE_MAX && self.slope.abs() <= SLOPE_MAX
    }

    /// How near it is to being met, from 0 (far) to 1 (met): the worse of the two halves.
    pub fn nearness(&self) -> f64 {
        let near = |found: f64, allowed: f64| if found <= allowed { 1.0 } else { allowed / found };
        near(self.range, RANGE_MAX).min(near(self.slope.abs(), SLOPE_MAX))
    }
}

/// Judges the last [`ROUNDS`] of `rounds`. `None` for fewer, for figures that are no numbers, and
/// when nothing was done in any of them: a device that answers nothing is not steady.
pub fn judge(rounds: &[f64]) -> Option<Window> {
    let window = &rounds[rounds.len().checked_sub(ROUNDS)?..];
    let mean = window.iter().sum::<f64>() / ROUNDS as f64;
    if !mean.is_finite() || mean <= 0.0 {
        return None;
    }
    let largest = window.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let smallest = window.iter().copied().fold(f64::INFINITY, f64::min);
    // Least squares over x = -2..2: the mean of x is 0, so its terms vanish.
    let middle = (ROUNDS as f64 - 1.0) / 2.0;
    let (mut products, mut squares) = (0.0, 0.0);
    for (round, figure) in window.iter().enumerate() {
        let x = round as f64 - middle;
        products += x * figure;
        squares += x * x;
    }
    let rise = products / squares * (ROUNDS as f64 - 1.0);
    Some(Window { mean, range: (largest - smallest) / mean, slope: rise / mean })
}

/// Follows rounds as they come, and remembers when the rule was first met and when it ceased to be.
#[derive(Debug, Clone, Default)]
pub struct Tracker {
    last: Vec<f64>,
    seen: u64,
    reached: Option<u64>,
    left: Option<u64>,
    deciding: Option<Window>,
    now: Option<Window>,
}

impl Tracker {
    /// Nothing seen yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the figure of the next round. Returns whether the steady state has been reached, now
    /// or earlier.
    pub fn push(&mut self, figure: f64) -> bool {
        if self.last.len() == ROUNDS {
            self.last.remove(0);
        }
        self.last.push(figure);
        self.seen += 1;
        self.now = judge(&self.last);
        let steady = self.now.is_some_and(|window| window.is_steady());
        if self.reached.is_none() {
            self.deciding = self.now;
            self.reached = steady.then_some(self.seen);
        } else if !steady && self.left.is_none() {
            self.left = Some(self.seen);
        }
        self.reached.is_some()
    }

    /// After how many rounds it was reached.
    pub fn reached(&self) -> Option<u64> {
        self.reached
    }

    /// After how many rounds it was seen to be left again.
    pub fn left(&self) -> Option<u64> {
        self.left
    }

    /// What the last five rounds say.
    pub fn window(&self) -> Option<Window> {
        self.now
    }

    /// How near the steady state is, from 0 to 1, for a display: by the last five rounds, and by
    /// how many there are of them.
    pub fn nearness(&self) -> f64 {
        match self.now {
            Some(window) => window.nearness(),
            // Fewer than five: what there is of them, and never more than half, for nothing is
            // known yet.
            None => self.last.len() as f64 / ROUNDS as f64 / 2.0,
        }
    }

    /// What is kept of it in a result, for rounds of `round_ns` from the beginning of the phase.
    pub fn record(&self, round_ns: u64) -> SteadyRecord {
        let at = |rounds: u64| rounds.saturating_mul(round_ns);
        let window = self.deciding.unwrap_or(Window { mean: 0.0, range: 0.0, slope: 0.0 });
        SteadyRecord {
            reached_ns: self.reached.map(at),
            left_ns: self.left.map(at),
            round_ns,
            range: window.range,
            slope: window.slope,
        }
    }
}

/// Length of a round, nanoseconds, when there are `within_ns` to settle and the time series has
/// steps of `interval_ns`: whole steps, at least one; at most a minute, as in the specification;
/// and so short that twenty rounds fit where that is possible.
pub fn round_for(within_ns: u64, interval_ns: u64) -> u64 {
    let interval_ns = interval_ns.max(1);
    let wanted_ns = (within_ns / ROUNDS_WANTED).min(ROUND_MAX_NS);
    (wanted_ns / interval_ns).max(1).saturating_mul(interval_ns)
}

/// Cuts a time series that grows into rounds. It goes by time, so intervals may become longer on
/// the way; a round that their ends do not meet is as much longer, and the next one shorter; rounds
/// that end within one interval are alike.
#[derive(Debug, Clone, Copy)]
pub struct Rounds {
    round_ns: u64,
    complete: u64,
    /// When the round under way began, how far it has come, and what was done in it.
    begun_ns: u64,
    until_ns: u64,
    ios: u64,
}

impl Rounds {
    /// Rounds of `round_ns`, from the beginning of the series.
    pub fn new(round_ns: u64) -> Self {
        Self { round_ns: round_ns.max(1), complete: 0, begun_ns: 0, until_ns: 0, ios: 0 }
    }

    /// How many are complete.
    pub fn complete(&self) -> u64 {
        self.complete
    }

    /// The requests a second of each round that the series has completed since it was last seen.
    pub fn follow(&mut self, series: &[SeriesPoint]) -> Vec<f64> {
        let unseen = series.partition_point(|point| point.start_ns < self.until_ns);
        let mut figures = Vec::new();
        for point in &series[unseen..] {
            self.ios += point.read_ios + point.write_ios;
            self.until_ns = point.start_ns.saturating_add(point.len_ns.max(1));
            let ended = self.until_ns / self.round_ns;
            if ended > self.complete {
                let figure = self.ios as f64 * 1e9 / (self.until_ns - self.begun_ns) as f64;
                figures.extend((self.complete..ended).map(|_| figure));
                self.complete = ended;
                (self.begun_ns, self.ios) = (self.until_ns, 0);
            }
        }
        figures
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rand_xoshiro::{
        Xoshiro256PlusPlus,
        rand_core::{Rng, SeedableRng},
    };

    /// Rounds from which nothing departs by more than `noise` (a share).
    struct Device {
        rng: Xoshiro256PlusPlus,
        noise: f64,
    }

    impl Device {
        fn new(noise: f64, seed: u64) -> Self {
            Self { rng: Xoshiro256PlusPlus::seed_from_u64(seed), noise }
        }

        fn answer(&mut self, iops: f64) -> f64 {
            let unit = (self.rng.next_u64() >> 11) as f64 / (1_u64 << 53) as f64;
            iops * (1.0 + self.noise * (2.0 * unit - 1.0))
        }
    }

    fn follow(rounds: impl IntoIterator<Item = f64>) -> Tracker {
        let mut tracker = Tracker::new();
        for figure in rounds {
            tracker.push(figure);
        }
        tracker
    }

    #[test]
    fn known_series_are_judged_as_on_paper() {
        assert_eq!(judge(&[100.0; 4]), None);
        let flat = judge(&[100.0; 5]).unwrap();
        assert_eq!((flat.range, flat.slope, flat.is_steady()), (0.0, 0.0, true));
        // A line that rises by 2.5 % of the mean a round: over five rounds 10 %, exactly what is
        // allowed.
        let line = judge(&[95.0, 97.5, 100.0, 102.5, 105.0]).unwrap();
        assert!((line.range - 0.10).abs() < 1e-12 && (line.slope - 0.10).abs() < 1e-12, "{line:?}");
        // Least squares by hand: sum(x y) = -2*90 - 100 + 100 + 2*110 = 40, / 10 = 4 a round, 16
        // over the window; the mean is 100.
        let steep = judge(&[90.0, 100.0, 100.0, 100.0, 110.0]).unwrap();
        assert!((steep.slope - 0.16).abs() < 1e-12 && (steep.range - 0.20).abs() < 1e-12, "{steep:?}");
        assert!(!steep.is_steady(), "the range is met, the slope is not");
        // Up and down: no slope, but a range of 21 %.
        let wild = judge(&[110.0, 100.0, 89.0, 100.0, 110.0]).unwrap();
        assert!(wild.slope.abs() < 1e-9 && wild.range > RANGE_MAX && !wild.is_steady(), "{wild:?}");
        // Only the last five count.
        assert_eq!(judge(&[9e9, 100.0, 100.0, 100.0, 100.0, 100.0]), Some(flat));
    }

    #[test]
    fn a_device_that_does_nothing_is_not_steady() {
        assert_eq!(judge(&[0.0; 5]), None);
        assert_eq!(judge(&[f64::NAN, 1.0, 1.0, 1.0, 1.0]), None);
        assert_eq!(judge(&[f64::INFINITY, 1.0, 1.0, 1.0, 1.0]), None);
    }

    #[test]
    fn a_fresh_ssd_is_not_steady_until_its_spare_blocks_are_used_up() {
        // 100k IOPS fall exponentially to 20k; noise of 2 %. The rule must let the fall pass and
        // then be met for good.
        let mut device = Device::new(0.02, 7);
        let truth = |round: u64| 20_000.0 + 80_000.0 * (-(round as f64) / 6.0).exp();
        let tracker = follow((0..60).map(|round| device.answer(truth(round))));
        let reached = tracker.reached().unwrap();
        let within = truth(reached) / 20_000.0;
        assert!((15..30).contains(&reached) && within < 1.15, "after {reached} rounds, {within} of the final rate");
        assert_eq!(tracker.left(), None);
    }

    #[test]
    fn a_cache_that_fills_during_the_measurement_is_told() {
        // Steady at 50k, until after twelve rounds the cache is full: 8k from then on.
        let mut device = Device::new(0.03, 3);
        let tracker = follow((0..30).map(|round| device.answer(if round < 12 { 50_000.0 } else { 8_000.0 })));
        assert_eq!((tracker.reached(), tracker.left()), (Some(5), Some(13)));
        // The figures are those that decided, not those of the fall.
        let record = tracker.record(1_000_000_000);
        assert!(record.range <= RANGE_MAX && record.slope.abs() <= SLOPE_MAX, "{record:?}");
        assert_eq!((record.reached_ns, record.left_ns), (Some(5_000_000_000), Some(13_000_000_000)));
    }

    #[test]
    fn noise_within_the_rule_passes_and_noise_beyond_it_does_not() {
        // Uniform noise of 4 %: a range of 8 % at most, a slope of 8 % at most.
        let calm = follow((0..200).map(|_| 1.0).scan(Device::new(0.04, 1), |device, x| Some(device.answer(x))));
        assert_eq!((calm.reached(), calm.left()), (Some(5), None));
        // Noise of 60 %: five rounds within 20 % of each other are a rare accident, seen here in
        // none of forty.
        let wild = follow((0..40).map(|_| 1.0).scan(Device::new(0.6, 1), |device, x| Some(device.answer(x))));
        assert_eq!(wild.reached(), None);
        assert!(wild.nearness() < 1.0);
    }

    #[test]
    fn nearness_rises_as_a_device_settles() {
        let mut tracker = Tracker::new();
        assert_eq!(tracker.nearness(), 0.0);
        for round in 0..5 {
            tracker.push(1000.0 - 100.0 * f64::from(round));
        }
        let early = tracker.nearness();
        for round in 0..5 {
            tracker.push(500.0 - 20.0 * f64::from(round));
        }
        let later = tracker.nearness();
        (0..5).for_each(|_| {
            tracker.push(400.0);
        });
        assert!(early < later && later < 1.0 && tracker.nearness() == 1.0, "{early} {later}");
    }

    #[test]
    fn rounds_are_whole_steps_of_at_most_a_minute() {
        let s = 1_000_000_000;
        assert_eq!(round_for(60 * s, s), 3 * s);
        assert_eq!(round_for(7 * 3600 * s, s), 60 * s);
        assert_eq!(round_for(10 * s, s), s, "no shorter than a step");
        assert_eq!(round_for(100 * s, 2 * s), 4 * s);
        assert_eq!(round_for(0, 0), 1);
    }

    /// Intervals of half a second with so many requests each.
    fn series(ios: &[u64]) -> Vec<SeriesPoint> {
        let half_ns = 500_000_000;
        let point = |(number, ios): (usize, &u64)| SeriesPoint {
            start_ns: number as u64 * half_ns,
            len_ns: half_ns,
            read_ios: *ios,
            write_ios: 10,
            ..SeriesPoint::default()
        };
        ios.iter().enumerate().map(point).collect()
    }

    #[test]
    fn a_time_series_is_cut_into_rounds_as_it_grows() {
        let whole = series(&[90, 90, 190, 190, 5, 5, 90, 90, 3]);
        let mut rounds = Rounds::new(1_000_000_000);
        let mut figures = Vec::new();
        for seen in [0, 1, 5, 5, 7, 9] {
            figures.extend(rounds.follow(&whole[..seen]));
        }
        // The last step is no whole round.
        assert_eq!((figures, rounds.complete()), (vec![200.0, 400.0, 30.0, 200.0], 4));
        assert_eq!(Rounds::new(1_500_000_000).follow(&whole).len(), 3);
    }

    #[test]
    fn rounds_go_on_when_intervals_become_longer() {
        let mut rounds = Rounds::new(1_500_000_000);
        assert_eq!(rounds.follow(&series(&[90; 4])), [200.0]);
        // Two seconds by half a second have become one interval, and each later one is as long:
        // rounds meet their ends as well as they can.
        let long = |number: u64| SeriesPoint {
            start_ns: number * 2_000_000_000,
            len_ns: 2_000_000_000,
            read_ios: 400,
            ..SeriesPoint::default()
        };
        assert_eq!(rounds.follow(&[long(0), long(1), long(2)]), [(100.0 + 400.0) / 2.5, 200.0, 200.0]);
        assert_eq!(rounds.complete(), 4);
    }

    proptest! {
        #[test]
        fn the_judgement_does_not_depend_on_the_unit(rounds in prop::collection::vec(1.0_f64..1e6, 5), scale in 1e-3_f64..1e3) {
            let scaled: Vec<f64> = rounds.iter().map(|figure| figure * scale).collect();
            let (one, other) = (judge(&rounds).unwrap(), judge(&scaled).unwrap());
            prop_assert!((one.range - other.range).abs() < 1e-9 && (one.slope - other.slope).abs() < 1e-9);
            // The best line cannot rise by more than 1.2 times the range of five points, so a range
            // of 8 % suffices alone.
            prop_assert!(one.slope.abs() <= 1.2 * one.range + 1e-9);
        }

        #[test]
        fn backwards_the_slope_is_the_opposite(rounds in prop::collection::vec(1.0_f64..1e6, 5)) {
            let mut backwards = rounds.clone();
            backwards.reverse();
            let (there, back) = (judge(&rounds).unwrap(), judge(&backwards).unwrap());
            prop_assert!((there.slope + back.slope).abs() < 1e-9 && (there.range - back.range).abs() < 1e-12);
        }
    }
}
