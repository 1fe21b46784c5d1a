//! Blocks of objects on the local disk: one cache for all processes of a machine.
//!
//! ```text
//!   FOLDER/<SHA-256 of the version>.map    head, which blocks, checksums     (map.rs)
//!   FOLDER/<SHA-256 of the version>.data   a sparse file with the blocks     (entry.rs)
//!   FOLDER/lock                            held while room is made           (room.rs)
//! ```
//!
//! The cache is bounded: before it grows beyond its size, blocks that were not used lately are
//! dropped. It also leaves a twentieth of the file system free, or 2 GiB. If the disk is full or
//! the folder cannot be written, blocks are fetched and not kept.

mod entry;
mod lock;
pub(crate) mod map;
mod room;

pub(crate) use entry::{Entry, Held};

use crate::{
    BLOCK_BYTES,
    error::{ObjectError, Result},
    settings::Settings,
    units::Units,
};
use entry::entries;
use map::{Identity, State};
use room::Room;
use std::{
    fs, io,
    ops::Range,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    time::SystemTime,
};

/// A cached version of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CachedObject {
    /// Its name.
    pub name: String,
    /// Its ETag.
    pub etag: String,
    /// Length of the object in bytes.
    pub size_bytes: u64,
    /// Ranges of it that are in the cache, in bytes.
    pub held: Vec<Range<u64>>,
    /// Ranges of these that were read, in bytes, in units of 64 KiB.
    pub read: Vec<Range<u64>>,
    /// When it was last opened.
    pub used: Option<SystemTime>,
    /// Whether a process has it open.
    pub is_open: bool,
}

impl CachedObject {
    /// Bytes of it that are in the cache.
    pub fn held_bytes(&self) -> u64 {
        sum_of(&self.held)
    }

    /// Bytes of these that were read.
    pub fn read_bytes(&self) -> u64 {
        sum_of(&self.read)
    }
}

/// The cache of a machine; see the module documentation.
#[derive(Debug)]
pub struct Cache {
    folder: PathBuf,
    room: Room,
}

impl Cache {
    /// The cache of the settings, whose folder is made.
    ///
    /// # Errors
    /// [`ObjectError::Local`]: it cannot be made.
    pub fn open(settings: &Settings) -> Result<Option<Self>> {
        let Some(folder) = &settings.cache else { return Ok(None) };
        let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(folder);
        made.map_err(|source| ObjectError::local("make the folder of the cache", folder, source))?;
        let room = Room::new(folder, settings.cache_bytes);
        Ok(Some(Self { folder: folder.clone(), room }))
    }

    /// Its folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Bytes that it may hold.
    pub fn limit_bytes(&self) -> u64 {
        self.room.limit_bytes()
    }

    /// The files of an object, which are made if there are none.
    pub(crate) fn entry(&self, identity: &Identity) -> io::Result<Entry> {
        Entry::open(&self.folder, identity)
    }

    /// Keeps a range of a block, after making room for it; see [`Entry::keep`].
    pub(crate) fn keep(
        &self,
        entry: &Entry,
        block: u64,
        range: &Range<u64>,
        bytes: &[u8],
        sums: &map::Sums,
    ) -> io::Result<()> {
        self.room.take(bytes.len() as u64)?;
        match entry.keep(block, range, bytes, sums) {
            Err(error) if diskwright_store::is_full(&error) => {
                self.room.make(BLOCK_BYTES * 64)?;
                entry.keep(block, range, bytes, sums)
            }
            result => result,
        }
    }

    /// The objects of which it has blocks, by name. A map that is damaged is left out.
    ///
    /// # Errors
    /// [`ObjectError::Local`].
    pub fn list(&self) -> Result<Vec<CachedObject>> {
        let mut found = Vec::new();
        for entry in self.entries()? {
            let Ok(there) = entry.there().collect::<io::Result<Vec<_>>>() else { continue };
            let ranges = |units: fn(&State) -> Units| {
                joined(there.iter().flat_map(|(block, state)| entry.identity.ranges(*block, units(state))))
            };
            found.push(CachedObject {
                name: entry.identity.name.clone(),
                etag: entry.identity.etag.clone(),
                size_bytes: entry.identity.size_bytes,
                held: ranges(|state| state.units),
                read: ranges(|state| state.used),
                used: entry.used(),
                is_open: entry.is_open(),
            });
        }
        found.sort_by(|one, other| (&one.name, &one.etag).cmp(&(&other.name, &other.etag)));
        Ok(found)
    }

    /// Drops the blocks of the objects for which `is_meant` says yes. Returns the bytes. Blocks
    /// that are being fetched stay.
    ///
    /// # Errors
    /// [`ObjectError::Local`].
    pub fn drop_objects(&self, is_meant: &dyn Fn(&str) -> bool) -> Result<u64> {
        let mut dropped_bytes = 0;
        for entry in self.entries()?.into_iter().filter(|entry| is_meant(&entry.identity.name)) {
            let failed = |source| ObjectError::local("drop blocks of the cache", &entry.data_path(), source);
            let there: Vec<_> = entry.there().collect::<io::Result<_>>().map_err(failed)?;
            let is_removed = entry.remove().map_err(failed)?;
            for (block, state) in there {
                // A program has it open.
                if is_removed || entry.drop_block(block).map_err(failed)? {
                    dropped_bytes += entry.bytes_of(block, state);
                }
            }
        }
        Ok(dropped_bytes)
    }

    fn entries(&self) -> Result<Vec<Entry>> {
        entries(&self.folder).map_err(|source| ObjectError::local("read the cache", &self.folder, source))
    }
}

/// Ranges in order, those joined that follow each other.
fn joined(ranges: impl Iterator<Item = Range<u64>>) -> Vec<Range<u64>> {
    let mut joined: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match joined.last_mut().filter(|last| last.end == range.start) {
            Some(last) => last.end = range.end,
            None => joined.push(range),
        }
    }
    joined
}

fn sum_of(ranges: &[Range<u64>]) -> u64 {
    ranges.iter().map(|range| range.end - range.start).sum()
}
