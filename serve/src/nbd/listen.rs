//! Where a server listens: unix sockets, TCP, sockets that systemd hands over.
//!
//! Nothing listens beyond loopback unless the address says so: a port alone means 127.0.0.1. A unix
//! socket can be reached by its owner alone. One that a dead server left behind is replaced;
//! anything else that lies at its path is an error.
//!
//! The sockets of a server that was killed go on listening until the kernel has taken its rings
//! apart. So one that nobody alive listens on, and a port, whose holder cannot be seen, are tried
//! again for a moment before they count as taken.

use crate::attach::Process;
use diskwright_nbd::wire::DEFAULT_PORT;
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

/// How long the sockets of a killed server may take to be gone.
const TEARDOWN_PATIENCE: Duration = Duration::from_secs(1);
/// How long one that can be seen to live may: it may be about to end.
const LIVING_PATIENCE: Duration = Duration::from_millis(100);
const PAUSE: Duration = Duration::from_millis(10);

/// An address to listen on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// A socket in the file system.
    Unix(PathBuf),
    /// Host and port; port 0 is any that is free.
    Tcp(String, u16),
}

/// Why an address cannot be listened on.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// It is none.
    #[error("{text:?} is no address; write a path, unix:PATH, PORT, or HOST:PORT")]
    Syntax {
        /// What was written.
        text: String,
    },
    /// A server is there.
    #[error("{}: another server listens on this socket; stop it or choose another path", path.display())]
    Taken {
        /// The socket.
        path: PathBuf,
    },
    /// Something that is no socket is there.
    #[error("{}: there is a {what} at this path, which is no socket; choose another path", path.display())]
    Occupied {
        /// The path.
        path: PathBuf,
        /// What is there.
        what: &'static str,
    },
    /// The system refuses.
    #[error("cannot listen on {address}: {source}{}", hint_of(source))]
    Refused {
        /// The address.
        address: Address,
        /// Why.
        source: io::Error,
    },
    /// What systemd handed over cannot be used.
    #[error("socket {number} that was handed over by LISTEN_FDS cannot be used: {source}")]
    Handed {
        /// Its number, from 0.
        number: usize,
        /// Why.
        source: io::Error,
    },
}

fn hint_of(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => "; stop who uses it, or choose another port",
        io::ErrorKind::PermissionDenied => "; choose a place where you may, or a port above 1023",
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
    /// Reads an address: a path (anything with a slash, or behind `unix:`), a port (on 127.0.0.1),
    /// or a host with or without a port.
    ///
    /// # Errors
    /// [`ListenError::Syntax`].
    pub fn parse(text: &str) -> Result<Self, ListenError> {
        let wrong = || ListenError::Syntax { text: text.to_owned() };
        if let Some(path) = text.strip_prefix("unix:").or_else(|| text.contains('/').then_some(text)) {
            return if path.is_empty() { Err(wrong()) } else { Ok(Self::Unix(path.into())) };
        }
        let port_of = |port: &str| port.parse::<u16>().map_err(|_| wrong());
        if let Some(rest) = text.strip_prefix('[') {
            let (host, port) = rest.split_once(']').ok_or_else(wrong)?;
            let port = match port.strip_prefix(':') {
                Some(port) => port_of(port)?,
                None if port.is_empty() => DEFAULT_PORT,
                None => return Err(wrong()),
            };
            return Ok(Self::Tcp(host.into(), port));
        }
        let (host, port) = match text.rsplit_once(':') {
            Some((host, port)) => (host, port_of(port)?),
            None => match text.parse::<u16>() {
                Ok(port) => ("", port),
                Err(_) => (text, DEFAULT_PORT),
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

/// A socket that listens.
#[derive(Debug)]
pub struct Listener {
    pub(crate) fd: OwnedFd,
    address: Address,
    leftover: Leftover,
}

impl Listener {
    /// Listens on an address; for a host with several, on the first that works.
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
                Ok(Self { fd: listener.into(), address, leftover: Leftover(None) })
            }
        }
    }

    /// The sockets that systemd (or another in its manner) has handed over, if any.
    ///
    /// # Errors
    /// [`ListenError::Handed`] for one that is no listening stream socket.
    pub fn handed_over() -> Result<Vec<Self>, ListenError> {
        let mut handed = listenfd::ListenFd::from_env();
        let mut listeners = Vec::new();
        for number in 0..handed.len() {
            let failed = |source| ListenError::Handed { number, source };
            if let Ok(Some(unix)) = handed.take_unix_listener(number) {
                let path = unix.local_addr().ok().and_then(|address| address.as_pathname().map(Path::to_owned));
                let address = Address::Unix(path.unwrap_or_else(|| "(without a name)".into()));
                listeners.push(Self { fd: unix.into(), address, leftover: Leftover(None) });
                continue;
            }
            let tcp = handed.take_tcp_listener(number).map_err(failed)?;
            let tcp = tcp.ok_or_else(|| failed(io::Error::other("it is no listening socket")))?;
            let bound = tcp.local_addr().map_err(failed)?;
            let address = Address::Tcp(bound.ip().to_string(), bound.port());
            listeners.push(Self { fd: tcp.into(), address, leftover: Leftover(None) });
        }
        Ok(listeners)
    }

    /// Where it listens, with the port that it got.
    pub fn address(&self) -> &Address {
        &self.address
    }

    pub(crate) fn is_tcp(&self) -> bool {
        matches!(self.address, Address::Tcp(..))
    }

    /// Gives the descriptor away, and what is to be removed in the end.
    pub(crate) fn into_parts(self) -> (OwnedFd, Leftover) {
        (self.fd, self.leftover)
    }
}

/// The file of a socket, which is removed when this is dropped, if it is still the same.
#[derive(Debug)]
pub(crate) struct Leftover(Option<(PathBuf, (u64, u64))>);

impl Drop for Leftover {
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
                    tracing::info!(path = %path.display(), "a socket that nobody listens on was replaced");
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
    // The socket appears with the rights that the mask leaves, so that nobody else can be quicker
    // than a change of its mode.
    let before = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o177));
    let bound = UnixListener::bind(path);
    rustix::process::umask(before);
    let listener = bound.map_err(refused)?;
    let identity = identity_of(path).map_err(refused)?;
    Ok(Listener {
        fd: listener.into(),
        address: address.clone(),
        leftover: Leftover(Some((path.to_owned(), identity))),
    })
}

/// Whether the process that made a socket listen is there, as far as can be told.
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
    fn addresses_are_read() {
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
        assert!(path.exists(), "std leaves it behind");
        let live = Listener::bind(&address).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        let error = Listener::bind(&address).unwrap_err();
        assert!(matches!(error, ListenError::Taken { .. }), "{error}");
        drop(live);
        assert!(!path.exists(), "what was made is removed");
        std::fs::write(&path, "precious").unwrap();
        let error = Listener::bind(&address).unwrap_err();
        assert!(matches!(error, ListenError::Occupied { what: "file", .. }), "{error}");
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    }

    #[test]
    fn a_port_in_use_is_told() {
        let first = Listener::bind(&Address::Tcp("127.0.0.1".into(), 0)).unwrap();
        let error = Listener::bind(first.address()).unwrap_err().to_string();
        assert!(error.contains("in use") && error.contains("another port"), "{error}");
    }
}
