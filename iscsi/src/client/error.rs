//! Errors of the initiator.

use crate::{uri::UriError, wire::LoginStatus};
use diskwright_store::{ErrorCode, remote::ConnectionError, secrets::SecretsError};
use std::io;

/// Result of an operation of the initiator.
pub type Result<T, E = ClientError> = std::result::Result<T, E>;

/// Why a logical unit cannot be reached. `peer` is the target, displayed as an
/// [`Endpoint`](diskwright_store::Endpoint).
#[derive(Debug, Clone, thiserror::Error)]
pub enum ClientError {
    /// The URI is invalid.
    #[error(transparent)]
    Uri(#[from] UriError),
    /// There is no connection to the target, or it ended.
    #[error(transparent)]
    Connection(#[from] ConnectionError),
    /// The initiator's secret cannot be used.
    #[error(transparent)]
    Secrets(#[from] SecretsError),
    /// The target refused the login.
    #[error("{peer}: the target refuses the login: {status}")]
    Login {
        /// The target.
        peer: String,
        /// The reason.
        status: LoginStatus,
    },
    /// One side does not prove who it is.
    #[error("{peer}: {what}")]
    Authentication {
        /// The target.
        peer: String,
        /// What is missing or wrong.
        what: String,
    },
    /// The target refused a command that prepares the use of the unit.
    #[error("{peer}: the target refuses to {doing}: {answer}")]
    Refused {
        /// The target.
        peer: String,
        /// What was refused.
        doing: &'static str,
        /// The reason.
        answer: String,
    },
    /// There is no such target or unit, or the URI does not say which.
    #[error("{peer}: {what}")]
    Unknown {
        /// The target.
        peer: String,
        /// What was looked for, and what there is.
        what: String,
    },
    /// The logical unit cannot be used as a disk.
    #[error("{peer}: logical unit {unit} cannot be used: {what}")]
    Unusable {
        /// The target.
        peer: String,
        /// The logical unit.
        unit: u16,
        /// The reason.
        what: String,
    },
}

impl ClientError {
    /// The kind of the corresponding `io::Error`.
    pub fn kind(&self) -> io::ErrorKind {
        use io::ErrorKind as Kind;
        match self {
            Self::Uri(_) | Self::Unusable { .. } | Self::Secrets(_) => Kind::InvalidInput,
            Self::Connection(error) => error.kind(),
            Self::Login { status: LoginStatus::NOT_FOUND, .. } | Self::Unknown { .. } => Kind::NotFound,
            Self::Login { .. } | Self::Authentication { .. } | Self::Refused { .. } => Kind::PermissionDenied,
        }
    }

    /// Why it failed, for programs to match.
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::Uri(_) | Self::Unusable { .. } | Self::Secrets(_) => ErrorCode::InvalidInput,
            Self::Connection(error) => error.code(),
            Self::Login { status: LoginStatus::NOT_FOUND, .. } | Self::Unknown { .. } => ErrorCode::NotFound,
            Self::Login { .. } | Self::Authentication { .. } | Self::Refused { .. } => ErrorCode::PermissionDenied,
        }
    }
}

impl From<ClientError> for io::Error {
    fn from(error: ClientError) -> Self {
        Self::new(error.kind(), error)
    }
}
