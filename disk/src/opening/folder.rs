//! The images of a folder and their parents: the tree of its snapshots.
//!
//! ```text
//!   folder ─▶ images, by extension ─▶ info of each, without a lock ─▶ parent in the folder?
//!                                                                        └─▶ tree
//! ```
//!
//! Nothing is locked, so images in use are listed too. Every image is opened by itself, and its
//! parent is not: a folder of a thousand clones of one image costs a thousand opens. An image whose
//! parent lies in the same folder hangs below it; one whose parent is missing, elsewhere, or not
//! the image that it was, is a root of the list that says so. So is every image of a loop.

use crate::{
    OpenOptions, Result,
    error::file_error,
    opening::{
        by_id, gate,
        image_file::{Access, open_image},
        open::check_linkage,
    },
};
use diskwright_image::{DiskType, ImageInfo, probe};
use std::{
    collections::HashSet,
    path::{Path, PathBuf},
};

/// The most images of a folder that are read.
pub const FAMILY_MAX: usize = 65_536;

/// The most images of a loop that are named.
const LOOP_NAMES_MAX: usize = 8;

/// An image of a folder.
#[derive(Debug)]
pub struct FolderImage {
    /// Its path, without symbolic links.
    pub path: PathBuf,
    /// Description of the image, as of the read.
    pub info: ImageInfo,
    /// Allocated bytes of its file; `None` if the system does not say.
    pub allocated_bytes: Option<u64>,
    /// Where its parent is.
    pub parent: FoundParent,
}

/// Where an image's parent is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FoundParent {
    /// The image has no parent.
    None,
    /// In the same folder: the index of the parent in the list.
    Here(usize),
    /// The parent is in another folder.
    Elsewhere(PathBuf),
    /// No file is there: the names that the image has for it.
    Missing(Vec<String>),
    /// A file is there, but it is not the parent: why.
    Wrong(String),
}

/// The images of a folder.
#[derive(Debug, Default)]
pub struct FolderImages {
    /// The images, by their paths.
    pub members: Vec<FolderImage>,
    /// Files with the extension of an image that could not be read, each with the reason.
    pub unreadable: Vec<(PathBuf, String)>,
    /// Images beyond [`FAMILY_MAX`], which were not read.
    pub not_read: usize,
}

impl FolderImages {
    /// Reads the images in the folder `dir`. Of the options only `files` and `parents` are used.
    ///
    /// # Errors
    /// [`DiskError::File`](crate::DiskError::File) if the folder cannot be listed.
    pub fn of(dir: impl AsRef<Path>, options: &OpenOptions) -> Result<Self> {
        let files = &options.files;
        let dir = files.canonical(dir.as_ref()).map_err(|source| file_error("find it", dir.as_ref(), source))?;
        let mut paths = files.list(&dir).map_err(|source| file_error("list the folder", &dir, source))?;
        paths.retain(|path| probe::format_of_extension(path).is_some_and(|format| format.driver().has_blocks));
        paths.sort();
        let mut family = Self { not_read: paths.len().saturating_sub(FAMILY_MAX), ..Self::default() };
        paths.truncate(FAMILY_MAX);
        let mut parts: HashSet<PathBuf> = HashSet::new();
        for path in paths {
            let access = Access { force_share: true, ..Access::default() };
            match open_image(files, &path, &access, &mut Vec::new()) {
                Ok((image, stores)) => {
                    parts.extend(stores.iter().skip(1).map(|store| store.name().to_owned()));
                    family.members.push(FolderImage {
                        path,
                        info: image.info().clone(),
                        allocated_bytes: stores.iter().map(|store| store.allocated_bytes().ok()).sum(),
                        parent: FoundParent::None,
                    });
                }
                Err(error) => family.unreadable.push((path, error.to_string())),
            }
        }
        // Further files of another image: extents of a VMDK.
        family.members.retain(|member| !parts.contains(&member.path));
        family.unreadable.retain(|(path, _)| !parts.contains(path));
        for index in 0..family.members.len() {
            family.members[index].parent = family.parent_of(index, options);
        }
        family.refuse_loops();
        Ok(family)
    }

    /// An image of a loop has no parent that could be read. Each says so and is a root; what hangs
    /// below the loop stays there. Takes each step to a parent once.
    fn refuse_loops(&mut self) {
        let mut walked_from: Vec<Option<usize>> = vec![None; self.members.len()];
        for start in 0..self.members.len() {
            let mut at = start;
            while walked_from[at].is_none() {
                walked_from[at] = Some(start);
                let FoundParent::Here(parent) = self.members[at].parent else { break };
                at = parent;
                if walked_from[at] == Some(start) {
                    self.refuse_loop(at);
                    break;
                }
            }
        }
    }

    /// The loop through the member at `first`.
    fn refuse_loop(&mut self, first: usize) {
        let mut ring = Vec::new();
        let mut at = first;
        while let FoundParent::Here(parent) = self.members[at].parent {
            ring.push(at);
            at = parent;
            if at == first {
                break;
            }
        }
        let name = |at: &usize| self.members[*at].path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let mut names: Vec<String> = ring.iter().take(LOOP_NAMES_MAX).map(name).collect();
        if ring.len() > names.len() {
            names.push(format!("{} more", ring.len() - names.len()));
        }
        names.push(name(&first));
        let why = format!(
            "its parents are a loop ({}), so it cannot be read; connect one of them to its right parent (`reconnect`)",
            names.join(" above ")
        );
        for at in ring {
            self.members[at].parent = FoundParent::Wrong(why.clone());
        }
    }

    fn parent_of(&self, index: usize, options: &OpenOptions) -> FoundParent {
        let child = &self.members[index];
        let Some(link) = child.info.parent.as_ref().filter(|_| child.info.disk_type == DiskType::Differencing) else {
            return FoundParent::None;
        };
        let named = gate::named_paths(&child.path, link, &options.parents.drives);
        let mut wrong = None;
        for path in named.iter().filter_map(|path| options.files.canonical(path).ok()) {
            let Ok(at) = self.members.binary_search_by(|member| member.path.cmp(&path)) else {
                return FoundParent::Elsewhere(path);
            };
            let parent = &self.members[at];
            match check_linkage(&child.path, &child.info, link, &parent.path, &parent.info) {
                Ok(()) if at != index => return FoundParent::Here(at),
                Ok(()) => {}
                Err(error) => drop(wrong.get_or_insert(error.to_string())),
            }
        }
        if link.file_id.is_some() {
            let mut fits = self.members.iter().enumerate().filter(|(at, member)| {
                *at != index
                    && member.info.format == child.info.format
                    && check_linkage(&child.path, &child.info, link, &member.path, &member.info).is_ok()
            });
            return match (fits.next(), fits.next()) {
                (Some((at, _)), None) => FoundParent::Here(at),
                (Some((_, one)), Some((_, other))) => {
                    FoundParent::Wrong(by_id::several(&child.path, &[&one.path, &other.path]).to_string())
                }
                (None, _) => FoundParent::Missing(
                    link.file_id.map(|id| format!("an image with the id {id}")).into_iter().collect(),
                ),
            };
        }
        // Several entries of a link may lead to one place.
        let mut places: Vec<_> = named.iter().map(|path| path.display().to_string()).collect();
        places.dedup();
        wrong.map_or(FoundParent::Missing(places), FoundParent::Wrong)
    }

    /// Every image once, parents before their children. Time grows with the number of images, also
    /// where an image has thousands of children.
    pub fn walk(&self) -> Vec<Node> {
        let mut children = vec![Vec::new(); self.members.len()];
        for (index, member) in self.members.iter().enumerate() {
            if let FoundParent::Here(parent) = member.parent {
                children[parent].push(index);
            }
        }
        let is_root = |index: &usize| !matches!(self.members[*index].parent, FoundParent::Here(_));
        let roots = (0..self.members.len()).filter(is_root);
        let mut seen = vec![false; self.members.len()];
        let mut order = Vec::with_capacity(self.members.len());
        // No image is in a loop, so all hang below a root.
        for start in roots {
            let mut waiting = vec![Node { index: start, depth: 0, is_last: true }];
            while let Some(place) = waiting.pop() {
                if std::mem::replace(&mut seen[place.index], true) {
                    continue;
                }
                let below = children[place.index].iter().rev().enumerate();
                waiting.extend(below.map(|(number, &index)| Node {
                    index,
                    depth: place.depth + 1,
                    is_last: number == 0,
                }));
                order.push(place);
            }
        }
        order
    }
}

/// Where an image stands in the tree of its family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Node {
    /// Its index in [`FolderImages::members`].
    pub index: usize,
    /// How many ancestors it has in this folder.
    pub depth: usize,
    /// Whether it is the last child of its parent.
    pub is_last: bool,
}
