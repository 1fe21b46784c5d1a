//! Records of the disks that are attached on this machine: one folder for each disk, with a JSON
//! file that the disk's supervisor writes.
//!
//! ```text
//!   /run/diskwright (root), $XDG_RUNTIME_DIR/diskwright (users); see `run_dir`
//!     lock                       held while a folder is made or removed
//!     fe01-1a2b3c/               device and inode number of the image: attached only once
//!       record.json              `Record`
//!       control                  the supervisor's socket
//!       risk                     whether the death of a ublk device's server would cost data
//!       disk                     mount point of the FUSE file under a loop device (not for ublk)
//!       log                      log of supervisor and server
//! ```
//!
//! A folder belongs to the supervisor that its record names. When that process is gone, the next
//! command clears up. The record is replaced atomically (written to a new file, then renamed), so a
//! reader sees the old or the new one.
//!
//! A folder is made and removed only under the lock ([`RegistryLock`]). It is removed file by file,
//! so without the lock, a new attachment of the same disk could lose some of its files. A process
//! that acts on another supervisor's record must read it under the lock.

use crate::attach::{
    error::{AttachError, state_error},
    process::Process,
    run_dir::{self, CleanupLock, RunDir},
};
use diskwright_store::Files;
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
use uuid::Uuid;

const SCHEMA: &str = "diskwright.attachment/1";

/// A partition of an attached disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct PartitionRecord {
    /// The kernel's partition number.
    pub number: u32,
    /// First byte on the disk.
    pub start: u64,
    /// Length in bytes.
    pub length: u64,
    /// Its device node, if there is one.
    pub device: Option<PathBuf>,
    /// Its content, as `blkid` calls it.
    pub content: Option<String>,
}

/// How a disk is made available.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum AttachMethod {
    /// A ublk device.
    Ublk,
    /// A loop device over a FUSE file.
    #[default]
    Loop,
    /// A FUSE file without a block device.
    Fuse,
}

/// A mount that attach has made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct MountRecord {
    /// The mount point.
    pub directory: PathBuf,
    /// The mounted device.
    pub device: PathBuf,
    /// The kernel's name of the file system.
    pub file_system: String,
}

/// An attached disk, as stored in `record.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct Record {
    /// The schema of this document, `diskwright.attachment/1`.
    pub schema: String,
    /// The canonical path of the image.
    pub file: PathBuf,
    /// The supervisor process.
    pub supervisor: Process,
    /// The server process, once it runs.
    pub server: Option<Process>,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Whether writes are dropped on detach.
    pub ephemeral: bool,
    /// Size of the disk in bytes.
    pub size: u64,
    /// Logical sector size in bytes.
    pub sector_size: u32,
    /// How the disk is made available.
    #[serde(default)]
    pub by: AttachMethod,
    /// Mark of its ublk device; `None` for other kinds.
    #[serde(default)]
    pub ublk_mark: Option<u64>,
    /// The FUSE mount point; empty for a ublk device.
    pub fuse_mount: PathBuf,
    /// The FUSE file; empty for a ublk device.
    pub fuse_file: PathBuf,
    /// The FUSE mount was unmounted, but its server has not ended because another process still
    /// holds the mount. A mount that is at this path now belongs to another disk or program.
    #[serde(default)]
    pub out_of_sight: bool,
    /// The block device, once it exists.
    pub device: Option<PathBuf>,
    /// Further loop devices, for partitions without a device node.
    pub more_devices: Vec<PathBuf>,
    /// Content of the whole disk, if it has no partitions.
    pub content: Option<String>,
    /// Partitions of the disk.
    pub partitions: Vec<PartitionRecord>,
    /// Mounts that attach has made.
    pub mounts: Vec<MountRecord>,
    /// Folders whose file systems are frozen now, for the moment of a snapshot.
    #[serde(default)]
    pub frozen: Vec<PathBuf>,
    /// Time of the attachment, in seconds since 1970.
    pub attached_at: u64,
    /// Why the disk is no longer attached, if its server ended unexpectedly.
    pub lost: Option<String>,
}

impl Record {
    /// A record that holds only the image and the time so far.
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
            by: AttachMethod::Loop,
            ublk_mark: None,
            fuse_mount: PathBuf::new(),
            fuse_file: PathBuf::new(),
            out_of_sight: false,
            device: None,
            more_devices: Vec::new(),
            content: None,
            partitions: Vec::new(),
            mounts: Vec::new(),
            frozen: Vec::new(),
            attached_at,
            lost: None,
        }
    }

    /// The name by which users reach the disk: the block device, else the FUSE file.
    pub fn place(&self) -> &Path {
        self.device.as_deref().unwrap_or(&self.fuse_file)
    }

    /// The device or file that shows the whole disk. Loop devices for partitions use it as their
    /// backing file.
    pub fn backing(&self) -> &Path {
        match self.by {
            AttachMethod::Ublk => self.place(),
            AttachMethod::Loop | AttachMethod::Fuse => &self.fuse_file,
        }
    }

    /// Whether a live supervisor manages the disk. A supervisor whose server has died records that
    /// in `lost` as its last act.
    pub fn is_supervised(&self) -> bool {
        self.lost.is_none() && self.supervisor.is_alive()
    }
}

/// The folder of all records of a user.
#[derive(Debug, Clone)]
pub struct Registry {
    dir: PathBuf,
}

/// The folder of one disk's record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordDir {
    dir: PathBuf,
}

/// The lock of a registry. While it is held, no other process makes or removes a folder.
#[derive(Debug)]
pub struct RegistryLock {
    _file: OwnedFd,
}

impl Registry {
    /// The registry of this user. Makes its folder if it does not exist.
    ///
    /// # Errors
    /// [`AttachError::State`].
    pub fn open() -> Result<Self, AttachError> {
        let dir = RunDir::usual();
        dir.make()?;
        Ok(Self { dir: dir.path().to_owned() })
    }

    /// The registry of this user if its folder exists and no other user can write to it. For
    /// commands that only read.
    pub fn existing() -> Option<Self> {
        let dir = RunDir::usual();
        dir.check().ok()?;
        Some(Self { dir: dir.path().to_owned() })
    }

    /// The registry in the folder `dir`.
    ///
    /// # Errors
    /// [`AttachError::State`].
    pub fn at(dir: &Path) -> Result<Self, AttachError> {
        run_dir::make_private(dir)?;
        Ok(Self { dir: dir.to_owned() })
    }

    /// Keeps the folder from being deleted by programs that clean temporary folders, until the
    /// result is dropped.
    pub fn keep(&self) -> Option<CleanupLock> {
        RunDir::named(self.dir.clone()).keep()
    }

    /// Waits for the lock. It is held until the result is dropped.
    ///
    /// # Errors
    /// [`AttachError::State`].
    pub fn lock(&self) -> Result<RegistryLock, AttachError> {
        let path = self.dir.join("lock");
        let failed = |errno: rustix::io::Errno| state_error("lock", &path, errno.into());
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
        let fd = rustix::fs::open(&path, flags, Mode::RUSR | Mode::WUSR).map_err(failed)?;
        rustix::io::retry_on_intr(|| rustix::fs::flock(&fd, FlockOperation::LockExclusive)).map_err(failed)?;
        Ok(RegistryLock { _file: fd })
    }

    /// Removes the folder of a disk that is no longer attached. Takes the lock, so the caller must
    /// not hold it.
    ///
    /// # Errors
    /// [`AttachError::State`].
    pub fn clear(&self, home: &RecordDir) -> Result<(), AttachError> {
        // If the user has removed the registry, there is no folder for the lock either.
        if !self.dir.exists() {
            return Ok(());
        }
        home.remove(&self.lock()?)
    }

    /// The folder for the record of an image.
    ///
    /// # Errors
    /// The image cannot be read.
    pub fn dir_of(&self, file: &Path) -> Result<RecordDir, AttachError> {
        if Files::has_scheme(file) {
            // It has no inode that could be looked up without opening its pool.
            let id = Uuid::new_v5(&Uuid::NAMESPACE_URL, file.as_os_str().as_encoded_bytes());
            return Ok(RecordDir { dir: self.dir.join(id.to_string()) });
        }
        let found = fs::metadata(file).map_err(|source| state_error("open", file, source))?;
        let (first, second) =
            if found.file_type().is_block_device() { (found.rdev(), 0) } else { (found.dev(), found.ino()) };
        let name = format!("{first:x}-{second:x}");
        // A disk that was moved keeps its folder, and another file may have the number of the old
        // one by now.
        let is_of_another = |record: &Record| {
            fs::metadata(&record.file).is_ok_and(|other| {
                !found.file_type().is_block_device() && (other.dev(), other.ino()) != (first, second)
            })
        };
        let mut home = RecordDir { dir: self.dir.join(&name) };
        for number in 1.. {
            match home.read()? {
                Some(record) if is_of_another(&record) => home.dir = self.dir.join(format!("{name}-{number}")),
                _ => break,
            }
        }
        Ok(home)
    }

    /// All records, oldest first.
    ///
    /// # Errors
    /// [`AttachError::State`].
    pub fn all(&self) -> Result<Vec<(RecordDir, Record)>, AttachError> {
        let failed = |source| state_error("read", &self.dir, source);
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.dir).map_err(failed)? {
            let home = RecordDir { dir: entry.map_err(failed)?.path() };
            if home.dir.is_dir()
                && let Some(record) = home.read()?
            {
                found.push((home, record));
            }
        }
        found.sort_by(|(_, a), (_, b)| (a.attached_at, a.place()).cmp(&(b.attached_at, b.place())));
        Ok(found)
    }

    /// Finds a disk by its image, its block device, a partition's device, its FUSE file or mount
    /// point, or a directory on which attach has mounted it.
    ///
    /// # Errors
    /// [`AttachError::NotAttached`], [`AttachError::State`].
    pub fn find(&self, target: &Path) -> Result<(RecordDir, Record), AttachError> {
        // A path on a mount whose server is gone cannot be resolved, but it can be compared.
        let whole = match Files::has_scheme(target) {
            true => target.to_owned(),
            false => {
                fs::canonicalize(target).or_else(|_| std::path::absolute(target)).unwrap_or_else(|_| target.to_owned())
            }
        };
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
        // A disk in `out_of_sight` may share its path with a newer one; the newer one is meant.
        if let Some(found) = found.min_by_key(|(_, record)| record.out_of_sight) {
            return Ok(found);
        }
        // Another hard link of the same image.
        if let Ok(home) = self.dir_of(&whole)
            && let Some(record) = home.read()?
        {
            return Ok((home, record));
        }
        Err(AttachError::NotAttached { target: target.to_owned() })
    }
}

impl RecordDir {
    /// Makes the folder. The caller has checked, under the lock, that the disk has no record.
    ///
    /// # Errors
    /// [`AttachError::State`].
    pub fn make(&self, _: &RegistryLock) -> Result<(), AttachError> {
        run_dir::make_private(&self.dir)
    }

    /// Makes the mount point for the FUSE file under a loop device, if it does not exist.
    ///
    /// # Errors
    /// [`AttachError::State`].
    pub fn make_mount_point(&self) -> Result<PathBuf, AttachError> {
        let path = self.dir.join("disk");
        fs::File::create(&path).map_err(|source| state_error("create", &path, source))?;
        Ok(path)
    }

    /// Path of the supervisor's socket.
    pub fn control(&self) -> PathBuf {
        self.dir.join("control")
    }

    /// The file in which the server of a ublk device says what its death would cost.
    pub fn risk(&self) -> PathBuf {
        self.dir.join("risk")
    }

    /// Path of the log.
    pub fn log(&self) -> PathBuf {
        self.dir.join("log")
    }

    /// Reads the record; `None` if there is none.
    ///
    /// # Errors
    /// [`AttachError::State`], also if the record cannot be parsed.
    pub fn read(&self) -> Result<Option<Record>, AttachError> {
        let path = self.dir.join("record.json");
        match fs::read(&path) {
            Ok(text) => {
                serde_json::from_slice(&text).map(Some).map_err(|error| state_error("parse", &path, error.into()))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(state_error("read", &path, error)),
        }
    }

    /// Replaces the record atomically.
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

    /// Removes the folder and its files. Fails if a file is still a mount point.
    ///
    /// # Errors
    /// [`AttachError::State`].
    pub fn remove(&self, _: &RegistryLock) -> Result<(), AttachError> {
        // File by file, so that a mount or a file of another program is never deleted recursively.
        for name in ["record.json.new", "control", "disk", "risk", "log", "record.json"] {
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

#[cfg(test)]
mod tests;
