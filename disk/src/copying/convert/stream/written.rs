//! How the writing of a stream ended.

use super::super::options::ConvertOutcome;
use crate::{
    DiskError, Opened,
    copying::copy::{Failure, file_of},
    error::from_io,
};
use std::path::Path;

/// What was written.
pub(super) struct Written {
    pub(super) outcome: ConvertOutcome,
    /// Length of the file in bytes.
    pub(super) file_bytes: u64,
}

/// The error of a packing that failed.
pub(super) fn explain(
    (source, source_path): (&Opened, &Path),
    dest: &Path,
    free_bytes: Option<u64>,
    failure: Option<Failure>,
) -> DiskError {
    match failure {
        None => DiskError::Stopped,
        Some(Failure::Source(range, error)) => from_io("read it", &file_of(source, source_path, range), error),
        Some(Failure::Dest(error)) => {
            let error = diskwright_store::explain_shortage(error, dest, None, free_bytes);
            from_io("copy into it", dest, error)
        }
    }
}
