//! What a protocol adds to the servers' loop.
//!
//! ```text
//!   window ─▶ take_input ─┬─ answered at once ─▶ Core::count, outbox
//!                         ├─ read, write, clear, flush ─▶ Core ─▶ queue ─▶ reply ─▶ outbox
//!                         └─ payload ─▶ Core ─▶ payload_ended (once for each announced part)
//! ```
//!
//! The loop (`worker`, `core`) has the sockets, the buffers, the queues, the shares and the turns.
//! A protocol has the bytes: it decodes requests from a connection's window, and encodes replies
//! into its outbox. It is a type without values. The state of one client is its
//! [`Protocol::Session`], which only the client's worker uses. What the clients of several workers
//! share is in [`Protocol::Shared`], which has locks of its own.
//!
//! A function of a protocol never waits. Everything that was received is in the window, and bytes
//! that are not complete stay there until more have come.

use super::{
    connection::{Connection, Incoming},
    core::Core,
    flights::{ClientRequest, Contents},
    settings::TlsNeed,
};
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

pub(crate) trait Protocol: Debug + Sized + 'static {
    /// The name in metrics and in the names of threads.
    const NAME: &'static str;
    /// Requests that are answered in a normal turn (see `turn`).
    const ANSWERS: usize;

    /// Whether bytes are received from a client that is at its limit. The protocol then bounds what
    /// waits.
    const RECEIVES_AT_LIMIT: bool;
    /// How the caller allows writable exports on TCP, as the end of a sentence.
    const HOW_TO_ALLOW_WRITES: &'static str;

    /// What all workers of a server share.
    type Shared: Debug + Send + Sync;
    /// The state of one client.
    type Session: Debug;
    /// What the reply to a request needs to know of it. It is copied with each request.
    type Asked: Debug + Copy;

    /// The session of a new client.
    fn session(core: &Core<Self>, tls: TlsNeed) -> Self::Session;

    /// Puts what the server sends first into the outbox.
    fn greet(core: &mut Core<Self>, conn: &mut Connection<Self>);

    /// How far the session is.
    fn stage(session: &Self::Session) -> Stage;

    /// Whether the session can send requests to the export and to no other. It ends with the export.
    fn is_of_export(session: &Self::Session, export: usize) -> bool;

    /// Handles the bytes in the connection's window, until they, the client's share or its turn are
    /// used up. `number` is the connection's.
    ///
    /// # Errors
    /// The session ends.
    fn take_input(core: &mut Core<Self>, conn: &mut Connection<Self>, number: u32) -> Result<(), SessionEnd>;

    /// All announced bytes of a payload were received, and more is missing or its digest must be
    /// checked. A protocol that announces all payload with its request is never asked.
    fn payload_ended(core: &mut Core<Self>, conn: &mut Connection<Self>, incoming: Incoming<Self::Asked>);

    /// Puts the reply to a request into the outbox, and counts it ([`Core::count`]). The contents
    /// are those of a successful read; otherwise they go back to the pool.
    fn reply(
        core: &mut Core<Self>,
        conn: &mut Connection<Self>,
        asked: &ClientRequest<Self::Asked>,
        result: io::Result<()>,
        contents: Contents,
    );

    /// Other exports are served from now on. They are in `core` already.
    fn exports_changed(core: &mut Core<Self>, conn: &mut Connection<Self>);

    /// Whether [`Protocol::tick`] is to be called.
    fn ticks(session: &Self::Session) -> bool;

    /// Called twice a second while [`Protocol::ticks`].
    ///
    /// # Errors
    /// The session ends.
    fn tick(core: &mut Core<Self>, conn: &mut Connection<Self>) -> Result<(), SessionEnd>;

    /// The connection is being closed.
    fn closed(core: &mut Core<Self>, conn: &mut Connection<Self>);
}
