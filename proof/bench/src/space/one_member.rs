//! A pool of one member against the raw file: what the map, the holds and the checksums cost.
//!
//! The raw file is the member itself, in the range where the slabs of the disk lie: the same blocks
//! of the same file. Before each workload that reads all slabs are sealed, so that every read is
//! compared with its checksums. Before one that writes they are made dirty, since the raw file must
//! not be written behind the back of a sealed slab.

use super::{create, disk, failed, files, open};
use crate::{
    populated::{FIGURES, Subject, compare},
    same_blocks::{self, Run},
};
use diskwright_lab::{
    LabError, Result,
    acceptance::{Context, RowOutcome},
    fill,
    progress::{Progress, report},
    targets::open_target,
};
use diskwright_load::{data, workload::paper_monolithic};
use diskwright_space::SpaceFile;
use diskwright_stats::numbers::bytes;
use diskwright_store::{BlockDevice, Blocking, CacheMode, RawDevice, Store};
use std::{path::Path, sync::Arc};

const QUEUE_DEPTH: u32 = 32;
const SEED: u64 = 22;
const MIB: u64 = 1 << 20;

pub(crate) fn workloads(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    let size_bytes: u64 = context.pick(512 * MIB, 2048 * MIB);
    context.scratch.need("a pool", size_bytes + (1 << 30))?;
    let dir = context.scratch.folder("space")?;
    let paths = files(&dir, &[size_bytes + size_bytes / 64 + 64 * MIB])?;
    create(&paths)?;
    let pool = open(&paths, CacheMode::Direct)?;
    let file = disk(&pool, size_bytes, 1)?;
    let wrong = LabError::file("fill", &paths[0]);
    let device: Arc<dyn BlockDevice> = Arc::new(RawDevice::new(file.clone(), true, 512).map_err(wrong)?);
    let mut make = |offset, buf: &mut [u8]| data::fill(SEED, offset, buf);
    let mut tick = |done| report(progress, "fill", done, size_bytes, "filling");
    fill::fill_ranges(
        "pool",
        &*device,
        std::slice::from_ref(&(0..size_bytes)),
        context.options.engine,
        &mut make,
        &mut tick,
    )?;
    let raw = same_range(&file, &paths[0], size_bytes, context)?;
    let subjects = [
        Subject::of(open_target("the member", "raw file", raw, CacheMode::Direct)),
        Subject::of(open_target("pool of one member", "pool", device, CacheMode::Direct)),
    ];
    let mut found = RowOutcome::default();
    let all = paper_monolithic(QUEUE_DEPTH);
    for (index, workload) in all.iter().enumerate() {
        if workload.writes() {
            make_dirty(&file, size_bytes, &paths[0])?;
        } else {
            pool.scrub(&mut |_| true).map_err(failed)?;
        }
        let place = (index, all.len());
        for disk in compare(context, &subjects, workload, &FIGURES, place, progress, &mut |_| Ok(()))? {
            found.checks.extend(FIGURES.map(|figure| disk.check(&workload.name, figure)));
        }
    }
    found.notes.push(format!(
        "a disk of {}, one copy, slabs of 1 MiB; reads are compared with CRC-32C of 4 KiB; the raw file is the same \
         range of the member",
        bytes(size_bytes)
    ));
    Ok(found)
}

/// Writes to each slab, so that it has no checksums while the raw file is written.
fn make_dirty(file: &SpaceFile, size_bytes: u64, member: &Path) -> Result<()> {
    for offset_bytes in (0..size_bytes).step_by(MIB as usize) {
        file.write_at(&[1; 4096], offset_bytes).map_err(LabError::file("write to", member))?;
    }
    Ok(())
}

/// The range of the member where the disk lies, which was filled from its beginning to its end.
fn same_range(file: &SpaceFile, member: &Path, size_bytes: u64, context: &Context<'_>) -> Result<Arc<dyn BlockDevice>> {
    let store = file.member(0).ok_or_else(|| LabError::file("open", member)(std::io::ErrorKind::NotFound.into()))?;
    let wrong = || LabError::file("read", member);
    let raw = RawDevice::new(store, true, 512).map_err(wrong())?;
    let mut first = vec![0; 4096];
    data::fill(SEED, 0, &mut first);
    let mut blocks = Blocking::open(&raw, context.options.engine).map_err(wrong())?;
    let is_first = |block: &[u8]| block == first;
    let mut buf = vec![0; 4096];
    let mut at = 0;
    loop {
        blocks.read(at, &mut buf).map_err(wrong())?;
        if is_first(&buf) {
            break;
        }
        at += MIB;
    }
    for offset in (0..size_bytes).step_by(16 * MIB as usize) {
        data::fill(SEED, offset, &mut first);
        blocks.read(at + offset, &mut buf).map_err(wrong())?;
        if buf != first {
            let what = format!("the disk does not lie in one piece: offset {offset} is elsewhere");
            return Err(wrong()(std::io::Error::other(what)));
        }
    }
    drop(blocks);
    let run = Run { offset_bytes: 0, len_bytes: size_bytes, file_offset_bytes: at };
    Ok(same_blocks::device_at(raw, vec![run], size_bytes))
}
