//! Requests that wait for each other, queues that are dropped meanwhile, and chains that change
//! meanwhile.

use crate::meddled::{Gated, MIB, Meddled, image, layer, within_seconds};
use diskwright_disk::{Disk, Layer};
use diskwright_image::{
    BlockState, DiskType, Format, Image, ImageInfo, ImageWriter, LogState, Result, SectorBitmap, probe,
};
use diskwright_store::{
    BlockDevice, BlockQueue, Blocking, Completion, EngineKind, IoBuf, MemoryStore, QueueOptions, Request, SharedRing,
    Store,
};
use std::{
    sync::{Arc, atomic::Ordering},
    thread,
    time::Duration,
};

const SIZE: u64 = 8 * MIB;

fn filled(len: usize, byte: u8) -> IoBuf {
    let mut buf = IoBuf::new(len);
    buf.fill(byte);
    buf
}

/// A child over a base filled with 1.
fn chain() -> Disk {
    let disk = Disk::from_layers(vec![layer("base", DiskType::Dynamic, SIZE)], Vec::new()).unwrap();
    Blocking::open(&disk, EngineKind::Auto).unwrap().write(0, &vec![1; SIZE as usize], false).unwrap();
    disk.push_layer(layer("child", DiskType::Differencing, SIZE)).unwrap();
    disk
}

fn queue(disk: &Disk, ring: Option<&SharedRing>) -> Box<dyn BlockQueue> {
    disk.open_queue(&QueueOptions { depth: 8, ring, ..QueueOptions::default() }).unwrap()
}

/// A queue with a read of the first 4 KiB in flight, which continues when the test opens
/// `store.reads`.
fn queue_with_held_read(disk: &Disk, store: &Gated) -> Box<dyn BlockQueue> {
    let mut slow = queue(disk, None);
    store.reads.close();
    slow.push(Request::read(0, 4096, IoBuf::new(4096), 0)).unwrap();
    slow.reap(0, &mut Vec::new()).unwrap();
    store.reads.wait_for_caller();
    slow
}

fn read(disk: &Disk, offset_bytes: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0xee; len];
    Blocking::open(disk, EngineKind::Auto).unwrap().read(offset_bytes, &mut bytes).unwrap();
    bytes
}

/// Pushes a write that shares its block until its completion is processed, and a discard of the
/// block that waits for it.
fn push_two(queue: &mut dyn BlockQueue) {
    queue.push(Request::write(4096, 4096, filled(4096, 2), 1)).unwrap();
    queue.push(Request::discard(0, MIB, 2)).unwrap();
}

#[test]
fn one_reap_completes_a_request_and_another_that_waits_for_it() {
    for engine in [EngineKind::Uring, EngineKind::Sync] {
        within_seconds(60, "reap", move || {
            let disk = chain();
            read(&disk, 0, 512);
            let mut queue = disk.open_queue(&QueueOptions { engine, ..QueueOptions::default() }).unwrap();
            // The first write allocates space, so that neither of the two needs work.
            queue.push(Request::write(2 * MIB, 4096, filled(4096, 2), 0)).unwrap();
            queue.reap(1, &mut Vec::new()).unwrap();
            push_two(&mut *queue);
            let mut done: Vec<Completion> = Vec::new();
            queue.reap(2, &mut done).unwrap();
            assert_eq!(done.len(), 2);
            done.into_iter().for_each(|completion| completion.result.unwrap());
            assert!(read(&disk, 0, MIB as usize).iter().all(|&byte| byte == 0));
        });
    }
}

#[test]
fn a_queue_dropped_while_a_request_waits_releases_its_blocks() {
    within_seconds(60, "drop", || {
        let disk = chain();
        let mut dropped = queue(&disk, None);
        push_two(&mut *dropped);
        drop(dropped);
        // Whatever the result of the two, the block is free.
        Blocking::open(&disk, EngineKind::Auto).unwrap().discard(0, MIB).unwrap();
        assert!(read(&disk, 0, MIB as usize).iter().all(|&byte| byte == 0));
        disk.close().unwrap();
    });
}

#[test]
fn a_queue_can_be_dropped_while_it_waits_for_another_queue_of_its_thread() {
    within_seconds(60, "drop", || {
        let disk = chain();
        let ring = SharedRing::new(64, None).unwrap();
        let (mut one, mut other) = (queue(&disk, Some(&ring)), queue(&disk, Some(&ring)));
        let mut done = Vec::new();
        // Tables are read and space is allocated first.
        one.push(Request::write(2 * MIB, 4096, filled(4096, 2), 0)).unwrap();
        while done.is_empty() {
            ring.wait().unwrap();
            one.reap(0, &mut done).unwrap();
        }
        done.clear();
        one.push(Request::write(4096, 4096, filled(4096, 2), 1)).unwrap();
        other.push(Request::discard(0, MIB, 2)).unwrap();
        drop(other);
        while done.is_empty() {
            one.reap(0, &mut done).unwrap();
        }
        done.pop().unwrap().result.unwrap();
        assert!(read(&disk, 4096, 4096).iter().all(|&byte| byte == 2));
    });
}

/// A slow read of a block, a chain change, and then a discard of the block. The read is older than
/// both, so the space must not be reused.
#[test]
fn space_is_not_reused_while_a_request_older_than_a_chain_change_is_in_flight() {
    within_seconds(60, "the grace period", || {
        let store = Gated::new("disk");
        let meddled = Meddled::new(image(store.clone(), Format::Vhdx, DiskType::Dynamic, SIZE), false);
        let disk = Disk::from_layers(vec![meddled.layer("disk")], Vec::new()).unwrap();
        let mut writer = Blocking::open(&disk, EngineKind::Auto).unwrap();
        writer.write(0, &vec![1; 2 * MIB as usize], false).unwrap();
        writer.flush().unwrap();
        let mut slow = queue_with_held_read(&disk, &store);
        thread::scope(|scope| {
            let grows = scope.spawn(|| disk.grow(SIZE).unwrap());
            thread::sleep(Duration::from_millis(100));
            assert!(!grows.is_finished());
            // Freed, durably, by a queue with the new chain.
            writer.discard(0, MIB).unwrap();
            for _ in 0..3 {
                writer.flush().unwrap();
                // Planning a request starts the recycling after a grace period.
                writer.discard(2 * MIB, 512).unwrap();
                thread::sleep(Duration::from_millis(20));
            }
            assert_eq!(meddled.recycled.load(Ordering::SeqCst), 0, "the read may still reach the space");
            store.reads.open();
            let mut done = Vec::new();
            slow.reap(1, &mut done).unwrap();
            assert!(done.pop().unwrap().buf.unwrap().iter().all(|&byte| byte == 1));
        });
        // Now the grace period is over.
        while meddled.recycled.load(Ordering::SeqCst) == 0 {
            writer.write(3 * MIB, &[1; 512], false).unwrap();
            writer.discard(3 * MIB, MIB).unwrap();
            writer.flush().unwrap();
            thread::sleep(Duration::from_millis(5));
        }
    });
}

/// A new chain begins together with its epoch, so it waits while a slow read delays the previous
/// grace period. Until then all queues use the former chain, afterwards all see writes to the new
/// top.
#[test]
fn a_new_top_waits_for_the_previous_grace_period() {
    within_seconds(60, "push_layer", || {
        let store = Gated::new("base");
        let base = image(store.clone(), Format::Vhdx, DiskType::Dynamic, SIZE);
        let former_top = Arc::clone(&base);
        let disk = Disk::from_layers(vec![Layer { path: "base".into(), image: base }], Vec::new()).unwrap();
        let mut writer = Blocking::open(&disk, EngineKind::Auto).unwrap();
        writer.write(0, &vec![1; 2 * MIB as usize], false).unwrap();
        writer.flush().unwrap();
        let mut slow = queue_with_held_read(&disk, &store);
        writer.discard(MIB, MIB).unwrap();
        writer.flush().unwrap();
        // Queues in the epoch of that grace period.
        let [mut reads, mut flushes] = [0, 1].map(|_| Blocking::open(&disk, EngineKind::Auto).unwrap());
        reads.read(4 * MIB, &mut [0; 512]).unwrap();
        flushes.read(4 * MIB, &mut [0; 512]).unwrap();
        writer.read(4 * MIB, &mut [0; 512]).unwrap();
        let child = layer("child", DiskType::Differencing, SIZE);
        let new_top = Arc::clone(&child.image);
        let mut expect_at_5_mib = |fill| {
            let mut found = [0; 4096];
            reads.read(5 * MIB, &mut found).unwrap();
            assert_eq!(found, [fill; 4096]);
        };
        thread::scope(|scope| {
            let pushes = scope.spawn(|| disk.push_layer(child).unwrap());
            thread::sleep(Duration::from_millis(20));
            let before = disk.layers().len();
            writer.write(5 * MIB, &vec![7; MIB as usize], false).unwrap();
            flushes.flush().unwrap();
            let is_durable = !former_top.writer().unwrap().is_dirty();
            // Nothing may panic before this, or the other thread would wait for ever.
            store.reads.open();
            slow.reap(1, &mut Vec::new()).unwrap();
            pushes.join().unwrap();
            assert_eq!((before, disk.layers().len()), (1, 2));
            assert!(is_durable, "a completed write was not made durable");
            expect_at_5_mib(7);
            writer.write(5 * MIB, &vec![8; MIB as usize], false).unwrap();
            assert!(new_top.writer().unwrap().is_dirty());
            flushes.flush().unwrap();
            assert!(!new_top.writer().unwrap().is_dirty(), "a completed write was not made durable");
            expect_at_5_mib(8);
        });
    });
}

/// Two writes of one block that do not overlap: one to the former top, still in flight, and one to
/// the new top, which needs a copy-up of the block.
#[test]
fn no_copy_up_from_a_former_top_that_is_still_written() {
    within_seconds(60, "the filling", || {
        let store = Gated::new("base");
        let base = image(store.clone(), Format::Vhdx, DiskType::Dynamic, SIZE);
        let disk = Disk::from_layers(vec![Layer { path: "base".into(), image: base }], Vec::new()).unwrap();
        Blocking::open(&disk, EngineKind::Auto).unwrap().write(0, &vec![1; MIB as usize], false).unwrap();
        let top =
            Meddled::new(image(Arc::new(MemoryStore::new("top")), Format::Vhdx, DiskType::Differencing, SIZE), true);
        let mut slow = queue(&disk, None);
        store.writes.close();
        slow.push(Request::write(0, 4096, filled(4096, 2), 0)).unwrap();
        slow.reap(0, &mut Vec::new()).unwrap();
        store.writes.wait_for_caller();
        thread::scope(|scope| {
            let pushes = scope.spawn(|| disk.push_layer(top.layer("top")).unwrap());
            while disk.layers().len() < 2 {
                thread::sleep(Duration::from_millis(1));
            }
            let fills = scope.spawn(|| {
                Blocking::open(&disk, EngineKind::Auto).unwrap().write(64 << 10, &[3; 4096], false).unwrap();
            });
            thread::sleep(Duration::from_millis(100));
            assert!(!pushes.is_finished());
            store.writes.open();
            let mut done = Vec::new();
            slow.reap(1, &mut done).unwrap();
            done.pop().unwrap().result.unwrap();
            fills.join().unwrap();
        });
        let found = read(&disk, 0, MIB as usize);
        assert!(found[..4096].iter().all(|&byte| byte == 2), "an acknowledged write was lost");
        assert!(found[4096..64 << 10].iter().all(|&byte| byte == 1));
        assert!(found[64 << 10..][..4096].iter().all(|&byte| byte == 3));
    });
}

#[test]
fn a_layer_pushed_during_a_list_of_extents_hides_none() {
    within_seconds(60, "the list of extents", || {
        let size_bytes = 2 << 30;
        let store: Arc<dyn Store> = Arc::new(MemoryStore::new("base"));
        let base = Meddled::new(image(store, Format::Vhdx, DiskType::Dynamic, size_bytes), false);
        let disk = Disk::from_layers(vec![base.layer("base")], Vec::new()).unwrap();
        let mut writer = Blocking::open(&disk, EngineKind::Auto).unwrap();
        // The first write is in the first page of the map, which is dropped when the disk is
        // reopened. The second is in the second page, which stays in memory.
        writer.write(0, &[1; 4096], false).unwrap();
        drop(writer);
        drop(disk);
        let disk = Disk::from_layers(vec![base.layer("base")], Vec::new()).unwrap();
        let mut writer = Blocking::open(&disk, EngineKind::Auto).unwrap();
        writer.write(1 << 30, &[1; 4096], false).unwrap();
        base.tables.close();
        let mut found = Vec::new();
        thread::scope(|scope| {
            let lists = scope.spawn(|| {
                let mut found = Vec::new();
                disk.extents(0, size_bytes, &mut found).unwrap();
                found
            });
            base.tables.wait_for_caller();
            disk.push_layer(layer("child", DiskType::Differencing, size_bytes)).unwrap();
            writer.write((1 << 30) + 4 * MIB, &vec![2; MIB as usize], false).unwrap();
            base.tables.open();
            found = lists.join().unwrap();
        });
        let mut at = 0;
        for extent in &found {
            assert_eq!(extent.offset_bytes, at, "a gap: {found:?}");
            at += extent.len_bytes;
        }
        assert_eq!(at, size_bytes, "{found:?}");
        assert_eq!(found.iter().filter(|extent| extent.file_offset_bytes.is_some()).count(), 3, "{found:?}");
    });
}

#[test]
fn a_former_top_is_closed_with_the_disk() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new("base"));
    let base = image(Arc::clone(&store), Format::Vhdx, DiskType::Dynamic, SIZE);
    let disk = Disk::from_layers(vec![Layer { path: "base".into(), image: base }], Vec::new()).unwrap();
    Blocking::open(&disk, EngineKind::Auto).unwrap().write(0, &[1; 4096], true).unwrap();
    disk.push_layer(layer("child", DiskType::Differencing, SIZE)).unwrap();
    disk.close().unwrap();
    let again = probe::open(store, Some(Format::Vhdx), false, 512).unwrap();
    assert_eq!(again.info().log, LogState::Clean);
}

/// An image that has data in every other sector.
#[derive(Debug)]
struct Striped {
    info: ImageInfo,
    stores: [Arc<dyn Store>; 1],
}

const STRIPED_BLOCK: u64 = 2 * MIB;

impl Image for Striped {
    fn info(&self) -> &ImageInfo {
        &self.info
    }
    fn stores(&self) -> &[Arc<dyn Store>] {
        &self.stores
    }
    fn block_states(&self, first_block: u64, out: &mut [BlockState]) -> Result<()> {
        for (block, state) in (first_block..).zip(out) {
            *state = BlockState::partial(block * STRIPED_BLOCK);
        }
        Ok(())
    }
    fn sector_bitmap(&self, _block: u64) -> Result<SectorBitmap> {
        let sectors = (STRIPED_BLOCK / 512) as u32;
        Ok(SectorBitmap { words: vec![0x5555_5555_5555_5555; sectors as usize / 64], sectors, sector_bytes: 512 })
    }
    fn writer(&self) -> Option<&dyn ImageWriter> {
        None
    }
}

/// One page of the map with more runs than the cache holds.
#[test]
fn a_disk_of_a_million_runs_is_listed_to_its_end() {
    within_seconds(60, "the list of extents", || {
        let size_bytes = 600 * MIB;
        let store: Arc<dyn Store> = Arc::new(MemoryStore::new("striped"));
        let info = ImageInfo {
            block_bytes: STRIPED_BLOCK,
            has_blocks: true,
            disk_type: DiskType::Differencing,
            ..image(Arc::new(MemoryStore::new("like")), Format::Vhdx, DiskType::Dynamic, size_bytes).info().clone()
        };
        store.set_len(size_bytes).unwrap();
        let striped = Layer { path: "striped".into(), image: Arc::new(Striped { info, stores: [store] }) };
        let disk = Disk::from_layers(vec![striped], Vec::new()).unwrap();
        // From now on the page is in memory.
        read(&disk, 0, 512);
        let mut found = Vec::new();
        disk.extents(0, size_bytes, &mut found).unwrap();
        assert_eq!(found.len() as u64, size_bytes / 512);
    });
}
