//! Real file systems on disks whose every sector holds garbage before.

use crate::lab::{Kind, Lab, MIB, blocks_with_space, compacted, have, read_all};
use diskwright_disk::{
    Disk, OpenOptions,
    volume::{ReadAt, free_ranges, volumes},
};
use diskwright_image::Format;
use std::{
    collections::BTreeMap,
    fs, io,
    ops::{ControlFlow, Range},
    path::{Path, PathBuf},
    process::Command,
    thread::sleep,
    time::Duration,
};

/// Reads a whole chain with libvhdi. Arguments: the path of the copy, then the images from the base
/// to the top.
const LIBVHDI: &str = include_str!("../../../proof/proving/src/chain_by_libvhdi.py");

const DYNAMIC: [Kind; 2] = [Kind::Dynamic(Format::Vhdx), Kind::Dynamic(Format::Vhd)];
const CHILDREN: [Kind; 4] = [
    Kind::OverGarbage(Format::Vhdx),
    Kind::OverGarbage(Format::Vhd),
    Kind::OverNothing(Format::Vhdx),
    Kind::OverNothing(Format::Vhd),
];

/// Files with their contents, by path.
type Files = BTreeMap<PathBuf, Vec<u8>>;

/// The bytes of a raw disk.
struct Bytes(Vec<u8>);

impl ReadAt for Bytes {
    fn size_bytes(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_at(&self, offset_bytes: u64, buf: &mut [u8]) -> io::Result<()> {
        let start = offset_bytes as usize;
        buf.copy_from_slice(&self.0[start..start + buf.len()]);
        Ok(())
    }
}

/// A file system: how it is made in `disk.raw`, checked, and its files taken out.
struct FileSystem<'a> {
    name: &'a str,
    size_mib: u64,
    tools: &'a [&'a str],
    /// Makes and fills it. `false` if that is not possible here.
    make: &'a dyn Fn(&Lab) -> bool,
    /// The line that checks the file `back.raw`.
    check: &'a str,
    /// The files in a raw file.
    files: &'a dyn Fn(&Lab, &str) -> Files,
}

impl FileSystem<'_> {
    fn prove(&self, kinds: &[Kind]) {
        if !have(self.name, self.tools) {
            return;
        }
        let lab = Lab::new();
        let garbage: Vec<u8> = (0..self.size_mib * MIB / 8).flat_map(|at| (at | 1 << 60).to_le_bytes()).collect();
        fs::write(lab.path("disk.raw"), &garbage).unwrap();
        drop(garbage);
        if !(self.make)(&lab) {
            return println!("skipped: {}: it cannot be mounted here", self.name);
        }
        let raw = Bytes(fs::read(lab.path("disk.raw")).unwrap());
        fs::write(lab.path("back.raw"), &raw.0).unwrap();
        lab.run(self.check);
        let before = (self.files)(&lab, "disk.raw");
        let free = free_of(&raw);
        for &kind in kinds {
            let path = kind.make(&lab, &raw.0);
            let done = compacted(&path);
            let what = format!("{}, {kind:?}", self.name);
            let hides_no_parent = kind == Kind::OverGarbage(Format::Vhd);
            let unneeded = (0..raw.0.len() as u64 / done.block_bytes)
                .filter(|block| is_free(&free, block * done.block_bytes..(block + 1) * done.block_bytes))
                .count() as u64;
            assert!(unneeded > 10, "{what}: {unneeded} blocks are free");
            if hides_no_parent {
                assert_eq!((done.free_bytes, done.zero_bytes), (0, 0), "{what}");
            } else {
                assert_eq!(done.free_bytes, unneeded * done.block_bytes, "{what}: {:?}", done.volumes);
                let blocks = blocks_with_space(&Disk::open(&path, &OpenOptions::default()).unwrap());
                assert!(blocks + unneeded <= raw.0.len() as u64 / done.block_bytes, "{what}");
                assert!(done.moved_bytes > 0, "{what}: the last blocks are in use, and some before them are free");
            }
            let back = read_all(&path);
            same_but_for(&back, &raw.0, &free, &what);
            fs::write(lab.path("back.raw"), &back).unwrap();
            lab.run(self.check);
            assert!((self.files)(&lab, "back.raw") == before, "{what}: the files have changed");
            assert!(compacted(&path).free_bytes == 0, "{what}: once is enough");
            second_opinion(&lab, kind, &path, &raw.0, &free, &what);
            fs::remove_file(path).unwrap();
        }
    }
}

fn second_opinion(lab: &Lab, kind: Kind, path: &Path, raw: &[u8], free: &[Range<u64>], what: &str) {
    let format = kind.format();
    if matches!(kind, Kind::Dynamic(_)) {
        if have(what, &["qemu-img"]) {
            let name = if format == Format::Vhd { "vpc" } else { "vhdx" };
            if format == Format::Vhdx {
                lab.run(&format!("qemu-img check -q -f {name} {}", path.display()));
            }
            lab.run(&format!("qemu-img convert -f {name} -O raw {} theirs.raw", path.display()));
            let theirs = fs::read(lab.path("theirs.raw")).unwrap();
            same_but_for(&theirs, raw, free, &format!("{what}, read by qemu-img"));
        }
        return;
    }
    if format == Format::Vhdx {
        // libvhdi 20210425 reads the start of the file where a block of a child is ZERO.
        return;
    }
    let paths = [lab.path("theirs.raw"), lab.path(&format!("parent.{format}")), path.to_owned()];
    let output = Command::new("/usr/bin/python3").args(["-c", LIBVHDI]).args(paths).output().unwrap();
    if output.status.code() == Some(77) {
        return println!("skipped: {what}: python3-libvhdi is not installed");
    }
    assert!(output.status.success(), "{what}: {}", String::from_utf8_lossy(&output.stderr));
    let theirs = fs::read(lab.path("theirs.raw")).unwrap();
    same_but_for(&theirs, raw, free, &format!("{what}, read by libvhdi"));
}

fn free_of(raw: &Bytes) -> Vec<Range<u64>> {
    let mut free = Vec::new();
    for volume in volumes(raw).volumes {
        let found = free_ranges(raw, &volume, &mut |range| {
            free.push(range);
            ControlFlow::Continue(())
        });
        found.unwrap_or_else(|reason| panic!("{}: {reason}", volume.name()));
    }
    free
}

/// Whether the range lies in one of the free ranges.
fn is_free(free: &[Range<u64>], range: Range<u64>) -> bool {
    free.iter().any(|free| free.start <= range.start && range.end <= free.end)
}

#[track_caller]
fn same_but_for(found: &[u8], expected: &[u8], free: &[Range<u64>], what: &str) {
    assert!(found.len() >= expected.len(), "{what}: {} bytes of {}", found.len(), expected.len());
    let mut at = 0;
    let end = expected.len() as u64;
    for free in free.iter().chain([&(end..end)]) {
        let used = at as usize..free.start as usize;
        if let Some(within) = found[used.clone()].iter().zip(&expected[used.clone()]).position(|(a, b)| a != b) {
            panic!("{what}: byte {} has changed, and it is in use", used.start + within);
        }
        at = free.end;
    }
}

/// All files below a folder.
fn tree(folder: &Path) -> Files {
    let mut found = BTreeMap::new();
    let mut todo = vec![folder.to_owned()];
    while let Some(next) = todo.pop() {
        for entry in fs::read_dir(&next).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                todo.push(path);
            } else {
                found.insert(path.strip_prefix(folder).unwrap().to_owned(), fs::read(&path).unwrap());
            }
        }
    }
    found
}

/// Contents of the file with this number: from some KiB to 5 MiB.
fn contents(index: u64) -> Vec<u8> {
    let len = [3_000, 100_000, 1_500_000, 5_000_000][index as usize % 4] + index * 517;
    (0..len).map(|at| (at.wrapping_mul(2_654_435_761) >> (index % 23)) as u8 ^ index as u8).collect()
}

/// Mounts a raw file, and calls `work` with the folder.
fn mounted(lab: &Lab, options: &str, image: &str, work: impl FnOnce(&Path)) -> bool {
    let point = lab.path("mount");
    fs::create_dir_all(&point).unwrap();
    let (success, text) = lab.try_run(&format!("mount -o loop{options} {image} mount"));
    if !success {
        println!("mount: {text}");
        return false;
    }
    work(&point);
    for _ in 0..50 {
        if lab.try_run("umount mount").0 {
            return true;
        }
        sleep(Duration::from_millis(100));
    }
    lab.run("umount mount");
    true
}

/// Files of which some are deleted when all are written.
fn fill_and_delete(folder: &Path) {
    (0..32).for_each(|index| fs::write(folder.join(format!("file{index}")), contents(index)).unwrap());
    nix::unistd::sync();
    (0..32).filter(|index| index % 3 != 0).for_each(|index| {
        fs::remove_file(folder.join(format!("file{index}"))).unwrap();
    });
}

fn files_by_mount(lab: &Lab, options: &str, image: &str) -> Files {
    let mut files = BTreeMap::new();
    assert!(mounted(lab, options, image, |folder| files = tree(folder)));
    files
}

/// ext4 without a mount: filled by mke2fs, and files deleted by debugfs.
fn make_ext(lab: &Lab, options: &str) -> bool {
    let folder = lab.path("files");
    fs::create_dir_all(&folder).unwrap();
    (0..32).for_each(|index| fs::write(folder.join(format!("file{index}")), contents(index)).unwrap());
    lab.run(&format!("mke2fs -q -F -E nodiscard {options} -d files disk.raw"));
    let gone: String = (0..32).filter(|index| index % 3 != 0).map(|index| format!("rm file{index}\n")).collect();
    fs::write(lab.path("commands"), gone).unwrap();
    lab.run("debugfs -w -f commands disk.raw");
    true
}

fn files_by_debugfs(lab: &Lab, image: &str) -> Files {
    let _ = fs::remove_dir_all(lab.path("out"));
    fs::create_dir(lab.path("out")).unwrap();
    fs::write(lab.path("commands"), "rdump / out\n").unwrap();
    lab.run(&format!("debugfs -f commands {image}"));
    let mut files = tree(&lab.path("out"));
    files.retain(|path, _| !path.starts_with("lost+found"));
    files
}

fn prove_ext(name: &str, options: &str, kinds: &[Kind]) {
    FileSystem {
        name,
        size_mib: 160,
        tools: &["mke2fs", "debugfs", "e2fsck"],
        make: &|lab| make_ext(lab, options),
        check: "e2fsck -fn back.raw",
        files: &files_by_debugfs,
    }
    .prove(kinds);
}

#[test]
fn ext4_in_disks_without_a_parent() {
    prove_ext("ext4", "-t ext4", &DYNAMIC);
}

#[test]
fn ext4_in_children() {
    prove_ext("ext4", "-t ext4", &CHILDREN);
}

#[test]
fn ext4_with_other_features() {
    prove_ext("ext4, meta_bg", "-t ext4 -b 1024 -O meta_bg,^resize_inode", &DYNAMIC[..1]);
    prove_ext("ext4, bigalloc", "-t ext4 -O bigalloc -C 65536", &DYNAMIC[..1]);
    prove_ext("ext3", "-t ext3", &DYNAMIC[1..]);
    prove_ext("ext4, old", "-t ext4 -O ^64bit,^flex_bg,^metadata_csum,uninit_bg", &DYNAMIC[1..]);
}

#[test]
fn ntfs() {
    FileSystem {
        name: "ntfs",
        size_mib: 160,
        tools: &["mkfs.ntfs", "ntfscp", "ntfscat", "ntfsfix"],
        make: &|lab| {
            lab.run("mkfs.ntfs -F -Q -q -p 0 -H 0 -S 0 -s 512 disk.raw");
            for index in (0..32).step_by(3) {
                fs::write(lab.path("file"), contents(index)).unwrap();
                lab.run(&format!("ntfscp -f disk.raw file file{index}"));
            }
            true
        },
        check: "ntfsfix -n back.raw",
        files: &|lab, image| {
            let names = (0..32).step_by(3).map(|index| format!("file{index}"));
            names
                .map(|name| {
                    let output = Command::new("ntfscat").arg(lab.path(image)).arg(&name).output();
                    (PathBuf::from(&name), output.unwrap().stdout)
                })
                .collect()
        },
    }
    .prove(&[DYNAMIC[0], DYNAMIC[1], CHILDREN[0], CHILDREN[3]]);
}

#[test]
fn xfs() {
    FileSystem {
        name: "xfs",
        size_mib: 320,
        tools: &["mkfs.xfs", "xfs_repair"],
        make: &|lab| {
            lab.run("mkfs.xfs -q -K -f disk.raw");
            mounted(lab, "", "disk.raw", fill_and_delete)
        },
        check: "xfs_repair -n -f back.raw",
        files: &|lab, image| files_by_mount(lab, ",ro,nouuid", image),
    }
    .prove(&[DYNAMIC[0], CHILDREN[3]]);
}

#[test]
fn btrfs() {
    FileSystem {
        name: "btrfs",
        size_mib: 320,
        tools: &["mkfs.btrfs", "btrfs"],
        make: &|lab| {
            lab.run("mkfs.btrfs -q -K -f disk.raw");
            mounted(lab, "", "disk.raw", fill_and_delete)
        },
        check: "btrfs check --check-data-csum back.raw",
        files: &|lab, image| files_by_mount(lab, ",ro", image),
    }
    .prove(&[DYNAMIC[1], CHILDREN[0]]);
}

#[test]
fn fat() {
    FileSystem {
        name: "fat",
        size_mib: 160,
        tools: &["mkfs.fat", "fsck.fat", "mcopy", "mdel"],
        make: &|lab| {
            lab.run("mkfs.fat -F 32 disk.raw");
            for index in 0..32 {
                fs::write(lab.path("file"), contents(index)).unwrap();
                lab.run(&format!("mcopy -i disk.raw file ::file{index}"));
            }
            for index in (0..32).filter(|index| index % 3 != 0) {
                lab.run(&format!("mdel -i disk.raw ::file{index}"));
            }
            true
        },
        check: "fsck.fat -n back.raw",
        files: &|lab, image| {
            let names = (0..32).step_by(3).map(|index| format!("file{index}"));
            names
                .map(|name| {
                    lab.run(&format!("mcopy -n -o -i {image} ::{name} out"));
                    (PathBuf::from(&name), fs::read(lab.path("out")).unwrap())
                })
                .collect()
        },
    }
    .prove(&[DYNAMIC[0], CHILDREN[0]]);
}

/// No tool writes files into an exFAT without mounting it, which this kernel may not do.
#[test]
fn exfat() {
    FileSystem {
        name: "exfat",
        size_mib: 160,
        tools: &["mkfs.exfat", "fsck.exfat"],
        make: &|lab| {
            lab.run("mkfs.exfat disk.raw");
            true
        },
        check: "fsck.exfat -n back.raw",
        files: &|_, _| BTreeMap::new(),
    }
    .prove_without_moves();
}

impl FileSystem<'_> {
    /// For an empty file system: its blocks lie together at the start, and none moves.
    fn prove_without_moves(&self) {
        if !have(self.name, self.tools) {
            return;
        }
        let lab = Lab::new();
        fs::write(lab.path("disk.raw"), vec![0xa5; (self.size_mib * MIB) as usize]).unwrap();
        assert!((self.make)(&lab));
        let raw = Bytes(fs::read(lab.path("disk.raw")).unwrap());
        let free = free_of(&raw);
        let path = DYNAMIC[0].make(&lab, &raw.0);
        assert!(compacted(&path).free_bytes > 100 * MIB);
        let back = read_all(&path);
        same_but_for(&back, &raw.0, &free, self.name);
        fs::write(lab.path("back.raw"), &back).unwrap();
        lab.run(self.check);
    }
}

/// A partition whose contents are unknown, one that is in use, and one that is not.
#[test]
fn partitions_are_judged_one_by_one() {
    if !have("partitions", &["sfdisk", "mke2fs", "debugfs", "e2fsck"]) {
        return;
    }
    let lab = Lab::new();
    fs::write(lab.path("disk.raw"), vec![0xa5; 128 * MIB as usize]).unwrap();
    fs::write(lab.path("table"), "label: gpt\nsize=40M\nsize=40M\nsize=40M\n").unwrap();
    let table = fs::File::open(lab.path("table")).unwrap();
    let status = Command::new("/usr/sbin/sfdisk")
        .args(["-q", "--wipe", "never", "disk.raw"])
        .current_dir(lab.path(""))
        .stdin(table)
        .status();
    assert!(status.unwrap().success());
    lab.run("mke2fs -q -F -t ext4 -E nodiscard,offset=1048576 disk.raw 40M");
    lab.run("mke2fs -q -F -t ext4 -E nodiscard,offset=42991616 disk.raw 40M");
    // The second one was not unmounted: its journal has to be replayed.
    fs::write(lab.path("commands"), "feature needs_recovery\n").unwrap();
    lab.run("debugfs -w -f commands disk.raw?offset=42991616");
    let raw = fs::read(lab.path("disk.raw")).unwrap();
    let path = DYNAMIC[0].make(&lab, &raw);
    let done = compacted(&path);
    let told: Vec<(u64, bool)> =
        done.volumes.iter().map(|gain| (gain.given_back_bytes, gain.volume.free_bytes.is_ok())).collect();
    assert!(told[0].0 > 25 * MIB && told[0].1, "{told:?}");
    assert_eq!((told[1].1, told[2]), (false, (0, false)), "{:?}", done.volumes);
    let back = read_all(&path);
    // Blocks that hold the end of the first partition count for both.
    assert!(back[42 << 20..] == raw[42 << 20..], "what is left alone has changed");
    fs::write(lab.path("first.raw"), &back[1 << 20..41 << 20]).unwrap();
    lab.run("e2fsck -fn first.raw");
}
