//! Deletes the chunks that no disk of a repository has, in two phases.
//!
//! ```text
//!   1  chunks listed ─▶ pushes listed ─▶ manifests read ─▶ what none has, nor a push has sent
//!      that is under way, is condemned: condemned/ID is written
//!   2  pushes listed ─▶ one that may have begun before condemned/ID was written? ─ yes ─▶ later
//!      └─ none ─▶ manifests read again ─▶ what none has is deleted ─▶ condemned/ID is deleted
//! ```
//!
//! Why no chunk is lost that a manifest has, or comes to have:
//!
//! - A push that begins after the list was written reads it, and does not count on its chunks. If
//!   it needs their bytes, it sends them under another key.
//! - A push that began before is waited for. Then its manifest is there, and is read in phase 2.
//! - A push that gives no sign of life for a day is not waited for. It would not publish any more
//!   (`session.rs`).
//! - A key that was deleted is never used again, so it does not matter how late a deletion comes,
//!   or how many programs delete.
//!
//! A crash leaves a list, and the next `prune` goes on with it. Manifests that cannot be read stop
//! everything: what they have is not known.

use super::{
    keys::{CHUNKS, CONDEMNED, ChunkKey, PUSHING, PushId, bad_name},
    manifest::{MAGIC, MANIFEST_BYTES_MAX, Manifest},
    remote::{Listed, Remote},
    session::{CONDEMNED_MAX, Condemned, LEASE, condemned},
};
use crate::error::{ObjectError, Result};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    time::{Duration, SystemTime},
};

/// How much the clocks of a server's machines may differ.
const SKEW: Duration = Duration::from_secs(300);
/// Keys of one deletion, between two reports of progress.
const DELETED_AT_ONCE: usize = 500;

/// A disk of a repository.
#[derive(Debug, Clone)]
pub struct Disk {
    /// Its name.
    pub name: String,
    /// Its manifest.
    pub manifest: Manifest,
    /// When it was published, by the server's clock.
    pub published: SystemTime,
}

/// The disks of a repository, by name.
///
/// # Errors
/// The server's errors; [`ObjectError::Damaged`] for a manifest that cannot be read.
pub fn disks(remote: &dyn Remote) -> Result<Vec<Disk>> {
    Manifests::default().read(remote)
}

/// The manifest of a disk.
///
/// # Errors
/// [`ObjectError::Missing`], [`ObjectError::Damaged`]; the server's errors.
pub fn disk(remote: &dyn Remote, name: &str) -> Result<Manifest> {
    let missing = || ObjectError::Missing {
        name: remote.name_of(name),
        said: "no such key".into(),
        hint: ", the bucket, and AWS_ENDPOINT_URL",
    };
    let bytes = remote.get(name, MANIFEST_BYTES_MAX)?.ok_or_else(missing)?;
    parse(remote, name, &bytes)
}

fn parse(remote: &dyn Remote, name: &str, bytes: &[u8]) -> Result<Manifest> {
    Manifest::of_bytes(bytes).map_err(|what| ObjectError::Damaged { name: remote.name_of(name), what })
}

/// Manifests that were read, which never change.
#[derive(Default)]
struct Manifests(HashMap<(String, SystemTime, u64), Manifest>);

impl Manifests {
    /// Those that are there now.
    fn read(&mut self, remote: &dyn Remote) -> Result<Vec<Disk>> {
        let mut disks = Vec::new();
        for Listed { key, size_bytes, modified } in remote.list("", true)? {
            if bad_name(&key).is_some() {
                continue;
            }
            let known = self.0.get(&(key.clone(), modified, size_bytes)).cloned();
            let manifest = match known {
                Some(manifest) => manifest,
                None => {
                    // Other objects may lie in the folder, as large as they like.
                    let is_ours = remote.get(&key, MAGIC.len() as u64)?.is_some_and(|start| start == MAGIC);
                    if !is_ours {
                        continue;
                    }
                    // It was removed if it is gone.
                    let Some(bytes) = remote.get(&key, MANIFEST_BYTES_MAX)? else { continue };
                    parse(remote, &key, &bytes)?
                }
            };
            self.0.insert((key.clone(), modified, size_bytes), manifest.clone());
            disks.push(Disk { name: key, manifest, published: modified });
        }
        disks.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(disks)
    }
}

fn used_by(disks: &[Disk]) -> HashSet<ChunkKey> {
    disks.iter().flat_map(|disk| disk.manifest.chunks()).map(|chunk| chunk.key).collect()
}

/// What `prune` is to do.
#[derive(Debug, Clone, Default)]
pub struct PruneOptions {
    /// Disks to remove first.
    pub remove: Vec<String>,
    /// Deletes nothing, and says what would be.
    pub dry_run: bool,
}

/// What `prune` has done, or with [`PruneOptions::dry_run`] would do.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pruned {
    /// Disks that are left.
    pub disks: u64,
    /// Chunks that are left, and the bytes of their objects.
    pub kept: (u64, u64),
    /// Chunks that were deleted, and the bytes of their objects.
    pub deleted: (u64, u64),
    /// Chunks that are to be deleted later, and the bytes of their objects: pushes are under way.
    pub waiting: (u64, u64),
    /// Pushes that are under way, or were broken off less than a day ago.
    pub pushes: u64,
}

/// Deletes chunks that no disk has. `progress` gets the chunks that are done and all that are to be
/// deleted, and returns whether to go on. `None` if it was stopped; another call goes on.
///
/// # Errors
/// The server's errors; [`ObjectError::Damaged`], [`ObjectError::Missing`] for a disk to remove.
pub fn prune(
    remote: &dyn Remote,
    options: &PruneOptions,
    progress: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<Option<Pruned>> {
    for name in &options.remove {
        // Only manifests are removed.
        disk(remote, name)?;
    }
    let mut manifests = Manifests::default();
    if !options.dry_run {
        remote.delete(&options.remove)?;
    }
    let now = server_time(remote)?;
    let chunks = list_chunks(remote)?;
    let mut under_way = pushes(remote)?;
    under_way.retain(|_, push| !push.is_dead(now));
    let is_left = |disk: &Disk| !options.remove.contains(&disk.name);
    let disks: Vec<Disk> = manifests.read(remote)?.into_iter().filter(is_left).collect();
    let used = used_by(&disks);
    let unused: BTreeMap<ChunkKey, u64> = chunks
        .iter()
        .filter(|(key, _)| !used.contains(key) && !under_way.contains_key(&key.push))
        .map(|(key, size_bytes)| (*key, *size_bytes))
        .collect();
    let sum = |keys: &mut dyn Iterator<Item = &ChunkKey>| {
        keys.filter_map(|key| chunks.get(key)).fold((0, 0), |(count, bytes), size| (count + 1, bytes + size))
    };
    let mut found = Pruned { disks: disks.len() as u64, pushes: under_way.len() as u64, ..Pruned::default() };
    if options.dry_run {
        let doomed = sum(&mut unused.keys());
        if under_way.is_empty() {
            found.deleted = doomed
        } else {
            found.waiting = doomed
        }
        found.kept = sum(&mut chunks.keys().filter(|key| !unused.contains_key(*key)));
        return Ok(Some(found));
    }
    let lists = condemn(remote, condemned(remote)?, &unused)?;
    // After all lists were written.
    let under_way = pushes(remote)?;
    let (dead, alive): (Vec<_>, Vec<_>) = under_way.into_iter().partition(|(_, push)| push.is_dead(now));
    found.pushes = alive.len() as u64;
    let waits = |list: &Condemned| alive.iter().any(|(_, push)| push.begun <= list.written + SKEW);
    let (later, ready): (Vec<_>, Vec<_>) = lists.into_iter().partition(waits);
    // After the pushes were listed: what has ended in between has published.
    let used = used_by(&manifests.read(remote)?);
    let doomed: BTreeSet<ChunkKey> =
        ready.iter().flat_map(|list| &list.chunks).filter(|key| !used.contains(key)).copied().collect();
    let total = doomed.len() as u64;
    let keys: Vec<String> = doomed.iter().map(ChunkKey::to_string).collect();
    for (done, some) in (0..).step_by(DELETED_AT_ONCE).zip(keys.chunks(DELETED_AT_ONCE)) {
        if !progress(done, total) {
            return Ok(None);
        }
        remote.delete(some)?;
    }
    progress(total, total);
    remote.delete(&ready.into_iter().map(|list| list.key).collect::<Vec<_>>())?;
    for (id, _) in dead {
        let keys = remote.list(&format!("{PUSHING}{id}/"), false)?.into_iter().map(|found| found.key);
        remote.delete(&keys.collect::<Vec<_>>())?;
    }
    let waiting: BTreeSet<ChunkKey> =
        later.iter().flat_map(|list| &list.chunks).filter(|key| !used.contains(key)).copied().collect();
    found.deleted = sum(&mut doomed.iter());
    found.waiting = sum(&mut waiting.iter());
    found.kept = sum(&mut chunks.keys().filter(|key| !doomed.contains(key) && !waiting.contains(key)));
    Ok(Some(found))
}

fn list_chunks(remote: &dyn Remote) -> Result<HashMap<ChunkKey, u64>> {
    let listed = remote.list(CHUNKS, false)?;
    Ok(listed.into_iter().filter_map(|found| Some((ChunkKey::parse(&found.key)?, found.size_bytes))).collect())
}

/// A push that was begun and has not ended.
#[derive(Debug, Clone, Copy)]
struct UnderWay {
    begun: SystemTime,
    alive: SystemTime,
}

impl UnderWay {
    fn is_dead(&self, now: SystemTime) -> bool {
        now.duration_since(self.alive).is_ok_and(|silent| silent > LEASE)
    }
}

fn pushes(remote: &dyn Remote) -> Result<BTreeMap<PushId, UnderWay>> {
    let mut found: BTreeMap<PushId, UnderWay> = BTreeMap::new();
    for Listed { key, modified, .. } in remote.list(PUSHING, false)? {
        let id = key.strip_prefix(PUSHING).and_then(|rest| PushId::parse(rest.split('/').next()?));
        let Some(id) = id else { continue };
        let push = found.entry(id).or_insert(UnderWay { begun: modified, alive: modified });
        push.begun = push.begun.min(modified);
        push.alive = push.alive.max(modified);
    }
    Ok(found)
}

/// Writes lists of the chunks that are in none. Returns all lists.
fn condemn(remote: &dyn Remote, mut lists: Vec<Condemned>, unused: &BTreeMap<ChunkKey, u64>) -> Result<Vec<Condemned>> {
    let known: HashSet<ChunkKey> = lists.iter().flat_map(|list| &list.chunks).copied().collect();
    let new: Vec<ChunkKey> = unused.keys().filter(|key| !known.contains(key)).copied().collect();
    if new.is_empty() {
        return Ok(lists);
    }
    for chunks in new.chunks(CONDEMNED_MAX) {
        let key = format!("{CONDEMNED}{}", PushId::random()?);
        let text: String = chunks.iter().map(|chunk| format!("{chunk}\n")).collect();
        remote.put(&key, text.into())?;
    }
    // With the server's times.
    lists = condemned(remote)?;
    Ok(lists)
}

/// What the server's clock says.
fn server_time(remote: &dyn Remote) -> Result<SystemTime> {
    let key = format!("{PUSHING}clock-{}", PushId::random()?);
    remote.put(&key, Vec::from("what time is it\n"))?;
    let found = remote.list(PUSHING, false)?.into_iter().find(|found| found.key == key);
    remote.delete(std::slice::from_ref(&key))?;
    let what = "an object that was just written is not listed".to_owned();
    found.map(|found| found.modified).ok_or_else(|| ObjectError::NoRepository { name: remote.name_of(""), what })
}
