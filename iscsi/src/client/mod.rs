//! The iSCSI initiator: a logical unit as a [`BlockDevice`](diskwright_store::BlockDevice).
//!
//! ```text
//!   session.rs    a session in its blocking phase: PDUs, SCSI commands one at a time
//!   login.rs      the login: who this initiator is, what both sides agree on
//!   chap.rs       proving who we are, and asking the target for the same
//!   device.rs     the logical unit: discovery, its description
//!   unit.rs       what is known of the unit, and a session for each queue
//!   queue.rs      one session of one thread: calls -> SCSI commands, PDUs -> answers
//!   error.rs      errors
//! ```
//!
//! A block queue is a session of one connection, which one thread drives: a
//! [`RemoteQueue`](diskwright_store::remote::RemoteQueue). So nothing is shared between queues but
//! what was found out of the unit, and no lock is taken. Payload is transferred directly between
//! the socket and the requests' buffers. Short writes go with their command (immediate data); for
//! others the target asks by an R2T.
//!
//! A target drops an initiator that does not answer its questions (NOP-In). A queue answers them
//! when its thread reaps. If a session has ended while its queue was idle, the next request opens a
//! new one, unless a write has not been flushed.

mod chap;
mod device;
mod error;
mod login;
mod queue;
mod session;
mod unit;

pub use device::IscsiDevice;
pub use error::{ClientError, Result};
pub use unit::UnitInfo;
