//! Errors of ublk devices.

use std::{io, path::PathBuf};

/// Why a disk could not be made a ublk device, or why its ublk device ended.
#[derive(Debug, thiserror::Error)]
pub enum UblkError {
    /// The control device cannot be opened: there is no ublk driver, or no permission.
    #[error("cannot use {}: {source}{}", path.display(), hint_of(source))]
    NoDriver { path: PathBuf, source: io::Error },
    /// The driver refused a control command.
    #[error(
        "cannot {doing} a ublk device: {source}; see the kernel's log (dmesg), or attach with `AttachOptions::by` = loop"
    )]
    Device {
        /// The command, as in "add".
        doing: &'static str,
        source: io::Error,
    },
    /// The device node did not appear.
    #[error(
        "{}: the device node did not appear; in a container, pass ublk devices through to /dev, or attach with `AttachOptions::by` = loop", path.display()
    )]
    NoNode { path: PathBuf },
    /// Requests can no longer be fetched from the kernel.
    #[error("cannot fetch requests from the ublk driver: {source}; the disk is no longer attached")]
    Fetch { source: io::Error },
    /// The ring or the disk's queue failed.
    #[error("the disk's queue failed: {0}; the disk is no longer attached")]
    Queue(io::Error),
}

impl UblkError {
    /// A short form for another error's text, as in "/dev/ublk-control: Permission denied".
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
            "; the kernel has no ublk driver, or it is not loaded (modprobe ublk_drv); or attach with `AttachOptions::by` = loop"
        }
        io::ErrorKind::PermissionDenied => {
            "; ublk devices need root; `AttachOptions::fuse_dir` shows the disk as a file without root"
        }
        _ => "; or attach with `AttachOptions::by` = loop",
    }
}
