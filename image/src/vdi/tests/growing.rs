//! Growth of a disk whose block map has no room, as QEMU makes them: the first blocks move.

use super::{
    MIB,
    writing::{close, filled, header, is_sound, made, open, options, put, qemu},
};
use crate::{Commit, CreateOptions, DiskType, Image, LinkageId, MoveTo, ParentLink};
use diskwright_format::vdi::{HEADER_BYTES, HeaderSector};
use diskwright_store::{FileStore, MemoryStore, OpenOptions, Store};
use std::{collections::BTreeMap, path::Path, process::Command, sync::Arc};
use uuid::Uuid;

/// The image with its map behind the header, and its data behind the map.
fn without_room(store: &Arc<dyn Store>) -> Arc<dyn Store> {
    let header = header(&**store);
    let mut bytes = vec![0; store.len_bytes().unwrap() as usize];
    store.read_at(&mut bytes, 0).unwrap();
    let map_end = (HEADER_BYTES as u64 + header.map_bytes()).next_multiple_of(512);
    let mut sector = HeaderSector(bytes[..HEADER_BYTES].try_into().unwrap());
    sector.set_places(HEADER_BYTES as u32, map_end as u32);
    let map = header.map_offset_bytes as usize;
    let mut new = [&sector.0[..], &bytes[map..map + header.map_bytes() as usize]].concat();
    new.resize(map_end as usize, 0);
    new.extend(&bytes[header.data_offset_bytes as usize..]);
    Arc::new(MemoryStore::with_bytes("d.vdi", new))
}

/// Grows as the disk does that uses the image. Returns the number of blocks that were moved.
fn grow(image: &dyn Image, size_bytes: u64) -> usize {
    let writer = image.writer().unwrap();
    let mut moved = 0;
    loop {
        let blocks = writer.blocks_in_the_way(size_bytes).unwrap();
        if blocks.is_empty() {
            break;
        }
        for block in blocks {
            let to = loop {
                match writer.reserve_away(block).unwrap() {
                    Some(to) => break to,
                    None => writer.prepare(block..block + 1).unwrap(),
                }
            };
            let MoveTo::Place(place) = to else { continue };
            assert!(place.to_bytes > place.from_bytes);
            let mut payload = vec![0; place.len_bytes as usize];
            image.store().read_at(&mut payload, place.from_bytes).unwrap();
            image.store().write_at(&payload, place.to_bytes).unwrap();
            writer.commit_waiting(block, Commit::Moved).unwrap();
            moved += 1;
        }
        writer.flush().unwrap();
    }
    writer.resize(size_bytes).unwrap();
    assert_eq!(image.size_bytes(), size_bytes);
    moved
}

fn small(disk_type: DiskType, blocks: u64) -> CreateOptions {
    let link = ParentLink {
        file_id: Some(Uuid::from_u128(1)),
        linkage: Some(LinkageId::Guid(Uuid::from_u128(2))),
        ..ParentLink::default()
    };
    CreateOptions {
        block_bytes: Some(4096),
        parent: (disk_type == DiskType::Differencing).then_some(link),
        ..options(disk_type, blocks * 4096)
    }
}

#[test]
fn blocks_move_away_from_a_longer_map() {
    for disk_type in [DiskType::Dynamic, DiskType::Fixed, DiskType::Differencing] {
        let store = without_room(&made(&small(disk_type, 6)));
        assert_eq!(header(&*store).data_offset_bytes, 1024);
        let image = open(&store, true);
        image.writer().unwrap().begin_writing().unwrap();
        (0..6).for_each(|block| put(&image, 5 - block, 10 + block as u8));
        image.writer().unwrap().flush().unwrap();
        // A block that is changed, and one that is only reserved, when the map becomes longer.
        put(&image, 5, 30);
        let moved = grow(&image, 2000 * 4096);
        assert_eq!(moved, 2, "{disk_type}: the map of 8,000 bytes takes two spaces");
        let now = header(&*store);
        assert_eq!((now.map_offset_bytes, now.data_offset_bytes, now.blocks), (1024, 1024 + 2 * 4096, 2000));
        put(&image, 4, 31);
        put(&image, 1999, 32);
        let expected = |block: u64| match block {
            5 => 30,
            4 => 31,
            _ => 15 - block as u8,
        };
        for reopened in [false, true] {
            let image = if reopened {
                close(&image);
                is_sound(&store);
                open(&store, true)
            } else {
                open(&store, false)
            };
            let is_current = reopened;
            for block in (0..6).filter(|&block| is_current || block < 4) {
                assert_eq!(filled(&image, block), Some(expected(block)), "{disk_type}, block {block}");
            }
        }
        let image = open(&store, true);
        assert_eq!(filled(&image, 1999), Some(32), "{disk_type}");
        // The next map fits before the present one, or behind it.
        for blocks in [2001, 5000, 5001, 9000] {
            grow(&image, blocks * 4096);
            put(&image, blocks - 1, 40);
        }
        close(&image);
        is_sound(&store);
        let image = open(&store, false);
        for block in 0..6 {
            assert_eq!(filled(&image, block), Some(expected(block)), "{disk_type}, block {block}");
        }
        for block in [2000, 4999, 5000, 8999] {
            assert_eq!(filled(&image, block), Some(40), "{disk_type}, block {block}");
        }
    }
}

#[test]
fn an_empty_disk_gets_a_longer_map() {
    let store = without_room(&made(&small(DiskType::Dynamic, 6)));
    let image = open(&store, true);
    assert_eq!(grow(&image, 100_000 * 4096), 0);
    put(&image, 99_999, 7);
    close(&image);
    is_sound(&store);
    assert_eq!(filled(&open(&store, false), 99_999), Some(7));
}

/// Reserved when the place was free, and committed when it is another space.
#[test]
fn a_reservation_outlives_a_longer_map() {
    let store = without_room(&made(&small(DiskType::Dynamic, 6)));
    let image = open(&store, true);
    let writer = image.writer().unwrap();
    (0..4).for_each(|block| put(&image, block, 10 + block as u8));
    let at = writer.reserve_waiting(5).unwrap().offset_bytes;
    grow(&image, 2000 * 4096);
    store.write_at(&[50; 4096], at).unwrap();
    writer.commit_waiting(5, Commit::Whole).unwrap();
    close(&image);
    is_sound(&store);
    let image = open(&store, false);
    assert_eq!(
        (0..6).map(|block| filled(&image, block)).collect::<Vec<_>>(),
        [Some(10), Some(11), Some(12), Some(13), None, Some(50)]
    );
}

/// Sessions of writes, removals and growths, against the bytes of each block.
#[test]
fn a_disk_that_grows_again_and_again_keeps_its_blocks() {
    let mut random = 7_u64;
    let mut dice = |below: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % below
    };
    for _ in 0..40 {
        let store = without_room(&made(&small(DiskType::Dynamic, 3)));
        let (mut blocks, mut model) = (3_u64, BTreeMap::new());
        let mut image = open(&store, true);
        for step in 0..60_u8 {
            let writer = image.writer().unwrap();
            writer.begin_writing().unwrap();
            let block = dice(blocks.min(40));
            match dice(10) {
                0..4 => {
                    put(&image, block, step + 1);
                    model.insert(block, step + 1);
                }
                4 => {
                    writer.commit_waiting(block, Commit::Discard).unwrap();
                    model.remove(&block);
                }
                5 => {
                    let generation = writer.freed_generation();
                    writer.flush().unwrap();
                    writer.recycle(generation);
                }
                6 => {
                    close(&image);
                    is_sound(&store);
                    image = open(&store, true);
                }
                _ => {
                    blocks += 1 + dice(1500);
                    grow(&image, blocks * 4096);
                    put(&image, blocks - 1, step + 1);
                    model.insert(blocks - 1, step + 1);
                }
            }
            for (&block, &byte) in &model {
                assert_eq!(filled(&image, block), Some(byte), "block {block} after step {step}");
            }
        }
        close(&image);
        is_sound(&store);
        assert_eq!(header(&*store).blocks_allocated as usize, model.len());
        let image = open(&store, false);
        model.iter().for_each(|(&block, &byte)| assert_eq!(filled(&image, block), Some(byte), "block {block}"));
    }
}

/// The images of QEMU have no room.
#[test]
fn an_image_of_qemu_grows_and_qemu_reads_it() {
    if Command::new("qemu-io").arg("--version").output().is_err() {
        return println!("skipped: qemu-io is not installed");
    }
    let dir = tempfile::tempdir().unwrap();
    let path: &Path = &dir.path().join("d.vdi");
    qemu("qemu-img", &["create", "-q", "-f", "vdi", "-o", "size=64M"], path);
    qemu("qemu-io", &["-f", "vdi", "-c", "write -P 1 0 3M", "-c", "write -P 2 40M 1M"], path);
    let mut checks = vec!["read -P 1 0 3M".to_owned(), "read -P 2 40M 1M".into(), "read -P 0 41M 23M".into()];
    for (turn, size) in [1_u64 << 40, (1 << 40) + (100 << 20), 3 << 40].into_iter().enumerate() {
        let writable = OpenOptions { writable: true, ..OpenOptions::default() };
        let store: Arc<dyn Store> = Arc::new(FileStore::open(path, &writable).unwrap());
        let image = open(&store, true);
        image.writer().unwrap().begin_writing().unwrap();
        let moved = grow(&image, size);
        assert!(turn > 0 || moved > 0, "{moved} blocks moved");
        put(&image, size / MIB - 1, 5 + turn as u8);
        close(&image);
        is_sound(&store);
        drop((image, store));
        checks.push(format!("read -P {} {} 1M", 5 + turn, size - MIB));
        let at = size - 5 * MIB;
        qemu("qemu-io", &["-f", "vdi", "-c", &format!("write -P {} {at} 1M", 50 + turn)], path);
        checks.push(format!("read -P {} {at} 1M", 50 + turn));
        let args: Vec<&str> = ["-f", "vdi"].into_iter().chain(checks.iter().flat_map(|line| ["-c", line])).collect();
        qemu("qemu-io", &args, path);
        qemu("qemu-img", &["check", "-q", "-f", "vdi"], path);
    }
}
