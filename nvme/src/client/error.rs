//! Errors of the host.

use crate::{
    uri::UriError,
    wire::{PduError, Status},
};
use diskwright_store::{remote::ConnectionError, secrets::SecretsError};
use std::io;

/// Result of an operation of the host.
pub type Result<T, E = ClientError> = std::result::Result<T, E>;

/// Why a namespace cannot be reached, or why a request failed. `peer` is the target, displayed as
/// an [`Endpoint`](diskwright_store::Endpoint).
#[derive(Debug, Clone, thiserror::Error)]
pub enum ClientError {
    /// The URI is invalid.
    #[error(transparent)]
    Uri(#[from] UriError),
    /// There is no connection to the target, or it ended.
    #[error(transparent)]
    Connection(#[from] ConnectionError),
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
    /// The host's secret cannot be used.
    #[error(transparent)]
    Secrets(#[from] SecretsError),
    /// One side does not prove who it is.
    #[error("{peer}: {what}")]
    Authentication {
        /// The target.
        peer: String,
        /// What is missing or wrong.
        what: String,
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
        Status(0x191) => "; write ?secrets=FILE in the URI",
        _ => "",
    }
}

impl ClientError {
    /// The kind of the corresponding `io::Error`.
    pub fn kind(&self) -> io::ErrorKind {
        use io::ErrorKind as Kind;
        match self {
            Self::Uri(_) | Self::Secrets(_) | Self::Unusable { .. } => Kind::InvalidInput,
            Self::Connection(error) => error.kind(),
            Self::Wire { .. } => Kind::InvalidData,
            Self::Unknown { .. } => Kind::NotFound,
            Self::Refused { .. } | Self::Authentication { .. } => Kind::PermissionDenied,
        }
    }

    /// Why it failed, for programs to match.
    pub fn code(&self) -> diskwright_store::ErrorCode {
        use diskwright_store::ErrorCode as Code;
        match self {
            Self::Uri(_) | Self::Secrets(_) | Self::Unusable { .. } => Code::InvalidInput,
            Self::Connection(error) => error.code(),
            Self::Wire { .. } => Code::Protocol,
            Self::Unknown { .. } => Code::NotFound,
            Self::Refused { .. } | Self::Authentication { .. } => Code::PermissionDenied,
        }
    }
}

impl From<ClientError> for io::Error {
    fn from(error: ClientError) -> Self {
        Self::new(error.kind(), error)
    }
}
