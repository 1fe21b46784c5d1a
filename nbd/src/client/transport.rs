//! A non-blocking connection: a socket, with or without TLS.
//!
//! ```text
//!   send(slices) ─▶ [rustls ─▶] socket      recv(slices) ◀─ [rustls ◀─ 64 KiB buffer ◀─] socket
//! ```
//!
//! Both return `WouldBlock` if nothing can be transferred; the caller then uses [`Socket::wait`].
//! Without TLS, bytes are transferred directly between the socket and the slices, which are the
//! callers' own buffers.

use crate::uri::Endpoint;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::sockopt,
};
use rustls::{ClientConfig, ClientConnection, pki_types::ServerName};
use std::{
    io::{self, IoSlice, IoSliceMut, Read, Write},
    net::{TcpStream, ToSocketAddrs},
    os::{
        fd::{AsFd, BorrowedFd},
        linux::net::SocketAddrExt,
        unix::{
            ffi::OsStrExt,
            net::{SocketAddr, UnixStream},
        },
    },
    sync::Arc,
    time::{Duration, Instant},
};

/// Size of the receive buffer for TLS: four records.
const TLS_STAGE_BYTES: usize = 64 << 10;

/// A dead server is detected after about a minute.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_PROBES: u32 = 3;

/// A non-blocking socket. A thread that waits for it shares it, because the transport may be
/// replaced meanwhile.
#[derive(Debug)]
pub(super) enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

#[derive(Debug)]
struct Tls {
    connection: ClientConnection,
    stage: Vec<u8>,
    taken: usize,
    filled: usize,
    ended: bool,
}

/// One connection; see the module documentation.
#[derive(Debug)]
pub(super) struct Transport {
    socket: Arc<Socket>,
    tls: Option<Box<Tls>>,
}

impl Transport {
    /// Connects within `limit`.
    pub(super) fn connect(endpoint: &Endpoint, limit: Duration) -> io::Result<Self> {
        let socket = match endpoint {
            Endpoint::Unix(path) => Socket::Unix(match path.as_os_str().as_bytes() {
                [0, name @ ..] => UnixStream::connect_addr(&SocketAddr::from_abstract_name(name)?)?,
                _ => UnixStream::connect(path)?,
            }),
            Endpoint::Tcp { host, port } => Socket::Tcp(connect_tcp(host, *port, limit)?),
        };
        match &socket {
            Socket::Tcp(stream) => stream.set_nonblocking(true)?,
            Socket::Unix(stream) => stream.set_nonblocking(true)?,
        }
        Ok(Self { socket: Arc::new(socket), tls: None })
    }

    /// Uses TLS from now on. The TLS handshake takes place during the first sends and receives.
    pub(super) fn start_tls(
        &mut self,
        config: Arc<ClientConfig>,
        name: ServerName<'static>,
    ) -> Result<(), rustls::Error> {
        let connection = ClientConnection::new(config, name)?;
        let stage = vec![0; TLS_STAGE_BYTES];
        self.tls = Some(Box::new(Tls { connection, stage, taken: 0, filled: 0, ended: false }));
        Ok(())
    }

    /// Whether the connection uses TLS.
    pub(super) fn is_tls(&self) -> bool {
        self.tls.is_some()
    }

    /// TLS version and cipher; `None` without TLS or before the handshake.
    pub(super) fn tls_name(&self) -> Option<String> {
        let connection = &self.tls.as_ref()?.connection;
        let version = match connection.protocol_version()? {
            rustls::ProtocolVersion::TLSv1_2 => "TLS 1.2".to_owned(),
            rustls::ProtocolVersion::TLSv1_3 => "TLS 1.3".to_owned(),
            other => format!("{other:?}"),
        };
        Some(match connection.negotiated_cipher_suite() {
            Some(suite) => format!("{version}, {:?}", suite.suite()),
            None => version,
        })
    }

    /// Sends as much as the socket accepts now; `WouldBlock` if that is nothing.
    pub(super) fn send(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let Some(tls) = &mut self.tls else { return (&*self.socket).write_vectored(slices) };
        let taken = tls.connection.writer().write_vectored(slices)?;
        match self.flush() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && taken > 0 => Ok(taken),
            Err(error) => Err(error),
            Ok(()) if taken == 0 => Err(io::ErrorKind::WouldBlock.into()),
            Ok(()) => Ok(taken),
        }
    }

    /// Whether accepted bytes are still waiting for the socket.
    pub(super) fn has_unsent(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.connection.wants_write())
    }

    /// Sends accepted bytes that wait for the socket; `WouldBlock` if some still have to wait.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        let Some(tls) = &mut self.tls else { return Ok(()) };
        while tls.connection.wants_write() {
            tls.connection.write_tls(&mut &*self.socket)?;
        }
        Ok(())
    }

    /// Receives what is available: `WouldBlock` if nothing is, 0 at the end of the stream.
    pub(super) fn recv(&mut self, slices: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        match &mut self.tls {
            None => (&*self.socket).read_vectored(slices),
            Some(tls) => {
                let received = tls.recv(&self.socket, slices);
                // A TLS handshake or key update may require an answer.
                match self.flush() {
                    Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
                    _ => received,
                }
            }
        }
    }

    /// The socket, for waiting.
    pub(super) fn socket(&self) -> Arc<Socket> {
        Arc::clone(&self.socket)
    }

    /// Sends the TLS close notification.
    pub(super) fn close_tls(&mut self) {
        if let Some(tls) = &mut self.tls {
            tls.connection.send_close_notify();
            let _ = tls.connection.write_tls(&mut &*self.socket);
        }
    }
}

impl Socket {
    /// Waits until data can be received (or also sent, if `for_sending`), or until the eventfd
    /// `wake` is signalled, which is then cleared. Returns `false` if `limit` expired.
    pub(super) fn wait(
        &self,
        wake: Option<BorrowedFd<'_>>,
        for_sending: bool,
        limit: Option<Duration>,
    ) -> io::Result<bool> {
        let events = if for_sending { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
        let socket = PollFd::from_borrowed_fd(self.as_fd(), events);
        let bell = PollFd::from_borrowed_fd(wake.unwrap_or(self.as_fd()), PollFlags::IN);
        let mut fds = [socket, bell];
        let until = limit.map(|limit| Instant::now() + limit);
        loop {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            let spec = left.and_then(|left| Timespec::try_from(left).ok());
            match poll(&mut fds[..if wake.is_some() { 2 } else { 1 }], spec.as_ref()) {
                Ok(ready) => {
                    if let Some(wake) = wake.filter(|_| !fds[1].revents().is_empty()) {
                        rustix::io::read(wake, &mut [0; 8])?;
                    }
                    return Ok(ready > 0);
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(stream) => stream.as_fd(),
            Self::Unix(stream) => stream.as_fd(),
        }
    }
}

impl Tls {
    fn recv(&mut self, mut socket: &Socket, slices: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        loop {
            match self.connection.reader().read_vectored(slices) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                ended_or_failed_or_received => return ended_or_failed_or_received,
            }
            if self.taken == self.filled && !self.ended {
                let received = socket.read(&mut self.stage)?;
                (self.taken, self.filled) = (0, received);
                self.ended = self.filled == 0;
            }
            let mut came = &self.stage[self.taken..self.filled];
            let before = came.len();
            self.connection.read_tls(&mut came)?;
            self.taken += before - came.len();
            self.connection.process_new_packets().map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        }
    }
}

impl Read for &Socket {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        match self {
            Socket::Tcp(stream) => (&*stream).read(buf),
            Socket::Unix(stream) => (&*stream).read(buf),
        }
    }

    fn read_vectored(&mut self, slices: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        match self {
            Socket::Tcp(stream) => (&*stream).read_vectored(slices),
            Socket::Unix(stream) => (&*stream).read_vectored(slices),
        }
    }
}

impl Write for &Socket {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        match self {
            Socket::Tcp(stream) => (&*stream).write(buf),
            Socket::Unix(stream) => (&*stream).write(buf),
        }
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Socket::Tcp(stream) => (&*stream).write_vectored(slices),
            Socket::Unix(stream) => (&*stream).write_vectored(slices),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Connects to the first address of the host that accepts.
fn connect_tcp(host: &str, port: u16, limit: Duration) -> io::Result<TcpStream> {
    let mut refused = io::Error::new(io::ErrorKind::NotFound, "the host name has no address");
    for address in (host, port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, limit) {
            Ok(stream) => {
                stream.set_nodelay(true)?;
                sockopt::set_socket_keepalive(&stream, true)?;
                sockopt::set_tcp_keepidle(&stream, KEEPALIVE_IDLE)?;
                sockopt::set_tcp_keepintvl(&stream, KEEPALIVE_INTERVAL)?;
                sockopt::set_tcp_keepcnt(&stream, KEEPALIVE_PROBES)?;
                return Ok(stream);
            }
            Err(error) => refused = error,
        }
    }
    Err(refused)
}
