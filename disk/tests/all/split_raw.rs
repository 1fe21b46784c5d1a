//! A raw disk that continues in further files (`disk.001`, `disk.002`): reads, writes, flushes, and
//! files that are refused.

use crate::common::{Kind, Step, Twin};
#[allow(dead_code, reason = "a file system that is not filled up")]
use crate::small_fs;
use diskwright_disk::{
    ChainScope, ConvertOptions, CreateRequest, Disk, DiskError, Layer, OpenOptions, PartRole, convert, parts_of,
};
use diskwright_image::{DiskType, Format, split::SplitRawImage};
use diskwright_store::{BlockDevice, Blocking, CacheMode, EngineKind, ExtentKind, Files, MemoryStore, Store};
use proptest::prelude::*;
use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    sync::Arc,
};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;

fn folder() -> TempDir {
    tempfile::tempdir_in(std::env::var_os("CARGO_TARGET_TMPDIR").unwrap_or_else(|| "/tmp".into())).unwrap()
}

/// Bytes that depend on their offset.
fn pattern(len_bytes: u64) -> Vec<u8> {
    (0..len_bytes).map(|at| (at / 512) as u8 ^ (at >> 17) as u8 ^ at as u8 | 1).collect()
}

/// Writes `bytes` in parts of the given lengths and returns the path of the first part.
fn split(dir: &Path, first: u32, bytes: &[u8], lens_bytes: &[u64]) -> PathBuf {
    let mut at = 0;
    for (number, &len) in (first..).zip(lens_bytes) {
        fs::write(dir.join(format!("disk.{number:03}")), &bytes[at..at + len as usize]).unwrap();
        at += len as usize;
    }
    assert_eq!(at, bytes.len());
    dir.join(format!("disk.{first:03}"))
}

fn open(path: &Path, writable: bool) -> Result<Arc<Disk>, DiskError> {
    Disk::open(path, &OpenOptions { writable, ..OpenOptions::default() })
}

fn refused(path: &Path, writable: bool) -> String {
    open(path, writable).unwrap_err().to_string()
}

fn joined(dir: &Path, first: u32, count: u32) -> Vec<u8> {
    (first..first + count).flat_map(|number| fs::read(dir.join(format!("disk.{number:03}"))).unwrap()).collect()
}

fn against_the_model(first: u32, lens_bytes: &[u64], cache: CacheMode, engine: EngineKind) {
    let size_bytes: u64 = lens_bytes.iter().sum();
    let range = (0..size_bytes.div_ceil(512), prop_oneof![1..24_u64, 1..3000_u64]);
    let step = prop_oneof![
        6 => (range.clone(), any::<u8>(), any::<bool>())
            .prop_map(|((sector, sectors), seed, fua)| Step::Write { sector, sectors, seed: seed | 1, fua }),
        1 => range.clone().prop_map(|(sector, sectors)| Step::Zero { sector, sectors }),
        1 => range.clone().prop_map(|(sector, sectors)| Step::Discard { sector, sectors }),
        3 => range.prop_map(|(sector, sectors)| Step::Read { sector, sectors }),
        1 => Just(Step::Flush),
        1 => Just(Step::Reopen),
    ];
    let config =
        ProptestConfig { cases: 8, max_shrink_iters: 100, failure_persistence: None, ..ProptestConfig::default() };
    proptest::test_runner::TestRunner::new(config)
        .run(&prop::collection::vec(step, 1..40), |steps| {
            let dir = folder();
            let mut bytes = pattern(size_bytes);
            let path = split(dir.path(), first, &bytes, lens_bytes);
            bytes.resize(size_bytes.next_multiple_of(512) as usize, 0);
            let kind = Kind { cache, engine, ..Kind::new(Format::Raw, DiskType::Fixed, None) };
            let mut twin = Twin::of(kind, dir, path, bytes);
            steps.into_iter().for_each(|step| twin.apply(step));
            twin.verify();
            twin.close();
            // The concatenated files are the disk. A last part that ends within a sector may not
            // have been extended.
            let mut files = joined(twin.dir.path(), first, lens_bytes.len() as u32);
            files.resize(twin.model.len(), 0);
            assert!(files == twin.model, "the joined files differ from the disk");
            Ok(())
        })
        .unwrap();
}

#[test]
fn parts_of_any_length_are_one_disk() {
    against_the_model(1, &[MIB, MIB, 300 << 10], CacheMode::PageCache, EngineKind::Auto);
    against_the_model(0, &[5 * 512, 1 << 20, 512, 100 << 10], CacheMode::PageCache, EngineKind::Sync);
    // Blocks of 1 KiB, and a last part that ends within a sector.
    against_the_model(1, &[401 << 10, (200 << 10) + 1024, 777], CacheMode::PageCache, EngineKind::Auto);
}

#[test]
fn parts_are_read_and_written_with_o_direct() {
    against_the_model(1, &[MIB, 512 << 10, (300 << 10) + 512], CacheMode::Direct, EngineKind::Auto);
}

#[test]
fn every_extent_names_its_file() {
    let dir = folder();
    let path = split(dir.path(), 1, &pattern(3 * MIB), &[MIB, MIB, MIB]);
    // A hole in the second file.
    let second = fs::OpenOptions::new().write(true).open(dir.path().join("disk.002")).unwrap();
    second.set_len(0).unwrap();
    second.set_len(MIB).unwrap();
    let disk = open(&path, false).unwrap();
    let mut extents = Vec::new();
    disk.extents(0, 3 * MIB, &mut extents).unwrap();
    let told: Vec<_> =
        extents.iter().map(|e| (e.offset_bytes, e.len_bytes, e.kind, e.file, e.file_offset_bytes)).collect();
    let (data, zero) = (ExtentKind::Data, ExtentKind::Zero);
    assert_eq!(told, [(0, MIB, data, 0, Some(0)), (MIB, MIB, zero, 1, None), (2 * MIB, MIB, data, 2, Some(0))]);
    let layers = disk.layers();
    assert_eq!(layers[0].file_path(0), path);
    assert_eq!(layers[0].file_path(2), dir.path().canonicalize().unwrap().join("disk.003"));
    assert_eq!((layers[0].files_len_bytes().unwrap(), layers[0].allocated_bytes().unwrap()), (3 * MIB, 2 * MIB));
}

/// A flush syncs all files, and after a failed sync of any file no flush succeeds.
#[test]
fn a_failed_sync_of_one_file_poisons_the_disk() {
    for failing in 0..3 {
        let parts: Vec<Arc<MemoryStore>> =
            (0..3).map(|n| Arc::new(MemoryStore::with_bytes(format!("disk.00{n}"), vec![0; MIB as usize]))).collect();
        let stores = parts.iter().map(|part| Arc::clone(part) as Arc<dyn Store>).collect();
        let image = Arc::new(SplitRawImage::new(stores, true, 512).unwrap());
        let disk = Disk::from_layers(vec![Layer { path: "disk.000".into(), image }], Vec::new()).unwrap();
        let mut io = Blocking::open(&disk, EngineKind::Auto).unwrap();
        for part in 0..3 {
            io.write(part * MIB, &[1; 4096], true).unwrap();
        }
        io.write(MIB - 4096, &[2; 8192], true).unwrap();
        io.flush().unwrap();
        parts[failing].fail_syncs(true);
        assert!(io.flush().is_err(), "{failing}");
        parts[failing].fail_syncs(false);
        assert!(io.flush().is_err(), "{failing}");
        for part in 0..3 {
            assert!(io.write(part * MIB, &[1; 4096], true).is_err(), "FUA in {part} after {failing} failed");
        }
        io.write(0, &[3; 512], false).unwrap();
        drop(io);
        assert!(disk.close().is_err());
    }
}

/// Holes stay holes in the copy, and extents are shared by reflink from the right file.
#[test]
fn a_conversion_reads_every_file() {
    let small = small_fs::Small::new("xfs", 400 * MIB);
    let (dir, on_xfs) = (folder(), small.as_ref().map(|small| small.mount.clone()));
    if let Err(why) = &on_xfs {
        println!("skipped: sharing by reflink: {why}");
    }
    for (place, can_share) in [(Some(dir.path().to_owned()), false), (on_xfs.ok(), true)] {
        let Some(place) = place else { continue };
        let bytes = pattern(10 * MIB);
        let path = split(&place, 1, &bytes, &[5 * MIB, 3 * MIB, 2 * MIB]);
        for name in ["copy.vhdx", "copy.raw"] {
            let copy = place.join(name);
            let dest = CreateRequest { block_bytes: None, ..CreateRequest::default() };
            let options = ConvertOptions { dest, verify: true, ..ConvertOptions::default() };
            let done = convert(&path, &copy, &options, &mut |_, _| true).unwrap();
            assert_eq!(done.size_bytes, 10 * MIB);
            // A VHDX shares whole blocks of 2 MiB, and parts of a block that has space. The block
            // at 4 MiB has none yet when its first half is taken from the first file.
            let shared_bytes = if name == "copy.raw" { 10 * MIB } else { 9 * MIB };
            assert_eq!(done.cloned_bytes, if can_share { shared_bytes } else { 0 }, "{name}: {done:?}");
            let mut found = vec![0; 10 << 20];
            Blocking::open(&*open(&copy, false).unwrap(), EngineKind::Sync).unwrap().read(0, &mut found).unwrap();
            assert!(found == bytes, "{name} differs");
        }
    }
}

#[test]
fn all_files_are_locked() {
    let dir = folder();
    let path = split(dir.path(), 1, &pattern(3 * MIB), &[MIB, MIB, MIB]);
    let alone = |number: u32, writable| {
        let options = OpenOptions { writable, format: Some(Format::Raw), ..OpenOptions::default() };
        Disk::open(dir.path().join(format!("disk.00{number}")), &options)
    };
    let reader = open(&path, false).unwrap();
    for number in [2, 3] {
        assert!(matches!(alone(number, true), Err(DiskError::InUse { .. })), "{number}");
        assert!(alone(number, false).is_ok(), "readers share");
    }
    drop(reader);
    let writer = open(&path, true).unwrap();
    for number in [2, 3] {
        assert!(matches!(alone(number, false), Err(DiskError::InUse { .. })), "{number}");
    }
    writer.close().unwrap();
    drop(writer);
    let other = alone(3, true).unwrap();
    assert!(matches!(open(&path, true), Err(DiskError::InUse { path, .. }) if path.ends_with("disk.003")));
    other.close().unwrap();
}

#[test]
fn the_first_part_is_found_by_its_number() {
    let dir = folder();
    let path = |name: &str| dir.path().join(name);
    let named = |name: &str| parts_of(&Files::default(), &path(name)).unwrap();
    let make = |name: &str| fs::write(path(name), [0; 512]).unwrap();
    for name in ["a.001", "b.01", "b.02", "c.002", "d.img", "e.001", "e.20240131"] {
        make(name);
        assert_eq!(named(name), PartRole::Alone, "{name}");
    }
    for name in ["f.000", "f.001", "f.002", "g.001", "g.002"] {
        make(name);
    }
    assert!(matches!(named("f.000"), PartRole::First(parts) if parts.later.len() == 2 && parts.missing.is_none()));
    assert!(matches!(named("g.001"), PartRole::First(parts) if parts.later.len() == 1));
    for (name, beside) in [("f.001", "f.000"), ("f.002", "f.001"), ("g.002", "g.001")] {
        assert!(matches!(named(name), PartRole::Later { beside: found } if found.ends_with(beside)), "{name}");
    }
    // A later part can be read with a warning, and written if the user names its format.
    let later = open(&path("g.002"), false).unwrap();
    assert!(later.geometry().size_bytes == 512 && later.warnings()[0].contains("later part"), "{:?}", later.warnings());
    drop(later);
    let error = refused(&path("g.002"), true);
    assert!(error.contains("g.001 exists") && error.contains("`OpenOptions::format` = raw"), "{error}");
    let options = OpenOptions { writable: true, format: Some(Format::Raw), ..OpenOptions::default() };
    assert!(Disk::open(path("g.002"), &options).is_ok());
    // After .999 comes .1000.
    for number in 1..=1001 {
        make(&format!("h.{number:03}"));
    }
    let disk = open(&path("h.001"), false).unwrap();
    assert_eq!(disk.geometry().size_bytes, 1001 * 512);
    assert_eq!(disk.layers()[0].image.stores().len(), 1001);
    drop(disk);
    for number in 1002..=1025 {
        make(&format!("h.{number}"));
    }
    let error = refused(&path("h.001"), false);
    assert!(error.contains("more than 1024 parts") && error.contains("h.1025"), "{error}");
}

#[test]
fn invalid_sets_of_parts_are_refused() {
    let three = |lens_bytes: &[u64]| {
        let dir = folder();
        let path = split(dir.path(), 1, &pattern(lens_bytes.iter().sum()), lens_bytes);
        let second = dir.path().join("disk.002");
        (dir, path, second)
    };
    let told = |path: &Path, words: &[&str]| {
        for writable in [false, true] {
            let error = refused(path, writable);
            words.iter().for_each(|word| assert!(error.contains(word), "{word}: {error}"));
        }
    };
    let (_dir, path, second) = three(&[4096, 4096, 4096]);
    fs::remove_file(&second).unwrap();
    told(&path, &["disk.002", "missing"]);
    let (_dir, path, _) = three(&[4096, 0, 4096]);
    told(&path, &["disk.002", "0 bytes", "at least one sector"]);
    let (_dir, path, _) = three(&[4096, 1000, 4096]);
    told(&path, &["disk.002", "1000 bytes", "a multiple of the sector of 512"]);

    // Parts that are not regular files in this folder.
    let (dir, path, second) = three(&[4096, 4096, 4096]);
    let outside = folder();
    let secret = outside.path().join("secret");
    fs::write(&secret, [0x5e; 4096]).unwrap();
    fs::remove_file(&second).unwrap();
    symlink(&secret, &second).unwrap();
    told(&path, &["disk.002", "symbolic link", "regular file"]);
    fs::remove_file(&second).unwrap();
    symlink(dir.path().join("disk.003"), &second).unwrap();
    told(&path, &["disk.002", "symbolic link"]);
    fs::remove_file(&second).unwrap();
    fs::hard_link(dir.path().join("disk.003"), &second).unwrap();
    told(&path, &["disk.003", "same file as", "disk.002"]);
    fs::remove_file(&second).unwrap();
    fs::create_dir(&second).unwrap();
    told(&path, &["disk.002", "a directory"]);

    // Through a link to the first part the other parts are found in its folder. A link with the
    // name of a part to another file finds none.
    let (dir, path, _) = three(&[4096, 4096, 4096]);
    symlink(&path, outside.path().join("link.001")).unwrap();
    assert_eq!(open(&outside.path().join("link.001"), true).unwrap().geometry().size_bytes, 3 * 4096);
    symlink(&secret, dir.path().join("other.001")).unwrap();
    fs::write(dir.path().join("other.002"), [0; 4096]).unwrap();
    told(&dir.path().join("other.001"), &["other.002", "symbolic link to"]);
}

/// Parts of a container are not opened as a raw disk unless the user says so.
#[test]
fn parts_of_another_format_are_refused_by_name() {
    let dir = folder();
    let mut bytes = pattern(3 * 4096);
    let path = split(dir.path(), 1, &bytes, &[4096, 4096, 4096]);
    for (magic, at, name) in [
        (&b"QFI\xfb\0\0\0\x03"[..], 0, "qcow2"),
        (b"vhdxfile", 0, "vhdx"),
        (b"KDMV", 0, "vmdk"),
        // The footer of a fixed VHD is at the end of the last part.
        (b"conectix", 3 * 4096 - 512, "vhd"),
    ] {
        let kept = bytes.clone();
        bytes[at..at + magic.len()].copy_from_slice(magic);
        split(dir.path(), 1, &bytes, &[4096, 4096, 4096]);
        for writable in [false, true] {
            let error = refused(&path, writable);
            assert!(
                error.contains(&format!("parts of a {name} image")) && error.contains("`OpenOptions::format` = raw"),
                "{error}"
            );
        }
        let options = OpenOptions { format: Some(Format::Raw), writable: true, ..OpenOptions::default() };
        let disk = Disk::open(&path, &options).unwrap();
        assert_eq!(disk.geometry().size_bytes, 3 * 4096);
        bytes = kept;
    }
    // The end of a middle part is contents of the disk.
    bytes[4096 - 512..][..8].copy_from_slice(b"conectix");
    split(dir.path(), 1, &bytes, &[4096, 4096, 4096]);
    assert_eq!(open(&path, true).unwrap().geometry().size_bytes, 3 * 4096);
    // A complete image whose name ends like that of a part.
    let alone = dir.path().join("alone.001");
    let request = CreateRequest { size_bytes: Some(MIB), format: Some(Format::Vhdx), ..CreateRequest::default() };
    diskwright_disk::create(&alone, &request).unwrap();
    fs::write(dir.path().join("alone.002"), [0; 4096]).unwrap();
    let options = OpenOptions { format: Some(Format::Vhdx), scope: ChainScope::Whole, ..OpenOptions::default() };
    assert_eq!(Disk::open(&alone, &options).unwrap().layers()[0].image.stores().len(), 1);
}
