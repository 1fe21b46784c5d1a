//! The controller: leads agents through a run, and adds up what they measured.
//!
//! ```text
//!   connect ─▶ clocks ─▶ prepare ─▶ measure, for each cell ─▶ finish
//!                                     └─ each phase: arm all ─▶ start at T ─▶ look ─▶ take
//! ```
//!
//! | file | content |
//! |---|---|
//! | `remote.rs` | one agent: its connection, its clock, and what it is told |
//! | `gathering.rs` | the intervals of all agents, added as they come |
//! | `phase.rs` | a phase on all agents: start, progress, steady state, loss |
//! | `options.rs`, `together.rs` | options; one step for all agents at the same time |
//! | `entrance.rs` | where agents that dial come in |
//!
//! Each step is done for all agents at the same time, by a short-lived thread for each.
//!
//! **A lost agent.** A connection that fails is made anew for [`FleetOptions::lost_after`], and the
//! agent goes on meanwhile. If it does not come back, its figures end with the last interval that
//! all agents have in common, and by [`OnLoss`] the others go on or stop.

mod entrance;
pub(crate) mod gathering;
mod options;
mod phase;
mod remote;
mod together;

pub use entrance::Entrance;
pub use options::{AGENTS_MAX, FleetOptions, OnLoss, Wanted, Way};
pub use phase::{AgentLook, FleetLook, FleetWatch};
pub use remote::Remote;

use crate::{
    agent::new_instance,
    error::{FleetError, Result},
    merge,
    message::Task,
    trust::Token,
};
use diskwright_load::{
    Job,
    record::{Head, RUN_SCHEMA, Run},
};
use ring::digest::{SHA256, digest};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
};
use together::{all_or_failed, each, seeded, stay_until};

/// Agents that are connected; see the module documentation.
#[derive(Debug)]
pub struct Fleet {
    remotes: Vec<Remote>,
    options: FleetOptions,
    run: String,
}

/// The number of a cell: the same for the same jobs of the same agents, also of a controller that
/// was started again.
fn cell_of(jobs: &[Job]) -> u64 {
    let text: String = jobs.iter().map(Job::to_toml).collect();
    let digest = digest(&SHA256, text.as_bytes());
    digest.as_ref().iter().take(8).fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// An identifier for a new run: unlike that of any other.
///
/// # Errors
/// [`FleetError::Tls`]: the system has no random numbers.
pub fn new_run() -> Result<String> {
    Ok(Token::random()?.reveal().to_owned())
}

impl Fleet {
    /// Connects to the agents of a plan, and compares clocks. `run` identifies the run: a
    /// controller that died and goes on uses the same one.
    ///
    /// # Errors
    /// The agents that cannot be reached or refuse; [`FleetError::Plan`] if there are none or too
    /// many.
    pub fn connect(
        run: &str,
        wanted: &[Wanted],
        options: FleetOptions,
        entrance: Option<&Arc<Entrance>>,
    ) -> Result<Self> {
        if wanted.is_empty() || wanted.len() > AGENTS_MAX {
            return Err(FleetError::Plan {
                what: format!("a fleet of {} agents", wanted.len()),
                hint: format!("name 1 to {AGENTS_MAX} agents"),
            });
        }
        let instance = new_instance();
        let mut wanted = wanted.to_vec();
        let connected = each(&mut wanted, |_, wanted| {
            let mut remote = Remote::connect(wanted.clone(), &options, &instance, entrance.cloned())?;
            remote.make_free(run)?;
            remote.compare_clocks()?;
            Ok(remote)
        });
        let remotes = all_or_failed(connected)?;
        if let Some(other) = remotes.iter().enumerate().find_map(|(number, remote)| {
            let is_same = |other: &&Remote| other.place() == remote.place() && remote.place().is_some();
            remotes[..number].iter().find(is_same).map(|other| (other.name(), remote.name()))
        }) {
            return Err(FleetError::Plan {
                what: format!("the agents {} and {} have the same address", other.0, other.1),
                hint: "name each agent once".into(),
            });
        }
        Ok(Self { remotes, options, run: run.to_owned() })
    }

    /// The agents.
    pub fn remotes(&self) -> &[Remote] {
        &self.remotes
    }

    /// Opens, checks and fills the targets of all agents. `progress` receives for each agent what
    /// it does (number, what, units done, all units), and says whether to go on.
    ///
    /// # Errors
    /// The agents that refuse, each with its reason; nothing was measured.
    pub fn prepare(
        &mut self,
        job_of: &(dyn Fn(&Remote) -> Job + Sync),
        fill: bool,
        progress: &(dyn Fn(usize, &str, u64, u64) -> bool + Sync),
    ) -> Result<()> {
        let run = self.run.clone();
        let pending = AtomicUsize::new(self.remotes.len());
        let has_failed = AtomicBool::new(false);
        let prepared = each(&mut self.remotes, |number, remote| {
            let job = seeded(job_of(remote), number);
            let task = Task { run: run.clone(), targets: remote.wanted_targets(), job, fill };
            let mut progress =
                |doing: &str, done, total| !has_failed.load(Ordering::Relaxed) && progress(number, doing, done, total);
            let prepared = remote.prepare(task, &mut progress);
            if prepared.is_err() {
                has_failed.store(true, Ordering::Relaxed);
            }
            pending.fetch_sub(1, Ordering::Relaxed);
            // Another agent may take hours.
            stay_until(remote, &|| pending.load(Ordering::Relaxed) == 0);
            prepared
        });
        let prepared = all_or_failed(prepared);
        if prepared.is_err() {
            self.finish();
        }
        prepared.map(|_| ())
    }

    /// Measures a job on the first `agents` agents. Each runs the job that `job_of` gives it. All
    /// of these jobs must have the same phases. The agents keep their records until
    /// [`Fleet::kept`].
    ///
    /// # Errors
    /// The phases differ; an agent refuses; no agent is left.
    pub fn measure(
        &mut self,
        agents: usize,
        job_of: &(dyn Fn(&Remote) -> Job + Sync),
        watch: &dyn FleetWatch,
    ) -> Result<Run> {
        let count = agents.clamp(1, self.remotes.len());
        let jobs: Vec<Job> = self.remotes[..count].iter().map(job_of).collect();
        merge::check_jobs(&jobs)?;
        let mut measuring = phase::Measuring::begin(&self.options, &self.run, cell_of(&jobs), jobs);
        let (active, idle) = self.remotes.split_at_mut(count);
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| each(idle, |_, remote| stay_until(remote, &|| is_over.load(Ordering::Relaxed))));
            let measured = measuring.all_phases(active, watch);
            is_over.store(true, Ordering::Relaxed);
            measured
        })?;
        Ok(measuring.merged(active))
    }

    /// The record of a run that has not begun, with which a controller that dies can go on.
    pub fn begun(&self, job_of: &dyn Fn(&Remote) -> Job) -> Run {
        let jobs: Vec<Job> = self.remotes.iter().map(job_of).collect();
        merge::merged(merge::Parts {
            run: &self.run,
            agents: self.remotes.iter().map(Remote::facts).collect(),
            jobs,
            phases: Vec::new(),
            lost: Vec::new(),
            is_stopped: true,
            head: Head::begin(RUN_SCHEMA),
            labels: &self.options.labels,
        })
    }

    /// Tells the agents that the records are on the controller's disk.
    pub fn kept(&mut self) {
        let run = self.run.clone();
        // A lost agent forgets them when it is given up.
        each(&mut self.remotes, |_, remote| remote.forget(&run).is_ok());
    }

    /// Lets the agents close their targets.
    pub fn finish(&mut self) {
        let run = self.run.clone();
        each(&mut self.remotes, |_, remote| remote.finish(&run).is_ok());
    }
}
