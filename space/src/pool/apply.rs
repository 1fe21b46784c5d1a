//! What a change does to the map. A commit applies its changes when they are durable, and a replay
//! applies all of them again: by the same code, so both give the same map.

use super::{FileState, Pool, State};
use crate::free::FreeSlabs;
use diskwright_format::space::{
    Copy,
    change::{Change, SlabState},
};
use std::sync::{
    Arc, Mutex, PoisonError,
    atomic::{AtomicU32, AtomicU64, Ordering},
};

/// Whether slabs that a change maps are still to be taken from the free ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Taking {
    /// No: they were taken before the change was appended.
    Taken,
    /// Yes, in a replay. A slab that is not free has two owners.
    Free,
}

impl Pool {
    /// Applies a change. The error says what contradicts the map; nothing is applied then.
    pub(crate) fn apply(&self, state: &mut State, change: &Change<'_>, taking: Taking) -> Result<(), String> {
        match *change {
            Change::File { file, len_bytes, copies, tier, name } => {
                let mut files = self.files.write().unwrap_or_else(PoisonError::into_inner);
                if let Some(known) = files.get(&file) {
                    known.len_bytes.store(len_bytes, Ordering::Release);
                    state.names.retain(|_, number| *number != file);
                } else {
                    let (table, mapped) = (Default::default(), AtomicU32::new(0));
                    let len_bytes = AtomicU64::new(len_bytes);
                    let (ahead, openers) = (Mutex::new((0, 0)), Mutex::new(0));
                    let new = FileState { number: file, len_bytes, copies, tier, table, ahead, openers, mapped };
                    files.insert(file, Arc::new(new));
                }
                if state.names.insert(name.to_owned(), file).is_some_and(|other| other != file) {
                    return Err(format!("two files have the name {name:?}"));
                }
                state.next_file = state.next_file.max(file.saturating_add(1));
            }
            Change::Length { file, len_bytes } => self.known(file)?.len_bytes.store(len_bytes, Ordering::Release),
            Change::Removed { file } => {
                let known = self.known(file)?;
                for (index, entry) in known.table.mapped(0..1 << 32) {
                    free_copies(&mut state.free, entry.load().copies().into_iter().flatten());
                    entry.unmap();
                    state.dirty.remove(&(file, index));
                }
                self.files.write().unwrap_or_else(PoisonError::into_inner).remove(&file);
                state.names.retain(|_, number| *number != file);
            }
            Change::Slabs { file, first, slabs } => {
                let known = self.known(file)?;
                for (index, (slab_state, bits)) in (first..).zip(slabs.iter()) {
                    let entry = known.table.entry(index);
                    let before = entry.load();
                    let old = before.copies();
                    let new = bits.map(Copy::from_bits);
                    if taking == Taking::Free {
                        let added = new.iter().flatten().filter(|&copy| !old.contains(&Some(*copy)));
                        take_copies(&mut state.free, added)?;
                    }
                    entry.map(slab_state, bits);
                    free_copies(&mut state.free, old.into_iter().flatten().filter(|&copy| !new.contains(&Some(copy))));
                    if before.state().is_none() {
                        known.mapped.fetch_add(1, Ordering::Relaxed);
                    }
                    note_dirty(state, file, index, slab_state);
                }
            }
            Change::State { file, first, count, state: slab_state } => {
                let known = self.known(file)?;
                let lost = state.lost_in_map;
                for (index, entry) in known.table.mapped(u64::from(first)..u64::from(first) + u64::from(count)) {
                    if entry.set_state(slab_state, lost) {
                        note_dirty(state, file, index, slab_state);
                    }
                }
            }
            Change::Stale { file, index, mask } => self.known(file)?.table.entry(index).set_stale(mask),
            Change::Unmap { file, first, count } => {
                let known = self.known(file)?;
                for (index, entry) in known.table.mapped(u64::from(first)..u64::from(first) + u64::from(count)) {
                    free_copies(&mut state.free, entry.load().copies().into_iter().flatten());
                    entry.unmap();
                    known.mapped.fetch_sub(1, Ordering::Relaxed);
                    state.dirty.remove(&(file, index));
                }
            }
            Change::Lost { member } => {
                state.lost_in_map |= 1 << member;
                self.mark_dirty_stale(state);
            }
            Change::Back { member } => state.lost_in_map &= !(1 << member),
        }
        Ok(())
    }

    /// The copies of dirty slabs on lost members become stale.
    fn mark_dirty_stale(&self, state: &State) {
        for &(file, index) in &state.dirty {
            let Some(file) = self.file(file) else { continue };
            if let Some(entry) = file.table.get(index) {
                entry.set_state(SlabState::Dirty, state.lost_in_map);
            }
        }
    }

    fn known(&self, file: u32) -> Result<Arc<FileState>, String> {
        self.file(file).ok_or_else(|| format!("a change of file {file}, which does not exist"))
    }
}

fn note_dirty(state: &mut State, file: u32, index: u32, slab_state: SlabState) {
    match slab_state {
        SlabState::Dirty => state.dirty.insert((file, index)),
        SlabState::Clean => state.dirty.remove(&(file, index)),
    };
}

fn free_copies(free: &mut [FreeSlabs], copies: impl IntoIterator<Item = Copy>) {
    for copy in copies {
        if let Some(free) = free.get_mut(usize::from(copy.member)) {
            free.give_back(copy.slab);
        }
    }
}

fn take_copies<'a>(free: &mut [FreeSlabs], copies: impl IntoIterator<Item = &'a Copy>) -> Result<(), String> {
    for copy in copies {
        let taken = free.get_mut(usize::from(copy.member)).is_some_and(|free| free.take_this(copy.slab));
        if !taken {
            return Err(format!("slab {} of member {} has two owners, or does not exist", copy.slab, copy.member));
        }
    }
    Ok(())
}
