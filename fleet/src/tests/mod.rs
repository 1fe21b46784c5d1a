//! Fleets of agents in this process, over real connections.

mod clocks;
mod loss;
mod orders;
mod runs;
mod steps;

use crate::{
    address::{Address, Place},
    agent::{Agent, Event, Keeper, ORPHANED, Prepared, Preparing},
    controller::{Fleet, FleetLook, FleetOptions, OnLoss, Remote, Wanted, Way},
    identity::{Fingerprint, Identity},
    message::{Allowed, Task},
    trust::Trust,
};
use diskwright_load::{
    Job, NullDevice, OpenTarget,
    job::{Load, Span},
    record::Run,
};
use std::{
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

/// A keeper of one target without storage.
#[derive(Debug, Default)]
pub(super) struct NullKeeper {
    pub(super) prepared: Arc<Mutex<u32>>,
    pub(super) closed: Arc<Mutex<u32>>,
}

impl Keeper for NullKeeper {
    fn allowed(&self) -> Vec<Allowed> {
        vec![Allowed { name: "data".into(), writable: true }]
    }

    fn prepare(&mut self, task: &Task, progress: &mut Preparing<'_>) -> Result<Prepared, String> {
        if task.job.name == "refused" {
            return Err("this job is refused".into());
        }
        progress("fill", 1, 2);
        *self.prepared.lock().unwrap() += 1;
        Ok(Prepared { targets: vec![OpenTarget::new("data", NullDevice::new(1 << 30))], warnings: Vec::new() })
    }

    fn allows(&self, job: &Job) -> Result<(), String> {
        if job.name == "not allowed" { Err("this job is not allowed".into()) } else { Ok(()) }
    }

    fn close(&mut self, _targets: Vec<OpenTarget>) -> Result<(), String> {
        *self.closed.lock().unwrap() += 1;
        Ok(())
    }
}

/// An agent in this process.
pub(super) struct Started {
    pub(super) agent: Agent,
    pub(super) address: Address,
    pub(super) closed: Arc<Mutex<u32>>,
    prepared: Arc<Mutex<u32>>,
    pub(super) events: Arc<Mutex<Vec<Event>>>,
}

impl Started {
    /// How often its targets were opened.
    pub(super) fn begun(&self) -> u32 {
        *self.prepared.lock().unwrap()
    }
}

/// Starts an agent that admits these controllers.
pub(super) fn agent(pinned: &[Fingerprint]) -> Started {
    agent_with(Trust::new(pinned.to_vec(), Vec::new()))
}

pub(super) fn agent_with(trust: Trust) -> Started {
    agent_with_patience(trust, ORPHANED)
}

/// An agent that gives a run up after this time without its controller.
pub(super) fn agent_with_patience(trust: Trust, orphaned: Duration) -> Started {
    let events = Arc::new(Mutex::new(Vec::new()));
    let keeper = NullKeeper::default();
    let (closed, prepared) = (Arc::clone(&keeper.closed), Arc::clone(&keeper.prepared));
    let seen = Arc::clone(&events);
    let tell = Arc::new(move |event| seen.lock().unwrap().push(event));
    let own = Identity::temporary().unwrap();
    let agent = Agent::with_patience(own, trust, Box::new(keeper), tell, orphaned);
    let door = agent.door(&Place::Tcp("127.0.0.1".into(), 0)).unwrap();
    let address = Address { place: door.place().unwrap(), fingerprint: agent.fingerprint(), token: None };
    let listening = agent.clone();
    thread::spawn(move || listening.listen(&door));
    Started { agent, address, closed, prepared, events }
}

pub(super) fn options(identity: &Identity) -> FleetOptions {
    FleetOptions {
        identity: identity.clone(),
        lost_after: Duration::from_secs(2),
        on_loss: OnLoss::Stop,
        keep_going: false,
        labels: Vec::new(),
    }
}

pub(super) fn wanted(name: &str, address: &Address) -> Wanted {
    Wanted { name: name.into(), group: "all".into(), way: Way::Dial(address.clone()), targets: Vec::new() }
}

/// A job of one phase, in intervals of a tenth of a second.
pub(super) fn job(warm_up_ms: u64, measured_ms: u64) -> Job {
    let load = Load { queue_depth: 4, read_percent: 70.0, ..Load::default() };
    let mut job = Job::simple("x", load, Span::from_millis(warm_up_ms), Span::from_millis(measured_ms));
    job.interval = Span::from_millis(100);
    job
}

pub(super) fn go_on(_: &FleetLook<'_>) -> bool {
    true
}

/// A fleet of `count` agents, prepared for `job`.
pub(super) fn fleet(run: &str, started: &[Started], options: FleetOptions, job: &Job) -> crate::Result<Fleet> {
    let wanted: Vec<Wanted> =
        started.iter().enumerate().map(|(number, agent)| wanted(&format!("a{number}"), &agent.address)).collect();
    let mut fleet = Fleet::connect(run, &wanted, options, None)?;
    fleet.prepare(&|_| job.clone(), false, &|_, _, _, _| true)?;
    Ok(fleet)
}

/// Measures a job with all agents.
pub(super) fn measure(fleet: &mut Fleet, job: &Job) -> crate::Result<Run> {
    let count = fleet.remotes().len();
    fleet.measure(count, &|_: &Remote| job.clone(), &go_on)
}
