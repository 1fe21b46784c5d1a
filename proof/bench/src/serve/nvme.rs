//! NVMe/TCP against NBD: the same disk of one server, over TCP on loopback, by our own clients.
//!
//! One process serves the disk by both protocols. The lab's load generator drives the client of
//! each in turns, with one connection. Before anything is measured, the disk is read by NVMe/TCP
//! and compared.

use super::prove;
use crate::{ours, turns::in_turns};
use diskwright_lab::{
    LabError, Result,
    acceptance::{Bar, Check, Context, RowOutcome, SEED},
    measure,
    open::{self, OpenHow},
    progress::{Progress, report},
    rounds::Window,
    server::{Server, cost_of, free_port},
    targets::{self, Container},
};
use diskwright_load::{
    figures::Figures,
    job::{IoEngine, Job, Span},
    run::RunOptions,
    seeds,
    workload::{Direction, Pattern, Workload},
};
use diskwright_stats::numbers::{bytes, duration};
use diskwright_store::CacheMode;
use std::time::Duration;

const QUEUE_DEPTH: u32 = 32;
const SUBSYSTEM: &str = "nqn.2026-01.org.example:bench";

pub(crate) fn against_nbd(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    let size_bytes: u64 = context.pick(512 << 20, 2 << 30);
    context.scratch.need("this disk", size_bytes + (1 << 30))?;
    let dir = context.scratch.folder("nvme")?;
    let dir = dir.canonicalize().map_err(LabError::file("find", &dir))?;
    let how = context.preparation(size_bytes, CacheMode::Direct);
    let mut tick = |done| report(progress, "prepare", done, size_bytes, Container::VhdxDynamic.name());
    let disk = targets::make_filled(Container::VhdxDynamic, &dir, &how, &mut tick)?;
    context.scratch.settle()?;
    let (nvme, nbd, socket) = (free_port()?, free_port()?, dir.join("ready.sock"));
    let mut command = ours::command()?;
    command.arg("serve").arg(&disk).args(["--cache=direct", "--quiet", "--threads=1", "--insecure-writes"]);
    command.arg("--nbd").arg(&socket).arg("--nbd").arg(format!("127.0.0.1:{nbd}"));
    command.arg(format!("--nvme=127.0.0.1:{nvme}")).arg(format!("--nvme-subsystem={SUBSYSTEM}"));
    let server = Server::listening(command, &socket, "diskwright")?;
    let how = OpenHow { writable: true, ..OpenHow::default() };
    let targets = [
        open::open(&format!("nvme://127.0.0.1:{nvme}/{SUBSYSTEM}?nsid=1"), &how)?,
        open::open(&format!("nbd://127.0.0.1:{nbd}/?connections=1"), &how)?,
    ];
    prove(&*targets[0].device, &targets[0].name, progress)?;
    let cell = context.options.cell.unwrap_or_else(|| Duration::from_millis(context.pick(1000, 3000)));
    let rounds = context.rounds(context.pick(3, 7));
    let mut found = RowOutcome::default();
    for direction in [Direction::Read, Direction::Write] {
        let workload = Workload::new(Pattern::Random, direction, 4096, QUEUE_DEPTH);
        let (mut iops, mut server_ns) = ([const { Vec::new() }; 2], [const { Vec::new() }; 2]);
        let mut client_ns = [const { Vec::new() }; 2];
        let subjects = ["NVMe/TCP", "NBD"].map(|name| format!("{}, {name}", workload.name));
        let subjects = [&*subjects[0], &*subjects[1]];
        in_turns("measure", &subjects, (rounds, 5), progress, &mut |Window { cell: who, round }, watch| {
            let mut job = Job::simple(&workload.name, workload.load(), Span::default(), Span::from(cell));
            (job.engine, job.seed) = (IoEngine::Auto, seeds::of_window(SEED, &workload.name, round));
            let window = || measure::window(&job, &targets[who], &RunOptions::default(), watch);
            let (phase, spent_ns) = cost_of(&server, window)?;
            let figures = Figures::of(&phase);
            iops[who].push(figures.iops);
            server_ns[who].push(spent_ns as f64 / ((figures.reads + figures.writes) as f64).max(1.0));
            client_ns[who].push(figures.cpu_ns_per_io);
            Ok(())
        })?;
        let name = format!("VHDX dynamic by NVMe/TCP, {} QD {QUEUE_DEPTH}", workload.name);
        for (what, unit, values, bar) in [
            ("IOPS", "IOPS", &iops, Bar::AtLeast(1.0)),
            ("server's CPU per I/O", "ns", &server_ns, Bar::AtMost(1.0)),
            ("client's CPU per I/O", "ns", &client_ns, Bar::AtMost(1.0)),
        ] {
            found.checks.push(Check::ratio(format!("{name}: {what}"), unit, &values[0], &values[1], bar));
        }
    }
    drop(targets);
    server.stop()?;
    found.notes.push(format!(
        "a disk of {}, filled, and compared by NVMe/TCP; one server with one thread for each protocol, O_DIRECT, TCP on loopback, one connection; {rounds} rounds in turns, cells of {}",
        bytes(size_bytes),
        duration(cell.as_nanos() as f64)
    ));
    Ok(found)
}
