//! Blocks of one object that are wanted and not there: each is fetched once, however many want it.
//!
//! ```text
//!   want ─▶ wanted ─▶ pick: first what is waited for, then what is read ahead
//!                       └▶ in the cache by now? ─ yes ─▶ waiters
//!                          another process fetches it? ─▶ look again
//!                          else GET, again after a pause ─▶ waiters
//!                                                            └▶ keep ─▶ the cache
//! ```
//!
//! A run of blocks that follow each other is fetched by one GET when more is wanted than may be
//! under way, and the blocks of a pushed disk's chunk always are. At most [`UNDER_WAY`] blocks are,
//! and [`ALL_UNDER_WAY`] of all objects of the process. Blocks that have come are kept while others
//! are fetched. At most [`KEPT_AT_ONCE`] are; then fetches wait.
//!
//! A block is fetched as a whole, with two exceptions. If only units of it are to be in the cache
//! ([`Purpose::Units`]), these are. If some of its units are there, those are fetched that are
//! missing of what is wanted. Then a block may have come in part, and reads that need more of it
//! wait for another fetch. Each fetch of a part serves at least one read, so this ends.
//!
//! Locks: `state`, `buffers` and `telling`, never one within another. `state` is held for look-ups
//! in tables and for copies to waiters, never while anything is waited for. The engine's threads
//! take it in `want`; all else happens on the runtime. `telling` is held while the cache's map is
//! told what was used.

use crate::{
    BLOCK_BYTES,
    blocks::Blocks,
    cache::{Cache, Entry, Held, map::sums_of},
    error::ObjectError,
    origin::Origin,
    piece::{Memory, Piece, Waiter},
    streams::{AHEAD_MAX, Streams},
    units::Units,
};
use std::{
    collections::{BTreeMap, VecDeque},
    io,
    ops::Range,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};
use tokio::{
    runtime::Handle,
    sync::{Notify, Semaphore},
    task::spawn_blocking,
    time::{sleep, timeout},
};

/// Blocks of one object under way.
const UNDER_WAY: usize = 16;
/// Blocks of all objects of the process.
const ALL_UNDER_WAY: usize = 64;
/// Blocks of one object that have come and are being kept.
const KEPT_AT_ONCE: usize = 16;
/// Buffers that are kept for later GETs.
const BUFFERS: usize = 8;
/// Blocks of one GET.
const RUN_MAX: u64 = 4;
/// Blocks that could not be kept in the cache and stay in memory.
const RECENT: usize = 32;
/// How often another process's fetch is looked at.
const LOOK: Duration = Duration::from_millis(4);
/// Blocks that are fetched before the cache is told which ones were used, and the time without a
/// fetch after which it is told.
const TELL: u64 = 64;
const TELL_EVERY: Duration = Duration::from_secs(2);

static ALL: Semaphore = Semaphore::const_new(ALL_UNDER_WAY);

/// What a range is wanted for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// It is read. It may be part of a stream, so that what follows is read ahead.
    Read,
    /// It is to be in the cache. Whole blocks are.
    Blocks,
    /// It is to be in the cache, and nothing but its units.
    Units,
}

/// A block that is wanted.
#[derive(Debug, Default)]
struct Wanted {
    waiters: Vec<Arc<Waiter>>,
    units: Units,
    /// If nothing of the block is there, all of it is fetched.
    is_whole: bool,
    /// Its first byte is read.
    is_start: bool,
    /// Units that were read since the block is wanted.
    used: Units,
    is_under_way: bool,
    /// It has come, and is being kept.
    piece: Option<Piece>,
}

impl Wanted {
    /// One of those that are read ahead.
    fn ahead() -> Self {
        Self { units: Units::of(0..BLOCK_BYTES), is_whole: true, ..Self::default() }
    }
}

#[derive(Debug, Default)]
struct State {
    wanted: BTreeMap<u64, Wanted>,
    /// Blocks that are waited for, in the order in which they were asked for.
    first: VecDeque<u64>,
    /// Blocks that are read ahead.
    ahead: VecDeque<u64>,
    under_way: usize,
    recent: VecDeque<(u64, Piece)>,
    streams: Streams,
    /// Blocks that have come since the cache was told which ones were used.
    fetched: u64,
}

/// Fetches the blocks of one object; see the module documentation.
#[derive(Debug)]
pub(crate) struct Fetcher {
    pub(crate) origin: Origin,
    pub(crate) blocks: Blocks,
    /// Where blocks are kept, if they are.
    pub(crate) kept: Option<(Arc<Cache>, Entry)>,
    state: Mutex<State>,
    /// Buffers of blocks that are free.
    buffers: Mutex<Vec<Vec<u8>>>,
    /// Room for blocks that are being kept.
    keeping: Arc<Semaphore>,
    /// Held while the cache is told what was used.
    telling: Mutex<()>,
    /// It was said that blocks cannot be kept.
    has_warned: AtomicBool,
    wake: Arc<Notify>,
}

impl Fetcher {
    /// Starts a fetcher. It works until it is dropped.
    pub(crate) fn start(runtime: &Handle, origin: Origin, kept: Option<(Arc<Cache>, Entry)>) -> Arc<Self> {
        let blocks = Blocks::new(origin.size_bytes());
        let wake = Arc::new(Notify::new());
        let (state, buffers) = (Mutex::default(), Mutex::default());
        let fetcher = Arc::new(Self {
            origin,
            blocks,
            kept,
            state,
            buffers,
            keeping: Arc::new(Semaphore::new(KEPT_AT_ONCE)),
            telling: Mutex::new(()),
            has_warned: AtomicBool::new(false),
            wake: Arc::clone(&wake),
        });
        let weak = Arc::downgrade(&fetcher);
        runtime.spawn(dispatch(weak, wake));
        fetcher
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads a range, which lies within the object and is not empty, into memory. Never waits.
    pub(crate) fn want(&self, range: Range<u64>, memory: Memory, purpose: Purpose) {
        let waiter = Arc::new(Waiter::new(range.clone(), memory));
        let mut state = self.state();
        for block in range.start / BLOCK_BYTES..range.end.div_ceil(BLOCK_BYTES) {
            if self.origin.is_zeros(block) {
                waiter.take_zeros(block, self.block_bytes(block));
                continue;
            }
            let units = waiter.units_of(block);
            let recent = state.recent.iter().find(|(known, _)| *known == block).map(|(_, piece)| piece);
            let come = recent.or_else(|| state.wanted.get(&block).and_then(|wanted| wanted.piece.as_ref()));
            let come = come.filter(|piece| piece.units.has(units)).cloned();
            if let Some(wanted) = state.wanted.get_mut(&block).filter(|_| purpose == Purpose::Read) {
                wanted.used = wanted.used.and(units);
            }
            if let Some(piece) = come {
                waiter.take(block, Ok(&piece));
                continue;
            }
            let is_new = !state.wanted.contains_key(&block);
            let wanted = state.wanted.entry(block).or_default();
            let was_ahead = wanted.waiters.is_empty() && !wanted.is_under_way;
            wanted.waiters.push(Arc::clone(&waiter));
            wanted.units = wanted.units.and(units);
            wanted.is_whole |= purpose != Purpose::Units;
            wanted.is_start |= purpose == Purpose::Read && block * BLOCK_BYTES >= range.start;
            if purpose == Purpose::Read {
                wanted.used = wanted.used.and(units);
            }
            if is_new || was_ahead {
                state.first.push_back(block);
            }
        }
        drop(state);
        self.wake.notify_one();
    }

    /// The first use of a block that was read ahead: the stream goes on.
    #[cold]
    pub(crate) fn goes_on(&self, block: u64) {
        let mut state = self.state();
        self.want_ahead(&mut state, block + 1..block + 1 + AHEAD_MAX);
        drop(state);
        self.wake.notify_one();
    }

    /// Nothing of blocks is in the cache: if that is a stream, what follows is read ahead.
    fn missed(&self, blocks: Range<u64>) {
        let mut state = self.state();
        for block in blocks {
            if state.wanted.get(&block).is_some_and(|wanted| wanted.is_start) {
                let ahead = state.streams.missed(block);
                self.want_ahead(&mut state, block + 1..block + 1 + ahead);
            }
        }
        drop(state);
        self.wake.notify_one();
    }

    fn want_ahead(&self, state: &mut State, blocks: Range<u64>) {
        let end = self.origin.size_bytes().div_ceil(BLOCK_BYTES);
        for block in blocks.start..blocks.end.min(end) {
            let is_fetched = self.blocks.know_all_of(block) || self.origin.is_zeros(block);
            if !is_fetched && !state.wanted.contains_key(&block) {
                state.wanted.insert(block, Wanted::ahead());
                state.ahead.push_back(block);
            }
        }
    }

    /// The next run to fetch, if one may be.
    fn pick(&self) -> Option<Range<u64>> {
        let mut state = self.state();
        if state.under_way >= UNDER_WAY {
            return None;
        }
        let is_waiting =
            |state: &State, block: u64| state.wanted.get(&block).is_some_and(|wanted| !wanted.is_under_way);
        let is_part = |state: &State, block: u64| state.wanted.get(&block).is_some_and(|wanted| !wanted.is_whole);
        let first = loop {
            let block = match state.first.pop_front() {
                Some(block) => block,
                None => state.ahead.pop_front()?,
            };
            if is_waiting(&state, block) {
                break block;
            }
        };
        let room = UNDER_WAY - state.under_way;
        // While there is room for all, each is fetched by itself, at the same time.
        let waiting = state.first.len() + state.ahead.len();
        let most = if waiting >= room && !is_part(&state, first) { RUN_MAX.min(room as u64) } else { 1 };
        let unit = self.origin.unit_of(first);
        let may_come = |state: &State, block: u64| {
            is_waiting(state, block) || !self.blocks.know_all_of(block) && !state.wanted.contains_key(&block)
        };
        let (mut start, mut end) = (first, first + 1);
        // What is fetched together anyway is kept together.
        while start > unit.start && may_come(&state, start - 1) {
            start -= 1;
        }
        while end < unit.end && may_come(&state, end)
            || unit.end - unit.start == 1 && end - start < most && is_waiting(&state, end) && !is_part(&state, end)
        {
            end += 1;
        }
        for block in start..end {
            state.wanted.entry(block).or_insert_with(Wanted::ahead).is_under_way = true;
        }
        state.under_way += (end - start) as usize;
        Some(start..end)
    }

    /// A block has come: those who wait for no more than what has come of it get it. Returns
    /// whether there were any.
    fn came(&self, block: u64, piece: &Piece) -> bool {
        let mut state = self.state();
        state.fetched += 1;
        let Some(wanted) = state.wanted.get_mut(&block) else { return false };
        wanted.piece = Some(piece.clone());
        let waiters = std::mem::take(&mut wanted.waiters);
        let (served, waiting): (Vec<_>, Vec<_>) =
            waiters.into_iter().partition(|waiter| piece.units.has(waiter.units_of(block)));
        wanted.waiters = waiting;
        drop(state);
        served.iter().for_each(|waiter| waiter.take(block, Ok(piece)));
        !served.is_empty()
    }

    /// What has come of a block is known, or stays in memory. It is wanted no more, unless more of
    /// it is waited for.
    fn settled(&self, block: u64, in_memory: Option<Piece>) {
        let mut state = self.state();
        if let Some(piece) = in_memory {
            if state.recent.len() == RECENT {
                state.recent.pop_front();
            }
            state.recent.push_back((block, piece));
        }
        let Some(mut wanted) = state.wanted.remove(&block) else { return };
        if let Some(known) = self.blocks.get(block).filter(|_| !wanted.used.is_empty()) {
            known.use_units(wanted.used);
        }
        if wanted.waiters.is_empty() {
            return;
        }
        let units = wanted.waiters.iter().map(|waiter| waiter.units_of(block));
        wanted.units = units.fold(Units::default(), Units::and);
        (wanted.is_under_way, wanted.piece) = (false, None);
        state.wanted.insert(block, wanted);
        state.first.push_back(block);
        drop(state);
        self.wake.notify_one();
    }

    fn failed(&self, block: u64, error: &ObjectError) {
        let wanted = self.state().wanted.remove(&block);
        for waiter in wanted.into_iter().flat_map(|wanted| wanted.waiters) {
            waiter.take(block, Err(error));
        }
    }

    /// Fetches a run.
    async fn fetch(self: Arc<Self>, run: Range<u64>) {
        let mut permits = ALL.acquire_many((run.end - run.start) as u32).await.ok();
        let mut rest = run;
        while !rest.is_empty() {
            let next = self.fetch_some(rest.clone()).await;
            let done = (next.start - rest.start) as usize;
            drop(permits.as_mut().and_then(|permits| permits.split(done)));
            self.state().under_way -= done;
            self.wake.notify_one();
            rest = next;
        }
    }

    /// Brings the first blocks of a run. Returns the rest.
    async fn fetch_some(self: &Arc<Self>, run: Range<u64>) -> Range<u64> {
        let (mut locked, deadline) = (run.start, Instant::now() + self.origin.timeout());
        let mut part = None;
        // The first block may be in the cache by now; and all that is to be fetched is locked.
        while self.kept.is_some() && locked < run.end && part.is_none() {
            match self.prepare(locked).await {
                Prepared::Here(held) => {
                    if locked > run.start {
                        break;
                    }
                    let sums = held.sums.clone();
                    let was_waited_for = self.came(locked, &Piece::of_held(held));
                    self.blocks.set(locked, &sums, !was_waited_for);
                    self.settled(locked, None);
                    return locked + 1..run.end;
                }
                Prepared::Mine(held) => {
                    part = held.filter(|_| locked == run.start);
                    locked += 1;
                }
                Prepared::Anothers if locked > run.start => break,
                // Its process may have stopped; then it is fetched twice.
                Prepared::Anothers if Instant::now() > deadline => break,
                Prepared::Anothers => sleep(LOOK).await,
                Prepared::Unknown => break,
            }
        }
        let end = if self.kept.is_some() { locked.max(run.start + 1) } else { run.end };
        let result = match part {
            Some(held) => self.get_part(run.start, held).await,
            None => {
                self.missed(run.start..end);
                self.get(run.start..end).await
            }
        };
        let come: Vec<_> = match result {
            Ok(come) => (run.start..end)
                .zip(come)
                .map(|(block, (piece, fetched))| Come {
                    block,
                    was_waited_for: self.came(block, &piece),
                    piece,
                    fetched,
                })
                .collect(),
            Err(error) => {
                for block in run.start..end {
                    self.unlock(block, locked);
                    self.failed(block, &error);
                }
                Vec::new()
            }
        };
        // Nobody waits until a block is kept, and others are fetched meanwhile.
        let room = Arc::clone(&self.keeping).acquire_many_owned(come.len() as u32).await;
        let this = Arc::clone(self);
        tokio::spawn(async move {
            for come in come {
                let block = come.block;
                let in_memory = this.keep(come).await;
                // Another fetch of it may follow, which locks it again.
                this.unlock(block, locked);
                this.settled(block, in_memory);
            }
            drop(room);
        });
        end..run.end
    }

    /// Looks for a block in the cache, or locks it.
    async fn prepare(self: &Arc<Self>, block: u64) -> Prepared {
        let this = Arc::clone(self);
        let look = move || {
            let Some((_, entry)) = &this.kept else { return Ok(Prepared::Unknown) };
            let (wanted, is_whole) = {
                let state = this.state();
                state.wanted.get(&block).map_or_else(Default::default, |wanted| (wanted.units, wanted.is_whole))
            };
            let wanted = Units::all_of(this.block_bytes(block)).within(wanted);
            let is_enough = |held: &Held| held.units.has(wanted);
            let held = entry.read(block)?;
            if let Some(held) = held.filter(is_enough) {
                return Ok(Prepared::Here(held));
            }
            if !entry.try_lock(block)? {
                return Ok(Prepared::Anothers);
            }
            // Another process may have brought it in between.
            Ok::<_, io::Error>(match entry.read(block)? {
                Some(held) if is_enough(&held) => {
                    entry.unlock(block);
                    Prepared::Here(held)
                }
                _ if !this.origin.has_parts() => Prepared::Mine(None),
                None if is_whole => Prepared::Mine(None),
                held => Prepared::Mine(Some(held.unwrap_or_else(|| Held::nothing(this.block_bytes(block))))),
            })
        };
        match spawn_blocking(look).await {
            Ok(Ok(prepared)) => prepared,
            // A cache that cannot be read is as good as none.
            _ => Prepared::Unknown,
        }
    }

    /// Unlocks a block if it is one of those before `locked`.
    fn unlock(&self, block: u64, locked: u64) {
        if let Some((_, entry)) = self.kept.as_ref().filter(|_| block < locked) {
            entry.unlock(block);
        }
    }

    /// A buffer for a block. Memory that was used before costs no page faults.
    fn buffer(&self) -> Vec<u8> {
        self.buffers().pop().unwrap_or_default()
    }

    /// Gives a buffer back, if nobody else has it.
    fn give_back(&self, piece: Piece) {
        let mut buffers = self.buffers();
        if buffers.len() < BUFFERS {
            buffers.extend(piece.into_buffer());
        }
    }

    fn buffers(&self) -> MutexGuard<'_, Vec<Vec<u8>>> {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a block that has come. Returns it if it could not be kept.
    async fn keep(self: &Arc<Self>, come: Come) -> Option<Piece> {
        let Come { block, was_waited_for, piece, fetched } = come;
        let (this, kept) = (Arc::clone(self), piece.clone());
        let keep = move || {
            let (cache, entry) = this.kept.as_ref()?;
            let bytes = kept.get(fetched.start as usize..fetched.end as usize)?;
            let sums = sums_of(fetched.start, bytes);
            if this.is_to_tell() {
                this.tell_used();
            }
            match cache.keep(entry, block, &fetched, bytes, &sums) {
                Ok(()) => Some(sums),
                Err(error) => {
                    if !this.has_warned.swap(true, Ordering::Relaxed) {
                        let folder = cache.folder().display();
                        tracing::warn!("{folder}: what is fetched of {} is not kept: {error}", this.origin.name());
                    }
                    None
                }
            }
        };
        match spawn_blocking(keep).await.ok().flatten() {
            Some(sums) => {
                self.blocks.set(block, &sums, !was_waited_for);
                self.give_back(piece);
                None
            }
            None => Some(piece),
        }
    }

    /// Length of a block in bytes: the last one ends with the object.
    fn block_bytes(&self, block: u64) -> usize {
        (self.origin.size_bytes() - block * BLOCK_BYTES).min(BLOCK_BYTES) as usize
    }

    /// Gets a run of blocks from the server, however often that must be tried. With each block
    /// comes the range of it that was fetched.
    async fn get(&self, run: Range<u64>) -> Result<Vec<(Piece, Range<u64>)>, ObjectError> {
        let mut bytes = self.buffer();
        let range = run.start * BLOCK_BYTES..(run.end * BLOCK_BYTES).min(self.origin.size_bytes());
        self.origin.get(range, &mut bytes).await?;
        Ok(Piece::of_run(bytes).into_iter().map(|piece| (piece.clone(), 0..piece.len() as u64)).collect())
    }

    /// Gets the first of the wanted units of a block that are not held, and adds them.
    async fn get_part(&self, block: u64, mut held: Held) -> Result<Vec<(Piece, Range<u64>)>, ObjectError> {
        let wanted = self.state().wanted.get(&block).map_or_else(Units::default, |wanted| wanted.units);
        let len_bytes = held.bytes.len() as u64;
        let wanted = Units::all_of(held.bytes.len()).within(wanted);
        let missing = Units::missing(wanted, held.units).unwrap_or(0..len_bytes);
        let range = missing.start..missing.end.min(len_bytes);
        let (at_bytes, mut bytes) = (block * BLOCK_BYTES, self.buffer());
        self.origin.get(at_bytes + range.start..at_bytes + range.end, &mut bytes).await?;
        held.bytes[range.start as usize..range.end as usize].copy_from_slice(&bytes);
        held.units = held.units.and(Units::of(range.clone()));
        Ok(vec![(Piece::of_held(held), range)])
    }

    /// Whether blocks are wanted, or being kept.
    pub(crate) fn is_at_work(&self) -> bool {
        !self.state().wanted.is_empty()
    }

    /// Stops reading ahead, and waits until what is under way is in the cache.
    pub(crate) fn settle(&self, deadline: Instant) {
        {
            let mut state = self.state();
            state.ahead.clear();
            state.wanted.retain(|_, wanted| wanted.is_under_way || !wanted.waiters.is_empty());
        }
        while self.is_at_work() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(2));
        }
        self.tell_used();
    }

    /// Whether many blocks were fetched since the cache was last told which ones were used.
    fn is_to_tell(&self) -> bool {
        let mut state = self.state();
        let is_due = state.fetched >= TELL;
        if is_due {
            state.fetched = 0;
        }
        is_due
    }

    /// Tells the cache which blocks were used.
    pub(crate) fn tell_used(&self) {
        if let Some((_, entry)) = &self.kept {
            // Who waits for this lock finds that all that it would tell is in the cache.
            let _telling = self.telling.lock().unwrap_or_else(PoisonError::into_inner);
            // Without it these blocks are dropped a little earlier, and no boot is recorded.
            let _ = entry.mark_used(self.blocks.take_used());
        }
    }
}

impl Drop for Fetcher {
    fn drop(&mut self) {
        self.tell_used();
        self.wake.notify_one();
    }
}

/// A block that has come and is to be kept.
struct Come {
    block: u64,
    /// Somebody has waited for it.
    was_waited_for: bool,
    piece: Piece,
    /// What of it is not in the cache.
    fetched: Range<u64>,
}

enum Prepared {
    /// The cache has all of it that is wanted.
    Here(Held),
    /// It is locked, and has to be fetched: only what is not held, if that is said.
    Mine(Option<Held>),
    /// Another process fetches it.
    Anothers,
    /// The cache cannot be read.
    Unknown,
}

/// Starts fetches until the fetcher is dropped, and tells the cache now and then what was read.
async fn dispatch(weak: Weak<Fetcher>, wake: Arc<Notify>) {
    loop {
        let is_woken = timeout(TELL_EVERY, wake.notified()).await.is_ok();
        let Some(fetcher) = weak.upgrade() else { return };
        if !is_woken {
            drop(spawn_blocking(move || fetcher.tell_used()));
            continue;
        }
        while let Some(run) = fetcher.pick() {
            tokio::spawn(Arc::clone(&fetcher).fetch(run));
        }
    }
}
