//! Disks that another process has open: connects to the control channel of that process, or says
//! that it has none.

use crate::exit::{Failure, Outcome};
use diskwright_disk::DiskError;
use diskwright_serve::control::{self, Client, ControlError, Done, Operation, Statistics};
use std::path::{Path, PathBuf};

/// A disk in use with an image of its chain.
#[derive(Debug)]
pub struct DiskInUse {
    /// The connection to its process.
    pub client: Client,
    /// The images of its chain, the top first.
    pub chain: Vec<PathBuf>,
    /// Which of them was looked for; 0 is the one that is written.
    pub depth: usize,
}

/// The disk in use with the image `file` in its chain. `None` as for [`client`].
pub fn chain_with(file: &Path) -> Outcome<Option<DiskInUse>> {
    if let Some(client) = client(file)? {
        let chain = statistics(&client)?.chain;
        return Ok(Some(DiskInUse { client, chain, depth: 0 }));
    }
    let Some((found, Statistics { chain, .. })) = control::find_by_frozen(file)? else { return Ok(None) };
    let real = file.canonicalize().ok();
    let depth = chain.iter().position(|image| image.canonicalize().ok() == real).unwrap_or(0);
    Ok(Some(DiskInUse { client: found.client, chain, depth }))
}

/// The process that has the disk open for writing, if it is `serve` or `attach`. `None` for a disk
/// that is not open, that another program has open, or whose file does not exist: opening it then
/// gives the error.
pub fn client(file: &Path) -> Outcome<Option<Client>> {
    if !file.exists() {
        return Ok(None);
    }
    Ok(control::find(file)?)
}

/// The failure of a command that changes a disk. For a disk in use the sentence adds that the
/// program which has it open has no control channel.
pub fn explain(error: DiskError) -> Failure {
    match error {
        DiskError::InUse { .. } => Failure::new(format!(
            "{error}; only `diskwright serve` and `diskwright attach` change a disk while it is in use, when they have opened it for writing"
        )),
        other => other.into(),
    }
}

/// The failure for a reply that does not match the request.
pub fn unexpected(client: &Client) -> Failure {
    Failure::new(format!("{} answered something else than it was asked; is it another version?", client.peer))
}

/// Calls an operation without showing its progress.
pub fn call(client: &Client, operation: Operation) -> Outcome<Done> {
    Ok(client.call(operation, &mut |_, _| true)?)
}

/// The statistics that the process reports of the disk.
pub fn statistics(client: &Client) -> Outcome<Statistics> {
    match call(client, Operation::Statistics)? {
        Done::Counted(statistics) => Ok(statistics),
        _ => Err(unexpected(client)),
    }
}

impl From<ControlError> for Failure {
    fn from(error: ControlError) -> Self {
        match error {
            ControlError::Stopped { .. } => Self::Stopped,
            other => Self::new(other.to_string()),
        }
    }
}
