//! What a request costs, in counts that are the same in each run: calls of io_uring_enter, wake-ups
//! of the worker by other threads, reads held back, and the blocking calls of the store that read,
//! write, zero, allocate, change the length or sync. An additional call or wake-up for each request
//! fails these tests; measured times would not show it. A copy within memory is not counted here:
//! `pieces.rs` does that.

use crate::common::{Client, Served, serve};
use crate::steps::{DEPTH, HELD, Steps};
use diskwright_disk::{CreateRequest, Disk, OpenOptions, create};
use diskwright_nbd::wire::{Command, CommandFlags, Framing};
use diskwright_serve::net::ServerOptions;
use diskwright_store::{
    BlockDevice, CacheMode, DataFile, FileRange, FileSystem, Files, LocalFiles, OpenError, Store, Zeroing,
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

const NONE: CommandFlags = CommandFlags::empty();

/// Calls of a store, after its disk was opened.
#[derive(Debug, Default, PartialEq, Eq)]
struct Calls {
    /// Blocking reads. Payload goes through the ring and is not counted.
    reads: u64,
    writes: u64,
    /// Syncs by the store and by the ring.
    syncs: u64,
    zeroings: u64,
    allocations: u64,
    /// Changes of the file's length.
    lengths: u64,
}

#[derive(Debug, Default)]
struct Counts {
    reads: AtomicU64,
    writes: AtomicU64,
    syncs: AtomicU64,
    zeroings: AtomicU64,
    allocations: AtomicU64,
    lengths: AtomicU64,
}

impl Counts {
    /// The calls since the last call of this function.
    fn take(&self) -> Calls {
        let take = |count: &AtomicU64| count.swap(0, Relaxed);
        Calls {
            reads: take(&self.reads),
            writes: take(&self.writes),
            syncs: take(&self.syncs),
            zeroings: take(&self.zeroings),
            allocations: take(&self.allocations),
            lengths: take(&self.lengths),
        }
    }
}

/// Local files whose calls are counted.
#[derive(Debug)]
struct CountedFiles(Arc<Counts>);

impl ForwardingFileSystem for CountedFiles {
    fn open(&self, path: &Path, options: &diskwright_store::OpenOptions) -> Result<Arc<dyn Store>, OpenError> {
        Ok(Arc::new(CountedStore { inner: LocalFiles.open(path, options)?, counts: Arc::clone(&self.0) }))
    }
}

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
        self.counts.reads.fetch_add(1, Relaxed);
        self.inner.read_at(buf, offset_bytes)
    }

    fn write_at(&self, buf: &[u8], offset_bytes: u64) -> io::Result<()> {
        self.counts.writes.fetch_add(1, Relaxed);
        self.inner.write_at(buf, offset_bytes)
    }

    fn zero_range(&self, range: FileRange, how: Zeroing) -> io::Result<()> {
        self.counts.zeroings.fetch_add(1, Relaxed);
        self.inner.zero_range(range, how)
    }

    fn allocate(&self, range: FileRange) -> io::Result<()> {
        self.counts.allocations.fetch_add(1, Relaxed);
        self.inner.allocate(range)
    }

    fn set_len(&self, len_bytes: u64) -> io::Result<()> {
        self.counts.lengths.fetch_add(1, Relaxed);
        self.inner.set_len(len_bytes)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.counts.syncs.fetch_add(1, Relaxed);
        self.inner.sync_data()
    }

    fn settle_sync(&self, result: io::Result<()>) -> io::Result<()> {
        self.counts.syncs.fetch_add(1, Relaxed);
        self.inner.settle_sync(result)
    }

    fn data_file(&self) -> Option<DataFile<'_>> {
        self.inner.data_file()
    }
}

fn one_worker() -> ServerOptions {
    ServerOptions { workers: 1, ..ServerOptions::default() }
}

/// Sends 32 reads in one message, and receives all replies.
fn round(client: &mut Client, offsets: impl Iterator<Item = u64>) {
    let mut bytes = Vec::new();
    for offset_bytes in offsets.take(DEPTH as usize) {
        bytes.extend(client.request(Command::READ, NONE, offset_bytes, 4096));
    }
    client.say(&bytes);
    for _ in 0..DEPTH {
        assert_eq!(client.reply(4096).unwrap().len(), 4096);
    }
}

/// Runs `rounds`, in which no other thread may wake the worker. Returns the calls of io_uring_enter
/// and the reads that were held back.
fn counted(served: &Served, rounds: impl FnOnce()) -> (u64, u64) {
    let before = served.server().metrics().totals();
    rounds();
    let after = served.server().metrics().totals();
    assert_eq!(after.wakeups, before.wakeups, "requests need no messages between threads");
    (after.enters - before.enters, after.held - before.held)
}

#[test]
fn a_few_reads_of_each_batch_are_held_back() {
    const ROUNDS: u64 = 8;
    let Some(served) = serve(vec![("m", Arc::new(Steps))], one_worker()) else { return };
    let mut client = served.client().go("m", Framing::Structured, &[]);
    let offsets = || (0..DEPTH).map(|n| n * 4096);
    let (_, held) = counted(&served, || round(&mut client, offsets()));
    assert_eq!(held, 0, "the batch size is not known yet");
    let (enters, held) = counted(&served, || (0..ROUNDS).for_each(|_| round(&mut client, offsets())));
    assert_eq!(held, ROUNDS * HELD);
    // A turn answers four: eight turns for 32 replies, one call that submits the held reads, and
    // two to receive the next round.
    assert!(enters <= ROUNDS * 11, "{enters} calls for {ROUNDS} rounds");
}

/// A server for a VHDX whose first half is written, and the counts of its store's calls.
fn populated(dir: &Path) -> (Arc<Counts>, Option<Served>) {
    let counts = Arc::new(Counts::default());
    let files = Files::new(Arc::new(CountedFiles(Arc::clone(&counts))));
    let path = dir.join("disk.vhdx");
    let request = CreateRequest { size_bytes: Some(64 << 20), block_bytes: Some(1 << 20), ..CreateRequest::default() };
    create(&path, &request).unwrap();
    let options = OpenOptions { writable: true, cache: CacheMode::PageCache, files, ..OpenOptions::default() };
    let disk = Disk::open(&path, &options).unwrap() as Arc<dyn BlockDevice>;
    let served = serve(vec![("disk", disk)], one_worker());
    if let Some(served) = &served {
        let mut client = served.client().go("disk", Framing::Structured, &[]);
        for block in 0..32 {
            client.write(block << 20, &vec![block as u8 | 1; 1 << 20], NONE).unwrap();
        }
        client.ask(Command::FLUSH, NONE, 0, 0).unwrap();
    }
    (counts, served)
}

#[test]
fn reads_of_a_populated_vhdx_never_block_and_share_calls() {
    const ROUNDS: u64 = 64;
    let dir = tempfile::tempdir().unwrap();
    let (counts, Some(served)) = populated(dir.path()) else { return };
    let mut client = served.client().go("disk", Framing::Structured, &[]);
    // Fills every page of the map.
    round(&mut client, (0..DEPTH).map(|n| n << 20));
    counts.take();
    let mut at = 1_u64;
    let (enters, _) = counted(&served, || {
        for _ in 0..ROUNDS {
            round(
                &mut client,
                std::iter::repeat_with(|| {
                    at = at.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    (at >> 33) % (32 << 8) * 4096
                }),
            );
        }
    });
    assert_eq!(counts.take(), Calls::default(), "a read of payload made a blocking call of the store");
    // A turn answers four requests, or all at once. Reads from the page cache complete when they
    // are submitted.
    assert!(enters <= ROUNDS * DEPTH / 2, "{enters} calls for {} reads", ROUNDS * DEPTH);
}

#[test]
fn flushes_and_fua_writes_make_no_needless_syncs() {
    const TIMES: u64 = 20;
    let dir = tempfile::tempdir().unwrap();
    let (counts, Some(served)) = populated(dir.path()) else { return };
    let mut client = served.client().go("disk", Framing::Structured, &[]);
    let data = [7; 4096];
    // This flush makes durable the tables that the first flush has written in place.
    client.ask(Command::FLUSH, NONE, 0, 0).unwrap();
    counts.take();
    for turn in 0..TIMES {
        client.write(turn * 4096, &data, NONE).unwrap();
        client.ask(Command::FLUSH, NONE, 0, 0).unwrap();
    }
    assert_eq!(counts.take(), Calls { syncs: TIMES, ..Calls::default() }, "payload: one fdatasync each");
    for turn in 0..TIMES {
        client.write(turn * 4096, &data, CommandFlags::FUA).unwrap();
    }
    assert_eq!(counts.take(), Calls::default(), "durable writes in place: RWF_DSYNC");
    for turn in 0..TIMES {
        client.write((32 + turn) << 20, &data, NONE).unwrap();
        client.ask(Command::FLUSH, NONE, 0, 0).unwrap();
    }
    // One sync for the payload, one for the log. The page of the table is cached, so it is not
    // read; it is written to the log and in place.
    let calls = counts.take();
    // Space is taken ahead, in larger pieces.
    assert!(calls.allocations < TIMES / 2, "{calls:?}");
    let expected = Calls { writes: 2 * TIMES, syncs: 2 * TIMES, allocations: calls.allocations, ..Calls::default() };
    assert_eq!(calls, expected, "a new block each");
}
