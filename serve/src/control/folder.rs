//! The folder of the control channels: sockets by process, links by file.
//!
//! The folder lies in the run-time folder of the user (see `attach/run_dir.rs`: made by this user,
//! writable for no other), and has mode 0700. The links are there to find the process of a file in
//! one step; nothing else is read from them.

use super::{ControlError, message::FileId};
use crate::attach::{Process, RunDir, make_private};
use rustix::fs::{FlockOperation, Mode, OFlags};
use std::{
    fs, io,
    os::{
        fd::OwnedFd,
        unix::{
            fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink},
            net::UnixListener,
        },
    },
    path::{Path, PathBuf},
};

/// A folder of control channels.
#[derive(Debug, Clone)]
pub(super) struct Folder {
    dir: PathBuf,
}

pub(super) fn failed(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ControlError {
    let path = path.to_owned();
    move |source| ControlError::Socket { doing, path, source }
}

impl Folder {
    /// The folder of this user. Makes it if it does not exist.
    pub(super) fn make() -> Result<Self, ControlError> {
        let run_dir = RunDir::usual();
        let refused = |error: crate::attach::AttachError| ControlError::Folder(error.to_string());
        run_dir.make().map_err(refused)?;
        Self::make_in(run_dir.path())
    }

    /// The folder in `run_dir`, which no other user can change.
    pub(super) fn make_in(run_dir: &Path) -> Result<Self, ControlError> {
        let dir = run_dir.join("control");
        make_private(&dir).map_err(|error| ControlError::Folder(error.to_string()))?;
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o700)).map_err(failed("restrict", &dir))?;
        Ok(Self { dir })
    }

    /// The folder of this user if it exists and no other user can change it.
    pub(super) fn existing() -> Option<Self> {
        let run_dir = RunDir::usual();
        run_dir.check().ok()?;
        let dir = run_dir.path().join("control");
        let found = fs::symlink_metadata(&dir).ok()?;
        let is_ours = found.is_dir() && found.uid() == rustix::process::geteuid().as_raw();
        is_ours.then_some(Self { dir })
    }

    /// Held while links and sockets are made or removed.
    fn lock(&self) -> Result<OwnedFd, ControlError> {
        let path = self.dir.join("lock");
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
        let taken = rustix::fs::open(&path, flags, Mode::RUSR | Mode::WUSR).and_then(|fd| {
            rustix::io::retry_on_intr(|| rustix::fs::flock(&fd, FlockOperation::LockExclusive))?;
            Ok(fd)
        });
        taken.map_err(|errno| failed("lock", &path)(errno.into()))
    }

    /// Binds the socket of this process, and removes what killed processes have left. `number`
    /// tells several channels of one process apart.
    pub(super) fn bind(&self, number: u32) -> Result<(UnixListener, PathBuf), ControlError> {
        let _locked = self.lock()?;
        self.clear_stale();
        let Process { pid, start_ticks } = Process::this();
        let path = self.dir.join(format!("{pid}-{start_ticks}-{number}.sock"));
        let listener = UnixListener::bind(&path).map_err(failed("listen on", &path))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).map_err(failed("restrict", &path))?;
        Ok((listener, path))
    }

    /// Removes sockets of processes that are gone, and links to sockets that are gone. Failures are
    /// ignored: a leftover does no harm.
    fn clear_stale(&self) {
        for socket in self.sockets() {
            if !process_of(&socket).is_some_and(Process::is_alive) {
                let _ = fs::remove_file(&socket);
            }
        }
        for path in self.entries() {
            if path.is_symlink() && !path.exists() {
                let _ = fs::remove_file(&path);
            }
        }
    }

    fn entries(&self) -> Vec<PathBuf> {
        fs::read_dir(&self.dir).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
    }

    /// The sockets of all processes.
    pub(super) fn sockets(&self) -> Vec<PathBuf> {
        let is_socket = |path: &PathBuf| fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket());
        let mut found: Vec<PathBuf> = self.entries().into_iter().filter(is_socket).collect();
        found.sort();
        found
    }

    fn link(&self, FileId { device, inode }: FileId) -> PathBuf {
        self.dir.join(format!("{device:x}-{inode:x}"))
    }

    /// Makes the file lead to `socket`. The caller holds the lock of the file for writing.
    pub(super) fn publish(&self, file: FileId, socket: &Path) -> Result<(), ControlError> {
        let _locked = self.lock()?;
        let link = self.link(file);
        let Some(name) = socket.file_name() else { return Ok(()) };
        match fs::remove_file(&link) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed("replace", &link)(error)),
            _ => symlink(name, &link).map_err(failed("make", &link)),
        }
    }

    /// Undoes [`Folder::publish`]. A link that another process has made meanwhile stays.
    pub(super) fn withdraw(&self, file: FileId, socket: &Path) {
        let Ok(_locked) = self.lock() else { return };
        let link = self.link(file);
        if fs::read_link(&link).is_ok_and(|to| Some(to.as_os_str()) == socket.file_name()) {
            let _ = fs::remove_file(&link);
        }
    }

    /// The socket to which the file leads.
    pub(super) fn socket_of(&self, file: FileId) -> Option<PathBuf> {
        let to = fs::read_link(self.link(file)).ok()?;
        // Only a bare name was written: a link that leads elsewhere is not ours.
        (to.components().count() == 1).then(|| self.dir.join(to))
    }

    /// Whether the file at `path` leads to this process, alive or not: whether the process had that
    /// file open for writing.
    pub(super) fn leads_to(&self, path: &Path, process: Process) -> bool {
        let socket = identity(path).ok().and_then(|file| self.socket_of(file));
        socket.as_deref().and_then(process_of) == Some(process)
    }
}

/// Whether a process, alive or not, had the file at `path` open for writing, by what is in the
/// folder of the control channels.
pub(crate) fn had_open(path: &Path, process: Process) -> bool {
    Folder::existing().is_some_and(|folder| folder.leads_to(path, process))
}

/// The process in the name of a socket.
pub(super) fn process_of(socket: &Path) -> Option<Process> {
    let mut numbers = socket.file_name()?.to_str()?.strip_suffix(".sock")?.split('-');
    Some(Process { pid: numbers.next()?.parse().ok()?, start_ticks: numbers.next()?.parse().ok()? })
}

/// The identity of the file at `path`, as a store has it.
pub(crate) fn identity(path: &Path) -> io::Result<FileId> {
    let found = fs::metadata(path)?;
    let is_device = found.file_type().is_block_device();
    Ok(if is_device { (found.rdev(), 0) } else { (found.dev(), found.ino()) }.into())
}
