//! Freezing the file systems of an attached disk for the moment of a snapshot.
//!
//! ```text
//!   server: moment is near ── Freeze ─▶ supervisor: record, FIFREEZE ── Frozen ─▶ snapshot
//!           it is over     ── Thaw   ─▶ supervisor: FITHAW, record   ── Thawed ─▶ clients go on
//! ```
//!
//! The supervisor does it, and not the server: FIFREEZE waits until the server has carried out
//! writes, and a thread that waits for its own process could not be killed.
//!
//! A file system stays frozen when the process ends that froze it, so it is thawed always:
//!
//! - After a snapshot that failed, the server asks for it.
//! - The server dies: the supervisor thaws before it takes the disk apart.
//! - The server does not ask within [`FROZEN_MAX`]: the supervisor thaws, and says so later.
//! - The supervisor dies: the server thaws the file systems that it was told of.
//! - Both die: the record lists what is frozen. It was written before the freeze, and the program
//!   that clears the disk away thaws first (`release`).
//!
//! Frozen is what is mounted from the disk's devices in this mount namespace, by attach or by
//! others. A file system that is frozen already is left to the program that froze it.

use super::{mounted::mounted_from, record::Record};
use diskwright_store::sys::freeze as system;
use rustix::{
    fs::{Mode, OFlags},
    io::Errno,
};
use std::{
    collections::HashSet,
    io,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    time::Duration,
};

/// How long file systems stay frozen at most.
pub(super) const FROZEN_MAX: Duration = Duration::from_secs(10);

/// The folders to freeze: one for each file system that is mounted from the disk.
pub(super) fn folders_of(record: &Record) -> Vec<PathBuf> {
    let mut seen = HashSet::new();
    let is_new = |dir: &PathBuf| rustix::fs::stat(dir).is_ok_and(|found| seen.insert(found.st_dev));
    mounted_from(record).into_iter().filter(is_new).collect()
}

fn open(dir: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    Ok(rustix::fs::open(dir, flags, Mode::empty())?)
}

/// Freezes the file systems. Returns those that are frozen now, and a sentence about each other.
pub(super) fn freeze(dirs: &[PathBuf]) -> (Vec<PathBuf>, Vec<String>) {
    let (mut frozen, mut warnings) = (Vec::new(), Vec::new());
    for dir in dirs {
        let done = open(dir).and_then(|fd| system::freeze(fd.as_fd()).map_err(io::Error::from));
        match done {
            Ok(()) => frozen.push(dir.clone()),
            Err(error) => warnings.push(format!(
                "the file system at {} was not frozen ({error}), so the frozen image is as after a power cut: its journal must be replayed, or it be checked",
                dir.display()
            )),
        }
    }
    (frozen, warnings)
}

/// Thaws the file systems. Returns a sentence about each that could not be thawed.
pub(super) fn thaw(dirs: &[PathBuf]) -> Vec<String> {
    let thaw_one = |dir: &PathBuf| match open(dir).and_then(|fd| system::thaw(fd.as_fd()).map_err(io::Error::from)) {
        Err(error) if error.raw_os_error() != Some(Errno::INVAL.raw_os_error()) => {
            Some(format!("the file system at {} cannot be thawed: {error}; thaw it with fsfreeze -u", dir.display()))
        }
        // EINVAL: it is not frozen.
        _ => None,
    };
    dirs.iter().filter_map(thaw_one).collect()
}
