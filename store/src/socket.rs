//! A socket of a client: where the server listens, connecting, and waiting.

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::sockopt,
};
use std::{
    fmt,
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
    path::PathBuf,
    time::{Duration, Instant},
};

/// Where a server listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Endpoint {
    /// A TCP socket.
    Tcp {
        /// Host name or address; IPv6 without brackets.
        host: String,
        /// Port number.
        port: u16,
    },
    /// A unix socket. A path that begins with a zero byte is a name in the abstract namespace.
    Unix(PathBuf),
}

impl Endpoint {
    /// The TCP socket that the authority of a URI names: `HOST`, `HOST:PORT`, `[IPV6]:PORT`.
    ///
    /// # Errors
    /// What is wrong, as a sentence about the URI.
    pub fn of_authority(authority: &str, default_port: u16) -> Result<Self, String> {
        let port_of = |text: &str| match text.strip_prefix(':') {
            Some(port) => port.parse().map_err(|_| format!("{port:?} is not a port")),
            None if text.is_empty() => Ok(default_port),
            None => Err(format!("{text:?} follows the address")),
        };
        let (host, port) = match authority.strip_prefix('[') {
            Some(rest) => {
                let (host, rest) = rest.split_once(']').ok_or("the ] after the IPv6 address is missing")?;
                (host, port_of(rest)?)
            }
            None => {
                let at = authority.find(':').unwrap_or(authority.len());
                (&authority[..at], port_of(&authority[at..])?)
            }
        };
        if host.is_empty() {
            return Err("it names no host".into());
        }
        Ok(Self::Tcp { host: host.to_owned(), port })
    }
}

/// Host and port, or the path of the socket, for messages.
impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "{host}:{port}"),
            Self::Unix(path) => match path.as_os_str().as_bytes() {
                [0, name @ ..] => write!(f, "@{}", String::from_utf8_lossy(name)),
                _ => write!(f, "{}", path.display()),
            },
        }
    }
}

/// A dead server is detected after about a minute.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_PROBES: u32 = 3;

/// A non-blocking socket. A thread that waits for it shares it, because the transport may be
/// replaced meanwhile.
#[derive(Debug)]
pub enum Socket {
    /// By TCP.
    Tcp(TcpStream),
    /// A unix socket.
    Unix(UnixStream),
}

impl Socket {
    /// Connects within `limit`.
    ///
    /// # Errors
    /// No server accepts the connection.
    pub fn connect(endpoint: &Endpoint, limit: Duration) -> io::Result<Self> {
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
        Ok(socket)
    }

    /// Waits until data can be received (or also sent, if `for_sending`), or until the eventfd
    /// `wake` is signalled, which is then cleared. Returns `false` if `limit` expired.
    ///
    /// # Errors
    /// The system refused to wait.
    pub fn wait(&self, wake: Option<BorrowedFd<'_>>, for_sending: bool, limit: Option<Duration>) -> io::Result<bool> {
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
