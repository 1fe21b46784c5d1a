//! The I/O that `reserve` and `commit` of a VDI need first, without the state mutex.
//!
//! ```text
//!   prepare:   much is dirty?  flush                           so that memory stays bounded
//!              pages           read; inserted if still absent
//!              a need          under `preparing`, one thread at a time:
//!                survey        the walk over the map (survey.rs)
//!                space         free pieces zeroed, or the file grown; the header counts them
//! ```
//!
//! A piece that is being zeroed is in no list, and the new end of the file is recorded only after
//! it has grown. So `reserve` never hands out space that is not ready.
//!
//! Other programs put their next block behind the spaces that the header counts. So the header
//! counts a space before it is handed out; the sync before the map is written makes that durable.
//! It counts some more than are used, so that it is written seldom, but not more than the disk has
//! blocks as long as possible: VirtualBox refuses more.

use super::write::{PAGE_ENTRIES, Prerequisite, Writing};
use crate::{
    Result,
    needs::{Prerequisites, supply_each},
    space::zero_pieces,
};
use std::ops::Range;

/// Maximum number of blocks that one preparation handles.
const MAX_BLOCKS: u64 = 1024;

impl Writing {
    /// Supplies what `reserve` and `commit` of these blocks lacked. Only the first 1024 blocks
    /// count.
    pub(super) fn prepare_blocks(&self, blocks: Range<u64>) -> Result<()> {
        self.barrier.check()?;
        if self.is_flush_due() {
            self.barrier.share(|| self.run_flush())?;
        }
        let end = blocks.end.min(self.lock().entries).min(blocks.start.saturating_add(MAX_BLOCKS));
        let blocks = blocks.start..end.max(blocks.start);
        if !blocks.is_empty() {
            (blocks.start / PAGE_ENTRIES..=(blocks.end - 1) / PAGE_ENTRIES).try_for_each(|page| self.load(page))?;
        }
        let needs = |with: &mut dyn FnMut(&mut Prerequisites<Prerequisite>)| with(&mut self.lock().needs);
        supply_each(&blocks, &self.preparing, &needs, &mut |_block, need| {
            self.survey()?;
            match need {
                Prerequisite::Survey => Ok(()),
                Prerequisite::Space => self.make_room(),
            }
        })
    }

    /// Makes sure that a space can be taken, and that the header counts it. The caller holds
    /// `preparing`.
    fn make_room(&self) -> Result<()> {
        self.make_piece()?;
        self.announce()
    }

    /// Makes sure that a space can be taken. The caller holds `preparing`.
    pub(super) fn make_piece(&self) -> Result<()> {
        let (store, len_bytes) = (&*self.store, self.space_bytes());
        let (pieces, extension) = {
            let mut state = self.lock();
            let Some(space) = &mut state.space else { return Ok(()) };
            let pieces = space.take_to_zero(len_bytes);
            let extension =
                if pieces.is_empty() { space.growth(len_bytes).map_err(self.io("grow the file", 0))? } else { None };
            (pieces, extension)
        };
        if !pieces.is_empty() {
            let (zeroed, result) = zero_pieces(store, &pieces, len_bytes);
            if let Some(space) = &mut self.lock().space {
                space.zeroed(&pieces, zeroed, len_bytes);
            }
            return result.map_err(self.io("zero free space of the file", pieces[0]));
        }
        if let Some(extension) = extension {
            let end = extension.carry_out(store).map_err(self.io("grow the file", extension.from_bytes))?;
            let mut state = self.lock();
            state.file_bytes = state.file_bytes.max(end);
            if let Some(space) = &mut state.space {
                space.set_file_end(end);
            }
        }
        Ok(())
    }

    /// Lets the header count the next space. The caller holds `preparing`.
    fn announce(&self) -> Result<()> {
        let spaces = {
            let state = self.lock();
            let Some(space) = &state.space else { return Ok(()) };
            let next = space.next_offset_bytes(self.space_bytes()).map_err(self.io("grow the file", 0))?;
            let (next, in_file) = (self.number_of(next), self.number_of(space.file_end_bytes()));
            if next < state.announced {
                return Ok(());
            }
            if next < state.entries { in_file.clamp(next + 1, state.entries) } else { in_file.max(next + 1) }
        };
        self.count_in_header(spaces)?;
        self.lock().announced = spaces;
        Ok(())
    }

    /// Writes the number of spaces to the header, not durably.
    pub(super) fn count_in_header(&self, spaces: u64) -> Result<()> {
        self.head.change(&*self.store, |sector| {
            sector.set_allocated(u32::try_from(spaces).unwrap_or(u32::MAX));
            Ok(())
        })
    }
}
