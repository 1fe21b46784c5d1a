//! The dynamic disk header: the place of the BAT, the block size, and the parent of a differencing
//! disk.
//!
//! ```text
//!    0 cookie "cxsparse"   8 data offset, all ones   16 table offset   24 version
//!   28 max table entries  32 block size              36 checksum
//!   40 parent unique id   56 parent time stamp       64 parent name, 512 bytes of UTF-16BE
//!  576 8 parent locators of 24 bytes                768 reserved, zero
//!
//!   a locator:   0 platform code   4 data space   8 data length   12 reserved   16 data offset
//! ```

use super::{Fault, LocatorEntry, SECTOR_BYTES, VERSION, VhdError, checksum, field};
use uuid::Uuid;

/// Length of a dynamic header in bytes.
pub const HEADER_BYTES: usize = 1024;
/// The cookie of every dynamic header.
const HEADER_COOKIE: &[u8; 8] = b"cxsparse";
/// Number of parent locators in a header.
pub const LOCATOR_COUNT: usize = 8;

const CHECKSUM_AT: usize = 36;
const NAME_AT: usize = 64;
const LOCATORS_AT: usize = 576;
const LOCATOR_ENTRY_BYTES: usize = 24;
const LOCATORS_END: usize = LOCATORS_AT + LOCATOR_COUNT * LOCATOR_ENTRY_BYTES;
const STRUCTURE: &str = "dynamic disk header";

/// A dynamic disk header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DynamicHeader {
    /// Offset of the BAT in the file, in bytes.
    pub table_offset: u64,
    /// Number of BAT entries.
    pub max_table_entries: u32,
    /// Size of a payload block in bytes: a power of two.
    pub block_bytes: u32,
    /// The parent's unique id; nil if there is no parent.
    pub parent_id: Uuid,
    /// Modification time of the parent's file, in seconds since 2000-01-01 00:00 UTC.
    pub parent_modified_seconds: u32,
    /// The parent's file name, truncated if it does not fit.
    pub parent_name: String,
    /// The places of the parent's paths.
    pub locators: [LocatorEntry; LOCATOR_COUNT],
}

impl DynamicHeader {
    /// Parses a header of at least 1024 bytes that was found at `offset_bytes`.
    ///
    /// # Errors
    /// If cookie, checksum, version or block size is wrong. The caller must check offsets and
    /// counts against the file.
    pub fn parse(bytes: &[u8], offset_bytes: u64) -> Result<Self, VhdError> {
        let fail = |at: u64, fault| {
            Err(VhdError { structure: STRUCTURE, offset_bytes: offset_bytes.saturating_add(at), fault })
        };
        let Some(bytes) = bytes.get(..HEADER_BYTES) else {
            return fail(0, Fault::TooShort { found_bytes: bytes.len(), expected_bytes: HEADER_BYTES });
        };
        let u32_at = |at| u32::from_be_bytes(field(bytes, at));
        let u64_at = |at| u64::from_be_bytes(field(bytes, at));
        let cookie = field(bytes, 0);
        if cookie != *HEADER_COOKIE {
            return fail(0, Fault::Cookie { found: cookie, expected: *HEADER_COOKIE });
        }
        let (found, expected) = (u32_at(CHECKSUM_AT), checksum(bytes, CHECKSUM_AT..CHECKSUM_AT + 4));
        if found != expected {
            return fail(CHECKSUM_AT as u64, Fault::Checksum { found, expected });
        }
        let version = u32_at(24);
        if version >> 16 != VERSION >> 16 {
            return fail(24, Fault::Version { found: version });
        }
        let block_bytes = u32_at(32);
        if !block_bytes.is_power_of_two() || u64::from(block_bytes) < SECTOR_BYTES {
            return fail(32, Fault::BlockSize { found_bytes: block_bytes });
        }
        let locators = std::array::from_fn(|index| {
            let at = LOCATORS_AT + index * LOCATOR_ENTRY_BYTES;
            LocatorEntry {
                code: u32_at(at),
                data_space: u32_at(at + 4),
                data_length_bytes: u32_at(at + 8),
                data_offset: u64_at(at + 16),
            }
        });
        let name = bytes[NAME_AT..LOCATORS_AT].chunks_exact(2).map(|pair| u16::from_be_bytes([pair[0], pair[1]]));
        let parent_name = char::decode_utf16(name.take_while(|&unit| unit != 0))
            .map(|c| c.unwrap_or(char::REPLACEMENT_CHARACTER))
            .collect();
        Ok(Self {
            table_offset: u64_at(16),
            max_table_entries: u32_at(28),
            block_bytes,
            parent_id: Uuid::from_bytes(field(bytes, 40)),
            parent_modified_seconds: u32_at(56),
            parent_name,
            locators,
        })
    }

    /// The bytes of a valid header, changed for a table of `max_table_entries` at `table_offset`.
    /// Only the first 512 bytes change, so writing one sector replaces the header.
    pub fn with_table(bytes: &[u8; HEADER_BYTES], table_offset: u64, max_table_entries: u32) -> [u8; HEADER_BYTES] {
        let mut new = *bytes;
        new[16..24].copy_from_slice(&table_offset.to_be_bytes());
        new[28..32].copy_from_slice(&max_table_entries.to_be_bytes());
        seal(&mut new);
        new
    }

    /// The bytes of a valid header, changed for the parent that `self` names: unique id, time
    /// stamp, name and locators. All other bytes stay unchanged.
    pub fn with_parent_of(&self, bytes: &[u8; HEADER_BYTES]) -> [u8; HEADER_BYTES] {
        let mut new = *bytes;
        self.put_parent(&mut new);
        seal(&mut new);
        new
    }

    /// The header as bytes, with its checksum. The name is truncated between characters, leaving
    /// room for a terminator.
    pub fn to_bytes(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(0, HEADER_COOKIE);
        put(8, &u64::MAX.to_be_bytes());
        put(16, &self.table_offset.to_be_bytes());
        put(24, &VERSION.to_be_bytes());
        put(28, &self.max_table_entries.to_be_bytes());
        put(32, &self.block_bytes.to_be_bytes());
        self.put_parent(&mut bytes);
        seal(&mut bytes);
        bytes
    }

    fn put_parent(&self, bytes: &mut [u8; HEADER_BYTES]) {
        bytes[NAME_AT..LOCATORS_END].fill(0);
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(40, self.parent_id.as_bytes());
        put(56, &self.parent_modified_seconds.to_be_bytes());
        let mut at = NAME_AT;
        for character in self.parent_name.chars() {
            let mut units = [0; 2];
            let units = character.encode_utf16(&mut units);
            if at + units.len() * 2 > LOCATORS_AT - 2 {
                break;
            }
            for unit in units {
                put(at, &unit.to_be_bytes());
                at += 2;
            }
        }
        for (index, locator) in self.locators.iter().enumerate() {
            let at = LOCATORS_AT + index * LOCATOR_ENTRY_BYTES;
            put(at, &locator.code.to_be_bytes());
            put(at + 4, &locator.data_space.to_be_bytes());
            put(at + 8, &locator.data_length_bytes.to_be_bytes());
            put(at + 16, &locator.data_offset.to_be_bytes());
        }
    }
}

/// Sets the checksum.
fn seal(bytes: &mut [u8; HEADER_BYTES]) {
    let sum = checksum(bytes, CHECKSUM_AT..CHECKSUM_AT + 4);
    bytes[CHECKSUM_AT..CHECKSUM_AT + 4].copy_from_slice(&sum.to_be_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn header() -> DynamicHeader {
        DynamicHeader {
            table_offset: 4096,
            max_table_entries: 512,
            block_bytes: 2 << 20,
            parent_id: Uuid::from_u128(9),
            parent_modified_seconds: 8,
            parent_name: "Eltern \u{1f427}.vhd".into(),
            locators: Default::default(),
        }
    }

    #[test]
    fn a_changed_byte_is_detected() {
        let bytes = header().to_bytes();
        for index in 0..HEADER_BYTES {
            let mut bad = bytes;
            bad[index] ^= 0x10;
            assert!(DynamicHeader::parse(&bad, 0).is_err(), "a change of byte {index} was not detected");
        }
        assert!(matches!(DynamicHeader::parse(&bytes[..1023], 0).unwrap_err().fault, Fault::TooShort { .. }));
    }

    #[test]
    fn block_sizes_are_powers_of_two() {
        for bad in [0, 1, 256, 511, 3 << 20, u32::MAX] {
            let error =
                DynamicHeader::parse(&DynamicHeader { block_bytes: bad, ..header() }.to_bytes(), 512).unwrap_err();
            assert_eq!(
                error,
                VhdError { structure: STRUCTURE, offset_bytes: 544, fault: Fault::BlockSize { found_bytes: bad } }
            );
        }
        for good in [512, 4096, 512 << 10, 2 << 20, 1 << 31] {
            assert!(DynamicHeader::parse(&DynamicHeader { block_bytes: good, ..header() }.to_bytes(), 512).is_ok());
        }
    }

    #[test]
    fn names_are_cut_between_characters() {
        let long = "\u{1f427}".repeat(200);
        let parsed = DynamicHeader::parse(&DynamicHeader { parent_name: long, ..header() }.to_bytes(), 0).unwrap();
        assert_eq!(parsed.parent_name, "\u{1f427}".repeat(127));
    }

    #[test]
    fn data_space_may_be_sectors_or_bytes() {
        let entry =
            |data_space, data_length_bytes| LocatorEntry { data_space, data_length_bytes, ..Default::default() };
        assert_eq!(entry(512, 40).space_bytes(), 512);
        assert_eq!(entry(1, 40).space_bytes(), 512);
        assert_eq!(entry(0, 40).space_bytes(), 0);
        assert_eq!(entry(2, 600).space_bytes(), 1024);
        assert_eq!(entry(u32::MAX - 1, u32::MAX).space_bytes(), (u64::from(u32::MAX) - 1) * 512);
    }

    fn any_locator() -> impl Strategy<Value = LocatorEntry> {
        (any::<u32>(), any::<u32>(), any::<u32>(), any::<u64>()).prop_map(
            |(code, data_space, data_length_bytes, data_offset)| LocatorEntry {
                code,
                data_space,
                data_length_bytes,
                data_offset,
            },
        )
    }

    proptest! {
        #[test]
        fn roundtrip(
            table_offset: u64, max_table_entries: u32, shift in 9u32..32, id: u128, parent_modified_seconds: u32,
            parent_name in "[^\0]{0,100}", locators in prop::array::uniform8(any_locator()),
        ) {
            let header = DynamicHeader {
                table_offset, max_table_entries, block_bytes: 1 << shift, parent_id: Uuid::from_u128(id),
                parent_modified_seconds, parent_name, locators,
            };
            prop_assert_eq!(DynamicHeader::parse(&header.to_bytes(), 512).unwrap(), header);
        }

        #[test]
        fn another_parent_changes_nothing_else(
            id: u128, parent_modified_seconds: u32, parent_name in "[^\0]{0,100}",
            locators in prop::array::uniform8(any_locator()), reserved: u8, other_name in "[^\0]{0,100}",
        ) {
            let mut bytes = DynamicHeader { parent_name: other_name, ..header() }.to_bytes();
            // A reserved byte of a later minor version.
            bytes[900] = reserved;
            seal(&mut bytes);
            let parent_id = Uuid::from_u128(id);
            let parent = DynamicHeader { parent_id, parent_modified_seconds, parent_name, locators, ..header() };
            let new = parent.with_parent_of(&bytes);
            prop_assert_eq!(new[900], reserved);
            prop_assert_eq!(DynamicHeader::parse(&new, 512).unwrap(), parent);
        }

        #[test]
        fn arbitrary_bytes_never_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..1100), at in any::<u64>(), cookie: bool) {
            if cookie && bytes.len() >= HEADER_BYTES {
                bytes[..8].copy_from_slice(HEADER_COOKIE);
                bytes[24..28].copy_from_slice(&VERSION.to_be_bytes());
                let block_bytes = 1u32 << (bytes[33] % 32);
                bytes[32..36].copy_from_slice(&block_bytes.to_be_bytes());
                let sum = checksum(&bytes[..HEADER_BYTES], 36..40);
                bytes[36..40].copy_from_slice(&sum.to_be_bytes());
            }
            if let Ok(header) = DynamicHeader::parse(&bytes, at) {
                for locator in header.locators {
                    locator.space_bytes();
                }
            }
        }
    }
}
