//! The NBD server.
//!
//! ```text
//!   listen.rs ─▶ server.rs (front thread: accepts) ─▶ worker.rs (thread, ring, some clients)
//!                                                    │
//!     connection.rs   state of one client            ├─ handshake.rs   options ─▶ replies, session
//!     secure.rs       TLS                            ├─ dispatch.rs    requests ─▶ block queue
//!     outbox.rs       replies to be sent             │                   ─▶ replies.rs
//!     pool.rs         registered buffers             └─ status.rs      extents ─▶ block status
//!     export.rs       disks with names               flights.rs        requests in flight
//!     window.rs       received bytes                 settings.rs       options of the server
//!                                                    peer.rs           who a client is
//! ```
//!
//! The wire format is in `diskwright_nbd::wire`. The server needs io_uring, because its sockets and
//! its files share one ring. Without io_uring it fails with
//! [`ThreadError::Ring`](crate::ThreadError::Ring).
//!
//! Guarantees to clients: a completed write is visible on every connection, so a client may use
//! several (CAN_MULTI_CONN). The write is durable after a flush on any of them. FAST_ZERO is always
//! granted: zeroing changes only metadata of the image or of the file system.

mod connection;
mod dispatch;
pub mod export;
mod flights;
mod handshake;
mod listen;
mod outbox;
mod peer;
mod pool;
mod replies;
mod secure;
mod server;
mod settings;
mod status;
mod window;
mod worker;

pub use export::{Export, ExportError};
pub(crate) use listen::SocketFile;
pub use listen::{Address, ListenError, Listener};
pub use server::{NbdServer, ServeError};
pub use settings::ServerOptions;
