//! Every change and sync of the files, in order: the record from which all states that a power cut
//! may leave are made.

use crate::contents::{Change, Contents};
use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
};

/// How far the clock goes on with every change of a file. It is more than what counts as the same
/// time of a VHD's parent.
pub const CLOCK_STEP_SECONDS: u64 = 3;

/// Identifies a file independently of its names.
pub type FileId = usize;

/// All files and names at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Names of the files.
    pub names: BTreeMap<PathBuf, FileId>,
    /// Contents of the files.
    pub files: BTreeMap<FileId, Contents>,
    /// When the files were last changed. `None` if all files have the same, constant time.
    pub times: Option<Times>,
}

/// Modification times by a clock that goes on with every change of a file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Times {
    /// Seconds that have passed since the first change.
    pub clock_seconds: u64,
    /// The clock at the last change of each file, or what the file's time was set to.
    pub modified_seconds: BTreeMap<FileId, u64>,
}

impl Snapshot {
    /// The contents of the file at `path`.
    pub fn file(&self, path: &Path) -> Option<&Contents> {
        self.files.get(self.names.get(path)?)
    }

    /// Writes all files into one real folder, without their own folders. Returns their paths.
    ///
    /// # Errors
    /// The error of the system.
    pub fn save(&self, folder: &Path) -> io::Result<Vec<PathBuf>> {
        let mut saved = Vec::new();
        for (path, file) in &self.names {
            let place = folder.join(path.file_name().unwrap_or_default());
            if let Some(contents) = self.files.get(file) {
                contents.save(&place)?;
                saved.push(place);
            }
        }
        Ok(saved)
    }
}

/// A change of names. It is atomic.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NameChange {
    /// A new file.
    Make(PathBuf, FileId),
    /// A rename.
    Move(PathBuf, PathBuf, FileId),
    /// A removal.
    Remove(PathBuf),
}

impl NameChange {
    /// Applies the change.
    pub fn apply(&self, names: &mut BTreeMap<PathBuf, FileId>) {
        match self {
            Self::Make(path, file) => drop(names.insert(path.clone(), *file)),
            Self::Move(from, to, file) => {
                if names.get(from) == Some(file) {
                    names.remove(from);
                }
                names.insert(to.clone(), *file);
            }
            Self::Remove(path) => drop(names.remove(path)),
        }
    }

    /// Whether the change is in this directory.
    pub fn is_in(&self, directory: &Path) -> bool {
        let within = |path: &Path| path.parent() == Some(directory);
        match self {
            Self::Make(path, _) | Self::Remove(path) => within(path),
            Self::Move(from, to, _) => within(from) || within(to),
        }
    }
}

/// One event of a history.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A file was changed, in the page cache.
    Changed(FileId, Change),
    /// A file's changes became durable.
    Synced(FileId),
    /// The modification time of a file became this, in the page cache.
    Timed(FileId, u64),
    /// A file's modification time became durable.
    TimeSynced(FileId),
    /// A sync failed. Any part of the file's changes may be durable, and the rest never will be.
    SyncFailed(FileId),
    /// A name was changed, in the page cache.
    Named(NameChange),
    /// A directory's changes became durable.
    DirectorySynced(PathBuf),
    /// The truth changed; the number is its index in the stage's truths.
    Truth(usize),
}

/// The last events before a point, as text for messages.
pub fn tail(history: &[Event], point: usize) -> String {
    history[point.saturating_sub(24)..point].iter().map(|event| format!("\n    {event}")).collect()
}

impl std::fmt::Display for Event {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Changed(file, Change::Write(at, bytes)) => write!(f, "file {file}: write {} at {at}", bytes.len()),
            Self::Changed(file, Change::Length(len)) => write!(f, "file {file}: length {len}"),
            Self::Changed(file, Change::Zero(range)) => {
                write!(f, "file {file}: zero {} at {}", range.len_bytes, range.offset_bytes)
            }
            Self::Synced(file) => write!(f, "file {file}: sync"),
            Self::Timed(file, seconds) => write!(f, "file {file}: modified at {seconds} s"),
            Self::TimeSynced(file) => write!(f, "file {file}: sync of its time"),
            Self::SyncFailed(file) => write!(f, "file {file}: failed sync"),
            Self::Named(change) => write!(f, "{change:?}"),
            Self::DirectorySynced(path) => write!(f, "sync of {}", path.display()),
            Self::Truth(number) => write!(f, "truth {number}"),
        }
    }
}
