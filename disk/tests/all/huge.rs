//! The cost of a conversion follows the data of a disk, not its size. Counts of calls and bytes are
//! the same in each run; times would not be.

use crate::common::write;
use diskwright_disk::{ConvertOptions, CreateRequest, convert, create};
use diskwright_store::{
    FileRange, FileSystem, Files, LocalFiles, OpenError, Store, Zeroing,
    testing::{ForwardingFileSystem, ForwardingStore},
};
use std::{
    io,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};
use tempfile::tempdir;

const MIB: u64 = 1 << 20;
const TIB: u64 = 1 << 40;
/// Reads and writes of a conversion: some for each GiB, as qcow2 has a table for each half of one.
/// One for each window would be a million.
const TRANSFERS_MAX: u64 = 50_000;
const BYTES_MAX: u64 = 64 * MIB;
/// Further calls: some for each of the 4096 pages of a table, far less than one for each window.
const OTHERS_MAX: u64 = 100_000;

/// Calls of the stores of both sides.
#[derive(Debug, Default)]
struct Counts {
    /// Reads and writes.
    transfers: AtomicU64,
    /// Their bytes.
    bytes: AtomicU64,
    /// Searches for the next data of a file, and zeroing.
    others: AtomicU64,
}

impl Counts {
    fn add(&self, bytes: usize) {
        self.transfers.fetch_add(1, Relaxed);
        self.bytes.fetch_add(bytes as u64, Relaxed);
    }

    fn check(&self, what: &str) {
        let counts = [&self.transfers, &self.bytes, &self.others].map(|count| count.load(Relaxed));
        println!("{what}: {} reads and writes of {} bytes, {} other calls", counts[0], counts[1], counts[2]);
        let is_few = counts[0] < TRANSFERS_MAX && counts[1] < BYTES_MAX && counts[2] < OTHERS_MAX;
        assert!(is_few, "{what}: {counts:?}");
    }
}

#[derive(Debug)]
struct CountedFiles(Arc<Counts>);

impl ForwardingFileSystem for CountedFiles {
    fn open(&self, path: &Path, options: &diskwright_store::OpenOptions) -> Result<Arc<dyn Store>, OpenError> {
        Ok(Arc::new(CountedStore { inner: LocalFiles.open(path, options)?, counts: Arc::clone(&self.0) }))
    }
}

/// A store without a file of its own (`data_file`), so that payload is read and written by calls
/// that are counted too.
#[derive(Debug)]
struct CountedStore {
    inner: Arc<dyn Store>,
    counts: Arc<Counts>,
}

impl ForwardingStore for CountedStore {
    fn inner(&self) -> &dyn Store {
        &*self.inner
    }

    fn read_at(&self, buf: &mut [u8], offset_bytes: u64) -> io::Result<()> {
        self.counts.add(buf.len());
        self.inner.read_at(buf, offset_bytes)
    }

    fn write_at(&self, buf: &[u8], offset_bytes: u64) -> io::Result<()> {
        self.counts.add(buf.len());
        self.inner.write_at(buf, offset_bytes)
    }

    fn zero_range(&self, range: FileRange, how: Zeroing) -> io::Result<()> {
        self.counts.others.fetch_add(1, Relaxed);
        self.inner.zero_range(range, how)
    }

    fn next_data(&self, offset_bytes: u64) -> io::Result<Option<FileRange>> {
        self.counts.others.fetch_add(1, Relaxed);
        self.inner.next_data(offset_bytes)
    }
}

/// Converts with counted calls.
fn counted(source: &Path, dest: &Path) -> Arc<Counts> {
    let counts = Arc::new(Counts::default());
    let files = Files::new(Arc::new(CountedFiles(Arc::clone(&counts))));
    let mut options = ConvertOptions { verify: true, ..ConvertOptions::default() };
    options.source.files = files.clone();
    options.dest.files = files;
    let done = convert(source, dest, &options, &mut |_, _| true).unwrap();
    assert_eq!((done.size_bytes, done.verified_bytes), (64 * TIB, 64 * TIB));
    counts
}

/// An empty disk of 64 TiB has a million windows of 64 MiB, and tables of up to 16 MiB. A
/// conversion looks at the pages of its tables, and at none of the windows.
#[test]
fn an_empty_disk_of_64_tib_is_converted_in_a_few_calls() {
    for (from, to) in [("vhdx", "vhdx"), ("vhdx", "qcow2"), ("qcow2", "vhdx")] {
        let dir = tempdir().unwrap();
        let (source, dest) = (dir.path().join(format!("source.{from}")), dir.path().join(format!("dest.{to}")));
        create(&source, &CreateRequest { size_bytes: Some(64 * TIB), ..CreateRequest::default() }).unwrap();
        counted(&source, &dest).check(&format!("{from} to {to}"));
        // A block at the end costs a few calls more, wherever it lies.
        write(&source, 64 * TIB - 4 * MIB, 5, 4096);
        let other = dir.path().join(format!("other.{to}"));
        counted(&source, &other).check(&format!("{from} to {to}, with a block"));
    }
}
