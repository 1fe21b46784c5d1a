//! Who may give orders, and what is refused.

use super::{agent, agent_with, fleet, job, measure, options, wanted};
use crate::{
    agent::Event,
    controller::Fleet,
    error::FleetError,
    identity::Identity,
    link::{Door, Link},
    message::{Answer, Arm, Ask, At, Hello, SCHEMA, Stage, State},
    trust::{Token, Trust},
    wire::{ANSWER_BYTES_MAX, ASK_BYTES_MAX},
};
use diskwright_load::machine::Versions;
use std::{thread, time::Duration};

fn hello(link: &mut Link, hello: Hello) -> Answer {
    link.set_patience(Duration::from_secs(5)).unwrap();
    link.send(&Ask::Hello(hello)).unwrap();
    link.receive(ANSWER_BYTES_MAX).unwrap()
}

fn usual(token: Option<&str>) -> Hello {
    Hello {
        schema: SCHEMA.into(),
        version: Versions::detect().diskwright,
        token: token.map(str::to_owned),
        instance: String::new(),
    }
}

#[test]
fn a_controller_needs_a_pinned_fingerprint_or_a_token() {
    let (own, thief) = (Identity::temporary().unwrap(), Identity::temporary().unwrap());
    let token = Token::random().unwrap();
    let started = agent_with(Trust::new(Vec::new(), vec![token.clone()]));
    let stranger = Fleet::connect("r", &[wanted("a", &started.address)], options(&own), None).unwrap_err();
    assert!(stranger.to_string().contains("no token was given"), "{stranger}");
    let mut with_token = started.address.clone();
    with_token.token = Some(token);
    Fleet::connect("r", &[wanted("a", &with_token)], options(&own), None).unwrap();
    let stolen = Fleet::connect("r", &[wanted("a", &with_token)], options(&thief), None).unwrap_err().to_string();
    assert!(stolen.contains("was used before") && stolen.contains(&own.fingerprint.to_string()), "{stolen}");
    let refused = |event: &Event| matches!(event, Event::Refused(_));
    assert_eq!(started.events.lock().unwrap().iter().filter(|event| refused(event)).count(), 2);
}

#[test]
fn an_agent_with_another_fingerprint_gets_no_message() {
    let own = Identity::temporary().unwrap();
    let started = agent(&[own.fingerprint]);
    let mut wrong = started.address.clone();
    wrong.fingerprint = own.fingerprint;
    let error = Fleet::connect("r", &[wanted("a", &wrong)], options(&own), None).unwrap_err();
    assert!(matches!(&error, FleetError::Peer { .. }), "{error}");
    assert!(error.to_string().contains(&started.address.fingerprint.to_string()), "{error}");
}

#[test]
fn another_version_and_unknown_fields_are_refused_before_anything_runs() {
    let own = Identity::temporary().unwrap();
    let started = agent(&[own.fingerprint]);
    let dial = || Link::dial(&own, &started.address).unwrap();
    for (other, why) in [
        (Hello { schema: "diskwright.fleet/2".into(), ..usual(None) }, "diskwright.fleet/2"),
        (Hello { version: "9.9.9".into(), ..usual(None) }, "9.9.9"),
    ] {
        let Answer::Refused { why: found } = hello(&mut dial(), other) else { panic!() };
        assert!(found.contains(why), "{found}");
    }
    let mut link = dial();
    assert!(matches!(hello(&mut link, usual(None)), Answer::Welcome(_)));
    link.send(&serde_json::json!({"clock": {"sent_ns": 1, "zone": "UTC"}})).unwrap();
    let Answer::Refused { why } = link.receive(ANSWER_BYTES_MAX).unwrap() else { panic!() };
    assert!(why.contains("zone"), "{why}");
}

#[test]
fn one_controller_at_a_time() {
    let (one, other) = (Identity::temporary().unwrap(), Identity::temporary().unwrap());
    let started = vec![agent(&[one.fingerprint, other.fingerprint])];
    let mut fleet_of_one = fleet("r", &started, options(&one), &job(0, 100)).unwrap();
    let busy = Fleet::connect("s", &[wanted("a", &started[0].address)], options(&other), None).unwrap_err();
    assert!(busy.to_string().contains("one at a time"), "{busy}");
    // Also one of the same user, whose run would end the first one.
    let same = Fleet::connect("s", &[wanted("a", &started[0].address)], options(&one), None).unwrap_err();
    assert!(same.to_string().contains("one at a time"), "{same}");
    measure(&mut fleet_of_one, &job(0, 100)).unwrap();
    fleet_of_one.finish();
    drop(fleet_of_one);
    // The agent notices the end of a connection on its own.
    let free = (0..50).any(|_| {
        thread::sleep(Duration::from_millis(100));
        Fleet::connect("s", &[wanted("a", &started[0].address)], options(&other), None).is_ok()
    });
    assert!(free);
}

#[test]
fn a_mistake_of_one_agent_ends_the_run_before_anything_is_measured() {
    let own = Identity::temporary().unwrap();
    let agents: Vec<_> = (0..3).map(|_| agent(&[own.fingerprint])).collect();
    let mut wanted: Vec<_> = agents.iter().enumerate().map(|(n, one)| wanted(&format!("a{n}"), &one.address)).collect();
    wanted[2].targets = vec!["nothing".into()];
    let mut fleet = Fleet::connect("r", &wanted, options(&own), None).unwrap();
    let error = fleet.prepare(&|_| job(0, 100), false, &|_, _, _, _| true).unwrap_err().to_string();
    assert!(error.contains("a2") && error.contains("there is no target \"nothing\""), "{error}");
    drop(fleet);
    let refused = crate::tests::fleet("s", &agents[..1], options(&own), &{
        let mut job = job(0, 100);
        job.name = "refused".into();
        job
    });
    assert!(refused.unwrap_err().to_string().contains("this job is refused"));
}

#[test]
fn a_job_that_the_agent_does_not_allow_does_not_run() {
    let own = Identity::temporary().unwrap();
    let agents = vec![agent(&[own.fingerprint])];
    let mut fleet = fleet("r", &agents, options(&own), &job(0, 100)).unwrap();
    let mut other = job(0, 100);
    other.name = "not allowed".into();
    let error = measure(&mut fleet, &other).unwrap_err().to_string();
    assert!(error.contains("this job is not allowed"), "{error}");
    fleet.finish();
    assert_eq!(*agents[0].closed.lock().unwrap(), 1);
}

#[test]
fn orders_that_do_not_fit_are_refused() {
    let own = Identity::temporary().unwrap();
    let started = agent(&[own.fingerprint]);
    let mut link = Link::dial(&own, &started.address).unwrap();
    assert!(matches!(hello(&mut link, usual(None)), Answer::Welcome(_)));
    let at = At { run: "r".into(), cell: 0, phase: 0 };
    let arm = Arm { at: at.clone(), job: job(0, 100), keep_going: false };
    for ask in [
        Ask::Hello(usual(None)),
        Ask::Arm(Box::new(arm)),
        Ask::Start { at: at.clone(), at_ns: u64::MAX },
        Ask::Window { at: at.clone(), start_ns: 0 },
        Ask::Take { at },
    ] {
        link.send(&ask).unwrap();
        let answer: Answer = link.receive(ANSWER_BYTES_MAX).unwrap();
        assert!(matches!(answer, Answer::Refused { .. }), "{ask:?}: {answer:?}");
    }
}

#[test]
fn an_agent_that_lies_is_refused() {
    let (own, liar) = (Identity::temporary().unwrap(), Identity::temporary().unwrap());
    let door = Door::open(&liar, &crate::address::Place::Tcp("127.0.0.1".into(), 0)).unwrap();
    let address = crate::address::Address { place: door.place().unwrap(), fingerprint: liar.fingerprint, token: None };
    thread::spawn(move || {
        loop {
            let mut link = door.wait().unwrap().greet().unwrap();
            let asked: Ask = link.receive(ASK_BYTES_MAX).unwrap();
            assert!(matches!(asked, Ask::Hello(_)));
            let state =
                State { number: 0, stage: Stage::Idle, snapshot: None, first_interval: 0, intervals: Vec::new() };
            let _ = link.send(&Answer::State(Box::new(state)));
        }
    });
    let error = Fleet::connect("r", &[wanted("a", &address)], options(&own), None).unwrap_err();
    assert!(matches!(error, FleetError::Protocol { .. }), "{error}");
}
