//! iSCSI: one of the protocols of the network (see [`net`](crate::net)).
//!
//! ```text
//!   window ─▶ session.rs    PDUs: digests, order, payload, waiting commands
//!               ├─▶ login.rs      what both sides agree on; chap.rs: who the initiator is
//!               ├─▶ requests.rs   NOP, text, logout, task management
//!               └─▶ tasks.rs      SCSI commands: checked, then
//!                     ├─▶ answers.rs    those that are answered at once
//!                     ├─▶ reserve.rs    reservations
//!                     └─▶ transfers.rs  those that the disk works on ─▶ the core
//!                           └─▶ copies.rs   copies from disk to disk
//!   results ─▶ transfers.rs ─▶ replies.rs ─▶ outbox
//!          state.rs       what a session keeps
//!          units.rs       what a session knows of each logical unit
//!          shared.rs      what the sessions of a server share; tokens.rs: tokens of copies
//! ```
//!
//! The wire format and the SCSI commands are in `diskwright_iscsi`. A server is one target with one
//! portal group. Each export is one of its logical units: the LUN is the export's index. A session
//! has one connection, and error recovery is at level 0: after an error of the connection the
//! initiator logs in again. Sessions for discovery are served at the same address.
//!
//! Data of a write come with the command (up to 64 KiB), or are asked for by R2Ts, one at a time
//! for each command. An R2T is sent when the client's share has room for the data; until then the
//! command waits here, so that the data of other writes are still received. The command window
//! limits how many wait.
//!
//! Guarantees to initiators: a completed write is visible through every session, and durable after
//! SYNCHRONIZE CACHE or if it was written with FUA. An unmapped range reads as zeros. COMPARE AND
//! WRITE and ORWRITE are atomic to the writes of all doors of the disk.
//!
//! Not supported: several connections of a session, error
//! recovery above level 0, markers, autosense in the descriptor format, protection information.

mod answers;
mod chap;
mod copies;
mod login;
mod replies;
mod requests;
mod reserve;
mod session;
mod shared;
mod state;
mod tasks;
mod tokens;
mod transfers;
mod units;

use crate::{
    net::{Export, Listener, ServeError, Server, ServerOptions},
    reservations::Noted,
};
pub use diskwright_iscsi::wire::{DEFAULT_PORT, check_name as check_target};
use shared::Shared;
use state::Iscsi;
use std::sync::Arc;

/// Starts to serve `exports` by iSCSI on `listeners`, as the logical units of one target. The
/// caller opens the disks before and closes them after.
///
/// # Errors
/// [`ServeError`]; [`ServeError::Name`] if the target's name is not an iSCSI name;
/// [`ServeError::NoTls`] if the options ask for TLS.
pub fn start(
    target: &str,
    exports: Vec<Export>,
    listeners: Vec<Listener>,
    options: ServerOptions,
) -> Result<Server, ServeError> {
    if options.tls.is_some() {
        return Err(ServeError::NoTls);
    }
    check_target(target).map_err(|reason| ServeError::Name { name: target.to_owned(), reason })?;
    options.reservations.note(Noted::All);
    let shared = Shared::new(target, Arc::clone(&options.reservations), options.secrets.clone());
    Server::start::<Iscsi>(shared, exports, listeners, options)
}
