//! Where undo files lie, and whether an image has an unfinished repair.
//!
//! The undo file of `disk.vhdx` is `disk.vhdx.undo`, beside the image itself and not beside a
//! symbolic link to it. If that exists, because an earlier repair was complete, the next is
//! `disk.vhdx.undo.2`, and so on: no undo file is replaced. The one with the highest number is
//! undone first.
//!
//! An open for writing asks for unfinished repairs ([`refuse_unfinished`]). That costs the
//! examination of three names. A repair whose undo file has a name that the user chose is not
//! recognised by an open. Nothing breaks then: each state that a repair passes through is at least
//! as sound as the one before it (`image/src/mending.rs`), and an undo that would overwrite later
//! changes is refused (`journal.rs`).

use super::journal::{Head, JournalState};
use crate::{DiskError, Result, error::file_error};
use diskwright_store::{CacheMode, Files, LockMode, OpenOptions, Store};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

/// Most undo files of one image.
const NUMBER_MAX: u32 = 99;

/// An open looks at so many names, and at all of them if these exist.
const NUMBER_AT_OPEN: u32 = 3;

/// The name of an undo file, counted from 1.
pub(super) fn numbered(image: &Path, number: u32) -> PathBuf {
    let mut name = image.as_os_str().to_owned();
    name.push(".undo");
    if number > 1 {
        name.push(format!(".{number}"));
    }
    name.into()
}

/// The undo files of an image, the newest last. `image` has no symbolic links.
pub(super) fn existing(files: &Files, image: &Path) -> Vec<PathBuf> {
    existing_up_to(files, image, NUMBER_MAX)
}

fn existing_up_to(files: &Files, image: &Path, number_max: u32) -> Vec<PathBuf> {
    (1..=number_max).map(|number| numbered(image, number)).filter(|path| files.facts(path).is_ok()).collect()
}

/// The name of the next undo file.
///
/// # Errors
/// `BadOptions` if there are too many.
pub(super) fn next_free(files: &Files, image: &Path) -> Result<PathBuf> {
    let number = (1..=NUMBER_MAX)
        .rev()
        .find(|number| files.facts(&numbered(image, *number)).is_ok())
        .map_or(1, |newest| newest + 1);
    if number > NUMBER_MAX {
        return Err(DiskError::BadOptions {
            what: format!("{}: it has {NUMBER_MAX} undo files of earlier repairs", image.display()),
            hint: "remove those that are not needed, the ones with the highest numbers first".into(),
        });
    }
    Ok(numbered(image, number))
}

/// Opens an undo file.
///
/// # Errors
/// Those of the open; `BadOptions` for a file that is not an undo file, or a damaged one.
pub(super) fn open(files: &Files, path: &Path, writable: bool) -> Result<(Arc<dyn Store>, Head)> {
    let lock = if writable { LockMode::Exclusive } else { LockMode::None };
    let options = OpenOptions { writable, create_new: false, cache: CacheMode::PageCache, lock };
    let journal = files.open(path, &options)?;
    let head = Head::read(&*journal).map_err(|source| file_error("read it", path, source))?;
    match head {
        Ok(Some(head)) => Ok((journal, head)),
        Ok(None) => Err(DiskError::BadOptions {
            what: format!("{}: this is not an undo file", path.display()),
            hint: "name the undo file that the repair has written".into(),
        }),
        Err(what) => Err(damaged(path, &what)),
    }
}

pub(super) fn damaged(path: &Path, what: &str) -> DiskError {
    DiskError::BadOptions {
        what: format!("{}: the undo file is damaged: {what}", path.display()),
        hint: "it cannot be used; `diskwright check` says what is wrong with the image itself".into(),
    }
}

/// The undo file of a repair of this image that was interrupted, and its state. `image` has no
/// symbolic links. A file that is no undo file, or a damaged one, is passed over.
///
/// # Errors
/// If an undo file cannot be read: it may be that of a repair that was interrupted.
pub(super) fn unfinished(files: &Files, image: &Path) -> Result<Option<(PathBuf, JournalState)>> {
    unfinished_of(files, image, existing(files, image))
}

fn unfinished_of(files: &Files, image: &Path, undos: Vec<PathBuf>) -> Result<Option<(PathBuf, JournalState)>> {
    if undos.is_empty() {
        return Ok(None);
    }
    let facts = files.facts(image).map_err(|source| file_error("examine it", image, source))?;
    for path in undos.into_iter().rev() {
        let head = match open(files, &path, false) {
            Ok((_, head)) => head,
            Err(DiskError::BadOptions { .. }) => continue,
            Err(error) => return Err(error),
        };
        if head.inode == facts.identity.1 && head.state != JournalState::Complete {
            return Ok(Some((path, head.state)));
        }
    }
    Ok(None)
}

/// The undo file of an image that may be in a state between before and after its repair.
fn half_repaired(files: &Files, path: &Path) -> Result<Option<PathBuf>> {
    let real = files.canonical(path).map_err(|source| file_error("find it", path, source))?;
    let mut undos = existing_up_to(files, &real, NUMBER_AT_OPEN);
    if undos.len() == NUMBER_AT_OPEN as usize {
        undos = existing(files, &real);
    }
    Ok(unfinished_of(files, &real, undos)?.filter(|(_, state)| *state == JournalState::Armed).map(|(undo, _)| undo))
}

/// Refuses to write an image whose repair was interrupted.
///
/// # Errors
/// `BadChain`; errors of reading an undo file.
pub(crate) fn refuse_unfinished(files: &Files, path: &Path) -> Result<()> {
    match half_repaired(files, path)? {
        None => Ok(()),
        Some(undo) => Err(DiskError::BadChain { path: path.to_owned(), what: interrupted(&undo) }),
    }
}

/// What a user should know about an image whose repair was interrupted.
pub(super) fn interrupted(undo: &Path) -> String {
    format!(
        "a repair of it was interrupted, and {} has what is needed to put it back; undo the repair, or repair the image again, before it is written",
        undo.display()
    )
}

/// The warning for a reader of the image at `path` whose repair was interrupted; `None` if none
/// was.
pub fn interrupted_repair(files: &Files, path: &Path) -> Option<String> {
    half_repaired(files, path).ok().flatten().map(|undo| format!("{}: {}", path.display(), interrupted(&undo)))
}
