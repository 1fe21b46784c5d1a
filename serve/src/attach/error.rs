//! What can go wrong with attaching and detaching.

use crate::{attach::usage::Use, fuse::FuseError, ublk::UblkError};
use std::{io, path::PathBuf};

/// Why a disk was not attached, or not detached.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// FUSE failed.
    #[error(transparent)]
    Fuse(#[from] FuseError),
    /// ublk failed.
    #[error(transparent)]
    Ublk(#[from] UblkError),
    /// Neither kind of block device can be had.
    #[error("{other}; nor is there ublk, which does without ({})", ublk.briefly())]
    NoDevice {
        /// Why there is no ublk device.
        ublk: UblkError,
        /// Why there is no loop device.
        other: Box<AttachError>,
    },
    /// Options that cannot be.
    #[error("{what}; {hint}")]
    BadOptions {
        /// What is wrong.
        what: String,
        /// What to do.
        hint: &'static str,
    },
    /// The place where attached disks are recorded cannot be used.
    #[error("cannot {doing} {}: {source}{hint}", path.display())]
    State {
        /// As in "create".
        doing: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
        /// Begins with "; ", or is empty.
        hint: &'static str,
    },
    /// The same file is attached.
    #[error("{}: it is already attached as {}; detach that first", file.display(), place.display())]
    AlreadyAttached {
        /// The image.
        file: PathBuf,
        /// Device or file by which it is reached.
        place: PathBuf,
    },
    /// Nothing of that name is attached.
    #[error("{}: it is not attached; `diskwright attached` lists what is", target.display())]
    NotAttached {
        /// As given.
        target: PathBuf,
    },
    /// It is in use.
    #[error("{} is {}; end that first{hint}, or insist with --force", place.display(), sentence_of(uses))]
    InUse {
        /// The device.
        place: PathBuf,
        /// By what. At least one.
        uses: Vec<Use>,
        /// Begins with " (", or is empty.
        hint: &'static str,
    },
    /// No loop device.
    #[error("cannot {doing} a loop device ({}): {source}{hint}", path.display())]
    Loop {
        /// As in "set up".
        doing: &'static str,
        /// The device.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
        /// Begins with "; ", or is empty.
        hint: &'static str,
    },
    /// What is to be mounted is not there, or cannot be mounted.
    #[error("{}: {what}", file.display())]
    Content {
        /// The image.
        file: PathBuf,
        /// What was found, what was expected, what to do.
        what: String,
    },
    /// The process that serves the disk failed.
    #[error("{0}")]
    Server(String),
    /// It cannot serve anything on this machine.
    #[error("{0}")]
    Machine(String),
    /// What was written last did not reach the disk.
    #[error("{}: {what}", place.display())]
    Flush {
        /// The device.
        place: PathBuf,
        /// What happened, and what that means.
        what: String,
    },
    /// The process that watches over the disk did not do what it was asked for.
    #[error("{0}")]
    Supervisor(String),
}

/// "mounted at /mnt, and open in dd (process 12, /dev/loop0)".
fn sentence_of(uses: &[Use]) -> String {
    /// More than anybody reads.
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
