//! A sync that fails while an image allocates space: earlier writes went to the same file, so no
//! later flush may report them as durable.

use diskwright_disk::{CreateRequest, Disk, Layer, create};
use diskwright_image::probe;
use diskwright_store::{Blocking, EngineKind, MemoryStore, Store};
use std::sync::Arc;

const MIB: u64 = 1 << 20;

#[test]
fn no_flush_succeeds_after_a_failed_sync() {
    for extension in ["vhd", "vhdx"] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(format!("disk.{extension}"));
        let request =
            CreateRequest { size_bytes: Some(16 * MIB), block_bytes: Some(1 << 20), ..CreateRequest::default() };
        create(&path, &request).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        let store = Arc::new(MemoryStore::with_bytes(&path, bytes));
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
        // A VHDX begins its session with this write, by syncs of its own. A VHD does not change
        // before it needs space.
        io.write(0, &[2; 4096], false).unwrap();
        store.fail_syncs(true);
        let grown = io.write(2 * MIB, &[3; 4096], false);
        store.fail_syncs(false);
        assert_eq!(grown.is_err(), extension == "vhd", "{extension}: {grown:?}");
        let flushed = io.flush();
        assert_eq!(flushed.is_err(), grown.is_err(), "{extension}: {flushed:?}");
        let durable = io.write(0, &[4; 4096], true);
        assert_eq!(durable.is_err(), grown.is_err(), "{extension}: {durable:?}");
        drop(io);
        assert_eq!(disk.close().is_err(), grown.is_err(), "{extension}");
    }
}
