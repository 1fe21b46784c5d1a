//! Pushes and prunes of one repository at the same time, on a server that fails.
//!
//! ```text
//!   process 1 ─ push ──┐
//!   process 2 ─ push ──┼─ each waits for its turn ─▶ Turns ─▶ MemoryRemote
//!   process 3 ─ prune ─┘        one request at a time, in an order that the dice give
//! ```
//!
//! Before each request the dice decide: whose turn it is; whether hours go by; whether the process
//! dies; whether its request fails, without effect, with its effect, or with an effect that comes
//! later. A request that has waited for hours is refused, as S3 does it. So a run is one of the
//! orders in which the requests of real processes may reach a server.
//!
//! What must hold after every request: each manifest that is there has all its chunks. At the end:
//! a push that has succeeded has its disk there, with its bytes; of two pushes of one name at most
//! one has; and when all is over, two prunes a day later leave nothing that no disk has.
//!
//! [`Broken`] names the rules on which this rests. Each can be broken, and then a run must fail.

use crate::dice::Dice;
use diskwright_object::{
    ObjectError, Result,
    repository::{ChunkKey, Listed, Manifest, PruneOptions, PushOptions, Remote, disks, prune, push},
    testing::MemoryRemote,
};
use diskwright_store::{EngineKind, MemoryStore, RawDevice};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

const HOUR: Duration = Duration::from_secs(3600);
const CHUNK: usize = 4 << 20;
/// A request that was signed so long ago is refused: AWS Signature Version 4,
/// "RequestTimeTooSkewed".
const OLD: Duration = Duration::from_secs(900);

/// A rule that is broken on purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Broken {
    /// A push counts on chunks that are condemned.
    CondemnedChunksAreUsed,
    /// A prune does not look for pushes.
    PushesAreNotWaitedFor,
    /// A prune deletes by the manifests that it has read first.
    ManifestsAreReadOnce,
    /// A push does not say that it is under way.
    PushesAreSilent,
    /// A push goes on although it may have been taken for dead.
    LeasesAreNotWatched,
    /// A manifest is written over another one.
    NamesAreNotExclusive,
}

/// All rules.
pub const RULES: [Broken; 6] = [
    Broken::CondemnedChunksAreUsed,
    Broken::PushesAreNotWaitedFor,
    Broken::ManifestsAreReadOnce,
    Broken::PushesAreSilent,
    Broken::LeasesAreNotWatched,
    Broken::NamesAreNotExclusive,
];

/// A request of which the server has said that it failed, and which it carries out later.
#[derive(Debug)]
enum Late {
    Put(String, Vec<u8>),
    PutNew(String, Vec<u8>),
    Delete(Vec<String>),
}

#[derive(Debug)]
struct State {
    dice: Dice,
    /// Processes that wait for their turn.
    waiting: BTreeSet<usize>,
    /// Processes that have not ended.
    running: BTreeSet<usize>,
    turn: Option<usize>,
    /// Whose turn it was.
    last: Option<usize>,
    late: Vec<Late>,
    /// How many of 1,000 requests fail, and before how many time goes by.
    failing: u64,
    passing: u64,
    failure: Option<String>,
}

/// The server, and whose turn it is.
#[derive(Debug)]
struct Turns {
    remote: MemoryRemote,
    state: Mutex<State>,
    changed: Condvar,
    broken: Option<Broken>,
}

impl Turns {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives turns until all processes have ended.
    fn drive(&self) {
        let mut state = self.state();
        loop {
            while state.turn.is_some() || state.waiting.len() < state.running.len() {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            if state.running.is_empty() {
                return;
            }
            self.pass_time(&mut state);
            if state.failure.is_none() {
                state.failure = self.lost_chunk();
            }
            let waiting: Vec<usize> = state.waiting.iter().copied().collect();
            // A process often makes many requests before another one makes its next.
            let goes_on = state.last.filter(|last| waiting.contains(last));
            let goes_on = goes_on.filter(|_| state.dice.below(8) > 0);
            let chosen = goes_on.unwrap_or_else(|| *state.dice.pick(&waiting));
            (state.turn, state.last) = (Some(chosen), Some(chosen));
            self.changed.notify_all();
        }
    }

    /// Between two requests: time may go by, and what the server does late may happen.
    fn pass_time(&self, state: &mut State) {
        if state.dice.below(1000) < state.passing {
            let hours = *state.dice.pick(&[1, 7, 13, 25]);
            self.remote.advance(HOUR * hours);
            // No request is under way for so long.
            while let Some(late) = state.late.pop() {
                self.carry_out(late);
            }
        }
        if !state.late.is_empty() && state.dice.below(4) == 0 {
            let at = state.dice.below(state.late.len() as u64) as usize;
            let late = state.late.swap_remove(at);
            self.carry_out(late);
        }
    }

    fn carry_out(&self, late: Late) {
        // The server in memory does not fail.
        let _ = match late {
            Late::Put(key, bytes) => self.remote.put(&key, bytes),
            Late::PutNew(key, bytes) => self.remote.put_new(&key, bytes).map(|_| ()),
            Late::Delete(keys) => self.remote.delete(&keys),
        };
    }

    /// A manifest that lacks a chunk.
    fn lost_chunk(&self) -> Option<String> {
        let objects = self.remote.objects();
        let manifests = objects.iter().filter(|(key, _)| !key.contains('/'));
        for (name, bytes) in manifests {
            let Ok(manifest) = Manifest::of_bytes(bytes) else { return Some(format!("{name} is damaged")) };
            if let Some(chunk) = manifest.chunks().iter().find(|chunk| !objects.contains_key(&chunk.key.to_string())) {
                return Some(format!("{name} lacks the chunk {}", chunk.key));
            }
        }
        None
    }
}

/// What a process sees of the server.
struct Process {
    turns: Arc<Turns>,
    number: usize,
    is_prune: bool,
    /// It makes so many requests, and dies.
    left: Mutex<Option<u64>>,
    /// The first list of manifests, for a rule that is broken.
    manifests: Mutex<Option<Vec<Listed>>>,
    begun: Duration,
}

impl fmt::Debug for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {}", self.number)
    }
}

/// How a request goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Good,
    /// It fails, and has no effect.
    Refused,
    /// It fails, and has its effect.
    Unanswered,
    /// It fails, and has its effect later.
    Late,
}

impl Process {
    fn failed<T>(&self, key: &str) -> Result<T> {
        Err(ObjectError::Failed { name: self.name_of(key), said: "as the dice say".into() })
    }

    fn is_broken(&self, rule: Broken) -> bool {
        self.turns.broken == Some(rule)
    }

    /// Waits for the turn of this process.
    fn turn(&self) -> MutexGuard<'_, State> {
        let mut state = self.turns.state();
        state.waiting.insert(self.number);
        self.turns.changed.notify_all();
        while state.turn != Some(self.number) {
            state = self.turns.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.waiting.remove(&self.number);
        state
    }

    /// How the next request goes, when it is the turn of this process.
    fn fate(&self) -> Fate {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        if *left == Some(0) {
            return Fate::Refused;
        }
        let mut state = self.turn();
        let fates = [Fate::Refused, Fate::Unanswered, Fate::Late];
        let failing = state.failing;
        let fate = match state.dice.below(1000) < failing {
            true => *state.dice.pick(&fates),
            false => Fate::Good,
        };
        *left = left.map(|left| left - 1);
        match *left {
            // Its last request: nobody hears the answer.
            Some(0) => *state.dice.pick(&fates),
            _ => fate,
        }
    }

    /// The request is over. Nobody else has made one meanwhile.
    fn over(&self) {
        self.turns.state().turn = None;
        self.turns.changed.notify_all();
    }

    fn do_it<T>(
        &self,
        key: &str,
        now: impl FnOnce(&MemoryRemote) -> Result<T>,
        later: impl FnOnce() -> Option<Late>,
    ) -> Result<T> {
        let signed = self.turns.remote.clock();
        let is_dead = *self.left.lock().unwrap_or_else(PoisonError::into_inner) == Some(0);
        let fate = self.fate();
        if is_dead {
            return self.failed(key);
        }
        // As S3 does with a request that was signed long ago.
        let is_old = self.turns.remote.clock() > signed + OLD;
        let result = match fate {
            _ if is_old => self.failed(key),
            Fate::Good => now(&self.turns.remote),
            Fate::Refused => self.failed(key),
            Fate::Unanswered => now(&self.turns.remote).and_then(|_| self.failed(key)),
            Fate::Late => {
                let late = later();
                self.turns.state().late.extend(late);
                self.failed(key)
            }
        };
        self.over();
        result
    }
}

impl Remote for Process {
    fn name_of(&self, key: &str) -> String {
        self.turns.remote.name_of(key)
    }

    fn get(&self, key: &str, most_bytes: u64) -> Result<Option<Vec<u8>>> {
        self.do_it(key, |remote| remote.get(key, most_bytes), || None)
    }

    fn put(&self, key: &str, bytes: Vec<u8>) -> Result<()> {
        if self.is_broken(Broken::PushesAreSilent) && !self.is_prune && key.starts_with("pushing/") {
            return Ok(());
        }
        let late = bytes.clone();
        self.do_it(key, |remote| remote.put(key, bytes), || Some(Late::Put(key.into(), late)))
    }

    fn put_new(&self, key: &str, bytes: Vec<u8>) -> Result<bool> {
        if self.is_broken(Broken::PushesAreSilent) && key.starts_with("pushing/") {
            // As if it were there.
            return Ok(false);
        }
        let is_name = !key.contains('/');
        if self.is_broken(Broken::NamesAreNotExclusive) && is_name {
            return self.do_it(key, |remote| remote.put(key, bytes).map(|()| true), || None);
        }
        let late = bytes.clone();
        self.do_it(key, |remote| remote.put_new(key, bytes), || Some(Late::PutNew(key.into(), late)))
    }

    fn list(&self, folder: &str, is_flat: bool) -> Result<Vec<Listed>> {
        let found = self.do_it(folder, |remote| remote.list(folder, is_flat), || None)?;
        let is_clock = |listed: &Listed| listed.key.starts_with("pushing/clock");
        Ok(match folder {
            "condemned/" if self.is_broken(Broken::CondemnedChunksAreUsed) && !self.is_prune => Vec::new(),
            "pushing/" if self.is_broken(Broken::PushesAreNotWaitedFor) => found.into_iter().filter(is_clock).collect(),
            "" if self.is_broken(Broken::ManifestsAreReadOnce) && self.is_prune => {
                let mut first = self.manifests.lock().unwrap_or_else(PoisonError::into_inner);
                first.get_or_insert(found).clone()
            }
            _ => found,
        })
    }

    fn delete(&self, keys: &[String]) -> Result<()> {
        let Some(first) = keys.first() else { return Ok(()) };
        self.do_it(first, |remote| remote.delete(keys), || Some(Late::Delete(keys.to_vec())))
    }

    fn pause(&self, _pause: Duration) {}

    fn clock(&self) -> Duration {
        // Hours may go by before a process looks at the clock.
        drop(self.turn());
        let now = self.turns.remote.clock();
        self.over();
        if self.is_broken(Broken::LeasesAreNotWatched) { self.begun } else { now }
    }
}

/// The bytes of a disk: a short chunk, behind zeros or a whole one. Few contents are possible, so
/// that disks share chunks.
fn disk_bytes(dice: &mut Dice, contents: &[u8]) -> Vec<u8> {
    // Whole chunks take long to compress.
    let chunks = usize::from(dice.below(16) == 0);
    let mut bytes = vec![0; chunks * CHUNK + 512];
    for chunk in bytes.chunks_mut(CHUNK) {
        chunk.fill(*dice.pick(contents));
    }
    bytes
}

fn device(bytes: &[u8]) -> RawDevice {
    let store = Arc::new(MemoryStore::with_bytes("disk.raw", bytes.to_vec()));
    RawDevice::new(store, true, 512).expect("sectors of 512 bytes")
}

fn push_options() -> PushOptions {
    PushOptions { engine: EngineKind::Sync, threads: 1, source: "disk.raw".into(), ..PushOptions::default() }
}

/// What a process does.
#[derive(Debug, Clone)]
enum Task {
    Push(String, Vec<u8>),
    Prune(Vec<String>),
}

/// What one run was like.
#[derive(Debug, Default, Clone, Copy)]
pub struct Run {
    /// Pushes that have succeeded, of how many.
    pub pushed: (u64, u64),
    /// Chunks that prunes have deleted while others were at work.
    pub deleted: u64,
}

/// One run, with the order and the failures that `seed` gives.
///
/// # Errors
/// What did not hold.
pub fn run(seed: u64, broken: Option<Broken>) -> std::result::Result<Run, String> {
    let mut dice = Dice::new(seed, 1);
    let remote = MemoryRemote::default();
    let mut expected: BTreeMap<String, Vec<u8>> = BTreeMap::new();
    for (name, contents) in [("old", &[1, 2]), ("kept", &[2, 3])] {
        let bytes = disk_bytes(&mut dice, contents);
        let pushed = push(&remote, name, &device(&bytes), &push_options(), &mut |_, _| true);
        pushed.map_err(|error| error.to_string())?;
        expected.insert(name.into(), bytes);
    }
    let mut tasks = Vec::new();
    for name in ["new", "new", "other"] {
        tasks.push(Task::Push(name.into(), disk_bytes(&mut dice, &[0, 1, 2])));
    }
    tasks.push(Task::Prune(vec!["old".into()]));
    tasks.push(Task::Prune(Vec::new()));
    let begun = remote.clock();
    let state = State {
        dice: Dice::new(seed, 2),
        waiting: BTreeSet::new(),
        running: (0..tasks.len()).collect(),
        turn: None,
        last: None,
        late: Vec::new(),
        // Each run has its own weather.
        failing: *dice.pick(&[0, 25, 75]),
        passing: *dice.pick(&[0, 0, 40]),
        failure: None,
    };
    let turns = Arc::new(Turns { remote, state: Mutex::new(state), changed: Condvar::new(), broken });
    let (mut run, mut named) = (Run::default(), BTreeMap::<String, Vec<Vec<u8>>>::new());
    let chunks_before = count(&turns.remote);
    let results: Vec<bool> = thread::scope(|scope| {
        let mut processes = Vec::new();
        for (number, task) in tasks.iter().enumerate() {
            let dies = (dice.below(3) == 0).then(|| 1 + dice.below(20));
            let process = Process {
                turns: Arc::clone(&turns),
                number,
                is_prune: matches!(task, Task::Prune(_)),
                left: Mutex::new(dies),
                manifests: Mutex::default(),
                begun,
            };
            processes.push(scope.spawn(move || {
                // It may begin long after the others.
                process.clock();
                let is_good = match task {
                    Task::Push(name, bytes) => {
                        push(&process, name, &device(bytes), &push_options(), &mut |_, _| true).is_ok()
                    }
                    Task::Prune(remove) => {
                        let options = PruneOptions { remove: remove.clone(), dry_run: false };
                        prune(&process, &options, &mut |_, _| true).is_ok()
                    }
                };
                process.turns.state().running.remove(&number);
                process.turns.changed.notify_all();
                is_good
            }));
        }
        turns.drive();
        processes.into_iter().map(|process| process.join().unwrap_or(false)).collect()
    });
    if let Some(failure) = turns.state().failure.take() {
        return Err(failure);
    }
    run.deleted = chunks_before.saturating_sub(count(&turns.remote));
    let late = std::mem::take(&mut turns.state().late);
    late.into_iter().for_each(|late| turns.carry_out(late));
    for (task, is_good) in tasks.into_iter().zip(results) {
        if let Task::Push(name, bytes) = task {
            run.pushed.1 += 1;
            run.pushed.0 += u64::from(is_good);
            if is_good && expected.insert(name.clone(), bytes.clone()).is_some() {
                return Err(format!("two pushes of {name} have succeeded"));
            }
            named.entry(name).or_default().push(bytes);
        }
    }
    // A push that has failed may have published.
    check_disks(&turns.remote, &mut expected, &named)?;
    for _ in 0..2 {
        turns.remote.advance(25 * HOUR);
        prune(&turns.remote, &PruneOptions::default(), &mut |_, _| true).map_err(|error| error.to_string())?;
    }
    check_disks(&turns.remote, &mut expected, &named)?;
    nothing_is_left(&turns.remote)?;
    Ok(run)
}

fn count(remote: &MemoryRemote) -> u64 {
    remote.objects().keys().filter(|key| key.starts_with("chunks/")).count() as u64
}

/// All disks that must be there are, with their bytes.
fn check_disks(
    remote: &MemoryRemote,
    expected: &mut BTreeMap<String, Vec<u8>>,
    named: &BTreeMap<String, Vec<Vec<u8>>>,
) -> std::result::Result<(), String> {
    let found = disks(remote).map_err(|error| error.to_string())?;
    for disk in &found {
        let bytes = contents(remote, &disk.manifest).map_err(|what| format!("{}: {what}", disk.name))?;
        match expected.get(&disk.name) {
            Some(expected) if *expected == bytes => {}
            Some(_) => return Err(format!("{} has other bytes", disk.name)),
            None if named.get(&disk.name).is_some_and(|pushed| pushed.contains(&bytes)) => {}
            None => return Err(format!("{} has bytes that nobody has pushed", disk.name)),
        }
    }
    // The old disk was removed, if its prune came so far.
    let missing = expected.keys().find(|name| *name != "old" && found.iter().all(|disk| disk.name != **name));
    missing.map_or(Ok(()), |name| Err(format!("{name} is gone")))
}

/// The bytes of a disk, compared with its digests.
fn contents(remote: &MemoryRemote, manifest: &Manifest) -> std::result::Result<Vec<u8>, String> {
    let mut bytes = vec![0; manifest.facts().size_bytes as usize];
    for (number, chunk) in manifest.numbered() {
        let object = remote.get(&chunk.key.to_string(), u64::MAX).map_err(|error| error.to_string())?;
        let object = object.ok_or_else(|| format!("the chunk {} is gone", chunk.key))?;
        let at = number as usize * CHUNK;
        let len = manifest.chunk_bytes(number);
        bytes[at..at + len].copy_from_slice(&chunk.unpack(&object, len)?);
    }
    Ok(bytes)
}

/// Only disks and their chunks are there.
fn nothing_is_left(remote: &MemoryRemote) -> std::result::Result<(), String> {
    let found = disks(remote).map_err(|error| error.to_string())?;
    let used: BTreeSet<ChunkKey> =
        found.iter().flat_map(|disk| disk.manifest.chunks()).map(|chunk| chunk.key).collect();
    for key in remote.objects().into_keys() {
        let is_clock = key.starts_with("pushing/clock");
        let is_used = match ChunkKey::parse(&key) {
            Some(chunk) => used.contains(&chunk),
            None => !key.contains('/'),
        };
        if !is_used && !is_clock {
            return Err(format!("{key} is left, and nobody needs it"));
        }
    }
    Ok(())
}
