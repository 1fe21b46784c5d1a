//! Loop devices over the FUSE file: getting one, its partitions, letting it go.
//!
//! ```text
//!   loop-control ─▶ a free number ─▶ /dev/loopN ─▶ LOOP_CONFIGURE (file, sector, direct I/O, partition scan), in one step
//!                                         │
//!                                         └─▶ the kernel found no partitions though the table has some? it is told of them (BLKPG)
//! ```
//!
//! Nodes in `/dev` are made by the kernel (devtmpfs) or udev, and never here: where they do not
//! come, the caller is told.

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

/// How often another program may take the free device before us.
const RACES: u32 = 64;

/// How long a node may take to appear.
pub const NODE_PATIENCE: Duration = Duration::from_secs(2);

const POLL_PAUSE: Duration = Duration::from_millis(5);

/// What a loop device is to show.
#[derive(Debug, Clone, Copy)]
pub struct LoopOptions<'a> {
    /// The file.
    pub file: &'a Path,
    /// The image, for those who list loop devices.
    pub name: &'a Path,
    /// First byte.
    pub offset_bytes: u64,
    /// Length; 0 is all that follows.
    pub len_bytes: u64,
    /// Logical sector.
    pub sector_bytes: u32,
    /// Writes are refused.
    pub read_only: bool,
    /// Whether it may have partitions.
    pub partitions: bool,
}

/// Gets a free loop device and gives it the file.
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
        let hint = "; no device node came for it: where /dev is not kept by the kernel (a container), let it have loop devices";
        if !wait_for_node(&path) {
            return Err(failed("find", &path, Errno::NOENT, hint));
        }
        let device = rustix::fs::open(&path, access | OFlags::CLOEXEC, Mode::empty())
            .map_err(|errno| failed("open", &path, errno, hint_of(errno)))?;
        match loop_device::configure(device.as_fd(), &config) {
            Ok(()) => return Ok(path),
            // Somebody else was faster.
            Err(Errno::BUSY) => continue,
            Err(errno) => return Err(failed("set up", &path, errno, "; it needs Linux 5.8")),
        }
    }
    Err(failed("find", control_path, Errno::BUSY, "; other programs take every free one; try again"))
}

fn hint_of(errno: Errno) -> &'static str {
    match errno {
        Errno::ACCESS | Errno::PERM => {
            "; only root has block devices: be root, or take --fuse DIR, which gives the disk as a file"
        }
        Errno::NOENT | Errno::NODEV | Errno::NXIO | Errno::NOTTY => {
            "; there is no loop driver here: load it (modprobe loop), in a container let it have the devices, or take --fuse DIR"
        }
        Errno::NOSPC | Errno::NOMEM => "; all loop devices are in use (see losetup --list)",
        _ => "",
    }
}

fn wait_for_node(path: &Path) -> bool {
    wait_until(NODE_PATIENCE, || path.exists())
}

/// Looks again and again, for at most `patience`.
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

/// Gives a loop device the length that its file has now.
///
/// # Errors
/// What the system says.
pub fn follow_size(path: &Path, file: &Path) -> io::Result<()> {
    // The kernel learns the length of a FUSE file when somebody asks for it.
    rustix::fs::stat(file)?;
    let device = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    Ok(loop_device::set_capacity(device.as_fd())?)
}

/// Takes the file from a loop device. `Ok(false)`: another process has the device open, and the
/// kernel frees it when that process closes it.
///
/// # Errors
/// What the system says. That it has no file, or is not there, is no error.
pub fn let_go(path: &Path) -> io::Result<bool> {
    match rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()) {
        Ok(device) => match loop_device::clear(device.as_fd()) {
            Ok(()) | Err(Errno::NXIO) => {}
            Err(errno) => return Err(errno.into()),
        },
        Err(Errno::NOENT | Errno::NXIO) => return Ok(true),
        Err(errno) => return Err(errno.into()),
    }
    Ok(wait_until(NODE_PATIENCE, || !shows_anything(path)))
}

/// Whether a loop device shows `file`. The kernel is asked for the name only, so a file whose
/// server is gone does no harm.
pub fn shows(path: &Path, file: &Path) -> bool {
    match fs::read(backing_file_of(path)) {
        Ok(text) => text.strip_suffix(b"\n").unwrap_or(&text) == file.as_os_str().as_bytes(),
        // Without /sys nobody can tell, and the record is believed.
        Err(_) => !Path::new("/sys/block").exists(),
    }
}

fn shows_anything(path: &Path) -> bool {
    backing_file_of(path).exists()
}

fn backing_file_of(path: &Path) -> PathBuf {
    Path::new("/sys/block").join(path.file_name().unwrap_or_default()).join("loop/backing_file")
}

/// A partition as this machine shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Number, place.
    pub partition: Partition,
    /// Its node, if there is one.
    pub device: Option<PathBuf>,
    /// What is in it.
    pub content: Option<Content>,
}

/// The partitions of a device: those that the table names, of which the kernel is told where it did
/// not find them itself.
///
/// # Errors
/// The device cannot be read.
pub fn find_partitions(device: &Path, size_bytes: u64, sector_bytes: u32) -> io::Result<Vec<Found>> {
    let file = File::open(device)?;
    let mut read = |offset_bytes: u64, buf: &mut [u8]| file.read_exact_at(buf, offset_bytes);
    let table = partitions::partitions(size_bytes, sector_bytes, &mut read)?;
    let mut found = Vec::new();
    for partition in table {
        let Partition { number, start_bytes, len_bytes } = partition;
        // EBUSY: the kernel has found it. Any other failure leaves it without a node.
        let known = match loop_device::add_partition(file.as_fd(), number, start_bytes, len_bytes) {
            Ok(()) => true,
            Err(errno) => errno == Errno::BUSY,
        };
        let node = node_of_partition(device, number);
        let device = if known && has_node(&node) { Some(node) } else { None };
        let content = probe(&file, start_bytes, len_bytes)?;
        found.push(Found { partition, device, content });
    }
    Ok(found)
}

/// `/dev/loop0p1`.
fn node_of_partition(device: &Path, number: u32) -> PathBuf {
    let mut node = device.as_os_str().to_owned();
    node.push(format!("p{number}"));
    node.into()
}

/// Waits for a node only where nodes come by themselves: where `/dev` is a devtmpfs, or udev runs.
fn has_node(node: &Path) -> bool {
    let dev = usage::mounts().ok().and_then(|mounts| mounts.into_iter().rfind(|mount| mount.dir == Path::new("/dev")));
    let comes = Path::new("/run/udev/control").exists() || dev.is_some_and(|mount| mount.file_system == "devtmpfs");
    if comes { wait_for_node(node) } else { node.exists() }
}

/// What a device, or a range of it, holds.
///
/// # Errors
/// It cannot be read.
pub fn probe(device: &File, start_bytes: u64, len_bytes: u64) -> io::Result<Option<Content>> {
    let mut start = vec![0; PROBE_BYTES.min(usize::try_from(len_bytes).unwrap_or(PROBE_BYTES))];
    device.read_exact_at(&mut start, start_bytes)?;
    Ok(contents::content(&start))
}
