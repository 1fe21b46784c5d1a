//! What a protocol of the network is made of: its types, and how a session stands or ends.

use std::{fmt::Debug, io};

/// Why a client's session ends.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SessionEnd {
    #[error("the client has disconnected")]
    Disconnected,
    /// The client broke the protocol, in these words.
    #[error("{0}")]
    Broken(String),
    /// The same. What tells the client so is in the outbox, and is sent first.
    #[error("{0}")]
    Told(String),
    #[error("the disk could not open a queue: {0}")]
    Queue(io::Error),
}

/// How far a client's session is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// The client has no disk yet. There is a time limit, and the next bytes are received when the
    /// replies to the last ones have been sent.
    Handshake,
    /// Requests are served.
    Serving,
}

/// The types of a protocol, which has no values itself.
pub(crate) trait ProtocolTypes: Debug + Sized + 'static {
    /// What all workers of a server share.
    type Shared: Debug + Send + Sync;
    /// The state of one client.
    type Session: Debug;
    /// What the reply to a request needs to know of it. It is copied with each request.
    type Asked: Debug + Copy;
}
