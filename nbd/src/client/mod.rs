//! The client: an export of an NBD server as a [`BlockDevice`](diskwright_store::BlockDevice), or
//! as a [`Store`](diskwright_store::Store) that holds an image.
//!
//! ```text
//!   negotiate.rs   URI -> connection in the transmission phase
//!   device.rs      the export: sizes, connections, extents          status.rs   block status -> extents
//!   queue.rs       requests of the block queue -> slots
//!   lane.rs        one connection: who sends, who receives, who waits; reconnecting
//!   tables.rs      slots and calls in flight                        coverage.rs what of a read has come
//!   outbound.rs    what is to be sent                               inbound.rs  what comes
//!   transport.rs   a socket that never blocks, with TLS or without
//!   store.rs       the export as a store, for an image inside         watch.rs    its lane on an engine's ring
//!   error.rs       what can go wrong
//! ```
//!
//! Contents go straight between the socket and the buffers of the requests (with TLS there is a
//! copy, made by deciphering). A turn of a queue costs one system call to send all that was pushed,
//! and one or two to receive all that has come.

mod coverage;
mod device;
mod error;
mod inbound;
mod lane;
mod negotiate;
mod outbound;
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
