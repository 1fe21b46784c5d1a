//! Options of `diskwright_lib` from keyword arguments.

use crate::error::{Failure, refused};
use diskwright_lib::{CacheMode, DiskType, Format, OpenOptions, ParentPolicy};
use std::path::PathBuf;

/// Where the parents of a disk may lie, and how its files are read: the options that `open`,
/// `info`, `check` and `convert` share.
pub(crate) fn reading(
    format: Option<&str>,
    force_share: bool,
    allow_parent_dirs: Vec<PathBuf>,
    allow_any_parent: bool,
) -> Result<OpenOptions, Failure> {
    let parents =
        ParentPolicy { allowed_dirs: allow_parent_dirs, allow_any: allow_any_parent, ..ParentPolicy::default() };
    let format = format.map(format_named).transpose()?;
    Ok(OpenOptions { format, force_share, parents, ..OpenOptions::default() })
}

/// The same for functions that change disks, which take their own locks.
pub(crate) fn opening(
    format: Option<&str>,
    allow_parent_dirs: Vec<PathBuf>,
    allow_any_parent: bool,
) -> Result<OpenOptions, Failure> {
    reading(format, false, allow_parent_dirs, allow_any_parent)
}

pub(crate) fn format_named(name: &str) -> Result<Format, Failure> {
    let found = Format::ALL.iter().copied().find(|format| format.to_string() == name);
    found.ok_or_else(|| {
        let all: Vec<String> = Format::ALL.iter().map(|format| format!("'{format}'")).collect();
        refused(format!("{name:?} is not a format; use one of {}", all.join(", ")))
    })
}

pub(crate) fn type_named(name: &str) -> Result<DiskType, Failure> {
    let all = [DiskType::Fixed, DiskType::Dynamic, DiskType::Differencing];
    let found = all.into_iter().find(|disk_type| disk_type.to_string() == name);
    found.ok_or_else(|| refused(format!("{name:?} is not a disk type; use 'fixed', 'dynamic' or 'differencing'")))
}

pub(crate) fn cache_mode(direct: bool) -> CacheMode {
    if direct { CacheMode::Direct } else { CacheMode::PageCache }
}
