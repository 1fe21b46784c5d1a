//! Attached disks: a loop device over a FUSE file, ours against that of qemu-storage-daemon.
//!
//! Ours is a populated dynamic VHDX, theirs a raw file of the same size. Both loop devices use
//! direct I/O. Ours is also written by fio at several queue depths, read back and compared. QEMU's
//! export is only read: that of 7.2 corrupts concurrent writes.

use super::{BARE_LOAD, tell_ceiling};
use crate::{fio, ours, turns::in_turns};
use diskwright_lab::{
    LabError, Result,
    acceptance::{Bar, Check, Context, RowOutcome},
    peer,
    progress::{Progress, report},
    rounds::Window,
    server::Server,
    targets::{self, Container},
};
use diskwright_stats::numbers::{bytes, duration};
use diskwright_store::CacheMode;
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

const BAR: Bar = Bar::AtLeast(1.5);
/// Bytes that fio writes and compares at each depth.
const PROVED_BYTES: u64 = 64 << 20;
const DEPTHS: [u32; 7] = [1, 2, 4, 8, 16, 32, 64];

/// Programs that the row needs besides our own.
struct Programs {
    fio: PathBuf,
    daemon: PathBuf,
    losetup: PathBuf,
}

fn programs() -> std::result::Result<Programs, String> {
    let find = |name, package| peer::find(name).ok_or_else(|| peer::missing(name, package));
    if !nix::unistd::geteuid().is_root() {
        return Err("block devices need root".into());
    }
    for device in ["/dev/fuse", "/dev/loop-control"] {
        fs::File::open(device).map_err(|error| format!("no {device} here: {error}"))?;
    }
    Ok(Programs {
        fio: find("fio", "fio")?,
        daemon: find("qemu-storage-daemon", "qemu-system-common")?,
        losetup: find("losetup", "mount")?,
    })
}

/// A disk as a block device, until it is stopped.
#[derive(Debug)]
pub(crate) struct Device {
    /// Dropped before the server that it uses.
    looped: Option<Looped>,
    server: Server,
    path: PathBuf,
}

impl Device {
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn stop(self) -> Result<()> {
        drop(self.looped);
        self.server.stop()
    }
}

/// A loop device. Dropped, it is detached.
#[derive(Debug)]
struct Looped {
    losetup: PathBuf,
    device: PathBuf,
}

impl Drop for Looped {
    fn drop(&mut self) {
        if let Err(error) = peer::run(&self.losetup, &["--detach".as_ref(), self.device.as_os_str()], None) {
            eprintln!("{} stays: {error}", self.device.display());
        }
    }
}

/// Attaches by our program: the supervisor in the foreground, with a registry of its own.
pub(crate) fn attach(disk: &Path, dir: &Path) -> Result<Device> {
    let mut command = ours::command()?;
    command
        .arg("attach")
        .arg(disk)
        .args(["--foreground", "--by=loop", "--cache=direct"])
        .env("DISKWRIGHT_RUN_DIR", dir.join("run"));
    let mut server = Server::start(command, dir, "attach")?;
    let log = server.log().to_owned();
    let mut path = None;
    server.wait_until("no device comes", || {
        let said = fs::read_to_string(&log).unwrap_or_default();
        path = said.split_inclusive('\n').find_map(device_in);
        path.is_some()
    })?;
    Ok(Device { looped: None, server, path: path.unwrap_or_default() })
}

/// The loop device, where a line is its path and nothing else.
fn device_in(line: &str) -> Option<PathBuf> {
    line.strip_suffix('\n').filter(|line| line.starts_with("/dev/loop")).map(PathBuf::from)
}

/// Exports by qemu-storage-daemon, and sets up a loop device over the file.
fn export(programs: &Programs, raw: &Path, dir: &Path, size_bytes: u64) -> Result<Device> {
    let point = dir.join("exported");
    fs::write(&point, "").map_err(LabError::file("create", &point))?;
    let mut command = Command::new(&programs.daemon);
    command.arg("--blockdev");
    command.arg(format!("driver=file,node-name=disk,filename={},cache.direct=on,aio=io_uring", quoted(raw)));
    command.arg("--export");
    command.arg(format!("type=fuse,id=export,node-name=disk,mountpoint={}", quoted(&point)));
    let mut server = Server::start(command, dir, "qemu-storage-daemon")?;
    server.wait_until("nothing is exported", || fs::metadata(&point).is_ok_and(|file| file.len() == size_bytes))?;
    let mut command = Command::new(&programs.losetup);
    command.args(["--find", "--show", "--direct-io=on", "--read-only"]).arg(&point);
    let output = command.output().map_err(LabError::file("start", &programs.losetup))?;
    let said = String::from_utf8_lossy(&output.stdout);
    let Some(path) = said.split_inclusive('\n').find_map(device_in) else {
        return Err(LabError::Program {
            command: format!("{command:?}"),
            status: output.status.to_string(),
            output: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        });
    };
    let looped = Looped { losetup: programs.losetup.clone(), device: path.clone() };
    Ok(Device { looped: Some(looped), server, path })
}

/// A path, escaped as the value of a QEMU option.
fn quoted(path: &Path) -> String {
    path.to_string_lossy().replace(',', ",,")
}

pub(crate) fn fuse_and_loop(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    let programs = match programs() {
        Ok(programs) => programs,
        Err(missing) => return Ok(RowOutcome::skipped("attaching", missing)),
    };
    let size_bytes: u64 = context.pick(512 << 20, 2 << 30);
    context.scratch.need("these disks", 2 * size_bytes + (1 << 30))?;
    let dir = context.scratch.folder("attached")?;
    let dir = dir.canonicalize().map_err(LabError::file("find", &dir))?;
    let how = context.preparation(size_bytes, CacheMode::Direct);
    let mut disks = Vec::new();
    for (index, container) in [Container::VhdxDynamic, Container::Raw].into_iter().enumerate() {
        let before = 2 * index as u64 * size_bytes;
        let mut tick = |done| report(progress, "prepare", before + done, 4 * size_bytes, container.name());
        let path = targets::make_filled(container, &dir, &how, &mut tick)?;
        let mut tick = |done| report(progress, "prepare", before + size_bytes + done, 4 * size_bytes, container.name());
        targets::open_verified(container, path.clone(), &how, &mut tick)?.close()?;
        disks.push(path);
    }
    context.scratch.settle()?;
    let devices = [attach(&disks[0], &dir)?, export(&programs, &disks[1], &dir, size_bytes)?];
    let measured = [&devices[0].path, &devices[1].path, &disks[1]];
    let names = ["attached, diskwright", "attached, qemu-storage-daemon", "the file itself"];
    let cell = context.options.cell.unwrap_or_else(|| Duration::from_millis(context.pick(1000, 3000)));
    let rounds = context.rounds(context.pick(3, 7));
    let mut iops = [const { Vec::new() }; 3];
    in_turns("measure", &names, (rounds, 7), progress, &mut |Window { cell: who, .. }, _| {
        iops[who].push(fio::run(&programs.fio, measured[who], &BARE_LOAD, cell)?.iops);
        Ok(())
    })?;
    let mut found = RowOutcome::default();
    for (index, depth) in DEPTHS.into_iter().enumerate() {
        report(progress, "verify", index as u64, DEPTHS.len() as u64, &format!("attached, written at depth {depth}"))?;
        if let Err(error) = fio::verify_device(&programs.fio, &devices[0].path, PROVED_BYTES, depth, &dir) {
            found.checks.push(Check::broken(&format!("fio's verify at depth {depth}"), error.to_string()));
        }
    }
    let name = "VHDX dynamic attached by FUSE and loop, 4K random read QD 32: IOPS";
    let mut check = Check::ratio(name, "IOPS", &iops[0], &iops[1], BAR);
    tell_ceiling(&mut check, &iops[2], &iops[1]);
    let is_clean = found.checks.is_empty();
    found.checks.push(check);
    devices.into_iter().try_for_each(Device::stop)?;
    found.notes.push(format!(
        "disks of {}, filled, read back and compared; theirs is a raw file, cache.direct=on, aio=io_uring; both loop devices with direct I/O; {rounds} rounds in turns, cells of {}",
        bytes(size_bytes),
        duration(cell.as_nanos() as f64)
    ));
    found.notes.push(format!(
        "ours was then written by fio at depths 1 to 64, {} each, read back and compared: {}",
        bytes(PROVED_BYTES),
        if is_clean { "clean" } else { "not clean" }
    ));
    Ok(found)
}
