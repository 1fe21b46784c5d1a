//! A connection, and the queues that share it.
//!
//! ```text
//!   queue ─ submit ─▶ slots, calls ─▶ outbound ─▶ socket
//!   queue ◀─ inbox ◀─ slots, calls ◀─ inbound ◀─ socket
//! ```
//!
//! There is no thread behind a lane: whoever reaps drives it. Everything but waiting happens under one mutex (`State`) and never blocks: send
//! what there is, receive what there is, put what has ended into the inboxes. To wait, a queue that misses something lets go of the mutex and polls
//! the socket; there is one who polls at a time (`State::polling`), all others wait on the condition variable. Whoever makes the poller's wait
//! pointless (its answer has come through another's receive, or something is to be sent and the socket is full) rings `wake`. A lane
//! with one queue never meets anyone on the mutex.
//!
//! When the connection breaks, all that is in flight fails, or, where the URI says `reconnect`, stays; whoever would have polled makes the connection
//! anew, with pauses from a tenth of a second to five, and every call that has no answer is sent again. That is safe, as all commands
//! of NBD can be repeated. It gives no more than a disk gives: what was answered and not flushed may be lost if the server
//! itself went down, and not only the network.
//!
//! Invariant: a slot is in the table until its completion is in an inbox, and its buffer in the slot as long; a call that has unsent payload does
//! not end.

use super::{
    ClientError,
    coverage::Coverage,
    inbound::{Agreed, Fault, Inbound},
    negotiate::{self, ExportInfo},
    outbound::Outbound,
    tables::{Ended, Inbox, Slot, Table, Tables, Work},
    transport::Transport,
};
use crate::{
    uri::NbdUri,
    wire::{Command, CommandFlags, Framing, RequestHeader},
};
use rustix::event::{EventfdFlags, eventfd};
use std::{
    os::fd::{AsFd, OwnedFd},
    sync::{
        Condvar, Mutex, MutexGuard,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// Calls of one slot that are under way at a time: enough to keep a server busy, and few enough that a wipe of terabytes needs no memory.
const CALLS_OF_SLOT: u32 = 4;
/// Zeros of one call, where they must be written.
const ZEROS_BYTES: u64 = 1 << 20;
/// Range of one call without payload: it should end within the patience for one answer.
const RANGE_BYTES: u64 = 1 << 30;
/// Range of one block status in compact framing: a multiple of every block size below 2^32.
const STATUS_BYTES: u64 = 0xffff_0000;
/// Payload of one call at most, even where the server allows more.
const PAYLOAD_MAX: u64 = 32 << 20;
/// Pauses between tries to reconnect.
const PAUSE_FIRST: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(5);

#[derive(Debug)]
enum Link {
    Up(Transport),
    /// Broken a while ago; to be made anew.
    Down {
        since: Instant,
    },
    /// Broken for good.
    Dead(ClientError),
}

#[derive(Debug)]
struct State {
    link: Link,
    tables: Tables,
    outbound: Outbound,
    inbound: Inbound,
    inboxes: Table<Inbox>,
    /// Somebody waits for the socket, or reconnects, without the mutex.
    polling: bool,
    /// What the poller waits for includes that the socket takes more.
    polls_for_sending: bool,
    last_moved: Instant,
    reconnects: u64,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Lane {
    uri: NbdUri,
    peer: String,
    export: ExportInfo,
    agreed: Agreed,
    state: Mutex<State>,
    changed: Condvar,
    wake: OwnedFd,
    queues: AtomicUsize,
}

impl Lane {
    /// A lane on a connection that has just been made.
    pub(super) fn new(uri: NbdUri, transport: Transport, export: ExportInfo) -> std::io::Result<Self> {
        let agreed = Agreed {
            framing: export.framing,
            allocation_context: export.allocation_context,
            depth_context: export.depth_context,
        };
        let state = State {
            link: Link::Up(transport),
            tables: Tables::default(),
            outbound: Outbound::default(),
            inbound: Inbound::new(),
            inboxes: Table::default(),
            polling: false,
            polls_for_sending: false,
            last_moved: Instant::now(),
            reconnects: 0,
        };
        Ok(Self {
            peer: uri.endpoint.to_string(),
            uri,
            export,
            agreed,
            state: Mutex::new(state),
            changed: Condvar::new(),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            queues: AtomicUsize::new(0),
        })
    }

    /// A panic elsewhere leaves at worst a call without an answer, so poisoning is passed over.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Queues on this lane.
    pub(super) fn queues(&self) -> usize {
        self.queues.load(Ordering::Relaxed)
    }

    /// Whether the connection broke for good.
    pub(super) fn is_dead(&self) -> bool {
        matches!(self.lock().link, Link::Dead(_))
    }

    /// How often the connection was made anew.
    pub(super) fn reconnects(&self) -> u64 {
        self.lock().reconnects
    }

    /// A new queue's inbox.
    pub(super) fn open_inbox(&self) -> u32 {
        self.queues.fetch_add(1, Ordering::Relaxed);
        self.lock().inboxes.insert(Inbox::default())
    }

    /// A queue is gone. What it has in flight goes on without it.
    pub(super) fn close_inbox(&self, inbox: u32) {
        self.lock().inboxes.remove(inbox);
        self.queues.fetch_sub(1, Ordering::Relaxed);
    }

    /// Takes slots in, starts them, waits until `at_least` of the inbox have ended (never more than are in flight), and appends all that have.
    pub(super) fn drive(&self, inbox: u32, new: impl Iterator<Item = Slot>, at_least: usize, out: &mut Vec<Ended>) {
        let mut state = self.lock();
        for slot in new {
            self.take_in(&mut state, slot);
        }
        let mut wanted = at_least;
        loop {
            self.turn(&mut state, inbox);
            let Some(mine) = state.inboxes.get_mut(inbox) else { return };
            mine.in_flight -= mine.ended.len();
            wanted = wanted.saturating_sub(mine.ended.len()).min(mine.in_flight);
            out.append(&mut mine.ended);
            // Somebody who never waits, but looks again and again, is the only one to bring a lost server back.
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

    fn take_in(&self, state: &mut State, slot: Slot) {
        if let Some(inbox) = state.inboxes.get_mut(slot.inbox) {
            inbox.in_flight += 1;
        }
        if state.tables.calls.len() == 0 {
            // Nothing was asked for until now, so nobody can complain of silence.
            state.last_moved = Instant::now();
        }
        let index = state.tables.slots.insert(slot);
        self.advance(state, index);
    }

    /// Moves what can be moved without waiting.
    fn turn(&self, state: &mut State, inbox: u32) {
        let moved = self.exchange(state);
        match moved {
            Ok(true) => state.last_moved = Instant::now(),
            Ok(false) => {}
            Err(error) => self.broke(state, error),
        }
        if state.polling {
            let unsent = !state.outbound.is_empty() && !state.polls_for_sending;
            let others =
                state.inboxes.indices().into_iter().any(|other| {
                    other != inbox && state.inboxes.get(other).is_some_and(|inbox| !inbox.ended.is_empty())
                });
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
                outbound.send(transport, tables).map_err(|source| negotiate::lost(&self.peer, "sending", source))?;
            // First of all: the answers may be there already.
            for index in outbound.sent.drain(..) {
                if let Some(call) = tables.calls.get_mut(index) {
                    call.unsent = false;
                    // It was answered, with an error, before it was sent.
                    if call.generation == 0 {
                        inbound.answered.push(index);
                    }
                }
            }
            let received = inbound.receive(transport, tables, self.agreed, &self.peer);
            // What came before a fault is good.
            let ended = self.settle(state);
            moved |= received.map_err(|fault| self.fault(fault))?;
            // Calls that have ended may have let others begin.
            if !ended || state.outbound.is_empty() {
                return Ok(moved);
            }
        }
    }

    /// Ends the calls that have been answered and sent. Gives whether any did.
    fn settle(&self, state: &mut State) -> bool {
        let mut ended = false;
        while let Some(index) = state.inbound.answered.pop() {
            if state.tables.calls.get(index).is_some_and(|call| call.unsent) {
                continue;
            }
            if let Some(slot) = state.tables.end(index) {
                ended = true;
                self.advance(state, slot);
            }
        }
        ended
    }

    /// Begins what a slot still needs, or ends it.
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
                self.begin(state, index, Command::FLUSH, CommandFlags::empty(), 0, 0);
                return;
            }
            let start_bytes = slot.next_bytes;
            let (command, flags, most_bytes) = match slot.work {
                Work::Calls(command @ (Command::READ | Command::WRITE), flags) => (command, flags, self.payload_max()),
                Work::Calls(command, flags) => (command, flags, RANGE_BYTES),
                Work::Zeros(flags) => (Command::WRITE, flags, ZEROS_BYTES.min(self.payload_max())),
                Work::Status => (Command::BLOCK_STATUS, CommandFlags::empty(), left_bytes),
            };
            let len_bytes = left_bytes.min(most_bytes);
            slot.next_bytes += len_bytes;
            self.begin(state, index, command, flags, start_bytes, len_bytes);
        }
    }

    /// Longest payload, a multiple of the smallest block.
    fn payload_max(&self) -> u64 {
        let sizes = self.export.block_sizes;
        let max = u64::from(sizes.maximum).min(PAYLOAD_MAX);
        (max - max % u64::from(sizes.minimum)).max(u64::from(sizes.minimum))
    }

    /// Longest range of a block status.
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
        self.send(state, cookie);
    }

    /// Puts a call's message into the queue to be sent.
    fn send(&self, state: &mut State, cookie: u64) {
        let index = cookie as u32;
        let State { tables, outbound, .. } = state;
        let Some(call) = tables.calls.get_mut(index) else { return };
        let (flags, command, offset_bytes, len_bytes) = (call.flags, call.command, call.offset_bytes, call.len_bytes);
        outbound.header(&RequestHeader { flags, command, cookie, offset_bytes, len_bytes }, self.agreed.framing);
        if command != Command::WRITE {
            return;
        }
        let Some(slot) = tables.slots.get(call.slot) else { return };
        if matches!(slot.work, Work::Zeros(_)) {
            outbound.zeros(len_bytes as usize);
        } else {
            let start = slot.place(offset_bytes);
            call.unsent = true;
            outbound.payload(index, start, start + len_bytes as usize);
        }
    }

    fn end(&self, state: &mut State, index: u32) {
        let Some(slot) = state.tables.slots.remove(index) else { return };
        // The queue may be gone.
        if let Some(inbox) = state.inboxes.get_mut(slot.inbox) {
            inbox.ended.push(slot.ended());
        }
    }

    fn fault(&self, fault: Fault) -> ClientError {
        let (peer, doing) = (self.peer.clone(), "waiting for answers".to_owned());
        match fault {
            Fault::Io(source) => negotiate::lost(&peer, &doing, source),
            Fault::Wire(source) => ClientError::Wire { peer, doing, source },
            Fault::Protocol(what) => ClientError::Protocol { peer, what },
        }
    }

    /// The connection is of no use any more.
    fn broke(&self, state: &mut State, error: ClientError) {
        match self.uri.reconnect {
            Some(limit) if !limit.is_zero() && error.is_transient() => {
                state.link = Link::Down { since: Instant::now() };
            }
            _ => self.die(state, error),
        }
    }

    /// Everything in flight fails with `error`, and everything to come.
    fn die(&self, state: &mut State, error: ClientError) {
        state.link = Link::Dead(error.clone());
        state.outbound.clear();
        state.inbound.clear();
        for index in state.tables.calls.indices() {
            state.tables.end(index);
        }
        for index in state.tables.slots.indices() {
            if let Some(slot) = state.tables.slots.get_mut(index) {
                slot.fail(error.clone());
            }
            self.end(state, index);
        }
    }

    /// Waits without the mutex: for the socket, or for a server to come back.
    fn wait<'a>(&'a self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        let transport = match &state.link {
            Link::Up(transport) => transport,
            Link::Down { since } => {
                let since = *since;
                return self.reconnect(state, since);
            }
            Link::Dead(_) => return state,
        };
        let for_sending = !state.outbound.is_empty() || transport.has_unsent();
        let socket = transport.socket();
        let timeout = self.uri.timeout.unwrap_or(NbdUri::TIMEOUT_DEFAULT);
        let limit = (!timeout.is_zero()).then(|| timeout.saturating_sub(state.last_moved.elapsed()));
        state.polls_for_sending = for_sending;
        drop(state);
        let came = socket.wait(Some(self.wake.as_fd()), for_sending, limit);
        let mut state = self.lock();
        match came {
            Ok(true) => {}
            Ok(false) if state.last_moved.elapsed() < timeout => {}
            Ok(false) => {
                let (peer, seconds) = (self.peer.clone(), timeout.as_secs_f64());
                let count = state.tables.calls.len();
                let requests = if count == 1 { "1 request was".to_owned() } else { format!("{count} requests were") };
                let doing = format!("{requests} waiting for an answer");
                self.broke(&mut state, ClientError::Stalled { peer, doing, seconds });
            }
            Err(source) => self.broke(&mut state, negotiate::lost(&self.peer, "waiting for answers", source)),
        }
        state
    }

    /// Makes the connection anew and sends everything again that has no answer.
    fn reconnect<'a>(&'a self, state: MutexGuard<'a, State>, since: Instant) -> MutexGuard<'a, State> {
        drop(state);
        let limit = self.uri.reconnect.unwrap_or_default();
        let mut pause = PAUSE_FIRST;
        let found = loop {
            match negotiate::connect(&self.uri) {
                Ok((transport, found)) => break self.same(&found).map(|()| transport),
                Err(error) if !error.is_transient() => break Err(error),
                Err(error) if since.elapsed() + pause > limit => {
                    let (peer, seconds) = (self.peer.clone(), limit.as_secs_f64());
                    break Err(ClientError::GaveUp { peer, seconds, last: Box::new(error) });
                }
                Err(_) => {
                    thread::sleep(pause);
                    pause = (pause * 2).min(PAUSE_MAX);
                }
            }
        };
        let mut state = self.lock();
        match found {
            Err(error) => self.die(&mut state, error),
            Ok(transport) => {
                state.link = Link::Up(transport);
                state.last_moved = Instant::now();
                state.reconnects += 1;
                self.send_again(&mut state);
            }
        }
        state
    }

    fn send_again(&self, state: &mut State) {
        state.outbound.clear();
        state.inbound.clear();
        for index in state.tables.calls.indices() {
            let Some(call) = state.tables.calls.get_mut(index) else { continue };
            (call.unsent, call.error, call.coverage) = (false, None, Coverage::default());
            if let Some(slot) = state.tables.slots.get_mut(call.slot) {
                slot.status = Default::default();
            }
            if let Some(cookie) = state.tables.renew(index) {
                self.send(state, cookie);
            }
        }
    }

    /// Whether another connection leads to the same export.
    ///
    /// # Errors
    /// [`ClientError::Changed`].
    pub(super) fn same(&self, found: &ExportInfo) -> Result<(), ClientError> {
        let what = if found.size_bytes != self.export.size_bytes {
            format!("it has {} bytes and had {}", found.size_bytes, self.export.size_bytes)
        } else if found.flags != self.export.flags {
            "it can do other things".into()
        } else if found.framing != self.export.framing || found.block_sizes != self.export.block_sizes {
            "the server speaks otherwise".into()
        } else if found.allocation_context != self.export.allocation_context
            || found.depth_context != self.export.depth_context
        {
            "its contexts are others".into()
        } else {
            return Ok(());
        };
        Err(ClientError::Changed { peer: self.peer.clone(), name: self.export.name.clone(), what })
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner());
        let State { link: Link::Up(transport), tables, outbound, .. } = state else { return };
        // In the middle of a message there is no polite way out.
        if !outbound.is_empty() || tables.calls.len() > 0 {
            return;
        }
        let goodbye = RequestHeader {
            flags: CommandFlags::empty(),
            command: Command::DISCONNECT,
            cookie: 0,
            offset_bytes: 0,
            len_bytes: 0,
        };
        outbound.header(&goodbye, self.agreed.framing);
        let _ = outbound.send(transport, tables);
        transport.say_goodbye();
    }
}
