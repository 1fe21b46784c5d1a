//! Errors of conversions and comparisons name the file that failed, and for an unfinished copy its
//! final path.

use diskwright_disk::{ConvertOptions, CreateRequest, Disk, OpenOptions, compare, convert, create};
use diskwright_store::{
    Blocking, CacheMode, EngineKind, FileSystem, Files, LocalFiles, Store,
    testing::{ForwardingFileSystem, ForwardingStore},
};
use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};
use tempfile::tempdir;

const MIB: u64 = 1 << 20;

fn small(path: &Path) {
    let request = CreateRequest { size_bytes: Some(16 * MIB), block_bytes: Some(1 << 20), ..CreateRequest::default() };
    create(path, &request).unwrap();
}

fn write(path: &Path, offset_bytes: u64) {
    let disk = Disk::open(path, &OpenOptions { writable: true, ..OpenOptions::default() }).unwrap();
    let mut io = Blocking::open(&*disk, EngineKind::Auto).unwrap();
    io.write(offset_bytes, &vec![7; MIB as usize], false).unwrap();
    drop(io);
    disk.close().unwrap();
}

/// The error of a conversion. The copy must have been removed.
fn refusal(source: &Path, dest: &Path, options: &ConvertOptions) -> String {
    let told = convert(source, dest, options, &mut |_, _| true).unwrap_err().to_string();
    let left = fs::read_dir(dest.parent().unwrap()).unwrap().map(|entry| entry.unwrap().path());
    let left: Vec<PathBuf> = left.filter(|path| path.to_string_lossy().contains("dest")).collect();
    assert!(left.is_empty(), "{left:?}");
    told
}

#[test]
fn an_error_of_the_source_names_the_source() {
    let dir = tempdir().unwrap();
    let (source, dest) = (dir.path().join("source.vhd"), dir.path().join("dest.vhdx"));
    small(&source);
    write(&source, 0);
    let mut bytes = fs::read(&source).unwrap();
    let header = u64::from_be_bytes(bytes[16..24].try_into().unwrap()) as usize;
    let table = u64::from_be_bytes(bytes[header + 16..header + 24].try_into().unwrap()) as usize;
    bytes[table..table + 4].copy_from_slice(&0x7000_0000_u32.to_be_bytes());
    fs::write(&source, &bytes).unwrap();
    let told = refusal(&source, &dest, &ConvertOptions::default());
    assert!(told.starts_with(source.to_str().unwrap()) && !told.contains("dest"), "{told}");

    let sound = dir.path().join("sound.vhd");
    small(&sound);
    let [damaged, other] = [&source, &sound].map(|path| Disk::open(path, &OpenOptions::default()).unwrap());
    let told = compare([(&*other, &sound), (&*damaged, &source)], EngineKind::Auto, &mut |_, _| true).unwrap_err();
    assert!(told.to_string().starts_with(source.to_str().unwrap()), "{told}");
}

#[test]
fn an_error_of_a_parent_names_the_parent() {
    let dir = tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    small(&path("base.vhdx"));
    write(&path("base.vhdx"), 0);
    create(path("top.vhdx"), &CreateRequest { parent: Some(path("base.vhdx")), ..CreateRequest::default() }).unwrap();
    write(&path("top.vhdx"), 4 * MIB);
    let files = Files::new(Arc::new(Failing { file: "base.vhdx", reads: true }));
    let source = OpenOptions { files, ..OpenOptions::default() };
    let told = refusal(&path("top.vhdx"), &path("dest.raw"), &ConvertOptions { source, ..ConvertOptions::default() });
    assert!(told.starts_with(path("base.vhdx").to_str().unwrap()) && !told.contains("dest"), "{told}");
}

#[test]
fn an_error_of_the_copy_names_its_final_path() {
    let dir = tempdir().unwrap();
    let source = dir.path().join("source.vhdx");
    small(&source);
    write(&source, 0);
    for name in ["dest.raw", "dest.vhd", "dest.vhdx"] {
        let files = Files::new(Arc::new(Failing { file: "dest", reads: false }));
        let dest = CreateRequest { files, ..CreateRequest::default() };
        let dest_path = dir.path().join(name);
        let told = refusal(&source, &dest_path, &ConvertOptions { dest, ..ConvertOptions::default() });
        assert!(told.starts_with(&format!("{}: ", dest_path.display())) && !told.contains(".partial"), "{told}");
    }
}

/// The machine's file system, but payload I/O of files with the given name prefix fails.
#[derive(Debug)]
struct Failing {
    file: &'static str,
    /// Reads fail; if false, writes fail.
    reads: bool,
}

impl ForwardingFileSystem for Failing {
    fn open(
        &self,
        path: &Path,
        options: &diskwright_store::OpenOptions,
    ) -> Result<Arc<dyn Store>, diskwright_store::OpenError> {
        let options = diskwright_store::OpenOptions { cache: CacheMode::PageCache, ..*options };
        let inner = LocalFiles.open(path, &options)?;
        let is_meant = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(self.file));
        Ok(if is_meant { Arc::new(FailingStore { inner, reads: self.reads }) } else { inner })
    }
}

/// A store on which transfers of 1 MiB, here the payload, fail.
#[derive(Debug)]
struct FailingStore {
    inner: Arc<dyn Store>,
    reads: bool,
}

impl ForwardingStore for FailingStore {
    fn inner(&self) -> &dyn Store {
        &*self.inner
    }
    fn read_at(&self, buf: &mut [u8], offset_bytes: u64) -> io::Result<()> {
        if self.reads && buf.len() as u64 == MIB {
            return Err(io::Error::from_raw_os_error(5));
        }
        self.inner.read_at(buf, offset_bytes)
    }

    fn write_at(&self, buf: &[u8], offset_bytes: u64) -> io::Result<()> {
        if !self.reads && buf.len() as u64 == MIB {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.inner.write_at(buf, offset_bytes)
    }
}
