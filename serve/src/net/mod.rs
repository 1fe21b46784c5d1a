//! Servers of the network: one loop for every protocol.
//!
//! ```text
//!   listen.rs ─▶ server.rs (front thread: accepts) ─▶ worker.rs (thread, ring, some clients)
//!                                                    │
//!     connection.rs   state of one client            └─▶ core.rs  Protocol: what NBD adds;
//!     window.rs       received bytes                         │    reads, clears ─▶ block queues
//!     secure.rs       TLS                                    └─ payload.rs     writes
//!     outbox.rs       replies to be sent             flights.rs    requests in flight
//!     pool.rs         registered buffers             settings.rs   options of the server
//!     exports.rs      disks with names               peer.rs       who a client is
//!                                                    protocol.rs   types of a protocol
//! ```
//!
//! A server needs io_uring, because its sockets and its files share one ring. Without io_uring it
//! fails with [`ThreadError::Ring`](crate::ThreadError::Ring).

pub(crate) mod connection;
pub(crate) mod core;
pub mod exports;
pub(crate) mod flights;
mod listen;
pub(crate) mod outbox;
mod payload;
pub(crate) mod peer;
pub(crate) mod pool;
pub(crate) mod protocol;
mod secure;
mod server;
pub(crate) mod settings;
mod window;
mod worker;

pub use exports::{Export, ExportError};
pub(crate) use listen::SocketFile;
pub use listen::{Address, ListenError, Listener};
pub use server::{ServeError, Server};
pub use settings::ServerOptions;
