//! A pool of fast and slow members for one round.

use super::{Plan, TiersOptions};
use crate::{
    LabError, Result, fill,
    progress::{Progress, report},
    targets::open_target,
};
use diskwright_load::OpenTarget;
use diskwright_space::{Class, NewFile, NewMember, PATIENCE, Pool, PoolCreateOptions, PoolOptions, SpaceError, Tier};
use diskwright_store::{BlockDevice, CacheMode, LockMode, RawDevice, StoreLimit};
use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

const POOL: &str = "study";
const DISK: &str = "disk";
const SLAB_BYTES: u64 = 1 << 20;
/// What a pool keeps for itself on a member: superblocks, journal and checkpoints, of a small pool.
const OWN_BYTES: u64 = 5 << 20;
/// And for each of its slabs.
const OWN_BYTES_PER_SLAB: u64 = 96;

pub(super) fn wrong(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> LabError {
    LabError::file("use", Path::new("the pool of the study"))(io::Error::other(error))
}

fn pool_error(error: SpaceError) -> LabError {
    wrong(error)
}

/// The files of a pool's members; removed when dropped.
pub(super) struct Members {
    paths: Vec<PathBuf>,
    limits: Vec<(PathBuf, StoreLimit)>,
    keep: bool,
}

impl Drop for Members {
    fn drop(&mut self) {
        if !self.keep {
            // The scratch folder is removed too; a folder that the user has named is not.
            self.paths.iter().for_each(|path| drop(std::fs::remove_file(path)));
        }
    }
}

/// Bytes that the members of both tiers need at most.
pub(super) fn needed_bytes(plan: &Plan) -> u64 {
    (fast_member_bytes(plan) + slow_member_bytes(plan)) * u64::from(plan.copies)
}

fn own_bytes(plan: &Plan) -> u64 {
    let slabs = (plan.fast_bytes + plan.size_bytes) / SLAB_BYTES * u64::from(plan.copies);
    OWN_BYTES + slabs * OWN_BYTES_PER_SLAB
}

fn fast_member_bytes(plan: &Plan) -> u64 {
    // Between slabs lie their checksums.
    plan.fast_bytes + plan.fast_bytes / 256 + own_bytes(plan)
}

fn slow_member_bytes(plan: &Plan) -> u64 {
    plan.size_bytes + plan.size_bytes / 16 + own_bytes(plan)
}

impl Members {
    /// Makes a pool whose disk lies on the slow members, full of incompressible data, and may move.
    pub(super) fn make(
        plan: &Plan,
        options: &TiersOptions,
        scratch: &Path,
        round: usize,
        progress: &mut dyn Progress,
    ) -> Result<Self> {
        let tiers = [
            (&options.fast, Class::Ssd, fast_member_bytes(plan), plan.fast),
            (&options.slow, Class::Hdd, slow_member_bytes(plan), plan.slow),
        ];
        let mut members = Self { paths: Vec::new(), limits: Vec::new(), keep: options.study.keep };
        let mut new = Vec::new();
        for (tier, class, size_bytes, limit) in tiers {
            for copy in 0..plan.copies {
                let name = format!("diskwright-tiers-{}-{round}-{class:?}-{copy}", std::process::id()).to_lowercase();
                let path = tier.dir.as_deref().unwrap_or(scratch).join(name);
                let made = File::create_new(&path).and_then(|file| file.set_len(size_bytes));
                made.map_err(LabError::file("create", &path))?;
                members.paths.push(path.clone());
                members.limits.extend(limit.map(|limit| (path.clone(), limit)));
                new.push(NewMember { path, class });
            }
        }
        let create =
            PoolCreateOptions { copies: Some(plan.copies), slab_bytes: SLAB_BYTES, ..PoolCreateOptions::default() };
        Pool::create(POOL, &new, &create).map_err(pool_error)?;
        // Without the limits, or it would take minutes.
        let pool = members.open_with(&[])?;
        let new = NewFile { len_bytes: plan.size_bytes, copies: plan.copies, columns: 1, tier: Tier::Slow };
        pool.create_file(DISK, new).map_err(pool_error)?;
        let target = disk_of(&pool)?;
        let mut tick = |done| report(progress, "prepare", done, plan.size_bytes, "filling the disk");
        fill::fill(DISK, &*target.device, plan.seed, options.study.engine, &mut tick)?;
        drop(target);
        pool.pin_file(DISK, Tier::Any).map_err(pool_error)?;
        pool.close().map_err(wrong)?;
        Ok(members)
    }

    fn open_with(&self, limits: &[(PathBuf, StoreLimit)]) -> Result<Arc<Pool>> {
        let options =
            PoolOptions { writable: true, cache: CacheMode::Direct, limits: limits.to_vec(), ..PoolOptions::default() };
        Pool::open_within(&self.paths, &options, PATIENCE).map(Arc::new).map_err(pool_error)
    }

    /// Opens the pool at the speed that its members should have. It moves nothing by itself.
    pub(super) fn open(&self) -> Result<Arc<Pool>> {
        self.open_with(&self.limits)
    }
}

/// The disk of an open pool.
pub(super) fn disk_of(pool: &Arc<Pool>) -> Result<OpenTarget> {
    let file = pool.open_file(DISK, true, LockMode::Exclusive).map_err(wrong)?;
    let device: Arc<dyn BlockDevice> = Arc::new(RawDevice::new(file, true, 512).map_err(wrong)?);
    Ok(open_target(DISK, "space", device, CacheMode::Direct))
}
