//! The NVMe/TCP host: a namespace as a [`BlockDevice`](diskwright_store::BlockDevice).
//!
//! ```text
//!   session.rs    a connection in its blocking phase: initialize, admin commands
//!   host.rs       who this host is
//!   connect.rs    a connection becomes a queue
//!   device.rs     the namespace: discovery, sizes, a queue for each thread
//!   queue.rs      one connection of one thread: calls -> capsules, PDUs -> answers
//!   auth.rs       proving who the host is, and asking the subsystem for the same
//!   limits.rs     what a queue may use
//!   error.rs      errors
//! ```
//!
//! A block queue is an I/O queue with a connection of its own, which one thread drives: a
//! [`RemoteQueue`](diskwright_store::remote::RemoteQueue). So nothing is shared between queues but
//! the geometry, and no lock is taken. Payload is transferred directly between the socket and the
//! requests' buffers. Short writes go into the capsule of their command; for others the controller
//! asks by an R2T.

mod auth;
mod connect;
mod device;
mod error;
mod host;
mod limits;
mod queue;
mod session;

pub use device::{NamespaceInfo, NvmeDevice};
pub use error::{ClientError, Result};
