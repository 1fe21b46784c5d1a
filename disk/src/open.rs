//! From a path to a chain of images, each parent found, allowed, and proved to be the right one.
//!
//! ```text
//!   path ─▶ store (locked) ─▶ image ─▶ parent link ─▶ candidates ─▶ gate ─▶ store ─▶ image ─▶ identity ─▶ ... ─▶ base
//! ```
//!
//! The top is opened as the caller wants it; parents are always opened read-only, with a lock that readers share. A
//! child is hostile input: its parent is looked for only where the [`ParentPolicy`] lets it lie (see `gate`), a chain is at
//! most 1,024 long, and an image that is in the chain already ends it with an error.
//!
//! The top's format is probed unless it is said; a parent has the format of its child and is never probed. Of the places
//! that a child names for its parent the first is taken whose file proves to be the parent: a wrong file at the relative path
//! does not hide the right one at the absolute path. Where none does, the error tells all of them.
//!
//! A raw disk may continue in further files, `disk.001`, `disk.002` and so on: see `parts`. Only the top may.

use crate::{
    DiskError, Result,
    chain::Layer,
    error::braced,
    gate::{self, Candidate, Gate, SIBLINGS_MAX, Siblings},
    parts::{Named, parts_of},
};
use diskwright_image::{DiskType, Format, Image, ImageInfo, ParentLink, probe, probe::Verdict};
use diskwright_store::{CacheMode, EngineKind, Files, LockMode, Store};
use std::{
    collections::HashSet,
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

/// Longest chain, as in the paper and in Windows.
pub const CHAIN_MAX: usize = 1024;

/// A parent's time stamp may differ by this much: file systems and copies round.
const TIMESTAMP_SLACK_SECONDS: u32 = 2;

/// Which parents may be opened.
#[derive(Debug, Clone, Default)]
pub struct ParentPolicy {
    /// Folders, besides those of the images already opened, beneath which parents may lie.
    pub allowed_dirs: Vec<PathBuf>,
    /// Any place will do.
    pub allow_any: bool,
    /// Windows drives and where they are here: `('C', "/mnt/c")`. Paths on other drives are passed over.
    pub drives: Vec<(char, PathBuf)>,
    /// A parent may be a block device, and not only a regular file.
    pub allow_devices: bool,
    /// Write to a differencing VHD although its parent file's time stamp is not the one that the child recorded.
    pub ignore_timestamp: bool,
}

/// How much of a chain is opened. But for the whole, only to be read: what a layer that is missing holds reads as zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Reach {
    /// All of it, to the disk that has no parent, or none.
    #[default]
    Whole,
    /// As far as it can be followed. What stopped that is told by [`Disk::broken_link`](crate::Disk::broken_link).
    Found,
    /// The top image alone.
    Top,
}

/// How to open a disk.
#[derive(Debug, Clone, Default)]
pub struct OpenOptions {
    /// For writing.
    pub writable: bool,
    /// Page cache or O_DIRECT, for payload.
    pub cache: CacheMode,
    /// What moves the bytes when the disk itself does (queues say their own).
    pub engine: EngineKind,
    /// The top image's format, where the user says it; else name and contents must agree on it (see
    /// [`probe`]).
    pub format: Option<Format>,
    /// Which parents may be opened.
    pub parents: ParentPolicy,
    /// Write even though another image in the folder names this one as its parent.
    pub allow_parent_write: bool,
    /// Take no lock on a disk that is opened read-only, so that another program may have it open for writing. What is read may
    /// then be of no single moment; a warning says so.
    pub force_share: bool,
    /// How much of the chain must be there.
    pub reach: Reach,
    /// Look at what is written, and make a write of nothing but zeros a change of metadata wherever that spares space, as Hyper-V's
    /// dynamic disks do. It costs a look at every buffer. Fixed disks, whose space is there, store zeros like anything else.
    pub detect_zeroes: bool,
    /// Most memory that the map of who owns each block may take, in bytes; the tables of images count too.
    /// `None` for [`MAP_MEMORY_BYTES`](crate::MAP_MEMORY_BYTES).
    pub map_memory_bytes: Option<u64>,
    /// Where paths lead.
    pub files: Files,
}

/// A chain, open.
#[derive(Debug)]
pub(crate) struct Chain {
    pub(crate) layers: Vec<Layer>,
    pub(crate) warnings: Vec<String>,
    /// Why it ends before its base, with [`Reach::Found`].
    pub(crate) broken: Option<DiskError>,
}

/// Opens the image at `path` and its parents.
pub(crate) fn open_chain(path: &Path, options: &OpenOptions) -> Result<Chain> {
    if options.writable && options.reach != Reach::Whole {
        return Err(DiskError::BadOptions {
            what: format!("{}: an image cannot be written without its parents", path.display()),
            hint: "open it read-only".into(),
        });
    }
    // Without it a chain of up to about a thousand disks still opens; a longer one then fails with the system's own reason.
    let _ = diskwright_store::raise_open_file_limit();
    let mut warnings = Vec::new();
    if options.force_share && !options.writable {
        warnings.push(read_without_lock(path));
    }
    // Also for writing it is first opened for reading, on a store that is locked for writing: to open a VHDX for writing may be to
    // replay its log, and a disk that is refused in the end stays as it is.
    let access = Access { writable: options.writable, ..Access::of_top(options) };
    let (top, top_stores) = open_image(&options.files, path, &access, &mut warnings)?;
    if options.writable && !options.allow_parent_write {
        let Siblings { child, not_asked } = gate::siblings_of(&options.files, path, top.info());
        if let Some(child) = child {
            return Err(DiskError::HasChildren { path: path.to_owned(), child });
        }
        if not_asked > 0 {
            warnings.push(format!(
                "{}: {SIBLINGS_MAX} images of its folder were asked whether they are its children, {not_asked} were not; a child of it among those would be damaged",
                path.display()
            ));
        }
    }
    let real = options.files.canonical(path).map_err(|source| file_error("find", path, source))?;
    let mut descent = Descent {
        options,
        gate: Gate::new(&options.files, &real, &options.parents)?,
        seen: top_stores.iter().filter_map(|store| store.identity()).collect(),
        layers: vec![Layer { path: path.to_owned(), image: top }],
        real,
        warnings,
    };
    let mut broken = None;
    while options.reach != Reach::Top && descent.expects_parent() {
        match descent.step() {
            Ok(()) => {}
            Err(error) if options.reach == Reach::Found => {
                broken = Some(error);
                break;
            }
            Err(error) => return Err(error),
        }
    }
    let Descent { mut layers, warnings, .. } = descent;
    if options.writable {
        let info = layers[0].image.info();
        let (format, sector_bytes) = (info.format, info.logical_sector_bytes);
        layers[0].image = probe::open_parts(top_stores, Verdict::told(format), true, sector_bytes)?;
    }
    Ok(Chain { layers, warnings, broken })
}

/// On the way down from a top.
struct Descent<'a> {
    options: &'a OpenOptions,
    gate: Gate<'a>,
    /// Files that are in the chain.
    seen: HashSet<(u64, u64)>,
    layers: Vec<Layer>,
    /// The lowest layer's path without symbolic links.
    real: PathBuf,
    warnings: Vec<String>,
}

/// A parent that was found, opened and proved.
struct Proved {
    layer: Layer,
    identity: Option<(u64, u64)>,
    warnings: Vec<String>,
}

impl Descent<'_> {
    /// Whether the lowest layer so far has a parent.
    fn expects_parent(&self) -> bool {
        self.layers.last().is_some_and(|child| child.image.info().disk_type == DiskType::Differencing)
    }

    /// Finds, opens and proves the parent of the lowest layer.
    fn step(&mut self) -> Result<()> {
        let Some(child) = self.layers.last() else { return Ok(()) };
        if self.layers.len() >= CHAIN_MAX {
            return Err(too_long(&self.layers[0].path));
        }
        let link = child.image.info().parent.clone().ok_or_else(|| DiskError::BadChain {
            path: child.path.clone(),
            what: "it is a differencing disk that names no parent, so what it does not hold itself is lost; look for another copy of the file".into(),
        })?;
        let (mut refused, mut outside, mut missing) = (Vec::new(), Vec::new(), Vec::new());
        for candidate in self.gate.candidates(&self.real, &link) {
            match candidate {
                Candidate::Allowed(real) => match self.prove(child, &link, &real) {
                    Ok(proved) => {
                        self.seen.extend(proved.identity);
                        self.gate.opened(&real);
                        self.warnings.extend(proved.warnings);
                        self.layers.push(proved.layer);
                        self.real = real;
                        return Ok(());
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

    /// Opens what is at `path`, which has no symbolic links, and proves that it is the parent of `child`.
    fn prove(&self, child: &Layer, link: &ParentLink, path: &Path) -> Result<Proved> {
        let (options, files) = (self.options, &self.options.files);
        let is_loop = || DiskError::BadChain {
            path: child.path.clone(),
            what: format!(
                "its parent {} is already in the chain, so the chain is a loop; put the right file in the parent's place",
                path.display()
            ),
        };
        // Before it is locked: the lock of a writer would be met by itself.
        if files.facts(path).is_ok_and(|facts| self.seen.contains(&facts.identity)) {
            return Err(is_loop());
        }
        let access = Access {
            format: Some(child.image.info().format),
            referred: Some(Referred { allow_devices: options.parents.allow_devices }),
            ..Access::of_top(options)
        };
        let mut warnings = Vec::new();
        let (image, _) = open_image(files, path, &access, &mut warnings)
            .map_err(|error| explain_parent(error, &child.path, path))?;
        let identity = image.store().identity();
        if identity.is_some_and(|identity| self.seen.contains(&identity)) {
            return Err(is_loop());
        }
        check_linkage(&child.path, child.image.info(), link, path, image.info())?;
        check_timestamp(&child.path, link, path, options, self.layers.len() == 1, &mut warnings)?;
        Ok(Proved { layer: Layer { path: path.to_owned(), image }, identity, warnings })
    }
}

/// Why none of the places that a child names is its parent's: the files that were refused first, the most telling at the front.
fn no_parent(child: &Path, refused: impl Iterator<Item = DiskError>, missing: Vec<String>) -> DiskError {
    let mut refused = refused.peekable();
    let Some(first) = refused.next() else {
        return DiskError::ParentMissing { child: child.to_owned(), looked_for: missing };
    };
    let mut others: Vec<String> = refused.map(|error| error.to_string()).collect();
    others.extend(missing.into_iter().map(|place| format!("{place}: nothing is there")));
    if others.is_empty() { first } else { DiskError::NoParentFits { first: Box::new(first), others } }
}

/// How one image file is opened.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Access {
    /// Its format, where it is known.
    pub(crate) format: Option<Format>,
    /// Whether the store is for writing. (The image is for reading.)
    pub(crate) writable: bool,
    /// Page cache or O_DIRECT.
    pub(crate) cache: CacheMode,
    /// Without a lock, unless it is for writing.
    pub(crate) force_share: bool,
    /// Another file names it, by a path that has no symbolic links; the user did not.
    pub(crate) referred: Option<Referred>,
}

/// What holds for a file that another file names.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Referred {
    /// It may be a block device.
    pub(crate) allow_devices: bool,
}

impl Access {
    /// As the options say, but read-only.
    fn of_top(options: &OpenOptions) -> Self {
        let &OpenOptions { format, cache, force_share, .. } = options;
        Self { format, cache, force_share, ..Self::default() }
    }
}

/// An image with its files, as they were opened.
pub(crate) type OpenImage = (Arc<dyn Image>, Vec<Arc<dyn Store>>);

/// Opens one image, and gives it with its files: several only for a raw disk that continues in further files. With O_DIRECT, an
/// image whose payload lies where the device cannot reach it directly is opened again through the page cache, and a
/// warning says so.
pub(crate) fn open_image(files: &Files, path: &Path, access: &Access, warnings: &mut Vec<String>) -> Result<OpenImage> {
    let &Access { writable, cache, .. } = access;
    let lock = match (writable, access.force_share) {
        (true, _) => LockMode::Exclusive,
        (false, false) => LockMode::Shared,
        (false, true) => LockMode::None,
    };
    let options = diskwright_store::OpenOptions { writable, create_new: false, cache, lock };
    let store = match access.referred {
        None => files.open(path, &options)?,
        Some(Referred { allow_devices }) => files.open_canonical(path, allow_devices, &options)?,
    };
    let sector_bytes = store.sector_bytes().logical_bytes.clamp(512, 4096);
    let raw_sector_bytes = if store.is_block_device() { sector_bytes } else { 512 };
    let named = match access.format {
        None | Some(Format::Raw) if access.referred.is_none() && !store.is_block_device() => parts_of(files, path)?,
        _ => Named::Alone,
    };
    let mut stores = vec![store];
    if let Named::First(parts) = &named {
        parts.whole(path)?;
        let later = parts.open_later(files, &*stores[0], &options)?;
        stores.extend(later);
    }
    let verdict = match (access.format, &stores[..]) {
        (Some(format), _) => Verdict::told(format),
        (None, [first, .., last]) => probe::probe_parts(&**first, &**last)?,
        (None, stores) => probe::probe(&*stores[0], writable)?,
    };
    if let (Named::Later { beside }, None) = (&named, access.format) {
        warn_of_part(path, beside, writable, warnings)?;
    }
    let aligned = |store: &Arc<dyn Store>| store.data_file().map_or(1, |file| file.alignment_bytes);
    let shown =
        |store: &Arc<dyn Store>| if Arc::ptr_eq(store, &stores[0]) { path } else { store.name() }.display().to_string();
    // Of several files the first is named.
    if let Some(store) = stores.iter().find(|store| writable && !store.is_locked()) {
        warnings.push(format!(
            "{}: nothing locks it; make sure that no other program writes to it meanwhile",
            shown(store)
        ));
    }
    if cache == CacheMode::Direct
        && let Some(store) = stores.iter().find(|store| store.data_file().is_some() && aligned(store) <= 1)
    {
        warnings.push(format!("{}: the file system has no O_DIRECT; the page cache is used", shown(store)));
    }
    let image = probe::open_parts(stores.clone(), verdict, false, raw_sector_bytes)?;
    if verdict.is_guess {
        warnings.push(format!(
            "{}: taken as {}, which its contents look like; its name does not promise that, so it can only be read (--format says what it is)",
            path.display(),
            verdict.format
        ));
    }
    check_size(path, image.info())?;
    let needed_bytes = stores.iter().map(aligned).max().unwrap_or(1);
    let info = image.info();
    if needed_bytes > info.payload_alignment_bytes.min(info.logical_sector_bytes) && cache == CacheMode::Direct {
        let (payload, sector) = (info.payload_alignment_bytes, info.logical_sector_bytes);
        warnings.push(format!(
            "{}: its device needs O_DIRECT requests at multiples of {needed_bytes} bytes, but the disk has payload at multiples of {payload} and sectors of {sector}; the page cache is used",
            path.display()
        ));
        drop(image);
        drop(stores);
        return open_image(files, path, &Access { cache: CacheMode::PageCache, ..*access }, warnings);
    }
    Ok((image, stores))
}

/// A later part of a disk in several files can be read by itself, with a warning. It is written only where the user says its format.
fn warn_of_part(path: &Path, beside: &Path, writable: bool, warnings: &mut Vec<String>) -> Result<()> {
    let what = format!(
        "{}: by its name it is a later part of a raw disk in several files, as {} lies beside it",
        path.display(),
        beside.display()
    );
    if writable {
        return Err(DiskError::BadOptions {
            what: format!("{what}, and a part is not written by itself"),
            hint: "open the first part (.000 or .001), or, if this file is a disk by itself, say --format raw".into(),
        });
    }
    warnings.push(format!("{what}; only this file is read: open the first part (.000 or .001) for the whole disk"));
    Ok(())
}

/// A disk has a sector at least, and a VHD with blocks at most what its 32-bit table can reach. (VHDX is held to its limits by its image.)
fn check_size(path: &Path, info: &ImageInfo) -> Result<()> {
    let max_bytes = if info.has_blocks { info.format.driver().size_max_bytes } else { u64::MAX };
    if (1..=max_bytes).contains(&info.size_bytes) {
        return Ok(());
    }
    let expected = match max_bytes {
        u64::MAX => "at least one sector".to_owned(),
        _ => format!("at least one sector, and at most {max_bytes} bytes"),
    };
    Err(DiskError::BadChain {
        path: path.to_owned(),
        what: format!(
            "found a {} {} disk with a size of {} bytes, expected {expected}; if this is the right file, get it anew from where it came from",
            info.disk_type, info.format, info.size_bytes
        ),
    })
}

/// A parent of another format than its child's gets an error about the chain, not about a signature; one that is no file, one that names the child.
fn explain_parent(error: DiskError, child: &Path, parent: &Path) -> DiskError {
    match error {
        DiskError::Image(diskwright_image::ImageError::NotAnImage { found, expected, .. }) => DiskError::BadChain {
            path: child.to_owned(),
            what: format!(
                "its parent {} has another format ({found}, expected {expected}); VHD and VHDX do not mix in a chain: convert one of them",
                parent.display()
            ),
        },
        // No file that can be a disk: a folder, a pipe.
        DiskError::BadOptions { what, .. } => DiskError::BadChain {
            path: child.to_owned(),
            what: format!("its parent cannot be used: {what}; put the parent there"),
        },
        other => other,
    }
}

/// The parent must be the disk that the child was made from.
pub(crate) fn check_linkage(
    child_path: &Path,
    child: &ImageInfo,
    link: &ParentLink,
    parent_path: &Path,
    parent: &ImageInfo,
) -> Result<()> {
    let found = parent.linkage_id;
    if found != Some(link.linkage) && (found.is_none() || found != link.linkage2) {
        return Err(DiskError::ParentChanged {
            child: child_path.to_owned(),
            parent: parent_path.to_owned(),
            found: found.map_or_else(|| "none".to_owned(), braced),
            expected: braced(link.linkage),
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

/// What is to be told where a disk is read with [`OpenOptions::force_share`].
pub fn read_without_lock(path: &Path) -> String {
    format!(
        "{}: read without a lock: if another program writes to it meanwhile, what is read may be of no single moment",
        path.display()
    )
}

/// What is to be told where the parent's last change is not at the time that the child recorded.
pub fn parent_time_doubt(files: &Files, link: &ParentLink, parent_path: &Path) -> Option<String> {
    let expected = link.modified_seconds.filter(|&seconds| seconds != 0)?;
    let found = gate::modified_seconds(files, parent_path)?;
    (found.abs_diff(expected) > TIMESTAMP_SLACK_SECONDS).then(|| {
        format!(
            "the parent {} was last changed at {found} s after 2000-01-01, but the child recorded {expected}: the parent was written to, or copied without keeping its times",
            parent_path.display()
        )
    })
}

/// A VHD keeps its unique id when it is written to, so its child also records the time of the parent's last change. A
/// copy that did not keep times looks the same as a change, which is why a read-only open only warns.
fn check_timestamp(
    child_path: &Path,
    link: &ParentLink,
    parent_path: &Path,
    options: &OpenOptions,
    is_top: bool,
    warnings: &mut Vec<String>,
) -> Result<()> {
    let told = parent_time_doubt(&options.files, link, parent_path);
    let Some(what) = told.filter(|_| !options.parents.ignore_timestamp) else { return Ok(()) };
    if options.writable && is_top {
        return Err(DiskError::BadChain {
            path: child_path.to_owned(),
            what: format!("{what}; if you know that it was only copied, go on with --ignore-parent-timestamp"),
        });
    }
    warnings.push(format!("{}: {what}", child_path.display()));
    Ok(())
}

/// The error for a chain that is too long.
pub(crate) fn too_long(top: &Path) -> DiskError {
    DiskError::BadChain {
        path: top.to_owned(),
        what: format!(
            "its chain of parents is longer than {CHAIN_MAX} disks; convert a disk further down the chain to a new image and build on that"
        ),
    }
}

/// Wraps an error of the file system.
pub(crate) fn file_error(doing: &'static str, path: &Path, source: io::Error) -> DiskError {
    DiskError::File { doing, path: path.to_owned(), source }
}
