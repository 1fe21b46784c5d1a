//! A panic in the work of one request fails that request and poisons its disk. No other request
//! hangs, no thread of the program ends, and other disks are not affected.

use crate::meddled::{MIB, Meddled, image, layer, within_seconds};
use diskwright_disk::Disk;
use diskwright_image::{DiskType, Format};
use diskwright_store::{BlockDevice, Blocking, EngineKind, IoBuf, MemoryStore, QueueOptions, Request, SharedRing};
use std::sync::Arc;

const SIZE: u64 = 8 * MIB;

fn disk(disk_type: DiskType) -> (Disk, Arc<Meddled>) {
    let store = Arc::new(MemoryStore::new("disk"));
    let meddled = Meddled::new(image(store, Format::Vhdx, disk_type, SIZE), false);
    let mut layers = vec![meddled.layer("disk")];
    if disk_type == DiskType::Differencing {
        layers.push(layer("base", DiskType::Dynamic, SIZE));
    }
    (Disk::from_layers(layers, Vec::new()).unwrap(), meddled)
}

fn filled(byte: u8) -> IoBuf {
    let mut buf = IoBuf::new(4096);
    buf.fill(byte);
    buf
}

/// Pushes all requests at once, and returns whether each succeeded, by tag.
fn run(disk: &Disk, ring: Option<&SharedRing>, requests: Vec<Request>) -> Vec<bool> {
    let mut queue = disk.open_queue(&QueueOptions { ring, ..QueueOptions::default() }).unwrap();
    let mut ended = vec![false; requests.len()];
    let mut done = Vec::new();
    requests.into_iter().for_each(|request| queue.push(request).unwrap());
    while queue.in_flight() > 0 {
        queue.reap(1, &mut done).unwrap();
    }
    for completion in done {
        ended[completion.tag as usize] = completion.result.is_ok();
    }
    ended
}

fn says_poisoned(disk: &Disk) {
    let error = Blocking::open(disk, EngineKind::Auto).unwrap().flush().unwrap_err().to_string();
    assert!(error.contains("nothing can be called durable"), "{error}");
    assert!(disk.close().is_err(), "a poisoned disk was closed without an error");
}

#[test]
fn a_panic_in_planning_or_work_fails_the_request() {
    for method in ["block_states", "begin_writing", "prepare", "reserve", "commit"] {
        for on_shared_ring in [false, true] {
            within_seconds(60, method, move || {
                let ring = on_shared_ring.then(|| SharedRing::new(64, None).unwrap());
                let (disk, meddled) = disk(DiskType::Dynamic);
                let (healthy, _) = self::disk(DiskType::Dynamic);
                meddled.break_at(method);
                let write = || vec![Request::write(0, 4096, filled(1), 0)];
                assert_eq!(run(&disk, ring.as_ref(), write()), [false], "{method}");
                // The loader still works, and the block is free.
                assert_eq!(run(&disk, ring.as_ref(), write()), [true], "{method}");
                assert_eq!(run(&disk, ring.as_ref(), vec![Request::discard(0, MIB, 0)]), [true], "{method}");
                says_poisoned(&disk);
                assert_eq!(run(&healthy, ring.as_ref(), write()), [true]);
                healthy.close().unwrap();
            });
        }
    }
}

/// The write shares its block. When its commit panics, the discard that waits for the block must be
/// woken.
#[test]
fn a_commit_that_panics_releases_its_blocks() {
    within_seconds(60, "the discard", || {
        let (disk, meddled) = disk(DiskType::Differencing);
        let ready = vec![Request::write(4 * MIB, 4096, filled(1), 0), Request::read(0, 4096, filled(0), 1)];
        assert_eq!(run(&disk, None, ready), [true; 2]);
        let mut queue = disk.open_queue(&QueueOptions::default()).unwrap();
        // Two blocks, so that one is still shared when the other's commit panics.
        let mut buf = IoBuf::new(8192);
        buf.fill(2);
        queue.push(Request::write(MIB - 4096, 8192, buf, 0)).unwrap();
        queue.push(Request::discard(MIB, MIB, 1)).unwrap();
        meddled.break_at("commit");
        let mut done = Vec::new();
        queue.reap(2, &mut done).unwrap();
        done.sort_by_key(|completion| completion.tag);
        assert!(done[0].result.is_err() && done[1].result.is_ok(), "{done:?}");
        drop(queue);
        says_poisoned(&disk);
    });
}

/// Several jobs are queued for the loader, and the first one panics. The others must be done, and
/// the block of the copy-up must be free afterwards.
#[test]
fn a_panic_of_the_loader_fails_one_request() {
    within_seconds(60, "the loader", || {
        let ring = SharedRing::new(64, None).unwrap();
        let size_bytes = 4 << 30;
        let store = Arc::new(MemoryStore::new("disk"));
        let meddled = Meddled::new(image(store, Format::Vhdx, DiskType::Dynamic, size_bytes), false);
        let disk = Disk::from_layers(vec![meddled.layer("disk")], Vec::new()).unwrap();
        meddled.break_at("block_states");
        let reads = (0..4).map(|page| Request::read(page << 30, 4096, filled(9), page)).collect();
        let ended = run(&disk, Some(&ring), reads);
        assert_eq!(ended.iter().filter(|&&ended| ended).count(), 3, "{ended:?}");
        assert_eq!(run(&disk, Some(&ring), vec![Request::read(0, 4096, filled(9), 0)]), [true]);
    });
}

#[test]
fn a_flush_that_panics_fails_all_flushes_for_good() {
    within_seconds(60, "the flusher", || {
        let (disk, meddled) = disk(DiskType::Dynamic);
        let mut writer = Blocking::open(&disk, EngineKind::Auto).unwrap();
        writer.write(0, &[1; 4096], false).unwrap();
        meddled.break_at("flush");
        assert!(writer.flush().is_err());
        // Another thread than the one that panicked flushes, or the same one continues. Either must
        // respond.
        assert!(writer.flush().is_err());
        assert!(writer.write(0, &[1; 4096], true).is_err(), "a durable write");
        let mut found = [0; 4096];
        writer.read(0, &mut found).unwrap();
        assert_eq!(found, [1; 4096]);
        drop(writer);
        says_poisoned(&disk);
    });
}

#[test]
fn a_recycler_that_panics_blocks_nothing() {
    within_seconds(60, "the recycler", || {
        let (disk, meddled) = disk(DiskType::Dynamic);
        let mut writer = Blocking::open(&disk, EngineKind::Auto).unwrap();
        writer.write(0, &vec![1; 2 * MIB as usize], false).unwrap();
        writer.discard(0, MIB).unwrap();
        meddled.break_at("recycle");
        writer.flush().unwrap();
        while writer.flush().is_ok() {
            // Planning a request starts the recycling after a grace period.
            writer.discard(4 * MIB, 512).unwrap();
            std::thread::yield_now();
        }
        drop(writer);
        says_poisoned(&disk);
    });
}
