//! Taking an attached disk apart, in the order in which it can be refused, and in which nothing is lost.
//!
//! ```text
//!   unmount (if asked to) ─▶ anybody left? refuse, say who ─▶ flush ─▶ loop devices ─▶ FUSE ─▶ the server flushes, closes, ends
//!   \______ refused: everything is as it was ______________________/   \_ refused: noted in the record, try again _/
//! ```
//!
//! The same way is gone when a server has died, by force: file systems are taken out of sight though somebody is in them, and what they
//! still ask for fails, but nothing hangs.

use crate::{
    attach::{
        error::AttachError,
        loop_device,
        record::{Home, Record},
        usage::{self, Use},
    },
    fuse::{self, FuseError},
};
use rustix::{io::Errno, mount::UnmountFlags};
use serde::{Deserialize, Serialize};
use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
    time::Duration,
};

/// How long the kernel may take to close a file after its loop device has let it go.
const CLOSE_PATIENCE: Duration = Duration::from_secs(2);

/// How to detach.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Detach {
    /// Unmount what is mounted from it, if nobody is in there.
    pub unmount: bool,
    /// Detach although it is in use, and although it cannot be flushed.
    pub force: bool,
}

/// Takes everything apart but the server, which ends by itself when its mount is gone. `ours` are processes that do not count as users.
///
/// # Errors
/// [`AttachError::InUse`] and [`AttachError::Flush`] without force; what the system refuses.
pub fn release(home: &Home, record: &mut Record, how: Detach, ours: &[u32]) -> Result<(), AttachError> {
    let devices: Vec<PathBuf> = record
        .more_devices
        .iter()
        .chain(&record.device)
        // A number that was given to somebody else meanwhile is none of ours.
        .filter(|device| loop_device::shows(device, &record.fuse_file))
        .cloned()
        .collect();
    if !devices.is_empty() {
        release_devices(&devices, record, how, ours)?;
    }
    if record.device.is_some() || !record.more_devices.is_empty() {
        record.device = None;
        record.more_devices.clear();
        record.partitions.clear();
        record.mounts.clear();
        home.write(record)?;
    }
    release_fuse(record, how, ours)
}

fn release_devices(devices: &[PathBuf], record: &Record, how: Detach, ours: &[u32]) -> Result<(), AttachError> {
    let place = record.place().to_owned();
    let mut numbers = Vec::new();
    for device in devices {
        numbers.extend(usage::with_partitions(device).unwrap_or_default());
    }
    if how.unmount || how.force {
        unmount_all(&numbers, how.force)?;
    }
    if !how.force {
        let failed = |source| AttachError::State { doing: "read", path: "/proc".into(), source, hint: "" };
        let uses = usage::uses(&numbers, ours).map_err(failed)?;
        let hint = match uses.first() {
            Some(Use::Mounted(_)) if !how.unmount => " (or let --unmount do it)",
            _ => "",
        };
        if !uses.is_empty() {
            return Err(AttachError::InUse { place, uses, hint });
        }
    }
    for device in devices {
        match File::open(device).and_then(|device| device.sync_all()) {
            Err(error) if !how.force => {
                return Err(AttachError::Flush {
                    place,
                    what: format!(
                        "what was written last cannot be flushed: {error}; it stays attached: see to the cause and try again, or give the data up with --force"
                    ),
                });
            }
            _ => {}
        }
    }
    for device in devices {
        let gone = loop_device::let_go(device).map_err(|source| AttachError::Loop {
            doing: "let go of",
            path: device.clone(),
            source,
            hint: "",
        })?;
        if !gone && !how.force {
            let what =
                format!("{} was opened by somebody in this moment; it goes when they close it", device.display());
            return Err(AttachError::Supervisor(what));
        }
    }
    Ok(())
}

/// Unmounts everything that is mounted from these devices, the youngest first. What is busy stays, unless by force.
fn unmount_all(devices: &[u64], force: bool) -> Result<(), AttachError> {
    let failed = |source| AttachError::State { doing: "read", path: "/proc".into(), source, hint: "" };
    for mount in usage::mounts().map_err(failed)?.into_iter().rev().filter(|mount| devices.contains(&mount.device)) {
        let plain = rustix::mount::unmount(&mount.dir, UnmountFlags::NOFOLLOW);
        if plain == Err(Errno::BUSY) && force {
            let _ = rustix::mount::unmount(&mount.dir, UnmountFlags::NOFOLLOW | UnmountFlags::DETACH);
        }
    }
    Ok(())
}

fn release_fuse(record: &Record, how: Detach, ours: &[u32]) -> Result<(), AttachError> {
    if record.fuse_mount.as_os_str().is_empty() {
        return Ok(());
    }
    let mut result = Ok(());
    // The kernel closes the file of a loop device a moment after it has let it go.
    loop_device::wait_until(CLOSE_PATIENCE, || {
        result = fuse::unmount(&record.fuse_mount, false);
        result.is_ok() || !loop_was_there(record)
    });
    match result {
        Ok(()) => Ok(()),
        Err(_) if how.force => Ok(fuse::unmount(&record.fuse_mount, true)?),
        Err(error @ FuseError::Unmount { .. }) => {
            let uses = usage::openers(ours, |path, _| path.starts_with(&record.fuse_mount));
            if uses.is_empty() {
                return Err(error.into());
            }
            Err(AttachError::InUse { place: record.fuse_file.clone(), uses, hint: "" })
        }
        Err(error) => Err(error.into()),
    }
}

/// Whether the FUSE file lay under a loop device: then it is in a place of ours and nobody else has it open.
fn loop_was_there(record: &Record) -> bool {
    record.fuse_file == record.fuse_mount
}

/// Whether the FUSE mount of a record is still there.
pub(crate) fn is_mounted(record: &Record) -> io::Result<bool> {
    let at = |dir: &Path| dir == record.fuse_mount;
    Ok(usage::mounts()?.iter().any(|mount| at(&mount.dir) && mount.file_system.starts_with("fuse")))
}
