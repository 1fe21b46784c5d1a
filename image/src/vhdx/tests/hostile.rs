//! Damaged and malicious files: no panic, no memory sized by a header's claim, and findings with
//! the right offset.

use super::*;
use crate::{ImageError, Severity, vhdx::check};
use diskwright_format::vhdx::{BatEntry, BitmapState, Header, PayloadState, RegionTable, Slot, region::BAT_REGION};
use proptest::prelude::*;

pub(super) const METADATA: u64 = 2 * MIB;
pub(super) const BAT: u64 = 3 * MIB;

/// A small child with a partial block, a whole block and a zero block.
pub(super) fn sample() -> Contents {
    let store = Driver::create(&options(DiskType::Differencing, 10 * MIB, MIB as u32));
    let driver = Driver::open(&store, true);
    driver.write(3, 1, 7).unwrap();
    driver.write(2048, 2048, 8).unwrap();
    driver.writer().commit_waiting(2, Commit::Zero).unwrap();
    driver.writer().close().unwrap();
    store.contents()
}

/// Calls all operations on a file. All may fail, none may panic.
fn exercise(contents: Contents) {
    let store = TestStore::new(contents);
    let _ = check(Arc::clone(&store) as Arc<dyn Store>);
    for writable in [false, true] {
        let Ok(image) = open(Arc::clone(&store) as Arc<dyn Store>, writable) else { continue };
        let mut states = [BlockState::Absent; 12];
        let _ = image.block_states(0, &mut states);
        let _ = image.block_states(u64::MAX - 3, &mut states);
        for block in 0..4 {
            let _ = image.sector_bitmap(block);
        }
        let Some(writer) = image.writer() else { continue };
        let link = ParentLink { absolute_path: Some("\\x".repeat(9000)), ..image.parent_link().unwrap_or_default() };
        if writer.set_parent_link(&link).is_ok() {
            assert_eq!(crate::vhdx::parent_link(&*store).unwrap(), image.parent_link());
        }
        let _ = writer.begin_writing();
        for block in 0..6 {
            if writer.reserve_waiting(block).is_ok() {
                let _ = writer.commit_waiting(
                    block,
                    if block % 2 == 0 { Commit::Whole } else { Commit::Sectors { first: 3, count: 9 } },
                );
            }
            let _ = writer.commit_waiting(block + 3, Commit::Discard);
        }
        let _ = writer.flush();
        let _ = writer.close();
    }
    let _ = check(store);
}

pub(super) fn patch(contents: &mut Contents, offset_bytes: u64, bytes: &[u8]) {
    contents.write(bytes, offset_bytes);
}

/// Recomputes the checksum of a structure of `len` bytes.
fn reseal(contents: &mut Contents, offset_bytes: u64, len: usize) {
    let mut raw = vec![0; len];
    contents.read(&mut raw, offset_bytes);
    raw[4..8].fill(0);
    // `seal` computes CRC-32C with the field at 4, which all structures share.
    diskwright_format::vhdx::log::seal(&mut raw);
    contents.write(&raw, offset_bytes);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn any_damage_is_handled_without_a_panic(changes in prop::collection::vec((0usize..6, 0u64..200, any::<u64>(), prop::sample::select(vec![1usize, 2, 4, 8])), 1..6)) {
        let mut contents = sample();
        for (area, at, value, len) in changes {
            let base = [64 << 10, 128 << 10, 192 << 10, METADATA, METADATA + (64 << 10), BAT][area];
            // Small and huge values.
            let value = if value % 3 == 0 { value } else { value >> (value % 60) };
            patch(&mut contents, base + at, &value.to_le_bytes()[..len]);
        }
        for slot in [64 << 10, 128 << 10] {
            reseal(&mut contents, slot, 4096);
        }
        for table in [192 << 10, 256 << 10] {
            reseal(&mut contents, table, 65536);
        }
        exercise(contents);
    }

    #[test]
    fn a_truncated_file_is_handled_without_a_panic(len_bytes in 0u64..(9 << 20)) {
        let mut contents = sample();
        contents.set_len(len_bytes);
        exercise(contents);
    }
}

#[test]
fn a_file_that_is_not_a_vhdx_is_refused() {
    for contents in [Contents::default(), {
        let mut c = Contents::default();
        c.write(&[0; 5000], 0);
        c
    }] {
        let store = TestStore::new(contents);
        assert!(matches!(open(Arc::clone(&store) as Arc<dyn Store>, false), Err(ImageError::NotAnImage { .. })));
        assert!(matches!(check(store), Err(ImageError::NotAnImage { .. })));
    }
}

/// Changes the sample and returns the offsets of all corrupt findings.
fn corruptions(change: impl FnOnce(&mut Contents)) -> Vec<u64> {
    let mut contents = sample();
    change(&mut contents);
    let report = check(TestStore::new(contents)).unwrap();
    report
        .findings
        .iter()
        .filter(|finding| finding.severity == Severity::Corrupt)
        .map(|finding| finding.offset_bytes)
        .collect()
}

pub(super) fn entry(contents: &Contents, index: u64) -> BatEntry {
    let mut raw = [0; 8];
    contents.read(&mut raw, BAT + 8 * index);
    BatEntry::from_le_bytes(raw)
}

#[test]
fn every_invalid_entry_is_found_at_its_offset() {
    let set =
        |index: u64, raw: u64| move |contents: &mut Contents| patch(contents, BAT + 8 * index, &raw.to_le_bytes());
    assert!(corruptions(|_| ()).is_empty());
    let at = |index: u64| vec![BAT + 8 * index];
    assert_eq!(corruptions(set(5, BatEntry::payload(PayloadState::FullyPresent, 1 << 40).0)), at(5), "beyond the file");
    assert_eq!(
        corruptions(set(5, BatEntry::payload(PayloadState::FullyPresent, METADATA).0)),
        at(5),
        "in the metadata"
    );
    assert_eq!(corruptions(set(5, BatEntry::payload(PayloadState::FullyPresent, 0).0)), at(5), "in the header section");
    assert_eq!(corruptions(set(5, 4)), at(5), "state 4");
    assert_eq!(corruptions(set(5, 1 << 7)), at(5), "reserved bits");
    assert_eq!(
        corruptions(set(4096, BatEntry::bitmap(BitmapState::NotPresent, 0).0)),
        at(0),
        "a partial block without bitmap"
    );
    assert_eq!(corruptions(set(4096, 5)), vec![BAT, BAT + 8 * 4096], "an undefined bitmap state");
    let overlap = corruptions(|contents| {
        let whole = entry(contents, 1);
        patch(contents, BAT + 8 * 5, &whole.to_le_bytes());
    });
    assert_eq!(overlap.len(), 1);
    assert!(overlap == at(1) || overlap == at(5));
    let unmapped = corruptions(|contents| {
        let whole = entry(contents, 1).offset_bytes();
        patch(contents, BAT + 8 * 5, &BatEntry::payload(PayloadState::Unmapped, whole).to_le_bytes());
    });
    assert_eq!(unmapped, at(5), "an unmapped block whose space another block has");
}

#[test]
fn a_file_whose_blocks_share_space_is_not_written_to() {
    let mut contents = sample();
    let whole = entry(&contents, 1);
    patch(&mut contents, BAT + 8 * 5, &whole.to_le_bytes());
    let store = TestStore::new(contents);
    let driver = Driver::open(&store, true);
    assert_eq!(driver.read(2048), 8, "it can still be read");
    assert!(matches!(driver.writer().reserve_waiting(7), Err(ImageError::Corrupt { .. })));
}

#[test]
fn one_damaged_copy_is_a_note_and_a_remark() {
    for (offset_bytes, len) in [(64 << 10, 100), (128 << 10, 100), (192 << 10, 20), (256 << 10, 20)] {
        let mut contents = sample();
        patch(&mut contents, offset_bytes, &vec![0x5a; len]);
        let store = TestStore::new(contents);
        assert_eq!(check(Arc::clone(&store) as Arc<dyn Store>).unwrap().worst(), Some(Severity::Note));
        let reader = Driver::open(&store, false);
        assert_eq!(reader.read(3), 7);
        // The second region table is not read.
        assert_eq!(reader.image.info().remarks.len(), usize::from(offset_bytes != 256 << 10));
    }
}

#[test]
fn damage_of_both_copies_is_corrupt() {
    let headers = corruptions(|contents| {
        patch(contents, (64 << 10) + 9, &[1]);
        patch(contents, (128 << 10) + 9, &[1]);
    });
    assert_eq!(headers, vec![(64 << 10) + 4]);
    let regions = corruptions(|contents| {
        patch(contents, (192 << 10) + 9, &[1]);
        patch(contents, (256 << 10) + 9, &[1]);
    });
    assert_eq!(regions, vec![(192 << 10) + 4]);
}

#[test]
fn regions_in_the_log_and_a_short_bat_are_refused() {
    let change_regions = |change: &dyn Fn(&mut RegionTable)| {
        let mut contents = sample();
        let mut raw = vec![0; 65536];
        contents.read(&mut raw, 192 << 10);
        let mut table = RegionTable::parse(&raw).unwrap();
        change(&mut table);
        for offset_bytes in [192 << 10, 256 << 10] {
            contents.write(&table.to_bytes(), offset_bytes);
        }
        let store = TestStore::new(contents);
        open(store as Arc<dyn Store>, false).unwrap_err()
    };
    let in_log = change_regions(&|table| {
        table.regions.iter_mut().filter(|region| region.id == BAT_REGION).for_each(|region| region.offset_bytes = MIB)
    });
    assert!(in_log.to_string().contains("do not overlap"), "{in_log}");
    let mut contents = sample();
    // The same table for a disk of 64 TiB.
    contents.write(&(64u64 << 40).to_le_bytes(), METADATA + (64 << 10) + 8);
    let short = open(TestStore::new(contents) as Arc<dyn Store>, false).unwrap_err();
    assert!(short.to_string().contains("BAT region"), "{short}");
    let stranger = change_regions(&|table| {
        let mut region = table.regions[0];
        region.id = Uuid::from_u128(99);
        region.offset_bytes = 64 * MIB;
        table.regions.push(region);
    });
    assert!(matches!(stranger, ImageError::Unsupported { .. }));
}

#[test]
fn a_header_of_a_later_version_is_not_supported() {
    let mut contents = sample();
    for slot in [Slot::First, Slot::Second] {
        let mut raw = vec![0; 4096];
        contents.read(&mut raw, slot.offset_bytes());
        let header = Header { version: 2, ..Header::parse(&raw).unwrap() };
        contents.write(&header.to_bytes(), slot.offset_bytes());
    }
    assert!(matches!(open(TestStore::new(contents) as Arc<dyn Store>, false), Err(ImageError::Unsupported { .. })));
}
