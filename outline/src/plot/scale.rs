//! Scales: position of a value on an axis, and ticks at round numbers.

/// Maps values to positions on an axis.
#[derive(Debug, Clone, PartialEq)]
pub enum Scale {
    /// Linear scale.
    Linear {
        /// Value at the start of the axis.
        low: f64,
        /// Value at the end of the axis.
        high: f64,
    },
    /// Logarithmic scale; both ends are above 0.
    Log {
        /// Value at the start of the axis.
        low: f64,
        /// Value at the end of the axis.
        high: f64,
    },
    /// Percentile scale of quantiles from 0 to 1, on which 90 %, 99 %, 99.9 % ... have equal
    /// distances.
    Nines {
        /// Number of nines at the end of the axis.
        nines: u32,
    },
}

/// A tick of an axis.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Tick {
    /// Value of the tick.
    pub(crate) at: f64,
    /// Whether the tick has a label. Others have only a thin grid line.
    pub(crate) labelled: bool,
}

impl Scale {
    /// Linear scale from 0 to a round number that is at least `highest`.
    pub fn from_zero(highest: f64) -> Self {
        let highest = if highest.is_finite() && highest > 0.0 { highest } else { 1.0 };
        let step = nice_step(highest / 5.0);
        Self::Linear { low: 0.0, high: (highest / step - 1e-9).ceil() * step }
    }

    /// Linear scale from `low` to `high`. When `high` is not above `low`, it becomes `low` plus 1.
    pub fn between(low: f64, high: f64) -> Self {
        Self::Linear { low, high: if high > low { high } else { low + 1.0 } }
    }

    /// Logarithmic scale that contains all `values` above 0. The ends are 1, 2 or 5 times a power
    /// of ten.
    pub fn log_around(values: impl IntoIterator<Item = f64>) -> Self {
        let (mut low, mut high) = (f64::INFINITY, 0.0_f64);
        for value in values.into_iter().filter(|value| value.is_finite() && *value > 0.0) {
            low = low.min(value);
            high = high.max(value);
        }
        if high == 0.0 {
            (low, high) = (1.0, 10.0);
        }
        let steps = |decade: f64| [decade, 2.0 * decade, 5.0 * decade, 10.0 * decade];
        let floor = |value: f64| 10_f64.powf(value.log10().floor());
        let below = steps(floor(low)).into_iter().rfind(|step| *step <= low * 1.000_001).unwrap_or(low);
        let above = steps(floor(high)).into_iter().find(|step| *step >= high * 0.999_999).unwrap_or(high);
        Self::Log { low: below, high: if above > below { above } else { below * 10.0 } }
    }

    /// Position of `value`: 0 at the start of the axis, 1 at the end. Values outside are clamped.
    pub(crate) fn share(&self, value: f64) -> f64 {
        let share = match *self {
            Self::Linear { low, high } => (value - low) / (high - low),
            Self::Log { low, high } => (value.max(f64::MIN_POSITIVE) / low).ln() / (high / low).ln(),
            Self::Nines { nines } => -(1.0 - value).max(1e-12).log10() / f64::from(nines.max(1)),
        };
        if share.is_nan() { 0.0 } else { share.clamp(0.0, 1.0) }
    }

    /// The ticks, ascending.
    pub(crate) fn ticks(&self) -> Vec<Tick> {
        match *self {
            Self::Linear { low, high } => linear_ticks(low, high),
            Self::Log { low, high } => log_ticks(low, high),
            Self::Nines { nines } => {
                let labelled = |at| Tick { at, labelled: true };
                let mut ticks = vec![labelled(0.0)];
                // The median has a label only where there is room.
                if nines <= 4 {
                    ticks.push(labelled(0.5));
                }
                ticks.extend((1..=nines).map(|nine| labelled(1.0 - 10_f64.powi(-(nine as i32)))));
                ticks
            }
        }
    }
}

/// A step of 1, 2 or 5 times a power of ten, at least `rough`.
fn nice_step(rough: f64) -> f64 {
    let decade = 10_f64.powf(rough.log10().floor());
    [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|factor| factor * decade)
        .find(|step| *step >= rough * 0.999_999)
        .unwrap_or(rough)
}

fn linear_ticks(low: f64, high: f64) -> Vec<Tick> {
    let step = nice_step((high - low) / 6.0);
    let first = (low / step - 1e-9).ceil() as i64;
    let last = (high / step + 1e-9).floor() as i64;
    // At most some dozens: the step is a sixth of the range or more.
    (first..=last.min(first.saturating_add(32)))
        .map(|number| Tick { at: number as f64 * step, labelled: true })
        .collect()
}

fn log_ticks(low: f64, high: f64) -> Vec<Tick> {
    let decades = (high / low).log10();
    let (first, last) = (low.log10().floor() as i32, high.log10().ceil() as i32);
    let mut ticks = Vec::new();
    for exponent in first..=last.min(first.saturating_add(40)) {
        for factor in 1..10 {
            let at = f64::from(factor) * 10_f64.powi(exponent);
            if at < low * 0.999_999 || at > high * 1.000_001 {
                continue;
            }
            let labelled = match factor {
                1 => true,
                2 | 5 => decades <= 3.5,
                _ => false,
            };
            ticks.push(Tick { at, labelled });
        }
    }
    ticks
}

/// Downsamples `points` to about `most`. Of each chunk the first, the lowest, the highest and the
/// last point are kept, so that no spike is lost.
pub fn downsample(points: &[(f64, f64)], most: usize) -> Vec<(f64, f64)> {
    if points.len() <= most || most < 8 {
        return points.to_vec();
    }
    let chunk = points.len().div_ceil(most / 4);
    let mut sampled = Vec::with_capacity(most + 4);
    for piece in points.chunks(chunk) {
        let by = |which: fn(f64, f64) -> bool| {
            (1..piece.len()).fold(0, |best, index| if which(piece[index].1, piece[best].1) { index } else { best })
        };
        let mut kept = [0, by(|a, b| a < b), by(|a, b| a > b), piece.len() - 1];
        kept.sort_unstable();
        let mut before = None;
        for index in kept {
            if before != Some(index) {
                sampled.push(piece[index]);
            }
            before = Some(index);
        }
    }
    sampled
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn labels(scale: &Scale) -> Vec<f64> {
        scale.ticks().into_iter().filter(|tick| tick.labelled).map(|tick| tick.at).collect()
    }

    #[test]
    fn axes_end_at_round_numbers() {
        assert_eq!(Scale::from_zero(58_071.0), Scale::Linear { low: 0.0, high: 60_000.0 });
        assert_eq!(
            labels(&Scale::from_zero(58_071.0)),
            [0.0, 10_000.0, 20_000.0, 30_000.0, 40_000.0, 50_000.0, 60_000.0]
        );
        assert_eq!(Scale::from_zero(0.0), Scale::Linear { low: 0.0, high: 1.0 });
        assert_eq!(Scale::log_around([70.0, 900.0]), Scale::Log { low: 50.0, high: 1000.0 });
        assert_eq!(labels(&Scale::Log { low: 50.0, high: 1000.0 }), [50.0, 100.0, 200.0, 500.0, 1000.0]);
        assert_eq!(Scale::log_around([]), Scale::Log { low: 1.0, high: 10.0 });
    }

    #[test]
    fn nines_have_equal_distances() {
        let scale = Scale::Nines { nines: 4 };
        for (value, share) in [(0.0, 0.0), (0.9, 0.25), (0.99, 0.5), (0.999, 0.75), (0.9999, 1.0), (1.0, 1.0)] {
            assert!((scale.share(value) - share).abs() < 1e-6, "{value}");
        }
        assert_eq!(scale.ticks().len(), 6);
    }

    #[test]
    fn downsampling_keeps_a_spike() {
        let points: Vec<(f64, f64)> = (0..10_000).map(|x| (f64::from(x), if x == 7777 { 99.0 } else { 1.0 })).collect();
        let sampled = downsample(&points, 400);
        assert!(sampled.len() <= 404 && sampled.contains(&(7777.0, 99.0)), "{}", sampled.len());
        assert_eq!((sampled[0], sampled[sampled.len() - 1]), (points[0], points[9999]));
        assert!(sampled.windows(2).all(|pair| pair[0].0 < pair[1].0));
    }

    proptest! {
        #[test]
        fn positions_are_ascending_and_on_the_axis(values in prop::collection::vec(1e-3_f64..1e12, 1..20), probe in 1e-3_f64..1e12) {
            for scale in [Scale::log_around(values.clone()), Scale::from_zero(values[0])] {
                prop_assert!((0.0..=1.0).contains(&scale.share(probe)));
                prop_assert!(scale.share(probe) <= scale.share(probe * 2.0));
                let ticks = scale.ticks();
                prop_assert!(ticks.len() >= 2 && ticks.len() < 300, "{ticks:?}");
                prop_assert!(ticks.windows(2).all(|pair| pair[0].at < pair[1].at));
            }
            let Scale::Log { low, high } = Scale::log_around(values.clone()) else { unreachable!() };
            prop_assert!(values.iter().all(|value| low <= value * 1.001 && *value <= high * 1.001));
        }
    }
}
