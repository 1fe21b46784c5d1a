//! What the sessions of a server share, whichever worker they are on.
//!
//! ```text
//!   a login ─▶ Shared::open ─▶ Nexus      the earlier session of the same initiator port is ended
//! ```
//!
//! A port that logs in again takes over from its earlier session. A command of that one must not
//! write after a command of the new one: see [`Nexus::has_ended`].
//!
//! One lock guards the sessions. It is held for a lookup or a change.

use super::tokens::Tokens;
use crate::{Keyring, reservations::ReservationTable};
use std::{
    collections::BTreeMap,
    fmt,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
};

#[derive(Debug)]
pub(crate) struct Shared {
    /// The name of the target.
    pub(super) target: String,
    pub(super) reservations: Arc<ReservationTable>,
    /// `None` lets every initiator in.
    pub(super) secrets: Option<Arc<Keyring>>,
    sessions: Mutex<Sessions>,
    pub(super) tokens: Tokens,
}

#[derive(Debug, Default)]
struct Sessions {
    by_port: BTreeMap<Port, Arc<Nexus>>,
    last_tsih: u16,
}

/// What identifies the port of an initiator: its name, and its part of the session's id.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Port {
    pub(super) initiator: String,
    pub(super) isid: [u8; 6],
}

impl fmt::Display for Port {
    /// As the standard writes it (RFC 7143, 3.4.6).
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{},i,0x", self.initiator)?;
        self.isid.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// A session, as others see it.
#[derive(Debug)]
pub(super) struct Nexus {
    pub(super) port: Port,
    /// The target's part of the session's id.
    pub(super) tsih: u16,
    has_ended: AtomicBool,
}

impl Nexus {
    /// Whether the same initiator port has logged in again. A command is counted before this is
    /// looked at, and a login sets it before it looks at the count. So either the command sees the
    /// login and is refused, or the login sees the command and is refused.
    pub(super) fn has_ended(&self) -> bool {
        self.has_ended.load(SeqCst)
    }
}

impl Shared {
    pub(super) fn new(target: &str, reservations: Arc<ReservationTable>, secrets: Option<Arc<Keyring>>) -> Self {
        Self { target: target.to_owned(), reservations, secrets, sessions: Mutex::default(), tokens: Tokens::default() }
    }

    /// A new session. An earlier one of the same port is told to end, unless the new one is for
    /// discovery, which ends none and is ended by none.
    pub(super) fn open(&self, port: Port, is_discovery: bool) -> Arc<Nexus> {
        let mut sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        let is_free = |tsih: u16| sessions.by_port.values().all(|nexus| nexus.tsih != tsih);
        let after = sessions.last_tsih;
        let tsih = (after.saturating_add(1)..=u16::MAX).chain(1..=after).find(|&tsih| is_free(tsih)).unwrap_or(1);
        sessions.last_tsih = tsih;
        let nexus = Arc::new(Nexus { port: port.clone(), tsih, has_ended: AtomicBool::new(false) });
        if is_discovery {
            return nexus;
        }
        if let Some(before) = sessions.by_port.insert(port, Arc::clone(&nexus)) {
            before.has_ended.store(true, SeqCst);
        }
        nexus
    }

    /// The connection of a session is being closed.
    pub(super) fn close(&self, nexus: &Arc<Nexus>) {
        let mut sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        if sessions.by_port.get(&nexus.port).is_some_and(|there| Arc::ptr_eq(there, nexus)) {
            sessions.by_port.remove(&nexus.port);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(isid: u8) -> Port {
        Port { initiator: "iqn.2026-11.test:a".into(), isid: [isid; 6] }
    }

    #[test]
    fn a_second_login_of_a_port_ends_the_first_session() {
        let shared = Shared::new("iqn.2026-11.test:t", Arc::default(), None);
        let (first, other) = (shared.open(port(1), false), shared.open(port(2), false));
        let second = shared.open(port(1), false);
        assert!(first.has_ended() && !other.has_ended() && !second.has_ended());
        assert!(first.tsih != second.tsih && first.tsih != 0);
        assert!(!shared.open(port(1), true).has_ended() && !second.has_ended(), "discovery is apart");
        // Its end is not that of the second.
        shared.close(&first);
        let third = shared.open(port(1), false);
        assert!(second.has_ended() && !third.has_ended());
    }
}
