//! How a structure can be wrong.

use std::fmt;

/// A structure that contradicts the specification.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{structure} at offset {offset_bytes}: found {fault}, expected {}", fault.expected())]
pub struct VhdError {
    /// Which structure, in the words of the specification.
    pub structure: &'static str,
    /// Where the wrong field is in the file.
    pub offset_bytes: u64,
    /// What is wrong with it.
    pub fault: Fault,
}

/// What is wrong with a structure. Displayed as what was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// The file ends inside it.
    TooShort {
        /// Bytes that are there.
        found_bytes: usize,
        /// Bytes that it takes.
        expected_bytes: usize,
    },
    /// It does not begin with its cookie.
    Cookie {
        /// What it begins with.
        found: [u8; 8],
        /// The cookie.
        expected: [u8; 8],
    },
    /// Its checksum does not match its bytes.
    Checksum {
        /// The checksum that is stored.
        found: u32,
        /// The checksum of the bytes.
        expected: u32,
    },
    /// A major version other than 1.
    Version {
        /// Major in the upper, minor in the lower half.
        found: u32,
    },
    /// A disk type other than fixed, dynamic and differencing.
    DiskType {
        /// The type.
        found: u32,
    },
    /// A block size that is no power of two from a sector up.
    BlockSize {
        /// In bytes.
        found_bytes: u32,
    },
    /// A parent locator that is longer than any path.
    LocatorLength {
        /// In bytes.
        found_bytes: u32,
    },
}

impl Fault {
    /// What should have been found.
    pub fn expected(&self) -> String {
        match self {
            Self::TooShort { expected_bytes, .. } => format!("{expected_bytes} bytes"),
            Self::Cookie { expected, .. } => format!("the cookie \"{}\"", expected.escape_ascii()),
            Self::Checksum { expected, .. } => format!("checksum {expected:#010x}, which is that of the bytes"),
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
            "footer at offset 1064: found checksum 0x00000001, expected checksum 0x00000002, which is that of the bytes"
        );
    }
}
