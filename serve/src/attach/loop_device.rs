//! Loop devices over the FUSE file: setting them up, their partitions, and freeing them.
//!
//! ```text
//!   loop-control ─▶ a free number ─▶ /dev/loopN
//!     ─▶ LOOP_CONFIGURE (file, sector size, direct I/O, partition scan), in one step
//!     ─▶ partitions in the table that the kernel did not find are added (BLKPG)
//! ```
//!
//! The nodes in `/dev` are made by the kernel (devtmpfs) or by udev, never here. If a node does not
//! appear, the caller gets an error.

use crate::attach::{
    contents::{self, Content, PROBE_BYTES},
    error::AttachError,
    partitions::{self, Partition},
    usage,
};
use diskwright_store::sys::loop_device::{self, LoopConfig};
use rustix::{
    fs::{Mode, OFlags},
    io::Errno,
};
use std::{
    fs::{self, File},
    io,
    os::{
        fd::AsFd,
        unix::{ffi::OsStrExt, fs::FileExt},
    },
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

const CONTROL: &str = "/dev/loop-control";

/// How often another program may take the free loop device before us.
const RACES: u32 = 64;

/// How long a device node may take to appear.
pub const NODE_PATIENCE: Duration = Duration::from_secs(2);

const POLL_PAUSE: Duration = Duration::from_millis(5);

/// What a loop device shows.
#[derive(Debug, Clone, Copy)]
pub struct LoopOptions<'a> {
    /// The backing file.
    pub file: &'a Path,
    /// The image's name, for programs that list loop devices.
    pub name: &'a Path,
    /// First byte of the backing file that is shown.
    pub offset_bytes: u64,
    /// Length in bytes; 0 means up to the end of the file.
    pub len_bytes: u64,
    /// Logical sector size.
    pub sector_bytes: u32,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Whether the kernel scans for partitions.
    pub partitions: bool,
}

/// Sets up a free loop device on the file. Returns its path.
///
/// # Errors
/// [`AttachError::Loop`].
pub fn set_up(options: &LoopOptions<'_>) -> Result<PathBuf, AttachError> {
    let failed = |doing, path: &Path, errno: Errno, hint| AttachError::Loop {
        doing,
        path: path.to_owned(),
        source: errno.into(),
        hint,
    };
    let control_path = Path::new(CONTROL);
    let control = rustix::fs::open(control_path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
        .map_err(|errno| failed("find", control_path, errno, hint_of(errno)))?;
    let access = if options.read_only { OFlags::RDONLY } else { OFlags::RDWR };
    let file = rustix::fs::open(options.file, access | OFlags::CLOEXEC, Mode::empty())
        .map_err(|errno| failed("open the disk for", options.file, errno, ""))?;
    let config = LoopConfig {
        backing: file.as_fd(),
        offset_bytes: options.offset_bytes,
        size_limit_bytes: options.len_bytes,
        block_bytes: options.sector_bytes,
        read_only: options.read_only,
        partition_scan: options.partitions,
        direct_io: true,
        name: options.name.as_os_str().as_bytes(),
    };
    for _ in 0..RACES {
        let number = loop_device::free_number(control.as_fd())
            .map_err(|errno| failed("find", control_path, errno, hint_of(errno)))?;
        let path = PathBuf::from(format!("/dev/loop{number}"));
        let hint = "; the device node did not appear; in a container, pass loop devices through to /dev";
        if !wait_for_node(&path) {
            return Err(failed("find", &path, Errno::NOENT, hint));
        }
        let device = rustix::fs::open(&path, access | OFlags::CLOEXEC, Mode::empty())
            .map_err(|errno| failed("open", &path, errno, hint_of(errno)))?;
        match loop_device::configure(device.as_fd(), &config) {
            Ok(()) => return Ok(path),
            // Another program took the device first.
            Err(Errno::BUSY) => continue,
            Err(errno) => return Err(failed("set up", &path, errno, "; it needs Linux 5.8")),
        }
    }
    Err(failed("find", control_path, Errno::BUSY, "; other programs took every free device first; try again"))
}

fn hint_of(errno: Errno) -> &'static str {
    match errno {
        Errno::ACCESS | Errno::PERM => {
            "; block devices need root: run as root, or use `AttachOptions::fuse_dir`, which shows the disk as a file"
        }
        Errno::NOENT | Errno::NODEV | Errno::NXIO | Errno::NOTTY => {
            "; there is no loop driver: load it (modprobe loop), pass its devices through to the container, or use `AttachOptions::fuse_dir`"
        }
        Errno::NOSPC | Errno::NOMEM => "; all loop devices are in use (see losetup --list)",
        _ => "",
    }
}

fn wait_for_node(path: &Path) -> bool {
    wait_until(NODE_PATIENCE, || path.exists())
}

/// Polls until `is_so` returns true, for at most `patience`. Returns whether it did.
pub fn wait_until(patience: Duration, mut is_so: impl FnMut() -> bool) -> bool {
    let until = Instant::now() + patience;
    loop {
        if is_so() {
            return true;
        }
        if Instant::now() >= until {
            return false;
        }
        std::thread::sleep(POLL_PAUSE);
    }
}

/// Updates a loop device to the present length of its file.
///
/// # Errors
/// The error of the system.
pub fn follow_size(path: &Path, file: &Path) -> io::Result<()> {
    // The kernel updates its length of a FUSE file when the file is stat'ed.
    rustix::fs::stat(file)?;
    let device = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    Ok(loop_device::set_capacity(device.as_fd())?)
}

/// Detaches the file from a loop device. `Ok(false)`: another process still has the device open
/// after `patience`, and the kernel frees the device when that process closes it.
///
/// # Errors
/// The error of the system. No error if the device has no file or does not exist.
pub fn free(path: &Path, patience: Duration) -> io::Result<bool> {
    match rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()) {
        Ok(device) => match loop_device::clear(device.as_fd()) {
            Ok(()) | Err(Errno::NXIO) => {}
            Err(errno) => return Err(errno.into()),
        },
        Err(Errno::NOENT | Errno::NXIO) => return Ok(true),
        Err(errno) => return Err(errno.into()),
    }
    Ok(wait_until(patience, || !has_backing_file(path)))
}

/// Whether a loop device is backed by `file`. Only names are compared, so this works even if the
/// FUSE server of the file is gone.
pub fn is_backed_by(path: &Path, file: &Path) -> bool {
    match fs::read(backing_file_of(path)) {
        Ok(text) => text.strip_suffix(b"\n").unwrap_or(&text) == file.as_os_str().as_bytes(),
        // Without /sys this cannot be checked; the record is trusted.
        Err(_) => !Path::new("/sys/block").exists(),
    }
}

fn has_backing_file(path: &Path) -> bool {
    backing_file_of(path).exists()
}

fn backing_file_of(path: &Path) -> PathBuf {
    Path::new("/sys/block").join(path.file_name().unwrap_or_default()).join("loop/backing_file")
}

/// A partition of an attached disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttachedPartition {
    /// Number and range.
    pub partition: Partition,
    /// Its device node, if there is one.
    pub device: Option<PathBuf>,
    /// Its content, if it was recognized.
    pub content: Option<Content>,
}

/// The partitions in the partition table of a device. Adds those to the kernel that it has not
/// found itself.
///
/// # Errors
/// The device cannot be read.
pub fn find_partitions(device: &Path, size_bytes: u64, sector_bytes: u32) -> io::Result<Vec<AttachedPartition>> {
    let file = File::open(device)?;
    let mut read = |offset_bytes: u64, buf: &mut [u8]| file.read_exact_at(buf, offset_bytes);
    let table = partitions::partitions(size_bytes, sector_bytes, &mut read)?;
    let mut found = Vec::new();
    for partition in table {
        let Partition { number, start_bytes, len_bytes } = partition;
        // EBUSY means that the kernel knows the partition. After any other error it has no node.
        let known = match loop_device::add_partition(file.as_fd(), number, start_bytes, len_bytes) {
            Ok(()) => true,
            Err(errno) => errno == Errno::BUSY,
        };
        let node = node_of_partition(device, number);
        let device = if known && has_node(&node) { Some(node) } else { None };
        let content = probe(&file, start_bytes, len_bytes)?;
        found.push(AttachedPartition { partition, device, content });
    }
    Ok(found)
}

/// `/dev/loop0p1`.
fn node_of_partition(device: &Path, number: u32) -> PathBuf {
    let mut node = device.as_os_str().to_owned();
    node.push(format!("p{number}"));
    node.into()
}

/// Whether a device node exists. Waits for it only if `/dev` is a devtmpfs or udev runs, because
/// otherwise no node will appear.
fn has_node(node: &Path) -> bool {
    let dev = usage::mounts().ok().and_then(|mounts| mounts.into_iter().rfind(|mount| mount.dir == Path::new("/dev")));
    let comes = Path::new("/run/udev/control").exists() || dev.is_some_and(|mount| mount.file_system == "devtmpfs");
    if comes { wait_for_node(node) } else { node.exists() }
}

/// Detects the content of a device, or of a range of it.
///
/// # Errors
/// The device cannot be read.
pub fn probe(device: &File, start_bytes: u64, len_bytes: u64) -> io::Result<Option<Content>> {
    let mut start = vec![0; PROBE_BYTES.min(usize::try_from(len_bytes).unwrap_or(PROBE_BYTES))];
    device.read_exact_at(&mut start, start_bytes)?;
    Ok(contents::content(&start))
}
