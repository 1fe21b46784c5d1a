//! What every image format offers: the mapping for reading, and the life of a block for writing.
//!
//! A block's life, as the disk above drives it:
//!
//! ```text
//!                 reserve()                    payload written by the engine            commit(Sectors | Whole)
//!   Absent/Zero ────────────▶ space reserved ──────────────────────────────▶ ... ──────────────────▶ Partial / Data
//!        ▲                                                                                              │
//!        └──────────────────────────────── commit(Zero | Discard) ◀────────────────────────────────────┘
//!                                    (space is quarantined until flush + recycle)
//! ```
//!
//! `commit` changes only memory; [`ImageWriter::flush`] makes it durable: first the payload, then
//! the mapping that shows it. Locks: an image has one mutex over its tables and its space; the disk
//! above calls `reserve` and `commit` under its own map lock (order: map lock, then image lock),
//! the flusher calls `flush` without the map lock.

use crate::error::{ImageError, Result};
use diskwright_store::{IoBuf, Store};
use std::{fmt, ops::Range, sync::Arc};
use uuid::Uuid;

/// A file format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    /// Bytes as they are.
    Raw,
    /// VHD, as in the Virtual Hard Disk Image Format Specification 1.0.
    Vhd,
    /// VHDX, as in MS-VHDX.
    Vhdx,
}

/// How an image holds its blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DiskType {
    /// All space from the start.
    Fixed,
    /// Space on first write.
    Dynamic,
    /// Space on first write; the rest is the parent's.
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

/// Whether a VHDX log holds anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogState {
    /// The format has no log.
    None,
    /// Nothing to replay.
    Clean,
    /// Entries were replayed: in memory for a read-only open, on disk for a writable one.
    Replayed {
        /// How many.
        entries: u32,
    },
}

/// How a child names its parent, as stored in the child. Strings are as found, backslashes
/// included.
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
    /// The identity the parent must have: VHDX `parent_linkage` (its DataWriteGuid), VHD parent
    /// unique id.
    pub linkage: Uuid,
    /// VHDX `parent_linkage2`: another identity that is accepted.
    pub linkage2: Option<Uuid>,
    /// VHD: modification time of the parent, seconds since 2000-01-01 00:00 UTC.
    pub modified_seconds: Option<u32>,
    /// VHD: where in the child's file that stands. Only told, never stored.
    pub modified_offset_bytes: Option<u64>,
}

/// What an image says of itself. Never changes while it is open.
#[derive(Debug, Clone)]
pub struct ImageInfo {
    /// Its format.
    pub format: Format,
    /// Its type.
    pub disk_type: DiskType,
    /// Virtual size in bytes, when it was opened: [`Image::size_bytes`] is the present one.
    pub size_bytes: u64,
    /// Payload block; for raw and fixed VHD, where there is none, a power of two by which the map
    /// may be cut.
    pub block_bytes: u64,
    /// Whether `block_bytes` is a property of the file (false for raw and fixed VHD).
    pub has_blocks: bool,
    /// Virtual logical sector.
    pub logical_sector_bytes: u32,
    /// Virtual physical sector.
    pub physical_sector_bytes: u32,
    /// Who wrote it, as text.
    pub creator: String,
    /// VHD unique id; VHDX virtual disk id (page 83 data).
    pub disk_id: Option<Uuid>,
    /// The identity by which children name it: VHD unique id; VHDX DataWriteGuid. As it was when
    /// opened.
    pub linkage_id: Option<Uuid>,
    /// VHDX FileWriteGuid.
    pub file_write_id: Option<Uuid>,
    /// VHD: creation time stamp of the footer, seconds since 2000-01-01.
    pub created_seconds: Option<u32>,
    /// Its parent, for a differencing image.
    pub parent: Option<ParentLink>,
    /// State of the log when opened.
    pub log: LogState,
    /// Largest power of two (capped at 1 MiB) that divides the file offset of all payload that
    /// exists or will be made: with O_DIRECT it must reach the device's alignment.
    pub payload_alignment_bytes: u32,
    /// Peculiarities worth telling (old footer, repaired from the copy, tail missing ...), one
    /// sentence each.
    pub remarks: Vec<String>,
}

/// Where a block's bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockState {
    /// This layer knows nothing of it: ask the parent; zeros where there is none.
    Absent,
    /// Reads as zeros, whatever the parent has (ZERO, UNMAPPED, UNDEFINED).
    Zero,
    /// All bytes are at this offset of a store.
    Data {
        /// Index into [`Image::stores`].
        store: u16,
        /// First byte in the store.
        offset_bytes: u64,
    },
    /// Some sectors are at this offset, the others are the parent's; [`Image::sector_bitmap`] says
    /// which. An image may say `Partial` where the bitmap turns out to be full or empty.
    Partial {
        /// Index into [`Image::stores`].
        store: u16,
        /// First byte in the store.
        offset_bytes: u64,
    },
    /// All bytes are in the file, encoded (compressed): [`Image::read_packed`] decodes them. A
    /// write to the block takes new space and stores the whole block there.
    Packed,
    /// The block's table entry cannot be right, so its bytes are lost to this image;
    /// [`Image::damage`] says why. Every read of the block fails with that error. Other blocks are
    /// not affected.
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

/// Which logical sectors of a block are this layer's own. Bit i of word i/64, least significant
/// first, whatever the file has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SectorBitmap {
    /// The bits, 64 a word.
    pub words: Vec<u64>,
    /// How many of them count.
    pub sectors: u32,
    /// Bytes that one bit stands for (the logical sector size).
    pub sector_bytes: u32,
}

impl SectorBitmap {
    /// All bits clear.
    pub fn empty(sectors: u32, sector_bytes: u32) -> Self {
        Self { words: vec![0; sectors.div_ceil(64) as usize], sectors, sector_bytes }
    }

    /// Whether `sector` is set. Sectors beyond the end are not.
    pub fn get(&self, sector: u32) -> bool {
        sector < self.sectors && self.words.get(sector as usize / 64).is_some_and(|word| word >> (sector % 64) & 1 == 1)
    }

    /// Sets `count` bits from `first`; those beyond the end are ignored.
    pub fn set(&mut self, first: u32, count: u32) {
        for sector in first..first.saturating_add(count).min(self.sectors) {
            self.words[sector as usize / 64] |= 1 << (sector % 64);
        }
    }

    /// How many bits are set.
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

    /// The run that begins at `sector`: its value, and the first sector that differs (or the end).
    pub fn run_at(&self, sector: u32) -> (bool, u32) {
        let value = self.get(sector);
        let mut end = sector + 1;
        while end < self.sectors && self.get(end) == value {
            end += 1;
        }
        (value, end.min(self.sectors))
    }
}

/// Space for a block that had none.
#[derive(Debug, Clone)]
pub struct Reservation {
    /// Index into [`Image::stores`].
    pub store: u16,
    /// Where the block's payload goes. The whole range exists in the store and reads as zeros,
    /// unless the block was `Partial` or `Data` already.
    pub offset_bytes: u64,
    /// Bytes that must be written at an offset of the same store together with the first payload
    /// (VHD: the block's bitmap). Given to the first caller only. When they are written, the disk
    /// calls [`ImageWriter::initialised`].
    pub init: Option<(u64, Arc<IoBuf>)>,
}

/// A change of a block's mapping, made when its payload is in place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Commit {
    /// Every byte of the block is right (written, or zero because the space was fresh).
    Whole,
    /// These sectors of the block are right now; the others remain as they were.
    Sectors {
        /// First logical sector, counted from the block's beginning.
        first: u32,
        /// How many.
        count: u32,
    },
    /// The block reads as zeros; its space is given up.
    Zero,
    /// The block was discarded: it reads as zeros here too, and its space is given up.
    Discard,
}

/// One open image. Shared by threads.
pub trait Image: Send + Sync + fmt::Debug {
    /// What it is.
    fn info(&self) -> &ImageInfo;

    /// The files that hold its bytes. The first one has the tables, if the format has any. At least
    /// one, at most 65,535; the list never changes while the image is open.
    fn stores(&self) -> &[Arc<dyn Store>];

    /// The first of [`Image::stores`].
    fn store(&self) -> &Arc<dyn Store> {
        &self.stores()[0]
    }

    /// The states of the blocks `first_block ..`, one for each element of `out`. Blocks beyond the
    /// disk's end are `Absent`. Offsets are checked: inside the file and clear of the image's
    /// metadata. An entry that cannot be right makes its block [`BlockState::Damaged`] and no
    /// other.
    ///
    /// # Errors
    /// `Io` when the table cannot be read.
    fn block_states(&self, first_block: u64, out: &mut [BlockState]) -> Result<()>;

    /// The first of the blocks `first_block .. end_block` that may be other than `Absent`, or
    /// `None` where there is none. Blocks beyond the disk's end are `Absent`. An image that cannot
    /// tell says the first. For walks over disks that are nearly empty: the time follows what is
    /// there, not the disk's size.
    ///
    /// # Errors
    /// `Io` when the table cannot be read.
    fn next_block(&self, first_block: u64, end_block: u64) -> Result<Option<u64>> {
        Ok((first_block < end_block).then_some(first_block))
    }

    /// Why `block` is [`BlockState::Damaged`]: the structure, its offset, what was found and what
    /// was expected. Also of a `Partial` block whose bitmap cannot be found.
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

    /// Decodes bytes of a [`BlockState::Packed`] block into `out`, from `within_bytes` after the
    /// block's first byte. Blocks the calling thread, for as long as reading and decoding take.
    /// Formats without such blocks keep this default.
    ///
    /// # Errors
    /// `Io`; `Corrupt` for a block that does not decode to its length.
    fn read_packed(&self, block: u64, _within_bytes: u64, _out: &mut [u8]) -> Result<()> {
        Err(ImageError::Unsupported {
            path: self.store().name().to_owned(),
            what: format!("a compressed block (block {block}) in an image of this format"),
            hint: "run `diskwright check` on the file".into(),
        })
    }

    /// Virtual size in bytes: as [`ImageInfo::size_bytes`] when the image was opened, and what
    /// [`ImageWriter::resize`] made of it since.
    fn size_bytes(&self) -> u64 {
        self.info().size_bytes
    }

    /// The bitmap of a block that is `Partial`.
    ///
    /// # Errors
    /// `Io`; `Corrupt` where the file cannot say where the bitmap is: then the block is lost, and
    /// no other.
    fn sector_bitmap(&self, block: u64) -> Result<SectorBitmap>;

    /// The writing side; `None` when opened read-only.
    fn writer(&self) -> Option<&dyn ImageWriter>;
}

/// The writing side of an image.
pub trait ImageWriter: Send + Sync {
    /// Called before the first guest-visible write of this open; later calls do nothing. VHDX: new
    /// FileWriteGuid and DataWriteGuid, durable on return. (A reservation may call the
    /// FileWriteGuid half by itself.)
    fn begin_writing(&self) -> Result<()>;

    /// Does what [`ImageWriter::reserve`] and [`ImageWriter::commit`] of these blocks had to wait
    /// for when they said `None`: reads tables, makes room in the file. Waits for the disk, so the
    /// caller holds no lock. Then ask again: what was prepared may not have been all, and another
    /// thread may have used it up.
    ///
    /// # Errors
    /// `Io`, with `StorageFull` when the file cannot grow; `Corrupt` for a table in which no space
    /// can be found. Of a full file system nothing is kept.
    fn prepare(&self, blocks: Range<u64>) -> Result<()>;

    /// Space for a block. Repeated calls for a block give the same place until it is committed or
    /// given up. Never touches the store. `None` says that it would have to wait for the disk: call
    /// [`ImageWriter::prepare`], without locks, and ask again.
    ///
    /// # Errors
    /// `Poisoned`; `Corrupt` for the block's entry. The image is as it was.
    fn reserve(&self, block: u64) -> Result<Option<Reservation>>;

    /// [`ImageWriter::reserve`], with the waiting that it takes. The caller holds no lock.
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

    /// [`ImageWriter::commit`], with the waiting that it takes. The caller holds no lock.
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

    /// The `init` bytes of a reservation have been written.
    fn initialised(&self, block: u64);

    /// Changes the mapping, in memory. Returns the block's new state; `None` as
    /// [`ImageWriter::reserve`] does.
    ///
    /// # Errors
    /// `Unsupported` for `Zero` and `Discard` where [`ImageWriter::can_store_zero`] is false.
    fn commit(&self, block: u64, change: Commit) -> Result<Option<BlockState>>;

    /// Whether [`Commit::Sectors`] records which sectors of a block are this layer's own. Where it
    /// does not, a block that is written in part must be given all its sectors first.
    fn tracks_sectors(&self) -> bool;

    /// Makes the virtual disk larger; what is added is `Absent`, or reads as zeros. Durable on
    /// return; a power cut meanwhile leaves the old size or the new one. Blocks that exist stay
    /// where they are. Other threads may reserve, commit and flush meanwhile. The caller holds no
    /// lock, and sees to it that a parent is no larger than the disk: its bytes behind the old end
    /// would show.
    ///
    /// # Errors
    /// `Unsupported` where the image cannot grow so far, or would have to shrink; `Io`: the size is
    /// the old one, unless a sync failed; `Corrupt` for a table in which no space can be found.
    fn resize(&self, size_bytes: u64) -> Result<()> {
        Err(ImageError::Unsupported {
            path: Default::default(),
            what: format!("a new size of {size_bytes} bytes for an open image of this format"),
            hint: "convert the disk to an image of the size that is wanted".into(),
        })
    }

    /// Whether a block can be made to read as zeros without payload (false for a differencing VHD).
    fn can_store_zero(&self) -> bool;

    /// Bounds the memory for table pages and sector bitmaps to about `bytes`, those on their way to
    /// the file included. An image keeps a minimum of some hundred KiB, and its own bound unless
    /// this is called. May be called at any time. Images without tables keep this default, which
    /// does nothing.
    fn limit_tables(&self, _bytes: u64) {}

    /// Whether anything committed is not yet durable.
    fn is_dirty(&self) -> bool;

    /// Whether anything can still be called durable. A sync that fails in a reservation ends that,
    /// too, though no flush was asked for.
    ///
    /// # Errors
    /// [`ImageError::Poisoned`] once a sync of the store has failed.
    fn check_syncs(&self) -> Result<()>;

    /// Makes everything durable that was committed, and all payload whose write had completed,
    /// before the call. Concurrent callers share the work. After a failure of the store's sync,
    /// every later flush fails: what a failed fsync dropped cannot be known to be durable.
    fn flush(&self) -> Result<()>;

    /// A number that grows with every `Zero` or `Discard` that gave up space.
    fn freed_generation(&self) -> u64;

    /// Space given up at generations up to `generation` may be used again: its removal is durable
    /// and no request that could still reach it is in flight. The caller has made sure of both. The
    /// file system gets its blocks back, where it can; that waits for the disk, so the caller holds
    /// no lock.
    fn recycle(&self, generation: u64);

    /// Flushes, gives back slack at the file's end, leaves the log clean. Called once, when no
    /// request is in flight and none will follow.
    fn close(&self) -> Result<()>;
}

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Severity {
    /// Worth knowing; the disk is sound.
    Note,
    /// Space in the file that nothing refers to.
    Leak,
    /// Wrong: reads or writes may fail or give wrong bytes.
    Corrupt,
}

/// One thing that `check` found.
#[derive(Debug, Clone)]
pub struct Finding {
    /// How bad.
    pub severity: Severity,
    /// Where in the file.
    pub offset_bytes: u64,
    /// What was found and what was expected.
    pub message: String,
}

/// All that `check` found in one image.
#[derive(Debug, Clone, Default)]
pub struct CheckReport {
    /// In order of offset.
    pub findings: Vec<Finding>,
    /// Payload blocks that have space.
    pub allocated_blocks: u64,
    /// Payload blocks of the virtual disk.
    pub total_blocks: u64,
    /// Bytes that nothing refers to.
    pub leaked_bytes: u64,
}

impl CheckReport {
    /// The worst severity, or `None` when nothing was found.
    pub fn worst(&self) -> Option<Severity> {
        self.findings.iter().map(|finding| finding.severity).max()
    }
}

/// What to create.
#[derive(Debug, Clone)]
pub struct CreateOptions {
    /// Type.
    pub disk_type: DiskType,
    /// Virtual size in bytes, when it was opened: [`Image::size_bytes`] is the present one.
    pub size_bytes: u64,
    /// Payload block; `None` for the format's default of 2 MiB.
    pub block_bytes: Option<u32>,
    /// Virtual logical sector: 512 or 4096 (VHD: 512 only).
    pub logical_sector_bytes: u32,
    /// Virtual physical sector: 512 or 4096.
    pub physical_sector_bytes: u32,
    /// The parent's link, for a differencing image.
    pub parent: Option<ParentLink>,
    /// Reserve the space of all blocks now, so that the file cannot run out of it. Blocks of a
    /// dynamic disk stay unmapped; a fixed disk has its whole length in any case, and consists of
    /// holes without this.
    pub preallocate: bool,
    /// The unique id to give, or `None` for a new one (tests give one).
    pub disk_id: Option<Uuid>,
}
