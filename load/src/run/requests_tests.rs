//! Tests of the offsets, sizes and shares of requests.

use super::*;
use crate::job::{Blocks, Bytes, Distribution, SizeShare, Spot};
use proptest::prelude::*;

const SET: WorkingSet = WorkingSet { start_bytes: 1 << 20, len_bytes: 64 * 4096 };

fn stream(thread: u64) -> StreamId {
    StreamId { phase: 0, load: 0, target: 0, thread }
}

fn draws(load: &Load, thread: u64, count: usize) -> Vec<IoRequest> {
    let mut requests = Requests::new(load, SET, 1, stream(thread), None).unwrap();
    (0..count).map(|_| requests.draw()).collect()
}

fn sequential() -> Load {
    Load { random_percent: 0.0, ..Load::default() }
}

fn offsets(io_requests: &[IoRequest]) -> Vec<u64> {
    io_requests.iter().map(|io_request| (io_request.offset_bytes - SET.start_bytes) / 4096).collect()
}

#[test]
fn parallel_slots_each_read_the_working_set_from_its_start() {
    let load = Load { random_percent: 0.0, parallel: true, queue_depth: 2, ..Load::default() };
    load.validate("load").unwrap();
    let set = WorkingSet { start_bytes: 8192, len_bytes: 3 * 4096 };
    let stream = StreamId { phase: 0, load: 0, target: 0, thread: 0 };
    let mut requests = Requests::new(&load, set, 1, stream, None).unwrap();
    let at = |requests: &mut Requests, slot| (requests.draw_for(slot).offset_bytes - 8192) / 4096;
    let drawn: Vec<_> = [0, 1, 0, 0, 1, 0].map(|slot| at(&mut requests, slot)).into();
    assert_eq!(drawn, [0, 0, 1, 2, 1, 0]);
    // Without `parallel` the slots share one stream.
    let mut requests = Requests::new(&Load { parallel: false, ..load.clone() }, set, 1, stream, None).unwrap();
    assert_eq!([0, 1, 0].map(|slot| at(&mut requests, slot)), [0, 1, 2]);
    for wrong in [Load { random_percent: 1.0, ..load.clone() }, Load { interlocked: true, ..load }] {
        assert!(wrong.validate("load").unwrap_err().to_string().contains("parallel"));
    }
}

#[test]
fn a_stream_is_sequential_and_wraps() {
    assert_eq!(offsets(&draws(&sequential(), 0, 66)), (0..64).chain(0..2).collect::<Vec<_>>());
    let strided = Load { stride: Some(Bytes(30 * 4096)), ..sequential() };
    assert_eq!(offsets(&draws(&strided, 0, 5)), [0, 30, 60, 0, 30]);
}

#[test]
fn streams_of_threads_start_at_their_distance() {
    let load = Load { thread_start: Bytes(16 * 4096), ..sequential() };
    let starts: Vec<u64> = (0..5).map(|thread| offsets(&draws(&load, thread, 1))[0]).collect();
    assert_eq!(starts, [0, 16, 32, 48, 0]);
}

#[test]
fn an_interlocked_stream_is_shared() {
    let shared = Arc::new(AtomicU64::new(0));
    let mut both =
        [0, 1].map(|thread| Requests::new(&sequential(), SET, 1, stream(thread), Some(Arc::clone(&shared))).unwrap());
    let seen: Vec<IoRequest> = (0..130).map(|turn| both[turn % 2].draw()).collect();
    assert_eq!(offsets(&seen), (0..64).chain(0..64).chain(0..2).collect::<Vec<_>>());
}

#[test]
fn a_stream_continues_after_a_random_request() {
    let load = Load { random_percent: 50.0, ..Load::default() };
    let seen = offsets(&draws(&load, 0, 2000));
    let behind = seen.windows(2).filter(|pair| pair[1] == (pair[0] + 1) % 64).count();
    // Half of the requests are sequential; one in 64 of the others follows by chance.
    assert!((950..=1100).contains(&behind), "{behind}");
}

#[test]
fn shares_of_sizes_and_directions_come_out_within_binomial_bounds() {
    let size = |kib: u64, weight, read_percent| SizeShare {
        size: Bytes(kib << 10),
        weight,
        read_percent,
        random_percent: Some(100.0),
    };
    let block = Blocks::Mix(vec![size(4, 1.0, None), size(8, 2.0, Some(100.0)), size(16, 5.0, Some(0.0))]);
    let load = Load { block, read_percent: 70.0, ..Load::default() };
    let count = 80_000;
    let seen = draws(&load, 0, count);
    let near = |which: &dyn Fn(&IoRequest) -> bool, of: usize, share: f64| {
        let yes = seen.iter().filter(|io_request| which(io_request)).count() as f64;
        let five_deviations = 5.0 * (of as f64 * share * (1.0 - share)).sqrt() + 1e-9;
        assert!((yes - of as f64 * share).abs() <= five_deviations, "{yes} of {of}, expected {share}");
    };
    near(&|io_request| io_request.len_bytes == 4096, count, 0.125);
    near(&|io_request| io_request.len_bytes == 8192, count, 0.25);
    near(&|io_request| io_request.len_bytes == 16384, count, 0.625);
    near(&|io_request| io_request.len_bytes == 8192 && !io_request.is_read, count, 0.0);
    near(&|io_request| io_request.len_bytes == 16384 && io_request.is_read, count, 0.0);
    let small = seen.iter().filter(|io_request| io_request.len_bytes == 4096).count();
    near(&|io_request| io_request.len_bytes == 4096 && io_request.is_read, small, 0.7);
}

#[test]
fn the_same_stream_makes_the_same_requests_and_others_differ() {
    let load = Load { read_percent: 50.0, ..Load::default() };
    assert_eq!(draws(&load, 3, 50), draws(&load, 3, 50));
    assert_ne!(draws(&load, 3, 50), draws(&load, 4, 50));
}

fn any_distribution() -> impl Strategy<Value = Distribution> {
    prop_oneof![
        Just(Distribution::Uniform),
        (0.1_f64..0.95).prop_map(|theta| Distribution::Zipf { theta }),
        (0.05_f64..0.95).prop_map(|h| Distribution::Pareto { h }),
        (1.0_f64..99.0, 30.0_f64..70.0).prop_map(|(io_percent, target_percent)| Distribution::Spots {
            spots: vec![Spot { io_percent, target_percent, length: None }]
        }),
    ]
}

proptest! {
    #[test]
    fn every_request_lies_in_the_working_set_and_is_aligned(
        sectors in prop::collection::vec(1_u64..64, 1..4),
        align in prop::option::of(1_u64..32),
        stride in prop::option::of(1_u64..200),
        random_percent in 0.0_f64..=100.0,
        distribution in any_distribution(),
        set_sectors in 256_u64..5000,
        thread in 0_u64..5,
        thread_start in 0_u64..300,
        seed: u64,
    ) {
        let mix = sectors.iter().map(|count| SizeShare { size: Bytes(count * 512), weight: 1.0, read_percent: None, random_percent: None });
        let load = Load {
            block: Blocks::Mix(mix.collect()),
            align: align.map(|count| Bytes(count * 512)),
            stride: stride.map(|count| Bytes(count * 512)),
            random_percent,
            distribution,
            thread_start: Bytes(thread_start * 512),
            read_percent: 50.0,
            ..Load::default()
        };
        load.validate("test").unwrap();
        let set = WorkingSet { start_bytes: 7 * 512, len_bytes: set_sectors * 512 };
        let shared = (seed % 2 == 0).then(Arc::default);
        let mut requests = match Requests::new(&load, set, seed, stream(thread), shared) {
            Ok(requests) => requests,
            // With a small set and large blocks a spot may have no room for a request.
            Err(error) => {
                prop_assert!(error.to_string().contains("has no room"), "{error}");
                return Ok(());
            }
        };
        for _ in 0..300 {
            let io_request = requests.draw();
            let at = io_request.offset_bytes - set.start_bytes;
            prop_assert!(io_request.offset_bytes >= set.start_bytes && at + u64::from(io_request.len_bytes) <= set.len_bytes);
            prop_assert!(at.is_multiple_of(512) && sectors.contains(&(u64::from(io_request.len_bytes) / 512)));
            if random_percent == 100.0 {
                prop_assert_eq!(at % load.align.map_or(u64::from(io_request.len_bytes), |align| align.0), 0);
            }
        }
    }
}
