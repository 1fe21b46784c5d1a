//! Names of images as paths: the images of a pool are its files.

use crate::{
    cluster::Pool,
    error::{RbdError, Result},
    image::{self, Image},
    store::{RbdStore, numbers},
    uri::{PREFIX, RbdUri},
};
use diskwright_store::{FileFacts, FileSystem, Files, OpenError, OpenOptions, Store};
use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

/// How names of images begin.
pub const SCHEME: &str = PREFIX;

/// The images of clusters as files; see the module documentation.
#[derive(Debug, Default)]
pub struct RbdFiles;

impl RbdFiles {
    /// Makes names of images work in all file functions of the process.
    pub fn install() {
        Files::add_scheme(SCHEME, Files::new(Arc::new(Self)));
    }

    fn open_store(path: &Path, options: &OpenOptions) -> Result<RbdStore> {
        let uri = RbdUri::parse(path)?;
        if options.create_new {
            if uri.snapshot.is_some() {
                return Err(RbdError::Snapshot { name: uri.to_string() });
            }
            let made = Pool::of(&uri)?.create(&uri.image);
            made.map_err(|source| RbdError::Image { name: uri.to_string(), doing: "create", source })?;
        }
        RbdStore::open(&uri, options.writable)
    }

    fn two(from: &Path, to: &Path) -> io::Result<(RbdUri, RbdUri)> {
        let (from, to) = (RbdUri::parse(from)?, RbdUri::parse(to)?);
        let is_same = (&from.pool, &from.namespace, &from.connection) == (&to.pool, &to.namespace, &to.connection);
        if !is_same || from.snapshot.is_some() || to.snapshot.is_some() {
            return Err(io::Error::new(io::ErrorKind::CrossesDevices, "images are renamed within their pool only"));
        }
        Ok((from, to))
    }
}

impl FileSystem for RbdFiles {
    fn open(&self, path: &Path, options: &OpenOptions) -> Result<Arc<dyn Store>, OpenError> {
        match Self::open_store(path, options) {
            Ok(store) => Ok(Arc::new(store)),
            Err(RbdError::Locked { name }) => {
                let holder = " by another client of the cluster (`rbd lock ls` names it)".into();
                Err(OpenError::Locked { path: name.into(), purpose: "writing", holder })
            }
            Err(error) => {
                let name = path.display().to_string();
                // The name comes first in the whole sentence.
                let said = error.to_string();
                let why = said.strip_prefix(&format!("{name}: ")).unwrap_or(&said).to_owned();
                Err(OpenError::Io { doing: "open", path: name.into(), source: io::Error::new(error.kind(), why) })
            }
        }
    }

    fn rename(&self, from: &Path, to: &Path, replace: bool) -> io::Result<()> {
        let (from, to) = Self::two(from, to)?;
        let pool = Pool::of(&from)?;
        match pool.rename(&from.image, &to.image) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && replace => Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "an image cannot take the place of another one in one step",
            )),
            result => result,
        }
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        let uri = RbdUri::parse(path)?;
        if uri.snapshot.is_some() {
            return Err(RbdError::Snapshot { name: uri.to_string() }.into());
        }
        image::remove(&*Pool::of(&uri)?, &uri)
    }

    /// Nothing to do: the cluster has answered.
    fn sync_directory_of(&self, _path: &Path) -> io::Result<()> {
        Ok(())
    }

    /// Names have no links. The image must exist, unless a folder is meant.
    fn canonical(&self, path: &Path) -> io::Result<PathBuf> {
        match RbdUri::parse(path) {
            Ok(uri) => Ok(uri.to_string().into()),
            // The pool, as the folder of its images.
            Err(_) => Ok(path.to_owned()),
        }
    }

    fn facts(&self, path: &Path) -> io::Result<FileFacts> {
        let uri = RbdUri::parse(path)?;
        let image = Image::open(&uri, false)?;
        let identity = numbers(&image.pool.cluster.fsid, &image.id()?, uri.snapshot.as_deref());
        Ok(FileFacts { identity, modified: None })
    }

    fn list(&self, directory: &Path) -> io::Result<Vec<PathBuf>> {
        // Any image of the pool has the connection and the namespace.
        let probe = RbdUri::parse(&directory.join("x"))?;
        let named = |image: String| probe.beside(image).to_string().into();
        Ok(Pool::of(&probe)?.images()?.into_iter().map(named).collect())
    }
}
