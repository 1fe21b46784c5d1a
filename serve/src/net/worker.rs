//! A worker: one thread, one ring, some of the clients, and a queue for each export they use.
//!
//! ```text
//!   turn:  wait (one io_uring_enter) ─▶ receives and sends that ended ─▶ requests ─▶ queues
//!                                   └▶ completions of disks ─▶ replies ─▶ one send for each client
//! ```
//!
//! A turn ends when no request was pushed since the queues were last reaped. Then the worker
//! sleeps in the kernel, unless there are more completions to answer (`turn` explains why it does
//! not answer all at once). No client can block the others: a turn handles what has arrived and
//! never waits for one client, and each client's share is limited (see `connection`).
//!
//! The front thread passes connections and messages through an [`Inbox`].

use super::{
    connection::{Connection, State, loss},
    core::{Core, Protocol},
    exports::Exports,
    flights::Completed,
    peer::Peer,
    protocol::{SessionEnd, Stage},
    secure::Secure,
    settings::{Settings, TlsNeed},
};
use crate::{inbox::Inbox, metrics::WorkerMetrics, turn::Pace};
use diskwright_store::{BlockQueue, Completion, IoBuf, RateLimiter, SlotMap, StreamEnd, StreamId, Streams};
use std::{
    collections::VecDeque,
    io,
    os::fd::OwnedFd,
    sync::{Arc, atomic::Ordering, mpsc},
    time::{Duration, Instant},
};

/// Interval of the check for clients that exceed a time limit, and of the protocol's ticks.
const TICK: Duration = Duration::from_millis(500);

/// A message to a front thread or a worker.
#[derive(Debug)]
pub(crate) enum Message {
    /// A new client: its socket, its address, and whether it must use TLS.
    Client(OwnedFd, Peer, TlsNeed),
    /// Serve these exports from now on. The clients of one that is leaving are disconnected after
    /// their requests in flight. The sender is dropped when none is left.
    Exports(Arc<Exports>, mpsc::Sender<()>),
    /// Finish the requests in flight and exit.
    Stop,
}

const RECEIVE: u64 = 0;
const SEND: u64 = 1;
const LIMIT: u64 = 2;
const WAKEUP: u64 = u64::MAX;
const CLOCK: u64 = u64::MAX - 1;

fn tag(number: u32, what: u64) -> u64 {
    u64::from(number) << 2 | what
}

#[derive(Debug)]
pub(crate) struct Worker<P: Protocol> {
    /// Dropped before the other users of the ring, so that I/O in flight ends first.
    connections: SlotMap<Connection<P>>,
    streams: Streams,
    core: Core<P>,
    inbox: Arc<Inbox<Message>>,
    wakeup: StreamId,
    settings: Arc<Settings>,
    metrics: Arc<WorkerMetrics>,
    started: Instant,
    /// Connections at their limit, waiting for some of their replies to be sent.
    stalled: Vec<u32>,
    /// Connections that gave up their turn. They go on in the next turn without an event of their
    /// own.
    deferred: Vec<u32>,
    /// Connections that have something to send.
    to_send: Vec<u32>,
    ends: Vec<StreamEnd>,
    completions: Vec<Completion>,
    /// Completions of disks whose clients have not been answered yet.
    unanswered: VecDeque<Completion>,
    /// Dropped when no client has an export that is leaving.
    leaving: Option<mpsc::Sender<()>>,
    pace: Pace,
    ticking: bool,
    stopping: bool,
}

impl<P: Protocol> Worker<P> {
    /// Must be called on the thread that will run the worker.
    ///
    /// # Errors
    /// io_uring is not available, or there are no descriptors left.
    pub(crate) fn new(
        settings: Arc<Settings>,
        shared: Arc<P::Shared>,
        inbox: Arc<Inbox<Message>>,
        metrics: Arc<WorkerMetrics>,
    ) -> io::Result<Self> {
        let core = Core::new(
            settings.exports(),
            shared,
            settings.share,
            Arc::clone(&metrics),
            settings.ring_depth,
            Arc::clone(&settings.reservations),
        )?;
        let mut streams = Streams::new(core.ring());
        let wakeup = streams.add(inbox.wakeup()?)?;
        streams.receive(wakeup, IoBuf::new(8), 0..8, false, WAKEUP);
        Ok(Self {
            connections: SlotMap::default(),
            streams,
            core,
            inbox,
            wakeup,
            settings,
            metrics,
            started: Instant::now(),
            stalled: Vec::new(),
            deferred: Vec::new(),
            to_send: Vec::new(),
            ends: Vec::new(),
            completions: Vec::new(),
            unanswered: VecDeque::new(),
            leaving: None,
            pace: Pace::answering(P::ANSWERS),
            ticking: false,
            stopping: false,
        })
    }

    /// Serves until it is told to stop and all connections are closed.
    ///
    /// # Errors
    /// The ring failed.
    pub(crate) fn run(mut self) -> io::Result<()> {
        while !self.stopping || !self.connections.is_empty() {
            let mut ends = std::mem::take(&mut self.ends);
            // Operations that failed to start have completed without the ring.
            self.streams.reap(&mut ends);
            if ends.is_empty() {
                let has_more = !self.unanswered.is_empty() || !self.deferred.is_empty();
                self.pace.end_turn(self.core.ring(), has_more)?;
                self.streams.reap(&mut ends);
            }
            self.core.now_ns = self.started.elapsed().as_nanos() as u64;
            for end in ends.drain(..) {
                self.ended(end);
            }
            self.ends = ends;
            for number in std::mem::take(&mut self.deferred) {
                self.advance(number);
            }
            self.work_disks()?;
            let mut to_send = std::mem::take(&mut self.to_send);
            for number in to_send.drain(..) {
                self.send(number);
            }
            self.to_send = to_send;
            self.settle_leaving();
            self.metrics.in_flight.store(self.core.flights.len() as i64, Ordering::Relaxed);
            self.metrics.enters.set(self.core.ring().enters());
        }
        Ok(())
    }

    /// Takes the completions of all disks, answers some of them, and handles the requests that
    /// stalled clients have waiting. Repeats until no request is pushed.
    fn work_disks(&mut self) -> io::Result<()> {
        let mut left = self.pace.answers();
        loop {
            self.core.pushed = false;
            let mut completions = std::mem::take(&mut self.completions);
            // Idle queues are reaped too. The wake-up of a flush whose end was seen early arrives
            // later, and a ring with unread completions neither sleeps nor polls for new ones.
            for queue in self.core.queues.iter_mut().flatten() {
                queue.reap(0, &mut completions)?;
            }
            self.unanswered.extend(completions.drain(..));
            self.completions = completions;
            while left > 0
                && let Some(completion) = self.unanswered.pop_front()
            {
                left -= 1;
                if let Some(completed) = self.core.completed(completion) {
                    self.answer(completed);
                }
            }
            for number in std::mem::take(&mut self.stalled) {
                if let Some(conn) = self.connections.get_mut(number) {
                    (conn.stalled, conn.retries) = (false, false);
                    self.advance(number);
                }
            }
            if !self.core.pushed {
                return Ok(());
            }
        }
    }

    fn answer(&mut self, completed: Completed<P::Asked>) {
        let Completed { asked, result, contents } = completed;
        if let Some(conn) = self.connections.get_mut(asked.connection) {
            conn.reclaim(&mut self.core.pool);
            self.core.answer(conn, &asked, result, contents);
            self.settle(asked.connection);
        }
    }

    fn ended(&mut self, end: StreamEnd) {
        match end.tag {
            WAKEUP => {
                self.metrics.wakeups.add(1);
                for message in self.inbox.take() {
                    match message {
                        Message::Client(fd, peer, tls) => self.add_client(fd, peer, tls),
                        Message::Exports(exports, settled) => self.take_exports(exports, settled),
                        Message::Stop => self.stop(),
                    }
                }
                if let Some(buf) = end.buf {
                    self.streams.receive(self.wakeup, buf, 0..8, false, WAKEUP);
                }
            }
            CLOCK => self.tick(),
            tag if tag & 3 == SEND => self.sent((tag >> 2) as u32, end),
            tag if tag & 3 == LIMIT => self.may_go_on((tag >> 2) as u32),
            tag => self.received((tag >> 2) as u32, end),
        }
    }

    fn add_client(&mut self, fd: OwnedFd, peer: Peer, tls: TlsNeed) {
        let stream = match self.streams.add(fd) {
            Ok(stream) => stream,
            Err(error) => {
                tracing::warn!(%peer, %error, "cannot watch the socket of a new connection");
                self.metrics.connections.fetch_sub(1, Ordering::Relaxed);
                return;
            }
        };
        tracing::debug!(%peer, "connected");
        let session = P::session(&self.core, tls);
        let mut conn = Connection::new(stream, peer, session, self.core.now_ns, &mut self.core.pool);
        P::greet(&mut self.core, &mut conn);
        let limits = self.settings.client_limits();
        conn.limiter = (!limits.is_unlimited()).then(|| Box::new(RateLimiter::new(limits)));
        let number = self.connections.insert(conn);
        if self.stopping {
            self.drain(number);
        } else {
            self.advance(number);
        }
        self.keep_ticking();
    }

    fn received(&mut self, number: u32, end: StreamEnd) {
        let Some(conn) = self.connections.get_mut(number) else { return };
        conn.take_back(end.buf, end.pieces, &mut self.core.pool);
        match end.result {
            // A connection that is closing ignores its input.
            _ if conn.state != State::Open => self.settle(number),
            // Many clients disconnect this way when they have nothing in flight.
            Ok(0) if conn.share.requests == 0 && P::stage(&conn.session) == Stage::Serving => self.drain(number),
            Ok(0) => self.client_left(number, "the client disconnected without ending the session"),
            Err(error) => self.client_left(number, &loss(&error)),
            Ok(bytes) => match conn.received(bytes) {
                Ok(()) => self.advance(number),
                Err(error) => {
                    // A TLS alert for the client is still sent.
                    self.metrics.broken.add(1);
                    tracing::warn!(peer = %conn.peer, %error, "TLS failed");
                    self.drain(number);
                }
            },
        }
    }

    /// Handles the bytes received, and starts the next receive.
    fn advance(&mut self, number: u32) {
        let Some(conn) = self.connections.get_mut(number) else { return };
        if conn.starts_tls && !conn.has_output() && !conn.outbox.is_sending() {
            conn.starts_tls = false;
            match self.settings.tls_session().and_then(|config| Secure::new(&config).map_err(io::Error::other)) {
                Ok(secure) => conn.secure = Some(Box::new(secure)),
                Err(error) => return self.disconnect(number, &format!("TLS cannot begin: {error}")),
            }
        }
        if conn.state == State::Open
            && !conn.starts_tls
            && let Err(reason) = P::take_input(&mut self.core, conn, number)
        {
            return self.end_session(number, &reason);
        }
        let Some(conn) = self.connections.get_mut(number) else { return };
        if conn.retries && !conn.stalled {
            self.stalled.push(number);
        }
        // Replies to options are not counted in the share. So during the handshake the worker
        // receives nothing more from a client until the replies to its last options were sent.
        let must_listen =
            P::stage(&conn.session) == Stage::Handshake && (conn.has_output() || conn.outbox.is_sending());
        if std::mem::take(&mut conn.turn_is_over) {
            self.deferred.push(number);
        } else if conn.stalled {
            self.stalled.push(number);
        } else if conn.is_over_limit(self.core.now_ns) {
            if !conn.waits_for_limit {
                conn.waits_for_limit = true;
                let pause = Duration::from_nanos(conn.not_before_ns - self.core.now_ns);
                self.streams.timer(pause, tag(number, LIMIT));
            }
        } else if conn.state == State::Open && !conn.receiving && !conn.starts_tls && !must_listen {
            let mut pieces = conn.lend(&mut self.core.pool);
            match pieces.pop() {
                Some((buf, range)) if pieces.is_empty() => {
                    conn.keep(pieces);
                    self.streams.receive(conn.stream, buf, range, false, tag(number, RECEIVE));
                }
                Some(last) => {
                    pieces.push(last);
                    self.streams.receive_into(conn.stream, pieces, tag(number, RECEIVE));
                }
                None => {}
            }
        }
        self.settle(number);
    }

    /// A client that was over its limit may send its next request. The timer of a connection that
    /// has ended meanwhile may reach its successor, for which this changes nothing.
    fn may_go_on(&mut self, number: u32) {
        if let Some(conn) = self.connections.get_mut(number) {
            conn.waits_for_limit = false;
            self.advance(number);
        }
    }

    fn end_session(&mut self, number: u32, reason: &SessionEnd) {
        match reason {
            SessionEnd::Disconnected => self.drain(number),
            SessionEnd::Told(_) => {
                self.metrics.broken.add(1);
                if let Some(conn) = self.connections.get_mut(number) {
                    tracing::warn!(peer = %conn.peer, requests = conn.requests, %reason, "the connection ended");
                }
                self.drain(number);
            }
            SessionEnd::Broken(_) | SessionEnd::Queue(_) => {
                self.metrics.broken.add(1);
                self.disconnect(number, &reason.to_string());
            }
        }
    }

    fn send(&mut self, number: u32) {
        let Some(conn) = self.connections.get_mut(number) else { return };
        conn.to_send = false;
        if conn.state == State::Closing || conn.outbox.is_sending() || !conn.has_output() {
            return;
        }
        let mut pieces = conn.outbox.take();
        if let Some(secure) = &mut conn.secure {
            let mut sealed = Vec::with_capacity(pieces.len());
            let outcome = secure.seal(&mut pieces, &mut self.core.pool, &mut sealed);
            conn.outbox.keep(pieces);
            pieces = sealed;
            if let Err(error) = outcome {
                let share = conn.outbox.sent(None, pieces, &mut self.core.pool);
                conn.share.sub(share);
                return self.disconnect(number, &format!("TLS failed: {error}"));
            }
        }
        match pieces.pop() {
            Some((buf, range)) if pieces.is_empty() => {
                conn.outbox.keep(pieces);
                self.streams.send(conn.stream, buf, range, tag(number, SEND));
            }
            Some(last) => {
                pieces.push(last);
                self.streams.send_all(conn.stream, pieces, tag(number, SEND));
            }
            None => {
                let share = conn.outbox.sent(None, pieces, &mut self.core.pool);
                conn.share.sub(share);
            }
        }
    }

    fn sent(&mut self, number: u32, end: StreamEnd) {
        let Some(conn) = self.connections.get_mut(number) else { return };
        let share = conn.outbox.sent(end.buf, end.pieces, &mut self.core.pool);
        conn.share.sub(share);
        match end.result {
            Err(error) if conn.state != State::Closing => self.client_left(number, &loss(&error)),
            _ if conn.starts_tls || P::stage(&conn.session) == Stage::Handshake => self.advance(number),
            _ => self.settle(number),
        }
    }

    /// Puts the connection on the send list if it has output, and closes or removes it if it is
    /// done.
    fn settle(&mut self, number: u32) {
        let Some(conn) = self.connections.get_mut(number) else { return };
        if conn.has_output() && conn.state != State::Closing {
            if !conn.to_send {
                conn.to_send = true;
                self.to_send.push(number);
            }
            return;
        }
        if conn.state == State::Draining && conn.share.requests == 0 && !conn.outbox.is_sending() {
            if let Some(secure) = &mut conn.secure
                && secure.close()
            {
                return self.settle(number);
            }
            tracing::info!(peer = %conn.peer, requests = conn.requests, "closed");
            self.close(number);
        }
        let Some(conn) = self.connections.get_mut(number) else { return };
        if conn.has_ended() {
            self.connections.remove(number);
            if self.connections.is_empty() {
                self.core.pool.trim();
            }
            self.metrics.connections.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Ignores further input from a client, and closes the connection when all requests are
    /// answered.
    fn drain(&mut self, number: u32) {
        let Some(conn) = self.connections.get_mut(number) else { return };
        if conn.state == State::Open {
            (conn.state, conn.since_ns) = (State::Draining, self.core.now_ns);
            conn.abandon_input(&mut self.core.pool);
            P::abandon(&mut self.core, conn);
            self.keep_ticking();
        }
        self.settle(number);
    }

    /// Ends the connection of a client that has disconnected. A disconnect in the handshake is
    /// normal: the client has listed the exports, or has only checked that the server listens
    /// (monitoring). It is logged at debug level.
    fn client_left(&mut self, number: u32, reason: &str) {
        let Some(conn) = self.connections.get_mut(number) else { return };
        if P::stage(&conn.session) == Stage::Handshake && conn.state != State::Closing {
            tracing::debug!(peer = %conn.peer, reason, "disconnected during the handshake");
            self.close(number);
        }
        self.disconnect(number, reason);
    }

    /// Ends a connection at once, with a warning in the log.
    fn disconnect(&mut self, number: u32, reason: &str) {
        let Some(conn) = self.connections.get_mut(number) else { return };
        if conn.state != State::Closing {
            tracing::warn!(peer = %conn.peer, requests = conn.requests, reason, "the connection ended");
            self.close(number);
        }
        self.settle(number);
    }

    fn close(&mut self, number: u32) {
        let Some(conn) = self.connections.get_mut(number) else { return };
        conn.state = State::Closing;
        P::abandon(&mut self.core, conn);
        P::closed(&mut self.core, conn);
        conn.release(&mut self.core.pool);
        self.streams.close(conn.stream);
        self.core.abandon(number);
    }

    fn stop(&mut self) {
        self.stopping = true;
        for number in self.connections.indices().collect::<Vec<_>>() {
            self.drain(number);
        }
    }

    fn take_exports(&mut self, exports: Arc<Exports>, settled: mpsc::Sender<()>) {
        self.core.set_exports(Arc::clone(&exports));
        self.leaving = Some(settled);
        for number in self.connections.indices().collect::<Vec<_>>() {
            let Some(conn) = self.connections.get_mut(number) else { continue };
            P::exports_changed(&mut self.core, conn);
            if exports.leaving().any(|export| P::is_of_export(&conn.session, export)) {
                self.drain(number);
            } else {
                self.settle(number);
            }
        }
    }

    /// Closes the queue of an export that is leaving when no client and no request has it any more.
    fn settle_leaving(&mut self) {
        if self.leaving.is_none() {
            return;
        }
        let Core { exports, queues, .. } = &mut self.core;
        let has = |number: u32| {
            let conn = self.connections.get(number);
            conn.is_some_and(|conn| exports.leaving().any(|export| P::is_of_export(&conn.session, export)))
        };
        if self.connections.indices().any(has) {
            return;
        }
        let mut leaving = queues.iter_mut().enumerate().filter(|(index, _)| exports.is_leaving(*index));
        if leaving.all(|(_, queue)| queue.take_if(|queue| queue.in_flight() == 0).is_some() || queue.is_none()) {
            self.leaving = None;
        }
    }

    fn keep_ticking(&mut self) {
        if !self.ticking {
            self.ticking = true;
            self.streams.timer(TICK, CLOCK);
        }
    }

    /// Ends connections that exceed a time limit: for the handshake, or for receiving the last
    /// replies. Passes the tick to the others.
    fn tick(&mut self) {
        self.ticking = false;
        let now_ns = self.core.now_ns;
        for number in self.connections.indices().collect::<Vec<_>>() {
            let Some(conn) = self.connections.get_mut(number) else { continue };
            let limit = match (conn.state, P::stage(&conn.session)) {
                (State::Closing, _) => continue,
                (State::Draining, _) => {
                    Some((self.settings.drain_time, "the client did not receive its last replies in time"))
                }
                (State::Open, Stage::Handshake) => {
                    Some((self.settings.handshake_time, "the client did not finish the handshake in time"))
                }
                (State::Open, Stage::Serving) if P::ticks(&conn.session) => None,
                (State::Open, Stage::Serving) => continue,
            };
            match limit {
                Some((limit, reason)) if u128::from(now_ns.saturating_sub(conn.since_ns)) >= limit.as_nanos() => {
                    self.metrics.broken.add(1);
                    self.disconnect(number, reason);
                    continue;
                }
                Some(_) => {}
                None => match P::tick(&mut self.core, conn) {
                    Ok(()) => self.settle(number),
                    Err(reason) => self.end_session(number, &reason),
                },
            }
            self.keep_ticking();
        }
    }
}
