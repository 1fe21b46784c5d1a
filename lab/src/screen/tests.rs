use super::*;
use crate::{
    job::{Bytes, Caching, Job, Load, Span},
    machine::{Machine, Place, Versions},
    record::{ContentsRecord, CpuRecord, End, LatencyRecord, RUN_SCHEMA, SteadyRecord, ThreadRecord},
    warning::Warning,
};

/// `count` requests from 100 to 199 us, evenly.
fn latency(count: u64) -> LatencyRecord {
    let mut record = LatencyRecord::default();
    for step in 0..100 {
        let (value, share) = (100_000 + step * 1_000, count / 100);
        record.add(&LatencyRecord {
            count: share,
            sum_ns: (value * share) as f64,
            sum_of_squares: (value as f64).powi(2) * share as f64,
            min_ns: value,
            max_ns: value,
            buckets: vec![(value, share)],
        });
    }
    record
}

fn direction(ios: u64) -> DirectionRecord {
    DirectionRecord { ios, bytes: ios * 8192, errors: 0, service: latency(ios), response: None }
}

fn a_run() -> Run {
    let load = Load {
        block: crate::job::Blocks::One(Bytes(8192)),
        read_percent: 70.0,
        threads: 2,
        queue_depth: 4,
        ..Load::default()
    };
    let thread = |number| ThreadRecord {
        thread: number,
        load: 0,
        target: 0,
        queue_depth: 4,
        reads: direction(70_000),
        writes: direction(30_000),
        flushes: DirectionRecord::default(),
        overdue: 0,
        iops_std_dev: None,
    };
    let machine = Machine {
        cpu_model: "Some CPU".into(),
        logical_cpus: 2,
        memory_bytes: 8 << 30,
        kernel: "Linux 6".into(),
        ..Machine::default()
    };
    Run {
        schema: RUN_SCHEMA.into(),
        started_utc: "20261121T120000Z".into(),
        took_ns: 6_000_000_000,
        job: Job::simple("oltp", load, Span::from_secs(1), Span::from_secs(5)),
        machine,
        versions: Versions::default(),
        targets: vec![TargetRecord {
            name: "disk.vhdx".into(),
            kind: "vhdx dynamic".into(),
            size_bytes: 1 << 30,
            logical_sector_bytes: 512,
            cache: Caching::Direct,
            path: None,
            behind: None,
            place: Some(Place {
                file_system: "ext4".into(),
                device: "/dev/vda".into(),
                scheduler: Some("none".into()),
                ..Place::default()
            }),
            contents: Some(ContentsRecord {
                allocated: 1.0,
                zero: 0.0,
                repeated: 0.0,
                sampled: 256,
                filled_bytes: 1 << 30,
            }),
        }],
        phases: vec![PhaseRecord {
            name: "main".into(),
            window_ns: 5_000_000_000,
            window_start_ns: 1_000_000_000,
            threads: vec![thread(0), thread(1)],
            series: Vec::new(),
            interval_ns: 1_000_000_000,
            cpu: CpuRecord {
                process_user_ns: 200_000_000,
                process_system_ns: 600_000_000,
                tsc_hz: 2e9,
                ..CpuRecord::default()
            },
            steady: None,
        }],
        warnings: Vec::new(),
        end: End::Complete,
        labels: Vec::new(),
    }
}

#[test]
fn the_verdict_comes_first_and_the_rest_is_in_order() {
    insta::assert_snapshot!(render(&a_run(), &ScreenOptions { colour: false, per_thread: true }));
}

#[test]
fn what_voids_a_run_is_its_first_line() {
    let mut run = a_run();
    run.warnings =
        vec![Warning::Unallocated { target: "disk.vhdx".into(), allocated: 0.03 }, Warning::OtherLoad { cpus: 1.2 }];
    let text = render(&run, &ScreenOptions::default());
    assert!(text.starts_with("NOT STORAGE: disk.vhdx: only 3 % of what is under test has space"), "{text}");
    assert!(text.contains("\nWarnings\n  ! other programs"), "{text}");
    assert_eq!(text.matches("has space; the rest").count(), 1, "told once");
}

#[test]
fn a_percentile_stands_only_where_the_sample_supports_it() {
    let mut run = a_run();
    let text = render(&run, &ScreenOptions::default());
    // 200,000 requests: four nines, for 20 lie beyond the fourth. 60,000 writes have but three.
    assert!(text.contains("99.99 %") && !text.contains("99.999 %"), "{text}");
    let writes = text.lines().rfind(|line| line.trim_start().starts_with("writes")).unwrap();
    assert!(writes.contains('·'), "{writes}");
    for thread in &mut run.phases[0].threads {
        (thread.reads, thread.writes) = (direction(100), DirectionRecord::default());
    }
    let text = render(&run, &ScreenOptions::default());
    assert!(!text.contains("99 % within") && !text.contains("99.9 %"), "{text}");
}

#[test]
fn partial_and_failed_runs_say_so_in_the_verdict() {
    let mut run = a_run();
    run.end = End::Stopped;
    assert!(sentences(&run)[1].contains("partial"));
    run.end = End::Failed { first: "disk.vhdx: read of 8192 bytes at offset 4096: I/O error".into(), errors: 1200 };
    let last = sentences(&run).pop().unwrap();
    assert!(last.contains("FAILED: 1,200 requests") && last.contains("offset 4096"), "{last}");
    run.phases[0].threads.clear();
    assert!(sentences(&run)[0].contains("no request was completed"), "{:?}", sentences(&run));
    render(&run, &ScreenOptions { colour: true, per_thread: true });
}

#[test]
fn response_time_and_service_time_are_both_shown() {
    let mut run = a_run();
    for thread in &mut run.phases[0].threads {
        thread.reads.response = Some(latency(70_000));
    }
    let text = render(&run, &ScreenOptions::default());
    assert!(text.contains("total, from the intended start") && text.contains("total, service"), "{text}");
}

#[test]
fn the_steady_state_is_told() {
    let mut run = a_run();
    let mut steady = SteadyRecord {
        reached_ns: Some(12_000_000_000),
        left_ns: None,
        round_ns: 1_000_000_000,
        range: 0.08,
        slope: -0.03,
    };
    let mut line = |steady: &SteadyRecord| {
        run.phases[0].steady = Some(steady.clone());
        render(&run, &ScreenOptions::default())
    };
    assert!(line(&steady).contains("steady after 12.0 s (range 8 %, slope -3 %)"));
    steady.left_ns = Some(20_000_000_000);
    assert!(line(&steady).contains("NOT ANY MORE after 20.0 s"));
    steady.reached_ns = None;
    assert!(line(&steady).contains("NOT STEADY"));
}

#[test]
fn many_nines_go_down_the_page_and_flushes_have_rows_of_their_own() {
    let mut run = a_run();
    for thread in &mut run.phases[0].threads {
        thread.reads = direction(7_000_000_000);
        thread.writes = direction(3_000_000_000);
        thread.flushes = DirectionRecord { bytes: 0, ..direction(300) };
    }
    let text = render(&run, &ScreenOptions::default());
    let line = |head: &str| text.lines().find(|line| line.trim_start().starts_with(head)).unwrap_or_default();
    let words = |head: &str| line(head).split_whitespace().collect::<Vec<_>>();
    assert_eq!(words("latency"), ["latency", "total", "reads", "writes", "flushes"], "{text}");
    assert!(line("99.999999 %").ends_with("199 µs  199 µs  199 µs        ·"), "{text}");
    assert_eq!(words("flushes")[..4], ["flushes", "600", "120", "·"], "{text}");
    assert!(text.lines().skip_while(|line| !line.contains("latency")).take(12).all(|line| line.chars().count() < 60));
}
