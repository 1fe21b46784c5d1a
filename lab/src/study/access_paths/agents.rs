//! Measures the access paths of real clients: the agents of a fleet.
//!
//! ```text
//!   begin ─▶ connect to all agents: which targets do they allow? ─▶ the disk is made and filled
//!   each way of a round: serve ─▶ connect ─▶ prepare ─▶ light, medium, heavy ─▶ finish ─▶ stop
//!                          │                   └─ each agent opens its target: the server runs
//!                          └─ `AgentServer`: the address that agents have on their command lines
//! ```
//!
//! The paper's twenty clients are spread over the agents. All of them start at the same time, their
//! histograms are added, and their CPU time is the sum of the agents' processes: the record of a
//! window is that of a fleet (`diskwright_fleet`). The study chooses among the targets of the
//! agents by name: [`AccessPath::word`].
//!
//! An access path that an agent does not allow is skipped before anything is made. An agent that
//! fails later ends these measurements, because all access paths need all agents: its whole rounds
//! count, and the study ends with the error. It is not skipped as a guest is, since a guest that
//! fails says something about one access path alone.
//!
//! Invariant: a window counts only if each agent sees a disk of the size of the study's, so an
//! agent whose target lies elsewhere is found.

use super::{
    AccessPath, AccessPathRecord, AccessPathsOptions, CLIENTS, LOADS, Scale,
    measure::{self, Plan},
    options::{AgentsChoice, NO_PROGRAM},
    record::{AgentsRecord, ClientsRecord, NOT_WANTED},
    sequence::{Sequence, Sequences},
    setup::Disks,
};
use crate::{
    LabError, Result,
    cells::Cell,
    progress::Progress,
    rounds,
    server::Server,
    sweep::{add_warning_of_cell, settle_warnings},
};
use diskwright_fleet::{
    controller::{Fleet, FleetLook, Remote, Wanted, new_run},
    message::Allowed,
};
use diskwright_load::{
    Job, Run,
    machine::boot_id,
    run::{Snapshot, Stage, Watch},
    warning::Warning,
};
use std::{mem::discriminant, net::TcpListener};

/// What to do when the load of an agent fails.
const HINT: &str = "see what the agent says on its machine, and whether it reaches the servers";

/// What was measured by agents.
#[derive(Debug, Default)]
pub(super) struct Measured {
    pub(super) cells: Vec<Cell>,
    pub(super) ways: Vec<AccessPathRecord>,
    pub(super) agents: Option<AgentsRecord>,
    pub(super) warnings: Vec<Warning>,
    pub(super) whole: usize,
    pub(super) stopped: bool,
    /// What ended the measurements before their end.
    pub(super) failed: Option<LabError>,
}

impl Measured {
    /// Nothing, of these access paths.
    pub(super) fn nothing(ways: Vec<AccessPathRecord>) -> Self {
        Self { ways, ..Self::default() }
    }
}

/// The agents, and what they allow.
#[derive(Debug)]
pub(super) struct Agents<'a> {
    choice: &'a AgentsChoice,
    record: AgentsRecord,
    ways: Vec<AccessPathRecord>,
}

/// Connects to all agents and asks what they allow. Returns what is to be measured, and `None` if
/// nothing is.
///
/// # Errors
/// An agent cannot be reached; access paths of agents are asked for that cannot be measured.
pub(super) fn meet(options: &AccessPathsOptions) -> Result<Option<Agents<'_>>> {
    let asked = options.only.iter().find(|way| way.scale() == Scale::Agents);
    let choice = match (&options.agents, asked) {
        (Some(_), None) if !options.only.is_empty() => {
            let words: Vec<&str> = Scale::Agents.ways().map(AccessPath::word).collect();
            return bad(
                "agents are named, and none of the ways that are asked for needs them",
                format!("ask for {} too, or name no agent", words.join(", ")),
            );
        }
        (Some(choice), _) => choice,
        (None, Some(way)) => {
            let what = format!("{} needs agents, and none is named", way.word());
            return bad(what, "name them (`AccessPathsOptions::agents`)");
        }
        (None, None) => return Ok(None),
    };
    let wanted = of_groups(&choice.wanted, None);
    let fleet = Fleet::connect(&new_run()?, &wanted, choice.fleet.clone(), None)?;
    let skipped = |way: AccessPath| match options.program {
        _ if !options.wants(way) => Some(NOT_WANTED.to_owned()),
        None => Some(NO_PROGRAM.into()),
        Some(_) => fleet.remotes().iter().find_map(|remote| refusal(remote, way, &choice.server.target(way))),
    };
    let ways: Vec<AccessPathRecord> =
        Scale::Agents.ways().map(|way| AccessPathRecord { way, skipped: skipped(way) }).collect();
    let is_alone = !options.only.is_empty() && options.only.iter().all(|way| way.scale() == Scale::Agents);
    if is_alone && ways.iter().all(|record| record.skipped.is_some()) {
        let why = |record: &AccessPathRecord| Some(format!("{}: {}", record.way.name(), record.skipped.as_ref()?));
        let asked = ways.iter().filter(|record| options.wants(record.way));
        let why: Vec<String> = asked.filter_map(why).collect();
        return bad(why.join("; "), "start the agents as the study needs them, or ask for other ways");
    }
    for record in ways.iter().filter(|record| record.skipped.is_none()) {
        let address = choice.server.address(record.way);
        if let Err(error) = TcpListener::bind(&*address) {
            let what = format!("{}: cannot listen on {address}: {error}", record.way.name());
            return bad(what, "choose another address or port (`AgentsChoice::server`)");
        }
    }
    let clients = |(number, remote): (usize, &Remote)| ClientsRecord {
        name: remote.name().to_owned(),
        clients: share(number, wanted.len()),
        machine: remote.welcome().machine.clone(),
        boot_id: remote.welcome().boot_id.clone(),
    };
    let record = AgentsRecord {
        server: choice.server.host().to_owned(),
        agents: fleet.remotes().iter().enumerate().map(clients).collect(),
        skew_ns: 0,
        clock_error_ns: 0,
    };
    Ok(Some(Agents { choice, record, ways }))
}

fn bad<T>(what: impl Into<String>, hint: impl Into<String>) -> Result<T> {
    Err(LabError::BadOptions { what: what.into(), hint: hint.into() })
}

/// Clients of agent `number` of `agents`: as many as of the others, or one more. Each agent has one
/// at least.
fn share(number: usize, agents: usize) -> u32 {
    let (number, agents) = (number as u32, agents.max(1) as u32);
    (CLIENTS / agents + u32::from(number < CLIENTS % agents)).max(1)
}

/// The agents with the target of an access path. Agents are in one group if they have the same
/// number of clients: in a group, an agent that makes fewer requests is told.
fn of_groups(wanted: &[Wanted], way: Option<AccessPath>) -> Vec<Wanted> {
    let of = |(number, agent): (usize, &Wanted)| Wanted {
        group: format!("clients: {}", share(number, wanted.len())),
        targets: way.iter().map(|way| way.word().to_owned()).collect(),
        ..agent.clone()
    };
    wanted.iter().enumerate().map(of).collect()
}

/// Why an agent does not let an access path be measured; `None` if it does.
fn refusal(remote: &Remote, way: AccessPath, target: &str) -> Option<String> {
    let (name, word) = (remote.name(), way.word());
    match remote.welcome().targets.iter().find(|allowed| allowed.name == word) {
        None => Some(format!("the agent {name} does not allow it: it was started without {word}={target}")),
        Some(Allowed { writable: false, .. }) => {
            Some(format!("the agent {name} does not allow it: its target {word} may only be read"))
        }
        Some(_) => None,
    }
}

/// What the windows say beside their figures.
#[derive(Debug, Default)]
struct Seen {
    skew_ns: u64,
    clock_error_ns: u64,
    warnings: Vec<Warning>,
    /// Warnings about the load of machines, each with its processors.
    loads: Vec<(Warning, f64)>,
}

impl Seen {
    fn add(&mut self, run: &Run, cell: &str, is_here: bool) {
        for phase in run.fleet.iter().flat_map(|fleet| &fleet.phases) {
            self.skew_ns = self.skew_ns.max(phase.skew_ns);
            self.clock_error_ns = self.clock_error_ns.max(phase.error_ns);
        }
        for warning in &run.head.warnings {
            let own = match warning {
                Warning::OfAgents { warning, .. } => &**warning,
                warning => warning,
            };
            match own {
                // It is told of this program, and agents have the same version.
                Warning::DebugBuild => {}
                // The study has started the server without a cache.
                Warning::CacheOfServer { .. } => {}
                // The other programs are the servers and other agents.
                Warning::OtherLoad { .. } if is_here => {}
                Warning::OtherLoad { cpus } | Warning::StolenTime { cpus } => self.add_load(warning, *cpus),
                _ => add_warning_of_cell(&mut self.warnings, cell, warning.clone()),
            }
        }
    }

    /// Adds a warning about the load of machines. Of those of one kind the worst is kept.
    fn add_load(&mut self, warning: &Warning, cpus: f64) {
        let kind = |warning: &Warning| match warning {
            Warning::OfAgents { warning, .. } => discriminant(&**warning),
            warning => discriminant(warning),
        };
        match self.loads.iter_mut().find(|(known, _)| kind(known) == kind(warning)) {
            Some((_, most)) if *most >= cpus => {}
            Some(known) => *known = (warning.clone(), cpus),
            None => self.loads.push((warning.clone(), cpus)),
        }
    }
}

impl Agents<'_> {
    /// Measures each access path that the agents allow at every load.
    ///
    /// # Errors
    /// Those of [`Sequences::measure`]; a failure before the first whole round is in
    /// [`Measured::failed`], too.
    pub(super) fn measure(self, disks: &Disks, plan: &Plan, progress: &mut dyn Progress) -> Result<Measured> {
        let to_measure: Vec<AccessPath> =
            self.ways.iter().filter(|record| record.skipped.is_none()).map(|record| record.way).collect();
        if to_measure.is_empty() {
            return Ok(Measured::nothing(self.ways));
        }
        let (mut seen, mut failed) = (Seen::default(), None);
        let mut one = |way, round, watch: &dyn Watch| match self.sequence(disks, plan, (way, round), &mut seen, watch) {
            Err(LabError::Stopped) => Err(LabError::Stopped),
            // The whole rounds before count.
            Err(error) => {
                failed = Some(error);
                Err(LabError::Stopped)
            }
            measured => measured.map(Some),
        };
        let (count, clients) = (to_measure.len(), self.record.clients());
        let sequences = Sequences::measure(to_measure, clients, plan, ("agents", progress), &mut one)?;
        let (whole, stopped) = (sequences.done.whole, sequences.done.stopped && failed.is_none());
        let Seen { skew_ns, clock_error_ns, mut warnings, loads } = seen;
        settle_warnings(&mut warnings, count * LOADS.len());
        warnings.extend(loads.into_iter().map(|(warning, _)| warning));
        let mut ways = self.ways;
        if whole == 0 {
            let why = failed.as_ref().map_or_else(|| "it was stopped".into(), LabError::to_string);
            let measured = ways.iter_mut().filter(|record| record.skipped.is_none());
            measured.for_each(|record| record.skipped = Some(why.clone()));
        }
        Ok(Measured {
            cells: sequences.into_cells(|_| true),
            ways,
            agents: (whole > 0).then_some(AgentsRecord { skew_ns, clock_error_ns, ..self.record }),
            warnings,
            whole,
            stopped,
            failed,
        })
    }

    /// Measures an access path at all loads, with a server of its own.
    fn sequence(
        &self,
        disks: &Disks,
        plan: &Plan,
        (way, round): (AccessPath, usize),
        seen: &mut Seen,
        watch: &dyn Watch,
    ) -> Result<Sequence> {
        let option = match way {
            AccessPath::AgentNvme => "--nvme",
            AccessPath::AgentIscsi => "--iscsi",
            _ => "--nbd",
        };
        let server = disks.serve_at(way, &[option], &self.choice.server.address(way))?;
        let wanted = of_groups(&self.choice.wanted, Some(way));
        let mut fleet = Fleet::connect(&new_run()?, &wanted, self.choice.fleet.clone(), None)?;
        let measured = self.loads(&mut fleet, (disks, &server), plan, (way, round), seen, watch);
        // The server waits for its clients.
        fleet.finish();
        let sequence = measured?;
        server.stop()?;
        Ok(sequence)
    }

    fn loads(
        &self,
        fleet: &mut Fleet,
        (disks, server): (&Disks, &Server),
        plan: &Plan,
        (way, round): (AccessPath, usize),
        seen: &mut Seen,
        watch: &dyn Watch,
    ) -> Result<Sequence> {
        let job_of = |remote: &Remote, load: &str, outstanding: u32| -> Job {
            let clients = self.record.agents.iter().find(|agent| agent.name == remote.name());
            let job = measure::job(clients.map_or(1, |agent| agent.clients), outstanding, plan);
            rounds::job_of(&job, load, round, None)
        };
        let (light, least) = LOADS[0];
        fleet.prepare(&|remote| job_of(remote, light, least), false, &|_, _, _, _| goes_on(watch))?;
        for remote in fleet.remotes() {
            let found_bytes = remote.targets().first().map_or(0, |target| target.size_bytes);
            if found_bytes != disks.size_bytes {
                return bad(
                    format!(
                        "{}: the target {} of the agent {} has {found_bytes} bytes, and the disk of the study {}",
                        way.name(),
                        way.word(),
                        remote.name(),
                        disks.size_bytes
                    ),
                    format!("start the agent with {}={}", way.word(), self.choice.server.target(way)),
                );
            }
        }
        let own = boot_id();
        let is_here = self.record.agents.iter().any(|agent| agent.boot_id == own);
        let mut sequence = Sequence::new();
        for (load, outstanding) in LOADS {
            let before_ns = server.cpu_ns()?;
            let sum = |look: &FleetLook<'_>| watch.update(&look.sum);
            let agents = fleet.remotes().len();
            let run = fleet.measure(agents, &|remote| job_of(remote, load, outstanding), &sum)?;
            let spent_ns = server.cpu_ns()?.saturating_sub(before_ns);
            fleet.kept();
            let (figures, made) = measure::figures_of(&run, way, HINT)?;
            seen.add(&run, &format!("{}, {load} load", way.name()), is_here);
            sequence.push((figures, spent_ns as f64 / made as f64));
        }
        Ok(sequence)
    }
}

/// Whether the user lets a preparation go on.
fn goes_on(watch: &dyn Watch) -> bool {
    watch.update(&Snapshot {
        phase: "prepare",
        phase_index: 0,
        phases: 1,
        stage: Stage::WarmUp,
        elapsed_ns: 0,
        remaining_ns: None,
        done: None,
        iops: 0.0,
        mb_per_s: 0.0,
        p50_ns: 0,
        p99_ns: 0,
        cpus: 0.0,
        errors: 0,
        steady: None,
    })
}

#[cfg(test)]
mod tests {
    use super::{super::AgentServer, *};
    use diskwright_fleet::{
        controller::{FleetOptions, OnLoss, Way},
        identity::Identity,
    };
    use std::time::Duration;

    #[test]
    fn twenty_clients_are_spread_over_the_agents() {
        let spread = |agents: usize| (0..agents).map(|number| share(number, agents)).collect::<Vec<_>>();
        assert_eq!(spread(1), [20]);
        assert_eq!(spread(3), [7, 7, 6]);
        assert_eq!(spread(20), [1; 20]);
        for agents in 1..=20 {
            assert_eq!(spread(agents).iter().sum::<u32>(), CLIENTS, "{agents} agents");
        }
        assert_eq!(spread(23), [1; 23], "no agent is idle");
    }

    #[test]
    fn warnings_of_windows_are_few_and_those_of_the_study_itself_are_none() {
        let mut run = crate::report::example::fleet();
        let of = |warning| Warning::OfAgents { agents: vec!["a".into()], warning: Box::new(warning) };
        run.fleet.as_mut().unwrap().phases.iter_mut().for_each(|phase| phase.skew_ns = 7);
        let mut seen = Seen::default();
        for cpus in [0.2, 0.4, 0.3] {
            let straggler = Warning::Straggler { agent: "a".into(), share: cpus };
            let (stolen, other) = (Warning::StolenTime { cpus }, Warning::OtherLoad { cpus });
            let cache = Warning::CacheOfServer { targets: vec!["agent-nbd".into()] };
            run.head.warnings = vec![Warning::DebugBuild, of(stolen), of(other), of(cache), straggler];
            seen.add(&run, "NBD, light load", true);
        }
        assert_eq!(seen.loads, [(of(Warning::StolenTime { cpus: 0.4 }), 0.4)]);
        assert!(matches!(&seen.warnings[..], [Warning::InCells { .. }]), "{:?}", seen.warnings);
        assert_eq!(seen.skew_ns, 7);
    }

    #[test]
    fn agents_with_as_many_clients_are_one_group() {
        let agent = |name: &str| Wanted { name: name.into(), group: "x".into(), way: Way::Await, targets: vec![] };
        let grouped = of_groups(&["a", "b", "c"].map(agent), Some(AccessPath::AgentIscsi));
        let groups: Vec<&str> = grouped.iter().map(|agent| agent.group.as_str()).collect();
        assert_eq!(groups, ["clients: 7", "clients: 7", "clients: 6"]);
        assert!(grouped.iter().all(|agent| agent.targets == ["agent-iscsi"]));
        assert!(of_groups(&grouped, None).iter().all(|agent| agent.targets.is_empty()));
    }

    #[test]
    fn ways_of_agents_need_agents_and_agents_need_ways() {
        let options = AccessPathsOptions { only: vec![AccessPath::AgentNvme], ..AccessPathsOptions::default() };
        let error = meet(&options).unwrap_err().to_string();
        assert!(error.starts_with("agent-nvme needs agents, and none is named;"), "{error}");
        assert!(meet(&AccessPathsOptions::default()).unwrap().is_none());
        let fleet = FleetOptions {
            identity: Identity::temporary().unwrap(),
            lost_after: Duration::from_secs(1),
            on_loss: OnLoss::Stop,
            keep_going: false,
            labels: Vec::new(),
        };
        let choice = AgentsChoice { wanted: Vec::new(), fleet, server: AgentServer::default() };
        let options =
            AccessPathsOptions { only: vec![AccessPath::Nbd], agents: Some(choice), ..AccessPathsOptions::default() };
        let error = meet(&options).unwrap_err().to_string();
        assert!(error.contains("ask for agent-nbd, agent-nvme, agent-iscsi too"), "{error}");
    }
}
