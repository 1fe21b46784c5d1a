//! Attaching: a disk becomes a block device of this machine, its partitions included, or, for those
//! who are not root, a file.
//!
//! ```text
//!   image file ─▶ Disk ─▶ ublk device ─────────────┬─▶ partitions ─▶ mounted file system
//!                      └▶ FUSE file ─▶ loop device ─┘
//!                 \_ server process _/ \__________ supervisor process _______________/
//!
//!   record.rs       what is attached, on disk for every command to see     run_dir.rs   in which folder
//!   supervisor.rs   the process that puts it together, answers `detach`, and outlives the server
//!   server.rs       the process that moves the bytes
//!   release.rs      taking it apart, in order
//!   control.rs      a question to the supervisor
//!   loop_device.rs  loop devices and partition nodes        partitions.rs   partition tables, pure
//!   mounting.rs     which file system, and where            contents.rs     what a partition holds, pure
//!   usage.rs        who uses a device                       process.rs      who is alive
//! ```
//!
//! A ublk device is taken where the kernel has the driver, for a request then passes one queue
//! instead of two and a file system; else a loop device over a FUSE file.
//!
//! Every layer has an owner whose end takes down what lies above: without its server the FUSE file,
//! or the ublk device, answers with errors, so nothing hangs; the supervisor then unmounts and
//! frees the device; without a supervisor, the next command does.
//!
//! A disk inside an attached disk is an image file on a mounted file system, and attaches as any
//! other. Discards pass through all layers: file system, ublk (or loop device and FUSE, as
//! `FALLOC_FL_PUNCH_HOLE`), and the disk gives the space back.

pub mod contents;
mod control;
pub mod error;
mod loop_device;
mod mounting;
pub mod partitions;
mod process;
pub mod record;
mod release;
mod run_dir;
mod server;
mod supervisor;
mod usage;

pub use error::AttachError;
pub use process::Process;
pub use record::{Held, Home, MountRecord, PartitionRecord, Record, Registry, ShownBy};
pub use release::Detach;
pub use server::{At, ServerSays, serve_disk};
pub use supervisor::{Attached, attach};

pub(crate) use loop_device::wait_until;

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

/// What to attach, and how.
#[derive(Debug, Clone, Default)]
pub struct AttachOptions {
    /// The image.
    pub file: PathBuf,
    /// Mount it there as a file, and make no block device. A directory gets the file `disk`; a file
    /// is covered.
    pub fuse_dir: Option<PathBuf>,
    /// By which kind of block device; none is the best that this machine has.
    pub by: Option<DeviceKind>,
    /// Mount what is inside there.
    pub mount: Option<PathBuf>,
    /// Which partition to mount.
    pub partition: Option<u32>,
    /// Whether the server drops all writes at the end; for the record only.
    pub ephemeral: bool,
}

/// The kinds of block device that a disk can be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    /// By the kernel's ublk driver.
    Ublk,
    /// A loop device over a FUSE file.
    Loop,
}

/// How long a server may take to close its disk, where nobody listens to how far it is, or where it
/// is ended by force.
pub(super) const END_PATIENCE: Duration = Duration::from_secs(60);

/// Detaches what `target` names: an image, a device, a mount.
///
/// # Errors
/// [`AttachError`]; for most of them it is still attached.
pub fn detach(registry: &Registry, target: &Path, how: Detach) -> Result<Record, AttachError> {
    let (home, record) = registry.find(target)?;
    if record.is_supervised() {
        control::ask(&home, how)?;
        return Ok(record);
    }
    let lock = registry.lock()?;
    // Whoever had the lock may have cleared it away meanwhile, and attached the disk anew.
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
    let how = Detach { force: how.force || !was_alive, ..how };
    release::release(&home, &mut record, how, &ours)?;
    if let Some(server) = server
        && !wait_until(END_PATIENCE, || !server.is_alive())
        && !(how.force && release::end_server(&record))
    {
        return Err(AttachError::Server(format!(
            "process {} has not closed the disk yet; see {}",
            server.pid,
            home.log().display()
        )));
    }
    home.remove(&lock)?;
    Ok(record)
}

/// Everything that is mounted from an attached disk, whoever did it.
pub fn mounted_from(record: &Record) -> Vec<PathBuf> {
    let devices = usage::Devices::of(record.device.iter().chain(&record.more_devices));
    let mounts = usage::mounts().unwrap_or_default();
    mounts.into_iter().filter(|mount| devices.carry(mount)).map(|mount| mount.dir).collect()
}

/// Clears away what is recorded but no longer there, and says of each a sentence.
///
/// # Errors
/// The records cannot be read.
pub fn clear_stale(registry: &Registry) -> Result<Vec<String>, AttachError> {
    clear_all_stale(registry, &registry.lock()?)
}

fn clear_all_stale(registry: &Registry, lock: &Held) -> Result<Vec<String>, AttachError> {
    let mut said = Vec::new();
    for (home, record) in registry.all()? {
        let (file, lost) = (record.file.display().to_string(), record.lost.clone());
        if clear_if_stale(&home, record, lock).is_ok_and(|was_there| was_there) {
            let why = lost
                .unwrap_or_else(|| "the processes that served it are gone; what was left of it is cleared away".into());
            said.push(format!("{file}: {why}"));
        }
    }
    Ok(said)
}

/// Clears away a record without processes. `Err` gives back one that is alive.
fn clear_if_stale(home: &Home, mut record: Record, lock: &Held) -> Result<bool, Box<Record>> {
    if record.is_supervised() || record.server.is_some_and(Process::is_alive) {
        return Err(Box::new(record));
    }
    let force = Detach { unmount: true, force: true };
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
