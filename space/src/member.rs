//! An open member: its store, and what the pool must know about it to use it.
//!
//! ```text
//!   transfer ends ─▶ written ─▶ is_unsynced ─▶ sync ─▶ synced
//! ```
//!
//! A flush syncs the members that were written since their last sync. A sync that another flush has
//! started does not count until it has ended, so while one is under way a member is synced again.

use crate::{
    counter::Counter,
    error::{Result, SpaceError},
};
use diskwright_format::space::{
    BLOCK_BYTES, WITNESS_BYTES, last_superblock_at,
    superblock::{Class, Superblock},
};
use diskwright_store::{Access, FileRange, Store, Zeroing};
use std::{
    io,
    path::{Path, PathBuf},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
};

/// An open member of a pool.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) number: u8,
    pub(crate) class: Class,
    /// The size that the pool uses.
    pub(crate) size_bytes: u64,
    pub(crate) path: PathBuf,
    pub(crate) store: Arc<dyn Store>,
    /// A write has ended that no sync covers.
    unsynced: AtomicBool,
    /// Syncs under way.
    syncs: AtomicU32,
    /// The first sync that failed.
    failed_sync: OnceLock<(io::ErrorKind, String)>,
    /// Transfers under way.
    pub(crate) in_flight: AtomicU32,
    /// What it was asked for. Whoever uses the store directly counts here too.
    pub(crate) counter: Counter,
}

impl Member {
    pub(crate) fn new(number: u8, class: Class, size_bytes: u64, path: &Path, store: Arc<dyn Store>) -> Self {
        Self {
            number,
            class,
            size_bytes,
            path: path.to_owned(),
            store,
            unsynced: AtomicBool::new(false),
            syncs: AtomicU32::new(0),
            failed_sync: OnceLock::new(),
            in_flight: AtomicU32::new(0),
            counter: Counter::default(),
        }
    }

    /// Whether it has no slabs: only its superblock counts.
    pub(crate) fn is_witness(&self) -> bool {
        self.size_bytes == WITNESS_BYTES
    }

    /// Whether it is a file in a file system, and not a device. A device's identity is its number.
    pub(crate) fn is_file(&self) -> bool {
        self.store.identity().is_none_or(|(_, inode)| inode != 0)
    }

    /// A write has ended, whatever became of it.
    #[inline]
    pub(crate) fn written(&self) {
        // Most writes find it set. Reading it first keeps the cache line shared.
        if !self.unsynced.load(Ordering::Acquire) {
            self.unsynced.store(true, Ordering::Release);
        }
    }

    /// Whether a sync is needed; it then counts as begun, and [`Member::sync_ended`] must follow.
    pub(crate) fn begin_sync(&self) -> bool {
        // Counted before the flag is taken, so that another flush that finds the flag taken also
        // finds the sync.
        let others = self.syncs.fetch_add(1, Ordering::AcqRel);
        let needed = self.unsynced.swap(false, Ordering::AcqRel) || others > 0;
        if needed {
            self.counter.count_sync();
        } else {
            self.syncs.fetch_sub(1, Ordering::AcqRel);
        }
        needed
    }

    /// A sync has ended.
    pub(crate) fn sync_ended(&self, result: &io::Result<()>) {
        if let Err(error) = result {
            self.sync_failed(error);
        }
        self.syncs.fetch_sub(1, Ordering::AcqRel);
    }

    /// Syncs what was written since the last sync.
    pub(crate) fn sync(&self) -> io::Result<()> {
        if !self.begin_sync() {
            return Ok(());
        }
        let result = self.settle(self.store.sync_data());
        self.sync_ended(&result);
        result
    }

    /// Syncs the whole store.
    pub(crate) fn sync_all(&self) -> io::Result<()> {
        self.counter.count_sync();
        self.settle(self.store.sync_data())
    }

    /// Reads.
    pub(crate) fn read_at(&self, buf: &mut [u8], offset_bytes: u64) -> io::Result<()> {
        self.counter.count(Access::Read, buf.len() as u64);
        self.store.read_at(buf, offset_bytes)
    }

    /// Writes.
    pub(crate) fn write_at(&self, bytes: &[u8], offset_bytes: u64) -> io::Result<()> {
        self.counter.count(Access::Write, bytes.len() as u64);
        self.store.write_at(bytes, offset_bytes)
    }

    /// Writes zeros. The range stays allocated.
    pub(crate) fn zero_range(&self, range: FileRange) -> io::Result<()> {
        self.counter.count(Access::Write, range.len_bytes);
        self.store.zero_range(range, Zeroing::Keep)
    }

    /// Writes durably.
    pub(crate) fn write_durable(&self, bytes: &[u8], offset_bytes: u64) -> io::Result<()> {
        self.counter.count(Access::Write, bytes.len() as u64);
        self.counter.count_sync();
        self.settle(self.store.write_durable_at(bytes, offset_bytes))
    }

    /// After one failed sync no later one succeeds: it would not cover what the first one has lost.
    fn settle(&self, result: io::Result<()>) -> io::Result<()> {
        if let Err(error) = &result {
            let _ = self.failed_sync.set((error.kind(), error.to_string()));
        }
        match self.failed_sync.get() {
            None => Ok(()),
            Some((kind, why)) => {
                let path = self.path.display();
                let what = format!("a sync of {path} has failed ({why}), and earlier writes may be lost");
                Err(io::Error::new(*kind, what))
            }
        }
    }

    /// A sync has failed, or a durable write.
    pub(crate) fn sync_failed(&self, error: &io::Error) {
        let _ = self.failed_sync.set((error.kind(), error.to_string()));
        self.unsynced.store(true, Ordering::Release);
    }

    /// Whether a sync has failed.
    pub(crate) fn has_failed(&self) -> bool {
        self.failed_sync.get().is_some()
    }

    /// Reads the superblock: the newer one of the two, if both are valid.
    pub(crate) fn read_superblock(store: &dyn Store, path: &Path) -> Result<Superblock> {
        let len_bytes = store.len_bytes().map_err(|error| SpaceError::io("find out the size", path, error))?;
        let read = |at: u64| -> Result<Superblock> {
            let mut block = [0; BLOCK_BYTES];
            if at.checked_add(BLOCK_BYTES as u64).is_none_or(|end| end > len_bytes) {
                let why = format!("it has only {len_bytes} bytes");
                return Err(SpaceError::NotAMember { path: path.to_owned(), why });
            }
            store.read_at(&mut block, at).map_err(|error| SpaceError::io("read the superblock", path, error))?;
            Superblock::parse(&block).map_err(|why| SpaceError::not_a_member(path, &why))
        };
        let first = read(0);
        let used_bytes = first.as_ref().ok().and_then(|found| Some(found.member(found.number)?.size_bytes));
        let last = last_superblock_at(used_bytes.unwrap_or(len_bytes)).map(read);
        match (first, last) {
            (Ok(first), Some(Ok(last))) if last.pool == first.pool && last.generation > first.generation => Ok(last),
            (Ok(first), _) => Ok(first),
            (Err(_), Some(Ok(last))) => Ok(last),
            (Err(error), _) => Err(error),
        }
    }

    /// Makes the member one of no pool.
    pub(crate) fn wipe(&self) -> io::Result<()> {
        for at in last_superblock_at(self.size_bytes).into_iter().chain([0]) {
            self.write_durable(&[0; BLOCK_BYTES], at)?;
        }
        Ok(())
    }

    /// Writes both superblocks, one after the other, so that at any moment one of them is valid.
    pub(crate) fn write_superblock(&self, superblock: &Superblock) -> io::Result<()> {
        let block = Superblock { number: self.number, ..superblock.clone() }.to_block();
        self.write_durable(&block, 0)?;
        match last_superblock_at(self.size_bytes) {
            Some(at) => self.write_durable(&block, at),
            None => Ok(()),
        }
    }
}
