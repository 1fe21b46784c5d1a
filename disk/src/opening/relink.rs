//! What every change of an image's link to its parent needs: `merge`, `reconnect`, and merges of a
//! disk in use.

use crate::{DiskError, Result, error::file_error};
use diskwright_image::Format;
use diskwright_store::{Files, Store};
use std::{io, path::Path, time::SystemTime};

/// What to do where images cannot be merged into each other.
pub(crate) const COPY_THE_CHAIN: &str = "copy the whole chain into a new disk instead: `convert` the child";

/// Refuses an operation that would replace links of images of this format, before it changes
/// anything. `what` is the operation ("an in-place merge of"), `hint` what to do instead.
pub(crate) fn require(path: &Path, format: Format, what: &str, hint: &str) -> Result<()> {
    if format.driver().child_can_be_relinked {
        return Ok(());
    }
    Err(DiskError::BadOptions {
        what: format!("{}: {what} {format} images is not supported", path.display()),
        hint: hint.into(),
    })
}

/// Refuses to merge an image into one of another format, which qcow2 allows as a parent.
pub(crate) fn require_same_format(child: (&Path, Format), parent: (&Path, Format)) -> Result<()> {
    if child.1 == parent.1 {
        return Ok(());
    }
    Err(DiskError::BadOptions {
        what: format!(
            "{}: a {} image cannot be merged into {}, which is {}",
            child.0.display(),
            child.1,
            parent.0.display(),
            parent.1
        ),
        hint: COPY_THE_CHAIN.into(),
    })
}

fn modified_of(files: &Files, path: &Path) -> Option<SystemTime> {
    files.facts(path).ok()?.modified
}

/// Changes the image at `path`, whose file is `store`, and gives it back the time of its last
/// change: the children of a VHD have recorded that. For changes that no reader of the disk sees.
pub(crate) fn keeping_time<T>(
    files: &Files,
    (path, store): (&Path, &dyn Store),
    change: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let modified = modified_of(files, path);
    let result = change()?;
    if let Some(modified) = modified {
        // A time that cannot be put back is durable at least, so that a child which records it then
        // is right. A failed sync is not tried again. A store without times has no such children.
        let durable = store.set_modified(modified).or_else(|error| match modified_of(files, path) {
            _ if error.kind() == io::ErrorKind::Unsupported => Ok(()),
            Some(now) if now == modified => Err(error),
            _ => store.sync_all(),
        });
        durable.map_err(|source| file_error("make the time of its last change durable", path, source))?;
    }
    Ok(result)
}
