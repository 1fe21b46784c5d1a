//! Opens one image with its files: locks and probes it. The image is always opened read-only first.
//!
//! ```text
//!   path ─▶ store (locked) ─▶ later files of a split raw disk ─▶ format: given or probed
//!        ─▶ further files that the image names (`referred`) ─▶ image
//! ```
//!
//! The user may name the top of a chain, and its format is probed unless it is given. A file that
//! another image names (a parent) has a given format, and its path has no symbolic links.

use crate::{
    DiskError, OpenOptions, ParentPolicy, Result,
    error::file_error,
    heal::repair::refuse_unfinished,
    opening::{
        parts::{PartRole, parts_of},
        referred::open_referred,
    },
};
use diskwright_image::{Format, Image, ImageInfo, probe, probe::DetectedFormat};
use diskwright_store::{CacheMode, Files, LockMode, Store};
use std::{path::Path, sync::Arc};

/// How an image file is opened.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Access<'a> {
    /// The format; `None` to probe it.
    pub(crate) format: Option<Format>,
    /// Whether the store is opened for writing. (The image is always opened for reading.)
    pub(crate) writable: bool,
    /// The store is opened for writing, but with the lock of a reader for now.
    pub(crate) locks_later: bool,
    pub(crate) cache: CacheMode,
    /// Take no lock, unless the store is opened for writing.
    pub(crate) force_share: bool,
    /// The internal snapshot that is opened in place of the disk.
    pub(crate) snapshot: Option<&'a str>,
    /// Set if another image names this file, by a path without symbolic links.
    pub(crate) referred: Option<ReferenceOptions>,
    /// Which further files of the image may be opened; `None` for those beneath its folder.
    pub(crate) parents: Option<&'a ParentPolicy>,
}

/// Options for a file that another image names.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReferenceOptions {
    /// The file may be a block device.
    pub(crate) allow_devices: bool,
}

impl<'a> Access<'a> {
    /// Access to the top of a chain with these options, but read-only.
    pub(crate) fn of_top(options: &'a OpenOptions) -> Self {
        let &OpenOptions { format, cache, force_share, .. } = options;
        let (snapshot, parents) = (options.snapshot.as_deref(), Some(&options.parents));
        Self { format, snapshot, cache, force_share, parents, ..Self::default() }
    }
}

/// An open image and its open files.
pub(crate) type OpenImage = (Arc<dyn Image>, Vec<Arc<dyn Store>>);

/// Opens an image and returns it with its files: the parts of a raw disk, or the further files that
/// the image names. If O_DIRECT is requested but the payload is not aligned to the device, the
/// image is opened through the page cache instead, with a warning. Doubts about the image's
/// contents (`ImageInfo::doubts`) become warnings here, so that everyone who reads through the
/// image tells them.
pub(crate) fn open_image(
    files: &Files,
    path: &Path,
    access: &Access<'_>,
    warnings: &mut Vec<String>,
) -> Result<OpenImage> {
    let &Access { writable, cache, .. } = access;
    let lock = match (writable, access.force_share) {
        (true, _) if !access.locks_later => LockMode::Exclusive,
        (true, _) => LockMode::Shared,
        (false, false) => LockMode::Shared,
        (false, true) => LockMode::None,
    };
    let options = diskwright_store::OpenOptions { writable, create_new: false, cache, lock };
    let store = match access.referred {
        None => files.open(path, &options)?,
        Some(ReferenceOptions { allow_devices }) => files.open_canonical(path, allow_devices, &options)?,
    };
    if writable && !store.is_block_device() {
        refuse_unfinished(files, path, &*store, warnings)?;
    }
    let sector_bytes = store.sector_bytes().logical_bytes.clamp(512, 4096);
    // A pushed disk is a disk by itself. What a guest has written into it is never probed.
    let is_pushed = store.contents_id().is_some();
    let format = if is_pushed { Some(Format::Raw) } else { access.format };
    let raw_sector_bytes = if store.is_block_device() || is_pushed { sector_bytes } else { 512 };
    let named = match format {
        None | Some(Format::Raw) if access.referred.is_none() && !store.is_block_device() && !is_pushed => {
            parts_of(files, path)?
        }
        _ => PartRole::Alone,
    };
    let mut stores = vec![store];
    if let PartRole::First(parts) = &named {
        parts.whole(path)?;
        let later = parts.open_later(files, &*stores[0], &options)?;
        stores.extend(later);
    }
    let verdict = match (format, &stores[..]) {
        (Some(format), _) => DetectedFormat::certain(format),
        (None, [first, .., last]) => probe::probe_parts(&**first, &**last)?,
        (None, stores) => probe::probe(&*stores[0], writable)?,
    };
    if let (PartRole::Later { beside }, None) = (&named, format) {
        warn_of_part(path, beside, writable, warnings)?;
    }
    if !access.force_share {
        refuse_used(files, path, verdict.format)?;
    }
    let policy = ParentPolicy::default();
    let references = probe::references(&*stores[0], verdict)?;
    let further = open_referred(files, (path, &*stores[0]), &references, access.parents.unwrap_or(&policy), &options)?;
    stores.extend(further);
    let aligned = |store: &Arc<dyn Store>| store.data_file().map_or(1, |file| file.alignment_bytes);
    let shown =
        |store: &Arc<dyn Store>| if Arc::ptr_eq(store, &stores[0]) { path } else { store.name() }.display().to_string();
    // The warning names the first of several files.
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
    let image = match access.snapshot {
        None => probe::open_parts(stores.clone(), verdict, false, raw_sector_bytes)?,
        Some(snapshot) => probe::open_snapshot(stores.clone(), verdict, snapshot)?,
    };
    if verdict.is_guess {
        warnings.push(format!(
            "{}: opened as {} because of its contents; its extension does not say so, so it is read-only (name the format with `OpenOptions::format`)",
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
            "{}: O_DIRECT on its device needs an alignment of {needed_bytes} bytes, but the disk has an alignment of {payload} and sectors of {sector} bytes; the page cache is used",
            path.display()
        ));
        drop(image);
        drop(stores);
        return open_image(files, path, &Access { cache: CacheMode::PageCache, ..*access }, warnings);
    }
    warnings.extend(image.info().doubts.iter().map(|doubt| format!("{}: {doubt}", path.display())));
    Ok((image, stores))
}

/// Refuses a file whose name leads to another one by now. Between its open and its lock, a merge or
/// a snapshot may have put another image in its place.
pub(crate) fn refuse_replaced(files: &Files, shown: &Path, real: &Path, store: &dyn Store) -> Result<()> {
    let found = files.facts(real).map_err(|source| file_error("find it", shown, source))?.identity;
    if Some(found) == store.identity() {
        return Ok(());
    }
    Err(DiskError::BadOptions {
        what: format!("{}: it was replaced by another file meanwhile", shown.display()),
        hint: "try again".into(),
    })
}

/// Refuses an image beside which another program has put the mark that it uses it.
fn refuse_used(files: &Files, path: &Path, format: Format) -> Result<()> {
    let Some(suffix) = format.driver().in_use_suffix() else { return Ok(()) };
    let mut mark = path.as_os_str().to_owned();
    mark.push(suffix);
    let mark = Path::new(&mark);
    if files.facts(mark).is_err() {
        return Ok(());
    }
    Err(DiskError::BadOptions {
        what: format!("{}: another program has it open, as {} shows", path.display(), mark.display()),
        hint: "shut that virtual machine down; if none runs, remove the mark; to read it anyway, use `OpenOptions::force_share`".into(),
    })
}

/// A later part of a disk in several files can be read by itself, with a warning. It can be written
/// only if the user names its format.
fn warn_of_part(path: &Path, beside: &Path, writable: bool, warnings: &mut Vec<String>) -> Result<()> {
    let what = format!(
        "{}: its name is that of a later part of a raw disk in several files, and {} exists",
        path.display(),
        beside.display()
    );
    if writable {
        return Err(DiskError::BadOptions {
            what: format!("{what}; a single part cannot be opened for writing"),
            hint: "open the first part (.000 or .001), or, if this file is a disk by itself, use `OpenOptions::format` = raw".into(),
        });
    }
    warnings.push(format!("{what}; only this file is read: open the first part (.000 or .001) for the whole disk"));
    Ok(())
}

/// Checks that a disk has at least one sector and a VHD with blocks at most the size that its
/// 32-bit table can address. (A VHDX image checks its own limits.)
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
            "found a {} {} disk with a size of {} bytes, expected {expected}; if this is the right file, get another copy from its source",
            info.disk_type, info.format, info.size_bytes
        ),
    })
}
