//! Larger disks: all kinds, in their place and with directories that move; what is refused.

use super::writing::{check, made, made_in, open, options, put, qemu, state, text_of};
use crate::{BlockState, Commit, CreateOptions, DiskType, Format, Image, LinkageId, ParentLink};
use diskwright_format::vmdk::{Descriptor, SECTOR_BYTES};
use diskwright_store::{FileStore, OpenOptions, Store};
use std::{process::Command, sync::Arc};

const MIB: u64 = 1 << 20;

fn grow(stores: &[Arc<dyn Store>], size_bytes: u64) -> String {
    let image = open(stores, true);
    let result = image.writer().unwrap().resize(size_bytes);
    image.writer().unwrap().close().unwrap();
    match result {
        Ok(()) => {
            assert_eq!(image.size_bytes(), size_bytes);
            assert_eq!(open(stores, false).size_bytes(), size_bytes);
            String::new()
        }
        Err(error) => error.to_string(),
    }
}

/// Writes a sector of one byte at this offset of the disk.
fn put_at(image: &dyn Image, offset_bytes: u64, byte: u8) {
    let (block, within) = (offset_bytes / image.info().block_bytes, offset_bytes % image.info().block_bytes);
    let at = image.writer().unwrap().reserve_waiting(block).unwrap();
    image.stores()[usize::from(at.store)].write_at(&[byte; 512], at.offset_bytes + within).unwrap();
    image.writer().unwrap().commit_waiting(block, Commit::Whole).unwrap();
}

/// The sector at this offset of the disk; `None` if its block has no data.
fn sector_at(image: &dyn Image, offset_bytes: u64) -> Option<[u8; 512]> {
    let (block, within) = (offset_bytes / image.info().block_bytes, offset_bytes % image.info().block_bytes);
    let BlockState::Data { store, offset_bytes } = state(image, block) else { return None };
    let mut found = [0; 512];
    image.stores()[usize::from(store)].read_at(&mut found, offset_bytes + within).unwrap();
    Some(found)
}

/// A byte in the first, the last sector before the growth, and the last one after it.
fn fill_and_grow(options: &CreateOptions, size_bytes: u64) {
    let what = format!("{:?}, {} to {size_bytes}", options.own.subformat, options.size_bytes);
    let stores = made(options);
    let image = open(&stores, true);
    let writer = image.writer().unwrap();
    let (first, old_last, last) = (0, options.size_bytes - 512, size_bytes - 512);
    put_at(&*image, first, 1);
    put_at(&*image, old_last, 2);
    writer.resize(size_bytes).unwrap_or_else(|error| panic!("{what}: {error}"));
    assert_eq!(image.size_bytes(), size_bytes, "{what}");
    put_at(&*image, last, 3);
    writer.close().unwrap();
    drop(image);
    let image = open(&stores, false);
    assert_eq!(image.size_bytes(), size_bytes, "{what}");
    assert_eq!(check(&stores), [""; 0], "{what}");
    assert_eq!(image.info().remarks, [""; 0], "{what}");
    for (offset, byte) in [(first, 1), (old_last, 2), (last, 3)] {
        assert_eq!(sector_at(&*image, offset), Some([byte; 512]), "{what}: offset {offset}");
    }
    if last > old_last + 512 {
        let between = sector_at(&*image, last - 512);
        assert!(between.is_none_or(|sector| sector == [0; 512]), "{what}");
    }
}

#[test]
fn every_kind_grows_in_use() {
    for kind in ["monolithicSparse", "monolithicFlat", "twoGbMaxExtentSparse", "twoGbMaxExtentFlat", "vmfsSparse"] {
        fill_and_grow(&options(kind, 9 * MIB), 9 * MIB + 512);
        fill_and_grow(&options(kind, 9 * MIB + 512), 20 * MIB);
    }
    for kind in ["monolithicSparse", "twoGbMaxExtentSparse"] {
        fill_and_grow(&options(kind, 100 * MIB), 2047 * MIB);
    }
    // 4 GiB have 128 tables: the directories move.
    for size_bytes in [(4 << 30) + 512, 200 << 30] {
        fill_and_grow(&options("monolithicSparse", 4 << 30), size_bytes);
    }
    fill_and_grow(&options("twoGbMaxExtentSparse", 5 << 30), (5 << 30) + 700 * MIB);
}

/// A disk that grows often, and is written in between, keeps its tables in order.
#[test]
fn a_disk_grows_again_and_again() {
    let stores = made(&CreateOptions { block_bytes: Some(8192), ..options("monolithicSparse", MIB) });
    let mut expected = Vec::new();
    let mut size_bytes = MIB;
    for turn in 1..40_u64 {
        let image = open(&stores, true);
        let last = size_bytes / 8192 - 1;
        put(&*image, last, turn as u8);
        expected.push((last, turn as u8));
        size_bytes += turn * 37 * 8192 * 19;
        image.writer().unwrap().resize(size_bytes).unwrap();
        if turn % 3 == 0 {
            image.writer().unwrap().flush().unwrap();
        }
        image.writer().unwrap().close().unwrap();
        // A directory that moved leaves its old place.
        let found: Vec<_> = check(&stores).into_iter().filter(|found| !found.contains("named by no entry")).collect();
        assert_eq!(found, [""; 0], "turn {turn}");
    }
    let image = open(&stores, false);
    for (block, byte) in expected {
        let BlockState::Data { offset_bytes, .. } = state(&*image, block) else { panic!("block {block}") };
        let mut found = [0; 8192];
        image.store().read_at(&mut found, offset_bytes).unwrap();
        assert!(found.iter().all(|&found| found == byte), "block {block}");
    }
}

/// The rest of the last grain becomes visible, and was never written by a guest.
#[test]
fn what_lies_behind_the_old_end_reads_as_zeros() {
    let stores = made(&options("monolithicSparse", MIB + 512));
    let image = open(&stores, true);
    put(&*image, 16, 5);
    let BlockState::Data { offset_bytes, .. } = state(&*image, 16) else { panic!("no data") };
    image.writer().unwrap().flush().unwrap();
    stores[0].write_at(&[9; 1024], offset_bytes + 512).unwrap();
    image.writer().unwrap().resize(2 * MIB).unwrap();
    let mut found = [1; 2048];
    stores[0].read_at(&mut found, offset_bytes).unwrap();
    assert!(found[..512].iter().all(|&byte| byte == 5) && found[512..].iter().all(|&byte| byte == 0));
    let flat = made(&options("monolithicFlat", MIB));
    flat[1].write_at(&[9; 1024], MIB).unwrap();
    assert_eq!(grow(&flat, 2 * MIB), "");
    let mut found = [1; 1024];
    flat[1].read_at(&mut found, MIB).unwrap();
    assert_eq!(found, [0; 1024]);
}

#[test]
fn descriptor_and_geometry_follow_and_an_interrupted_growth_is_finished() {
    let stores = made(&options("monolithicSparse", 64 * MIB));
    assert_eq!(grow(&stores, 1 << 40), "");
    let parsed = Descriptor::parse(&text_of(&*stores[0], SECTOR_BYTES), 0).unwrap();
    assert_eq!((parsed.sectors(), parsed.get("ddb.geometry.cylinders")), (Some(1 << 31), Some("65535")));
    // The cut came before the descriptor was written.
    let text = String::from_utf8(text_of(&*stores[0], SECTOR_BYTES)).unwrap();
    stores[0].write_at(text.replace("RW 2147483648", "RW 2147480000").as_bytes(), SECTOR_BYTES).unwrap();
    let image = open(&stores, true);
    assert!(image.info().remarks[0].contains("the header counts") && image.size_bytes() == 1 << 40);
    image.writer().unwrap().shrink(1 << 40).unwrap();
    image.writer().unwrap().close().unwrap();
    assert_eq!(open(&stores, false).info().remarks, [""; 0]);
}

#[test]
fn what_cannot_grow_is_refused_by_name_and_stays_as_it_is() {
    for (options, size_bytes, what) in [
        (options("monolithicSparse", MIB), MIB - 512, "at least the present one"),
        (options("monolithicSparse", MIB), MIB + 100, "a multiple of 512"),
        (options("monolithicSparse", MIB), 3 << 40, "reach 2 TiB"),
        (options("twoGbMaxExtentSparse", MIB), 3 << 30, "ends at 2047 MiB"),
        (options("twoGbMaxExtentFlat", MIB), 8 << 30, "ends at 2047 MiB"),
    ] {
        let stores = made(&options);
        let told = grow(&stores, size_bytes);
        assert!(told.contains(what), "{told}");
        assert_eq!(open(&stores, false).size_bytes(), options.size_bytes);
    }
}

/// An entry behind the end means nothing until the disk grows.
#[test]
fn a_grain_behind_the_end_is_never_shown() {
    let stores = made(&options("monolithicSparse", MIB));
    for table in [21 + 1, 21 + 5 + 1] {
        stores[0].write_at(&128_u32.to_le_bytes(), table * SECTOR_BYTES + 4 * 20).unwrap();
    }
    let told = grow(&stores, 2 * MIB);
    assert!(told.contains("has data behind the disk's end"), "{told}");
    assert_eq!(open(&stores, false).size_bytes(), MIB);
}

#[test]
fn a_child_grows_and_keeps_its_parent() {
    let parent = ParentLink {
        relative_path: Some(".\\base.vmdk".into()),
        linkage: Some(LinkageId::Cid(7)),
        ..ParentLink::default()
    };
    let child = CreateOptions {
        disk_type: DiskType::Differencing,
        parent: Some(parent),
        ..options("twoGbMaxExtentSparse", 40 << 30)
    };
    fill_and_grow(&child, (40 << 30) + 100 * MIB);
}

/// qemu-io writes to the new range of each kind, and reads what this program has written.
#[test]
fn qemu_uses_a_disk_that_has_grown() {
    if Command::new("qemu-io").arg("--version").output().is_err() {
        return println!("skipped: qemu-io is not installed");
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("d.vmdk");
    for (kind, small, large) in [
        ("monolithicSparse", "3G", 700 << 30),
        ("monolithicSparse", "100M", 3 << 30),
        ("monolithicFlat", "3G", 7 << 30),
        ("twoGbMaxExtentSparse", "3G", (4 << 30) - 100 * MIB),
        ("twoGbMaxExtentFlat", "3G", (4 << 30) - 100 * MIB),
    ] {
        qemu("qemu-img", &["create", "-q", "-f", "vmdk", "-o", &format!("size={small},subformat={kind}")], &path);
        qemu("qemu-io", &["-f", "vmdk", "-c", "write -P 7 50M 1M"], &path);
        let image = super::writing::opened_for_writing(&path);
        image.writer().unwrap().begin_writing().unwrap();
        image.writer().unwrap().resize(large).unwrap();
        put_at(&*image, large - MIB, 3);
        image.writer().unwrap().close().unwrap();
        drop(image);
        let (at, mine) = (large - 64 * MIB, large - MIB);
        let script = [
            format!("write -P 9 {at} 1M"),
            "read -P 7 50M 1M".into(),
            format!("read -P 3 {mine} 512"),
            format!("read -P 0 {} 1M", at + MIB),
        ];
        let args: Vec<&str> = ["-f", "vmdk"].into_iter().chain(script.iter().flat_map(|line| ["-c", line])).collect();
        let ran = Command::new("qemu-io").args(&args).arg(&path).output().unwrap();
        let said = String::from_utf8_lossy(&ran.stdout).into_owned() + &String::from_utf8_lossy(&ran.stderr);
        assert!(ran.status.success() && !said.contains("failed"), "{kind}: {said}");
        let shown = Command::new("qemu-img").args(["info", "-f", "vmdk"]).arg(&path).output().unwrap();
        assert!(String::from_utf8_lossy(&shown.stdout).contains(&format!("({large} bytes)")), "{kind}");
        if kind.ends_with("Sparse") {
            qemu("qemu-img", &["check", "-q", "-f", "vmdk"], &path);
        }
        let first: Arc<dyn Store> = Arc::new(FileStore::open(&path, &OpenOptions::default()).unwrap());
        assert!(Format::Vmdk.driver().parent_link(&*first).unwrap().is_none());
        std::fs::read_dir(dir.path()).unwrap().for_each(|file| std::fs::remove_file(file.unwrap().path()).unwrap());
    }
}

/// A smaller disk has its bytes before the new end, and zeros where it grows again.
#[test]
fn every_kind_becomes_smaller_and_grows_again() {
    for (kind, grain_bytes) in
        [("monolithicSparse", 8192), ("twoGbMaxExtentSparse", 8192), ("vmfsSparse", 512), ("monolithicFlat", 0)]
    {
        let created =
            CreateOptions { block_bytes: (grain_bytes > 0).then_some(grain_bytes), ..options(kind, 24 * MIB) };
        let dir = tempfile::tempdir().unwrap();
        let stores = made_in(dir.path(), &created);
        let image = open(&stores, true);
        let writer = image.writer().unwrap();
        writer.begin_writing().unwrap();
        for at in (0..24).rev() {
            put_at(&*image, at * MIB, at as u8 + 1);
            put_at(&*image, at * MIB + 512, at as u8 + 101);
        }
        for wrong in [0, 100, 25 * MIB] {
            let told = writer.shrink(wrong).unwrap_err().to_string();
            assert!(told.contains("at most the present size"), "{kind}: {told}");
        }
        writer.shrink(5 * MIB + 512).unwrap();
        assert_eq!(image.size_bytes(), 5 * MIB + 512, "{kind}");
        writer.close().unwrap();
        drop(image);
        assert_eq!(check(&stores), [""; 0], "{kind}");
        assert_eq!(open(&stores, false).size_bytes(), 5 * MIB + 512, "{kind}");
        // The file has no grain of the range that is gone.
        if grain_bytes == 8192 {
            let extent = &stores[stores.len() - 1];
            assert!(extent.len_bytes().unwrap() < 256 << 10, "{kind}: {} bytes", extent.len_bytes().unwrap());
        }
        let image = open(&stores, true);
        image.writer().unwrap().resize(24 * MIB).unwrap();
        for at in 0..24 {
            let expected = if at < 6 { at as u8 + 1 } else { 0 };
            let found = sector_at(&*image, at * MIB).unwrap_or([0; 512]);
            assert_eq!(found, [expected; 512], "{kind}: MiB {at}");
            let expected = if at < 5 { at as u8 + 101 } else { 0 };
            let found = sector_at(&*image, at * MIB + 512).unwrap_or([0; 512]);
            assert_eq!(found, [expected; 512], "{kind}: behind MiB {at}");
        }
        put_at(&*image, 23 * MIB, 9);
        image.writer().unwrap().close().unwrap();
        assert_eq!(check(&stores), [""; 0], "{kind}");
    }
}

#[test]
fn a_disk_does_not_end_before_its_last_extent() {
    let stores = made(&options("twoGbMaxExtentSparse", 3 << 30));
    let image = open(&stores, true);
    let told = image.writer().unwrap().shrink(1 << 30).unwrap_err().to_string();
    assert!(told.contains("before its last extent"), "{told}");
    image.writer().unwrap().shrink((2 << 30) + 512).unwrap();
    image.writer().unwrap().close().unwrap();
    assert_eq!(open(&stores, false).size_bytes(), (2 << 30) + 512);
    assert_eq!(check(&stores), [""; 0]);
}
