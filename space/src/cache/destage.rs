//! What is in the log goes to its slabs, so that the log has room again.
//!
//! ```text
//!   a round   headers for what has none ─▶ the oldest groups ─▶ their slabs, by address
//!             ─▶ each: for itself, its live blocks from the log to its copies
//!             ─▶ sync ─▶ anchor ─▶ sync ─▶ the tail moves
//!             ─▶ slabs that lie on fast members by now: unlog
//!   unlog     one slab and its neighbours: destaged ─▶ sync ─▶ a row that forgets them ─▶ sync
//! ```
//!
//! Of a slab all live blocks are destaged, not only the oldest: it is visited once. When the log is
//! nearly full only the oldest are, so that its tail moves soon. Writers then get as many blocks as
//! were destaged, one by one. So they are slowed down evenly, to the speed of the slow members.

use super::{
    ring::{Live, Oldest, SlabKey},
    state::Cache,
};
use crate::{
    busy::Busy,
    copies::{DIRTY_GROUP, Payload},
    pool::{FileState, Pool, lock},
};
use diskwright_format::space::{
    BLOCK_BYTES,
    change::{Change, SlabState},
};
use std::{
    io,
    sync::{
        Arc, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// Threads that destage, so that a slow member has several requests to choose from.
const THREADS: usize = 4;

/// A log that is fuller than one part in this many is destaged.
const FULL: u64 = 2;

/// What is in the log for this long is destaged.
const OLD: Duration = Duration::from_secs(30);

/// How long the worker sleeps if nobody wakes it.
const PAUSE: Duration = Duration::from_millis(500);

/// A round of destaging.
struct Round<'a> {
    oldest: Oldest,
    goes_on: &'a (dyn Fn() -> bool + Sync),
    /// It was stopped, so something may have been left out.
    is_cut: AtomicBool,
    /// Old blocks that were written to where they belong.
    destaged: AtomicU64,
    /// Whether all blocks of the slabs were, not only the old ones.
    is_whole: AtomicBool,
}

impl Round<'_> {
    /// Whether to stop. Once it was said, it stays.
    fn is_over(&self) -> bool {
        if !self.is_cut.load(Ordering::Relaxed) && !(self.goes_on)() {
            self.is_cut.store(true, Ordering::Relaxed);
        }
        self.is_cut.load(Ordering::Relaxed)
    }

    /// Lets writers have as many blocks as the end of the round will free, evenly.
    fn grant(&self, cache: &Cache, run: &[(u16, Live)]) {
        let old = run.iter().filter(|(_, live)| live.position < self.oldest.limit).count() as u64;
        let before = self.destaged.fetch_add(old, Ordering::Relaxed);
        let granted = |destaged: u64| destaged.saturating_mul(self.oldest.blocks) / self.oldest.live.max(1);
        cache.inner().ring.grant(granted(before + old) - granted(before));
        cache.moved.notify_all();
    }
}

impl Pool {
    /// Writes the oldest `blocks` of the write-back cache to where they belong, or all if there are
    /// fewer. Returns whether there was anything.
    ///
    /// # Errors
    /// A member's error. What could not be written stays in the cache.
    pub fn destage(&self, blocks: u64) -> io::Result<bool> {
        self.destage_while(blocks, &|| true)
    }

    /// As [`Pool::destage`]. Stops when `goes_on` says no: then no room was made.
    fn destage_while(&self, blocks: u64, goes_on: &(dyn Fn() -> bool + Sync)) -> io::Result<bool> {
        let Some(cache) = self.cache() else { return Ok(false) };
        let _one = lock(&cache.destaging);
        cache.flush(self)?;
        let (oldest, begun) = {
            let inner = cache.inner();
            (inner.ring.oldest(blocks), inner.ring.next_place())
        };
        let Some(oldest) = oldest else { return Ok(false) };
        let slabs = self.by_address(&oldest);
        self.make_all_dirty(&slabs)?;
        let (destaged, is_whole, is_cut) = (AtomicU64::new(0), AtomicBool::new(true), AtomicBool::new(false));
        let round = Round { oldest, goes_on, is_cut, destaged, is_whole };
        let next = AtomicUsize::new(0);
        let work = || -> io::Result<()> {
            while let Some(&key) = slabs.get(next.fetch_add(1, Ordering::Relaxed)) {
                self.destage_slab(cache, key, &round)?;
            }
            Ok(())
        };
        thread::scope(|scope| {
            let others: Vec<_> = (1..THREADS.min(slabs.len())).map(|_| scope.spawn(work)).collect();
            let first = work();
            // What a thread that panicked has left undone must stay in the log.
            let panicked = |_| Err(io::Error::other("internal error: a thread that empties the cache panicked"));
            others.into_iter().map(|other| other.join().unwrap_or_else(panicked)).fold(first, io::Result::and)
        })?;
        if round.is_cut.load(Ordering::Relaxed) {
            return Ok(false);
        }
        self.sync_members()?;
        let (anchor, place) = {
            let inner = cache.inner();
            let Oldest { slabs, end, .. } = &round.oldest;
            let is_whole = round.is_whole.load(Ordering::Relaxed);
            let end = if is_whole { inner.ring.end_of(slabs, *end, begun) } else { *end };
            let anchor = inner.ring.anchor_at(end.sequence);
            (anchor, anchor.number % 2 * BLOCK_BYTES as u64)
        };
        self.write_beside_others(&cache.file, 0, place, &anchor.to_block(self.id()))?;
        self.sync_members()?;
        let mut inner = cache.inner();
        inner.ring.advance(&anchor, |key| {
            // While the lock is held: a write that enters sets it again.
            if let Some(file) = self.file(key.0) {
                file.table.entry(key.1).set_logged(false);
            }
        });
        inner.failure = None;
        drop(inner);
        cache.moved.notify_all();
        self.unlog_fast(&slabs)?;
        Ok(true)
    }

    /// Makes the log name none of these slabs that lie on fast members by now: while it names one,
    /// all writes to it enter, and it never leaves.
    fn unlog_fast(&self, slabs: &[SlabKey]) -> io::Result<()> {
        let mut left: Vec<SlabKey> = slabs.to_vec();
        left.sort_unstable();
        for of_file in left.chunk_by(|one, next| one.0 == next.0) {
            let Some(file) = of_file.first().and_then(|key| self.file(key.0)) else { continue };
            let Some(_kept) = self.keep(&file) else { continue };
            let fast = of_file.iter().filter_map(|key| Some((key.1, file.table.get(key.1)?))).filter(|(_, entry)| {
                let slab = entry.load();
                slab.is_logged() && slab.state().is_some() && !self.is_slow(slab.good_copies())
            });
            // Who has one and waits for another one might be waited for: so only the first is
            // waited for. The others come in a later round.
            let mut busy: Vec<(u32, Busy<'_>)> = Vec::new();
            for (index, entry) in fast {
                match busy.is_empty() {
                    true => busy.push((index, Busy::wait(self, entry))),
                    false => busy.extend(Busy::try_now(self, entry).map(|busy| (index, busy))),
                }
            }
            let indices: Vec<u32> = busy.iter().map(|(index, _)| *index).collect();
            // Without room in the log they come in a later round too, and so does one with a block
            // that cannot be read, until that is written anew.
            let unlog = |indices: &[u32]| match self.unlog(&file, indices) {
                Err(error) if error.kind() == io::ErrorKind::InvalidData => Ok(false),
                result => result,
            };
            if !unlog(&indices)? {
                for index in indices {
                    unlog(&[index])?;
                }
            }
        }
        Ok(())
    }

    /// The slabs of the oldest groups, in the order in which they lie on the members.
    fn by_address(&self, oldest: &Oldest) -> Vec<SlabKey> {
        let mut slabs: Vec<SlabKey> = oldest.slabs.iter().copied().collect();
        slabs.sort_by_cached_key(|&(file, index)| {
            let slab = self.file(file).and_then(|file| Some(file.table.get(index)?.load()));
            slab.and_then(|slab| slab.copies().into_iter().flatten().next()).map(|copy| (copy.member, copy.slab))
        });
        slabs
    }

    /// Makes slabs dirty with one commit.
    pub(super) fn make_all_dirty(&self, slabs: &[SlabKey]) -> io::Result<()> {
        let mut groups: Vec<SlabKey> = Vec::new();
        for &(number, index) in slabs {
            let state = self.file(number).and_then(|file| file.table.get(index)?.load().state());
            if matches!(state, Some(SlabState::Clean | SlabState::Sealed)) {
                groups.push((number, index - index % DIRTY_GROUP));
            }
        }
        groups.sort_unstable();
        groups.dedup();
        if groups.is_empty() {
            return Ok(());
        }
        let mut state = lock(self.state());
        let mut last = None;
        for (file, first) in groups {
            let change = Change::State { file, first, count: DIRTY_GROUP, state: SlabState::Dirty };
            let ticket = self.append(&mut state, &change);
            state.dirtying.push((file, first, ticket));
            last = Some(ticket);
        }
        drop(state);
        last.map_or(Ok(()), |ticket| self.wait(ticket))
    }

    fn destage_slab(&self, cache: &Cache, key: SlabKey, round: &Round<'_>) -> io::Result<()> {
        if round.is_over() {
            return Ok(());
        }
        let file = self.file(key.0);
        // Its slabs must not become another file's while they are written.
        let Some((file, _kept)) = file.as_ref().and_then(|file| Some((file, self.keep(file)?))) else {
            cache.inner().ring.drop_slab(key);
            return Ok(());
        };
        let Some(entry) = file.table.get(key.1) else { return Ok(()) };
        let _busy = Busy::wait(self, entry);
        let mut live = cache.inner().ring.live_of(key);
        if cache.inner().ring.is_nearly_low() {
            // Only what is necessary, so that writers soon get room.
            let before = live.len();
            live.retain(|(_, live)| live.position < round.oldest.limit);
            if live.len() < before {
                round.is_whole.store(false, Ordering::Relaxed);
            }
        }
        self.destage_blocks(cache, file, key.1, &live, Some(round))
    }

    /// Writes live blocks of a busy slab to its copies. Durable with the next sync. What cannot be
    /// read stays in the log if this is part of a round, and is an error otherwise.
    fn destage_blocks(
        &self,
        cache: &Cache,
        file: &FileState,
        index: u32,
        live: &[(u16, Live)],
        round: Option<&Round<'_>>,
    ) -> io::Result<()> {
        let key = (file.number, index);
        if file.table.entry(index).load().state().is_none() {
            // It was unmapped when it was forgotten already.
            cache.inner().ring.drop_slab(key);
            return Ok(());
        }
        let follows = |one: &(u16, Live), next: &(u16, Live)| one.0 + 1 == next.0;
        for run in live.chunk_by(follows) {
            if round.is_some_and(Round::is_over) {
                break;
            }
            let mut bytes = vec![0; run.len() * BLOCK_BYTES];
            let mut good = Vec::new();
            for ((block, live), buf) in run.iter().zip(bytes.chunks_mut(BLOCK_BYTES)) {
                match cache.read(self, live.position, &[live.sum], buf) {
                    Ok(()) => good.push((*block, *live)),
                    Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                        self.warn(format!(
                            "pool {}: {}: block {block} of it: {error}",
                            self.name(),
                            self.described(file, index)
                        ));
                        if round.is_none() {
                            return Err(error);
                        }
                        // The slab has older contents, which must not be taken for these. The block
                        // stays in the log as it is, and reading it is an error until it is
                        // written.
                        self.carry(cache, key, *block, live.sum, buf)?;
                    }
                    Err(error) => return Err(error),
                }
            }
            if good.len() == run.len() {
                let at = u64::from(run[0].0) * BLOCK_BYTES as u64;
                self.write_busy(file, index, at, Payload::Bytes(&bytes))?;
            } else {
                for (block, _) in &good {
                    let at = usize::from(block - run[0].0) * BLOCK_BYTES;
                    let piece = Payload::Bytes(&bytes[at..at + BLOCK_BYTES]);
                    self.write_busy(file, index, u64::from(*block) * BLOCK_BYTES as u64, piece)?;
                }
            }
            cache.inner().ring.destaged(key, &good);
            if let Some(round) = round {
                round.grant(cache, run);
            }
        }
        Ok(())
    }

    /// Puts a block at the head of the log, with a checksum that it does not have.
    fn carry(&self, cache: &Cache, key: SlabKey, block: u16, sum: u32, bytes: &[u8]) -> io::Result<()> {
        let (ticket, place) = {
            let mut inner = cache.inner();
            let full = || io::Error::new(io::ErrorKind::StorageFull, "the write-back cache is full");
            let (ticket, position) = inner.ring.reserve(key, block, 1, 1, true).ok_or_else(full)?;
            inner.ring.note(ticket, vec![sum]);
            inner.ring.note_lost(ticket);
            (ticket, cache.place_of(&inner.ring, position))
        };
        let written = self.write_beside_others(&cache.file, place.0, place.1, bytes);
        cache.ended(&mut cache.inner(), ticket, written.is_ok());
        written
    }

    /// Makes room in a log that is full.
    pub(crate) fn make_room(&self) -> io::Result<()> {
        let Some(cache) = self.cache() else { return Ok(()) };
        let chunk = cache.chunk();
        self.destage(chunk).map(|_| ())
    }

    /// Makes the log name none of these slabs any more, durably, so that they may be written past
    /// it. Their blocks in the log are written to them before. The caller has the slabs for itself.
    /// `false` if the log is full: [`Pool::make_room`] helps, without the slabs.
    pub(crate) fn unlog(&self, file: &FileState, slabs: &[u32]) -> io::Result<bool> {
        let Some(cache) = self.cache() else { return Ok(true) };
        let is_logged = |index: &u32| file.table.get(*index).is_some_and(|entry| entry.load().is_logged());
        let slabs: Vec<u32> = slabs.iter().copied().filter(is_logged).collect();
        if slabs.is_empty() {
            return Ok(true);
        }
        for &index in &slabs {
            let live = cache.inner().ring.live_of((file.number, index));
            self.destage_blocks(cache, file, index, &live, None)?;
        }
        self.sync_members()?;
        let keys: Vec<SlabKey> = slabs.iter().map(|&index| (file.number, index)).collect();
        {
            let mut inner = cache.inner();
            if !inner.ring.forget(&keys) {
                return Ok(false);
            }
            cache.unwritten.fetch_add(keys.len() as u64, Ordering::AcqRel);
        }
        self.sync_all()?;
        let mut inner = cache.inner();
        for &(_, index) in &keys {
            inner.ring.remove((file.number, index));
            file.table.entry(index).set_logged(false);
        }
        Ok(true)
    }
}

impl Cache {
    /// Blocks of a round.
    pub(super) fn chunk(&self) -> u64 {
        self.inner().ring.len() / 32
    }

    /// Whether the log should be destaged now.
    fn is_due(&self, pool: &Pool) -> bool {
        // While a member is lost, the log may be the only place that has a block.
        let has_lost = pool.has_lost();
        let inner = self.inner();
        let ring = &inner.ring;
        inner.is_waited_for() || has_lost && ring.live() > 0 || ring.used() > ring.len() / FULL || ring.age() > OLD
    }
}

/// Starts the thread that destages, until the pool is dropped.
pub(crate) fn start_worker(pool: &Arc<Pool>) {
    let Some(cache) = pool.cache().cloned() else { return };
    if cache.has_worker.swap(true, Ordering::AcqRel) {
        return;
    }
    let weak = Arc::downgrade(pool);
    let worker = Arc::clone(&cache);
    let spawned = thread::Builder::new().name("space-cache".into()).spawn(move || work(&worker, &weak));
    if spawned.is_err() {
        // Writers make room themselves.
        cache.has_worker.store(false, Ordering::Release);
    }
}

fn work(cache: &Cache, weak: &Weak<Pool>) {
    let mut looked = Instant::now();
    loop {
        let guard = cache.inner();
        if !guard.is_waited_for() {
            drop(cache.wanted.wait_timeout(guard, PAUSE).unwrap_or_else(PoisonError::into_inner));
        } else {
            drop(guard);
        }
        let Some(pool) = weak.upgrade() else { return };
        if looked.elapsed() > PAUSE {
            // Only what a header names grows old.
            looked = Instant::now();
            let _ = cache.flush(&pool);
        }
        if let Err(error) = pool.dirty_ahead(cache) {
            // Writers do it themselves, and report the error.
            tracing::debug!("the log of the cache: {error}");
        }
        while cache.is_due(&pool) {
            // A pool that nobody else has is to be closed, perhaps to be opened again.
            match pool.destage_while(cache.chunk(), &|| weak.strong_count() > 1) {
                Ok(true) => {}
                Ok(false) => {
                    // Who waits waits for transfers under way.
                    thread::sleep(Duration::from_millis(1));
                    break;
                }
                Err(error) => {
                    pool.warn(format!("pool {}: the write-back cache cannot be emptied: {error}", pool.name()));
                    cache.inner().failure = Some(error.to_string());
                    cache.moved.notify_all();
                    thread::sleep(PAUSE);
                    break;
                }
            }
        }
    }
}
