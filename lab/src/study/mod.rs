//! The studies: an experiment of a paper, from preparation to conclusion.
//!
//! ```text
//!   containers/     raw file, fixed, dynamic, differencing; VHD and VHDX
//!   access_paths/   what it costs to reach a disk by NBD, or as an attached device
//!   zero_payload/   SQLIO's surprise: zeros that are never stored
//!   queue_depth/    how much load is enough: the Storage Spaces paper's procedure
//!   raw_and_file/   a file system, and virtual disks on it, against the bare device
//!   budget.rs       how a run that must end in time spends it
//! ```
//!
//! What all of them are told is [`StudyOptions`], what all of them give back is a [`StudyReport`]. A study that is stopped while it measures keeps
//! what it has, saves it, and says so in its first line; one that is stopped before has nothing to say and ends with
//! [`LabError::Stopped`]. Either way its scratch folder goes.

pub mod access_paths;
mod budget;
pub mod containers;
pub mod queue_depth;
pub mod raw_and_file;
pub mod zero_payload;

pub use containers::{ContainersOptions, report::render, run};

use crate::{LabError, Result, result};
use diskwright_store::EngineKind;
use serde::Serialize;
use std::{path::PathBuf, time::Duration};

/// What every study is told, whatever it measures.
#[derive(Debug, Clone, Default)]
pub struct StudyOptions {
    /// End within two minutes.
    pub quick: bool,
    /// Where to make the scratch folder; the current folder unless said.
    pub dir: Option<PathBuf>,
    /// What moves the bytes.
    pub engine: EngineKind,
    /// Rounds; each study has its own number unless said.
    pub rounds: Option<usize>,
    /// Time of one cell, warm-up included; each study has its own unless said.
    pub cell: Option<Duration>,
    /// Where to save the JSON; `diskwright-<study>-<time>.json` in the current folder unless said.
    pub output: Option<PathBuf>,
    /// Leave the scratch folder.
    pub keep: bool,
}

impl StudyOptions {
    /// Chosen by `quick`.
    pub(crate) fn pick<T>(&self, quick: T, full: T) -> T {
        if self.quick { quick } else { full }
    }

    /// Rounds, unless the user says otherwise.
    ///
    /// # Errors
    /// [`LabError::BadOptions`] for none.
    pub(crate) fn rounds_or(&self, usual: usize) -> Result<usize> {
        match self.rounds.unwrap_or(usual) {
            0 => Err(LabError::BadOptions {
                what: "0 rounds measure nothing".into(),
                hint: "use at least 1, better 3".into(),
            }),
            rounds => Ok(rounds),
        }
    }

    /// Saves what the study of this name found.
    ///
    /// # Errors
    /// [`LabError::File`].
    pub(crate) fn save<T: Serialize>(
        &self,
        study: &str,
        started_utc: &str,
        result: T,
        stopped: bool,
    ) -> Result<StudyReport<T>> {
        let usual = || PathBuf::from(format!("diskwright-{study}-{started_utc}.json"));
        let saved_to = self.output.clone().unwrap_or_else(usual);
        result::save(&saved_to, &result)?;
        Ok(StudyReport { result, saved_to, stopped })
    }
}

/// What a study found, and where it is saved.
#[derive(Debug, Clone)]
pub struct StudyReport<T> {
    /// The result.
    pub result: T,
    /// Its file.
    pub saved_to: PathBuf,
    /// Whether it was stopped in the middle; the result says so too.
    pub stopped: bool,
}
