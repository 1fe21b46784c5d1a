//! What an agent does and holds: orders come in from connections, stages from the worker.
//!
//! ```text
//!   idle ─prepare─▶ preparing ─▶ prepared ─arm─▶ arming ─▶ armed ─start─▶ running ─▶ measured
//!    ▲                                ▲                                                 │
//!    │                                └───────────────── arm, next phase or cell ───────┤
//!    └──────────────── closing ◀─finish─────────────────────────────────────────────────┘
//! ```
//!
//! One lock guards everything here, and is never held during I/O. Each change of the stage raises
//! its number and wakes those who wait: a look, and the worker.

use crate::{
    clock,
    identity::Fingerprint,
    message::{Allowed, Answer, Arm, At, Measured, Stage, State, Task},
};
use diskwright_load::{
    record::IntervalRecord,
    run::{Coordinator, Snapshot, SnapshotRecord, Watch},
};
use std::{
    collections::VecDeque,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// Time after which a run without a controller is given up.
pub const ORPHANED: Duration = Duration::from_secs(60);
/// Time without a message after which a controller counts as lost.
pub(super) const SILENT: Duration = Duration::from_secs(30);
/// Records that are kept until the controller has them. Older ones are dropped: those of a
/// controller that never came back.
const HELD_MAX: usize = 64;
/// Intervals that are kept until the controller has seen them: an hour, with one a second.
const INTERVALS_MAX: usize = 3600;
/// Longest time that a look waits.
const WAIT_MAX: Duration = Duration::from_secs(5);

/// A record that the controller may not have yet.
#[derive(Debug)]
struct Held {
    at: At,
    measured: Measured,
}

/// The connection whose orders count.
#[derive(Debug)]
struct SessionOf {
    number: u64,
    peer: Fingerprint,
    instance: String,
}

/// The run of a controller.
#[derive(Debug)]
struct RunOf {
    id: String,
    owner: Fingerprint,
}

#[derive(Debug)]
enum Order {
    Prepare(Box<Task>),
    Arm(Box<Arm>),
    Finish,
}

/// What the worker shall do next.
#[derive(Debug)]
pub(super) enum Next {
    /// Open the queues of this phase.
    Arm(Box<Arm>),
    /// Close the targets.
    Finish,
}

#[derive(Debug)]
struct Inner {
    number: u64,
    stage: Stage,
    run: Option<RunOf>,
    order: Option<Order>,
    /// The phase that is armed or runs shall stop, or the preparation.
    is_stopped: bool,
    /// Start of the phase by the monotonic clock, once it is told.
    start_ns: Option<u64>,
    window_start_ns: Option<u64>,
    snapshot: Option<SnapshotRecord>,
    first_interval: u64,
    intervals: VecDeque<IntervalRecord>,
    held: VecDeque<Held>,
    session: Option<SessionOf>,
    sessions: u64,
    /// Since when there is no controller.
    alone_since: Instant,
    is_ended: bool,
    /// The worker has closed everything and ended.
    is_gone: bool,
    /// Time after which a run without a controller is given up.
    orphaned: Duration,
}

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Desk {
    inner: Mutex<Inner>,
    changed: Condvar,
    allowed: Vec<Allowed>,
}

/// An order that was not taken: why.
fn refused(why: impl Into<String>) -> Answer {
    Answer::Refused { why: why.into() }
}

impl Inner {
    fn enter(&mut self, stage: Stage) {
        self.stage = stage;
        self.number += 1;
    }

    fn is_run(&self, id: &str) -> bool {
        self.run.as_ref().is_some_and(|run| run.id == id)
    }

    fn is_orphaned(&self) -> bool {
        self.session.is_none() && self.alone_since.elapsed() >= self.orphaned
    }

    fn gives_up(&self) -> bool {
        self.is_ended || self.is_orphaned()
    }
}

impl Desk {
    pub(crate) fn new(allowed: Vec<Allowed>, orphaned: Duration) -> Self {
        let inner = Inner {
            number: 0,
            stage: Stage::Idle,
            run: None,
            order: None,
            is_stopped: false,
            start_ns: None,
            window_start_ns: None,
            snapshot: None,
            first_interval: 0,
            intervals: VecDeque::new(),
            held: VecDeque::new(),
            session: None,
            sessions: 0,
            alone_since: Instant::now(),
            is_ended: false,
            is_gone: false,
            orphaned,
        };
        Self { inner: Mutex::new(inner), changed: Condvar::new(), allowed }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a change, at most this long.
    fn wait<'a>(&self, inner: MutexGuard<'a, Inner>, most: Duration) -> MutexGuard<'a, Inner> {
        self.changed.wait_timeout(inner, most).unwrap_or_else(PoisonError::into_inner).0
    }

    /// The targets that may be measured.
    pub(super) fn allowed(&self) -> Vec<Allowed> {
        self.allowed.clone()
    }

    /// Begins a connection of an admitted controller. Returns its number and the run that is not
    /// finished.
    ///
    /// # Errors
    /// A sentence for the controller: another one is served.
    pub(crate) fn open_session(&self, peer: Fingerprint, instance: &str) -> Result<(u64, Option<String>), String> {
        let mut inner = self.lock();
        let is_other = |session: &&SessionOf| session.peer != peer || session.instance != instance;
        if let Some(SessionOf { peer: other, .. }) = inner.session.as_ref().filter(is_other) {
            return Err(format!(
                "a controller with the fingerprint {other} is served; one at a time. One that died without a word is \
                 given up after {} s",
                SILENT.as_secs()
            ));
        }
        let run = inner.run.as_ref();
        if let Some(run) = run.filter(|run| run.owner != peer) {
            return Err(format!(
                "a run of the controller with the fingerprint {} is not finished; it is given up {} s after the \
                 controller was lost",
                run.owner,
                inner.orphaned.as_secs()
            ));
        }
        inner.sessions += 1;
        // An older connection of the same controller has failed without a word.
        inner.session = Some(SessionOf { number: inner.sessions, peer, instance: instance.to_owned() });
        Ok((inner.sessions, inner.run.as_ref().map(|run| run.id.clone())))
    }

    /// Ends a connection.
    pub(super) fn close_session(&self, number: u64) {
        let mut inner = self.lock();
        if inner.session.as_ref().is_some_and(|session| session.number == number) {
            inner.session = None;
            inner.alone_since = Instant::now();
        }
    }

    /// Whether the orders of this connection count.
    pub(super) fn is_current(&self, number: u64) -> bool {
        let inner = self.lock();
        !inner.is_ended && inner.session.as_ref().is_some_and(|session| session.number == number)
    }

    /// Takes the order to prepare targets.
    pub(super) fn prepare(&self, peer: Fingerprint, task: Task) -> Answer {
        let mut inner = self.lock();
        match &inner.run {
            // The order came twice: the answer to the first one was lost.
            Some(run) if run.id == task.run => return Answer::Done,
            Some(run) => return refused(format!("the run {} is not finished", run.id)),
            None => {}
        }
        let unknown = task.targets.iter().find(|name| !self.allowed.iter().any(|allowed| allowed.name == **name));
        if let Some(name) = unknown {
            let names: Vec<&str> = self.allowed.iter().map(|allowed| allowed.name.as_str()).collect();
            return refused(format!("there is no target {name:?} here; there are {}", names.join(", ")));
        }
        inner.run = Some(RunOf { id: task.run.clone(), owner: peer });
        inner.is_stopped = false;
        inner.enter(Stage::Preparing { doing: "begin".into(), done: 0, total: 0 });
        inner.order = Some(Order::Prepare(Box::new(task)));
        self.changed.notify_all();
        Answer::Done
    }

    /// Takes the order to open the queues of a phase.
    pub(super) fn arm(&self, arm: Arm) -> Answer {
        let mut inner = self.lock();
        if !inner.is_run(&arm.at.run) {
            return refused("this run is not prepared here");
        }
        let follows = match &inner.stage {
            Stage::Arming(at) | Stage::Armed(at) if *at == arm.at => return Answer::Done,
            Stage::Prepared { .. } => arm.at.phase == 0,
            Stage::Measured(before) => {
                arm.at.phase == 0 || (before.cell, before.phase.saturating_add(1)) == (arm.at.cell, arm.at.phase)
            }
            _ => false,
        };
        if !follows || inner.order.is_some() {
            return refused("the phase cannot begin now: another one is not over, or it does not follow the last one");
        }
        (inner.is_stopped, inner.start_ns, inner.window_start_ns, inner.snapshot) = (false, None, None, None);
        inner.first_interval = 0;
        inner.intervals.clear();
        inner.enter(Stage::Arming(arm.at.clone()));
        inner.order = Some(Order::Arm(Box::new(arm)));
        self.changed.notify_all();
        Answer::Done
    }

    /// Takes the time of the start.
    pub(super) fn start(&self, at: &At, at_ns: u64) -> Answer {
        let mut inner = self.lock();
        match &inner.stage {
            Stage::Running(running) if running == at => return Answer::Done,
            Stage::Armed(armed) if armed == at => {}
            _ => return refused("the phase is not armed"),
        }
        let now_ns = clock::now_ns();
        if at_ns <= now_ns {
            return Answer::TooLate { now_ns };
        }
        inner.start_ns = Some(at_ns);
        inner.enter(Stage::Running(at.clone()));
        self.changed.notify_all();
        Answer::Done
    }

    /// Takes the start of the window.
    pub(super) fn window(&self, at: &At, start_ns: u64) -> Answer {
        let mut inner = self.lock();
        if !matches!(&inner.stage, Stage::Running(running) if running == at) {
            return refused("the phase does not run");
        }
        inner.window_start_ns.get_or_insert(start_ns);
        Answer::Done
    }

    /// The state, as soon as it differs from the one that is known.
    pub(super) fn look(&self, known: u64, interval: u64, wait: Duration) -> State {
        let until = Instant::now() + wait.min(WAIT_MAX);
        let mut inner = self.lock();
        // What the controller has seen is not needed any more.
        while inner.first_interval < interval && inner.intervals.pop_front().is_some() {
            inner.first_interval += 1;
        }
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if inner.number != known || !inner.intervals.is_empty() || left.is_zero() || inner.is_ended {
                return State {
                    number: inner.number,
                    stage: inner.stage.clone(),
                    snapshot: inner.snapshot,
                    first_interval: inner.first_interval,
                    intervals: inner.intervals.iter().cloned().collect(),
                };
            }
            inner = self.wait(inner, left);
        }
    }

    /// The record of a phase. It is kept.
    pub(super) fn take(&self, at: &At) -> Answer {
        let inner = self.lock();
        match inner.held.iter().find(|held| held.at == *at) {
            Some(held) => Answer::Measured(Box::new(held.measured.clone())),
            None => refused("the record of this phase is not here"),
        }
    }

    /// Forgets the records of a run.
    pub(super) fn forget(&self, run: &str) -> Answer {
        self.lock().held.retain(|held| held.at.run != run);
        Answer::Done
    }

    /// Stops what the run does.
    pub(super) fn stop(&self, run: &str) -> Answer {
        let mut inner = self.lock();
        if inner.is_run(run) {
            inner.is_stopped = true;
            self.changed.notify_all();
        }
        Answer::Done
    }

    /// Takes the order to close the targets. It stops what the run does.
    pub(super) fn finish(&self, run: &str) -> Answer {
        let mut inner = self.lock();
        if inner.is_run(run) {
            inner.is_stopped = true;
            match inner.stage {
                Stage::Failed { .. } => {
                    inner.run = None;
                    inner.enter(Stage::Idle);
                }
                _ => inner.order = Some(Order::Finish),
            }
            self.changed.notify_all();
        }
        Answer::Done
    }

    // What follows is for the worker.

    /// Waits for a task; `None`: the agent ends.
    pub(super) fn next_task(&self) -> Option<Task> {
        let mut inner = self.lock();
        loop {
            if inner.is_ended {
                inner.is_gone = true;
                self.changed.notify_all();
                return None;
            }
            match inner.order.take() {
                Some(Order::Prepare(task)) => return Some(*task),
                Some(_) => {}
                // A run that failed and whose controller is lost.
                None if inner.run.is_some() && inner.is_orphaned() => {
                    inner.run = None;
                    inner.enter(Stage::Idle);
                }
                None => inner = self.wait(inner, Duration::from_secs(1)),
            }
        }
    }

    /// Tells how far the preparation is. Whether it goes on.
    pub(super) fn preparing(&self, doing: &str, done: u64, total: u64) -> bool {
        let mut inner = self.lock();
        let goes_on = !inner.is_stopped && !inner.gives_up();
        inner.enter(Stage::Preparing { doing: doing.to_owned(), done, total });
        goes_on
    }

    /// Enters a stage.
    pub(super) fn enter(&self, stage: Stage) {
        self.lock().enter(stage);
        self.changed.notify_all();
    }

    /// Waits for the next order of the run.
    pub(super) fn next(&self) -> Next {
        let mut inner = self.lock();
        loop {
            if inner.gives_up() {
                return Next::Finish;
            }
            match inner.order.take() {
                Some(Order::Arm(arm)) => return Next::Arm(arm),
                Some(Order::Finish) => return Next::Finish,
                Some(Order::Prepare(_)) | None => {}
            }
            inner = self.wait(inner, Duration::from_secs(1));
        }
    }

    /// Keeps the record of a phase that has ended. Its start is that which was told.
    pub(super) fn measured(&self, at: At, mut measured: Measured) {
        let mut inner = self.lock();
        measured.start_ns = inner.start_ns.unwrap_or(0);
        // A phase that could not be started is tried again.
        inner.held.retain(|held| held.at != at);
        inner.held.push_back(Held { at: at.clone(), measured });
        while inner.held.len() > HELD_MAX {
            inner.held.pop_front();
        }
        inner.enter(Stage::Measured(at));
        self.changed.notify_all();
    }

    /// The targets are closed: the run is over, or it has failed.
    pub(super) fn closed(&self, why: Option<String>) {
        let mut inner = self.lock();
        match why.filter(|_| !inner.gives_up() && !matches!(inner.order, Some(Order::Finish))) {
            Some(why) => inner.enter(Stage::Failed { why }),
            None => {
                inner.run = None;
                inner.order = None;
                inner.enter(Stage::Idle);
            }
        }
        self.changed.notify_all();
    }

    // What follows is for the one who started the agent.

    pub(super) fn is_ended(&self) -> bool {
        self.lock().is_ended
    }

    /// Waits, unless the agent ends.
    pub(super) fn rest(&self, most: Duration) {
        let until = Instant::now() + most;
        let mut inner = self.lock();
        while !inner.is_ended && Instant::now() < until {
            inner = self.wait(inner, until.saturating_duration_since(Instant::now()));
        }
    }

    /// Ends the agent, and waits until the worker has closed the targets.
    pub(super) fn end(&self) {
        let mut inner = self.lock();
        inner.is_ended = true;
        self.changed.notify_all();
        while !inner.is_gone {
            inner = self.wait(inner, Duration::from_secs(1));
        }
    }
}

/// The phase that is armed starts at the time that the controller tells.
impl Coordinator for Desk {
    fn start(&self) -> Option<Instant> {
        let mut inner = self.lock();
        if let Stage::Arming(at) = inner.stage.clone() {
            inner.enter(Stage::Armed(at));
            self.changed.notify_all();
        }
        loop {
            if inner.is_stopped || inner.gives_up() {
                return None;
            }
            if let Some(start_ns) = inner.start_ns {
                let start = clock::instant_at(start_ns);
                let left = start.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Some(start);
                }
                inner = self.wait(inner, left);
            } else {
                inner = self.wait(inner, Duration::from_secs(1));
            }
        }
    }

    fn window_start_ns(&self) -> Option<u64> {
        self.lock().window_start_ns
    }
}

impl Watch for Desk {
    fn update(&self, snapshot: &Snapshot<'_>) -> bool {
        let mut inner = self.lock();
        inner.snapshot = Some(SnapshotRecord::of(snapshot));
        // Without a controller nobody opens the window of a phase that waits for the steady state.
        !(inner.is_stopped || inner.is_ended || inner.is_orphaned() && snapshot.steady.is_some())
    }

    fn interval(&self, interval: IntervalRecord) {
        let mut inner = self.lock();
        inner.intervals.push_back(interval);
        if inner.intervals.len() > INTERVALS_MAX {
            inner.intervals.pop_front();
            inner.first_interval += 1;
        }
        self.changed.notify_all();
    }

    fn wants_intervals(&self) -> bool {
        true
    }
}
