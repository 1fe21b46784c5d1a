//! The records of all agents as one: as if one machine had measured with all their threads.
//!
//! ```text
//!   all agents measured to the end      ─▶ their threads side by side, with their histograms
//!   one was lost, failed or was stopped ─▶ one thread for each agent: the sums of the intervals
//!                                          in which all were active
//! ```
//!
//! Totals are computed from threads by adding histograms, so the percentiles of a fleet are those
//! of all its requests in one histogram. Percentiles are never averaged.
//!
//! Threads and targets are numbered through all agents. If groups have different loads, the phases
//! of the merged job have the loads of all of them.

use crate::{
    clock::AgentClock,
    error::{FleetError, Result},
    message::Measured,
};
use diskwright_load::{
    Job,
    job::Phase,
    machine::{Machine, Versions},
    record::{
        AgentPhaseRecord, AgentRecord, CpuRecord, DirectionRecord, End, FleetPhaseRecord, FleetRecord, Head, Loss,
        PhaseRecord, Run, SeriesPoint, SideRecord, SteadyRecord, TargetRecord, ThreadRecord,
    },
    warning::Warning,
};
use std::{mem::discriminant, ops::Range};

/// An agent with fewer requests than this share of the median of its group is a straggler.
const STRAGGLER: f64 = 0.8;
/// A skew above this share of the window is a reason for doubt.
const SKEW: f64 = 0.01;

/// What is known of an agent.
#[derive(Debug, Clone)]
pub struct Facts {
    /// Name of the agent in the plan.
    pub name: String,
    /// Group of the plan.
    pub group: String,
    /// SHA-256 of the agent's certificate, as hexadecimal digits.
    pub fingerprint: String,
    /// The agent's machine.
    pub machine: Machine,
    /// Boot identifier of the machine.
    pub boot_id: String,
    /// Version of the agent's program.
    pub versions: Versions,
    /// The agent's targets.
    pub targets: Vec<TargetRecord>,
    /// Reasons for doubt about its targets.
    pub warnings: Vec<Warning>,
    /// The agent's clock; `None`: never compared.
    pub clock: Option<AgentClock>,
}

/// A phase of all agents.
#[derive(Debug, Clone)]
pub struct PhaseOfAll {
    /// Start of the phase by the controller's clock, nanoseconds.
    pub start_ns: u64,
    /// The records of the agents that have one.
    pub parts: Vec<Option<Measured>>,
    /// The sum of all agents, interval by interval.
    pub series: Vec<SeriesPoint>,
    /// The intervals that each agent has sent. Of agents that are lost there is nothing else.
    pub sent: Vec<Vec<SeriesPoint>>,
    /// The part of the window in which all agents were active, from the start of the phase.
    pub common_ns: Range<u64>,
    /// Reads and writes of each agent in it.
    pub sums: Vec<(SideRecord, SideRecord)>,
    /// The steady state of the sum.
    pub steady: Option<SteadyRecord>,
}

/// All that is merged.
#[derive(Debug)]
pub struct Parts<'a> {
    /// Identifier of the run.
    pub run: &'a str,
    /// The agents.
    pub agents: Vec<Facts>,
    /// The job of the plan for each agent.
    pub jobs: Vec<Job>,
    /// The phases that were measured.
    pub phases: Vec<PhaseOfAll>,
    /// The agents that were lost.
    pub lost: Vec<Loss>,
    /// Whether the user stopped it.
    pub is_stopped: bool,
    /// When and where it was measured.
    pub head: Head,
    /// Labels for the record.
    pub labels: &'a [(String, String)],
}

/// Checks that the jobs of all agents have the same phases.
///
/// # Errors
/// [`FleetError::Plan`], [`FleetError::Load`].
pub fn check_jobs(jobs: &[Job]) -> Result<()> {
    let times =
        |phase: &Phase| (phase.name.clone(), phase.warm_up, phase.duration, phase.cool_down, phase.steady_within);
    let shape = |job: &Job| (job.interval, job.phases.iter().map(times).collect::<Vec<_>>());
    for job in jobs {
        job.validate().map_err(diskwright_load::LoadError::from)?;
        let plan = |what: String, hint: &str| Err(FleetError::Plan { what, hint: hint.into() });
        if let Some(phase) = job.phases.iter().find(|phase| phase.count.is_some()) {
            return plan(
                format!("phase \"{}\" ends after a count of requests", phase.name),
                "a fleet measures for a time, so that all agents are active together: give a duration",
            );
        }
        let long = job.phases.iter().find(|phase| {
            let parts = [phase.steady_within.unwrap_or(phase.warm_up), phase.duration, phase.cool_down];
            let all_ns = parts.iter().fold(0_u64, |sum, part| sum.saturating_add(part.as_nanos()));
            all_ns / job.interval.as_nanos().max(1) >= diskwright_load::run::POINTS_MAX as u64
        });
        if let Some(phase) = long {
            return plan(
                format!("phase \"{}\" has more than {} intervals", phase.name, diskwright_load::run::POINTS_MAX),
                "use a longer interval",
            );
        }
        if shape(job) != shape(&jobs[0]) {
            return plan(
                format!("the groups have different phases: those of {} and of {}", jobs[0].name, job.name),
                "give all groups the same phases, times and interval; loads may differ",
            );
        }
    }
    Ok(())
}

/// The job of all agents: that of the plan, or if groups have different loads, the loads of all.
/// Returns also the number of the first load of each agent.
fn merged_job(jobs: &[Job]) -> (Job, Vec<usize>) {
    let mut kinds: Vec<&Job> = Vec::new();
    let mut job = jobs[0].clone();
    let mut starts: Vec<usize> = Vec::new();
    let mut first_loads = Vec::with_capacity(jobs.len());
    for one in jobs {
        let kind = kinds.iter().position(|kind| *kind == one).unwrap_or_else(|| {
            starts.push(if kinds.is_empty() { 0 } else { job.phases[0].loads.len() });
            if !kinds.is_empty() {
                for (phase, more) in job.phases.iter_mut().zip(&one.phases) {
                    phase.loads.extend(more.loads.iter().cloned());
                }
            }
            kinds.push(one);
            kinds.len() - 1
        });
        first_loads.push(starts[kind]);
    }
    (job, first_loads)
}

/// The records of all agents as one; see the module documentation.
pub fn merged(parts: Parts<'_>) -> Run {
    let Parts { run, agents, jobs, phases, lost, is_stopped, head, labels } = parts;
    let (job, first_loads) = merged_job(&jobs);
    let first_targets: Vec<u32> = agents
        .iter()
        .scan(0_u32, |next, agent| {
            let first = *next;
            *next += agent.targets.len() as u32;
            Some(first)
        })
        .collect();
    let counts_machine = agents
        .iter()
        .enumerate()
        .map(|(number, agent)| agents[..number].iter().all(|other| other.boot_id != agent.boot_id))
        .collect();
    let numbers = Numbers { first_loads, first_targets, counts_machine };
    let phase_of = |loss: &Loss| job.phases.iter().position(|phase| phase.name == loss.phase);
    let mut records = Vec::with_capacity(phases.len());
    let mut fleet = FleetRecord {
        run: run.to_owned(),
        agents: agents
            .iter()
            .enumerate()
            .map(|(number, facts)| agent_record(facts, number, &numbers, &phases))
            .collect(),
        phases: Vec::new(),
        lost: lost.clone(),
    };
    for (index, phase) in phases.iter().enumerate() {
        let planned = &job.phases[index];
        let is_whole = |part: &Option<Measured>| {
            part.as_ref().is_some_and(|part| part.phase.window_ns >= planned.duration.as_nanos())
        };
        // Later phases are those of the agents that were left.
        let is_left = |agent: usize| {
            !lost.iter().any(|loss| loss.agent as usize == agent && phase_of(loss).is_some_and(|of| of < index))
        };
        let is_complete = !lost.iter().any(|loss| phase_of(loss) == Some(index))
            && phase.parts.iter().enumerate().all(|(agent, part)| !is_left(agent) || is_whole(part));
        let of_fleet = fleet_phase(phase, &agents, is_complete);
        records.push(phase_record(planned, phase, &numbers, &jobs, index, is_complete));
        fleet.phases.push(of_fleet);
    }
    let ends = fleet.agents.iter().map(|agent| agent.end.clone());
    let end = end_of(&fleet, ends, is_stopped);
    let mut targets = Vec::new();
    for agent in &agents {
        targets.extend(
            agent
                .targets
                .iter()
                .map(|target| TargetRecord { name: format!("{}: {}", agent.name, target.name), ..target.clone() }),
        );
    }
    let engine =
        phases.iter().flat_map(|phase| phase.parts.iter().flatten()).find_map(|part| part.run.as_ref()?.engine);
    let mut merged = Run {
        head: Head { end, ..head },
        job,
        engine,
        targets,
        phases: records,
        labels: labels.to_vec(),
        fleet: Some(fleet),
    };
    merged.head.warnings = warnings(&merged);
    merged
}

/// The series of a fleet of which only the series of the agents are there. Counts are added. The
/// percentiles of an interval are the highest that an agent has, which is an upper bound.
pub(crate) fn rates<'a>(series: impl Iterator<Item = &'a [SeriesPoint]>) -> Vec<SeriesPoint> {
    let mut sum: Vec<SeriesPoint> = Vec::new();
    for points in series {
        for (number, point) in points.iter().enumerate() {
            let Some(so_far) = sum.get_mut(number) else {
                sum.push(*point);
                continue;
            };
            let ios = |point: &SeriesPoint| point.read_ios.saturating_add(point.write_ios) as f64;
            let (before, more) = (ios(so_far), ios(point));
            so_far.mean_ns = (so_far.mean_ns * before + point.mean_ns * more) / (before + more).max(1.0);
            so_far.len_ns = so_far.len_ns.max(point.len_ns);
            so_far.read_ios = so_far.read_ios.saturating_add(point.read_ios);
            so_far.read_bytes = so_far.read_bytes.saturating_add(point.read_bytes);
            so_far.write_ios = so_far.write_ios.saturating_add(point.write_ios);
            so_far.write_bytes = so_far.write_bytes.saturating_add(point.write_bytes);
            so_far.p50_ns = so_far.p50_ns.max(point.p50_ns);
            so_far.p99_ns = so_far.p99_ns.max(point.p99_ns);
            so_far.max_ns = so_far.max_ns.max(point.max_ns);
        }
    }
    sum
}

/// Where the numbers of each agent begin, and which agent is the first one of its machine.
struct Numbers {
    first_loads: Vec<usize>,
    first_targets: Vec<u32>,
    counts_machine: Vec<bool>,
}

fn agent_record(facts: &Facts, number: usize, numbers: &Numbers, phases: &[PhaseOfAll]) -> AgentRecord {
    let first = numbers.first_targets[number];
    let parts = || phases.iter().filter_map(|phase| phase.parts[number].as_ref());
    let mut warnings = facts.warnings.clone();
    warnings.extend(parts().filter_map(|part| part.run.as_ref()).flat_map(|run| run.head.warnings.clone()));
    AgentRecord {
        name: facts.name.clone(),
        group: facts.group.clone(),
        fingerprint: facts.fingerprint.clone(),
        machine: facts.machine.clone(),
        boot_id: facts.boot_id.clone(),
        versions: facts.versions.clone(),
        targets: (first..first + facts.targets.len() as u32).collect(),
        clock: facts.clock.map(|clock| clock.record()).unwrap_or_default(),
        // An agent without a record is lost, which is told elsewhere.
        end: parts().next_back().map_or(End::Stopped, |part| part.end.clone()),
        warnings,
    }
}

/// How a run of a fleet ended: as the first of its agents that did not complete.
fn end_of(fleet: &FleetRecord, ends: impl Iterator<Item = End>, is_stopped: bool) -> End {
    let mut end = if is_stopped { End::Stopped } else { End::Complete };
    for one in ends {
        end = match one {
            End::Failed { first, errors } => end.failing(first, errors),
            End::Stopped if end == End::Complete => End::Stopped,
            _ => end,
        };
    }
    match fleet.lost.first() {
        Some(Loss { agent, why, .. }) => {
            let name = fleet.agents.get(*agent as usize).map_or("an agent", |agent| agent.name.as_str());
            end.failing(format!("{name} was lost: {why}"), 1)
        }
        None => end,
    }
}

/// When the agents measured, by the controller's clock.
fn fleet_phase(phase: &PhaseOfAll, agents: &[Facts], is_complete: bool) -> FleetPhaseRecord {
    let mut record = FleetPhaseRecord::default();
    let (mut starts, mut ends): (Vec<i64>, Vec<i64>) = (Vec::new(), Vec::new());
    for (number, (part, facts)) in phase.parts.iter().zip(agents).enumerate() {
        let Some(part) = part else {
            let series = phase.sent.get(number).cloned().unwrap_or_default();
            // It has begun when it was told to, as its intervals show.
            let start_ns = (!series.is_empty()).then_some(0);
            record.agents.push(AgentPhaseRecord { start_ns, series, ..AgentPhaseRecord::default() });
            continue;
        };
        let start_ns = facts.clock.map_or(0, |clock| {
            let since_ns = clock.to_controller_ns(part.start_ns) - i128::from(phase.start_ns);
            i64::try_from(since_ns).unwrap_or(if since_ns < 0 { i64::MIN } else { i64::MAX })
        });
        let window_start_ns = start_ns.saturating_add_unsigned(part.phase.window_start_ns);
        record.error_ns = record.error_ns.max(facts.clock.map_or(0, |clock| clock.error_ns()));
        starts.push(window_start_ns);
        ends.push(window_start_ns.saturating_add_unsigned(part.phase.window_ns));
        record.agents.push(AgentPhaseRecord {
            window_start_ns,
            window_ns: part.phase.window_ns,
            cpu: part.phase.cpu.clone(),
            start_ns: Some(start_ns),
            series: part.phase.series.clone(),
        });
    }
    let (first, last) = (starts.iter().min().copied().unwrap_or(0), starts.iter().max().copied().unwrap_or(0));
    record.skew_ns = last.abs_diff(first);
    (record.from_ns, record.until_ns) = match is_complete {
        true => (last, ends.iter().min().copied().unwrap_or(last)),
        false => (phase.common_ns.start as i64, phase.common_ns.end as i64),
    };
    record
}

/// The phase with the threads of all agents.
fn phase_record(
    planned: &Phase,
    phase: &PhaseOfAll,
    numbers: &Numbers,
    jobs: &[Job],
    index: usize,
    is_complete: bool,
) -> PhaseRecord {
    let mut record = PhaseRecord {
        name: planned.name.clone(),
        window_ns: phase.common_ns.end - phase.common_ns.start,
        window_start_ns: phase.common_ns.start,
        threads: Vec::new(),
        series: phase.series.clone(),
        interval_ns: jobs[0].interval.as_nanos(),
        cpu: CpuRecord::default(),
        members: Vec::new(),
        steady: phase.steady.clone(),
    };
    if !is_complete {
        for (agent, (reads, writes)) in phase.sums.iter().enumerate() {
            record.threads.push(sum_of_agent(agent, (reads, writes), numbers, &jobs[agent].phases[index]));
        }
        return record;
    }
    (record.window_ns, record.window_start_ns) = (0, u64::MAX);
    for (agent, part) in phase.parts.iter().enumerate() {
        let Some(Measured { phase: part, .. }) = part else { continue };
        record.window_ns = record.window_ns.max(part.window_ns);
        record.window_start_ns = record.window_start_ns.min(part.window_start_ns);
        let first_thread = record.threads.last().map_or(0, |thread| thread.thread.saturating_add(1));
        record.threads.extend(part.threads.iter().map(|thread| ThreadRecord {
            thread: first_thread.saturating_add(thread.thread),
            load: thread.load.saturating_add(numbers.first_loads[agent] as u32),
            target: thread.target + numbers.first_targets[agent],
            ..thread.clone()
        }));
        record.cpu.process_user_ns += part.cpu.process_user_ns;
        record.cpu.process_system_ns += part.cpu.process_system_ns;
        // The cores of a machine count once, however many agents run on it.
        if numbers.counts_machine[agent] {
            record.cpu.cores.extend(&part.cpu.cores);
        }
        record.cpu.tsc_hz = record.cpu.tsc_hz.max(part.cpu.tsc_hz);
        record.members.extend(part.members.iter().cloned());
    }
    record
}

/// One thread for all of an agent: what its threads did while all agents were active.
fn sum_of_agent(
    agent: usize,
    (reads, writes): (&SideRecord, &SideRecord),
    numbers: &Numbers,
    planned: &Phase,
) -> ThreadRecord {
    let is_scheduled = planned.loads.iter().any(|load| load.rate.is_some());
    let direction = |side: &SideRecord| DirectionRecord {
        ios: side.ios,
        bytes: side.bytes,
        errors: 0,
        service: side.latency.clone(),
        // Intervals have response times where there is a schedule.
        response: is_scheduled.then(|| side.latency.clone()),
    };
    let depth = planned.loads.iter().map(|load| load.threads.saturating_mul(load.queue_depth));
    ThreadRecord {
        thread: agent as u32,
        load: numbers.first_loads[agent] as u32,
        target: numbers.first_targets[agent],
        queue_depth: depth.fold(0, u32::saturating_add),
        reads: direction(reads),
        writes: direction(writes),
        flushes: DirectionRecord::default(),
        overdue: 0,
        iops_std_dev: None,
    }
}

/// What casts doubt on the sum: what the agents say, and what only the controller can see.
fn warnings(run: &Run) -> Vec<Warning> {
    let Some(fleet) = &run.fleet else { return Vec::new() };
    let mut warnings = Vec::new();
    for loss in &fleet.lost {
        let agent = fleet.agents.get(loss.agent as usize).map_or_else(String::new, |agent| agent.name.clone());
        let Loss { phase, since_ns, why, .. } = loss.clone();
        warnings.push(Warning::AgentLost { agent, phase, since_ns, why });
    }
    for (phase, of_fleet) in run.phases.iter().zip(&fleet.phases) {
        if let Some(SteadyRecord { reached_ns, left_ns, range, slope, .. }) = phase.steady
            && (reached_ns.is_none() || left_ns.is_some())
        {
            let (phase, was_reached) = (phase.name.clone(), reached_ns.is_some());
            warnings.push(Warning::NotSteady { phase, was_reached, range, slope });
        }
        if of_fleet.skew_ns as f64 > phase.window_ns as f64 * SKEW && fleet.lost.is_empty() {
            let (skew_ns, window_ns) = (of_fleet.skew_ns, phase.window_ns);
            warnings.push(Warning::Skew { phase: phase.name.clone(), skew_ns, window_ns });
        }
        warnings.extend(stragglers(fleet, phase).into_iter().filter(|_| fleet.lost.is_empty()));
    }
    let mut of_agents: Vec<(Vec<String>, Warning)> = Vec::new();
    for agent in &fleet.agents {
        let shares_machine = fleet.agents.iter().filter(|other| other.boot_id == agent.boot_id).count() > 1;
        let own = agent.warnings.iter().filter(|warning| match warning {
            // The steady state is that of the sum.
            Warning::NotSteady { .. } => false,
            // The other programs are the other agents.
            Warning::OtherLoad { .. } => !shares_machine,
            _ => true,
        });
        for warning in own {
            // Of the load of machines one figure is shown, and of a depth the lowest that was
            // reached.
            let is_alike = |other: &Warning| match (warning, other) {
                (Warning::OtherLoad { .. } | Warning::StolenTime { .. }, _) => {
                    discriminant(other) == discriminant(warning)
                }
                (Warning::DepthNotReached { load, .. }, Warning::DepthNotReached { load: same, .. }) => load == same,
                _ => other == warning,
            };
            match of_agents.iter_mut().find(|(_, other)| is_alike(other)) {
                Some((names, known)) => {
                    if names.last() != Some(&agent.name) {
                        names.push(agent.name.clone());
                    }
                    if let (Warning::DepthNotReached { reached, .. }, Warning::DepthNotReached { reached: more, .. }) =
                        (known, warning)
                    {
                        *reached = reached.min(*more);
                    }
                }
                None => of_agents.push((vec![agent.name.clone()], warning.clone())),
            }
        }
    }
    warnings.extend(of_agents.into_iter().map(|(agents, warning)| match warning {
        // It is the same for all, and no matter whose it is.
        Warning::DebugBuild => warning,
        warning => Warning::OfAgents { agents, warning: Box::new(warning) },
    }));
    Warning::sort(&mut warnings);
    warnings
}

/// The agents that made far fewer requests than the others of their group.
fn stragglers(fleet: &FleetRecord, phase: &PhaseRecord) -> Vec<Warning> {
    let ios: Vec<f64> = (0..fleet.agents.len()).map(|agent| fleet.total_of(agent, phase).both.ios as f64).collect();
    let mut found = Vec::new();
    for (number, agent) in fleet.agents.iter().enumerate() {
        let of_group = |other: &(usize, &AgentRecord)| other.1.group == agent.group;
        let mut all: Vec<f64> = fleet.agents.iter().enumerate().filter(of_group).map(|(other, _)| ios[other]).collect();
        all.sort_by(f64::total_cmp);
        let median = all[all.len() / 2];
        if median > 0.0 && ios[number] < median * STRAGGLER {
            found.push(Warning::Straggler { agent: agent.name.clone(), share: ios[number] / median });
        }
    }
    found
}
