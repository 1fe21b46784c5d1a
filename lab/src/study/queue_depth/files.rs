//! The files under test: made, filled and looked at as `prepare` makes them; or the
//! targets that the user gave.
//!
//! Pre-test 2 spreads the same volume of data over one, two and four files, so beside the file of
//! the whole volume there are one of half of it and two of a quarter. Those that no later stage
//! needs go as soon as it is over.

use super::{QueueDepthOptions, Settings};
use crate::{
    LabError, Result,
    open::OpenHow,
    prepare::{self, PrepareOptions},
    progress::Progress,
    scratch::Scratch,
};
use diskwright_disk::OpenOptions;
use diskwright_load::{OpenTarget, job::Bytes, warning::Warning};
use std::{fs, path::PathBuf, time::Duration};

/// Files of pre-test 2, as parts of the volume.
const PARTS: [u64; 4] = [1, 2, 4, 4];

/// Targets, ready to be measured.
pub(super) struct Made {
    pub targets: Vec<OpenTarget>,
    /// What was seen that casts doubt.
    pub warnings: Vec<Warning>,
    /// Bytes under test.
    pub volume_bytes: u64,
    /// The study's own, which may be removed.
    own: Vec<PathBuf>,
}

impl Made {
    /// Lets all but the first `files` go.
    pub fn keep(&mut self, files: usize) {
        self.targets.truncate(files);
        for path in self.own.drain(files.min(self.own.len())..) {
            // The scratch folder takes what is left.
            let _ = fs::remove_file(path);
        }
    }
}

/// Makes the files, of which the later stages need `files_known` where that is known already, or
/// prepares what was given.
///
/// # Errors
/// No space, a target that may not be written, [`LabError::Stopped`].
pub(super) fn make(
    settings: &Settings,
    options: &QueueDepthOptions,
    files_known: Option<u32>,
    scratch: &Scratch,
    progress: &mut dyn Progress,
) -> Result<Made> {
    let disk = OpenOptions { engine: options.study.engine, ..OpenOptions::default() };
    let open = OpenHow { cache: settings.cache, disk, ..OpenHow::default() };
    // A load that reads and writes, so that everything is filled, guarded and looked at.
    let mut job = super::plan::job(super::Stage::Depths, settings, Duration::from_secs(1))?;
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
        return Ok(Made { targets: prepared.targets, warnings, volume_bytes, own: Vec::new() });
    }
    let volume_bytes = settings.size_bytes.unwrap_or(super::settings::QUICK_BYTES);
    let count = files_known.map_or(PARTS.len(), |files| files as usize).min(PARTS.len());
    let needed_bytes: u64 = PARTS[..count].iter().map(|part| volume_bytes / part).sum();
    scratch.need("the study", needed_bytes + (64 << 20))?;
    let mut made = Made { targets: Vec::new(), warnings: Vec::new(), volume_bytes, own: Vec::new() };
    for (index, part) in PARTS.iter().enumerate().take(count) {
        let name = format!("test{}.dat", index + 1);
        let path = scratch.path().join(&name);
        let how =
            PrepareOptions { create_bytes: Some(volume_bytes / part), open: open.clone(), ..PrepareOptions::default() };
        let spec = path.to_string_lossy().into_owned();
        let prepared = prepare::prepare(&job, &[spec], &how, progress)?;
        made.own.push(path);
        made.warnings.extend(prepared.warnings);
        for mut target in prepared.targets {
            // The scratch folder has another name each time; the file has not.
            target.name.clone_from(&name);
            made.targets.push(target);
        }
    }
    if made.targets.is_empty() {
        return Err(LabError::BadOptions {
            what: "there is nothing to measure".into(),
            hint: "name at least one target (`QueueDepthOptions::targets`)".into(),
        });
    }
    Ok(made)
}
