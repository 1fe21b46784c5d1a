//! An open object as a store: what is in the cache is read by the engine's ring, the rest waits for
//! the server.
//!
//! ```text
//!   place ─┬─ known, whole 4 KiB ─▶ the cache's file (member 0), compared
//!          └─ else, or wrong bytes ─▶ lane ─┬─ known ─▶ the cache's file, by a thread, compared
//!                                           └─ Fetcher ─▶ the server
//! ```

use crate::{
    BLOCK_BYTES, SUM_BYTES,
    cache::map::Identity,
    error::{ObjectError, Result},
    fetcher::Fetcher,
    piece::Memory,
    repository::{CHUNK_BYTES, Manifest},
    units::Units,
    wanted::Purpose,
};
use diskwright_store::{
    Access, CopyAt, DataFile, FileRange, Lane, LaneOp, Loan, Placed, Placement, SectorSizes, Store, Zeroing,
};
use rustix::event::{EventfdFlags, eventfd};
use std::{
    io,
    ops::Range,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};
use tokio::runtime::Handle;

/// An open object; see the module documentation.
#[derive(Debug)]
pub struct ObjectStore {
    name: PathBuf,
    identity: (u64, u64),
    contents_id: Option<[u8; 16]>,
    fetcher: Arc<Fetcher>,
    lane: Arc<ObjectLane>,
    /// The cache's file, if blocks are kept.
    data: Option<Arc<dyn Store>>,
}

#[derive(Debug)]
struct ObjectLane {
    fetcher: Arc<Fetcher>,
    data: Option<Arc<dyn Store>>,
    runtime: Handle,
    /// Never readable: the runtime's threads complete the loans.
    silent: OwnedFd,
}

/// Two numbers that tell a version of an object from all others, as device and inode do.
pub(crate) fn numbers(identity: &Identity) -> (u64, u64) {
    let digest = identity.digest();
    let number = |at: usize| digest[at..at + 8].iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
    (number(0), number(8))
}

/// A range that was asked for.
pub(crate) struct Requested<'a> {
    receiver: mpsc::Receiver<Result<Box<[u8]>>>,
    name: &'a Path,
}

impl Requested<'_> {
    /// Waits for its bytes.
    pub(crate) fn bytes(self) -> Result<Box<[u8]>> {
        let failed = |_| {
            let source = io::Error::other("the thread that reads objects has failed");
            ObjectError::local("read", self.name, source)
        };
        self.receiver.recv().map_err(failed)?
    }
}

impl ObjectStore {
    pub(crate) fn new(
        fetcher: Arc<Fetcher>,
        identity: &Identity,
        data: Option<Arc<dyn Store>>,
        runtime: Handle,
    ) -> io::Result<Self> {
        let silent = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let lane = Arc::new(ObjectLane { fetcher: Arc::clone(&fetcher), data: data.clone(), runtime, silent });
        let contents_id = fetcher.wanted.origin.manifest().map(|manifest| manifest.contents_uuid());
        let name = identity.name.clone().into();
        Ok(Self { name, identity: numbers(identity), contents_id, fetcher, lane, data })
    }

    pub(crate) fn size_bytes(&self) -> u64 {
        self.fetcher.wanted.origin.size_bytes()
    }

    /// The manifest, if it is a pushed disk.
    pub fn manifest(&self) -> Option<&Manifest> {
        self.fetcher.wanted.origin.manifest().map(Arc::as_ref)
    }

    /// Reads a range, which lies within the object and is not empty.
    pub(crate) fn read_whole(&self, buf: &mut [u8], offset_bytes: u64) -> Result<()> {
        if read_known(&self.fetcher, self.data.as_ref(), buf, offset_bytes) {
            return Ok(());
        }
        let range = offset_bytes..offset_bytes + buf.len() as u64;
        buf.copy_from_slice(&self.request(range, Purpose::Read).bytes()?);
        Ok(())
    }

    /// Asks for a range, which lies within the object and is not empty. Never waits.
    pub(crate) fn request(&self, range: Range<u64>, purpose: Purpose) -> Requested<'_> {
        let (sender, receiver) = mpsc::sync_channel(1);
        let memory = Memory::Caller(vec![0; (range.end - range.start) as usize].into(), sender);
        self.fetcher.wanted.want(range, memory, purpose);
        Requested { receiver, name: &self.name }
    }

    /// Waits until what was fetched is in the cache.
    pub(crate) fn wait_until_kept(&self) {
        while self.fetcher.is_at_work() {
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn refused<T>(&self) -> io::Result<T> {
        Err(ObjectError::ReadOnly { name: self.name.display().to_string() }.into())
    }
}

/// Reads a range whose blocks are known from the cache's file. `false` if not all of it is there.
fn read_known(fetcher: &Fetcher, data: Option<&Arc<dyn Store>>, buf: &mut [u8], offset_bytes: u64) -> bool {
    let Some(data) = data else { return false };
    let mut done = 0;
    while done < buf.len() {
        let at_bytes = offset_bytes + done as u64;
        let (block, within_bytes) = (at_bytes / BLOCK_BYTES, at_bytes % BLOCK_BYTES);
        let Some(known) = fetcher.wanted.blocks.get(block) else { return false };
        let len = (buf.len() - done).min((BLOCK_BYTES - within_bytes) as usize);
        let start_bytes = within_bytes - within_bytes % SUM_BYTES;
        let end_bytes = (within_bytes + len as u64).next_multiple_of(SUM_BYTES);
        let mut pieces = vec![0; (end_bytes - start_bytes) as usize];
        let is_read = data.read_at(&mut pieces, block * BLOCK_BYTES + start_bytes).is_ok();
        if !is_read || !known.is_intact(start_bytes, &pieces) {
            return false;
        }
        let skip = (within_bytes - start_bytes) as usize;
        buf[done..done + len].copy_from_slice(&pieces[skip..skip + len]);
        if known.use_units(Units::of(start_bytes..end_bytes)) && within_bytes == 0 {
            fetcher.wanted.goes_on(block);
        }
        done += len;
    }
    true
}

impl Store for ObjectStore {
    fn name(&self) -> &Path {
        &self.name
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.fetcher.wanted.origin.size_bytes())
    }

    fn read_at(&self, buf: &mut [u8], offset_bytes: u64) -> io::Result<()> {
        let end_bytes = offset_bytes.checked_add(buf.len() as u64).ok_or(io::ErrorKind::InvalidInput)?;
        if end_bytes > self.fetcher.wanted.origin.size_bytes() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if buf.is_empty() { Ok(()) } else { Ok(self.read_whole(buf, offset_bytes)?) }
    }

    fn write_at(&self, _buf: &[u8], _offset_bytes: u64) -> io::Result<()> {
        self.refused()
    }

    fn set_len(&self, _len_bytes: u64) -> io::Result<()> {
        self.refused()
    }

    fn allocate(&self, _range: FileRange) -> io::Result<()> {
        self.refused()
    }

    fn zero_range(&self, _range: FileRange, _how: Zeroing) -> io::Result<()> {
        self.refused()
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }

    fn data_file(&self) -> Option<DataFile<'_>> {
        None
    }

    fn lane(&self) -> Option<Arc<dyn Lane>> {
        Some(Arc::clone(&self.lane) as Arc<dyn Lane>)
    }

    fn placement(&self) -> Option<&dyn Placement> {
        self.data.is_some().then_some(self)
    }

    fn member(&self, number: u8) -> Option<Arc<dyn Store>> {
        self.data.clone().filter(|_| number == 0)
    }

    fn identity(&self) -> Option<(u64, u64)> {
        Some(self.identity)
    }

    fn next_data(&self, offset_bytes: u64) -> io::Result<Option<FileRange>> {
        let size_bytes = self.fetcher.wanted.origin.size_bytes();
        let Some(manifest) = self.fetcher.wanted.origin.manifest().filter(|_| offset_bytes < size_bytes) else {
            let all = FileRange { offset_bytes, len_bytes: size_bytes.saturating_sub(offset_bytes) };
            return Ok((all.len_bytes > 0).then_some(all));
        };
        Ok(manifest.next_run(offset_bytes / CHUNK_BYTES).map(|run| {
            let start = offset_bytes.max(run.start * CHUNK_BYTES);
            FileRange { offset_bytes: start, len_bytes: (run.end * CHUNK_BYTES).min(size_bytes) - start }
        }))
    }

    fn contents_id(&self) -> Option<[u8; 16]> {
        self.contents_id
    }

    /// Of a pushed disk what its chunks take.
    fn allocated_bytes(&self) -> io::Result<u64> {
        Ok(self.manifest().map_or(self.size_bytes(), Manifest::stored_bytes))
    }

    fn sector_bytes(&self) -> SectorSizes {
        let unknown = SectorSizes { logical_bytes: 512, physical_bytes: 4096 };
        self.fetcher.wanted.origin.manifest().map_or(unknown, |manifest| {
            let facts = manifest.facts();
            SectorSizes { logical_bytes: facts.logical_sector_bytes, physical_bytes: facts.physical_sector_bytes }
        })
    }
}

impl Placement for ObjectStore {
    #[inline]
    fn place(&self, range: FileRange, access: Access, _may_note: bool) -> Placed {
        let FileRange { offset_bytes, len_bytes } = range;
        let (block, within_bytes) = (offset_bytes / BLOCK_BYTES, offset_bytes % BLOCK_BYTES);
        let len_bytes = len_bytes.min(BLOCK_BYTES - within_bytes);
        let mut placed = Placed { len_bytes, ..Placed::default() };
        let is_whole = (offset_bytes | len_bytes).is_multiple_of(SUM_BYTES);
        if access == Access::Read
            && is_whole
            && let Some(known) = self.fetcher.wanted.blocks.get(block)
            && known.knows(within_bytes..within_bytes + len_bytes)
        {
            // A stream reads a block from its first byte on.
            if known.use_units(Units::of(within_bytes..within_bytes + len_bytes)) && within_bytes == 0 {
                self.fetcher.wanted.goes_on(block);
            }
            placed.copies[0] = CopyAt { member: 0, offset_bytes };
            (placed.count, placed.is_checked) = (1, true);
        }
        placed
    }

    fn note(&self, _hold: u64, _bytes: &[u8]) {}

    fn release(&self, _member: u8, _hold: u64, _access: Access, _ok: bool) {}

    fn is_intact(&self, _hold: u64, offset_bytes: u64, bytes: &[u8]) -> bool {
        let known = self.fetcher.wanted.blocks.get(offset_bytes / BLOCK_BYTES);
        known.is_some_and(|known| known.is_intact(offset_bytes % BLOCK_BYTES, bytes))
    }

    fn sync_failed(&self, _member: u8, _error: &io::Error) {}

    fn unsynced(&self) -> Option<u64> {
        Some(0)
    }

    fn synced(&self, _member: u8, _result: &io::Result<()>) {}
}

impl Lane for ObjectLane {
    fn start(&self, op: LaneOp, mut loan: Loan) {
        let offset_bytes = match op {
            LaneOp::Read { offset_bytes } => offset_bytes,
            LaneOp::Sync => return loan.complete(Ok(())),
            LaneOp::Write { .. } | LaneOp::Zero { .. } => {
                let name = self.fetcher.wanted.origin.name().to_owned();
                return loan.complete(Err(ObjectError::ReadOnly { name }.into()));
            }
        };
        let len_bytes = loan.len() as u64;
        let size_bytes = self.fetcher.wanted.origin.size_bytes();
        if offset_bytes.checked_add(len_bytes).is_none_or(|end_bytes| end_bytes > size_bytes) {
            return loan.complete(Err(io::ErrorKind::UnexpectedEof.into()));
        }
        if len_bytes == 0 {
            return loan.complete(Ok(()));
        }
        let fetcher = Arc::clone(&self.fetcher);
        let range = offset_bytes..offset_bytes + len_bytes;
        if !fetcher.wanted.blocks.know(range.clone()) {
            return fetcher.wanted.want(range, Memory::Loan(loan), Purpose::Read);
        }
        let data = self.data.clone();
        self.runtime.spawn_blocking(move || {
            match read_known(&fetcher, data.as_ref(), loan.bytes_mut(), offset_bytes) {
                true => loan.complete(Ok(())),
                false => fetcher.wanted.want(range, Memory::Loan(loan), Purpose::Read),
            }
        });
    }

    fn drive(&self) {}

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.silent.as_fd()
    }

    fn patience(&self) -> Duration {
        // A server that is lost is an error after its timeout.
        self.fetcher.wanted.origin.timeout() + Duration::from_secs(5)
    }
}
