//! A store: bytes at offsets, with a length, holes, and a durability barrier.
//!
//! Many threads share a store. It has no cursor and no cache of its own. Its methods block; images
//! use them for metadata (tables, logs, bitmaps), which is small. Payload goes through an
//! [`Engine`](crate::Engine), which asks the store how its bytes are reached:
//!
//! ```text
//! data_file()      a file: the engine's ring reads and writes it
//! placement()      the files of other stores; see `placement`
//! lane()           no file, but asynchronous completions: the ring polls the lane's descriptor
//! never_blocks()   neither, but methods that never wait (memory): called where the part is started
//! none of them     the methods below, called by a thread of the pool
//! ```
//!
//! In some ranges a store that is not *plain* ([`Store::is_plain`]) shows other bytes than its file
//! or lane holds. The engine asks [`Store::front`] for every part of a transfer to such a store, so
//! that all other ranges still go directly to the file.
//!
//! The durability contract, on which every power-cut argument of the layers above rests: a write
//! that completed before [`Store::sync_data`] was called is durable when `sync_data` returns `Ok`,
//! including the store's length. Nothing else is promised: other writes may become durable earlier,
//! later or never, in any order.

pub use crate::range::{Access, FileRange, Zeroing};

use crate::{
    at_risk::AtRisk,
    lane::Lane,
    lock::LockMode,
    member_traffic::MemberTraffic,
    open::{OpenError, SectorSizes, StoreSnapshot},
    placement::Placement,
};
use std::{fmt, io, os::fd::BorrowedFd, path::Path, sync::Arc, time::SystemTime};

/// Whether `error` means that the store has no room. The bytes that did not fit are unchanged; a
/// smaller write or a later retry may succeed.
pub fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge)
}

/// How the first bytes of a range are reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Front {
    /// Whether the data file or lane holds these bytes as the store shows them, at the same offset.
    pub is_direct: bool,
    /// Number of bytes for which `is_direct` holds: at least 1, at most the length of the range.
    pub len_bytes: u64,
}

/// The open file through which an engine reads and writes a store directly.
#[derive(Debug, Clone, Copy)]
pub struct DataFile<'a> {
    /// The file descriptor.
    pub fd: BorrowedFd<'a>,
    /// Required alignment of offsets, lengths and memory: 1 with the page cache, the device's with
    /// O_DIRECT.
    pub alignment_bytes: u32,
}

/// Bytes at offsets. All methods block; all may be called from any thread at the same time.
///
/// Errors are plain `io::Error`s. The caller adds what it was doing and [`Store::name`].
pub trait Store: Send + Sync + fmt::Debug {
    /// The name to show in messages: for a file, its path.
    fn name(&self) -> &Path;

    /// The store whose file this one shows, for a store that is laid over another. Questions about
    /// the file itself (locks, identity, owner, times, sector sizes, what it occupies) go there,
    /// unless this store answers them. So a layer that is added cannot lose the lock of its file.
    /// Reads, writes and how an engine reaches the bytes are never passed on by default.
    fn beneath(&self) -> Option<&dyn Store> {
        None
    }

    /// Current length in bytes.
    fn len_bytes(&self) -> io::Result<u64>;

    /// Reads `buf.len()` bytes at `offset_bytes`, at any alignment. `UnexpectedEof` if the store
    /// ends before `buf` is full.
    fn read_at(&self, buf: &mut [u8], offset_bytes: u64) -> io::Result<()>;

    /// Writes all of `buf` at `offset_bytes`, at any alignment. Extends the store if necessary.
    fn write_at(&self, buf: &[u8], offset_bytes: u64) -> io::Result<()>;

    /// Truncates or extends the store; the extension reads as zeros.
    fn set_len(&self, len_bytes: u64) -> io::Result<()>;

    /// Whether the store may have this length at all, as far as is known without changing it. Free
    /// space is not considered.
    fn check_len(&self, len_bytes: u64) -> io::Result<()> {
        let _ = len_bytes;
        Ok(())
    }

    /// Allocates space for `range` and extends the store to its end if necessary. Bytes beyond the
    /// old end read as zeros; other bytes keep their value. If the file system cannot preallocate,
    /// the store is only extended.
    fn allocate(&self, range: FileRange) -> io::Result<()>;

    /// Makes `range`, which must lie within the length, read as zeros, by writing zeros if there is
    /// no other way.
    fn zero_range(&self, range: FileRange, how: Zeroing) -> io::Result<()>;

    /// Returns when every write that completed before the call is durable.
    fn sync_data(&self) -> io::Result<()>;

    /// Writes as [`Store::write_at`], and returns when these bytes are durable. Other writes need
    /// not be. By one system call, where the system can.
    fn write_durable_at(&self, buf: &[u8], offset_bytes: u64) -> io::Result<()> {
        self.write_at(buf, offset_bytes)?;
        self.sync_data()
    }

    /// Reports the result of a sync of the data file that did not go through [`Store::sync_data`],
    /// and returns the result to use instead. After one failed sync, earlier writes may be lost
    /// although the next sync succeeds, so a store must keep reporting the failure.
    fn settle_sync(&self, result: io::Result<()>) -> io::Result<()> {
        match self.beneath() {
            Some(store) => store.settle_sync(result),
            None => result,
        }
    }

    /// The file to read and write directly, if there is one. If the store is not plain, only the
    /// ranges that [`Store::front`] calls direct are valid in it.
    fn data_file(&self) -> Option<DataFile<'_>>;

    /// Whether transfers bypass the page cache. A file that does so has an alignment.
    fn bypasses_page_cache(&self) -> bool {
        self.data_file().is_some_and(|file| file.alignment_bytes > 1)
    }

    /// The lane through which requests complete asynchronously, for a store without a data file.
    fn lane(&self) -> Option<Arc<dyn Lane>> {
        None
    }

    /// Where the bytes lie in the files of other stores, for a store without a data file. What has
    /// no place there is read through the lane, if there is one.
    fn placement(&self) -> Option<&dyn Placement> {
        None
    }

    /// The store of a member that [`Store::placement`] names. It stays the same while the number is
    /// in use.
    fn member(&self, _number: u8) -> Option<Arc<dyn Store>> {
        None
    }

    /// Whether the data file or lane holds every byte as the store shows it, at the same offset.
    fn is_plain(&self) -> bool {
        true
    }

    /// How the first bytes of `range`, which is not empty, are reached. Called only for stores that
    /// are not plain.
    fn front(&self, range: FileRange, _access: Access) -> Front {
        Front { is_direct: true, len_bytes: range.len_bytes }
    }

    /// Whether the blocking methods never wait for a device, a network or another process. True for
    /// memory.
    fn never_blocks(&self) -> bool {
        false
    }

    /// Whether the death of this process would undo completed writes. Not for a file: the page
    /// cache has them.
    fn at_risk(&self) -> AtRisk {
        self.beneath().map_or(AtRisk::Never, Store::at_risk)
    }

    /// What the files and devices below the store have done, if it keeps its bytes in several of
    /// them. The figures are of the whole pool, not only of this store.
    fn member_traffic(&self) -> Vec<MemberTraffic> {
        self.beneath().map_or_else(Vec::new, Store::member_traffic)
    }

    /// The first range at or after `offset_bytes` that may hold data; `None` if only holes (which
    /// read as zeros) follow. A store that does not know its holes reports everything as data.
    fn next_data(&self, offset_bytes: u64) -> io::Result<Option<FileRange>> {
        let len_bytes = self.len_bytes()?;
        Ok((offset_bytes < len_bytes).then(|| FileRange { offset_bytes, len_bytes: len_bytes - offset_bytes }))
    }

    /// Shares `range` of `source` into this store at `offset_bytes` without copying (reflink).
    /// `Unsupported` if the file system cannot do that.
    fn clone_range(&self, _source: &dyn Store, _range: FileRange, _offset_bytes: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// As [`Store::sync_data`]. The modification time of the file is durable too, which
    /// [`Store::sync_data`] need not write.
    fn sync_all(&self) -> io::Result<()> {
        self.sync_data()
    }

    /// Sets the modification time of the file, durably. Every later write to the store changes it
    /// again. `Unsupported` if the store is not a file.
    fn set_modified(&self, modified: SystemTime) -> io::Result<()> {
        self.beneath().map_or(Err(io::ErrorKind::Unsupported.into()), |store| store.set_modified(modified))
    }

    /// Device and inode number of a file. Two stores with the same identity are the same object.
    /// `None` if the store is not a file.
    fn identity(&self) -> Option<(u64, u64)> {
        self.beneath()?.identity()
    }

    /// Tells the contents of the store from all others, for a store whose contents never change: an
    /// object that was pushed to a server. An image of it without an identity of its own has this
    /// one.
    fn contents_id(&self) -> Option<[u8; 16]> {
        self.beneath()?.contents_id()
    }

    /// The snapshots of the file that its storage keeps, oldest first. Not those inside an image.
    ///
    /// # Errors
    /// If the storage cannot be asked.
    fn snapshots(&self) -> io::Result<Vec<StoreSnapshot>> {
        self.beneath().map_or_else(|| Ok(Vec::new()), |beneath| beneath.snapshots())
    }

    /// The parts of `range` in which this store may differ from `other`, another state of the same
    /// file: ascending, and not touching. `None` if the storage keeps no record of it.
    ///
    /// # Errors
    /// If the storage cannot be asked.
    fn changed_since(&self, other: &dyn Store, range: FileRange) -> io::Result<Option<Vec<FileRange>>> {
        let _ = (other, range);
        Ok(None)
    }

    /// Whether the inode number of [`Store::identity`] is still that of the file when its file
    /// system is mounted again. Not on FAT, exFAT and some network file systems, which make the
    /// numbers up. A record that outlives the session must not rely on the number there.
    fn keeps_inode(&self) -> bool {
        self.beneath().is_none_or(Store::keeps_inode)
    }

    /// Sector sizes of the underlying device. A file that does not know them reports 512 and 4096.
    fn sector_bytes(&self) -> SectorSizes {
        let unknown = SectorSizes { logical_bytes: 512, physical_bytes: 4096 };
        self.beneath().map_or(unknown, Store::sector_bytes)
    }

    /// Whether the store is a block device, whose length is fixed.
    fn is_block_device(&self) -> bool {
        self.beneath().is_some_and(Store::is_block_device)
    }

    /// Turns an exclusive lock into a shared one: other programs may read the file from now on. The
    /// caller no longer writes to the store.
    fn share_lock(&self) -> io::Result<()> {
        self.beneath().map_or(Ok(()), Store::share_lock)
    }

    /// Takes the lock `mode` instead of the present one. From [`LockMode::Shared`] to
    /// [`LockMode::Exclusive`] there is no moment without the shared lock, so no other program can
    /// write to the file in between. The store itself need not be writable.
    ///
    /// # Errors
    /// [`OpenError::Locked`] with the program that has the file: the present lock stays then.
    fn relock(&self, mode: LockMode) -> Result<(), OpenError> {
        self.beneath().map_or(Ok(()), |store| store.relock(mode))
    }

    /// Gives the file the owner, the group and the permissions of the file of `other`, without bits
    /// that change who runs it. Where the owner cannot be changed, the group is; where neither can,
    /// only the owner's permissions are taken. Works on the open files, whatever their names lead
    /// to. The default is for stores without owners.
    ///
    /// # Errors
    /// The system's error.
    fn take_access_of(&self, other: &dyn Store) -> io::Result<()> {
        self.beneath().map_or(Ok(()), |store| store.take_access_of(other))
    }

    /// The owner, the group and the permissions (12 bits) of the file; `None` for stores that are
    /// not regular files.
    fn access_bits(&self) -> Option<(u32, u32, u32)> {
        self.beneath()?.access_bits()
    }

    /// Tells the store that its file was renamed, for [`Store::name`].
    fn was_renamed(&self, to: &Path) {
        self.beneath().into_iter().for_each(|store| store.was_renamed(to));
    }

    /// Whether the lock requested at opening is held and keeps other programs away.
    fn is_locked(&self) -> bool {
        self.beneath().is_none_or(Store::is_locked)
    }

    /// Share of the store that the page cache holds, estimated, from 0 to 1. A high share means
    /// that reading through the cache spares the disk.
    fn cached_share(&self) -> f64 {
        self.beneath().map_or(0.0, Store::cached_share)
    }

    /// Bytes that the store occupies on disk; the length if that is unknown.
    fn allocated_bytes(&self) -> io::Result<u64> {
        self.beneath().map_or_else(|| self.len_bytes(), Store::allocated_bytes)
    }
}
