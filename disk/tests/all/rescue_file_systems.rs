//! Rescue of disks with real file systems, of whose block table a third is destroyed: blocks that
//! their own structures can place are placed, and none wrongly.

use crate::rescuing::{MIB, Table, folder, image, noise, path_of, rescued, same_as, tool};
use diskwright_disk::{RangeKind, RescueOptions, Rescued};
use diskwright_image::{DiskType, Format};
use std::{collections::BTreeSet, fs, path::Path};

const FORMATS: [Format; 5] = [Format::Vhdx, Format::Vhd, Format::Vdi, Format::Qcow2, Format::Vmdk];
const BLOCK: u64 = MIB;

/// How entries are destroyed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Destroyed {
    Wiped,
    Garbled,
}

/// Destroys every third entry from `first` on. Returns the blocks that had space.
fn destroy(path: &Path, format: Format, first: u64, blocks: u64, how: Destroyed) -> BTreeSet<u64> {
    destroy_these(path, format, (first..blocks).step_by(3), how)
}

/// Destroys these entries. Returns the blocks that had space.
fn destroy_these(path: &Path, format: Format, these: impl Iterator<Item = u64>, how: Destroyed) -> BTreeSet<u64> {
    let mut bytes = fs::read(path).unwrap();
    let table = Table::of(format, &bytes);
    let mut gone = BTreeSet::new();
    for block in these {
        if table.has_space(&bytes, block) {
            gone.insert(block);
        }
        match how {
            Destroyed::Wiped => table.wipe(&mut bytes, block),
            Destroyed::Garbled => table.garble(&mut bytes, block),
        }
    }
    fs::write(path, bytes).unwrap();
    gone
}

/// The blocks that were placed. All of them are among those that were destroyed, and nothing that
/// is called readable is wrong.
#[track_caller]
fn placed(found: &Rescued, copy: &[u8], model: &[u8], gone: &BTreeSet<u64>) -> BTreeSet<u64> {
    same_as(found, copy, model);
    let placed: BTreeSet<u64> = found.placed.iter().map(|placed| placed.offset_bytes / BLOCK).collect();
    assert!(placed.is_subset(gone), "{placed:?} of {gone:?}");
    for block in &placed {
        let at = block * BLOCK;
        let range =
            found.ranges.iter().find(|range| range.offset_bytes <= at && at < range.offset_bytes + range.len_bytes);
        assert!(matches!(range.unwrap().kind, RangeKind::Data), "block {block}");
    }
    placed
}

/// Files from some bytes to some MiB, in folders.
fn files(dir: &Path) {
    for index in 0..160_u64 {
        let folder = dir.join(format!("files/folder{}", index % 9));
        fs::create_dir_all(&folder).unwrap();
        let len = [90, 5_000, 70_000, 300_000][index as usize % 4] + index * 13;
        fs::write(folder.join(format!("file{index}")), noise(index + 1, len)).unwrap();
    }
}

/// Numbers behind a word in the output of dumpe2fs.
fn numbers<'a>(text: &'a str, word: &'a str) -> impl Iterator<Item = u64> + 'a {
    text.split(word).skip(1).filter_map(|rest| rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok())
}

/// Blocks with a copy of the superblock, and blocks with a part of an inode table in which at least
/// two inodes are in use: by dumpe2fs, and by the bytes of the tables.
fn placeable(dir: &Path, model: &[u8], start: u64, block_bytes: u64) -> BTreeSet<u64> {
    let Some(text) = tool(dir, "dumpe2fs fs.raw") else { return BTreeSet::new() };
    let mut blocks = BTreeSet::new();
    for word in ["Primary superblock at ", "Backup superblock at "] {
        blocks.extend(numbers(&text, word).map(|block| (start + block * block_bytes) / BLOCK));
    }
    for line in text.lines().filter(|line| line.trim_start().starts_with("Inode table at ")) {
        let span = line.trim_start().trim_start_matches("Inode table at ");
        let mut ends = span.split(|c: char| !c.is_ascii_digit()).filter_map(|word| word.parse::<u64>().ok());
        let (first, last) = (ends.next().unwrap(), ends.next().unwrap());
        for block in first..=last {
            let at = start + block * block_bytes;
            let bytes = &model[at as usize..(at + block_bytes) as usize];
            if bytes.chunks(256).filter(|inode| inode.iter().any(|byte| *byte != 0)).count() >= 2 {
                blocks.insert(at / BLOCK);
            }
        }
    }
    blocks
}

/// A disk of which half of the blocks hold an ext4, and the others noise without structure.
fn half_ext4(dir: &Path, options: &str, start: u64, size: u64) -> Option<Vec<u8>> {
    files(dir);
    fs::File::create(dir.join("fs.raw")).unwrap().set_len(size).unwrap();
    tool(dir, &format!("mke2fs -q -F -E nodiscard,lazy_itable_init=0 {options} -d files fs.raw"))?;
    let mut model = vec![0; start as usize];
    model.extend(fs::read(dir.join("fs.raw")).unwrap());
    model.extend(noise(99, size));
    Some(model)
}

/// Every block that its own structures can place is placed, none wrongly.
#[test]
fn a_third_of_the_table_is_destroyed() {
    let dir = folder();
    let size = 40 * MIB;
    // Five groups, each with a copy of the superblock and a table of its own.
    let options = "-t ext4 -b 1024 -I 256 -N 360 -O ^flex_bg,^sparse_super,^resize_inode";
    let Some(model) = half_ext4(dir.path(), options, 0, size) else { return };
    let can = placeable(dir.path(), &model, 0, 1024);
    for (format, first, how) in [(Format::Vhdx, 0, Destroyed::Garbled), (Format::Vhd, 2, Destroyed::Wiped)] {
        let what = format!("{format}, from {first}, {how:?}");
        let path = path_of(dir.path(), "disk", format);
        let _ = fs::remove_file(&path);
        image(&path, Some(BLOCK as u32), DiskType::Dynamic, &model);
        let gone = destroy(&path, format, first, model.len() as u64 / BLOCK, how);
        let (found, copy) = rescued(dir.path(), &path, &RescueOptions::default());
        let placed = placed(&found, &copy, &model, &gone);
        let must: BTreeSet<u64> = can.intersection(&gone).copied().collect();
        assert!(must.len() >= 2, "{what}: {must:?}");
        assert!(must.is_subset(&placed), "{what}: {must:?}, placed {placed:?}: {:?}", found.leftovers);
        assert!(placed.iter().all(|&block| block * BLOCK < size), "{what}: noise has no place");
        println!("{what}: {} of {} lost blocks placed, {} had to be", placed.len(), gone.len(), must.len());
    }
}

/// Writes an MBR with one partition.
fn partition(model: &mut [u8], kind: u8, start: u64, size: u64) {
    model[0x1be..0x1c6].copy_from_slice(&[0, 0, 2, 0, kind, 0xff, 0xff, 0xff]);
    model[0x1c6..0x1ca].copy_from_slice(&((start / 512) as u32).to_le_bytes());
    model[0x1ca..0x1ce].copy_from_slice(&((size / 512) as u32).to_le_bytes());
    model[510..512].copy_from_slice(&[0x55, 0xaa]);
}

/// Blocks of 4 KiB with flex_bg, in a partition. What is lost is the partition table (then the file
/// system is found by its own superblock), or the only superblock (then by the partition's size).
#[test]
fn an_ext4_in_a_partition() {
    let dir = folder();
    let size = 40 * MIB;
    let Some(mut model) = half_ext4(dir.path(), "-t ext4 -b 4096 -I 256 -N 8192", MIB, size) else { return };
    partition(&mut model, 0x83, MIB, size);
    let can = placeable(dir.path(), &model, MIB, 4096);
    for (format, first) in [(Format::Vhdx, 0), (Format::Vhdx, 1), (Format::Vhd, 2)] {
        let path = path_of(dir.path(), "disk", format);
        let _ = fs::remove_file(&path);
        image(&path, Some(BLOCK as u32), DiskType::Dynamic, &model);
        let gone = destroy(&path, format, first, model.len() as u64 / BLOCK, Destroyed::Garbled);
        let (found, copy) = rescued(dir.path(), &path, &RescueOptions::default());
        let placed = placed(&found, &copy, &model, &gone);
        let must: BTreeSet<u64> = can.intersection(&gone).copied().collect();
        assert!(must.is_empty() == (first != 1), "{first}: {must:?}");
        assert!(must.is_subset(&placed), "{format}, {first}: {must:?}, placed {placed:?}: {:?}", found.leftovers);
    }
}

/// A child of an ext4: its blocks are placed, and the rest is lost, not its parent's.
#[test]
fn an_ext4_in_a_child() {
    use diskwright_disk::{CreateRequest, create};
    let dir = folder();
    let size = 24 * MIB;
    let Some(model) = half_ext4(dir.path(), "-t ext4 -b 1024 -I 256 -N 4096", 0, size) else { return };
    for format in FORMATS {
        let (parent, child) = (path_of(dir.path(), "parent", format), path_of(dir.path(), "child", format));
        let _ = (fs::remove_file(&parent), fs::remove_file(&child));
        image(&parent, Some(BLOCK as u32), DiskType::Dynamic, &noise(5, model.len() as u64));
        create(&child, &CreateRequest { parent: Some(parent), ..CreateRequest::default() }).unwrap();
        crate::rescuing::write_all(&child, &model);
        let gone = destroy(&child, format, 0, model.len() as u64 / BLOCK, Destroyed::Wiped);
        let (found, copy) = rescued(dir.path(), &child, &RescueOptions::default());
        let placed = placed(&found, &copy, &model, &gone);
        assert!(!placed.is_empty(), "{format}: {placed:?} of {gone:?}");
        assert_eq!(found.lost_bytes, (gone.len() - placed.len()) as u64 * BLOCK, "{format}");
        if format == Format::Vhdx {
            // Without the entry of the bitmap block nothing says which sectors are the parent's.
            let mut bytes = fs::read(&child).unwrap();
            let table = Table::of(format, &bytes);
            table.wipe(&mut bytes, 4096);
            fs::write(&child, bytes).unwrap();
            let (found, copy) = rescued(dir.path(), &child, &RescueOptions::default());
            same_as(&found, &copy, &model);
            assert!(found.placed.is_empty(), "{:?}", found.placed);
        }
    }
}

/// Makes a file system with files in `fs.raw` by mounting it. `false` if that is not possible here.
fn mounted(dir: &Path, size: u64, mkfs: &str, mount: &str) -> bool {
    fs::File::create(dir.join("fs.raw")).unwrap().set_len(size).unwrap();
    if !nix::unistd::geteuid().is_root() || tool(dir, mkfs).is_none() {
        println!("skipped: {mkfs}");
        return false;
    }
    fs::create_dir_all(dir.join("mnt")).unwrap();
    files(dir);
    if tool(dir, &format!("{mount} fs.raw mnt")).is_none() {
        return false;
    }
    let copied = std::panic::catch_unwind(|| tool(dir, "cp -r files mnt/"));
    tool(dir, "umount mnt");
    copied.is_ok()
}

/// A journal holds copies of inode tables and directories, whose checksums are right and whose
/// place is wrong. None of them places a block.
#[test]
fn copies_in_a_journal_place_nothing() {
    let dir = folder();
    let size = 64 * MIB;
    if !mounted(
        dir.path(),
        size,
        "mkfs.ext4 -q -F -b 1024 -I 256 -N 2048 -J size=16 fs.raw",
        "mount -o loop,data=journal",
    ) {
        return;
    }
    let model = fs::read(dir.path().join("fs.raw")).unwrap();
    let headers = model.chunks(1024).filter(|block| block.starts_with(&[0xc0, 0x3b, 0x39, 0x98])).count();
    assert!(headers > 20, "the journal was used: {headers}");
    let can = placeable(dir.path(), &model, 0, 1024);
    // Both the journal and what it has copies of are lost, in one run: a copy has room at a wrong
    // place.
    let lost = 0..size / BLOCK * 3 / 4;
    for format in FORMATS {
        let path = path_of(dir.path(), "disk", format);
        image(&path, Some(BLOCK as u32), DiskType::Dynamic, &model);
        let gone = destroy_these(&path, format, lost.clone(), Destroyed::Wiped);
        let (found, copy) = rescued(dir.path(), &path, &RescueOptions::default());
        let placed = placed(&found, &copy, &model, &gone);
        let must: BTreeSet<u64> = can.intersection(&gone).copied().collect();
        assert!(must.is_subset(&placed), "{format}: {must:?}, placed {placed:?}: {:?}", found.leftovers);
        fs::remove_file(path).unwrap();
    }
}

/// XFS: every block of its metadata states its own address.
#[test]
fn an_xfs() {
    let dir = folder();
    let size = 320 * MIB;
    if !mounted(dir.path(), size, "mkfs.xfs -q -f -K fs.raw", "mount -o loop") {
        return;
    }
    let model = fs::read(dir.path().join("fs.raw")).unwrap();
    // Headers of groups and inodes in use, by their signatures.
    let mut can: BTreeSet<u64> = BTreeSet::new();
    for (index, unit) in model.chunks(512).enumerate() {
        let is_group = unit.starts_with(b"XAGF");
        let is_directory = unit.starts_with(b"XDB3") || unit.starts_with(b"XDD3");
        if is_group || is_directory || (unit.starts_with(b"IN") && unit[4] == 3) {
            can.insert(index as u64 * 512 / BLOCK);
        }
    }
    for (format, first) in [(Format::Vhdx, 1), (Format::Vhd, 2)] {
        let path = path_of(dir.path(), "disk", format);
        image(&path, Some(BLOCK as u32), DiskType::Dynamic, &model);
        let gone = destroy(&path, format, first, size / BLOCK, Destroyed::Garbled);
        let (found, copy) = rescued(dir.path(), &path, &RescueOptions::default());
        let placed = placed(&found, &copy, &model, &gone);
        let must: BTreeSet<u64> = can.intersection(&gone).copied().collect();
        assert!(!must.is_empty() && must.is_subset(&placed), "{format}: {must:?}, placed {placed:?}");
        fs::remove_file(path).unwrap();
    }
}

/// NTFS: records of the MFT have their numbers.
#[test]
fn an_ntfs() {
    let dir = folder();
    let size = 96 * MIB;
    if !mounted(dir.path(), size, "mkntfs -F -Q -q -p 0 -H 0 -S 0 -s 512 fs.raw", "ntfs-3g") {
        return;
    }
    // The MFT lies across the first boundary of two blocks.
    let start = 900 << 10;
    let mut model = vec![0; start as usize];
    model.extend(fs::read(dir.path().join("fs.raw")).unwrap());
    model.resize((size + MIB) as usize, 0);
    partition(&mut model, 7, start, size);
    let mut counts = std::collections::BTreeMap::<u64, u64>::new();
    for (index, record) in model.chunks(1024).enumerate() {
        let number = u32::from_le_bytes(record[0x2c..0x30].try_into().unwrap());
        if record.starts_with(b"FILE") && number > 3 {
            *counts.entry(index as u64 * 1024 / BLOCK).or_default() += 1;
        }
    }
    let can: Vec<u64> = counts.iter().filter(|(_, count)| **count >= 2).map(|(block, _)| *block).collect();
    let mut tried = 0;
    for format in FORMATS {
        for first in 1..3 {
            let path = path_of(dir.path(), "disk", format);
            image(&path, Some(BLOCK as u32), DiskType::Dynamic, &model);
            // The first record of the MFT says where the others are.
            let gone = destroy(&path, format, first, 1 + size / BLOCK, Destroyed::Wiped);
            let (found, copy) = rescued(dir.path(), &path, &RescueOptions::default());
            let placed = placed(&found, &copy, &model, &gone);
            fs::remove_file(path).unwrap();
            let mft = model.chunks(1024).position(|record| record.starts_with(b"FILE")).unwrap() as u64 * 1024 / BLOCK;
            let must = can.iter().filter(|block| gone.contains(block) && !gone.contains(&mft));
            for block in must {
                assert!(placed.contains(block), "{format}: {block} of {placed:?}: {:?}", found.leftovers);
                tried += 1;
            }
        }
    }
    assert!(tried > 0, "no block of the MFT was destroyed");
}
