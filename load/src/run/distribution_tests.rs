//! Tests of the distributions against their formulas, by chi-square with fixed seeds.

use super::*;
use crate::job::Bytes;
use proptest::prelude::*;

fn grid(positions: u64) -> Grid {
    Grid { set_bytes: positions * 4096, step_bytes: 4096, len_bytes: 4096 }
}

/// Chi-square statistic of the draws, over bins with at least five expected draws, and its degrees
/// of freedom.
fn chi_square(seen: &[u64], expected: &[f64]) -> (f64, f64) {
    let bins: Vec<f64> = seen
        .iter()
        .zip(expected)
        .filter(|(_, expected)| **expected >= 5.0)
        .map(|(seen, expected)| (*seen as f64 - expected).powi(2) / expected)
        .collect();
    (bins.iter().sum(), bins.len() as f64 - 1.0)
}

/// The limit is the mean plus five standard deviations of the chi-square distribution.
fn assert_follows(seen: &[u64], expected: &[f64]) {
    let (statistic, freedom) = chi_square(seen, expected);
    assert!(freedom >= 1.0, "too few draws for a test");
    assert!(statistic < freedom + 5.0 * (2.0 * freedom).sqrt(), "chi-square {statistic:.1} with {freedom} degrees");
}

/// The rank of each position of a permutation.
fn ranks_of(permutation: &Permutation, positions: u64) -> Vec<usize> {
    let mut ranks = vec![usize::MAX; positions as usize];
    for rank in 0..positions {
        ranks[permutation.place(rank) as usize] = rank as usize;
    }
    ranks
}

#[test]
fn zipf_draws_follow_the_formula_below_and_above_theta_one() {
    for theta in [0.2, 0.8, 0.99, 1.2, 2.5] {
        let (positions, draws) = (1000, 200_000);
        let offsets = OffsetDistribution::new(&Distribution::Zipf { theta }, grid(positions), 3).unwrap();
        let OffsetDistribution::Zipf { permutation, .. } = &offsets else { panic!("{offsets:?}") };
        let ranks = ranks_of(permutation, positions);
        let mut rng = random_for(11, &[]);
        let mut seen = vec![0; positions as usize];
        for _ in 0..draws {
            seen[ranks[offsets.draw(&mut rng) as usize]] += 1;
        }
        let weights: Vec<f64> = (1..=positions).map(|rank| (rank as f64).powf(-theta)).collect();
        let whole: f64 = weights.iter().sum();
        let expected: Vec<f64> = weights.iter().map(|weight| weight / whole * f64::from(draws)).collect();
        assert_follows(&seen, &expected);
    }
}

#[test]
fn pareto_gives_four_fifths_of_the_requests_to_one_fifth() {
    let (positions, draws) = (10_000_u64, 100_000);
    let offsets = OffsetDistribution::new(&Distribution::Pareto { h: 0.2 }, grid(positions), 3).unwrap();
    let OffsetDistribution::Pareto { permutation, power, .. } = &offsets else { panic!("{offsets:?}") };
    let ranks = ranks_of(permutation, positions);
    let mut rng = random_for(5, &[]);
    let mut seen = vec![0_u64; 100];
    for _ in 0..draws {
        seen[ranks[offsets.draw(&mut rng) as usize] * 100 / positions as usize] += 1;
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
fn uniform_draws_are_uniform() {
    let offsets = OffsetDistribution::new(&Distribution::Uniform, grid(64), 0).unwrap();
    let mut rng = random_for(1, &[]);
    let mut seen = vec![0; 64];
    for _ in 0..64_000 {
        seen[offsets.draw(&mut rng) as usize] += 1;
    }
    assert_follows(&seen, &[1000.0; 64]);
}

fn spot(io_percent: f64, target_percent: f64) -> Spot {
    Spot { io_percent, target_percent, length: None }
}

#[test]
fn spots_and_the_remaining_range_get_their_shares() {
    let spots = vec![spot(60.0, 10.0), Spot { io_percent: 30.0, target_percent: 0.0, length: Some(Bytes(30 * 4096)) }];
    let offsets = OffsetDistribution::new(&Distribution::Spots { spots }, grid(100), 0).unwrap();
    let mut rng = random_for(2, &[]);
    let mut seen = vec![0; 100];
    for _ in 0..100_000 {
        seen[offsets.draw(&mut rng) as usize] += 1;
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
    let offsets = |spots: Vec<Spot>| OffsetDistribution::new(&Distribution::Spots { spots }, grid(10), 0);
    let error = offsets(vec![spot(50.0, 50.0), spot(10.0, 1.0)]).unwrap_err();
    assert!(error.starts_with("spot 2 gets 10 %"), "{error}");
    let error = offsets(vec![spot(50.0, 100.0)]).unwrap_err();
    assert!(error.starts_with("the range after the spots gets 50 %"), "{error}");
    // A range without requests is valid, and so is no remaining range when the spots get all
    // requests.
    offsets(vec![spot(100.0, 100.0)]).unwrap();
    offsets(vec![spot(0.0, 1.0), spot(100.0, 99.0)]).unwrap();
}

proptest! {
    #[test]
    fn the_permutation_has_no_collisions(positions in 1_u64..5000, seed: u64) {
        let permutation = Permutation::new(positions, seed);
        let mut places: Vec<u64> = (0..positions).map(|rank| permutation.place(rank)).collect();
        places.sort_unstable();
        prop_assert!(places.into_iter().eq(0..positions));
    }

    #[test]
    fn every_draw_is_below_the_number_of_positions(positions in 1_u64..1 << 50, seed: u64, theta in 0.01_f64..3.0, h in 0.01_f64..0.99, hot in 1.0_f64..99.0) {
        prop_assume!((theta - 1.0).abs() > 1e-6);
        let spots = vec![spot(90.0, hot)];
        for distribution in [Distribution::Uniform, Distribution::Zipf { theta }, Distribution::Pareto { h }, Distribution::Spots { spots }] {
            let Ok(offsets) = OffsetDistribution::new(&distribution, grid(positions), seed) else { continue };
            let mut rng = random_for(seed, &[]);
            for _ in 0..50 {
                prop_assert!(offsets.draw(&mut rng) < positions);
            }
        }
    }
}
