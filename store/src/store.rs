//! What a store is: bytes at offsets, with a length, holes, and a barrier.
//!
//! A store is shared by many threads and has no cursor and no cache of its own. Its methods block.
//! They serve the metadata of images (tables, logs, bitmaps), which is little; payload goes through
//! an [`Engine`](crate::Engine), which asks a store how its bytes are reached:
//!
//! ```text
//!   data_file()      a file: the engine's ring drives it
//!   lane()           no file, but completions that come later: the ring waits for the lane's descriptor
//!   never_blocks()   neither, and the methods below do not wait (memory): called where the part is started
//!   none of them     the methods below, in a thread of the pool
//! ```
//!
//! A store that is not *plain* ([`Store::is_plain`]) shows in some ranges something else than its
//! file or lane holds. The engine then asks [`Store::front`] for every part, so that all other
//! ranges still go straight to the file.
//!
//! The durability contract, on which every power-cut argument of the layers above rests: anything
//! written before [`Store::sync_data`] was called, and completed, is durable when it returns `Ok`,
//! the length included. Nothing else is promised, in no order.

use crate::{lane::Lane, open::SectorSizes};
use std::{fmt, io, os::fd::BorrowedFd, path::Path, sync::Arc};

/// Whether a store has no room: what did not fit is as it was, and a smaller piece, or a later try,
/// may fit.
pub fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge)
}

/// How a range becomes zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Zeroing {
    /// Its space stays allocated (as in `FALLOC_FL_ZERO_RANGE`).
    Keep,
    /// Its space may be given back (as in `FALLOC_FL_PUNCH_HOLE`).
    Deallocate,
}

/// A range of a store, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileRange {
    /// First byte.
    pub offset_bytes: u64,
    /// How many bytes.
    pub len_bytes: u64,
}

/// What is to be done to a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Its bytes are read.
    Read,
    /// Its bytes are written, or zeroed.
    Write,
}

/// How the front of a range is reached, and how long that front is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Front {
    /// Whether the data file, or the lane, holds these bytes as the store shows them, at the same
    /// offset.
    pub is_direct: bool,
    /// Bytes for which that is so; at least 1, at most the range.
    pub len_bytes: u64,
}

/// The open file by which payload reaches a store directly.
#[derive(Debug, Clone, Copy)]
pub struct DataFile<'a> {
    /// The descriptor.
    pub fd: BorrowedFd<'a>,
    /// The alignment that offsets, lengths and memory must have: 1 with the page cache, the
    /// device's with O_DIRECT.
    pub alignment_bytes: u32,
}

/// Bytes at offsets. All methods block; all may be called from any thread at the same time.
///
/// Errors are plain `io::Error`s; the caller knows what it was doing and puts that, and
/// [`Store::name`], around them.
pub trait Store: Send + Sync + fmt::Debug {
    /// The name to show in messages: for a file, its path.
    fn name(&self) -> &Path;

    /// Present length in bytes.
    fn len_bytes(&self) -> io::Result<u64>;

    /// Fills `buf` from `offset_bytes`. Any alignment. `UnexpectedEof` where the store ends before
    /// `buf` is full.
    fn read_at(&self, buf: &mut [u8], offset_bytes: u64) -> io::Result<()>;

    /// Writes all of `buf` at `offset_bytes`, growing the store if need be. Any alignment.
    fn write_at(&self, buf: &[u8], offset_bytes: u64) -> io::Result<()>;

    /// Cuts or extends; what is added reads as zeros.
    fn set_len(&self, len_bytes: u64) -> io::Result<()>;

    /// Sees to it that `range` has space and that the store is at least as long as its end. Bytes
    /// that were beyond the old end read as zeros; others keep their value. Where the file system
    /// cannot reserve, this extends only.
    fn allocate(&self, range: FileRange) -> io::Result<()>;

    /// Makes `range` (which must lie within the length) read as zeros, writing them where there is
    /// no other way.
    fn zero_range(&self, range: FileRange, how: Zeroing) -> io::Result<()>;

    /// Returns when everything that was completed before the call is durable.
    fn sync_data(&self) -> io::Result<()>;

    /// Takes note of how a sync of the data file ended that was not made by [`Store::sync_data`],
    /// and says how it counts. A store whose file has once failed to sync may have lost what was
    /// written before, though the next sync succeeds.
    fn settle_sync(&self, result: io::Result<()>) -> io::Result<()> {
        result
    }

    /// The file to drive directly, if there is one. Of a store that is not plain it holds only what
    /// [`Store::front`] calls direct.
    fn data_file(&self) -> Option<DataFile<'_>>;

    /// The lane by which requests are completed later, for a store without a data file.
    fn lane(&self) -> Option<Arc<dyn Lane>> {
        None
    }

    /// Whether the data file, or the lane, holds every byte as the store shows it, at the same
    /// offset.
    fn is_plain(&self) -> bool {
        true
    }

    /// How the front of `range`, which is not empty, is reached. Asked of stores that are not
    /// plain.
    fn front(&self, range: FileRange, _access: Access) -> Front {
        Front { is_direct: true, len_bytes: range.len_bytes }
    }

    /// Whether the blocking methods never wait for a device, a network or another process: true for
    /// memory.
    fn never_blocks(&self) -> bool {
        false
    }

    /// The first range at or after `offset_bytes` that may hold data (holes read as zeros); `None`
    /// when all that follows is holes. A store that cannot tell calls everything data.
    fn next_data(&self, offset_bytes: u64) -> io::Result<Option<FileRange>> {
        let len_bytes = self.len_bytes()?;
        Ok((offset_bytes < len_bytes).then(|| FileRange { offset_bytes, len_bytes: len_bytes - offset_bytes }))
    }

    /// Shares `range` of `source` into this store at `offset_bytes` without copying (reflink).
    /// `Unsupported` where the file systems cannot.
    fn clone_range(&self, _source: &dyn Store, _range: FileRange, _offset_bytes: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Whether two stores are the same object (device and inode number of a file).
    fn identity(&self) -> Option<(u64, u64)> {
        None
    }

    /// Sector sizes of what is below; those of a file unless a store knows better.
    fn sector_bytes(&self) -> SectorSizes {
        SectorSizes { logical_bytes: 512, physical_bytes: 4096 }
    }

    /// Whether it is a block device, whose length is fixed.
    fn is_block_device(&self) -> bool {
        false
    }

    /// Whether the lock that was asked for when it was opened keeps other programs away.
    fn is_locked(&self) -> bool {
        true
    }

    /// About how much of it the page cache holds, from 0 to 1: whether reading through the cache
    /// spares the disk.
    fn cached_share(&self) -> f64 {
        0.0
    }

    /// How many bytes the store really occupies, where it can tell.
    fn allocated_bytes(&self) -> io::Result<u64> {
        self.len_bytes()
    }
}
