//! Opens a chain of images from a path: finds each parent, checks it against the policy, and
//! verifies its identity.
//!
//! ```text
//!   path ─▶ store (locked) ─▶ image ─▶ parent link ─▶ candidates ─▶ gate
//!        ─▶ store ─▶ image ─▶ identity ─▶ ... ─▶ base
//! ```
//!
//! The top is opened as the options say. Parents are always opened read-only, with a shared lock. A
//! child is hostile input: its parent is looked for only where the
//! [`ParentPolicy`](crate::ParentPolicy) allows it (see `gate`), a chain has at most 1,024 images,
//! and a chain with a loop is an error.
//!
//! The top's format is probed unless the options name it. A parent has the format that its child
//! names, or the format of the child, and is never probed. Of the paths that a child has for its
//! parent, the first one whose file has the right identity is used. So a wrong file at the relative
//! path does not hide the right file at the absolute path. If no file fits, the error describes all
//! of them.
//!
//! A raw disk may continue in further files, `disk.001`, `disk.002` and so on: see `parts`. Only
//! the top may do so. `image_file.rs` opens a single image.

use crate::{
    ChainScope, DiskError, OpenOptions, Result,
    engine::chain::{CHAIN_MAX, Layer, too_long},
    engine::track::resume::{self, FoundPoints},
    error::{braced, file_error},
    opening::{
        gate::{self, Candidate, Gate},
        image_file::{Access, ReferenceOptions, open_image},
        merge_mark as mark,
        siblings::{self, SIBLINGS_MAX, Siblings},
    },
};
use diskwright_image::{DiskType, Format, ImageInfo, LinkageId, ParentLink, probe, probe::DetectedFormat};
use diskwright_store::{Files, Store};
use std::{
    collections::HashSet,
    path::{Path, PathBuf},
    sync::Arc,
};
use uuid::Uuid;

/// Tolerance for a parent's time stamp, as file systems and copies round it.
const TIMESTAMP_SLACK_SECONDS: u32 = 2;

/// The open images of a chain, with their locks.
#[derive(Debug)]
pub(crate) struct Chain {
    pub(crate) layers: Vec<Layer>,
    pub(crate) warnings: Vec<String>,
    /// With [`ChainScope::Available`]: the error of the first parent that could not be opened.
    pub(crate) broken: Option<DiskError>,
    /// The points of change tracking of a disk that is open for writing.
    pub(crate) tracks: Option<FoundPoints>,
}

/// Opens the image at `path` and its parents.
pub(crate) fn open_chain(path: &Path, options: &OpenOptions) -> Result<Chain> {
    if options.writable && options.scope != ChainScope::Whole {
        return Err(DiskError::BadOptions {
            what: format!("{}: an image cannot be written without its parents", path.display()),
            hint: "open it read-only".into(),
        });
    }
    if options.writable && options.snapshot.is_some() {
        return Err(DiskError::BadOptions {
            what: format!("{}: an internal snapshot cannot be written", path.display()),
            hint: "open it read-only, or leave out `OpenOptions::snapshot`".into(),
        });
    }
    // Errors are ignored: with the default limit a chain of about a thousand files still opens. A
    // longer one fails later with the system's error.
    let _ = diskwright_store::raise_open_file_limit();
    let mut warnings = Vec::new();
    if options.force_share && !options.writable {
        warnings.push(read_without_lock(path));
    }
    // A writable top is first opened read-only, on a store locked for writing. Opening a VHDX for
    // writing may replay its log, and a disk whose open is refused must stay unchanged.
    let access = Access { writable: options.writable, ..Access::of_top(options) };
    let (top, top_stores) = open_image(&options.files, path, &access, &mut warnings)?;
    if options.writable {
        warnings.extend(top.lost_by_writing().map(|lost| format!("{}: {lost}", path.display())));
    }
    if options.writable && !options.allow_parent_write {
        let Siblings { children, not_asked } = siblings::children_of(&options.files, path, top.info());
        if let Some(child) = children.into_iter().next() {
            return Err(DiskError::HasChildren { path: path.to_owned(), child });
        }
        if not_asked > 0 {
            warnings.push(format!(
                "{}: {not_asked} images in its folder were not checked for children of this image (they cannot be read, or there are more than {SIBLINGS_MAX}); writing to this image damages a child among those",
                path.display()
            ));
        }
    }
    let real = options.files.canonical(path).map_err(|source| file_error("find it", path, source))?;
    let mut walk = ChainWalk {
        options,
        gate: Gate::new(&options.files, &real, &options.parents)?,
        seen: top_stores.iter().filter_map(|store| store.identity()).collect(),
        layers: vec![Layer { path: path.to_owned(), image: top }],
        real: real.clone(),
        locks_parents: false,
        warnings,
    };
    let mut broken = None;
    while options.scope != ChainScope::Top && walk.expects_parent() {
        match walk.step() {
            Ok(stores) => sync_after_merge(options.writable, &walk.layers, &stores)?,
            Err(error) if options.scope == ChainScope::Available => {
                broken = Some(error);
                break;
            }
            Err(error) => return Err(error),
        }
    }
    let ChainWalk { mut layers, mut warnings, .. } = walk;
    let mut tracks = None;
    if options.writable {
        // Before the image changes: opening a VHDX for writing may replay its log.
        tracks = resume::look(&options.files, &real, &layers, &mut warnings);
        let info = layers[0].image.info();
        let (format, sector_bytes) = (info.format, info.logical_sector_bytes);
        layers[0].image = probe::open_parts(top_stores, DetectedFormat::certain(format), true, sector_bytes)?;
    }
    Ok(Chain { layers, warnings, broken, tracks })
}

/// A program that merged the disk while it was in use may have been killed. Its clients' writes are
/// in the parent then, perhaps in the page cache only, and a later flush of the disk reaches only
/// the top. `layers` end with the parent, whose files are `stores`.
fn sync_after_merge(writable: bool, layers: &[Layer], stores: &[Arc<dyn Store>]) -> Result<()> {
    let [top, parent] = layers else { return Ok(()) };
    if writable && top.image.info().parent.as_ref().is_some_and(mark::may_be_copying) {
        let synced = stores.iter().try_for_each(|store| store.sync_data());
        synced.map_err(|source| file_error("make it durable", &parent.path, source))?;
    }
    Ok(())
}

/// A chain whose upper images are locked for writing.
pub(crate) struct LockedChain {
    pub(crate) layers: Vec<Layer>,
    /// The files of the locked images, open for writing. (A VHDX whose log was replayed in memory
    /// reads through another store.)
    pub(crate) stores: Vec<Vec<Arc<dyn Store>>>,
    pub(crate) warnings: Vec<String>,
}

/// Opens the image at `path` (without symbolic links) and its parents read-only. The images down to
/// the first one at a path for which `is_last` holds get the lock of a writer, so that no other
/// program has them open. `None` if there is none.
pub(crate) fn open_locked(
    path: &Path,
    options: &OpenOptions,
    is_last: &dyn Fn(&Path) -> bool,
) -> Result<Option<LockedChain>> {
    // As in `open_chain`.
    let _ = diskwright_store::raise_open_file_limit();
    let mut warnings = Vec::new();
    let access = Access { writable: true, ..Access::of_top(options) };
    let (top, top_stores) = open_image(&options.files, path, &access, &mut warnings)?;
    let mut walk = ChainWalk {
        options,
        gate: Gate::new(&options.files, path, &options.parents)?,
        seen: top_stores.iter().filter_map(|store| store.identity()).collect(),
        layers: vec![Layer { path: path.to_owned(), image: top }],
        real: path.to_owned(),
        locks_parents: true,
        warnings,
    };
    let mut stores = vec![top_stores];
    while walk.expects_parent() {
        let of_parent = walk.step()?;
        if walk.locks_parents {
            stores.push(of_parent);
            walk.locks_parents = !is_last(&walk.real);
        }
    }
    let ChainWalk { layers, warnings, locks_parents, .. } = walk;
    Ok((!locks_parents).then_some(LockedChain { layers, stores, warnings }))
}

/// State of the walk from the top to the base.
struct ChainWalk<'a> {
    options: &'a OpenOptions,
    gate: Gate<'a>,
    /// Identities of the files in the chain.
    seen: HashSet<(u64, u64)>,
    layers: Vec<Layer>,
    /// The path of the lowest layer, without symbolic links.
    real: PathBuf,
    /// Whether the next parent gets the lock of a writer.
    locks_parents: bool,
    warnings: Vec<String>,
}

/// A parent that was opened and identified.
struct VerifiedParent {
    layer: Layer,
    stores: Vec<Arc<dyn Store>>,
    identity: Option<(u64, u64)>,
    warnings: Vec<String>,
}

impl ChainWalk<'_> {
    /// Whether the lowest opened layer has a parent.
    fn expects_parent(&self) -> bool {
        self.layers.last().is_some_and(|child| child.image.info().disk_type == DiskType::Differencing)
    }

    /// Finds, opens and identifies the parent of the lowest layer. Returns its files.
    fn step(&mut self) -> Result<Vec<Arc<dyn Store>>> {
        let Some(child) = self.layers.last() else { return Ok(Vec::new()) };
        if self.layers.len() >= CHAIN_MAX {
            return Err(too_long(&self.layers[0].path));
        }
        let link = child.image.info().parent.clone().ok_or_else(|| DiskError::BadChain {
            path: child.path.clone(),
            what: "it is a differencing disk that names no parent, so its parent's data cannot be found; look for another copy of the file".into(),
        })?;
        let (mut refused, mut outside, mut missing) = (Vec::new(), Vec::new(), Vec::new());
        let candidates = self.gate.candidates(&self.real, &link);
        gate::refuse_several(&child.path, &link, &candidates)?;
        for candidate in candidates {
            match candidate {
                Candidate::Allowed(real) => match self.prove(child, &link, &real) {
                    Ok(proved) => {
                        self.seen.extend(proved.identity);
                        self.gate.opened(&real);
                        self.warnings.extend(proved.warnings);
                        self.layers.push(proved.layer);
                        self.real = real;
                        return Ok(proved.stores);
                    }
                    Err(error) => refused.push(error),
                },
                Candidate::Outside(parent) => {
                    outside.push(DiskError::ParentOutside { child: child.path.clone(), parent });
                }
                Candidate::Missing(place) => missing.push(place),
            }
        }
        Err(no_parent(&child.path, refused.into_iter().chain(outside), missing))
    }

    /// Opens the file at `path`, which has no symbolic links, and checks that it is the parent of
    /// `child`.
    fn prove(&self, child: &Layer, link: &ParentLink, path: &Path) -> Result<VerifiedParent> {
        let (options, files) = (self.options, &self.options.files);
        let is_loop = || DiskError::BadChain {
            path: child.path.clone(),
            what: format!(
                "its parent {} is already in the chain, so the chain is a loop; put the right file in the parent's place",
                path.display()
            ),
        };
        // Checked before the file is locked, as the lock would conflict with our own.
        if files.facts(path).is_ok_and(|facts| self.seen.contains(&facts.identity)) {
            return Err(is_loop());
        }
        let access = Access {
            writable: self.locks_parents,
            format: Some(link.format.unwrap_or(child.image.info().format)),
            snapshot: None,
            referred: Some(ReferenceOptions { allow_devices: options.parents.allow_devices }),
            ..Access::of_top(options)
        };
        let mut warnings = Vec::new();
        let (image, stores) = open_image(files, path, &access, &mut warnings)
            .map_err(|error| explain_parent(error, &child.path, path))?;
        let identity = image.store().identity();
        if identity.is_some_and(|identity| self.seen.contains(&identity)) {
            return Err(is_loop());
        }
        check_linkage(&child.path, child.image.info(), link, path, image.info())?;
        let is_top = self.layers.len() == 1;
        let is_written = self.locks_parents || options.writable && is_top;
        if mark::is_merged(child.image.info(), link) {
            if is_top && !self.locks_parents {
                warn_of_merged(&child.path, path, is_written, &mut warnings)?;
            }
        } else {
            check_timestamp(&child.path, link, (path, image.info()), options, is_written, &mut warnings)?;
        }
        Ok(VerifiedParent { layer: Layer { path: path.to_owned(), image }, stores, identity, warnings })
    }
}

/// The error if no path leads to the parent. Files that were refused come first, those at preferred
/// paths at the front.
fn no_parent(child: &Path, refused: impl Iterator<Item = DiskError>, missing: Vec<String>) -> DiskError {
    let mut refused = refused.peekable();
    let Some(first) = refused.next() else {
        return DiskError::ParentMissing { child: child.to_owned(), looked_for: missing };
    };
    let mut others: Vec<String> = refused.map(|error| error.to_string()).collect();
    others.extend(missing.into_iter().map(|place| format!("{place}: nothing is there")));
    if others.is_empty() { first } else { DiskError::NoParentFits { first: Box::new(first), others } }
}

/// Turns errors of a parent into errors about the chain: a parent of another format, and a parent
/// that is not a regular file.
fn explain_parent(error: DiskError, child: &Path, parent: &Path) -> DiskError {
    match error {
        DiskError::Image(diskwright_image::ImageError::NotAnImage { found, expected, .. }) => DiskError::BadChain {
            path: child.to_owned(),
            what: format!(
                "its parent {} has another format ({found}, expected {expected}); convert one of the two, as only a parent of a {} may have another format",
                parent.display(),
                Format::extensions_of(|driver| driver.child_takes_any_parent)
            ),
        },
        // Not a regular file or block device: a folder, a pipe.
        DiskError::BadOptions { what, .. } => DiskError::BadChain {
            path: child.to_owned(),
            what: format!("its parent cannot be used: {what}; put the parent there"),
        },
        other => other,
    }
}

/// Checks that the parent is the disk from which the child was created.
pub(crate) fn check_linkage(
    child_path: &Path,
    child: &ImageInfo,
    link: &ParentLink,
    parent_path: &Path,
    parent: &ImageInfo,
) -> Result<()> {
    if link.file_id.is_some() && !link.names(parent.disk_id, parent.linkage_id) {
        let id = |id: Option<Uuid>| id.map_or_else(|| "none".to_owned(), |id| braced(id.into()));
        return Err(DiskError::ParentChanged {
            child: child_path.to_owned(),
            parent: parent_path.to_owned(),
            found: id(parent.disk_id),
            expected: id(link.file_id),
        });
    }
    let found = parent.linkage_id;
    if link.file_id.is_none() && !link.accepts(found) {
        return Err(DiskError::ParentChanged {
            child: child_path.to_owned(),
            parent: parent_path.to_owned(),
            found: found.map_or_else(|| "none".to_owned(), braced),
            expected: link.linkage.map_or_else(|| "none".to_owned(), braced),
        });
    }
    if child.logical_sector_bytes != parent.logical_sector_bytes {
        return Err(DiskError::BadChain {
            path: child_path.to_owned(),
            what: format!(
                "it has sectors of {} bytes, but its parent {} has sectors of {}; a chain has one sector size",
                child.logical_sector_bytes,
                parent_path.display(),
                parent.logical_sector_bytes
            ),
        });
    }
    Ok(())
}

/// The warning for a disk that is read with [`OpenOptions::force_share`].
pub fn read_without_lock(path: &Path) -> String {
    format!(
        "{}: read without a lock: if another program writes to it meanwhile, reads may be inconsistent",
        path.display()
    )
}

/// The warning if the parent was last changed at another time than the child recorded.
pub fn parent_timestamp_warning(files: &Files, link: &ParentLink, parent_path: &Path) -> Option<String> {
    let expected = link.modified_seconds.filter(|&seconds| seconds != 0)?;
    let found = gate::modified_seconds(files, parent_path)?;
    (found.abs_diff(expected) > TIMESTAMP_SLACK_SECONDS).then(|| {
        format!(
            "the parent {} was last changed at {found} s after 2000-01-01, but the child recorded {expected}: the parent was written to, or copied without keeping its times",
            parent_path.display()
        )
    })
}

/// The warning if the parent of a VDI has other contents than the child recorded.
pub(crate) fn other_contents(link: &ParentLink, parent_path: &Path, parent: &ImageInfo) -> Option<String> {
    (link.file_id.is_some() && !link.accepts(parent.linkage_id)).then(|| {
        let id = |id: Option<LinkageId>| id.map_or_else(|| "none".to_owned(), braced);
        format!(
            "the parent {} has other contents than the child recorded ({}, not {}): it was written to, or VirtualBox merged a snapshot into it",
            parent_path.display(),
            id(parent.linkage_id),
            id(link.linkage)
        )
    })
}

/// An image whose data was merged into its parent, but which was not removed, can be read. It
/// cannot be written, as the end of the merge removes it.
fn warn_of_merged(child: &Path, parent: &Path, is_written: bool, warnings: &mut Vec<String>) -> Result<()> {
    let what = format!(
        "its data was merged into {}, and then the merge was interrupted; merge it again, which removes it",
        parent.display()
    );
    if is_written {
        return Err(DiskError::BadChain { path: child.to_owned(), what });
    }
    warnings.push(format!("{}: {what}", child.display()));
    Ok(())
}

/// A VHD keeps its unique id when it is written, so its child also records the time of the parent's
/// last change. A copy that did not keep the time looks the same as a changed parent. For this
/// reason a read-only open only warns.
fn check_timestamp(
    child_path: &Path,
    link: &ParentLink,
    (parent_path, parent): (&Path, &ImageInfo),
    options: &OpenOptions,
    is_written: bool,
    warnings: &mut Vec<String>,
) -> Result<()> {
    let told = parent_timestamp_warning(&options.files, link, parent_path);
    let told = told.or_else(|| other_contents(link, parent_path, parent));
    let Some(what) = told.filter(|_| !options.parents.ignore_timestamp) else { return Ok(()) };
    if is_written {
        return Err(DiskError::BadChain {
            path: child_path.to_owned(),
            what: format!("{what}; if the parent was not written to, use `ParentPolicy::ignore_timestamp`"),
        });
    }
    warnings.push(format!("{}: {what}", child_path.display()));
    Ok(())
}
