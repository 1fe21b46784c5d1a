//! An open file of a [`World`].

use super::state::{DEVICE, World, first_time};
use crate::{
    contents::{Change, Contents},
    fault::{FaultKind, OpKind},
    history::FileId,
};
use diskwright_store::{DataFile, FileRange, LockMode, OpenError, Store, Zeroing, assert_io_allowed, lane::Lane};
use std::{
    fmt, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::SystemTime,
};

/// An open file of a [`World`].
pub(super) struct WorldStore {
    pub(super) world: World,
    pub(super) name: PathBuf,
    pub(super) file: FileId,
    pub(super) writable: bool,
    /// The lock that it holds.
    pub(super) lock: Mutex<LockMode>,
    pub(super) life: u64,
    /// Present in a world that answers late.
    pub(super) lane: Option<Arc<dyn Lane>>,
}

impl fmt::Debug for WorldStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WorldStore({})", self.name.display())
    }
}

impl Drop for WorldStore {
    fn drop(&mut self) {
        let _ = self.relock(LockMode::None);
    }
}

fn end_of(range: FileRange) -> io::Result<u64> {
    range.offset_bytes.checked_add(range.len_bytes).ok_or_else(|| io::ErrorKind::InvalidInput.into())
}

impl WorldStore {
    /// The same open file without the lock and without a lane.
    pub(super) fn unlocked(&self) -> Self {
        let (world, name) = (self.world.clone(), self.name.clone());
        let (file, writable, life) = (self.file, self.writable, self.life);
        Self { world, name, file, writable, lock: Mutex::new(LockMode::None), life, lane: None }
    }

    fn check_writable(&self) -> io::Result<()> {
        self.world.check_alive(self.life)?;
        if self.writable { Ok(()) } else { Err(io::Error::from_raw_os_error(9)) }
    }

    fn with<T>(&self, look: impl FnOnce(&Contents) -> T) -> T {
        let state = self.world.state();
        match state.now.files.get(&self.file) {
            Some(contents) => look(contents),
            None => look(&Contents::default()),
        }
    }
}

impl Store for WorldStore {
    fn share_lock(&self) -> io::Result<()> {
        let is_exclusive = *self.lock.lock().unwrap_or_else(PoisonError::into_inner) == LockMode::Exclusive;
        if is_exclusive { self.relock(LockMode::Shared).map_err(io::Error::other) } else { Ok(()) }
    }

    fn relock(&self, mode: LockMode) -> Result<(), OpenError> {
        let mut held = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        let mut state = self.world.state();
        if state.life != self.life {
            return Ok(());
        }
        let holders = state.locks.entry(self.file).or_default();
        let others = holders.without(*held);
        *holders = others.with(mode).ok_or_else(|| OpenError::Locked {
            path: self.name.clone(),
            purpose: if mode == LockMode::Exclusive { "writing" } else { "reading" },
            holder: " by this test".into(),
        })?;
        *held = mode;
        Ok(())
    }

    fn name(&self) -> &Path {
        &self.name
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.with(Contents::len_bytes))
    }

    fn read_at(&self, buf: &mut [u8], offset_bytes: u64) -> io::Result<()> {
        assert_io_allowed();
        self.world.check_alive(self.life)?;
        if let Some(kind) = self.world.meet_fault(OpKind::Read, Some(self.file)) {
            return Err(kind.error());
        }
        let end = end_of(FileRange { offset_bytes, len_bytes: buf.len() as u64 })?;
        self.with(|contents| {
            if !buf.is_empty() && end > contents.len_bytes() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            contents.read(buf, offset_bytes);
            Ok(())
        })
    }

    fn write_at(&self, buf: &[u8], offset_bytes: u64) -> io::Result<()> {
        assert_io_allowed();
        self.check_writable()?;
        end_of(FileRange { offset_bytes, len_bytes: buf.len() as u64 })?;
        match self.world.meet_fault(OpKind::Write, Some(self.file)) {
            None => self.world.change(self.file, Change::Write(offset_bytes, buf.into())),
            Some(kind) => {
                // A short write keeps some sectors, but never the last one.
                let done = if kind == FaultKind::Short { buf.len().saturating_sub(1) / 1024 * 512 } else { 0 };
                if done > 0 {
                    self.world.change(self.file, Change::Write(offset_bytes, buf[..done].into()));
                }
                return Err(kind.error());
            }
        }
        Ok(())
    }

    fn set_len(&self, len_bytes: u64) -> io::Result<()> {
        assert_io_allowed();
        self.check_writable()?;
        if let Some(kind) = self.world.meet_fault(OpKind::Length, Some(self.file)) {
            return Err(kind.error());
        }
        self.world.change(self.file, Change::Length(len_bytes));
        Ok(())
    }

    fn allocate(&self, range: FileRange) -> io::Result<()> {
        assert_io_allowed();
        self.check_writable()?;
        let end = end_of(range)?;
        let held = self.len_bytes()?;
        match self.world.meet_fault(OpKind::Length, Some(self.file)) {
            None if end > held => self.world.change(self.file, Change::Length(end)),
            None => {}
            Some(kind) => {
                // Some file systems grow the file before they find that they are full.
                let part = range.offset_bytes.max(held).midpoint(end) & !511;
                if kind == FaultKind::Short && part > held {
                    self.world.change(self.file, Change::Length(part));
                }
                return Err(kind.error());
            }
        }
        Ok(())
    }

    fn zero_range(&self, range: FileRange, how: Zeroing) -> io::Result<()> {
        assert_io_allowed();
        self.check_writable()?;
        if end_of(range)? > self.len_bytes()? {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let op_kind = if how == Zeroing::Deallocate { OpKind::Punch } else { OpKind::Write };
        if let Some(kind) = self.world.meet_fault(op_kind, Some(self.file)) {
            return Err(kind.error());
        }
        self.world.change(self.file, Change::Zero(range));
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        assert_io_allowed();
        self.world.sync(self.file, self.life, false)
    }

    fn sync_all(&self) -> io::Result<()> {
        assert_io_allowed();
        self.world.sync(self.file, self.life, true)
    }

    fn set_modified(&self, modified: SystemTime) -> io::Result<()> {
        assert_io_allowed();
        let since = modified.duration_since(first_time()).map_err(io::Error::other)?;
        self.world.set_modified(self.file, self.life, since.as_secs())?;
        self.sync_all()
    }

    fn data_file(&self) -> Option<DataFile<'_>> {
        None
    }

    fn lane(&self) -> Option<Arc<dyn Lane>> {
        self.lane.clone()
    }

    fn never_blocks(&self) -> bool {
        self.lane.is_none()
    }

    fn next_data(&self, offset_bytes: u64) -> io::Result<Option<FileRange>> {
        assert_io_allowed();
        Ok(self.with(|contents| contents.next_data(offset_bytes)))
    }

    /// Copies the bytes; a caller cannot tell that from sharing.
    fn clone_range(&self, source: &dyn Store, range: FileRange, offset_bytes: u64) -> io::Result<()> {
        assert_io_allowed();
        let mut bytes = vec![0; usize::try_from(range.len_bytes).map_err(io::Error::other)?];
        source.read_at(&mut bytes, range.offset_bytes)?;
        self.check_writable()?;
        if let Some(kind) = self.world.meet_fault(OpKind::Share, Some(self.file)) {
            return Err(kind.error());
        }
        self.world.change(self.file, Change::Write(offset_bytes, bytes.into()));
        Ok(())
    }

    fn identity(&self) -> Option<(u64, u64)> {
        Some((DEVICE, self.file as u64 + 1))
    }

    fn allocated_bytes(&self) -> io::Result<u64> {
        Ok(self.with(Contents::allocated_bytes))
    }
}
