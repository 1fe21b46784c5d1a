//! What is attached on this machine: one folder for each disk, with one JSON file, kept by the
//! process that watches over it.
//!
//! ```text
//!   /run/diskwright (root), $XDG_RUNTIME_DIR/diskwright (users); see `run_dir`
//!     lock                       held while a folder is claimed or cleared
//!     fe01-1a2b3c/               device and inode number of the image: a file is attached once
//!       record.json              below
//!       control                  the socket of the supervisor
//!       disk                     where the FUSE file is, under a loop device (not for ublk)
//!       log                      what supervisor and server have to say
//! ```
//!
//! A folder belongs to the supervisor whose process the record names. When that process is gone,
//! whoever looks next clears what is left. The record is replaced as a whole (written beside, then
//! renamed), so a reader sees the old one or the new one.
//!
//! A folder is made and removed under the lock only ([`Held`]): it goes name by name, and whoever
//! claimed it meanwhile for the same disk would be left with a part. Who acts on a record of
//! somebody else reads it under the lock.

use crate::attach::{
    error::AttachError,
    process::Process,
    run_dir::{self, Kept, RunDir},
};
use rustix::fs::{FlockOperation, Mode, OFlags};
use serde::{Deserialize, Serialize};
use std::{
    fs,
    io::{self, Write},
    os::{
        fd::OwnedFd,
        unix::fs::{FileTypeExt, MetadataExt},
    },
    path::{Path, PathBuf},
};

const SCHEMA: &str = "diskwright.attachment/1";

/// A partition of an attached disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartitionRecord {
    /// As the kernel counts.
    pub number: u32,
    /// First byte on the disk.
    pub start: u64,
    /// Length in bytes.
    pub length: u64,
    /// Its node, if it has one.
    pub device: Option<PathBuf>,
    /// What is in it.
    pub content: Option<String>,
}

/// By what a disk is shown.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ShownBy {
    /// A ublk device.
    Ublk,
    /// A loop device over a FUSE file.
    #[default]
    Loop,
    /// A FUSE file, and no block device.
    Fuse,
}

/// A mount that was made by attaching.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountRecord {
    /// Where.
    pub directory: PathBuf,
    /// What is mounted.
    pub device: PathBuf,
    /// As the kernel calls it.
    pub file_system: String,
}

/// An attached disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// [`SCHEMA`].
    pub schema: String,
    /// The image, whole path.
    pub file: PathBuf,
    /// The process that watches over it.
    pub supervisor: Process,
    /// The process that serves it, once it runs.
    pub server: Option<Process>,
    /// Nobody can write.
    pub read_only: bool,
    /// Writes are dropped when it is detached.
    pub ephemeral: bool,
    /// Size of the disk in bytes.
    pub size: u64,
    /// Logical sector in bytes.
    pub sector_size: u32,
    /// By what it is shown.
    #[serde(default)]
    pub by: ShownBy,
    /// The mark of its ublk device.
    #[serde(default)]
    pub ublk_mark: Option<u64>,
    /// The FUSE mount point; empty for a ublk device.
    pub fuse_mount: PathBuf,
    /// The disk as a file; empty for a ublk device.
    pub fuse_file: PathBuf,
    /// The FUSE mount is unmounted, but its server has not ended: somebody elsewhere holds it. What
    /// is mounted there now is another's.
    #[serde(default)]
    pub out_of_sight: bool,
    /// The disk as a block device.
    pub device: Option<PathBuf>,
    /// Further loop devices, for partitions without a node.
    pub more_devices: Vec<PathBuf>,
    /// What the disk holds, where it has no partitions.
    pub content: Option<String>,
    /// Its partitions.
    pub partitions: Vec<PartitionRecord>,
    /// Its mounts, by attaching.
    pub mounts: Vec<MountRecord>,
    /// Seconds since 1970.
    pub attached_at: u64,
    /// Why it is attached no longer, if it ended by itself.
    pub lost: Option<String>,
}

impl Record {
    /// Of a disk of which nothing is known yet but its file.
    pub fn new(file: PathBuf, attached_at: u64) -> Self {
        Self {
            schema: SCHEMA.into(),
            file,
            supervisor: Process::this(),
            server: None,
            read_only: false,
            ephemeral: false,
            size: 0,
            sector_size: 0,
            by: ShownBy::Loop,
            ublk_mark: None,
            fuse_mount: PathBuf::new(),
            fuse_file: PathBuf::new(),
            out_of_sight: false,
            device: None,
            more_devices: Vec::new(),
            content: None,
            partitions: Vec::new(),
            mounts: Vec::new(),
            attached_at,
            lost: None,
        }
    }

    /// The name by which a user reaches it: the device, else the file.
    pub fn place(&self) -> &Path {
        self.device.as_deref().unwrap_or(&self.fuse_file)
    }

    /// What shows the whole disk, whether that is a device or a file: for devices of parts of it.
    pub fn backing(&self) -> &Path {
        match self.by {
            ShownBy::Ublk => self.place(),
            ShownBy::Loop | ShownBy::Fuse => &self.fuse_file,
        }
    }

    /// Whether the process that watches over it is there. One that has lost its server has written
    /// that down as its last act.
    pub fn is_supervised(&self) -> bool {
        self.lost.is_none() && self.supervisor.is_alive()
    }
}

/// The folder of all records.
#[derive(Debug, Clone)]
pub struct Registry {
    dir: PathBuf,
}

/// The folder of one disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Home {
    dir: PathBuf,
}

/// The lock of a registry. While it lives nobody else claims or clears a folder.
#[derive(Debug)]
pub struct Held {
    _file: OwnedFd,
}

impl Registry {
    /// The one of this user, made if need be.
    ///
    /// # Errors
    /// [`AttachError::State`].
    pub fn open() -> Result<Self, AttachError> {
        let dir = RunDir::usual();
        dir.make()?;
        Ok(Self { dir: dir.path().to_owned() })
    }

    /// The one of this user, where there is one and nobody else has a say in it: for those who only
    /// look, and make nothing.
    pub fn existing() -> Option<Self> {
        let dir = RunDir::usual();
        dir.check().ok()?;
        Some(Self { dir: dir.path().to_owned() })
    }

    /// The one in `dir`.
    ///
    /// # Errors
    /// [`AttachError::State`].
    pub fn at(dir: &Path) -> Result<Self, AttachError> {
        run_dir::make_private(dir)?;
        Ok(Self { dir: dir.to_owned() })
    }

    /// Keeps the folder of all records from being cleaned away as unused, as long as the result
    /// lives.
    pub fn keep(&self) -> Option<Kept> {
        RunDir::named(self.dir.clone()).keep()
    }

    /// Waits until nobody else claims or clears, and keeps others from it while the result lives.
    ///
    /// # Errors
    /// [`AttachError::State`].
    pub fn lock(&self) -> Result<Held, AttachError> {
        let path = self.dir.join("lock");
        let failed = |errno: rustix::io::Errno| state_error("lock", &path, errno.into());
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
        let fd = rustix::fs::open(&path, flags, Mode::RUSR | Mode::WUSR).map_err(failed)?;
        rustix::io::retry_on_intr(|| rustix::fs::flock(&fd, FlockOperation::LockExclusive)).map_err(failed)?;
        Ok(Held { _file: fd })
    }

    /// Removes the folder of a disk that is attached no longer, as [`Home::remove`]. The caller
    /// does not hold the lock.
    ///
    /// # Errors
    /// [`AttachError::State`].
    pub fn clear(&self, home: &Home) -> Result<(), AttachError> {
        // Somebody has removed everything by hand; then there is no place for the lock either.
        if !self.dir.exists() {
            return Ok(());
        }
        home.remove(&self.lock()?)
    }

    /// The folder of an image.
    ///
    /// # Errors
    /// The image cannot be looked at.
    pub fn home_of(&self, file: &Path) -> Result<Home, AttachError> {
        let found = fs::metadata(file).map_err(|source| state_error("open", file, source))?;
        let (first, second) =
            if found.file_type().is_block_device() { (found.rdev(), 0) } else { (found.dev(), found.ino()) };
        Ok(Home { dir: self.dir.join(format!("{first:x}-{second:x}")) })
    }

    /// All that is recorded.
    ///
    /// # Errors
    /// [`AttachError::State`].
    pub fn all(&self) -> Result<Vec<(Home, Record)>, AttachError> {
        let failed = |source| state_error("read", &self.dir, source);
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.dir).map_err(failed)? {
            let home = Home { dir: entry.map_err(failed)?.path() };
            if home.dir.is_dir()
                && let Some(record) = home.read()?
            {
                found.push((home, record));
            }
        }
        found.sort_by(|(_, a), (_, b)| (a.attached_at, a.place()).cmp(&(b.attached_at, b.place())));
        Ok(found)
    }

    /// The disk that a user means: by its image, its device, a partition's device, its FUSE file or
    /// mount point, or a directory that attaching has mounted.
    ///
    /// # Errors
    /// [`AttachError::NotAttached`], [`AttachError::State`].
    pub fn find(&self, target: &Path) -> Result<(Home, Record), AttachError> {
        // A path on a mount whose server is gone cannot be resolved, but it can be compared.
        let whole =
            fs::canonicalize(target).or_else(|_| std::path::absolute(target)).unwrap_or_else(|_| target.to_owned());
        let means = |record: &Record| {
            let partitions = record.partitions.iter().filter_map(|partition| partition.device.as_ref());
            let mounts = record.mounts.iter().map(|mount| &mount.directory);
            [&record.file, &record.fuse_file, &record.fuse_mount]
                .into_iter()
                .chain(&record.device)
                .chain(&record.more_devices)
                .chain(partitions)
                .chain(mounts)
                .any(|path| *path == whole)
        };
        let found = self.all()?.into_iter().filter(|(_, record)| means(record));
        // Where one was out of sight another may have taken its place.
        if let Some(found) = found.min_by_key(|(_, record)| record.out_of_sight) {
            return Ok(found);
        }
        // Another name of the same file.
        if let Ok(home) = self.home_of(&whole)
            && let Some(record) = home.read()?
        {
            return Ok((home, record));
        }
        Err(AttachError::NotAttached { target: target.to_owned() })
    }
}

impl Home {
    /// Makes the folder. The caller has seen, under the lock, that there is none in use.
    ///
    /// # Errors
    /// [`AttachError::State`].
    pub fn make(&self, _: &Held) -> Result<(), AttachError> {
        run_dir::make_private(&self.dir)
    }

    /// The mount point for the FUSE file under a loop device, made if need be.
    ///
    /// # Errors
    /// [`AttachError::State`].
    pub fn make_mount_point(&self) -> Result<PathBuf, AttachError> {
        let path = self.dir.join("disk");
        fs::File::create(&path).map_err(|source| state_error("create", &path, source))?;
        Ok(path)
    }

    /// The socket of the supervisor.
    pub fn control(&self) -> PathBuf {
        self.dir.join("control")
    }

    /// The log.
    pub fn log(&self) -> PathBuf {
        self.dir.join("log")
    }

    /// The record, if there is one.
    ///
    /// # Errors
    /// [`AttachError::State`]; also for one that is not understood.
    pub fn read(&self) -> Result<Option<Record>, AttachError> {
        let path = self.dir.join("record.json");
        match fs::read(&path) {
            Ok(text) => {
                serde_json::from_slice(&text).map(Some).map_err(|error| state_error("understand", &path, error.into()))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(state_error("read", &path, error)),
        }
    }

    /// Replaces the record.
    ///
    /// # Errors
    /// [`AttachError::State`].
    pub fn write(&self, record: &Record) -> Result<(), AttachError> {
        let path = self.dir.join("record.json");
        let beside = self.dir.join("record.json.new");
        let failed = |source| state_error("write", &path, source);
        let text = serde_json::to_vec_pretty(record).map_err(|error| failed(error.into()))?;
        let mut file = fs::File::create(&beside).map_err(failed)?;
        file.write_all(&text).map_err(failed)?;
        fs::rename(&beside, &path).map_err(failed)
    }

    /// Removes the folder and what is in it. What is still mounted in it stays.
    ///
    /// # Errors
    /// [`AttachError::State`].
    pub fn remove(&self, _: &Held) -> Result<(), AttachError> {
        // Name by name: nothing that somebody mounted or put there is walked into.
        for name in ["record.json.new", "control", "disk", "log", "record.json"] {
            let path = self.dir.join(name);
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(state_error("remove", &path, error));
                }
                _ => {}
            }
        }
        match fs::remove_dir(&self.dir) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(state_error("remove", &self.dir, error)),
            _ => Ok(()),
        }
    }
}

pub(crate) fn state_error(doing: &'static str, path: &Path, source: io::Error) -> AttachError {
    AttachError::State { doing, path: path.to_owned(), source, hint: "" }
}

#[cfg(test)]
mod tests;
