//! Sweeps over simulated devices.

use super::{plan::tests::options, *};
use crate::{
    LabError,
    progress::{Silent, Step},
};
use diskwright_load::{
    job::{Caching, Job, Span},
    machine::Machine,
    record::{
        CpuRecord, DirectionRecord, End, Head, LatencyRecord, PhaseRecord, RUN_SCHEMA, Run, TargetRecord, ThreadRecord,
    },
    run::Watch,
    seeds,
};
use diskwright_stats::knee::Mark;

pub(crate) fn target(name: &str) -> TargetRecord {
    TargetRecord {
        name: name.into(),
        kind: "raw file".into(),
        size_bytes: 1 << 30,
        logical_sector_bytes: 512,
        cache: Caching::Direct,
        path: None,
        place: None,
        behind: None,
        contents: None,
    }
}

/// A run on a device that serves 8 requests at once in 100 us each.
fn simulated(job: &Job, files: usize) -> Run {
    simulated_by(8, job, files)
}

/// A run on a device that serves `servers` requests at once in 100 us each.
pub(crate) fn simulated_by(servers: u64, job: &Job, files: usize) -> Run {
    let load = &job.phases[0].loads[0];
    let in_flight = u64::from(load.threads) * u64::from(load.queue_depth) * files as u64;
    // About 1 % of noise, always the same for the same round. The round is found from the seed.
    let cell = job.name.rsplit_once(": ").map_or("", |(_, cell)| cell);
    let round = (0..100).find(|round| seeds::of_window(1, cell, *round) == job.seed);
    let seed = round.map_or(job.seed, |round| 1 + round as u64);
    let noise = ((seed * 31 + in_flight * 17 + u64::from(load.threads) * 5) % 7) as f64 / 300.0 - 0.01;
    let iops = (in_flight.min(servers) as f64 * 10_000.0 * (1.0 + noise)) as u64;
    let mean_ns = in_flight * 1_000_000_000 / iops;
    let direction = |ios: u64| DirectionRecord {
        ios,
        bytes: ios * load.block.largest_bytes(),
        errors: 0,
        service: LatencyRecord {
            count: ios,
            sum_ns: (ios * mean_ns) as f64,
            sum_of_squares: 0.0,
            min_ns: mean_ns,
            max_ns: mean_ns,
            buckets: vec![(mean_ns, ios)],
        },
        response: None,
    };
    let of_reads = (iops as f64 * load.read_percent / 100.0) as u64;
    let (reads, writes) = (direction(of_reads), direction(iops - of_reads));
    let thread = ThreadRecord {
        thread: 0,
        load: 0,
        target: 0,
        queue_depth: load.queue_depth,
        reads,
        writes,
        flushes: DirectionRecord::default(),
        overdue: 0,
        iops_std_dev: None,
    };
    let phase = PhaseRecord {
        name: "main".into(),
        window_ns: 1_000_000_000,
        window_start_ns: 0,
        threads: vec![thread],
        series: Vec::new(),
        interval_ns: 1_000_000_000,
        cpu: CpuRecord { process_user_ns: iops * 1500, ..CpuRecord::default() },
        members: Vec::new(),
        steady: None,
    };
    Run {
        head: Head {
            took_ns: 1_000_000_000,
            machine: Machine::default(),
            end: End::Complete,
            ..Head::begin(RUN_SCHEMA)
        },
        job: job.clone(),
        engine: None,
        targets: vec![target("disk.raw")],
        phases: vec![phase],
        labels: Vec::new(),
        fleet: None,
    }
}

fn swept(options: SweepOptions) -> SweepRecord {
    let mut record = begin(options, vec![target("disk.raw")], Vec::new()).unwrap();
    let mut measure = |job: &Job, files: usize, _: &dyn Watch| Ok(simulated(job, files));
    run(&mut record, "sweep", &mut measure, &mut |_| Ok(()), &mut Silent).unwrap();
    record
}

fn depths() -> SweepOptions {
    let mut options = options(&["queue-depth=1..16"]);
    options.job.phases[0].loads[0].threads = 1;
    options.targets = vec!["disk.raw".into()];
    options.max_p99 = Some(Span::from_nanos(150_000));
    options.array = Some(ArrayOptions { copies: 2, devices: 8 });
    options
}

/// The record with a fixed machine and time.
fn steady(mut record: SweepRecord) -> SweepRecord {
    record.head.machine =
        Machine { cpu_model: "Simulated CPU".into(), logical_cpus: 2, kernel: "Linux 6".into(), ..Machine::default() };
    record.head.took_ns = 0;
    record
}

#[test]
fn a_sweep_finds_the_knee_and_says_so_first() {
    let record = steady(swept(depths()));
    assert_eq!((record.cells.len(), &record.head.end), (16, &End::Complete));
    assert!(record.cells.iter().all(|cell| cell.measured.rounds.len() == 3 && cell.latency.count > 20_000));
    assert_eq!((record.cells[3].measured.load.as_str(), record.cells[3].measured.in_flight), ("queue-depth 4", 4));
    // Four in flight, all of them reads, on eight devices.
    let array = record.cells[3].array(&record.options).unwrap();
    assert_eq!((array.amplification, array.depth_per_device), (1.0, 0.5));
    let knee = &record.knees[0].knee;
    for mark in [&knee.efficient, &knee.saturation, &knee.paper] {
        let Mark::Found(point) = mark else { panic!("{mark:?}") };
        assert!((7.0..=9.0).contains(&point.load), "{point:?}");
    }
}

#[test]
fn a_resumed_sweep_ends_like_an_uninterrupted_one() {
    let whole = swept(depths());
    let mut record = begin(depths(), vec![target("disk.raw")], Vec::new()).unwrap();
    let mut saved = String::new();
    let mut runs = 0;
    while record.head.end != End::Complete {
        // Each run is stopped by the user after eleven windows.
        let mut steps = 0;
        let mut patience = |_: Step<'_>| {
            steps += 1;
            steps <= 11
        };
        let mut keep = |record: &SweepRecord| {
            saved = serde_json::to_string(record).unwrap();
            Ok(())
        };
        let mut measure = |job: &Job, files: usize, _: &dyn Watch| Ok(simulated(job, files));
        run(&mut record, "sweep", &mut measure, &mut keep, &mut patience).unwrap();
        let read: SweepRecord = serde_json::from_str(&saved).unwrap();
        assert!(read == record, "the saved record is complete");
        record = resume(read, depths(), &[target("disk.raw")]).unwrap();
        runs += 1;
        if record.head.end == End::Stopped {
            assert!(
                record.head.verdict.starts_with(&format!("Unfinished: {} of 48", runs * 11)),
                "{}",
                record.head.verdict
            );
        }
    }
    assert_eq!(runs, 5);
    assert_eq!((&record.cells, &record.knees, &record.head.verdict), (&whole.cells, &whole.knees, &whole.head.verdict));
}

#[test]
fn a_sweep_that_cannot_be_saved_still_has_conclusions() {
    let mut record = begin(depths(), vec![target("disk.raw")], Vec::new()).unwrap();
    let mut windows = 0;
    let mut keep = |_: &SweepRecord| {
        windows += 1;
        if windows < 30 { Ok(()) } else { Err(LabError::Stopped) }
    };
    let mut measure = |job: &Job, files: usize, _: &dyn Watch| Ok(simulated(job, files));
    let kept = run(&mut record, "sweep", &mut measure, &mut keep, &mut Silent);
    assert!(kept.is_err());
    let mut concluded = record.clone();
    conclude::conclude(&mut concluded);
    assert!(record == concluded && record.head.verdict.starts_with("Unfinished: 30 of 48"), "{}", record.head.verdict);
}

#[test]
fn other_options_are_refused_and_more_rounds_are_accepted() {
    let saved = swept(depths());
    let mut more = depths();
    (more.rounds, more.max_p99) = (5, None);
    let mut record = resume(saved.clone(), more, &[target("disk.raw")]).unwrap();
    let mut measured = 0;
    let mut measure = |job: &Job, files: usize, _: &dyn Watch| {
        measured += 1;
        Ok(simulated(job, files))
    };
    run(&mut record, "sweep", &mut measure, &mut |_| Ok(()), &mut Silent).unwrap();
    assert_eq!((measured, record.cells[3].measured.rounds.len()), (32, 5));
    type Change = fn(&mut SweepOptions);
    let changes: [(Change, &str); 5] = [
        (|options| options.job.phases[0].loads[0].read_percent = 50.0, "read_percent"),
        (|options| options.axes[0].values.push(17), "the axes queue-depth=1,2"),
        (|options| options.targets.push("other".into()), "disk.raw other"),
        (|options| options.total_depth = Some(8), "the total depth open"),
        (|options| options.rounds = 2, "more rounds"),
    ];
    for (change, word) in changes {
        let mut other = depths();
        change(&mut other);
        let error = resume(saved.clone(), other, &[target("disk.raw")]).unwrap_err().to_string();
        assert!(error.contains(word) && error.contains("another file"), "{error}");
    }
    let larger = TargetRecord { size_bytes: 2 << 30, ..target("disk.raw") };
    assert!(resume(saved, depths(), &[larger]).unwrap_err().to_string().contains("2147483648 bytes"));
}

#[test]
fn failed_requests_end_the_sweep_and_keep_earlier_windows() {
    let mut record = begin(depths(), vec![target("disk.raw")], Vec::new()).unwrap();
    let mut windows = 0;
    let mut measure = |job: &Job, files: usize, _: &dyn Watch| {
        windows += 1;
        let end = if windows == 20 {
            End::Failed { first: "disk.raw: the read of 4096 bytes at offset 8192 failed".into(), errors: 3 }
        } else {
            End::Complete
        };
        let mut run = simulated(job, files);
        run.head.end = end;
        Ok(run)
    };
    run(&mut record, "sweep", &mut measure, &mut |_| Ok(()), &mut Silent).unwrap();
    assert_eq!(record.cells.iter().map(|cell| cell.measured.rounds.len()).sum::<usize>(), 19);
    assert!(
        matches!(&record.head.end, End::Failed { errors: 3, first } if first.contains("queue-depth") && first.contains("8192"))
    );
    assert!(record.head.verdict.starts_with("Requests failed (3)"), "{}", record.head.verdict);
    // An error of `measure` leaves the record as it was kept last.
    let mut gone =
        |_: &Job, _: usize, _: &dyn Watch| Err(LabError::BadOptions { what: "gone".into(), hint: String::new() });
    assert!(run(&mut record, "sweep", &mut gone, &mut |_| Ok(()), &mut Silent).is_err());
    assert_eq!(record.cells.iter().map(|cell| cell.measured.rounds.len()).sum::<usize>(), 19);
}

#[test]
fn two_axes_give_a_knee_for_each_value_of_the_other() {
    let mut options = depths();
    options.axes.insert(0, "threads=1,2".parse().unwrap());
    let record = swept(options);
    assert_eq!(record.knees.len(), 2);
    for row in &record.knees {
        // Sixteen requests of two threads are the same load as sixteen of one.
        let point = row.knee.efficient.found().unwrap();
        assert!((7.0..=10.0).contains(&point.load), "{point:?}");
    }
    assert!(record.head.verdict.starts_with("Threads 1: most efficient"), "{}", record.head.verdict);
}

#[test]
fn more_agents_are_more_load_and_have_a_knee() {
    let mut options = options(&["agents=1..8"]);
    options.targets = (1..=8).map(|number| format!("vm{number}")).collect();
    (options.job.phases[0].loads[0].threads, options.job.phases[0].loads[0].queue_depth) = (1, 2);
    let record = swept(options);
    let point = record.knees[0].knee.saturation.found().unwrap();
    assert_eq!((point.load, record.cells[point.cell].files), (8.0, 4));
}

#[test]
fn combinations_of_one_total_have_a_best_and_no_knee() {
    let mut options = options(&["threads=1..24"]);
    options.total_depth = Some(120);
    let record = steady(swept(options));
    assert!(record.knees.is_empty());
    let best = record.best.as_ref().unwrap();
    assert_eq!((best.metric, record.cells.len()), (diskwright_load::figures::Metric::Iops, 12));
    // All are equally fast on this device.
    assert!(best.rivals.as_ref().is_some_and(|rivals| !rivals.is_empty()), "{best:?}");
    assert!(record.head.verdict.contains("not significantly different:"), "{}", record.head.verdict);
    let blocks = swept(plan::tests::options(&["block-size=4K..64K*2"]));
    assert_eq!(blocks.best.unwrap().cell, 4);
    assert!(blocks.head.verdict.starts_with("The best of 5 combinations is block-size 64K"), "{}", blocks.head.verdict);
}

#[test]
fn one_round_has_no_intervals_and_says_so() {
    let mut options = depths();
    options.rounds = 1;
    let record = swept(options);
    assert!(record.head.verdict.contains("measured once"), "{}", record.head.verdict);
    assert!(record.head.warnings.iter().any(|warning| warning.to_string().contains("1 rounds are too few")));
}
