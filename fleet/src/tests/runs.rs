//! What a fleet measures.

use super::{agent, fleet, go_on, job, measure, options};
use crate::{
    controller::FleetLook,
    identity::Identity,
    merge::{self, Facts, Parts},
};
use diskwright_load::{
    Job,
    job::{Load, Rate, Span},
    machine::{Machine, Versions},
    record::{End, Head, LatencyRecord, RUN_SCHEMA},
    warning::Warning,
};
use std::sync::atomic::{AtomicUsize, Ordering};

#[test]
fn a_fleet_measures_as_one_machine_with_all_threads() {
    let own = Identity::temporary().unwrap();
    let agents: Vec<_> = (0..4).map(|_| agent(&[own.fingerprint])).collect();
    let job = job(200, 1000);
    let mut fleet = fleet("one", &agents, options(&own), &job).unwrap();
    let looks = AtomicUsize::new(0);
    let watch = |look: &FleetLook<'_>| {
        assert_eq!(look.agents.len(), 4);
        looks.fetch_add(1, Ordering::Relaxed);
        true
    };
    let run = fleet.measure(4, &|_| job.clone(), &watch).unwrap();
    fleet.kept();
    fleet.finish();
    assert_eq!(run.head.end, End::Complete, "{:?}", run.head.warnings);
    assert!(looks.into_inner() >= 2);
    assert_eq!((run.job.clone(), run.targets.len(), run.phases.len()), (job, 4, 1), "the job is that of the plan");
    assert_eq!(run.targets[2].name, "a2: data");
    let (phase, of_fleet) = (&run.phases[0], run.fleet.as_ref().unwrap());
    assert_eq!(phase.threads.len(), 4);
    for (number, thread) in phase.threads.iter().enumerate() {
        assert_eq!((thread.thread, thread.target, thread.load), (number as u32, number as u32, 0));
        assert!(thread.reads.ios > 0 && thread.writes.ios > 0);
        assert_eq!(of_fleet.total_of(number, phase).both.ios, thread.reads.ios + thread.writes.ios);
    }
    // Percentiles are those of all requests in one histogram.
    let mut pooled = LatencyRecord::default();
    for thread in &phase.threads {
        pooled.add(&thread.reads.service);
        pooled.add(&thread.writes.service);
    }
    let total = phase.total();
    let merged = total.both.latency();
    assert!(merged.buckets == pooled.buckets && merged.count == pooled.count, "the bins differ");
    assert_eq!((merged.min_ns, merged.max_ns), (pooled.min_ns, pooled.max_ns));
    // The series is the sum, and its window has all requests of the window.
    let in_window: u64 = phase
        .series
        .iter()
        .filter(|point| point.start_ns >= 200_000_000 && point.start_ns + point.len_ns <= 1_200_000_000)
        .map(|point| point.read_ios + point.write_ios)
        .sum();
    assert_eq!(in_window, phase.total().both.ios);
    // All measured at the same time.
    let times = &of_fleet.phases[0];
    assert!(times.skew_ns <= 2 * times.error_ns + 1000, "{times:?}");
    assert_eq!(phase.window_ns, 1_000_000_000);
    assert!(of_fleet.agents.iter().all(|agent| agent.clock.offset_ns.unsigned_abs() <= agent.clock.error_ns));
    assert!(agents.iter().all(|agent| *agent.closed.lock().unwrap() == 1), "targets are closed");
}

#[test]
fn phases_and_cells_follow_each_other_on_open_targets() {
    let own = Identity::temporary().unwrap();
    let agents: Vec<_> = (0..2).map(|_| agent(&[own.fingerprint])).collect();
    let mut two = job(0, 300);
    two.phases.push(two.phases[0].clone());
    two.phases[1].name = "second".into();
    let mut fleet = fleet("cells", &agents, options(&own), &two).unwrap();
    let first = measure(&mut fleet, &two).unwrap();
    assert_eq!((first.head.end.clone(), first.phases.len()), (End::Complete, 2));
    let one = fleet.measure(1, &|_| job(0, 200), &go_on).unwrap();
    assert_eq!((one.phases[0].threads.len(), one.fleet.unwrap().agents.len()), (1, 1), "only the first agent");
    // The same again is measured again: the controller has the record.
    fleet.kept();
    let again = fleet.measure(1, &|_| job(0, 200), &go_on).unwrap();
    assert_ne!(again.phases[0].total().both.ios, one.phases[0].total().both.ios);
    fleet.finish();
    assert_eq!(*agents[0].closed.lock().unwrap(), 1, "targets stayed open");
}

#[test]
fn groups_have_their_own_loads() {
    let own = Identity::temporary().unwrap();
    let agents: Vec<_> = (0..3).map(|_| agent(&[own.fingerprint])).collect();
    let mut fleet = fleet("groups", &agents, options(&own), &job(0, 300)).unwrap();
    let writes = |job: Job| {
        let mut job = job;
        job.phases[0].loads = vec![Load { read_percent: 0.0, ..Load::default() }];
        job
    };
    let run = fleet
        .measure(3, &|remote| if remote.name() == "a1" { writes(job(0, 300)) } else { job(0, 300) }, &go_on)
        .unwrap();
    fleet.finish();
    assert_eq!(run.job.phases[0].loads.len(), 2);
    let loads: Vec<u32> = run.phases[0].threads.iter().map(|thread| thread.load).collect();
    assert_eq!(loads, [0, 1, 0]);
    assert_eq!(run.phases[0].threads[1].reads.ios, 0);
}

#[test]
fn the_window_opens_on_all_when_their_sum_is_steady() {
    let own = Identity::temporary().unwrap();
    let agents: Vec<_> = (0..2).map(|_| agent(&[own.fingerprint])).collect();
    let mut job = job(0, 500);
    job.phases[0].steady_within = Some(Span::from_secs(20));
    // A rate is as steady as can be.
    job.phases[0].loads[0].rate = Some(Rate::Iops { per_thread: 2000.0 });
    let mut fleet = fleet("steady", &agents, options(&own), &job).unwrap();
    let run = measure(&mut fleet, &job).unwrap();
    fleet.finish();
    assert_eq!(run.head.end, End::Complete, "{:?}", run.head.warnings);
    let (phase, times) = (&run.phases[0], &run.fleet.as_ref().unwrap().phases[0]);
    assert!(phase.steady.as_ref().unwrap().reached_ns.is_some(), "{:?}", phase.steady);
    assert!(times.skew_ns <= 2 * times.error_ns + 1000, "{times:?}");
    assert!((phase.iops() - 4000.0).abs() < 1000.0, "{}", phase.iops());
}

#[test]
fn a_depth_that_several_agents_have_not_reached_is_told_once_with_the_lowest() {
    let depth = |load: &str, reached| Warning::DepthNotReached { load: load.into(), reached, asked: 8.0 };
    let facts = |name: &str, warnings| Facts {
        name: name.into(),
        group: "all".into(),
        fingerprint: String::new(),
        machine: Machine::default(),
        boot_id: name.into(),
        versions: Versions::default(),
        targets: Vec::new(),
        warnings,
        clock: None,
    };
    let run = merge::merged(Parts {
        run: "r",
        agents: vec![
            facts("a", vec![depth("x", 4.0)]),
            facts("b", vec![depth("x", 3.0), depth("y", 2.0)]),
            facts("c", vec![depth("x", 5.0)]),
        ],
        jobs: vec![job(0, 100); 3],
        phases: Vec::new(),
        lost: Vec::new(),
        is_stopped: false,
        head: Head::begin(RUN_SCHEMA),
        labels: &[],
    });
    let of = |agents: &[&str], warning| Warning::OfAgents {
        agents: agents.iter().map(|agent| (*agent).to_owned()).collect(),
        warning: Box::new(warning),
    };
    let told: Vec<&Warning> =
        run.head.warnings.iter().filter(|warning| matches!(warning, Warning::OfAgents { .. })).collect();
    assert_eq!(told, [&of(&["a", "b", "c"], depth("x", 3.0)), &of(&["b"], depth("y", 2.0))]);
}
