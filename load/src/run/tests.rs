//! Tests of whole runs on `null:` and on simulated devices.

use super::{simulated::Simulated, *};
use crate::{
    NullDevice,
    job::{Blocks, Burst, Bytes, Caching, Load, Rate, Span},
    record::{PhaseRecord, Total},
    warning::Warning,
};
use diskwright_store::{BlockDevice, Geometry, Operation};
use std::{
    collections::BTreeSet,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

pub(super) const SIZE: u64 = 256 * 4096;

pub(super) fn target(name: &str, device: impl BlockDevice + 'static) -> OpenTarget {
    OpenTarget::new(name, device)
}

pub(super) fn counted(load: Load, count: u64) -> Job {
    let mut job = Job::simple("test", load, Span::default(), Span::from_secs(1));
    job.phases[0].count = Some(count);
    job
}

pub(super) fn timed(load: Load, warm_up_ms: u64, measured_ms: u64) -> Job {
    let mut job = Job::simple("test", load, Span::from_millis(warm_up_ms), Span::from_millis(measured_ms));
    job.interval = Span::from_millis(10);
    job
}

pub(super) fn go(job: &Job, targets: &[OpenTarget]) -> Run {
    run(job, targets, &RunOptions::default(), &Unwatched).unwrap()
}

fn ios_of_series(phase: &PhaseRecord) -> u64 {
    phase.series.iter().map(|point| point.read_ios + point.write_ios).sum()
}

#[test]
fn a_target_is_flushed_when_it_is_closed_unless_it_was_only_read() {
    let broken = || Simulated { fails: Some((0, |noted| noted.operation == Operation::Flush)), ..Simulated::new(SIZE) };
    let reader = Simulated { geometry: Geometry { read_only: true, ..broken().geometry }, ..broken() };
    let devices = [Simulated::new(SIZE), broken(), reader];
    let [sound, fails, read_only] = devices.each_ref().map(|device| target("x", device.clone()).close());
    sound.unwrap();
    read_only.unwrap();
    let said = fails.unwrap_err().to_string();
    assert!(said.starts_with("x: cannot flush its writes: broken sector"), "{said}");
    assert_eq!(devices.map(|device| device.noted().len()), [1, 1, 0]);
}

#[test]
fn a_count_is_kept_exactly_by_every_thread() {
    for (threads, queue_depth, count) in [(1, 1, 1), (1, 4, 3), (2, 4, 4), (3, 4, 1000)] {
        let device = Simulated::new(SIZE);
        let load = Load { threads, queue_depth, read_percent: 50.0, ..Load::default() };
        let found = go(&counted(load, count), &[target("x", device.clone())]);
        let (total, noted) = (found.phases[0].total(), device.noted());
        assert_eq!(found.head.end, End::Complete);
        assert_eq!(total.both.ios, count * u64::from(threads));
        assert_eq!(noted.len() as u64, total.both.ios);
        let reads = noted.iter().filter(|noted| noted.operation == Operation::Read).count() as u64;
        assert_eq!((total.reads.ios, total.reads.service.count), (reads, reads));
        assert_eq!(total.both.bytes, total.both.ios * 4096);
        assert_eq!(ios_of_series(&found.phases[0]), total.both.ios, "the series and the totals agree");
        assert!(found.phases[0].threads.iter().all(|thread| thread.reads.ios + thread.writes.ios == count));
    }
}

#[test]
fn the_depth_is_reached_and_never_exceeded() {
    let device = Simulated::new(SIZE);
    go(&counted(Load { queue_depth: 7, ..Load::default() }, 500), &[target("x", device.clone())]);
    assert_eq!(device.noted().iter().map(|noted| noted.depth).max(), Some(7));
}

#[test]
fn each_load_goes_to_its_targets_with_its_threads() {
    let devices = [0, 1, 2].map(|_| Simulated::new(SIZE));
    let targets: Vec<OpenTarget> =
        devices.iter().enumerate().map(|(number, device)| target(&format!("t{number}"), device.clone())).collect();
    let mut job = counted(Load { threads: 2, queue_depth: 2, ..Load::default() }, 30);
    job.phases[0].loads.push(Load { targets: vec![2], queue_depth: 3, ..Load::default() });
    let found = go(&job, &targets);
    let seen: Vec<(u32, u32, u32, u32)> = found.phases[0]
        .threads
        .iter()
        .map(|thread| (thread.thread, thread.load, thread.target, thread.queue_depth))
        .collect();
    assert_eq!(
        seen,
        [(0, 0, 0, 2), (1, 0, 0, 2), (2, 0, 1, 2), (3, 0, 1, 2), (4, 0, 2, 2), (5, 0, 2, 2), (6, 1, 2, 3)]
    );
    assert_eq!(devices.map(|device| device.noted().len()), [60, 60, 90]);
}

#[test]
fn a_thread_can_drive_all_targets() {
    let devices = [Simulated::new(SIZE), Simulated { service: Duration::from_micros(200), ..Simulated::new(SIZE) }];
    let targets = [target("fast", devices[0].clone()), target("slow", devices[1].clone())];
    let load = Load { threads: 2, across_targets: true, queue_depth: 2, ..Load::default() };
    let found = go(&counted(load, 200), &targets);
    let threads = &found.phases[0].threads;
    assert_eq!(
        threads.iter().map(|thread| (thread.thread, thread.target)).collect::<Vec<_>>(),
        [(0, 0), (0, 1), (1, 0), (1, 1)]
    );
    let of = |number: u32| -> u64 {
        threads.iter().filter(|thread| thread.thread == number).map(|thread| thread.reads.ios).sum()
    };
    assert_eq!((of(0), of(1)), (200, 200), "a count is a thread's, over all its targets");
    assert!(devices.iter().all(|device| device.noted().len() > 2), "no target starves");
}

#[test]
fn a_thread_flushes_after_the_given_number_of_writes() {
    let device = Simulated::new(SIZE);
    let load = Load { read_percent: 0.0, flush_every: 5, queue_depth: 1, ..Load::default() };
    let found = go(&counted(load, 23), &[target("x", device.clone())]);
    let operations: Vec<Operation> = device.noted().iter().map(|noted| noted.operation).collect();
    for (index, operation) in operations.iter().enumerate() {
        assert_eq!(*operation == Operation::Flush, index % 6 == 5, "request {index}");
    }
    let total = found.phases[0].total();
    assert_eq!((total.writes.ios, total.flushes.ios), (23, 4), "flushes do not count as requests");
    assert_eq!(
        (total.both.service.count, total.flushes.service.count),
        (23, 4),
        "the latencies of flushes are separate"
    );
    assert!(total.flushes.service.min_ns > 0 && total.flushes.response.is_none() && total.flushes.bytes == 0);
}

#[test]
fn write_through_forces_every_write_and_no_read() {
    for (cache, durable) in
        [(Caching::Direct, false), (Caching::WriteThrough, true), (Caching::DirectWriteThrough, true)]
    {
        let device = Simulated::new(SIZE);
        let mut job = counted(Load { read_percent: 50.0, ..Load::default() }, 100);
        job.cache = cache;
        go(&job, &[target("x", device.clone())]);
        assert!(device.noted().iter().all(|noted| noted.fua == (durable && noted.operation == Operation::Write)));
    }
}

#[test]
fn a_failed_flush_is_counted_as_a_flush() {
    let device = Simulated { fails: Some((0, |noted| noted.operation == Operation::Flush)), ..Simulated::new(SIZE) };
    let load = Load { read_percent: 0.0, flush_every: 5, queue_depth: 1, ..Load::default() };
    let found = go(&counted(load, 23), &[target("disk X", device)]);
    let total = found.phases[0].total();
    assert_eq!((total.flushes.errors, total.flushes.ios, total.both.errors), (1, 0, 0));
    let End::Failed { first, .. } = &found.head.end else { panic!("{:?}", found.head.end) };
    assert_eq!(first, "disk X: the flush failed: broken sector");
}

#[test]
fn a_failure_is_recorded_with_its_offset_and_ends_the_run() {
    let device = Simulated { fails: Some((20, |_| true)), ..Simulated::new(SIZE) };
    let load = Load { queue_depth: 4, random_percent: 0.0, ..Load::default() };
    let found = go(&timed(load, 0, 60_000), &[target("disk X", device.clone())]);
    let End::Failed { first, errors } = &found.head.end else { panic!("{:?}", found.head.end) };
    assert_eq!(first, "disk X: the read of 4096 bytes at offset 81920 failed: broken sector");
    assert!((1..=8).contains(errors), "{errors}");
    let total = found.phases[0].total();
    assert_eq!((total.reads.ios, total.reads.errors), (20, *errors), "failed requests are counted separately");
    assert!(found.head.took_ns < 30_000_000_000);
}

#[test]
fn a_run_with_keep_going_continues_after_failures() {
    let device = Simulated { fails: Some((0, |noted| noted.offset_bytes % 8192 == 0)), ..Simulated::new(SIZE) };
    let load = Load { queue_depth: 4, random_percent: 0.0, ..Load::default() };
    let options = RunOptions { keep_going: true, ..RunOptions::default() };
    let found = run(&counted(load, 100), &[target("x", device)], &options, &Unwatched).unwrap();
    assert!(matches!(&found.head.end, End::Failed { errors: 50, .. }), "{:?}", found.head.end);
    let total = found.phases[0].total();
    assert_eq!((total.reads.ios, total.reads.errors, total.reads.service.count), (50, 50, 50));
}

#[test]
fn a_failed_queue_ends_the_run_and_keeps_what_was_measured() {
    let device = Simulated { breaks: Some(100), ..Simulated::new(SIZE) };
    let options = RunOptions { keep_going: true, ..RunOptions::default() };
    let targets = [target("gone", device), target("there", NullDevice::new(SIZE))];
    let found = run(&timed(Load::default(), 0, 60_000), &targets, &options, &Unwatched).unwrap();
    let End::Failed { first, .. } = &found.head.end else { panic!("{:?}", found.head.end) };
    assert_eq!(first, "gone: its queue failed: the device is gone");
    assert!(found.phases[0].total_where(|thread| thread.target == 0).reads.ios > 0);
    assert!(found.head.took_ns < 30_000_000_000);
}

#[test]
fn a_queue_that_cannot_be_opened_is_an_error_before_any_request() {
    let (sound, broken) = (Simulated::new(SIZE), Simulated { servers: 0, ..Simulated::new(SIZE) });
    let targets = [target("sound", sound.clone()), target("broken", broken)];
    let error = run(&timed(Load::default(), 0, 60_000), &targets, &RunOptions::default(), &Unwatched).unwrap_err();
    assert!(error.to_string().starts_with("broken: cannot open a queue of depth 32: it has no servers"), "{error}");
    assert_eq!(sound.noted().len(), 0);
}

#[test]
fn a_watcher_can_stop_a_run_and_what_was_measured_is_kept() {
    let looks = AtomicUsize::new(0);
    let watch = |snapshot: &Snapshot<'_>| {
        assert_eq!((snapshot.phase, snapshot.phase_index, snapshot.phases), ("main", 0, 1));
        assert!(snapshot.remaining_ns.is_some() && snapshot.done.is_some_and(|done| done < 0.1));
        looks.fetch_add(1, Ordering::Relaxed) < 2
    };
    let job = timed(Load::default(), 0, 60_000);
    let found = run(&job, &[target("x", NullDevice::new(SIZE))], &RunOptions::default(), &watch).unwrap();
    assert_eq!(found.head.end, End::Stopped);
    assert_eq!(looks.load(Ordering::Relaxed), 3);
    let phase = &found.phases[0];
    assert!(phase.total().both.ios > 0 && phase.window_ns > 0 && phase.window_ns < 30_000_000_000);
    assert_eq!(ios_of_series(phase), phase.total().both.ios);
}

#[test]
fn warm_up_and_cool_down_are_in_the_series_but_not_in_the_window() {
    let mut job = timed(Load::default(), 30, 40);
    job.phases[0].cool_down = Span::from_millis(30);
    let found = go(&job, &[target("x", NullDevice::new(SIZE))]);
    let phase = &found.phases[0];
    assert_eq!((phase.window_start_ns, phase.window_ns), (30_000_000, 40_000_000));
    let inside: u64 = phase
        .series
        .iter()
        .filter(|point| (30_000_000..70_000_000).contains(&point.start_ns))
        .map(|point| point.read_ios)
        .sum();
    assert_eq!(phase.total().both.ios, inside);
    assert!(ios_of_series(phase) > inside);
    assert!(phase.series.windows(2).all(|pair| pair[1].start_ns == pair[0].start_ns + 10_000_000));
}

#[test]
fn phases_run_one_after_the_other() {
    let mut job = counted(Load::default(), 50);
    let mut second = job.phases[0].clone();
    second.name = "second".into();
    second.loads[0].read_percent = 0.0;
    job.phases.push(second);
    let found = go(&job, &[target("x", Simulated::new(SIZE))]);
    let totals: Vec<(u64, u64)> =
        found.phases.iter().map(PhaseRecord::total).map(|total| (total.reads.ios, total.writes.ios)).collect();
    assert_eq!(totals, [(50, 0), (0, 50)]);
}

#[test]
fn a_stall_is_in_the_response_times_of_all_requests_that_were_due() {
    // A request per millisecond; one of them takes 200 ms. With coordinated omission there would be
    // one slow request.
    let device = Simulated { slow: Some((100, Duration::from_millis(200))), ..Simulated::new(SIZE) };
    let load = Load { queue_depth: 1, rate: Some(Rate::Iops { per_thread: 1000.0 }), ..Load::default() };
    let found = go(&counted(load, 400), &[target("x", device)]);
    let Total { reads, .. } = found.phases[0].total();
    let longer = |latency: &crate::record::LatencyRecord, ns: u64| -> u64 {
        latency.buckets.iter().filter(|(highest, _)| *highest > ns).map(|(_, count)| count).sum()
    };
    let response = reads.response.as_ref().unwrap();
    assert!(longer(response, 100_000_000) >= 90, "{}", longer(response, 100_000_000));
    assert!((1..=3).contains(&longer(&reads.service, 100_000_000)), "{}", longer(&reads.service, 100_000_000));
    assert_eq!((response.count, reads.service.count), (400, 400));
    assert_eq!(reads.latency(), response);
}

#[test]
fn a_rate_that_is_not_kept_gives_a_warning() {
    let device = Simulated { service: Duration::from_millis(2), ..Simulated::new(SIZE) };
    let load = Load { queue_depth: 1, rate: Some(Rate::Iops { per_thread: 5000.0 }), ..Load::default() };
    let found = go(&timed(load, 0, 100), &[target("x", device)]);
    let said = found.head.warnings.iter().find_map(|warning| match warning {
        Warning::RateNotKept { share, overdue, .. } => Some((*share, *overdue)),
        _ => None,
    });
    let (share, overdue) = said.expect("a warning");
    assert!(share < 0.2 && overdue > 300, "{share} {overdue}");
}

#[test]
fn a_rate_is_kept_on_average() {
    let load = Load { queue_depth: 4, rate: Some(Rate::Iops { per_thread: 2000.0 }), ..Load::default() };
    let found = go(&counted(load, 200), &[target("x", NullDevice::new(SIZE))]);
    // The last request has its intended start at 99.5 ms, and is never made earlier.
    assert!(found.phases[0].window_ns >= 99_500_000, "{}", found.phases[0].window_ns);
}

#[test]
fn think_time_and_bursts_delay_requests() {
    let think = Load { queue_depth: 2, think_time: Span::from_millis(5), ..Load::default() };
    let found = go(&counted(think, 20), &[target("x", NullDevice::new(SIZE))]);
    assert!(found.phases[0].window_ns >= 45_000_000, "nine rests between ten requests of a slot");
    let burst = Some(Burst { requests: 10, pause: Span::from_millis(10) });
    let found = go(&counted(Load { burst, ..Load::default() }, 50), &[target("x", NullDevice::new(SIZE))]);
    assert!(found.phases[0].window_ns >= 40_000_000, "four pauses between five bursts");
    assert!(found.phases[0].total().reads.response.is_none());
}

#[test]
fn each_job_that_does_not_fit_has_its_own_error() {
    let error_of = |load: Load, device: Simulated| {
        run(&counted(load, 1), &[target("t", device)], &RunOptions::default(), &Unwatched).unwrap_err()
    };
    let sim = || Simulated::new(SIZE);
    let with_set = |bytes| Load { working_set: Bytes(bytes), ..Load::default() };
    let error = error_of(with_set(2 * SIZE), sim());
    assert!(
        matches!(error, LoadError::WorkingSet { end_bytes, size_bytes: SIZE, .. } if end_bytes == 2 * SIZE),
        "{error}"
    );
    let error = error_of(Load { start: Bytes(SIZE), ..Load::default() }, sim());
    assert!(matches!(error, LoadError::BlockTooLarge { set_bytes: 0, block_bytes: 4096, .. }), "{error}");
    let coarse = Geometry { logical_sector_bytes: 4096, ..sim().geometry };
    let small = Load { block: Blocks::One(Bytes(512)), ..Load::default() };
    let error = error_of(small, Simulated { geometry: coarse, ..sim() });
    assert!(matches!(error, LoadError::NotSectors { field: "block", bytes: 512, sector_bytes: 4096, .. }), "{error}");
    let read_only = Geometry { read_only: true, ..sim().geometry };
    let error = error_of(Load { read_percent: 99.0, ..Load::default() }, Simulated { geometry: read_only, ..sim() });
    assert!(matches!(error, LoadError::ReadOnlyTarget { .. }), "{error}");
    let error = error_of(Load { targets: vec![1], ..Load::default() }, sim());
    assert!(error.to_string().contains("target 1"), "{error}");
    let huge = Load { queue_depth: 16_384, block: Blocks::One(Bytes(16 << 10)), threads: 100, ..Load::default() };
    assert!(error_of(huge, sim()).to_string().contains("of buffers"));
    let error = run(&Job { phases: vec![], ..counted(Load::default(), 1) }, &[], &RunOptions::default(), &Unwatched);
    assert!(matches!(error, Err(LoadError::Job(_))));
}

#[test]
fn the_same_job_makes_the_same_requests() {
    let offsets = |seed| {
        let device = Simulated::new(SIZE);
        let mut job = counted(Load { read_percent: 60.0, ..Load::default() }, 100);
        job.seed = seed;
        go(&job, &[target("x", device.clone())]);
        device.noted().iter().map(|noted| (noted.operation == Operation::Read, noted.offset_bytes)).collect::<Vec<_>>()
    };
    assert_eq!(offsets(1), offsets(1));
    assert_ne!(offsets(1), offsets(2));
}

#[test]
fn latencies_are_those_of_the_device_and_littles_law_holds() {
    let service = Duration::from_millis(2);
    let device = Simulated { service, servers: 4, ..Simulated::new(SIZE) };
    let found = go(&counted(Load { queue_depth: 4, ..Load::default() }, 100), &[target("x", device)]);
    let phase = &found.phases[0];
    let reads = phase.total().reads;
    assert!(reads.service.min_ns >= 2_000_000, "{}", reads.service.min_ns);
    assert!(phase.depth_reached() > 3.0 && phase.depth_reached() < 4.2, "{}", phase.depth_reached());
    assert!(found.head.warnings.iter().all(|warning| !matches!(warning, Warning::DepthNotReached { .. })));
}

#[test]
fn an_interlocked_stream_is_read_once_by_all_threads() {
    let device = Simulated::new(SIZE);
    let load = Load { threads: 4, queue_depth: 2, random_percent: 0.0, interlocked: true, ..Load::default() };
    go(&counted(load, 64), &[target("x", device.clone())]);
    let offsets: BTreeSet<u64> = device.noted().iter().map(|noted| noted.offset_bytes).collect();
    assert_eq!(offsets.len(), 256, "each block once");
}

#[test]
fn snapshots_have_stage_rate_and_latency() {
    let seen = Mutex::new(Vec::new());
    let watch = |snapshot: &Snapshot<'_>| {
        seen.lock().unwrap().push((snapshot.stage, snapshot.iops, snapshot.p99_ns));
        true
    };
    let mut job = timed(Load::default(), 300, 300);
    job.phases[0].cool_down = Span::from_millis(300);
    run(&job, &[target("x", NullDevice::new(SIZE))], &RunOptions::default(), &watch).unwrap();
    let seen = seen.into_inner().unwrap();
    assert!(seen.iter().any(|(_, iops, p99_ns)| *iops > 0.0 && *p99_ns > 0), "{seen:?}");
    assert!(seen.len() <= 3 && seen.windows(2).all(|pair| pair[0].0 as u8 <= pair[1].0 as u8), "{seen:?}");
}
