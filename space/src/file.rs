//! A file of a pool as a store: its length, its locks, its barrier.
//!
//! Transfers go directly to the members' files, by `placing.rs`. What they cannot do, and all
//! blocking methods, are in `slow.rs`.

use crate::{
    error::Result,
    pool::{FileState, Pool, lock},
};
use diskwright_format::space::{
    FILE_SLABS_MAX,
    change::{Change, Tier},
};
use diskwright_store::{
    AtRisk, DataFile, FileRange, LockMode, MemberTraffic, OpenError, Placement, SectorSizes, Store, Zeroing,
};
use std::{
    io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

/// An open file of a pool.
#[derive(Debug)]
pub struct SpaceFile {
    pub(crate) pool: Arc<Pool>,
    pub(crate) file: Arc<FileState>,
    name: PathBuf,
    pub(crate) is_writable: bool,
    /// Whether the file was opened with an exclusive lock, a shared one, or none.
    lock: std::sync::Mutex<LockMode>,
    /// Number of the last change of the length that is not durable yet; 0 if there is none.
    pub(crate) length_changed: AtomicU64,
}

/// The name of a file of a pool, as `space://POOL/NAME`.
pub fn uri(pool: &str, name: &str) -> PathBuf {
    PathBuf::from(format!("space://{pool}/{name}"))
}

impl Pool {
    /// Opens a file of the pool, with a lock against other opens in this process.
    ///
    /// # Errors
    /// [`OpenError::Locked`] if another one has it open; [`OpenError::Io`] if it does not exist or
    /// the pool is read-only.
    pub fn open_file(
        self: &Arc<Self>,
        name: &str,
        writable: bool,
        lock: LockMode,
    ) -> Result<Arc<SpaceFile>, OpenError> {
        SpaceFile::open(self, name, writable, lock)
    }
}

impl SpaceFile {
    /// Opens a file.
    ///
    /// # Errors
    /// [`OpenError::Locked`] if another one of this process has it open; [`OpenError::Io`] if it
    /// does not exist or the pool is read-only.
    pub(crate) fn open(pool: &Arc<Pool>, name: &str, writable: bool, mode: LockMode) -> Result<Arc<Self>, OpenError> {
        let path = uri(pool.name(), name);
        let failed = |source| OpenError::Io { doing: "open", path: path.clone(), source };
        let file = pool.file_named(name).ok_or_else(|| failed(not_found()))?;
        if writable && !pool.is_writable() {
            return Err(failed(io::ErrorKind::ReadOnlyFilesystem.into()));
        }
        take_lock(&file, LockMode::None, mode, &path)?;
        lock(&file.openers).stores += 1;
        let (lock, length_changed) = (std::sync::Mutex::new(mode), AtomicU64::new(0));
        let (pool, name) = (Arc::clone(pool), path);
        Ok(Arc::new(Self { pool, file, name, is_writable: writable, lock, length_changed }))
    }

    /// Index of the slab, and offset within it.
    pub(crate) fn slab_of(&self, offset_bytes: u64) -> (u32, u64) {
        let index = offset_bytes >> self.pool.slab_shift();
        (index.min(u64::from(u32::MAX)) as u32, offset_bytes & (self.pool.slab_bytes() - 1))
    }

    pub(crate) fn len(&self) -> u64 {
        self.file.len_bytes.load(Ordering::Acquire)
    }
}

impl Store for SpaceFile {
    fn name(&self) -> &Path {
        &self.name
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.len())
    }

    fn read_at(&self, buf: &mut [u8], offset_bytes: u64) -> io::Result<()> {
        let end_bytes = offset_bytes.checked_add(buf.len() as u64).ok_or(io::ErrorKind::InvalidInput)?;
        if end_bytes > self.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.read_slabs(buf, offset_bytes)
    }

    fn write_at(&self, buf: &[u8], offset_bytes: u64) -> io::Result<()> {
        self.require_writable()?;
        let end_bytes = offset_bytes.checked_add(buf.len() as u64).ok_or(io::ErrorKind::FileTooLarge)?;
        self.check_len(end_bytes)?;
        self.write_slabs(buf, offset_bytes)?;
        if end_bytes > self.len() { self.lengthen(end_bytes) } else { Ok(()) }
    }

    fn set_len(&self, len_bytes: u64) -> io::Result<()> {
        self.require_writable()?;
        self.check_len(len_bytes)?;
        if len_bytes < self.len() { self.shorten(len_bytes) } else { self.lengthen(len_bytes) }
    }

    fn check_len(&self, len_bytes: u64) -> io::Result<()> {
        let most_bytes = u64::from(FILE_SLABS_MAX) << self.pool.slab_shift();
        if len_bytes > most_bytes { Err(io::ErrorKind::FileTooLarge.into()) } else { Ok(()) }
    }

    fn allocate(&self, range: FileRange) -> io::Result<()> {
        self.require_writable()?;
        let end_bytes = range.offset_bytes.checked_add(range.len_bytes).ok_or(io::ErrorKind::FileTooLarge)?;
        self.check_len(end_bytes)?;
        self.allocate_slabs(range.offset_bytes, end_bytes)?;
        if end_bytes > self.len() { self.lengthen(end_bytes) } else { Ok(()) }
    }

    fn zero_range(&self, range: FileRange, how: Zeroing) -> io::Result<()> {
        self.require_writable()?;
        let end_bytes = range.offset_bytes.checked_add(range.len_bytes).ok_or(io::ErrorKind::InvalidInput)?;
        self.zero_slabs(range.offset_bytes..end_bytes, how)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.pool.sync_all()?;
        let changed = self.length_changed.load(Ordering::Acquire);
        if changed != 0 {
            self.pool.commit_all()?;
            // A later change of the length keeps its number.
            let _ = self.length_changed.compare_exchange(changed, 0, Ordering::AcqRel, Ordering::Relaxed);
        }
        Ok(())
    }

    fn data_file(&self) -> Option<DataFile<'_>> {
        None
    }

    fn bypasses_page_cache(&self) -> bool {
        let mut members = self.pool.holders();
        members.next().is_some_and(|first| first.store.bypasses_page_cache())
            && members.all(|member| member.store.bypasses_page_cache())
    }

    fn placement(&self) -> Option<&dyn Placement> {
        Some(self)
    }

    fn member(&self, number: u8) -> Option<Arc<dyn Store>> {
        self.pool.member(number).map(|member| Arc::clone(&member.store))
    }

    fn member_traffic(&self) -> Vec<MemberTraffic> {
        self.pool.traffic()
    }

    fn at_risk(&self) -> AtRisk {
        match self.pool.cache() {
            Some(cache) if self.is_writable => {
                if cache.has_unwritten() {
                    AtRisk::Now
                } else {
                    AtRisk::NotNow
                }
            }
            _ => AtRisk::Never,
        }
    }

    fn next_data(&self, offset_bytes: u64) -> io::Result<Option<FileRange>> {
        let len_bytes = self.len();
        if offset_bytes >= len_bytes {
            return Ok(None);
        }
        let shift = self.pool.slab_shift();
        let slabs = (offset_bytes >> shift)..len_bytes.div_ceil(self.pool.slab_bytes());
        let mut mapped = self.file.table.mapped(slabs).map(|(index, _)| u64::from(index));
        let Some(first) = mapped.next() else { return Ok(None) };
        let end = (first + 1..).zip(mapped).take_while(|(expected, found)| expected == found).last();
        let end = end.map_or(first + 1, |(last, _)| last + 1);
        let start_bytes = (first << shift).max(offset_bytes);
        Ok(Some(FileRange { offset_bytes: start_bytes, len_bytes: (end << shift).min(len_bytes) - start_bytes }))
    }

    fn identity(&self) -> Option<(u64, u64)> {
        Some((identity_of(&self.pool), u64::from(self.file.number)))
    }

    fn sector_bytes(&self) -> SectorSizes {
        let sizes = self.pool.holders().map(|member| member.store.sector_bytes());
        sizes.fold(SectorSizes { logical_bytes: 512, physical_bytes: 4096 }, |all, one| SectorSizes {
            logical_bytes: all.logical_bytes.max(one.logical_bytes),
            physical_bytes: all.physical_bytes.max(one.physical_bytes),
        })
    }

    fn share_lock(&self) -> io::Result<()> {
        self.relock(LockMode::Shared).map_err(io::Error::other)
    }

    fn relock(&self, mode: LockMode) -> Result<(), OpenError> {
        let mut held = lock(&self.lock);
        take_lock(&self.file, *held, mode, &self.name)?;
        *held = mode;
        Ok(())
    }

    fn allocated_bytes(&self) -> io::Result<u64> {
        let copies = u64::from(self.file.copies);
        Ok((u64::from(self.file.mapped.load(Ordering::Relaxed)) << self.pool.slab_shift()).saturating_mul(copies))
    }
}

impl Drop for SpaceFile {
    fn drop(&mut self) {
        let held = *lock(&self.lock);
        let _ = take_lock(&self.file, held, LockMode::None, &self.name);
        drop(Kept { pool: &self.pool, file: &self.file });
    }
}

/// A file that is not removed until this is dropped, although it may lose its name.
pub(crate) struct Kept<'a> {
    pool: &'a Pool,
    file: &'a FileState,
}

impl Pool {
    /// Keeps a file; `None` if it is being removed.
    pub(crate) fn keep<'a>(&'a self, file: &'a FileState) -> Option<Kept<'a>> {
        let mut openers = lock(&file.openers);
        if openers.is_unnamed && openers.stores == 0 {
            return None;
        }
        openers.stores += 1;
        Some(Kept { pool: self, file })
    }
}

impl Drop for Kept<'_> {
    fn drop(&mut self) {
        let mut openers = lock(&self.file.openers);
        openers.stores -= 1;
        let is_gone = openers.is_unnamed && openers.stores == 0;
        drop(openers);
        if is_gone {
            self.pool.remove_unnamed(self.file);
        }
    }
}

/// The error of a name that the pool does not have.
pub(crate) fn not_found() -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, "the pool has no such disk")
}

/// What stands for the device number of a file of a pool.
pub(crate) fn identity_of(pool: &Pool) -> u64 {
    pool.id().as_u64_pair().0
}

/// Changes the lock of a file from one mode to another.
fn take_lock(file: &FileState, held: LockMode, wanted: LockMode, path: &Path) -> Result<(), OpenError> {
    let mut openers = lock(&file.openers);
    if openers.is_unnamed && held == LockMode::None && wanted != LockMode::None {
        let source = not_found();
        return Err(OpenError::Io { doing: "open", path: path.to_owned(), source });
    }
    let others = match held {
        LockMode::Exclusive => 0,
        LockMode::Shared => openers.locks.saturating_sub(1),
        LockMode::None => openers.locks,
    };
    let after = match wanted {
        LockMode::None => Some(others),
        LockMode::Shared => (others < u32::MAX - 1).then(|| others + 1),
        LockMode::Exclusive => (others == 0).then_some(u32::MAX),
    };
    let purpose = if wanted == LockMode::Exclusive { "writing" } else { "reading" };
    let holder = " by this process".to_owned();
    openers.locks = after.ok_or_else(|| OpenError::Locked { path: path.to_owned(), purpose, holder })?;
    Ok(())
}

impl SpaceFile {
    pub(crate) fn require_writable(&self) -> io::Result<()> {
        if self.is_writable { Ok(()) } else { Err(io::ErrorKind::ReadOnlyFilesystem.into()) }
    }

    /// Makes the file longer. The new length is durable with the next sync.
    pub(crate) fn lengthen(&self, len_bytes: u64) -> io::Result<()> {
        let mut state = lock(self.pool_state());
        if len_bytes > self.len() {
            self.file.len_bytes.store(len_bytes, Ordering::Release);
            let change = Change::Length { file: self.file.number, len_bytes };
            let ticket = self.pool.append(&mut state, &change);
            self.length_changed.store(ticket.number(), Ordering::Release);
        }
        Ok(())
    }

    /// Makes the file shorter, durably.
    fn shorten(&self, len_bytes: u64) -> io::Result<()> {
        let slab_bytes = self.pool.slab_bytes();
        // What a later growth shows must be zeros.
        let tail_end = len_bytes.next_multiple_of(slab_bytes).min(self.len());
        self.zero_slabs(len_bytes..tail_end, Zeroing::Keep)?;
        self.pool.sync_members()?;
        self.zero_slabs(tail_end..self.len(), Zeroing::Deallocate)?;
        let mut state = lock(self.pool_state());
        self.file.len_bytes.store(len_bytes, Ordering::Release);
        let ticket = self.pool.append(&mut state, &Change::Length { file: self.file.number, len_bytes });
        drop(state);
        self.pool.wait(ticket)
    }

    /// The tier of its slabs.
    pub fn tier(&self) -> Tier {
        self.file.tier()
    }
}
