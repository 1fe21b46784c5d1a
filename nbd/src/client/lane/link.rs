//! Waiting on a connection, and what happens when it breaks.
//!
//! If the connection breaks, everything in flight fails; or, if the URI says `reconnect`, it is
//! kept. The thread that would poll the socket then reconnects, with pauses from 0.1 s to 5 s, and
//! sends every unanswered call again. That is safe because all NBD commands are idempotent. If the
//! server itself failed, and not only the network, writes that were answered and not flushed may be
//! lost. Flushes fail then (`lost.rs`).

use super::{Lane, Link, State};
use crate::{
    client::{
        ClientError,
        coverage::Coverage,
        inbound::Fault,
        negotiate::{self, ExportInfo},
    },
    uri::NbdUri,
    wire::Command,
};
use std::{
    os::fd::AsFd,
    sync::MutexGuard,
    thread,
    time::{Duration, Instant},
};

/// Pauses between attempts to reconnect.
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

    /// Handles a failure of the connection: reconnects later, or gives up.
    pub(super) fn connection_broke(&self, state: &mut State, error: ClientError) {
        self.answered.broke();
        match self.uri.reconnect {
            Some(limit) if !limit.is_zero() && error.is_transient() => {
                state.link = Link::Down { since: Instant::now() };
            }
            _ => self.fail_for_good(state, error),
        }
    }

    /// Fails everything in flight, and every later request, with `error`.
    fn fail_for_good(&self, state: &mut State, error: ClientError) {
        state.link = Link::Dead(error.clone());
        state.outbound.clear();
        state.inbound.clear();
        for index in state.tables.calls.indices().collect::<Vec<_>>() {
            state.tables.end(index);
        }
        for index in state.tables.slots.indices().collect::<Vec<_>>() {
            if let Some(slot) = state.tables.slots.get_mut(index) {
                slot.fail(error.clone());
            }
            self.end(state, index);
        }
    }

    /// How long the server may send nothing; `None` for no limit.
    pub(super) fn timeout(&self) -> Option<Duration> {
        Some(self.uri.timeout.unwrap_or(NbdUri::TIMEOUT_DEFAULT)).filter(|timeout| !timeout.is_zero())
    }

    /// Handles a server that exceeded its timeout.
    pub(super) fn stalled(&self, state: &mut State) {
        let (peer, seconds) = (self.peer.clone(), self.timeout().unwrap_or_default().as_secs_f64());
        let count = state.tables.calls.len();
        let requests = if count == 1 { "1 request was".to_owned() } else { format!("{count} requests were") };
        let doing = format!("{requests} waiting for an answer");
        self.connection_broke(state, ClientError::Stalled { peer, doing, seconds });
    }

    /// Waits, without the mutex, for the socket or for a server to come back.
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
            Err(source) => {
                self.connection_broke(&mut state, negotiate::lost(&self.peer, "waiting for answers", source))
            }
        }
        state
    }

    /// Reconnects and sends all unanswered calls again.
    fn reconnect<'a>(&'a self, state: MutexGuard<'a, State>, since: Instant) -> MutexGuard<'a, State> {
        drop(state);
        let limit = self.uri.reconnect.unwrap_or_default();
        let mut pause = PAUSE_FIRST;
        let found = loop {
            match negotiate::connect(&self.uri) {
                Ok((transport, found)) => {
                    self.answered.connected(found.server_id.as_deref());
                    break self.check_same_export(&found).map(|()| transport);
                }
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
            Err(error) => self.fail_for_good(&mut state, error),
            Ok(transport) => {
                state.link = Link::Up(transport);
                state.last_moved = Instant::now();
                state.reconnects += 1;
                self.send_again(&mut state);
            }
        }
        state
    }

    pub(super) fn lost_writes(&self) -> ClientError {
        ClientError::LostWrites { peer: self.peer.clone() }
    }

    fn send_again(&self, state: &mut State) {
        state.outbound.clear();
        state.inbound.clear();
        for index in state.tables.calls.indices().collect::<Vec<_>>() {
            let Some(call) = state.tables.calls.get_mut(index) else { continue };
            (call.unsent, call.error, call.coverage) = (false, None, Coverage::default());
            if call.command == Command::FLUSH && self.answered.are_lost() {
                call.error = Some(self.lost_writes());
                if let Some(slot) = state.tables.end(index) {
                    self.advance(state, slot);
                }
                continue;
            }
            if let Some(slot) = state.tables.slots.get_mut(call.slot) {
                slot.status = Default::default();
            }
            if let Some(cookie) = state.tables.renew(index) {
                self.send(state, cookie);
            }
        }
    }

    /// Checks that another connection leads to the same export.
    ///
    /// # Errors
    /// [`ClientError::Changed`].
    pub(in crate::client) fn check_same_export(&self, found: &ExportInfo) -> Result<(), ClientError> {
        let what = if found.size_bytes != self.export.size_bytes {
            format!("its size is {} bytes, it was {}", found.size_bytes, self.export.size_bytes)
        } else if found.flags != self.export.flags {
            "its transmission flags are different".into()
        } else if found.framing != self.export.framing || found.block_sizes != self.export.block_sizes {
            "its framing or block sizes are different".into()
        } else if found.allocation_context != self.export.allocation_context
            || found.depth_context != self.export.depth_context
        {
            "its metadata contexts are different".into()
        } else {
            return Ok(());
        };
        Err(ClientError::Changed { peer: self.peer.clone(), name: self.export.name.clone(), what })
    }
}
