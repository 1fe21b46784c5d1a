//! Who uses a block device: mounts, swap, devices stacked on it, programs that have it open.
//!
//! ```text
//!   /proc/self/mountinfo        mounts
//!   /sys/fs/btrfs/*/devices     the other devices of a btrfs file system
//!   /proc/swaps                 swap
//!   /sys/dev/block/M:m/holders  device-mapper, md and others
//!   /sys/block/loop*/loop       loop devices on the device
//!   /proc/*/fd                  programs (all programs for root, else the user's own)
//! ```
//!
//! A mount is compared by its device number. btrfs shows an anonymous number (major 0), so there
//! the device that the mount's source names is compared. A btrfs on several devices names only one
//! of them; sysfs lists the others.
//!
//! `detach` checks for users first, so that a refusal can name them. If a program opens the device
//! after the check, a loop device disappears when that program closes it.

use crate::attach::process;
use rustix::fs::{major, makedev, minor};
use std::{
    fmt, fs, io,
    os::unix::{
        ffi::{OsStrExt, OsStringExt},
        fs::{FileTypeExt, MetadataExt},
    },
    path::{Path, PathBuf},
};

/// A mount in the mount namespace of this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    pub device: u64,
    pub dir: PathBuf,
    /// Type of the file system, as in "ext4".
    pub file_system: String,
    /// The source that was mounted, as in "/dev/sda1".
    pub source: PathBuf,
}

impl Mount {
    /// The number of the block device below: the mount's own number or, if that is anonymous
    /// (btrfs), the number of its source.
    fn block_device(&self) -> Option<u64> {
        if major(self.device) != 0 {
            return Some(self.device);
        }
        // Only paths in /dev are looked up: stat would never return on a file system whose server
        // hangs.
        if self.source.starts_with("/dev") { number_of(&self.source).ok() } else { None }
    }

    /// Whether the mount's source is this device or a partition of it, by name.
    pub fn is_from(&self, device: &Path) -> bool {
        let (source, device) = (self.source.as_os_str().as_bytes(), device.as_os_str().as_bytes());
        let is_partition = |rest: &[u8]| {
            let number = rest.strip_prefix(b"p").unwrap_or_default();
            !number.is_empty() && number.iter().all(u8::is_ascii_digit)
        };
        source.strip_prefix(device).is_some_and(|rest| rest.is_empty() || is_partition(rest))
    }
}

/// All mounts, oldest first.
///
/// # Errors
/// `/proc` cannot be read.
pub fn mounts() -> io::Result<Vec<Mount>> {
    Ok(parse_mounts(&fs::read("/proc/self/mountinfo")?))
}

/// `36 35 98:0 /mnt1 /mnt/parent rw,noatime master:1 - ext3 /dev/root rw,errors=continue`
/// (proc_pid_mountinfo(5)).
fn parse_mounts(text: &[u8]) -> Vec<Mount> {
    text.split(|&byte| byte == b'\n').filter_map(parse_mount).collect()
}

fn parse_mount(line: &[u8]) -> Option<Mount> {
    let mut words = line.split(|&byte| byte == b' ');
    let device = std::str::from_utf8(words.nth(2)?).ok()?;
    let (major, minor) = device.split_once(':')?;
    let dir = unescape(words.nth(1)?);
    let mut words = words.skip_while(|word| *word != b"-").skip(1);
    let file_system = words.next()?;
    let source = unescape(words.next()?);
    Some(Mount {
        device: makedev(major.parse().ok()?, minor.parse().ok()?),
        dir: PathBuf::from(std::ffi::OsString::from_vec(dir)),
        file_system: String::from_utf8_lossy(file_system).into_owned(),
        source: PathBuf::from(std::ffi::OsString::from_vec(source)),
    })
}

/// Decodes `\040` and other octal escapes, which stand for blanks, tabs, line feeds and
/// backslashes.
fn unescape(word: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(word.len());
    let mut rest = word;
    while let Some((&first, behind)) = rest.split_first() {
        let octal = |digits: &[u8]| digits.iter().all(|digit| (b'0'..=b'7').contains(digit));
        match behind.split_at_checked(3) {
            Some((digits, after)) if first == b'\\' && octal(digits) => {
                out.push(digits.iter().fold(0u8, |value, digit| value.wrapping_mul(8).wrapping_add(digit - b'0')));
                rest = after;
            }
            _ => {
                out.push(first);
                rest = behind;
            }
        }
    }
    out
}

/// A use of a device that prevents its detaching.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceUse {
    /// A file system on the device is mounted.
    Mounted(PathBuf),
    /// The device is used as swap.
    Swap(PathBuf),
    /// Another block device uses the device.
    Stacked(String),
    /// A program has the device open.
    Open {
        pid: u32,
        name: String,
        /// The path that was opened.
        path: PathBuf,
    },
}

impl fmt::Display for DeviceUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mounted(dir) => write!(f, "mounted at {}", dir.display()),
            Self::Swap(path) => write!(f, "in use as swap ({})", path.display()),
            Self::Stacked(name) => write!(f, "used by /dev/{name}"),
            Self::Open { pid, name, path } => write!(f, "open in {name} (process {pid}, {})", path.display()),
        }
    }
}

/// The device numbers of a block device and of its partitions.
///
/// # Errors
/// The path cannot be read or is not a block device.
pub fn with_partitions(device: &Path) -> io::Result<Vec<u64>> {
    let whole = number_of(device)?;
    let mut numbers = vec![whole];
    let Ok(entries) = fs::read_dir(format!("/sys/dev/block/{}:{}", major(whole), minor(whole))) else {
        return Ok(numbers);
    };
    for entry in entries.flatten() {
        if entry.path().join("partition").exists()
            && let Ok(text) = fs::read_to_string(entry.path().join("dev"))
            && let Some(number) = parse_number(&text)
        {
            numbers.push(number);
        }
    }
    Ok(numbers)
}

/// Block devices with their partitions, to be compared with mounts.
#[derive(Debug)]
pub struct Devices {
    /// Device numbers of the devices and their partitions.
    numbers: Vec<u64>,
    /// Device numbers of all members of btrfs file systems that have a member in `numbers`.
    btrfs: Vec<u64>,
}

impl Devices {
    /// Looks up these devices and their partitions. A device that cannot be read is skipped.
    pub fn of<'a>(devices: impl IntoIterator<Item = &'a PathBuf>) -> Self {
        let numbers: Vec<u64> =
            devices.into_iter().flat_map(|device| with_partitions(device).unwrap_or_default()).collect();
        let btrfs = btrfs_beside(Path::new("/sys/fs/btrfs"), &numbers);
        Self { numbers, btrfs }
    }

    /// Whether `mount` is on one of the devices.
    pub fn carry(&self, mount: &Mount) -> bool {
        let has = |number| self.numbers.contains(&number) || self.btrfs.contains(&number);
        mount.block_device().is_some_and(has)
    }
}

/// The members of all btrfs file systems that have a member in `devices`. `list` has a folder
/// `UUID/devices/NAME` for each file system.
fn btrfs_beside(list: &Path, devices: &[u64]) -> Vec<u64> {
    let mut beside = Vec::new();
    for uuid in names_in(&list.to_string_lossy()) {
        let members = list.join(uuid).join("devices");
        let numbers: Vec<u64> = names_in(&members.to_string_lossy())
            .filter_map(|name| parse_number(&fs::read_to_string(members.join(name).join("dev")).ok()?))
            .collect();
        if numbers.iter().any(|number| devices.contains(number)) {
            beside.extend(numbers);
        }
    }
    beside
}

/// Parses `259:1`, as in sysfs.
fn parse_number(text: &str) -> Option<u64> {
    let (major, minor) = text.trim_end().split_once(':')?;
    Some(makedev(major.parse().ok()?, minor.parse().ok()?))
}

/// The device number of a block device.
///
/// # Errors
/// The path cannot be read or is not a block device.
pub fn number_of(device: &Path) -> io::Result<u64> {
    let found = fs::metadata(device)?;
    if !found.file_type().is_block_device() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a block device"));
    }
    Ok(found.rdev())
}

/// All users of these devices, except the processes in `ours`.
///
/// # Errors
/// `/proc` cannot be read.
pub fn uses(devices: &Devices, ours: &[u32]) -> io::Result<Vec<DeviceUse>> {
    let mut found: Vec<DeviceUse> =
        mounts()?.into_iter().filter(|mount| devices.carry(mount)).map(|mount| DeviceUse::Mounted(mount.dir)).collect();
    let devices = &devices.numbers[..];
    for line in fs::read_to_string("/proc/swaps").unwrap_or_default().lines().skip(1) {
        if let Some(path) = line.split_ascii_whitespace().next()
            && number_of(Path::new(path)).is_ok_and(|number| devices.contains(&number))
        {
            found.push(DeviceUse::Swap(path.into()));
        }
    }
    for &device in devices {
        let holders = format!("/sys/dev/block/{}:{}/holders", major(device), minor(device));
        found.extend(names_in(&holders).map(DeviceUse::Stacked));
    }
    found.extend(loops_over(Path::new("/sys/block"), devices).into_iter().map(DeviceUse::Stacked));
    // Only paths in /dev are looked up: stat would never return on a file system that hangs.
    found.extend(openers(ours, |path, link| {
        path.starts_with("/dev") && number_of(link).is_ok_and(|number| devices.contains(&number))
    }));
    Ok(found)
}

/// The loop devices in `list` whose backing file is one of these devices, except these devices
/// themselves.
fn loops_over(list: &Path, devices: &[u64]) -> Vec<String> {
    let is = |path: &Path| number_of(path).is_ok_and(|number| devices.contains(&number));
    let shows_one = |name: &String| {
        let backing = fs::read(list.join(name).join("loop/backing_file")).unwrap_or_default();
        let backing = PathBuf::from(std::ffi::OsString::from_vec(backing.trim_ascii_end().to_owned()));
        // Only paths in /dev are looked up; see above.
        backing.starts_with("/dev") && is(&backing) && !is(&Path::new("/dev").join(name))
    };
    let folder = list.to_string_lossy();
    names_in(&folder).filter(|name| name.starts_with("loop")).filter(shows_one).collect()
}

/// The programs that have an open file for which `wanted` is true, each program once. `wanted` gets
/// the path of the file as the program sees it, and the link in `/proc` to the file.
pub fn openers(ours: &[u32], wanted: impl Fn(&Path, &Path) -> bool) -> Vec<DeviceUse> {
    let mut found = Vec::new();
    for pid in names_in("/proc").filter_map(|name| name.parse::<u32>().ok()).filter(|pid| !ours.contains(pid)) {
        for descriptor in names_in(&format!("/proc/{pid}/fd")) {
            let link = PathBuf::from(format!("/proc/{pid}/fd/{descriptor}"));
            let Ok(path) = fs::read_link(&link) else { continue };
            if path.is_absolute() && wanted(&path, &link) {
                found.push(DeviceUse::Open { pid, name: process::name_of(pid), path });
                break;
            }
        }
    }
    found
}

fn names_in(dir: &str) -> impl Iterator<Item = String> {
    fs::read_dir(dir).into_iter().flatten().flatten().filter_map(|entry| entry.file_name().into_string().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mountinfo_is_parsed() {
        let text = b"36 35 98:0 /mnt1 /mnt/a\\040b\\134c rw,noatime master:1 shared:2 - ext3 /dev/root rw\n\
            22 27 0:5 / /proc rw - proc proc rw\nnonsense\n";
        let found = parse_mounts(text);
        assert_eq!(found.len(), 2);
        assert_eq!(found[0].device, makedev(98, 0));
        assert_eq!(found[0].dir, Path::new("/mnt/a b\\c"));
        assert_eq!((found[0].file_system.as_str(), found[1].file_system.as_str()), ("ext3", "proc"));
        assert!(found[0].is_from(Path::new("/dev/root")) && !found[0].is_from(Path::new("/dev/roo")));
        let part = parse_mounts(b"36 35 259:1 / /mnt rw - ext4 /dev/ublkb1p12 rw").remove(0);
        assert!(part.is_from(Path::new("/dev/ublkb1")) && !part.is_from(Path::new("/dev/ublkb")));
        assert!(!part.is_from(Path::new("/dev/ublkb1p1")));
        assert!(!mounts().unwrap().is_empty());
    }

    #[test]
    fn a_btrfs_mount_is_found_by_its_source_and_by_its_other_devices() {
        let Ok(mut nodes) = fs::read_dir("/dev") else { return };
        let device = nodes.find_map(|node| Some(node.ok()?.path()).filter(|path| number_of(path).is_ok()));
        let Some(device) = device else { return println!("skipped: there is no block device here") };
        let number = number_of(&device).unwrap();
        let line = |source: &str| format!("36 35 0:47 /sub /mnt rw - btrfs {source} rw,subvolid=256");
        let mount = |source: &str| parse_mounts(line(source).as_bytes()).remove(0);
        let devices = |numbers: &[u64], btrfs: &[u64]| Devices { numbers: numbers.into(), btrfs: btrfs.into() };
        let ours = mount(device.to_str().unwrap());
        assert!(devices(&[number], &[]).carry(&ours) && devices(&[], &[number]).carry(&ours));
        assert!(!devices(&[], &[]).carry(&ours) && !devices(&[number], &[]).carry(&mount("none")));

        let list = tempfile::tempdir().unwrap();
        for (uuid, name, dev) in [("a", "loop1", "7:1"), ("a", "loop2", "7:2"), ("b", "loop3", "7:3")] {
            let member = list.path().join(uuid).join("devices").join(name);
            fs::create_dir_all(&member).unwrap();
            fs::write(member.join("dev"), format!("{dev}\n")).unwrap();
        }
        fs::create_dir(list.path().join("features")).unwrap();
        let mut beside = btrfs_beside(list.path(), &[makedev(7, 2)]);
        beside.sort_unstable();
        assert_eq!(beside, [makedev(7, 1), makedev(7, 2)]);
        assert_eq!(btrfs_beside(list.path(), &[makedev(7, 9)]), [0; 0]);
    }

    #[test]
    fn open_files_are_found() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let wanted = |path: &Path, _: &Path| path == file.path();
        let found = openers(&[], wanted);
        assert!(matches!(&found[..], [DeviceUse::Open { pid, .. }] if *pid == std::process::id()), "{found:?}");
        assert_eq!(openers(&[std::process::id()], wanted), []);
    }

    #[test]
    fn a_loop_device_on_a_device_is_found() {
        let Ok(mut nodes) = fs::read_dir("/dev") else { return };
        let device = nodes.find_map(|node| Some(node.ok()?.path()).filter(|path| number_of(path).is_ok()));
        let Some(device) = device else { return println!("skipped: there is no block device here") };
        let list = tempfile::tempdir().unwrap();
        for (name, backing) in [("loop777", device.to_str().unwrap()), ("loop778", "/x.raw"), ("sda", "/dev/null")] {
            fs::create_dir_all(list.path().join(name).join("loop")).unwrap();
            fs::write(list.path().join(name).join("loop/backing_file"), format!("{backing}\n")).unwrap();
        }
        fs::create_dir(list.path().join("loop779")).unwrap();
        let found = |devices: &[u64]| loops_over(list.path(), devices);
        assert_eq!(found(&[number_of(&device).unwrap()]), ["loop777"]);
        assert_eq!(found(&[0]), [""; 0]);
    }

    #[test]
    fn a_file_is_not_a_block_device() {
        assert!(number_of(Path::new("/proc/self/stat")).is_err());
    }
}
