//! The parent of a disk in use, opened for writing: what is refused, and how its lock changes
//! hands.
//!
//! The chain has the parent open for reading, under a shared lock. Its file is opened a second
//! time, for writing, first under a shared lock too. Then the first one gives its lock up, and the
//! second one takes that of a writer. So at every moment one of them keeps writers of other
//! programs away.

use crate::{
    DiskError, Result,
    engine::{
        chain::{Chain, Layer, Member},
        device::Origin,
        shared::Shared,
    },
    error::{file_error, to_io},
    life::removal,
    opening::{
        image_file::{Access, ReferenceOptions, open_image},
        merge_mark as mark, relink, siblings,
    },
};
use diskwright_image::{DiskType, ImageWriter, probe, probe::DetectedFormat};
use diskwright_store::{Files, LockMode, Store};
use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

/// Most blocks of a top: one bit of memory for each may be needed.
const BLOCKS_MAX: u64 = 1 << 28;

/// The parent, open for writing. Dropped before [`Parent::join`], it is open for reading again.
pub(super) struct Parent {
    layer: Layer,
    locks: Option<Locks>,
}

/// The files of the parent, before and after.
struct Locks {
    readers: Vec<Arc<dyn Store>>,
    writers: Vec<Arc<dyn Store>>,
    are_kept: bool,
}

impl Drop for Locks {
    /// The files that are open for reading get their lock back.
    fn drop(&mut self) {
        if self.are_kept {
            return;
        }
        // Errors are ignored: then the file is read without a lock.
        // Not `relock`, which could lose the lock to a program that is trying to get it.
        self.writers.iter().for_each(|store| drop(store.share_lock()));
        self.readers.iter().for_each(|store| drop(store.relock(LockMode::Shared)));
    }
}

impl Parent {
    /// Opens the parent of the disk. Refuses what cannot be merged. Other children of the parent
    /// are searched in the disk's folder and in `search_dirs`.
    pub(super) fn open(chain: &Chain, origin: &Origin, search_dirs: &[PathBuf]) -> Result<Self> {
        check(chain, origin)?;
        let layer = &chain.layers()[1];
        let is_written = !chain.members()[1].is_at_rest;
        if is_written {
            // A merge has failed, and could not close it.
            check_siblings(chain, origin, search_dirs)?;
            return Ok(Self { layer: layer.clone(), locks: None });
        }
        let files = &origin.options.files;
        let info = layer.image.info().clone();
        let access = Access {
            format: Some(info.format),
            writable: true,
            locks_later: true,
            cache: origin.options.cache,
            referred: Some(ReferenceOptions { allow_devices: false }),
            parents: Some(&origin.options.parents),
            ..Access::default()
        };
        let (_, stores) = open_image(files, &layer.path, &access, &mut Vec::new())?;
        if stores[0].identity() != layer.image.store().identity() {
            return Err(replaced(&layer.path));
        }
        let locks = Locks { readers: layer.image.stores().to_vec(), writers: stores, are_kept: false };
        lock(&locks)?;
        check_siblings(chain, origin, search_dirs)?;
        let format = DetectedFormat::certain(info.format);
        let image = probe::open_parts(locks.writers.clone(), format, true, info.logical_sector_bytes)?;
        mark::refuse_merged(&layer.path, image.info(), image.info().parent.as_ref())?;
        Ok(Self { layer: Layer { path: layer.path.clone(), image }, locks: Some(locks) })
    }

    pub(super) fn layer(&self) -> &Layer {
        &self.layer
    }

    /// Puts the parent into the chain, where it counts as at rest.
    pub(super) fn join(self, shared: &Arc<Shared>) -> io::Result<()> {
        let Self { layer, locks: Some(mut locks) } = self else { return Ok(()) };
        let mut changed = Ok(());
        let grace = shared.begin_grace(|mutation| match mutation.chain.with_parent(1, 1, layer) {
            Ok(chain) => shared.publish(mutation, chain),
            Err(error) => changed = Err(to_io(error)),
        })?;
        changed?;
        // From now on only the files that are open for writing are in use.
        locks.are_kept = true;
        shared.wait_for(grace)
    }
}

/// Refuses a disk that cannot be merged into its parent while it is in use.
fn check(chain: &Chain, origin: &Origin) -> Result<()> {
    let path = &origin.file;
    let refused = |what: String, hint: &str| Err(DiskError::BadOptions { what, hint: hint.into() });
    let ([top, parent, below @ ..], [_, layer, ..]) = (chain.members(), &**chain.layers()) else {
        return refused(
            format!("{}: it has no parent into which it could be merged", path.display()),
            "only differencing disks have one",
        );
    };
    if chain.geometry.read_only {
        return refused(
            format!("{}: it is open read-only, so it cannot be merged", path.display()),
            "open it for writing",
        );
    }
    relink::require_same_format((path, top.image.info().format), (&layer.path, parent.image.info().format))?;
    removal::refuse_to_lose_snapshots(&*top.image, path)?;
    let can_be_emptied = top.image.writer().is_some_and(ImageWriter::can_forget_blocks);
    let blocks = top.size_bytes.div_ceil(top.block_bytes);
    if top.image.info().disk_type != DiskType::Differencing || !can_be_emptied || blocks > BLOCKS_MAX {
        return refused(
            format!(
                "{}: a {} disk of {blocks} blocks cannot be merged while it is in use",
                path.display(),
                top.image.info().format
            ),
            "close it, and merge it then",
        );
    }
    if layer.path.parent() != path.parent() {
        return refused(
            format!("{} and {} are in different folders", path.display(), layer.path.display()),
            "a parent gets the name of its child only within one folder: close the disk, and merge it then",
        );
    }
    let (wanted_bytes, present_bytes) = (top.size_bytes, parent.image.size_bytes());
    if present_bytes > wanted_bytes {
        return refused(
            format!(
                "{}: it has {wanted_bytes} bytes, and its parent {} has {present_bytes}; merging into a larger disk is not supported",
                path.display(),
                layer.path.display()
            ),
            "enlarge this disk first, or convert it to a new one",
        );
    }
    if let Some(lower) = below.first().filter(|lower| wanted_bytes > present_bytes && lower.size_bytes > present_bytes)
    {
        return refused(
            format!(
                "{}: it would get {wanted_bytes} bytes, and data of its parent {} beyond its {present_bytes} bytes would become visible",
                layer.path.display(),
                lower.image.store().name().display()
            ),
            "convert the disk to a new one",
        );
    }
    // Before the link of the top has changed.
    parent.image.check_as_target(wanted_bytes)?;
    check_name(&origin.options.files, path, top)
}

/// Refuses other children of the parent, and children of the top: they would read other data.
fn check_siblings(chain: &Chain, origin: &Origin, search_dirs: &[PathBuf]) -> Result<()> {
    let files = &origin.options.files;
    let mut dirs: Vec<PathBuf> = origin.file.parent().map(Path::to_owned).into_iter().collect();
    for dir in search_dirs {
        dirs.push(files.canonical(dir).map_err(|source| file_error("find the folder", dir, source))?);
    }
    dirs.dedup();
    let images: Vec<_> = chain.layers()[..2]
        .iter()
        .map(|layer| {
            let real = files.canonical(&layer.path).unwrap_or_else(|_| layer.path.clone());
            siblings::Candidate::of(real, layer.image.info()).now(layer.image.linkage_id())
        })
        .collect();
    let format = chain.top().image.info().format;
    for dir in dirs {
        let found = siblings::children_in(files, &dir, format, &images);
        let (found, not_asked) = found.map_err(|source| file_error("search for children in", &dir, source))?;
        // A snapshot that was cut off may have left the top a second name.
        let own = chain.top().image.store().identity();
        let is_other = |child: &PathBuf| own.is_none() || files.facts(child).ok().map(|facts| facts.identity) != own;
        if let Some((child, of)) = found.into_iter().find(|(child, _)| is_other(child)) {
            return Err(DiskError::BadOptions {
                what: format!(
                    "{} also has {} as its parent, and would read other data after the merge",
                    child.display(),
                    images[of].path.display()
                ),
                hint: "merge or remove that image first, or convert it to a disk of its own".into(),
            });
        }
        if not_asked > 0 {
            return Err(siblings::cannot_rule_out_children(&images[images.len() - 1].path, not_asked));
        }
    }
    Ok(())
}

/// Moves the lock to the files that are open for writing.
fn lock(locks: &Locks) -> Result<()> {
    for store in &locks.readers {
        store.relock(LockMode::None)?;
    }
    for store in &locks.writers {
        store.relock(LockMode::Exclusive)?;
    }
    Ok(())
}

/// Whether a name leads to the file that is open as this image.
pub(super) fn check_name(files: &Files, path: &Path, image: &Member) -> Result<()> {
    let found = files.facts(path).map_err(|source| file_error("find it", path, source))?.identity;
    if image.image.store().identity().is_some_and(|identity| identity != found) {
        return Err(replaced(path));
    }
    Ok(())
}

fn replaced(path: &Path) -> DiskError {
    DiskError::BadOptions {
        what: format!("{}: it was replaced by another file meanwhile", path.display()),
        hint: "put the file back that the disk has open, and try again".into(),
    }
}
