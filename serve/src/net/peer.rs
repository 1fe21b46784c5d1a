//! Who a client is.

use rustix::net::sockopt;
use std::{
    fmt, io,
    net::SocketAddr,
    os::fd::{AsFd, OwnedFd},
};

/// The client's address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Peer {
    Tcp {
        address: SocketAddr,
        /// The address of the server that the client connected to.
        local: SocketAddr,
    },
    /// Process id and user id of the client, if the kernel knows them.
    Unix(Option<(i32, u32)>),
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { address, .. } => address.fmt(f),
            Self::Unix(Some((process, user))) => write!(f, "process {process} of user {user}"),
            Self::Unix(None) => f.write_str("a local process"),
        }
    }
}

impl Peer {
    /// The client of a socket that was just accepted. On TCP this also sets the options of the
    /// socket.
    ///
    /// # Errors
    /// If the client has disconnected already.
    pub(crate) fn of(fd: &OwnedFd, on_tcp: bool) -> io::Result<Self> {
        if !on_tcp {
            let found = sockopt::socket_peercred(fd.as_fd()).ok();
            return Ok(Self::Unix(found.map(|found| (found.pid.as_raw_nonzero().get(), found.uid.as_raw()))));
        }
        // TCP_NODELAY sends small replies at once. Keep-alive detects a client whose machine has
        // died.
        sockopt::set_tcp_nodelay(fd, true)?;
        sockopt::set_socket_keepalive(fd, true)?;
        let address =
            rustix::net::getpeername(fd)?.ok_or_else(|| io::Error::other("the socket has no peer address"))?;
        let local = rustix::net::getsockname(fd)?;
        Ok(Self::Tcp { address: SocketAddr::try_from(address)?, local: SocketAddr::try_from(local)? })
    }
}
