//! Errors of FUSE mounts.

use crate::fuse::wire::WireError;
use std::{io, path::PathBuf};

/// Why a disk could not be mounted, or why its mount ended.
#[derive(Debug, thiserror::Error)]
pub enum FuseError {
    /// `/dev/fuse` cannot be opened.
    #[error(
        "cannot open {}: {source}; attaching needs FUSE: load it (modprobe fuse), or pass the device through to the container", path.display()
    )]
    NoDevice {
        /// `/dev/fuse`.
        path: PathBuf,
        source: io::Error,
    },
    /// mount(2) failed.
    #[error("cannot mount on {}: {source}{hint}", point.display())]
    Mount {
        point: PathBuf,
        source: io::Error,
        /// Begins with "; ", or is empty.
        hint: &'static str,
    },
    /// The mount point cannot be used.
    #[error("cannot mount on {}: {what}", point.display())]
    BadMountPoint {
        point: PathBuf,
        /// What is wrong, and what to do.
        what: &'static str,
    },
    /// The helper `fusermount3` failed.
    #[error("cannot mount on {}: {what}", point.display())]
    Helper {
        point: PathBuf,
        /// The helper's error text, or why it did not run.
        what: String,
    },
    /// The unmount failed.
    #[error("cannot unmount {}: {what}", point.display())]
    Unmount { point: PathBuf, what: String },
    /// The kernel's FUSE protocol version is not supported.
    #[error(
        "the kernel's FUSE protocol is {major}.{minor}; the oldest supported is 7.31 (Linux 5.4): use a newer kernel"
    )]
    TooOld {
        /// Major version of the kernel.
        major: u32,
        /// Minor version of the kernel.
        minor: u32,
    },
    /// A message has a length that does not fit its operation.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// A read from or write to `/dev/fuse` failed.
    #[error("cannot {doing} /dev/fuse: {source}; the disk is no longer attached")]
    Kernel {
        /// "read from", "write to" or "poll".
        doing: &'static str,
        source: io::Error,
    },
    /// The disk's queue failed.
    #[error("the disk's queue failed: {0}; the disk is no longer attached")]
    Queue(io::Error),
}
