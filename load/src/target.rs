//! A target of a run: an open block device with the facts that a result records about it.
//!
//! The caller opens files, virtual disks and exports, and makes an [`OpenTarget`] of each. A run
//! drives every block device in the same way.

use crate::{
    LoadError, Result,
    backing::Backing,
    job::Caching,
    machine::Place,
    record::{ContentsRecord, TargetRecord},
};
use diskwright_store::{BlockDevice, Blocking, EngineKind};
use std::{error::Error, fmt, path::PathBuf, sync::Arc};

/// Closes a target that needs more than a flush, such as a virtual disk.
pub trait Close: fmt::Debug + Send + Sync {
    /// Makes all writes durable and closes the target cleanly.
    ///
    /// # Errors
    /// A sentence for the user.
    fn close(&self) -> Result<(), Box<dyn Error + Send + Sync>>;
}

/// An open target.
#[derive(Debug, Clone)]
pub struct OpenTarget {
    /// Name as given by the user.
    pub name: String,
    /// "vhdx dynamic", "raw file", "raw files", "block device", "nbd export", "null".
    pub kind: String,
    /// File or device of the target; `None` for an export and for `null:`.
    pub path: Option<PathBuf>,
    /// The device that gets the requests.
    pub device: Arc<dyn BlockDevice>,
    /// Closes the target; `None` where a flush is enough.
    pub closes: Option<Arc<dyn Close>>,
    /// Cache mode in force. It differs from the mode asked for where the file system has no
    /// O_DIRECT. For an export it is the mode asked for, since the mode of the server is not known.
    pub cache: Caching,
    /// The image, export or file that the target shows; `None` where the target itself is measured.
    pub behind: Option<Backing>,
    /// Contents that were sampled before the run; `None` where none were.
    pub contents: Option<ContentsRecord>,
}

impl OpenTarget {
    /// A block device with a name and without a file. Its cache mode is recorded as O_DIRECT.
    pub fn new(name: impl Into<String>, device: impl BlockDevice + 'static) -> Self {
        Self {
            name: name.into(),
            kind: "block device".into(),
            path: None,
            device: Arc::new(device),
            closes: None,
            cache: Caching::Direct,
            behind: None,
            contents: None,
        }
    }

    /// Whether the target is the disk of a server. The server's cache mode is not known.
    pub fn is_export(&self) -> bool {
        self.behind.as_ref().is_some_and(Backing::is_on_server)
    }

    /// Whether the target can hold writes that must become durable.
    pub fn keeps_writes(&self) -> bool {
        self.kind != "null" && !self.device.geometry().read_only
    }

    /// Makes all writes durable, and closes a virtual disk cleanly. Dropping the target also closes
    /// it, but cannot report a failure.
    ///
    /// # Errors
    /// [`LoadError::Close`], for a virtual disk also while one of its queues is open;
    /// [`LoadError::Queue`] when a flush fails.
    pub fn close(&self) -> Result<()> {
        if let Some(closes) = &self.closes {
            return closes.close().map_err(LoadError::Close);
        }
        if !self.keeps_writes() {
            return Ok(());
        }
        let flushed = Blocking::open(&*self.device, EngineKind::Auto).and_then(|mut queue| queue.flush());
        flushed.map_err(|source| LoadError::Queue {
            target: self.name.clone(),
            doing: "flush its writes".into(),
            source,
        })
    }

    /// The facts about the target that a result records.
    pub fn record(&self) -> TargetRecord {
        let geometry = self.device.geometry();
        TargetRecord {
            name: self.name.clone(),
            kind: self.kind.clone(),
            size_bytes: geometry.size_bytes,
            logical_sector_bytes: geometry.logical_sector_bytes,
            cache: self.cache,
            path: self.path.clone(),
            place: self.path.as_deref().map(Place::detect),
            behind: self.behind.clone(),
            contents: self.contents,
        }
    }
}
