//! Servers of the network: one loop for every protocol.
//!
//! ```text
//!   listen.rs ─▶ server.rs (front thread: accepts) ─▶ worker.rs (thread, ring, some clients)
//!                                                    │
//!     connection.rs   state of one client            └─▶ protocol.rs   what NBD or another adds
//!     window.rs       received bytes                      │
//!     secure.rs       TLS                                 └─▶ core.rs  reads, writes, clears ─▶
//!     outbox.rs       replies to be sent                              block queues ─▶ replies
//!     pool.rs         registered buffers             flights.rs    requests in flight
//!     exports.rs      disks with names               settings.rs   options of the server
//!                                                    peer.rs       who a client is
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
