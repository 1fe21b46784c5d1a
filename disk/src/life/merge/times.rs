//! The times of last change that VHDs record of their parents, while a merge changes those files.
//!
//! ```text
//!   base ◀─ a ◀─ b ◀─ c ◀─ d        merge b into base: a and b get marks, then c another link
//!           step   top  child  descendant
//!
//!   before   d: any time of c   c: any time of b   b: any time of a     the highest first
//!   steps    a, b and c are written
//!   after                       c: the time of base   d: the time of c   the lowest first
//! ```
//!
//! A VHD records when its parent's file was last changed, and cannot be written if the file has
//! another time. A merge replaces links, which changes files of which an image above has recorded
//! the time. [`relink::keeping_time`](crate::opening::relink) puts the time back, but a program can
//! be killed in between. So before the first link is replaced, every image above it accepts any
//! time of its parent. Each of these changes is a change of a file, too: the image above has
//! forgotten the time before.
//!
//! When the merge has ended, or has stopped without being killed, the times are recorded again.
//! Only a merge that was killed leaves images that accept any time, until it is finished. An image
//! whose parent has another time than it recorded keeps what it recorded: its parent was changed,
//! and the merge does not hide that.

use super::{Descendant, Locked, Merge, mark};
use crate::{
    DiskError, Result,
    opening::{gate, open::parent_timestamp_warning, siblings::Candidate},
};
use diskwright_image::ParentLink;
use std::path::{Path, PathBuf};

impl Merge<'_> {
    /// Finds and locks all images above the children, the lowest first, if they record times.
    pub(super) fn find_descendants(&mut self, dirs: &[PathBuf]) -> Result<()> {
        if !self.target.info.format.driver().child_records_time {
            return Ok(());
        }
        let candidate = |image: &Locked| Candidate::of(image.path.clone(), &image.info);
        let mut lower: Vec<Candidate> = self.children.iter().map(candidate).collect();
        let mut found: Vec<Descendant> = Vec::new();
        while !lower.is_empty() {
            let first_new = found.len();
            for (path, parent) in self.children_in(dirs, &lower)? {
                let is_known = |image: &Locked| image.is_file_at(&self.options.open.files, &path);
                let above = found.iter().map(|descendant| &descendant.image);
                if self.steps.iter().chain([&self.target]).chain(&self.children).chain(above).any(is_known) {
                    continue;
                }
                found.push(Descendant { image: self.lock(&path)?, parent: lower[parent].path.clone() });
            }
            lower = found[first_new..].iter().map(|new| candidate(&new.image)).collect();
        }
        self.descendants = found.into_iter().filter(|new| self.changed(&new.image, &new.parent).is_none()).collect();
        Ok(())
    }

    /// Refuses a child that recorded another time of its parent than that has.
    pub(super) fn refuse_changed(&self, image: &Locked, parent: &Path) -> Result<()> {
        match self.changed(image, parent).filter(|_| !self.options.open.parents.ignore_timestamp) {
            None => Ok(()),
            Some(what) => Err(DiskError::BadChain {
                path: image.path.clone(),
                what: format!("{what}; if the parent was not written to, use `ParentPolicy::ignore_timestamp`"),
            }),
        }
    }

    /// The sentence about a parent that has another time than the image recorded.
    fn changed(&self, image: &Locked, parent: &Path) -> Option<String> {
        let link = image.info.parent.as_ref().filter(|_| !Self::is_marked(image))?;
        parent_timestamp_warning(&self.options.open.files, link, parent)
    }

    /// Every image above one whose link will be replaced accepts any time of that.
    pub(super) fn forget_times(&self) -> Result<()> {
        let descendants = self.descendants.iter().rev().map(|above| &above.image);
        let steps = &self.steps[..self.steps.len().saturating_sub(1)];
        for image in descendants.chain(&self.children).chain(steps) {
            // A mark is a time too, and stays.
            if image.info.parent.as_ref().is_some_and(mark::has_time) && !Self::is_marked(image) {
                image.relink(&self.options.open.files, mark::of_any_time)?;
            }
        }
        Ok(())
    }

    /// After the last step: the images above the children record times again.
    pub(super) fn record_times(&self) -> Result<()> {
        self.descendants.iter().try_for_each(|above| self.record_time(&above.image, &above.parent))
    }

    /// After a step that has failed: all images that do not lead to the target record times again.
    /// Errors are ignored, as the images accept any time then.
    pub(super) fn restore_times(&self) {
        let steps = self.steps.windows(2).rev().map(|pair| (&pair[0], &*pair[1].path));
        let children =
            self.steps.first().into_iter().flat_map(|top| self.children.iter().map(|child| (child, &*top.path)));
        let descendants = self.descendants.iter().map(|above| (&above.image, &*above.parent));
        for (image, parent) in steps.chain(children).chain(descendants) {
            let _ = self.record_time(image, parent);
        }
    }

    fn locked_at(&self, path: &Path) -> Option<&Locked> {
        let above = self.descendants.iter().map(|descendant| &descendant.image);
        self.steps.iter().chain([&self.target]).chain(&self.children).chain(above).find(|image| image.path == path)
    }

    /// Records when the file at `parent` was last changed, if `image` accepts any time.
    fn record_time(&self, image: &Locked, parent: &Path) -> Result<()> {
        let files = &self.options.open.files;
        if !image.image(false)?.parent_link().is_some_and(|link| mark::accepts_any_time(&link)) {
            return Ok(());
        }
        // After a change that failed, the parent may have a time that a power cut takes back.
        self.locked_at(parent).map_or(Ok(()), Locked::sync)?;
        let modified_seconds = gate::modified_seconds(files, parent);
        if modified_seconds.is_none() {
            return Ok(());
        }
        image.relink(files, |link| ParentLink { modified_seconds, ..link })
    }
}
