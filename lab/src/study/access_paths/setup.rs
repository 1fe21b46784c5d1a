//! Sets up each access path to the disk for a cell, and takes it down when it is dropped.
//!
//! The target, with its connections and descriptors, is dropped before the server, because a server
//! waits for its clients. SIGTERM ends a server; for `attach` it also detaches the device. The
//! ephemeral child is an unlinked file, so its space is freed when the server's process ends.

use super::{
    AccessPath, AccessPathRecord, AccessPathsOptions, CLIENTS, Scale, options::NO_PROGRAM, record::NOT_WANTED,
};
use crate::{
    LabError, Result,
    network::{Network, NetworkSpec},
    open::{self, OpenHow},
    peer,
    progress::{Progress, report},
    server::{Server, free_port},
    targets::{Container, open_target},
};
use diskwright_disk::{Disk, OpenOptions};
use diskwright_image::Format;
use diskwright_load::OpenTarget;
use diskwright_nbd::NbdUri;
use diskwright_serve::{attach::Registry, ephemeral};
use diskwright_store::{CacheMode, EngineKind};
use std::{
    ffi::OsString,
    fs,
    net::{Ipv4Addr, SocketAddrV4, TcpStream},
    path::{Path, PathBuf},
    process::Command,
};

/// The files that the access paths reach, and how.
#[derive(Debug)]
pub(super) struct Disks {
    pub container: Container,
    pub disk: PathBuf,
    /// Size of the disk in bytes.
    pub size_bytes: u64,
    pub raw: PathBuf,
    /// Absolute path of the folder for sockets, logs and ephemeral children.
    pub dir: PathBuf,
    /// The cache mode in force.
    pub cache: CacheMode,
    pub engine: EngineKind,
    /// The executable to start as a server.
    pub program: Option<PathBuf>,
    /// What network is to be emulated.
    pub emulated: Option<NetworkSpec>,
    /// The emulated network of this host, or why there is none.
    pub network: std::result::Result<Network, String>,
}

/// An access path that is set up. The field order matters: the target is dropped before its server.
#[derive(Debug)]
pub(super) struct Open {
    pub target: OpenTarget,
    pub server: Option<Serving>,
}

/// A server that is stopped by a signal, and the process of it that does the I/O.
#[derive(Debug)]
pub(super) struct Serving {
    server: Server,
    /// Process that does the I/O, if it is not `server` itself.
    io_pid: Option<u32>,
}

impl Serving {
    /// CPU time of the process that does the I/O, in nanoseconds.
    pub(super) fn cpu_ns(&self) -> Result<u64> {
        match self.io_pid {
            None => self.server.cpu_ns(),
            Some(pid) => self.server.cpu_ns_of(pid),
        }
    }
}

impl Open {
    /// Takes the access path down, and returns the server's error.
    pub(super) fn close(self) -> Result<()> {
        drop(self.target);
        self.server.map_or(Ok(()), |serving| serving.server.stop())
    }
}

impl Disks {
    /// Tries each access path of this host once. An access path that this machine does not support
    /// is recorded as skipped.
    ///
    /// # Errors
    /// [`LabError::Stopped`]; a supported access path that fails.
    pub(super) fn probe(
        &self,
        options: &AccessPathsOptions,
        progress: &mut dyn Progress,
    ) -> Result<Vec<AccessPathRecord>> {
        let mut ways = Vec::new();
        let here: Vec<_> = Scale::Host.ways().collect();
        for (index, &way) in here.iter().enumerate() {
            report(progress, "probe", index as u64, here.len() as u64, way.name())?;
            let missing = if options.wants(way) { self.missing(way) } else { Some(NOT_WANTED.into()) };
            let skipped = match (missing, way) {
                (Some(missing), _) => Some(missing),
                // A loop device may be unusable (in a container for example), and this shows only
                // when one is made.
                (None, AccessPath::Attach) => self.open(way).and_then(Open::close).err().map(|error| error.to_string()),
                (None, _) => {
                    self.open(way)?.close()?;
                    None
                }
            };
            ways.push(AccessPathRecord { way, skipped });
        }
        Ok(ways)
    }

    /// Why this machine does not support an access path; `None` if it does.
    fn missing(&self, way: AccessPath) -> Option<String> {
        match way {
            AccessPath::InProcess | AccessPath::RawFile => return None,
            AccessPath::QemuNbd => {
                return peer::find("qemu-nbd").is_none().then(|| peer::missing("qemu-nbd", "qemu-utils"));
            }
            _ => {}
        }
        self.no_server().or_else(|| match way {
            AccessPath::Attach if !nix::unistd::geteuid().is_root() => {
                Some("block devices need root (use sudo)".into())
            }
            AccessPath::Attach => ["/dev/fuse", "/dev/loop-control"]
                .into_iter()
                .find_map(|device| Some(format!("{device} cannot be opened: {}", fs::File::open(device).err()?))),
            _ if way.is_over_network() => self.network.as_ref().err().cloned(),
            _ => None,
        })
    }

    /// The network that is emulated between a guest and the servers of an access path.
    pub(super) fn emulated_for(&self, way: AccessPath) -> Option<NetworkSpec> {
        self.emulated.filter(|_| way.is_over_network())
    }

    /// Why no server can be started; `None` if one can.
    pub(super) fn no_server(&self) -> Option<String> {
        self.program.is_none().then(|| NO_PROGRAM.into())
    }

    /// Sets up an access path. The disk is as it was filled.
    ///
    /// # Errors
    /// Anything that cannot be opened or started.
    pub(super) fn open(&self, way: AccessPath) -> Result<Open> {
        match way {
            AccessPath::InProcess => self.in_process(),
            AccessPath::RawFile => {
                let target = self.target(self.raw.to_str(), Some(Format::Raw))?;
                Ok(Open { target, server: None })
            }
            AccessPath::Nbd => {
                let socket = self.socket("diskwright")?;
                let mut command = self.serve(way, "");
                command.arg("--nbd").arg(&socket);
                self.over_nbd(Server::listening(command, &socket, "serve")?, &socket)
            }
            AccessPath::NbdTcp | AccessPath::NbdNetwork => self.over_tcp(way, "--nbd", |server| {
                let address = server.ip().to_string();
                let uri = NbdUri::tcp(&address, server.port(), "");
                NbdUri { connections: Some(CLIENTS as usize), ..uri }.to_string()
            }),
            AccessPath::NvmeTcp | AccessPath::NvmeNetwork => {
                self.over_tcp(way, "--nvme", |server| format!("nvme://{server}"))
            }
            AccessPath::Iscsi | AccessPath::IscsiNetwork => {
                self.over_tcp(way, "--iscsi", |server| format!("iscsi://{server}"))
            }
            AccessPath::QemuNbd => {
                let socket = self.socket("qemu")?;
                let mut command = Command::new(peer::find("qemu-nbd").unwrap_or_else(|| "qemu-nbd".into()));
                command.args(["--persistent", "--cache=none", "--aio=io_uring", "-f", "raw", "-k"]).arg(&socket);
                command.arg(format!("--shared={}", CLIENTS + 1)).arg(&self.raw);
                self.over_nbd(Server::listening(command, &socket, "qemu-nbd")?, &socket)
            }
            AccessPath::Attach => self.attach(),
            AccessPath::GuestVhostUser
            | AccessPath::GuestNvme
            | AccessPath::GuestNvmeNetwork
            | AccessPath::GuestIscsi
            | AccessPath::GuestIscsiNetwork
            | AccessPath::GuestSmb
            | AccessPath::GuestSmbNetwork
            | AccessPath::AgentNbd
            | AccessPath::AgentNvme
            | AccessPath::AgentIscsi => Err(LabError::BadOptions {
                what: format!("{} is not a way on this host", way.name()),
                hint: "please report this".into(),
            }),
        }
    }

    fn in_process(&self) -> Result<Open> {
        let options = OpenOptions {
            cache: CacheMode::Direct,
            engine: self.engine,
            format: Some(self.container.format()),
            ..OpenOptions::default()
        };
        let base = Disk::open(&self.disk, &options)?;
        let disk = ephemeral::on_top_of(&base, &self.dir, CacheMode::Direct).map_err(|error| LabError::BadOptions {
            what: format!("the ephemeral child for writes could not be created: {error}"),
            hint: "use another folder (`StudyOptions::dir`)".into(),
        })?;
        let kind = self.container.name().to_lowercase();
        let target = open_target(AccessPath::InProcess.name(), &kind, disk, CacheMode::Direct);
        Ok(Open { target, server: None })
    }

    /// The namespace of the servers of an access path, if they are in another one.
    fn network_of(&self, way: AccessPath) -> Option<&Network> {
        self.network.as_ref().ok().filter(|_| way.is_over_network() && way.scale() == Scale::Host)
    }

    /// The command line of this program for a subcommand, with the options of the disk.
    pub(super) fn own(&self, way: AccessPath, word: &str) -> Command {
        let program = self.program.as_deref().unwrap_or(Path::new("diskwright"));
        let mut command =
            self.network_of(way).map_or_else(|| Command::new(program), |network| network.command(program));
        command.args([word, "--quiet", "--cache=direct"]).env("TMPDIR", &self.dir);
        if self.container == Container::Raw {
            command.arg("--format=raw");
        }
        command
    }

    /// The command line of a server of the disk under this name, whose writes are dropped.
    pub(super) fn serve(&self, way: AccessPath, name: &str) -> Command {
        let mut command = self.own(way, "serve");
        let mut export = OsString::from(name);
        export.push("=");
        export.push(&self.disk);
        command.arg(export).arg("--ephemeral").arg("--ephemeral-dir").arg(&self.dir);
        command
    }

    /// Starts a server of the disk by the protocol of the last of these options, on a port of this
    /// address. Returns it with its address.
    pub(super) fn serve_tcp(&self, way: AccessPath, options: &[&str], on: Ipv4Addr) -> Result<(Server, SocketAddrV4)> {
        let address = SocketAddrV4::new(on, free_port()?);
        Ok((self.serve_at(way, options, &address.to_string())?, address))
    }

    /// Starts a server as [`Self::serve_tcp`], at an address with a port.
    pub(super) fn serve_at(&self, way: AccessPath, options: &[&str], address: &str) -> Result<Server> {
        let mut command = self.serve(way, "");
        command.args(options).arg(address).arg("--insecure-writes");
        let mut server = Server::start(command, &self.dir, "serve")?;
        server.wait_until("it did not listen in time", || TcpStream::connect(address).is_ok())?;
        Ok(server)
    }

    /// Serves by the protocol of this option. `uri` names the disk at an address.
    fn over_tcp(&self, way: AccessPath, option: &str, uri: impl FnOnce(SocketAddrV4) -> String) -> Result<Open> {
        let on = self.network_of(way).map_or(Ipv4Addr::LOCALHOST, Network::server);
        let (server, address) = self.serve_tcp(way, &[option], on)?;
        let target = self.target(Some(&uri(address)), None)?;
        Ok(Open { target, server: Some(Serving { server, io_pid: None }) })
    }

    pub(super) fn socket(&self, name: &str) -> Result<PathBuf> {
        let socket = self.dir.join(format!("{name}.sock"));
        match fs::remove_file(&socket) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(LabError::file("remove the socket", &socket)(error))
            }
            _ => Ok(socket),
        }
    }

    fn over_nbd(&self, server: Server, socket: &Path) -> Result<Open> {
        let uri = NbdUri { connections: Some(CLIENTS as usize), ..NbdUri::unix(socket, "") };
        let target = self.target(Some(&uri.to_string()), None)?;
        Ok(Open { target, server: Some(Serving { server, io_pid: None }) })
    }

    fn attach(&self) -> Result<Open> {
        let mut command = self.own(AccessPath::Attach, "attach");
        command.arg(&self.disk).args(["--ephemeral", "--foreground", "--by=loop"]);
        let mut server = Server::start(command, &self.dir, "attach")?;
        let log = server.log().to_owned();
        let mut device = None;
        server.wait_until("no device appeared", || {
            device = fs::read_to_string(&log).unwrap_or_default().split_inclusive('\n').find_map(device_in);
            device.is_some()
        })?;
        let device = device.unwrap_or_default();
        let record = Registry::existing().and_then(|registry| registry.find(&device).ok());
        let io_pid = record.and_then(|(_, record)| record.server).map(|server| server.pid);
        let target = self.target(device.to_str(), None)?;
        Ok(Open { target, server: Some(Serving { server, io_pid }) })
    }

    fn target(&self, spec: Option<&str>, format: Option<Format>) -> Result<OpenTarget> {
        let spec = spec.ok_or_else(|| LabError::BadOptions {
            what: format!("the name of the scratch folder {} is not UTF-8", self.dir.display()),
            hint: "use another folder (`StudyOptions::dir`)".into(),
        })?;
        let disk = OpenOptions { engine: self.engine, format, ..OpenOptions::default() };
        let how = OpenHow { writable: true, disk, ..OpenHow::default() };
        open::open(spec, &how)
    }
}

/// The path of a loop device, if the line is nothing else.
fn device_in(line: &str) -> Option<PathBuf> {
    line.strip_suffix('\n').filter(|line| line.starts_with("/dev/loop")).map(PathBuf::from)
}
