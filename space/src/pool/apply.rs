//! What a change does to the map. A commit applies its changes when they are durable, and a replay
//! applies all of them again: by the same code, so both give the same map.

use super::{FileState, NewFile, Pool, State};
use crate::{free::FreeSlabs, slab_table::Entry};
use diskwright_format::space::{
    COPIES_MAX, Copy,
    change::{Change, SlabState},
};
use std::{
    ops::Range,
    sync::{Arc, PoisonError, atomic::Ordering},
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
    /// Applies a change. The error says what contradicts the map.
    pub(crate) fn apply(&self, state: &mut State, change: &Change<'_>, taking: Taking) -> Result<(), String> {
        match *change {
            Change::File { file, len_bytes, copies, columns, tier, name } => {
                let new = FileState::new(file, NewFile { len_bytes, copies, columns, tier });
                let mut files = self.files.write().unwrap_or_else(PoisonError::into_inner);
                if files.insert(file, Arc::new(new)).is_some() {
                    return Err(format!("file {file} was created twice"));
                }
                state.next_file = state.next_file.max(file.saturating_add(1));
                give_name(state, file, name)
            }
            Change::Closed => Ok(()),
            Change::Unnamed { name } => {
                state.names.remove(name);
                Ok(())
            }
            Change::Lost { member } => {
                state.lost_in_map |= 1 << member;
                self.mark_dirty_stale(state);
                Ok(())
            }
            Change::Back { member } => {
                state.lost_in_map &= !(1 << member);
                Ok(())
            }
            Change::Length { file, .. }
            | Change::Removed { file }
            | Change::Slabs { file, .. }
            | Change::Extent { file, .. }
            | Change::Tier { file, .. }
            | Change::State { file, .. }
            | Change::Stale { file, .. }
            | Change::Unmap { file, .. }
            | Change::Named { file, .. } => match self.file(file) {
                Some(known) => self.apply_to(state, &known, change, taking),
                // Work on a file may be under way while it is removed.
                None => {
                    if let (Change::Slabs { slabs, .. }, Taking::Taken) = (change, taking) {
                        let copies = slabs.iter().flat_map(|(_, bits)| bits).filter_map(Copy::from_bits);
                        free_copies(&mut state.free, copies);
                    }
                    Ok(())
                }
            },
        }
    }

    fn apply_to(&self, state: &mut State, file: &FileState, change: &Change<'_>, taking: Taking) -> Result<(), String> {
        let number = file.number;
        let range = |first: u32, count: u32| u64::from(first)..u64::from(first) + u64::from(count);
        match *change {
            // In memory the file has the length since the change was appended, or a newer one.
            Change::Length { len_bytes, .. } if taking == Taking::Free => {
                file.len_bytes.store(len_bytes, Ordering::Release);
            }
            Change::Tier { tier, .. } => file.set_tier(tier),
            Change::Named { name, .. } => give_name(state, number, name)?,
            Change::Removed { .. } => {
                unmap(state, file, 0..1 << 32);
                self.files.write().unwrap_or_else(PoisonError::into_inner).remove(&number);
                state.names.retain(|_, other| *other != number);
            }
            Change::Slabs { first, slabs, .. } => {
                let (mut mapped, mut near) = (0, file.table.near(first));
                let mut takes = [Take::default(); COPIES_MAX];
                for (index, (slab_state, bits)) in (first..).zip(slabs.iter()) {
                    let entry = near.entry(index);
                    let before = entry.load();
                    if before.state().is_none() {
                        mapped += 1;
                        if taking == Taking::Free {
                            for (take, bits) in takes.iter_mut().zip(bits) {
                                take.add(&mut state.free, bits)?;
                            }
                            entry.map_alone(slab_state, bits);
                        } else {
                            entry.map(slab_state, bits);
                        }
                    } else {
                        let (old, new) = (before.copies(), bits.map(Copy::from_bits));
                        if taking == Taking::Free {
                            let more = new.into_iter().flatten().filter(|&copy| !old.contains(&Some(copy)));
                            take_copies(&mut state.free, more)?;
                        }
                        let gone = old.into_iter().flatten().filter(|&copy| !new.contains(&Some(copy)));
                        free_copies(&mut state.free, gone);
                        entry.map(slab_state, bits);
                    }
                    if slab_state == SlabState::Dirty {
                        lose_copies(state, entry);
                    }
                    note_dirty(state, number, index, slab_state);
                }
                takes.iter().try_for_each(|take| take.carry_out(&mut state.free))?;
                file.mapped.fetch_add(mapped, Ordering::Relaxed);
            }
            Change::Extent { first, count, state: slab_state, copies, .. } => {
                // First, since it bounds the count by the slabs that there are.
                for bits in copies {
                    Take { first: bits, count }.carry_out(&mut state.free)?;
                }
                let mut near = file.table.near(first);
                for step in 0..count {
                    let entry = near.entry(first + step);
                    if entry.load().state().is_some() {
                        return Err(format!("slab {} of file {number} is mapped twice", first + step));
                    }
                    entry.map_alone(slab_state, copies.map(|bits| if bits == 0 { 0 } else { bits + step }));
                    note_dirty(state, number, first + step, slab_state);
                }
                file.mapped.fetch_add(count, Ordering::Relaxed);
            }
            Change::State { first, count, state: slab_state, .. } => {
                if slab_state == SlabState::Clean {
                    self.has_clean.store(true, Ordering::Release);
                }
                for (index, entry) in file.table.mapped(range(first, count)) {
                    if entry.set_state(slab_state, state.lost_in_map) {
                        note_dirty(state, number, index, slab_state);
                    }
                }
            }
            Change::Stale { index, mask, .. } => {
                let entry = file.table.entry(index);
                entry.set_stale(mask);
                lose_copies(state, entry);
            }
            Change::Unmap { first, count, .. } => unmap(state, file, range(first, count)),
            _ => {}
        }
        Ok(())
    }

    /// The copies of dirty slabs on lost members become stale.
    fn mark_dirty_stale(&self, state: &State) {
        for &(file, index) in &state.dirty {
            let Some(file) = self.file(file) else { continue };
            if let Some(entry) = file.table.get(index) {
                lose_copies(state, entry);
            }
        }
    }
}

/// The copies of a dirty slab on lost members are stale, also if the slab was allocated or moved
/// while the member failed.
fn lose_copies(state: &State, entry: &Entry) {
    if entry.load().state() == Some(SlabState::Dirty) {
        entry.set_state(SlabState::Dirty, state.lost_in_map);
    }
}

fn give_name(state: &mut State, file: u32, name: &str) -> Result<(), String> {
    match state.names.insert(name.to_owned(), file) {
        Some(other) if other != file => Err(format!("two files have the name {name:?}")),
        _ => Ok(()),
    }
}

/// Unmaps slabs. Their copies are free.
fn unmap(state: &mut State, file: &FileState, slabs: Range<u64>) {
    for (index, entry) in file.table.mapped(slabs) {
        free_copies(&mut state.free, entry.load().copies().into_iter().flatten());
        entry.unmap();
        file.mapped.fetch_sub(1, Ordering::Relaxed);
        state.dirty.remove(&(file.number, index));
    }
}

fn note_dirty(state: &mut State, file: u32, index: u32, slab_state: SlabState) {
    match slab_state {
        SlabState::Dirty => state.dirty.insert((file, index)),
        SlabState::Clean | SlabState::Sealed => !state.dirty.is_empty() && state.dirty.remove(&(file, index)),
    };
}

fn free_copies(free: &mut [FreeSlabs], copies: impl IntoIterator<Item = Copy>) {
    for copy in copies {
        if let Some(free) = free.get_mut(usize::from(copy.member)) {
            free.give_back(copy.slab);
        }
    }
}

/// Slabs of a member that follow one another and are taken together. A checkpoint has millions.
#[derive(Debug, Clone, std::marker::Copy, Default)]
struct Take {
    /// The first one, as [`Copy::to_bits`].
    first: u32,
    count: u32,
}

impl Take {
    /// Adds a copy, given as [`Copy::to_bits`]; 0 is none.
    #[inline]
    fn add(&mut self, free: &mut [FreeSlabs], bits: u32) -> Result<(), String> {
        if self.count > 0 && bits == self.first + self.count && bits >> 26 == self.first >> 26 {
            self.count += 1;
        } else if bits != 0 || self.count > 0 {
            self.carry_out(free)?;
            *self = Self { first: bits, count: u32::from(bits != 0) };
        }
        Ok(())
    }

    fn carry_out(&self, free: &mut [FreeSlabs]) -> Result<(), String> {
        let Some(Copy { member, slab }) = Copy::from_bits(self.first) else { return Ok(()) };
        let taken = free.get_mut(usize::from(member)).is_some_and(|free| free.take_these(slab, self.count));
        if taken {
            return Ok(());
        }
        let end = u64::from(slab) + u64::from(self.count);
        Err(format!("slabs {slab} to {end} of member {member} have two owners, or do not exist"))
    }
}

fn take_copies(free: &mut [FreeSlabs], copies: impl IntoIterator<Item = Copy>) -> Result<(), String> {
    for copy in copies {
        let taken = free.get_mut(usize::from(copy.member)).is_some_and(|free| free.take_this(copy.slab));
        if !taken {
            return Err(format!("slab {} of member {} has two owners, or does not exist", copy.slab, copy.member));
        }
    }
    Ok(())
}
