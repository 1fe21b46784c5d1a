//! Opening pools: one of 10 TiB with all slabs mapped, and one after a power cut with 1 GiB dirty.
//!
//! 10 TiB of slabs cannot be written here. So the checkpoint of the pool is written as the pool
//! itself would write it: a file of 10 TiB whose slabs are all sealed, in
//! runs of 64.

use super::{create, disk, files, open};
use crate::{touch, turns::in_turns};
use diskwright_format::space::{
    BLOCK_BYTES, Copy, SLABS_OFFSET_BYTES,
    change::{Change, SlabState, Tier},
    journal::{Checkpoint, Position},
    superblock::Superblock,
};
use diskwright_lab::{
    ChildLauncher, LabError, Result,
    acceptance::{Bar, Check, Context, RowOutcome},
    progress::Progress,
};
use diskwright_load::machine;
use diskwright_space::Pool;
use diskwright_stats::numbers::bytes;
use diskwright_store::{CacheMode, FileStore, IoBuf, LockMode, OpenOptions as StoreOptions, Store};
use serde::{Deserialize, Serialize};
use std::{
    ffi::{OsStr, OsString},
    fs::{File, OpenOptions},
    io::{self, Read},
    iter,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
    thread,
    time::Instant,
};

const TIB: u64 = 1 << 40;
const GIB: u64 = 1 << 30;
const LARGE_BYTES: u64 = 10 * TIB;
const OPEN_NS: f64 = 200e6;
const OPEN_BYTES: f64 = 250.0 * 1024.0 * 1024.0;
const RESYNC_NS: f64 = 2e9;
const MIB: u64 = 1 << 20;
/// What a child does: open the pool, or write to it and end like `kill -9`.
const OPEN: &str = "open";
const DIRTY: &str = "dirty";
const DIRTY_BYTES: u64 = GIB;
const DISK: &str = "disk.raw";
/// Slabs that lie one after the other.
const RUN_SLABS: u32 = 64;

/// First word of a child's command line; what it does and the members follow.
pub(crate) const CHILD: &str = "space-child";

/// What a child has measured.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Cost {
    open_ns: u64,
    resident_peak_bytes: u64,
}

/// A child that opens the pool of these members.
fn in_a_child(action: &str, paths: &[PathBuf]) -> Result<Cost> {
    let words = iter::once(OsStr::new(action)).chain(paths.iter().map(|path| path.as_os_str()));
    ChildLauncher::current_exe([CHILD])?.ask(words)
}

/// What the child does: `words` are those of [`in_a_child`].
pub(crate) fn child(words: &[OsString]) -> ExitCode {
    let Some((action, paths)) = words.split_first() else { return ExitCode::from(2) };
    let paths: Vec<PathBuf> = paths.iter().map(PathBuf::from).collect();
    let begun = Instant::now();
    let result = open(&paths, CacheMode::Direct).and_then(|pool| {
        let open_ns = begun.elapsed().as_nanos() as u64;
        match action.to_str() {
            Some(DIRTY) => make_dirty(&pool, &paths[0])?,
            _ => {
                let opened = pool.open_file(DISK, true, LockMode::Exclusive);
                let file = opened.map_err(|error| LabError::file("open", &paths[0])(io::Error::other(error)))?;
                file.read_at(&mut [0; 4096], file.len_bytes().unwrap_or(0) / 2 / MIB * MIB)
                    .map_err(LabError::file("read", &paths[0]))?;
            }
        }
        let cost = Cost { open_ns, resident_peak_bytes: machine::resident_bytes().1 };
        // Like `kill -9`: the pool is not closed.
        if action == DIRTY {
            let _ = touch::answer(Ok(cost));
            std::process::exit(0);
        }
        Ok(cost)
    });
    touch::answer(result)
}

pub(crate) fn large(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    context.scratch.need("a pool of 10 TiB, nearly empty", 2 * GIB)?;
    let dir = context.scratch.folder("space")?;
    let paths = files(&dir, &[LARGE_BYTES + LARGE_BYTES / 200])?;
    create(&paths)?;
    map_all(&paths[0]).map_err(LabError::file("write to", &paths[0]))?;
    let rounds = context.rounds(9);
    let (mut times, mut peaks) = (Vec::new(), Vec::new());
    in_turns("open", &["10 TiB"], (rounds, 0), progress, &mut |_, _| {
        let cost = in_a_child(OPEN, &paths)?;
        times.push(cost.open_ns as f64);
        peaks.push(cost.resident_peak_bytes as f64);
        Ok(())
    })?;
    Ok(RowOutcome {
        checks: vec![
            Check::absolute("opening a pool of 10 TiB for writing", "ns", &times, Bar::AtMost(OPEN_NS)),
            Check::absolute("peak resident memory of the process", "bytes", &peaks, Bar::AtMost(OPEN_BYTES)),
        ],
        notes: vec![format!(
            "{rounds} fresh processes; slabs of 1 MiB, one copy, all mapped and sealed, in runs of {RUN_SLABS}"
        )],
        ..RowOutcome::default()
    })
}

/// Writes a checkpoint to the only member of a pool: a disk whose slabs are all mapped.
fn map_all(path: &Path) -> io::Result<()> {
    let mut block = [0; BLOCK_BYTES];
    File::open(path)?.read_exact(&mut block)?;
    let superblock = Superblock::parse(&block).map_err(|error| io::Error::other(error.to_string()))?;
    let area = superblock.areas[0];
    let first_free = area.slabs().map_or(0, |slabs| slabs.end);
    let mut changes = Vec::new();
    Change::File { file: 1, len_bytes: LARGE_BYTES, copies: 1, columns: 1, tier: Tier::Any, name: DISK }
        .put(&mut changes);
    let slabs = (LARGE_BYTES / MIB) as u32;
    // Sequential writers get runs of 64 slabs, and several writers' runs lie in turn.
    let runs = slabs / RUN_SLABS;
    for run in 0..runs {
        let slab = first_free + (u64::from(run) * 7919 % u64::from(runs)) as u32 * RUN_SLABS;
        let copies = [Copy { member: 0, slab }.to_bits(), 0, 0];
        let (first, count, state) = (run * RUN_SLABS, RUN_SLABS, SlabState::Sealed);
        Change::Extent { file: 1, first, count, state, copies }.put(&mut changes);
    }
    let position = Position { sequence: 1, before: 0 };
    let changes_checksum = crc32c::crc32c(&changes);
    let header = Checkpoint { position, changes_bytes: changes.len() as u64, changes_checksum };
    let place = area.first_slab + area.journal_slabs + area.checkpoint_slabs;
    let at = SLABS_OFFSET_BYTES + (u64::from(place) << superblock.slab_shift);
    let file = OpenOptions::new().write(true).open(path)?;
    file.write_all_at(&changes, at + BLOCK_BYTES as u64)?;
    file.write_all_at(&header.to_block(superblock.pool), at)?;
    file.sync_all()
}

pub(crate) fn resync(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    let size_bytes = DIRTY_BYTES + context.pick(0, 2 * GIB);
    context.scratch.need("a pool of two members", 2 * size_bytes + GIB)?;
    let rounds = context.rounds(context.pick(1, 5));
    let dir = context.scratch.folder("space")?;
    let paths = files(&dir, &[size_bytes + GIB / 4; 2])?;
    create(&paths)?;
    let pool = open(&paths, CacheMode::Direct)?;
    let file = disk(&pool, size_bytes, 2)?;
    for offset_bytes in (0..size_bytes).step_by(MIB as usize) {
        file.write_at(&vec![3; MIB as usize], offset_bytes).map_err(LabError::file("write to", &paths[0]))?;
    }
    drop((file, pool));
    let (mut times, mut reads_s, mut said) = (Vec::new(), Vec::new(), Vec::new());
    in_turns("resync", &["1 GiB dirty"], (rounds, 0), progress, &mut |_, _| {
        in_a_child(DIRTY, &paths)?;
        context.scratch.settle()?;
        let begun = Instant::now();
        let pool = open(&paths, CacheMode::Direct)?;
        times.push(begun.elapsed().as_nanos() as f64);
        said.extend(pool.warnings());
        drop(pool);
        let begun = Instant::now();
        read_as_much(&paths)?;
        reads_s.push(begun.elapsed().as_secs_f64());
        Ok(())
    })?;
    reads_s.sort_by(f64::total_cmp);
    let mut checks = vec![Check::absolute("opening with 1 GiB dirty", "ns", &times, Bar::AtMost(RESYNC_NS))];
    let dirty = format!("the copies of {} slabs", DIRTY_BYTES / MIB);
    if said.len() != rounds || !said.iter().all(|warning| warning.contains(&dirty)) {
        let why = format!("other slabs than the dirty ones were compared: {said:?}");
        checks.push(Check::broken("only dirty slabs are compared", why));
    }
    let notes = vec![
        format!(
            "two copies on two files, {}; a child writes 4 KiB in each of {} slabs of 1 MiB, and ends without closing the pool",
            bytes(size_bytes),
            DIRTY_BYTES / MIB
        ),
        format!(
            "only to read 1 GiB of each of these files, 1 MiB at a time, 2 threads each, takes {:.2} s (median of {rounds})",
            reads_s.get(rounds / 2).copied().unwrap_or_default()
        ),
    ];
    Ok(RowOutcome { checks, notes, ..RowOutcome::default() })
}

/// Reads as many bytes as a resync compares, from the same files and past the page cache: the time
/// below which no resync can be.
fn read_as_much(paths: &[PathBuf]) -> Result<()> {
    let options = StoreOptions { cache: CacheMode::Direct, lock: LockMode::None, ..StoreOptions::default() };
    let read = &|path: &Path, half: u64| -> Result<()> {
        let opened = FileStore::open(path, &options).map_err(io::Error::other);
        let store = opened.map_err(LabError::file("open", path))?;
        let mut buf = IoBuf::new(MIB as usize);
        let start_bytes = 16 * MIB + half * DIRTY_BYTES / 2;
        (start_bytes..start_bytes + DIRTY_BYTES / 2)
            .step_by(MIB as usize)
            .try_for_each(|offset_bytes| store.read_at(&mut buf, offset_bytes).map_err(LabError::file("read", path)))
    };
    thread::scope(|scope| {
        let readers: Vec<_> =
            paths.iter().flat_map(|path| [0, 1].map(|half| scope.spawn(move || read(path, half)))).collect();
        readers.into_iter().try_for_each(|reader| reader.join().expect("a thread that reads panicked"))
    })
}

/// Writes 4 KiB to each slab of the first part of the disk.
fn make_dirty(pool: &Arc<Pool>, path: &Path) -> Result<()> {
    let opened = pool.open_file("disk", true, LockMode::Exclusive);
    let file = opened.map_err(|error| LabError::file("open", path)(io::Error::other(error)))?;
    for offset_bytes in (0..DIRTY_BYTES).step_by(MIB as usize) {
        file.write_at(&[offset_bytes as u8 | 1; 4096], offset_bytes + 8192)
            .map_err(LabError::file("write to", path))?;
    }
    file.sync_data().map_err(LabError::file("sync", path))
}
