//! Entries of other programs that the specification forbids, kept space of entries without data,
//! and damage of single blocks.

use super::{
    hostile::{BAT, METADATA, entry, patch, sample},
    *,
};
use crate::{ImageError, Severity, vhdx::check};
use diskwright_format::vhdx::{BatEntry, BitmapState, PayloadState};

fn set(contents: &mut Contents, index: u64, entry: BatEntry) {
    patch(contents, BAT + 8 * index, &entry.to_le_bytes());
}

/// The worst finding, the first message, and the report's leak.
fn checked(contents: &Contents) -> (Option<Severity>, String, u64) {
    let report = check(TestStore::new(contents.clone())).unwrap();
    let message = report.findings.first().map(|finding| finding.message.clone()).unwrap_or_default();
    (report.worst(), message, report.leaked_bytes)
}

/// A disk without a parent. The first sector of block 1 is filled with 9.
fn alone(disk_type: DiskType, size_bytes: u64) -> Contents {
    let store = Driver::create(&options(disk_type, size_bytes, MIB as u32));
    let driver = Driver::open(&store, true);
    driver.write(2048, 1, 9).unwrap();
    driver.writer().close().unwrap();
    store.contents()
}

#[test]
fn a_partially_present_block_without_parent_is_read_whole_and_noted() {
    let mut contents = alone(DiskType::Dynamic, 10 * MIB);
    let place = entry(&contents, 1).offset_bytes();
    set(&mut contents, 1, BatEntry::payload(PayloadState::PartiallyPresent, place));
    let (worst, message, _) = checked(&contents);
    assert_eq!(worst, Some(Severity::Note), "{message}");
    assert!(message.contains("BAT entry 1: a partially present block in a disk without parent"), "{message}");
    let store = TestStore::new(contents);
    let driver = Driver::open(&store, true);
    assert_eq!((driver.read(2048), driver.read(2049)), (9, 0));
    driver.write(2049, 1, 10).unwrap();
    assert_eq!((driver.read(2048), driver.read(2049)), (9, 10));
}

#[test]
fn a_bitmap_entry_without_parent_is_ignored_and_noted() {
    for raw in [BatEntry::bitmap(BitmapState::Present, 1 << 40).0, 5, BatEntry::bitmap(BitmapState::Present, BAT).0] {
        let mut contents = alone(DiskType::Dynamic, 5 << 30);
        set(&mut contents, 4096, BatEntry(raw));
        let (worst, message, _) = checked(&contents);
        assert_eq!(worst, Some(Severity::Note), "{message}");
        assert!(message.contains("BAT entry 4096: a sector bitmap block in a disk without parent"), "{message}");
        let driver = Driver::open(&TestStore::new(contents), true);
        driver.write(4500 * 2048, 1, 3).unwrap();
        driver.writer().close().unwrap();
        assert_eq!((driver.read(2048), driver.read(4500 * 2048)), (9, 3));
    }
}

#[test]
fn a_bitmap_block_in_state_7_is_present_and_noted() {
    let mut contents = sample();
    let present = entry(&contents, 4096);
    set(&mut contents, 4096, BatEntry(present.0 | 7));
    let (worst, message, _) = checked(&contents);
    assert_eq!(worst, Some(Severity::Note), "{message}");
    assert!(message.contains("BAT entry 4096: a sector bitmap block in state 7"), "{message}");
    let driver = Driver::open(&TestStore::new(contents), true);
    assert_eq!((driver.read(3), driver.read(4)), (7, parent_tag(4)));
    driver.write(4, 1, 8).unwrap();
    driver.writer().close().unwrap();
    assert_eq!((driver.read(3), driver.read(4), driver.read(5)), (7, 8, parent_tag(5)));
}

#[test]
fn a_block_gets_the_kept_space_of_its_entry_back() {
    for (disk_type, state) in [
        (DiskType::Fixed, PayloadState::Unmapped),
        (DiskType::Fixed, PayloadState::Undefined),
        (DiskType::Fixed, PayloadState::Zero),
        (DiskType::Fixed, PayloadState::NotPresent),
        (DiskType::Dynamic, PayloadState::Unmapped),
    ] {
        let mut contents = alone(disk_type, 10 * MIB);
        let place = entry(&contents, 1).offset_bytes();
        // The block's stale data is still there.
        contents.write(&[0xee; MIB as usize], place);
        set(&mut contents, 1, BatEntry::payload(state, place));
        let len_bytes = contents.len_bytes;
        let zero_note = (state == PayloadState::Zero).then_some(Severity::Note);
        assert_eq!((checked(&contents).0, checked(&contents).2), (zero_note, 0), "{state:?}");
        let store = TestStore::new(contents);
        let driver = Driver::open(&store, true);
        assert_eq!(driver.read(2048), 0);
        driver.write(2050, 2, 4).unwrap();
        assert_eq!(driver.state(1), BlockState::data(place), "{disk_type} {state:?}");
        let found: Vec<u8> = (2048..2054).map(|sector| driver.read(sector)).collect();
        assert_eq!(found, [0, 0, 4, 4, 0, 0], "stale data of the block must not be visible");
        driver.writer().close().unwrap();
        assert_eq!(store.contents().len_bytes, len_bytes, "{disk_type} {state:?}: the file must not grow");
    }
}

#[test]
fn contested_kept_space_is_not_used() {
    for state in [PayloadState::Unmapped, PayloadState::Zero, PayloadState::NotPresent] {
        for other in [0, 5] {
            let mut contents = alone(DiskType::Fixed, 10 * MIB);
            let place = entry(&contents, 1).offset_bytes();
            set(&mut contents, other, BatEntry::payload(state, place));
            let driver = Driver::open(&TestStore::new(contents), true);
            driver.write(other * 2048, 1, 5).unwrap();
            assert_ne!(driver.state(other), BlockState::data(place));
            assert_eq!((driver.read(2048), driver.read(other * 2048)), (9, 5));
        }
    }
    // Two entries without data keep the same space: neither gets it.
    let mut contents = alone(DiskType::Fixed, 10 * MIB);
    let place = entry(&contents, 1).offset_bytes();
    for index in [1, 2] {
        set(&mut contents, index, BatEntry::payload(PayloadState::Unmapped, place));
    }
    let driver = Driver::open(&TestStore::new(contents), true);
    driver.write(2048, 1, 1).unwrap();
    driver.write(4096, 1, 2).unwrap();
    assert!(![driver.state(1), driver.state(2)].contains(&BlockState::data(place)));
    assert_eq!((driver.read(2048), driver.read(4096)), (1, 2));
}

#[test]
fn invalid_kept_space_is_not_used() {
    let beyond = |contents: &Contents| contents.len_bytes;
    let half_out = |contents: &Contents| contents.len_bytes - MIB / 2;
    let places: [&dyn Fn(&Contents) -> u64; 3] = [&beyond, &half_out, &|_| METADATA];
    // In the second order the file grows over the kept space before its block is written.
    for (place, order) in places.into_iter().flat_map(|place| [(place, [5, 6]), (place, [6, 5])]) {
        let mut contents = alone(DiskType::Dynamic, 10 * MIB);
        contents.set_len(contents.len_bytes + MIB / 2);
        let at = place(&contents);
        set(&mut contents, 5, BatEntry::payload(PayloadState::Unmapped, at));
        let driver = Driver::open(&TestStore::new(contents), true);
        for block in order {
            driver.write(block * 2048, 1, block as u8).unwrap();
        }
        driver.writer().close().unwrap();
        assert_eq!((driver.read(2048), driver.read(5 * 2048), driver.read(6 * 2048)), (9, 5, 6));
        assert_eq!(checked(&driver.store.contents()).0, None);
    }
}

#[test]
fn kept_space_is_freed_once_when_the_entry_changes() {
    // In a child, a block that becomes ZERO loses its kept space; another block may get it then.
    let mut contents = sample();
    let place = entry(&contents, 1).offset_bytes();
    set(&mut contents, 1, BatEntry::payload(PayloadState::Unmapped, place));
    let store = TestStore::new(contents);
    let driver = Driver::open(&store, true);
    driver.writer().begin_writing().unwrap();
    assert_eq!(driver.writer().reserve_waiting(1).unwrap().offset_bytes, place);
    driver.writer().commit_waiting(1, Commit::Zero).unwrap();
    let writer = driver.writer();
    writer.flush().unwrap();
    writer.recycle(writer.freed_generation());
    let places: Vec<u64> = (4..8).map(|block| writer.reserve_waiting(block).unwrap().offset_bytes).collect();
    assert_eq!(places.iter().filter(|&&at| at == place).count(), 1, "{places:?}");

    // Without a parent the entry may stay as it is. Then the block keeps the space.
    let mut contents = alone(DiskType::Dynamic, 10 * MIB);
    let place = entry(&contents, 1).offset_bytes();
    set(&mut contents, 1, BatEntry::payload(PayloadState::Unmapped, place));
    let driver = Driver::open(&TestStore::new(contents), true);
    let writer = driver.writer();
    writer.begin_writing().unwrap();
    assert_eq!(writer.reserve_waiting(1).unwrap().offset_bytes, place);
    writer.commit_waiting(1, Commit::Discard).unwrap();
    writer.flush().unwrap();
    writer.recycle(writer.freed_generation());
    assert!((4..9).all(|block| writer.reserve_waiting(block).unwrap().offset_bytes != place));
    assert_eq!(writer.reserve_waiting(1).unwrap().offset_bytes, place);
}

#[test]
fn an_offset_in_a_zero_entry_is_a_note_and_the_disk_is_writable() {
    // The ZERO entry comes before or after the entry of the block whose space it refers to. The
    // order must not matter.
    for index in [0, 5] {
        let mut contents = sample();
        let place = entry(&contents, 1).offset_bytes();
        set(&mut contents, index, BatEntry::payload(PayloadState::Zero, place));
        let (worst, message, _) = checked(&contents);
        assert!(message.contains("Hyper-V refuses such a disk"), "{message}");
        assert_eq!(worst, if index == 0 { Some(Severity::Leak) } else { Some(Severity::Note) }, "{message}");
        let driver = Driver::open(&TestStore::new(contents), true);
        driver.write(7 * 2048, 1, 7).unwrap();
        driver.write(index * 2048, 1, 6).unwrap();
        assert_eq!((driver.read(2048), driver.read(7 * 2048), driver.read(index * 2048)), (8, 7, 6));
    }
}

#[test]
fn blocks_beyond_the_end_of_a_shrunk_child_are_a_leak_and_keep_their_space() {
    let store = Driver::create(&options(DiskType::Differencing, 10 * MIB, MIB as u32));
    let driver = Driver::open(&store, true);
    (0..5).for_each(|block| driver.write(block * 2048, 2048, block as u8 + 1).unwrap());
    driver.writer().close().unwrap();
    let mut contents = store.contents();
    let places: Vec<u64> = (0..5).map(|block| entry(&contents, block).offset_bytes()).collect();
    patch(&mut contents, METADATA + (64 << 10) + 8, &(2 * MIB).to_le_bytes());
    let report = check(TestStore::new(contents.clone())).unwrap();
    assert_eq!((report.allocated_blocks, report.total_blocks, report.leaked_bytes), (2, 2, 3 * MIB));
    assert_eq!(report.worst(), Some(Severity::Leak));
    let message = &report.findings[0].message;
    assert!(message.contains("BAT entry 2 and 2 more: space for a block beyond the disk's end"), "{message}");
    // Zeroing a block frees its space. The next block gets that space or new space, but no space of
    // blocks beyond the end.
    let driver = Driver::open(&TestStore::new(contents), true);
    driver.writer().begin_writing().unwrap();
    driver.writer().commit_waiting(0, Commit::Zero).unwrap();
    let taken = driver.writer().reserve_waiting(0).unwrap().offset_bytes;
    assert!(!places[2..].contains(&taken), "{taken} of {places:?}");
}

#[test]
fn the_absolute_windows_path_has_the_prefix_of_hyper_v() {
    for (given, written) in [
        ("C:\\base\\parent.vhdx", "\\\\?\\C:\\base\\parent.vhdx"),
        ("\\\\?\\c:\\parent.vhdx", "\\\\?\\c:\\parent.vhdx"),
        ("\\home\\u\\parent.vhdx", "\\home\\u\\parent.vhdx"),
        ("\\\\server\\share\\parent.vhdx", "\\\\server\\share\\parent.vhdx"),
    ] {
        let mut options = options(DiskType::Differencing, 10 * MIB, MIB as u32);
        options.parent.as_mut().unwrap().absolute_path = Some(given.into());
        let driver = Driver::open(&Driver::create(&options), false);
        let link = driver.image.info().parent.as_ref().unwrap();
        assert_eq!(link.absolute_path.as_deref(), Some(written));
    }
}

/// The sample with an invalid entry.
fn damaged(index: u64, raw: u64) -> Arc<TestStore> {
    let mut contents = sample();
    set(&mut contents, index, BatEntry(raw));
    TestStore::new(contents)
}

#[test]
fn one_invalid_entry_damages_one_block() {
    for (raw, found) in [
        (BatEntry::payload(PayloadState::FullyPresent, 1 << 40).0, "a block at 1099511627776"),
        (BatEntry::payload(PayloadState::FullyPresent, METADATA).0, "a block at 2097152"),
        (BatEntry::payload(PayloadState::PartiallyPresent, 1 << 40).0, "a block at 1099511627776"),
        (4, "payload block state 4"),
    ] {
        for writable in [false, true] {
            let driver = Driver::open(&damaged(5, raw), writable);
            let mut states = [BlockState::Absent; 10];
            driver.image.block_states(0, &mut states).unwrap();
            let wrong: Vec<usize> = (0..10).filter(|&block| states[block] == BlockState::Damaged).collect();
            assert_eq!(wrong, [5], "{found}");
            assert_eq!((driver.read(3), driver.read(2048), driver.read(4096)), (7, 8, 0));
            let told = driver.image.damage(5).unwrap();
            assert!(
                matches!(&told, ImageError::Corrupt { offset_bytes, found: what, .. } if *offset_bytes == BAT + 40 && what == found),
                "{told}"
            );
            assert!(driver.image.damage(1).is_err(), "an intact block has no damage to explain");
        }
    }
}

#[test]
fn a_missing_bitmap_damages_the_blocks_that_need_it() {
    let driver = Driver::open(&damaged(4096, BatEntry::bitmap(BitmapState::Present, 1 << 40).0), false);
    assert!(matches!(driver.image.sector_bitmap(0), Err(ImageError::Corrupt { .. })));
    assert_eq!((driver.read(2048), driver.read(4096)), (8, 0));
    let told = driver.image.damage(0).unwrap();
    assert!(matches!(&told, ImageError::Corrupt { offset_bytes, .. } if *offset_bytes == BAT + 8 * 4096), "{told}");
}

#[test]
fn with_a_damaged_entry_blocks_can_be_overwritten_but_not_allocated() {
    let raw = BatEntry::payload(PayloadState::FullyPresent, 1 << 40).0;
    let store = damaged(5, raw);
    let len_bytes = store.contents().len_bytes;
    let driver = Driver::open(&store, true);
    // A whole block, a sector that a partial block has, a sector that it does not have, and a block
    // that becomes zero.
    driver.write(2050, 1, 20).unwrap();
    driver.write(3, 1, 21).unwrap();
    driver.write(9, 1, 22).unwrap();
    let refused = driver.write(7 * 2048, 1, 1).unwrap_err();
    assert!(matches!(&refused, ImageError::Corrupt { offset_bytes, .. } if *offset_bytes == BAT + 40), "{refused}");
    assert!(refused.to_string().contains("no new block is allocated"), "{refused}");
    assert!(driver.writer().reserve_waiting(5).is_err(), "a write to the damaged block itself");
    assert!(driver.writer().commit_waiting(5, Commit::Zero).is_err());
    driver.writer().flush().unwrap();
    driver.write(11, 1, 23).unwrap();
    driver.writer().close().unwrap();
    assert_eq!(store.contents().len_bytes, len_bytes, "the file keeps its length");
    let again = Driver::open(&TestStore::new(store.contents()), false);
    let sectors = [2050, 3, 9, 11, 10, 2048];
    assert_eq!(sectors.map(|sector| again.read(sector)), [20, 21, 22, 23, parent_tag(10), 8]);
    assert_eq!(again.state(5), BlockState::Damaged);
    assert_eq!(entry(&store.contents(), 5).0, raw, "the damaged entry is unchanged");
}

#[test]
fn the_next_block_is_found_across_holes_and_in_memory() {
    let store = Driver::create(&options(DiskType::Dynamic, 64 << 40, 2 << 20));
    let driver = Driver::open(&store, true);
    let next = |from, to| driver.image.next_block(from, to).unwrap();
    let blocks = (64u64 << 40) / (2 << 20);
    assert_eq!((next(0, u64::MAX), next(blocks, u64::MAX)), (None, None));
    for block in [0, 5000, 5001, 20_000_000, blocks - 1] {
        driver.write(block * 4096, 1, 1).unwrap();
    }
    let seen = || {
        let mut at = 0;
        let mut seen = Vec::new();
        while let Some(block) = next(at, u64::MAX) {
            seen.push(block);
            at = block + 1;
        }
        seen
    };
    let expected = [0, 5000, 5001, 20_000_000, blocks - 1];
    assert_eq!(seen(), expected, "by the tables in memory");
    driver.writer().flush().unwrap();
    assert_eq!(seen(), expected, "by the tables in the file");
    assert_eq!((next(1, 5000), next(1, 5001), next(5001, 5001)), (None, Some(5000), None));
}

/// Entries that read the same before and after, and what a repair without loss leaves.
fn mended(contents: &Contents) -> (Contents, Option<Severity>) {
    let store = TestStore::new(contents.clone());
    let shown: Arc<dyn Store> = store.clone();
    let after = crate::repair_image(crate::Format::Vhdx, &shown, false, &mut |_| true).unwrap().unwrap();
    (store.contents(), after.worst())
}

#[test]
fn the_entry_without_data_loses_its_place_and_not_the_block_with_data() {
    let store = Driver::create(&options(DiskType::Dynamic, 20 * MIB, 2 * MIB as u32));
    let driver = Driver::open(&store, true);
    driver.write(4096, 1, 7).unwrap();
    driver.write(3 * 4096, 1, 9).unwrap();
    driver.writer().close().unwrap();
    let sound = store.contents();
    let (first, second) = (entry(&sound, 1).offset_bytes(), entry(&sound, 3).offset_bytes());
    assert_eq!(second, first + 2 * MIB);
    for state in [PayloadState::Unmapped, PayloadState::Undefined] {
        // Before and after the block in the table; at its place, over both blocks, and so that the
        // entry without data begins first.
        for index in [0, 5] {
            for (place, alone) in [(first, false), (second, false), (first + MIB, false), (first + MIB, true)] {
                let mut contents = sound.clone();
                set(&mut contents, index, BatEntry::payload(state, place));
                if alone {
                    set(&mut contents, 1, BatEntry::payload(PayloadState::Zero, 0));
                }
                let (worst, message, _) = checked(&contents);
                assert_eq!(worst, Some(Severity::Corrupt), "{message}");
                let (after, worst) = mended(&contents);
                assert!(worst < Some(Severity::Leak), "{state:?} {index} {place}: {worst:?}");
                assert_eq!(entry(&after, index), BatEntry::payload(state, 0));
                let driver = Driver::open(&TestStore::new(after), true);
                assert_eq!((driver.read(4096), driver.read(3 * 4096)), (if alone { 0 } else { 7 }, 9));
            }
        }
        // Two entries without data in one place: one of them may keep it.
        let mut contents = sound.clone();
        set(&mut contents, 1, BatEntry::payload(state, first));
        set(&mut contents, 5, BatEntry::payload(state, first));
        assert_eq!(checked(&contents).0, Some(Severity::Corrupt));
        let (after, worst) = mended(&contents);
        assert!(worst < Some(Severity::Leak), "{worst:?}");
        assert_eq!([entry(&after, 1), entry(&after, 5)].map(BatEntry::offset_bytes), [first, 0]);
    }
}

#[test]
fn places_that_no_writer_accepts_are_not_sound() {
    let mut contents = alone(DiskType::Dynamic, 10 * MIB);
    contents.set_len(1 << 53);
    for index in [2, 3] {
        set(&mut contents, index, BatEntry::payload(PayloadState::FullyPresent, 1 << 52));
    }
    let report = check(TestStore::new(contents.clone())).unwrap();
    let told: Vec<&str> = report.findings.iter().map(|finding| &*finding.message).collect();
    assert_eq!(report.worst(), Some(Severity::Corrupt), "{told:?}");
    assert_eq!(told.iter().filter(|message| message.contains("within the first 128 TiB")).count(), 2, "{told:?}");
    // A repair must not cut the file before these blocks.
    assert_eq!(mended(&contents).0.len_bytes, 1 << 53);
    // Two blocks without data keep one place there: they must not share it when they are written.
    for index in [2, 3] {
        set(&mut contents, index, BatEntry::payload(PayloadState::Unmapped, 1 << 52));
    }
    let driver = Driver::open(&TestStore::new(contents), true);
    driver.write(2 * 2048, 1, 2).unwrap();
    driver.write(3 * 2048, 1, 3).unwrap();
    assert_eq!((driver.read(2 * 2048), driver.read(3 * 2048)), (2, 3));
}
