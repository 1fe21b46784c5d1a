//! Pools of members: one member against the raw file, two copies against btrfs, opening.
//!
//! ```text
//!   one_member.rs   sixteen workloads, written lately and with checksums
//!   mirror.rs       two copies on two files against btrfs raid1 on the same two files
//!   burst.rs        a burst into the write-back cache; a full cache
//!   tiers.rs        the predicted share of the fast members against the measured one
//!   dm_cache.rs     what reaches the slow member, against dm-cache in a guest
//!   tiered.rs       a pool of a fast and a slow member
//!   opening.rs      a pool of 10 TiB; copies that are compared after a power cut
//! ```

mod burst;
mod dm_cache;
mod mirror;
mod one_member;
mod opening;
mod tiered;
mod tiers;

pub(crate) use burst::burst;
pub(crate) use dm_cache::against_dm_cache;
pub(crate) use mirror::against_btrfs;
pub(crate) use one_member::{with_checksums, workloads};
pub(crate) use opening::{CHILD, child, large, resync};
pub(crate) use tiers::predicted_share;

use diskwright_lab::{LabError, Result};
use diskwright_space::{Class, NewFile, NewMember, Pool, PoolCreateOptions, PoolOptions, SpaceError, SpaceFile, Tier};
use diskwright_store::{CacheMode, LockMode};
use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

fn failed(error: SpaceError) -> LabError {
    LabError::file("use", Path::new("the pool"))(io::Error::other(error))
}

/// Makes files for members, sparse.
fn files(dir: &Path, sizes_bytes: &[u64]) -> Result<Vec<PathBuf>> {
    let make = |(number, size_bytes): (usize, &u64)| {
        let path = dir.join(format!("member{number}"));
        let made = File::create_new(&path).and_then(|file| file.set_len(*size_bytes));
        made.map_err(LabError::file("create", &path))?;
        Ok(path)
    };
    sizes_bytes.iter().enumerate().map(make).collect()
}

/// Makes a pool of these members.
fn create(paths: &[PathBuf]) -> Result<()> {
    let members: Vec<NewMember> =
        paths.iter().map(|path| NewMember { path: path.clone(), class: Class::Ssd }).collect();
    Pool::create("bench", &members, &PoolCreateOptions::default()).map(|_| ()).map_err(failed)
}

fn open(paths: &[PathBuf], cache: CacheMode) -> Result<Arc<Pool>> {
    let options = PoolOptions { writable: true, cache, ..PoolOptions::default() };
    Pool::open(paths, &options).map(Arc::new).map_err(failed)
}

/// Adds a disk to a pool, and opens it.
fn disk(pool: &Arc<Pool>, size_bytes: u64, copies: u8) -> Result<Arc<SpaceFile>> {
    pool.create_file("disk", NewFile { len_bytes: size_bytes, copies, columns: 1, tier: Tier::Any }).map_err(failed)?;
    pool.open_file("disk", true, LockMode::Exclusive)
        .map_err(|error| LabError::file("open", Path::new("space://bench/disk"))(io::Error::other(error)))
}
