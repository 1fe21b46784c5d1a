//! A queue to a disk behind a socket: what the clients of NVMe/TCP and iSCSI share.
//!
//! ```text
//!   connection.rs  a socket with its peer: connecting, blocking sends and receives, errors
//!   tables.rs      requests (slots) and commands (calls) in flight
//!   inbound.rs     receiving: headers, and data of reads into their buffers
//!   queue.rs       the block queue: requests -> calls -> socket, and back
//!   protocol.rs    what differs: how a call is sent, and how a header is understood
//! ```
//!
//! One thread drives a queue and its connection, so no lock is taken. The client of NBD is not
//! among the users: its connections are shared by several threads and by stores.

mod connection;
mod inbound;
mod protocol;
mod queue;
mod tables;

pub use connection::{Connection, ConnectionError};
pub use protocol::{Broken, Data, Heard, Protocol};
pub use queue::{QueueLimits, RemoteQueue};
pub use tables::{Call, Calls, Outcome};
