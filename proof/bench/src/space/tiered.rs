//! A pool of a fast and a slow member, each with one copy of what lies on it, and one disk.

use super::{failed, files};
use diskwright_lab::{LabError, Result, targets::open_target};
use diskwright_load::OpenTarget;
use diskwright_space::{Class, NewFile, NewMember, PATIENCE, Pool, PoolCreateOptions, PoolOptions, Tier};
use diskwright_store::{BlockDevice, CacheMode, FileRange, LockMode, RawDevice, Store, StoreLimit};
use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

/// What the pool is like.
#[derive(Debug, Clone, Copy)]
pub(super) struct TieredOptions {
    /// Sizes of the fast and the slow member.
    pub(super) members_bytes: [u64; 2],
    pub(super) slab_bytes: u64,
    pub(super) disk_bytes: u64,
    /// Where the disk lies at the beginning. With [`Tier::Any`] on the slow member, and it may
    /// move.
    pub(super) tier: Tier,
    pub(super) write_cache_bytes: Option<u64>,
}

pub(super) struct Tiered {
    pub(super) paths: Vec<PathBuf>,
}

fn wrong(error: impl std::error::Error + Send + Sync + 'static) -> LabError {
    LabError::file("use", Path::new("space://bench/disk"))(io::Error::other(error))
}

impl Tiered {
    /// Makes the pool in a folder. Every slab of the disk is allocated.
    pub(super) fn make(dir: &Path, options: &TieredOptions) -> Result<Self> {
        let paths = files(dir, &options.members_bytes)?;
        let member = |(path, class): (&PathBuf, Class)| NewMember { path: path.clone(), class };
        let members: Vec<NewMember> = paths.iter().zip([Class::Ssd, Class::Hdd]).map(member).collect();
        let create =
            PoolCreateOptions { copies: Some(1), slab_bytes: options.slab_bytes, ..PoolCreateOptions::default() };
        Pool::create("bench", &members, &create).map_err(failed)?;
        let made = Self { paths };
        let pool = made.open(None)?;
        let len_bytes = options.disk_bytes;
        let tier = if options.tier == Tier::Fast { Tier::Fast } else { Tier::Slow };
        pool.create_file("disk", NewFile { len_bytes, copies: 1, columns: 1, tier }).map_err(failed)?;
        let file = pool.open_file("disk", true, LockMode::Exclusive).map_err(wrong)?;
        file.allocate(FileRange { offset_bytes: 0, len_bytes }).map_err(wrong)?;
        drop(file);
        pool.pin_file("disk", options.tier).map_err(failed)?;
        options.write_cache_bytes.map_or(Ok(()), |len_bytes| pool.create_cache(len_bytes)).map_err(failed)?;
        Ok(made)
    }

    /// Opens the pool, with a limit for each member.
    pub(super) fn open(&self, limits: Option<[StoreLimit; 2]>) -> Result<Arc<Pool>> {
        let limits = self.paths.iter().cloned().zip(limits.into_iter().flatten()).collect();
        let options = PoolOptions { writable: true, cache: CacheMode::Direct, limits, ..PoolOptions::default() };
        Pool::open_within(&self.paths, &options, PATIENCE).map(Arc::new).map_err(failed)
    }
}

/// The disk of an open pool.
pub(super) fn disk_of(pool: &Arc<Pool>, name: &str) -> Result<OpenTarget> {
    let file = pool.open_file("disk", true, LockMode::Exclusive).map_err(wrong)?;
    let device: Arc<dyn BlockDevice> = Arc::new(RawDevice::new(file, true, 512).map_err(wrong)?);
    Ok(open_target(name, name, device, CacheMode::Direct))
}
