//! An image that breaks a rule between the disk and the image it wraps: for rules that no store can
//! break from below.

use diskwright_image::{BlockState, Commit, Image, ImageInfo, ImageWriter, Reservation, Result, SectorBitmap};
use diskwright_store::Store;
use std::sync::Arc;

/// A rule to break.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meddling {
    /// Space that was given up is used again at once, before its removal is durable.
    RecycleAtOnce,
    /// The image is not told that guest-visible writes begin: its identities stay.
    NoBeginWriting,
    /// A new block's first bitmap is said to be written, and is not.
    NoFirstBitmap,
    /// A block of zeros is said to be recorded, and is not.
    ZeroesForgotten,
    /// Sectors that were written are said to be recorded, and are not.
    SectorsForgotten,
    /// All of a block is called written when some of its sectors are.
    SectorsMadeWhole,
    /// An image without a record of sectors says that it has one, so that no block is filled before
    /// a part of it is written.
    NeverFills,
    /// Tables stay in memory: a flush only makes payload durable.
    FlushesPayloadOnly,
    /// A flush whose sync failed is tried once more, and passed for a success when the second one
    /// fails no more.
    FailedSyncForgotten,
    /// A server passes writes on without their FUA.
    ServerForgetsFua,
    /// A server answers a flush by itself.
    ServerForgetsFlush,
}

impl Meddling {
    /// Whether it is broken above the disk (see `disk/front.rs`), not between the disk and its
    /// image.
    pub fn is_of_server(self) -> bool {
        matches!(self, Self::ServerForgetsFua | Self::ServerForgetsFlush)
    }
}

/// See the module.
#[derive(Debug)]
pub struct Meddler {
    inner: Arc<dyn Image>,
    meddling: Meddling,
}

impl Meddler {
    /// Around an image that is open for writing.
    pub fn new(inner: Arc<dyn Image>, meddling: Meddling) -> Self {
        Self { inner, meddling }
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

impl Image for Meddler {
    fn info(&self) -> &ImageInfo {
        self.inner.info()
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

    fn read_packed(&self, block: u64, within_bytes: u64, out: &mut [u8]) -> Result<()> {
        self.inner.read_packed(block, within_bytes, out)
    }

    fn size_bytes(&self) -> u64 {
        self.inner.size_bytes()
    }

    fn damage(&self, block: u64) -> Result<diskwright_image::ImageError> {
        self.inner.damage(block)
    }

    fn writer(&self) -> Option<&dyn ImageWriter> {
        self.inner.writer().map(|_| self as &dyn ImageWriter)
    }
}

impl ImageWriter for Meddler {
    fn begin_writing(&self) -> Result<()> {
        if self.meddling == Meddling::NoBeginWriting { Ok(()) } else { self.writing()?.begin_writing() }
    }

    fn prepare(&self, blocks: std::ops::Range<u64>) -> Result<()> {
        self.writing()?.prepare(blocks)
    }

    fn tracks_sectors(&self) -> bool {
        self.meddling == Meddling::NeverFills || self.inner.writer().is_some_and(ImageWriter::tracks_sectors)
    }

    fn reserve(&self, block: u64) -> Result<Option<Reservation>> {
        let Some(reservation) = self.writing()?.reserve(block)? else { return Ok(None) };
        if self.meddling == Meddling::NoFirstBitmap && reservation.init.is_some() {
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
        match (self.meddling, change) {
            (Meddling::ZeroesForgotten, Commit::Zero | Commit::Discard) => Ok(Some(BlockState::Zero)),
            (Meddling::SectorsForgotten, Commit::Sectors { .. }) => self.state(block).map(Some),
            (Meddling::SectorsMadeWhole, Commit::Sectors { .. }) => writer.commit(block, Commit::Whole),
            (Meddling::RecycleAtOnce, _) => {
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
        match self.meddling {
            Meddling::FlushesPayloadOnly => only_synced(),
            Meddling::FailedSyncForgotten => flushed().or_else(|_| only_synced()),
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

    fn close(&self) -> Result<()> {
        self.writing()?.close()
    }
}
