//! Results as they are saved: complete, with everything that made them, under a schema that has a version.

use crate::{
    LabError, Result,
    child::OpenCost,
    machine::{Machine, Place, Versions},
    measure::WorkloadResult,
    stats::Summary,
    targets::Container,
    warning::Warning,
};
use serde::{Deserialize, Serialize};
use std::{
    io::Write,
    path::{Path, PathBuf},
};

/// Schema of [`ContainersResult`].
pub const CONTAINERS_SCHEMA: &str = "diskwright.study.containers/1";

/// The study `containers`, whole.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ContainersResult {
    /// [`CONTAINERS_SCHEMA`].
    pub schema: String,
    /// The conclusion, in a sentence or two.
    pub verdict: String,
    /// When it began, as in `20261120T221749Z`.
    pub started_utc: String,
    /// How long it took, nanoseconds.
    pub took_ns: u64,
    /// On what.
    pub machine: Machine,
    /// Where the disks lay.
    pub place: Place,
    /// By which programs.
    pub versions: Versions,
    /// How.
    pub options: ContainersRecord,
    /// What the generator itself costs for each request, on `null:` at the first depth, nanoseconds.
    pub generator_ns_per_io: f64,
    /// How each target was prepared and proved.
    pub preparation: Vec<PreparedRecord>,
    /// Creation times.
    pub creation: Vec<CreationRecord>,
    /// The chain-length experiment.
    pub chain: Option<ChainRecord>,
    /// Each workload at each depth, on every target.
    pub workloads: Vec<ComparedWorkload>,
    /// Reasons for doubt.
    pub warnings: Vec<Warning>,
}

/// The options in force.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ContainersRecord {
    /// Two minutes at most.
    pub quick: bool,
    /// Size of every disk.
    pub size_bytes: u64,
    /// Payload block of the dynamic and differencing disks: the formats' default, 2 MiB.
    pub block_bytes: u64,
    /// Rounds.
    pub rounds: usize,
    /// Queue depths.
    pub queue_depths: Vec<u32>,
    /// "direct" or "page".
    pub cache: String,
    /// "auto", "io_uring" or "pread".
    pub engine: String,
    /// Seed of contents, offsets and orders.
    pub seed: u64,
}

/// How one target was prepared.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PreparedRecord {
    /// Which.
    pub container: Container,
    /// Its name.
    pub target: String,
    /// The cache mode in force.
    pub cache: String,
    /// Bytes written to it through the block queue.
    pub filled_bytes: u64,
    /// How long that took, nanoseconds.
    pub fill_ns: u64,
    /// Bytes read back, after closing and opening it again, and found equal to what was written: all of them, or the study
    /// would have ended with an error.
    pub verified_bytes: u64,
    /// How long that took, nanoseconds.
    pub verify_ns: u64,
    /// Whether its extents called every byte data of its own.
    pub populated: bool,
    /// Space that its file takes.
    pub file_allocated_bytes: u64,
}

/// How long it took to create an empty disk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CreationRecord {
    /// Which.
    pub container: Container,
    /// Its name.
    pub target: String,
    /// Virtual size.
    pub size_bytes: u64,
    /// Times, nanoseconds.
    pub wall_ns: Summary,
    /// Space that the new file takes.
    pub file_allocated_bytes: u64,
}

/// The chain-length experiment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChainRecord {
    /// Size of each disk, and of the data in the base.
    pub size_bytes: u64,
    /// Bytes of the longest chain that were read back through its top and found right.
    pub verified_bytes: u64,
    /// How long it took to make all its files, nanoseconds.
    pub made_in_ns: u64,
    /// Each length: differencing disks above the base.
    pub lengths: Vec<ChainLength>,
    /// Each workload; its cells are in the order of `lengths`, the first being the base of the ratios.
    pub reads: Vec<WorkloadResult>,
}

/// One length of chain.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChainLength {
    /// Differencing disks above the base.
    pub children: u32,
    /// What it cost to open it and read one block.
    pub open: OpenCost,
    /// Whether that was in a fresh process; else the memory is that of the whole program.
    pub in_child_process: bool,
}

/// A workload on all targets, with the paper's figures.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ComparedWorkload {
    /// What was measured.
    #[serde(flatten)]
    pub result: WorkloadResult,
    /// For each cell, the paper's ratio to the physical disk (Windows Server 2008 R2, queue depth 64), where its tables have one.
    pub paper_ratios: Vec<Option<f64>>,
}

/// Writes `result` as JSON to a new file at `path`, in one step: the file is complete or not there.
///
/// # Errors
/// [`LabError::File`].
pub fn save<T: Serialize>(path: &Path, result: &T) -> Result<()> {
    let failed = |source| LabError::File { doing: "write the result to", path: path.to_owned(), source };
    let json = serde_json::to_vec_pretty(result).map_err(|error| failed(error.into()))?;
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    let written = std::fs::File::create(&partial)
        .and_then(|mut file| {
            file.write_all(&json)?;
            file.write_all(b"\n")
        })
        .and_then(|()| std::fs::rename(&partial, path));
    if written.is_err() {
        // The error to tell is the first.
        let _ = std::fs::remove_file(&partial);
    }
    written.map_err(failed)
}

/// A result as it lies in a file: what it says to be, and its JSON.
#[derive(Debug)]
pub struct Saved {
    path: PathBuf,
    schema: String,
    value: serde_json::Value,
}

impl Saved {
    /// Reads the file.
    ///
    /// # Errors
    /// [`LabError::File`]; [`LabError::BadOptions`] when it is no JSON.
    pub fn open(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(LabError::file("read the result", path))?;
        let value: serde_json::Value = serde_json::from_str(&text).map_err(|error| LabError::BadOptions {
            what: format!("{} is no result: {error}", path.display()),
            hint: "give a file that the lab has saved".into(),
        })?;
        let schema = value.get("schema").and_then(serde_json::Value::as_str).unwrap_or_default().to_owned();
        Ok(Self { path: path.to_owned(), schema, value })
    }

    /// Its schema; empty where it has none.
    pub fn schema(&self) -> &str {
        &self.schema
    }

    /// Whether it is of the family of `known`, whatever its version.
    pub fn is(&self, known: &str) -> bool {
        family(&self.schema) == family(known)
    }

    /// The result, which is to be of the schema `known`.
    ///
    /// # Errors
    /// [`LabError::BadOptions`] when it is another kind of result, from a newer version, or damaged.
    pub fn into_result<T: serde::de::DeserializeOwned>(self, known: &str) -> Result<T> {
        let shown = self.path.display();
        let refuse = |what: String, hint: &str| Err(LabError::BadOptions { what, hint: hint.to_owned() });
        if !self.is(known) {
            return refuse(
                format!("{shown} has the schema \"{}\" and not {known}", self.schema),
                "give a result of the right kind, or another file",
            );
        }
        if version(&self.schema) > version(known) {
            return refuse(
                format!(
                    "{shown} was written by a newer Diskwright: its schema is {}, and this one knows up to {known}",
                    self.schema
                ),
                "update this program, or use the one that wrote it",
            );
        }
        serde_json::from_value(self.value).or_else(|error| {
            refuse(format!("{shown} is damaged: {error}"), "measure again, or find the file as it was saved")
        })
    }
}

fn family(schema: &str) -> &str {
    schema.rsplit_once('/').map_or(schema, |(family, _)| family)
}

/// A version that is no number is newer than any.
fn version(schema: &str) -> u64 {
    schema.rsplit_once('/').and_then(|(_, version)| version.parse().ok()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_is_saved_whole_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("r.json");
        save(&path, &ContainersRecord { rounds: 3, ..Default::default() }).unwrap();
        let back: ContainersRecord = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        assert_eq!(back.rounds, 3);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
        let error = save(&dir.path().join("missing/r.json"), &1).unwrap_err();
        assert!(error.to_string().contains("r.json"), "{error}");
    }
}
