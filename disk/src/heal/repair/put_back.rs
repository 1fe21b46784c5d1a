//! Undoes a repair: a complete one if no write followed, and one that was interrupted.

use super::{
    journal::{Head, JournalState},
    replay, time,
    undo_file::{self, Naming},
};
use crate::{DiskError, Result, error::file_error};
use diskwright_store::{Files, Store};
use std::{io, path::Path};

/// What [`put_back`] has done.
#[derive(Debug)]
pub(super) struct RollbackOutcome {
    /// Whether the repair had been interrupted.
    pub(super) was_interrupted: bool,
    /// What the user should know, a sentence each.
    pub(super) warnings: Vec<String>,
}

/// Rolls back the repair of the image in `store`, and removes the undo file.
///
/// # Errors
/// As [`super::undo_repair`].
pub(super) fn put_back(
    path: &Path,
    store: &dyn Store,
    files: &Files,
    undo: &Path,
    naming: Naming,
) -> Result<RollbackOutcome> {
    let (journal, mut head) = undo_file::open(files, undo, naming, store)?;
    let refused = |what: String| DiskError::BadOptions {
        what: format!("{}: the repair cannot be undone: {what}", path.display()),
        hint: format!("the image was left as it is; {} still has the old bytes", undo.display()),
    };
    let judged = |result: io::Result<()>| {
        result.map_err(|error| match error.kind() {
            io::ErrorKind::InvalidData => undo_file::damaged(undo, &error.to_string()),
            io::ErrorKind::InvalidInput => refused(format!("the image was written to since: {error}")),
            _ => file_error("undo the repair", path, error),
        })
    };
    let mut warnings = Vec::new();
    let was_interrupted = head.state != JournalState::Complete;
    if head.state == JournalState::Complete {
        judged(is_unchanged(path, store, files, &*journal, &head))?;
        // From here on an interrupted undo is finished like an interrupted repair.
        head.state = JournalState::Armed;
        head.write(&*journal).map_err(|source| file_error("begin to undo the repair in", undo, source))?;
    } else if head.state == JournalState::Armed {
        judged(replay::check_versions(&*journal, &head, store))?;
    }
    if head.state == JournalState::Armed {
        judged(replay::roll_back(&*journal, &head, store))?;
        warnings.extend(time::restore(files, path, store, head.old_time_ns));
    }
    drop(journal);
    files
        .remove(undo)
        .and_then(|()| files.sync_directory_of(undo))
        .map_err(|source| file_error("remove it; the image is as it was before the repair", undo, source))?;
    Ok(RollbackOutcome { was_interrupted, warnings })
}

/// Whether the image is as a complete repair has left it.
fn is_unchanged(path: &Path, store: &dyn Store, files: &Files, journal: &dyn Store, head: &Head) -> io::Result<()> {
    let changed = |what: String| Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    let (len_bytes, time_ns) = (store.len_bytes()?, time::time_ns(files, path));
    if len_bytes != head.new_bytes {
        return changed(format!("it has {len_bytes} bytes, expected {}", head.new_bytes));
    }
    if time_ns != head.new_time_ns {
        let expected = head.new_time_ns;
        return changed(format!("it was last changed {time_ns} ns after 1970, expected {expected}"));
    }
    if replay::changed_crc(journal, head, store)? != head.changed_crc {
        return changed("the repaired places hold other bytes".into());
    }
    Ok(())
}
