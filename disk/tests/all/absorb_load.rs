//! Merges of disks in use whose clients leave them no rest: writers that rewrite everything, reads
//! meanwhile, and the pauses that the merge makes for them.

use crate::{
    absorb::{Dice, absorb, blocking, folder, open, pair},
    common::read_all,
};
use diskwright_disk::{Disk, OpenOptions};
use diskwright_store::{
    BlockDevice, EngineKind, FileSystem, Files, IoBuf, LocalFiles, OpenError, QueueOptions, Request, Store,
    testing::{ForwardingFileSystem, ForwardingStore},
};
use std::{
    io,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

const MIB: u64 = 1 << 20;

/// Clients keep rewriting all of the disk, so the top would never be empty if they wrote to it.
#[test]
fn it_ends_while_everything_is_rewritten() {
    let dir = folder();
    let (path, _) = pair(dir.path());
    let disk = open(&path).unwrap();
    let (stop, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    blocking(&disk).write(0, &vec![1; 64 * MIB as usize], false).unwrap();
    let last = thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut io = blocking(&disk);
            let mut byte = 1u8;
            loop {
                byte = byte.wrapping_add(1);
                for at in (0..64).map(|block| block * MIB) {
                    io.write(at, &vec![byte; MIB as usize], false).unwrap();
                }
                rounds.fetch_add(1, Ordering::Relaxed);
                if stop.load(Ordering::Relaxed) {
                    return byte;
                }
            }
        });
        let absorbed = absorb(&disk).unwrap();
        assert_eq!(absorbed.data_bytes, 64 * MIB);
        assert!(absorbed.copied_bytes + absorbed.cloned_bytes <= 64 * MIB, "each block is moved once");
        stop.store(true, Ordering::Relaxed);
        writer.join().unwrap()
    });
    assert_eq!(disk.layers().len(), 1);
    disk.close().unwrap();
    drop(disk);
    assert!(read_all(&path).iter().all(|byte| *byte == last));
}

/// Requests that the merge holds back. The progress is called between batches, when nothing is
/// held; so readers and writers run in threads of their own.
#[test]
fn reads_go_on_and_writes_wait_for_one_batch_at_most() {
    let dir = folder();
    let (path, _) = pair(dir.path());
    let disk = open(&path).unwrap();
    blocking(&disk).write(0, &vec![1; 64 * MIB as usize], false).unwrap();
    let stop = AtomicBool::new(false);
    let worst = |slowest: &Mutex<Duration>, took: Duration| {
        let mut slowest = slowest.lock().unwrap();
        *slowest = (*slowest).max(took);
    };
    let (reads, writes) = (Mutex::new(Duration::ZERO), Mutex::new(Duration::ZERO));
    let count = AtomicU64::new(0);
    thread::scope(|scope| {
        let (disk, stop, count) = (&*disk, &stop, &count);
        for (slowest, is_write) in [(&reads, false), (&writes, true)] {
            scope.spawn(move || {
                let mut io = blocking(disk);
                let mut dice = Dice::new(1);
                while !stop.load(Ordering::Relaxed) {
                    let at = dice.below(64 * MIB / 4096) * 4096;
                    let began = Instant::now();
                    if is_write {
                        io.write(at, &[1; 4096], false).unwrap();
                    } else {
                        let mut found = [0; 4096];
                        io.read(at, &mut found).unwrap();
                        assert_eq!(found, [1; 4096]);
                    }
                    worst(slowest, began.elapsed());
                    count.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        absorb(disk).unwrap();
        stop.store(true, Ordering::Relaxed);
    });
    // Generous, as other programs use the machine too.
    let (reads, writes) = (reads.into_inner().unwrap(), writes.into_inner().unwrap());
    assert!(writes < Duration::from_secs(5) && reads < Duration::from_secs(5), "{reads:?}, {writes:?}");
    assert!(count.load(Ordering::Relaxed) > 0);
}

/// How long a sync takes at least on the slow files.
const SYNC: Duration = Duration::from_millis(5);

/// Files whose syncs are slow and counted, as soon as that is asked for.
#[derive(Debug, Clone, Default)]
struct SlowSyncs {
    are_slow: Arc<AtomicBool>,
    count: Arc<AtomicU64>,
}

#[derive(Debug)]
struct SlowStore {
    inner: Arc<dyn Store>,
    syncs: SlowSyncs,
}

impl ForwardingStore for SlowStore {
    fn inner(&self) -> &dyn Store {
        &*self.inner
    }

    fn sync_data(&self) -> io::Result<()> {
        if self.syncs.are_slow.load(Ordering::Relaxed) {
            self.syncs.count.fetch_add(1, Ordering::Relaxed);
            thread::sleep(SYNC);
        }
        self.inner.sync_data()
    }
}

impl ForwardingFileSystem for SlowSyncs {
    fn open(&self, path: &Path, options: &diskwright_store::OpenOptions) -> Result<Arc<dyn Store>, OpenError> {
        Ok(Arc::new(SlowStore { inner: LocalFiles.open(path, options)?, syncs: self.clone() }))
    }
}

/// Rewrites the first 16 MiB with eight requests in flight, until it is stopped. Returns how many
/// were answered.
fn rewrite_all(disk: &Disk, stop: &AtomicBool) -> u64 {
    const LEN: u64 = 64 << 10;
    let options = QueueOptions { depth: 8, engine: EngineKind::Auto, slab: None, ring: None };
    let mut queue = disk.open_queue(&options).unwrap();
    let (mut number, mut answered, mut done) = (0, 0, Vec::new());
    while !stop.load(Ordering::Relaxed) || queue.in_flight() > 0 {
        while queue.in_flight() < 8 && !stop.load(Ordering::Relaxed) {
            let mut buf = IoBuf::new(LEN as usize);
            buf.fill(7);
            queue.push(Request::write(number * LEN % (16 * MIB), LEN as usize, buf, number)).unwrap();
            number += 1;
        }
        queue.reap(1, &mut done).unwrap();
        answered += done.len() as u64;
        done.drain(..).for_each(|completion| completion.result.unwrap());
    }
    answered
}

/// The merge leaves the disk to its clients for a third of its own time at least, also where they
/// rewrite everything all the time, and it ends all the same. Its own time is longer than that of
/// its syncs, as nobody else syncs.
#[test]
fn it_pauses_for_clients_that_rewrite_everything_and_ends() {
    let dir = folder();
    let (path, _) = pair(dir.path());
    let syncs = SlowSyncs::default();
    let files = Files::new(Arc::new(syncs.clone()));
    let disk = Disk::open(&path, &OpenOptions { writable: true, files, ..OpenOptions::default() }).unwrap();
    blocking(&disk).write(0, &vec![1; 16 * MIB as usize], false).unwrap();
    let stop = AtomicBool::new(false);
    let (took, answered) = thread::scope(|scope| {
        let client = scope.spawn(|| rewrite_all(&disk, &stop));
        syncs.are_slow.store(true, Ordering::Relaxed);
        let began = Instant::now();
        absorb(&disk).unwrap();
        let took = began.elapsed();
        syncs.are_slow.store(false, Ordering::Relaxed);
        stop.store(true, Ordering::Relaxed);
        (took, client.join().unwrap())
    });
    let own = SYNC * syncs.count.load(Ordering::Relaxed) as u32;
    println!("{took:?}, of which syncs {own:?}; {answered} requests were answered");
    assert!(own > Duration::from_millis(100), "{own:?}");
    assert!(took > own.mul_f64(1.25), "{took:?}, of which syncs {own:?}");
    assert!(answered > 100, "{answered}");
    assert_eq!(disk.layers().len(), 1);
    disk.close().unwrap();
    drop(disk);
    assert!(read_all(&path)[..16 * MIB as usize].iter().all(|byte| *byte == 7));
}
