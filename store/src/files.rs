//! Files by path: what a disk needs of the file system besides the bytes of its files.
//!
//! ```text
//!   open (or create), rename, remove, make a directory durable      ─▶ what a command does to names
//!   open what a file names, at the very path that was decided on    ─▶ parents
//!   canonical, facts, list                                          ─▶ what it asks about them
//! ```
//!
//! Everything above reaches files through a [`Files`] that it is given with its options, so a disk
//! can lie where there is no file system of the kernel's: in memory for the tests that cut the
//! power, on object storage later. The default is the machine's own, [`LocalFiles`].
//!
//! The durability contract, beside that of [`Store`]: a name that was made, moved or removed is
//! durably so when [`FileSystem::sync_directory_of`] has returned for it. A rename happens whole or
//! not at all. Nothing else is promised; the *contents* of a file become durable by its own sync
//! only, in no order with its name.

use crate::{
    file::FileStore,
    open::{self, OpenError, OpenOptions},
    store::Store,
};
use rustix::{
    fs::{CWD, RenameFlags},
    io::Errno,
};
use std::{
    fmt, fs, io,
    ops::Deref,
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::{Path, PathBuf},
    sync::Arc,
    time::SystemTime,
};

/// What is known of a file without opening it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileFacts {
    /// As [`Store::identity`] would say.
    pub identity: (u64, u64),
    /// When it was last changed, where that is recorded.
    pub modified: Option<SystemTime>,
}

/// Files by path. All methods block; all may be called from any thread.
pub trait FileSystem: Send + Sync + fmt::Debug {
    /// Opens what is at `path`, or creates it, with a lock as asked for.
    ///
    /// # Errors
    /// See [`OpenError`].
    fn open(&self, path: &Path, options: &OpenOptions) -> Result<Arc<dyn Store>, OpenError>;

    /// Opens a file that exists at `path`, which is as [`FileSystem::canonical`] gave it: whoever
    /// calls has decided by that path that the file may be opened. So no symbolic link is followed
    /// that has come since, and a block device is opened only if allowed. The default is for file
    /// systems without links and devices.
    ///
    /// # Errors
    /// See [`OpenError`].
    fn open_canonical(
        &self,
        path: &Path,
        _allow_devices: bool,
        options: &OpenOptions,
    ) -> Result<Arc<dyn Store>, OpenError> {
        self.open(path, options)
    }

    /// Moves a file within the file system. `replace` lets it take the place of another.
    ///
    /// # Errors
    /// `AlreadyExists` where there is something at `to`, unless it may be replaced; what the system
    /// says.
    fn rename(&self, from: &Path, to: &Path, replace: bool) -> io::Result<()>;

    /// Removes the name of a file.
    fn remove(&self, path: &Path) -> io::Result<()>;

    /// Makes the creation, the renaming or the removal of the file at `path` durable.
    fn sync_directory_of(&self, path: &Path) -> io::Result<()>;

    /// The path without symbolic links and detours. It must exist.
    fn canonical(&self, path: &Path) -> io::Result<PathBuf>;

    /// Looks at what is at `path`.
    fn facts(&self, path: &Path) -> io::Result<FileFacts>;

    /// The regular files in a directory, in no order. What cannot be looked at is left out.
    fn list(&self, directory: &Path) -> io::Result<Vec<PathBuf>>;
}

/// Which files are meant; the machine's own unless said otherwise. Cloning shares.
#[derive(Debug, Clone)]
pub struct Files(Arc<dyn FileSystem>);

impl Files {
    /// Files of `system`.
    pub fn new(system: Arc<dyn FileSystem>) -> Self {
        Self(system)
    }
}

impl Default for Files {
    fn default() -> Self {
        Self(Arc::new(LocalFiles))
    }
}

impl Deref for Files {
    type Target = dyn FileSystem;

    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

/// The file systems of this machine.
#[derive(Debug, Clone, Copy, Default)]
pub struct LocalFiles;

impl FileSystem for LocalFiles {
    fn open(&self, path: &Path, options: &OpenOptions) -> Result<Arc<dyn Store>, OpenError> {
        Ok(Arc::new(FileStore::open(path, options)?))
    }

    fn open_canonical(
        &self,
        path: &Path,
        allow_devices: bool,
        options: &OpenOptions,
    ) -> Result<Arc<dyn Store>, OpenError> {
        Ok(Arc::new(FileStore::open_canonical(path, allow_devices, options)?))
    }

    fn rename(&self, from: &Path, to: &Path, replace: bool) -> io::Result<()> {
        if replace {
            return fs::rename(from, to);
        }
        match rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
            // A file system that cannot do both at once: somebody may come in between, but only
            // somebody who wants this very name.
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => match fs::symlink_metadata(to) {
                Ok(_) => Err(io::ErrorKind::AlreadyExists.into()),
                Err(_) => fs::rename(from, to),
            },
            result => Ok(result?),
        }
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn sync_directory_of(&self, path: &Path) -> io::Result<()> {
        open::sync_directory_of(path)
    }

    fn canonical(&self, path: &Path) -> io::Result<PathBuf> {
        path.canonicalize()
    }

    fn facts(&self, path: &Path) -> io::Result<FileFacts> {
        let found = fs::metadata(path)?;
        let is_device = found.file_type().is_block_device();
        let identity = if is_device { (found.rdev(), 0) } else { (found.dev(), found.ino()) };
        Ok(FileFacts { identity, modified: found.modified().ok() })
    }

    fn list(&self, directory: &Path) -> io::Result<Vec<PathBuf>> {
        let is_file = |entry: &fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_file());
        Ok(fs::read_dir(directory)?.flatten().filter(is_file).map(|entry| entry.path()).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LockMode;

    fn new_file(files: &Files, path: &Path) -> Arc<dyn Store> {
        let options =
            OpenOptions { writable: true, create_new: true, lock: LockMode::Exclusive, ..OpenOptions::default() };
        files.open(path, &options).unwrap()
    }

    #[test]
    fn a_rename_replaces_only_when_told_to() {
        let dir = tempfile::tempdir().unwrap();
        let files = Files::default();
        let (one, two) = (dir.path().join("one"), dir.path().join("two"));
        new_file(&files, &one).write_at(b"1", 0).unwrap();
        new_file(&files, &two).write_at(b"2", 0).unwrap();
        let refused = files.rename(&one, &two, false).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read(&two).unwrap(), b"2");
        files.rename(&one, &two, true).unwrap();
        files.sync_directory_of(&two).unwrap();
        assert_eq!(fs::read(&two).unwrap(), b"1");
        assert_eq!(files.list(dir.path()).unwrap(), std::slice::from_ref(&two));
        files.rename(&two, &one, false).unwrap();
        assert_eq!(files.list(dir.path()).unwrap(), [one]);
    }

    /// Between the decision on a path and the open somebody replaces a folder on it by a link.
    #[test]
    fn a_link_that_comes_after_the_decision_does_not_win() {
        let dir = tempfile::tempdir().unwrap();
        let files = Files::default();
        let (inside, secret) = (dir.path().join("inside"), dir.path().join("secret"));
        for folder in [&inside, &secret] {
            fs::create_dir(folder).unwrap();
            fs::write(folder.join("file"), b"").unwrap();
        }
        let decided = files.canonical(&inside.join("file")).unwrap();
        assert!(files.open_canonical(&decided, false, &OpenOptions::default()).is_ok());
        fs::rename(&inside, dir.path().join("away")).unwrap();
        std::os::unix::fs::symlink(&secret, &inside).unwrap();
        assert!(files.open(&decided, &OpenOptions::default()).is_ok(), "the usual way follows it");
        let refused = files.open_canonical(&decided, false, &OpenOptions::default()).unwrap_err();
        assert!(refused.to_string().contains("symbolic links"), "{refused}");
    }

    #[test]
    fn facts_and_stores_agree_on_who_is_who() {
        let dir = tempfile::tempdir().unwrap();
        let files = Files::default();
        let path = dir.path().join("file");
        let store = new_file(&files, &path);
        let facts = files.facts(&path).unwrap();
        assert_eq!(Some(facts.identity), store.identity());
        assert!(facts.modified.is_some());
        assert_eq!(files.canonical(&dir.path().join(".").join("file")).unwrap(), path.canonicalize().unwrap());
        files.remove(&path).unwrap();
        assert!(files.facts(&path).is_err());
    }
}
