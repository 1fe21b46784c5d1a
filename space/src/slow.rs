//! What a transfer cannot do: first writes, zeroing, members that fail. By blocking calls, one slab
//! at a time.
//!
//! ```text
//!   read    hold ─▶ the best copy; after an error the next one
//!   write   busy ─▶ unmapped: allocate ┐
//!                   clean: make dirty  ┴─ durable ─▶ payload to all copies: `copies.rs`
//!           small, to a slow slab: to the log of the cache, when there is room
//! ```
//!
//! A new slab is zeroed on all its members and synced before the map names it. A sequential writer
//! gets more and more slabs at once, up to [`AHEAD_MAX`], so that these syncs are rare.

use crate::{
    busy::Busy,
    columns::avoided_by_new,
    copies::{Payload, no_copy},
    file::SpaceFile,
    member::Member,
    outcome::{Entered, Found},
    pool::lock,
    slab_table::Slab,
    sums::{have_sums, is_whole, whole_blocks},
};
use diskwright_format::space::{
    Copy, SUM_BYTES,
    change::{Change, SlabRun, SlabState, Tier},
    superblock::{Class, MemberState},
};
use diskwright_store::{FileRange, Store, Zeroing, is_full};
use std::{io, ops::Range, sync::Arc, thread, time::Duration};

/// Most slabs that are allocated at once, and unmapped at once.
const AHEAD_MAX: u32 = 64;

/// The class of the members that get the new slabs of a tier, as long as there is room.
pub(crate) fn first_class(tier: Tier) -> Class {
    match tier {
        Tier::Any | Tier::Fast => Class::Ssd,
        Tier::Slow => Class::Hdd,
    }
}

impl SpaceFile {
    /// Splits a range at slabs.
    fn slabs(&self, range: Range<u64>) -> impl Iterator<Item = (u32, u64, u64)> {
        let mut at = range.start;
        std::iter::from_fn(move || {
            let (index, within_bytes) = self.slab_of(at);
            let len_bytes = range.end.checked_sub(at)?.min(self.pool.slab_bytes() - within_bytes);
            at += len_bytes;
            (len_bytes > 0).then_some((index, within_bytes, len_bytes))
        })
    }

    pub(crate) fn read_slabs(&self, mut buf: &mut [u8], offset_bytes: u64) -> io::Result<()> {
        for (index, within_bytes, len_bytes) in self.slabs(offset_bytes..offset_bytes + buf.len() as u64) {
            let (piece, rest) = buf.split_at_mut(len_bytes as usize);
            buf = rest;
            self.read_slab(index, within_bytes, piece)?;
        }
        Ok(())
    }

    fn read_slab(&self, index: u32, within_bytes: u64, piece: &mut [u8]) -> io::Result<()> {
        let Some(entry) = self.file.table.get(index) else {
            piece.fill(0);
            return Ok(());
        };
        loop {
            if let Some(slab) = entry.hold_for_read() {
                let read = self.read_found(index, slab, within_bytes, piece);
                entry.release(1);
                return match read? {
                    Found::Intact => Ok(()),
                    Found::Wrong if self.pool.is_writable() => self.pool.mend(&self.file, index).map(|_| ()),
                    Found::Wrong => Ok(()),
                    Found::NoSums => self.pool.unseal(&self.file, index),
                    Found::Lost => {
                        // Reports what is lost, and mends the rest.
                        if self.pool.is_writable() {
                            self.pool.mend(&self.file, index)?;
                        }
                        let at = (u64::from(index) << self.pool.slab_shift()) + within_bytes;
                        let what = format!(
                            "{}: bytes near {at} do not have their checksums on any member; `space scrub` shows what is \
                             lost",
                            self.name().display()
                        );
                        Err(io::Error::new(io::ErrorKind::InvalidData, what))
                    }
                };
            }
            if entry.load().state().is_none() {
                piece.fill(0);
                return Ok(());
            }
            self.pool.wait_not_busy();
        }
    }

    pub(crate) fn read_slab_itself(
        &self,
        index: u32,
        slab: Slab,
        within_bytes: u64,
        piece: &mut [u8],
    ) -> io::Result<Found> {
        if slab.is_sealed() {
            self.read_sealed(index, slab, within_bytes, piece)
        } else {
            self.pool.read_copies(&self.file, slab, within_bytes, piece).map(|()| Found::Intact)
        }
    }

    /// Reads from a copy of a sealed slab that has its checksums. The caller holds the slab.
    fn read_sealed(&self, index: u32, slab: Slab, within_bytes: u64, piece: &mut [u8]) -> io::Result<Found> {
        let mut sums = self.pool.sums_of(&self.file, index)?;
        loop {
            let Some(known) = sums else {
                return self.pool.read_copies(&self.file, slab, within_bytes, piece).map(|()| Found::NoSums);
            };
            let found = self.read_with_sums((index, slab), &known, within_bytes, piece)?;
            if found != Found::Lost {
                return Ok(found);
            }
            // Nothing counts as lost by what is in memory alone.
            sums = self.pool.sums_on_members(&self.file, index)?;
            if sums.as_ref() == Some(&known) {
                return Ok(found);
            }
        }
    }

    fn read_with_sums(
        &self,
        (index, slab): (u32, Slab),
        sums: &[u32],
        within_bytes: u64,
        piece: &mut [u8],
    ) -> io::Result<Found> {
        let blocks = whole_blocks(within_bytes..within_bytes + piece.len() as u64);
        let lead = (within_bytes - blocks.start) as usize;
        let mut around = if is_whole(within_bytes, piece.len() as u64) {
            Vec::new()
        } else {
            vec![0; (blocks.end - blocks.start) as usize]
        };
        let best = self.pool.best_copy(&self.file, slab);
        let others = slab.good_copies().filter(|copy| Some(*copy) != best);
        let (mut failure, mut found) = (None, Found::Intact);
        for copy in best.into_iter().chain(others) {
            let Some(member) = self.pool.live_member(copy.member) else { continue };
            let buf = if around.is_empty() { &mut *piece } else { &mut around[..] };
            if let Err(error) = member.read_at(buf, copy.offset_bytes(self.pool.slab_shift()) + blocks.start) {
                failure = Some(error);
                continue;
            }
            if have_sums(sums, blocks.start, buf) {
                if !around.is_empty() {
                    piece.copy_from_slice(&around[lead..lead + piece.len()]);
                }
                return Ok(if failure.is_some() { Found::Wrong } else { found });
            }
            found = Found::Wrong;
        }
        if !self.file.table.entry(index).load().is_sealed() {
            // It was written meanwhile, so it does not have the checksums any more.
            return self.pool.read_copies(&self.file, slab, within_bytes, piece).map(|()| Found::Intact);
        }
        if found == Found::Intact {
            return Err(failure.unwrap_or_else(no_copy));
        }
        Ok(Found::Lost)
    }

    pub(crate) fn write_slabs(&self, mut buf: &[u8], offset_bytes: u64) -> io::Result<()> {
        for (index, within_bytes, len_bytes) in self.slabs(offset_bytes..offset_bytes + buf.len() as u64) {
            let (piece, rest) = buf.split_at(len_bytes as usize);
            buf = rest;
            self.write_slab(index, within_bytes, Payload::Bytes(piece))?;
        }
        Ok(())
    }

    fn write_slab(&self, index: u32, within_bytes: u64, payload: Payload<'_>) -> io::Result<()> {
        let entry = self.file.table.entry(index);
        loop {
            if let (Payload::Bytes(bytes), Some(cache)) = (payload, self.pool.cache())
                && self.enters_slowly(cache, index, within_bytes, bytes.len() as u64)
            {
                let blocks = whole_blocks(within_bytes..within_bytes + bytes.len() as u64);
                cache.admit(&self.pool, (blocks.end - blocks.start) / SUM_BYTES)?;
                match self.write_logged(cache, index, within_bytes, bytes)? {
                    Entered::Yes => return Ok(()),
                    Entered::No => {}
                    Entered::Full => {
                        self.pool.make_room()?;
                        continue;
                    }
                }
            }
            let busy = Busy::wait(&self.pool, entry);
            self.pool.require_journal()?;
            if entry.load().state().is_none() {
                self.allocate_at(index)?;
            }
            if self.unlogged(index)? {
                return self.pool.write_busy(&self.file, index, within_bytes, payload);
            }
            drop(busy);
            self.pool.make_room()?;
        }
    }

    /// Allocates an unmapped slab, which is busy. A sequential writer gets the next ones too.
    fn allocate_at(&self, index: u32) -> io::Result<()> {
        let count = {
            let mut ahead = lock(&self.file.ahead);
            let count = if ahead.0 == index { (ahead.1 * 2).clamp(1, AHEAD_MAX) } else { 1 };
            *ahead = (index.saturating_add(count), count);
            count
        };
        let end = u64::from(index) + u64::from(count);
        // Not beyond the end of the file, except the slab that is asked for.
        let end = end.min(self.len().div_ceil(self.pool.slab_bytes())).max(u64::from(index) + 1);
        let mut busy = Vec::new();
        for next in u64::from(index) + 1..end {
            let claimed = Busy::try_now(&self.pool, self.file.table.entry(next as u32));
            match claimed.filter(|busy| busy.entry.load().state().is_none()) {
                Some(claimed) => busy.push(claimed),
                None => break,
            }
        }
        match self.allocate(index, busy.len() as u32 + 1) {
            // The slabs ahead can wait.
            Err(error) if is_full(&error) && !busy.is_empty() => {
                drop(busy);
                self.allocate(index, 1)
            }
            result => result,
        }
    }

    /// Allocates slabs that are unmapped and busy, as zeros. A member that fails meanwhile is lost,
    /// and others are taken.
    fn allocate(&self, first: u32, count: u32) -> io::Result<()> {
        let taken = loop {
            let taken = self.take_slabs(first, count)?;
            let Err((member, error)) = self.zero_new(&taken) else { break taken };
            let mut state = lock(self.pool_state());
            for copy in taken.into_iter().flatten() {
                state.free[usize::from(copy.member)].give_back(copy.slab);
            }
            drop(state);
            if is_full(&error) {
                return Err(error);
            }
            self.pool.lose(member, &error)?;
        };
        let mut bytes = Vec::new();
        for copies in &taken {
            SlabRun::put(&mut bytes, SlabState::Dirty, copies.iter().copied());
        }
        let slabs = SlabRun::new(taken.first().map_or(0, Vec::len) as u8, &bytes);
        let mut state = lock(self.pool_state());
        let ticket = self.pool.append(&mut state, &Change::Slabs { file: self.file.number, first, slabs });
        drop(state);
        // If the journal fails it is unknown whether the slabs are taken: they stay so.
        self.pool.wait(ticket)
    }

    /// Takes free slabs, each with its copies on different members. While members are lost there
    /// are fewer copies; they are added when there are enough members again.
    fn take_slabs(&self, first: u32, count: u32) -> io::Result<Vec<Vec<Copy>>> {
        loop {
            match self.take_free_slabs(first, count)? {
                Some(taken) => return Ok(taken),
                // One that is free gets its hole now, and comes back.
                None => thread::sleep(Duration::from_millis(1)),
            }
        }
    }

    /// `None` if there may be enough in a moment.
    fn take_free_slabs(&self, first: u32, count: u32) -> io::Result<Option<Vec<Vec<Copy>>>> {
        let mut state = lock(self.pool_state());
        let mut taken: Vec<Vec<Copy>> = Vec::new();
        let class = first_class(self.file.tier());
        let is_active = |member: &&Arc<Member>| {
            state.superblock.member(member.number).is_some_and(|row| row.state == MemberState::Active)
        };
        let active = self.pool.holders().filter(is_active).count();
        for _ in 0..count {
            let avoided = avoided_by_new(&self.file, first, &taken);
            let mut order: Vec<(bool, bool, u32, u8)> = Vec::new();
            for member in self.pool.live_members() {
                let free = state.free[usize::from(member.number)].free();
                let row = state.superblock.member(member.number);
                if free > 0 && row.is_some_and(|row| row.state == MemberState::Active) {
                    let is_avoided = avoided >> member.number & 1 == 1;
                    order.push((member.class != class, is_avoided, u32::MAX - free, member.number));
                }
            }
            order.sort_unstable();
            let copies = usize::from(self.file.copies).min(active).max(1);
            if order.len() < copies {
                break;
            }
            let copies = order[..copies].iter().filter_map(|&(.., member)| {
                let slab = state.free[usize::from(member)].take()?;
                Some(Copy { member, slab })
            });
            taken.push(copies.collect());
        }
        if taken.len() == count as usize {
            return Ok(Some(taken));
        }
        for copy in taken.drain(..).flatten() {
            state.free[usize::from(copy.member)].give_back(copy.slab);
        }
        let is_punching = self.pool.is_punching();
        drop(state);
        if is_punching {
            return Ok(None);
        }
        let what = format!("pool {}: its members have no free slabs for {}", self.pool.name(), self.name().display());
        Err(io::Error::new(io::ErrorKind::StorageFull, what))
    }

    /// Makes the copies of new slabs zeros, durably. The error comes with the member.
    fn zero_new(&self, taken: &[Vec<Copy>]) -> Result<(), (u8, io::Error)> {
        let mut members = 0_u64;
        let member = |number: u8| self.pool.live_member(number).ok_or_else(|| (number, no_copy()));
        for copy in taken.iter().flatten() {
            let offset_bytes = copy.offset_bytes(self.pool.slab_shift());
            let range = FileRange { offset_bytes, len_bytes: self.pool.slab_bytes() };
            let zeroed = member(copy.member)?.zero_range(range);
            zeroed.map_err(|error| (copy.member, error))?;
            members |= 1 << copy.member;
        }
        for number in (0..64).filter(|number| members >> number & 1 == 1) {
            member(number)?.sync_all().map_err(|error| (number, error))?;
        }
        Ok(())
    }

    /// Maps the slabs of a range that are not mapped.
    pub(crate) fn allocate_slabs(&self, start_bytes: u64, end_bytes: u64) -> io::Result<()> {
        let slabs: Vec<u32> = self.slabs(start_bytes..end_bytes).map(|(index, ..)| index).collect();
        for run in slabs.chunks(AHEAD_MAX as usize) {
            let mut busy: Vec<Busy<'_>> = Vec::new();
            let mut first = None;
            for &index in run {
                let entry = self.file.table.entry(index);
                let claimed = Busy::wait(&self.pool, entry);
                if entry.load().state().is_none() {
                    first.get_or_insert(index);
                    busy.push(claimed);
                } else if let Some(first) = first.take() {
                    self.allocate(first, busy.len() as u32)?;
                    busy.clear();
                }
            }
            if let Some(first) = first {
                self.allocate(first, busy.len() as u32)?;
            }
        }
        Ok(())
    }

    /// Makes a range zeros. Whole slabs are unmapped if their space may be freed.
    pub(crate) fn zero_slabs(&self, range: Range<u64>, how: Zeroing) -> io::Result<()> {
        let slab_bytes = self.pool.slab_bytes();
        let file_end = self.len();
        let mut whole: Option<Range<u32>> = None;
        for (index, within_bytes, len_bytes) in self.slabs(range) {
            let at_end = (u64::from(index) << self.pool.slab_shift()) + within_bytes + len_bytes >= file_end;
            let is_whole = within_bytes == 0 && (len_bytes == slab_bytes || at_end);
            if is_whole && how == Zeroing::Deallocate {
                let run = whole.get_or_insert(index..index);
                run.end = index.saturating_add(1);
                if run.len() >= AHEAD_MAX as usize {
                    self.unmap(run.clone())?;
                    whole = None;
                }
                continue;
            }
            let is_mapped = self
                .file
                .table
                .get(index)
                .is_some_and(|entry| entry.load().state().is_some() || entry.load().is_busy());
            if is_mapped {
                self.zero_slab(index, within_bytes, len_bytes)?;
            }
        }
        whole.map_or(Ok(()), |run| self.unmap(run))
    }

    fn zero_slab(&self, index: u32, within_bytes: u64, len_bytes: u64) -> io::Result<()> {
        let entry = self.file.table.entry(index);
        loop {
            let busy = Busy::wait(&self.pool, entry);
            self.pool.require_journal()?;
            if entry.load().state().is_none() {
                return Ok(());
            }
            if self.unlogged(index)? {
                return self.pool.write_busy(&self.file, index, within_bytes, Payload::Zeros(len_bytes));
            }
            drop(busy);
            self.pool.make_room()?;
        }
    }

    /// Unmaps the mapped slabs of a range, durably. Only those that this thread has for itself: one
    /// that is mapped meanwhile may be in use.
    fn unmap(&self, slabs: Range<u32>) -> io::Result<()> {
        let busy = loop {
            let mut busy: Vec<(u32, Busy<'_>)> = Vec::new();
            for index in slabs.clone() {
                let Some(entry) = self.file.table.get(index) else { continue };
                let claimed = Busy::wait(&self.pool, entry);
                if entry.load().state().is_some() {
                    busy.push((index, claimed));
                }
            }
            let claimed: Vec<u32> = busy.iter().map(|(index, _)| *index).collect();
            if self.pool.unlog(&self.file, &claimed)? {
                break busy;
            }
            drop(busy);
            self.pool.make_room()?;
        };
        self.pool.require_journal()?;
        let mut changes: Vec<Change<'_>> = Vec::new();
        for &(index, _) in &busy {
            match changes.last_mut() {
                Some(Change::Unmap { first, count, .. }) if *first + *count == index => *count += 1,
                _ => changes.push(Change::Unmap { file: self.file.number, first: index, count: 1 }),
            }
        }
        if changes.is_empty() {
            return Ok(());
        }
        let mut state = lock(self.pool_state());
        let ticket = self.pool.append_together(&mut state, &changes);
        drop(state);
        self.pool.wait(ticket)
    }

    pub(crate) fn pool_state(&self) -> &std::sync::Mutex<crate::pool::State> {
        self.pool.state()
    }
}
