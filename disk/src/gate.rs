//! Which parents may be opened, where they are looked for, and who names an image as its parent.
//!
//! A child names its parent by paths, and a child can lie: one that came by mail may name `/etc/shadow` or a disk of
//! another customer. So a parent is opened only beneath the folder of an image that is in the chain already, or beneath
//! one that the user allows. Symbolic links are resolved before that is decided.
//!
//! Candidates are tried in the order of MS-VHDX 2.6.2.6.3 (relative, volume, absolute); a VHD has its relative and absolute
//! locators, and at last its parent's bare name. Backslashes are read as slashes. A Windows drive letter means nothing
//! here unless the user maps it.

use crate::{DiskError, ParentPolicy, Result, open::file_error};
use diskwright_image::{ImageInfo, ParentLink, probe};
use diskwright_store::{CacheMode, Files, LockMode, OpenOptions};
use std::{
    path::{Path, PathBuf},
    time::{Duration, UNIX_EPOCH},
};

/// 2000-01-01 00:00 UTC after 1970.
const VHD_EPOCH_SECONDS: u64 = 946_684_800;

/// Decides which parents may be opened.
#[derive(Debug)]
pub(crate) struct Gate<'a> {
    files: &'a Files,
    policy: &'a ParentPolicy,
    allowed: Vec<PathBuf>,
}

impl<'a> Gate<'a> {
    /// A gate for the chain whose top is `top`.
    pub(crate) fn new(files: &'a Files, top: &Path, policy: &'a ParentPolicy) -> Result<Self> {
        let mut allowed = Vec::new();
        for dir in &policy.allowed_dirs {
            let dir = files.canonical(dir).map_err(|source| file_error("find the allowed folder", dir, source))?;
            allowed.push(dir);
        }
        let mut gate = Self { files, policy, allowed };
        gate.opened(top)?;
        Ok(gate)
    }

    /// An image is part of the chain now; parents may lie beneath its folder.
    pub(crate) fn opened(&mut self, image: &Path) -> Result<()> {
        let real = self.files.canonical(image).map_err(|source| file_error("find", image, source))?;
        if let Some(dir) = real.parent()
            && !self.allowed.iter().any(|allowed| allowed == dir)
        {
            self.allowed.push(dir.to_owned());
        }
        Ok(())
    }

    fn allows(&self, parent: &Path) -> bool {
        self.policy.allow_any || self.allowed.iter().any(|dir| parent.starts_with(dir))
    }

    /// The first place named by `link` where a file is and may be.
    pub(crate) fn find_parent(&self, child: &Path, link: &ParentLink) -> Result<PathBuf> {
        let mut looked_for = Vec::new();
        let mut outside = None;
        for candidate in candidates(self.files, child, link, &self.policy.drives) {
            match self.files.canonical(&candidate) {
                Ok(real) if self.allows(&real) => return Ok(real),
                Ok(real) => outside = outside.or(Some(real)),
                Err(_) => {}
            }
            let shown = candidate.display().to_string();
            if !looked_for.contains(&shown) {
                looked_for.push(shown);
            }
        }
        if let Some(parent) = outside {
            return Err(DiskError::ParentOutside { child: child.to_owned(), parent });
        }
        for named in [&link.volume_path, &link.absolute_path].into_iter().flatten() {
            if absolute_here(named, &self.policy.drives).is_none() {
                looked_for.push(format!("{named} (a path of another system; map its drive with --map-drive)"));
            }
        }
        Err(DiskError::ParentMissing { child: child.to_owned(), looked_for })
    }
}

/// The paths at which a parent may be, in the order in which they are tried.
fn candidates(files: &Files, child: &Path, link: &ParentLink, drives: &[(char, PathBuf)]) -> Vec<PathBuf> {
    let real = files.canonical(child).unwrap_or_else(|_| child.to_owned());
    let dir = real.parent().unwrap_or(Path::new("/"));
    let relative = link.relative_path.as_deref().filter(|path| !path.is_empty()).map(|path| {
        let slashed = slashed(path);
        dir.join(slashed.trim_start_matches("./"))
    });
    let absolute =
        [&link.volume_path, &link.absolute_path].into_iter().flatten().filter_map(|path| absolute_here(path, drives));
    // A bare name, and nothing that climbs: the header's name may be a whole Windows path.
    let name = link.name.as_deref().and_then(|name| {
        let bare = slashed(name).rsplit('/').next().unwrap_or_default().to_owned();
        (!bare.is_empty() && bare != "." && bare != "..").then(|| dir.join(bare))
    });
    relative.into_iter().chain(absolute).chain(name).collect()
}

fn slashed(path: &str) -> String {
    path.replace('\\', "/")
}

/// A Windows or Unix absolute path as one of this system, if it can be.
fn absolute_here(path: &str, drives: &[(char, PathBuf)]) -> Option<PathBuf> {
    // Windows writes `\\?\` before a drive letter.
    let slashed =
        slashed(path.strip_prefix(r"\\?\").filter(|rest| rest.as_bytes().get(1) == Some(&b':')).unwrap_or(path));
    let mut chars = slashed.chars();
    if let (Some(letter), Some(':')) = (chars.next(), chars.next()) {
        let rest = chars.as_str().trim_start_matches('/');
        let (_, mount) = drives.iter().find(|(drive, _)| drive.eq_ignore_ascii_case(&letter))?;
        return Some(mount.join(rest));
    }
    // `\\?\Volume{guid}\...` and `\\server\share` name nothing here.
    (slashed.starts_with('/') && !slashed.starts_with("//")).then(|| PathBuf::from(slashed))
}

/// When a file was last changed, in VHD's seconds since 2000-01-01 00:00 UTC.
pub(crate) fn modified_seconds(files: &Files, path: &Path) -> Option<u32> {
    let modified = files.facts(path).ok()?.modified?;
    let since = modified.duration_since(UNIX_EPOCH + Duration::from_secs(VHD_EPOCH_SECONDS)).ok()?;
    u32::try_from(since.as_secs()).ok()
}

/// An image in the same folder that names the image at `path` as its parent, if there is one. Files that cannot be read, or are no
/// images, are nobody's children.
pub(crate) fn child_of(files: &Files, path: &Path, info: &ImageInfo) -> Option<PathBuf> {
    let linkage = info.linkage_id?;
    let real = files.canonical(path).ok()?;
    for candidate in files.list(real.parent()?).ok()? {
        if candidate == real || probe::format_of_extension(&candidate) != Some(info.format) {
            continue;
        }
        let Some(link) = parent_link(files, &candidate) else { continue };
        if link.linkage != linkage && link.linkage2 != Some(linkage) {
            continue;
        }
        // A copy of this image elsewhere may be the real parent: the paths decide, where they lead anywhere.
        let named = candidates(files, &candidate, &link, &[]).into_iter().find_map(|path| files.canonical(&path).ok());
        if named.is_none_or(|named| named == real) {
            return Some(candidate);
        }
    }
    None
}

/// The parent that an image names, read without a lock: somebody may be writing to it, and its link does not change.
fn parent_link(files: &Files, path: &Path) -> Option<ParentLink> {
    let options = OpenOptions { writable: false, create_new: false, cache: CacheMode::PageCache, lock: LockMode::None };
    probe::open(files.open(path, &options).ok()?, None, false, 512).ok()?.info().parent.clone()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(relative: Option<&str>, absolute: Option<&str>, name: Option<&str>) -> ParentLink {
        ParentLink {
            relative_path: relative.map(Into::into),
            absolute_path: absolute.map(Into::into),
            name: name.map(Into::into),
            ..ParentLink::default()
        }
    }

    #[test]
    fn relative_comes_first_and_the_bare_name_last() {
        let found = candidates(
            &Files::default(),
            Path::new("/d/child.vhd"),
            &link(Some(r".\sub\p.vhd"), Some("/e/p.vhd"), Some(r"C:\x\p.vhd")),
            &[],
        );
        assert_eq!(found, [PathBuf::from("/d/sub/p.vhd"), "/e/p.vhd".into(), "/d/p.vhd".into()]);
    }

    #[test]
    fn drives_mean_nothing_unless_mapped() {
        assert_eq!(absolute_here(r"C:\a\b.vhd", &[]), None);
        assert_eq!(absolute_here(r"C:\a\b.vhd", &[('c', "/mnt/c".into())]), Some(PathBuf::from("/mnt/c/a/b.vhd")));
        assert_eq!(absolute_here(r"\\?\C:\a\b.vhd", &[('c', "/mnt/c".into())]), Some(PathBuf::from("/mnt/c/a/b.vhd")));
        assert_eq!(absolute_here(r"\\?\C:\a\b.vhd", &[]), None);
        assert_eq!(absolute_here(r"\\?\Volume{1}\b.vhd", &[]), None);
    }

    #[test]
    fn a_name_cannot_climb() {
        assert_eq!(
            candidates(&Files::default(), Path::new("/d/c.vhd"), &link(None, None, Some("..")), &[]),
            Vec::<PathBuf>::new()
        );
    }

    #[test]
    fn parents_outside_are_refused_and_told_apart_from_missing_ones() {
        let dir = tempfile::tempdir().unwrap();
        let inside = dir.path().join("inside");
        std::fs::create_dir(&inside).unwrap();
        let child = inside.join("c.vhd");
        std::fs::write(&child, b"").unwrap();
        std::fs::write(dir.path().join("p.vhd"), b"").unwrap();
        let (files, policy) = (Files::default(), ParentPolicy::default());
        let gate = Gate::new(&files, &child, &policy).unwrap();
        let outside = gate.find_parent(&child, &link(Some(r"..\p.vhd"), None, None));
        assert!(matches!(outside, Err(DiskError::ParentOutside { .. })), "{outside:?}");
        let missing = gate.find_parent(&child, &link(Some(r".\q.vhd"), None, None));
        assert!(matches!(missing, Err(DiskError::ParentMissing { .. })), "{missing:?}");
        let policy = ParentPolicy { allowed_dirs: vec![dir.path().to_owned()], ..ParentPolicy::default() };
        let gate = Gate::new(&files, &child, &policy).unwrap();
        assert!(gate.find_parent(&child, &link(Some(r"..\p.vhd"), None, None)).is_ok());
    }
}
