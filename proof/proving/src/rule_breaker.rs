//! A wrapper around an image that breaks one rule between the disk and the image. It is for rules
//! that the files below cannot break.

use diskwright_image::{
    BlockState, Commit, Image, ImageInfo, ImageWriter, LinkageId, MoveTo, ParentLink, Reservation, Result, SectorBitmap,
};
use diskwright_store::Store;
use std::sync::Arc;

/// A rule to break.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BrokenRule {
    /// Freed space is reused at once, before its removal is durable.
    RecycleAtOnce,
    /// The image is not told that guest-visible writes begin, so its identities do not change.
    NoBeginWriting,
    /// The sector bitmap of a new block is reported as written, but is not.
    NoFirstBitmap,
    /// A zeroed block is reported as recorded, but is not.
    ZeroesForgotten,
    /// Written sectors are reported as recorded, but are not.
    SectorsForgotten,
    /// If some sectors of a block are written, the whole block is recorded as written.
    SectorsMadeWhole,
    /// An image without sector bitmaps claims to have them, so blocks are not filled from below
    /// before a part of them is written.
    NeverFills,
    /// A flush makes only payload durable, no tables.
    FlushesPayloadOnly,
    /// A flush whose sync failed is tried again, and counts as a success if the second sync
    /// succeeds.
    FailedSyncForgotten,
    /// A server drops the FUA flag of writes.
    ServerForgetsFua,
    /// A server answers a flush without passing it on.
    ServerForgetsFlush,
}

impl BrokenRule {
    /// Whether the rule is broken above the disk (see `disk/front.rs`), not between the disk and
    /// its image.
    pub fn is_in_server(self) -> bool {
        matches!(self, Self::ServerForgetsFua | Self::ServerForgetsFlush)
    }
}

/// The wrapper.
#[derive(Debug)]
pub struct RuleBreaker {
    inner: Arc<dyn Image>,
    broken_rule: BrokenRule,
}

impl RuleBreaker {
    /// `inner` must be open for writing.
    pub fn new(inner: Arc<dyn Image>, broken_rule: BrokenRule) -> Self {
        Self { inner, broken_rule }
    }

    fn writing(&self) -> Result<&dyn ImageWriter> {
        self.inner.writer().ok_or_else(|| {
            let error = std::io::ErrorKind::ReadOnlyFilesystem.into();
            diskwright_image::ImageError::io("write", &**self.inner.store(), 0, error)
        })
    }

    fn state(&self, block: u64) -> Result<BlockState> {
        let mut state = [BlockState::Absent];
        self.inner.block_states(block, &mut state)?;
        Ok(state[0])
    }
}

impl Image for RuleBreaker {
    fn info(&self) -> &ImageInfo {
        self.inner.info()
    }

    fn shares_blocks(&self) -> bool {
        self.inner.shares_blocks()
    }

    fn stores(&self) -> &[Arc<dyn Store>] {
        self.inner.stores()
    }

    fn block_states(&self, first_block: u64, out: &mut [BlockState]) -> Result<()> {
        self.inner.block_states(first_block, out)
    }

    fn sector_bitmap(&self, block: u64) -> Result<SectorBitmap> {
        self.inner.sector_bitmap(block)
    }

    fn read_compressed(&self, block: u64, within_bytes: u64, out: &mut [u8]) -> Result<()> {
        self.inner.read_compressed(block, within_bytes, out)
    }

    fn size_bytes(&self) -> u64 {
        self.inner.size_bytes()
    }

    fn linkage_id(&self) -> Option<LinkageId> {
        self.inner.linkage_id()
    }

    fn packed_len_bytes(&self, blocks: u64) -> Result<Option<u64>> {
        self.inner.packed_len_bytes(blocks)
    }

    fn parent_link(&self) -> Option<ParentLink> {
        self.inner.parent_link()
    }

    fn damage(&self, block: u64) -> Result<diskwright_image::ImageError> {
        self.inner.damage(block)
    }

    fn writer(&self) -> Option<&dyn ImageWriter> {
        self.inner.writer().map(|_| self as &dyn ImageWriter)
    }
}

impl ImageWriter for RuleBreaker {
    fn begin_writing(&self) -> Result<()> {
        if self.broken_rule == BrokenRule::NoBeginWriting { Ok(()) } else { self.writing()?.begin_writing() }
    }

    fn begin_writing_as(&self, linkage_id: LinkageId) -> Result<()> {
        if self.broken_rule == BrokenRule::NoBeginWriting {
            Ok(())
        } else {
            self.writing()?.begin_writing_as(linkage_id)
        }
    }

    fn set_parent_link(&self, link: &ParentLink) -> Result<()> {
        self.writing()?.set_parent_link(link)
    }

    fn prepare(&self, blocks: std::ops::Range<u64>) -> Result<()> {
        self.writing()?.prepare(blocks)
    }

    fn tracks_sectors(&self) -> bool {
        self.broken_rule == BrokenRule::NeverFills || self.inner.writer().is_some_and(ImageWriter::tracks_sectors)
    }

    fn reserve(&self, block: u64) -> Result<Option<Reservation>> {
        let Some(reservation) = self.writing()?.reserve(block)? else { return Ok(None) };
        if self.broken_rule == BrokenRule::NoFirstBitmap && reservation.init.is_some() {
            self.writing()?.initialised(block);
            return Ok(Some(Reservation { init: None, ..reservation }));
        }
        Ok(Some(reservation))
    }

    fn initialised(&self, block: u64) {
        if let Ok(writer) = self.writing() {
            writer.initialised(block);
        }
    }

    fn commit(&self, block: u64, change: Commit) -> Result<Option<BlockState>> {
        let writer = self.writing()?;
        match (self.broken_rule, change) {
            (BrokenRule::ZeroesForgotten, Commit::Zero | Commit::Discard) => Ok(Some(BlockState::Zero)),
            (BrokenRule::SectorsForgotten, Commit::Sectors { .. }) => self.state(block).map(Some),
            (BrokenRule::SectorsMadeWhole, Commit::Sectors { .. }) => writer.commit(block, Commit::Whole),
            (BrokenRule::RecycleAtOnce, _) => {
                let state = writer.commit(block, change)?;
                writer.recycle(writer.freed_generation());
                Ok(state)
            }
            _ => writer.commit(block, change),
        }
    }

    fn can_store_zero(&self) -> bool {
        self.inner.writer().is_some_and(ImageWriter::can_store_zero)
    }

    fn is_dirty(&self) -> bool {
        self.inner.writer().is_some_and(ImageWriter::is_dirty)
    }

    fn check_syncs(&self) -> Result<()> {
        self.writing()?.check_syncs()
    }

    fn flush(&self) -> Result<()> {
        let flushed = || self.writing()?.flush();
        let only_synced = || {
            let store = self.inner.store();
            let synced = store.sync_data();
            synced.map_err(|error| diskwright_image::ImageError::io("make durable", &**store, 0, error))
        };
        match self.broken_rule {
            BrokenRule::FlushesPayloadOnly => only_synced(),
            BrokenRule::FailedSyncForgotten => flushed().or_else(|_| only_synced()),
            _ => flushed(),
        }
    }

    fn freed_generation(&self) -> u64 {
        self.inner.writer().map_or(0, ImageWriter::freed_generation)
    }

    fn recycle(&self, generation: u64) {
        if let Ok(writer) = self.writing() {
            writer.recycle(generation);
        }
    }

    fn begin_compacting(&self) -> Result<()> {
        self.writing()?.begin_compacting()
    }

    fn reserve_move(&self, block: u64) -> Result<Option<MoveTo>> {
        self.writing()?.reserve_move(block)
    }

    fn blocks_in_the_way(&self, size_bytes: u64) -> Result<Vec<u64>> {
        self.writing()?.blocks_in_the_way(size_bytes)
    }

    fn reserve_away(&self, block: u64) -> Result<Option<MoveTo>> {
        self.writing()?.reserve_away(block)
    }

    fn moves_with(&self, block: u64) -> std::ops::Range<u64> {
        self.writing().map_or(block..block + 1, |writer| writer.moves_with(block))
    }

    fn move_tables(&self) -> Result<()> {
        self.writing()?.move_tables()
    }

    fn recycle_for_moves(&self, generation: u64) {
        if let Ok(writer) = self.writing() {
            writer.recycle_for_moves(generation);
        }
    }

    fn begin_compacting_in_use(&self) -> Result<()> {
        self.writing()?.begin_compacting_in_use()
    }

    fn blocks_with_kept_space(&self, first_block: u64) -> Result<Vec<u64>> {
        self.writing()?.blocks_with_kept_space(first_block)
    }

    fn give_up_moves(&self) {
        if let Ok(writer) = self.writing() {
            writer.give_up_moves();
        }
    }

    fn cut_free_tail(&self) -> Result<()> {
        self.writing()?.cut_free_tail()
    }

    fn fill_gaps(&self) -> Result<()> {
        self.writing()?.fill_gaps()
    }

    fn close(&self) -> Result<()> {
        self.writing()?.close()
    }
}
