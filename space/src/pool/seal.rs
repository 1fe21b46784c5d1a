//! Clean slabs are sealed: their checksums are computed and recorded, so that every later read is
//! compared with them.
//!
//! ```text
//!   begin   mark the slab ─▶ read its copies, which must be equal ─▶ checksums
//!   finish  still marked? ─▶ a record for each copy ─▶ sync ─▶ still marked? ─▶ sealed ─▶ journal
//! ```
//!
//! Whatever changes a slab removes the mark, so nobody waits for the thread that seals. A slab is
//! sealed in memory before its change is durable; after a power cut it is clean again, and its
//! records do not count.
//!
//! A slab is left alone while a valid copy of it lies on a member that is not there: the copy would
//! come back without a record.

use super::{FileState, Pool, lock};
use crate::{busy::Busy, slab_table::Slab, sums::SlabSums};
use diskwright_format::space::{
    Copy,
    change::{Change, SlabState},
    sums::sums_of,
    sums_of_slab,
};
use diskwright_store::is_full;
use std::{
    io,
    ops::ControlFlow,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

/// A slab is sealed by itself when it was not written for this many rounds of [`Pool::tick`]: half
/// a minute.
const QUIET_ROUNDS: u8 = 15;

/// How long a round of [`Pool::tick`] seals.
const ROUND: Duration = Duration::from_millis(200);

/// Slabs that are sealed with one sync of each member.
pub(super) const BATCH: usize = 64;

/// A slab whose checksums were computed.
pub(crate) struct Candidate {
    file: Arc<FileState>,
    index: u32,
    slab: Slab,
    sums: SlabSums,
}

impl Candidate {
    /// The slab.
    pub(super) fn slab(&self) -> (Arc<FileState>, u32) {
        (Arc::clone(&self.file), self.index)
    }
}

/// What became of a slab that was to be sealed.
pub(crate) enum Begun {
    Candidate(Candidate),
    /// It is used, or a copy is missing.
    NotNow,
    /// Its copies differed, and are equal now.
    MadeEqual,
}

impl Pool {
    /// Seals slabs that were not written for a while. Returns whether there is more to do.
    pub(super) fn seal_quiet(&self) -> io::Result<bool> {
        if !self.has_clean.load(Ordering::Acquire) {
            return Ok(false);
        }
        let Ok(mut cursor) = self.sealing.try_lock() else { return Ok(false) };
        let (started, epoch) = (Instant::now(), self.epoch());
        let mut batch = Vec::new();
        let mut files = self.all_files();
        files.sort_unstable_by_key(|file| file.number);
        if (cursor.file, cursor.index) == (0, 0) {
            // Noted before the look, so that a slab that becomes clean meanwhile is seen next time.
            cursor.has_clean = false;
            self.has_clean.store(false, Ordering::Release);
        }
        let (at_file, at_index) = (cursor.file, cursor.index);
        for file in files.into_iter().filter(|file| file.number >= at_file) {
            let first = if file.number == at_file { at_index } else { 0 };
            for (index, entry) in file.table.mapped(first..1 << 32) {
                if started.elapsed() > ROUND || batch.len() == BATCH {
                    (cursor.file, cursor.index) = (file.number, u64::from(index));
                    self.has_clean.store(true, Ordering::Release);
                    self.finish_seals(batch)?;
                    return Ok(true);
                }
                let slab = entry.load();
                if slab.state() != Some(SlabState::Clean) {
                    continue;
                }
                cursor.has_clean = true;
                if slab.rounds_since_write(epoch) < QUIET_ROUNDS {
                    continue;
                }
                match self.begin_seal(&file, index)? {
                    Begun::Candidate(candidate) => batch.push(candidate),
                    Begun::NotNow | Begun::MadeEqual => {}
                }
            }
        }
        (cursor.file, cursor.index) = (0, 0);
        self.has_clean.fetch_or(cursor.has_clean, Ordering::AcqRel);
        self.finish_seals(batch)?;
        Ok(false)
    }

    /// Computes the checksums of a slab, if it is clean. The caller has `sealing`.
    pub(crate) fn begin_seal(&self, file: &Arc<FileState>, index: u32) -> io::Result<Begun> {
        let entry = file.table.entry(index);
        if self.is_log(file) {
            // Each block of the log has its own checksum.
            return Ok(Begun::NotNow);
        }
        let Some(slab) = entry.begin_seal() else { return Ok(Begun::NotNow) };
        let copies: Vec<Copy> = slab.good_copies().collect();
        let all_there = copies.iter().all(|copy| self.live_member(copy.member).is_some());
        let sums = if all_there { self.sums_of_equal(&copies) } else { Err(None) };
        match sums {
            Ok(sums) => Ok(Begun::Candidate(Candidate { file: Arc::clone(file), index, slab, sums: sums.into() })),
            Err(None) => {
                entry.end_seal();
                Ok(Begun::NotNow)
            }
            Err(Some(why)) if !entry.load().is_sealing() => {
                tracing::debug!("a slab was used while it was read: {why}");
                Ok(Begun::NotNow)
            }
            Err(Some(why)) => {
                entry.end_seal();
                self.make_clean_equal(file, index, &why)
            }
        }
    }

    /// The checksums of copies that are equal. The error says how they differ.
    fn sums_of_equal(&self, copies: &[Copy]) -> Result<Vec<u32>, Option<String>> {
        let mut sums = Vec::with_capacity(sums_of_slab(self.slab_shift));
        let [mut ours, mut theirs] = self.buffers();
        let Some((first, others)) = copies.split_first() else { return Err(None) };
        for at in (0..self.slab_bytes()).step_by(ours.len()) {
            let read = |copy: &Copy, buf: &mut [u8]| {
                let member = self.live_member(copy.member).ok_or(None)?;
                let read = member.read_at(buf, copy.offset_bytes(self.slab_shift) + at);
                read.map_err(|error| Some(format!("{} cannot be read there ({error})", member.path.display())))
            };
            read(first, &mut ours)?;
            for other in others {
                read(other, &mut theirs)?;
                if ours[..] != theirs[..] {
                    let path = |copy: &Copy| self.member(copy.member).map(|member| member.path.display().to_string());
                    let (one, two) = (path(first).unwrap_or_default(), path(other).unwrap_or_default());
                    return Err(Some(format!("{two} differs from {one}, which is taken for the right one")));
                }
            }
            sums.extend(sums_of(&ours));
        }
        Ok(sums)
    }

    /// Makes the copies of a clean slab equal that should be equal and are not.
    fn make_clean_equal(&self, file: &FileState, index: u32, why: &str) -> io::Result<Begun> {
        let entry = file.table.entry(index);
        let _busy = Busy::wait(self, entry);
        let slab = entry.load();
        if slab.state() != Some(SlabState::Clean) || slab.good_copies().count() < 2 {
            self.warn(format!("pool {}: {}: {why}; it is not sealed", self.name, self.described(file, index)));
            return Ok(Begun::NotNow);
        }
        self.warn(format!(
            "pool {}: {}: {why}. A member has lost or changed data that had no checksums yet",
            self.name,
            self.described(file, index)
        ));
        self.equalize(slab, &mut self.buffers())?;
        self.sync_members()?;
        Ok(Begun::MadeEqual)
    }

    /// Records the checksums of slabs that nothing has changed meanwhile, and seals them. The
    /// changes are durable with the next commit. Returns the number of slabs.
    pub(crate) fn finish_seals(&self, batch: Vec<Candidate>) -> io::Result<u64> {
        if batch.is_empty() {
            return Ok(0);
        }
        self.require_journal()?;
        let mut recorded = Vec::new();
        for candidate in batch {
            match self.record(&candidate) {
                ControlFlow::Continue(true) => recorded.push(candidate),
                ControlFlow::Continue(false) => candidate.file.table.entry(candidate.index).end_seal(),
                ControlFlow::Break(error) => {
                    // Without room for the records nothing can be sealed.
                    self.warn(format!("pool {}: checksums cannot be recorded: {error}", self.name));
                    candidate.file.table.entry(candidate.index).end_seal();
                }
            }
        }
        self.sync_members()?;
        let mut state = lock(&self.state);
        self.forget_dirtied(&mut state);
        let mut sealed = 0;
        for Candidate { file, index, slab, sums } in recorded {
            let entry = file.table.entry(index);
            // A member that was lost meanwhile may not have the record.
            let all_there = slab.good_copies().all(|copy| self.live_member(copy.member).is_some());
            self.sums_cache.put(file.number, index, &sums);
            if !all_there || state.is_dirtying(file.number, index) || !entry.seal() {
                entry.end_seal();
                continue;
            }
            sealed += 1;
            let change = Change::State { file: file.number, first: index, count: 1, state: SlabState::Sealed };
            self.append(&mut state, &change);
        }
        Ok(sealed)
    }

    /// Writes the records of a slab. `Continue(false)` if it was changed, or a member was lost.
    fn record(&self, candidate: &Candidate) -> ControlFlow<io::Error, bool> {
        let Candidate { file, index, slab, sums } = candidate;
        let entry = file.table.entry(*index);
        for copy in slab.good_copies() {
            match self.write_record(copy, (file.number, *index), sums, || entry.load().is_sealing()) {
                Ok(()) => {}
                Err(error) if is_full(&error) => return ControlFlow::Break(error),
                Err(error) => match self.lose(copy.member, &error) {
                    Ok(()) => return ControlFlow::Continue(false),
                    Err(error) => return ControlFlow::Break(error),
                },
            }
        }
        ControlFlow::Continue(entry.load().is_sealing())
    }
}
