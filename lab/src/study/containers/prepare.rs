//! The seven containers: made, filled, proved.
//!
//! All are filled before the first is read back, so that none is proved out of what the page cache or the device remember of its
//! writing. A quick run measures its first fill, and makes smaller disks where all would take too long.

use super::{
    CHAIN_BYTES,
    settings::{SIZE_STEP_BYTES, Settings},
};
use crate::{
    LabError, Result,
    child::cache_word,
    progress::{Progress, report},
    result::PreparedRecord,
    scratch::Scratch,
    targets::{self, Container, Target},
    warning::Warning,
};
use std::{
    os::unix::fs::MetadataExt,
    path::PathBuf,
    time::{Duration, Instant},
};

/// A quick run gives no more than this to filling one disk; else it makes the disks smaller.
const QUICK_FILL: Duration = Duration::from_secs(3);
const QUICK_MIN_BYTES: u64 = 64 << 20;

/// Makes, fills, and proves every target. A quick run on a slow disk makes smaller ones.
pub(crate) fn prepare(
    settings: &mut Settings,
    scratch: &Scratch,
    warnings: &mut Vec<Warning>,
    progress: &mut dyn Progress,
) -> Result<(Vec<Target>, Vec<PreparedRecord>)> {
    let count = Container::ALL.len() as u64;
    let mut dir = scratch.folder("disks")?;
    let mut made: Vec<(Container, PathBuf, u64)> = Vec::new();
    let usual_bytes = settings.how.size_bytes;
    let mut next = 0;
    while next < Container::ALL.len() {
        let (container, size_bytes) = (Container::ALL[next], settings.how.size_bytes);
        // The disks, the base of the chain, and room for metadata and for the chain's many small files.
        scratch.need("the study", (count - next as u64) * size_bytes + size_bytes.min(CHAIN_BYTES) + (4 << 30))?;
        let total = count * size_bytes;
        let before = next as u64 * size_bytes;
        let start = Instant::now();
        let path = targets::make_filled(container, &dir, &settings.how, &mut |done| {
            report(progress, "prepare", before + done, total, container.name())
        })?;
        let took = start.elapsed();
        if next == 0
            && settings.quick
            && settings.asked_bytes.is_none()
            && took > QUICK_FILL
            && size_bytes > QUICK_MIN_BYTES
        {
            let share = QUICK_FILL.as_secs_f64() / took.as_secs_f64();
            let fitting = (size_bytes as f64 * share) as u64 / SIZE_STEP_BYTES * SIZE_STEP_BYTES;
            settings.how.size_bytes = fitting.max(QUICK_MIN_BYTES);
            warnings.push(Warning::SmallerDisks { size_bytes: settings.how.size_bytes, usual_bytes });
            std::fs::remove_dir_all(&dir).map_err(LabError::file("remove", &dir))?;
            dir = scratch.folder("smaller-disks")?;
            continue;
        }
        made.push((container, path, took.as_nanos() as u64));
        next += 1;
    }
    let (mut targets, mut records) = (Vec::new(), Vec::new());
    let size_bytes = settings.how.size_bytes;
    for (index, (container, path, fill_ns)) in made.into_iter().enumerate() {
        let before = index as u64 * size_bytes;
        let start = Instant::now();
        let target = targets::open_verified(container, path, &settings.how, &mut |done| {
            report(progress, "verify", before + done, count * size_bytes, container.name())
        })?;
        let metadata = std::fs::metadata(&target.path).map_err(LabError::file("examine", &target.path))?;
        records.push(PreparedRecord {
            container,
            target: container.name().into(),
            cache: cache_word(target.cache).into(),
            filled_bytes: size_bytes,
            fill_ns,
            verified_bytes: size_bytes,
            verify_ns: start.elapsed().as_nanos() as u64,
            populated: true,
            file_allocated_bytes: metadata.blocks() * 512,
        });
        targets.push(target);
    }
    let cached: Vec<String> =
        targets.iter().filter(|target| target.cache != settings.how.cache).map(|target| target.name().into()).collect();
    if !cached.is_empty() {
        warnings.push(Warning::DirectNotHonoured { targets: cached });
    }
    Ok((targets, records))
}
