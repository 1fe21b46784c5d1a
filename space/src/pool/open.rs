//! Opening a pool from its members.
//!
//! ```text
//!   superblocks ─▶ the newest one counts; histories must agree
//!               ─▶ rights: who is missing, and may the others be written
//!   areas       ─▶ the longest journal counts ─▶ replay ─▶ the map
//!   for writing ─▶ record who is missing or back ─▶ dirty slabs are made equal
//! ```
//!
//! A pool is written if more than half of the members that its superblock counts are there, or by
//! force. The ones that are lost do not count: the survivors have recorded that they went on.

use super::{Pool, State, apply::Taking, lock};
use crate::{
    error::{Result, SpaceError, called},
    free::FreeSlabs,
    log::{History, LogPlace, LogState, OpenArea},
    member::Member,
    pace::Pace,
    sums::SumsCache,
};
use diskwright_format::space::{
    MEMBERS_MAX, slabs_of,
    superblock::{MemberState, Superblock},
};
use diskwright_store::{CacheMode, Files, LimitedStore, LockMode, OpenError, OpenOptions, Store, StoreLimit};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    path::{Path, PathBuf},
    sync::{
        Arc, Condvar, Mutex, OnceLock, RwLock,
        atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// Between two tries of an open that waits.
const PAUSE: Duration = Duration::from_millis(10);

/// How a pool is opened.
#[derive(Debug, Clone, Default)]
pub struct PoolOptions {
    /// For writing too.
    pub writable: bool,
    /// Fail rather than record, in the superblocks of the others, that a member is missing.
    pub whole: bool,
    /// Write it although no majority of its members is there.
    pub force_degraded: bool,
    /// Whether transfers to the members bypass the page cache.
    pub cache: CacheMode,
    /// Where the members' files are.
    pub files: Files,
    /// Members that are used no faster than this.
    pub limits: Vec<(PathBuf, StoreLimit)>,
}

/// A file or device that was opened as a member.
pub(crate) struct MemberFile {
    pub(crate) path: PathBuf,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) size_bytes: u64,
}

pub(crate) fn open_member(path: &Path, writable: bool, cache: CacheMode, files: &Files) -> Result<MemberFile> {
    let lock = if writable { LockMode::Exclusive } else { LockMode::Shared };
    let store = files.open(path, &OpenOptions { writable, lock, cache, ..OpenOptions::default() })?;
    let size_bytes = store.len_bytes().map_err(|error| SpaceError::io("find out the size", path, error))?;
    Ok(MemberFile { path: path.to_owned(), store, size_bytes })
}

/// The members that are there, with their superblocks.
struct Found {
    members: Vec<(MemberFile, Superblock)>,
    /// Members whose files are missing or are no members, with the reason.
    absent: Vec<String>,
}

impl Pool {
    /// As [`Pool::open`]. Waits for `patience` if another program has a member, or an own thread of
    /// a pool that was just dropped.
    ///
    /// # Errors
    /// See [`SpaceError`].
    pub fn open_within(paths: &[PathBuf], options: &PoolOptions, patience: Duration) -> Result<Self> {
        let begun = Instant::now();
        loop {
            match Self::open(paths, options) {
                Err(SpaceError::Open(OpenError::Locked { .. })) if begun.elapsed() < patience => {
                    thread::sleep(PAUSE);
                }
                result => return result,
            }
        }
    }

    /// Opens a pool from its members. Paths that do not exist count as missing members.
    ///
    /// # Errors
    /// See [`SpaceError`].
    pub fn open(paths: &[PathBuf], options: &PoolOptions) -> Result<Self> {
        let found = find(paths, options)?;
        let newest = newest(&found.members)?;
        let name = newest.name.clone();
        let mut warnings: Vec<String> = found.absent.iter().map(|why| format!("pool {name}: {why}")).collect();
        let (mut used, mut back) = (Vec::new(), 0_u64);
        for (file, superblock) in found.members {
            let number = superblock.number;
            let Some(row) = newest.member(number) else {
                warnings.push(format!("pool {name}: {}: it is not a member any more", file.path.display()));
                continue;
            };
            if file.size_bytes < row.size_bytes {
                let (path, found_bytes) = (file.path, file.size_bytes);
                return Err(SpaceError::CutShort { path, found_bytes, expected_bytes: row.size_bytes, pool: name });
            }
            if row.state == MemberState::Lost {
                if superblock.is_earlier_than(&newest) != Some(true) {
                    let why = "it was changed without the others, or is too old; its contents are not used. Add it \
                               anew with `PoolCreateOptions::force`, then remove its old entry";
                    warnings.push(format!("pool {name}: {}: {why}", file.path.display()));
                    continue;
                }
                back |= 1 << number;
            }
            used.push((file, number));
        }
        let counted = |state: MemberState| state != MemberState::Lost;
        let total = newest.members.iter().flatten().filter(|member| counted(member.state)).count();
        let is_there = |number: u8| used.iter().any(|(_, one)| *one == number);
        let present =
            used.iter().filter(|(_, number)| newest.member(*number).is_some_and(|row| counted(row.state))).count();
        let missing = (0_u8..)
            .zip(&newest.members)
            .filter(|(number, row)| row.is_some() && !is_there(*number))
            .fold(0_u64, |all, (number, _)| all | 1 << number);
        if options.writable && present * 2 <= total && !options.force_degraded {
            let why = format!(
                "only {present} of its {total} members are there, and the others may have been used without them. \
                 Connect the others, or go on without them with `PoolOptions::force_degraded`"
            );
            return Err(SpaceError::ReadOnly { pool: name, why });
        }
        if options.writable && options.whole && (missing | back) != 0 {
            return Err(SpaceError::ReadOnly { pool: name, why: "members are missing".into() });
        }
        let pool = Self::assemble(&newest, used, options, missing, warnings)?;
        if missing != 0 {
            pool.require_copies()?;
        }
        pool.mark_unequal();
        if options.writable {
            pool.begin_writing(missing, back)?;
        } else {
            pool.failing.fetch_or(missing, Ordering::AcqRel);
            pool.lost.fetch_or(missing, Ordering::AcqRel);
        }
        pool.open_cache()?;
        Ok(pool)
    }

    /// Reads the journal, and makes the pool from it.
    fn assemble(
        newest: &Superblock,
        used: Vec<(MemberFile, u8)>,
        options: &PoolOptions,
        missing: u64,
        warnings: Vec<String>,
    ) -> Result<Self> {
        let members = [const { OnceLock::new() }; MEMBERS_MAX];
        let mut free: Vec<FreeSlabs> = Vec::new();
        free.resize_with(MEMBERS_MAX, FreeSlabs::default);
        for (file, number) in used {
            let Some(row) = newest.member(number) else { continue };
            let member = Member::new(number, row.class, row.size_bytes, &file.path, file.store);
            let _ = members[usize::from(number)].set(Arc::new(member));
        }
        for (number, row) in newest.members.iter().enumerate() {
            if let Some(row) = row {
                free[number] = FreeSlabs::new(slabs_of(row.size_bytes, newest.slab_shift));
            }
        }
        for area in &newest.areas {
            let slabs = area.slabs().unwrap_or_default();
            slabs.for_each(|slab| {
                free[usize::from(area.member)].take_this(slab);
            });
        }
        let areas: Vec<(u8, OpenArea)> =
            newest.areas.iter().map(|area| (area.member, OpenArea::new(area, newest.slab_shift))).collect();
        let (history, holder, differ) = longest_history(newest, &areas, &members)?;
        let best = areas.iter().find(|(number, _)| *number == holder);
        if let (true, Some((_, area)), Some(member)) = (options.writable, best, members[usize::from(holder)].get()) {
            let rewritten = area.rewrite(member, newest.pool, &history);
            rewritten.map_err(|error| SpaceError::io("write the journal", &member.path, error))?;
        }
        let state = State {
            superblock: newest.clone(),
            free,
            names: BTreeMap::new(),
            next_file: 1,
            dirty: BTreeSet::new(),
            lost_in_map: 0,
            dirtying: Vec::new(),
        };
        let pool = Self {
            id: newest.pool,
            name: newest.name.clone(),
            slab_shift: newest.slab_shift,
            is_writable: options.writable,
            cache: options.cache,
            members,
            failing: AtomicU64::new(0),
            lost: AtomicU64::new(0),
            has_orphans: AtomicBool::new(false),
            journal_failed: AtomicBool::new(false),
            is_closed: AtomicBool::new(history.is_closed()),
            epoch: AtomicU8::new(1),
            rounds: AtomicU64::new(0),
            files: RwLock::new(HashMap::new()),
            state: Mutex::new(state),
            log: Mutex::new(LogState::default()),
            log_moved: Condvar::new(),
            place: Mutex::new(history.place),
            areas: RwLock::new(areas),
            not_busy: Condvar::new(),
            busy_lock: Mutex::new(()),
            served: Default::default(),
            heat_saved: AtomicU64::new(0),
            heat_loaded: AtomicBool::new(false),
            punching: AtomicU32::new(0),
            pace: Pace::default(),
            moves: Default::default(),
            write_cache: OnceLock::new(),
            sums_cache: SumsCache::new(newest.slab_shift),
            sealing: Mutex::default(),
            records: Mutex::default(),
            has_clean: AtomicBool::new(true),
            scarce_at: AtomicU64::new(100),
            warnings: Mutex::new(warnings),
        };
        let bad = |why: String| SpaceError::BadMap { pool: called(&pool.name, pool.id), why };
        let mut state = lock(&pool.state);
        for change in history.changes() {
            let change = change.map_err(|error| bad(error.to_string()))?;
            pool.apply(&mut state, &change, Taking::Free).map_err(bad)?;
        }
        drop(state);
        if (differ || !history.is_closed() && pool.areas().len() > 1) && options.writable {
            // What only one journal has is in all of them from now on.
            pool.failing.fetch_or(missing, Ordering::AcqRel);
            let written = pool.write_checkpoint(&mut lock(&pool.place));
            written.map_err(|error| SpaceError::io("write the journal", Path::new(&pool.name), error))?;
            pool.failing.fetch_and(!missing, Ordering::AcqRel);
        }
        Ok(pool)
    }

    /// Refuses a pool whose slabs lie on missing members only.
    fn require_copies(&self) -> Result<()> {
        let (mut slabs, mut files) = (0, BTreeSet::new());
        let all = self.all_files();
        for file in all {
            for (_, entry) in file.table.mapped(0..1 << 32) {
                if !entry.load().good_copies().any(|copy| self.member(copy.member).is_some()) {
                    slabs += 1;
                    files.insert(file.number);
                }
            }
        }
        if slabs == 0 {
            return Ok(());
        }
        let state = lock(&self.state);
        let missing = (0_u8..)
            .zip(&state.superblock.members)
            .filter(|(number, row)| row.is_some() && self.member(*number).is_none());
        let missing: Vec<String> = missing.map(|(number, _)| format!("member {number}")).collect();
        Err(SpaceError::NoCopy { pool: self.name.clone(), slabs, files: files.len(), missing: missing.join(", ") })
    }

    /// Records who is missing and who is back, and makes dirty slabs equal.
    fn begin_writing(&self, missing: u64, back: u64) -> Result<()> {
        let failed = |error| SpaceError::io("record its members", Path::new(&self.name), error);
        let before = lock(&self.state).superblock.clone();
        let changes = self.settle_members(missing, back);
        let mut state = lock(&self.state);
        let is_changed = state.superblock != before;
        changes.iter().for_each(|change| {
            self.append(&mut state, change);
        });
        drop(state);
        // The map first: it may say that a member is lost which the superblock counts, but not the
        // other way round for one that is back.
        self.commit_all().map_err(failed)?;
        let differs = self.live_members().any(|member| {
            Member::read_superblock(&*member.store, &member.path)
                .map_or(true, |found| found.generation != before.generation)
        });
        if is_changed || differs {
            self.write_superblocks().map_err(failed)?;
        }
        let named: BTreeSet<u32> = lock(&self.state).names.values().copied().collect();
        let unnamed = self.all_files().into_iter().filter(|file| !named.contains(&file.number));
        unnamed.for_each(|file| self.remove_unnamed(&file));
        self.settle_areas()?;
        let compared = self.resync_dirty().map_err(failed)?;
        if compared > 0 {
            self.warn(format!(
                "pool {}: it was not closed; the copies of {compared} slabs were compared and made equal",
                self.name
            ));
        }
        Ok(())
    }
}

/// Opens the members and reads their superblocks.
fn find(paths: &[PathBuf], options: &PoolOptions) -> Result<Found> {
    let mut found = Found { members: Vec::new(), absent: Vec::new() };
    let mut first_error = None;
    for path in paths {
        let opened = open_member(path, options.writable, options.cache, &options.files);
        let read = opened.and_then(|mut file| {
            if let Some((_, limit)) = options.limits.iter().find(|(limited, _)| limited == path) {
                let store = LimitedStore::new(file.store, *limit);
                file.store = Arc::new(store.map_err(|error| SpaceError::io("limit the speed", path, error))?);
            }
            let superblock = Member::read_superblock(&*file.store, &file.path)?;
            Ok((file, superblock))
        });
        match read {
            Ok(member) => found.members.push(member),
            // Somebody uses the pool: it must not be opened without this member.
            Err(SpaceError::Open(error @ OpenError::Locked { .. })) => return Err(error.into()),
            Err(error) => {
                found.absent.push(error.to_string());
                first_error.get_or_insert(error);
            }
        }
    }
    match (found.members.is_empty(), first_error) {
        (false, _) => Ok(found),
        (true, Some(error)) => Err(error),
        (true, None) => Err(SpaceError::Usage { what: "a pool without members cannot be opened".into() }),
    }
}

/// The superblock that counts.
fn newest(members: &[(MemberFile, Superblock)]) -> Result<Superblock> {
    let (first, rest) = members.split_first().ok_or_else(|| SpaceError::Usage { what: "no members".into() })?;
    for (file, superblock) in rest {
        if superblock.pool != first.1.pool {
            return Err(SpaceError::AnotherPool {
                path: file.path.clone(),
                found: called(&superblock.name, superblock.pool),
                other: first.0.path.clone(),
                expected: called(&first.1.name, first.1.pool),
            });
        }
    }
    for (place, (file, superblock)) in members.iter().enumerate() {
        if let Some((other, _)) = members[..place].iter().find(|(_, other)| other.number == superblock.number) {
            let pool = superblock.name.clone();
            return Err(SpaceError::Cloned { path: file.path.clone(), other: other.path.clone(), pool });
        }
    }
    let (leader, newest) = members.iter().max_by_key(|(_, superblock)| superblock.generation).unwrap_or(first);
    for (file, superblock) in members {
        // One that the newest superblock has given up is looked at later.
        let is_counted = newest.member(superblock.number).is_some_and(|row| row.state != MemberState::Lost);
        let gave_up = superblock.member(newest.number).is_some_and(|row| row.state == MemberState::Lost);
        if superblock.is_earlier_than(newest) != Some(true) && (is_counted || gave_up) {
            let pool = newest.name.clone();
            return Err(SpaceError::Diverged { pool, path: leader.path.clone(), other: file.path.clone() });
        }
    }
    Ok(newest.clone())
}

/// The longest history of the areas that can be read, the member that holds it, and whether they
/// differ.
fn longest_history(
    newest: &Superblock,
    areas: &[(u8, OpenArea)],
    members: &[OnceLock<Arc<Member>>; MEMBERS_MAX],
) -> Result<(History, u8, bool)> {
    let mut best: Option<(History, u8)> = None;
    let (mut differ, mut why) = (false, Vec::new());
    for (number, area) in areas {
        // A lost member's journal is old.
        if newest.member(*number).is_none_or(|row| row.state == MemberState::Lost) {
            differ |= members[usize::from(*number)].get().is_some();
            continue;
        }
        let Some(member) = members[usize::from(*number)].get() else {
            why.push(format!("member {number} is missing"));
            continue;
        };
        match area.read(&*member.store, newest.pool) {
            Ok(history) => {
                let place = |place: &LogPlace| (place.position, place.checkpoint, place.next_place % 2);
                match &best {
                    None => best = Some((history, *number)),
                    Some((known, _)) => {
                        differ |= place(&known.place) != place(&history.place);
                        if history.place.position.sequence > known.place.position.sequence {
                            best = Some((history, *number));
                        }
                    }
                }
            }
            Err(error) => {
                differ = true;
                why.push(format!("{}: {error}", member.path.display()));
            }
        }
    }
    let (history, holder) =
        best.ok_or_else(|| SpaceError::NoJournal { pool: called(&newest.name, newest.pool), why: why.join("; ") })?;
    Ok((history, holder, differ))
}
