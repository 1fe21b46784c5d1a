//! Opens a FILE or a URI: the only place where a name given by the user becomes a block device.
//!
//! ```text
//!   disk.vhdx, /dev/sdb, disk.raw            ─▶ Disk       the chain of images
//!   appliance.ova                            ─▶ Disk       an image inside the archive (`ova`)
//!   nbd://HOST/EXPORT, nbd+unix:///...       ─▶ NbdDevice  an export of a server, as a raw disk
//!     the same, with a format other than raw ─▶ Disk       an image in the export (`inside`)
//!   nvme://HOST/NQN                          ─▶ NvmeDevice a namespace of a target, as a raw disk
//!   iscsi://HOST/TARGET/LUN                  ─▶ IscsiDevice a logical unit, as a raw disk
//! ```
//!
//! The contents of an export are never probed. The server has opened the image already, and a
//! guest's raw disk that begins like a VHDX must not be opened as one. An image inside an export is
//! opened only if the user names its format.

use crate::{
    Disk, DiskError, OpenOptions, Result,
    opening::{
        inside,
        ova::{Ova, is_ova},
    },
};
use diskwright_image::Format;
use diskwright_iscsi::{IscsiDevice, IscsiUri};
use diskwright_nbd::{NbdDevice, NbdUri};
use diskwright_nvme::{NvmeDevice, NvmeUri};
use diskwright_store::{BlockDevice, Blocking, EngineKind};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

/// The meaning of a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// A file or a device of this machine.
    File(PathBuf),
    /// An export of an NBD server.
    Nbd(NbdUri),
    /// A namespace of an NVMe/TCP target.
    Nvme(NvmeUri),
    /// A logical unit of an iSCSI target.
    Iscsi(IscsiUri),
}

impl Place {
    /// Parses a name. `./nbd://...` is a file whose name looks like a URI.
    ///
    /// # Errors
    /// [`DiskError::Nbd`], [`DiskError::Nvme`] and [`DiskError::Iscsi`] for an invalid URI.
    pub fn parse(name: &Path) -> Result<Self> {
        let text = name.to_string_lossy();
        if NbdUri::looks_like(name.as_os_str()) {
            return Ok(Self::Nbd(NbdUri::parse(&text).map_err(diskwright_nbd::ClientError::from)?));
        }
        if NvmeUri::looks_like(name.as_os_str()) {
            return Ok(Self::Nvme(NvmeUri::parse(&text).map_err(diskwright_nvme::ClientError::from)?));
        }
        if IscsiUri::looks_like(name.as_os_str()) {
            return Ok(Self::Iscsi(IscsiUri::parse(&text).map_err(diskwright_iscsi::ClientError::from)?));
        }
        Ok(Self::File(name.to_owned()))
    }

    /// Whether the name is the URI of a disk on a server, valid or not.
    pub fn is_on_server(name: &Path) -> bool {
        let name = name.as_os_str();
        NbdUri::looks_like(name) || NvmeUri::looks_like(name) || IscsiUri::looks_like(name)
    }
}

/// Fails for a URI, in operations that need a file. `task` is the verb for the error: "check".
///
/// # Errors
/// [`DiskError::Usage`].
pub fn require_file(name: &Path, task: &str) -> Result<()> {
    if !Place::is_on_server(name) {
        return Ok(());
    }
    Err(refused(name, task))
}

fn refused(name: &Path, task: &str) -> DiskError {
    DiskError::Usage {
        what: format!("{}: cannot {task} the export of a server, only a disk in a file", name.display()),
        hint: "run the command on the server, or copy the export into a file (diskwright convert)".into(),
    }
}

/// A raw disk of a server.
#[derive(Debug, Clone)]
pub enum Remote {
    /// An export of an NBD server.
    Export(Arc<NbdDevice>),
    /// A namespace of an NVMe/TCP target.
    Namespace(Arc<NvmeDevice>),
    /// A logical unit of an iSCSI target.
    Unit(Arc<IscsiDevice>),
}

impl Remote {
    fn device(&self) -> &dyn BlockDevice {
        match self {
            Self::Export(export) => &**export,
            Self::Namespace(namespace) => &**namespace,
            Self::Unit(unit) => &**unit,
        }
    }

    fn shared(&self) -> Arc<dyn BlockDevice> {
        match self {
            Self::Export(export) => Arc::clone(export) as Arc<dyn BlockDevice>,
            Self::Namespace(namespace) => Arc::clone(namespace) as Arc<dyn BlockDevice>,
            Self::Unit(unit) => Arc::clone(unit) as Arc<dyn BlockDevice>,
        }
    }

    fn uri(&self) -> String {
        match self {
            Self::Export(export) => export.uri().to_string(),
            Self::Namespace(namespace) => namespace.uri().to_string(),
            Self::Unit(unit) => unit.uri().to_string(),
        }
    }
}

/// An open disk, or one of a server.
#[derive(Debug, Clone)]
pub enum Opened {
    /// A disk of images.
    Disk(Arc<Disk>),
    /// A raw disk of a server.
    Remote(Remote),
}

impl Opened {
    /// Opens what `name` means. For a disk of a server only [`OpenOptions::writable`] is used,
    /// unless a format other than raw is given: then the image inside an NBD export is opened.
    ///
    /// # Errors
    /// As [`Disk::open`]; [`DiskError::Nbd`]; [`DiskError::Nvme`]; [`DiskError::Iscsi`].
    pub fn open(name: &Path, options: &OpenOptions) -> Result<Self> {
        let has_format = options.format.is_some_and(|format| format != Format::Raw);
        let is_raw = !has_format && options.snapshot.is_none();
        Ok(Self::Remote(match Place::parse(name)? {
            Place::File(path) if options.format != Some(Format::Raw) && is_ova(&path) => {
                return Ova::open(&path, &options.files)?.open_disk(options).map(Self::Disk);
            }
            Place::File(path) => return Disk::open(path, options).map(Self::Disk),
            Place::Nbd(uri) if has_format => {
                let files = inside::files(name, &uri, options.writable)?;
                return Disk::open(name, &OpenOptions { files, ..options.clone() }).map(Self::Disk);
            }
            Place::Nbd(uri) if is_raw => Remote::Export(Arc::new(NbdDevice::open(&uri, options.writable)?)),
            Place::Nvme(uri) if is_raw => Remote::Namespace(Arc::new(NvmeDevice::open(&uri, options.writable)?)),
            Place::Iscsi(uri) if is_raw => Remote::Unit(Arc::new(IscsiDevice::open(&uri, options.writable)?)),
            Place::Nbd(_) | Place::Nvme(_) | Place::Iscsi(_) => {
                return Err(DiskError::Usage {
                    what: format!(
                        "{}: it is a raw disk of a server, which has no internal snapshots; images are read inside an \
                         NBD export only",
                        name.display()
                    ),
                    hint: "leave out `OpenOptions::format` and `OpenOptions::snapshot`".into(),
                });
            }
        }))
    }

    /// Opens a disk of images: a file, or an image inside an export whose format is given. Refuses
    /// other exports, with `task` as in [`require_file`].
    ///
    /// # Errors
    /// As [`Opened::open`]; [`DiskError::Usage`] for an export without a format.
    pub fn image(name: &Path, options: &OpenOptions, task: &str) -> Result<Arc<Disk>> {
        if options.format.is_none_or(|format| format == Format::Raw) {
            require_file(name, task)?;
        }
        match Self::open(name, options)? {
            Self::Disk(disk) => Ok(disk),
            Self::Remote(_) => Err(refused(name, task)),
        }
    }

    /// The device, for its queues and extents.
    pub fn device(&self) -> &dyn BlockDevice {
        match self {
            Self::Disk(disk) => &**disk,
            Self::Remote(remote) => remote.device(),
        }
    }

    /// The block device, as a shared reference.
    pub fn shared(&self) -> Arc<dyn BlockDevice> {
        match self {
            Self::Disk(disk) => Arc::clone(disk) as Arc<dyn BlockDevice>,
            Self::Remote(remote) => remote.shared(),
        }
    }

    /// Its URI; `None` for a disk of images.
    pub fn uri(&self) -> Option<String> {
        match self {
            Self::Disk(_) => None,
            Self::Remote(remote) => Some(remote.uri()),
        }
    }

    /// The disk of images; `None` for a disk of a server.
    pub fn disk(&self) -> Option<&Arc<Disk>> {
        match self {
            Self::Disk(disk) => Some(disk),
            Self::Remote(_) => None,
        }
    }

    /// Warnings for the user about how it was opened, one sentence each.
    pub fn warnings(&self) -> &[String] {
        match self {
            Self::Disk(disk) => disk.warnings(),
            Self::Remote(_) => &[],
        }
    }

    /// Makes everything durable and closes a disk cleanly.
    ///
    /// # Errors
    /// As [`Disk::close`]; the error of an export's flush.
    pub fn close(&self) -> Result<()> {
        if let Self::Disk(disk) = self {
            return disk.close();
        }
        if self.device().geometry().read_only {
            return Ok(());
        }
        let flushed = Blocking::open(self.device(), EngineKind::Auto).and_then(|mut queue| queue.flush());
        flushed.map_err(|source| {
            let path = self.uri().unwrap_or_default().into();
            DiskError::File { doing: "make the export durable", path, source }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        assert_eq!(Place::parse(Path::new("a/b.vhdx")).unwrap(), Place::File("a/b.vhdx".into()));
        assert_eq!(Place::parse(Path::new("./nbd://x")).unwrap(), Place::File("./nbd://x".into()));
        assert_eq!(Place::parse(Path::new("nbd://h/x")).unwrap(), Place::Nbd(NbdUri::tcp("h", 10809, "x")));
        assert!(matches!(Place::parse(Path::new("nbd+unix:///x")).unwrap_err(), DiskError::Nbd(_)));
        assert!(matches!(Place::parse(Path::new("nvme://h")).unwrap(), Place::Nvme(_)));
        assert!(matches!(Place::parse(Path::new("nvme://h/x")).unwrap_err(), DiskError::Nvme(_)));
        assert!(matches!(Place::parse(Path::new("iscsi://h")).unwrap(), Place::Iscsi(_)));
        assert!(matches!(Place::parse(Path::new("iscsi://h/x")).unwrap_err(), DiskError::Iscsi(_)));
    }

    #[test]
    fn operations_on_files_refuse_uris() {
        assert!(require_file(Path::new("./nbd://x"), "check").is_ok());
        let error = require_file(Path::new("nbd://h/x"), "check").unwrap_err().to_string();
        assert!(error.starts_with("nbd://h/x: cannot check the export") && error.contains("convert"), "{error}");
    }
}
