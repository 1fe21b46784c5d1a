//! A file system in memory that records all operations and can be told to fail.
//!
//! ```text
//!   code under test ─▶ Files, Store ─▶ World ─┬─ what the code sees    all of its changes
//!                                             ├─ history               all changes, syncs ─▶ cut
//!                                             ├─ faults                at the n-th operation
//!                                             └─ broken rules          see `mutation`
//! ```
//!
//! There is no data file, so the engine writes payload through the store's methods, and it is
//! recorded too. With [`World::answer_late`], payload goes through lanes (`late.rs`), which call
//! the same methods in another order, or never. One mutex guards everything. There are no real
//! directories: a directory exists if a path in it exists.

mod late;
mod store;

pub use late::Afterwards;

use crate::{
    contents::{Change, Contents},
    fault::{Fault, FaultKind, OpKind},
    history::{Event, FileId, NameChange, Snapshot},
    mutation::{Mutation, Phase},
};
use diskwright_store::{
    FileFacts, FileSystem, Files, LockMode, OpenError, OpenOptions, Store,
    sync::{Mutex, MutexGuard, thread},
};
use late::{LateLane, Silent};
use std::{
    collections::BTreeMap,
    fmt, io,
    path::{Component, Path, PathBuf},
    sync::{Arc, PoisonError},
    time::{Duration, UNIX_EPOCH},
};
use store::WorldStore;

/// The device number of all files.
const DEVICE: u64 = 77;

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
struct State {
    now: Snapshot,
    locks: BTreeMap<FileId, Holders>,
    /// Number of kills. Handles from before a kill fail.
    life: u64,
    /// What was durable when the recording began.
    start: Snapshot,
    history: Vec<Event>,
    phase: Option<Phase>,
    /// Syncs so far in this phase.
    syncs_in_phase: u32,
    /// The most syncs in any phase of each kind.
    syncs_seen: BTreeMap<Phase, u32>,
    /// Files whose syncs were left out and are made up for when the phase ends.
    owes: Vec<FileId>,
    mutation: Option<Mutation>,
    /// How often the mutation has changed the outcome of an operation.
    mutated: u64,
    fault: Option<Fault>,
    /// Operations since a fault was planned.
    operations: u64,
    /// How often the fault has occurred.
    struck: u64,
    last_strike: Option<(FaultKind, OpKind, Option<Phase>)>,
    /// The first file in which the fault occurred.
    struck_file: Option<FileId>,
    /// Seed of the lanes that answer late; `None` for stores without lanes.
    late: Option<u64>,
    /// Operations of lanes since a fault was planned.
    lane_operations: u64,
    /// Operations that are never answered.
    silent: Vec<Silent>,
}

/// A suspended fault, see [`World::suspend`].
#[derive(Debug, Clone, Copy)]
pub struct Suspended(Option<Fault>, u64);

#[derive(Default)]
struct Holders {
    readers: u32,
    writer: bool,
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

    fn state(&self) -> MutexGuard<'_, State> {
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
    fn breaks(&self, mutation: Mutation) -> bool {
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
        (state.fault, state.operations, state.struck, state.last_strike) = (fault, 0, 0, None);
        (state.struck_file, state.lane_operations) = (None, 0);
    }

    /// Disables the fault and the counting until [`World::resume`].
    pub fn suspend(&self) -> Suspended {
        let mut state = self.state();
        Suspended(state.fault.take(), state.operations)
    }

    /// Enables the fault again.
    pub fn resume(&self, suspended: Suspended) {
        let mut state = self.state();
        (state.fault, state.operations) = (suspended.0, suspended.1);
    }

    /// Operations since the last [`World::plan`].
    pub fn operations(&self) -> u64 {
        self.state().operations
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
    fn meet_fault(&self, op_kind: OpKind, file: Option<FileId>) -> Option<FaultKind> {
        let kind = {
            let mut state = self.state();
            state.operations += 1;
            let number = state.operations;
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

    fn sync(&self, file: FileId, life: u64) -> io::Result<()> {
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
        Ok(())
    }

    fn check_alive(&self, life: u64) -> io::Result<()> {
        if self.state().life == life { Ok(()) } else { Err(io::Error::other("the process was killed")) }
    }

    fn change(&self, file: FileId, change: Change) {
        let mut state = self.state();
        if state.mutation.is_some_and(|mutation| mutation.drops(&change, state.now.files.get(&file))) {
            state.mutated += 1;
            return;
        }
        if let Some(contents) = state.now.files.get_mut(&file) {
            contents.apply(&change);
        }
        state.history.push(Event::Changed(file, change));
    }

    fn name(&self, change: NameChange) {
        let mut state = self.state();
        change.apply(&mut state.now.names);
        state.history.push(Event::Named(change));
    }
}

/// The path without `.` and `..` components.
fn plain(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(plain.pop()),
            Component::CurDir => {}
            other => plain.push(other),
        }
    }
    plain
}

fn not_found() -> io::Error {
    io::Error::from_raw_os_error(2)
}

impl FileSystem for World {
    fn open(&self, path: &Path, options: &OpenOptions) -> Result<Arc<dyn Store>, OpenError> {
        let path = plain(path);
        let failed = |source| OpenError::Io { doing: "open", path: path.clone(), source };
        let known = self.state().now.names.get(&path).copied();
        let file = match (known, options.create_new) {
            (Some(file), false) => file,
            (None, true) => {
                if let Some(kind) = self.meet_fault(OpKind::Name, None) {
                    return Err(failed(kind.error()));
                }
                let file = {
                    let mut state = self.state();
                    let file = state.now.files.keys().chain(state.start.files.keys()).max().map_or(0, |last| last + 1);
                    state.now.files.insert(file, Contents::default());
                    file
                };
                self.name(NameChange::Make(path.clone(), file));
                file
            }
            (Some(_), true) => return Err(failed(io::Error::from_raw_os_error(17))),
            (None, false) => return Err(failed(not_found())),
        };
        let mut state = self.state();
        let holders = state.locks.entry(file).or_default();
        let refused = match options.lock {
            LockMode::None => false,
            LockMode::Shared => holders.writer,
            LockMode::Exclusive => holders.writer || holders.readers > 0,
        };
        if refused {
            let purpose = if options.writable { "writing" } else { "reading" };
            return Err(OpenError::Locked { path, purpose, holder: " by this test".into() });
        }
        match options.lock {
            LockMode::None => {}
            LockMode::Shared => holders.readers += 1,
            LockMode::Exclusive => holders.writer = true,
        }
        let (life, late) = (state.life, state.late);
        drop(state);
        let (world, writable, lock) = (self.clone(), options.writable, options.lock);
        let mut store =
            WorldStore { world, name: path.clone(), file, writable, lock, shares: false.into(), life, lane: None };
        if let Some(seed) = late {
            store.lane = Some(Arc::new(LateLane::new(store.unlocked(), seed).map_err(failed)?));
        }
        Ok(Arc::new(store))
    }

    fn rename(&self, from: &Path, to: &Path, replace: bool) -> io::Result<()> {
        let (from, to) = (plain(from), plain(to));
        if let Some(kind) = self.meet_fault(OpKind::Name, None) {
            return Err(kind.error());
        }
        let file = {
            let state = self.state();
            if !replace && state.now.names.contains_key(&to) {
                return Err(io::Error::from_raw_os_error(17));
            }
            state.now.names.get(&from).copied().ok_or_else(not_found)?
        };
        self.name(NameChange::Move(from, to, file));
        Ok(())
    }

    fn link(&self, existing: &Path, new: &Path) -> io::Result<()> {
        let (existing, new) = (plain(existing), plain(new));
        if let Some(kind) = self.meet_fault(OpKind::Name, None) {
            return Err(kind.error());
        }
        let file = {
            let state = self.state();
            if state.now.names.contains_key(&new) {
                return Err(io::Error::from_raw_os_error(17));
            }
            state.now.names.get(&existing).copied().ok_or_else(not_found)?
        };
        self.name(NameChange::Make(new, file));
        Ok(())
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        let path = plain(path);
        if let Some(kind) = self.meet_fault(OpKind::Name, None) {
            return Err(kind.error());
        }
        if !self.state().now.names.contains_key(&path) {
            return Err(not_found());
        }
        self.name(NameChange::Remove(path));
        Ok(())
    }

    fn sync_directory_of(&self, path: &Path) -> io::Result<()> {
        let path = plain(path);
        if let Some(kind) = self.meet_fault(OpKind::Name, None) {
            return Err(kind.error());
        }
        let mut state = self.state();
        if state.mutation == Some(Mutation::NoDirectorySync) {
            state.mutated += 1;
            return Ok(());
        }
        state.history.push(Event::DirectorySynced(path.parent().unwrap_or(Path::new("/")).to_owned()));
        Ok(())
    }

    fn canonical(&self, path: &Path) -> io::Result<PathBuf> {
        let path = plain(path);
        let state = self.state();
        let is_there = state.now.names.keys().chain(state.start.names.keys()).any(|name| name.starts_with(&path));
        if is_there || path == Path::new("/") { Ok(path) } else { Err(not_found()) }
    }

    fn facts(&self, path: &Path) -> io::Result<FileFacts> {
        let file = self.state().now.names.get(&plain(path)).copied().ok_or_else(not_found)?;
        // Always the same, because a child stores the modification time of its parent.
        let modified = UNIX_EPOCH + Duration::from_secs(1_700_000_000);
        Ok(FileFacts { identity: (DEVICE, file as u64 + 1), modified: Some(modified) })
    }

    fn list(&self, directory: &Path) -> io::Result<Vec<PathBuf>> {
        let directory = plain(directory);
        Ok(self.state().now.names.keys().filter(|name| name.parent() == Some(&directory)).cloned().collect())
    }
}
