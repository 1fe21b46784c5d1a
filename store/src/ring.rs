//! One io_uring: setup, submission and completion. `link` and `shared` say who owns it: one engine,
//! or several users.
//!
//! Features that the kernel refuses are left out one by one: setup flags that are too new for it,
//! registered files, registered buffers. They change only the speed.
//!
//! - `SINGLE_ISSUER | DEFER_TASKRUN`: our own `io_uring_enter` processes completions; no interrupt
//!   of our thread does.
//! - Registered files spare the look-up and the reference count of a descriptor for each transfer.
//! - Registered buffers spare pinning the pages of a buffer for each O_DIRECT transfer.
//!
//! Invariants: the ring belongs to one thread (`SINGLE_ISSUER`) and is not `Send`. The memory of a
//! started part stays valid until its completion has been taken. [`Ring::start`] and [`Ring::push`]
//! are therefore `unsafe`, and the users' drops wait for all completions.
//!
//! The lower half of an entry's `user_data` is the number that its user chose. The upper half
//! identifies the user (0 for a ring with one user).

#![allow(unsafe_code)]

use crate::{
    Slab,
    part::{Action, Part, Target},
    range::Zeroing,
};
use io_uring::{IoUring, opcode, squeue, types};
use nix::libc;
use rustix::fs::FallocateFlags;
use std::{io, marker::PhantomData, os::fd::RawFd, time::Duration};

/// Maximum number of registered files; further files are used by descriptor.
const FILES_MAX: u32 = 4096;

/// Maximum size of one registered buffer in the kernel.
const BUFFER_PIECE_BYTES: usize = 1 << 30;

/// Maximum length of one submission. The kernel moves at most 2 GiB minus a page at once; the rest
/// is submitted again.
const TRANSFER_BYTES: u64 = 1 << 30;

/// Maximum number of submission queue entries in the kernel.
const ENTRIES_MAX: usize = 32768;

/// How often in a row `io_uring_enter` may fail with EAGAIN or EBUSY before the ring counts as
/// broken.
const REFUSALS_MAX: u32 = 10_000;

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

pub(crate) struct Ring {
    ring: IoUring,
    files: u32,
    /// Indices in use or used before.
    files_used: u32,
    files_free: Vec<u32>,
    /// Kept alive while it is registered.
    slab: Option<Slab>,
    /// Completions that were taken early to make room in the completion queue.
    spilled: Vec<Answer>,
    refusals: u32,
    pub(crate) enters: u64,
    /// `SINGLE_ISSUER`: only the thread that set the ring up may use it.
    not_send: PhantomData<*const ()>,
}

impl Ring {
    /// A ring for about `depth` requests. Buffers of `slab` are registered if the kernel permits.
    pub(crate) fn new(depth: usize, slab: Option<&Slab>) -> io::Result<Self> {
        let entries = depth.saturating_mul(2).clamp(16, ENTRIES_MAX).next_power_of_two() as u32;
        let ring = set_up(entries)?;
        if !ring.params().is_feature_nodrop() {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "this kernel's io_uring may lose completions; Linux 5.5 or later is needed",
            ));
        }
        let most_files = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
        let files = FILES_MAX.min(most_files.min(u64::from(u32::MAX)) as u32);
        let files = if ring.submitter().register_files_sparse(files).is_ok() { files } else { 0 };
        let slab = slab.filter(|slab| register_buffers(&ring, slab)).cloned();
        Ok(Self {
            ring,
            files,
            files_used: 0,
            files_free: Vec::new(),
            slab,
            spilled: Vec::new(),
            refusals: 0,
            enters: 0,
            not_send: PhantomData,
        })
    }

    /// Registers a file and returns its index; `None` if there is no room.
    pub(crate) fn register_file(&mut self, fd: RawFd) -> Option<u32> {
        let index = match self.files_free.last() {
            Some(&index) => index,
            None if self.files_used < self.files => self.files_used,
            None => return None,
        };
        self.ring.submitter().register_files_update(index, &[fd]).ok()?;
        if self.files_free.pop().is_none() {
            self.files_used += 1;
        }
        Some(index)
    }

    /// Unregisters a file. The kernel then keeps it open only for what is in flight.
    pub(crate) fn unregister_file(&mut self, index: u32) {
        // An index that cannot be cleared is not reused.
        if self.ring.submitter().register_files_update(index, &[-1]).is_ok() {
            self.files_free.push(index);
        }
    }

    /// The slab whose buffers are registered, if any.
    pub(crate) fn slab(&self) -> Option<&Slab> {
        self.slab.as_ref()
    }

    /// Puts a part into the submission queue.
    ///
    /// # Safety
    /// The part fits the ring ([`Part::fits_ring`]). Until its completion has been taken, its
    /// memory stays valid and no other code accesses it; for a read it is writable. If `registered`
    /// is set, it lies within the registered slab.
    pub(crate) unsafe fn start(&mut self, part: &Part, target: &Target, user_data: u64) -> io::Result<()> {
        let (file, fixed) = match (target.file_index, target.fd) {
            (Some(index), _) => (types::Fd(index as i32), squeue::Flags::FIXED_FILE),
            (None, Some(fd)) => (types::Fd(fd), squeue::Flags::empty()),
            (None, None) => return Err(io::Error::other("a store without a file cannot be driven by a ring")),
        };
        let len_bytes = part.len_bytes.min(TRANSFER_BYTES) as u32;
        let offset_bytes = part.file_offset_bytes;
        let buffer = if part.registered { self.buffer_index(part.address, len_bytes as usize) } else { None };
        let flags = if part.action == (Action::Write { durable: true }) { libc::RWF_DSYNC } else { 0 };
        let entry = match (part.action, buffer) {
            (Action::Read, Some(index)) => {
                opcode::ReadFixed::new(file, part.address, len_bytes, index).offset(offset_bytes).build()
            }
            (Action::Read, None) => opcode::Read::new(file, part.address, len_bytes).offset(offset_bytes).build(),
            (Action::Write { .. } | Action::WriteAgain, Some(index)) => {
                opcode::WriteFixed::new(file, part.address, len_bytes, index)
                    .offset(offset_bytes)
                    .rw_flags(flags)
                    .build()
            }
            (Action::Write { .. } | Action::WriteAgain, None) => {
                opcode::Write::new(file, part.address, len_bytes).offset(offset_bytes).rw_flags(flags).build()
            }
            (Action::Zero(how), _) => {
                let mode = FallocateFlags::KEEP_SIZE
                    | match how {
                        Zeroing::Keep => FallocateFlags::ZERO_RANGE,
                        Zeroing::Deallocate => FallocateFlags::PUNCH_HOLE,
                    };
                opcode::Fallocate::new(file, part.len_bytes).offset(offset_bytes).mode(mode.bits() as i32).build()
            }
            (Action::Sync, _) => opcode::Fsync::new(file).flags(types::FsyncFlags::DATASYNC).build(),
        };
        // SAFETY: the memory is as the caller promised, and the target keeps the descriptor open.
        unsafe { self.push(&entry.flags(fixed).user_data(user_data)) }
    }

    /// Puts a poll for readability into the submission queue.
    pub(crate) fn poll(&mut self, fd: RawFd, user_data: u64) -> io::Result<()> {
        let entry = opcode::PollAdd::new(types::Fd(fd), libc::POLLIN as u32).build().user_data(user_data);
        // SAFETY: a poll names no memory.
        unsafe { self.push(&entry) }
    }

    /// Cancels a poll. Both entries are answered; the poll's answer may be that its descriptor
    /// became readable.
    pub(crate) fn cancel_poll(&mut self, polled: u64, user_data: u64) -> io::Result<()> {
        let entry = opcode::PollRemove::new(polled).build().user_data(user_data);
        // SAFETY: the entry names no memory.
        unsafe { self.push(&entry) }
    }

    /// Makes every later system call on the ring fail, by replacing its descriptor with another
    /// file's.
    #[cfg(test)]
    pub(crate) fn break_down(&mut self) {
        let null = std::fs::File::open("/dev/null").expect("/dev/null");
        // SAFETY: both descriptors are open. The ring's memory stays mapped; the kernel tears down
        // the ring.
        unsafe { libc::dup2(std::os::fd::AsRawFd::as_raw_fd(&null), std::os::fd::AsRawFd::as_raw_fd(&self.ring)) };
    }

    /// Puts any entry into the submission queue.
    ///
    /// # Safety
    /// Until the entry's completion has been taken, the memory that it names stays valid and no
    /// other code accesses it.
    pub(crate) unsafe fn push(&mut self, entry: &squeue::Entry) -> io::Result<()> {
        // SAFETY: as promised by the caller.
        while unsafe { self.ring.submission().push(entry) }.is_err() {
            self.enter(0)?;
            if self.unsubmitted() > 0 {
                // The kernel accepts no more until there is room for completions.
                let (ring, spilled) = (&mut self.ring, &mut self.spilled);
                spilled.extend(ring.completion().map(|answer| (answer.user_data(), answer.result())));
            }
        }
        Ok(())
    }

    fn buffer_index(&self, address: *mut u8, len_bytes: usize) -> Option<u16> {
        let start = (address as usize).checked_sub(self.slab.as_ref()?.base() as usize)?;
        let (first, last) = (start / BUFFER_PIECE_BYTES, (start + len_bytes.saturating_sub(1)) / BUFFER_PIECE_BYTES);
        if first == last { u16::try_from(first).ok() } else { None }
    }

    /// Entries that the kernel has not accepted yet.
    pub(crate) fn unsubmitted(&mut self) -> usize {
        self.ring.submission().len()
    }

    /// Whether the kernel posts further completions only in the next `io_uring_enter`.
    pub(crate) fn has_task_work(&mut self) -> bool {
        let queue = self.ring.submission();
        queue.taskrun() || queue.cq_overflow()
    }

    /// Submits everything and waits for `wait_for` completions. May return early.
    pub(crate) fn enter(&mut self, wait_for: usize) -> io::Result<()> {
        self.enters += 1;
        let entered = self.ring.submit_and_wait(wait_for);
        self.judge(entered)
    }

    /// As [`Ring::enter`], but waits no longer than `timeout`.
    pub(crate) fn enter_for(&mut self, wait_for: usize, timeout: Duration) -> io::Result<()> {
        self.enters += 1;
        let timeout = types::Timespec::from(timeout);
        let entered = self.ring.submitter().submit_with_args(wait_for, &types::SubmitArgs::new().timespec(&timeout));
        self.judge(entered)
    }

    fn judge(&mut self, entered: io::Result<usize>) -> io::Result<()> {
        let Err(errno) = entered else {
            self.refusals = 0;
            return Ok(());
        };
        match errno.raw_os_error() {
            Some(libc::ETIME) => Ok(()),
            Some(libc::EINTR) => Ok(()),
            Some(libc::EAGAIN | libc::EBUSY) if self.refusals < REFUSALS_MAX => {
                self.refusals += 1;
                std::thread::yield_now();
                Ok(())
            }
            _ => Err(errno),
        }
    }

    /// Whether [`Ring::take`] would return something.
    pub(crate) fn has_answers(&mut self) -> bool {
        !self.spilled.is_empty() || !self.ring.completion().is_empty()
    }

    /// Whether waiting can have a timeout (Linux 5.11).
    pub(crate) fn can_time_out(&self) -> bool {
        self.ring.params().is_feature_ext_arg()
    }

    /// Takes completions and returns their number. If `into` is not filled, there are no more.
    pub(crate) fn take(&mut self, into: &mut [Answer]) -> usize {
        let mut taken = 0;
        while taken < into.len()
            && let Some(answer) = self.spilled.pop()
        {
            into[taken] = answer;
            taken += 1;
        }
        let queue = self.ring.completion();
        for (place, answer) in into[taken..].iter_mut().zip(queue) {
            *place = (answer.user_data(), answer.result());
            taken += 1;
        }
        taken
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // The kernel tears down a ring some time after it was closed. Registered files must not
        // stay open, with their locks held, until then.
        if self.files > 0 {
            let _ = self.ring.submitter().unregister_files();
        }
        if self.slab.is_some() {
            let _ = self.ring.submitter().unregister_buffers();
        }
    }
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring")
            .field("entries", &self.ring.params().sq_entries())
            .field("files", &self.files_used)
            .field("slab", &self.slab)
            .field("enters", &self.enters)
            .finish_non_exhaustive()
    }
}

/// Sets up a ring with the best flags that this kernel supports.
fn set_up(entries: u32) -> io::Result<IoUring> {
    let attempts: [fn(&mut io_uring::Builder); 5] = [
        |builder| {
            builder
                .setup_single_issuer()
                .setup_defer_taskrun()
                .setup_coop_taskrun()
                .setup_taskrun_flag()
                .setup_submit_all()
                .setup_no_sqarray();
        },
        |builder| {
            builder
                .setup_single_issuer()
                .setup_defer_taskrun()
                .setup_coop_taskrun()
                .setup_taskrun_flag()
                .setup_submit_all();
        },
        |builder| {
            builder.setup_coop_taskrun().setup_taskrun_flag().setup_submit_all();
        },
        |builder| {
            builder.setup_submit_all();
        },
        |_| {},
    ];
    let mut refused = io::Error::from_raw_os_error(libc::EINVAL);
    for attempt in attempts {
        let mut builder = IoUring::builder();
        builder.setup_clamp();
        attempt(&mut builder);
        match builder.build(entries) {
            Ok(ring) => return Ok(ring),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => refused = error,
            Err(error) => return Err(error),
        }
    }
    Err(refused)
}

/// Registers the slab in pieces of at most 1 GiB. Returns `false` if the kernel refuses, mostly
/// because of the limit of locked memory.
fn register_buffers(ring: &IoUring, slab: &Slab) -> bool {
    let pieces: Vec<libc::iovec> = (0..slab.total_bytes())
        .step_by(BUFFER_PIECE_BYTES)
        .map(|start| libc::iovec {
            iov_base: slab.base().wrapping_add(start).cast(),
            iov_len: (slab.total_bytes() - start).min(BUFFER_PIECE_BYTES),
        })
        .collect();
    // SAFETY: the pieces lie within the slab's allocation. The caller keeps the slab while the ring
    // lives. The kernel uses a registered buffer only for parts that were started.
    unsafe { ring.submitter().register_buffers(&pieces) }.is_ok()
}
