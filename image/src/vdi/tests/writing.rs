//! Writes: what a second session and other programs find.

use super::{MIB, built, told};
use crate::{BlockState, Commit, CreateOptions, DiskType, Image, LinkageId, ParentLink};
use diskwright_format::vdi::VdiHeader;
use diskwright_store::{FileStore, MemoryStore, OpenOptions, Store};
use proptest::prelude::*;
use std::{collections::BTreeMap, path::Path, process::Command, sync::Arc};
use uuid::Uuid;

pub(super) fn options(disk_type: DiskType, size_bytes: u64) -> CreateOptions {
    CreateOptions {
        disk_type,
        size_bytes,
        block_bytes: None,
        logical_sector_bytes: 512,
        physical_sector_bytes: 512,
        parent: None,
        preallocate: false,
        disk_id: None,
        own: crate::FormatOptions::default(),
    }
}

pub(super) fn made(options: &CreateOptions) -> Arc<dyn Store> {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new("d.vdi"));
    super::super::create(Arc::clone(&store), options).unwrap();
    store
}

fn small(block_bytes: u32, blocks: u64) -> CreateOptions {
    CreateOptions { block_bytes: Some(block_bytes), ..options(DiskType::Dynamic, blocks * u64::from(block_bytes)) }
}

pub(super) fn open(store: &Arc<dyn Store>, writable: bool) -> super::super::image::VdiImage {
    super::super::open(Arc::clone(store), writable).unwrap()
}

/// Writes a block of one byte, without a flush.
pub(super) fn put(image: &dyn Image, block: u64, byte: u8) {
    let writer = image.writer().unwrap();
    let at = writer.reserve_waiting(block).unwrap();
    let len = image.info().block_bytes.min(image.size_bytes() - block * image.info().block_bytes) as usize;
    image.store().write_at(&vec![byte; len], at.offset_bytes).unwrap();
    writer.commit_waiting(block, Commit::Whole).unwrap();
}

fn state(image: &dyn Image, block: u64) -> BlockState {
    let mut state = [BlockState::Absent];
    image.block_states(block, &mut state).unwrap();
    state[0]
}

/// The byte that fills a block; `None` if the block has no data here.
pub(super) fn filled(image: &dyn Image, block: u64) -> Option<u8> {
    let BlockState::Data { offset_bytes, .. } = state(image, block) else { return None };
    let mut bytes = vec![0; image.info().block_bytes as usize];
    image.store().read_at(&mut bytes, offset_bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == bytes[0]), "block {block} has bytes of several blocks");
    Some(bytes[0])
}

pub(super) fn close(image: &dyn Image) {
    image.writer().unwrap().fill_gaps().unwrap();
    image.writer().unwrap().close().unwrap();
}

pub(super) fn header(store: &dyn Store) -> VdiHeader {
    let mut bytes = [0; 512];
    store.read_at(&mut bytes, 0).unwrap();
    VdiHeader::parse(&bytes).unwrap()
}

pub(super) fn is_sound(store: &Arc<dyn Store>) {
    assert_eq!(told(Arc::clone(store)), (None, String::new()));
}

#[test]
fn every_type_that_is_created_keeps_what_is_written() {
    for disk_type in [DiskType::Dynamic, DiskType::Fixed] {
        for preallocate in [false, disk_type == DiskType::Fixed] {
            let store = made(&CreateOptions { preallocate, ..options(disk_type, 5 * MIB + 512) });
            is_sound(&store);
            let before = header(&*store);
            let image = open(&store, true);
            assert_eq!((image.info().disk_type, image.info().block_bytes), (disk_type, MIB));
            assert_eq!(image.info().payload_alignment_bytes, 1 << 20);
            let writer = image.writer().unwrap();
            writer.begin_writing().unwrap();
            let begun = header(&*store);
            assert!(begun.modify_id != before.modify_id && begun.id == before.id);
            assert_eq!(image.linkage_id(), Some(begun.modify_id.into()));
            writer.begin_writing().unwrap();
            for (byte, block) in [(1, 4), (2, 0), (3, 5)] {
                put(&image, block, byte);
            }
            assert!(writer.is_dirty() || disk_type == DiskType::Fixed);
            if disk_type == DiskType::Fixed {
                assert!(!writer.can_store_zero() && !writer.can_forget_blocks());
                for error in [writer.commit_waiting(0, Commit::Discard).map(drop), writer.begin_compacting()] {
                    assert!(error.unwrap_err().to_string().contains("fixed VDI is not supported"));
                }
            }
            close(&image);
            assert_eq!(header(&*store).modify_id, begun.modify_id);
            let image = open(&store, false);
            assert_eq!((filled(&image, 4), filled(&image, 0)), (Some(1), Some(2)));
            let BlockState::Data { offset_bytes, .. } = state(&image, 5) else { panic!("no data") };
            let mut bytes = [9; 1024];
            store.read_at(&mut bytes, offset_bytes).unwrap();
            assert!(bytes[..512] == [3; 512] && bytes[512..] == [0; 512]);
            is_sound(&store);
            let spaces = if disk_type == DiskType::Fixed { 6 } else { 3 };
            assert_eq!(header(&*store).blocks_allocated, spaces);
            assert_eq!(store.len_bytes().unwrap(), 2 * MIB + u64::from(spaces) * MIB);
        }
    }
}

/// Another program puts its next block behind the spaces that the header counts.
#[test]
fn the_header_counts_a_space_before_the_map_names_it() {
    let store = made(&options(DiskType::Dynamic, 100 * MIB));
    let image = open(&store, true);
    for block in (0..100).rev() {
        put(&image, block, 1);
        image.writer().unwrap().flush().unwrap();
        let header = header(&*store);
        let named = 100 - block as u32;
        assert!((named..=100).contains(&header.blocks_allocated), "{named}: {}", header.blocks_allocated);
    }
    drop(image);
    // The next session cuts what this one, which was not closed, had made ahead.
    let image = open(&store, true);
    image.writer().unwrap().begin_compacting().unwrap();
    assert_eq!((header(&*store).blocks_allocated, store.len_bytes().unwrap()), (100, 102 * MIB));
    is_sound(&store);
}

#[test]
fn freed_space_is_reused_only_after_it_was_recycled_and_reads_as_zeros() {
    let store = made(&options(DiskType::Dynamic, 20 * MIB));
    let image = open(&store, true);
    let writer = image.writer().unwrap();
    put(&image, 0, 5);
    put(&image, 1, 6);
    writer.flush().unwrap();
    let BlockState::Data { offset_bytes: freed, .. } = state(&image, 0) else { panic!("no data") };
    assert_eq!(writer.commit_waiting(0, Commit::Discard).unwrap(), BlockState::Absent);
    let generation = writer.freed_generation();
    assert_ne!(writer.reserve_waiting(9).unwrap().offset_bytes, freed);
    writer.flush().unwrap();
    writer.recycle(generation);
    let again = writer.reserve_waiting(10).unwrap().offset_bytes;
    assert_eq!(again, freed);
    let mut bytes = vec![1; MIB as usize];
    store.read_at(&mut bytes, again).unwrap();
    assert!(bytes.iter().all(|&byte| byte == 0));
    // Reserved and never written: free after a close, whose last block fills the gap.
    close(&image);
    assert_eq!((header(&*store).blocks_allocated, store.len_bytes().unwrap()), (1, 3 * MIB));
    assert_eq!(filled(&open(&store, false), 1), Some(6));
    is_sound(&store);
}

#[test]
fn a_close_fills_gaps() {
    let store = made(&small(4096, 3000));
    let image = open(&store, true);
    let writer = image.writer().unwrap();
    (0..3000).for_each(|block| put(&image, block, (block % 251) as u8));
    writer.flush().unwrap();
    for block in (0..3000).filter(|block| block % 3 == 0) {
        writer.commit_waiting(block, Commit::Discard).unwrap();
    }
    close(&image);
    drop(image);
    is_sound(&store);
    assert_eq!((header(&*store).blocks_allocated, store.len_bytes().unwrap()), (2000, 2 * MIB + 2000 * 4096));
    let image = open(&store, false);
    for block in 0..3000 {
        assert_eq!(filled(&image, block), (block % 3 != 0).then_some((block % 251) as u8), "block {block}");
    }
}

#[test]
fn a_child_hides_its_parent_by_zeros_and_keeps_its_link() {
    let ids = [1, 2, 3, 4].map(Uuid::from_u128);
    let format = Some(crate::Format::Vdi);
    let link = ParentLink { format, file_id: Some(ids[0]), linkage: Some(ids[1].into()), ..ParentLink::default() };
    let child = CreateOptions { parent: Some(link.clone()), ..options(DiskType::Differencing, 4 * MIB) };
    let store = made(&child);
    let image = open(&store, true);
    assert_eq!(image.info().parent, Some(link.clone()));
    let writer = image.writer().unwrap();
    assert!(!writer.tracks_sectors() && writer.can_store_zero() && writer.can_forget_blocks());
    put(&image, 2, 1);
    assert_eq!(writer.commit_waiting(2, Commit::Zero).unwrap(), BlockState::Zero);
    assert_eq!(writer.commit_waiting(1, Commit::Discard).unwrap(), BlockState::Zero);
    assert_eq!(writer.commit_waiting(1, Commit::Absent).unwrap(), BlockState::Absent);
    let second = ParentLink { linkage2: Some(ids[3].into()), linkage: Some(ids[2].into()), ..link.clone() };
    writer.set_parent_link(&second).unwrap();
    assert_eq!(image.parent_link(), Some(second.clone()));
    let of_file = super::super::parent_link(&*store).unwrap();
    assert_eq!(of_file, Some(second));
    writer.set_parent_link(&link).unwrap();
    assert_eq!(super::super::parent_link(&*store).unwrap(), Some(link.clone()));
    let no_id = ParentLink { file_id: None, ..link };
    assert!(writer.set_parent_link(&no_id).unwrap_err().to_string().contains("both ids"));
    writer.set_linkage_id(LinkageId::Guid(ids[3])).unwrap();
    assert_eq!(header(&*store).modify_id, ids[3]);
    assert!(writer.set_linkage_id(LinkageId::Cid(3)).is_err());
    close(&image);
    assert_eq!(state(&open(&store, false), 2), BlockState::Zero);
    is_sound(&store);
    let base = made(&options(DiskType::Dynamic, MIB));
    assert!(open(&base, true).writer().unwrap().set_parent_link(&no_id).is_err());
}

#[test]
fn maps_that_lie_are_refused_before_anything_is_allocated() {
    for (at, value, text) in [(512, 2u32, "space 2 at offset 3145728"), (512, 0, "two blocks with space 0")] {
        let mut bytes = built();
        bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        let store: Arc<dyn Store> = Arc::new(MemoryStore::with_bytes("d.vdi", bytes.clone()));
        let image = open(&store, true);
        let error = image.writer().unwrap().reserve_waiting(1).unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
        // A block that has space can still be overwritten.
        put(&image, 3, 9);
        close(&image);
        assert_eq!(filled(&image, 3), Some(9));
    }
    let mut bytes = built();
    bytes[0x17c..0x180].copy_from_slice(&512u32.to_le_bytes());
    let store: Arc<dyn Store> = Arc::new(MemoryStore::with_bytes("d.vdi", bytes));
    let error = super::super::open(store, true).map(drop).unwrap_err().to_string();
    assert!(error.contains("512 extra bytes"), "{error}");
}

/// The survey finds gaps, and a last space that the end of the file cuts.
#[test]
fn holes_are_used_and_a_cut_space_is_completed() {
    let mut bytes = built();
    bytes[512..516].copy_from_slice(&u32::MAX.to_le_bytes());
    bytes[524..528].copy_from_slice(&1u32.to_le_bytes());
    bytes.truncate(2 * MIB as usize + 700);
    let store: Arc<dyn Store> = Arc::new(MemoryStore::with_bytes("d.vdi", bytes));
    let image = open(&store, true);
    assert_eq!(store.len_bytes().unwrap(), 3 * MIB);
    put(&image, 0, 8);
    assert_eq!(state(&image, 0), BlockState::data(MIB), "the hole is used");
    close(&image);
    is_sound(&store);
}

#[test]
fn pages_stay_within_the_limit() {
    let store = made(&options(DiskType::Dynamic, 300 << 30));
    let image = open(&store, true);
    image.writer().unwrap().limit_tables(0);
    for page in 0..290 {
        image.writer().unwrap().prepare(page * 1024..page * 1024 + 1).unwrap();
        assert!(image.pages_in_memory() <= 64, "{}", image.pages_in_memory());
    }
    put(&image, 7, 1);
    assert_ne!(state(&image, 7), BlockState::Absent);
}

#[test]
fn a_disk_grows_within_the_room_of_its_map() {
    for disk_type in [DiskType::Dynamic, DiskType::Fixed] {
        let store = made(&CreateOptions { block_bytes: Some(4096), ..options(disk_type, 3 * 4096 + 512) });
        let image = open(&store, true);
        let writer = image.writer().unwrap();
        put(&image, 3, 3);
        let BlockState::Data { offset_bytes, .. } = state(&image, 3) else { panic!("no data") };
        // As if another program had written behind the end.
        store.write_at(&[7; 3584], offset_bytes + 512).unwrap();
        writer.resize(5000 * 4096).unwrap();
        assert_eq!((image.size_bytes(), header(&*store).blocks), (5000 * 4096, 5000));
        let mut tail = [1; 3584];
        store.read_at(&mut tail, offset_bytes + 512).unwrap();
        assert_eq!(tail, [0; 3584]);
        let has_space = disk_type == DiskType::Fixed;
        assert_eq!(state(&image, 4999) != BlockState::Absent, has_space);
        put(&image, 4999, 4);
        put(&image, 4, 5);
        close(&image);
        is_sound(&store);
        let image = open(&store, true);
        assert_eq!((filled(&image, 4999), filled(&image, 4)), (Some(4), Some(5)));
        // The caller has not moved the blocks that lie where a longer map goes.
        let far = 1 << 50;
        for (size, text) in
            [(4096, "a new size of 4096"), (300_000 * 4096, "where the longer block map goes"), (far, "in 32 bits")]
        {
            let error = image.writer().unwrap().resize(size).unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        }
        assert_eq!(image.size_bytes(), 5000 * 4096);
    }
}

#[test]
fn a_smaller_disk_has_lost_what_lay_beyond_its_end() {
    for disk_type in [DiskType::Dynamic, DiskType::Fixed] {
        let store = made(&options(disk_type, 6 * MIB));
        let image = open(&store, true);
        image.writer().unwrap().begin_writing().unwrap();
        (0..6).for_each(|block| put(&image, 5 - block, 1 + block as u8));
        close(&image);
        let image = open(&store, true);
        let writer = image.writer().unwrap();
        writer.begin_writing().unwrap();
        for wrong in [0, 100, 6 * MIB + 512] {
            let error = writer.shrink(wrong).unwrap_err().to_string();
            assert!(error.contains("new size of"), "{error}");
        }
        writer.shrink(2 * MIB + 512).unwrap();
        writer.shrink(2 * MIB + 512).unwrap();
        assert_eq!(image.size_bytes(), 2 * MIB + 512);
        close(&image);
        is_sound(&store);
        assert_eq!((header(&*store).blocks, header(&*store).blocks_allocated), (3, 3));
        assert_eq!(store.len_bytes().unwrap(), 2 * MIB + 3 * MIB);
        let image = open(&store, true);
        image.writer().unwrap().resize(6 * MIB).unwrap();
        assert_eq!((filled(&image, 0), filled(&image, 1)), (Some(6), Some(5)));
        let BlockState::Data { offset_bytes, .. } = state(&image, 2) else { panic!("no data") };
        let mut bytes = vec![9; MIB as usize];
        store.read_at(&mut bytes, offset_bytes).unwrap();
        assert!(bytes[..512].iter().all(|&byte| byte == 4) && bytes[512..].iter().all(|&byte| byte == 0));
        assert_eq!(filled(&image, 3).unwrap_or(0), 0);
        close(&image);
        is_sound(&store);
    }
}

#[test]
fn options_that_do_not_fit_are_refused_by_name() {
    let refused = |options: CreateOptions, what: &str| {
        let store: Arc<dyn Store> = Arc::new(MemoryStore::new("d.vdi"));
        let error = super::super::create(Arc::clone(&store), &options).unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
        assert_eq!(store.len_bytes().unwrap(), 0);
    };
    let dynamic = || options(DiskType::Dynamic, 4 * MIB);
    refused(CreateOptions { size_bytes: 1000, ..dynamic() }, "multiple of the 512-byte sector");
    refused(CreateOptions { logical_sector_bytes: 4096, ..dynamic() }, "sectors of 512 bytes");
    refused(CreateOptions { block_bytes: Some(3 << 20), ..dynamic() }, "a block of 3145728 bytes");
    refused(CreateOptions { preallocate: true, ..dynamic() }, "cannot reserve the space");
    refused(options(DiskType::Dynamic, 65 << 40), "more than 64 Mi");
    let parent = Some(ParentLink { linkage: Some(LinkageId::Cid(1)), ..ParentLink::default() });
    refused(CreateOptions { parent, ..options(DiskType::Differencing, MIB) }, "no ids");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Any order of writes, discards, moves, flushes and new sessions shows what a table of bytes
    /// shows, and leaves a file without findings after a close.
    #[test]
    fn a_disk_behaves_as_a_table_of_bytes(
        is_child: bool,
        steps in prop::collection::vec((0u8..11, 0u64..24, 1u8..), 1..80),
    ) {
        let parent = ParentLink {
            file_id: Some(Uuid::from_u128(1)),
            linkage: Some(Uuid::from_u128(2).into()),
            ..ParentLink::default()
        };
        let disk_type = if is_child { DiskType::Differencing } else { DiskType::Dynamic };
        let parent = is_child.then_some(parent);
        let store = made(&CreateOptions { disk_type, parent, ..small(4096, 24) });
        let mut image = open(&store, true);
        let mut model: BTreeMap<u64, u8> = BTreeMap::new();
        for (step, block, byte) in steps {
            let writer = image.writer().unwrap();
            match step {
                0..4 => {
                    put(&image, block, byte);
                    model.insert(block, byte);
                }
                4..6 => {
                    writer.commit_waiting(block, if step == 4 { Commit::Discard } else { Commit::Absent }).unwrap();
                    model.remove(&block);
                }
                6 => drop(writer.reserve_waiting(block).unwrap()),
                7 => {
                    writer.flush().unwrap();
                    writer.recycle(writer.freed_generation());
                }
                8 => {
                    writer.prepare(block..block + 1).unwrap();
                    writer.begin_compacting().unwrap();
                    if let Some(crate::MoveTo::Place(place)) = writer.reserve_move(block).unwrap() {
                        let mut bytes = vec![0; place.len_bytes as usize];
                        store.read_at(&mut bytes, place.from_bytes).unwrap();
                        store.write_at(&bytes, place.to_bytes).unwrap();
                        writer.commit_waiting(block, Commit::Moved).unwrap();
                    }
                }
                9 => {
                    close(&image);
                    is_sound(&store);
                    prop_assert_eq!(header(&*store).blocks_allocated as usize, model.len());
                    image = open(&store, true);
                }
                _ => {
                    close(&image);
                    image = open(&store, true);
                    let writer = image.writer().unwrap();
                    writer.begin_writing().unwrap();
                    writer.shrink((block + 1) * 4096).unwrap();
                    prop_assert_eq!(image.size_bytes(), (block + 1) * 4096);
                    model.retain(|&of, _| of <= block);
                    close(&image);
                    is_sound(&store);
                    prop_assert_eq!(header(&*store).blocks_allocated as usize, model.len());
                    image = open(&store, true);
                    image.writer().unwrap().resize(24 * 4096).unwrap();
                }
            }
            for block in 0..24 {
                prop_assert_eq!(filled(&image, block), model.get(&block).copied(), "block {}", block);
            }
        }
    }
}

pub(super) fn qemu(program: &str, args: &[&str], path: &Path) {
    let made = Command::new(program).args(args).arg(path).output().unwrap();
    let said = String::from_utf8_lossy(&made.stderr).into_owned() + &String::from_utf8_lossy(&made.stdout);
    assert!(made.status.success() && !said.contains("Pattern verification failed"), "{program} {args:?}: {said}");
}

/// Both programs write to one image in turns, also where the other one made it. Each reads what
/// both wrote.
#[test]
fn qemu_and_this_program_write_in_turns() {
    if Command::new("qemu-io").arg("--version").output().is_err() {
        return println!("skipped: qemu-io is not installed");
    }
    let dir = tempfile::tempdir().unwrap();
    let cases = [DiskType::Dynamic, DiskType::Fixed].into_iter().flat_map(|kind| [(kind, true), (kind, false)]);
    for (disk_type, by_qemu) in cases {
        let path = dir.path().join("d.vdi");
        if by_qemu {
            let is_static = if disk_type == DiskType::Fixed { "on" } else { "off" };
            let of_qemu = format!("size=64M,static={is_static}");
            qemu("qemu-img", &["create", "-q", "-f", "vdi", "-o", &of_qemu], &path);
        } else {
            let new = OpenOptions { writable: true, create_new: true, ..OpenOptions::default() };
            let store = FileStore::open(&path, &new).unwrap();
            super::super::create(Arc::new(store), &options(disk_type, 64 * MIB)).unwrap();
        }
        let mut expected = BTreeMap::new();
        for turn in 0..4_u8 {
            let writable = OpenOptions { writable: true, ..OpenOptions::default() };
            let store: Arc<dyn Store> = Arc::new(FileStore::open(&path, &writable).unwrap());
            let image = open(&store, true);
            let writer = image.writer().unwrap();
            writer.begin_writing().unwrap();
            for block in [u64::from(turn), 40 + u64::from(turn)] {
                put(&image, block, turn + 1);
                expected.insert(block * MIB, turn + 1);
            }
            if turn == 2 && disk_type == DiskType::Dynamic {
                writer.flush().unwrap();
                writer.commit_waiting(0, Commit::Zero).unwrap();
                expected.insert(0, 0);
            }
            close(&image);
            is_sound(&store);
            drop(image);
            drop(store);
            qemu("qemu-img", &["check", "-q", "-f", "vdi"], &path);
            let at = (20 + u64::from(turn)) * MIB;
            qemu("qemu-io", &["-f", "vdi", "-c", &format!("write -P {} {at} 1M", 0x50 + turn)], &path);
            expected.insert(at, 0x50 + turn);
        }
        let script: Vec<String> = expected.iter().map(|(at, byte)| format!("read -P {byte} {at} 1M")).collect();
        let args: Vec<&str> = ["-f", "vdi"].into_iter().chain(script.iter().flat_map(|line| ["-c", line])).collect();
        qemu("qemu-io", &args, &path);
        qemu("qemu-img", &["check", "-q", "-f", "vdi"], &path);
        let store: Arc<dyn Store> = Arc::new(FileStore::open(&path, &OpenOptions::default()).unwrap());
        let image = open(&store, false);
        for (at, byte) in &expected {
            assert_eq!(filled(&image, at / MIB).unwrap_or(0), *byte, "{disk_type}, offset {at}");
        }
        is_sound(&store);
        std::fs::remove_file(&path).unwrap();
    }
}
