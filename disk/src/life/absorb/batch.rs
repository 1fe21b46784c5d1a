//! One batch: copies what the top has of some held blocks into the parent.
//!
//! ```text
//!   block of the top ─┬─ data ──────── all sectors ─┐
//!                     ├─ partial ───── by bitmap ───┼─▶ pieces within blocks of the parent
//!                     └─ zeros ────────────────────┘      ├ has space ─▶ written in place
//!                                                         └ has none  ─▶ reserved, written,
//!                                                                        committed
//! ```
//!
//! A block of a parent that cannot record which sectors have data is filled first, if it is larger
//! than the piece: with what the disk shows, so also with data of the top that goes there next.
//!
//! The blocks of a batch cover whole blocks of the parent too, and all of them are held. So nobody
//! else reserves, writes or commits in these blocks of the parent.

use crate::engine::{chain::Member, shared::Shared};
use diskwright_image::{BlockState, Commit, DiskType, ImageError};
use diskwright_store::{IoBuf, Store, Zeroing, store::FileRange};
use std::{io, ops::Range, sync::Arc};

/// Number of bytes copied at once.
const COPY_BYTES: u64 = 1 << 20;

/// Copies blocks of the top into its parent.
pub(super) struct Copier<'a> {
    pub(super) shared: &'a Shared,
    pub(super) top: &'a Member,
    pub(super) parent: &'a Member,
    /// Whether the parent is the lowest image.
    pub(super) is_lowest: bool,
    /// Virtual size of the disk.
    pub(super) size_bytes: u64,
    /// Whether data may be shared by reflink. False after the first failure.
    pub(super) shares: bool,
    pub(super) buf: IoBuf,
    pub(super) copied_bytes: u64,
    pub(super) cloned_bytes: u64,
}

/// The bytes of a range.
#[derive(Clone, Copy)]
enum Bytes<'s> {
    /// At this offset of a store.
    At(&'s Arc<dyn Store>, u64),
    Zeros,
}

impl<'a> Copier<'a> {
    pub(super) fn new(shared: &'a Shared, top: &'a Member, parent: &'a Member, shares: bool) -> Self {
        let chain = shared.chain();
        Self {
            shared,
            top,
            parent,
            is_lowest: chain.is_lowest(parent.id),
            size_bytes: chain.geometry.size_bytes,
            shares,
            buf: IoBuf::new(COPY_BYTES as usize),
            copied_bytes: 0,
            cloned_bytes: 0,
        }
    }

    /// Copies what the top has of a block.
    pub(super) fn copy(&mut self, block: u64) -> io::Result<()> {
        let top = self.top;
        let (start, end) = top.block_range(block, self.size_bytes);
        let mut state = [BlockState::Absent];
        top.image.block_states(block, &mut state)?;
        match state[0] {
            BlockState::Absent => Ok(()),
            BlockState::Zero => self.put(start..end, Bytes::Zeros),
            BlockState::Data { store, offset_bytes } | BlockState::Shared { store, offset_bytes } => {
                let store = store_of(top, store)?;
                self.put(start..end, Bytes::At(store, offset_bytes))
            }
            BlockState::Partial { store, offset_bytes } => {
                let (store, bitmap) = (store_of(top, store)?, top.image.sector_bitmap(block)?);
                let sector_bytes = u64::from(bitmap.sector_bytes);
                let mut sector = 0;
                while sector < bitmap.sectors && start + u64::from(sector) * sector_bytes < end {
                    let (is_own, next) = bitmap.run_at(sector);
                    let (from, to) = (u64::from(sector) * sector_bytes, u64::from(next) * sector_bytes);
                    if is_own {
                        self.put(start + from..end.min(start + to), Bytes::At(store, offset_bytes + from))?;
                    }
                    sector = next;
                }
                Ok(())
            }
            BlockState::Damaged => Err(top.image.damage(block)?.into()),
            BlockState::Compressed => Err(compressed(top)),
        }
    }

    /// Puts bytes into the parent, block by block.
    fn put(&mut self, range: Range<u64>, bytes: Bytes<'_>) -> io::Result<()> {
        let parent = self.parent;
        let mut at = range.start;
        while at < range.end {
            let block = at / parent.block_bytes;
            let (_, block_end) = parent.block_range(block, self.size_bytes);
            let stop = block_end.min(range.end);
            let piece = match bytes {
                Bytes::At(store, offset_bytes) => Bytes::At(store, offset_bytes + (at - range.start)),
                Bytes::Zeros => Bytes::Zeros,
            };
            self.put_piece(block, at..stop, piece)?;
            at = stop;
        }
        Ok(())
    }

    /// Puts bytes into one block of the parent.
    fn put_piece(&mut self, block: u64, range: Range<u64>, bytes: Bytes<'_>) -> io::Result<()> {
        let (parent, shared) = (self.parent, self.shared);
        let writer = parent.writer()?;
        let (start, end) = parent.block_range(block, self.size_bytes);
        let is_whole = range == (start..end);
        let mut state = [BlockState::Absent];
        parent.image.block_states(block, &mut state)?;
        let lacks_rest = match state[0] {
            BlockState::Absent => !self.is_lowest && !writer.tracks_sectors(),
            BlockState::Shared { .. } => true,
            _ => false,
        };
        if lacks_rest && !is_whole {
            shared.copy_up(&shared.chain(), parent.id, block)?;
            parent.image.block_states(block, &mut state)?;
            if matches!(state[0], BlockState::Absent | BlockState::Shared { .. }) {
                return Err(io::Error::other("a block could not be filled, as the chain has changed"));
            }
        }
        let is_fixed = parent.image.info().disk_type == DiskType::Fixed;
        if matches!(bytes, Bytes::Zeros) {
            let reads_as_zeros = match state[0] {
                BlockState::Zero => true,
                BlockState::Absent => self.is_lowest,
                _ => false,
            };
            if reads_as_zeros {
                return Ok(());
            }
            if is_whole && !is_fixed && writer.can_store_zero() {
                return shared.commit_blocking(parent, block, Commit::Zero);
            }
        }
        let within_bytes = range.start - start;
        let sector_bytes = u64::from(parent.image.info().logical_sector_bytes);
        let sectors = Commit::Sectors {
            first: (within_bytes / sector_bytes) as u32,
            count: ((range.end - range.start) / sector_bytes) as u32,
        };
        let (store, offset_bytes, change) = match state[0] {
            BlockState::Data { store, offset_bytes } => (store, offset_bytes, None),
            BlockState::Partial { store, offset_bytes } => {
                (store, offset_bytes, Some(if is_whole { Commit::Whole } else { sectors }))
            }
            BlockState::Absent | BlockState::Zero | BlockState::Shared { .. } => {
                let reservation = writer.reserve_waiting(block)?;
                if let Some((init_offset_bytes, init)) = &reservation.init {
                    store_of(parent, reservation.store)?.write_at(init, *init_offset_bytes)?;
                    writer.initialised(block);
                }
                // Fresh space reads as zeros, and so does the block.
                let was_zeros = state[0] == BlockState::Zero || self.is_lowest;
                let change = if is_whole || was_zeros { Commit::Whole } else { sectors };
                (reservation.store, reservation.offset_bytes, Some(change))
            }
            BlockState::Damaged => return Err(parent.image.damage(block)?.into()),
            BlockState::Compressed => return Err(compressed(parent)),
        };
        self.transfer(bytes, store_of(parent, store)?, offset_bytes + within_bytes, range.end - range.start)?;
        change.map_or(Ok(()), |change| shared.commit_blocking(parent, block, change))
    }

    /// Transfers bytes into the parent's file.
    fn transfer(&mut self, bytes: Bytes<'_>, into: &Arc<dyn Store>, to_bytes: u64, len_bytes: u64) -> io::Result<()> {
        let Bytes::At(from, from_bytes) = bytes else {
            return into.zero_range(FileRange { offset_bytes: to_bytes, len_bytes }, Zeroing::Keep);
        };
        if self.shares {
            match into.clone_range(&**from, FileRange { offset_bytes: from_bytes, len_bytes }, to_bytes) {
                Ok(()) => {
                    self.cloned_bytes += len_bytes;
                    return Ok(());
                }
                Err(error) if diskwright_store::is_full(&error) => return Err(error),
                // Sectors of a partial block may not fit the file system's blocks.
                Err(_) if len_bytes < self.top.block_bytes => {}
                Err(_) => self.shares = false,
            }
        }
        for done in (0..len_bytes).step_by(COPY_BYTES as usize) {
            let part = &mut self.buf[..COPY_BYTES.min(len_bytes - done) as usize];
            from.read_at(part, from_bytes + done)?;
            into.write_at(part, to_bytes + done)?;
        }
        self.copied_bytes += len_bytes;
        Ok(())
    }
}

fn store_of(image: &Member, store: u16) -> io::Result<&Arc<dyn Store>> {
    image.image.stores().get(usize::from(store)).ok_or_else(|| io::ErrorKind::NotFound.into())
}

fn compressed(image: &Member) -> io::Error {
    ImageError::Unsupported {
        path: image.image.store().name().to_owned(),
        what: "a merge of a disk in use with compressed blocks".into(),
        hint: "merge it while it is not in use".into(),
    }
    .into()
}
