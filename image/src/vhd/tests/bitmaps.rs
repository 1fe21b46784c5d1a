//! Sector bitmaps of dynamic disks: when they are read, what clear bits mean, and how they are set.

use super::*;
use std::sync::atomic::Ordering;

/// A dynamic disk as another program leaves it: block 0 has space, but only sectors 1 and 2 of its
/// 128 are set in the bitmap. The other sectors hold stale data.
fn partly_marked(creator_app: [u8; 4]) -> (Arc<SparseStore>, u64) {
    let (store, disk) = disk(DiskType::Dynamic);
    disk.write(0, &[1; 65536]);
    let BlockState::Data { offset_bytes, .. } = disk.state(0) else { panic!("not written") };
    disk.close();
    edit_footers(&store, |footer| footer.creator_app = creator_app);
    store.write_at(&[0x60], offset_bytes - 512).unwrap();
    store.write_at(&[0; 511], offset_bytes - 511).unwrap();
    (store, offset_bytes)
}

fn bitmap_bytes(store: &SparseStore, payload_offset: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    store.read_at(&mut bytes, payload_offset - 512).unwrap();
    bytes
}

#[test]
fn clear_sectors_of_a_dynamic_disk_read_as_zeros() {
    for creator in [*b"vbox", *b"tap\0", *b"CTXS", *b"vpc ", *b"qem2"] {
        let (store, offset_bytes) = partly_marked(creator);
        for writable in [false, true] {
            let disk = TestDisk::open(store.clone(), writable, Vec::new());
            assert_eq!(disk.state(0), BlockState::partial(offset_bytes), "{creator:?}");
            let bits = disk.image.sector_bitmap(0).unwrap();
            assert_eq!((bits.count(), bits.get(1), bits.get(2)), (2, true, true));
            let mut expected = vec![0; 65536];
            expected[512..1536].fill(1);
            assert_eq!(disk.read(0, 65536), expected);
        }
        assert!(messages(&store, Severity::Note).iter().any(|note| note.contains("read as zeros")));
    }
}

#[test]
fn a_written_sector_gets_its_bit() {
    let (store, offset_bytes) = partly_marked(*b"vbox");
    let disk = TestDisk::open(store.clone(), true, Vec::new());
    disk.write(2048, &[5; 512]);
    assert_eq!(bitmap_bytes(&store, offset_bytes)[0], 0x60, "a commit changes memory only");
    disk.close();
    assert_eq!(bitmap_bytes(&store, offset_bytes)[0], 0x68);
    let mut expected = vec![0; 65536];
    expected[512..1536].fill(1);
    expected[2048..2560].fill(5);
    assert_eq!(TestDisk::open(store, false, Vec::new()).read(0, 65536), expected);
}

#[test]
fn all_bits_of_a_whole_block_are_set_after_its_payload_is_durable() {
    let (store, offset_bytes) = partly_marked(*b"vbox");
    let disk = TestDisk::open(store.clone(), true, Vec::new());
    let writer = disk.image.writer().unwrap();
    let place = writer.reserve_waiting(0).unwrap();
    assert!(place.offset_bytes == offset_bytes && place.init.is_none());
    let mut contents = vec![0; 65536];
    contents[512..1536].fill(1);
    contents[2048..2560].fill(5);
    store.write_at(&contents, offset_bytes).unwrap();
    assert_eq!(writer.commit_waiting(0, Commit::Whole).unwrap(), BlockState::data(offset_bytes));
    assert!(writer.is_dirty());
    let seen = Arc::new(std::sync::Mutex::new(None));
    let (watched, first_sync) = (Arc::clone(&store), Arc::clone(&seen));
    store.in_next_sync.set(move || *first_sync.lock().unwrap() = Some(bitmap_bytes(&watched, offset_bytes)[0]));
    let syncs = store.syncs.load(Ordering::Relaxed);
    disk.flush();
    assert_eq!(*seen.lock().unwrap(), Some(0x60), "when the payload became durable, no bit was set");
    assert_eq!(store.syncs.load(Ordering::Relaxed) - syncs, 2, "payload, then bits");
    assert_eq!(bitmap_bytes(&store, offset_bytes), [0xff; 16]);
    assert_eq!(disk.state(0), BlockState::data(offset_bytes));
    disk.close();
    assert_sound(store.clone());
    assert_eq!(TestDisk::open(store, false, Vec::new()).read(0, 65536), contents);
}

#[test]
fn new_blocks_in_files_of_other_programs_are_whole() {
    for writes_init in [true, false] {
        let (store, _) = partly_marked(*b"vbox");
        let mut disk = TestDisk::open(store.clone(), true, Vec::new());
        disk.writes_init = writes_init;
        disk.write(3 * 65536 + 512, &[9; 512]);
        assert!(matches!(disk.state(3), BlockState::Data { .. }), "known without reading its bitmap");
        assert!(disk.image.sector_bitmap(3).unwrap().is_full());
        disk.discard(3);
        disk.write(3 * 65536 + 512, &[8; 512]);
        disk.close();
        let disk = TestDisk::open(store.clone(), false, Vec::new());
        assert!(disk.image.sector_bitmap(3).unwrap().is_full());
        assert_eq!(disk.read(3 * 65536, 1536), [[0; 512], [8; 512], [0; 512]].concat());
    }
}

#[test]
fn no_bitmap_is_read_if_all_blocks_are_ours() {
    let (store, disk) = disk(DiskType::Dynamic);
    disk.write(0, &[1; 65536]);
    let BlockState::Data { offset_bytes, .. } = disk.state(0) else { panic!("not written") };
    disk.close();
    // If the bitmap were read, the block would be partial.
    store.write_at(&[0; 512], offset_bytes - 512).unwrap();
    assert_eq!(TestDisk::open(store.clone(), true, Vec::new()).state(0), BlockState::data(offset_bytes));
    // Another program has added a block where the footer was.
    let end = store.len_bytes().unwrap() - 512;
    let footer = footer_at(&store, 0).unwrap().to_bytes();
    store.write_at(&[0xf0; 512], end).unwrap();
    store.write_at(&[3; 65536], end + 512).unwrap();
    store.write_at(&footer, end + 512 + 65536).unwrap();
    store.write_at(&((end / 512) as u32).to_be_bytes(), header(&store).table_offset + 4).unwrap();
    let disk = TestDisk::open(store, true, Vec::new());
    assert_eq!(disk.state(1), BlockState::partial(end + 512));
    assert_eq!(disk.read(65536, 2560), [[3; 2048].to_vec(), vec![0; 512]].concat());
}

/// What a disk reads as must not depend on the size of its table or on the cache mode.
#[test]
fn bitmaps_of_large_disks_of_ours_are_not_read_either() {
    let store = created(DiskType::Dynamic, 70_000 * 65536, 65536);
    let disk = TestDisk::open(store.clone(), true, Vec::new());
    disk.write(0, &[1; 65536]);
    let BlockState::Data { offset_bytes, .. } = disk.state(0) else { panic!("not written") };
    disk.close();
    store.write_at(&[0; 512], offset_bytes - 512).unwrap();
    for writable in [false, true] {
        let disk = TestDisk::open(store.clone(), writable, Vec::new());
        assert_eq!(disk.state(0), BlockState::data(offset_bytes));
    }
}

/// A store whose sector at an offset cannot be read.
#[derive(Debug)]
struct BadSector(Arc<SparseStore>, u64);

impl diskwright_store::testing::ForwardingStore for BadSector {
    fn inner(&self) -> &dyn Store {
        &*self.0
    }
    fn read_at(&self, buf: &mut [u8], offset_bytes: u64) -> std::io::Result<()> {
        if (offset_bytes..offset_bytes + buf.len() as u64).contains(&self.1) {
            return Err(std::io::Error::other("a bad sector"));
        }
        self.0.read_at(buf, offset_bytes)
    }
}

#[test]
fn a_disk_whose_bitmap_cannot_be_read_is_not_sound() {
    for disk_type in [DiskType::Dynamic, DiskType::Differencing] {
        let (store, disk) = disk(disk_type);
        disk.write(0, &[1; 65536]);
        let (BlockState::Data { offset_bytes, .. } | BlockState::Partial { offset_bytes, .. }) = disk.state(0) else {
            panic!("not written")
        };
        disk.close();
        assert_sound(store.clone());
        let error = check(Arc::new(BadSector(store, offset_bytes - 512))).unwrap_err();
        assert!(error.to_string().contains("read a sector bitmap"), "{disk_type}: {error}");
    }
}
