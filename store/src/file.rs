//! A store on a file or a block device.
//!
//! There are up to two descriptors:
//!
//! ```text
//!   meta     page cache, carries the lock      metadata and parents are read through it; resizing, holes, syncing
//!   direct   O_DIRECT, opened when first asked for      payload, by way of `data_file`; all writes of a writable file
//! ```
//!
//! With [`CacheMode::PageCache`] `meta` does everything. With [`CacheMode::Direct`] a read-only file still reads its metadata
//! through the page cache, for every image of a chain would otherwise read the same tables from the disk again. A *writable*
//! direct file must not: as long as an inode has pages in the cache, the kernel hands the completion of each direct
//! write to a worker thread, to invalidate them, and that costs more than the write. So there the metadata takes the direct
//! descriptor too, and what little must pass through the cache (see `direct`) is dropped from it at the next sync.
//!
//! Where a file system has no O_DIRECT (tmpfs), the page cache is used; [`FileStore::cache_mode`] says what is in force.
//!
//! Only regular files and block devices are opened. What is at a path is looked at first and checked again once it is
//! open, and the open does not wait: a FIFO at the place of a disk must not hang the program. No lock but
//! those of `direct` guards anything here: the kernel does.

use crate::{
    direct::{self, DirectFile, Route},
    lock::{self, LockMode, Refusal},
    store::{DataFile, FileRange, Store, Zeroing},
    sys,
};
use rustix::{
    fs::{Advice, FallocateFlags, FileType, Mode, OFlags, SeekFrom},
    io::Errno,
};
use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{
        OnceLock,
        atomic::{AtomicBool, Ordering},
    },
};

/// Page cache or O_DIRECT.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CacheMode {
    /// Through the page cache.
    #[default]
    PageCache,
    /// Past it, by O_DIRECT.
    Direct,
}

/// How to open. The default is for reading, through the page cache, with a shared lock.
#[derive(Debug, Clone, Copy, Default)]
pub struct OpenOptions {
    /// For writing as well.
    pub writable: bool,
    /// Create a new file (fails when there is one). Implies nothing else: say `writable` too.
    pub create_new: bool,
    /// How payload reaches the file.
    pub cache: CacheMode,
    /// The lock to take.
    pub lock: LockMode,
}

/// Why a file was not opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The system refused.
    #[error("{doing} {} failed: {source}", path.display())]
    Io {
        /// As in "opening".
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Somebody else has it.
    #[error("cannot open {} for {purpose}: it is in use{holder}. End that use first, then try again", path.display())]
    Locked {
        /// The file.
        path: PathBuf,
        /// "reading" or "writing".
        purpose: &'static str,
        /// As in " by qemu-img (process 123)"; empty when that cannot be seen.
        holder: String,
    },
    /// It is no file that can hold a disk.
    #[error("cannot open {} as a disk: it is {found}, where a regular file or a block device is needed", path.display())]
    NotAFile {
        /// What was named.
        path: PathBuf,
        /// What is there, as in "a directory".
        found: &'static str,
    },
}

/// Sector sizes of what is below.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SectorSizes {
    /// The unit of addressing: a block device's own; 512 for a file.
    pub logical_bytes: u32,
    /// The unit of writing: a block device's own; 4096 for a file.
    pub physical_bytes: u32,
}

/// Largest piece in which zeros are written where nothing better is to be had.
const ZERO_PIECE_BYTES: usize = 1 << 20;

/// Unit in which zeroing leaves the page cache alone: file systems clear the rest of a block through the cache.
pub(crate) const ZEROING_UNIT_BYTES: u64 = 4096;

/// An open file or block device. See the module.
#[derive(Debug)]
pub struct FileStore {
    path: PathBuf,
    meta: OwnedFd,
    direct: OnceLock<Option<DirectFile>>,
    wanted: CacheMode,
    writable: bool,
    is_block_device: bool,
    identity: (u64, u64),
    sectors: SectorSizes,
    touched_page_cache: AtomicBool,
}

impl FileStore {
    /// Opens `path`.
    ///
    /// # Errors
    /// See [`OpenError`]. A block device that is mounted (or otherwise claimed by the system) is not opened for writing.
    pub fn open(path: impl AsRef<Path>, options: &OpenOptions) -> Result<Self, OpenError> {
        let path = path.as_ref();
        let failed = |doing: &'static str, source: io::Error| OpenError::Io { doing, path: path.to_owned(), source };
        // To open some devices is to act (a tape rewinds, a watchdog starts), so look first; a loss of the race is seen below.
        let looked = if options.create_new { None } else { Some(rustix::fs::stat(path).map_err(|e| failed("opening", e.into()))?) };
        if let Some(stat) = &looked {
            refuse_unsuitable(path, stat.st_mode)?;
        }
        let to_be_device = looked.is_some_and(|stat| FileType::from_raw_mode(stat.st_mode).is_block_device());
        let mut flags = OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
        flags |= if options.writable { OFlags::RDWR } else { OFlags::RDONLY };
        if options.create_new {
            flags |= OFlags::CREATE | OFlags::EXCL;
        } else if to_be_device && options.writable {
            // On a block device this refuses one that is mounted, and keeps others from mounting it.
            flags |= OFlags::EXCL;
        }
        let meta = retry(|| rustix::fs::open(path, flags, Mode::from_raw_mode(0o666))).map_err(|errno| {
            if errno == Errno::BUSY && to_be_device {
                let what = "the device is in use by the system, perhaps mounted; unmount it first";
                return failed("opening", io::Error::new(io::ErrorKind::ResourceBusy, what));
            }
            failed("opening", errno.into())
        })?;
        let examining = |errno: Errno| failed("examining", errno.into());
        let stat = rustix::fs::fstat(&meta).map_err(examining)?;
        refuse_unsuitable(path, stat.st_mode)?;
        let is_block_device = FileType::from_raw_mode(stat.st_mode).is_block_device();
        // With O_NONBLOCK left on, io_uring would answer EAGAIN where it should wait.
        let set_flags = rustix::fs::fcntl_getfl(&meta).map_err(examining)?;
        rustix::fs::fcntl_setfl(&meta, set_flags - OFlags::NONBLOCK).map_err(examining)?;

        match lock::acquire(meta.as_fd(), options.lock) {
            Ok(()) => {}
            Err(Refusal::Io(source)) => return Err(failed("locking", source)),
            Err(Refusal::Held) => {
                return Err(OpenError::Locked {
                    path: path.to_owned(),
                    purpose: if options.writable { "writing" } else { "reading" },
                    holder: lock::holder((stat.st_dev, stat.st_ino), meta.as_fd()),
                });
            }
        }
        let sectors = if is_block_device {
            let logical_bytes = rustix::fs::ioctl_blksszget(&meta).map_err(examining)?;
            let physical_bytes = rustix::fs::ioctl_blkpbszget(&meta).unwrap_or(logical_bytes);
            SectorSizes { logical_bytes, physical_bytes: physical_bytes.max(logical_bytes) }
        } else {
            SectorSizes { logical_bytes: 512, physical_bytes: 4096 }
        };
        let store = Self {
            path: path.to_owned(),
            meta,
            direct: OnceLock::new(),
            wanted: options.cache,
            writable: options.writable,
            is_block_device,
            // Inode 0 is no file's: two nodes of one device are the same object.
            identity: if is_block_device { (stat.st_rdev, 0) } else { (stat.st_dev, stat.st_ino) },
            sectors,
            touched_page_cache: AtomicBool::new(false),
        };
        if store.direct_metadata().is_some() {
            store.forget_pages();
        }
        Ok(store)
    }

    /// Whether payload really goes past the page cache: what was asked for, unless the file system cannot.
    pub fn cache_mode(&self) -> CacheMode {
        if self.direct().is_some() { CacheMode::Direct } else { CacheMode::PageCache }
    }

    /// Whether it was opened for writing.
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// Whether it is a block device.
    pub fn is_block_device(&self) -> bool {
        self.is_block_device
    }

    /// Sector sizes of what is below.
    pub fn sector_bytes(&self) -> SectorSizes {
        self.sectors
    }

    /// Makes everything durable and drops the file's pages from the page cache, so that what follows is read from the disk.
    pub fn drop_cache(&self) -> io::Result<()> {
        if self.writable {
            retry(|| rustix::fs::fdatasync(&self.meta))?;
        }
        rustix::fs::fadvise(&self.meta, 0, None, Advice::DontNeed)?;
        Ok(())
    }

    fn direct(&self) -> Option<&DirectFile> {
        if self.wanted == CacheMode::PageCache {
            return None;
        }
        self.direct
            .get_or_init(|| DirectFile::open(self.meta.as_fd(), &self.path, self.writable, self.is_block_device))
            .as_ref()
    }

    /// The direct descriptor, when metadata must take it.
    fn direct_metadata(&self) -> Option<&DirectFile> {
        if self.writable { self.direct() } else { None }
    }

    /// Drops clean pages. Advice: a failure costs speed only.
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

    /// Zeros by the means of the file system, best first.
    fn zero_by_file_system(&self, range: FileRange, how: Zeroing) -> rustix::io::Result<()> {
        let fallocate = |flags| retry(|| rustix::fs::fallocate(&self.meta, flags | FallocateFlags::KEEP_SIZE, range.offset_bytes, range.len_bytes));
        match how {
            Zeroing::Keep => fallocate(FallocateFlags::ZERO_RANGE).or_else(|errno| {
                if !cannot(errno) || self.is_block_device {
                    return Err(errno);
                }
                // tmpfs can do this in two steps only.
                fallocate(FallocateFlags::PUNCH_HOLE)?;
                fallocate(FallocateFlags::empty())
            }),
            Zeroing::Deallocate => fallocate(FallocateFlags::PUNCH_HOLE).or_else(|errno| if cannot(errno) { fallocate(FallocateFlags::ZERO_RANGE) } else { Err(errno) }),
        }
    }

    fn write_zeros(&self, range: FileRange) -> io::Result<()> {
        let zeros = crate::IoBuf::new(ZERO_PIECE_BYTES.min(range.len_bytes as usize).max(1));
        let end_bytes = range.offset_bytes + range.len_bytes;
        let mut at_bytes = range.offset_bytes;
        while at_bytes < end_bytes {
            let piece_bytes = (end_bytes - at_bytes).min(zeros.len() as u64);
            self.write_at(&zeros[..piece_bytes as usize], at_bytes)?;
            at_bytes += piece_bytes;
        }
        Ok(())
    }
}

impl Store for FileStore {
    fn name(&self) -> &Path {
        &self.path
    }

    fn len_bytes(&self) -> io::Result<u64> {
        direct::file_len_bytes(self.meta.as_fd())
    }

    fn read_at(&self, buf: &mut [u8], offset_bytes: u64) -> io::Result<()> {
        if let Some(file) = self.direct_metadata() {
            return file.read_at(buf, offset_bytes);
        }
        if direct::read_upto(self.meta.as_fd(), buf, offset_bytes)? < buf.len() { Err(direct::end_of_file()) } else { Ok(()) }
    }

    fn write_at(&self, buf: &[u8], offset_bytes: u64) -> io::Result<()> {
        if let Some(file) = self.direct_metadata() {
            if file.write_at(self.meta.as_fd(), buf, offset_bytes)? == Route::TouchedPageCache {
                self.touched_page_cache.store(true, Ordering::Relaxed);
            }
            return Ok(());
        }
        direct::write_all(self.meta.as_fd(), buf, offset_bytes)
    }

    fn set_len(&self, len_bytes: u64) -> io::Result<()> {
        if self.is_block_device {
            let has_bytes = self.len_bytes()?;
            if has_bytes == len_bytes {
                return Ok(());
            }
            let what = format!("a block device keeps its length: it has {has_bytes} bytes, {len_bytes} were asked for");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        retry(|| rustix::fs::ftruncate(&self.meta, len_bytes))?;
        // The rest of the last block was cleared through the page cache.
        self.touched_page_cache.store(true, Ordering::Relaxed);
        Ok(())
    }

    fn allocate(&self, range: FileRange) -> io::Result<()> {
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
            match retry(|| rustix::fs::fallocate(&self.meta, FallocateFlags::empty(), range.offset_bytes, range.len_bytes)) {
                Ok(()) => return Ok(()),
                Err(errno) if cannot(errno) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        if self.len_bytes()? < end_bytes { self.set_len(end_bytes) } else { Ok(()) }
    }

    fn zero_range(&self, range: FileRange, how: Zeroing) -> io::Result<()> {
        self.is_within(range)?;
        if range.len_bytes == 0 {
            return Ok(());
        }
        if self.direct_metadata().is_none() && !self.is_block_device {
            return match self.zero_by_file_system(range, how) {
                Err(errno) if cannot(errno) => self.write_zeros(range),
                result => Ok(result?),
            };
        }
        // Whole units by the file system, the edges by hand: past the page cache, and as a block device wants it.
        let end_bytes = range.offset_bytes + range.len_bytes;
        let first_unit = range.offset_bytes.checked_next_multiple_of(ZEROING_UNIT_BYTES).unwrap_or(u64::MAX);
        let last_unit = end_bytes - end_bytes % ZEROING_UNIT_BYTES;
        if first_unit >= last_unit {
            return self.write_zeros(range);
        }
        self.write_zeros(FileRange { len_bytes: first_unit - range.offset_bytes, ..range })?;
        let whole = FileRange { offset_bytes: first_unit, len_bytes: last_unit - first_unit };
        match self.zero_by_file_system(whole, how) {
            Err(errno) if cannot(errno) => self.write_zeros(whole)?,
            result => result?,
        }
        self.write_zeros(FileRange { offset_bytes: last_unit, len_bytes: end_bytes - last_unit })
    }

    fn sync_data(&self) -> io::Result<()> {
        retry(|| rustix::fs::fdatasync(&self.meta))?;
        if self.touched_page_cache.swap(false, Ordering::Relaxed) && self.direct_metadata().is_some() {
            self.forget_pages();
        }
        Ok(())
    }

    fn data_file(&self) -> Option<DataFile<'_>> {
        Some(match self.direct() {
            Some(file) => DataFile { fd: file.fd(), alignment_bytes: file.alignment_bytes() },
            None => DataFile { fd: self.meta.as_fd(), alignment_bytes: 1 },
        })
    }

    fn next_data(&self, offset_bytes: u64) -> io::Result<Option<FileRange>> {
        let len_bytes = self.len_bytes()?;
        if offset_bytes >= len_bytes {
            return Ok(None);
        }
        let start_bytes = match rustix::fs::seek(&self.meta, SeekFrom::Data(offset_bytes)) {
            Ok(start_bytes) => start_bytes,
            Err(Errno::NXIO) => return Ok(None),
            // It cannot tell, so everything is data.
            Err(Errno::INVAL | Errno::OPNOTSUPP | Errno::NOSYS) => return Ok(Some(FileRange { offset_bytes, len_bytes: len_bytes - offset_bytes })),
            Err(errno) => return Err(errno.into()),
        };
        let end_bytes = match rustix::fs::seek(&self.meta, SeekFrom::Hole(start_bytes)) {
            Ok(end_bytes) => end_bytes,
            Err(Errno::NXIO) => start_bytes,
            Err(errno) => return Err(errno.into()),
        };
        // Cut off meanwhile by another thread: there is no data then.
        Ok((end_bytes > start_bytes).then(|| FileRange { offset_bytes: start_bytes, len_bytes: end_bytes - start_bytes }))
    }

    fn clone_range(&self, source: &dyn Store, range: FileRange, offset_bytes: u64) -> io::Result<()> {
        if range.len_bytes == 0 {
            return Ok(());
        }
        let source = source.data_file().ok_or(io::ErrorKind::Unsupported)?;
        match retry(|| sys::clone_range(self.meta.as_fd(), offset_bytes, source.fd, range.offset_bytes, range.len_bytes)) {
            Ok(()) => Ok(()),
            Err(Errno::OPNOTSUPP | Errno::XDEV | Errno::INVAL | Errno::NOTTY | Errno::NOSYS | Errno::ISDIR | Errno::TXTBSY) => {
                Err(io::ErrorKind::Unsupported.into())
            }
            Err(errno) => Err(errno.into()),
        }
    }

    fn identity(&self) -> Option<(u64, u64)> {
        Some(self.identity)
    }

    fn allocated_bytes(&self) -> io::Result<u64> {
        if self.is_block_device {
            return self.len_bytes();
        }
        Ok(rustix::fs::fstat(&self.meta)?.st_blocks as u64 * 512)
    }
}

/// Raises how many files this process may have open to what the system allows it, for long chains of images, and says
/// how many that is now.
pub fn raise_open_file_limit() -> io::Result<u64> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum })?;
    }
    Ok(limit.maximum.unwrap_or(u64::MAX))
}

/// Makes the creation, the renaming or the removal of the file at `path` durable, by syncing the directory it is in.
pub fn sync_directory_of(path: &Path) -> io::Result<()> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fd: OwnedFd = retry(|| rustix::fs::open(directory, flags, Mode::empty()))?;
    sync_fd(fd.as_fd())
}

fn sync_fd(fd: BorrowedFd<'_>) -> io::Result<()> {
    match retry(|| rustix::fs::fsync(fd)) {
        // Some network file systems cannot sync a directory, and need not.
        Err(Errno::INVAL) => Ok(()),
        result => Ok(result?),
    }
}

fn refuse_unsuitable(path: &Path, mode: u32) -> Result<(), OpenError> {
    let found = match FileType::from_raw_mode(mode) {
        FileType::RegularFile | FileType::BlockDevice => return Ok(()),
        FileType::Directory => "a directory",
        FileType::Fifo => "a named pipe",
        FileType::Socket => "a socket",
        FileType::CharacterDevice => "a character device",
        _ => "something else",
    };
    Err(OpenError::NotAFile { path: path.to_owned(), found })
}

/// Whether the answer means "not by this means", and another may be tried.
pub(crate) fn cannot(errno: Errno) -> bool {
    matches!(errno, Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL | Errno::NODEV | Errno::NOTTY)
}

fn retry<T>(call: impl FnMut() -> rustix::io::Result<T>) -> rustix::io::Result<T> {
    rustix::io::retry_on_intr(call)
}

#[cfg(test)]
mod tests;
