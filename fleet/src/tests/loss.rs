//! Agents and controllers that die.

use super::{agent, fleet, go_on, job, options};
use crate::{
    controller::{FleetLook, FleetOptions, OnLoss},
    identity::Identity,
};
use diskwright_load::{record::End, warning::Warning};
use std::{
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

#[test]
fn a_lost_agent_ends_the_figures_of_all_at_the_same_time() {
    for on_loss in [OnLoss::GoOn, OnLoss::Stop] {
        let own = Identity::temporary().unwrap();
        let agents: Vec<_> = (0..3).map(|_| agent(&[own.fingerprint])).collect();
        let job = job(0, 6000);
        let options = FleetOptions { lost_after: Duration::from_millis(500), on_loss, ..options(&own) };
        let mut fleet = fleet("r", &agents, options, &job).unwrap();
        let begun = Instant::now();
        let is_killed = AtomicBool::new(false);
        let victim = Mutex::new(Some(agents[1].agent.clone()));
        let watch = |look: &FleetLook<'_>| {
            let all_measure = look.agents.iter().all(|agent| agent.snapshot.is_some());
            if begun.elapsed() > Duration::from_millis(1500) && all_measure && !is_killed.swap(true, Ordering::Relaxed)
            {
                victim.lock().unwrap().take().unwrap().end();
            }
            true
        };
        let run = fleet.measure(3, &|_| job.clone(), &watch).unwrap();
        fleet.finish();
        let of_fleet = run.fleet.as_ref().unwrap();
        let End::Failed { first, .. } = &run.head.end else { panic!("{:?}", run.head.end) };
        assert!(first.contains("a1 was lost"), "{first}");
        assert_eq!(of_fleet.lost[0].agent, 1);
        assert!(
            matches!(&run.head.warnings[0], Warning::AgentLost { agent, .. } if agent == "a1"),
            "{:?}",
            run.head.warnings
        );
        let (phase, times) = (&run.phases[0], &of_fleet.phases[0]);
        // Three threads, each with what it did until the loss.
        assert_eq!(phase.threads.len(), 3);
        assert!(phase.window_ns > 0 && phase.window_ns < 5_000_000_000, "{}", phase.window_ns);
        assert_eq!(times.until_ns - times.from_ns, phase.window_ns as i64);
        assert!(phase.threads.iter().all(|thread| thread.reads.ios > 0), "also the lost one");
        let lost = &times.agents[1];
        let sent_until_ns = lost.series.last().map_or(0, |point| point.start_ns + point.len_ns);
        assert!(lost.start_ns == Some(0) && sent_until_ns as i64 >= times.until_ns, "{sent_until_ns}");
        assert!(times.agents[0].start_ns.is_some_and(|ns| ns.unsigned_abs() < 1_000_000_000), "{times:?}");
        let after = phase.series.iter().filter(|point| point.start_ns > times.until_ns as u64 + 200_000_000).count();
        match on_loss {
            OnLoss::GoOn => assert!(after > 10, "the others went on: {after}"),
            OnLoss::Stop => assert!(begun.elapsed() < Duration::from_secs(6), "the others were stopped"),
        }
    }
}

#[test]
fn a_controller_that_died_goes_on_and_nothing_is_measured_twice() {
    let own = Identity::temporary().unwrap();
    let agents: Vec<_> = (0..2).map(|_| agent(&[own.fingerprint])).collect();
    let job = job(0, 1500);
    let before = {
        let mut first = fleet("same", &agents, options(&own), &job).unwrap();
        let run = first.measure(2, &|_| job.clone(), &go_on).unwrap();
        // It dies before it has saved anything: the connections break.
        run
    };
    let mut second = fleet("same", &agents, options(&own), &job).unwrap();
    let after = second.measure(2, &|_| job.clone(), &go_on).unwrap();
    assert_eq!(after.phases[0].threads, before.phases[0].threads, "the same requests");
    assert_eq!(after.head.end, End::Complete);
    second.kept();
    second.finish();
}

#[test]
fn later_phases_are_those_of_the_agents_that_are_left() {
    let own = Identity::temporary().unwrap();
    let agents: Vec<_> = (0..2).map(|_| agent(&[own.fingerprint])).collect();
    let mut two = job(0, 2000);
    two.phases.push(two.phases[0].clone());
    two.phases[1].name = "second".into();
    let options = FleetOptions { lost_after: Duration::from_millis(500), on_loss: OnLoss::GoOn, ..options(&own) };
    let mut fleet = fleet("r", &agents, options, &two).unwrap();
    let victim = Mutex::new(Some(agents[0].agent.clone()));
    let watch = |look: &FleetLook<'_>| {
        if look.sum.elapsed_ns > 700_000_000
            && let Some(agent) = victim.lock().unwrap().take()
        {
            agent.end();
        }
        true
    };
    let run = fleet.measure(2, &|_| two.clone(), &watch).unwrap();
    fleet.finish();
    assert_eq!((run.phases.len(), run.fleet.as_ref().unwrap().lost.len()), (2, 1));
    assert!(run.phases[0].window_ns < 2_000_000_000);
    assert_eq!((run.phases[1].window_ns, run.phases[1].threads.len()), (2_000_000_000, 1));
    assert_eq!(run.phases[1].threads[0].target, 1, "the agent that is left");
}

#[test]
fn a_stop_of_the_user_keeps_what_all_have_measured() {
    let own = Identity::temporary().unwrap();
    let agents: Vec<_> = (0..2).map(|_| agent(&[own.fingerprint])).collect();
    let job = job(0, 20_000);
    let mut fleet = fleet("r", &agents, options(&own), &job).unwrap();
    let begun = Instant::now();
    let watch = |_: &FleetLook<'_>| begun.elapsed() < Duration::from_secs(2);
    let run = fleet.measure(2, &|_| job.clone(), &watch).unwrap();
    fleet.finish();
    assert_eq!(run.head.end, End::Stopped, "{:?}", run.head.warnings);
    assert!(run.phases[0].window_ns > 500_000_000 && run.phases[0].total().both.ios > 0);
    assert!(begun.elapsed() < Duration::from_secs(6));
}
