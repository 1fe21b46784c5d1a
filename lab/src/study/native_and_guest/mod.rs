//! The study `native-and-guest`: a disk on the host, and the same disk in a virtual machine.
//!
//! The paper ("Virtual Hard Disk Performance", "Comparison of Native and Virtual Machine VHD
//! Performance") measures a physical disk and a fixed VHD on the host and in a Hyper-V guest. This
//! study does so with the program's own door for virtual machines:
//!
//! ```text
//!   native   generator ─▶ engine ─▶ disk                                           = base
//!   guest    generator ─▶ virtio-blk ─▶ QEMU's shared memory ─▶ vhost-user ─▶ engine ─▶ disk
//!            └──────── virtual machine ────────┘                └──── this process ────┘
//! ```
//!
//! Both ways lead to the same open disk in the same process, so to the same blocks of the storage.
//! Besides a raw file, a fixed VHD and a dynamic VHDX there is the `null` disk, which completes
//! every request at once and moves no data. What the guest reaches with it is the limit of virtual
//! machine and door. What another disk takes beyond it is the cost of that disk.
//!
//! While the guest measures, this process only serves: its CPU time is the server's. An emulated
//! guest is slow, so its IOPS and latencies say little about the disk. Server CPU time and the
//! number of requests that reach the server do not depend on the guest's speed, and are compared
//! then.
//!
//! | file | idea |
//! |---|---|
//! | `options.rs` | options of the study |
//! | `record.rs` | the saved result, and figures computed from it |
//! | `measure.rs` | disks, servers, guest; interleaved rounds |
//! | `verdict.rs` | the verdict |

#[cfg(test)]
pub(crate) mod example;
mod measure;
mod options;
pub mod record;
pub mod verdict;

pub use options::NativeAndGuestOptions;
pub use record::{NativeAndGuestResult, SCHEMA};

use crate::{
    Result,
    cells::Compared,
    guest::Kernel,
    progress::Progress,
    scratch::Scratch,
    study::{StudyReport, warnings as shared},
};
use diskwright_load::{
    machine::{OtherLoad, Place, Versions},
    record::Head,
    warning::Warning,
    workload::{Direction, Pattern, Workload},
};
use measure::Plan;
use std::time::Duration;

const QUICK_BYTES: u64 = 256 << 20;
const FULL_BYTES: u64 = 8 << 30;
/// After this time a quick study begins no more rounds.
const QUICK_TIME: Duration = Duration::from_secs(95);
const SEED: u64 = 0x6775_6573;

/// The workloads of the study.
fn workloads(quick: bool) -> Vec<Workload> {
    let of = |pattern, kib: u32, depth| {
        [Direction::Read, Direction::Write].map(|direction| Workload::new(pattern, direction, kib << 10, depth))
    };
    let depth = crate::paper::QUEUE_DEPTH;
    let mut all = of(Pattern::Random, 4, 1).to_vec();
    let (random, sequential): (&[u32], &[u32]) = if quick { (&[4], &[64]) } else { (&[4, 8, 64], &[64, 256, 1024]) };
    all.extend(random.iter().flat_map(|kib| of(Pattern::Random, *kib, depth)));
    all.extend(sequential.iter().flat_map(|kib| of(Pattern::Sequential, *kib, depth)));
    all
}

/// Runs the study and saves its result. The guest, the servers and the scratch folder are removed
/// in all cases.
///
/// # Errors
/// No kernel or no QEMU; no space; a disk or a guest that fails; [`LabError::Stopped`] if it is
/// stopped before the first whole round.
///
/// [`LabError::Stopped`]: crate::LabError::Stopped
pub fn run(options: &NativeAndGuestOptions, progress: &mut dyn Progress) -> Result<StudyReport<NativeAndGuestResult>> {
    let study = &options.study;
    let kernel = Kernel::find(options.guest.kernel.as_deref())?;
    measure::need_qemu()?;
    let wanted_bytes = options.size_bytes.unwrap_or(study.pick(QUICK_BYTES, FULL_BYTES));
    let size_bytes = wanted_bytes.max(1).next_multiple_of(32 << 20);
    let begun = study.begin("native-and-guest", SCHEMA)?;
    let cell = study.cell.unwrap_or(Duration::from_millis(study.pick(400, 10_000)));
    let plan = Plan {
        rounds: study.rounds_or(study.pick(3, 5))?,
        cell,
        size_bytes,
        engine: study.engine,
        seed: SEED,
        workloads: workloads(study.quick),
        until: (study.quick && study.rounds.is_none()).then(|| begun.start + QUICK_TIME),
    };
    let scratch = Scratch::new(study.dir.as_deref(), study.keep)?;
    let place = Place::detect(scratch.path());
    scratch.need("the study", 3 * size_bytes + (1 << 30))?;
    let watch = OtherLoad::watch();
    let measured = measure::measure(&scratch, &kernel, &options.guest, &plan, progress)?;
    let mut warnings = shared::of_machine(&begun.head.machine);
    warnings.extend(warnings_of(&measured, &plan));
    // QEMU is another process, and keeps its processors busy on purpose: only stolen time counts.
    let (_, stolen_cpus) = watch.since();
    warnings.extend(shared::of_others(0.0, stolen_cpus));
    let stopped = measured.done.stopped;
    let head = begun.end(verdict::verdict(&measured.cells, measured.guest.accelerator, stopped), stopped);
    let versions = Versions { qemu: crate::peer::qemu_version(), ..head.versions.clone() };
    let result = NativeAndGuestResult {
        head: Head { place: Some(place), versions, warnings, ..head },
        quick: study.quick,
        size_bytes,
        cell_ns: cell.as_nanos() as u64,
        rounds: plan.rounds,
        guest: measured.guest,
        cells: measured.cells,
    };
    Ok(StudyReport::save(result, &begun.output, stopped))
}

/// Warnings about the measured cells.
fn warnings_of(measured: &measure::Measured, plan: &Plan) -> Vec<Warning> {
    let mut warnings = Vec::new();
    if !measured.cached.is_empty() {
        warnings.push(Warning::DirectNotHonoured { targets: measured.cached.clone() });
    }
    if measured.done.whole < plan.rounds && !measured.done.stopped {
        let what = format!("{} of {} rounds", plan.rounds - measured.done.whole, plan.rounds);
        let why = "the time budget of two minutes ended; the machine is slow or busy".into();
        warnings.push(Warning::LeftOut { what, why });
    }
    let ratios: Vec<_> = Compared::all(&measured.cells)
        .iter()
        .flat_map(|group| group.ratios(|round| round.iops))
        .filter_map(|(cell, ratio)| Some((format!("{}, {}", cell.part, cell.title()), ratio?)))
        .collect();
    warnings.extend(shared::spread(&ratios));
    warnings
}
