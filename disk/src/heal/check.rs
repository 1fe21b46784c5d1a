//! Checking one image and the links to its parents. Nothing is changed.
//!
//! ```text
//!   path ─▶ store (shared lock) ─▶ format's own check ─▶ findings
//!     └───▶ chain, as far as it can be followed ───────▶ the link that is broken, if one is
//! ```
//!
//! Damage that ends the format's check is a finding like any other. The parents' own contents are
//! not checked: the caller checks each of them by its path ([`Disk::layers`](crate::Disk::layers)).

use crate::{
    ChainScope, Disk, DiskError, OpenOptions, PartRole, Result, check_parts,
    copying::copy::damage_of,
    error::from_io,
    heal::repair::interrupted_repair,
    opening::{
        open::{open_chain, read_without_lock},
        referred::open_each,
    },
    parts_of,
};
use diskwright_image::{CheckReport, Finding, Format, ImageError, Reference, Severity, probe};
use diskwright_store::{BlockDevice, CacheMode, ExtentKind, LockMode, OpenOptions as StoreOptions};
use std::path::Path;

/// Bytes of the disk whose extents are asked for at once.
const WINDOW_BYTES: u64 = 1 << 30;
/// Most ranges that are listed.
const FINDINGS_MAX: usize = 1000;

/// What a check found in one image.
#[derive(Debug)]
pub struct Checked {
    /// The format that was checked.
    pub format: Format,
    /// Findings, and how many blocks are allocated.
    pub report: CheckReport,
    /// Why the chain ends before its base, so that the disk cannot be read. `None` also where the
    /// image itself is so damaged that its chain cannot be asked for.
    pub broken_link: Option<DiskError>,
    /// What the user should know about how the files were read, a sentence each.
    pub warnings: Vec<String>,
}

impl Checked {
    /// Whether the disk can be read: nothing is corrupt, and no link is broken. Leaked space does
    /// not count.
    pub fn is_sound(&self) -> bool {
        self.broken_link.is_none() && self.report.worst() != Some(Severity::Corrupt)
    }
}

/// Checks the image at `path`, and follows its chain. Of the options `writable` and `reach` are
/// ignored.
///
/// # Errors
/// Where the check cannot begin: the file cannot be opened, is in use by a writer, is empty, or has
/// no format that is known. Damage is a finding, not an error.
pub fn check(path: impl AsRef<Path>, options: &OpenOptions) -> Result<Checked> {
    let path = path.as_ref();
    let unlocked = options.force_share.then(|| read_without_lock(path));
    let warnings = unlocked.into_iter().chain(interrupted_repair(&options.files, path)).collect();
    let (format, report) = check_image(path, options)?;
    let reading = OpenOptions { writable: false, scope: ChainScope::Available, ..options.clone() };
    let broken_link = match open_chain(path, &reading) {
        Ok(chain) => chain.broken,
        // The report says more than the failed open.
        Err(_) if report.worst() == Some(Severity::Corrupt) => None,
        Err(error) => Some(error),
    };
    Ok(Checked { format, report, broken_link, warnings })
}

/// Checks the image at `path` alone: neither its parents nor the links to them. Damage that ends
/// the check is a finding. Of the options `writable` and `reach` are ignored.
///
/// # Errors
/// As [`check`].
pub fn check_image(path: &Path, options: &OpenOptions) -> Result<(Format, CheckReport)> {
    let lock = if options.force_share { LockMode::None } else { LockMode::Shared };
    let reading = StoreOptions { writable: false, create_new: false, cache: CacheMode::PageCache, lock };
    let store = options.files.open(path, &reading)?;
    // A raw disk in several files is checked as one.
    if !store.is_block_device()
        && options.format.is_none_or(|format| format == Format::Raw)
        && let PartRole::First(parts) = parts_of(&options.files, path)?
    {
        return Ok((Format::Raw, check_parts(&options.files, store, &parts, lock)?));
    }
    let format =
        options.format.map_or_else(|| probe::probe_damaged(&store, false).map(|verdict| verdict.format), Ok)?;
    if store.len_bytes().is_ok_and(|bytes| bytes == 0) {
        return Err(DiskError::BadOptions {
            what: format!("{}: found 0 bytes, expected a disk", path.display()),
            hint: "if this is the right file, copy it again from its source".into(),
        });
    }
    let driver = format.driver();
    // A file that begins wrongly is a finding of the check below.
    let references = driver.references(&*store).unwrap_or_default();
    let opened = open_each(&options.files, (path, &*store), &references, &options.parents, &reading);
    let (mut stores, mut lost) = (vec![Some(store)], Vec::new());
    for (reference, file) in references.iter().zip(opened) {
        lost.extend(file.as_ref().err().map(|error| lost_file(reference, error)));
        stores.push(file.ok());
    }
    match driver.check_files(&stores).map(|report| (format, report)) {
        Ok((format, mut report)) => {
            report.findings.splice(0..0, lost);
            Ok((format, report))
        }
        Err(ImageError::Corrupt { structure, offset_bytes, found, expected, .. }) => {
            let message = format!("{structure}: found {found}, expected {expected}; the check could not go on");
            let finding = Finding::new(Severity::Corrupt, offset_bytes, structure, found, expected).says(message);
            let findings = lost.into_iter().chain([finding]).collect();
            Ok((format, CheckReport { findings, ..CheckReport::default() }))
        }
        Err(error) => Err(error.into()),
    }
}

/// The ranges of an open disk that its tables do not let be read, as findings: for a view that the
/// check of the file does not follow, such as an internal snapshot.
///
/// # Errors
/// A table cannot be read.
pub fn check_ranges(disk: &Disk) -> Result<Vec<Finding>> {
    let size_bytes = disk.geometry().size_bytes;
    let (mut findings, mut extents) = (Vec::new(), Vec::new());
    for start in (0..size_bytes).step_by(WINDOW_BYTES as usize) {
        extents.clear();
        let len_bytes = WINDOW_BYTES.min(size_bytes - start);
        let path = || disk.layers()[0].path.clone();
        disk.extents(start, len_bytes, &mut extents).map_err(|error| from_io("find what it holds", &path(), error))?;
        for extent in extents.iter().filter(|extent| extent.kind == ExtentKind::Damaged) {
            if findings.len() == FINDINGS_MAX {
                return Ok(findings);
            }
            let (from, until) = (extent.offset_bytes, extent.offset_bytes + extent.len_bytes);
            let found = damage_of(disk, extent).to_string();
            let message = format!("Bytes {from} to {until} of the disk cannot be read: {found}");
            let finding = Finding::new(Severity::Corrupt, 0, "table entry", found, "a place in the file");
            findings.push(finding.says(message));
        }
    }
    Ok(findings)
}

/// The finding for a further file that cannot be opened.
fn lost_file(reference: &Reference, error: &DiskError) -> Finding {
    let (structure, found) = (format!("{} {:?}", reference.kind, reference.name), error.to_string());
    let message = format!("The {structure} cannot be read: {found}.");
    Finding::new(Severity::Corrupt, 0, structure, found, "a file that can be opened").says(message)
}
