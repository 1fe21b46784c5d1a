//! `space://POOL/NAME` as paths: the pools of this machine as a file system.
//!
//! ```text
//!   Files (default) ─ "space://" ─▶ Spaces ─▶ the pool, opened once ─▶ SpaceFile
//! ```
//!
//! A pool is opened when the first of its names is used, and stays open until [`Spaces::close`]. A
//! thread then works for it every two seconds: dirty slabs become clean, stale copies are made
//! equal.
//!
//! A program that only reads also opens the pool for writing if it can, so that it may write
//! another file of the pool later. If a member is missing, or the pool cannot be written, it is
//! opened for reading. Another program that has the pool is waited for, for [`PATIENCE`]: most are
//! short.

use crate::{
    cache::start_worker,
    error::{Result, SpaceError},
    file::{identity_of, not_found, uri},
    pool::{NewFile, Pool, lock, open::PoolOptions},
    registry::{Known, MemberLimit, Registry},
};
use diskwright_format::space::change::Tier;
use diskwright_store::{CacheMode, FileFacts, FileSystem, Files, OpenError, OpenOptions, Store, StoreLimit};
use std::{
    collections::HashMap,
    io,
    path::{Component, Path, PathBuf},
    sync::{Arc, LazyLock, Mutex, Weak},
    thread,
    time::{Duration, Instant},
};

/// How the names of a space begin.
pub const SCHEME: &str = "space://";

/// How long an open waits for another program that has the pool.
pub const PATIENCE: Duration = Duration::from_secs(2);

/// Time between two rounds of a pool's own work.
const ROUND: Duration = Duration::from_secs(2);

/// Time between two records of what is used often.
const HOUR: Duration = Duration::from_secs(3600);

/// The same as [`ROUND`] while copies are being made: a round takes four times as long.
const SHORT_PAUSE: Duration = Duration::from_millis(50);

/// The pools of a machine as a file system; see the module documentation.
#[derive(Debug)]
pub struct Spaces {
    registry: Registry,
    open: Mutex<HashMap<String, Arc<Pool>>>,
}

/// A name, split: the pool, and the file unless the pool itself is meant.
pub fn split(path: &Path) -> Result<(String, Option<String>)> {
    let bad = |why| SpaceError::BadName { name: path.display().to_string(), why };
    let text = path.to_str().ok_or_else(|| bad("it is not UTF-8"))?;
    let rest = text.strip_prefix(SCHEME).ok_or_else(|| bad("it must begin with space://"))?;
    let mut parts = Vec::new();
    for part in Path::new(rest).components() {
        match part {
            Component::Normal(part) => parts.push(part.to_string_lossy().into_owned()),
            Component::CurDir => {}
            _ => return Err(bad("expected space://POOL/NAME")),
        }
    }
    match &mut parts[..] {
        [pool] => Ok((std::mem::take(pool), None)),
        [pool, name] => Ok((std::mem::take(pool), Some(std::mem::take(name)))),
        _ => Err(bad("expected space://POOL/NAME")),
    }
}

impl Spaces {
    /// The pools of a registry.
    pub fn new(registry: Registry) -> Self {
        Self { registry, open: Mutex::default() }
    }

    /// The pools of this user, for the whole process.
    pub fn of_user() -> &'static Arc<Self> {
        static SPACES: LazyLock<Arc<Spaces>> = LazyLock::new(|| Arc::new(Spaces::new(Registry::of_user())));
        &SPACES
    }

    /// Makes `space://` names work in all file functions of the process.
    pub fn install() {
        Files::add_scheme(SCHEME, Files::new(Self::of_user().clone()));
    }

    /// Where the members of its pools are.
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// Opens a pool, or returns the open one.
    ///
    /// # Errors
    /// See [`Pool::open`]; [`SpaceError::Unknown`].
    pub fn pool(&self, name: &str, writable: bool) -> Result<Arc<Pool>> {
        self.pool_with(name, writable, CacheMode::PageCache)
    }

    /// As [`Spaces::pool`]. A pool of which no disk is open is opened with this cache mode.
    fn pool_with(&self, name: &str, writable: bool, cache: CacheMode) -> Result<Arc<Pool>> {
        let mut open = lock(&self.open);
        if let Some(pool) = open.get(name) {
            let is_used = Arc::strong_count(pool) > 1;
            // A pool that was only looked at is opened again as it is needed now.
            let fits = !writable || pool.is_writable();
            let is_as_wanted = cache == CacheMode::PageCache || pool.cache_mode() == cache;
            if fits && (is_as_wanted || is_used) {
                return Ok(Arc::clone(pool));
            }
            if is_used {
                return Err(pool.read_only("its disks are open for reading; close them first"));
            }
            open.remove(name);
        }
        let known = self.registry.find(name)?;
        let started = Instant::now();
        let pool = loop {
            match open_known(&known, writable, cache) {
                Err(SpaceError::Open(OpenError::Locked { .. })) if started.elapsed() < PATIENCE => {
                    thread::sleep(Duration::from_millis(50));
                }
                result => break Arc::new(result?),
            }
        };
        pool.start_own_work();
        open.insert(name.to_owned(), Arc::clone(&pool));
        Ok(pool)
    }

    /// Closes all pools whose files are closed; those of the others are made durable.
    ///
    /// # Errors
    /// What could not be made durable.
    pub fn close(&self) -> io::Result<()> {
        let pools: Vec<Arc<Pool>> = lock(&self.open).drain().map(|(_, pool)| pool).collect();
        pools.iter().for_each(save_heat);
        pools.iter().try_for_each(|pool| pool.close())
    }

    fn at(&self, path: &Path, writable: bool) -> Result<(Arc<Pool>, String)> {
        self.at_with(path, writable, CacheMode::PageCache)
    }

    fn at_with(&self, path: &Path, writable: bool, cache: CacheMode) -> Result<(Arc<Pool>, String)> {
        let (pool, name) = split(path)?;
        let why = "it names a pool, not a disk: expected space://POOL/NAME";
        let name = name.ok_or_else(|| SpaceError::BadName { name: path.display().to_string(), why })?;
        Ok((self.pool_with(&pool, writable, cache)?, name))
    }
}

/// Opens a pool for writing; for reading, if that is enough and writing is not possible.
fn open_known(known: &Known, writable: bool, cache: CacheMode) -> Result<Pool> {
    let limit = |limit: &MemberLimit| StoreLimit { iops: limit.iops, latency: Duration::from_micros(limit.latency_us) };
    let limits: Vec<_> = known.limits.iter().map(|(path, one)| (path.clone(), limit(one))).collect();
    let options =
        PoolOptions { writable: true, whole: !writable, cache, limits: limits.clone(), ..PoolOptions::default() };
    match Pool::open(&known.members, &options) {
        Err(SpaceError::ReadOnly { .. } | SpaceError::Open(_)) if !writable => {
            Pool::open(&known.members, &PoolOptions { cache, limits, ..PoolOptions::default() })
        }
        result => result,
    }
}

/// Without it only what is learned from now on counts.
fn save_heat(pool: &Arc<Pool>) {
    if let Err(error) = pool.save_heat() {
        tracing::warn!("pool {}: what is used often cannot be recorded: {error}", pool.name());
    }
}

impl Pool {
    /// Starts the threads that work for the pool until it is dropped, as [`Spaces`] does for the
    /// pools that it opens: [`Pool::tick`] every two seconds, and the cache goes to the slow
    /// members.
    pub fn start_own_work(self: &Arc<Self>) {
        if self.is_writable() {
            keep(self);
            start_worker(self);
        }
    }
}

/// Starts the thread that calls [`Pool::tick`] until the pool is dropped.
fn keep(pool: &Arc<Pool>) {
    let (weak, name): (Weak<Pool>, String) = (Arc::downgrade(pool), format!("space-{}", pool.name()));
    let name: String = name.chars().take(15).collect();
    // Without the thread slabs stay dirty, which costs time at the next open only.
    let _ = thread::Builder::new().name(name).spawn(move || {
        let (mut pause, mut saved) = (ROUND, Instant::now());
        loop {
            thread::sleep(pause);
            let Some(pool) = weak.upgrade() else { return };
            if saved.elapsed() > HOUR {
                save_heat(&pool);
                saved = Instant::now();
            }
            match pool.tick() {
                Ok(more) => pause = if more { SHORT_PAUSE } else { ROUND },
                Err(error) => {
                    tracing::warn!("pool {}: {error}", pool.name());
                    return;
                }
            }
        }
    });
}

fn open_error(path: &Path, error: SpaceError) -> OpenError {
    match error {
        SpaceError::Open(error) => error,
        other => OpenError::Io { doing: "open", path: path.to_owned(), source: other.to_io() },
    }
}

impl FileSystem for Spaces {
    fn open(&self, path: &Path, options: &OpenOptions) -> Result<Arc<dyn Store>, OpenError> {
        let (pool, name) =
            self.at_with(path, options.writable, options.cache).map_err(|error| open_error(path, error))?;
        if options.create_new {
            let new = NewFile { len_bytes: 0, copies: pool.default_copies(), columns: 1, tier: Tier::Any };
            pool.create_file(&name, new).map_err(|error| open_error(path, error))?;
        }
        Ok(pool.open_file(&name, options.writable, options.lock)?)
    }

    fn rename(&self, from: &Path, to: &Path, replace: bool) -> io::Result<()> {
        let (pool, name) = self.at(from, true).map_err(|error| error.to_io())?;
        let (other, new) = self.at(to, true).map_err(|error| error.to_io())?;
        if pool.id() != other.id() {
            return Err(io::ErrorKind::CrossesDevices.into());
        }
        pool.rename_file(&name, &new, replace).map_err(|error| error.to_io())
    }

    fn link(&self, existing: &Path, new: &Path) -> io::Result<()> {
        let (pool, name) = self.at(existing, true).map_err(|error| error.to_io())?;
        let (other, new) = self.at(new, true).map_err(|error| error.to_io())?;
        if pool.id() != other.id() {
            return Err(io::ErrorKind::CrossesDevices.into());
        }
        pool.link_file(&name, &new).map_err(|error| error.to_io())
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        let (pool, name) = self.at(path, true).map_err(|error| error.to_io())?;
        pool.remove_file(&name).map_err(|error| error.to_io())
    }

    fn sync_directory_of(&self, _path: &Path) -> io::Result<()> {
        // Names are durable when they are changed.
        Ok(())
    }

    fn check_names_in(&self, directory: &Path) -> io::Result<()> {
        let (pool, _) = split(directory).map_err(|error| error.to_io())?;
        self.pool(&pool, true).map(|_| ()).map_err(|error| error.to_io())
    }

    fn canonical(&self, path: &Path) -> io::Result<PathBuf> {
        let (pool, name) = split(path).map_err(|error| error.to_io())?;
        let Some(name) = name else { return Ok(PathBuf::from(format!("{SCHEME}{pool}"))) };
        let open = self.pool(&pool, false).map_err(|error| error.to_io())?;
        open.file_named(&name).ok_or_else(not_found)?;
        Ok(uri(&pool, &name))
    }

    fn facts(&self, path: &Path) -> io::Result<FileFacts> {
        let (pool, name) = self.at(path, false).map_err(|error| error.to_io())?;
        let file = pool.file_named(&name).ok_or_else(not_found)?;
        Ok(FileFacts { identity: (identity_of(&pool), u64::from(file.number)), modified: None })
    }

    fn list(&self, directory: &Path) -> io::Result<Vec<PathBuf>> {
        let (pool, _) = split(directory).map_err(|error| error.to_io())?;
        let open = self.pool(&pool, false).map_err(|error| error.to_io())?;
        Ok(open.names().iter().map(|name| uri(&pool, name)).collect())
    }
}
