//! Errors of attaching and detaching.

use crate::{attach::usage::DeviceUse, fuse::FuseError, ublk::UblkError};
use std::{
    io,
    path::{Path, PathBuf},
};

/// Why a disk was not attached, or not detached.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The FUSE mount failed.
    #[error(transparent)]
    Fuse(#[from] FuseError),
    /// The ublk device failed.
    #[error(transparent)]
    Ublk(#[from] UblkError),
    /// Neither ublk nor a loop device is available.
    #[error("{other}; and ublk, which needs no loop device, is not available ({})", ublk.briefly())]
    NoDevice {
        /// Why there is no ublk device.
        ublk: UblkError,
        /// Why there is no loop device.
        other: Box<AttachError>,
    },
    /// Options that contradict each other or that this user may not use.
    #[error("{what}; {hint}")]
    BadOptions {
        /// What is wrong.
        what: String,
        /// What to do.
        hint: &'static str,
    },
    /// The folder with the records of attached disks cannot be used.
    #[error("cannot {doing} {}: {source}{hint}", path.display())]
    State {
        /// The operation, as in "create".
        doing: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The cause.
        source: io::Error,
        /// A hint that begins with "; ", or empty.
        hint: &'static str,
    },
    /// The same image is already attached.
    #[error("{}: already attached as {}; detach it first", file.display(), place.display())]
    AlreadyAttached {
        /// The image.
        file: PathBuf,
        /// The device, or the file, by which it is reached.
        place: PathBuf,
    },
    /// No attached disk has this name.
    #[error("{}: not attached; `diskwright attached` lists the attached disks", target.display())]
    NotAttached {
        /// The name that the user gave.
        target: PathBuf,
    },
    /// The disk is in use.
    #[error("{} is {}; end this use first{hint}, or detach with `DetachOptions::force`", place.display(), sentence_of(uses))]
    InUse {
        /// The device.
        place: PathBuf,
        /// The uses, at least one.
        uses: Vec<DeviceUse>,
        /// A hint that begins with " (", or empty.
        hint: &'static str,
    },
    /// A loop device could not be set up.
    #[error("cannot {doing} a loop device ({}): {source}{hint}", path.display())]
    Loop {
        /// The operation, as in "set up".
        doing: &'static str,
        /// The device.
        path: PathBuf,
        /// The cause.
        source: io::Error,
        /// A hint that begins with "; ", or empty.
        hint: &'static str,
    },
    /// The file system to mount does not exist or cannot be mounted.
    #[error("{}: {what}", file.display())]
    Content {
        /// The image.
        file: PathBuf,
        /// What was found, what was expected, what to do.
        what: String,
    },
    /// The server process failed.
    #[error("{0}")]
    Server(String),
    /// This machine lacks something that the server needs.
    #[error("{0}")]
    Machine(String),
    /// Data that was written last did not reach the disk.
    #[error("{}: {what}", place.display())]
    Flush {
        /// The device.
        place: PathBuf,
        /// What happened and what it means.
        what: String,
    },
    /// The supervisor did not do what it was asked to do.
    #[error("{0}")]
    Supervisor(String),
}

pub(crate) fn state_error(doing: &'static str, path: &Path, source: io::Error) -> AttachError {
    AttachError::State { doing, path: path.to_owned(), source, hint: "" }
}

/// "mounted at /mnt, and open in dd (process 12, /dev/loop0)".
fn sentence_of(uses: &[DeviceUse]) -> String {
    /// Further uses are only counted.
    const SHOWN: usize = 4;
    let mut words: Vec<String> = uses.iter().take(SHOWN).map(ToString::to_string).collect();
    if uses.len() > SHOWN {
        words.push(format!("{} more uses", uses.len() - SHOWN));
    }
    match words.split_last() {
        Some((last, [])) => last.clone(),
        Some((last, others)) => format!("{}, and {last}", others.join(", ")),
        None => "in use".into(),
    }
}
