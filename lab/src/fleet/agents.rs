//! The agents of a measurement, and a fleet in which all of them have one load.
//!
//! ```text
//!   Agents ─connect─▶ Fleet ─prepare─▶ targets are open, checked and filled
//!                       └─ OneLoad: the part that a sweep and a study see
//!                            targets()  one record for each agent
//!                            measure()  a job on the first agents ─▶ one run, with the sums
//!                            kept()     the result is saved: the agents may drop their records
//!                            finish()   the agents close their targets
//! ```
//!
//! Invariant: agents keep the record of a window until [`OneLoad::kept`]. Call it only after the
//! window is on the controller's disk.

use crate::{
    Result,
    progress::{Progress, Step},
};
use diskwright_fleet::controller::{Entrance, Fleet, FleetLook, FleetOptions, Remote, Wanted};
use diskwright_load::{Job, Run, job::Caching, record::TargetRecord, run::Watch};
use std::{
    cell::RefCell,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
};

/// The agents of a measurement, and how the controller treats them.
#[derive(Debug, Clone)]
pub struct Agents {
    /// The agents, in the order in which they are used.
    pub wanted: Vec<Wanted>,
    /// Identity of the controller, and what happens when an agent is lost.
    pub options: FleetOptions,
    /// Where agents come in that connect to the controller.
    pub entrance: Option<Arc<Entrance>>,
    /// Whether the agents fill their working sets first.
    pub fill: bool,
}

impl Agents {
    /// Connects to all agents. `run` identifies the measurement; see
    /// [`diskwright_fleet::controller::new_run`].
    ///
    /// # Errors
    /// [`LabError::Fleet`](crate::LabError::Fleet) names the agents that cannot be reached.
    pub fn connect(&self, run: &str) -> Result<Fleet> {
        Ok(Fleet::connect(run, &self.wanted, self.options.clone(), self.entrance.as_ref())?)
    }

    /// Opens, checks and fills the targets of all agents.
    ///
    /// # Errors
    /// [`LabError::Fleet`](crate::LabError::Fleet) names the agents that refuse;
    /// [`LabError::Stopped`](crate::LabError::Stopped). All agents have closed their targets then.
    pub fn prepare(
        &self,
        fleet: &mut Fleet,
        job_of: &(dyn Fn(&Remote) -> Job + Sync),
        progress: &mut dyn Progress,
    ) -> Result<()> {
        let (told, news) = mpsc::channel();
        let goes_on = AtomicBool::new(true);
        let prepared = thread::scope(|scope| {
            let goes_on = &goes_on;
            let preparing = scope.spawn(move || {
                let tell = |number: usize, doing: &str, done: u64, total: u64| {
                    // Nobody listens after the last agent is prepared.
                    let _ = told.send((number, doing.to_owned(), done, total));
                    goes_on.load(Ordering::Relaxed)
                };
                fleet.prepare(job_of, self.fill, &tell)
            });
            // Ends when `told` is dropped.
            for (number, doing, done, total) in news {
                let message = format!("{}: {doing}", self.wanted[number].name);
                if !progress.step(Step { phase: "prepare", done, total, message: &message }) {
                    goes_on.store(false, Ordering::Relaxed);
                }
            }
            preparing.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        Ok(prepared?)
    }
}

/// A fleet whose agents all measure the same job; see the module documentation.
#[derive(Debug)]
pub struct OneLoad {
    fleet: RefCell<Fleet>,
}

impl OneLoad {
    /// A fleet whose targets are prepared.
    pub fn new(fleet: Fleet) -> Self {
        Self { fleet: RefCell::new(fleet) }
    }

    /// A record for each agent: its smallest target, with the name of the agent.
    pub fn targets(&self) -> Vec<TargetRecord> {
        self.fleet.borrow().remotes().iter().map(as_target).collect()
    }

    /// Measures a job on the first `agents` agents.
    ///
    /// # Errors
    /// As [`Fleet::measure`].
    pub fn measure(&self, job: &Job, agents: usize, watch: &dyn Watch) -> Result<Run> {
        let sum = |look: &FleetLook<'_>| watch.update(&look.sum);
        Ok(self.fleet.borrow_mut().measure(agents, &|_| job.clone(), &sum)?)
    }

    /// Tells the agents that their records are on the controller's disk.
    pub fn kept(&self) {
        self.fleet.borrow_mut().kept();
    }

    /// Lets the agents close their targets.
    pub fn finish(&self) {
        self.fleet.borrow_mut().finish();
    }
}

fn as_target(remote: &Remote) -> TargetRecord {
    let targets = remote.targets();
    let mut record = targets.iter().min_by_key(|target| target.size_bytes).cloned().unwrap_or_else(|| TargetRecord {
        name: String::new(),
        kind: String::new(),
        size_bytes: 0,
        logical_sector_bytes: 512,
        cache: Caching::default(),
        path: None,
        behind: None,
        place: None,
        contents: None,
    });
    record.name = remote.name().to_owned();
    record
}
