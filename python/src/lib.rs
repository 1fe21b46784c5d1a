//! The native part of the Python module `diskwright`.
//!
//! ```text
//!   diskwright/__init__.py   names, the file-like object (io.RawIOBase), map() and open()
//!   lib.rs                   functions: create, info, convert, check
//!   life.rs                  functions: snapshot, revert, merge, compact, move, rescue, judge
//!   disk.rs                  the class Disk
//!   options.rs               options of diskwright_lib from keyword arguments
//!   worker.rs                the thread that has a disk's queue
//!   progress.rs              calls Python between the steps of a long operation
//!   values.rs                what is returned: extents, images, findings
//!   outcomes.rs              what is returned by the functions of life.rs
//!   error.rs                 DiskError with its code
//! ```
//!
//! The GIL is released while anything waits for a disk. Options are turned into those of
//! `diskwright_lib` in `lib.rs`, `options.rs` and `disk.rs`.

#![forbid(unsafe_code)]

mod disk;
mod error;
mod life;
mod options;
mod outcomes;
mod progress;
mod values;
mod worker;

use diskwright_lib::{ChainScope, ConvertOptions, CreateRequest, Identity, NewSize, OpenOptions, Opened};
use error::{Failure, for_keywords, refused};
use options::{format_named, reading, type_named};
use progress::with_progress;
use pyo3::prelude::*;
use std::path::PathBuf;
use values::{Checked, Converted, Info};

/// Make a new image. Returns warnings.
#[pyfunction]
#[pyo3(signature = (path, *, size=None, format=None, disk_type=None, parent=None, block_size=None, sector_size=None, preallocate=false))]
#[allow(clippy::too_many_arguments, reason = "they are keyword arguments in Python")]
fn create(
    py: Python<'_>,
    path: PathBuf,
    size: Option<u64>,
    format: Option<&str>,
    disk_type: Option<&str>,
    parent: Option<PathBuf>,
    block_size: Option<u32>,
    sector_size: Option<u32>,
    preallocate: bool,
) -> Result<Vec<String>, Failure> {
    let request = CreateRequest {
        size_bytes: size,
        format: format.map(format_named).transpose()?,
        disk_type: disk_type.map(type_named).transpose()?,
        parent,
        block_bytes: block_size,
        logical_sector_bytes: sector_size,
        preallocate,
        ..CreateRequest::default()
    };
    Ok(py.detach(|| diskwright_lib::create(path, &request))?.iter().map(for_keywords).collect())
}

/// Describe a disk and its chain, as far as the chain can be followed.
#[pyfunction]
#[pyo3(signature = (path, *, format=None, force_share=false, allow_parent_dirs=Vec::new(), allow_any_parent=false))]
fn info(
    py: Python<'_>,
    path: PathBuf,
    format: Option<&str>,
    force_share: bool,
    allow_parent_dirs: Vec<PathBuf>,
    allow_any_parent: bool,
) -> Result<Info, Failure> {
    let options = reading(format, force_share, allow_parent_dirs, allow_any_parent)?;
    let options = OpenOptions { scope: ChainScope::Available, ..options };
    Ok(py.detach(|| Opened::open(&path, &options).map(|opened| Info::of(&opened)))?)
}

/// Look for damage in an image, and for broken links to its parents.
#[pyfunction]
#[pyo3(signature = (path, *, format=None, force_share=false, allow_parent_dirs=Vec::new(), allow_any_parent=false))]
fn check(
    py: Python<'_>,
    path: PathBuf,
    format: Option<&str>,
    force_share: bool,
    allow_parent_dirs: Vec<PathBuf>,
    allow_any_parent: bool,
) -> Result<Checked, Failure> {
    let options = reading(format, force_share, allow_parent_dirs, allow_any_parent)?;
    Ok(py.detach(|| diskwright_lib::check(&path, &options)).map(Checked::from)?)
}

/// Copy a disk into a new image or an export.
#[pyfunction]
#[pyo3(signature = (
    source, dest, *, progress=None, format=None, source_format=None, disk_type=None, block_size=None, sector_size=None,
    size=None, identity="new", azure=false, preallocate=false, verify=false, skip_damaged=false, force_share=false, allow_parent_dirs=Vec::new(),
    allow_any_parent=false
))]
#[allow(clippy::too_many_arguments, reason = "they are keyword arguments in Python")]
fn convert(
    py: Python<'_>,
    source: PathBuf,
    dest: PathBuf,
    progress: Option<Py<PyAny>>,
    format: Option<&str>,
    source_format: Option<&str>,
    disk_type: Option<&str>,
    block_size: Option<u32>,
    sector_size: Option<u32>,
    size: Option<u64>,
    identity: &str,
    azure: bool,
    preallocate: bool,
    verify: bool,
    skip_damaged: bool,
    force_share: bool,
    allow_parent_dirs: Vec<PathBuf>,
    allow_any_parent: bool,
) -> Result<Converted, Failure> {
    let identity = match identity {
        "new" => Identity::New,
        "keep" => Identity::Keep,
        other => return Err(refused(format!("{other:?} is no identity; use 'new' or 'keep'"))),
    };
    let options = ConvertOptions {
        source: reading(source_format, force_share, allow_parent_dirs, allow_any_parent)?,
        dest: CreateRequest {
            format: format.map(format_named).transpose()?,
            disk_type: disk_type.map(type_named).transpose()?,
            block_bytes: block_size,
            logical_sector_bytes: sector_size,
            preallocate,
            ..CreateRequest::default()
        },
        size: size.map_or(NewSize::Present, NewSize::Bytes),
        identity,
        azure,
        verify,
        skip_damaged,
        ..ConvertOptions::default()
    };
    let run = |step: &mut diskwright_lib::Progress<'_>| diskwright_lib::convert(&source, &dest, &options, step);
    with_progress(py, progress, Failure::of_convert, run).map(Converted::from)
}

/// The native part of the module `diskwright`.
#[pymodule]
mod _native {
    #[pymodule_export]
    use crate::{
        check, convert, create,
        disk::Disk,
        error::DiskError,
        info,
        life::{compact, judge, merge, move_disk, rescue, revert, snapshot},
        outcomes::{Compacted, Judgement, Merged, Moved, Rescued, Snapshot, TrackPoint},
        values::{Checked, Converted, Extent, Finding, Info, Layer, LostRange},
    };
}
