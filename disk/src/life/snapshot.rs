//! Snapshots of a disk that no process has open: freeze, go back, delete. `live_snapshot.rs`
//! freezes a disk in use, by the same names in the same order.
//!
//! ```text
//!   before                   snapshot "monday"              revert
//!   vm.vhdx (all data)       vm.vhdx         (new, empty)   vm.vhdx         (new, empty)
//!                               │ parent                       │ parent
//!                            vm_monday.avhdx (all data)     vm_monday.avhdx
//!                                                              └─ vm_DATE.avhdx (former vm.vhdx)
//! ```
//!
//! The name of the disk always leads to the image that is written, so a machine's configuration
//! stays as it is. A frozen image gets a name of its own, and names no longer change after that:
//! children find their parents.
//!
//! Both operations put a new, empty child in the place of the disk's file:
//!
//! 1. The disk is locked for writing, so no other program has it open. Its log is replayed.
//! 2. The child is created under a temporary name, complete and durable.
//! 3. The present image gets its second name (a hard link), and the folder is synced.
//! 4. The child is renamed over the disk's name. This is the moment at which the disk changes. The
//!    folder is synced.
//!
//! A power cut before step 4 leaves the old disk, with a temporary file and a second name beside
//! it, which the next of these operations removes. After step 4 the new disk is there. The
//! temporary name also keeps two of these operations apart: only one of them can create it.

use crate::{
    ChainScope, DiskError, OpenOptions, Progress, Result,
    copying::{create, partial::temporary_name},
    engine::track::resume,
    engine::{
        chain::{CHAIN_MAX, Layer, too_long},
        device::Disk,
    },
    error::file_error,
    life::{
        kept_name,
        merge::{KeptName, MergeOptions, Merged, merge},
        removal::{self, Removal},
    },
    opening::{
        gate,
        image_file::{Access, open_image, refuse_replaced},
        merge_mark, siblings,
    },
};
use diskwright_image::{Identities, ImageInfo, ParentLink, probe};
use diskwright_store::Files;
use std::{
    ffi::OsStr,
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

/// The longest name of a file, in bytes, on the usual file systems.
const NAME_MAX_BYTES: usize = 255;

/// How a frozen image is named, and how the disk is opened for that.
#[derive(Debug, Clone, Default)]
pub struct SnapshotOptions {
    /// What is appended to the disk's name: `monday` makes `vm_monday.avhdx` of `vm.vhdx`.
    pub name: String,
    /// How the disk is opened: its format, which parents are allowed. `writable` and `reach` are
    /// ignored.
    pub open: OpenOptions,
    /// Checks everything and changes nothing.
    pub dry_run: bool,
    /// Starts a point of change tracking of this name at the moment of the snapshot. Ignored by a
    /// revert and when a snapshot is removed.
    pub track: Option<String>,
    /// Removes also an image that no image has as its parent: its data is lost. Only of a removal.
    pub discard: bool,
}

/// A disk that goes on in a new child.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// The file that is the disk, as it was named: the new, empty child.
    pub disk: PathBuf,
    /// The child's parent, without symbolic links.
    pub parent: PathBuf,
    /// The new name of the image that was the disk; `None` if it was discarded.
    pub frozen: Option<PathBuf>,
    /// What did not work without harm to the disk, one sentence each.
    pub warnings: Vec<String>,
}

/// Freezes the disk at `path` and goes on in a new child. Durable on return.
///
/// # Errors
/// [`DiskError::InUse`] if another program has the disk open; [`DiskError::HasChildren`] if it is
/// frozen already; [`DiskError::Exists`] if the name is taken; [`DiskError::BadOptions`] for a disk
/// that cannot have children (raw), a bad name, or a file system without hard links. Nothing has
/// changed then.
pub fn snapshot(path: impl AsRef<Path>, options: &SnapshotOptions) -> Result<Snapshot> {
    let path = path.as_ref();
    let files = &options.open.files;
    let real = files.canonical(path).map_err(|source| file_error("find it", path, source))?;
    if options.track.is_some() || resume::are_beside(files, &real) {
        return of_tracked(path, &real, options);
    }
    let place = LockedTop::open(path, options)?;
    let frozen = place.name_for_frozen(&options.name)?;
    let modified_seconds = gate::time_to_record(files, &place.real, &**place.layers[0].image.store())?;
    if place.layers.len() >= CHAIN_MAX {
        return Err(too_long(path));
    }
    let link =
        create::link_to((files, &frozen), &place.info, modified_seconds, (path, place.info.format), place.dir())?;
    if !options.dry_run {
        place.replace(&place.info, link, Some(&frozen))?;
    }
    Ok(Snapshot { disk: path.to_owned(), parent: frozen.clone(), frozen: Some(frozen), warnings: Vec::new() })
}

/// Freezes a disk with points as one that is in use: its points go on in the child.
fn of_tracked(path: &Path, real: &Path, options: &SnapshotOptions) -> Result<Snapshot> {
    let open = OpenOptions { writable: true, scope: ChainScope::Whole, ..options.open.clone() };
    let disk = Disk::open(real, &open)?;
    let done = disk.snapshot_tracked(&options.name, options.track.as_deref(), options.dry_run, &mut ())?;
    disk.close()?;
    Ok(Snapshot { disk: path.to_owned(), ..done })
}

/// What becomes of the image that a revert leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FormerImage {
    /// It is kept under the name of [`SnapshotOptions`].
    Kept,
    /// It is removed, and what was written since the snapshot is lost.
    Discarded,
}

/// Goes back: the disk at `path` becomes a new, empty child of `to`, or of its present parent.
/// Durable on return.
///
/// # Errors
/// As [`snapshot`]; [`DiskError::BadOptions`] if the disk has no parent, or `to` is the disk.
pub fn revert(
    path: impl AsRef<Path>,
    to: Option<&Path>,
    left: FormerImage,
    options: &SnapshotOptions,
) -> Result<Snapshot> {
    let path = path.as_ref();
    let place = LockedTop::open(path, options)?;
    let files = &options.open.files;
    let layers = &place.layers;
    let parent = match to {
        Some(to) => files.canonical(to).map_err(|source| file_error("find the snapshot", to, source))?,
        None => layers.get(1).map(|layer| layer.path.clone()).ok_or_else(|| DiskError::BadOptions {
            what: format!("{}: it is not a differencing disk, so it has no snapshot to go back to", path.display()),
            hint: "`snapshot` it first; what it holds then can be gone back to later".into(),
        })?,
    };
    if parent == place.real {
        return Err(DiskError::BadOptions {
            what: format!("{}: a disk cannot go back to itself", path.display()),
            hint: "name one of its snapshots".into(),
        });
    }
    let frozen = match left {
        FormerImage::Kept => Some(place.name_for_frozen(&options.name)?),
        FormerImage::Discarded => {
            removal::refuse_to_lose_snapshots(&*layers[0].image, path)?;
            None
        }
    };
    // Holds the lock of the new parent until the disk is its child.
    let (parent_layer, _held) = match layers.iter().find(|layer| layer.path == parent) {
        Some(layer) => (layer.clone(), None),
        None => {
            // Not an ancestor: the whole chain below it is opened, so that it is known to be sound.
            let open = OpenOptions { format: Some(place.info.format), ..reading(&options.open) };
            let disk = Disk::open(&parent, &open)?;
            let layers = disk.layers();
            if layers.len() >= CHAIN_MAX {
                return Err(too_long(path));
            }
            refuse_replaced(files, &parent, &parent, &**layers[0].image.store())?;
            (layers[0].clone(), Some(disk))
        }
    };
    let info = parent_layer.image.info();
    create::refuse_as_parent(&parent, info)?;
    let modified_seconds = gate::time_to_record(files, &parent, &**parent_layer.image.store())?;
    let link = create::link_to((files, &parent), info, modified_seconds, (path, place.info.format), place.dir())?;
    if !options.dry_run {
        place.replace(info, link, frozen.as_deref())?;
    }
    Ok(Snapshot { disk: path.to_owned(), parent, frozen, warnings: Vec::new() })
}

/// Removes a snapshot, or any other image. If one image has it as its parent, that child is merged
/// into it, and the result has the child's name: returns how. If none has, what only it stores is
/// lost: that needs [`SnapshotOptions::discard`]. Such an image is the newest state of a disk, or
/// that of a branch. Durable on return.
///
/// # Errors
/// [`DiskError::BadOptions`] for several children, for none without `discard`, or if the folder has
/// too many images to rule out a child; [`DiskError::InUse`] if a program has it open; as
/// [`merge`](crate::merge()).
pub fn remove_snapshot(
    path: impl AsRef<Path>,
    options: &SnapshotOptions,
    progress: &mut Progress<'_>,
) -> Result<Option<Merged>> {
    let path = path.as_ref();
    let files = &options.open.files;
    let real = match files.canonical(path) {
        Ok(real) => real,
        // The same command, after a power cut.
        Err(error) if error.kind() == io::ErrorKind::NotFound && was_removed(files, path, options.dry_run)? => {
            return Ok(None);
        }
        Err(source) => return Err(file_error("find it", path, source)),
    };
    if let (false, Some(dir)) = (options.dry_run, real.parent()) {
        removal::finish(files, dir)?;
    }
    // With the lock of a writer, so that no program reads it. Its own parents need not be there.
    let access = Access { writable: true, ..Access::of_top(&options.open) };
    let (image, locked) = open_image(files, &real, &access, &mut Vec::new())?;
    let found = siblings::children_of(files, &real, image.info());
    let merged = interrupted_merge(&found.children, &options.open);
    match merged.as_ref().map_or(&found.children[..], std::slice::from_ref) {
        [] => {
            refuse_if_parent(files, path, &real, image.info())?;
            if !options.discard {
                return Err(DiskError::BadOptions {
                    what: format!(
                        "{}: no image has it as its parent, so it is the newest state of a disk or of a branch, and what only it stores would be lost",
                        path.display()
                    ),
                    hint: "name a snapshot that an image has as its parent, or remove this one with its data by `SnapshotOptions::discard`".into(),
                });
            }
        }
        [child] => {
            // The merge takes the locks itself.
            drop((image, locked));
            let merging = MergeOptions {
                into: Some(real),
                keep: KeptName::Childs,
                open: options.open.clone(),
                dry_run: options.dry_run,
                ..MergeOptions::default()
            };
            return merge(child, &merging, progress).map(Some);
        }
        [first, second, ..] => {
            return Err(DiskError::BadOptions {
                what: format!(
                    "{}: {} images have it as their parent, such as {} and {}",
                    path.display(),
                    found.children.len(),
                    first.display(),
                    second.display()
                ),
                hint: "only an image with one child can be merged with it; remove the other children first".into(),
            });
        }
    }
    if !options.dry_run {
        removal::remove(files, &real, removal::extents_of(image.info(), &locked, &real)?)?;
    }
    Ok(None)
}

/// The child whose merge was interrupted when all of its data was in the parent. Its children may
/// have got their link to the parent already, which then has several.
fn interrupted_merge(children: &[PathBuf], open: &OpenOptions) -> Option<PathBuf> {
    let is_merged = |child: &&PathBuf| {
        let access = Access { format: probe::format_of_extension(child), ..Access::of_top(open) };
        let opened = open_image(&open.files, child, &Access { writable: false, ..access }, &mut Vec::new());
        opened.is_ok_and(|(image, _)| {
            image.info().parent.as_ref().is_some_and(|link| merge_mark::is_merged(image.info(), link))
        })
    };
    (children.len() > 1).then(|| children.iter().find(is_merged).cloned()).flatten()
}

/// Whether a removal of the image at `path` was cut off; it is finished.
fn was_removed(files: &Files, path: &Path, dry_run: bool) -> Result<bool> {
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let (Ok(dir), Some(name), false) = (files.canonical(dir), path.file_name(), dry_run) else { return Ok(false) };
    removal::finish_of(files, &dir.join(name))
}

fn refuse_if_parent(files: &Files, path: &Path, real: &Path, info: &ImageInfo) -> Result<()> {
    let found = siblings::children_of(files, real, info);
    if let Some(child) = found.children.into_iter().next() {
        return Err(DiskError::HasChildren { path: path.to_owned(), child });
    }
    if found.not_asked > 0 {
        return Err(siblings::cannot_rule_out_children(path, found.not_asked));
    }
    Ok(())
}

fn reading(open: &OpenOptions) -> OpenOptions {
    OpenOptions { writable: false, scope: ChainScope::Whole, ..open.clone() }
}

/// A disk that is locked, and the folder in which its file is replaced.
pub(crate) struct LockedTop<'a> {
    /// The path that the user gave.
    pub(crate) shown: &'a Path,
    /// The same file without symbolic links.
    pub(crate) real: PathBuf,
    /// The locks of the images are held until these are dropped. The disk is closed, unless it gets
    /// its snapshot while it is in use.
    pub(crate) layers: Arc<[Layer]>,
    pub(crate) info: ImageInfo,
    pub(crate) files: &'a Files,
}

impl<'a> LockedTop<'a> {
    fn open(shown: &'a Path, options: &'a SnapshotOptions) -> Result<Self> {
        let files = &options.open.files;
        let real = files.canonical(shown).map_err(|source| file_error("find it", shown, source))?;
        let open = OpenOptions { writable: true, scope: ChainScope::Whole, ..options.open.clone() };
        let disk = Disk::open(&real, &open)?;
        let layers = disk.layers();
        let place = Self { shown, real, info: layers[0].image.info().clone(), layers, files };
        place.can_be_frozen()?;
        // Leaves an empty log, and nothing to be written later.
        disk.close()?;
        Ok(place)
    }

    /// Whether the disk can become a parent, and is none yet.
    pub(crate) fn can_be_frozen(&self) -> Result<()> {
        // A child that records no identity names its parent by its path only.
        let driver = self.info.format.driver();
        if !driver.has_blocks || self.info.linkage_id.is_none() && driver.identities != Identities::None {
            return Err(DiskError::BadOptions {
                what: format!(
                    "{}: a {} disk has no identity that a child could record, so it cannot be frozen",
                    self.shown.display(),
                    self.info.format
                ),
                hint: "convert it to VHDX first".into(),
            });
        }
        create::refuse_as_parent(self.shown, &self.info)?;
        refuse_if_parent(self.files, self.shown, &self.real, &self.info)
    }

    pub(crate) fn dir(&self) -> &Path {
        self.real.parent().unwrap_or(Path::new("/"))
    }

    /// `vm_monday.avhdx` for `vm.vhdx`. A file of that name must not exist, unless it is a second
    /// name of the disk that an interrupted operation has left ([`LockedTop::remove_leftovers`]).
    pub(crate) fn name_for_frozen(&self, name: &str) -> Result<PathBuf> {
        let stem = self.real.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let extension = self.info.format.driver().frozen_extension;
        let file_name = format!("{stem}_{name}.{extension}");
        let is_good = !name.is_empty() && !name.contains(['/', '\\', '\0']) && file_name.len() <= NAME_MAX_BYTES;
        if !is_good {
            return Err(DiskError::Usage {
                what: format!("\"{name}\" cannot be the name of a snapshot of {}", self.shown.display()),
                hint: format!(
                    "use a name without slashes and backslashes, so short that {file_name:?} has at most {NAME_MAX_BYTES} bytes"
                ),
            });
        }
        let path = self.dir().join(file_name);
        if self.files.facts(&path).is_ok() && !self.is_leftover(&path) {
            return Err(DiskError::Exists { path });
        }
        Ok(path)
    }

    /// The name of the child while it is made. Fixed, so that only one child is made at a time.
    pub(crate) fn temporary(&self) -> PathBuf {
        let name = self.real.file_name().unwrap_or(OsStr::new("disk"));
        self.dir().join(temporary_name(name, ".", ".new-child"))
    }

    /// Whether `path` is a second name of the disk, left by an operation that was cut off before
    /// the child got the disk's name. A hard link without that child is the user's.
    fn is_leftover(&self, path: &Path) -> bool {
        let identity = |path: &Path| self.files.facts(path).ok().map(|facts| facts.identity);
        identity(&self.temporary()).is_some() && identity(path) == identity(&self.real)
    }

    fn failed(&self, doing: &'static str) -> impl FnOnce(io::Error) -> DiskError {
        let path = self.shown.to_owned();
        move |source| DiskError::File { doing, path, source }
    }

    /// Puts a child of `parent` in the place of the disk, which gets the name `frozen`.
    fn replace(&self, parent: &ImageInfo, link: ParentLink, frozen: Option<&Path>) -> Result<()> {
        self.check_identity()?;
        self.remove_leftovers()?;
        kept_name::unmark(self.files, &self.real)?;
        let left = match frozen {
            Some(_) => Vec::new(),
            None => removal::extents_of_layer(&*self.layers[0].image, &self.real)?,
        };
        let temporary = self.temporary();
        create::create_child(self.files, self.shown, &temporary, parent, link)?;
        let result =
            Removal::begin(self.files, &self.real, left).and_then(|removal| match self.swap(&temporary, frozen) {
                Ok(()) => removal.end(),
                Err(error) => {
                    removal.give_up();
                    Err(error)
                }
            });
        if result.is_err() {
            self.withdraw(&temporary, frozen);
        }
        result
    }

    /// Removes the new child after an error; the first error is returned. A second name of the
    /// disk goes durably before the child does, which says whose it is. What cannot be removed is
    /// left to the next command.
    pub(crate) fn withdraw(&self, temporary: &Path, frozen: Option<&Path>) {
        let is_alone = |frozen: &Path| !self.is_leftover(frozen) && self.files.sync_directory_of(temporary).is_ok();
        if frozen.is_none_or(is_alone) {
            let _ = self.files.remove(temporary);
        }
    }

    /// Whether the disk's name still leads to the file that is locked. Another of these operations
    /// may have replaced it between its open and its lock.
    pub(crate) fn check_identity(&self) -> Result<()> {
        refuse_replaced(self.files, self.shown, &self.real, &**self.layers[0].image.store())
    }

    pub(crate) fn swap(&self, temporary: &Path, frozen: Option<&Path>) -> Result<()> {
        self.check_identity()?;
        if let Some(frozen) = frozen {
            self.files.link(&self.real, frozen).map_err(|source| match source.kind() {
                io::ErrorKind::AlreadyExists => DiskError::Exists { path: frozen.to_owned() },
                io::ErrorKind::Unsupported => DiskError::BadOptions {
                    what: format!(
                        "{}: its file system has no hard links, which a snapshot needs to give the frozen image its name",
                        self.shown.display()
                    ),
                    hint: "move the disk to another file system, such as ext4, XFS, btrfs or NTFS".into(),
                },
                _ => file_error("give the frozen image its name", frozen, source),
            })?;
        }
        let swapped = self
            .files
            .sync_directory_of(&self.real)
            .map_err(self.failed("make the name of the frozen image durable"))
            .and_then(|()| {
                let put = self.files.rename(temporary, &self.real, true);
                put.map_err(self.failed("put the new child in the place of the disk"))
            });
        if let (Err(_), Some(frozen)) = (&swapped, frozen) {
            // The disk still has its own name.
            let _ = self.files.remove(frozen);
        }
        swapped?;
        self.files.sync_directory_of(&self.real).map_err(self.failed("make the new child's place durable"))
    }

    /// Removes what an operation has left that was cut off: its temporary file, and the second
    /// names of the disk's own file. No data is lost: the file keeps the disk's name.
    pub(crate) fn remove_leftovers(&self) -> Result<()> {
        removal::finish(self.files, self.dir())?;
        let temporary = self.temporary();
        if self.files.facts(&temporary).is_err() {
            return Ok(());
        }
        let prefix = format!("{}_", self.real.file_stem().unwrap_or_default().to_string_lossy());
        let listed = self.files.list(self.dir()).map_err(self.failed("list its folder"))?;
        for other in listed {
            let named_so = other.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&prefix));
            if named_so && self.is_leftover(&other) {
                self.files.remove(&other).map_err(|source| file_error("remove a leftover", &other, source))?;
            }
        }
        // Without the temporary file, a second name would be taken for one that the user has made.
        self.files.sync_directory_of(&temporary).map_err(self.failed("make the removal of leftovers durable"))?;
        self.files.remove(&temporary).map_err(|source| file_error("remove a leftover", &temporary, source))?;
        self.files.sync_directory_of(&temporary).map_err(self.failed("make the removal of leftovers durable"))
    }
}
