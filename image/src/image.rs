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
    devices::{DeviceOptions, PHYSICAL_MAPPING},
    error::{ImageError, Result},
    identity::LinkageId,
    inner::{InternalBitmap, InternalSnapshot},
};
use diskwright_store::{IoBuf, Store};
use std::{fmt, ops::Range, sync::Arc};
use uuid::Uuid;

/// A file format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    /// The bytes of the disk, without any metadata.
    Raw,
    /// VHD, as in the Virtual Hard Disk Image Format Specification 1.0.
    Vhd,
    /// VHDX, as in MS-VHDX.
    Vhdx,
    /// qcow2, as in QEMU's specification.
    Qcow2,
    /// VDI, VirtualBox's format.
    Vdi,
    /// VMDK, as in VMware's Virtual Disk Format 5.0.
    Vmdk,
}

impl Format {
    /// All formats.
    pub const ALL: &'static [Self] = &[Self::Raw, Self::Vhd, Self::Vhdx, Self::Vmdk, Self::Qcow2, Self::Vdi];
}

/// How an image allocates space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DiskType {
    /// All blocks have space from the start.
    Fixed,
    /// A block gets space on its first write.
    Dynamic,
    /// A block gets space on its first write. Sectors that were never written read the parent's
    /// data.
    Differencing,
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.driver().name)
    }
}

impl fmt::Display for DiskType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DiskType::Fixed => "fixed",
            DiskType::Dynamic => "dynamic",
            DiskType::Differencing => "differencing",
        })
    }
}

/// State of a VHDX log when the image was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogState {
    /// The format has no log.
    None,
    /// The log is empty.
    Clean,
    /// Entries were replayed: in memory for a read-only open, on disk for a writable one.
    Replayed {
        /// Number of entries.
        entries: u32,
    },
}

/// How a child names its parent, as stored in the child. Paths are not converted: they contain the
/// backslashes that the file has. An empty path counts as no path.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ParentLink {
    /// Path relative to the child's folder (`relative_path`; W2ru).
    pub relative_path: Option<String>,
    /// Path with a volume GUID (`volume_path`).
    pub volume_path: Option<String>,
    /// Absolute path (`absolute_win32_path`; W2ku).
    pub absolute_path: Option<String>,
    /// File name of the parent (VHD header).
    pub name: Option<String>,
    /// VDI: the id of the parent's file (`uuidLinkage`), by which the parent is found. Other
    /// contents of that file ([`ParentLink::linkage`]) are no proof that it is not the parent:
    /// VirtualBox keeps the former id when it merges a snapshot.
    pub file_id: Option<Uuid>,
    /// The identity that the parent must have. VHDX: `parent_linkage`, the parent's DataWriteGuid.
    /// VHD: the parent's unique id. VMDK: `parentCID`. VDI: `uuidParentModify`. `None` where the
    /// format records only the parent's path: then any file at that path is the parent.
    pub linkage: Option<LinkageId>,
    /// A second identity that is accepted, which a merge records (VHDX `parent_linkage2`).
    pub linkage2: Option<LinkageId>,
    /// The format of the parent; `None` for the format of the child.
    pub format: Option<Format>,
    /// qcow2: the parent has all data of this image, which is only to be removed. Formats with
    /// identities record that by them.
    pub is_merged: bool,
    /// VHD: modification time of the parent, seconds since 2000-01-01 00:00 UTC.
    pub modified_seconds: Option<u32>,
    /// VHD: file offset of `modified_seconds` in the child. Set when read, ignored when creating.
    pub modified_offset_bytes: Option<u64>,
}

impl ParentLink {
    /// Whether an image with this identity is the parent.
    pub fn accepts(&self, found: Option<LinkageId>) -> bool {
        self.linkage.is_none() || found.is_some() && (found == self.linkage || found == self.linkage2)
    }

    /// Whether the link means an image with these ids: that of its file (`disk_id`), which alone
    /// decides where the child records it, and that of its contents.
    pub fn names(&self, disk_id: Option<Uuid>, linkage: Option<LinkageId>) -> bool {
        if self.file_id.is_some() { self.file_id == disk_id } else { self.accepts(linkage) }
    }

    /// Whether a path or the name contains the character NUL, which ends a string for many readers.
    pub(crate) fn has_nul(&self) -> bool {
        let texts = [&self.relative_path, &self.volume_path, &self.absolute_path, &self.name];
        texts.into_iter().flatten().any(|text| text.contains('\0'))
    }
}

/// Description of an image. Does not change while the image is open.
#[derive(Debug, Clone)]
pub struct ImageInfo {
    /// The file format.
    pub format: Format,
    /// The allocation type.
    pub disk_type: DiskType,
    /// Virtual size in bytes when the image was opened. The current size is [`Image::size_bytes`].
    pub size_bytes: u64,
    /// Size of a payload block in bytes. Raw disks and fixed VHDs have no blocks: there it is a
    /// power of two by which the disk's map is cut.
    pub block_bytes: u64,
    /// Whether `block_bytes` is stored in the file (false for raw and fixed VHD).
    pub has_blocks: bool,
    /// Logical sector of the virtual disk, in bytes.
    pub logical_sector_bytes: u32,
    /// Physical sector of the virtual disk, in bytes.
    pub physical_sector_bytes: u32,
    /// The program that created the file. Empty for raw and VMDK.
    pub creator: String,
    /// The kind of image within the format, as the file spells it (VMDK: `monolithicSparse`).
    pub subformat: Option<String>,
    /// VHD unique id; VHDX virtual disk id (page 83 data); VDI `uuidCreate`.
    pub disk_id: Option<Uuid>,
    /// The identity by which children refer to this image, as of the open: VHD unique id, VHDX
    /// DataWriteGuid, VMDK CID, VDI `uuidModify`. The current identity is [`Image::linkage_id`].
    pub linkage_id: Option<LinkageId>,
    /// VHDX FileWriteGuid.
    pub file_write_id: Option<Uuid>,
    /// VHD: creation time stamp of the footer, seconds since 2000-01-01.
    pub created_seconds: Option<u32>,
    /// Link to the parent as of the open; `None` unless the image is differencing. The current link
    /// is [`Image::parent_link`].
    pub parent: Option<ParentLink>,
    /// State of the log when opened.
    pub log: LogState,
    /// Largest power of two, at most 1 MiB, that divides the file offset of all existing and future
    /// payload. O_DIRECT needs at least the device's alignment.
    pub payload_alignment_bytes: u32,
    /// Peculiarities that the user should know, one sentence each: a short footer, a damaged
    /// structure whose copy was used, a missing tail ...
    pub remarks: Vec<String>,
    /// Those of the remarks after which a read may return something else than the disk's data: the
    /// structures say two things about the size or the parent. Every open of a chain warns of them.
    pub doubts: Vec<String>,
}

impl ImageInfo {
    /// Why no image may have this one as its parent; `None` if it may.
    pub fn refusal_as_parent(&self) -> Option<&'static str> {
        let is_physical = self.subformat.as_ref().is_some_and(|kind| kind.eq_ignore_ascii_case(PHYSICAL_MAPPING));
        is_physical.then_some("it maps a device in physical compatibility, which excludes snapshots and children")
    }
}

/// Where the bytes of a block are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockState {
    /// This layer has no data: the block reads the parent's data, or zeros without a parent.
    Absent,
    /// The block reads as zeros and hides the parent's data (ZERO, UNMAPPED, UNDEFINED).
    Zero,
    /// All bytes of the block are at this offset of a store.
    Data {
        /// Index into [`Image::stores`].
        store: u16,
        /// Offset of the block's first byte.
        offset_bytes: u64,
    },
    /// Some sectors are at this offset, the others read the parent's data; [`Image::sector_bitmap`]
    /// says which. The bitmap of a `Partial` block may turn out to be full or empty.
    Partial {
        /// Index into [`Image::stores`].
        store: u16,
        /// Offset of the block's first byte.
        offset_bytes: u64,
    },
    /// As [`BlockState::Data`], but a snapshot in the file has the same bytes, so they are not
    /// overwritten: a write to the block allocates new space and stores the whole block there. Only
    /// of images that are open for writing, and only where [`Image::shares_blocks`] says so.
    Shared {
        /// Index into [`Image::stores`].
        store: u16,
        /// Offset of the block's first byte.
        offset_bytes: u64,
    },
    /// All bytes are in the file, compressed: [`Image::read_compressed`] decompresses them. A write
    /// to the block allocates new space and stores the whole block there.
    Compressed,
    /// The block's table entry is invalid, so the block's data cannot be found. [`Image::damage`]
    /// says why. Every read of the block fails with that error. Other blocks are not affected.
    Damaged,
}

impl BlockState {
    /// [`BlockState::Data`] at `offset_bytes` of the image's first store.
    pub fn data(offset_bytes: u64) -> Self {
        Self::Data { store: 0, offset_bytes }
    }

    /// [`BlockState::Partial`] at `offset_bytes` of the image's first store.
    pub fn partial(offset_bytes: u64) -> Self {
        Self::Partial { store: 0, offset_bytes }
    }
}

/// Which logical sectors of a block have data in this layer. Sector i is bit i % 64 of word i / 64,
/// counted from the least significant bit, whatever the bit order in the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SectorBitmap {
    /// The bits, 64 in each word.
    pub words: Vec<u64>,
    /// Number of valid bits.
    pub sectors: u32,
    /// Logical sector size in bytes: the bytes that one bit stands for.
    pub sector_bytes: u32,
}

impl SectorBitmap {
    /// All bits clear.
    pub fn empty(sectors: u32, sector_bytes: u32) -> Self {
        Self { words: vec![0; sectors.div_ceil(64) as usize], sectors, sector_bytes }
    }

    /// Whether the bit of `sector` is set. False for sectors beyond the end.
    pub fn get(&self, sector: u32) -> bool {
        sector < self.sectors && self.words.get(sector as usize / 64).is_some_and(|word| word >> (sector % 64) & 1 == 1)
    }

    /// Sets `count` bits from `first`; those beyond the end are ignored.
    pub fn set(&mut self, first: u32, count: u32) {
        for sector in first..first.saturating_add(count).min(self.sectors) {
            self.words[sector as usize / 64] |= 1 << (sector % 64);
        }
    }

    /// Number of set bits.
    pub fn count(&self) -> u32 {
        (0..self.sectors)
            .step_by(64)
            .zip(&self.words)
            .map(|(first, word)| {
                let valid = (self.sectors - first).min(64);
                (word & (u64::MAX >> (64 - valid))).count_ones()
            })
            .sum()
    }

    /// Whether every bit is set.
    pub fn is_full(&self) -> bool {
        self.count() == self.sectors
    }

    /// Whether no bit is set.
    pub fn is_empty(&self) -> bool {
        self.count() == 0
    }

    /// The run of equal bits that begins at `sector`: its value, and the first sector after the
    /// run.
    pub fn run_at(&self, sector: u32) -> (bool, u32) {
        let value = self.get(sector);
        let mut end = sector + 1;
        while end < self.sectors && self.get(end) == value {
            end += 1;
        }
        (value, end.min(self.sectors))
    }
}

/// Space reserved for a block.
#[derive(Debug, Clone)]
pub struct Reservation {
    /// Index into [`Image::stores`].
    pub store: u16,
    /// Offset of the block's payload. The whole range exists in the store. The range reads as zeros
    /// unless the block was `Partial` or `Data` before.
    pub offset_bytes: u64,
    /// Bytes to write at an offset of the same store together with the first payload (VHD: the
    /// block's sector bitmap). Only the first reservation of a block returns them. When they are
    /// written, the disk calls [`ImageWriter::initialised`].
    pub init: Option<(u64, Arc<IoBuf>)>,
}

/// A change of a block's mapping. Committed when the payload is in place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Commit {
    /// The whole block has its data (written, or zero because the space was fresh).
    Whole,
    /// These sectors have their data now. The other sectors keep their state.
    Sectors {
        /// First logical sector, counted from the start of the block.
        first: u32,
        /// Number of logical sectors.
        count: u32,
    },
    /// The block reads as zeros. Its space is freed.
    Zero,
    /// The block was discarded. Its space is freed, and here too the block reads as zeros.
    Discard,
    /// The block has no data in this layer any more: it reads the parent's data, or zeros if there
    /// is no parent. Its space is freed.
    Absent,
    /// The block's payload was copied to the place of [`ImageWriter::reserve_move`]. The block
    /// keeps its state and its sectors. Its former space is freed.
    Moved,
}

/// A lower place in the file for a block that has space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MovePlace {
    /// Index into [`Image::stores`].
    pub store: u16,
    /// Present offset of the block's payload.
    pub from_bytes: u64,
    /// Offset to which the payload is copied. The range may hold stale data.
    pub to_bytes: u64,
    /// Length of the payload: the block's length, or less for the last block of some files.
    pub len_bytes: u64,
}

/// Where a block can be moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MoveTo {
    /// No free space lies below the block, or the block has no space.
    Stay,
    /// This place is reserved for the block.
    Place(MovePlace),
}

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
    /// anything is changed. The present size is no change.
    ///
    /// # Errors
    /// As [`ImageWriter::resize`].
    fn check_growth(&self, _size_bytes: u64) -> Result<()> {
        Ok(())
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
    /// expect none. To be called before the [`ImageWriter::close`] after which nobody reads the
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

/// Properties of a new image.
#[derive(Debug, Clone)]
pub struct CreateOptions {
    /// The allocation type.
    pub disk_type: DiskType,
    /// Virtual size in bytes.
    pub size_bytes: u64,
    /// Size of a payload block in bytes; `None` for the default of 2 MiB.
    pub block_bytes: Option<u32>,
    /// Logical sector of the virtual disk in bytes: 512 or 4096 (VHD: 512 only).
    pub logical_sector_bytes: u32,
    /// Physical sector of the virtual disk in bytes: 512 or 4096.
    pub physical_sector_bytes: u32,
    /// Link to the parent. Required for a differencing image, forbidden for other types.
    pub parent: Option<ParentLink>,
    /// Allocate the space of all blocks now, so that later writes cannot fail for lack of space.
    /// Blocks of a dynamic disk stay unmapped. A fixed disk always has its full file length;
    /// without this option the file is sparse.
    pub preallocate: bool,
    /// The disk's unique id; `None` for a random one.
    pub disk_id: Option<Uuid>,
    /// What only some formats know.
    pub own: FormatOptions,
}

/// Properties of a new image that only some formats know. A format refuses by name what it does not
/// know.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FormatOptions {
    /// The kind of image within the format, as qemu-img names it: `twoGbMaxExtentFlat`.
    pub subformat: Option<String>,
    /// The file name that the image will have. Names of further files derive from it. Empty where
    /// the format has only one file and does not record its name.
    pub file_name: String,
    /// The device that the image maps, for the kinds that map one.
    pub device: Option<DeviceOptions>,
}
