//! How a command ended. Base, "Status Code"; NVM, "Status Values".

use std::{fmt, io};

/// Bits 15:1 of a completion's last word: status code (bits 7:0), its type (10:8), more (13), do
/// not retry (14).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Status(pub u16);

/// Do not retry: the same command would fail again.
const DO_NOT_RETRY: u16 = 1 << 14;

impl Status {
    /// The command has succeeded.
    pub const SUCCESS: Self = Self(0);
    /// There is no such command.
    pub const INVALID_OPCODE: Self = Self(DO_NOT_RETRY | 0x01);
    /// A field has an invalid value.
    pub const INVALID_FIELD: Self = Self(DO_NOT_RETRY | 0x02);
    /// The controller failed.
    pub const INTERNAL: Self = Self(0x06);
    /// The controller has no room for more of something.
    pub const NO_RESOURCES: Self = Self(0x12f);
    /// There is no such namespace.
    pub const INVALID_NAMESPACE: Self = Self(DO_NOT_RETRY | 0x0b);
    /// The command is not allowed now.
    pub const SEQUENCE: Self = Self(DO_NOT_RETRY | 0x0c);
    /// The length of the data does not fit the command.
    pub const SGL_LENGTH: Self = Self(DO_NOT_RETRY | 0x0f);
    /// The kind of the data's description is not supported.
    pub const SGL_TYPE: Self = Self(DO_NOT_RETRY | 0x11);
    /// The host has an id of another length than the command says.
    pub const HOST_ID_FORMAT: Self = Self(DO_NOT_RETRY | 0x18);
    /// The data's offset in the capsule is invalid.
    pub const SGL_OFFSET: Self = Self(DO_NOT_RETRY | 0x16);
    /// The connection damaged the data.
    pub const TRANSPORT: Self = Self(0x22);
    /// The namespace is read-only.
    pub const WRITE_PROTECTED: Self = Self(DO_NOT_RETRY | 0x20);
    /// The range ends beyond the namespace.
    pub const OUT_OF_RANGE: Self = Self(DO_NOT_RETRY | 0x80);
    /// There is no space for the data.
    pub const NO_SPACE: Self = Self(DO_NOT_RETRY | 0x81);
    /// Another host or initiator has reserved the namespace.
    pub const RESERVATION_CONFLICT: Self = Self(DO_NOT_RETRY | 0x83);
    /// There is no such log page.
    pub const INVALID_LOG_PAGE: Self = Self(DO_NOT_RETRY | 0x109);
    /// More event requests than the controller accepts.
    pub const EVENT_LIMIT: Self = Self(DO_NOT_RETRY | 0x105);
    /// Connect: the format of the data is not known.
    pub const CONNECT_FORMAT: Self = Self(DO_NOT_RETRY | 0x180);
    /// Connect: there are too many controllers or queues.
    pub const CONNECT_BUSY: Self = Self(0x181);
    /// Connect: a parameter is invalid; the result tells which.
    pub const CONNECT_INVALID: Self = Self(DO_NOT_RETRY | 0x182);
    /// The host must authenticate itself first.
    pub const AUTHENTICATION: Self = Self(DO_NOT_RETRY | 0x191);
    /// The data could not be written.
    pub const WRITE_FAULT: Self = Self(0x280);
    /// The data could not be read.
    pub const UNRECOVERED_READ: Self = Self(0x281);
    /// The data are not those of the disk.
    pub const COMPARE_FAILED: Self = Self(DO_NOT_RETRY | 0x285);

    /// Status code and type, without the other bits.
    pub fn code(self) -> u16 {
        self.0 & 0x7ff
    }

    /// Whether the command has succeeded.
    pub fn is_success(self) -> bool {
        self.code() == 0
    }

    /// The status of a request of the disk that failed. `writes`: the command changes the disk.
    pub fn of_error(error: &io::Error, writes: bool) -> Self {
        use io::ErrorKind::{InvalidInput, PermissionDenied, QuotaExceeded, ReadOnlyFilesystem, StorageFull};
        match error.kind() {
            StorageFull | QuotaExceeded => Self::NO_SPACE,
            ReadOnlyFilesystem | PermissionDenied => Self::WRITE_PROTECTED,
            InvalidInput => Self::INVALID_FIELD,
            _ if writes => Self::WRITE_FAULT,
            _ => Self::UNRECOVERED_READ,
        }
    }

    /// The error of a command that failed; `None` if it has succeeded.
    pub fn to_error(self) -> Option<io::Error> {
        use io::ErrorKind::{InvalidInput, Other, ReadOnlyFilesystem, StorageFull, Unsupported};
        let kind = match Self(DO_NOT_RETRY | self.code()) {
            _ if self.is_success() => return None,
            Self::NO_SPACE => StorageFull,
            Self::WRITE_PROTECTED => ReadOnlyFilesystem,
            Self::INVALID_OPCODE => Unsupported,
            Self::INVALID_FIELD | Self::OUT_OF_RANGE | Self::INVALID_NAMESPACE => InvalidInput,
            _ => Other,
        };
        Some(io::Error::new(kind, format!("the controller answered: {self}")))
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let code = self.code();
        f.write_str(match code {
            0x00 => "success",
            0x01 => "invalid opcode",
            0x02 => "invalid field",
            0x06 => "internal error",
            0x0b => "invalid namespace",
            0x0c => "command sequence error",
            0x0f => "the length of the data is invalid",
            0x11 => "the type of the SGL is invalid",
            0x22 => "transient transport error",
            0x20 => "the namespace is write protected",
            0x80 => "LBA out of range",
            0x81 => "capacity exceeded",
            0x83 => "reservation conflict",
            0x180 => "incompatible format of the connect data",
            0x181 => "the controller is busy",
            0x182 => "invalid parameters of connect",
            0x191 => "authentication is required",
            0x280 => "write fault",
            0x281 => "unrecovered read error",
            0x285 => "compare failure",
            _ => return write!(f, "status {code:#05x}"),
        })
    }
}
