//! The NVMe/TCP host: a namespace as a [`BlockDevice`](diskwright_store::BlockDevice).
//!
//! ```text
//!   session.rs    a connection in its blocking phase: initialize, connect, admin commands
//!   device.rs     the namespace: discovery, sizes, a queue for each thread
//!   queue.rs      one connection of one thread: requests of the block queue -> commands
//!   limits.rs     what a queue may use
//!   tables.rs     requests and commands in flight
//!   inbound.rs    receiving
//!   error.rs      errors
//! ```
//!
//! A block queue is an I/O queue with a connection of its own, which one thread drives. So nothing
//! is shared between queues but the geometry, and no lock is taken. Payload is transferred directly
//! between the socket and the requests' buffers. Short writes go into the capsule of their command;
//! for others the controller asks by an R2T.

mod device;
mod error;
mod inbound;
mod limits;
mod queue;
mod session;
mod tables;

pub use device::{NamespaceInfo, NvmeDevice};
pub use error::{ClientError, Result};
