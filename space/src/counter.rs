//! Counts what a member is asked for.
//!
//! Threads that use a member at the same time would wait for one cache line. So each thread counts
//! on one of [`SHARDS`] lines, and a reading adds them up.

use diskwright_store::{Access, Traffic};
use std::{
    cell::Cell,
    sync::atomic::{AtomicU64, AtomicUsize, Ordering},
};

const SHARDS: usize = 8;

#[derive(Debug, Default)]
#[repr(align(64))]
struct Shard {
    reads: AtomicU64,
    writes: AtomicU64,
    read_bytes: AtomicU64,
    written_bytes: AtomicU64,
    syncs: AtomicU64,
}

/// What a member was asked for since it was opened.
#[derive(Debug, Default)]
pub(crate) struct Counter([Shard; SHARDS]);

impl Counter {
    fn shard(&self) -> &Shard {
        static THREADS: AtomicUsize = AtomicUsize::new(0);
        thread_local! {
            static NUMBER: Cell<usize> = const { Cell::new(usize::MAX) };
        }
        let number = NUMBER.with(|number| {
            if number.get() == usize::MAX {
                number.set(THREADS.fetch_add(1, Ordering::Relaxed));
            }
            number.get()
        });
        &self.0[number % SHARDS]
    }

    /// Counts a read or a write.
    #[inline]
    pub(crate) fn count(&self, access: Access, len_bytes: u64) {
        let shard = self.shard();
        let (requests, bytes) = match access {
            Access::Read => (&shard.reads, &shard.read_bytes),
            Access::Write => (&shard.writes, &shard.written_bytes),
        };
        requests.fetch_add(1, Ordering::Relaxed);
        bytes.fetch_add(len_bytes, Ordering::Relaxed);
    }

    /// Counts a sync.
    pub(crate) fn count_sync(&self) {
        self.shard().syncs.fetch_add(1, Ordering::Relaxed);
    }

    /// What was counted.
    pub(crate) fn sum(&self) -> Traffic {
        let sum =
            |field: fn(&Shard) -> &AtomicU64| self.0.iter().map(|shard| field(shard).load(Ordering::Relaxed)).sum();
        Traffic {
            reads: sum(|shard| &shard.reads),
            writes: sum(|shard| &shard.writes),
            read_bytes: sum(|shard| &shard.read_bytes),
            written_bytes: sum(|shard| &shard.written_bytes),
            syncs: sum(|shard| &shard.syncs),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::tests::{Bench, MIB, disk, file};
    use diskwright_store::{Store, Traffic};

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
}
