//! The members of an OVA as the files of a folder with the name of the OVA.

use super::archive::{Archive, OvaMember};
use diskwright_store::{FileFacts, FileRange, FileSystem, Files, OpenError, OpenOptions, Store, WindowStore};
use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

#[derive(Debug)]
struct Members {
    /// Path of the OVA.
    path: PathBuf,
    archive: Archive,
}

/// The file system of an archive that is at `path`.
pub(super) fn files(path: PathBuf, archive: Archive) -> Files {
    Files::new(Arc::new(Members { path, archive }))
}

impl Members {
    fn find(&self, path: &Path) -> io::Result<(usize, &OvaMember)> {
        let name = path.strip_prefix(&self.path).ok().and_then(Path::to_str);
        let found = name.and_then(|name| self.archive.members.iter().position(|member| member.name == name));
        let missing = || io::Error::new(io::ErrorKind::NotFound, "the OVA has no such file");
        found.map(|index| (index, &self.archive.members[index])).ok_or_else(missing)
    }

    fn refuse<T>(&self) -> io::Result<T> {
        Err(io::Error::new(io::ErrorKind::ReadOnlyFilesystem, "files inside an OVA are only read"))
    }
}

impl FileSystem for Members {
    fn open(&self, path: &Path, options: &OpenOptions) -> Result<Arc<dyn Store>, OpenError> {
        let failed = |source| OpenError::Io { doing: "open", path: path.to_owned(), source };
        if options.writable || options.create_new {
            return self.refuse().map_err(failed);
        }
        let (_, member) = self.find(path).map_err(failed)?;
        let range = FileRange { offset_bytes: member.offset_bytes, len_bytes: member.size_bytes };
        let window = WindowStore::new(Arc::clone(&self.archive.store), path.to_owned(), range).map_err(failed)?;
        Ok(Arc::new(window))
    }

    fn rename(&self, _from: &Path, _to: &Path, _replace: bool) -> io::Result<()> {
        self.refuse()
    }

    fn remove(&self, _path: &Path) -> io::Result<()> {
        self.refuse()
    }

    fn sync_directory_of(&self, _path: &Path) -> io::Result<()> {
        Ok(())
    }

    fn canonical(&self, path: &Path) -> io::Result<PathBuf> {
        // The folder itself is asked for by the gate of parents.
        if path == self.path { Ok(path.to_owned()) } else { self.find(path).map(|_| path.to_owned()) }
    }

    fn facts(&self, path: &Path) -> io::Result<FileFacts> {
        let (index, _) = self.find(path)?;
        Ok(FileFacts { identity: (u64::MAX, index as u64), modified: None })
    }

    fn list(&self, directory: &Path) -> io::Result<Vec<PathBuf>> {
        if directory != self.path {
            return Ok(Vec::new());
        }
        Ok(self.archive.members.iter().map(|member| self.path.join(&member.name)).collect())
    }
}
