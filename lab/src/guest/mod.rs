//! A virtual machine that measures the disks that it is given.
//!
//! ```text
//!   host                                          guest
//!   kernel.rs     vmlinuz, modules ──┐
//!   initramfs.rs  program, libraries ┴─▶ QEMU ──▶ /init = this program
//!   sockets of vhost-user disks ───────▶          agent.rs: /dev/vda, /dev/vdb, ...
//!   mod.rs        Guest::run ── job ── JSON ────▶ the load generator, O_DIRECT
//!                      ▲── figures ── JSON ───────┘
//! ```
//!
//! The guest has no network and no file system but its initramfs. One virtio-serial port carries
//! one JSON document a line ([`protocol`]); the console goes to a log. The guest generates the load
//! itself, so a job has the same meaning on the host and in the guest.
//!
//! With KVM the guest runs on the machine's processors. Where KVM is missing, or does not boot the
//! kernel, QEMU emulates the processor (TCG). Every figure of an emulated guest that depends on CPU
//! time is then a figure of the emulation; [`Guest::accelerator`] says which it is.

pub(crate) mod agent;
mod initramfs;
pub mod kernel;
mod protocol;
mod reach;

pub use kernel::Kernel;
pub use protocol::{GuestDisk, Ran};

use crate::{
    ChildLauncher, LabError, Result,
    network::{GuestLink, NetworkSpec},
    peer,
    server::Server,
};
use diskwright_load::{
    job::Job,
    machine::Machine,
    run::{Snapshot, Watch},
};
use initramfs::Needs;
use protocol::{FromGuest, PORT, ToGuest};
use serde::{Deserialize, Serialize};
use std::{
    fs::{self, OpenOptions},
    io::{BufRead, BufReader, ErrorKind, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

/// The program that runs the guest.
pub const QEMU: &str = "qemu-system-x86_64";
/// Attempts to start an emulated guest.
const BOOTS_MAX: u32 = 3;
const MEMORY: &str = "512M";
/// Longest time without a sign of life of a guest that measures, beyond the time of its job.
const SILENCE_MAX: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(100);

/// What executes the guest's instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Accelerator {
    /// The machine's processors, by KVM.
    Kvm,
    /// QEMU emulates the processor.
    Tcg,
}

impl Accelerator {
    /// Name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kvm => "KVM",
            Self::Tcg => "emulated by QEMU (TCG)",
        }
    }

    fn args(self) -> [&'static str; 4] {
        match self {
            Self::Kvm => ["-accel", "kvm", "-cpu", "host"],
            // CMPXCHG16B is emulated with a lock over all of the guest's processors.
            Self::Tcg => ["-accel", "tcg", "-cpu", "max,-cx16"],
        }
    }
}

/// The guest that a user wants.
#[derive(Debug, Clone)]
pub struct GuestChoice {
    /// Starts this program in the guest.
    pub launcher: ChildLauncher,
    /// Folder with the guest's kernel; see [`Kernel::find`].
    pub kernel: Option<PathBuf>,
    /// What executes the guest's instructions. Default: KVM if it works, else TCG.
    pub accelerator: Option<Accelerator>,
}

/// The guest of a study.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct GuestRecord {
    /// What executed its instructions.
    pub accelerator: Accelerator,
    /// The machine that it saw.
    pub machine: Machine,
}

/// What a guest is made of.
#[derive(Debug)]
pub struct GuestOptions<'a> {
    /// The kernel.
    pub kernel: &'a Kernel,
    /// The program for the guest.
    pub launcher: &'a ChildLauncher,
    /// `None`: KVM if it works, else TCG.
    pub accelerator: Option<Accelerator>,
    /// Sockets of vhost-user devices. The guest tells them apart by their serial numbers.
    pub disks: &'a [PathBuf],
    /// The link of its network card, and what is emulated of a network. With a link it has the
    /// kernel's clients of NVMe/TCP, iSCSI and SMB.
    pub link: Option<(&'a GuestLink, Option<NetworkSpec>)>,
    /// Whether it has dm-cache, for [`GuestDisk::Cached`].
    pub has_dm_cache: bool,
    /// Folder for the initramfs, the socket and the log. Absolute.
    pub dir: &'a Path,
}

/// A running guest. Dropping it ends the guest.
#[derive(Debug)]
pub struct Guest {
    server: Server,
    port: BufReader<UnixStream>,
    /// The part of a line that has arrived.
    line: Vec<u8>,
    accelerator: Accelerator,
    machine: Machine,
}

impl Guest {
    /// Starts a guest, and waits until it can measure.
    ///
    /// # Errors
    /// [`LabError::Program`] with the console, if it does not come up; [`LabError::File`].
    pub fn start(options: &GuestOptions<'_>) -> Result<Self> {
        let initramfs = options.dir.join("initramfs");
        let (program, _) = options.launcher.command_line();
        let needs = Needs { network: options.link.is_some(), cache: options.has_dm_cache };
        let bytes = initramfs::build(options.kernel, program, options.dir, needs)?;
        fs::write(&initramfs, bytes).map_err(LabError::file("write", &initramfs))?;
        // An emulated kernel with several processors rarely dies while it comes up, because it
        // changes its own code while another processor executes it.
        let emulated = || {
            let mut attempts = (0..BOOTS_MAX).map(|_| Self::start_by(Accelerator::Tcg, options, &initramfs));
            let first = attempts.next().unwrap_or(Err(LabError::Stopped));
            first.or_else(|error| attempts.find(Result::is_ok).unwrap_or(Err(error)))
        };
        let has_kvm = || OpenOptions::new().read(true).write(true).open("/dev/kvm").is_ok();
        match options.accelerator {
            Some(Accelerator::Kvm) => Self::start_by(Accelerator::Kvm, options, &initramfs),
            None if has_kvm() => Self::start_by(Accelerator::Kvm, options, &initramfs).or_else(|_| emulated()),
            Some(Accelerator::Tcg) | None => emulated(),
        }
    }

    fn start_by(accelerator: Accelerator, options: &GuestOptions<'_>, initramfs: &Path) -> Result<Self> {
        let socket = options.dir.join("guest.sock");
        match fs::remove_file(&socket) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(LabError::file("remove the socket", &socket)(error));
            }
            _ => {}
        }
        let failed = || LabError::file("listen on", &socket);
        let listener = UnixListener::bind(&socket).map_err(failed())?;
        listener.set_nonblocking(true).map_err(failed())?;
        let command = command(accelerator, options, initramfs, &socket);
        let mut server = Server::start(command, options.dir, "guest")?;
        let mut port = None;
        server.wait_until("it did not open its port in time", || {
            port = port.take().or_else(|| listener.accept().ok());
            port.is_some()
        })?;
        let port = port.map(|(port, _)| port).ok_or(LabError::Stopped)?;
        port.set_nonblocking(false).and_then(|()| port.set_read_timeout(Some(POLL))).map_err(failed())?;
        let mut guest =
            Self { server, port: BufReader::new(port), line: Vec::new(), accelerator, machine: Machine::default() };
        let begun = Instant::now();
        loop {
            match guest.next()? {
                Some(FromGuest::Ready(machine)) => {
                    guest.machine = machine;
                    let Some((link, emulated)) = options.link else { return Ok(guest) };
                    guest.send(&ToGuest::Network { address: link.guest(), emulated })?;
                }
                Some(FromGuest::Networked) => return Ok(guest),
                Some(FromGuest::Failed(sentence)) => return Err(guest.server.failed(None, &sentence)),
                _ if begun.elapsed() > SILENCE_MAX => {
                    return Err(guest.server.failed(None, "it did not come up in time"));
                }
                _ => {}
            }
        }
    }

    /// What it is.
    pub fn record(&self) -> GuestRecord {
        GuestRecord { accelerator: self.accelerator, machine: self.machine.clone() }
    }

    /// Runs a job of one phase on a disk, which stays attached afterwards.
    ///
    /// # Errors
    /// [`LabError::Void`] if a request failed; [`LabError::Stopped`] if `watch` ended it, and then
    /// the guest has ended; [`LabError::Program`] if the guest fails.
    pub fn run(&mut self, disk: &GuestDisk, job: &Job, watch: &dyn Watch) -> Result<Ran> {
        self.send(&ToGuest::Run { disk: disk.clone(), job: Box::new(job.clone()) })?;
        let phase = job.phases.first();
        let expected: Duration = phase
            .map(|phase| [phase.warm_up, phase.duration, phase.cool_down].into_iter().map(Duration::from).sum())
            .unwrap_or_default();
        let begun = Instant::now();
        loop {
            match self.next()? {
                Some(FromGuest::Ran(ran)) => return Ok(*ran),
                Some(FromGuest::Void { first, errors }) => return Err(LabError::Void { first, errors }),
                Some(FromGuest::Failed(sentence)) => return Err(LabError::InGuest(sentence)),
                Some(FromGuest::Progress(so_far)) => {
                    let name = phase.map_or("", |phase| &phase.name);
                    let snapshot: Snapshot<'_> = so_far.as_snapshot(name);
                    if !watch.update(&snapshot) {
                        return Err(LabError::Stopped);
                    }
                }
                Some(FromGuest::Ready(_) | FromGuest::Networked) => {
                    return Err(self.server.failed(None, "it was started again while it measured"));
                }
                None if begun.elapsed() > expected + SILENCE_MAX => {
                    return Err(self.server.failed(None, "it did not answer in time"));
                }
                None => {}
            }
        }
    }

    /// Ends the guest.
    ///
    /// # Errors
    /// [`LabError::Program`] if it does not end by itself.
    pub fn stop(mut self) -> Result<()> {
        self.send(&ToGuest::End)?;
        self.server.wait_for_end()
    }

    fn send(&mut self, message: &ToGuest) -> Result<()> {
        let mut line = serde_json::to_vec(message).map_err(|error| self.server.failed(None, &error.to_string()))?;
        line.push(b'\n');
        let written = self.port.get_mut().write_all(&line);
        written.map_err(|error| self.server.failed(None, &format!("its port cannot be written ({error})")))
    }

    /// The next message; `None` if there is none yet.
    fn next(&mut self) -> Result<Option<FromGuest>> {
        match self.port.read_until(b'\n', &mut self.line) {
            Ok(0) => Err(self.server.failed(None, "it ended")),
            Ok(_) if self.line.ends_with(b"\n") => {
                let line = std::mem::take(&mut self.line);
                serde_json::from_slice(&line)
                    .map(Some)
                    .map_err(|error| self.server.failed(None, &format!("its answer cannot be read ({error})")))
            }
            Ok(_) => Ok(None),
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted) =>
            {
                Ok(None)
            }
            Err(error) => Err(self.server.failed(None, &format!("its port cannot be read ({error})"))),
        }
    }
}

fn command(accelerator: Accelerator, options: &GuestOptions<'_>, initramfs: &Path, socket: &Path) -> Command {
    let quoted = |path: &Path| path.to_string_lossy().replace(',', ",,");
    let cpus = std::thread::available_parallelism().map_or(1, usize::from).min(2);
    let mut command = Command::new(peer::find(QEMU).unwrap_or_else(|| QEMU.into()));
    command.args(accelerator.args()).args(["-nographic", "-no-reboot", "-nodefaults", "-m", MEMORY]);
    command.args(["-smp", &cpus.to_string(), "-serial", "stdio", "-monitor", "none"]);
    // vhost-user devices share the guest's memory.
    command.arg("-object").arg(format!("memory-backend-memfd,id=memory,size={MEMORY},share=on"));
    command.args(["-machine", "q35,memory-backend=memory"]);
    command.arg("-chardev").arg(format!("socket,id=port,path={}", quoted(socket)));
    command.args(["-device", "virtio-serial-pci"]);
    command.arg("-device").arg(format!("virtserialport,chardev=port,name={PORT}"));
    for (number, disk) in options.disks.iter().enumerate() {
        command.arg("-chardev").arg(format!("socket,id=disk{number},path={}", quoted(disk)));
        command.arg("-device").arg(format!("vhost-user-blk-pci,chardev=disk{number},num-queues=1"));
    }
    if let Some((link, _)) = options.link {
        command.arg("-netdev").arg(format!("tap,id=net,ifname={},script=no,downscript=no", link.tap()));
        // Without a boot ROM, which would look for a server first.
        command.args(["-device", "virtio-net-pci,netdev=net,romfile="]);
    }
    let append = "console=ttyS0 panic=-1 no_timer_check quiet loglevel=3 random.trust_cpu=on";
    // The kernel hands what follows `--` to process 1.
    let (_, args) = options.launcher.command_line();
    let words = args.iter().map(|word| word.to_string_lossy()).chain([agent::WORD.into()]);
    command.arg("-append").arg(format!("{append} -- {}", words.collect::<Vec<_>>().join(" ")));
    command.arg("-kernel").arg(options.kernel.image()).arg("-initrd").arg(initramfs);
    command
}
