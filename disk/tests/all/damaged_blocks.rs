//! An invalid table entry damages only its block: the rest of the disk can be read, written,
//! converted and compared.

use diskwright_disk::{
    CompareOutcome, ConvertOptions, CreateRequest, Disk, DiskError, OpenOptions, compare, convert, create,
};
use diskwright_store::{BlockDevice, Blocking, EngineKind, ExtentKind};
use std::{
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::Arc,
};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
const SIZE: u64 = 32 * MIB;

/// A disk with blocks of 1 MiB whose first 16 MiB are filled with 7, and whose entry of block 5 is
/// invalid.
struct Damaged {
    dir: TempDir,
    path: PathBuf,
}

/// Offset of the BAT, and the bytes of an entry far beyond the end of the file.
fn table(path: &Path) -> (u64, Vec<u8>) {
    let bytes = std::fs::read(path).unwrap();
    if path.extension().is_some_and(|extension| extension == "vhdx") {
        return (3 * MIB, (1_u64 << 40 | 6).to_le_bytes().to_vec());
    }
    let field = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap());
    (field(field(16) as usize + 16), 0x7000_0000_u32.to_be_bytes().to_vec())
}

pub fn break_entry(path: &Path, block: u64) {
    let (table, entry) = table(path);
    let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    file.write_all_at(&entry, table + block * entry.len() as u64).unwrap();
}

fn fill(path: &Path, offset_bytes: u64, len_bytes: u64, byte: u8) {
    let disk = open(path, true);
    Blocking::open(&*disk, EngineKind::Sync)
        .unwrap()
        .write(offset_bytes, &vec![byte; len_bytes as usize], false)
        .unwrap();
    disk.close().unwrap();
}

fn open(path: &Path, writable: bool) -> Arc<Disk> {
    Disk::open(path, &OpenOptions { writable, ..OpenOptions::default() }).unwrap()
}

impl Damaged {
    fn new(extension: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(format!("disk.{extension}"));
        let block_bytes = Some(MIB as u32);
        create(&path, &CreateRequest { size_bytes: Some(SIZE), block_bytes, ..CreateRequest::default() }).unwrap();
        fill(&path, 0, 16 * MIB, 7);
        break_entry(&path, 5);
        Self { dir, path }
    }

    fn each(test: impl Fn(&Self)) {
        ["vhdx", "vhd"].into_iter().for_each(|extension| test(&Self::new(extension)));
    }
}

fn assert_reads(disk: &Disk, offset_bytes: u64, len_bytes: u64, byte: u8) {
    let mut found = vec![0xEE; len_bytes as usize];
    Blocking::open(disk, EngineKind::Sync).unwrap().read(offset_bytes, &mut found).unwrap();
    assert!(found.iter().all(|&found| found == byte), "{offset_bytes}");
}

fn read_error(disk: &Disk, offset_bytes: u64, len_bytes: u64) -> String {
    let mut found = vec![0; len_bytes as usize];
    let error = Blocking::open(disk, EngineKind::Sync).unwrap().read(offset_bytes, &mut found).unwrap_err();
    error.to_string()
}

#[test]
fn only_the_damaged_block_fails() {
    Damaged::each(|damaged| {
        for writable in [false, true] {
            let disk = open(&damaged.path, writable);
            assert_reads(&disk, 0, 5 * MIB, 7);
            assert_reads(&disk, 6 * MIB, 10 * MIB, 7);
            assert_reads(&disk, 16 * MIB, 16 * MIB, 0);
            for (offset_bytes, len_bytes) in [(5 * MIB, MIB), (6 * MIB - 512, 512), (5 * MIB - 512, 1024), (0, SIZE)] {
                let told = read_error(&disk, offset_bytes, len_bytes);
                assert!(told.contains("is damaged: found a block") && told.contains("disk.vhd"), "{told}");
            }
            let mut extents = Vec::new();
            disk.extents(0, SIZE, &mut extents).unwrap();
            let wrong: Vec<_> = extents.iter().filter(|extent| extent.kind == ExtentKind::Damaged).collect();
            assert_eq!(wrong.iter().map(|at| (at.offset_bytes, at.len_bytes)).collect::<Vec<_>>(), [(5 * MIB, MIB)]);
        }
    });
}

#[test]
fn with_a_damaged_entry_other_blocks_can_be_overwritten() {
    Damaged::each(|damaged| {
        let disk = open(&damaged.path, true);
        let mut io = Blocking::open(&*disk, EngineKind::Sync).unwrap();
        io.write(4 * MIB, &[9; 4096], false).unwrap();
        for (at, what) in [(5 * MIB, "the damaged block"), (20 * MIB, "a new block")] {
            let told = io.write(at, &[9; 4096], false).unwrap_err().to_string();
            assert!(told.contains("is damaged: found"), "{what}: {told}");
        }
        io.flush().unwrap();
        drop(io);
        disk.close().unwrap();
        drop(disk);
        let disk = open(&damaged.path, false);
        assert_reads(&disk, 4 * MIB, 4096, 9);
        assert_reads(&disk, 4 * MIB + 4096, MIB - 4096, 7);
        assert!(read_error(&disk, 5 * MIB, 512).contains("is damaged"));
    });
}

#[test]
fn damage_in_a_parent_affects_only_blocks_that_the_child_does_not_have() {
    for extension in ["vhdx", "vhd"] {
        let damaged = Damaged::new(extension);
        let child = damaged.dir.path().join(format!("child.{extension}"));
        create(&child, &CreateRequest { parent: Some(damaged.path.clone()), ..CreateRequest::default() }).unwrap();
        fill(&child, 5 * MIB + 4096, 4096, 3);
        let disk = open(&child, false);
        assert_reads(&disk, 5 * MIB + 4096, 4096, 3);
        assert_reads(&disk, 6 * MIB, MIB, 7);
        assert!(read_error(&disk, 5 * MIB, 4096).contains(&format!("disk.{extension}")));
        let mut extents = Vec::new();
        disk.extents(5 * MIB, MIB, &mut extents).unwrap();
        let kinds: Vec<_> = extents.iter().map(|extent| (extent.kind, extent.depth)).collect();
        assert_eq!(kinds, [(ExtentKind::Damaged, 1), (ExtentKind::Data, 0), (ExtentKind::Damaged, 1)]);
    }
}

#[test]
fn a_missing_bitmap_damages_the_blocks_that_need_it() {
    let dir = tempfile::tempdir().unwrap();
    let (base, child) = (dir.path().join("base.vhdx"), dir.path().join("child.vhdx"));
    let block_bytes = Some(MIB as u32);
    create(&base, &CreateRequest { size_bytes: Some(SIZE), block_bytes, ..CreateRequest::default() }).unwrap();
    fill(&base, 0, 16 * MIB, 7);
    create(&child, &CreateRequest { parent: Some(base), ..CreateRequest::default() }).unwrap();
    fill(&child, 2 * MIB, MIB, 3);
    fill(&child, 4 * MIB, 4096, 4);
    break_entry(&child, 4096);
    let disk = open(&child, false);
    let mut extents = Vec::new();
    disk.extents(0, SIZE, &mut extents).unwrap();
    let kinds: Vec<_> = extents.iter().map(|extent| (extent.offset_bytes / MIB, extent.kind)).collect();
    use ExtentKind::{Damaged, Data, Unallocated};
    assert_eq!(kinds, [(0, Data), (2, Data), (3, Data), (4, Damaged), (5, Data), (16, Unallocated)]);
    assert_reads(&disk, 0, 2 * MIB, 7);
    assert_reads(&disk, 2 * MIB, MIB, 3);
    assert_reads(&disk, 5 * MIB, MIB, 7);
    assert!(read_error(&disk, 4 * MIB, 512).contains("BAT entry at offset"));
}

fn converted(damaged: &Damaged, name: &str, skip_damaged: bool) -> Result<diskwright_disk::ConvertOutcome, DiskError> {
    let options = ConvertOptions { skip_damaged, verify: true, ..ConvertOptions::default() };
    convert(&damaged.path, damaged.dir.path().join(name), &options, &mut |_, _| true)
}

#[test]
fn convert_fails_at_the_first_damage_or_skips_it() {
    Damaged::each(|damaged| {
        break_entry(&damaged.path, 6);
        break_entry(&damaged.path, 9);
        let told = converted(damaged, "copy.vhdx", false).unwrap_err();
        assert!(
            matches!(&told, DiskError::DamagedSource { offset_bytes, end_bytes, .. } if (*offset_bytes, *end_bytes) == (5 * MIB, 7 * MIB)),
            "{told}"
        );
        assert!(
            told.to_string().contains("bytes 5242880 to 7340032")
                && told.to_string().contains("`ConvertOptions::skip_damaged`")
        );
        assert!(
            !damaged.dir.path().join("copy.vhdx").exists() && !damaged.dir.path().join("copy.vhdx.partial").exists()
        );
        let done = converted(damaged, "copy.vhdx", true).unwrap();
        let ranges: Vec<_> = done.lost.ranges.iter().map(|range| (range.offset_bytes, range.len_bytes)).collect();
        assert_eq!((ranges, done.lost.bytes), (vec![(5 * MIB, 2 * MIB), (9 * MIB, MIB)], 3 * MIB));
        assert!(done.lost.ranges[0].reason.contains("is damaged: found a block"), "{:?}", done.lost);
        assert_eq!((done.copied_bytes + done.cloned_bytes, done.zero_bytes), (13 * MIB, 16 * MIB));
        assert_eq!(done.verified_bytes, SIZE - 3 * MIB);
        let copy = open(&damaged.dir.path().join("copy.vhdx"), false);
        for (from, to, byte) in [(0, 5, 7), (5, 7, 0), (7, 9, 7), (9, 10, 0), (10, 16, 7), (16, 32, 0)] {
            assert_reads(&copy, from * MIB, (to - from) * MIB, byte);
        }
    });
}

#[test]
fn compare_reports_a_difference_before_the_damage_else_the_damage() {
    Damaged::each(|damaged| {
        converted(damaged, "copy.raw", true).unwrap();
        let copy = damaged.dir.path().join("copy.raw");
        let compared = || {
            let (left, right) = (open(&damaged.path, false), open(&copy, false));
            let sides = [(&*left as &dyn BlockDevice, &*damaged.path), (&*right as &dyn BlockDevice, &*copy)];
            compare(sides, EngineKind::Sync, &mut |_, _| true)
        };
        assert!(matches!(compared(), Err(DiskError::Image(_))), "{:?}", compared());
        fill(&copy, 10 * MIB, 512, 1);
        assert!(matches!(compared(), Err(DiskError::Image(_))), "a difference after the damage: {:?}", compared());
        fill(&copy, 3 * MIB + 512, 512, 1);
        assert_eq!(compared().unwrap(), CompareOutcome::Different { offset_bytes: 3 * MIB + 512 });
    });
}
