//! Tests of whole VHDX images. Modules:
//!
//! ```text
//!   mod.rs      a store with volatile and durable contents; a minimal disk that drives an image
//!   model.rs    random sessions against an array of sectors; what a session may change
//!   replay.rs   hand-made logs
//!   grow.rs     growth of a disk, and power cuts meanwhile
//!   relink.rs   changes of the link to the parent, and power cuts meanwhile
//!   crash.rs    power cuts in a flush of many pages
//!   hostile.rs  damaged and malicious files
//!   odd.rs      entries of other programs, kept space, and damage of single blocks
//!   tools.rs    comparison with qemu-img, qemu-io and vhdiinfo
//! ```

pub(super) mod crash;
mod grow;
mod hostile;
mod model;
mod odd;
mod relink;
mod replay;
mod tools;

use super::{create, image::VhdxImage, open};
use crate::{BlockState, Commit, CreateOptions, DiskType, Image, ImageWriter, ParentLink};
use diskwright_store::{DataFile, FileRange, Store, Zeroing};
use std::{
    collections::BTreeMap,
    fmt, io,
    path::Path,
    sync::{Arc, Mutex},
};
use uuid::Uuid;

pub(super) const MIB: u64 = 1 << 20;
pub(super) const SECTOR: u64 = 512;

/// Contents of a sparse file. Cloning is cheap.
#[derive(Clone, Default, PartialEq)]
pub(super) struct Contents {
    pages: BTreeMap<u64, Arc<Vec<u8>>>,
    pub(super) len_bytes: u64,
}

impl Contents {
    pub(super) fn read(&self, buf: &mut [u8], offset_bytes: u64) {
        let mut done = 0;
        while done < buf.len() {
            let at = offset_bytes + done as u64;
            let within = (at % 4096) as usize;
            let len = (4096 - within).min(buf.len() - done);
            match self.pages.get(&(at / 4096)) {
                Some(page) => buf[done..done + len].copy_from_slice(&page[within..within + len]),
                None => buf[done..done + len].fill(0),
            }
            done += len;
        }
    }

    pub(super) fn write(&mut self, bytes: &[u8], offset_bytes: u64) {
        let mut done = 0;
        while done < bytes.len() {
            let at = offset_bytes + done as u64;
            let within = (at % 4096) as usize;
            let len = (4096 - within).min(bytes.len() - done);
            let page = self.pages.entry(at / 4096).or_insert_with(|| Arc::new(vec![0; 4096]));
            Arc::make_mut(page)[within..within + len].copy_from_slice(&bytes[done..done + len]);
            done += len;
        }
        self.len_bytes = self.len_bytes.max(offset_bytes + bytes.len() as u64);
    }

    fn set_len(&mut self, len_bytes: u64) {
        if len_bytes < self.len_bytes {
            self.zero(len_bytes, self.len_bytes);
        }
        self.len_bytes = len_bytes;
    }

    fn zero(&mut self, start: u64, end: u64) {
        let touched: Vec<u64> = self.pages.range(start / 4096..end.div_ceil(4096)).map(|(&page, _)| page).collect();
        for page in touched {
            let (from, to) = ((page * 4096).max(start), (page * 4096 + 4096).min(end));
            if to - from == 4096 {
                self.pages.remove(&page);
            } else if let Some(bytes) = self.pages.get_mut(&page) {
                Arc::make_mut(bytes)[(from % 4096) as usize..(to - page * 4096) as usize].fill(0);
            }
        }
    }

    pub(super) fn save(&self, path: &Path) {
        use std::os::unix::fs::FileExt;
        let file = std::fs::File::create(path).unwrap();
        file.set_len(self.len_bytes).unwrap();
        for (&page, bytes) in &self.pages {
            let at = page * 4096;
            file.write_all_at(&bytes[..(self.len_bytes - at).min(4096) as usize], at).unwrap();
        }
    }
}

#[derive(Clone)]
enum Op {
    Write(u64, Vec<u8>),
    SetLen(u64),
    Zero(u64, u64),
}

type Hook = Box<dyn FnMut(&Power) + Send>;

/// A store that records what is durable. `hook` runs before a sync completes and sees what a power
/// cut could leave.
pub(super) struct TestStore {
    state: Mutex<Power>,
    hook: Mutex<Option<Hook>>,
}

/// The durable contents, and the operations since.
#[derive(Clone, Default)]
pub(super) struct Power {
    durable: Contents,
    volatile: Contents,
    pending: Vec<Op>,
    pub(super) syncs: u64,
    pub(super) writes: u64,
    pub(super) fail_syncs: bool,
    /// The sync with this number does nothing.
    pub(super) idle_sync: Option<u64>,
    pub(super) fail_writes: bool,
    pub(super) full_at_bytes: Option<u64>,
}

impl Power {
    /// The contents after a power cut now. Of all unsynced operations, each 512 bytes and each
    /// change of the length is kept or lost as `keep` says. Its argument is the index of the
    /// operation.
    pub(super) fn cut(&self, keep: &mut dyn FnMut(usize) -> bool) -> Contents {
        let mut left = self.durable.clone();
        for (number, op) in self.pending.iter().enumerate() {
            match op {
                Op::Write(offset_bytes, bytes) => {
                    let mut at = 0;
                    while at < bytes.len() {
                        let len = (512 - (offset_bytes + at as u64) as usize % 512).min(bytes.len() - at);
                        if keep(number) {
                            left.write(&bytes[at..at + len], offset_bytes + at as u64);
                        }
                        at += len;
                    }
                }
                Op::SetLen(len_bytes) if keep(number) => left.set_len(*len_bytes),
                Op::Zero(start, end) if keep(number) => left.zero(*start, (*end).min(left.len_bytes)),
                Op::SetLen(_) | Op::Zero(..) => {}
            }
        }
        left
    }
}

impl TestStore {
    pub(super) fn new(contents: Contents) -> Arc<Self> {
        let state = Power { durable: contents.clone(), volatile: contents, ..Power::default() };
        Arc::new(Self { state: Mutex::new(state), hook: Mutex::new(None) })
    }

    pub(super) fn with<T>(&self, change: impl FnOnce(&mut Power) -> T) -> T {
        change(&mut self.state.lock().unwrap())
    }

    pub(super) fn contents(&self) -> Contents {
        self.with(|power| power.volatile.clone())
    }

    pub(super) fn set_hook(&self, hook: impl FnMut(&Power) + Send + 'static) {
        *self.hook.lock().unwrap() = Some(Box::new(hook));
    }

    fn modify(&self, op: Op) -> io::Result<()> {
        self.with(|power| {
            if power.fail_writes {
                return Err(io::Error::other("injected failure of a write"));
            }
            power.writes += 1;
            match &op {
                Op::Write(offset_bytes, bytes) => power.volatile.write(bytes, *offset_bytes),
                Op::SetLen(len_bytes) => power.volatile.set_len(*len_bytes),
                Op::Zero(start, end) => power.volatile.zero(*start, *end),
            }
            power.pending.push(op);
            Ok(())
        })
    }
}

impl fmt::Debug for TestStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TestStore")
    }
}

impl Store for TestStore {
    fn name(&self) -> &Path {
        Path::new("test.vhdx")
    }
    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.with(|power| power.volatile.len_bytes))
    }
    fn read_at(&self, buf: &mut [u8], offset_bytes: u64) -> io::Result<()> {
        self.with(|power| {
            let end = offset_bytes.checked_add(buf.len() as u64).ok_or(io::ErrorKind::InvalidInput)?;
            if !buf.is_empty() && end > power.volatile.len_bytes {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            power.volatile.read(buf, offset_bytes);
            Ok(())
        })
    }
    fn write_at(&self, buf: &[u8], offset_bytes: u64) -> io::Result<()> {
        self.modify(Op::Write(offset_bytes, buf.to_vec()))
    }
    fn set_len(&self, len_bytes: u64) -> io::Result<()> {
        self.modify(Op::SetLen(len_bytes))
    }
    fn allocate(&self, range: FileRange) -> io::Result<()> {
        let end = range.offset_bytes.checked_add(range.len_bytes).ok_or(io::ErrorKind::InvalidInput)?;
        if self.with(|power| power.full_at_bytes.is_some_and(|full| end > full)) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.modify(Op::SetLen(end.max(self.len_bytes()?)))
    }
    fn zero_range(&self, range: FileRange, _how: Zeroing) -> io::Result<()> {
        let end = range.offset_bytes.checked_add(range.len_bytes).ok_or(io::ErrorKind::InvalidInput)?;
        if end > self.len_bytes()? {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.modify(Op::Zero(range.offset_bytes, end))
    }
    fn sync_data(&self) -> io::Result<()> {
        let power = self.with(|power| power.clone());
        if let Some(hook) = &mut *self.hook.lock().unwrap() {
            hook(&power);
        }
        self.with(|power| {
            if power.fail_syncs {
                return Err(io::Error::other("injected failure of a sync"));
            }
            power.syncs += 1;
            if power.idle_sync == Some(power.syncs) {
                return Ok(());
            }
            power.pending.clear();
            power.durable = power.volatile.clone();
            Ok(())
        })
    }
    fn data_file(&self) -> Option<DataFile<'_>> {
        None
    }

    fn never_blocks(&self) -> bool {
        true
    }
    fn next_data(&self, offset_bytes: u64) -> io::Result<Option<FileRange>> {
        self.with(|power| {
            let page = power.volatile.pages.range(offset_bytes / 4096..).next();
            Ok(page.map(|(&page, _)| FileRange {
                offset_bytes: (page * 4096).max(offset_bytes),
                len_bytes: (page + 1) * 4096 - (page * 4096).max(offset_bytes),
            }))
        })
    }
}

/// The byte that fills a sector of the parent.
pub(super) fn parent_tag(sector: u64) -> u8 {
    (sector % 199) as u8 + 50
}

/// A minimal disk above an image. Every sector is filled with one byte, its tag.
pub(super) struct Driver {
    pub(super) store: Arc<TestStore>,
    pub(super) image: VhdxImage,
}

impl Driver {
    pub(super) fn open(store: &Arc<TestStore>, writable: bool) -> Self {
        let image = open(Arc::clone(store) as Arc<dyn Store>, writable).unwrap_or_else(|error| panic!("{error}"));
        Self { store: Arc::clone(store), image }
    }

    pub(super) fn create(options: &CreateOptions) -> Arc<TestStore> {
        let store = TestStore::new(Contents::default());
        create(Arc::clone(&store) as Arc<dyn Store>, options).unwrap();
        store
    }

    pub(super) fn writer(&self) -> &dyn ImageWriter {
        self.image.writer().unwrap()
    }

    pub(super) fn state(&self, block: u64) -> BlockState {
        let mut out = [BlockState::Absent];
        self.image.block_states(block, &mut out).unwrap_or_else(|error| panic!("{error}"));
        out[0]
    }

    /// The tag of a sector. All its bytes must be the tag.
    pub(super) fn read(&self, sector: u64) -> u8 {
        let block = sector * SECTOR / self.image.info().block_bytes;
        let within = sector * SECTOR % self.image.info().block_bytes;
        let below = || if self.image.info().parent.is_some() { parent_tag(sector) } else { 0 };
        let own = |offset_bytes: u64| {
            let mut bytes = [0; SECTOR as usize];
            self.image.store().read_at(&mut bytes, offset_bytes + within).unwrap();
            assert!(bytes.iter().all(|&byte| byte == bytes[0]), "sector {sector} is torn or mixed");
            bytes[0]
        };
        match self.state(block) {
            BlockState::Absent => below(),
            BlockState::Zero => 0,
            BlockState::Data { offset_bytes, .. } => own(offset_bytes),
            BlockState::Partial { offset_bytes, .. } => {
                let bitmap = self.image.sector_bitmap(block).unwrap();
                if bitmap.get((within / SECTOR) as u32) { own(offset_bytes) } else { below() }
            }
            other => panic!("sector {sector} is {other:?}"),
        }
    }

    /// Fills sectors of one block.
    pub(super) fn write(&self, sector: u64, count: u32, tag: u8) -> crate::Result<()> {
        let block_bytes = self.image.info().block_bytes;
        let (block, within) = (sector * SECTOR / block_bytes, sector * SECTOR % block_bytes);
        self.writer().begin_writing()?;
        let offset_bytes = match self.state(block) {
            BlockState::Data { offset_bytes, .. } => offset_bytes,
            _ => self.writer().reserve_waiting(block)?.offset_bytes,
        };
        self.store.write_at(&vec![tag; count as usize * SECTOR as usize], offset_bytes + within).unwrap();
        if !matches!(self.state(block), BlockState::Data { .. }) {
            let state =
                self.writer().commit_waiting(block, Commit::Sectors { first: (within / SECTOR) as u32, count })?;
            assert_eq!(state, self.state(block));
        }
        Ok(())
    }
}

pub(super) fn options(disk_type: DiskType, size_bytes: u64, block_bytes: u32) -> CreateOptions {
    let parent = ParentLink {
        relative_path: Some("..\\parent.vhdx".into()),
        linkage: Some(Uuid::from_u128(0x1234).into()),
        ..ParentLink::default()
    };
    CreateOptions {
        disk_type,
        size_bytes,
        block_bytes: Some(block_bytes),
        logical_sector_bytes: 512,
        physical_sector_bytes: 4096,
        parent: (disk_type == DiskType::Differencing).then_some(parent),
        preallocate: false,
        disk_id: Some(Uuid::from_u128(42)),
        own: Default::default(),
    }
}

/// A portable generator of random numbers (xorshift64*).
pub(super) struct Numbers(pub(super) u64);

impl Numbers {
    pub(super) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }

    pub(super) fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}
