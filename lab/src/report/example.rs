//! Example results for tests: saved files, and results of simulated devices.

use crate::{
    acceptance::AcceptanceRecord,
    cells::Cell,
    comparison::ComparisonRecord,
    document::Document,
    study::{containers::ContainersResult, tiers::TiersResult, zero_payload::ZeroPayloadResult},
    sweep::{self, Axis, Coordinate, KneeRow, Knob, SWEEP_SCHEMA, SweepCell, SweepOptions, SweepRecord},
};
use diskwright_load::{
    figures::Figures,
    job::Span,
    record::{AgentPhaseRecord, AgentRecord, End, Head, LatencyRecord, Loss, Run, ThreadRecord},
};
use diskwright_stats::knee::{self, LoadRounds};

/// Results of every kind, of some kinds several.
pub fn all() -> Vec<(&'static str, Document)> {
    vec![
        ("run.json", Document::Run(Box::new(run()))),
        ("again.json", Document::Run(Box::new(run()))),
        ("depth.json", Document::Sweep(Box::new(sweep()))),
        ("depths and threads.json", Document::Sweep(Box::new(sweep_of_two()))),
        ("containers.json", Document::Containers(Box::new(containers()))),
        ("paths.json", Document::AccessPaths(Box::new(crate::study::access_paths::example::result()))),
        (
            "native-and-guest.json",
            Document::NativeAndGuest(Box::new(crate::study::native_and_guest::example::result())),
        ),
        ("acceptance.json", Document::Acceptance(Box::new(acceptance()))),
        ("queue-depth.json", Document::QueueDepth(Box::new(crate::study::queue_depth::tests::result()))),
        ("raw-and-file.json", Document::RawAndFile(Box::new(crate::study::raw_and_file::tests::result()))),
        ("zero-payload.json", Document::ZeroPayload(Box::new(zero_payload()))),
        ("tiers.json", Document::Tiers(Box::new(tiers()))),
        ("compare.json", Document::Comparison(Box::new(comparison()))),
        ("fleet.json", Document::Run(Box::new(fleet()))),
        ("fleet-with-loss.json", Document::Run(Box::new(fleet_with_loss()))),
    ]
}

/// Two phases on two targets: one at full speed, one with a schedule.
pub fn run() -> Run {
    serde_json::from_str(include_str!("../../tests/results/run.json")).expect("an example of a run")
}

/// A small study of containers.
pub fn containers() -> ContainersResult {
    serde_json::from_str(include_str!("../../tests/results/containers.json")).expect("an example of a study")
}

/// Two rows about disks.
pub fn acceptance() -> AcceptanceRecord {
    serde_json::from_str(include_str!("../../tests/results/acceptance.json")).expect("an example of an acceptance run")
}

/// A small study of zeros.
pub fn zero_payload() -> ZeroPayloadResult {
    serde_json::from_str(include_str!("../../tests/results/zero-payload.json")).expect("an example of a study")
}

/// A run of two agents.
pub fn fleet() -> Run {
    serde_json::from_str(include_str!("../../tests/results/fleet.json")).expect("an example of a fleet")
}

/// A run of two agents, of which the second was lost in the middle.
pub fn fleet_with_loss() -> Run {
    let mut run = fleet();
    let phase = &mut run.phases[0];
    let since_ns = phase.window_ns / 2;
    let why = "connection refused".to_owned();
    run.head.end = End::Failed { first: format!("two was lost: {why}"), errors: 1 };
    let fleet = run.fleet.as_mut().expect("a fleet");
    let times = &mut fleet.phases[0];
    times.until_ns = since_ns as i64;
    times.agents[0].start_ns = Some(times.agents[0].window_start_ns);
    let mut series = std::mem::take(&mut times.agents[1].series);
    series.retain(|point| point.start_ns < since_ns);
    times.agents[1] = AgentPhaseRecord { start_ns: Some(0), series, ..AgentPhaseRecord::default() };
    phase.window_ns = since_ns;
    fleet.lost.push(Loss { agent: 1, phase: phase.name.clone(), since_ns, why });
    run
}

/// A run of this number of agents on four machines, each faster than the one before.
pub fn fleet_of(agents: u32) -> Run {
    let mut run = fleet();
    let fleet = run.fleet.as_mut().expect("a fleet");
    let (agent, target) = (fleet.agents[0].clone(), run.targets[0].clone());
    let (part, thread) = (fleet.phases[0].agents[0].clone(), run.phases[0].threads[0].clone());
    fleet.agents = (0..agents)
        .map(|number| AgentRecord {
            name: format!("a{number}"),
            boot_id: format!("machine {}", number % 4),
            targets: vec![number],
            ..agent.clone()
        })
        .collect();
    fleet.phases[0].agents = (0..agents)
        .map(|number| {
            let mut part = part.clone();
            let speed = 1.0 + f64::from(number) / 10.0;
            part.series.iter_mut().for_each(|point| point.read_ios = (point.read_ios as f64 * speed) as u64);
            part
        })
        .collect();
    run.targets = vec![target; agents as usize];
    run.phases[0].threads = (0..agents)
        .map(|number| {
            let mut thread = ThreadRecord { thread: number, target: number, ..thread.clone() };
            thread.reads.ios += u64::from(number);
            thread
        })
        .collect();
    run
}

/// A small study of tiers.
pub fn tiers() -> TiersResult {
    serde_json::from_str(include_str!("../../tests/results/tiers.json")).expect("an example of a study")
}

/// Two queue depths compared in interleaved rounds.
pub fn comparison() -> ComparisonRecord {
    serde_json::from_str(include_str!("../../tests/results/compare.json")).expect("an example of a comparison")
}

/// A sweep on a device that serves eight requests at once, in 100 us each.
pub fn sweep() -> SweepRecord {
    sweep_over(vec![Axis { knob: Knob::QueueDepth, values: vec![1, 2, 4, 8, 16, 32, 64] }])
}

/// A sweep with one to four threads, of which the last cell is not measured.
pub fn sweep_of_two() -> SweepRecord {
    let mut sweep = sweep_over(vec![
        Axis { knob: Knob::Threads, values: vec![1, 2, 4] },
        Axis { knob: Knob::QueueDepth, values: vec![1, 2, 4, 8, 16] },
    ]);
    sweep.cells.last_mut().expect("a cell").measured.rounds.clear();
    sweep.head.end = End::Stopped;
    sweep
}

fn sweep_over(axes: Vec<Axis>) -> SweepRecord {
    let run = run();
    let mut points: Vec<Vec<Coordinate>> = vec![vec![]];
    for axis in &axes {
        let longer = |point: &Vec<Coordinate>| {
            let point = point.clone();
            axis.values
                .iter()
                .map(move |value| [point.clone(), vec![Coordinate { knob: axis.knob, value: *value }]].concat())
        };
        points = points.iter().flat_map(longer).collect();
    }
    let cells: Vec<SweepCell> = points.into_iter().map(cell).collect();
    let line = axes.last().map_or(1, |axis| axis.values.len());
    let knees = (0..cells.len() / line)
        .map(|row| {
            let numbers: Vec<usize> = (row * line..(row + 1) * line).collect();
            let rounds: Vec<LoadRounds> = numbers
                .iter()
                .map(|index| LoadRounds {
                    load: cells[*index].measured.in_flight as f64,
                    rounds: cells[*index].samples(),
                })
                .collect();
            let first = &cells[numbers[0]].point;
            KneeRow { fixed: first[..first.len() - 1].to_vec(), knee: knee::knee(&rounds, Some(1e6)), cells: numbers }
        })
        .collect();
    SweepRecord {
        head: Head {
            schema: SWEEP_SCHEMA.into(),
            verdict: "8 in flight are enough: 80,000 IOPS at 100 us.".into(),
            started_utc: run.head.started_utc,
            took_ns: 90_000_000_000,
            machine: run.head.machine,
            place: None,
            versions: run.head.versions,
            warnings: vec![],
            end: End::Complete,
        },
        targets: run.targets,
        options: SweepOptions {
            job: run.job,
            targets: vec!["golden.vhdx".into()],
            axes,
            rounds: 3,
            total_depth: None,
            max_p99: Some(Span::from_millis(1)),
            array: None,
        },
        cells,
        knees,
        best: None,
        labels: vec![],
    }
}

fn cell(point: Vec<Coordinate>) -> SweepCell {
    let value = |knob| point.iter().find(|at| at.knob == knob).map_or(1, |at| at.value);
    let (threads, depth) = (value(Knob::Threads), value(Knob::QueueDepth));
    let total = threads * depth;
    let round = |number: u64| {
        let noise = 1.0 + (number as f64 - 1.0) * 0.004;
        let iops = total.min(8) as f64 * 10_000.0 * noise;
        let mean_ns = total as f64 / iops * 1e9;
        Figures {
            window_ns: 1_000_000_000,
            reads: iops as u64,
            iops,
            mb_per_s: iops * 4096.0 / 1e6,
            mean_ns,
            p50_ns: mean_ns * 0.95,
            p99_ns: mean_ns * 1.8,
            p999_ns: mean_ns * 2.5,
            max_ns: mean_ns * 4.0,
            cpu_ns_per_io: 3000.0 / noise,
            machine_cpu_ns_per_io: 3500.0,
            queue_depth: total,
            depth_reached: total as f64,
            ..Figures::default()
        }
    };
    SweepCell {
        threads: threads as u32,
        queue_depth: depth as u32,
        files: 1,
        measured: Cell::new("", &sweep::title(&point), "golden.vhdx", total).with_rounds((0..3).map(round).collect()),
        latency: LatencyRecord::default(),
        point,
    }
}
