//! A sparse store in memory that also records what a power cut may lose.

use diskwright_store::{DataFile, FileRange, Store, Zeroing};
use std::{
    collections::BTreeMap,
    fmt, io,
    path::{Path, PathBuf},
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

const SECTOR: u64 = 512;

/// Contents by sector. Sectors that are not in the map are zero.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Sectors {
    pub map: BTreeMap<u64, [u8; SECTOR as usize]>,
    pub len: u64,
}

impl Sectors {
    pub fn write(&mut self, bytes: &[u8], offset: u64) {
        let mut at = 0;
        while at < bytes.len() {
            let position = offset + at as u64;
            let inside = (position % SECTOR) as usize;
            let take = (bytes.len() - at).min(SECTOR as usize - inside);
            let sector = self.map.entry(position / SECTOR).or_insert([0; SECTOR as usize]);
            sector[inside..inside + take].copy_from_slice(&bytes[at..at + take]);
            at += take;
        }
        self.len = self.len.max(offset + bytes.len() as u64);
    }

    pub fn read(&self, out: &mut [u8], offset: u64) -> io::Result<()> {
        if offset + out.len() as u64 > self.len {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        out.fill(0);
        let end = offset + out.len() as u64;
        for (sector, bytes) in self.map.range(offset / SECTOR..end.div_ceil(SECTOR)) {
            let start = sector * SECTOR;
            let (from, to) = (start.max(offset), (start + SECTOR).min(end));
            out[(from - offset) as usize..(to - offset) as usize]
                .copy_from_slice(&bytes[(from - start) as usize..(to - start) as usize]);
        }
        Ok(())
    }

    pub fn set_len(&mut self, len: u64) {
        if len < self.len {
            self.zero(FileRange { offset_bytes: len, len_bytes: self.len - len });
        }
        self.len = len;
    }

    pub fn zero(&mut self, range: FileRange) {
        let (start, end) = (range.offset_bytes, range.offset_bytes + range.len_bytes);
        let touched: Vec<_> = self.map.range(start / SECTOR..end.div_ceil(SECTOR)).map(|(sector, _)| *sector).collect();
        for sector in touched {
            let base = sector * SECTOR;
            if let Some(bytes) = self.map.get_mut(&sector) {
                bytes[(start.max(base) - base) as usize..(end.min(base + SECTOR) - base) as usize].fill(0);
            }
        }
    }
}

/// A change that no sync has made durable.
#[derive(Debug, Clone)]
pub enum Change {
    /// One sector, or a part of it.
    Write(u64, Vec<u8>),
    Length(u64),
}

/// The state before a sync: the durable contents, and the changes since.
#[derive(Debug, Clone)]
pub struct Cut {
    pub durable: Sectors,
    pub changes: Vec<Change>,
}

#[derive(Debug, Default)]
struct Contents {
    now: Sectors,
    durable: Sectors,
    changes: Vec<Change>,
    cuts: Vec<Cut>,
}

/// An action to run inside the next sync, after everything is durable and before the sync returns.
#[derive(Default)]
pub struct Hook(Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl Hook {
    pub fn set(&self, action: impl FnOnce() + Send + 'static) {
        *self.0.lock().unwrap() = Some(Box::new(action));
    }
}

impl fmt::Debug for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hook")
    }
}

/// A sparse store that records the state before each sync.
#[derive(Debug)]
pub struct SparseStore {
    name: PathBuf,
    contents: Mutex<Contents>,
    pub records_cuts: AtomicBool,
    pub fail_syncs: AtomicBool,
    /// Number of syncs that succeed before one fails.
    pub syncs_left: AtomicU64,
    pub fail_writes: AtomicBool,
    /// Maximum length of the store in bytes.
    pub max_len: AtomicU64,
    pub syncs: AtomicU64,
    pub in_next_sync: Hook,
}

impl SparseStore {
    pub fn new(name: &str) -> Self {
        Self::with(name, Sectors::default())
    }

    pub fn with(name: &str, sectors: Sectors) -> Self {
        Self {
            name: name.into(),
            contents: Mutex::new(Contents { now: sectors.clone(), durable: sectors, ..Default::default() }),
            records_cuts: AtomicBool::new(false),
            fail_syncs: AtomicBool::new(false),
            syncs_left: AtomicU64::new(u64::MAX),
            fail_writes: AtomicBool::new(false),
            max_len: AtomicU64::new(u64::MAX),
            syncs: AtomicU64::new(0),
            in_next_sync: Hook::default(),
        }
    }

    pub fn sectors(&self) -> Sectors {
        self.contents.lock().unwrap().now.clone()
    }

    pub fn take_cuts(&self) -> Vec<Cut> {
        std::mem::take(&mut self.contents.lock().unwrap().cuts)
    }

    /// The state for a power cut at this instant.
    pub fn cut(&self) -> Cut {
        let contents = self.contents.lock().unwrap();
        Cut { durable: contents.durable.clone(), changes: contents.changes.clone() }
    }

    /// Everything written before the last sync began, whether it was durable then or not.
    pub fn last_sync(&self) -> Sectors {
        let cut = self.take_cuts().pop().unwrap();
        let mut written = cut.durable;
        for change in cut.changes {
            match change {
                Change::Write(offset, bytes) => written.write(&bytes, offset),
                Change::Length(len) => written.set_len(len),
            }
        }
        written
    }

    /// All bytes, for small files.
    pub fn to_vec(&self) -> Vec<u8> {
        let sectors = self.sectors();
        let mut bytes = vec![0; sectors.len as usize];
        sectors.read(&mut bytes, 0).unwrap();
        bytes
    }

    fn change(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        if self.fail_writes.load(Ordering::Relaxed)
            || offset + bytes.len() as u64 > self.max_len.load(Ordering::Relaxed)
        {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let mut contents = self.contents.lock().unwrap();
        contents.now.write(bytes, offset);
        if self.records_cuts.load(Ordering::Relaxed) {
            let mut at = 0;
            while at < bytes.len() {
                let position = offset + at as u64;
                let take = (bytes.len() - at).min((SECTOR - position % SECTOR) as usize);
                contents.changes.push(Change::Write(position, bytes[at..at + take].to_vec()));
                at += take;
            }
        }
        Ok(())
    }
}

impl Store for SparseStore {
    fn name(&self) -> &Path {
        &self.name
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.contents.lock().unwrap().now.len)
    }

    fn read_at(&self, buf: &mut [u8], offset_bytes: u64) -> io::Result<()> {
        self.contents.lock().unwrap().now.read(buf, offset_bytes)
    }

    fn write_at(&self, buf: &[u8], offset_bytes: u64) -> io::Result<()> {
        self.change(buf, offset_bytes)
    }

    fn set_len(&self, len_bytes: u64) -> io::Result<()> {
        let mut contents = self.contents.lock().unwrap();
        if len_bytes > self.max_len.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        contents.now.set_len(len_bytes);
        if self.records_cuts.load(Ordering::Relaxed) {
            contents.changes.push(Change::Length(len_bytes));
        }
        Ok(())
    }

    fn allocate(&self, range: FileRange) -> io::Result<()> {
        let end = range.offset_bytes + range.len_bytes;
        if end > self.len_bytes()? { self.set_len(end) } else { Ok(()) }
    }

    fn zero_range(&self, range: FileRange, _how: Zeroing) -> io::Result<()> {
        let mut contents = self.contents.lock().unwrap();
        if range.offset_bytes + range.len_bytes > contents.now.len {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if self.records_cuts.load(Ordering::Relaxed) {
            let (start, end) = (range.offset_bytes, range.offset_bytes + range.len_bytes);
            // Losing a sector that is zero both in memory and durably makes no difference.
            let mut sectors: Vec<u64> = contents.now.map.keys().chain(contents.durable.map.keys()).copied().collect();
            sectors.sort_unstable();
            sectors.dedup();
            for sector in sectors {
                let (from, to) = ((sector * SECTOR).max(start), ((sector + 1) * SECTOR).min(end));
                if from < to {
                    contents.changes.push(Change::Write(from, vec![0; (to - from) as usize]));
                }
            }
        }
        contents.now.zero(range);
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        self.syncs.fetch_add(1, Ordering::Relaxed);
        let left = self.syncs_left.load(Ordering::Relaxed);
        self.syncs_left.store(left.saturating_sub(1), Ordering::Relaxed);
        if left == 0 || self.fail_syncs.load(Ordering::Relaxed) {
            return Err(io::Error::from_raw_os_error(5));
        }
        if self.records_cuts.load(Ordering::Relaxed) {
            let cut = self.cut();
            let mut contents = self.contents.lock().unwrap();
            contents.cuts.push(cut);
            contents.durable = contents.now.clone();
            contents.changes.clear();
        }
        let hook = self.in_next_sync.0.lock().unwrap().take();
        hook.into_iter().for_each(|action| action());
        Ok(())
    }

    fn data_file(&self) -> Option<DataFile<'_>> {
        None
    }

    fn never_blocks(&self) -> bool {
        true
    }

    fn next_data(&self, offset_bytes: u64) -> io::Result<Option<FileRange>> {
        let contents = self.contents.lock().unwrap();
        let first = contents.now.map.range(offset_bytes / SECTOR..).next();
        Ok(first.map(|(sector, _)| {
            let start = (sector * SECTOR).max(offset_bytes);
            FileRange { offset_bytes: start, len_bytes: (sector + 1) * SECTOR - start }
        }))
    }
}
