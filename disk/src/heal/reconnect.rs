//! Gives a differencing image another link to its parent, and finds lost parents by their identity.
//!
//! ```text
//!   child ─▶ its parent is where the link says? ── yes ─▶ go on with the parent, down to the base
//!                 │ no
//!                 ▼
//!            the file that the caller names, or the one file below the searched folders that has
//!            the identity which the child expects ─▶ checked ─▶ a new link is planned ─▶ go on
//!   the whole chain is planned ─▶ links are written, the lowest image first
//! ```
//!
//! Nothing is written before the whole chain is planned, so a search that fails changes nothing.
//! Each link is replaced durably, and is the old one or the new one after a power cut
//! ([`ImageWriter::set_parent_link`](diskwright_image::ImageWriter::set_parent_link)). The same
//! call finishes what was interrupted.
//!
//! The contents of an image above another parent are a guess. So the parent must have the identity
//! that the child expects, unless the caller accepts another one. A VHD keeps its identity when it
//! is written, so the time of its last change counts too. An image keeps its own time of last
//! change when its link is replaced: its children have recorded that time. A process can be killed
//! in between, so children that get a new link too accept any time meanwhile.

mod chain_image;
mod search;

use crate::{
    DiskError, OpenOptions, Progress, Result,
    copying::create,
    engine::chain::{CHAIN_MAX, too_long},
    error::braced,
    error::file_error,
    opening::{
        by_id, gate,
        image_file::{Access, open_image, refuse_replaced},
        merge_mark as mark,
        open::{check_linkage, other_contents, parent_timestamp_warning},
        relink,
    },
};
use chain_image::ChainImage;
use diskwright_image::{ImageError, ParentLink, probe, probe::DetectedFormat};
use search::Index;
use std::path::{Path, PathBuf};

/// What is connected to what.
#[derive(Debug, Clone, Default)]
pub struct ReconnectOptions {
    /// The parent of the image; `None` to search it.
    pub parent: Option<PathBuf>,
    /// Folders in which lost parents of the chain are searched, with the folders below them.
    pub search_dirs: Vec<PathBuf>,
    /// Accepts a parent that is not the disk from which the image was made. What the image reads
    /// afterwards may be wrong.
    pub ignore_id_mismatch: bool,
    /// Files, drive letters, and whether the time of a VHD's last change is ignored. The rest is
    /// not used.
    pub open: OpenOptions,
    /// Checks everything and changes nothing.
    pub dry_run: bool,
}

/// A link that was replaced, or would be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Relinked {
    /// The image whose link it is.
    pub child: PathBuf,
    /// The parent that the link names afterwards.
    pub parent: PathBuf,
    /// The paths that the old link had for the parent.
    pub former_paths: Vec<String>,
    /// Whether the parent has the identity that the child expected.
    pub has_identity: bool,
}

/// The result of [`reconnect`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reconnected {
    /// The images of the chain as far as their files are known, the top first.
    pub chain: Vec<PathBuf>,
    /// The links, in the order of the chain.
    pub relinked: Vec<Relinked>,
    /// Warnings for the user, one sentence each.
    pub warnings: Vec<String>,
}

/// Connects the differencing image at `path` to its parent, and with
/// [`ReconnectOptions::search_dirs`] all images below it to theirs. Durable on return. `progress`
/// counts files that were examined.
///
/// # Errors
/// [`DiskError::ParentMissing`] if no file has the expected identity, [`DiskError::ParentChanged`]
/// if the named one has another; [`DiskError::BadChain`] for several files with that identity, a
/// loop, another format or sector; [`DiskError::BadOptions`] for an image without a parent;
/// [`DiskError::InUse`] if another program has an image open whose link must change. Nothing has
/// changed then, except that links written before an I/O error stay.
pub fn reconnect(
    path: impl AsRef<Path>,
    options: &ReconnectOptions,
    progress: &mut Progress<'_>,
) -> Result<Reconnected> {
    let mut plan = Plan::new(path.as_ref(), options)?;
    plan.go_down(progress)?;
    if !options.dry_run {
        plan.forget_times()?;
        plan.steps.iter().rev().try_for_each(|step| step.write(options, &step.link))?;
    }
    let former = |step: &Step| {
        let ParentLink { relative_path, volume_path, absolute_path, name, .. } = &step.former;
        [relative_path, absolute_path, volume_path, name].into_iter().flatten().cloned().collect()
    };
    let relinked = plan.steps.iter().map(|step| Relinked {
        child: step.child.path.clone(),
        parent: step.parent.path.clone(),
        former_paths: former(step),
        has_identity: step.has_identity,
    });
    Ok(Reconnected { relinked: relinked.collect(), chain: plan.chain, warnings: plan.warnings })
}

/// A link that has to be replaced.
#[derive(Debug)]
struct Step {
    child: ChainImage,
    parent: ChainImage,
    former: ParentLink,
    link: ParentLink,
    has_identity: bool,
}

impl Step {
    /// Replaces the link by this one, durably.
    fn write(&self, options: &ReconnectOptions, link: &ParentLink) -> Result<()> {
        let ChainImage { path, info } = &self.child;
        let access = Access { format: Some(info.format), writable: true, ..Access::default() };
        let (image, stores) = open_image(&options.open.files, path, &access, &mut Vec::new())?;
        if image.info().parent.as_ref() != Some(&self.former) {
            return Err(DiskError::BadChain {
                path: path.clone(),
                what: "another program has changed its link meanwhile; try again".into(),
            });
        }
        drop(image);
        // A program that was killed may have left the parent's identity in the page cache only.
        let parent = Access { format: Some(self.parent.info.format), ..Access::default() };
        // Its lock is held until the link is there: no merge changes it meanwhile.
        let (above, files) = open_image(&options.open.files, &self.parent.path, &parent, &mut Vec::new())?;
        refuse_replaced(&options.open.files, &self.parent.path, &self.parent.path, &*files[0])?;
        if above.info().linkage_id != self.parent.info.linkage_id {
            return Err(DiskError::BadChain {
                path: self.parent.path.clone(),
                what: "another program has changed it meanwhile; try again".into(),
            });
        }
        let synced = files.iter().try_for_each(|file| file.sync_all());
        synced.map_err(|source| file_error("make it durable", &self.parent.path, source))?;
        let verdict = DetectedFormat::certain(info.format);
        let image = probe::open_parts(stores.clone(), verdict, true, info.logical_sector_bytes)?;
        let Some(writer) = image.writer() else { return Ok(()) };
        relink::keeping_time(&options.open.files, (path, &*stores[0]), || {
            writer.set_parent_link(link)?;
            Ok(writer.close()?)
        })
    }
}

/// The chain on the way down.
struct Plan<'a> {
    options: &'a ReconnectOptions,
    /// Files below the searched folders; read when the first parent is missing.
    index: Option<Index>,
    /// The lowest image so far.
    current: ChainImage,
    chain: Vec<PathBuf>,
    steps: Vec<Step>,
    warnings: Vec<String>,
}

impl<'a> Plan<'a> {
    fn new(shown: &Path, options: &'a ReconnectOptions) -> Result<Self> {
        if options.parent.is_none() && options.search_dirs.is_empty() {
            return Err(DiskError::Usage {
                what: format!("{}: nothing says where its parent is", shown.display()),
                hint: "name the file with `ReconnectOptions::parent`, or folders with `ReconnectOptions::search_dirs`"
                    .into(),
            });
        }
        for dir in &options.search_dirs {
            // Also a chain that needs no search has named a folder by mistake.
            options.open.files.canonical(dir).map_err(|source| file_error("find the folder", dir, source))?;
        }
        let current = ChainImage::read(&options.open.files, shown, options.open.format)?;
        if current.link().is_none() {
            return Err(DiskError::BadOptions {
                what: format!("{}: it is not a differencing disk, so it has no parent", shown.display()),
                hint: "name an image that has a parent".into(),
            });
        }
        let hint = "put the parent where the image names it";
        relink::require(&current.path, current.info.format, "a new link to the parent of", hint)?;
        let chain = vec![current.path.clone()];
        Ok(Self { options, index: None, current, chain, steps: Vec::new(), warnings: Vec::new() })
    }

    /// Plans all links from the top to the base. Without folders to search, only the first.
    fn go_down(&mut self, progress: &mut Progress<'_>) -> Result<()> {
        let mut named = self.options.parent.as_deref();
        while let Some(link) = self.current.link().cloned() {
            if self.chain.len() >= CHAIN_MAX {
                return Err(too_long(&self.chain[0]));
            }
            self.refuse_merged(&link)?;
            let parent = match named.take() {
                Some(parent) => self.named(parent, &link)?,
                None => match self.connected(&link) {
                    Ok(parent) => parent,
                    Err(_) if !self.options.search_dirs.is_empty() => self.searched(&link, progress)?,
                    Err(error) => {
                        self.warnings.push(format!("the chain is still broken: {error}"));
                        return Ok(());
                    }
                },
            };
            if self.chain.contains(&parent.path) {
                return Err(DiskError::BadChain {
                    path: self.current.path.clone(),
                    what: format!(
                        "{} cannot be its parent: that image has this one as an ancestor, or is this one, so the chain would be a loop; name another parent",
                        parent.path.display()
                    ),
                });
            }
            self.chain.push(parent.path.clone());
            self.current = parent;
        }
        Ok(())
    }

    /// The parent that the caller names, with a step if the link differs.
    fn named(&mut self, shown: &Path, link: &ParentLink) -> Result<ChainImage> {
        let child = &self.current;
        let files = &self.options.open.files;
        let parent = ChainImage::read(files, shown, Some(link.format.unwrap_or(child.info.format))).map_err(|error| match error {
            DiskError::Image(ImageError::NotAnImage { found, .. }) => DiskError::BadChain {
                path: child.path.clone(),
                what: format!(
                    "{} cannot be its parent: it is not {} ({found}), and a chain has one format; name another parent",
                    shown.display(),
                    child.info.format
                ),
            },
            other => other,
        })?;
        let mut has_identity = true;
        match check_linkage(&child.path, &child.info, link, &parent.path, &parent.info) {
            Err(error @ DiskError::ParentChanged { .. }) if self.options.ignore_id_mismatch => {
                has_identity = false;
                self.warnings.push(format!("{error}; connected all the same"));
                if parent.info.size_bytes != child.info.size_bytes {
                    self.warnings.push(format!(
                        "{}: the parent {} has {} bytes and this image {}",
                        child.path.display(),
                        parent.path.display(),
                        parent.info.size_bytes,
                        child.info.size_bytes
                    ));
                }
            }
            Err(DiskError::ParentChanged { child, parent, found, expected }) => {
                return Err(DiskError::BadOptions {
                    what: format!(
                        "{}: {} is not the disk it was made from: its identity is {found}, expected {expected}",
                        child.display(),
                        parent.display()
                    ),
                    hint: "name the right file, or search it with `ReconnectOptions::search_dirs`; only if you know that nothing was written to this one since, use `ReconnectOptions::ignore_id_mismatch`: otherwise the image reads wrong data".into(),
                });
            }
            other => other?,
        }
        self.accept(parent, link, has_identity)
    }

    /// The parent, if the link leads to it.
    fn connected(&self, link: &ParentLink) -> Result<ChainImage> {
        let child = &self.current;
        let open = &self.options.open;
        let mut named = gate::named_paths(&child.path, link, &open.parents.drives);
        let by_id = by_id::places(&open.files, &child.path, link, child.path.parent().as_slice());
        if by_id.len() > 1 {
            return Err(by_id::several(&child.path, &by_id));
        }
        named.extend(by_id);
        let mut wrong = None;
        for path in named.iter().filter_map(|path| open.files.canonical(path).ok()) {
            let parent =
                ChainImage::referred(open, &path, link.format.unwrap_or(child.info.format)).and_then(|parent| {
                    check_linkage(&child.path, &child.info, link, &path, &parent.info)?;
                    Ok(parent)
                });
            match parent {
                Ok(parent) => return Ok(parent),
                Err(error) => drop(wrong.get_or_insert(error)),
            }
        }
        let looked_for = named.iter().map(|path| path.display().to_string()).collect();
        Err(wrong.unwrap_or_else(|| DiskError::ParentMissing { child: child.path.clone(), looked_for }))
    }

    /// The one file below the searched folders that has the expected identity.
    fn searched(&mut self, link: &ParentLink, progress: &mut Progress<'_>) -> Result<ChainImage> {
        let options = self.options;
        let child = &self.current;
        if link.linkage.is_none() && link.file_id.is_none() {
            let path = link.absolute_path.as_ref().or(link.relative_path.as_ref()).cloned().unwrap_or_default();
            return Err(DiskError::BadOptions {
                what: format!(
                    "{}: a {} image names its parent by its path alone ({path}), and no file at that path fits; a search cannot find it without an identity",
                    child.path.display(),
                    child.info.format
                ),
                hint: "put the parent there, or name it with `ReconnectOptions::parent`".into(),
            });
        }
        let index = match self.index.take() {
            Some(index) => index,
            None => Index::read(&options.open.files, &options.search_dirs, progress)?,
        };
        let index = self.index.insert(index);
        let child = &self.current;
        let fits = |found: &&ChainImage| {
            check_linkage(&child.path, &child.info, link, &found.path, &found.info).is_ok()
                && found.info.format == link.format.unwrap_or(child.info.format)
        };
        let found: Vec<&ChainImage> = index.images.iter().filter(fits).collect();
        match &found[..] {
            [one] => {
                let parent = (*one).clone();
                if index.is_cut() {
                    self.warnings.push(format!(
                        "{}: {} was taken for its parent, but not all files were searched ({}), so another one may have the same identity",
                        child.path.display(),
                        parent.path.display(),
                        index.extent()
                    ));
                }
                self.accept(parent, link, true)
            }
            [] => Err(DiskError::ParentMissing {
                child: child.path.clone(),
                looked_for: vec![format!(
                    "a file with the identity {} ({})",
                    link.linkage.map_or_else(String::new, braced),
                    index.extent()
                )],
            }),
            several => Err(DiskError::BadChain {
                path: child.path.clone(),
                what: format!(
                    "{} files have the identity {} that it expects of its parent: {}; name the right one with `ReconnectOptions::parent`",
                    several.len(),
                    link.linkage.map_or_else(String::new, braced),
                    several.iter().map(|found| found.path.display().to_string()).collect::<Vec<_>>().join(", ")
                ),
            }),
        }
    }

    /// Checks the time of a VHD's last change, and plans a step if the link differs.
    fn accept(&mut self, parent: ChainImage, link: &ParentLink, has_identity: bool) -> Result<ChainImage> {
        let child = &self.current;
        let OpenOptions { files, parents, .. } = &self.options.open;
        let changed = parent_timestamp_warning(files, link, &parent.path);
        if let Some(what) = changed.or_else(|| other_contents(link, &parent.path, &parent.info)) {
            if !parents.ignore_timestamp && !self.options.ignore_id_mismatch {
                return Err(DiskError::BadOptions {
                    what: format!("{}: {what}", child.path.display()),
                    hint: "if the parent was only copied, use `ParentPolicy::ignore_timestamp`".into(),
                });
            }
            self.warnings.push(format!("{}: {what}", child.path.display()));
        }
        let modified_seconds = gate::modified_seconds(files, &parent.path);
        let dir = child.path.parent().unwrap_or(Path::new("/"));
        let place = (&*child.path, child.info.format);
        let new = create::link_to((files, &parent.path), &parent.info, modified_seconds, place, dir)?;
        // A VHDX records neither a time nor a bare name.
        let is_other_time = link.modified_seconds.is_some() && link.modified_seconds != new.modified_seconds;
        let is_other = match link.file_id {
            Some(_) => (link.file_id, link.linkage) != (new.file_id, new.linkage),
            None => (&link.relative_path, &link.absolute_path) != (&new.relative_path, &new.absolute_path),
        };
        let is_new = is_other || !has_identity || is_other_time;
        self.warnings.extend(create::parent_out_of_reach(files, &child.path, &parent.path));
        if is_new {
            self.steps.push(Step {
                child: child.clone(),
                parent: parent.clone(),
                former: link.clone(),
                link: new,
                has_identity,
            });
        }
        Ok(parent)
    }

    /// Images above one whose link will be replaced accept any time of that, the highest first. So
    /// the same call goes on after the process was killed between a new link and the old time.
    fn forget_times(&mut self) -> Result<()> {
        for index in 1..self.steps.len() {
            let (above, below) = (&self.steps[index - 1], &self.steps[index]);
            if below.child.path != above.parent.path || !mark::has_time(&above.former) {
                continue;
            }
            let link = mark::of_any_time(above.former.clone());
            above.write(self.options, &link)?;
            self.steps[index - 1].former = link;
        }
        Ok(())
    }

    /// A new link would remove the mark that a merge has left.
    fn refuse_merged(&self, link: &ParentLink) -> Result<()> {
        if !mark::is_merged(&self.current.info, link) {
            return Ok(());
        }
        Err(DiskError::BadChain {
            path: self.current.path.clone(),
            what: "its data was merged into its parent, and then the merge was interrupted; merge it again, which removes it".into(),
        })
    }
}
