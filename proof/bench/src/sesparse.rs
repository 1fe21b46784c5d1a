//! Reading a chain with an SESPARSE redo log, as ESXi keeps snapshots, against the flat file.
//!
//! ```text
//!   flat.vmdk             all data in a flat file
//!   vm.vmdk               the same, but every other MiB has zeros ...
//!     └─ vm-000001.vmdk   ... and its data here, in grains of 4 KiB
//! ```
//!
//! No program here writes SESPARSE, so this module makes the redo log itself. The chain is read
//! through and compared with the data before it is measured: a chain that reads the base where the
//! redo log has data would read zeros.

use diskwright_disk::{CreateRequest, Disk, OpenOptions, create};
use diskwright_format::vmdk::{
    SECTOR_BYTES, SESPARSE_GRAIN_SECTORS, SESPARSE_HEADER_BYTES, SESPARSE_TABLE_ENTRIES, SeSparseGrain, SeSparseHeader,
    sesparse_directory_entry, sesparse_volatile_header,
};
use diskwright_image::LinkageId;
use diskwright_lab::{
    LabError, Result,
    acceptance::{Bar, Check, Context, RowOutcome},
    fill,
    measure::{self, Plan, Ratio, Steps},
    progress::{Progress, report},
    targets::{Preparation, open_target},
};
use diskwright_load::workload::{Direction, Pattern, Workload};
use diskwright_stats::numbers::{bytes, duration};
use diskwright_store::CacheMode;
use std::{
    fs::{self, File},
    os::unix::fs::FileExt,
    path::Path,
    sync::Arc,
    time::Duration,
};

const BAR: Bar = Bar::AtLeast(0.9);
const QUEUE_DEPTH: u32 = 32;
/// Every other piece lies in the redo log.
const PIECE_BYTES: u64 = 1 << 20;
const GRAIN_BYTES: u64 = SESPARSE_GRAIN_SECTORS * SECTOR_BYTES;
/// Place of the first table.
const TABLES_SECTOR: u64 = 64;
const TABLE_SECTORS: u64 = SESPARSE_TABLE_ENTRIES * 8 / SECTOR_BYTES;

pub(crate) fn reads(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    let size_bytes: u64 = context.pick(512 << 20, 2 << 30);
    context.scratch.need("the chain", 3 * size_bytes)?;
    let dir = context.scratch.folder("sesparse")?;
    let how = context.preparation(size_bytes, CacheMode::Direct);
    for name in ["flat", "vm"] {
        make_flat(&dir.join(format!("{name}.vmdk")), &how, progress)?;
    }
    divide(&dir, size_bytes)?;
    let open = |name: &str| -> Result<Arc<Disk>> {
        let options = OpenOptions { cache: how.cache, engine: how.engine, ..OpenOptions::default() };
        Ok(Disk::open(dir.join(name), &options)?)
    };
    let (flat, chain) = (open("flat.vmdk")?, open("vm-000001.vmdk")?);
    fill::verify("the chain", &*chain, how.seed, how.engine, &mut |done| {
        report(progress, "verify", done, size_bytes, "chain")
    })?;
    let targets =
        [("flat file", flat), ("SESPARSE chain", chain)].map(|(name, disk)| open_target(name, "vmdk", disk, how.cache));
    let rounds = context.rounds(context.pick(7, 15));
    let mut found = RowOutcome::default();
    found.notes.push(format!(
        "VMDK of {}, every other MiB of the chain in the redo log; {rounds} rounds, cells of {}, O_DIRECT, QD {QUEUE_DEPTH}",
        bytes(size_bytes),
        duration(context.cell().as_nanos() as f64)
    ));
    for (pattern, block_bytes) in [(Pattern::Random, 4 << 10), (Pattern::Sequential, 64 << 10)] {
        let workload = Workload::new(pattern, Direction::Read, block_bytes, QUEUE_DEPTH);
        let plan = Plan { rounds, warm_up: Duration::ZERO, measured: Duration::ZERO, engine: how.engine, seed: 7 }
            .with_cell(context.cell());
        let mut steps = Steps { progress, phase: "measure", done: 0, total: 2 * rounds as u64 };
        let all = measure::interleaved(&targets, &workload, &plan, &mut steps, &mut |_| Ok(()))?;
        let [flat, chain] = [0, 1].map(|index| all[index].iter().map(|round| round.iops).collect::<Vec<f64>>());
        let name = format!("{}: IOPS", workload.name);
        found.checks.push(match Ratio::of(&chain, &flat) {
            Some(ratio) => Check::of_ratio(name, &ratio, BAR),
            None => Check::broken(&name, "nothing was measured"),
        });
    }
    Ok(found)
}

fn make_flat(path: &Path, how: &Preparation, progress: &mut dyn Progress) -> Result<()> {
    let subformat = Some("zeroedthick".to_owned());
    let request = CreateRequest { size_bytes: Some(how.size_bytes), subformat, ..CreateRequest::default() };
    create(path, &request)?;
    let options = OpenOptions { writable: true, cache: how.cache, engine: how.engine, ..OpenOptions::default() };
    let disk = Disk::open(path, &options)?;
    let shown = path.to_string_lossy();
    fill::fill(&shown, &*disk, how.seed, how.engine, &mut |done| {
        report(progress, "prepare", done, how.size_bytes, &shown)
    })?;
    Ok(disk.close()?)
}

/// Moves every other piece of `vm.vmdk` into a redo log.
fn divide(dir: &Path, size_bytes: u64) -> Result<()> {
    let sectors = size_bytes / SECTOR_BYTES;
    let header = header(sectors);
    let (base, log) = (dir.join("vm-flat.vmdk"), dir.join("vm-000001-sesparse.vmdk"));
    let base_file = File::options().read(true).write(true).open(&base).map_err(LabError::file("open", &base))?;
    let log_file = File::create_new(&log).map_err(LabError::file("create", &log))?;
    let put = |bytes: &[u8], at: u64| log_file.write_all_at(bytes, at).map_err(LabError::file("write", &log));
    put(&header.to_bytes(), 0)?;
    put(&sesparse_volatile_header(), header.volatile_sector * SECTOR_BYTES)?;
    let entries: Vec<u8> =
        (0..header.tables()).flat_map(|table| sesparse_directory_entry(table as u32).to_le_bytes()).collect();
    put(&entries, header.directory.0 * SECTOR_BYTES)?;
    let (grains_bytes, mut next) = (header.grains_sector * SECTOR_BYTES, 0);
    let mut piece = vec![0; PIECE_BYTES as usize];
    let zeros = vec![0; PIECE_BYTES as usize];
    for start in (PIECE_BYTES..size_bytes).step_by(2 * PIECE_BYTES as usize) {
        let len = PIECE_BYTES.min(size_bytes - start) as usize;
        base_file.read_exact_at(&mut piece[..len], start).map_err(LabError::file("read", &base))?;
        base_file.write_all_at(&zeros[..len], start).map_err(LabError::file("write", &base))?;
        let grains = (len as u64).div_ceil(GRAIN_BYTES);
        put(&piece[..len], grains_bytes + next * GRAIN_BYTES)?;
        let numbers = next..next + grains;
        let entries: Vec<u8> =
            numbers.flat_map(|number| SeSparseGrain::Number(number).encode().to_le_bytes()).collect();
        put(&entries, TABLES_SECTOR * SECTOR_BYTES + start / GRAIN_BYTES * 8)?;
        next += grains;
    }
    log_file.sync_all().map_err(LabError::file("sync", &log))?;
    base_file.sync_all().map_err(LabError::file("sync", &base))?;
    let parent = Disk::open(dir.join("vm.vmdk"), &OpenOptions::default())?;
    let cid = parent.layers()[0].image.linkage_id().and_then(LinkageId::cid).unwrap_or_default();
    let text = format!(
        "# Disk DescriptorFile\nversion=3\nCID=0000abcd\nparentCID={cid:08x}\nparentFileNameHint=\"vm.vmdk\"\n\
         createType=\"seSparse\"\n\n# Extent description\nRW {sectors} SESPARSE \"vm-000001-sesparse.vmdk\"\n"
    );
    let path = dir.join("vm-000001.vmdk");
    fs::write(&path, text).map_err(LabError::file("write", &path))
}

fn header(sectors: u64) -> SeSparseHeader {
    let mut header = SeSparseHeader {
        capacity_sectors: sectors,
        flags: 0,
        volatile_sector: (SESPARSE_HEADER_BYTES as u64).div_ceil(SECTOR_BYTES),
        directory: (2, TABLES_SECTOR - 2),
        tables_sector: TABLES_SECTOR,
        grains_sector: 0,
    };
    // On a multiple of 4 KiB, as O_DIRECT may need it.
    header.grains_sector = (TABLES_SECTOR + header.tables() * TABLE_SECTORS).next_multiple_of(SESPARSE_GRAIN_SECTORS);
    header
}
