//! Random numbers: one generator for each thread on each target, seeded from the job, so that the
//! same job makes the same requests.

use rand_xoshiro::{
    SplitMix64, Xoshiro256PlusPlus,
    rand_core::{Rng, SeedableRng},
};

/// The generator of all draws.
pub(crate) type Random = Xoshiro256PlusPlus;

/// A generator for `seed` and `place`. Different places of one seed have independent generators.
pub(crate) fn random_for(seed: u64, place: &[u64]) -> Random {
    let mut mixed = SplitMix64::seed_from_u64(seed);
    for number in place {
        mixed = SplitMix64::seed_from_u64(mixed.next_u64() ^ number);
    }
    Random::seed_from_u64(mixed.next_u64())
}

/// A number below `bound`: the high half of a product. The bias is below `bound` / 2^64.
#[inline]
pub(crate) fn below(rng: &mut Random, bound: u64) -> u64 {
    ((u128::from(rng.next_u64()) * u128::from(bound)) >> 64) as u64
}

/// A number of at least 0 and below 1.
#[inline]
pub(crate) fn unit(rng: &mut Random) -> f64 {
    (rng.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
}

/// A probability. `Never` and `Always` draw no random number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Probability {
    Never,
    Always,
    Below(u64),
}

impl Probability {
    /// A probability from 0 to 100 percent.
    pub(crate) fn percent(percent: f64) -> Self {
        if percent <= 0.0 {
            Self::Never
        } else if percent >= 100.0 {
            Self::Always
        } else {
            Self::Below((percent / 100.0 * 2_f64.powi(64)) as u64)
        }
    }

    #[inline]
    pub(crate) fn draw(self, rng: &mut Random) -> bool {
        match self {
            Self::Never => false,
            Self::Always => true,
            Self::Below(threshold) => rng.next_u64() < threshold,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn different_places_have_different_generators() {
        let draws = |seed, place: &[u64]| random_for(seed, place).next_u64();
        assert_eq!(draws(1, &[0, 1]), draws(1, &[0, 1]));
        let all = [draws(1, &[0, 1]), draws(1, &[1, 0]), draws(2, &[0, 1]), draws(1, &[0, 1, 0]), draws(1, &[0, 2])];
        assert_eq!(all.iter().collect::<std::collections::BTreeSet<_>>().len(), all.len());
    }

    #[test]
    fn draws_are_within_binomial_bounds() {
        let mut rng = random_for(7, &[]);
        let draws = 100_000;
        for percent in [0.0, 0.5, 30.0, 50.0, 99.9, 100.0] {
            let yes = (0..draws).filter(|_| Probability::percent(percent).draw(&mut rng)).count() as f64;
            let share = percent / 100.0;
            let five_deviations = 5.0 * (f64::from(draws) * share * (1.0 - share)).sqrt();
            assert!((yes - share * f64::from(draws)).abs() <= five_deviations, "{percent} %: {yes} of {draws}");
        }
    }
}
