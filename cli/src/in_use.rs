//! Disks that another process has open: the way to a process of this program, by its control
//! channel, and the words for a process without one.

use crate::exit::{Failure, Outcome};
use diskwright_disk::DiskError;
use diskwright_serve::control::{self, Client, ControlError, Done, Operation, Statistics};
use diskwright_store::ErrorCode;
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

/// The failure for an answer to another question.
pub fn unexpected(client: &Client) -> Failure {
    Failure::new(format!("{} answered something else than it was asked; is it another version?", client.peer))
}

/// Asks, and shows no progress.
pub fn call(client: &Client, operation: Operation) -> Outcome<Done> {
    Ok(client.call(operation, &mut |_, _| {})?)
}

/// What the process tells of the disk.
pub fn statistics(client: &Client) -> Outcome<Statistics> {
    match call(client, Operation::Statistics)? {
        Done::Counted(statistics) => Ok(statistics),
        _ => Err(unexpected(client)),
    }
}

impl From<ControlError> for Failure {
    fn from(error: ControlError) -> Self {
        match error.code() {
            ErrorCode::Stopped => Self::Stopped,
            _ => Self::new(error.to_string()),
        }
    }
}
