//! Which parents may be opened, and where they are looked for.
//!
//! A child names its parent by paths, and it can lie: an image from an untrusted source may name
//! `/etc/shadow` or another customer's disk. So a parent is opened only beneath the folder of an
//! image that is already in the chain, or beneath a folder that the user allows. Symbolic links are
//! resolved before that check, and exactly the checked path is opened
//! ([`FileSystem::open_canonical`](diskwright_store::FileSystem::open_canonical)): no path of a
//! parent is resolved twice.
//!
//! Candidates are tried in the order of MS-VHDX 2.6.2.6.3 (relative, volume, absolute). A VHD has
//! its relative and absolute locators, and last its parent's bare name. A VDI names no path: its
//! parent is looked for by its id (`by_id`). Backslashes are read as
//! slashes. A Windows drive letter is ignored unless the user maps it. A candidate that is not the
//! parent does not stop the search (see `open`).

use crate::{ParentPolicy, Result, error::file_error, opening::by_id};
use diskwright_image::ParentLink;
use diskwright_store::{Files, Store};
use std::{
    path::{Path, PathBuf},
    time::{Duration, UNIX_EPOCH},
};

/// 2000-01-01 00:00 UTC, in seconds since 1970.
const VHD_EPOCH_SECONDS: u64 = 946_684_800;

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
    pub(crate) fn new(files: &'a Files, top: &Path, policy: &'a ParentPolicy) -> Result<Self> {
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

    /// Where a further file is that the image at `image` names. `image` must have no symbolic
    /// links.
    pub(crate) fn place_of(&self, image: &Path, name: &str) -> Candidate {
        let Some(path) = named_file(image, name, &self.policy.drives) else {
            return Candidate::Missing(format!(
                "{name} (a path of another system; map its drive with `ParentPolicy::drives`)"
            ));
        };
        match self.files.canonical(&path) {
            Ok(real) if self.allows(&real) => Candidate::Allowed(real),
            Ok(real) => Candidate::Outside(real),
            Err(_) => Candidate::Missing(path.display().to_string()),
        }
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
        found.extend(self.by_id(child, link));
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

impl Gate<'_> {
    /// The files that a child may mean that names its parent by ids and by no path.
    fn by_id(&self, child: &Path, link: &ParentLink) -> Vec<Candidate> {
        let Some(id) = link.file_id else { return Vec::new() };
        let own = child.parent().unwrap_or(Path::new("/"));
        let others = self.allowed.iter().map(PathBuf::as_path).filter(|dir| *dir != own);
        let dirs: Vec<&Path> = std::iter::once(own).chain(others).collect();
        let found = by_id::places(self.files, child, link, &dirs);
        if found.is_empty() {
            let dirs: Vec<_> = dirs.iter().map(|dir| dir.display().to_string()).collect();
            return vec![Candidate::Missing(format!("an image with the id {id} in {}", dirs.join(", ")))];
        }
        let candidate =
            |real: PathBuf| if self.allows(&real) { Candidate::Allowed(real) } else { Candidate::Outside(real) };
        found.into_iter().map(candidate).collect()
    }
}

/// Refuses to choose between several files that have the ids of the parent.
pub(crate) fn refuse_several(child: &Path, link: &ParentLink, candidates: &[Candidate]) -> Result<()> {
    let found: Vec<&Path> = candidates
        .iter()
        .filter_map(|candidate| match candidate {
            Candidate::Allowed(path) | Candidate::Outside(path) => Some(path.as_path()),
            Candidate::Missing(_) => None,
        })
        .collect();
    if link.file_id.is_some() && found.len() > 1 { Err(by_id::several(child, &found)) } else { Ok(()) }
}

/// The path of a further file that the image at `image` (without symbolic links) names.
fn named_file(image: &Path, name: &str, drives: &[(char, PathBuf)]) -> Option<PathBuf> {
    let dir = image.parent().unwrap_or(Path::new("/"));
    if ParentLink::is_absolute(name) { absolute_here(name, drives) } else { Some(dir.join(slashed(name))) }
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

/// Converts a Windows or Unix absolute path, or a name with a scheme, to a path of this system;
/// `None` if that is impossible.
fn absolute_here(path: &str, drives: &[(char, PathBuf)]) -> Option<PathBuf> {
    if Files::has_scheme(Path::new(path)) {
        return Some(PathBuf::from(path));
    }
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

/// The time that a child of the image at `path` records, durable: after a power cut the file must
/// not have another one. `store` is the file of the image.
pub(crate) fn time_to_record(files: &Files, path: &Path, store: &dyn Store) -> Result<Option<u32>> {
    store.sync_all().map_err(|source| file_error("make the time of its last change durable", path, source))?;
    Ok(modified_seconds(files, path))
}

/// Time of a file's last change, in seconds since 2000-01-01 00:00 UTC, as VHD records it. `None`
/// if unknown.
pub(crate) fn modified_seconds(files: &Files, path: &Path) -> Option<u32> {
    let modified = files.facts(path).ok()?.modified?;
    let since = modified.duration_since(UNIX_EPOCH + Duration::from_secs(VHD_EPOCH_SECONDS)).ok()?;
    u32::try_from(since.as_secs()).ok()
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
