//! Creation time of each type of disk.
//!
//! In the paper a fixed disk is created by writing zeros to all of it, at 49 MB/s on Windows Server
//! 2008 and 419 MB/s on R2. Diskwright reserves the space, which reads as zeros, and writes no
//! payload. The time is that of the whole `create` call, its syncs included.

use super::record::CreationRecord;
use crate::{
    LabError, Result,
    progress::{Progress, report},
    scratch::Scratch,
    targets::{Container, create_empty},
};
use diskwright_image::DiskType;
use diskwright_load::warning::Warning;
use diskwright_stats::numbers::bytes;
use std::{error::Error, iter::successors, os::unix::fs::MetadataExt, time::Instant};

/// Size of the created disks: that of a common system disk.
pub(crate) const SIZE_BYTES: u64 = 40 << 30;
/// Space that must stay free on the file system while a fixed disk exists.
const SLACK_BYTES: u64 = 1 << 30;
/// Creations of each type.
const ROUNDS: usize = 3;

/// Creates each type [`ROUNDS`] times and deletes each disk at once. A type that does not fit on
/// the file system is left out with a warning.
pub(crate) fn measure(
    scratch: &Scratch,
    size_bytes: u64,
    warnings: &mut Vec<Warning>,
    progress: &mut dyn Progress,
) -> Result<Vec<CreationRecord>> {
    let mut records = Vec::new();
    let fixed_fits = scratch.need("", size_bytes + SLACK_BYTES).is_ok();
    for (index, container) in Container::STUDIED.into_iter().enumerate() {
        report(progress, "create", index as u64, Container::STUDIED.len() as u64, container.name())?;
        let may_fit = container.disk_type() != DiskType::Fixed || fixed_fits;
        match may_fit.then(|| times(scratch, container, size_bytes, ROUNDS)) {
            Some(Err(error)) if !is_full(&error) => return Err(error),
            Some(Ok(record)) => records.extend(record),
            None | Some(Err(_)) => warnings.push(Warning::LeftOut {
                what: format!("the creation time of {}", container.name()),
                why: format!("the file system has no room for a disk of {}", bytes(size_bytes)),
            }),
        }
    }
    Ok(records)
}

/// Whether the error is "no space left".
fn is_full(error: &LabError) -> bool {
    let mut causes = successors(Some(error as &dyn Error), |&cause| cause.source());
    causes.any(|cause| cause.downcast_ref().is_some_and(diskwright_store::is_full))
}

/// Creates one type `rounds` times. `None` for no rounds.
pub(crate) fn times(
    scratch: &Scratch,
    container: Container,
    size_bytes: u64,
    rounds: usize,
) -> Result<Option<CreationRecord>> {
    let mut times = Vec::with_capacity(rounds);
    let mut file_allocated_bytes = u64::MAX;
    for round in 0..rounds {
        let dir = scratch.folder(&format!("create-{round}"))?;
        let start = Instant::now();
        let created = create_empty(container, &dir, size_bytes);
        times.push(start.elapsed().as_nanos() as f64);
        let examined = created.and_then(|path| path.metadata().map_err(LabError::file("examine", &path)));
        // A failed creation may leave a file: removed too.
        std::fs::remove_dir_all(&dir).map_err(LabError::file("remove", &dir))?;
        file_allocated_bytes = file_allocated_bytes.min(examined?.blocks() * 512);
    }
    let record = CreationRecord { container, size_bytes, wall_ns: times, file_allocated_bytes };
    Ok((rounds > 0).then_some(record))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::Silent;
    use std::io;

    #[test]
    fn every_type_is_created_and_nothing_is_left() {
        let home = tempfile::tempdir().unwrap();
        let scratch = Scratch::new(Some(home.path()), false).unwrap();
        let mut warnings = Vec::new();
        let records = measure(&scratch, 64 << 20, &mut warnings, &mut Silent).unwrap();
        assert_eq!(records.len(), Container::STUDIED.len());
        assert!(warnings.is_empty(), "{warnings:?}");
        for record in &records {
            let fixed = record.container.disk_type() == DiskType::Fixed;
            assert_eq!(fixed, record.file_allocated_bytes >= 64 << 20, "{record:?}");
        }
        assert_eq!(std::fs::read_dir(scratch.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_full_file_system_is_distinguished_from_other_failures() {
        let failed = |kind: io::ErrorKind| LabError::file("write", "x")(io::Error::from(kind));
        assert!(is_full(&failed(io::ErrorKind::StorageFull)) && is_full(&failed(io::ErrorKind::QuotaExceeded)));
        assert!(!is_full(&failed(io::ErrorKind::PermissionDenied)));
    }

    #[test]
    fn a_creation_that_fails_leaves_no_space_taken() {
        let home = tempfile::tempdir().unwrap();
        let scratch = Scratch::new(Some(home.path()), false).unwrap();
        // Above the maximum of a dynamic VHD.
        assert!(times(&scratch, Container::VhdDynamic, 4 << 40, 1).is_err());
        assert_eq!(std::fs::read_dir(scratch.path()).unwrap().count(), 0);
    }

    #[test]
    fn containers_that_do_not_fit_are_left_out_with_a_warning() {
        let home = tempfile::tempdir().unwrap();
        let scratch = Scratch::new(Some(home.path()), false).unwrap();
        let mut warnings = Vec::new();
        // Near the maximum of a dynamic VHD, which takes hardly any space. Few machines have this
        // much free space for a fixed one.
        let size_bytes = 2000 << 30;
        if scratch.need("", size_bytes + SLACK_BYTES).is_err() {
            let records = measure(&scratch, size_bytes, &mut warnings, &mut Silent).unwrap();
            assert!(records.iter().all(|record| record.container.disk_type() != DiskType::Fixed));
            assert_eq!(warnings.len(), 3);
        }
    }
}
