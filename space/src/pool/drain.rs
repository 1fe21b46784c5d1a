//! Members join and leave an open pool, and slabs move between members.
//!
//! ```text
//!   add      superblocks of the new member, then of all: it has free slabs from now on
//!   remove   the member is leaving ─▶ each of its copies moves ─▶ its number is free
//!   rebuild  each copy on a lost member gets a new place
//!
//! a move   busy ─▶ free slab elsewhere ─▶ copy, sync ─▶ journal: the new place ─▶ the old is free
//! ```
//!
//! Only one copy of a slab moves at a time, and its source stays valid until the new place is
//! durable. So a power cut at any moment leaves each slab with all copies that it had.

use super::{FileState, Pool, lock, lose::lineage_number, open::MemberFile};
use crate::{
    busy::Busy,
    columns::avoided_by_moved,
    error::{Result, SpaceError},
    free::FreeSlabs,
    member::Member,
    slab_table::Slab,
    slow::first_class,
    sums::have_sums,
};
use diskwright_format::space::{
    Copy, MEMBERS_MAX,
    change::{Change, SlabRun},
    slabs_of,
    superblock::{Class, Member as Row, MemberState},
};
use std::{
    io,
    path::{Path, PathBuf},
    sync::{Arc, atomic::Ordering},
};
use uuid::Uuid;

/// How far a drain or a rebuild is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moved {
    /// Slabs that have moved.
    pub done: u64,
    /// Slabs that had to move when it began.
    pub total: u64,
    /// Size of a slab in bytes.
    pub slab_bytes: u64,
}

impl Pool {
    /// Adds members to the pool. Returns their numbers.
    pub(super) fn add_files(&self, files: Vec<(MemberFile, Class)>) -> Result<Vec<u8>> {
        let mut state = lock(&self.state);
        let mut superblock = state.superblock.clone();
        let mut added = Vec::new();
        for (file, class) in files {
            // A number that this process has used stays with its file until the pool is closed.
            let is_free = |number: &usize| {
                superblock.members.get(*number).is_none_or(Option::is_none) && self.members[*number].get().is_none()
            };
            let Some(number) = (0..MEMBERS_MAX).find(is_free) else {
                let what = format!("pool {}: it has {MEMBERS_MAX} members, and takes no more", self.name);
                return Err(SpaceError::Usage { what });
            };
            superblock.members.resize(superblock.members.len().max(number + 1), None);
            let size_bytes = file.size_bytes;
            let row = Row { id: Uuid::new_v4(), size_bytes, state: MemberState::Active, class };
            superblock.members[number] = Some(row);
            let member = Member::new(number as u8, class, size_bytes, &file.path, file.store);
            let _ = self.members[number].set(Arc::new(member));
            state.free[number] = FreeSlabs::new(slabs_of(size_bytes, self.slab_shift));
            added.push(number as u8);
        }
        superblock.advance(lineage_number());
        // The new members first: a superblock that names them must find them.
        let order = added.iter().copied().chain((0..MEMBERS_MAX as u8).filter(|number| !added.contains(number)));
        for number in order {
            let Some(member) = self.live_member(number) else { continue };
            member
                .write_superblock(&superblock)
                .map_err(|error| SpaceError::io("write the superblock", &member.path, error))?;
        }
        state.superblock = superblock;
        Ok(added)
    }

    /// Changes the row of a member in all superblocks, durably.
    fn change_row(&self, number: u8, change: impl FnOnce(&mut Option<Row>)) -> Result<()> {
        let mut state = lock(&self.state);
        let mut superblock = state.superblock.clone();
        let Some(row) = superblock.members.get_mut(usize::from(number)) else { return Ok(()) };
        change(row);
        let is_gone = row.is_none();
        superblock.advance(lineage_number());
        for member in self.live_members().filter(|member| !(is_gone && member.number == number)) {
            member
                .write_superblock(&superblock)
                .map_err(|error| SpaceError::io("write the superblock", &member.path, error))?;
        }
        state.superblock = superblock;
        Ok(())
    }

    /// The number of the member at a path, or with a number, as in "2".
    pub(super) fn number_of(&self, name: &str) -> Result<u8> {
        let state = lock(&self.state);
        let exists = |number: &u8| state.superblock.member(*number).is_some();
        let by_path = || {
            let path = Path::new(name).canonicalize().unwrap_or_else(|_| PathBuf::from(name));
            let same = |member: &&Arc<Member>| member.path.canonicalize().is_ok_and(|other| other == path);
            self.members.iter().filter_map(|slot| slot.get()).find(same).map(|member| member.number)
        };
        let found = by_path().or_else(|| name.parse().ok()).filter(exists);
        found.ok_or_else(|| SpaceError::Usage { what: format!("pool {}: it has no member {name}", self.name) })
    }

    /// Moves every copy away from a member, and frees its number. The member may be lost.
    ///
    /// `progress` is called after each slab; it returns whether to go on.
    ///
    /// # Errors
    /// [`SpaceError::Usage`] if the others have no room; [`SpaceError::Io`].
    pub fn remove_member(&self, name: &str, progress: &mut dyn FnMut(Moved) -> bool) -> Result<()> {
        self.require_writable()?;
        let number = self.number_of(name)?;
        let shown =
            self.member(number).map_or_else(|| format!("member {number}"), |member| member.path.display().to_string());
        let slabs = self.copies_on(number);
        self.require_room(number, &slabs, &shown)?;
        if self.live_member(number).is_some() {
            self.change_row(number, |row| row.iter_mut().for_each(|row| row.state = MemberState::Leaving))?;
        }
        self.settle_areas()?;
        let total = slabs.len() as u64;
        let failed = |error| SpaceError::io("move its slabs away", Path::new(&shown), error);
        for (done, (file, index)) in (0..).zip(slabs) {
            if !progress(Moved { done, total, slab_bytes: self.slab_bytes() }) {
                return Err(SpaceError::Stopped { pool: self.name.clone(), done, total });
            }
            if let Some(file) = self.file(file) {
                self.move_copy(&file, index, Some(number), None).map_err(failed)?;
            }
        }
        progress(Moved { done: total, total, slab_bytes: self.slab_bytes() });
        let left = self.copies_on(number).len();
        if left > 0 {
            let what = format!("pool {}: {left} slabs came to {shown} meanwhile; run it again", self.name);
            return Err(SpaceError::Usage { what });
        }
        // The journal must not name slabs of a member that the superblock does not have.
        self.commit_all().map_err(failed)?;
        self.write_checkpoint(&mut lock(&self.place)).map_err(failed)?;
        let gone = self.live_member(number).cloned();
        self.change_row(number, |row| *row = None)?;
        self.failing.fetch_or(1 << number, Ordering::AcqRel);
        self.lost.fetch_or(1 << number, Ordering::AcqRel);
        if let Some(member) = gone {
            member.wipe().map_err(|error| SpaceError::io("wipe its superblocks", &member.path, error))?;
        }
        Ok(())
    }

    /// The slabs that have a copy on a member.
    fn copies_on(&self, number: u8) -> Vec<(u32, u32)> {
        let mut found = Vec::new();
        for file in self.all_files() {
            let has_copy = |slab: Slab| slab.copies().into_iter().flatten().any(|copy| copy.member == number);
            let slabs = file.table.mapped(0..1 << 32).filter(|(_, entry)| has_copy(entry.load()));
            found.extend(slabs.map(|(index, _)| (file.number, index)));
        }
        found
    }

    /// Refuses to drain a member if the others have no room, or too few of them are left.
    fn require_room(&self, number: u8, slabs: &[(u32, u32)], shown: &str) -> Result<()> {
        let others: Vec<u8> = self.holders().map(|member| member.number).filter(|&other| other != number).collect();
        let all_have_it = |&(file, index): &(u32, u32)| {
            let slab = self.file(file).and_then(|file| Some(file.table.get(index)?.load()));
            let copies = slab.map(Slab::copies).unwrap_or_default();
            others.iter().all(|&other| copies.iter().flatten().any(|copy| copy.member == other))
        };
        if slabs.iter().any(all_have_it) {
            let what = format!(
                "pool {}: each copy of a slab is on another member, and without {shown} too few members are left; add \
                 one first",
                self.name
            );
            return Err(SpaceError::Usage { what });
        }
        let state = lock(&self.state);
        let free: u64 = others.iter().map(|&other| u64::from(state.free[usize::from(other)].free())).sum();
        if free >= slabs.len() as u64 {
            return Ok(());
        }
        let (needed, free) = (slabs.len() as u64 * self.slab_bytes(), free * self.slab_bytes());
        let what = format!(
            "pool {}: {shown} holds {needed} bytes, and the other members have {free} bytes free; add a member first",
            self.name
        );
        Err(SpaceError::Usage { what })
    }

    /// Moves the copy of a slab that lies on `number` to another member. With `None` the slab gets
    /// one more copy. The other member is of `class`, or else preferably of that of the old one.
    pub(super) fn move_copy(
        &self,
        file: &FileState,
        index: u32,
        number: Option<u8>,
        class: Option<Class>,
    ) -> io::Result<()> {
        let _busy = Busy::wait(self, file.table.entry(index));
        self.move_busy(file, index, number, class)
    }

    fn move_busy(&self, file: &FileState, index: u32, number: Option<u8>, class: Option<Class>) -> io::Result<()> {
        let entry = file.table.entry(index);
        self.unseal_busy(file, index)?;
        let slab = entry.load();
        let copies = slab.copies();
        let is_it = |copy: &Option<Copy>| copy.map(|copy| copy.member) == number;
        let place = copies.iter().position(is_it).filter(|&place| place < usize::from(file.copies));
        let (Some(place), Some(state_now)) = (place, slab.state()) else { return Ok(()) };
        // The first one, which is the source of a resync too: the copies of a dirty slab may
        // differ.
        let sources = slab.good_copies().filter(|copy| self.live_member(copy.member).is_some());
        let sums = if slab.is_sealed() { self.sums_of(file, index)? } else { None };
        let old_class = number.and_then(|number| self.member(number)).map(|member| member.class);
        let preferred = class.or(old_class).unwrap_or_else(|| first_class(file.tier()));
        let taken = self.take_elsewhere(&copies, avoided_by_moved(file, index), preferred, class.is_some())?;
        let sources: Vec<Copy> = sources.collect();
        let mut copied =
            Err(io::Error::other(format!("slab {index} of file {} has no valid copy on a live member", file.number)));
        for source in &sources {
            copied = self.copy_slab(*source, taken, sums.as_deref());
            if copied.is_ok() {
                break;
            }
        }
        if let (Err(_), Some(_), Some(source)) = (&copied, &sums, sources.first()) {
            // What is wrong in all copies stays wrong, and is found by its checksum there too.
            copied = self.copy_slab(*source, taken, None);
        }
        if let (Ok(()), Some(sums)) = (&copied, &sums) {
            copied = self.write_record(taken, (file.number, index), sums, || true);
        }
        let target = self.live_member(taken.member).cloned();
        let durable = copied.and_then(|()| match &target {
            Some(member) => member.sync_all(),
            None => Err(io::Error::other("a member vanished meanwhile")),
        });
        if let Err(error) = durable {
            lock(&self.state).free[usize::from(taken.member)].give_back(taken.slab);
            return Err(error);
        }
        let mut new = copies;
        new[place] = Some(taken);
        let stale = slab.stale() & !(1 << place);
        let mut bytes = Vec::new();
        SlabRun::put(&mut bytes, state_now, new.into_iter().flatten());
        let slabs = SlabRun::new(new.iter().flatten().count() as u8, &bytes);
        let moved = Change::Slabs { file: file.number, first: index, slabs };
        let mut state = lock(&self.state);
        let ticket = if stale == 0 {
            self.append(&mut state, &moved)
        } else {
            self.append_together(&mut state, &[moved, Change::Stale { file: file.number, index, mask: stale }])
        };
        drop(state);
        self.wait(ticket)?;
        // The other copies may still differ from the source.
        entry.set_unequal(slab.is_unequal());
        Ok(())
    }

    /// Takes a free slab on a member that has none of `copies`: the emptiest one of a class, or of
    /// the others if it need not be `only` that class. Not one of `avoided`, if there is a choice.
    fn take_elsewhere(&self, copies: &[Option<Copy>], avoided: u64, class: Class, only: bool) -> io::Result<Copy> {
        let mut state = lock(&self.state);
        let has_copy = |number: u8| copies.iter().flatten().any(|copy| copy.member == number);
        let is_active =
            |number: u8| state.superblock.member(number).is_some_and(|row| row.state == MemberState::Active);
        let free = |number: u8| state.free[usize::from(number)].free();
        let candidates = self.live_members().filter(|member| {
            let number = member.number;
            !has_copy(number) && is_active(number) && free(number) > 0 && (!only || member.class == class)
        });
        let is_avoided = |member: &Member| avoided >> member.number & 1 == 1;
        let emptiest =
            candidates.max_by_key(|member| (member.class == class, !is_avoided(member), free(member.number)));
        let emptiest = emptiest.map(|member| member.number);
        let taken = emptiest.and_then(|member| Some(Copy { member, slab: state.free[usize::from(member)].take()? }));
        taken.ok_or_else(|| {
            io::Error::new(io::ErrorKind::StorageFull, "no member without a copy of the slab has a free one")
        })
    }

    /// Copies a slab, whose blocks must have their checksums if it has any. Durable with the next
    /// sync.
    fn copy_slab(&self, from: Copy, to: Copy, sums: Option<&[u32]>) -> io::Result<()> {
        let missing = || io::Error::other("a member vanished meanwhile");
        let source = self.live_member(from.member).ok_or_else(missing)?;
        let target = self.live_member(to.member).ok_or_else(missing)?;
        let [mut buf, _] = self.buffers();
        let mut at = 0;
        while at < self.slab_bytes() {
            source.read_at(&mut buf, from.offset_bytes(self.slab_shift) + at)?;
            if sums.is_some_and(|sums| !have_sums(sums, at, &buf)) {
                let what = format!("{} has bytes without their checksums", source.path.display());
                return Err(io::Error::new(io::ErrorKind::InvalidData, what));
            }
            target.write_at(&buf, to.offset_bytes(self.slab_shift) + at)?;
            at += buf.len() as u64;
        }
        Ok(())
    }

    /// Gives each copy on a lost member a new place, and each slab with too few copies another one,
    /// as far as there is room. Returns the number of slabs that still have too few.
    ///
    /// # Errors
    /// [`SpaceError::Io`].
    pub fn rebuild(&self, progress: &mut dyn FnMut(Moved) -> bool) -> Result<u64> {
        self.require_writable()?;
        let lost: Vec<u8> = {
            let state = lock(&self.state);
            let rows = (0_u8..).zip(&state.superblock.members);
            let is_lost = |row: &Row| row.state == MemberState::Lost;
            rows.filter(|(_, row)| row.as_ref().is_some_and(is_lost)).map(|(number, _)| number).collect()
        };
        let mut slabs: Vec<(Option<u8>, (u32, u32))> = Vec::new();
        for number in lost {
            slabs.extend(self.copies_on(number).into_iter().map(|slab| (Some(number), slab)));
        }
        for file in self.all_files() {
            let has_few = |slab: Slab| slab.copies().iter().flatten().count() < usize::from(file.copies);
            let few = file.table.mapped(0..1 << 32).filter(|(_, entry)| has_few(entry.load()));
            slabs.extend(few.map(|(index, _)| (None, (file.number, index))));
        }
        let total = slabs.len() as u64;
        let mut left = 0;
        for (done, (number, (file, index))) in (0..).zip(slabs) {
            if !progress(Moved { done, total, slab_bytes: self.slab_bytes() }) {
                return Ok(total - done + left);
            }
            let Some(file) = self.file(file) else { continue };
            match self.move_copy(&file, index, number, None) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::StorageFull => left += 1,
                Err(error) => return Err(SpaceError::io("rebuild a slab", Path::new(&self.name), error)),
            }
        }
        progress(Moved { done: total, total, slab_bytes: self.slab_bytes() });
        Ok(left)
    }
}
