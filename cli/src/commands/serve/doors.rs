//! The ways into the disks of one `serve`: an NBD server for all of them, and vhost-user devices,
//! each for one. Devices are opened and closed while the process runs (`serve-ctl DISK open-door`).

use crate::exit::{Failure, Outcome};
use diskwright_serve::{
    control::{ControlError, DoorKeeper},
    metrics::{Metrics, Totals},
    nbd::{Address, Listener, NbdServer},
    vhost_user::{QUEUES_MAX, VhostUserOptions, VhostUserServer},
};
use diskwright_store::{BlockDevice, ErrorCode};
use std::{
    fmt::Display,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// A disk that may be that of a virtual machine.
#[derive(Debug)]
pub struct DoorDisk {
    /// Name of its export.
    pub name: String,
    /// The disk within its limits.
    pub device: Arc<dyn BlockDevice>,
}

/// A device for a virtual machine.
#[derive(Debug)]
struct Machine {
    disk: String,
    socket: PathBuf,
    queues: u16,
    server: VhostUserServer,
}

/// The devices for virtual machines.
#[derive(Debug)]
pub struct Machines {
    disks: Vec<DoorDisk>,
    is_ephemeral: bool,
    /// `None` when the process ends.
    open: Mutex<Option<Vec<Machine>>>,
}

impl Machines {
    /// No device yet.
    pub fn of(disks: Vec<DoorDisk>, is_ephemeral: bool) -> Self {
        Self { disks, is_ephemeral, open: Mutex::new(Some(Vec::new())) }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Vec<Machine>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a disk that of a virtual machine at this socket.
    ///
    /// # Errors
    /// A sentence: there is no such disk, the socket exists, or the device cannot be started.
    pub fn open(&self, disk: &str, socket: &Path, queues: u16) -> Result<(), Failure> {
        let failed = |error: &dyn Display| Failure::new(error.to_string());
        let Some(found) = self.disks.iter().find(|found| found.name == disk) else {
            return Err(Failure::new(format!("{disk}: no such disk is served")));
        };
        let mut open = self.lock();
        let Some(open) = &mut *open else { return Err(Failure::new(format!("{disk}: its process is ending"))) };
        let listener = Listener::bind(&Address::Unix(socket.to_owned())).map_err(|error| failed(&error))?;
        let options = VhostUserOptions { name: disk.to_owned(), queues, is_ephemeral: self.is_ephemeral };
        let started = VhostUserServer::start(Arc::clone(&found.device), listener, options);
        let server = started.map_err(|error| failed(&error))?;
        open.push(Machine { disk: disk.to_owned(), socket: socket.to_owned(), queues, server });
        Ok(())
    }

    /// The sockets and numbers of virtqueues of a disk's devices.
    pub fn of_disk(&self, disk: &str) -> Vec<(PathBuf, u16)> {
        let open = self.lock();
        let of_disk = open.iter().flatten().filter(|machine| machine.disk == disk);
        of_disk.map(|machine| (machine.socket.clone(), machine.queues)).collect()
    }

    fn metrics(&self) -> Vec<Arc<Metrics>> {
        self.lock().iter().flatten().map(|machine| Arc::clone(machine.server.metrics())).collect()
    }

    fn is_well(&self) -> bool {
        self.lock().iter().flatten().all(|machine| machine.server.is_well())
    }

    fn stop(&self) -> Outcome<()> {
        let open = self.lock().take();
        let mut ended = Ok(());
        for machine in open.into_iter().flatten() {
            ended = ended.and(machine.server.stop().map_err(|error| Failure::new(error.to_string())));
        }
        ended
    }
}

fn refused(code: ErrorCode, message: impl Display) -> ControlError {
    ControlError::Refused { code, message: message.to_string() }
}

impl DoorKeeper for Machines {
    fn open(&self, disk: &str, socket: &Path, queues: u16) -> Result<(), ControlError> {
        if queues == 0 || queues > QUEUES_MAX {
            let sentence = format!("{queues} queues: a device has at least 1 and at most {QUEUES_MAX}");
            return Err(refused(ErrorCode::InvalidInput, sentence));
        }
        self.open(disk, socket, queues).map_err(|error| refused(ErrorCode::Io, error))
    }

    fn close(&self, disk: &str, socket: &Path) -> Result<u16, ControlError> {
        let found = {
            let mut open = self.lock();
            let is_it = |machine: &Machine| machine.disk == disk && machine.socket == socket;
            open.as_mut().and_then(|open| open.iter().position(is_it).map(|index| open.remove(index)))
        };
        let Some(machine) = found else {
            let sockets: Vec<String> = self.of_disk(disk).iter().map(|(path, _)| path.display().to_string()).collect();
            let there =
                if sockets.is_empty() { "it has none".into() } else { format!("it has {}", sockets.join(", ")) };
            let sentence = format!("{disk}: it is not the disk of a machine at {}; {there}", socket.display());
            return Err(refused(ErrorCode::NotFound, sentence));
        };
        let queues = machine.queues;
        machine.server.stop().map(|()| queues).map_err(|error| refused(ErrorCode::Io, error))
    }
}

/// The servers that run.
#[derive(Debug)]
pub struct Doors {
    /// The NBD server.
    pub nbd: Option<NbdServer>,
    /// The devices for virtual machines.
    pub machines: Arc<Machines>,
}

impl Doors {
    /// The addresses of the NBD server.
    pub fn addresses(&self) -> &[Address] {
        self.nbd.as_ref().map_or(&[], NbdServer::addresses)
    }

    /// Gets the counters of each server that runs at the time of the call.
    pub fn metrics(&self) -> impl Fn() -> Vec<Arc<Metrics>> + Send + Sync + use<> {
        let nbd = self.nbd.as_ref().map(|nbd| Arc::clone(nbd.metrics()));
        let machines = Arc::clone(&self.machines);
        move || nbd.iter().cloned().chain(machines.metrics()).collect()
    }

    /// The counters of all servers together, for the live line.
    pub fn totals(&self) -> Totals {
        self.metrics()().iter().fold(Totals::default(), |sum, metrics| sum.and(&metrics.totals()))
    }

    /// Whether all threads run.
    pub fn is_well(&self) -> bool {
        self.nbd.iter().all(NbdServer::is_well) && self.machines.is_well()
    }

    /// Stops all servers: requests in flight are finished, and writable disks are flushed.
    ///
    /// # Errors
    /// The first error. All servers are stopped even after an error.
    pub fn stop(self) -> Outcome<()> {
        let failed = |error: &dyn Display| Failure::new(error.to_string());
        let nbd = self.nbd.map_or(Ok(()), |server| server.stop().map_err(|error| failed(&error)));
        nbd.and(self.machines.stop())
    }
}
