//! Measures the access paths from a guest.
//!
//! Each access path of a round has a guest and servers of its own, so it begins with the disk as it
//! was filled. The three loads are measured one after another in that guest (`sequence.rs`).
//!
//! ```text
//!   serve --vhost-user ── QEMU's device ── virtio-blk ────────┐
//!   serve --nvme, --iscsi ── TCP ── client of the kernel ─────┼─ generator in the guest
//!   attach --fuse ── smbd ── TCP ── SMB client of the kernel ─┘
//! ```
//!
//! The guest reaches this host by a tap device. Over the emulated network it delays its own packets
//! by the round trip, and both sides limit the rate. The CPU time of a server is that of `serve`,
//! or of `attach` and Samba together. An access path that fails is recorded as skipped, so
//! that the figures of the others are not lost.

use super::{
    AccessPath, AccessPathRecord, AccessPathsOptions, CLIENTS, LOADS, Scale,
    measure::{self, Plan},
    record::NOT_WANTED,
    samba,
    sequence::{Sequence, Sequences},
    setup::Disks,
};
use crate::{
    LabError, Result,
    cells::Cell,
    guest::{Guest, GuestChoice, GuestDisk, GuestOptions, GuestRecord, Kernel, QEMU},
    network::GuestLink,
    peer,
    progress::Progress,
    rounds,
    server::{Server, free_port},
};
use diskwright_load::run::Watch;
use diskwright_stats::numbers;
use std::{fs, net::SocketAddrV4, path::PathBuf};

/// Name of the disk, which a guest sees as its serial number.
const DISK: &str = "disk";
const SUBSYSTEM: &str = "nqn.2026-11.org.example:lab";
const TARGET: &str = "iqn.2026-11.org.example:lab";
/// Name of the file in the folder that `attach --fuse` makes.
const VIEW_FILE: &str = "disk";

/// What was measured in the guest.
#[derive(Debug, Default)]
pub(super) struct Measured {
    pub(super) cells: Vec<Cell>,
    pub(super) ways: Vec<AccessPathRecord>,
    pub(super) guest: Option<GuestRecord>,
    pub(super) stopped: bool,
}

/// An access path that is set up for a guest: servers, and the disk as the guest reaches it. The
/// last server is stopped first.
struct Open {
    servers: Vec<Server>,
    disk: GuestDisk,
    /// Sockets of vhost-user devices.
    sockets: Vec<PathBuf>,
    /// The link of the guest, for the ways over TCP.
    link: Option<GuestLink>,
}

impl Open {
    fn cpu_ns(&self) -> Result<u64> {
        self.servers.iter().map(Server::group_cpu_ns).sum()
    }

    fn close(mut self) -> Result<()> {
        while let Some(server) = self.servers.pop() {
            server.stop()?;
        }
        Ok(())
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        // Samba has the file of `attach` open.
        while self.servers.pop().is_some() {}
    }
}

/// Measures every access path of the guest at every load. A quick study measures none of them over
/// the emulated network, unless it is asked for.
///
/// # Errors
/// Those of [`rounds::interleave`]. What fails in a guest is recorded.
pub(super) fn measure(
    disks: &Disks,
    options: &AccessPathsOptions,
    plan: &Plan,
    progress: &mut dyn Progress,
) -> Result<Measured> {
    let kernel = usable(disks, options.guest.as_ref());
    let is_quick = options.study.quick && options.only.is_empty();
    let mut measured = Measured::default();
    let mut ways = Vec::new();
    for way in Scale::Guest.ways() {
        let skipped = match &kernel {
            _ if !options.wants(way) => Some(NOT_WANTED.into()),
            Err(why) => Some(why.clone()),
            Ok(_) if is_quick && way.is_over_network() => Some("a quick study does not measure it".into()),
            Ok(_) => missing(disks, way),
        };
        if skipped.is_none() {
            ways.push(way);
        }
        measured.ways.push(AccessPathRecord { way, skipped });
    }
    let (Ok((kernel, choice)), false) = (kernel, ways.is_empty()) else { return Ok(measured) };
    let mut one = |way, round, watch: &dyn Watch| {
        let record = measured.ways.iter_mut().find(|record| record.way == way);
        let Some(record) = record.filter(|record| record.skipped.is_none()) else { return Ok(None) };
        match sequence((disks, &kernel, choice), plan, (way, round), watch) {
            Ok((guest, sequence)) => {
                measured.guest = Some(guest);
                return Ok(Some(sequence));
            }
            Err(LabError::Stopped) => return Err(LabError::Stopped),
            Err(error) => record.skipped = Some(error.to_string()),
        }
        Ok(None)
    };
    let sequences = Sequences::measure(ways, CLIENTS, plan, ("guest", progress), &mut one)?;
    skip_without_base(&mut measured.ways);
    measured.stopped = sequences.done.stopped;
    let is_skipped = |way| measured.ways.iter().any(|record| record.way == way && record.skipped.is_some());
    measured.cells = sequences.into_cells(|way| !is_skipped(way));
    Ok(measured)
}

/// Skips what cannot be compared, if the base is skipped.
fn skip_without_base(ways: &mut [AccessPathRecord]) {
    let base = Scale::Guest.base();
    let Some(base) = ways.iter().find(|record| Some(record.way) == base && record.skipped.is_some()) else { return };
    let why = format!("{}, its base, could not be measured", base.way.name());
    for record in ways.iter_mut().filter(|record| record.skipped.is_none()) {
        record.skipped = Some(why.clone());
    }
}

/// The kernel of the guest, or why there is no guest.
fn usable<'a>(
    disks: &Disks,
    choice: Option<&'a GuestChoice>,
) -> std::result::Result<(Kernel, &'a GuestChoice), String> {
    let choice = choice.ok_or("no guest was wanted")?;
    disks.no_server().map_or(Ok(()), Err)?;
    peer::find(QEMU).ok_or_else(|| peer::missing(QEMU, "qemu-system-x86"))?;
    let kernel = Kernel::find(choice.kernel.as_deref()).map_err(|error| error.to_string())?;
    Ok((kernel, choice))
}

/// Why this machine does not support an access path; `None` if it may.
fn missing(disks: &Disks, way: AccessPath) -> Option<String> {
    let no_program = |name: &str, package| peer::find(name).is_none().then(|| peer::missing(name, package));
    let network = || (way.is_over_network() && disks.emulated.is_none()).then(|| "no network was wanted".to_owned());
    let own = match way {
        AccessPath::GuestVhostUser => None,
        AccessPath::GuestIscsi | AccessPath::GuestIscsiNetwork => no_program("iscsistart", "open-iscsi"),
        AccessPath::GuestSmb | AccessPath::GuestSmbNetwork => samba::missing(),
        _ => None,
    };
    let link = || match way {
        AccessPath::GuestVhostUser => None,
        _ => GuestLink::start(None).err(),
    };
    own.or_else(network).or_else(link)
}

/// Measures an access path at all loads in a new guest.
fn sequence(
    (disks, kernel, choice): (&Disks, &Kernel, &GuestChoice),
    plan: &Plan,
    (way, round): (AccessPath, usize),
    watch: &dyn Watch,
) -> Result<(GuestRecord, Sequence)> {
    let open = open(disks, way)?;
    let mut guest = Guest::start(&GuestOptions {
        kernel,
        launcher: &choice.launcher,
        accelerator: choice.accelerator,
        disks: &open.sockets,
        link: open.link.as_ref().map(|link| (link, disks.emulated_for(way))),
        has_dm_cache: false,
        dir: &disks.dir,
    })?;
    let mut figures = Vec::new();
    for (load, outstanding) in LOADS {
        let job = rounds::job_of(&measure::job(CLIENTS, outstanding, plan), load, round, None);
        let before_ns = open.cpu_ns()?;
        let ran = guest.run(&open.disk, &job, watch)?;
        let spent_ns = open.cpu_ns()?.saturating_sub(before_ns);
        if ran.figures.iops == 0.0 {
            let time = numbers::duration(ran.figures.window_ns as f64);
            return Err(LabError::InGuest(format!("at {load} load no request was completed in {time}")));
        }
        figures.push((ran.figures, spent_ns as f64 / ran.requests.max(1) as f64));
    }
    let record = guest.record();
    guest.stop()?;
    open.close()?;
    Ok((record, figures))
}

/// Starts the servers of an access path.
fn open(disks: &Disks, way: AccessPath) -> Result<Open> {
    let link = || {
        GuestLink::start(disks.emulated_for(way).as_ref()).map_err(|what| LabError::BadOptions {
            what,
            hint: "measure without a guest (`AccessPathsOptions::guest`)".into(),
        })
    };
    let over_tcp = |options: &[&str], disk: &dyn Fn(SocketAddrV4) -> GuestDisk| {
        let link = link()?;
        let (server, address) = disks.serve_tcp(way, options, link.host())?;
        Ok(Open { servers: vec![server], disk: disk(address), sockets: vec![], link: Some(link) })
    };
    match way {
        AccessPath::GuestNvme | AccessPath::GuestNvmeNetwork => {
            over_tcp(&["--nvme-subsystem", SUBSYSTEM, "--nvme"], &|server| GuestDisk::Nvme {
                server,
                subsystem: SUBSYSTEM.into(),
            })
        }
        AccessPath::GuestIscsi | AccessPath::GuestIscsiNetwork => {
            over_tcp(&["--iscsi-target", TARGET, "--iscsi"], &|server| GuestDisk::Iscsi {
                server,
                target: TARGET.into(),
            })
        }
        AccessPath::GuestSmb | AccessPath::GuestSmbNetwork => {
            let view = disks.dir.join("view");
            fs::create_dir_all(&view).map_err(LabError::file("create", &view))?;
            let mut command = disks.own(way, "attach");
            command.arg(&disks.disk).args(["--ephemeral", "--foreground", "--fuse"]).arg(&view);
            let mut attach = Server::start(command, &disks.dir, "view")?;
            attach.wait_until("no file appeared", || view.join(VIEW_FILE).exists())?;
            let link = link()?;
            let address = SocketAddrV4::new(link.host(), free_port()?);
            let (smbd, share) = samba::start(&view, address, &disks.dir.join("samba"))?;
            let disk = GuestDisk::Smb {
                server: share.address,
                share: samba::SHARE.into(),
                file: VIEW_FILE.into(),
                user: samba::USER.into(),
                password: share.password,
            };
            Ok(Open { servers: vec![attach, smbd], disk, sockets: vec![], link: Some(link) })
        }
        _ => {
            let socket = disks.socket("vhost-user")?;
            let mut command = disks.serve(way, DISK);
            command.arg("--vhost-user").arg(&socket);
            let server = Server::listening(command, &socket, "serve")?;
            let disk = GuestDisk::Serial(DISK.into());
            Ok(Open { servers: vec![server], disk, sockets: vec![socket], link: None })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_compared_with_a_base_that_failed() {
        let record = |way, skipped: Option<&str>| AccessPathRecord { way, skipped: skipped.map(str::to_owned) };
        let mut ways = [record(AccessPath::GuestVhostUser, None), record(AccessPath::GuestSmb, None)];
        skip_without_base(&mut ways);
        assert_eq!(ways[1].skipped, None);
        ways[0].skipped = Some("it ended".into());
        skip_without_base(&mut ways);
        assert_eq!(ways[0].skipped.as_deref(), Some("it ended"));
        assert_eq!(ways[1].skipped.as_deref(), Some("guest: vhost-user, its base, could not be measured"));
    }
}
