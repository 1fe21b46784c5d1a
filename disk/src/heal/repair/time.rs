//! The time of the last change of an image. Children of a VHD have recorded it, and an undo file
//! knows by it whether the image was written since.

use diskwright_store::{Files, Store};
use std::{
    path::Path,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// By how much the time of the last change is set back: more than the step in which any file system
/// counts it. FAT counts two seconds.
const SET_BACK: Duration = Duration::from_secs(3);

/// Time of the last change in nanoseconds since 1970; 0 if it is not known.
pub(super) fn time_ns(files: &Files, path: &Path) -> i64 {
    let modified = files.facts(path).ok().and_then(|facts| facts.modified);
    let since = modified.and_then(|modified| modified.duration_since(UNIX_EPOCH).ok());
    since.and_then(|since| i64::try_from(since.as_nanos()).ok()).unwrap_or(0)
}

/// Gives the image the time that it had. Returns what the user should know if it has another one
/// all the same.
pub(super) fn restore(files: &Files, path: &Path, store: &dyn Store, wanted_ns: i64) -> Option<String> {
    let nanos = u64::try_from(wanted_ns).ok().filter(|&nanos| nanos > 0)?;
    let result = store.set_modified(UNIX_EPOCH + Duration::from_nanos(nanos));
    if time_ns(files, path) == wanted_ns {
        return None;
    }
    let why = match result {
        Ok(()) => "the file system keeps another time".to_owned(),
        Err(error) => error.to_string(),
    };
    Some(format!(
        "{}: the time of its last change could not be set back to what it was ({why}); if it is a VHD with children, they have recorded that time and take the image for changed: give the file that time (touch -d @{}.{:09}), or reconnect each child to it",
        path.display(),
        nanos / 1_000_000_000,
        nanos % 1_000_000_000
    ))
}

/// Sets the time of the last change back, so that a write that follows gives another one.
pub(super) fn set_back(store: &dyn Store) {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().saturating_sub(SET_BACK);
    // A failure costs nothing: the undo file records the time that the image has then.
    let _ = store.set_modified(UNIX_EPOCH + since);
}
