//! Memory that outlives the server and records which requests are in flight, so that a restarted
//! server carries them out again (vhost-user, "Inflight I/O tracking").
//!
//! ```text
//!   server ── GET_INFLIGHT_FD ─▶ memfd ─▶ front-end keeps it
//!   killed                                    │
//!   server again ◀──── SET_INFLIGHT_FD ───────┘ ─▶ recover: the heads in flight, oldest first
//!
//!   one region for each queue:   features, version, size, last_batch, used_index  (16 bytes)
//!                                in flight?, next, counter                        (16 a head)
//!   behind them, ours alone:     the record of `risk.rs`                          (64 bytes)
//! ```
//!
//! A request is marked before it is started. When a batch completes, its heads are linked from
//! `last_batch` first. Then the guest sees the used index, then the marks are removed, and at last
//! `used_index` is brought up to date. A server that dies between these steps leaves a
//! `used_index` that differs from the guest's, and the difference says how many heads of the batch
//! the guest has seen.
//!
//! The front-end may write anything here. So each number is checked, and a list ends after as many
//! heads as the queue has.

use super::{
    memory::Place,
    risk::{RECORD_BYTES, Risk, RiskRecord},
    wire::InflightInfo,
};
use diskwright_store::{FileRange, MappedMemory};
use rustix::fs::MemfdFlags;
use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

const ENTRY_BYTES: usize = 16;
const HEAD_BYTES: usize = 16;
const ALIGNMENT_BYTES: usize = 64;
/// Split virtqueues.
const VERSION: u16 = 1;

const VERSION_AT: usize = 8;
const SIZE_AT: usize = 10;
const LAST_BATCH_AT: usize = 12;
const USED_INDEX_AT: usize = 14;

/// The shared memory of all queues.
#[derive(Debug, Clone)]
pub(crate) struct Inflight {
    memory: Arc<MappedMemory>,
    info: InflightInfo,
    /// `None` in memory that another program has made.
    record: Option<Arc<RiskRecord>>,
}

fn region_bytes(queue_size: u16) -> usize {
    (HEAD_BYTES + usize::from(queue_size) * ENTRY_BYTES).next_multiple_of(ALIGNMENT_BYTES)
}

impl Inflight {
    /// New memory, and the memfd for the front-end.
    ///
    /// # Errors
    /// The kernel refused.
    pub(crate) fn create(queues: u16, queue_size: u16) -> io::Result<(Self, OwnedFd)> {
        let len_bytes = (region_bytes(queue_size) * usize::from(queues) + RECORD_BYTES) as u64;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("vhost-user-inflight", flags)?;
        rustix::fs::ftruncate(&fd, len_bytes)?;
        let info = InflightInfo { len_bytes, offset_bytes: 0, queues, queue_size };
        Ok((Self::of(info, fd.as_fd())?, fd))
    }

    /// The memory that a front-end has kept.
    ///
    /// # Errors
    /// It is too short for its queues, or cannot be mapped.
    pub(crate) fn of(info: InflightInfo, fd: BorrowedFd<'_>) -> io::Result<Self> {
        let wanted_bytes = (region_bytes(info.queue_size) * usize::from(info.queues)) as u64;
        if info.len_bytes < wanted_bytes {
            let what = format!(
                "the memory for requests in flight has {} bytes; {} queues of {} need {wanted_bytes}",
                info.len_bytes, info.queues, info.queue_size
            );
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        let range = FileRange { offset_bytes: info.offset_bytes, len_bytes: info.len_bytes };
        let memory = MappedMemory::of_memfd(fd, range, true)?;
        let has_record = info.len_bytes == wanted_bytes + RECORD_BYTES as u64;
        let record = has_record
            .then(|| Arc::new(RiskRecord::at(Place { memory: Arc::clone(&memory), at: wanted_bytes as usize })));
        Ok(Self { memory, info, record })
    }

    /// What a server's death costs.
    pub(crate) fn record(&self) -> Option<&Arc<RiskRecord>> {
        self.record.as_ref()
    }

    pub(crate) fn info(&self) -> InflightInfo {
        self.info
    }

    /// The region of one queue. `None` if the memory has none for such a queue.
    pub(crate) fn queue(&self, index: usize, size: u16) -> Option<QueueInflight> {
        if index >= usize::from(self.info.queues) || size > self.info.queue_size {
            return None;
        }
        let at = index * region_bytes(self.info.queue_size);
        let place = Place { memory: Arc::clone(&self.memory), at };
        Some(QueueInflight { place, size, counter: 0, record: self.record.clone() })
    }
}

/// The region of one queue.
#[derive(Debug)]
pub(crate) struct QueueInflight {
    place: Place,
    size: u16,
    /// The next number that orders requests.
    counter: u64,
    record: Option<Arc<RiskRecord>>,
}

impl QueueInflight {
    fn entry_at(&self, head: u16) -> usize {
        self.place.at + HEAD_BYTES + usize::from(head) * ENTRY_BYTES
    }

    fn is_marked(&self, head: u16) -> io::Result<bool> {
        let mut byte = [0];
        self.place.memory.copy_out(self.entry_at(head), &mut byte)?;
        Ok(byte[0] == 1)
    }

    fn mark(&self, head: u16, on: bool) -> io::Result<()> {
        self.place.memory.copy_in(self.entry_at(head), &[u8::from(on)])
    }

    /// Finds the requests that a former server has left in flight, oldest first. `used_index` is
    /// the guest's.
    ///
    /// # Errors
    /// The memory could not be accessed.
    pub(crate) fn recover(&mut self, used_index: u16) -> io::Result<Vec<u16>> {
        let Place { memory, at } = self.place.clone();
        let is_new = memory.load_u16(at + VERSION_AT)? != VERSION;
        memory.store_u16(at + VERSION_AT, VERSION)?;
        memory.store_u16(at + SIZE_AT, self.size)?;
        let recorded = memory.load_u16(at + USED_INDEX_AT)?;
        if !is_new && recorded != used_index {
            let seen = used_index.wrapping_sub(recorded).min(self.size);
            let mut head = memory.load_u16(at + LAST_BATCH_AT)?;
            for _ in 0..seen {
                if head >= self.size {
                    break;
                }
                self.mark(head, false)?;
                head = memory.load_u16(self.entry_at(head) + 6)?;
            }
        }
        memory.store_u16(at + USED_INDEX_AT, used_index)?;
        let mut found = Vec::new();
        for head in 0..self.size {
            if self.is_marked(head)? {
                let mut counter = [0; 8];
                memory.copy_out(self.entry_at(head) + 8, &mut counter)?;
                found.push((u64::from_ne_bytes(counter), head));
            }
        }
        found.sort_unstable();
        self.counter = found.last().map_or(0, |&(counter, _)| counter.wrapping_add(1));
        Ok(found.into_iter().map(|(_, head)| head).collect())
    }

    /// Records that a request is in flight.
    ///
    /// # Errors
    /// The memory could not be accessed.
    pub(crate) fn begin(&mut self, head: u16) -> io::Result<()> {
        self.place.memory.copy_in(self.entry_at(head) + 8, &self.counter.to_ne_bytes())?;
        self.counter = self.counter.wrapping_add(1);
        self.mark(head, true)
    }

    /// Records what the server's death would cost now. See [`RiskRecord::note`].
    ///
    /// # Errors
    /// The memory could not be accessed.
    pub(crate) fn note(&self, risk: &Risk, flushed: bool) -> io::Result<()> {
        self.record.as_ref().map_or(Ok(()), |record| record.note(risk, flushed))
    }

    /// Links a batch. Call before the guest sees the new used index.
    ///
    /// # Errors
    /// The memory could not be accessed.
    pub(crate) fn link(&self, batch: &[u16]) -> io::Result<()> {
        let Place { memory, at } = &self.place;
        for &head in batch {
            let last = memory.load_u16(at + LAST_BATCH_AT)?;
            memory.store_u16(self.entry_at(head) + 6, last)?;
            memory.store_u16(at + LAST_BATCH_AT, head)?;
        }
        Ok(())
    }

    /// Removes the marks of a batch. Call after the guest sees the new used index.
    ///
    /// # Errors
    /// The memory could not be accessed.
    pub(crate) fn end(&self, batch: &[u16], used_index: u16) -> io::Result<()> {
        batch.iter().try_for_each(|&head| self.mark(head, false))?;
        self.place.memory.store_u16(self.place.at + USED_INDEX_AT, used_index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(inflight: &Inflight) -> QueueInflight {
        inflight.queue(1, 8).unwrap()
    }

    #[test]
    fn a_server_that_died_in_any_step_is_followed_by_one_that_knows_what_is_in_flight() {
        let (memory, fd) = Inflight::create(2, 8).unwrap();
        assert!(memory.queue(2, 8).is_none() && memory.queue(0, 16).is_none());
        let mut first = queue(&memory);
        assert!(first.recover(5).unwrap().is_empty());
        for head in [3, 0, 7, 1] {
            first.begin(head).unwrap();
        }
        let again = |used_index| queue(&Inflight::of(memory.info(), fd.as_fd()).unwrap()).recover(used_index).unwrap();
        assert_eq!(again(5), [3, 0, 7, 1], "killed before any completed");
        first.link(&[0, 7]).unwrap();
        assert_eq!(again(5), [3, 0, 7, 1], "killed before the guest saw them");
        assert_eq!(again(7), [3, 1], "killed before the marks were removed");
        assert_eq!(again(7), [3, 1], "and once more");
        let mut second = queue(&memory);
        second.recover(7).unwrap();
        second.begin(0).unwrap();
        assert_eq!(again(7), [3, 1, 0], "a new request is younger");
        second.link(&[3]).unwrap();
        second.end(&[3], 8).unwrap();
        assert_eq!(again(8), [1, 0]);
    }

    #[test]
    fn nonsense_in_the_memory_is_bounded() {
        let (memory, _fd) = Inflight::create(2, 8).unwrap();
        let mut ours = queue(&memory);
        ours.recover(0).unwrap();
        memory.memory.copy_in(0, &vec![0xff; memory.memory.len()]).unwrap();
        assert!(queue(&memory).recover(3).unwrap().len() <= 8);
        memory.memory.copy_in(0, &vec![1; memory.memory.len()]).unwrap();
        assert!(queue(&memory).recover(9).unwrap().len() <= 8);
        let short = InflightInfo { len_bytes: 16, ..memory.info() };
        assert!(Inflight::of(short, _fd.as_fd()).is_err());
    }
}
