//! Forwarding stores and file systems for tests: a test overrides only the calls that it observes,
//! delays or fails.
//!
//! ```text
//!   Store call ─▶ ForwardingStore, as the test overrides it ─▶ inner store
//! ```
//!
//! By default a forwarding store has no data file and no lane, and its calls may block. An engine
//! on a ring therefore gives its parts to the pool, and every call passes through here.
//!
//! Enabled by the feature `testing`, which the tests of other crates use.

use crate::{DataFile, FileFacts, FileRange, FileSystem, Lane, LocalFiles, OpenError, OpenOptions, Store, Zeroing};
use std::{
    fmt, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::SystemTime,
};

/// A [`Store`] that forwards its calls to another one.
#[expect(missing_docs, reason = "the methods are those of Store")]
pub trait ForwardingStore: Send + Sync + fmt::Debug {
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
    /// By the two calls that a test observes.
    fn write_durable_at(&self, buf: &[u8], offset_bytes: u64) -> io::Result<()> {
        self.write_at(buf, offset_bytes)?;
        self.sync_data()
    }
    fn settle_sync(&self, result: io::Result<()>) -> io::Result<()> {
        self.inner().settle_sync(result)
    }
    fn next_data(&self, offset_bytes: u64) -> io::Result<Option<FileRange>> {
        self.inner().next_data(offset_bytes)
    }
    fn allocated_bytes(&self) -> io::Result<u64> {
        self.inner().allocated_bytes()
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
    fn set_modified(&self, modified: SystemTime) -> io::Result<()> {
        self.inner().set_modified(modified)
    }
    fn keeps_inode(&self) -> bool {
        self.inner().keeps_inode()
    }
    fn access_bits(&self) -> Option<(u32, u32, u32)> {
        self.inner().access_bits()
    }
}

impl<T: ForwardingStore> Store for T {
    fn beneath(&self) -> Option<&dyn Store> {
        Some(self.inner())
    }
    fn name(&self) -> &Path {
        self.inner().name()
    }
    fn len_bytes(&self) -> io::Result<u64> {
        ForwardingStore::len_bytes(self)
    }
    fn read_at(&self, buf: &mut [u8], offset_bytes: u64) -> io::Result<()> {
        ForwardingStore::read_at(self, buf, offset_bytes)
    }
    fn write_at(&self, buf: &[u8], offset_bytes: u64) -> io::Result<()> {
        ForwardingStore::write_at(self, buf, offset_bytes)
    }
    fn set_len(&self, len_bytes: u64) -> io::Result<()> {
        ForwardingStore::set_len(self, len_bytes)
    }
    fn allocate(&self, range: FileRange) -> io::Result<()> {
        ForwardingStore::allocate(self, range)
    }
    fn zero_range(&self, range: FileRange, how: Zeroing) -> io::Result<()> {
        ForwardingStore::zero_range(self, range, how)
    }
    fn sync_data(&self) -> io::Result<()> {
        ForwardingStore::sync_data(self)
    }
    fn write_durable_at(&self, buf: &[u8], offset_bytes: u64) -> io::Result<()> {
        ForwardingStore::write_durable_at(self, buf, offset_bytes)
    }
    fn settle_sync(&self, result: io::Result<()>) -> io::Result<()> {
        ForwardingStore::settle_sync(self, result)
    }
    fn next_data(&self, offset_bytes: u64) -> io::Result<Option<FileRange>> {
        ForwardingStore::next_data(self, offset_bytes)
    }
    fn data_file(&self) -> Option<DataFile<'_>> {
        ForwardingStore::data_file(self)
    }
    fn lane(&self) -> Option<Arc<dyn Lane>> {
        ForwardingStore::lane(self)
    }
    fn never_blocks(&self) -> bool {
        ForwardingStore::never_blocks(self)
    }
    fn set_modified(&self, modified: SystemTime) -> io::Result<()> {
        ForwardingStore::set_modified(self, modified)
    }
    fn keeps_inode(&self) -> bool {
        ForwardingStore::keeps_inode(self)
    }
    fn access_bits(&self) -> Option<(u32, u32, u32)> {
        ForwardingStore::access_bits(self)
    }
    fn allocated_bytes(&self) -> io::Result<u64> {
        ForwardingStore::allocated_bytes(self)
    }
}

/// A [`FileSystem`] that forwards its calls to the machine's own.
#[expect(missing_docs, reason = "the methods are those of FileSystem")]
pub trait ForwardingFileSystem: Send + Sync + fmt::Debug {
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
    fn rename(&self, from: &Path, to: &Path, replace: bool) -> io::Result<()> {
        LocalFiles.rename(from, to, replace)
    }
    fn remove(&self, path: &Path) -> io::Result<()> {
        LocalFiles.remove(path)
    }
    fn sync_directory_of(&self, path: &Path) -> io::Result<()> {
        LocalFiles.sync_directory_of(path)
    }
}

impl<T: ForwardingFileSystem> FileSystem for T {
    fn open(&self, path: &Path, options: &OpenOptions) -> Result<Arc<dyn Store>, OpenError> {
        ForwardingFileSystem::open(self, path, options)
    }
    fn open_canonical(&self, path: &Path, devices: bool, options: &OpenOptions) -> Result<Arc<dyn Store>, OpenError> {
        ForwardingFileSystem::open_canonical(self, path, devices, options)
    }
    fn rename(&self, from: &Path, to: &Path, replace: bool) -> io::Result<()> {
        ForwardingFileSystem::rename(self, from, to, replace)
    }
    fn link(&self, existing: &Path, new: &Path) -> io::Result<()> {
        LocalFiles.link(existing, new)
    }
    fn remove(&self, path: &Path) -> io::Result<()> {
        ForwardingFileSystem::remove(self, path)
    }
    fn sync_directory_of(&self, path: &Path) -> io::Result<()> {
        ForwardingFileSystem::sync_directory_of(self, path)
    }
    fn canonical(&self, path: &Path) -> io::Result<PathBuf> {
        LocalFiles.canonical(path)
    }
    fn facts(&self, path: &Path) -> io::Result<FileFacts> {
        ForwardingFileSystem::facts(self, path)
    }
    fn list(&self, directory: &Path) -> io::Result<Vec<PathBuf>> {
        LocalFiles.list(directory)
    }
}
