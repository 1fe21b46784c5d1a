//! Finds the users of a device or a file: mounts, swap, other devices on top of it.
//!
//! ```text
//!   /dev/vdb ─▶ device numbers: its own and its partitions' (sysfs)
//!                 ├─▶ mounted?   /proc/self/mountinfo, by number and by source
//!                 ├─▶ swap?      /proc/swaps
//!                 └─▶ held?      holders/ in sysfs: LVM, RAID, encryption, multipath
//!   a file ──▶ swap? file of a loop device? (/sys/block/loop*/loop/backing_file)
//!   both   ──▶ attached by `diskwright attach`? an image by its device,
//!              a device by what is mounted from its partitions
//! ```
//!
//! The final check is the kernel's: a block device is opened for writing with `O_EXCL`, which fails
//! if the kernel uses the device. This module looks earlier, so that the error can name the user.

use crate::backing;
use diskwright_serve::attach::{self, Record};
use rustix::fs::{FileType, Stat, stat};
use std::{
    fs,
    path::{Path, PathBuf},
};

/// One use of a device or file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TargetUse {
    /// The device, or a partition of it, is mounted.
    Mounted {
        /// The device or partition.
        device: String,
        /// The mount point.
        at: PathBuf,
    },
    /// The kernel swaps to the device, to a partition of it, or to the file.
    Swap {
        /// The device, partition or file.
        path: PathBuf,
    },
    /// Another device is built on the device or on a partition of it.
    Held {
        /// The device or partition.
        device: String,
        /// Name of the other device, for example `dm-0`.
        by: String,
    },
    /// A loop device uses it as its backing file.
    Loop {
        /// The loop device, for example `/dev/loop0`.
        by: String,
    },
    /// `diskwright attach` has attached it.
    Attached {
        /// The attached device or file.
        by: PathBuf,
    },
}

impl std::fmt::Display for TargetUse {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Mounted { device, at } => write!(f, "{device} is mounted at {}", at.display()),
            Self::Swap { path } => write!(f, "{} is swap space", path.display()),
            Self::Held { device, by } => write!(f, "{device} is part of {by}"),
            Self::Loop { by } => write!(f, "{by} is a loop device on it"),
            Self::Attached { by } => write!(f, "it is attached as {0} (`diskwright detach {0}`)", by.display()),
        }
    }
}

/// All known uses of the device or file at `path`. Empty if it does not exist.
pub fn uses(path: &Path) -> Vec<TargetUse> {
    let Ok(found) = stat(path) else { return Vec::new() };
    let real = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let mut uses = Vec::new();
    let swaps = read("/proc/swaps");
    if FileType::from_raw_mode(found.st_mode).is_block_device() {
        let devices = with_partitions(Path::new("/sys/dev/block"), found.st_rdev);
        let is_one =
            |path: &Path| block_number(path).and_then(|number| devices.iter().find(|one| one.number == number));
        uses.extend(mounts(&read("/proc/self/mountinfo"), &devices, is_one));
        uses.extend(
            swap_paths(&swaps).into_iter().filter(|path| is_one(path).is_some()).map(|path| TargetUse::Swap { path }),
        );
        for device in &devices {
            uses.extend(
                device.holders.iter().map(|by| TargetUse::Held { device: device.name.clone(), by: by.clone() }),
            );
        }
    } else {
        uses.extend(swap_paths(&swaps).into_iter().filter(|path| *path == real).map(|path| TargetUse::Swap { path }));
    }
    uses.extend(loops(Path::new("/sys/block"), &real).into_iter().map(|by| TargetUse::Loop { by }));
    if let Some(record) = backing::attached(&real) {
        let more = uses_of_attached(&record, &real, &uses);
        uses.extend(more);
    }
    uses
}

/// Uses of an attached disk that the kernel does not report for `path`: partitions may have loop
/// devices of their own.
fn uses_of_attached(record: &Record, path: &Path, known: &[TargetUse]) -> Vec<TargetUse> {
    if record.file == path {
        return vec![TargetUse::Attached { by: record.place().to_owned() }];
    }
    if record.device.as_deref() != Some(path) {
        return Vec::new();
    }
    let is_known =
        |at: &Path| known.iter().any(|one| matches!(one, TargetUse::Mounted { at: known, .. } if known == at));
    let mounted = attach::mounted_from(record).into_iter().filter(|at| !is_known(at));
    mounted.map(|at| TargetUse::Mounted { device: format!("a partition of {}", path.display()), at }).collect()
}

/// A block device, identified by its number.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Device {
    number: u64,
    /// Path, for example `/dev/vda1`.
    name: String,
    holders: Vec<String>,
}

/// The device with this number and its partitions, from sysfs.
fn with_partitions(sys_dev_block: &Path, number: u64) -> Vec<Device> {
    let folder = sys_dev_block.join(format!("{}:{}", rustix::fs::major(number), rustix::fs::minor(number)));
    let Ok(folder) = folder.canonicalize() else {
        return vec![Device { number, name: "the device".into(), holders: Vec::new() }];
    };
    let describe = |folder: &Path, number: u64| Device {
        number,
        name: folder.file_name().map_or_else(String::new, |name| format!("/dev/{}", name.to_string_lossy())),
        holders: entries(&folder.join("holders"))
            .iter()
            .filter_map(|path| Some(path.file_name()?.to_string_lossy().into_owned()))
            .collect(),
    };
    let mut devices = vec![describe(&folder, number)];
    for part in entries(&folder).into_iter().filter(|entry| entry.join("partition").exists()) {
        if let Some(number) = parse_number(&read(part.join("dev"))) {
            devices.push(describe(&part, number));
        }
    }
    devices
}

/// Parses `major:minor`, as in sysfs and mountinfo.
fn parse_number(text: &str) -> Option<u64> {
    let (major, minor) = text.trim().split_once(':')?;
    Some(rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?))
}

/// Mounts of one of `devices`: found by the number of the mounted file system, or by its source,
/// because btrfs and others have numbers of their own.
fn mounts<'a>(mountinfo: &str, devices: &'a [Device], is_one: impl Fn(&Path) -> Option<&'a Device>) -> Vec<TargetUse> {
    let mut found = Vec::new();
    for line in mountinfo.lines() {
        let Some((left, right)) = line.split_once(" - ") else { continue };
        let (left, right): (Vec<&str>, Vec<&str>) = (left.split(' ').collect(), right.split(' ').collect());
        let (Some(number), Some(at), source) = (left.get(2), left.get(4), right.get(1)) else { continue };
        let by_number = parse_number(number).and_then(|number| devices.iter().find(|one| one.number == number));
        let device = by_number.or_else(|| is_one(Path::new(source.filter(|source| source.starts_with('/'))?)));
        if let Some(device) = device {
            found.push(TargetUse::Mounted {
                device: device.name.clone(),
                at: diskwright_load::machine::unescape(at).into(),
            });
        }
    }
    found
}

fn swap_paths(swaps: &str) -> Vec<PathBuf> {
    let paths = swaps.lines().skip(1).filter_map(|line| line.split_whitespace().next());
    paths.map(|path| diskwright_load::machine::unescape(path).into()).collect()
}

/// Loop devices whose backing file is `real`.
fn loops(sys_block: &Path, real: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for folder in entries(sys_block) {
        let backing = read(folder.join("loop/backing_file"));
        if !backing.is_empty()
            && Path::new(backing.trim_end_matches('\n')) == real
            && let Some(name) = folder.file_name()
        {
            found.push(format!("/dev/{}", name.to_string_lossy()));
        }
    }
    found
}

fn block_number(path: &Path) -> Option<u64> {
    let found: Stat = stat(path).ok()?;
    FileType::from_raw_mode(found.st_mode).is_block_device().then_some(found.st_rdev)
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> =
        fs::read_dir(folder).map(|entries| entries.flatten().map(|entry| entry.path()).collect()).unwrap_or_default();
    paths.sort();
    paths
}

fn read(path: impl AsRef<Path>) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::makedev;

    fn device(number: u64, name: &str) -> Device {
        Device { number, name: name.into(), holders: Vec::new() }
    }

    #[test]
    fn mounts_are_found_by_number_and_by_source() {
        let info = "\
22 27 0:21 / /proc rw - proc proc rw
27 1 253:1 / / rw shared:1 - ext4 /dev/vda1 rw
40 27 0:44 / /mnt/my\\040disk rw - btrfs /dev/vda2 rw
41 27 8:0 / /mnt/other rw - xfs /dev/sda rw";
        let devices = [
            device(makedev(253, 0), "/dev/vda"),
            device(makedev(253, 1), "/dev/vda1"),
            device(makedev(253, 2), "/dev/vda2"),
        ];
        let by_source = |path: &Path| (path == Path::new("/dev/vda2")).then_some(&devices[2]);
        let found = mounts(info, &devices, by_source);
        assert_eq!(
            found,
            [
                TargetUse::Mounted { device: "/dev/vda1".into(), at: "/".into() },
                TargetUse::Mounted { device: "/dev/vda2".into(), at: "/mnt/my disk".into() },
            ]
        );
        assert_eq!(found[1].to_string(), "/dev/vda2 is mounted at /mnt/my disk");
        assert_eq!(mounts(info, &devices[..1], |_| None), [], "the disk itself is not what is mounted");
    }

    #[test]
    fn partitions_and_holders_come_from_sysfs() {
        let sys = tempfile::tempdir().unwrap();
        let disk = sys.path().join("vdb");
        for (folder, number) in [("vdb", "253:16"), ("vdb/vdb1", "253:17"), ("vdb/queue", "")] {
            let folder = sys.path().join(folder);
            fs::create_dir_all(folder.join("holders")).unwrap();
            fs::write(folder.join("dev"), format!("{number}\n")).unwrap();
        }
        fs::write(disk.join("vdb1/partition"), "1\n").unwrap();
        fs::create_dir_all(disk.join("vdb1/holders/dm-0")).unwrap();
        std::os::unix::fs::symlink(&disk, sys.path().join("253:16")).unwrap();
        let devices = with_partitions(sys.path(), makedev(253, 16));
        assert_eq!(devices.len(), 2, "{devices:?}");
        assert_eq!((devices[0].name.as_str(), devices[1].name.as_str()), ("/dev/vdb", "/dev/vdb1"));
        assert_eq!((devices[1].number, &devices[1].holders[..]), (makedev(253, 17), &["dm-0".to_owned()][..]));
    }

    #[test]
    fn swap_and_loop_devices_are_found() {
        let swaps = "Filename\tType\tSize\tUsed\tPriority\n/dev/vda3 partition 1 0 -2\n/my\\040swap file 1 0 -3\n";
        assert_eq!(swap_paths(swaps), [PathBuf::from("/dev/vda3"), PathBuf::from("/my swap")]);
        let sys = tempfile::tempdir().unwrap();
        fs::create_dir_all(sys.path().join("loop7/loop")).unwrap();
        fs::create_dir_all(sys.path().join("vda")).unwrap();
        fs::write(sys.path().join("loop7/loop/backing_file"), "/x/disk.raw\n").unwrap();
        assert_eq!(loops(sys.path(), Path::new("/x/disk.raw")), ["/dev/loop7"]);
        assert_eq!(loops(sys.path(), Path::new("/x/disk")), Vec::<String>::new());
    }

    #[test]
    fn an_attached_image_is_in_use_and_its_device_only_by_what_is_mounted_from_it() {
        let mut record = Record::new("/a/disk.vhdx".into(), 0);
        record.device = Some("/dev/loop999".into());
        let used = uses_of_attached(&record, Path::new("/a/disk.vhdx"), &[]);
        assert_eq!(used, [TargetUse::Attached { by: "/dev/loop999".into() }]);
        assert_eq!(used[0].to_string(), "it is attached as /dev/loop999 (`diskwright detach /dev/loop999`)");
        assert_eq!(uses_of_attached(&record, Path::new("/dev/loop999"), &[]), []);
        assert_eq!(uses_of_attached(&record, Path::new("/dev/loop998"), &[]), []);
    }

    #[test]
    fn the_disk_below_the_root_is_in_use() {
        // If the root file system is not on a block device (in a container), there is nothing to
        // find.
        let place = diskwright_load::machine::Place::detect(Path::new("/"));
        if block_number(Path::new(&place.device)).is_none() {
            println!("skipped: the root file system is not on a visible block device");
            return;
        }
        let found = uses(Path::new(&place.device));
        assert!(found.iter().any(|one| matches!(one, TargetUse::Mounted { .. })), "{}: {found:?}", place.device);
    }

    #[test]
    fn an_ordinary_file_is_free() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(uses(file.path()), []);
        assert_eq!(uses(Path::new("/nowhere")), []);
    }
}
