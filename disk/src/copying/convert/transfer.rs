//! Copies the data of a conversion, and finds out which side failed.

use super::options::{ConvertOptions, ConvertOutcome};
use crate::{
    DiskError, Opened, Progress, Result,
    copying::copy::{Dest, Failure, Job, Outcome, file_of},
    error::from_io,
};
use std::path::Path;

/// Copies the first `first_bytes` of the source. `is_leftover`: the destination may hold a part of
/// them already.
pub(super) fn copy(
    (source, source_path): (&Opened, &Path),
    (dest, dest_path): (&Opened, &Path),
    first_bytes: u64,
    options: &ConvertOptions,
    is_leftover: bool,
    progress: &mut Progress<'_>,
) -> Result<ConvertOutcome> {
    let size_bytes = source.device().geometry().size_bytes;
    let copied_size_bytes = size_bytes.min(first_bytes);
    let dest_bytes = dest.device().geometry().size_bytes;
    let free_bytes = diskwright_store::free_bytes(dest_path);
    let holds = if dest.disk().is_some() && !is_leftover { Dest::Empty } else { Dest::OldData };
    let job = Job::new(source, (dest, holds), options.source.engine, !options.no_reflink, options.skip_damaged)
        .of_first(first_bytes)
        .onto_leftover(is_leftover);
    match job.run(progress) {
        Outcome::Done => {}
        Outcome::Stopped => return Err(DiskError::Stopped),
        Outcome::Failed(Failure::Source(range, error)) => {
            return Err(from_io("read it", &file_of(source, source_path, range), error));
        }
        Outcome::Failed(Failure::Dest(error)) => {
            // The partial file is removed, so report the space that the whole copy needs, and what
            // was free before.
            let needed_bytes = dest.disk().and_then(|_| job.data_bytes());
            let error = diskwright_store::explain_shortage(error, dest_path, needed_bytes, free_bytes);
            return Err(from_io("copy into it", dest_path, error));
        }
    }
    dest.close()?;
    progress(copied_size_bytes, copied_size_bytes);
    let lost = job.lost();
    Ok(ConvertOutcome {
        size_bytes,
        dest_bytes,
        table: None,
        kept_disk_id: false,
        kept_linkage_id: false,
        copied_bytes: job.copied_bytes.into_inner(),
        cloned_bytes: job.cloned_bytes.into_inner(),
        zero_bytes: job.zero_bytes.into_inner(),
        held_bytes: job.held_bytes.into_inner(),
        stream_bytes: None,
        verified_bytes: 0,
        warnings: source.warnings().to_vec(),
        lost,
    })
}

pub(super) fn verify_failed(dest: &Path, source: &Path, offset_bytes: u64) -> DiskError {
    DiskError::VerifyFailed { dest: dest.to_owned(), source_path: source.to_owned(), offset_bytes }
}
