//! First writes, apart from the later ones: what a new file costs until all of it was written.
//!
//! ```text
//!   each round, in changing order:
//!      device, mappings   writes, flush                     (nothing is allocated: the base)
//!      flat files         create the file, writes, flush, remove it, wait for the file system
//! ```
//!
//! The writes are counted, not timed: random ones go over four times the bytes that they write, so
//! most of them meet space that was never written. A window and the flush after it count together,
//! because a file system may record new space at once or in its journal later.

use super::{
    Storage,
    record::{FIRST, Workload},
    settings::{SEED, Settings},
    subject::Subject,
};
use crate::{
    LabError, Result,
    cells::Cell,
    rounds::{self, Rounds, Steps, Window},
    scratch::{self, Scratch},
    study::flushed::{self, FLUSH_NS},
};
use diskwright_load::{
    figures::Figures,
    job::{Bytes, Job, Span},
    run::Watch,
};
use std::path::Path;

/// A file is this many times as long as what is written to it.
const FILE_OF_WRITTEN: u64 = 4;

/// The length of a file for first writes of `written_bytes`.
pub(super) fn file_bytes(written_bytes: u64) -> u64 {
    FILE_OF_WRITTEN * written_bytes
}

/// The job for the first writes of a workload: so many writes as make up `written_bytes`.
fn counted(job: &Job, written_bytes: u64, file_bytes: u64) -> Job {
    let mut job = job.clone();
    let phase = &mut job.phases[0];
    let block_bytes = phase.loads[0].block.largest_bytes().max(1);
    phase.warm_up = Span::default();
    phase.count = Some((written_bytes / block_bytes).max(1));
    phase.loads[0].working_set = Bytes(file_bytes);
    job
}

/// Measures the first writes of these workloads on all subjects, in `folder` of the file system.
/// The cells join `cells`.
pub(super) fn measure(
    (jobs, subjects): (&[Job], &[Subject]),
    (folder, scratch): (&Path, &Scratch),
    settings: &Settings,
    steps: &mut Steps<'_>,
    cells: &mut Vec<Cell>,
) -> Result<rounds::Done> {
    let mut ended = rounds::Done { whole: settings.rounds, stopped: false };
    for job in jobs {
        let load = &job.phases[0].loads[0];
        let name = Workload::of(load).name();
        let job = counted(job, settings.first_bytes, file_bytes(settings.first_bytes));
        let of = |subject: &Subject| Cell::new(FIRST, &name, subject.storage.name(), load.queue_depth.into());
        let mut measured: Vec<Cell> = subjects.iter().map(of).collect();
        let title = |at: Window| Some(format!("first {name}, {}", subjects[at.cell].storage.name()));
        let mut measure = |at: Window, watch: &dyn Watch| {
            // No change of the start offset: a sequential stream must begin at the first byte.
            let job = rounds::job_of(&job, &format!("first {name}"), at.round, None);
            let subject = &subjects[at.cell];
            let (figures, flush_ns) = match subject.storage {
                storage if storage.is_file() => write_into_new(&job, storage, folder, settings, watch)?,
                _ => {
                    let target = subject.open()?;
                    let round = flushed::write(&job, &target, settings.engine, watch)?;
                    target.close()?;
                    round
                }
            };
            if subject.storage.is_file() {
                // Until the file system has freed the file, so that this does not slow the next
                // window.
                scratch.settle()?;
            }
            measured[at.cell].rounds.push(figures);
            measured[at.cell].push_more(FLUSH_NS, Some(flush_ns));
            Ok(())
        };
        let rounds = Rounds::new(settings.rounds, SEED);
        ended = rounds::interleave(&rounds, subjects.len(), steps, &title, &mut measure)?;
        measured.iter_mut().for_each(|cell| cell.truncate(ended.whole));
        if ended.whole > 0 {
            cells.extend(measured);
        }
        if ended.stopped {
            break;
        }
    }
    Ok(ended)
}

fn write_into_new(
    job: &Job,
    storage: Storage,
    folder: &Path,
    settings: &Settings,
    watch: &dyn Watch,
) -> Result<(Figures, f64)> {
    let dir = folder.join("first");
    std::fs::create_dir(&dir).map_err(LabError::file("create", &dir))?;
    let written =
        Subject::create(storage, &dir, file_bytes(settings.first_bytes), settings.engine).and_then(|subject| {
            // The space of an eagerly zeroed file is on the device before it is measured.
            scratch::settle(&dir)?;
            let target = subject.open()?;
            let round = flushed::write(job, &target, settings.engine, watch)?;
            target.close()?;
            Ok(round)
        });
    std::fs::remove_dir_all(&dir).map_err(LabError::file("remove", &dir))?;
    written
}

#[cfg(test)]
mod tests {
    use super::*;
    use diskwright_store::EngineKind;

    #[test]
    fn the_writes_are_counted_and_go_over_a_longer_file() {
        for job in super::super::jobs::write_jobs(true, EngineKind::Auto).unwrap() {
            let block = job.phases[0].loads[0].block.largest_bytes();
            let first = counted(&job, 1 << 20, file_bytes(1 << 20));
            let phase = &first.phases[0];
            assert_eq!(phase.count, Some((1 << 20) / block));
            assert_eq!((phase.loads[0].working_set, phase.loads[0].read_percent), (Bytes(4 << 20), 0.0));
            first.validate().unwrap();
        }
    }
}
