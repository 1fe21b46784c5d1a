use super::*;
use crate::{MemoryStore, testing::ForwardingStore};
use std::{os::fd::AsFd, sync::Mutex};

/// A file that records the results of the syncs reported to it.
#[derive(Debug)]
struct RecordsSyncs {
    inner: MemoryStore,
    file: std::fs::File,
    syncs: Mutex<Vec<Option<i32>>>,
}

impl ForwardingStore for RecordsSyncs {
    fn inner(&self) -> &dyn Store {
        &self.inner
    }
    fn settle_sync(&self, result: io::Result<()>) -> io::Result<()> {
        self.syncs.lock().unwrap().push(result.as_ref().err().and_then(io::Error::raw_os_error));
        result
    }

    fn data_file(&self) -> Option<DataFile<'_>> {
        Some(DataFile { fd: self.file.as_fd(), alignment_bytes: 1 })
    }
}

fn recorder() -> (Arc<RecordsSyncs>, Target) {
    let file = std::fs::File::options().write(true).open("/dev/null").unwrap();
    let store = Arc::new(RecordsSyncs { inner: MemoryStore::new("recorder"), file, syncs: Mutex::default() });
    let target = Target::new(&(Arc::clone(&store) as Arc<dyn Store>), false);
    (store, target)
}

const NOSPC: i32 = 28;

/// RWF_DSYNC also waits for the write-back of earlier writes, whose failure the kernel reports
/// once.
#[test]
fn no_room_for_earlier_writes_counts_as_a_failed_sync() {
    let (store, target) = recorder();
    let mut part = Part::new(0, 0, Action::Write { durable: true }, 0, Span::zeros(512), false);
    // SAFETY: static zeros, which no kernel is using.
    assert!(matches!(unsafe { part.judge(-NOSPC, &target) }, Verdict::Again));
    // The second write succeeds, so the first ENOSPC came from earlier writes.
    // SAFETY: as above.
    let Verdict::Done(result) = (unsafe { part.judge(512, &target) }) else { panic!("the write is complete") };
    assert_eq!(part.settle(result, &target).unwrap_err().raw_os_error(), Some(NOSPC));
    assert_eq!(store.syncs.lock().unwrap()[..], [Some(NOSPC)]);
}

#[test]
fn no_room_for_the_write_itself_is_no_failed_sync() {
    let (store, target) = recorder();
    let mut part = Part::new(0, 0, Action::Write { durable: true }, 0, Span::zeros(512), false);
    // SAFETY: static zeros, which no kernel is using.
    assert!(matches!(unsafe { part.judge(-NOSPC, &target) }, Verdict::Again));
    // SAFETY: as above.
    let Verdict::Done(result) = (unsafe { part.judge(-NOSPC, &target) }) else {
        panic!("the write must not be retried again")
    };
    assert_eq!(part.settle(result, &target).unwrap_err().raw_os_error(), Some(NOSPC));
    assert!(store.syncs.lock().unwrap().is_empty());
}
