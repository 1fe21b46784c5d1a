//! A disk that is one contiguous range of its store: a raw file, a fixed VHD, a flat extent. There
//! is nothing to map.
//!
//! The disk above counts in blocks, so the disk is cut into pseudo-blocks of
//! [`PSEUDO_BLOCK_BYTES`]. Each is always [`BlockState::Data`] at its own offset, so reservations
//! and commits do nothing.
//!
//! Invariant: after a failed sync no later flush succeeds ([`Barrier`]). While the image is open
//! only its size and the length of a padded file change.

use crate::{BlockState, Commit, ImageError, ImageWriter, LinkageId, Reservation, Result, SectorBitmap};
use diskwright_store::{
    Barrier, FileRange, Store,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
};
use std::{
    fmt, io,
    ops::Range,
    sync::{Arc, PoisonError},
};

/// Size of a pseudo-block in bytes.
pub const PSEUDO_BLOCK_BYTES: u64 = 64 << 20;

/// Upper limit of [`ImageInfo::payload_alignment_bytes`]: payload at offset 0 has any alignment.
pub(crate) const FLAT_ALIGNMENT_BYTES: u32 = 1 << 20;

/// Extends a padded file to `end_bytes`, durably.
///
/// # Errors
/// `Io`; `Poisoned`.
pub(crate) fn extend_to_sector(barrier: &Barrier, end_bytes: u64) -> Result<()> {
    let store = &**barrier.store();
    store
        .allocate(FileRange { offset_bytes: end_bytes - 512, len_bytes: 512 })
        .map_err(|e| ImageError::io("extend the file to a whole sector", store, end_bytes, e))?;
    // If a power cut lost the new length but kept a write to the last sector, that sector would be
    // torn.
    Ok(barrier.sync("make the file's new length durable")?)
}

/// States of the pseudo-blocks of a disk of `size_bytes` at offset 0 of its store.
pub(crate) fn flat_states(size_bytes: u64, first_block: u64, out: &mut [BlockState]) {
    let mut offset = first_block.checked_mul(PSEUDO_BLOCK_BYTES);
    for state in out {
        *state = match offset {
            Some(offset_bytes) if offset_bytes < size_bytes => BlockState::data(offset_bytes),
            _ => BlockState::Absent,
        };
        offset = offset.and_then(|bytes| bytes.checked_add(PSEUDO_BLOCK_BYTES));
    }
}

/// The bitmap of a pseudo-block: all bits are set, as a raw disk has no parent.
pub(crate) fn flat_bitmap(sector_bytes: u32) -> SectorBitmap {
    let sectors = (PSEUDO_BLOCK_BYTES / u64::from(sector_bytes)) as u32;
    let mut bitmap = SectorBitmap::empty(sectors, sector_bytes);
    bitmap.words.fill(u64::MAX);
    bitmap
}

/// The interface for writes to a disk that is one contiguous range of its store.
#[derive(Debug)]
pub(crate) struct FlatWriter {
    store: Arc<dyn Store>,
    size_bytes: AtomicU64,
    /// Length in bytes to which the store must be extended before the first write; 0 if not needed.
    padding_end_bytes: AtomicU64,
    trailer: Trailer,
    /// Held while the size or the identity changes.
    growing: Mutex<()>,
    /// The identity, if it was changed since the open.
    linkage_id: Mutex<Option<LinkageId>>,
    barrier: Barrier,
}

/// What follows the disk in its store.
#[derive(Debug)]
pub(crate) enum Trailer {
    /// The store ends with the disk.
    None,
    /// Data that must move when the size changes, as a VHD footer.
    Moves(Box<dyn MoveTrailer>),
}

/// Moves the data that follows a disk.
pub(crate) trait MoveTrailer: Send + Sync + fmt::Debug {
    /// Makes the store end with the data, durably, before the first write.
    ///
    /// # Errors
    /// `Io`.
    fn settle(&self, barrier: &Barrier) -> Result<()>;

    /// Changes the disk's size from `from_bytes` to `to_bytes`, durably. A new range reads as
    /// zeros.
    ///
    /// # Errors
    /// On an error the disk keeps its old size, unless only the last sync failed.
    fn move_trailer(&self, barrier: &Barrier, from_bytes: u64, to_bytes: u64) -> Result<()>;

    /// Whether the disk may grow to this size, and how long the file would be.
    ///
    /// # Errors
    /// `Unsupported` if not.
    fn check_growth(&self, store: &dyn Store, from_bytes: u64, to_bytes: u64) -> Result<u64>;

    /// Records another identity, durably.
    ///
    /// # Errors
    /// `Io`, after which the old identity or the new one is recorded.
    fn set_linkage_id(&self, barrier: &Barrier, linkage_id: LinkageId) -> Result<()>;
}

impl FlatWriter {
    pub(crate) fn new(
        store: Arc<dyn Store>,
        size_bytes: u64,
        padding_end_bytes: Option<u64>,
        trailer: Trailer,
    ) -> Self {
        let (barrier, size_bytes) = (Barrier::new(Arc::clone(&store)), AtomicU64::new(size_bytes));
        let padding_end_bytes = AtomicU64::new(padding_end_bytes.unwrap_or(0));
        let (growing, linkage_id) = (Mutex::default(), Mutex::default());
        Self { barrier, store, size_bytes, padding_end_bytes, trailer, growing, linkage_id }
    }

    /// The identity, if it was changed since the open.
    pub(crate) fn linkage_id(&self) -> Option<LinkageId> {
        *self.linkage_id.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Ordering::Acquire)
    }

    fn place(&self, block: u64) -> Result<u64> {
        let size_bytes = self.size_bytes();
        block.checked_mul(PSEUDO_BLOCK_BYTES).filter(|&offset_bytes| offset_bytes < size_bytes).ok_or_else(|| {
            let beyond = io::Error::new(io::ErrorKind::InvalidInput, format!("the disk ends before block {block}"));
            ImageError::io("find a block", &*self.store, size_bytes, beyond)
        })
    }
}

impl ImageWriter for FlatWriter {
    fn begin_writing(&self) -> Result<()> {
        if let Trailer::Moves(trailer) = &self.trailer {
            trailer.settle(&self.barrier)?;
        }
        match self.padding_end_bytes.load(Ordering::Acquire) {
            0 => Ok(()),
            end_bytes => extend_to_sector(&self.barrier, end_bytes),
        }
    }

    fn set_linkage_id(&self, linkage_id: LinkageId) -> Result<()> {
        let _turn = self.growing.lock().unwrap_or_else(PoisonError::into_inner);
        let Trailer::Moves(trailer) = &self.trailer else {
            return Err(ImageError::Unsupported {
                path: self.store.name().to_owned(),
                what: "an identity in a raw disk".into(),
                hint: "convert the disk to VHDX, VHD, VMDK or VDI".into(),
            });
        };
        trailer.set_linkage_id(&self.barrier, linkage_id)?;
        *self.linkage_id.lock().unwrap_or_else(PoisonError::into_inner) = Some(linkage_id);
        Ok(())
    }

    fn prepare(&self, _blocks: Range<u64>) -> Result<()> {
        Ok(())
    }

    fn reserve(&self, block: u64) -> Result<Option<Reservation>> {
        Ok(Some(Reservation { store: 0, offset_bytes: self.place(block)?, init: None }))
    }

    fn initialised(&self, _block: u64) {}

    fn tracks_sectors(&self) -> bool {
        false
    }

    fn resize(&self, size_bytes: u64) -> Result<()> {
        let _turn = self.growing.lock().unwrap_or_else(PoisonError::into_inner);
        // After a growth whose sync failed the file may already be long enough, but not durably.
        self.barrier.check()?;
        let present = self.size_bytes();
        if size_bytes < present {
            return Err(ImageError::Unsupported {
                path: self.store.name().to_owned(),
                what: format!("a new size of {size_bytes} bytes for this open disk of {present} bytes"),
                hint: "the size must be at least the present one".into(),
            });
        }
        if let Trailer::Moves(trailer) = &self.trailer {
            if size_bytes > present {
                trailer.move_trailer(&self.barrier, present, size_bytes)?;
            }
            self.size_bytes.store(size_bytes, Ordering::Release);
            return Ok(());
        }
        let io = |doing| move |error| ImageError::io(doing, &*self.store, present, error);
        if self.store.len_bytes().map_err(io("get the length of the file"))? < size_bytes {
            self.store.set_len(size_bytes).map_err(io("make the disk larger"))?;
            self.barrier.sync("make the file's new length durable")?;
        }
        self.size_bytes.store(size_bytes, Ordering::Release);
        Ok(())
    }

    fn check_growth(&self, size_bytes: u64) -> Result<()> {
        let (store, present) = (&*self.store, self.size_bytes());
        let len_bytes = match &self.trailer {
            Trailer::Moves(trailer) => trailer.check_growth(store, present, size_bytes)?,
            Trailer::None => size_bytes,
        };
        store.check_len(len_bytes).map_err(|error| ImageError::io("make the disk larger", store, present, error))
    }

    fn check_shrink(&self, size_bytes: u64) -> Result<()> {
        let present = self.size_bytes();
        let hint = if size_bytes > present || size_bytes == 0 || !size_bytes.is_multiple_of(512) {
            "the size must be a multiple of 512 above 0, and at most the present one"
        } else if size_bytes < present && self.store.is_block_device() {
            "a block device cannot be cut; copy the disk into an image"
        } else {
            return Ok(());
        };
        Err(ImageError::Unsupported {
            path: self.store.name().to_owned(),
            what: format!("a new size of {size_bytes} bytes for this open disk of {present} bytes"),
            hint: hint.into(),
        })
    }

    fn shrink(&self, size_bytes: u64) -> Result<()> {
        let _turn = self.growing.lock().unwrap_or_else(PoisonError::into_inner);
        self.barrier.check()?;
        self.check_shrink(size_bytes)?;
        let present = self.size_bytes();
        if size_bytes == present {
            return Ok(());
        }
        if let Trailer::Moves(trailer) = &self.trailer {
            trailer.move_trailer(&self.barrier, present, size_bytes)?;
        } else {
            let cut = self.store.set_len(size_bytes);
            cut.map_err(|error| ImageError::io("cut the file at the disk's new end", &*self.store, size_bytes, error))?;
            // The padding of the last sector is gone.
            self.padding_end_bytes.store(0, Ordering::Release);
            self.barrier.sync("make the file's new length durable")?;
        }
        self.size_bytes.store(size_bytes, Ordering::Release);
        Ok(())
    }

    fn commit(&self, block: u64, change: Commit) -> Result<Option<BlockState>> {
        match change {
            Commit::Whole | Commit::Sectors { .. } => Ok(Some(BlockState::data(self.place(block)?))),
            Commit::Zero | Commit::Discard | Commit::Absent | Commit::Moved => Err(ImageError::Unsupported {
                path: self.store.name().to_owned(),
                what: "a block without payload in a disk that has no block table".into(),
                hint: "write zeros over the range instead".into(),
            }),
        }
    }

    fn can_store_zero(&self) -> bool {
        false
    }

    fn is_dirty(&self) -> bool {
        false
    }

    fn check_syncs(&self) -> Result<()> {
        Ok(self.barrier.check()?)
    }

    fn flush(&self) -> Result<()> {
        self.barrier.share(|| Ok(self.barrier.sync("make the written data durable")?))
    }

    fn freed_generation(&self) -> u64 {
        0
    }

    fn recycle(&self, _generation: u64) {}

    fn close(&self) -> Result<()> {
        self.flush()
    }
}
