//! Disks that another process has open: the way to a process of this program, by its control
//! channel, and the words for a process without one.

use crate::exit::{Failure, Outcome};
use diskwright_disk::DiskError;
use diskwright_serve::control::{self, Client, ControlError};
use std::path::Path;

/// The process that has the disk open for writing, if it is `serve` or `attach`. `None` for a disk
/// that is not open, that another program has open, or whose file does not exist: whoever opens it
/// then says so.
pub fn client(file: &Path) -> Outcome<Option<Client>> {
    if !file.exists() {
        return Ok(None);
    }
    Ok(control::find(file)?)
}

/// The failure of a command that changes a disk. Of a disk that is in use it says that its program
/// cannot be asked to do it.
pub fn explain(error: DiskError) -> Failure {
    match error {
        DiskError::InUse { .. } => Failure::new(format!(
            "{error}; only `diskwright serve` and `diskwright attach` change a disk while it is in use, when they have opened it for writing"
        )),
        other => other.into(),
    }
}

impl From<ControlError> for Failure {
    fn from(error: ControlError) -> Self {
        Self::new(error.to_string())
    }
}
