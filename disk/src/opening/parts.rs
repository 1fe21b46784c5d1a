//! Finds the files of a raw disk in several parts, when the user names the first one.
//!
//! ```text
//!   disk.001 ─▶ its real path ─┬─ no other part                   ─▶ Alone: an ordinary file
//!                              ├─ .000 (or .002 of .003) exists   ─▶ Later: a later part
//!                              ├─ .002 .003 ... exist             ─▶ First: the whole disk
//!                              └─ .003 exists, but no .002        ─▶ First, with a missing part
//! ```
//!
//! A set begins at `.000` or `.001`, and ends before the first number without a file. Numbers have
//! three digits, and four from 1000 on. The two digits of a plain `split -d` are not recognised:
//! `.01` and `.02` often mean something else.
//!
//! The user did not name the later parts. So each must be a regular file in the folder of the first
//! part, opened by a path without symbolic links
//! ([`FileSystem::open_canonical`](diskwright_store::FileSystem::open_canonical)), and no file may
//! occur twice. The format is raw and is not probed.

use crate::{DiskError, Result, error::file_error};
use diskwright_image::{
    CheckReport,
    split::{self, PARTS_MAX, part_number, part_path},
};
use diskwright_store::{CacheMode, Files, LockMode, OpenError, OpenOptions, Store};
use std::{
    collections::HashMap,
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

/// The role of a file, by its name and the files in its folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PartRole {
    /// Not a part of a disk in several files.
    Alone,
    /// A later part of a disk.
    Later {
        /// Another part of that disk.
        beside: PathBuf,
    },
    /// The first of several parts.
    First(Parts),
}

/// The files of a disk in several parts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parts {
    /// The parts after the first, in order. Their folder has no symbolic links.
    pub later: Vec<PathBuf>,
    /// The first missing part, if later parts exist; else `None`.
    pub missing: Option<PathBuf>,
}

impl Parts {
    /// Opens the later parts with `options`.
    ///
    /// # Errors
    /// Errors of the open; [`DiskError::BadChain`] if one file would be two parts.
    pub(crate) fn open_later(
        &self,
        files: &Files,
        first: &dyn Store,
        options: &OpenOptions,
    ) -> Result<Vec<Arc<dyn Store>>> {
        let mut seen: HashMap<(u64, u64), &Path> = HashMap::new();
        seen.extend(first.identity().map(|identity| (identity, first.name())));
        let mut opened = Vec::new();
        for path in &self.later {
            // Checked before the file is opened, as its lock would conflict with our own.
            if let Ok(facts) = files.facts(path)
                && let Some(twin) = seen.insert(facts.identity, path)
            {
                return Err(DiskError::BadChain {
                    path: path.clone(),
                    what: format!(
                        "it is the same file as {}, and a file cannot be two parts of one disk; put the right file in its place",
                        twin.display()
                    ),
                });
            }
            match files.canonical(path) {
                Ok(real) if real != *path => {
                    return Err(not_regular(path, first, &format!("it is a symbolic link to {}", real.display())));
                }
                _ => {}
            }
            opened.push(files.open_canonical(path, false, options).map_err(|error| match error {
                OpenError::Device { .. } => not_regular(path, first, "it is a block device"),
                OpenError::NotAFile { found, .. } => not_regular(path, first, &format!("it is {found}")),
                other => other.into(),
            })?);
        }
        Ok(opened)
    }

    /// Fails if a part is missing.
    ///
    /// # Errors
    /// [`DiskError::File`].
    pub(crate) fn whole(&self, first: &Path) -> Result<()> {
        let Some(missing) = &self.missing else { return Ok(()) };
        let what = format!(
            "the file is missing, but later parts of the disk that begins with {} are there; put it back, or, if {} is a disk by itself, give it another name",
            first.display(),
            first.display()
        );
        Err(file_error("find it", missing, io::Error::new(io::ErrorKind::NotFound, what)))
    }
}

/// The error for a later part that is not a regular file.
fn not_regular(path: &Path, first: &dyn Store, found: &str) -> DiskError {
    DiskError::BadChain {
        path: path.to_owned(),
        what: format!(
            "it continues the disk that begins with {}, but {found}, where a regular file is needed; put the file itself there",
            first.name().display()
        ),
    }
}

/// Looks for other parts in the folder of `path`.
///
/// # Errors
/// [`DiskError::BadOptions`] for more than 1,024 parts, and for a symbolic link through which the
/// other parts cannot be found.
pub fn parts_of(files: &Files, path: &Path) -> Result<PartRole> {
    if part_number(path).is_none() {
        return Ok(PartRole::Alone);
    }
    // The open reports errors of the file itself.
    let Ok(real) = files.canonical(path) else { return Ok(PartRole::Alone) };
    let is_there = |path: &Path| files.facts(path).is_ok();
    let Some(number) = part_number(&real) else {
        let named = part_number(path).map(|number| part_path(path, number + 1)).filter(|next| is_there(next));
        return match named {
            None => Ok(PartRole::Alone),
            Some(next) => Err(DiskError::BadOptions {
                what: format!(
                    "{}: {} lies beside it and would continue the disk, but the file is a symbolic link to {}",
                    path.display(),
                    next.display(),
                    real.display()
                ),
                hint: "name the first part of the disk by its own name".into(),
            }),
        };
    };
    let beside = |number: u32| Some(part_path(&real, number)).filter(|path| is_there(path));
    if let Some(before) = number.checked_sub(1).and_then(beside) {
        return Ok(PartRole::Later { beside: before });
    }
    if number > 1 {
        return Ok(beside(number + 1).map_or(PartRole::Alone, |beside| PartRole::Later { beside }));
    }
    let mut later = Vec::new();
    let mut next = number + 1;
    while let Some(part) = beside(next) {
        later.push(part);
        next += 1;
        if later.len() >= PARTS_MAX {
            return Err(DiskError::BadOptions {
                what: format!(
                    "{}: the disk has more than {PARTS_MAX} parts, as {} is there",
                    path.display(),
                    part_path(&real, next - 1).display()
                ),
                hint: "join the files into one (`cat disk.* > disk.raw`)".into(),
            });
        }
    }
    let continues = |other: &PathBuf| {
        part_number(other)
            .is_some_and(|number| number > next && number as usize <= PARTS_MAX && part_path(&real, number) == *other)
    };
    let listed = real.parent().and_then(|folder| files.list(folder).ok()).unwrap_or_default();
    let missing = listed.iter().any(continues).then(|| part_path(&real, next));
    if later.is_empty() && missing.is_none() {
        return Ok(PartRole::Alone);
    }
    Ok(PartRole::First(Parts { later, missing }))
}

/// Checks the files of a disk in several parts: the open file `first`, and those that [`parts_of`]
/// found. Changes nothing.
///
/// # Errors
/// Errors of the open; `Io`.
pub fn check_parts(files: &Files, first: Arc<dyn Store>, parts: &Parts, lock: LockMode) -> Result<CheckReport> {
    let options = OpenOptions { writable: false, create_new: false, cache: CacheMode::PageCache, lock };
    let later = parts.open_later(files, &*first, &options)?;
    let all: Vec<_> = std::iter::once(first).chain(later).collect();
    Ok(split::check(&all, parts.missing.as_deref(), 512)?)
}
