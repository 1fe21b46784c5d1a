//! Why an object cannot be read, in sentences that say what to do.
//!
//! No error has a secret in it: names are shown without a query, a user or a password.

use diskwright_store::ErrorCode;
use std::{io, sync::Arc};

/// The result of an operation on an object.
pub type Result<T, E = ObjectError> = std::result::Result<T, E>;

/// Why an object cannot be read.
#[derive(Debug, Clone, thiserror::Error)]
pub enum ObjectError {
    /// The name is not that of an object.
    #[error("{name}: {why}")]
    BadName {
        /// The name, without secrets.
        name: String,
        /// What is wrong, and what is expected.
        why: &'static str,
    },
    /// Plain HTTP to another machine.
    #[error(
        "{name}: http:// is not encrypted, so anyone on the way could change the disk; use https://, or set DISKWRIGHT_ALLOW_HTTP=1"
    )]
    PlainHttp {
        /// The name.
        name: String,
    },
    /// No such object, bucket or host path.
    #[error("{name}: the server has no such object ({said}); check the name{hint}")]
    Missing {
        /// The name.
        name: String,
        /// What the server said.
        said: String,
        /// More that may be wrong, as in ", and the region".
        hint: &'static str,
    },
    /// The server refused the access.
    #[error("{name}: the server refused to show it ({said}); {hint}")]
    Denied {
        /// The name.
        name: String,
        /// What the server said.
        said: String,
        /// What to do.
        hint: &'static str,
    },
    /// The credentials cannot be read or are incomplete.
    #[error("{name}: no credentials can be used: {why}")]
    Credentials {
        /// The name.
        name: String,
        /// Why, and what to do.
        why: String,
    },
    /// The object is another one than when it was opened.
    #[error(
        "{name}: the object has changed since it was opened ({found}); the disk must be opened again, and children of it made anew"
    )]
    Changed {
        /// The name.
        name: String,
        /// What was found.
        found: String,
    },
    /// The object is not the version that its name asks for.
    #[error(
        "{name}: the object is another version: it has {found}, expected {expected}; bring that version back, or `reconnect` the child if the new one has the same contents"
    )]
    OtherVersion {
        /// The name.
        name: String,
        /// ETag and size.
        found: String,
        /// ETag and size.
        expected: String,
    },
    /// The server cannot do what is needed.
    #[error("{name}: {what}; a disk cannot be read from this server")]
    Unsuitable {
        /// The name.
        name: String,
        /// What it lacks.
        what: String,
    },
    /// The server broke the protocol.
    #[error("{name}: the server's answer is wrong: {what}; look at the server, and at proxies on the way")]
    Wrong {
        /// The name.
        name: String,
        /// What was found and what was expected.
        what: String,
    },
    /// A redirect that is not followed.
    #[error("{name}: the server leads to {to}, {why}; use the final address")]
    Redirect {
        /// The name.
        name: String,
        /// The host.
        to: String,
        /// Why it is not followed.
        why: &'static str,
    },
    /// The bucket lies in another region than the one that was asked.
    #[error("{name}: the bucket is in the region {region}; set AWS_REGION={region}")]
    Region {
        /// The name.
        name: String,
        /// Where the bucket is.
        region: String,
    },
    /// The server did not answer in time, however often it was asked.
    #[error("{name}: the server did not send it within {seconds} s ({last}); look at the network and the server")]
    Unreachable {
        /// The name.
        name: String,
        /// How long was tried.
        seconds: u64,
        /// The last failure.
        last: String,
    },
    /// A disk of this name was pushed already.
    #[error("{name}: a disk of this name is there already, and pushed disks never change; choose another name")]
    Exists {
        /// The name.
        name: String,
    },
    /// A manifest, a chunk or a list whose bytes are wrong.
    #[error("{name}: it is damaged: {what}; get it from a copy of the repository, or push the disk again")]
    Damaged {
        /// The name.
        name: String,
        /// What was found and what was expected.
        what: String,
    },
    /// An image that is not as it was sealed, or a seal that is not of this image.
    #[error(
        "{name}: {what}; bring the sealed image and its .seal file back, or `seal` the image again and `reconnect` its children"
    )]
    BrokenSeal {
        /// The name.
        name: String,
        /// What was found and what was expected.
        what: String,
    },
    /// The server cannot keep a repository, or not this disk.
    #[error("{name}: disks cannot be pushed there: {what}")]
    NoRepository {
        /// The name.
        name: String,
        /// What it lacks.
        what: String,
    },
    /// A request that failed, also when it was repeated.
    #[error("{name}: the request failed: {said}; look at the network and the server, then try again")]
    Failed {
        /// The name.
        name: String,
        /// What happened.
        said: String,
    },
    /// A write.
    #[error("{name}: an object cannot be written in place; open it read-only, or make a child of it on a local disk")]
    ReadOnly {
        /// The name.
        name: String,
    },
    /// The cache, or another local file.
    #[error("{path}: cannot {doing}: {source}")]
    Local {
        /// The action, as in "read the cache".
        doing: &'static str,
        /// The file or folder.
        path: String,
        /// The system's error.
        source: Arc<io::Error>,
    },
}

impl ObjectError {
    /// The system's error about a local file.
    pub(crate) fn local(doing: &'static str, path: &std::path::Path, source: io::Error) -> Self {
        Self::Local { doing, path: path.display().to_string(), source: Arc::new(source) }
    }

    /// Why it failed, for programs to match.
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::BadName { .. } | Self::PlainHttp { .. } | Self::Region { .. } => ErrorCode::InvalidInput,
            Self::Missing { .. } => ErrorCode::NotFound,
            Self::Exists { .. } => ErrorCode::Exists,
            Self::Damaged { .. } | Self::BrokenSeal { .. } => ErrorCode::Corrupt,
            Self::Failed { .. } => ErrorCode::Connection,
            Self::Denied { .. } | Self::Credentials { .. } | Self::Redirect { .. } => ErrorCode::PermissionDenied,
            Self::Changed { .. } | Self::Wrong { .. } => ErrorCode::Protocol,
            Self::OtherVersion { .. } => ErrorCode::ParentChanged,
            Self::Unsuitable { .. } | Self::NoRepository { .. } => ErrorCode::Unsupported,
            Self::Unreachable { .. } => ErrorCode::Connection,
            Self::ReadOnly { .. } => ErrorCode::ReadOnly,
            Self::Local { .. } => ErrorCode::Io,
        }
    }

    /// The kind of the corresponding `io::Error`.
    pub fn kind(&self) -> io::ErrorKind {
        match self {
            Self::BadName { .. } | Self::PlainHttp { .. } | Self::Region { .. } => io::ErrorKind::InvalidInput,
            Self::Missing { .. } => io::ErrorKind::NotFound,
            Self::Exists { .. } => io::ErrorKind::AlreadyExists,
            Self::Failed { .. } => io::ErrorKind::ConnectionAborted,
            Self::Denied { .. } | Self::Credentials { .. } | Self::Redirect { .. } => io::ErrorKind::PermissionDenied,
            Self::Changed { .. }
            | Self::OtherVersion { .. }
            | Self::Wrong { .. }
            | Self::Damaged { .. }
            | Self::BrokenSeal { .. } => io::ErrorKind::InvalidData,
            Self::Unsuitable { .. } | Self::NoRepository { .. } => io::ErrorKind::Unsupported,
            Self::Unreachable { .. } => io::ErrorKind::TimedOut,
            Self::ReadOnly { .. } => io::ErrorKind::ReadOnlyFilesystem,
            Self::Local { source, .. } => source.kind(),
        }
    }
}

impl From<ObjectError> for io::Error {
    fn from(error: ObjectError) -> Self {
        Self::new(error.kind(), error)
    }
}
