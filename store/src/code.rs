//! Error codes: one small, stable set of reasons for which a disk operation can fail.
//!
//! The error types of the crates above (`ImageError`, `DiskError`, `ClientError`) have many
//! variants with sentences for people. A program that must decide what to do next asks an error for
//! its `code()`. Names ([`ErrorCode::as_str`]) never change their meaning; new codes may join, so a
//! `match` needs an arm for the rest.

use crate::is_full;
use std::{fmt, io};

/// Why an operation failed, for programs to match.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorCode {
    /// No file, device or export of this name exists.
    NotFound,
    /// The file that was to be made exists.
    Exists,
    /// The system or the server does not permit the access.
    PermissionDenied,
    /// Another program, or this one, has the file open in a way that excludes this use.
    Locked,
    /// A write, discard or change of size on a disk that is open read-only.
    ReadOnly,
    /// The file system, a quota or a limit of file lengths leaves no room.
    NoSpace,
    /// Options, a range or a name that can never work, whatever the files hold.
    InvalidInput,
    /// A format or a feature that this library does not have.
    Unsupported,
    /// The contents are not those of the format that was asked for or that the name promises.
    NotAnImage,
    /// Name and contents do not decide for one format: the caller must say it.
    FormatUnclear,
    /// A structure of the image contradicts its format.
    Corrupt,
    /// No file lies where a child says that its parent is.
    ParentMissing,
    /// The parent is another disk than the one that the child was made from.
    ParentChanged,
    /// The parent lies where the caller's options do not allow a parent.
    ParentNotAllowed,
    /// The chain cannot be: a loop, too many disks, other sectors or another format in the parent.
    BadChain,
    /// Another image names this one as its parent, and a write would damage that child.
    HasChildren,
    /// A copy was read back and differs from its source.
    VerifyFailed,
    /// An earlier flush failed, so what is durable is unknown. The disk must be closed.
    Poisoned,
    /// The server cannot be reached, the connection broke, or the server sent nothing for too long.
    Connection,
    /// The other side broke the protocol, or TLS failed.
    Protocol,
    /// The caller stopped the operation.
    Stopped,
    /// Any other failure of the system below.
    Io,
}

impl ErrorCode {
    /// All codes, in the order of their documentation.
    pub const ALL: &[Self] = &[
        Self::NotFound,
        Self::Exists,
        Self::PermissionDenied,
        Self::Locked,
        Self::ReadOnly,
        Self::NoSpace,
        Self::InvalidInput,
        Self::Unsupported,
        Self::NotAnImage,
        Self::FormatUnclear,
        Self::Corrupt,
        Self::ParentMissing,
        Self::ParentChanged,
        Self::ParentNotAllowed,
        Self::BadChain,
        Self::HasChildren,
        Self::VerifyFailed,
        Self::Poisoned,
        Self::Connection,
        Self::Protocol,
        Self::Stopped,
        Self::Io,
    ];

    /// The stable name, in snake case: `parent_missing`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NotFound => "not_found",
            Self::Exists => "exists",
            Self::PermissionDenied => "permission_denied",
            Self::Locked => "locked",
            Self::ReadOnly => "read_only",
            Self::NoSpace => "no_space",
            Self::InvalidInput => "invalid_input",
            Self::Unsupported => "unsupported",
            Self::NotAnImage => "not_an_image",
            Self::FormatUnclear => "format_unclear",
            Self::Corrupt => "corrupt",
            Self::ParentMissing => "parent_missing",
            Self::ParentChanged => "parent_changed",
            Self::ParentNotAllowed => "parent_not_allowed",
            Self::BadChain => "bad_chain",
            Self::HasChildren => "has_children",
            Self::VerifyFailed => "verify_failed",
            Self::Poisoned => "poisoned",
            Self::Connection => "connection",
            Self::Protocol => "protocol",
            Self::Stopped => "stopped",
            Self::Io => "io",
        }
    }

    /// The code of an error of the system, by its kind alone. `DiskError::code_of` also looks for
    /// the error of an image, a disk or a client inside.
    pub fn of_system(error: &io::Error) -> Self {
        use io::ErrorKind as Kind;
        match error.kind() {
            _ if is_full(error) => Self::NoSpace,
            Kind::NotFound | Kind::NotADirectory => Self::NotFound,
            Kind::AlreadyExists => Self::Exists,
            Kind::PermissionDenied => Self::PermissionDenied,
            Kind::ReadOnlyFilesystem => Self::ReadOnly,
            Kind::ResourceBusy | Kind::ExecutableFileBusy => Self::Locked,
            Kind::InvalidInput => Self::InvalidInput,
            Kind::Unsupported => Self::Unsupported,
            Kind::InvalidData => Self::Corrupt,
            Kind::ConnectionRefused
            | Kind::ConnectionReset
            | Kind::ConnectionAborted
            | Kind::NotConnected
            | Kind::BrokenPipe
            | Kind::TimedOut => Self::Connection,
            _ => Self::Io,
        }
    }
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn names_are_snake_case_and_differ() {
        let names: HashSet<_> = ErrorCode::ALL.iter().map(|code| code.as_str()).collect();
        assert_eq!(names.len(), ErrorCode::ALL.len());
        assert!(names.iter().all(|name| name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_')));
    }

    #[test]
    fn errors_of_the_system_have_codes() {
        let of = |kind: io::ErrorKind| ErrorCode::of_system(&kind.into()).as_str();
        assert_eq!(of(io::ErrorKind::NotFound), "not_found");
        assert_eq!(of(io::ErrorKind::AlreadyExists), "exists");
        assert_eq!(of(io::ErrorKind::PermissionDenied), "permission_denied");
        assert_eq!(of(io::ErrorKind::ReadOnlyFilesystem), "read_only");
        assert_eq!(of(io::ErrorKind::StorageFull), "no_space");
        assert_eq!(of(io::ErrorKind::QuotaExceeded), "no_space");
        assert_eq!(of(io::ErrorKind::FileTooLarge), "no_space");
        assert_eq!(of(io::ErrorKind::ResourceBusy), "locked");
        assert_eq!(of(io::ErrorKind::InvalidInput), "invalid_input");
        assert_eq!(of(io::ErrorKind::Unsupported), "unsupported");
        assert_eq!(of(io::ErrorKind::InvalidData), "corrupt");
        assert_eq!(of(io::ErrorKind::ConnectionReset), "connection");
        assert_eq!(of(io::ErrorKind::TimedOut), "connection");
        assert_eq!(of(io::ErrorKind::UnexpectedEof), "io");
    }
}
