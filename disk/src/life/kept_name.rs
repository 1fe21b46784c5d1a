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
//! The mark (`mark_file.rs`) holds the inode number of the disk's file. A snapshot removes the
//! mark, so that it never meets a new file with that number.

use crate::{Result, life::mark_file::MarkFile};
use diskwright_store::Files;
use std::path::Path;

fn mark_of<'a>(files: &'a Files, path: &Path) -> MarkFile<'a> {
    MarkFile::of(files, path, ".merging")
}

/// What the mark of a file with this identity holds.
fn text(identity: (u64, u64)) -> String {
    format!("merged in use, keeps its name: inode {:016x}\n", identity.1)
}

/// Marks the disk at `path`, whose file has this identity. Durable on return.
///
/// # Errors
/// Those of the file system.
pub(crate) fn mark(files: &Files, path: &Path, identity: (u64, u64)) -> Result<()> {
    mark_of(files, path).set(&text(identity))
}

/// Whether the disk at `path` is marked, and its file has this identity.
///
/// # Errors
/// Those of reading the mark.
pub(crate) fn is_marked(files: &Files, path: &Path, identity: (u64, u64)) -> Result<bool> {
    Ok(mark_of(files, path).text()? == Some(text(identity)))
}

/// Removes the mark of the disk at `path`, if it has one.
///
/// # Errors
/// Those of the file system.
pub(crate) fn unmark(files: &Files, path: &Path) -> Result<()> {
    mark_of(files, path).remove()
}

/// As [`unmark`] after a merge that has ended. A mark that stays means nothing, as the name leads
/// to another file or to none, so it costs only a warning.
pub(crate) fn unmark_or_warn(files: &Files, path: &Path) -> Option<String> {
    let error = unmark(files, path).err()?;
    Some(format!("{error}; the merge has ended, and the file can be removed"))
}
