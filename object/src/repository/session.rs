//! A push that is under way, and what it knows of the repository.
//!
//! ```text
//!   pushing/ID/start    written first, with If-None-Match, twice: the second time must fail
//!   pushing/ID/alive    written again from time to time
//!   condemned/...       read after that: these chunks are as good as gone
//!   chunks/...          listed after that: what is there and not condemned need not be sent
//!   NAME                the manifest, with If-None-Match: the push is done
//!   pushing/ID/...      deleted
//! ```
//!
//! `prune.rs` says why no chunk is lost by this order. A push must not publish its manifest when
//! `prune` may have taken it for dead, which it does [`LEASE`] after the last sign of life. So a
//! push that could give no sign for [`LEASE_USE`] fails. Time is measured by a clock that goes on
//! while the machine sleeps. Between the last look at the clock and the signature of the request
//! that publishes lie microseconds, and S3 refuses a request that was signed more than 15 minutes
//! ago.

use super::{
    keys::{CHUNKS, CONDEMNED, ChunkKey, Digest, PUSHING, PushId},
    manifest::{CHUNK_OBJECT_MAX, Chunk},
    remote::Remote,
};
use crate::error::{ObjectError, Result};
use std::{
    collections::{HashMap, HashSet},
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

/// A push without a sign of life for so long is taken for dead.
pub(super) const LEASE: Duration = Duration::from_secs(24 * 3600);
/// A push that has given none for so long does not go on.
const LEASE_USE: Duration = Duration::from_secs(12 * 3600);
/// Pauses between tries of a request that must not be repeated by itself.
const PAUSES: [Duration; 4] =
    [Duration::from_millis(10), Duration::from_millis(100), Duration::from_secs(1), Duration::from_secs(5)];
/// How often it gives one.
const SIGN: Duration = Duration::from_secs(900);

/// A push; see the module documentation.
#[derive(Debug)]
pub(super) struct Session<'a> {
    remote: &'a dyn Remote,
    pub(super) id: PushId,
    /// When the last sign of life was begun that has arrived.
    alive: Mutex<Duration>,
    /// Chunks that are there and stay, by their digests. Chunks that this push sends are added:
    /// `None` while they are under way.
    known: Mutex<HashMap<Digest, Option<Chunk>>>,
    /// A chunk is no longer under way.
    arrived: Condvar,
}

fn start_key(id: PushId) -> String {
    format!("{PUSHING}{id}/start")
}

fn alive_key(id: PushId) -> String {
    format!("{PUSHING}{id}/alive")
}

impl<'a> Session<'a> {
    /// Begins a push, and learns which chunks are there.
    ///
    /// # Errors
    /// [`ObjectError::NoRepository`] if the server ignores conditions; the server's errors.
    pub(super) fn begin(remote: &'a dyn Remote) -> Result<Self> {
        let (id, begun) = (PushId::random()?, remote.clock());
        let start = start_key(id);
        let text = format!("a push, begun by process {}\n", std::process::id());
        // If the server has written it and its answer was lost, it is there at the second try.
        put_new(remote, &start, text.as_bytes(), &|| Ok(()))?;
        if put_new(remote, &start, text.as_bytes(), &|| Ok(()))? {
            let _ = remote.delete(&[start]);
            let what = "the server ignores If-None-Match, so two pushes could overwrite each other".to_owned();
            return Err(ObjectError::NoRepository { name: remote.name_of(""), what });
        }
        let session = Self { remote, id, alive: Mutex::new(begun), known: Mutex::default(), arrived: Condvar::new() };
        match session.learn() {
            Ok(()) => Ok(session),
            Err(error) => {
                session.end();
                Err(error)
            }
        }
    }

    fn learn(&self) -> Result<()> {
        let condemned = condemned(self.remote)?;
        let gone: HashSet<ChunkKey> = condemned.into_iter().flat_map(|list| list.chunks).collect();
        let mut known = self.known();
        for found in self.remote.list(CHUNKS, false)? {
            let object_bytes = u32::try_from(found.size_bytes).ok().filter(|len| (2..=CHUNK_OBJECT_MAX).contains(len));
            if let (Some(key), Some(object_bytes)) = (ChunkKey::parse(&found.key), object_bytes)
                && !gone.contains(&key)
            {
                known.insert(key.digest, Some(Chunk { key, object_bytes }));
            }
        }
        Ok(())
    }

    fn known(&self) -> MutexGuard<'_, HashMap<Digest, Option<Chunk>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A chunk that is there.
    pub(super) fn find(&self, digest: &Digest) -> Option<Chunk> {
        self.known().get(digest).copied().flatten()
    }

    /// A chunk that is there. One that another thread is sending is waited for. `None` if the
    /// caller is to send it.
    pub(super) fn find_or_claim(&self, digest: &Digest) -> Option<Chunk> {
        let mut known = self.known();
        loop {
            match known.get(digest) {
                Some(Some(chunk)) => return Some(*chunk),
                Some(None) => known = self.arrived.wait(known).unwrap_or_else(PoisonError::into_inner),
                None => {
                    known.insert(*digest, None);
                    return None;
                }
            }
        }
    }

    /// Sends the object of a chunk that the caller has claimed. `pack` makes it.
    pub(super) fn send(&self, digest: Digest, pack: impl FnOnce() -> Result<Vec<u8>>) -> Result<Chunk> {
        let sent = pack().and_then(|object| {
            let chunk = Chunk { key: ChunkKey { digest, push: self.id }, object_bytes: object.len() as u32 };
            self.remote.put(&chunk.key.to_string(), object).map(|()| chunk)
        });
        let mut known = self.known();
        match &sent {
            Ok(chunk) => drop(known.insert(digest, Some(*chunk))),
            Err(_) => drop(known.remove(&digest)),
        }
        self.arrived.notify_all();
        sent
    }

    /// Says that this push is alive, if it is time to. To be called again and again.
    ///
    /// # Errors
    /// It could not be said for too long; the server's errors.
    pub(super) fn give_sign(&self) -> Result<()> {
        let mut alive = self.alive.lock().unwrap_or_else(PoisonError::into_inner);
        let begun = self.remote.clock();
        if begun.saturating_sub(*alive) < SIGN {
            return Ok(());
        }
        self.check(*alive, begun)?;
        self.remote.put(&alive_key(self.id), Vec::from("alive\n"))?;
        *alive = begun;
        Ok(())
    }

    fn check(&self, alive: Duration, now: Duration) -> Result<()> {
        if now.saturating_sub(alive) < LEASE_USE {
            return Ok(());
        }
        let said = "it could not be reached for 12 hours, or this machine has slept; push again, which sends only what is missing";
        Err(ObjectError::Failed { name: self.remote.name_of(""), said: said.into() })
    }

    /// Publishes the manifest, and ends the push. It is there for all then, or somebody else has
    /// published one of this name.
    ///
    /// # Errors
    /// [`ObjectError::Exists`]; the server's errors, after which it may be there, or come to be
    /// there later. So the push is not ended then.
    pub(super) fn publish(self, name: &str, manifest: &[u8]) -> Result<()> {
        let alive = *self.alive.lock().unwrap_or_else(PoisonError::into_inner);
        let check = || self.check(alive, self.remote.clock());
        if let Err(error) = check() {
            self.end();
            return Err(error);
        }
        let is_ours = put_new(self.remote, name, manifest, &check)? || {
            // It may be ours: the server has written it, and its answer was lost.
            self.remote.get(name, manifest.len() as u64 + 1)?.is_some_and(|found| found == manifest)
        };
        let result = if is_ours { Ok(()) } else { Err(exists(self.remote, name)) };
        self.end();
        result
    }

    /// Ends the push without a manifest. If that fails, `prune` ends it a day later.
    pub(super) fn end(self) {
        // `start` last: it says that this push may be alive.
        for key in [alive_key(self.id), start_key(self.id)] {
            if let Err(error) = self.remote.delete(&[key]) {
                tracing::warn!("{error}; the folder pushing/{} can be removed", self.id);
            }
        }
    }
}

/// Writes an object if there is none, again and again while the connection fails. `check` comes
/// before each try: a try that is late must not happen.
fn put_new(remote: &dyn Remote, key: &str, bytes: &[u8], check: &dyn Fn() -> Result<()>) -> Result<bool> {
    let mut pauses = PAUSES.iter();
    loop {
        check()?;
        match (remote.put_new(key, bytes.to_vec()), pauses.next()) {
            (Err(ObjectError::Failed { .. }), Some(pause)) => remote.pause(*pause),
            (result, _) => return result,
        }
    }
}

pub(super) fn exists(remote: &dyn Remote, name: &str) -> ObjectError {
    ObjectError::Exists { name: remote.name_of(name) }
}

/// Chunks that are to be deleted.
#[derive(Debug)]
pub(super) struct Condemned {
    /// The object with the list.
    pub(super) key: String,
    /// When it was written, by the server's clock.
    pub(super) written: std::time::SystemTime,
    pub(super) chunks: Vec<ChunkKey>,
}

/// The longest list: more chunks are in several.
pub(super) const CONDEMNED_MAX: usize = 20_000;

/// The lists of chunks that are to be deleted.
///
/// # Errors
/// The server's errors; [`ObjectError::Damaged`].
pub(super) fn condemned(remote: &dyn Remote) -> Result<Vec<Condemned>> {
    let mut lists = Vec::new();
    for found in remote.list(CONDEMNED, false)? {
        // Another program has just finished with it if it is gone.
        let Some(bytes) = remote.get(&found.key, found.size_bytes + 1)? else { continue };
        let text = String::from_utf8_lossy(&bytes);
        let chunks: Option<Vec<ChunkKey>> = text.lines().map(ChunkKey::parse).collect();
        let Some(chunks) = chunks.filter(|_| bytes.len() as u64 == found.size_bytes) else {
            let what = "it is not a list of chunks".to_owned();
            return Err(ObjectError::Damaged { name: remote.name_of(&found.key), what });
        };
        lists.push(Condemned { key: found.key, written: found.modified, chunks });
    }
    Ok(lists)
}
