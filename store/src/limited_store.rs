//! A store that is no faster than a given device: for tests and studies.
//!
//! ```text
//!   operation ─▶ its turn (RateLimiter) ─▶ + latency = due
//!     blocking methods   sleep until it is due ─▶ the store below
//!     lane               Queue, by due time ─▶ a thread of the lane ─▶ the store below ─▶ complete
//! ```
//!
//! An operation takes one turn whatever its length, as on a disk whose head must move. A sync takes
//! none, but has the latency. Several operations wait for their latency at the same time, so a
//! device with a latency above the time of a turn needs several requests under way to reach its
//! rate, as real ones do.
//!
//! The store below must be faster than the limits: its own time is added. Four threads carry the
//! operations of the lane out, so that it may be a few times slower than one turn.

use crate::{
    buffer::Loan,
    lane::{Lane, LaneOp},
    limit::{RateLimiter, RateLimits},
    queue::Operation,
    store::{DataFile, FileRange, Store, Zeroing},
};
use rustix::event::{EventfdFlags, eventfd};
use std::{
    collections::VecDeque,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

/// Threads of a lane.
const THREADS: usize = 4;

/// How fast a store may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StoreLimit {
    /// Operations per second; 0 for no limit.
    pub iops: u64,
    /// What each operation takes, besides waiting for its turn.
    pub latency: Duration,
}

/// A store behind a limit; see the module documentation.
#[derive(Debug)]
pub struct LimitedStore {
    inner: Arc<dyn Store>,
    shared: Arc<Shared>,
    lane: Arc<LimitedLane>,
    threads: Vec<thread::JoinHandle<()>>,
}

/// What the lane, its threads and the blocking methods share.
#[derive(Debug)]
struct Shared {
    limiter: RateLimiter,
    latency: Duration,
    queue: Mutex<Queue>,
    changed: Condvar,
}

/// Operations of the lane in the order in which they are due, which is that of their turns.
#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<(Instant, LaneOp, Loan)>,
    is_closed: bool,
}

#[derive(Debug)]
struct LimitedLane {
    shared: Arc<Shared>,
    /// Never readable: the threads complete the loans themselves.
    silent: OwnedFd,
}

impl Shared {
    /// Takes a turn, and says when an operation that begins now is done.
    fn due(&self, takes_turn: bool) -> Instant {
        let (now, now_ns) = (Instant::now(), self.limiter.now_ns());
        let operation = if takes_turn { Operation::Read } else { Operation::Flush };
        let start_ns = self.limiter.reserve(now_ns, operation, 0);
        now + Duration::from_nanos(start_ns.saturating_sub(now_ns)) + self.latency
    }

    fn sleep(&self, takes_turn: bool) {
        let due = self.due(takes_turn);
        thread::sleep(due.saturating_duration_since(Instant::now()));
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first operation that is due; `None` when the store is gone.
    fn next(&self) -> Option<(LaneOp, Loan)> {
        let mut queue = self.lock();
        loop {
            let now = Instant::now();
            let wait = match queue.waiting.front() {
                Some((due, ..)) if *due <= now => {
                    let (_, op, loan) = queue.waiting.pop_front()?;
                    return Some((op, loan));
                }
                Some((due, ..)) => *due - now,
                None if queue.is_closed => return None,
                None => Duration::from_secs(3600),
            };
            queue = self.changed.wait_timeout(queue, wait).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl LimitedStore {
    /// `inner` at the speed of `limit`.
    ///
    /// # Errors
    /// The threads of its lane cannot be started.
    pub fn new(inner: Arc<dyn Store>, limit: StoreLimit) -> io::Result<Self> {
        // A burst of one: a disk that was idle is not faster afterwards.
        let limits = RateLimits { iops: limit.iops, iops_burst: 1, ..RateLimits::default() };
        let shared = Arc::new(Shared {
            limiter: RateLimiter::new(limits),
            latency: limit.latency,
            queue: Mutex::default(),
            changed: Condvar::new(),
        });
        let silent = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let lane = Arc::new(LimitedLane { shared: Arc::clone(&shared), silent });
        let mut store = Self { inner, shared, lane, threads: Vec::new() };
        for _ in 0..THREADS {
            let (shared, inner) = (Arc::clone(&store.shared), Arc::clone(&store.inner));
            store.threads.push(thread::Builder::new().name("limited".into()).spawn(move || {
                while let Some((op, loan)) = shared.next() {
                    carry_out(&*inner, op, loan);
                }
            })?);
        }
        Ok(store)
    }
}

impl Drop for LimitedStore {
    fn drop(&mut self) {
        // What waits is carried out first. Then nothing but the caller has the store below, and its
        // lock ends with it.
        self.shared.lock().is_closed = true;
        self.shared.changed.notify_all();
        for thread in self.threads.drain(..) {
            // A thread that panicked has dropped its loans.
            let _ = thread.join();
        }
    }
}

fn carry_out(store: &dyn Store, op: LaneOp, mut loan: Loan) {
    let result = match op {
        LaneOp::Read { offset_bytes } => store.read_at(loan.bytes_mut(), offset_bytes),
        LaneOp::Write { offset_bytes, durable: false } => store.write_at(loan.bytes(), offset_bytes),
        LaneOp::Write { offset_bytes, durable: true } => store.write_durable_at(loan.bytes(), offset_bytes),
        LaneOp::Zero { offset_bytes, len_bytes, how } => store.zero_range(FileRange { offset_bytes, len_bytes }, how),
        LaneOp::Sync => store.sync_data(),
    };
    loan.complete(result);
}

impl Lane for LimitedLane {
    fn start(&self, op: LaneOp, loan: Loan) {
        let mut queue = self.shared.lock();
        // While the lock is held, so that the queue is in the order of the turns. A sync may be due
        // before operations that came earlier: it covers only those that have ended.
        let due = self.shared.due(op != LaneOp::Sync);
        let place = queue.waiting.partition_point(|(other, ..)| *other <= due);
        queue.waiting.insert(place, (due, op, loan));
        drop(queue);
        self.shared.changed.notify_one();
    }

    fn drive(&self) {}

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.silent.as_fd()
    }
}

impl Store for LimitedStore {
    fn name(&self) -> &Path {
        self.inner.name()
    }

    fn beneath(&self) -> Option<&dyn Store> {
        Some(&*self.inner)
    }

    fn len_bytes(&self) -> io::Result<u64> {
        self.inner.len_bytes()
    }

    fn read_at(&self, buf: &mut [u8], offset_bytes: u64) -> io::Result<()> {
        self.shared.sleep(true);
        self.inner.read_at(buf, offset_bytes)
    }

    fn write_at(&self, buf: &[u8], offset_bytes: u64) -> io::Result<()> {
        self.shared.sleep(true);
        self.inner.write_at(buf, offset_bytes)
    }

    fn set_len(&self, len_bytes: u64) -> io::Result<()> {
        self.inner.set_len(len_bytes)
    }

    fn check_len(&self, len_bytes: u64) -> io::Result<()> {
        self.inner.check_len(len_bytes)
    }

    fn allocate(&self, range: FileRange) -> io::Result<()> {
        self.inner.allocate(range)
    }

    fn zero_range(&self, range: FileRange, how: Zeroing) -> io::Result<()> {
        self.shared.sleep(true);
        self.inner.zero_range(range, how)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.shared.sleep(false);
        self.inner.sync_data()
    }

    fn write_durable_at(&self, buf: &[u8], offset_bytes: u64) -> io::Result<()> {
        self.shared.sleep(true);
        self.inner.write_durable_at(buf, offset_bytes)
    }

    fn data_file(&self) -> Option<DataFile<'_>> {
        None
    }

    fn bypasses_page_cache(&self) -> bool {
        self.inner.bypasses_page_cache()
    }

    fn lane(&self) -> Option<Arc<dyn Lane>> {
        Some(Arc::clone(&self.lane) as Arc<dyn Lane>)
    }

    fn next_data(&self, offset_bytes: u64) -> io::Result<Option<FileRange>> {
        self.inner.next_data(offset_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Engine, EngineKind, IoBuf, MemoryStore};

    fn limited(iops: u64, latency_ms: u64) -> Arc<dyn Store> {
        let memory = MemoryStore::new("memory");
        memory.set_len(1 << 20).unwrap();
        let limit = StoreLimit { iops, latency: Duration::from_millis(latency_ms) };
        Arc::new(LimitedStore::new(Arc::new(memory), limit).unwrap())
    }

    #[test]
    fn a_queue_is_served_at_the_rate_and_each_request_has_the_latency() {
        for kind in [EngineKind::Auto, EngineKind::Sync] {
            let store = limited(500, 4);
            let mut engine = Engine::new(kind, 32, None).unwrap();
            let target = engine.add_target(&store).unwrap();
            let (started, mut done) = (Instant::now(), Vec::new());
            for number in 0..30_u8 {
                let mut buf = IoBuf::new(4096);
                buf.fill(number + 1);
                engine.write_one(u64::from(number), 0, target, u64::from(number) * 4096, buf, 0..4096, false);
            }
            while done.len() < 30 {
                engine.reap(1, &mut done).unwrap();
            }
            assert!(done.iter().all(|ended| ended.result.is_ok()));
            // 29 turns of 2 ms and a latency; without a ring the requests wait one by one.
            let took = started.elapsed();
            assert!(took >= Duration::from_millis(58 + 4), "{took:?}");
            let slot = engine.begin(1, 0, None);
            engine.sync(&slot, target);
            engine.end(slot);
            done.clear();
            engine.reap(1, &mut done).unwrap();
            assert!(done[0].result.is_ok());
            let mut found = [0; 4096];
            store.read_at(&mut found, 29 * 4096).unwrap();
            assert!(found == [30; 4096]);
        }
    }

    #[test]
    fn the_threads_end_with_the_store() {
        let store = limited(0, 0);
        let shared = Arc::downgrade(&{
            let memory = MemoryStore::new("memory");
            LimitedStore::new(Arc::new(memory), StoreLimit::default()).unwrap().shared.clone()
        });
        let started = Instant::now();
        while shared.strong_count() > 0 {
            assert!(started.elapsed() < Duration::from_secs(10), "threads go on");
            thread::sleep(Duration::from_millis(1));
        }
        store.write_at(&[1; 512], 0).unwrap();
    }
}
