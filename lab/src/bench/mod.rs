//! The promises of the engine, measured against their peers, side by side: what `diskwright bench`
//! runs.
//!
//! Each [`Row`] is one line of the table of what the engine must reach. A row prepares its disks,
//! measures ours and the peer's in turns over several rounds, and judges the median against the
//! bar. A peer that is not installed, or a row that needs what this machine does not have, is
//! *skipped by name*, never counted as passed.
//!
//! ```text
//!   populated.rs   populated disks against the raw file; the same from the page cache
//!   chains.rs      a chain of 1,024 against one; opening it
//!   large.rs       64 TiB: opened, and its map's memory; creating 40 GiB
//!   discard.rs     reads beside a discard of 1 TiB
//!   allocate.rs    unallocated blocks against qemu-io; random writes into an empty disk
//!   convert.rs     against qemu-img, and with reflinks on XFS
//!   serve/         disks that are served by NBD, or attached, against other servers
//!   generator.rs   the lab's generator: its cost beside fio's, and whether both find the same        fio.rs   running fio
//!   peer.rs        finding and running other programs        judge.rs   bars and verdicts
//! ```

mod allocate;
mod chains;
mod convert;
mod discard;
mod fio;
mod generator;
mod judge;
mod large;
pub(crate) mod peer;
mod populated;
mod serve;
mod xfs;

pub use judge::{Bar, Check, Outcome};

use crate::{
    LabError, Result,
    child::{ChildLauncher, engine_word},
    progress::{Progress, report},
    scratch::Scratch,
    targets::Preparation,
};
use diskwright_load::{
    clock,
    machine::{Machine, OtherLoad, Place, Versions},
    warning::Warning,
};
use diskwright_store::{CacheMode, EngineKind};
use serde::{Deserialize, Serialize};
use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

/// Seed of every benchmark's contents and requests; see [`diskwright_load::seeds`].
const SEED: u64 = 0x6265_6e63;

/// Schema of [`BenchReport`].
pub const SCHEMA: &str = "diskwright.bench/1";

/// One promise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Row {
    /// Populated dynamic and differencing disks against the raw file, sixteen workloads, O_DIRECT,
    /// queue depth 32.
    Workloads,
    /// The same disks, 4K random reads from the page cache.
    PageCache,
    /// Reads through a chain of 1,024 disks against a chain of one.
    Chain,
    /// Opening a chain of 1,024 disks of 40 GiB.
    OpenChain,
    /// Opening a 64 TiB VHDX and reading one block.
    OpenLarge,
    /// Memory of a 64 TiB VHDX that is touched everywhere.
    MapMemory,
    /// Reads while a large discard is under way on another queue.
    Discard,
    /// 4 KiB into each of many unallocated blocks, against qemu-io.
    Allocate,
    /// 4K random writes into an empty dynamic VHDX against a preallocated raw file.
    RandomWrite,
    /// Creating a fixed disk of 40 GiB.
    CreateFixed,
    /// Converting raw to VHDX and back, against qemu-img.
    Convert,
    /// The same on XFS, where extents can be shared.
    Reflink,
    /// Served by NBD: a populated dynamic VHDX against qemu-nbd on a raw file.
    NbdIo,
    /// Served by NBD: writes to a dynamic VHD against qemu-nbd.
    NbdVhd,
    /// Served by NBD: writes into an empty dynamic VHDX against qemu-nbd on an empty qcow2.
    NbdEmpty,
    /// Served by NBD: reads from the page cache against nbdkit and qemu-nbd.
    NbdCache,
    /// nbdcopy of a VHDX to nowhere against qemu-nbd.
    NbdCopy,
    /// Attached by FUSE and loop against qemu-storage-daemon.
    Attach,
    /// The lab's generator against fio, 4K random reads from the page cache.
    Generator,
    /// CPU time of the generator against fio's, past the page cache.
    GeneratorCpu,
    /// What recording every latency costs.
    Recording,
    /// The generator against nothing.
    Null,
    /// What a run keeps in memory, whose latencies support eight nines.
    Memory,
    /// Whether the generator finds what fio finds.
    Agreement,
}

impl Row {
    /// All rows, in the order of the table.
    pub const ALL: [Self; 24] = [
        Self::Workloads,
        Self::PageCache,
        Self::Chain,
        Self::OpenChain,
        Self::OpenLarge,
        Self::MapMemory,
        Self::Discard,
        Self::Allocate,
        Self::RandomWrite,
        Self::CreateFixed,
        Self::Convert,
        Self::Reflink,
        Self::NbdIo,
        Self::NbdVhd,
        Self::NbdEmpty,
        Self::NbdCache,
        Self::NbdCopy,
        Self::Attach,
        Self::Generator,
        Self::GeneratorCpu,
        Self::Recording,
        Self::Null,
        Self::Memory,
        Self::Agreement,
    ];

    /// Those that are about the generator itself: what `lab selftest` runs.
    pub const SELFTEST: [Self; 5] = [Self::Generator, Self::GeneratorCpu, Self::Recording, Self::Null, Self::Memory];

    /// The name by which it is selected.
    pub fn name(self) -> &'static str {
        match self {
            Self::Workloads => "workloads",
            Self::PageCache => "page-cache",
            Self::Chain => "chain",
            Self::OpenChain => "open-chain",
            Self::OpenLarge => "open-large",
            Self::MapMemory => "map-memory",
            Self::Discard => "discard",
            Self::Allocate => "allocate",
            Self::RandomWrite => "random-write",
            Self::CreateFixed => "create-fixed",
            Self::Convert => "convert",
            Self::Reflink => "reflink",
            Self::NbdIo => "nbd-io",
            Self::NbdVhd => "nbd-vhd",
            Self::NbdEmpty => "nbd-empty",
            Self::NbdCache => "nbd-cache",
            Self::NbdCopy => "nbd-copy",
            Self::Attach => "attach",
            Self::Generator => "generator",
            Self::GeneratorCpu => "generator-cpu",
            Self::Recording => "recording",
            Self::Null => "null",
            Self::Memory => "memory",
            Self::Agreement => "agreement",
        }
    }

    /// The row of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|row| row.name() == name)
    }

    /// What is promised, in words.
    pub fn title(self) -> &'static str {
        match self {
            Self::Workloads => {
                "populated dynamic and differencing disks against the raw file, 16 workloads, O_DIRECT, QD 32: 0.95 of the IOPS, 1.10 of the CPU in 126 of 128 comparisons"
            }
            Self::PageCache => {
                "the same, 4K random read from the page cache, which reading has filled: 0.95 of the IOPS"
            }
            Self::Chain => "chain of 1,024 disks against a chain of one, 4K random and 64K sequential read: 0.95",
            Self::OpenChain => "opening a chain of 1,024 disks of 40 GiB: under 1 s and 256 MiB",
            Self::OpenLarge => "opening a VHDX of 64 TiB and reading one block: under 50 ms and 32 MiB",
            Self::MapMemory => {
                "a VHDX of 64 TiB in blocks of 1 MiB, touched everywhere at random: the memory of its map within what is asked for"
            }
            Self::Discard => {
                "4K random read at QD 8 while another queue discards 1 TiB of allocated blocks: at most twice the p99"
            }
            Self::Allocate => {
                "4 KiB into each of many unallocated 2 MiB blocks, then a flush, against qemu-io: 20 times as fast on VHDX, 6 on VHD"
            }
            Self::RandomWrite => {
                "4K random write at QD 32 into an empty dynamic VHDX against a preallocated raw file: 0.90"
            }
            Self::CreateFixed => "creating a fixed disk of 40 GiB with its space allocated: under 1 s",
            Self::Convert => "convert raw to dynamic VHDX and back against qemu-img: 1.2 times as fast, less CPU",
            Self::Reflink => "the same on XFS with reflinks: 20 times as fast",
            Self::NbdIo => {
                "served by NBD, 4K random read and write at QD 32 from fio over a unix socket, populated dynamic VHDX against qemu-nbd on a raw file: 1.3 times the IOPS, 0.6 of the server's CPU per I/O"
            }
            Self::NbdVhd => "the same, writes to a dynamic VHD against qemu-nbd: 8 times",
            Self::NbdEmpty => {
                "the same, writes into an empty dynamic VHDX against qemu-nbd on an empty qcow2: 1.5 times"
            }
            Self::NbdCache => {
                "the same, reads from the page cache over four connections: 1.2 times the better of nbdkit and qemu-nbd"
            }
            Self::NbdCopy => "nbdcopy of a VHDX of 4 GiB to null: the disk's own speed, 1.2 times qemu-nbd",
            Self::Attach => {
                "attached by FUSE and loop, 4K random read at QD 32, against qemu-storage-daemon on a raw file: 1.5 times, and what fio writes at any depth comes back"
            }
            Self::Generator => {
                "the generator against fio's io_uring engine, 4K random read from the page cache, QD 32, one core: 1.6 times the IOPS of its defaults, 1.3 with registered files and buffers and batching in both"
            }
            Self::GeneratorCpu => "the same with O_DIRECT: 0.8 and 0.9 of fio's CPU time per I/O",
            Self::Recording => "recording every latency: within 5 % of the CPU time per I/O without",
            Self::Null => "the generator against nothing: 10 million requests a second on one core",
            Self::Memory => "memory of a run of eight nines, of any length: under 64 MiB for each thread",
            Self::Agreement => {
                "the generator and fio on ten workloads on a raw file: IOPS and mean latency within 5 % of fio's, beyond chance"
            }
        }
    }
}

/// How to run.
#[derive(Debug, Clone, Default)]
pub struct BenchOptions {
    /// Smaller disks, fewer blocks, shorter cells: a look, not a proof.
    pub quick: bool,
    /// Where to make the scratch folder; the current folder unless said.
    pub dir: Option<PathBuf>,
    /// Rounds of each comparison; each row has its own number unless said.
    pub rounds: Option<usize>,
    /// Time of one cell of the workload rows, warm-up included: 0.1 s quick, 0.25 s else.
    pub cell: Option<Duration>,
    /// What moves our bytes.
    pub engine: EngineKind,
    /// How to start the program again: to measure opening in a fresh process, and as a server. The
    /// rows that need it are skipped without.
    pub launcher: Option<ChildLauncher>,
    /// Leave the scratch folder.
    pub keep: bool,
}

/// What one row found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RowResult {
    /// Which.
    pub row: Row,
    /// [`Row::title`].
    pub title: String,
    /// The worst of its checks.
    pub outcome: Outcome,
    /// Every figure that was judged.
    pub checks: Vec<Check>,
    /// What a reader must know: sizes, what was left out.
    pub notes: Vec<String>,
    /// How long it took, nanoseconds.
    pub took_ns: u64,
}

/// All rows that were run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BenchReport {
    /// [`SCHEMA`].
    pub schema: String,
    /// When it began.
    pub started_utc: String,
    /// How long it took, nanoseconds.
    pub took_ns: u64,
    /// On what.
    pub machine: Machine,
    /// Where.
    pub place: Place,
    /// By which programs.
    pub versions: Versions,
    /// Whether it was only a look.
    pub quick: bool,
    /// "auto", "io_uring" or "pread".
    pub engine: String,
    /// The rows.
    pub rows: Vec<RowResult>,
    /// Reasons for doubt.
    pub warnings: Vec<Warning>,
    /// Whether the user ended it before all rows were measured; those that were are there.
    #[serde(default)]
    pub stopped: bool,
}

impl BenchReport {
    /// Whether no row failed. Skipped and unsure rows do not count, either way.
    pub fn passed(&self) -> bool {
        self.rows.iter().all(|row| row.outcome != Outcome::Fail)
    }
}

/// What every row is given.
pub(crate) struct Bench<'a> {
    pub(crate) options: &'a BenchOptions,
    pub(crate) scratch: Scratch,
}

/// What a row gives back.
#[derive(Debug, Default)]
pub(crate) struct Found {
    pub(crate) checks: Vec<Check>,
    pub(crate) notes: Vec<String>,
    /// So many of the checks may be missed or unsure, and the row is kept all the same.
    pub(crate) may_miss: usize,
}

impl Found {
    /// A row that cannot be run here.
    pub(crate) fn skipped(name: &str, why: impl Into<String>) -> Self {
        Self { checks: vec![Check::skipped(name, why)], ..Self::default() }
    }
}

impl Bench<'_> {
    /// Chosen by `quick`.
    pub(crate) fn pick<T>(&self, quick: T, full: T) -> T {
        if self.options.quick { quick } else { full }
    }

    /// Rounds, unless the user says otherwise.
    pub(crate) fn rounds(&self, usual: usize) -> usize {
        self.options.rounds.unwrap_or(usual).max(1)
    }

    /// Time of one cell.
    pub(crate) fn cell(&self) -> Duration {
        self.options.cell.unwrap_or_else(|| Duration::from_millis(self.pick(100, 250)))
    }

    pub(crate) fn preparation(&self, size_bytes: u64, cache: CacheMode) -> Preparation {
        Preparation { size_bytes, seed: SEED, cache, engine: self.options.engine }
    }
}

/// Runs the rows of `selection` (all for an empty one), one after the other. A row that fails to
/// run counts as failed, with the reason, and the others go on. When `progress` stops it, the rows
/// that were finished are kept ([`BenchReport::stopped`]).
///
/// # Errors
/// When there is no scratch folder to be had, or it cannot be emptied.
pub fn run(selection: &[Row], options: &BenchOptions, progress: &mut dyn Progress) -> Result<BenchReport> {
    let start = Instant::now();
    let started_utc = clock::compact_utc_now();
    let machine = Machine::detect();
    let bench = Bench { options, scratch: Scratch::new(options.dir.as_deref(), options.keep)? };
    let place = Place::detect(bench.scratch.path());
    let mut warnings = Vec::new();
    if cfg!(debug_assertions) {
        warnings.push(Warning::DebugBuild);
    }
    let selection = if selection.is_empty() { &Row::ALL[..] } else { selection };
    let watch = OtherLoad::watch();
    let peers_cpu = clock::CpuTime::of_children();
    let mut rows = Vec::new();
    for (index, row) in selection.iter().enumerate() {
        let measured = report(progress, "bench", index as u64, selection.len() as u64, row.name())
            .and_then(|()| run_row(*row, &bench, progress));
        match measured {
            Ok(row) => rows.push(row),
            Err(LabError::Stopped) => break,
            Err(error) => return Err(error),
        }
    }
    let stopped = rows.len() < selection.len();
    let (busy, stolen) = watch.since();
    let peers_ns = (clock::CpuTime::of_children() - peers_cpu).total_ns();
    let busy = busy - peers_ns as f64 / (start.elapsed().as_nanos() as f64).max(1.0);
    if busy > 0.25 {
        warnings.push(Warning::OtherLoad { cpus: busy });
    }
    if stolen > 0.05 {
        warnings.push(Warning::StolenTime { cpus: stolen });
    }
    Ok(BenchReport {
        schema: SCHEMA.into(),
        started_utc,
        took_ns: start.elapsed().as_nanos() as u64,
        machine,
        place,
        versions: Versions { qemu: peer::qemu_version(), ..Versions::detect() },
        quick: options.quick,
        engine: engine_word(options.engine).into(),
        rows,
        warnings,
        stopped,
    })
}

fn run_row(row: Row, bench: &Bench<'_>, progress: &mut dyn Progress) -> Result<RowResult> {
    let start = Instant::now();
    let found = match row {
        Row::Workloads => populated::workloads(bench, progress),
        Row::PageCache => populated::page_cache(bench, progress),
        Row::Chain => chains::reads(bench, progress),
        Row::OpenChain => chains::open(bench, progress),
        Row::OpenLarge => large::open(bench, progress),
        Row::MapMemory => large::map_memory(bench, progress),
        Row::Discard => discard::beside_reads(bench, progress),
        Row::Allocate => allocate::blocks(bench, progress),
        Row::RandomWrite => allocate::random_writes(bench, progress),
        Row::CreateFixed => large::create_fixed(bench, progress),
        Row::Convert => convert::copied(bench, progress),
        Row::Reflink => convert::shared(bench, progress),
        Row::NbdIo => serve::io::populated(bench, progress),
        Row::NbdVhd => serve::io::vhd(bench, progress),
        Row::NbdEmpty => serve::io::empty(bench, progress),
        Row::NbdCache => serve::io::page_cache(bench, progress),
        Row::NbdCopy => serve::copy::nbdcopy(bench, progress),
        Row::Attach => serve::attach::fuse_and_loop(bench, progress),
        Row::Generator => generator::page_cache(bench, progress),
        Row::GeneratorCpu => generator::direct(bench, progress),
        Row::Recording => generator::recording(bench, progress),
        Row::Null => generator::null(bench, progress),
        Row::Memory => generator::memory(bench, progress),
        Row::Agreement => generator::agreement(bench, progress),
    };
    let found = match found {
        Ok(found) => found,
        Err(LabError::Stopped) => return Err(LabError::Stopped),
        Err(error) => Found { checks: vec![Check::broken(row.name(), error.to_string())], ..Found::default() },
    };
    remove_contents(bench)?;
    Ok(RowResult {
        row,
        title: row.title().into(),
        outcome: judge::worst(&found.checks, found.may_miss),
        checks: found.checks,
        notes: found.notes,
        took_ns: start.elapsed().as_nanos() as u64,
    })
}

/// Each row begins with an empty scratch folder, and with nothing left for the file system to do.
fn remove_contents(bench: &Bench<'_>) -> Result<()> {
    if bench.options.keep {
        return Ok(());
    }
    let dir = bench.scratch.path();
    let failed = || LabError::file("empty the scratch folder", dir);
    for entry in std::fs::read_dir(dir).map_err(failed())? {
        let path = entry.map_err(failed())?.path();
        let removed = if path.is_dir() { std::fs::remove_dir_all(&path) } else { std::fs::remove_file(&path) };
        removed.map_err(LabError::file("remove", &path))?;
    }
    bench.scratch.settle()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::Silent;

    #[test]
    fn rows_are_selected_by_name() {
        for row in Row::ALL {
            assert_eq!(Row::from_name(row.name()), Some(row));
            assert_eq!(serde_json::to_string(&row).unwrap(), format!("\"{}\"", row.name()));
        }
        assert_eq!(Row::from_name("nothing"), None);
    }

    #[test]
    fn a_row_without_what_it_needs_is_skipped_by_name_and_leaves_nothing() {
        let home = tempfile::tempdir().unwrap();
        let options = BenchOptions { quick: true, dir: Some(home.path().to_owned()), ..BenchOptions::default() };
        let report = run(&[Row::OpenLarge], &options, &mut Silent).unwrap();
        assert_eq!(report.rows[0].outcome, Outcome::Skipped);
        assert!(report.passed());
        let why = report.rows[0].checks[0].why.as_deref().unwrap_or_default();
        assert!(why.contains("fresh process"), "{why}");
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 0);
        let again: BenchReport = serde_json::from_str(&serde_json::to_string(&report).unwrap()).unwrap();
        assert_eq!(again, report);
    }

    #[test]
    fn a_stopped_bench_keeps_what_it_measured_and_leaves_nothing() {
        let home = tempfile::tempdir().unwrap();
        let options = BenchOptions { quick: true, dir: Some(home.path().to_owned()), ..BenchOptions::default() };
        let first_row_only = &mut |step: crate::progress::Step<'_>| step.phase != "bench" || step.done == 0;
        let report = run(&[Row::OpenLarge, Row::CreateFixed], &options, first_row_only).unwrap();
        assert!(report.stopped && report.rows.len() == 1);
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 0);
    }
}
