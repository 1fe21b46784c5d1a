//! Many children of one image.
//!
//! ```text
//!   for each name:  temporary file ─▶ filled, durable ─▶ its name (`partial`)
//!     └─ the name is taken by an unused child of the same parent: kept
//! ```
//!
//! Each is a differencing disk that begins as its parent reads. From then on the parent must not be
//! written; an open for writing refuses that while a child lies in its folder.
//!
//! A file with its final name is always complete. A command that was killed has made some of the
//! children. The same command keeps these, because nothing was written to them, and makes the rest.

use crate::{
    CreateRequest, DiskError, Result,
    copying::{
        create::{create_as, format_for, is_there, parent_out_of_reach},
        partial::Partial,
    },
    opening::image_file::{Access, open_image},
};
use diskwright_image::{Format, ImageInfo};
use diskwright_store::Files;
use std::path::{Path, PathBuf};

/// Creates every one of `children` as a child of `parent`, all or none of them: when one cannot be
/// made, those made by this call are removed. A name that an unused child of this parent has is
/// left as it is. Returns warnings, one sentence each. `progress` is told how many are made, and
/// stops the work by returning `false`. With `dry_run` nothing is created, and only names that are
/// taken are found. Of the request, size, type and parent are ignored.
///
/// # Errors
/// As [`create`](crate::create()); [`DiskError::Usage`] for a name that stands twice;
/// [`DiskError::Stopped`].
pub fn clone_disk(
    parent: &Path,
    children: &[PathBuf],
    request: &CreateRequest,
    dry_run: bool,
    progress: &mut crate::Progress<'_>,
) -> Result<Vec<String>> {
    let mut names: Vec<&PathBuf> = children.iter().collect();
    names.sort();
    if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(DiskError::Usage {
            what: format!("{} is named twice", twice[0].display()),
            hint: "give each clone a name of its own".into(),
        });
    }
    let files = &request.files;
    let mut warnings = Vec::new();
    let (mut missing, mut kept): (Vec<&PathBuf>, Vec<&PathBuf>) = (Vec::new(), Vec::new());
    for child in children {
        if files.facts(child).is_err() {
            missing.push(child);
        } else if is_unused_child(files, child, parent, request.format) {
            kept.push(child);
        } else {
            return Err(is_there(child));
        }
    }
    let request =
        CreateRequest { parent: Some(parent.to_owned()), size_bytes: None, disk_type: None, ..request.clone() };
    match &kept[..] {
        [] => (),
        [one] => warnings.push(format!("{}: an unused clone of this disk exists already; it is kept", one.display())),
        [first, more @ ..] => warnings.push(format!(
            "{} and {} more: unused clones of this disk exist already; they are kept",
            first.display(),
            more.len()
        )),
    }
    let mut made: Vec<&PathBuf> = Vec::new();
    let mut make_all = || -> Result<()> {
        // A command that made the kept ones at the same time may have failed, and removed them.
        let gone = kept.iter().copied().filter(|child| !dry_run && files.facts(child).is_err());
        for child in missing.iter().copied().chain(gone) {
            if !progress((kept.len() + made.len()) as u64, children.len() as u64) {
                return Err(DiskError::Stopped);
            }
            if !dry_run && !make(child, parent, &request)? {
                continue;
            }
            made.push(child);
            warnings.extend(parent_out_of_reach(files, child, parent));
        }
        Ok(())
    };
    let result = make_all();
    if result.is_err() && !dry_run {
        // The first error is returned. These files are ours, made just now, and empty.
        for child in made {
            let _ = files.remove(child);
        }
    }
    result.map(|()| warnings)
}

/// Makes one child under a temporary name, then gives it its own. `false` if another command has
/// made the same child meanwhile.
fn make(child: &Path, parent: &Path, request: &CreateRequest) -> Result<bool> {
    let files = &request.files;
    let partial = Partial::new(files, child, "clone");
    let attempt = || {
        partial.clear()?;
        create_as(child, partial.path(), request).map_err(|error| partial.shown(error))?;
        partial.created();
        partial.give_name().inspect_err(|_| partial.discard())
    };
    match attempt() {
        Ok(()) => Ok(true),
        Err(_) if is_unused_child(files, child, parent, request.format) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Whether the file at `child` is what an interrupted command has made: a child of `parent` without
/// data, that no program has open for writing.
fn is_unused_child(files: &Files, child: &Path, parent: &Path, format: Option<Format>) -> bool {
    let info_of = |path: &Path, format| {
        let access = Access { format: Some(format), ..Access::default() };
        open_image(files, path, &access, &mut Vec::new()).ok().map(|(image, _)| image)
    };
    let is_child_of = |info: &ImageInfo, above: &ImageInfo| {
        let link = info.parent.as_ref().and_then(|link| link.linkage);
        link.is_some() && link == above.linkage_id && info.size_bytes == above.size_bytes
    };
    let Ok(format) = format_for(child, format) else { return false };
    let (Some(image), Some(above)) = (info_of(child, format), info_of(parent, format)) else { return false };
    let info = image.info();
    let blocks = info.size_bytes.div_ceil(info.block_bytes.max(1));
    is_child_of(info, above.info()) && matches!(image.next_block(0, blocks), Ok(None))
}
