//! A target of a run: a block device with what a result says of it.
//!
//! Whoever opens targets (files, virtual disks, exports) makes one of these for each; a run drives
//! any block device alike.

use crate::{
    LoadError, Result,
    behind::Behind,
    job::Caching,
    machine::Place,
    record::{ContentsRecord, TargetRecord},
};
use diskwright_store::{BlockDevice, Blocking, EngineKind};
use std::{error::Error, fmt, path::PathBuf, sync::Arc};

/// Closes what is behind a target.
pub trait Close: fmt::Debug + Send + Sync {
    /// Makes durable what was written, and closes it cleanly.
    ///
    /// # Errors
    /// What a user should read.
    fn close(&self) -> Result<(), Box<dyn Error + Send + Sync>>;
}

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
    /// How it is closed, where that takes more than a flush: a virtual disk.
    pub closes: Option<Arc<dyn Close>>,
    /// Cache mode in force, which is not the one asked for where the file system has no O_DIRECT.
    /// For an export it is the one asked for, and says of its server nothing.
    pub cache: Caching,
    /// What it shows, where it is no file of its own.
    pub behind: Option<Behind>,
    /// What was seen of its contents before the run, by those who looked.
    pub contents: Option<ContentsRecord>,
}

impl OpenTarget {
    /// A block device under a name, without a file. Its cache mode is told as O_DIRECT.
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

    /// Whether it is reached through a server, which caches as it likes.
    pub fn is_export(&self) -> bool {
        self.behind.as_ref().is_some_and(|behind| behind.export().is_some())
    }

    /// Whether something may have been written to it that is to last.
    pub fn keeps_writes(&self) -> bool {
        self.kind != "null" && !self.device.geometry().read_only
    }

    /// Makes durable what was written to it, and closes a virtual disk cleanly. Dropping it closes
    /// it as well, but can tell nobody of a failure.
    ///
    /// # Errors
    /// [`LoadError::Close`], for a disk also while one of its queues is open; [`LoadError::Queue`]
    /// when a flush fails.
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
            doing: "make durable what was written to it".into(),
            source,
        })
    }

    /// What a result says of it.
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
