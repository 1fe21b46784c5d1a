//! A bed of agents: several virtual machines, or other clients, on the storage under test.
//!
//! The paper measures with one virtual machine. Here each agent is such a machine, with one target
//! of its own, and all agents measure at the same time. Threads, outstanding requests and the
//! volume of data are those of each agent. Requests in flight and all figures are sums.
//!
//! Each agent measures exactly one target, so that requests in flight are agents x threads x
//! outstanding. An agent that allows several targets is refused unless one of them is named.
//!
//! A fleet that resumes a study has the run identifier of its pre-test. So the agents return the
//! windows that they have measured and that the last controller has not saved.

use super::{Settings, Stage, bed::Bed, plan};
use crate::{
    LabError, Result,
    fleet::{Agents, OneLoad},
    progress::Progress,
};
use diskwright_fleet::controller::{Fleet, Wanted, new_run};
use diskwright_load::{
    Job, Run,
    job::Bytes,
    record::{FleetRecord, TargetRecord},
    run::Watch,
    warning::Warning,
};
use std::time::Duration;

/// Agents whose targets are prepared.
#[derive(Debug)]
pub(super) struct AgentBed {
    fleet: OneLoad,
    volume_bytes: u64,
    warnings: Vec<Warning>,
}

/// Connects to the agents and prepares the target of each. `before` is the fleet of the study that
/// is resumed.
///
/// # Errors
/// [`LabError::Fleet`] and [`LabError::BadOptions`] name the agent and the reason.
pub(super) fn prepare(
    settings: &Settings,
    agents: &Agents,
    before: Option<&FleetRecord>,
    progress: &mut dyn Progress,
) -> Result<AgentBed> {
    let with_target = |agent: &Wanted| Wanted { targets: settings.targets.clone(), ..agent.clone() };
    let agents = Agents { wanted: agents.wanted.iter().map(with_target).collect(), ..agents.clone() };
    // A load that reads and writes, so that targets are filled, checked for data and inspected.
    let mut job = plan::job(Stage::Depths, settings, Duration::from_secs(1))?;
    job.phases[0].loads[0].working_set = Bytes(settings.size_bytes.unwrap_or(0));
    let run = before.map_or_else(new_run, |fleet| Ok(fleet.run.clone()))?;
    let mut fleet = agents.connect(&run)?;
    if settings.targets.is_empty() {
        refuse_several_targets(&fleet)?;
    }
    agents.prepare(&mut fleet, &|_| job.clone(), progress)?;
    let fleet = OneLoad::new(fleet);
    let smallest = fleet.targets().iter().map(|target| target.size_bytes).min().unwrap_or(0);
    let volume_bytes = settings.size_bytes.unwrap_or(smallest).min(smallest);
    let left_out = (agents.wanted.len() == 1).then(|| Warning::LeftOut {
        what: "pre-test 2 (number of agents)".into(),
        why: "one agent was named; two or more are needed".into(),
    });
    Ok(AgentBed { fleet, volume_bytes, warnings: left_out.into_iter().collect() })
}

/// Checks that each agent allows one target.
fn refuse_several_targets(fleet: &Fleet) -> Result<()> {
    let several = fleet.remotes().iter().find(|remote| remote.welcome().targets.len() != 1);
    several.map_or(Ok(()), |remote| {
        let names: Vec<&str> = remote.welcome().targets.iter().map(|target| target.name.as_str()).collect();
        Err(LabError::BadOptions {
            what: format!(
                "the agent {} allows {} targets ({}), and the study measures one on each agent",
                remote.name(),
                names.len(),
                names.join(", ")
            ),
            hint: "name the target that all agents measure (`QueueDepthOptions::targets`)".into(),
        })
    })
}

impl Bed for AgentBed {
    fn records(&self) -> Vec<TargetRecord> {
        self.fleet.targets()
    }

    fn volume_bytes(&self) -> u64 {
        self.volume_bytes
    }

    fn warnings(&self) -> Vec<Warning> {
        self.warnings.clone()
    }

    fn measure(&self, job: &Job, members: usize, watch: &dyn Watch) -> Result<Run> {
        self.fleet.measure(job, members, watch)
    }

    fn kept(&self) {
        self.fleet.kept();
    }

    fn finish(&self) {
        self.fleet.finish();
    }
}
