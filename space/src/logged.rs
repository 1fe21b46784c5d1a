//! The write-back cache for reads and writes by blocking calls.
//!
//! ```text
//!   read    block by block: from the log, or from the slab itself
//!   write   admitted ─▶ for itself: completed to whole blocks ─▶ a place in the log ─▶ live
//!   past    for itself, with its neighbours: destaged, and forgotten
//! ```

use crate::{
    busy::Busy,
    cache::{Cache, Found as InLog, sums_of_blocks},
    copies::DIRTY_GROUP,
    file::SpaceFile,
    outcome::{Entered, Found},
    slab_table::Slab,
    sums::{is_whole, whole_blocks},
};
use diskwright_format::space::{SUM_BYTES, change::SlabState};
use std::io;

impl SpaceFile {
    /// Reads from the log of the cache what is there, and the rest from the copies. The caller
    /// holds the slab, or has it for itself.
    pub(crate) fn read_found(&self, index: u32, slab: Slab, within_bytes: u64, piece: &mut [u8]) -> io::Result<Found> {
        let Some(cache) = self.pool.cache().filter(|_| slab.is_logged()) else {
            return self.read_slab_itself(index, slab, within_bytes, piece);
        };
        let (mut worst, mut done) = (Found::Intact, 0);
        while done < piece.len() {
            let at = within_bytes + done as u64;
            let (block, lead) = (at / SUM_BYTES, (at % SUM_BYTES) as usize);
            let (found, sum) = {
                let inner = cache.inner();
                let key = (self.file.number, index);
                // A clean block might be used again while it is read. The slab has it too.
                (inner.ring.find_live(key, block as u16), inner.ring.sum_of(key, block as u16))
            };
            let rest = &mut piece[done..];
            match (found, sum) {
                (InLog::Logged { position, .. }, Some(sum)) => {
                    let len = rest.len().min(SUM_BYTES as usize - lead);
                    let mut whole = [0; SUM_BYTES as usize];
                    cache.read(&self.pool, position, &[sum], &mut whole)?;
                    rest[..len].copy_from_slice(&whole[lead..lead + len]);
                    done += len;
                }
                (InLog::Logged { .. }, None) => {}
                (InLog::Not { blocks }, _) => {
                    let len = rest.len().min((blocks * SUM_BYTES) as usize - lead);
                    worst = worst.max(self.read_slab_itself(index, slab, at, &mut rest[..len])?);
                    done += len;
                }
            }
        }
        Ok(worst)
    }

    /// As `SpaceFile::enters`, for a write that takes the slow way.
    pub(crate) fn enters_slowly(&self, cache: &Cache, index: u32, within_bytes: u64, len_bytes: u64) -> bool {
        if !cache.takes(len_bytes) {
            return false;
        }
        let slab = self.file.table.entry(index).load();
        let end_bytes = (u64::from(index) << self.pool.slab_shift()) + within_bytes + len_bytes;
        slab.is_logged()
            || slab.state().is_some()
                && self.pool.is_slow(slab.good_copies())
                && !self.file.heat.was_sequential(index, end_bytes)
    }

    /// Writes to the log of the cache. Parts of blocks are completed with what is there.
    pub(crate) fn write_logged(
        &self,
        cache: &Cache,
        index: u32,
        within_bytes: u64,
        bytes: &[u8],
    ) -> io::Result<Entered> {
        let entry = self.file.table.entry(index);
        let _busy = Busy::wait(&self.pool, entry);
        self.pool.require_journal()?;
        let slab = entry.load();
        if slab.state().is_none() || !slab.is_logged() && !self.pool.is_slow(slab.good_copies()) {
            return Ok(Entered::No);
        }
        let blocks = whole_blocks(within_bytes..within_bytes + bytes.len() as u64);
        let mut around = Vec::new();
        let whole = if is_whole(within_bytes, bytes.len() as u64) {
            bytes
        } else {
            around.resize((blocks.end - blocks.start) as usize, 0);
            if self.read_found(index, slab, blocks.start, &mut around)? == Found::Lost {
                // A write of whole blocks only can mend it.
                return Ok(Entered::No);
            }
            let lead = (within_bytes - blocks.start) as usize;
            around[lead..lead + bytes.len()].copy_from_slice(bytes);
            &around[..]
        };
        let (key, block) = ((self.file.number, index), (blocks.start / SUM_BYTES) as u16);
        let (ticket, place) = {
            let mut inner = cache.inner();
            let Some((ticket, position)) = inner.ring.reserve(key, block, whole.len() as u64 / SUM_BYTES, 1, true)
            else {
                return Ok(Entered::Full);
            };
            entry.set_logged(true);
            inner.ring.note(ticket, sums_of_blocks(whole));
            (ticket, cache.place_of(&inner.ring, position))
        };
        let mut log = cache.file.table.entry(place.0).load();
        if log.state() != Some(SlabState::Dirty) {
            self.pool.dirty_ahead(cache).inspect_err(|_| cache.cancel(ticket))?;
            log = cache.file.table.entry(place.0).load();
        }
        let live = log.good_copies().filter(|copy| self.pool.live_member(copy.member).is_some()).count();
        if live < usize::from(self.file.copies) {
            // Too few members are left for the log.
            cache.cancel(ticket);
            return Ok(Entered::No);
        }
        let written = self.pool.write_beside_others(&cache.file, place.0, place.1, whole);
        cache.ended(&mut cache.inner(), ticket, written.is_ok());
        written.map(|()| Entered::Yes)
    }

    /// Makes a busy slab one that the log does not name, with its neighbours. `false` if there is
    /// no room in the log to say so.
    pub(crate) fn unlogged(&self, index: u32) -> io::Result<bool> {
        if !self.file.table.entry(index).load().is_logged() {
            return Ok(true);
        }
        let first = index - index % DIRTY_GROUP;
        let mut busy = Vec::new();
        for other in (first..first + DIRTY_GROUP).filter(|&other| other != index) {
            let Some(entry) = self.file.table.get(other).filter(|entry| entry.load().is_logged()) else { continue };
            busy.extend(Busy::try_now(&self.pool, entry).map(|busy| (other, busy)));
        }
        let slabs: Vec<u32> = busy.iter().map(|(other, _)| *other).chain([index]).collect();
        // What cannot be read in a neighbour is no error of this write.
        self.pool.unlog(&self.file, &slabs).or_else(|_| self.pool.unlog(&self.file, &[index]))
    }
}
