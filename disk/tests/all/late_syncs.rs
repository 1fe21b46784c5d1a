//! A flush that succeeds although another sync of the same file fails during it: the kernel may
//! have dropped pages that the flush did not see.

use diskwright_disk::{CreateRequest, Disk, Layer, create};
use diskwright_image::probe;
use diskwright_store::{Blocking, EngineKind, MemoryStore, Store, testing::ForwardingStore};
use std::{
    io,
    sync::{Arc, Mutex, mpsc},
    thread,
};

const MIB: u64 = 1 << 20;

/// Blocks the next sync: signals that it has begun, waits for the end signal, then succeeds.
/// Concurrent syncs fail.
#[derive(Debug)]
struct Gate {
    begun: mpsc::Sender<()>,
    end: mpsc::Receiver<()>,
}

#[derive(Debug)]
enum Syncs {
    Succeed,
    Wait(Gate),
    Fail,
}

#[derive(Debug)]
struct Gated {
    inner: MemoryStore,
    syncs: Mutex<Syncs>,
}

impl ForwardingStore for Gated {
    fn inner(&self) -> &dyn Store {
        &self.inner
    }
    fn sync_data(&self) -> io::Result<()> {
        let mut syncs = self.syncs.lock().unwrap();
        match std::mem::replace(&mut *syncs, Syncs::Fail) {
            Syncs::Succeed => {
                *syncs = Syncs::Succeed;
                Ok(())
            }
            Syncs::Fail => Err(io::Error::from_raw_os_error(5)),
            Syncs::Wait(gate) => {
                drop(syncs);
                gate.begun.send(()).unwrap();
                gate.end.recv().unwrap();
                Ok(())
            }
        }
    }
}

#[test]
fn a_successful_sync_does_not_hide_a_concurrent_failure() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.vhd");
    let request = CreateRequest { size_bytes: Some(16 * MIB), block_bytes: Some(1 << 20), ..CreateRequest::default() };
    create(&path, &request).unwrap();
    let inner = MemoryStore::with_bytes(&path, std::fs::read(&path).unwrap());
    let store = Arc::new(Gated { inner, syncs: Mutex::new(Syncs::Succeed) });
    let disk = || {
        let image = probe::open(Arc::clone(&store) as Arc<dyn Store>, None, true, 512).unwrap();
        Disk::from_layers(vec![Layer { path: path.clone(), image }], Vec::new()).unwrap()
    };
    let before = disk();
    Blocking::open(&before, EngineKind::Sync).unwrap().write(0, &[1; 4096], false).unwrap();
    before.close().unwrap();
    drop(before);
    // A VHD without allocated space syncs when it allocates. A write to an allocated block is
    // payload only.
    let disk = disk();
    let open = || Blocking::open(&disk, EngineKind::Sync).unwrap();
    let mut io = open();
    io.write(0, &[2; 4096], false).unwrap();
    let ((begun, has_begun), (end, ends)) = (mpsc::channel(), mpsc::channel());
    *store.syncs.lock().unwrap() = Syncs::Wait(Gate { begun, end: ends });
    let (grown, flushed) = thread::scope(|scope| {
        let flush = scope.spawn(|| open().flush());
        has_begun.recv().unwrap();
        let grown = open().write(2 * MIB, &[3; 4096], false);
        end.send(()).unwrap();
        (grown, flush.join().unwrap())
    });
    grown.expect_err("a sync failed during an allocation");
    flushed.expect_err("a flush succeeded although pages may have been dropped");
}
