//! What the functions for the life of a disk return: frozen objects with attributes, sizes in
//! bytes.

use crate::{
    error::{for_convert_keywords, for_keywords},
    values::LostRange,
};
use diskwright_lib::{RangeKind, Verdict};
use pyo3::prelude::*;
use std::{path::PathBuf, time::SystemTime};

/// A disk that goes on in a new child.
#[pyclass(frozen, get_all, module = "diskwright")]
#[derive(Debug, Clone)]
pub(crate) struct Snapshot {
    /// The file that is the disk: the new, empty child.
    disk: PathBuf,
    /// The parent of the new child.
    parent: PathBuf,
    /// The new name of the image that was the disk; `None` if it was discarded.
    frozen: Option<PathBuf>,
    warnings: Vec<String>,
}

impl From<diskwright_lib::Snapshot> for Snapshot {
    fn from(done: diskwright_lib::Snapshot) -> Self {
        let warnings = done.warnings.iter().map(for_keywords).collect();
        Self { disk: done.disk, parent: done.parent, frozen: done.frozen, warnings }
    }
}

/// What a merge did.
#[pyclass(frozen, get_all, module = "diskwright")]
#[derive(Debug, Clone)]
pub(crate) struct Merged {
    /// The image that has all data.
    disk: PathBuf,
    /// The images whose data went into it, the nearest first.
    merged: Vec<PathBuf>,
    /// Children of the merged image, whose parent is `disk` now.
    relinked: Vec<PathBuf>,
    /// Bytes of data that went into it.
    data: u64,
    /// Bytes read and written.
    copied: u64,
    /// Bytes shared by the file system.
    shared: u64,
    /// Virtual size.
    size: u64,
    warnings: Vec<String>,
}

impl From<diskwright_lib::Merged> for Merged {
    fn from(done: diskwright_lib::Merged) -> Self {
        Self {
            disk: done.disk,
            merged: done.merged,
            relinked: done.relinked,
            data: done.data_bytes,
            copied: done.copied_bytes,
            shared: done.cloned_bytes,
            size: done.size_bytes.1,
            warnings: done.warnings.iter().map(for_keywords).collect(),
        }
    }
}

/// What a compaction did, or would do.
#[pyclass(frozen, get_all, module = "diskwright")]
#[derive(Debug, Clone)]
pub(crate) struct Compacted {
    /// Length of the file before.
    old_file_size: u64,
    /// Length of the file after.
    new_file_size: u64,
    /// Bytes of blocks that the file system inside has free.
    free: u64,
    /// Bytes of blocks of zeros.
    zeros: u64,
    /// Bytes of blocks that were moved.
    moved: u64,
    warnings: Vec<String>,
}

impl From<diskwright_lib::Compacted> for Compacted {
    fn from(done: diskwright_lib::Compacted) -> Self {
        Self {
            old_file_size: done.old_file_bytes,
            new_file_size: done.new_file_bytes,
            free: done.free_bytes,
            zeros: done.zero_bytes,
            moved: done.moved_bytes,
            warnings: done.warnings.iter().map(for_keywords).collect(),
        }
    }
}

/// A disk that has moved.
#[pyclass(frozen, get_all, module = "diskwright")]
#[derive(Debug, Clone)]
pub(crate) struct Moved {
    /// The old file. (`from` is a keyword of Python.)
    source: PathBuf,
    /// The new file.
    dest: PathBuf,
    /// Virtual size.
    size: u64,
    /// Bytes that were copied; 0 if only the name has changed.
    copied: u64,
    /// Whether the old file is there still.
    old_is_kept: bool,
    /// Children that name the new file as their parent now.
    relinked: Vec<PathBuf>,
    warnings: Vec<String>,
}

impl From<diskwright_lib::Moved> for Moved {
    fn from(done: diskwright_lib::Moved) -> Self {
        Self {
            source: done.from,
            dest: done.to,
            size: done.size_bytes,
            copied: done.copied_bytes,
            old_is_kept: done.old_is_kept,
            relinked: done.relinked,
            warnings: done.warnings.iter().map(for_convert_keywords).collect(),
        }
    }
}

/// What a rescue could read.
#[pyclass(frozen, get_all, module = "diskwright")]
#[derive(Debug, Clone)]
pub(crate) struct Rescued {
    /// Virtual size.
    size: u64,
    /// Whether everything was read, and nothing is in doubt.
    whole: bool,
    /// Bytes that were read and copied.
    data: u64,
    /// Bytes that read as zeros.
    zeros: u64,
    /// Bytes that are lost, and zeros in the new image.
    lost_bytes: u64,
    /// Bytes that read as zeros, but may belong to data that was not placed.
    doubted_bytes: u64,
    /// The lost ranges.
    lost: Vec<LostRange>,
    /// Blocks without a table entry that their own contents have placed.
    placed: usize,
    remarks: Vec<String>,
}

impl From<diskwright_lib::Rescued> for Rescued {
    fn from(done: diskwright_lib::Rescued) -> Self {
        let lost = done.ranges.iter().filter(|range| range.kind == RangeKind::Lost);
        Self {
            size: done.size_bytes,
            whole: done.is_whole(),
            data: done.data_bytes,
            zeros: done.zero_bytes,
            lost_bytes: done.lost_bytes,
            doubted_bytes: done.doubted_bytes,
            lost: lost
                .map(|range| {
                    let reason = range.reason.as_ref().map(for_convert_keywords).unwrap_or_default();
                    LostRange::new(range.offset_bytes, range.len_bytes, reason)
                })
                .collect(),
            placed: done.placed.len(),
            remarks: done.remarks.iter().map(for_convert_keywords).collect(),
        }
    }
}

/// A point since which the changes of a disk are tracked.
#[pyclass(frozen, get_all, module = "diskwright")]
#[derive(Debug, Clone)]
pub(crate) struct TrackPoint {
    name: String,
    /// When it was started, in seconds since 1970.
    started: f64,
    /// Bytes that have changed since.
    changed: u64,
    /// Why everything counts as changed; `None` if the ranges are known.
    everything: Option<String>,
}

impl From<diskwright_lib::TrackPoint> for TrackPoint {
    fn from(point: diskwright_lib::TrackPoint) -> Self {
        let started = point.started.duration_since(SystemTime::UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
        Self { name: point.name, started, changed: point.changed_bytes, everything: point.everything.map(for_keywords) }
    }
}

/// A rule of a place, and what it says of an image.
#[pyclass(frozen, get_all, module = "diskwright")]
#[derive(Debug, Clone)]
pub(crate) struct Judgement {
    /// Name of the rule, which does not change.
    rule: &'static str,
    /// `ok`, `not ok` or `not applicable`.
    verdict: &'static str,
    /// What the place expects.
    expected: &'static str,
    /// What was found, or why the rule is not applicable.
    found: String,
    /// How to make the image comply, if the rule does not hold.
    remedy: Option<String>,
}

impl From<diskwright_lib::Judgement> for Judgement {
    fn from(judgement: diskwright_lib::Judgement) -> Self {
        let (verdict, found, remedy) = match judgement.verdict {
            Verdict::Holds { found } => ("ok", found, None),
            Verdict::Broken { found, remedy } => ("not ok", found, Some(for_keywords(remedy))),
            Verdict::NotApplicable { why } => ("not applicable", why, None),
        };
        let rule = judgement.rule;
        Self { rule: rule.name, verdict, expected: rule.expected, found: for_keywords(found), remedy }
    }
}

#[pymethods]
impl Judgement {
    fn __repr__(&self) -> String {
        format!("Judgement({}: {}, {})", self.rule, self.verdict, self.found)
    }
}
