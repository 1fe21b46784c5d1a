//! Objects in S3: what a cold and a warm cache cost, and a second push.
//!
//! The server is versitygw on this machine, behind a proxy that adds 5 ms to each request and
//! counts what is asked for (`gateway.rs`).

mod boot;
mod children;
mod cold;
mod gateway;
mod pushing;
mod warm;

pub(crate) use boot::boot;
pub(crate) use children::hundred;
pub(crate) use cold::{random, sequential};
pub(crate) use pushing::second;
pub(crate) use warm::warm;

use diskwright_lab::{LabError, Result};
use diskwright_object::{ObjectError, ObjectFiles, Settings};
use diskwright_store::{BlockDevice, CacheMode, OpenOptions, RawDevice};
use gateway::{Gateway, MIB, NAME};
use std::{io, path::Path, sync::Arc};

fn failed(error: ObjectError) -> LabError {
    LabError::file("read", Path::new(NAME))(io::Error::other(error))
}

/// The object as a disk, with a cache of these settings, as a new process would open it.
fn open(settings: &Settings, cache: CacheMode) -> Result<(ObjectFiles, Arc<dyn BlockDevice>)> {
    let files = ObjectFiles::new(Some(settings.clone()));
    let options = OpenOptions { cache, ..OpenOptions::default() };
    let store = files.open_object(Path::new(NAME), &options).map_err(failed)?;
    let device = RawDevice::new(Arc::new(store), false, 512).map_err(LabError::file("open", Path::new(NAME)))?;
    Ok((files, Arc::new(device)))
}

/// Makes the cache empty.
fn make_cold(settings: &Settings) -> Result<()> {
    let cache = diskwright_object::Cache::open(settings).map_err(failed)?;
    cache.map_or(Ok(0), |cache| cache.drop_objects(&|_| true)).map_err(failed).map(|_| ())
}

/// A server with an object of this size, or why there is none.
fn gateway(context: &diskwright_lab::acceptance::Context<'_>, size_bytes: u64) -> Result<Result<Gateway, String>> {
    context.scratch.need("an object and its cache", 2 * size_bytes + 512 * MIB)?;
    Gateway::start(&context.scratch.folder("s3")?, size_bytes)
}
