//! Detaching: takes an attached disk apart in an order in which no data is lost.
//!
//! ```text
//!   unmount (if asked) ─▶ still in use? refuse, and name the users ─▶ flush
//!   \______ if this fails, nothing has changed ____________________________/
//!     ─▶ free the devices ─▶ unmount FUSE ─▶ the server flushes, closes the disk and ends
//!        \_ if this fails, the record says how far it got; detach again _/
//! ```
//!
//! After a server has died, the same steps are done by force: file systems in use are detached
//! lazily, and what programs still ask of them fails, but nothing hangs.
//!
//! Force also kills a server that does not answer or does not end (`supervisor`); everything else
//! would wait for it. A server does not end while a program inside a lazily unmounted file system,
//! or another mount namespace, holds the FUSE file. Servers are killed only by force.

use crate::{
    attach::{
        error::AttachError,
        freezing, loop_device,
        process::Process,
        record::{AttachMethod, Record, RecordDir},
        usage::{self, DeviceUse, Devices, Mount},
    },
    fuse::{self, FuseError},
    ublk::{self, FoundDevice, UblkError},
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
    time::{Duration, Instant},
};

/// How long the kernel may take to close a file after its loop device was freed.
const CLOSE_PATIENCE: Duration = Duration::from_secs(2);

/// How long a program may have a device open that only looks at it.
const LOOK_PATIENCE: Duration = Duration::from_secs(2);

/// How long a program may take to look at every block device: `mkfs.btrfs` and `btrfs device scan`
/// have them open for seconds on a loaded machine.
const SCAN_PATIENCE: Duration = Duration::from_secs(10);

/// How long a device may take to flush when it is detached by force.
const FORCE_PATIENCE: Duration = Duration::from_secs(10);

/// Options of detach.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DetachOptions {
    /// Unmount the disk's file systems, if they are not in use.
    pub unmount: bool,
    /// Detach even if the disk is in use or cannot be flushed.
    pub force: bool,
}

/// Takes everything apart except the server, which ends by itself when its mount or device is gone.
/// Processes in `ours` do not count as users of the disk.
///
/// # Errors
/// [`AttachError::InUse`] and [`AttachError::Flush`] unless forced; errors of the system.
pub fn release(home: &RecordDir, record: &mut Record, how: DetachOptions, ours: &[u32]) -> Result<(), AttachError> {
    // A frozen file system cannot be unmounted.
    for sentence in freezing::thaw(&std::mem::take(&mut record.frozen)) {
        tracing::warn!("{sentence}");
    }
    let mut ublk = Ublk::of(record)?;
    let is_loop = record.by == AttachMethod::Loop;
    let loops: Vec<PathBuf> = record
        .more_devices
        .iter()
        .chain(record.device.iter().filter(|_| is_loop))
        // Skips a loop device that now has another backing file: the kernel has reused its number.
        .filter(|device| loop_device::is_backed_by(device, record.backing()))
        .cloned()
        .collect();
    let device = ublk.as_ref().map(|ublk| ublk.found.device.clone());
    let devices: Vec<PathBuf> = loops.iter().chain(&device).cloned().collect();
    if !devices.is_empty() {
        if let Some(ublk) = &mut ublk
            && how.force
        {
            ublk.end_unserved(record)?;
        }
        empty_devices(&devices, record, how, ours)?;
        let claim = match &device {
            Some(device) if !how.force => claim(device)?,
            _ => None,
        };
        loops.iter().try_for_each(|device| free(device, how))?;
        if let Some(ublk) = &mut ublk {
            ublk.found.stop(&mut ublk.control)?;
        }
        drop(claim);
    }
    // The server deletes the device if it is alive.
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
        // For a second detach. If the record cannot be written, this detach continues anyway.
        let _ = home.write(record);
    }
    Ok(())
}

/// The ublk device of a record, if it exists.
struct Ublk {
    control: UblkControl,
    found: FoundDevice,
}

impl Ublk {
    fn of(record: &Record) -> Result<Option<Self>, AttachError> {
        let Some(mark) = record.ublk_mark else { return Ok(None) };
        let mut control = match ublk::control() {
            Ok(control) => control,
            // The driver was unloaded, so the device is gone too.
            Err(UblkError::NoDriver { source, .. }) if source.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        Ok(FoundDevice::by_mark(&mut control, mark)?.map(|found| Self { control, found }))
    }

    /// Stops a device whose server is gone or does not answer any more, and kills that server.
    /// Requests to such a device wait for another server, so an unmount would wait too. Stopped,
    /// they fail.
    fn end_unserved(&mut self, record: &Record) -> Result<(), AttachError> {
        let is_served = record.server.is_some_and(Process::is_alive) && answers(&self.found.device);
        if !is_served && end_server(record) {
            self.found.stop(&mut self.control)?;
        }
        Ok(())
    }
}

/// The uses of the devices, without programs that only look for a moment: udev, and every mount
/// that searches for a label, open all block devices.
fn lasting_uses(devices: &Devices, ours: &[u32]) -> io::Result<Vec<DeviceUse>> {
    let begun = Instant::now();
    loop {
        let uses = usage::uses(devices, ours)?;
        let may_end = !uses.is_empty() && uses.iter().all(|found| matches!(found, DeviceUse::Open { .. }));
        if !may_end || begun.elapsed() >= LOOK_PATIENCE {
            return Ok(uses);
        }
        thread::sleep(Duration::from_millis(50));
    }
}

/// Makes sure that the devices are unused and that all written data is on the disk.
fn empty_devices(devices: &[PathBuf], record: &Record, how: DetachOptions, ours: &[u32]) -> Result<(), AttachError> {
    let place = record.place().to_owned();
    let numbers = Devices::of(devices);
    if how.force {
        // Flushes what can be flushed.
        if !devices.iter().all(|device| answers(device)) {
            end_server(record);
        }
        return unmount_all(devices, &numbers, true);
    }
    if how.unmount {
        unmount_all(devices, &numbers, false)?;
    }
    let failed = |source| AttachError::State { doing: "read", path: "/proc".into(), source, hint: "" };
    let uses = lasting_uses(&numbers, ours).map_err(failed)?;
    let hint = match uses.first() {
        Some(DeviceUse::Mounted(_)) if !how.unmount => " (or let `DetachOptions::unmount` do it)",
        _ => "",
    };
    if !uses.is_empty() {
        return Err(AttachError::InUse { place, uses, hint });
    }
    for device in devices.iter().filter(|device| device.exists()) {
        File::open(device).and_then(|device| device.sync_all()).map_err(|error| AttachError::Flush {
            place: place.clone(),
            what: format!(
                "what was written last cannot be flushed: {error}; the disk stays attached: remove the cause and try again, or lose the data with `DetachOptions::force`"
            ),
        })?;
    }
    Ok(())
}

/// Runs `work` on a thread. Returns whether it ended, with or without an error, within the time
/// that force allows. If it did not, the thread stays blocked in the kernel until the server is
/// gone.
fn ends_in_time(path: &Path, work: impl FnOnce(&Path) + Send + 'static) -> bool {
    let (sender, ended) = mpsc::channel();
    let path = path.to_owned();
    thread::spawn(move || {
        work(&path);
        let _ = sender.send(());
    });
    ended.recv_timeout(FORCE_PATIENCE).is_ok()
}

/// Whether a flush of the device ends in time.
fn answers(device: &Path) -> bool {
    ends_in_time(device, |device| drop(File::open(device).map(|device| device.sync_all())))
}

/// Kills a server that hangs. Returns whether it has ended. All its outstanding requests fail.
pub(super) fn end_server(record: &Record) -> bool {
    let Some(server) = record.server.filter(|server| server.is_alive()) else { return true };
    let Some(pid) = server.pid.try_into().ok().and_then(Pid::from_raw) else { return false };
    let _ = rustix::process::kill_process(pid, Signal::KILL);
    loop_device::wait_until(CLOSE_PATIENCE, || !server.is_alive())
}

/// Opens a device exclusively, so that no program can mount it from now on. A ublk device, unlike a
/// loop device, disappears even while a program uses it.
fn claim(device: &Path) -> Result<Option<OwnedFd>, AttachError> {
    match rustix::fs::open(device, OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC, Mode::empty()) {
        Ok(claim) => Ok(Some(claim)),
        Err(Errno::BUSY) => {
            let what = format!(
                "{}: device or resource busy: another program has just mounted or opened it exclusively; try again",
                device.display()
            );
            Err(AttachError::Supervisor(what))
        }
        // The device was never started, or its server is gone.
        Err(_) => Ok(None),
    }
}

fn free(device: &Path, how: DetachOptions) -> Result<(), AttachError> {
    // A forced detach does not wait for the programs that it takes the disk away from.
    let patience = if how.force { CLOSE_PATIENCE } else { SCAN_PATIENCE };
    let gone = loop_device::free(device, patience).map_err(|source| AttachError::Loop {
        doing: "free",
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

/// Unmounts all file systems of these devices, the newest mount first. A busy one stays mounted,
/// unless forced. A device that no longer exists has no device number, so its mounts are found by
/// its name.
fn unmount_all(devices: &[PathBuf], numbers: &Devices, force: bool) -> Result<(), AttachError> {
    let failed = |source| AttachError::State { doing: "read", path: "/proc".into(), source, hint: "" };
    let is_ours =
        |mount: &Mount| numbers.carry(mount) || devices.iter().any(|device| !device.exists() && mount.is_from(device));
    for mount in usage::mounts().map_err(failed)?.into_iter().rev().filter(is_ours) {
        let plain = rustix::mount::unmount(&mount.dir, UnmountFlags::NOFOLLOW);
        if plain == Err(Errno::BUSY) && force {
            // Flushes the file system first, if that ends in time.
            ends_in_time(&mount.dir, |dir| drop(File::open(dir).map(rustix::fs::syncfs)));
            let _ = rustix::mount::unmount(&mount.dir, UnmountFlags::NOFOLLOW | UnmountFlags::DETACH);
        }
    }
    Ok(())
}

fn release_fuse(record: &Record, how: DetachOptions, ours: &[u32]) -> Result<(), AttachError> {
    if record.fuse_mount.as_os_str().is_empty() {
        return Ok(());
    }
    let mut result = Ok(());
    // The kernel closes the backing file shortly after the loop device was freed.
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

/// Whether the FUSE file was under a loop device. Its mount point is then private, and no other
/// program has it open.
fn loop_was_there(record: &Record) -> bool {
    record.fuse_file == record.fuse_mount
}

/// Whether the FUSE mount of a record still exists.
pub(crate) fn is_mounted(record: &Record) -> io::Result<bool> {
    let at = |dir: &Path| dir == record.fuse_mount;
    Ok(usage::mounts()?.iter().any(|mount| at(&mount.dir) && mount.file_system.starts_with("fuse")))
}
