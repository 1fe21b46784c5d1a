//! Room in the cache: what was not used lately is dropped.
//!
//! ```text
//!   a block to keep ─▶ take: is there room, as far as this process knows?
//!                        └─ no ─▶ make: lock, count what all objects hold
//!                              ─▶ rounds over all blocks: an old one is dropped, others age
//! ```
//!
//! This is a clock with ages: a block that was used survives a few rounds, one that was only
//! fetched one. Objects that were opened last come last in a round. Each process counts by itself
//! and looks at the files again from time to time, so several may exceed the limit by
//! [`LOOK_BYTES`] each.

use super::{
    entry::{Entry, entries},
    lock,
};
use rustix::fs::statvfs;
use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

/// Bytes that are kept before the files are looked at again.
const LOOK_BYTES: u64 = 64 << 20;
/// One part in this many of the limit is freed at once.
const FREED: u64 = 16;
/// One part in this many of the file system stays free, at most this many bytes.
const LEFT: u64 = 20;
const LEFT_BYTES_MAX: u64 = 2 << 30;
/// Rounds after which all blocks are old.
const ROUNDS: usize = 4;

/// What this process knows of the room.
#[derive(Debug)]
struct Known {
    /// Bytes that may be kept until the files are looked at again.
    credit_bytes: u64,
}

/// Room in the folder of a cache; see the module documentation.
#[derive(Debug)]
pub(super) struct Room {
    folder: PathBuf,
    limit_bytes: u64,
    known: Mutex<Known>,
}

impl Room {
    pub(super) fn new(folder: &Path, limit_bytes: u64) -> Self {
        Self { folder: folder.to_owned(), limit_bytes, known: Mutex::new(Known { credit_bytes: 0 }) }
    }

    pub(super) fn limit_bytes(&self) -> u64 {
        self.limit_bytes
    }

    /// Takes room for bytes that are to be kept.
    ///
    /// # Errors
    /// `StorageFull`; the system's error.
    pub(super) fn take(&self, len_bytes: u64) -> io::Result<()> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.credit_bytes < len_bytes {
            known.credit_bytes = self.make(len_bytes)?.min(LOOK_BYTES);
        }
        known.credit_bytes = known.credit_bytes.checked_sub(len_bytes).ok_or(io::ErrorKind::StorageFull)?;
        Ok(())
    }

    /// Makes room, if there is less than `wanted_bytes`. Returns how much there is.
    pub(super) fn make(&self, wanted_bytes: u64) -> io::Result<u64> {
        let one = self.lock()?;
        let all = entries(&self.folder)?;
        let held_bytes = held_bytes(&all)?;
        let room_bytes = self.room_bytes(held_bytes)?;
        if room_bytes >= wanted_bytes {
            return Ok(room_bytes);
        }
        let goal_bytes = wanted_bytes.max(self.limit_bytes / FREED).min(self.limit_bytes);
        let freed_bytes = drop_old(all, goal_bytes.saturating_sub(room_bytes))?;
        drop(one);
        self.room_bytes(held_bytes.saturating_sub(freed_bytes))
    }

    /// Held while room is made. It ends with the file.
    fn lock(&self) -> io::Result<File> {
        let path = self.folder.join("lock");
        let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path)?;
        lock::lock(&file, lock::HEAD)?;
        Ok(file)
    }

    fn room_bytes(&self, held_bytes: u64) -> io::Result<u64> {
        let found = statvfs(&self.folder)?;
        let free_bytes = found.f_bavail.saturating_mul(found.f_frsize);
        let left_bytes = (found.f_blocks.saturating_mul(found.f_frsize) / LEFT).min(LEFT_BYTES_MAX);
        Ok(self.limit_bytes.saturating_sub(held_bytes).min(free_bytes.saturating_sub(left_bytes)))
    }
}

fn held_bytes(all: &[Entry]) -> io::Result<u64> {
    let there = all.iter().flat_map(|entry| entry.there().map(move |there| (entry, there)));
    there.map(|(entry, there)| there.map(|(block, state)| entry.bytes_of(block, state))).sum()
}

/// Drops blocks until `wanted_bytes` are free. Returns how many were freed.
fn drop_old(mut all: Vec<Entry>, wanted_bytes: u64) -> io::Result<u64> {
    all.sort_by_key(Entry::used);
    let mut freed_bytes = 0;
    for _ in 0..ROUNDS {
        for entry in &all {
            for there in entry.there() {
                let (block, state) = there?;
                if freed_bytes >= wanted_bytes {
                    return Ok(freed_bytes);
                }
                if state.age() > 0 {
                    entry.age(block, state)?;
                } else if entry.drop_block(block)? {
                    freed_bytes += entry.bytes_of(block, state);
                }
            }
        }
        // What has no block any more is removed, unless it is open.
        for entry in all.iter().filter(|entry| entry.there().next().is_none()) {
            let _ = entry.remove();
        }
    }
    Ok(freed_bytes)
}
