//! Parts of a store with a [`Placement`](crate::Placement): one part for each copy.
//!
//! ```text
//!   carry_out_in_copies ─▶ place ─┬─▶ a part for each copy ─▶ copy_ended ─┬─▶ release
//!                                 │                                       └─ failed: as below
//!                                 └─▶ no copy: the store's lane (a read, if it has one), or
//!                                     its own methods, by `carry_out_off_ring`
//! ```
//!
//! A read that the store wants to be compared is compared before the release. Bytes that are wrong
//! count as a failure. A write that the store wants to see is shown to it before its first part
//! starts.
//!
//! Invariant: a part of a copy is released exactly once, when its transfer has ended and before its
//! request does. A failed one then becomes a part of the store itself, which its lane or its own
//! methods carry out. It is not placed again, so a request ends however many members fail.

#![allow(unsafe_code)]

use super::{Engine, overlapping_parts};
use crate::{
    buffer::{Span, copy_from_foreign},
    part::{Action, CopyOf, Part, Route, Target},
    placement::{Placed, Placement},
    range::FileRange,
};
use std::{collections::HashSet, io, sync::Arc};

/// Memory of another process is compared in pieces of this length.
const FOREIGN_PIECE_BYTES: usize = 4096;

impl Engine {
    /// Splits a part of a store with a placement into parts of its members, and starts them.
    pub(super) fn carry_out_in_copies(&mut self, index: u32) {
        let mut rest = self.parts[index as usize];
        if self.failed || matches!(rest.action, Action::Zero(_)) {
            return self.by_own_methods(index);
        }
        if rest.action == Action::Sync {
            let Some(mut unsynced) = self.placement(rest.target).and_then(Placement::unsynced) else {
                return self.by_own_methods(index);
            };
            self.stats.parts -= 1;
            while unsynced != 0 {
                let member = unsynced.trailing_zeros() as u8;
                unsynced &= unsynced - 1;
                self.start_copy(rest, CopyOf { target: rest.target, member, hold: 0, back_bytes: 0, checked_bytes: 0 });
            }
            return self.part_ended(index, Ok(()));
        }
        let Some(mut placed) = self.place(&rest) else { return self.by_own_methods(index) };
        if placed.is_noted {
            self.note(&rest, &placed);
        }
        if placed.count == 1 && placed.len_bytes >= rest.len_bytes {
            return self.become_the_copy(index, &placed);
        }
        // The original part holds the slot until its pieces have started.
        self.stats.parts -= 1;
        self.to_repeat.get_or_insert_default();
        loop {
            let piece = rest.cut(placed.len_bytes);
            let copies = placed.copies.get(..usize::from(placed.count)).unwrap_or(&placed.copies);
            for copy in copies {
                let copy_of = CopyOf::new(&piece, &placed, *copy);
                self.start_copy(Part { file_offset_bytes: copy.offset_bytes, ..piece }, copy_of);
            }
            if placed.is_zero && piece.fills() {
                let (memory, holder) = (piece.memory(), self.slots.get(piece.slot));
                if holder.clashes(memory, true) {
                    holder.fail(overlapping_parts());
                } else {
                    // SAFETY: the memory is the slot's own, or another process's that may be
                    // written. It is not lent out, no reference to it exists, and the kernel uses
                    // other parts of it only.
                    unsafe { memory.fill_zeros() };
                }
            } else if copies.is_empty() {
                self.start(Part { route: self.own_route(&piece), ..piece });
            }
            match self.place(&rest) {
                Some(next) => placed = next,
                None => break,
            }
            if placed.is_noted {
                self.note(&rest, &placed);
            }
        }
        for failed in self.to_repeat.take().unwrap_or_default() {
            self.by_own_methods(failed);
        }
        self.part_ended(index, Ok(()));
    }

    /// Where the first bytes of a part lie; `None` for a part without any.
    #[inline]
    fn place(&self, rest: &Part) -> Option<Placed> {
        let range = FileRange { offset_bytes: rest.file_offset_bytes, len_bytes: rest.len_bytes };
        let placement = self.placement(rest.target).filter(|_| rest.len_bytes > 0)?;
        let may_note = rest.action == Action::Write { durable: false } && !rest.is_foreign;
        Some(placement.place(range, rest.access(), may_note))
    }

    /// Shows the store the bytes of a write that was placed.
    fn note(&mut self, part: &Part, placed: &Placed) {
        let len_bytes = placed.len_bytes.min(part.len_bytes) as usize;
        let memory = Span { address: part.address, len_bytes };
        let holder = self.slots.get(part.slot);
        if holder.clashes(memory, false) {
            return holder.fail(overlapping_parts());
        }
        // SAFETY: the memory is the slot's own or shared with it, alive and initialised. It belongs
        // to this process (`is_foreign` is not set), no loan writes to it, and the kernel only
        // reads it.
        let bytes = unsafe { std::slice::from_raw_parts(part.address, len_bytes) };
        if let Some(placement) = self.placement(part.target) {
            placement.note(placed.hold, bytes);
        }
    }

    /// Makes a part the part of its only copy. Most reads have one, so they take no second part.
    #[inline]
    fn become_the_copy(&mut self, index: u32, placed: &Placed) {
        let part = self.parts[index as usize];
        let copy = placed.copies[0];
        let target = self.member_target(part.target, copy.member);
        let part = &mut self.parts[index as usize];
        part.copy_of = Some(CopyOf::new(part, placed, copy));
        part.file_offset_bytes = copy.offset_bytes;
        match target {
            Some(target) => {
                part.target = target;
                self.carry_out(index, false);
            }
            None => self.copy_ended(index, Err(io::ErrorKind::NotFound.into())),
        }
    }

    /// The placement of a target's store.
    fn placement(&self, target: u32) -> Option<&dyn Placement> {
        self.targets[target as usize].store.placement()
    }

    /// Starts `part` on the member of `copy_of`.
    fn start_copy(&mut self, part: Part, copy_of: CopyOf) {
        let copy = Part { copy_of: Some(copy_of), ..part };
        match self.member_target(copy_of.target, copy_of.member) {
            Some(target) => self.start(Part { target, ..copy }),
            None => {
                // `copy_ended` continues with a part that has begun.
                self.stats.parts += 1;
                self.slots.hold(copy.slot);
                let index = self.keep_part(copy);
                self.copy_ended(index, Err(io::ErrorKind::NotFound.into()));
            }
        }
    }

    /// Handles the end of a part of a copy.
    pub(super) fn copy_ended(&mut self, index: u32, result: io::Result<()>) {
        let result = result.and_then(|()| self.checked(index));
        let part = &mut self.parts[index as usize];
        let Some(copy) = part.copy_of.take() else { return };
        let (is_sync, access) = (part.action == Action::Sync, part.access());
        let was_durable = matches!(part.action, Action::Write { durable: true } | Action::WriteAgain);
        part.target = copy.target;
        part.file_offset_bytes = part.file_offset_bytes.wrapping_add(copy.back_bytes);
        let store = &self.targets[copy.target as usize].store;
        match store.placement() {
            Some(placement) if is_sync => placement.synced(copy.member, &result),
            Some(placement) => {
                if let (Err(error), true) = (&result, was_durable) {
                    placement.sync_failed(copy.member, error);
                }
                placement.release(copy.member, copy.hold, access, result.is_ok());
            }
            None => {}
        }
        match result {
            Ok(()) => self.part_ended(index, Ok(())),
            // The store's own methods may wait until the range is released, and the copies that are
            // not started yet hold it.
            Err(_) => match &mut self.to_repeat {
                Some(later) => later.push(index),
                None => self.by_own_methods(index),
            },
        }
    }

    /// Compares what a part of a copy has read, if its store wants that.
    #[inline]
    fn checked(&mut self, index: u32) -> io::Result<()> {
        let part = self.parts[index as usize];
        match part.copy_of {
            Some(copy) if copy.checked_bytes > 0 => self.compare(&part, copy),
            _ => Ok(()),
        }
    }

    fn compare(&mut self, part: &Part, copy: CopyOf) -> io::Result<()> {
        // A part that continued after a short read describes the rest only; both have the same end.
        let done_bytes = copy.checked_bytes - part.len_bytes.min(copy.checked_bytes);
        let address = part.address.wrapping_sub(done_bytes as usize);
        let offset_bytes = part.file_offset_bytes.wrapping_add(copy.back_bytes).wrapping_sub(done_bytes);
        let memory = Span { address, len_bytes: copy.checked_bytes as usize };
        if self.slots.get(part.slot).clashes(memory, true) {
            return Err(overlapping_parts());
        }
        let Some(placement) = self.placement(copy.target) else { return Ok(()) };
        let is_intact = if part.is_foreign {
            let mut block = [0; FOREIGN_PIECE_BYTES];
            (0..memory.len_bytes).step_by(FOREIGN_PIECE_BYTES).all(|at| {
                let piece = &mut block[..FOREIGN_PIECE_BYTES.min(memory.len_bytes - at)];
                // SAFETY: the slot's segments keep the mapping, and the part was read into this
                // range of it.
                unsafe { copy_from_foreign(address.wrapping_add(at), piece) };
                placement.is_intact(copy.hold, offset_bytes + at as u64, piece)
            })
        } else {
            // SAFETY: the memory is the slot's own, alive and initialised. The kernel has ended the
            // part, and no other part of the request writes here: no loan does, and a request has
            // each byte in one part.
            let bytes = unsafe { std::slice::from_raw_parts(memory.address, memory.len_bytes) };
            placement.is_intact(copy.hold, offset_bytes, bytes)
        };
        if is_intact { Ok(()) } else { Err(io::ErrorKind::InvalidData.into()) }
    }

    /// How a part of a store with a placement is carried out that has no copy: by the store's lane,
    /// or by its methods in the pool.
    fn own_route(&self, part: &Part) -> Route {
        match self.targets[part.target as usize].lane {
            Some(_) if part.action == Action::Read => Route::Direct,
            _ => Route::Detour,
        }
    }

    /// Carries a part out by its store itself.
    #[cold]
    fn by_own_methods(&mut self, index: u32) {
        let route = self.own_route(&self.parts[index as usize]);
        let part = &mut self.parts[index as usize];
        part.route = route;
        if part.action == Action::WriteAgain {
            part.action = Action::Write { durable: true };
        }
        self.carry_out_off_ring(index);
    }

    /// The target of a member, which is added if this engine has not used it yet. Stores with the
    /// same members share their targets.
    #[inline]
    fn member_target(&mut self, target: u32, member: u8) -> Option<u32> {
        let known = self.targets[target as usize].members.as_ref()?;
        match known.get(usize::from(member)) {
            Some(&Some(found)) => Some(found),
            _ => self.add_member(target, member),
        }
    }

    #[cold]
    fn add_member(&mut self, target: u32, member: u8) -> Option<u32> {
        let store = self.targets[target as usize].store.member(member)?;
        let all_members = self.targets.iter().flat_map(|target| target.members.iter().flatten().flatten());
        let is_same = |&&found: &&u32| Arc::ptr_eq(&self.targets[found as usize].store, &store);
        let found = match all_members.copied().collect::<Vec<_>>().iter().find(is_same) {
            Some(&found) => found,
            None => self.add_target(&store).ok()?.0,
        };
        let known = self.targets[target as usize].members.as_mut()?;
        let place = usize::from(member);
        if known.len() <= place {
            known.resize(place + 1, None);
        }
        known[place] = Some(found);
        Some(found)
    }

    /// Makes the members leave that only removed stores use, in which no part of `used` is left.
    pub(super) fn drop_unused_members(&mut self, used: &HashSet<u32>) {
        let members_of = |target: &Target| target.members.iter().flatten().flatten().copied().collect::<Vec<u32>>();
        let gone: Vec<u32> = self.leaving.iter().copied().filter(|target| !used.contains(target)).collect();
        let candidates: Vec<u32> = gone.iter().flat_map(|&target| members_of(&self.targets[target as usize])).collect();
        let stays = |number: u32| !gone.contains(&number);
        for candidate in candidates {
            let is_used = (0..).zip(&self.targets).any(|(number, target)| {
                stays(number) && target.members.iter().flatten().flatten().any(|&member| member == candidate)
            });
            if !is_used && !self.leaving.contains(&candidate) {
                self.leaving.push(candidate);
            }
        }
    }
}
