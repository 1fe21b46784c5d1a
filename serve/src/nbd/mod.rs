//! The NBD server.
//!
//! ```text
//!   listen.rs ─▶ server.rs (the front: accepts) ─▶ worker.rs (a thread, a ring, some of the clients)
//!                                                    │
//!     connection.rs   where a client is              ├─ handshake.rs   options ─▶ answers, the session
//!     secure.rs       TLS between                    ├─ desk.rs        requests ─▶ block queue ─▶ replies.rs
//!     outbox.rs       what it is owed                └─ status.rs      extents ─▶ block status
//!     pool.rs         buffers, registered            flights.rs        what the disks work on
//!     export.rs       disks under names              settings.rs       what can be chosen
//!     post.rs         news from thread to thread
//! ```
//!
//! The wire itself is `diskwright_nbd::wire`. There is no way of serving without io_uring: a server
//! whose sockets and files are on one ring is what this is; where the system has none,
//! [`ServeError::Ring`] says so.
//!
//! What is promised to clients: a completed write is seen on every connection (so several may be
//! used, CAN_MULTI_CONN), and it is durable after a flush on any of them. FAST_ZERO is always
//! granted: zeroing is metadata of the image or of the file system.

mod connection;
mod desk;
pub mod export;
mod flights;
mod handshake;
pub mod listen;
mod outbox;
mod pool;
mod post;
mod replies;
mod secure;
pub mod server;
pub mod settings;
mod status;
mod window;
mod worker;

pub use export::{Export, ExportError};
pub use listen::{Address, ListenError, Listener};
pub use server::{NbdServer, ServeError};
pub use settings::Options;
