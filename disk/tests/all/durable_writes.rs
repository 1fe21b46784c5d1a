//! A FUA write to an allocated block is made durable by the write itself, without the flusher. A
//! flush with only payload to make durable is one sync of the top's file.
//!
//! The tests check which thread syncs. The store has no file, so instead of RWF_DSYNC the queue's
//! thread writes and syncs.

use crate::images::new_image;
use diskwright_disk::{CreateRequest, Disk, Layer, create};
use diskwright_image::{DiskType, Format, probe};
use diskwright_store::{
    BlockDevice, Blocking, EngineKind, IoBuf, MemoryStore, QueueOptions, Request, Segments, Store,
    testing::ForwardingStore,
};
use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

const MIB: u64 = 1 << 20;

/// A store that counts syncs by thread.
#[derive(Debug)]
struct Watched {
    inner: MemoryStore,
    by_flusher: AtomicU32,
    by_others: AtomicU32,
}

impl Watched {
    /// Syncs by the flusher and by other threads since the last call.
    fn syncs(&self) -> (u32, u32) {
        (self.by_flusher.swap(0, Ordering::SeqCst), self.by_others.swap(0, Ordering::SeqCst))
    }
}

impl ForwardingStore for Watched {
    fn inner(&self) -> &dyn Store {
        &self.inner
    }
    fn sync_data(&self) -> io::Result<()> {
        let is_flusher = std::thread::current().name() == Some("flusher");
        let counter = if is_flusher { &self.by_flusher } else { &self.by_others };
        counter.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn never_blocks(&self) -> bool {
        true
    }
}

#[test]
fn an_fua_write_to_an_allocated_block_needs_no_flusher() {
    for (format, disk_type) in [
        (Format::Raw, DiskType::Fixed),
        (Format::Vhd, DiskType::Fixed),
        (Format::Vhd, DiskType::Dynamic),
        (Format::Vhdx, DiskType::Fixed),
        (Format::Vhdx, DiskType::Dynamic),
    ] {
        let what = format!("{disk_type} {format}");
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(format!("disk.{format}"));
        let block_bytes = (disk_type == DiskType::Dynamic).then_some(1 << 20);
        let disk_type = (format != Format::Raw).then_some(disk_type);
        let request = CreateRequest { size_bytes: Some(16 * MIB), disk_type, block_bytes, ..CreateRequest::default() };
        create(&path, &request).unwrap();
        let inner = MemoryStore::with_bytes("disk", std::fs::read(&path).unwrap());
        let store = Arc::new(Watched { inner, by_flusher: AtomicU32::new(0), by_others: AtomicU32::new(0) });
        let open = || {
            let image = probe::open(Arc::clone(&store) as Arc<dyn Store>, Some(format), true, 512).unwrap();
            Disk::from_layers(vec![Layer { path: path.clone(), image }], Vec::new()).unwrap()
        };
        let disk = open();
        Blocking::open(&disk, EngineKind::Sync).unwrap().write(0, &vec![1; 2 * MIB as usize], false).unwrap();
        disk.close().unwrap();
        drop(disk);

        // The first write of a session may need syncs of its own (VHDX). No table was read before.
        let disk = open();
        let mut io = Blocking::open(&disk, EngineKind::Sync).unwrap();
        store.syncs();
        io.write(0, &[2; 4096], true).unwrap();
        let (by_flusher, by_others) = store.syncs();
        assert!(by_flusher == 0 && by_others > 0, "{what}, first: {by_flusher} {by_others}");
        for (at_bytes, fill) in [(4096, 3), (MIB, 4)] {
            io.write(at_bytes, &[fill; 4096], true).unwrap();
            assert_eq!(store.syncs(), (0, 1), "{what} at {at_bytes}");
        }
        // Several pieces would need one sync each, so they are followed by one flush. A single
        // piece is handled like a buffer.
        for (pieces, expected) in [(5, (1, 0)), (1, (0, 1))] {
            let mut segments = Segments::new();
            (0..pieces).for_each(|_| segments.push(IoBuf::new(4096), 0..4096).unwrap());
            let mut queue = disk.open_queue(&QueueOptions { engine: EngineKind::Sync, ..Default::default() }).unwrap();
            let write = Request::write_segments(2 * MIB - 65_536, Box::new(segments), 1);
            queue.push(Request { fua: true, ..write }).unwrap();
            let mut done = Vec::new();
            queue.reap(1, &mut done).unwrap();
            assert!(done.len() == 1 && done[0].result.is_ok(), "{what}: {done:?}");
            assert_eq!(store.syncs(), expected, "{what}: {pieces} pieces");
        }
        // A block that is allocated by the write needs its mapping durable too. So does a write
        // while a mapping is dirty.
        if block_bytes.is_some() {
            io.write(8 * MIB, &[5; 4096], true).unwrap();
            assert!(store.syncs().0 > 0, "{what}: a new block");
            io.write(9 * MIB, &[6; 4096], false).unwrap();
            io.write(0, &[7; 4096], true).unwrap();
            assert!(store.syncs().0 > 0, "{what}: while a mapping is dirty");
            io.write(9 * MIB, &[8; 4096], true).unwrap();
            assert_eq!(store.syncs(), (0, 1), "{what}: when the mapping is durable");
        }
        let mut held = [0; 4096];
        io.read(4096, &mut held).unwrap();
        assert_eq!(held, [3; 4096], "{what}");
        drop(io);
        disk.close().unwrap();
    }
}

/// A guest that allocates: each flush of it is at most so many syncs of the file. (QEMU syncs a
/// qcow2 three times.) Syncs outside of a flush make room, seldom.
#[test]
fn a_flush_of_a_guest_that_allocates_is_two_syncs() {
    const ROUNDS: u64 = 24;
    for (format, block_bytes) in [(Format::Qcow2, 64 << 10), (Format::Vmdk, 64 << 10), (Format::Vdi, 1 << 20)] {
        let inner = MemoryStore::new("disk");
        let store = Arc::new(Watched { inner, by_flusher: AtomicU32::new(0), by_others: AtomicU32::new(0) });
        let shared = Arc::clone(&store) as Arc<dyn Store>;
        let image = new_image(shared, format, DiskType::Dynamic, 256 * MIB, block_bytes);
        let disk = Disk::from_layers(vec![Layer { path: "disk".into(), image }], Vec::new()).unwrap();
        let mut io = Blocking::open(&disk, EngineKind::Sync).unwrap();
        // The first write of a session has syncs of its own.
        io.write(0, &[1; 4096], false).unwrap();
        io.flush().unwrap();
        store.syncs();
        let mut before_flushes = 0;
        for round in 1..=ROUNDS {
            for part in 0..8 {
                io.write((round * 8 + part) * MIB, &[2; 4096], false).unwrap();
            }
            let (by_flusher, by_others) = store.syncs();
            before_flushes += by_flusher + by_others;
            io.flush().unwrap();
            let (by_flusher, by_others) = store.syncs();
            assert!((1..=2).contains(&(by_flusher + by_others)), "{format}: {by_flusher} and {by_others}");
        }
        assert!(u64::from(before_flushes) <= ROUNDS / 2, "{format}: {before_flushes} syncs outside of flushes");
        drop(io);
        disk.close().unwrap();
    }
}

/// The former top of a disk is closed when another image is pushed on top. Later flushes do not
/// sync its file.
#[test]
fn after_a_snapshot_a_flush_syncs_only_the_new_top() {
    for format in [Format::Vhd, Format::Vhdx] {
        let layer = |name: &str, disk_type| {
            let inner = MemoryStore::new(name);
            let store = Arc::new(Watched { inner, by_flusher: AtomicU32::new(0), by_others: AtomicU32::new(0) });
            let shared = Arc::clone(&store) as Arc<dyn Store>;
            let image = new_image(shared, format, disk_type, 16 * MIB, MIB as u32);
            (store, Layer { path: name.into(), image })
        };
        let (below, base) = layer("below", DiskType::Dynamic);
        let (above, top) = layer("above", DiskType::Differencing);
        let disk = Disk::from_layers(vec![base], Vec::new()).unwrap();
        let mut io = Blocking::open(&disk, EngineKind::Sync).unwrap();
        let mut write_and_flush = |fill| {
            io.write(0, &[fill; 4096], false).unwrap();
            io.flush().unwrap();
        };
        write_and_flush(1);
        below.syncs();
        write_and_flush(2);
        assert_eq!(below.syncs(), (0, 1), "{format}: one image");
        disk.push_layer(top).unwrap();
        below.syncs();
        write_and_flush(3);
        let (by_flusher, by_others) = above.syncs();
        assert!(by_flusher > 0, "{format}: a new block of the child: {by_flusher} {by_others}");
        write_and_flush(4);
        assert_eq!(above.syncs(), (0, 1), "{format}: the child");
        assert_eq!(below.syncs(), (0, 0), "{format}: the former top");
        drop(io);
        disk.close().unwrap();
    }
}
