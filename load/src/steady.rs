//! Steady state of a device, by the rule of SNIA's Solid State Storage Performance Test
//! Specification.
//!
//! ```text
//!   IOPS of each round ──▶ last five rounds ──▶ judge ──┬─ range: (max - min) / mean      <= 20 %
//!                          "measurement window"         └─ slope: rise of the regression
//!                                                          line over the window / mean    <= 10 %
//! ```
//!
//! A fresh SSD is fast until its spare blocks are used up, and a cache is fast until it is full. A
//! measurement of that time does not describe the device in use. The measured window therefore
//! starts when five consecutive rounds meet both conditions (PTS 2.0, "Steady State": data
//! excursion and slope excursion). If later rounds violate a condition, the result says so.
//!
//! **Limits of the rule.** The rule uses five rounds only. A decline of less than 2 % per round
//! passes, and so does a device that slows down after the fifth round. A round must be long
//! compared with the device's garbage collection and journal commits, or noise alone exceeds 20 %.
//! The specification uses one minute. `round_for` returns the longest round of which twenty fit
//! into the given time.
//!
//! All functions are pure. Times are given by the caller, in rounds or nanoseconds.

use crate::record::{SeriesPoint, SteadyRecord};
use serde::{Deserialize, Serialize};

/// Number of rounds in the measurement window.
pub const ROUNDS: usize = 5;
/// Largest range of the window, as a share of its mean.
pub const RANGE_MAX: f64 = 0.20;
/// Largest slope over the window, up or down, as a share of its mean.
pub const SLOPE_MAX: f64 = 0.10;

/// Longest round: that of the specification.
const ROUND_MAX_NS: u64 = 60_000_000_000;
/// Number of rounds that should fit into the time to settle.
const ROUNDS_WANTED: u64 = 20;

/// Range and slope of five rounds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Window {
    /// Mean of the rounds.
    pub(crate) mean: f64,
    /// Largest minus smallest, as a share of the mean.
    pub(crate) range: f64,
    /// Rise of the regression line from the first round to the last, as a share of the mean;
    /// negative when it falls.
    pub(crate) slope: f64,
}

impl Window {
    /// Whether range and slope meet the rule.
    fn is_steady(&self) -> bool {
        self.range <= RANGE_MAX && self.slope.abs() <= SLOPE_MAX
    }
}

/// Computes range and slope of the last [`ROUNDS`] of `rounds`. `None` for fewer rounds, for
/// figures that are not finite, and when all figures are 0: a device that completes nothing is not
/// steady.
pub(crate) fn judge(rounds: &[f64]) -> Option<Window> {
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

/// Checks each new round, and records when the rule was first met and when it was first violated
/// afterwards.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tracker {
    last: Vec<f64>,
    seen: u64,
    reached: Option<u64>,
    left: Option<u64>,
    deciding: Option<Window>,
    now: Option<Window>,
}

impl Tracker {
    /// A tracker without rounds.
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Adds the figure of the next round. Returns whether the steady state has been reached, now or
    /// earlier.
    pub(crate) fn push(&mut self, figure: f64) -> bool {
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

    /// Number of rounds after which the steady state was reached; `None`: not reached.
    pub(crate) fn reached(&self) -> Option<u64> {
        self.reached
    }

    /// Range and slope of the last five rounds.
    pub(crate) fn window(&self) -> Option<Window> {
        self.now
    }

    /// The record for a result. Rounds last `round_ns` and start at the beginning of the phase.
    pub(crate) fn record(&self, round_ns: u64) -> SteadyRecord {
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

/// Progress towards the steady state.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SteadyProgress {
    /// Number of complete rounds.
    pub rounds: usize,
    /// Range of the last five rounds as a share of their mean; must reach
    /// [`RANGE_MAX`] or less.
    pub range: f64,
    /// Slope over the last five rounds as a share of their mean; its absolute value must reach
    /// [`SLOPE_MAX`] or less.
    pub slope: f64,
}

/// The wait of a phase for the steady state, and its check during the window.
#[derive(Debug)]
pub struct Settling {
    tracker: Tracker,
    within_ns: u64,
    round_ns: u64,
    rounds: Rounds,
}

impl Settling {
    /// A wait of at most `within_ns`, for a time series with intervals of `interval_ns`.
    pub fn new(within_ns: u64, interval_ns: u64) -> Self {
        let round_ns = round_for(within_ns, interval_ns);
        Self { tracker: Tracker::new(), within_ns, round_ns, rounds: Rounds::new(round_ns) }
    }

    /// Checks the rounds that are new in a growing series.
    pub fn follow(&mut self, series: &[SeriesPoint]) {
        for figure in self.rounds.follow(series) {
            self.tracker.push(figure);
        }
    }

    /// Whether the steady state is reached, or the time for it is over.
    pub fn is_over(&self, now_ns: u64) -> bool {
        self.tracker.reached().is_some() || now_ns >= self.within_ns
    }

    /// Longest wait, nanoseconds.
    pub fn within_ns(&self) -> u64 {
        self.within_ns
    }

    /// How near the steady state is.
    pub fn nearness(&self) -> SteadyProgress {
        let window = self.tracker.window();
        SteadyProgress {
            rounds: self.rounds.complete() as usize,
            range: window.map_or(0.0, |window| window.range),
            slope: window.map_or(0.0, |window| window.slope),
        }
    }

    /// The record for a result.
    pub fn record(&self) -> SteadyRecord {
        self.tracker.record(self.round_ns)
    }
}

/// Length of a round in nanoseconds, for a time to settle of `within_ns` and a time series with
/// intervals of `interval_ns`. A round is a whole number of intervals, at least one and at most a
/// minute, and so short that twenty rounds fit into `within_ns` where that is possible.
pub(crate) fn round_for(within_ns: u64, interval_ns: u64) -> u64 {
    let interval_ns = interval_ns.max(1);
    let wanted_ns = (within_ns / ROUNDS_WANTED).min(ROUND_MAX_NS);
    (wanted_ns / interval_ns).max(1).saturating_mul(interval_ns)
}

/// Divides a growing time series into rounds of equal time. The intervals of the series may become
/// longer meanwhile. A round ends at the end of an interval, so it may be longer and the next one
/// shorter; several rounds that end within one interval have the same figure.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rounds {
    round_ns: u64,
    complete: u64,
    /// Start of the current round, end of its last interval, and the requests that completed in it.
    begun_ns: u64,
    until_ns: u64,
    ios: u64,
}

impl Rounds {
    /// Rounds of `round_ns`, from the start of the series.
    pub(crate) fn new(round_ns: u64) -> Self {
        Self { round_ns: round_ns.max(1), complete: 0, begun_ns: 0, until_ns: 0, ios: 0 }
    }

    /// Number of complete rounds.
    pub(crate) fn complete(&self) -> u64 {
        self.complete
    }

    /// Requests per second of each round that the series has completed since the last call.
    pub(crate) fn follow(&mut self, series: &[SeriesPoint]) -> Vec<f64> {
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

    /// A device whose rounds have uniform noise of at most `noise`, as a share.
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
    fn range_and_slope_equal_those_computed_by_hand() {
        assert_eq!(judge(&[100.0; 4]), None);
        let flat = judge(&[100.0; 5]).unwrap();
        assert_eq!((flat.range, flat.slope, flat.is_steady()), (0.0, 0.0, true));
        // A line that rises by 2.5 % of the mean per round: over five rounds 10 %, the largest
        // slope that the rule allows.
        let line = judge(&[95.0, 97.5, 100.0, 102.5, 105.0]).unwrap();
        assert!((line.range - 0.10).abs() < 1e-12 && (line.slope - 0.10).abs() < 1e-12, "{line:?}");
        // Least squares by hand: sum(x y) = -2*90 - 100 + 100 + 2*110 = 40, / 10 = 4 per round, 16
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
    fn a_device_that_completes_nothing_is_not_steady() {
        assert_eq!(judge(&[0.0; 5]), None);
        assert_eq!(judge(&[f64::NAN, 1.0, 1.0, 1.0, 1.0]), None);
        assert_eq!(judge(&[f64::INFINITY, 1.0, 1.0, 1.0, 1.0]), None);
    }

    #[test]
    fn a_fresh_ssd_is_not_steady_until_its_spare_blocks_are_used_up() {
        // 100k IOPS fall exponentially to 20k; noise of 2 %. The rule must not be met during the
        // fall, and stay met afterwards.
        let mut device = Device::new(0.02, 7);
        let truth = |round: u64| 20_000.0 + 80_000.0 * (-(round as f64) / 6.0).exp();
        let tracker = follow((0..60).map(|round| device.answer(truth(round))));
        let reached = tracker.reached().unwrap();
        let within = truth(reached) / 20_000.0;
        assert!((15..30).contains(&reached) && within < 1.15, "after {reached} rounds, {within} of the final rate");
        assert_eq!(tracker.left, None);
    }

    #[test]
    fn a_cache_that_fills_during_the_measurement_is_recorded() {
        // Steady at 50k IOPS until the cache is full after twelve rounds, then 8k.
        let mut device = Device::new(0.03, 3);
        let tracker = follow((0..30).map(|round| device.answer(if round < 12 { 50_000.0 } else { 8_000.0 })));
        assert_eq!((tracker.reached(), tracker.left), (Some(5), Some(13)));
        // Range and slope are those of the rounds that reached the steady state, not of the fall.
        let record = tracker.record(1_000_000_000);
        assert!(record.range <= RANGE_MAX && record.slope.abs() <= SLOPE_MAX, "{record:?}");
        assert_eq!((record.reached_ns, record.left_ns), (Some(5_000_000_000), Some(13_000_000_000)));
    }

    #[test]
    fn small_noise_meets_the_rule_and_large_noise_does_not() {
        // Uniform noise of 4 %: a range of 8 % at most, a slope of 8 % at most.
        let calm = follow((0..200).map(|_| 1.0).scan(Device::new(0.04, 1), |device, x| Some(device.answer(x))));
        assert_eq!((calm.reached(), calm.left), (Some(5), None));
        // Noise of 60 %: five consecutive rounds within 20 % are unlikely; with this seed there are
        // none.
        let wild = follow((0..40).map(|_| 1.0).scan(Device::new(0.6, 1), |device, x| Some(device.answer(x))));
        assert_eq!(wild.reached(), None);
    }

    #[test]
    fn rounds_are_whole_intervals_of_at_most_a_minute() {
        let s = 1_000_000_000;
        assert_eq!(round_for(60 * s, s), 3 * s);
        assert_eq!(round_for(7 * 3600 * s, s), 60 * s);
        assert_eq!(round_for(10 * s, s), s, "no shorter than an interval");
        assert_eq!(round_for(100 * s, 2 * s), 4 * s);
        assert_eq!(round_for(0, 0), 1);
    }

    /// Intervals of half a second with `ios` reads and 10 writes each.
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
    fn a_growing_time_series_is_divided_into_rounds() {
        let whole = series(&[90, 90, 190, 190, 5, 5, 90, 90, 3]);
        let mut rounds = Rounds::new(1_000_000_000);
        let mut figures = Vec::new();
        for seen in [0, 1, 5, 5, 7, 9] {
            figures.extend(rounds.follow(&whole[..seen]));
        }
        // The last interval is not a whole round.
        assert_eq!((figures, rounds.complete()), (vec![200.0, 400.0, 30.0, 200.0], 4));
        assert_eq!(Rounds::new(1_500_000_000).follow(&whole).len(), 3);
    }

    #[test]
    fn rounds_continue_when_intervals_become_longer() {
        let mut rounds = Rounds::new(1_500_000_000);
        assert_eq!(rounds.follow(&series(&[90; 4])), [200.0]);
        // The four intervals of half a second have become one of two seconds, and each later
        // interval is as long. A round ends at the next end of an interval.
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
        fn range_and_slope_do_not_depend_on_the_unit(rounds in prop::collection::vec(1.0_f64..1e6, 5), scale in 1e-3_f64..1e3) {
            let scaled: Vec<f64> = rounds.iter().map(|figure| figure * scale).collect();
            let (one, other) = (judge(&rounds).unwrap(), judge(&scaled).unwrap());
            prop_assert!((one.range - other.range).abs() < 1e-9 && (one.slope - other.slope).abs() < 1e-9);
            // The regression line of five points rises by at most 1.2 times their range.
            prop_assert!(one.slope.abs() <= 1.2 * one.range + 1e-9);
        }

        #[test]
        fn reversed_rounds_have_the_opposite_slope(rounds in prop::collection::vec(1.0_f64..1e6, 5)) {
            let mut backwards = rounds.clone();
            backwards.reverse();
            let (there, back) = (judge(&rounds).unwrap(), judge(&backwards).unwrap());
            prop_assert!((there.slope + back.slope).abs() < 1e-9 && (there.range - back.range).abs() < 1e-12);
        }
    }
}
