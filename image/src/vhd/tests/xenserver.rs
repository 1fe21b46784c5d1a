//! XenServer's files: sector bitmaps of dynamic disks, and the batmap.

use super::*;
use crate::ImageError;
use diskwright_format::vhd::{BATMAP_HEADER_BYTES, BatmapHeader};

#[test]
fn sector_bitmaps_of_xenservers_dynamic_disks_are_honoured() {
    let (store, disk) = disk(DiskType::Dynamic);
    disk.write(0, &[1; 65536]);
    let BlockState::Data { offset_bytes, .. } = disk.state(0) else { panic!("not written") };
    disk.close();
    edit_footers(&store, |footer| footer.creator_app = *b"tap\0");
    store.write_at(&[0x40], offset_bytes - 512).unwrap();
    store.write_at(&[0; 511], offset_bytes - 511).unwrap();
    let disk = TestDisk::open(store.clone(), true, Vec::new());
    let mut expected = vec![0; 65536];
    expected[512..1024].fill(1);
    assert_eq!(disk.read(0, 65536), expected);
    let writer = disk.image.writer().unwrap();
    assert!(writer.can_store_zero());
    let place = writer.reserve_waiting(0).unwrap().offset_bytes;
    disk.store().write_at(&[2; 512], place + 1024).unwrap();
    writer.commit_waiting(0, Commit::Sectors { first: 2, count: 1 }).unwrap();
    expected[1024..1536].fill(2);
    disk.close();
    let disk = TestDisk::open(store.clone(), true, Vec::new());
    assert_eq!(disk.read(0, 65536), expected);
    disk.discard(0);
    disk.close();
    assert_sound(store);
}

/// A new disk of 64 blocks with XenServer's layout: the batmap directly after the BAT, then the
/// footer.
fn with_batmap(disk_type: DiskType) -> (Arc<SparseStore>, BatmapHeader, u64) {
    let store = created(disk_type, 4 * MIB, 65536);
    edit_footers(&store, |footer| {
        footer.creator_app = *b"tap\0";
        footer.creator_version = 0x0001_0003;
    });
    let at = header(&store).table_offset + 512;
    let footer = footer_at(&store, 0).unwrap().to_bytes();
    let map_offset = at + BATMAP_HEADER_BYTES as u64;
    let mut batmap = BatmapHeader { map_offset, map_sectors: 1, version: 0x0001_0002, checksum: 0 };
    batmap.checksum = batmap.checksum_of(&[0; 512]);
    store.write_at(&batmap.to_bytes(), at).unwrap();
    store.write_at(&[0; 512], map_offset).unwrap();
    store.write_at(&footer, map_offset + 512).unwrap();
    (store, batmap, at)
}

fn set_map(store: &SparseStore, batmap: &BatmapHeader, at: u64, map: &[u8; 512]) {
    let checksum = batmap.checksum_of(map);
    store.write_at(&BatmapHeader { checksum, ..batmap.clone() }.to_bytes(), at).unwrap();
    store.write_at(map, batmap.map_offset).unwrap();
}

/// What XenServer reads: all sectors of a block that is full by the batmap, else the sectors set in
/// the block's bitmap; the rest is the parent's data.
fn as_xenserver(store: &SparseStore, batmap: &BatmapHeader, parent: &[u8], sector: u64) -> Vec<u8> {
    let (block, within) = (sector / 128, sector % 128);
    let byte = |at: u64| {
        let mut byte = [0];
        store.read_at(&mut byte, at).unwrap();
        byte[0]
    };
    let mut entry = [0; 4];
    store.read_at(&mut entry, header(store).table_offset + block * 4).unwrap();
    let entry = u32::from_be_bytes(entry);
    let bit_of = |byte: u8, bit: u64| byte >> (7 - bit % 8) & 1 == 1;
    let bitmap = u64::from(entry) * 512;
    let is_full = bit_of(byte(batmap.map_offset + block / 8), block);
    if entry == u32::MAX || !(is_full || bit_of(byte(bitmap + within / 8), within)) {
        return parent.get(sector as usize * 512..).map_or(vec![0; 512], |rest| rest[..512].to_vec());
    }
    let mut bytes = vec![0; 512];
    store.read_at(&mut bytes, bitmap + 512 + within * 512).unwrap();
    bytes
}

#[test]
fn the_first_write_does_not_change_the_batmap() {
    for disk_type in [DiskType::Dynamic, DiskType::Differencing] {
        let parent = if disk_type == DiskType::Dynamic { Vec::new() } else { vec![7; 4 * MIB as usize] };
        let (store, batmap, at) = with_batmap(disk_type);
        assert_eq!(check(store.clone()).unwrap().findings.len(), 0);
        let mut before = [0; 1024];
        store.read_at(&mut before, at).unwrap();
        for session in 0..2 {
            let disk = TestDisk::open(store.clone(), true, parent.clone());
            disk.write(session * 65536 + 1024, &[1; 512]);
            disk.write(5 * 65536, &[2; 65536]);
            let all = disk.read(0, 6 * 65536);
            disk.close();
            let mut after = [0; 1024];
            store.read_at(&mut after, at).unwrap();
            assert_eq!(after, before);
            assert!(messages(&store, Severity::Corrupt).is_empty() && messages(&store, Severity::Leak).is_empty());
            for (sector, expected) in all.chunks(512).enumerate() {
                assert_eq!(as_xenserver(&store, &batmap, &parent, sector as u64), expected, "sector {sector}");
            }
        }
    }
}

#[test]
fn no_block_is_freed_in_a_file_with_a_batmap() {
    let (store, ..) = with_batmap(DiskType::Dynamic);
    let disk = TestDisk::open(store.clone(), true, Vec::new());
    disk.write(0, &[1; 65536]);
    let writer = disk.image.writer().unwrap();
    assert!(!writer.can_store_zero() && !writer.can_forget_blocks());
    let refused = writer.commit_waiting(0, Commit::Discard).unwrap_err();
    assert!(matches!(refused, ImageError::Unsupported { .. }) && refused.to_string().contains("batmap"), "{refused}");
    assert_eq!(disk.read(0, 65536), [1; 65536]);
    disk.close();
    assert_sound(store);
}

#[test]
fn check_compares_the_batmap_with_the_blocks() {
    let (store, batmap, at) = with_batmap(DiskType::Differencing);
    let disk = TestDisk::open(store.clone(), true, Vec::new());
    disk.write(0, &[1; 65536]);
    disk.write(65536, &[1; 512]);
    disk.close();
    let found = |first: u8| {
        let mut map = [0; 512];
        map[0] = first;
        set_map(&store, &batmap, at, &map);
        messages(&store, Severity::Corrupt)
    };
    assert_eq!(found(0x80), [""; 0]);
    let partial = found(0xc0);
    assert!(partial.len() == 1 && partial[0].contains("block 1 is full, but 127 of 128 bits"), "{partial:?}");
    let without = found(0xa0);
    assert!(without.len() == 1 && without[0].contains("block 2 is full, but the block has no space"), "{without:?}");
    store.write_at(&[1], batmap.map_offset + 9).unwrap();
    let torn = messages(&store, Severity::Corrupt);
    assert!(torn.len() == 1 && torn[0].contains("checksum"), "{torn:?}");
}

#[test]
fn a_batmap_is_used_only_if_xenserver_would_use_it() {
    // A file of another creator may have a block there, or the batmap's own numbers may be invalid.
    type Edit<'a> = &'a dyn Fn(&SparseStore, &BatmapHeader, u64);
    let edits: [Edit<'_>; 5] = [
        &|store, _, _| edit_footers(store, |footer| footer.creator_app = *b"win "),
        &|store, _, _| edit_footers(store, |footer| footer.creator_version = 1),
        &|store, batmap, at| {
            store.write_at(&BatmapHeader { map_offset: 1 << 40, ..batmap.clone() }.to_bytes(), at).unwrap();
        },
        &|store, batmap, at| {
            store.write_at(&BatmapHeader { map_offset: 512, ..batmap.clone() }.to_bytes(), at).unwrap();
        },
        &|store, batmap, at| {
            store.write_at(&BatmapHeader { map_sectors: u32::MAX, ..batmap.clone() }.to_bytes(), at).unwrap();
        },
    ];
    for (index, edit) in edits.into_iter().enumerate() {
        let (store, batmap, at) = with_batmap(DiskType::Dynamic);
        edit(&store, &batmap, at);
        let disk = TestDisk::open(store.clone(), true, Vec::new());
        assert!(disk.image.writer().unwrap().can_store_zero(), "{index}");
        disk.write(0, &[1; 512]);
        disk.close();
        assert_sound(store);
    }
}
