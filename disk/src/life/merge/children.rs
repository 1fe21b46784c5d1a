//! What a merge refuses before it changes anything: other children of its images, folders in which
//! no name can be removed, sizes that do not fit. Finds the children that get another link, too.

use super::{Locked, Merge};
use crate::{
    DiskError, Result,
    engine::chain::Layer,
    error::file_error,
    opening::{
        image_file::{Access, open_image},
        siblings,
    },
};
use diskwright_image::probe;
use std::path::{Path, PathBuf};

impl Merge<'_> {
    /// Finds the children of all images, locks those that get another link, and refuses others.
    pub(super) fn find_children(&mut self, known: Option<PathBuf>) -> Result<()> {
        let files = &self.options.open.files;
        let images: Vec<&Locked> = self.steps.iter().chain([&self.target]).collect();
        let (top, target) = (0, images.len() - 1);
        let mut dirs: Vec<PathBuf> = images.iter().filter_map(|image| Some(image.path.parent()?.to_owned())).collect();
        for dir in &self.options.search_dirs {
            dirs.push(files.canonical(dir).map_err(|source| file_error("find the folder", dir, source))?);
        }
        dirs.sort();
        dirs.dedup();
        let parents: Vec<_> =
            images.iter().map(|image| siblings::Candidate::of(image.path.clone(), &image.info)).collect();
        let (mut children, mut leftovers): (Vec<PathBuf>, _) = (known.into_iter().collect(), Vec::new());
        // Those that an earlier run has given their link to the target.
        let mut relinked = Vec::new();
        for (child, parent) in self.children_in(&dirs, &parents)? {
            // A snapshot that was cut off may have left an image a second name.
            if images.iter().any(|image| image.is_file_at(files, &child)) {
                continue;
            }
            if parent == top {
                children.push(child);
                continue;
            }
            let is_leftover =
                |image: &Locked| Ok::<_, DiskError>(Self::is_marked(image) && self.is_childless(&dirs, image)?);
            if let Ok(image) = self.lock(&child)
                && is_leftover(&image)?
            {
                leftovers.push(image);
            } else if parent == target && images.len() == 2 && Self::is_marked(images[0]) {
                relinked.push(child);
            } else {
                let parent = &images[parent].path;
                return Err(DiskError::BadOptions {
                    what: format!(
                        "{} also has {} as its parent, and would read other data after the merge",
                        child.display(),
                        parent.display()
                    ),
                    hint: "merge or remove that image first, or convert it to a disk of its own".into(),
                });
            }
        }
        children.sort();
        children.dedup();
        self.children = children.iter().map(|child| self.lock(child)).collect::<Result<_>>()?;
        self.children.iter().try_for_each(|child| self.refuse_changed(child, &self.steps[0].path))?;
        for child in &relinked {
            let child = self.lock(child)?;
            self.refuse_changed(&child, &self.target.path)?;
            self.children.push(child);
        }
        self.leftovers = leftovers;
        self.outcome.relinked = self.children.iter().map(|child| child.path.clone()).collect();
        self.outcome.leftovers = self.leftovers.iter().map(|leftover| leftover.path.clone()).collect();
        self.find_descendants(&dirs)
    }

    pub(super) fn children_in(
        &self,
        dirs: &[PathBuf],
        parents: &[siblings::Candidate],
    ) -> Result<Vec<(PathBuf, usize)>> {
        let mut all = Vec::new();
        for dir in dirs {
            let found = siblings::children_in(&self.options.open.files, dir, self.target.info.format, parents);
            let (found, not_asked) = found.map_err(|source| file_error("search for children in", dir, source))?;
            if not_asked > 0 {
                return Err(DiskError::BadOptions {
                    what: format!(
                        "{}: {not_asked} images in it could not be checked for children of the disk that is merged",
                        dir.display()
                    ),
                    hint: "make them readable, or move the images that belong together into a folder of their own"
                        .into(),
                });
            }
            all.extend(found);
        }
        Ok(all)
    }

    /// Whether no image but those that take part names `image` as its parent. These have another
    /// parent by now, also where the change of the link is still in a log only.
    fn is_childless(&self, dirs: &[PathBuf], image: &Locked) -> Result<bool> {
        let children = self.children_in(dirs, &[siblings::Candidate::of(image.path.clone(), &image.info)])?;
        Ok(children.iter().all(|(child, _)| self.steps.iter().any(|step| step.path == *child)))
    }

    pub(super) fn lock(&self, path: &Path) -> Result<Locked> {
        if let Some(held) = self.users.held(path)? {
            return Ok(held);
        }
        let format = probe::format_of_extension(path).unwrap_or(self.target.info.format);
        let access = Access { format: Some(format), writable: true, ..Access::of_top(&self.options.open) };
        let (image, stores) = open_image(&self.options.open.files, path, &access, &mut Vec::new())?;
        Ok(Locked::new(&Layer { path: path.to_owned(), image }, stores))
    }

    /// Names of merged images are removed at the end. A folder in which that is impossible is
    /// refused before anything is changed.
    pub(super) fn check_folders(&self) -> Result<()> {
        for path in self.steps.iter().map(|image| &image.path) {
            let dir = path.parent().unwrap_or(Path::new("/"));
            let checked = self.options.open.files.check_names_in(dir);
            checked.map_err(|source| file_error("remove images that were merged from this folder", dir, source))?;
        }
        Ok(())
    }

    /// The target must get the size of the top, which is refused here before anything is changed.
    pub(super) fn check_sizes(&mut self) -> Result<()> {
        let present_bytes = self.target.info.size_bytes;
        let wanted_bytes = self.steps[0].info.size_bytes;
        self.outcome.size_bytes = (present_bytes, wanted_bytes);
        let sizes = self.steps.iter().chain([&self.target]).map(|image| image.info.size_bytes);
        if let Some(larger) = sizes.max().filter(|&larger| larger > wanted_bytes) {
            return Err(DiskError::BadOptions {
                what: format!(
                    "{}: it has {wanted_bytes} bytes, and one of its ancestors has {larger}; merging into a larger disk is not supported",
                    self.steps[0].path.display()
                ),
                hint: "enlarge this disk first, or convert it to a new one".into(),
            });
        }
        if let Some(parent) = self
            .below
            .first()
            .filter(|parent| wanted_bytes > present_bytes && parent.image.size_bytes() > present_bytes)
        {
            return Err(DiskError::BadOptions {
                what: format!(
                    "{}: it would get {wanted_bytes} bytes, and data of its parent {} beyond its {present_bytes} bytes would become visible",
                    self.target.path.display(),
                    parent.path.display()
                ),
                hint: "merge into a lower ancestor, or convert the disk to a new one".into(),
            });
        }
        // Asked here, because a refusal after the first link has changed would leave a merge that
        // cannot be finished.
        Ok(self.target.image(false)?.check_as_target(wanted_bytes)?)
    }
}
