//! A warm cache against the same bytes in a local file, and against that file with the checksums
//! that the cache compares.

use super::{
    failed, gateway,
    gateway::{MIB, NAME},
    open,
};
use crate::{
    populated::{FIGURES, Subject, compare},
    same_blocks::{Run, device_at},
};
use diskwright_lab::{
    LabError, Result,
    acceptance::{Context, RowOutcome},
    progress::Progress,
    targets::open_target,
};
use diskwright_load::workload::{Direction, Pattern, Workload};
use diskwright_stats::numbers::bytes;
use diskwright_store::{BlockDevice, CacheMode, FileStore, LockMode, OpenOptions, RawDevice, Store};
use std::{io, path::Path, sync::Arc};

const QUEUE_DEPTH: u32 = 32;

/// Random reads of 4 KiB from the cache, beside a local file.
pub(crate) fn warm(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    let size_bytes = context.pick(256, 1024) * MIB;
    let gateway = match gateway(context, size_bytes)? {
        Ok(gateway) => gateway,
        Err(why) => return Ok(RowOutcome::skipped("reads from the cache", why)),
    };
    let settings = gateway.settings();
    let (files, device) = open(&settings, CacheMode::Direct)?;
    files.prefetch(Path::new(NAME), None, &mut |_, _| true).map_err(failed)?;
    let options = OpenOptions { cache: CacheMode::Direct, lock: LockMode::None, ..OpenOptions::default() };
    let wrong = || LabError::file("open", &gateway.file);
    let local = FileStore::open(&gateway.file, &options).map_err(io::Error::other).map_err(wrong())?;
    let local: Arc<dyn Store> = Arc::new(local);
    let local = Arc::new(RawDevice::new(local, false, 512).map_err(wrong())?);
    let all = Run { offset_bytes: 0, len_bytes: size_bytes, file_offset_bytes: 0 };
    let summed = device_at(&local, all, 4096);
    let peers: [(&str, Arc<dyn BlockDevice>); 2] =
        [("warm cache", local), ("warm cache, the same checksums computed of the file", summed)];
    let mut found = RowOutcome::default();
    let workload = Workload::new(Pattern::Random, Direction::Read, 4096, QUEUE_DEPTH);
    for (place, (name, peer)) in peers.into_iter().enumerate() {
        let subjects = [
            Subject::of(open_target("local file", "raw file", peer, CacheMode::Direct)),
            Subject::of(open_target(name, "object", Arc::clone(&device), CacheMode::Direct)),
        ];
        for disk in compare(context, &subjects, &workload, &FIGURES[..1], (place, 2), progress, &mut |_| Ok(()))? {
            found.checks.push(disk.check(&workload.name, FIGURES[0]));
        }
    }
    let more = gateway.take_asked().iter().filter(|range| range.end - range.start > 1).count() as u64;
    if more > size_bytes / MIB {
        found.notes.push(format!("{more} requests were made for {} blocks", size_bytes / MIB));
    }
    found
        .notes
        .push(format!("an object of {}, all of it in the cache, O_DIRECT; checksums are compared", bytes(size_bytes)));
    Ok(found)
}
