//! Dynamic VHDs of other programs: each sector bitmap is read once, and then a populated disk is as
//! fast as one of ours.

use diskwright_disk::{CreateRequest, Disk, Layer, create};
use diskwright_image::probe;
use diskwright_store::{Blocking, EngineKind, MemoryStore, Store, testing::ForwardingStore};
use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 64 << 10;
const BLOCKS: u64 = 64;

/// A store in memory that counts reads.
#[derive(Debug)]
struct Counted {
    inner: MemoryStore,
    reads: AtomicU64,
}

impl ForwardingStore for Counted {
    fn inner(&self) -> &dyn Store {
        &self.inner
    }
    fn read_at(&self, buf: &mut [u8], offset_bytes: u64) -> io::Result<()> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.inner.read_at(buf, offset_bytes)
    }
}

/// A populated disk of 4 MiB whose creator is `creator_app`.
fn populated(creator_app: &[u8; 4]) -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.vhd");
    let request =
        CreateRequest { size_bytes: Some(4 * MIB), block_bytes: Some(BLOCK as u32), ..CreateRequest::default() };
    create(&path, &request).unwrap();
    let disk = Disk::open(&path, &diskwright_disk::OpenOptions { writable: true, ..Default::default() }).unwrap();
    let mut io = Blocking::open(&*disk, EngineKind::Sync).unwrap();
    for block in 0..BLOCKS {
        io.write(block * BLOCK, &vec![block as u8 + 1; BLOCK as usize], false).unwrap();
    }
    drop(io);
    disk.close().unwrap();
    let mut bytes = std::fs::read(&path).unwrap();
    for at in [0, bytes.len() - 512] {
        let footer = &mut bytes[at..at + 512];
        footer[28..32].copy_from_slice(creator_app);
        footer[64..68].fill(0);
        let sum: u32 = footer.iter().map(|&byte| u32::from(byte)).sum();
        footer[64..68].copy_from_slice(&(!sum).to_be_bytes());
    }
    bytes
}

/// Bytes of the bitmap of the block whose payload is filled with `fill`.
fn bitmap_of(bytes: &mut [u8], fill: u8) -> &mut [u8] {
    let payload = bytes.chunks(4096).position(|page| page.iter().all(|&byte| byte == fill)).unwrap() * 4096;
    &mut bytes[payload - 512..payload]
}

fn open(bytes: Vec<u8>, writable: bool) -> (Arc<Counted>, Disk) {
    let inner = MemoryStore::with_bytes("disk.vhd", bytes);
    let store = Arc::new(Counted { inner, reads: AtomicU64::new(0) });
    let image = probe::open(Arc::clone(&store) as Arc<dyn Store>, None, writable, 512).unwrap();
    (store, Disk::from_layers(vec![Layer { path: "disk.vhd".into(), image }], Vec::new()).unwrap())
}

#[test]
fn a_bitmap_is_read_once_when_its_block_is_first_used() {
    // A block of ours needs no read of its bitmap. A block of another program needs two reads of
    // its BAT entry and one of its bitmap.
    for (creator_app, looks) in [(b"win ", 0), (b"vbox", 3 * BLOCKS), (b"vpc ", 3 * BLOCKS)] {
        for writable in [false, true] {
            let (store, disk) = open(populated(creator_app), writable);
            let mut io = Blocking::open(&disk, EngineKind::Sync).unwrap();
            let mut pass = || {
                let before = store.reads.load(Ordering::Relaxed);
                for block in 0..BLOCKS {
                    let mut page = [0; 4096];
                    io.read(block * BLOCK + 8192, &mut page).unwrap();
                    assert_eq!(page, [block as u8 + 1; 4096]);
                }
                store.reads.load(Ordering::Relaxed) - before
            };
            let first = pass();
            assert!(first <= BLOCKS + looks + 8, "{first} reads");
            assert_eq!(looks > 0, first >= 2 * BLOCKS, "{first} reads");
            assert_eq!(pass(), BLOCKS, "one read for each request, no other reads");
        }
    }
}

#[test]
fn a_block_with_clear_sectors_reads_as_zeros_there_and_is_whole_after_the_first_write() {
    let mut bytes = populated(b"vbox");
    bitmap_of(&mut bytes, 7)[..].fill(0);
    bitmap_of(&mut bytes, 7)[0] = 0x60;
    let (store, disk) = open(bytes, true);
    let mut expected = vec![0; BLOCK as usize];
    expected[512..1536].fill(7);
    let mut io = Blocking::open(&disk, EngineKind::Sync).unwrap();
    let mut found = vec![1; BLOCK as usize];
    io.read(6 * BLOCK, &mut found).unwrap();
    assert_eq!(found, expected);
    io.write(6 * BLOCK + 4096, &[9; 4096], false).unwrap();
    expected[4096..8192].fill(9);
    drop(io);
    disk.close().unwrap();
    let mut after = vec![0; store.inner.len_bytes().unwrap() as usize];
    store.inner.read_at(&mut after, 0).unwrap();
    // Programs that honour the bits (VirtualBox) and programs that do not (QEMU) read the same: all
    // bits are set, and sectors whose bit was clear hold zeros.
    let page = after.chunks(4096).position(|page| page.iter().all(|&byte| byte == 9)).unwrap();
    let payload = (page - 1) * 4096;
    assert_eq!(after[payload - 512..][..16], [0xff; 16]);
    assert!(after[payload..][..BLOCK as usize] == expected);
    let (_, disk) = open(after, false);
    let mut io = Blocking::open(&disk, EngineKind::Sync).unwrap();
    io.read(6 * BLOCK, &mut found).unwrap();
    assert_eq!(found, expected);
}
