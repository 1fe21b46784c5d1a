//! Growth of disks: their contents afterwards, stale data of other programs beyond the old end, and
//! power cuts at every step.

use super::*;
use crate::{Severity, vhdx::check};
use std::panic::{AssertUnwindSafe, catch_unwind};

const TYPES: [DiskType; 3] = [DiskType::Fixed, DiskType::Dynamic, DiskType::Differencing];

/// Number of blocks of 1 MiB, in bytes, that a BAT region of 1 MiB has entries for.
const FULL_REGION_BYTES: u64 = 131_000 * MIB;

fn assert_sound(store: &Arc<TestStore>, what: &str) {
    let report = check(Arc::clone(store) as Arc<dyn Store>).unwrap_or_else(|error| panic!("{what}: {error}"));
    assert!(report.worst() < Some(Severity::Corrupt), "{what}: {:#?}", report.findings);
}

fn below(disk_type: DiskType, sector: u64) -> u8 {
    if disk_type == DiskType::Differencing { parent_tag(sector) } else { 0 }
}

/// Grows a disk of `size_bytes`, writes in the new range, and checks the contents before and after
/// reopening.
fn grows(disk_type: DiskType, size_bytes: u64, new_bytes: u64) {
    let what = format!("{disk_type} from {size_bytes} to {new_bytes}");
    let store = Driver::create(&options(disk_type, size_bytes, MIB as u32));
    let driver = Driver::open(&store, true);
    driver.write(3, 2, 7).unwrap();
    driver.writer().flush().unwrap();
    driver.write(2048 + 5, 1, 8).unwrap();
    driver.writer().resize(new_bytes).unwrap();
    assert_eq!(driver.image.size_bytes(), new_bytes, "{what}");
    let (first_new, last) = (size_bytes / SECTOR, new_bytes / SECTOR - 1);
    for sector in [first_new, last] {
        // The rest of an existing block reads as zeros and hides the parent.
        let tag = if sector / 2048 == (first_new - 1) / 2048 && disk_type != DiskType::Differencing {
            0
        } else {
            below(disk_type, sector)
        };
        assert_eq!(driver.read(sector), tag, "{what}");
    }
    driver.write(last, 1, 9).unwrap();
    driver.write(2048 + 6, 1, 10).unwrap();
    let verify = |driver: &Driver| {
        for (sector, tag) in
            [(3, 7), (4, 7), (2048 + 5, 8), (2048 + 6, 10), (last, 9), (2048 + 7, below(disk_type, 2055))]
        {
            assert_eq!(driver.read(sector), tag, "{what}: sector {sector}");
        }
    };
    verify(&driver);
    driver.writer().close().unwrap();
    assert_sound(&store, &what);
    let reader = Driver::open(&store, false);
    assert_eq!(reader.image.info().size_bytes, new_bytes, "{what}");
    verify(&reader);
}

#[test]
fn every_type_grows_within_its_table_and_beyond_it() {
    for disk_type in TYPES {
        grows(disk_type, 4 * MIB, 9 * MIB);
        grows(disk_type, 5 * MIB - 4096, 5 * MIB);
        grows(disk_type, 5 * MIB - 4096, 5000 * MIB + 512);
        grows(disk_type, FULL_REGION_BYTES, 2 * FULL_REGION_BYTES);
    }
}

#[test]
fn a_disk_grows_twice_in_one_session() {
    let store = Driver::create(&options(DiskType::Dynamic, FULL_REGION_BYTES, MIB as u32));
    let driver = Driver::open(&store, true);
    for (step, size_bytes) in [2, 4].into_iter().map(|factor| factor * FULL_REGION_BYTES).enumerate() {
        driver.write(9, 1, 3 + step as u8).unwrap();
        driver.writer().resize(size_bytes).unwrap();
        driver.write(size_bytes / SECTOR - 1, 1, 5 + step as u8).unwrap();
    }
    driver.writer().close().unwrap();
    assert_sound(&store, "after two growths");
    let reader = Driver::open(&store, false);
    for (sector, tag) in [(9, 4), (2 * FULL_REGION_BYTES / SECTOR - 1, 5), (4 * FULL_REGION_BYTES / SECTOR - 1, 6)] {
        assert_eq!(reader.read(sector), tag);
    }
}

#[test]
fn an_invalid_size_is_refused_and_changes_nothing() {
    let store = Driver::create(&options(DiskType::Dynamic, 4 * MIB, MIB as u32));
    let before = store.contents();
    let driver = Driver::open(&store, true);
    for (size_bytes, told) in
        [(3 * MIB, "at least the present one"), (65 << 40, "up to 64 TiB"), (5 * MIB + 1, "a multiple of 512")]
    {
        let error = driver.writer().resize(size_bytes).unwrap_err().to_string();
        assert!(error.contains(told), "{error}");
    }
    driver.writer().resize(4 * MIB).unwrap();
    driver.writer().close().unwrap();
    assert!(store.contents() == before);
}

/// A program that shrinks a disk may leave entries of removed blocks, and data beyond the end of
/// the disk in its last block. None of it may be visible when the disk grows again.
#[test]
fn stale_data_beyond_the_old_end_is_not_visible() {
    for disk_type in [DiskType::Dynamic, DiskType::Differencing] {
        let store = Driver::create(&options(disk_type, 8 * MIB, MIB as u32));
        let driver = Driver::open(&store, true);
        (0..8).for_each(|block| driver.write(block * 2048, 2048, 60 + block as u8).unwrap());
        driver.writer().close().unwrap();
        // 2.5 MiB of 8.
        let mut size = 8 * MIB;
        let place = (2 * MIB..3 * MIB)
            .step_by(8)
            .find(|&at| {
                let mut bytes = [0; 8];
                store.read_at(&mut bytes, at).unwrap();
                u64::from_le_bytes(bytes) == size
            })
            .unwrap();
        size = 5 * MIB / 2;
        store.write_at(&size.to_le_bytes(), place).unwrap();
        let driver = Driver::open(&store, true);
        driver.writer().resize(6 * MIB).unwrap();
        assert_eq!(driver.read(2 * 2048), 62);
        assert_eq!(driver.read(2 * 2048 + 1024), 0, "{disk_type}: beyond the old end");
        assert_eq!(driver.read(4 * 2048), below(disk_type, 4 * 2048), "{disk_type}: a freed block");
        driver.writer().close().unwrap();
        assert_eq!(Driver::open(&store, false).read(5 * 2048), below(disk_type, 5 * 2048));
        assert_sound(&store, "grown again");
    }
}

#[test]
fn a_failed_growth_leaves_the_disk_unchanged() {
    let store = Driver::create(&options(DiskType::Dynamic, FULL_REGION_BYTES, MIB as u32));
    let driver = Driver::open(&store, true);
    driver.write(0, 1, 4).unwrap();
    store.with(|power| power.full_at_bytes = Some(power.volatile.len_bytes));
    // The slack of the last growth is used up.
    for block in 1.. {
        if driver.write(block * 2048, 1, 4).is_err() {
            break;
        }
    }
    let error = driver.writer().resize(4 * FULL_REGION_BYTES).unwrap_err();
    assert_eq!(io::Error::from(error).kind(), io::ErrorKind::StorageFull);
    assert_eq!(driver.image.size_bytes(), FULL_REGION_BYTES);
    store.with(|power| power.full_at_bytes = None);
    driver.writer().resize(2 * FULL_REGION_BYTES).unwrap();
    driver.write(FULL_REGION_BYTES / SECTOR, 1, 5).unwrap();
    driver.writer().close().unwrap();
    let reader = Driver::open(&store, false);
    assert_eq!((reader.read(0), reader.read(FULL_REGION_BYTES / SECTOR)), (4, 5));
    assert_sound(&store, "after the second attempt");
}

/// Cuts the power at every sync of a growth and tears unsynced writes. Returns the number of syncs.
fn cut_at_every_sync(disk_type: DiskType, size_bytes: u64, new_bytes: u64, idle_sync: Option<u64>) -> u64 {
    let store = Driver::create(&options(disk_type, size_bytes, MIB as u32));
    let driver = Driver::open(&store, true);
    driver.write(1, 1, 1).unwrap();
    driver.write(2048, 2048, 2).unwrap();
    driver.writer().close().unwrap();
    let driver = Driver::open(&store, true);
    // Durable in the log, but not in place.
    driver.write(2 * 2048, 2048, 3).unwrap();
    driver.writer().flush().unwrap();
    // In memory only: may be visible or not after a power cut.
    driver.write(3 * 2048, 2048, 4).unwrap();
    let mut numbers = Numbers(11);
    store.set_hook(move |power| {
        for (name, left) in crash::cuts(power, &mut numbers) {
            let what = format!("{disk_type} to {new_bytes}: sync {}, {name} kept", power.syncs);
            let store = TestStore::new(left);
            assert_sound(&store, &what);
            let reader = Driver::open(&store, false);
            let found_bytes = reader.image.info().size_bytes;
            assert!(found_bytes == size_bytes || found_bytes == new_bytes, "{what}: {found_bytes} bytes");
            for (sector, tag) in [(1, 1), (2, below(disk_type, 2)), (2048, 2), (2 * 2048 + 7, 3)] {
                assert_eq!(reader.read(sector), tag, "{what}: sector {sector}");
            }
            let (shown, unwritten) = (reader.read(3 * 2048), below(disk_type, 3 * 2048));
            assert!(shown == 4 || shown == unwritten, "{what}: {shown}");
            if found_bytes == new_bytes {
                for sector in [size_bytes / SECTOR, new_bytes / SECTOR - 1] {
                    assert!([0, below(disk_type, sector)].contains(&reader.read(sector)), "{what}: sector {sector}");
                }
            }
            // Replay on disk, then write and grow once more.
            let driver = Driver::open(&store, true);
            driver.write(4, 1, 5).unwrap();
            driver.writer().resize(new_bytes + MIB).unwrap();
            driver.writer().close().unwrap();
            let reader = Driver::open(&store, false);
            assert_eq!((reader.read(4), reader.read(2048), reader.read(3 * 2048)), (5, 2, shown), "{what}");
            assert_sound(&store, &what);
        }
    });
    let before = store.with(|power| power.syncs);
    store.with(|power| power.idle_sync = idle_sync.map(|number| before + number));
    driver.writer().resize(new_bytes).unwrap();
    let syncs = store.with(|power| power.syncs) - before;
    driver.writer().flush().unwrap();
    driver.writer().close().unwrap();
    syncs
}

#[test]
fn a_growth_survives_power_cuts() {
    for disk_type in TYPES {
        cut_at_every_sync(disk_type, 6 * MIB - 512, 40 * MIB, None);
    }
    cut_at_every_sync(DiskType::Dynamic, FULL_REGION_BYTES, 2 * FULL_REGION_BYTES, None);
    cut_at_every_sync(DiskType::Differencing, FULL_REGION_BYTES, FULL_REGION_BYTES + 128 * MIB, None);
}

/// A growth that moves the table has five syncs if the log is in use already: new entries, log
/// entry, region table, its copy, size. A power cut detects the lack of either of the first two.
/// (The others keep one region table valid for programs that do not read the log.)
#[test]
fn breaking_a_sync_of_a_growth_is_detected() {
    let (old_bytes, new_bytes) = (FULL_REGION_BYTES, 2 * FULL_REGION_BYTES);
    assert_eq!(cut_at_every_sync(DiskType::Dynamic, old_bytes, new_bytes, None), 5);
    for (number, what) in [(1, "the copy of the table"), (2, "the log entry")] {
        let run = || cut_at_every_sync(DiskType::Dynamic, old_bytes, new_bytes, Some(number));
        assert!(catch_unwind(AssertUnwindSafe(run)).is_err(), "{what} is not durable, and no power cut detects it");
    }
}
