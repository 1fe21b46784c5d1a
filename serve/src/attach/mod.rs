//! Attaching: a disk becomes a block device of this machine with its partitions, or a file for
//! users other than root.
//!
//! ```text
//!   image file ─▶ Disk ─▶ ublk device ─────────────┬─▶ partitions ─▶ mounted file system
//!                      └▶ FUSE file ─▶ loop device ─┘
//!                 \_ server process _/ \__________ supervisor process _______________/
//!
//!   record.rs       records of attached disks, in files         run_dir.rs    their folder
//!   setup.rs        starts the server, makes the device, mounts
//!   supervisor.rs   the process that answers `detach`, and outlives the server
//!   server.rs       the process that does the I/O
//!   release.rs      detaching: taking everything apart, in order
//!   control.rs      requests to the supervisor
//!   loop_device.rs  loop devices and partition nodes            partitions.rs  tables, pure
//!   mounting.rs     what to mount, and mounting it              contents.rs    signatures, pure
//!   freezing.rs     file systems frozen for a snapshot
//!   usage.rs        who uses a device                           process.rs     pid and start time
//! ```
//!
//! A ublk device is used if the kernel has the driver, because a request then passes one queue
//! instead of two queues and a file system. Otherwise a loop device over a FUSE file is used.
//!
//! If a process dies, nothing hangs, and the layers above it are taken down:
//!
//! - The server dies: the kernel answers all requests with errors. The supervisor unmounts and
//!   frees the device.
//! - The server of a ublk device dies: another one takes the device over, unless completed writes
//!   were lost with it (`recovery.rs`).
//! - The supervisor dies too: the next command clears up ([`clear_stale`]).
//!
//! An image on a file system of an attached disk attaches as any other image. Discards pass through
//! all layers: file system, ublk (or loop device and FUSE, as `FALLOC_FL_PUNCH_HOLE`), and the disk
//! frees the space.

mod contents;
mod control;
mod error;
mod freezing;
mod loop_device;
mod mounted;
mod mounting;
mod partitions;
mod process;
mod record;
mod recovery;
mod release;
mod run_dir;
mod server;
mod setup;
mod supervisor;
mod usage;

pub use error::AttachError;
pub use mounted::{carries, mounted_from};
pub use process::{Process, name_of};
pub use record::{AttachMethod, MountRecord, PartitionRecord, Record, RecordDir, Registry, RegistryLock};
pub use release::DetachOptions;
pub use server::{ServeMethod, ServerMessage, ServerStart, SupervisorMessage, serve_disk};
pub use setup::attach;
pub use supervisor::Attached;

pub use crate::ublk::UblkPlace;
pub(crate) use loop_device::wait_until;
pub(crate) use run_dir::{RunDir, make_private};

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

/// What to attach, and how.
#[derive(Debug, Clone, Default)]
pub struct AttachOptions {
    /// The image.
    pub file: PathBuf,
    /// Show the disk as a file here, without a block device. In a directory the file is called
    /// `disk`; a file is covered by the mount.
    pub fuse_dir: Option<PathBuf>,
    /// The kind of block device; `None` means ublk if available, else loop.
    pub by: Option<DeviceKind>,
    /// Mount the disk's file system at this directory.
    pub mount: Option<PathBuf>,
    /// The partition to mount; `None` means the only one with a file system, or the whole disk.
    pub partition: Option<u32>,
    /// Whether the server drops all writes on detach. Only copied into the record.
    pub ephemeral: bool,
}

/// Kinds of block devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    /// By the kernel's ublk driver.
    Ublk,
    /// A loop device over a FUSE file.
    Loop,
}

/// How long a server may take to close its disk if it is ended by force or if no supervisor waits
/// for it.
pub(super) const END_PATIENCE: Duration = Duration::from_secs(60);

/// Detaches a disk, given its image, device or mount point.
///
/// # Errors
/// [`AttachError`]. After most of them the disk is still attached.
pub fn detach(registry: &Registry, target: &Path, how: DetachOptions) -> Result<Record, AttachError> {
    let (home, record) = registry.find(target)?;
    if record.is_supervised() {
        control::ask(&home, how)?;
        return Ok(record);
    }
    let lock = registry.lock()?;
    // The previous holder of the lock may have cleared the record and attached the disk again.
    let (home, mut record) = registry.find(target)?;
    if record.is_supervised() {
        drop(lock);
        control::ask(&home, how)?;
        return Ok(record);
    }
    if let Some(lost) = record.lost.clone() {
        home.remove(&lock)?;
        return Err(AttachError::Flush { place: target.to_owned(), what: lost });
    }
    let server = record.server;
    let ours: Vec<u32> = std::iter::once(std::process::id()).chain(server.map(|server| server.pid)).collect();
    let was_alive = server.is_some_and(Process::is_alive);
    let how = DetachOptions { force: how.force || !was_alive, ..how };
    release::release(&home, &mut record, how, &ours)?;
    if let Some(server) = server
        && !wait_until(END_PATIENCE, || !server.is_alive())
        && !(how.force && release::end_server(&record))
    {
        return Err(AttachError::Server(format!(
            "the server process {} has not closed the disk yet; see its log {}",
            server.pid,
            home.log().display()
        )));
    }
    home.remove(&lock)?;
    Ok(record)
}

/// Clears up disks whose processes have died. Returns a sentence about each.
///
/// # Errors
/// The records cannot be read.
pub fn clear_stale(registry: &Registry) -> Result<Vec<String>, AttachError> {
    clear_all_stale(registry, &registry.lock()?)
}

fn clear_all_stale(registry: &Registry, lock: &RegistryLock) -> Result<Vec<String>, AttachError> {
    let mut said = Vec::new();
    for (home, record) in registry.all()? {
        let (file, lost) = (record.file.display().to_string(), record.lost.clone());
        if clear_if_stale(&home, record, lock).is_ok_and(|was_there| was_there) {
            let why =
                lost.unwrap_or_else(|| "the processes that served it have died; its leftovers were cleared up".into());
            said.push(format!("{file}: {why}"));
        }
    }
    Ok(said)
}

/// Clears up a record if its processes have died. `Err` returns a record that is alive or could not
/// be cleared.
fn clear_if_stale(home: &RecordDir, mut record: Record, lock: &RegistryLock) -> Result<bool, Box<Record>> {
    if record.is_supervised() || record.server.is_some_and(Process::is_alive) {
        return Err(Box::new(record));
    }
    let force = DetachOptions { unmount: true, force: true };
    let released = release::release(home, &mut record, force, &[]);
    if released.is_err() || home.remove(lock).is_err() {
        return Err(Box::new(record));
    }
    Ok(true)
}

#[cfg(test)]
mod tests;

#[cfg(test)]
mod growing;
