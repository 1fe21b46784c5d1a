//! Pools of members as cases: writes, flushes, discards, first writes, ticks, scrubs, reopened
//! pools, names, members that vanish, come back, rot, join and leave.
//!
//! ```text
//!   prepare ─▶ a pool with one disk
//!   run     ─▶ random requests on the disk; the ledger after each is the truth
//!   judge   ─▶ the pool opens; the ledger allows what it shows; every copy shows the same
//!           ─▶ perhaps another session, judged without a cut
//! ```
//!
//! A judged pool is scrubbed too: every sealed slab must have its checksums in all copies, and
//! records of them. A member rots when everything is sealed; then every read must be right, and
//! mends.
//!
//! A member that vanishes fails every operation from then on; its file stays as it was, and is
//! there again when a state is judged: a copy that is old must never be shown.
//!
//! With a write-back cache the disk is on the slow members. Long writes pass by the cache; others,
//! outside of what the ledger knows, fill it.

use crate::{
    dice::Dice,
    fault::OpKind,
    faulty::{FaultyCase, Reported},
    ledger::{Ledger, Version, Window, stamp},
    mutation::Phase,
    stage::{Case, Depth, Outcome, Stage},
    world::World,
};
use diskwright_space::{Class, NewFile, NewMember, Pool, PoolCreateOptions, PoolOptions, SpaceError, SpaceFile, Tier};
use diskwright_store::{
    Blocking, DataFile, EngineKind, FileFacts, FileRange, FileSystem, Files, LockMode, OpenError, OpenOptions,
    RawDevice, Store, Zeroing,
};
use std::{
    collections::BTreeSet,
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

/// Size of a slab here.
const SLAB_BYTES: u64 = 256 << 10;
/// Size of the disk: eight slabs.
const DISK_BYTES: u64 = 8 * SLAB_BYTES;
/// Size of a member: its superblocks, an area of four slabs, and enough for the disk.
const MEMBER_BYTES: u64 = (1 << 20) + 18 * (SLAB_BYTES + 4096) + 4096;
/// Slabs of a member that its area may have.
const AREA_SLABS: u64 = 4;
/// Size of the cache: the smallest.
const CACHE_BYTES: u64 = 1 << 20;
/// Requests of a run.
const REQUESTS: u64 = 40;
/// The same when the journal is to go round.
const CHURNING_REQUESTS: u64 = 260;

/// What happens to the members during a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// Nothing.
    Stay,
    /// One vanishes.
    Vanish,
    /// One vanishes, and is there again when the pool is opened the next time.
    Return,
    /// One joins, and another one is drained and leaves.
    Change,
    /// Now and then one has bytes that nobody wrote.
    Rot,
}

/// A pool as a case.
#[derive(Debug, Clone, Copy)]
pub struct SpaceCase {
    /// Name of the case.
    pub name: &'static str,
    /// Number of members.
    pub members: u8,
    /// Copies of each slab.
    pub copies: u8,
    /// What happens to the members.
    pub fate: Fate,
    /// Whether half of the members are slow, and slabs move between the tiers.
    pub tiers: bool,
    /// Whether there is a write-back cache.
    pub cache: bool,
    /// Whether slabs are mapped and unmapped all the time, so that the journal goes round; or so
    /// much is written that the log of the cache does.
    pub churns: bool,
}

/// All cases.
pub fn all() -> [SpaceCase; 13] {
    let case = |name, members, copies, fate| {
        let (tiers, cache, churns) = (false, false, false);
        SpaceCase { name, members, copies, fate, tiers, cache, churns }
    };
    let cached = |name, copies, fate| SpaceCase { tiers: true, cache: true, ..case(name, 4, copies, fate) };
    [
        case("space, one member", 1, 1, Fate::Stay),
        case("space, two copies", 2, 2, Fate::Stay),
        case("space, three copies on four members", 4, 3, Fate::Stay),
        case("space, a member vanishes", 3, 2, Fate::Vanish),
        case("space, a member vanishes and returns", 2, 2, Fate::Return),
        case("space, members join and leave", 3, 2, Fate::Change),
        case("space, a member rots", 2, 2, Fate::Rot),
        SpaceCase { tiers: true, ..case("space, tiers", 4, 2, Fate::Stay) },
        SpaceCase { churns: true, ..case("space, churning", 1, 1, Fate::Stay) },
        cached("space, a cache", 2, Fate::Stay),
        cached("space, a cache of one copy", 1, Fate::Stay),
        cached("space, a cache, and a member vanishes", 2, Fate::Vanish),
        SpaceCase { churns: true, ..cached("space, a cache, churning", 2, Fate::Stay) },
    ]
}

/// The files of a world, of which some fail.
#[derive(Debug)]
struct Fragile {
    inner: Files,
    gone: Arc<Mutex<BTreeSet<PathBuf>>>,
}

#[derive(Debug)]
struct FragileStore {
    inner: Arc<dyn Store>,
    gone: Arc<Mutex<BTreeSet<PathBuf>>>,
}

impl FragileStore {
    fn there(&self) -> io::Result<&dyn Store> {
        if self.gone.lock().unwrap_or_else(PoisonError::into_inner).contains(self.inner.name()) {
            return Err(io::Error::other("the member has vanished"));
        }
        Ok(&*self.inner)
    }
}

impl Store for FragileStore {
    fn name(&self) -> &Path {
        self.inner.name()
    }

    fn len_bytes(&self) -> io::Result<u64> {
        self.there()?.len_bytes()
    }

    fn read_at(&self, buf: &mut [u8], offset_bytes: u64) -> io::Result<()> {
        self.there()?.read_at(buf, offset_bytes)
    }

    fn write_at(&self, buf: &[u8], offset_bytes: u64) -> io::Result<()> {
        self.there()?.write_at(buf, offset_bytes)
    }

    fn set_len(&self, len_bytes: u64) -> io::Result<()> {
        self.there()?.set_len(len_bytes)
    }

    fn allocate(&self, range: FileRange) -> io::Result<()> {
        self.there()?.allocate(range)
    }

    fn zero_range(&self, range: FileRange, how: Zeroing) -> io::Result<()> {
        self.there()?.zero_range(range, how)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.there()?.sync_data()
    }

    fn data_file(&self) -> Option<DataFile<'_>> {
        None
    }

    fn identity(&self) -> Option<(u64, u64)> {
        self.inner.identity()
    }
}

impl FileSystem for Fragile {
    fn open(&self, path: &Path, options: &OpenOptions) -> Result<Arc<dyn Store>, OpenError> {
        let inner = self.inner.open(path, options)?;
        Ok(Arc::new(FragileStore { inner, gone: Arc::clone(&self.gone) }))
    }

    fn rename(&self, from: &Path, to: &Path, replace: bool) -> io::Result<()> {
        self.inner.rename(from, to, replace)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.inner.remove(path)
    }

    fn sync_directory_of(&self, path: &Path) -> io::Result<()> {
        self.inner.sync_directory_of(path)
    }

    fn canonical(&self, path: &Path) -> io::Result<PathBuf> {
        self.inner.canonical(path)
    }

    fn facts(&self, path: &Path) -> io::Result<FileFacts> {
        self.inner.facts(path)
    }

    fn list(&self, directory: &Path) -> io::Result<Vec<PathBuf>> {
        self.inner.list(directory)
    }
}

fn path_of(number: u8) -> PathBuf {
    PathBuf::from(format!("/member{number}"))
}

fn windows() -> Vec<Window> {
    let slab = SLAB_BYTES / 512;
    // Across the ends of slabs, within one, and at the end of the disk.
    let firsts = [0, slab - 4, 3 * slab - 3, 5 * slab + 100, 8 * slab - 8];
    firsts.map(|first| Window { first, count: 8 }).to_vec()
}

/// An open pool with its disk.
struct Session {
    pool: Arc<Pool>,
    file: Arc<SpaceFile>,
    queue: Blocking,
}

impl Session {
    fn open(paths: &[PathBuf], files: &Files) -> Outcome<Self> {
        let options = PoolOptions { writable: true, files: files.clone(), ..PoolOptions::default() };
        let pool = Arc::new(Pool::open(paths, &options).map_err(|error| error.to_string())?);
        let file = pool.open_file("disk", true, LockMode::None).map_err(|error| error.to_string())?;
        let device = RawDevice::new(file.clone(), true, 512).map_err(|error| error.to_string())?;
        let queue = Blocking::open(&device, EngineKind::Sync).map_err(|error| error.to_string())?;
        Ok(Self { pool, file, queue })
    }

    /// The contents of the windows.
    fn shown(file: &SpaceFile, ledger: &Ledger) -> Outcome<Vec<Vec<u8>>> {
        let read = |window: &Window| {
            let mut bytes = vec![0; (window.count * 512) as usize];
            file.read_at(&mut bytes, window.first * 512).map_err(|error| format!("reading: {error}"))?;
            Ok(bytes)
        };
        ledger.windows().iter().map(read).collect()
    }
}

impl SpaceCase {
    fn paths(&self) -> Vec<PathBuf> {
        (0..self.members).map(path_of).collect()
    }

    /// Every member that the case may have; some may not exist.
    fn all_paths(&self) -> Vec<PathBuf> {
        (0..self.members + 1).map(path_of).collect()
    }

    /// Random requests. `record` is called whenever the ledger changes, `fails` with each error: if
    /// it returns one, that ends the work.
    fn work(
        &self,
        world: &World,
        ledger: &mut Ledger,
        dice: &mut Dice,
        fate: Fate,
        record: &mut dyn FnMut(&Ledger),
        fails: &mut dyn FnMut(String) -> Outcome,
    ) -> Outcome {
        let gone: Arc<Mutex<BTreeSet<PathBuf>>> = Arc::default();
        let files = Files::new(Arc::new(Fragile { inner: world.files(), gone: Arc::clone(&gone) }));
        let mut paths: Vec<PathBuf> = self.all_paths();
        paths.retain(|path| world.files().facts(path).is_ok());
        world.phase(Some(Phase::Open));
        let opened = Session::open(&paths, &files);
        world.phase(None);
        let Ok(mut session) = opened else { return opened.map(|_| ()).or_else(fails) };
        let mut version: Version = 1 + dice.below(1000) as Version * 1000;
        let moment = 5 + dice.below(REQUESTS / 2);
        let requests = if self.churns { CHURNING_REQUESTS } else { REQUESTS };
        for request in 0..requests {
            if request == moment && matches!(fate, Fate::Vanish | Fate::Return) {
                let victim = path_of(dice.below(u64::from(self.members)) as u8);
                gone.lock().unwrap_or_else(PoisonError::into_inner).insert(victim);
            }
            if request == moment && fate == Fate::Change {
                self.change_members(world, &session, &files)?;
                paths = self.all_paths();
            }
            if fate == Fate::Rot
                && dice.percent(20)
                && let Err(error) = self.rot(world, &session, ledger, dice)
            {
                fails(format!("request {request}: {error}"))?;
            }
            if dice.percent(5) {
                // Closed, which makes everything durable, and opened again.
                let mark = ledger.mark();
                world.phase(Some(Phase::Close));
                let closed = session.pool.close();
                world.phase(None);
                match closed {
                    Ok(()) => ledger.flushed(mark),
                    // The user was told that data are lost; no later flush brings them back.
                    Err(error) => return fails(format!("request {request}: closing: {error}")),
                }
                drop(session);
                record(ledger);
                if fate == Fate::Return {
                    gone.lock().unwrap_or_else(PoisonError::into_inner).clear();
                }
                let is_gone = |path: &PathBuf| gone.lock().unwrap_or_else(PoisonError::into_inner).contains(path);
                let there: Vec<PathBuf> = paths.iter().filter(|path| !is_gone(path)).cloned().collect();
                match Session::open(&there, &files) {
                    Ok(opened) => session = opened,
                    // Nothing can be done without a pool.
                    Err(error) => return fails(format!("request {request}: {error}")),
                }
            }
            version += 1;
            let done = self.request(world, &mut session, ledger, dice, version, record);
            world.phase(None);
            if let Err(error) = done {
                fails(format!("request {request}: {error}"))?;
            } else if dice.percent(10) {
                match Session::shown(&session.file, ledger) {
                    Ok(found) => {
                        ledger.judge(&found, false).map_err(|error| format!("without a cut: {error}"))?;
                    }
                    Err(error) => fails(format!("request {request}: {error}"))?,
                }
            }
        }
        Ok(())
    }

    /// One random request.
    fn request(
        &self,
        world: &World,
        session: &mut Session,
        ledger: &mut Ledger,
        dice: &mut Dice,
        version: Version,
        record: &mut dyn FnMut(&Ledger),
    ) -> Outcome {
        let failed = |error: io::Error| error.to_string();
        let window = *dice.pick(&windows());
        let first = window.first + dice.below(window.count);
        let count = 1 + dice.below(window.first + window.count - first);
        let choice = match dice.below(20) {
            // Discards, which unmap slabs, and writes, which map them: a commit each.
            choice if self.churns && !self.cache && choice > 2 => 9 + choice % 2 * 3,
            8..=10 if self.cache && self.churns => return self.fill_cache(session, dice),
            9 if self.cache => 20,
            17 if self.cache => 21,
            17 | 18 if self.tiers => 19,
            choice => choice,
        };
        let slab = SLAB_BYTES / 512;
        let (announced, durable, result) = match choice {
            0..=9 => {
                let mut bytes = vec![0; (count * 512) as usize];
                stamp(&mut bytes, first, version);
                let durable = dice.percent(15);
                world.phase(Some(if durable { Phase::DurableWrite } else { Phase::Command }));
                let announced = ledger.announce(first, count, version);
                record(ledger);
                let result = if dice.percent(50) {
                    session.queue.write(first * 512, &bytes, durable)
                } else if durable {
                    session.file.write_durable_at(&bytes, first * 512)
                } else {
                    session.file.write_at(&bytes, first * 512)
                };
                (announced, durable, result)
            }
            10 | 11 => {
                let announced = ledger.announce(first, count, 0);
                record(ledger);
                (announced, false, session.queue.write_zeroes(first * 512, count * 512))
            }
            12 => {
                // A whole slab, which is unmapped.
                let start = first / slab * slab;
                world.phase(Some(Phase::Command));
                let announced = ledger.announce(start, slab, 0);
                record(ledger);
                (announced, false, session.queue.discard(start * 512, SLAB_BYTES))
            }
            13..=15 => {
                let mark = ledger.mark();
                world.phase(Some(Phase::Flush));
                session.queue.flush().map_err(failed)?;
                ledger.flushed(mark);
                record(ledger);
                return Ok(());
            }
            20 => {
                // Too long for the cache.
                let count = (128 << 10) / 512;
                let start = first.saturating_sub(dice.below(count)).min(DISK_BYTES / 512 - count);
                let mut bytes = vec![0; (count * 512) as usize];
                stamp(&mut bytes, start, version);
                world.phase(Some(Phase::Command));
                let announced = ledger.announce(start, count, version);
                record(ledger);
                (announced, false, session.queue.write(start * 512, &bytes, false))
            }
            21 => {
                world.phase(Some(Phase::Destage));
                return session.pool.destage(dice.below(200)).map(|_| ()).map_err(failed);
            }
            16 | 17 => return session.pool.tick().map(|_| ()).map_err(failed),
            18 => {
                world.phase(Some(Phase::Scrub));
                return session.pool.scrub(&mut |_| true).map(|_| ()).map_err(|error| error.to_string());
            }
            _ if self.tiers => return self.move_slabs(world, session, dice),
            _ => return self.use_names(session, dice),
        };
        result.map_err(failed)?;
        ledger.acknowledge(announced, durable);
        record(ledger);
        Ok(())
    }

    /// Writes blocks that the ledger does not know.
    fn fill_cache(&self, session: &mut Session, dice: &mut Dice) -> Outcome {
        for _ in 0..4 {
            let blocks = 1 + dice.below(16);
            let at = dice.below(DISK_BYTES / SLAB_BYTES) * SLAB_BYTES + (16 + dice.below(16)) * 4096;
            let bytes = vec![dice.below(256) as u8; (blocks * 4096) as usize];
            session.queue.write(at, &bytes, false).map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    /// Creates, renames and removes other files.
    fn use_names(&self, session: &Session, dice: &mut Dice) -> Outcome {
        let name = |dice: &mut Dice| format!("other{}", dice.below(3));
        let (one, two) = (name(dice), name(dice));
        let new = NewFile { len_bytes: SLAB_BYTES, copies: self.copies, columns: 1, tier: Tier::Any };
        let has = |name: &str| session.pool.names().iter().any(|known| known == name);
        let result = match dice.below(4) {
            0 if !has(&one) => session.pool.create_file(&one, new),
            1 if has(&one) => session.pool.rename_file(&one, &two, true),
            2 if has(&one) && !has(&two) => session.pool.link_file(&one, &two),
            _ if has(&one) => session.pool.remove_file(&one),
            _ => Ok(()),
        };
        result.map_err(|error| error.to_string())?;
        if has(&two) {
            let file = session.pool.open_file(&two, true, LockMode::Exclusive).map_err(|error| error.to_string())?;
            file.write_at(&[0xab; 4096], dice.below(32) * 4096).map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    /// Seals everything, and changes bytes of a member behind the pool's back. What is read is
    /// right nevertheless.
    fn rot(&self, world: &World, session: &Session, ledger: &mut Ledger, dice: &mut Dice) -> Outcome {
        let scrub = || session.pool.scrub(&mut |_| true).map_err(|error| error.to_string());
        world.phase(Some(Phase::Scrub));
        if scrub()?.unsealed_bytes > 0 {
            // A copy is missing, so a slab has no checksums.
            return Ok(());
        }
        world.phase(None);
        let path = path_of(dice.below(u64::from(self.members)) as u8);
        let member =
            world.files().open(&path, &OpenOptions { writable: true, lock: LockMode::None, ..OpenOptions::default() });
        let member = member.map_err(|error| error.to_string())?;
        for _ in 0..3 {
            let slab = AREA_SLABS + dice.below(18 - AREA_SLABS);
            let at = (1 << 20) + slab * SLAB_BYTES + dice.below(SLAB_BYTES / 512) * 512;
            member.write_at(&[0x5a; 512], at).map_err(|error| error.to_string())?;
        }
        world.phase(Some(Phase::Scrub));
        let shown = Session::shown(&session.file, ledger)?;
        ledger.judge(&shown, false).map_err(|error| format!("of a member that rots: {error}"))?;
        let found = scrub()?;
        world.phase(None);
        if found.damage.is_empty() { Ok(()) } else { Err(format!("data are lost that the other copy has: {found:?}")) }
    }

    /// Every sealed slab has its checksums, and records of them.
    fn judge_sums(&self, session: &Session) -> Outcome {
        let found = session.pool.scrub(&mut |_| true).map_err(|error| error.to_string())?;
        let is_right = found.damage.is_empty() && (found.mended_bytes == 0 || self.fate == Fate::Rot);
        let unsealed = session.pool.warnings().into_iter().find(|warning| warning.contains("checksums"));
        match (is_right, unsealed) {
            (false, _) => Err(format!("sealed slabs are not as they were sealed: {found:?}")),
            (true, Some(warning)) if self.fate != Fate::Rot => Err(warning),
            (true, _) => Ok(()),
        }
    }

    /// Moves slabs to where a random pin and random heat say.
    fn move_slabs(&self, world: &World, session: &Session, dice: &mut Dice) -> Outcome {
        let tier = *dice.pick(&[Tier::Any, Tier::Fast, Tier::Slow]);
        session.pool.pin_file("disk", tier).map_err(|error| error.to_string())?;
        world.phase(Some(Phase::Migrate));
        let mut left = dice.below(20);
        let goes_on = &mut |_| {
            left = left.saturating_sub(1);
            left > 0
        };
        match session.pool.optimize(false, goes_on) {
            Ok(_) | Err(SpaceError::Stopped { .. }) => Ok(()),
            // The members of one class have failed.
            Err(SpaceError::Usage { .. }) => Ok(()),
            Err(error) => Err(error.to_string()),
        }
    }

    fn class_of(&self, number: usize) -> Class {
        if self.tiers && number % 2 == 1 { Class::Hdd } else { Class::Ssd }
    }

    fn change_members(&self, world: &World, session: &Session, files: &Files) -> Outcome {
        let new = path_of(self.members);
        make_member(world, &new)?;
        let member = NewMember { path: new, class: Class::Ssd };
        let options = PoolCreateOptions { files: files.clone(), ..PoolCreateOptions::default() };
        session.pool.add_members(&[member], &options).map_err(|error| error.to_string())?;
        session.pool.remove_member("0", &mut |_| true).map_err(|error| error.to_string())
    }

    /// Every copy that should be good, alone, shows the same.
    fn judge_copies(&self, world: &World, session: &Session, ledger: &Ledger, shown: &[Vec<u8>]) -> Outcome {
        while session.pool.tick().map_err(|error| error.to_string())? {}
        let status = session.pool.status();
        if self.copies < 2 || status.is_degraded() {
            return Ok(());
        }
        session.pool.close().map_err(|error| error.to_string())?;
        let left = World::of(world.snapshot());
        let members: Vec<PathBuf> = status.members.iter().filter_map(|member| member.path.clone()).collect();
        for without in &members {
            let others: Vec<PathBuf> = members.iter().filter(|path| *path != without).cloned().collect();
            let options = PoolOptions { files: left.files(), ..PoolOptions::default() };
            let pool =
                Pool::open(&others, &options).map_err(|error| format!("without {}: {error}", without.display()))?;
            let pool = Arc::new(pool);
            let file = pool.open_file("disk", false, LockMode::None).map_err(|error| error.to_string())?;
            if Session::shown(&file, ledger)? != shown {
                return Err(format!("without {} the disk shows something else: the copies differ", without.display()));
            }
        }
        Ok(())
    }
}

/// An empty file that can be a member.
fn make_member(world: &World, path: &Path) -> Outcome {
    let options = OpenOptions { writable: true, create_new: true, lock: LockMode::Exclusive, ..OpenOptions::default() };
    let store = world.files().open(path, &options).map_err(|error| error.to_string())?;
    let made = store.set_len(MEMBER_BYTES).and_then(|()| store.sync_data());
    made.and_then(|()| world.files().sync_directory_of(path)).map_err(|error| error.to_string())
}

impl Case for SpaceCase {
    type Truth = Ledger;

    fn name(&self) -> String {
        self.name.into()
    }

    fn prepare(&self, world: &World, _seed: u64) -> Outcome {
        let paths = self.paths();
        paths.iter().try_for_each(|path| make_member(world, path))?;
        let members: Vec<NewMember> = paths
            .iter()
            .enumerate()
            .map(|(number, path)| NewMember { path: path.clone(), class: self.class_of(number) })
            .collect();
        let options = PoolCreateOptions {
            slab_bytes: SLAB_BYTES,
            copies: self.cache.then_some(self.copies),
            files: world.files(),
            ..PoolCreateOptions::default()
        };
        Pool::create("vault", &members, &options).map_err(|error| error.to_string())?;
        let options = PoolOptions { writable: true, files: world.files(), ..PoolOptions::default() };
        let pool = Pool::open(&paths, &options).map_err(|error| error.to_string())?;
        let pool = Arc::new(pool);
        let tier = if self.cache { Tier::Slow } else { Tier::Any };
        let new = NewFile { len_bytes: DISK_BYTES, copies: self.copies, columns: 1, tier };
        pool.create_file("disk", new).map_err(|error| error.to_string())?;
        if self.cache {
            pool.create_cache(CACHE_BYTES).map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    fn run(&self, stage: &Stage<Ledger>, seed: u64) -> Outcome {
        let mut ledger = Ledger::new(&windows(), |_| 0);
        stage.record(ledger.clone());
        let mut dice = Dice::new(seed, 0x59ace);
        let mut record = |ledger: &Ledger| stage.record(ledger.clone());
        self.work(&stage.world, &mut ledger, &mut dice, self.fate, &mut record, &mut Err)
    }

    fn loses_power_apart(&self) -> bool {
        self.members > 1
    }

    fn judge(&self, world: &World, truth: &Ledger, seed: u64, depth: Depth) -> Outcome<u64> {
        let mut paths = self.all_paths();
        paths.retain(|path| world.files().facts(path).is_ok());
        let session = Session::open(&paths, &world.files())?;
        let shown = Session::shown(&session.file, truth)?;
        let versions = truth.judge(&shown, true)?;
        self.judge_sums(&session)?;
        self.judge_copies(world, &session, truth, &shown)?;
        let again = Session::shown(&session.file, truth)?;
        if again != shown {
            return Err("the disk shows something else after a resync".into());
        }
        drop(session);
        if depth.resume {
            let mut ledger = truth.settled(versions);
            let mut dice = Dice::new(seed, 0x5e55);
            self.work(world, &mut ledger, &mut dice, Fate::Stay, &mut |_| {}, &mut Err)?;
            let session = Session::open(&paths, &world.files())?;
            let shown = Session::shown(&session.file, &ledger)?;
            ledger.judge(&shown, false).map_err(|error| format!("in the next session: {error}"))?;
        }
        Ok(0)
    }
}

impl FaultyCase for SpaceCase {
    fn run_on(&self, stage: &Stage<Ledger>, reported: &mut Reported) -> Outcome {
        let mut ledger = Ledger::new(&windows(), |_| 0);
        stage.record(ledger.clone());
        let mut record = |ledger: &Ledger| stage.record(ledger.clone());
        let mut fails = |error| {
            reported.errors.push(error);
            Ok(())
        };
        let mut dice = Dice::new(1, 0xfa1);
        self.work(&stage.world, &mut ledger, &mut dice, self.fate, &mut record, &mut fails)
    }

    /// Another member, the other superblock, or the next round of the pool's own work.
    fn has_fallback(&self, _op_kind: OpKind) -> bool {
        true
    }

    fn has_several_files(&self) -> bool {
        self.members > 1
    }
}
