//! Error codes of the transmission phase, and their conversion to and from `io::Error`.

use std::{fmt, io};

/// An error code. Section "Error values". Unknown codes are kept and treated as `EINVAL`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ErrorCode(pub u32);

impl ErrorCode {
    /// Success.
    pub const NONE: Self = Self(0);
    /// Not permitted: a write to a read-only export.
    pub const EPERM: Self = Self(1);
    /// An I/O error of the disk.
    pub const EIO: Self = Self(5);
    /// The server is out of memory.
    pub const ENOMEM: Self = Self(12);
    /// The request is invalid.
    pub const EINVAL: Self = Self(22);
    /// No space left, or a write beyond the end.
    pub const ENOSPC: Self = Self(28);
    /// Too long to be answered in one chunk (DF flag).
    pub const EOVERFLOW: Self = Self(75);
    /// Not supported, or not fast (FAST_ZERO flag).
    pub const ENOTSUP: Self = Self(95);
    /// The server is shutting down.
    pub const ESHUTDOWN: Self = Self(108);

    /// The code that a server sends for an error of its disk.
    pub fn from_io(error: &io::Error) -> Self {
        use io::ErrorKind as Kind;
        match error.kind() {
            Kind::PermissionDenied | Kind::ReadOnlyFilesystem => Self::EPERM,
            Kind::OutOfMemory => Self::ENOMEM,
            Kind::InvalidInput => Self::EINVAL,
            Kind::StorageFull | Kind::QuotaExceeded | Kind::FileTooLarge => Self::ENOSPC,
            Kind::Unsupported => Self::ENOTSUP,
            _ => match error.raw_os_error() {
                // EPERM has its own kind, handled above; ESHUTDOWN has none.
                Some(108) => Self::ESHUTDOWN,
                Some(75) => Self::EOVERFLOW,
                _ => Self::EIO,
            },
        }
    }

    /// The kind of error that a client reports.
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

/// A description for messages.
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
