//! A pool of one member against the raw file: what the map, the holds and the checksums cost.
//!
//! The raw file is the member itself, in the range where the slabs of the disk lie: the same blocks
//! of the same file. For the sixteen workloads all slabs are dirty: the raw file must not be
//! written behind the back of a sealed slab.
//!
//! A sealed slab is compared with its checksums when it is read. To touch each byte once takes more
//! than the tenth of the raw file's time that the promise allows: its reads touch none. So the peer
//! of sealed slabs computes the same checksums.

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
use diskwright_load::{
    data,
    workload::{Workload, paper_monolithic},
};
use diskwright_space::{Pool, SpaceFile};
use diskwright_stats::numbers::bytes;
use diskwright_store::{BlockDevice, Blocking, CacheMode, RawDevice, Store};
use std::{
    io,
    path::{Path, PathBuf},
    slice,
    sync::Arc,
};

const QUEUE_DEPTH: u32 = 32;
const SEED: u64 = 22;
const MIB: u64 = 1 << 20;

/// The pool and its member.
struct Place {
    pool: Arc<Pool>,
    file: Arc<SpaceFile>,
    member: PathBuf,
    size_bytes: u64,
    /// The disk of the pool.
    device: Arc<dyn BlockDevice>,
    /// The member, and the range of it where the disk lies.
    raw: Arc<RawDevice>,
    run: Run,
}

impl Place {
    fn new(context: &Context<'_>, progress: &mut dyn Progress) -> Result<Self> {
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
        let all = 0..size_bytes;
        fill::fill_ranges("pool", &*device, slice::from_ref(&all), context.options.engine, &mut make, &mut tick)?;
        let (raw, run) = same_range(&file, &paths[0], size_bytes, context)?;
        Ok(Self { pool, file, member: paths[0].clone(), size_bytes, device, raw, run })
    }

    /// Measures the pool beside `peer`.
    fn compare(
        &self,
        context: &Context<'_>,
        (workload, is_summed): (&Workload, bool),
        place: (usize, usize),
        progress: &mut dyn Progress,
        found: &mut RowOutcome,
    ) -> Result<()> {
        let summed_bytes = if is_summed { workload.block_bytes as usize } else { 0 };
        let peer = same_blocks::device_at(&self.raw, self.run, summed_bytes);
        let pool = open_target("pool of one member", "pool", Arc::clone(&self.device), CacheMode::Direct);
        let subjects = [Subject::of(open_target("the member", "raw file", peer, CacheMode::Direct)), Subject::of(pool)];
        for disk in compare(context, &subjects, workload, &FIGURES, place, progress, &mut |_| Ok(()))? {
            found.checks.extend(FIGURES.map(|figure| disk.check(&workload.name, figure)));
        }
        Ok(())
    }

    fn note(&self) -> String {
        format!(
            "a disk of {}, one copy, slabs of 1 MiB; the raw file is the same range of the member",
            bytes(self.size_bytes)
        )
    }
}

/// What was written lately and has no checksums yet.
pub(crate) fn workloads(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    let place = Place::new(context, progress)?;
    let mut found = RowOutcome::default();
    let all = paper_monolithic(QUEUE_DEPTH);
    for (index, workload) in all.iter().enumerate() {
        make_dirty(&place.file, place.size_bytes, &place.member)?;
        place.compare(context, (workload, false), (index, all.len()), progress, &mut found)?;
    }
    found.notes.push(place.note());
    Ok(found)
}

/// What has checksums, beside a raw file of which the same checksums are computed.
pub(crate) fn with_checksums(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    let place = Place::new(context, progress)?;
    place.pool.scrub(&mut |_| true).map_err(failed)?;
    let mut found = RowOutcome::default();
    let reads: Vec<Workload> = paper_monolithic(QUEUE_DEPTH).into_iter().filter(|one| !one.writes()).collect();
    for (index, workload) in reads.iter().enumerate() {
        place.compare(context, (workload, true), (index, reads.len()), progress, &mut found)?;
    }
    found.notes.push(place.note());
    found.notes.push("CRC-32C of each 4 KiB that the raw file has read is computed in the thread that reads".into());
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
fn same_range(
    file: &SpaceFile,
    member: &Path,
    size_bytes: u64,
    context: &Context<'_>,
) -> Result<(Arc<RawDevice>, Run)> {
    let store = file.member(0).ok_or_else(|| LabError::file("open", member)(io::ErrorKind::NotFound.into()))?;
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
            return Err(wrong()(io::Error::other(what)));
        }
    }
    drop(blocks);
    let run = Run { offset_bytes: 0, len_bytes: size_bytes, file_offset_bytes: at };
    Ok((Arc::new(raw), run))
}
