//! Forwarding stores and file systems for tests: a test overrides only the calls that it observes,
//! delays or fails.
//!
//! ```text
//!   Store call ─▶ PassesOn, as the test overrides it ─▶ inner store
//! ```
//!
//! By default a forwarding store has no data file and no lane, and its calls may block. An engine
//! on a ring therefore gives its parts to the pool, and every call passes through here.
//!
//! Enabled by the feature `testing`, which the tests of other crates use.

use crate::{
    DataFile, FileFacts, FileRange, FileSystem, Lane, LocalFiles, OpenError, OpenOptions, SectorSizes, Store, Zeroing,
};
use std::{
    fmt, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::SystemTime,
};

/// A [`Store`] that forwards its calls to another one.
#[expect(missing_docs, reason = "the methods are those of Store")]
pub trait PassesOn: Send + Sync + fmt::Debug {
    /// The store to which calls are forwarded.
    fn inner(&self) -> &dyn Store;

    fn len_bytes(&self) -> io::Result<u64> {
        self.inner().len_bytes()
    }
    fn read_at(&self, buf: &mut [u8], offset_bytes: u64) -> io::Result<()> {
        self.inner().read_at(buf, offset_bytes)
    }
    fn write_at(&self, buf: &[u8], offset_bytes: u64) -> io::Result<()> {
        self.inner().write_at(buf, offset_bytes)
    }
    fn set_len(&self, len_bytes: u64) -> io::Result<()> {
        self.inner().set_len(len_bytes)
    }
    fn allocate(&self, range: FileRange) -> io::Result<()> {
        self.inner().allocate(range)
    }
    fn zero_range(&self, range: FileRange, how: Zeroing) -> io::Result<()> {
        self.inner().zero_range(range, how)
    }
    fn sync_data(&self) -> io::Result<()> {
        self.inner().sync_data()
    }
    fn settle_sync(&self, result: io::Result<()>) -> io::Result<()> {
        self.inner().settle_sync(result)
    }
    fn next_data(&self, offset_bytes: u64) -> io::Result<Option<FileRange>> {
        self.inner().next_data(offset_bytes)
    }
    fn data_file(&self) -> Option<DataFile<'_>> {
        None
    }
    fn lane(&self) -> Option<Arc<dyn Lane>> {
        None
    }
    fn never_blocks(&self) -> bool {
        false
    }
}

impl<T: PassesOn> Store for T {
    fn name(&self) -> &Path {
        self.inner().name()
    }
    fn len_bytes(&self) -> io::Result<u64> {
        PassesOn::len_bytes(self)
    }
    fn read_at(&self, buf: &mut [u8], offset_bytes: u64) -> io::Result<()> {
        PassesOn::read_at(self, buf, offset_bytes)
    }
    fn write_at(&self, buf: &[u8], offset_bytes: u64) -> io::Result<()> {
        PassesOn::write_at(self, buf, offset_bytes)
    }
    fn set_len(&self, len_bytes: u64) -> io::Result<()> {
        PassesOn::set_len(self, len_bytes)
    }
    fn allocate(&self, range: FileRange) -> io::Result<()> {
        PassesOn::allocate(self, range)
    }
    fn zero_range(&self, range: FileRange, how: Zeroing) -> io::Result<()> {
        PassesOn::zero_range(self, range, how)
    }
    fn sync_data(&self) -> io::Result<()> {
        PassesOn::sync_data(self)
    }
    fn settle_sync(&self, result: io::Result<()>) -> io::Result<()> {
        PassesOn::settle_sync(self, result)
    }
    fn next_data(&self, offset_bytes: u64) -> io::Result<Option<FileRange>> {
        PassesOn::next_data(self, offset_bytes)
    }
    fn data_file(&self) -> Option<DataFile<'_>> {
        PassesOn::data_file(self)
    }
    fn lane(&self) -> Option<Arc<dyn Lane>> {
        PassesOn::lane(self)
    }
    fn never_blocks(&self) -> bool {
        PassesOn::never_blocks(self)
    }
    fn set_modified(&self, modified: SystemTime) -> io::Result<()> {
        self.inner().set_modified(modified)
    }
    fn identity(&self) -> Option<(u64, u64)> {
        self.inner().identity()
    }
    fn sector_bytes(&self) -> SectorSizes {
        self.inner().sector_bytes()
    }
    fn allocated_bytes(&self) -> io::Result<u64> {
        self.inner().allocated_bytes()
    }
}

/// A [`FileSystem`] that forwards its calls to the machine's own.
#[expect(missing_docs, reason = "the methods are those of FileSystem")]
pub trait PassesFilesOn: Send + Sync + fmt::Debug {
    fn open(&self, path: &Path, options: &OpenOptions) -> Result<Arc<dyn Store>, OpenError> {
        LocalFiles.open(path, options)
    }
    fn open_canonical(&self, path: &Path, devices: bool, options: &OpenOptions) -> Result<Arc<dyn Store>, OpenError> {
        let _ = devices;
        self.open(path, options)
    }
    fn facts(&self, path: &Path) -> io::Result<FileFacts> {
        LocalFiles.facts(path)
    }
}

impl<T: PassesFilesOn> FileSystem for T {
    fn open(&self, path: &Path, options: &OpenOptions) -> Result<Arc<dyn Store>, OpenError> {
        PassesFilesOn::open(self, path, options)
    }
    fn open_canonical(&self, path: &Path, devices: bool, options: &OpenOptions) -> Result<Arc<dyn Store>, OpenError> {
        PassesFilesOn::open_canonical(self, path, devices, options)
    }
    fn rename(&self, from: &Path, to: &Path, replace: bool) -> io::Result<()> {
        LocalFiles.rename(from, to, replace)
    }
    fn link(&self, existing: &Path, new: &Path) -> io::Result<()> {
        LocalFiles.link(existing, new)
    }
    fn remove(&self, path: &Path) -> io::Result<()> {
        LocalFiles.remove(path)
    }
    fn sync_directory_of(&self, path: &Path) -> io::Result<()> {
        LocalFiles.sync_directory_of(path)
    }
    fn canonical(&self, path: &Path) -> io::Result<PathBuf> {
        LocalFiles.canonical(path)
    }
    fn facts(&self, path: &Path) -> io::Result<FileFacts> {
        PassesFilesOn::facts(self, path)
    }
    fn list(&self, directory: &Path) -> io::Result<Vec<PathBuf>> {
        LocalFiles.list(directory)
    }
}
