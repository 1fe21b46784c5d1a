//! NBD: one of the protocols of the network (see [`net`](crate::net)).
//!
//! ```text
//!   window ─▶ handshake.rs  options ─▶ replies, session
//!          ─▶ requests.rs   requests ─▶ the core's reads, writes, clears
//!                           └─▶ status.rs   extents ─▶ block status
//!          results ─▶ replies.rs ─▶ outbox
//!             export.rs     flags and block sizes of an export
//! ```
//!
//! The wire format is in `diskwright_nbd::wire`.
//!
//! Guarantees to clients: a completed write is visible on every connection, so a client may use
//! several (CAN_MULTI_CONN). The write is durable after a flush on any of them. FAST_ZERO is always
//! granted: zeroing changes only metadata of the image or of the file system.

mod export;
mod handshake;
mod replies;
mod requests;
mod status;

use crate::net::{Export, Listener, ServeError, Server, ServerOptions};
use requests::Nbd;

/// Starts to serve `exports` by NBD on `listeners`. The caller opens the disks before and closes
/// them after.
///
/// # Errors
/// [`ServeError`].
pub fn start(exports: Vec<Export>, listeners: Vec<Listener>, options: ServerOptions) -> Result<Server, ServeError> {
    Server::start::<Nbd>((), exports, listeners, options)
}
