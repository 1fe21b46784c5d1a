//! Where undo files lie, which of them count, and whether an image has an unfinished repair.
//!
//! The undo file of `disk.vhdx` is `disk.vhdx.undo`, beside the image itself and not beside a
//! symbolic link to it. If that exists, because an earlier repair was complete, the next is
//! `disk.vhdx.undo.2`, and so on up to 99: no undo file is replaced. The one with the highest
//! number is undone first. One listing of the folder finds all of them: users remove some, so the
//! numbers have gaps, and an undo file that is not seen would let a writer change an image whose
//! repair was interrupted. An open for writing lists the folder for children anyway
//! (`siblings.rs`). (Rejected: 99 look-ups. Each is a round trip on a network file system.)
//!
//! ```text
//!   file with such a name ─┬─ a link, not a regular file, of another owner ─▶ Distrusted
//!                          ├─ empty, or zeros                              ─▶ Blank
//!                          ├─ cannot be read, or its first sector is damaged ─▶ Unusable
//!                          ├─ no undo file, or that of another image       ─▶ Other
//!                          └─ Undo ─▶ ARMED: is the image as the repair has left it?
//! ```
//!
//! **Who is trusted.** An undo file says which bytes go into an image. In a shared folder anybody
//! may create a file with its name. So a file that is found by its name must be a regular file, no
//! symbolic link, owned by the owner of the image, by the caller or by root, and writable for
//! nobody else than the image is. Any other file is named in a warning and ignored: nothing breaks
//! then, since each state that a repair passes through is at least as sound as the one before it
//! (`image/src/repair.rs`). To refuse would let a stranger block the image. Where an undo names
//! its undo file ([`RepairOptions::undo_file`](super::RepairOptions)), the owner is not asked.
//!
//! **Which image.** The head names the inode, unless the file system makes inode numbers up. An
//! ARMED file counts only if each changed sector of the image is as before the repair or as at a
//! moment of it (`replay.rs`). If not, another program has written to the image since, and nothing
//! can be put back: the file is named in a warning and ignored. A COMPLETE file is compared when it
//! is undone.
//!
//! **A blank file** was created, and the power was cut before its first sync. The image was not
//! changed yet. It has the only name that a repair reuses. Longer files than [`BLANK_BYTES_MAX`]
//! are never taken for blank: that is rather a disk of zeros, named by mistake.
//!
//! A repair whose undo file has a name that the user chose is found only by who names it again. An
//! open for writing does not know that name, and the invariants above hold without it.

use super::{
    journal::{Head, JournalState},
    replay,
};
use crate::{DiskError, Result, error::file_error};
use diskwright_store::{CacheMode, Files, LockMode, OpenError, OpenOptions, Store, effective_user};
use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

/// Most undo files of one image.
const NUMBER_MAX: u32 = 99;
/// Longest file that counts as blank.
const BLANK_BYTES_MAX: u64 = 64 << 20;
/// ELOOP: there is a symbolic link where none may be.
const IS_LINK: i32 = 40;

/// The name of an undo file, counted from 1.
pub(super) fn numbered(image: &Path, number: u32) -> PathBuf {
    let mut name = image.as_os_str().to_owned();
    name.push(".undo");
    if number > 1 {
        name.push(format!(".{number}"));
    }
    name.into()
}

/// The number of the undo file with this name; `prefix` is the name of the first, in lower case.
fn number_of(prefix: &str, name: &str) -> Option<u32> {
    match name.to_lowercase().strip_prefix(prefix)? {
        "" => Some(1),
        rest => rest.strip_prefix('.')?.parse().ok().filter(|number| (2..=NUMBER_MAX).contains(number)),
    }
}

/// The regular files with names of undo files of an image, the newest first. `image` has no
/// symbolic links. On some file systems the image has the same name in capitals too, so those
/// count; an undo file of another image is recognised by its contents.
fn existing(files: &Files, image: &Path) -> Vec<PathBuf> {
    let prefix = numbered(image, 1).file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    let number = |path: &Path| number_of(&prefix, &path.file_name()?.to_string_lossy());
    let listed = files.list(image.parent().unwrap_or(Path::new("/")));
    let mut found: Vec<(u32, PathBuf)> = match listed {
        Ok(paths) => paths.into_iter().filter_map(|path| Some((number(&path)?, path))).collect(),
        // A folder whose names may be used but not listed.
        Err(_) => (1..=NUMBER_MAX)
            .map(|number| (number, numbered(image, number)))
            .filter(|(_, path)| files.facts(path).is_ok())
            .collect(),
    };
    found.sort_unstable_by(|one, other| other.cmp(one));
    found.into_iter().map(|(_, path)| path).collect()
}

/// The name of the next undo file, which is free or that of a blank file. `image` has no symbolic
/// links.
///
/// # Errors
/// `BadOptions` if there are too many; errors of reading the newest.
pub(super) fn next_name(files: &Files, image: &Path, store: &dyn Store) -> Result<PathBuf> {
    let mut newest = 0;
    for number in (1..=NUMBER_MAX).rev().filter(|number| files.facts(&numbered(image, *number)).is_ok()) {
        match examine(files, &numbered(image, number), Naming::Found, store)? {
            // A stranger's file must not use up the numbers.
            Candidate::Distrusted(..) => continue,
            Candidate::Blank => return Ok(numbered(image, number)),
            _ => newest = number,
        }
        break;
    }
    let mut later = (newest + 1..=NUMBER_MAX).map(|number| numbered(image, number));
    later.find(|path| files.facts(path).is_err()).ok_or_else(|| DiskError::BadOptions {
        what: format!("{}: it has undo files of earlier repairs up to number {NUMBER_MAX}", image.display()),
        hint: "remove those that are not needed, the ones with the highest numbers first".into(),
    })
}

/// Who says that a file is the undo file of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Naming {
    /// Its name. Its owner must be trusted, and its path must have no symbolic links.
    Found,
    /// The user, who undoes a repair by it.
    ByUser,
}

/// A file that may be an undo file.
#[derive(Debug)]
pub(super) enum Candidate {
    /// An undo file of this image.
    Undo(Head),
    /// Nothing was ever written to it.
    Blank,
    /// An undo file that is not used: its head, if it has one, and why not, as a sentence.
    Distrusted(Option<Head>, String),
    /// It cannot be known whether it belongs to an interrupted repair: why, as a sentence.
    Unusable(String),
    /// No undo file of this image.
    Other(DiskError),
}

/// The inode by which undo files know an image; 0 where numbers do not last.
pub(super) fn inode(store: &dyn Store) -> u64 {
    store.identity().filter(|_| store.keeps_inode()).map_or(0, |(_, inode)| inode)
}

fn open_file(files: &Files, path: &Path, naming: Naming, writable: bool) -> Result<Arc<dyn Store>, OpenError> {
    let lock = if writable { LockMode::Exclusive } else { LockMode::None };
    let options = OpenOptions { writable, create_new: false, cache: CacheMode::PageCache, lock };
    match naming {
        Naming::Found => files.open_canonical(path, false, &options),
        Naming::ByUser => files.open(path, &options),
    }
}

/// Says what a file is. Of `image`, the open image, nothing is read.
///
/// # Errors
/// If the file cannot be read for another reason than permissions: it may be the undo file of an
/// interrupted repair.
pub(super) fn examine(files: &Files, path: &Path, naming: Naming, image: &dyn Store) -> Result<Candidate> {
    let shown = path.display();
    match open_file(files, path, naming, false) {
        Ok(journal) => judge(&*journal, path, naming, image),
        Err(OpenError::Io { source, .. }) if source.raw_os_error() == Some(IS_LINK) => Ok(Candidate::Distrusted(
            None,
            format!("{shown}: it is a symbolic link, so it is not used as an undo file"),
        )),
        Err(OpenError::Io { source, .. }) if source.kind() == io::ErrorKind::PermissionDenied => {
            Ok(Candidate::Unusable(format!(
                "{shown}: it cannot be read ({source}), so it is not known whether a repair of {} was interrupted; ask its owner, or remove it",
                image.name().display()
            )))
        }
        Err(OpenError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            Ok(Candidate::Other(no_undo_file(path)))
        }
        Err(error @ OpenError::Io { .. }) => Err(error.into()),
        Err(_) => Ok(Candidate::Other(no_undo_file(path))),
    }
}

fn judge(journal: &dyn Store, path: &Path, naming: Naming, image: &dyn Store) -> Result<Candidate> {
    if journal.is_block_device() {
        return Ok(Candidate::Other(no_undo_file(path)));
    }
    let read = |source| file_error("read it", path, source);
    let trusted = match naming {
        Naming::ByUser => Ok(()),
        Naming::Found => is_trusted(journal, image),
    };
    match (Head::read(journal).map_err(read)?, trusted) {
        (Ok(Some(head)), Err(why)) => Ok(Candidate::Distrusted(Some(head), distrusted(path, &why))),
        (Ok(None) | Err(_), Err(why)) => Ok(Candidate::Distrusted(None, distrusted(path, &why))),
        (Ok(Some(head)), Ok(())) if head.inode != 0 && head.inode != inode(image) => {
            Ok(Candidate::Other(DiskError::BadOptions {
                what: format!("{}: it was written for another file than {}", path.display(), image.name().display()),
                hint: "the image was left as it is".into(),
            }))
        }
        (Ok(Some(head)), Ok(())) => Ok(Candidate::Undo(head)),
        (Ok(None), Ok(())) if is_blank(journal).map_err(read)? => Ok(Candidate::Blank),
        (Ok(None), Ok(())) => Ok(Candidate::Other(no_undo_file(path))),
        (Err(what), Ok(())) => Ok(Candidate::Unusable(damaged(path, &what).to_string())),
    }
}

/// Why a user who can write this undo file must not decide what the image holds.
fn is_trusted(journal: &dyn Store, image: &dyn Store) -> Result<(), String> {
    // A store without owners is not a file of this machine.
    let (Some((owner, group, bits)), Some(of_image)) = (journal.access_bits(), image.access_bits()) else {
        return Ok(());
    };
    if ![of_image.0, effective_user(), 0].contains(&owner) {
        return Err(format!("it belongs to user {owner}, neither the owner of the image nor the caller"));
    }
    let all_may = of_image.2 & 0o002 != 0;
    let group_may = all_may || of_image.2 & 0o020 != 0 && of_image.1 == group;
    if bits & 0o002 != 0 && !all_may || bits & 0o020 != 0 && !group_may {
        return Err(format!("its permissions {bits:03o} let others write it who may not write the image"));
    }
    Ok(())
}

fn distrusted(path: &Path, why: &str) -> String {
    format!(
        "{}: {why}, so it is not used as an undo file; if you trust it, undo the repair with `RepairOptions::undo_file` = {}, if not, remove it",
        path.display(),
        path.display()
    )
}

/// Whether a file without a head is empty or zeros to its end, and not too long.
fn is_blank(journal: &dyn Store) -> io::Result<bool> {
    let len_bytes = journal.len_bytes()?;
    if len_bytes > BLANK_BYTES_MAX {
        return Ok(false);
    }
    let mut bytes = vec![0; len_bytes.min(1 << 20) as usize];
    let mut at = 0;
    while at < len_bytes {
        let piece = &mut bytes[..(len_bytes - at).min(1 << 20) as usize];
        journal.read_at(piece, at)?;
        if piece.iter().any(|&byte| byte != 0) {
            return Ok(false);
        }
        at += piece.len() as u64;
    }
    Ok(true)
}

fn no_undo_file(path: &Path) -> DiskError {
    DiskError::BadOptions {
        what: format!("{}: this is not an undo file", path.display()),
        hint: "name the undo file that the repair has written".into(),
    }
}

pub(super) fn damaged(path: &Path, what: &str) -> DiskError {
    DiskError::BadOptions {
        what: format!("{}: the undo file is damaged: {what}", path.display()),
        hint: "it cannot be used; `diskwright check` says what is wrong with the image itself".into(),
    }
}

/// Opens an undo file for use. It is judged again, by the open file.
///
/// # Errors
/// Those of the open; `BadOptions` for a file that is not to be used.
pub(super) fn open(files: &Files, path: &Path, naming: Naming, image: &dyn Store) -> Result<(Arc<dyn Store>, Head)> {
    let journal = open_file(files, path, naming, true)?;
    match judge(&*journal, path, naming, image)? {
        Candidate::Undo(head) => Ok((journal, head)),
        Candidate::Blank => Err(DiskError::BadOptions {
            what: format!("{}: it is blank: its repair was interrupted before it changed the image", path.display()),
            hint: "there is nothing to undo; remove it".into(),
        }),
        Candidate::Distrusted(_, why) | Candidate::Unusable(why) => Err(unused(why)),
        Candidate::Other(error) => Err(error),
    }
}

/// The error for a file that is not used.
pub(super) fn unused(why: String) -> DiskError {
    DiskError::BadOptions { what: why, hint: "the image was left as it is".into() }
}

/// Creates an undo file, also in the place of a blank one.
///
/// # Errors
/// `Exists`; those of the open.
pub(super) fn create(files: &Files, path: &Path, image: &dyn Store, notes: &mut Vec<String>) -> Result<Arc<dyn Store>> {
    let options =
        OpenOptions { writable: true, create_new: true, cache: CacheMode::PageCache, lock: LockMode::Exclusive };
    let mut created = files.open(path, &options);
    let exists = |opened: &Result<Arc<dyn Store>, OpenError>| matches!(opened, Err(OpenError::Io { source, .. }) if source.kind() == io::ErrorKind::AlreadyExists);
    if exists(&created)
        && let Ok(real) = without_links(files, path)
        && matches!(examine(files, &real, Naming::Found, image)?, Candidate::Blank)
    {
        files
            .remove(&real)
            .map_err(|source| file_error("replace the blank undo file of an interrupted repair", path, source))?;
        notes.push(format!(
            "{}: it was blank, left by a repair that was interrupted before it changed the image; it was replaced",
            path.display()
        ));
        created = files.open(path, &options);
    }
    if exists(&created) {
        return Err(DiskError::Exists { path: path.to_owned() });
    }
    Ok(created?)
}

/// The path of an existing file whose folders are resolved. The file itself may be a link.
fn without_links(files: &Files, path: &Path) -> io::Result<PathBuf> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    Ok(files.canonical(folder)?.join(name))
}

/// An interrupted repair, and what the user should know about files that were ignored.
#[derive(Debug, Default)]
pub(super) struct Unfinished {
    /// The undo file and its state, WRITING or ARMED.
    pub(super) undo: Option<(PathBuf, JournalState)>,
    /// Sentences, each with the name of a file.
    pub(super) warnings: Vec<String>,
}

/// Looks for the undo file of an interrupted repair of the open image `store`, at the path `image`
/// without symbolic links.
///
/// # Errors
/// If an undo file cannot be read: it may be that of a repair that was interrupted.
pub(super) fn unfinished(files: &Files, image: &Path, store: &dyn Store) -> Result<Unfinished> {
    let mut found = Unfinished::default();
    for path in existing(files, image) {
        match examine(files, &path, Naming::Found, store)? {
            Candidate::Undo(head) => {
                if let Some(state) = found.unless_stale(files, &path, &head, store)? {
                    found.undo = Some((path, state));
                    break;
                }
            }
            Candidate::Distrusted(head, why) => {
                let is_meant = |head: &Head| head.inode == 0 || head.inode == inode(store);
                if head.is_some_and(|head| head.state == JournalState::Armed && is_meant(&head)) {
                    found.warnings.push(why);
                }
            }
            Candidate::Unusable(why) => found.warnings.push(why),
            Candidate::Blank | Candidate::Other(_) => {}
        }
    }
    Ok(found)
}

/// The same for an undo file that the user names for a new repair.
///
/// # Errors
/// As [`unfinished`]; `Exists` for the file of a complete repair; `BadOptions` for any other file
/// that is not blank.
pub(super) fn unfinished_in(files: &Files, path: &Path, store: &dyn Store) -> Result<Unfinished> {
    let mut found = Unfinished::default();
    let Ok(real) = without_links(files, path) else { return Ok(found) };
    if files.facts(&real).is_err() {
        return Ok(found);
    }
    match examine(files, &real, Naming::Found, store)? {
        Candidate::Undo(head) if head.state == JournalState::Complete => {
            return Err(DiskError::Exists { path: path.to_owned() });
        }
        Candidate::Undo(head) => match found.unless_stale(files, &real, &head, store)? {
            Some(state) => found.undo = Some((real, state)),
            None => return Err(unused(found.warnings.concat())),
        },
        Candidate::Blank => {}
        Candidate::Distrusted(_, why) | Candidate::Unusable(why) => return Err(unused(why)),
        Candidate::Other(error) => return Err(error),
    }
    Ok(found)
}

impl Unfinished {
    /// The state of an undo file that must be put back first; `None` for a complete one, and with a
    /// warning if nothing can be put back.
    fn unless_stale(
        &mut self,
        files: &Files,
        path: &Path,
        head: &Head,
        store: &dyn Store,
    ) -> Result<Option<JournalState>> {
        if head.state != JournalState::Armed {
            return Ok(Some(head.state).filter(|state| *state == JournalState::Writing));
        }
        let journal = open_file(files, path, Naming::Found, false)?;
        let why = match replay::check_versions(&*journal, head, store) {
            Ok(()) => return Ok(Some(JournalState::Armed)),
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                format!("another program has written to the image since: {error}")
            }
            Err(error) if error.kind() == io::ErrorKind::InvalidData => format!("the undo file is damaged: {error}"),
            Err(error) => return Err(file_error("compare it with the image", path, error)),
        };
        self.warnings.push(format!(
            "{}: it was left by a repair of {} that was interrupted, and cannot be used: {why}; check the image, and remove this file when you do not need the old bytes in it",
            path.display(),
            store.name().display()
        ));
        Ok(None)
    }
}

/// The undo file that undoes the last repair of an image, and what the user should know about files
/// that were ignored. `image` has no symbolic links.
///
/// # Errors
/// Errors of the newest file with such a name that may count; `None` if there is none.
pub(super) fn newest(files: &Files, image: &Path, store: &dyn Store) -> Result<(Option<PathBuf>, Vec<String>)> {
    let mut warnings = Vec::new();
    for path in existing(files, image) {
        match examine(files, &path, Naming::Found, store)? {
            Candidate::Undo(_) => return Ok((Some(path), warnings)),
            Candidate::Blank => {}
            Candidate::Distrusted(_, why) => warnings.push(why),
            Candidate::Unusable(why) => return Err(unused(why)),
            Candidate::Other(error) => return Err(error),
        }
    }
    Ok((None, warnings))
}

/// Refuses to write an image whose repair was interrupted. `store` is the open image.
///
/// # Errors
/// `BadChain`; errors of reading an undo file.
pub(crate) fn refuse_unfinished(
    files: &Files,
    path: &Path,
    store: &dyn Store,
    warnings: &mut Vec<String>,
) -> Result<()> {
    let real = files.canonical(path).map_err(|source| file_error("find it", path, source))?;
    let found = unfinished(files, &real, store)?;
    // An open that changes the cache mode looks twice.
    let new = found.warnings.into_iter().filter(|warning| !warnings.contains(warning));
    let new: Vec<String> = new.collect();
    warnings.extend(new);
    match found.undo {
        Some((undo, JournalState::Armed)) => {
            Err(DiskError::BadChain { path: path.to_owned(), what: interrupted(&undo) })
        }
        _ => Ok(()),
    }
}

/// What a user should know about an image whose repair was interrupted.
pub(super) fn interrupted(undo: &Path) -> String {
    format!(
        "a repair of it was interrupted, and {} has what is needed to put it back; undo the repair, or repair the image again, before it is written",
        undo.display()
    )
}

/// The warnings for a reader of the image at `path`: that its repair was interrupted, and which
/// files look like it but do not count.
pub fn interrupted_repair(files: &Files, path: &Path) -> Vec<String> {
    let look = || -> Result<Vec<String>> {
        let real = files.canonical(path).map_err(|source| file_error("find it", path, source))?;
        if existing(files, &real).is_empty() {
            return Ok(Vec::new());
        }
        let options = OpenOptions { lock: LockMode::None, ..OpenOptions::default() };
        let store = files.open(path, &options)?;
        let Unfinished { undo, mut warnings } = unfinished(files, &real, &*store)?;
        if let Some((undo, JournalState::Armed)) = undo {
            warnings.insert(0, format!("{}: {}", path.display(), interrupted(&undo)));
        }
        Ok(warnings)
    };
    look().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::number_of;

    #[test]
    fn only_the_names_of_undo_files_have_a_number() {
        let number = |name| number_of("disk.vhdx.undo", name);
        assert_eq!(number("disk.vhdx.undo"), Some(1));
        assert_eq!(["Disk.VHDX.undo.2", "disk.vhdx.undo.99"].map(number), [Some(2), Some(99)]);
        let others = ["disk.vhdx", "disk.vhdx.undo.1", "disk.vhdx.undo.100", "disk.vhdx.undo.", "a disk.vhdx.undo"];
        assert_eq!(others.map(number), [None; 5]);
    }
}
