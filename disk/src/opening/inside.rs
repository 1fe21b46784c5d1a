//! An image inside an export of an NBD server: a file system whose only file is that image.
//!
//! The file name is the URI. Nothing else can be opened: the parent of a differencing disk is
//! looked for neither on the server nor on this machine, whatever path the image names.

use crate::{DiskError, Result};
use diskwright_nbd::{NbdStore, NbdUri};
use diskwright_store::{FileFacts, FileSystem, Files, OpenError, OpenOptions, Store};
use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

/// The file system with the export as its only file.
#[derive(Debug)]
struct Export {
    name: PathBuf,
    store: Arc<NbdStore>,
}

/// Connects to the export `name` and returns the file system for an image inside it.
///
/// # Errors
/// [`DiskError::Nbd`].
pub(crate) fn files(name: &Path, uri: &NbdUri, writable: bool) -> Result<Files> {
    let store = NbdStore::open(uri, writable).map_err(DiskError::Nbd)?;
    Ok(Files::new(Arc::new(Export { name: name.to_owned(), store: Arc::new(store) })))
}

impl Export {
    fn find(&self, path: &Path) -> io::Result<()> {
        if path == self.name {
            return Ok(());
        }
        let what = "an image inside an export cannot refer to other files; copy the whole chain to one machine";
        Err(io::Error::new(io::ErrorKind::NotFound, what))
    }

    fn refuse<T>(&self) -> io::Result<T> {
        Err(io::Error::new(io::ErrorKind::Unsupported, "an export of a server cannot be renamed or removed"))
    }
}

impl FileSystem for Export {
    fn open(&self, path: &Path, _options: &OpenOptions) -> Result<Arc<dyn Store>, OpenError> {
        self.find(path).map_err(|source| OpenError::Io { doing: "open", path: path.to_owned(), source })?;
        Ok(Arc::clone(&self.store) as Arc<dyn Store>)
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
        self.find(path).map(|()| path.to_owned())
    }

    fn facts(&self, path: &Path) -> io::Result<FileFacts> {
        self.find(path).map(|()| FileFacts { identity: (u64::MAX, 0), modified: None })
    }

    fn list(&self, _directory: &Path) -> io::Result<Vec<PathBuf>> {
        Ok(Vec::new())
    }
}
