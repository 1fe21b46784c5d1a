//! Functions for the life of a disk: snapshot, revert, merge, compact, move, rescue, and the rules
//! of the places that an image goes to.

use crate::{
    error::{Failure, refused},
    options::{format_named, opening, type_named},
    outcomes::{Compacted, Judgement, Merged, Moved, Rescued, Snapshot},
    progress::with_progress,
};
use diskwright_lib::{
    ChainFacts, ChainScope, CompactOptions, CreateRequest, Destination, Disk, EngineKind, Files, FormerImage, KeptName,
    MergeOptions, MoveOptions, OpenOptions, RescueOptions, SnapshotOptions,
};
use pyo3::prelude::*;
use std::path::PathBuf;

/// Freeze a disk under a new name, and go on in a new child that has the disk's name.
#[pyfunction]
#[pyo3(signature = (path, name, *, track=None, dry_run=false, format=None, allow_parent_dirs=Vec::new(), allow_any_parent=false))]
#[allow(clippy::too_many_arguments, reason = "they are keyword arguments in Python")]
pub(crate) fn snapshot(
    py: Python<'_>,
    path: PathBuf,
    name: String,
    track: Option<String>,
    dry_run: bool,
    format: Option<&str>,
    allow_parent_dirs: Vec<PathBuf>,
    allow_any_parent: bool,
) -> Result<Snapshot, Failure> {
    let open = opening(format, allow_parent_dirs, allow_any_parent)?;
    let options = SnapshotOptions { name, open, dry_run, track, discard: false };
    Ok(py.detach(|| diskwright_lib::snapshot(&path, &options)).map(Snapshot::from)?)
}

/// Go back: the disk becomes a new, empty child of `to`, or of its parent.
#[pyfunction]
#[pyo3(signature = (
    path, *, to=None, keep_as=None, dry_run=false, format=None, allow_parent_dirs=Vec::new(), allow_any_parent=false
))]
#[allow(clippy::too_many_arguments, reason = "they are keyword arguments in Python")]
pub(crate) fn revert(
    py: Python<'_>,
    path: PathBuf,
    to: Option<PathBuf>,
    keep_as: Option<String>,
    dry_run: bool,
    format: Option<&str>,
    allow_parent_dirs: Vec<PathBuf>,
    allow_any_parent: bool,
) -> Result<Snapshot, Failure> {
    let open = opening(format, allow_parent_dirs, allow_any_parent)?;
    let left = if keep_as.is_some() { FormerImage::Kept } else { FormerImage::Discarded };
    let options = SnapshotOptions { name: keep_as.unwrap_or_default(), open, dry_run, track: None, discard: false };
    Ok(py.detach(|| diskwright_lib::revert(&path, to.as_deref(), left, &options)).map(Snapshot::from)?)
}

/// Merge an image into its parent, or into the ancestor `into`.
#[pyfunction]
#[pyo3(signature = (
    path, *, into=None, keep_name="parent", progress=None, dry_run=false, search_dirs=Vec::new(), format=None,
    allow_parent_dirs=Vec::new(), allow_any_parent=false
))]
#[allow(clippy::too_many_arguments, reason = "they are keyword arguments in Python")]
pub(crate) fn merge(
    py: Python<'_>,
    path: PathBuf,
    into: Option<PathBuf>,
    keep_name: &str,
    progress: Option<Py<PyAny>>,
    dry_run: bool,
    search_dirs: Vec<PathBuf>,
    format: Option<&str>,
    allow_parent_dirs: Vec<PathBuf>,
    allow_any_parent: bool,
) -> Result<Merged, Failure> {
    let keep = match keep_name {
        "parent" => KeptName::Parents,
        "child" => KeptName::Childs,
        other => return Err(refused(format!("{other:?} is no name to keep; use 'parent' or 'child'"))),
    };
    let open = opening(format, allow_parent_dirs, allow_any_parent)?;
    let options = MergeOptions { into, keep, search_dirs, open, dry_run, ..MergeOptions::default() };
    let run = |step: &mut diskwright_lib::Progress<'_>| diskwright_lib::merge(&path, &options, step);
    with_progress(py, progress, Failure::of_disk, run).map(Merged::from)
}

/// Give back the space that a disk does not need, and make its file small.
#[pyfunction]
#[pyo3(signature = (
    path, *, progress=None, estimate=false, dry_run=false, format=None, allow_parent_dirs=Vec::new(),
    allow_any_parent=false
))]
#[allow(clippy::too_many_arguments, reason = "they are keyword arguments in Python")]
pub(crate) fn compact(
    py: Python<'_>,
    path: PathBuf,
    progress: Option<Py<PyAny>>,
    estimate: bool,
    dry_run: bool,
    format: Option<&str>,
    allow_parent_dirs: Vec<PathBuf>,
    allow_any_parent: bool,
) -> Result<Compacted, Failure> {
    let options = CompactOptions { open: opening(format, allow_parent_dirs, allow_any_parent)?, estimate, dry_run };
    let run = |step: &mut diskwright_lib::Progress<'_>| diskwright_lib::compact(&path, &options, step);
    with_progress(py, progress, Failure::of_disk, run).map(Compacted::from)
}

/// Move a disk to another file, format, folder or file system.
#[pyfunction]
#[pyo3(name = "move", signature = (
    path, to, *, progress=None, format=None, source_format=None, disk_type=None, block_size=None, preallocate=false,
    keep_old=false, dry_run=false, allow_parent_dirs=Vec::new(), allow_any_parent=false
))]
#[allow(clippy::too_many_arguments, reason = "they are keyword arguments in Python")]
pub(crate) fn move_disk(
    py: Python<'_>,
    path: PathBuf,
    to: PathBuf,
    progress: Option<Py<PyAny>>,
    format: Option<&str>,
    source_format: Option<&str>,
    disk_type: Option<&str>,
    block_size: Option<u32>,
    preallocate: bool,
    keep_old: bool,
    dry_run: bool,
    allow_parent_dirs: Vec<PathBuf>,
    allow_any_parent: bool,
) -> Result<Moved, Failure> {
    let open = opening(source_format, allow_parent_dirs, allow_any_parent)?;
    let dest = CreateRequest {
        format: format.map(format_named).transpose()?,
        disk_type: disk_type.map(type_named).transpose()?,
        block_bytes: block_size,
        preallocate,
        ..CreateRequest::default()
    };
    let options = MoveOptions { dest, keep_old, dry_run };
    let run = |step: &mut diskwright_lib::Progress<'_>| diskwright_lib::move_disk(&path, &to, &options, &open, step);
    with_progress(py, progress, Failure::of_convert, run).map(Moved::from)
}

/// Copy what can still be read of a damaged image into a new one.
#[pyfunction]
#[pyo3(signature = (
    source, dest, *, progress=None, size=None, block_size=None, parent=None, no_parent=false, trust_table=false,
    leftovers=None, format=None,
    source_format=None, disk_type=None, allow_parent_dirs=Vec::new(), allow_any_parent=false
))]
#[allow(clippy::too_many_arguments, reason = "they are keyword arguments in Python")]
pub(crate) fn rescue(
    py: Python<'_>,
    source: PathBuf,
    dest: PathBuf,
    progress: Option<Py<PyAny>>,
    size: Option<u64>,
    block_size: Option<u32>,
    parent: Option<PathBuf>,
    no_parent: bool,
    trust_table: bool,
    leftovers: Option<PathBuf>,
    format: Option<&str>,
    source_format: Option<&str>,
    disk_type: Option<&str>,
    allow_parent_dirs: Vec<PathBuf>,
    allow_any_parent: bool,
) -> Result<Rescued, Failure> {
    let options = RescueOptions {
        source: opening(source_format, allow_parent_dirs, allow_any_parent)?,
        dest: CreateRequest {
            format: format.map(format_named).transpose()?,
            disk_type: disk_type.map(type_named).transpose()?,
            ..CreateRequest::default()
        },
        size_bytes: size,
        block_bytes: block_size,
        parent,
        no_parent,
        trust_absent: trust_table,
        leftovers,
        dry_run: false,
    };
    let run = |step: &mut diskwright_lib::Progress<'_>| diskwright_lib::rescue(&source, &dest, &options, step);
    with_progress(py, progress, Failure::of_convert, run).map(Rescued::from)
}

/// Check an image against the rules of a place: 'azure' or 'windows'.
#[pyfunction]
#[pyo3(signature = (path, place, *, format=None, allow_parent_dirs=Vec::new(), allow_any_parent=false))]
pub(crate) fn judge(
    py: Python<'_>,
    path: PathBuf,
    place: &str,
    format: Option<&str>,
    allow_parent_dirs: Vec<PathBuf>,
    allow_any_parent: bool,
) -> Result<Vec<Judgement>, Failure> {
    let place = match place {
        "azure" => Destination::Azure,
        "windows" => Destination::Windows,
        other => return Err(refused(format!("{other:?} is no place with rules; use 'azure' or 'windows'"))),
    };
    let open = opening(format, allow_parent_dirs, allow_any_parent)?;
    py.detach(|| {
        let disk = Disk::open(&path, &OpenOptions { scope: ChainScope::Available, ..open })?;
        let facts = ChainFacts::of(&disk, &Files::default(), EngineKind::Auto, &|_| None)?;
        Ok(place.judge(&facts).into_iter().map(Judgement::from).collect())
    })
}
