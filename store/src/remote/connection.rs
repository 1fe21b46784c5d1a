//! A connection in its blocking phase, before a queue takes its socket, and how connections fail.

use crate::{Endpoint, ErrorCode, Socket};
use std::{
    io::{self, Read, Write},
    sync::Arc,
    time::Duration,
};

/// How long a connection attempt, and a blocking send or receive, may wait.
const PATIENCE: Duration = Duration::from_secs(20);

/// Why a connection to the server of a disk cannot be made, or has ended. `peer` is the server,
/// displayed as an [`Endpoint`].
#[derive(Debug, Clone, thiserror::Error)]
pub enum ConnectionError {
    /// No connection could be made.
    #[error("{peer}: cannot connect: {source}; check that the target is running and listens there")]
    Connect {
        /// The server.
        peer: String,
        /// The system's error.
        source: Arc<io::Error>,
    },
    /// The connection broke.
    #[error("{peer}: the connection broke while {doing}: {source}; look at the target's log")]
    Lost {
        /// The server.
        peer: String,
        /// What was being done.
        doing: &'static str,
        /// The system's error.
        source: Arc<io::Error>,
    },
    /// The server violated the protocol.
    #[error(
        "{peer}: the target violated the protocol: {what}; the connection was closed, do not trust the data read from it"
    )]
    Violation {
        /// The server.
        peer: String,
        /// The violation.
        what: String,
    },
    /// The server sent nothing for too long.
    #[error("{peer}: the target sent nothing for {seconds} s; look at the target's log and at the network")]
    Stalled {
        /// The server.
        peer: String,
        /// How long the server sent nothing.
        seconds: u64,
    },
}

impl ConnectionError {
    /// The kind of the corresponding `io::Error`.
    pub fn kind(&self) -> io::ErrorKind {
        match self {
            Self::Connect { source, .. } | Self::Lost { source, .. } => source.kind(),
            Self::Violation { .. } => io::ErrorKind::InvalidData,
            Self::Stalled { .. } => io::ErrorKind::TimedOut,
        }
    }

    /// Why it failed, for programs to match.
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::Violation { .. } => ErrorCode::Protocol,
            Self::Connect { .. } | Self::Lost { .. } | Self::Stalled { .. } => ErrorCode::Connection,
        }
    }
}

/// A socket with the name of its peer.
#[derive(Debug)]
pub struct Connection {
    /// The socket, which does not block.
    pub socket: Socket,
    /// Where the server listens.
    pub peer: Arc<str>,
}

impl Connection {
    /// Connects.
    ///
    /// # Errors
    /// [`ConnectionError::Connect`].
    pub fn open(endpoint: &Endpoint) -> Result<Self, ConnectionError> {
        let peer: Arc<str> = endpoint.to_string().into();
        let socket = Socket::connect(endpoint, PATIENCE)
            .map_err(|source| ConnectionError::Connect { peer: peer.to_string(), source: Arc::new(source) })?;
        Ok(Self { socket, peer })
    }

    /// The connection broke.
    pub fn lost(&self, doing: &'static str, source: io::Error) -> ConnectionError {
        ConnectionError::Lost { peer: self.peer.to_string(), doing, source: Arc::new(source) }
    }

    /// The server violated the protocol.
    pub fn violation(&self, what: String) -> ConnectionError {
        ConnectionError::Violation { peer: self.peer.to_string(), what }
    }

    /// The server did not answer within the time that a blocking call waits.
    pub fn stalled(&self) -> ConnectionError {
        ConnectionError::Stalled { peer: self.peer.to_string(), seconds: PATIENCE.as_secs() }
    }

    /// Sends bytes, and waits until the system has taken them.
    ///
    /// # Errors
    /// [`ConnectionError::Lost`], [`ConnectionError::Stalled`].
    pub fn say(&self, doing: &'static str, mut bytes: &[u8]) -> Result<(), ConnectionError> {
        while !bytes.is_empty() {
            match (&self.socket).write(bytes) {
                Ok(sent) => bytes = &bytes[sent..],
                Err(error) => self.wait(doing, error, true)?,
            }
        }
        Ok(())
    }

    /// Receives until `bytes` are full.
    ///
    /// # Errors
    /// As [`Connection::say`].
    pub fn fill(&self, doing: &'static str, bytes: &mut [u8]) -> Result<(), ConnectionError> {
        let mut filled = 0;
        while filled < bytes.len() {
            match (&self.socket).read(&mut bytes[filled..]) {
                Ok(0) => return Err(self.lost(doing, closed())),
                Ok(got) => filled += got,
                Err(error) => self.wait(doing, error, false)?,
            }
        }
        Ok(())
    }

    /// Waits for the socket after an error that says so.
    fn wait(&self, doing: &'static str, error: io::Error, for_sending: bool) -> Result<(), ConnectionError> {
        match error.kind() {
            io::ErrorKind::Interrupted => Ok(()),
            io::ErrorKind::WouldBlock => match self.socket.wait(None, for_sending, Some(PATIENCE)) {
                Ok(true) => Ok(()),
                Ok(false) => Err(self.stalled()),
                Err(error) => Err(self.lost(doing, error)),
            },
            _ => Err(self.lost(doing, error)),
        }
    }
}

/// The error of a socket whose peer sends nothing more.
pub(super) fn closed() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "the target closed the connection")
}
