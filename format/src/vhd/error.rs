//! Errors of parsing a VHD structure.

use std::fmt;

/// A structure that contradicts the specification.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{structure} at offset {offset_bytes}: found {fault}, expected {}", fault.expected())]
pub struct VhdError {
    /// The structure, as the specification calls it.
    pub structure: &'static str,
    /// Offset of the wrong field in the file, in bytes.
    pub offset_bytes: u64,
    /// What is wrong with the structure.
    pub fault: Fault,
}

/// What is wrong with a structure. `Display` shows what was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// The file ends within the structure.
    TooShort {
        /// Number of bytes available.
        found_bytes: usize,
        /// Number of bytes in the structure.
        expected_bytes: usize,
    },
    /// The structure does not begin with its cookie.
    Cookie {
        /// The bytes found in its place.
        found: [u8; 8],
        /// The cookie of the structure.
        expected: [u8; 8],
    },
    /// The stored checksum does not match the structure's bytes.
    Checksum {
        /// The stored checksum.
        found: u32,
        /// The computed checksum.
        expected: u32,
    },
    /// The major version is not 1.
    Version {
        /// Major version in the upper half, minor in the lower.
        found: u32,
    },
    /// The disk type is not fixed, dynamic or differencing.
    DiskType {
        /// The number found.
        found: u32,
    },
    /// The block size is not a power of two of at least one sector.
    BlockSize {
        /// The block size found, in bytes.
        found_bytes: u32,
    },
    /// A parent locator is longer than any path.
    LocatorLength {
        /// The length found, in bytes.
        found_bytes: u32,
    },
}

impl Fault {
    /// Describes what was expected.
    pub fn expected(&self) -> String {
        match self {
            Self::TooShort { expected_bytes, .. } => format!("{expected_bytes} bytes"),
            Self::Cookie { expected, .. } => format!("the cookie \"{}\"", expected.escape_ascii()),
            Self::Checksum { expected, .. } => format!("checksum {expected:#010x}, computed from its bytes"),
            Self::Version { .. } => "version 1.0".into(),
            Self::DiskType { .. } => "type 2 (fixed), 3 (dynamic) or 4 (differencing)".into(),
            Self::BlockSize { .. } => "a power of two of at least 512 bytes".into(),
            Self::LocatorLength { .. } => format!("at most {} bytes", super::MAX_LOCATOR_BYTES),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooShort { found_bytes, .. } => write!(f, "{found_bytes} bytes"),
            Self::Cookie { found, .. } => write!(f, "\"{}\" in place of its cookie", found.escape_ascii()),
            Self::Checksum { found, .. } => write!(f, "checksum {found:#010x}"),
            Self::Version { found } => write!(f, "version {}.{}", found >> 16, found & 0xffff),
            Self::DiskType { found } => write!(f, "disk type {found}"),
            Self::BlockSize { found_bytes } => write!(f, "a block size of {found_bytes} bytes"),
            Self::LocatorLength { found_bytes } => write!(f, "a parent locator of {found_bytes} bytes"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_say_where_and_what() {
        let error =
            VhdError { structure: "footer", offset_bytes: 1064, fault: Fault::Checksum { found: 1, expected: 2 } };
        assert_eq!(
            error.to_string(),
            "footer at offset 1064: found checksum 0x00000001, expected checksum 0x00000002, computed from its bytes"
        );
    }
}
