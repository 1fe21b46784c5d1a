//! The trait [`ImageWriter`] of a VHDX: each call is passed on to the file that implements it.

use super::{image::VhdxImage, lock};
use crate::{BlockState, Commit, ImageWriter, LinkageId, MoveTo, ParentLink, Reservation, error::Result};
use diskwright_store::sync::atomic::Ordering;
use std::ops::Range;

impl ImageWriter for VhdxImage {
    fn begin_writing(&self) -> Result<()> {
        self.barrier.check()?;
        let writing = self.writing()?;
        if !writing.begun.load(Ordering::Acquire) {
            lock(&writing.headers).begin_data_write(&self.barrier)?;
            writing.begun.store(true, Ordering::Release);
        }
        Ok(())
    }

    fn begin_writing_as(&self, linkage_id: LinkageId) -> Result<()> {
        self.barrier.check()?;
        let writing = self.writing()?;
        lock(&writing.headers).begin_data_write_as(&self.barrier, linkage_id.to_uuid())?;
        writing.begun.store(true, Ordering::Release);
        Ok(())
    }

    fn set_linkage_id(&self, linkage_id: LinkageId) -> Result<()> {
        self.begin_writing_as(linkage_id)
    }

    fn set_parent_link(&self, link: &ParentLink) -> Result<()> {
        self.replace_link(self.writing()?, link)
    }

    fn prepare(&self, blocks: Range<u64>) -> Result<()> {
        self.prepare_blocks(self.writing()?, blocks)
    }

    fn reserve(&self, block: u64) -> Result<Option<Reservation>> {
        let writing = self.writing()?;
        self.reserve_block(&mut lock(&writing.state), block)
    }

    fn initialised(&self, _block: u64) {}

    fn tracks_sectors(&self) -> bool {
        self.layout.has_parent
    }

    fn commit(&self, block: u64, change: Commit) -> Result<Option<BlockState>> {
        let writing = self.writing()?;
        Ok(self.commit_block(&mut lock(&writing.state), block, change)?.map(BlockState::from))
    }

    fn can_store_zero(&self) -> bool {
        !self.layout.fixed
    }

    fn resize(&self, size_bytes: u64) -> Result<()> {
        self.grow(self.writing()?, size_bytes)
    }

    fn check_growth(&self, size_bytes: u64) -> Result<()> {
        self.plan(self.layout(), size_bytes).map(drop)
    }

    fn check_shrink(&self, size_bytes: u64) -> Result<()> {
        self.smaller(&self.layout(), size_bytes).map(drop)
    }

    fn shrink(&self, size_bytes: u64) -> Result<()> {
        self.make_smaller(self.writing()?, size_bytes)
    }

    fn limit_tables(&self, bytes: u64) {
        if let Some(writing) = &self.writing {
            lock(&writing.state).pages.limit(bytes);
        }
    }

    fn is_dirty(&self) -> bool {
        self.writing.as_ref().is_some_and(|writing| lock(&writing.state).pages.is_dirty())
    }

    fn check_syncs(&self) -> Result<()> {
        Ok(self.barrier.check()?)
    }

    fn flush(&self) -> Result<()> {
        self.flush_shared(self.writing()?)
    }

    fn freed_generation(&self) -> u64 {
        self.writing.as_ref().map_or(0, |writing| lock(&writing.state).freed_generation())
    }

    fn recycle(&self, generation: u64) {
        if let Some(writing) = &self.writing {
            self.recycle_pieces(writing, generation);
        }
    }

    fn begin_compacting(&self) -> Result<()> {
        self.begin_compacting_file(self.writing()?)
    }

    fn reserve_move(&self, block: u64) -> Result<Option<MoveTo>> {
        let writing = self.writing()?;
        self.reserve_move_of(&mut lock(&writing.state), block)
    }

    fn move_tables(&self) -> Result<()> {
        self.move_bitmap_blocks(self.writing()?)
    }

    fn recycle_for_moves(&self, generation: u64) {
        if let Some(writing) = &self.writing
            && let Some(space) = &mut lock(&writing.state).space
        {
            space.recycle_for_moves(generation);
        }
    }

    fn begin_compacting_in_use(&self) -> Result<()> {
        self.survey_for_compacting(self.writing()?)
    }

    fn blocks_with_kept_space(&self, first_block: u64) -> Result<Vec<u64>> {
        self.kept_blocks(self.writing()?, first_block)
    }

    fn give_up_moves(&self) {
        if let Some(writing) = &self.writing {
            self.release_moving(&mut lock(&writing.state));
        }
    }

    fn cut_free_tail(&self) -> Result<()> {
        self.cut_tail(self.writing()?)
    }

    fn close(&self) -> Result<()> {
        self.close_file(self.writing()?)
    }
}
