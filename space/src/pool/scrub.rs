//! Scrub: every sealed slab is compared with its checksums, and mended from another copy.
//!
//! ```text
//!   sealed  read all copies ─▶ a block is wrong ─▶ mend: the slab for itself ─▶ the block of
//!                                                  another copy that has its checksum ─▶ sync
//!   clean   sealed now
//!   stale   a copy of a member that came back is made valid, and a missing one is made
//!   dirty   left alone: it is being written
//! ```
//!
//! A read that finds a wrong block mends the slab in the same way. A block that is wrong in all
//! copies stays as it is: it cannot be read, and its file and place are reported.

use super::{
    FileState, Pool,
    drain::Moved,
    lock,
    resync::PIECE_BYTES,
    seal::{BATCH, Begun, Candidate},
};
use crate::{
    busy::Busy,
    error::{Result, SpaceError},
    member::Member,
    sums::wrong_blocks,
};
use diskwright_format::space::{Copy, SUM_BYTES, change::SlabState};
use diskwright_store::IoBuf;
use std::{
    collections::BTreeSet,
    io,
    path::Path,
    sync::{Arc, atomic::Ordering},
};

/// A range that no copy has with its checksum.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damage {
    /// Name of the disk.
    pub disk: String,
    /// Offset in the disk.
    pub offset_bytes: u64,
    /// Length of the range.
    pub len_bytes: u64,
}

/// What a scrub has found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Scrubbed {
    /// Bytes of slabs whose copies were compared with their checksums, counted once.
    pub checked_bytes: u64,
    /// Bytes of slabs that had no checksums and have them now.
    pub sealed_bytes: u64,
    /// Bytes of slabs that are in use, so that they have no checksums yet.
    pub unsealed_bytes: u64,
    /// Bytes of copies that were wrong and were written anew, and of records of checksums.
    pub mended_bytes: u64,
    /// Bytes of copies that are valid now and were stale, or missing: members came back.
    pub resynced_bytes: u64,
    /// What is lost.
    pub damage: Vec<Damage>,
}

/// What became of a slab that was mended.
#[derive(Debug, Default)]
pub(crate) struct Mended {
    bytes: u64,
    /// Offsets of blocks within the slab that no copy has.
    lost: BTreeSet<u64>,
}

/// What a comparison of a sealed slab has found.
enum Compared {
    Intact,
    /// A copy or a record is wrong, or cannot be read.
    Wrong,
    /// All records are damaged.
    NoSums,
}

impl Pool {
    /// Compares all sealed slabs with their checksums, mends what is wrong, and seals the others.
    ///
    /// `progress` is called after each slab; it returns whether to go on.
    ///
    /// # Errors
    /// [`SpaceError::ReadOnly`], [`SpaceError::Stopped`], [`SpaceError::Io`].
    pub fn scrub(&self, progress: &mut dyn FnMut(Moved) -> bool) -> Result<Scrubbed> {
        self.require_writable()?;
        let failed = |error| SpaceError::io("scrub it", Path::new(&self.name), error);
        self.make_idle_clean().map_err(failed)?;
        // Until the end, so that no slab is sealed by another thread meanwhile.
        let _sealing = lock(&self.sealing);
        let mut batch = Vec::new();
        let mut files = self.all_files();
        // Each block of the log has its own checksum.
        files.retain(|file| !self.is_log(file));
        files.sort_unstable_by_key(|file| file.number);
        let total = files.iter().map(|file| u64::from(file.mapped.load(Ordering::Relaxed))).sum();
        let mut done = 0;
        let mut found = Scrubbed::default();
        for file in files {
            for (index, _) in file.table.mapped(0..1 << 32) {
                if !progress(Moved { done, total, slab_bytes: self.slab_bytes() }) {
                    self.end_batch(&mut batch, &mut found).map_err(failed)?;
                    return Err(SpaceError::Stopped { pool: self.name.clone(), done, total });
                }
                self.scrub_slab(&file, index, &mut batch, &mut found).map_err(failed)?;
                done += 1;
            }
        }
        self.end_batch(&mut batch, &mut found).map_err(failed)?;
        progress(Moved { done: total.max(done), total: total.max(done), slab_bytes: self.slab_bytes() });
        Ok(found)
    }

    fn scrub_slab(
        &self,
        file: &Arc<FileState>,
        index: u32,
        batch: &mut Vec<Candidate>,
        found: &mut Scrubbed,
    ) -> io::Result<()> {
        let slab = file.table.entry(index).load();
        let stale = self.live_copies(slab).iter().filter(|(.., stale)| *stale).count() as u64;
        if stale > 0 {
            let _busy = Busy::wait(self, file.table.entry(index));
            self.resync_slab(file, index, &mut self.buffers())?;
            found.resynced_bytes += stale << self.slab_shift;
        }
        // Slabs that were allocated while a member was missing get their other copies.
        let held = slab.copies().iter().flatten().count();
        let missing = if slab.state().is_some() { usize::from(file.copies).saturating_sub(held) } else { 0 };
        for _ in 0..missing {
            match self.move_copy(file, index, None, None) {
                Ok(()) => found.resynced_bytes += self.slab_bytes(),
                Err(error) if error.kind() == io::ErrorKind::StorageFull => break,
                Err(error) => return Err(error),
            }
        }
        match file.table.entry(index).load().state() {
            None => return Ok(()),
            Some(SlabState::Dirty) => {
                found.unsealed_bytes += self.slab_bytes();
                return Ok(());
            }
            Some(SlabState::Clean) => return self.scrub_clean(file, index, batch, found),
            Some(SlabState::Sealed) => {}
        }
        match self.compare(file, index)? {
            Compared::Intact => {}
            Compared::NoSums => {
                self.unseal(file, index)?;
                return self.scrub_clean(file, index, batch, found);
            }
            Compared::Wrong => {
                let mended = self.mend(file, index)?;
                found.mended_bytes += mended.bytes;
                self.note_lost(file, index, mended.lost, found);
            }
        }
        found.checked_bytes += self.slab_bytes();
        Ok(())
    }

    /// Computes the checksums of a clean slab; [`Pool::end_batch`] seals it.
    fn scrub_clean(
        &self,
        file: &Arc<FileState>,
        index: u32,
        batch: &mut Vec<Candidate>,
        found: &mut Scrubbed,
    ) -> io::Result<()> {
        let mut begun = self.begin_seal(file, index)?;
        if matches!(begun, Begun::MadeEqual) {
            found.mended_bytes += self.slab_bytes();
            begun = self.begin_seal(file, index)?;
        }
        match begun {
            Begun::Candidate(candidate) => batch.push(candidate),
            Begun::NotNow | Begun::MadeEqual => found.unsealed_bytes += self.slab_bytes(),
        }
        if batch.len() < BATCH { Ok(()) } else { self.end_batch(batch, found) }
    }

    /// Seals the slabs of a batch, durably.
    fn end_batch(&self, batch: &mut Vec<Candidate>, found: &mut Scrubbed) -> io::Result<()> {
        let slabs: Vec<(Arc<FileState>, u32)> = batch.iter().map(Candidate::slab).collect();
        self.finish_seals(std::mem::take(batch))?;
        for (file, index) in slabs {
            if file.table.entry(index).load().is_sealed() {
                found.sealed_bytes += self.slab_bytes();
                found.checked_bytes += self.slab_bytes();
            } else {
                found.unsealed_bytes += self.slab_bytes();
            }
        }
        self.commit_all()
    }

    fn note_lost(&self, file: &FileState, index: u32, lost: BTreeSet<u64>, found: &mut Scrubbed) {
        let disk = self.name_of(file).unwrap_or_default();
        for at in lost {
            let offset_bytes = (u64::from(index) << self.slab_shift) + at;
            match found.damage.last_mut() {
                Some(last) if last.disk == disk && last.offset_bytes + last.len_bytes == offset_bytes => {
                    last.len_bytes += SUM_BYTES;
                }
                _ => found.damage.push(Damage { disk: disk.clone(), offset_bytes, len_bytes: SUM_BYTES }),
            }
        }
    }

    /// Compares all live copies of a sealed slab with its checksums, and its records with each
    /// other. A slab that is written meanwhile counts as intact.
    fn compare(&self, file: &FileState, index: u32) -> io::Result<Compared> {
        let entry = file.table.entry(index);
        let Some(slab) = entry.hold_for_read() else { return Ok(Compared::Intact) };
        let compared = (|| {
            let Some(sums) = self.sums_on_members(file, index)? else { return Ok(Compared::NoSums) };
            let [mut buf, _] = self.buffers();
            for copy in slab.good_copies() {
                let Some(member) = self.live_member(copy.member) else { continue };
                for at in (0..self.slab_bytes()).step_by(buf.len()) {
                    let read = member.read_at(&mut buf, copy.offset_bytes(self.slab_shift) + at);
                    if read.is_err() || wrong_blocks(&sums, at, &buf).next().is_some() {
                        return Ok(Compared::Wrong);
                    }
                }
                if !self.read_record(copy, file.number, index).is_ok_and(|found| found.as_ref() == Some(&sums)) {
                    return Ok(Compared::Wrong);
                }
            }
            Ok(Compared::Intact)
        })();
        let still_sealed = entry.load().is_sealed();
        entry.release(1);
        if still_sealed { compared } else { Ok(Compared::Intact) }
    }

    /// Mends the live copies of a sealed slab, durably.
    pub(crate) fn mend(&self, file: &FileState, index: u32) -> io::Result<Mended> {
        let entry = file.table.entry(index);
        let _busy = Busy::wait(self, entry);
        let mended = self.mend_busy(file, index)?;
        self.sync_members()?;
        Ok(mended)
    }

    /// Mends the live copies of a sealed, busy slab, stale ones too. Durable with the next sync of
    /// the members.
    pub(super) fn mend_busy(&self, file: &FileState, index: u32) -> io::Result<Mended> {
        let slab = file.table.entry(index).load();
        let mut mended = Mended::default();
        if !slab.is_sealed() {
            return Ok(mended);
        }
        let Some(sums) = self.sums_of(file, index)? else { return Ok(mended) };
        let copies: Vec<(Copy, Arc<Member>)> =
            self.live_copies(slab).into_iter().map(|(copy, member, _)| (copy, Arc::clone(member))).collect();
        let piece_bytes = PIECE_BYTES.min(self.slab_bytes() as usize);
        let mut wrong_on = vec![0_u64; copies.len()];
        for at in (0..self.slab_bytes()).step_by(piece_bytes) {
            let mut wrong: Vec<BTreeSet<u64>> = Vec::new();
            let mut shown: Vec<IoBuf> = Vec::new();
            for (copy, member) in &copies {
                let mut buf = IoBuf::new(piece_bytes);
                wrong.push(self.read_blocks(member, *copy, at, &sums, &mut buf));
                shown.push(buf);
            }
            let all: BTreeSet<u64> = wrong.iter().flatten().copied().collect();
            for block in all {
                let Some(good) = wrong.iter().position(|wrong| !wrong.contains(&block)) else {
                    mended.lost.insert(block);
                    continue;
                };
                let within = (block - at) as usize..(block - at + SUM_BYTES) as usize;
                for (place, (copy, member)) in copies.iter().enumerate() {
                    if !wrong[place].contains(&block) {
                        continue;
                    }
                    let offset_bytes = copy.offset_bytes(self.slab_shift) + block;
                    let written = member.write_at(&shown[good][within.clone()], offset_bytes);
                    member.written();
                    match written {
                        Ok(()) => {
                            mended.bytes += SUM_BYTES;
                            wrong_on[place] += SUM_BYTES;
                        }
                        Err(error) => self.lose(member.number, &error)?,
                    }
                }
            }
        }
        for (copy, member) in &copies {
            if self.read_record(*copy, file.number, index).is_ok_and(|found| found.as_ref() == Some(&sums)) {
                continue;
            }
            match self.write_record(*copy, (file.number, index), &sums, || true) {
                Ok(()) => mended.bytes += SUM_BYTES,
                Err(error) => self.lose(member.number, &error)?,
            }
        }
        self.report_mended(file, index, slab.stale(), &copies, &wrong_on, &mended);
        Ok(mended)
    }

    /// Reads a piece of a copy, and says which of its blocks are wrong. If the piece cannot be
    /// read, its blocks are read one by one.
    fn read_blocks(&self, member: &Member, copy: Copy, at: u64, sums: &[u32], buf: &mut [u8]) -> BTreeSet<u64> {
        let offset_bytes = copy.offset_bytes(self.slab_shift) + at;
        if member.read_at(buf, offset_bytes).is_ok() {
            return wrong_blocks(sums, at, buf).collect();
        }
        let mut wrong = BTreeSet::new();
        for (block, piece) in (at..).step_by(SUM_BYTES as usize).zip(buf.chunks_mut(SUM_BYTES as usize)) {
            let read = member.read_at(piece, copy.offset_bytes(self.slab_shift) + block);
            if read.is_err() || wrong_blocks(sums, block, piece).next().is_some() {
                wrong.insert(block);
            }
        }
        wrong
    }

    fn report_mended(
        &self,
        file: &FileState,
        index: u32,
        stale: u8,
        copies: &[(Copy, Arc<Member>)],
        wrong_on: &[u64],
        mended: &Mended,
    ) {
        let shown = self.described(file, index);
        if stale == 0 {
            for ((_, member), bytes) in copies.iter().zip(wrong_on).filter(|(_, bytes)| **bytes > 0) {
                self.warn(format!(
                    "pool {}: {shown}: {} had {bytes} bytes that do not have their checksums; they were written anew \
                     from another copy",
                    self.name,
                    member.path.display()
                ));
            }
        }
        if !mended.lost.is_empty() {
            self.warn(format!(
                "pool {}: {shown}: {} bytes do not have their checksums on any member, and cannot be read; restore them \
                 from a backup, or write them anew",
                self.name,
                mended.lost.len() as u64 * SUM_BYTES
            ));
        }
    }

    fn name_of(&self, file: &FileState) -> Option<String> {
        let state = lock(&self.state);
        state.names.iter().find(|(_, number)| **number == file.number).map(|(name, _)| name.clone())
    }
}
