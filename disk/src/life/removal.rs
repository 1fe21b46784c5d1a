//! Removes an image: its file, and then the extents that only it uses. An image with internal
//! snapshots is not removed by an operation that keeps only its disk.
//!
//! ```text
//!   x.vmdk, x-s001.vmdk      link .x.vmdk.removed ─▶ sync       only if there are extents
//!                            x.vmdk goes, or another image is renamed over it ─▶ sync
//!                            extents go ─▶ sync
//!                            .x.vmdk.removed goes ─▶ sync
//! ```
//!
//! The file that names the extents goes first, so a power cut never leaves an image without its
//! extents. Its second name, the *mark*, keeps the list of extents until the last of them is gone.
//! A mark that a power cut has left is cleaned up by the next removal, snapshot or merge in the
//! folder ([`finish`]), and by the same command: a name of which only a mark is left counts as
//! removed.
//!
//! A mark can lie, as any image can. So a clean-up removes only files in its own folder that are
//! called `*.vmdk`, have no descriptor, and are named by no other image there; if an image of the
//! folder cannot be read, it removes nothing. Extents with other names may be left.
//!
//! Locks: the lock of the image is on its file, whatever its name, and is held until the mark is
//! gone. So a mark that is locked belongs to a removal under way.

use crate::{DiskError, Result, copying::partial::temporary_name, error::file_error};
use diskwright_image::{
    Format, Image, ImageInfo, Reference, ReferenceKind, probe, probe::DetectedFormat, vmdk::has_descriptor,
};
use diskwright_store::{CacheMode, Files, LockMode, OpenOptions, Store};
use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

const SUFFIX: &str = ".removed";
/// The most images of a folder whose extents are read for a clean-up.
const IMAGES_MAX: usize = 4096;

/// Fails for an image with internal snapshots, which would go with it.
pub(crate) fn refuse_to_lose_snapshots(image: &dyn Image, path: &Path) -> Result<()> {
    match image.snapshots() {
        [] => Ok(()),
        [first, ..] => Err(DiskError::BadOptions {
            what: format!("{}: its internal snapshots would be lost, such as {:?}", path.display(), first.name),
            hint: "copy what you need of them into new disks, and delete them with `qemu-img snapshot -d`".into(),
        }),
    }
}

/// The extents of an image that is open: the files that it writes, in its own folder. The locks of
/// the image keep other images from using them.
///
/// # Errors
/// Those of reading its descriptor. Whoever ignored them would remove the image and leave its
/// extents, which nothing names then.
pub(crate) fn extents_of(info: &ImageInfo, stores: &[Arc<dyn Store>], path: &Path) -> Result<Vec<PathBuf>> {
    let [first, further @ ..] = stores else { return Ok(Vec::new()) };
    if further.is_empty() {
        return Ok(Vec::new());
    }
    let references = probe::references(&**first, DetectedFormat::certain(info.format))?;
    // A mapping file goes with its image, and the device to which it leads stays.
    let own = references.iter().zip(further).filter(|(reference, store)| {
        let is_mapping = reference.kind == ReferenceKind::Device
            && store.name().file_name().is_some_and(|name| *name != *reference.name);
        is_own(reference) && (is_mapping || !store.is_block_device())
    });
    Ok(own.map(|(reference, _)| path.with_file_name(&reference.name)).collect())
}

/// The same for an image of a chain.
pub(crate) fn extents_of_layer(image: &dyn Image, path: &Path) -> Result<Vec<PathBuf>> {
    extents_of(image.info(), image.stores(), path)
}

fn is_own(reference: &Reference) -> bool {
    reference.is_written && !reference.name.contains(['/', '\\'])
}

/// A removal under way: the image's extents have a mark that names them.
#[derive(Debug)]
#[must_use = "the extents go with `end`"]
pub(crate) struct Removal<'a> {
    files: &'a Files,
    mark: Option<PathBuf>,
    extents: Vec<PathBuf>,
}

impl<'a> Removal<'a> {
    /// Prepares the removal of the image at `path`, whose extents are `extents`. The caller removes
    /// its name next, or renames another image over it, durably.
    ///
    /// # Errors
    /// Those of the file system. Nothing has changed then.
    pub(crate) fn begin(files: &'a Files, path: &Path, extents: Vec<PathBuf>) -> Result<Self> {
        let mark = mark_of(path);
        let failed = |source| file_error("mark its extents for removal", path, source);
        if extents.is_empty() {
            return Ok(Self { files, mark: None, extents });
        }
        finish_one(files, &mark)?;
        match files.link(path, &mark) {
            Ok(()) => files.sync_directory_of(path).map_err(failed)?,
            // A removal that was cut off before the image's name was gone.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && is_same(files, path, &mark) => {}
            // Without hard links, or beside a mark that must stay, a power cut leaves the extents.
            Err(error) if matches!(error.kind(), io::ErrorKind::Unsupported | io::ErrorKind::AlreadyExists) => {
                return Ok(Self { files, mark: None, extents });
            }
            Err(error) => return Err(failed(error)),
        }
        Ok(Self { files, mark: Some(mark), extents })
    }

    /// Removes the extents of the image, whose name is gone.
    ///
    /// # Errors
    /// The file system's, for the first extent that remains.
    pub(crate) fn end(self) -> Result<()> {
        remove_files(self.files, &self.extents)?;
        self.mark.map_or(Ok(()), |mark| remove_mark(self.files, &mark, !self.extents.is_empty()))
    }

    /// Takes the mark back, because the image keeps its name.
    pub(crate) fn give_up(self) {
        // If it fails, the mark is found later, and the image's extents stay because it names them.
        self.mark.iter().for_each(|mark| drop(self.files.remove(mark)));
    }
}

fn is_same(files: &Files, one: &Path, other: &Path) -> bool {
    let identity = |path: &Path| files.facts(path).ok().map(|facts| facts.identity);
    identity(one).is_some() && identity(one) == identity(other)
}

/// Removes the image at `path` and then its extents, durably.
pub(crate) fn remove(files: &Files, path: &Path, extents: Vec<PathBuf>) -> Result<()> {
    let removal = Removal::begin(files, path, extents)?;
    files.remove(path).map_err(|source| file_error("remove", path, source))?;
    files.sync_directory_of(path).map_err(|source| file_error("make its removal durable", path, source))?;
    removal.end()
}

fn remove_files(files: &Files, extents: &[PathBuf]) -> Result<()> {
    for extent in extents {
        match files.remove(extent) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            removed => {
                removed.map_err(|source| file_error("remove the extent of an image that is gone", extent, source))?;
            }
        }
    }
    Ok(())
}

fn remove_mark(files: &Files, mark: &Path, sync: bool) -> Result<()> {
    let failed = |source| file_error("remove the mark of a removal", mark, source);
    if sync {
        files.sync_directory_of(mark).map_err(failed)?;
    }
    match files.remove(mark) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        // A mark that a power cut brings back would keep the space of the image.
        removed => removed.and_then(|()| files.sync_directory_of(mark)).map_err(failed),
    }
}

fn mark_of(path: &Path) -> PathBuf {
    path.with_file_name(temporary_name(path.file_name().unwrap_or_default(), ".", SUFFIX))
}

/// Finishes the removals in `dir` that were cut off.
///
/// # Errors
/// Those of the file system.
pub(crate) fn finish(files: &Files, dir: &Path) -> Result<()> {
    let listed = files.list(dir).map_err(|source| file_error("list the folder", dir, source))?;
    let is_mark = |path: &&PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with('.') && name.ends_with(SUFFIX)
    };
    listed.iter().filter(is_mark).try_for_each(|mark| finish_one(files, mark).map(drop))
}

/// Whether a removal of the image at `path`, which does not exist, was cut off; it is finished.
///
/// # Errors
/// Those of the file system.
pub(crate) fn finish_of(files: &Files, path: &Path) -> Result<bool> {
    finish_one(files, &mark_of(path))
}

fn finish_one(files: &Files, mark: &Path) -> Result<bool> {
    // A mark that is locked belongs to a removal under way, and a file that is not a mark stays.
    let options =
        OpenOptions { writable: true, create_new: false, cache: CacheMode::PageCache, lock: LockMode::Exclusive };
    let Ok(store) = files.open_canonical(mark, false, &options) else { return Ok(false) };
    let Ok(references) = probe::references(&*store, DetectedFormat::certain(Format::Vmdk)) else { return Ok(false) };
    let mut extents: Vec<PathBuf> =
        references.iter().filter(|found| is_own(found)).map(|found| mark.with_file_name(&found.name)).collect();
    let dir = mark.parent().unwrap_or(Path::new("/"));
    match named_in(files, dir)? {
        Some(named) => extents.retain(|extent| !named.contains(extent)),
        None => return Ok(false),
    }
    // Nothing but files: a device in the folder is not an extent.
    let listed = files.list(dir).map_err(|source| file_error("list the folder", dir, source))?;
    extents.retain(|extent| is_vmdk(extent) && listed.contains(extent));
    remove_files(files, &extents)?;
    remove_mark(files, mark, !extents.is_empty())?;
    Ok(true)
}

fn is_vmdk(path: &Path) -> bool {
    path.extension().is_some_and(|name| name.eq_ignore_ascii_case("vmdk"))
}

/// The images of a folder and the files that they name; `None` if one of them cannot be read.
fn named_in(files: &Files, dir: &Path) -> Result<Option<Vec<PathBuf>>> {
    let listed = files.list(dir).map_err(|source| file_error("list the folder", dir, source))?;
    let images: Vec<&PathBuf> = listed.iter().filter(|path| is_vmdk(path)).collect();
    if images.len() > IMAGES_MAX {
        return Ok(None);
    }
    let mut named = Vec::new();
    for path in images {
        let options =
            OpenOptions { writable: false, create_new: false, cache: CacheMode::PageCache, lock: LockMode::None };
        let Ok(store) = files.open_canonical(path, false, &options) else { return Ok(None) };
        if has_descriptor(&*store) {
            named.push(path.clone());
        }
        match probe::references(&*store, DetectedFormat::certain(Format::Vmdk)) {
            Ok(references) => named.extend(references.iter().map(|found| path.with_file_name(&found.name))),
            // A flat extent is not an image.
            Err(diskwright_image::ImageError::NotAnImage { .. }) => {}
            Err(_) => return Ok(None),
        }
    }
    Ok(Some(named))
}
