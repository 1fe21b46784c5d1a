//! In the guest: finds a device of the virtual machine, or attaches a disk over the network by the
//! kernel's own client.
//!
//! | disk | client |
//! |---|---|
//! | dm-cache | `dmsetup`, on devices of the virtual machine |
//! | NVMe/TCP | a line written to `/dev/nvme-fabrics` |
//! | iSCSI | `iscsistart`, which leaves the session to the kernel |
//! | SMB | a mount of the file system `cifs` |
//!
//! Nothing is detached: the guest ends instead.

use super::{
    initramfs::{DMSETUP, IP, ISCSISTART, PROGRAMS_DIR, TC},
    protocol::{GuestDisk, PORT},
};
use crate::{LabError, Result, network::NetworkSpec};
use diskwright_store::{CacheMode, RawDevice};
use rustix::mount::{MountFlags, mount};
use std::{
    ffi::CString,
    fs::{self, File, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

/// Longest time for a device to appear.
const PATIENCE: Duration = Duration::from_secs(30);
/// The network card.
const CARD: &str = "eth0";
/// What the guest calls itself.
const NQN: &str = "nqn.2014-08.org.nvmexpress:uuid:6b1f2a1e-7d57-4bb0-9c3c-6c61622d6775";
const HOST_ID: &str = "6b1f2a1e-7d57-4bb0-9c3c-6c61622d6775";
const IQN: &str = "iqn.2026-11.org.example:lab-guest";

/// The disks that are attached.
#[derive(Debug, Default)]
pub(super) struct Attached(Vec<(GuestDisk, PathBuf)>);

impl Attached {
    /// Opens a disk for reading and writing. Attaches it first, unless it is attached.
    ///
    /// # Errors
    /// [`LabError::BadOptions`] with what could not be attached; the error of opening.
    pub(super) fn device(&mut self, disk: &GuestDisk) -> Result<RawDevice> {
        let known = self.0.iter().find(|(known, _)| known == disk).map(|(_, path)| path.clone());
        let path = match known {
            Some(path) => path,
            None => {
                let path = attach(disk)?;
                self.0.push((disk.clone(), path.clone()));
                path
            }
        };
        Ok(RawDevice::open(&path, true, CacheMode::Direct)?)
    }
}

/// The port to the host.
///
/// # Errors
/// [`LabError::BadOptions`] if it does not appear.
pub(super) fn port() -> Result<PathBuf> {
    wait_for("its port", || device_with("virtio-ports", "name", PORT))
}

/// Gives the network card its address. With `emulated` its packets wait for the rate, and for the
/// whole round trip, because the host may have no `netem`.
pub(super) fn network_up(address: &str, emulated: Option<&NetworkSpec>) -> io::Result<()> {
    for line in ["link set lo up", &format!("address add {address} dev {CARD}"), &format!("link set {CARD} up")] {
        program(IP, line.split(' '))?;
    }
    emulated.map_or(Ok(()), |spec| {
        let words = spec.discipline(CARD, spec.round_trip_ns);
        program(TC, words.iter().map(String::as_str))
    })
}

/// Attaches a disk, and returns its device file or its file.
fn attach(disk: &GuestDisk) -> Result<PathBuf> {
    let failed = |what: &str, error: io::Error| LabError::BadOptions {
        what: format!("a disk could not be attached by {what}: {error}"),
        hint: "look at the guest's console, which `StudyOptions::keep` keeps in the scratch folder".into(),
    };
    match disk {
        GuestDisk::Serial(serial) => {
            wait_for(&format!("the disk {serial:?}"), || device_with("block", "serial", serial))
        }
        GuestDisk::Cached { metadata, fast, slow, block_bytes } => {
            let by_serial = |serial: &str| {
                let device = wait_for(&format!("the disk {serial:?}"), || device_with("block", "serial", serial))?;
                Ok::<_, LabError>(device.to_string_lossy().into_owned())
            };
            let (metadata, fast, slow) = (by_serial(metadata)?, by_serial(fast)?, by_serial(slow)?);
            let size = Path::new("/sys/class/block").join(slow.trim_start_matches("/dev/")).join("size");
            let sectors = fs::read_to_string(&size).map_err(LabError::file("read", &size))?;
            let table =
                format!("0 {} cache {metadata} {fast} {slow} {} 1 writeback smq 0", sectors.trim(), block_bytes / 512);
            let words = ["create", "cached", "--noudevrules", "--noudevsync", "--table", &table];
            program(DMSETUP, words).map_err(|error| failed("dm-cache", error))?;
            wait_for("the cached disk", || that_opens("/dev/dm-0"))
        }
        GuestDisk::Nvme { server, subsystem } => {
            let (address, port) = (server.ip(), server.port());
            let line = format!(
                "transport=tcp,traddr={address},trsvcid={port},nqn={subsystem},hostnqn={NQN},hostid={HOST_ID},nr_io_queues=2"
            );
            // The kernel connects while the line is written.
            let connected = OpenOptions::new().read(true).write(true).open("/dev/nvme-fabrics");
            connected
                .and_then(|mut file| file.write_all(line.as_bytes()))
                .map_err(|error| failed("NVMe/TCP", error))?;
            wait_for("the namespace", || that_opens("/dev/nvme0n1"))
        }
        GuestDisk::Iscsi { server, target } => {
            let (address, port) = (server.ip().to_string(), server.port().to_string());
            let words = ["-i", IQN, "-t", target, "-g", "1", "-a", &address, "-p", &port];
            program(ISCSISTART, words).map_err(|error| failed("iSCSI", error))?;
            wait_for("the LUN", || that_opens("/dev/sda"))
        }
        GuestDisk::Smb { server, share, file, user, password } => {
            let (address, port) = (server.ip(), server.port());
            let source = format!("//{address}/{share}");
            let options =
                format!("ip={address},port={port},vers=3.1.1,sec=ntlmssp,username={user},password={password}");
            let mounted = CString::new(options).map_err(io::Error::from).and_then(|options| {
                mount(&source, "/share", "cifs", MountFlags::empty(), Some(&*options)).map_err(io::Error::from)
            });
            mounted.map_err(|error| failed("SMB", error))?;
            Ok(Path::new("/share").join(file))
        }
    }
}

/// Runs a program of the guest to its end.
fn program<'a>(name: &str, words: impl IntoIterator<Item = &'a str>) -> io::Result<()> {
    let mut command = Command::new(Path::new("/").join(PROGRAMS_DIR).join(name));
    let output = command.args(words).output()?;
    if output.status.success() {
        return Ok(());
    }
    let said = [output.stdout, output.stderr].concat();
    Err(io::Error::other(format!("{name}: {}", String::from_utf8_lossy(&said).trim())))
}

/// A device whose file may be there before the kernel has read what it is.
fn that_opens(path: &str) -> Option<PathBuf> {
    File::open(path).is_ok().then(|| path.into())
}

/// The first entry of a class in `/sys` whose attribute has this value, as a device file.
fn device_with(class: &str, attribute: &str, value: &str) -> Option<PathBuf> {
    let entries = fs::read_dir(Path::new("/sys/class").join(class)).ok()?.flatten();
    let mut names = entries
        .filter(|entry| fs::read_to_string(entry.path().join(attribute)).is_ok_and(|found| found.trim() == value));
    let device = Path::new("/dev").join(names.next()?.file_name());
    device.exists().then_some(device)
}

fn wait_for(what: &str, find: impl Fn() -> Option<PathBuf>) -> Result<PathBuf> {
    let begun = Instant::now();
    loop {
        match find() {
            Some(found) => return Ok(found),
            None if begun.elapsed() < PATIENCE => thread::sleep(Duration::from_millis(20)),
            None => {
                return Err(LabError::BadOptions {
                    what: format!("{what} was not found"),
                    hint: "the guest's kernel may lack a driver: name another one (`GuestChoice::kernel`)".into(),
                });
            }
        }
    }
}
