//! A part of a request: one transfer, zeroing or sync of one target. This module says which
//! mechanism can carry a part out, interprets the result, and carries parts out by blocking calls.
//!
//! ```text
//!   Part ──fits_ring──▶ ring::start ──CQE──▶ judge ─▶ Done | Again (the rest) | Block
//!     ├─ fits_lane ─▶ lane_op ─▶ the store's lane                                 │
//!     └───────────────────────────▶ run_blocking, here or in the pool ◀───────────┘
//! ```
//!
//! A store that is not plain (an overlay) shows other bytes in some ranges than its file or lane
//! holds. [`Part::cut_front`] splits its parts where that changes, and marks the pieces that only
//! the store itself can serve as detours.
//!
//! A part names memory by address because the kernel may be writing there: no reference to those
//! bytes may exist while the part is in flight. Invariant: the memory belongs to the part's slot
//! (its buffer, its segments, or bytes that the slot shares) or is static, and the slot keeps it
//! until the part has ended. The code that starts or runs a part vouches for that. Memory of
//! another process (`is_foreign`) is replaced by a copy before a reference to it could be made
//! (`engine/segments.rs`).

#![allow(unsafe_code)]

use crate::{
    buffer::{Loan, Span},
    direct::{cannot, end_of_file, read_upto, write_all},
    file::ZEROING_UNIT_BYTES,
    lane::LaneOp,
    placement::{CopyAt, Placed},
    store::{Access, DataFile, FileRange, Store, Zeroing},
};
use rustix::io::{Errno, ReadWriteFlags};
use std::{
    io,
    os::fd::{AsRawFd, RawFd},
    sync::Arc,
};

/// How often a part that the kernel answered with EAGAIN or EINTR is restarted before it is carried
/// out by a blocking call.
const RETRIES_MAX: u8 = 100;

/// A store as the engine sees it.
#[derive(Debug, Clone)]
pub(crate) struct Target {
    pub(crate) store: Arc<dyn Store>,
    /// The descriptor of the store's data file. The store keeps it open.
    pub(crate) fd: Option<RawFd>,
    /// Alignment of the data file, minus one.
    pub(crate) alignment_mask: u64,
    /// The store's index among the ring's registered files.
    pub(crate) file_index: Option<u32>,
    /// Whether reads beyond the end of the store return zeros.
    pub(crate) padded: bool,
    /// Whether one file holds everything that the store shows. Otherwise each part is examined.
    pub(crate) is_plain_file: bool,
    /// How to use the store's lane, if it has one and no file.
    pub(crate) lane: Option<LaneUse>,
    /// Whether the store's blocking methods never wait. Parts may then run where they are started.
    pub(crate) never_blocks: bool,
    /// For a store with a placement: the targets of its members, by their numbers.
    pub(crate) members: Option<Vec<Option<u32>>>,
}

/// How a target uses a lane.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LaneUse {
    /// Index of the lane in the engine.
    pub(crate) number: u32,
    /// Alignment of the lane's transfers, minus one.
    pub(crate) alignment_mask: u64,
    /// Length of the store when it was added. The lane does not serve padding beyond it.
    pub(crate) end_bytes: u64,
}

impl Target {
    pub(crate) fn new(store: &Arc<dyn Store>, padded: bool) -> Self {
        let file = store.data_file();
        Self {
            store: Arc::clone(store),
            fd: file.map(|file| file.fd.as_raw_fd()),
            alignment_mask: file.map_or(0, |file| u64::from(file.alignment_bytes.max(1)) - 1),
            file_index: None,
            padded,
            is_plain_file: file.is_some() && store.is_plain(),
            lane: None,
            never_blocks: store.never_blocks(),
            members: store.placement().map(|_| Vec::new()),
        }
    }
}

/// What a part does to the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    Read,
    Write {
        durable: bool,
    },
    /// A write that repeats a durable write without durability, after ENOSPC or EDQUOT. The error
    /// came either from the write itself or from the write-back of earlier writes, which the kernel
    /// reports only once. If the repeated write succeeds, the error was from write-back: earlier
    /// bytes were lost.
    WriteAgain,
    Zero(Zeroing),
    Sync,
}

/// A part of a request; see the module documentation.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part {
    pub(crate) slot: u32,
    pub(crate) target: u32,
    pub(crate) action: Action,
    /// Whether the memory belongs to the slab that is registered with the ring.
    pub(crate) registered: bool,
    /// Whether the memory is another process's, which may change it at any time. The ring may name
    /// it; all other code works on a copy.
    pub(crate) is_foreign: bool,
    pub(crate) route: Route,
    /// Which mechanism is carrying out the part.
    pub(crate) carrier: Carrier,
    pub(crate) delays: u8,
    pub(crate) file_offset_bytes: u64,
    /// Length of the range; for reads and writes also the length of the memory.
    pub(crate) len_bytes: u64,
    pub(crate) address: *mut u8,
    /// The store whose bytes a member holds for it, if the part is of a copy.
    pub(crate) copy_of: Option<CopyOf>,
}

/// What a part of a copy is a part of.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CopyOf {
    /// The target with the placement.
    pub(crate) target: u32,
    /// Number of the member that holds the copy.
    pub(crate) member: u8,
    /// See [`Placed::hold`](crate::Placed).
    pub(crate) hold: u64,
    /// What to add to the part's offset, wrapping, for its offset in the store with the placement.
    pub(crate) back_bytes: u64,
    /// Length of the read, if it must be compared when it has ended; otherwise 0.
    pub(crate) checked_bytes: u64,
}

impl CopyOf {
    /// For a copy of `part`, which was placed.
    #[inline]
    pub(crate) fn new(part: &Part, placed: &Placed, copy: CopyAt) -> Self {
        Self {
            target: part.target,
            member: copy.member,
            hold: placed.hold,
            back_bytes: part.file_offset_bytes.wrapping_sub(copy.offset_bytes),
            checked_bytes: if placed.is_checked { part.len_bytes } else { 0 },
        }
    }
}

/// How the bytes that the store shows in a part's range are reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Route {
    /// The store has not been asked yet.
    Unasked,
    /// Through the store's file or lane.
    Direct,
    /// Only through the store's own methods.
    Detour,
}

/// Which mechanism carries a part out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Carrier {
    /// The ring, or the engine's own thread.
    Own,
    /// The lane of its target.
    Lane,
    /// A thread of the pool.
    Pool,
}

/// What to do after a part's completion.
#[derive(Debug)]
pub(crate) enum Verdict {
    /// The part has ended.
    Done(io::Result<()>),
    /// Start the part again: it now describes the remaining range.
    Again,
    /// Carry out the remaining range by a blocking call.
    Block,
}

impl Part {
    pub(crate) fn new(
        slot: u32,
        target: u32,
        action: Action,
        file_offset_bytes: u64,
        memory: Span,
        registered: bool,
    ) -> Self {
        Self {
            slot,
            target,
            action,
            registered,
            is_foreign: false,
            route: Route::Unasked,
            carrier: Carrier::Own,
            delays: 0,
            file_offset_bytes,
            len_bytes: memory.len_bytes as u64,
            address: memory.address,
            copy_of: None,
        }
    }

    /// Whether the ring can carry out the part: there is a file, and the part meets the alignment
    /// of O_DIRECT.
    pub(crate) fn fits_ring(&self, target: &Target) -> bool {
        if !target.is_plain_file && (self.route != Route::Direct || target.fd.is_none()) {
            return false;
        }
        match self.action {
            Action::Read | Action::Write { .. } | Action::WriteAgain => {
                (self.file_offset_bytes | self.len_bytes | self.address as u64) & target.alignment_mask == 0
            }
            // The store can zero unaligned edges with O_DIRECT; the ring cannot.
            Action::Zero(_) => {
                target.alignment_mask == 0
                    || (self.file_offset_bytes | self.len_bytes).is_multiple_of(ZEROING_UNIT_BYTES)
            }
            Action::Sync => true,
        }
    }

    /// The lane of the target, if it can carry out the part.
    pub(crate) fn fits_lane(&self, target: &Target) -> Option<LaneUse> {
        let lane = target.lane.filter(|_| self.route != Route::Detour)?;
        let end_bytes = self.file_offset_bytes.checked_add(self.len_bytes)?;
        let fits = (self.file_offset_bytes | self.len_bytes) & lane.alignment_mask == 0
            && !(target.padded && end_bytes > lane.end_bytes);
        fits.then_some(lane)
    }

    /// The part as an operation of a lane.
    pub(crate) fn lane_op(&self) -> LaneOp {
        let (offset_bytes, len_bytes) = (self.file_offset_bytes, self.len_bytes);
        match self.action {
            Action::Read => LaneOp::Read { offset_bytes },
            Action::Write { durable } => LaneOp::Write { offset_bytes, durable },
            Action::WriteAgain => LaneOp::Write { offset_bytes, durable: false },
            Action::Zero(how) => LaneOp::Zero { offset_bytes, len_bytes, how },
            Action::Sync => LaneOp::Sync,
        }
    }

    /// Whether the part writes into its memory.
    pub(crate) fn fills(&self) -> bool {
        self.action == Action::Read
    }

    /// Whether the part reads or changes the store.
    pub(crate) fn access(&self) -> Access {
        match self.action {
            Action::Read => Access::Read,
            Action::Write { .. } | Action::WriteAgain | Action::Zero(_) | Action::Sync => Access::Write,
        }
    }

    /// Splits off the first bytes, which are all reached in the same way, and marks them with their
    /// route. `self` keeps the rest; its length is 0 if there is none.
    pub(crate) fn cut_front(&mut self, target: &Target) -> Self {
        // A sync has no range; the store's file is what is synced.
        if self.action == Action::Sync {
            return Self { route: Route::Direct, ..*self };
        }
        let range = FileRange { offset_bytes: self.file_offset_bytes, len_bytes: self.len_bytes };
        let front = target.store.front(range, self.access());
        let route = if front.is_direct { Route::Direct } else { Route::Detour };
        Self { route, ..self.cut(front.len_bytes) }
    }

    /// Splits off the first bytes, as many as `len_bytes` says, but at least one.
    pub(crate) fn cut(&mut self, len_bytes: u64) -> Self {
        let mut piece = *self;
        piece.len_bytes = len_bytes.clamp(1, self.len_bytes);
        self.file_offset_bytes += piece.len_bytes;
        self.len_bytes -= piece.len_bytes;
        if !matches!(self.action, Action::Zero(_)) {
            self.address = self.address.wrapping_add(piece.len_bytes as usize);
        }
        piece
    }

    /// The memory of a read or write; empty for other actions.
    pub(crate) fn memory(&self) -> Span {
        match self.action {
            Action::Read | Action::Write { .. } | Action::WriteAgain => self.rest(),
            Action::Zero(_) | Action::Sync => Span::EMPTY,
        }
    }

    fn advance(&mut self, moved_bytes: u64) {
        self.file_offset_bytes += moved_bytes;
        self.len_bytes -= moved_bytes;
        self.address = self.address.wrapping_add(moved_bytes as usize);
    }

    fn rest(&self) -> Span {
        Span { address: self.address, len_bytes: self.len_bytes as usize }
    }

    /// Interprets the kernel's answer: bytes moved, or a negative error number.
    ///
    /// # Safety
    /// The part's memory is alive, and the kernel no longer uses it.
    pub(crate) unsafe fn judge(&mut self, answer: i32, target: &Target) -> Verdict {
        if answer < 0 {
            return self.judge_error(Errno::from_raw_os_error(answer.saturating_neg()), target);
        }
        let moved_bytes = (answer as u64).min(self.len_bytes);
        match self.action {
            Action::Zero(_) | Action::Sync => Verdict::Done(Ok(())),
            _ if moved_bytes == self.len_bytes => Verdict::Done(Ok(())),
            Action::Read => {
                self.advance(moved_bytes);
                // A short O_DIRECT read that ends within a block has reached the end of the file.
                if moved_bytes > 0 && self.file_offset_bytes & target.alignment_mask == 0 {
                    return Verdict::Again;
                }
                if !target.padded {
                    return Verdict::Done(Err(end_of_file()));
                }
                // SAFETY: as promised by the caller.
                unsafe { self.rest().fill_zeros() };
                Verdict::Done(Ok(()))
            }
            Action::Write { .. } | Action::WriteAgain if moved_bytes == 0 => {
                Verdict::Done(Err(io::ErrorKind::WriteZero.into()))
            }
            Action::Write { .. } | Action::WriteAgain => {
                self.advance(moved_bytes);
                Verdict::Again
            }
        }
    }

    fn judge_error(&mut self, errno: Errno, target: &Target) -> Verdict {
        match (errno, self.action) {
            (Errno::INTR | Errno::AGAIN, _) => {
                self.delays += 1;
                if self.delays < RETRIES_MAX { Verdict::Again } else { Verdict::Block }
            }
            (_, Action::Zero(_)) if cannot(errno) => Verdict::Block,
            // The file system does not support RWF_DSYNC.
            (Errno::OPNOTSUPP, Action::Write { durable: true }) => Verdict::Block,
            (Errno::NOSPC | Errno::DQUOT, Action::Write { durable: true }) => {
                self.action = Action::WriteAgain;
                Verdict::Again
            }
            // The file system requires more of O_DIRECT than it reported.
            (Errno::INVAL, Action::Read | Action::Write { .. } | Action::WriteAgain) if target.alignment_mask != 0 => {
                Verdict::Block
            }
            _ => Verdict::Done(Err(errno.into())),
        }
    }

    /// Reports the end of a sync to the store, since a failed sync may have lost earlier writes.
    #[inline]
    pub(crate) fn settle(&self, result: io::Result<()>, target: &Target) -> io::Result<()> {
        match (self.action, &result) {
            (Action::Sync, _) => target.store.settle_sync(result),
            (Action::WriteAgain, Ok(())) => target.store.settle_sync(Err(Errno::NOSPC.into())),
            (Action::Write { durable: true }, Err(error)) if error.raw_os_error() == Some(Errno::IO.raw_os_error()) => {
                target.store.settle_sync(result)
            }
            _ => result,
        }
    }

    /// Carries out the part in the calling thread.
    ///
    /// # Safety
    /// The part's memory is alive, and writable for a read. No reference to it exists, and the
    /// kernel does not use it.
    pub(crate) unsafe fn run_blocking(&self, target: &Target) -> io::Result<()> {
        let memory = self.memory();
        if memory.len_bytes == 0 {
            return self.run_without_memory(target);
        }
        if self.fills() {
            // SAFETY: as promised by the caller. Buffers are initialised when they are allocated.
            self.fill(target, unsafe { std::slice::from_raw_parts_mut(memory.address, memory.len_bytes) })
        } else {
            // SAFETY: as promised by the caller. Buffers are initialised when they are allocated.
            self.store(target, unsafe { std::slice::from_raw_parts(memory.address, memory.len_bytes) })
        }
    }

    /// Carries out the part in the calling thread, on memory that was lent for it.
    pub(crate) fn run_with(&self, target: &Target, loan: &mut Loan) -> io::Result<()> {
        if loan.is_empty() {
            self.run_without_memory(target)
        } else if self.fills() {
            self.fill(target, loan.bytes_mut())
        } else {
            self.store(target, loan.bytes())
        }
    }

    fn blocking_file<'a>(&self, target: &'a Target) -> Option<DataFile<'a>> {
        if self.fits_ring(target) { target.store.data_file() } else { None }
    }

    fn fill(&self, target: &Target, bytes: &mut [u8]) -> io::Result<()> {
        read_blocking(target, self.blocking_file(target), bytes, self.file_offset_bytes)
    }

    fn store(&self, target: &Target, bytes: &[u8]) -> io::Result<()> {
        let durable = self.action == Action::Write { durable: true };
        let written = write_blocking(target, self.blocking_file(target), bytes, self.file_offset_bytes, durable);
        match self.action {
            Action::WriteAgain => self.settle(written, target),
            _ => written,
        }
    }

    fn run_without_memory(&self, target: &Target) -> io::Result<()> {
        let range = FileRange { offset_bytes: self.file_offset_bytes, len_bytes: self.len_bytes };
        match self.action {
            Action::Zero(how) => target.store.zero_range(range, how),
            Action::Sync => target.store.sync_data(),
            Action::Read | Action::Write { .. } | Action::WriteAgain => Ok(()),
        }
    }
}

// SAFETY: a part only describes work. Code that accesses the memory it names vouches for that
// itself.
unsafe impl Send for Part {}

fn read_blocking(target: &Target, file: Option<DataFile<'_>>, bytes: &mut [u8], offset_bytes: u64) -> io::Result<()> {
    let held_bytes = match file {
        Some(file) => read_upto(file.fd, bytes, offset_bytes)?,
        None if !target.padded => return target.store.read_at(bytes, offset_bytes),
        None => {
            let left_bytes = target.store.len_bytes()?.saturating_sub(offset_bytes);
            let held_bytes = left_bytes.min(bytes.len() as u64) as usize;
            target.store.read_at(&mut bytes[..held_bytes], offset_bytes)?;
            held_bytes
        }
    };
    if held_bytes < bytes.len() && !target.padded {
        return Err(end_of_file());
    }
    bytes[held_bytes..].fill(0);
    Ok(())
}

fn write_blocking(
    target: &Target,
    file: Option<DataFile<'_>>,
    bytes: &[u8],
    offset_bytes: u64,
    durable: bool,
) -> io::Result<()> {
    match file {
        Some(file) if durable => {
            let slices = [io::IoSlice::new(bytes)];
            match rustix::io::pwritev2(file.fd, &slices, offset_bytes, ReadWriteFlags::DSYNC) {
                Ok(moved_bytes) if moved_bytes == bytes.len() => return Ok(()),
                // Short write, or the kernel or file system does not support it: write and sync
                // separately.
                Ok(_) | Err(Errno::INVAL | Errno::OPNOTSUPP | Errno::NOSYS | Errno::INTR | Errno::AGAIN) => {
                    target.store.write_at(bytes, offset_bytes)?;
                }
                // EIO may come from the write-back of an earlier write. The kernel reports that
                // only once, so a retry could succeed although data is lost.
                Err(Errno::IO) => return target.store.settle_sync(Err(Errno::IO.into())),
                // See `Action::WriteAgain`.
                Err(errno @ (Errno::NOSPC | Errno::DQUOT)) => {
                    write_all(file.fd, bytes, offset_bytes)?;
                    return target.store.settle_sync(Err(errno.into()));
                }
                Err(errno) => return Err(errno.into()),
            }
        }
        Some(file) => write_all(file.fd, bytes, offset_bytes)?,
        None => target.store.write_at(bytes, offset_bytes)?,
    }
    if durable { target.store.sync_data() } else { Ok(()) }
}

#[cfg(test)]
mod tests;
