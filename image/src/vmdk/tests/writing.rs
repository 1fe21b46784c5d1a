//! Writes: what a second session, a second copy of the tables and other programs find.

use super::{contents, opened, store};
use crate::{BlockState, Commit, CreateOptions, DiskType, Format, Image, LinkageId, ParentLink, Severity};
use diskwright_format::vmdk::{Descriptor, SECTOR_BYTES, edit};
use diskwright_store::{FileStore, MemoryStore, OpenOptions, Store};
use std::{path::Path, process::Command, sync::Arc};

const GRAIN: u64 = 64 << 10;

pub(super) fn options(subformat: &str, size_bytes: u64) -> CreateOptions {
    CreateOptions {
        disk_type: if subformat.ends_with("Flat") { DiskType::Fixed } else { DiskType::Dynamic },
        size_bytes,
        block_bytes: None,
        logical_sector_bytes: 512,
        physical_sector_bytes: 512,
        parent: None,
        preallocate: false,
        disk_id: None,
        own: crate::FormatOptions { subformat: Some(subformat.into()), file_name: "d.vmdk".into(), device: None },
    }
}

pub(super) fn made(options: &CreateOptions) -> Vec<Arc<dyn Store>> {
    let further = Format::Vmdk.driver().further_files(options).unwrap();
    let names = std::iter::once("d.vmdk".to_owned()).chain(further);
    let stores: Vec<Arc<dyn Store>> = names.map(|name| Arc::new(MemoryStore::new(&name)) as Arc<dyn Store>).collect();
    Format::Vmdk.driver().create_files(stores.clone(), options).unwrap();
    stores
}

/// Like [`made`], in files of a folder, which have holes.
pub(super) fn made_in(dir: &Path, options: &CreateOptions) -> Vec<Arc<dyn Store>> {
    let further = Format::Vmdk.driver().further_files(options).unwrap();
    let new = OpenOptions { writable: true, create_new: true, ..OpenOptions::default() };
    let names = std::iter::once("d.vmdk".to_owned()).chain(further);
    let stores: Vec<Arc<dyn Store>> =
        names.map(|name| Arc::new(FileStore::open(dir.join(name), &new).unwrap()) as Arc<dyn Store>).collect();
    Format::Vmdk.driver().create_files(stores.clone(), options).unwrap();
    stores
}

pub(super) fn open(stores: &[Arc<dyn Store>], writable: bool) -> Arc<dyn Image> {
    Format::Vmdk.driver().open_files(stores.to_vec(), writable, 512).unwrap()
}

/// Writes a block of one byte, without a flush.
pub(super) fn put(image: &dyn Image, block: u64, byte: u8) {
    let writer = image.writer().unwrap();
    let at = writer.reserve_waiting(block).unwrap();
    let len = image.info().block_bytes.min(image.size_bytes() - block * image.info().block_bytes) as usize;
    image.stores()[usize::from(at.store)].write_at(&vec![byte; len], at.offset_bytes).unwrap();
    writer.commit_waiting(block, Commit::Whole).unwrap();
}

pub(super) fn state(image: &dyn Image, block: u64) -> BlockState {
    let mut state = [BlockState::Absent];
    image.block_states(block, &mut state).unwrap();
    state[0]
}

pub(super) fn check(stores: &[Arc<dyn Store>]) -> Vec<String> {
    let stores: Vec<_> = stores.iter().cloned().map(Some).collect();
    let report = super::examine(&stores, false).unwrap().report;
    report.findings.into_iter().map(|finding| finding.message).collect()
}

pub(super) fn text_of(store: &dyn Store, offset_bytes: u64) -> Vec<u8> {
    let len = (store.len_bytes().unwrap() - offset_bytes).min(20 * SECTOR_BYTES) as usize;
    let mut text = vec![0; len];
    store.read_at(&mut text, offset_bytes).unwrap();
    text
}

#[test]
fn every_kind_that_is_created_keeps_what_is_written() {
    for (subformat, files) in [
        ("monolithicSparse", 1),
        ("monolithicFlat", 2),
        ("twoGbMaxExtentSparse", 3),
        ("twoGbMaxExtentFlat", 3),
        ("vmfsSparse", 2),
    ] {
        let stores = made(&options(subformat, (3 << 30) + 512));
        assert_eq!(stores.len(), files, "{subformat}");
        let image = open(&stores, true);
        assert_eq!(image.info().subformat.as_deref(), Some(subformat));
        let per_gib = (1 << 30) / image.info().block_bytes;
        let last = (image.size_bytes() - 1) / image.info().block_bytes;
        let blocks = [0, 1, per_gib + 5, 2 * per_gib, last];
        for (byte, &block) in (1..).zip(&blocks) {
            put(&*image, block, byte);
        }
        image.writer().unwrap().flush().unwrap();
        image.writer().unwrap().close().unwrap();
        let image = open(&stores, false);
        assert!(image.info().remarks.is_empty(), "{:?}", image.info().remarks);
        for (byte, &block) in (1..).zip(&blocks) {
            let BlockState::Data { store, offset_bytes } = state(&*image, block) else {
                panic!("{subformat}: block {block} is {:?}", state(&*image, block));
            };
            let mut bytes = [0; 512];
            image.stores()[usize::from(store)].read_at(&mut bytes, offset_bytes).unwrap();
            assert_eq!(bytes, [byte; 512], "{subformat}, block {block}");
        }
        assert_eq!(check(&stores), [""; 0], "{subformat}");
    }
}

#[test]
fn the_identity_changes_before_the_first_write_and_only_then() {
    let stores = made(&options("monolithicSparse", 4 << 20));
    let before = open(&stores, false).linkage_id().unwrap();
    let text = text_of(&*stores[0], SECTOR_BYTES);
    let end = text.iter().position(|&byte| byte == 0).unwrap() as u64;
    stores[0].write_at(b"changeTrackPath=\"d-ctk.vmdk\"\n", SECTOR_BYTES + end).unwrap();
    open(&stores, true).writer().unwrap().close().unwrap();
    assert_eq!(open(&stores, false).linkage_id(), Some(before));
    let image = open(&stores, true);
    image.writer().unwrap().begin_writing().unwrap();
    let after = image.linkage_id().unwrap();
    assert_ne!(after, before);
    image.writer().unwrap().begin_writing().unwrap();
    assert_eq!(open(&stores, false).linkage_id(), Some(after));
    assert_eq!(image.linkage_id(), Some(after));
    let text = text_of(&*stores[0], SECTOR_BYTES);
    let parsed = Descriptor::parse(&text, 0).unwrap();
    assert_eq!(parsed.get("changeTrackPath"), None);
    assert_eq!(parsed.get("ddb.longContentID").unwrap()[24..], format!("{:08x}", parsed.cid));
    image.writer().unwrap().set_linkage_id(LinkageId::Cid(0x1234)).unwrap();
    assert_eq!(open(&stores, false).linkage_id(), Some(LinkageId::Cid(0x1234)));
}

/// qemu-img writes a CID without leading zeros.
#[test]
fn a_short_identity_keeps_its_length_unless_one_is_chosen() {
    let stores = made(&options("monolithicFlat", 4 << 20));
    let text = text_of(&*stores[0], 0);
    let cid = edit::value(&text, "CID").unwrap().to_owned();
    let short = String::from_utf8(text).unwrap().replacen(&format!("CID={cid}"), "CID=abc1234", 1);
    stores[0].set_len(0).unwrap();
    stores[0].write_at(short.as_bytes(), 0).unwrap();
    let image = open(&stores, true);
    image.writer().unwrap().begin_writing().unwrap();
    let text = text_of(&*stores[0], 0);
    assert_eq!(text.len(), short.len());
    assert_ne!(edit::value(&text, "CID"), Some("abc1234"));
    image.writer().unwrap().set_linkage_id(LinkageId::Cid(0xdead_beef)).unwrap();
    let parsed = Descriptor::parse(&text_of(&*stores[0], 0), 0).unwrap();
    assert_eq!((parsed.cid, parsed.extents.len()), (0xdead_beef, 1));
    assert_eq!(text_of(&*stores[0], 0).len(), 512, "the sector with the CID is written at once");
}

#[test]
fn an_extent_is_marked_until_it_is_closed() {
    let stores = made(&options("monolithicSparse", 4 << 20));
    let is_unclean = || {
        let mut header = [0; 512];
        stores[0].read_at(&mut header, 0).unwrap();
        header[72] != 0
    };
    let image = open(&stores, true);
    assert!(!is_unclean());
    put(&*image, 3, 7);
    assert!(is_unclean());
    image.writer().unwrap().flush().unwrap();
    assert_eq!(check(&stores).len(), 0);
    assert!(open(&stores, false).info().remarks[0].contains("did not close it"));
    image.writer().unwrap().close().unwrap();
    assert!(!is_unclean());
    assert_eq!(stores[0].len_bytes().unwrap(), 2 * GRAIN, "the file ends after its only grain");
}

/// A power cut in a flush may leave an entry in the second copy alone. Its grain looks free, so the
/// copies must be equal before it is used for another block.
#[test]
fn the_copies_are_equal_before_free_space_is_used() {
    let stores = made(&options("monolithicSparse", 4 << 20));
    let image = open(&stores, true);
    (0..3).for_each(|block| put(&*image, block, 1));
    image.writer().unwrap().close().unwrap();
    drop(image);
    // The first table follows the second one's directory: header, 20 sectors, then 1 and 4.
    let first_table = (1 + 20 + 5 + 1) * SECTOR_BYTES;
    stores[0].write_at(&[0; 4], first_table + 4).unwrap();
    let found = check(&stores);
    assert!(found.iter().any(|message| message.contains("named only by the redundant tables")), "{found:?}");
    let image = open(&stores, true);
    put(&*image, 40, 9);
    assert_eq!(state(&*image, 40), BlockState::data(2 * GRAIN), "the hole is used");
    assert_eq!(state(&*image, 1), BlockState::Absent);
    // The entry of block 40 is not written yet, and the second copy lost that of block 1.
    assert_eq!(check(&stores), [""; 0]);
    image.writer().unwrap().close().unwrap();
    assert_eq!(check(&stores), [""; 0]);
}

#[test]
fn freed_space_is_reused_only_after_it_was_recycled_and_reads_as_zeros() {
    let stores = made(&options("monolithicSparse", 4 << 20));
    let image = open(&stores, true);
    let writer = image.writer().unwrap();
    put(&*image, 0, 5);
    put(&*image, 1, 6);
    writer.flush().unwrap();
    let BlockState::Data { offset_bytes: freed, .. } = state(&*image, 0) else { panic!("no data") };
    assert_eq!(writer.commit_waiting(0, Commit::Discard).unwrap(), BlockState::Absent);
    let generation = writer.freed_generation();
    assert_ne!(writer.reserve_waiting(9).unwrap().offset_bytes, freed);
    writer.flush().unwrap();
    writer.recycle(generation);
    let again = writer.reserve_waiting(10).unwrap().offset_bytes;
    assert_eq!(again, freed);
    let mut bytes = vec![1; GRAIN as usize];
    stores[0].read_at(&mut bytes, again).unwrap();
    assert!(bytes.iter().all(|&byte| byte == 0));
    writer.close().unwrap();
    assert_eq!(stores[0].len_bytes().unwrap(), 3 * GRAIN);
}

/// Not every program makes the tables at once.
#[test]
fn a_missing_table_is_made_in_both_directories() {
    let stores = made(&options("monolithicSparse", 64 << 20));
    // Directories of two entries: the second table is missing.
    for directory in [21, 21 + 1 + 8] {
        stores[0].write_at(&[0; 4], directory * SECTOR_BYTES + 4).unwrap();
    }
    let image = open(&stores, true);
    put(&*image, 1, 1);
    put(&*image, 600, 2);
    put(&*image, 601, 3);
    assert_eq!(check(&stores), [""; 0]);
    image.writer().unwrap().close().unwrap();
    drop(image);
    let image = open(&stores, false);
    let all = contents(&*image);
    for (block, byte) in [(0, 0), (1, 1), (599, 0), (600, 2), (601, 3), (602, 0)] {
        assert!(all[block * GRAIN as usize..][..GRAIN as usize].iter().all(|&found| found == byte), "{block}");
    }
    assert_eq!(check(&stores), [""; 0]);
    let mut entries = [[0; 4]; 2];
    for (entry, directory) in entries.iter_mut().zip([21, 21 + 1 + 8]) {
        stores[0].read_at(entry, directory * SECTOR_BYTES + 4).unwrap();
    }
    assert!(entries[0] != [0; 4] && entries[1] != [0; 4] && entries[0] != entries[1], "{entries:?}");
}

#[test]
fn tables_stay_within_the_limit() {
    let stores = made(&options("monolithicSparse", 8 << 30));
    let image = super::super::image::open(stores, true).unwrap();
    image.writer().unwrap().limit_tables(0);
    for table in 0..250 {
        image.writer().unwrap().prepare(table * 512..table * 512 + 1).unwrap();
        assert!(image.tables_in_memory() <= 64, "{}", image.tables_in_memory());
    }
    put(&image, 7, 1);
    assert_ne!(state(&image, 7), BlockState::Absent);
}

#[test]
fn a_child_keeps_its_parent_and_refuses_blocks_of_zeros() {
    let link = ParentLink {
        relative_path: Some(r".\base.vmdk".into()),
        linkage: Some(LinkageId::Cid(0xabcd_ef01)),
        ..ParentLink::default()
    };
    let child =
        CreateOptions { disk_type: DiskType::Differencing, parent: Some(link), ..options("monolithicSparse", 4 << 20) };
    let stores = made(&child);
    let image = open(&stores, true);
    let parent = image.info().parent.clone().unwrap();
    assert_eq!(
        (parent.relative_path.as_deref(), parent.linkage),
        (Some("base.vmdk"), Some(LinkageId::Cid(0xabcd_ef01)))
    );
    let writer = image.writer().unwrap();
    assert!(!writer.tracks_sectors() && !writer.can_store_zero());
    put(&*image, 2, 1);
    let error = writer.commit_waiting(2, Commit::Zero).unwrap_err().to_string();
    assert!(error.contains("write zeros over the range"), "{error}");
    assert_eq!(writer.commit_waiting(2, Commit::Absent).unwrap(), BlockState::Absent);
    writer.close().unwrap();
    let parsed = Descriptor::parse(&text_of(&*stores[0], SECTOR_BYTES), 0).unwrap();
    assert_eq!((parsed.parent_cid, parsed.parent_hint()), (0xabcd_ef01, Some("base.vmdk")));
}

#[test]
fn options_that_do_not_fit_are_refused_by_name() {
    let refused = |options: CreateOptions, what: &str| {
        let error = Format::Vmdk.driver().further_files(&options).unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
    };
    let sparse = || options("monolithicSparse", 4 << 20);
    refused(options("streamOptimised", 4 << 20), "\"streamOptimised\" cannot be created");
    refused(CreateOptions { disk_type: DiskType::Fixed, ..sparse() }, "a fixed VMDK of the kind monolithicSparse");
    refused(CreateOptions { preallocate: true, ..sparse() }, "monolithicFlat");
    refused(CreateOptions { block_bytes: Some(4096), ..sparse() }, "a grain of 4096 bytes");
    refused(CreateOptions { size_bytes: 2 << 40, ..sparse() }, "tables reach 2 TiB");
    refused(CreateOptions { size_bytes: 1000, ..sparse() }, "multiple of the 512-byte sector");
    refused(options("twoGbMaxExtentFlat", 9 << 40), "extents of 2 GB");
    let mut named = sparse();
    named.own.file_name = "a\"b.vmdk".into();
    refused(named, "cannot be written into a descriptor");
}

#[test]
fn kinds_that_cannot_be_written_are_refused_by_name() {
    let stores = made(&options("monolithicFlat", 4 << 20));
    let text = String::from_utf8(text_of(&*stores[0], 0)).unwrap();
    let refused = |text: String, files: &[Arc<dyn Store>], what: &str| {
        let head: Arc<dyn Store> = Arc::new(MemoryStore::with_bytes("d.vmdk", text.into_bytes()));
        let stores = std::iter::once(head).chain(files.iter().cloned()).collect();
        let error = Format::Vmdk.driver().open_files(stores, true, 512).unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
    };
    refused(text.replace("RW 8192", "RDONLY 8192"), &stores[1..], "an extent that is not writable");
    // Sectors without a file refuse their own writes.
    let with_zeros = text.replace("RW 8192 FLAT", "RW 8 ZERO\nRW 8192 FLAT").into_bytes();
    let head: Arc<dyn Store> = Arc::new(MemoryStore::with_bytes("d.vmdk", with_zeros));
    let image = open(&[head, Arc::clone(&stores[1])], true);
    let writer = image.writer().unwrap();
    let told = writer.reserve(0).unwrap_err().to_string();
    assert!(told.contains("for which the descriptor names no file"), "{told}");
    assert!(writer.reserve(1).unwrap().is_some());
    assert!(image.check_takes(0..1).is_err() && image.check_takes(1..9).is_ok());
    let sparse = made(&options("monolithicSparse", 4 << 20));
    let second_directory = 21 * SECTOR_BYTES;
    sparse[0].write_at(&[0; 4], second_directory).unwrap();
    let error = Format::Vmdk.driver().open_files(sparse, true, 512).unwrap_err().to_string();
    assert!(error.contains("grain directory is damaged"), "{error}");
}

/// A grain on a table could change the mapping of other grains.
#[test]
fn a_grain_on_a_table_is_damage() {
    let stores = made(&options("monolithicSparse", 4 << 20));
    let first_table = 21 + 5 + 1;
    for table in [21 + 1, first_table] {
        stores[0].write_at(&u32::to_le_bytes(first_table as u32), table * SECTOR_BYTES).unwrap();
    }
    let image = open(&stores, true);
    assert_eq!(state(&*image, 0), BlockState::Damaged);
    assert!(image.writer().unwrap().reserve_waiting(0).is_err());
    let error = image.writer().unwrap().reserve_waiting(1).unwrap_err().to_string();
    assert!(error.contains("diskwright check"), "{error}");
}

pub(super) fn qemu(program: &str, args: &[&str], path: &Path) {
    let made = Command::new(program).args(args).arg(path).output().unwrap();
    let said = String::from_utf8_lossy(&made.stderr).into_owned() + &String::from_utf8_lossy(&made.stdout);
    assert!(made.status.success(), "{program} {args:?}: {said}");
}

pub(super) fn opened_for_writing(path: &Path) -> Arc<dyn Image> {
    let store = |path: &Path| -> Arc<dyn Store> {
        Arc::new(FileStore::open(path, &OpenOptions { writable: true, ..OpenOptions::default() }).unwrap())
    };
    let first = store(path);
    let references = Format::Vmdk.driver().references(&*first).unwrap();
    let further = references.iter().map(|reference| store(&path.with_file_name(&reference.name)));
    Format::Vmdk.driver().open_files([first].into_iter().chain(further).collect(), true, 512).unwrap()
}

/// Both programs write to one image in turns, also where the other one made it. Each reads what
/// both wrote.
#[test]
fn qemu_and_this_program_write_in_turns() {
    if Command::new("qemu-io").arg("--version").output().is_err() {
        return println!("skipped: qemu-io is not installed");
    }
    let dir = tempfile::tempdir().unwrap();
    let cases = [
        ("monolithicSparse", ""),
        ("monolithicSparse", ",zeroed_grain=on"),
        ("monolithicFlat", ""),
        ("twoGbMaxExtentSparse", ""),
        ("twoGbMaxExtentFlat", ""),
    ];
    for ((subformat, more), by_qemu) in cases.into_iter().flat_map(|case| [(case, true), (case, false)]) {
        let path = dir.path().join("d.vmdk");
        if by_qemu {
            qemu(
                "qemu-img",
                &["create", "-q", "-f", "vmdk", "-o", &format!("size=3G,subformat={subformat}{more}")],
                &path,
            );
        } else {
            made_in(dir.path(), &options(subformat, 3 << 30));
        }
        let mut expected = std::collections::BTreeMap::new();
        for turn in 0..4_u8 {
            let image = opened_for_writing(&path);
            let per_gib = (1 << 30) / image.info().block_bytes;
            let writer = image.writer().unwrap();
            writer.begin_writing().unwrap();
            if image.info().block_bytes == GRAIN {
                for block in [u64::from(turn), 2 * per_gib + u64::from(turn)] {
                    put(&*image, block, turn + 1);
                    expected.insert(block * GRAIN, turn + 1);
                }
                if turn == 2 {
                    writer.flush().unwrap();
                    writer.commit_waiting(0, Commit::Zero).unwrap();
                    writer.flush().unwrap();
                    writer.recycle(writer.freed_generation());
                    expected.insert(0, 0);
                }
            }
            writer.close().unwrap();
            drop(image);
            let at = (100 + u64::from(turn)) * GRAIN;
            let script = format!("write -P {} {at} 64k", 0x50 + turn);
            qemu("qemu-io", &["-f", "vmdk", "-c", &script], &path);
            expected.insert(at, 0x50 + turn);
        }
        let script: Vec<String> = expected.iter().map(|(at, byte)| format!("read -P {byte} {at} 64k")).collect();
        let args: Vec<&str> = ["-f", "vmdk"].into_iter().chain(script.iter().flat_map(|line| ["-c", line])).collect();
        let read = Command::new("qemu-io").args(&args).arg(&path).output().unwrap();
        let said = String::from_utf8_lossy(&read.stdout).into_owned();
        assert!(read.status.success() && !said.contains("Pattern verification failed"), "{subformat}{more}: {said}");
        if subformat.ends_with("Sparse") {
            qemu("qemu-img", &["check", "-q", "-f", "vmdk"], &path);
        }
        let image = opened(&path);
        for (at, byte) in &expected {
            let (block, within) = (at / image.info().block_bytes, at % image.info().block_bytes);
            let mut bytes = vec![0; GRAIN as usize];
            match state(&*image, block) {
                BlockState::Data { store, offset_bytes } => {
                    image.stores()[usize::from(store)].read_at(&mut bytes, offset_bytes + within).unwrap();
                }
                other => assert!(*byte == 0, "{subformat}: block {block} is {other:?}"),
            }
            assert!(bytes.iter().all(|found| found == byte), "{subformat}{more}, offset {at}");
        }
        drop(image);
        let stores = [vec![store(&path)], further_of(&path)].concat();
        let bad = super::examine(&stores.iter().cloned().map(Some).collect::<Vec<_>>(), false).unwrap().report;
        assert!(bad.worst() < Some(Severity::Corrupt), "{subformat}{more}: {:?}", bad.findings);
        std::fs::read_dir(dir.path()).unwrap().for_each(|file| std::fs::remove_file(file.unwrap().path()).unwrap());
    }
}

fn further_of(path: &Path) -> Vec<Arc<dyn Store>> {
    let references = Format::Vmdk.driver().references(&*store(path)).unwrap();
    references.iter().map(|reference| store(&path.with_file_name(&reference.name))).collect()
}
