//! The disk of a virtual machine: vhost-user-blk, ours against that of qemu-storage-daemon.
//!
//! The front-end is the one that tests use (`diskwright_serve::vhost_user::front_end`), in this
//! process: one virtqueue in memory that both sides share. The lab's load generator drives it, and
//! leaves payloads where the server puts them, as a guest would. Before anything is measured, our
//! disk is read through the front-end and compared.

use super::prove;
use crate::{ours, turns::in_turns};
use diskwright_lab::{
    LabError, Result,
    acceptance::{Bar, Check, Context, RowOutcome, SEED},
    measure, peer,
    progress::{Progress, report},
    rounds::Window,
    server::{Server, cost_of},
    targets::{self, Container},
};
use diskwright_load::{
    OpenTarget,
    figures::Figures,
    job::{IoEngine, Job, Span},
    run::RunOptions,
    seeds,
    workload::{Direction, Pattern, Workload},
};
use diskwright_serve::vhost_user::front_end::{FrontEnd, FrontOptions};
use diskwright_stats::numbers::{bytes, duration};
use diskwright_store::CacheMode;
use std::{path::Path, process::Command, time::Duration};

const QUEUE_DEPTH: u32 = 32;
const DAEMON: &str = "qemu-storage-daemon";

/// A server, and the front-end that is connected to it.
struct Machine {
    target: OpenTarget,
    server: Server,
}

impl Machine {
    /// Starts a server that listens on `socket`, and connects.
    fn start(name: &str, command: Command, socket: &Path) -> Result<Self> {
        let server = Server::listening(command, socket, name)?;
        let front = connect(socket, false)?;
        Ok(Self { target: OpenTarget::new(name, front), server })
    }

    fn stop(self) -> Result<()> {
        drop(self.target);
        self.server.stop()
    }
}

fn connect(socket: &Path, copies: bool) -> Result<FrontEnd> {
    let options = FrontOptions {
        queues: 1,
        depth: QUEUE_DEPTH as usize,
        leaves_payload: !copies,
        records_in_flight: copies,
        ..FrontOptions::default()
    };
    FrontEnd::connect(socket, options).map_err(LabError::file("connect to", socket))
}

fn our_command(disk: &Path, socket: &Path) -> Result<Command> {
    let mut command = ours::command()?;
    command.arg("serve").arg(disk).arg("--vhost-user").arg(socket);
    command.args(["--vhost-queues=1", "--cache=direct", "--quiet"]);
    Ok(command)
}

fn their_command(daemon: &Path, disk: &Path, socket: &Path) -> Command {
    let quoted = |path: &Path| path.to_string_lossy().replace(',', ",,");
    let mut command = Command::new(daemon);
    command.arg("--blockdev");
    command.arg(format!("driver=file,node-name=disk,filename={},cache.direct=on,aio=io_uring", quoted(disk)));
    command.arg("--export");
    command.arg(format!(
        "type=vhost-user-blk,id=export,node-name=disk,writable=on,num-queues=1,addr.type=unix,addr.path={}",
        quoted(socket)
    ));
    command
}

pub(crate) fn one_queue(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    let Some(daemon) = peer::find(DAEMON) else {
        return Ok(RowOutcome::skipped("a virtual machine's disk", peer::missing(DAEMON, "qemu-system-common")));
    };
    let size_bytes: u64 = context.pick(512 << 20, 2 << 30);
    context.scratch.need("these disks", 2 * size_bytes + (1 << 30))?;
    let dir = context.scratch.folder("machine")?;
    let dir = dir.canonicalize().map_err(LabError::file("find", &dir))?;
    let how = context.preparation(size_bytes, CacheMode::Direct);
    let mut disks = Vec::new();
    for (index, container) in [Container::VhdxDynamic, Container::Raw].into_iter().enumerate() {
        let before = index as u64 * size_bytes;
        let mut tick = |done| report(progress, "prepare", before + done, 2 * size_bytes, container.name());
        disks.push(targets::make_filled(container, &dir, &how, &mut tick)?);
    }
    context.scratch.settle()?;
    let sockets = ["ours.sock", "theirs.sock"].map(|name| dir.join(name));
    let proved = Server::listening(our_command(&disks[0], &sockets[0])?, &sockets[0], "proved")?;
    prove(&connect(&sockets[0], true)?, "vhost-user", progress)?;
    proved.stop()?;
    let machines = [
        Machine::start("diskwright", our_command(&disks[0], &sockets[0])?, &sockets[0])?,
        Machine::start(DAEMON, their_command(&daemon, &disks[1], &sockets[1]), &sockets[1])?,
    ];
    let cell = context.options.cell.unwrap_or_else(|| Duration::from_millis(context.pick(1000, 3000)));
    let rounds = context.rounds(context.pick(3, 7));
    let mut found = RowOutcome::default();
    for direction in [Direction::Read, Direction::Write] {
        let workload = Workload::new(Pattern::Random, direction, 4096, QUEUE_DEPTH);
        let (mut iops, mut cpu_ns) = ([const { Vec::new() }; 2], [const { Vec::new() }; 2]);
        let subjects = ["diskwright", DAEMON].map(|name| format!("{}, {name}", workload.name));
        let subjects = [&*subjects[0], &*subjects[1]];
        in_turns("measure", &subjects, (rounds, 5), progress, &mut |Window { cell: who, round }, watch| {
            let machine = &machines[who];
            let mut job = Job::simple(&workload.name, workload.load(), Span::default(), Span::from(cell));
            (job.engine, job.seed) = (IoEngine::Auto, seeds::of_window(SEED, &workload.name, round));
            let window = || measure::window(&job, &machine.target, &RunOptions::default(), watch);
            let (phase, spent_ns) = cost_of(&machine.server, window)?;
            let figures = Figures::of(&phase);
            iops[who].push(figures.iops);
            cpu_ns[who].push(spent_ns as f64 / ((figures.reads + figures.writes) as f64).max(1.0));
            Ok(())
        })?;
        let name = format!("VHDX dynamic as a virtual disk, {} QD {QUEUE_DEPTH}", workload.name);
        found.checks.push(Check::ratio(format!("{name}: IOPS"), "IOPS", &iops[0], &iops[1], Bar::AtLeast(1.3)));
        let cpu_name = format!("{name}: server's CPU per I/O");
        found.checks.push(Check::ratio(cpu_name, "ns", &cpu_ns[0], &cpu_ns[1], Bar::AtMost(0.7)));
    }
    machines.into_iter().try_for_each(Machine::stop)?;
    found.notes.push(format!(
        "disks of {}, filled, and ours compared; {DAEMON} exports a raw file with cache.direct=on, aio=io_uring; one virtqueue, a front-end in this process; {rounds} rounds in turns, cells of {}",
        bytes(size_bytes),
        duration(cell.as_nanos() as f64)
    ));
    Ok(found)
}
