//! Sense data: why a command has failed, in the fixed format (SPC-4, 4.5.3).

use crate::{put, u32_at};
use std::{fmt, io};

/// Sense keys.
mod key {
    pub(super) const NO_SENSE: u8 = 0x0;
    pub(super) const NOT_READY: u8 = 0x2;
    pub(super) const MEDIUM_ERROR: u8 = 0x3;
    pub(super) const HARDWARE_ERROR: u8 = 0x4;
    pub(super) const ILLEGAL_REQUEST: u8 = 0x5;
    pub(super) const UNIT_ATTENTION: u8 = 0x6;
    pub(super) const DATA_PROTECT: u8 = 0x7;
    pub(super) const COPY_ABORTED: u8 = 0xa;
    pub(super) const ABORTED_COMMAND: u8 = 0xb;
    pub(super) const MISCOMPARE: u8 = 0xe;
}

/// A sense key with an additional sense code and its qualifier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sense {
    /// The sense key.
    pub key: u8,
    /// The additional sense code, and its qualifier.
    pub code: (u8, u8),
    /// The information field.
    pub information: Option<u32>,
}

const fn sense(key: u8, code: u8, qualifier: u8) -> Sense {
    Sense { key, code: (code, qualifier), information: None }
}

impl Sense {
    /// Length in bytes.
    pub const BYTES: usize = 18;

    /// Nothing to tell.
    pub const NONE: Self = sense(key::NO_SENSE, 0, 0);
    /// The command is not supported.
    pub const INVALID_OPCODE: Self = sense(key::ILLEGAL_REQUEST, 0x20, 0);
    /// The range ends behind the disk.
    pub const OUT_OF_RANGE: Self = sense(key::ILLEGAL_REQUEST, 0x21, 0);
    /// A field of the command descriptor block.
    pub const INVALID_FIELD: Self = sense(key::ILLEGAL_REQUEST, 0x24, 0);
    /// There is no such logical unit.
    pub const NO_UNIT: Self = sense(key::ILLEGAL_REQUEST, 0x25, 0);
    /// A field of the parameter list.
    pub const INVALID_PARAMETER: Self = sense(key::ILLEGAL_REQUEST, 0x26, 0);
    /// A reservation is to be released by one that does not hold it, or with another scope or type.
    pub const INVALID_RELEASE: Self = sense(key::ILLEGAL_REQUEST, 0x26, 0x04);
    /// The length of the parameter list.
    pub const PARAMETER_LENGTH: Self = sense(key::ILLEGAL_REQUEST, 0x1a, 0);
    /// A list of a copy names more units than it may.
    pub const TOO_MANY_UNITS: Self = sense(key::ILLEGAL_REQUEST, 0x26, 0x06);
    /// A list of a copy names a unit in a way that is not supported.
    pub const UNIT_TYPE: Self = sense(key::ILLEGAL_REQUEST, 0x26, 0x07);
    /// A list of a copy has more segments than it may.
    pub const TOO_MANY_SEGMENTS: Self = sense(key::ILLEGAL_REQUEST, 0x26, 0x08);
    /// A segment of a copy has a type that is not supported.
    pub const SEGMENT_TYPE: Self = sense(key::ILLEGAL_REQUEST, 0x26, 0x09);
    /// A list of a copy has data of its own.
    pub const INLINE_DATA: Self = sense(key::ILLEGAL_REQUEST, 0x26, 0x0b);
    /// A token is of a type that is not supported.
    pub const TOKEN_TYPE: Self = sense(key::ILLEGAL_REQUEST, 0x23, 0x01);
    /// A token is not known, or was not used for too long.
    pub const TOKEN_UNKNOWN: Self = sense(key::ILLEGAL_REQUEST, 0x23, 0x04);
    /// The data that a token stands for have changed.
    pub const TOKEN_REVOKED: Self = sense(key::ILLEGAL_REQUEST, 0x23, 0x06);
    /// A token has another length than tokens have.
    pub const TOKEN_LENGTH: Self = sense(key::ILLEGAL_REQUEST, 0x23, 0x0a);
    /// A copy has ended before all was copied.
    pub const COPY_ABORTED: Self = sense(key::COPY_ABORTED, 0, 0);
    /// A copy names a logical unit that the initiator does not have.
    pub const COPY_UNREACHABLE: Self = sense(key::COPY_ABORTED, 0x0d, 0x02);
    /// A copy names a logical unit with blocks of another length.
    pub const COPY_UNIT: Self = sense(key::COPY_ABORTED, 0x0d, 0x03);
    /// Values cannot be saved.
    pub const NO_SAVING: Self = sense(key::ILLEGAL_REQUEST, 0x39, 0);
    /// No room for one more registration.
    pub const NO_REGISTRATION: Self = sense(key::ILLEGAL_REQUEST, 0x55, 0x04);
    /// The disk is read-only.
    pub const WRITE_PROTECTED: Self = sense(key::DATA_PROTECT, 0x27, 0);
    /// No space is left for the disk's file.
    pub const NO_SPACE: Self = sense(key::DATA_PROTECT, 0x27, 0x07);
    /// The contents differ.
    pub const MISCOMPARE: Self = sense(key::MISCOMPARE, 0x1d, 0);
    /// A read has failed.
    pub const READ_ERROR: Self = sense(key::MEDIUM_ERROR, 0x11, 0);
    /// A write has failed.
    pub const WRITE_ERROR: Self = sense(key::MEDIUM_ERROR, 0x0c, 0);
    /// Something in the target has failed.
    pub const INTERNAL: Self = sense(key::HARDWARE_ERROR, 0x44, 0);
    /// The logical unit is not ready for now.
    pub const NOT_READY: Self = sense(key::NOT_READY, 0x04, 0);
    /// Data were damaged on the way.
    pub const DAMAGED: Self = sense(key::ABORTED_COMMAND, 0x47, 0x05);
    /// The data of a write did not come in the right amount.
    pub const WRONG_DATA: Self = sense(key::ABORTED_COMMAND, 0x0c, 0x0d);
    /// The initiator announces another amount of data than the command has.
    pub const WRONG_LENGTH: Self = sense(key::ILLEGAL_REQUEST, 0x0e, 0x03);
    /// More or fewer unsolicited data than the command allows.
    pub const UNEXPECTED_DATA: Self = sense(key::ABORTED_COMMAND, 0x0c, 0x0c);
    /// The initiator has just logged in.
    pub const NEW_NEXUS: Self = sense(key::UNIT_ATTENTION, 0x29, 0);
    /// The logical unit was reset.
    pub const UNIT_RESET: Self = sense(key::UNIT_ATTENTION, 0x29, 0x03);
    /// The capacity has changed.
    pub const CAPACITY_CHANGED: Self = sense(key::UNIT_ATTENTION, 0x2a, 0x09);
    /// Another initiator has removed reservations.
    pub const RESERVATIONS_PREEMPTED: Self = sense(key::UNIT_ATTENTION, 0x2a, 0x03);
    /// Another initiator has released the reservation.
    pub const RESERVATIONS_RELEASED: Self = sense(key::UNIT_ATTENTION, 0x2a, 0x04);
    /// Another initiator has removed the registration.
    pub const REGISTRATION_PREEMPTED: Self = sense(key::UNIT_ATTENTION, 0x2a, 0x05);
    /// Logical units have come or gone.
    pub const UNITS_CHANGED: Self = sense(key::UNIT_ATTENTION, 0x3f, 0x0e);

    /// The sense data of an error of the disk. `writes` tells what the command did.
    pub fn of_error(error: &io::Error, writes: bool) -> Self {
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::NO_SPACE,
            io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied if writes => Self::WRITE_PROTECTED,
            io::ErrorKind::Unsupported => Self::INVALID_OPCODE,
            _ if writes => Self::WRITE_ERROR,
            _ => Self::READ_ERROR,
        }
    }

    /// Whether it tells that something has happened, and not that the command is wrong.
    pub fn is_attention(&self) -> bool {
        self.key == key::UNIT_ATTENTION
    }

    /// Whether the command, and not the disk, is the cause.
    pub fn is_refusal(&self) -> bool {
        !matches!(self.key, key::MEDIUM_ERROR | key::HARDWARE_ERROR) && *self != Self::NO_SPACE
    }

    /// Decodes sense data in the fixed format or with descriptors. What is missing is 0.
    pub fn decode(data: &[u8]) -> Self {
        let at = |index: usize| data.get(index).copied().unwrap_or(0);
        match at(0) & 0x7f {
            0x72 | 0x73 => sense(at(1) & 15, at(2), at(3)),
            first => Self {
                information: (first & 0x7e == 0x70 && at(0) & 0x80 != 0).then(|| u32_at(data, 3)),
                ..sense(at(2) & 15, at(12), at(13))
            },
        }
    }

    /// The kind of the corresponding `io::Error`.
    pub fn to_error_kind(&self) -> io::ErrorKind {
        match *self {
            Self::NO_SPACE => io::ErrorKind::StorageFull,
            Self::INVALID_OPCODE => io::ErrorKind::Unsupported,
            Self { key: key::DATA_PROTECT, .. } => io::ErrorKind::ReadOnlyFilesystem,
            Self { key: key::ILLEGAL_REQUEST, .. } => io::ErrorKind::InvalidInput,
            _ => io::ErrorKind::Other,
        }
    }

    /// Whether the command may succeed if it is sent again: the disk becomes ready, or the transfer
    /// has failed.
    pub fn is_transient(&self) -> bool {
        match self.key {
            key::ABORTED_COMMAND | key::UNIT_ATTENTION => true,
            key::NOT_READY => matches!(self.code, (0x04, 0x00 | 0x01 | 0x0a)),
            _ => false,
        }
    }

    /// Encodes it.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        out[0] = 0x70;
        out[2] = self.key;
        if let Some(information) = self.information {
            out[0] |= 0x80;
            put(&mut out, 3, &information.to_be_bytes());
        }
        out[7] = (Self::BYTES - 8) as u8;
        (out[12], out[13]) = self.code;
        out
    }
}

impl fmt::Display for Sense {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let key = match self.key {
            key::NO_SENSE => "no sense",
            key::NOT_READY => "not ready",
            key::MEDIUM_ERROR => "medium error",
            key::HARDWARE_ERROR => "hardware error",
            key::ILLEGAL_REQUEST => "illegal request",
            key::UNIT_ATTENTION => "unit attention",
            key::DATA_PROTECT => "data protect",
            key::ABORTED_COMMAND => "aborted command",
            key::MISCOMPARE => "miscompare",
            _ => "sense key",
        };
        let what = match self.code {
            (0x04, _) => ", logical unit not ready",
            (0x0c, 0x00) => ", write error",
            (0x11, _) => ", unrecovered read error",
            (0x20, 0) => ", command not supported",
            (0x21, 0) => ", block address out of range",
            (0x24, 0) => ", invalid field in the command",
            (0x25, 0) => ", logical unit not supported",
            (0x27, 0x07) => ", no space left for the thin disk",
            (0x27, _) => ", write protected",
            (0x29, _) => ", power on or reset",
            (0x2a, _) => ", parameters changed",
            (0x3f, 0x0e) => ", logical units have changed",
            (0x44, _) => ", internal failure of the target",
            (0x47, _) => ", transfer damaged",
            _ => "",
        };
        let (code, qualifier) = self.code;
        write!(f, "{key}{what} (sense {:x}/{code:02x}/{qualifier:02x})", self.key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_formats_are_decoded() {
        let told = Sense { information: Some(77), ..Sense::READ_ERROR };
        assert_eq!(Sense::decode(&told.encode()), told);
        assert_eq!(Sense::decode(&[0x72, 0x07, 0x27, 0x07]), Sense::NO_SPACE);
        assert_eq!(Sense::decode(&[]), Sense::NONE);
        assert_eq!(Sense::NO_SPACE.to_error_kind(), io::ErrorKind::StorageFull);
        assert_eq!(told.to_string(), "medium error, unrecovered read error (sense 3/11/00)");
        assert!(Sense::NEW_NEXUS.is_transient() && !told.is_transient() && !Sense::NO_SPACE.is_transient());
    }
}
