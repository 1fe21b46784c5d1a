//! The hard disk footer: describes a VHD in its last 512 bytes, with a copy at offset 0 in dynamic
//! and differencing disks.
//!
//! ```text
//!    0 cookie "conectix"   8 features        12 version       16 data offset   24 time stamp
//!   28 creator application 32 creator version 36 creator OS    40 original size 48 current size
//!   56 geometry           60 disk type       64 checksum      68 unique id     84 saved state
//!   85 reserved, zero
//! ```

use super::{Chs, Fault, SECTOR_BYTES, VERSION, VhdError, checksum, field};
use std::fmt;
use uuid::Uuid;

/// Length of a footer in bytes.
pub const FOOTER_BYTES: usize = 512;
/// Length of the footers of Virtual PC before 2004, in bytes.
pub const OLD_FOOTER_BYTES: usize = 511;
/// The cookie of every footer.
const FOOTER_COOKIE: &[u8; 8] = b"conectix";
/// The feature bit that must always be set.
pub const FEATURE_RESERVED: u32 = 2;
/// The data offset of a fixed disk, which has no header.
pub const NO_DATA_OFFSET: u64 = u64::MAX;

/// The creator in our files: that of Windows.
///
/// For a creator that it does not know, QEMU takes the disk size from the geometry, which rounds
/// down and ends near 127 GiB. It uses `current_size` only for "win ", "qem2", "d2v ", "tap\0",
/// "CTXS" and "wa\0\0". A creator of our own would therefore truncate disks there. Every reader
/// knows "win ".
pub const CREATOR_APP: [u8; 4] = *b"win ";
/// The creator version in our files: major version 10, as Windows 10 and later write it, and "DW"
/// as the minor version, which no reader evaluates, to recognise our files.
pub const CREATOR_VERSION: u32 = 0x000a_4457;
/// The creator's operating system in our files: Windows. The only other defined value is Macintosh.
pub const CREATOR_OS: [u8; 4] = *b"Wi2k";

const CHECKSUM_AT: usize = 64;
const STRUCTURE: &str = "footer";

/// The type of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DiskKind {
    /// Type 2.
    Fixed,
    /// Type 3.
    Dynamic,
    /// Type 4.
    Differencing,
}

impl DiskKind {
    const fn number(self) -> u32 {
        match self {
            Self::Fixed => 2,
            Self::Dynamic => 3,
            Self::Differencing => 4,
        }
    }
}

impl fmt::Display for DiskKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fixed => "fixed",
            Self::Dynamic => "dynamic",
            Self::Differencing => "differencing",
        })
    }
}

/// A hard disk footer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Footer {
    /// Bit 0: temporary; bit 1: always set.
    pub features: u32,
    /// Offset of the dynamic header in bytes; [`NO_DATA_OFFSET`] for a fixed disk.
    pub data_offset: u64,
    /// Time of creation, in seconds since 2000-01-01 00:00 UTC.
    pub created_seconds: u32,
    /// The program that created the file.
    pub creator_app: [u8; 4],
    /// The version of that program, with the major version in the upper half.
    pub creator_version: u32,
    /// The operating system of that program.
    pub creator_os: [u8; 4],
    /// Size at creation in bytes.
    pub original_size_bytes: u64,
    /// Current size in bytes. Some creators mean the geometry instead: use [`Footer::size_bytes`].
    pub current_size_bytes: u64,
    /// Cylinders, heads and sectors.
    pub geometry: Chs,
    /// Disk type.
    pub kind: DiskKind,
    /// Identifies the disk; children name their parent by it.
    pub unique_id: Uuid,
    /// Whether the virtual machine is in saved state.
    pub saved_state: bool,
}

impl Footer {
    /// Parses a footer of 512 or 511 bytes that was found at `offset_bytes`. Further bytes are
    /// ignored.
    ///
    /// # Errors
    /// If cookie, checksum, version or type is wrong. Reserved bits and bytes may have any value.
    pub fn parse(bytes: &[u8], offset_bytes: u64) -> Result<Self, VhdError> {
        let fail = |at: u64, fault| {
            Err(VhdError { structure: STRUCTURE, offset_bytes: offset_bytes.saturating_add(at), fault })
        };
        if bytes.len() < OLD_FOOTER_BYTES {
            return fail(0, Fault::TooShort { found_bytes: bytes.len(), expected_bytes: FOOTER_BYTES });
        }
        let bytes = &bytes[..bytes.len().min(FOOTER_BYTES)];
        let u32_at = |at| u32::from_be_bytes(field(bytes, at));
        let u64_at = |at| u64::from_be_bytes(field(bytes, at));
        let cookie = field(bytes, 0);
        if cookie != *FOOTER_COOKIE {
            return fail(0, Fault::Cookie { found: cookie, expected: *FOOTER_COOKIE });
        }
        let (found, expected) = (u32_at(CHECKSUM_AT), checksum(bytes, CHECKSUM_AT..CHECKSUM_AT + 4));
        if found != expected {
            return fail(CHECKSUM_AT as u64, Fault::Checksum { found, expected });
        }
        let version = u32_at(12);
        if version >> 16 != VERSION >> 16 {
            return fail(12, Fault::Version { found: version });
        }
        let kind = match u32_at(60) {
            2 => DiskKind::Fixed,
            3 => DiskKind::Dynamic,
            4 => DiskKind::Differencing,
            found => return fail(60, Fault::DiskType { found }),
        };
        Ok(Self {
            features: u32_at(8),
            data_offset: u64_at(16),
            created_seconds: u32_at(24),
            creator_app: field(bytes, 28),
            creator_version: u32_at(32),
            creator_os: field(bytes, 36),
            original_size_bytes: u64_at(40),
            current_size_bytes: u64_at(48),
            geometry: Chs { cylinders: u16::from_be_bytes(field(bytes, 56)), heads: bytes[58], sectors: bytes[59] },
            kind,
            unique_id: Uuid::from_bytes(field(bytes, 68)),
            saved_state: bytes[84] != 0,
        })
    }

    /// The footer as bytes, with its checksum.
    pub fn to_bytes(&self) -> [u8; FOOTER_BYTES] {
        let mut bytes = [0; FOOTER_BYTES];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(0, FOOTER_COOKIE);
        put(8, &self.features.to_be_bytes());
        put(12, &VERSION.to_be_bytes());
        put(16, &self.data_offset.to_be_bytes());
        put(24, &self.created_seconds.to_be_bytes());
        put(28, &self.creator_app);
        put(32, &self.creator_version.to_be_bytes());
        put(36, &self.creator_os);
        put(40, &self.original_size_bytes.to_be_bytes());
        put(48, &self.current_size_bytes.to_be_bytes());
        put(56, &self.geometry.cylinders.to_be_bytes());
        put(58, &[self.geometry.heads, self.geometry.sectors]);
        put(60, &self.kind.number().to_be_bytes());
        put(68, self.unique_id.as_bytes());
        put(84, &[u8::from(self.saved_state)]);
        let sum = checksum(&bytes, CHECKSUM_AT..CHECKSUM_AT + 4);
        bytes[CHECKSUM_AT..CHECKSUM_AT + 4].copy_from_slice(&sum.to_be_bytes());
        bytes
    }

    /// The bytes of a valid footer, changed for another disk size. Fields that this crate does not
    /// know stay unchanged.
    ///
    /// For some creators the geometry is the size ([`Footer::size_bytes`]). If the geometry cannot
    /// express the new size, such a creator is replaced by that of Windows.
    pub fn resized(bytes: &[u8; FOOTER_BYTES], size_bytes: u64) -> [u8; FOOTER_BYTES] {
        let mut new = *bytes;
        let mut put = |at: usize, value: &[u8]| new[at..at + value.len()].copy_from_slice(value);
        let geometry = Chs::from_size(size_bytes);
        put(48, &size_bytes.to_be_bytes());
        put(56, &geometry.cylinders.to_be_bytes());
        put(58, &[geometry.heads, geometry.sectors]);
        let app: [u8; 4] = field(bytes, 28);
        if matches!(&app, b"vpc " | b"qemu") && geometry != Chs::MAX && geometry.size_bytes() != size_bytes {
            put(28, &CREATOR_APP);
        }
        let sum = checksum(&new, CHECKSUM_AT..CHECKSUM_AT + 4);
        new[CHECKSUM_AT..CHECKSUM_AT + 4].copy_from_slice(&sum.to_be_bytes());
        new
    }

    /// The bytes of a valid footer, changed for a header at `data_offset`.
    pub fn with_data_offset(bytes: &[u8; FOOTER_BYTES], data_offset: u64) -> [u8; FOOTER_BYTES] {
        let mut new = *bytes;
        new[16..24].copy_from_slice(&data_offset.to_be_bytes());
        let sum = checksum(&new, CHECKSUM_AT..CHECKSUM_AT + 4);
        new[CHECKSUM_AT..CHECKSUM_AT + 4].copy_from_slice(&sum.to_be_bytes());
        new
    }

    /// The bytes of a valid footer, with another unique id.
    pub fn with_unique_id(bytes: &[u8; FOOTER_BYTES], unique_id: Uuid) -> [u8; FOOTER_BYTES] {
        let mut new = *bytes;
        new[68..84].copy_from_slice(unique_id.as_bytes());
        let sum = checksum(&new, CHECKSUM_AT..CHECKSUM_AT + 4);
        new[CHECKSUM_AT..CHECKSUM_AT + 4].copy_from_slice(&sum.to_be_bytes());
        new
    }

    /// Whether this program created the file.
    pub fn is_ours(&self) -> bool {
        (self.creator_app, self.creator_version) == (CREATOR_APP, CREATOR_VERSION)
    }

    /// The size of the disk in bytes, a multiple of the sector size.
    ///
    /// It is the current size, except for files by Virtual PC ("vpc ") and old QEMU ("qemu"): their
    /// guests saw the geometry, unless that is at its maximum.
    pub fn size_bytes(&self) -> u64 {
        let current = self.current_size_bytes - self.current_size_bytes % SECTOR_BYTES;
        let means_geometry = matches!(&self.creator_app, b"vpc " | b"qemu") && self.geometry != Chs::MAX;
        match self.geometry.size_bytes() {
            // A geometry larger than the current size would exceed the tables, which were made for
            // that size.
            by_geometry @ 1.. if means_geometry => by_geometry.min(current),
            _ => current,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    pub(crate) fn footer() -> Footer {
        Footer {
            features: FEATURE_RESERVED,
            data_offset: 512,
            created_seconds: 1,
            creator_app: CREATOR_APP,
            creator_version: CREATOR_VERSION,
            creator_os: CREATOR_OS,
            original_size_bytes: 1 << 30,
            current_size_bytes: 1 << 30,
            geometry: Chs::from_size(1 << 30),
            kind: DiskKind::Dynamic,
            unique_id: Uuid::from_u128(0x0102_0304),
            saved_state: false,
        }
    }

    #[test]
    fn old_footers_lack_a_byte() {
        let bytes = footer().to_bytes();
        assert_eq!(Footer::parse(&bytes[..OLD_FOOTER_BYTES], 0).unwrap(), footer());
        let error = Footer::parse(&bytes[..510], 77).unwrap_err();
        assert_eq!(error.fault, Fault::TooShort { found_bytes: 510, expected_bytes: 512 });
        assert_eq!(error.offset_bytes, 77);
    }

    #[test]
    fn a_changed_byte_is_detected() {
        let bytes = footer().to_bytes();
        for index in 0..FOOTER_BYTES {
            let mut bad = bytes;
            bad[index] ^= 0x10;
            assert!(Footer::parse(&bad, 0).is_err(), "a change of byte {index} was not detected");
        }
    }

    #[test]
    fn unknown_types_and_versions_are_refused() {
        let resum = |mut bytes: [u8; 512]| {
            let sum = checksum(&bytes, 64..68);
            bytes[64..68].copy_from_slice(&sum.to_be_bytes());
            bytes
        };
        let mut bytes = footer().to_bytes();
        bytes[63] = 5;
        assert_eq!(Footer::parse(&resum(bytes), 1000).unwrap_err().fault, Fault::DiskType { found: 5 });
        let mut bytes = footer().to_bytes();
        bytes[13] = 2;
        let error = Footer::parse(&resum(bytes), 1000).unwrap_err();
        assert_eq!((error.fault, error.offset_bytes), (Fault::Version { found: 0x0002_0000 }, 1012));
    }

    #[test]
    fn only_virtual_pc_and_old_qemu_mean_the_geometry() {
        let size =
            |creator_app: &[u8; 4], geometry| Footer { creator_app: *creator_app, geometry, ..footer() }.size_bytes();
        let chs = Chs::from_size(1 << 30);
        for app in [b"win ", b"qem2", b"d2v ", b"tap\0", b"CTXS", b"wa\0\0", b"vs  ", b"abcd"] {
            assert_eq!(size(app, chs), 1 << 30);
        }
        for app in [b"vpc ", b"qemu"] {
            assert_eq!(size(app, chs), chs.size_bytes());
            assert_eq!(size(app, Chs::MAX), 1 << 30);
            assert_eq!(size(app, Chs { cylinders: 0, heads: 0, sectors: 0 }), 1 << 30);
            assert_eq!(
                size(app, Chs { cylinders: 65534, heads: 16, sectors: 255 }),
                1 << 30,
                "at most the current size"
            );
        }
        assert_eq!(Footer { current_size_bytes: u64::MAX, ..footer() }.size_bytes(), u64::MAX - 511);
    }

    fn any_footer() -> impl Strategy<Value = Footer> {
        let numbers = (any::<u32>(), any::<u64>(), any::<u32>(), any::<[u8; 4]>(), any::<u32>(), any::<[u8; 4]>());
        let sizes = (any::<u64>(), any::<u64>(), any::<(u16, u8, u8)>());
        let kind = prop_oneof![Just(DiskKind::Fixed), Just(DiskKind::Dynamic), Just(DiskKind::Differencing)];
        (numbers, sizes, kind, any::<u128>(), any::<bool>()).prop_map(|(numbers, sizes, kind, id, saved_state)| {
            Footer {
                features: numbers.0,
                data_offset: numbers.1,
                created_seconds: numbers.2,
                creator_app: numbers.3,
                creator_version: numbers.4,
                creator_os: numbers.5,
                original_size_bytes: sizes.0,
                current_size_bytes: sizes.1,
                geometry: Chs { cylinders: sizes.2.0, heads: sizes.2.1, sectors: sizes.2.2 },
                kind,
                unique_id: Uuid::from_u128(id),
                saved_state,
            }
        })
    }

    proptest! {
        #[test]
        fn roundtrip(footer in any_footer(), at in any::<u64>()) {
            prop_assert_eq!(Footer::parse(&footer.to_bytes(), at).unwrap(), footer);
        }

        #[test]
        fn another_data_offset_changes_nothing_else(footer in any_footer(), data_offset: u64) {
            let new = Footer::with_data_offset(&footer.to_bytes(), data_offset);
            prop_assert_eq!(Footer::parse(&new, 0).unwrap(), Footer { data_offset, ..footer });
        }

        #[test]
        fn another_unique_id_changes_nothing_else(footer in any_footer(), id: u128) {
            let unique_id = Uuid::from_u128(id);
            let new = Footer::with_unique_id(&footer.to_bytes(), unique_id);
            prop_assert_eq!(Footer::parse(&new, 0).unwrap(), Footer { unique_id, ..footer });
        }

        #[test]
        fn arbitrary_bytes_never_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..600), at in any::<u64>(), cookie: bool) {
            if cookie && bytes.len() >= 68 {
                bytes[..8].copy_from_slice(FOOTER_COOKIE);
                let end = bytes.len().min(FOOTER_BYTES);
                let sum = checksum(&bytes[..end], 64..68);
                bytes[64..68].copy_from_slice(&sum.to_be_bytes());
            }
            if let Ok(footer) = Footer::parse(&bytes, at) {
                footer.size_bytes();
            }
        }
    }
}
