//! The study `access-paths`: the cost of reaching a disk over NBD, NVMe/TCP, iSCSI or SMB, as an
//! attached device, from a guest, or from many machines.
//!
//! The paper ("Measuring SMB 3.0, iSCSI, and FC Protocols") compares three protocols on one storage
//! system with an OLTP load of twenty clients. Its scale sets the first protocol to 100. This study
//! reaches the same fully allocated disk in many ways, on three scales:
//!
//! ```text
//!   in process   generator ─▶ engine ─▶ disk                                        = 100
//!   NBD          generator ─▶ client ─▶ unix socket ─▶ `serve` ─▶ engine ─▶ disk
//!   NBD, TCP     generator ─▶ client ─▶ loopback ─▶ `serve` ─▶ engine ─▶ disk
//!   NVMe/TCP     generator ─▶ host ─▶ loopback ─▶ `serve` ─▶ engine ─▶ disk
//!   iSCSI        generator ─▶ initiator ─▶ loopback ─▶ `serve` ─▶ engine ─▶ disk
//!   attach       generator ─▶ loop device ─▶ FUSE ─▶ `attach` ─▶ engine ─▶ disk
//!   raw file     generator ─▶ raw file               control: no container
//!   qemu-nbd     generator ─▶ client ─▶ unix socket ─▶ qemu-nbd ─▶ raw file          peer
//!
//!   in a guest:
//!   vhost-user   generator ─▶ virtio-blk ─▶ QEMU, `serve` ─▶ engine ─▶ disk         = 100
//!   NVMe/TCP     generator ─▶ the kernel's host ─▶ `serve` ─▶ engine ─▶ disk
//!   iSCSI        generator ─▶ the kernel's initiator ─▶ `serve` ─▶ engine ─▶ disk
//!   SMB          generator ─▶ the kernel's client ─▶ Samba ─▶ FUSE ─▶ `attach` ─▶ engine ─▶ disk
//!
//!   by agents of a fleet, on other machines or on this one; the first has 100:
//!   NBD          20 clients of all agents ─▶ network ─▶ `serve` ─▶ engine ─▶ disk
//!   NVMe/TCP     20 clients of all agents ─▶ network ─▶ `serve` ─▶ engine ─▶ disk
//!   iSCSI        20 clients of all agents ─▶ network ─▶ `serve` ─▶ engine ─▶ disk
//! ```
//!
//! Host and guest are never on one scale: the guest's processor may be emulated. The ways over TCP
//! are measured a second time over an emulated network, because loopback has no delay and no limit.
//! Agents are the paper's own setting, twenty real clients of one server, so their scale is the
//! paper's: no disk in process, but the first protocol is 100.
//!
//! On the host each cell begins with the disk as it was filled: writes go to an ephemeral child
//! that is dropped with its server. The raw file is overwritten in place with incompressible data.
//! In the guest and by agents each access path begins so, and its three loads follow one another.
//! Servers are child processes of this program, so their CPU time can be read. The CPU time of
//! kernel threads behind a loop device is only in the machine's figure.
//!
//! | file | idea |
//! |---|---|
//! | `options.rs`, `paper.rs` | options of the study; the paper's load and figures |
//! | `way.rs` | the access paths, and the scales on which they are compared |
//! | `record.rs` | the saved result, and figures computed from it |
//! | `setup.rs` | sets up an access path for each cell, and always takes it down |
//! | `measure.rs` | one cell; interleaved rounds |
//! | `sequence.rs` | test sequences of three loads, in a guest and by agents |
//! | `in_guest.rs`, `samba.rs` | the access paths from a guest; a Samba server for one of them |
//! | `agents.rs`, `agent_server.rs` | the access paths of agents; the servers for them |
//! | `verdict.rs` | the verdict |

mod agent_server;
mod agents;
#[cfg(test)]
pub(crate) mod example;
mod in_guest;
mod measure;
mod options;
mod paper;
pub mod record;
mod samba;
mod sequence;
mod setup;
pub mod verdict;
mod way;

pub use agent_server::AgentServer;
pub use options::{AccessPathsOptions, AgentsChoice};
pub use paper::{CLIENTS, LOADS, PAPER_WITHIN};
pub use record::{
    AccessPathRecord, AccessPathsResult, AgentsRecord, ClientsRecord, NetworkRecord, SCHEMA, SERVER_CPU_NS,
};
pub use way::{AccessPath, Scale};

use crate::{
    LabError, Result,
    cells::Compared,
    guest::GuestRecord,
    network::Network,
    progress::{Progress, report},
    ratio::Ratio,
    scratch::Scratch,
    study::{StudyReport, warnings as shared},
    targets::{self, Container, Preparation},
};
use diskwright_load::{
    machine::{Place, Versions},
    record::{End, Head},
    warning::Warning,
};
use diskwright_store::CacheMode;
use measure::{Measured, Plan};
use setup::Disks;
use std::{
    path::{Path, PathBuf},
    time::Duration,
};

/// Small, because random writes leave a child with many extents. On a larger disk, freeing the
/// child between cells would take longer than measuring.
const QUICK_BYTES: u64 = 256 << 20;
const FULL_BYTES: u64 = 16 << 30;
/// After this time a quick study begins no more rounds on the host. One round in the guest follows,
/// and one or more of the agents.
const QUICK_TIME: Duration = Duration::from_secs(80);
const SEED: u64 = 0x7061_7468;

/// Runs the study and saves its result. Servers, devices and the scratch folder are removed in all
/// cases.
///
/// # Errors
/// No space; a disk or a server that fails; [`LabError::Stopped`] if it is stopped before the first
/// whole round.
pub fn run(options: &AccessPathsOptions, progress: &mut dyn Progress) -> Result<StudyReport<AccessPathsResult>> {
    let study = &options.study;
    let container = options.disk.unwrap_or(Container::VhdxDynamic);
    if container.disk_type() == diskwright_image::DiskType::Differencing {
        return Err(LabError::BadOptions {
            what: format!(
                "{} cannot be the disk of this study: the study creates its own child for writes",
                container.name()
            ),
            hint: "use a fixed or a dynamic disk, or raw".into(),
        });
    }
    let wanted_bytes = options.size_bytes.unwrap_or(study.pick(QUICK_BYTES, FULL_BYTES));
    let size_bytes = wanted_bytes.max(1).next_multiple_of(32 << 20);
    let begun = study.begin("access-paths", SCHEMA)?;
    let plan = Plan {
        rounds: study.rounds_or(study.pick(3, 5))?,
        cell: study.cell.unwrap_or(Duration::from_millis(study.pick(600, 30_000))),
        engine: study.engine,
        seed: SEED,
        until: (study.quick && study.rounds.is_none()).then(|| begun.start + QUICK_TIME),
    };
    // Before the disk is made, which may take long.
    let agents = agents::meet(options)?;
    let scratch = Scratch::new(study.dir.as_deref(), study.keep)?;
    let place = Place::detect(scratch.path());
    // The disk, the raw file, and a child that may grow as large as the disk.
    scratch.need("the study", 3 * size_bytes + (1 << 30))?;
    let disks = prepare(&scratch, container, size_bytes, options, progress)?;
    scratch.settle()?;
    let mut ways = disks.probe(options, progress)?;
    let to_measure: Vec<AccessPath> =
        ways.iter().filter(|record| record.skipped.is_none()).map(|record| record.way).collect();
    let mut measured = measure::measure(&disks, &to_measure, &plan, progress)?;
    let in_guest = if measured.done.stopped {
        in_guest::Measured::default()
    } else {
        let rounds = if study.quick && study.rounds.is_none() { 1 } else { plan.rounds };
        let plan = Plan { rounds, until: None, ..plan };
        in_guest::measure(&disks, options, &plan, progress)?
    };
    let by_agents = match agents {
        None => agents::Measured::nothing(Scale::Agents.ways().map(AccessPathRecord::not_wanted).collect()),
        Some(_) if measured.done.stopped || in_guest.stopped => agents::Measured::default(),
        Some(agents) => agents.measure(&disks, &plan, progress)?,
    };
    measured.cells.extend(in_guest.cells);
    measured.cells.extend(by_agents.cells);
    let failed = match by_agents.failed {
        Some(error) if measured.cells.is_empty() => return Err(error),
        failed => failed,
    };
    let stopped = measured.done.stopped || in_guest.stopped || by_agents.stopped;
    if stopped && measured.cells.is_empty() {
        return Err(LabError::Stopped);
    }
    ways.extend(in_guest.ways);
    ways.extend(by_agents.ways);
    let is_used = ways.iter().any(|record| record.skipped.is_none() && record.way.is_over_network());
    let has_delay = disks.network.as_ref().is_ok_and(Network::has_delay);
    let network = options.network.filter(|_| is_used).map(|spec| NetworkRecord { spec, has_delay });
    let mut warnings = shared::of_machine(&begun.head.machine);
    warnings.extend(warnings_of(&measured, &ways, network, disks.cache));
    warnings.extend(in_guest.guest.as_ref().and_then(|guest| stalling_host(guest, &ways)));
    warnings.extend(by_agents.warnings);
    let whole = measured.done.whole;
    let fewest = if by_agents.agents.is_some() { whole.min(by_agents.whole) } else { whole };
    if fewest < plan.rounds && !stopped && failed.is_none() {
        let what = format!("{} of {} rounds", plan.rounds - fewest, plan.rounds);
        let why = "the time budget of a quick study ended; the machine is slow or busy".into();
        warnings.push(Warning::LeftOut { what, why });
    }
    let is_of_agents = by_agents.stopped || failed.is_some();
    let partial = if is_of_agents { Some(by_agents.whole) } else { stopped.then_some(whole) };
    let verdict = verdict::verdict(&measured.cells, &ways, partial.map(|whole| (whole, plan.rounds)));
    let mut head = begun.end(verdict, stopped);
    if let Some(error) = &failed {
        let first = format!("agents, round {} of {}: {error}", by_agents.whole + 1, plan.rounds);
        head.end = End::Failed { first, errors: 0 };
    }
    let versions = Versions { qemu: crate::peer::qemu_version(), ..head.versions.clone() };
    let result = AccessPathsResult {
        head: Head { place: Some(place), versions, warnings, ..head },
        quick: study.quick,
        disk: container,
        size_bytes,
        cell_ns: plan.cell.as_nanos() as u64,
        rounds: plan.rounds,
        ways,
        network,
        guest: in_guest.guest,
        agents: by_agents.agents,
        cells: measured.cells,
    };
    Ok(StudyReport { failed, ..StudyReport::save(result, &begun.output, stopped) })
}

/// Creates the disk and the raw file, fills both with the same data, and verifies both.
fn prepare(
    scratch: &Scratch,
    container: Container,
    size_bytes: u64,
    options: &AccessPathsOptions,
    progress: &mut dyn Progress,
) -> Result<Disks> {
    let engine = options.study.engine;
    let dir = scratch.folder("disks")?;
    let dir = dir.canonicalize().map_err(LabError::file("find", &dir))?;
    let how = Preparation { size_bytes, seed: SEED, cache: CacheMode::Direct, engine };
    let mut done = 0;
    let mut make = |container: Container, dir: &Path| -> Result<(PathBuf, CacheMode, u64)> {
        let mut tick = |filled| report(progress, "prepare", done + filled, 4 * size_bytes, container.name());
        let path = targets::make_filled(container, dir, &how, &mut tick)?;
        done += size_bytes;
        let mut tick = |read| report(progress, "prepare", done + read, 4 * size_bytes, container.name());
        let target = targets::open_verified(container, path.clone(), &how, &mut tick)?;
        done += size_bytes;
        let (cache, size_bytes) = (target.cache, target.device().geometry().size_bytes);
        target.close()?;
        Ok((path, cache, size_bytes))
    };
    // Some formats round the size up.
    let (disk, cache, size_bytes) = make(container, &dir)?;
    let raw_dir = dir.join("raw");
    std::fs::create_dir(&raw_dir).map_err(LabError::file("create", &raw_dir))?;
    let (raw, ..) = make(Container::Raw, &raw_dir)?;
    let network = options.network.as_ref().map_or_else(|| Err("no network was wanted".into()), Network::start);
    let (program, emulated) = (options.program.clone(), options.network);
    Ok(Disks { container, disk, size_bytes, raw, dir, cache, engine, program, emulated, network })
}

/// The warning about the NVMe/TCP host of a guest's kernel, which is fixed in a newer one.
fn stalling_host(guest: &GuestRecord, ways: &[AccessPathRecord]) -> Option<Warning> {
    let is_nvme = |way| matches!(way, AccessPath::GuestNvme | AccessPath::GuestNvmeNetwork);
    let is_measured = ways.iter().any(|record| record.skipped.is_none() && is_nvme(record.way));
    let kernel = &guest.machine.kernel;
    let major = kernel.strip_prefix("Linux ")?.split('.').next()?.parse::<u32>().ok()?;
    (is_measured && major < 7).then(|| Warning::StallingHost { kernel: kernel.clone() })
}

/// Warnings about the measured cells.
fn warnings_of(
    measured: &Measured,
    ways: &[AccessPathRecord],
    network: Option<NetworkRecord>,
    cache: CacheMode,
) -> Vec<Warning> {
    let mut warnings = Vec::new();
    if cache == CacheMode::PageCache {
        warnings.push(Warning::DirectNotHonoured { targets: vec!["the disk".into(), "the raw file".into()] });
    }
    if network.is_some_and(|network| !network.has_delay) {
        let why = "the kernel has no netem; only the rate is limited".into();
        warnings.push(Warning::LeftOut { what: "the delay of the emulated network on the host".into(), why });
    }
    for record in ways {
        if let Some(why) = record.skipped.as_ref().filter(|why| *why != record::NOT_WANTED) {
            warnings.push(Warning::LeftOut { what: record.way.name().into(), why: why.clone() });
        }
    }
    let loads = Compared::all(&measured.cells);
    let ratios: Vec<(String, Ratio)> = loads
        .iter()
        .flat_map(|load| load.ratios(|round| round.iops))
        .filter_map(|(cell, ratio)| Some((format!("{}, {} load", cell.subject, Scale::of_part(&cell.part).1), ratio?)))
        .collect();
    warnings.extend(shared::spread(&ratios));
    // From cells without a server: the server's CPU time would count as that of other programs.
    warnings.extend(shared::of_others(measured.others_cpus, measured.stolen_cpus));
    warnings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest::Accelerator;
    use diskwright_load::machine::Machine;

    #[test]
    fn a_guest_whose_nvme_host_stalls_is_told() {
        let warned = |kernel: &str, way, skipped: Option<String>| {
            let machine = Machine { kernel: kernel.into(), ..Machine::default() };
            let guest = GuestRecord { accelerator: Accelerator::Tcg, machine };
            stalling_host(&guest, &[AccessPathRecord { way, skipped }]).is_some()
        };
        assert!(warned("Linux 6.12.117+deb12", AccessPath::GuestNvme, None));
        assert!(!warned("Linux 7.3.4+deb13", AccessPath::GuestNvme, None));
        assert!(!warned("Linux 6.12.117", AccessPath::GuestIscsi, None));
        assert!(!warned("Linux 6.12.117", AccessPath::GuestNvmeNetwork, Some("no network was wanted".into())));
    }
}
