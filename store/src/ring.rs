//! One io_uring: setting it up, feeding it, emptying it. Whose it is, an engine's alone or several
//! users', `link` and `shared` say.
//!
//! What the kernel refuses is left out, piece by piece: setup flags that are too new for it,
//! registered files, registered buffers. None of these changes what happens, only how fast.
//!
//! - `SINGLE_ISSUER | DEFER_TASKRUN`: completions are worked off by our own `io_uring_enter`, not
//!   by interrupting us.
//! - Registered files spare the look-up, and the reference count, of a descriptor for each
//!   transfer.
//! - Registered buffers spare pinning the pages of a buffer for each direct transfer.
//!
//! Invariant: the ring belongs to one thread (`SINGLE_ISSUER`), and is not `Send`. A started part's
//! memory stays valid until its completion has been taken; [`Ring::start`] and [`Ring::push`] are
//! `unsafe` for that reason, and the users' drops wait for all.
//!
//! The lower half of an entry's `user_data` is its user's number for it, the upper half says whose
//! it is (0 for a ring with one user).

#![allow(unsafe_code)]

use crate::{
    Slab,
    part::{Action, Part, Target},
    store::Zeroing,
};
use io_uring::{IoUring, opcode, squeue, types};
use nix::libc;
use rustix::fs::FallocateFlags;
use std::{io, marker::PhantomData, os::fd::RawFd, time::Duration};

/// Most files that are registered; more are reached by their descriptors.
const MOST_FILES: u32 = 4096;

/// The kernel takes at most this much as one registered buffer.
const BUFFER_PIECE_BYTES: usize = 1 << 30;

/// Most bytes in one submission: the kernel moves no more than 2 GiB less a page at once, and the
/// rest follows.
const TRANSFER_BYTES: u64 = 1 << 30;

/// Most entries of a submission queue that the kernel gives.
const MOST_ENTRIES: usize = 32768;

/// Enters in a row that may be refused for want of memory or of room before the ring counts as
/// broken.
const PATIENCE: u32 = 10_000;

/// The number of the poll on an engine's eventfd for externals. Lanes and parts have smaller ones.
pub(crate) const WAKE: u32 = u32::MAX;

/// The number of an entry that takes a poll back.
pub(crate) const CANCEL: u32 = u32::MAX - 1;

/// Most lanes of an engine.
pub(crate) const LANES_MAX: u32 = 1 << 16;

/// The number of the poll on an engine's first lane. Parts have smaller ones.
pub(crate) const FIRST_LANE: u32 = CANCEL - LANES_MAX;

/// A completion: `user_data` and result.
pub(crate) type Answer = (u64, i32);

pub(crate) struct Ring {
    ring: IoUring,
    files: u32,
    /// Places in use, or used before.
    files_used: u32,
    files_free: Vec<u32>,
    /// Kept while it is registered.
    slab: Option<Slab>,
    /// Completions that had to be taken out to make room.
    spilled: Vec<Answer>,
    refusals: u32,
    pub(crate) enters: u64,
    /// The kernel knows the thread that set the ring up.
    not_send: PhantomData<*const ()>,
}

impl Ring {
    /// A ring for about `depth` requests; see the module for what may be left out.
    pub(crate) fn new(depth: usize, slab: Option<&Slab>) -> io::Result<Self> {
        let entries = depth.saturating_mul(2).clamp(16, MOST_ENTRIES).next_power_of_two() as u32;
        let ring = set_up(entries)?;
        if !ring.params().is_feature_nodrop() {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "this kernel's io_uring may lose completions"));
        }
        let most_files = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
        let files = MOST_FILES.min(most_files.min(u64::from(u32::MAX)) as u32);
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

    /// Registers a file and gives its index, if there is room.
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

    /// Lets go of a registered file: the kernel keeps it open no longer than what is in flight.
    pub(crate) fn unregister_file(&mut self, index: u32) {
        // A place that cannot be emptied is not used again.
        if self.ring.submitter().register_files_update(index, &[-1]).is_ok() {
            self.files_free.push(index);
        }
    }

    /// Whether buffers of `slab` are registered.
    pub(crate) fn slab(&self) -> Option<&Slab> {
        self.slab.as_ref()
    }

    /// Puts a part into the submission queue.
    ///
    /// # Safety
    /// The part fits the ring ([`Part::fits_ring`]). Its memory stays valid, and is reached by
    /// nobody else, until its completion has been taken; for a read it is writable. If `registered`
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
        // SAFETY: the memory is as the caller promised, and the descriptor is kept open by the
        // target.
        unsafe { self.push(&entry.flags(fixed).user_data(user_data)) }
    }

    /// Puts a poll for readability into the submission queue.
    pub(crate) fn poll(&mut self, fd: RawFd, user_data: u64) -> io::Result<()> {
        let entry = opcode::PollAdd::new(types::Fd(fd), libc::POLLIN as u32).build().user_data(user_data);
        // SAFETY: a poll names no memory.
        unsafe { self.push(&entry) }
    }

    /// Takes a poll back. Both entries are answered, the poll's perhaps with what it waited for.
    pub(crate) fn cancel_poll(&mut self, polled: u64, user_data: u64) -> io::Result<()> {
        let entry = opcode::PollRemove::new(polled).build().user_data(user_data);
        // SAFETY: the entry names no memory.
        unsafe { self.push(&entry) }
    }

    /// Makes every later call of the kernel fail: another file takes the place of the ring's
    /// descriptor.
    #[cfg(test)]
    pub(crate) fn break_down(&mut self) {
        let null = std::fs::File::open("/dev/null").expect("/dev/null");
        // SAFETY: both descriptors are open. The ring's memory stays mapped; the kernel takes the
        // ring apart.
        unsafe { libc::dup2(std::os::fd::AsRawFd::as_raw_fd(&null), std::os::fd::AsRawFd::as_raw_fd(&self.ring)) };
    }

    /// Puts any entry into the submission queue.
    ///
    /// # Safety
    /// What the entry names stays valid, and is reached by nobody else, until its completion has
    /// been taken.
    pub(crate) unsafe fn push(&mut self, entry: &squeue::Entry) -> io::Result<()> {
        // SAFETY: as promised by the caller.
        while unsafe { self.ring.submission().push(entry) }.is_err() {
            self.enter(0)?;
            if self.unsubmitted() > 0 {
                // The kernel takes no more before there is room for completions.
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

    /// Entries that the kernel has not taken yet.
    pub(crate) fn unsubmitted(&mut self) -> usize {
        self.ring.submission().len()
    }

    /// Whether the kernel waits for us to enter before it posts completions.
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
            Some(libc::EAGAIN | libc::EBUSY) if self.refusals < PATIENCE => {
                self.refusals += 1;
                std::thread::yield_now();
                Ok(())
            }
            _ => Err(errno),
        }
    }

    /// Whether [`Ring::take`] would give something.
    pub(crate) fn has_answers(&mut self) -> bool {
        !self.spilled.is_empty() || !self.ring.completion().is_empty()
    }

    /// Whether waiting can be limited in time (Linux 5.11).
    pub(crate) fn can_time_out(&self) -> bool {
        self.ring.params().is_feature_ext_arg()
    }

    /// Takes completions, and says how many. Fewer than `into` holds: there are no more.
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
        // The kernel takes a ring apart some time after it was closed. Registered files must not
        // stay open, and their locks not held, until then.
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

/// Sets a ring up with the best flags that this kernel knows.
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

/// Registers the slab, in pieces that the kernel takes. `false` when it does not (too much locked
/// memory, mostly).
fn register_buffers(ring: &IoUring, slab: &Slab) -> bool {
    let pieces: Vec<libc::iovec> = (0..slab.total_bytes())
        .step_by(BUFFER_PIECE_BYTES)
        .map(|start| libc::iovec {
            iov_base: slab.base().wrapping_add(start).cast(),
            iov_len: (slab.total_bytes() - start).min(BUFFER_PIECE_BYTES),
        })
        .collect();
    // SAFETY: the pieces lie within the slab's allocation. The caller keeps the slab while the ring
    // lives, and what the kernel does with a registered buffer it does on behalf of parts that were
    // started.
    unsafe { ring.submitter().register_buffers(&pieces) }.is_ok()
}
