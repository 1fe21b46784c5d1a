//! Parent locators: the parent's path in the notations of different systems.
//!
//! ```text
//! W2ru  relative path, UTF-16LE, such as .\parent.vhd   Wi2r  relative, old code page (deprecated)
//! W2ku  absolute path, UTF-16LE                         Wi2k  absolute, old code page (deprecated)
//! MacX  file URL in UTF-8, as XenServer writes it       Mac   alias record, only usable on a Mac
//! ```

use super::{Fault, MAX_LOCATOR_BYTES, SECTOR_BYTES, VhdError};

/// Platform codes whose data can be decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LocatorKind {
    /// "W2ru".
    WindowsRelative,
    /// "W2ku".
    WindowsAbsolute,
    /// "Wi2r".
    OldWindowsRelative,
    /// "Wi2k".
    OldWindowsAbsolute,
    /// "MacX".
    FileUrl,
}

impl LocatorKind {
    /// The platform code.
    pub const fn code(self) -> u32 {
        u32::from_be_bytes(match self {
            Self::WindowsRelative => *b"W2ru",
            Self::WindowsAbsolute => *b"W2ku",
            Self::OldWindowsRelative => *b"Wi2r",
            Self::OldWindowsAbsolute => *b"Wi2k",
            Self::FileUrl => *b"MacX",
        })
    }

    /// Decodes a platform code; `None` if it is unknown.
    pub(crate) fn from_code(code: u32) -> Option<Self> {
        [
            Self::WindowsRelative,
            Self::WindowsAbsolute,
            Self::OldWindowsRelative,
            Self::OldWindowsAbsolute,
            Self::FileUrl,
        ]
        .into_iter()
        .find(|kind| kind.code() == code)
    }
}

/// A decoded parent path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LocatorData {
    /// Relative to the child's folder.
    Relative(String),
    /// An absolute path.
    Absolute(String),
}

impl LocatorData {
    /// The path.
    pub fn text(&self) -> &str {
        match self {
            Self::Relative(path) | Self::Absolute(path) => path,
        }
    }
}

/// A parent locator entry: the place of a locator's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LocatorEntry {
    /// The platform code as stored; [`LocatorKind::from_code`] decodes it.
    pub code: u32,
    /// Space reserved for the data: in sectors by the specification, in bytes as Windows writes it.
    pub data_space: u32,
    /// Length of the data in bytes.
    pub data_length_bytes: u32,
    /// Offset of the data in the file, in bytes.
    pub data_offset: u64,
}

impl LocatorEntry {
    /// Space reserved for the data in bytes. A value too small to be bytes is taken as sectors.
    pub fn space_bytes(&self) -> u64 {
        let space = u64::from(self.data_space);
        if self.data_space >= self.data_length_bytes { space } else { space * SECTOR_BYTES }
    }

    /// Whether the entry is in use.
    pub fn is_used(&self) -> bool {
        self.code != 0
    }

    /// The decoded platform code; `None` for a code that is unknown or unused.
    pub fn kind(&self) -> Option<LocatorKind> {
        LocatorKind::from_code(self.code)
    }

    /// The number of bytes to read for this locator's data.
    ///
    /// # Errors
    /// If the data is longer than any path. `entry_offset_bytes` is the entry's offset, for the
    /// error.
    pub fn checked_length(&self, entry_offset_bytes: u64) -> Result<usize, VhdError> {
        if self.data_length_bytes > MAX_LOCATOR_BYTES {
            return Err(VhdError {
                structure: "parent locator",
                offset_bytes: entry_offset_bytes,
                fault: Fault::LocatorLength { found_bytes: self.data_length_bytes },
            });
        }
        Ok(self.data_length_bytes as usize)
    }

    /// Decodes the locator's data; `None` for an unknown platform code or an empty path.
    pub fn decode(&self, data: &[u8]) -> Option<LocatorData> {
        let kind = self.kind()?;
        let text = match kind {
            LocatorKind::WindowsRelative | LocatorKind::WindowsAbsolute => {
                let units = data.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]]));
                char::decode_utf16(units.take_while(|&unit| unit != 0))
                    .map(|c| c.unwrap_or(char::REPLACEMENT_CHARACTER))
                    .collect()
            }
            LocatorKind::OldWindowsRelative | LocatorKind::OldWindowsAbsolute | LocatorKind::FileUrl => {
                let end = data.iter().position(|&byte| byte == 0).unwrap_or(data.len());
                String::from_utf8_lossy(&data[..end]).into_owned()
            }
        };
        match kind {
            _ if text.is_empty() => None,
            LocatorKind::WindowsRelative | LocatorKind::OldWindowsRelative => Some(LocatorData::Relative(text)),
            LocatorKind::WindowsAbsolute | LocatorKind::OldWindowsAbsolute => Some(LocatorData::Absolute(text)),
            LocatorKind::FileUrl => {
                let path = text.strip_prefix("file://localhost").or_else(|| text.strip_prefix("file://"))?;
                Some(if path.starts_with('/') {
                    LocatorData::Absolute(path.into())
                } else {
                    LocatorData::Relative(path.into())
                })
            }
        }
    }
}

/// Encodes a path as the data of a W2ru or W2ku locator.
pub fn encode_path(path: &str) -> Vec<u8> {
    path.encode_utf16().flat_map(u16::to_le_bytes).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn entry(kind: LocatorKind) -> LocatorEntry {
        LocatorEntry { code: kind.code(), ..Default::default() }
    }

    #[test]
    fn every_locator_kind_is_decoded() {
        let wide = encode_path(".\\Grüße.vhd\0rest");
        assert_eq!(
            entry(LocatorKind::WindowsRelative).decode(&wide),
            Some(LocatorData::Relative(".\\Grüße.vhd".into()))
        );
        assert_eq!(entry(LocatorKind::WindowsAbsolute).decode(&wide[..7]), Some(LocatorData::Absolute(".\\G".into())));
        assert_eq!(
            entry(LocatorKind::OldWindowsRelative).decode(b".\\a.vhd"),
            Some(LocatorData::Relative(".\\a.vhd".into()))
        );
        assert_eq!(
            entry(LocatorKind::OldWindowsAbsolute).decode(b"C:\\a.vhd\0"),
            Some(LocatorData::Absolute("C:\\a.vhd".into()))
        );
        assert_eq!(
            entry(LocatorKind::FileUrl).decode(b"file://./a.vhd"),
            Some(LocatorData::Relative("./a.vhd".into()))
        );
        assert_eq!(
            entry(LocatorKind::FileUrl).decode(b"file:///d/a.vhd"),
            Some(LocatorData::Absolute("/d/a.vhd".into()))
        );
        assert_eq!(entry(LocatorKind::FileUrl).decode(b"http://x"), None);
        assert_eq!(LocatorEntry { code: u32::from_be_bytes(*b"Mac "), ..Default::default() }.decode(b"x"), None);
        assert_eq!(entry(LocatorKind::WindowsRelative).decode(&[]), None);
    }

    #[test]
    fn lengths_are_bounded() {
        let of = |data_length_bytes| LocatorEntry { data_length_bytes, ..entry(LocatorKind::WindowsAbsolute) };
        assert_eq!(of(65536).checked_length(0).unwrap(), 65536);
        assert_eq!(of(65537).checked_length(576).unwrap_err().offset_bytes, 576);
    }

    proptest! {
        #[test]
        fn roundtrip(path in "[^\0]{1,300}") {
            let decoded = entry(LocatorKind::WindowsRelative).decode(&encode_path(&path));
            prop_assert_eq!(decoded, Some(LocatorData::Relative(path)));
        }

        #[test]
        fn arbitrary_bytes_never_panic(code: u32, data in prop::collection::vec(any::<u8>(), 0..100), known in 0usize..6) {
            let kinds = [b"W2ru", b"W2ku", b"Wi2r", b"Wi2k", b"MacX"];
            let code = kinds.get(known).map_or(code, |kind| u32::from_be_bytes(**kind));
            let _ = LocatorEntry { code, ..Default::default() }.decode(&data);
        }
    }
}
