//! The process behind a control channel: its disks, how it ends, and how it freezes file systems.

use super::{ControlError, answer::Limits, message::NewDisk};
use crate::metrics::Metrics;
use diskwright_disk::Movable;
use diskwright_store::RateLimiter;
use std::{
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
};

/// A disk that the process has open.
#[derive(Debug, Clone)]
pub struct HostedDisk {
    /// The export name; of an attached disk, the name of its file.
    pub name: String,
    /// The disk, on which all its queues are open. After a move it is in another file.
    pub disk: Arc<Movable>,
    /// What limits the rate at which it is served.
    pub limiter: Arc<RateLimiter>,
}

/// Makes the process end as by a signal: requests in flight are finished, and the disks closed.
pub type OnDrain = Box<dyn Fn() + Send + Sync>;

/// File systems on a disk that are frozen, and sentences about those that are not.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FrozenFileSystems {
    /// Where they are mounted.
    pub file_systems: Vec<PathBuf>,
    /// Sentences for the user.
    pub warnings: Vec<String>,
}

/// Freezes the file systems on the disk for the moment of a snapshot.
pub trait Freezer: Send + Sync {
    /// Freezes them. [`Freezer::thaw`] is called afterwards in any case.
    fn freeze(&self) -> FrozenFileSystems;
    /// Thaws them. Returns sentences for the user.
    fn thaw(&self) -> Vec<String>;
}

/// Gets the counters of the servers that run at the time of the call.
pub type GetMetrics = Box<dyn Fn() -> Vec<Arc<Metrics>> + Send + Sync>;

/// Opens and closes the disks of a process, and ways into them, while it runs.
pub trait DoorKeeper: Send + Sync {
    /// Makes a disk that of a virtual machine at this socket, by vhost-user.
    ///
    /// # Errors
    /// [`ControlError::Refused`].
    fn open(&self, disk: &str, socket: &Path, queues: u16) -> Result<(), ControlError>;

    /// Ends that: requests in flight are finished, the machine is disconnected, and the disk is
    /// flushed. Returns the number of queues.
    ///
    /// # Errors
    /// [`ControlError::Refused`].
    fn close(&self, disk: &str, socket: &Path) -> Result<u16, ControlError>;

    /// Opens a disk and serves it with the others.
    ///
    /// # Errors
    /// [`ControlError::Refused`].
    fn add(&self, wanted: &NewDisk) -> Result<HostedDisk, ControlError>;

    /// Ends a disk: requests in flight are finished, its clients and machines are disconnected, and
    /// it is flushed and closed.
    ///
    /// # Errors
    /// [`ControlError::Refused`]. Unless the disk is not found, it is served no longer.
    fn remove(&self, disk: &str) -> Result<(), ControlError>;
}

/// A change of a disk, made over the control channel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// The disk is in this file now.
    Moved(PathBuf),
    /// The rate at which the disk is served is limited to this.
    Limited(Limits),
}

/// Called after a change.
pub type OnChange = Box<dyn Fn(Change) + Send + Sync>;

/// What a control channel needs to know about its process.
pub struct Host {
    /// The command that the process runs: `serve` or `attach`.
    pub command: &'static str,
    /// Gets the counters of its servers. None for a process whose requests the kernel counts.
    pub metrics: GetMetrics,
    /// Opens and closes ways into its disks, or the sentence why it does not.
    pub doors: Result<Arc<dyn DoorKeeper>, String>,
    /// How to end the process, or the sentence why it is not ended this way.
    pub on_drain: Result<OnDrain, String>,
    /// Freezes file systems on the disk, if the disk is a device of this machine.
    pub freezer: Option<Box<dyn Freezer>>,
    /// Called after a disk has moved to another file or was limited.
    pub on_change: Option<OnChange>,
}

impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Host({})", self.command)
    }
}
