//! Files by path: what a disk needs of a file system besides the bytes of its files.
//!
//! ```text
//!   open (or create), rename, link, remove, sync a directory ─▶ operations on names
//!   open_canonical: open at exactly the resolved path        ─▶ parents
//!   canonical, facts, list                                   ─▶ information
//! ```
//!
//! All upper layers reach files through [`Files`], which is passed with their options. A disk can
//! therefore lie outside the kernel's file systems: in memory for the tests that cut the power, or
//! later on object storage. The default is the machine's own file system, [`LocalFiles`].
//!
//! The durability contract, in addition to that of [`Store`]: a name that was created, moved or
//! removed is durable when [`FileSystem::sync_directory_of`] has returned for it. A rename is
//! atomic. Nothing else is promised. The *contents* of a file become durable only by its own sync,
//! independently of its name.

use crate::{
    file::FileStore,
    open::{self, OpenError, OpenOptions},
    store::Store,
};
use rustix::{
    fs::{Access, CWD, RenameFlags},
    io::Errno,
};
use std::{
    ffi::OsStr,
    fmt, fs, io,
    ops::Deref,
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::{Path, PathBuf},
    sync::{Arc, LazyLock, PoisonError, RwLock},
    time::SystemTime,
};

/// Information on a file, read without opening it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileFacts {
    /// The same as [`Store::identity`].
    pub identity: (u64, u64),
    /// Time of the last modification, if it is recorded.
    pub modified: Option<SystemTime>,
}

/// Access to files by path. All methods block; all may be called from any thread.
pub trait FileSystem: Send + Sync + fmt::Debug {
    /// Opens or creates the file at `path`, with the lock in `options`.
    ///
    /// # Errors
    /// See [`OpenError`].
    fn open(&self, path: &Path, options: &OpenOptions) -> Result<Arc<dyn Store>, OpenError>;

    /// Opens an existing file at `path`, which [`FileSystem::canonical`] returned. The caller has
    /// decided by this path that the file may be opened, so a symbolic link that was created since
    /// is not followed, and a block device is opened only if allowed. The default implementation is
    /// for file systems without links and devices.
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

    /// Moves a file within the file system. With `replace`, an existing file at `to` is replaced.
    ///
    /// # Errors
    /// `AlreadyExists` if `to` exists and must not be replaced; otherwise the system's error.
    fn rename(&self, from: &Path, to: &Path, replace: bool) -> io::Result<()>;

    /// Gives the file at `existing` a second name, `new`. Never replaces a file.
    ///
    /// # Errors
    /// `AlreadyExists` if `new` exists; `Unsupported` where the file system has no hard links.
    fn link(&self, existing: &Path, new: &Path) -> io::Result<()> {
        let _ = (existing, new);
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Removes the name of a file.
    fn remove(&self, path: &Path) -> io::Result<()>;

    /// Makes the creation, renaming or removal of the file at `path` durable.
    fn sync_directory_of(&self, path: &Path) -> io::Result<()>;

    /// Whether this process may create and remove names in a directory. The default implementation
    /// is for file systems without permissions.
    ///
    /// # Errors
    /// The system's reason why not.
    fn check_names_in(&self, directory: &Path) -> io::Result<()> {
        let _ = directory;
        Ok(())
    }

    /// The absolute path without symbolic links, `.` and `..`. The file must exist.
    fn canonical(&self, path: &Path) -> io::Result<PathBuf>;

    /// The name by which an image records the file at `path` as its parent. Where files have
    /// versions it names the one that is there now, and leads to no other. `path` is canonical. The
    /// default implementation is for file systems without versions.
    ///
    /// # Errors
    /// If the file has to be asked and cannot be.
    fn name_of_version(&self, path: &Path) -> io::Result<PathBuf> {
        Ok(path.to_owned())
    }

    /// Information on the file at `path`.
    fn facts(&self, path: &Path) -> io::Result<FileFacts>;

    /// The regular files in a directory, in no order. Entries that cannot be examined are left out.
    fn list(&self, directory: &Path) -> io::Result<Vec<PathBuf>>;

    /// The directories in a directory, in no order, without symbolic links. Entries that cannot be
    /// examined are left out. The default implementation is for file systems without directories.
    fn folders(&self, directory: &Path) -> io::Result<Vec<PathBuf>> {
        let _ = directory;
        Ok(Vec::new())
    }
}

/// Shared handle to a [`FileSystem`]; by default the machine's own.
#[derive(Debug, Clone)]
pub struct Files(Arc<dyn FileSystem>);

/// File systems for names that begin with a scheme.
static SCHEMES: RwLock<Vec<(&'static str, Files)>> = RwLock::new(Vec::new());

/// The scheme with which a name begins, and its file system.
fn scheme_of(path: &Path) -> Option<(&'static str, Files)> {
    let bytes = path.as_os_str().as_encoded_bytes();
    let schemes = SCHEMES.read().unwrap_or_else(PoisonError::into_inner);
    schemes.iter().find(|(scheme, _)| bytes.starts_with(scheme.as_bytes())).cloned()
}

impl Files {
    /// A name with a scheme, without the options behind its path: `?id=vms`, `#etag=...`. `None` if
    /// it has none.
    pub fn without_options(path: &Path) -> Option<&Path> {
        let text = path.to_str().filter(|_| Self::has_scheme(path))?;
        Some(Path::new(&text[..text.find(['?', '#'])?]))
    }

    /// The path of a file with this name in the folder of another one. Options in the name of that
    /// one (`?id=vms`) stay.
    pub fn beside(path: &Path, name: &OsStr) -> PathBuf {
        let Some(plain) = Self::without_options(path) else { return path.with_file_name(name) };
        let options = &path.as_os_str().as_encoded_bytes()[plain.as_os_str().len()..];
        let mut beside = plain.with_file_name(name).into_os_string();
        // Valid UTF-8, as the whole name is.
        beside.push(String::from_utf8_lossy(options).as_ref());
        beside.into()
    }

    /// Makes names that begin with `scheme`, such as "space://", lead to `system`, in all default
    /// handles of the process. For programs, when they start. A scheme that is known stays as it
    /// is.
    pub fn add_scheme(scheme: &'static str, system: Self) {
        let mut schemes = SCHEMES.write().unwrap_or_else(PoisonError::into_inner);
        if schemes.iter().all(|(known, _)| *known != scheme) {
            schemes.push((scheme, system));
        }
    }

    /// Whether a name begins with a scheme of [`Files::add_scheme`]: it is no path of the system.
    pub fn has_scheme(path: &Path) -> bool {
        scheme_of(path).is_some()
    }

    /// Whether both names begin with one scheme, or both with none.
    pub fn have_one_scheme(one: &Path, other: &Path) -> bool {
        let scheme = |path: &Path| scheme_of(path).map(|(scheme, _)| scheme);
        scheme(one) == scheme(other)
    }

    /// A handle to `system`.
    pub fn new(system: Arc<dyn FileSystem>) -> Self {
        Self(system)
    }

    /// Whether both are handles to the same file system. All default handles are.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Default for Files {
    fn default() -> Self {
        static LOCAL: LazyLock<Files> = LazyLock::new(|| Files::new(Arc::new(ByScheme)));
        LOCAL.clone()
    }
}

impl Deref for Files {
    type Target = dyn FileSystem;

    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

/// The machine's own file systems, and those of [`Files::add_scheme`].
#[derive(Debug)]
struct ByScheme;

impl ByScheme {
    /// Carries something out on the file system of a path.
    fn on<T>(path: &Path, act: impl FnOnce(&dyn FileSystem) -> T) -> T {
        match scheme_of(path) {
            Some((_, system)) => act(&*system),
            None => act(&LocalFiles),
        }
    }

    /// As [`ByScheme::on`], for two paths, which must be of the same file system.
    fn on_both(one: &Path, other: &Path, act: impl FnOnce(&dyn FileSystem) -> io::Result<()>) -> io::Result<()> {
        if !Files::have_one_scheme(one, other) {
            return Err(io::ErrorKind::CrossesDevices.into());
        }
        Self::on(one, act)
    }
}

impl FileSystem for ByScheme {
    fn open(&self, path: &Path, options: &OpenOptions) -> Result<Arc<dyn Store>, OpenError> {
        Self::on(path, |system| system.open(path, options))
    }

    fn open_canonical(
        &self,
        path: &Path,
        allow_devices: bool,
        options: &OpenOptions,
    ) -> Result<Arc<dyn Store>, OpenError> {
        Self::on(path, |system| system.open_canonical(path, allow_devices, options))
    }

    fn rename(&self, from: &Path, to: &Path, replace: bool) -> io::Result<()> {
        Self::on_both(from, to, |system| system.rename(from, to, replace))
    }

    fn link(&self, existing: &Path, new: &Path) -> io::Result<()> {
        Self::on_both(existing, new, |system| system.link(existing, new))
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        Self::on(path, |system| system.remove(path))
    }

    fn sync_directory_of(&self, path: &Path) -> io::Result<()> {
        Self::on(path, |system| system.sync_directory_of(path))
    }

    fn check_names_in(&self, directory: &Path) -> io::Result<()> {
        Self::on(directory, |system| system.check_names_in(directory))
    }

    fn canonical(&self, path: &Path) -> io::Result<PathBuf> {
        Self::on(path, |system| system.canonical(path))
    }

    fn name_of_version(&self, path: &Path) -> io::Result<PathBuf> {
        Self::on(path, |system| system.name_of_version(path))
    }

    fn facts(&self, path: &Path) -> io::Result<FileFacts> {
        Self::on(path, |system| system.facts(path))
    }

    fn list(&self, directory: &Path) -> io::Result<Vec<PathBuf>> {
        Self::on(directory, |system| system.list(directory))
    }

    fn folders(&self, directory: &Path) -> io::Result<Vec<PathBuf>> {
        Self::on(directory, |system| system.folders(directory))
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
            // The file system cannot check and rename atomically. Another process could create `to`
            // in between.
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => match fs::symlink_metadata(to) {
                Ok(_) => Err(io::ErrorKind::AlreadyExists.into()),
                Err(_) => fs::rename(from, to),
            },
            result => Ok(result?),
        }
    }

    fn link(&self, existing: &Path, new: &Path) -> io::Result<()> {
        match rustix::fs::link(existing, new) {
            // What Linux says for a file system without hard links.
            Err(Errno::PERM | Errno::NOSYS | Errno::OPNOTSUPP) => Err(io::ErrorKind::Unsupported.into()),
            result => Ok(result?),
        }
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn sync_directory_of(&self, path: &Path) -> io::Result<()> {
        open::sync_directory_of(path)
    }

    fn check_names_in(&self, directory: &Path) -> io::Result<()> {
        Ok(rustix::fs::access(directory, Access::WRITE_OK | Access::EXEC_OK)?)
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

    fn folders(&self, directory: &Path) -> io::Result<Vec<PathBuf>> {
        let is_folder = |entry: &fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_dir());
        Ok(fs::read_dir(directory)?.flatten().filter(is_folder).map(|entry| entry.path()).collect())
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
    fn the_options_of_a_name_are_no_part_of_its_path() {
        Files::add_scheme("with-options://", Files::default());
        let path = Path::new("with-options://pool/a.vhdx?conf=/etc/ceph.conf&id=b");
        assert_eq!(Files::without_options(path), Some(Path::new("with-options://pool/a.vhdx")));
        let beside = Files::beside(path, OsStr::new("b.vhdx"));
        assert_eq!(beside, Path::new("with-options://pool/b.vhdx?conf=/etc/ceph.conf&id=b"));
        assert_eq!(Files::beside(Path::new("/a?b/c"), OsStr::new("d")), Path::new("/a?b/d"));
        assert_eq!(Files::without_options(Path::new("with-options://pool/a.vhdx")), None);
    }

    #[test]
    fn a_rename_replaces_only_with_replace() {
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

    #[test]
    fn a_second_name_is_the_same_file_and_never_replaces_one() {
        let dir = tempfile::tempdir().unwrap();
        let files = Files::default();
        let (one, two) = (dir.path().join("one"), dir.path().join("two"));
        new_file(&files, &one).write_at(b"1", 0).unwrap();
        files.link(&one, &two).unwrap();
        assert_eq!(files.facts(&one).unwrap().identity, files.facts(&two).unwrap().identity);
        assert_eq!(files.link(&one, &two).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        files.remove(&one).unwrap();
        assert_eq!(fs::read(&two).unwrap(), b"1");
    }

    /// A folder in a path is replaced by a symbolic link after the path was resolved and before it
    /// is opened.
    #[test]
    fn a_link_created_after_resolution_is_not_followed() {
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
        assert!(files.open(&decided, &OpenOptions::default()).is_ok(), "a normal open follows the link");
        let refused = files.open_canonical(&decided, false, &OpenOptions::default()).unwrap_err();
        assert!(refused.to_string().contains("symbolic links"), "{refused}");
    }

    #[test]
    fn facts_and_stores_agree_on_identity() {
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
