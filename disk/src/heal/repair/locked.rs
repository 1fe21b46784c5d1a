//! The file of an image that is repaired, locked before anything of it is read.

use super::{journal::JournalState, undo_file};
use crate::{DiskError, Result, error::file_error};
use diskwright_store::{CacheMode, Files, LockMode, OpenOptions as StoreOptions, Store};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

fn open_store(path: &Path, files: &Files, lock: LockMode) -> Result<Arc<dyn Store>> {
    let writable = lock == LockMode::Exclusive;
    let options = StoreOptions { writable, create_new: false, cache: CacheMode::PageCache, lock };
    let store = files.open(path, &options)?;
    if store.is_block_device() {
        return Err(DiskError::BadOptions {
            what: format!(
                "{}: an image on a block device cannot be repaired, as its length cannot change",
                path.display()
            ),
            hint: "copy it to a file first".into(),
        });
    }
    Ok(store)
}

/// A locked file, of which nothing was read yet.
pub(super) struct Locked {
    pub(super) path: PathBuf,
    /// The path without symbolic links.
    pub(super) real: PathBuf,
    pub(super) store: Arc<dyn Store>,
}

impl Locked {
    pub(super) fn open(path: &Path, files: &Files, only_reads: bool) -> Result<Self> {
        let real = files.canonical(path).map_err(|source| file_error("find it", path, source))?;
        let store = open_store(path, files, if only_reads { LockMode::Shared } else { LockMode::Exclusive })?;
        Ok(Self { path: path.to_owned(), real, store })
    }

    /// The undo file of an interrupted repair, and its state: by its name, or the one that is
    /// named.
    pub(super) fn unfinished(
        &self,
        files: &Files,
        named: Option<&Path>,
        warnings: &mut Vec<String>,
    ) -> Result<Option<(PathBuf, JournalState)>> {
        let by_name = undo_file::unfinished(files, &self.real, &*self.store)?;
        warnings.extend(by_name.warnings);
        let named = named.filter(|named| by_name.undo.as_ref().is_none_or(|(undo, _)| !is_same(files, named, undo)));
        let other = match named {
            Some(named) => undo_file::unfinished_in(files, named, &*self.store)?.undo,
            None => None,
        };
        match (by_name.undo, other) {
            (Some((one, JournalState::Armed)), Some((other, JournalState::Armed))) => Err(DiskError::BadOptions {
                what: format!(
                    "{}: two repairs of it were interrupted, with the undo files {} and {}",
                    self.path.display(),
                    one.display(),
                    other.display()
                ),
                hint: "undo the later one first, then the other".into(),
            }),
            (Some((_, JournalState::Writing)), Some(other)) => Ok(Some(other)),
            (by_name, other) => Ok(by_name.or(other)),
        }
    }
}

/// Whether two paths lead to one file.
pub(super) fn is_same(files: &Files, one: &Path, other: &Path) -> bool {
    files.facts(one).is_ok_and(|one| files.facts(other).is_ok_and(|other| one.identity == other.identity))
}
