//! Why an image of a cluster cannot be used, in sentences that say what to do.

use diskwright_store::ErrorCode;
use std::io;

/// The result of an operation on an image.
pub type Result<T, E = RbdError> = std::result::Result<T, E>;

/// Why an image cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RbdError {
    /// The name is not that of an image.
    #[error("{name}: {why}")]
    BadName {
        /// The name.
        name: String,
        /// What is wrong, and what is expected.
        why: &'static str,
    },
    /// librbd is not there, or lacks functions.
    #[error(
        "{name}: Ceph's library cannot be loaded ({why}); install it (Debian: librbd1, Fedora: librbd), version 15 or later"
    )]
    NoLibrary {
        /// The name.
        name: String,
        /// What the loader said.
        why: String,
    },
    /// The cluster cannot be reached.
    #[error(
        "{name}: cannot {doing}: {source}; look at ceph.conf, the keyring and the monitors (`ceph -s` tells whether they answer)"
    )]
    Cluster {
        /// The name.
        name: String,
        /// The action, as in "connect to the cluster".
        doing: &'static str,
        /// The library's error.
        source: io::Error,
    },
    /// The pool or the image is not there.
    #[error("{name}: there is no such {what}; `rbd ls POOL` lists images, `rbd snap ls POOL/IMAGE` snapshots")]
    Missing {
        /// The name.
        name: String,
        /// "pool", or "image or snapshot".
        what: &'static str,
    },
    /// Another client has the image open for writing.
    #[error(
        "{name}: another client holds its exclusive lock; stop that client, or open the image read-only (`rbd lock ls` names it)"
    )]
    Locked {
        /// The name.
        name: String,
    },
    /// A snapshot was to be written.
    #[error("{name}: a snapshot never changes; open it read-only, or make a child of it")]
    Snapshot {
        /// The name.
        name: String,
    },
    /// The cluster refused something else.
    #[error("{name}: cannot {doing} it: {source}")]
    Image {
        /// The name.
        name: String,
        /// The action, as in "open".
        doing: &'static str,
        /// The library's error.
        source: io::Error,
    },
}

impl RbdError {
    /// Why it failed, for programs to match.
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::BadName { .. } => ErrorCode::InvalidInput,
            Self::NoLibrary { .. } => ErrorCode::Unsupported,
            Self::Cluster { .. } => ErrorCode::Connection,
            Self::Missing { .. } => ErrorCode::NotFound,
            Self::Locked { .. } => ErrorCode::Locked,
            Self::Snapshot { .. } => ErrorCode::ReadOnly,
            Self::Image { .. } => ErrorCode::Io,
        }
    }

    /// The kind of the corresponding `io::Error`.
    pub fn kind(&self) -> io::ErrorKind {
        match self {
            Self::BadName { .. } => io::ErrorKind::InvalidInput,
            Self::NoLibrary { .. } => io::ErrorKind::Unsupported,
            Self::Cluster { source, .. } | Self::Image { source, .. } => source.kind(),
            Self::Missing { .. } => io::ErrorKind::NotFound,
            Self::Locked { .. } => io::ErrorKind::ResourceBusy,
            Self::Snapshot { .. } => io::ErrorKind::ReadOnlyFilesystem,
        }
    }
}

impl From<RbdError> for io::Error {
    fn from(error: RbdError) -> Self {
        Self::new(error.kind(), error)
    }
}
