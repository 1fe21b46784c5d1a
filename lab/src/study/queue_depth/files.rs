//! The targets of the study: files that it creates, fills and inspects, or targets that the user
//! gave.
//!
//! Pre-test 2 spreads the same volume of data over one, two and four files. So there is a file of
//! the whole volume, one of half of it and two of a quarter. After pre-test 2, files that no later
//! stage needs are removed.

use super::{QueueDepthOptions, Settings, Stage, bed::Bed, plan};
use crate::{
    LabError, Result,
    open::OpenHow,
    prepare::{self, PrepareOptions},
    progress::Progress,
    scratch::Scratch,
};
use diskwright_disk::OpenOptions;
use diskwright_load::{
    Job, OpenTarget, Run,
    job::Bytes,
    machine::Place,
    record::TargetRecord,
    run::{self, RunOptions, Watch},
    warning::Warning,
};
use std::{fs, path::PathBuf, time::Duration};

/// Sizes of the files of pre-test 2, as divisors of the volume.
const PARTS: [u64; 4] = [1, 2, 4, 4];

/// Files or targets of this machine, prepared.
#[derive(Debug)]
pub(super) struct LocalBed {
    targets: Vec<OpenTarget>,
    warnings: Vec<Warning>,
    volume_bytes: u64,
    /// Files that the study created, which may be removed.
    own: Vec<PathBuf>,
    /// Removed after the targets are closed.
    scratch: Scratch,
}

impl Bed for LocalBed {
    fn records(&self) -> Vec<TargetRecord> {
        self.targets.iter().map(OpenTarget::record).collect()
    }

    fn volume_bytes(&self) -> u64 {
        self.volume_bytes
    }

    fn warnings(&self) -> Vec<Warning> {
        self.warnings.clone()
    }

    fn place(&self) -> Option<Place> {
        (!self.own.is_empty()).then(|| Place::detect(self.scratch.path()))
    }

    fn measure(&self, job: &Job, members: usize, watch: &dyn Watch) -> Result<Run> {
        Ok(run::run(job, &self.targets[..members], &RunOptions::default(), watch)?)
    }

    fn narrow(&mut self, members: usize) {
        self.targets.truncate(members);
        for path in self.own.drain(members.min(self.own.len())..) {
            // A file that remains is removed with the scratch folder.
            let _ = fs::remove_file(path);
        }
    }
}

/// Creates the files, or prepares the given targets. `files_known` is the number of files that
/// later stages need, if pre-test 2 is complete.
///
/// # Errors
/// No space, a target that must not be written, [`LabError::Stopped`].
pub(super) fn make(
    settings: &Settings,
    options: &QueueDepthOptions,
    files_known: Option<u32>,
    progress: &mut dyn Progress,
) -> Result<LocalBed> {
    let scratch = Scratch::new(options.study.dir.as_deref(), options.study.keep)?;
    let disk = OpenOptions { engine: options.study.engine, ..OpenOptions::default() };
    let open = OpenHow { cache: settings.cache, disk, ..OpenHow::default() };
    // A load that reads and writes, so that targets are filled, checked for data and inspected.
    let mut job = plan::job(Stage::Depths, settings, Duration::from_secs(1))?;
    if !settings.targets.is_empty() {
        job.phases[0].loads[0].working_set = Bytes(settings.size_bytes.unwrap_or(0));
        let how = PrepareOptions {
            open: OpenHow { writable: false, ..options.prepare.open.clone() },
            ..options.prepare.clone()
        };
        let prepared = prepare::prepare(&job, &settings.targets, &how, progress)?;
        let smallest = prepared.targets.iter().map(|target| target.device.geometry().size_bytes).min().unwrap_or(0);
        let volume_bytes = settings.size_bytes.unwrap_or(smallest).min(smallest);
        let mut warnings = prepared.warnings;
        if prepared.targets.len() == 1 {
            warnings.push(Warning::LeftOut {
                what: "pre-test 2 (number of files)".into(),
                why: "one target was given; two or four are needed".into(),
            });
        }
        scratch.settle()?;
        return Ok(LocalBed { targets: prepared.targets, warnings, volume_bytes, own: Vec::new(), scratch });
    }
    let volume_bytes = settings.size_bytes.unwrap_or(super::settings::QUICK_BYTES);
    let count = files_known.map_or(PARTS.len(), |files| files as usize).min(PARTS.len());
    let needed_bytes: u64 = PARTS[..count].iter().map(|part| volume_bytes / part).sum();
    scratch.need("the study", needed_bytes + (64 << 20))?;
    let mut made = LocalBed { targets: Vec::new(), warnings: Vec::new(), volume_bytes, own: Vec::new(), scratch };
    for (index, part) in PARTS.iter().enumerate().take(count) {
        let name = format!("test{}.dat", index + 1);
        let path = made.scratch.path().join(&name);
        let how =
            PrepareOptions { create_bytes: Some(volume_bytes / part), open: open.clone(), ..PrepareOptions::default() };
        let spec = path.to_string_lossy().into_owned();
        let prepared = prepare::prepare(&job, &[spec], &how, progress)?;
        made.own.push(path);
        made.warnings.extend(prepared.warnings);
        for mut target in prepared.targets {
            // A name without the scratch folder, which is different in each run.
            target.name.clone_from(&name);
            made.targets.push(target);
        }
    }
    if made.targets.is_empty() {
        return Err(LabError::BadOptions {
            what: "no target was named".into(),
            hint: "name at least one target (`QueueDepthOptions::targets`)".into(),
        });
    }
    made.scratch.settle()?;
    Ok(made)
}
