use crate::{
    Disk,
    engine::{chain::Layer, shared::Shared},
};
use diskwright_image::{CreateOptions, DiskType, Format, probe};
use diskwright_store::{BlockDevice, Blocking, EngineKind, IoBuf, MemoryStore, QueueOptions, Request, Store};
use std::{sync::Arc, thread, time::Duration};

const MIB: u64 = 1 << 20;

/// A dynamic VHDX of 8 MiB in blocks of 1 MiB, whose first 4 MiB have data.
fn disk() -> Disk {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new("disk"));
    let options = CreateOptions {
        disk_type: DiskType::Dynamic,
        size_bytes: 8 * MIB,
        block_bytes: Some(MIB as u32),
        logical_sector_bytes: 512,
        physical_sector_bytes: 4096,
        parent: None,
        preallocate: false,
        disk_id: None,
        own: Default::default(),
    };
    Format::Vhdx.driver().create(Arc::clone(&store), &options).unwrap();
    let image = probe::open(store, Some(Format::Vhdx), true, 512).unwrap();
    let disk = Disk::from_layers(vec![Layer { path: "disk".into(), image }], Vec::new()).unwrap();
    Blocking::open(&disk, EngineKind::Auto).unwrap().write(0, &vec![1; 4 * MIB as usize], false).unwrap();
    disk
}

fn hold<'a>(shared: &'a Arc<Shared>, blocks: &[u64]) -> super::ExcludedBlocks<'a> {
    let top = shared.chain().top().clone();
    shared.hold(&shared.begin_change(), &top, blocks.iter().copied()).unwrap()
}

#[test]
fn writes_of_held_blocks_wait_and_reads_go_on() {
    let disk = disk();
    let shared = &disk.shared;
    let mut queue = disk.open_queue(&QueueOptions { depth: 8, ..QueueOptions::default() }).unwrap();
    let mut io = Blocking::open(&disk, EngineKind::Auto).unwrap();
    // Blocks 1 and 3 have data, block 6 has no space.
    let held = hold(shared, &[1, 3, 6]);
    let write = |offset_bytes, tag| {
        let mut buf = IoBuf::new(4096);
        buf.fill(7);
        Request::write(offset_bytes, 4096, buf, tag)
    };
    queue.push(write(MIB, 1)).unwrap();
    queue.push(write(6 * MIB, 2)).unwrap();
    queue.push(Request::discard(3 * MIB, MIB, 3)).unwrap();
    let mut ended = Vec::new();
    thread::sleep(Duration::from_millis(20));
    queue.reap(0, &mut ended).unwrap();
    assert!(ended.is_empty(), "{ended:?}");
    // Other blocks, and reads of the held ones.
    io.write(2 * MIB, &[8; 4096], false).unwrap();
    io.write(7 * MIB, &[8; 4096], false).unwrap();
    for (offset_bytes, fill) in [(MIB, 1), (6 * MIB, 0), (2 * MIB, 8), (7 * MIB, 8)] {
        let mut found = [9; 4096];
        io.read(offset_bytes, &mut found).unwrap();
        assert_eq!(found, [fill; 4096], "{offset_bytes}");
    }
    assert_eq!(shared.chain().map.lookup(MIB, 512), None, "a write could find the block without a lock");
    drop(held);
    while ended.len() < 3 {
        queue.reap(1, &mut ended).unwrap();
    }
    assert!(ended.iter().all(|completion| completion.result.is_ok()), "{ended:?}");
    let mut found = [9; 4096];
    io.read(6 * MIB, &mut found).unwrap();
    assert_eq!(found, [7; 4096]);
}

#[test]
fn look_ups_without_a_lock_find_the_blocks_again() {
    let disk = disk();
    let shared = &disk.shared;
    let mut io = Blocking::open(&disk, EngineKind::Auto).unwrap();
    let before = [0, 1, 2].map(|block| shared.chain().map.lookup(block * MIB, 512));
    let held = hold(shared, &[0, 1]);
    // The page is folded again while the blocks are held.
    shared.lock().chain.map.clear();
    io.read(0, &mut [0; 512]).unwrap();
    assert_eq!([0, 1, 2].map(|block| shared.chain().map.lookup(block * MIB, 512)), [None, None, before[2]]);
    drop(held);
    (0..2).for_each(|block| io.read(block * MIB, &mut [0; 512]).unwrap());
    assert_eq!([0, 1, 2].map(|block| shared.chain().map.lookup(block * MIB, 512)), before);
}
