//! Hostile peers without a network, for fuzzing.
//!
//! The bytes are messages as they come after decryption: what a peer can send that has a pinned
//! fingerprint, and lies.

use crate::{
    agent::{self, desk::Desk},
    controller::{AGENTS_MAX, gathering::Gathering},
    identity::Fingerprint,
    merge::{self, Facts, Parts, PhaseOfAll},
    message::{Allowed, Answer, Arm, Ask, At, Hello, Measured, SCHEMA, Stage, State, Task},
    wire::{self, ANSWER_BYTES_MAX, ASK_BYTES_MAX},
};
use diskwright_load::{
    Job,
    figures::Figures,
    job::{Caching, Load, Span},
    machine::{Machine, Versions},
    record::{
        CpuRecord, DirectionRecord, End, Head, IntervalRecord, LatencyRecord, PhaseRecord, RUN_SCHEMA, SUM_MAX,
        SideRecord, TargetRecord, ThreadRecord, check_phase, check_run,
    },
};
use std::time::Duration;

const S: u64 = 1_000_000_000;

fn job() -> Job {
    Job::simple("x", Load::default(), Span::default(), Span::from_secs(3))
}

fn at() -> At {
    At { run: "r".into(), cell: 1, phase: 0 }
}

fn bytes_of(messages: &[impl serde::Serialize]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for message in messages {
        // Writing to memory does not fail.
        let _ = wire::write(&mut bytes, message);
    }
    bytes
}

/// The messages of a controller that does everything right.
pub fn messages_of_controller() -> Vec<u8> {
    let hello = Hello { schema: SCHEMA.into(), version: "1".into(), token: None, instance: String::new() };
    let task = Task { run: "r".into(), targets: vec!["data".into()], job: job(), fill: false };
    bytes_of(&[
        Ask::Hello(hello),
        Ask::Clock { sent_ns: 7 },
        Ask::Prepare(Box::new(task)),
        Ask::Look { known: 0, interval: 0, wait_ms: 0 },
        Ask::Arm(Box::new(Arm { at: at(), job: job(), keep_going: false })),
        Ask::Start { at: at(), at_ns: u64::MAX },
        Ask::Window { at: at(), start_ns: 5 },
        Ask::Take { at: at() },
        Ask::Forget { run: "r".into() },
        Ask::Stop { run: "r".into() },
        Ask::Finish { run: "r".into() },
    ])
}

/// An agent gets these bytes from a controller.
pub fn hostile_controller(mut bytes: &[u8]) {
    let allowed = Allowed { name: "data".into(), writable: true };
    let desk = Desk::new(vec![allowed], Duration::from_secs(60));
    let peer = Fingerprint::of(b"controller");
    let _ = desk.open_session(peer, "");
    while let Ok(ask) = wire::read::<Ask>(&mut bytes, ASK_BYTES_MAX) {
        let ask = match ask {
            Ask::Look { known, interval, .. } => Ask::Look { known, interval, wait_ms: 0 },
            ask => ask,
        };
        let answer = agent::session::answer(&desk, ask, (peer, 1), &(std::sync::Arc::new(|_| {}) as agent::Events));
        let mut sent = Vec::new();
        assert!(wire::write(&mut sent, &answer).is_ok(), "an answer can be sent");
    }
}

fn latency(ns: u64) -> LatencyRecord {
    let ns_f64 = ns as f64;
    LatencyRecord {
        count: 1,
        sum_ns: ns_f64,
        sum_of_squares: ns_f64 * ns_f64,
        min_ns: ns,
        max_ns: ns,
        buckets: vec![(ns, 1)],
    }
}

fn interval(number: u64) -> IntervalRecord {
    let reads = SideRecord { ios: 1, bytes: 4096, latency: latency(100) };
    IntervalRecord { start_ns: number * S, len_ns: S, reads, writes: SideRecord::default() }
}

fn measured() -> Measured {
    let reads = DirectionRecord { ios: 3, bytes: 12_288, errors: 0, service: latency(100), response: None };
    let thread = ThreadRecord {
        thread: 0,
        load: 0,
        target: 0,
        queue_depth: 1,
        reads,
        writes: DirectionRecord::default(),
        flushes: DirectionRecord::default(),
        overdue: 0,
        iops_std_dev: None,
    };
    let phase = PhaseRecord {
        name: "main".into(),
        window_ns: 3 * S,
        window_start_ns: 0,
        threads: vec![thread],
        series: Vec::new(),
        interval_ns: S,
        cpu: CpuRecord::default(),
        members: Vec::new(),
        steady: None,
    };
    Measured { phase, start_ns: 5 * S, end: End::Complete, run: None }
}

/// The messages of an agent that does everything right, after its welcome.
pub fn messages_of_agent() -> Vec<u8> {
    let state = |number: u64| State {
        number,
        stage: Stage::Running(at()),
        snapshot: None,
        first_interval: number,
        intervals: vec![interval(number)],
    };
    let states = (0..3).map(|number| Answer::State(Box::new(state(number))));
    let all: Vec<Answer> = states.chain([Answer::Measured(Box::new(measured()))]).collect();
    bytes_of(&all)
}

fn facts(name: &str) -> Facts {
    let target = TargetRecord {
        name: "data".into(),
        kind: "null".into(),
        size_bytes: 1 << 30,
        logical_sector_bytes: 512,
        cache: Caching::Direct,
        path: None,
        behind: None,
        place: None,
        contents: None,
    };
    Facts {
        name: name.to_owned(),
        group: "all".into(),
        fingerprint: String::new(),
        machine: Machine::default(),
        boot_id: name.to_owned(),
        versions: Versions::default(),
        targets: vec![target],
        warnings: Vec::new(),
        clock: None,
    }
}

/// A controller gets these bytes from one of two agents; the other one is honest.
pub fn hostile_agent(mut bytes: &[u8]) {
    let mut gathering = Gathering::new(2, Some(0..3 * S));
    (0..3).for_each(|number| assert!(gathering.push(1, interval(number)).is_ok(), "an honest agent"));
    let mut part = None;
    while let Ok(answer) = wire::read::<Answer>(&mut bytes, ANSWER_BYTES_MAX) {
        match answer {
            Answer::State(state) => {
                let pushed = state.intervals.into_iter().try_for_each(|interval| gathering.push(0, interval));
                if pushed.is_err() {
                    break;
                }
            }
            Answer::Measured(measured) => {
                let mut left = SUM_MAX / AGENTS_MAX as u64;
                if check_phase(&measured.phase, 1, &mut left).is_ok() {
                    part = Some(*measured);
                }
                break;
            }
            _ => {}
        }
    }
    gathering.done(1);
    match part {
        Some(_) => gathering.done(0),
        None => {
            gathering.lose(0);
        }
    }
    let (common_ns, sums) = gathering.common();
    let phase = PhaseOfAll {
        start_ns: 5 * S,
        parts: vec![part, Some(measured())],
        series: gathering.series().to_vec(),
        sent: gathering.sent(),
        common_ns,
        sums,
        steady: None,
    };
    let run = merge::merged(Parts {
        run: "r",
        agents: vec![facts("a"), facts("b")],
        jobs: vec![job(), job()],
        phases: vec![phase],
        lost: Vec::new(),
        is_stopped: false,
        head: Head::begin(RUN_SCHEMA),
        labels: &[],
    });
    // What is merged can be read again.
    assert_eq!(check_run(&run), Ok(()));
    let figures = Figures::of(&run.phases[0]);
    assert!(figures.iops >= 0.0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn honest_peers_are_understood() {
        hostile_controller(&messages_of_controller());
        hostile_agent(&messages_of_agent());
        let bytes = messages_of_agent();
        for cut in 0..bytes.len() {
            hostile_agent(&bytes[..cut]);
        }
    }
}
