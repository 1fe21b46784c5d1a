//! The paper's workloads as jobs.

use super::settings::SEED;
use crate::Result;
use diskwright_load::{
    job::{Blocks, Bytes, IoEngine, Job},
    profiles,
};
use diskwright_store::EngineKind;
use std::time::Duration;

/// The only request sizes of a quick study.
const QUICK_SIZES: [u64; 2] = [4 << 10, 64 << 10];
/// A cell is this many times as long as its warm-up: six minutes to one in the paper.
const WARM_UP_OF_CELL: u32 = 6;

/// One job for each workload of the profile. A quick study has only the sizes [`QUICK_SIZES`].
pub(super) fn jobs(quick: bool, engine: EngineKind) -> Result<Vec<Job>> {
    let profile = profiles::load("vmfs-and-rdm")?;
    let one = |phase: &diskwright_load::job::Phase| {
        let mut job = Job { name: phase.name.clone(), phases: vec![phase.clone()], ..profile.clone() };
        job.engine = match engine {
            EngineKind::Auto => IoEngine::Auto,
            EngineKind::Uring => IoEngine::IoUring,
            EngineKind::Sync => IoEngine::Pread,
        };
        job
    };
    let wanted = |job: &Job| match job.phases[0].loads[0].block {
        Blocks::One(Bytes(size)) => !quick || QUICK_SIZES.contains(&size),
        Blocks::Mix(_) => false,
    };
    Ok(profile.phases.iter().map(one).filter(wanted).collect())
}

/// The jobs that only write, for the first writes.
pub(super) fn write_jobs(quick: bool, engine: EngineKind) -> Result<Vec<Job>> {
    let mut jobs = jobs(quick, engine)?;
    jobs.retain(|job| job.phases[0].loads[0].read_percent == 0.0);
    Ok(jobs)
}

/// The job with the times of a cell, over the first `size_bytes` of every subject.
pub(super) fn with_cell(mut job: Job, cell: Duration, size_bytes: u64) -> Job {
    let warm_up = cell / WARM_UP_OF_CELL;
    let phase = &mut job.phases[0];
    (phase.warm_up, phase.duration) =
        (warm_up.into(), cell.saturating_sub(warm_up).max(Duration::from_millis(1)).into());
    phase.loads[0].working_set = Bytes(size_bytes);
    job.seed = SEED;
    job
}
