//! NVMe/TCP: one of the protocols of the network (see [`net`](crate::net)).
//!
//! ```text
//!   window ─▶ session.rs    PDUs: digests, payload, waiting commands
//!               ├─▶ connect.rs    initialization, connect, properties; auth.rs: who a host is
//!               ├─▶ admin.rs      identify, log pages, features, events
//!               ├─▶ io.rs         reads, writes, clears, compares ─▶ the core
//!               └─▶ reserve.rs    reservations of namespaces
//!   results ─▶ replies.rs ─▶ outbox
//!          state.rs        what a session keeps
//!          controller.rs   what the connections of one host share
//!          seats.rs        what a host may do with each namespace
//!          namespaces.rs   exports as namespaces
//! ```
//!
//! The wire format is in `diskwright_nvme::wire`. A server is one subsystem. Each export is one of
//! its namespaces: the NSID is the export's index plus 1. A connection is one queue: the admin
//! queue or an I/O queue. A *controller* is what one host has connected: an admin queue and its I/O
//! queues, which may be on different workers. They share a [`Controller`](controller::Controller),
//! whose fields are atomic or under locks that are held for a lookup. The discovery subsystem is
//! served at the same address.
//!
//! Data of a write come in the capsule (up to 8 KiB), or are asked for by one R2T for each command.
//! The R2T is sent when the client's share has room for the data; until then the command waits
//! here, so that the data of other writes are still received. At most one queue of commands waits.
//!
//! Guarantees to hosts: a completed write is visible through every controller, and durable after a
//! flush of its namespace or if it was written with FUA. A deallocated range reads as zeros.
//!
//! With secrets, each queue of the storage subsystem takes nothing but the messages of DH-HMAC-CHAP
//! until its host has proved who it is.
//!
//! Not supported: TLS with pre-shared keys (rustls has no external PSKs), Diffie-Hellman groups,
//! metadata, fused commands. All namespaces are in one ANA group, whose paths are optimized: all
//! addresses lead to the same process.

mod admin;
mod auth;
mod connect;
mod controller;
mod io;
mod namespaces;
mod replies;
mod reserve;
mod seats;
mod session;
mod state;

use crate::{
    net::{Export, Listener, ServeError, Server, ServerOptions},
    reservations::Noted,
    secrets::Secrets,
};
use controller::Shared;
pub use diskwright_nvme::wire::{DEFAULT_PORT, check_nqn};
use state::Nvme;

/// Checks that the secrets of all hosts are keys of NVMe. A host has an NVMe qualified name; the
/// secrets of others are not looked at.
///
/// # Errors
/// [`ServeError::Secret`] with the host whose secret is none.
pub fn check_keys(secrets: &Secrets) -> Result<(), ServeError> {
    let mut hosts = secrets.all().filter(|one| check_nqn(one.name()).is_ok());
    match hosts.find(|one| diskwright_nvme::key::Key::parse(&one.secret_text()).is_none()) {
        Some(one) => Err(ServeError::Secret { name: one.name().to_owned() }),
        None => Ok(()),
    }
}

/// Starts to serve `exports` by NVMe/TCP on `listeners`, as the namespaces of one subsystem. The
/// caller opens the disks before and closes them after.
///
/// # Errors
/// [`ServeError`]; [`ServeError::Name`] if the subsystem's name is not an NVMe qualified name;
/// [`ServeError::NoTls`] if the options ask for TLS; [`ServeError::Secret`] if the secret of a host
/// is not a key.
pub fn start(
    subsystem: &str,
    exports: Vec<Export>,
    listeners: Vec<Listener>,
    options: ServerOptions,
) -> Result<Server, ServeError> {
    if options.tls.is_some() {
        return Err(ServeError::NoTls);
    }
    check_nqn(subsystem).map_err(|reason| ServeError::Name { name: subsystem.to_owned(), reason })?;
    let secrets = options.secrets.clone();
    secrets.as_ref().map_or(Ok(()), |secrets| check_keys(&secrets.current()))?;
    options.reservations.note(Noted::Outsiders);
    Server::start::<Nvme>(Shared::new(subsystem, secrets), exports, listeners, options)
}
