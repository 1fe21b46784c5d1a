//! A connection, and the queues that share it.
//!
//! ```text
//!   queue ─ submit ─▶ slots, calls ─▶ outbound ─▶ socket
//!   queue ◀─ inbox ◀─ slots, calls ◀─ inbound ◀─ socket
//! ```
//!
//! A lane has no thread of its own: the thread that reaps drives it. Everything except waiting
//! happens under one mutex (`State`) and never blocks: send pending data, receive available data,
//! put completed slots into the inboxes. A queue that must wait releases the mutex and polls the
//! socket. Only one queue polls at a time (`State::polling`); the others wait on the condition
//! variable. A thread signals `wake` if the poller must look again: its answer was received by
//! another thread, or data is to be sent and the socket is full. If a lane has one queue, the mutex
//! is never contended.
//!
//! If the export is used as a store, an engine's ring polls the socket (`watch`) and calls
//! [`Lane::pump`] when it is ready. The slots of these requests carry loans and have no inbox.
//! Blocking callers may poll at the same time; the thread that wakes first transfers the data of
//! all.
//!
//! `link` handles broken connections.
//!
//! Invariants: a slot, with its buffer, stays in the table until its completion is in an inbox. A
//! call with unsent payload does not end.

mod link;

use super::{
    ClientError,
    inbound::{Inbound, ReplyContext},
    lost::Answered,
    negotiate::{self, ExportInfo},
    tables::{EndedSlot, Inbox, NO_INBOX, Slot, SlotWork, Tables},
    transport::Transport,
};
use crate::{
    uri::NbdUri,
    wire::{Command, CommandFlags, Framing, RequestHeader},
};
use diskwright_store::{Outbound, SlotMap, Socket};
use rustix::event::{EventfdFlags, eventfd};
use std::{
    io,
    os::fd::OwnedFd,
    sync::{
        Arc, Condvar, Mutex, MutexGuard,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};

/// Maximum number of calls of one slot in flight: enough to keep a server busy, and so few that
/// zeroing terabytes needs little memory.
const CALLS_OF_SLOT: u32 = 4;
/// Length of one call that writes zeros as payload.
const ZEROS_BYTES: u64 = 1 << 20;
/// Length of one call without payload: short enough to be answered within the timeout.
const RANGE_BYTES: u64 = 1 << 30;
/// Length of one block status call in compact framing: the largest multiple of 64 KiB below 2^32.
const STATUS_BYTES: u64 = 0xffff_0000;
/// Maximum payload of one call, even if the server allows more.
const PAYLOAD_MAX: u64 = 32 << 20;
#[derive(Debug)]
enum Link {
    Up(Transport),
    /// Broken some time ago; to be re-established.
    Down {
        since: Instant,
    },
    /// Broken permanently.
    Dead(ClientError),
}

#[derive(Debug)]
struct State {
    link: Link,
    tables: Tables,
    outbound: Outbound,
    inbound: Inbound,
    inboxes: SlotMap<Inbox>,
    /// A thread waits for the socket, or reconnects, without holding the mutex.
    polling: bool,
    /// Whether that thread also waits until the socket accepts more data.
    polls_for_sending: bool,
    last_moved: Instant,
    reconnects: u64,
}

/// What to wait for after [`Lane::pump`], besides data to receive.
#[derive(Debug, Clone, Copy)]
pub(super) struct PumpResult {
    /// Whether to wait until the socket accepts more data.
    pub(super) wants_to_send: bool,
    /// When the server's timeout expires, if it owes an answer.
    pub(super) silent_until: Option<Instant>,
}

/// One connection; see the module documentation.
#[derive(Debug)]
pub(super) struct Lane {
    uri: NbdUri,
    peer: String,
    export: ExportInfo,
    answered: Arc<Answered>,
    agreed: ReplyContext,
    state: Mutex<State>,
    changed: Condvar,
    wake: OwnedFd,
    queues: AtomicUsize,
}

impl Lane {
    /// A lane on a new connection.
    pub(super) fn new(
        uri: NbdUri,
        transport: Transport,
        export: ExportInfo,
        answered: Arc<Answered>,
    ) -> io::Result<Self> {
        let agreed = ReplyContext {
            framing: export.framing,
            allocation_context: export.allocation_context,
            depth_context: export.depth_context,
        };
        let state = State {
            link: Link::Up(transport),
            tables: Tables::default(),
            outbound: Outbound::default(),
            inbound: Inbound::new(),
            inboxes: SlotMap::default(),
            polling: false,
            polls_for_sending: false,
            last_moved: Instant::now(),
            reconnects: 0,
        };
        Ok(Self {
            peer: uri.endpoint.to_string(),
            uri,
            export,
            answered,
            agreed,
            state: Mutex::new(state),
            changed: Condvar::new(),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            queues: AtomicUsize::new(0),
        })
    }

    /// Ignores poisoning: after a panic in another thread, at worst a call is never answered.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Number of queues on this lane.
    pub(super) fn queues(&self) -> usize {
        self.queues.load(Ordering::Relaxed)
    }

    /// Whether the connection broke permanently.
    pub(super) fn is_dead(&self) -> bool {
        matches!(self.lock().link, Link::Dead(_))
    }

    /// How often the connection was re-established.
    pub(super) fn reconnects(&self) -> u64 {
        self.lock().reconnects
    }

    /// Opens the inbox of a new queue.
    pub(super) fn open_inbox(&self) -> u32 {
        self.queues.fetch_add(1, Ordering::Relaxed);
        self.lock().inboxes.insert(Inbox::default())
    }

    /// Closes the inbox of a queue that is dropped. Its slots in flight continue without it.
    pub(super) fn close_inbox(&self, inbox: u32) {
        self.lock().inboxes.remove(inbox);
        self.queues.fetch_sub(1, Ordering::Relaxed);
    }

    /// Starts new slots, waits until at least `at_least` slots of the inbox have ended (at most as
    /// many as are in flight), and appends all that have ended.
    pub(super) fn drive(&self, inbox: u32, new: impl Iterator<Item = Slot>, at_least: usize, out: &mut Vec<EndedSlot>) {
        let mut state = self.lock();
        for slot in new {
            self.add_slot(&mut state, slot);
        }
        let mut wanted = at_least;
        loop {
            self.turn(&mut state, inbox);
            let Some(mine) = state.inboxes.get_mut(inbox) else { return };
            mine.in_flight -= mine.ended.len();
            wanted = wanted.saturating_sub(mine.ended.len()).min(mine.in_flight);
            out.append(&mut mine.ended);
            // A caller that polls without waiting must reconnect too: no other thread may do it.
            let is_stuck = mine.in_flight > 0 && matches!(state.link, Link::Down { .. }) && !state.polling;
            if wanted == 0 && !is_stuck {
                return;
            }
            state = if state.polling {
                self.changed.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner())
            } else {
                state.polling = true;
                let mut state = self.wait(state);
                state.polling = false;
                self.changed.notify_all();
                state
            };
        }
    }

    /// Adds a slot with a loan. Nothing is sent before the next [`Lane::pump`].
    pub(super) fn take(&self, slot: Slot) {
        self.add_slot(&mut self.lock(), slot);
    }

    /// Transfers what can be transferred without waiting, for a caller that waits for the socket by
    /// other means. Fails everything if the server exceeded its timeout.
    pub(super) fn pump(&self) -> PumpResult {
        let mut state = self.lock();
        self.turn(&mut state, NO_INBOX);
        let timeout = self.timeout();
        if !state.tables.calls.is_empty() && timeout.is_some_and(|timeout| state.last_moved.elapsed() >= timeout) {
            self.stalled(&mut state);
        }
        let Link::Up(transport) = &state.link else { return PumpResult { wants_to_send: false, silent_until: None } };
        let wants_to_send = !state.outbound.is_empty() || transport.has_unsent();
        let waits = !state.tables.calls.is_empty();
        PumpResult { wants_to_send, silent_until: timeout.filter(|_| waits).map(|timeout| state.last_moved + timeout) }
    }

    /// The socket, if the connection is up.
    pub(super) fn socket(&self) -> Option<Arc<Socket>> {
        match &self.lock().link {
            Link::Up(transport) => Some(transport.socket()),
            Link::Down { .. } | Link::Dead(_) => None,
        }
    }

    fn add_slot(&self, state: &mut State, slot: Slot) {
        if let Some(inbox) = state.inboxes.get_mut(slot.inbox) {
            inbox.in_flight += 1;
        }
        if state.tables.calls.is_empty() {
            // No call was in flight, so the timeout starts now.
            state.last_moved = Instant::now();
        }
        let index = state.tables.slots.insert(slot);
        self.advance(state, index);
    }

    /// Transfers what can be transferred without waiting, and wakes the poller if necessary.
    fn turn(&self, state: &mut State, inbox: u32) {
        let moved = self.exchange(state);
        match moved {
            Ok(true) => state.last_moved = Instant::now(),
            Ok(false) => {}
            Err(error) => self.connection_broke(state, error),
        }
        if state.polling {
            let unsent = !state.outbound.is_empty() && !state.polls_for_sending;
            let others = state
                .inboxes
                .indices()
                .any(|other| other != inbox && state.inboxes.get(other).is_some_and(|inbox| !inbox.ended.is_empty()));
            if unsent || others {
                let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
            }
        }
    }

    fn exchange(&self, state: &mut State) -> Result<bool, ClientError> {
        let mut moved = false;
        loop {
            let State { link: Link::Up(transport), tables, outbound, inbound, .. } = state else { return Ok(moved) };
            moved |=
                send(outbound, transport, tables).map_err(|source| negotiate::lost(&self.peer, "sending", source))?;
            // Before answers are handled, which may have arrived already.
            for index in outbound.sent.drain(..) {
                if let Some(call) = tables.calls.get_mut(index) {
                    call.unsent = false;
                    // The server answered with an error before the payload was sent completely.
                    if call.generation == 0 {
                        inbound.answered.push(index);
                    }
                }
            }
            let received = inbound.receive(transport, tables, self.agreed, &self.peer);
            // Answers that arrived before a fault are valid.
            let ended = self.settle(state);
            moved |= received.map_err(|fault| self.fault(fault))?;
            // Ended calls may have started further calls.
            if !ended || state.outbound.is_empty() {
                return Ok(moved);
            }
        }
    }

    /// Ends the calls that were answered and completely sent. Returns whether there were any.
    fn settle(&self, state: &mut State) -> bool {
        let mut ended = false;
        while let Some(index) = state.inbound.answered.pop() {
            let Some(call) = state.tables.calls.get(index).filter(|call| !call.unsent) else { continue };
            if call.error.is_none() {
                self.answered.add(call.command, call.flags, call.covers);
            }
            if let Some(slot) = state.tables.end(index) {
                ended = true;
                self.advance(state, slot);
            }
        }
        ended
    }

    /// Starts the calls that a slot still needs, or ends the slot.
    fn advance(&self, state: &mut State, index: u32) {
        loop {
            let Some(slot) = state.tables.slots.get_mut(index) else { return };
            if let Link::Dead(error) = &state.link {
                slot.fail(error.clone());
            }
            let left_bytes = slot.end_bytes - slot.next_bytes;
            let stopped = slot.error.is_some() || left_bytes == 0;
            if stopped && slot.pending > 0 || !stopped && slot.pending == CALLS_OF_SLOT {
                return;
            }
            if stopped {
                if !slot.then_flush || slot.error.is_some() {
                    return self.end(state, index);
                }
                slot.then_flush = false;
                if self.answered.are_lost() {
                    slot.fail(self.lost_writes());
                    continue;
                }
                return self.begin(state, index, Command::FLUSH, CommandFlags::empty(), 0, 0);
            }
            let start_bytes = slot.next_bytes;
            let (command, flags, most_bytes) = match slot.work {
                SlotWork::Calls(command @ (Command::READ | Command::WRITE), flags) => {
                    (command, flags, self.payload_max().min(slot.memory.left_in_piece(slot.place(start_bytes))))
                }
                SlotWork::Calls(command, flags) => (command, flags, RANGE_BYTES),
                SlotWork::Zeros(flags) => (Command::WRITE, flags, ZEROS_BYTES.min(self.payload_max())),
                SlotWork::Status => (Command::BLOCK_STATUS, CommandFlags::empty(), left_bytes),
            };
            let len_bytes = left_bytes.min(most_bytes);
            slot.next_bytes += len_bytes;
            self.begin(state, index, command, flags, start_bytes, len_bytes);
        }
    }

    /// Maximum payload of a call, a multiple of the minimum block size.
    fn payload_max(&self) -> u64 {
        let sizes = self.export.block_sizes;
        let max = u64::from(sizes.maximum).min(PAYLOAD_MAX);
        (max - max % u64::from(sizes.minimum)).max(u64::from(sizes.minimum))
    }

    /// Maximum length of a block status call.
    pub(super) fn status_max(&self) -> u64 {
        if self.agreed.framing == Framing::Extended { u64::MAX } else { STATUS_BYTES }
    }

    fn begin(
        &self,
        state: &mut State,
        slot: u32,
        command: Command,
        flags: CommandFlags,
        offset_bytes: u64,
        len_bytes: u64,
    ) {
        let cookie = state.tables.begin(slot, command, flags, offset_bytes, len_bytes);
        if let Some(call) = state.tables.calls.get_mut(cookie as u32) {
            call.covers = self.answered.so_far();
        }
        self.send(state, cookie);
    }

    /// Queues a call's message for sending.
    fn send(&self, state: &mut State, cookie: u64) {
        let index = cookie as u32;
        let State { tables, outbound, .. } = state;
        let Some(call) = tables.calls.get_mut(index) else { return };
        let (flags, command, offset_bytes, len_bytes) = (call.flags, call.command, call.offset_bytes, call.len_bytes);
        let header = RequestHeader { flags, command, cookie, offset_bytes, len_bytes };
        outbound.header(|out| header.encode(self.agreed.framing, out));
        if command != Command::WRITE {
            return;
        }
        let Some(slot) = tables.slots.get(call.slot) else { return };
        if matches!(slot.work, SlotWork::Zeros(_)) {
            outbound.zeros(len_bytes as usize);
        } else {
            let start = slot.place(offset_bytes);
            call.unsent = true;
            outbound.payload(index, start, start + len_bytes as usize);
        }
    }

    fn end(&self, state: &mut State, index: u32) {
        let Some(slot) = state.tables.slots.remove(index) else { return };
        let number = slot.inbox;
        // The queue may have been dropped.
        if let Some(ended) = slot.ended()
            && let Some(inbox) = state.inboxes.get_mut(number)
        {
            inbox.ended.push(ended);
        }
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner());
        let State { link: Link::Up(transport), tables, outbound, .. } = state else { return };
        // A DISCONNECT cannot be sent in the middle of a message.
        if !outbound.is_empty() || !tables.calls.is_empty() {
            return;
        }
        let goodbye = RequestHeader {
            flags: CommandFlags::empty(),
            command: Command::DISCONNECT,
            cookie: 0,
            offset_bytes: 0,
            len_bytes: 0,
        };
        outbound.header(|out| goodbye.encode(self.agreed.framing, out));
        let _ = send(outbound, transport, tables);
        transport.close_tls();
    }
}

/// Sends what is queued until the socket accepts no more. Returns whether anything was sent.
fn send(outbound: &mut Outbound, transport: &mut Transport, tables: &Tables) -> io::Result<bool> {
    let payload = |call, range| {
        let slot = tables.calls.get(call).and_then(|call| tables.slots.get(call.slot));
        slot.and_then(|slot| slot.memory.get(range))
    };
    let moved = outbound.send(|slices| transport.send(slices), payload)?;
    match transport.flush() {
        Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
        _ => Ok(moved),
    }
}
