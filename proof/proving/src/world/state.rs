//! The state of a [`World`]: names, contents, history, and what is planned to fail.

use crate::{
    contents::Change,
    fault::{Fault, FaultKind, Met, OpKind},
    history::{CLOCK_STEP_SECONDS, Event, FileId, NameChange, Snapshot},
    mutation::{Mutation, Phase},
};
use diskwright_store::{
    Files, LaneOp, Loan, LockMode, Store,
    sync::{Mutex, MutexGuard, thread},
};
use std::{
    collections::BTreeMap,
    fmt, io,
    sync::{Arc, PoisonError},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// The device number of all files.
pub(super) const DEVICE: u64 = 77;

/// The modification time of all files, or with [`World::keep_times`] that before the first change.
pub(super) fn first_time() -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(1_700_000_000)
}

/// Called on the syncing thread before a sync takes effect, with no lock held.
pub type SyncHook = Box<dyn FnMut() + Send>;

/// The file system. Clones share their state.
#[derive(Clone, Default)]
pub struct World(Arc<Inner>);

#[derive(Default)]
struct Inner {
    state: Mutex<State>,
    hook: Mutex<Option<SyncHook>>,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) now: Snapshot,
    pub(super) locks: BTreeMap<FileId, Holders>,
    /// Number of kills. Handles from before a kill fail.
    pub(super) life: u64,
    /// What was durable when the recording began.
    pub(super) start: Snapshot,
    pub(super) history: Vec<Event>,
    pub(super) phase: Option<Phase>,
    /// Syncs so far in this phase.
    pub(super) syncs_in_phase: u32,
    /// The most syncs in any phase of each kind.
    pub(super) syncs_seen: BTreeMap<Phase, u32>,
    /// Files whose syncs were left out and are made up for when the phase ends.
    pub(super) owes: Vec<FileId>,
    pub(super) mutation: Option<Mutation>,
    /// How often the mutation has changed the outcome of an operation.
    pub(super) mutated: u64,
    pub(super) fault: Option<Fault>,
    /// The operations since a fault was planned.
    pub(super) operations: Vec<Met>,
    /// How often the fault has occurred.
    pub(super) struck: u64,
    pub(super) last_strike: Option<(FaultKind, OpKind, Option<Phase>)>,
    /// The first file in which the fault occurred.
    pub(super) struck_file: Option<FileId>,
    /// Seed of the lanes that answer late; `None` for stores without lanes.
    pub(super) late: Option<u64>,
    /// Operations of lanes since a fault was planned.
    pub(super) lane_operations: u64,
    /// Operations that are never answered.
    pub(super) silent: Vec<Silent>,
}

impl State {
    /// The file has changed just now.
    pub(super) fn go_on(&mut self, file: FileId) {
        let Some(times) = &mut self.now.times else { return };
        times.clock_seconds += CLOCK_STEP_SECONDS;
        let now = times.clock_seconds;
        times.modified_seconds.insert(file, now);
        self.history.push(Event::Timed(file, now));
    }
}

/// An operation that is never answered, with its memory.
pub(super) struct Silent {
    pub(super) below: Box<dyn Store>,
    pub(super) op: LaneOp,
    pub(super) loan: Loan,
}

/// A suspended fault, see [`World::suspend`].
#[derive(Debug, Clone, Copy)]
pub struct Suspended(Option<Fault>, usize);

/// Who has locked a file.
#[derive(Clone, Copy, Default)]
pub(super) struct Holders {
    pub(super) readers: u32,
    pub(super) writer: bool,
}

impl Holders {
    /// With one more holder; `None` if the others do not allow that.
    pub(super) fn with(self, lock: LockMode) -> Option<Self> {
        match lock {
            LockMode::None => Some(self),
            LockMode::Shared => (!self.writer).then_some(Self { readers: self.readers + 1, ..self }),
            LockMode::Exclusive => (!self.writer && self.readers == 0).then_some(Self { writer: true, ..self }),
        }
    }

    /// Without the holder of such a lock.
    pub(super) fn without(self, lock: LockMode) -> Self {
        match lock {
            LockMode::None => self,
            LockMode::Shared => Self { readers: self.readers.saturating_sub(1), ..self },
            LockMode::Exclusive => Self { writer: false, ..self },
        }
    }
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "World of {} files", self.state().now.names.len())
    }
}

impl World {
    /// A world with these files, which are durable.
    pub fn of(snapshot: Snapshot) -> Self {
        let world = Self::default();
        world.state().now = snapshot;
        world.settle();
        world
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The world as [`Files`].
    pub fn files(&self) -> Files {
        Files::new(Arc::new(self.clone()))
    }

    /// Makes everything durable, and starts a new history.
    pub fn settle(&self) {
        let mut state = self.state();
        state.start = state.now.clone();
        state.history.clear();
    }

    /// All files as the code under test sees them.
    pub fn snapshot(&self) -> Snapshot {
        self.state().now.clone()
    }

    /// The files that were durable when the history began, and the history.
    pub fn history(&self) -> (Snapshot, Vec<Event>) {
        let state = self.state();
        (state.start.clone(), state.history.clone())
    }

    /// Records in the history that truth number `truth` holds from now on.
    pub fn record_truth(&self, truth: usize) {
        self.state().history.push(Event::Truth(truth));
    }

    /// Kills the process that has files open: its handles fail from now on, and its locks are
    /// released. Its writes stay in the page cache.
    pub fn kill(&self) {
        let mut state = self.state();
        state.life += 1;
        state.locks.clear();
    }

    /// Sets a function that is called before each sync takes effect.
    pub fn set_hook(&self, hook: Option<SyncHook>) {
        *self.0.hook.lock().unwrap_or_else(PoisonError::into_inner) = hook;
    }

    /// Breaks a rule from now on; `None` ends that.
    pub fn mutate(&self, mutation: Option<Mutation>) {
        self.state().mutation = mutation;
    }

    /// Whether this rule is broken. If so, counts that it has changed an outcome.
    pub(super) fn breaks(&self, mutation: Mutation) -> bool {
        let mut state = self.state();
        let breaks = state.mutation == Some(mutation);
        state.mutated += u64::from(breaks);
        breaks
    }

    /// How often the broken rule has changed the outcome of an operation.
    pub fn mutated(&self) -> u64 {
        self.state().mutated
    }

    /// Begins a phase, and ends the previous one.
    pub fn phase(&self, phase: Option<Phase>) {
        let mut state = self.state();
        for file in std::mem::take(&mut state.owes) {
            state.history.push(Event::Synced(file));
        }
        state.phase = phase;
        state.syncs_in_phase = 0;
    }

    /// The most syncs in any phase of each kind.
    pub fn syncs_seen(&self) -> BTreeMap<Phase, u32> {
        self.state().syncs_seen.clone()
    }

    /// Plans a fault, and starts to count operations.
    pub fn plan(&self, fault: Option<Fault>) {
        let mut state = self.state();
        (state.fault, state.struck, state.last_strike) = (fault, 0, None);
        (state.struck_file, state.lane_operations) = (None, 0);
        state.operations.clear();
    }

    /// Disables the fault and the counting until [`World::resume`].
    pub fn suspend(&self) -> Suspended {
        let mut state = self.state();
        Suspended(state.fault.take(), state.operations.len())
    }

    /// Enables the fault again.
    pub fn resume(&self, suspended: Suspended) {
        let mut state = self.state();
        state.fault = suspended.0;
        state.operations.truncate(suspended.1);
    }

    /// The operations since the last [`World::plan`], in order.
    pub fn operations(&self) -> Vec<Met> {
        self.state().operations.clone()
    }

    /// How often the planned fault has occurred, and its last occurrence.
    pub fn strikes(&self) -> (u64, Option<(FaultKind, OpKind, Option<Phase>)>) {
        let state = self.state();
        (state.struck, state.last_strike)
    }

    /// Whether any file is open.
    pub fn is_open(&self) -> bool {
        self.state().locks.values().any(|holders| holders.writer || holders.readers > 0)
    }

    /// Counts an operation. Returns how it must fail.
    pub(super) fn meet_fault(&self, op_kind: OpKind, file: Option<FileId>) -> Option<FaultKind> {
        let kind = {
            let mut state = self.state();
            let phase = state.phase;
            state.operations.push((op_kind, phase));
            let number = state.operations.len() as u64;
            let same_file = file.is_some() && file == state.struck_file;
            let kind = state.fault.as_ref().and_then(|fault| fault.strikes(number, op_kind, same_file))?;
            state.struck += 1;
            state.struck_file = state.struck_file.or(file);
            state.last_strike = Some((kind, op_kind, state.phase));
            kind
        };
        if kind == FaultKind::Slow {
            thread::sleep(Duration::from_millis(1));
            return None;
        }
        Some(kind)
    }

    /// Makes a file's changes durable, and with `with_time` its modification time.
    pub(super) fn sync(&self, file: FileId, life: u64, with_time: bool) -> io::Result<()> {
        let hook = self.0.hook.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(mut hook) = hook {
            hook();
            self.0.hook.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(hook);
        }
        self.check_alive(life)?;
        if let Some(kind) = self.meet_fault(OpKind::Sync, Some(file)) {
            self.state().history.push(Event::SyncFailed(file));
            return Err(kind.error());
        }
        let mut state = self.state();
        state.syncs_in_phase += 1;
        let number = state.syncs_in_phase;
        if let Some(phase) = state.phase {
            let most = state.syncs_seen.entry(phase).or_default();
            *most = (*most).max(number);
            if let Some(mutation) = state.mutation
                && let Some(made_up_for) = mutation.leaves_out(phase, number, file)
            {
                state.mutated += 1;
                if made_up_for {
                    state.owes.push(file);
                }
                return Ok(());
            }
        }
        state.history.push(Event::Synced(file));
        if with_time && state.now.times.is_some() {
            state.history.push(Event::TimeSynced(file));
        }
        Ok(())
    }

    pub(super) fn check_alive(&self, life: u64) -> io::Result<()> {
        if self.state().life == life { Ok(()) } else { Err(io::Error::other("the process was killed")) }
    }

    pub(super) fn change(&self, file: FileId, change: Change) {
        let mut state = self.state();
        if state.mutation.is_some_and(|mutation| mutation.drops(&change, state.now.files.get(&file))) {
            state.mutated += 1;
            return;
        }
        if let Some(contents) = state.now.files.get_mut(&file) {
            contents.apply(&change);
        }
        state.history.push(Event::Changed(file, change));
        state.go_on(file);
    }

    /// Gives every file the time of its last change, by a clock that goes on with each change.
    /// Before that all files have one constant time.
    pub fn keep_times(&self) {
        self.state().now.times.get_or_insert_default();
    }

    /// Sets the time of a file's last change, in the page cache.
    ///
    /// # Errors
    /// `Unsupported` if the world keeps no times; after a kill.
    pub(super) fn set_modified(&self, file: FileId, life: u64, seconds: u64) -> io::Result<()> {
        self.check_alive(life)?;
        let mut state = self.state();
        let times = state.now.times.as_mut().ok_or(io::ErrorKind::Unsupported)?;
        times.modified_seconds.insert(file, seconds);
        state.history.push(Event::Timed(file, seconds));
        Ok(())
    }

    pub(super) fn name(&self, change: NameChange) {
        let mut state = self.state();
        change.apply(&mut state.now.names);
        state.history.push(Event::Named(change));
    }

    /// If a seed is given, stores that are opened from now on have a lane that answers late.
    pub fn answer_late(&self, seed: Option<u64>) {
        self.state().late = seed;
    }

    /// Operations of lanes since the last [`World::plan`].
    pub fn lane_operations(&self) -> u64 {
        self.state().lane_operations
    }

    /// Counts an operation of a lane. Returns whether it is never answered.
    pub(super) fn falls_silent(&self) -> bool {
        let mut state = self.state();
        state.lane_operations += 1;
        let number = state.lane_operations;
        let falls = state.fault.as_ref().is_some_and(|fault| fault.silences(number));
        state.struck += u64::from(falls);
        falls
    }
}
