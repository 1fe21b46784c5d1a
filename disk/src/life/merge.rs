//! Merges an image into its parent, or into another ancestor. Nobody else may have them open: a
//! disk in use takes part by [`MergeUsers`] (`live_merge.rs`).
//!
//! ```text
//!   before                     merge c.avhdx into its parent        merge d.vhdx --into a.vhdx
//!   a.vhdx                     a.vhdx                               a.vhdx  (has all)
//!     └─ b.avhdx                 └─ b.avhdx  (b's data and c's)
//!          └─ c.avhdx                 └─ d.vhdx
//!               └─ d.vhdx
//! ```
//!
//! An ancestor takes the images above it one by one, the nearest first. Each of these steps is
//! complete by itself:
//!
//! 1. The child's link names the parent's present identity and the coming one (`merge_mark.rs`).
//!    Before the first step, VHDs above the images that are changed accept any time of their
//!    parent's last change (`times.rs`).
//! 2. The parent gets the coming identity, and the child's size if that is larger.
//! 3. The child's data goes into the parent, by reflink where both files can (`copy.rs`). Zeros of
//!    the child replace the parent's data. The parent is flushed and closed.
//! 4. The child's link is marked: the parent has all of it.
//! 5. Children of the child get a link to the parent.
//! 6. The child is removed. If its name is to be kept, the parent is renamed over it. The extents
//!    that only the child used go last (`removal.rs`).
//!
//! Every step is durable before the next one. A power cut at any moment leaves a child that reads
//! as before: until step 6 it has its own data, and until step 4 nothing but this child reads the
//! parent. The same command then finishes the merge. From the mark on it copies nothing, as
//! children of the child may be written already.
//!
//! The merge is refused if any other image has the parent, or an image between, as its parent: it
//! would read other data afterwards. Such images are searched in the folders of all images that
//! take part, and in others that the caller names. Children of the merged image itself may exist.

mod children;
mod locked;
pub(crate) mod survey;
mod times;

use crate::{
    DiskError, OpenOptions, Opened, Progress, Result,
    copying::{
        copy::{Dest, Failure, Job, Outcome},
        create,
    },
    engine::{chain::Layer, device::Disk},
    error::{file_error, from_io},
    life::{
        kept_name,
        removal::{self, Removal},
    },
    opening::{gate, merge_mark as mark, open::open_locked, relink},
};
use diskwright_image::{LinkageId, ParentLink};
pub(crate) use locked::{Locked, MergeUsers};
use std::{
    path::{Path, PathBuf},
    sync::{Arc, atomic::Ordering},
};
use survey::{Survey, missing_bytes};

/// Whose name the merged image has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KeptName {
    /// That of the parent. The child's name is gone.
    #[default]
    Parents,
    /// That of the child. The parent's name is gone. Both must be in one folder.
    Childs,
}

/// What is merged into what.
#[derive(Debug, Clone, Default)]
pub struct MergeOptions {
    /// The ancestor that takes the data; `None` for the parent.
    pub into: Option<PathBuf>,
    /// Whose name is kept.
    pub keep: KeptName,
    /// More folders in which children of the images are searched.
    pub search_dirs: Vec<PathBuf>,
    /// Always copy, never share by reflink.
    pub no_reflink: bool,
    /// How the chain is opened: which parents are allowed, the cache mode, the engine. `writable`
    /// and `reach` are ignored.
    pub open: OpenOptions,
    /// Checks everything and changes nothing.
    pub dry_run: bool,
}

/// The result of a merge, or with [`MergeOptions::dry_run`] what it would be.
#[derive(Debug, Clone, Default)]
pub struct Merged {
    /// The image that has all data afterwards, by its name then.
    pub disk: PathBuf,
    /// Path of the image that took the data, before it got another name.
    pub target: PathBuf,
    /// The images whose data went into it, the nearest first. They are gone.
    pub merged: Vec<PathBuf>,
    /// Children of the merged image, whose parent is now `disk`.
    pub relinked: Vec<PathBuf>,
    /// What earlier merges that were interrupted had left, and is removed.
    pub leftovers: Vec<PathBuf>,
    /// Bytes of data that had to go into `disk`.
    pub data_bytes: u64,
    /// Bytes read and written; 0 with `dry_run`.
    pub copied_bytes: u64,
    /// Bytes shared by reflink; 0 with `dry_run`.
    pub cloned_bytes: u64,
    /// By how much the file of `disk` may grow, in bytes, unless data is shared.
    pub growth_bytes: u64,
    /// Virtual size of `disk` before and after, in bytes.
    pub size_bytes: (u64, u64),
    /// Warnings for the user, one sentence each.
    pub warnings: Vec<String>,
}

/// Merges the image at `path`. Durable on return. `progress` counts bytes of data. A merge of a
/// disk in use ([`Disk::merge`]) that was interrupted is finished as that: the disk keeps its name.
///
/// # Errors
/// [`DiskError::InUse`] if another program has one of the images open; [`DiskError::BadOptions`]
/// for an image without a parent, an ancestor that is none, other children, or too little space;
/// errors of the chain. Nothing has changed then. [`DiskError::Stopped`] and errors of reading and
/// writing leave a child that reads as before: the same call finishes the merge.
pub fn merge(path: impl AsRef<Path>, options: &MergeOptions, progress: &mut Progress<'_>) -> Result<Merged> {
    let (shown, files) = (path.as_ref(), &options.open.files);
    let real = files.canonical(shown).map_err(|source| file_error("find it", shown, source))?;
    let finishing = finishing(&real, options)?;
    let mut merged = Merge::open(shown, finishing.as_ref().unwrap_or(options))?.run(progress)?;
    if finishing.is_some() {
        merged.warnings.push(format!(
            "{}: a merge of this disk was interrupted while it was in use, and is finished as it began: the disk keeps its name",
            shown.display()
        ));
    }
    if !options.dry_run {
        merged.warnings.extend(kept_name::unmark_or_warn(files, &real));
    }
    Ok(merged)
}

/// The options with which the merge of the image at `real`, which no process has open, finishes one
/// that was interrupted while the disk was in use. `None` if there is no such merge, or if its
/// target cannot get the name.
fn finishing(real: &Path, options: &MergeOptions) -> Result<Option<MergeOptions>> {
    let files = &options.open.files;
    let identity = files.facts(real).map_err(|source| file_error("find it", real, source))?.identity;
    let dir = |into: &PathBuf| files.canonical(into).ok().and_then(|into| into.parent().map(Path::to_owned));
    let is_in_folder = options.into.as_ref().is_none_or(|into| dir(into).as_deref() == real.parent());
    let finishes = options.keep == KeptName::Parents && is_in_folder && kept_name::is_marked(files, real, identity)?;
    Ok(finishes.then(|| MergeOptions { keep: KeptName::Childs, ..options.clone() }))
}

/// An image above the children of the merged image.
#[derive(Debug)]
struct Descendant {
    image: Locked,
    /// Its parent, whose name does not change.
    parent: PathBuf,
}

/// A merge whose images are locked.
#[derive(Debug)]
pub(crate) struct Merge<'a> {
    options: &'a MergeOptions,
    users: &'a dyn MergeUsers,
    /// The images that are still to be merged, the nearest to the target last.
    steps: Vec<Locked>,
    target: Locked,
    /// The ancestors of the target.
    below: Vec<Layer>,
    /// Images that get a link to the target when the last step is done.
    children: Vec<Locked>,
    /// VHDs above the children, which have recorded when these were changed.
    descendants: Vec<Descendant>,
    leftovers: Vec<Locked>,
    /// Data that earlier steps have copied, for progress.
    done_bytes: u64,
    outcome: Merged,
}

impl<'a> Merge<'a> {
    /// Opens and locks all images, and refuses what cannot be merged.
    fn open(shown: &Path, options: &'a MergeOptions) -> Result<Self> {
        let files = &options.open.files;
        let real = files.canonical(shown).map_err(|source| file_error("find it", shown, source))?;
        let into = match &options.into {
            Some(into) => Some(files.canonical(into).map_err(|source| file_error("find the ancestor", into, source))?),
            None => None,
        };
        if into.as_ref() == Some(&real) {
            return Err(DiskError::Usage {
                what: format!("{}: a disk cannot be merged into itself", shown.display()),
                hint: "name one of its ancestors".into(),
            });
        }
        let is_target = |path: &Path| into.as_deref().is_none_or(|into| into == path);
        let Some(chain) = open_locked(&real, &options.open, &is_target)? else {
            let (what, hint) = match &options.into {
                Some(into) => {
                    (format!("{} is not among its ancestors", into.display()), "name an image of its chain below it")
                }
                None => ("it has no parent into which it could be merged".into(), "only differencing disks have one"),
            };
            return Err(DiskError::BadOptions { what: format!("{}: {what}", shown.display()), hint: hint.into() });
        };
        let below = chain.layers[chain.stores.len()..].to_vec();
        let locked = chain.layers.iter().zip(chain.stores);
        let mut steps: Vec<Locked> = locked.map(|(layer, stores)| Locked::new(layer, stores)).collect();
        let Some(target) = steps.pop() else { unreachable!("a chain has at least two images here") };
        let mut merge = Self::of(steps, target, below, None, options, &())?;
        merge.outcome.warnings = chain.warnings;
        Ok(merge)
    }

    /// A merge of `steps`, the top first, into `target`, whose ancestors are `below`. `child` is a
    /// child of the first step, besides those that will be found. Refuses what cannot be merged.
    pub(crate) fn of(
        steps: Vec<Locked>,
        target: Locked,
        below: Vec<Layer>,
        child: Option<PathBuf>,
        options: &'a MergeOptions,
        users: &'a dyn MergeUsers,
    ) -> Result<Self> {
        let (disk, before) = (target.path.clone(), target.path.clone());
        let outcome = Merged { disk, target: before, ..Merged::default() };
        let (children, descendants, leftovers) = (Vec::new(), Vec::new(), Vec::new());
        relink::require(&target.path, target.info.format, "an in-place merge of", relink::COPY_THE_CHAIN)?;
        mark::refuse_merged(&target.path, &target.info, target.info.parent.as_ref())?;
        for step in &steps {
            relink::require_same_format((&step.path, step.info.format), (&target.path, target.info.format))?;
            if step.info.format.driver().has_snapshots() {
                removal::refuse_to_lose_snapshots(&*step.image(false)?, &step.path)?;
            }
        }
        let mut merge =
            Self { options, users, steps, target, below, children, descendants, leftovers, done_bytes: 0, outcome };
        merge.find_children(child)?;
        merge.check_sizes()?;
        merge.check_folders()?;
        if options.keep == KeptName::Childs {
            let real = &merge.steps[0].path;
            if merge.target.path.parent() != real.parent() {
                return Err(DiskError::BadOptions {
                    what: format!("{} and {} are in different folders", real.display(), merge.target.path.display()),
                    hint: "a parent gets the name of its child only within one folder: keep the parent's name".into(),
                });
            }
            merge.outcome.disk = real.clone();
        }
        Ok(merge)
    }

    /// Merges, or with `dry_run` finds what a merge would do.
    pub(crate) fn run(mut self, progress: &mut Progress<'_>) -> Result<Merged> {
        self.survey()?;
        if !self.options.dry_run {
            self.users.begin()?;
            self.remove_leftovers()?;
            self.forget_times()?;
            while let Some(child) = self.steps.pop() {
                if let Err(error) = self.step(&child, progress) {
                    self.steps.push(child);
                    self.restore_times();
                    return Err(error);
                }
            }
            self.record_times()?;
        }
        Ok(self.outcome)
    }

    /// Whether the child that is merged next was marked by an earlier merge.
    pub(crate) fn is_marked(child: &Locked) -> bool {
        child.info.parent.as_ref().is_some_and(|link| mark::is_merged(&child.info, link))
    }

    /// Finds what has to be copied, and whether there is space for it.
    fn survey(&mut self) -> Result<()> {
        let target = self.target.layer(false)?;
        // Damaged blocks of the target would fail the merge half-way.
        let unit_bytes = target.image.info().block_bytes;
        Survey::of(&target, unit_bytes)?;
        let mut ranges = Vec::new();
        for child in self.steps.iter().filter(|child| !Self::is_marked(child)) {
            let survey = Survey::of(&child.layer(false)?, unit_bytes)?;
            self.outcome.data_bytes += survey.data_bytes;
            ranges.extend(survey.ranges);
        }
        self.outcome.merged = self.steps.iter().rev().map(|child| child.path.clone()).collect();
        let needed_bytes = missing_bytes(&*target.image, ranges)?;
        self.outcome.growth_bytes = needed_bytes;
        let path = &self.target.path;
        let may_share = !self.options.no_reflink && diskwright_store::may_reflink(path);
        match diskwright_store::free_bytes(path) {
            Some(free_bytes) if free_bytes < needed_bytes && !may_share => {
                Err(file_error("merge into it", path, diskwright_store::shortage(path, needed_bytes, free_bytes)))
            }
            _ => Ok(()),
        }
    }

    fn remove_leftovers(&mut self) -> Result<()> {
        let images = self.steps.iter().chain([&self.target]);
        let mut dirs: Vec<PathBuf> = images.filter_map(|image| Some(image.path.parent()?.to_owned())).collect();
        dirs.dedup();
        dirs.iter().try_for_each(|dir| removal::finish(&self.options.open.files, dir))?;
        if !self.leftovers.is_empty() {
            // The links that led to a leftover may have been changed in the page cache only.
            self.steps.iter().chain([&self.target]).chain(&self.children).try_for_each(Locked::sync)?;
        }
        for leftover in self.leftovers.drain(..) {
            removal::remove(&self.options.open.files, &leftover.path, leftover.extents()?)?;
        }
        Ok(())
    }

    /// One step: `child` into the target.
    fn step(&mut self, child: &Locked, progress: &mut Progress<'_>) -> Result<()> {
        if Self::is_marked(child) {
            // The mark of a program that was killed may be in the page cache only.
            child.sync()?;
        } else {
            self.copy(child, progress)?;
            let identity = self.target.identity()?;
            child.relink(&self.options.open.files, |link| mark::merged(link, &child.info, identity))?;
        }
        match self.steps.last() {
            Some(next) => {
                let link = self.link_from(next, &self.target.path)?;
                next.relink(&self.options.open.files, |_| link)?;
                removal::remove(&self.options.open.files, &child.path, child.extents()?)?;
            }
            None if self.options.keep == KeptName::Childs => self.rename(child)?,
            None => {
                for image in &self.children {
                    let link = self.link_from(image, &self.target.path)?;
                    image.relink(&self.options.open.files, |_| link)?;
                }
                removal::remove(&self.options.open.files, &child.path, child.extents()?)?;
            }
        }
        self.users.leave_out(child, &self.target.layer(false)?)
    }

    /// Steps 1 to 3.
    fn copy(&mut self, child: &Locked, progress: &mut Progress<'_>) -> Result<()> {
        let options = self.options;
        self.target.sync()?;
        let present = self.target.identity()?;
        let coming = present.map(LinkageId::fresh);
        child.relink(&self.options.open.files, |link| mark::copying(link, present, coming))?;
        let layer = self.target.layer(true)?;
        self.users.before_writing(&layer)?;
        if let Some(writer) = layer.image.writer() {
            coming.map_or_else(|| writer.begin_writing(), |coming| writer.begin_writing_as(coming))?;
        }
        let layers = [layer].into_iter().chain(self.below.iter().cloned()).collect();
        let dest = Arc::new(Disk::from_layers(layers, Vec::new())?);
        if child.info.size_bytes > dest.layers()[0].image.size_bytes() {
            dest.grow(child.info.size_bytes)?;
        }
        let source_layer = child.layer(false)?;
        let data_bytes = Survey::of(&source_layer, child.info.block_bytes)?.data_bytes;
        let source = Opened::Disk(Arc::new(Disk::from_layers(vec![source_layer], Vec::new())?));
        let opened = Opened::Disk(Arc::clone(&dest));
        let free_bytes = diskwright_store::free_bytes(&self.target.path);
        let (before, total) = (self.done_bytes, self.outcome.data_bytes);
        let mut tell = |done: u64, _: u64| progress(before + done, total.max(before + done));
        let into = (&opened, Dest::ParentData);
        let job = Job::new(&source, into, options.open.engine, !options.no_reflink, false)
            .counting_data(data_bytes)
            .beside(self.users.clients());
        let ended = if tell(0, 0) { job.run(&mut tell) } else { Outcome::Stopped };
        let closed = dest.close();
        self.outcome.copied_bytes += job.copied_bytes.load(Ordering::Relaxed);
        self.outcome.cloned_bytes += job.cloned_bytes.load(Ordering::Relaxed);
        match ended {
            Outcome::Done => {}
            Outcome::Stopped => {
                closed?;
                return Err(DiskError::Stopped);
            }
            Outcome::Failed(Failure::Source(_, error)) => return Err(from_io("read it", &child.path, error)),
            Outcome::Failed(Failure::Dest(error)) => {
                let error = diskwright_store::explain_shortage(error, &self.target.path, None, free_bytes);
                return Err(from_io("merge into it", &self.target.path, error));
            }
        }
        closed?;
        self.done_bytes += data_bytes;
        progress(self.done_bytes, total.max(self.done_bytes));
        Ok(())
    }

    /// The link of `image` to the target, if that is at `place`. An image that is marked stays so:
    /// the target has the data of the image whose child it was.
    fn link_from(&self, image: &Locked, place: &Path) -> Result<ParentLink> {
        let target = self.target.image(false)?;
        let info = target.info().clone();
        let modified_seconds = gate::time_to_record(&self.options.open.files, &self.target.path, &**target.store())?;
        let dir = image.path.parent().unwrap_or(Path::new("/"));
        let link = create::link_to(
            (&self.options.open.files, place),
            &info,
            modified_seconds,
            (&image.path, image.info.format),
            dir,
        )?;
        Ok(if Self::is_marked(image) { mark::merged(link, &image.info, info.linkage_id) } else { link })
    }

    /// Renames the target over the last child. The child's children find the target before and
    /// after: their relative path leads to the child's name, and the absolute one to the target's.
    /// The file at the first path that is not the parent, by its identity, is passed over. A VMDK
    /// records one path: until the end its children accept both images, which read the same.
    fn rename(&mut self, child: &Locked) -> Result<()> {
        let files = &self.options.open.files;
        for image in &self.children {
            let (new, old) = (self.link_from(image, &child.path)?, self.link_from(image, &self.target.path)?);
            let has_one_path = self.target.info.format.driver().child_records_one_path;
            let linkage2 = child.info.linkage_id.filter(|_| has_one_path);
            let linkage2 = linkage2.or(new.linkage2);
            let link = ParentLink { absolute_path: old.absolute_path, linkage2, ..new };
            image.relink(&self.options.open.files, |_| link)?;
        }
        let removal = Removal::begin(files, &child.path, child.extents()?)?;
        if let Err(source) = files.rename(&self.target.path, &child.path, true) {
            removal.give_up();
            return Err(file_error("give the merged image its name", &child.path, source));
        }
        let synced = files.sync_directory_of(&child.path);
        synced.map_err(|source| file_error("make its new name durable", &child.path, source))?;
        removal.end()?;
        self.target.was_renamed(&child.path);
        for image in &self.children {
            let link = self.link_from(image, &child.path)?;
            image.relink(&self.options.open.files, |_| link)?;
        }
        Ok(())
    }
}
