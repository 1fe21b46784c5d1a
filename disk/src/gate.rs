//! Which parents may be opened, where they are looked for, and which images name an image as their
//! parent.
//!
//! A child names its parent by paths, and it can lie: an image from an untrusted source may name
//! `/etc/shadow` or another customer's disk. So a parent is opened only beneath the folder of an
//! image that is already in the chain, or beneath a folder that the user allows. Symbolic links are
//! resolved before that check, and exactly the checked path is opened
//! ([`FileSystem::open_canonical`](diskwright_store::FileSystem::open_canonical)): no path of a
//! parent is resolved twice.
//!
//! Candidates are tried in the order of MS-VHDX 2.6.2.6.3 (relative, volume, absolute). A VHD has
//! its relative and absolute locators, and last its parent's bare name. Backslashes are read as
//! slashes. A Windows drive letter is ignored unless the user maps it. A candidate that is not the
//! parent does not stop the search (see `open`).

use crate::{ParentPolicy, error::file_error};
use diskwright_image::{Format, ImageError, ImageInfo, ParentLink, probe};
use diskwright_store::{CacheMode, Files, LockMode, OpenError, OpenOptions};
use std::{
    io,
    path::{Path, PathBuf},
    time::{Duration, UNIX_EPOCH},
};

/// 2000-01-01 00:00 UTC, in seconds since 1970.
const VHD_EPOCH_SECONDS: u64 = 946_684_800;

/// Maximum number of images in a folder whose parent link is read before an image is opened for
/// writing.
pub(crate) const SIBLINGS_MAX: usize = 4096;

/// Decides which parents may be opened.
#[derive(Debug)]
pub(crate) struct Gate<'a> {
    files: &'a Files,
    policy: &'a ParentPolicy,
    allowed: Vec<PathBuf>,
}

/// A path that a child has for its parent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Candidate {
    /// An existing file that may be opened, by exactly this path, which has no symbolic links.
    Allowed(PathBuf),
    /// An existing file that must not be opened.
    Outside(PathBuf),
    /// No file exists there, or it is a path of another system: the path, for messages.
    Missing(String),
}

impl<'a> Gate<'a> {
    /// A gate for the chain whose top is `top`, a path without symbolic links.
    pub(crate) fn new(files: &'a Files, top: &Path, policy: &'a ParentPolicy) -> crate::Result<Self> {
        let mut allowed = Vec::new();
        for dir in &policy.allowed_dirs {
            let dir = files.canonical(dir).map_err(|source| file_error("find the allowed folder", dir, source))?;
            allowed.push(dir);
        }
        let mut gate = Self { files, policy, allowed };
        gate.opened(top);
        Ok(gate)
    }

    /// Records that the image at `real`, a path without symbolic links, is in the chain. Parents
    /// may lie beneath its folder from now on.
    pub(crate) fn opened(&mut self, real: &Path) {
        if let Some(dir) = real.parent()
            && !self.allowed.iter().any(|allowed| allowed == dir)
        {
            self.allowed.push(dir.to_owned());
        }
    }

    fn allows(&self, parent: &Path) -> bool {
        self.policy.allow_any || self.allowed.iter().any(|dir| parent.starts_with(dir))
    }

    /// All candidates of `link`, in the order in which they are tried, without duplicates. `child`
    /// must have no symbolic links.
    pub(crate) fn candidates(&self, child: &Path, link: &ParentLink) -> Vec<Candidate> {
        let mut found = Vec::new();
        for path in named_paths(child, link, &self.policy.drives) {
            let candidate = match self.files.canonical(&path) {
                Ok(real) if self.allows(&real) => Candidate::Allowed(real),
                Ok(real) => Candidate::Outside(real),
                Err(_) => Candidate::Missing(path.display().to_string()),
            };
            if !found.contains(&candidate) {
                found.push(candidate);
            }
        }
        for named in [&link.volume_path, &link.absolute_path].into_iter().flatten() {
            if absolute_here(named, &self.policy.drives).is_none() {
                found.push(Candidate::Missing(format!(
                    "{named} (a path of another system; map its drive with `ParentPolicy::drives`)"
                )));
            }
        }
        found
    }
}

/// The paths at which the parent may be, in the order in which they are tried. `child` must have no
/// symbolic links.
pub(crate) fn named_paths(child: &Path, link: &ParentLink, drives: &[(char, PathBuf)]) -> Vec<PathBuf> {
    let dir = child.parent().unwrap_or(Path::new("/"));
    let relative = link.relative_path.as_deref().filter(|path| !path.is_empty()).map(|path| {
        let slashed = slashed(path);
        dir.join(slashed.trim_start_matches("./"))
    });
    let absolute =
        [&link.volume_path, &link.absolute_path].into_iter().flatten().filter_map(|path| absolute_here(path, drives));
    // Only the last component: the header's name may be a whole Windows path, and `..` is refused.
    let name = link.name.as_deref().and_then(|name| {
        let bare = slashed(name).rsplit('/').next().unwrap_or_default().to_owned();
        (!bare.is_empty() && bare != "." && bare != "..").then(|| dir.join(bare))
    });
    relative.into_iter().chain(absolute).chain(name).collect()
}

fn slashed(path: &str) -> String {
    path.replace('\\', "/")
}

/// Converts a Windows or Unix absolute path to a path of this system; `None` if that is impossible.
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
    // `\\?\Volume{guid}\...` and `\\server\share` have no meaning here.
    (slashed.starts_with('/') && !slashed.starts_with("//")).then(|| PathBuf::from(slashed))
}

/// Time of a file's last change, in seconds since 2000-01-01 00:00 UTC, as VHD records it. `None`
/// if unknown.
pub(crate) fn modified_seconds(files: &Files, path: &Path) -> Option<u32> {
    let modified = files.facts(path).ok()?.modified?;
    let since = modified.duration_since(UNIX_EPOCH + Duration::from_secs(VHD_EPOCH_SECONDS)).ok()?;
    u32::try_from(since.as_secs()).ok()
}

/// Result of the search for children of an image in its folder.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Siblings {
    /// Images that name this one as their parent, by paths without symbolic links.
    pub(crate) children: Vec<PathBuf>,
    /// Number of images that were not checked: they could not be read, or the folder has more than
    /// [`SIBLINGS_MAX`].
    pub(crate) not_asked: usize,
}

/// Looks for images in the same folder that name the image at `path` as their parent, and stops at
/// `most`. Reads only parent links. Files that are not images do not count as children; files that
/// cannot be read are counted as not asked.
pub(crate) fn children_of(files: &Files, path: &Path, info: &ImageInfo, most: usize) -> Siblings {
    let Some(linkage) = info.linkage_id else { return Siblings::default() };
    let Ok(real) = files.canonical(path) else { return Siblings::default() };
    let Some(listed) = real.parent().and_then(|dir| files.list(dir).ok()) else { return Siblings::default() };
    let is_sibling = |path: &PathBuf| *path != real && probe::format_of_extension(path) == Some(info.format);
    let mut siblings: Vec<PathBuf> = listed.into_iter().filter(is_sibling).collect();
    let mut found = Siblings { not_asked: siblings.len().saturating_sub(SIBLINGS_MAX), ..Siblings::default() };
    siblings.truncate(SIBLINGS_MAX);
    for sibling in siblings {
        let link = match parent_link(files, &sibling, info.format) {
            Ok(Some(link)) => link,
            Ok(None) => continue,
            Err(Unread) => {
                found.not_asked += 1;
                continue;
            }
        };
        if link.linkage != linkage && link.linkage2 != Some(linkage) {
            continue;
        }
        // The real parent may be a copy of this image elsewhere. So the paths decide, if they lead
        // to a file.
        let named: Vec<PathBuf> =
            named_paths(&sibling, &link, &[]).into_iter().filter_map(|path| files.canonical(&path).ok()).collect();
        if named.is_empty() || named.contains(&real) {
            found.children.push(sibling);
            if found.children.len() == most {
                break;
            }
        }
    }
    found
}

/// The refusal to change an image of which [`Siblings::not_asked`] others may be children.
pub(crate) fn cannot_rule_out_children(path: &Path, not_asked: usize) -> crate::DiskError {
    crate::DiskError::BadOptions {
        what: format!(
            "{}: {not_asked} images in its folder could not be checked for children of this image",
            path.display()
        ),
        hint: "make them readable, or move the images that belong together into a folder of their own".into(),
    }
}

/// A file could not be read, so what it names is not known.
pub(crate) struct Unread;

/// The parent that an image names. Read without a lock, as another program may be writing to the
/// image. While that program changes the link, this is the old one or the new one.
pub(crate) fn parent_link(files: &Files, path: &Path, format: Format) -> Result<Option<ParentLink>, Unread> {
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
        let found = named_paths(
            Path::new("/d/child.vhd"),
            &link(Some(r".\sub\p.vhd"), Some("/e/p.vhd"), Some(r"C:\x\p.vhd")),
            &[],
        );
        assert_eq!(found, [PathBuf::from("/d/sub/p.vhd"), "/e/p.vhd".into(), "/d/p.vhd".into()]);
    }

    #[test]
    fn drive_letters_are_ignored_unless_mapped() {
        assert_eq!(absolute_here(r"C:\a\b.vhd", &[]), None);
        assert_eq!(absolute_here(r"C:\a\b.vhd", &[('c', "/mnt/c".into())]), Some(PathBuf::from("/mnt/c/a/b.vhd")));
        assert_eq!(absolute_here(r"\\?\C:\a\b.vhd", &[('c', "/mnt/c".into())]), Some(PathBuf::from("/mnt/c/a/b.vhd")));
        assert_eq!(absolute_here(r"\\?\C:\a\b.vhd", &[]), None);
        assert_eq!(absolute_here(r"\\?\Volume{1}\b.vhd", &[]), None);
    }

    #[test]
    fn a_name_cannot_leave_the_folder() {
        assert_eq!(named_paths(Path::new("/d/c.vhd"), &link(None, None, Some("..")), &[]), Vec::<PathBuf>::new());
    }

    #[test]
    fn parents_outside_the_folder_differ_from_missing_ones() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        std::fs::create_dir(root.join("inside")).unwrap();
        let child = root.join("inside/c.vhd");
        let parent = root.join("p.vhd");
        std::fs::write(&parent, b"").unwrap();
        let (files, policy) = (Files::default(), ParentPolicy::default());
        let gate = Gate::new(&files, &child, &policy).unwrap();
        let twice = link(Some(r"..\p.vhd"), parent.to_str(), None);
        assert_eq!(gate.candidates(&child, &twice), [Candidate::Outside(parent.clone())]);
        let missing = gate.candidates(&child, &link(Some(r".\q.vhd"), Some(r"X:\q.vhd"), None));
        assert!(
            matches!(&missing[..], [Candidate::Missing(_), Candidate::Missing(drive)] if drive.contains("`ParentPolicy::drives`"))
        );
        let policy = ParentPolicy { allowed_dirs: vec![dir.path().to_owned()], ..ParentPolicy::default() };
        let gate = Gate::new(&files, &child, &policy).unwrap();
        assert_eq!(gate.candidates(&child, &twice), [Candidate::Allowed(parent)]);
    }
}
