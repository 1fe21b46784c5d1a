//! One agent, as the controller sees it: its connection, its clock, and what it is told.
//!
//! Every order can be sent again: if a connection breaks, it is made anew, and the order is
//! repeated. An agent carries out an order that it has carried out before by saying so.

use super::{
    entrance::Entrance,
    options::{AGENTS_MAX, FleetOptions, Wanted, Way},
};
use crate::{
    address::{Address, Place},
    agent,
    clock::{self, AgentClock, EXCHANGES, Offset, Stamps},
    error::{FleetError, Result},
    identity::{Fingerprint, Identity},
    link::Link,
    merge::Facts,
    message::{Answer, Arm, Ask, At, Measured, SCHEMA, Stage, State, Task, Welcome},
    wire::{ANSWER_BYTES_MAX, WireError},
};
use diskwright_load::{
    machine::Versions,
    record::{SUM_MAX, TargetRecord, check_phase},
    warning::Warning,
};
use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

/// Longest wait of a look.
const LOOK: Duration = Duration::from_millis(1000);
/// Time between two attempts to connect again.
const AGAIN: Duration = Duration::from_millis(200);
/// How long an agent is asked again that serves another controller.
const BUSY: Duration = Duration::from_secs(3);
/// How long an agent that dials is waited for at first.
const ARRIVES: Duration = Duration::from_secs(300);

/// An agent.
#[derive(Debug)]
pub struct Remote {
    wanted: Wanted,
    link: Option<Link>,
    peer: Fingerprint,
    /// Of an agent that dials: tells it from others with the same fingerprint.
    instance: String,
    /// Tells this controller from others with the same identity.
    own_instance: String,
    identity: Identity,
    lost_after: Duration,
    entrance: Option<Arc<Entrance>>,
    welcome: Welcome,
    clock: Option<AgentClock>,
    targets: Vec<TargetRecord>,
    warnings: Vec<Warning>,
    known: u64,
    pub(super) lost: Option<String>,
}

/// Whether an agent waits for an order.
fn is_ready(stage: &Stage) -> bool {
    matches!(stage, Stage::Prepared { .. } | Stage::Measured(_))
}

/// A connection that was greeted.
struct Greeted {
    link: Link,
    welcome: Welcome,
}

/// Dials an agent. An error has its name, too.
fn dial(identity: &Identity, agent: &str, address: &Address) -> Result<Link> {
    let named = |at: String| if at == agent { at } else { format!("{agent} ({at})") };
    Link::dial(identity, address).map_err(|error| match error {
        FleetError::Connect { name, source } => FleetError::Connect { name: named(name), source },
        FleetError::Peer { name, what } => FleetError::Peer { name: named(name), what },
        error => error,
    })
}

fn greet(wanted: &Wanted, mut link: Link, patience: Duration, own_instance: &str) -> Result<Greeted> {
    let name = || wanted.name.clone();
    let lost = |source| FleetError::Lost { name: name(), source };
    let token = match &wanted.way {
        Way::Dial(address) => address.token.as_ref(),
        Way::Await => None,
    };
    link.set_patience(patience).map_err(|error| lost(error.into()))?;
    link.send(&Ask::Hello(agent::hello(token, own_instance))).map_err(|error| lost(error.into()))?;
    match link.receive(ANSWER_BYTES_MAX).map_err(lost)? {
        Answer::Welcome(welcome) => {
            let own = Versions::detect().diskwright;
            if welcome.schema != SCHEMA || welcome.versions.diskwright != own {
                return Err(FleetError::Refused {
                    name: name(),
                    why: format!(
                        "it is version {} ({}), and this program is version {own} ({SCHEMA}); use the same version",
                        welcome.versions.diskwright, welcome.schema
                    ),
                });
            }
            Ok(Greeted { link, welcome: *welcome })
        }
        Answer::Busy { why } => Err(FleetError::Busy { name: name(), why }),
        Answer::Refused { why } => Err(FleetError::Refused { name: name(), why }),
        _ => Err(FleetError::Protocol { name: name(), what: "no welcome to the first message".into() }),
    }
}

impl Remote {
    pub(super) fn connect(
        wanted: Wanted,
        options: &FleetOptions,
        own_instance: &str,
        entrance: Option<Arc<Entrance>>,
    ) -> Result<Self> {
        let (link, instance) = match (&wanted.way, &entrance) {
            (Way::Dial(address), _) => (dial(&options.identity, &wanted.name, address)?, String::new()),
            (Way::Await, Some(entrance)) => entrance
                .next(None, ARRIVES)
                .map_err(|source| FleetError::Connect { name: wanted.name.clone(), source })?,
            (Way::Await, None) => {
                return Err(FleetError::Plan {
                    what: format!("{} dials, and nothing listens for it", wanted.name),
                    hint: "say where to listen".into(),
                });
            }
        };
        let peer = link.peer;
        let begun = Instant::now();
        let mut greeted = greet(&wanted, link, options.lost_after, own_instance);
        // The agent may not have noticed yet that an earlier controller has died.
        while let (Err(FleetError::Busy { .. }), Way::Dial(address)) = (&greeted, &wanted.way)
            && begun.elapsed() < BUSY
        {
            thread::sleep(AGAIN);
            let link = dial(&options.identity, &wanted.name, address)?;
            greeted = greet(&wanted, link, options.lost_after, own_instance);
        }
        let Greeted { link, welcome } = greeted?;
        Ok(Self {
            wanted,
            link: Some(link),
            peer,
            instance,
            own_instance: own_instance.to_owned(),
            identity: options.identity.clone(),
            lost_after: options.lost_after,
            entrance,
            welcome,
            clock: None,
            targets: Vec::new(),
            warnings: Vec::new(),
            known: 0,
            lost: None,
        })
    }

    /// Name of the agent in the plan.
    pub fn name(&self) -> &str {
        &self.wanted.name
    }

    /// Group of the agent in the plan.
    pub fn group(&self) -> &str {
        &self.wanted.group
    }

    /// SHA-256 of the agent's certificate.
    pub fn fingerprint(&self) -> Fingerprint {
        self.peer
    }

    /// Where the agent listens; `None` if the agent dials.
    pub fn place(&self) -> Option<&Place> {
        match &self.wanted.way {
            Way::Dial(address) => Some(&address.place),
            Way::Await => None,
        }
    }

    /// What the agent told about itself.
    pub fn welcome(&self) -> &Welcome {
        &self.welcome
    }

    /// The agent's targets; empty until they are prepared.
    pub fn targets(&self) -> &[TargetRecord] {
        &self.targets
    }

    /// Reasons to doubt the figures of these targets.
    pub fn warnings(&self) -> &[Warning] {
        &self.warnings
    }

    /// The agent's clock; `None` until clocks were compared.
    pub fn clock(&self) -> Option<&AgentClock> {
        self.clock.as_ref()
    }

    /// What the record of a run says about the agent.
    pub(super) fn facts(&self) -> Facts {
        Facts {
            name: self.name().to_owned(),
            group: self.group().to_owned(),
            fingerprint: self.peer.to_string(),
            machine: self.welcome.machine.clone(),
            boot_id: self.welcome.boot_id.clone(),
            versions: self.welcome.versions.clone(),
            targets: self.targets.clone(),
            warnings: self.warnings.clone(),
            clock: self.clock,
        }
    }

    pub(super) fn wanted_targets(&self) -> Vec<String> {
        self.wanted.targets.clone()
    }

    fn protocol(&self, what: impl Into<String>) -> FleetError {
        FleetError::Protocol { name: self.name().to_owned(), what: what.into() }
    }

    fn refused(&self, why: impl Into<String>) -> FleetError {
        FleetError::Refused { name: self.name().to_owned(), why: why.into() }
    }

    /// Sends a message and receives the answer, over the connection that is there.
    fn ask_once(&mut self, ask: &Ask) -> Result<Answer, WireError> {
        let Some(link) = &mut self.link else { return Err(WireError::Closed) };
        let answer = link.send(ask).map_err(WireError::from).and_then(|()| link.receive(ANSWER_BYTES_MAX));
        if answer.is_err() {
            // A late answer must not be taken for the one to the next message.
            self.link = None;
        }
        answer
    }

    /// Sends a message and receives the answer. A connection that breaks is made anew.
    pub(super) fn ask(&mut self, ask: &Ask) -> Result<Answer> {
        let begun = Instant::now();
        loop {
            let source = match self.ask_once(ask) {
                Ok(answer) => return Ok(answer),
                Err(WireError::NotUnderstood(error)) => return Err(self.protocol(format!("nonsense: {error}"))),
                Err(source @ WireError::TooLong { .. }) => return Err(self.protocol(source.to_string())),
                Err(source) => source,
            };
            while self.link.is_none() {
                let left = self.lost_after.saturating_sub(begun.elapsed());
                if left.is_zero() {
                    return Err(FleetError::Lost { name: self.name().to_owned(), source });
                }
                let link = match (&self.wanted.way, &self.entrance) {
                    (Way::Dial(address), _) => Link::dial(&self.identity, address).ok(),
                    (Way::Await, Some(entrance)) => {
                        entrance.next(Some((self.peer, &self.instance)), left).ok().map(|(link, _)| link)
                    }
                    (Way::Await, None) => None,
                };
                match link.map(|link| greet(&self.wanted, link, self.lost_after, &self.own_instance)) {
                    Some(Ok(greeted)) => self.link = Some(greeted.link),
                    Some(Err(refused @ (FleetError::Refused { .. } | FleetError::Protocol { .. }))) => {
                        return Err(refused);
                    }
                    Some(Err(_)) | None => thread::sleep(AGAIN.min(left)),
                }
            }
        }
    }

    /// Sends an order that must be carried out.
    pub(super) fn order(&mut self, ask: &Ask) -> Result<()> {
        match self.ask(ask)? {
            Answer::Done => Ok(()),
            Answer::Refused { why } => Err(self.refused(why)),
            _ => Err(self.protocol("a wrong answer to an order")),
        }
    }

    /// Waits for news. `interval`: the first interval that is not known.
    pub(super) fn look(&mut self, interval: u64) -> Result<State> {
        // The answer must come before the agent counts as silent.
        let wait = LOOK.min(self.lost_after / 3);
        let ask = Ask::Look { known: self.known, interval, wait_ms: wait.as_millis() as u32 };
        match self.ask(&ask)? {
            Answer::State(state) => {
                self.known = state.number;
                Ok(*state)
            }
            Answer::Refused { why } => Err(self.refused(why)),
            _ => Err(self.protocol("a wrong answer to a look")),
        }
    }

    /// Looks until the stage is one of those that `is_it` wants.
    fn look_until(&mut self, is_it: impl Fn(&Stage) -> bool) -> Result<Stage> {
        loop {
            let stage = self.look(u64::MAX)?.stage;
            if let Stage::Failed { why } = &stage {
                return Err(self.refused(why.clone()));
            }
            // It fails when the targets are closed.
            if stage != Stage::Closing && is_it(&stage) {
                return Ok(stage);
            }
        }
    }

    /// Compares clocks.
    pub(super) fn compare_clocks(&mut self) -> Result<()> {
        let mut found: Vec<Offset> = Vec::with_capacity(EXCHANGES);
        for _ in 0..EXCHANGES {
            let sent_ns = clock::now_ns();
            let answer = self.ask(&Ask::Clock { sent_ns })?;
            let back_ns = clock::now_ns();
            let Answer::Clock { received_ns, answered_ns } = answer else {
                return Err(self.protocol("no times to a comparison of clocks"));
            };
            found.extend(Stamps { sent_ns, received_ns, answered_ns, back_ns }.offset());
        }
        let best = clock::best(found).ok_or_else(|| self.protocol("times that contradict each other"))?;
        match &mut self.clock {
            Some(clock) => clock.compared(best),
            None => self.clock = Some(AgentClock::new(best)),
        }
        Ok(())
    }

    /// Ends a run that an earlier controller has left. A phase of `run` that runs is waited for,
    /// because its record is wanted.
    pub(super) fn make_free(&mut self, run: &str) -> Result<()> {
        let Some(old) = self.welcome.run.clone() else { return Ok(()) };
        if old == run {
            let is_over = |stage: &Stage| !matches!(stage, Stage::Running(_));
            while !is_over(&self.look(u64::MAX)?.stage) {}
        }
        self.finish(&old)
    }

    /// Opens, checks and fills its targets.
    pub(super) fn prepare(&mut self, task: Task, progress: &mut dyn FnMut(&str, u64, u64) -> bool) -> Result<()> {
        let run = task.run.clone();
        self.order(&Ask::Prepare(Box::new(task)))?;
        loop {
            match self.look(u64::MAX)?.stage {
                Stage::Prepared { targets, warnings } => {
                    if targets.is_empty() {
                        return Err(self.protocol("no targets"));
                    }
                    (self.targets, self.warnings) = (targets, warnings);
                    return Ok(());
                }
                Stage::Failed { why } => return Err(self.refused(why)),
                Stage::Preparing { doing, done, total } => {
                    if !progress(&doing, done, total) {
                        self.order(&Ask::Stop { run })?;
                        return Err(FleetError::Stopped);
                    }
                }
                _ => return Err(self.protocol("a state that does not follow the order to prepare")),
            }
        }
    }

    /// Opens the queues of a phase.
    pub(super) fn arm(&mut self, arm: Arm) -> Result<()> {
        let at = arm.at.clone();
        self.order(&Ask::Arm(Box::new(arm)))?;
        let stage = self.look_until(|stage| !matches!(stage, Stage::Arming(_)))?;
        if stage == Stage::Armed(at) {
            Ok(())
        } else {
            Err(self.protocol("a state that does not follow the order to arm"))
        }
    }

    /// Starts the phase that is armed, at a time of the controller's clock. Returns `false` if that
    /// time is over at the agent.
    pub(super) fn start(&mut self, at: &At, start_ns: u64) -> Result<bool> {
        let at_ns = self.clock.as_ref().map_or(start_ns, |clock| clock.to_agent_ns(start_ns));
        match self.ask(&Ask::Start { at: at.clone(), at_ns })? {
            Answer::Done => Ok(true),
            Answer::TooLate { .. } => Ok(false),
            Answer::Refused { why } => Err(self.refused(why)),
            _ => Err(self.protocol("a wrong answer to the order to start")),
        }
    }

    /// Lets the agent know that its controller is there.
    pub(super) fn stay(&mut self) {
        // If it is lost, the next order says so.
        let _ = self.ask(&Ask::Clock { sent_ns: clock::now_ns() });
    }

    /// Stops a phase that is armed, and waits until it is over.
    pub(super) fn disarm(&mut self, run: &str) -> Result<()> {
        self.order(&Ask::Stop { run: run.to_owned() })?;
        self.look_until(is_ready).map(|_| ())
    }

    /// The record of a phase; `None` if the agent does not have it. What it says is checked.
    pub(super) fn take(&mut self, at: &At) -> Result<Option<Measured>> {
        let measured = match self.ask(&Ask::Take { at: at.clone() })? {
            Answer::Measured(measured) => *measured,
            Answer::Refused { .. } => return Ok(None),
            _ => return Err(self.protocol("a wrong answer to the order to send a record")),
        };
        let mut left = SUM_MAX / AGENTS_MAX as u64;
        let targets = measured.run.as_ref().map_or(self.targets.len(), |run| run.targets.len());
        let checked = check_phase(&measured.phase, targets, &mut left);
        checked.map_err(|what| self.protocol(format!("a record that contradicts itself: {what}")))?;
        Ok(Some(measured))
    }

    pub(super) fn forget(&mut self, run: &str) -> Result<()> {
        self.order(&Ask::Forget { run: run.to_owned() })
    }

    /// Lets it close its targets, and waits until they are closed.
    pub(super) fn finish(&mut self, run: &str) -> Result<()> {
        self.order(&Ask::Finish { run: run.to_owned() })?;
        while self.look(u64::MAX)?.stage != Stage::Idle {}
        Ok(())
    }
}
