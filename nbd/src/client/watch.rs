//! A connection as a lane of a store: an engine's ring waits for it, and no thread does.
//!
//! ```text
//!   epoll ◀─ socket: something to receive; while something is unsent, room to send
//!         ◀─ timer: the server has been silent for as long as the URI allows
//! ```
//!
//! The epoll descriptor is what the ring polls. It is readable while the socket has something, so
//! whoever is woken drives, and several engines may be woken for one answer.
//!
//! The timer is set when something is asked for and none is running. When it goes off, the lane is
//! asked how long the server has been silent by then, and the timer is set for the rest. So a busy
//! connection costs one timer call for each `timeout`, not for each request.
//!
//! One mutex guards what is being waited for. It is held over the lane's own mutex, and over no
//! wait.

use super::{
    lane::{Lane, Pumped},
    tables::{Memory, NO_INBOX, Slot, Work},
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
    /// The epoll also waits for room to send.
    for_sending: bool,
    /// When the timer goes off.
    timer: Option<Instant>,
}

/// See the module.
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
    /// A watch over a connection that is up.
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

    /// How the protocol says an operation on `start_bytes..start_bytes + len_bytes`.
    pub(super) fn slot(&self, inbox: u32, op: LaneOp, len_bytes: u64, memory: Memory) -> Slot {
        let can = |flag| self.flags.contains(flag);
        let fua = |durable| {
            if durable && can(TransmissionFlags::SEND_FUA) { CommandFlags::FUA } else { CommandFlags::empty() }
        };
        let (work, start_bytes, len_bytes, flushes) = match op {
            LaneOp::Read { offset_bytes } => {
                (Work::Calls(Command::READ, CommandFlags::empty()), offset_bytes, len_bytes, false)
            }
            LaneOp::Write { offset_bytes, durable } => {
                let fua = fua(durable);
                (Work::Calls(Command::WRITE, fua), offset_bytes, len_bytes, durable && fua.is_empty())
            }
            LaneOp::Zero { offset_bytes, len_bytes, how } => {
                let work = match how {
                    _ if !can(TransmissionFlags::SEND_WRITE_ZEROES) => Work::Zeros(CommandFlags::empty()),
                    Zeroing::Keep => Work::Calls(Command::WRITE_ZEROES, CommandFlags::NO_HOLE),
                    // Not TRIM, after which anything may be read.
                    Zeroing::Deallocate => Work::Calls(Command::WRITE_ZEROES, CommandFlags::empty()),
                };
                (work, offset_bytes, len_bytes, false)
            }
            // A slot of no range, which only flushes.
            LaneOp::Sync => (Work::Calls(Command::FLUSH, CommandFlags::empty()), 0, 0, true),
        };
        let mut slot = Slot::new(inbox, work, start_bytes, start_bytes + len_bytes, memory);
        // A server that knows neither FUA nor flush has nothing to lose.
        slot.then_flush = flushes && can(TransmissionFlags::SEND_FLUSH);
        slot
    }

    /// Refuses a range behind the export's end, and one beyond all offsets.
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
                "the export ends before the range that was to be read",
            ));
        }
        Err(too_small(self.size_bytes, offset_bytes.saturating_add(len_bytes)))
    }

    /// Moves what can be moved, and sees to it that the descriptor tells of what comes next.
    pub(super) fn go_on(&self) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if waiting.timer.is_some_and(|until| now >= until) {
            // Silent until it is set again. An error says that it has not gone off quite yet.
            let _ = self.timer.unset();
            waiting.timer = None;
        }
        let Pumped { wants_to_send, silent_until } = self.lane.pump();
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

/// What is to be written does not fit.
pub(super) fn too_small(size_bytes: u64, end_bytes: u64) -> io::Error {
    let what = format!(
        "the export has {size_bytes} bytes and keeps its size, {end_bytes} are needed; give the server a larger file for it"
    );
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
        self.go_on();
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    fn alignment_bytes(&self) -> u32 {
        self.alignment_bytes
    }
}
