//! The file of reservations that shall last: JSON, replaced as a whole.

use super::State;
use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
};
use uuid::Uuid;

/// The length of a file at most.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Why the reservations of a disk could not be read.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The folder is not there, or is no folder.
    #[error("the folder for reservations, {}, cannot be used: {source}; create it, or name another one", path.display())]
    Folder {
        /// The folder.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file cannot be read.
    #[error("cannot read the reservations in {}: {source}; check the file and its permissions", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file is damaged.
    #[error(
        "the reservations in {} are damaged: {reason}; remove the file to forget them, when no cluster uses the disk",
        path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
}

/// The file of a disk.
#[derive(Debug)]
pub(super) struct File {
    path: PathBuf,
}

impl File {
    /// The file of a disk in a folder, and what is in it.
    pub(super) fn open(dir: &Path, name: &str) -> Result<(Self, State), FileError> {
        // Names of exports may have any characters.
        let path = dir.join(format!("{}.reservations", Uuid::new_v5(&Uuid::NAMESPACE_OID, name.as_bytes())));
        let failed = |source| FileError::Read { path: path.clone(), source };
        let no_folder = |source| FileError::Folder { path: dir.to_owned(), source };
        if !fs::metadata(dir).map_err(no_folder)?.is_dir() {
            return Err(no_folder(io::ErrorKind::NotADirectory.into()));
        }
        let damaged = |reason: String| FileError::Damaged { path: path.clone(), reason };
        let state = match fs::metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => State::default(),
            Err(error) => return Err(failed(error)),
            Ok(metadata) if metadata.len() > FILE_BYTES_MAX => {
                return Err(damaged(format!("it has {} bytes", metadata.len())));
            }
            Ok(_) => {
                let text = fs::read(&path).map_err(failed)?;
                serde_json::from_slice(&text).map_err(|error| damaged(error.to_string()))?
            }
        };
        Ok((Self { path }, state))
    }

    /// Replaces what is in the file, durably. State that shall not last is removed.
    pub(super) fn save(&self, state: &State) -> io::Result<()> {
        let dir = self.path.parent().unwrap_or(Path::new("."));
        if state.lasts() {
            let text = serde_json::to_vec_pretty(state)?;
            let fresh = self.path.with_extension("new");
            let mut file = fs::File::create(&fresh)?;
            file.write_all(&text)?;
            file.sync_all()?;
            fs::rename(&fresh, &self.path)?;
        } else {
            match fs::remove_file(&self.path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        fs::File::open(dir)?.sync_all()
    }
}
