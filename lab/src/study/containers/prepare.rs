//! Prepares the seven containers: creates, fills and verifies them.
//!
//! All disks are filled at the same time, so that no disk gets a better place on the storage. All
//! are filled before the first is read back, so that the page cache or the device's cache does not
//! hold what is verified. A quick study first fills one raw file. If that takes too long, it makes
//! smaller disks.

use super::{
    record::PreparedRecord,
    settings::{CHAIN_BYTES, SIZE_STEP_BYTES, Settings},
};
use crate::{
    LabError, Result,
    child::cache_word,
    progress::{Progress, report},
    scratch::Scratch,
    targets::{self, Container, Target},
};
use diskwright_load::warning::Warning;
use std::{
    os::unix::fs::MetadataExt,
    time::{Duration, Instant},
};

/// Longest time to fill one disk in a quick study; on slower storage the disks are smaller.
const QUICK_FILL: Duration = Duration::from_secs(3);
const QUICK_MIN_BYTES: u64 = 64 << 20;

/// Creates, fills and verifies every target. A quick study on slow storage makes smaller disks.
pub(crate) fn prepare(
    settings: &mut Settings,
    scratch: &Scratch,
    warnings: &mut Vec<Warning>,
    progress: &mut dyn Progress,
) -> Result<(Vec<Target>, Vec<PreparedRecord>)> {
    let count = Container::STUDIED.len() as u64;
    // The disks, the base of the chain, and 4 GiB for metadata and for the many files of the chain.
    let usual_bytes = settings.how.size_bytes;
    scratch.need("the study", count * usual_bytes + usual_bytes.min(CHAIN_BYTES) + (4 << 30))?;
    if settings.quick && settings.asked_bytes.is_none() && usual_bytes > QUICK_MIN_BYTES {
        settings.how.size_bytes = quick_size(settings, scratch, progress)?;
        if settings.how.size_bytes < usual_bytes {
            warnings.push(Warning::SmallerDisks { size_bytes: settings.how.size_bytes, usual_bytes });
        }
    }
    let size_bytes = settings.how.size_bytes;
    let dir = scratch.folder("disks")?;
    let wanted = Container::STUDIED.map(|container| (container, &*dir));
    let filled = targets::make_filled_side_by_side(&wanted, &settings.how, &mut |done| {
        report(progress, "prepare", done, count * size_bytes, "filling")
    })?;
    let (mut targets, mut records) = (Vec::new(), Vec::new());
    for (index, (container, filled)) in Container::STUDIED.into_iter().zip(filled).enumerate() {
        let before = index as u64 * size_bytes;
        let start = Instant::now();
        let target = targets::open_verified(container, filled.path, &settings.how, &mut |done| {
            report(progress, "verify", before + done, count * size_bytes, container.name())
        })?;
        let metadata = std::fs::metadata(&target.path).map_err(LabError::file("examine", &target.path))?;
        records.push(PreparedRecord {
            container,
            cache: cache_word(target.cache).into(),
            filled_bytes: size_bytes,
            fill_ns: filled.took.as_nanos() as u64,
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

/// The disk size that can be filled in [`QUICK_FILL`], at most the usual size. Measured by filling
/// one raw file, which is then removed.
fn quick_size(settings: &Settings, scratch: &Scratch, progress: &mut dyn Progress) -> Result<u64> {
    let usual_bytes = settings.how.size_bytes;
    let dir = scratch.folder("probe")?;
    let start = Instant::now();
    targets::make_filled(Container::Raw, &dir, &settings.how, &mut |done| {
        report(progress, "prepare", done, usual_bytes, "measuring the write speed")
    })?;
    let took = start.elapsed();
    std::fs::remove_dir_all(&dir).map_err(LabError::file("remove", &dir))?;
    if took <= QUICK_FILL {
        return Ok(usual_bytes);
    }
    let share = QUICK_FILL.as_secs_f64() / took.as_secs_f64();
    let fitting = (usual_bytes as f64 * share) as u64 / SIZE_STEP_BYTES * SIZE_STEP_BYTES;
    Ok(fitting.max(QUICK_MIN_BYTES))
}
