//! Connections between controller and agents: TLS 1.3 over TCP or virtual sockets, with messages.
//!
//! ```text
//!   dial(address)  ──▶ TLS client, the peer's fingerprint is checked ──▶ Link
//!   Door::accept() ──▶ TLS server ──▶ Link; its peer is known, not yet admitted
//! ```
//!
//! Reads and writes block, at most for the time of [`Link::set_patience`]. One thread uses a link.

use crate::{
    address::{Address, Place},
    error::{FleetError, Result},
    identity::{Fingerprint, Identity},
    trust,
    wire::{self, WireError},
};
use nix::sys::socket::{self, AddressFamily, Backlog, SockFlag, SockType, VsockAddr};
use rustix::{
    io::Errno,
    net::{SocketFlags, accept_with},
};
use rustls::{
    ClientConnection, ServerConfig, ServerConnection, StreamOwned,
    pki_types::{CertificateDer, ServerName},
};
use serde::{Serialize, de::DeserializeOwned};
use std::{
    io::{self, Read, Write},
    net::{TcpListener, TcpStream, ToSocketAddrs},
    os::fd::{AsRawFd, OwnedFd},
    sync::Arc,
    time::Duration,
};

/// Time for a connection and its handshake.
const CONNECT: Duration = Duration::from_secs(10);

/// A connection to a peer.
pub struct Link {
    stream: Stream,
    /// Who the peer is.
    pub peer: Fingerprint,
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Link to {}", self.peer)
    }
}

enum Stream {
    Dialled(Box<StreamOwned<ClientConnection, TcpStream>>),
    Accepted(Box<StreamOwned<ServerConnection, TcpStream>>),
}

impl Read for Stream {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Dialled(stream) => stream.read(buf),
            Self::Accepted(stream) => stream.read(buf),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        match self {
            Self::Dialled(stream) => stream.write(buf),
            Self::Accepted(stream) => stream.write(buf),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Dialled(stream) => stream.flush(),
            Self::Accepted(stream) => stream.flush(),
        }
    }
}

impl Link {
    /// Connects to a peer, which must have the fingerprint of the address.
    ///
    /// # Errors
    /// [`FleetError::Connect`], [`FleetError::Peer`].
    pub fn dial(own: &Identity, address: &Address) -> Result<Self> {
        let name = || address.place.to_string();
        let config = trust::dialling(own, address.fingerprint)?;
        let socket = connect(&address.place).map_err(|source| FleetError::Connect { name: name(), source })?;
        let server = ServerName::try_from("diskwright").map_err(|error| FleetError::Tls(error.to_string()))?;
        let session = ClientConnection::new(config, server).map_err(|error| FleetError::Tls(error.to_string()))?;
        let mut stream = StreamOwned::new(session, socket);
        let refused = |error: io::Error| FleetError::Peer { name: name(), what: error.to_string() };
        shake_hands(|| stream.conn.complete_io(&mut stream.sock).map(|_| stream.conn.is_handshaking()))
            .map_err(refused)?;
        Ok(Self { stream: Stream::Dialled(Box::new(stream)), peer: address.fingerprint })
    }

    /// The TLS handshake of the side that listens.
    fn accept(config: &Arc<ServerConfig>, socket: TcpStream) -> io::Result<Self> {
        let session = ServerConnection::new(Arc::clone(config)).map_err(io::Error::other)?;
        prepare(&socket)?;
        let mut stream = StreamOwned::new(session, socket);
        shake_hands(|| stream.conn.complete_io(&mut stream.sock).map(|_| stream.conn.is_handshaking()))?;
        let certificate: Option<&CertificateDer<'_>> = stream.conn.peer_certificates().and_then(<[_]>::first);
        let peer = Fingerprint::of(certificate.ok_or(io::ErrorKind::PermissionDenied)?);
        Ok(Self { stream: Stream::Accepted(Box::new(stream)), peer })
    }

    fn socket(&self) -> &TcpStream {
        match &self.stream {
            Stream::Dialled(stream) => &stream.sock,
            Stream::Accepted(stream) => &stream.sock,
        }
    }

    /// How long a read and a write may wait.
    ///
    /// # Errors
    /// The system's error.
    pub fn set_patience(&self, patience: Duration) -> io::Result<()> {
        self.socket().set_read_timeout(Some(patience))?;
        self.socket().set_write_timeout(Some(patience))
    }

    /// Sends a message.
    ///
    /// # Errors
    /// The connection failed.
    pub fn send(&mut self, message: &impl Serialize) -> io::Result<()> {
        wire::write(&mut self.stream, message)
    }

    /// Receives a message of at most `most` bytes.
    ///
    /// # Errors
    /// [`WireError`].
    pub fn receive<T: DeserializeOwned>(&mut self, most: u32) -> Result<T, WireError> {
        wire::read(&mut self.stream, most)
    }
}

/// Goes on until the handshake is over.
fn shake_hands(mut step: impl FnMut() -> io::Result<bool>) -> io::Result<()> {
    while step()? {}
    Ok(())
}

fn prepare(socket: &TcpStream) -> io::Result<()> {
    socket.set_read_timeout(Some(CONNECT))?;
    socket.set_write_timeout(Some(CONNECT))?;
    // Virtual sockets have no such option, and do not wait.
    let _ = socket.set_nodelay(true);
    Ok(())
}

fn connect(place: &Place) -> io::Result<TcpStream> {
    let socket = match place {
        Place::Tcp(host, port) => {
            let mut last = io::Error::from(io::ErrorKind::NotFound);
            let addresses = (host.as_str(), *port).to_socket_addrs()?;
            let mut found = None;
            for address in addresses {
                match TcpStream::connect_timeout(&address, CONNECT) {
                    Ok(socket) => {
                        found = Some(socket);
                        break;
                    }
                    Err(error) => last = error,
                }
            }
            found.ok_or(last)?
        }
        Place::Vsock(cid, port) => {
            let socket = vsock()?;
            socket::connect(socket.as_raw_fd(), &VsockAddr::new(*cid, *port))?;
            TcpStream::from(socket)
        }
    };
    prepare(&socket)?;
    Ok(socket)
}

fn vsock() -> nix::Result<OwnedFd> {
    socket::socket(AddressFamily::Vsock, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)
}

/// Where a program listens.
#[derive(Debug)]
pub struct Door {
    socket: Socket,
    config: Arc<ServerConfig>,
}

#[derive(Debug)]
enum Socket {
    Tcp(TcpListener),
    Vsock(OwnedFd),
}

impl Door {
    /// Listens at a place. Port 0 is a free one.
    ///
    /// # Errors
    /// [`FleetError::Listen`].
    pub fn open(own: &Identity, place: &Place) -> Result<Self> {
        let failed = |source| FleetError::Listen { address: place.to_string(), source };
        let socket = match place {
            Place::Tcp(host, port) => TcpListener::bind((host.as_str(), *port)).map(Socket::Tcp).map_err(failed)?,
            Place::Vsock(cid, port) => Socket::Vsock(listen_vsock(*cid, *port).map_err(|error| failed(error.into()))?),
        };
        Ok(Self { socket, config: trust::listening(own)? })
    }

    /// Where it listens, with the port that was chosen.
    ///
    /// # Errors
    /// The system's error.
    pub fn place(&self) -> io::Result<Place> {
        Ok(match &self.socket {
            Socket::Tcp(listener) => {
                let address = listener.local_addr()?;
                Place::Tcp(address.ip().to_string(), address.port())
            }
            Socket::Vsock(socket) => {
                let address: VsockAddr = socket::getsockname(socket.as_raw_fd())?;
                Place::Vsock(address.cid(), address.port())
            }
        })
    }

    /// Waits for a connection. The handshake is made by [`Waiting::greet`], so that a slow peer
    /// does not keep others waiting.
    ///
    /// # Errors
    /// The system's error.
    pub fn wait(&self) -> io::Result<Waiting> {
        let socket = match &self.socket {
            Socket::Tcp(listener) => listener.accept()?.0,
            Socket::Vsock(socket) => TcpStream::from(accept_vsock(socket)?),
        };
        Ok(Waiting { socket, config: Arc::clone(&self.config) })
    }
}

fn listen_vsock(cid: u32, port: u32) -> nix::Result<OwnedFd> {
    let socket = vsock()?;
    socket::bind(socket.as_raw_fd(), &VsockAddr::new(cid, port))?;
    socket::listen(&socket, Backlog::new(16)?)?;
    Ok(socket)
}

fn accept_vsock(socket: &OwnedFd) -> io::Result<OwnedFd> {
    loop {
        match accept_with(socket, SocketFlags::CLOEXEC) {
            Err(Errno::INTR | Errno::CONNABORTED) => {}
            accepted => return Ok(accepted?),
        }
    }
}

/// A connection without its handshake.
#[derive(Debug)]
pub struct Waiting {
    socket: TcpStream,
    config: Arc<ServerConfig>,
}

impl Waiting {
    /// Makes the handshake.
    ///
    /// # Errors
    /// The peer does not speak TLS 1.3, has no certificate, or takes too long.
    pub fn greet(self) -> io::Result<Link> {
        Link::accept(&self.config, self.socket)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Ask;
    use std::thread;

    #[test]
    fn both_sides_know_each_other() {
        let (one, other) = (Identity::temporary().unwrap(), Identity::temporary().unwrap());
        let door = Door::open(&one, &Place::Tcp("127.0.0.1".into(), 0)).unwrap();
        let address = Address { place: door.place().unwrap(), fingerprint: one.fingerprint, token: None };
        let listening = thread::spawn(move || {
            let mut link = door.wait().unwrap().greet().unwrap();
            let asked: Ask = link.receive(wire::ASK_BYTES_MAX).unwrap();
            (link.peer, asked)
        });
        let mut link = Link::dial(&other, &address).unwrap();
        link.send(&Ask::Clock { sent_ns: 3 }).unwrap();
        assert_eq!(link.peer, one.fingerprint);
        assert_eq!(listening.join().unwrap(), (other.fingerprint, Ask::Clock { sent_ns: 3 }));
    }

    #[test]
    fn a_peer_with_another_fingerprint_is_refused() {
        let (one, other) = (Identity::temporary().unwrap(), Identity::temporary().unwrap());
        let door = Door::open(&one, &Place::Tcp("127.0.0.1".into(), 0)).unwrap();
        let address = Address { place: door.place().unwrap(), fingerprint: other.fingerprint, token: None };
        let listening = thread::spawn(move || door.wait().unwrap().greet().map(|_| ()).map_err(|error| error.kind()));
        let error = Link::dial(&other, &address).unwrap_err().to_string();
        assert!(error.contains(&one.fingerprint.to_string()), "{error}");
        assert!(listening.join().unwrap().is_err());
    }

    #[test]
    fn a_peer_that_does_not_speak_tls_is_refused() {
        let own = Identity::temporary().unwrap();
        let door = Door::open(&own, &Place::Tcp("127.0.0.1".into(), 0)).unwrap();
        let Place::Tcp(host, port) = door.place().unwrap() else { panic!() };
        let plain = thread::spawn(move || {
            let mut plain = TcpStream::connect((host, port)).unwrap();
            plain.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
            let _ = plain.read(&mut [0; 10]);
        });
        assert!(door.wait().unwrap().greet().is_err());
        plain.join().unwrap();
    }
}
