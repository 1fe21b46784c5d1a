//! Disks that are served, against other servers: by NBD to fio and nbdcopy, and as block devices by
//! FUSE.
//!
//! Our server is a child of this program ([`crate::ours`]). Every server runs with the options
//! under which it is fastest here, on a disk of its own with the same contents, and stays up while
//! the rounds take turns. The client is fio or nbdcopy, so a user gets what is compared. The
//! server's CPU time is divided by the requests that the client counted.
//!
//! ```text
//!   io.rs        fio over a unix socket: populated, empty, from the page cache, VHD
//!   copy.rs      nbdcopy to null:
//!   carrier.rs   a disk through a socket without a server
//!   snapshot.rs  a snapshot while a client writes
//!   merge.rs     a merge while a client reads, or writes
//!   attach.rs    fio on a loop device over a FUSE file
//!   vhost.rs     a virtual machine's disk, by a front-end without a machine
//!   nvme.rs      NVMe/TCP against our NBD, by our own clients
//!   iscsi.rs     iSCSI against tgtd, by iscsi-perf
//!   crowd.rs     a thousand clients
//! ```

pub(crate) mod attach;
mod carrier;
pub(crate) mod copy;
pub(crate) mod crowd;
pub(crate) mod io;
pub(crate) mod iscsi;
pub(crate) mod merge;
pub(crate) mod nvme;
pub(crate) mod snapshot;
pub(crate) mod vhost;

use crate::{
    fio::{FioLoad, Setup},
    ours,
};
use diskwright_lab::{
    LabError, Result,
    acceptance::{Check, Outcome, SEED},
    measure::Ratio,
    peer,
    progress::{Progress, report},
    server::Server,
    targets::Container,
};
use diskwright_load::data;
use diskwright_stats::summary::Summary;
use diskwright_store::{BlockDevice, Blocking, CacheMode, EngineKind};
use std::{ffi::OsString, path::Path, process::Command};

/// The servers' load on a file or a device itself: 4 KiB at random.
const BARE_LOAD: FioLoad = FioLoad {
    rw: "randread",
    read_percent: 100,
    block_bytes: 4096,
    queue_depth: 32,
    direct: true,
    setup: Setup::Defaults,
};

/// Adds to a check that failed how far the same load comes without any server, as a multiple of the
/// peer's: what a server can reach.
fn tell_ceiling(check: &mut Check, bare: &[f64], peer: &[f64]) {
    if let Some(ratio) = Ratio::of(bare, peer).filter(|_| check.outcome == Outcome::Fail) {
        let Summary { median, min, max, .. } = ratio.summary;
        check.why = Some(format!(
            "fio on the raw file itself, with no server between, made {median:.2} ({min:.2}..{max:.2}) of the peer's"
        ));
    }
}

/// The server that is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ServerProgram {
    Ours,
    QemuNbd,
    Nbdkit,
}

impl ServerProgram {
    fn name(self) -> &'static str {
        match self {
            Self::Ours => "diskwright",
            Self::QemuNbd => "qemu-nbd",
            Self::Nbdkit => "nbdkit",
        }
    }

    /// The command of its program, or a sentence about what is missing.
    fn command(self) -> std::result::Result<Command, String> {
        let peer = |package: &str| match peer::find(self.name()) {
            Some(program) => Ok(Command::new(program)),
            None => Err(peer::missing(self.name(), package)),
        };
        match self {
            Self::Ours => ours::command().map_err(|error| error.to_string()),
            Self::QemuNbd => peer("qemu-utils"),
            Self::Nbdkit => peer("nbdkit"),
        }
    }
}

/// What is served, and how.
#[derive(Debug, Clone, Copy)]
struct Exported<'a> {
    path: &'a Path,
    /// The server's word for the format.
    format: &'a str,
    cache: CacheMode,
    writable: bool,
    /// Most clients at a time.
    clients: u32,
    /// Threads of our server; `None` for its own choice.
    threads: Option<u32>,
}

impl<'a> Exported<'a> {
    fn of(container: Container, path: &'a Path, cache: CacheMode) -> Self {
        let format = match container {
            Container::Raw => "raw",
            Container::VhdFixed | Container::VhdDynamic | Container::VhdDifferencing => "vpc",
            Container::VhdxFixed | Container::VhdxDynamic | Container::VhdxDifferencing => "vhdx",
            Container::VmdkFlat | Container::VmdkSparse | Container::VmdkChild => "vmdk",
            Container::Qcow2 | Container::Qcow2Child => "qcow2",
            Container::VdiDynamic => "vdi",
        };
        Self { path, format, cache, writable: true, clients: 1, threads: None }
    }
}

/// A server that listens.
#[derive(Debug)]
struct Served {
    server: Server,
    uri: String,
}

/// Starts a server on a socket in `dir`.
fn serve(who: ServerProgram, what: &Exported<'_>, dir: &Path) -> Result<Served> {
    let mut command = who.command().map_err(|what| LabError::BadOptions { what, hint: "leave this row out".into() })?;
    let dir = dir.canonicalize().map_err(LabError::file("find", dir))?;
    let path = what.path.canonicalize().map_err(LabError::file("find", what.path))?;
    let socket = dir.join(format!("{}.sock", who.name()));
    // A server that was stopped may have left its socket.
    let _ = std::fs::remove_file(&socket);
    let direct = what.cache == CacheMode::Direct;
    match who {
        ServerProgram::Ours => {
            let mut export = OsString::from("=");
            export.push(&path);
            command.arg("serve").arg(export).arg("--nbd").arg(&socket).arg("--quiet");
            command.arg(if direct { "--cache=direct" } else { "--cache=page" });
            command.args((what.format == "raw").then_some("--format=raw"));
            command.args((!what.writable).then_some("--read-only"));
            command.args(what.threads.map(|threads| format!("--threads={threads}")));
        }
        ServerProgram::QemuNbd => {
            command.args(["--persistent", "--aio=io_uring", "-f", what.format, "-k"]).arg(&socket);
            command.arg(if direct { "--cache=none" } else { "--cache=writeback" });
            command.arg(format!("--shared={}", what.clients));
            command.args((!what.writable).then_some("--read-only")).arg(path);
        }
        ServerProgram::Nbdkit => {
            command.args(["-f", "-U"]).arg(&socket).args((!what.writable).then_some("-r")).arg("file").arg(path);
        }
    }
    let server = Server::listening(command, &socket, who.name())?;
    Ok(Served { server, uri: format!("nbd+unix:///?socket={}", socket.display()) })
}

/// Bytes of a served disk that are compared.
const PROVED_BYTES: u64 = 64 << 20;
/// Bytes of a read that is compared.
const PIECE_BYTES: usize = 64 << 10;

/// Reads the first bytes of a disk that `targets::make_filled` has filled, through its server, and
/// compares them.
fn prove(device: &dyn BlockDevice, name: &str, progress: &mut dyn Progress) -> Result<()> {
    report(progress, "verify", 0, 1, "what is read through the server")?;
    let mut queue = Blocking::open(device, EngineKind::Auto).map_err(LabError::file("open", name))?;
    let (mut found, mut expected) = (vec![0; PIECE_BYTES], vec![0; PIECE_BYTES]);
    for at in (0..PROVED_BYTES).step_by(PIECE_BYTES) {
        queue.read(at, &mut found).map_err(LabError::file("read", name))?;
        data::fill(SEED, at, &mut expected);
        if let Some(wrong) = found.iter().zip(&expected).position(|(found, expected)| found != expected) {
            return Err(LabError::WrongData { target: name.to_owned(), offset_bytes: at + wrong as u64 });
        }
    }
    Ok(())
}
