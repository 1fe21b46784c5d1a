//! The interface of every image format: the mapping for reads, and the life cycle of a block for
//! writes.
//!
//! How the disk above drives the life cycle of a block:
//!
//! ```text
//!               reserve()              engine writes payload        commit(Sectors | Whole)
//!   Absent/Zero ─────────▶ space reserved ─────────────▶ ... ─────────────────▶ Partial / Data
//!        ▲                                                                           │
//!        └──────────────────────── commit(Zero | Discard) ◀──────────────────────────┘
//!                         (space is quarantined until flush + recycle)
//!
//!   Partial / Data ─ reserve_move() ─▶ lower place ─ payload copied ─ commit(Moved) ─▶ as before
//! ```
//!
//! `commit` changes only memory. [`ImageWriter::flush`] makes the change durable: first the
//! payload, then the mapping that refers to it. Locks: an image has one mutex over its tables and
//! its space. The disk above calls `reserve` and `commit` under its own mutation lock (order:
//! mutation lock, then image mutex). The flusher calls `flush` without the mutation lock.

use crate::{
    block::{BlockState, Commit, MoveTo, Reservation, SectorBitmap},
    error::{ImageError, Result},
    identity::LinkageId,
    info::{ImageInfo, ParentLink},
    inner::{InternalBitmap, InternalSnapshot},
};
use diskwright_store::Store;
use std::{fmt, ops::Range, sync::Arc};

/// One open image. Shared by several threads.
pub trait Image: Send + Sync + fmt::Debug {
    /// The description of the image.
    fn info(&self) -> &ImageInfo;

    /// The files that hold the image's bytes, 1 to 65,535. The first one has the tables, if the
    /// format has any. The list does not change while the image is open.
    fn stores(&self) -> &[Arc<dyn Store>];

    /// The first of [`Image::stores`].
    fn store(&self) -> &Arc<dyn Store> {
        &self.stores()[0]
    }

    /// Writes the state of block `first_block + i` to `out[i]`. Blocks beyond the end of the disk
    /// are `Absent`. Offsets are validated: they lie inside the file and outside the image's
    /// metadata. An invalid entry makes only its own block [`BlockState::Damaged`].
    ///
    /// # Errors
    /// `Io` when the table cannot be read.
    fn block_states(&self, first_block: u64, out: &mut [BlockState]) -> Result<()>;

    /// The first of the blocks `first_block .. end_block` that may not be `Absent`, or `None` if
    /// all are. Blocks beyond the end of the disk are `Absent`. An image that does not know returns
    /// `first_block`. With this call the time of a walk over a nearly empty disk depends on the
    /// allocated blocks, not on the disk's size.
    ///
    /// # Errors
    /// `Io` when the table cannot be read.
    fn next_block(&self, first_block: u64, end_block: u64) -> Result<Option<u64>> {
        Ok((first_block < end_block).then_some(first_block))
    }

    /// The error of a [`BlockState::Damaged`] block: the structure, its offset, what was found and
    /// what was expected. Also for a `Partial` block whose bitmap cannot be found.
    ///
    /// # Errors
    /// `Io` when the table cannot be read; `Unsupported` where the format has no tables.
    fn damage(&self, block: u64) -> Result<ImageError> {
        if let Err(error) = self.sector_bitmap(block) {
            return Ok(error);
        }
        Err(ImageError::Unsupported {
            path: self.store().name().to_owned(),
            what: format!("an explanation of damage at block {block} in an image without tables"),
            hint: "run `diskwright check` on the file".into(),
        })
    }

    /// Decompresses bytes of a [`BlockState::Compressed`] block into `out`, beginning
    /// `within_bytes` after the block's first byte. Blocks the calling thread while it reads and
    /// decompresses. Formats without compressed blocks keep this default.
    ///
    /// # Errors
    /// `Io`; `Corrupt` if the block does not decompress to its full length.
    fn read_compressed(&self, block: u64, _within_bytes: u64, _out: &mut [u8]) -> Result<()> {
        Err(ImageError::Unsupported {
            path: self.store().name().to_owned(),
            what: format!("a compressed block (block {block}) in an image of this format"),
            hint: "run `diskwright check` on the file".into(),
        })
    }

    /// Current virtual size in bytes: [`ImageInfo::size_bytes`], changed by
    /// [`ImageWriter::resize`].
    fn size_bytes(&self) -> u64 {
        self.info().size_bytes
    }

    /// The identity by which children refer to this image now: [`ImageInfo::linkage_id`], changed
    /// by [`ImageWriter::begin_writing`] and [`ImageWriter::begin_writing_as`]. A child that is
    /// created above an image in use records this identity, after `begin_writing`. Waits while
    /// another thread changes the identity, so the caller must not hold a lock.
    fn linkage_id(&self) -> Option<LinkageId> {
        self.info().linkage_id
    }

    /// The current link to the parent: [`ImageInfo::parent`], changed by
    /// [`ImageWriter::set_parent_link`].
    fn parent_link(&self) -> Option<ParentLink> {
        self.info().parent.clone()
    }

    /// The length in bytes that the first of the image's files has at least if `blocks` blocks have
    /// space: without gaps, and with all tables where they are. `None` for an image that does not
    /// allocate by the block.
    ///
    /// # Errors
    /// `Io` when the table cannot be read.
    fn packed_len_bytes(&self, _blocks: u64) -> Result<Option<u64>> {
        Ok(None)
    }

    /// Whether the image could be opened for writing and then have this size, as far as its
    /// structures say. Asked before a merge changes the first link. Reads only.
    ///
    /// # Errors
    /// `Unsupported` if not; errors of its structures.
    fn check_as_target(&self, _size_bytes: u64) -> Result<()> {
        Ok(())
    }

    /// Whether these blocks can take data. Asked before a merge changes the first link.
    ///
    /// # Errors
    /// `Unsupported` if one of them cannot.
    fn check_takes(&self, _blocks: Range<u64>) -> Result<()> {
        Ok(())
    }

    /// What the first write drops from the image, as one sentence; `None` if nothing. The contents
    /// of the disk are not meant.
    fn lost_by_writing(&self) -> Option<String> {
        None
    }

    /// Whether blocks in the file with this index keep their space, so that none is given back or
    /// moved.
    fn keeps_space(&self, _store: u16) -> bool {
        false
    }

    /// Whether any block may be [`BlockState::Shared`].
    fn shares_blocks(&self) -> bool {
        false
    }

    /// The internal snapshots of the file, as of the open.
    fn snapshots(&self) -> &[InternalSnapshot] {
        &[]
    }

    /// The bitmaps of the file, as of the open.
    fn bitmaps(&self) -> &[InternalBitmap] {
        &[]
    }

    /// The sector bitmap of a `Partial` block.
    ///
    /// # Errors
    /// `Io`; `Corrupt` if the file does not say where the bitmap is. Then only this block is lost.
    fn sector_bitmap(&self, block: u64) -> Result<SectorBitmap>;

    /// The interface for writes; `None` when the image was opened read-only.
    fn writer(&self) -> Option<&dyn ImageWriter>;
}

/// The interface for writes to an image.
pub trait ImageWriter: Send + Sync {
    /// Must be called before the first guest-visible write of a session. Later calls do nothing.
    /// VHDX: writes a new FileWriteGuid and DataWriteGuid, durable on return. (A reservation may
    /// write the new FileWriteGuid earlier.)
    fn begin_writing(&self) -> Result<()>;

    /// Like [`ImageWriter::begin_writing`], with a chosen identity: afterwards
    /// [`Image::linkage_id`] of a VHDX is `linkage_id`, durably, and `begin_writing` does nothing.
    /// A child can so name the coming identity ([`ParentLink::linkage2`]) before its parent
    /// changes. Also changes an identity that `begin_writing` has chosen. The caller must pass a
    /// new random id: a reused one would make old children accept changed data.
    ///
    /// Formats whose identity does not change when they are written (VHD) ignore the id.
    ///
    /// # Errors
    /// As [`ImageWriter::begin_writing`].
    fn begin_writing_as(&self, _linkage_id: LinkageId) -> Result<()> {
        self.begin_writing()
    }

    /// Gives the image the identity `linkage_id`: afterwards [`Image::linkage_id`] returns it.
    /// Durable on return; a power cut during the call leaves the old identity or the new one.
    /// Images that name the old one as their parent no longer accept this image. Later writes of
    /// the session keep the identity. Other threads may read, reserve, commit and flush at the same
    /// time. The caller must not hold a lock.
    ///
    /// The identity of another image means that both have the same contents. So the caller must
    /// have made the contents durable before.
    ///
    /// # Errors
    /// `Unsupported` for a format without an identity; `Io`, after which the image has the old
    /// identity or the new one: repeat the call.
    fn set_linkage_id(&self, _linkage_id: LinkageId) -> Result<()> {
        Err(ImageError::Unsupported {
            path: Default::default(),
            what: "an identity in an image of this format".into(),
            hint: "convert the disk to VHDX, VHD, VMDK or VDI".into(),
        })
    }

    /// Whether any block can lose its space and leave its place to the parent ([`Commit::Absent`]).
    fn can_forget_blocks(&self) -> bool {
        true
    }

    /// Replaces the link of a differencing image to its parent. Durable on return. A power cut
    /// during the call leaves the old link or the new one, each whole. The image's data and its own
    /// identity do not change: a VHDX gets a new FileWriteGuid and keeps its DataWriteGuid.
    ///
    /// The parent itself is not opened: the caller has checked that the image has the same contents
    /// above it. Paths and identities of the old link that `link` does not have are removed.
    /// Other threads may read, reserve, commit and flush at the same time; reservations that need a
    /// longer file wait. The caller must not hold a lock.
    ///
    /// # Errors
    /// `BadParentLink` if the image has no parent, or cannot store the link: then nothing was
    /// changed. `Corrupt` for tables that make it impossible to find free space. `Io`, after which
    /// the file has the old link or the new one: repeat the call.
    fn set_parent_link(&self, _link: &ParentLink) -> Result<()> {
        Err(ImageError::BadParentLink {
            path: Default::default(),
            what: "an image of this format and type has no parent".into(),
            hint: "only a differencing image has one".into(),
        })
    }

    /// Supplies what [`ImageWriter::reserve`] and [`ImageWriter::commit`] of these blocks lacked
    /// when they returned `None`: reads tables, allocates space in the file. Blocks on I/O, so the
    /// caller must not hold a lock. The caller then retries. The retry may return `None` again:
    /// more may be missing, or another thread may have taken the space.
    ///
    /// # Errors
    /// `Io`, with `StorageFull` when the file cannot grow; `Corrupt` for a table that makes it
    /// impossible to find free space. On a full file system nothing is kept.
    fn prepare(&self, blocks: Range<u64>) -> Result<()>;

    /// Reserves space for a block. Repeated calls for a block return the same space until the block
    /// is committed. Never accesses the store. `None` means that I/O is needed first: release all
    /// locks, call [`ImageWriter::prepare`] and retry.
    ///
    /// # Errors
    /// `Poisoned`; `Corrupt` for the block's entry. Nothing was reserved then.
    fn reserve(&self, block: u64) -> Result<Option<Reservation>>;

    /// Like [`ImageWriter::reserve`], but waits for the I/O. The caller must not hold a lock.
    ///
    /// # Errors
    /// As [`ImageWriter::reserve`] and [`ImageWriter::prepare`].
    fn reserve_waiting(&self, block: u64) -> Result<Reservation> {
        loop {
            if let Some(reservation) = self.reserve(block)? {
                return Ok(reservation);
            }
            self.prepare(block..block.saturating_add(1))?;
        }
    }

    /// Like [`ImageWriter::commit`], but waits for the I/O. The caller must not hold a lock.
    ///
    /// # Errors
    /// As [`ImageWriter::commit`] and [`ImageWriter::prepare`].
    fn commit_waiting(&self, block: u64, change: Commit) -> Result<BlockState> {
        loop {
            if let Some(state) = self.commit(block, change)? {
                return Ok(state);
            }
            self.prepare(block..block.saturating_add(1))?;
        }
    }

    /// The disk calls this when the `init` bytes of a reservation have been written.
    fn initialised(&self, block: u64);

    /// Changes the mapping in memory. Returns the block's new state; `None` as for
    /// [`ImageWriter::reserve`].
    ///
    /// # Errors
    /// `Unsupported` for `Zero` and `Discard` where [`ImageWriter::can_store_zero`] is false.
    fn commit(&self, block: u64, change: Commit) -> Result<Option<BlockState>>;

    /// Whether [`Commit::Sectors`] records which sectors have data in this layer. If not, all
    /// sectors of a block must be filled before a part of it is written (copy-up).
    fn tracks_sectors(&self) -> bool;

    /// Enlarges the virtual disk. The new range is `Absent`, or reads as zeros. Durable on return.
    /// A power cut during the call leaves the old size or the new one. Existing blocks keep their
    /// place. Other threads may reserve, commit and flush at the same time. The caller must not
    /// hold a lock. The caller must also ensure that no parent is larger than the disk, as the
    /// parent's data beyond the old end would become visible.
    ///
    /// # Errors
    /// `Unsupported` if the image cannot have this size or would shrink; `Io`, which leaves the old
    /// size unless a sync failed; `Corrupt` for a table that makes it impossible to find free
    /// space.
    fn resize(&self, size_bytes: u64) -> Result<()> {
        Err(ImageError::Unsupported {
            path: Default::default(),
            what: format!("a new size of {size_bytes} bytes for an open image of this format"),
            hint: "convert the disk to an image of the wanted size".into(),
        })
    }

    /// Whether [`ImageWriter::resize`] can give the disk this size, as far as is known before
    /// anything is changed. The present size always succeeds.
    ///
    /// # Errors
    /// As [`ImageWriter::resize`].
    fn check_growth(&self, _size_bytes: u64) -> Result<()> {
        Ok(())
    }

    /// The blocks that must get another place before [`ImageWriter::resize`] can give the disk this
    /// larger size, because longer tables will lie there. No space there is handed out any more.
    /// The caller holds these blocks, moves them with [`ImageWriter::reserve_away`], asks again
    /// until there is none, makes the moves durable, and waits for the requests that may use the
    /// old places.
    ///
    /// # Errors
    /// As [`ImageWriter::check_growth`]; `Io`.
    fn blocks_in_the_way(&self, _size_bytes: u64) -> Result<Vec<u64>> {
        Ok(Vec::new())
    }

    /// Reserves another place for a block of [`ImageWriter::blocks_in_the_way`], as
    /// [`ImageWriter::reserve_move`] does.
    ///
    /// # Errors
    /// As [`ImageWriter::reserve`].
    fn reserve_away(&self, _block: u64) -> Result<Option<MoveTo>> {
        Ok(Some(MoveTo::Stay))
    }

    /// Whether [`ImageWriter::shrink`] can give the disk this size. It always can give it the
    /// present one.
    ///
    /// # Errors
    /// `Unsupported` if not.
    fn check_shrink(&self, size_bytes: u64) -> Result<()> {
        Err(ImageError::Unsupported {
            path: Default::default(),
            what: format!("a smaller size of {size_bytes} bytes for an image of this format"),
            hint: "convert the disk to an image of the wanted size".into(),
        })
    }

    /// Makes the virtual disk smaller. What lies beyond the new end is lost, and reads as zeros if
    /// the disk is enlarged again. Durable on return. A power cut during the call leaves the old
    /// size or the new one. A call with the present size gives back what an interrupted call has
    /// left unused in the file.
    ///
    /// The caller must be alone: no request is in flight, and none follows before the call returns.
    /// The caller has flushed, and has checked that nothing beyond the new end is needed.
    ///
    /// # Errors
    /// `Unsupported` if the image cannot have this size, or it is larger than the present one: then
    /// nothing was changed. `Corrupt` for a table that makes it impossible to find free space;
    /// `Io`, which leaves the old size or the new one: repeat the call.
    fn shrink(&self, size_bytes: u64) -> Result<()> {
        self.check_shrink(size_bytes)
    }

    /// Whether a block can be recorded as zeros without payload (false for a differencing VHD).
    fn can_store_zero(&self) -> bool;

    /// Limits the memory for table pages and sector bitmaps to about `bytes`, including pages that
    /// are being written. An image keeps a minimum of some hundred KiB. Without a call the image
    /// uses a default limit. May be called at any time. Images without tables keep this default,
    /// which does nothing.
    fn limit_tables(&self, _bytes: u64) {}

    /// Whether any committed change is not yet durable.
    fn is_dirty(&self) -> bool;

    /// Fails once a sync of the store has failed, also a sync within a reservation that no flush
    /// asked for.
    ///
    /// # Errors
    /// [`ImageError::Poisoned`] after the first failed sync.
    fn check_syncs(&self) -> Result<()>;

    /// Makes durable all commits, and all payload whose write had completed, before the call.
    /// Concurrent callers share one flush. After a failed sync of the store every later flush
    /// fails: the kernel may have dropped pages, so nothing can be reported as durable.
    fn flush(&self) -> Result<()>;

    /// A counter that grows with every `Zero` or `Discard` that freed space.
    fn freed_generation(&self) -> u64;

    /// Allows reuse of the space that was freed at generations up to `generation`. The caller
    /// guarantees that the removal of the mappings is durable and that no request that could still
    /// reach the space is in flight. The blocks are returned to the file system where possible.
    /// That blocks on I/O, so the caller must not hold a lock.
    fn recycle(&self, generation: u64);

    /// Prepares a session in which the file is made smaller. Space that was reserved for blocks
    /// without data is given up, and [`ImageWriter::close`] cuts the file after its last block. The
    /// contents of the disk do not change. The caller must not hold a lock.
    ///
    /// # Errors
    /// `Unsupported` for an image whose blocks cannot be moved; `Corrupt` for tables that make it
    /// impossible to find free space; `Io`.
    fn begin_compacting(&self) -> Result<()> {
        Err(ImageError::Unsupported {
            path: Default::default(),
            what: "compacting an image of this format and type".into(),
            hint: "convert it to a dynamic disk".into(),
        })
    }

    /// The blocks that get another place together with a block: those that share its cluster. One
    /// [`ImageWriter::reserve_move`] and one [`Commit::Moved`] are for all of them.
    fn moves_with(&self, block: u64) -> Range<u64> {
        block..block + 1
    }

    /// Reserves the lowest free place in the file for the payload of a block, if it lies below the
    /// block's present place. Never accesses the store. `None` as for [`ImageWriter::reserve`].
    ///
    /// The caller prevents writes to the block from now on, copies the payload, and then calls
    /// [`ImageWriter::commit`] with [`Commit::Moved`]. As for every commit, a flush makes the
    /// payload durable before the mapping. The former space is reused only after
    /// [`ImageWriter::recycle`]. A place that was never committed is free again after close.
    ///
    /// # Errors
    /// As [`ImageWriter::reserve`].
    fn reserve_move(&self, _block: u64) -> Result<Option<MoveTo>> {
        Ok(Some(MoveTo::Stay))
    }

    /// Moves tables that lie between the blocks (VHDX: sector bitmap blocks) to lower places. Other
    /// threads may read, commit and flush at the same time. The caller must not hold a lock.
    ///
    /// # Errors
    /// `Io`, `Corrupt`.
    fn move_tables(&self) -> Result<()> {
        Ok(())
    }

    /// Like [`ImageWriter::recycle`], but the space of the blocks stays allocated in the file until
    /// [`ImageWriter::close`], because blocks will be moved into it.
    fn recycle_for_moves(&self, generation: u64) {
        self.recycle(generation);
    }

    /// Like [`ImageWriter::begin_compacting`], while other threads read, reserve, commit and flush.
    /// Space that blocks without data keep stays theirs: the caller frees it block by block
    /// ([`ImageWriter::blocks_with_kept_space`]).
    ///
    /// # Errors
    /// As [`ImageWriter::begin_compacting`].
    fn begin_compacting_in_use(&self) -> Result<()> {
        self.begin_compacting()
    }

    /// Some of the blocks from `first_block` on that have no data and keep space, in ascending
    /// order; empty if there are none. [`Commit::Zero`] frees the space of such a block, if the
    /// block still has no data. The caller must not hold a lock.
    ///
    /// # Errors
    /// `Io` when the table cannot be read.
    fn blocks_with_kept_space(&self, _first_block: u64) -> Result<Vec<u64>> {
        Ok(Vec::new())
    }

    /// Frees the places of [`ImageWriter::reserve_move`] that were not committed. No copy to them
    /// may be in flight.
    fn give_up_moves(&self) {}

    /// Cuts free space off the end of the file, while other threads read, reserve, commit and
    /// flush. Quarantined space is kept. Without [`ImageWriter::begin_compacting_in_use`] a file
    /// that was created with room for all its blocks is not cut. The caller must not hold a lock.
    ///
    /// # Errors
    /// `Io`; the space is free then.
    fn cut_free_tail(&self) -> Result<()> {
        Ok(())
    }

    /// Moves the last blocks of the file into gaps before them, for a format whose other programs
    /// expect none. To be called before the [`ImageWriter::close`] after which no one reads the
    /// image: the caller may know former places of blocks. (An image that becomes a parent while it
    /// is in use is closed too, and read on.)
    ///
    /// # Errors
    /// `Io`.
    fn fill_gaps(&self) -> Result<()> {
        Ok(())
    }

    /// Flushes, cuts unused space off the end of the file and leaves the log empty. Must be called
    /// once, when no request is in flight and none will follow.
    fn close(&self) -> Result<()>;
}
