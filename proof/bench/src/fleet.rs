//! Fleets: agents as programs of their own on this machine.
//!
//! - Eight agents against one generator with eight threads, and what the controller costs.
//! - Two hundred agents: time from the plan to the start, and the controller's memory.
//! - The offset of clocks over a network with uneven delays. All programs here read the same clock,
//!   so the true offset is 0.

use crate::{ours, turns::in_turns};
use diskwright_fleet::{
    FleetError,
    address::Address,
    controller::{Fleet, FleetLook, FleetOptions, OnLoss, Remote, Wanted, Way},
    identity::Identity,
    uneven,
};
use diskwright_lab::{
    LabError, Result,
    acceptance::{Bar, Check, Context, RowOutcome},
    measure,
    open::{self, OpenHow},
    peer,
    progress::{Progress, report},
    rounds::Window,
    scratch::Scratch,
    targets::{Container, make_filled},
};
use diskwright_load::{
    Job,
    clock::CpuTime,
    job::{Caching, Load, Rate, Span},
    machine::resident_bytes,
    run::RunOptions,
};
use diskwright_store::CacheMode;
use std::{
    io::{BufRead, BufReader},
    process::{Child, Stdio},
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

/// An agent as a program of its own, which ends with this value.
#[derive(Debug)]
struct Agent {
    child: Child,
    address: Address,
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn failed(error: FleetError) -> LabError {
    error.into()
}

/// Starts agents of a target that is only read. Their keys lie in the scratch folder.
fn agents(scratch: &Scratch, count: usize, target: &str, controller: &Identity) -> Result<Vec<Agent>> {
    let state = scratch.folder("agents")?;
    (0..count)
        .map(|_| {
            let fail = || LabError::file("start an agent in", &state);
            let mut child = ours::command()?
                .args(["lab", "agent", "--listen", "127.0.0.1:0", "--read-only", "--controller"])
                .args([&controller.fingerprint.to_string(), &format!("data={target}")])
                .env("XDG_STATE_HOME", &state)
                .stdout(Stdio::piped())
                .stderr(Stdio::null())
                .spawn()
                .map_err(fail())?;
            let mut line = String::new();
            if let Some(printed) = child.stdout.take() {
                BufReader::new(printed).read_line(&mut line).map_err(fail())?;
            }
            let address = line.trim_end().parse::<Address>().map_err(failed)?;
            Ok(Agent { child, address })
        })
        .collect()
}

fn fleet(run: &str, addresses: &[Address], identity: &Identity) -> Result<Fleet> {
    let wanted: Vec<Wanted> = addresses
        .iter()
        .enumerate()
        .map(|(number, address)| Wanted {
            name: format!("agent {}", number + 1),
            group: "all".into(),
            way: Way::Dial(address.clone()),
            targets: Vec::new(),
        })
        .collect();
    let options = FleetOptions {
        identity: identity.clone(),
        lost_after: Duration::from_secs(10),
        on_loss: OnLoss::Stop,
        keep_going: false,
        labels: Vec::new(),
    };
    Fleet::connect(run, &wanted, options, None).map_err(failed)
}

fn prepared(fleet: &mut Fleet, job: &Job) -> Result<()> {
    fleet.prepare(&|_: &Remote| job.clone(), false, &|_, _, _, _| true).map_err(failed)
}

/// Eight agents with one thread each against one generator with eight threads, from the page cache.
pub(crate) fn eight(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    const COUNT: usize = 8;
    let size_bytes: u64 = context.pick(256 << 20, 1 << 30);
    context.scratch.need("this file", size_bytes)?;
    let dir = context.scratch.folder("fleet")?;
    let how = context.preparation(size_bytes, CacheMode::PageCache);
    let path = make_filled(Container::Raw, &dir, &how, &mut |_| Ok(()))?;
    peer::warm(&path)?;
    let identity = Identity::temporary().map_err(failed)?;
    let agents = agents(&context.scratch, COUNT, &path.to_string_lossy(), &identity)?;
    let addresses: Vec<Address> = agents.iter().map(|agent| agent.address.clone()).collect();
    let load = Load { queue_depth: 1, ..Load::default() };
    let measured = Span::from_millis(context.pick(1000, 4000));
    let mut job = Job::simple("fleet", load, Span::from_millis(300), measured);
    (job.cache, job.engine) = (Caching::Cached, context.options.engine.into());
    let mut eight = job.clone();
    eight.phases[0].loads[0].threads = COUNT as u32;
    let own = open::open(&path.to_string_lossy(), &OpenHow { cache: Caching::Cached, ..OpenHow::default() })?;
    let mut fleet = fleet("eight", &addresses, &identity)?;
    prepared(&mut fleet, &job)?;
    let rounds = context.rounds(context.pick(5, 15));
    let mut rates = [Vec::new(), Vec::new()];
    let mut controller = Vec::new();
    let measured = in_turns(
        "fleet",
        &["eight agents", "eight threads"],
        (rounds, 24),
        progress,
        &mut |Window { cell: who, round }, watch| {
            if who == 1 {
                let job = Job { seed: round as u64 + 1, ..eight.clone() };
                rates[1].push(measure::window(&job, &own, &RunOptions::default(), watch)?.iops());
                return Ok(());
            }
            let job = Job { seed: round as u64 + 1, ..job.clone() };
            let (begun, cpu) = (Instant::now(), CpuTime::of_process());
            let go_on = |look: &FleetLook<'_>| watch.update(&look.sum);
            let run = fleet.measure(COUNT, &|_| job.clone(), &go_on).map_err(failed)?;
            let spent_ns = (CpuTime::of_process() - cpu).total_ns() as f64;
            controller.push(spent_ns / begun.elapsed().as_nanos() as f64);
            fleet.kept();
            rates[0].push(run.phases[0].iops());
            Ok(())
        },
    );
    fleet.finish();
    measured?;
    Ok(RowOutcome {
        checks: vec![
            Check::ratio("eight agents to eight threads: IOPS", "IOPS", &rates[0], &rates[1], Bar::AtLeast(0.97)),
            Check::absolute("the controller's share of a core", "cores", &controller, Bar::AtMost(0.01)),
        ],
        notes: vec![format!("4K random read from the page cache, QD 1 for each thread; {rounds} rounds in turns")],
        ..RowOutcome::default()
    })
}

/// Two hundred agents: how long until they measure, and what the controller needs.
pub(crate) fn many(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    let count = context.pick(50, 200);
    let identity = Identity::temporary().map_err(failed)?;
    report(progress, "start agents", 0, 2, &format!("{count} agents"))?;
    let agents = agents(&context.scratch, count, "null:1G", &identity)?;
    let addresses: Vec<Address> = agents.iter().map(|agent| agent.address.clone()).collect();
    let load = Load { queue_depth: 1, rate: Some(Rate::Iops { per_thread: 50.0 }), ..Load::default() };
    let job = Job::simple("many", load, Span::from_millis(500), Span::from_secs(5));
    let (mut starts_s, mut memory_mib) = (Vec::new(), Vec::new());
    let mut requests = Vec::new();
    for round in 0..context.rounds(context.pick(1, 3)) {
        report(progress, "measure", 1, 2, &format!("round {}", round + 1))?;
        let begun = Instant::now();
        let mut fleet = fleet(&format!("many {round}"), &addresses, &identity)?;
        prepared(&mut fleet, &job)?;
        let first_ns = AtomicU64::new(0);
        let highest = AtomicU64::new(0);
        let watch = |look: &FleetLook<'_>| {
            // The start is this long ago.
            let start_ns = begun.elapsed().as_nanos() as u64 - look.sum.elapsed_ns;
            let _ = first_ns.compare_exchange(0, start_ns.max(1), Ordering::Relaxed, Ordering::Relaxed);
            highest.fetch_max(resident_bytes().0, Ordering::Relaxed);
            true
        };
        let run = fleet.measure(count, &|_| job.clone(), &watch).map_err(failed)?;
        fleet.kept();
        fleet.finish();
        starts_s.push(first_ns.into_inner() as f64 / 1e9);
        memory_mib.push(highest.into_inner().max(resident_bytes().0) as f64 / f64::from(1 << 20));
        requests.push(run.phases[0].total().both.ios as f64 / (count as f64 * 50.0 * 5.0));
    }
    Ok(RowOutcome {
        checks: vec![
            Check::absolute("from the plan to the start", "s", &starts_s, Bar::AtMost(5.0)),
            Check::absolute("memory of the controller", "MiB", &memory_mib, Bar::AtMost(256.0)),
            Check::absolute("requests made, of those that were due", "ratio", &requests, Bar::AtLeast(0.98)),
        ],
        notes: vec![format!(
            "{count} agents as programs of their own on this machine; 50 requests a second each; the plan begins with \
             the first connection"
        )],
        ..RowOutcome::default()
    })
}

/// The offset of clocks over a network with uneven delays, against the truth.
pub(crate) fn clocks(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    let tries = context.pick(20, 100);
    let identity = Identity::temporary().map_err(failed)?;
    let agents = agents(&context.scratch, 1, "null:", &identity)?;
    let fail = LabError::file("open a port of", "127.0.0.1");
    let address = uneven::network(&agents[0].address, 5000, 500).map_err(fail)?;
    let (mut within, mut errors_us, mut offs_us) = (0, Vec::new(), Vec::new());
    for number in 0..tries {
        report(progress, "compare clocks", number, tries, "5 ms there, 0.5 ms back")?;
        let fleet = fleet(&format!("clocks {number}"), std::slice::from_ref(&address), &identity)?;
        let Some(clock) = fleet.remotes()[0].clock().map(|clock| clock.record()) else { continue };
        within += u64::from(clock.offset_ns.unsigned_abs() <= clock.error_ns);
        errors_us.push(clock.error_ns as f64 / 1e3);
        offs_us.push(clock.offset_ns.unsigned_abs() as f64 / 1e3);
    }
    let share = within as f64 / tries as f64;
    Ok(RowOutcome {
        checks: vec![
            Check::absolute("offsets within the stated error", "ratio", &[share], Bar::AtLeast(0.99)),
            Check::absolute("stated error", "us", &errors_us, Bar::AtMost(2500.0)),
        ],
        notes: vec![format!(
            "{tries} tries; delays up to 5 ms to the agent and 0.5 ms back; largest true error {:.0} us",
            offs_us.iter().copied().fold(0.0, f64::max)
        )],
        ..RowOutcome::default()
    })
}
