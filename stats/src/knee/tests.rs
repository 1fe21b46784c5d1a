//! Tests of the rules on simulated devices whose knee is known.

use super::{
    simulated::{Deterministic, Device, Queueing, Scatter, sweep},
    *,
};

fn rounds(loads: &[f64], cells: &[Vec<Sample>]) -> Vec<LoadRounds> {
    loads.iter().zip(cells).map(|(load, rounds)| LoadRounds { load: *load, rounds: rounds.clone() }).collect()
}

fn find(device: &dyn Device, loads: &[f64], n: usize, scatter: Scatter, seed: u64) -> Knee {
    let cells = sweep(device, loads, n, scatter, seed);
    knee(&rounds(loads, &cells), Some(1e6))
}

fn each(last: u32) -> Vec<f64> {
    (1..=last).map(f64::from).collect()
}

fn load_of(mark: &Mark) -> f64 {
    mark.found().unwrap_or_else(|| panic!("{mark:?}")).load
}

const QUIET: Scatter = Scatter { window: 0.0, round: 0.0, spoilt: 0.0 };
const USUAL: Scatter = Scatter { window: 0.03, round: 0.05, spoilt: 0.02 };

#[test]
fn littles_knee_is_found_exactly_on_a_deterministic_device() {
    for (servers, service_s, delay_s) in [(8.0, 1e-4, 0.0), (1.0, 1e-5, 1.1e-4), (4.0, 1e-4, 5e-5)] {
        let device = Deterministic { servers, service_s, delay_s };
        let found = find(&device, &each(24), 1, QUIET, 1);
        assert!((load_of(&found.efficient) - device.knee()).abs() < 1e-9, "{found:?}");
        assert_eq!(load_of(&found.saturation), (device.knee() * SATURATION).ceil());
        // On this device the paper's rule gives the same load.
        assert!((load_of(&found.paper) - device.knee()).abs() < 1e-9);
        assert_eq!((found.efficient.found().unwrap().interval, found.falls), (None, None));
    }
}

#[test]
fn power_is_largest_at_littles_knee_of_a_queueing_system() {
    for (servers, service_s, delay_s) in [(1, 1e-4, 7e-4), (4, 1e-4, 1e-4), (8, 1e-4, 2e-5), (16, 1e-3, 2e-4)] {
        let device = Queueing { servers, service_s, delay_s };
        let little = (delay_s + service_s) * f64::from(servers) / service_s;
        let found = load_of(&find(&device, &each(40), 1, QUIET, 1).efficient);
        assert!((found - little).abs() <= 1.0 + 0.1 * little, "{found} instead of {little}");
    }
}

/// Every interval claims 95 %. A coverage below 88 % fails the test.
#[test]
fn the_intervals_have_the_coverage_that_they_claim() {
    let devices: [(&str, Box<dyn Device>); 3] = [
        ("deterministic", Box::new(Deterministic { servers: 8.0, service_s: 1e-4, delay_s: 0.0 })),
        ("one server", Box::new(Queueing { servers: 1, service_s: 1e-4, delay_s: 7e-4 })),
        ("four servers", Box::new(Queueing { servers: 4, service_s: 1e-4, delay_s: 1e-4 })),
    ];
    let trials = 60;
    for (name, device, n) in devices.iter().flat_map(|(name, device)| [(name, device, 3), (name, device, 5)]) {
        let truth = find(&**device, &each(24), 1, QUIET, 1);
        let (mut determined, mut covered) = ([0; 3], [0; 3]);
        for seed in 0..trials {
            let found = find(&**device, &each(24), n, USUAL, seed);
            let marks = [
                (&truth.efficient, &found.efficient),
                (&truth.saturation, &found.saturation),
                (&truth.paper, &found.paper),
            ];
            for (index, (truth, found)) in marks.into_iter().enumerate() {
                let Some(point) = found.found() else { continue };
                let interval = point.interval.unwrap();
                determined[index] += 1;
                covered[index] += u64::from((interval.low..=interval.high).contains(&load_of(truth)));
                assert!((interval.low..=interval.high).contains(&point.load), "{name}: {point:?}");
            }
        }
        for (determined, covered) in determined.into_iter().zip(covered) {
            assert!(determined * 10 >= trials * 8, "{name}, {n} rounds: only {determined} of {trials} determined");
            assert!(covered * 100 >= determined * 88, "{name}, {n} rounds: covered {covered} of {determined}");
        }
    }
}

#[test]
fn slow_rounds_do_not_move_the_points() {
    let device = Queueing { servers: 4, service_s: 1e-4, delay_s: 1e-4 };
    let rough = Scatter { window: 0.01, round: 0.5, spoilt: 0.0 };
    let found = find(&device, &each(24), 5, rough, 3);
    let interval = found.efficient.found().unwrap().interval.unwrap();
    assert!(interval.high - interval.low <= 5.0, "{found:?}");
}

#[test]
fn a_point_that_cannot_be_determined_has_its_reason() {
    let device = Queueing { servers: 8, service_s: 1e-4, delay_s: 0.0 };
    let why = |mark: &Mark| match mark {
        Mark::Undetermined { why } => why.clone(),
        Mark::Found(point) => panic!("{point:?}"),
    };
    // The sweep ends too early: IOPS still rise.
    let short = find(&device, &each(6), 5, USUAL, 1);
    assert!(matches!(why(&short.efficient), Reason::Beyond { last: 6.0 }), "{short:?}");
    assert!(matches!(why(&short.saturation), Reason::StillRising { last: 6.0, .. }));
    // One round cannot show that IOPS still rise, but the saturation point is the last load.
    let steps = Curve(|load| load.powf(0.1) * 1000.0 * if load > 30.0 { 1.2 } else { 1.0 });
    let last = find(&steps, &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0], 1, QUIET, 1);
    assert!(last.saturation.found().is_none(), "{:?}", last.saturation);
    // The sweep starts too late: power only falls.
    let late: Vec<f64> = (20..40).map(f64::from).collect();
    assert!(matches!(why(&find(&device, &late, 5, QUIET, 1).efficient), Reason::Before { first: 20.0 }));
    // One load is too few.
    assert_eq!(why(&find(&device, &[4.0], 5, USUAL, 1).efficient), Reason::FewLoads { loads: 1, fewest: 4 });
    // The noise is as large as the effect.
    let wild = Scatter { window: 0.9, ..QUIET };
    let undetermined =
        (0..20).filter(|seed| find(&device, &each(24), 3, wild, *seed).efficient.found().is_none()).count();
    assert!(undetermined >= 15, "determined {} of 20 times", 20 - undetermined);
    // A round in which no request completed, and a load without rounds.
    let mut cells = sweep(&device, &each(8), 3, QUIET, 1);
    cells[2][1].iops = 0.0;
    assert_eq!(why(&knee(&rounds(&each(8), &cells), None).efficient), Reason::NothingDone { load: 3.0 });
    cells[2].clear();
    assert_eq!(why(&knee(&rounds(&each(8), &cells), None).efficient), Reason::NothingDone { load: 3.0 });
    // No load keeps the limit.
    let found = knee(&rounds(&each(8), &sweep(&device, &each(8), 3, QUIET, 1)), Some(1e3));
    assert!(matches!(why(&found.limit.unwrap()), Reason::NothingUnder { limit_ns: 1e3, load: 1.0, .. }));
}

/// Throughput does not depend on the load: a second request in flight only waits.
#[test]
fn a_flat_line_has_its_knee_at_one_and_no_paper_point() {
    let device = Deterministic { servers: 1.0, service_s: 1e-4, delay_s: 0.0 };
    let found = find(&device, &each(16), 3, QUIET, 1);
    assert_eq!((load_of(&found.efficient), load_of(&found.saturation)), (1.0, 1.0));
    assert_eq!(found.paper, Mark::Undetermined { why: Reason::Flat });
}

struct Curve(fn(f64) -> f64);

impl Device for Curve {
    fn at(&self, load: f64) -> (f64, f64) {
        let iops = (self.0)(load);
        (iops, load / iops)
    }
}

#[test]
fn two_peaks_make_a_point_undetermined() {
    // Power is IOPS squared divided by the load: equal at 4 and at 16, and a third lower between.
    let valley = Curve(|load| {
        let distance = ((load / 8.0).log2().abs() - 1.0).abs();
        (load * (-0.5 * distance).exp() * 1e6).sqrt()
    });
    let found = find(&valley, &each(32), 5, Scatter { window: 0.02, ..QUIET }, 1);
    let Mark::Undetermined { why: Reason::TwoPeaks { first, between, second } } = &found.efficient else {
        panic!("{:?}", found.efficient)
    };
    assert!((3.0..=5.0).contains(first) && (6.0..=11.0).contains(between) && (14.0..=18.0).contains(second));
    // IOPS reach the peak, fall and rise again.
    let dip = Curve(|load| if (10.0..14.0).contains(&load) { 700.0 } else { (load * 125.0).min(1000.0) });
    let found = find(&dip, &each(24), 5, Scatter { window: 0.01, ..QUIET }, 1);
    assert!(matches!(&found.saturation, Mark::Undetermined { why: Reason::TwoPeaks { .. } }), "{:?}", found.saturation);
}

#[test]
fn a_fall_beyond_the_peak_is_found_and_does_not_hide_the_points() {
    let crowded = Curve(|load| if load <= 8.0 { load * 1000.0 } else { 8000.0 * (1.0 - (load - 8.0) * 0.02) });
    let found = find(&crowded, &each(24), 5, Scatter { window: 0.01, ..QUIET }, 1);
    assert!((found.falls.unwrap() - 0.32).abs() < 0.03, "{:?}", found.falls);
    assert_eq!((load_of(&found.efficient), load_of(&found.saturation)), (8.0, 8.0));
}

#[test]
fn the_limit_point_is_the_fastest_load_within_the_limit() {
    // p99 is three times the mean: 300 us up to 8 in flight, 37.5 us more for each one above.
    let device = Deterministic { servers: 8.0, service_s: 1e-4, delay_s: 0.0 };
    let cells = sweep(&device, &each(24), 3, QUIET, 1);
    let limit = |ns: f64| knee(&rounds(&each(24), &cells), Some(ns)).limit.unwrap();
    assert_eq!(load_of(&limit(310e3)), 8.0);
    assert!(limit(10e6).found().unwrap().open_above || load_of(&limit(10e6)) >= 8.0);
    assert_eq!(knee(&rounds(&each(24), &cells), None).limit, None);
}

/// The paper's table of sequential 512K writes: outstanding, IOPS, ms. The paper reads 15 off its
/// graph.
#[test]
fn the_papers_rule_gives_the_papers_result() {
    #[rustfmt::skip]
    let table = [(4, 585.67, 6.829), (5, 599.26, 8.342), (6, 617.39, 9.717), (7, 628.42, 11.138), (8, 637.7, 12.544), (9, 643.75, 13.979), (10, 669.53, 14.935), (11, 687.87, 15.99), (12, 698.11, 17.189), (13, 699.35, 18.587), (14, 716.98, 19.525), (15, 724.66, 20.698), (16, 729.19, 21.941), (17, 732.3, 23.214), (18, 730.66, 24.635), (19, 743.8, 25.543), (20, 745.01, 26.843), (21, 747.48, 28.092), (22, 752.75, 29.224), (23, 741.97, 31.002), (24, 753.35, 31.856), (25, 745.58, 33.528), (26, 756.51, 34.367), (27, 756.88, 35.673), (28, 761.66, 36.76), (29, 757.79, 38.268), (30, 753.34, 39.822), (31, 752.15, 41.214), (32, 764.18, 41.874)];
    let loads: Vec<f64> = table.iter().map(|row| f64::from(row.0)).collect();
    let cells: Vec<Vec<Sample>> =
        table.iter().map(|(_, iops, ms)| vec![Sample { iops: *iops, mean_ns: ms * 1e6, p99_ns: ms * 2e6 }]).collect();
    let found = knee(&rounds(&loads, &cells), None);
    assert_eq!(load_of(&found.paper), 15.0);
    // The first load of the table, four in flight, is already above the efficient point.
    assert_eq!(found.efficient, Mark::Undetermined { why: Reason::Before { first: 4.0 } });
}
