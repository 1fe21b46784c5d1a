//! What can go wrong with a FUSE mount.

use crate::fuse::wire::WireError;
use std::{io, path::PathBuf};

/// Why a disk could not be mounted, or why it is served no longer.
#[derive(Debug, thiserror::Error)]
pub enum FuseError {
    /// There is no FUSE here.
    #[error(
        "cannot open {}: {source}; FUSE is what attaching needs: load it (modprobe fuse), or, in a container, let it have that device", path.display()
    )]
    NoDevice {
        /// `/dev/fuse`.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The system did not mount.
    #[error("cannot mount on {}: {source}{hint}", point.display())]
    Mount {
        /// The mount point.
        point: PathBuf,
        /// What the system said.
        source: io::Error,
        /// Begins with "; ", or is empty.
        hint: &'static str,
    },
    /// The mount point is of no use.
    #[error("cannot mount on {}: {what}", point.display())]
    BadMountPoint {
        /// The mount point.
        point: PathBuf,
        /// What it is, and what to do.
        what: &'static str,
    },
    /// The program that mounts for users failed.
    #[error("cannot mount on {}: {what}", point.display())]
    Helper {
        /// The mount point.
        point: PathBuf,
        /// What it said, or why it did not run.
        what: String,
    },
    /// It cannot be unmounted.
    #[error("cannot unmount {}: {what}", point.display())]
    Unmount {
        /// The mount point.
        point: PathBuf,
        /// Why.
        what: String,
    },
    /// The kernel's protocol is older than what is spoken here.
    #[error(
        "this kernel speaks FUSE {major}.{minor}, and 7.31 (Linux 5.4) is the oldest that is understood; use a younger kernel"
    )]
    TooOld {
        /// Of the kernel.
        major: u32,
        /// Of the kernel.
        minor: u32,
    },
    /// A message that makes no sense.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// Reading from the kernel or answering it failed.
    #[error("cannot {doing} the kernel's FUSE: {source}; the disk is attached no longer")]
    Kernel {
        /// "read from", "answer".
        doing: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// The disk's queue failed.
    #[error("the disk's queue failed: {0}; the disk is attached no longer")]
    Queue(io::Error),
}
