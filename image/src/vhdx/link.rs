//! A [`ParentLink`] as the parent locator of a VHDX (MS-VHDX 2.6.2.6), in both directions.
//!
//! ```text
//!   linkage, linkage2 ─▶ parent_linkage, parent_linkage2      GUIDs, lower-case, in braces
//!   relative_path     ─▶ relative_path
//!   volume_path       ─▶ volume_path
//!   absolute_path     ─▶ absolute_win32_path                  with \\?\ before a drive letter
//! ```
//!
//! Creation (`create.rs`) and a change of the link (`relink.rs`) write the same bytes. `name` and
//! the time stamp are fields of VHD only.

use crate::{LinkageId, ParentLink};
use diskwright_format::vhdx::{
    Invalid, ParentLocator,
    parent_locator::{ABSOLUTE_WIN32_PATH, PARENT_LINKAGE, PARENT_LINKAGE2, RELATIVE_PATH, VHDX_LOCATOR, VOLUME_PATH},
};

/// What about a link cannot be stored, and what to do.
pub(super) type Refusal = (String, &'static str);

/// The bytes of the parent locator.
///
/// # Errors
/// For a link without a path, with a path of more than 32,767 characters, or with a NUL.
pub(super) fn encode(link: &ParentLink) -> Result<Vec<u8>, Refusal> {
    let paths = [
        (RELATIVE_PATH, link.relative_path.clone()),
        (VOLUME_PATH, link.volume_path.clone()),
        (ABSOLUTE_WIN32_PATH, link.absolute_path.as_deref().map(absolute_win32)),
    ];
    let paths = paths.into_iter().filter_map(|(key, path)| Some((key, path.filter(|path| !path.is_empty())?)));
    let linkages =
        [(PARENT_LINKAGE, Some(link.linkage.unwrap_or(uuid::Uuid::nil().into()))), (PARENT_LINKAGE2, link.linkage2)];
    let linkages = linkages.into_iter().filter_map(|(key, id)| Some((key, format!("{{{}}}", id?.to_uuid()))));
    let mut entries: Vec<_> = linkages.collect();
    let without_paths = entries.len();
    entries.extend(paths);
    if entries.len() == without_paths {
        return Err((
            "a differencing disk must say where its parent is".into(),
            "give a relative, volume or absolute path",
        ));
    }
    if link.has_nul() {
        return Err(("the parent's path contains a NUL character".into(), "move the parent to another path"));
    }
    let entries = entries.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
    ParentLocator { locator_type: VHDX_LOCATOR, entries }
        .to_bytes()
        .map_err(|invalid| (format!("the parent's link has {}", invalid.found), "move the parent to a shorter path"))
}

/// The link that a parent locator holds.
///
/// # Errors
/// If there is no `parent_linkage`, or an identity is not a GUID.
pub(super) fn of_locator(locator: &ParentLocator) -> Result<ParentLink, Invalid> {
    let missing = || Invalid::new("parent locator", 0, "no parent_linkage", "the identity of the parent");
    let text = |key| locator.get(key).map(str::to_owned);
    Ok(ParentLink {
        file_id: None,
        format: None,
        relative_path: text(RELATIVE_PATH),
        volume_path: text(VOLUME_PATH),
        absolute_path: text(ABSOLUTE_WIN32_PATH),
        name: None,
        linkage: Some(LinkageId::from_uuid(locator.guid(PARENT_LINKAGE)?.ok_or_else(missing)?)),
        linkage2: locator.guid(PARENT_LINKAGE2)?.map(LinkageId::from_uuid),
        is_merged: false,
        modified_seconds: None,
        modified_offset_bytes: None,
    })
}

/// Converts an absolute path to `absolute_win32_path`. Hyper-V writes `\\?\` before a drive letter.
/// A path of this system is stored as it is (`\home\u\p.vhdx`): this program finds it again.
/// Windows looks for it on the current drive, after the relative path, and accepts only a file with
/// the right identity.
fn absolute_win32(path: &str) -> String {
    match path.as_bytes() {
        [letter, b':', b'\\' | b'/', ..] if letter.is_ascii_alphabetic() => format!(r"\\?\{path}"),
        _ => path.to_owned(),
    }
}
