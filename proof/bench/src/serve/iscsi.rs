//! iSCSI against tgtd: our server on a dynamic VHDX, tgtd on a raw file, and `iscsi-perf` of
//! libiscsi as the client of both.
//!
//! `iscsi-perf -r -b 8` reads 1 to 8 blocks at random. It tells the rate; the servers' CPU time is
//! divided by the requests that it counted. tgtd has no other end than SIGKILL.

use crate::{ours, turns::in_turns};
use diskwright_lab::{
    LabError, Result,
    acceptance::{Bar, Check, Context, RowOutcome},
    peer,
    progress::{Progress, report},
    rounds::Window,
    server::{Server, cost_of, free_port},
    targets::{self, Container},
};
use diskwright_stats::numbers::bytes;
use diskwright_store::CacheMode;
use std::{
    ffi::OsStr,
    net::TcpStream,
    path::{Path, PathBuf},
    process::Command,
};

const TARGET: &str = "iqn.2026-11.org.example:bench";
const QUEUE_DEPTH: u32 = 32;

/// The programs of others.
struct Programs {
    perf: PathBuf,
    tgtd: PathBuf,
    tgtadm: PathBuf,
}

impl Programs {
    fn find() -> std::result::Result<Self, String> {
        let find = |name, package| peer::find(name).ok_or_else(|| peer::missing(name, package));
        Ok(Self {
            perf: find("iscsi-perf", "libiscsi-bin")?,
            tgtd: find("tgtd", "tgt")?,
            tgtadm: find("tgtadm", "tgt")?,
        })
    }
}

fn listens(port: u16) -> bool {
    TcpStream::connect(("127.0.0.1", port)).is_ok()
}

fn our_server(disk: &Path, dir: &Path, port: u16) -> Result<Server> {
    let mut command = ours::command()?;
    command.arg("serve").arg(disk).args(["--cache=direct", "--quiet", "--threads=1", "--read-only"]);
    command.arg(format!("--iscsi=127.0.0.1:{port}")).arg(format!("--iscsi-target={TARGET}"));
    let mut server = Server::start(command, dir, "diskwright")?;
    server.wait_until("it did not listen in time", || listens(port))?;
    Ok(server)
}

fn their_server(programs: &Programs, disk: &Path, dir: &Path, port: u16) -> Result<Server> {
    // Several may run on a machine, each with a control socket by this number, of 15 bits.
    let control = (port % (1 << 15)).to_string();
    let mut command = Command::new(&programs.tgtd);
    command.args(["-f", "-C", &control, "--iscsi", &format!("portal=127.0.0.1:{port}")]);
    let mut server = Server::start(command, dir, "tgtd")?;
    server.wait_until("it did not listen in time", || listens(port))?;
    let tell = |args: &[&OsStr]| {
        let all = ["-C", &control, "--lld", "iscsi"].into_iter().map(OsStr::new).chain(args.iter().copied());
        peer::run(&programs.tgtadm, &all.collect::<Vec<_>>(), None)
    };
    let words = |text: &'static str| text.split(' ').map(OsStr::new).collect::<Vec<_>>();
    let target = [words("--op new --mode target --tid 1 -T"), vec![OsStr::new(TARGET)]].concat();
    tell(&target)?;
    let unit =
        [words("--op new --mode logicalunit --tid 1 --lun 1 --bsoflags direct -b"), vec![disk.as_os_str()]].concat();
    tell(&unit)?;
    tell(&words("--op bind --mode target --tid 1 -I ALL"))?;
    Ok(server)
}

/// Runs the client for `seconds`. Returns the requests per second.
fn iops_of(programs: &Programs, port: u16, unit: u8, seconds: u64) -> Result<f64> {
    let uri = format!("iscsi://127.0.0.1:{port}/{TARGET}/{unit}");
    let (depth, seconds) = (QUEUE_DEPTH.to_string(), seconds.to_string());
    let mut command = Command::new(&programs.perf);
    command.args(["-r", "-b", "8", "-m", &depth, "-t", &seconds, &uri]);
    peer::answer(&mut command, |said| {
        let last = said.rsplit("iops average ").next().and_then(|rest| rest.split(' ').next());
        last.and_then(|rate| rate.parse().ok()).ok_or("it told no average".to_owned())
    })
}

pub(crate) fn against_tgtd(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    let programs = match Programs::find() {
        Ok(programs) => programs,
        Err(missing) => return Ok(RowOutcome::skipped("disks by iSCSI", missing)),
    };
    if !rustix::process::geteuid().is_root() {
        return Ok(RowOutcome::skipped("disks by iSCSI", "tgtd needs root".to_owned()));
    }
    let size_bytes: u64 = context.pick(512 << 20, 2 << 30);
    context.scratch.need("these disks", 2 * size_bytes + (1 << 30))?;
    let dir = context.scratch.folder("iscsi")?;
    let dir = dir.canonicalize().map_err(LabError::file("find", &dir))?;
    let how = context.preparation(size_bytes, CacheMode::Direct);
    let mut disks = Vec::new();
    for (index, container) in [Container::VhdxDynamic, Container::Raw].into_iter().enumerate() {
        let before = index as u64 * size_bytes;
        let mut tick = |done| report(progress, "prepare", before + done, 2 * size_bytes, container.name());
        disks.push(targets::make_filled(container, &dir, &how, &mut tick)?);
    }
    context.scratch.settle()?;
    let ports = [free_port()?, free_port()?];
    let servers = [our_server(&disks[0], &dir, ports[0])?, their_server(&programs, &disks[1], &dir, ports[1])?];
    let seconds: u64 = context.options.cell.map_or_else(|| context.pick(1, 3), |cell| cell.as_secs().max(1));
    let rounds = context.rounds(context.pick(3, 7));
    let (mut iops, mut cpu_ns) = ([const { Vec::new() }; 2], [const { Vec::new() }; 2]);
    in_turns("measure", &["diskwright", "tgtd"], (rounds, 5), progress, &mut |Window { cell: who, .. }, _| {
        // tgtd's unit 0 is its controller.
        let run = || iops_of(&programs, ports[who], who as u8, seconds);
        let (rate, spent_ns) = cost_of(&servers[who], run)?;
        iops[who].push(rate);
        cpu_ns[who].push(spent_ns as f64 / (rate * seconds as f64).max(1.0));
        Ok(())
    })?;
    let [ours, theirs] = servers;
    ours.stop()?;
    theirs.kill();
    let name = format!("VHDX dynamic by iSCSI, random read of up to 4K, QD {QUEUE_DEPTH}");
    let mut found = RowOutcome::default();
    found.checks.push(Check::ratio(format!("{name}: IOPS"), "IOPS", &iops[0], &iops[1], Bar::AtLeast(1.5)));
    let cpu_name = format!("{name}: server's CPU per I/O");
    found.checks.push(Check::ratio(cpu_name, "ns", &cpu_ns[0], &cpu_ns[1], Bar::AtMost(0.7)));
    found.notes.push(format!(
        "disks of {}, filled; tgtd serves a raw file with O_DIRECT, we one thread and O_DIRECT; iscsi-perf -r -b 8 -m {QUEUE_DEPTH} over loopback; {rounds} rounds in turns of {seconds} s",
        bytes(size_bytes)
    ));
    Ok(found)
}
