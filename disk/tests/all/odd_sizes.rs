//! Unaligned sizes and holes: a raw file that ends within a sector, disks of different lengths,
//! holes that begin and end within sectors.

use diskwright_disk::{CompareOutcome, ConvertOptions, CreateRequest, Disk, OpenOptions, compare, convert, create};
use diskwright_store::{BlockDevice, Blocking, EngineKind};
use std::path::Path;
use tempfile::tempdir;

const MIB: usize = 1 << 20;

fn read(path: &Path) -> Vec<u8> {
    let disk = Disk::open(path, &OpenOptions::default()).unwrap();
    let mut bytes = vec![0xEE; disk.geometry().size_bytes as usize];
    Blocking::open(&*disk, EngineKind::Auto).unwrap().read(0, &mut bytes).unwrap();
    bytes
}

#[test]
fn a_raw_file_that_ends_within_a_sector_is_converted_and_compared() {
    for len in [1, 511, 513, 1000, 4097, 3 * MIB + 700, 66 * MIB + 1] {
        let dir = tempdir().unwrap();
        let source = dir.path().join("a.raw");
        let bytes: Vec<u8> = (0..len).map(|at| (at / 100) as u8 | 1).collect();
        std::fs::write(&source, &bytes).unwrap();
        for name in ["b.vhdx", "b.vhd", "b.raw"] {
            let dest = dir.path().join(name);
            let options = ConvertOptions { verify: true, ..ConvertOptions::default() };
            convert(&source, &dest, &options, &mut |_, _| true)
                .unwrap_or_else(|error| panic!("{len} to {name}: {error}"));
            let found = read(&dest);
            assert_eq!(found.len(), len.next_multiple_of(512));
            assert!(found[..len] == bytes && found[len..].iter().all(|&byte| byte == 0), "{len} to {name}");
        }
        assert_eq!(std::fs::metadata(&source).unwrap().len(), len as u64);
    }
}

#[test]
fn disks_of_different_lengths_are_compared() {
    let dir = tempdir().unwrap();
    let (short, long) = (dir.path().join("short.vhdx"), dir.path().join("long.raw"));
    for (path, size) in [(&short, 3 * MIB), (&long, 40 * MIB)] {
        create(path, &CreateRequest { size_bytes: Some(size as u64), ..CreateRequest::default() }).unwrap();
    }
    let outcome = |a: &Path, b: &Path| {
        let [one, other] = [a, b].map(|path| Disk::open(path, &OpenOptions::default()).unwrap());
        compare([(&*one, a), (&*other, b)], EngineKind::Auto, &mut |_, _| true).unwrap()
    };
    assert_eq!(outcome(&short, &long), CompareOutcome::Same);
    for offset in [3 * MIB, 7 * MIB + 512, 40 * MIB - 512] {
        let disk = Disk::open(&long, &OpenOptions { writable: true, ..OpenOptions::default() }).unwrap();
        let mut io = Blocking::open(&*disk, EngineKind::Auto).unwrap();
        io.write(offset as u64, &[7; 512], false).unwrap();
        drop(io);
        drop(disk);
        let different = CompareOutcome::Different { offset_bytes: offset as u64 };
        assert_eq!((outcome(&short, &long), outcome(&long, &short)), (different, different));
        let disk = Disk::open(&long, &OpenOptions { writable: true, ..OpenOptions::default() }).unwrap();
        Blocking::open(&*disk, EngineKind::Auto).unwrap().write_zeroes(offset as u64, 512).unwrap();
    }
}

fn written(path: &Path, size: usize, at: &[usize]) {
    create(path, &CreateRequest { size_bytes: Some(size as u64), ..CreateRequest::default() }).unwrap();
    let disk = Disk::open(path, &OpenOptions { writable: true, ..OpenOptions::default() }).unwrap();
    let mut io = Blocking::open(&*disk, EngineKind::Auto).unwrap();
    for &offset in at {
        io.write(offset as u64, &[7; 512], false).unwrap();
    }
    drop(io);
    disk.close().unwrap();
}

#[test]
fn small_sectors_are_converted_to_large_ones() {
    let dir = tempdir().unwrap();
    let (parent, child) = (dir.path().join("p.vhd"), dir.path().join("c.vhd"));
    written(&parent, 8 * MIB, &[512, 3 * MIB]);
    create(&child, &CreateRequest { parent: Some(parent), ..CreateRequest::default() }).unwrap();
    let disk = Disk::open(&child, &OpenOptions { writable: true, ..OpenOptions::default() }).unwrap();
    Blocking::open(&*disk, EngineKind::Auto).unwrap().write(3 * MIB as u64 + 1024, &[9; 512], false).unwrap();
    drop(disk);
    let dest = dir.path().join("d.vhdx");
    let mut options = ConvertOptions { verify: true, ..ConvertOptions::default() };
    options.dest.logical_sector_bytes = Some(4096);
    convert(&child, &dest, &options, &mut |_, _| true).unwrap();
    assert!(read(&dest) == read(&child));
}

#[test]
fn a_conversion_into_a_child_hides_the_parent_or_is_refused() {
    for extension in ["vhdx", "vhd"] {
        let dir = tempdir().unwrap();
        let at = |name: &str| dir.path().join(format!("{name}.{extension}"));
        written(&at("source"), 8 * MIB, &[512]);
        written(&at("parent"), 8 * MIB, &[3 * MIB]);
        let mut options = ConvertOptions::default();
        options.dest.parent = Some(at("parent"));
        match convert(at("source"), at("dest"), &options, &mut |_, _| true) {
            Ok(_) => assert!(read(&at("dest")) == read(&at("source")), "the parent's data is visible: {extension}"),
            Err(error) => {
                assert!(error.to_string().contains("parent") && !at("dest").exists(), "{error}");
            }
        }
    }
}

#[test]
fn a_conversion_that_is_stopped_leaves_nothing() {
    let dir = tempdir().unwrap();
    let (source, dest) = (dir.path().join("s.raw"), dir.path().join("d.vhdx"));
    std::fs::write(&source, vec![5; 8 * MIB]).unwrap();
    let options = ConvertOptions { verify: true, ..ConvertOptions::default() };
    // Stopped when the verification begins.
    let mut told = 0;
    let stopped = convert(&source, &dest, &options, &mut |done, all| {
        told += u32::from(done >= all);
        told == 0
    });
    assert!(stopped.is_err() && !dest.exists(), "{stopped:?}");
}

/// Allocated space after writes of zeros over existing data, with and without detection of zeros.
#[test]
fn zeros_are_detected_on_disks_that_are_not_fixed() {
    let dir = tempdir().unwrap();
    let request = CreateRequest { size_bytes: Some(16 * MIB as u64), ..CreateRequest::default() };
    for name in ["a.vhdx", "a.vhd"] {
        let file_bytes = |detect_zeroes: bool| {
            let path = dir.path().join(format!("{detect_zeroes}-{name}"));
            create(&path, &request).unwrap();
            let disk =
                Disk::open(&path, &OpenOptions { writable: true, detect_zeroes, ..OpenOptions::default() }).unwrap();
            let mut io = Blocking::open(&*disk, EngineKind::Auto).unwrap();
            // Whole blocks, parts of blocks, and zeros over data.
            io.write(0, &vec![0; 4 * MIB], false).unwrap();
            io.write(8 * MIB as u64 + 4096, &[0; 8192], false).unwrap();
            io.write(6 * MIB as u64, &[7; 4096], false).unwrap();
            io.write(6 * MIB as u64, &[0; 512], false).unwrap();
            // Only the last byte is not zero.
            let mut nearly = [0; 4096];
            nearly[4095] = 1;
            io.write(12 * MIB as u64, &nearly, true).unwrap();
            drop(io);
            disk.close().unwrap();
            drop(disk);
            let mut expected = vec![0; 16 * MIB];
            expected[6 * MIB + 512..6 * MIB + 4096].fill(7);
            expected[12 * MIB + 4095] = 1;
            assert!(read(&path) == expected, "{name}, detect_zeroes {detect_zeroes}");
            std::fs::metadata(&path).unwrap().len()
        };
        let (stored, spared) = (file_bytes(false), file_bytes(true));
        assert!(spared + 3 * 2 * MIB as u64 <= stored, "{name}: {spared} against {stored}");
    }
}
