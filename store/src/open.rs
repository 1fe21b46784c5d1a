//! Opening a file or a block device, and nothing else.
//!
//! What is at a path is looked at first and checked again once it is open, and the open does not
//! wait: a FIFO at the place of a disk must not hang the program, and to open some devices is to
//! act (a tape rewinds, a watchdog starts). A block device is claimed when it is opened for
//! writing, so that one that is mounted is refused. The lock is taken before anything is read, and
//! belongs to the descriptor.
//!
//! A path can be opened in two ways ([`Way`]). What a user named is resolved as ever. What another
//! file named (a parent) was resolved, and found to lie where it may, before it is opened; whoever
//! owns a folder on that path could replace it by a symbolic link meanwhile. So such a path is
//! opened without following any link: `openat2` with `RESOLVE_NO_SYMLINKS`, or, where the kernel
//! has none or a sandbox refuses it, one component after the other with `O_NOFOLLOW`. Then:
//!
//! - What is opened lies at exactly the path that was decided on: every component of it is a real
//!   folder, the last a real file.
//! - What was looked at and what was opened are the same file, by device and inode.
//! - It is a regular file, unless devices are allowed.
//!
//! A hard link or a bind mount cannot be told from the file itself, before or after.

use crate::{
    file::retry,
    lock::{self, Holder, LockMode, Refusal},
};
use rustix::{
    fs::{CWD, FileType, Mode, OFlags, ResolveFlags},
    io::Errno,
};
use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    path::{Component, Path, PathBuf},
    time::{Duration, Instant},
};

/// Page cache or O_DIRECT.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CacheMode {
    /// Through the page cache.
    #[default]
    PageCache,
    /// Past it, by O_DIRECT.
    Direct,
}

/// How to open. The default is for reading, through the page cache, with a shared lock.
#[derive(Debug, Clone, Copy, Default)]
pub struct OpenOptions {
    /// For writing as well.
    pub writable: bool,
    /// Create a new file (fails when there is one). Implies nothing else: say `writable` too.
    pub create_new: bool,
    /// How payload reaches the file.
    pub cache: CacheMode,
    /// The lock to take.
    pub lock: LockMode,
}

/// Why a file was not opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The system refused.
    #[error("{}: cannot {doing} it: {source}", path.display())]
    Io {
        /// As in "open".
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Somebody else has it.
    #[error("cannot open {} for {purpose}: it is in use{holder}. End that use first, then try again", path.display())]
    Locked {
        /// The file.
        path: PathBuf,
        /// "reading" or "writing".
        purpose: &'static str,
        /// As in " by qemu-img (process 123)"; empty when that cannot be seen.
        holder: String,
    },
    /// It is a block device that another file names, and devices were not allowed.
    #[error("cannot open {} as a disk: another file names it, and it is a block device; if you trust that file, allow it with --allow-devices", path.display())]
    Device {
        /// What was named.
        path: PathBuf,
    },
    /// It is no file that can hold a disk.
    #[error("cannot open {} as a disk: it is {found}, where a regular file or a block device is needed", path.display())]
    NotAFile {
        /// What was named.
        path: PathBuf,
        /// What is there, as in "a directory".
        found: &'static str,
    },
}

/// How a path is resolved, and what may be at its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// As the system resolves paths. A regular file or a block device.
    Usual,
    /// A path without symbolic links: one on it is an error (`ELOOP`). A block device only if
    /// allowed.
    Canonical {
        /// Whether it may be a block device.
        allow_devices: bool,
    },
}

/// Sector sizes of what is below.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SectorSizes {
    /// The unit of addressing: a block device's own; 512 for a file.
    pub logical_bytes: u32,
    /// The unit of writing: a block device's own; 4096 for a file.
    pub physical_bytes: u32,
}

/// A block device that was closed a moment ago may still be claimed, until the last worker of an
/// io_uring has let go of it.
const CLAIM_RETRIES: u32 = 10;
const CLAIM_PAUSE: Duration = Duration::from_millis(5);

/// The same goes for the locks of a program that was killed: its descriptors are closed at once,
/// but what its rings had in flight keeps the file open until the kernel has taken them apart. So a
/// lock that nobody to be seen holds is asked for again, for so long.
const NOBODYS_PATIENCE: Duration = Duration::from_secs(1);
/// And one whose holder can be seen for so long: it may be about to end.
const HOLDERS_PATIENCE: Duration = Duration::from_millis(100);
const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// What opening gives.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) fd: OwnedFd,
    pub(crate) is_block_device: bool,
    /// Device and inode number of a file; device number and 0, which is no file's inode, of a block
    /// device, so that two nodes of one device are the same.
    pub(crate) identity: (u64, u64),
    pub(crate) sectors: SectorSizes,
}

impl Opened {
    /// Opens, checks and locks.
    pub(crate) fn new(path: &Path, way: Way, options: &OpenOptions) -> Result<Self, OpenError> {
        let failed = |doing: &'static str, source: io::Error| OpenError::Io { doing, path: path.to_owned(), source };
        let looked = if options.create_new {
            None
        } else {
            let stat = match way {
                Way::Usual => rustix::fs::stat(path),
                Way::Canonical { .. } => {
                    open_without_links(path, OFlags::PATH | OFlags::CLOEXEC).and_then(rustix::fs::fstat)
                }
            };
            Some(stat.map_err(|e| failed("open", e.into()))?)
        };
        if let Some(stat) = &looked {
            refuse_unsuitable(path, way, stat.st_mode)?;
        }
        let to_be_device = looked.is_some_and(|stat| FileType::from_raw_mode(stat.st_mode).is_block_device());
        let mut flags = OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
        flags |= if options.writable { OFlags::RDWR } else { OFlags::RDONLY };
        if options.create_new {
            flags |= OFlags::CREATE | OFlags::EXCL;
        } else if to_be_device && options.writable {
            // On a block device this refuses one that is mounted, and keeps others from mounting
            // it.
            flags |= OFlags::EXCL;
        }
        let open = || match way {
            Way::Usual => retry(|| rustix::fs::open(path, flags, Mode::from_raw_mode(0o666))),
            Way::Canonical { .. } => open_without_links(path, flags),
        };
        let mut opened = open();
        for _ in 0..CLAIM_RETRIES {
            if !matches!(opened, Err(Errno::BUSY)) {
                break;
            }
            std::thread::sleep(CLAIM_PAUSE);
            opened = open();
        }
        let fd = opened.map_err(|errno| {
            if errno == Errno::BUSY && to_be_device {
                let what = "the device is in use by the system, perhaps mounted; unmount it first";
                return failed("open", io::Error::new(io::ErrorKind::ResourceBusy, what));
            }
            failed("open", errno.into())
        })?;
        let examining = |errno: Errno| failed("examine", errno.into());
        let stat = rustix::fs::fstat(&fd).map_err(examining)?;
        refuse_unsuitable(path, way, stat.st_mode)?;
        let replaced = |looked: &rustix::fs::Stat| (looked.st_dev, looked.st_ino) != (stat.st_dev, stat.st_ino);
        if way != Way::Usual && looked.as_ref().is_some_and(replaced) {
            return Err(failed("open", io::Error::other("it was replaced by another file in that moment; try again")));
        }
        let is_block_device = FileType::from_raw_mode(stat.st_mode).is_block_device();
        if is_block_device && !to_be_device {
            // It was opened without the claim that a block device needs.
            return Err(failed(
                "open",
                io::Error::other("it was replaced by a block device in that moment; try again"),
            ));
        }
        // With O_NONBLOCK left on, io_uring would answer EAGAIN where it should wait.
        let set_flags = rustix::fs::fcntl_getfl(&fd).map_err(examining)?;
        rustix::fs::fcntl_setfl(&fd, set_flags - OFlags::NONBLOCK).map_err(examining)?;

        let start = Instant::now();
        loop {
            match lock::acquire(fd.as_fd(), options.lock) {
                Ok(()) => break,
                Err(Refusal::Io(source)) => return Err(failed("lock", source)),
                Err(Refusal::Held) => {}
            }
            let holder = lock::holder((stat.st_dev, stat.st_ino), fd.as_fd());
            let patience = match &holder {
                None => NOBODYS_PATIENCE,
                Some(Holder { pid, .. }) if *pid == std::process::id() => Duration::ZERO,
                Some(_) => HOLDERS_PATIENCE,
            };
            if start.elapsed() >= patience {
                return Err(OpenError::Locked {
                    path: path.to_owned(),
                    purpose: if options.writable { "writing" } else { "reading" },
                    holder: holder.map_or_else(String::new, |holder| holder.to_string()),
                });
            }
            std::thread::sleep(LOCK_PAUSE);
        }
        let sectors = if is_block_device {
            let logical_bytes = rustix::fs::ioctl_blksszget(&fd).map_err(examining)?;
            let physical_bytes = rustix::fs::ioctl_blkpbszget(&fd).unwrap_or(logical_bytes);
            SectorSizes { logical_bytes, physical_bytes: physical_bytes.max(logical_bytes) }
        } else {
            SectorSizes { logical_bytes: 512, physical_bytes: 4096 }
        };
        let identity = if is_block_device { (stat.st_rdev, 0) } else { (stat.st_dev, stat.st_ino) };
        Ok(Self { fd, is_block_device, identity, sectors })
    }
}

/// Opens `path` without following a symbolic link anywhere on it. Creates nothing.
fn open_without_links(path: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
    match retry(|| rustix::fs::openat2(CWD, path, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)) {
        // A kernel before 5.6, or a sandbox that does not know the call.
        Err(Errno::NOSYS | Errno::PERM) => walk_without_links(path, flags),
        result => result,
    }
}

/// The same without `openat2`: one component after the other, each in the folder that was opened
/// before it.
fn walk_without_links(path: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
    let folder_flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut names = path.components().peekable();
    let start = if path.is_absolute() { "/" } else { "." };
    let mut folder = retry(|| rustix::fs::open(start, folder_flags, Mode::empty()))?;
    while let Some(name) = names.next() {
        let name = match name {
            Component::RootDir | Component::CurDir => continue,
            other => other.as_os_str(),
        };
        if names.peek().is_some() {
            // A link is no folder here: ENOTDIR. Whoever follows none elsewhere gets ELOOP for it.
            let opened = retry(|| rustix::fs::openat(&folder, name, folder_flags, Mode::empty()));
            folder = opened.map_err(|errno| if errno == Errno::NOTDIR { Errno::LOOP } else { errno })?;
            continue;
        }
        let fd = retry(|| rustix::fs::openat(&folder, name, flags | OFlags::NOFOLLOW, Mode::empty()))?;
        // With O_PATH the link itself is opened.
        let is_link = FileType::from_raw_mode(rustix::fs::fstat(&fd)?.st_mode).is_symlink();
        return if is_link { Err(Errno::LOOP) } else { Ok(fd) };
    }
    Ok(folder)
}

fn refuse_unsuitable(path: &Path, way: Way, mode: u32) -> Result<(), OpenError> {
    let found = match FileType::from_raw_mode(mode) {
        FileType::RegularFile => return Ok(()),
        FileType::BlockDevice if way != (Way::Canonical { allow_devices: false }) => return Ok(()),
        FileType::BlockDevice => return Err(OpenError::Device { path: path.to_owned() }),
        FileType::Directory => "a directory",
        FileType::Fifo => "a named pipe",
        FileType::Socket => "a socket",
        FileType::CharacterDevice => "a character device",
        _ => "something else",
    };
    Err(OpenError::NotAFile { path: path.to_owned(), found })
}

/// Raises how many files this process may have open to what the system allows it, for long chains
/// of images, and says how many that is now.
pub fn raise_open_file_limit() -> io::Result<u64> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum })?;
    }
    Ok(limit.maximum.unwrap_or(u64::MAX))
}

/// Makes the creation, the renaming or the removal of the file at `path` durable, by syncing the
/// directory it is in.
pub fn sync_directory_of(path: &Path) -> io::Result<()> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fd = retry(|| rustix::fs::open(directory, flags, Mode::empty()))?;
    match retry(|| rustix::fs::fsync(&fd)) {
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
    /// Both ways of opening, by openat2 and by components.
    const WAYS: [Open; 2] = [open_without_links, walk_without_links];

    #[test]
    fn no_link_is_followed_anywhere_on_the_path() {
        let dir = tempfile::tempdir().unwrap();
        let real = dir.path().canonicalize().unwrap();
        fs::create_dir_all(real.join("a/b")).unwrap();
        fs::write(real.join("a/b/file"), b"right").unwrap();
        symlink(real.join("a"), real.join("folder")).unwrap();
        symlink(real.join("a/b/file"), real.join("last")).unwrap();
        for open in WAYS {
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
        assert!(refuse_unsuitable(path, Way::Usual, mode).is_ok());
        assert!(refuse_unsuitable(path, Way::Canonical { allow_devices: true }, mode).is_ok());
        let refused = refuse_unsuitable(path, Way::Canonical { allow_devices: false }, mode).unwrap_err();
        assert!(refused.to_string().contains("--allow-devices"), "{refused}");
    }
}
