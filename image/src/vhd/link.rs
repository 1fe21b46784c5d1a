//! A [`ParentLink`] as fields of the header and as parent locators; and the time stamp of a parent.
//!
//! ```text
//!   linkage, modified_seconds, name ─▶ header: unique id, time stamp, file name in UTF-16BE
//!   absolute_path                   ─▶ locator W2ku ┐ UTF-16LE, each from a sector of its own
//!   relative_path                   ─▶ locator W2ru ┘
//! ```
//!
//! Creation (`create.rs`) and a change of the link (`relink.rs`) write the same bytes. Locators for
//! other platforms are not written, and a changed link removes those of other programs: they would
//! lead to the old parent. `volume_path` and `linkage2` exist only in VHDX.

use crate::{ImageError, ParentLink, Result};
use diskwright_format::vhd::{
    LOCATOR_COUNT, LocatorData, LocatorEntry, LocatorKind, MAX_LOCATOR_BYTES, SECTOR_BYTES, encode_path,
    seconds_to_unix,
};
use diskwright_store::Store;
use std::time::{Duration, UNIX_EPOCH};

/// What about a link cannot be stored, and what to do.
pub(super) type Refusal = (String, &'static str);

/// The paths of a link, in the order of their locators.
pub(super) fn paths(link: &ParentLink) -> Vec<(LocatorKind, LocatorData)> {
    let full = |path: &Option<String>| path.clone().filter(|path| !path.is_empty());
    let absolute = full(&link.absolute_path).map(|path| (LocatorKind::WindowsAbsolute, LocatorData::Absolute(path)));
    let relative = full(&link.relative_path).map(|path| (LocatorKind::WindowsRelative, LocatorData::Relative(path)));
    absolute.into_iter().chain(relative).collect()
}

/// Checks that a VHD can store the link.
///
/// # Errors
/// For a link without a path, with a path of more than 32,768 characters, or with a NUL.
pub(super) fn check(link: &ParentLink) -> Result<(), Refusal> {
    let paths = paths(link);
    if paths.is_empty() {
        return Err(("there is no path to the parent".into(), "give a relative or an absolute one"));
    }
    if link.has_nul() {
        return Err(("the parent's path contains a NUL character".into(), "move the parent to another path"));
    }
    let is_too_long =
        |(_, path): &(LocatorKind, LocatorData)| encode_path(path.text()).len() > MAX_LOCATOR_BYTES as usize;
    if paths.iter().any(is_too_long) {
        return Err((
            "the path to the parent is longer than 32768 characters".into(),
            "move the files to shorter paths",
        ));
    }
    Ok(())
}

/// The locators of a link whose data begin at `offset_bytes`, and these data, whole sectors.
pub(super) fn locators(link: &ParentLink, offset_bytes: u64) -> ([LocatorEntry; LOCATOR_COUNT], Vec<u8>) {
    let mut entries = [LocatorEntry::default(); LOCATOR_COUNT];
    let mut bytes = Vec::new();
    for (entry, (kind, path)) in entries.iter_mut().zip(paths(link)) {
        let data = encode_path(path.text());
        let space_bytes = data.len().next_multiple_of(SECTOR_BYTES as usize);
        // In bytes, as Windows writes it. The specification says sectors.
        *entry = LocatorEntry {
            code: kind.code(),
            data_space: space_bytes as u32,
            data_length_bytes: data.len() as u32,
            data_offset: offset_bytes + bytes.len() as u64,
        };
        bytes.extend_from_slice(&data);
        bytes.resize(bytes.len().next_multiple_of(SECTOR_BYTES as usize), 0);
    }
    (entries, bytes)
}

/// The parent's file name: as given, else the last component of a path with slashes or backslashes.
pub(super) fn name(link: &ParentLink) -> String {
    let path = link.name.as_ref().or(link.relative_path.as_ref()).or(link.absolute_path.as_ref());
    let path = path.map_or("", String::as_str);
    path.rsplit(['\\', '/']).next().unwrap_or(path).to_owned()
}

/// Sets the modification time of a parent's file to the time stamp that its children have recorded,
/// durably. For a change of the file that left the disk's contents as they were, and for a merge
/// that recorded the time in advance.
///
/// Every later write to the file changes the time again. So the image must be closed first
/// ([`ImageWriter::close`](crate::ImageWriter::close)).
///
/// # Errors
/// `Io`, with `Unsupported` for a store whose modification time cannot be set.
pub fn set_modified_seconds(store: &dyn Store, vhd_seconds: u32) -> Result<()> {
    // Time stamps begin in the year 2000, so the Unix time is not negative.
    let modified = UNIX_EPOCH + Duration::from_secs(seconds_to_unix(vhd_seconds).unsigned_abs());
    store.set_modified(modified).map_err(|e| ImageError::io("set the file's modification time", store, 0, e))
}
