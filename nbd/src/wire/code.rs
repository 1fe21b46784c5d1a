//! Error codes of the transmission phase, to and from `io::Error`.

use std::{fmt, io};

/// Why a request failed. Section "Error values". Codes that are not known are kept, and count as
/// `EINVAL`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ErrorCode(pub u32);

impl ErrorCode {
    /// Not failed.
    pub const NONE: Self = Self(0);
    /// Not permitted: a write to a read-only export.
    pub const EPERM: Self = Self(1);
    /// The disk failed.
    pub const EIO: Self = Self(5);
    /// The server has no memory.
    pub const ENOMEM: Self = Self(12);
    /// The request makes no sense.
    pub const EINVAL: Self = Self(22);
    /// No space; or a write beyond the end.
    pub const ENOSPC: Self = Self(28);
    /// Too long to be sent unfragmented.
    pub const EOVERFLOW: Self = Self(75);
    /// Not supported; or not fast.
    pub const ENOTSUP: Self = Self(95);
    /// The server is shutting down.
    pub const ESHUTDOWN: Self = Self(108);

    /// What a server answers for an error of its disk.
    pub fn from_io(error: &io::Error) -> Self {
        use io::ErrorKind as Kind;
        match error.kind() {
            Kind::PermissionDenied | Kind::ReadOnlyFilesystem => Self::EPERM,
            Kind::OutOfMemory => Self::ENOMEM,
            Kind::InvalidInput => Self::EINVAL,
            Kind::StorageFull | Kind::QuotaExceeded | Kind::FileTooLarge => Self::ENOSPC,
            Kind::Unsupported => Self::ENOTSUP,
            _ => match error.raw_os_error() {
                // EPERM has this kind already; ESHUTDOWN has none of its own.
                Some(108) => Self::ESHUTDOWN,
                Some(75) => Self::EOVERFLOW,
                _ => Self::EIO,
            },
        }
    }

    /// The kind of error that a client passes on.
    pub fn kind(self) -> io::ErrorKind {
        use io::ErrorKind as Kind;
        match self {
            Self::EPERM => Kind::PermissionDenied,
            Self::ENOMEM => Kind::OutOfMemory,
            Self::ENOSPC => Kind::StorageFull,
            Self::ENOTSUP => Kind::Unsupported,
            Self::ESHUTDOWN => Kind::ConnectionAborted,
            Self::EIO => Kind::Other,
            _ => Kind::InvalidInput,
        }
    }
}

impl fmt::Debug for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// In words for people.
impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match *self {
            Self::NONE => "no error",
            Self::EPERM => "operation not permitted (EPERM)",
            Self::EIO => "input/output error (EIO)",
            Self::ENOMEM => "out of memory (ENOMEM)",
            Self::EINVAL => "invalid argument (EINVAL)",
            Self::ENOSPC => "no space left (ENOSPC)",
            Self::EOVERFLOW => "too large (EOVERFLOW)",
            Self::ENOTSUP => "not supported (ENOTSUP)",
            Self::ESHUTDOWN => "shutting down (ESHUTDOWN)",
            Self(other) => return write!(f, "error {other}"),
        })
    }
}
