//! Copies one disk into another. Shares data by reflink where possible and skips zeros.
//!
//! ```text
//!   window of the source ─▶ extents ─┬─ zero, unallocated ─▶ skipped (an export is zeroed)
//!                                    ├─ data ─▶ reflink whole blocks, if both files can
//!                                    └─ data ─▶ read ─▶ all zero? skip : write
//! ```
//!
//! `copy.rs` does the copying. With `verify`, the new file is reopened and compared with the
//! source.
//!
//! The copy is written under a temporary name (`DEST.partial`) and renamed, durably, when it is
//! complete and durable. So after a power cut or a `kill -9` no incomplete copy exists under the
//! final name. If anything fails, or the user stops it, the file is removed again.
//!
//! A range whose table entry is damaged (`ExtentKind::Damaged`) ends the conversion. With
//! `skip_damaged` the range stays zero in the copy and is listed (`copy/lost.rs`).
//!
//! An export is written in place. It has its size and old contents, so ranges that are zero in the
//! source are zeroed there.

mod notes;

use crate::{
    CompareOutcome, CreateRequest, Disk, DiskError, OpenOptions, Opened, Place, Progress, Result,
    compare::{Damage, compare_with},
    copy::{Dest, Failure, Job, Lost, Outcome, file_of},
    create::{create_as, format_for, is_there},
    error::file_error,
    error::from_io,
};
use diskwright_image::Format;
use diskwright_store::{BlockDevice, CacheMode, Files};
pub use notes::size_note;
use std::{
    io,
    path::{Path, PathBuf},
};

/// Options for [`convert`].
#[derive(Debug, Clone, Default)]
pub struct ConvertOptions {
    /// How to open the source. The destination uses the same I/O engine. The cache mode given here
    /// is ignored; see `cache`.
    pub source: OpenOptions,
    /// Page cache or O_DIRECT for both disks. `None` selects the faster one: O_DIRECT, but the page
    /// cache for a source that is cached there.
    pub cache: Option<CacheMode>,
    /// Properties of the new image. Its size is at least the source's.
    pub dest: CreateRequest,
    /// Read the copy back and compare it with the source.
    pub verify: bool,
    /// Always copy, never share by reflink.
    pub no_reflink: bool,
    /// Skip damaged ranges of the source. They read as zeros in the copy.
    pub skip_damaged: bool,
}

impl ConvertOptions {
    fn damage(&self) -> Damage {
        if self.skip_damaged { Damage::SkippedInFirst } else { Damage::Fails }
    }
}

/// The result of a conversion.
#[derive(Debug, Clone, Default)]
pub struct ConvertOutcome {
    /// Virtual size of the source in bytes.
    pub size_bytes: u64,
    /// Bytes read and written.
    pub copied_bytes: u64,
    /// Bytes shared by reflink.
    pub cloned_bytes: u64,
    /// Bytes skipped because they read as zeros.
    pub zero_bytes: u64,
    /// Bytes that were read back and equal the source. Lost ranges do not count.
    pub verified_bytes: u64,
    /// Warnings for the user about the source and the copy, one sentence each.
    pub warnings: Vec<String>,
    /// Damaged ranges of the source, which are zero in the copy. Empty without
    /// [`ConvertOptions::skip_damaged`].
    pub lost: Lost,
}

/// Copies a disk into a new image, or into an existing export. Either side may be a URI (see
/// [`Place`]). `progress` counts bytes of the virtual disk; verification counts them a second time.
///
/// # Errors
/// Errors of opening, creating, reading or writing; [`DiskError::DamagedSource`];
/// [`DiskError::VerifyFailed`]; [`DiskError::Stopped`]. A new image is removed on errors, except
/// after a failed verification: then the copy is kept under its partial name, for inspection. An
/// export keeps what was copied so far.
pub fn convert(
    source: impl AsRef<Path>,
    dest: impl AsRef<Path>,
    options: &ConvertOptions,
    progress: &mut Progress<'_>,
) -> Result<ConvertOutcome> {
    let (source_path, dest_path) = (source.as_ref(), dest.as_ref());
    if let Some(parent) = &options.dest.parent {
        // Zeros of the source are not written, so the parent's data would be visible there.
        return Err(DiskError::Usage {
            what: format!(
                "cannot convert into a child of {}: a conversion creates a disk without a parent",
                parent.display()
            ),
            hint: "leave out the parent".into(),
        });
    }
    let into_export = matches!(Place::parse(dest_path)?, Place::Nbd(_));
    let source = open_source(source_path, options)?;
    if into_export {
        return convert_into_export(&source, source_path, dest_path, options, progress);
    }
    let geometry = source.device().geometry();
    let format = format_for(dest_path, options.dest.format)?;
    // A server may have a sector size that the image's format cannot record.
    let sectors = format.driver().logical_sectors_bytes;
    let inherited = (sectors.len() > 1 && sectors.contains(&geometry.logical_sector_bytes)).then_some(geometry);
    let mut request = options.dest.clone();
    request.size_bytes = Some(request.size_bytes.unwrap_or(geometry.size_bytes).max(geometry.size_bytes));
    request.logical_sector_bytes = request.logical_sector_bytes.or(inherited.map(|from| from.logical_sector_bytes));
    request.physical_sector_bytes = request.physical_sector_bytes.or(inherited.map(|from| from.physical_sector_bytes));
    request.format = Some(format);
    let files = &request.files;
    if files.facts(dest_path).is_ok() {
        return Err(is_there(dest_path));
    }
    let partial = partial_path(dest_path);
    // Errors name the final path, except those about the partial file itself.
    let shown = |error: DiskError| error.renamed(&partial, dest_path);
    create_as(dest_path, &partial, &request).map_err(|error| explain_partial(error, &partial, dest_path))?;
    // The first error is returned. The file is ours, created just now.
    let discard = |_: &DiskError| drop(files.remove(&partial));
    let open = OpenOptions { writable: true, format: Some(format), ..dest_options(options) };
    let mut outcome = Disk::open(&partial, &open)
        .and_then(|dest| {
            let warnings = notes::of_copy(geometry, dest_path, &dest);
            let outcome = copy((&source, source_path), (&Opened::Disk(dest), &partial), options, progress)?;
            Ok(ConvertOutcome { warnings: [outcome.warnings.clone(), warnings].concat(), ..outcome })
        })
        .map_err(shown)
        .inspect_err(discard)?;
    if options.verify {
        let compared =
            Disk::open(&partial, &OpenOptions { format: Some(format), ..dest_options(options) }).and_then(|written| {
                let sides = [(source.device(), source_path), (&*written as &dyn BlockDevice, dest_path)];
                compare_with(sides, options.source.engine, progress, options.damage())
            });
        match compared.map_err(shown).inspect_err(discard)? {
            CompareOutcome::Same => outcome.verified_bytes = geometry.size_bytes - outcome.lost.bytes,
            CompareOutcome::Different { offset_bytes } => {
                return Err(verify_failed(&partial, source_path, offset_bytes));
            }
        }
    }
    give_name(files, &partial, dest_path)?;
    Ok(outcome)
}

/// Gives a finished file its name, durably. Removes the file if that fails.
pub(crate) fn give_name(files: &Files, partial: &Path, dest: &Path) -> Result<()> {
    files
        .rename(partial, dest, false)
        .map_err(|source| match source.kind() {
            io::ErrorKind::AlreadyExists => is_there(dest),
            _ => file_error("give the finished file its name", dest, source),
        })
        .inspect_err(|_| drop(files.remove(partial)))?;
    files
        .sync_directory_of(dest)
        .map_err(|source| file_error("make the new file's folder durable", dest, source))
        .inspect_err(|_| drop(files.remove(dest)))
}

/// The temporary name of a file until it is complete.
pub(crate) fn partial_path(dest: &Path) -> PathBuf {
    let mut name = dest.file_name().unwrap_or_default().to_owned();
    name.push(".partial");
    dest.with_file_name(name)
}

pub(crate) fn explain_partial(error: DiskError, partial: &Path, dest: &Path) -> DiskError {
    match error {
        DiskError::File { source, .. } if source.kind() == io::ErrorKind::AlreadyExists => DiskError::BadOptions {
            what: format!(
                "{}: file exists: another conversion to this name is running, or was interrupted",
                partial.display()
            ),
            hint: "if none is running, remove that file and try again".into(),
        },
        other => other.renamed(partial, dest),
    }
}

fn verify_failed(dest: &Path, source: &Path, offset_bytes: u64) -> DiskError {
    DiskError::VerifyFailed { dest: dest.to_owned(), source_path: source.to_owned(), offset_bytes }
}

/// Opens the source, through the page cache if most of its data is cached there.
fn open_source(path: &Path, options: &ConvertOptions) -> Result<Opened> {
    let open = |cache| Opened::open(path, &OpenOptions { writable: false, cache, ..options.source.clone() });
    let source = open(options.cache.unwrap_or(CacheMode::Direct))?;
    let (mut held_bytes, mut all_bytes) = (0.0, 0.0);
    let layers = source.disk().map(|disk| disk.layers());
    for store in layers.iter().flat_map(|layers| layers.iter()).flat_map(|layer| layer.image.stores()) {
        let allocated_bytes = store.allocated_bytes().unwrap_or(0) as f64;
        all_bytes += allocated_bytes;
        held_bytes += allocated_bytes * store.cached_share();
    }
    if options.cache.is_none() && held_bytes > all_bytes / 2.0 { open(CacheMode::PageCache) } else { Ok(source) }
}

fn dest_options(options: &ConvertOptions) -> OpenOptions {
    let cache = options.cache.unwrap_or(CacheMode::Direct);
    let files = options.dest.files.clone();
    OpenOptions { cache, engine: options.source.engine, files, ..OpenOptions::default() }
}

/// Copies into an existing export. Zeros of the source are written unless the export reports them
/// as zeros, and a range beyond the source's end is zeroed.
fn convert_into_export(
    source: &Opened,
    source_path: &Path,
    dest_path: &Path,
    options: &ConvertOptions,
    progress: &mut Progress<'_>,
) -> Result<ConvertOutcome> {
    let asked = &options.dest;
    if asked.format.is_some_and(|format| format != Format::Raw)
        || asked.disk_type.is_some()
        || asked.block_bytes.or(asked.logical_sector_bytes).or(asked.physical_sector_bytes).is_some()
        || asked.preallocate
    {
        return Err(DiskError::Usage {
            what: format!("{}: an export keeps its format, type and sizes", dest_path.display()),
            hint: "leave out the format, the type, block and sector sizes and `CreateRequest::preallocate`".into(),
        });
    }
    let dest = Opened::open(dest_path, &OpenOptions { writable: true, ..dest_options(options) })?;
    let (needed, there) = (source.device().geometry().size_bytes, dest.device().geometry().size_bytes);
    if there < needed {
        return Err(DiskError::BadOptions {
            what: format!("{}: the export has {there} bytes, the source needs {needed}", dest_path.display()),
            hint: "make the export larger".into(),
        });
    }
    let mut outcome = copy((source, source_path), (&dest, dest_path), options, progress)?;
    if options.verify {
        let sides = [(source.device(), source_path), (dest.device(), dest_path)];
        match compare_with(sides, options.source.engine, progress, options.damage())? {
            CompareOutcome::Same => outcome.verified_bytes = outcome.size_bytes - outcome.lost.bytes,
            CompareOutcome::Different { offset_bytes } => {
                return Err(verify_failed(dest_path, source_path, offset_bytes));
            }
        }
    }
    Ok(outcome)
}

fn copy(
    (source, source_path): (&Opened, &Path),
    (dest, dest_path): (&Opened, &Path),
    options: &ConvertOptions,
    progress: &mut Progress<'_>,
) -> Result<ConvertOutcome> {
    let size_bytes = source.device().geometry().size_bytes;
    let free_bytes = diskwright_store::free_bytes(dest_path);
    let holds = if dest.disk().is_some() { Dest::Empty } else { Dest::OldData };
    let job = Job::new(source, (dest, holds), options.source.engine, !options.no_reflink, options.skip_damaged);
    match job.run(progress) {
        Outcome::Done => {}
        Outcome::Stopped => return Err(DiskError::Stopped),
        Outcome::Failed(Failure::Source(range, error)) => {
            return Err(from_io("read it", &file_of(source, source_path, range), error));
        }
        Outcome::Failed(Failure::Dest(error)) => {
            // The partial file is removed, so report the space that the whole copy needs, and what
            // was free before.
            let needed_bytes = dest.disk().and_then(|_| job.data_bytes());
            let error = diskwright_store::explain_shortage(error, dest_path, needed_bytes, free_bytes);
            return Err(from_io("copy into it", dest_path, error));
        }
    }
    dest.close()?;
    progress(size_bytes, size_bytes);
    let lost = job.lost();
    Ok(ConvertOutcome {
        size_bytes,
        copied_bytes: job.copied_bytes.into_inner(),
        cloned_bytes: job.cloned_bytes.into_inner(),
        zero_bytes: job.zero_bytes.into_inner(),
        verified_bytes: 0,
        warnings: source.warnings().to_vec(),
        lost,
    })
}
