//! Opening a file or a block device.
//!
//! The file type at a path is checked before and again after the open, and the open does not block:
//! a FIFO in place of a disk must not hang the program, and opening some devices has side effects
//! (a tape rewinds, a watchdog starts). A block device that is opened for writing is claimed with
//! O_EXCL, so a mounted one is refused. The lock is taken before anything is read, and belongs to
//! the descriptor.
//!
//! A path can be opened in two ways ([`PathResolution`]). A path that the user named is resolved as
//! usual. A path that another file named (a parent) was resolved, and its location was permitted,
//! before it is opened. The owner of a folder in that path could replace the folder by a symbolic
//! link meanwhile, so such a path is opened without following any link: with `openat2` and
//! `RESOLVE_NO_SYMLINKS` or, if the kernel lacks it or a sandbox refuses it, component by component
//! with `O_NOFOLLOW`. Then:
//!
//! - The opened file lies at exactly the permitted path: every component is a real folder, the last
//!   one a real file.
//! - The file that was checked and the file that was opened are the same, by device and inode.
//! - It is a regular file, unless devices are allowed.
//!
//! A hard link or a bind mount cannot be distinguished from the file itself.

use crate::{
    claim::{Claim, claim},
    lock::{self, Holder, LockMode, Refusal},
};
use rustix::{
    fs::{CWD, FileType, Mode, OFlags, ResolveFlags},
    io::{Errno, retry_on_intr},
};
use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Component, Path, PathBuf},
    time::{Duration, Instant},
};

/// Whether I/O uses the page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CacheMode {
    /// Through the page cache.
    #[default]
    PageCache,
    /// Bypasses the page cache, with O_DIRECT.
    Direct,
}

/// Options for opening a file. The default: read-only, through the page cache, with a shared lock.
#[derive(Debug, Clone, Copy, Default)]
pub struct OpenOptions {
    /// Open for reading and writing.
    pub writable: bool,
    /// Create a new file; fails if the file exists. Needs `writable` too.
    pub create_new: bool,
    /// Whether payload bypasses the page cache.
    pub cache: CacheMode,
    /// The lock to take.
    pub lock: LockMode,
}

/// Why a file was not opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// A system call failed.
    #[error("{}: cannot {doing} it: {source}", path.display())]
    Io {
        /// The action, as in "open".
        doing: &'static str,
        /// The path that was opened.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Another process, or another descriptor of this one, holds a conflicting lock.
    #[error("cannot open {} for {purpose}: it is in use{holder}. Stop that program or close the file, then try again", path.display())]
    Locked {
        /// The path that was opened.
        path: PathBuf,
        /// "reading" or "writing".
        purpose: &'static str,
        /// As in " by qemu-img (process 123)"; empty if the holder is not visible.
        holder: String,
    },
    /// Another file names this path, it is a block device, and devices are not allowed.
    #[error("cannot open {} as a disk: another file names it, and it is a block device, which this open does not allow", path.display())]
    Device {
        /// The path that was opened.
        path: PathBuf,
    },
    /// Neither a regular file nor a block device.
    #[error("cannot open {} as a disk: it is {found}, where a regular file or a block device is needed", path.display())]
    NotAFile {
        /// The path that was opened.
        path: PathBuf,
        /// The type of the file, as in "a directory".
        found: &'static str,
    },
}

/// How a path is resolved, and which file types are permitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PathResolution {
    /// As the system resolves paths. A regular file or a block device.
    Usual,
    /// A path without symbolic links: a link in it is an error (`ELOOP`). A block device only if
    /// allowed.
    Canonical {
        /// Whether a block device is permitted.
        allow_devices: bool,
    },
}

/// A snapshot of a file, which its storage keeps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreSnapshot {
    /// Its number. Later ones have higher numbers.
    pub id: u64,
    /// Its name.
    pub name: String,
    /// Length of the file then, in bytes.
    pub size_bytes: u64,
}

/// Sector sizes of a file or a block device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SectorSizes {
    /// The unit of addressing: the block device's own, or 512 for a file.
    pub logical_bytes: u32,
    /// The unit of writing: the block device's own, or 4096 for a file.
    pub physical_bytes: u32,
}

/// A block device that was just closed may still be claimed, until the last worker of an io_uring
/// has released it.
const CLAIM_RETRIES: u32 = 10;
const CLAIM_PAUSE: Duration = Duration::from_millis(5);

/// How long to retry a lock whose holder is not visible. After a program is killed, its descriptors
/// are closed at once, but requests in flight on its rings keep the file open, and locked, until
/// the kernel has torn down the rings.
const UNSEEN_HOLDER_TIMEOUT: Duration = Duration::from_secs(1);
/// How long to retry a lock whose holder is visible: it may be about to end.
const VISIBLE_HOLDER_TIMEOUT: Duration = Duration::from_millis(100);
const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// An opened, checked and locked file.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) fd: OwnedFd,
    /// The claim on a block device that is open for writing.
    pub(crate) claim: Option<Claim>,
    pub(crate) is_block_device: bool,
    /// Device and inode number of a file. For a block device, its device number and 0, which is no
    /// file's inode, so that two nodes of one device have the same identity.
    pub(crate) identity: (u64, u64),
    pub(crate) sectors: SectorSizes,
}

impl Opened {
    /// Opens, checks and locks the file at `path`.
    pub(crate) fn new(path: &Path, resolution: PathResolution, options: &OpenOptions) -> Result<Self, OpenError> {
        let failed = |doing: &'static str, source: io::Error| OpenError::Io { doing, path: path.to_owned(), source };
        let checked = if options.create_new {
            None
        } else {
            let stat = match resolution {
                PathResolution::Usual => rustix::fs::stat(path),
                PathResolution::Canonical { .. } => {
                    open_without_links(path, OFlags::PATH | OFlags::CLOEXEC).and_then(rustix::fs::fstat)
                }
            };
            Some(stat.map_err(|e| failed("open", e.into()))?)
        };
        if let Some(stat) = &checked {
            refuse_unsuitable(path, resolution, stat.st_mode)?;
        }
        let to_be_device = checked.is_some_and(|stat| FileType::from_raw_mode(stat.st_mode).is_block_device());
        let mut flags = OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
        flags |= if options.writable { OFlags::RDWR } else { OFlags::RDONLY };
        if options.create_new {
            flags |= OFlags::CREATE | OFlags::EXCL;
        }
        let open = |flags| match resolution {
            PathResolution::Usual => retry_on_intr(|| rustix::fs::open(path, flags, Mode::from_raw_mode(0o666))),
            PathResolution::Canonical { .. } => open_without_links(path, flags),
        };
        let open_claimed = || {
            let device = checked.filter(|_| to_be_device && options.writable).map(|stat| stat.st_rdev);
            // On a block device, O_EXCL fails if it is mounted, and prevents others from mounting
            // it.
            let claimed = device.map(|number| claim(number, &|| open(flags | OFlags::EXCL))).transpose()?;
            Ok((open(flags)?, claimed))
        };
        let mut opened = open_claimed();
        for _ in 0..CLAIM_RETRIES {
            if !matches!(opened, Err(Errno::BUSY)) {
                break;
            }
            std::thread::sleep(CLAIM_PAUSE);
            opened = open_claimed();
        }
        let (fd, claim) = opened.map_err(|errno| {
            if errno == Errno::BUSY && to_be_device {
                let what = "the device is in use by the system, perhaps mounted; unmount it first";
                return failed("open", io::Error::new(io::ErrorKind::ResourceBusy, what));
            }
            failed("open", errno.into())
        })?;
        let examining = |errno: Errno| failed("examine", errno.into());
        let stat = rustix::fs::fstat(&fd).map_err(examining)?;
        refuse_unsuitable(path, resolution, stat.st_mode)?;
        let replaced = |checked: &rustix::fs::Stat| (checked.st_dev, checked.st_ino) != (stat.st_dev, stat.st_ino);
        let is_claimed_as = |checked: &rustix::fs::Stat| claim.is_some() && checked.st_rdev != stat.st_rdev;
        if checked.as_ref().is_some_and(is_claimed_as)
            || resolution != PathResolution::Usual && checked.as_ref().is_some_and(replaced)
        {
            return Err(failed(
                "open",
                io::Error::other("it was replaced by another file while it was opened; try again"),
            ));
        }
        let is_block_device = FileType::from_raw_mode(stat.st_mode).is_block_device();
        if is_block_device && !to_be_device {
            // The device is not claimed.
            return Err(failed(
                "open",
                io::Error::other("it was replaced by a block device while it was opened; try again"),
            ));
        }
        // With O_NONBLOCK set, io_uring would answer EAGAIN instead of waiting.
        let set_flags = rustix::fs::fcntl_getfl(&fd).map_err(examining)?;
        rustix::fs::fcntl_setfl(&fd, set_flags - OFlags::NONBLOCK).map_err(examining)?;

        let purpose = if options.writable { "writing" } else { "reading" };
        take_lock(path, fd.as_fd(), purpose, &|| lock::acquire(fd.as_fd(), options.lock))?;
        let sectors = if is_block_device {
            let logical_bytes = rustix::fs::ioctl_blksszget(&fd).map_err(examining)?;
            let physical_bytes = rustix::fs::ioctl_blkpbszget(&fd).unwrap_or(logical_bytes);
            SectorSizes { logical_bytes, physical_bytes: physical_bytes.max(logical_bytes) }
        } else {
            SectorSizes { logical_bytes: 512, physical_bytes: 4096 }
        };
        let identity = if is_block_device { (stat.st_rdev, 0) } else { (stat.st_dev, stat.st_ino) };
        Ok(Self { fd, claim, is_block_device, identity, sectors })
    }
}

/// Repeats `take`, which locks `fd`, while the program that has the file may be about to end.
pub(crate) fn take_lock(
    path: &Path,
    fd: BorrowedFd<'_>,
    purpose: &'static str,
    take: &dyn Fn() -> Result<(), Refusal>,
) -> Result<(), OpenError> {
    let failed = |doing: &'static str, source: io::Error| OpenError::Io { doing, path: path.to_owned(), source };
    let start = Instant::now();
    loop {
        match take() {
            Ok(()) => return Ok(()),
            Err(Refusal::Io(source)) => return Err(failed("lock", source)),
            Err(Refusal::Held) => {}
        }
        let stat = rustix::fs::fstat(fd).map_err(|errno| failed("examine", errno.into()))?;
        let holder = lock::holder((stat.st_dev, stat.st_ino), fd);
        let timeout = match &holder {
            None => UNSEEN_HOLDER_TIMEOUT,
            Some(Holder { pid, .. }) if *pid == std::process::id() => Duration::ZERO,
            Some(_) => VISIBLE_HOLDER_TIMEOUT,
        };
        if start.elapsed() >= timeout {
            return Err(OpenError::Locked {
                path: path.to_owned(),
                purpose,
                holder: holder.map_or_else(String::new, |holder| holder.to_string()),
            });
        }
        std::thread::sleep(LOCK_PAUSE);
    }
}

/// Opens `path` without following symbolic links in any component. Creates nothing.
fn open_without_links(path: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
    match retry_on_intr(|| rustix::fs::openat2(CWD, path, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)) {
        // A kernel before 5.6, or a sandbox that does not permit the call.
        Err(Errno::NOSYS | Errno::PERM) => walk_without_links(path, flags),
        result => result,
    }
}

/// The fallback without `openat2`: opens one component after the other, each relative to the folder
/// before it.
fn walk_without_links(path: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
    let folder_flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut names = path.components().peekable();
    let start = if path.is_absolute() { "/" } else { "." };
    let mut folder = retry_on_intr(|| rustix::fs::open(start, folder_flags, Mode::empty()))?;
    while let Some(name) = names.next() {
        let name = match name {
            Component::RootDir | Component::CurDir => continue,
            other => other.as_os_str(),
        };
        if names.peek().is_some() {
            // Here a link gives ENOTDIR; opens that refuse links elsewhere give ELOOP.
            let opened = retry_on_intr(|| rustix::fs::openat(&folder, name, folder_flags, Mode::empty()));
            folder = opened.map_err(|errno| if errno == Errno::NOTDIR { Errno::LOOP } else { errno })?;
            continue;
        }
        let fd = retry_on_intr(|| rustix::fs::openat(&folder, name, flags | OFlags::NOFOLLOW, Mode::empty()))?;
        // With O_PATH, the link itself is opened.
        let is_link = FileType::from_raw_mode(rustix::fs::fstat(&fd)?.st_mode).is_symlink();
        return if is_link { Err(Errno::LOOP) } else { Ok(fd) };
    }
    Ok(folder)
}

fn refuse_unsuitable(path: &Path, resolution: PathResolution, mode: u32) -> Result<(), OpenError> {
    let found = match FileType::from_raw_mode(mode) {
        FileType::RegularFile => return Ok(()),
        FileType::BlockDevice if resolution != (PathResolution::Canonical { allow_devices: false }) => return Ok(()),
        FileType::BlockDevice => return Err(OpenError::Device { path: path.to_owned() }),
        FileType::Directory => "a directory",
        FileType::Fifo => "a named pipe",
        FileType::Socket => "a socket",
        FileType::CharacterDevice => "a character device",
        _ => "something else",
    };
    Err(OpenError::NotAFile { path: path.to_owned(), found })
}

/// Raises the limit of open files to the maximum that the system allows, for long chains of images.
/// Returns the new limit.
pub fn raise_open_file_limit() -> io::Result<u64> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum })?;
    }
    Ok(limit.maximum.unwrap_or(u64::MAX))
}

/// The user as whom this process accesses files.
pub fn effective_user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Makes the creation, renaming or removal of the file at `path` durable, by syncing its directory.
pub fn sync_directory_of(path: &Path) -> io::Result<()> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fd = retry_on_intr(|| rustix::fs::open(directory, flags, Mode::empty()))?;
    match retry_on_intr(|| rustix::fs::fsync(&fd)) {
        // Some network file systems cannot sync a directory, and need not.
        Err(Errno::INVAL) => Ok(()),
        result => Ok(result?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, os::unix::fs::symlink};

    type Open = fn(&Path, OFlags) -> Result<OwnedFd, Errno>;
    /// Both implementations: by openat2, and component by component.
    const IMPLEMENTATIONS: [Open; 2] = [open_without_links, walk_without_links];

    #[test]
    fn no_link_is_followed_anywhere_on_the_path() {
        let dir = tempfile::tempdir().unwrap();
        let real = dir.path().canonicalize().unwrap();
        fs::create_dir_all(real.join("a/b")).unwrap();
        fs::write(real.join("a/b/file"), b"right").unwrap();
        symlink(real.join("a"), real.join("folder")).unwrap();
        symlink(real.join("a/b/file"), real.join("last")).unwrap();
        for open in IMPLEMENTATIONS {
            for flags in [OFlags::PATH | OFlags::CLOEXEC, OFlags::RDONLY | OFlags::CLOEXEC] {
                assert!(open(&real.join("a/b/file"), flags).is_ok());
                for through in ["folder/b/file", "last"] {
                    assert_eq!(open(&real.join(through), flags).unwrap_err(), Errno::LOOP, "{through}");
                }
                assert_eq!(open(&real.join("a/none"), flags).unwrap_err(), Errno::NOENT);
            }
        }
    }

    #[test]
    fn devices_are_opened_by_reference_only_if_allowed() {
        let mode = 0o060_000;
        let path = Path::new("/dev/x");
        assert!(refuse_unsuitable(path, PathResolution::Usual, mode).is_ok());
        assert!(refuse_unsuitable(path, PathResolution::Canonical { allow_devices: true }, mode).is_ok());
        let refused = refuse_unsuitable(path, PathResolution::Canonical { allow_devices: false }, mode).unwrap_err();
        assert!(refused.to_string().contains("it is a block device, which this open does not allow"), "{refused}");
    }
}
