//! A sync that fails while an image makes room for a block: the writes before it were in the same file, and no later flush may say that
//! they are durable.

use diskwright_disk::{CreateRequest, Disk, Layer, create};
use diskwright_image::probe;
use diskwright_store::{
    Blocking, EngineKind, MemoryStore, Store,
    store::{DataFile, FileRange, Zeroing},
};
use std::{
    io,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

const MIB: u64 = 1 << 20;

/// A store whose syncs fail while it is told so, and succeed afterwards as if nothing had been.
#[derive(Debug)]
struct Forgetful {
    inner: MemoryStore,
    fails: AtomicBool,
}

impl Store for Forgetful {
    fn name(&self) -> &Path {
        self.inner.name()
    }
    fn len_bytes(&self) -> io::Result<u64> {
        self.inner.len_bytes()
    }
    fn read_at(&self, buf: &mut [u8], offset_bytes: u64) -> io::Result<()> {
        self.inner.read_at(buf, offset_bytes)
    }
    fn write_at(&self, buf: &[u8], offset_bytes: u64) -> io::Result<()> {
        self.inner.write_at(buf, offset_bytes)
    }
    fn set_len(&self, len_bytes: u64) -> io::Result<()> {
        self.inner.set_len(len_bytes)
    }
    fn allocate(&self, range: FileRange) -> io::Result<()> {
        self.inner.allocate(range)
    }
    fn zero_range(&self, range: FileRange, how: Zeroing) -> io::Result<()> {
        self.inner.zero_range(range, how)
    }
    fn sync_data(&self) -> io::Result<()> {
        if self.fails.load(Ordering::Relaxed) { Err(io::Error::from_raw_os_error(5)) } else { Ok(()) }
    }
    fn data_file(&self) -> Option<DataFile<'_>> {
        None
    }
}

#[test]
fn no_flush_succeeds_after_it() {
    for extension in ["vhd", "vhdx"] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(format!("disk.{extension}"));
        let request =
            CreateRequest { size_bytes: Some(16 * MIB), block_bytes: Some(1 << 20), ..CreateRequest::default() };
        create(&path, &request).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        let inner = MemoryStore::with_bytes("disk", bytes);
        let store = Arc::new(Forgetful { inner, fails: AtomicBool::new(false) });
        let open = || {
            let image = probe::open(Arc::clone(&store) as Arc<dyn Store>, None, true, 512).unwrap();
            Disk::from_layers(vec![Layer { path: path.clone(), image }], Vec::new()).unwrap()
        };
        let disk = open();
        Blocking::open(&disk, EngineKind::Sync).unwrap().write(0, &[1; 4096], false).unwrap();
        disk.close().unwrap();
        drop(disk);

        let disk = open();
        let mut io = Blocking::open(&disk, EngineKind::Sync).unwrap();
        // A VHDX has begun its session, by syncs of its own, with this one; a VHD is not touched before it needs room.
        io.write(0, &[2; 4096], false).unwrap();
        store.fails.store(true, Ordering::Relaxed);
        let grown = io.write(2 * MIB, &[3; 4096], false);
        store.fails.store(false, Ordering::Relaxed);
        assert_eq!(grown.is_err(), extension == "vhd", "{extension}: {grown:?}");
        let flushed = io.flush();
        assert_eq!(flushed.is_err(), grown.is_err(), "{extension}: {flushed:?}");
        let durable = io.write(0, &[4; 4096], true);
        assert_eq!(durable.is_err(), grown.is_err(), "{extension}: {durable:?}");
        drop(io);
        assert_eq!(disk.close().is_err(), grown.is_err(), "{extension}");
    }
}
