//! Which images of a folder name an image as their parent: its children.
//!
//! ```text
//!   folder ─▶ images, by extension ─▶ parent link of each, without a lock ─▶ identity? ─▶ path?
//! ```
//!
//! An image is not written while another one has it as its parent. Only parent links are read.
//! Files that are not images do not count as children; files that cannot be read are counted as
//! not asked.
//!
//! A process that opens a thousand clones would read a million links. So [`children_of`] uses the
//! links of a folder again, for a quarter of a second and as long as the folder's time stamp does
//! not change: creating, renaming and removing a file change it. Its clock may be coarse, so links
//! are only kept if the folder had been at rest for a while when they were read. A link that is
//! replaced within an image leaves the folder unchanged: a child that another program relinks to an
//! image may be missed if that image is opened within that quarter of a second.
//!
//! One mutex of std guards the kept links: they outlive every scheduled run of the tests
//! ([`diskwright_store::sync`]). It is not held while links are read.

use crate::{DiskError, opening::gate::named_paths};
use diskwright_image::{Format, ImageError, ImageInfo, LinkageId, ParentLink, probe};
use diskwright_store::{CacheMode, Files, LockMode, OpenError, OpenOptions, files::FileFacts};
use std::{
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant, SystemTime},
};
use uuid::Uuid;

/// Maximum number of images in a folder, besides the image itself, whose parent link is read.
pub(crate) const SIBLINGS_MAX: usize = 4096;

/// How long links are used again.
const KEPT_FOR: Duration = Duration::from_millis(250);
/// How long a folder must have been unchanged when its links are read: much more than a tick of the
/// clock of time stamps.
const AT_REST_FOR: Duration = Duration::from_millis(100);

/// The children of an image in its folder.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Siblings {
    /// Images that name this one as their parent, by paths without symbolic links.
    pub(crate) children: Vec<PathBuf>,
    /// Number of images that were not checked: they could not be read, or the folder has more than
    /// [`SIBLINGS_MAX`].
    pub(crate) not_asked: usize,
}

/// An image that others may name as their parent.
#[derive(Debug)]
pub(crate) struct Candidate {
    /// A path without symbolic links.
    pub(crate) path: PathBuf,
    disk_id: Option<Uuid>,
    linkage_id: Option<LinkageId>,
}

impl Candidate {
    pub(crate) fn of(path: PathBuf, info: &ImageInfo) -> Self {
        Self { path, disk_id: info.disk_id, linkage_id: info.linkage_id }
    }

    /// The same image with the identity that it has by now.
    pub(crate) fn now(self, linkage_id: Option<LinkageId>) -> Self {
        Self { linkage_id, ..self }
    }
}

/// The parent links of a folder's images.
#[derive(Debug, Default)]
struct Links {
    found: Vec<(PathBuf, ParentLink)>,
    not_asked: usize,
}

/// Links that may be used again.
struct CachedLinks {
    files: Files,
    folder: FileFacts,
    format: Format,
    read_at: Instant,
    links: Arc<Links>,
}

static KEPT: Mutex<Option<CachedLinks>> = Mutex::new(None);

/// The images in the folder of the image at `path` that name it as their parent.
pub(crate) fn children_of(files: &Files, path: &Path, info: &ImageInfo) -> Siblings {
    let Ok(real) = files.canonical(path) else { return Siblings::default() };
    let Ok(links) = recent_links(files, &real, info.format) else { return Siblings::default() };
    let children = links.children_of(files, &[Candidate::of(real, info)]);
    Siblings { children: children.into_iter().map(|(child, _)| child).collect(), not_asked: links.not_asked }
}

/// The images in the folder `dir` that name one of `parents`, which have this format, each with the
/// index of that parent; and how many images could not be asked. The parents themselves do not
/// count. Reads all links again, without the cache.
///
/// # Errors
/// If the folder cannot be listed.
pub(crate) fn children_in(
    files: &Files,
    dir: &Path,
    format: Format,
    parents: &[Candidate],
) -> io::Result<(Vec<(PathBuf, usize)>, usize)> {
    let links = Links::read(files, dir, format, None)?;
    Ok((links.children_of(files, parents), links.not_asked))
}

/// The refusal to change an image of which [`Siblings::not_asked`] others may be children.
pub(crate) fn cannot_rule_out_children(path: &Path, not_asked: usize) -> DiskError {
    DiskError::BadOptions {
        what: format!(
            "{}: {not_asked} images in its folder could not be checked for children of this image",
            path.display()
        ),
        hint: "make them readable, or move the images that belong together into a folder of their own".into(),
    }
}

/// The links in the folder of the image at `real`, as they were read a moment ago if the folder has
/// not changed since.
fn recent_links(files: &Files, real: &Path, format: Format) -> io::Result<Arc<Links>> {
    let dir = real.parent().unwrap_or(Path::new("/"));
    let kept = || KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = files.facts(dir).ok().filter(|folder| folder.modified.is_some());
    let is_same = |kept: &&CachedLinks| {
        kept.files.is(files)
            && Some(&kept.folder) == folder.as_ref()
            && kept.format == format
            && kept.read_at.elapsed() < KEPT_FOR
    };
    if let Some(kept) = kept().as_ref().filter(is_same) {
        return Ok(Arc::clone(&kept.links));
    }
    let (read_at, now) = (Instant::now(), SystemTime::now());
    let is_at_rest = |folder: &FileFacts| {
        let unchanged_for = folder.modified.and_then(|modified| now.duration_since(modified).ok());
        unchanged_for.is_some_and(|time| time >= AT_REST_FOR)
    };
    let folder = folder.filter(is_at_rest);
    // Links that are used again serve other images too, so they include that of this image.
    let except = if folder.is_some() { None } else { Some(real) };
    let links = Arc::new(Links::read(files, dir, format, except)?);
    if let Some(folder) = folder {
        *kept() = Some(CachedLinks { files: files.clone(), folder, format, read_at, links: Arc::clone(&links) });
    }
    Ok(links)
}

impl Links {
    /// Reads them, but not that of the image `except`.
    fn read(files: &Files, dir: &Path, format: Format, except: Option<&Path>) -> io::Result<Self> {
        let listed = files.list(dir)?.into_iter().filter(|path| Some(&**path) != except);
        let may_be_child = |of: &Format| *of == format || of.driver().child_takes_any_parent;
        let of_path = |path: PathBuf| Some((probe::format_of_extension(&path).filter(may_be_child)?, path));
        let mut images: Vec<(Format, PathBuf)> = listed.filter_map(of_path).collect();
        // One of them is the image itself, unless it was left out.
        let most = SIBLINGS_MAX + usize::from(except.is_none());
        let mut links = Self { not_asked: images.len().saturating_sub(most), ..Self::default() };
        images.truncate(most);
        for (of, image) in images {
            match parent_link(files, &image, of) {
                Ok(Some(link)) => links.found.push((image, link)),
                Ok(None) => {}
                Err(Unread) => links.not_asked += 1,
            }
        }
        Ok(links)
    }

    fn children_of(&self, files: &Files, parents: &[Candidate]) -> Vec<(PathBuf, usize)> {
        let index =
            |(image, link): &(PathBuf, ParentLink)| Some((image.clone(), parent_among(files, (image, link), parents)?));
        self.found.iter().filter_map(index).collect()
    }
}

/// Which of `parents` is the one that the link of `image`, a path without symbolic links, leads to.
pub(crate) fn parent_among(files: &Files, (image, link): (&Path, &ParentLink), parents: &[Candidate]) -> Option<usize> {
    let is_named = |parent: &Candidate| link.names(parent.disk_id, parent.linkage_id);
    if !parents.iter().any(is_named) || parents.iter().any(|parent| parent.path == image) {
        return None;
    }
    // The real parent may be a copy of this image elsewhere. So the paths decide, if they lead to a
    // file, or if the link has no identity.
    let named: Vec<PathBuf> =
        named_paths(image, link, &[]).into_iter().filter_map(|path| files.canonical(&path).ok()).collect();
    let is_parent = |parent: &Candidate| {
        is_named(parent) && (named.contains(&parent.path) || named.is_empty() && link.linkage.is_some())
    };
    parents.iter().position(is_parent)
}

/// A file could not be read, so what it names is not known.
struct Unread;

/// The parent that an image names. Read without a lock, as another program may be writing to the
/// image. While that program changes the link, this is the old one or the new one.
fn parent_link(files: &Files, path: &Path, format: Format) -> Result<Option<ParentLink>, Unread> {
    let options = OpenOptions { writable: false, create_new: false, cache: CacheMode::PageCache, lock: LockMode::None };
    let store = match files.open_canonical(path, false, &options) {
        Ok(store) => store,
        // Removed meanwhile, or no regular file.
        Err(OpenError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(OpenError::Io { .. }) => return Err(Unread),
        Err(_) => return Ok(None),
    };
    match format.driver().parent_link(&*store) {
        Ok(link) => Ok(link),
        Err(ImageError::Io { .. }) => Err(Unread),
        // No image of this format, or a damaged one, which cannot be opened above this one either.
        Err(_) => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CreateRequest, Disk, OpenOptions, copying::create::create};

    /// Links that are kept from one open to the next never hide a child that was made meanwhile.
    #[test]
    fn a_new_child_is_found_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().join("base.vhdx");
        create(&base, &CreateRequest { size_bytes: Some(1 << 20), ..CreateRequest::default() }).unwrap();
        let writing = OpenOptions { writable: true, ..OpenOptions::default() };
        for number in 0..20 {
            std::thread::sleep(AT_REST_FOR / 20 * number);
            drop(Disk::open(&base, &writing).unwrap());
            let child = dir.path().join("child.vhdx");
            create(&child, &CreateRequest { parent: Some(base.clone()), ..CreateRequest::default() }).unwrap();
            let refused = Disk::open(&base, &writing).unwrap_err();
            assert!(matches!(refused, DiskError::HasChildren { .. }), "{refused}");
            std::fs::remove_file(child).unwrap();
        }
    }
}
