//! Objects on a server that fails as it is told: every byte that is shown is right, and every
//! failure is an error that names its cause.

mod cache;
mod faults;
mod reading;
mod repository;
mod units;

use crate::{AwsVariables, BLOCK_BYTES, ObjectFiles, Settings, testing::TestServer};
use diskwright_store::{FileSystem, LockMode, OpenError, OpenOptions, Store};
use std::{path::Path, sync::Arc, time::Duration};
use tempfile::TempDir;

pub(super) const BLOCK: usize = BLOCK_BYTES as usize;

/// Bytes of which each 8 are different.
pub(super) fn contents(len: usize) -> Vec<u8> {
    (0..len.div_ceil(8) as u64)
        .flat_map(|word| word.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes())
        .take(len)
        .collect()
}

/// A server, and a folder for the cache.
pub(super) struct Bench {
    pub(super) server: TestServer,
    pub(super) folder: TempDir,
}

impl Bench {
    /// With an object "disk" of so many bytes.
    pub(super) fn new(len: usize) -> (Self, Vec<u8>) {
        let bench = Self { server: TestServer::start(), folder: tempfile::tempdir().unwrap() };
        let bytes = contents(len);
        bench.server.put("disk", bytes.clone(), "\"one\"");
        (bench, bytes)
    }

    pub(super) fn settings(&self) -> Settings {
        Settings {
            cache: Some(self.folder.path().to_owned()),
            cache_bytes: 1 << 30,
            timeout: Duration::from_secs(20),
            allow_http: false,
            aws: AwsVariables::default(),
        }
    }

    /// What a process has.
    pub(super) fn files(&self) -> ObjectFiles {
        ObjectFiles::new(Some(self.settings()))
    }

    pub(super) fn open_with(&self, files: &ObjectFiles) -> Result<Arc<dyn Store>, OpenError> {
        files.open(
            Path::new(&self.server.url("disk")),
            &OpenOptions { lock: LockMode::Shared, ..OpenOptions::default() },
        )
    }

    pub(super) fn open(&self) -> Arc<dyn Store> {
        self.open_with(&self.files()).unwrap()
    }

    /// The blocks that were fetched since this was last asked, sorted. One GET may have several.
    pub(super) fn fetched(&self) -> Vec<u64> {
        let seen = self.server.take_seen();
        let ranges = seen.into_iter().filter_map(|seen| seen.range).filter(|range| *range != (0..16));
        let mut blocks: Vec<u64> =
            ranges.flat_map(|range| range.start / BLOCK_BYTES..range.end.div_ceil(BLOCK_BYTES)).collect();
        blocks.sort_unstable();
        blocks
    }
}

/// All bytes of a store.
pub(super) fn all(store: &dyn Store) -> Vec<u8> {
    let mut bytes = vec![0xEE; store.len_bytes().unwrap() as usize];
    store.read_at(&mut bytes, 0).unwrap();
    bytes
}

/// Waits until a condition holds.
pub(super) fn eventually(mut is: impl FnMut() -> bool) {
    for _ in 0..500 {
        if is() {
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    panic!("it never came true");
}
