//! Copies are made equal: those of dirty slabs after a power cut, and the stale ones of a member
//! that has come back. And dirty slabs become clean.
//!
//! ```text
//!   open ─▶ dirty slabs: compare, copy what differs ─▶ sync ─▶ clean
//!   tick ─▶ slabs that no write of this or the last round touched ─▶ sync ─▶ clean
//!        ─▶ stale copies of live members, a few in each round ─▶ sync ─▶ not stale
//! ```
//!
//! The source is the first copy that is not stale and whose member is live. Until its copies are
//! equal a slab is *unequal*: only that copy is read, so a reader never sees two contents in turn.

use super::{FileState, Pool, State, lock};
use crate::{busy::Busy, copies::DIRTY_GROUP, member::Member, slab_table::Slab};
use diskwright_format::space::{
    Copy, SUM_BYTES,
    change::{Change, SlabState},
};
use diskwright_store::IoBuf;
use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// Length of a piece that is compared at once.
pub(super) const PIECE_BYTES: usize = 1 << 20;
const _: () = assert!((PIECE_BYTES as u64).is_multiple_of(SUM_BYTES));

/// Threads that compare slabs after a power cut, if there are many.
const RESYNC_THREADS: usize = 4;
/// This many slabs are compared by one thread.
const FEW_SLABS: usize = 64;

/// Rounds of [`Pool::tick`] from one move of hot slabs to the next: half a minute.
const OPTIMIZE_ROUNDS: u64 = 15;

/// Rounds of [`Pool::tick`] in an hour.
const HOUR_ROUNDS: u64 = 1800;

/// How long a round of [`Pool::tick`] resyncs stale copies.
const ROUND: Duration = Duration::from_millis(200);

impl State {
    /// Whether a change that makes the slab dirty is under way.
    pub(super) fn is_dirtying(&self, file: u32, index: u32) -> bool {
        self.dirtying.iter().any(|&(other, first, _)| other == file && first == index - index % DIRTY_GROUP)
    }
}

impl Pool {
    /// The copies of a slab whose members are live, with whether each is stale.
    pub(crate) fn live_copies(&self, slab: Slab) -> Vec<(Copy, &Arc<Member>, bool)> {
        let copies = slab.copies().into_iter().enumerate();
        copies
            .filter_map(|(place, copy)| Some((copy?, self.live_member(copy?.member)?, slab.is_stale(place))))
            .collect()
    }

    /// Memory to compare copies in, aligned for O_DIRECT.
    pub(super) fn buffers(&self) -> [IoBuf; 2] {
        let len = PIECE_BYTES.min(self.slab_bytes() as usize);
        [IoBuf::new(len), IoBuf::new(len)]
    }

    /// Makes the live copies of a slab equal, without making that durable. Nobody writes to it. A
    /// copy that cannot be read is not a source.
    pub(super) fn equalize(&self, slab: Slab, buffers: &mut [IoBuf; 2]) -> io::Result<()> {
        let sources = slab.good_copies().filter(|copy| self.live_member(copy.member).is_some());
        let mut failure = None;
        for source in sources {
            match self.copy_from(source, slab, buffers) {
                Ok(()) => return Ok(()),
                Err(error) => failure = Some(error),
            }
        }
        failure.map_or(Ok(()), Err)
    }

    /// Makes the other live copies of a slab equal to `source`.
    fn copy_from(&self, source: Copy, slab: Slab, buffers: &mut [IoBuf; 2]) -> io::Result<()> {
        let copies = self.live_copies(slab);
        let Some(&(_, from, _)) = copies.iter().find(|(copy, ..)| *copy == source) else { return Ok(()) };
        let [ours, theirs] = buffers;
        let mut at = 0;
        while at < self.slab_bytes() {
            let len = (PIECE_BYTES as u64).min(self.slab_bytes() - at) as usize;
            from.read_at(&mut ours[..len], source.offset_bytes(self.slab_shift) + at)?;
            for &(copy, to, stale) in copies.iter().filter(|(copy, ..)| *copy != source) {
                let place = copy.offset_bytes(self.slab_shift) + at;
                // What a stale copy shows may be in the page cache only, since a sync failed.
                if !stale && to.read_at(&mut theirs[..len], place).is_ok() && ours[..len] == theirs[..len] {
                    continue;
                }
                match to.write_at(&ours[..len], place) {
                    Ok(()) => to.written(),
                    Err(error) => self.lose(to.number, &error)?,
                }
            }
            at += len as u64;
        }
        Ok(())
    }

    /// Makes the copies of all dirty slabs equal, and the slabs clean. For an open: nothing else
    /// uses the pool. Returns the number of slabs.
    pub(super) fn resync_dirty(&self) -> io::Result<u64> {
        let dirty: Vec<(u32, u32)> = lock(&self.state).dirty.iter().copied().collect();
        let threads = if dirty.len() > FEW_SLABS { RESYNC_THREADS } else { 1 };
        let next = AtomicUsize::new(0);
        let work = || -> io::Result<u64> {
            let mut buffers = self.buffers();
            let mut compared = 0;
            while let Some(&(number, index)) = dirty.get(next.fetch_add(1, Ordering::Relaxed)) {
                let Some(file) = self.file(number) else { continue };
                let Some(entry) = file.table.get(index) else { continue };
                let slab = entry.load();
                if self.live_copies(slab).len() > 1 {
                    self.equalize(slab, &mut buffers)?;
                    compared += 1;
                }
                entry.set_unequal(false);
            }
            Ok(compared)
        };
        let compared = if threads == 1 {
            work()?
        } else {
            thread::scope(|scope| {
                let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
                workers.into_iter().try_fold(0, |all, worker| {
                    let ended =
                        worker.join().unwrap_or_else(|_| Err(io::Error::other("a thread of a resync panicked")));
                    Ok::<_, io::Error>(all + ended?)
                })
            })?
        };
        self.sync_members()?;
        self.commit_all()?;
        self.clean_idle(self.epoch().wrapping_add(2), false);
        self.commit_all()?;
        Ok(compared)
    }

    /// Marks the slabs whose copies may differ. For an open.
    pub(super) fn mark_unequal(&self) {
        for &(number, index) in &lock(&self.state).dirty {
            let Some(file) = self.file(number) else { continue };
            let Some(entry) = file.table.get(index) else { continue };
            entry.set_unequal(entry.load().good_copies().count() > 1);
        }
    }

    /// Makes the dirty slabs clean that were not written in `epoch`. All writes before are synced.
    /// `but_log`: except those that the log of the cache comes to soon.
    pub(crate) fn clean_idle(&self, epoch: u8, but_log: bool) {
        let mut state = lock(&self.state);
        // The copies of a member that was just lost become stale when the map knows of it, and only
        // those of dirty slabs.
        if self.failing.load(Ordering::Acquire) & !state.lost_in_map != 0 {
            return;
        }
        let mut cleaned: Vec<(u32, u32)> = Vec::new();
        self.forget_dirtied(&mut state);
        for &(number, index) in &state.dirty {
            if state.is_dirtying(number, index) || but_log && self.is_ahead_in_log(number, index) {
                continue;
            }
            let Some(file) = self.file(number) else { continue };
            if file.table.get(index).is_some_and(|entry| entry.clean_if_idle(epoch)) {
                cleaned.push((number, index));
            }
        }
        let mut rest = &cleaned[..];
        while let Some(&(file, first)) = rest.first() {
            let follows =
                |(step, slab): &(u32, &(u32, u32))| slab.0 == file && Some(slab.1) == first.checked_add(*step);
            let count = (0..).zip(rest).take_while(follows).count();
            let change = Change::State { file, first, count: count as u32, state: SlabState::Clean };
            self.append(&mut state, &change);
            rest = &rest[count..];
        }
        self.has_clean.fetch_or(!cleaned.is_empty(), Ordering::AcqRel);
        for slab in cleaned {
            state.dirty.remove(&slab);
        }
    }

    /// Forgets the changes that make slabs dirty and are in the map. The others stay, because a
    /// slab becomes clean in memory at once, but dirty only with its commit: it would be clean in
    /// the journal, and then dirty in memory.
    pub(super) fn forget_dirtied(&self, state: &mut State) {
        let durable = lock(&self.log).durable;
        state.dirtying.retain(|(.., ticket)| ticket.number() > durable);
    }

    /// A round of the work that a pool does by itself; to be called every second or so. Returns
    /// whether there is more to do at once.
    ///
    /// # Errors
    /// No member is left that can be written.
    pub fn tick(&self) -> io::Result<bool> {
        if !self.is_writable {
            return Ok(false);
        }
        let epoch = self.epoch.fetch_add(1, Ordering::AcqRel).wrapping_add(1);
        let idle = |&(number, index): &(u32, u32)| {
            !self.is_ahead_in_log(number, index)
                && self.file(number).and_then(|file| Some(file.table.get(index)?.is_idle(epoch))).unwrap_or(false)
        };
        let has_idle = lock(&self.state).dirty.iter().any(idle);
        if has_idle {
            self.sync_members()?;
            self.commit_all()?;
            self.clean_idle(epoch, true);
        }
        let more = self.resync_stale()? | self.seal_quiet()? | self.punch_free();
        self.warn_if_scarce();
        let round = self.rounds.fetch_add(1, Ordering::Relaxed) + 1;
        if round.is_multiple_of(OPTIMIZE_ROUNDS) && self.is_tiered() {
            self.optimize_round();
        }
        if round.is_multiple_of(HOUR_ROUNDS) {
            self.age_heat();
        }
        self.commit_all()?;
        Ok(more)
    }

    /// Makes stale copies of live members valid, and adds the copies that slabs lack, for a while.
    /// Returns whether there is more to do.
    fn resync_stale(&self) -> io::Result<bool> {
        let started = Instant::now();
        // Whether slabs that were allocated while a member was lost can get their other copies.
        let mut enough = true;
        let mut buffers = None;
        for file in self.all_files() {
            let Some(_kept) = self.keep(&file) else { continue };
            for (index, entry) in file.table.mapped(0..1 << 32) {
                let slab = entry.load();
                let has_stale = slab.stale() != 0 && self.live_copies(slab).iter().any(|(.., stale)| *stale);
                let has_few = slab.copies().iter().flatten().count() < usize::from(file.copies);
                if !(has_stale || slab.is_unequal() || has_few && enough) {
                    continue;
                }
                if started.elapsed() > ROUND {
                    return Ok(true);
                }
                let busy = Busy::wait(self, entry);
                self.resync_slab(&file, index, buffers.get_or_insert_with(|| self.buffers()))?;
                drop(busy);
                if has_few && enough {
                    match self.move_copy(&file, index, None, None) {
                        Err(error) if error.kind() == io::ErrorKind::StorageFull => enough = false,
                        result => result?,
                    }
                }
            }
        }
        Ok(false)
    }

    /// Makes the copies of a busy slab equal, durably.
    pub(super) fn resync_slab(&self, file: &FileState, index: u32, buffers: &mut [IoBuf; 2]) -> io::Result<()> {
        let entry = file.table.entry(index);
        self.unseal_busy(file, index)?;
        let slab = entry.load();
        if slab.state().is_none() || self.live_copies(slab).iter().all(|(.., stale)| *stale) {
            return Ok(());
        }
        if slab.is_sealed() {
            // A stale copy lacks the record too.
            self.mend_busy(file, index)?;
        } else {
            self.equalize(slab, buffers)?;
        }
        self.sync_members()?;
        let mut mask = slab.stale();
        for (place, copy) in slab.copies().into_iter().enumerate() {
            if copy.is_some_and(|copy| self.live_member(copy.member).is_some()) {
                mask &= !(1 << place);
            }
        }
        let mut state = lock(&self.state);
        let ticket = self.append(&mut state, &Change::Stale { file: file.number, index, mask });
        drop(state);
        self.wait(ticket)?;
        entry.set_unequal(false);
        Ok(())
    }

    /// Makes everything durable, and all slabs clean that nobody is writing.
    pub(super) fn make_idle_clean(&self) -> io::Result<()> {
        let epoch = self.epoch.fetch_add(2, Ordering::AcqRel).wrapping_add(2);
        self.sync_members()?;
        self.commit_all()?;
        self.clean_idle(epoch, false);
        self.commit_all()
    }

    /// Makes everything durable and all slabs clean that nobody writes.
    ///
    /// # Errors
    /// No member is left that can be written.
    pub fn close(&self) -> io::Result<()> {
        if !self.is_writable {
            return Ok(());
        }
        // What entered the cache counts only when a header names it.
        self.sync_all()?;
        self.make_idle_clean()?;
        if self.is_closed.load(Ordering::Acquire) {
            return Ok(());
        }
        let ticket = self.append(&mut lock(&self.state), &Change::Closed);
        self.wait(ticket)
    }
}
