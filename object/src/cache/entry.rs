//! The files of one cached object, shared by all processes that have it open.
//!
//! ```text
//!   fetched ─▶ data ─▶ checksums ─▶ its state in the map     no sync: see below
//!   read    ─▶ its state? ─▶ checksums ─▶ data, compared
//!   dropped ─▶ its state ─▶ hole in the data
//! ```
//!
//! A version of an object never changes, and every read is compared with the block's checksums. So
//! nothing has to be durable in any order: after a power cut a block that is only partly there is
//! fetched again, and a reader that races with a drop reads zeros, finds that they are wrong, and
//! fetches the block again. Zeros do not have the checksum 0, so a map that was never written is
//! no proof of a hole.

use super::{
    lock,
    map::{
        AGE_NEW, AGE_USED, HEAD_BYTES, Identity, STATE_BYTES, SUMS, State, Sums, THERE, UNITS_AT, USED_AT, have_sums,
        sums_of_bytes, sums_to_bytes,
    },
};
use crate::{
    BLOCK_BYTES, SUM_BYTES,
    units::{UNIT_BYTES, Units},
};
use rustix::fs::{FallocateFlags, fallocate};
use std::{
    fs::{self, File, OpenOptions},
    io,
    ops::Range,
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
    time::SystemTime,
};

/// Ending of a map, and of the data.
const MAP: &str = "map";
const DATA: &str = "data";

/// States that are read at once.
const STATES: u64 = 8192;

/// What is there of a block.
#[derive(Debug)]
pub(crate) struct Held {
    /// As long as the block. What is not there is of no meaning.
    pub(crate) bytes: Vec<u8>,
    pub(crate) sums: Sums,
    pub(crate) units: Units,
}

impl Held {
    /// Nothing of a block of this length.
    pub(crate) fn nothing(len_bytes: usize) -> Self {
        Self { bytes: vec![0; len_bytes], sums: Box::new([0; SUMS]), units: Units::default() }
    }
}

/// The files of an object; see the module documentation.
#[derive(Debug)]
pub(crate) struct Entry {
    map: File,
    data: File,
    map_path: PathBuf,
    pub(super) identity: Identity,
}

fn open(path: &Path, is_new: bool) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(is_new)
        .truncate(false)
        .mode(0o600)
        .custom_flags(nix::libc::O_NOFOLLOW)
        .open(path)
}

impl Entry {
    /// Opens the files of an object, and makes them if there are none.
    pub(crate) fn open(folder: &Path, identity: &Identity) -> io::Result<Self> {
        let head = identity.head().ok_or_else(|| io::Error::other("the name of the object is too long"))?;
        let map_path = folder.join(identity.file_name()).with_extension(MAP);
        let map = loop {
            let map = open(&map_path, true)?;
            if lock::try_lock(&map, lock::OPEN, false)? && is_at(&map, &map_path) {
                break map;
            }
            // Another process is removing it.
        };
        lock::lock(&map, lock::HEAD)?;
        let made = (|| -> io::Result<File> {
            let data = open(&map_path.with_extension(DATA), true)?;
            let mut found = [0; HEAD_BYTES];
            let is_whole = map.read_exact_at(&mut found, 0).is_ok() && found == head;
            if !is_whole {
                // Nothing of what is there may be taken for this object.
                data.set_len(0)?;
                map.set_len(0)?;
                map.set_len(identity.sums_at(identity.blocks()))?;
                map.write_all_at(&head, 0)?;
            }
            let data_bytes = identity.size_bytes.next_multiple_of(SUM_BYTES);
            if data.metadata()?.len() != data_bytes {
                data.set_len(data_bytes)?;
            }
            // The time of its last use.
            map.set_modified(SystemTime::now())?;
            Ok(data)
        })();
        lock::unlock(&map, lock::HEAD);
        Ok(Self { data: made?, map, map_path, identity: identity.clone() })
    }

    /// Opens the map at a path for a look from outside, without the lock of those who use it.
    pub(super) fn look_at(map_path: &Path) -> io::Result<Self> {
        let map = open(map_path, false)?;
        let mut head = [0; HEAD_BYTES];
        map.read_exact_at(&mut head, 0)?;
        let damaged = || io::Error::new(io::ErrorKind::InvalidData, "the head of the map is damaged");
        let identity = Identity::of_head(&head).ok_or_else(damaged)?;
        let data = open(&map_path.with_extension(DATA), true)?;
        Ok(Self { map, data, map_path: map_path.to_owned(), identity })
    }

    /// The path of the data.
    pub(crate) fn data_path(&self) -> PathBuf {
        self.map_path.with_extension(DATA)
    }

    /// When it was last opened.
    pub(super) fn used(&self) -> Option<SystemTime> {
        self.map.metadata().and_then(|found| found.modified()).ok()
    }

    /// The blocks of which something is there.
    pub(super) fn there(&self) -> impl Iterator<Item = io::Result<(u64, State)>> {
        let blocks = self.identity.blocks();
        let read = move |first: u64| {
            let mut bytes = vec![0; STATE_BYTES * (blocks - first).min(STATES) as usize];
            match self.map.read_exact_at(&mut bytes, self.identity.state_at(first)) {
                Ok(()) => {
                    let states = bytes.as_chunks().0.iter().map(State::of_bytes);
                    let there = (first..).zip(states).filter(|(_, state)| state.is_there());
                    there.map(Ok).collect::<Vec<_>>()
                }
                Err(error) => vec![Err(error)],
            }
        };
        (0..blocks).step_by(STATES as usize).flat_map(read)
    }

    /// Bytes of a block that are there.
    pub(super) fn bytes_of(&self, block: u64, state: State) -> u64 {
        self.identity.ranges(block, state.units).map(|range| range.end - range.start).sum()
    }

    fn state(&self, block: u64) -> io::Result<State> {
        let mut bytes = [0; STATE_BYTES];
        self.map.read_exact_at(&mut bytes, self.identity.state_at(block))?;
        Ok(State::of_bytes(&bytes))
    }

    /// What is there of a block and whole; `None` if nothing is.
    pub(crate) fn read(&self, block: u64) -> io::Result<Option<Held>> {
        let state = self.state(block)?;
        if !state.is_there() {
            return Ok(None);
        }
        let mut stored = [0; SUMS * 4];
        self.map.read_exact_at(&mut stored, self.identity.sums_at(block))?;
        let stored = sums_of_bytes(&stored);
        let len = self.identity.block_len(block);
        let mut bytes = vec![0; len.next_multiple_of(SUM_BYTES as usize)];
        self.data.read_exact_at(&mut bytes, block * BLOCK_BYTES)?;
        let (mut sums, mut units) = (Box::new([0; SUMS]), Units::default());
        for run in state.units.runs() {
            for start in run.step_by(UNIT_BYTES as usize) {
                let end = (start + UNIT_BYTES).min(bytes.len() as u64);
                let Some(unit) = bytes.get(start as usize..end as usize).filter(|unit| !unit.is_empty()) else { break };
                if have_sums(&stored, start, unit) {
                    let of_unit = (start / SUM_BYTES) as usize..(end / SUM_BYTES) as usize;
                    sums[of_unit.clone()].copy_from_slice(&stored[of_unit]);
                    units = units.and(Units::of(start..end));
                }
            }
        }
        bytes.truncate(len);
        Ok((!units.is_empty()).then_some(Held { bytes, sums, units }))
    }

    /// Keeps a range of a block, which begins with a unit and ends with one, or with the block.
    pub(crate) fn keep(&self, block: u64, range: &Range<u64>, bytes: &[u8], sums: &Sums) -> io::Result<()> {
        self.data.write_all_at(bytes, block * BLOCK_BYTES + range.start)?;
        let of_range = (range.start / SUM_BYTES) as usize..range.end.div_ceil(SUM_BYTES) as usize;
        let sums_at = self.identity.sums_at(block) + of_range.start as u64 * 4;
        self.map.write_all_at(&sums_to_bytes(sums.get(of_range).unwrap_or_default()), sums_at)?;
        let state = self.state(block)?;
        let there = if state.is_there() { state.units } else { Units::default() };
        let state_at = self.identity.state_at(block);
        self.map.write_all_at(&there.and(Units::of(range.clone())).bits().to_le_bytes(), state_at + UNITS_AT)?;
        if !state.is_there() {
            // What was read of it before it was dropped.
            self.map.write_all_at(&[0; 2], state_at + USED_AT)?;
        }
        self.map.write_all_at(&[THERE | AGE_NEW], state_at)
    }

    /// Says that units of blocks were used, so that others are dropped first.
    pub(crate) fn mark_used(&self, blocks: impl IntoIterator<Item = (u64, Units)>) -> io::Result<()> {
        for (block, units) in blocks {
            let (state, state_at) = (self.state(block)?, self.identity.state_at(block));
            if !state.is_there() {
                continue;
            }
            if !state.used.has(units) {
                self.map.write_all_at(&state.used.and(units).bits().to_le_bytes(), state_at + USED_AT)?;
            }
            if state.age() != AGE_USED {
                self.map.write_all_at(&[THERE | AGE_USED], state_at)?;
            }
        }
        Ok(())
    }

    /// Lets a block grow older by a round.
    pub(super) fn age(&self, block: u64, state: State) -> io::Result<()> {
        self.map.write_all_at(&[THERE | state.age().saturating_sub(1)], self.identity.state_at(block))
    }

    /// Drops a block. `false` if a process is fetching it.
    pub(super) fn drop_block(&self, block: u64) -> io::Result<bool> {
        if !self.try_lock(block)? {
            return Ok(false);
        }
        let dropped = (|| -> io::Result<()> {
            self.map.write_all_at(&[0], self.identity.state_at(block))?;
            let len_bytes = (self.identity.block_len(block) as u64).next_multiple_of(SUM_BYTES);
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            Ok(fallocate(&self.data, flags, block * BLOCK_BYTES, len_bytes)?)
        })();
        self.unlock(block);
        dropped.map(|()| true)
    }

    /// Removes the files, if nobody has the object open.
    pub(super) fn remove(&self) -> io::Result<bool> {
        if !lock::try_lock(&self.map, lock::OPEN, true)? {
            return Ok(false);
        }
        // The data first: a map without data is an object without blocks after the next open,
        // because reads are compared.
        let removed = fs::remove_file(self.data_path()).and_then(|()| fs::remove_file(&self.map_path));
        lock::unlock(&self.map, lock::OPEN);
        removed.map(|()| true)
    }

    /// Whether a process has the object open.
    pub(super) fn is_open(&self) -> bool {
        match lock::try_lock(&self.map, lock::OPEN, true) {
            Ok(true) => {
                lock::unlock(&self.map, lock::OPEN);
                false
            }
            _ => true,
        }
    }

    /// Takes the lock of a block, to fetch it. `false` if another process fetches it.
    pub(crate) fn try_lock(&self, block: u64) -> io::Result<bool> {
        lock::try_lock(&self.map, lock::BLOCKS + block, true)
    }

    /// Gives the lock of a block up.
    pub(crate) fn unlock(&self, block: u64) {
        lock::unlock(&self.map, lock::BLOCKS + block);
    }
}

/// The maps of a folder that can be read.
pub(super) fn entries(folder: &Path) -> io::Result<Vec<Entry>> {
    let mut found = Vec::new();
    for file in fs::read_dir(folder)? {
        let path = file?.path();
        if path.extension().is_some_and(|ending| ending == MAP) {
            found.extend(Entry::look_at(&path).ok());
        }
    }
    Ok(found)
}

/// Whether an open file is still the one at a path.
fn is_at(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    match (file.metadata(), fs::symlink_metadata(path)) {
        (Ok(open), Ok(there)) => (open.dev(), open.ino()) == (there.dev(), there.ino()),
        _ => false,
    }
}
