//! An open pool: its members, the map of its files, and the journal through which the map changes.
//!
//! ```text
//!   file.rs       transfers: hold a slab, find its copies, release it
//!   slow.rs       first writes, zeroing, failures: one slab at a time, by blocking calls
//!   pool/apply    what a change does to the map; the same for a commit and for a replay
//!   pool/commit   append, group commit, checkpoint
//!   pool/open     superblocks, rights, replay
//!   pool/create   new pools
//!   pool/areas    where the journal lies
//!   pool/drain    members join and leave
//!   pool/lose     a member that fails while the pool is open, and one that comes back
//!   pool/resync   copies that may differ, or are stale, are made equal
//!   pool/optimize what is used often moves to the fast members
//!   pool/report   heat, and what a larger or smaller fast tier would serve
//!   pool/records  checksums of a slab, on its members and in memory
//!   pool/seal     clean slabs get checksums
//!   pool/scrub    sealed slabs are compared with their checksums, and mended
//!   pool/status   what `space status` shows
//!   pool/thin     warnings before the pool is full
//! ```
//!
//! Locks, in the order in which they are taken: `state` (decisions about the map: free slabs,
//! names, members), then `log` (changes that wait for a commit). `state` is held for I/O only when
//! a member is lost, `log` never. Transfers take neither. `sealing` comes before both: it belongs
//! to the one thread that seals. `records` is taken for the write of one record of checksums.
//!
//! What must hold at any moment of a power cut:
//! - A slab's copies are zeros, durably, before the map names them.
//! - A slab is dirty, durably, before a payload is written to it.
//! - A slab becomes clean only after a sync of its copies that began after its last write.
//! - A slab is sealed only when its copies are equal, and each that is not stale has a record of
//!   its checksums, durably, which was written after the last write.
//! - A write is answered when all copies have it, or when the survivors have recorded, durably,
//!   that the other members are lost: their copies of all dirty slabs are stale from then on.
//! - A slab is used again only when the change that freed it is durable.

pub(crate) mod apply;
pub(crate) mod areas;
pub(crate) mod commit;
pub(crate) mod create;
pub(crate) mod drain;
pub(crate) mod lose;
pub(crate) mod moves;
pub(crate) mod open;
pub(crate) mod optimize;
mod own_files;
mod punch;
pub(crate) mod records;
pub(crate) mod report;
pub(crate) mod resync;
pub(crate) mod scrub;
pub(crate) mod seal;
pub(crate) mod status;
pub(crate) mod thin;

pub use crate::file_state::NewFile;
pub(crate) use crate::file_state::{FileState, lock};

use crate::{
    cache::Cache,
    error::{Result, SpaceError},
    free::FreeSlabs,
    log::{LogPlace, LogState, OpenArea, Ticket},
    member::Member,
    moved::Moves,
    pace::Pace,
    sums::{SealCursor, SumsCache},
};
use diskwright_format::space::{
    MEMBERS_MAX, NAME_BYTES_MAX,
    change::{COLUMNS_MAX, Change, Tier},
    superblock::Superblock,
};
use diskwright_store::CacheMode;
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    io,
    sync::{
        Arc, Condvar, Mutex, OnceLock, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering},
    },
};
use uuid::Uuid;

/// What the decisions about the map need; guarded by the `state` lock.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) superblock: Superblock,
    /// Free slabs by the number of the member.
    pub(crate) free: Vec<FreeSlabs>,
    pub(crate) names: BTreeMap<String, u32>,
    pub(crate) next_file: u32,
    /// Slabs that became dirty and were not made clean since: file and index.
    pub(crate) dirty: BTreeSet<(u32, u32)>,
    /// Members that the map takes for lost.
    pub(crate) lost_in_map: u64,
    /// Changes that make slabs dirty and perhaps are not in the map yet: file, first slab, ticket.
    pub(crate) dirtying: Vec<(u32, u32, Ticket)>,
}

/// Warnings that are kept. A member that rots would have one for each slab.
const WARNINGS_MAX: usize = 1000;

/// An open pool; see the module documentation.
#[derive(Debug)]
pub struct Pool {
    id: Uuid,
    name: String,
    slab_shift: u8,
    is_writable: bool,
    cache: CacheMode,
    members: [OnceLock<Arc<Member>>; MEMBERS_MAX],
    /// Members that failed, one bit each, and those of them whose loss is recorded durably.
    failing: AtomicU64,
    lost: AtomicU64,
    /// See [`Pool::require_copies_of_dirty`].
    has_orphans: AtomicBool,
    /// The journal failed: see [`Pool::require_journal`].
    journal_failed: AtomicBool,
    /// The last change of the journal says that the pool was closed.
    is_closed: AtomicBool,
    /// Counts the rounds of [`Pool::tick`].
    epoch: AtomicU8,
    rounds: AtomicU64,
    files: RwLock<HashMap<u32, Arc<FileState>>>,
    state: Mutex<State>,
    log: Mutex<LogState>,
    log_moved: Condvar,
    place: Mutex<LogPlace>,
    areas: RwLock<Vec<(u8, OpenArea)>>,
    /// Wakes those that wait for a busy slab.
    not_busy: Condvar,
    busy_lock: Mutex<()>,
    /// Counted requests that the fast and the slow members have served.
    served: [AtomicU64; 2],
    /// How many of them there were when the heat was saved last, and whether that of earlier
    /// sessions was read.
    heat_saved: AtomicU64,
    heat_loaded: AtomicBool,
    /// Free slabs that are taken, as they get their holes.
    punching: AtomicU32,
    /// How long moves pause.
    pub(crate) pace: Pace,
    /// What has moved between the tiers.
    moves: Mutex<Moves>,
    /// The write-back cache, if there is one.
    write_cache: OnceLock<Arc<Cache>>,
    sums_cache: SumsCache,
    sealing: Mutex<SealCursor>,
    records: Mutex<()>,
    /// There may be clean slabs, which are to be sealed.
    has_clean: AtomicBool,
    /// Hundredths that were free when the pool last warned that it is nearly full.
    scarce_at: AtomicU64,
    /// What the user should know, as sentences.
    warnings: Mutex<Vec<String>>,
}

impl Pool {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its identity.
    pub fn id(&self) -> Uuid {
        self.id
    }

    /// Size of a slab in bytes.
    pub fn slab_bytes(&self) -> u64 {
        1 << self.slab_shift
    }

    /// Whether it can be written.
    pub fn is_writable(&self) -> bool {
        self.is_writable
    }

    /// Whether transfers to its members bypass the page cache.
    pub fn cache_mode(&self) -> CacheMode {
        self.cache
    }

    /// What the user should know: missing members, copies that were made equal.
    pub fn warnings(&self) -> Vec<String> {
        lock(&self.warnings).clone()
    }

    pub(crate) fn warn(&self, what: String) {
        let mut warnings = lock(&self.warnings);
        if warnings.len() < WARNINGS_MAX && !warnings.contains(&what) {
            tracing::warn!("{what}");
            warnings.push(what);
        }
    }

    #[inline]
    pub(crate) fn cache(&self) -> Option<&Arc<Cache>> {
        self.write_cache.get()
    }

    /// Whether a file is the log of the write-back cache.
    pub(crate) fn is_log(&self, file: &FileState) -> bool {
        self.cache().is_some_and(|cache| cache.file.number == file.number)
    }

    pub(crate) fn cache_cell(&self) -> &OnceLock<Arc<Cache>> {
        &self.write_cache
    }

    /// Whether a member is missing or has failed.
    pub(crate) fn has_lost(&self) -> bool {
        let failing = self.failing.load(Ordering::Acquire);
        // One that was removed counts as failed, so that nobody uses it.
        failing != 0
            && (0_u8..)
                .zip(&lock(&self.state).superblock.members)
                .any(|(number, row)| row.is_some() && failing >> number & 1 == 1)
    }

    pub(crate) fn sums_cache(&self) -> &SumsCache {
        &self.sums_cache
    }

    pub(crate) fn records_lock(&self) -> &Mutex<()> {
        &self.records
    }

    pub(crate) fn slab_shift(&self) -> u8 {
        self.slab_shift
    }

    pub(crate) fn epoch(&self) -> u8 {
        self.epoch.load(Ordering::Relaxed)
    }

    pub(crate) fn member(&self, number: u8) -> Option<&Arc<Member>> {
        self.members.get(usize::from(number))?.get()
    }

    /// The member, unless it is missing or has failed.
    #[inline]
    pub(crate) fn live_member(&self, number: u8) -> Option<&Arc<Member>> {
        self.member(number).filter(|_| self.failing.load(Ordering::Acquire) >> number & 1 == 0)
    }

    /// The live members that can hold data.
    pub(crate) fn holders(&self) -> impl Iterator<Item = &Arc<Member>> {
        self.live_members().filter(|member| !member.is_witness())
    }

    pub(crate) fn live_members(&self) -> impl Iterator<Item = &Arc<Member>> {
        self.members.iter().filter_map(OnceLock::get).filter(|member| self.live_member(member.number).is_some())
    }

    /// Members that have failed without a record yet: writes must wait for it.
    #[inline]
    pub(crate) fn unrecorded(&self) -> u64 {
        self.failing.load(Ordering::Acquire) & !self.lost.load(Ordering::Acquire)
    }

    fn areas(&self) -> Vec<(u8, OpenArea)> {
        self.areas.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn all_files(&self) -> Vec<Arc<FileState>> {
        self.files.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    /// Whether the journal has failed; see [`Pool::require_journal`].
    #[inline]
    pub(crate) fn journal_failed(&self) -> bool {
        self.journal_failed.load(Ordering::Acquire)
    }

    /// Refuses writes and flushes after the journal has failed. Changes whose fate is unknown may
    /// take effect when the pool is opened again: a slab that was being unmapped would then lose
    /// what was written to it since.
    pub(crate) fn require_journal(&self) -> io::Result<()> {
        if !self.journal_failed() {
            return Ok(());
        }
        let why = lock(&self.log).failed.clone().unwrap_or_default();
        Err(io::Error::other(format!("{why}; nothing can be written until the pool is closed and opened again")))
    }

    pub(crate) fn fail_journal(&self, why: String) {
        lock(&self.log).failed.get_or_insert(why);
        self.journal_failed.store(true, Ordering::Release);
        self.log_moved.notify_all();
    }

    pub(crate) fn file(&self, number: u32) -> Option<Arc<FileState>> {
        self.files.read().unwrap_or_else(PoisonError::into_inner).get(&number).cloned()
    }

    pub(crate) fn file_named(&self, name: &str) -> Option<Arc<FileState>> {
        let number = *lock(&self.state).names.get(name)?;
        self.file(number)
    }

    /// The names of its files, in order.
    pub fn names(&self) -> Vec<String> {
        lock(&self.state).names.keys().filter(|name| !is_own(name)).cloned().collect()
    }

    /// Copies that a new file has if nothing else is said.
    pub fn default_copies(&self) -> u8 {
        lock(&self.state).superblock.copies
    }

    pub(crate) fn state(&self) -> &Mutex<State> {
        &self.state
    }

    pub(crate) fn read_only(&self, why: impl Into<String>) -> SpaceError {
        SpaceError::ReadOnly { pool: self.name.clone(), why: why.into() }
    }

    fn require_writable(&self) -> Result<()> {
        if self.is_writable { Ok(()) } else { Err(self.read_only("it was opened for reading")) }
    }

    /// Creates a file, durably.
    ///
    /// # Errors
    /// [`SpaceError::Disk`] if the name exists; [`SpaceError::BadName`]; [`SpaceError::Usage`] for
    /// more copies than the pool has members.
    pub fn create_file(&self, name: &str, new: NewFile) -> Result<()> {
        check_name(name)?;
        self.create_unchecked(name, new)
    }

    /// The same for any name: the pool's own begin with a slash.
    pub(crate) fn create_unchecked(&self, name: &str, new: NewFile) -> Result<()> {
        self.require_writable()?;
        let mut state = lock(&self.state);
        // Lost ones count: the copies are added when there are enough members again.
        let members = state.superblock.members.iter().flatten().filter(|member| !member.is_witness()).count();
        if usize::from(new.copies) > members || !(1..=3).contains(&new.copies) {
            let what = format!(
                "space://{}/{name}: {} copies need as many members, and the pool has {members}",
                self.name, new.copies
            );
            return Err(SpaceError::Usage { what });
        }
        if !(1..=COLUMNS_MAX).contains(&new.columns) {
            let what = format!("space://{}/{name}: {} columns; a disk has 1 to {COLUMNS_MAX}", self.name, new.columns);
            return Err(SpaceError::Usage { what });
        }
        let needed = usize::from(new.columns) * usize::from(new.copies);
        if new.columns > 1 && needed > members {
            let what = format!(
                "space://{}/{name}: {} columns of {} copies need {needed} members, and the pool has {members}",
                self.name, new.columns, new.copies
            );
            return Err(SpaceError::Usage { what });
        }
        if state.names.contains_key(name) {
            return Err(SpaceError::Disk { pool: self.name.clone(), name: name.to_owned(), exists: true });
        }
        let file = state.next_file;
        state.next_file = state.next_file.checked_add(1).ok_or_else(|| self.read_only("it has had 2^32 files"))?;
        // The name is taken now; the file appears when it is durable.
        state.names.insert(name.to_owned(), file);
        let NewFile { len_bytes, copies, columns, tier } = new;
        let ticket = self.append(&mut state, &Change::File { file, len_bytes, copies, columns, tier, name });
        drop(state);
        let committed = self.wait(ticket);
        if committed.is_err() {
            lock(&self.state).names.remove(name);
        }
        self.named(committed, "record the new disk")
    }

    /// Removes a name of a file, durably. With the last name the file is gone, and its slabs are
    /// free; but not before the last store that has it open is closed.
    ///
    /// # Errors
    /// [`SpaceError::Disk`] if there is none.
    pub fn remove_file(&self, name: &str) -> Result<()> {
        self.require_writable()?;
        let mut state = lock(&self.state);
        let mut changes = Vec::new();
        let unnamed = self.unname(&state, name, &mut changes)?;
        let ticket = self.append_together(&mut state, &changes);
        drop(state);
        self.settled(self.wait(ticket), unnamed, "record the removal")
    }

    /// Gives a file another name, durably. An existing file at `to` is replaced if `replace`, as by
    /// [`Pool::remove_file`].
    ///
    /// # Errors
    /// As [`Pool::create_file`] and [`Pool::remove_file`].
    pub fn rename_file(&self, from: &str, to: &str, replace: bool) -> Result<()> {
        self.require_writable()?;
        check_name(to)?;
        let mut state = lock(&self.state);
        let file = self.named_in(&state, from)?;
        let old = state.names.get(to).copied();
        if from == to || old == Some(file.number) {
            // As rename(2) does with two names of one file.
            return Ok(());
        }
        let mut changes = Vec::new();
        let mut unnamed = None;
        if old.is_some() {
            if !replace {
                return Err(SpaceError::Disk { pool: self.name.clone(), name: to.to_owned(), exists: true });
            }
            unnamed = self.unname(&state, to, &mut changes)?;
        }
        changes.push(Change::Named { file: file.number, name: to });
        changes.push(Change::Unnamed { name: from });
        // All changes are in one block, so a power cut leaves all or none.
        let ticket = self.append_together(&mut state, &changes);
        drop(state);
        self.settled(self.wait(ticket), unnamed, "record the new name")
    }

    /// Adds the changes that take a name from its file. With the last name the file is marked, so
    /// that it cannot be opened any more; it is returned.
    fn unname<'a>(
        &self,
        state: &State,
        name: &'a str,
        changes: &mut Vec<Change<'a>>,
    ) -> Result<Option<Arc<FileState>>> {
        let file = self.named_in(state, name)?;
        changes.push(Change::Unnamed { name });
        if state.names.values().filter(|&&number| number == file.number).count() > 1 {
            return Ok(None);
        }
        let mut openers = lock(&file.openers);
        if openers.is_unnamed {
            return Err(self.no_file(name));
        }
        openers.is_unnamed = true;
        if openers.stores == 0 {
            changes.push(Change::Removed { file: file.number });
        }
        drop(openers);
        Ok(Some(file))
    }

    /// Removes a file that has no name, since its last store was closed.
    pub(crate) fn remove_unnamed(&self, file: &FileState) {
        let mut state = lock(&self.state);
        if self.is_writable && self.file(file.number).is_some() {
            // Durable with the next commit; at the latest when the pool is opened again.
            self.append(&mut state, &Change::Removed { file: file.number });
        }
    }

    /// Says where the slabs of a file belong, durably. New slabs go there; [`Pool::optimize`] moves
    /// the others.
    ///
    /// # Errors
    /// [`SpaceError::Disk`] if there is none.
    pub fn pin_file(&self, name: &str, tier: Tier) -> Result<()> {
        self.require_writable()?;
        let mut state = lock(&self.state);
        let file = self.named_in(&state, name)?.number;
        let ticket = self.append(&mut state, &Change::Tier { file, tier });
        drop(state);
        self.settled(self.wait(ticket), None, "record the tier")
    }

    /// Gives a file a second name, durably.
    ///
    /// # Errors
    /// As [`Pool::create_file`].
    pub fn link_file(&self, existing: &str, new: &str) -> Result<()> {
        self.require_writable()?;
        check_name(new)?;
        let mut state = lock(&self.state);
        let file = self.named_in(&state, existing)?;
        if state.names.contains_key(new) {
            return Err(SpaceError::Disk { pool: self.name.clone(), name: new.to_owned(), exists: true });
        }
        let ticket = self.append(&mut state, &Change::Named { file: file.number, name: new });
        drop(state);
        self.settled(self.wait(ticket), None, "record the second name")
    }

    fn named_in(&self, state: &State, name: &str) -> Result<Arc<FileState>> {
        let number = state.names.get(name).ok_or_else(|| self.no_file(name))?;
        self.file(*number).ok_or_else(|| self.no_file(name))
    }

    /// The result of a change of names. A file that was to go stays if the change failed.
    fn settled(&self, result: io::Result<()>, unnamed: Option<Arc<FileState>>, doing: &'static str) -> Result<()> {
        if let (Err(_), Some(file)) = (&result, unnamed) {
            lock(&file.openers).is_unnamed = false;
        }
        self.named(result, doing)
    }

    pub(crate) fn no_file(&self, name: &str) -> SpaceError {
        SpaceError::Disk { pool: self.name.clone(), name: name.to_owned(), exists: false }
    }

    /// Adds the pool's name to an error of the journal.
    fn named(&self, result: io::Result<()>, doing: &'static str) -> Result<()> {
        result.map_err(|error| SpaceError::io(doing, std::path::Path::new(&format!("space://{}", self.name)), error))
    }

    /// Waits a moment for a busy slab.
    pub(crate) fn wait_not_busy(&self) {
        let guard = lock(&self.busy_lock);
        let limit = std::time::Duration::from_micros(200);
        drop(self.not_busy.wait_timeout(guard, limit).unwrap_or_else(PoisonError::into_inner));
    }

    pub(crate) fn wake_not_busy(&self) {
        self.not_busy.notify_all();
    }

    /// Syncs every member that was written since its last sync, and records those that fail as
    /// lost.
    pub(crate) fn sync_members(&self) -> io::Result<()> {
        self.require_journal()?;
        let members: Vec<Arc<Member>> = self.live_members().map(Arc::clone).collect();
        for member in members {
            if let Err(error) = member.sync() {
                self.lose(member.number, &error)?;
            }
        }
        self.wait_for_records()?;
        self.require_copies_of_dirty()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // What stays dirty is compared at the next open.
        let _ = self.close();
    }
}

/// Whether a name is one of the pool's own files.
pub(crate) fn is_own(name: &str) -> bool {
    name.starts_with('/')
}

/// Checks the name of a pool or a file.
pub(crate) fn check_name(name: &str) -> Result<()> {
    let why = if name.is_empty() || name.len() > NAME_BYTES_MAX {
        "it must have 1 to 255 bytes"
    } else if name.contains('/') || name.chars().any(char::is_control) {
        "it must have no slash and no control characters"
    } else if name == "." || name == ".." {
        "the name is reserved"
    } else {
        return Ok(());
    };
    Err(SpaceError::BadName { name: name.to_owned(), why })
}
