//! Fetches the blocks of one object that are wanted: each once, also beside other processes.
//!
//! ```text
//!   picked (wanted.rs) ─▶ in the cache by now? ─ yes ─▶ waiters
//!                         another process fetches it? ─▶ look again
//!                         else GET, again after a pause ─▶ waiters
//!                                                           └▶ keep ─▶ the cache ─▶ settled
//! ```
//!
//! At most [`ALL_UNDER_WAY`] blocks of all objects of the process are under way. Blocks that have
//! come are kept while others are fetched. At most [`KEPT_AT_ONCE`] are; then fetches wait.
//!
//! A block is fetched as a whole, with two exceptions. If only units of it are to be in the cache
//! ([`Purpose::Units`](crate::wanted::Purpose::Units)), these are. If some of its units are there,
//! those are fetched that are missing of what is wanted.
//!
//! The engine's threads call [`WantedBlocks::want`]; all else happens on the runtime. Locks:
//! `buffers`, and `telling`, which is held while the cache's map is told what was used. Never one
//! within the other, and never that of [`WantedBlocks`] within one.

use crate::{
    BLOCK_BYTES,
    cache::{Cache, Entry, Held, map::sums_of},
    error::ObjectError,
    origin::Origin,
    piece::Piece,
    units::Units,
    wanted::WantedBlocks,
};
use std::{
    io,
    ops::Range,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};
use tokio::{
    runtime::Handle,
    sync::Semaphore,
    task::spawn_blocking,
    time::{sleep, timeout},
};

/// Blocks of all objects of the process.
const ALL_UNDER_WAY: usize = 64;
/// Blocks of one object that have come and are being kept.
const KEPT_AT_ONCE: usize = 16;
/// Buffers that are kept for later GETs.
const BUFFERS: usize = 8;
/// How often another process's fetch is looked at.
const LOOK: Duration = Duration::from_millis(4);
/// Blocks that are kept before the cache is told which ones were used, and the time without a
/// fetch after which it is told.
const TELL: u64 = 64;
const TELL_EVERY: Duration = Duration::from_secs(2);

static ALL: Semaphore = Semaphore::const_new(ALL_UNDER_WAY);

/// Fetches the blocks of one object; see the module documentation.
#[derive(Debug)]
pub(crate) struct Fetcher {
    pub(crate) wanted: WantedBlocks,
    /// Where blocks are kept, if they are.
    pub(crate) kept: Option<(Arc<Cache>, Entry)>,
    /// Buffers of blocks that are free.
    buffers: Mutex<Vec<Vec<u8>>>,
    /// Room for blocks that are being kept.
    keeping: Arc<Semaphore>,
    /// Held while the cache is told what was used.
    telling: Mutex<()>,
    /// Blocks that were kept.
    count: AtomicU64,
    /// It was said that blocks cannot be kept.
    has_warned: AtomicBool,
}

impl Fetcher {
    /// Starts a fetcher. It works until it is dropped.
    pub(crate) fn start(runtime: &Handle, origin: Origin, kept: Option<(Arc<Cache>, Entry)>) -> Arc<Self> {
        let fetcher = Arc::new(Self {
            wanted: WantedBlocks::new(origin),
            kept,
            buffers: Mutex::default(),
            keeping: Arc::new(Semaphore::new(KEPT_AT_ONCE)),
            telling: Mutex::new(()),
            count: AtomicU64::new(0),
            has_warned: AtomicBool::new(false),
        });
        runtime.spawn(dispatch(Arc::downgrade(&fetcher)));
        fetcher
    }

    /// Fetches a run.
    async fn fetch(self: Arc<Self>, run: Range<u64>) {
        let mut permits = ALL.acquire_many((run.end - run.start) as u32).await.ok();
        let mut rest = run;
        while !rest.is_empty() {
            let next = self.fetch_some(rest.clone()).await;
            let done = (next.start - rest.start) as usize;
            drop(permits.as_mut().and_then(|permits| permits.split(done)));
            self.wanted.ended(done);
            rest = next;
        }
    }

    /// Brings the first blocks of a run. Returns the rest.
    async fn fetch_some(self: &Arc<Self>, run: Range<u64>) -> Range<u64> {
        let (mut locked, deadline) = (run.start, Instant::now() + self.wanted.origin.timeout());
        let mut part = None;
        // The first block may be in the cache by now; and all that is to be fetched is locked.
        while self.kept.is_some() && locked < run.end && part.is_none() {
            match self.prepare(locked).await {
                Prepared::Here(held) => {
                    if locked > run.start {
                        break;
                    }
                    let sums = held.sums.clone();
                    let was_waited_for = self.wanted.came(locked, &Piece::of_held(held));
                    self.wanted.blocks.set(locked, &sums, !was_waited_for);
                    self.wanted.settled(locked, None);
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
                self.wanted.missed(run.start..end);
                self.get(run.start..end).await
            }
        };
        let come: Vec<_> = match result {
            Ok(come) => (run.start..end)
                .zip(come)
                .map(|(block, (piece, fetched))| Come {
                    block,
                    was_waited_for: self.wanted.came(block, &piece),
                    piece,
                    fetched,
                })
                .collect(),
            Err(error) => {
                for block in run.start..end {
                    self.unlock(block, locked);
                    self.wanted.failed(block, &error);
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
                this.wanted.settled(block, in_memory);
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
            let (wanted, is_whole) = this.wanted.units_of(block);
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
                _ if !this.wanted.origin.has_parts() => Prepared::Mine(None),
                None if is_whole => Prepared::Mine(None),
                held => Prepared::Mine(Some(held.unwrap_or_else(|| Held::nothing(this.wanted.block_bytes(block))))),
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

    /// Gives a buffer back, if there is one.
    fn give_back(&self, buffer: Option<Vec<u8>>) {
        let mut buffers = self.buffers();
        if buffers.len() < BUFFERS {
            buffers.extend(buffer);
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
            if this.count.fetch_add(1, Ordering::Relaxed) % TELL == TELL - 1 {
                this.tell_used();
            }
            match cache.keep(entry, block, &fetched, bytes, &sums) {
                Ok(()) => Some(sums),
                Err(error) => {
                    if !this.has_warned.swap(true, Ordering::Relaxed) {
                        let folder = cache.folder().display();
                        tracing::warn!(
                            "{folder}: what is fetched of {} is not kept: {error}",
                            this.wanted.origin.name()
                        );
                    }
                    None
                }
            }
        };
        match spawn_blocking(keep).await.ok().flatten() {
            Some(sums) => {
                self.wanted.blocks.set(block, &sums, !was_waited_for);
                self.give_back(piece.into_buffer());
                None
            }
            None => Some(piece),
        }
    }

    /// Gets a run of blocks from the server, however often that must be tried. With each block
    /// comes the range of it that was fetched.
    async fn get(&self, run: Range<u64>) -> Result<Vec<(Piece, Range<u64>)>, ObjectError> {
        let mut bytes = self.buffer();
        let range = run.start * BLOCK_BYTES..(run.end * BLOCK_BYTES).min(self.wanted.origin.size_bytes());
        self.wanted.origin.get(range, &mut bytes).await?;
        Ok(Piece::of_run(bytes).into_iter().map(|piece| (piece.clone(), 0..piece.len() as u64)).collect())
    }

    /// Gets the first of the wanted units of a block that are not held, and adds them.
    async fn get_part(&self, block: u64, mut held: Held) -> Result<Vec<(Piece, Range<u64>)>, ObjectError> {
        self.wanted.blocks.set(block, &held.sums, false);
        let (wanted, _) = self.wanted.units_of(block);
        let len_bytes = held.bytes.len() as u64;
        let missing = Units::missing(wanted, held.units).unwrap_or(0..len_bytes);
        let range = missing.start..missing.end.min(len_bytes);
        let (at_bytes, mut bytes) = (block * BLOCK_BYTES, self.buffer());
        self.wanted.origin.get(at_bytes + range.start..at_bytes + range.end, &mut bytes).await?;
        held.bytes[range.start as usize..range.end as usize].copy_from_slice(&bytes);
        self.give_back(Some(bytes));
        held.units = held.units.and(Units::of(range.clone()));
        Ok(vec![(Piece::of_held(held), range)])
    }

    /// Whether blocks are wanted, or being kept.
    pub(crate) fn is_at_work(&self) -> bool {
        !self.wanted.is_empty()
    }

    /// Stops reading ahead, and waits until what is under way is in the cache.
    pub(crate) fn settle(&self, deadline: Instant) {
        self.wanted.stop_ahead();
        while self.is_at_work() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(2));
        }
        self.tell_used();
    }

    /// Tells the cache which blocks were used.
    pub(crate) fn tell_used(&self) {
        if let Some((_, entry)) = &self.kept {
            // Who waits for this lock finds that all that it would tell is in the cache.
            let _telling = self.telling.lock().unwrap_or_else(PoisonError::into_inner);
            // Without it these blocks are dropped a little earlier, and no boot is recorded.
            let _ = entry.mark_used(self.wanted.blocks.take_used());
        }
    }
}

impl Drop for Fetcher {
    fn drop(&mut self) {
        self.tell_used();
        self.wanted.wake.notify_one();
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
async fn dispatch(weak: Weak<Fetcher>) {
    let Some(wake) = weak.upgrade().map(|fetcher| Arc::clone(&fetcher.wanted.wake)) else { return };
    loop {
        let is_woken = timeout(TELL_EVERY, wake.notified()).await.is_ok();
        let Some(fetcher) = weak.upgrade() else { return };
        if !is_woken {
            drop(spawn_blocking(move || fetcher.tell_used()));
            continue;
        }
        while let Some(run) = fetcher.wanted.pick() {
            tokio::spawn(Arc::clone(&fetcher).fetch(run));
        }
    }
}
