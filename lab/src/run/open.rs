//! Opening what a user named: an image by the engine, a raw file, a block device, an export of an
//! NBD server, or `null:`.
//!
//! A file is a raw disk, a VHD or a VHDX by the rules of `diskwright_image::probe`: name and
//! contents must agree, or the user says the format. VHD and VHDX are opened as virtual disks, with
//! their parents, and a raw disk in several files as one disk. A block device is always raw: what
//! lies on it may look like an image and not be meant as one. So is an export; its server has
//! opened the image already.

use crate::{
    LabError, NullDevice, Result,
    behind::Behind,
    job::Caching,
    progress::{Progress, Step},
    record::ContentsRecord,
    workload::short_size,
};
use diskwright_disk::{Disk, Named, OpenOptions, Opened, parts_of};
use diskwright_image::{Format, probe::probe};
use diskwright_nbd::NbdUri;
use diskwright_store::{BlockDevice, Blocking, CacheMode, EngineKind, FileStore, Files, LockMode, RawDevice, Store};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

/// Size of a `null:` target that names none.
const NULL_BYTES: u64 = 1 << 40;

/// A target, open.
#[derive(Debug, Clone)]
pub struct OpenTarget {
    /// As given by the user.
    pub name: String,
    /// "vhdx dynamic", "raw file", "raw files", "block device", "nbd export", "null".
    pub kind: String,
    /// Its file, where it has one.
    pub path: Option<PathBuf>,
    /// What requests go to.
    pub device: Arc<dyn BlockDevice>,
    /// The same where it is a virtual disk, to close it by.
    pub disk: Option<Arc<Disk>>,
    /// Cache mode in force, which is not the one asked for where the file system has no O_DIRECT.
    /// For an export it is the one asked for, and says of its server nothing.
    pub cache: Caching,
    /// What it shows, where it is no file of its own.
    pub behind: Option<Behind>,
    /// What was seen of its contents before the run, by those who looked.
    pub contents: Option<ContentsRecord>,
}

impl OpenTarget {
    /// Whether it is reached through a server, which caches as it likes.
    pub fn is_export(&self) -> bool {
        self.behind.as_ref().is_some_and(|behind| behind.export().is_some())
    }

    /// Whether something may have been written to it that is to last.
    fn keeps_writes(&self) -> bool {
        self.kind != "null" && !self.device.geometry().read_only
    }

    /// Makes durable what was written to it, and closes a virtual disk cleanly. Dropping it closes
    /// it as well, but can tell nobody of a failure.
    ///
    /// # Errors
    /// [`LabError::Disk`], also while one of its queues is open; [`LabError::Queue`] when a flush
    /// fails.
    pub fn close(&self) -> Result<()> {
        if let Some(disk) = &self.disk {
            return Ok(disk.close()?);
        }
        if !self.keeps_writes() {
            return Ok(());
        }
        let flushed = Blocking::open(&*self.device, EngineKind::Auto).and_then(|mut queue| queue.flush());
        flushed.map_err(|source| LabError::Queue {
            target: self.name.clone(),
            doing: "make durable what was written to it".into(),
            source,
        })
    }
}

/// How to open.
#[derive(Debug, Clone, Default)]
pub struct OpenHow {
    /// For writing as well.
    pub writable: bool,
    /// Cache mode that is asked for.
    pub cache: Caching,
    /// All else of a disk: its format where that is not to be found out, which parents may be
    /// opened, what may be written to. The two fields above replace what stands in it.
    pub disk: OpenOptions,
}

impl OpenHow {
    /// As the engine takes it.
    fn options(&self) -> OpenOptions {
        OpenOptions { writable: self.writable, cache: self.cache.mode(), ..self.disk.clone() }
    }
}

impl Caching {
    /// How the store is to be opened.
    pub fn mode(self) -> CacheMode {
        match self {
            Self::Cached | Self::WriteThrough => CacheMode::PageCache,
            Self::Direct | Self::DirectWriteThrough => CacheMode::Direct,
        }
    }

    /// Whether a write is durable when it completes.
    pub fn is_durable(self) -> bool {
        matches!(self, Self::WriteThrough | Self::DirectWriteThrough)
    }

    /// The same durability with the mode that is in force.
    fn in_force(self, mode: CacheMode) -> Self {
        match (mode, self.is_durable()) {
            (CacheMode::PageCache, false) => Self::Cached,
            (CacheMode::PageCache, true) => Self::WriteThrough,
            (CacheMode::Direct, false) => Self::Direct,
            (CacheMode::Direct, true) => Self::DirectWriteThrough,
        }
    }
}

/// Whether `spec` names an export, and not something on this machine.
pub fn names_export(spec: &str) -> bool {
    NbdUri::looks_like(spec.as_ref())
}

/// Opens the target that `spec` names: a path, the URI of an export, or `null:` with a size if it
/// is to have another one than 1T (`null:64G`).
///
/// # Errors
/// [`LabError::Open`] and [`LabError::Disk`]; [`LabError::BadOptions`] for a `null:` of no size.
pub fn open(spec: &str, how: &OpenHow) -> Result<OpenTarget> {
    if let Some(size) = spec.strip_prefix("null:") {
        return open_null(spec, size, how.cache);
    }
    if names_export(spec) {
        return open_export(spec, how);
    }
    let path = Path::new(spec);
    let mut disk = None;
    let (kind, mode, device): (String, CacheMode, Arc<dyn BlockDevice>) = match format_of(path, how)? {
        Found::BlockDevice => {
            let device = RawDevice::open(path, how.writable, how.cache.mode())?;
            ("block device".into(), device.cache_mode(), Arc::new(device))
        }
        Found::RawFile => {
            let device = RawDevice::open(path, how.writable, how.cache.mode())?;
            ("raw file".into(), device.cache_mode(), Arc::new(device))
        }
        Found::Image(format) => {
            let opened = Disk::open(path, &how.options())?;
            let top = opened.layers()[0].image.info().disk_type;
            let mode = crate::targets::top_cache_mode(&opened);
            disk = Some(Arc::clone(&opened));
            let kind = match format {
                Format::Raw => "raw files".into(),
                _ => format!("{format} {top}").to_lowercase(),
            };
            (kind, mode, opened)
        }
    };
    Ok(OpenTarget {
        name: spec.to_owned(),
        kind,
        path: Some(path.to_owned()),
        device,
        disk,
        cache: how.cache.in_force(mode),
        behind: Behind::of_device(path),
        contents: None,
    })
}

fn open_export(spec: &str, how: &OpenHow) -> Result<OpenTarget> {
    let opened = Opened::open(Path::new(spec), &how.options())?;
    let behind = match &opened {
        Opened::Export(export) => Some(Behind::of_export(export)),
        Opened::Disk(_) => None,
    };
    Ok(OpenTarget {
        name: spec.to_owned(),
        kind: "nbd export".into(),
        path: None,
        device: opened.shared(),
        disk: None,
        cache: how.cache,
        behind,
        contents: None,
    })
}

fn open_null(spec: &str, size: &str, cache: Caching) -> Result<OpenTarget> {
    let bad = |what: String| LabError::BadOptions {
        what,
        hint: format!("say null: or, for example, null:{}", short_size(NULL_BYTES)),
    };
    let size_bytes = match size {
        "" => NULL_BYTES,
        size => size.parse::<crate::job::Bytes>().map_err(|error| bad(format!("{spec}: {error}")))?.0,
    };
    if size_bytes < 4096 {
        return Err(bad(format!("{spec}: a target of {size_bytes} bytes holds nothing")));
    }
    Ok(OpenTarget {
        name: spec.to_owned(),
        kind: "null".into(),
        path: None,
        device: Arc::new(NullDevice::new(size_bytes)),
        disk: None,
        cache,
        behind: None,
        contents: None,
    })
}

/// Makes durable what was written to `targets`, and closes them: all of them, whatever fails, and
/// whatever `progress` answers.
///
/// # Errors
/// The first failure. What was measured was measured, but may not be there.
pub fn close(targets: &[OpenTarget], progress: &mut dyn Progress) -> Result<()> {
    let mut outcome = Ok(());
    for (number, target) in targets.iter().enumerate() {
        if target.keeps_writes() {
            let (done, total) = (number as u64, targets.len() as u64);
            progress.step(Step { phase: "close", done, total, message: &target.name });
        }
        outcome = outcome.and(target.close());
    }
    outcome
}

enum Found {
    BlockDevice,
    RawFile,
    /// Opened by the engine: a format other than raw, or a raw disk in several files.
    Image(Format),
}

/// Looks at the bytes, unless the format is given.
fn format_of(path: &Path, how: &OpenHow) -> Result<Found> {
    let options = diskwright_store::OpenOptions { lock: LockMode::None, ..diskwright_store::OpenOptions::default() };
    let store = FileStore::open(path, &options)?;
    if store.is_block_device() {
        return Ok(Found::BlockDevice);
    }
    let format = match how.disk.format {
        Some(format) => format,
        None => probe(&store, how.writable).map_err(diskwright_disk::DiskError::from)?.format,
    };
    if format == Format::Raw && parts_of(&Files::default(), path)? == Named::Alone {
        return Ok(Found::RawFile);
    }
    Ok(Found::Image(format))
}
