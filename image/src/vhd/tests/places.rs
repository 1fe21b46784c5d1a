//! Offsets of blocks: their order, the space between them, and the limit of BAT entries.

use super::*;
use crate::{
    ImageError,
    vhd::{
        layout::Layout,
        order::{self, WalkItem},
    },
};

/// A dynamic disk by another program whose BAT is `entries`, in a file of `len` bytes.
fn placed(size_bytes: u64, block_bytes: u32, entries: &[u32], len: u64) -> Arc<SparseStore> {
    let store = created(DiskType::Dynamic, size_bytes, block_bytes);
    edit_footers(&store, |footer| footer.creator_app = *b"qem2");
    let footer = footer_at(&store, 0).unwrap().to_bytes();
    let bytes: Vec<u8> = entries.iter().flat_map(|entry| entry.to_be_bytes()).collect();
    store.write_at(&[0; 512], store.len_bytes().unwrap() - 512).unwrap();
    store.write_at(&bytes, header(&store).table_offset).unwrap();
    store.set_len(len - 512).unwrap();
    store.write_at(&footer, len - 512).unwrap();
    store
}

fn set_entry(store: &SparseStore, block: u64, entry: u32) {
    store.write_at(&entry.to_be_bytes(), header(store).table_offset + block * 4).unwrap();
}

const TIB2: u64 = 2 << 40;
/// Sectors of one window of the walk: 128 GiB.
const WINDOW: u32 = 1 << 28;

#[test]
fn blocks_are_visited_by_ascending_offset_in_a_file_of_any_size() {
    let entries = [WINDOW, 0xffff_ff00, WINDOW - 100, 400, WINDOW * 9 + 5, WINDOW, 2, WINDOW * 5];
    let store = placed(MIB, 4096, &entries, TIB2 + 512);
    let (layout, _) = Layout::read(&*store).unwrap();
    let (mut order, mut others) = (Vec::new(), Vec::new());
    order::walk(&*store, layout.blocks.as_ref().unwrap(), TIB2, &mut |item| {
        match item {
            WalkItem::Block { entry, .. } => order.push(entry),
            WalkItem::Misplaced { block, .. } => others.push((block, "misplaced")),
            WalkItem::Duplicate { block, .. } => others.push((block, "duplicate")),
        }
        Ok(())
    })
    .unwrap();
    assert_eq!(order, [400, WINDOW - 100, WINDOW, WINDOW * 5, WINDOW * 9 + 5, 0xffff_ff00]);
    assert_eq!(others, [(6, "misplaced"), (5, "duplicate")]);
}

#[test]
fn overlaps_are_found_across_windows() {
    let store = placed(MIB, 4096, &[WINDOW, 400, WINDOW - 5], TIB2 + 512);
    let found = messages(&store, Severity::Corrupt);
    assert!(found.len() == 1 && found[0].starts_with("Blocks 2 and 0 overlap"), "{found:?}");
    assert!(matches!(
        open(store.clone(), true).unwrap().writer().unwrap().reserve_waiting(9),
        Err(ImageError::Corrupt { .. })
    ));
    set_entry(&store, 2, 400);
    let found = messages(&store, Severity::Corrupt);
    assert!(found.len() == 1 && found[0].starts_with("Blocks 1 and 2 overlap"), "{found:?}");
    assert!(matches!(
        open(store.clone(), true).unwrap().writer().unwrap().reserve_waiting(9),
        Err(ImageError::Corrupt { .. })
    ));
    set_entry(&store, 2, WINDOW - 9);
    assert!(messages(&store, Severity::Corrupt).is_empty());
    assert!(open(store, true).unwrap().writer().unwrap().reserve_waiting(9).is_ok());
}

#[test]
fn a_block_beyond_2_tib_is_refused_and_changes_nothing() {
    // The last block that an entry can address exists: the next one would begin beyond 2 TiB.
    let len = TIB2 + 65536;
    let store = placed(4 * MIB, 65536, &[0xffff_fffe], len);
    let disk = TestDisk::open(store.clone(), true, Vec::new());
    for _ in 0..2 {
        let refused = disk.image.writer().unwrap().reserve_waiting(1).unwrap_err();
        assert!(matches!(refused, ImageError::Unsupported { .. }) && refused.to_string().contains("VHDX"), "{refused}");
        assert_eq!(store.len_bytes().unwrap(), len);
    }
    disk.close();
    assert_eq!(store.len_bytes().unwrap(), len);
    assert!(footer_at(&store, len - 512).is_ok());
}

#[test]
fn the_largest_disk_needs_blocks_of_1_mib() {
    for disk_type in [DiskType::Dynamic, DiskType::Differencing] {
        for block_bytes in [128 << 10, 512 << 10] {
            let store = Arc::new(SparseStore::new("disk.vhd"));
            let error = create(store.clone(), &options(disk_type, 2040 << 30, block_bytes)).unwrap_err();
            let text = error.to_string();
            assert!(matches!(error, ImageError::BadOptions { .. }) && text.contains("1048576"), "{text}");
            assert_eq!(store.len_bytes().unwrap(), 0);
        }
        let store = Arc::new(SparseStore::new("disk.vhd"));
        create(store.clone(), &options(disk_type, 2040 << 30, 1 << 20)).unwrap();
        // An entry can address the last block even when all blocks have space.
        let len_bytes = store.len_bytes().unwrap().next_multiple_of(4096) + 2040 * 1024 * (4096 + (1 << 20));
        assert!((len_bytes - (1 << 20) - 512) / 512 < u64::from(u32::MAX));
    }
    // Smaller disks can have smaller blocks.
    let store = Arc::new(SparseStore::new("disk.vhd"));
    create(store, &options(DiskType::Dynamic, 1024 << 30, 128 << 10)).unwrap();
}

#[test]
fn many_unpadded_blocks_are_freed_correctly() {
    // 70,000 adjacent blocks of 4 KiB: more than `MAX_UNPADDED`.
    const BLOCKS: u64 = 70_000;
    let first = 1024;
    let entries: Vec<u32> = (0..BLOCKS as u32).map(|block| first + block * 9).collect();
    let store = placed((BLOCKS + 8) * 4096, 4096, &entries, (u64::from(first) + BLOCKS * 9) * 512 + 512);
    let disk = TestDisk::open(store.clone(), true, Vec::new());
    // A pad of a discarded block would be the last page of the block before it.
    let neighbours = [4, 7, BLOCKS - 2];
    for block in neighbours {
        disk.write(block * 4096, &[7; 4096]);
    }
    for block in [5, 6, 8, BLOCKS - 1] {
        disk.discard(block);
    }
    disk.flush();
    disk.image.writer().unwrap().recycle(disk.image.writer().unwrap().freed_generation());
    for block in BLOCKS..BLOCKS + 4 {
        disk.write(block * 4096, &[1; 4096]);
    }
    for block in neighbours {
        assert_eq!(disk.read(block * 4096, 4096), [7; 4096], "block {block}");
    }
    disk.close();
    assert_eq!(check(store).unwrap().worst().filter(|&worst| worst == Severity::Corrupt), None);
}

#[test]
fn space_before_the_first_block_is_a_leak() {
    let (store, disk) = disk(DiskType::Dynamic);
    disk.write(0, &[1; 3 * 65536]);
    disk.discard(0);
    disk.close();
    let report = check(store.clone()).unwrap();
    assert_eq!((report.leaked_bytes / 65536, report.worst()), (1, Some(Severity::Leak)));
    assert!(messages(&store, Severity::Leak)[0].contains("before the first block"));
    // This program created the file, so the space is reused.
    let len = store.len_bytes().unwrap();
    let disk = TestDisk::open(store.clone(), true, Vec::new());
    disk.write(9 * 65536, &[4; 512]);
    disk.close();
    assert_eq!((store.len_bytes().unwrap(), check(store).unwrap().findings.len()), (len, 0));
}

#[test]
fn the_footer_follows_the_last_block_or_the_table() {
    let table_end = |store: &SparseStore| {
        let header = header(store);
        (header.table_offset + u64::from(header.max_table_entries) * 4).next_multiple_of(512)
    };
    let footer_place = |store: &SparseStore| store.len_bytes().unwrap() - 512;
    let (store, disk) = disk(DiskType::Dynamic);
    assert_eq!(footer_place(&store), table_end(&store), "a new file");
    disk.write(0, &[1; 512]);
    disk.write(65536, &[1; 512]);
    disk.discard(1);
    disk.close();
    assert_eq!(footer_place(&store), 8192 + 4096 + 65536, "the last block was freed");
    let disk = TestDisk::open(store.clone(), true, Vec::new());
    disk.discard(0);
    disk.close();
    assert_eq!(footer_place(&store), table_end(&store), "all blocks were freed");
    // A block of another program with any end, then one of ours that is freed again.
    let at = table_end(&store);
    let footer = footer_at(&store, 0).unwrap().to_bytes();
    store.write_at(&[0xff; 512], at).unwrap();
    store.write_at(&[3; 65536], at + 512).unwrap();
    store.write_at(&footer, at + 512 + 65536 + 9 * 512).unwrap();
    set_entry(&store, 7, (at / 512) as u32);
    let disk = TestDisk::open(store.clone(), true, Vec::new());
    disk.write(0, &[1; 512]);
    disk.discard(0);
    disk.close();
    assert_eq!(footer_place(&store), at + 512 + 65536);
}

/// A repair must not cut off what may belong to a parent locator.
#[test]
fn space_that_a_locator_declares_beyond_the_file_is_not_given_back() {
    let (store, disk) = disk(DiskType::Differencing);
    disk.write(65536, &[1; 65536]);
    disk.close();
    let tail = store.len_bytes().unwrap() - 512;
    let mut header = header(&store);
    let locator = header.locators.iter_mut().find(|entry| entry.is_used()).unwrap();
    let mut data = vec![0; locator.data_length_bytes as usize];
    store.read_at(&mut data, locator.data_offset).unwrap();
    let place = tail.next_multiple_of(4096) + 65536;
    (locator.data_offset, locator.data_space) = (place, 1 << 20);
    store.write_at(&header.to_bytes(), 512).unwrap();
    let footer = footer_at(&store, 0).unwrap().to_bytes();
    store.write_at(&vec![0x5a; 192 << 10], tail).unwrap();
    store.write_at(&data, place).unwrap();
    store.write_at(&footer, tail + (192 << 10)).unwrap();
    let kept = store.sectors();
    let shown: Arc<dyn Store> = store.clone();
    let link = super::super::parent_link(&*shown).unwrap();
    let report = check(store.clone()).unwrap();
    assert!(report.findings.iter().any(|finding| finding.message.contains("declares more space")), "{report:#?}");
    assert_eq!(report.worst(), Some(Severity::Leak), "{report:#?}");
    for accept_loss in [false, true] {
        crate::repair_image(crate::Format::Vhd, &shown, accept_loss, &mut |_| true).unwrap().unwrap();
        assert!(store.sectors() == kept);
    }
    // A session that adds a block does not overwrite the locator either, nor cut it off.
    let disk = TestDisk::open(store.clone(), true, Vec::new());
    disk.write(0, &[2; 65536]);
    disk.close();
    let after = super::super::parent_link(&*shown).unwrap();
    assert_eq!(after, link);
    let mut now = vec![0; data.len()];
    store.read_at(&mut now, place).unwrap();
    assert!(now == data);
}
