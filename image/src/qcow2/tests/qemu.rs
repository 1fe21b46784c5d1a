//! Images by qemu-img and qemu-io with every option, read by us and by qemu-img. Each test prints
//! that it was skipped if its tool is not installed.

use super::*;
use diskwright_store::{FileStore, OpenOptions};
use std::{
    io,
    path::{Path, PathBuf},
    process::{Command, Output},
};
use tempfile::TempDir;

/// Runs a tool, or prints the name of a missing tool.
pub(super) fn tool(name: &str, arguments: &[&str]) -> Option<Output> {
    match Command::new(name).args(arguments).output() {
        Ok(output) => Some(output),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            eprintln!("skipped: {name} is not installed");
            None
        }
        Err(error) => panic!("{name}: {error}"),
    }
}

/// Runs a tool that must succeed. `None` if it is missing.
fn run(name: &str, arguments: &[&str]) -> Option<()> {
    let output = tool(name, arguments)?;
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && !text.contains("verification failed"), "{name} {arguments:?}: {text}");
    Some(())
}

/// Runs one command of qemu-io on an image; it must succeed. `None` without the tool.
pub(super) fn wrote(path: &Path, command: &str) -> Option<()> {
    run("qemu-io", &["-f", "qcow2", "-c", command, path.to_str()?])
}

pub(super) fn store(path: &Path) -> Arc<dyn Store> {
    Arc::new(FileStore::open(path, &OpenOptions::default()).unwrap())
}

pub(super) fn store_for_writing(path: &Path) -> Arc<dyn Store> {
    Arc::new(FileStore::open(path, &OpenOptions { writable: true, ..OpenOptions::default() }).unwrap())
}

pub(super) struct QemuImage {
    folder: TempDir,
    pub(super) path: PathBuf,
}

impl QemuImage {
    /// An image of `size` with these options and qemu-io commands. `None` without the tools.
    pub(super) fn new(options: &str, size: &str, commands: &[&str]) -> Option<Self> {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("disk.qcow2");
        let text = path.to_str()?;
        let options = options.replace("FOLDER", folder.path().to_str()?);
        run("qemu-img", &["create", "-q", "-f", "qcow2", "-o", &options, text, size])?;
        let made = Self { folder, path };
        made.io(commands)?;
        Some(made)
    }

    pub(super) fn text(&self) -> &str {
        self.path.to_str().unwrap()
    }

    fn io(&self, commands: &[&str]) -> Option<()> {
        if commands.is_empty() {
            return Some(());
        }
        let commands = commands.iter().flat_map(|command| ["-c", command]);
        let arguments: Vec<&str> = ["-f", "qcow2"].into_iter().chain(commands).chain([self.text()]).collect();
        run("qemu-io", &arguments)
    }

    /// The image, and its data file if it has one.
    fn files(&self) -> impl Iterator<Item = PathBuf> {
        [self.path.clone(), self.folder.path().join("disk.data")].into_iter().filter(|path| path.exists())
    }

    fn open(&self, snapshot: Option<&str>) -> Qcow2Image {
        open(self.files().map(|path| store(&path)).collect(), false, snapshot).unwrap()
    }

    /// The disk as qemu-img reads it.
    pub(super) fn by_qemu(&self, more: &[&str]) -> Vec<u8> {
        let raw = self.folder.path().join("disk.raw");
        let arguments =
            [&["convert", "-f", "qcow2", "-O", "raw"], more, &[self.text(), raw.to_str().unwrap()]].concat();
        run("qemu-img", &arguments).unwrap();
        std::fs::read(raw).unwrap()
    }

    fn assert_same(&self, what: &str) {
        let (ours, theirs) = (contents(&self.open(None)).unwrap(), self.by_qemu(&[]));
        assert_eq!(ours.len(), theirs.len(), "{what}");
        let differs = ours.iter().zip(&theirs).position(|(one, other)| one != other);
        assert_eq!(differs, None, "{what}: the first byte that differs");
        assert!(theirs.iter().any(|&byte| byte != 0), "{what}: the disk is empty");
        let stores: Vec<_> = self.files().map(|path| Some(store(&path))).collect();
        let report = super::super::examine(&stores, false).unwrap().report;
        assert!(report.findings.is_empty(), "{what}: {:?}", report.findings);
    }
}

/// Writes of every kind, into a disk of 6 MiB and more.
pub(super) const WRITES: [&str; 9] = [
    "write -P 0x11 0 64k",
    "write -P 0x22 100k 300k",
    "write -P 0x33 1536 512",
    "write -P 0x44 2M 1M",
    "write -z 2200k 100k",
    "write -z -u 2500k 200k",
    "discard 3000k 40k",
    "write -P 0x55 5000k 3k",
    "write -P 0x66 6143k 1k",
];

#[test]
fn every_option_of_qemu_img() {
    let mut count = 0;
    for options in [
        "compat=0.10",
        "compat=0.10,cluster_size=512",
        "compat=1.1",
        "cluster_size=512",
        "cluster_size=4k",
        "cluster_size=2M",
        "refcount_bits=1",
        "refcount_bits=2",
        "refcount_bits=4",
        "refcount_bits=8",
        "refcount_bits=32",
        "refcount_bits=64,cluster_size=1k",
        "lazy_refcounts=on",
        "extended_l2=on",
        "extended_l2=on,cluster_size=16k",
        "extended_l2=on,cluster_size=2M",
        "preallocation=metadata",
        "preallocation=metadata,extended_l2=on",
        "preallocation=falloc",
        "preallocation=full",
        "compression_type=zstd",
        "data_file=FOLDER/disk.data",
        "data_file=FOLDER/disk.data,data_file_raw=on",
        "data_file=FOLDER/disk.data,extended_l2=on,cluster_size=32k",
    ] {
        let Some(made) = QemuImage::new(options, "6M", &WRITES) else { return };
        made.assert_same(options);
        count += 1;
    }
    assert_eq!(count, 24);
}

#[test]
fn compressed_clusters() {
    for options in [
        "cluster_size=512",
        "cluster_size=4k",
        "compat=0.10",
        "cluster_size=2M",
        "compression_type=zstd",
        "compression_type=zstd,cluster_size=2M",
        "compression_type=zstd,cluster_size=512",
        "compression_type=zlib,extended_l2=on",
    ] {
        let Some(source) = QemuImage::new("compat=1.1", "6M", &WRITES) else { return };
        // Incompressible data, and text.
        let mut bytes = source.by_qemu(&[]);
        let mut state = 1u64;
        for byte in &mut bytes[4 << 20..(4 << 20) + 200_000] {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            *byte = (state >> 56) as u8;
        }
        let text = b"all work and no play ".iter().cycle();
        bytes[5 << 20..(5 << 20) + 100_000].iter_mut().zip(text).for_each(|(byte, letter)| *byte = *letter);
        let raw = source.folder.path().join("source.raw");
        std::fs::write(&raw, &bytes).unwrap();
        let arguments = ["convert", "-c", "-O", "qcow2", "-o", options, raw.to_str().unwrap(), source.text()];
        run("qemu-img", &arguments).unwrap();
        source.assert_same(options);
        let image = source.open(None);
        let mut states = vec![BlockState::Absent; 4 << 20 >> image.info().block_bytes.trailing_zeros()];
        image.block_states(0, &mut states).unwrap();
        assert!(states.contains(&BlockState::Compressed), "{options}");
        drop(image);
        // Written in place after that.
        source.io(&["write -P 0x77 10k 1k", "write -P 0x78 2047k 2M"]).unwrap();
        source.assert_same(options);
    }
}

#[test]
fn internal_snapshots() {
    for options in ["compat=1.1", "compat=0.10", "extended_l2=on", "refcount_bits=64,cluster_size=512"] {
        let Some(made) = QemuImage::new(options, "6M", &WRITES) else { return };
        run("qemu-img", &["snapshot", "-c", "first", made.text()]).unwrap();
        let first = made.by_qemu(&[]);
        made.io(&["write -P 0x99 0 3M"]).unwrap();
        run("qemu-img", &["snapshot", "-c", "2nd \"one\"", made.text()]).unwrap();
        made.io(&["write -P 0xaa 1M 3M"]).unwrap();
        made.assert_same(options);
        assert!(contents(&made.open(Some("first"))).unwrap() == first, "{options}");
        assert!(contents(&made.open(Some("1"))).unwrap() == first, "{options}");
        let second = made.by_qemu(&["-l", "snapshot.id=2"]);
        assert!(contents(&made.open(Some("2nd \"one\""))).unwrap() == second, "{options}");
        assert!(first != second);
        let told = open(vec![store(&made.path)], false, Some("3")).map(drop).unwrap_err().to_string();
        assert!(told.contains("1 (\"first\"), 2 (\"2nd"), "{told}");
    }
}

#[test]
fn a_snapshot_keeps_the_size_that_the_disk_had() {
    let Some(made) = QemuImage::new("compat=1.1", "6M", &WRITES) else { return };
    run("qemu-img", &["snapshot", "-c", "small", made.text()]).unwrap();
    run("qemu-img", &["resize", "-q", made.text(), "9M"]).unwrap();
    assert_eq!((made.open(None).size_bytes(), made.open(Some("small")).size_bytes()), (9 << 20, 6 << 20));
}

#[test]
fn bitmaps_are_listed() {
    let Some(made) = QemuImage::new("compat=1.1", "6M", &[]) else { return };
    run("qemu-img", &["bitmap", "--add", "-g", "4096", made.text(), "daily"]).unwrap();
    run("qemu-img", &["bitmap", "--add", "--disable", made.text(), "weekly"]).unwrap();
    made.io(&WRITES).unwrap();
    made.assert_same("bitmaps");
    let image = made.open(None);
    let bitmaps = image.layout.bitmaps.as_ref().unwrap();
    let told: Vec<_> = bitmaps.iter().map(|one| (one.name.as_str(), one.granularity_bits, one.is_auto)).collect();
    assert_eq!(told, [("daily", 12, true), ("weekly", 16, false)]);
}

#[test]
fn a_disk_larger_than_one_l2_table() {
    let Some(made) = QemuImage::new(
        "cluster_size=512",
        "10G",
        &["write -P 1 0 1k", "write -P 2 5G 700", "write -P 3 10737417728 512"],
    ) else {
        return;
    };
    let image = made.open(None);
    let block_of = |offset: u64| offset / 512;
    assert_eq!(image.next_block(2, u64::MAX).unwrap(), Some(block_of(5 << 30)));
    assert_eq!(image.next_block(block_of(5 << 30) + 2, u64::MAX).unwrap(), Some(block_of(10 << 30) - 1));
    assert_eq!(image.next_block(block_of(5 << 30) + 2, block_of(10 << 30) - 1).unwrap(), None);
    let mut states = [BlockState::Absent; 4096];
    image.block_states(block_of(5 << 30) - 2000, &mut states).unwrap();
    let data: Vec<_> = (0..).zip(states).filter(|(_, state)| *state != BlockState::Absent).map(|(at, _)| at).collect();
    assert_eq!(data, [2000, 2001]);
}
