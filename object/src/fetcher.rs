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
//! Locks: `state`, and `buffers`, never one within the other. `state` is held for look-ups in
//! tables and for copies to waiters, never while anything is waited for. The engine's threads take
//! it in `want`; all else happens on the runtime.

use crate::{
    BLOCK_BYTES,
    blocks::Blocks,
    cache::{
        Cache, Entry,
        map::{Sums, sums_of},
    },
    error::ObjectError,
    origin::Origin,
    streams::{AHEAD_MAX, Streams},
};
use diskwright_store::Loan;
use std::{
    collections::{BTreeMap, VecDeque},
    io,
    ops::{Deref, Range},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
        mpsc::SyncSender,
    },
    thread,
    time::{Duration, Instant},
};
use tokio::{
    runtime::Handle,
    sync::{Notify, Semaphore},
    task::spawn_blocking,
    time::sleep,
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
/// Blocks that are fetched before the cache is told which ones were used.
const TELL: u64 = 64;

/// A block that was never written, of a pushed disk.
static ZEROS: [u8; BLOCK_BYTES as usize] = [0; BLOCK_BYTES as usize];

static ALL: Semaphore = Semaphore::const_new(ALL_UNDER_WAY);

/// The memory of a read, and who waits for it.
#[derive(Debug)]
pub(crate) enum Memory {
    /// A part of a request of an engine.
    Loan(Loan),
    /// A thread that waits.
    Caller(Box<[u8]>, SyncSender<Result<Box<[u8]>, ObjectError>>),
}

impl Memory {
    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Loan(loan) => loan.bytes_mut(),
            Self::Caller(bytes, _) => bytes,
        }
    }

    fn complete(self, result: Result<(), ObjectError>) {
        match self {
            Self::Loan(loan) => loan.complete(result.map_err(io::Error::from)),
            // A caller that has gone needs no answer.
            Self::Caller(bytes, sender) => drop(sender.send(result.map(|()| bytes))),
        }
    }
}

/// Whether a read may be one of a stream, so that what follows is read ahead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ahead {
    May,
    /// Just these bytes are meant.
    No,
}

/// A read that waits for blocks.
#[derive(Debug)]
pub(crate) struct Waiter {
    offset_bytes: u64,
    state: Mutex<(Option<Memory>, usize)>,
}

impl Waiter {
    /// A block has come, or will not.
    fn take(&self, block: u64, result: Result<&[u8], &ObjectError>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (memory, left) = &mut *state;
        let Some(waiting) = memory else { return };
        let done = match result {
            Ok(bytes) => {
                let to = waiting.bytes_mut();
                let end = self.offset_bytes + to.len() as u64;
                let block_at = block * BLOCK_BYTES;
                let (from, until) = (self.offset_bytes.max(block_at), end.min(block_at + bytes.len() as u64));
                if from < until {
                    to[(from - self.offset_bytes) as usize..(until - self.offset_bytes) as usize]
                        .copy_from_slice(&bytes[(from - block_at) as usize..(until - block_at) as usize]);
                }
                *left -= 1;
                (*left == 0).then_some(Ok(()))
            }
            Err(error) => Some(Err(error.clone())),
        };
        if let Some(result) = done
            && let Some(memory) = memory.take()
        {
            drop(state);
            memory.complete(result);
        }
    }
}

/// A block that is wanted.
#[derive(Debug, Default)]
struct Wanted {
    waiters: Vec<Arc<Waiter>>,
    is_under_way: bool,
    /// It has come, and is being kept.
    bytes: Option<Piece>,
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

/// A block that has come: a part of what one GET has brought.
#[derive(Debug, Clone)]
struct Piece {
    run: Arc<Vec<u8>>,
    range: Range<usize>,
}

impl Deref for Piece {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.run.get(self.range.clone()).unwrap_or_default()
    }
}

impl Piece {
    /// The blocks of a run.
    fn of(run: Vec<u8>) -> Vec<Self> {
        let run = Arc::new(run);
        let piece = |start| Self { run: Arc::clone(&run), range: start..run.len().min(start + BLOCK_BYTES as usize) };
        (0..run.len()).step_by(BLOCK_BYTES as usize).map(piece).collect()
    }
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
    /// It was said that blocks cannot be kept.
    has_warned: AtomicBool,
    wake: Arc<Notify>,
}

impl Fetcher {
    /// Starts a fetcher. It works until it is dropped.
    pub(crate) fn start(runtime: &Handle, origin: Origin, kept: Option<(Arc<Cache>, Entry)>) -> Arc<Self> {
        let blocks = Blocks::new(origin.size_bytes().div_ceil(BLOCK_BYTES));
        let wake = Arc::new(Notify::new());
        let (state, buffers) = (Mutex::default(), Mutex::default());
        let fetcher = Arc::new(Self {
            origin,
            blocks,
            kept,
            state,
            buffers,
            keeping: Arc::new(Semaphore::new(KEPT_AT_ONCE)),
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
    pub(crate) fn want(&self, offset_bytes: u64, memory: Memory, len_bytes: u64, ahead: Ahead) {
        let blocks = offset_bytes / BLOCK_BYTES..(offset_bytes + len_bytes).div_ceil(BLOCK_BYTES);
        let left = (blocks.end - blocks.start) as usize;
        let waiter = Arc::new(Waiter { offset_bytes, state: Mutex::new((Some(memory), left)) });
        let mut state = self.state();
        for block in blocks {
            if self.origin.is_zeros(block) {
                waiter.take(block, Ok(&ZEROS[..self.block_bytes(block)]));
                continue;
            }
            if ahead == Ahead::May && block * BLOCK_BYTES >= offset_bytes {
                let ahead = state.streams.missed(block);
                self.want_ahead(&mut state, block + 1..block + 1 + ahead);
            }
            let recent = state.recent.iter().find(|(known, _)| *known == block).map(|(_, bytes)| bytes.clone());
            let come = recent.or_else(|| state.wanted.get(&block).and_then(|wanted| wanted.bytes.clone()));
            if let Some(bytes) = come {
                waiter.take(block, Ok(&bytes));
                continue;
            }
            let is_new = !state.wanted.contains_key(&block);
            let wanted = state.wanted.entry(block).or_default();
            let was_ahead = wanted.waiters.is_empty() && !wanted.is_under_way;
            wanted.waiters.push(Arc::clone(&waiter));
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

    fn want_ahead(&self, state: &mut State, blocks: Range<u64>) {
        let end = self.origin.size_bytes().div_ceil(BLOCK_BYTES);
        for block in blocks.start..blocks.end.min(end) {
            let is_fetched = self.blocks.get(block).is_some() || self.origin.is_zeros(block);
            if !is_fetched && !state.wanted.contains_key(&block) {
                state.wanted.insert(block, Wanted::default());
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
        let most = if waiting >= room { RUN_MAX.min(room as u64) } else { 1 };
        let unit = self.origin.unit_of(first);
        let may_come = |state: &State, block: u64| {
            is_waiting(state, block) || self.blocks.get(block).is_none() && !state.wanted.contains_key(&block)
        };
        let (mut start, mut end) = (first, first + 1);
        // What is fetched together anyway is kept together.
        while start > unit.start && may_come(&state, start - 1) {
            start -= 1;
        }
        while end < unit.end && may_come(&state, end)
            || unit.end - unit.start == 1 && end - start < most && is_waiting(&state, end)
        {
            end += 1;
        }
        for block in start..end {
            state.wanted.entry(block).or_default().is_under_way = true;
        }
        state.under_way += (end - start) as usize;
        Some(start..end)
    }

    /// A block has come: those who wait get it.
    fn came(&self, block: u64, bytes: &Piece) -> bool {
        let mut state = self.state();
        state.fetched += 1;
        let Some(wanted) = state.wanted.get_mut(&block) else { return false };
        wanted.bytes = Some(bytes.clone());
        let waiters = std::mem::take(&mut wanted.waiters);
        drop(state);
        waiters.iter().for_each(|waiter| waiter.take(block, Ok(bytes)));
        !waiters.is_empty()
    }

    /// A block is known, or stays in memory: it is wanted no more.
    fn settled(&self, block: u64, in_memory: Option<Piece>) {
        let mut state = self.state();
        state.wanted.remove(&block);
        if let Some(bytes) = in_memory {
            if state.recent.len() == RECENT {
                state.recent.pop_front();
            }
            state.recent.push_back((block, bytes));
        }
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
        // The first block may be in the cache by now; and all that is to be fetched is locked.
        if self.kept.is_some() {
            while locked < run.end {
                match self.prepare(locked).await {
                    Prepared::Here(bytes, sums) => {
                        if locked > run.start {
                            break;
                        }
                        let was_waited_for = Piece::of(bytes).first().is_some_and(|bytes| self.came(locked, bytes));
                        self.blocks.set(locked, sums, !was_waited_for);
                        self.settled(locked, None);
                        return locked + 1..run.end;
                    }
                    Prepared::Mine => locked += 1,
                    Prepared::Anothers if locked > run.start => break,
                    // Its process may have stopped; then it is fetched twice.
                    Prepared::Anothers if Instant::now() > deadline => break,
                    Prepared::Anothers => sleep(LOOK).await,
                    Prepared::Unknown => break,
                }
            }
        }
        let end = if self.kept.is_some() { locked.max(run.start + 1) } else { run.end };
        let result = self.get(run.start..end).await;
        let come: Vec<_> = match result {
            Ok(bytes) => (run.start..end)
                .zip(Piece::of(bytes))
                .map(|(block, bytes)| (block, self.came(block, &bytes), bytes))
                .collect(),
            Err(error) => {
                (run.start..end).for_each(|block| self.failed(block, &error));
                Vec::new()
            }
        };
        // Nobody waits until a block is kept, and others are fetched meanwhile.
        let room = Arc::clone(&self.keeping).acquire_many_owned(come.len() as u32).await;
        let this = Arc::clone(self);
        tokio::spawn(async move {
            for (block, was_waited_for, bytes) in come {
                this.keep(block, was_waited_for, bytes).await;
            }
            if let Some((_, entry)) = &this.kept {
                (run.start..locked).for_each(|block| entry.unlock(block));
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
            if let Some((bytes, sums)) = entry.read(block)? {
                return Ok(Prepared::Here(bytes, sums));
            }
            if !entry.try_lock(block)? {
                return Ok(Prepared::Anothers);
            }
            // Another process may have brought it in between.
            Ok::<_, io::Error>(match entry.read(block)? {
                Some((bytes, sums)) => {
                    entry.unlock(block);
                    Prepared::Here(bytes, sums)
                }
                None => Prepared::Mine,
            })
        };
        match spawn_blocking(look).await {
            Ok(Ok(prepared)) => prepared,
            // A cache that cannot be read is as good as none.
            _ => Prepared::Unknown,
        }
    }

    /// A buffer for a block. Memory that was used before costs no page faults.
    fn buffer(&self) -> Vec<u8> {
        self.buffers().pop().unwrap_or_default()
    }

    /// Gives a buffer back, if nobody else has it.
    fn give_back(&self, bytes: Piece) {
        let mut buffers = self.buffers();
        if buffers.len() < BUFFERS {
            buffers.extend(Arc::try_unwrap(bytes.run).ok());
        }
    }

    fn buffers(&self) -> MutexGuard<'_, Vec<Vec<u8>>> {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a block that has come.
    async fn keep(self: &Arc<Self>, block: u64, was_waited_for: bool, bytes: Piece) {
        let (this, kept_bytes) = (Arc::clone(self), bytes.clone());
        let keep = move || {
            let (cache, entry) = this.kept.as_ref()?;
            let sums = sums_of(&kept_bytes);
            if this.is_to_tell() {
                let _ = entry.mark_used(this.blocks.take_used().into_iter());
            }
            match cache.keep(entry, block, &kept_bytes, &sums) {
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
                self.blocks.set(block, sums, !was_waited_for);
                self.settled(block, None);
                self.give_back(bytes);
            }
            None => self.settled(block, Some(bytes)),
        }
    }

    /// Length of a block in bytes: the last one ends with the object.
    fn block_bytes(&self, block: u64) -> usize {
        (self.origin.size_bytes() - block * BLOCK_BYTES).min(BLOCK_BYTES) as usize
    }

    /// Gets a run of blocks from the server, however often that must be tried.
    async fn get(&self, run: Range<u64>) -> Result<Vec<u8>, ObjectError> {
        let mut bytes = self.buffer();
        let range = run.start * BLOCK_BYTES..(run.end * BLOCK_BYTES).min(self.origin.size_bytes());
        self.origin.get(range, &mut bytes).await?;
        Ok(bytes)
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
            // Without it these blocks are dropped a little earlier.
            let _ = entry.mark_used(self.blocks.take_used().into_iter());
        }
    }
}

impl Drop for Fetcher {
    fn drop(&mut self) {
        self.tell_used();
        self.wake.notify_one();
    }
}

enum Prepared {
    /// The cache has it.
    Here(Vec<u8>, Sums),
    /// It is locked, and has to be fetched.
    Mine,
    /// Another process fetches it.
    Anothers,
    /// The cache cannot be read.
    Unknown,
}

/// Starts fetches until the fetcher is dropped.
async fn dispatch(weak: Weak<Fetcher>, wake: Arc<Notify>) {
    loop {
        wake.notified().await;
        let Some(fetcher) = weak.upgrade() else { return };
        while let Some(run) = fetcher.pick() {
            tokio::spawn(Arc::clone(&fetcher).fetch(run));
        }
    }
}
