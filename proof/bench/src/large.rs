//! Large disks: opening 64 TiB, the memory of its map, creating 40 GiB with their space.

use crate::{touch, turns::in_turns};
use diskwright_lab::{
    LabError, Result,
    acceptance::{Bar, Check, Context, RowOutcome},
    progress::{Progress, report},
    rounds::Window,
    scratch::Scratch,
    targets::{Container, Target, create_empty, create_with_blocks},
};
use diskwright_stats::numbers::{bytes, grouped};
use diskwright_store::{Blocking, CacheMode};
use std::{os::unix::fs::MetadataExt, path::Path, time::Instant};

const LARGE_BYTES: u64 = 64 << 40;
const OPEN_NS: f64 = 50e6;
const OPEN_BYTES: f64 = 32.0 * 1024.0 * 1024.0;
const BLOCK_BYTES: u64 = 2 << 20;
const SMALL_BLOCK_BYTES: u32 = 1 << 20;
/// Limits of the map: the default and a small one.
const MAP_MEMORY_BYTES: [u64; 2] = [64 << 20, 16 << 20];
/// What one L2 table of a qcow2 in clusters of 64 KiB covers.
const TABLE_COVERS_BYTES: u64 = 512 << 20;
const TABLES_PER_FLUSH: u64 = 256;
const FIXED_BYTES: u64 = 40 << 30;
const CREATE_NS: f64 = 1e9;

pub(crate) fn open(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    let Some(launcher) = &context.options.launcher else {
        return Ok(RowOutcome::skipped(
            "opening 64 TiB",
            "the caller gave no way to start a fresh process to measure in",
        ));
    };
    context.scratch.need("a disk of 64 TiB, nearly empty", 2 << 30)?;
    let path = create_empty(Container::VhdxDynamic, context.scratch.path(), LARGE_BYTES)?;
    // The blocks that are read hold data.
    let places = [0, LARGE_BYTES / 2, LARGE_BYTES - BLOCK_BYTES];
    let target = Target::open(Container::VhdxDynamic, path.clone(), CacheMode::PageCache, context.options.engine)?;
    {
        let mut data = vec![0; BLOCK_BYTES as usize];
        let failed = || LabError::file("write to", &path);
        let mut device = Blocking::open(target.device(), context.options.engine).map_err(failed())?;
        for offset_bytes in places {
            diskwright_load::data::fill(1, offset_bytes, &mut data);
            device.write(offset_bytes, &data, false).map_err(failed())?;
        }
    }
    target.close()?;
    let rounds = context.rounds(9);
    let (mut times, mut peaks) = (Vec::new(), Vec::new());
    in_turns("open", &["64 TiB"], (rounds, 0), progress, &mut |Window { round, .. }, _| {
        let cost = launcher.open(&path, places[round % places.len()], BLOCK_BYTES, CacheMode::Direct)?;
        times.push((cost.open_ns + cost.read_ns) as f64);
        peaks.push(cost.resident_peak_bytes as f64);
        Ok(())
    })?;
    Ok(RowOutcome {
        checks: vec![
            Check::absolute("open and read one block of 2 MiB", "ns", &times, Bar::AtMost(OPEN_NS)),
            Check::absolute("peak resident memory of the process", "bytes", &peaks, Bar::AtMost(OPEN_BYTES)),
        ],
        notes: vec![format!("{rounds} fresh processes; blocks at the beginning, the middle and the end in turn")],
        ..RowOutcome::default()
    })
}

/// The whole map of a disk of 64 TiB in blocks of 1 MiB would take 512 MiB, and its table as much;
/// that of a qcow2 in clusters of 64 KiB 8 GiB, and its tables as much.
pub(crate) fn map_memory(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    context.scratch.need("two disks of 64 TiB, nearly empty", 4 << 30)?;
    let dir = context.scratch.path();
    let vhdx = create_with_blocks(Container::VhdxDynamic, dir, LARGE_BYTES, Some(SMALL_BLOCK_BYTES))?;
    let qcow2 = create_empty(Container::Qcow2, dir, LARGE_BYTES)?;
    allocate_tables(context, progress, &qcow2)?;
    let cells: Vec<(&str, &Path, u64)> = [("VHDX", &*vhdx), ("qcow2", &*qcow2)]
        .into_iter()
        .flat_map(|(name, path)| MAP_MEMORY_BYTES.map(|limit_bytes| (name, path, limit_bytes)))
        .collect();
    let rounds = context.rounds(context.pick(1, 3));
    let mut found = RowOutcome::default();
    for (index, (name, path, limit_bytes)) in cells.iter().copied().enumerate() {
        let mut grown = Vec::new();
        let cell = format!("{name}, --map-memory {}", bytes(limit_bytes));
        for round in 0..rounds {
            report(progress, "touch", (index * rounds + round) as u64, (cells.len() * rounds) as u64, &cell)?;
            let cost = touch::in_a_child(path, limit_bytes)?;
            grown.push(cost.resident_peak_bytes.saturating_sub(cost.resident_before_bytes) as f64);
            if round == 0 {
                let speed = cost.reads as f64 * 1e9 / cost.took_ns.max(1) as f64;
                found.notes.push(format!("{cell}: {} reads, {} a second", grouped(cost.reads as f64), grouped(speed)));
            }
        }
        let name = format!("{cell}: growth of the process");
        found.checks.push(Check::absolute(name, "bytes", &grown, Bar::AtMost(limit_bytes as f64)));
    }
    found.notes.push("each 256 MiB of the disk is read once, in random order; a fresh process each round".into());
    Ok(found)
}

/// Writes 4 KiB into every range that one L2 table of a qcow2 covers, so that all tables exist.
fn allocate_tables(context: &Context<'_>, progress: &mut dyn Progress, path: &Path) -> Result<()> {
    let target = Target::open(Container::Qcow2, path.to_path_buf(), CacheMode::PageCache, context.options.engine)?;
    {
        let failed = || LabError::file("write to", path);
        let mut device = Blocking::open(target.device(), context.options.engine).map_err(failed())?;
        let mut data = [0; 4096];
        let tables = LARGE_BYTES / TABLE_COVERS_BYTES;
        for table in 0..tables {
            let offset_bytes = table * TABLE_COVERS_BYTES;
            diskwright_load::data::fill(1, offset_bytes, &mut data);
            device.write(offset_bytes, &data, false).map_err(failed())?;
            // New tables stay in memory until they are flushed.
            if table % TABLES_PER_FLUSH == 0 {
                report(progress, "allocate tables", table, tables, "qcow2")?;
                device.flush().map_err(failed())?;
            }
        }
        device.flush().map_err(failed())?;
    }
    target.close()
}

pub(crate) fn create_fixed(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    if let Err(error) = context.scratch.need("a fixed disk of 40 GiB", FIXED_BYTES + (1 << 30)) {
        return Ok(RowOutcome::skipped("creating 40 GiB", error.to_string()));
    }
    let mut found = RowOutcome::default();
    for (index, container) in [Container::VhdFixed, Container::VhdxFixed].into_iter().enumerate() {
        report(progress, "create", index as u64, 2, container.name())?;
        let mut times = Vec::new();
        let mut min_bytes = u64::MAX;
        for _ in 0..context.rounds(3) {
            let (took_ns, allocated_bytes) = create_once(&context.scratch, container, FIXED_BYTES)?;
            times.push(took_ns);
            min_bytes = min_bytes.min(allocated_bytes);
        }
        found.checks.push(if min_bytes < FIXED_BYTES {
            Check::broken(container.name(), format!("only {} of it are allocated", bytes(min_bytes)))
        } else {
            Check::absolute(container.name(), "ns", &times, Bar::AtMost(CREATE_NS))
        });
    }
    Ok(found)
}

/// Creates a disk and removes it. Returns the time of the creation, nanoseconds, and the space that
/// the file took.
fn create_once(scratch: &Scratch, container: Container, size_bytes: u64) -> Result<(f64, u64)> {
    let dir = scratch.folder("create")?;
    let start = Instant::now();
    let created = create_empty(container, &dir, size_bytes);
    let took_ns = start.elapsed().as_nanos() as f64;
    let examined = created.and_then(|path| path.metadata().map_err(LabError::file("examine", &path)));
    // A file that was begun takes space too.
    std::fs::remove_dir_all(&dir).map_err(LabError::file("remove", &dir))?;
    Ok((took_ns, examined?.blocks() * 512))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_created_disk_has_its_space_and_is_removed() {
        let home = tempfile::tempdir().unwrap();
        let scratch = Scratch::new(Some(home.path()), false).unwrap();
        let (took_ns, allocated_bytes) = create_once(&scratch, Container::VhdFixed, 64 << 20).unwrap();
        assert!(took_ns > 0.0 && allocated_bytes >= 64 << 20);
        // More than a dynamic VHD can have.
        assert!(create_once(&scratch, Container::VhdDynamic, 4 << 40).is_err());
        assert_eq!(std::fs::read_dir(scratch.path()).unwrap().count(), 0);
    }
}
