//! The test bed: one block device in two halves. One half is bare, the other has a file system.
//!
//! ```text
//!   a file in the scratch folder ─▶ two loop devices over its halves, direct I/O ┬─▶ the bare half
//!   a device that supports partitions ─▶ two partitions, known to the kernel only┤
//!   a device that does not (zram) ─▶ two loop devices over its halves ───────────┴─▶ mkfs, mount
//! ```
//!
//! Both halves are reached the same way, so the file system is the only difference. No partition
//! table is written.
//!
//! Dropping [`TestBed`] undoes all steps in reverse order: after success, after an error, and when
//! the user stops the study. Programs of util-linux mount and set up loop devices; `mkfs` is needed
//! as a program in any case.

use super::FileSystem;
use crate::{
    LabError, Result,
    inspect::{self, Writing, guard},
    peer,
    progress::{Progress, report},
    scratch::Scratch,
};
use diskwright_stats::numbers;
use diskwright_store::{BlockDevice, CacheMode, EngineKind, RawDevice};
use rustix::fs::FallocateFlags;
use serde::{Deserialize, Serialize};
use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// How long to wait until a device node appears.
const NODE_PATIENCE: Duration = Duration::from_secs(5);
/// Start of the first partition: 1 MiB, as common partitioning programs choose.
const ALIGN_BYTES: u64 = 1 << 20;
const SECTOR_BYTES: u64 = 512;

/// The block device and its two halves.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct TestBedRecord {
    /// Path of the device, or a phrase for the file in the scratch folder.
    pub of: String,
    /// How the device was split in two.
    pub halves: Halves,
    /// File system on the second half.
    pub file_system: FileSystem,
    /// Length of the bare half, bytes.
    pub bare_bytes: u64,
    /// Length of the half with the file system, bytes.
    pub file_system_bytes: u64,
    /// Whether the loop devices use direct I/O; `None` without loop devices.
    pub loop_direct: Option<bool>,
}

/// How the device was split in two.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Halves {
    /// Loop devices over a file.
    LoopsOverFile,
    /// Partitions of a device.
    Partitions,
    /// Loop devices over a device that does not support partitions.
    LoopsOverDevice,
}

/// What to make.
#[derive(Debug, Clone, Copy)]
pub(super) struct TestBedPlan<'a> {
    /// Length of the bare half.
    pub bare_bytes: u64,
    /// Smallest length of the half with the file system.
    pub file_system_bytes: u64,
    pub file_system: FileSystem,
    pub device: Option<&'a Path>,
    pub destroy_data: bool,
    pub engine: EngineKind,
}

/// The two halves. Dropping it removes them.
#[derive(Debug)]
pub(super) struct TestBed {
    pub record: TestBedRecord,
    /// Device node of the bare half.
    pub bare: PathBuf,
    /// Mount point of the file system.
    pub folder: PathBuf,
    /// Steps to undo, the last one first.
    undo: Vec<Undo>,
}

/// A step that was done and must be undone.
#[derive(Debug)]
enum Undo {
    Loop(PathBuf),
    Partition { device: PathBuf, number: u32 },
    Mount(PathBuf),
}

impl TestBed {
    /// Makes the two halves and mounts the file system.
    ///
    /// # Errors
    /// Not root; a missing program; a device that is in use, holds data or is too small;
    /// [`LabError::Stopped`].
    pub fn make(scratch: &Scratch, wanted: &TestBedPlan<'_>, progress: &mut dyn Progress) -> Result<Self> {
        if !nix::unistd::geteuid().is_root() {
            return Err(LabError::BadOptions {
                what: "this study uses block devices and mounts, which only root may do".into(),
                    hint: "run it as root (sudo), or use `lab study containers`, which compares virtual disks with a file and needs no root"
                        .into(),
            });
        }
        for (name, package) in needed(wanted.file_system) {
            program(name, package)?;
        }
        let mut test_bed = Self {
            record: TestBedRecord {
                of: String::new(),
                halves: Halves::LoopsOverFile,
                file_system: wanted.file_system,
                bare_bytes: wanted.bare_bytes,
                file_system_bytes: wanted.file_system_bytes,
                loop_direct: None,
            },
            bare: PathBuf::new(),
            folder: scratch.folder("mnt")?,
            undo: Vec::new(),
        };
        report(progress, "prepare", 0, 1, "block device and file system")?;
        let second = match wanted.device {
            None => test_bed.halve_file(scratch, wanted)?,
            Some(device) => {
                test_bed.record.of = device.display().to_string();
                let size_bytes = allowed(device, wanted, progress)?;
                test_bed.halve_device(device, size_bytes, wanted)?
            }
        };
        report(progress, "prepare", 0, 1, &format!("{} on {}", wanted.file_system, second.display()))?;
        test_bed.mount(&second)?;
        Ok(test_bed)
    }

    /// Undoes all steps, also after an error.
    ///
    /// # Errors
    /// [`LabError::Program`]: the first step that could not be undone.
    pub fn end(mut self) -> Result<()> {
        self.undo_all()
    }

    fn halve_file(&mut self, scratch: &Scratch, wanted: &TestBedPlan<'_>) -> Result<PathBuf> {
        let path = scratch.path().join("device.img");
        let len_bytes = wanted.bare_bytes + wanted.file_system_bytes;
        let file = File::create_new(&path).map_err(LabError::file("create", &path))?;
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, len_bytes)
            .map_err(|errno| LabError::file("allocate", &path)(errno.into()))?;
        self.record.of = "a file in the scratch folder".into();
        self.loops(&path, wanted.bare_bytes, wanted.file_system_bytes)
    }

    fn halve_device(&mut self, device: &Path, size_bytes: u64, wanted: &TestBedPlan<'_>) -> Result<PathBuf> {
        let rest_bytes = (size_bytes.saturating_sub(wanted.bare_bytes + 2 * ALIGN_BYTES)) & !(ALIGN_BYTES - 1);
        if rest_bytes < wanted.file_system_bytes {
            return Err(LabError::BadOptions {
                what: format!(
                    "{} has {}, but the study needs {}",
                    device.display(),
                    numbers::bytes(size_bytes),
                    numbers::bytes(wanted.bare_bytes + wanted.file_system_bytes + 2 * ALIGN_BYTES)
                ),
                hint: "use a larger device, or smaller disks (`RawAndFileOptions::size_bytes`)".into(),
            });
        }
        self.record.file_system_bytes = rest_bytes;
        let first = self.partition(device, 1, ALIGN_BYTES, wanted.bare_bytes)?;
        let Some(first) = first else {
            self.record.halves = Halves::LoopsOverDevice;
            return self.loops(device, wanted.bare_bytes, rest_bytes);
        };
        self.record.halves = Halves::Partitions;
        self.bare = first;
        let second = self.partition(device, 2, ALIGN_BYTES + wanted.bare_bytes, rest_bytes)?;
        second.ok_or_else(|| LabError::BadOptions {
            what: format!("{} accepted a first partition but not a second", device.display()),
            hint: "use another device".into(),
        })
    }

    /// Adds a partition in the kernel with `addpart`. `None` if the device does not support
    /// partitions.
    fn partition(&mut self, device: &Path, number: u32, start_bytes: u64, len_bytes: u64) -> Result<Option<PathBuf>> {
        let [number_text, start, len] =
            [u64::from(number), start_bytes / SECTOR_BYTES, len_bytes / SECTOR_BYTES].map(|value| value.to_string());
        let shown = device.to_string_lossy();
        if capture("addpart", &[&shown, &number_text, &start, &len]).is_err() {
            return Ok(None);
        }
        self.undo.push(Undo::Partition { device: device.to_owned(), number });
        let separator = if shown.ends_with(|last: char| last.is_ascii_digit()) { "p" } else { "" };
        let node = PathBuf::from(format!("{shown}{separator}{number}"));
        let began = Instant::now();
        while !node.exists() {
            if began.elapsed() > NODE_PATIENCE {
                return Err(LabError::BadOptions {
                    what: format!("no device node {} appeared for a partition of {shown}", node.display()),
                    hint: "in a container, make the device's partitions visible in /dev".into(),
                });
            }
            thread::sleep(Duration::from_millis(5));
        }
        Ok(Some(node))
    }

    /// Makes two loop devices over the halves of a file or device. Returns the second.
    fn loops(&mut self, over: &Path, bare_bytes: u64, rest_bytes: u64) -> Result<PathBuf> {
        self.bare = self.loop_device(over, 0, bare_bytes)?;
        let second = self.loop_device(over, bare_bytes, rest_bytes)?;
        self.record.loop_direct = Some([&self.bare, &second].into_iter().all(|node| is_direct(node)));
        Ok(second)
    }

    fn loop_device(&mut self, over: &Path, start_bytes: u64, len_bytes: u64) -> Result<PathBuf> {
        let [start, len] = [start_bytes, len_bytes].map(|bytes| bytes.to_string());
        let arguments = ["--find", "--show", "--direct-io=on", "--offset", &start, "--sizelimit", &len];
        let over = over.to_string_lossy();
        let said = capture("losetup", &[&arguments[..], &[&*over]].concat())?;
        let node = PathBuf::from(said.trim());
        self.undo.push(Undo::Loop(node.clone()));
        Ok(node)
    }

    fn mount(&mut self, device: &Path) -> Result<()> {
        let shown = device.to_string_lossy();
        // Without lazy initialisation, so that mkfs does no work in the background while a cell is
        // measured.
        match self.record.file_system {
            FileSystem::Ext4 => {
                let options = "lazy_itable_init=0,lazy_journal_init=0,nodiscard";
                capture("mkfs.ext4", &["-q", "-F", "-m", "0", "-E", options, &shown])?;
            }
            FileSystem::Xfs => {
                capture("mkfs.xfs", &["-q", "-f", "-K", &shown])?;
            }
        }
        let folder = self.folder.to_string_lossy().into_owned();
        capture("mount", &["-t", self.record.file_system.name(), &shown, &folder])?;
        self.undo.push(Undo::Mount(self.folder.clone()));
        Ok(())
    }

    fn undo_all(&mut self) -> Result<()> {
        let mut first = Ok(());
        while let Some(undo) = self.undo.pop() {
            let done = match &undo {
                Undo::Mount(folder) => {
                    let folder = folder.to_string_lossy();
                    let done = capture("umount", &[&folder]).map(drop);
                    if done.is_err() {
                        // The file system is unmounted when its last user closes it. What lies
                        // below it can then be removed.
                        let _ = capture("umount", &["--lazy", &folder]);
                    }
                    done
                }
                Undo::Loop(node) => capture("losetup", &["--detach", &node.to_string_lossy()]).map(drop),
                Undo::Partition { device, number } => {
                    capture("delpart", &[&device.to_string_lossy(), &number.to_string()]).map(drop)
                }
            };
            first = first.and(done);
        }
        first
    }
}

impl Drop for TestBed {
    fn drop(&mut self) {
        // After `end` nothing is left to undo. Otherwise the first error is already being returned.
        let _ = self.undo_all();
    }
}

/// Programs that the study starts, with their packages.
fn needed(file_system: FileSystem) -> [(&'static str, &'static str); 4] {
    let (mkfs, package) = match file_system {
        FileSystem::Ext4 => ("mkfs.ext4", "e2fsprogs"),
        FileSystem::Xfs => ("mkfs.xfs", "xfsprogs"),
    };
    [(mkfs, package), ("mount", "mount"), ("umount", "mount"), ("losetup", "mount")]
}

fn program(name: &str, package: &str) -> Result<PathBuf> {
    peer::find(name).ok_or_else(|| LabError::BadOptions {
        what: format!("this study needs {name}, which is not installed"),
        hint: format!("apt-get install {package}"),
    })
}

/// Runs a program and returns its standard output.
fn capture(name: &str, arguments: &[&str]) -> Result<String> {
    let program = program(name, "util-linux")?;
    let mut command = Command::new(&program);
    command.args(arguments).stdin(Stdio::null());
    let output = command.output().map_err(LabError::file("start", &program))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(LabError::Program {
        command: format!("{command:?}"),
        status: output.status.to_string(),
        output: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
    })
}

/// Whether a loop device uses direct I/O.
fn is_direct(node: &Path) -> bool {
    let name = node.file_name().unwrap_or_default();
    let text = fs::read_to_string(Path::new("/sys/block").join(name).join("loop/dio")).unwrap_or_default();
    text.trim() == "1"
}

/// Checks that the device may be overwritten from end to end. Returns its size.
fn allowed(device: &Path, wanted: &TestBedPlan<'_>, progress: &mut dyn Progress) -> Result<u64> {
    let name = device.display().to_string();
    guard::refuse_used(&name, device)?;
    let bad = |what: String, hint: &str| Err(LabError::BadOptions { what, hint: hint.into() });
    let real = device.canonicalize().map_err(LabError::file("find", device))?;
    let folder = Path::new("/sys/class/block").join(real.file_name().unwrap_or_default());
    if !folder.exists() {
        return bad(
            format!("{name} is not a block device"),
            "name one (`RawAndFileOptions::device` = /dev/...), or leave it out for a file in the scratch folder",
        );
    }
    let parts = fs::read_dir(&folder).into_iter().flatten().flatten();
    if parts.into_iter().any(|entry| entry.path().join("partition").exists()) {
        return bad(
            format!("{name} has partitions"),
            "remove them first (wipefs --all, then blockdev --rereadpt), or name a device without any",
        );
    }
    let open = RawDevice::open(device, false, CacheMode::Direct)?;
    let size_bytes = open.geometry().size_bytes;
    let all = 0..size_bytes;
    let writing = Writing {
        name: &name,
        path: Some(device),
        device: &open,
        ranges: std::slice::from_ref(&all),
        engine: wanted.engine,
    };
    let message = format!("searching {name} for data");
    inspect::allow(&writing, wanted.destroy_data, &mut |done| report(progress, "inspect", done, size_bytes, &message))?;
    Ok(size_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::Silent;

    fn wanted(device: Option<&Path>) -> TestBedPlan<'_> {
        TestBedPlan {
            bare_bytes: 16 << 20,
            file_system_bytes: 96 << 20,
            file_system: FileSystem::Ext4,
            device,
            destroy_data: false,
            engine: EngineKind::Auto,
        }
    }

    fn is_root() -> bool {
        let root = nix::unistd::geteuid().is_root() && File::open("/dev/loop-control").is_ok();
        if !root {
            println!("skipped: needs root and loop devices");
        }
        root
    }

    fn shown_by_loops(below: &Path) -> bool {
        let said = capture("losetup", &["--list", "--noheadings", "--output", "BACK-FILE"]).unwrap();
        said.contains(&below.to_string_lossy().into_owned())
    }

    #[test]
    fn both_halves_are_there_and_nothing_is_left() {
        if !is_root() {
            return;
        }
        let home = tempfile::tempdir().unwrap();
        let scratch = Scratch::new(Some(home.path()), false).unwrap();
        let test_bed = TestBed::make(&scratch, &wanted(None), &mut Silent).unwrap();
        let bare = RawDevice::open(&test_bed.bare, true, CacheMode::Direct).unwrap();
        assert_eq!(bare.geometry().size_bytes, 16 << 20);
        drop(bare);
        fs::write(test_bed.folder.join("file"), vec![7; 1 << 20]).unwrap();
        assert!(shown_by_loops(scratch.path()));
        let folder = test_bed.folder.clone();
        test_bed.end().unwrap();
        assert!(!folder.join("file").exists());
        // A program that examines all loop devices at this moment (other tests do) delays the
        // removal.
        let assert_gone = |dir: &Path| {
            let deadline = Instant::now() + Duration::from_secs(5);
            while shown_by_loops(dir) {
                assert!(Instant::now() < deadline, "the loop device is still there");
                thread::sleep(Duration::from_millis(10));
            }
        };
        assert_gone(scratch.path());
        // After an error nothing is left either: the file system would have one sector, which is
        // too small.
        let scratch = Scratch::new(Some(home.path()), false).unwrap();
        let small = TestBedPlan { file_system_bytes: 4096, ..wanted(None) };
        let error = TestBed::make(&scratch, &small, &mut Silent).unwrap_err();
        assert!(matches!(error, LabError::Program { .. }), "{error}");
        assert_gone(scratch.path());
    }

    #[test]
    fn a_device_is_halved_by_partitions_and_one_with_data_is_refused() {
        if !is_root() {
            return;
        }
        let home = tempfile::tempdir().unwrap();
        let scratch = Scratch::new(Some(home.path()), false).unwrap();
        let below = home.path().join("below.img");
        File::create_new(&below).unwrap().set_len(160 << 20).unwrap();
        let below_text = below.to_string_lossy().into_owned();
        let said = capture("losetup", &["--find", "--show", "--partscan", &below_text]).unwrap();
        let device = PathBuf::from(said.trim());
        let outcome = (|| {
            let test_bed = TestBed::make(&scratch, &wanted(Some(&device)), &mut Silent)?;
            let halves = test_bed.record.halves;
            test_bed.end()?;
            // The second half has a file system now.
            Ok::<_, LabError>((halves, TestBed::make(&scratch, &wanted(Some(&device)), &mut Silent).map(drop)))
        })();
        let _ = capture("losetup", &["--detach", said.trim()]);
        let (halves, again) = outcome.unwrap();
        assert_eq!(halves, Halves::Partitions);
        assert!(matches!(again, Err(LabError::HoldsData { .. })), "{again:?}");
    }

    #[test]
    fn a_file_that_is_not_a_device_is_refused() {
        if !is_root() {
            return;
        }
        let home = tempfile::tempdir().unwrap();
        let scratch = Scratch::new(Some(home.path()), false).unwrap();
        let file = home.path().join("file");
        fs::write(&file, b"").unwrap();
        let error = TestBed::make(&scratch, &wanted(Some(&file)), &mut Silent).unwrap_err().to_string();
        assert!(error.contains("is not a block device"), "{error}");
    }
}
