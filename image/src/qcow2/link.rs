//! The backing file and the data file that a header names.
//!
//! Both names come from an image that may be hostile: they are only handed to the caller, who
//! decides which files may be opened. The format of the backing file must be recorded in the image.
//! Contents never decide it, as the guest of a raw backing file may have written a header.

use super::{corrupt, header::HeaderCluster};
use crate::{
    Format, ParentLink,
    error::{ImageError, Result},
    references::{Reference, ReferenceKind},
};
use diskwright_format::qcow2::{Invalid, features};
use diskwright_store::{Files, Store};
use std::path::Path;

/// What follows the name of the backing file in an image whose data a merge has copied there.
const MERGED: &str = " (has all data of this image, which can be removed)";

/// The data file of an image that has one.
///
/// # Errors
/// Those of the header; `Corrupt` if the name is missing; `Unsupported` for a protocol in it.
pub fn references(store: &dyn Store) -> Result<Vec<Reference>> {
    let front = HeaderCluster::read(store)?;
    if !front.header.features.has(features::EXTERNAL_DATA) {
        return Ok(Vec::new());
    }
    let Some(name) = front.extensions.data_file.filter(|name| !name.is_empty() && !name.contains('\0')) else {
        let invalid = Invalid::new("qcow2 header extension", 0, "no name of the external data file", "its name");
        return Err(corrupt(store, front.header.header_bytes.into(), invalid));
    };
    let name = local(store, "data file", &name)?.to_owned();
    Ok(vec![Reference { name, kind: ReferenceKind::RawData, is_written: true, device: None }])
}

/// The backing file that the image in `store` names.
///
/// # Errors
/// Those of the header, and of [`link_of`].
pub fn parent_link(store: &dyn Store) -> Result<Option<ParentLink>> {
    link_of(store, &HeaderCluster::read(store)?)
}

/// The link to the backing file. It has no identity: any file at that path is the parent.
///
/// # Errors
/// `Unsupported` for a format that is not recorded or not known, and for a protocol in the name.
pub(super) fn link_of(store: &dyn Store, front: &HeaderCluster) -> Result<Option<ParentLink>> {
    let Some(name) = &front.backing_name else { return Ok(None) };
    let is_merged = name.ends_with(MERGED);
    let name = name.strip_suffix(MERGED).unwrap_or(name);
    let is_elsewhere = Files::has_scheme(Path::new(name));
    let name = if is_elsewhere { name } else { local(store, "backing file", name)? }.to_owned();
    let unsupported =
        |what: String, hint: String| Err(ImageError::Unsupported { path: store.name().to_owned(), what, hint });
    let format = match front.extensions.backing_format.as_deref() {
        Some("raw" | "file" | "host_device") => Format::Raw,
        Some("qcow2") => Format::Qcow2,
        Some("vpc") => Format::Vhd,
        Some("vhdx") => Format::Vhdx,
        Some("vdi") => Format::Vdi,
        Some("vmdk") => Format::Vmdk,
        Some(other) => {
            return unsupported(
                format!("the backing file {name:?} of format {other:?}"),
                "convert the backing file to raw or qcow2, and record that with `qemu-img rebase -u`".into(),
            );
        }
        None if Path::new(&name).extension().is_some_and(|extension| extension == "raw") => Format::Raw,
        None => {
            return unsupported(
                format!("the backing file {name:?}, whose format the image does not record"),
                format!("record it: `qemu-img rebase -u -b {name} -F FORMAT` on the image"),
            );
        }
    };
    let mut link = ParentLink { format: Some(format), is_merged, ..ParentLink::default() };
    if ParentLink::is_absolute(&name) {
        link.absolute_path = Some(name);
    } else {
        link.relative_path = Some(name);
    }
    Ok(Some(link))
}

/// The name of a format, as programs record it.
pub(super) fn format_name(format: Format) -> &'static str {
    match format {
        Format::Raw => "raw",
        Format::Vhd => "vpc",
        Format::Vhdx => "vhdx",
        Format::Qcow2 => "qcow2",
        Format::Vdi => "vdi",
        Format::Vmdk => "vmdk",
    }
}

/// The name of the backing file in a link, as readers find it: a path, with slashes.
///
/// # Errors
/// What is wrong, without a subject.
pub(super) fn name_of(link: &ParentLink) -> std::result::Result<String, String> {
    let path = link.relative_path.as_ref().or(link.absolute_path.as_ref()).or(link.name.as_ref());
    let name = path.map(|path| path.replace('\\', "/")).unwrap_or_default();
    let name = name.strip_prefix("./").unwrap_or(&name);
    if name.is_empty() || name.contains('\0') {
        return Err(format!("the path {name:?} of the parent cannot be recorded"));
    }
    // Before a slash, a colon would end the name of a protocol.
    let has_colon =
        !Files::has_scheme(Path::new(name)) && name.split('/').next().is_some_and(|first| first.contains(':'));
    let start = if has_colon { "./" } else { "" };
    Ok(format!("{start}{name}{}", if link.is_merged { MERGED } else { "" }))
}

/// The path in the name of a file. QEMU takes what is before a colon for a protocol.
fn local<'a>(store: &dyn Store, kind: &str, name: &'a str) -> Result<&'a str> {
    let path = name.strip_prefix("file:").unwrap_or(name);
    let has_protocol = path.split('/').next().is_some_and(|first| first.contains(':'));
    if has_protocol || path.starts_with("//") {
        return Err(ImageError::Unsupported {
            path: store.name().to_owned(),
            what: format!("the {kind} {name:?}, which is named by a protocol"),
            hint: "only files are supported: copy it to a file, and record its name".into(),
        });
    }
    Ok(path)
}
