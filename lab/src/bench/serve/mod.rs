//! Disks that are served, against the servers that others wrote: by NBD to fio and nbdcopy, and as
//! block devices by FUSE.
//!
//! Our server is the running program itself, as a child; every server runs with the options under
//! which it is fastest here, on a disk of its own with the same contents, and stays up while the
//! rounds take turns. A client that others wrote makes the load, so what is compared is what a user
//! gets. The server's CPU time is told for each request that the client counted.
//!
//! ```text
//!   io.rs     fio over a unix socket: populated, empty, from the page cache, VHD        copy.rs    nbdcopy to null:
//!   attach.rs fio on a loop device over a FUSE file                                          carrier.rs the least that brings a disk out through a socket
//! ```

pub(crate) mod attach;
mod carrier;
pub(crate) mod copy;
pub(crate) mod io;

use crate::{
    LabError, Result,
    bench::{
        Bench, Check, Outcome,
        fio::{FioLoad, Setup},
        peer,
    },
    measure::Ratio,
    server::Server,
    targets::Container,
};
use diskwright_stats::summary::Summary;
use diskwright_store::CacheMode;
use std::{
    ffi::OsString,
    path::{Path, PathBuf},
    process::Command,
};

/// 4 KiB at random, as the servers are asked for, from a file or a device itself.
const BARE_LOAD: FioLoad = FioLoad {
    rw: "randread",
    read_percent: 100,
    block_bytes: 4096,
    queue_depth: 32,
    direct: true,
    setup: Setup::Defaults,
};

/// Tells beside a bar that was missed how far the same load comes without any server, as a multiple
/// of the peer's: what a server can reach.
fn tell_ceiling(check: &mut Check, bare: &[f64], peer: &[f64]) {
    if let Some(ratio) = Ratio::of(bare, peer).filter(|_| check.outcome == Outcome::Fail) {
        let Summary { median, min, max, .. } = ratio.summary;
        check.why = Some(format!(
            "fio on the raw file itself, with no server between, made {median:.2} ({min:.2}..{max:.2}) of the peer's"
        ));
    }
}

/// Whose server it is, and how it is started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Who {
    Ours,
    QemuNbd,
    Nbdkit,
}

impl Who {
    fn name(self) -> &'static str {
        match self {
            Self::Ours => "diskwright",
            Self::QemuNbd => "qemu-nbd",
            Self::Nbdkit => "nbdkit",
        }
    }

    /// Where its program is, or what is missing.
    fn program(self, bench: &Bench<'_>) -> std::result::Result<PathBuf, String> {
        match self {
            Self::Ours => match &bench.options.launcher {
                Some(launcher) => Ok(launcher.program().to_owned()),
                None => Err("the caller gave no way to start the program as a server".into()),
            },
            Self::QemuNbd => peer::find("qemu-nbd").ok_or_else(|| peer::missing("qemu-nbd", "qemu-utils")),
            Self::Nbdkit => peer::find("nbdkit").ok_or_else(|| peer::missing("nbdkit", "nbdkit")),
        }
    }
}

/// What is served, and how.
#[derive(Debug, Clone, Copy)]
struct Exported<'a> {
    path: &'a Path,
    /// In the words of the server.
    format: &'a str,
    cache: CacheMode,
    writable: bool,
    /// Most clients at a time.
    clients: u32,
}

impl<'a> Exported<'a> {
    fn of(container: Container, path: &'a Path, cache: CacheMode) -> Self {
        let format = match container {
            Container::Raw => "raw",
            Container::VhdFixed | Container::VhdDynamic | Container::VhdDifferencing => "vpc",
            Container::VhdxFixed | Container::VhdxDynamic | Container::VhdxDifferencing => "vhdx",
        };
        Self { path, format, cache, writable: true, clients: 1 }
    }
}

/// A server that listens.
#[derive(Debug)]
struct Served {
    server: Server,
    uri: String,
}

/// Starts a server on a socket in `dir`.
fn serve(bench: &Bench<'_>, who: Who, what: &Exported<'_>, dir: &Path) -> Result<Served> {
    let program =
        who.program(bench).map_err(|what| LabError::BadOptions { what, hint: "leave this row out".into() })?;
    let dir = dir.canonicalize().map_err(LabError::file("find", dir))?;
    let path = what.path.canonicalize().map_err(LabError::file("find", what.path))?;
    let socket = dir.join(format!("{}.sock", who.name()));
    // One that was stopped may have left it.
    let _ = std::fs::remove_file(&socket);
    let direct = what.cache == CacheMode::Direct;
    let mut command = Command::new(program);
    match who {
        Who::Ours => {
            let mut export = OsString::from("=");
            export.push(&path);
            command.arg("serve").arg(export).arg("--nbd").arg(&socket).arg("--quiet");
            command.arg(if direct { "--cache=direct" } else { "--cache=page" });
            command.args((what.format == "raw").then_some("--format=raw"));
            command.args((!what.writable).then_some("--read-only"));
        }
        Who::QemuNbd => {
            command.args(["--persistent", "--aio=io_uring", "-f", what.format, "-k"]).arg(&socket);
            command.arg(if direct { "--cache=none" } else { "--cache=writeback" });
            command.arg(format!("--shared={}", what.clients));
            command.args((!what.writable).then_some("--read-only")).arg(path);
        }
        Who::Nbdkit => {
            command.args(["-f", "-U"]).arg(&socket).args((!what.writable).then_some("-r")).arg("file").arg(path);
        }
    }
    let server = Server::listening(command, &socket, who.name())?;
    Ok(Served { server, uri: format!("nbd+unix:///?socket={}", socket.display()) })
}
