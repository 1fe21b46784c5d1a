//! What is compacted: the options, the disk with its locks, and the results.

use crate::{
    ChainScope, DiskError, OpenOptions, Result, engine::device::Disk, error::file_error, error::from_io,
    opening::siblings,
};
use diskwright_image::{DiskType, Image, ImageInfo, ImageWriter};
use diskwright_store::CacheMode;
use diskwright_volume::Volume;
use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

/// How a disk is compacted.
#[derive(Debug, Clone, Default)]
pub struct CompactOptions {
    /// How the disk is opened: its format, which parents are allowed, the engine. `writable`,
    /// `reach` and `cache` are ignored.
    pub open: OpenOptions,
    /// Only find out what would be gained. The disk is opened read-only, and nothing is changed.
    pub estimate: bool,
    /// Check everything, as for writing, and change nothing.
    pub dry_run: bool,
}

/// What a partition, or another volume, has given back.
#[derive(Debug, Clone)]
pub struct VolumeGain {
    /// The volume, with what its file system has free, or why it was left alone.
    pub volume: Volume,
    /// Bytes of the blocks that begin in it and were given back.
    pub given_back_bytes: u64,
}

/// What was done, or would be done.
#[derive(Debug, Clone, Default)]
pub struct Compacted {
    /// Virtual size of the disk in bytes.
    pub size_bytes: u64,
    /// Length of a block in bytes.
    pub block_bytes: u64,
    /// Length of the file before, in bytes.
    pub old_file_bytes: u64,
    /// Length of the file after; with `estimate` and `dry_run` as far as it can be foretold.
    pub new_file_bytes: u64,
    /// Bytes of the blocks that were given back because the file system inside has them free.
    pub free_bytes: u64,
    /// Bytes of the blocks that were given back because they read as zeros.
    pub zero_bytes: u64,
    /// Bytes of the blocks that were moved; with `estimate` and `dry_run` at least so many.
    pub moved_bytes: u64,
    /// A child of the image. Because of it only zeros were given back.
    pub child: Option<PathBuf>,
    /// The volumes on the disk. Empty if the image has a child.
    pub volumes: Vec<VolumeGain>,
    /// Warnings for the user, one sentence each.
    pub warnings: Vec<String>,
}

/// A disk that is being compacted.
pub(super) struct CompactRun<'a> {
    pub(super) path: &'a Path,
    pub(super) options: &'a CompactOptions,
    pub(super) disk: Arc<Disk>,
    /// The top image of the disk.
    pub(super) image: Arc<dyn Image>,
    pub(super) info: ImageInfo,
    pub(super) child: Option<PathBuf>,
}

impl<'a> CompactRun<'a> {
    pub(super) fn open(path: &'a Path, options: &'a CompactOptions) -> Result<Self> {
        let open = OpenOptions {
            writable: !options.estimate,
            scope: ChainScope::Whole,
            cache: CacheMode::Direct,
            allow_parent_write: true,
            ..options.open.clone()
        };
        let disk = Disk::open(path, &open)?;
        let image = Arc::clone(&disk.layers()[0].image);
        let info = image.info().clone();
        refuse_fixed(path, &info)?;
        let real = options.open.files.canonical(path).map_err(|source| file_error("find it", path, source))?;
        let siblings = siblings::children_of(&options.open.files, &real, &info);
        if siblings.not_asked > 0 {
            return Err(siblings::cannot_rule_out_children(path, siblings.not_asked));
        }
        let child = siblings.children.into_iter().next();
        if let Some(child) = child.as_ref().filter(|_| info.format.driver().child_records_time) {
            return Err(DiskError::BadOptions {
                what: format!(
                    "{}: {} is its child and has recorded when this file was last changed, so it would no longer fit",
                    path.display(),
                    child.display()
                ),
                hint: "merge or convert the child first".into(),
            });
        }
        Ok(Self { path, options, disk, image, info, child })
    }

    pub(super) fn file_bytes(&self) -> Result<u64> {
        self.disk.layers()[0].files_len_bytes().map_err(self.failed("examine it"))
    }

    pub(super) fn failed(&self, doing: &'static str) -> impl Fn(io::Error) -> DiskError + use<> {
        let path = self.path.to_owned();
        move |error| from_io(doing, &path, error)
    }

    /// The image's interface for writes.
    pub(super) fn writer(&self) -> Result<&dyn ImageWriter> {
        let read_only = || (self.failed("write to it"))(io::ErrorKind::ReadOnlyFilesystem.into());
        self.image.writer().ok_or_else(read_only)
    }

    /// Whether a block without space reads as zeros.
    pub(super) fn records_zeros(&self) -> bool {
        records_zeros(&self.info)
    }
}

/// Refuses an image whose blocks keep their space.
pub(super) fn refuse_fixed(path: &Path, info: &ImageInfo) -> Result<()> {
    if info.disk_type != DiskType::Fixed {
        return Ok(());
    }
    Err(DiskError::BadOptions {
        what: format!(
            "{}: it is a fixed disk, which keeps the space of all its blocks, so there is nothing to compact",
            path.display()
        ),
        hint: "convert it to a dynamic disk, and compact that".into(),
    })
}

/// Whether a block without space reads as zeros.
pub(super) fn records_zeros(info: &ImageInfo) -> bool {
    info.disk_type != DiskType::Differencing || info.format.driver().child_records_zeros
}

/// What becomes of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The block holds data that must stay.
    Keep,
    /// The file system has all of it free.
    Free,
    /// It reads as zeros, apart from what is free.
    Zero,
}
