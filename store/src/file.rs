//! A store on a file or a block device.
//!
//! There are up to two descriptors:
//!
//! ```text
//!   meta     page cache, carries the lock       metadata and parents; resizing, holes, syncing
//!   direct   O_DIRECT, opened on first use      payload, through `data_file`;
//!                                               all writes of a writable file
//! ```
//!
//! With [`CacheMode::PageCache`], `meta` does everything. With [`CacheMode::Direct`], a read-only
//! file still reads its metadata through the page cache; otherwise every image of a chain would
//! read the same tables from the disk again. A *writable* O_DIRECT file must not: as long as an
//! inode has pages in the cache, the kernel hands the completion of each O_DIRECT write to a worker
//! thread to invalidate them, which costs more than the write. There the metadata uses the O_DIRECT
//! descriptor too, and the few pages that must pass through the cache (see `direct`) are dropped
//! from it at the next sync.
//!
//! If a file system does not support O_DIRECT (tmpfs), the page cache is used;
//! [`FileStore::cache_mode`] returns the mode in effect.
//!
//! The locks of `direct` are the only ones here; the kernel guards everything else. `open` opens
//! files, `file/zeroing.rs` zeroes ranges of them.
//!
//! Once a sync has failed with pages in the cache, every later sync fails. The kernel drops the
//! pages that it could not write and reports that only once, perhaps to another thread (QEMU does
//! the same).

mod names;
mod zeroing;

pub use crate::open::{CacheMode, OpenError, OpenOptions, SectorSizes, StoreSnapshot};
pub(crate) use zeroing::ZEROING_UNIT_BYTES;

use crate::{
    claim::Claim,
    direct::{self, DirectFile, Route, cannot},
    explain_shortage,
    lock::{self, LockMode},
    no_io::assert_io_allowed,
    open::{self, Opened, PathResolution},
    shortage,
    store::{Access, DataFile, FileRange, Store, Zeroing},
    sys,
};
use names::Names;
use rustix::{
    fs::{Advice, FallocateFlags, SeekFrom, Timespec, Timestamps, UTIME_OMIT},
    io::{Errno, ReadWriteFlags, retry_on_intr},
};
use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    path::Path,
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicI32, Ordering},
    },
    time::{SystemTime, UNIX_EPOCH},
};

/// Number of bytes probed to estimate how much of a file the page cache holds.
const CACHE_SAMPLES: u32 = 64;

/// `f_type` of file systems whose inode numbers may be others after the next mount: FAT, exFAT,
/// FUSE (sshfs, exfat-fuse), SMB (without the server's numbers) and VirtualBox's shared folders.
const MADE_UP_INODES: [u32; 7] = [0x4d44, 0x2011_bab0, 0x6573_5546, 0x517b, 0xff53_4d42, 0xfe53_4d42, 0x786f_4256];

/// An open file or block device; see the module documentation.
#[derive(Debug)]
pub struct FileStore {
    names: Names,
    meta: OwnedFd,
    direct: OnceLock<Option<DirectFile>>,
    wanted: CacheMode,
    writable: bool,
    is_block_device: bool,
    identity: (u64, u64),
    sectors: SectorSizes,
    /// The claim on a block device that is open for writing.
    _claim: Option<Claim>,
    touched_page_cache: AtomicBool,
    /// The error number of the first failed sync, or 0.
    lost_writes: AtomicI32,
}

impl FileStore {
    /// Opens `path`.
    ///
    /// # Errors
    /// See [`OpenError`]. A block device that is mounted, or otherwise claimed by the system, is
    /// not opened for writing.
    pub fn open(path: impl AsRef<Path>, options: &OpenOptions) -> Result<Self, OpenError> {
        Self::open_by(path.as_ref(), PathResolution::Usual, options)
    }

    /// Opens a path that must contain no symbolic links, also none that were created since it was
    /// resolved. Opens a block device only if `allow_devices`.
    ///
    /// # Errors
    /// See [`OpenError`]; a symbolic link in the path is a system error (`ELOOP`).
    pub fn open_canonical(path: &Path, allow_devices: bool, options: &OpenOptions) -> Result<Self, OpenError> {
        Self::open_by(path, PathResolution::Canonical { allow_devices }, options)
    }

    fn open_by(path: &Path, resolution: PathResolution, options: &OpenOptions) -> Result<Self, OpenError> {
        let Opened { fd, claim, is_block_device, identity, sectors } = Opened::new(path, resolution, options)?;
        let store = Self {
            names: Names::new(path),
            meta: fd,
            direct: OnceLock::new(),
            wanted: options.cache,
            writable: options.writable,
            is_block_device,
            identity,
            sectors,
            _claim: claim,
            touched_page_cache: AtomicBool::new(false),
            lost_writes: AtomicI32::new(0),
        };
        if store.direct_metadata().is_some() {
            store.forget_pages();
        }
        Ok(store)
    }

    /// The cache mode in effect: the requested one, unless the file system does not support
    /// O_DIRECT.
    pub fn cache_mode(&self) -> CacheMode {
        if self.direct().is_some() { CacheMode::Direct } else { CacheMode::PageCache }
    }

    /// Whether the file was opened for writing.
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// Makes everything durable and drops the file's pages from the page cache, so that the next
    /// reads come from the disk.
    pub fn drop_cache(&self) -> io::Result<()> {
        if self.writable {
            self.sync_data()?;
        }
        rustix::fs::fadvise(&self.meta, 0, None, Advice::DontNeed)?;
        Ok(())
    }

    fn direct(&self) -> Option<&DirectFile> {
        if self.wanted == CacheMode::PageCache {
            return None;
        }
        self.direct
            .get_or_init(|| DirectFile::open(self.meta.as_fd(), self.name(), self.writable, self.is_block_device))
            .as_ref()
    }

    /// The O_DIRECT descriptor, if metadata must use it.
    fn direct_metadata(&self) -> Option<&DirectFile> {
        if self.writable { self.direct() } else { None }
    }

    /// Drops clean pages. Only advice: a failure costs speed.
    fn forget_pages(&self) {
        let _ = rustix::fs::fadvise(&self.meta, 0, None, Advice::DontNeed);
    }

    fn is_within(&self, range: FileRange) -> io::Result<()> {
        let end_bytes = range.offset_bytes.checked_add(range.len_bytes).ok_or_else(direct::beyond_addressing)?;
        if end_bytes > self.len_bytes()? {
            return Err(direct::end_of_file());
        }
        Ok(())
    }
}

impl Drop for FileStore {
    fn drop(&mut self) {
        lock::release(self.meta.as_fd());
    }
}

impl Store for FileStore {
    fn name(&self) -> &Path {
        self.names.last()
    }

    fn len_bytes(&self) -> io::Result<u64> {
        direct::file_len_bytes(self.meta.as_fd())
    }

    fn read_at(&self, buf: &mut [u8], offset_bytes: u64) -> io::Result<()> {
        assert_io_allowed();
        if let Some(file) = self.direct_metadata() {
            return file.read_at(buf, offset_bytes);
        }
        if direct::read_upto(self.meta.as_fd(), buf, offset_bytes)? < buf.len() {
            Err(direct::end_of_file())
        } else {
            Ok(())
        }
    }

    fn write_at(&self, buf: &[u8], offset_bytes: u64) -> io::Result<()> {
        assert_io_allowed();
        let explained = |error| explain_shortage(error, self.name(), Some(buf.len() as u64), None);
        if let Some(file) = self.direct_metadata() {
            let route = file.write_at(self.meta.as_fd(), buf, offset_bytes).map_err(explained)?;
            if route == Route::TouchedPageCache {
                self.touched_page_cache.store(true, Ordering::Relaxed);
            }
            return Ok(());
        }
        direct::write_all(self.meta.as_fd(), buf, offset_bytes).map_err(explained)
    }

    fn set_len(&self, len_bytes: u64) -> io::Result<()> {
        assert_io_allowed();
        if self.is_block_device {
            let has_bytes = self.len_bytes()?;
            if has_bytes == len_bytes {
                return Ok(());
            }
            let what =
                format!("a block device cannot be resized: it has {has_bytes} bytes, {len_bytes} were requested");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        retry_on_intr(|| rustix::fs::ftruncate(&self.meta, len_bytes))
            .map_err(|errno| explain_shortage(errno.into(), self.name(), None, None))?;
        // The file system zeroed the rest of the last block through the page cache.
        self.touched_page_cache.store(true, Ordering::Relaxed);
        Ok(())
    }

    fn check_len(&self, len_bytes: u64) -> io::Result<()> {
        if self.is_block_device {
            return Ok(());
        }
        // No file is read or written at its position, and the limit of the file system is that of
        // positions too.
        match rustix::fs::seek(&self.meta, SeekFrom::Start(len_bytes)) {
            Err(Errno::INVAL | Errno::OVERFLOW | Errno::FBIG) => Err(Errno::FBIG.into()),
            _ => Ok(()),
        }
    }

    fn allocate(&self, range: FileRange) -> io::Result<()> {
        assert_io_allowed();
        let end_bytes = range.offset_bytes.checked_add(range.len_bytes).ok_or_else(direct::beyond_addressing)?;
        if self.is_block_device {
            let has_bytes = self.len_bytes()?;
            if end_bytes > has_bytes {
                let what = format!("the block device ends at {has_bytes} bytes, {end_bytes} are needed");
                return Err(io::Error::new(io::ErrorKind::StorageFull, what));
            }
            return Ok(());
        }
        if range.len_bytes > 0 {
            // Ask first: a file system may use up its free space before it reports that it has too
            // little.
            let free_bytes = shortage::free_bytes_of(&self.meta);
            match retry_on_intr(|| {
                rustix::fs::fallocate(&self.meta, FallocateFlags::empty(), range.offset_bytes, range.len_bytes)
            }) {
                Ok(()) => return Ok(()),
                Err(errno) if cannot(errno) => {}
                Err(errno) => {
                    return Err(explain_shortage(errno.into(), self.name(), Some(range.len_bytes), free_bytes));
                }
            }
        }
        if self.len_bytes()? < end_bytes { self.set_len(end_bytes) } else { Ok(()) }
    }

    fn zero_range(&self, range: FileRange, how: Zeroing) -> io::Result<()> {
        assert_io_allowed();
        self.is_within(range)?;
        self.zero(range, how)
    }

    fn sync_data(&self) -> io::Result<()> {
        assert_io_allowed();
        self.settle_sync(retry_on_intr(|| rustix::fs::fdatasync(&self.meta)).map_err(io::Error::from))
    }

    fn sync_all(&self) -> io::Result<()> {
        assert_io_allowed();
        self.settle_sync(retry_on_intr(|| rustix::fs::fsync(&self.meta)).map_err(io::Error::from))
    }

    fn write_durable_at(&self, buf: &[u8], offset_bytes: u64) -> io::Result<()> {
        assert_io_allowed();
        if self.direct_metadata().is_some() {
            self.write_at(buf, offset_bytes)?;
            return self.sync_data();
        }
        let slices = [io::IoSlice::new(buf)];
        match rustix::io::pwritev2(&self.meta, &slices, offset_bytes, ReadWriteFlags::DSYNC) {
            // A sync that failed before still counts.
            Ok(moved_bytes) if moved_bytes == buf.len() => self.settle_sync(Ok(())),
            // Short write, or the kernel or file system does not support it.
            Ok(_) | Err(Errno::INVAL | Errno::OPNOTSUPP | Errno::NOSYS | Errno::INTR | Errno::AGAIN) => {
                self.write_at(buf, offset_bytes)?;
                self.sync_data()
            }
            // EIO may come from the write-back of an earlier write. The kernel reports it once
            // only.
            Err(Errno::IO) => self.settle_sync(Err(Errno::IO.into())),
            // Space may be missing for the write or for its write-back.
            Err(errno) => {
                self.write_at(buf, offset_bytes)?;
                self.settle_sync(Err(errno.into()))
            }
        }
    }

    fn settle_sync(&self, result: io::Result<()>) -> io::Result<()> {
        // With O_DIRECT only the disk's own cache holds unwritten data, and a later sync flushes
        // it.
        if self.direct_metadata().is_some() {
            if result.is_ok() && self.touched_page_cache.swap(false, Ordering::Relaxed) {
                self.forget_pages();
            }
            return result;
        }
        // The kernel reports a failed write-back once and drops the pages. A success after that
        // would be false.
        if let Err(error) = &result {
            let errno = error.raw_os_error().unwrap_or(nix::libc::EIO);
            let _ = self.lost_writes.compare_exchange(0, errno, Ordering::AcqRel, Ordering::Acquire);
        }
        match self.lost_writes.load(Ordering::Acquire) {
            0 => result,
            errno => {
                let first = io::Error::from_raw_os_error(errno);
                let what = format!(
                    "a sync of {} has failed ({first}), and earlier writes may be lost; check the disk below",
                    self.name().display()
                );
                Err(io::Error::new(first.kind(), what))
            }
        }
    }

    fn set_modified(&self, modified: SystemTime) -> io::Result<()> {
        assert_io_allowed();
        let since = modified.duration_since(UNIX_EPOCH).map_err(|_| io::ErrorKind::InvalidInput)?;
        let seconds = since.as_secs().try_into().map_err(|_| io::ErrorKind::InvalidInput)?;
        let times = Timestamps {
            last_access: Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
            last_modification: Timespec { tv_sec: seconds, tv_nsec: since.subsec_nanos().into() },
        };
        rustix::fs::futimens(&self.meta, &times)?;
        self.sync_all()
    }

    fn data_file(&self) -> Option<DataFile<'_>> {
        Some(match self.direct() {
            Some(file) => DataFile { fd: file.fd(), alignment_bytes: file.alignment_bytes() },
            None => DataFile { fd: self.meta.as_fd(), alignment_bytes: 1 },
        })
    }

    fn next_data(&self, offset_bytes: u64) -> io::Result<Option<FileRange>> {
        assert_io_allowed();
        let len_bytes = self.len_bytes()?;
        if offset_bytes >= len_bytes {
            return Ok(None);
        }
        let start_bytes = match rustix::fs::seek(&self.meta, SeekFrom::Data(offset_bytes)) {
            Ok(start_bytes) => start_bytes,
            Err(Errno::NXIO) => return Ok(None),
            // The file system does not know its holes: everything is data.
            Err(Errno::INVAL | Errno::OPNOTSUPP | Errno::NOSYS) => {
                return Ok(Some(FileRange { offset_bytes, len_bytes: len_bytes - offset_bytes }));
            }
            Err(errno) => return Err(errno.into()),
        };
        let end_bytes = match rustix::fs::seek(&self.meta, SeekFrom::Hole(start_bytes)) {
            Ok(end_bytes) => end_bytes,
            Err(Errno::NXIO) => start_bytes,
            Err(errno) => return Err(errno.into()),
        };
        // If another thread truncated the file meanwhile, there is no data.
        Ok((end_bytes > start_bytes)
            .then(|| FileRange { offset_bytes: start_bytes, len_bytes: end_bytes - start_bytes }))
    }

    fn clone_range(&self, source: &dyn Store, range: FileRange, offset_bytes: u64) -> io::Result<()> {
        assert_io_allowed();
        if range.len_bytes == 0 {
            return Ok(());
        }
        // Only bytes that the source's file holds as the store shows them can be shared.
        let front = if source.is_plain() { None } else { Some(source.front(range, Access::Read)) };
        if front.is_some_and(|front| !front.is_direct || front.len_bytes < range.len_bytes) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let source = source.data_file().ok_or(io::ErrorKind::Unsupported)?;
        match retry_on_intr(|| {
            sys::clone_range(self.meta.as_fd(), offset_bytes, source.fd, range.offset_bytes, range.len_bytes)
        }) {
            Ok(()) => Ok(()),
            Err(
                Errno::OPNOTSUPP
                | Errno::XDEV
                | Errno::INVAL
                | Errno::NOTTY
                | Errno::NOSYS
                | Errno::ISDIR
                | Errno::TXTBSY,
            ) => Err(io::ErrorKind::Unsupported.into()),
            Err(errno) => Err(errno.into()),
        }
    }

    fn identity(&self) -> Option<(u64, u64)> {
        Some(self.identity)
    }

    fn keeps_inode(&self) -> bool {
        rustix::fs::fstatfs(&self.meta).is_ok_and(|found| !MADE_UP_INODES.contains(&(found.f_type as u32)))
    }

    fn share_lock(&self) -> io::Result<()> {
        lock::share(self.meta.as_fd())
    }

    fn relock(&self, mode: LockMode) -> Result<(), OpenError> {
        let fd = self.meta.as_fd();
        match mode {
            LockMode::None => lock::release(fd),
            LockMode::Shared => {
                // A part of an exclusive lock that is not given up keeps other programs away.
                let _ = lock::share(fd);
                open::take_lock(self.name(), fd, "reading", &|| lock::acquire(fd, LockMode::Shared))?;
            }
            LockMode::Exclusive => open::take_lock(self.name(), fd, "writing", &|| lock::exclude(fd))?,
        }
        Ok(())
    }

    fn take_access_of(&self, other: &dyn Store) -> io::Result<()> {
        let Some((owner, group, bits)) = other.access_bits() else { return Ok(()) };
        let owner = rustix::fs::Uid::from_raw(owner);
        let group = rustix::fs::Gid::from_raw(group);
        let has_group = rustix::fs::fchown(&self.meta, Some(owner), Some(group)).is_ok()
            || rustix::fs::fchown(&self.meta, None, Some(group)).is_ok();
        let taken = if has_group { bits & 0o777 } else { bits & 0o700 };
        Ok(rustix::fs::fchmod(&self.meta, rustix::fs::Mode::from_raw_mode(taken))?)
    }

    fn access_bits(&self) -> Option<(u32, u32, u32)> {
        let found = rustix::fs::fstat(&self.meta).ok()?;
        let is_file = rustix::fs::FileType::from_raw_mode(found.st_mode) == rustix::fs::FileType::RegularFile;
        is_file.then_some((found.st_uid, found.st_gid, found.st_mode & 0o7777))
    }

    fn was_renamed(&self, to: &Path) {
        self.names.add(to);
    }

    fn sector_bytes(&self) -> SectorSizes {
        self.sectors
    }

    fn is_block_device(&self) -> bool {
        self.is_block_device
    }

    /// Reads single bytes, evenly spread, with `RWF_NOWAIT`: the read succeeds only if the page is
    /// cached.
    fn cached_share(&self) -> f64 {
        let Ok(len_bytes) = self.len_bytes() else { return 0.0 };
        let held = (0..CACHE_SAMPLES).filter(|&sample| {
            let offset_bytes = (u128::from(len_bytes) * u128::from(sample) / u128::from(CACHE_SAMPLES)) as u64;
            let mut byte = [0];
            let vector = &mut [io::IoSliceMut::new(&mut byte)];
            rustix::io::preadv2(&self.meta, vector, offset_bytes, ReadWriteFlags::NOWAIT).is_ok_and(|len| len == 1)
        });
        held.count() as f64 / f64::from(CACHE_SAMPLES)
    }

    fn allocated_bytes(&self) -> io::Result<u64> {
        if self.is_block_device {
            return self.len_bytes();
        }
        Ok(rustix::fs::fstat(&self.meta)?.st_blocks as u64 * 512)
    }
}

#[cfg(test)]
mod tests;
