//! Counts what a member is asked for.
//!
//! Threads that use a member at the same time would wait for one cache line, and a locked addition
//! costs as much as the look-up of a slab. So each thread has a line of its own in every counter,
//! to which nobody else writes, and a reading adds the lines up. A thread that ends gives its line
//! to the next one, with what was counted. Threads beyond [`LINES`] share one.

use diskwright_store::{Access, Traffic};
use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicU64, Ordering},
};

/// Lines of threads; one more is shared.
const LINES: usize = 32;

#[derive(Debug, Default)]
#[repr(align(64))]
struct Line {
    reads: AtomicU64,
    writes: AtomicU64,
    read_bytes: AtomicU64,
    written_bytes: AtomicU64,
    syncs: AtomicU64,
}

/// Lines that no thread has.
static FREE: Mutex<Vec<usize>> = Mutex::new(Vec::new());
/// Lines that were ever given to a thread.
static GIVEN: Mutex<usize> = Mutex::new(0);

/// The line of a thread. Dropped, another thread may have it.
struct Own(usize);

impl Own {
    fn take() -> Self {
        let free = FREE.lock().unwrap_or_else(PoisonError::into_inner).pop();
        Self(free.unwrap_or_else(|| {
            let mut given = GIVEN.lock().unwrap_or_else(PoisonError::into_inner);
            let number = *given;
            *given = (number + 1).min(LINES);
            number
        }))
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        if self.0 < LINES {
            FREE.lock().unwrap_or_else(PoisonError::into_inner).push(self.0);
        }
    }
}

thread_local! {
    static OWN: Own = Own::take();
}

/// What a member was asked for since it was opened.
#[derive(Debug, Default)]
pub(crate) struct Counter {
    lines: [Line; LINES],
    shared: Line,
}

/// Adds to a number of a line that the thread has for itself, or shares.
#[inline]
fn add(number: &AtomicU64, by: u64, is_own: bool) {
    if is_own {
        number.store(number.load(Ordering::Relaxed).wrapping_add(by), Ordering::Relaxed);
    } else {
        number.fetch_add(by, Ordering::Relaxed);
    }
}

impl Counter {
    /// The line of this thread, and whether nobody else writes to it.
    #[inline]
    fn line(&self) -> (&Line, bool) {
        // A thread that is ending may have given its line away.
        let own = OWN.try_with(|own| own.0).ok().and_then(|number| self.lines.get(number));
        own.map_or((&self.shared, false), |line| (line, true))
    }

    /// Counts a read or a write.
    #[inline]
    pub(crate) fn count(&self, access: Access, len_bytes: u64) {
        let (line, is_own) = self.line();
        let (requests, bytes) = match access {
            Access::Read => (&line.reads, &line.read_bytes),
            Access::Write => (&line.writes, &line.written_bytes),
        };
        add(requests, 1, is_own);
        add(bytes, len_bytes, is_own);
    }

    /// Counts a sync.
    pub(crate) fn count_sync(&self) {
        let (line, is_own) = self.line();
        add(&line.syncs, 1, is_own);
    }

    /// What was counted.
    pub(crate) fn sum(&self) -> Traffic {
        let lines = || self.lines.iter().chain([&self.shared]);
        let sum = |field: fn(&Line) -> &AtomicU64| lines().map(|line| field(line).load(Ordering::Relaxed)).sum();
        Traffic {
            reads: sum(|line| &line.reads),
            writes: sum(|line| &line.writes),
            read_bytes: sum(|line| &line.read_bytes),
            written_bytes: sum(|line| &line.written_bytes),
            syncs: sum(|line| &line.syncs),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{Bench, MIB, disk, file};
    use diskwright_store::Store;
    use std::thread;

    #[test]
    fn a_mirror_writes_twice_reads_once_and_syncs_each_member_once() {
        let (_bench, pool) = Bench::pool(&[8 * MIB; 2], 2, 2 * MIB);
        let file = file(&pool);
        let mut disk = disk(&file);
        disk.write(0, &vec![1; 2 << 20], false).unwrap();
        disk.flush().unwrap();
        let sum = || {
            let members = pool.traffic();
            assert_eq!((members.len(), file.member_traffic()), (2, members.clone()));
            let add = |all: Traffic, member: &Traffic| Traffic {
                reads: all.reads + member.reads,
                writes: all.writes + member.writes,
                read_bytes: all.read_bytes + member.read_bytes,
                written_bytes: all.written_bytes + member.written_bytes,
                syncs: all.syncs + member.syncs,
            };
            members.iter().map(|member| member.traffic).fold(Traffic::default(), |all, member| add(all, &member))
        };
        let before = sum();
        (0..10).for_each(|block| disk.write(block * 4096, &[2; 4096], false).unwrap());
        (0..6).for_each(|block| disk.read(block * 8192, &mut [0; 8192]).unwrap());
        disk.flush().unwrap();
        let done = sum() - before;
        assert_eq!(done, Traffic { reads: 6, writes: 20, read_bytes: 6 * 8192, written_bytes: 20 * 4096, syncs: 2 });
    }

    #[test]
    fn nothing_that_many_threads_count_is_lost() {
        let counter = Counter::default();
        for _ in 0..3 {
            thread::scope(|scope| {
                for _ in 0..2 * LINES {
                    scope.spawn(|| (0..1000).for_each(|_| counter.count(Access::Write, 512)));
                }
            });
        }
        let sum = counter.sum();
        let all = 3 * 2 * LINES as u64 * 1000;
        assert_eq!((sum.writes, sum.written_bytes, sum.reads), (all, all * 512, 0));
    }
}
