//! Which blocks of an object are wanted, and by whom. No I/O.
//!
//! ```text
//!   want ──▶ wanted ──▶ pick ─▶ under way ──▶ came ─▶ waiters ──▶ settled: known, or in memory
//!   missed, goes_on ─▶ wanted, read ahead        └▶ failed ─▶ waiters
//! ```
//!
//! What is waited for is picked before what is read ahead. A block is wanted once, however many
//! want it. It stays wanted until it is settled: a read that comes while it is being kept is served
//! from memory. If it has come in part, and reads need more of it, it is wanted again. Each part
//! serves at least one read, so this ends.
//!
//! One lock guards the tables. It is held for look-ups and for copies to waiters, never while
//! anything is waited for.

use crate::{
    BLOCK_BYTES,
    blocks::Blocks,
    error::ObjectError,
    origin::Origin,
    piece::{Memory, Piece, Waiter},
    streams::{AHEAD_MAX, Streams},
    units::Units,
};
use std::{
    collections::{BTreeMap, VecDeque},
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};
use tokio::sync::Notify;

/// Blocks of one object under way.
const UNDER_WAY: usize = 16;
/// Blocks of one GET.
const RUN_MAX: u64 = 4;
/// Blocks that could not be kept in the cache and stay in memory.
const RECENT: usize = 32;

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
}

/// The blocks of one object that are wanted; see the module documentation.
#[derive(Debug)]
pub(crate) struct WantedBlocks {
    pub(crate) origin: Origin,
    pub(crate) blocks: Blocks,
    state: Mutex<State>,
    /// Told when a block may be picked.
    pub(crate) wake: Arc<Notify>,
}

impl WantedBlocks {
    /// Those of an object of which nothing is known.
    pub(crate) fn new(origin: Origin) -> Self {
        let blocks = Blocks::new(origin.size_bytes());
        Self { origin, blocks, state: Mutex::default(), wake: Arc::new(Notify::new()) }
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
    pub(crate) fn missed(&self, blocks: Range<u64>) {
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
    pub(crate) fn pick(&self) -> Option<Range<u64>> {
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
    pub(crate) fn came(&self, block: u64, piece: &Piece) -> bool {
        let mut state = self.state();
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
    pub(crate) fn settled(&self, block: u64, in_memory: Option<Piece>) {
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

    pub(crate) fn failed(&self, block: u64, error: &ObjectError) {
        let wanted = self.state().wanted.remove(&block);
        for waiter in wanted.into_iter().flat_map(|wanted| wanted.waiters) {
            waiter.take(block, Err(error));
        }
    }

    /// Blocks of a run are under way no more: others may be picked.
    pub(crate) fn ended(&self, blocks: usize) {
        self.state().under_way -= blocks;
        self.wake.notify_one();
    }

    /// What is wanted of a block, and whether all of it is fetched if nothing is there.
    pub(crate) fn units_of(&self, block: u64) -> (Units, bool) {
        let state = self.state();
        let (units, is_whole) =
            state.wanted.get(&block).map_or_else(Default::default, |wanted| (wanted.units, wanted.is_whole));
        (Units::all_of(self.block_bytes(block)).within(units), is_whole)
    }

    /// Whether no block is wanted, or being kept.
    pub(crate) fn is_empty(&self) -> bool {
        self.state().wanted.is_empty()
    }

    /// Nothing is read ahead any more.
    pub(crate) fn stop_ahead(&self) {
        let mut state = self.state();
        state.ahead.clear();
        state.wanted.retain(|_, wanted| wanted.is_under_way || !wanted.waiters.is_empty());
    }

    /// Length of a block in bytes: the last one ends with the object.
    pub(crate) fn block_bytes(&self, block: u64) -> usize {
        (self.origin.size_bytes() - block * BLOCK_BYTES).min(BLOCK_BYTES) as usize
    }
}
