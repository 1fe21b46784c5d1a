//! Tests of the generator: on `null:`, on a device in memory, and on one that fails.

use super::*;
use crate::null::NullDevice;
use diskwright_store::{Geometry, PushError};
use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex},
};

/// A device that keeps a note of every offset, completes the oldest request first, one at each reap, and can fail one.
#[derive(Debug, Clone, Default)]
struct Scripted {
    seen: Arc<Mutex<Vec<u64>>>,
    fail_at: Option<usize>,
}

#[derive(Debug)]
struct ScriptedQueue {
    device: Scripted,
    pending: std::collections::VecDeque<Request>,
    most: usize,
}

const SCRIPTED_BYTES: u64 = 16 * 4096;

impl BlockDevice for Scripted {
    fn geometry(&self) -> Geometry {
        Geometry { size_bytes: SCRIPTED_BYTES, logical_sector_bytes: 512, physical_sector_bytes: 512, read_only: false }
    }
    fn open_queue(&self, options: &QueueOptions<'_>) -> io::Result<Box<dyn BlockQueue>> {
        assert!(options.slab.is_some(), "the buffers are to be registered");
        Ok(Box::new(ScriptedQueue { device: self.clone(), pending: Default::default(), most: options.depth }))
    }
}

impl BlockQueue for ScriptedQueue {
    fn depth(&self) -> usize {
        self.most
    }
    fn in_flight(&self) -> usize {
        self.pending.len()
    }
    fn push(&mut self, request: Request) -> Result<(), Box<PushError>> {
        assert!(self.pending.len() < self.most, "more in flight than asked for");
        self.device.seen.lock().unwrap().push(request.offset_bytes);
        self.pending.push_back(request);
        Ok(())
    }
    fn reap(&mut self, at_least: usize, out: &mut Vec<Completion>) -> io::Result<()> {
        assert!(at_least <= self.pending.len());
        let seen = self.device.seen.lock().unwrap().len();
        // All but the newest stay in flight until nothing more is made, so a depth that is not kept up shows.
        let request = self.pending.pop_front().unwrap();
        let fails = self.device.fail_at.is_some_and(|at| seen >= at);
        let result = if fails { Err(io::Error::other("broken")) } else { Ok(()) };
        out.push(Completion { tag: request.tag, buf: request.buf, result });
        Ok(())
    }
}

fn run(device: &dyn BlockDevice, workload: &Workload, until: Until, round: u64) -> Result<Measurement> {
    Generator::for_workload(workload, 1)?.run("test", device, workload, until, EngineKind::Auto, round)
}

#[test]
fn a_count_is_kept_exactly() {
    for (depth, count) in [(1, 1), (4, 3), (4, 4), (4, 1000), (8, 0)] {
        let device = Scripted::default();
        let workload = Workload::new(Pattern::Random, Direction::Read, 4096, depth);
        let measured = run(&device, &workload, Until::Count(count), 0).unwrap();
        assert_eq!((measured.ios, measured.bytes), (count, count * 4096));
        assert_eq!(device.seen.lock().unwrap().len() as u64, count);
    }
}

#[test]
fn sequential_requests_follow_each_other_and_wrap() {
    let device = Scripted::default();
    let workload = Workload::new(Pattern::Sequential, Direction::Write, 4096, 3);
    run(&device, &workload, Until::Count(40), 9).unwrap();
    let seen = device.seen.lock().unwrap();
    for pair in seen.windows(2) {
        assert_eq!(pair[1], (pair[0] + 4096) % SCRIPTED_BYTES);
    }
    assert_eq!(seen.iter().collect::<BTreeSet<_>>().len(), 16);
}

#[test]
fn random_requests_reach_all_of_the_working_set_and_nothing_else() {
    let device = Scripted::default();
    let mut workload = Workload::new(Pattern::Random, Direction::Read, 8192, 2);
    workload.working_set_bytes = 5 * 8192 + 4096;
    run(&device, &workload, Until::Count(500), 3).unwrap();
    let seen: BTreeSet<u64> = device.seen.lock().unwrap().iter().copied().collect();
    assert_eq!(seen.into_iter().collect::<Vec<_>>(), (0..5).map(|block| block * 8192).collect::<Vec<_>>());
}

#[test]
fn a_round_does_the_same_on_every_device_and_rounds_differ() {
    let offsets = |round| {
        let device = Scripted::default();
        run(&device, &Workload::new(Pattern::Random, Direction::Read, 4096, 4), Until::Count(50), round).unwrap();
        device.seen.lock().unwrap().clone()
    };
    assert_eq!(offsets(5), offsets(5));
    assert_ne!(offsets(5), offsets(6));
}

#[test]
fn a_failure_ends_the_run_and_names_its_offset() {
    let device = Scripted { fail_at: Some(20), ..Default::default() };
    let workload = Workload::new(Pattern::Sequential, Direction::Read, 4096, 4);
    let mut generator = Generator::for_workload(&workload, 1).unwrap();
    let error = generator.run("disk X", &device, &workload, Until::Count(1000), EngineKind::Auto, 0).unwrap_err();
    let LabError::Request { target, offset_bytes, completed, .. } = &error else { panic!("{error}") };
    assert_eq!((target.as_str(), *completed), ("disk X", 16));
    assert_eq!(*offset_bytes, device.seen.lock().unwrap()[16]);
    assert!(error.to_string().contains("read of 4096 bytes"), "{error}");
    // The generator is usable afterwards: its buffers came home or were made anew.
    let sound = Scripted::default();
    let measured = generator.run("disk Y", &sound, &workload, Until::Count(10), EngineKind::Auto, 0).unwrap();
    assert_eq!(measured.ios, 10);
}

#[test]
fn warm_up_is_left_out_and_the_window_is_filled() {
    let device = NullDevice::new(1 << 30);
    let workload = Workload::new(Pattern::Random, Direction::Read, 4096, 32);
    let until = Until::Elapsed { warm_up: Duration::from_millis(2), measured: Duration::from_millis(5) };
    let measured = run(&device, &workload, until, 0).unwrap();
    assert!(measured.ios > 0 && measured.wall_ns >= 5_000_000, "{measured:?}");
    let latency = measured.latency;
    assert!(latency.min_ns <= latency.p50_ns && latency.p50_ns <= latency.p99_ns && latency.p99_ns <= latency.max_ns);
    assert!(measured.depth_reached > 0.0);
}

#[test]
fn what_cannot_be_run_is_refused() {
    let small = NullDevice::new(4096);
    let large_block = Workload::new(Pattern::Random, Direction::Read, 8192, 1);
    let error = run(&small, &large_block, Until::Count(1), 0).unwrap_err();
    assert!(error.to_string().contains("not one block of 8192"), "{error}");
    for (block_bytes, depth) in [(0, 1), (1000, 1), (4096, 0), (1 << 31, 1 << 20)] {
        assert!(matches!(Generator::new(block_bytes, depth, 0), Err(LabError::BadOptions { .. })));
    }
    let other = Workload::new(Pattern::Random, Direction::Read, 4096, 2);
    let mut generator = Generator::for_workload(&large_block, 0).unwrap();
    assert!(generator.run("x", &small, &other, Until::Count(1), EngineKind::Auto, 0).is_err());
}

#[test]
fn rates_are_reckoned_from_the_window() {
    let measured = Measurement {
        ios: 1000,
        bytes: 4_096_000,
        wall_ns: 500_000_000,
        user_cpu_ns: 1_000_000,
        system_cpu_ns: 2_000_000,
        ..Default::default()
    };
    assert_eq!(measured.iops(), 2000.0);
    assert_eq!(measured.mb_per_s(), 8.192);
    assert_eq!(measured.cpu_ns_per_io(), 3000.0);
}
