//! Where a server listens: unix sockets, TCP, and sockets passed by systemd.
//!
//! The server never listens beyond loopback unless the address says so: a port alone means
//! 127.0.0.1. Only its owner can connect to a unix socket. A unix socket that a dead server left
//! behind is replaced; any other file at its path is an error.
//!
//! The sockets of a killed server stay open until the kernel has torn down its rings. So a bind
//! that fails is retried for a moment: for TCP ports, whose owner is unknown, and for unix sockets
//! whose owner is dead.

use crate::attach::Process;
use std::{
    fmt, io,
    net::{SocketAddr, TcpListener, ToSocketAddrs},
    os::{
        fd::OwnedFd,
        unix::{
            fs::{FileTypeExt, MetadataExt},
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

/// How long the kernel may take to close the sockets of a killed server.
const TEARDOWN_PATIENCE: Duration = Duration::from_secs(1);
/// How long a bind waits for a live owner of a unix socket, which may be about to exit.
const LIVING_PATIENCE: Duration = Duration::from_millis(100);
const PAUSE: Duration = Duration::from_millis(10);

/// An address to listen on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// Path of a unix socket.
    Unix(PathBuf),
    /// Host and port. Port 0 means any free port.
    Tcp(String, u16),
}

/// Why the server cannot listen on an address.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// The text is not an address.
    #[error("{text:?} is not an address; write a path, unix:PATH, PORT, or HOST:PORT")]
    Syntax {
        /// The text.
        text: String,
    },
    /// Another server listens on this unix socket.
    #[error("{}: another server listens on this socket; stop it or choose another path", path.display())]
    Taken {
        /// The socket.
        path: PathBuf,
    },
    /// The path exists and is not a socket.
    #[error("{}: file exists and is not a socket but a {what}; choose another path", path.display())]
    Occupied {
        /// The path.
        path: PathBuf,
        /// The kind of file, as in "folder".
        what: &'static str,
    },
    /// The system refused to bind.
    #[error("cannot listen on {address}: {source}{}", hint_of(source))]
    Refused {
        /// The address.
        address: Address,
        /// The cause.
        source: io::Error,
    },
    /// A socket passed in LISTEN_FDS cannot be used.
    #[error("cannot use socket {number} that was passed in LISTEN_FDS: {source}")]
    Handed {
        /// Index of the socket, from 0.
        number: usize,
        /// The cause.
        source: io::Error,
    },
}

fn hint_of(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => "; stop the program that uses it, or choose another port",
        io::ErrorKind::PermissionDenied => "; choose a folder that you may write to, or a port above 1023",
        _ => "",
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) if path.as_os_str().as_encoded_bytes().contains(&b'/') => path.display().fmt(f),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(host, port) if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp(host, port) => write!(f, "{host}:{port}"),
        }
    }
}

impl Address {
    /// Parses an address: a path (any text with a slash, or after `unix:`), a port (on 127.0.0.1),
    /// or a host with or without a port. Without a port it is NBD's.
    ///
    /// # Errors
    /// [`ListenError::Syntax`].
    pub fn parse(text: &str) -> Result<Self, ListenError> {
        Self::parse_with(text, diskwright_nbd::wire::DEFAULT_PORT)
    }

    /// The same with the port of another protocol.
    ///
    /// # Errors
    /// [`ListenError::Syntax`].
    pub fn parse_with(text: &str, usual_port: u16) -> Result<Self, ListenError> {
        let wrong = || ListenError::Syntax { text: text.to_owned() };
        if let Some(path) = text.strip_prefix("unix:").or_else(|| text.contains('/').then_some(text)) {
            return if path.is_empty() { Err(wrong()) } else { Ok(Self::Unix(path.into())) };
        }
        let port_of = |port: &str| port.parse::<u16>().map_err(|_| wrong());
        if let Some(rest) = text.strip_prefix('[') {
            let (host, port) = rest.split_once(']').ok_or_else(wrong)?;
            let port = match port.strip_prefix(':') {
                Some(port) => port_of(port)?,
                None if port.is_empty() => usual_port,
                None => return Err(wrong()),
            };
            return Ok(Self::Tcp(host.into(), port));
        }
        let (host, port) = match text.rsplit_once(':') {
            Some((host, port)) => (host, port_of(port)?),
            None => match text.parse::<u16>() {
                Ok(port) => ("", port),
                Err(_) => (text, usual_port),
            },
        };
        let is_host = |c: char| c.is_ascii_alphanumeric() || c == '.' || c == '-';
        match host {
            "" if text.is_empty() => Err(wrong()),
            "" => Ok(Self::Tcp("127.0.0.1".into(), port)),
            host if host.chars().all(is_host) => Ok(Self::Tcp(host.into(), port)),
            _ => Err(wrong()),
        }
    }
}

/// A listening socket.
#[derive(Debug)]
pub struct Listener {
    pub(crate) fd: OwnedFd,
    address: Address,
    leftover: SocketFile,
}

impl Listener {
    /// Listens on an address. If the host has several addresses, takes the first that works.
    ///
    /// # Errors
    /// [`ListenError`].
    pub fn bind(address: &Address) -> Result<Self, ListenError> {
        let refused = |source| ListenError::Refused { address: address.clone(), source };
        match address {
            Address::Unix(path) => bind_unix(path, address),
            Address::Tcp(host, port) => {
                let candidates: Vec<SocketAddr> = (host.as_str(), *port).to_socket_addrs().map_err(refused)?.collect();
                let start = Instant::now();
                let listener = loop {
                    match TcpListener::bind(&candidates[..]) {
                        Err(error)
                            if error.kind() == io::ErrorKind::AddrInUse && start.elapsed() < TEARDOWN_PATIENCE =>
                        {
                            thread::sleep(PAUSE);
                        }
                        bound => break bound.map_err(refused)?,
                    }
                };
                let bound = listener.local_addr().map_err(refused)?;
                let address = Address::Tcp(bound.ip().to_string(), bound.port());
                Ok(Self { fd: listener.into(), address, leftover: SocketFile(None) })
            }
        }
    }

    /// The sockets passed by systemd (LISTEN_FDS); empty if there are none.
    ///
    /// # Errors
    /// [`ListenError::Handed`] if one is not a listening stream socket.
    pub fn handed_over() -> Result<Vec<Self>, ListenError> {
        let mut handed = listenfd::ListenFd::from_env();
        let mut listeners = Vec::new();
        for number in 0..handed.len() {
            let failed = |source| ListenError::Handed { number, source };
            if let Ok(Some(unix)) = handed.take_unix_listener(number) {
                let path = unix.local_addr().ok().and_then(|address| address.as_pathname().map(Path::to_owned));
                let address = Address::Unix(path.unwrap_or_else(|| "(without a name)".into()));
                listeners.push(Self { fd: unix.into(), address, leftover: SocketFile(None) });
                continue;
            }
            let tcp = handed.take_tcp_listener(number).map_err(failed)?;
            let tcp = tcp.ok_or_else(|| failed(io::Error::other("it is not a listening socket")))?;
            let bound = tcp.local_addr().map_err(failed)?;
            let address = Address::Tcp(bound.ip().to_string(), bound.port());
            listeners.push(Self { fd: tcp.into(), address, leftover: SocketFile(None) });
        }
        Ok(listeners)
    }

    /// The address, with the actual port.
    pub fn address(&self) -> &Address {
        &self.address
    }

    pub(crate) fn is_tcp(&self) -> bool {
        matches!(self.address, Address::Tcp(..))
    }

    /// Splits off the descriptor and the file to remove at the end.
    pub(crate) fn into_parts(self) -> (OwnedFd, SocketFile) {
        (self.fd, self.leftover)
    }
}

/// The file of a unix socket. Dropping this removes the file if it is still the same inode.
#[derive(Debug)]
pub(crate) struct SocketFile(Option<(PathBuf, (u64, u64))>);

impl Drop for SocketFile {
    fn drop(&mut self) {
        if let Some((path, identity)) = self.0.take()
            && identity_of(&path).is_ok_and(|found| found == identity)
        {
            let _ = std::fs::remove_file(path);
        }
    }
}

fn identity_of(path: &Path) -> io::Result<(u64, u64)> {
    let found = std::fs::symlink_metadata(path)?;
    Ok((found.dev(), found.ino()))
}

fn bind_unix(path: &Path, address: &Address) -> Result<Listener, ListenError> {
    let refused = |source| ListenError::Refused { address: address.clone(), source };
    if let Ok(found) = std::fs::symlink_metadata(path) {
        if !found.file_type().is_socket() {
            return Err(ListenError::Occupied { path: path.to_owned(), what: kind_of(found.file_type()) });
        }
        let start = Instant::now();
        loop {
            match UnixStream::connect(path) {
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                    tracing::info!(path = %path.display(), "replaced a socket that no process listened on");
                    std::fs::remove_file(path).map_err(refused)?;
                    break;
                }
                Ok(stream) => {
                    let patience = if is_alive(&stream) { LIVING_PATIENCE } else { TEARDOWN_PATIENCE };
                    if start.elapsed() >= patience {
                        return Err(ListenError::Taken { path: path.to_owned() });
                    }
                    thread::sleep(PAUSE);
                }
                Err(error) => return Err(refused(error)),
            }
        }
    }
    // The umask sets the socket's mode at its creation. A chmod afterwards would leave a moment in
    // which other users could connect.
    let before = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o177));
    let bound = UnixListener::bind(path);
    rustix::process::umask(before);
    let listener = bound.map_err(refused)?;
    let identity = identity_of(path).map_err(refused)?;
    Ok(Listener {
        fd: listener.into(),
        address: address.clone(),
        leftover: SocketFile(Some((path.to_owned(), identity))),
    })
}

/// Whether the process that called `listen` is alive. If that cannot be known, `true`.
fn is_alive(stream: &UnixStream) -> bool {
    let peer = rustix::net::sockopt::socket_peercred(stream);
    peer.map_or(true, |peer| Process::of(peer.pid.as_raw_nonzero().get().cast_unsigned()).is_some())
}

fn kind_of(found: std::fs::FileType) -> &'static str {
    match () {
        () if found.is_dir() => "folder",
        () if found.is_symlink() => "symbolic link",
        () if found.is_block_device() || found.is_char_device() => "device",
        () if found.is_fifo() => "pipe",
        () => "file",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_parsed() {
        let tcp = |host: &str, port| Address::Tcp(host.into(), port);
        for (text, expected) in [
            ("/run/x.sock", Address::Unix("/run/x.sock".into())),
            ("./x", Address::Unix("./x".into())),
            ("unix:x.sock", Address::Unix("x.sock".into())),
            ("10809", tcp("127.0.0.1", 10809)),
            (":10809", tcp("127.0.0.1", 10809)),
            ("0.0.0.0:1", tcp("0.0.0.0", 1)),
            ("localhost", tcp("localhost", 10809)),
            ("disks.example:99", tcp("disks.example", 99)),
            ("[::1]", tcp("::1", 10809)),
            ("[::]:7", tcp("::", 7)),
        ] {
            let read = Address::parse(text).unwrap();
            assert_eq!(read, expected, "{text}");
            assert_eq!(Address::parse(&read.to_string()).unwrap(), read);
        }
        for text in ["", "unix:", "host:", "host:99999", "a b", "::1", "[::1", "[::1]x"] {
            assert!(matches!(Address::parse(text), Err(ListenError::Syntax { .. })), "{text}");
        }
    }

    #[test]
    fn a_dead_socket_is_replaced_and_anything_else_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let address = Address::Unix(path.clone());
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists(), "std leaves the file behind");
        let live = Listener::bind(&address).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        let error = Listener::bind(&address).unwrap_err();
        assert!(matches!(error, ListenError::Taken { .. }), "{error}");
        drop(live);
        assert!(!path.exists(), "the file is removed on drop");
        std::fs::write(&path, "precious").unwrap();
        let error = Listener::bind(&address).unwrap_err();
        assert!(matches!(error, ListenError::Occupied { what: "file", .. }), "{error}");
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    }

    #[test]
    fn a_port_in_use_is_an_error_with_a_hint() {
        let first = Listener::bind(&Address::Tcp("127.0.0.1".into(), 0)).unwrap();
        let error = Listener::bind(first.address()).unwrap_err().to_string();
        assert!(error.contains("in use") && error.contains("another port"), "{error}");
    }
}
