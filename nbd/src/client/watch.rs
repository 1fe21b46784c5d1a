//! A connection as a lane of a store: an engine's ring polls it, without a thread.
//!
//! ```text
//!   epoll ◀─ socket: data to receive; while data is unsent, room to send
//!         ◀─ timer: the timeout of the URI has expired
//! ```
//!
//! The ring polls the epoll descriptor. It is readable while the socket has data, so several
//! engines may be woken for one answer; each then drives the lane.
//!
//! The timer is set when a call is in flight and it is not running. When it expires, the lane
//! reports how long the server has sent nothing, and the timer is set for the rest. A busy
//! connection so costs one timer call for each `timeout`, not for each request.
//!
//! One mutex guards `Waiting`. The lane's own mutex is taken while it is held; no code waits while
//! it is held.

use super::{
    lane::{Lane, PumpResult},
    tables::{Memory, NO_INBOX, Slot, SlotWork},
};
use crate::wire::{Command, CommandFlags, TransmissionFlags};
use diskwright_store::{LaneOp, Loan, Zeroing};
use nix::sys::{
    time::TimeSpec,
    timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags},
};
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

#[derive(Debug, Default)]
struct Waiting {
    /// Whether the epoll also waits for room to send.
    for_sending: bool,
    /// When the timer expires.
    timer: Option<Instant>,
}

/// The lane of an [`NbdStore`](super::NbdStore); see the module documentation.
#[derive(Debug)]
pub(super) struct Watch {
    lane: Arc<Lane>,
    flags: TransmissionFlags,
    alignment_bytes: u32,
    size_bytes: u64,
    epoll: OwnedFd,
    timer: TimerFd,
    waiting: Mutex<Waiting>,
}

impl Watch {
    /// Watches a connection that is up.
    pub(super) fn new(
        lane: Arc<Lane>,
        flags: TransmissionFlags,
        alignment_bytes: u32,
        size_bytes: u64,
    ) -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let timer = TimerFd::new(ClockId::CLOCK_MONOTONIC, TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK)?;
        let socket = lane.socket().ok_or(io::ErrorKind::NotConnected)?;
        epoll::add(&epoll, &*socket, EventData::new_u64(0), EventFlags::IN)?;
        epoll::add(&epoll, &timer, EventData::new_u64(1), EventFlags::IN)?;
        Ok(Self { lane, flags, alignment_bytes, size_bytes, epoll, timer, waiting: Mutex::default() })
    }

    pub(super) fn lane(&self) -> &Lane {
        &self.lane
    }

    /// Converts an operation on `len_bytes` bytes to the commands of the protocol.
    pub(super) fn slot(&self, inbox: u32, op: LaneOp, len_bytes: u64, memory: Memory) -> Slot {
        let can = |flag| self.flags.contains(flag);
        let fua = |durable| {
            if durable && can(TransmissionFlags::SEND_FUA) { CommandFlags::FUA } else { CommandFlags::empty() }
        };
        let (work, start_bytes, len_bytes, flushes) = match op {
            LaneOp::Read { offset_bytes } => {
                (SlotWork::Calls(Command::READ, CommandFlags::empty()), offset_bytes, len_bytes, false)
            }
            LaneOp::Write { offset_bytes, durable } => {
                let fua = fua(durable);
                (SlotWork::Calls(Command::WRITE, fua), offset_bytes, len_bytes, durable && fua.is_empty())
            }
            LaneOp::Zero { offset_bytes, len_bytes, how } => {
                let work = match how {
                    _ if !can(TransmissionFlags::SEND_WRITE_ZEROES) => SlotWork::Zeros(CommandFlags::empty()),
                    Zeroing::Keep => SlotWork::Calls(Command::WRITE_ZEROES, CommandFlags::NO_HOLE),
                    // Not TRIM, after which reads may return anything.
                    Zeroing::Deallocate => SlotWork::Calls(Command::WRITE_ZEROES, CommandFlags::empty()),
                };
                (work, offset_bytes, len_bytes, false)
            }
            // A slot with an empty range, which only flushes.
            LaneOp::Sync => (SlotWork::Calls(Command::FLUSH, CommandFlags::empty()), 0, 0, true),
        };
        let mut slot = Slot::new(inbox, work, start_bytes, start_bytes + len_bytes, memory);
        // A server without FUA and flush has no volatile cache.
        slot.then_flush = flushes && can(TransmissionFlags::SEND_FLUSH);
        slot
    }

    /// Refuses a range beyond the export's end or beyond 64 bits.
    pub(super) fn check(&self, op: LaneOp, len_bytes: u64) -> io::Result<()> {
        let (offset_bytes, len_bytes, reads) = match op {
            LaneOp::Read { offset_bytes } => (offset_bytes, len_bytes, true),
            LaneOp::Write { offset_bytes, .. } => (offset_bytes, len_bytes, false),
            LaneOp::Zero { offset_bytes, len_bytes, .. } => (offset_bytes, len_bytes, false),
            LaneOp::Sync => return Ok(()),
        };
        if offset_bytes.checked_add(len_bytes).is_some_and(|end_bytes| end_bytes <= self.size_bytes) {
            return Ok(());
        }
        if reads {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "the export ends before the end of the range to read",
            ));
        }
        Err(too_small(self.size_bytes, offset_bytes.saturating_add(len_bytes)))
    }

    /// Transfers what can be transferred without waiting, and updates epoll and timer for what
    /// comes next.
    pub(super) fn progress(&self) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if waiting.timer.is_some_and(|until| now >= until) {
            // Stops the timer until it is set again. An error means that it has not expired quite
            // yet.
            let _ = self.timer.unset();
            waiting.timer = None;
        }
        let PumpResult { wants_to_send, silent_until } = self.lane.pump();
        if let (Some(until), None) = (silent_until, waiting.timer) {
            let left = until.saturating_duration_since(now).max(Duration::from_millis(1));
            let once = Expiration::OneShot(TimeSpec::from_duration(left));
            if self.timer.set(once, TimerSetTimeFlags::empty()).is_ok() {
                waiting.timer = Some(now + left);
            }
        }
        if wants_to_send != waiting.for_sending
            && let Some(socket) = self.lane.socket()
        {
            let events = if wants_to_send { EventFlags::IN | EventFlags::OUT } else { EventFlags::IN };
            if epoll::modify(&self.epoll, &*socket, EventData::new_u64(0), events).is_ok() {
                waiting.for_sending = wants_to_send;
            }
        }
    }
}

/// The error of a write beyond the end of the export.
pub(super) fn too_small(size_bytes: u64, end_bytes: u64) -> io::Error {
    let what =
        format!("the export has a fixed size of {size_bytes} bytes, {end_bytes} are needed; enlarge it on the server");
    io::Error::new(io::ErrorKind::StorageFull, what)
}

impl diskwright_store::Lane for Watch {
    fn start(&self, op: LaneOp, loan: Loan) {
        let len_bytes = loan.len() as u64;
        match self.check(op, len_bytes) {
            Ok(()) => self.lane.take(self.slot(NO_INBOX, op, len_bytes, Memory::Loan(loan))),
            Err(error) => loan.complete(Err(error)),
        }
    }

    fn drive(&self) {
        self.progress();
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    fn alignment_bytes(&self) -> u32 {
        self.alignment_bytes
    }
}
