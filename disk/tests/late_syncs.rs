//! A flush that is under way while another sync of the same file fails, and that succeeds: what the
//! failed one dropped it has not seen.

use diskwright_disk::{CreateRequest, Disk, Layer, create};
use diskwright_image::probe;
use diskwright_store::{Blocking, EngineKind, MemoryStore, Store, testing::PassesOn};
use std::{
    io,
    sync::{Arc, Mutex, mpsc},
    thread,
};

const MIB: u64 = 1 << 20;

/// The next sync says that it has begun, ends when it is told to, and succeeds; those that come
/// meanwhile fail.
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

impl PassesOn for Gated {
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
fn it_does_not_hide_what_failed_meanwhile() {
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
    // A VHD that has made no room yet syncs when it does, and what is written into a block that is
    // there is a matter of the payload alone.
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
    grown.expect_err("a sync failed while room was made");
    flushed.expect_err("a flush that may have missed something succeeded");
}
