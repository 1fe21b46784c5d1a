//! The header: the GUIDs of the file and the place of its log (MS-VHDX 2.2.2).
//!
//! There are two slots. An update writes the slot that is not current, with the next sequence
//! number, so that a torn write leaves the other slot valid. [`select`] finds the current one.

use super::{
    Invalid, MIB, Result,
    bytes::{checksum, crc_without, get_guid, get_u16, get_u32, get_u64, put, signature},
};
use uuid::Uuid;

/// Size of a header in bytes; the checksum covers all of it.
pub const HEADER_BYTES: usize = 4096;
const STRUCTURE: &str = "header";

/// One of the two places of a header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Slot {
    /// At 64 KiB.
    First,
    /// At 128 KiB.
    Second,
}

impl Slot {
    /// Offset of the slot in the file.
    pub fn offset_bytes(self) -> u64 {
        match self {
            Slot::First => 64 << 10,
            Slot::Second => 128 << 10,
        }
    }

    /// The other slot.
    pub fn other(self) -> Self {
        match self {
            Slot::First => Slot::Second,
            Slot::Second => Slot::First,
        }
    }
}

/// A header whose signature and checksum are valid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// Of two valid headers, the one with the higher number is current.
    pub sequence_number: u64,
    /// Replaced before the first change of the file in a session.
    pub file_write_guid: Uuid,
    /// Replaced before the first guest-visible change in a session. Children identify their parent
    /// by it.
    pub data_write_guid: Uuid,
    /// Only log entries with this GUID are valid; nil if the log is empty.
    pub log_guid: Uuid,
    /// Must be 0.
    pub log_version: u16,
    /// Must be 1.
    pub version: u16,
    /// Length of the log in bytes, a multiple of 1 MiB.
    pub log_len_bytes: u32,
    /// Offset of the log in the file in bytes, a multiple of 1 MiB.
    pub log_offset_bytes: u64,
}

impl Header {
    /// Parses the first [`HEADER_BYTES`] of `bytes`. Checks only signature and checksum: a header
    /// of a later version can be the current one too, so [`Header::validate`] checks the rest.
    ///
    /// # Errors
    /// If there are too few bytes, or signature or checksum are wrong.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let bytes = bytes.get(..HEADER_BYTES).ok_or_else(|| Invalid::short(STRUCTURE, bytes.len(), HEADER_BYTES))?;
        signature(STRUCTURE, bytes, 0, b"head")?;
        checksum(STRUCTURE, bytes, 4)?;
        Ok(Self {
            sequence_number: get_u64(bytes, 8),
            file_write_guid: get_guid(bytes, 16),
            data_write_guid: get_guid(bytes, 32),
            log_guid: get_guid(bytes, 48),
            log_version: get_u16(bytes, 64),
            version: get_u16(bytes, 66),
            log_len_bytes: get_u32(bytes, 68),
            log_offset_bytes: get_u64(bytes, 72),
        })
    }

    /// The header as bytes, with its checksum.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; HEADER_BYTES];
        put(&mut bytes, 0, b"head");
        put(&mut bytes, 8, &self.sequence_number.to_le_bytes());
        put(&mut bytes, 16, &self.file_write_guid.to_bytes_le());
        put(&mut bytes, 32, &self.data_write_guid.to_bytes_le());
        put(&mut bytes, 48, &self.log_guid.to_bytes_le());
        put(&mut bytes, 64, &self.log_version.to_le_bytes());
        put(&mut bytes, 66, &self.version.to_le_bytes());
        put(&mut bytes, 68, &self.log_len_bytes.to_le_bytes());
        put(&mut bytes, 72, &self.log_offset_bytes.to_le_bytes());
        let crc = crc_without(&bytes, 4);
        put(&mut bytes, 4, &crc.to_le_bytes());
        bytes
    }

    /// Checks the version, which must be 1, and the log version, which must be 0 unless the log is
    /// empty.
    ///
    /// # Errors
    /// If a version is unsupported.
    pub fn validate(&self) -> Result<()> {
        if self.version != 1 {
            return Err(Invalid::new(STRUCTURE, 66, format!("version {}", self.version), "version 1"));
        }
        if self.log_version != 0 && !self.log_guid.is_nil() {
            return Err(Invalid::new(STRUCTURE, 64, format!("log version {}", self.log_version), "version 0"));
        }
        Ok(())
    }

    /// Checks offset and length of the log: multiples of 1 MiB, outside the header section, not
    /// empty.
    ///
    /// # Errors
    /// If the log cannot lie there.
    pub fn validate_log_place(&self) -> Result<()> {
        let (offset_bytes, len_bytes) = (self.log_offset_bytes, u64::from(self.log_len_bytes));
        if len_bytes == 0 || len_bytes % MIB != 0 {
            return Err(Invalid::new(STRUCTURE, 68, format!("log length {len_bytes}"), "a multiple of 1 MiB above 0"));
        }
        if offset_bytes < MIB || offset_bytes % MIB != 0 || offset_bytes.checked_add(len_bytes).is_none() {
            return Err(Invalid::new(
                STRUCTURE,
                72,
                format!("log offset {offset_bytes}"),
                "a multiple of 1 MiB from 1 MiB on",
            ));
        }
        Ok(())
    }
}

/// Finds the current one of two slots and returns its header. `first` and `second` are the bytes of
/// the slots.
///
/// Some tools write equal sequence numbers. They are accepted if the headers are byte-identical.
///
/// # Errors
/// If neither slot is valid (with the first slot's error), or if different headers have the same
/// sequence number.
pub fn select(first: &[u8], second: &[u8]) -> Result<(Slot, Header)> {
    match (Header::parse(first), Header::parse(second)) {
        (Ok(a), Ok(b)) if a.sequence_number == b.sequence_number => {
            if first.get(..HEADER_BYTES) == second.get(..HEADER_BYTES) {
                return Ok((Slot::First, a));
            }
            let found = format!("two different headers with the sequence number {}", a.sequence_number);
            Err(Invalid::new(STRUCTURE, 8, found, "different sequence numbers, or identical headers"))
        }
        (Ok(a), Ok(b)) if a.sequence_number > b.sequence_number => Ok((Slot::First, a)),
        (Ok(a), Err(_)) => Ok((Slot::First, a)),
        (_, Ok(b)) => Ok((Slot::Second, b)),
        (Err(error), Err(_)) => Err(error),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    prop_compose! {
        fn headers()(sequence_number: u64, guids: [u128; 3], log_version: u16, version: u16, log_len_bytes: u32, log_offset_bytes: u64) -> Header {
            Header {
                sequence_number,
                file_write_guid: Uuid::from_u128(guids[0]),
                data_write_guid: Uuid::from_u128(guids[1]),
                log_guid: Uuid::from_u128(guids[2]),
                log_version,
                version,
                log_len_bytes,
                log_offset_bytes,
            }
        }
    }

    fn header(sequence_number: u64) -> Header {
        Header {
            sequence_number,
            file_write_guid: Uuid::from_u128(1),
            data_write_guid: Uuid::from_u128(2),
            log_guid: Uuid::nil(),
            log_version: 0,
            version: 1,
            log_len_bytes: 1 << 20,
            log_offset_bytes: 1 << 20,
        }
    }

    #[test]
    fn the_higher_sequence_number_is_current() {
        let (old, new) = (header(7).to_bytes(), header(8).to_bytes());
        assert_eq!(select(&old, &new).unwrap(), (Slot::Second, header(8)));
        assert_eq!(select(&new, &old).unwrap(), (Slot::First, header(8)));
    }

    #[test]
    fn a_torn_header_leaves_the_other_slot_valid() {
        let (old, mut new) = (header(7).to_bytes(), header(8).to_bytes());
        new[600] ^= 1;
        assert_eq!(select(&old, &new).unwrap(), (Slot::First, header(7)));
        assert_eq!(select(&new, &old).unwrap(), (Slot::Second, header(7)));
        assert_eq!(select(&new, &new).unwrap_err().offset_bytes, 4);
    }

    #[test]
    fn equal_numbers_need_equal_headers() {
        let one = header(7);
        let other = Header { file_write_guid: Uuid::from_u128(9), ..header(7) };
        assert_eq!(select(&one.to_bytes(), &one.to_bytes()).unwrap().0, Slot::First);
        assert!(select(&one.to_bytes(), &other.to_bytes()).is_err());
    }

    #[test]
    fn a_guid_is_stored_in_windows_order() {
        let id: Uuid = "83ed0ec3-24c8-49a6-a959-5e4bf1288bfb".parse().unwrap();
        let bytes = Header { file_write_guid: id, ..header(1) }.to_bytes();
        assert_eq!(bytes[16..26], [0xc3, 0x0e, 0xed, 0x83, 0xc8, 0x24, 0xa6, 0x49, 0xa9, 0x59]);
    }

    #[test]
    fn invalid_log_places_are_refused() {
        for (log_offset_bytes, log_len_bytes) in
            [(0, 1 << 20), (1 << 20, 0), (1 << 20, 4096), ((1 << 20) + 4096, 1 << 20), (u64::MAX << 20, 1 << 20)]
        {
            assert!(Header { log_offset_bytes, log_len_bytes, ..header(1) }.validate_log_place().is_err());
        }
        assert!(header(1).validate_log_place().is_ok());
    }

    proptest! {
        #[test]
        fn roundtrip(header in headers()) {
            prop_assert_eq!(Header::parse(&header.to_bytes()), Ok(header));
        }

        #[test]
        fn every_changed_byte_is_detected(header in headers(), at in 0usize..HEADER_BYTES, flip in 1u8..) {
            let mut bytes = header.to_bytes();
            bytes[at] ^= flip;
            prop_assert!(Header::parse(&bytes).is_err());
        }

        #[test]
        fn hostile_bytes_do_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..5000)) {
            let _ = Header::parse(&bytes);
        }
    }
}
