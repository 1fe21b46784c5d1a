//! Errors of the host.

use crate::{
    uri::UriError,
    wire::{PduError, Status},
};
use std::{io, sync::Arc};

/// Result of an operation of the host.
pub type Result<T, E = ClientError> = std::result::Result<T, E>;

/// Why a namespace cannot be reached, or why a request failed. `peer` is the target, displayed as
/// an [`Endpoint`](diskwright_store::Endpoint).
#[derive(Debug, Clone, thiserror::Error)]
pub enum ClientError {
    /// The URI is invalid.
    #[error(transparent)]
    Uri(#[from] UriError),
    /// No connection to the target could be made.
    #[error("{peer}: cannot connect: {source}; check that the target is running and listens there")]
    Connect {
        /// The target.
        peer: String,
        /// The system's error.
        source: Arc<io::Error>,
    },
    /// The connection broke.
    #[error("{peer}: the connection broke while {doing}: {source}; look at the target's log")]
    Lost {
        /// The target.
        peer: String,
        /// What was being done.
        doing: &'static str,
        /// The system's error.
        source: Arc<io::Error>,
    },
    /// A malformed PDU.
    #[error("{peer}: while {doing}: {source}; this is not an NVMe/TCP target, or it is broken")]
    Wire {
        /// The target.
        peer: String,
        /// What was being done.
        doing: &'static str,
        /// What is wrong with the PDU.
        source: PduError,
    },
    /// Well-formed PDUs that violate the protocol.
    #[error(
        "{peer}: the target violated the protocol: {what}; the connection was closed, do not trust the data read from it"
    )]
    Protocol {
        /// The target.
        peer: String,
        /// The violation.
        what: String,
    },
    /// The target sent nothing for too long.
    #[error("{peer}: the target sent nothing for {seconds} s; look at the target's log and at the network")]
    Stalled {
        /// The target.
        peer: String,
        /// How long the target sent nothing.
        seconds: u64,
    },
    /// The target refused a command that prepares the use of the namespace.
    #[error("{peer}: the target refuses to {doing}: {status}{}", hint_of(*status))]
    Refused {
        /// The target.
        peer: String,
        /// What was refused.
        doing: &'static str,
        /// The reason.
        status: Status,
    },
    /// There is no such subsystem or namespace, or the URI does not say which.
    #[error("{peer}: {what}")]
    Unknown {
        /// The target.
        peer: String,
        /// What was looked for, and what there is.
        what: String,
    },
    /// The namespace cannot be used as a disk.
    #[error("{peer}: namespace {nsid} cannot be used: {what}")]
    Unusable {
        /// The target.
        peer: String,
        /// The namespace.
        nsid: u32,
        /// The reason.
        what: String,
    },
}

fn hint_of(status: Status) -> &'static str {
    match Status(status.code()) {
        Status(0x182) => "; check the NQN in the URI, and whether the target allows this host",
        Status(0x191) => "; this program cannot authenticate itself yet",
        _ => "",
    }
}

impl ClientError {
    /// The kind of the corresponding `io::Error`.
    pub fn kind(&self) -> io::ErrorKind {
        use io::ErrorKind as Kind;
        match self {
            Self::Uri(_) | Self::Unusable { .. } => Kind::InvalidInput,
            Self::Connect { source, .. } | Self::Lost { source, .. } => source.kind(),
            Self::Wire { .. } | Self::Protocol { .. } => Kind::InvalidData,
            Self::Stalled { .. } => Kind::TimedOut,
            Self::Unknown { .. } => Kind::NotFound,
            Self::Refused { .. } => Kind::PermissionDenied,
        }
    }

    /// Why it failed, for programs to match.
    pub fn code(&self) -> diskwright_store::ErrorCode {
        use diskwright_store::ErrorCode as Code;
        match self {
            Self::Uri(_) | Self::Unusable { .. } => Code::InvalidInput,
            Self::Connect { .. } | Self::Lost { .. } | Self::Stalled { .. } => Code::Connection,
            Self::Wire { .. } | Self::Protocol { .. } => Code::Protocol,
            Self::Unknown { .. } => Code::NotFound,
            Self::Refused { .. } => Code::PermissionDenied,
        }
    }
}

impl From<ClientError> for io::Error {
    fn from(error: ClientError) -> Self {
        Self::new(error.kind(), error)
    }
}
