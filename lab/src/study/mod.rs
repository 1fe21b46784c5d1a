//! The studies: experiments of published papers, from preparation to verdict.
//!
//! ```text
//!   containers/        raw file, fixed, dynamic, differencing; VHD and VHDX
//!   access_paths/      the cost of NBD, NVMe/TCP, iSCSI, SMB; from a guest, by agents
//!   native_and_guest/  a disk on the host and in a virtual machine
//!   zero_payload/      writes of zeros against writes of data, where zeros are not stored
//!   queue_depth/       the queue depth that a target needs: the Storage Spaces paper's procedure
//!   tiers/             a zipf load on fast and slow members, before and after an optimisation
//!   raw_and_file/      raw device mappings, and flat files on a file system, against the device
//!   flushed.rs         counted writes with the flush after them
//!   budget.rs          the time budget of a quick study
//!   warnings.rs        warnings that several studies share
//! ```
//!
//! All studies take [`StudyOptions`] and return a [`StudyReport`]. A study that is stopped after
//! its first measurement saves a partial result, and its verdict says so. A study that is stopped
//! earlier ends with [`LabError::Stopped`]. Its scratch folder is removed in both cases.

pub mod access_paths;
mod budget;
pub mod containers;
pub mod flushed;
pub mod native_and_guest;
pub mod queue_depth;
pub mod raw_and_file;
pub mod tiers;
mod warnings;
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
    /// Choose sizes and rounds so that the study ends within two minutes.
    pub quick: bool,
    /// Parent of the scratch folder. Default: the current folder.
    pub dir: Option<PathBuf>,
    /// How I/O is submitted.
    pub engine: EngineKind,
    /// Rounds of each cell. Default: chosen by the study.
    pub rounds: Option<usize>,
    /// Time of one cell, warm-up included. Default: chosen by the study.
    pub cell: Option<Duration>,
    /// File for the JSON result. Default: `diskwright-<study>-<time>.json` in the current folder.
    pub output: Option<PathBuf>,
    /// Keep the scratch folder.
    pub keep: bool,
}

impl StudyOptions {
    /// `quick` if the study is quick, else `full`.
    pub(crate) fn pick<T>(&self, quick: T, full: T) -> T {
        if self.quick { quick } else { full }
    }

    /// The number of rounds: the option, or else `usual`.
    ///
    /// # Errors
    /// [`LabError::BadOptions`] for 0 rounds.
    pub(crate) fn rounds_or(&self, usual: usize) -> Result<usize> {
        match self.rounds.unwrap_or(usual) {
            0 => Err(LabError::BadOptions {
                what: "0 rounds measure nothing".into(),
                hint: "use at least 1, better 3".into(),
            }),
            rounds => Ok(rounds),
        }
    }

    /// Begins a study before it makes any file: examines machine and clock, and checks that the
    /// result can be saved.
    ///
    /// # Errors
    /// As [`Output::check`].
    pub(crate) fn begin(&self, study: &str, schema: &str) -> Result<StartedStudy> {
        let (start, head) = (Instant::now(), Head::begin(schema));
        let usual = || PathBuf::from(format!("diskwright-{study}-{}.json", head.started_utc));
        let output = Output::check(&self.output.clone().unwrap_or_else(usual), Kind::Result)?;
        Ok(StartedStudy { start, head, output })
    }
}

/// Start, head and output of a study that has begun.
#[derive(Debug)]
pub(crate) struct StartedStudy {
    /// Start of the study.
    pub start: Instant,
    /// The head of its result, with the machine and no verdict yet.
    pub head: Head,
    /// File for the result.
    pub output: Output,
}

impl StartedStudy {
    /// Time since it began, nanoseconds.
    pub fn took_ns(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// The head of the complete or stopped result.
    pub fn end(&self, verdict: String, stopped: bool) -> Head {
        Head {
            verdict,
            took_ns: self.took_ns(),
            end: if stopped { End::Stopped } else { End::Complete },
            ..self.head.clone()
        }
    }
}

/// The result of a study, and where it is saved.
#[derive(Debug)]
pub struct StudyReport<T> {
    /// The result, also if it could not be saved.
    pub result: T,
    /// The saved file, or the error of saving. `result` is complete in both cases.
    pub saved: Result<PathBuf>,
    /// Whether the study was stopped before its end. The result's head says so too.
    pub stopped: bool,
    /// The error that ended the study before its end; the result has what was measured until then.
    pub failed: Option<LabError>,
}

impl<T: Serialize> StudyReport<T> {
    /// Saves the result. A failed save is recorded in `saved`.
    fn save(result: T, output: &Output, stopped: bool) -> Self {
        let saved = output.save(&result).map(|()| output.path().to_owned());
        Self { result, saved, stopped, failed: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_that_cannot_be_saved_is_returned() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("r.json");
        let options = StudyOptions { output: Some(path.clone()), ..StudyOptions::default() };
        let begun = options.begin("zero-payload", "diskwright.study.zero-payload/3").unwrap();
        assert_eq!((begun.end(String::new(), true).end, begun.head.end.clone()), (End::Stopped, End::Stopped));
        let output = begun.output;
        let report = StudyReport::save(7, &output, false);
        assert_eq!(report.saved.unwrap(), path);
        // Another program created the file while the study ran.
        std::fs::write(&path, "mine").unwrap();
        let report = StudyReport::save(7, &output, false);
        assert_eq!(report.result, 7);
        assert!(report.saved.unwrap_err().to_string().contains("is not a result"));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "mine");
        assert!(options.begin("zero-payload", "diskwright.study.zero-payload/3").is_err());
    }
}
