//! Detects the format of a file and opens the image.
//!
//! Name and contents must agree, or the user decides:
//!
//! ```text
//!   the extension says    the contents show        opened as
//!   -------------------   ----------------------   -------------------------------------------
//!   (a block device)      not read                 raw
//!   raw                   not read                 raw
//!   one of our formats    that one (and others)    that one
//!   one of our formats    nothing, or another      error
//!   a foreign format      anything                 error: not supported
//!   nothing (.img, ...)   nothing                  raw
//!   nothing               one of our formats       a guess: read-only, and only without a parent
//!   nothing               a foreign one            error: not supported
//!   nothing               several                  error
//!   a part (.001)         nothing                  raw, with the parts that follow it (`split`)
//!   a part (.001)         any                      error: not supported
//! ```
//!
//! A guest can write anything into its raw disk: the start of a VHDX, or the structures of a
//! differencing VHD whose parent is another customer's disk. The guest of a fixed VHD can do the
//! same at offset 0. So contents never override the extension, and never make a file writable in a
//! format that the user has not named. (The footer of a fixed VHD lies beyond the guest's last
//! byte.) The opposite error is to open a container as raw: the first write destroys the container.
//! So every known container is refused by name (`known`).
//!
//! If the user names the format, nothing is probed. The format of a file that another file refers
//! to follows from that reference: a parent has the format of its child.

pub mod known;

use crate::{CheckReport, Format, Image, ImageError, ImageInfo, Reference, Result};
use diskwright_store::Store;
use known::Known;
use std::{path::Path, sync::Arc};

/// The format of a file, and how certain it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DetectedFormat {
    /// The format to open the file as.
    pub format: Format,
    /// Whether only the contents indicate the format. A guest may have written them.
    pub is_guess: bool,
}

impl DetectedFormat {
    /// A format that the user named, or that follows from the file that refers to this one.
    pub fn certain(format: Format) -> Self {
        Self { format, is_guess: false }
    }
}

/// The format of a new file with this name; `None` if the extension indicates none. A new `.img`,
/// `.bin` or `.dd` file is raw. For an existing file these extensions indicate nothing.
pub fn format_of_extension(path: &Path) -> Option<Format> {
    if let Some(promised) = known::by_extension(path) {
        return promised.format;
    }
    let extension = path.extension()?.to_str()?.to_ascii_lowercase();
    matches!(extension.as_str(), "img" | "bin" | "dd").then_some(Format::Raw)
}

/// Detects the format of `store` by its name and contents, by the rules of this module.
///
/// # Errors
/// `NotAnImage` if the extension indicates a format of which the file has no signature;
/// `Unsupported` for a foreign format; `FormatUnclear` if name and contents contradict each other,
/// or if a guess is not enough; `Io`.
pub fn probe(store: &dyn Store, writable: bool) -> Result<DetectedFormat> {
    if store.is_block_device() {
        return Ok(DetectedFormat::certain(Format::Raw));
    }
    let promised = known::by_extension(store.name());
    if promised.is_some_and(|known| known.format == Some(Format::Raw)) {
        return Ok(DetectedFormat::certain(Format::Raw));
    }
    let found = contents(store, store)?;
    if let Some(promised) = promised {
        return match promised.format {
            Some(format) if found.contains(&promised) => Ok(DetectedFormat::certain(format)),
            Some(format) if found.is_empty() && format.driver().is_found_elsewhere(store)? => {
                Ok(DetectedFormat::certain(format))
            }
            _ if found.is_empty() || found.contains(&promised) => Err(not_as_promised(store, promised, &found)),
            _ => Err(contradiction(store, promised, &found)),
        };
    }
    match found[..] {
        [] => Ok(DetectedFormat::certain(Format::Raw)),
        [Known { format: Some(format), .. }] if writable => {
            Err(guess_refused(store, *format, "the disk is to be opened for writing"))
        }
        [Known { format: Some(format), .. }] => Ok(DetectedFormat { format: *format, is_guess: true }),
        [foreign] => Err(unsupported(store, foreign, "the file is")),
        _ => Err(ImageError::FormatUnclear {
            path: store.name().to_owned(),
            what: format!(
                "the file has the signatures of several formats ({}), and its name does not say which one it is",
                names(&found)
            ),
            hint: SAY_WHICH.into(),
        }),
    }
}

/// The format of a file that is to be checked or repaired: as [`probe`], and also that which the
/// extension indicates, if the file has lost its signature and nothing else of its header.
///
/// # Errors
/// As [`probe`].
pub fn probe_damaged(store: &Arc<dyn Store>, writable: bool) -> Result<DetectedFormat> {
    let error = match probe(&**store, writable) {
        Err(error @ ImageError::NotAnImage { .. }) => error,
        other => return other,
    };
    let promised = known::by_extension(store.name()).and_then(|promised| promised.format);
    match promised {
        Some(format) if format.driver().has_lost_signature(store)? => Ok(DetectedFormat::certain(format)),
        _ => Err(error),
    }
}

/// Hint how to name the format.
const SAY_WHICH: &str = "say which it is with `OpenOptions::format`";
/// Hint how to open the file as raw.
const SAY_RAW: &str = "if these are the bytes of a raw disk, say so with `OpenOptions::format` = raw";

/// The formats whose signatures are at the start of `first` or the end of `last`. These are the
/// same file, or two parts of a disk.
fn contents(first: &dyn Store, last: &dyn Store) -> Result<Vec<&'static Known>> {
    let read = |store: &dyn Store, most_bytes: usize, at_end: bool| -> Result<Vec<u8>> {
        let len_bytes = store.len_bytes().map_err(|e| ImageError::io("get the length of the file", store, 0, e))?;
        let bytes = len_bytes.min(most_bytes as u64);
        let offset_bytes = if at_end { len_bytes - bytes } else { 0 };
        let mut buffer = vec![0; bytes as usize];
        store
            .read_at(&mut buffer, offset_bytes)
            .map_err(|e| ImageError::io("read the signature of the image", store, offset_bytes, e))?;
        Ok(buffer)
    };
    Ok(known::recognised(&read(first, known::FRONT_BYTES, false)?, &read(last, known::BACK_BYTES, true)?))
}

/// The format of a disk in several files: raw. `first` and `last` are its first and last part.
///
/// # Errors
/// `Unsupported` if the joined contents are those of an image; `Io`.
pub fn probe_parts(first: &dyn Store, last: &dyn Store) -> Result<DetectedFormat> {
    let found = contents(first, last)?;
    if found.is_empty() {
        return Ok(DetectedFormat::certain(Format::Raw));
    }
    Err(ImageError::Unsupported {
        path: first.name().to_owned(),
        what: format!(
            "the file and those that follow it, up to {}, look like the parts of a {} image; an image of that format in several files",
            last.name().display(),
            names(&found)
        ),
        hint: format!("join the parts into one file; {SAY_RAW}; if this file is an image by itself, name its format"),
    })
}

fn names(found: &[&Known]) -> String {
    found.iter().map(|known| known.name).collect::<Vec<_>>().join(", ")
}

fn extension(store: &dyn Store) -> String {
    store.name().extension().unwrap_or_default().to_string_lossy().into_owned()
}

fn unsupported(store: &dyn Store, known: &Known, who: &str) -> ImageError {
    ImageError::Unsupported {
        path: store.name().to_owned(),
        what: format!("{who} a {} image; {}", known.name, known.name),
        hint: format!("convert or unpack it with a program that knows {}; {SAY_RAW}", known.name),
    }
}

/// The extension indicates a foreign format, or one of ours whose signature the file does not have.
fn not_as_promised(store: &dyn Store, promised: &Known, found: &[&Known]) -> ImageError {
    let expected = match promised.format {
        None if found.is_empty() => return unsupported(store, promised, "the extension is that of"),
        None => return unsupported(store, promised, "the file is"),
        Some(format) => format.driver().signature,
    };
    let found = match store.len_bytes() {
        Ok(0) => "the file is empty",
        _ => "the file has no signature of that format",
    };
    ImageError::NotAnImage {
        path: store.name().to_owned(),
        found: format!("the extension is that of {}, but {found}", promised.name),
        expected: format!("{expected}; {SAY_RAW}"),
    }
}

fn contradiction(store: &dyn Store, promised: &Known, found: &[&Known]) -> ImageError {
    ImageError::FormatUnclear {
        path: store.name().to_owned(),
        what: format!(
            "the extension .{} is that of {}, but the contents are those of {}",
            extension(store),
            promised.name,
            names(found)
        ),
        hint: format!("rename the file, or {SAY_WHICH}"),
    }
}

fn guess_refused(store: &dyn Store, format: Format, why: &str) -> ImageError {
    ImageError::FormatUnclear {
        path: store.name().to_owned(),
        what: format!(
            "the contents look like {format}, but the extension does not say so, and {why}: the file may be a raw disk into which a guest wrote this data"
        ),
        hint: format!("say which it is with `OpenOptions::format` = {format} or raw"),
    }
}

/// Opens an image of `format`, or of the format that [`probe`] detects. `raw_sector_bytes` is the
/// logical sector of a raw disk.
///
/// # Errors
/// Errors of [`probe`] and of the format's `open`.
pub fn open(
    store: Arc<dyn Store>,
    format: Option<Format>,
    writable: bool,
    raw_sector_bytes: u32,
) -> Result<Arc<dyn Image>> {
    let verdict = format.map_or_else(|| probe(&*store, writable), |format| Ok(DetectedFormat::certain(format)))?;
    open_parts(vec![store], verdict, writable, raw_sector_bytes)
}

/// The further files that the image in `store` names. The caller opens them, and passes all files
/// to [`open_parts`].
///
/// # Errors
/// Errors of [`Driver::references`](crate::Driver::references); `FormatUnclear` for an image with a
/// guessed format that names any: a guest may have written the names.
pub fn references(store: &dyn Store, verdict: DetectedFormat) -> Result<Vec<Reference>> {
    let named = verdict.format.driver().references(store)?;
    if verdict.is_guess && !named.is_empty() {
        return Err(guess_refused(store, verdict.format, "the image names further files"));
    }
    Ok(named)
}

/// Opens an image whose format is known, with all its files: those of [`references`], or the parts
/// of a raw disk. An image with a guessed format is refused if it names a parent.
///
/// # Errors
/// Errors of [`Driver::open_files`](crate::Driver::open_files); `FormatUnclear`.
pub fn open_parts(
    parts: Vec<Arc<dyn Store>>,
    verdict: DetectedFormat,
    writable: bool,
    raw_sector_bytes: u32,
) -> Result<Arc<dyn Image>> {
    let first = parts.first().cloned();
    trusted(first.as_deref(), verdict, verdict.format.driver().open_files(parts, writable, raw_sector_bytes)?)
}

/// The same for an internal snapshot, by its id or its name. It is read-only.
///
/// # Errors
/// Errors of [`Driver::open_snapshot`](crate::Driver::open_snapshot); `FormatUnclear`.
pub fn open_snapshot(parts: Vec<Arc<dyn Store>>, verdict: DetectedFormat, snapshot: &str) -> Result<Arc<dyn Image>> {
    let first = parts.first().cloned();
    trusted(first.as_deref(), verdict, verdict.format.driver().open_snapshot(parts, snapshot)?)
}

fn trusted(first: Option<&dyn Store>, verdict: DetectedFormat, image: Arc<dyn Image>) -> Result<Arc<dyn Image>> {
    match first {
        Some(first) if verdict.is_guess && names_another_file(image.info()) => {
            Err(guess_refused(first, verdict.format, "the image names another file as its parent"))
        }
        _ => Ok(image),
    }
}

fn names_another_file(info: &ImageInfo) -> bool {
    info.parent.is_some() || info.disk_type == crate::DiskType::Differencing
}

/// Checks an image in one file of `format`, or of the format that [`probe`] detects for reading.
/// Changes nothing. A raw image has nothing to check.
///
/// # Errors
/// Errors of [`probe`] and of the format's `check`.
pub fn check(store: Arc<dyn Store>, format: Option<Format>) -> Result<(Format, CheckReport)> {
    let format = format.map_or_else(|| probe(&*store, false).map(|verdict| verdict.format), Ok)?;
    Ok((format, format.driver().check(store)?))
}

#[cfg(test)]
mod tests;
