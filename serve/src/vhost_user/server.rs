//! A running vhost-user-blk device: start, connections, stop.
//!
//! ```text
//!   start ─▶ workers (one for each virtqueue) ─▶ front thread: accept ─▶ messages ─▶ device.rs
//!   stop  ─▶ the front ends its connection: rings stop, requests in flight are finished
//!         ─▶ workers end ─▶ a writable disk is flushed
//! ```
//!
//! A device has one front-end at a time. Another one that connects waits until the first has gone.
//! The front thread waits for a ring to stop, which takes as long as the disk needs for the
//! requests in flight. It flushes the disk when a connection ends with requests at risk
//! (`risk.rs`), and when the cache is switched off.

use super::{
    channel::{Channel, ReceiveError, Received},
    device::{Device, Reply},
    risk::Risk,
    session::{DeviceFacts, IDENTITY_BYTES},
    wire,
    worker::{ToFront, ToWorker, Worker},
};
use crate::{
    ThreadError,
    inbox::Inbox,
    metrics::Metrics,
    net::{Address, Listener, SocketFile},
    panic_guard::catch_panic,
    reservations::ReservationTable,
    threads::ServerThread,
};
use diskwright_store::{BlockDevice, Blocking, EngineKind, resize::SizeWatcher};
use rustix::{
    event::{PollFd, PollFlags},
    io::Errno,
};
use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, atomic::Ordering},
    thread,
    time::Duration,
};

/// Maximum number of virtqueues.
pub const QUEUES_MAX: u16 = 64;

/// Pause after a failed accept.
const PAUSE: Duration = Duration::from_millis(200);

/// Options of a [`VhostUserServer`].
#[derive(Debug, Clone)]
pub struct VhostUserOptions {
    /// Name of the disk, for the log. Its first 20 bytes are the serial number that the guest sees.
    pub name: String,
    /// Number of virtqueues, each with a thread: at least 1, at most [`QUEUES_MAX`].
    pub queues: u16,
    /// Whether all writes are dropped when the server ends. A front-end that comes back to another
    /// server has lost them then, whether it has flushed or not.
    pub is_ephemeral: bool,
    /// The reservations of the disks. The guest is refused what others have reserved.
    pub reservations: Arc<ReservationTable>,
}

/// Why a device could not start, or did not stop cleanly.
#[derive(Debug, thiserror::Error)]
pub enum VhostUserError {
    /// The address is not a unix socket.
    #[error("{address}: a vhost-user device listens on a unix socket, because memory and descriptors are passed")]
    NotUnix {
        /// The address.
        address: Address,
    },
    /// The number of queues is not valid.
    #[error("{found} queues: a device has at least 1 and at most {QUEUES_MAX}")]
    Queues {
        /// The number.
        found: u16,
    },
    /// A thread could not be started, or ended early.
    #[error(transparent)]
    Thread(#[from] ThreadError),
    /// The flush at the end failed.
    #[error(
        "disk {name:?} could not be flushed when the server stopped: {source}; writes since the guest's last flush may be lost"
    )]
    Flush {
        /// The disk's name.
        name: String,
        /// The cause.
        source: io::Error,
    },
}

/// A running device. Dropping it stops its threads without the last flush; see
/// [`VhostUserServer::stop`].
#[derive(Debug)]
pub struct VhostUserServer {
    address: Address,
    name: String,
    disk: Arc<dyn BlockDevice>,
    metrics: Arc<Metrics>,
    front: Option<ServerThread<ToFront>>,
    workers: Vec<ServerThread<ToWorker>>,
    _watcher: SizeWatch,
}

impl VhostUserServer {
    /// Starts to serve `disk` on a unix socket. The caller opens the disk before and closes it
    /// after.
    ///
    /// # Errors
    /// [`VhostUserError`].
    pub fn start(
        disk: Arc<dyn BlockDevice>,
        listener: Listener,
        options: VhostUserOptions,
    ) -> Result<Self, VhostUserError> {
        let VhostUserOptions { name, queues, is_ephemeral, reservations } = options;
        let address = listener.address().clone();
        if listener.is_tcp() {
            return Err(VhostUserError::NotUnix { address });
        }
        if queues == 0 || queues > QUEUES_MAX {
            return Err(VhostUserError::Queues { found: queues });
        }
        let mut identity = [0; IDENTITY_BYTES];
        identity.iter_mut().zip(name.bytes()).for_each(|(to, from)| *to = from);
        let risk = Arc::new(Risk::new(Arc::clone(&disk), is_ephemeral, queues));
        let reservations = reservations.of(&name);
        let facts = DeviceFacts { name: name.as_str().into(), identity, cache: Arc::default(), risk, reservations };
        let metrics = Metrics::new("vhost_user", queues.into());
        let socket = match &address {
            Address::Unix(path) => path.to_string_lossy().into_owned(),
            tcp => tcp.to_string(),
        };
        let metrics = Arc::new(metrics.labelled("disk", &name).labelled("socket", &socket));
        let to_front = ServerThread::new_inbox()?;
        let watcher: Arc<SizeWatcher> = {
            let to_front = Arc::clone(&to_front);
            Arc::new(move |_| to_front.put(ToFront::Resized))
        };
        disk.watch_size(&watcher);
        let mut server = Self {
            address,
            name,
            disk,
            metrics: Arc::clone(&metrics),
            front: None,
            workers: Vec::new(),
            _watcher: SizeWatch(watcher),
        };
        for index in 0..usize::from(queues) {
            let (disk, facts, to_front) = (Arc::clone(&server.disk), facts.clone(), Arc::clone(&to_front));
            let metrics = Arc::clone(metrics.worker(index));
            let make = move |inbox| Worker::new(index, disk, facts, to_front, inbox, metrics);
            server.workers.push(ServerThread::start(&format!("vhost-{index}"), make, Worker::run)?);
        }
        let inboxes: Vec<_> = server.workers.iter().map(|worker| Arc::clone(worker.inbox())).collect();
        let (disk, metrics) = (Arc::clone(&server.disk), Arc::clone(&server.metrics));
        let front_of = move |inbox| {
            let (listener, leftover) = listener.into_parts();
            let name = Arc::clone(&facts.name);
            Ok(Front {
                listener,
                _leftover: leftover,
                inbox,
                disk,
                facts,
                name,
                metrics,
                workers: inboxes,
                connection: None,
            })
        };
        server.front = Some(ServerThread::start_with(to_front, "vhost-front", front_of, Front::run)?);
        Ok(server)
    }

    /// The socket.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// The server's counters. A connection is a ring that is served.
    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.metrics
    }

    /// Whether all threads of the server are running.
    pub fn is_well(&self) -> bool {
        self.front.iter().all(|front| !front.is_finished()) && self.workers.iter().all(|worker| !worker.is_finished())
    }

    /// Ends the connection, finishes the requests in flight, ends the threads, and flushes a
    /// writable disk.
    ///
    /// # Errors
    /// [`VhostUserError::Thread`] or [`VhostUserError::Flush`]: the first error. All steps are done
    /// even after an error.
    pub fn stop(mut self) -> Result<(), VhostUserError> {
        let ended = self.end_threads().map_err(VhostUserError::from);
        if self.disk.geometry().read_only {
            return ended;
        }
        let flushed = catch_panic(|| Blocking::open(self.disk.as_ref(), EngineKind::Auto)?.flush());
        ended.and(flushed.map_err(|source| VhostUserError::Flush { name: self.name.clone(), source }))
    }

    fn end_threads(&mut self) -> Result<(), ThreadError> {
        let mut outcome = Ok(());
        if let Some(front) = self.front.take() {
            outcome = outcome.and(front.end(ToFront::Stop));
        }
        for worker in self.workers.drain(..) {
            outcome = outcome.and(worker.end(ToWorker::Exit));
        }
        outcome
    }
}

impl Drop for VhostUserServer {
    fn drop(&mut self) {
        // Callers that need the result call `stop`.
        let _ = self.end_threads();
    }
}

/// Keeps the watcher of the disk's size.
struct SizeWatch(#[expect(dead_code, reason = "held, not read")] Arc<SizeWatcher>);

impl std::fmt::Debug for SizeWatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SizeWatch")
    }
}

struct Connection {
    channel: Channel,
    device: Device,
}

struct Front {
    listener: OwnedFd,
    /// Removes the socket's file when dropped.
    _leftover: SocketFile,
    inbox: Arc<Inbox<ToFront>>,
    disk: Arc<dyn BlockDevice>,
    facts: DeviceFacts,
    name: Arc<str>,
    metrics: Arc<Metrics>,
    workers: Vec<Arc<Inbox<ToWorker>>>,
    connection: Option<Connection>,
}

impl Front {
    fn run(mut self) -> io::Result<()> {
        let wakeup = self.inbox.wakeup()?;
        loop {
            let (woken, ready) = {
                let from = match &self.connection {
                    Some(connection) => connection.channel.fd(),
                    None => self.listener.as_fd(),
                };
                let mut fds = [PollFd::new(&wakeup, PollFlags::IN), PollFd::from_borrowed_fd(from, PollFlags::IN)];
                match rustix::event::poll(&mut fds, None) {
                    Ok(_) => (!fds[0].revents().is_empty(), !fds[1].revents().is_empty()),
                    Err(Errno::INTR) => continue,
                    Err(errno) => return Err(errno.into()),
                }
            };
            if woken {
                let _ = rustix::io::read(&wakeup, &mut [0; 8]);
                for message in self.inbox.take() {
                    match message {
                        ToFront::Stop => {
                            self.end_connection("the server stops");
                            return Ok(());
                        }
                        ToFront::Broken { ring, reason } => self.broken(ring, &reason),
                        ToFront::Resized => {
                            let told = self.connection.as_ref().is_some_and(|one| one.device.tell_of_change());
                            tracing::info!(disk = %self.name, told, "the size of the disk has changed");
                        }
                    }
                }
            }
            match (ready, self.connection.is_some()) {
                (false, _) => {}
                (true, true) => self.receive(),
                (true, false) => self.accept(),
            }
        }
    }

    fn accept(&mut self) {
        let flags = rustix::net::SocketFlags::CLOEXEC;
        match rustix::net::accept_with(&self.listener, flags) {
            Ok(socket) => {
                tracing::info!(disk = %self.name, "a front-end connected");
                self.metrics.accepted.add(1);
                let device = Device::new(Arc::clone(&self.disk), self.facts.clone(), self.workers.clone());
                self.connection = Some(Connection { channel: Channel::new(socket), device });
            }
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => {}
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                thread::sleep(PAUSE);
            }
        }
    }

    fn receive(&mut self) {
        let Some(Connection { channel, device }) = &mut self.connection else { return };
        let received = match channel.receive() {
            Ok(Some(received)) => received,
            Ok(None) => return,
            Err(error @ ReceiveError::Disconnected) => {
                return self.end_connection(&error.to_string());
            }
            Err(error) => return self.broken_off(&error.to_string()),
        };
        let Received { code, needs_reply, message } = received;
        let acknowledges = needs_reply && device.acknowledges();
        let followed = device.follow(message);
        let sent = match &followed {
            Ok(Reply::Number(value)) => channel.send(&wire::reply(code, &value.to_ne_bytes()), None),
            Ok(Reply::Body(body)) => channel.send(&wire::reply(code, body), None),
            Ok(Reply::BodyWith(body, fd)) => channel.send(&wire::reply(code, body), Some(fd.as_fd())),
            result if acknowledges => channel.send(&wire::reply(code, &u64::from(result.is_err()).to_ne_bytes()), None),
            _ => Ok(()),
        };
        match (followed, sent) {
            (Err(error), _) => self.broken_off(&format!("message {code}: {error}")),
            (Ok(_), Err(error)) => self.broken_off(&format!("a reply could not be sent: {error}")),
            (Ok(_), Ok(())) => {}
        }
    }

    /// Ends the connection of a guest whose ring is damaged.
    fn broken(&mut self, ring: usize, reason: &str) {
        if let Some(connection) = &self.connection {
            connection.device.signal_error(ring);
            self.broken_off(&format!("queue {ring}: {reason}"));
        }
    }

    /// Ends the connection of a front-end that made a mistake.
    fn broken_off(&mut self, reason: &str) {
        self.metrics.worker(0).broken.add(1);
        tracing::warn!(disk = %self.name, reason, "the connection ended");
        self.end_connection(reason);
    }

    fn end_connection(&mut self, reason: &str) {
        let Some(mut connection) = self.connection.take() else { return };
        if let Err(error) = connection.device.end() {
            tracing::error!(disk = %self.name, %error, "a queue did not stop");
        }
        for index in 0..self.workers.len() {
            self.metrics.worker(index).connections.store(0, Ordering::Relaxed);
        }
        // What the workers said about the connection that has ended is about no later one.
        self.forget_broken();
        tracing::info!(disk = %self.name, reason, "the front-end is gone");
    }

    fn forget_broken(&self) {
        for message in self.inbox.take() {
            if !matches!(message, ToFront::Broken { .. }) {
                self.inbox.put(message);
            }
        }
    }
}
