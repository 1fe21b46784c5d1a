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
    connection::{Connection, Phase, State, loss},
    dispatch::{Dispatcher, QUEUE_DEPTH, SessionEnd},
    export::Exports,
    flights::Completed,
    handshake::{Handshake, HandshakeStep, TlsNeed},
    peer::Peer,
    secure::Secure,
    settings::Settings,
};
use crate::{
    inbox::Inbox,
    metrics::WorkerMetrics,
    panic_guard::{PanicGuard, catch_panic},
    reserve::Reserve,
    turn::Pace,
};
use diskwright_store::{
    Completion, IoBuf, QueueOptions, RateLimiter, SharedRing, SlotMap, StreamEnd, StreamId, Streams,
};
use std::{
    collections::VecDeque,
    io,
    os::fd::OwnedFd,
    sync::{Arc, atomic::Ordering, mpsc},
    time::{Duration, Instant},
};

/// Requests that are answered in a normal turn.
const ANSWERS: usize = 8;

/// Interval of the check for clients that exceed a time limit.
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
pub(crate) struct Worker {
    /// Dropped before the other users of the ring, so that I/O in flight ends first.
    connections: SlotMap<Connection>,
    streams: Streams,
    dispatcher: Dispatcher,
    ring: SharedRing,
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

impl Worker {
    /// Must be called on the thread that will run the worker.
    ///
    /// # Errors
    /// io_uring is not available, or there are no descriptors left.
    pub(crate) fn new(
        settings: Arc<Settings>,
        inbox: Arc<Inbox<Message>>,
        metrics: Arc<WorkerMetrics>,
    ) -> io::Result<Self> {
        let dispatcher = Dispatcher::new(settings.exports(), settings.share, Arc::clone(&metrics));
        let ring = SharedRing::new(settings.ring_depth, Some(dispatcher.pool.slab()))?;
        let mut streams = Streams::new(&ring);
        let wakeup = streams.add(inbox.wakeup()?)?;
        streams.receive(wakeup, IoBuf::new(8), 0..8, false, WAKEUP);
        Ok(Self {
            connections: SlotMap::default(),
            streams,
            dispatcher,
            ring,
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
            pace: Pace::answering(ANSWERS),
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
                self.pace.end_turn(&self.ring, has_more)?;
                self.streams.reap(&mut ends);
            }
            self.dispatcher.now_ns = self.started.elapsed().as_nanos() as u64;
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
            self.metrics.in_flight.store(self.dispatcher.flights.len() as i64, Ordering::Relaxed);
            self.metrics.enters.set(self.ring.enters());
        }
        Ok(())
    }

    /// Takes the completions of all disks, answers some of them, and handles the requests that
    /// stalled clients have waiting. Repeats until no request is pushed.
    fn work_disks(&mut self) -> io::Result<()> {
        let mut left = self.pace.answers();
        loop {
            self.dispatcher.pushed = false;
            let mut completions = std::mem::take(&mut self.completions);
            // Idle queues are reaped too. The wake-up of a flush whose end was seen early arrives
            // later, and a ring with unread completions neither sleeps nor polls for new ones.
            for queue in self.dispatcher.queues.iter_mut().flatten() {
                queue.reap(0, &mut completions)?;
            }
            self.unanswered.extend(completions.drain(..));
            self.completions = completions;
            while left > 0
                && let Some(completion) = self.unanswered.pop_front()
            {
                left -= 1;
                if let Some(completed) = self.dispatcher.completed(completion) {
                    self.answer(completed);
                }
            }
            for number in std::mem::take(&mut self.stalled) {
                if let Some(conn) = self.connections.get_mut(number) {
                    conn.stalled = false;
                    self.advance(number);
                }
            }
            if !self.dispatcher.pushed {
                return Ok(());
            }
        }
    }

    fn answer(&mut self, completed: Completed) {
        let Completed { asked, result, contents } = completed;
        if let Some(conn) = self.connections.get_mut(asked.connection) {
            conn.reclaim(&mut self.dispatcher.pool);
            self.dispatcher.reply(conn, &asked, result, contents);
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
        let handshake = Handshake::new(Arc::clone(&self.dispatcher.exports), tls);
        let mut conn = Connection::new(stream, peer, handshake, self.dispatcher.now_ns, &mut self.dispatcher.pool);
        conn.outbox.put(&Handshake::greeting(), &mut self.dispatcher.pool);
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
        conn.take_back(end.buf, end.pieces, &mut self.dispatcher.pool);
        match end.result {
            // A connection that is closing ignores its input.
            _ if conn.state != State::Open => self.settle(number),
            // Many clients disconnect this way when they have nothing in flight.
            Ok(0) if conn.share.requests == 0 && matches!(conn.phase, Phase::Transmission(_)) => self.drain(number),
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
        if let Err(reason) = self.handle_input(number) {
            return match reason {
                SessionEnd::Disconnected => self.drain(number),
                SessionEnd::Wire(_) | SessionEnd::Handshake(_) | SessionEnd::Queue(_) => {
                    self.metrics.broken.add(1);
                    self.disconnect(number, &reason.to_string());
                }
            };
        }
        let Some(conn) = self.connections.get_mut(number) else { return };
        // Replies to options are not counted in the share. So during the handshake the worker
        // receives nothing more from a client until the replies to its last options were sent.
        let must_listen = matches!(conn.phase, Phase::Handshake(_)) && (conn.has_output() || conn.outbox.is_sending());
        if std::mem::take(&mut conn.turn_is_over) {
            self.deferred.push(number);
        } else if conn.stalled {
            self.stalled.push(number);
        } else if conn.is_over_limit(self.dispatcher.now_ns) {
            if !conn.waits_for_limit {
                conn.waits_for_limit = true;
                let pause = Duration::from_nanos(conn.not_before_ns - self.dispatcher.now_ns);
                self.streams.timer(pause, tag(number, LIMIT));
            }
        } else if conn.state == State::Open && !conn.receiving && !conn.starts_tls && !must_listen {
            let mut pieces = conn.lend(&mut self.dispatcher.pool);
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

    fn handle_input(&mut self, number: u32) -> Result<(), SessionEnd> {
        let Some(conn) = self.connections.get_mut(number) else { return Ok(()) };
        while conn.state == State::Open && !conn.starts_tls {
            match &mut conn.phase {
                Phase::Transmission(session) => {
                    let session = session.clone();
                    return self.dispatcher.take_requests(conn, number, &session);
                }
                Phase::Handshake(handshake) => {
                    let mut answers = Vec::new();
                    let (used, next) = handshake.step(conn.window.bytes(), &mut answers)?;
                    conn.window.consume(used);
                    conn.outbox.put(&answers, &mut self.dispatcher.pool);
                    match next {
                        HandshakeStep::More => return Ok(()),
                        HandshakeStep::StartTls => conn.starts_tls = true,
                        HandshakeStep::Bye => return Err(SessionEnd::Disconnected),
                        HandshakeStep::Transmit(session) => {
                            conn.outbox.seal();
                            let export = self.dispatcher.exports.get(session.export);
                            let queue = &mut self.dispatcher.queues[session.export];
                            if queue.is_none() {
                                let ring = Some(&self.ring);
                                let options = QueueOptions { depth: QUEUE_DEPTH, ring, ..QueueOptions::default() };
                                let opened = catch_panic(|| export.device.open_queue(&options));
                                let opened = Box::new(PanicGuard::over(opened.map_err(SessionEnd::Queue)?));
                                let held = Arc::clone(&self.metrics.held);
                                *queue = Some(Box::new(Reserve::over(opened, &self.ring, held)));
                            }
                            let tls = conn.secure.is_some();
                            tracing::info!(peer = %conn.peer, export = %export.name, tls, framing = ?session.framing, "serving");
                            if session.may_be_unaligned {
                                export.warn_of_unaligned(&conn.peer);
                            }
                            conn.phase = Phase::Transmission(session);
                        }
                    }
                }
            }
        }
        Ok(())
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
            let outcome = secure.seal(&mut pieces, &mut self.dispatcher.pool, &mut sealed);
            conn.outbox.keep(pieces);
            pieces = sealed;
            if let Err(error) = outcome {
                let share = conn.outbox.sent(None, pieces, &mut self.dispatcher.pool);
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
                let share = conn.outbox.sent(None, pieces, &mut self.dispatcher.pool);
                conn.share.sub(share);
            }
        }
    }

    fn sent(&mut self, number: u32, end: StreamEnd) {
        let Some(conn) = self.connections.get_mut(number) else { return };
        let share = conn.outbox.sent(end.buf, end.pieces, &mut self.dispatcher.pool);
        conn.share.sub(share);
        match end.result {
            Err(error) if conn.state != State::Closing => self.client_left(number, &loss(&error)),
            _ if conn.starts_tls || matches!(conn.phase, Phase::Handshake(_)) => self.advance(number),
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
                self.dispatcher.pool.trim();
            }
            self.metrics.connections.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Ignores further input from a client, and closes the connection when all requests are
    /// answered.
    fn drain(&mut self, number: u32) {
        let Some(conn) = self.connections.get_mut(number) else { return };
        if conn.state == State::Open {
            (conn.state, conn.since_ns) = (State::Draining, self.dispatcher.now_ns);
            conn.abandon_input(&mut self.dispatcher.pool);
            self.keep_ticking();
        }
        self.settle(number);
    }

    /// Ends the connection of a client that has disconnected. A disconnect in the handshake is
    /// normal: the client has listed the exports, or has only checked that the server listens
    /// (monitoring). It is logged at debug level.
    fn client_left(&mut self, number: u32, reason: &str) {
        let Some(conn) = self.connections.get_mut(number) else { return };
        if matches!(conn.phase, Phase::Handshake(_)) && conn.state != State::Closing {
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
        conn.release(&mut self.dispatcher.pool);
        self.streams.close(conn.stream);
        self.dispatcher.abandon(number);
    }

    fn stop(&mut self) {
        self.stopping = true;
        for number in self.connections.indices().collect::<Vec<_>>() {
            self.drain(number);
        }
    }

    fn take_exports(&mut self, exports: Arc<Exports>, settled: mpsc::Sender<()>) {
        self.dispatcher.set_exports(Arc::clone(&exports));
        self.leaving = Some(settled);
        for number in self.connections.indices().collect::<Vec<_>>() {
            let Some(conn) = self.connections.get_mut(number) else { continue };
            match &mut conn.phase {
                Phase::Handshake(handshake) => handshake.set_exports(Arc::clone(&exports)),
                Phase::Transmission(session) if exports.is_leaving(session.export) => self.drain(number),
                Phase::Transmission(_) => {}
            }
        }
    }

    /// Closes the queue of an export that is leaving when no client and no request has it any more.
    fn settle_leaving(&mut self) {
        if self.leaving.is_none() {
            return;
        }
        let Dispatcher { exports, queues, .. } = &mut self.dispatcher;
        let has = |number: u32| match self.connections.get(number).map(|conn| &conn.phase) {
            Some(Phase::Transmission(session)) => exports.is_leaving(session.export),
            _ => false,
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
    /// replies.
    fn tick(&mut self) {
        self.ticking = false;
        let now_ns = self.dispatcher.now_ns;
        for number in self.connections.indices().collect::<Vec<_>>() {
            let Some(conn) = self.connections.get_mut(number) else { continue };
            let (limit, reason) = match (conn.state, &conn.phase) {
                (State::Draining, _) => {
                    (self.settings.drain_time, "the client did not receive its last replies in time")
                }
                (State::Open, Phase::Handshake(_)) => {
                    (self.settings.handshake_time, "the client did not finish the handshake in time")
                }
                _ => continue,
            };
            if u128::from(now_ns.saturating_sub(conn.since_ns)) >= limit.as_nanos() {
                self.metrics.broken.add(1);
                self.disconnect(number, reason);
            } else {
                self.keep_ticking();
            }
        }
    }
}
