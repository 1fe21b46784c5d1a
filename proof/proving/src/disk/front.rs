//! The interface through which a disk is used: its own block queue, or a server and its client.
//!
//! ```text
//!   session ─▶ BlockQueue of the Disk
//!   session ─▶ BlockQueue of an NbdDevice ─▶ unix socket ─▶ Server ─▶ BlockQueue of the Disk
//!   session ─▶ BlockQueue of an NvmeDevice ─▶ unix socket ─▶ Server ─▶ BlockQueue of the Disk
//!   session ─▶ BlockQueue of an IscsiDevice ─▶ unix socket ─▶ Server ─▶ BlockQueue of the Disk
//!   session ─▶ BlockQueue of a FrontEnd ─▶ virtqueue ─▶ VhostUserServer ─▶ BlockQueue of the Disk
//! ```
//!
//! One request is in flight at a time, and a server does nothing by itself, so a seed reproduces
//! the run here too. To test another server, add a variant to [`Front`] and a case to
//! [`Served::start`], which takes a disk and returns a block device that reaches it over the wire.

use super::{DiskCase, Front};
use crate::{rule_breaker::BrokenRule, stage::Outcome};
use diskwright_disk::Disk;
use diskwright_iscsi::{IscsiDevice, IscsiUri};
use diskwright_nbd::{NbdDevice, NbdUri};
use diskwright_nvme::{NvmeDevice, NvmeUri, wire::Digests};
use diskwright_serve::{
    ThreadError, iscsi, nbd,
    net::{Address, Export, Listener, ServeError, ServerOptions},
    nvme,
    vhost_user::{
        VhostUserError, VhostUserOptions, VhostUserServer,
        front_end::{FrontEnd, FrontOptions},
    },
};
use diskwright_store::{
    BlockDevice, BlockQueue, Completion, Endpoint, Extent, Geometry, IoBuf, MemoryStore, Operation, PushError,
    QueueOptions, RawDevice, Request,
};
use std::{io, path::Path, sync::Arc};
use tempfile::TempDir;

const SUBSYSTEM: &str = "nqn.2026-01.org.example:disks";
const TARGET: &str = "iqn.2026-01.org.example:disks";

/// No request of a session has more.
const PAYLOAD_BYTES: usize = 2 << 20;

impl Front {
    /// What this machine lacks, for a skip by name. `None` if it can be used.
    pub fn missing(self) -> Option<String> {
        if self == Self::Queue {
            return None;
        }
        let store = Arc::new(MemoryStore::with_bytes("nothing", vec![0; 4096]));
        let device = RawDevice::new(store, false, 512).map_err(|error| error.to_string());
        device.and_then(|device| Served::start(self, Arc::new(device))).err()
    }
}

#[derive(Debug)]
enum Server {
    Net(diskwright_serve::net::Server),
    VhostUser(VhostUserServer),
}

/// A served disk and its only client.
#[derive(Debug)]
pub(super) struct Served {
    client: Box<dyn BlockDevice>,
    server: Server,
    /// The folder of the socket.
    _dir: TempDir,
}

impl Served {
    /// Starts a server for a disk, and connects to it.
    pub(super) fn start(front: Front, device: Arc<dyn BlockDevice>) -> Outcome<Self> {
        let dir = tempfile::tempdir().map_err(|error| error.to_string())?;
        let socket = dir.path().join("socket");
        let listener = Listener::bind(&Address::Unix(socket.clone())).map_err(|error| error.to_string())?;
        let (client, server): (Box<dyn BlockDevice>, _) = match front {
            Front::Queue => return Err("the disk's own queue needs no server".into()),
            Front::Nbd | Front::Nvme | Front::Iscsi => {
                let (client, server) = served_by_net(front, &socket, listener, device)?;
                (client, Server::Net(server))
            }
            Front::VhostUser => {
                let options = VhostUserOptions {
                    name: "disk".into(),
                    queues: 1,
                    is_ephemeral: false,
                    reservations: Arc::default(),
                };
                let server = VhostUserServer::start(device, listener, options).map_err(|error| match error {
                    VhostUserError::Thread(error) => not_started(error),
                    other => other.to_string(),
                })?;
                let options =
                    FrontOptions { queues: 1, depth: 4, payload_bytes: PAYLOAD_BYTES, ..FrontOptions::default() };
                let client = FrontEnd::connect(&socket, options).map_err(|error| error.to_string())?;
                (Box::new(client), Server::VhostUser(server))
            }
        };
        Ok(Self { client, server, _dir: dir })
    }

    pub(super) fn client(&self) -> &dyn BlockDevice {
        &*self.client
    }

    /// Disconnects and stops the server, which flushes.
    pub(super) fn stop(self) -> Outcome {
        drop(self.client);
        match self.server {
            Server::Net(server) => server.stop().map_err(|error| error.to_string()),
            Server::VhostUser(server) => server.stop().map_err(|error| error.to_string()),
        }
    }
}

/// A server of the network with one worker, and its client.
fn served_by_net(
    front: Front,
    socket: &Path,
    listener: Listener,
    device: Arc<dyn BlockDevice>,
) -> Outcome<(Box<dyn BlockDevice>, diskwright_serve::net::Server)> {
    let writable = !device.geometry().read_only;
    let exports = vec![Export { name: "disk".into(), description: String::new(), device }];
    let options = ServerOptions { workers: 1, ..ServerOptions::default() };
    let endpoint = Endpoint::Unix(socket.to_owned());
    let told = |error: &dyn std::error::Error| error.to_string();
    Ok(match front {
        Front::Nvme => {
            let server = nvme::start(SUBSYSTEM, exports, vec![listener], options).map_err(not_served)?;
            let uri = NvmeUri { digests: Digests::all(), ..NvmeUri::at(endpoint, SUBSYSTEM, 1) };
            (Box::new(NvmeDevice::open(&uri, writable).map_err(|error| told(&error))?), server)
        }
        Front::Iscsi => {
            let server = iscsi::start(TARGET, exports, vec![listener], options).map_err(not_served)?;
            let uri = IscsiUri { header_digest: true, data_digest: true, ..IscsiUri::at(endpoint, TARGET, 0) };
            (Box::new(IscsiDevice::open(&uri, writable).map_err(|error| told(&error))?), server)
        }
        Front::Nbd | Front::Queue | Front::VhostUser => {
            let server = nbd::start(exports, vec![listener], options).map_err(not_served)?;
            let client = NbdDevice::open(&NbdUri::unix(socket, "disk"), writable);
            (Box::new(client.map_err(|error| told(&error))?), server)
        }
    })
}

fn not_served(error: ServeError) -> String {
    match error {
        ServeError::Thread(error) => not_started(error),
        other => other.to_string(),
    }
}

fn not_started(error: ThreadError) -> String {
    match error {
        ThreadError::Ring { source } => format!("the server needs io_uring: {source}"),
        other => other.to_string(),
    }
}

/// The device that the server exports: the disk, or a wrapper that drops flushes or FUA.
pub(super) fn device_of(case: &DiskCase, disk: &Arc<Disk>) -> Arc<dyn BlockDevice> {
    match case.broken_rule {
        Some(BrokenRule::ServerForgetsFua | BrokenRule::ServerForgetsFlush) => Arc::new(Forgetful {
            below: Arc::clone(disk),
            flushes: case.broken_rule == Some(BrokenRule::ServerForgetsFlush),
        }),
        _ => Arc::clone(disk) as Arc<dyn BlockDevice>,
    }
}

/// Drops flushes or FUA before they reach the disk, as a defective server would.
#[derive(Debug)]
struct Forgetful {
    below: Arc<Disk>,
    /// Drops flushes if true, else FUA.
    flushes: bool,
}

#[derive(Debug)]
struct ForgetfulQueue {
    below: Box<dyn BlockQueue>,
    flushes: bool,
}

impl BlockDevice for Forgetful {
    fn geometry(&self) -> Geometry {
        self.below.geometry()
    }

    fn open_queue(&self, options: &QueueOptions<'_>) -> io::Result<Box<dyn BlockQueue>> {
        let below = self.below.open_queue(options)?;
        Ok(Box::new(ForgetfulQueue { below, flushes: self.flushes }))
    }

    fn extents(&self, offset_bytes: u64, len_bytes: u64, out: &mut Vec<Extent>) -> io::Result<()> {
        self.below.extents(offset_bytes, len_bytes, out)
    }
}

impl BlockQueue for ForgetfulQueue {
    fn depth(&self) -> usize {
        self.below.depth()
    }

    fn in_flight(&self) -> usize {
        self.below.in_flight()
    }

    fn push(&mut self, request: Request) -> Result<(), Box<PushError>> {
        match request.operation {
            Operation::Flush if self.flushes => {
                // Answers as if it were flushed. A small read takes the flush's place, so that the
                // answer takes the same path.
                self.below.push(Request::read(0, 4096, IoBuf::new(4096), request.tag))
            }
            _ => self.below.push(Request { fua: request.fua && self.flushes, ..request }),
        }
    }

    fn reap(&mut self, at_least: usize, out: &mut Vec<Completion>) -> io::Result<()> {
        self.below.reap(at_least, out)
    }
}
