//! A running server: its front, its workers, its end.
//!
//! ```text
//!   start ─▶ front: accept, who is it, may he, ─▶ the worker with the fewest connections
//!   stop  ─▶ front closes the listeners ─▶ workers finish what is in flight ─▶ every writable disk is flushed
//! ```
//!
//! The front has a ring of its own and touches no disk.

use super::{
    Export, ExportError, Listener, Options,
    connection::Peer,
    export::Exports,
    listen::{Address, Leftover},
    post::{Letter, Post},
    settings::Settings,
    worker::Worker,
};
use crate::{contained::contained, metrics::Metrics};
use diskwright_store::{Blocking, EngineKind, IoBuf, SharedRing, StreamEnd, StreamId, Streams};
use rustix::net::sockopt;
use std::{
    io,
    net::SocketAddr,
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, atomic::Ordering, mpsc},
    thread::{self, JoinHandle},
    time::Duration,
};

/// Most workers that are started without being asked for.
const WORKERS_MAX: usize = 8;

/// After an accept that failed because something has run out.
const PAUSE: Duration = Duration::from_millis(200);

const BELL: u64 = u64::MAX;
/// The timer of a listener that pauses: its number and this.
const PAUSED: u64 = 1 << 32;

/// Why a server cannot start, or did not end well.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The exports.
    #[error(transparent)]
    Exports(#[from] ExportError),
    /// Nowhere.
    #[error("there is nowhere to listen; name an address with --nbd")]
    NoListener,
    /// A door that is too wide.
    #[error(
        "export {export:?} can be written, and {address} is TCP without TLS: anybody who can reach it could change the disk; use --read-only, --ephemeral, a unix socket, --tls-certificates, or, if you mean it, --insecure-writes"
    )]
    Insecure {
        /// The export.
        export: String,
        /// The address.
        address: Address,
    },
    /// No io_uring.
    #[error(
        "cannot set up the server's io_uring: {source}; the server needs one: see that io_uring is not switched off (sysctl kernel.io_uring_disabled, seccomp) and that the kernel is 5.11 or newer"
    )]
    Ring {
        /// Why.
        source: io::Error,
    },
    /// A thread.
    #[error("cannot start a thread of the server: {source}")]
    Thread {
        /// Why.
        source: io::Error,
    },
    /// A thread has come to a bad end.
    #[error("a thread of the server ended early: {what}; its clients were cut off")]
    Died {
        /// Why.
        what: String,
    },
    /// The last flush.
    #[error(
        "export {export:?} could not be flushed at the end: {source}; what clients wrote since their last flush may be lost"
    )]
    Flush {
        /// The export.
        export: String,
        /// Why.
        source: io::Error,
    },
}

/// See the module.
#[derive(Debug)]
pub struct NbdServer {
    addresses: Vec<Address>,
    settings: Arc<Settings>,
    metrics: Arc<Metrics>,
    front: Option<(Arc<Post>, JoinHandle<io::Result<()>>)>,
    workers: Vec<(Arc<Post>, JoinHandle<io::Result<()>>)>,
}

impl NbdServer {
    /// Starts to serve `exports` on `listeners`. The disks' own opening and closing are the
    /// caller's.
    ///
    /// # Errors
    /// [`ServeError`].
    pub fn start(exports: Vec<Export>, listeners: Vec<Listener>, options: Options) -> Result<Self, ServeError> {
        if listeners.is_empty() {
            return Err(ServeError::NoListener);
        }
        let exports = Exports::new(exports)?;
        let insecure = options.tls.is_none() && !options.insecure_writes;
        if let (true, Some(listener), Some(export)) = (
            insecure,
            listeners.iter().find(|listener| listener.is_tcp()),
            exports.iter().find(|one| one.is_writable()),
        ) {
            return Err(ServeError::Insecure { export: export.name.clone(), address: listener.address().clone() });
        }
        let count = match options.workers {
            0 => thread::available_parallelism().map_or(1, usize::from).min(WORKERS_MAX),
            asked => asked,
        };
        let metrics = Arc::new(Metrics::new(count));
        let settings = Arc::new(Settings::new(exports, options));
        let addresses = listeners.iter().map(|listener| listener.address().clone()).collect();
        let mut server = Self {
            addresses,
            settings: Arc::clone(&settings),
            metrics: Arc::clone(&metrics),
            front: None,
            workers: Vec::new(),
        };
        for index in 0..count {
            let (settings, metrics) = (Arc::clone(&settings), Arc::clone(metrics.worker(index)));
            let make = move |post| Worker::new(settings, post, metrics);
            server.workers.push(spawn(&format!("nbd-{index}"), make, Worker::run)?);
        }
        let posts = server.workers.iter().map(|(post, _)| Arc::clone(post)).collect();
        let make = move |post| Front::new(listeners, post, posts, settings, metrics);
        server.front = Some(spawn("nbd-front", make, Front::run)?);
        Ok(server)
    }

    /// Where it listens.
    pub fn addresses(&self) -> &[Address] {
        &self.addresses
    }

    /// What it counts.
    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.metrics
    }

    /// Uses these certificates for connections that come from now on.
    pub fn set_tls(&self, config: Arc<rustls::ServerConfig>) {
        self.settings.set_tls(config);
    }

    /// Whether all its threads are alive.
    pub fn is_well(&self) -> bool {
        self.front.iter().chain(&self.workers).all(|(_, thread)| !thread.is_finished())
    }

    /// Accepts nothing more, finishes what is in flight, flushes, and ends.
    ///
    /// # Errors
    /// [`ServeError::Died`] and [`ServeError::Flush`], the first of them; everything is tried all
    /// the same.
    pub fn stop(mut self) -> Result<(), ServeError> {
        let ended = self.end_threads();
        let mut flushed = Ok(());
        for export in self.settings.exports.iter().filter(|export| export.is_writable()) {
            let flush = contained(|| Blocking::open(export.device.as_ref(), EngineKind::Auto)?.flush());
            if let Err(source) = flush {
                flushed = flushed.and(Err(ServeError::Flush { export: export.name.clone(), source }));
            }
        }
        ended.and(flushed)
    }

    fn end_threads(&mut self) -> Result<(), ServeError> {
        let mut outcome = Ok(());
        // The front first, so that no client comes to a worker that has gone.
        if let Some((post, thread)) = self.front.take() {
            outcome = outcome.and(join(&post, thread));
        }
        self.workers.iter().for_each(|(post, _)| post.put(Letter::Stop));
        for (post, thread) in self.workers.drain(..) {
            outcome = outcome.and(join(&post, thread));
        }
        outcome
    }
}

impl Drop for NbdServer {
    fn drop(&mut self) {
        // Whoever must know how it ended calls `stop`.
        let _ = self.end_threads();
    }
}

fn join(post: &Post, thread: JoinHandle<io::Result<()>>) -> Result<(), ServeError> {
    post.put(Letter::Stop);
    let what = match thread.join() {
        Ok(Ok(())) => return Ok(()),
        Ok(Err(error)) => error.to_string(),
        Err(_) => "it panicked".into(),
    };
    Err(ServeError::Died { what })
}

/// Starts a thread, and waits until it has made what it will run: rings belong to the thread that
/// made them.
fn spawn<T>(
    name: &str,
    make: impl FnOnce(Arc<Post>) -> io::Result<T> + Send + 'static,
    run: impl FnOnce(T) -> io::Result<()> + Send + 'static,
) -> Result<(Arc<Post>, JoinHandle<io::Result<()>>), ServeError> {
    let post = Arc::new(Post::new().map_err(|source| ServeError::Thread { source })?);
    let (tell, told) = mpsc::sync_channel(1);
    let theirs = Arc::clone(&post);
    let thread = thread::Builder::new()
        .name(name.to_owned())
        .spawn(move || {
            let made = match make(theirs) {
                Ok(made) => made,
                Err(error) => {
                    let _ = tell.send(Err(error));
                    return Ok(());
                }
            };
            let _ = tell.send(Ok(()));
            run(made).inspect_err(|error| tracing::error!(%error, "a thread of the server failed"))
        })
        .map_err(|source| ServeError::Thread { source })?;
    match told.recv() {
        Ok(Ok(())) => Ok((post, thread)),
        Ok(Err(source)) => Err(ServeError::Ring { source }),
        Err(_) => Err(ServeError::Died { what: "it panicked while it was starting".into() }),
    }
}

#[derive(Debug)]
struct Door {
    stream: StreamId,
    is_tcp: bool,
    /// Removed when the door is.
    _leftover: Leftover,
}

#[derive(Debug)]
struct Front {
    streams: Streams,
    ring: SharedRing,
    doors: Vec<Door>,
    post: Arc<Post>,
    workers: Vec<Arc<Post>>,
    settings: Arc<Settings>,
    metrics: Arc<Metrics>,
}

impl Front {
    fn new(
        listeners: Vec<Listener>,
        post: Arc<Post>,
        workers: Vec<Arc<Post>>,
        settings: Arc<Settings>,
        metrics: Arc<Metrics>,
    ) -> io::Result<Self> {
        let ring = SharedRing::new(16, None)?;
        let mut streams = Streams::new(&ring);
        let bell = streams.add(post.bell()?)?;
        streams.receive(bell, IoBuf::new(8), 0..8, false, BELL);
        let mut doors = Vec::new();
        for listener in listeners {
            let is_tcp = listener.is_tcp();
            let (fd, leftover) = listener.into_parts();
            let stream = streams.add(fd)?;
            streams.accept(stream, doors.len() as u64);
            doors.push(Door { stream, is_tcp, _leftover: leftover });
        }
        Ok(Self { streams, ring, doors, post, workers, settings, metrics })
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
                    BELL => {
                        if self.post.take().iter().any(|letter| matches!(letter, Letter::Stop)) {
                            return Ok(());
                        }
                    }
                    tag if tag & PAUSED != 0 => {
                        let number = tag & !PAUSED;
                        self.streams.accept(self.doors[number as usize].stream, number);
                    }
                    tag => self.knocked(tag, end),
                }
            }
        }
    }

    fn knocked(&mut self, number: u64, end: StreamEnd) {
        let door = &self.doors[number as usize];
        match (end.accepted, end.result) {
            (Some(fd), _) => self.admit(fd, door.is_tcp),
            (None, result) => {
                let error = result.err().unwrap_or_else(|| io::Error::other("no descriptor came with it"));
                tracing::warn!(%error, "a connection could not be accepted");
                if error.kind() != io::ErrorKind::ConnectionAborted {
                    return self.streams.timer(PAUSE, PAUSED | number);
                }
            }
        }
        let stream = self.doors[number as usize].stream;
        self.streams.accept(stream, number);
    }

    fn admit(&self, fd: OwnedFd, on_tcp: bool) {
        let peer = match peer_of(&fd, on_tcp) {
            Ok(peer) => peer,
            // It has gone again.
            Err(error) => return tracing::debug!(%error, "a connection ended before it began"),
        };
        if let Peer::Tcp(address) = &peer
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
            return tracing::warn!(%peer, limit, "refused: there are as many connections as may be");
        }
        self.metrics.accepted.add(1);
        self.metrics.worker(index).connections.fetch_add(1, Ordering::Relaxed);
        self.workers[index].put(Letter::Client(fd, peer, self.settings.tls_need(on_tcp)));
    }
}

fn peer_of(fd: &OwnedFd, on_tcp: bool) -> io::Result<Peer> {
    if !on_tcp {
        let found = sockopt::socket_peercred(fd.as_fd()).ok();
        return Ok(Peer::Unix(found.map(|found| (found.pid.as_raw_nonzero().get(), found.uid.as_raw()))));
    }
    // Small replies go out at once; a client whose machine has died is noticed some day.
    sockopt::set_tcp_nodelay(fd, true)?;
    sockopt::set_socket_keepalive(fd, true)?;
    let address = rustix::net::getpeername(fd)?.ok_or_else(|| io::Error::other("it has no address"))?;
    Ok(Peer::Tcp(SocketAddr::try_from(address)?))
}
