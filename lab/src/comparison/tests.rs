//! Comparisons with known results.

use super::{judge as judge_with_head, *};
use crate::{
    output::{Kind, Output},
    progress::{Silent, Step},
    targets::open_target,
};
use diskwright_load::{
    figures::{Figures, Metric},
    job::{Job, Load, Span},
    machine::Machine,
    null::NullDevice,
    record::{
        CpuRecord, DirectionRecord, End, Head, LatencyRecord, PhaseRecord, RUN_SCHEMA, Run, SeriesPoint, ThreadRecord,
    },
    run::Watch,
    warning::Warning,
};
use diskwright_store::CacheMode;
use rand_xoshiro::{
    Xoshiro256PlusPlus,
    rand_core::{Rng, SeedableRng},
};
use std::sync::Arc;

struct Noise(Xoshiro256PlusPlus);

impl Noise {
    fn with_seed(seed: u64) -> Self {
        Self(Xoshiro256PlusPlus::seed_from_u64(seed))
    }

    /// Approximately normal, with mean 0 and standard deviation 1.
    fn normal(&mut self) -> f64 {
        (0..12).map(|_| (self.0.next_u64() >> 11) as f64 / (1_u64 << 53) as f64).sum::<f64>() - 6.0
    }
}

fn round(iops: f64) -> Figures {
    Figures {
        iops,
        mb_per_s: iops * 4096.0 / 1e6,
        mean_ns: 32e9 / iops,
        p50_ns: 30e9 / iops,
        p99_ns: 90e9 / iops,
        cpu_ns_per_io: 2000.0,
        ..Figures::default()
    }
}

fn judge(sides: Vec<Side>, options: &JudgeOptions) -> ComparisonRecord {
    judge_with_head(Head::begin(COMPARISON_SCHEMA), sides, options)
}

fn side(name: &str, rounds: Vec<Figures>) -> Side {
    Side {
        name: name.into(),
        sources: vec![format!("{name}.json")],
        circumstances: Circumstances { machine: "2 x CPU".into(), cache: "direct".into(), ..Circumstances::default() },
        groups: vec![Group::new("main", "4K random read, 1 x 32", rounds)],
    }
    .named(name)
}

/// `n` rounds around `iops`. The drift is the same for all calls; the noise depends on `seed`.
fn rounds(n: usize, iops: f64, noise: f64, seed: u64, drift: f64) -> Vec<Figures> {
    let (mut own, mut drifting) = (Noise::with_seed(seed), Noise::with_seed(99));
    (0..n).map(|_| round(iops * (noise * own.normal() + drift * drifting.normal()).exp())).collect()
}

fn paired() -> JudgeOptions {
    JudgeOptions { paired: true, ..JudgeOptions::default() }
}

#[test]
fn the_estimate_of_a_slower_side_is_right() {
    let base = side("old", rounds(10, 100_000.0, 0.01, 1, 0.2));
    let ours = side("new", rounds(10, 90_000.0, 0.01, 2, 0.2));
    let record = judge(vec![base.clone(), ours.clone()], &paired());
    let iops = &record.comparisons[0];
    assert_eq!((iops.metric, iops.conclusion), (Metric::Iops, Conclusion::Worse));
    assert!((iops.change.estimate + 0.1).abs() < 0.02 && iops.change.interval.high < -0.08, "{iops:?}");
    assert!(
        record.head.verdict.starts_with("new is slower than old: IOPS -9.9 % (95 % interval -10.7 % to -8.9 %)"),
        "{}",
        record.head.verdict
    );
    // MB/s would repeat the IOPS. The CPU time is equal on both sides.
    assert!(record.comparisons.iter().all(|comparison| comparison.metric != Metric::MbPerS));
    assert_eq!(record.comparisons[4].conclusion, Conclusion::NoDifference);
    assert!((iops.p_corrected - iops.p * 5.0).abs() < 1e-12);
    // The same rounds compared without pairs: the drift hides the difference.
    let apart = judge(vec![base, ours], &JudgeOptions::default());
    assert_eq!(apart.comparisons[0].conclusion, Conclusion::NoDifference);
}

#[test]
fn false_positives_are_rare() {
    let mut called = 0;
    for seed in 0..200 {
        let sides = vec![
            side("a", rounds(10, 100_000.0, 0.03, 2 * seed + 1, 0.1)),
            side("b", rounds(10, 100_000.0, 0.03, 2 * seed + 2, 0.1)),
        ];
        let record = judge(sides, &paired());
        called +=
            u32::from(record.comparisons.iter().any(|comparison| comparison.conclusion != Conclusion::NoDifference));
        if called == 0 && seed == 0 {
            assert!(
                record.head.verdict.starts_with("No significant difference between b and a: IOPS "),
                "{}",
                record.head.verdict
            );
        }
    }
    // The expected number is at most 10 (5 %).
    assert!(called <= 18, "{called} of 200");
}

#[test]
fn a_true_difference_is_nearly_always_significant() {
    let seen = (0..100).filter(|seed| {
        let base = side("a", rounds(10, 100_000.0, 0.02, 2 * seed + 1, 0.1));
        let ours = side("b", rounds(10, 106_000.0, 0.02, 2 * seed + 2, 0.1));
        judge(vec![base, ours], &paired()).comparisons[0].conclusion == Conclusion::Better
    });
    assert!(seen.count() >= 85);
}

#[test]
fn the_verdict_says_that_rounds_are_too_few() {
    let three = |iops| rounds(3, iops, 0.001, 1, 0.0);
    let record = judge(vec![side("a", three(100_000.0)), side("b", three(50_000.0))], &JudgeOptions::default());
    assert_eq!(record.comparisons[0].conclusion, Conclusion::TooFewRounds);
    assert!(record.head.verdict.starts_with("3 rounds of each cannot show a difference"), "{}", record.head.verdict);
    let five = |iops| rounds(5, iops, 0.001, 1, 0.0);
    let record = judge(vec![side("a", five(100_000.0)), side("b", five(50_000.0))], &paired());
    assert_eq!(record.comparisons[0].conclusion, Conclusion::TooFewRounds);
    // The smallest p value of 8 pairs, 2 x 2^-8, times five comparisons is below 0.05.
    assert!(record.head.verdict.contains("at least 8 rounds of each"), "{}", record.head.verdict);
}

/// Three rounds of 4,600 and 4,310 IOPS: the verdict does not present -6.3 % as a finding.
#[test]
fn a_change_that_so_few_rounds_cannot_show_is_not_printed_as_a_finding() {
    let sides = vec![side("a", rounds(3, 4600.0, 0.001, 1, 0.0)), side("b", rounds(3, 4310.0, 0.001, 2, 0.0))];
    let record = judge(sides, &paired());
    let change = record.comparisons[0].change;
    assert!((change.estimate + 0.063).abs() < 0.003 && change.confidence == 0.75, "{change:?}");
    let verdict = &record.head.verdict;
    assert!(verdict.ends_with("measure at least 8 rounds of each.") && !verdict.contains('%'), "{verdict}");
    let alone =
        judge(vec![side("a", rounds(1, 4600.0, 0.0, 1, 0.0)), side("b", rounds(1, 4310.0, 0.0, 2, 0.0))], &paired());
    assert!(alone.head.verdict.starts_with("1 round of each cannot show"), "{}", alone.head.verdict);
}

#[test]
fn conditions_need_the_certainty_that_was_asked_for() {
    let judge_with = |text: &str, certainty, ours: f64| {
        let condition = FailIf { certainty, ..text.parse().unwrap() };
        let options = JudgeOptions { fail_if: vec![condition], ..paired() };
        let sides = vec![side("a", rounds(10, 100_000.0, 0.02, 1, 0.0)), side("b", rounds(10, ours, 0.02, 2, 0.0))];
        judge(sides, &options)
    };
    let fails = |text: &str, certainty, ours| !judge_with(text, certainty, ours).failed.is_empty();
    assert!(fails("slower-than 5%", Certainty::Shown, 85_000.0));
    assert!(fails("p99 worse-than 5%", Certainty::Shown, 85_000.0));
    assert!(!fails("slower-than 5%", Certainty::Shown, 110_000.0));
    // 6 % slower within about 2 %: the estimate is beyond 5 %, the whole interval is not.
    assert!(!fails("slower-than 5%", Certainty::Shown, 94_000.0));
    assert!(fails("slower-than 5%", Certainty::Estimate, 94_000.0));
    // 4 % slower: the interval includes 5 %.
    assert!(!fails("slower-than 5%", Certainty::Estimate, 96_000.0));
    assert!(fails("slower-than 5%", Certainty::Possible, 96_000.0));
    assert!(!fails("slower-than 5%", Certainty::Possible, 110_000.0));
    let record = judge_with("slower-than 5%", Certainty::Shown, 80_000.0);
    assert!(
        record.head.verdict.starts_with("FAILED: b, main: IOPS is worse than the condition allows"),
        "{}",
        record.head.verdict
    );
}

#[test]
fn a_condition_that_cannot_be_judged_is_reported() {
    let judged = |count: usize, condition: FailIf, metrics: &[Metric]| {
        let sides =
            vec![side("a", rounds(count, 100_000.0, 0.02, 1, 0.0)), side("b", rounds(count, 50_000.0, 0.02, 2, 0.0))];
        let options = JudgeOptions { fail_if: vec![condition], metrics: metrics.to_vec(), ..JudgeOptions::default() };
        judge(sides, &options)
    };
    let slower: FailIf = "slower-than 5%".parse().unwrap();
    let few = judged(3, slower.clone(), &[]);
    assert!(few.failed.is_empty() && few.undecided);
    let [reported] = &few.unjudged[..] else { panic!("{:?}", few.unjudged) };
    assert!(
        reported.starts_with("the condition 'iops worse-than 5%' could not be judged: 3 and 3 rounds cannot"),
        "{reported}"
    );
    assert!(reported.contains("with 5 comparisons; measure at least 5 rounds of each"), "{reported}");
    // The recommended number of rounds is enough; so are fewer figures, or less certainty.
    let enough = judged(5, slower.clone(), &[]);
    assert!(enough.unjudged.is_empty() && enough.failed.len() == 1 && !enough.undecided, "{:?}", enough.unjudged);
    assert!(judged(4, slower.clone(), &[Metric::Iops]).unjudged.is_empty());
    let estimate = judged(3, FailIf { certainty: Certainty::Estimate, ..slower.clone() }, &[]);
    assert!(estimate.unjudged.is_empty() && estimate.failed.len() == 1);
    // A figure that was not compared.
    let absent = judged(6, slower, &[Metric::P99]);
    assert!(
        absent.undecided && absent.failed.is_empty() && absent.unjudged[0].contains("IOPS was not compared"),
        "{:?}",
        absent.unjudged
    );
    // Three rounds of each cell are too few, but twelve cells together decide the condition.
    let sides = vec![of_cells(12, 3, 10_000.0, 1), of_cells(12, 3, 10_000.0, 100)];
    let together =
        judge(sides, &JudgeOptions { fail_if: vec!["slower-than 5%".parse().unwrap()], ..JudgeOptions::default() });
    assert!(
        together.unjudged[0].contains("only over all measurements together") && !together.undecided,
        "{:?}",
        together.unjudged
    );
    // MB/s is left out if it repeats the IOPS, but not if a condition names it.
    let megabytes = judged(6, "mb worse-than 5%".parse().unwrap(), &[]);
    assert!(megabytes.unjudged.is_empty() && megabytes.failed.len() == 1, "{:?}", megabytes.unjudged);
}

#[test]
fn different_circumstances_are_reported() {
    let base = side("a", rounds(6, 1e5, 0.01, 1, 0.0));
    let mut other = side("b", rounds(6, 1e5, 0.01, 2, 0.0));
    other.circumstances.machine = "8 x CPU".into();
    other.circumstances.cache = "cached".into();
    other.circumstances.partial = true;
    other.groups[0].cell.load = "8K random read, 1 x 32".into();
    let record = judge(vec![base, other], &JudgeOptions::default());
    let kinds: Vec<&str> = record
        .head
        .warnings
        .iter()
        .filter_map(|warning| match warning {
            Warning::NotAlike { what, .. } => Some(what.as_str()),
            Warning::Partial { .. } => Some("partial"),
            _ => None,
        })
        .collect();
    assert_eq!(kinds, ["workload", "machine", "cache mode", "partial"]);
}

#[test]
fn many_cells_are_judged_together_too() {
    let cells = |iops: f64, seed| {
        let mut made = side("x", Vec::new());
        made.groups = (1..=12_u32)
            .map(|depth| {
                let rounds = rounds(3, iops * f64::from(depth), 0.02, seed + u64::from(depth), 0.0);
                Group::new(&format!("queue-depth {depth}"), &format!("1 x {depth}"), rounds)
            })
            .collect();
        made
    };
    let mut ours = cells(9_300.0, 100);
    ours.groups.pop();
    let record = judge(vec![cells(10_000.0, 1), ours], &JudgeOptions::default());
    // Three rounds show nothing for one cell, but eleven cells together do.
    assert_eq!(record.comparisons[0].conclusion, Conclusion::TooFewRounds);
    assert_eq!((record.overall[0].metric, record.overall[0].conclusion), (Metric::Iops, Conclusion::Worse));
    assert!(record.head.verdict.contains("is slower than x overall"), "{}", record.head.verdict);
    assert!(
        record
            .head
            .warnings
            .iter()
            .any(|warning| matches!(warning, Warning::LeftOut { what, .. } if what.contains("queue-depth 12")))
    );
}

/// A side of `groups` cells with `rounds_each` rounds.
fn of_cells(groups: u32, rounds_each: usize, iops: f64, seed: u64) -> Side {
    let mut made = side("x", Vec::new());
    made.groups = (1..=groups)
        .map(|depth| {
            let rounds = rounds(rounds_each, iops * f64::from(depth), 0.01, seed + u64::from(depth), 0.0);
            Group::new(&format!("queue-depth {depth}"), &format!("1 x {depth}"), rounds)
        })
        .collect();
    made
}

/// Five figures over seven cells: Holm's correction needs p below 0.01, but the smallest p value of
/// seven pairs is 0.0156.
#[test]
fn cells_are_judged_together_only_if_that_can_be_significant() {
    let judged = |cells, metrics: &[Metric]| {
        let sides = vec![of_cells(cells, 5, 10_000.0, 1), of_cells(cells, 5, 5_000.0, 100)];
        judge(sides, &JudgeOptions { metrics: metrics.to_vec(), ..JudgeOptions::default() })
    };
    for cells in [6, 7] {
        let record = judged(cells, &[]);
        assert!(record.overall.is_empty(), "{cells} cells: {:?}", record.overall);
        assert!(!record.head.verdict.contains(&format!("{cells} and {cells} rounds")), "{}", record.head.verdict);
    }
    let record = judged(8, &[]);
    assert!(record.overall.len() == 5 && record.overall[0].conclusion == Conclusion::Worse, "{:?}", record.overall);
    // One figure needs six cells, two figures need seven.
    for (cells, metrics) in [(6, &[Metric::Iops][..]), (7, &[Metric::Iops, Metric::P99])] {
        let record = judged(cells, metrics);
        assert!(record.overall.iter().all(|one| one.conclusion == Conclusion::Worse), "{:?}", record.overall);
        assert_eq!(record.overall.len(), metrics.len());
        assert!(judged(cells - 1, metrics).overall.is_empty());
    }
}

fn run(iops: u64, seconds: u64, seed: u64) -> Run {
    let mut noise = Noise::with_seed(seed);
    let series: Vec<SeriesPoint> = (0..seconds + 2)
        .map(|second| {
            let ios = (iops as f64 * (0.01 * noise.normal()).exp()) as u64;
            SeriesPoint {
                start_ns: second * 1_000_000_000,
                read_ios: ios,
                read_bytes: ios * 4096,
                mean_ns: 32e9 / ios as f64,
                p50_ns: 30_000_000_000 / ios,
                p99_ns: 90_000_000_000 / ios,
                ..SeriesPoint::default()
            }
        })
        .collect();
    let ios: u64 = series[1..=seconds as usize].iter().map(|point| point.read_ios).sum();
    let mean = 32_000_000_000 / iops;
    let reads = DirectionRecord {
        ios,
        bytes: ios * 4096,
        service: LatencyRecord {
            count: ios,
            sum_ns: (ios * mean) as f64,
            sum_of_squares: 0.0,
            min_ns: mean,
            max_ns: mean,
            buckets: vec![(mean, ios)],
        },
        ..DirectionRecord::default()
    };
    let phase = PhaseRecord {
        name: "main".into(),
        window_ns: seconds * 1_000_000_000,
        window_start_ns: 1_000_000_000,
        threads: vec![ThreadRecord {
            thread: 0,
            load: 0,
            target: 0,
            queue_depth: 32,
            reads,
            writes: DirectionRecord::default(),
            flushes: DirectionRecord::default(),
            overdue: 0,
            iops_std_dev: None,
        }],
        series,
        interval_ns: 1_000_000_000,
        cpu: CpuRecord { process_user_ns: ios * 1000, ..CpuRecord::default() },
        members: Vec::new(),
        steady: None,
    };
    Run {
        head: Head { machine: Machine::default(), end: End::Complete, ..Head::begin(RUN_SCHEMA) },
        job: Job::simple("j", Load::default(), Span::from_secs(1), Span::from_secs(seconds)),
        engine: None,
        targets: vec![diskwright_load::OpenTarget::record(&open_target(
            "null:",
            "null",
            Arc::new(NullDevice::new(1 << 30)),
            CacheMode::Direct,
        ))],
        phases: vec![phase],
        labels: Vec::new(),
        fleet: None,
    }
}

fn changed(change: impl FnOnce(&mut Run)) -> Run {
    let mut run = run(1000, 5, 1);
    change(&mut run);
    run
}

#[test]
fn saved_runs_are_read_joined_and_refused() {
    let dir = tempfile::tempdir().unwrap();
    let save = |name: &str, run: &Run| {
        let path = dir.path().join(name);
        Output::check(&path, Kind::Result).unwrap().save(run).unwrap();
        path
    };
    let a = save("a.json", &run(100_000, 30, 1));
    let b = save("b.json", &run(95_000, 30, 2));
    let single = judge(
        vec![read_side("", std::slice::from_ref(&a)).unwrap(), read_side("", std::slice::from_ref(&b)).unwrap()],
        &JudgeOptions::default(),
    );
    // A single run on each side is cut into stretches, with a warning. Stretches have no CPU time.
    assert!(single.head.warnings.contains(&Warning::WithinRun));
    assert_eq!(single.comparisons[0].conclusion, Conclusion::Worse);
    assert!(single.comparisons[0].rounds.0 >= 5, "{:?}", single.comparisons[0].rounds);
    assert!(single.comparisons.iter().all(|comparison| comparison.metric != Metric::CpuPerIo));
    // Several files of a side are rounds.
    let joined = read_side("old", &[a.clone(), b.clone(), a.clone()]).unwrap();
    assert_eq!(
        (joined.name.as_str(), joined.groups[0].cell.rounds.len(), joined.groups[0].stretches.len()),
        ("old", 3, 0)
    );
    let refused = |path: std::path::PathBuf| read_side("", &[path]).unwrap_err().to_string();
    let newer = save("newer.json", &changed(|run| run.head.schema = "diskwright.lab.run/3".into()));
    assert!(refused(newer).contains("written by a newer Diskwright: its schema is diskwright.lab.run/3"));
    let failed = End::Failed { first: "the read at offset 0 failed".into(), errors: 7 };
    let failed = save("failed.json", &changed(|run| run.head.end = failed));
    assert!(refused(failed).contains("is a failed run (7 requests"));
    let other = save("other.json", &changed(|run| run.head.schema = "something.else/1".into()));
    assert!(refused(other).contains("not a result of the lab"));
    let text = dir.path().join("text.json");
    std::fs::write(&text, "hello").unwrap();
    assert!(refused(text.clone()).contains("is not JSON"));
    std::fs::write(&text, "{\"schema\": \"diskwright.lab.run/2\"}").unwrap();
    assert!(refused(text).contains("it is damaged"));
    assert!(refused(dir.path().join("missing.json")).contains("missing.json"));
    let deeper = Run {
        job: Job::simple("j", Load { queue_depth: 64, ..Load::default() }, Span::from_secs(1), Span::from_secs(5)),
        ..run(1000, 5, 1)
    };
    let deeper = save("deeper.json", &deeper);
    assert!(read_side("", &[a, deeper]).unwrap_err().to_string().contains("another workload"));
}

#[test]
fn a_live_comparison_takes_turns_and_keeps_whole_rounds() {
    let names = ["a".to_owned(), "b".to_owned()];
    let job = Job::simple("j", Load::default(), Span::default(), Span::from_secs(1));
    let mut order = Vec::new();
    let mut measure = |index: usize, job: &Job, _: &dyn Watch| {
        order.push((job.seed, index));
        Ok(run(if index == 0 { 100_000 } else { 80_000 }, 5, job.seed * 2 + index as u64))
    };
    let sides =
        live(&names, &job, &LiveOptions { rounds: 8, smallest_bytes: 1 << 30 }, &mut measure, &mut Silent).unwrap();
    assert!(sides.iter().all(|side| side.groups[0].cell.rounds.len() == 8));
    // Every round has both targets, and neither is always first.
    let firsts: Vec<usize> = order.chunks(2).map(|pair| pair[0].1).collect();
    assert!(order.chunks(2).all(|pair| pair[0].0 == pair[1].0 && pair[0].1 != pair[1].1));
    assert_eq!(firsts.iter().sum::<usize>(), 4);
    assert_eq!(judge(sides, &paired()).comparisons[0].conclusion, Conclusion::Worse);
    // A sequential stream begins at another offset in each round, within the smallest target.
    let stream = Load { random_percent: 0.0, ..Load::default() };
    let stream = Job::simple("s", stream, Span::default(), Span::from_secs(1));
    let mut starts = Vec::new();
    let mut measure = |_: usize, job: &Job, _: &dyn Watch| {
        starts.push(job.phases[0].loads[0].stream_start.0);
        Ok(run(1000, 5, 1))
    };
    live(&names, &stream, &LiveOptions { rounds: 2, smallest_bytes: 1 << 20 }, &mut measure, &mut Silent).unwrap();
    assert!(starts[0] == starts[1] && starts[0] != starts[2] && starts.iter().all(|start| *start < 1 << 20));
    // Stopped in the fourth round: three are whole.
    let mut steps = 0;
    let mut patience = |_: Step<'_>| {
        steps += 1;
        steps <= 7
    };
    let mut measure = |_: usize, _: &Job, _: &dyn Watch| Ok(run(1000, 5, 1));
    let sides =
        live(&names, &job, &LiveOptions { rounds: 8, smallest_bytes: 1 << 30 }, &mut measure, &mut patience).unwrap();
    assert!(sides.iter().all(|side| side.groups[0].cell.rounds.len() == 3 && side.circumstances.partial));
    let mut failing = |_: usize, _: &Job, _: &dyn Watch| {
        Ok(changed(|run| run.head.end = End::Failed { first: "offset 4096".into(), errors: 2 }))
    };
    let error =
        live(&names, &job, &LiveOptions { rounds: 2, smallest_bytes: 1 << 30 }, &mut failing, &mut Silent).unwrap_err();
    assert!(error.to_string().contains("2 requests failed; the first: offset 4096"), "{error}");
}
