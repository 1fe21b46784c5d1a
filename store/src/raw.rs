//! A raw disk: a file or block device whose bytes are the disk's bytes, at the same offsets.
//!
//! It needs no look-up and one part for each request, so it is the baseline with which virtual
//! disks are compared.
//!
//! A file whose length is not a multiple of the sector size is shown rounded up. Bytes beyond its
//! end read as zeros, and a write there extends the file. A flush is one `fdatasync`, which covers
//! completed writes of every queue. Zeroing with force unit access is a zeroing followed by a sync,
//! since no system call does both; so is such a write of several segments. The queue holds the
//! first completion back and starts the sync.

use crate::{
    AtRisk, CacheMode, Engine, EngineCompletion, Files, LockMode, MemberTraffic, OpenOptions, TargetId,
    file::OpenError,
    queue::{
        BlockDevice, BlockQueue, Completion, Extent, ExtentKind, Geometry, Operation, PushError, QueueOptions, Request,
        validate,
    },
    store::{FileRange, Store, Zeroing},
};
use std::{io, path::Path, sync::Arc};

/// Cookie of a request that must be followed by a sync.
const THEN_SYNC: u64 = 1;

/// A raw disk; see the module documentation.
#[derive(Debug, Clone)]
pub struct RawDevice {
    store: Arc<dyn Store>,
    geometry: Geometry,
}

impl RawDevice {
    /// Opens a file, a block device or a name with a scheme ([`Files::add_scheme`]), with an
    /// exclusive lock for writing and a shared lock for reading. Sector sizes are the block
    /// device's own, and 512 bytes for a file.
    pub fn open(path: impl AsRef<Path>, writable: bool, cache: CacheMode) -> Result<Self, OpenError> {
        let path = path.as_ref();
        let lock = if writable { LockMode::Exclusive } else { LockMode::Shared };
        let store = Files::default().open(path, &OpenOptions { writable, create_new: false, cache, lock })?;
        let sectors = store.sector_bytes();
        let failed = |source| OpenError::Io { doing: "measure", path: path.to_owned(), source };
        let mut device = Self::new(store, writable, sectors.logical_bytes).map_err(failed)?;
        device.geometry.physical_sector_bytes = sectors.physical_bytes;
        Ok(device)
    }

    /// A raw disk on any store.
    ///
    /// # Errors
    /// `InvalidInput` if the sector size is not a power of two of at least 512; the store's error
    /// if its length cannot be read.
    pub fn new(store: Arc<dyn Store>, writable: bool, logical_sector_bytes: u32) -> io::Result<Self> {
        if !logical_sector_bytes.is_power_of_two() || logical_sector_bytes < 512 {
            let what =
                format!("a sector size of {logical_sector_bytes} bytes; it must be a power of two of at least 512");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        let size_bytes = store
            .len_bytes()?
            .checked_next_multiple_of(u64::from(logical_sector_bytes))
            .ok_or(io::ErrorKind::FileTooLarge)?;
        let physical_sector_bytes = logical_sector_bytes.max(4096);
        Ok(Self {
            store,
            geometry: Geometry { size_bytes, logical_sector_bytes, physical_sector_bytes, read_only: !writable },
        })
    }

    /// The store that holds the disk.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// Whether requests bypass the page cache.
    pub fn cache_mode(&self) -> CacheMode {
        if self.store.bypasses_page_cache() { CacheMode::Direct } else { CacheMode::PageCache }
    }
}

impl BlockDevice for RawDevice {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn at_risk(&self) -> AtRisk {
        self.store.at_risk()
    }

    fn member_traffic(&self) -> Vec<MemberTraffic> {
        self.store.member_traffic()
    }

    fn open_queue(&self, options: &QueueOptions<'_>) -> io::Result<Box<dyn BlockQueue>> {
        let mut engine = options.engine()?;
        let target = engine.add_target_padded(&self.store)?;
        let depth = options.depth.max(1);
        let done = Vec::with_capacity(depth);
        Ok(Box::new(RawQueue { engine, target, store: Arc::clone(&self.store), geometry: self.geometry, depth, done }))
    }

    fn extents(&self, offset_bytes: u64, len_bytes: u64, out: &mut Vec<Extent>) -> io::Result<()> {
        let sector_bytes = u64::from(self.geometry.logical_sector_bytes);
        let end_bytes = offset_bytes.saturating_add(len_bytes).min(self.geometry.size_bytes);
        let mut at_bytes = offset_bytes;
        while at_bytes < end_bytes {
            // Whole sectors: a sector that is partly data is data.
            let (data_start, data_end) = match self.store.next_data(at_bytes)? {
                Some(data) => {
                    let data_end = data.offset_bytes.saturating_add(data.len_bytes);
                    (
                        data.offset_bytes - data.offset_bytes % sector_bytes,
                        data_end.checked_next_multiple_of(sector_bytes).unwrap_or(u64::MAX),
                    )
                }
                None => (end_bytes, end_bytes),
            };
            let (data_start, data_end) = (data_start.clamp(at_bytes, end_bytes), data_end.clamp(at_bytes, end_bytes));
            if data_start > at_bytes {
                let kind = ExtentKind::Zero;
                out.push(Extent {
                    offset_bytes: at_bytes,
                    len_bytes: data_start - at_bytes,
                    kind,
                    depth: 0,
                    file: 0,
                    file_offset_bytes: None,
                });
            }
            if data_end > data_start {
                let kind = ExtentKind::Data;
                out.push(Extent {
                    offset_bytes: data_start,
                    len_bytes: data_end - data_start,
                    kind,
                    depth: 0,
                    file: 0,
                    file_offset_bytes: Some(data_start),
                });
            } else if data_start < end_bytes {
                return Err(io::Error::other("the store's data changed while its extents were read; try again"));
            }
            at_bytes = data_end.max(data_start);
        }
        Ok(())
    }
}

#[derive(Debug)]
struct RawQueue {
    engine: Engine,
    target: TargetId,
    store: Arc<dyn Store>,
    geometry: Geometry,
    depth: usize,
    done: Vec<EngineCompletion>,
}

impl RawQueue {
    /// The part of a range that lies in the file, for zeroing: the file may end within the last
    /// sector.
    fn clip(&self, range: FileRange) -> io::Result<FileRange> {
        let whole_sectors = self.geometry.size_bytes.saturating_sub(u64::from(self.geometry.logical_sector_bytes));
        if range.offset_bytes + range.len_bytes <= whole_sectors {
            return Ok(range);
        }
        let left_bytes = self.store.len_bytes()?.saturating_sub(range.offset_bytes);
        Ok(FileRange { len_bytes: range.len_bytes.min(left_bytes), ..range })
    }
}

impl BlockQueue for RawQueue {
    fn depth(&self) -> usize {
        self.depth
    }

    fn in_flight(&self) -> usize {
        self.engine.in_flight()
    }

    fn memory_alignment_bytes(&self) -> usize {
        self.store.data_file().map_or(1, |file| file.alignment_bytes.max(1) as usize)
    }

    #[inline]
    fn push(&mut self, request: Request) -> Result<(), Box<PushError>> {
        if self.engine.in_flight() >= self.depth {
            return Err(Box::new(PushError { request, reason: io::ErrorKind::WouldBlock.into() }));
        }
        if let Err(reason) = validate(&request, &self.geometry) {
            return Err(Box::new(PushError { request, reason }));
        }
        let (tag, target, offset_bytes, len_bytes) =
            (request.tag, self.target, request.offset_bytes, request.len_bytes);
        let range = request.buf_range();
        match (request.operation, request.buf) {
            (Operation::Read, Some(buf)) => self.engine.read_one(tag, 0, target, offset_bytes, buf, range),
            (Operation::Write, Some(buf)) => {
                self.engine.write_one(tag, 0, target, offset_bytes, buf, range, request.fua);
            }
            // Segments; or a transfer of length 0, which needs no buffer.
            (operation @ (Operation::Read | Operation::Write), None) => {
                // One sync after all parts is cheaper than making each part durable by itself.
                let parts = request.segments.as_ref().map_or(0, |segments| segments.count());
                let then_sync = request.fua && operation == Operation::Write && parts > 1;
                let slot = self.engine.begin(tag, if then_sync { THEN_SYNC } else { 0 }, None);
                self.engine.attach(&slot, request.segments);
                match operation {
                    _ if parts == 0 => {}
                    Operation::Read => self.engine.read(&slot, target, offset_bytes, range),
                    _ => self.engine.write(&slot, target, offset_bytes, range, request.fua && !then_sync),
                }
                self.engine.end(slot);
            }
            (Operation::Flush, buf) => {
                let slot = self.engine.begin(tag, 0, buf);
                self.engine.attach(&slot, request.segments);
                self.engine.sync(&slot, target);
                self.engine.end(slot);
            }
            (operation @ (Operation::WriteZeroes | Operation::Discard), buf) => {
                let range = match self.clip(FileRange { offset_bytes, len_bytes }) {
                    Ok(range) => range,
                    Err(reason) => return Err(Box::new(PushError { request: Request { buf, ..request }, reason })),
                };
                let how = if operation == Operation::Discard { Zeroing::Deallocate } else { Zeroing::Keep };
                let slot = self.engine.begin(tag, if request.fua { THEN_SYNC } else { 0 }, buf);
                self.engine.attach(&slot, request.segments);
                self.engine.write_zeroes(&slot, target, range, how);
                self.engine.end(slot);
            }
        }
        Ok(())
    }

    fn reap(&mut self, at_least: usize, out: &mut Vec<Completion>) -> io::Result<()> {
        let mut missing = at_least.min(self.engine.in_flight());
        loop {
            let result = self.engine.reap(missing, &mut self.done);
            let mut syncs_started = false;
            for ended in self.done.drain(..) {
                if ended.cookie == THEN_SYNC && ended.result.is_ok() {
                    let slot = self.engine.begin(ended.tag, 0, ended.buf);
                    self.engine.attach(&slot, ended.segments);
                    self.engine.sync(&slot, self.target);
                    self.engine.end(slot);
                    syncs_started = true;
                } else {
                    let EngineCompletion { tag, buf, segments, result, .. } = ended;
                    out.push(Completion { tag, buf, segments, result });
                    missing = missing.saturating_sub(1);
                }
            }
            result?;
            if missing == 0 && !syncs_started {
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests;
