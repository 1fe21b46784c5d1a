//! Finds the parent of a child that names it by ids and by no path (VDI).
//!
//! ```text
//!   child's folder, then the other allowed folders ─▶ images of the format, by extension
//!        ─▶ ids of each, without a lock ─▶ the parent, or several
//! ```
//!
//! Only headers are read, of at most [`LISTED_MAX`] images in a folder. Whoever opens the parent
//! proves its ids again, under a lock. Of two files with both ids of the parent none is taken: only
//! one of them may have the parent's data. A file with the id of the parent's file and other
//! contents is returned if there is no better one, so that the message can name it.

use crate::DiskError;
use diskwright_image::{Format, ImageInfo, ParentLink, probe};
use diskwright_store::{CacheMode, Files, LockMode, OpenOptions};
use std::path::{Path, PathBuf};

/// The most images of a folder whose ids are read.
const LISTED_MAX: usize = 4096;

/// The images in these folders (without symbolic links) that the link may mean, by paths without
/// symbolic links. The first folder with an image that has both ids counts. Empty for a link that
/// names its parent by paths.
pub(crate) fn places(files: &Files, child: &Path, link: &ParentLink, dirs: &[&Path]) -> Vec<PathBuf> {
    let (Some(_), Some(format)) = (link.file_id, link.format) else { return Vec::new() };
    let mut others = Vec::new();
    for dir in dirs {
        let mut exact = Vec::new();
        for (path, info) in images(files, dir, format, child) {
            if !link.names(info.disk_id, info.linkage_id) {
                continue;
            }
            if link.accepts(info.linkage_id) { exact.push(path) } else { others.push(path) }
        }
        if !exact.is_empty() {
            return exact;
        }
    }
    others
}

/// The refusal to choose between files that all have the ids of the parent.
pub(crate) fn several(child: &Path, found: &[impl AsRef<Path>]) -> DiskError {
    let names: Vec<_> = found.iter().map(|path| path.as_ref().display().to_string()).collect();
    DiskError::BadChain {
        path: child.to_owned(),
        what: format!(
            "{} files have the ids of its parent: {}; move all but the right one to another folder",
            found.len(),
            names.join(", ")
        ),
    }
}

fn images(files: &Files, dir: &Path, format: Format, child: &Path) -> Vec<(PathBuf, ImageInfo)> {
    let mut listed = files.list(dir).unwrap_or_default();
    listed.retain(|path| path != child && probe::format_of_extension(path) == Some(format));
    listed.sort();
    listed.truncate(LISTED_MAX);
    let mut seen = Vec::new();
    let mut found = Vec::new();
    for path in listed {
        let Ok(real) = files.canonical(&path) else { continue };
        // Another name of one file is not another candidate.
        let identity = files.facts(&real).ok().map(|facts| facts.identity);
        if seen.contains(&identity) {
            continue;
        }
        seen.push(identity);
        let options =
            OpenOptions { writable: false, create_new: false, cache: CacheMode::PageCache, lock: LockMode::None };
        let Ok(store) = files.open_canonical(&real, false, &options) else { continue };
        if let Ok(image) = format.driver().open(store, false, 512) {
            found.push((real, image.info().clone()));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use crate::{CreateRequest, Disk, DiskError, OpenOptions, ParentPolicy, create};
    use std::path::Path;

    fn made(path: &Path, parent: Option<&Path>) {
        let size_bytes = parent.is_none().then_some(4 << 20);
        create(path, &CreateRequest { size_bytes, parent: parent.map(Into::into), ..CreateRequest::default() })
            .unwrap();
    }

    #[test]
    fn a_parent_is_found_by_its_ids_whatever_its_name_is() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        made(&path("base.vdi"), None);
        made(&path("child.vdi"), Some(&path("base.vdi")));
        made(&path("other.vdi"), None);
        std::fs::rename(path("base.vdi"), path("renamed.vdi")).unwrap();
        let layers = |options: &OpenOptions| Disk::open(path("child.vdi"), options).map(|disk| disk.layers().len());
        assert_eq!(layers(&OpenOptions::default()).unwrap(), 2);

        std::fs::copy(path("renamed.vdi"), path("copy.vdi")).unwrap();
        let error = layers(&OpenOptions::default()).unwrap_err().to_string();
        assert!(error.contains("copy.vdi, ") && error.contains("renamed.vdi"), "{error}");
        std::fs::remove_file(path("copy.vdi")).unwrap();

        std::fs::create_dir(path("elsewhere")).unwrap();
        std::fs::rename(path("renamed.vdi"), path("elsewhere/base.vdi")).unwrap();
        let error = layers(&OpenOptions::default()).unwrap_err();
        assert!(matches!(error, DiskError::ParentMissing { .. }), "{error}");
        let parents = ParentPolicy { allowed_dirs: vec![path("elsewhere")], ..ParentPolicy::default() };
        let options = OpenOptions { parents, ..OpenOptions::default() };
        assert_eq!(layers(&options).unwrap(), 2);
    }

    /// VirtualBox does not record the new contents of a parent into which it merged a snapshot.
    #[test]
    fn other_contents_of_the_parent_are_a_warning_or_a_refusal() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        made(&path("base.vdi"), None);
        made(&path("child.vdi"), Some(&path("base.vdi")));
        let writing = OpenOptions { writable: true, ..OpenOptions::default() };
        let refused = Disk::open(path("base.vdi"), &writing).map(drop).unwrap_err();
        assert!(matches!(refused, DiskError::HasChildren { .. }), "{refused}");
        Disk::open(path("child.vdi"), &writing).unwrap().close().unwrap();
        // The id of the contents.
        let mut bytes = std::fs::read(path("base.vdi")).unwrap();
        bytes[0x198..0x1a8].fill(7);
        std::fs::write(path("base.vdi"), bytes).unwrap();
        let disk = Disk::open(path("child.vdi"), &OpenOptions::default()).unwrap();
        assert!(disk.warnings().iter().any(|warning| warning.contains("base.vdi has other contents")));
        drop(disk);
        let error = Disk::open(path("child.vdi"), &writing).map(drop).unwrap_err().to_string();
        assert!(error.contains("base.vdi has other contents"), "{error}");
        let refused = Disk::open(path("base.vdi"), &writing).map(drop).unwrap_err();
        assert!(matches!(refused, DiskError::HasChildren { .. }), "still a child: {refused}");
        let parents = ParentPolicy { ignore_timestamp: true, ..ParentPolicy::default() };
        Disk::open(path("child.vdi"), &OpenOptions { parents, ..writing }).unwrap().close().unwrap();
    }
}
