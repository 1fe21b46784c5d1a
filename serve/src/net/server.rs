//! A running server: start, accept, stop. It is the same for all protocols of the network.
//!
//! ```text
//!   start ─▶ front thread: accept, check the address and the limit ─▶ the worker with the fewest
//!                                                                     connections
//!   stop  ─▶ the front closes the listeners ─▶ workers finish the requests in flight
//!         ─▶ every writable disk is flushed
//! ```
//!
//! The front thread has a ring of its own and does no disk I/O.

use super::{
    Export, ExportError, Listener, ServerOptions,
    core::Protocol,
    exports::Exports,
    listen::{Address, SocketFile},
    peer::Peer,
    settings::Settings,
    worker::{Message, Worker},
};
use crate::{
    inbox::Inbox,
    metrics::Metrics,
    panic_guard::catch_panic,
    threads::{ServerThread, ThreadError},
};
use diskwright_store::{Blocking, EngineKind, IoBuf, RateLimits, SharedRing, StreamEnd, StreamId, Streams};
use std::{
    io,
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::Ordering,
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::Duration,
};

/// Maximum number of workers that are started by default.
const WORKERS_MAX: usize = 8;

/// Interval at which a change of the exports looks whether all workers are alive.
const PATIENCE: Duration = Duration::from_secs(1);

/// Pause after a failed accept, when descriptors or memory have probably run out.
const PAUSE: Duration = Duration::from_millis(200);

const WAKEUP: u64 = u64::MAX;
/// Bit of the tag of the timer of a listener that pauses; the other bits are the listener's index.
const PAUSED: u64 = 1 << 32;

/// Why a server could not start, or did not stop cleanly.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The list of exports is invalid.
    #[error(transparent)]
    Exports(#[from] ExportError),
    /// There are no listeners.
    #[error("there is no address to listen on; name at least one")]
    NoListener,
    /// The name of the server is not valid in its protocol.
    #[error("{name:?} is not a valid name: {reason}; choose another name")]
    Name {
        /// The name.
        name: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The secret of a host is not a key.
    #[error("the secret of {name:?} is not a key of NVMe (DHHC-1:HH:BASE64:); make one with nvme gen-dhchap-key")]
    Secret {
        /// Whose it is.
        name: String,
    },
    /// The protocol has no TLS here.
    #[error("this protocol is served without TLS only; leave out `ServerOptions::tls`")]
    NoTls,
    /// Writable exports on TCP need TLS, unless [`ServerOptions::insecure_writes`] is set.
    #[error(
        "export {export:?} is writable, and {address} is TCP without TLS or authentication: every program that can reach the address could change the disk; make the export read-only, {how_to_allow}"
    )]
    Insecure {
        /// The export.
        export: String,
        /// The address.
        address: Address,
        /// What else helps.
        how_to_allow: &'static str,
    },
    /// A thread could not be started, or ended early.
    #[error(transparent)]
    Thread(#[from] ThreadError),
    /// There is no such export.
    #[error("no export has the name {name:?}")]
    NotServed {
        /// The name.
        name: String,
    },
    /// The flush at the end failed.
    #[error(
        "export {export:?} could not be flushed when the server stopped: {source}; writes since the clients' last flush may be lost"
    )]
    Flush {
        /// The export.
        export: String,
        /// The cause.
        source: io::Error,
    },
}

/// A running server. Dropping it stops its threads without the last flush; see [`Server::stop`].
#[derive(Debug)]
pub struct Server {
    addresses: Vec<Address>,
    settings: Arc<Settings>,
    metrics: Arc<Metrics>,
    /// An address at which no export may be writable.
    read_only_at: Option<Address>,
    how_to_allow: &'static str,
    /// Held while the exports change.
    changing: Mutex<()>,
    front: Option<ServerThread<Message>>,
    workers: Vec<ServerThread<Message>>,
}

impl Server {
    /// Starts to serve `exports` by a protocol on `listeners`. The caller opens the disks before
    /// and closes them after.
    ///
    /// # Errors
    /// [`ServeError`].
    pub(crate) fn start<P: Protocol>(
        shared: P::Shared,
        exports: Vec<Export>,
        listeners: Vec<Listener>,
        options: ServerOptions,
    ) -> Result<Self, ServeError> {
        if listeners.is_empty() {
            return Err(ServeError::NoListener);
        }
        let exports = Exports::new(exports)?;
        let authenticates = P::AUTHENTICATES && options.secrets.is_some();
        let insecure = options.tls.is_none() && !authenticates && !options.insecure_writes;
        let tcp = listeners.iter().find(|listener| listener.is_tcp());
        let read_only_at = tcp.filter(|_| insecure).map(|listener| listener.address().clone());
        exports.iter().try_for_each(|export| check_writes(export, read_only_at.as_ref(), P::HOW_TO_ALLOW_WRITES))?;
        let count = match options.workers {
            0 => thread::available_parallelism().map_or(1, usize::from).min(WORKERS_MAX),
            asked => asked,
        };
        let metrics = Arc::new(Metrics::new(P::NAME, count));
        let settings = Arc::new(Settings::new(exports, options));
        let shared = Arc::new(shared);
        let addresses = listeners.iter().map(|listener| listener.address().clone()).collect();
        let mut server = Self {
            addresses,
            settings: Arc::clone(&settings),
            metrics: Arc::clone(&metrics),
            read_only_at,
            how_to_allow: P::HOW_TO_ALLOW_WRITES,
            changing: Mutex::new(()),
            front: None,
            workers: Vec::new(),
        };
        for index in 0..count {
            let (settings, shared) = (Arc::clone(&settings), Arc::clone(&shared));
            let metrics = Arc::clone(metrics.worker(index));
            let make = move |inbox| Worker::<P>::new(settings, shared, inbox, metrics);
            server.workers.push(ServerThread::start(&format!("{}-{index}", P::NAME), make, Worker::run)?);
        }
        let inboxes = server.workers.iter().map(|worker| Arc::clone(worker.inbox())).collect();
        let make = move |inbox| Front::new(listeners, inbox, inboxes, settings, metrics);
        server.front = Some(ServerThread::start(&format!("{}-front", P::NAME), make, Front::run)?);
        Ok(server)
    }

    /// The addresses that the server listens on, with the actual ports.
    pub fn addresses(&self) -> &[Address] {
        &self.addresses
    }

    /// The server's counters.
    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.metrics
    }

    /// Uses these certificates for all connections accepted from now on.
    pub fn set_tls(&self, config: Arc<rustls::ServerConfig>) {
        self.settings.set_tls(config);
    }

    /// Limits all connections accepted from now on.
    pub fn set_client_limits(&self, limits: RateLimits) {
        self.settings.set_client_limits(limits);
    }

    /// Serves another export, to clients that are in their handshake or connect later.
    ///
    /// # Errors
    /// [`ServeError::Exports`], [`ServeError::Insecure`].
    pub fn add(&self, export: Export) -> Result<(), ServeError> {
        let _turn = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        check_writes(&export, self.read_only_at.as_ref(), self.how_to_allow)?;
        let exports = self.settings.exports().with(export)?;
        self.publish(exports);
        Ok(())
    }

    /// Ends an export: new clients do not find it, requests in flight are finished, its clients are
    /// disconnected, and a writable disk is flushed. Then the server has no reference to the disk.
    /// Waits for clients to receive their last replies, at most [`ServerOptions::drain_time`].
    ///
    /// # Errors
    /// [`ServeError::NotServed`]; [`ServeError::Flush`], after which the export has ended all the
    /// same.
    pub fn remove(&self, name: &str) -> Result<(), ServeError> {
        let _turn = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let found = self.settings.exports().with_leaving(name);
        let (exports, export) = found.ok_or_else(|| ServeError::NotServed { name: name.to_owned() })?;
        self.publish(exports);
        self.publish(self.settings.exports().without_leaving());
        flush(&export)
    }

    /// Passes other exports to the workers, and waits until each uses them and no client has one
    /// that is leaving.
    fn publish(&self, exports: Exports) {
        let exports = Arc::new(exports);
        self.settings.set_exports(Arc::clone(&exports));
        let (tell, told) = mpsc::channel();
        for worker in &self.workers {
            worker.inbox().put(Message::Exports(Arc::clone(&exports), tell.clone()));
        }
        drop(tell);
        // Each worker drops its sender. One that has died does not.
        while told.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) && self.is_well() {}
    }

    /// Whether all threads of the server are running.
    pub fn is_well(&self) -> bool {
        self.front.iter().chain(&self.workers).all(|thread| !thread.is_finished())
    }

    /// Stops accepting, finishes the requests in flight, flushes all writable exports, and ends the
    /// threads.
    ///
    /// # Errors
    /// [`ServeError::Thread`] or [`ServeError::Flush`]: the first error. All steps are done even
    /// after an error.
    pub fn stop(mut self) -> Result<(), ServeError> {
        let ended = self.end_threads();
        let mut flushed = Ok(());
        for export in self.settings.exports().iter() {
            flushed = flushed.and(flush(export));
        }
        ended.map_err(ServeError::from).and(flushed)
    }

    fn end_threads(&mut self) -> Result<(), ThreadError> {
        let mut outcome = Ok(());
        // The front ends first, so that no client is passed to a worker that has ended.
        if let Some(front) = self.front.take() {
            outcome = outcome.and(front.end(Message::Stop));
        }
        self.workers.iter().for_each(|worker| worker.inbox().put(Message::Stop));
        for worker in self.workers.drain(..) {
            outcome = outcome.and(worker.end(Message::Stop));
        }
        outcome
    }
}

/// Refuses a writable export where an address is open to everyone.
fn check_writes(export: &Export, read_only_at: Option<&Address>, how_to_allow: &'static str) -> Result<(), ServeError> {
    match read_only_at {
        Some(address) if export.is_writable() => {
            Err(ServeError::Insecure { export: export.name.clone(), address: address.clone(), how_to_allow })
        }
        _ => Ok(()),
    }
}

/// Flushes an export that clients may write to.
fn flush(export: &Export) -> Result<(), ServeError> {
    if !export.is_writable() {
        return Ok(());
    }
    let flushed = catch_panic(|| Blocking::open(export.device.as_ref(), EngineKind::Auto)?.flush());
    flushed.map_err(|source| ServeError::Flush { export: export.name.clone(), source })
}

impl Drop for Server {
    fn drop(&mut self) {
        // Callers that need the result call `stop`.
        let _ = self.end_threads();
    }
}

#[derive(Debug)]
struct Acceptor {
    stream: StreamId,
    is_tcp: bool,
    /// Removes the socket's file when dropped.
    _leftover: SocketFile,
}

#[derive(Debug)]
struct Front {
    streams: Streams,
    ring: SharedRing,
    acceptors: Vec<Acceptor>,
    inbox: Arc<Inbox<Message>>,
    workers: Vec<Arc<Inbox<Message>>>,
    settings: Arc<Settings>,
    metrics: Arc<Metrics>,
}

impl Front {
    fn new(
        listeners: Vec<Listener>,
        inbox: Arc<Inbox<Message>>,
        workers: Vec<Arc<Inbox<Message>>>,
        settings: Arc<Settings>,
        metrics: Arc<Metrics>,
    ) -> io::Result<Self> {
        let ring = SharedRing::new(16, None)?;
        let mut streams = Streams::new(&ring);
        let wakeup = streams.add(inbox.wakeup()?)?;
        streams.receive(wakeup, IoBuf::new(8), 0..8, false, WAKEUP);
        let mut acceptors = Vec::new();
        for listener in listeners {
            let is_tcp = listener.is_tcp();
            let (fd, leftover) = listener.into_parts();
            let stream = streams.add(fd)?;
            streams.accept(stream, acceptors.len() as u64);
            acceptors.push(Acceptor { stream, is_tcp, _leftover: leftover });
        }
        Ok(Self { streams, ring, acceptors, inbox, workers, settings, metrics })
    }

    fn run(mut self) -> io::Result<()> {
        let mut ends = Vec::new();
        loop {
            self.streams.reap(&mut ends);
            if ends.is_empty() {
                self.ring.wait()?;
                continue;
            }
            for end in ends.drain(..) {
                match end.tag {
                    WAKEUP => {
                        if self.inbox.take().iter().any(|message| matches!(message, Message::Stop)) {
                            return Ok(());
                        }
                    }
                    tag if tag & PAUSED != 0 => {
                        let number = tag & !PAUSED;
                        self.streams.accept(self.acceptors[number as usize].stream, number);
                    }
                    tag => self.accept_ended(tag, end),
                }
            }
        }
    }

    fn accept_ended(&mut self, number: u64, end: StreamEnd) {
        let acceptor = &self.acceptors[number as usize];
        match (end.accepted, end.result) {
            (Some(fd), _) => self.admit(fd, acceptor.is_tcp),
            (None, result) => {
                let error = result.err().unwrap_or_else(|| io::Error::other("the accept returned no descriptor"));
                tracing::warn!(%error, "cannot accept a connection");
                if error.kind() != io::ErrorKind::ConnectionAborted {
                    return self.streams.timer(PAUSE, PAUSED | number);
                }
            }
        }
        let stream = self.acceptors[number as usize].stream;
        self.streams.accept(stream, number);
    }

    fn admit(&self, fd: OwnedFd, on_tcp: bool) {
        let peer = match Peer::of(&fd, on_tcp) {
            Ok(peer) => peer,
            // The client has disconnected already.
            Err(error) => return tracing::debug!(%error, "a client disconnected before its connection was accepted"),
        };
        if let Peer::Tcp { address, .. } = &peer
            && !self.settings.allows(address.ip())
        {
            self.metrics.refused.add(1);
            return tracing::warn!(%peer, "refused: the address is not on the allow-list");
        }
        let load = |index: &usize| self.metrics.worker(*index).connections.load(Ordering::Relaxed);
        let there: i64 = (0..self.workers.len()).map(|index| load(&index)).sum();
        let Some(index) = (0..self.workers.len()).min_by_key(load) else { return };
        if there >= self.settings.connections_max as i64 {
            self.metrics.refused.add(1);
            let limit = self.settings.connections_max;
            return tracing::warn!(%peer, limit, "refused: the maximum number of connections is reached");
        }
        self.metrics.accepted.add(1);
        self.metrics.worker(index).connections.fetch_add(1, Ordering::Relaxed);
        self.workers[index].put(Message::Client(fd, peer, self.settings.tls_need(on_tcp)));
    }
}
