//! Taking an attached disk apart, in the order in which it can be refused, and in which nothing is
//! lost.
//!
//! ```text
//!   unmount (if asked to) ─▶ anybody left? refuse, say who ─▶ flush ─▶ devices ─▶ FUSE ─▶ the server flushes, closes, ends
//!   \______ refused: everything is as it was ______________________/   \_ refused: noted in the record, try again _/
//! ```
//!
//! The same way is gone when a server has died, by force: file systems are taken out of sight
//! though somebody is in them, and what they still ask for fails, but nothing hangs. By force, and
//! only then, a server that does not answer is killed, for everything else would wait for it; and
//! so is one that does not end (`supervisor`), since somebody within, or in another mount
//! namespace, holds a file system that is out of sight.

use crate::{
    attach::{
        error::AttachError,
        loop_device,
        process::Process,
        record::{Home, Record, ShownBy},
        usage::{self, Devices, Mount, Use},
    },
    fuse::{self, FuseError},
    ublk::{self, Found, UblkError},
};
use diskwright_store::ublk::UblkControl;
use rustix::{
    fs::{Mode, OFlags},
    io::Errno,
    mount::UnmountFlags,
    process::{Pid, Signal},
};
use serde::{Deserialize, Serialize};
use std::{
    fs::File,
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::mpsc,
    thread,
    time::Duration,
};

/// How long the kernel may take to close a file after its loop device has let it go.
const CLOSE_PATIENCE: Duration = Duration::from_secs(2);

/// How long a device may take to flush that is detached by force.
const FORCE_PATIENCE: Duration = Duration::from_secs(10);

/// How to detach.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Detach {
    /// Unmount what is mounted from it, if nobody is in there.
    pub unmount: bool,
    /// Detach although it is in use, and although it cannot be flushed.
    pub force: bool,
}

/// Takes everything apart but the server, which ends by itself when its mount or its device is
/// gone. `ours` are processes that do not count as users.
///
/// # Errors
/// [`AttachError::InUse`] and [`AttachError::Flush`] without force; what the system refuses.
pub fn release(home: &Home, record: &mut Record, how: Detach, ours: &[u32]) -> Result<(), AttachError> {
    let mut ublk = Ublk::of(record)?;
    let is_loop = record.by == ShownBy::Loop;
    let loops: Vec<PathBuf> = record
        .more_devices
        .iter()
        .chain(record.device.iter().filter(|_| is_loop))
        // A number that was given to somebody else meanwhile is none of ours.
        .filter(|device| loop_device::shows(device, record.backing()))
        .cloned()
        .collect();
    let device = ublk.as_ref().map(|ublk| ublk.found.device.clone());
    let devices: Vec<PathBuf> = loops.iter().chain(&device).cloned().collect();
    if !devices.is_empty() {
        empty_devices(&devices, record, how, ours)?;
        let claim = match &device {
            Some(device) if !how.force => claim(device)?,
            _ => None,
        };
        loops.iter().try_for_each(|device| let_go(device, how))?;
        if let Some(ublk) = &mut ublk {
            ublk.found.stop(&mut ublk.control)?;
        }
        drop(claim);
    }
    // Its server deletes it, if that is there.
    if let Some(Ublk { mut control, found }) = ublk
        && !record.server.is_some_and(Process::is_alive)
    {
        found.delete(&mut control)?;
    }
    if record.device.is_some() || !record.more_devices.is_empty() {
        record.device = None;
        record.more_devices.clear();
        record.partitions.clear();
        record.mounts.clear();
        home.write(record)?;
    }
    if !record.out_of_sight {
        release_fuse(record, how, ours)?;
        record.out_of_sight = true;
        // For whoever comes a second time. Should it not be written, this time goes on all the
        // same.
        let _ = home.write(record);
    }
    Ok(())
}

/// The ublk device of a record, as long as it is there.
struct Ublk {
    control: UblkControl,
    found: Found,
}

impl Ublk {
    fn of(record: &Record) -> Result<Option<Self>, AttachError> {
        let Some(mark) = record.ublk_mark else { return Ok(None) };
        let mut control = match ublk::control() {
            Ok(control) => control,
            // The driver has been unloaded, and its devices with it.
            Err(UblkError::NoDriver { source, .. }) if source.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        Ok(Found::by_mark(&mut control, mark)?.map(|found| Self { control, found }))
    }
}

/// Sees that nobody uses the devices, and that what was written last has reached the disk.
fn empty_devices(devices: &[PathBuf], record: &Record, how: Detach, ours: &[u32]) -> Result<(), AttachError> {
    let place = record.place().to_owned();
    let numbers = Devices::of(devices);
    if how.force {
        // What can be saved is saved.
        if !devices.iter().all(|device| answers(device)) {
            end_server(record);
        }
        return unmount_all(devices, &numbers, true);
    }
    if how.unmount {
        unmount_all(devices, &numbers, false)?;
    }
    let failed = |source| AttachError::State { doing: "read", path: "/proc".into(), source, hint: "" };
    let uses = usage::uses(&numbers, ours).map_err(failed)?;
    let hint = match uses.first() {
        Some(Use::Mounted(_)) if !how.unmount => " (or let --unmount do it)",
        _ => "",
    };
    if !uses.is_empty() {
        return Err(AttachError::InUse { place, uses, hint });
    }
    for device in devices.iter().filter(|device| device.exists()) {
        File::open(device).and_then(|device| device.sync_all()).map_err(|error| AttachError::Flush {
            place: place.clone(),
            what: format!(
                "what was written last cannot be flushed: {error}; it stays attached: see to the cause and try again, or give the data up with --force"
            ),
        })?;
    }
    Ok(())
}

/// Whether some work on a path comes to its end in the time that force grants, well or badly. Where
/// it does not, its thread waits in the kernel until the server is gone.
fn ends_in_time(path: &Path, work: impl FnOnce(&Path) + Send + 'static) -> bool {
    let (sender, ended) = mpsc::channel();
    let path = path.to_owned();
    thread::spawn(move || {
        work(&path);
        let _ = sender.send(());
    });
    ended.recv_timeout(FORCE_PATIENCE).is_ok()
}

/// Whether a device comes to the end of a flush.
fn answers(device: &Path) -> bool {
    ends_in_time(device, |device| drop(File::open(device).map(|device| device.sync_all())))
}

/// Kills a server that hangs, and says whether it is gone. What it has been asked for fails then.
pub(super) fn end_server(record: &Record) -> bool {
    let Some(server) = record.server.filter(|server| server.is_alive()) else { return true };
    let Some(pid) = server.pid.try_into().ok().and_then(Pid::from_raw) else { return false };
    let _ = rustix::process::kill_process(pid, Signal::KILL);
    loop_device::wait_until(CLOSE_PATIENCE, || !server.is_alive())
}

/// Keeps others from mounting a device that is about to go: unlike a loop device, a ublk device
/// goes under those who use it.
fn claim(device: &Path) -> Result<Option<OwnedFd>, AttachError> {
    match rustix::fs::open(device, OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC, Mode::empty()) {
        Ok(claim) => Ok(Some(claim)),
        Err(Errno::BUSY) => {
            let what =
                format!("{}: another program has just mounted or claimed the device; try again", device.display());
            Err(AttachError::Supervisor(what))
        }
        // It was never started, or its server is gone.
        Err(_) => Ok(None),
    }
}

fn let_go(device: &Path, how: Detach) -> Result<(), AttachError> {
    let gone = loop_device::let_go(device).map_err(|source| AttachError::Loop {
        doing: "let go of",
        path: device.to_owned(),
        source,
        hint: "",
    })?;
    if !gone && !how.force {
        let what = format!(
            "{}: another process has the device open; it will be detached when that process closes it",
            device.display()
        );
        return Err(AttachError::Supervisor(what));
    }
    Ok(())
}

/// Unmounts everything that is mounted from these devices, the youngest first. What is busy stays,
/// unless by force. A device that is gone has no number any more, but its name is in the table of
/// mounts.
fn unmount_all(devices: &[PathBuf], numbers: &Devices, force: bool) -> Result<(), AttachError> {
    let failed = |source| AttachError::State { doing: "read", path: "/proc".into(), source, hint: "" };
    let is_ours =
        |mount: &Mount| numbers.carry(mount) || devices.iter().any(|device| !device.exists() && mount.is_from(device));
    for mount in usage::mounts().map_err(failed)?.into_iter().rev().filter(is_ours) {
        let plain = rustix::mount::unmount(&mount.dir, UnmountFlags::NOFOLLOW);
        if plain == Err(Errno::BUSY) && force {
            // What was written is durable after that, if it can be.
            ends_in_time(&mount.dir, |dir| drop(File::open(dir).map(rustix::fs::syncfs)));
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

/// Whether the FUSE file lay under a loop device: then it is in a place of ours and nobody else has
/// it open.
fn loop_was_there(record: &Record) -> bool {
    record.fuse_file == record.fuse_mount
}

/// Whether the FUSE mount of a record is still there.
pub(crate) fn is_mounted(record: &Record) -> io::Result<bool> {
    let at = |dir: &Path| dir == record.fuse_mount;
    Ok(usage::mounts()?.iter().any(|mount| at(&mount.dir) && mount.file_system.starts_with("fuse")))
}
