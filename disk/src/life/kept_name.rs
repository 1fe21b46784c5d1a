//! The mark of a disk that is merged while it is written: the result keeps the disk's name.
//!
//! ```text
//!   vm.vhdx ─▶ vm_monday.avhdx      .vm.vhdx.merging made, durable ─▶ merge ─▶ mark removed
//! ```
//!
//! A merge of a disk in use always ends with the disk's name. If the process ends before, the same
//! merge is finished on closed images (`merge.rs`), which would keep the parent's name. The mark
//! says that it must not. It is a file of its own, because the link of a VHD has no room for it.
//!
//! The mark holds the inode number of the disk's file. If the name leads to another file since, the
//! mark means nothing. A snapshot removes it, so that it never meets a new file with that number.
//! Where inode numbers are made up at each mount, a mark may be ignored.

use crate::{DiskError, Result, error::file_error};
use diskwright_store::{CacheMode, Files, LockMode, OpenOptions, Store};
use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

fn mark_of(path: &Path) -> PathBuf {
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(".merging");
    path.with_file_name(name)
}

/// What the mark of a file with this identity holds.
fn text(identity: (u64, u64)) -> String {
    format!("merged in use, keeps its name: inode {:016x}\n", identity.1)
}

fn failed(path: &Path) -> impl Fn(io::Error) -> DiskError {
    move |source| file_error("mark that a merge keeps its name", path, source)
}

/// Marks the disk at `path`, whose file has this identity. Durable on return.
///
/// # Errors
/// Those of the file system.
pub(crate) fn mark(files: &Files, path: &Path, identity: (u64, u64)) -> Result<()> {
    let mark = mark_of(path);
    if !is_marked(files, path, identity) {
        unmark(files, path)?;
        let store = open(files, &mark, true).map_err(|error| failed(path)(io::Error::other(error)))?;
        store.write_at(text(identity).as_bytes(), 0).map_err(failed(path))?;
    }
    // A program that was killed may have left it in the page cache only.
    let store = open(files, &mark, false).map_err(|error| failed(path)(io::Error::other(error)))?;
    store.sync_data().map_err(failed(path))?;
    files.sync_directory_of(&mark).map_err(failed(path))
}

/// Whether the disk at `path` is marked, and its file has this identity.
pub(crate) fn is_marked(files: &Files, path: &Path, identity: (u64, u64)) -> bool {
    let expected = text(identity);
    let mut found = vec![0; expected.len()];
    open(files, &mark_of(path), false)
        .is_ok_and(|store| store.read_at(&mut found, 0).is_ok() && found == expected.as_bytes())
}

fn open(files: &Files, mark: &Path, create_new: bool) -> Result<Arc<dyn Store>> {
    let options = OpenOptions { writable: true, create_new, cache: CacheMode::PageCache, lock: LockMode::None };
    let opened = if create_new { files.open(mark, &options) } else { files.open_canonical(mark, false, &options) };
    Ok(opened?)
}

/// Removes the mark of the disk at `path`, if it has one.
///
/// # Errors
/// Those of the file system.
pub(crate) fn unmark(files: &Files, path: &Path) -> Result<()> {
    match files.remove(&mark_of(path)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed.map_err(|source| file_error("remove the mark of an interrupted merge", path, source)),
    }
}
