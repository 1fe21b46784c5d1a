//! The scratch folder for the files of a measurement. It is removed at the end in all cases.

use crate::{LabError, Result};
use diskwright_load::machine;
use diskwright_store::{FileRange, FileStore, LockMode, OpenOptions, Store, Zeroing};
use std::path::{Path, PathBuf};

/// A new folder. Dropping this removes it with its contents, unless it is to be kept.
#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
    made_parents: Vec<PathBuf>,
    keep: bool,
}

impl Scratch {
    /// Creates `diskwright-scratch-<process id>` in `parent` (default: the current folder). Missing
    /// parents are created too. An existing folder is never used, so that only new files are
    /// removed at the end.
    ///
    /// # Errors
    /// [`LabError::File`] if the folder cannot be created.
    pub fn new(parent: Option<&Path>, keep: bool) -> Result<Self> {
        let parent = parent.unwrap_or(Path::new("."));
        let mut made_parents = Vec::new();
        for folder in parent.ancestors().filter(|folder| !folder.as_os_str().is_empty()) {
            if folder.exists() {
                break;
            }
            made_parents.push(folder.to_owned());
        }
        std::fs::create_dir_all(parent).map_err(LabError::file("create the scratch folder", parent))?;
        // Other programs get its paths, and some of them run in another folder.
        let absolute = std::path::absolute(parent).map_err(LabError::file("find the folder", parent))?;
        let mut path = absolute.join(format!("diskwright-scratch-{}", std::process::id()));
        for attempt in 1.. {
            match std::fs::create_dir(&path) {
                Ok(()) => break,
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists && attempt < 100 => {
                    path.set_file_name(format!("diskwright-scratch-{}-{attempt}", std::process::id()));
                }
                Err(error) => return Err(LabError::file("create the scratch folder", path)(error)),
            }
        }
        Ok(Self { path, made_parents, keep })
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Creates a folder in it.
    ///
    /// # Errors
    /// [`LabError::File`] if it cannot be created.
    pub fn folder(&self, name: &str) -> Result<PathBuf> {
        let path = self.path.join(name);
        std::fs::create_dir_all(&path).map_err(LabError::file("create the scratch folder", &path))?;
        Ok(path)
    }

    /// Waits until the file system has finished earlier writes and deletions, so that they do not
    /// slow a measurement.
    ///
    /// # Errors
    /// [`LabError::File`].
    pub fn settle(&self) -> Result<()> {
        settle(&self.path)
    }

    /// Returns an error if the file system has less than `needed_bytes` free.
    ///
    /// # Errors
    /// [`LabError::NoSpace`].
    pub fn need(&self, what: &str, needed_bytes: u64) -> Result<()> {
        let free_bytes = machine::free_bytes(&self.path);
        if free_bytes >= needed_bytes {
            return Ok(());
        }
        Err(LabError::NoSpace { dir: self.path.clone(), what: what.to_owned(), needed_bytes, free_bytes })
    }
}

/// Syncs the file system of the folder `dir`.
///
/// # Errors
/// [`LabError::File`].
pub fn settle(dir: &Path) -> Result<()> {
    let folder = std::fs::File::open(dir).map_err(LabError::file("open", dir))?;
    rustix::fs::syncfs(&folder).map_err(|errno| LabError::file("sync", dir)(errno.into()))
}

/// Converts the many extents of a file into few, so that deleting it is fast. After random writes
/// into preallocated space ext4 has an extent for nearly every write, and deletes them one by one,
/// which can take a minute. The contents are lost. Errors are ignored, because this only saves
/// time.
pub fn simplify_before_removal(path: &Path) {
    let options = OpenOptions { writable: true, lock: LockMode::Exclusive, ..OpenOptions::default() };
    if let Ok(store) = FileStore::open(path, &options)
        && let Ok(len_bytes) = store.len_bytes()
    {
        let _ = store.zero_range(FileRange { offset_bytes: 0, len_bytes }, Zeroing::Keep);
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if self.keep {
            return;
        }
        // A folder that cannot be removed does not affect the result.
        let _ = std::fs::remove_dir_all(&self.path);
        for folder in &self.made_parents {
            // Removed only if it is empty.
            let _ = std::fs::remove_dir(folder);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_made_is_removed() {
        let home = tempfile::tempdir().unwrap();
        let deep = home.path().join("a/b");
        let (first, second) = (Scratch::new(Some(&deep), false).unwrap(), Scratch::new(Some(&deep), false).unwrap());
        assert_ne!(first.path(), second.path());
        std::fs::write(first.folder("x").unwrap().join("f"), "data").unwrap();
        std::fs::write(deep.join("a user's file"), "precious").unwrap();
        drop((first, second));
        assert_eq!(std::fs::read_dir(&deep).unwrap().count(), 1);
        std::fs::remove_file(deep.join("a user's file")).unwrap();
        drop(Scratch::new(Some(&deep), false).unwrap());
        assert!(deep.exists(), "a folder that was there before stays");
        let kept = Scratch::new(Some(&deep), true).unwrap();
        let path = kept.path().to_owned();
        drop(kept);
        assert!(path.exists());
    }

    #[test]
    fn a_full_file_system_is_reported() {
        let home = tempfile::tempdir().unwrap();
        let scratch = Scratch::new(Some(home.path()), false).unwrap();
        scratch.need("nothing", 0).unwrap();
        let error = scratch.need("a test", u64::MAX).unwrap_err().to_string();
        assert!(error.contains("a test") && error.contains("use another folder"), "{error}");
    }
}
