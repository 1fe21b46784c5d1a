use super::*;
use std::{os::fd::AsFd, path::Path, sync::Mutex};

/// A file that writes down how syncs ended that it was told of.
#[derive(Debug)]
struct Told {
    file: std::fs::File,
    syncs: Mutex<Vec<Option<i32>>>,
}

impl Store for Told {
    fn name(&self) -> &Path {
        Path::new("told")
    }
    fn len_bytes(&self) -> io::Result<u64> {
        Ok(1 << 20)
    }
    fn read_at(&self, _buf: &mut [u8], _offset_bytes: u64) -> io::Result<()> {
        Ok(())
    }
    fn write_at(&self, _buf: &[u8], _offset_bytes: u64) -> io::Result<()> {
        Ok(())
    }
    fn set_len(&self, _len_bytes: u64) -> io::Result<()> {
        Ok(())
    }
    fn allocate(&self, _range: FileRange) -> io::Result<()> {
        Ok(())
    }
    fn zero_range(&self, _range: FileRange, _how: Zeroing) -> io::Result<()> {
        Ok(())
    }
    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }
    fn settle_sync(&self, result: io::Result<()>) -> io::Result<()> {
        self.syncs.lock().unwrap().push(result.as_ref().err().and_then(io::Error::raw_os_error));
        result
    }
    fn data_file(&self) -> Option<DataFile<'_>> {
        Some(DataFile { fd: self.file.as_fd(), alignment_bytes: 1 })
    }
}

fn told() -> (Arc<Told>, Target) {
    let file = std::fs::File::options().write(true).open("/dev/null").unwrap();
    let store = Arc::new(Told { file, syncs: Mutex::default() });
    let target = Target::new(&(Arc::clone(&store) as Arc<dyn Store>), false);
    (store, target)
}

const NOSPC: i32 = 28;

/// RWF_DSYNC waits for the write-back of earlier writes too, and the kernel tells of its failure once.
#[test]
fn no_room_for_earlier_writes_counts_as_a_failed_sync() {
    let (store, target) = told();
    let mut part = Part::new(0, 0, Action::Write { durable: true }, 0, Span::zeros(512), false);
    // SAFETY: static zeros, which no kernel is using.
    assert!(matches!(unsafe { part.judge(-NOSPC, &target) }, Verdict::Again));
    // There is room for it now, so what found none was earlier.
    // SAFETY: as above.
    let Verdict::Done(result) = (unsafe { part.judge(512, &target) }) else { panic!("all of it was written") };
    assert_eq!(part.settle(result, &target).unwrap_err().raw_os_error(), Some(NOSPC));
    assert_eq!(store.syncs.lock().unwrap()[..], [Some(NOSPC)]);
}

#[test]
fn no_room_for_the_write_itself_is_no_failed_sync() {
    let (store, target) = told();
    let mut part = Part::new(0, 0, Action::Write { durable: true }, 0, Span::zeros(512), false);
    // SAFETY: static zeros, which no kernel is using.
    assert!(matches!(unsafe { part.judge(-NOSPC, &target) }, Verdict::Again));
    // SAFETY: as above.
    let Verdict::Done(result) = (unsafe { part.judge(-NOSPC, &target) }) else { panic!("it is not tried for ever") };
    assert_eq!(part.settle(result, &target).unwrap_err().raw_os_error(), Some(NOSPC));
    assert!(store.syncs.lock().unwrap().is_empty());
}
