//! The cost of a request: 4 KiB random reads and writes at depth 32 in a file of 256 MiB, with each
//! engine, through the page cache and with O_DIRECT. A file that is given is overwritten.
//!
//! The first line of each mode is a baseline: a bare ring with one registered file and one
//! registered buffer for each slot, without clock, checks or error handling. What an engine takes
//! above it is the engine's own cost.
//!
//! ```text
//! cargo run --release -p diskwright-store --example ringcost [file] [depth] [seconds]
//! ```
//! Without a file, the example creates one in the temporary directory. The figures are only
//! meaningful on an idle machine.

use diskwright_store::{
    BareLoad, BlockDevice, CacheMode, Completion, Engine, EngineCompletion, EngineKind, FileStore, IoBuf, LockMode,
    OpenOptions, QueueOptions, RawDevice, Request, Slab, Store, bare_ring,
};
use std::{
    io::{self, Write},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

const BLOCK_BYTES: usize = 4096;
const FILE_BYTES: usize = 256 << 20;

struct Random(u64);

impl Random {
    /// xorshift64*: random enough to pick blocks, and almost free.
    fn block_offset_bytes(&mut self, blocks: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let picked = (u128::from(self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)) * u128::from(blocks)) >> 64;
        picked as u64 * BLOCK_BYTES as u64
    }
}

/// The beginning of a measurement: wall-clock time, and CPU time of this thread.
struct Started(Instant, Duration);

impl Started {
    fn now() -> Self {
        Self(Instant::now(), cpu_time())
    }

    fn elapsed(&self) -> Duration {
        self.0.elapsed()
    }

    fn report(&self, name: &str, transfers: u64, enters: u64) {
        report(name, transfers, self.elapsed(), cpu_time() - self.1, enters);
    }
}

fn report(name: &str, transfers: u64, elapsed: Duration, cpu: Duration, enters: u64) {
    let each_ns = |time: Duration| time.as_nanos() as f64 / transfers as f64;
    println!(
        "{name:34} {:7.0} ns each  {:7.0} ns CPU each  {:6.2} M/s  {:.3} enters each",
        each_ns(elapsed),
        each_ns(cpu),
        1e3 / each_ns(elapsed),
        enters as f64 / transfers as f64
    );
}

/// CPU time of this thread, the only one.
fn cpu_time() -> Duration {
    let said = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    Duration::from_nanos(said.split(' ').next().and_then(|ns| ns.parse().ok()).unwrap_or(0))
}

/// The baseline; see above.
fn by_bare_ring(path: &Path, cache: CacheMode, depth: usize, time: Duration) -> io::Result<()> {
    let found = bare_ring(path, &BareLoad { cache, block_bytes: BLOCK_BYTES, depth, batch: 1, time })?;
    report("read, bare ring", found.reads, found.elapsed, found.cpu, found.enters);
    Ok(())
}

fn by_engine(
    store: &Arc<dyn Store>,
    kind: EngineKind,
    registered: bool,
    write: bool,
    depth: usize,
    time: Duration,
) -> io::Result<()> {
    let slab = Slab::new(depth, BLOCK_BYTES);
    let mut engine = Engine::new(kind, depth, registered.then_some(&slab))?;
    let target = engine.add_target(store)?;
    let blocks = store.len_bytes()? / BLOCK_BYTES as u64;
    let mut random = Random(0x9E37_79B9_7F4A_7C15);
    let mut free: Vec<IoBuf> = slab.take_all();
    let mut done: Vec<EngineCompletion> = Vec::with_capacity(depth);
    let (mut transfers, started) = (0, Started::now());
    while started.elapsed() < time {
        for _ in 0..64 {
            while let Some(buf) = free.pop() {
                let offset_bytes = random.block_offset_bytes(blocks);
                if write {
                    engine.write_one(0, 0, target, offset_bytes, buf, 0..BLOCK_BYTES, false);
                } else {
                    engine.read_one(0, 0, target, offset_bytes, buf, 0..BLOCK_BYTES);
                }
            }
            engine.reap(1, &mut done)?;
            for ended in done.drain(..) {
                ended.result?;
                free.extend(ended.buf);
                transfers += 1;
            }
        }
    }
    let what = if write { "write" } else { "read" };
    started.report(&format!("{what}, {kind:?}, registered {registered}"), transfers, engine.stats().enters);
    Ok(())
}

fn by_raw_queue(path: &Path, cache: CacheMode, depth: usize, time: Duration) -> io::Result<()> {
    let slab = Slab::new(depth, BLOCK_BYTES);
    let device = RawDevice::open(path, false, cache).map_err(io::Error::other)?;
    let mut queue =
        device.open_queue(&QueueOptions { depth, engine: EngineKind::Auto, slab: Some(&slab), ring: None })?;
    let blocks = device.geometry().size_bytes / BLOCK_BYTES as u64;
    let mut random = Random(0x9E37_79B9_7F4A_7C15);
    let mut free: Vec<IoBuf> = slab.take_all();
    let mut done: Vec<Completion> = Vec::with_capacity(depth);
    let (mut reads, started) = (0, Started::now());
    while started.elapsed() < time {
        for _ in 0..64 {
            while let Some(buf) = free.pop() {
                queue
                    .push(Request::read(random.block_offset_bytes(blocks), BLOCK_BYTES, buf, 0))
                    .map_err(|refused| refused.reason)?;
            }
            queue.reap(1, &mut done)?;
            for ended in done.drain(..) {
                ended.result?;
                free.extend(ended.buf);
                reads += 1;
            }
        }
    }
    started.report("read, raw queue", reads, 0);
    Ok(())
}

fn main() -> io::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let given = arguments.next().map(PathBuf::from);
    let depth = arguments.next().and_then(|text| text.parse().ok()).unwrap_or(32);
    let time = Duration::from_secs(arguments.next().and_then(|text| text.parse().ok()).unwrap_or(3));
    let mut made = None;
    let path = match given {
        Some(path) => path,
        None => {
            let mut file = tempfile::NamedTempFile::new()?;
            let mut random = Random(1);
            let block: Vec<u8> = (0..1 << 20).map(|_| random.block_offset_bytes(256) as u8).collect();
            for _ in 0..FILE_BYTES >> 20 {
                file.write_all(&block)?;
            }
            let path = file.path().to_owned();
            made = Some(file);
            path
        }
    };
    io::copy(&mut std::fs::File::open(&path)?, &mut io::sink())?; // All of it into the page cache.
    for cache in [CacheMode::PageCache, CacheMode::Direct] {
        let options = OpenOptions { writable: true, cache, lock: LockMode::Exclusive, ..OpenOptions::default() };
        let store = FileStore::open(&path, &options).map_err(io::Error::other)?;
        println!("{:?}", store.cache_mode());
        let store: Arc<dyn Store> = Arc::new(store);
        by_bare_ring(&path, cache, depth, time)?;
        for write in [false, true] {
            by_engine(&store, EngineKind::Uring, true, write, depth, time)?;
            by_engine(&store, EngineKind::Uring, false, write, depth, time)?;
            by_engine(&store, EngineKind::Sync, false, write, depth, time)?;
            store.sync_data()?;
        }
        drop(store);
        by_raw_queue(&path, cache, depth, time)?;
    }
    drop(made);
    Ok(())
}
