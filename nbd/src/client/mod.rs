//! The NBD client: an export as a [`BlockDevice`](diskwright_store::BlockDevice), or as a
//! [`Store`](diskwright_store::Store) that contains an image.
//!
//! ```text
//!   negotiate.rs   URI -> connection in the transmission phase
//!   device.rs      the export: sizes, connections, extents
//!   status.rs      block status -> extents
//!   queue.rs       requests of the block queue -> slots
//!   lane.rs        one connection: sending, receiving, waiting, reconnecting
//!   lost.rs        whether answered writes were lost with a server
//!   tables.rs      slots and calls in flight
//!   coverage.rs    received ranges of a read
//!   inbound.rs     receiving
//!   transport.rs   a socket, with or without TLS
//!   store.rs       the export as a store, for an image in it
//!   watch.rs       the store's lane on an engine's ring
//!   error.rs       errors
//! ```
//!
//! Payload is transferred directly between the socket and the requests' buffers (with TLS,
//! decryption makes a copy). A turn of a queue costs one system call to send everything that was
//! pushed, and one or two to receive everything that has arrived.

mod coverage;
mod device;
mod error;
mod inbound;
mod lane;
mod lost;
mod negotiate;
mod queue;
mod status;
mod store;
mod tables;
mod transport;
mod watch;

pub use device::NbdDevice;
pub use error::{ClientError, Result};
pub use negotiate::ExportInfo;
pub use store::NbdStore;
