//! A worker: one thread, one ring, some of the clients, and a queue on each export that they use.
//!
//! ```text
//!   turn:  wait (one io_uring_enter) ─▶ ends of receives and sends ─▶ requests ─▶ queues
//!                                   └▶ ends of disk requests ─▶ replies ─▶ one send for each client that is owed something
//! ```
//!
//! A turn ends when no queue was pushed to since it was last looked at; then everything waits for
//! the kernel, unless there are more answers to give (`turn` says why not all at once). No client
//! can hold up the others: a turn does what is there and waits for nobody, and what a client may
//! have in flight is bounded (see `connection`).
//!
//! The front hands over connections, and news, through a [`Post`].

use super::{
    connection::{Connection, Peer, Phase, State, loss},
    desk::{Departure, Desk, QUEUE_DEPTH},
    flights::{Landed, Table},
    handshake::{Handshake, Next, TlsNeed},
    post::{Letter, Post},
    secure::Secure,
    settings::Settings,
};
use crate::{
    contained::{Contained, contained},
    metrics::WorkerMetrics,
    reserve::Reserve,
    turn::Pace,
};
use diskwright_store::{Completion, IoBuf, QueueOptions, SharedRing, StreamEnd, StreamId, Streams};
use std::{
    collections::VecDeque,
    io,
    os::fd::OwnedFd,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

/// How often the worker looks for clients that take too long.
const TICK: Duration = Duration::from_millis(500);

const RECEIVE: u64 = 0;
const SEND: u64 = 1;
const BELL: u64 = u64::MAX;
const CLOCK: u64 = u64::MAX - 1;

fn tag(number: u32, what: u64) -> u64 {
    u64::from(number) << 1 | what
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Worker {
    /// Before the ring's other users: what is in flight ends first.
    connections: Table<Connection>,
    streams: Streams,
    desk: Desk,
    ring: SharedRing,
    post: Arc<Post>,
    bell: StreamId,
    settings: Arc<Settings>,
    metrics: Arc<WorkerMetrics>,
    started: Instant,
    /// Connections that wait until some of their requests are answered.
    stalled: Vec<u32>,
    /// Connections that go on in the next turn, though nothing of theirs ends.
    patient: Vec<u32>,
    /// Connections that have something to send.
    to_send: Vec<u32>,
    ends: Vec<StreamEnd>,
    completions: Vec<Completion>,
    /// Requests of disks that have ended, whose clients were not told yet.
    unanswered: VecDeque<Completion>,
    pace: Pace,
    ticking: bool,
    stopping: bool,
}

impl Worker {
    /// For the thread that will run it.
    ///
    /// # Errors
    /// There is no io_uring, or no descriptor left.
    pub(crate) fn new(settings: Arc<Settings>, post: Arc<Post>, metrics: Arc<WorkerMetrics>) -> io::Result<Self> {
        let desk = Desk::new(Arc::clone(&settings.exports), settings.share, Arc::clone(&metrics));
        let ring = SharedRing::new(settings.ring_depth, Some(desk.pool.slab()))?;
        let mut streams = Streams::new(&ring);
        let bell = streams.add(post.bell()?)?;
        streams.receive(bell, IoBuf::new(8), 0..8, false, BELL);
        Ok(Self {
            connections: Table::default(),
            streams,
            desk,
            ring,
            post,
            bell,
            settings,
            metrics,
            started: Instant::now(),
            stalled: Vec::new(),
            patient: Vec::new(),
            to_send: Vec::new(),
            ends: Vec::new(),
            completions: Vec::new(),
            unanswered: VecDeque::new(),
            pace: Pace::default(),
            ticking: false,
            stopping: false,
        })
    }

    /// Serves until it is told to stop and has finished.
    ///
    /// # Errors
    /// The ring has failed.
    pub(crate) fn run(mut self) -> io::Result<()> {
        while !self.stopping || self.connections.len() > 0 {
            let mut ends = std::mem::take(&mut self.ends);
            // What could not even be begun has ended without the ring.
            self.streams.reap(&mut ends);
            if ends.is_empty() {
                let has_more = !self.unanswered.is_empty() || !self.patient.is_empty();
                self.pace.end_turn(&self.ring, has_more)?;
                self.streams.reap(&mut ends);
            }
            self.desk.now_ns = self.started.elapsed().as_nanos() as u64;
            for end in ends.drain(..) {
                self.ended(end);
            }
            self.ends = ends;
            for number in std::mem::take(&mut self.patient) {
                self.go_on(number);
            }
            self.work_disks()?;
            let mut to_send = std::mem::take(&mut self.to_send);
            for number in to_send.drain(..) {
                self.send(number);
            }
            self.to_send = to_send;
            self.metrics.in_flight.store(self.desk.flights.len() as i64, Ordering::Relaxed);
            self.metrics.enters.set(self.ring.enters());
        }
        Ok(())
    }

    /// Takes what the disks have done, answers some of it, and takes what that lets clients go on
    /// with, until there is no more of that.
    fn work_disks(&mut self) -> io::Result<()> {
        let mut left = self.pace.answers();
        loop {
            self.desk.pushed = false;
            let mut completions = std::mem::take(&mut self.completions);
            // Idle ones too: the bell of a flush whose end was seen early rings later, and while it
            // lies unheard in their mailbox the ring does not sleep, and looks for nothing new.
            for queue in self.desk.queues.iter_mut().flatten() {
                queue.reap(0, &mut completions)?;
            }
            self.unanswered.extend(completions.drain(..));
            self.completions = completions;
            while left > 0
                && let Some(completion) = self.unanswered.pop_front()
            {
                left -= 1;
                if let Some(landed) = self.desk.landed(completion) {
                    self.answer(landed);
                }
            }
            for number in std::mem::take(&mut self.stalled) {
                if let Some(conn) = self.connections.get(number) {
                    conn.stalled = false;
                    self.go_on(number);
                }
            }
            if !self.desk.pushed {
                return Ok(());
            }
        }
    }

    fn answer(&mut self, landed: Landed) {
        let Landed { asked, result, contents } = landed;
        if let Some(conn) = self.connections.get(asked.connection) {
            conn.reclaim(&mut self.desk.pool);
            self.desk.reply(conn, &asked, result, contents);
            self.settle(asked.connection);
        }
    }

    fn ended(&mut self, end: StreamEnd) {
        match end.tag {
            BELL => {
                for letter in self.post.take() {
                    match letter {
                        Letter::Client(fd, peer, tls) => self.welcome(fd, peer, tls),
                        Letter::Stop => self.stop(),
                    }
                }
                if let Some(buf) = end.buf {
                    self.streams.receive(self.bell, buf, 0..8, false, BELL);
                }
            }
            CLOCK => self.tick(),
            tag if tag & 1 == SEND => self.sent((tag >> 1) as u32, end),
            tag => self.received((tag >> 1) as u32, end),
        }
    }

    fn welcome(&mut self, fd: OwnedFd, peer: Peer, tls: TlsNeed) {
        let stream = match self.streams.add(fd) {
            Ok(stream) => stream,
            Err(error) => {
                tracing::warn!(%peer, %error, "a connection could not be taken");
                self.metrics.connections.fetch_sub(1, Ordering::Relaxed);
                return;
            }
        };
        tracing::debug!(%peer, "connected");
        let handshake = Handshake::new(Arc::clone(&self.desk.exports), tls);
        let mut conn = Connection::new(stream, peer, handshake, self.desk.now_ns, &mut self.desk.pool);
        conn.outbox.put(&Handshake::greeting(), &mut self.desk.pool);
        let number = self.connections.insert(conn);
        if self.stopping {
            self.drain(number);
        } else {
            self.go_on(number);
        }
        self.keep_ticking();
    }

    fn received(&mut self, number: u32, end: StreamEnd) {
        let Some(conn) = self.connections.get(number) else { return };
        conn.take_back(end.buf, end.pieces, &mut self.desk.pool);
        match end.result {
            // One that is to end is not listened to any more.
            _ if conn.state != State::Open => self.settle(number),
            // Many do, when they have nothing more to ask.
            Ok(0) if conn.share.requests == 0 && matches!(conn.phase, Phase::Transmission(_)) => self.drain(number),
            Ok(0) => self.left(number, "the client left without saying goodbye"),
            Err(error) => self.left(number, &loss(&error)),
            Ok(bytes) => match conn.received(bytes) {
                Ok(()) => self.go_on(number),
                Err(error) => {
                    // What TLS has to say to that still goes out.
                    self.metrics.broken.add(1);
                    tracing::warn!(peer = %conn.peer, %error, "TLS failed");
                    self.drain(number);
                }
            },
        }
    }

    /// Understands what has come, and asks for more.
    fn go_on(&mut self, number: u32) {
        let Some(conn) = self.connections.get(number) else { return };
        if conn.starts_tls && !conn.has_output() && !conn.outbox.is_sending() {
            conn.starts_tls = false;
            match self.settings.tls_session().and_then(|config| Secure::new(&config).map_err(io::Error::other)) {
                Ok(secure) => conn.secure = Some(Box::new(secure)),
                Err(error) => return self.lose(number, &format!("TLS cannot begin: {error}")),
            }
        }
        if let Err(departure) = self.understand(number) {
            return match departure {
                Departure::Goodbye => self.drain(number),
                Departure::Wire(_) | Departure::Handshake(_) | Departure::Queue(_) => {
                    self.metrics.broken.add(1);
                    self.lose(number, &departure.to_string());
                }
            };
        }
        let Some(conn) = self.connections.get(number) else { return };
        // Answers to options wait in memory, and a share counts requests only: so nobody is asked
        // for more options before he has taken the answers to the last.
        let must_listen = matches!(conn.phase, Phase::Handshake(_)) && (conn.has_output() || conn.outbox.is_sending());
        if std::mem::take(&mut conn.gives_way) {
            self.patient.push(number);
        } else if conn.stalled {
            self.stalled.push(number);
        } else if conn.state == State::Open && !conn.receiving && !conn.starts_tls && !must_listen {
            let mut pieces = conn.lend(&mut self.desk.pool);
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

    fn understand(&mut self, number: u32) -> Result<(), Departure> {
        let Some(conn) = self.connections.get(number) else { return Ok(()) };
        while conn.state == State::Open && !conn.starts_tls {
            match &mut conn.phase {
                Phase::Transmission(session) => {
                    let session = *session;
                    return self.desk.take_requests(conn, number, &session);
                }
                Phase::Handshake(handshake) => {
                    let mut answers = Vec::new();
                    let (used, next) = handshake.step(conn.window.bytes(), &mut answers)?;
                    conn.window.consume(used);
                    conn.outbox.put(&answers, &mut self.desk.pool);
                    match next {
                        Next::More => return Ok(()),
                        Next::StartTls => conn.starts_tls = true,
                        Next::Bye => return Err(Departure::Goodbye),
                        Next::Transmit(session) => {
                            conn.outbox.seal();
                            let export = self.settings.exports.get(session.export);
                            let queue = &mut self.desk.queues[session.export];
                            if queue.is_none() {
                                let ring = Some(&self.ring);
                                let options = QueueOptions { depth: QUEUE_DEPTH, ring, ..QueueOptions::default() };
                                let opened = contained(|| export.device.open_queue(&options));
                                let opened = Box::new(Contained::over(opened.map_err(Departure::Queue)?));
                                let held = Arc::clone(&self.metrics.held);
                                *queue = Some(Box::new(Reserve::over(opened, &self.ring, held)));
                            }
                            let tls = conn.secure.is_some();
                            tracing::info!(peer = %conn.peer, export = %export.name, tls, framing = ?session.framing, "serving");
                            if session.may_stray {
                                export.tell_of_strays(&conn.peer);
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
        let Some(conn) = self.connections.get(number) else { return };
        conn.to_send = false;
        if conn.state == State::Closing || conn.outbox.is_sending() || !conn.has_output() {
            return;
        }
        let mut pieces = conn.outbox.take();
        if let Some(secure) = &mut conn.secure {
            let mut sealed = Vec::with_capacity(pieces.len());
            let outcome = secure.seal(&mut pieces, &mut self.desk.pool, &mut sealed);
            conn.outbox.keep(pieces);
            pieces = sealed;
            if let Err(error) = outcome {
                let share = conn.outbox.sent(None, pieces, &mut self.desk.pool);
                conn.share.sub(share);
                return self.lose(number, &format!("TLS failed: {error}"));
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
                let share = conn.outbox.sent(None, pieces, &mut self.desk.pool);
                conn.share.sub(share);
            }
        }
    }

    fn sent(&mut self, number: u32, end: StreamEnd) {
        let Some(conn) = self.connections.get(number) else { return };
        let share = conn.outbox.sent(end.buf, end.pieces, &mut self.desk.pool);
        conn.share.sub(share);
        match end.result {
            Err(error) if conn.state != State::Closing => self.left(number, &loss(&error)),
            _ if conn.starts_tls || matches!(conn.phase, Phase::Handshake(_)) => self.go_on(number),
            _ => self.settle(number),
        }
    }

    /// Sees to it that what a connection has to say is said, and that it ends when it has come to
    /// its end.
    fn settle(&mut self, number: u32) {
        let Some(conn) = self.connections.get(number) else { return };
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
        let Some(conn) = self.connections.get(number) else { return };
        if conn.has_ended() {
            self.connections.remove(number);
            if self.connections.len() == 0 {
                self.desk.pool.trim();
            }
            self.metrics.connections.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Takes nothing more from a client, and closes when all is answered.
    fn drain(&mut self, number: u32) {
        let Some(conn) = self.connections.get(number) else { return };
        if conn.state == State::Open {
            (conn.state, conn.since_ns) = (State::Draining, self.desk.now_ns);
            conn.abandon_input(&mut self.desk.pool);
            self.keep_ticking();
        }
        self.settle(number);
    }

    /// Ends the connection of a client that has left. One that leaves during the handshake has
    /// looked at the list of exports, or only whether somebody listens (monitoring does): that is
    /// no fault, and is told at debug level.
    fn left(&mut self, number: u32, reason: &str) {
        let Some(conn) = self.connections.get(number) else { return };
        if matches!(conn.phase, Phase::Handshake(_)) && conn.state != State::Closing {
            tracing::debug!(peer = %conn.peer, reason, "left during the handshake");
            self.close(number);
        }
        self.lose(number, reason);
    }

    /// Ends a connection at once.
    fn lose(&mut self, number: u32, reason: &str) {
        let Some(conn) = self.connections.get(number) else { return };
        if conn.state != State::Closing {
            tracing::warn!(peer = %conn.peer, requests = conn.requests, reason, "the connection ended");
            self.close(number);
        }
        self.settle(number);
    }

    fn close(&mut self, number: u32) {
        let Some(conn) = self.connections.get(number) else { return };
        conn.state = State::Closing;
        conn.release(&mut self.desk.pool);
        self.streams.close(conn.stream);
        self.desk.abandon(number);
    }

    fn stop(&mut self) {
        self.stopping = true;
        for number in self.connections.numbers().collect::<Vec<_>>() {
            self.drain(number);
        }
    }

    fn keep_ticking(&mut self) {
        if !self.ticking {
            self.ticking = true;
            self.streams.timer(TICK, CLOCK);
        }
    }

    /// Ends those who take too long: to say what they want, or to take their last replies.
    fn tick(&mut self) {
        self.ticking = false;
        let now_ns = self.desk.now_ns;
        for number in self.connections.numbers().collect::<Vec<_>>() {
            let Some(conn) = self.connections.get(number) else { continue };
            let (limit, reason) = match (conn.state, &conn.phase) {
                (State::Draining, _) => (self.settings.drain_time, "the client did not take its last replies in time"),
                (State::Open, Phase::Handshake(_)) => {
                    (self.settings.handshake_time, "the client did not finish the handshake in time")
                }
                _ => continue,
            };
            if u128::from(now_ns.saturating_sub(conn.since_ns)) >= limit.as_nanos() {
                self.metrics.broken.add(1);
                self.lose(number, reason);
            } else {
                self.keep_ticking();
            }
        }
    }
}
