//! A replacement for io_uring under Miri, which does not support it: the same calls, carried out by
//! plain system calls when the ring is entered.
//!
//! Like the kernel, it keeps the memory of started entries by address only, and accesses it while
//! the engine's owner of that memory exists. So Miri checks each promise of the ring's users:
//! the memory is alive until the answer was taken, no reference to it exists, and the memory of a
//! read is writable. Like the kernel, it answers in any order, makes short transfers, and returns
//! EAGAIN. It does not support streams, because it cannot decode their entries.
//!
//! Compiled instead of `ring.rs`, for Miri only (`.ci/miri`).

#![allow(unsafe_code)]

use crate::{
    Slab,
    part::{Action, Part, Target},
};
use io_uring::squeue;
use nix::libc;
use std::{io, os::fd::RawFd, time::Duration};

/// `user_data` of the poll on the eventfd for externals. Lanes and parts have smaller numbers.
pub(crate) const WAKE: u32 = u32::MAX;

/// `user_data` of an entry that cancels a poll.
pub(crate) const CANCEL: u32 = u32::MAX - 1;

/// Maximum number of lanes of an engine.
pub(crate) const LANES_MAX: u32 = 1 << 16;

/// `user_data` of the poll on an engine's first lane. Parts have smaller numbers.
pub(crate) const FIRST_LANE: u32 = CANCEL - LANES_MAX;

/// A completion: `user_data` and result.
pub(crate) type Answer = (u64, i32);

/// A submitted entry.
#[derive(Debug, Clone, Copy)]
struct Entry {
    user_data: u64,
    /// `None` for a poll.
    work: Option<Work>,
}

#[derive(Debug, Clone, Copy)]
struct Work {
    action: Action,
    fd: RawFd,
    address: *mut u8,
    len_bytes: usize,
    offset_bytes: u64,
}

/// The replacement of the io_uring; see the module documentation.
#[derive(Debug)]
pub(crate) struct Ring {
    pushed: Vec<Entry>,
    taken: Vec<Entry>,
    answers: Vec<Answer>,
    slab: Option<Slab>,
    random: u64,
    broken: bool,
    pub(crate) enters: u64,
}

impl Ring {
    pub(crate) fn new(_depth: usize, slab: Option<&Slab>) -> io::Result<Self> {
        let slab = slab.cloned();
        Ok(Self {
            pushed: Vec::new(),
            taken: Vec::new(),
            answers: Vec::new(),
            slab,
            random: 1,
            broken: false,
            enters: 0,
        })
    }

    pub(crate) fn register_file(&mut self, _fd: RawFd) -> Option<u32> {
        None
    }

    pub(crate) fn unregister_file(&mut self, _index: u32) {}

    pub(crate) fn slab(&self) -> Option<&Slab> {
        self.slab.as_ref()
    }

    /// Queues a part.
    ///
    /// # Safety
    /// As for `start` in `ring.rs`.
    pub(crate) unsafe fn start(&mut self, part: &Part, target: &Target, user_data: u64) -> io::Result<()> {
        let fd = target.fd.ok_or_else(|| io::Error::other("a store without a file cannot be driven by a ring"))?;
        let (action, address, len_bytes) = (part.action, part.address, part.len_bytes as usize);
        let work = Work { action, fd, address, len_bytes, offset_bytes: part.file_offset_bytes };
        self.pushed.push(Entry { user_data, work: Some(work) });
        Ok(())
    }

    pub(crate) fn poll(&mut self, _fd: RawFd, user_data: u64) -> io::Result<()> {
        self.pushed.push(Entry { user_data, work: None });
        Ok(())
    }

    /// Cancels a poll. Both entries are answered.
    pub(crate) fn cancel_poll(&mut self, polled: u64, user_data: u64) -> io::Result<()> {
        let before = self.pushed.len() + self.taken.len();
        for entries in [&mut self.pushed, &mut self.taken] {
            entries.retain(|entry| entry.user_data != polled || entry.work.is_some());
        }
        // If the poll was not found, it has been answered already.
        if self.pushed.len() + self.taken.len() < before {
            self.answers.push((polled, -libc::ECANCELED));
        }
        self.answers.push((user_data, 0));
        Ok(())
    }

    /// Makes every later call fail.
    #[cfg(test)]
    pub(crate) fn break_down(&mut self) {
        self.broken = true;
    }

    /// Refuses every entry.
    ///
    /// # Safety
    /// None is needed.
    pub(crate) unsafe fn push(&mut self, _entry: &squeue::Entry) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(crate) fn unsubmitted(&mut self) -> usize {
        self.pushed.len()
    }

    pub(crate) fn has_task_work(&mut self) -> bool {
        false
    }

    /// A pseudo-random number below `limit`.
    fn random(&mut self, limit: usize) -> usize {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) as usize % limit
    }

    pub(crate) fn enter(&mut self, wait_for: usize) -> io::Result<()> {
        self.enters += 1;
        if self.broken {
            return Err(io::Error::from_raw_os_error(libc::EBADF));
        }
        self.taken.append(&mut self.pushed);
        let mut polls = Vec::new();
        while self.answers.len() < wait_for && !self.taken.is_empty() {
            let number = self.random(self.taken.len());
            let entry = self.taken.swap_remove(number);
            match entry.work {
                Some(work) => {
                    let answer = self.carry_out(work);
                    self.answers.push((entry.user_data, answer));
                }
                None => polls.push(entry),
            }
        }
        // A poll may end although nothing is readable. If there are other answers, they go first.
        for poll in polls {
            if self.answers.len() < wait_for {
                std::thread::yield_now();
                self.answers.push((poll.user_data, libc::POLLIN.into()));
            } else {
                self.taken.push(poll);
            }
        }
        Ok(())
    }

    pub(crate) fn enter_for(&mut self, wait_for: usize, _timeout: Duration) -> io::Result<()> {
        self.enter(wait_for)
    }

    /// The kernel's answer to an entry.
    fn carry_out(&mut self, work: Work) -> i32 {
        let random = self.random(8);
        if random == 0 {
            return -libc::EAGAIN;
        }
        let short = random == 1 && work.len_bytes > 1024;
        let len_bytes = if short { work.len_bytes / 1024 * 512 } else { work.len_bytes };
        let at = work.offset_bytes as libc::off_t;
        let moved = match work.action {
            // SAFETY: the caller of `start` promised that this memory is alive and writable, and
            // that no other code accesses it. Miri checks that.
            Action::Read => unsafe { libc::pread(work.fd, work.address.cast(), len_bytes, at) },
            // SAFETY: as above, for reading.
            Action::Write { .. } | Action::WriteAgain => unsafe {
                libc::pwrite(work.fd, work.address.cast_const().cast(), len_bytes, at)
            },
            Action::Zero(_) => return -libc::EOPNOTSUPP,
            Action::Sync => return 0,
        };
        if moved < 0 { -io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO) } else { moved as i32 }
    }

    pub(crate) fn has_answers(&mut self) -> bool {
        !self.answers.is_empty()
    }

    pub(crate) fn can_time_out(&self) -> bool {
        true
    }

    pub(crate) fn take(&mut self, into: &mut [Answer]) -> usize {
        let taken = self.answers.len().min(into.len());
        for (place, answer) in into.iter_mut().zip(self.answers.drain(..taken)) {
            *place = answer;
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use crate::{DataFile, Engine, EngineCompletion, EngineKind, FileRange, IoBuf, SharedRing, Slab, Store, Zeroing};
    use std::{
        fs::File,
        io,
        os::{fd::AsFd, unix::fs::FileExt},
        path::Path,
        sync::Arc,
        thread,
    };

    const FILE_BYTES: usize = 64 << 10;

    /// A real file without features that Miri does not support (locks, O_DIRECT, holes).
    #[derive(Debug)]
    struct PlainFile(File);

    impl Store for PlainFile {
        fn name(&self) -> &Path {
            Path::new("plain")
        }

        fn len_bytes(&self) -> io::Result<u64> {
            Ok(self.0.metadata()?.len())
        }

        fn read_at(&self, buf: &mut [u8], offset_bytes: u64) -> io::Result<()> {
            self.0.read_exact_at(buf, offset_bytes)
        }

        fn write_at(&self, buf: &[u8], offset_bytes: u64) -> io::Result<()> {
            self.0.write_all_at(buf, offset_bytes)
        }

        fn set_len(&self, len_bytes: u64) -> io::Result<()> {
            self.0.set_len(len_bytes)
        }

        fn allocate(&self, _range: FileRange) -> io::Result<()> {
            Ok(())
        }

        fn zero_range(&self, range: FileRange, _how: Zeroing) -> io::Result<()> {
            self.write_at(&vec![0; range.len_bytes as usize], range.offset_bytes)
        }

        fn sync_data(&self) -> io::Result<()> {
            Ok(())
        }

        fn data_file(&self) -> Option<DataFile<'_>> {
            Some(DataFile { fd: self.0.as_fd(), alignment_bytes: 1 })
        }
    }

    fn store() -> Arc<dyn Store> {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(FILE_BYTES as u64).expect("a length");
        Arc::new(PlainFile(file))
    }

    fn reap_all(engine: &mut Engine) -> Vec<EngineCompletion> {
        let (mut done, all) = (Vec::new(), engine.in_flight());
        engine.reap(all, &mut done).expect("the ring works");
        assert_eq!(done.len(), all);
        done
    }

    /// Compares reads with a model in memory, for requests of one part and of several, with buffers
    /// inside and outside the slab, while returned buffers are in use.
    fn matches_a_model(mut engine: Engine, slab: &Slab) {
        let target = engine.add_target(&store()).expect("a target");
        // Without a ring, a durable write is a system call that Miri does not support.
        let durable = engine.kind() == EngineKind::Uring;
        let shared = Arc::new(IoBuf::new(1000));
        let mut model = vec![0_u8; FILE_BYTES];
        let mut bufs = slab.take_all();
        bufs.push(IoBuf::new(4096));
        for round in 0..3_usize {
            let mut kept = Vec::new();
            for (number, mut buf) in bufs.drain(..).enumerate() {
                let at = number * 8192 + round * 700;
                let len = 2000 + round * 300;
                buf.fill((round * 16 + number) as u8 | 1);
                model[at..at + len].copy_from_slice(&buf[..len]);
                if number % 2 == 0 {
                    engine.write_one(number as u64, 0, target, at as u64, buf, 0..len, false);
                } else {
                    let slot = engine.begin(number as u64, 0, Some(buf));
                    engine.write(&slot, target, at as u64, 0..len / 2, durable);
                    engine.write(&slot, target, (at + len / 2) as u64, len / 2..len, false);
                    engine.write_shared(&slot, target, (at + len) as u64, &shared);
                    model[at + len..at + len + 1000].fill(0);
                    let range = FileRange { offset_bytes: at as u64 + 5000, len_bytes: 600 };
                    engine.write_zeroes(&slot, target, range, Zeroing::Deallocate);
                    model[at + 5000..at + 5600].fill(0);
                    engine.sync(&slot, target);
                    engine.end(slot);
                }
                // Some requests complete while others are in flight; their buffers may be changed
                // again.
                let mut done = Vec::new();
                engine.reap(usize::from(number == 2), &mut done).expect("the ring works");
                kept.append(&mut done);
                for ended in &mut kept {
                    ended.buf.as_mut().expect("its buffer").fill(0xEE);
                }
            }
            kept.extend(reap_all(&mut engine));
            for (number, ended) in kept.drain(..).enumerate() {
                ended.result.expect("a write");
                let (buf, at) = (ended.buf.expect("its buffer"), number * 8192);
                let slot = engine.begin(at as u64, 0, Some(buf));
                engine.read(&slot, target, at as u64, 0..1500);
                engine.fill_zeros(&slot, 1500..2000);
                engine.read(&slot, target, at as u64 + 2000, 2000..4096);
                engine.end(slot);
            }
            for ended in reap_all(&mut engine) {
                ended.result.expect("a read");
                let (buf, at) = (ended.buf.expect("its buffer"), ended.tag as usize);
                assert_eq!(buf[..1500], model[at..at + 1500]);
                assert!(buf[1500..2000].iter().all(|&byte| byte == 0));
                assert_eq!(buf[2000..4096], model[at + 2000..at + 4096]);
                bufs.push(buf);
            }
        }
    }

    #[test]
    fn miri_a_ring_of_its_own() {
        let slab = Slab::of_classes(&[(2, 4096), (2, 8192)]);
        matches_a_model(Engine::new(EngineKind::Uring, 8, Some(&slab)).expect("a stand-in"), &slab);
    }

    #[test]
    fn miri_without_a_ring() {
        let slab = Slab::new(4, 4096);
        matches_a_model(Engine::new(EngineKind::Sync, 8, Some(&slab)).expect("no ring"), &slab);
    }

    #[test]
    fn miri_a_shared_ring_and_tickets_of_other_threads() {
        let slab = Slab::new(4, 4096);
        let ring = SharedRing::new(8, Some(&slab)).expect("a stand-in");
        let mut other = Engine::on(&ring);
        let target = other.add_target(&store()).expect("a target");
        let tickets: Vec<_> = (0..3).map(|tag| other.external(tag, 0, Some(IoBuf::new(16)))).collect();
        other.read_one(9, 0, target, 0, IoBuf::new(4096), 0..4096);
        let answers = thread::spawn(move || {
            for (number, ticket) in tickets.into_iter().enumerate() {
                // The last ticket is dropped without an answer.
                if number < 2 {
                    ticket.complete(Ok(()));
                }
            }
        });
        matches_a_model(Engine::on(&ring), &slab);
        let failed = reap_all(&mut other).into_iter().filter(|ended| ended.result.is_err()).count();
        assert_eq!(failed, 1);
        answers.join().expect("a thread that answers");
    }

    #[test]
    fn miri_an_engine_that_is_dropped_waits_for_its_memory() {
        let mut engine = Engine::new(EngineKind::Uring, 8, None).expect("a stand-in");
        let target = engine.add_target(&store()).expect("a target");
        for tag in 0..8 {
            engine.read_one(tag, 0, target, tag * 512, IoBuf::new(4096), 0..4096);
        }
        let slot = engine.begin(9, 0, Some(IoBuf::new(100)));
        engine.read(&slot, target, 0, 0..100);
        drop(engine);
    }
}
