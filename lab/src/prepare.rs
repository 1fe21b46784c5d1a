//! Prepares the targets that a user named: creates, checks, opens, fills and inspects them.
//!
//! ```text
//!   spec ─▶ create it, if requested ─▶ open for reading ─▶ may it be written? (inspect/guard.rs)
//!                                                            │ until here nothing has changed
//!        ┌───────────────────────────────────────────────────┘ but files that were created
//!        ▼
//!   open as the job needs it ─▶ fill the working set, if requested or if the lab made the file
//!        ─▶ check that all of it is allocated ─▶ sample its contents ─▶ warnings
//! ```
//!
//! Invariant: if preparing fails or is stopped, files that existed before are unchanged, unless
//! they may be overwritten, and files that were created here are removed.

use crate::{
    LabError, Result, fill,
    inspect::{self, Writing, guard, usage, warnings},
    open::{self, OpenHow},
    progress::{Progress, report},
};
use diskwright_disk::{CreateRequest, create};
use diskwright_image::probe::known;
use diskwright_load::{
    LoadError, OpenTarget, data,
    job::{Contents, Job, Load},
    machine::{Machine, free_bytes},
    run,
    warning::Warning,
};
use diskwright_stats::numbers;
use diskwright_store::{Extent, ExtentKind};
use std::{
    fs::{self, File, OpenOptions},
    ops::Range,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    slice,
    time::Instant,
};

/// What may be done to targets before measuring.
#[derive(Debug, Clone, Default)]
pub struct PrepareOptions {
    /// Create each target that does not exist: a dynamic disk of this size if the extension is that
    /// of a format with blocks (`.vhdx`, `.vhd`, `.qcow2`, `.vmdk`, `.vdi`), else a raw file. A
    /// name with the extension of a format that cannot be created is refused.
    pub create_bytes: Option<u64>,
    /// Fill the working sets, whatever they hold.
    pub fill: bool,
    /// Allow data on a target to be overwritten.
    pub destroy_data: bool,
    /// Cache mode and options. Targets that the job writes are opened for writing.
    pub open: OpenHow,
}

/// Targets that may be measured, with warnings about them.
#[derive(Debug)]
pub struct Prepared {
    /// The open targets, in the order in which they were named.
    pub targets: Vec<OpenTarget>,
    /// Warnings about the targets and the job.
    pub warnings: Vec<Warning>,
}

/// Prepares the targets that `specs` name for `job`.
///
/// # Errors
/// Errors of the job or of a target; [`LabError::InUse`] and [`LabError::HoldsData`] if a target
/// must not be written; [`LabError::NoSpaceToFill`]; [`LabError::Stopped`] if `progress` stops it.
pub fn prepare(job: &Job, specs: &[String], options: &PrepareOptions, progress: &mut dyn Progress) -> Result<Prepared> {
    job.validate().map_err(LoadError::from)?;
    if job.phases.iter().any(|phase| phase.loads.is_empty()) || specs.is_empty() {
        return Err(LabError::BadOptions { what: "no target was named".into(), hint: "name at least one".into() });
    }
    let mut made = CreatedFiles::default();
    for spec in specs {
        made.make(spec, options)?;
    }
    let mut connected: Vec<Option<OpenTarget>> = specs.iter().map(|_| None).collect();
    for (number, spec) in specs.iter().enumerate() {
        let writes = job.phases.iter().flat_map(|phase| &phase.loads).any(Load::writes);
        if writes || options.fill {
            // Before the target is opened: one that is in use should not be opened at all.
            guard::refuse_used(spec, Path::new(spec))?;
            // An export is connected only once, because a server may end with its first client.
            // Connecting for writing does not change the export.
            let is_export = open::names_export(spec);
            let writable = is_export && (is_written(job, number) || options.fill);
            let target = open::open(spec, &OpenHow { writable, ..options.open.clone() })?;
            allow(job, number, &target, options, progress)?;
            connected[number] = is_export.then_some(target);
        }
    }
    let mut targets = Vec::new();
    for (number, (spec, connected)) in specs.iter().zip(connected).enumerate() {
        if let Some(target) = connected {
            targets.push(target);
            continue;
        }
        let is_own = made.has(spec) || guard::is_own(Path::new(spec));
        let writable = is_written(job, number) || options.fill || is_own;
        targets.push(open::open(spec, &OpenHow { writable, ..options.open.clone() })?);
    }
    for target in &targets {
        refuse_smaller(target, options)?;
    }
    run::check(job, &targets)?;
    let mut warnings = Vec::new();
    let mut in_all_bytes = 0;
    for (number, target) in targets.iter_mut().enumerate() {
        if target.kind == "null" {
            continue;
        }
        let sets = warnings::working_sets(job, number, target.device.geometry().size_bytes, |_| true);
        // This machine's memory does not cache an export's storage on its server.
        if !target.is_export() {
            in_all_bytes += sets.iter().map(|set| set.end - set.start).sum::<u64>();
        }
        let engine = options.open.disk.engine;
        let inspect_one =
            |target: &OpenTarget| inspect::contents_of(&target.name, &*target.device, &sets, job.seed, engine);
        let is_own = made.has(&target.name) || target.path.as_deref().is_some_and(guard::is_own);
        let mut seen = None;
        if !options.fill && is_own {
            let contents = inspect_one(target)?;
            seen = warnings::of_target(job, number, &target.name, &contents).is_empty().then_some(contents);
        }
        if (options.fill || is_own) && seen.is_none() {
            let filled_bytes = fill_sets(job, target, &sets, options, progress)?;
            let mut contents = inspect_one(target)?;
            contents.filled_bytes = filled_bytes;
            seen = Some(contents);
        }
        let contents = seen.map_or_else(|| inspect_one(target), Ok)?;
        warnings.extend(warnings::of_target(job, number, &target.name, &contents));
        if let Some(path) = &target.path
            && !is_written(job, number)
        {
            let users: Vec<String> = usage::uses(path).iter().map(ToString::to_string).collect();
            if !users.is_empty() {
                warnings.push(Warning::Shared { target: target.name.clone(), users: users.join(", ") });
            }
        }
        target.contents = Some(contents);
    }
    if in_all_bytes > 0 {
        warnings.extend(warnings::of_job(job, in_all_bytes, Machine::detect().memory_bytes));
    }
    made.keep();
    Ok(Prepared { targets, warnings })
}

fn is_written(job: &Job, number: usize) -> bool {
    let loads = job.phases.iter().flat_map(|phase| &phase.loads);
    loads.filter(|load| load.targets.is_empty() || load.targets.contains(&number)).any(Load::writes)
}

/// Returns an error unless the job may write this target and fill it.
fn allow(
    job: &Job,
    number: usize,
    target: &OpenTarget,
    options: &PrepareOptions,
    progress: &mut dyn Progress,
) -> Result<()> {
    let size_bytes = target.device.geometry().size_bytes;
    let ranges = warnings::working_sets(job, number, size_bytes, |load| options.fill || load.writes());
    if ranges.is_empty() || target.kind == "null" {
        return Ok(());
    }
    let total: u64 = ranges.iter().map(|range| range.end - range.start).sum();
    let writing = Writing {
        name: &target.name,
        path: target.path.as_deref(),
        device: &*target.device,
        ranges: &ranges,
        engine: options.open.disk.engine,
    };
    let message = format!("searching {} for data", target.name);
    inspect::allow(&writing, options.destroy_data, &mut |done| report(progress, "inspect", done, total, &message))
}

/// Returns an error if an existing virtual disk is smaller than requested: the job would run on the
/// smaller disk.
fn refuse_smaller(target: &OpenTarget, options: &PrepareOptions) -> Result<()> {
    let size_bytes = target.device.geometry().size_bytes;
    match (options.create_bytes, &target.path) {
        (Some(asked_bytes), Some(path)) if path.is_file() && size_bytes < asked_bytes => Err(LabError::BadOptions {
            what: format!(
                "{} exists and has {size_bytes} bytes, fewer than the requested {asked_bytes} \
                 (`PrepareOptions::create_bytes`); \
                 an existing virtual disk is not enlarged",
                target.name
            ),
            hint: "request its own size or less, use another name, or remove the file".into(),
        }),
        _ => Ok(()),
    }
}

/// Fills the working sets, and checks that they are allocated. Returns the number of bytes written.
fn fill_sets(
    job: &Job,
    target: &OpenTarget,
    sets: &[Range<u64>],
    options: &PrepareOptions,
    progress: &mut dyn Progress,
) -> Result<u64> {
    let total_bytes: u64 = sets.iter().map(|set| set.end - set.start).sum();
    need_space(target, sets)?;
    let started = Instant::now();
    let mut tick = |done_bytes: u64| {
        let rate = done_bytes as f64 / started.elapsed().as_secs_f64().max(1e-9);
        let left_s = (total_bytes - done_bytes) as f64 / rate.max(1.0);
        let message = format!(
            "{}: {} of {}, {}/s, {left_s:.0} s left",
            target.name,
            numbers::bytes(done_bytes),
            numbers::bytes(total_bytes),
            numbers::bytes(rate as u64)
        );
        report(progress, "fill", done_bytes, total_bytes, &message)
    };
    let mut make = contents_of(job.contents, job.seed);
    fill::fill_ranges(&target.name, &*target.device, sets, options.open.disk.engine, &mut *make, &mut tick)?;
    fill::check_populated_ranges(&target.name, &*target.device, sets, false)?;
    Ok(total_bytes)
}

/// Returns an error if the file system has too little space for the unallocated part of the target.
/// Block devices have all their space.
fn need_space(target: &OpenTarget, sets: &[Range<u64>]) -> Result<()> {
    let Some(path) = target.path.as_deref().filter(|path| path.is_file()) else { return Ok(()) };
    let lacking = |sets: &[Range<u64>]| {
        let mut bytes = 0;
        let stored = |extent: &Extent| extent.kind == ExtentKind::Data && extent.depth == 0;
        fill::for_extents(&target.name, &*target.device, sets, &mut |extent| {
            bytes += if stored(extent) { 0 } else { extent.len_bytes };
        })?;
        Ok::<u64, LabError>(bytes)
    };
    let needed_bytes = lacking(sets)?;
    let dir = folder_of(path);
    let free_bytes = free_bytes(&dir);
    if needed_bytes <= free_bytes {
        return Ok(());
    }
    // Preallocated space (fallocate) is reported as a hole, but is available.
    let size_bytes = target.device.geometry().size_bytes;
    let all = 0..size_bytes;
    let stored_bytes = size_bytes - lacking(slice::from_ref(&all))?;
    let taken_bytes = fs::metadata(path).map_or(0, |found| found.blocks().saturating_mul(512));
    if needed_bytes <= free_bytes.saturating_add(taken_bytes.saturating_sub(stored_bytes)) {
        return Ok(());
    }
    Err(LabError::NoSpaceToFill { target: target.name.clone(), needed_bytes, dir, free_bytes })
}

fn folder_of(path: &Path) -> PathBuf {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new(".")).to_owned()
}

/// A function that makes the contents for an offset.
fn contents_of(contents: Contents, seed: u64) -> Box<fill::MakeContents<'static>> {
    match contents {
        Contents::Zero => Box::new(|_, buf| buf.fill(0)),
        Contents::Incompressible => Box::new(move |offset, buf| data::fill(seed, offset, buf)),
        Contents::Verified => Box::new(move |offset, buf| run::fill_verified(seed, offset, buf)),
        Contents::Mixed { compressible_percent, duplicate_percent } => Box::new(move |offset, buf| {
            let kept = (data::SECTOR_BYTES as f64 * (1.0 - compressible_percent / 100.0)).round() as usize;
            for (index, block) in buf.chunks_mut(data::SECTOR_BYTES).enumerate() {
                let at = offset + (index * data::SECTOR_BYTES) as u64;
                // One of eight patterns, for this percentage of the blocks.
                let number = at / data::SECTOR_BYTES as u64;
                let is_copy = (number.wrapping_mul(61) % 100) as f64 + 0.5 < duplicate_percent;
                let pattern = (number % 8) * data::SECTOR_BYTES as u64;
                data::fill(seed, if is_copy { pattern } else { at }, block);
                let len = block.len();
                block[kept.min(len)..].fill(0);
            }
        }),
    }
}

fn resize(path: &Path, size_bytes: u64) -> Result<()> {
    let resized = OpenOptions::new().write(true).open(path).and_then(|file| file.set_len(size_bytes));
    resized.map_err(LabError::file("resize", path))
}

/// Files that were created here. They are removed when this is dropped, unless kept.
#[derive(Debug, Default)]
struct CreatedFiles {
    files: Vec<PathBuf>,
    kept: bool,
}

impl CreatedFiles {
    fn make(&mut self, spec: &str, options: &PrepareOptions) -> Result<()> {
        let Some(size_bytes) = options.create_bytes else { return Ok(()) };
        let bad = |what: String, hint: &str| Err(LabError::BadOptions { what, hint: hint.into() });
        if size_bytes == 0 || !size_bytes.is_multiple_of(4096) {
            return bad(
                format!("cannot create a file of {size_bytes} bytes"),
                "use a multiple of 4K (`PrepareOptions::create_bytes`)",
            );
        }
        let path = Path::new(spec);
        if spec.starts_with("null:") || open::names_export(spec) {
            return bad(format!("{spec} cannot be created"), "leave `PrepareOptions::create_bytes` out");
        }
        let known = known::by_extension(path);
        if let Some(foreign) = known.filter(|known| known.format.is_none() && !path.exists()) {
            return bad(
                format!("{spec} cannot be created: its extension is that of {}, which is not written", foreign.name),
                "use another extension (.raw for a raw file)",
            );
        }
        let is_disk = known.and_then(|known| known.format).is_some_and(|format| format.driver().has_blocks);
        match fs::metadata(path) {
            Ok(found) if !found.is_file() => {
                return bad(
                    format!("{spec} is not a regular file and cannot be created"),
                    "leave `PrepareOptions::create_bytes` out",
                );
            }
            // The length of the file is not the size of the disk. `refuse_smaller` checks the size
            // of the open disk.
            Ok(_) if is_disk => return Ok(()),
            Ok(found) if found.len() == size_bytes => return Ok(()),
            Ok(_) if guard::is_own(path) => return resize(path, size_bytes),
            Ok(_) if options.destroy_data => {
                guard::refuse_used(spec, path)?;
                // Resizing the file would damage a virtual disk with another file extension.
                let found = open::open(spec, &OpenHow { writable: false, ..options.open.clone() })?;
                if found.kind != "raw file" {
                    return Ok(());
                }
                drop(found);
                resize(path, size_bytes)?;
                // The file is filled, like one that was created here.
                guard::mark_own(path);
                return Ok(());
            }
            Ok(found) => {
                let what = format!(
                    "{spec} exists with {} bytes instead of {size_bytes}, and the lab did not create it",
                    found.len()
                );
                return bad(
                    what,
                    "use another name, its own size, or `PrepareOptions::destroy_data` to replace it, or leave `PrepareOptions::create_bytes` out",
                );
            }
            Err(_) => {}
        }
        if is_disk {
            create(path, &CreateRequest { size_bytes: Some(size_bytes), ..CreateRequest::default() })?;
        } else {
            File::create_new(path).and_then(|file| file.set_len(size_bytes)).map_err(LabError::file("create", path))?;
        }
        guard::mark_own(path);
        self.files.push(path.to_owned());
        Ok(())
    }

    fn has(&self, spec: &str) -> bool {
        self.files.iter().any(|file| file == Path::new(spec))
    }

    fn keep(mut self) {
        self.kept = true;
    }
}

impl Drop for CreatedFiles {
    fn drop(&mut self) {
        if !self.kept {
            for file in &self.files {
                // The error that led here is returned.
                let _ = fs::remove_file(file);
            }
        }
    }
}

#[cfg(test)]
#[path = "prepare_tests.rs"]
mod tests;
