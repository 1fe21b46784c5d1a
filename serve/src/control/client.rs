//! The other side: finds the process that has a disk open for writing, and asks it.
//!
//! A process counts as found only when it has answered on its socket: the socket's name, the
//! credentials of the peer and the process's own list must agree. A link or a socket whose process
//! has ended is ignored.

use super::{
    ControlError, Done, Operation, ProcessReport, Statistics, VERSION,
    folder::{self, Folder, process_of},
    message::{Event, FileId, Request, code_named},
    stream::{Lines, PATIENCE},
};
use crate::attach::{Process, name_of};
use diskwright_store::ErrorCode;
use rustix::net::sockopt;
use std::{
    fmt, io,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

/// A process that has disks open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// Its number.
    pub pid: u32,
    /// Its name.
    pub program: String,
}

/// As in "diskwright (process 12)".
impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pid, program } = self;
        write!(f, "{program} (process {pid})")
    }
}

/// A disk that a process has open for writing, and the way to that process.
#[derive(Debug)]
pub struct Client {
    socket: PathBuf,
    disk: FileId,
    /// The process.
    pub peer: Peer,
}

/// A disk that was found by its name.
#[derive(Debug)]
pub struct FoundDisk {
    /// The image.
    pub file: PathBuf,
    /// The way to its process.
    pub client: Client,
}

/// The process that has the file at `path` open for writing, if that process has a control channel.
///
/// # Errors
/// The file does not exist, or a process is there and does not answer.
pub fn find(path: &Path) -> Result<Option<Client>, ControlError> {
    let disk = folder::identity(path).map_err(folder::failed("find", path))?;
    let Some(socket) = Folder::existing().and_then(|folder| folder.socket_of(disk)) else { return Ok(None) };
    find_at(socket, disk)
}

pub(super) fn find_at(socket: PathBuf, disk: FileId) -> Result<Option<Client>, ControlError> {
    let Some((lines, peer)) = connect(&socket)? else { return Ok(None) };
    let client = Client { socket, disk, peer };
    // The number of an inode may have been given to another file since the link was made.
    match client.ask(lines, Some(disk), Operation::Statistics, &mut |_, _| true) {
        Ok(_) => Ok(Some(client)),
        Err(ControlError::Refused { code: ErrorCode::NotFound, .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The disks that are open for writing under this name.
///
/// # Errors
/// As [`find`].
pub fn find_by_name(name: &str) -> Result<Vec<FoundDisk>, ControlError> {
    let mut found = Vec::new();
    for process in list().processes {
        for disk in process.disks.into_iter().filter(|disk| disk.name == name) {
            if let Some(client) = find(&disk.file)? {
                found.push(FoundDisk { file: disk.file, client });
            }
        }
    }
    Ok(found)
}

/// A disk in use that has the file at `path` as a frozen image of its chain: the first one found.
///
/// # Errors
/// The file does not exist.
pub fn find_by_frozen(path: &Path) -> Result<Option<(FoundDisk, Statistics)>, ControlError> {
    let wanted = folder::identity(path).map_err(folder::failed("find", path))?;
    for disk in list().processes.into_iter().flat_map(|process| process.disks) {
        // A process that does not answer, or has just closed the disk, is passed over.
        let Ok(Some(client)) = find(&disk.file) else { continue };
        let Ok(Done::Counted(statistics)) = client.call(Operation::Statistics, &mut |_, _| true) else { continue };
        let is_wanted = |image: &PathBuf| folder::identity(image).is_ok_and(|id| id == wanted);
        if statistics.chain.iter().skip(1).any(is_wanted) {
            return Ok(Some((FoundDisk { file: disk.file, client }, statistics)));
        }
    }
    Ok(None)
}

/// What [`list`] has found.
#[derive(Debug, Default)]
pub struct Listing {
    /// The processes of this user that have disks open for writing.
    pub processes: Vec<ProcessReport>,
    /// Processes that are there and do not answer.
    pub silent: Vec<ControlError>,
}

/// Asks all processes of this user which disks they have open for writing.
pub fn list() -> Listing {
    Folder::existing().map_or_else(Listing::default, |folder| list_in(&folder))
}

pub(super) fn list_in(folder: &Folder) -> Listing {
    let mut listing = Listing::default();
    for socket in folder.sockets() {
        match list_at(&socket) {
            Ok(None) => {}
            Ok(Some(process)) => listing.processes.push(process),
            Err(error) => listing.silent.push(error),
        }
    }
    listing
}

fn list_at(socket: &Path) -> Result<Option<ProcessReport>, ControlError> {
    let Some((lines, peer)) = connect(socket)? else { return Ok(None) };
    let client = Client { socket: socket.to_owned(), disk: FileId { device: 0, inode: 0 }, peer };
    match client.ask(lines, None, Operation::List, &mut |_, _| true)? {
        Done::Listed(process) => Ok(Some(process)),
        _ => Err(client.silent("answered something else than it was asked")),
    }
}

/// Connects to a socket, and verifies who listens there. `None` if its process is gone.
fn connect(socket: &Path) -> Result<Option<(Lines, Peer)>, ControlError> {
    let stream = match UnixStream::connect(socket) {
        Ok(stream) => stream,
        Err(error) if matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound) => {
            return Ok(None);
        }
        Err(error) => return Err(folder::failed("connect to", socket)(error)),
    };
    let found = sockopt::socket_peercred(&stream).map_err(|errno| folder::failed("examine", socket)(errno.into()))?;
    let pid = found.pid.as_raw_nonzero().get().unsigned_abs();
    let named = process_of(socket);
    let peer = Peer { pid, program: name_of(pid) };
    let is_trusted = found.uid.is_root() || found.uid == rustix::process::geteuid();
    if !is_trusted || named.map(|Process { pid, .. }| pid) != Some(pid) {
        let what = format!("listens on {}, which is not its socket", socket.display());
        return Err(ControlError::Silent { peer: peer.to_string(), what });
    }
    Ok(Some((Lines::new(stream), peer)))
}

impl Client {
    /// Asks the process to carry out an operation on the disk. Waits for the end of an operation
    /// that changes the disk or ends the process as long as the process lives. `progress` answers
    /// `false` to stop waiting, which ends operations that can be ended.
    ///
    /// # Errors
    /// [`ControlError`].
    pub fn call(&self, operation: Operation, progress: &mut dyn FnMut(u64, u64) -> bool) -> Result<Done, ControlError> {
        let Some((lines, _)) = connect(&self.socket)? else { return Err(self.silent("has ended")) };
        self.ask(lines, Some(self.disk), operation, progress)
    }

    /// Waits until no operation changes the disk, for a few seconds at most. Returns whether the
    /// process still has this file open for writing.
    ///
    /// # Errors
    /// The process does not answer.
    pub fn settle(&self) -> Result<bool, ControlError> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.call(Operation::Statistics, &mut |_, _| true) {
                Ok(Done::Counted(found)) if found.disk.busy_with.is_some() && Instant::now() < deadline => {
                    thread::sleep(Duration::from_millis(20));
                }
                Ok(_) => return Ok(true),
                Err(ControlError::Refused { code: ErrorCode::NotFound, .. }) => return Ok(false),
                Err(error) => return Err(error),
            }
        }
    }

    fn silent(&self, what: impl Into<String>) -> ControlError {
        ControlError::Silent { peer: self.peer.to_string(), what: what.into() }
    }

    fn ask(
        &self,
        mut lines: Lines,
        disk: Option<FileId>,
        operation: Operation,
        progress: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<Done, ControlError> {
        let patience = match operation {
            Operation::List
            | Operation::Statistics
            | Operation::Limit(_)
            | Operation::OpenDoor { .. }
            | Operation::TrackList
            | Operation::TrackShow { .. } => Some(PATIENCE),
            Operation::Drain
            | Operation::CloseDoor { .. }
            | Operation::AddDisk(_)
            | Operation::RemoveDisk
            | Operation::Resize { .. }
            | Operation::Snapshot { .. }
            | Operation::TrackStart { .. }
            | Operation::TrackStop { .. }
            | Operation::Merge { .. }
            | Operation::Compact { .. }
            | Operation::Move { .. } => None,
        };
        let lost = |error: io::Error| match error.kind() {
            io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => self.silent("does not answer"),
            io::ErrorKind::UnexpectedEof => self.silent("closed the connection before it had answered"),
            _ => self.silent(format!("broke the connection: {error}")),
        };
        lines.send(&Request { version: VERSION, disk, operation }).map_err(lost)?;
        loop {
            let line = lines.receive(patience).map_err(lost)?;
            let event = serde_json::from_slice(&line);
            match event.map_err(|error| self.silent(format!("sent an answer that cannot be read ({error})")))? {
                Event::Progress { done, total } if progress(done, total) => {}
                Event::Progress { .. } => return Err(ControlError::Stopped { peer: self.peer.to_string() }),
                Event::Result(done) => return Ok(*done),
                Event::Error { code, message } => {
                    return Err(ControlError::Refused { code: code_named(&code), message });
                }
            }
        }
    }
}
