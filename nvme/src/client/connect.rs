//! A connection becomes a queue of a controller.

use super::{ClientError, Result, auth::authenticate, host::HostName, session::Session};
use crate::wire::{
    ConnectData, DISCOVERY_NQN, auth,
    fabrics::{ConnectCommand, NO_FLOW_CONTROL},
};

/// Connects a queue of a controller. Returns the controller's id.
pub(super) fn connect(
    session: &mut Session,
    queue: u16,
    entries: u32,
    subsystem: &str,
    controller: u16,
    host: &HostName,
) -> Result<u16> {
    let asked = ConnectCommand { queue, entries, attributes: NO_FLOW_CONTROL, keep_alive_ms: 0 };
    let data = ConnectData { host_id: host.id, controller, subsystem: subsystem.to_owned(), host: host.nqn.clone() };
    let doing = if queue == 0 { "connect to the subsystem" } else { "connect an I/O queue" };
    let (done, _) = session.ask(doing, asked.command(0), &data.encode())?;
    let is_required = done.result & auth::REQUIRED != 0;
    match &host.keys {
        Some(keys) if is_required => authenticate(session, keys, &host.nqn, subsystem)?,
        None if is_required => {
            let what = "the target wants a proof of who this host is; write ?secrets=FILE in the URI".to_owned();
            return Err(ClientError::Authentication { peer: session.peer(), what });
        }
        Some(_) if subsystem != DISCOVERY_NQN => {
            let what = "the target does not ask for a proof; leave out ?secrets=FILE to connect without one";
            return Err(ClientError::Authentication { peer: session.peer(), what: what.into() });
        }
        Some(_) | None => {}
    }
    Ok(done.result as u16)
}
