//! Tests of the laws: against their formulas by chi-square, with fixed seeds.

use super::*;
use crate::job::Bytes;
use proptest::prelude::*;

fn grid(positions: u64) -> Grid {
    Grid { set_bytes: positions * 4096, step_bytes: 4096, len_bytes: 4096 }
}

/// Chi-square of what was drawn against what was to be expected, for bins with at least five
/// expected draws; and its degrees of freedom.
fn chi_square(seen: &[u64], expected: &[f64]) -> (f64, f64) {
    let bins: Vec<f64> = seen
        .iter()
        .zip(expected)
        .filter(|(_, expected)| **expected >= 5.0)
        .map(|(seen, expected)| (*seen as f64 - expected).powi(2) / expected)
        .collect();
    (bins.iter().sum(), bins.len() as f64 - 1.0)
}

/// Far in the tail: mean plus five deviations of the chi-square distribution.
fn assert_follows(seen: &[u64], expected: &[f64]) {
    let (statistic, freedom) = chi_square(seen, expected);
    assert!(freedom >= 1.0, "too few draws for a test");
    assert!(statistic < freedom + 5.0 * (2.0 * freedom).sqrt(), "chi-square {statistic:.1} with {freedom} degrees");
}

/// The rank of each position of a scattered law.
fn ranks_of(scatter: &Scatter, positions: u64) -> Vec<usize> {
    let mut ranks = vec![usize::MAX; positions as usize];
    for rank in 0..positions {
        ranks[scatter.place(rank) as usize] = rank as usize;
    }
    ranks
}

#[test]
fn zipf_follows_its_law_below_and_above_one() {
    for theta in [0.2, 0.8, 0.99, 1.2, 2.5] {
        let (positions, draws) = (1000, 200_000);
        let law = OffsetDistribution::new(&Distribution::Zipf { theta }, grid(positions), 3).unwrap();
        let OffsetDistribution::Zipf { scatter, .. } = &law else { panic!("{law:?}") };
        let ranks = ranks_of(scatter, positions);
        let mut rng = random_for(11, &[]);
        let mut seen = vec![0; positions as usize];
        for _ in 0..draws {
            seen[ranks[law.draw(&mut rng) as usize]] += 1;
        }
        let weights: Vec<f64> = (1..=positions).map(|rank| (rank as f64).powf(-theta)).collect();
        let whole: f64 = weights.iter().sum();
        let expected: Vec<f64> = weights.iter().map(|weight| weight / whole * f64::from(draws)).collect();
        assert_follows(&seen, &expected);
    }
}

#[test]
fn pareto_gives_the_first_fifth_four_fifths() {
    let (positions, draws) = (10_000_u64, 100_000);
    let law = OffsetDistribution::new(&Distribution::Pareto { h: 0.2 }, grid(positions), 3).unwrap();
    let OffsetDistribution::Pareto { scatter, power, .. } = &law else { panic!("{law:?}") };
    let ranks = ranks_of(scatter, positions);
    let mut rng = random_for(5, &[]);
    let mut seen = vec![0_u64; 100];
    for _ in 0..draws {
        seen[ranks[law.draw(&mut rng) as usize] * 100 / positions as usize] += 1;
    }
    let hot: u64 = seen[..20].iter().sum();
    assert!((hot as f64 / f64::from(draws) - 0.8).abs() < 0.01, "{hot} of {draws}");
    let share = |below: f64| below.powf(1.0 / power);
    let expected: Vec<f64> = (0..100)
        .map(|bin| (share(f64::from(bin + 1) / 100.0) - share(f64::from(bin) / 100.0)) * f64::from(draws))
        .collect();
    assert_follows(&seen, &expected);
}

#[test]
fn uniform_is_uniform() {
    let law = OffsetDistribution::new(&Distribution::Uniform, grid(64), 0).unwrap();
    let mut rng = random_for(1, &[]);
    let mut seen = vec![0; 64];
    for _ in 0..64_000 {
        seen[law.draw(&mut rng) as usize] += 1;
    }
    assert_follows(&seen, &[1000.0; 64]);
}

fn spot(io_percent: f64, target_percent: f64) -> Spot {
    Spot { io_percent, target_percent, length: None }
}

#[test]
fn spots_get_their_shares_and_the_rest_gets_the_rest() {
    let spots = vec![spot(60.0, 10.0), Spot { io_percent: 30.0, target_percent: 0.0, length: Some(Bytes(30 * 4096)) }];
    let law = OffsetDistribution::new(&Distribution::Spots { spots }, grid(100), 0).unwrap();
    let mut rng = random_for(2, &[]);
    let mut seen = vec![0; 100];
    for _ in 0..100_000 {
        seen[law.draw(&mut rng) as usize] += 1;
    }
    let expected: Vec<f64> = (0..100)
        .map(|position| {
            if position < 10 {
                6000.0
            } else if position < 40 {
                1000.0
            } else {
                10_000.0 / 60.0
            }
        })
        .collect();
    assert_follows(&seen, &expected);
}

#[test]
fn a_spot_without_room_is_refused_by_its_number() {
    let law = |spots: Vec<Spot>| OffsetDistribution::new(&Distribution::Spots { spots }, grid(10), 0);
    let error = law(vec![spot(50.0, 50.0), spot(10.0, 1.0)]).unwrap_err();
    assert!(error.starts_with("spot 2 is to get 10 %"), "{error}");
    let error = law(vec![spot(50.0, 100.0)]).unwrap_err();
    assert!(error.starts_with("what the spots leave over is to get 50 %"), "{error}");
    // Nothing is wrong with room that gets no requests, or requests that are all spoken for.
    law(vec![spot(100.0, 100.0)]).unwrap();
    law(vec![spot(0.0, 1.0), spot(100.0, 99.0)]).unwrap();
}

proptest! {
    #[test]
    fn scattering_is_a_permutation(positions in 1_u64..5000, seed: u64) {
        let scatter = Scatter::new(positions, seed);
        let mut places: Vec<u64> = (0..positions).map(|rank| scatter.place(rank)).collect();
        places.sort_unstable();
        prop_assert!(places.into_iter().eq(0..positions));
    }

    #[test]
    fn every_draw_is_a_position(positions in 1_u64..1 << 50, seed: u64, theta in 0.01_f64..3.0, h in 0.01_f64..0.99, hot in 1.0_f64..99.0) {
        prop_assume!((theta - 1.0).abs() > 1e-6);
        let spots = vec![spot(90.0, hot)];
        for distribution in [Distribution::Uniform, Distribution::Zipf { theta }, Distribution::Pareto { h }, Distribution::Spots { spots }] {
            let Ok(law) = OffsetDistribution::new(&distribution, grid(positions), seed) else { continue };
            let mut rng = random_for(seed, &[]);
            for _ in 0..50 {
                prop_assert!(law.draw(&mut rng) < positions);
            }
        }
    }
}
