//! The studies: an experiment of a paper, from preparation to conclusion.
//!
//! ```text
//!   containers/     raw file, fixed, dynamic, differencing; VHD and VHDX
//!   access_paths/   what it costs to reach a disk by NBD, or as an attached device
//!   zero_payload/   SQLIO's surprise: zeros that are never stored
//!   queue_depth/    how much load is enough: the Storage Spaces paper's procedure
//!   raw_and_file/   a file system, and virtual disks on it, against the bare device
//!   budget.rs       how a run that must end in time spends it
//!   doubts.rs       warnings that every study looks for
//! ```
//!
//! All of them take [`StudyOptions`] and give back a [`StudyReport`]. A study that is stopped while
//! it measures saves what it has measured, and its verdict says that it is partial. A study that is
//! stopped earlier ends with [`LabError::Stopped`]. Its scratch folder is removed in both cases.

pub mod access_paths;
mod budget;
pub mod containers;
mod doubts;
pub mod queue_depth;
pub mod raw_and_file;
pub mod zero_payload;

pub use containers::{ContainersOptions, run};

use crate::{
    LabError, Result,
    output::{Kind, Output},
};
use diskwright_load::record::{End, Head};
use diskwright_store::EngineKind;
use serde::Serialize;
use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

/// Options of every study.
#[derive(Debug, Clone, Default)]
pub struct StudyOptions {
    /// End within two minutes.
    pub quick: bool,
    /// Where to make the scratch folder; the current folder unless said.
    pub dir: Option<PathBuf>,
    /// How I/O is submitted.
    pub engine: EngineKind,
    /// Rounds; each study has its own number unless said.
    pub rounds: Option<usize>,
    /// Time of one cell, warm-up included; each study has its own unless said.
    pub cell: Option<Duration>,
    /// Where to save the JSON; `diskwright-<study>-<time>.json` in the current folder unless said.
    pub output: Option<PathBuf>,
    /// Keep the scratch folder.
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

    /// Begins a study: looks at machine and clock, and asks where the result may be saved, before
    /// anything is made.
    ///
    /// # Errors
    /// As [`Output::check`].
    pub(crate) fn begin(&self, study: &str, schema: &str) -> Result<Begun> {
        let (start, head) = (Instant::now(), Head::begin(schema));
        let usual = || PathBuf::from(format!("diskwright-{study}-{}.json", head.started_utc));
        let output = Output::check(&self.output.clone().unwrap_or_else(usual), Kind::Result)?;
        Ok(Begun { start, head, output })
    }
}

/// A study that has begun.
#[derive(Debug)]
pub(crate) struct Begun {
    /// The moment at which it began.
    pub start: Instant,
    /// The head of its result, as far as it is known.
    pub head: Head,
    /// Where the result will be saved.
    pub output: Output,
}

impl Begun {
    /// Time since it began, nanoseconds.
    pub fn took_ns(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// The head of the result, when all is measured or the user has stopped it.
    pub fn end(&self, verdict: String, stopped: bool) -> Head {
        Head {
            verdict,
            took_ns: self.took_ns(),
            end: if stopped { End::Stopped } else { End::Complete },
            ..self.head.clone()
        }
    }
}

/// What a study found, and where it is saved.
#[derive(Debug)]
pub struct StudyReport<T> {
    /// The result.
    pub result: T,
    /// Its file, or why it could not be saved: what was measured is there to be shown all the same.
    pub saved: Result<PathBuf>,
    /// Whether it was stopped in the middle; the result says so too.
    pub stopped: bool,
}

impl<T: Serialize> StudyReport<T> {
    /// Saves what was found, if it can be saved.
    fn save(result: T, output: &Output, stopped: bool) -> Self {
        let saved = output.save(&result).map(|()| output.path().to_owned());
        Self { result, saved, stopped }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_saved_is_there_to_be_shown() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("r.json");
        let options = StudyOptions { output: Some(path.clone()), ..StudyOptions::default() };
        let begun = options.begin("zero-payload", "diskwright.study.zero-payload/2").unwrap();
        assert_eq!((begun.end(String::new(), true).end, begun.head.end.clone()), (End::Stopped, End::Stopped));
        let output = begun.output;
        let report = StudyReport::save(7, &output, false);
        assert_eq!(report.saved.unwrap(), path);
        // Another program created the file while the study ran.
        std::fs::write(&path, "mine").unwrap();
        let report = StudyReport::save(7, &output, false);
        assert_eq!(report.result, 7);
        assert!(report.saved.unwrap_err().to_string().contains("no result"));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "mine");
        assert!(options.begin("zero-payload", "diskwright.study.zero-payload/2").is_err());
    }
}
