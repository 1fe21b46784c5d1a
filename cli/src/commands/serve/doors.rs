//! The ways into the disks of one `serve`: servers of the network (NBD, NVMe/TCP, iSCSI) for all,
//! and vhost-user devices, each for one. Disks and devices come and go while the process runs
//! (`serve-ctl`).
//!
//! One mutex guards all of it. It is held while a disk is removed, which waits for the disk's
//! clients to receive their last replies.

use super::{
    disks::{Opener, Served},
    word::DiskWord,
};
use crate::{
    exit::{Failure, Outcome},
    options::FormatArg,
};
use clap::ValueEnum;
use diskwright_serve::{
    control::{ControlError, DoorKeeper, HostedDisk, NewDisk},
    metrics::{Metrics, Totals},
    net::{Address, Export, Listener, Server},
    reservations::ReservationTable,
    vhost_user::{QUEUES_MAX, VhostUserOptions, VhostUserServer},
};
use diskwright_store::{ErrorCode, RateLimits};
use std::{
    fmt::Display,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError},
};

/// A protocol of the network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Network {
    Nbd,
    Nvme,
    Iscsi,
}

/// A device for a virtual machine.
#[derive(Debug)]
struct Machine {
    disk: String,
    socket: PathBuf,
    queues: u16,
    server: VhostUserServer,
}

#[derive(Debug)]
struct Inside {
    disks: Vec<Served>,
    servers: Vec<(Network, Server)>,
    machines: Vec<Machine>,
}

/// The disks, and the servers that run.
#[derive(Debug)]
pub struct Doors {
    opener: Opener,
    /// Description of the disks for clients.
    description: String,
    reservations: Arc<ReservationTable>,
    /// `None` when the process ends.
    inside: Mutex<Option<Inside>>,
}

/// A disk as an export.
pub fn export(served: &Served, description: &str) -> Export {
    Export { name: served.name.clone(), description: description.to_owned(), device: served.device() }
}

fn failed(error: impl Display) -> Failure {
    Failure::new(error.to_string())
}

fn refused(code: ErrorCode, message: impl Display) -> ControlError {
    ControlError::Refused { code, message: message.to_string() }
}

fn ending() -> ControlError {
    refused(ErrorCode::Locked, "the process is ending")
}

impl Inside {
    fn open(
        &mut self,
        disk: &str,
        socket: &Path,
        queues: u16,
        is_ephemeral: bool,
        reservations: &Arc<ReservationTable>,
    ) -> Outcome<()> {
        let Some(found) = self.disks.iter().find(|found| found.name == disk) else {
            return Err(Failure::new(format!("{disk}: no such disk is served")));
        };
        let listener = Listener::bind(&Address::Unix(socket.to_owned())).map_err(failed)?;
        let reservations = Arc::clone(reservations);
        let options = VhostUserOptions { name: disk.to_owned(), queues, is_ephemeral, reservations };
        let server = VhostUserServer::start(found.device(), listener, options).map_err(failed)?;
        self.machines.push(Machine { disk: disk.to_owned(), socket: socket.to_owned(), queues, server });
        Ok(())
    }

    /// The sockets and numbers of virtqueues of a disk's devices.
    fn sockets_of(&self, disk: &str) -> Vec<(PathBuf, u16)> {
        let of_disk = self.machines.iter().filter(|machine| machine.disk == disk);
        of_disk.map(|machine| (machine.socket.clone(), machine.queues)).collect()
    }

    fn metrics(&self) -> Vec<Arc<Metrics>> {
        let servers = self.servers.iter().map(|(_, server)| server.metrics());
        servers.chain(self.machines.iter().map(|machine| machine.server.metrics())).cloned().collect()
    }

    fn is_well(&self) -> bool {
        self.servers.iter().all(|(_, server)| server.is_well())
            && self.machines.iter().all(|machine| machine.server.is_well())
    }
}

impl Doors {
    /// The disks, and the servers that they have.
    pub fn of(
        opener: Opener,
        description: String,
        reservations: Arc<ReservationTable>,
        disks: Vec<Served>,
        servers: Vec<(Network, Server)>,
    ) -> Self {
        let inside = Inside { disks, servers, machines: Vec::new() };
        Self { opener, description, reservations, inside: Mutex::new(Some(inside)) }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Inside>> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a disk that of a virtual machine at this socket.
    ///
    /// # Errors
    /// A sentence: there is no such disk, the socket exists, or the device cannot be started.
    pub fn open_for_machine(&self, disk: &str, socket: &Path, queues: u16) -> Outcome<()> {
        match &mut *self.lock() {
            Some(inside) => inside.open(disk, socket, queues, self.opener.is_ephemeral(), &self.reservations),
            None => Err(failed(ending())),
        }
    }

    /// The disks that are served now.
    pub fn disks(&self) -> Vec<Served> {
        self.lock().as_ref().map(|inside| inside.disks.clone()).unwrap_or_default()
    }

    /// The sockets and numbers of virtqueues of a disk's devices.
    pub fn sockets_of(&self, disk: &str) -> Vec<(PathBuf, u16)> {
        self.lock().as_ref().map(|inside| inside.sockets_of(disk)).unwrap_or_default()
    }

    /// The addresses at which a protocol is served.
    pub fn addresses(&self, network: Network) -> Vec<Address> {
        let inside = self.lock();
        let servers = inside.iter().flat_map(|inside| &inside.servers).filter(|(served, _)| *served == network);
        servers.flat_map(|(_, server)| server.addresses()).cloned().collect()
    }

    /// Uses these certificates for all connections accepted from now on.
    pub fn set_tls(&self, config: &Arc<rustls::ServerConfig>) {
        let inside = self.lock();
        let servers = inside.iter().flat_map(|inside| &inside.servers);
        // The others have no TLS.
        servers.filter(|(network, _)| *network == Network::Nbd).for_each(|(_, nbd)| nbd.set_tls(Arc::clone(config)));
    }

    /// Limits all connections accepted from now on.
    pub fn set_client_limits(&self, limits: RateLimits) {
        let inside = self.lock();
        inside.iter().flat_map(|inside| &inside.servers).for_each(|(_, server)| server.set_client_limits(limits));
    }

    /// The counters of each server that runs.
    pub fn metrics(&self) -> Vec<Arc<Metrics>> {
        self.lock().as_ref().map(Inside::metrics).unwrap_or_default()
    }

    /// The counters of all servers together, for the live line.
    pub fn totals(&self) -> Totals {
        self.metrics().iter().fold(Totals::default(), |sum, metrics| sum.and(&metrics.totals()))
    }

    /// Whether all threads run. Does not wait.
    pub fn is_well(&self) -> bool {
        match self.inside.try_lock() {
            Ok(inside) => inside.iter().all(Inside::is_well),
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner().iter().all(Inside::is_well),
            // A disk is being added or removed.
            Err(TryLockError::WouldBlock) => true,
        }
    }

    /// Stops all servers and closes all disks: requests in flight are finished, and writable disks
    /// are flushed.
    ///
    /// # Errors
    /// The first error. All servers are stopped and all disks closed even after an error.
    pub fn stop(&self) -> Outcome<()> {
        let Some(Inside { disks, servers, machines }) = self.lock().take() else { return Ok(()) };
        let mut ended = Ok(());
        for (_, server) in servers {
            ended = ended.and(server.stop().map_err(failed));
        }
        for machine in machines {
            ended = ended.and(machine.server.stop().map_err(failed));
        }
        for Served { disk, .. } in disks {
            ended = ended.and(disk.close().map_err(Failure::from));
        }
        ended
    }
}

impl DoorKeeper for Doors {
    fn open(&self, disk: &str, socket: &Path, queues: u16) -> Result<(), ControlError> {
        if queues == 0 || queues > QUEUES_MAX {
            let sentence = format!("{queues} queues: a device has at least 1 and at most {QUEUES_MAX}");
            return Err(refused(ErrorCode::InvalidInput, sentence));
        }
        self.open_for_machine(disk, socket, queues).map_err(|error| refused(ErrorCode::Io, error))
    }

    fn close(&self, disk: &str, socket: &Path) -> Result<u16, ControlError> {
        let machine = {
            let mut inside = self.lock();
            let inside = inside.as_mut().ok_or_else(ending)?;
            let is_it = |machine: &Machine| machine.disk == disk && machine.socket == socket;
            let Some(index) = inside.machines.iter().position(is_it) else {
                let sockets: Vec<String> =
                    inside.sockets_of(disk).iter().map(|(path, _)| path.display().to_string()).collect();
                let there =
                    if sockets.is_empty() { "it has none".into() } else { format!("it has {}", sockets.join(", ")) };
                let sentence = format!("{disk}: it is not the disk of a machine at {}; {there}", socket.display());
                return Err(refused(ErrorCode::NotFound, sentence));
            };
            inside.machines.remove(index)
        };
        let queues = machine.queues;
        machine.server.stop().map(|()| queues).map_err(|error| refused(ErrorCode::Io, error))
    }

    fn add(&self, wanted: &NewDisk) -> Result<HostedDisk, ControlError> {
        let NewDisk { file, name, format, read_only } = wanted;
        let wrong = |sentence: String| refused(ErrorCode::InvalidInput, sentence);
        let format = format.as_deref().map(|word| {
            let known = FormatArg::from_str(word, true).map(FormatArg::format);
            known.map_err(|_| wrong(format!("{word:?} is not a format")))
        });
        let read_only = (*read_only).then_some(true);
        let word = DiskWord::new(name.clone(), file.clone(), format.transpose()?, None, read_only).map_err(wrong)?;
        let mut inside = self.lock();
        let inside = inside.as_mut().ok_or_else(ending)?;
        if inside.disks.iter().any(|disk| disk.name == word.name) {
            return Err(wrong(format!("a disk with the name {:?} is served already; choose another name", word.name)));
        }
        let served = self.opener.open(word, &inside.disks).map_err(|error| refused(ErrorCode::Io, error))?;
        self.reservations.load(&served.name).map_err(|error| refused(ErrorCode::Io, error))?;
        for (index, (_, server)) in inside.servers.iter().enumerate() {
            if let Err(error) = server.add(export(&served, &self.description)) {
                // The servers before have no clients of it yet, so this ends at once.
                let before = inside.servers[..index].iter();
                before.for_each(|(_, server)| drop(server.remove(&served.name)));
                return Err(refused(ErrorCode::InvalidInput, error));
            }
        }
        let hosted = served.hosted();
        inside.disks.push(served);
        Ok(hosted)
    }

    fn remove(&self, disk: &str) -> Result<(), ControlError> {
        let mut inside = self.lock();
        let inside = inside.as_mut().ok_or_else(ending)?;
        let Some(index) = inside.disks.iter().position(|served| served.name == disk) else {
            return Err(refused(ErrorCode::NotFound, format!("{disk}: no such disk is served")));
        };
        let failed = |error: &dyn Display| refused(ErrorCode::Io, error);
        let mut ended = Ok(());
        let (of_disk, others): (Vec<_>, Vec<_>) = inside.machines.drain(..).partition(|machine| machine.disk == disk);
        inside.machines = others;
        for machine in of_disk {
            ended = ended.and(machine.server.stop().map_err(|error| failed(&error)));
        }
        for (_, server) in &inside.servers {
            ended = ended.and(server.remove(disk).map_err(|error| failed(&error)));
        }
        let served = inside.disks.remove(index);
        ended.and(served.disk.close().map_err(|error| failed(&error)))
    }
}
