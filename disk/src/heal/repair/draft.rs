//! A draft of a file: changes are recorded and shown, and the file stays as it is.
//!
//! ```text
//!   repair ─▶ write, zero, set_len ─▶ pages, zeroed ranges, length ─▶ reads show them
//!                └ sync ─▶ Phase: every sector that changed since the last sync, as it is now
//! ```
//!
//! The code that repairs an image takes the draft for the file. Each sync ends a [`Phase`]. Within
//! a phase the changes may reach the file in any order; a phase begins when the one before it is
//! durable. A sector occurs once in a phase, so after a power cut each sector of the file is one of
//! the versions that are recorded here. The undo file relies on that (`journal.rs`).
//!
//! One mutex guards the recorded state. The base is read under it: a draft has one user.
//!
//! Memory: at most [`PAGES_MAX`] pages, and as many bytes in phases; a repair that changes more is
//! refused.

use diskwright_store::{
    DataFile, FileRange, Store, Zeroing,
    sync::{Mutex, MutexGuard},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, io,
    ops::Range,
    path::Path,
    sync::Arc,
};

/// The unit that a medium writes as a whole.
pub(super) const SECTOR_BYTES: u64 = 512;
const PAGE_BYTES: u64 = 4096;
/// Most pages in memory: 256 MiB.
const PAGES_MAX: usize = 64 << 10;
const PHASE_BYTES_MAX: u64 = 512 << 20;

/// The changes between two syncs, in the order in which they are made.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Phase {
    /// The file gets this length first.
    pub(super) grow_to_bytes: Option<u64>,
    /// Then these ranges are zeroed.
    pub(super) zeros: Vec<Range<u64>>,
    /// Then these bytes are written at these offsets: whole sectors, or up to the end of the file.
    pub(super) writes: Vec<(u64, Vec<u8>)>,
    /// At last the file is cut to this length.
    pub(super) cut_to_bytes: Option<u64>,
}

impl Phase {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

struct State {
    len_bytes: u64,
    pages: BTreeMap<u64, Box<[u8]>>,
    /// Ranges of the base that read as zeros: start to end, without overlaps.
    zeroed: BTreeMap<u64, u64>,
    phases: Vec<Phase>,
    phase_bytes: u64,
    current: Phase,
    /// Sectors that were written since the last sync, by their number.
    dirty: BTreeSet<u64>,
}

/// A store that records what is written to it and never changes `base`.
pub(super) struct Draft {
    base: Arc<dyn Store>,
    base_bytes: u64,
    state: Mutex<State>,
}

impl fmt::Debug for Draft {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Draft").field("base", &self.base).finish_non_exhaustive()
    }
}

fn too_much() -> io::Error {
    io::Error::new(io::ErrorKind::OutOfMemory, "the repair would change more than 256 MiB of tables")
}

impl Draft {
    /// A draft that shows `base`.
    pub(super) fn new(base: Arc<dyn Store>) -> io::Result<Self> {
        let base_bytes = base.len_bytes()?;
        let state = State {
            len_bytes: base_bytes,
            pages: BTreeMap::new(),
            zeroed: BTreeMap::new(),
            phases: Vec::new(),
            phase_bytes: 0,
            current: Phase::default(),
            dirty: BTreeSet::new(),
        };
        Ok(Self { base, base_bytes, state: Mutex::new(state) })
    }

    /// Takes what was recorded, and the length of the file at the end. Ends the last phase.
    pub(super) fn phases(&self) -> io::Result<(Vec<Phase>, u64)> {
        self.sync_data()?;
        let mut state = self.lock();
        Ok((std::mem::take(&mut state.phases), state.len_bytes))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Reads what the draft shows; bytes beyond its end are zero.
    fn read(&self, state: &State, buf: &mut [u8], offset_bytes: u64) -> io::Result<()> {
        let end = offset_bytes + buf.len() as u64;
        let from_base = self.base_bytes.clamp(offset_bytes, end) - offset_bytes;
        let (held, beyond) = buf.split_at_mut(from_base as usize);
        if !held.is_empty() {
            self.base.read_at(held, offset_bytes)?;
        }
        beyond.fill(0);
        let part = |range: Range<u64>| (range.start - offset_bytes) as usize..(range.end - offset_bytes) as usize;
        let before = state.zeroed.range(..offset_bytes).next_back();
        for (&start, &stop) in before.into_iter().chain(state.zeroed.range(offset_bytes..end)) {
            let (start, stop) = (start.max(offset_bytes), stop.min(end));
            if start < stop {
                buf[part(start..stop)].fill(0);
            }
        }
        for (&at, page) in state.pages.range(offset_bytes - offset_bytes % PAGE_BYTES..end) {
            let (start, stop) = (at.max(offset_bytes), (at + PAGE_BYTES).min(end));
            buf[part(start..stop)].copy_from_slice(&page[(start - at) as usize..(stop - at) as usize]);
        }
        Ok(())
    }

    /// Zeroes a range of what the draft shows.
    fn zero(state: &mut State, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let first = range.start - range.start % PAGE_BYTES;
        let touched: Vec<u64> = state.pages.range(first..range.end).map(|(&at, _)| at).collect();
        for at in touched {
            if at >= range.start && at + PAGE_BYTES <= range.end {
                state.pages.remove(&at);
            } else if let Some(page) = state.pages.get_mut(&at) {
                let (start, stop) = (at.max(range.start), (at + PAGE_BYTES).min(range.end));
                page[(start - at) as usize..(stop - at) as usize].fill(0);
            }
        }
        let Range { mut start, mut end } = range;
        // Merged with the ranges that it touches.
        while let Some((&other, &stop)) = state.zeroed.range(..=end).next_back().filter(|&(_, &stop)| stop >= start) {
            start = start.min(other);
            end = end.max(stop);
            state.zeroed.remove(&other);
        }
        state.zeroed.insert(start, end);
    }
}

impl Store for Draft {
    fn name(&self) -> &Path {
        self.base.name()
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.lock().len_bytes)
    }

    fn read_at(&self, buf: &mut [u8], offset_bytes: u64) -> io::Result<()> {
        let state = self.lock();
        if offset_bytes.checked_add(buf.len() as u64).is_none_or(|end| end > state.len_bytes) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.read(&state, buf, offset_bytes)
    }

    fn write_at(&self, buf: &[u8], offset_bytes: u64) -> io::Result<()> {
        let mut state = self.lock();
        let end = offset_bytes.checked_add(buf.len() as u64).ok_or_else(too_much)?;
        let mut at = offset_bytes - offset_bytes % PAGE_BYTES;
        while at < end {
            if !state.pages.contains_key(&at) {
                if state.pages.len() >= PAGES_MAX {
                    return Err(too_much());
                }
                let mut page = vec![0; PAGE_BYTES as usize];
                self.read(&state, &mut page, at)?;
                state.pages.insert(at, page.into());
            }
            let (start, stop) = (at.max(offset_bytes), (at + PAGE_BYTES).min(end));
            if let Some(page) = state.pages.get_mut(&at) {
                let bytes = &buf[(start - offset_bytes) as usize..(stop - offset_bytes) as usize];
                page[(start - at) as usize..(stop - at) as usize].copy_from_slice(bytes);
            }
            at += PAGE_BYTES;
        }
        state.len_bytes = state.len_bytes.max(end);
        state.dirty.extend(offset_bytes / SECTOR_BYTES..end.div_ceil(SECTOR_BYTES));
        Ok(())
    }

    fn set_len(&self, len_bytes: u64) -> io::Result<()> {
        // A change of the length has a phase of its own.
        self.sync_data()?;
        let mut state = self.lock();
        let present = state.len_bytes;
        if len_bytes < present {
            let end = present.max(self.base_bytes);
            Self::zero(&mut state, len_bytes..end);
            state.current.cut_to_bytes = Some(len_bytes);
        } else if len_bytes > present {
            state.current.grow_to_bytes = Some(len_bytes);
        }
        state.len_bytes = len_bytes;
        drop(state);
        self.sync_data()
    }

    fn allocate(&self, range: FileRange) -> io::Result<()> {
        let end = range.offset_bytes.checked_add(range.len_bytes).ok_or_else(too_much)?;
        if end > self.len_bytes()? { self.set_len(end) } else { Ok(()) }
    }

    fn zero_range(&self, range: FileRange, _how: Zeroing) -> io::Result<()> {
        let mut state = self.lock();
        let end = range.offset_bytes.checked_add(range.len_bytes).filter(|&end| end <= state.len_bytes);
        let end = end.ok_or(io::ErrorKind::UnexpectedEof)?;
        let start = range.offset_bytes;
        Self::zero(&mut state, start..end);
        // Sectors at the ends that are not wholly in the range are written like any other.
        let whole = start.div_ceil(SECTOR_BYTES)..end / SECTOR_BYTES;
        if whole.start < whole.end {
            let cleared: Vec<u64> = state.dirty.range(whole.clone()).copied().collect();
            for sector in cleared {
                state.dirty.remove(&sector);
            }
            state.current.zeros.push(whole.start * SECTOR_BYTES..whole.end * SECTOR_BYTES);
        }
        let all = start / SECTOR_BYTES..end.div_ceil(SECTOR_BYTES);
        state.dirty.extend(all.clone().take(1).chain(all.last()).filter(|sector| !whole.contains(sector)));
        Ok(())
    }

    /// A sync ends a phase: later changes must not reach the file before the earlier ones.
    fn sync_data(&self) -> io::Result<()> {
        let mut state = self.lock();
        let dirty = std::mem::take(&mut state.dirty);
        let mut runs: Vec<Range<u64>> = Vec::new();
        for sector in dirty {
            match runs.last_mut().filter(|run| run.end == sector) {
                Some(run) => run.end = sector + 1,
                None => runs.push(sector..sector + 1),
            }
        }
        for run in runs {
            let (start, end) = (run.start * SECTOR_BYTES, (run.end * SECTOR_BYTES).min(state.len_bytes));
            let mut bytes = vec![0; end.saturating_sub(start) as usize];
            self.read(&state, &mut bytes, start)?;
            state.phase_bytes += bytes.len() as u64;
            if state.phase_bytes > PHASE_BYTES_MAX {
                return Err(too_much());
            }
            state.current.writes.push((start, bytes));
        }
        let phase = std::mem::take(&mut state.current);
        if !phase.is_empty() {
            state.phases.push(phase);
        }
        Ok(())
    }

    fn data_file(&self) -> Option<DataFile<'_>> {
        None
    }

    fn next_data(&self, offset_bytes: u64) -> io::Result<Option<FileRange>> {
        let state = self.lock();
        let page = state.pages.range(offset_bytes - offset_bytes % PAGE_BYTES..).next();
        let page = page.map(|(&at, _)| at.max(offset_bytes)..at + PAGE_BYTES);
        let end = self.base_bytes.min(state.len_bytes);
        let mut at = offset_bytes;
        let mut in_base = None;
        while at < end {
            if let Some((_, &stop)) = state.zeroed.range(..=at).next_back().filter(|&(_, &stop)| stop > at) {
                at = stop;
                continue;
            }
            let Some(found) = self.base.next_data(at)? else { break };
            let start = found.offset_bytes.max(at);
            if start > at {
                at = start;
                continue;
            }
            let stop = found.offset_bytes.saturating_add(found.len_bytes).min(end);
            let next_zeroed = state.zeroed.range(at..).next().map_or(stop, |(&start, _)| start);
            in_base = Some(at..stop.min(next_zeroed));
            break;
        }
        let first = match (page, in_base) {
            (Some(page), Some(base)) if base.start < page.start => Some(base),
            (Some(page), _) => Some(page),
            (None, base) => base,
        };
        let first = first.filter(|range| range.start < state.len_bytes);
        Ok(first.map(|range| FileRange {
            offset_bytes: range.start,
            len_bytes: range.end.min(state.len_bytes) - range.start,
        }))
    }

    fn identity(&self) -> Option<(u64, u64)> {
        self.base.identity()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use diskwright_store::MemoryStore;

    /// What a draft shows, and what its phases make of the file, is what a store would hold.
    #[test]
    fn a_draft_shows_what_its_phases_write() {
        let mut seed = 7u64;
        let mut random = |below: u64| {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 33) % below
        };
        for round in 0..200 {
            let old: Vec<u8> = (0..20_000 + random(10_000)).map(|at| (at % 251) as u8 + 1).collect();
            let model = MemoryStore::with_bytes("model", old.clone());
            let draft = Draft::new(Arc::new(MemoryStore::with_bytes("file", old.clone()))).unwrap();
            for _ in 0..random(30) {
                let len = model.len_bytes().unwrap();
                let offset_bytes = random(len + 1);
                let range = FileRange { offset_bytes, len_bytes: random(len - offset_bytes + 1) };
                let stores: [&dyn Store; 2] = [&model, &draft];
                match random(5) {
                    0 => stores.map(|store| store.zero_range(range, Zeroing::Deallocate).unwrap()),
                    1 => {
                        let new = random(40_000);
                        stores.map(|store| store.set_len(new).unwrap())
                    }
                    2 => stores.map(|store| store.sync_data().unwrap()),
                    _ => {
                        let bytes = vec![random(256) as u8; random(9000) as usize];
                        stores.map(|store| store.write_at(&bytes, offset_bytes).unwrap())
                    }
                };
                let mut shown = vec![9; draft.len_bytes().unwrap() as usize];
                draft.read_at(&mut shown, 0).unwrap();
                assert!(shown == model.to_vec(), "round {round}");
                let mut at = 0;
                while let Some(data) = draft.next_data(at).unwrap() {
                    assert!(shown[at as usize..data.offset_bytes as usize].iter().all(|&byte| byte == 0));
                    at = data.offset_bytes + data.len_bytes;
                }
                assert!(shown[at as usize..].iter().all(|&byte| byte == 0), "round {round}");
            }
            let file = MemoryStore::with_bytes("file", old);
            let (phases, len_bytes) = draft.phases().unwrap();
            for phase in &phases {
                super::super::apply::apply_phase(&file, phase).unwrap();
            }
            assert_eq!(file.len_bytes().unwrap(), len_bytes);
            assert!(file.to_vec() == model.to_vec(), "round {round}");
        }
    }
}
