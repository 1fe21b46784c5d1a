//! A hostile member of a pool: a superblock, a checkpoint and a journal with any contents, whose
//! checksums are right.
//!
//! The promise: the pool is opened, or refused with a reason. What is opened can be read and
//! written, and the memory of the map follows the slabs that are mapped, not the numbers in them.

use arbitrary::{Arbitrary, Unstructured};
use diskwright_format::space::{
    BLOCK_BYTES, Copy,
    change::{Change, SlabRun, SlabState, Tier},
    journal::{CHANGES_BYTES_MAX, Position, parse_block, put_block},
    superblock::Superblock,
};
use diskwright_space::{Class, NewFile, NewMember, Pool, PoolCreateOptions, PoolOptions};
use diskwright_store::{FileFacts, FileSystem, Files, LockMode, MemoryStore, OpenError, OpenOptions, Store, Zeroing};
use std::{
    io,
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
};

const SLAB_BYTES: u64 = 256 << 10;
const MEMBER_BYTES: usize = (1 << 20) + 8 * SLAB_BYTES as usize + BLOCK_BYTES;
/// Where the journal of a new pool begins: the first slab.
const JOURNAL_AT: usize = 1 << 20;

/// The only member, in memory.
#[derive(Debug)]
struct OneFile(Arc<MemoryStore>);

impl FileSystem for OneFile {
    fn open(&self, _path: &Path, _options: &OpenOptions) -> Result<Arc<dyn Store>, OpenError> {
        Ok(self.0.clone())
    }

    fn rename(&self, _from: &Path, _to: &Path, _replace: bool) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn remove(&self, _path: &Path) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn sync_directory_of(&self, _path: &Path) -> io::Result<()> {
        Ok(())
    }

    fn canonical(&self, path: &Path) -> io::Result<PathBuf> {
        Ok(path.to_owned())
    }

    fn facts(&self, _path: &Path) -> io::Result<FileFacts> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn list(&self, _directory: &Path) -> io::Result<Vec<PathBuf>> {
        Ok(Vec::new())
    }
}

fn files(bytes: Vec<u8>) -> (Files, Arc<MemoryStore>) {
    let store = Arc::new(MemoryStore::with_bytes("member", bytes));
    (Files::new(Arc::new(OneFile(Arc::clone(&store)))), store)
}

/// A member of a sound pool with a disk, and the place where its journal continues.
fn sample() -> &'static (Vec<u8>, Position) {
    static SAMPLE: OnceLock<(Vec<u8>, Position)> = OnceLock::new();
    SAMPLE.get_or_init(|| {
        let (files, store) = files(vec![0; MEMBER_BYTES]);
        let member = NewMember { path: "member".into(), class: Class::Ssd };
        let options =
            PoolCreateOptions { slab_bytes: SLAB_BYTES, files: files.clone(), ..PoolCreateOptions::default() };
        Pool::create("vault", &[member], &options).expect("a pool can be made in memory");
        let options = PoolOptions { writable: true, files, ..PoolOptions::default() };
        let pool = Arc::new(Pool::open(&["member".into()], &options).expect("it was just made"));
        let new = NewFile { len_bytes: 4 * SLAB_BYTES, copies: 1, columns: 1, tier: Tier::Any };
        pool.create_file("disk", new).expect("it has room");
        let disk = pool.open_file("disk", true, LockMode::None).expect("it was just made");
        disk.write_at(&[7; 5000], SLAB_BYTES - 100).expect("it has room");
        let id = pool.id();
        drop((disk, pool));
        let bytes = store.to_vec();
        let mut position = Position { sequence: 0, before: 0 };
        while let Some((_, next)) =
            parse_block(&bytes[JOURNAL_AT + position.sequence as usize * BLOCK_BYTES..][..BLOCK_BYTES], id, position)
        {
            position = next;
        }
        (bytes, position)
    })
}

/// A change with hostile numbers.
#[derive(Debug, Arbitrary)]
enum Hostile {
    Raw(Vec<u8>),
    File { file: u8, len_bytes: u64, copies: u8, name: String },
    Length { file: u8, len_bytes: u64 },
    Removed { file: u8 },
    Slabs { file: u8, first: u32, slabs: Vec<(u8, u8, u8)> },
    State { file: u8, first: u32, count: u32, state: u8 },
    Extent { file: u8, first: u32, count: u16, state: u8, copies: [u32; 3] },
    Stale { file: u8, index: u32, mask: u8 },
    Unmap { file: u8, first: u32, count: u32 },
    Lost { member: u8 },
    Back { member: u8 },
    Named { file: u8, name: String },
    Unnamed { name: String },
}

impl Hostile {
    fn put(&self, out: &mut Vec<u8>) {
        let file = |file: u8| u32::from(file % 4);
        match self {
            Self::Raw(bytes) => out.extend_from_slice(bytes),
            Self::File { file: number, len_bytes, copies, name } => {
                let (file, copies) = (file(*number), 1 + copies % 3);
                Change::File { file, len_bytes: *len_bytes, copies, columns: 1, tier: Tier::Any, name }.put(out);
            }
            Self::Length { file: number, len_bytes } => {
                Change::Length { file: file(*number), len_bytes: *len_bytes }.put(out);
            }
            Self::Removed { file: number } => Change::Removed { file: file(*number) }.put(out),
            Self::Slabs { file: number, first, slabs } => {
                let mut bytes = Vec::new();
                for (state, member, slab) in slabs.iter().take(64) {
                    SlabRun::put(&mut bytes, state_of(*state), [Copy { member: member % 64, slab: u32::from(*slab) }]);
                }
                let slabs = SlabRun::new(1, &bytes);
                Change::Slabs { file: file(*number), first: *first, slabs }.put(out);
            }
            Self::State { file: number, first, count, state } => {
                let state = state_of(*state);
                Change::State { file: file(*number), first: *first, count: *count, state }.put(out);
            }
            Self::Extent { file: number, first, count, state, copies } => {
                let (file, count, state) = (file(*number), u32::from(*count), state_of(*state));
                Change::Extent { file, first: *first, count, state, copies: *copies }.put(out);
            }
            Self::Stale { file: number, index, mask } => {
                Change::Stale { file: file(*number), index: *index, mask: *mask }.put(out);
            }
            Self::Unmap { file: number, first, count } => {
                Change::Unmap { file: file(*number), first: *first, count: *count }.put(out);
            }
            Self::Lost { member } => Change::Lost { member: member % 64 }.put(out),
            Self::Back { member } => Change::Back { member: member % 64 }.put(out),
            Self::Named { file: number, name } => Change::Named { file: file(*number), name }.put(out),
            Self::Unnamed { name } => Change::Unnamed { name }.put(out),
        }
    }
}

fn state_of(choice: u8) -> SlabState {
    [SlabState::Dirty, SlabState::Clean, SlabState::Sealed][usize::from(choice % 3)]
}

#[derive(Debug, Arbitrary)]
struct Input {
    /// Bytes of the superblock that are replaced. Its checksum is made right.
    superblock: Vec<(u16, u8)>,
    changes: Vec<Hostile>,
    writable: bool,
}

/// Opens a pool with hostile metadata, and uses what it shows.
pub fn space(data: &[u8]) {
    let Ok(input) = Input::arbitrary(&mut Unstructured::new(data)) else { return };
    let (bytes, position) = sample();
    let mut bytes = bytes.clone();
    let Ok(superblock) = Superblock::parse(&bytes[..BLOCK_BYTES]) else { return };
    let mut changes = Vec::new();
    input.changes.iter().take(64).for_each(|change| change.put(&mut changes));
    if !changes.is_empty() {
        changes.truncate(CHANGES_BYTES_MAX);
        let mut block = [0; BLOCK_BYTES];
        put_block(&mut block, superblock.pool, *position, &changes);
        bytes[JOURNAL_AT + position.sequence as usize * BLOCK_BYTES..][..BLOCK_BYTES].copy_from_slice(&block);
    }
    if !input.superblock.is_empty() {
        for (at, byte) in &input.superblock {
            bytes[usize::from(*at) % BLOCK_BYTES] = *byte;
        }
        bytes[12..16].fill(0);
        let sum = crc32c::crc32c(&bytes[..BLOCK_BYTES]);
        bytes[12..16].copy_from_slice(&sum.to_le_bytes());
        drop(Superblock::parse(&bytes[..BLOCK_BYTES]));
    }
    let (files, _) = files(bytes);
    let options = PoolOptions { writable: input.writable, files, ..PoolOptions::default() };
    let pool = match Pool::open(&["member".into()], &options) {
        Ok(pool) => Arc::new(pool),
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    drop(pool.status());
    for name in pool.names() {
        let Ok(file) = pool.open_file(&name, input.writable, LockMode::None) else { continue };
        let mut buf = vec![0; 8192];
        let len_bytes = file.len_bytes().unwrap_or(0);
        for at in [0, SLAB_BYTES - 4096, len_bytes.saturating_sub(8192)] {
            drop(file.read_at(&mut buf, at));
            if input.writable {
                drop(file.write_at(&buf[..100], at));
            }
        }
        let range = diskwright_store::FileRange { offset_bytes: 0, len_bytes: SLAB_BYTES };
        if input.writable && len_bytes >= SLAB_BYTES {
            drop(file.zero_range(range, Zeroing::Deallocate));
            drop(file.sync_data());
        }
        drop(file.next_data(0));
    }
    if input.writable {
        drop(pool.tick());
    }
}
