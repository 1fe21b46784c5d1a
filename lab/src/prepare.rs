//! Prepares the targets that a user named: creates, guards, opens, fills and inspects them.
//!
//! ```text
//!   spec ─▶ create it, if asked for ─▶ open for reading ─▶ may it be written? (inspect/guard.rs)
//!                                                            │ until here nothing has changed
//!        ┌───────────────────────────────────────────────────┘ but files that were created
//!        ▼
//!   open as the job needs it ─▶ fill the working set, if asked for or if the file is the lab's
//!        ─▶ check by its extents that all of it is allocated ─▶ sample its contents ─▶ warnings
//! ```
//!
//! Invariant: when preparing fails or is stopped, files that existed before are unchanged, unless
//! they may be overwritten, and files that were created here are removed.

use crate::{
    LabError, Result, fill,
    inspect::{self, Writing, doubts, guard, usage},
    open::{self, OpenHow},
    progress::{Progress, report},
};
use diskwright_disk::{CreateRequest, create};
use diskwright_load::{
    LoadError, OpenTarget, data,
    job::{Contents, Job},
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

/// What may be done to targets before they are measured.
#[derive(Debug, Clone, Default)]
pub struct PrepareOptions {
    /// Make each target that is not there: a file of this size, or a dynamic disk where the name
    /// says `.vhd` or `.vhdx`.
    pub create_bytes: Option<u64>,
    /// Fill the working sets first, whatever they hold.
    pub fill: bool,
    /// Allow data of a target to be overwritten.
    pub destroy_data: bool,
    /// Cache mode and options. A target that is to be written is opened for writing.
    pub open: OpenHow,
}

/// Targets that may be measured, and what must be said of them.
#[derive(Debug)]
pub struct Prepared {
    /// The open targets, in the order in which they were named.
    pub targets: Vec<OpenTarget>,
    /// What was seen, where it casts doubt on a measurement.
    pub warnings: Vec<Warning>,
}

/// Prepares the targets that `specs` name for `job`.
///
/// # Errors
/// What is wrong with the job or with a target; [`LabError::InUse`] and [`LabError::HoldsData`]
/// where writing is not allowed; [`LabError::NoSpaceToFill`]; [`LabError::Stopped`] when `progress`
/// says so.
pub fn prepare(job: &Job, specs: &[String], options: &PrepareOptions, progress: &mut dyn Progress) -> Result<Prepared> {
    job.validate().map_err(LoadError::from)?;
    if job.phases.iter().any(|phase| phase.loads.is_empty()) || specs.is_empty() {
        return Err(LabError::BadOptions { what: "there is no target".into(), hint: "name at least one".into() });
    }
    let mut made = Made::default();
    for spec in specs {
        made.make(spec, options)?;
    }
    let mut connected: Vec<Option<OpenTarget>> = specs.iter().map(|_| None).collect();
    for (number, spec) in specs.iter().enumerate() {
        let writes = job.phases.iter().flat_map(|phase| &phase.loads).any(doubts::writes);
        if writes || options.fill {
            // Before it is opened, for what is in use may not even be opened.
            guard::refuse_used(spec, Path::new(spec))?;
            // An export is connected to once: a server may end with its first client. To connect
            // for writing changes nothing there.
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
        let sets = doubts::working_sets(job, number, target.device.geometry().size_bytes, |_| true);
        // What the memory of this machine holds says nothing of an export's server.
        if !target.is_export() {
            in_all_bytes += sets.iter().map(|set| set.end - set.start).sum::<u64>();
        }
        let engine = options.open.disk.engine;
        let look = |target: &OpenTarget| inspect::look(&target.name, &*target.device, &sets, job.seed, engine);
        let is_own = made.has(&target.name) || target.path.as_deref().is_some_and(guard::is_own);
        let mut seen = None;
        if !options.fill && is_own {
            let contents = look(target)?;
            seen = doubts::of_target(job, number, &target.name, &contents).is_empty().then_some(contents);
        }
        if (options.fill || is_own) && seen.is_none() {
            let filled_bytes = fill_sets(job, target, &sets, options, progress)?;
            let mut contents = look(target)?;
            contents.filled_bytes = filled_bytes;
            seen = Some(contents);
        }
        let contents = seen.map_or_else(|| look(target), Ok)?;
        warnings.extend(doubts::of_target(job, number, &target.name, &contents));
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
        warnings.extend(doubts::of_job(job, in_all_bytes, Machine::detect().memory_bytes));
    }
    made.keep();
    Ok(Prepared { targets, warnings })
}

fn is_written(job: &Job, number: usize) -> bool {
    let loads = job.phases.iter().flat_map(|phase| &phase.loads);
    loads.filter(|load| load.targets.is_empty() || load.targets.contains(&number)).any(doubts::writes)
}

/// Whether the job may write this target, and fill it.
fn allow(
    job: &Job,
    number: usize,
    target: &OpenTarget,
    options: &PrepareOptions,
    progress: &mut dyn Progress,
) -> Result<()> {
    let size_bytes = target.device.geometry().size_bytes;
    let ranges = doubts::working_sets(job, number, size_bytes, |load| options.fill || doubts::writes(load));
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
    let message = format!("{}: whether there is data in it", target.name);
    inspect::allow(&writing, options.destroy_data, &mut |done| report(progress, "look", done, total, &message))
}

/// Refuses a virtual disk that exists and is smaller than asked for: the job would run on the
/// smaller one.
fn refuse_smaller(target: &OpenTarget, options: &PrepareOptions) -> Result<()> {
    let size_bytes = target.device.geometry().size_bytes;
    match (options.create_bytes, &target.path) {
        (Some(asked_bytes), Some(path)) if path.is_file() && size_bytes < asked_bytes => Err(LabError::BadOptions {
            what: format!(
                "{} exists and has {size_bytes} bytes, fewer than the {asked_bytes} asked for \
                 (`PrepareOptions::create_bytes`); \
                 a virtual disk that exists is not made larger",
                target.name
            ),
            hint: "ask for its own size or less, use another name, or remove the file to have it created anew".into(),
        }),
        _ => Ok(()),
    }
}

/// Fills the working sets, and proves by the extents that they have space. Returns the bytes
/// written.
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

/// Refuses when the file system has less room than the target lacks. What lies on a device has all
/// its space.
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
    // Space that was set aside for the file beforehand (fallocate) reads as a hole, and is there
    // all the same.
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

/// What belongs at an offset, for contents of each kind.
fn contents_of(contents: Contents, seed: u64) -> Box<fill::Make<'static>> {
    match contents {
        Contents::Zero => Box::new(|_, buf| buf.fill(0)),
        Contents::Incompressible => Box::new(move |offset, buf| data::fill(seed, offset, buf)),
        Contents::Verified => Box::new(move |offset, buf| run::fill_verified(seed, offset, buf)),
        Contents::Mixed { compressible_percent, duplicate_percent } => Box::new(move |offset, buf| {
            let kept = (data::SECTOR_BYTES as f64 * (1.0 - compressible_percent / 100.0)).round() as usize;
            for (index, block) in buf.chunks_mut(data::SECTOR_BYTES).enumerate() {
                let at = offset + (index * data::SECTOR_BYTES) as u64;
                // One of eight patterns, for as many blocks in a hundred as are to be copies.
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

/// Files that were made here. Dropped, it removes them, unless they are to be kept.
#[derive(Debug, Default)]
struct Made {
    files: Vec<PathBuf>,
    kept: bool,
}

impl Made {
    fn make(&mut self, spec: &str, options: &PrepareOptions) -> Result<()> {
        let Some(size_bytes) = options.create_bytes else { return Ok(()) };
        let bad = |what: String, hint: &str| Err(LabError::BadOptions { what, hint: hint.into() });
        if size_bytes == 0 || !size_bytes.is_multiple_of(4096) {
            return bad(
                format!("cannot make a file of {size_bytes} bytes"),
                "use a multiple of 4K (`PrepareOptions::create_bytes`)",
            );
        }
        let path = Path::new(spec);
        if spec.starts_with("null:") || open::names_export(spec) {
            return bad(format!("{spec} cannot be made"), "leave `PrepareOptions::create_bytes` out");
        }
        let is_disk = path.extension().is_some_and(|extension| extension == "vhd" || extension == "vhdx");
        match fs::metadata(path) {
            Ok(found) if !found.is_file() => {
                return bad(
                    format!("{spec} is no file and cannot be made"),
                    "leave `PrepareOptions::create_bytes` out",
                );
            }
            // The length of the file is not the size of the disk: `refuse_smaller` looks when the
            // disk is open.
            Ok(_) if is_disk => return Ok(()),
            Ok(found) if found.len() == size_bytes => return Ok(()),
            Ok(_) if guard::is_own(path) => return resize(path, size_bytes),
            Ok(_) if options.destroy_data => {
                guard::refuse_used(spec, path)?;
                // A virtual disk with an unusual name would be torn by a new length.
                let found = open::open(spec, &OpenHow { writable: false, ..options.open.clone() })?;
                if found.kind != "raw file" {
                    return Ok(());
                }
                drop(found);
                resize(path, size_bytes)?;
                // Filled like a file that was created here.
                guard::mark_own(path);
                return Ok(());
            }
            Ok(found) => {
                let what = format!(
                    "{spec} exists with {} bytes, not with the {size_bytes} asked for, and was not made by the lab",
                    found.len()
                );
                return bad(
                    what,
                    "use another name, its own size, `PrepareOptions::destroy_data` to make it anew, or leave `PrepareOptions::create_bytes` out",
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

impl Drop for Made {
    fn drop(&mut self) {
        if !self.kept {
            for file in &self.files {
                // The error that led here is the one to tell.
                let _ = fs::remove_file(file);
            }
        }
    }
}

#[cfg(test)]
#[path = "prepare_tests.rs"]
mod tests;
