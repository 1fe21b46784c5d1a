//! Errors of a fleet, as sentences that say what to do.

use crate::wire::WireError;
use diskwright_load::LoadError;
use std::path::PathBuf;

/// Result of an operation of a fleet.
pub type Result<T, E = FleetError> = std::result::Result<T, E>;

/// Why a fleet cannot measure.
#[derive(Debug, thiserror::Error)]
pub enum FleetError {
    /// A key and certificate cannot be used.
    #[error("the identity in {} cannot be used: {what}; remove the file to make a new one, which has another fingerprint", path.display())]
    Identity {
        /// The file.
        path: PathBuf,
        /// What was found.
        what: String,
    },
    /// TLS cannot be set up.
    #[error("TLS cannot be used: {0}")]
    Tls(String),
    /// An address is wrong.
    #[error(
        "{text:?} is not the address of an agent: {what}; it looks like HOST:PORT#FINGERPRINT, as the agent prints it"
    )]
    Address {
        /// The address.
        text: String,
        /// What is wrong.
        what: String,
    },
    /// An address cannot be listened on.
    #[error("cannot listen on {address}: {source}; choose another port")]
    Listen {
        /// The address.
        address: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// A peer cannot be reached.
    #[error("{name}: cannot connect: {source}; is it running, and can it be reached from here?")]
    Connect {
        /// Name or address of the peer.
        name: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// A peer has another fingerprint than expected.
    #[error(
        "{name}: the connection was refused: {what}; compare the fingerprint with the one that it printed: another one means another program, or someone in between"
    )]
    Peer {
        /// Name or address of the peer.
        name: String,
        /// What was found.
        what: String,
    },
    /// A peer was lost.
    #[error("{name}: {source}")]
    Lost {
        /// Name of the peer.
        name: String,
        /// What happened.
        source: WireError,
    },
    /// A peer sent what it must not send.
    #[error("{name}: it sent {what}; it is another program, or it is damaged")]
    Protocol {
        /// Name of the peer.
        name: String,
        /// What the peer sent.
        what: String,
    },
    /// An agent serves another controller.
    #[error("{name}: {why}")]
    Busy {
        /// Name of the peer.
        name: String,
        /// The agent's reason: a sentence.
        why: String,
    },
    /// An agent refuses.
    #[error("{name}: {why}")]
    Refused {
        /// Name of the peer.
        name: String,
        /// The agent's reason: a sentence.
        why: String,
    },
    /// The plan cannot be carried out.
    #[error("{what}; {hint}")]
    Plan {
        /// What is wrong.
        what: String,
        /// What to do.
        hint: String,
    },
    /// The load generator refuses a job.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The user stopped it.
    #[error("stopped before the end")]
    Stopped,
}
