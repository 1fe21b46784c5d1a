//! The study on simulated devices of known saturation.

use super::{findings::papers, *};
use crate::{
    fleet::Agents,
    progress::{Silent, Step},
    report::example,
    study::StudyOptions,
    sweep::ArrayOptions,
    sweep::tests::{simulated_by, target},
};
use diskwright_fleet::{
    FleetError,
    controller::{FleetOptions, OnLoss, Wanted, Way},
    identity::Identity,
};
use diskwright_load::{
    Job, Run,
    job::{Caching, Span},
};
use diskwright_stats::knee::Reason;
use std::cell::Cell;

/// Serves 40 random requests at once, 12 sequential reads or 6 sequential writes; each takes 100
/// us.
fn device(job: &Job, files: usize) -> Run {
    let load = &job.phases[0].loads[0];
    let servers = match (load.random_percent, load.read_percent) {
        (0.0, 100.0) => 12,
        (0.0, _) => 6,
        _ => 40,
    };
    simulated_by(servers, job, files)
}

/// Serves 240 random requests at once, as [`device`] otherwise.
fn fast_device(job: &Job, agents: usize) -> Run {
    if job.phases[0].loads[0].random_percent > 0.0 { simulated_by(240, job, agents) } else { device(job, agents) }
}

fn measured(stage: Stage, settings: &Settings, input: StageInput) -> StageRecord {
    let device: fn(&Job, usize) -> Run = if settings.is_fleet() { fast_device } else { device };
    let names: Vec<String> = match settings.is_fleet() {
        true => settings.agents.iter().map(|agent| agent.name.clone()).collect(),
        false => (1..=4).map(|number| format!("test{number}.dat")).collect(),
    };
    let options = plan::sweep(stage, settings, input, Duration::from_secs(3), &names).unwrap();
    let targets = options.targets.iter().map(|name| target(name)).collect();
    let mut sweep = sweep::begin(options, targets, Vec::new()).unwrap();
    let mut measure = |job: &Job, files: usize, _: &dyn Watch| Ok(device(job, files));
    sweep::run(&mut sweep, stage.name(), &mut measure, &mut |_| Ok(()), &mut Silent).unwrap();
    StageRecord { stage, sweep }
}

/// A complete sweep whose conclusions are computed again.
fn concluded(mut sweep: SweepRecord) -> SweepRecord {
    let mut measure = |_: &Job, _: usize, _: &dyn Watch| unreachable!("all is measured");
    sweep::run(&mut sweep, "again", &mut measure, &mut |_| Ok(()), &mut Silent).unwrap();
    sweep
}

/// A complete study of that device.
pub(crate) fn result() -> QueueDepthResult {
    result_with(settings(Vec::new()))
}

fn settings(agents: Vec<StudiedAgent>) -> Settings {
    Settings {
        threads: 8,
        rounds: 3,
        array: Some(ArrayOptions { copies: 2, devices: 8 }),
        cell: Some(Span::from_secs(3)),
        agents,
        ..Settings::example()
    }
}

/// A complete study of a faster device by four agents.
pub(crate) fn result_of_agents() -> QueueDepthResult {
    let agent = |number| StudiedAgent { name: format!("vm{number}"), fingerprint: Some("ab".repeat(32)) };
    result_with(settings((1..=4).map(agent).collect()))
}

fn result_with(settings: Settings) -> QueueDepthResult {
    let example = example::run();
    let mut input = StageInput { members: 4, volume_bytes: 64 << 30, depth: 0 };
    let first = measured(settings.stages()[0], &settings, input);
    if first.stage == Stage::Files {
        input.members = findings::files(&first.sweep);
    }
    let depths = measured(Stage::Depths, &settings, input);
    input.depth = findings::target_depth(&depths.sweep, &settings);
    let mut stages = vec![first, depths];
    for stage in [Stage::Combinations, Stage::Reads, Stage::Writes] {
        stages.push(measured(stage, &settings, input));
    }
    let head = Head {
        started_utc: "20261121T120000Z".into(),
        took_ns: 3_600_000_000_000,
        machine: example.head.machine,
        versions: example.head.versions,
        end: End::Complete,
        ..Head::begin(SCHEMA)
    };
    let mut result = QueueDepthResult {
        targets: vec![target("test1.dat")],
        pre_test: Some(simulated_by(40, &plan::pre_test(&settings, 64 << 30).unwrap(), settings.clients() as usize)),
        findings: findings::findings(&stages, settings.array),
        stages,
        ..QueueDepthResult::begin(settings, head)
    };
    result.head.verdict = findings::verdict(&result);
    result
}

#[test]
fn the_saturation_of_the_simulated_device_is_found() {
    let result = result();
    let found: Vec<&OperatingPoint> = result.findings.iter().map(|finding| finding.found.as_ref().unwrap()).collect();
    let [random, reads, writes] = found[..] else { panic!("{:?}", result.findings) };
    assert_eq!((random.rule, random.chosen, random.in_flight), (Rule::Efficient, 40.0, 36));
    assert!(random.interval.is_some_and(|ends| ends.low <= 40.0 && ends.high >= 40.0), "{random:?}");
    assert_eq!((reads.rule, reads.in_flight, writes.in_flight), (Rule::Saturation, 12, 6));
    // 70 % reads on a two-way mirror of eight: 36 x 1.3 / 8.
    assert!((random.array.depth_per_device - 5.85).abs() < 0.01, "{random:?}");
    assert_eq!((reads.array.depth_per_device, writes.array.depth_per_device), (1.5, 1.5));
    assert!((writes.array.amplification - 2.0).abs() < 1e-9);
    assert!(
        result.head.verdict.starts_with("Random 8K (70 % read) is most efficient with 36 in flight"),
        "{}",
        result.head.verdict
    );
    assert!(result.head.verdict.ends_with("the paper's eight SSDs needed 120, 31 and 15."), "{}", result.head.verdict);
}

#[test]
fn more_files_are_used_only_if_they_are_significantly_faster() {
    let result = result();
    // All numbers of files reach the device's 40: no significant difference, so one file is used.
    assert_eq!(findings::files(&result.stages[0].sweep), 1);
    assert_eq!(result.stages[1].sweep.options.targets, ["test1.dat"]);
    // Two files are significantly faster.
    let mut faster = result.stages[0].sweep.clone();
    for round in faster.cells.iter_mut().filter(|cell| cell.files == 2).flat_map(|cell| &mut cell.measured.rounds) {
        round.iops *= 1.5;
    }
    assert_eq!(findings::files(&concluded(faster)), 2);
}

#[test]
fn ours_and_the_papers_figures_are_relative_to_their_first_common_cell() {
    let result = result();
    let depths = findings::beside(result.stage(Stage::Depths).unwrap());
    let at = |depth: usize| depths[depth - 1].unwrap();
    assert_eq!((at(1).ours, at(1).papers), (1.0, Some(1.0)));
    // "55232.28 iops" at 12, "14411.29 iops" at 1; the paper prints no figures beyond 12.
    assert!((at(12).papers.unwrap() - 3.8326).abs() < 1e-3 && at(13).papers.is_none());
    assert!((at(3).ratio.unwrap() - 240_000.0 / 30_649.46).abs() < 0.2, "{:?}", at(3));
    let reads = findings::beside(result.stage(Stage::Reads).unwrap());
    assert!(
        reads[0].unwrap().papers.is_none() && reads[7].unwrap().papers == Some(1.0),
        "the paper's reads begin at 8"
    );
    assert_eq!(papers(Stage::Reads).unwrap().settled.in_flight, 31);
    assert!(findings::beside(result.stage(Stage::Files).unwrap()).iter().flatten().next().is_none());
}

#[test]
fn a_finding_without_a_depth_has_a_reason() {
    let mut result = result();
    // Three loads are too few for a knee.
    let writes = result.stages.iter_mut().find(|record| record.stage == Stage::Writes).unwrap();
    writes.sweep.cells.truncate(3);
    writes.sweep.options.axes[0].values.truncate(3);
    writes.sweep = concluded(writes.sweep.clone());
    result.findings = findings::findings(&result.stages, None);
    assert_eq!(result.findings[2].why, Some(Reason::FewLoads { loads: 3, fewest: 4 }));
    let verdict = findings::verdict(&result);
    assert!(
        verdict.contains("512K sequential writes: no queue depth can be given (the sweep has only 3 loads"),
        "{verdict}"
    );
    result.head.end = End::Stopped;
    let partial = findings::verdict(&result);
    assert!(partial.starts_with("Partial: ") && partial.contains(". Random 8K"), "a stopped study says so first");
    result.findings.clear();
    assert!(findings::verdict(&result).ends_with("No queue depth can be given yet."));
}

/// The most efficient depth is 1, and the throughput with 3 is a quarter larger.
#[test]
fn the_most_efficient_depth_is_not_called_the_best() {
    let mut result = result();
    let found = result.findings[2].found.as_mut().unwrap();
    (found.rule, found.in_flight, found.mb_per_s) = (Rule::Efficient, 1, 2378.0);
    found.peak = Some(Peak { in_flight: 3, mb_per_s: 2978.0 });
    let words =
        "512K sequential writes are most efficient with 1 in flight (2,378 MB/s; the largest is 2,978 MB/s with 3);";
    let verdict = findings::verdict(&result);
    assert!(verdict.contains(words) && !verdict.contains("best"), "{verdict}");
    // Scatter is computed from the rounds of the cell.
    let writes = result.stages.iter_mut().find(|record| record.stage == Stage::Writes).unwrap();
    for cell in &mut writes.sweep.cells {
        cell.measured.rounds[0].mb_per_s *= 1.4;
    }
    let found = findings::findings(&result.stages, None)[2].found.clone().unwrap();
    assert!((found.scatter - 0.4).abs() < 0.05 && found.peak.is_none(), "{found:?}");
    result.findings = findings::findings(&result.stages, None);
    assert!(
        findings::verdict(&result).contains(", uncertain: its rounds differ by 4"),
        "{}",
        findings::verdict(&result)
    );
    // The peak is the largest throughput of the stage.
    let writes = result.stages.iter_mut().find(|record| record.stage == Stage::Writes).unwrap();
    let last = writes.sweep.cells.last_mut().unwrap();
    last.measured.rounds.iter_mut().for_each(|round| round.mb_per_s *= 2.0);
    let in_flight = last.measured.in_flight;
    let peak = findings::findings(&result.stages, None)[2].found.clone().unwrap().peak.unwrap();
    assert_eq!(peak.in_flight, in_flight);
}

fn small(home: &Path, output: &Path) -> QueueDepthOptions {
    QueueDepthOptions {
        study: StudyOptions {
            quick: true,
            dir: Some(home.to_owned()),
            rounds: Some(1),
            cell: Some(Duration::from_millis(15)),
            output: Some(output.to_owned()),
            ..StudyOptions::default()
        },
        size_bytes: Some(8 << 20),
        threads: Some(2),
        cache: Some(Caching::Direct),
        target_depth: Some(8),
        ..QueueDepthOptions::default()
    }
}

#[test]
fn a_study_that_cannot_be_saved_ends_and_can_be_shown() {
    let home = tempfile::tempdir().unwrap();
    let output = home.path().join("result.json");
    let mut take_the_name = |step: Step<'_>| {
        assert_ne!(step.phase, "reads", "the study should have ended");
        if step.phase == "combinations" && !output.is_dir() {
            std::fs::remove_file(&output).unwrap();
            std::fs::create_dir(&output).unwrap();
        }
        true
    };
    let report = run(&small(home.path(), &output), &mut take_the_name).unwrap();
    assert!(report.saved.unwrap_err().to_string().contains("not a regular file"));
    assert!(report.stopped && report.result.complete(Stage::Combinations).is_some());
    assert!(report.result.head.verdict.starts_with("Partial: "), "{}", report.result.head.verdict);
    assert_eq!(std::fs::read_dir(&output).unwrap().count(), 0);
}

#[test]
fn a_stopped_study_is_resumed() {
    let home = tempfile::tempdir().unwrap();
    let output = home.path().join("result.json");
    let options = small(home.path(), &output);
    // Stopped before the first measurement: no file is left.
    let stopped = run(&options, &mut |_: Step<'_>| false);
    assert!(matches!(stopped, Err(LabError::Stopped)));
    assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 0);
    // Stopped later: the result is partial.
    let mut until_reads = |step: Step<'_>| step.phase != "reads";
    let partial = run(&options, &mut until_reads).unwrap();
    assert!(partial.stopped && partial.result.head.verdict.starts_with("Partial: "), "{}", partial.result.head.verdict);
    let kept: QueueDepthResult = serde_json::from_slice(&std::fs::read(&output).unwrap()).unwrap();
    assert!(kept.complete(Stage::Combinations).is_some() && kept.complete(Stage::Reads).is_none());
    // A study with other settings is not resumed.
    let other = QueueDepthOptions { size_bytes: Some(16 << 20), ..options.clone() };
    let error = run(&other, &mut Silent).unwrap_err().to_string();
    assert!(error.contains("has other settings"), "{error}");
    // Resuming measures only what is missing.
    let whole = run(&options, &mut Silent).unwrap();
    assert!(!whole.stopped && whole.result.head.end == End::Complete);
    let rounds =
        |result: &QueueDepthResult| result.stage(Stage::Depths).unwrap().sweep.cells[3].measured.rounds.clone();
    assert_eq!(rounds(&whole.result), rounds(&kept));
    assert_eq!(whole.result.stages.len(), 5);
    assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 1, "only the result is left");
}

fn of_agents(names: &[&str]) -> Agents {
    let wanted =
        |name: &&str| Wanted { name: (*name).into(), group: "agents".into(), way: Way::Await, targets: Vec::new() };
    let options = FleetOptions {
        identity: Identity::temporary().unwrap(),
        lost_after: Duration::from_secs(1),
        on_loss: OnLoss::Stop,
        keep_going: false,
        labels: Vec::new(),
    };
    Agents { wanted: names.iter().map(wanted).collect(), options, entrance: None, fill: false }
}

#[test]
fn agents_have_threads_and_depths_of_their_own_and_totals_are_those_of_all() {
    let result = result_of_agents();
    let cells = |stage: Stage| &result.stage(stage).unwrap().sweep.cells;
    let split = |cell: &sweep::SweepCell| (cell.files, cell.threads, cell.queue_depth, cell.measured.in_flight);
    let of_agents: Vec<_> = cells(Stage::Agents).iter().map(split).collect();
    assert_eq!(of_agents, [(1, 8, 12, 96), (2, 8, 12, 192), (3, 8, 12, 288), (4, 8, 12, 384)]);
    assert_eq!(split(&cells(Stage::Depths)[2]), (4, 8, 3, 96));
    assert_eq!(split(&cells(Stage::Reads)[2]), (4, 1, 3, 12));
    assert!(cells(Stage::Combinations).iter().all(|cell| cell.files == 4 && cell.measured.in_flight == 240));
    // Each agent has all of the data.
    let job = &result.stage(Stage::Depths).unwrap().sweep.options.job;
    assert_eq!(job.phases[0].loads[0].working_set.0, 64 << 30);
    let found: Vec<&OperatingPoint> = result.findings.iter().map(|finding| finding.found.as_ref().unwrap()).collect();
    let [random, reads, _] = found[..] else { panic!("{:?}", result.findings) };
    assert_eq!((random.in_flight, random.files, random.threads * random.queue_depth), (240, 4, 60));
    assert_eq!((reads.in_flight, reads.files, reads.queue_depth), (12, 4, 3));
    // 70 % reads on a two-way mirror of eight, below all agents: 240 x 1.3 / 8.
    assert!((random.array.depth_per_device - 39.0).abs() < 0.2, "{random:?}");
    let verdict = &result.head.verdict;
    for part in [
        "with 240 in flight, as 4 agents x ",
        "from 12 in flight, 3 on each of 4 agents (",
        "3 of 4 agents are most efficient, with 8 x 12 on each;",
    ] {
        assert!(verdict.contains(part), "{part}: {verdict}");
    }
}

#[test]
fn options_that_agents_cannot_have_are_refused() {
    let options = QueueDepthOptions { agents: Some(of_agents(&["vm1", "vm2"])), ..QueueDepthOptions::default() };
    assert_eq!(Settings::new(&options).unwrap().size_bytes, None, "all of the smallest target");
    let refused = |options: QueueDepthOptions| Settings::new(&options).unwrap_err().to_string();
    let two = QueueDepthOptions { targets: vec!["a".into(), "b".into()], ..options.clone() };
    assert!(refused(two).contains("one on each agent"));
    let odd = QueueDepthOptions { target_depth: Some(7), ..options };
    assert!(refused(odd).contains("cannot be shared by 2 agents"));
}

/// Agents that are simulated. They are lost after some windows.
struct Simulated {
    windows_left: Cell<u64>,
    kept: Cell<u64>,
}

impl Simulated {
    fn new(windows: u64) -> Self {
        Self { windows_left: Cell::new(windows), kept: Cell::new(0) }
    }
}

impl Bed for Simulated {
    fn records(&self) -> Vec<TargetRecord> {
        vec![target("vm1"), target("vm2")]
    }

    fn volume_bytes(&self) -> u64 {
        1 << 30
    }

    fn warnings(&self) -> Vec<Warning> {
        Vec::new()
    }

    fn measure(&self, job: &Job, members: usize, _: &dyn Watch) -> Result<Run> {
        let Some(left) = self.windows_left.get().checked_sub(1) else {
            return Err(LabError::Fleet(FleetError::Refused { name: "vm2".into(), why: "it is gone".into() }));
        };
        self.windows_left.set(left);
        Ok(fast_device(job, members))
    }

    fn kept(&self) {
        self.kept.set(self.kept.get() + 1);
    }
}

#[test]
fn a_study_that_loses_an_agent_keeps_what_it_has_and_is_resumed_by_the_same_agents() {
    let home = tempfile::tempdir().unwrap();
    let output = home.path().join("result.json");
    let options = QueueDepthOptions {
        targets: Vec::new(),
        agents: Some(of_agents(&["vm1", "vm2"])),
        size_bytes: None,
        ..small(home.path(), &output)
    };
    let settings = || Settings::new(&options).unwrap();
    let begun = || options.study.begin("queue-depth", SCHEMA).unwrap();
    let study = |bed: &mut Simulated, result: QueueDepthResult| run_on(bed, result, &begun(), &mut Silent);
    let begin = || QueueDepthResult::begin(settings(), begun().head);
    // Lost before the first measurement: nothing is saved.
    let error = study(&mut Simulated::new(0), begin()).unwrap_err().to_string();
    assert!(error.contains("vm2: it is gone") && !output.exists(), "{error}");
    // The pre-test, two windows of the stage `agents` and six of the depths.
    let mut bed = Simulated::new(9);
    let lost = study(&mut bed, begin()).unwrap();
    assert!(lost.result.head.verdict.starts_with("Partial: vm2: it is gone. "), "{}", lost.result.head.verdict);
    assert!(matches!(lost.result.head.end, End::Failed { .. }) && !lost.stopped && lost.saved.is_ok());
    assert!(bed.kept.get() >= 3, "after the pre-test, after the first stage, and at the end");
    let rounds = |result: &QueueDepthResult| -> Vec<usize> {
        let sweep = &result.stage(Stage::Depths).unwrap().sweep;
        sweep.cells.iter().map(|cell| cell.measured.rounds.len()).collect()
    };
    assert_eq!(rounds(&lost.result).iter().sum::<usize>(), 6);
    // Other agents do not resume it.
    let other = Settings::new(&QueueDepthOptions { agents: Some(of_agents(&["vm1", "vm3"])), ..options.clone() });
    let error = resume(&output, other.unwrap()).unwrap_err().to_string();
    assert!(error.contains("was measured by vm1 and vm2, and this one would be by vm1 and vm3"), "{error}");
    // The same agents measure what is missing, and nothing twice.
    let mut bed = Simulated::new(1000);
    let whole = study(&mut bed, resume(&output, settings()).unwrap()).unwrap();
    assert_eq!(whole.result.head.end, End::Complete);
    let all: u64 = whole.result.stages.iter().map(|record| record.sweep.cells.len() as u64).sum();
    assert_eq!(1000 - bed.windows_left.get(), all - 8);
    assert!(rounds(&whole.result).iter().all(|rounds| *rounds == 1));
}

#[test]
fn a_pre_test_that_failed_is_measured_again() {
    let home = tempfile::tempdir().unwrap();
    let output = home.path().join("result.json");
    let mut saved = result();
    saved.pre_test.as_mut().unwrap().head.end = End::Failed { first: "vm1 was lost".into(), errors: 1 };
    std::fs::write(&output, serde_json::to_vec(&saved).unwrap()).unwrap();
    assert!(resume(&output, saved.settings).unwrap().pre_test.is_none());
}

#[test]
fn warnings_of_different_agents_are_all_kept() {
    let of = |agent: &str, warning| Warning::OfAgents { agents: vec![agent.into()], warning: Box::new(warning) };
    let (polls, load) = (Warning::Polls { load: "all".into() }, Warning::OtherLoad { cpus: 0.5 });
    assert!(!is_same(&of("vm1", load.clone()), &of("vm2", load.clone())));
    assert!(!is_same(&of("vm1", load.clone()), &of("vm1", polls)));
    assert!(is_same(&of("vm1", load), &of("vm1", Warning::OtherLoad { cpus: 0.7 })));
    let slow = |agent: &str| Warning::Straggler { agent: agent.into(), share: 0.5 };
    assert!(!is_same(&slow("vm1"), &slow("vm2")));
}
