//! Where writes go while the parent absorbs the top, and what they wait for.

use crate::{Disk, Layer, engine::block_set::BlockSet};
use diskwright_image::{BlockState, CreateOptions, DiskType, Format, Image, ParentLink, probe};
use diskwright_store::{BlockDevice, Blocking, EngineKind, IoBuf, MemoryStore, QueueOptions, Request, Store};
use std::{sync::Arc, thread, time::Duration};

const MIB: u64 = 1 << 20;

fn layer(name: &str, disk_type: DiskType, block_bytes: u64) -> Layer {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new(name));
    let parent = (disk_type == DiskType::Differencing)
        .then(|| ParentLink { relative_path: Some(".\\parent".into()), ..ParentLink::default() });
    let options = CreateOptions {
        disk_type,
        size_bytes: 8 * MIB,
        block_bytes: Some(block_bytes as u32),
        logical_sector_bytes: 512,
        physical_sector_bytes: 4096,
        parent,
        preallocate: false,
        disk_id: None,
        own: Default::default(),
    };
    Format::Vhdx.driver().create(Arc::clone(&store), &options).unwrap();
    Layer { path: name.into(), image: probe::open(store, Some(Format::Vhdx), true, 512).unwrap() }
}

/// A top whose first MiB is written, over an empty parent that absorbs it.
fn absorbing(parent_block_bytes: u64) -> Disk {
    let layers =
        vec![layer("top", DiskType::Differencing, MIB), layer("parent", DiskType::Dynamic, parent_block_bytes)];
    let disk = Disk::from_layers(layers, Vec::new()).unwrap();
    Blocking::open(&disk, EngineKind::Auto).unwrap().write(0, &vec![1; MIB as usize], false).unwrap();
    disk.shared.chain().members()[1].begin_writing().unwrap();
    let mut mutation = disk.shared.lock();
    let mut left = BlockSet::default();
    left.set(0, true);
    mutation.left = Some((mutation.chain.top().id, left));
    let chain = mutation.chain.with_absorbing(true).unwrap();
    disk.shared.publish(&mut mutation, chain);
    drop(mutation);
    disk.shared.wait_for_grace().unwrap();
    disk
}

fn state(image: &dyn Image, block: u64) -> BlockState {
    let mut state = [BlockState::Damaged];
    image.block_states(block, &mut state).unwrap();
    state[0]
}

#[test]
fn a_write_to_both_images_is_durable_in_both() {
    let disk = absorbing(MIB);
    let layers = disk.layers();
    let (top, parent) = (&*layers[0].image, &*layers[1].image);
    let mut io = Blocking::open(&disk, EngineKind::Auto).unwrap();
    // Blocks 0 (the top's) to 2: three quarters of the first, half of the last.
    let bytes: Vec<u8> = (0..MIB * 9 / 4).map(|at| (at / 512 % 251) as u8 + 1).collect();
    io.write(MIB / 4, &bytes, true).unwrap();
    assert!([1, 2].iter().all(|&block| state(top, block) == BlockState::Absent));
    assert!([1, 2].iter().all(|&block| matches!(state(parent, block), BlockState::Data { .. })));
    assert_eq!((state(parent, 0), state(parent, 3)), (BlockState::Absent, BlockState::Absent));
    let is_dirty = |image: &dyn Image| image.writer().unwrap().is_dirty();
    assert!(!is_dirty(top) && !is_dirty(parent), "the write was to be durable");
    let mut found = vec![0; bytes.len()];
    io.read(MIB / 4, &mut found).unwrap();
    assert!(found == bytes);
    // The parent's data is written in place, without a lock.
    let chain = disk.shared.chain();
    assert!(chain.map.lookup(MIB, 4096).is_some());
    io.write(MIB, &[9; 4096], true).unwrap();
    assert!(!is_dirty(parent) && state(top, 1) == BlockState::Absent);
    // Zeros go where the data is.
    io.discard(0, 3 * MIB).unwrap();
    io.flush().unwrap();
    assert_eq!(state(top, 0), BlockState::Zero);
    assert!([1, 2].iter().all(|&block| state(top, block) == BlockState::Absent));
    assert!([1, 2].iter().all(|&block| !matches!(state(parent, block), BlockState::Data { .. })));
    io.read(MIB / 4, &mut found).unwrap();
    assert!(found.iter().all(|byte| *byte == 0));
}

/// Until a block's removal is durable, a write there must not reach the parent: after a power cut
/// the top would hide it.
#[test]
fn a_held_block_is_not_written_in_the_parent_either() {
    for parent_block_bytes in [MIB, 4 * MIB] {
        let disk = absorbing(parent_block_bytes);
        let shared = &disk.shared;
        let layers = disk.layers();
        let mut queue = disk.open_queue(&QueueOptions { depth: 8, ..QueueOptions::default() }).unwrap();
        let mut io = Blocking::open(&disk, EngineKind::Auto).unwrap();
        // Block 2 has data of the parent, which the map knows.
        io.write(2 * MIB, &[3; 8192], false).unwrap();
        io.read(2 * MIB, &mut [0; 512]).unwrap();
        let top = shared.chain().top().clone();
        let turn = shared.begin_change();
        let held = shared.hold(&turn, &top, [1, 2]).unwrap();
        let write = |offset_bytes, tag| {
            let mut buf = IoBuf::new(4096);
            buf.fill(7);
            Request::write(offset_bytes, 4096, buf, tag)
        };
        queue.push(write(MIB, 1)).unwrap();
        queue.push(write(2 * MIB, 2)).unwrap();
        queue.push(Request::discard(2 * MIB, MIB, 3)).unwrap();
        let mut ended = Vec::new();
        thread::sleep(Duration::from_millis(20));
        queue.reap(0, &mut ended).unwrap();
        assert!(ended.is_empty(), "{ended:?}");
        // Reads, and other blocks.
        let mut found = [9; 4096];
        for (offset_bytes, byte) in [(MIB, 0), (2 * MIB, 3), (0, 1)] {
            io.read(offset_bytes, &mut found).unwrap();
            assert_eq!(found, [byte; 4096], "{offset_bytes}");
        }
        io.write(5 * MIB, &[5; 4096], false).unwrap();
        drop(held);
        while ended.len() < 3 {
            queue.reap(1, &mut ended).unwrap();
        }
        assert!(ended.iter().all(|completion| completion.result.is_ok()), "{ended:?}");
        io.read(MIB, &mut found).unwrap();
        assert_eq!(found, [7; 4096]);
        assert_eq!(state(&*layers[0].image, 1), BlockState::Absent);
    }
}
