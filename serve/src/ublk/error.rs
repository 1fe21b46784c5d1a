//! What can go wrong with a ublk device.

use std::{io, path::PathBuf};

/// Why a disk could not be made a ublk device, or why it is one no longer.
#[derive(Debug, thiserror::Error)]
pub enum UblkError {
    /// There is no driver, or one that cannot be used.
    #[error("cannot use {}: {source}{}", path.display(), hint_of(source))]
    NoDriver {
        /// The control device.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The driver refused.
    #[error(
        "cannot {doing} a ublk device: {source}; the kernel's log (dmesg) may say more, and --by loop does without"
    )]
    Device {
        /// As in "add".
        doing: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// A node did not come.
    #[error(
        "{}: no device node came for it; where /dev is not kept by the kernel (a container), let it have ublk devices, or use --by loop", path.display()
    )]
    NoNode {
        /// The node.
        path: PathBuf,
    },
    /// Requests cannot be fetched or committed any more.
    #[error("cannot fetch the kernel's requests: {source}; the disk is attached no longer")]
    Fetch {
        /// What the system said.
        source: io::Error,
    },
    /// The ring, or the disk's queue.
    #[error("the disk's queue failed: {0}; the disk is attached no longer")]
    Queue(io::Error),
}

impl UblkError {
    /// As in "/dev/ublk-control: Permission denied".
    pub(crate) fn briefly(&self) -> String {
        match self {
            Self::NoDriver { path, source } => format!("{}: {source}", path.display()),
            other => other.to_string(),
        }
    }
}

fn hint_of(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound => {
            "; this kernel has no ublk driver, or it is not loaded (modprobe ublk_drv); --by loop does without"
        }
        io::ErrorKind::PermissionDenied => "; only root may; --fuse DIR shows the disk as a file",
        _ => "; --by loop does without",
    }
}
