//! Mounting and unmounting: mount(2) for root, the setuid helper `fusermount3` for other users.
//!
//! ```text
//!   root    open /dev/fuse ─▶ mount(2) with fd=N
//!   user    fusermount3 with a socket as its standard input: it opens /dev/fuse, mounts, and
//!           sends the descriptor back through the socket
//! ```
//!
//! The descriptor holds the mount. When its last copy is closed, even by a crash, the kernel
//! answers every request with an error, so no program hangs. The descriptor is therefore
//! close-on-exec and passed to no other process.

use crate::fuse::{error::FuseError, view::Shape};
use rustix::{
    fs::{FileType, Mode, OFlags},
    io::Errno,
    mount::{MountFlags, UnmountFlags},
    net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags},
};
use std::{
    ffi::CString,
    io::{self, IoSliceMut},
    mem::MaybeUninit,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::Path,
    process::{Command, Stdio},
};

const DEVICE: &str = "/dev/fuse";

/// The helper programs, the current one first.
const HELPERS: [&str; 2] = ["fusermount3", "fusermount"];

/// How to mount.
#[derive(Debug, Clone)]
pub struct MountOptions {
    /// Whether the mount point is a file or a directory.
    pub shape: Shape,
    /// Mount read-only.
    pub read_only: bool,
}

/// Whether a path can be mounted on as a file or as a directory.
///
/// # Errors
/// The path is neither a directory nor a regular file, or cannot be read.
pub fn shape_of(point: &Path) -> Result<Shape, FuseError> {
    let found = rustix::fs::stat(point).map_err(|errno| FuseError::Mount {
        point: point.to_owned(),
        source: errno.into(),
        hint: "; the mount point must exist",
    })?;
    match FileType::from_raw_mode(found.st_mode) {
        FileType::Directory => Ok(Shape::Directory),
        FileType::RegularFile => Ok(Shape::File),
        _ => Err(FuseError::BadMountPoint {
            point: point.to_owned(),
            what: "it is neither a directory nor a regular file; make a directory and name that",
        }),
    }
}

/// Mounts, and returns the `/dev/fuse` descriptor that serves the mount.
///
/// # Errors
/// See [`FuseError`].
pub fn mount(point: &Path, options: &MountOptions) -> Result<OwnedFd, FuseError> {
    if rustix::process::geteuid().is_root() {
        match mount_directly(point, options) {
            // Root without CAP_SYS_ADMIN, as in some containers. The helper would fail too.
            Err(FuseError::Mount { point, source, .. }) if source.kind() == io::ErrorKind::PermissionDenied => {
                let hint = "; this process may not mount (a container without CAP_SYS_ADMIN?)";
                Err(FuseError::Mount { point, source, hint })
            }
            result => result,
        }
    } else {
        mount_by_helper(point, options)
    }
}

fn mount_directly(point: &Path, options: &MountOptions) -> Result<OwnedFd, FuseError> {
    let fd = rustix::fs::open(DEVICE, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
        .map_err(|errno| FuseError::NoDevice { path: DEVICE.into(), source: errno.into() })?;
    let data = format!(
        "fd={},rootmode={:o},user_id={},group_id={},default_permissions",
        fd.as_raw_fd(),
        options.shape.root_mode(),
        rustix::process::geteuid().as_raw(),
        rustix::process::getegid().as_raw(),
    );
    let data = CString::new(data).expect("numbers hold no zero byte");
    let mut flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOATIME;
    if options.read_only {
        flags |= MountFlags::RDONLY;
    }
    rustix::mount::mount("diskwright", point, "fuse.diskwright", flags, data.as_c_str()).map_err(|errno| {
        let hint = match errno {
            Errno::NODEV => "; this kernel has no FUSE: load it (modprobe fuse)",
            _ => "",
        };
        FuseError::Mount { point: point.to_owned(), source: errno.into(), hint }
    })?;
    Ok(fd)
}

fn mount_by_helper(point: &Path, options: &MountOptions) -> Result<OwnedFd, FuseError> {
    let failed = |what: String| FuseError::Helper { point: point.to_owned(), what };
    let access = if options.read_only { "ro" } else { "rw" };
    let words = format!("{access},nosuid,nodev,noatime,default_permissions,fsname=diskwright,subtype=diskwright");
    let mut missing = None;
    for helper in HELPERS {
        let (ours, theirs) =
            UnixStream::pair().map_err(|error| failed(format!("cannot create a socket pair: {error}")))?;
        // The helper gets the socket as standard input, the only descriptor that std passes to a
        // child at a known number.
        let started = Command::new(helper)
            .args(["-o", &words, "--"])
            .arg(point)
            .env("_FUSE_COMMFD", "0")
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn();
        let child = match started {
            Ok(child) => child,
            Err(error) => {
                missing = missing.or(Some(error));
                continue;
            }
        };
        let received = receive_descriptor(&ours);
        let ended = child.wait_with_output().map_err(|error| failed(format!("cannot wait for {helper}: {error}")))?;
        return match received {
            Ok(Some(fd)) => Ok(fd),
            _ => {
                let said = String::from_utf8_lossy(&ended.stderr);
                let said = said.trim();
                Err(failed(if said.is_empty() { format!("{helper} returned no descriptor") } else { said.to_owned() }))
            }
        };
    }
    let why = missing.map_or_else(String::new, |error| format!(" ({error})"));
    Err(failed(format!(
        "users other than root need {} to mount, and it was not found{why}; install the package fuse3, or run as root",
        HELPERS[0]
    )))
}

/// Receives one byte and a descriptor. `None` if the other end was closed without sending one.
fn receive_descriptor(socket: &UnixStream) -> io::Result<Option<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let received = rustix::io::retry_on_intr(|| {
        rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)
    })?;
    if received.bytes == 0 {
        return Ok(None);
    }
    Ok(control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    }))
}

/// Unmounts. `lazily` detaches the mount at once (MNT_DETACH), even while files in it are open.
///
/// # Errors
/// [`FuseError::Unmount`]. No error if nothing is mounted there.
pub fn unmount(point: &Path, lazily: bool) -> Result<(), FuseError> {
    if !rustix::process::geteuid().is_root() {
        return unmount_by_helper(point, lazily);
    }
    let flags = if lazily { UnmountFlags::DETACH } else { UnmountFlags::empty() } | UnmountFlags::NOFOLLOW;
    match rustix::mount::unmount(point, flags) {
        // EINVAL: not a mount point. ENOENT: the path does not exist.
        Ok(()) | Err(Errno::INVAL | Errno::NOENT) => Ok(()),
        Err(errno) => {
            let what = match errno {
                Errno::BUSY => "device or resource busy; close the files that are open in it".to_owned(),
                other => io::Error::from(other).to_string(),
            };
            Err(FuseError::Unmount { point: point.to_owned(), what })
        }
    }
}

fn unmount_by_helper(point: &Path, lazily: bool) -> Result<(), FuseError> {
    let failed = |what: String| FuseError::Unmount { point: point.to_owned(), what };
    for helper in HELPERS {
        let mut command = Command::new(helper);
        command.arg("-u").args(lazily.then_some("-z")).arg("--").arg(point);
        match command.stdin(Stdio::null()).output() {
            Ok(ended) if ended.status.success() => return Ok(()),
            Ok(ended) => {
                let said = String::from_utf8_lossy(&ended.stderr).trim().to_owned();
                // The helper's text for "nothing is mounted there".
                return if said.contains("not found in") { Ok(()) } else { Err(failed(said)) };
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(failed(format!("cannot run {helper}: {error}"))),
        }
    }
    Err(failed(format!("{} was not found; install the package fuse3", HELPERS[0])))
}
