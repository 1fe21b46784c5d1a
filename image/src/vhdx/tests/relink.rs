//! Changes of the link to the parent: what they change in the file, refusals, and power cuts at
//! every step. (`image/src/parent_links.rs` has the tests that VHD shares.)

use super::*;
use crate::{ImageError, Severity, vhdx};
use diskwright_format::vhdx::{MetadataEntry, MetadataTable, metadata};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Offset of the metadata region in our files.
const REGION_BYTES: u64 = 2 * MIB;

fn link(path: &str, id: u128) -> ParentLink {
    ParentLink { relative_path: Some(path.into()), linkage: Some(Uuid::from_u128(id).into()), ..ParentLink::default() }
}

/// Three links of different lengths: the second one needs several pages.
fn links() -> [ParentLink; 3] {
    let long = ParentLink {
        absolute_path: Some(format!(r"\disks\{}parent.vhdx", r"folder\".repeat(900))),
        volume_path: Some(r"\\?\Volume{26a21bda-a627-11d7-9931-806e6f6e6963}\parent.vhdx".into()),
        linkage2: Some(Uuid::from_u128(0x77).into()),
        ..link(r"..\base.vhdx", 0x5678)
    };
    [options(DiskType::Differencing, MIB, MIB as u32).parent.unwrap(), long, link(r".\third.vhdx", 0x9abc)]
}

fn assert_sound(store: &Arc<TestStore>, what: &str) {
    let report = vhdx::check(Arc::clone(store) as Arc<dyn Store>).unwrap_or_else(|error| panic!("{what}: {error}"));
    assert!(report.worst() < Some(Severity::Corrupt), "{what}: {:#?}", report.findings);
}

/// The link as a program reads it that ignores the log.
fn link_without_log(store: &TestStore) -> Option<ParentLink> {
    vhdx::parent_link(store).unwrap_or_else(|error| panic!("without the log: {error}"))
}

fn metadata_table(store: &TestStore) -> MetadataTable {
    let mut bytes = vec![0; metadata::METADATA_TABLE_BYTES];
    store.read_at(&mut bytes, REGION_BYTES).unwrap();
    MetadataTable::parse(&bytes, MIB as u32).unwrap()
}

#[test]
fn a_new_link_changes_neither_data_nor_identity_nor_length() {
    let store = Driver::create(&options(DiskType::Differencing, 8 * MIB, MIB as u32));
    let driver = Driver::open(&store, true);
    driver.write(3, 2, 7).unwrap();
    driver.writer().close().unwrap();
    let before = Driver::open(&store, false);
    let (info, len_bytes) = (before.image.info().clone(), store.len_bytes().unwrap());
    for round in 0..3 {
        for new in links().iter().cycle().skip(1).take(4) {
            let driver = Driver::open(&store, true);
            driver.writer().set_parent_link(new).unwrap();
            assert_eq!(driver.image.parent_link().as_ref(), Some(new));
            assert_eq!(link_without_log(&store).as_ref(), Some(new), "in place on return");
            assert_eq!(driver.image.linkage_id(), info.linkage_id);
            driver.writer().close().unwrap();
            let reader = Driver::open(&store, false);
            assert_eq!(reader.image.info().parent.as_ref(), Some(new));
            assert_eq!(reader.image.info().linkage_id, info.linkage_id, "the DataWriteGuid");
            assert_ne!(reader.image.info().file_write_id, info.file_write_id, "the FileWriteGuid");
            assert_eq!((reader.read(3), reader.read(5)), (7, parent_tag(5)));
            assert_eq!(store.len_bytes().unwrap(), len_bytes, "round {round}");
            assert_sound(&store, "after a new link");
        }
    }
}

/// MS-VHDX 2.2.2.1: the FileWriteGuid changes before anything else in the file does.
#[test]
fn a_new_file_write_guid_comes_first() {
    let store = Driver::create(&options(DiskType::Differencing, 8 * MIB, MIB as u32));
    let driver = Driver::open(&store, true);
    let before = store.with(|power| power.syncs);
    store.set_hook(move |power| {
        let is_header =
            |op: &Op| matches!(op, Op::Write(offset_bytes, _) if [64 << 10, 128 << 10].contains(offset_bytes));
        assert!(power.syncs > before + 1 || power.pending.iter().all(is_header), "sync {}", power.syncs - before);
    });
    driver.writer().set_parent_link(&links()[1]).unwrap();
    assert!(store.with(|power| power.syncs) > before + 2);
}

#[test]
fn a_link_that_cannot_be_stored_is_refused_and_changes_nothing() {
    let store = Driver::create(&options(DiskType::Differencing, 8 * MIB, MIB as u32));
    // An item of a user that leaves 60 KiB.
    let mut table = metadata_table(&store);
    let (is_user, is_virtual_disk, is_required) = (true, false, false);
    let id = Uuid::from_u128(1);
    let (offset_bytes, len_bytes) = (128 << 10, (MIB - (128 << 10)) as u32);
    table.entries.push(MetadataEntry { id, offset_bytes, len_bytes, is_user, is_virtual_disk, is_required });
    store.write_at(&table.to_bytes(), REGION_BYTES).unwrap();
    let before = store.contents();
    let driver = Driver::open(&store, true);
    for (new, told) in [
        (link("", 1), "must say where its parent is"),
        (link("a\0b", 1), "NUL character"),
        (link(&"x".repeat(33_000), 1), "a string of 66000 bytes"),
        (link(&"x".repeat(31_000), 1), "do not fit into the free part"),
    ] {
        let error = driver.writer().set_parent_link(&new).unwrap_err();
        assert!(matches!(error, ImageError::BadParentLink { .. }), "{error:?}");
        assert!(error.to_string().starts_with("test.vhdx: cannot change the link to the parent: "), "{error}");
        assert!(error.to_string().contains(told), "{error}");
    }
    driver.writer().close().unwrap();
    assert!(store.contents() == before);
    let driver = Driver::open(&store, true);
    driver.writer().set_parent_link(&link(&"x".repeat(29_000), 2)).unwrap();
    driver.writer().close().unwrap();
    assert_eq!(metadata_table(&store).entries.last().map(|entry| entry.id), Some(id));
    assert_eq!(Driver::open(&store, false).image.info().parent, Some(link(&"x".repeat(29_000), 2)));

    let driver = Driver::open(&Driver::create(&options(DiskType::Dynamic, 8 * MIB, MIB as u32)), true);
    let error = driver.writer().set_parent_link(&links()[1]).unwrap_err().to_string();
    assert!(error.contains("the disk has no parent"), "{error}");
}

#[test]
fn after_a_failed_write_the_old_link_counts_and_the_call_can_be_repeated() {
    let store = Driver::create(&options(DiskType::Differencing, 8 * MIB, MIB as u32));
    let [old, new, _] = links();
    let driver = Driver::open(&store, true);
    driver.write(3, 2, 7).unwrap();
    store.with(|power| power.fail_writes = true);
    assert!(matches!(driver.writer().set_parent_link(&new), Err(ImageError::Io { .. })));
    assert_eq!(driver.image.parent_link(), Some(old));
    store.with(|power| power.fail_writes = false);
    driver.writer().set_parent_link(&new).unwrap();
    driver.writer().close().unwrap();
    let reader = Driver::open(&store, false);
    assert_eq!((reader.image.info().parent.clone(), reader.read(3)), (Some(new), 7));
}

/// A disk with a damaged block gets a new link too: its parent may have moved.
#[test]
fn a_disk_with_a_damaged_block_can_be_linked() {
    let store = Driver::create(&options(DiskType::Differencing, 8 * MIB, MIB as u32));
    store.write_at(&(6u64 | 500 << 20).to_le_bytes(), 3 * MIB + 8 * 5).unwrap();
    let driver = Driver::open(&store, true);
    driver.writer().set_parent_link(&links()[1]).unwrap();
    driver.writer().close().unwrap();
    let reader = Driver::open(&store, false);
    assert_eq!(reader.image.info().parent.as_ref(), Some(&links()[1]));
    assert_eq!((reader.state(5), reader.state(4)), (BlockState::Damaged, BlockState::Absent));
}

/// Cuts the power at every sync of a change from `old` to `new` and tears unsynced writes. With
/// `in_session`, data and an earlier link were written in the same session. `idle_sync` is the
/// number of a sync of the change, from 1, that does nothing. Returns the number of syncs.
fn cut_at_every_sync(old: usize, new: usize, in_session: bool, idle_sync: Option<u64>) -> u64 {
    let store = Driver::create(&options(DiskType::Differencing, 8 * MIB, MIB as u32));
    let driver = Driver::open(&store, true);
    driver.write(1, 1, 1).unwrap();
    driver.write(2048, 2048, 2).unwrap();
    if !in_session {
        driver.writer().set_parent_link(&links()[old]).unwrap();
    }
    driver.writer().close().unwrap();
    let driver = Driver::open(&store, true);
    if in_session {
        driver.writer().set_parent_link(&links()[old]).unwrap();
        // Durable in the log, but not in place.
        driver.write(2 * 2048, 2048, 3).unwrap();
        driver.writer().flush().unwrap();
        // In memory only: may be visible or not after a power cut.
        driver.write(3 * 2048, 2048, 4).unwrap();
    }
    let flushed = if in_session { 3 } else { parent_tag(2 * 2048 + 7) };
    let mut numbers = Numbers(11);
    let before = store.with(|power| power.syncs);
    store.set_hook(move |power| {
        let mut cuts = crash::cuts(power, &mut numbers);
        for _ in 0..12 {
            let salt = numbers.next();
            let mut keep = |number| Numbers(salt ^ (number as u64 + 1) << 32).below(2) == 0;
            cuts.push(("other whole writes", power.cut(&mut keep)));
        }
        for (name, left) in cuts {
            let what = format!("{old} to {new}: sync {}, {name} kept", power.syncs - before);
            let store = TestStore::new(left);
            assert_sound(&store, &what);
            let reader = Driver::open(&store, false);
            let allowed = [Some(links()[old].clone()), Some(links()[new].clone())];
            assert!(allowed.contains(&reader.image.info().parent), "{what}: {:?}", reader.image.info().parent);
            assert!(allowed.contains(&link_without_log(&store)), "{what}, without the log");
            let verify = |reader: &Driver| {
                for (sector, tag) in [(1, 1), (2, parent_tag(2)), (2048, 2), (2 * 2048 + 7, flushed)] {
                    assert_eq!(reader.read(sector), tag, "{what}: sector {sector}");
                }
            };
            verify(&reader);
            // Replay on disk, then another link.
            let driver = Driver::open(&store, true);
            driver.writer().set_parent_link(&links()[0]).unwrap();
            driver.write(4, 1, 5).unwrap();
            driver.writer().close().unwrap();
            let reader = Driver::open(&store, false);
            verify(&reader);
            assert_eq!((reader.read(4), reader.image.info().parent.as_ref()), (5, Some(&links()[0])), "{what}");
            assert_sound(&store, &what);
        }
    });
    store.with(|power| power.idle_sync = idle_sync.map(|number| before + number));
    driver.writer().set_parent_link(&links()[new]).unwrap();
    let syncs = store.with(|power| power.syncs) - before;
    let left = TestStore::new(store.with(|power| power.cut(&mut |_| false)));
    assert_eq!(Driver::open(&left, false).image.info().parent.as_ref(), Some(&links()[new]), "durable on return");
    driver.writer().flush().unwrap();
    driver.writer().close().unwrap();
    syncs
}

#[test]
fn a_new_link_survives_power_cuts() {
    for (old, new) in [(0, 1), (1, 2), (1, 0), (2, 1)] {
        for in_session in [false, true] {
            cut_at_every_sync(old, new, in_session, None);
        }
    }
}

/// A change of the link has four syncs if the log is in use already: earlier pages in place, log
/// entry, new locator, table. Programs that read no log need the third.
#[test]
fn breaking_a_sync_of_a_new_link_is_detected() {
    assert_eq!(cut_at_every_sync(0, 1, true, None), 4);
    for (number, what) in [(1, "earlier pages"), (3, "the new locator")] {
        let run = || cut_at_every_sync(0, 1, true, Some(number));
        assert!(catch_unwind(AssertUnwindSafe(run)).is_err(), "{what} are not durable, and no power cut detects it");
    }
}

/// Cuts the power while a session begins with a chosen identity.
#[test]
fn a_chosen_identity_survives_power_cuts() {
    let store = Driver::create(&options(DiskType::Dynamic, 8 * MIB, MIB as u32));
    let driver = Driver::open(&store, true);
    driver.write(1, 1, 1).unwrap();
    driver.writer().close().unwrap();
    let old = Driver::open(&store, false).image.linkage_id();
    let chosen = crate::LinkageId::from(Uuid::from_u128(0xc405e));
    let driver = Driver::open(&store, true);
    let mut numbers = Numbers(3);
    store.set_hook(move |power| {
        for (name, left) in crash::cuts(power, &mut numbers) {
            let reader = Driver::open(&TestStore::new(left), false);
            let found = reader.image.linkage_id();
            assert!(found == old || found == Some(chosen), "sync {}, {name} kept: {found:?}", power.syncs);
            assert_eq!(reader.read(1), 1);
        }
    });
    driver.writer().begin_writing_as(chosen).unwrap();
    let left = store.with(|power| power.cut(&mut |_| false));
    assert_eq!(Driver::open(&TestStore::new(left), false).image.linkage_id(), Some(chosen), "durable on return");
    let syncs = store.with(|power| power.syncs);
    driver.writer().begin_writing().unwrap();
    driver.writer().begin_writing_as(chosen).unwrap();
    assert_eq!(store.with(|power| power.syncs), syncs, "neither changes anything");
    driver.write(2, 1, 2).unwrap();
    assert_eq!(driver.image.linkage_id(), Some(chosen));
    driver.writer().close().unwrap();
    let reader = Driver::open(&store, false);
    assert_eq!((reader.image.info().linkage_id, reader.read(2)), (Some(chosen), 2));
}
