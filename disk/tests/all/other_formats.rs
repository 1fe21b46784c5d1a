//! Features that future formats need: blocks in several files, packed (compressed) blocks, damaged
//! blocks, blocks that need a copy-up before a partial write, and images that need a preparation
//! first. Also a map that is smaller than the disk.

use crate::patchwork::{BLOCK, Patchwork, packed_byte};
use diskwright_disk::{Disk, Layer};
use diskwright_image::BlockState;
use diskwright_store::{BlockDevice, Blocking, EngineKind, IoBuf, QueueOptions, Request, SharedRing, Store};
use std::sync::{Arc, atomic::Ordering};

/// Zero, data in the first store, data in the second, packed, damaged, packed.
fn states() -> Vec<BlockState> {
    vec![
        BlockState::Absent,
        BlockState::Data { store: 0, offset_bytes: 3 * BLOCK },
        BlockState::Data { store: 1, offset_bytes: 2 * BLOCK },
        BlockState::Compressed,
        BlockState::Damaged,
        BlockState::Compressed,
    ]
}

fn disk(is_forgetful: bool) -> (Disk, Arc<Patchwork>) {
    let image = Arc::new(Patchwork::new(states(), is_forgetful));
    let layer = Layer { path: "patchwork".into(), image: image.clone() };
    (Disk::from_layers(vec![layer], Vec::new()).unwrap(), image)
}

fn read(disk: &Disk, offset_bytes: u64, len: usize) -> std::io::Result<Vec<u8>> {
    let mut bytes = vec![0xee; len];
    Blocking::open(disk, EngineKind::Auto)?.read(offset_bytes, &mut bytes).map(|()| bytes)
}

fn packed(block: u64, within: u64, len: u64) -> Vec<u8> {
    (within..within + len).map(|at| packed_byte(block, at)).collect()
}

#[test]
fn one_request_reads_blocks_of_two_files_and_packed_blocks() {
    let (disk, image) = disk(false);
    let found = read(&disk, BLOCK / 2, 3 * BLOCK as usize).unwrap();
    let half = BLOCK as usize / 2;
    assert!(found[..half].iter().all(|&byte| byte == 0));
    assert!(found[half..3 * half].iter().all(|&byte| byte == 0xd0));
    assert!(found[3 * half..5 * half].iter().all(|&byte| byte == 0xd1));
    assert_eq!(found[5 * half..], packed(3, 0, BLOCK / 2));
    assert_eq!(image.unpacked.load(Ordering::Relaxed), 1);
}

#[test]
fn only_a_damaged_block_fails_with_its_reason() {
    let (disk, _) = disk(false);
    let error = read(&disk, 4 * BLOCK + 512, 512).unwrap_err().to_string();
    assert!(error.contains("patch at offset 4 is damaged: found patch 4"), "{error}");
    assert!(read(&disk, 3 * BLOCK, 2 * BLOCK as usize).is_err(), "a request that overlaps it");
    assert_eq!(read(&disk, 5 * BLOCK, BLOCK as usize).unwrap(), packed(5, 0, BLOCK));
    let mut writer = Blocking::open(&disk, EngineKind::Auto).unwrap();
    let error = writer.write(4 * BLOCK, &[1; 512], false).unwrap_err().to_string();
    assert!(error.contains("found patch 4"), "{error}");
    writer.write(BLOCK, &[1; 512], false).unwrap();
}

/// Writes a part of each block, on the queue's own ring or a shared one, and checks all contents.
fn parts_are_written(is_forgetful: bool, ring: Option<&SharedRing>) {
    let (disk, image) = disk(is_forgetful);
    let mut queue = disk.open_queue(&QueueOptions { depth: 8, ring, ..QueueOptions::default() }).unwrap();
    for block in [0, 1, 2, 3, 5] {
        let mut buf = IoBuf::new(1024);
        buf.fill(0x77);
        queue.push(Request::write(block * BLOCK + 4096, 1024, buf, block)).unwrap();
    }
    let mut done = Vec::new();
    while queue.in_flight() > 0 {
        queue.reap(1, &mut done).unwrap();
    }
    done.into_iter().for_each(|completion| completion.result.unwrap());
    for (block, around) in
        [(0, vec![0; BLOCK as usize]), (1, vec![0xd0; BLOCK as usize]), (2, vec![0xd1; BLOCK as usize])]
            .into_iter()
            .chain([3, 5].map(|block| (block, packed(block, 0, BLOCK))))
    {
        let mut wanted = around;
        wanted[4096..5120].fill(0x77);
        assert!(read(&disk, block * BLOCK, BLOCK as usize).unwrap() == wanted, "block {block}");
    }
    let mut states = [BlockState::Absent; 6];
    diskwright_image::Image::block_states(&*image, 0, &mut states).unwrap();
    assert!(matches!(states[3], BlockState::Data { store: 1, .. }), "{states:?}");
    queue.push(Request::flush(0)).unwrap();
    let mut done = Vec::new();
    queue.reap(1, &mut done).unwrap();
    done.pop().unwrap().result.unwrap();
    drop(queue);
    disk.close().unwrap();
}

#[test]
fn a_partial_write_of_a_packed_block_copies_it_up() {
    parts_are_written(false, None);
    parts_are_written(false, Some(&SharedRing::new(64, None).unwrap()));
}

#[test]
fn an_image_that_needs_a_preparation_for_each_call_can_be_written() {
    parts_are_written(true, None);
    parts_are_written(true, Some(&SharedRing::new(64, None).unwrap()));
}

#[test]
fn a_packed_block_can_be_zeroed_in_part_or_as_a_whole() {
    let (disk, _) = disk(false);
    let mut writer = Blocking::open(&disk, EngineKind::Auto).unwrap();
    writer.write_zeroes(3 * BLOCK + 512, 512).unwrap();
    let mut wanted = packed(3, 0, BLOCK);
    wanted[512..1024].fill(0);
    assert!(read(&disk, 3 * BLOCK, BLOCK as usize).unwrap() == wanted);
    writer.discard(5 * BLOCK, BLOCK).unwrap();
    assert!(read(&disk, 5 * BLOCK, BLOCK as usize).unwrap().iter().all(|&byte| byte == 0));
}

#[test]
fn concurrent_partial_writes_wait_for_the_copy_up() {
    // All at once: the first request copies the block up, the others wait, and each sector is kept.
    for round in 0..20 {
        let (disk, image) = disk(round % 2 == 0);
        let ring = SharedRing::new(64, None).unwrap();
        let mut queue =
            disk.open_queue(&QueueOptions { depth: 32, ring: Some(&ring), ..QueueOptions::default() }).unwrap();
        for index in 0..32u64 {
            let mut buf = IoBuf::new(512);
            buf.fill(index as u8 | 0x80);
            queue.push(Request::write(3 * BLOCK + index * 512, 512, buf, index)).unwrap();
        }
        let mut done = Vec::new();
        while queue.in_flight() > 0 {
            queue.reap(1, &mut done).unwrap();
        }
        done.into_iter().for_each(|completion| completion.result.unwrap());
        let found = read(&disk, 3 * BLOCK, BLOCK as usize).unwrap();
        for index in 0..32 {
            assert!(found[index * 512..][..512].iter().all(|&byte| byte == index as u8 | 0x80), "sector {index}");
        }
        assert!(found[32 * 512..] == packed(3, 32 * 512, BLOCK - 32 * 512));
        assert_eq!(image.unpacked.load(Ordering::Relaxed), 1, "filled once");
    }
}

/// A server sleeps on its ring when its queues return nothing. A request that rested, and ended at
/// once when it was planned again, puts nothing on the ring that would wake the server.
#[test]
fn a_request_that_ends_at_once_after_resting_is_returned_by_the_same_reap() {
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let (disk, _) = disk(false);
        let ring = SharedRing::new(64, None).unwrap();
        let mut queue = disk.open_queue(&QueueOptions { ring: Some(&ring), ..QueueOptions::default() }).unwrap();
        // The page of the map must be folded first. Then the range reads as zeros.
        queue.push(Request::read(0, 4096, IoBuf::new(4096), 0)).unwrap();
        let mut done = Vec::new();
        queue.reap(0, &mut done).unwrap();
        while done.is_empty() {
            ring.wait().unwrap();
            queue.reap(0, &mut done).unwrap();
        }
        drop(queue);
        let _ = sender.send(done.len());
    });
    let ended = receiver.recv_timeout(std::time::Duration::from_secs(30));
    assert_eq!(ended, Ok(1), "the completion was never returned");
}

/// The zeroed range begins in a block that is zeroed in place and ends in a packed block, which
/// needs a copy-up.
#[test]
fn zeroing_that_ends_in_a_packed_block_is_done_in_stages() {
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let (disk, _) = disk(false);
        let mut writer = Blocking::open(&disk, EngineKind::Auto).unwrap();
        writer.write_zeroes(3 * BLOCK - 512, 1024).unwrap();
        let mut wanted = packed(3, 0, BLOCK);
        wanted[..512].fill(0);
        assert!(read(&disk, 3 * BLOCK, BLOCK as usize).unwrap() == wanted);
        let _ = sender.send(());
    });
    let ended = receiver.recv_timeout(std::time::Duration::from_secs(30));
    assert_eq!(ended, Ok(()), "the request never ended");
}

#[test]
fn only_the_first_store_has_the_disks_name() {
    let (_, image) = disk(false);
    let image: &dyn diskwright_image::Image = &*image;
    assert_eq!(image.store().name(), std::path::Path::new("one"));
    assert_eq!(image.stores()[1].name(), std::path::Path::new("two"));
    let _: &dyn Store = &**image.store();
}
