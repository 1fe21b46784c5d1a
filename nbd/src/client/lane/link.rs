//! The connection under a lane: waiting for it, and what becomes of all that is in flight when it
//! breaks.
//!
//! When the connection breaks, all that is in flight fails, or, where the URI says `reconnect`,
//! stays; whoever would have polled makes the connection anew, with pauses from a tenth of a second
//! to five, and every call that has no answer is sent again. That is safe, as all commands of NBD
//! can be repeated. It gives no more than a disk gives: what was answered and not flushed may be
//! lost if the server itself went down, and not only the network.

use super::{Lane, Link, State};
use crate::{
    client::{
        ClientError,
        coverage::Coverage,
        inbound::Fault,
        negotiate::{self, ExportInfo},
    },
    uri::NbdUri,
};
use std::{
    os::fd::AsFd,
    sync::MutexGuard,
    thread,
    time::{Duration, Instant},
};

/// Pauses between tries to reconnect.
const PAUSE_FIRST: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(5);

impl Lane {
    pub(super) fn fault(&self, fault: Fault) -> ClientError {
        let (peer, doing) = (self.peer.clone(), "waiting for answers".to_owned());
        match fault {
            Fault::Io(source) => negotiate::lost(&peer, &doing, source),
            Fault::Wire(source) => ClientError::Wire { peer, doing, source },
            Fault::Protocol(what) => ClientError::Protocol { peer, what },
        }
    }

    /// The connection is of no use any more.
    pub(super) fn broke(&self, state: &mut State, error: ClientError) {
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

    /// How long the server may be silent; without end, `None`.
    pub(super) fn timeout(&self) -> Option<Duration> {
        Some(self.uri.timeout.unwrap_or(NbdUri::TIMEOUT_DEFAULT)).filter(|timeout| !timeout.is_zero())
    }

    /// The server has been silent for too long.
    pub(super) fn stalled(&self, state: &mut State) {
        let (peer, seconds) = (self.peer.clone(), self.timeout().unwrap_or_default().as_secs_f64());
        let count = state.tables.calls.len();
        let requests = if count == 1 { "1 request was".to_owned() } else { format!("{count} requests were") };
        let doing = format!("{requests} waiting for an answer");
        self.broke(state, ClientError::Stalled { peer, doing, seconds });
    }

    /// Waits without the mutex: for the socket, or for a server to come back.
    pub(super) fn wait<'a>(&'a self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
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
        let timeout = self.timeout();
        let limit = timeout.map(|timeout| timeout.saturating_sub(state.last_moved.elapsed()));
        state.polls_for_sending = for_sending;
        drop(state);
        let came = socket.wait(Some(self.wake.as_fd()), for_sending, limit);
        let mut state = self.lock();
        match came {
            Ok(true) => {}
            Ok(false) if timeout.is_none_or(|timeout| state.last_moved.elapsed() < timeout) => {}
            Ok(false) => {
                self.stalled(&mut state);
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
    pub(in crate::client) fn same(&self, found: &ExportInfo) -> Result<(), ClientError> {
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
