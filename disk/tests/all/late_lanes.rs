//! A disk on a store with asynchronous lanes, on a shared ring: what a request starts when it
//! continues is sent before the thread sleeps.

use diskwright_disk::{CreateRequest, Disk, Layer, create};
use diskwright_image::{Format, probe};
use diskwright_store::{
    BlockDevice, IoBuf, Lane, LaneOp, Loan, MemoryStore, QueueOptions, Request, SharedRing, Store, store::FileRange,
    testing::ForwardingStore,
};
use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    os::unix::net::UnixStream,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

const MIB: u64 = 1 << 20;

/// A store whose lane carries out operations only when it is driven, and whose descriptor never
/// becomes readable.
#[derive(Debug)]
struct Far {
    memory: MemoryStore,
    started: Mutex<Vec<(LaneOp, Loan)>>,
    socket: OwnedFd,
    /// Kept open, as the socket would be readable otherwise.
    _other: UnixStream,
}

/// A handle of the store and its lane.
#[derive(Debug, Clone)]
struct FarStore(Arc<Far>);

impl Lane for Far {
    fn start(&self, op: LaneOp, loan: Loan) {
        self.started.lock().unwrap().push((op, loan));
    }
    fn drive(&self) {
        for (op, mut loan) in std::mem::take(&mut *self.started.lock().unwrap()) {
            let result = match op {
                LaneOp::Read { offset_bytes } => self.memory.read_at(loan.bytes_mut(), offset_bytes),
                LaneOp::Write { offset_bytes, .. } => self.memory.write_at(loan.bytes(), offset_bytes),
                LaneOp::Zero { offset_bytes, len_bytes, how } => {
                    self.memory.zero_range(FileRange { offset_bytes, len_bytes }, how)
                }
                LaneOp::Sync => Ok(()),
            };
            loan.complete(result);
        }
    }
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl ForwardingStore for FarStore {
    fn inner(&self) -> &dyn Store {
        &self.0.memory
    }
    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }

    fn lane(&self) -> Option<Arc<dyn Lane>> {
        Some(Arc::clone(&self.0) as Arc<dyn Lane>)
    }
}

#[test]
fn a_request_that_continues_is_sent_before_the_thread_sleeps() {
    const PATIENCE: Duration = Duration::from_secs(20);
    let Ok(ring) = SharedRing::new(8, None) else { return };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.vhdx");
    let request = CreateRequest { size_bytes: Some(64 * MIB), block_bytes: Some(1 << 20), ..CreateRequest::default() };
    create(&path, &request).unwrap();
    let (socket, other) = UnixStream::pair().unwrap();
    let far = FarStore(Arc::new(Far {
        memory: MemoryStore::with_bytes("far", std::fs::read(&path).unwrap()),
        started: Mutex::default(),
        socket: socket.into(),
        _other: other,
    }));
    let image = probe::open(Arc::new(far), Some(Format::Vhdx), true, 512).unwrap();
    let disk = Disk::from_layers(vec![Layer { path, image }], Vec::new()).unwrap();
    let mut queue = disk.open_queue(&QueueOptions { ring: Some(&ring), ..QueueOptions::default() }).unwrap();
    for block in 0..32 {
        // Each request rests: for a page of the map, for space, or for `begin_writing`.
        queue.push(Request::write(block * MIB, 4096, IoBuf::new(4096), block)).unwrap();
        let mut done = Vec::new();
        queue.reap(0, &mut done).unwrap();
        while done.is_empty() {
            let began = Instant::now();
            ring.wait_for(PATIENCE).unwrap();
            assert!(began.elapsed() < PATIENCE, "the write of block {block} was started and never sent");
            queue.reap(0, &mut done).unwrap();
        }
        assert!(done.len() == 1 && done[0].result.is_ok(), "{done:?}");
    }
}
