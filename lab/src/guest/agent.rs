//! The program in the guest: process 1, which loads modules, opens the port, and measures jobs
//! until it is told to end.

use super::{
    initramfs::MODULES_DIR,
    protocol::{FromGuest, GuestDisk, Ran, ToGuest},
    reach::{self, Attached},
};
use crate::{LabError, Result, measure, targets::open_target};
use diskwright_load::{
    figures::Figures,
    job::Job,
    machine::Machine,
    record::SeriesPoint,
    run::{RunOptions, Snapshot, SnapshotRecord},
};
use diskwright_store::{BlockDevice, CacheMode};
use rustix::{
    mount::{MountFlags, mount},
    system::{RebootCommand, finit_module, reboot},
};
use std::{
    ffi::CStr,
    fs::{self, File, OpenOptions},
    io::{self, BufRead, BufReader, Write},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

/// The argument of the child process that calls [`guest_main`].
pub(crate) const WORD: &str = "guest";

/// Measures until the host ends the guest, and then powers the guest off. To be called by process 1
/// of a guest that [`super::Guest`] has started.
///
/// # Errors
/// [`LabError::BadOptions`] in any other process. It does not return otherwise.
pub(crate) fn guest_main() -> Result<()> {
    if std::process::id() != 1 {
        return Err(LabError::BadOptions {
            what: "this command measures in a virtual machine, as its first process".into(),
            hint: "`lab study native-and-guest` starts such a machine".into(),
        });
    }
    if let Err(error) = serve() {
        // The console, which the host logs.
        eprintln!("the guest ends: {error}");
    }
    reboot(RebootCommand::Restart).map_err(io::Error::from).map_err(LabError::file("end", "the guest"))
}

fn serve() -> Result<()> {
    prepare().map_err(LabError::file("prepare", "the guest"))?;
    let path = reach::port()?;
    let failed = || LabError::file("open the port", &path);
    let port = OpenOptions::new().read(true).write(true).open(&path).map_err(failed())?;
    let lines = BufReader::new(port.try_clone().map_err(failed())?);
    let port = Mutex::new(port);
    let send = |message: &FromGuest| {
        let mut line = serde_json::to_vec(message).map_err(io::Error::from)?;
        line.push(b'\n');
        port.lock().unwrap_or_else(PoisonError::into_inner).write_all(&line)
    };
    send(&FromGuest::Ready(Machine::detect())).map_err(failed())?;
    let mut attached = Attached::default();
    for line in lines.lines() {
        let line = line.map_err(failed())?;
        let answer = match serde_json::from_str(&line) {
            Ok(ToGuest::End) => return Ok(()),
            Ok(ToGuest::Network { address, emulated }) => {
                let networked = reach::network_up(&address, emulated.as_ref());
                networked.map_or_else(|error| FromGuest::Failed(error.to_string()), |()| FromGuest::Networked)
            }
            Ok(ToGuest::Run { disk, job }) => {
                // The host stops a run by ending the guest.
                let watch = |snapshot: &Snapshot<'_>| send(&FromGuest::Progress(SnapshotRecord::of(snapshot))).is_ok();
                match run(&mut attached, &disk, &job, &watch) {
                    Ok(ran) => FromGuest::Ran(Box::new(ran)),
                    Err(LabError::Void { first, errors }) => FromGuest::Void { first, errors },
                    Err(error) => FromGuest::Failed(error.to_string()),
                }
            }
            Err(error) => FromGuest::Failed(format!("the message cannot be read: {error}")),
        };
        send(&answer).map_err(failed())?;
    }
    Ok(())
}

/// Mounts the kernel's file systems and loads the modules.
fn prepare() -> io::Result<()> {
    for (what, at) in [("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev")] {
        mount(what, at, what, MountFlags::empty(), None::<&CStr>)?;
    }
    let mut modules: Vec<PathBuf> =
        fs::read_dir(Path::new("/").join(MODULES_DIR))?.flatten().map(|entry| entry.path()).collect();
    modules.sort();
    for module in modules {
        match finit_module(File::open(&module)?, c"", 0) {
            // The kernel has it built in.
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(errno) => eprintln!("{}: {errno}", module.display()),
        }
    }
    Ok(())
}

fn run(
    attached: &mut Attached,
    disk: &GuestDisk,
    job: &Job,
    watch: &(impl Fn(&Snapshot<'_>) -> bool + Sync),
) -> Result<Ran> {
    let device = attached.device(disk)?;
    let read_only = device.geometry().read_only;
    let target = open_target("disk", "block device", Arc::new(device), CacheMode::Direct);
    let phase = measure::window(job, &target, &RunOptions::default(), watch)?;
    if !read_only {
        target.close()?;
    }
    let sum = |count: fn(&SeriesPoint) -> u64| phase.series.iter().map(count).sum();
    Ok(Ran {
        figures: Figures::of(&phase),
        requests: sum(|point| point.read_ios + point.write_ios),
        bytes: sum(|point| point.read_bytes + point.write_bytes),
    })
}
